"""The scene of hostile sessions with a run whose position is proven: two steps made, three members, all hosts honest.

One host conducts and serves stage 0; two peers serve stage 1. Strangers claim positions and show proofs. After each
session the run stands where it stood, and its peers remember no position and no signature beyond those of the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import trio

from peerd.core.errors import Refused, RemoteError
from peerd.core.limits import COMMIT_PROOFS, LOOKED_AT_PEERS, MEMBERS, SUSPECTS
from peerd.messages.commits import CommitProof, ProofShown, ShowProof
from peerd.messages.handover import PassAnswer, PassRequest, Ticket
from peerd.messages.proof import has_committed, signed_ticket
from peerd.messages.swarm import Conducts, Done, Position, Seqs, TrainerAnswer, TrainerSync, WhoConducts
from peerd.role.run_services import RunServices
from peerd.run.runfile import CheckpointSection, fingerprint
from peerd.swarm.conductor.commit_proofs import CommitProofs
from peerd.swarm.positions.evidence import Evidence
from peerd.swarm.posts import peer_of
from peerd.swarm.roster import START
from peerd.swarm.steps.conductor import Conductor
from tests.fuzz import handover_goods as handing
from tests.fuzz import service_scene
from tests.fuzz.service_scene import Peer, pinned, start_caller, start_peer
from tests.fuzz.sessions import NETWORK, WITHIN_S, ServiceStage, attacked
from tests.worlds.network.hosts import keypair, running_hosts

RUN = msgspec.structs.replace(service_scene.RUN, run="proven", checkpoint=CheckpointSection(every_steps=1))
MARK = fingerprint(RUN)
STEPS = 2  # that the run has made


@dataclass(kw_only=True)
class ProvenStage(ServiceStage):
    """A run at a proven position."""

    members: Sequence[Peer]  # the conductor first
    places: list[Position]  # the positions of the run, the newest last
    keeper: CommitProofs  # of a keeper at the conductor's host: it knows no members
    rounds: int = 0  # batches that the honest trainer has made
    believed: list[Position] = field(default_factory=list)  # claims of strangers that counted
    fault: str = ""  # that the last session has left behind

    @property
    def services(self) -> RunServices:
        """Those of the conductor."""
        return cast(RunServices, self.members[0].role._services)

    @property
    def friends(self) -> frozenset[str]:
        return frozenset((self.honest.id.text, *self.member_ids))

    @property
    def member_ids(self) -> frozenset[str]:
        return frozenset(peer.host.id.text for peer in self.members)

    @property
    def machine(self) -> Conductor | None:
        return self.services.conducting.machine

    # --- what the honest peer does ----------------------------------------------------------------------------

    async def conducted(self) -> Conducts | None:
        """Returns the conductor's answer to the honest peer, or None if it does not conduct."""
        try:
            return (await self.asks.call(self.host.id, "swarm/6/who", WhoConducts(MARK), Conducts, timeout_s=30)).body
        except Refused:
            return None

    async def make_step(self) -> None:
        """The honest peer trains one batch, in which every member takes part."""
        told = await self.conducted()
        step = told.current.step if told is not None and told.current is not None else 0
        seqs = [self.rounds * 2 + 1, self.rounds * 2 + 2]
        self.rounds += 1
        answer = await self._report(step, seqs, [])
        while answer.grant is None or sorted(answer.admitted.numbers()) != seqs:
            answer = await self._report(step, seqs, [])
        done = [await self._trained(step, seq, last, answer) for seq, last in zip(seqs, self.members[1:], strict=True)]
        while answer.step == step:
            answer = await self._report(step, seqs, done)

    async def _report(self, step: int, seqs: list[int], done: list[Done]) -> TrainerAnswer:
        body = TrainerSync(MARK, 1, step, Seqs.of(seqs), done, 0, 0, 0.5)
        return (await self.asks.call(self.host.id, "swarm/6/trainer", body, TrainerAnswer, timeout_s=30)).body

    async def _trained(self, step: int, seq: int, last: Peer, admitted: TrainerAnswer) -> Done:
        """Hand a microbatch over to the conductor and `last`."""
        own, route = self.honest.id.text, [self.host.id.text, last.host.id.text]
        ticket = signed_ticket(keypair("honest").sign, MARK, own, Ticket(step, seq, 0, 0, 1, 0, route))
        body = PassRequest(MARK, 0, own, ticket, admitted.grant)
        frames = [handing.TOKENS, handing.TARGETS]
        answer = await self.asks.call(self.host.id, "handover/2/pass", body, PassAnswer, frames=frames, timeout_s=30)
        assert answer.body.broken is None, answer.body.broken
        return Done(seq, [hop.peer for hop in answer.body.hops], [hop.receipt for hop in answer.body.hops])

    # --- what has to hold ---------------------------------------------------------------------------------------

    def note_believed(self) -> None:
        """Note which positions that strangers claim at this moment the conductor takes for the run's."""
        if (machine := self.machine) is not None:
            claims = machine.roster.witnessed() - {START, *self.places}
            self.believed += [place for place in claims if machine.search.proves(place)]

    async def check(self) -> str:
        """The fault that a session has left behind; see `is_answered`."""
        self.fault = await super().check()
        return self.fault

    async def is_answered(self) -> str:
        """The run stands where it stood, its peers remember nothing else, and its proofs are shown."""
        since = trio.current_time()
        while fault := await self._moved() or self._strangeness():
            if trio.current_time() - since > WITHIN_S:
                return fault
            await trio.sleep(0.05)
        return await self._not_shown() or self._too_much()

    async def _moved(self) -> str:
        try:
            told = await self.conducted()
        except RemoteError as error:
            return f"an honest call is not answered: {error}"
        if told is None or told.current != self.places[-1]:
            return f"the run was at {self.places[-1]}, and its conductor says {told}"
        for peer in self.members:
            if peer.role.position != self.places[-1]:
                return f"{peer.host.id.short} has moved to {peer.role.position}"
            if peer.host.faults.places:
                return f"faults at {peer.host.id.short}: {peer.host.faults.places}"
        return ""

    def _strangeness(self) -> str:
        """Returns what the run's peers remember of strangers, as text; "" if nothing."""
        machine, own = self.machine, {START, *self.places}
        if machine is None:
            return "nobody conducts"
        machine.roster.check()
        if others := set(map(peer_of, machine.roster.entries)) ^ self.member_ids:
            return f"the roster differs from the run's members by {sorted(others)}"
        if others := machine.search.established.peers - self.member_ids:
            return f"established are {sorted(others)}"
        remembered = {
            "what was believed of strangers": set(self.believed),
            "the members' reach": machine.roster.witnessed(),
            "the conductor's memory": machine.search.proven._seen.keys(),
            "what keepers keep": machine.search.proven._kept.keys(),
            "the members' memory": {place for peer in self.members for place in _evidence(peer).seen},
        }
        return next((f"{where} has {sorted(found - own)}" for where, found in remembered.items() if found - own), "")

    async def _not_shown(self) -> str:
        """The newest position's proof is shown to anybody, with the signatures of all members."""
        place = self.places[-1]
        shown = await self.asks.call(self.host.id, "proofs/1/show", ShowProof(MARK, place), ProofShown, timeout_s=30)
        proof = shown.body.proof
        if proof is None or {one.peer for one in proof.committed} != self.member_ids:
            return f"the proof that is shown of {place} is {proof}"
        return self._no_proof(proof)

    def _too_much(self) -> str:
        """Proofs that prove nothing, and lists that have outgrown their bounds."""
        for evidence in map(_evidence, self.members):
            for proof in (*evidence._proofs.values(), *map(evidence.proof, evidence._collected)):
                assert proof is not None
                if proof.position not in self.places or 3 * len({one.peer for one in proof.committed}) <= 3:
                    return f"a proof of {proof.position} is kept, by {[one.peer[-8:] for one in proof.committed]}"
                if fault := self._no_proof(proof):
                    return fault
            if others := set(map(peer_of, evidence.established)) - self.member_ids:
                return f"established are {sorted(others)}"
        kept = self.keeper.evidence._proofs
        duty, rivals = self.services.conducting._duty, self.services.conducting._duty._rivals
        sizes = {
            "a keeper's proofs": (len(kept), COMMIT_PROOFS),
            "members that were asked for proofs": (max(len(duty._asked), len(duty._asked_last)), SUSPECTS),
            "peers that were sent elsewhere": (len(duty._asking), SUSPECTS),
            "rivals that were named": (max(len(rivals._doubted), len(rivals._named)), LOOKED_AT_PEERS + 1),
        }
        if grown := [f"{size} {what}" for what, (size, most) in sizes.items() if size > most]:
            return f"there are {', '.join(grown)}"
        return next((fault for proof in kept.values() if (fault := self._no_proof(proof))), "")

    def _no_proof(self, proof: CommitProof) -> str:
        """Returns why a proof is not valid: false signatures, or a signer that occurs twice; "" if it is valid."""
        signers = [one.peer for one in proof.committed]
        if len(signers) > MEMBERS or len(set(signers)) != len(signers):
            return f"a proof of {proof.position} has {len(signers)} signatures of {len(set(signers))} peers"
        wrong = [one.peer[-8:] for one in proof.committed if not has_committed(MARK, proof.position, one)]
        return f"a proof of {proof.position} has wrong signatures of {wrong}" if wrong else ""


