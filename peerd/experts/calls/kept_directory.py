"""Directory of kept experts: which peers hold checkpoints, claim experts, or offer disk space. Reads and publishes it.

Records come from strangers: they are strictly decoded, and a bad one is skipped and its publisher logged. In a run with
tokens a record counts only with its publisher's token in it: for role expert in a claim, for expert or backbone in the
others. A pointer counts only with its owner's signature, no matter which peer holds it. Claims and pointers count only
in the lineage of an expert (`experts.owners.lineage`); if that depends on the holders, these are called to learn their
networks. Addresses go to the host's address book.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Final, Protocol, TypeVar

import msgspec
import trio

from peerd.core.addr import is_relayed, parse_addr
from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import ConfigError, ProtocolViolation, RemoteError, TooSlow, Unreachable
from peerd.core.ids import Key, PeerId
from peerd.core.limits import (
    ADDR_BYTES,
    ADDRS_PER_PEER,
    DIRECTORY_READ_BYTES,
    KEPT_EXPERTS,
    KEPT_EXPERTS_PER_RECORD,
    KEPT_RECORDS_PER_PREFIX,
)
from peerd.core.work import Worker
from peerd.dht.dht import Dht, Record
from peerd.experts.owners.lineage import ExpertLineages
from peerd.experts.owners.owner_tree import ExpertReign, KeptCopy
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.messages.encoding import Empty, decode, encode
from peerd.messages.experts import Announced, CheckpointRef, HolderOffer, KeptExperts, PieceWanted
from peerd.messages.state import DIGEST_BYTES
from peerd.rpc.rpc import Rpc
from peerd.run.grid import Uid, coordinates_in, grid_of, holders_key, kept_experts_key, prefix_key
from peerd.run.runfile import RunFile, fingerprint
from peerd.wire.budget.book import NEAR, user_at
from peerd.wire.host.host import Host
from peerd.wire.rate.quota import LogLimit

log = logging.getLogger("peerd.experts.calls.kept_directory")

M = TypeVar("M", Announced, HolderOffer, KeptExperts)
GET: Final = "vault/2/get"
_AT_ONCE: Final = 8  # records published concurrently
_CALLED: Final = 32  # holders that one read calls to learn their networks, those of known owners first
_RELAYED: Final = "behind relays"
_SAID_AGAIN_S: Final = 600.0  # time after which the same fault of a peer is a warning again
_PATIENCE_S, _PATIENCE_MOST_S = 1.0, 10.0  # least and most time that a peer gets to answer
_NOTHING: Final = PieceWanted(bytes(DIGEST_BYTES), 0)


class VaultPeer(Protocol):
    """What a vault needs of its peer; a role's context and a `PeerStack` provide it."""

    @property
    def host(self) -> Host: ...
    @property
    def rpc(self) -> Rpc: ...
    @property
    def dht(self) -> Dht: ...
    @property
    def clock(self) -> Clock: ...


@dataclass(slots=True)
class CustodyView:
    """What one read of the directory found: checkpoints, claims and offers of disk space."""

    kept: dict[Uid, list[KeptCopy]] = field(default_factory=dict)  # of owners in the lineage, newest first
    claims: dict[Uid, SeenClaim] = field(default_factory=dict)  # the owner's claim of each
    offers: dict[PeerId, HolderOffer] = field(default_factory=dict)
    told: dict[Uid, list[SeenClaim]] = field(default_factory=dict)  # all claims, including strangers'
    waits: set[Uid] = field(default_factory=set)  # experts that another host may own soon


@dataclass(frozen=True, slots=True)
class ReadingPeer:
    """A `VaultPeer` for a process that only reads the directory, and stores no checkpoints itself."""

    host: Host
    rpc: Rpc
    dht: Dht
    clock: Clock


