"""Random histories of deaths, newcomers, keepers and liars: a run goes on from the newest state that is proven.

Members step together, die and come back; then their conductor is lost, or all stop and some return. Up to a third of
the members that return to a stage lie about where they stand and what they saw; any number of strangers, and strangers
that claim to be keepers, agree on positions of their own making. Whoever conducts goes on from no made-up position, and
from nothing older than an honest member or keeper holds and can prove; or it says what it waits for.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.messages.commits import CommitProof, Committed
from peerd.messages.swarm import Position
from peerd.swarm.conductor.commit_proofs import CommitProofs
from peerd.swarm.events import ConductorConfig, MoveEnded, Origin, Output, SendMove
from peerd.swarm.positions.evidence import Evidence
from peerd.swarm.positions.phases import Phase
from peerd.swarm.posts import peer_of, post_name
from peerd.swarm.roster import START
from peerd.swarm.steps.conductor import Conductor
from tests.kit.amount import some
from tests.worlds.machines.conducting import hello

STAGES, SAVE_EVERY, KEEP = 2, 2, 3
CONFIG = ConductorConfig(
    stages=STAGES,
    microbatches=1,
    first_save=SAVE_EVERY,
    gather_s=1.0,
    broken_s=3.0,
    expect_s=2.0,
    forsake_s=3.0,
    forsake_unseen_s=20.0,
    forsake_most_s=600.0,
)
KEYS = [Keypair.from_seed(bytes([n % 256, n // 256]) * 16) for n in range(400)]


@dataclass(eq=False)
class Peer:
    """A member, a liar (`honest` False), a stranger (also not `member`), or a keeper (`stage` below 0)."""

    id: PeerId
    stage: int
    honest: bool = True
    member: bool = True
    position: Position = START
    saved: list[Position] = field(default_factory=list)
    seen: list[Position] = field(default_factory=list)  # of those that lie: what they claim to have seen
    evidence: Evidence = field(default_factory=Evidence)
    helped: bool = False
    network: str = ""

    @property
    def post(self) -> str:
        return post_name(self.id.text, self.stage)

    @property
    def saw(self) -> set[Position]:
        return {self.position, *self.saved, *(self.evidence.seen if self.honest else self.seen)}


class World:
    """One run from its start to the moment at which somebody has to find out where it is."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.keys = iter(KEYS)
        self.history = [START]
        self.live = [self.newcomer(stage) for stage in range(STAGES) for _ in range(self.rng.choice([1, 2, 4]))]
        self.gone: list[Peer] = []
        self.keepers = [self.newcomer(-1 - n) for n in range(self.rng.choice([0, 1, 2]))]

    def newcomer(self, stage: int, **more: Any) -> Peer:
        network = f"network {self.rng.randrange(4)}"
        return Peer(next(self.keys).peer_id, stage, network=network, **more)

    def of_stage(self, stage: int) -> list[Peer]:
        return [peer for peer in self.live if peer.stage == stage]

    # --- a run ------------------------------------------------------------------------------------------------

    def happen(self) -> None:
        choice = self.rng.random()
        if choice < 0.6:
            self.step()
        elif choice < 0.75:
            self.join(self.rng.randrange(STAGES))
        elif choice < 0.9:
            self.kill(self.rng.choice(self.live))
        elif self.gone:
            back = self.gone.pop(self.rng.randrange(len(self.gone)))
            back.position = self.history[-1]  # it catches up
            self.live.append(back)

    def step(self) -> None:
        ready = [peer for peer in self.live if peer.position == self.history[-1]]
        if {peer.stage for peer in ready} != set(range(STAGES)):
            return
        target = Position(self.history[-1].step + 1, self.rng.randbytes(8))
        self.history.append(target)
        signed = [Committed(peer.id.text, peer.stage, b"", b"") for peer in ready]
        for peer in ready:
            peer.position, peer.helped = target, True
        established = {peer.post: peer.stage for peer in self.live if peer.helped}
        for peer in ready:
            peer.evidence.stepped(target, established)
        for peer in [*ready, *self.keepers] if target.step % SAVE_EVERY == 0 else []:
            peer.saved = [*peer.saved[1 - KEEP :], target]
            if self.rng.random() < 0.7:
                peer.evidence.take(CommitProof(target, signed))

    def join(self, stage: int) -> None:
        peer = self.newcomer(stage)
        self.live.append(peer)
        if self.rng.random() < 0.8:
            peer.evidence.told(self.history[-1], {one.post: one.stage for one in self.live if one.helped})
            if self.of_stage(stage) and self.rng.random() < 0.8:
                peer.position = self.history[-1]

    def kill(self, peer: Peer) -> None:
        if len(self.of_stage(peer.stage)) > 1 or self.rng.random() < 0.2:
            self.live.remove(peer)
            self.gone.append(peer)
            if not self.of_stage(peer.stage):
                self.live.append(self.newcomer(peer.stage))

    # --- who is there when it has to be found out --------------------------------------------------------------

    def stop(self, cold: bool) -> None:
        """All stop, and some return from their disks; or some die at once, the conductor among them."""
        if cold:
            everybody, self.live = self.live + self.gone, []
            for peer in everybody:
                if self.rng.random() < 0.5:
                    peer.position = max(peer.saved, default=START)
                    self.live.append(peer)
        else:
            for peer in self.rng.sample(self.live, self.rng.randrange(len(self.live))):
                self.live.remove(peer)
        for stage in range(STAGES):
            if not self.of_stage(stage):
                self.live.append(self.newcomer(stage))
        self.keepers = [peer for peer in self.keepers if self.rng.random() < 0.8]

    def lie(self, cold: bool) -> None:
        made_up = [Position(self.rng.choice([1, 2, 3, 9, 50, 10**9]), self.rng.randbytes(8)) for _ in range(3)]
        for stage in range(STAGES):
            there = [peer for peer in self.of_stage(stage) if peer.helped]
            for liar in self.rng.sample(there, self.rng.randrange(len(there) // 3 + 1)):
                liar.honest = False
                liar.saved, liar.seen = self.rng.sample(made_up, 2), made_up
                liar.position = self.rng.choice([*made_up, liar.position])
            for _ in range(self.rng.choice([0, 0, 1, 5])):
                real = self.rng.sample(self.history, 1) if cold else []
                stranger = self.newcomer(stage, honest=False, member=False, saved=[*made_up, *real], seen=made_up)
                self.live.append(stranger)
        knows = all(peer.evidence.established for peer in self.live if peer.honest)  # else two networks are believed
        for _ in range(self.rng.choice([0, 0, 1, 4 if knows else 1])):
            self.keepers.append(self.newcomer(-9, honest=False, member=False, saved=made_up))


class Finding:
    """A conductor finds out where the run is; honest members do what it says, and fetch what keepers have."""

    def __init__(self, world: World, own: Peer, cold: bool) -> None:
        self.world, self.own, self.now = world, own, 0.0
        self.trusted = {peer.id.text for peer in world.keepers if peer.honest and world.rng.random() < 0.5}
        self.known = dict(own.evidence.established)
        origin = Origin(
            own=own.post,
            established=self.known,
            seen=own.evidence.seen,
            trusted=self.trusted,
            signers=own.evidence.signers,
            cold=cold and bool(self.known),
        )
        self.machine = Conductor(CONFIG, random.Random(world.rng.random()), 0.0, origin)
        self.networks = {peer.id.text: peer.network for peer in world.keepers}

    def run(self) -> None:
        for peer in self.world.live:
            self.tell(peer)
        while self.now < 700.0 and not (self.machine.phase is Phase.OPEN and self.machine.current):
            self.now += 1.0
            self.look()
            self.carry_out(self.machine.wake(self.now))
            if self.machine.lost:
                self.recall()

    def tell(self, peer: Peer) -> None:
        seen = tuple(peer.evidence.seen if peer.honest else peer.seen)
        told = hello(peer.post, peer.position, stage=peer.stage, saved=tuple(peer.saved), seen=seen)
        self.carry_out(self.machine.handle(self.now, told))

    def carry_out(self, outputs: Iterable[Output]) -> None:
        posts = {peer.post: peer for peer in self.world.live}
        for order in outputs:
            if isinstance(order, SendMove):
                peer = posts[order.peer]
                can = order.target in (START, *peer.saved) or not peer.honest
                peer.position = order.target if can else peer.position
                self.carry_out(self.machine.handle(self.now, MoveEnded(peer.post, peer.position)))

    def look(self) -> None:
        """As `Duty`: see which keepers are there, and ask those who claim what nobody bears out for proofs."""
        search, posts = self.machine.search, {peer.post: peer for peer in self.world.live}
        search.keepers({peer.id.text: peer.saved for peer in self.world.keepers}, self.networks.__getitem__)
        known = search.established.peers
        for position, claimed_by in search.unproven().items():
            for post in claimed_by:
                proof = posts[post].evidence.proof(position) if posts[post].honest else None
                if proof is not None and 3 * len({one.peer for one in proof.committed} & known) > len(known):
                    self.own.evidence.take(proof)
                    search.proven.look_again()

    def recall(self) -> None:
        """As `CheckpointRecovery`: each honest member fetches the newest position of keepers that counts for it."""
        for peer in self.world.live:
            kept = sorted({p for keeper in self.world.keepers for p in keeper.saved} - set(peer.saved), reverse=True)
            for position in kept if peer.honest else ():
                if position in self.machine.search.wanted() or self.counts(peer, position):
                    peer.saved.append(position)
                    self.tell(peer)
                    break

    def counts(self, peer: Peer, position: Position) -> bool:
        keepers = [keeper for keeper in self.world.keepers if position in keeper.saved]
        best = lambda other: SimpleNamespace(user=SimpleNamespace(region=self.networks[other.text]))  # noqa: E731
        host = SimpleNamespace(links=SimpleNamespace(best=best))
        directory = SimpleNamespace(kept={keeper.id: keeper.saved for keeper in self.world.keepers})
        following = SimpleNamespace(established={}, directory=directory)
        proofs = CommitProofs(b"", cast(Any, None), cast(Any, host), cast(Any, following), ())
        proofs.evidence = peer.evidence
        proofs.trust(self.trusted)
        known = proofs.established()
        for keeper in keepers:
            proof = keeper.evidence.proof(position) if keeper.honest else None
            if proof is not None and known and 3 * len({one.peer for one in proof.committed} & known) > len(known):
                peer.evidence.take(proof)
        return proofs.counts(position, [keeper.id for keeper in keepers])

    # --- what must be found ---------------------------------------------------------------------------------------

    def is_proven(self, position: Position) -> bool:
        """By what the conductor knew, and honest peers can show."""
        there = [peer for peer in [*self.world.live, *self.world.keepers] if peer.honest]
        if position in self.own.saw or any(position in k.saved for k in there if k.id.text in self.trusted):
            return True
        known = set(map(peer_of, self.known))
        witnesses = {peer.id.text for peer in self.world.live if peer.honest and position in peer.saw} & known
        alone = len(witnesses) == 1 and self.own.id.text in known
        return 3 * len(witnesses) > len(known) and not alone

    def is_held(self, position: Position, stage: int) -> bool:
        """By enough honest members of the stage, of those that were known and are there; or by an honest keeper."""
        there = [peer for peer in self.world.of_stage(stage) if peer.post in self.known]
        holds = [peer for peer in there if peer.honest and position in (peer.position, *peer.saved)]
        own = self.own.stage == stage and position in (self.own.position, *self.own.saved)
        return own or 3 * len(holds) > max(1, len(there)) or any(position in k.saved for k in self.kept_by())

    def is_real(self, position: Position, stage: int) -> bool:
        """True when an honest member of the stage, or an honest keeper, has the state: it is not a liar's alone."""
        there = [peer for peer in self.world.of_stage(stage) if peer.honest] + self.kept_by()
        return any(position in (peer.position, *peer.saved) for peer in there)

    def kept_by(self) -> list[Peer]:
        return [keeper for keeper in self.world.keepers if keeper.honest]

    def must(self) -> Position:
        """The newest position that it has to go on from."""
        stages = range(STAGES)
        found = [p for p in self.world.history if self.is_proven(p) and all(self.is_held(p, s) for s in stages)]
        return max(found, default=START)


@pytest.mark.parametrize("cold", [False, True], ids=["live", "cold"])
@pytest.mark.parametrize("seed", some(range(1000), 60))
def test_a_run_goes_on_from_the_newest_proven_state(seed: int, cold: bool) -> None:
    world = World(seed)
    for _ in range(world.rng.choice([5, 20, 60])):
        world.happen()
    world.stop(cold)
    own = world.rng.choice([peer for peer in world.of_stage(0) if peer.honest])
    world.lie(cold)
    own.honest = True
    own.saved = [position for position in own.saved if position in world.history]
    own.position = own.position if own.position in world.history else START
    finding = Finding(world, own, cold)
    must = finding.must()
    finding.run()
    at = finding.machine.current
    told = f"seed {seed}: at {at}, must be at {must}; {finding.machine.waits_for()!r}"
    assert at is None or at in world.history, told
    assert at is None or at.step >= must.step, told
    assert at in (None, START) or all(finding.is_real(at, stage) for stage in range(STAGES)), told
    assert at is not None or "peer" in finding.machine.waits_for(), told