def _evidence(peer: Peer) -> Evidence:
    return cast(Evidence, peer.role._services.proofs.evidence)


@asynccontextmanager
async def proven_run() -> AsyncIterator[ProvenStage]:
    """A run that has made its steps; at the end of the block, it makes one more."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_hosts(NETWORK) as hosts:
            first = await start_peer(hosts, "host", pinned(0, RUN), Path(folder))
            members = [first, *[await start_peer(hosts, n, pinned(1, RUN), Path(folder)) for n in ("mate", "third")]]
            honest, asks = await start_caller(hosts)
            for peer in members[1:]:
                honest.learn(peer.host.id, peer.host.addrs())
            nobody = cast(Any, SimpleNamespace(established={}))
            parts = {
                "members": members,
                "places": [],
                "asks": asks,
                "keeper": CommitProofs(MARK, first.rpc, first.host, nobody, ()),
            }
            async with attacked(hosts, first.host, honest, ProvenStage, 5.0, **parts) as made:
                for _ in range(STEPS):
                    await _step(made)
                made.links = set(made.host.links)
                assert await made.is_answered() == ""
                yield made
                if not made.fault:
                    await _step(made)


async def _step(made: ProvenStage) -> None:
    with trio.fail_after(WITHIN_S):
        await made.make_step()
    made.places.append(made.members[0].role.position)
    assert await made.is_answered() == ""
