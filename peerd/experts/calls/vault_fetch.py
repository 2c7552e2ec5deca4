"""Fetches checkpoints of experts from their holders: a `PieceFetch` of bytes whose digest a signed pointer names.

A hostile holder may send other bytes, other shapes, or nothing: the log names it, and a holder that sent wrong data is
not asked for that checkpoint for a while (only for that one, as its disk may be corrupt).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random

import trio

from peerd.core.errors import Overloaded, RemoteError
from peerd.core.ids import PeerId
from peerd.core.work import Worker
from peerd.experts.calls.kept_directory import GET
from peerd.messages.encoding import Empty
from peerd.messages.experts import CheckpointRef, PieceWanted, state_root
from peerd.messages.state import DIGEST_BYTES, Bytes, Pieces
from peerd.messages.swarm import Position
from peerd.rpc.rpc import Rpc
from peerd.state import download_events as dl
from peerd.state.download import Download
from peerd.state.piece_fetch import BegunDownload, PieceFetch, Shunned, Write, bytes_of
from peerd.state.quorum import Claim

log = logging.getLogger("peerd.experts.calls.vault_fetch")


class CheckpointFetch(PieceFetch[BegunDownload]):
    """One attempt to fetch a checkpoint from `holders`, of which the first is asked first."""

    def __init__(
        self, rpc: Rpc, worker: Worker, pointer: CheckpointRef, write: Write, holders: Sequence[str], rng: Random
    ) -> None:
        self._rpc, self._pointer = rpc, pointer
        pieces = Pieces(pointer.size_bytes)
        now = trio.current_time()
        known = Claim(Position(pointer.version, b""), pointer.digest)
        machine = Download(now, pieces.pieces, rng, holders, known=known)
        begun = BegunDownload(pieces, pointer.digest, state_root, write)
        super().__init__("the checkpoint", pieces, machine, worker, begun)

    def _begin(self, chosen: dl.Chosen) -> None:
        pass  # it has begun

    async def _get(self, donor: PeerId, number: int, timeout_s: float) -> memoryview:
        pieces, wanted = Pieces(self._pointer.size_bytes), PieceWanted(self._pointer.digest, number)  # -1: the digests
        begin, end = (0, DIGEST_BYTES * pieces.pieces) if number == dl.DIGESTS else pieces.piece(number)
        size = end - begin
        try:
            answer = await self._rpc.call(donor, GET, wanted, Empty, timeout_s=timeout_s, reply_frame_bytes=size)
        except RemoteError as error:
            level = logging.DEBUG if isinstance(error, Overloaded) else logging.INFO  # it is asked again at once
            uid = self._pointer.expert.uid
            log.log(level, "peer %s did not provide the checkpoint of expert %s: %s", donor, uid, error)
            raise
        return bytes_of(answer.frames, (size,), donor)

    def _blamed(self, donor: str, why: str) -> None:
        text = "peer %s did not provide the checkpoint of expert %s: %s"
        log.warning(text, donor, self._pointer.expert.uid, why)


class VaultFetch:
    """Fetches checkpoints, any number at once, and remembers which holders sent wrong data."""

    def __init__(self, rpc: Rpc, worker: Worker, rng: Random) -> None:
        self._rpc, self._worker, self._rng = rpc, worker, rng
        self._shunned = Shunned()

    async def fetch(self, pointer: CheckpointRef, holders: Sequence[PeerId], write: Write) -> Bytes:
        """Fetch all pieces, each of which `write` stores, called on the worker; returns their digests, joined.

        Raises RemoteError if the holders cannot send them, OSError if they cannot be written.
        """
        honest = self._shunned.honest(holders, pointer.digest)
        fetching = CheckpointFetch(self._rpc, self._worker, pointer, write, honest, self._rng)
        try:
            begun = await fetching.run()
        finally:
            self._shunned.add(fetching.report.liars, pointer.digest)
        assert begun.digests is not None
        return begun.digests
