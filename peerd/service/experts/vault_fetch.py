"""Fetches a checkpoint in pieces from one or more holders at once; each piece is checked before it is written.

The pieces are in one queue, from which each holder's lanes take. If a holder fails to send a piece, the piece returns
to the queue for another holder. The digests are fetched first, from any holder whose digests match the pointer's. A
hostile holder may send other bytes, other shapes, or nothing: the log names it, and a holder that sent wrong data is
not asked for that checkpoint for a while (only for that one, as its disk may be corrupt). A late piece is requested
from another holder as well.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import trio

from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import LINKS
from peerd.core.messages.encoding import Empty
from peerd.core.messages.experts import DIGEST_BYTES, CheckpointRef, PieceWanted, state_root
from peerd.core.messages.state import piece_digest
from peerd.core.work import Worker
from peerd.machine.rate.suspicion import Suspicion
from peerd.service.experts.kept_directory import GET
from peerd.service.experts.vault_disk import Bytes, piece_at, pieces_of
from peerd.service.rpc.rpc import Rpc
from peerd.signals import Signal

log = logging.getLogger("peerd.service.experts.vault_fetch")

_PIECE_S: Final = 30.0  # for one piece, or the digests: 1 MiB at the rate of a modem
_LANES: Final = 4  # pieces requested from one holder at once
_HOLDERS: Final = 4  # asked at once; others replace those that fail
_LATE_S: Final = 2.0  # after which another holder is asked as well
_FAILURES: Final = 2  # of one holder, after which it is not asked further
_SHUN_S: Final = 600.0  # for which a holder that sent wrong data is not asked


class PieceSink(Protocol):
    """The destination of pieces; called on the worker."""

    def write(self, number: int, data: Bytes) -> None: ...


class MemorySink:
    """A checkpoint in memory."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write(self, number: int, data: Bytes) -> None:
        begin, end = piece_at(len(self.data), number)
        self.data[begin:end] = data


class PieceFetch:
    """Fetches checkpoints, any number at once, and remembers which holders sent wrong data."""

    def __init__(self, rpc: Rpc, worker: Worker) -> None:
        self._rpc, self._worker = rpc, worker
        self._shunned = Suspicion[tuple[PeerId, bytes]](_SHUN_S, _SHUN_S, LINKS)  # by holder and digest

    async def digests(self, pointer: CheckpointRef, holders: Sequence[PeerId]) -> bytes:
        """The digests of all pieces, joined. Raises the RemoteError of the last holder if none returns them.

        If a holder is slow, the next one is asked as well.
        """
        failure: RemoteError = Unreachable("no holder of the checkpoint is known")
        found = list[bytes]()
        news, left = Signal(), self._honest(pointer, holders)
        asked = 0

        async def ask(holder: PeerId) -> None:
            nonlocal asked, failure
            try:
                found.append(await self._digests(pointer, holder))
                nursery.cancel_scope.cancel()
            except RemoteError as error:
                failure = self._failed(pointer, holder, error)
            asked -= 1
            news.notify()

        async with trio.open_nursery() as nursery:
            for holder in left:
                asked += 1
                nursery.start_soon(ask, holder)
                with trio.move_on_after(_LATE_S):
                    while asked:
                        await news.wait()
        if not found:
            raise failure
        return found[0]

    async def _digests(self, pointer: CheckpointRef, holder: PeerId) -> bytes:
        size = DIGEST_BYTES * pieces_of(pointer.size_bytes)
        data = bytes(await self._get(holder, PieceWanted(pointer.digest, -1), size))
        root = await self._worker.run(lambda: state_root([data]), name="check the digests of an expert")
        if root != pointer.digest:
            raise ProtocolViolation("the digests of the checkpoint have the wrong digest", holder)
        return data

    async def fetch(self, pointer: CheckpointRef, holders: Sequence[PeerId], digests: bytes, sink: PieceSink) -> None:
        """Fetch all pieces into `sink`. Raises RemoteError if the holders cannot provide them, OSError if the sink
        fails.
        """
        download = _Download(pointer, digests, sink, deque(self._honest(pointer, holders)))
        async with trio.open_nursery() as nursery:
            download.scope = nursery.cancel_scope
            for _ in range(_HOLDERS):
                nursery.start_soon(self._ask_holders, download)
        if download.broken is not None:
            raise download.broken
        if download.left:
            raise download.failure

    async def _ask_holders(self, download: _Download) -> None:
        """Ask one holder after another, until all pieces have arrived or no holder is left."""
        while download.holders:
            holder = download.holders.popleft()
            async with trio.open_nursery() as nursery:
                for _ in range(_LANES):
                    nursery.start_soon(self._lane, download, holder)

    async def _lane(self, download: _Download, holder: PeerId) -> None:
        while download.failures[holder] < _FAILURES:
            number = download.next_piece(holder, trio.current_time())
            if number is None:
                with trio.move_on_after(_LATE_S):  # a requested piece may return to the queue, or be late
                    await download.news.wait()
                continue
            try:
                await self._piece(download, holder, number)
            except RemoteError as error:
                lied = isinstance(error, ProtocolViolation)
                download.failures[holder] += _FAILURES if lied else 1
                download.failure = self._failed(download.pointer, holder, error)
                download.come_back(number)
            except OSError as error:
                download.end(error)

    async def _piece(self, download: _Download, holder: PeerId, number: int) -> None:
        begin, end = piece_at(download.pointer.size_bytes, number)
        data = await self._get(holder, PieceWanted(download.pointer.digest, number), end - begin)
        if not await self._worker.run(partial(download.take, number, data), name="check a piece of an expert"):
            raise ProtocolViolation(f"piece {number} of the checkpoint has the wrong digest", holder)
        download.arrived(number)

    async def _get(self, holder: PeerId, wanted: PieceWanted, size: int) -> memoryview:
        answer = await self._rpc.call(holder, GET, wanted, Empty, timeout_s=_PIECE_S, reply_frame_bytes=size)
        frame = answer.frames[0] if len(answer.frames) == 1 else TensorFrame("uint8", (0,), b"")
        if (frame.dtype, frame.shape, frame.coding, frame.lossless) == ("uint8", (size,), "none", False):
            return memoryview(frame.payload)
        raise ProtocolViolation("a piece of a checkpoint does not have the requested size", holder)

    def _honest(self, pointer: CheckpointRef, holders: Sequence[PeerId]) -> list[PeerId]:
        now, digest = trio.current_time(), pointer.digest
        return [peer for peer in dict.fromkeys(holders) if not self._shunned.is_aside(now, (peer, digest))]

    def _failed(self, pointer: CheckpointRef, holder: PeerId, error: RemoteError) -> RemoteError:
        lied = isinstance(error, ProtocolViolation)
        if lied:
            self._shunned.failed(trio.current_time(), (holder, pointer.digest))
        level = logging.WARNING if lied else logging.INFO
        log.log(level, "peer %s did not provide the checkpoint of expert %s: %s", holder, pointer.expert.uid, error)
        return error


