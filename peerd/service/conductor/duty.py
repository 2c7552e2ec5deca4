"""The conductor's duty: taken on when it is this peer's turn, given up when a peer with the better claim conducts.

When a peer reports, and every peer before this one in the order is suspected (`ConductorClient.duty`), a tenure
begins, in a term above all that are believed. Every few seconds, and soon after a report names a later term, the
peers of stage 0 are asked whether they conduct as well; `Rivals` weighs their claims. Who is itself conducted by
another peer sends all that ask it to look further, except one that goes on asking: that one does not reach the
conductor. Steps known by hearsay go to the machine. Hostile input: a term in any peer's report only makes this peer
look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import NOT_CONDUCTING, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import LOOKED_AT_PEERS, SUSPECTS
from peerd.core.messages.proof import has_received
from peerd.core.messages.swarm import Conducts, Mb, Position, Receipt
from peerd.machine.conductor.conductor import Conductor
from peerd.machine.positions.phases import Phase
from peerd.machine.swarm.events import Origin
from peerd.machine.swarm.posts import peer_of, post_name
from peerd.net.host.host import Host
from peerd.service.conductor.commit_proofs import CommitProofs
from peerd.service.conductor.grants import GrantSigner
from peerd.service.conductor.machine_driver import MachineDriver
from peerd.service.conductor.orders import ConductingConfig
from peerd.service.conductor.rivals import ConductorClaim, Rivals, believed, next_term
from peerd.service.conductor.tenure import Tenure
from peerd.service.swarm.counted_record import CountedRecord

_LOOK_S = 2.0
_REFRESH_S = 10.0  # for the directory, which asks many
_FIRST_LOOK_S = 0.5
_TAKE_OVER_GATHER_S = 0.3
_LOOK_FOR_S = 3.0  # for a member to answer, before the new conductor decides without it
_INSISTS_S = 8.0  # that a peer asks one that is conducted by another: in that time it has asked many in the order
_PROOFS = 16  # members that are asked for proofs in one look, side by side
_ASKED_AGAIN_S = 20.0  # between two such questions to one peer about one position
_FORGOTTEN_S = 12.0  # between two calls, and it asks anew


class Duty:
    """See the module's header. `driver` has the tenure while there is one."""

    def __init__(
        self,
        config: ConductingConfig,
        host: Host,
        clock: Clock,
        rivals: Rivals,
        driver: MachineDriver,
        proofs: CommitProofs,
    ) -> None:
        self._config, self._host, self._clock, self._driver, self._proofs = config, host, clock, driver, proofs
        self._rivals, self._following = rivals, rivals.following
        self.work: tuple[float, ...] = ()  # of a microbatch in each stage, relative to each other; empty: all the same
        self.term = 0  # the latest that is believed; this peer's own while it conducts
        self.counts: CountedRecord | None = None  # publishes what each tenure counts of peers' work
        self._doubt = trio.Event()  # set, and replaced, when a report names a later term than ours
        self._asked = BoundedDict[tuple[PeerId, Position], float](SUSPECTS)  # for a proof -> when
        self._asked_last = BoundedDict[PeerId, float](SUSPECTS)  # likewise, of any position
        self._at_once = trio.CapacityLimiter(_PROOFS)
        self._learned = 0  # proofs that the machine knows of
        self._asking = BoundedDict[PeerId, tuple[float, float]](SUSPECTS)  # peers sent to look further -> since, last

    def hear_of_term(self, heard: int) -> None:
        """Note the term of the conductor that we follow."""
        if self._driver.tenure is None:
            self.term = believed(self.term, heard)

    # --- taking on --------------------------------------------------------------------------------------------

    def act(self, seen_term: int, asker: PeerId) -> Tenure:
        """The tenure, which begins if the duty is ours; else raises Refused, with the peer to ask instead."""
        tenure = self._driver.tenure
        if tenure is None:
            return self._take_on(seen_term, asker)
        if seen_term > self.term:
            self._doubt.set()
        return tenure

    def _take_on(self, seen_term: int, asker: PeerId) -> Tenure:
        own, duty, nursery = self._following.own, self._following.duty(), self._driver.nursery
        if duty != own or self._following.joined_since is None or nursery is None:
            raise Refused(f"{NOT_CONDUCTING}, {duty.short} should")
        reigning = self._following.accepted_by
        if reigning not in (None, own) and not self._insists(asker):
            raise Refused(f"{NOT_CONDUCTING}, {reigning.short} does")
        self._asking.clear()
        self.term = next_term(self.term, seen_term)
        tenure = self._new_tenure()
        self._driver.begin(tenure)
        expected = [(p, stage) for p, stage in self._following.alive() if not self._following.suspected(p)]
        tenure.machine.search.announced_step = self._following.announced_step()
        tenure.machine.expect(post_name(peer.text, stage) for peer, stage in expected)
        for peer, stage in expected:
            nursery.start_soon(self._look_for, tenure.machine, peer, stage)
        if self.counts is not None:
            before = [*reversed(self._following.followed), own]
            lasts = partial(self._lasts, tenure)
            nursery.start_soon(self.counts.keep, tenure.machine.counted_work, before, lasts)
        self._driver.notes(f"conducts the run from now on (term {self.term})")
        return tenure

    def _lasts(self, tenure: Tenure) -> bool:
        """True while this tenure has not ended."""
        return self._driver.tenure is tenure

    def _insists(self, asker: PeerId) -> bool:
        """True for a peer that has asked us for long, though another peer conducts us: it does not reach that one."""
        now = trio.current_time()
        since, last = self._asking.get(asker, (now, now))
        if now - last > _FORGOTTEN_S:
            since = now
        self._asking[asker] = since, now
        return asker != self._following.own and now - since >= _INSISTS_S

    def _new_tenure(self) -> Tenure:
        own, now = self._following.own, trio.current_time()
        sizes = replace(self._config.conductor, work=self.work)
        if self.term > 1:  # a run that is on its way: its members are known, and will soon report
            sizes = replace(sizes, gather_s=_TAKE_OVER_GATHER_S)
        evidence = self._proofs.evidence
        origin = Origin(
            own=post_name(own.text, 0),
            established=self._following.established or evidence.established,
            resting=self._following.resting,
            verify=self._is_receipt,
            place_of=self._place,
            seen=evidence.seen,
            cold=not self._following.established and bool(evidence.established),
            trusted=self._proofs.trusted,
            signers=evidence.signers,
        )
        machine = Conductor(sizes, self._clock.rng(f"conductor {own} {self.term} {now}"), now, origin)
        granting = GrantSigner(self._config.fingerprint, self._host.sign)
        return Tenure(self.term, machine, granting, self._clock.rng(f"member list {own} {self.term} {now}"))

    def _place(self, name: str) -> str:
        """The place that a connected peer connects from; for others its peer id, a place of its own."""
        link = self._host.links.best(PeerId.parse(peer_of(name)))
        return peer_of(name) if link is None else link.user.place

    def _is_receipt(self, holder: str, stage: int, step: int, mb: Mb, shown: Receipt) -> bool:
        """True when the holder has signed this receipt."""
        try:
            return has_received(PeerId.parse(peer_of(holder)), self._config.fingerprint, stage, step, mb, shown)
        except ValueError:
            return False

    async def _look_for(self, machine: Conductor, peer: PeerId, stage: int) -> None:
        """Look for an announced member; the machine does not wait for one that does not answer."""
        if peer != self._following.own and not await self._is_there(peer):
            machine.unexpect(post_name(peer.text, stage))
            self._driver.wake_waiting()

    async def _is_there(self, peer: PeerId) -> bool:
        with trio.move_on_after(_LOOK_FOR_S):
            try:
                await self._host.connect(peer)
            except RemoteError:
                return False
            return await self._rivals.answers(peer)
        return False

    # --- giving up --------------------------------------------------------------------------------------------

    def _resign(self, why: str) -> None:
        self._driver.notes(f"hands the conductor's duty on: {why}")
        self._driver.end()

    async def look_around(self) -> None:
        """Watch for rivals: two peers may conduct for a moment, and the one with the worse claim resigns.

        A run that begins looks more than once before its first step: peers that start together announce themselves
        while each believes that it is alone.
        """
        while True:
            with trio.move_on_after(_FIRST_LOOK_S if self._gathers else _LOOK_S):
                await self._doubt.wait()
                await trio.sleep(_FIRST_LOOK_S)  # a peer that names one term after another makes us look no more often
            self._doubt = trio.Event()
            if self._driver.tenure is not None:
                await self._look()

    async def _look(self) -> None:
        directory = self._following.directory
        if directory.only_dials and self._following.duty() != self._following.own:
            self._following.conductor = self._following.accepted_by = None
            self._resign("others can be dialed, and this peer cannot")
            return
        with trio.move_on_after(_REFRESH_S):
            await (directory.refresh() if self._gathers else self._following.refresh())
        await self._hear_of_steps()
        await self._look_for_proofs()
        rivals = await self._rivals.conducting()
        if (machine := self._driver.machine) is not None:
            asked = [(peer, told.current) for peer, told in rivals.items() if told.current is not None]
            await self._ask_for_proofs(machine, asked)
        for peer, told in rivals.items():
            self._weigh(peer, told)

    def _weigh(self, peer: PeerId, told: Conducts) -> None:
        """Resign if the part of the run that `peer` conducts has more proven work, or else the better claim."""
        machine = self._driver.machine
        if machine is None:
            return
        ours, theirs = self._reigning(machine), self._backers(machine, peer, told)
        if not self._rivals.better(ours, peer, told, machine.search.established.compare(ours.backers, theirs)):
            return
        self._following.hand_to(peer)
        here = machine.current
        if here is None or told.current is None or not here.step or machine.search.proven.saw(told.current):
            self._resign(f"{peer.short} conducts, too, and has the better claim")
            return
        dropped = machine.course.steps_made
        self._driver.warnings(
            f"{peer.short} conducts another part of this run, at step {told.current.step}; this part is at step "
            f"{here.step} and joins it. Dropped: what was made here since the parts separated, at "
            f"most the {dropped} step{'s' * (dropped != 1)} since this peer conducts; members keep a checkpoint"
        )
        self._resign(f"the part that {peer.short} conducts has more proven work")

    def _backers(self, machine: Conductor, peer: PeerId, told: Conducts) -> frozenset[str]:
        """The known members that signed a rival's position; all of them where a trusted peer bears it out.

        None for a position that this peer saw: whoever was there may be here by now.
        """
        if told.current is None or machine.search.proven.saw(told.current):
            return frozenset()
        if peer.text in self._proofs.trusted or machine.search.proven.is_kept(told.current):
            return machine.search.established.peers
        return self._proofs.evidence.signers(told.current)

    async def _look_for_proofs(self) -> None:
        """Ask members for proofs of their newest positions that nobody bears out, some members in each look.

        Those that were not asked for longest come first: strangers' claims, however new, leave honest members a turn.
        """
        machine = self._driver.machine
        if machine is None or not (self._gathers or machine.search.lacks):
            return
        newest: dict[PeerId, Position] = {}
        for position, posts in machine.search.unproven().items():
            for peer in map(PeerId.parse, map(peer_of, posts)):
                if peer not in newest and self._may_ask(peer, position):
                    newest[peer] = position
        order = sorted(newest, key=lambda peer: self._asked_last.get(peer, -math.inf))
        await self._ask_for_proofs(machine, [(peer, newest[peer]) for peer in order[:_PROOFS]])

    async def _ask_for_proofs(self, machine: Conductor, wanted: Iterable[tuple[PeerId, Position]]) -> None:
        """Ask each of these peers for a proof of the position that it claims; peers that were just asked are left out.

        They are asked side by side: one that does not answer holds nobody up but the others of this look.
        """
        if known := machine.search.established.peers:
            async with trio.open_nursery() as nursery:
                for peer, position in wanted:
                    if self._may_ask(peer, position) and not machine.search.proves(position):
                        self._asked[peer, position] = self._asked_last[peer] = trio.current_time()
                        nursery.start_soon(self._ask_for_proof, peer, position, known)
        if self._learned != self._proofs.learned and self._driver.machine is not None:
            self._learned = self._proofs.learned
            self._driver.machine.search.proven.look_again()
            self._driver.wake_waiting()

    def _may_ask(self, peer: PeerId, position: Position) -> bool:
        """True for a question for a proof that the peer was not asked just now."""
        return trio.current_time() - self._asked.get((peer, position), -math.inf) >= _ASKED_AGAIN_S

    async def _ask_for_proof(self, peer: PeerId, position: Position, known: frozenset[str]) -> None:
        async with self._at_once:
            await self._proofs.learn(peer, position, known)

    @property
    def _gathers(self) -> bool:
        """True until the machine has made its first decision; also while there is no machine."""
        return self._driver.machine is None or self._driver.machine.phase is Phase.GATHERING

    def _reigning(self, machine: Conductor) -> ConductorClaim:
        reporting = self._driver.heard
        followers = {peer_of(post.peer) for post in machine.members() if post.since and post.peer in reporting}
        return ConductorClaim(
            self.term,
            followers,
            machine.course.has_stepped,
            machine.current,
            machine.search.established.peers,
            frozenset({self._following.own.text, *followers}),
        )

    async def _hear_of_steps(self) -> None:
        """Pass steps known by hearsay to the machine; those of keepers that can be reached count for longer."""
        machine, directory = self._driver.machine, self._following.directory
        if machine is None:
            return
        machine.search.announced_step = self._following.announced_step()
        if machine.search.lacks:
            there = await self._rivals.reachable(directory.kept)
            kept = {peer.text: directory.kept[peer] for peer in there if peer in directory.kept}
            machine.search.keepers(kept, self._proofs.network_of)
        if machine.search.lost:
            machine.search.nobody_has = await self._nobody_has(machine)
            self._driver.wake_waiting()  # the next deadline may be earlier

    async def _nobody_has(self, machine: Conductor) -> bool:
        """True when all who had the states that no member has were dialed in vain, as far as records tell of any.

        A record outlives its peer by a minute, and a peer that lives renews its own: that none is left says as much,
        where those of other stages were read. A peer that only dials may be on its way to us: it cannot be looked for.
        """
        missing = machine.search.without_any_state()
        stepped = [entry for entry in self._following.directory.announced.values() if entry.progress.step]
        had = [entry for entry in stepped if entry.progress.stage in missing and entry.peer != self._following.own]
        away = {entry.peer for entry in had} - {PeerId.parse(peer_of(name)) for name in machine.roster.entries}
        if len(had) == len(stepped) or len(away) > LOOKED_AT_PEERS or any(entry.progress.client for entry in had):
            return False
        return not await self._rivals.reachable(away)
