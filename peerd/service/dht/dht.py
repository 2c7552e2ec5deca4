"""The DHT of a running peer: drives `machine/dht/kademlia` over calls, and offers get, put and withdraw.

Decides nothing about the DHT itself: it carries out each Ask as one call, answers what others ask, tells the machine
when connections close and time has passed, and waits for operations on behalf of callers. It also finds the way in
(bootstrap addresses, tried again for ever, with a reason to show) and corrects the clock by what peers' clocks show.

Hostile input is bounded by dht_messages (sizes) and the machine (everything else); verifying signatures is spread over
turns of the loop. Not covered: an attacker with very many identities near a key.
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
from peerd.machine.connectivity.path_selection import PathKind
from peerd.machine.dht import messages as q
from peerd.machine.dht.kademlia import Kademlia
from peerd.machine.dht.node_state import KademliaConfig
from peerd.machine.dht.routing_table import Contact
from peerd.machine.dht.store import Verdict
from peerd.machine.rpc.declaration import Declaration, Shows
from peerd.net.host.host import Host, PeerDown, PeerUp
from peerd.net.timer import Timer
from peerd.service.dht import codec as wire
from peerd.service.dht.bootstrap import BootstrapPeers
from peerd.service.dht.requests import DhtRequests, PeerClock
from peerd.service.rpc.rpc import Rpc
from peerd.service.rpc.types import Answer, Incoming

__all__ = ["Dht", "DhtConfig", "Record"]

_log = logging.getLogger("peerd.dht")
_PROTOCOL = "dht/4"
_CALLS_PER_PEER = 64  # at once; a peer that joins, publishes and reads at the same time has about ten
_SLACK_BYTES = 32 << 10  # of a message beyond the records in it
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
_TOGETHER_S = 0.5  # addresses often change by several at once
DIRECTORY_S: Final = 10.0  # for one command, which asks many
_WITHDRAW_S: Final = 5.0  # to take back what we published
_LINKS_S = 20.0  # between two looks at connected peers
_NAMED_S = 60.0  # a peer that offers outdated records is named once in so long
_NAMED_PEERS = 1024  # remembered for that

D = TypeVar("D", q.GetDone, q.PutDone)


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Figures of the service; those of the DHT are in `node`. Times in seconds."""

    node: KademliaConfig = field(default_factory=KademliaConfig)
    calls: int = 128  # under way at once
    retry_s: float = 1.0  # a bootstrap address that failed is tried again, then after twice as long, ...
    longest_retry_s: float = 30.0


@dataclass(slots=True)
class _Operation:
    """A command under way, and the tasks that wait for it."""

    ended: trio.Event = field(default_factory=trio.Event)
    done: q.GetDone | q.PutDone | None = None