class KeptDirectory:
    """Reads and publishes which peers host one run's experts, and which peers hold the experts' checkpoints."""

    def __init__(self, run: RunFile, peer: VaultPeer, worker: Worker) -> None:
        assert run.experts is not None
        self.run, self.grid = run.run, grid_of(run)
        self._fingerprint = fingerprint(run)
        self._peer, self._worker = peer, worker
        # A lost peer delays every reader, so reads return what was found by then.
        self._patience_s = min(_PATIENCE_MOST_S, max(_PATIENCE_S, run.experts.announce_s / 8))
        self._ttl_s = max(3 * run.experts.announce_s, 5.0)
        self._genuine = BoundedDict[bytes, None](4 * KEPT_EXPERTS)  # pointers with valid signatures
        self._forged = BoundedDict[bytes, None](KEPT_EXPERTS)
        self._announce_s = run.experts.announce_s
        self.lineages = ExpertLineages(run.experts.announce_s, peer.host.id, self.seat)
        self._silent = BoundedDict[PeerId, float](KEPT_EXPERTS)  # peers that did not answer -> end of the pause
        self._log_limit = LogLimit[tuple[PeerId, str]](_SAID_AGAIN_S, KEPT_EXPERTS)  # by peer and fault
        self._published: dict[tuple[Key, bytes], tuple[object, float]] = {}  # (compared content, time of publication)

    @property
    def last_prefixes(self) -> int:
        """Number of prefixes directly above experts."""
        return self.grid.layers * self.grid.places // self.grid.sides[-1]

    def last_prefix(self, number: int) -> Uid:
        """A prefix directly above experts, by number."""
        return self.grid.uid(number * self.grid.sides[-1]).prefix

    # --- reading ----------------------------------------------------------------------------------------------

    async def look(
        self, prefixes: Sequence[Uid], timeout_s: float | None = None, shown: CheckpointRef | None = None
    ) -> CustodyView:
        """Read claims and checkpoints below these prefixes, and all offers. Raises RemoteError if the directory is
        unreadable.

        If the time runs out, returns what was found by then, because a lost peer delays every reader. `shown`: a signed
        pointer that its owner sends to this peer and that may not be in the directory yet.
        """
        kept = {kept_experts_key(self.run, prefix): prefix for prefix in prefixes}
        claimed = {prefix_key(self.run, prefix): prefix for prefix in prefixes}
        keys = [*kept, *claimed, holders_key(self.run)]
        timeout_s = timeout_s or self._patience_s
        found, whole = await self._peer.dht.read(keys, timeout_s=timeout_s, most_bytes=DIRECTORY_READ_BYTES)
        view = CustodyView(offers=self._offers(found.get(holders_key(self.run), [])))
        for key, prefix in claimed.items():
            await trio.lowlevel.checkpoint()  # a prefix may have a thousand claims
            for uid, claim in self._claims(prefix, found.get(key, [])):
                view.told.setdefault(uid, []).append(claim)
        told = [each for key, prefix in kept.items() for each in self._shown(prefix, found.get(key, []))]
        await self._settle(view, await self._copies(told if shown is None else [*told, (shown.peer, shown)]), whole)
        return view

    async def owners(self, prefixes: Sequence[Uid], before: Mapping[Uid, ExpertReign]) -> dict[Uid, PeerId]:
        """Hosts that own experts below these prefixes and claim them. Raises RemoteError if the directory is
        unreadable.

        `before`: hosts that this peer has called for some time; they count if it does not know the lineage.
        """
        for uid, reign in before.items():
            self.lineages.followed(trio.current_time(), uid, reign)
        view = await self.look(prefixes)
        return {uid: claim.peer for uid, claim in view.claims.items()}

    async def _settle(self, view: CustodyView, copies: dict[Uid, list[KeptCopy]], whole: bool) -> None:
        """Fill in the owner of each expert, and its owners' checkpoints. `whole`: some peer answered for each key."""
        uids, now = [*dict.fromkeys([*view.told, *copies])], trio.current_time()
        known, others = list[list[PeerId]](), list[list[PeerId]]()
        for uid in uids:
            claims, shown = view.told.get(uid, ()), copies.get(uid, ())
            if self.lineages.is_open(now, uid, claims, shown):
                # Adopters check whether the last owner answers; waiting for it here would delay every read.
                gone, line = self.lineages.gone(now, uid, claims), self.lineages.line(uid)
                holders = dict[ExpertReign, list[PeerId]]()
                for copy in shown:
                    holders.setdefault(copy.reign, []).extend(peer for peer in copy.holders if peer != gone)
                for reign, peers in holders.items():
                    (known if reign in line else others).append(peers)
                others.append([claim.peer for claim in claims if claim.peer != gone])
        if known or others:
            await self._call([*_in_turns(known), *_in_turns(others)])
        for number, uid in enumerate(uids):
            if number % 64 == 63:
                await trio.lowlevel.checkpoint()
            told, shown = view.told.get(uid, ()), copies.get(uid, ())
            found = self.lineages.settle(trio.current_time(), uid, told, shown, whole=whole)
            if found.claim is not None:
                view.claims[uid] = found.claim
            if found.kept:
                view.kept[uid] = list(found.kept)
            if found.waits:
                view.waits.add(uid)
            self._name_strangers(uid, shown, found.kept)

    def _name_strangers(self, uid: Uid, shown: Sequence[KeptCopy], kept: Sequence[KeptCopy]) -> None:
        """Log the owners of checkpoints that do not count."""
        counted = {copy.pointer.peer for copy in kept}
        for owner in dict.fromkeys(copy.pointer.peer for copy in shown):
            if owner not in counted:
                text = "skipped a checkpoint of expert %s by peer %s, which is not an owner in the known lineage"
                self.blame(owner, text, uid, owner)

    def blame(self, peer: PeerId, text: str, *facts: object) -> None:
        """Log a peer's fault as a warning; the same fault within ten minutes is logged for debugging only."""
        first = self._log_limit.may_log(trio.current_time(), (peer, text))
        log.log(logging.WARNING if first else logging.DEBUG, text, *facts)

    def seat(self, peer: PeerId) -> str | None:
        """The network of a peer, or its address in a private network, as its connection shows; None without a
        connection.

        All peers behind relays count as one network, because relays are free and so their networks prove nothing.
        """
        if peer == self._peer.host.id:
            addr = next(iter(self._peer.host.addrs()), None)
        else:
            link = self._peer.host.links.best(peer)
            addr = link.remote if link is not None else None
        if addr is None:
            return None
        if is_relayed(addr):
            return _RELAYED
        user = user_at(peer.text, addr)
        return user.place if user.region.startswith(NEAR) else user.region

    async def answers(self, peer: PeerId, timeout_s: float) -> bool:
        """True if a peer answers at all. A peer that does not within a read's time limit is not called by reads for a
        while.
        """
        try:
            await self._peer.rpc.call(peer, GET, _NOTHING, Empty, timeout_s=timeout_s, reply_frame_bytes=0)
        except (Unreachable, TooSlow):
            if timeout_s >= self._patience_s:
                self._silent[peer] = trio.current_time() + self._announce_s
            return False
        except RemoteError:
            pass
        self._silent.pop(peer, None)
        return True

    async def _call(self, peers: Iterable[PeerId]) -> None:
        """Connect to those of these peers that have no connection, so that their networks count."""
        now = trio.current_time()
        absent = [
            peer for peer in dict.fromkeys(peers) if self.seat(peer) is None and self._silent.get(peer, now) <= now
        ]

        async with trio.open_nursery() as nursery:
            for peer in absent[:_CALLED]:
                nursery.start_soon(self.answers, peer, self._patience_s)

    async def offers(self) -> dict[PeerId, HolderOffer]:
        """The peers that offer disk space for others' checkpoints, each with its offer."""
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
            return "is stored under another prefix"
        if len(announced.below) != -(-side // 8) or any(at >= side for at in coordinates):
            return "has a bitmap of another size"
        if not len(coordinates) == len(announced.generations) == len(announced.versions):
            return "has different numbers of generations, versions and experts"
        return None

    def _shown(self, prefix: Uid, records: Iterable[Record]) -> Iterator[tuple[PeerId, CheckpointRef]]:
        check: Callable[[KeptExperts], str | None] = partial(self._check_kept, prefix)
        for record in records:
            kept = self._read(KeptExperts, record, "expert", "backbone", check=check)
            yield from ((record.publisher, pointer) for pointer in (kept.pointers if kept is not None else ()))

    def _check_kept(self, prefix: Uid, kept: KeptExperts) -> str | None:
        for pointer in kept.pointers:
            if pointer.run != self._fingerprint:
                return "names checkpoints of another run"
            if not self.grid.is_expert(pointer.expert.uid) or pointer.expert.uid.prefix != prefix:
                return "names experts that are not below its prefix"
        return None

    async def _copies(self, shown: list[tuple[PeerId, CheckpointRef]]) -> dict[Uid, list[KeptCopy]]:
        """The pointers with valid signatures of their owners, the newest of each expert first."""
        told = [(holder, pointer, encode(pointer)) for holder, pointer in shown]
        signed = {whole for _, _, whole in told if whole in self._genuine}
        new = {whole: pointer for _, pointer, whole in told if whole not in signed and whole not in self._forged}
        if new:

            def genuine() -> list[bytes]:
                return [whole for whole, pointer in new.items() if pointer.is_signed()]

            signed.update(await self._worker.run(genuine, name="check signatures of checkpoints"))
            for whole in new:
                (self._genuine if whole in signed else self._forged)[whole] = None
        copies = dict[bytes, KeptCopy]()
        for holder, pointer, whole in told:
            if whole in signed:
                copies.setdefault(whole, KeptCopy(pointer)).holders.append(holder)
            else:
                text = "skipped a checkpoint of expert %s published by peer %s: its owner did not sign it"
                self.blame(holder, text, pointer.expert.uid, holder)
        found = dict[Uid, list[KeptCopy]]()
        for copy in sorted(copies.values(), key=lambda c: c.pointer.rank, reverse=True):
            found.setdefault(copy.pointer.expert.uid, []).append(copy)
        return found

    def _read(
        self, kind: type[M], record: Record, *roles: str, check: Callable[[M], str | None] = lambda _: None
    ) -> M | None:
        """Decode a record and learn its publisher's addresses. Returns None if the record does not count."""
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
            self.blame(record.publisher, "skipped a record: %s", error.blame(record.publisher))
            return None
        return read

    # --- publishing -------------------------------------------------------------------------------------------

    async def announce(self, pointers: Sequence[CheckpointRef], offer: HolderOffer) -> None:
        """Publish which checkpoints we hold, most important first, and our free disk space. Raises RemoteError.

        Checkpoints of a prefix that exceed our share of its key are held but not published. `offer` needs no addresses.
        """
        token = self._peer.rpc.gate.token if self._peer.rpc.gate is not None else b""
        addrs, wall = self._own_addrs(), self._peer.clock.wall()
        client = not self._peer.host.takes_inbound
        offer = msgspec.structs.replace(offer, addrs=addrs, token=token, client=client)
        records = {(holders_key(self.run), b""): (encode(offer), encode(offer))}
        below = dict[Uid, list[CheckpointRef]]()
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
        """Publish records that are new or past a third of their life; withdraw others. Records: (compared content,
        value).
        """
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
        """Withdraw all our records."""
        await self._publish({})

    def _own_addrs(self) -> list[str]:
        told = [str(addr) for addr in self._peer.host.addrs()]
        return [text for text in told if len(text) <= ADDR_BYTES][:ADDRS_PER_PEER]


def _in_turns(lists: Sequence[Sequence[PeerId]]) -> list[PeerId]:
    """The first of each list, then the second of each, and so on, so that no list crowds out the others."""
    return [peer for each in zip_longest(*lists) for peer in each if peer is not None]
