"""Access control of a run with tokens: peers show each other their tokens before the first call between them.

`Access` is the gate of `Rpc`: except for `access/1` and `run/1`, a call needs the permission of the gate on each side.
One exchange shows both tokens, so that each side knows the roles of the other one. The exchange also carries the
organizer's newest list of revoked tokens, which is also read from files and the directory. The log names each peer that
is refused and the reason, a few lines a minute at most. `access/members.py` makes the decisions.

A hostile peer may show any bytes, never answer, refuse our token, send old or forged lists, use many identities, or
claim in the directory to serve a stage. The directory itself needs no token, because backbones may be shared by many
runs; a record counts only if it contains a valid token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Protocol

import msgspec
import trio

from peerd.access.members import FREE, OPEN, RunMembers
from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import Cause, ConfigError, ProtocolViolation, Refused, RemoteError, Untrusted
from peerd.core.ids import PeerId
from peerd.core.limits import ACCESS_MET, ACCESS_TOLD, RPC_ERROR_CHARS
from peerd.dht.dht import Dht
from peerd.messages.encoding import Message
from peerd.messages.token import RevokedData, TokenData, revoked_key
from peerd.rpc.inbound import renewed
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.methods.method_load import MethodName
from peerd.rpc.rpc import Rpc
from peerd.rpc.rpc_types import Answer, Incoming
from peerd.run.runfile import RunFile
from peerd.wire.host.host import Host, PeerDown
from peerd.wire.rate.quota import LogLimit, Quota

_log = logging.getLogger("peerd.access")

_PRESENT: Final = "access/1/present"
DECLARED: Final = {
    _PRESENT: Declaration(
        shows=Shows.NOTHING, rows=None, memory_bytes=0, device_s=0.0, body_bytes=16 << 10, calls_per_peer=4
    )
}
REFRESH_S: Final = 20.0  # a peer that nobody calls learns of a revocation within this time
_SHOW_S: Final = 10.0  # for one exchange of tokens
_AGAIN_S: Final = 5.0  # least time between two exchanges with a peer if either side refused
_SAID_AGAIN_S: Final = 600.0  # until the same problem with the same peer is logged again
_LIST_TTL_S: Final = 3600.0


class Present(Message, frozen=True):
    """The caller's token for this run, and the newest list of revoked tokens that it knows (empty if none)."""

    run: Annotated[str, msgspec.Meta(max_length=64)]
    token: TokenData
    revoked: RevokedData


class Presented(Message, frozen=True):
    """Answer to `Present`: why the caller's token is refused (empty if it is accepted), the callee's token, and its
    list of revoked tokens (empty if the caller sent the same one).
    """

    why: Annotated[str, msgspec.Meta(max_length=RPC_ERROR_CHARS)]
    token: TokenData
    revoked: RevokedData


class Credentials(Protocol):
    """This peer's token file and lists of revoked tokens. They are read repeatedly, and the disk may be slow."""

    async def token(self) -> bytes:
        """The sealed token that is in the file now. Raises ConfigError if none can be read."""
        ...

    async def revoked(self) -> list[bytes]:
        """All sealed lists of revoked tokens that can be read."""
        ...

    async def keep(self, revoked: bytes) -> None:
        """Store the newest list of revoked tokens, so that it survives a restart."""
        ...


@dataclass(frozen=True, slots=True)
class _Met:
    """Result of an exchange of tokens with a peer."""

    refused: str  # why the peer refuses our token; empty if it accepts it
    until: float  # no other exchange before this trio time


