"""Rebalancing of a run by its conductor: estimates posts' rates from their claims and the batches, and orders moves.

After each step it combines the posts that the roster has (`RosterEntry`), the loads that they claim (`EstimatedRates`)
the moves that pay off (`RebalanceRule`) and those that were ordered (`OrderedMoves`). Loads are also estimated if moves
are disabled, since newcomers join where they help most.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Final

from peerd.messages.swarm import PostLoad
from peerd.swarm.events import Note, Output, SendTransfer
from peerd.swarm.posts import peer_of, post_name, short
from peerd.swarm.rebalance.estimated_rates import EstimatedRates
from peerd.swarm.rebalance.loads import PeerLoad, Transfer
from peerd.swarm.rebalance.ordered_moves import OrderedMoves, PostView, told
from peerd.swarm.rebalance.rebalance_rule import RebalanceConfig
from peerd.swarm.roster import Roster

_PUBLISHED: Final = 64  # posts whose rates are published at each step


class Rebalancing:
    """Rebalancing of one run. `own`: the conductor's post; `moves`: False if peers stay; `rests`: posts that rest."""

    def __init__(
        self, config: RebalanceConfig, roster: Roster, own: str, *, moves: bool, rests: Container[str] = ()
    ) -> None:
        self._roster, self._orders_moves = roster, moves and len(config.work) > 1
        self._beliefs, self._rests = EstimatedRates(config.work), rests
        self._moves = OrderedMoves(config, peer_of(own))
        self._wished_for: dict[Transfer, str] = {}  # planned moves, each with the reason
        self._step_at: float | None = None  # when the last step was made
        self._published = 0  # posts, in order, whose rates were published in this round

    def told(self, now: float, post: str, load: PostLoad) -> None:
        """Record the load that a member claims."""
        if post in self._roster.entries:
            self._beliefs.told(now, post, load)

    @property
    def loads(self) -> list[PeerLoad]:
        """Loads of the posts after the last step, and which of their peers may move."""
        return self._moves.loads

    @property
    def price_s(self) -> float:
        """Price of a move in seconds of its peer's work, estimated from past moves."""
        return self._moves.price_s

    def wish(self, moves: Sequence[Transfer], why: str) -> None:
        """Order these planned moves after the next step, if they harm nobody. `why`: reason for the log."""
        self._wished_for = dict.fromkeys(moves, why)
        self._moves.wish(moves)

    def refused(self, now: float, post: str) -> None:
        """Record that a peer refuses to move."""
        self._moves.failed(now, peer_of(post))

    def restart(self) -> None:
        """Forget the past steps, since the swarm resumed from another position."""
        self._beliefs.restart()
        self._step_at = None

    def step_made(self, now: float, done: Mapping[str, int], ready: Sequence[str]) -> list[Output]:
        """Record a step with the microbatches of each post (`done`). `ready`: the posts at the new position.

        Returns the orders to move, with notes for the log.
        """
        self._beliefs.keep_only(self._roster.entries)
        self._beliefs.step_made(now, done, ready)
        self._publish_rates()
        step_s = 0.0 if self._step_at is None else now - self._step_at  # expected duration of the next step
        self._step_at = now
        if not self._orders_moves:
            return []
        posts = self._posts(frozenset(ready))
        out = list[Output]()
        loads = dict(enumerate(self._capacity(posts)))
        for one in self._moves.look(now, posts, step_s):
            why = self._wished_for.get(one) or told(one, loads)
            out.append(SendTransfer(post_name(one.peer, one.source), one.target, why))
            out.append(Note(f"peer {short(one.peer)} must move from stage {one.source} to stage {one.target}: {why}"))
        return out

    def _publish_rates(self) -> None:
        """Publish estimated rates in the member list, of some posts at each step, in turn."""
        posts = sorted(self._roster.entries)
        at = self._published if self._published < len(posts) else 0
        self._published = at + _PUBLISHED
        self._roster.note_rates(self._beliefs.borne_out(posts[at : self._published]))

    def rate(self, post: str) -> float:
        """Estimated microbatches per second of a post, or 0 if it has not served a whole step yet."""
        return self._beliefs.measured(post) or 0.0

    def capacity(self) -> list[float]:
        """Microbatches per second that the members of each stage can do; empty while unknown."""
        found = self._capacity(self._posts(frozenset()))
        return found if any(found) else []

    def _posts(self, ready: frozenset[str]) -> list[PostView]:
        entries = self._roster.entries
        rates = self._beliefs.rates(sorted(entries))
        return [
            PostView(
                peer_of(name),
                entry.stage,
                name in ready,
                0.0 if name in self._rests else rates[name],
                self._beliefs.claim(name).movable,
                entry.saved,
            )
            for name, entry in sorted(entries.items())
        ]

    def _capacity(self, posts: Sequence[PostView]) -> list[float]:
        found = [0.0] * len(self._roster.stages)
        for post in posts:
            found[post.stage] += post.rate
        return found
