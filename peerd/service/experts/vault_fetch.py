"""Fetching of a checkpoint in pieces from one holder or several at once, each piece checked before it is written.

The pieces stand in one queue from which the holders' lanes take; what one could not give goes back, another gives it.
The digests come first, from any holder whose own have the pointer's digest. A hostile holder may send other bytes,
other shapes, or nothing: it is named in the log, and one that lied is asked for nothing more for a while. A slow one
costs its lanes alone, while others are there.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import LINKS
from peerd.core.messages.encoding import Empty
from peerd.core.messages.experts import DIGEST_BYTES, PieceWanted, Pointer, state_root
from peerd.core.messages.state import piece_digest
from peerd.core.work import Worker
from peerd.service.experts.vault_disk import Bytes, piece_at, pieces_of
from peerd.service.rpc.rpc import Rpc
from peerd.signals import Signal

log = logging.getLogger("peerd.service.experts.vault_fetch")

GET: Final = "vault/1/get"
_PIECE_S: Final = 30.0  # for one piece, or the digests: 1 MiB at the pace of a modem
_LANES: Final = 4  # pieces asked of one holder at once
_HOLDERS: Final = 4  # asked at once; more take their place when one fails
_FAILURES: Final = 2  # of one holder, then it is left alone
_SHUN_S: Final = 600.0  # that a liar is not asked


class PieceSink(Protocol):
    """What takes pieces, on the worker."""

    def write(self, number: int, data: Bytes) -> None: ...


class MemorySink:
    """A checkpoint in memory."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, number: int, data: Bytes) -> None:
        begin, end = piece_at(len(self.data), number)
        self.data[begin:end] = data


class PieceFetch:
    """Fetches checkpoints, any number at once; remembers which holders lied."""

    def __init__(self, rpc: Rpc, worker: Worker) -> None:
        self._rpc, self._worker = rpc, worker
        self._shunned = BoundedDict[PeerId, float](LINKS)  # until when

    async def digests(self, pointer: Pointer, holders: Sequence[PeerId]) -> bytes:
        """The digests of all pieces, joined; RemoteError of the last holder when none gives them."""
        failure: RemoteError = Unreachable("no holder of the checkpoint is known")
        size = DIGEST_BYTES * pieces_of(pointer.size_bytes)
        for holder in self._honest(holders):
            try:
                data = await self._get(holder, PieceWanted(pointer.digest, -1), size)
                if not await self._worker.run(partial(_is_root, data, pointer.digest), name="check digests"):
                    raise ProtocolViolation("the digests of the checkpoint have the wrong digest", holder)
                return bytes(data)
            except RemoteError as error:
                failure = self._failed(pointer, holder, error)
        raise failure

    async def fetch(self, pointer: Pointer, holders: Sequence[PeerId], digests: bytes, sink: PieceSink) -> None:
        """All pieces into `sink`; RemoteError when the holders cannot give them, OSError when it cannot take them."""
        download = _Download(pointer, digests, sink, deque(self._honest(holders)))
        async with trio.open_nursery() as nursery:
            for _ in range(_HOLDERS):
                nursery.start_soon(self._ask_holders, download)
        if download.broken is not None:
            raise download.broken
        if download.left:
            raise download.failure

    async def _ask_holders(self, download: _Download) -> None:
        """One holder after another, until all is there or none is left."""
        while download.left and download.broken is None and download.holders:
            holder = download.holders.popleft()
            async with trio.open_nursery() as nursery:
                for _ in range(_LANES):
                    nursery.start_soon(self._lane, download, holder)

    async def _lane(self, download: _Download, holder: PeerId) -> None:
        while download.left and download.broken is None and download.failures[holder] < _FAILURES:
            if not download.todo:
                await download.news.wait()  # what is under way may come back
                continue
            number = download.todo.popleft()
            try:
                await self._piece(download, holder, number)
                download.left -= 1
            except RemoteError as error:
                download.todo.appendleft(number)
                lied = isinstance(error, ProtocolViolation)
                download.failures[holder] += _FAILURES if lied else 1
                download.failure = self._failed(download.pointer, holder, error)
            except OSError as error:
                download.broken = error
            download.news.notify()

    async def _piece(self, download: _Download, holder: PeerId, number: int) -> None:
        begin, end = piece_at(download.pointer.size_bytes, number)
        data = await self._get(holder, PieceWanted(download.pointer.digest, number), end - begin)
        if not await self._worker.run(partial(download.take, number, data), name="check a piece of an expert"):
            raise ProtocolViolation(f"piece {number} of the checkpoint has the wrong digest", holder)

    async def _get(self, holder: PeerId, wanted: PieceWanted, size: int) -> memoryview:
        answer = await self._rpc.call(holder, GET, wanted, Empty, timeout_s=_PIECE_S, reply_frame_bytes=size)
        frame = answer.frames[0] if len(answer.frames) == 1 else TensorFrame("uint8", (0,), b"")
        if (frame.dtype, frame.shape, frame.coding, frame.lossless) == ("uint8", (size,), "none", False):
            return memoryview(frame.payload)
        raise ProtocolViolation("a piece of a checkpoint has another size than asked for", holder)

    def _honest(self, holders: Sequence[PeerId]) -> list[PeerId]:
        now = trio.current_time()
        return [peer for peer in dict.fromkeys(holders) if self._shunned.get(peer, now) <= now]

    def _failed(self, pointer: Pointer, holder: PeerId, error: RemoteError) -> RemoteError:
        lied = isinstance(error, ProtocolViolation)
        if lied:
            self._shunned[holder] = trio.current_time() + _SHUN_S
        level = logging.WARNING if lied else logging.INFO
        log.log(level, "peer %s gave nothing of expert %s: %s", holder, pointer.expert.uid, error)
        return error


def _is_root(digests: memoryview, root: bytes) -> bool:
    return state_root([bytes(digests)]) == root


class _Download:
    """One download under way."""

    def __init__(self, pointer: Pointer, digests: bytes, sink: PieceSink, holders: deque[PeerId]) -> None:
        self.pointer, self.holders = pointer, holders
        self.left = pieces_of(pointer.size_bytes)
        self.todo = deque(range(self.left))
        self.failures = Counter[PeerId]()
        self.failure: RemoteError = Unreachable("no holder of the checkpoint is known")
        self.broken: OSError | None = None
        self.news = Signal()
        self._digests, self._sink = digests, sink

    def take(self, number: int, data: memoryview) -> bool:
        """Write a piece if it is right; on the worker."""
        at = number * DIGEST_BYTES
        if piece_digest(data) != self._digests[at : at + DIGEST_BYTES]:
            return False
        self._sink.write(number, data)
        return True
