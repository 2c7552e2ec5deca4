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

from peerd.messages.swarm import Mb, Position
from peerd.swarm.events import MemberGone, Note, Output, SendMove, SendPrepare
from peerd.swarm.positions.phases import Phase
from tests.kit.amount import some
from tests.worlds.machines.modelswarm import Member, RememberingSwarm, WeighingSwarm

TOLERANCE = 1e-5


def value_of(mb: Mb) -> np.float32:
    """The number that stands for a microbatch's gradient."""
    drawn = hashlib.sha256(f"{mb.trainer} {mb.seq}".encode()).digest()
    return np.float32(int.from_bytes(drawn[:4], "big") / 2**32 - 0.5)


class Summed(Counter[Mb]):
    """What is in a sum, and the sum; how often each member's session brought a gradient, and one that leads."""

    value = np.float32(0)
    leads = 0

    def __init__(self, *of: Counter[Mb]) -> None:
        super().__init__(*of)
        self.brought = Counter[tuple[str, int]]()

    def __add__(self, other: Counter[Mb]) -> Summed:  # type: ignore[override]
        found = Summed(super().__add__(other))
        assert isinstance(other, Summed)
        found.value = self.value + other.value
        found.brought = self.brought + other.brought
        found.leads = self.leads + other.leads
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
        if faults:
            self.disturb(self.rng.random())
        self.check_sums()

    def check_sums(self) -> None:
        due = self.conductor.batches.due
        for close in self.conductor._closing.stages:
            close.sums.check(due)
            brought = [mb for attempt in close.attempts.values() for mb in attempt.brought]
            assert len(brought) == len({*brought}), "two attempts sum the same microbatch"
            assert not any(top.contents.intersection(brought) for top in close.sums.tops), "it is in a sum already"
            assert all(close.sums.is_of_use(one.parts, one.copies) for one in close.attempts.values())
            assert not close.settled or not close.fault(due)

    def disturb(self, choice: float) -> None:
        """Kill one in the middle of averaging, or all who keep a sum while groups join others; or break a connection
        for a moment.
        """
        closes = self.conductor.phase is Phase.CLOSING
        if choice < 0.02 and closes:
            self.kill(self.rng.choice(sorted(self.members)))
        elif choice < 0.04:
            self.blink(self.rng.choice(sorted(self.members)))
        elif choice < 0.06:
            joins = [c for c in self.conductor._closing.stages if any(one.parts for one in c.attempts.values())]
            tops = [top for close in joins for top in close.sums.tops]
            for name in sorted(self.rng.choice(tops).members()) if tops else ():
                if name in self.members:
                    self.kill(name)

    def blink(self, name: str) -> None:
        """A member's connection breaks; it will say the same of itself again, with all that it holds."""
        self.members[name].known = False
        self.tell(MemberGone(name))

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
        if m.name not in call.listeners:
            summed.brought, summed.leads = Counter([(m.name, m.session)]), int(call.leads)
        return summed

    def digest(self, name: str, mean: Counter[Mb]) -> bytes:
        assert isinstance(mean, Summed)
        return hashlib.sha256(super().digest(name, mean) + mean.value.tobytes()).digest()

    def move(self, m: Member, call: SendMove) -> None:
        if call.commit and m.prepared == call.target and m.mean is not None:
            assert isinstance(m.mean, Summed)
            assert set(m.mean.brought.values()) == {1}, "a gradient was brought twice"
            assert m.mean.leads == 1 or (self.factors and not m.mean.leads), "what one member brings is not in it once"
            exact = math.fsum(float(value_of(mb)) for mb in m.mean)
            assert abs(float(m.mean.value) - exact) < TOLERANCE
            bits = m.mean.value.tobytes()
            assert self.steps.setdefault((m.stage, call.target), bits) == bits, "stage-mates step with different bits"
        super().move(m, call)


class FactorGrids(Grids):
    """Grids that sum first factors, and then second ones of the same; few calls are lost, since each costs them all."""

    factors = True
    loss = 0.005


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


@pytest.mark.slow
@pytest.mark.parametrize("members", [7, 9])
@pytest.mark.parametrize("seed", some(range(8), 1))
def test_second_factors_are_of_the_same_microbatches_as_the_first_whoever_dies(seed: int, members: int) -> None:
    swarm = FactorGrids(100 * members + seed, members, delayed=bool(seed % 2))
    play(swarm)
    assert swarm.orders["join"]


def test_in_such_grids_members_do_rest() -> None:
    swarm = WeighingGrids(700, 7)
    for _ in range(4000):
        swarm.happen(faults=False)
        if swarm.rested:
            return
    raise AssertionError("nobody rested")


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
    assert not [note for note in swarm.notes if "different sums" in note or "cannot be right" in note]
    assert not [note for note in swarm.notes if "does not fit" in note or "does not store" in note]
    assert not swarm.absent, "members were to bring sums that they had let go of"
