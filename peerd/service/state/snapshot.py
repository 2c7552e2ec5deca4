"""State download, both sides of it: give this peer's state to newcomers, fetch one from several donors at once.

Besides states this is also how totals (`training.catchup.step_totals`) and kept checkpoints
(`training.checkpoints.keeper`) travel.

What is fetched is whole, and vouched for: digests that the largest camp of donors agrees on (two donors at least, where
two answer). Nothing is applied here; the caller gets everything or an error. What a failed attempt got is kept in
memory, for one state, and the next attempt at the same state goes on from there. Donors that were caught lying are left
alone for a while. The sides: `serve`, `fetch`; which donor to ask for what: `machine/state/download`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId
from peerd.core.limits import LINKS
from peerd.core.messages.state import StateItem, StateLayout, StateRequest, TensorSpec
from peerd.core.messages.swarm import Position
from peerd.core.work import Worker
from peerd.service.rpc.rpc import Rpc
from peerd.service.state.fetch import BegunDownload, Donors, FetchPlan, FetchReport, StateFetch, fetch_layout
from peerd.service.state.state_server import KEPT, STATE, Freeze, Methods, StateServer

__all__ = ["KEPT", "Donors", "FetchReport", "Freeze", "SnapshotFetcher", "Snapshots", "StateItem", "StateServer"]

_SHUN_S = 600.0  # how long a donor that lied is not asked


class SnapshotFetcher:
    """The newcomer's side: one download at a time."""

    def __init__(self, rpc: Rpc, rng: Random | None = None, methods: Methods = STATE) -> None:
        """`rng` decides which of equal donors gives the digests, and when busy ones are asked again."""
        self.notes: Callable[[str], None] = lambda _: None  # told what a download does, in words
        self.chosen: Callable[[Position], None] = lambda _: None  # told what is fetched, once that is decided
        self.folder: Path | None = None  # where what is fetched lies meanwhile; None: in memory alone
        self.report: FetchReport | None = None  # of the newest download
        self._rpc, self._methods = rpc, methods
        self._rng = rng or Random(0)
        self._lock = trio.Lock()
        self._begun: BegunDownload | None = None  # what a failed attempt got
        self._shunned: dict[str, float] = {}  # until when
        self._paces = BoundedDict[str, float](LINKS)  # of donors, seconds a byte

    async def fetch(
        self, donors: Donors, request: StateRequest, expected: Sequence[TensorSpec | StateItem], worker: Worker
    ) -> tuple[Position, list[StateItem]]:
        """The state that most of `donors` vouch for, whole; RemoteError says why there is none now.

        `donors`: peers, or a function that tells those there are, which is asked again while the download goes on.
        These are known to have their state: where it names several, one alone is not believed.
        `expected`: name, dtype and shape of each tensor, in the order in which donors give them.
        """
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
                all_have_it=callable(donors) and request.of is None,  # a total, or a checkpoint, not all have kept
                paces=self._paces,
            )
            # Not kept here meanwhile: when another state is chosen, the memory of this one is let go at once.
            fetching = StateFetch(self._rpc, plan, self._take_kept(layout), self._rng)
            self.report = fetching.report
            try:
                begun = await fetching.run()
            finally:
                self._begun = fetching.begun
                self._shun(fetching.report.liars)
            self._begun = None  # the caller's, from here
            self.notes(fetching.report.text())
            parts = zip(layout.tensors, layout.views(begun.row), strict=True)
            return begun.claim.position, [StateItem(t.name, t.dtype, t.shape, view) for t, view in parts]

    async def layout(self, donor: PeerId, request: StateRequest, wanted: tuple[bytes, int]) -> list[TensorSpec]:
        """See `fetch_layout`."""
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
    """Both sides of state transfer; `totals` fetches the totals of steps, also while a state is fetched."""

    def __init__(self, rpc: Rpc, rng: Random | None = None, giving: StateServer | None = None) -> None:
        """`giving`: one that several stages of this peer share."""
        super().__init__(rpc, rng)
        self.giving = giving if giving is not None else StateServer(rpc)
        self.totals = SnapshotFetcher(rpc, rng)
        self.totals._shunned = self._shunned  # a donor that lies about one thing is not asked for another
        self.totals._paces = self._paces