class _Download:
    """A download in progress: the pieces still to be requested, those requested, and those that have arrived."""

    def __init__(self, pointer: CheckpointRef, digests: bytes, sink: PieceSink, holders: deque[PeerId]) -> None:
        self.pointer, self.holders = pointer, holders
        self.left = set(range(pieces_of(pointer.size_bytes)))
        self.failures = Counter[PeerId]()
        self.failure: RemoteError = Unreachable("no holder of the checkpoint is known")
        self.broken: OSError | None = None
        self.news = Signal()
        self.scope = trio.CancelScope()
        self._todo = deque(sorted(self.left))
        self._asked: dict[int, tuple[float, set[PeerId]]] = {}  # piece -> (time of the last request, holders asked)
        self._digests, self._sink = digests, sink

    def next_piece(self, holder: PeerId, now: float) -> int | None:
        """A piece to request from `holder`: an unrequested one, else a late one that this holder was not asked for."""
        number = self._todo.popleft() if self._todo else None
        if number is None:
            late = (n for n, (at, whom) in self._asked.items() if holder not in whom and now - at >= _LATE_S)
            number = next(late, None)
        if number is not None:
            _, whom = self._asked.get(number, (now, set()))
            self._asked[number] = (now, whom | {holder})
        return number

    def come_back(self, number: int) -> None:
        """Queue a piece again, because a holder did not send it."""
        if number in self.left and number not in self._todo:
            self._asked.pop(number, None)
            self._todo.append(number)
        self.news.notify()

    def take(self, number: int, data: memoryview) -> bool:
        """Write a piece if its digest is right; on the worker."""
        at = number * DIGEST_BYTES
        if piece_digest(data) != self._digests[at : at + DIGEST_BYTES]:
            return False
        self._sink.write(number, data)
        return True

    def arrived(self, number: int) -> None:
        """Record a piece that was written."""
        self.left.discard(number)
        self._asked.pop(number, None)
        self.news.notify()
        if not self.left:
            self.end(None)

    def end(self, broken: OSError | None) -> None:
        """Cancel the rest of the download."""
        self.broken = broken
        self.scope.cancel()
