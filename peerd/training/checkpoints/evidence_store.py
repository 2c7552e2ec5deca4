"""Store of a peer's evidence on its run: `evidence.json` beside the checkpoints, with proofs from the conductor.

Written when it has changed, now and then, and once more at the end. What a crash loses is a few seconds of what the
peer saw; the positions of its checkpoints are known from these. A damaged file is named in the log and written anew.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import PeerId, is_peer_text
from peerd.core.messages.swarm import Position
from peerd.home import write_atomically
from peerd.role import RoleContext
from peerd.service.run_services import RunServices

NAME: Final = "evidence.json"
_LOOK_S: Final = 5.0  # between two looks for news
_LAST_S: Final = 5.0  # for the disk to take the last news, at the end
_PROOFS: Final = 4  # newest checkpoints whose proofs are looked for
_ASKING: Final = 16  # members of a large swarm that ask for each: the conductor's line is not to be filled with them
_LEFT_OUT: Final = 64
_CONDUCTORS: Final = 4  # that a keeper asks
_MOST_BYTES: Final = 64 << 20


class EvidenceStore:
    """See the module's header. `open` comes first."""

    def __init__(self, ctx: RoleContext, services: RunServices, positions: Callable[[], Sequence[Position]]) -> None:
        """`positions`: those of the checkpoints beside it, oldest first."""
        assert ctx.run is not None
        self._ctx, self._proofs, self._following = ctx, services.proofs, services.following
        self._directory = services.directory
        self._files = ctx.worker("files")
        self._positions = positions
        self._rng = ctx.clock.rng("proofs")
        self._left_out = BoundedDict[Position, None](_LEFT_OUT)  # positions whose proofs others ask for
        self._path = ctx.data_dir / "checkpoints" / ctx.run.run / NAME
        self._written = -1  # the version on disk
        self._failed = False

    async def open(self) -> None:
        """Read what was stored, if this process has no evidence yet."""
        evidence = self._proofs.evidence
        if evidence.version or evidence.seen:
            return
        try:
            data = await self._files.run(lambda: _read(self._path), name="read the evidence")
            if data is not None:
                evidence.load(data)
        except (OSError, ValueError) as error:
            self._ctx.log.event("evidence.not_read", level="warning", file=str(self._path), reason=str(error))

    async def run(self) -> None:
        """Keep the file current until cancelled."""
        try:
            while True:
                await self._look_for_proofs()
                await self._write()
                await trio.sleep(_LOOK_S)
        finally:
            with trio.move_on_after(_LAST_S, shield=True):  # a disk that hangs keeps no process from ending
                await self._write()

    async def _look_for_proofs(self) -> None:
        """Ask the conductor for the proofs of our newest checkpoints; of many members only some ask."""
        if not (known := self._proofs.established()):
            return  # no proof would count
        for position in self._positions()[-_PROOFS:]:
            if self._following.conductor is None or not position.step or position in self._left_out:
                continue
            if self._proofs.evidence.has_proof(position):
                continue
            if self._rng.random() * len(known) < _ASKING:
                await self._proofs.learn(self._following.conductor, position)
            else:
                self._left_out[position] = None

    async def prove(self, position: Position) -> None:
        """For a keeper, which follows nobody: store the proofs of the conductors that the run's records name most.

        Strangers' records are free, and may name a conductor of their own: what it shows stands beside the others'.
        """
        entries = self._directory.announced.values()
        told = Counter(entry.progress.conductor for entry in entries if is_peer_text(entry.progress.conductor))
        named = [PeerId.parse(conductor) for conductor, _ in told.most_common(_CONDUCTORS)]
        await self._proofs.collect(named, position)
        await self._write()

    async def _write(self) -> None:
        evidence = self._proofs.evidence
        if evidence.version == self._written:
            return
        version, encode = evidence.version, evidence.encoder()
        try:
            await self._files.run(lambda: _store(self._path, encode), name="write the evidence")
        except OSError as error:
            level = "debug" if self._failed else "warning"  # said once
            self._failed = True
            self._ctx.log.event("evidence.not_written", level=level, file=str(self._path), reason=str(error))
        else:
            self._written, self._failed = version, False


def _read(path: Path) -> bytes | None:
    """Returns the file's content, or None if there is no file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return data
    return None


def _store(path: Path, encode: Callable[[], bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, encode())
