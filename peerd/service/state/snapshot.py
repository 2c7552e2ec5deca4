"""State download, both sides: serves this peer's state to newcomers, and fetches a state from several donors at once.

Totals of steps (`training/catchup/step_totals`) and kept checkpoints (`training/checkpoints/keeper`) are transferred in
the same way.

A fetched state is complete, and matches the digests on which the largest group of donors agrees (at least two donors,
if two answer). The caller applies it, or gets an error. The pieces of a failed attempt stay in memory, for one state,
and the next attempt at the same state continues from there. Donors that sent wrong data are not asked for 10 minutes.
`state_server` has the server side, `fetch` the client side; `machine/state/download` decides what to ask of which
donor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.core.limits import LINKS
from peerd.core.messages.state import StateItem, StateLayout, StateRequest, TensorSpec
from peerd.core.messages.swarm import Position
from peerd.core.work import Worker
from peerd.service.rpc.rpc import Rpc
from peerd.service.state.fetch import BegunDownload, Donors, FetchPlan, FetchReport, StateFetch, fetch_layout
from peerd.service.state.state_room import StateRoom
from peerd.service.state.state_server import KEPT, STATE, Methods, StateServer

__all__ = [
    "KEPT",
    "Donors",
    "Fetched",
    "SnapshotFetcher",
    "Snapshots",
    "StateItem",
    "StateServer",
]

_SHUN_S = 600.0  # time for which a donor that lied is not asked


class Fetched(NamedTuple):
    """A complete fetched state; `items` are views of the memory of `room`."""

    position: Position
    items: list[StateItem]
    room: StateRoom


class SnapshotFetcher:
    """The client side: one download at a time."""

    def __init__(self, rpc: Rpc, rng: Random | None = None, methods: Methods = STATE) -> None:
        """`rng` chooses the donor of the digests among equals, and the times when busy donors are asked again."""
        self.notes: Callable[[str], None] = lambda _: None  # called with texts on the progress of a download
        self.chosen: Callable[[Position], None] = lambda _: None  # called with the position, once it is chosen
        self.folder: Path | None = None  # where the state is stored during a download, or None for memory alone
        self.needs_file = False  # a fetch fails if the folder has no space, instead of using memory
        self.report: FetchReport | None = None  # of the newest download
        self._rpc, self._methods = rpc, methods
        self._rng = rng or Random(0)
        self._lock = trio.Lock()
        self._begun: BegunDownload | None = None  # pieces of a failed attempt
        self._shunned: dict[str, float] = {}  # donor -> until when it is not asked
        self._paces = BoundedDict[str, float](LINKS)  # donor -> seconds per byte

    async def fetch(
        self, donors: Donors, request: StateRequest, expected: Sequence[TensorSpec | StateItem], worker: Worker
    ) -> tuple[Position, list[StateItem]]:
        """Fetch the whole state that most of `donors` vouch for.

        Raises RemoteError if it cannot be fetched now, or NoMemory if there is no memory or disk space for it.

        `donors`: peers, or a function that returns the current donors and is called repeatedly during the download. The
        peers that it returns are known to have the state, so if there are several, one that answers alone is not
        trusted. `expected`: name, dtype and shape of each tensor, in the donors' order.
        """
        found = await self.fetch_with_room(donors, request, expected, worker)
        return found.position, found.items

    async def fetch_with_room(
        self, donors: Donors, request: StateRequest, expected: Sequence[TensorSpec | StateItem], worker: Worker
    ) -> Fetched:
        """Like `fetch`, but also returns the memory of the state, so that the caller can read it piece by piece."""
        layout = StateLayout(expected)
        async with self._lock:
            honest = partial(self._honest, donors)
            plan = FetchPlan(
                methods=self._methods,
                request=request,
                layout=layout,
                donors=honest,
                worker=worker,
                notes=self.notes,
                chosen=self.chosen,
                folder=self.folder,
                needs_file=self.needs_file,
                all_have_it=callable(donors) and request.of is None,  # not every donor has an old total or checkpoint
                paces=self._paces,
            )
            # Not stored in `self` meanwhile: if another state is chosen, this one's memory is freed at once.
            fetching = StateFetch(self._rpc, plan, self._take_kept(layout), self._rng)
            self.report = fetching.report
            try:
                begun = await fetching.run()
            finally:
                self._begun = fetching.begun
                self._shun(fetching.report.liars)
            self._begun = None  # now owned by the caller
            self.notes(fetching.report.text())
            parts = zip(layout.tensors, layout.views(begun.row), strict=True)
            items = [StateItem(t.name, t.dtype, t.shape, view) for t, view in parts]
            return Fetched(begun.claim.position, items, begun.room)

    async def layout(self, donor: PeerId, request: StateRequest, wanted: tuple[bytes, int]) -> list[TensorSpec]:
        """Fetch the layout of a state; see `fetch_layout`."""
        return await fetch_layout(self._rpc, donor, request, wanted)

    def _take_kept(self, layout: StateLayout) -> BegunDownload | None:
        begun, self._begun = self._begun, None
        return begun if begun is not None and begun.layout.digest == layout.digest else None

    def _honest(self, donors: Donors) -> list[PeerId]:
        now = trio.current_time()
        return [d for d in (donors() if callable(donors) else donors) if self._shunned.get(d.text, now) <= now]

    def _shun(self, liars: list[str]) -> None:
        now = trio.current_time()
        for peer in [peer for peer, until in self._shunned.items() if until <= now]:
            del self._shunned[peer]
        self._shunned.update(dict.fromkeys(liars, now + _SHUN_S))


class Snapshots(SnapshotFetcher):
    """Both sides of state transfer. `totals` fetches the totals of steps, even while a state is fetched."""

    def __init__(self, rpc: Rpc, rng: Random | None = None, giving: StateServer | None = None) -> None:
        """`giving`: a server that several stages of this peer share."""
        super().__init__(rpc, rng)
        self.giving = giving if giving is not None else StateServer(rpc)
        self.totals = SnapshotFetcher(rpc, rng)
        self.totals._shunned = self._shunned  # a donor that lies about one thing is not asked for another
        self.totals._paces = self._paces
