"""Directory of kept experts: who holds which checkpoints, who claims which experts, who has room; and telling so.

Records are strangers': decoded strictly, a bad one is skipped and its publisher named in the log. In a run with tokens
one counts only with its publisher's token in it: of an expert for claims, of an expert or a backbone for the rest. A
pointer counts only with its owner's signature, whoever shows it. Addresses go to the host's address book.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import trio

from peerd.core.addr import parse_addr
from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import ConfigError, ProtocolViolation
from peerd.core.experts.grid import (
    Uid,
    coordinates_in,
    grid_of,
    holders_key,
    kept_experts_key,
    prefix_key,
)
from peerd.core.ids import Key, PeerId
from peerd.core.limits import (
    ADDR_BYTES,
    ADDRS_PER_PEER,
    DIRECTORY_READ_BYTES,
    KEPT_EXPERTS,
    KEPT_EXPERTS_PER_RECORD,
    KEPT_RECORDS_PER_PREFIX,
)
from peerd.core.messages.encoding import decode, encode
from peerd.core.messages.experts import Announced, HolderOffer, KeptExperts, Pointer
from peerd.core.run.runfile import RunFile, fingerprint
from peerd.core.work import Worker
from peerd.machine.experts.custody import SeenClaim
from peerd.net.host.host import Host
from peerd.service.dht.dht import Dht, Record
from peerd.service.rpc.rpc import Rpc

log = logging.getLogger("peerd.service.experts.kept_directory")

M = TypeVar("M", Announced, HolderOffer, KeptExperts)
_AT_ONCE = 8  # records that are published


class VaultPeer(Protocol):
    """The peer on which a vault stands: a role's context, or a peer's stack."""

    @property
    def host(self) -> Host: ...
    @property
    def rpc(self) -> Rpc: ...
    @property
    def dht(self) -> Dht: ...
    @property
    def clock(self) -> Clock: ...


@dataclass(slots=True)
class KeptCopy:
    """A checkpoint, and those who say that they hold it."""

    pointer: Pointer
    holders: list[PeerId] = field(default_factory=list)


@dataclass(slots=True)
class CustodyView:
    """What one look at the directory showed."""

    kept: dict[Uid, list[KeptCopy]] = field(default_factory=dict)  # the newest first
    claims: dict[Uid, SeenClaim] = field(default_factory=dict)  # the winner of each
    offers: dict[PeerId, HolderOffer] = field(default_factory=dict)


class KeptDirectory:
    """See the module's header."""

    def __init__(self, run: RunFile, peer: VaultPeer, worker: Worker) -> None:
        assert run.experts is not None
        self.run, self.grid = run.run, grid_of(run)
        self._fingerprint = fingerprint(run)
        self._peer, self._worker = peer, worker
        # A peer that was lost holds up whoever asks it; what was found, or told, by then has to do.
        self._patience_s = min(10.0, max(1.0, run.experts.announce_s / 8))
        self._ttl_s = max(3 * run.experts.announce_s, 5.0)
        self._genuine = BoundedDict[bytes, None](4 * KEPT_EXPERTS)  # signatures of pointers that were checked
        self._published: dict[tuple[Key, bytes], tuple[object, float]] = {}  # what of it is told anew, and when it was

    @property
    def last_prefixes(self) -> int:
        """Number of prefixes right above experts."""
        return self.grid.layers * self.grid.places // self.grid.sides[-1]

    def last_prefix(self, number: int) -> Uid:
        """A prefix right above experts, by number."""
        return self.grid.uid(number * self.grid.sides[-1]).prefix

    # --- reading ----------------------------------------------------------------------------------------------

    async def look(self, prefixes: Sequence[Uid], timeout_s: float | None = None) -> CustodyView:
        """Claims and checkpoints below these, and all offers; RemoteError when the directory cannot be read.

        When the time runs out, what was found by then: a peer that was lost holds up whoever asks it.
        """
        kept = {kept_experts_key(self.run, prefix): prefix for prefix in prefixes}
        claimed = {prefix_key(self.run, prefix): prefix for prefix in prefixes}
        keys = [*kept, *claimed, holders_key(self.run)]
        timeout_s = timeout_s or self._patience_s
        found = await self._peer.dht.get_many(keys, timeout_s=timeout_s, most_bytes=DIRECTORY_READ_BYTES)
        view = CustodyView(offers=self._offers(found.get(holders_key(self.run), [])))
        for key, prefix in claimed.items():
            await trio.lowlevel.checkpoint()  # a prefix may have a thousand claims
            for uid, claim in self._claims(prefix, found.get(key, [])):
                if uid not in view.claims or claim.rank > view.claims[uid].rank:
                    view.claims[uid] = claim
        shown = [each for key, prefix in kept.items() for each in self._shown(prefix, found.get(key, []))]
        await self._sort_in(view, shown)
        return view

    async def offers(self) -> dict[PeerId, HolderOffer]:
        """The peers that have room."""
        key = holders_key(self.run)
        return self._offers(await self._peer.dht.get(key, most_bytes=DIRECTORY_READ_BYTES))

    def _offers(self, records: Iterable[Record]) -> dict[PeerId, HolderOffer]:
        read = ((r.publisher, self._read(HolderOffer, r, "expert", "backbone")) for r in records)
        return {peer: offer for peer, offer in read if offer is not None}

    def _claims(self, prefix: Uid, records: Iterable[Record]) -> Iterator[tuple[Uid, SeenClaim]]:
        for record in records:
            announced = self._read(Announced, record, "expert", check=partial(self._check_claims, prefix))
            if announced is not None:
                numbers = zip(coordinates_in(announced.below), announced.generations, announced.versions, strict=True)
                for at, generation, version in numbers:
                    yield prefix.below(at), SeenClaim(record.publisher, generation, version, record.expires)

    def _check_claims(self, prefix: Uid, announced: Announced) -> str | None:
        side, coordinates = self.grid.side_below(prefix), coordinates_in(announced.below)
        if announced.prefix.uid != prefix:
            return "stands under another prefix"
        if len(announced.below) != -(-side // 8) or any(at >= side for at in coordinates):
            return "has a bitmap of another size"
        if not len(coordinates) == len(announced.generations) == len(announced.versions):
            return "has another number of generations or versions than experts"
        return None

    def _shown(self, prefix: Uid, records: Iterable[Record]) -> Iterator[tuple[PeerId, Pointer]]:
        check: Callable[[KeptExperts], str | None] = partial(self._check_kept, prefix)
        for record in records:
            kept = self._read(KeptExperts, record, "expert", "backbone", check=check)
            yield from ((record.publisher, pointer) for pointer in (kept.pointers if kept is not None else ()))

    def _check_kept(self, prefix: Uid, kept: KeptExperts) -> str | None:
        for pointer in kept.pointers:
            if pointer.run != self._fingerprint:
                return "names checkpoints of another run"
            if not self.grid.is_expert(pointer.expert.uid) or pointer.expert.uid.prefix != prefix:
                return "names experts that do not lie below its prefix"
        return None

    async def _sort_in(self, view: CustodyView, shown: list[tuple[PeerId, Pointer]]) -> None:
        """Add pointers that their owners signed."""
        told = [(holder, pointer, encode(pointer)) for holder, pointer in shown]
        new = {whole: pointer for _, pointer, whole in told if whole not in self._genuine}
        if new:

            def genuine() -> list[bytes]:
                return [whole for whole, pointer in new.items() if pointer.is_signed()]

            for whole in await self._worker.run(genuine, name="check signatures of checkpoints"):
                self._genuine[whole] = None
        copies = dict[bytes, KeptCopy]()
        for holder, pointer, whole in told:
            if whole in self._genuine:
                copies.setdefault(whole, KeptCopy(pointer)).holders.append(holder)
            else:
                uid = pointer.expert.uid
                log.warning("skipped a checkpoint of expert %s that peer %s shows: its owner did not sign", uid, holder)
        for copy in sorted(copies.values(), key=lambda c: c.pointer.rank, reverse=True):
            view.kept.setdefault(copy.pointer.expert.uid, []).append(copy)

    def _read(
        self, kind: type[M], record: Record, *roles: str, check: Callable[[M], str | None] = lambda _: None
    ) -> M | None:
        """A record's content, its publisher's addresses learned; None when it does not count."""
        gate = self._peer.rpc.gate
        try:
            read = decode(kind, record.value)
            if gate is not None and gate.named(record.publisher, read.token, *roles) is None:
                return None
            if (why := check(read)) is not None:
                raise ProtocolViolation(f"a record of {kind.__name__} {why}")
            try:
                self._peer.host.learn(record.publisher, map(parse_addr, read.addrs), by=record.publisher)
            except ConfigError as error:
                raise ProtocolViolation(str(error)) from None
        except ProtocolViolation as error:
            log.warning("skipped a record: %s", error.blame(record.publisher))
            return None
        return read

    # --- telling ----------------------------------------------------------------------------------------------

    async def announce(self, pointers: Sequence[Pointer], offer: HolderOffer) -> None:
        """Publish what we hold, in the order of importance, and what room we have; RemoteError when it fails.

        Of a prefix, what does not fit into our share of its key is held and not told. `offer` needs no addresses.
        """
        token = self._peer.rpc.gate.token if self._peer.rpc.gate is not None else b""
        addrs, wall = self._own_addrs(), self._peer.clock.wall()
        client = not self._peer.host.takes_inbound
        offer = msgspec.structs.replace(offer, addrs=addrs, token=token, client=client)
        records = {(holders_key(self.run), b""): (encode(offer), encode(offer))}
        below = dict[Uid, list[Pointer]]()
        for pointer in pointers:
            below.setdefault(pointer.expert.uid.prefix, []).append(pointer)
        for prefix, inside in below.items():
            for number in range(min(KEPT_RECORDS_PER_PREFIX, -(-len(inside) // KEPT_EXPERTS_PER_RECORD))):
                told = inside[number * KEPT_EXPERTS_PER_RECORD :][:KEPT_EXPERTS_PER_RECORD]
                kept = KeptExperts(told, addrs, token)
                same = encode(kept)
                value = encode(msgspec.structs.replace(kept, since=wall))
                records[kept_experts_key(self.run, prefix), bytes([number])] = (same, value)
        await self._publish(records)

    async def _publish(self, records: dict[tuple[Key, bytes], tuple[bytes, bytes]]) -> None:
        """Put what is new, or a third of its life old; withdraw what is no more. Records: what is compared, value."""
        now, limit = trio.current_time(), trio.CapacityLimiter(_AT_ONCE)

        async def put(place: tuple[Key, bytes], same: bytes, value: bytes) -> None:
            async with limit:
                await self._peer.dht.put(
                    place[0], value, ttl_s=self._ttl_s, suffix=place[1], timeout_s=self._patience_s
                )
                self._published[place] = (same, now)

        async def withdraw(place: tuple[Key, bytes]) -> None:
            async with limit:
                await self._peer.dht.withdraw(place[0], suffix=place[1])

        async with trio.open_nursery() as nursery:
            for place, (same, value) in records.items():
                before, at = self._published.get(place, (b"", 0.0))
                if before != same or now - at >= self._ttl_s / 3:
                    nursery.start_soon(put, place, same, value)
            for place in [place for place in self._published if place not in records]:
                del self._published[place]
                nursery.start_soon(withdraw, place)

    async def withdraw(self) -> None:
        """Take everything back."""
        await self._publish({})

    def _own_addrs(self) -> list[str]:
        told = [str(addr) for addr in self._peer.host.addrs()]
        return [text for text in told if len(text) <= ADDR_BYTES][:ADDRS_PER_PEER]
