"""Input and result of a placement: devices, the network between them, the stages of a run.

Pure numbers: no files, no sockets, no torch. Shapes: N devices, S stages. Sizes in bytes, times in seconds, rates in
bytes per second, speeds in floating-point operations per second. Source: DT-FM (Yuan et al., 2022), section 3,
generalised: stages and devices may differ, links may be asymmetric or missing, devices may stay idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

IDLE: Final = -1  # stage of a device that serves none

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Network:
    """Links from each device (row) to each other (column), [N, N]."""

    delay_s: Matrix  # one way; 0 on the diagonal
    rate: Matrix  # infinite on the diagonal; 0 if there is no connection

    def __post_init__(self) -> None:
        """Raises ValueError unless both are square, of one size, with finite delays >= 0 and rates >= 0."""
        n = len(self.delay_s)
        if self.delay_s.shape != (n, n) or self.rate.shape != (n, n):
            raise ValueError("delays and rates must be square matrices of one size")
        if not (np.isfinite(self.delay_s).all() and (self.delay_s >= 0).all()):
            raise ValueError("a delay is not a finite number of seconds >= 0")
        if np.isnan(self.rate).any() or (self.rate < 0).any():
            raise ValueError("a rate is not a number >= 0")

    def both_ways(self) -> Network:
        """Each pair's delay and rate, averaged over both directions; a pair with one dead direction is dead."""
        dead = (self.rate == 0) | (self.rate.T == 0)
        rate = np.where(dead, 0.0, (self.rate + self.rate.T) / 2)
        return Network((self.delay_s + self.delay_s.T) / 2, rate)

    def seconds(self, size: float) -> Matrix:
        """Time of a message of `size` bytes over each link, [N, N]; infinite if there is no link, 0 on the diagonal."""
        with np.errstate(divide="ignore", invalid="ignore"):
            carried = np.where(self.rate > 0, size / self.rate, np.inf)
        times = self.delay_s + carried
        np.fill_diagonal(times, 0.0)
        return times


@dataclass(frozen=True, slots=True)
class PlanDevice:
    """One machine. `place`: its location, for display."""

    name: str
    speed: float = np.inf
    memory: float = np.inf
    place: str = ""


@dataclass(frozen=True, slots=True)
class StageWork:
    """The requirements of one stage, per microbatch unless stated otherwise."""

    gradient: float  # bytes that its peers average per step
    activation: float  # bytes to the next stage, and the same number back; unused for the last stage
    flops: float = 0.0  # forward and backward together
    memory: float = 0.0  # bytes that a peer of this stage must have


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """The input: devices, network, stages in the order of the pipeline, and `microbatches` per step."""

    devices: tuple[PlanDevice, ...]
    network: Network
    stages: tuple[StageWork, ...]
    microbatches: int = 1  # of all pipelines together
    sizes: tuple[int, ...] | None = None  # number of peers of each stage, or None if the search chooses it

    def __post_init__(self) -> None:
        """Raises ValueError if the parts are inconsistent."""
        if not self.devices or not self.stages or self.microbatches < 1:
            raise ValueError("at least one device, one stage and one microbatch are needed")
        if len(self.network.delay_s) != len(self.devices):
            raise ValueError(f"{len(self.devices)} devices, but links between {len(self.network.delay_s)}")
        if self.sizes is not None and (len(self.sizes) != len(self.stages) or min(self.sizes) < 1):
            raise ValueError(f"sizes of {len(self.sizes)} stages, at least one device each; {len(self.stages)} stages")

    @property
    def stages_alike(self) -> bool:
        """True if any order of the stages is equally good."""
        return len(set(self.stages)) == 1 and (self.sizes is None or len(set(self.sizes)) == 1)


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """The stage of each device (`IDLE` for none), and the partners in the next stage.

    `follows`: for each of the S - 1 boundaries, tuples of (device, next device).
    """

    stage_of: tuple[int, ...]
    follows: tuple[tuple[tuple[int, int], ...], ...] = ()

    def members(self, stage: int) -> tuple[int, ...]:
        """The devices of a stage, in ascending order."""
        return tuple(device for device, at in enumerate(self.stage_of) if at == stage)


class NoPlacement(ValueError):
    """No placement exists; the text explains the reason to the user."""
