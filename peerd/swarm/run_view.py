"""A newcomer's view of its run: whether it knows enough to choose a stage, to conduct, or to begin the run.

A peer without a view reads an empty directory, and would begin a second swarm beside the live one. So it waits until
the directory has answered, its clock agrees with its peers' clocks well enough to read records, its token is valid, and
either a member that the directory shows can be reached or no member is shown. Records of members that are gone expire
within a minute. A peer without bootstrap addresses counts as the first of its run, and so does one with `--alone`. Once
there is a view, it remains for the life of the process: a peer that loses all others later continues.

Hostile input: records of members that never answer, renewed forever, block newcomers if no honest member answers; the
reason names these members, and the user may begin with `--alone`. A bootstrap peer may show any clock.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Final

import trio

from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.dht.dht import Dht
from peerd.rpc.rpc_types import AccessGuard
from peerd.swarm.directory import RECORD_TTL_S, Directory
from peerd.wire.host.host import Host

_LOOK_S: Final = 1.0  # between two checks
_CLOCK_S: Final = 5.0  # for the first comparison of clocks after the directory has answered
_NAMED: Final = 3  # peers named in a message

Reachable = Callable[[Iterable[PeerId]], Awaitable[set[PeerId]]]


class RunView:
    """One peer's view of its run. `reachable`: returns those of the given peers that can be connected now."""

    def __init__(
        self, net: tuple[Host, Dht], directory: Directory, gate: AccessGuard | None, reachable: Reachable, rng: Random
    ) -> None:
        self.alone = False  # the user has chosen to begin without others
        self.advice = "give --alone to begin without"
        self._host, self._dht = net
        self._directory, self._gate, self._reachable, self._rng = directory, gate, reachable, rng
        self._turn = trio.Lock()
        self._missing: str | None = "the first answer of the directory"
        self._answered_at = math.inf  # trio time

    @property
    def clear(self) -> bool:
        """True once there is a view."""
        return self._missing is None

    def waits_for(self) -> str | None:
        """What the view lacks, or None once there is a view."""
        return self._missing

    def cause(self) -> str | None:
        """Why this peer may see nobody though others exist: its clock or its token. None if neither is at fault."""
        return self._dht.clock_problem() or (self._gate.waits_for() if self._gate is not None else None)

    async def settled(self, patience_s: float = math.inf) -> None:
        """Wait for a view. Raises Unreachable after `patience_s`, with what the view lacks."""
        with trio.move_on_after(patience_s):
            while not self.clear:
                async with self._turn:  # only one of the waiting tasks checks
                    if not self.clear:
                        self._missing = await self._look()
                if not self.clear:
                    await trio.sleep(_LOOK_S)
        if self._missing is not None:
            raise Unreachable(f"{self._missing}; waited for {patience_s:g} s")

    async def _look(self) -> str | None:
        if self.alone:
            return None
        members = {peer for peer, _ in await self._directory.refresh() if peer != self._host.id}
        if cause := self.cause():
            return cause
        if not self._directory.answered:
            if not self._dht.entries.given:
                return None  # the first of its run
            return self._dht.entries.waits_for() or "an answer of the directory"
        self._answered_at = min(self._answered_at, trio.current_time())
        if not self._dht.clocks_compared and trio.current_time() - self._answered_at < _CLOCK_S:
            return "the clock of another peer, to compare this machine's with"
        if members and not await self._reachable(self._drawn(members)):
            return self._silent(sorted(members))
        return None

    def _drawn(self, members: Iterable[PeerId]) -> list[PeerId]:
        """All members, those with links to us first, the others in a new random order for each check.

        Of very many only the first are tried. The random order prevents that members that never answer always come
        first.
        """
        linked, order = set(self._host.connected()), sorted(members)
        self._rng.shuffle(order)
        return sorted(order, key=lambda peer: peer not in linked)

    def _silent(self, members: list[PeerId]) -> str:
        named = ", ".join(peer.short for peer in members[:_NAMED])
        more = f" and {len(members) - _NAMED} more" if len(members) > _NAMED else ""
        return (
            f"an answer of a member: the directory shows {named}{more}, and none can be reached. Records of peers that "
            f"are gone expire within {RECORD_TTL_S:g} s; {self.advice}"
        )
