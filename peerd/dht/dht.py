"""The DHT of a running peer: drives `dht/node/kademlia` over remote calls, and offers get, put and withdraw.

Makes no DHT decisions. It executes each Ask as one call, answers others' requests, notifies the machine when
connections close and time passes, and waits for operations on behalf of callers. It also joins through bootstrap
addresses, which it retries forever with a reason for the user, and corrects our clock by the peers' clocks.

Hostile input is bounded by `codec` (sizes) and the machine (everything else). Other tasks run between verifications of
signatures. Not covered: an attacker with very many identities near a key.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import trio
from multiaddr import Multiaddr

from peerd.core.addr import is_relayed, reach, split_peer
from peerd.core.clock import Clock
from peerd.core.errors import LocalError, ProtocolViolation, Refused, RemoteError
from peerd.core.ids import Key, PeerId
from peerd.core.keys import Keypair, verify
from peerd.core.limits import DHT_STORE_BYTES
from peerd.core.record import LATEST_S, Record, Verifier
from peerd.dht import codec as wire
from peerd.dht.bootstrap import BootstrapPeers
from peerd.dht.node import messages as q
from peerd.dht.node.kademlia import Kademlia
from peerd.dht.node.node_state import KademliaConfig
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import Verdict
from peerd.dht.requests import DhtRequests, PeerClock
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Rpc
from peerd.rpc.rpc_types import Answer, Incoming
from peerd.wire.host.host import Host, PeerDown, PeerUp
from peerd.wire.path_selection import PathKind
from peerd.wire.rate.quota import LogLimit
from peerd.wire.timer import Timer

__all__ = ["Dht", "DhtConfig", "Record"]

_log = logging.getLogger("peerd.dht")
_PROTOCOL = "dht/4"
_CALLS_PER_PEER = 64  # at once; a peer that joins, publishes and reads needs about ten
_SLACK_BYTES = 32 << 10  # of a message, besides its records
_SMALL: Final = Declaration(
    shows=Shows.NOTHING,
    rows=None,
    memory_bytes=0,
    device_s=0.0,
    body_bytes=_SLACK_BYTES,
    calls_per_peer=_CALLS_PER_PEER,
)
DECLARED: Final = {
    "dht/4/ping": _SMALL,
    "dht/4/find": _SMALL,
    "dht/4/get": _SMALL,
    "dht/4/store": replace(_SMALL, body_bytes=DHT_STORE_BYTES + _SLACK_BYTES),
}
_OUTDATED = (Verdict.STALE, Verdict.UNTIMELY)
_TOGETHER_S = 0.5  # several addresses often change together
DIRECTORY_S: Final = 10.0  # for one operation, which asks many peers
_WITHDRAW_S: Final = 5.0  # to withdraw our records
_LINKS_S = 20.0  # between two checks of connected peers
_NAMED_S = 60.0  # a peer that offers outdated records is logged once in this time

D = TypeVar("D", q.GetDone, q.PutDone)


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Settings of the service; those of the DHT node are in `node`. Times in seconds."""

    node: KademliaConfig = field(default_factory=KademliaConfig)
    calls: int = 128  # in progress at once
    retry_s: float = 1.0  # pause before a failed bootstrap address is retried; doubles each time
    longest_retry_s: float = 30.0


@dataclass(slots=True)
class _Operation:
    """An operation in progress, and the tasks that wait for it."""

    ended: trio.Event = field(default_factory=trio.Event)
    done: q.GetDone | q.PutDone | None = None


