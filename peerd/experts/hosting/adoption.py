"""Adoption of orphans: restores experts whose host is gone from their newest checkpoint; and yielding to other owners.

Every quarter of an announcement period this peer reads the directory. An expert is an orphan if its claim is not
renewed and its host does not answer, or if nobody claims it. The peers that offer to adopt try one after another, in an
order that all of them compute alike (`experts.rules.orphan_watch`). The adopter loads the last owner's newest
checkpoint. If bytes do not match their digest or do not load, it tries an older one; if no checkpoint is available, it
starts the expert from its initial weights. It logs what was lost. Its own checkpoints name the one from which it
continued, so that others see that it follows the last owner (`experts.owners.lineage`). Claims and signatures of
strangers outside this chain have no effect.

Only one peer adopts at a time. An adopter announces its intention and reads the directory only after that announcement
is published: once before it fetches and once before it hosts. The announcement stays until its claim is published. So
of two adopters, the later one sees the earlier one's intention or claim. If each sees the other's intention, the one
later in the order gives up; the other one waits until it has, because it may have read the directory before. So no
orphan is adopted twice as long as peers read each other's records, no matter how many are silent. In a partition both
sides may have an owner; afterwards one of the two gives the expert up here (`experts.owners.rivals`).

If one read covers the whole grid (4,096 experts below 256 prefixes), an orphan is adopted within two announcement
periods. On a larger grid this holds for prefixes that the first peers in the order read because they host or keep an
expert there; each of them that does not read there costs the next one a quarter of a period. The other prefixes are
read in turn: a grid of up to 65,536 experts (1,024 prefixes) is covered in each period, and its orphans are adopted
within three periods; of a larger one each read covers 16,384 experts (256 prefixes).

A hostile peer may announce checkpoints that do not exist (given up after a second try), that contain NaN (an older one
is used), or huge ones; claim experts that it does not serve; or announce an adoption and never complete it
(`experts/owners/rivals`: all peers of one network share one waiting time, as long as the state takes, and peers that do
not answer are not waited for). The log names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import EXPERT_STATE_BYTES, EXPERT_TAKING, LINKS
from peerd.experts.calls.kept_directory import CustodyView
from peerd.experts.calls.vault import Vault
from peerd.experts.hosting.checkpoints import AdoptingHost, ExpertCheckpoints, place_of
from peerd.experts.owners.owner_tree import KeptCopy
from peerd.experts.rules.orphan_watch import OrphanWatch, SeenClaim, draw
from peerd.messages.experts import CheckpointRef, HolderOffer
from peerd.role.role import RoleContext
from peerd.run.grid import Uid

_LOOKS: Final = 4  # reads in an announcement period
_EXPERTS_PER_LOOK: Final = 4096  # places of the grid below the prefixes of one read, besides those that concern us
_MOST_PER_LOOK: Final = 16_384  # if a large grid needs that many to be covered in one period
_PREFIXES_PER_LOOK: Final = 256
_PROBES: Final = 64  # peers that one read probes
_LOOKS_AT_RIVAL: Final = 16  # reads in an announcement period, while a rival gives up
_PROBE_S: Final = 0.5  # or an eighth of a period, if longer; a host that is merely slow renews its claim
_AT_ONCE: Final = 4  # states fetched concurrently
_TRIES: Final = 2  # attempts while holders do not answer; then the expert starts from scratch
_CHECKPOINTS: Final = 6  # tried for one expert
_BEYOND: Final = 2  # times the updates between two checkpoints, as one may have been in transit
_LAST_GENERATION: Final = (1 << 53) - 1


class Adoption:
    """Adoption of orphans by one host; `run` does the work. `state_bytes` is the maximum size of a state of this
    run.
    """

    def __init__(
        self,
        ctx: RoleContext,
        vault: Vault,
        host: AdoptingHost,
        checkpoints: ExpertCheckpoints,
        state_bytes: int = EXPERT_STATE_BYTES,
    ) -> None:
        assert ctx.run is not None
        assert ctx.run.experts is not None
        self.adopted = self.began_anew = self.yielded = 0
        self.updates_lost = 0  # of experts adopted here
        self.updates_dropped = 0  # updates of ours that were lost when another owner won
        self._log, self._me = ctx.log, ctx.host.id
        self._vault, self._host, self._checkpoints, self._state_bytes = vault, host, checkpoints, state_bytes
        self._announce_s = ctx.run.experts.announce_s
        self._checkpoint_updates = ctx.run.experts.checkpoint_updates
        self._watch = OrphanWatch(self._announce_s)
        self._limit = trio.CapacityLimiter(_AT_ONCE)
        self._tries = BoundedDict[Uid, int](LINKS)
        self._due = float("inf")  # when the next expert becomes doubtful
        self._turn = 0  # number of the read, for the prefixes that do not concern us
        self._lineages = vault.directory.lineages
        self._lineages.hosted = self._generation
        vault.adopts = lambda: self._room() > 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look for orphans, and for owners of our experts to yield to, until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                began = trio.current_time()
                await self._look(nursery)
                due = max(self._due, trio.current_time() + self._announce_s / (4 * _LOOKS))
                await trio.sleep_until(min(due, began + self._announce_s / _LOOKS))

    def status(self) -> dict[str, object]:
        """Numbers of adopted experts and lost updates, for `peerd status`."""
        return {
            "adopted": self.adopted,
            "began_anew": self.began_anew,
            "updates_lost": self.updates_lost,
            "dropped": self.yielded,
            "updates_dropped": self.updates_dropped,
        }

    def _generation(self, uid: Uid) -> int | None:
        hosted = self._host.experts.get(uid)
        return hosted.generation if hosted is not None else None

    def _room(self) -> int:
        return self._host.room() - len(self._vault.taking)

    # --- reading the directory --------------------------------------------------------------------------------

    async def _look(self, nursery: trio.Nursery) -> None:
        prefixes = self._prefixes()
        try:
            view = await self._vault.directory.look(prefixes)
        except RemoteError as error:
            self._log.event("dht.read_failed", level="debug", reason=str(error))
            return
        await self._yield(view)
        doubtful = self._doubtful(view, prefixes)
        if not doubtful or self._room() <= 0:
            return
        owners = {uid: self._owner(uid, view) for uid in doubtful}
        answers = await self._probe(owners.values())
        now = trio.current_time()
        since = {uid: self._watch.orphan_since(uid, answers.get(owners[uid], False)) for uid in doubtful}
        for uid in sorted(doubtful, key=lambda uid: (since[uid], uid)):
            if self._room() <= 0:
                return
            adopters = [p for p, offer in view.offers.items() if offer.adopts and answers.get(p, True)]
            places = {p: self._place(p, view.offers[p]) for p in adopters if p not in (self._me, owners[uid])}
            if uid in view.waits or not self._watch.may_adopt(now, uid, since[uid], self._me, places):
                continue
            if len(self._vault.taking) < EXPERT_TAKING and not await self._rivals(uid, view):
                self._vault.taking.append(uid)
                silent = {peer for peer, there in answers.items() if not there} - {self._me}
                nursery.start_soon(self._take, uid, view, silent)

    def _prefixes(self) -> list[Uid]:
        """Prefixes to read next in the directory.

        They are those of our own experts, some of those of held checkpoints, and some of all others, as many as one
        read can cover. The next call continues where these end.
        """
        directory, self._turn = self._vault.directory, self._turn + 1
        count, side = directory.last_prefixes, directory.grid.sides[-1]
        places = min(_MOST_PER_LOOK, max(_EXPERTS_PER_LOOK, -(-count * side // _LOOKS)))
        most = min(count, _PREFIXES_PER_LOOK, max(1, places // side))
        rest = [directory.last_prefix((self._turn * most + i) % count) for i in range(most)]
        held = list(dict.fromkeys(pointer.expert.uid.prefix for pointer in self._vault.held))
        begin = self._turn * _PREFIXES_PER_LOOK % len(held) if len(held) > _PREFIXES_PER_LOOK else 0
        ours = [uid.prefix for uid in self._host.experts]
        return list(dict.fromkeys([*ours, *held[begin : begin + _PREFIXES_PER_LOOK], *rest]))

    def _doubtful(self, view: CustodyView, prefixes: Sequence[Uid]) -> list[Uid]:
        now = trio.current_time()
        found = sorted({*view.kept, *view.claims, *self._watch.known(prefixes)})
        doubtful, self._due = list[Uid](), float("inf")
        for uid in found:
            late = self._watch.is_doubtful(now, uid, view.claims.get(uid))
            if uid in self._host.experts:
                self._watch.forget(uid)
            elif late and uid not in self._vault.taking:
                doubtful.append(uid)
            elif not late:
                self._due = min(self._due, self._watch.doubtful_at(uid))
        return doubtful

    def _place(self, peer: PeerId, offer: HolderOffer) -> str:
        """A peer's network location (address block), by its connection or, without one, by its announcement."""
        return self._vault.directory.seat(peer) or place_of(offer.addrs)

    def _owner(self, uid: Uid, view: CustodyView) -> PeerId:
        """The last known owner of an expert."""
        known = self._lineages.owner(uid)
        if known is not None:
            return known.owner
        claim = view.claims.get(uid) or self._watch.last(uid)
        return claim.peer if claim is not None else view.kept[uid][0].pointer.peer

    async def _probe(self, peers: Iterable[PeerId]) -> dict[PeerId, bool]:
        """Which of these peers answer. This peer counts as silent, because it does not host the experts in question."""
        answers = {self._me: False}

        async def ask(peer: PeerId) -> None:
            answers[peer] = await self._vault.answers(peer, max(_PROBE_S, self._announce_s / 8))

        asked = [peer for peer in dict.fromkeys(peers) if peer != self._me]
        for peer in asked[_PROBES:]:
            answers[peer] = True  # not probed: it comes later
        async with trio.open_nursery() as nursery:
            for peer in asked[:_PROBES]:
                nursery.start_soon(ask, peer)
        return answers

    async def _rivals(self, uid: Uid, view: CustodyView) -> list[PeerId]:
        """The other peers that are about to adopt an expert, answer, and have not exhausted their turn."""
        takers = [p for p, o in view.offers.items() if p != self._me and any(n.uid == uid for n in o.taking)]
        answers = await self._probe(takers[:_PROBES])
        now, copies = trio.current_time(), view.kept.get(uid)
        size, seat = copies[0].pointer.size_bytes if copies else 0, self._vault.directory.seat
        there = [taker for taker in takers if answers.get(taker, False)]
        return [p for p in there if self._lineages.turns.has_turn(now, uid, p, seat(p), size)]

    async def _yield(self, view: CustodyView) -> None:
        """Give up the experts that another host owns now."""
        for uid, hosted in list(self._host.experts.items()):
            claim = view.claims.get(uid)
            if claim is None or claim.peer == self._me:
                continue
            if uid in self._vault.giving:
                continue  # it is ours until the next host has confirmed the take-over
            dropped = hosted.model.version - self._forked_at(uid, claim, view)
            self.yielded += 1
            self.updates_dropped += max(0, dropped)
            self._log.event(
                "expert.yielded",
                level="warning" if dropped > 0 else "info",
                expert=str(uid),
                to=claim.peer,
                generation=claim.generation,
                updates_dropped=max(0, dropped),
            )
            why = f"peer {claim.peer.short} owns it in generation {claim.generation}"
            await self._host.drop(uid, f"{why}; {max(0, dropped)} updates are dropped")

    def _forked_at(self, uid: Uid, claim: SeenClaim, view: CustodyView) -> int:
        """The number of our updates that the winner `claim` has as well.

        These are the updates in our checkpoint from which the winner continued, or in the common checkpoint from which
        both continued. Only checkpoints count, not what the winner states.
        """
        ours, former = self._checkpoints.origin(uid)
        if former is not None and former.peer == claim.peer:
            return ours  # we continued from the winner
        pointers = [copy.pointer for copy in view.kept.get(uid, ())]
        began = [p.began for p in pointers if (p.peer, p.generation) == (claim.peer, claim.generation)]
        if not began:
            return self._checkpoints.kept_version(uid)
        formers = [p.former for p in pointers if p.former is not None and p.continues()]
        signed = [each.version for each in formers if each.peer == self._me]
        return min(began[0], max(signed, default=ours))

    # --- an adoption ------------------------------------------------------------------------------------------

    async def _take(self, uid: Uid, before: CustodyView, silent: set[PeerId]) -> None:
        """Announce the adoption of one orphan and adopt it, unless another peer does. `silent`: peers that do not
        answer.
        """
        try:
            if await self._vault.announce():  # else others would not see it; retried at the next read
                await self._take_alone(uid, before, silent)
        except RemoteError as error:
            self._log.event("expert.not_adopted", level="warning", expert=str(uid), reason=str(error))
        finally:
            self._vault.taking.remove(uid)
        await self._vault.announce()  # another peer may wait for our withdrawal

    async def _take_alone(self, uid: Uid, before: CustodyView, silent: set[PeerId]) -> None:
        view = await self._look_once_more(uid, before)
        if view is not None:
            copies = view.kept.get(uid) or before.kept.get(uid, [])
            for copy in copies:
                copy.holders.sort(key=lambda peer: peer in silent)
            async with self._limit:
                await self._adopt(uid, copies, before)

    async def _look_once_more(self, uid: Uid, before: CustodyView) -> CustodyView | None:
        """Read the directory before a decision; returns None if the expert is another peer's.

        The read may take longer than others, because an expert that it misses would be adopted twice.
        """
        while True:
            view = await self._vault.directory.look([uid.prefix], self._announce_s / 2)
            claim = view.claims.get(uid)
            new = claim is not None and claim != before.claims.get(uid)
            if new or uid in view.waits or uid in self._host.experts:
                return None
            rivals = await self._rivals(uid, view)
            if not rivals:
                return view
            if min(draw(uid, rival) for rival in rivals) < draw(uid, self._me):
                return None
            await trio.sleep(self._announce_s / _LOOKS_AT_RIVAL)

    async def _adopt(self, uid: Uid, copies: Sequence[KeptCopy], before: CustodyView) -> None:
        generations, known = [copy.pointer.generation for copy in copies], self._lineages.owner(uid)
        generations += [known.generation] if known is not None else []
        generation = min(max(generations, default=0) + 1, _LAST_GENERATION)
        silent = False
        for copy in copies[:_CHECKPOINTS]:
            pointer = copy.pointer
            try:
                if pointer.size_bytes > self._state_bytes:
                    raise ValueError(f"it has {pointer.size_bytes} bytes; a state takes {self._state_bytes} at most")
                data = await self._vault.fetch(pointer, copy.holders)
                # Peers that noticed later may precede us in the order.
                if await self._look_once_more(uid, before) is None:
                    return
                await self._host.adopt(uid, generation, data)
                self._checkpoints.began(uid, generation, pointer.version, pointer.as_former())
            except (RemoteError, ValueError) as error:
                silent |= isinstance(error, RemoteError) and not isinstance(error, ProtocolViolation)
                self._log.event(
                    "expert.checkpoint_unusable",
                    level="warning",
                    expert=str(uid),
                    made_by=pointer.peer,
                    version=pointer.version,
                    reason=str(error),
                )
                continue
            self._settled(uid, generation, pointer, copies)
            await self._host.tell(uid)  # before the adoption is no longer announced
            return
        self._tries[uid] = self._tries.get(uid, 0) + 1
        if silent and self._tries[uid] < _TRIES:
            return  # all holders may be briefly unreachable: retry at the next read
        if await self._look_once_more(uid, before) is None:
            return
        await self._host.adopt(uid, generation, None)
        self._checkpoints.began(uid, generation, 0, copies[0].pointer.as_former() if copies else None)
        self.began_anew += 1
        why = "none of its checkpoints could be fetched" if copies else "no checkpoint of it is known"
        self._log.event("expert.reinitialized", level="warning", expert=str(uid), generation=generation, reason=why)
        self._settled(uid, generation, None, copies)
        await self._host.tell(uid)

    def _settled(self, uid: Uid, generation: int, taken: CheckpointRef | None, copies: Sequence[KeptCopy]) -> None:
        """Count lost updates: those that were announced, or are in a newer checkpoint, but not in the adopted one.

        Announcement and checkpoint are claims of others. If a checkpoint proves some updates, the loss counts at most
        twice the updates between two checkpoints, and once more for each newer checkpoint that was unusable.
        """
        known = [(copy.pointer.generation, copy.pointer.version) for copy in copies]
        last = self._watch.last(uid)
        known += [(last.generation, last.version)] if last is not None else []
        version = taken.version if taken is not None else 0
        lost = max(0, max(known)[1] - version)
        if taken is not None:
            of_no_use = [copy.pointer for copy in copies].index(taken)
            lost = min(lost, (_BEYOND + of_no_use) * self._checkpoint_updates)
        self._tries.pop(uid, None)
        self._watch.forget(uid)
        self.adopted += 1
        self.updates_lost += lost
        facts: dict[str, Any] = {"generation": generation, "version": version, "updates_lost": lost}
        if taken is not None:
            facts |= {"digest": taken.digest, "made_by": taken.peer}
        self._log.event("expert.adopted", expert=str(uid), **facts)
