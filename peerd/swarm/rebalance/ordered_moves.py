"""Moves of stage peers that the conductor orders: which ones to begin, and the state of those under way.

After each step the rule (`rebalance_rule`) examines the posts. Its moves are ordered if they harm nobody: a peer moves
only if its stage keeps a peer with the current state, and one with the checkpoint that all stages could return
to. A peer never moves if it holds several posts, serves the stage that its user has set, has moved recently, or
conducts. A peer under way counts in its new stage. A move is complete when the peer serves only its new stage. A move
that is refused, or takes too long, has failed: that peer is left alone for a while, longer each time. The duration of
moves determines the price of the next ones. Decides only.

Hostile input: posts that claim anything. A peer that accepts a move and does not carry it out occupies a place in a
plan for MOST_S, and less often each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from peerd.messages.swarm import MAX_MEMBERS, Position
from peerd.swarm.rebalance.loads import PeerLoad, Transfer
from peerd.swarm.rebalance.rebalance_rule import RebalanceConfig, RebalanceRule
from peerd.wire.rate.suspicion import Suspicion

AGAIN_S: Final = 300.0  # a peer that has moved stays at least this long
MOST_S: Final = 900.0  # time limit of a move
_FAILED_S, _FAILED_MOST_S = 600.0, 7200.0  # time that a peer is left alone after a failed move: at first, and at most
_COMING_S: Final = 300.0  # time that a newcomer counts before it is ready
_SMOOTHING: Final = 0.3
_SHARE: Final = 1 / 3  # of a move's time counts as lost: if memory allows, the peer serves its old stage meanwhile


@dataclass(frozen=True, slots=True)
class PostView:
    """A post as the conductor sees it."""

    peer: str
    stage: int
    ready: bool  # has the current state
    rate: float  # microbatches per second, as estimated
    movable: bool = True
    saved: frozenset[Position] = frozenset()  # checkpoints that it has


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An ordered move."""

    move: Transfer
    since: float


@dataclass(slots=True)
class _Posts:
    """The posts at one call of `look`."""

    all: Sequence[PostView]
    of: dict[str, list[PostView]] = field(default_factory=dict)  # by peer

    def __post_init__(self) -> None:
        for post in self.all:
            self.of.setdefault(post.peer, []).append(post)

    def serves(self, peer: str, stage: int) -> bool:
        """True if the peer has the current state of `stage`."""
        return any(post.stage == stage and post.ready for post in self.of.get(peer, ()))


class _Reserves:
    """Peers that each stage keeps, without those that leave.

    Counts peers with the current state, and those of them with the checkpoint that all stages could return to.
    """

    def __init__(self, stages: int, posts: Sequence[PostView], leaving: Container[str]) -> None:
        self._back = _restore_point(stages, posts)
        staying = [post for post in posts if post.ready and post.peer not in leaving]
        self._ready = Counter(post.stage for post in staying)
        self._saved = Counter(post.stage for post in staying if self._back in post.saved)

    def spare(self, post: PostView) -> bool:
        """True if the stage keeps enough others without this post."""
        return self._ready[post.stage] > 1 and (self._back not in post.saved or self._saved[post.stage] > 1)

    def take(self, post: PostView) -> None:
        """Record that the post leaves, too."""
        self._ready[post.stage] -= 1
        self._saved[post.stage] -= self._back in post.saved