class _Exchange:
    """An exchange of tokens in progress; other tasks wait for `over`."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.failure: RemoteError | None = None


class Access:
    """Decides which calls of a run this peer makes and accepts. Refuses all callers until `run` has read the token."""

    def __init__(self, run: RunFile, host: Host, rpc: Rpc, clock: Clock, papers: Credentials) -> None:
        self.roll = RunMembers(run.run, PeerId.parse(run.access.organizer), run.pipeline.stages)
        self.refused = 0  # calls that were refused
        self._host, self._rpc, self._clock, self._papers = host, rpc, clock, papers
        self._token = b""
        self._ready = trio.Event()  # the token and the lists were read
        self._newer = trio.Event()  # a newer list arrived and is not stored yet
        self._met = BoundedDict[PeerId, _Met](ACCESS_MET)  # connected peers
        self._exchanges: dict[PeerId, _Exchange] = {}
        self._log_limit = LogLimit[tuple[PeerId, str]](_SAID_AGAIN_S)  # by peer and problem
        self._log_lines = Quota(ACCESS_TOLD)
        host.book.members_by(self._knows_member)

    @property
    def token(self) -> bytes:
        """Our own token, sealed. Empty for the organizer, which needs none."""
        return self._token

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer token exchanges, store newer lists, and forget disconnected peers, until cancelled."""
        self._rpc.serve(_PRESENT, Present, self._answer, declared=DECLARED[_PRESENT])
        try:
            async with trio.open_nursery() as nursery:
                with self._host.watch() as events:
                    await self._read()
                    self._ready.set()
                    nursery.start_soon(self._keep_lists)
                    task_status.started()
                    async for event in events:
                        if isinstance(event, PeerDown):
                            self._met.pop(event.peer, None)
                            self.roll.forget(event.peer)
                nursery.cancel_scope.cancel()
        finally:
            self._rpc.unserve(FREE)

    async def refresh(self, dht: Dht) -> None:
        """Read newer lists of revoked tokens and a newer token of our own every 20 s, until cancelled."""
        while True:
            await self.look(dht)
            await trio.sleep(REFRESH_S)

    async def look(self, dht: Dht) -> None:
        """Read our files and the directory once. The organizer's own peer also publishes its list."""
        await self._read()
        key = revoked_key(self.roll.run)
        try:
            for record in await dht.get(key):
                if record.publisher == self.roll.organizer:
                    self._learn(record.value, record.publisher)
            if self._host.id == self.roll.organizer and self.roll.revoked_data:
                await dht.put(key, self.roll.revoked_data, ttl_s=_LIST_TTL_S)
        except RemoteError as error:
            _log.debug("can't read revoked tokens from the directory: %s", error)

    async def _read(self) -> None:
        try:
            token = await self._papers.token()
            if token != self._token:
                self._token = token
                self._met.clear()  # show it to everyone
        except ConfigError as error:
            _log.info("our token can't be read: %s", error)
        for data in await self._papers.revoked():
            self._learn(data, None)

    async def _keep_lists(self) -> None:
        while True:
            await self._newer.wait()
            self._newer = trio.Event()
            await self._papers.keep(self.roll.revoked_data)

    # --- the gate ----------------------------------------------------------------------------------------------

    def objection(self, caller: PeerId, method: MethodName) -> Refused | None:
        """The error for a call that must be refused, or None if it is allowed."""
        if method.service in OPEN or caller == self._host.id:
            return None
        now = self._clock.wall()
        why = self.roll.may_call(caller, method.service, method.full, now)
        if why is None:
            return None
        self.refused += 1
        self._tell(caller, "call", f"its call of {method.full} was refused: {why}")
        return Refused(why, cause=Cause.NO_TOKEN if self.roll.member(caller, now) is None else Cause.OTHER)

    def closed(self, caller: PeerId, methods: Iterable[MethodName]) -> bool:
        """True if this caller may call none of the `methods` of a service. False if there are no methods."""
        now, whys = self._clock.wall(), []
        for method in methods:
            if method.service in OPEN or caller == self._host.id:
                return False
            whys.append(self.roll.may_call(caller, method.service, method.full, now))
        return bool(whys) and None not in whys

    def knows(self, peer: PeerId, method: MethodName) -> bool:
        """True if `method` of `peer` may be called without another exchange of tokens."""
        if method.service in OPEN or peer == self._host.id:
            return True
        met = self._met.get(peer)
        if met is None or met.refused:
            return False
        return self.roll.may_serve(peer, method.service, method.full, self._clock.wall()) is None

    async def introduce(self, peer: PeerId, method: MethodName) -> None:
        """Exchange tokens with `peer`. Raises Refused if it refuses ours, Untrusted if we do not accept its own."""
        met = self._met.get(peer)
        while met is None or (trio.current_time() >= met.until and not self.knows(peer, method)):
            await self._show(peer)
            met = self._met.get(peer)
        if met.refused:
            raise Refused(met.refused, peer)
        why = self.roll.may_serve(peer, method.service, method.full, self._clock.wall())
        if why is not None:
            self._tell(peer, "service", f"its service {method.service} is not used: {why}")
            raise Untrusted(why, peer)

    def forgotten(self, peer: PeerId, refusal: Refused) -> bool:
        """True if `peer` refuses us because it lost our token, for example after a restart. The caller then retries,
        which shows the token again.
        """
        if refusal.cause is not Cause.NO_TOKEN:
            return False
        met = self._met.pop(peer, None)
        return met is not None and not met.refused

    def may_vote(self, peer: PeerId) -> bool:
        """True if the peer's clock may correct ours: a stranger must not be able to expire or revive tokens."""
        return self.roll.may_vote(peer)

    def allows(self, peer: PeerId, role: str) -> bool:
        """True if this caller is a member with `role`."""
        found = self.roll.member(peer, self._clock.wall())
        return peer == self._host.id or (found is not None and not found.lacks(frozenset({role})))

    def named(self, peer: PeerId, token: bytes, *roles: str) -> str | None:
        """Name that the organizer gave to a member, by the `token` in its record.

        Returns None if the token is not valid, or allows none of `roles`.
        """
        found = self.roll.judge(peer, token, self._clock.wall())
        if isinstance(found, str):
            why = found
        elif roles and found.lacks(frozenset(roles)):
            why = f"its token does not allow {' or '.join(roles)}"
        else:
            return found.name
        self._tell(peer, "record", f"its record is ignored: {why}")
        return None

    def waits_for(self) -> str | None:
        """What this peer waits for: a new token, and why. None if its own token is valid."""
        now = self._clock.wall()
        why = self.roll.judge(self._host.id, self._token, now)
        if not isinstance(why, str):
            return None
        expired = self.roll.expired_at(self._host.id, self._token, now)
        return f"a new token: {why}" if expired is None else f"a new token: {why}{self._advice(expired)}"

    def _advice(self, expired: int) -> str:
        at, organizer = datetime.fromtimestamp(expired, UTC), self.roll.organizer.short
        todo = f"ask the organizer ({organizer}) for one, and save it as access.token in the data directory"
        return f" ({at:%Y-%m-%d %H:%M} UTC); {todo}"

    def status(self) -> dict[str, Any]:
        """Plain data about access for `peerd status`."""
        own = self.roll.judge(self._host.id, self._token, self._clock.wall())
        token = None if isinstance(own, str) else own.token
        return {
            "organizer": self.roll.organizer,
            "name": None if isinstance(own, str) else own.name,
            "token": token.id if token is not None else None,
            "expires": token.expires if token is not None else None,
            "members_met": len(self.roll),
            "calls_refused": self.refused,
            "revoked_list": max(self.roll.revoked_number, 0),
            "waits_for": self.waits_for(),
        }

    def _knows_member(self, peer: str) -> bool:
        return bool(peer) and self.roll.member(PeerId.parse(peer), self._clock.wall()) is not None

    # --- exchange ----------------------------------------------------------------------------------------------

    async def _show(self, peer: PeerId) -> None:
        """Exchange tokens with `peer`, or wait for an exchange with it that is in progress."""
        exchange = self._exchanges.get(peer)
        if exchange is not None:
            await exchange.over.wait()
            if exchange.failure is not None:
                raise renewed(exchange.failure)
            return
        exchange = self._exchanges[peer] = _Exchange()
        try:
            self._met[peer] = await self._exchange(peer)
        except RemoteError as error:
            exchange.failure = error
            raise
        finally:
            del self._exchanges[peer]
            exchange.over.set()

    async def _exchange(self, peer: PeerId) -> _Met:
        shown = Present(self.roll.run, self._token, self.roll.revoked_data)
        until = trio.current_time() + _AGAIN_S
        try:
            answer = (await self._rpc.call(peer, _PRESENT, shown, Presented, timeout_s=_SHOW_S)).body
        except Refused:  # it does not speak access/1: an open peer, such as a backbone for many runs
            self.roll.forget(peer)
            return _Met("", until)
        self._learn(answer.revoked, peer)
        why = self._admit(peer, answer.token)
        if why is not None:
            self._tell(peer, "member", f"it is not a member: {why}")
        refused = "".join(char if char.isprintable() else "?" for char in answer.why)
        if refused:
            self._tell(peer, "us", f"it refuses us: {refused}")
        return _Met(refused, until)

    async def _answer(self, incoming: Incoming[Present]) -> Answer[Presented]:
        await self._ready.wait()
        peer, body = incoming.peer, incoming.body
        self._learn(body.revoked, peer)
        if body.run != self.roll.run:
            why: str | None = "you take part in another run"
        else:
            why = self._admit(peer, body.token)
        if why is not None:
            self._tell(peer, "member", f"it is not a member: {why}")
        newer = b"" if body.revoked == self.roll.revoked_data else self.roll.revoked_data
        return Answer(Presented(self.roll.refusal(why) if why else "", self._token, newer))

    def _admit(self, peer: PeerId, token: bytes) -> str | None:
        why = self.roll.admit(peer, token, self._clock.wall())
        if self._host.links.best(peer) is None:
            self.roll.forget(peer)  # it has disconnected, and its PeerDown event has passed
        return why

    def _learn(self, data: bytes, bringer: PeerId | None) -> None:
        """Store a newer list of revoked tokens, and send it to all peers in new exchanges, so that it spreads."""
        try:
            newer = self.roll.learn_revoked(data)
        except ProtocolViolation as error:
            _log.warning("ignored a list of revoked tokens: %s", error.blame(bringer) if bringer else error)
            return
        if newer:
            self._met.clear()
            self._newer.set()
            _log.info("updated the organizer's list of revoked tokens to number %d", self.roll.revoked_number)

    def _tell(self, peer: PeerId, about: str, what: str) -> None:
        """Log a problem with a peer: the same one at most once in ten minutes, and a few lines a minute in total."""
        now = trio.current_time()
        if self._log_lines.exceeded(now, ("",)) is None and self._log_limit.may_log(now, (peer, about)):
            self._log_lines.count(now, ("",))
            _log.warning("peer %s: %s", peer, what)