class Dht:
    """This peer's part of the DHT. Idle until `run`."""

    def __init__(self, host: Host, rpc: Rpc, clock: Clock, keypair: Keypair, config: DhtConfig | None = None) -> None:
        self._host, self._rpc, self._clock = host, rpc, clock
        self._config = config or DhtConfig()
        verifier = Verifier(verify)
        self._kad = Kademlia(keypair, verifier, clock.rng("dht"), self._config.node, host.book)
        self._peer_clock = PeerClock(clock, self._may_vote)
        self._calls = DhtRequests(host, rpc, self._peer_clock, verifier, self._config.calls)
        rng = clock.rng("bootstrap")
        self.entries = BootstrapPeers(host, self._met, self._config.retry_s, self._config.longest_retry_s, rng)
        self._nursery: trio.Nursery | None = None
        self._timer = Timer(lambda: self._kad.wake_at(clock.now()), self._wake)
        self._numbers = itertools.count(1)
        self._operations: dict[int, _Operation] = {}
        self._responses: dict[int, q.Reply] = {}
        self._cache: dict[Key, tuple[float, list[Record]]] = {}
        self._log_limit = LogLimit[PeerId](_NAMED_S)  # by peer that offers outdated records

    async def run(
        self, bootstrap: Sequence[Multiaddr] = (), *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Join through `bootstrap` (empty for the first peer of a DHT) and take part until cancelled.

        It has started once it answers others. Operations wait until this peer has joined or failed to join.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                with self._host.watch() as events:
                    self._serve()
                    self._tell_addrs()
                    nursery.start_soon(self._timer.run)
                    nursery.start_soon(self._follow_addrs)
                    nursery.start_soon(self._watch_links)
                    self.entries.start(nursery, bootstrap)
                    task_status.started()
                    async for event in events:
                        if isinstance(event, PeerUp):
                            nursery.start_soon(self._compare_clocks, event.peer)
                        elif isinstance(event, PeerDown):
                            self.entries.lost(event.peer)
                            self._handle(q.Lost(event.peer))
            finally:
                self._rpc.unserve(_PROTOCOL)
                self._nursery = None
                nursery.cancel_scope.cancel()
                for number in list(self._operations):
                    self._handle(q.Stop(number))

    # --- operations ------------------------------------------------------------------------------------------

    def meet(self, peer: PeerId, addr: Multiaddr) -> None:
        """Add a peer to which we are connected at `addr`, and which no DHT peer has named."""
        if self._nursery is not None:
            self._met(peer, addr)

    async def put(
        self,
        key: Key,
        value: bytes,
        *,
        ttl_s: float,
        suffix: bytes = b"",
        stays: bool = False,
        timeout_s: float = DIRECTORY_S,
    ) -> int:
        """Publish `value` under `key` and our own sub-key (our id and `suffix`), replacing our earlier record there.

        Returns how many peers store it by now; it may be 0. In any case it stays published until `ttl_s` has passed or
        `withdraw`: it is renewed, and sent to peers that join nearer to the key. With `stays`, `withdraw_all` does not
        delete it at the peers that store it, until `ttl_s` has passed. Raises LocalError if it is too large.
        """
        if not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise LocalError(f"a record cannot have a lifetime of {ttl_s} s")
        self._cache.pop(key, None)
        done = await self._perform(lambda op: q.Put(op, key, suffix, value, ttl_s, stays), q.PutDone, timeout_s)
        return done.peers

    async def get(
        self, key: Key, *, timeout_s: float = DIRECTORY_S, max_age_s: float = 0.0, most_bytes: int = 0
    ) -> list[Record]:
        """All live records under `key`, verified, one per sub-key, sorted by sub-key.

        `max_age_s`: accept a result of this age, from an earlier call with this parameter or cached by peers near the
        key. On timeout returns what was found by then. `most_bytes`: limit for a key and each peer that answers, 0 for
        none; a peer that has more records sends some of each publisher, small records first.
        """
        return (await self.get_many([key], timeout_s=timeout_s, max_age_s=max_age_s, most_bytes=most_bytes))[key]

    async def get_many(
        self, keys: Iterable[Key], *, timeout_s: float = DIRECTORY_S, max_age_s: float = 0.0, most_bytes: int = 0
    ) -> dict[Key, list[Record]]:
        """`get` for each of `keys`, in few messages."""
        found, _ = await self.read(keys, timeout_s=timeout_s, max_age_s=max_age_s, most_bytes=most_bytes)
        return found

    async def read(
        self, keys: Iterable[Key], *, timeout_s: float = DIRECTORY_S, max_age_s: float = 0.0, most_bytes: int = 0
    ) -> tuple[dict[Key, list[Record]], bool]:
        """Returns `get_many`, and whether any peer answered. If none did, keys without records may well have some."""
        now, found = self._clock.now(), dict[Key, list[Record]]()
        answered = True
        wanted = list(dict.fromkeys(keys))
        if max_age_s > 0:
            wall = self._clock.wall()
            fresh = {key: self._cache[key] for key in wanted if key in self._cache}
            found = {
                key: [r for r in records if r.is_live(wall)]
                for key, (at, records) in fresh.items()
                if now - at <= max_age_s
            }
        missing = tuple(key for key in wanted if key not in found)
        if missing:
            age_s = min(int(max(max_age_s, 0.0)), wire.MAX_AGE_S)
            done = await self._perform(lambda op: q.Get(op, missing, most_bytes, age_s), q.GetDone, timeout_s)
            found |= done.records
            answered = done.answered
            if answered and max_age_s > 0 and not most_bytes:  # a partial result must not be reused for all
                self._remember(done.records)
        else:
            await trio.lowlevel.checkpoint()
        return {key: list(found.get(key, ())) for key in wanted}, answered

    async def withdraw(self, key: Key, *, suffix: bytes = b"", timeout_s: float = _WITHDRAW_S) -> None:
        """Withdraw our record under this sub-key, if there is one."""
        self._cache.pop(key, None)
        await self._perform(lambda op: q.Withdraw(op, key, suffix), q.PutDone, timeout_s, leaving=True)

    async def withdraw_all(self) -> None:
        """Withdraw all our records except those that stay, in few messages, before leaving."""
        self._cache.clear()
        await self._perform(lambda op: q.Withdraw(op), q.PutDone, _WITHDRAW_S, leaving=True)

    def entry_peers(self) -> list[PeerId]:
        """Connected peers at bootstrap addresses."""
        return self.entries.peers()

    def clock_problem(self) -> str | None:
        """What is wrong with this machine's clock, and what to do. None if peers can read each other's records."""
        return self._peer_clock.waits_for()

    @property
    def clocks_compared(self) -> int:
        """Number of peers whose clocks are known."""
        return self._peer_clock.compared

    def look_around(self) -> None:
        """Ask our neighbours for more peers near us."""
        self._kad.look_around(self._clock.now())
        self._handle(None)

    def contacts(self) -> dict[PeerId, list[Multiaddr]]:
        """Peers of the routing table, and the addresses at which they say they can be dialed."""
        return {contact.peer: wire.addrs_from_wire(contact.addrs) for contact in self._kad.node.neighbours.table}

    def status(self) -> dict[str, Any]:
        """Plain data for `peerd status`."""
        node = self._kad.node
        counts, skew = node.counts, self._peer_clock.skew
        return {
            "waits_for": self._waits_for(),
            "peers": len(node.neighbours.table),
            "client_only": not self._kad.addrs,
            "records_held": len(node.store),
            "bytes_held": node.store.held_bytes,
            "records_published": len(node.publisher),
            "bootstrap": self.entries.status(),
            "clock_offset_s": skew.correction_s(),
            "clock_votes": skew.votes,
            "clock_networks": skew.networks,
            "clock_warning": skew.warning(),
            "messages": {"sent": counts.asks, "failed": counts.failed, "answered": counts.served},
            "lookups": counts.searches,
            "messages_per_lookup": counts.searched_peers / counts.searches if counts.searches else None,
            "lies": counts.lies,
            "copied": counts.copied,
        }

    def _waits_for(self) -> str | None:
        if self._nursery is None:
            return "the DHT to start"
        return None if len(self._kad.node.neighbours.table) else self.entries.waits_for()

    async def _perform(
        self, command: Callable[[int], q.Input], kind: type[D], timeout_s: float, *, leaving: bool = False
    ) -> D:
        """Run an operation of the machine and wait for its end; stop it on timeout.

        Waits first until this peer has joined, since an operation reaches no peer before that, unless it is `leaving`.
        """
        deadline = trio.current_time() + timeout_s
        if not leaving:
            with trio.CancelScope(deadline=deadline):
                await self.entries.settled.wait()
        if self._nursery is None:
            raise LocalError("the DHT is not running")
        number, operation = next(self._numbers), _Operation()
        self._operations[number] = operation
        try:
            self._handle(command(number))
            with trio.CancelScope(deadline=deadline):
                await operation.ended.wait()
        finally:
            if operation.done is None:
                self._handle(q.Stop(number))
            self._operations.pop(number, None)
        if not isinstance(operation.done, kind):
            raise LocalError(f"the operation ended as {operation.done}")
        return operation.done

    def _remember(self, records: dict[Key, list[Record]]) -> None:
        if len(self._cache) + len(records) > 4096:
            self._cache.clear()
        self._cache |= {key: (self._clock.now(), found) for key, found in records.items()}

    # --- the machine -------------------------------------------------------------------------------------------

    def _handle(self, event: q.Input | None) -> None:
        """Pass an event to the machine (None: time has passed) and execute its outputs."""
        now = self._clock.now()
        # A clock that is off by centuries must not prevent publishing: others refuse the records, and status says why.
        self._kad.node.clock_ahead_s = min(max(self._clock.wall(), 0.0), LATEST_S) - now
        outputs = self._kad.wake(now) if event is None else self._kad.handle(now, event)
        for output in outputs:
            match output:
                case q.Ask():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._ask, output)
                case q.Respond(token, reply):
                    self._responses[token] = reply
                case q.GetDone(number) | q.PutDone(number):
                    operation = self._operations.get(number)
                    if operation is not None:
                        operation.done = output
                        operation.ended.set()
                case q.BlamePeer(peer, why):
                    _log.warning("peer %s violated the DHT protocol: %s", peer, why)
        if self._kad.node.joined:
            self.entries.settled.set()
        self._timer.rearm()

    def _wake(self) -> None:
        self._tell_addrs()
        self._handle(None)

    async def _follow_addrs(self) -> None:
        """Announce our new addresses, or that we have none, to the peers that have us in a table."""
        while True:
            await self._host.whereabouts.readdressed()
            await trio.sleep(_TOGETHER_S)
            self._tell_addrs()
            self.look_around()

    def _tell_addrs(self) -> None:
        self._kad.addrs = wire.addrs_to_wire(self._host.addrs())

    def _met(self, peer: PeerId, addr: Multiaddr) -> None:
        self._tell_addrs()
        self._handle(q.Met(Contact(peer, (split_peer(addr)[0].to_bytes(),))))

    # --- requests to others ------------------------------------------------------------------------------------

    async def _ask(self, ask: q.Ask) -> None:
        """Make one request. Every outcome is reported to the machine."""
        outcome: q.Input = q.AskFailed(ask.id)
        try:
            with trio.CancelScope(deadline=trio.current_time() + self._config.node.silent_s):
                reply = await self._calls.ask(ask.contact, ask.request, self._config.node.silent_s)
                if reply.hello is not None and not self._is_dialable(ask.contact.peer, reply.hello):
                    reply = replace(reply, hello=q.Hello())
                outcome = q.Answered(ask.id, reply)
                self.entries.answered(ask.contact.peer)
        except ProtocolViolation as error:
            _log.info("peer %s violated the DHT protocol: %s", ask.contact.peer, error)
            outcome = q.AskFailed(ask.id, lied=True)
        except RemoteError as error:
            _log.debug("a request to %s failed: %s", ask.contact.peer, error)
            if isinstance(error, Refused):
                self.entries.refused(ask.contact.peer, error)
        self._handle(outcome)

    async def _watch_links(self) -> None:
        """Check connected peers repeatedly: ask for clocks that we do not know, maybe over a link that is now direct.

        While no peer is known, ask the entry peers again: one that refused us may accept our new token.
        """
        while True:
            await trio.sleep(_LINKS_S)
            if not len(self._kad.node.neighbours.table):
                for peer, addr in self.entries.connected():
                    self._met(peer, addr)
            for peer in self._host.connected():
                await self._compare_clocks(peer)

    async def _compare_clocks(self, peer: PeerId) -> None:
        """Ask a peer for its time if we know too few clocks. For peers that cannot be dialed it is the only request."""
        link = self._host.links.best(peer)
        if link is None or not self._peer_clock.wants(peer, link.remote):
            return
        silent_s = self._config.node.silent_s
        with suppress(RemoteError), trio.move_on_after(silent_s):
            await self._calls.ask(Contact(peer, ()), q.Ping(self._kad.node.hello), silent_s)

    # --- requests of others ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        rpc, declared = self._rpc, DECLARED
        rpc.serve("dht/4/ping", wire.PingMessage, self._answer, declared=declared["dht/4/ping"])
        rpc.serve("dht/4/find", wire.FindMessage, self._answer, declared=declared["dht/4/find"])
        rpc.serve("dht/4/get", wire.FindMessage, self._answer_get, declared=declared["dht/4/get"])
        rpc.serve("dht/4/store", wire.StoreMessage, self._answer, declared=declared["dht/4/store"])

    async def _answer_get(self, incoming: Incoming[wire.FindMessage]) -> Answer[wire.ReplyMessage]:
        return await self._respond(incoming.peer, incoming.body, values=True)

    async def _answer(self, incoming: Incoming[Any]) -> Answer[wire.ReplyMessage]:
        return await self._respond(incoming.peer, incoming.body, values=False)

    async def _respond(self, peer: PeerId, body: wire.RequestMessage, *, values: bool) -> Answer[wire.ReplyMessage]:
        request = wire.request_from_wire(body, values=values)
        if isinstance(request, q.StoreRecords):
            await self._calls.verify(request.records)
        if request.hello is not None:
            dialable = self._is_dialable(peer, request.hello)
            addrs = filter(self._host.hearing(peer), request.hello.addrs) if dialable else ()
            request = replace(request, hello=q.Hello(tuple(addrs)))
        token = next(self._numbers)
        link = self._host.links.best(peer)
        self._handle(q.Asked(token, peer, request, q.NOWHERE if link is None else (link.user.place, link.user.region)))
        reply = self._responses.pop(token)
        if isinstance(request, q.StoreRecords) and isinstance(reply, q.Stored):
            self._name_replays(peer, request, reply)
        return Answer(wire.reply_to_wire(reply, self._peer_clock.raw_wall(), values=values))

    def _name_replays(self, peer: PeerId, request: q.StoreRecords, reply: q.Stored) -> None:
        """Log which peer sent outdated records of other peers, which were refused; once a minute for each peer.

        It is not blamed: an honest peer may not have the newer record yet, or have a clock that is off.
        """
        told = zip(request.records, reply.verdicts, strict=False)
        outdated = [r for r, (verdict, _) in told if verdict in _OUTDATED and r.publisher != peer]
        if not outdated or not self._log_limit.may_log(self._clock.now(), peer):
            return
        publisher, count = outdated[0].publisher, len(outdated)
        _log.debug("peer %s sent %d outdated records, which were refused; the first is by %s", peer, count, publisher)

    def _may_vote(self, peer: PeerId) -> bool:
        """True if the peer's clock may correct ours: in a run with tokens, only a member's may."""
        return self._rpc.gate is None or self._rpc.gate.may_vote(peer)

    def _is_dialable(self, peer: PeerId, hello: q.Hello) -> bool:
        """True if others can probably dial the peer at its addresses, without a relay.

        Proven if we dialed it. False if it connects from the internet and has only addresses of a private network, or
        relayed ones: in others' tables it would be a dead entry, or every request to it would load a relay. As in
        libp2p, such a peer is a client: it sends requests and receives none. Its records are stored by dialable peers.
        While there are few dialable peers, each stores all records, so no record is lost with one of them.
        """
        link = self._host.links.best(peer)
        if link is None or link.way == PathKind.LOCAL or (link.way == PathKind.DIRECT and link.initiator):
            return True
        return any(reach(addr) == 2 and not is_relayed(addr) for addr in wire.addrs_from_wire(hello.addrs))
