"""Stochastic wiring (SWARM, appendix C): which peer of a stage gets the next microbatch.

Interleaved weighted round robin: each peer has a virtual finish time that grows by cost / measured speed when it is
picked; the smallest is next. Speed is an average of throughput, which is also correct if calls overlap. A failed peer
rests, twice as long after each failure. It rests longer if the failure took long to notice and nothing was answered
meanwhile, as long as other peers are available: an unreachable peer that sends no error must not cost every step a
timeout. One object serves one stage; `now` is monotonic time in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from peerd.pipeline.routes.priors import expected_s
from peerd.wire.rate.backoff import backoff_s

BACKWARD_COST = 2.5  # in forwards; same as in the paper's code
# Virtual seconds per unit before the first answer of a peer without a published rate: probed at once, never flooded.
_UNMEASURED_S = 1.0
_SMOOTHING = 0.1
_FIRST_REST_S = 0.5
_LONGEST_REST_S = 30.0
_REST_PER_LOST_S = 4.0  # rest as a multiple of the time that a failure took
_LONGEST_LOST_REST_S = 300.0


@dataclass(slots=True)
class _Peer:
    finish: float
    tie: float
    weight: float = 0.0  # sum of the average's coefficients; corrects its start from zero
    seconds_per_unit: float = 0.0
    last_answer: float = float("-inf")
    rests_until: float = float("-inf")
    lost_until: float = float("-inf")  # until then it is picked only if no other peer is available
    full_until: float = float("-inf")  # it asked for a rest until then and has not failed
    held_at: float = float("-inf")
    held_until: float = float("-inf")  # until then others are picked, while one call tests whether it is back
    failures: int = 0
    failed_at: float = float("-inf")

    @property
    def left_until(self) -> float:
        """Time before which the peer must not be picked."""
        return max(self.rests_until, self.held_until)


class StochasticWiring:
    """Picks peers of one stage; `rng` breaks ties, so that trainers do not all start with the same peer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._peers: dict[str, _Peer] = {}
        self._rates: dict[str, float] = {}  # as published

    def update(self, living: Iterable[str], rates: Mapping[str, float] | None = None) -> None:
        """Set the peers that serve the stage; new ones start level with the next one in turn.

        `rates`: published work per second of each; see `priors`.
        """
        names = sorted(set(living))
        self._rates = dict(rates or {})
        floor = min((p.finish for p in self._peers.values()), default=0.0)
        for name in names:
            if name not in self._peers:
                self._peers[name] = _Peer(floor, self._rng.random())
        for name in self._peers.keys() - set(names):
            del self._peers[name]

    def pick(self, now: float, cost: float, avoid: Collection[str] = (), never: Collection[str] = ()) -> str | None:
        """The next peer for a task of `cost` units, or None if all rest.

        Peers in `avoid` are picked only if no other is available, those in `never` not at all.
        """
        names = self._awake(now, avoid, never)
        if not names:
            return None
        name = min(names, key=self._turn)
        self.charge(name, cost)
        return name

    def turns(self, now: float, avoid: Collection[str] = (), never: Collection[str] = ()) -> list[str]:
        """All peers that `pick` may return, in the order of their turns."""
        return sorted(self._awake(now, avoid, never), key=self._turn)

    def charge(self, name: str, cost: float) -> None:
        """Charge `name` for a task of `cost` units, whether or not `pick` chose it."""
        peer = self._peers[name]
        peer.finish += cost * (self.seconds_per_unit(name) or self._expected_s(name))
        peer.tie = self._rng.random()

    def rates(self) -> dict[str, float]:
        """The peers with their published rates; 0 if unknown."""
        return {name: self._rates.get(name, 0.0) for name in self._peers}

    def _expected_s(self, name: str) -> float:
        """Assumed seconds per sample, on the virtual clock of the fair order, of a peer that has not answered yet."""
        if not self._rates.get(name):
            return _UNMEASURED_S
        measured_s = {other: seconds for other in self._peers if (seconds := self.seconds_per_unit(other))}
        units = {other: rate * (1.0 + BACKWARD_COST) for other, rate in self._rates.items()}
        return expected_s(measured_s, units).get(name, _UNMEASURED_S)

    def _awake(self, now: float, avoid: Collection[str], never: Collection[str]) -> list[str]:
        peers = sorted(self._peers.items())
        rested = [name for name, peer in peers if peer.left_until <= now and name not in never]
        awake = [name for name in rested if self._peers[name].lost_until <= now] or rested
        return [name for name in awake if name not in avoid] or awake

    def _turn(self, name: str) -> tuple[float, float]:
        return self._peers[name].finish, self._peers[name].tie

    def answered(self, name: str, cost: float, started: float, now: float) -> None:
        """Record that `name` finished a task that was sent at `started`."""
        peer = self._peers.get(name)
        if peer is None:
            return
        interval = max(now - max(started, peer.last_answer), 1e-6)
        first = peer.weight == 0.0
        peer.weight += _SMOOTHING * (1.0 - peer.weight)
        peer.seconds_per_unit += _SMOOTHING * (interval / cost - peer.seconds_per_unit)
        peer.last_answer, peer.failures = now, 0
        if first:  # the charges of an unmeasured peer were guesses
            others = [p.finish for n, p in self._peers.items() if n != name]
            peer.finish = min([peer.finish, *others])

    def failed(self, name: str, now: float, took_s: float = 0.0) -> int:
        """Record that `name` refused or did not answer, so that it is not picked for a while. Returns the number of its
        failures since its last answer.

        `took_s`: seconds until the failure was known.
        """
        peer = self._peers.get(name)
        if peer is None:
            return 0
        if now - took_s >= peer.held_at:
            peer.held_until = float("-inf")  # the test call has ended
        # Calls that were sent together and fail together count as one failure.
        if peer.rests_until <= now and (peer.lost_until <= now or now - took_s >= peer.failed_at):
            peer.failures += 1
            peer.failed_at = now
            peer.rests_until = now + backoff_s(peer.failures, _FIRST_REST_S, _LONGEST_REST_S)
            if peer.last_answer <= now - took_s:  # otherwise it is alive but slow
                peer.lost_until = now + min(_REST_PER_LOST_S * took_s, _LONGEST_LOST_REST_S)
            return peer.failures
        return peer.failures + 1

    def rest(self, name: str, until: float) -> None:
        """Record that `name` asked for no calls before `until`, which is not a failure."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.rests_until = max(peer.rests_until, until)
            peer.full_until = max(peer.full_until, until)
            peer.held_until = float("-inf")

    def hold(self, name: str, now: float, until: float) -> None:
        """Pick other peers until `until`, or until a call to `name` was answered, failed, or asked for a rest."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.held_at, peer.held_until = now, until

    def let_go(self, name: str) -> bool:
        """Record that `name` has answered a call in any way; returns True if it was held."""
        peer = self._peers.get(name)
        if peer is None or peer.held_until == float("-inf"):
            return False
        peer.held_until = float("-inf")
        return True

    def rested(self, name: str) -> None:
        """End the rest of `name`, because it can be reached again."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.rests_until = peer.lost_until = peer.held_until = float("-inf")

    def rests(self, name: str, now: float) -> bool:
        """Return True while `name` is not picked."""
        peer = self._peers.get(name)
        return peer is not None and max(peer.left_until, peer.lost_until) > now

    def is_full(self, name: str, now: float) -> bool:
        """Return True while `name` rests only because it asked for a rest."""
        peer = self._peers.get(name)
        return peer is not None and now < peer.left_until <= peer.full_until

    def seconds_per_unit(self, name: str) -> float:
        """Measured seconds per unit of cost, or 0 if `name` has not answered yet."""
        peer = self._peers.get(name)
        return peer.seconds_per_unit / peer.weight if peer is not None and peer.weight else 0.0

    def wakes_at(self, now: float) -> float | None:
        """Time at which the first peer may be picked again if all rest, or None if no peer serves the stage."""
        return max(now, min(p.left_until for p in self._peers.values())) if self._peers else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._peers)

    def __contains__(self, name: object) -> bool:
        return name in self._peers

    def __len__(self) -> int:
        return len(self._peers)
