"""Random swarms that average over grids: whoever dies in whatever round, all end with the same bits of the plain sum.

Of a microbatch the model has a number in place of a gradient, and sums are made in float32, in the order of a group's
senders, as parts are.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import pytest

from peerd.core.messages.swarm import Mb, Position
from peerd.machine.positions.phases import Phase
from peerd.machine.swarm.events import Note, Output, SendMove, SendPrepare
from tests.kit.amount import some
from tests.worlds.machines.modelswarm import Member, RememberingSwarm, WeighingSwarm

TOLERANCE = 1e-5


def value_of(mb: Mb) -> np.float32:
    """The number that stands for a microbatch's gradient."""
    drawn = hashlib.sha256(f"{mb.trainer} {mb.seq}".encode()).digest()
    return np.float32(int.from_bytes(drawn[:4], "big") / 2**32 - 0.5)


class Summed(Counter[Mb]):
    """What is in a sum, and the sum."""

    value = np.float32(0)

    def __add__(self, other: Counter[Mb]) -> Summed:  # type: ignore[override]
        found = Summed(super().__add__(other))
        found.value = self.value + (other.value if isinstance(other, Summed) else np.float32(0))
        return found


class Grids(RememberingSwarm):
    """Stages of as many peers as given, in groups of three; more of them die than elsewhere."""

    group_size = 3

    def __init__(self, seed: int, members: int, delayed: bool = False) -> None:
        self.members_of_stage = members
        self.steps: dict[tuple[int, Position], bytes] = {}
        self.orders = Counter[str]()
        self.notes: list[str] = []
        super().__init__(seed, delayed)
        self.clients = False

    def happen(self, faults: bool) -> None:
        super().happen(faults)
        if faults and self.conductor.phase is Phase.CLOSING and self.rng.random() < 0.02:
            self.kill(self.rng.choice(sorted(self.members)))
        if self.conductor.phase in (Phase.OPEN, Phase.CLOSING):
            for close in self.conductor._closing.stages:
                close.sums.check(self.conductor.batches.due)

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Note):
                self.notes.append(output.text)
            elif isinstance(output, SendPrepare):
                single = len(output.group) - len(output.listeners) == 1
                self.orders["copy" if single and output.listeners else "join" if output.brings else "own"] += 1
        super().take(outputs)

    def brought(self, m: Member, call: SendPrepare) -> Counter[Mb] | None:
        found = super().brought(m, call)
        if found is None or isinstance(found, Summed):
            return found
        summed = Summed(found)
        for mb in found:
            summed.value += value_of(mb)
        return summed

    def digest(self, name: str, mean: Counter[Mb]) -> bytes:
        assert isinstance(mean, Summed)
        return hashlib.sha256(super().digest(name, mean) + mean.value.tobytes()).digest()

    def move(self, m: Member, call: SendMove) -> None:
        if call.commit and m.prepared == call.target and m.mean is not None:
            assert isinstance(m.mean, Summed)
            exact = math.fsum(float(value_of(mb)) for mb in m.mean)
            assert abs(float(m.mean.value) - exact) < TOLERANCE
            bits = m.mean.value.tobytes()
            assert self.steps.setdefault((m.stage, call.target), bits) == bits, "stage-mates step with different bits"
        super().move(m, call)


class WeighingGrids(Grids, WeighingSwarm):
    """Grids of members some of which rest for a while."""


@pytest.mark.slow
@pytest.mark.parametrize("members", [4, 7, 9, 11])
@pytest.mark.parametrize("seed", some(range(12), 1))
def test_all_end_with_the_same_bits_of_the_plain_sum_whoever_dies(seed: int, members: int) -> None:
    swarm = Grids(100 * members + seed, members, delayed=bool(seed % 2))
    play(swarm)
    assert swarm.orders["join"]
    assert swarm.orders["copy"]


@pytest.mark.slow
@pytest.mark.parametrize("members", [7, 11])
@pytest.mark.parametrize("seed", some(range(8), 1))
def test_all_end_with_the_same_bits_of_the_plain_sum_whoever_rests(seed: int, members: int) -> None:
    swarm = WeighingGrids(100 * members + seed, members, delayed=bool(seed % 2))
    play(swarm)
    assert swarm.orders["join"]


def test_in_such_grids_members_do_rest() -> None:
    swarm = WeighingGrids(700, 7)
    for _ in range(1500):
        swarm.happen(faults=False)
    assert swarm.rested


def play(swarm: Grids) -> None:
    """Let the swarm step with faults, and then without, and check what it has done."""
    for _ in range(2500):
        swarm.happen(faults=True)
    swarm.check()
    before = max(position.step for _, position in swarm.histories)
    for _ in range(2500):
        swarm.happen(faults=False)
    swarm.check()
    after = max(position.step for _, position in swarm.histories)
    assert after >= before + 3, f"the swarm stalled at step {after}: {swarm.conductor.waits_for()}"
    assert swarm.steps
    assert not [note for note in swarm.notes if "different sums" in note]