class OrderedMoves:
    """The ordered moves of one conductor. `own`: the peer that conducts."""

    def __init__(self, config: RebalanceConfig, own: str = "") -> None:
        self._work, self._own, self._least_price_s = config.work, own, config.price_s
        self._rule = RebalanceRule(config)
        self._under_way: dict[str, _UnderWay] = {}  # by peer
        self._resting = Suspicion[str](_FAILED_S, _FAILED_MOST_S, MAX_MEMBERS)  # by peer
        self._coming_since: dict[str, float] = {}
        self.loads: list[PeerLoad] = []  # last input of the rule
        self._wished: list[Transfer] = []
        self.made = 0  # completed moves

    @property
    def under_way(self) -> list[Transfer]:
        """The ordered moves that have not ended."""
        return [one.move for _, one in sorted(self._under_way.items())]

    def due(self, now: float) -> float:
        """Time at which `look` would order moves if nothing changes before."""
        return self._rule.due(now)

    def look(self, now: float, posts: Sequence[PostView], ahead_s: float = 0.0) -> list[Transfer]:
        """The moves to order now. `ahead_s`: seconds until moves may be ordered the next time."""
        seen = _Posts(posts)
        self._settle(now, seen)
        self.loads = self._loads(now, seen)
        moves = self._harmless([*self._wishes(), *self._rule.look(now, self.loads, ahead_s)], seen)
        self._under_way |= {one.peer: _UnderWay(one, now) for one in moves}
        return moves

    def wish(self, moves: Iterable[Transfer]) -> None:
        """Order these planned moves with the next call of `look`, if they harm nobody."""
        self._wished = list(moves)

    @property
    def price_s(self) -> float:
        """Price of a move in seconds of its peer's work, estimated from past moves."""
        return self._rule.price_s

    def _wishes(self) -> list[Transfer]:
        free = {(load.peer, load.stage) for load in self.loads if not load.stays}
        wished, self._wished = self._wished, []
        return [one for one in wished if (one.peer, one.source) in free and 0 <= one.target < len(self._work)]

    def failed(self, now: float, peer: str) -> None:
        """Record that a peer has refused to move, or has come back."""
        if self._under_way.pop(peer, None) is not None:
            self._resting.failed(now, peer)

    def _settle(self, now: float, seen: _Posts) -> None:
        """End the moves that are complete or took too long."""
        for peer, one in list(self._under_way.items()):
            stages = {post.stage for post in seen.of.get(peer, ())}
            if stages == {one.move.target} and seen.serves(peer, one.move.target):
                self._arrived(now, peer, now - one.since)
            elif now - one.since > MOST_S:
                self.failed(now, peer)
        self._coming_since = {p.peer: self._coming_since.get(p.peer, now) for p in seen.all if not p.ready}
        self._resting.keep_only(seen.of)

    def _arrived(self, now: float, peer: str, took_s: float) -> None:
        del self._under_way[peer]
        self.made += 1
        self._resting.forgive(peer)
        self._resting.put_aside(peer, now + AGAIN_S)
        price_s = self._rule.price_s + _SMOOTHING * (_SHARE * took_s - self._rule.price_s)
        self._rule.price_s = max(self._least_price_s, price_s)

    def _loads(self, now: float, seen: _Posts) -> list[PeerLoad]:
        """The loads for the rule: one for each peer and stage that it serves, or will serve."""
        loads, reserves = list[PeerLoad](), _Reserves(len(self._work), seen.all, self._under_way)
        for peer, posts in sorted(seen.of.items()):
            if peer in self._under_way:
                target = self._under_way[peer].move.target
                loads.append(PeerLoad(peer, target, self._rate_at(posts, target), stays=True))
                continue
            stays = peer == self._own or len(posts) > 1 or self._resting.is_aside(now, peer)
            for post in posts:
                if post.ready or now - self._coming_since[peer] < _COMING_S:
                    goes = post.ready and post.movable and reserves.spare(post)
                    is_fixed = stays or not goes
                    loads.append(PeerLoad(peer, post.stage, post.rate, is_fixed))
        return loads

    def _rate_at(self, posts: Sequence[PostView], target: int) -> float:
        """Expected rate of a moving peer in its new stage."""
        there = [post for post in posts if post.stage == target]
        one = max(there or posts, key=lambda post: post.ready)
        return one.rate * self._work[one.stage] / self._work[target]

    def _harmless(self, moves: Iterable[Transfer], seen: _Posts) -> list[Transfer]:
        """The moves that leave each stage a peer with the current state, and one with the common checkpoint."""
        reserves, found = _Reserves(len(self._work), seen.all, self._under_way), list[Transfer]()
        for one in moves:
            post = next(post for post in seen.of[one.peer] if post.stage == one.source)
            if reserves.spare(post) and all(one.peer != other.peer for other in found):
                reserves.take(post)
                found.append(one)
        return found


def _restore_point(stages: int, posts: Iterable[PostView]) -> Position | None:
    """The newest position of which every stage has a checkpoint, or None if there is none."""
    saved: list[set[Position]] = [set() for _ in range(stages)]
    for post in posts:
        saved[post.stage] |= post.saved
    return max(set.intersection(*saved), default=None)


def told(move: Transfer, loads: Mapping[int, float]) -> str:
    """A sentence on the reason for a move. `loads`: microbatches per second of each stage."""
    source, target = loads.get(move.source, 0.0), loads.get(move.target, 0.0)
    return f"stage {move.target} does {target:.3g} microbatches a second, stage {move.source} {source:.3g}"
