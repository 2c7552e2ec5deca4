"""A placement and what it is for: devices, the network between them, the stages of a run.

Pure numbers: no files, no sockets, no torch. Shapes: N devices, S stages. Sizes are bytes, times seconds, rates bytes
a second, speeds floating-point operations a second. Source: DT-FM (Yuan et al., 2022), section 3, made wider: stages
and devices may differ, links may be asymmetric or missing, devices may stay idle.
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
    rate: Matrix  # infinite on the diagonal; 0: cannot be reached

    def __post_init__(self) -> None:
        """ValueError for matrices that are not square, of one size, finite delays >= 0 and rates >= 0."""
        n = len(self.delay_s)
        if self.delay_s.shape != (n, n) or self.rate.shape != (n, n):
            raise ValueError("delays and rates must be square matrices of one size")
        if not (np.isfinite(self.delay_s).all() and (self.delay_s >= 0).all()):
            raise ValueError("a delay is not a finite number of seconds >= 0")
        if np.isnan(self.rate).any() or (self.rate < 0).any():
            raise ValueError("a rate is not a number >= 0")

    def both_ways(self) -> Network:
        """Each pair's delay and rate averaged over the two directions; a pair with one dead direction is dead."""
        dead = (self.rate == 0) | (self.rate.T == 0)
        rate = np.where(dead, 0.0, (self.rate + self.rate.T) / 2)
        return Network((self.delay_s + self.delay_s.T) / 2, rate)

    def seconds(self, size: float) -> Matrix:
        """Time of a message of `size` bytes over each link, [N, N]; infinite where there is none, 0 to oneself."""
        with np.errstate(divide="ignore", invalid="ignore"):
            carried = np.where(self.rate > 0, size / self.rate, np.inf)
        times = self.delay_s + carried
        np.fill_diagonal(times, 0.0)
        return times


@dataclass(frozen=True, slots=True)
class PlanDevice:
    """One machine. `place`: of devices near each other, for people to read."""

    name: str
    speed: float = np.inf
    memory: float = np.inf
    place: str = ""


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one stage asks for; of one microbatch where not said otherwise."""

    gradient: float  # bytes that its peers average in a step
    activation: float  # bytes to the next stage; as many come back. Of the last stage: not used
    flops: float = 0.0  # forward and backward together
    memory: float = 0.0  # bytes that a peer of this stage must have


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """Who there is and what is to be done: stages in the order of the pipeline, `microbatches` in a step."""

    devices: tuple[PlanDevice, ...]
    network: Network
    stages: tuple[StageWork, ...]
    microbatches: int = 1  # of all pipelines together
    sizes: tuple[int, ...] | None = None  # peers of each stage, where that is settled; else the search settles it

    def __post_init__(self) -> None:
        """ValueError when the parts do not fit together."""
        if not self.devices or not self.stages or self.microbatches < 1:
            raise ValueError("a device, a stage and a microbatch are needed")
        if len(self.network.delay_s) != len(self.devices):
            raise ValueError(f"{len(self.devices)} devices, links of {len(self.network.delay_s)}")
        if self.sizes is not None and (len(self.sizes) != len(self.stages) or min(self.sizes) < 1):
            raise ValueError(f"sizes of {len(self.sizes)} stages, one device each at least; {len(self.stages)} stages")

    @property
    def stages_alike(self) -> bool:
        """True when any order of the stages is as good."""
        return len(set(self.stages)) == 1 and (self.sizes is None or len(set(self.sizes)) == 1)


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """The stage of each device, `IDLE` for none; and who follows whom: [S - 1] tuples of (device, next device)."""

    stage_of: tuple[int, ...]
    follows: tuple[tuple[tuple[int, int], ...], ...] = ()

    def members(self, stage: int) -> tuple[int, ...]:
        """The devices of a stage, in their order."""
        return tuple(device for device, at in enumerate(self.stage_of) if at == stage)


class NoPlacement(ValueError):
    """No placement can be had; the text says why, for a person."""