class Dht:
    """This peer's part of the DHT. Nothing moves until `run`."""

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
        self._named: dict[PeerId, float] = {}  # when, for outdated records

    async def run(
        self, bootstrap: Sequence[Multiaddr] = (), *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Join through `bootstrap` (nobody: we are the first) and take part until cancelled.

        Started means: others are answered. Operations wait by themselves until the way in was found or has failed.
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

    # --- what others use ---------------------------------------------------------------------------------------

    def meet(self, peer: PeerId, addr: Multiaddr) -> None:
        """Consider a peer to which we are connected at `addr`, and which nobody of the DHT has named."""
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
        """Publish `value` under `key` and our own sub-key (our id and `suffix`), replacing what we had there.

        Returns how many peers hold it by now; 0 means nobody yet. Either way it stays published, renewed and brought
        to peers that come nearer, until `ttl_s` has passed or `withdraw`. With `stays`, `withdraw_all` leaves it to
        those who hold it, until `ttl_s` has passed. LocalError when it is too large.
        """
        if not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise LocalError(f"a record cannot live for {ttl_s} s")
        self._cache.pop(key, None)
        done = await self._perform(lambda op: q.Put(op, key, suffix, value, ttl_s, stays), q.PutDone, timeout_s)
        return done.peers

    async def get(
        self, key: Key, *, timeout_s: float = DIRECTORY_S, max_age_s: float = 0.0, most_bytes: int = 0
    ) -> list[Record]:
        """All live records under `key`, verified, one per sub-key, sorted by sub-key.

        `max_age_s`: a result of this age will do, from an earlier call with that parameter or from copies that peers on
        the way to the key keep. When the time runs out, what was found by then. `most_bytes`: of a key, from each peer
        that answers; 0: all that it holds. A peer that holds more gives every publisher's share, small records first.
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
        """`get_many`, and whether another peer answered: if none did, keys without records may well have some."""
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
            if answered and max_age_s > 0 and not most_bytes:  # a part would not do for a caller that wants all
                self._remember(done.records)
        else:
            await trio.lowlevel.checkpoint()
        return {key: list(found.get(key, ())) for key in wanted}, answered

    async def withdraw(self, key: Key, *, suffix: bytes = b"", timeout_s: float = _WITHDRAW_S) -> None:
        """Take back what we published under this sub-key; nothing, if we did not."""
        self._cache.pop(key, None)
        await self._perform(lambda op: q.Withdraw(op, key, suffix), q.PutDone, timeout_s, leaving=True)

    async def withdraw_all(self, *, timeout_s: float = _WITHDRAW_S) -> None:
        """Take back everything but what stays, in few messages: before leaving."""
        self._cache.clear()
        await self._perform(lambda op: q.Withdraw(op), q.PutDone, timeout_s, leaving=True)

    def entry_peers(self) -> list[PeerId]:
        """Connected peers at bootstrap addresses."""
        return self.entries.peers()

    def clock_problem(self) -> str | None:
        """What is wrong with this machine's clock, and what to do; None if peers can read each other's records."""
        return self._peer_clock.waits_for()

    @property
    def clocks_compared(self) -> int:
        """Number of peers whose clocks are known."""
        return self._peer_clock.compared

    def look_around(self) -> None:
        """Ask our neighbours for further peers near us."""
        self._kad.look_around(self._clock.now())
        self._handle(None)

    def contacts(self) -> dict[PeerId, list[Multiaddr]]:
        """Peers of the routing table, and where they say they can be dialed."""
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
        """Give the machine a command and wait for its end, or stop it when the time has run out.

        Before we have joined it would reach nobody: wait for that first, unless we are `leaving` anyway.
        """
        deadline = trio.current_time() + timeout_s
        if not leaving:
            with trio.CancelScope(deadline=deadline):
                await self.entries.settled.wait()
        if self._nursery is None:
            raise LocalError("the DHT does not run")
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
        """Pass in an event (None: time has passed) and do what comes of it."""
        now = self._clock.now()
        # A clock that is off by centuries keeps nobody from publishing: others refuse the records, and status says why.
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
                    _log.warning("peer %s broke the DHT's rules: %s", peer, why)
        if self._kad.node.joined:
            self.entries.settled.set()
        self._timer.rearm()

    def _wake(self) -> None:
        self._tell_addrs()
        self._handle(None)

    async def _follow_addrs(self) -> None:
        """Tell the peers that have us in a table of our new addresses, or that we have none."""
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

    # --- asking ------------------------------------------------------------------------------------------------

    async def _ask(self, ask: q.Ask) -> None:
        """One question and its answer; whatever happens, the machine hears of it."""
        outcome: q.Input = q.AskFailed(ask.id)
        try:
            with trio.CancelScope(deadline=trio.current_time() + self._config.node.silent_s):
                reply = await self._calls.ask(ask.contact, ask.request, self._config.node.silent_s)
                if reply.hello is not None and not self._is_dialable(ask.contact.peer, reply.hello):
                    reply = replace(reply, hello=q.Hello())
                outcome = q.Answered(ask.id, reply)
                self.entries.answered(ask.contact.peer)
        except ProtocolViolation as error:
            _log.info("peer %s: %s", ask.contact.peer, error)
            outcome = q.AskFailed(ask.id, lied=True)
        except RemoteError as error:
            _log.debug("a question to %s failed: %s", ask.contact.peer, error)
            if isinstance(error, Refused):
                self.entries.refused(ask.contact.peer, str(error.args[0]))
        self._handle(outcome)

    async def _watch_links(self) -> None:
        """Ask peers whose clock we have not seen where they are now: a link over a relay may become direct.

        While nobody is known, ask the entry peers once more: one that refused us may take our new token.
        """
        while True:
            await trio.sleep(_LINKS_S)
            if not len(self._kad.node.neighbours.table):
                for peer, addr in self.entries.connected():
                    self._met(peer, addr)
            for peer in self._host.connected():
                await self._compare_clocks(peer)

    async def _compare_clocks(self, peer: PeerId) -> None:
        """Ask a peer what time it is, if we know too few clocks. Those that cannot be dialed are asked nothing else."""
        link = self._host.links.best(peer)
        if link is None or not self._peer_clock.wants(peer, link.remote):
            return
        silent_s = self._config.node.silent_s
        with suppress(RemoteError), trio.move_on_after(silent_s):
            await self._calls.ask(Contact(peer, ()), q.Ping(self._kad.node.hello), silent_s)

    # --- answering ---------------------------------------------------------------------------------------------

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
        """Log which peer brought outdated records of others, and that they were refused; rarely for each peer.

        No blame: an honest peer may not have heard of the newer one yet, or have a clock that is off.
        """
        told = zip(request.records, reply.verdicts, strict=False)
        outdated = [r for r, (verdict, _) in told if verdict in _OUTDATED and r.publisher != peer]
        now = self._clock.now()
        if not outdated or now - self._named.get(peer, -math.inf) < _NAMED_S:
            return
        if len(self._named) >= _NAMED_PEERS:
            self._named.clear()
        self._named[peer] = now
        publisher, count = outdated[0].publisher, len(outdated)
        _log.debug("peer %s offered %d outdated records, the first of them of %s: refused", peer, count, publisher)

    def _may_vote(self, peer: PeerId) -> bool:
        """True when the peer's clock has a vote: in a run with tokens, only a member's does."""
        return self._rpc.gate is None or self._rpc.gate.may_vote(peer)

    def _is_dialable(self, peer: PeerId, hello: q.Hello) -> bool:
        """True when others can probably dial the peer where it says, without a relay.

        Proven if we dialed it. Not so when it calls from the internet and names only addresses of some home network,
        or ways over relays: it would be a dead entry in everybody's table, or have every question carried by a relay.
        Such a peer asks and is not asked, as in libp2p; its records are kept by those who can be dialed, on all of them
        while these are few, so that the loss of one costs nothing.
        """
        link = self._host.links.best(peer)
        if link is None or link.way == PathKind.LOCAL or (link.way == PathKind.DIRECT and link.initiator):
            return True
        return any(reach(addr) == 2 and not is_relayed(addr) for addr in wire.addrs_from_wire(hello.addrs))
