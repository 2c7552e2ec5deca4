"""Stores a peer's evidence (positions that its run reached, with proofs) in `evidence.json` beside the checkpoints.

Also fetches proofs from the conductor. The file is written every few seconds if the evidence has changed, and once more
at the end. A crash loses only the evidence of the last few seconds; the positions of the checkpoints are known from the
checkpoints themselves. A damaged file is logged and replaced.
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
from peerd.messages.swarm import Position
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.run.home import write_atomically

NAME: Final = "evidence.json"
_LOOK_S: Final = 5.0  # between two checks for changes
_LAST_S: Final = 5.0  # for the last write at the end
_PROOFS: Final = 4  # number of newest checkpoints to fetch proofs of
_ASKING: Final = 16  # members that ask for each proof, to spare the conductor's line in a large swarm
_LEFT_OUT: Final = 64
_CONDUCTORS: Final = 4  # number that a keeper asks
_MOST_BYTES: Final = 64 << 20


class EvidenceStore:
    """File in which one peer keeps its proofs that its run reached certain positions. Call `open` first."""

    def __init__(self, ctx: RoleContext, services: RunServices, positions: Callable[[], Sequence[Position]]) -> None:
        """`positions` returns the positions of the checkpoints in the same folder, oldest first."""
        assert ctx.run is not None
        self._ctx, self._proofs, self._following = ctx, services.proofs, services.following
        self._directory = services.directory
        self._files = ctx.worker("files")
        self._positions = positions
        self._rng = ctx.clock.rng("proofs")
        self._left_out = BoundedDict[Position, None](_LEFT_OUT)  # positions whose proofs are left to other members
        self._path = ctx.data_dir / "checkpoints" / ctx.run.run / NAME
        self._written = -1  # the version on disk
        self._failed = False

    async def open(self) -> None:
        """Read the evidence file, unless this process already has evidence in memory."""
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
        """Keep the file up to date until cancelled."""
        try:
            while True:
                await self._look_for_proofs()
                await self._write()
                await trio.sleep(_LOOK_S)
        finally:
            with trio.move_on_after(_LAST_S, shield=True):  # a hanging disk must not block the exit
                await self._write()

    async def _look_for_proofs(self) -> None:
        """Ask the conductor for proofs of our newest checkpoints. In a large swarm only a random part of the members
        asks.
        """
        if not (known := self._proofs.established()):
            return  # without known members no proof would count
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
        """Store proofs of `position`, fetched from the conductors that most directory records name.

        For a keeper, which follows no conductor. Strangers can publish records that name a false conductor; its
        signatures are stored together with those from the others and do not replace them.
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
            level = "debug" if self._failed else "warning"  # warn only once
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
