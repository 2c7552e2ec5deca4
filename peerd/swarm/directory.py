"""Directory of a run: which peer serves which stage, as the DHT and the conductor report it, and our own records.

Also which peers keep checkpoints. Everyone's last known addresses go to the host's address book. Values from the DHT
are strangers' input: they are decoded strictly, and an invalid one is ignored and logged with its publisher. In a run
with tokens a record counts only with its publisher's token for the role: stage peer, backbone, or trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import trio

from peerd.core.addr import parse_addr
from peerd.core.errors import ConfigError, ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER, DIRECTORY_READ_BYTES, JOINER_STAGES, KEPT_SETS
from peerd.core.signals import Signal
from peerd.dht.dht import Dht
from peerd.messages.encoding import decode, encode
from peerd.messages.progress import (
    Joiner,
    KeptCheckpoints,
    StageProgress,
    decode_stage,
    encode_progress,
    joining_key,
    kept_key,
    progress_key,
    settings_key,
    stage_key,
)
from peerd.messages.settings import PublishedSettings, read_settings
from peerd.messages.swarm import MemberInfo, Position
from peerd.rpc.rpc_types import AccessGuard
from peerd.swarm.stage_choice import CHOOSING_S, TAKING_S, Arrival
from peerd.wire.host.host import Host

log = logging.getLogger("peerd.swarm.directory")

RECORD_TTL_S = 60.0
_FELLOWS_ASKED = 8  # at most, in one call: one that answers is enough


@dataclass(frozen=True, slots=True)
class StagePeer:
    """A stage peer, as its own record describes it."""

    peer: PeerId
    progress: StageProgress


@dataclass(frozen=True, slots=True)
class SettingsTold:
    """Settings published by other peers: by peers that serve a stage, and by trainers."""

    serving: list[PublishedSettings]
    training: list[PublishedSettings]


class Directory:
    """Finds the stage peers of one run and the keepers of its checkpoints, and publishes our own records."""

    def __init__(self, run: str, stages: int, host: Host, dht: Dht, gate: AccessGuard | None = None) -> None:
        self.run, self.stages = run, stages
        self._host, self._dht, self._gate = host, dht, gate
        self.announced: dict[tuple[PeerId, int], StagePeer] = {}  # by peer and stage
        self.kept: dict[PeerId, list[Position]] = {}  # backbone -> positions whose checkpoints it says it keeps
        self.keeping = frozenset[PeerId]()  # all backbones that keep checkpoints, even if they have none yet
        self.answered = False  # True if a peer answered the last read; otherwise missing records mean nothing
        self._answered_at = float("-inf")  # last time that a peer answered, in trio time

    async def refresh(self) -> dict[tuple[PeerId, int], StagePeer]:
        """Read the records of all stages and of kept checkpoints. What could not be read stays as it was."""
        keys = {stage_key(self.run, stage): stage for stage in range(self.stages)}
        try:
            wanted = [*keys, kept_key(self.run)]
            found, self.answered = await self._dht.read(wanted, most_bytes=DIRECTORY_READ_BYTES)
        except RemoteError as error:
            log.info("the stage records of %s could not be read: %s", self.run, error)
            self.answered = False
            return self.announced
        if self.answered:
            self._answered_at = trio.current_time()
        read = [(r, stage) for key, stage in keys.items() for r in found.get(key, [])]
        entries = [entry for r, stage in read if (entry := self._entry(r.publisher, r.value, stage)) is not None]
        fresh = _present(entries)
        if not self.answered and trio.current_time() - self._answered_at < RECORD_TTL_S:
            fresh = self.announced | fresh  # no answer says that the others are gone, and their records still live
        self.announced = fresh
        records = [(r.publisher, self._kept_by(r.publisher, r.value)) for r in found.get(kept_key(self.run), [])]
        kept = {peer: positions for peer, positions in records if positions is not None}
        told = {peer: positions for peer, positions in kept.items() if positions}
        self.kept = told if self.answered else self.kept | told
        self.keeping = frozenset(kept) if self.answered else self.keeping | frozenset(kept)
        return fresh

    def keepers(self, position: Position) -> list[PeerId]:
        """Peers that keep the checkpoints of a position."""
        return sorted(peer for peer, positions in self.kept.items() if position in positions)

    def _kept_by(self, peer: PeerId, value: bytes) -> list[Position] | None:
        """The positions in a backbone's record, or None if the record is not valid."""
        try:
            kept = decode(KeptCheckpoints, value)
            if self._gate is not None and self._gate.named(peer, kept.token, "backbone") is None:
                return None
            self.learn(peer, kept.addrs, by=peer)
        except ProtocolViolation as error:
            log.warning("ignored a record of kept checkpoints: %s", error.blame(peer))
            return None
        return kept.positions

    def _entry(self, peer: PeerId, value: bytes, stage: int) -> StagePeer | None:
        try:
            progress = decode_stage(value)
            if progress.stage != stage:
                raise ProtocolViolation("a stage record is under another stage's key")
            if self._gate is not None and self._gate.named(peer, progress.token, "stage") is None:
                return None  # the gate has logged it; a peer could otherwise conduct by a false claim
            self.learn(peer, progress.addrs, by=peer)
        except ProtocolViolation as error:
            log.warning("ignored a stage record: %s", error.blame(peer))
            return None
        return StagePeer(peer, progress)

    def learn(self, peer: PeerId, addrs: Iterable[str], by: PeerId | None = None) -> None:
        """Store the addresses of a peer, as `by` reports them (None if unknown). Raises ProtocolViolation."""
        try:
            self._host.learn(peer, [parse_addr(addr) for addr in addrs], by=by)
        except ConfigError as error:
            raise ProtocolViolation(str(error), peer) from None

    def learn_members(self, members: Iterable[MemberInfo]) -> list[MemberInfo]:
        """Store the addresses in the conductor's list, which may be newer than the DHT's. Returns the valid entries."""
        valid = []
        for member in members:
            try:
                self.learn(PeerId.parse(member.peer), member.addrs)
                valid.append(member)
            except (ValueError, ProtocolViolation) as error:
                log.warning("ignored a member of the conductor's list: %s", error)
        return valid

    async def announce(self, progress: StageProgress) -> None:
        """Publish our record. It expires unless it is published again."""
        if self._gate is not None:
            progress = msgspec.structs.replace(progress, token=self._gate.token)
        await self._dht.put(stage_key(self.run, progress.stage), encode_progress(progress), ttl_s=RECORD_TTL_S)

    async def withdraw(self, stage: int) -> None:
        await self._dht.withdraw(stage_key(self.run, stage))

    async def announce_kept(self, positions: Sequence[Position]) -> None:
        """Publish the positions of which we keep all stages' checkpoints. It expires unless it is published again."""
        token = self._gate.token if self._gate is not None else b""
        kept = KeptCheckpoints(list(positions)[-KEPT_SETS:], self.own_addrs(), token)
        await self._dht.put(kept_key(self.run), encode(kept), ttl_s=RECORD_TTL_S)

    async def publish_settings(self, settings: PublishedSettings) -> None:
        """Publish the settings that this peer follows."""
        await self._dht.put(settings_key(self.run), settings.encode(), ttl_s=RECORD_TTL_S)

    async def published_settings(self) -> SettingsTold:
        """Settings of this run as its stage peers and trainers publish them. Other publishers do not count."""
        serving = {peer for peer, _ in await self.refresh()}
        keys = [settings_key(self.run), progress_key(self.run)]
        found = await self._dht.get_many(keys, most_bytes=DIRECTORY_READ_BYTES)
        training = {record.publisher for record in found.get(keys[1], [])}
        own = self._host.id
        told = [(r.publisher, read_settings(r.value)) for r in found.get(keys[0], []) if r.publisher != own]
        return SettingsTold(
            serving=[settings for peer, settings in told if peer in serving],
            training=[s for peer, s in told if peer in training and self._is_trainer(peer, s)],
        )

    def _is_trainer(self, peer: PeerId, settings: PublishedSettings) -> bool:
        return self._gate is None or self._gate.named(peer, settings.token, "trainer") is not None

    async def fellows(self) -> list[PeerId]:
        """Up to 8 other peers that have published settings of this run, and to which we have or can make a link."""
        records = await self._dht.get(settings_key(self.run), most_bytes=DIRECTORY_READ_BYTES)
        linked = []
        for peer in sorted({r.publisher for r in records} - {self._host.id})[:_FELLOWS_ASKED]:
            with suppress(RemoteError):
                await self._host.connect(peer)
                linked.append(peer)
        return linked

    async def announce_arrival(self, since: float, has: Sequence[int] = (), takes: int | None = None) -> None:
        """Announce that this peer, which arrived at `since`, is about to choose a stage, or has chosen `takes`."""
        token = self._gate.token if self._gate is not None else b""
        joiner = Joiner(since, token, list(has)[:JOINER_STAGES], takes)
        ttl_s = CHOOSING_S if takes is None else TAKING_S
        await self._dht.put(joining_key(self.run), encode(joiner), ttl_s=ttl_s)

    async def withdraw_arrival(self) -> None:
        """Withdraw the announcement of our arrival: this peer serves a stage now."""
        await self._dht.withdraw(joining_key(self.run))

    async def arrivals(self, wall: float) -> list[Arrival]:
        """The peers that are about to serve a stage."""
        found = list[Arrival]()
        for record in await self._dht.get(joining_key(self.run), most_bytes=DIRECTORY_READ_BYTES):
            try:
                one = decode(Joiner, record.value)
            except ProtocolViolation as error:
                log.warning("ignored a joiner's record: %s", error.blame(record.publisher))
                continue
            if self._gate is None or self._gate.named(record.publisher, one.token, "stage") is not None:
                arrival = Arrival(one.since, record.publisher.text, tuple(one.has), one.takes)
                if arrival.counts(wall):
                    found.append(arrival)
        return found

    async def moved_or(self, event: Signal) -> None:
        """Wait until our addresses change, so that our records are out of date, or until `event`."""
        async with trio.open_nursery() as nursery:

            async def wait(what: Callable[[], Awaitable[None]]) -> None:
                await what()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait, self._host.whereabouts.readdressed)
            nursery.start_soon(wait, event.wait)

    @property
    def only_dials(self) -> bool:
        """True if nobody can dial this peer."""
        return not self._host.takes_inbound

    def own_addrs(self) -> list[str]:
        """Our addresses for records. Leaves out addresses that are too long, which relays can cause."""
        told = [str(addr) for addr in self._host.addrs()]
        return [text for text in told if len(text) <= ADDR_BYTES][:ADDRS_PER_PEER]


def _present(entries: Iterable[StagePeer]) -> dict[tuple[PeerId, int], StagePeer]:
    """The posts that peers serve now. After a move the old record lives on for a while, so the latest one decides."""
    latest: dict[PeerId, StagePeer] = {}
    given = list(entries)
    for entry in given:
        old = latest.get(entry.peer)
        if old is None or old.progress.since <= entry.progress.since:
            latest[entry.peer] = entry
    held = {peer: {entry.progress.stage, *entry.progress.also} for peer, entry in latest.items()}
    return {(e.peer, e.progress.stage): e for e in given if e.progress.stage in held[e.peer]}
