"""Directory of experts: reads from the DHT what hosts announce below prefixes of the grid, and announces our own
experts.

Each host publishes one record per prefix. Records come from strangers: they are strictly decoded, checked against the
grid and their key, and in a run with tokens accepted only with a token for `expert`; a bad record is skipped and its
publisher logged. Their addresses go to the host's address book. Of several claims to one expert the owner's counts
(`contested`), else the highest (generation, peer id). Hosts that failed this caller are not used for a while.

What was read is cached for one announcement period, and refreshed in time while it is used (`run`). This module does
not call experts (`expert_client`) nor choose among them (`experts/rules/product_key_beam`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import trio

from peerd.core.addr import parse_addr
from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import ConfigError, ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import ADDR_BYTES, ADDRS_PER_PEER, EXPERT_RESTS
from peerd.core.record import Record
from peerd.dht.dht import Dht
from peerd.experts.calls.contested import ContestedExperts, Told
from peerd.experts.rules.host_rests import HostRests
from peerd.experts.rules.prefix_cache import CachedClaim, Claims, LiveBits, PrefixCache, ranked
from peerd.messages.encoding import decode, encode
from peerd.messages.experts import Announced
from peerd.rpc.rpc import Rpc
from peerd.run.grid import Uid, coordinates_in, grid_of, prefix_key
from peerd.run.runfile import ExpertsSection, RunFile
from peerd.wire.host.host import Host
from peerd.wire.rate.quota import LogLimit

log = logging.getLogger("peerd.experts.calls.expert_directory")

LOOKUP_S: Final = 5.0  # for one round of look-ups, so that a slow DHT delays a batch no longer
_LIVES_PERIODS: Final = 2.0  # announcement periods until a claim expires, when its orphans are adopted
_LATE_PERIODS: Final = 16.0  # longest gap between announcements that record lifetimes allow for
_LIVES_MORE_S: Final = 2.0  # for an announcement in transit
_LONGEST_NEGATIVE_S: Final = 15.0  # before an empty prefix is looked up again
_TAUGHT_S: Final = 60.0  # before the same addresses are added to the address book again
_SAID_AGAIN_S: Final = 600.0  # before the same peer is logged for bad records again
_PUTS: Final = 32  # concurrent announcements
_RECORDS_A_TURN: Final = 16  # records processed before other tasks run: about a millisecond


class ExpertDirectory:
    """Finds the hosts of one run's experts, and announces the experts that this peer hosts."""

    def __init__(self, run: RunFile, rpc: Rpc, host: Host, dht: Dht, clock: Clock) -> None:
        section = run.experts or ExpertsSection()
        self.grid = grid_of(run)
        self._run, self._rpc, self._host, self._dht, self._clock = run.run, rpc, host, dht, clock
        self._period_s = section.announce_s
        self._cache = PrefixCache(section.announce_s, min(section.announce_s, _LONGEST_NEGATIVE_S))
        self.rests = HostRests()
        self.contested = ContestedExperts(section.announce_s)
        self._bits = LiveBits(self.grid, self.rests, lambda peer: peer == host.id or host.links.best(peer) is not None)
        self._reading: dict[Uid, trio.Event] = {}
        self._announced: set[Uid] = set()
        self._announced_at, self._gap_s = -math.inf, 0.0  # time of the last full announcement, and the gap before it
        self._taught = BoundedDict[PeerId, tuple[tuple[str, ...], float]](EXPERT_RESTS)
        self._log_limit = LogLimit[PeerId | tuple[PeerId, PeerId]](_SAID_AGAIN_S, EXPERT_RESTS)  # or by rivals
        self.records, self.refused = 0, 0  # records read: accepted, rejected

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Refresh prefixes in use before they expire, so that no caller waits for them, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(self._period_s / 8)
            due = self._cache.due(self._clock.now())
            if due:
                await self.read(due)

    # --- reading -----------------------------------------------------------------------------------------------

    async def below(self, prefixes: Iterable[Uid]) -> dict[Uid, Claims]:
        """The claims below prefixes, at most one announcement period old; empty if there are none."""
        wanted, found = list(dict.fromkeys(prefixes)), dict[Uid, Claims]()
        while True:
            now, missing = self._clock.now(), list[Uid]()
            for prefix in wanted:
                claims = found.get(prefix) if prefix in found else self._cache.get(now, prefix)
                if claims is None:
                    missing.append(prefix)
                else:
                    found[prefix] = claims
            if not missing:
                return found
            mine = [prefix for prefix in missing if prefix not in self._reading]
            if mine:
                found |= await self.read(mine)
            else:
                await self._reading[missing[0]].wait()

    async def read(self, prefixes: Iterable[Uid]) -> dict[Uid, Claims]:
        """As `below`, read from the DHT now. For prefixes without an answer in time, returns the last known claims."""
        wanted = list(dict.fromkeys(prefixes))
        read, began = trio.Event(), trio.current_time()
        self._reading |= dict.fromkeys(wanted, read)
        try:
            keys = {prefix_key(self._run, prefix): prefix for prefix in wanted}
            try:
                records = await self._dht.get_many(keys, timeout_s=LOOKUP_S)
            except RemoteError as error:
                log.info("announcements of experts could not be read: %s", error)
                return {prefix: self._known_last(prefix) for prefix in wanted}
            told = {prefix: await self._told_below(prefix, records.get(key, [])) for key, prefix in keys.items()}
            whole = trio.current_time() < began + LOOKUP_S
            owners = await self.contested.owners({p: each for p, each in told.items() if self._is_last(p)})
            found = {prefix: self._claims(prefix, each, owners) for prefix, each in told.items()}
            now = self._clock.now()
            for prefix, claims in found.items():
                if claims or whole:
                    self._cache.put(now, prefix, claims)
                else:  # a look-up that ran out of time does not prove that there are no experts
                    found[prefix] = self._known_last(prefix)
            return found
        finally:
            for prefix in wanted:
                if self._reading.get(prefix) is read:
                    del self._reading[prefix]
            read.set()

    def _known_last(self, prefix: Uid) -> Claims:
        """Claims below a prefix as last read, until they expire."""
        return self._cache.last(self._clock.now(), prefix, _LIVES_PERIODS * self._period_s + _LIVES_MORE_S)

    def live(self, found: Mapping[Uid, Claims]) -> dict[Uid, bytes]:
        """Bitmaps of the experts below prefixes that have a host to call now; empty if there are none."""
        return self._bits.of(self._clock.now(), found)

    def owner(self, uid: Uid) -> CachedClaim | None:
        """The claim to an expert that counts, from the cache; None if no known host may be called now."""
        now = self._clock.now()
        return self._bits.owner(now, uid, (self._cache.get(now, uid.prefix) or {}).get(uid.at[-1], ()))

    def forget(self, uid: Uid) -> None:
        """Drop the cached claims to an expert because one was wrong, so that they are read again."""
        self._cache.forget(uid.prefix)

    def status(self) -> dict[str, Any]:
        """Plain data for `peerd status`."""
        return {
            "prefixes": len(self._cache),
            "claims": self._cache.claims,
            "records": self.records,
            "records_refused": self.refused,
            "resting": self.rests.resting(self._clock.now()),
            "announced": len(self._announced),
        }

    async def _told_below(self, prefix: Uid, records: list[Record]) -> list[tuple[int, CachedClaim]]:
        """The claims in a prefix's records."""
        told = list[tuple[int, CachedClaim]]()
        for number, record in enumerate(records):
            if number % _RECORDS_A_TURN == _RECORDS_A_TURN - 1:
                await trio.lowlevel.checkpoint()
            try:
                told += self._told(record.publisher, record.value, prefix)
                self.records += 1
            except ProtocolViolation as error:
                self._say(error.blame(record.publisher), record.publisher)
        return told

    def _claims(self, prefix: Uid, told: Told, owners: Mapping[Uid, PeerId]) -> Claims:
        """The claims below a prefix, those that count first. Logs hosts with wrong announcements or rival claims."""
        below = {uid.at[-1]: owner for uid, owner in owners.items() if uid.prefix == prefix}
        claims = ranked(told, self.rests.hosts(self._clock.now()), below)
        if not claims and len(prefix.at) > 1:
            self._name_ghost(prefix)
        elif self._is_last(prefix):
            self._name_rivals(prefix, claims)
        return claims

    def _is_last(self, prefix: Uid) -> bool:
        return len(prefix.at) == len(self.grid.sides) - 1

    def _told(self, peer: PeerId, value: bytes, prefix: Uid) -> Iterator[tuple[int, CachedClaim]]:
        """The claims of one record; empty if its token does not count. Raises ProtocolViolation if the record is
        invalid.
        """
        record = decode(Announced, value)
        if record.prefix.uid != prefix:
            raise ProtocolViolation(f"an announcement of experts below {record.prefix.uid} under the key of {prefix}")
        side, experts = self.grid.side_below(prefix), self._is_last(prefix)
        below = coordinates_in(record.below)
        if len(record.below) != -(-side // 8) or not below or below[-1] >= side:
            raise ProtocolViolation(f"an announcement below {prefix} with a bitmap that does not fit {side} places")
        due = len(below) if experts else 0
        if (len(record.generations), len(record.versions)) != (due, due):
            raise ProtocolViolation(f"an announcement below {prefix} with other than {due} generations and versions")
        gate = self._rpc.gate
        if gate is not None and gate.named(peer, record.token, "expert") is None:
            self.refused += 1
            return iter(())  # already logged by the gate
        self._teach(peer, record.addrs)
        generations = record.generations if experts else [0] * len(below)
        return (
            (coordinate, CachedClaim(peer, generation, record.client))
            for coordinate, generation in zip(below, generations, strict=True)
        )

    def _teach(self, peer: PeerId, addrs: list[str]) -> None:
        now, told = self._clock.now(), tuple(addrs)
        before, at = self._taught.get(peer, ((), -_TAUGHT_S))
        if before == told and now - at < _TAUGHT_S:
            return
        try:
            self._host.learn(peer, [parse_addr(addr) for addr in addrs], by=peer)
        except ConfigError as error:
            raise ProtocolViolation(str(error)) from None
        self._taught[peer] = told, now

    def _name_ghost(self, prefix: Uid) -> None:
        """Log hosts that announced a prefix below which there are no experts, and do not use them for a while."""
        now = self._clock.now()
        for claim in (self._cache.get(now, prefix.prefix) or {}).get(prefix.at[-1], ()):
            self.rests.failed(now, claim.host, prefix)
            self._say(ProtocolViolation(f"announces experts below {prefix}, where it has none", claim.host), claim.host)

    def _name_rivals(self, prefix: Uid, claims: Claims) -> None:
        """Log hosts that claim an expert of another owner: false claims, or owners from before a partition healed."""
        for coordinate, told in claims.items():
            for lower in told[1:]:
                pair, uid = (told[0].host, lower.host), prefix.below(coordinate)
                level = logging.INFO if self._log_limit.may_log(self._clock.now(), pair) else logging.DEBUG
                text = "expert %s is claimed by two hosts: %s (generation %d) counts, not %s (generation %d)"
                log.log(level, text, uid, pair[0].short, told[0].generation, pair[1].short, lower.generation)

    def _say(self, error: RemoteError, peer: PeerId) -> None:
        """Count and log an announcement that does not count; as a warning only now and then, since it is read
        repeatedly.
        """
        self.refused += 1
        level = logging.WARNING if self._log_limit.may_log(self._clock.now(), peer) else logging.DEBUG
        log.log(level, "skipped an announcement of experts: %s", error)

    # --- announcing --------------------------------------------------------------------------------------------

    async def announce(self, records: Iterable[Announced]) -> None:
        """Publish all that we host, one record per prefix, and withdraw other records of ours.

        Adds addresses and token. Records expire unless they are announced again in every announcement period.
        """
        told = {record.prefix.uid: record for record in records}
        now = self._clock.now()
        gap_s = now - self._announced_at if math.isfinite(self._announced_at) else 0.0
        self._gap_s = max(gap_s, self._gap_s / 2)  # an announcement soon after a change does not shorten the gap much
        self._announced_at = now
        await self._withdraw(self._announced - told.keys())
        await self.add(told.values())

    async def add(self, records: Iterable[Announced]) -> None:
        """Publish these records, which replace earlier ones under their prefixes; other records remain."""
        told = {record.prefix.uid: record for record in records}
        token = self._rpc.gate.token if self._rpc.gate is not None else b""
        known = {"addrs": self._own_addrs(), "token": token, "client": not self._host.takes_inbound}
        self._announced |= told.keys()
        # Experts before the prefixes above them, so that a reader never finds an empty prefix.
        for length in sorted({len(prefix.at) for prefix in told}, reverse=True):
            values = {p: msgspec.structs.replace(r, **known) for p, r in told.items() if len(p.at) == length}
            await self._put(values)

    async def withdraw(self, prefixes: Iterable[Uid] | None = None) -> None:
        """Withdraw our records of these prefixes, or all of them if `prefixes` is None."""
        await self._withdraw(self._announced if prefixes is None else self._announced.intersection(prefixes))

    async def _put(self, records: Mapping[Uid, Announced]) -> None:
        limiter = trio.CapacityLimiter(_PUTS)
        period_s = max(self._period_s, min(self._gap_s, _LATE_PERIODS * self._period_s))  # a busy machine is late
        ttl_s = _LIVES_PERIODS * period_s + _LIVES_MORE_S

        async def put(prefix: Uid, record: Announced) -> None:
            async with limiter:
                try:
                    await self._dht.put(prefix_key(self._run, prefix), encode(record), ttl_s=ttl_s)
                except RemoteError as error:
                    log.info("experts below %s could not be announced: %s", prefix, error)

        async with trio.open_nursery() as nursery:
            for prefix, record in sorted(records.items()):
                nursery.start_soon(put, prefix, record)

    async def _withdraw(self, prefixes: Iterable[Uid]) -> None:
        limiter = trio.CapacityLimiter(_PUTS)

        async def withdraw(prefix: Uid) -> None:
            async with limiter:
                await self._dht.withdraw(prefix_key(self._run, prefix))
            self._announced.discard(prefix)

        async with trio.open_nursery() as nursery:
            for prefix in sorted(prefixes):
                nursery.start_soon(withdraw, prefix)

    def _own_addrs(self) -> list[str]:
        """Our addresses to publish, without too long ones (relays contribute to some of them)."""
        told = [str(addr) for addr in self._host.addrs()]
        return [text for text in told if len(text) <= ADDR_BYTES][:ADDRS_PER_PEER]
