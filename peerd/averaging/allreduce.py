"""All-reduce inside a group: every sender ends with the same bits of the sum of all senders' vectors.

The vector (numpy, 1-D) is cut into parts; each part has an owner, which sums it. One streaming call to each owner sends
its parts one after the other, and returns the sums in the same order while later parts are still in flight. The
transport provides back-pressure. All shares are sent at even rates, so that they end together and every internet
connection is busy to the end. A helper sums the parts that it owns and sends no vector. A client sends a vector and
owns no parts. A listener requests each part with an empty message and receives its sum. A `PartCoder` encodes the
parts. Encoding, and all but small sums, run on the worker; versions are added in the order of the senders. With a lossy
code, the owner also uses the decoded sum, as the others do.

A round ends with all sums, or raises `RoundFailed` with the members at fault; the caller applies the result. A hostile
member may send wrong shapes, wrong dtypes, NaN, parts of another owner, or parts of unknown attempts. Each is refused,
where possible before values are decoded, and the round fails and names the member. If a peer refuses or ends a call,
that shows only that the round has ended there, so we wait 0.8 s for the name of the peer at fault before we blame that
peer. A silent peer is pinged before it is named, because one peer that hangs soon makes all others wait. A run with a
lossy code also accepts plain parts; a plain run refuses coded parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import numpy as np
import trio

from peerd.averaging.allreduce_round import AllReduceRound, AveragingPlan, Part, PartPace, RoundFailed
from peerd.averaging.open_round import (
    OpenRound,
    PartGate,
    SumBuffers,
    SumReplies,
    as_others_see_it,
    encoded,
    version_of,
)
from peerd.averaging.pacing import Pacer, RoundPacing
from peerd.averaging.reduce import PartCoder, PlainParts, SumFault, Vector, VectorMemory, Version, sum_up, take_sum
from peerd.averaging.stats import RoundStats
from peerd.core.errors import LocalError, Overloaded, PeerdError, ProtocolViolation, Refused, RemoteError, TooSlow
from peerd.core.ids import PeerId
from peerd.core.limits import FRAME_ELEMENTS, RPC_ROUND_DEADLINE_S
from peerd.core.signals import Signal
from peerd.core.work import Worker
from peerd.messages.encoding import Empty
from peerd.messages.swarm import AverageAlive, AverageKey
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc import Answer, CallStream, Encoded, Incoming, Rpc

__all__ = ["METHOD", "AllReduceService", "PartCoder", "PlainParts", "Vector"]

METHOD = "average/2/parts"
_ALIVE = "average/2/alive"
DECLARED: Final = {
    METHOD: Declaration(
        shows=Shows.ROUND,
        rows=None,
        memory_bytes=0,
        device_s=0.0,
        frames=1,
        frame_bytes=8 << 20,
        calls_per_peer=8,  # calls of cancelled rounds end slowly
        deadline_s=RPC_ROUND_DEADLINE_S,
    ),
    _ALIVE: Declaration(shows=Shows.ROUND, rows=None, memory_bytes=0, device_s=0.0),
}
_PARTS_UNDER_WAY = 3  # in flight to one owner of an equal share: fills the line while it sums
_PARTS_KEPT = 16  # buffers of summed parts that are kept for later parts
_DTYPES = {"float32", "float64"}  # of vectors that a helper may sum
_JOIN_WAIT_S = 30.0  # a member may learn of the round later than the others
_LOOK_S = 0.5  # how often we check for late peers
_ANSWER_S = 0.6  # least time for a silent member to answer that it is alive: on a busy line answers queue longer
_DOUBT_S = 0.8  # for the conductor or a lost link to show who made a member end its round


_Way = tuple[list[Part], PartGate, CallStream]  # one owner's share, the gate that paces its parts, and the call


class AllReduceService:
    """Runs averaging rounds of this peer and serves others' parts of these rounds."""

    def __init__(self, rpc: Rpc, own: PeerId, pacer: Pacer | None = None) -> None:
        self._rpc, self._pacer = rpc, pacer
        self._own = own.text
        self.aggregated_bytes = 0  # of others' vectors, summed here
        self._reported_bytes = 0
        self.outcomes = RoundStats()
        self._rounds: dict[bytes, OpenRound] = {}
        self._memory, self._parts_memory = VectorMemory(), VectorMemory(_PARTS_KEPT)
        self._expected: dict[bytes, bool] = {}  # attempt ids of our rounds; True once the round has begun
        self._opened = Signal()  # a round opens
        rpc.serve_stream(METHOD, AverageKey, self._take_parts, declared=DECLARED[METHOD])
        rpc.serve(_ALIVE, AverageKey, self._alive, declared=DECLARED[_ALIVE])

    def takes_part(self, peer: str) -> bool:
        """True if a round in progress here includes this peer as a member or a helper."""
        return any(peer in state.plan.group for state in self._rounds.values())

    def progress(self) -> tuple[int, int]:
        """Bytes of others' vectors in the rounds in progress here: received so far, and expected in total."""
        done_bytes = total_bytes = 0
        for state in self._rounds.values():
            done, total = state.round.progress()
            done_bytes += done * state.result.itemsize
            total_bytes += total * state.result.itemsize
        return done_bytes, total_bytes

    def newly_aggregated_bytes(self) -> int:
        """Bytes of others' vectors that were summed here since the previous call of this method, by any caller."""
        before, self._reported_bytes = self._reported_bytes, self.aggregated_bytes
        return self.aggregated_bytes - before

    @contextmanager
    def expecting(self, attempts: Iterable[bytes]) -> Iterator[None]:
        """Inside this context, other members' calls for these attempts wait until the rounds begin here.

        Checks whether this peer is alive are answered before the rounds begin, and after they have ended, too.
        """
        news = dict.fromkeys((attempt for attempt in attempts if attempt not in self._expected), False)
        self._expected |= news
        try:
            yield
        finally:
            for attempt in news:
                del self._expected[attempt]

    async def sum(
        self, plan: AveragingPlan, vector: Vector | None, worker: Worker, coder: PartCoder | None = None
    ) -> Vector:
        """Returns the sum of all senders' vectors in a new array, or `vector` itself if nobody else takes part.

        `vector` must not change before the call returns. A helper passes None, sums its parts, and gets an empty array.
        A listener passes its own vector, which is not added. Without `coder`, parts are sent unencoded. Raises
        RoundFailed; raises LocalError if `vector` does not fit this peer's part in the plan.
        """
        takes = self._own in (*plan.senders, *plan.listeners)
        if takes != (vector is not None) or self._own not in plan.group:
            raise LocalError("this peer has another role in the plan of this round")
        if len(plan.group) == 1 and vector is not None:
            return vector
        evenly = RoundPacing(self._pacer, plan, self._own)
        state = OpenRound(plan, *self._laid_out(plan, vector), worker, coder or PlainParts(), evenly)
        began = trio.current_time()
        for memory in (self._memory, self._parts_memory):
            memory.round_begins()
        with self._registered(plan.attempt, state), state.scope:
            state.round.begin(began)
            async with trio.open_nursery() as nursery:
                if vector is not None:
                    self._start_sending(nursery, plan, state)
                await self._watch(plan, state)
        if state.failure is not None:
            self.outcomes.broke(trio.current_time(), state.round, state.failure)
            raise state.failure
        self.outcomes.ended(trio.current_time(), state.round)
        for memory in (self._memory, self._parts_memory):
            memory.round_took(trio.current_time() - began)
        return state.result

    def _laid_out(self, plan: AveragingPlan, vector: Vector | None) -> tuple[AllReduceRound, Vector | None, Vector]:
        """The round's state, our contribution (None for helpers and listeners), and the array for the sum."""
        if vector is None:
            if plan.dtype not in _DTYPES or not 0 <= plan.length <= FRAME_ELEMENTS:
                raise RoundFailed(f"a helper cannot sum {plan.length} values of {plan.dtype[:16]!r}", ())
            length, result = plan.length, np.empty(0, plan.dtype)
        else:
            length, result = len(vector), self._memory.vector(len(vector), vector.dtype)
            if plan.length and (plan.length, plan.dtype) != (length, vector.dtype.name):
                raise RoundFailed("the round is planned for vectors of another size", (self._own,))
        try:
            parts = plan.parts(length, result.itemsize)
        except ValueError as error:
            raise RoundFailed(str(error), ()) from None
        round_ = AllReduceRound(self._own, plan.senders, parts, plan.patience_s, plan.listeners)
        return round_, vector if self._own in plan.senders else None, result

    def _start_sending(self, nursery: trio.Nursery, plan: AveragingPlan, state: OpenRound) -> None:
        """Start the exchange with every owner. Each sender begins with another owner."""
        parts = state.round.parts
        shares: dict[str, list[Part]] = {}
        for part in parts:
            shares.setdefault(part.owner, []).append(part)
        own = shares.pop(self._own, [])
        nursery.start_soon(self._give_own, state, own)
        gate = PartGate(PartPace([part for share in shares.values() for part in share], _PARTS_UNDER_WAY))
        turn = (*plan.senders, *plan.listeners).index(self._own) % max(1, len(shares))
        owners = list(shares)
        for owner in owners[turn:] + owners[:turn]:
            nursery.start_soon(self._exchange, plan, state, shares[owner], gate)

    @contextmanager
    def _registered(self, attempt: bytes, state: OpenRound) -> Iterator[None]:
        self._rounds[attempt] = state
        self._expected |= {attempt: True} if attempt in self._expected else {}
        self._opened.notify()
        try:
            yield
        finally:
            del self._rounds[attempt]
            state.evenly.end()
            if not state.done:
                state.fail("the round was cancelled", ())

    async def _watch(self, plan: AveragingPlan, state: OpenRound) -> None:
        """Wait until the round is done, or fail it if a member is late."""
        waits_until = trio.current_time() + plan.coming_s
        while not state.done:
            with trio.move_on_after(min(_LOOK_S, plan.patience_s / 4)):
                await state.over.wait()
            now = trio.current_time()
            state.look(now, lambda peer: self._rpc.came_bytes(PeerId.parse(peer)))
            if state.round.late(now):
                hung, coming, idle_s = await self._ask_the_silent(plan, state.round.silent(now))
                self._be_patient_with_the_slow(state, now, idle_s)
                if coming and not hung and now < waits_until:  # all members wait for the peers that are coming
                    state.round.be_patient(now)
                    continue
                why = "a member of the group fell silent"
                if coming and not hung:
                    why = f"a member says that it has been in the previous sum for more than {plan.coming_s:.0f} s"
                hung = hung or coming
                if late := state.round.late(trio.current_time()):
                    state.fail(why, tuple(sorted(hung & {*late} or hung or late)))
            elif state.doubt is not None and now - state.doubt[0] > _DOUBT_S and not state.done:
                state.fail(state.doubt[2], (state.doubt[1],))

    def _be_patient_with_the_slow(self, state: OpenRound, now: float, idle_s: dict[str, float]) -> None:
        """Extend the patience for silent peers if slow transfers between others are in progress.

        A peer's claim that data is moving counts only if a second peer confirms it, or if we see data move ourselves:
        every transfer has two ends.
        """
        patience_s = state.plan.patience_s
        moving = [peer for peer, seconds in idle_s.items() if seconds < patience_s]
        if len(moving) + (now - state.moved_at < patience_s) > 1:
            for peer in idle_s:
                state.round.heard(now, peer)

    async def _ask_the_silent(
        self, plan: AveragingPlan, silent: set[str]
    ) -> tuple[set[str], set[str], dict[str, float]]:
        """Ask the silent peers whether they are alive.

        Returns the peers that do not answer (if all answer: those that do not know the round), the peers that have not
        begun the round yet, and for each other peer, which waits as we do, the seconds since it last received data.
        """
        mute, absent, coming, idle_s = set[str](), set[str](), set[str](), dict[str, float]()
        within_s = max(_ANSWER_S, plan.patience_s / 4)

        async def ask(peer: str) -> None:
            key = AverageKey(plan.attempt, 0)
            try:
                answer = await self._rpc.call(PeerId.parse(peer), _ALIVE, key, AverageAlive, timeout_s=within_s)
                if answer.body.coming:
                    coming.add(peer)
                else:
                    idle_s[peer] = answer.body.idle_s
            except (Refused, Overloaded):
                absent.add(peer)
            except RemoteError:
                mute.add(peer)

        async with trio.open_nursery() as nursery:
            for peer in silent:
                nursery.start_soon(ask, peer)
        return mute or absent, coming, idle_s

    async def _alive(self, call: Incoming[AverageKey]) -> Answer[AverageAlive]:
        attempt = call.body.attempt
        if attempt not in self._rounds and attempt not in self._expected:
            raise Refused("no such averaging round here")
        state = self._rounds.get(attempt)
        idle_s = trio.current_time() - state.moved_at if state is not None else 0.0
        coming = not self._expected.get(attempt, True)
        return Answer(AverageAlive(coming=coming, idle_s=min(idle_s, RPC_ROUND_DEADLINE_S)))

    async def _exchange(self, plan: AveragingPlan, state: OpenRound, share: list[Part], gate: PartGate) -> None:
        """Send our version of one owner's parts, and receive their sums."""
        owner = share[0].owner
        first = AverageKey(plan.attempt, share[0].index)
        with self._blaming(state, owner):
            stream = self._rpc.stream(PeerId.parse(owner), METHOD, first, timeout_s=RPC_ROUND_DEADLINE_S)
            async with stream as call, trio.open_nursery() as nursery:
                state.evenly.begin(owner)
                nursery.start_soon(self._send_share, plan, state, (share, gate, call))
                nursery.start_soon(self._receive_sums, state, (share, gate, call))

    @contextmanager
    def _blaming(self, state: OpenRound, owner: str) -> Iterator[None]:
        """Fail the round after any error between us and an owner, and name the peer to blame."""
        try:
            yield
        except (Refused, Overloaded, TooSlow) as error:
            state.doubts(f"a part was not summed: {error}", owner)
        except RemoteError as error:
            state.fail(f"a part was not summed: {error}", (owner,))
        except PeerdError as error:
            state.fail(str(error), (self._own,))  # our own gradient cannot be encoded

    async def _send_share(self, plan: AveragingPlan, state: OpenRound, way: _Way) -> None:
        share, gate, call = way
        source = state.source
        with state.on_call(call), self._blaming(state, share[0].owner):
            for part in share:
                await gate.passed(part)
                state.round.asked(part.index)
                frames = () if source is None else (await encoded(state, part, source[part.begin : part.end]),)
                await call.send(AverageKey(plan.attempt, part.index), frames)
            call.finish()

    async def _receive_sums(self, state: OpenRound, way: _Way) -> None:
        share, gate, call = way
        call.place = SumBuffers(state, share, self._parts_memory)
        call.be_patient()
        with self._blaming(state, share[0].owner):
            for part in share:
                answer = await call.receive(Empty)
                if answer is None:
                    raise ProtocolViolation("it sent fewer sums than it has parts")
                if len(answer.frames) != 1:
                    raise ProtocolViolation(f"a sum is one frame, not {len(answer.frames)}")
                job = partial(take_sum, state.coder, answer.frames[0], state.target(part))
                await state.computed(job, part.end - part.begin, "take a sum")
                state.round.returned(trio.current_time(), part.index)
                state.get_on()
                gate.returned(part.owner)
            if await call.receive(Empty) is not None:
                raise ProtocolViolation("it sent more sums than it has parts")

    async def _give_own(self, state: OpenRound, share: list[Part]) -> None:
        """Add our own version of the parts that we sum."""
        with self._blaming(state, self._own):
            for part in share:
                version = await as_others_see_it(state, part)
                with suppress(Refused):  # the round has failed, and its own error gives the reason
                    await self._arrive(state, part, self._own, version)

    async def _take_parts(self, call: Incoming[AverageKey], parts: CallStream) -> None:
        """Receive a sender's version of our parts. Returns the sums in the order in which its parts arrive."""
        state, sender = await self._round(call.body.attempt), call.peer.text
        if sender in state.plan.group:
            parts.be_patient()
        parts.place = self._parts_memory.rooms
        state.evenly.begin(sender)
        try:
            with state.on_call(parts), SumReplies(state, parts) as returns, returns.scope:
                with self._accusing(state, sender):
                    while (message := await parts.receive(AverageKey)) is not None:
                        if message.body.attempt != call.body.attempt:
                            raise Refused("a part of another round")
                        returns.owe(await self._take(state, sender, message))
                    if state.round.owes(sender):
                        raise Refused("it sent fewer parts than required")
                await returns.left()
            if returns.scope.cancelled_caught:
                raise Refused("the round has failed")
        finally:
            if state.round.owes(sender):
                state.doubts("a member ended its call early", sender)

    @contextmanager
    def _accusing(self, state: OpenRound, sender: str) -> Iterator[None]:
        """Refuse an invalid part. If it comes from a sender or a listener of the round, also fail the round."""
        try:
            yield
        except (ValueError, RemoteError) as error:
            if sender in (*state.plan.senders, *state.plan.listeners):
                state.fail(f"a member sent an invalid part: {error}", (sender,))
            raise Refused(str(error)) from None

    async def _take(self, state: OpenRound, sender: str, message: Answer[AverageKey]) -> Part:
        if state.failure is not None:
            raise Refused("the round has failed")
        if not message.body.part < len(state.round.parts):
            raise Refused("no such part")
        part = state.round.parts[message.body.part]
        state.round.check(part.index, sender)
        listens = sender in state.round.listeners
        if len(message.frames) != (not listens):
            raise Refused(f"a part is one frame, or none from a listener, not {len(message.frames)}")
        version = version_of(state, part, message.frames[0]) if not listens else None
        await self._arrive(state, part, sender, version)
        return part

    async def _round(self, attempt: bytes) -> OpenRound:
        """The round of this attempt. Waits until it begins if it is expected; Refused if it is unknown after 30 s."""
        until = trio.current_time() + _JOIN_WAIT_S
        while attempt not in self._rounds:
            with trio.move_on_at(until):
                await self._opened.wait()
                continue
            if attempt not in self._expected:
                raise Refused("no such averaging round here")
            until += _JOIN_WAIT_S
        return self._rounds[attempt]

    async def _arrive(self, state: OpenRound, part: Part, sender: str, version: Version | None) -> None:
        due = state.round.arrived(trio.current_time(), part.index, sender)
        if version is None:  # a listener's request, which may arrive before or after the sum is made
            state.get_on()
            return
        versions = state.versions.setdefault(part.index, {})
        versions[sender] = version
        if not due:
            return
        ordered = [versions[peer] for peer in state.round.senders]
        job = partial(sum_up, state.coder, part.begin, ordered, state.target(part))
        try:
            values = (part.end - part.begin) * len(ordered)
            found = await state.computed(job, values, "sum a part")
        except PeerdError as error:
            state.fail(f"a sum cannot be computed: {error}", ())
            raise Refused("the sum cannot be computed") from None
        if isinstance(found, SumFault):
            state.fail(found.reason, tuple(state.round.senders[i] for i in found.versions))
            raise Refused(found.reason)
        del state.versions[part.index]
        state.owed[part.index] = len(ordered) + len(state.round.listeners) - state.round.takes
        self.aggregated_bytes += (part.end - part.begin) * state.result.itemsize * state.owed[part.index]
        if state.owed[part.index]:
            state.answers[part.index] = Encoded(Empty(), (found,))
        state.unsummed -= 1
        state.let_go()
        state.get_on()
