"""Sharing of experts: a host with more than its share hands some to hosts that have less, such as newcomers.

Once in an announcement period this host reads which hosts have places for experts, and computes each host's share by
its speed (`experts.rules.host_share`). An expert moves as a whole. During the move no update is made, but forward calls
are answered. The next host fetches and checks the state, hosts it in the next generation, announces it, and answers.
This host gives the expert up only after that claim is in the directory. If anything fails before, it continues to host
the expert, and nothing is lost. If only the answer was lost, the claim shows that the next host took the expert. If the
claim appears too late, this host makes updates again; the first one invalidates its signature for the next host, and
one of the two yields as after a partition (`experts/owners`). A host that leaves hands over all experts for which
others have places, as far as time allows; the rest is adopted from its checkpoints.

A hostile host may ask others to take experts that it does not own (the claim in the directory and its signature
decide), send no state or send it slowly (there is a deadline), or promise to take experts and not host them: then they
stay, and that host is avoided for a while. Each of these is logged with the host's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import trio

from peerd.core.errors import Overloaded, ProtocolViolation, Refused, RemoteError, TooSlow, Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_STATE_BYTES, EXPERT_TAKING, LINKS
from peerd.experts.calls.vault import Vault
from peerd.experts.hosting.checkpoints import AdoptingHost, ExpertCheckpoints
from peerd.experts.rules.host_share import HostShare, best_taker, experts_to_give, given_first, parts_of_all
from peerd.messages.experts import CheckpointRef, TransferAnswer, TransferRequest
from peerd.role.role import RoleContext
from peerd.rpc.methods.declaration import Declaration, Needs, Shows
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.grid import Uid
from peerd.wire.rate.suspicion import Suspicion

TAKE: Final = "sharing/2/take"
_AT_ONCE: Final = 2  # states taken concurrently
_SHAKE_S: Final = 10.0  # time for a hand-over, in addition to the transfer of its bytes
_LEAST_BYTES_PER_S: Final = 256 << 10  # on slower lines experts do not move, because updates pause meanwhile
_LEAVING_S: Final = 3.5  # time in which a leaving host hands experts over before it saves the others
_REST_PERIODS: Final = 8.0  # announcement periods for which a host that refused an expert is avoided
_LOOKS: Final = 3  # reads of the directory for the claim of the next host
_LOOK_S: Final = 0.5  # between these reads
_LAST_GENERATION: Final = (1 << 53) - 1
DECLARED: Final = {
    TAKE: Declaration(
        shows=Shows.OWNER,
        rows=None,
        memory_bytes=Needs.STATE,
        device_s=0.0,
        calls_per_peer=1,
        calls=_AT_ONCE,
        fetches=True,
    )
}


class SharingHost(AdoptingHost, Protocol):
    """What sharing needs from this peer's `ExpertHost`."""

    def share(self) -> HostShare:
        """Its experts, free places and speed."""
        ...

    async def hold(self, uid: Uid) -> None:
        """Pause updates of an expert; returns when no update is running."""
        ...

    def release(self, uid: Uid) -> None:
        """Resume updates of an expert."""
        ...


