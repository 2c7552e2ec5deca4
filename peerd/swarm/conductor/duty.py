"""The conductor's duty: this peer accepts it when it is its turn, and resigns if a peer with a better claim conducts.

When a peer reports, and all peers before this one in the order are suspected (`ConductorClient.duty`), a tenure begins,
in a term above all credible ones. Every few seconds, and soon after a report names a later term, the peers of stage 0
are asked whether they conduct, too; `Rivals` compares their claims. A peer that follows another conductor refuses
reports and names that conductor. If the same peer keeps asking for 8 s, it presumably cannot reach that conductor, and
this peer accepts the duty. Steps in others' records are passed to the machine. Hostile input: a term in a report only
triggers a check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import RemoteError, not_conducting
from peerd.core.ids import PeerId
from peerd.core.limits import LOOKED_AT_PEERS, SLOW_LINE_BYTES_PER_S, SUSPECTS
from peerd.messages.proof import has_received
from peerd.messages.swarm import Conducts, Mb, Position, Receipt
from peerd.swarm.batch.counted_record import CountedRecord
from peerd.swarm.batch.grants import GrantSigner
from peerd.swarm.conductor.commit_proofs import CommitProofs
from peerd.swarm.conductor.machine_driver import MachineDriver
from peerd.swarm.conductor.orders import ConductingConfig
from peerd.swarm.conductor.rivals import ConductorClaim, Rivals, believed, next_term
from peerd.swarm.conductor.tenure import Tenure
from peerd.swarm.events import Origin
from peerd.swarm.positions.phases import Phase
from peerd.swarm.posts import peer_of, post_name
from peerd.swarm.steps.conductor import Conductor
from peerd.wire.host.host import Host

_LOOK_S = 2.0
_REFRESH_S = 10.0  # limit for the directory, which asks many peers
_FIRST_LOOK_S = 0.5
_TAKE_OVER_GATHER_S = 0.3
_LOOK_FOR_S = 3.0  # for a member to answer before a new conductor decides without it
_INSISTS_S = 8.0  # of repeated requests before we conduct although we follow another conductor
_PROOFS = 16  # members that are asked for proofs in one check, in parallel
_ASKED_AGAIN_S = 20.0  # between two requests to one peer for a proof of one position
_FORGOTTEN_S = 12.0  # pause after which repeated requests count from zero


class Duty:
    """Decides when this peer conducts. `driver` has the current tenure."""

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
        self.work: tuple[float, ...] = ()  # relative work of a microbatch in each stage; empty: all equal
        self.state_bytes = 0  # size of the first stage's state; other stages' states have about the same size
        self.term = 0  # the latest credible term; this peer's own while it conducts
        self.counts: CountedRecord | None = None  # publishes each tenure's count of peers' work
        self._doubt = trio.Event()  # set, and replaced, when a report names a later term than ours
        self._asked = BoundedDict[tuple[PeerId, Position], float](SUSPECTS)  # for a proof -> when
        self._asked_last = BoundedDict[PeerId, float](SUSPECTS)  # peer -> when we last asked for any proof
        self._at_once = trio.CapacityLimiter(_PROOFS)
        self._learned = 0  # number of proofs that the machine has considered
        self._asking = BoundedDict[PeerId, tuple[float, float]](SUSPECTS)  # refused peer -> first, last request

    def hear_of_term(self, heard: int) -> None:
        """Record the term of the conductor that we follow."""
        if self._driver.tenure is None:
            self.term = believed(self.term, heard)

    # --- accepting --------------------------------------------------------------------------------------------

    def act(self, seen_term: int, asker: PeerId) -> Tenure:
        """The tenure, which begins now if the duty is ours. Otherwise raises Refused, which names the peer to ask."""
        tenure = self._driver.tenure
        if tenure is None:
            return self._take_on(seen_term, asker)
        if seen_term > self.term:
            self._doubt.set()
        return tenure

    def _take_on(self, seen_term: int, asker: PeerId) -> Tenure:
        own, duty, nursery = self._following.own, self._following.duty(), self._driver.nursery
        if duty != own or self._following.joined_since is None or nursery is None:
            raise not_conducting(f", {duty.short} should")
        reigning = self._following.accepted_by
        if reigning not in (None, own) and not self._insists(asker):
            raise not_conducting(f", {reigning.short} does")
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
        """True while this tenure is the current one."""
        return self._driver.tenure is tenure

    def _insists(self, asker: PeerId) -> bool:
        """True if `asker` has asked us for 8 s although we follow a conductor: it presumably cannot reach that one."""
        now = trio.current_time()
        since, last = self._asking.get(asker, (now, now))
        if now - last > _FORGOTTEN_S:
            since = now
        self._asking[asker] = since, now
        return asker != self._following.own and now - since >= _INSISTS_S

    def _new_tenure(self) -> Tenure:
        own, now = self._following.own, trio.current_time()
        fetch_s = 2 * self.state_bytes / SLOW_LINE_BYTES_PER_S
        sizes = replace(self._config.conductor, work=self.work, fetch_s=fetch_s)
        if self.term > 1:  # the run is in progress: its members are known, and report soon
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
        """The address block (IPv4 address or IPv6 /64) of a connected peer; for others the peer id."""
        link = self._host.links.best(PeerId.parse(peer_of(name)))
        return peer_of(name) if link is None else link.user.place

    def _is_receipt(self, holder: str, stage: int, step: int, mb: Mb, shown: Receipt) -> bool:
        """True if the holder has signed this receipt."""
        try:
            return has_received(PeerId.parse(peer_of(holder)), self._config.fingerprint, stage, step, mb, shown)
        except ValueError:
            return False

    async def _look_for(self, machine: Conductor, peer: PeerId, stage: int) -> None:
        """Check that an announced member is reachable. If it does not answer, the machine stops waiting for it."""
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

    # --- resigning --------------------------------------------------------------------------------------------

    def _resign(self, why: str) -> None:
        self._driver.notes(f"hands over the conductor's duty: {why}")
        self._driver.end()

    async def look_around(self) -> None:
        """Watch for rival conductors until cancelled. If two peers conduct, the one with the worse claim resigns.

        At the start of a run the check is repeated every 0.5 s before the first step, because peers that start together
        announce themselves while each believes that it is alone.
        """
        while True:
            with trio.move_on_after(_FIRST_LOOK_S if self._gathers else _LOOK_S):
                await self._doubt.wait()
                await trio.sleep(_FIRST_LOOK_S)  # limits the rate of checks if a peer keeps naming new terms
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
            f"{here.step} and joins it. The steps made here since the parts separated are dropped, at most "
            f"the {dropped} step{'s' * (dropped != 1)} since this peer conducts; members keep a checkpoint"
        )
        self._resign(f"the part that {peer.short} conducts has more proven work")

    def _backers(self, machine: Conductor, peer: PeerId, told: Conducts) -> frozenset[str]:
        """The known members that signed a rival's position, or all known members if a trusted peer confirms it.

        Empty for a position that this peer has seen itself: the members that were there may follow this peer by now.
        """
        if told.current is None or machine.search.proven.saw(told.current):
            return frozenset()
        if peer.text in self._proofs.trusted or machine.search.proven.is_kept(told.current):
            return machine.search.established.peers
        return self._proofs.evidence.signers(told.current)

    async def _look_for_proofs(self) -> None:
        """Ask members for proofs of their newest positions that are not proven yet, up to 16 members in each check.

        Members that have not been asked for longest come first, so that strangers' claims cannot keep honest members
        from being asked.
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
        """Ask each of these peers for a proof of the position that it claims, except those that were asked recently.

        They are asked in parallel, so a peer that does not answer delays only this check.
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
        """True if this peer was not asked recently for a proof of this position."""
        return trio.current_time() - self._asked.get((peer, position), -math.inf) >= _ASKED_AGAIN_S

    async def _ask_for_proof(self, peer: PeerId, position: Position, known: frozenset[str]) -> None:
        async with self._at_once:
            await self._proofs.learn(peer, position, known)

    @property
    def _gathers(self) -> bool:
        """True until the machine has made its first decision, and while there is no machine."""
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
        """Pass steps from others' records to the machine. Steps of keepers that can be reached count for longer."""
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
            self._driver.wake_waiting()  # the next deadline may now be earlier

    async def _nobody_has(self, machine: Conductor) -> bool:
        """True if no peer that had the states which all members lack can be reached, as far as the directory shows.

        A record outlives its peer by a minute, and a living peer renews its own. So if no record is left, the peers are
        gone, provided that records of other stages could be read. False if such a peer can only dial, because we cannot
        check whether it is about to connect to us.
        """
        missing = machine.search.without_any_state()
        stepped = [entry for entry in self._following.directory.announced.values() if entry.progress.step]
        had = [entry for entry in stepped if entry.progress.stage in missing and entry.peer != self._following.own]
        away = {entry.peer for entry in had} - {PeerId.parse(peer_of(name)) for name in machine.roster.entries}
        if len(had) == len(stepped) or len(away) > LOOKED_AT_PEERS or any(entry.progress.client for entry in had):
            return False
        return not await self._rivals.reachable(away)