class ExpertStateSharing:
    """Hands experts of one host to others and takes theirs, in `run`. `state_bytes` is the maximum size of a state."""

    def __init__(
        self,
        ctx: RoleContext,
        vault: Vault,
        host: SharingHost,
        checkpoints: ExpertCheckpoints,
        state_bytes: int = EXPERT_STATE_BYTES,
    ) -> None:
        assert ctx.run is not None
        assert ctx.run.experts is not None
        self.given = self.received = 0
        self._leaves = False
        self._rpc, self._log, self._me = ctx.rpc, ctx.log, ctx.host.id
        self._vault, self._host, self._checkpoints, self._state_bytes = vault, host, checkpoints, state_bytes
        self._announce_s = ctx.run.experts.announce_s
        rest_s = _REST_PERIODS * self._announce_s
        self._rests = Suspicion[PeerId](rest_s, rest_s, LINKS)
        vault.share = host.share

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hand over surplus experts, and take experts that others hand over, until cancelled."""
        self._rpc.serve(TAKE, TransferRequest, self._take, declared=DECLARED[TAKE])
        try:
            task_status.started()
            while True:
                await trio.sleep(self._announce_s)
                await self._give_some()
        finally:
            self._rpc.unserve("sharing/2")

    def status(self) -> dict[str, object]:
        """Numbers of experts handed over and taken, for `peerd status`."""
        return {"given": self.given, "received": self.received}

    # --- giving -----------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Hand over all experts for which others have places, within a few seconds."""
        self._leaves = True
        with trio.move_on_after(_LEAVING_S):
            parts = parts_of_all(self._host.experts, await self._others())
            async with trio.open_nursery() as nursery:
                for taker, uids in parts.items():
                    nursery.start_soon(self._give_all, uids, taker)

    async def _others(self) -> dict[PeerId, HostShare]:
        """The hosts that offer places, by their records in the directory."""
        try:
            offers = await self._vault.directory.offers()
        except RemoteError as error:
            self._log.event("dht.read_failed", level="debug", reason=str(error))
            return {}
        now = trio.current_time()
        return {
            peer: HostShare(offer.hosted, offer.places, offer.sample_s)
            for peer, offer in offers.items()
            if offer.adopts and not offer.client and peer != self._me and not self._rests.is_aside(now, peer)
        }

    async def _give_some(self) -> None:
        """Hand experts to the host that is furthest below its share, until it has its share."""
        found = best_taker(self._host.share(), await self._others())
        if found is not None:
            taker, count = found
            await self._give_all(given_first(self._host.experts, taker)[:count], taker)

    async def _give_all(self, uids: Sequence[Uid], taker: PeerId) -> None:
        """Hand experts over one after another, until one is not taken."""
        for uid in uids:
            if uid in self._host.experts and uid not in self._vault.giving and not await self._give(uid, taker):
                self._rests.failed(trio.current_time(), taker)
                return

    async def _give(self, uid: Uid, taker: PeerId) -> bool:
        """Hand one expert over. Returns False if it stays here."""
        self._vault.giving.add(uid)
        try:
            generation = await self._handed(uid, taker)
        except RemoteError as error:
            level = "debug" if isinstance(error, Refused | Overloaded) else "info"  # it has changed meanwhile
            self._log.event("expert.kept_here", level=level, expert=str(uid), peer=taker, reason=str(error))
            return False
        finally:
            self._vault.giving.discard(uid)
            self._host.release(uid)
        self.given += 1
        self._log.event("expert.given", expert=str(uid), to=taker, generation=generation)
        return True

    async def _handed(self, uid: Uid, taker: PeerId) -> int:
        """Hand one expert over; returns the generation in which `taker` now hosts it. Raises RemoteError if it does
        not.
        """
        await self._host.hold(uid)
        hosted, mine = self._host.experts.get(uid), self._host.share()
        if hosted is None:
            raise Refused(f"expert {uid} left this host meanwhile")
        pointer, digests, data = await self._checkpoints.snapshot(uid, hosted, taker)
        body = TransferRequest(pointer, mine.hosted, mine.sample_s, self._leaves)
        with self._vault.lent(pointer, digests, data):
            generation = await self._taken(body, taker)
        if not await self._is_claimed(uid, taker, generation):
            raise ProtocolViolation(f"accepted expert {uid} but does not announce it", taker)
        if self._host.experts.get(uid) is hosted:
            await self._host.drop(uid, f"peer {taker.short} owns it in generation {generation}")
            self._vault.directory.lineages.gave(trio.current_time(), uid, generation, taker)
        return generation

    async def _taken(self, body: TransferRequest, taker: PeerId) -> int:
        """Ask `taker` to host one of our experts; returns the generation in which it does."""
        uid, following = body.pointer.expert.uid, body.pointer.generation + 1
        timeout_s = _deadline_s(body.pointer)
        try:
            answer = await self._rpc.call(taker, TAKE, body, TransferAnswer, timeout_s=timeout_s, reply_frame_bytes=0)
        except (TooSlow, Unreachable):
            if await self._is_claimed(uid, taker, following):
                return following  # only the answer was lost
            raise
        if answer.body.generation != following:
            generation = answer.body.generation
            raise ProtocolViolation(f"accepted expert {uid} in generation {generation}, not in the next one", taker)
        return following

    async def _is_claimed(self, uid: Uid, peer: PeerId, generation: int) -> bool:
        """True if the directory shows that `peer` claims the expert in this generation."""
        for look in range(_LOOKS):
            if look:
                await trio.sleep(_LOOK_S)
            told = (await self._vault.directory.look([uid.prefix])).told.get(uid, ())
            if (peer, generation) in [(claim.peer, claim.generation) for claim in told]:
                return True
        return False

    # --- taking -----------------------------------------------------------------------------------------------

    async def _take(self, call: Incoming[TransferRequest]) -> Answer[TransferAnswer]:
        pointer, peer = call.body.pointer, call.peer
        uid = pointer.expert.uid
        why = self._vault.fault(pointer, peer) or self._objection(call.body)
        if why is not None:
            raise Refused(why)
        if len(self._vault.taking) >= EXPERT_TAKING:
            raise Overloaded("other hosts are handing over experts", self._announce_s)
        self._vault.taking.append(uid)
        try:
            data = await self._state(uid, pointer, peer)
            return Answer(TransferAnswer(await self._hosted(uid, pointer, data)))
        except (RemoteError, ValueError) as error:
            self._log.event("expert.not_taken", level="warning", expert=str(uid), peer=peer, reason=str(error))
            raise Refused(f"expert {uid} could not be taken: {error.args[0] if error.args else error}") from error
        finally:
            self._vault.taking.remove(uid)

    def _objection(self, body: TransferRequest) -> str | None:
        """Reason not to take another host's expert, or None."""
        pointer, mine = body.pointer, self._host.share()
        if pointer.expert.uid in self._host.experts or pointer.expert.uid in self._vault.taking:
            return "the expert is here already"
        if pointer.size_bytes > self._state_bytes:
            return f"its state has {pointer.size_bytes} bytes; a state takes {self._state_bytes} at most"
        if not mine.places:
            return "there is no room for another expert"
        if not body.leaves and not experts_to_give(HostShare(body.hosted, 0, body.sample_s), mine):
            return f"{mine.hosted} experts here are this host's full share already"
        return None

    async def _state(self, uid: Uid, pointer: CheckpointRef, peer: PeerId) -> bytes | bytearray:
        """Fetch the state of an expert that the caller owns according to the directory."""
        with trio.move_on_after(_deadline_s(pointer)):
            claim = (await self._vault.directory.look([uid.prefix])).claims.get(uid)
            if claim is None or (claim.peer, claim.generation) != (peer, pointer.generation):
                raise Refused(f"the directory does not say that you own expert {uid} in this generation")
            if pointer.heir != self._me.public_key:
                raise Refused("your checkpoint does not name this peer as the expert's next owner")
            return await self._vault.fetch(pointer, [peer])
        raise TooSlow(f"the state of expert {uid} did not arrive in time")

    async def _hosted(self, uid: Uid, pointer: CheckpointRef, data: bytes | bytearray) -> int:
        """Host and announce an expert that was handed over; returns its generation here."""
        generation = min(pointer.generation + 1, _LAST_GENERATION)
        await self._host.adopt(uid, generation, data)
        self._checkpoints.began(uid, generation, pointer.version, pointer.as_former())
        await self._host.tell(uid)
        self.received += 1
        return generation


def _deadline_s(pointer: CheckpointRef) -> float:
    return _SHAKE_S + pointer.size_bytes / _LEAST_BYTES_PER_S
