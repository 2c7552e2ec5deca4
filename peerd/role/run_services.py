"""The services of one run on one peer. All roles of a process share them; most are built at their first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from peerd.averaging.line_speeds import LineSpeeds, line_speeds
from peerd.core.clock import Clock
from peerd.core.ids import PeerId
from peerd.core.work import Worker
from peerd.dht.dht import Dht
from peerd.messages.swarm import Grant
from peerd.pipeline.direct import DirectPipeline
from peerd.pipeline.preconnect import Preconnector
from peerd.pipeline.stage_calls import StageCalls
from peerd.pipeline.stage_client import TrainerCredentials
from peerd.role.settings_check import SettingsCheck
from peerd.rpc.rpc import Rpc
from peerd.run.runfile import RunFile, fingerprint
from peerd.state.snapshot import KEPT, SnapshotFetcher, Snapshots, StateServer
from peerd.swarm.batch.counted_record import CountedRecord
from peerd.swarm.conductor.commit_proofs import CommitProofs, trusted_peers
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.conductor.conductor_server import ConductorServer
from peerd.swarm.conductor.link_watch import LinkWatch
from peerd.swarm.conductor.orders import ConductingConfig
from peerd.swarm.conductor.rivals import Rivals
from peerd.swarm.conductor.stage_finder import StageFinder
from peerd.swarm.contributions import ContributionOf, ContributionTally
from peerd.swarm.dial_trainers import TrainerDialer
from peerd.swarm.directory import Directory
from peerd.swarm.events import ConductorConfig
from peerd.swarm.peer_links import PeerLinks
from peerd.swarm.run_view import RunView
from peerd.wire.host.host import Host

if TYPE_CHECKING:
    from peerd.averaging.allreduce import AllReduceService
    from peerd.experts.calls.expert_client import ExpertClient
    from peerd.experts.calls.expert_directory import ExpertDirectory


_LEAST_GAIN: Final = 0.01  # least gain of rebalancing moves, as a share of the throughput
_LARGE_GAIN: Final = 0.25  # the same for `placement: network`, which may want unequal stages
_PREPARE_S: Final = 60.0  # limit for a round, besides the time for its bytes and for silent members
_SILENCES: Final = 6  # silent members, one after the other, for which a round has time


class RunServices:
    """Builds the services of one run, most at their first use. Starts no task."""

    def __init__(self, run: RunFile, host: Host, rpc: Rpc, dht: Dht, clock: Clock) -> None:
        self.run = run
        self.fingerprint = fingerprint(run)
        self.clock = clock
        self._host, self._rpc, self._dht = host, rpc, dht
        self._tallies: dict[str, ContributionTally] = {}
        self.links = PeerLinks(host)
        self.directory = Directory(run.run, run.pipeline.stages, host, dht, rpc.gate)
        self.following = ConductorClient(rpc, host.id, self.directory, ways=self.links)
        self.proofs = CommitProofs(self.fingerprint, rpc, host, self.following, trusted_peers(run))
        rivals = Rivals(self.fingerprint, rpc, host, self.following)
        self.view = RunView((host, dht), self.directory, rpc.gate, rivals.reachable, clock.rng("run view"))
        self.following.cause = self.view.cause
        self.settings = SettingsCheck(run, self.directory, self.following, self.view, rpc.gate)
        host.book.members_by(self.serves)  # in a run with tokens, too: a serving peer has shown its token

    def serves(self, peer: str) -> bool:
        """True if the conductor that we follow lists this peer as serving and as a contributor to an earlier step."""
        return self.following.serves(peer)

    def line_speeds(self) -> LineSpeeds:
        """Rates of this peer's internet connection."""
        return line_speeds(self.run, self._host)

    @cached_property
    def link_watch(self) -> LinkWatch:
        """Measures this peer's links for the conductor's network map. Run it once in a process."""
        return LinkWatch(self.fingerprint, (self._host, self._rpc), self.clock, self.following, self.line_speeds)

    @cached_property
    def experts(self) -> ExpertDirectory:
        """Directory of the hosts of each expert, in a run with experts. Stays fresh while its task runs."""
        from peerd.experts.calls.expert_directory import ExpertDirectory

        return ExpertDirectory(self.run, self._rpc, self._host, self._dht, self.clock)

    def expert_calls(self, worker: Worker) -> ExpertClient:
        """Client for calls to experts, for a trainer or a user's own loop. Chooses and checks on `worker`."""
        from peerd.experts.calls.expert_client import ExpertClient  # brings numpy, which a backbone does not need
        from peerd.experts.calls.kept_directory import KeptDirectory, ReadingPeer

        if self.experts.contested.source is None:
            peer = ReadingPeer(self._host, self._rpc, self._dht, self.clock)
            self.experts.contested.source = KeptDirectory(self.run, peer, worker)
        return ExpertClient(self.run, self._rpc, self.experts, self.clock, worker)

    def pipeline(
        self, grant_of: Callable[[int], Grant | None], evaluation_grant: Callable[[], Grant | None]
    ) -> DirectPipeline:
        """A trainer's calls to the stages. `grant_of`: the conductor's grant for a microbatch of ours, by its number.

        `evaluation_grant`: returns the newest grant to evaluate.
        """
        papers = TrainerCredentials(self._host.id.text, grant_of, self._host.sign, evaluation_grant)
        return DirectPipeline(self.run, self._rpc, self.clock, self.links, papers)

    @cached_property
    def calls(self) -> StageCalls:
        """Dispatches `stage/6` calls to this peer's posts."""
        return StageCalls(self._rpc, self.run, lambda: self.following.conductor)

    @cached_property
    def averaging(self) -> AllReduceService:
        """All-reduce inside the stages that this peer serves or helps. Serves `average/2` from the first use on."""
        from peerd.averaging.allreduce import AllReduceService  # brings numpy, which a backbone does not need

        averaging = AllReduceService(self._rpc, self._host.id, self._host.pace)
        self._host.book.members_by(averaging.takes_part)
        return averaging

    def tally(self, role: str, file: Path, worker: Worker) -> ContributionTally:
        """A role's tally of contributions, for the leaderboard. `worker` writes it to `file`, across restarts."""
        if role not in self._tallies:
            of = ContributionOf(self.run.run, role, file, worker)
            self._tallies[role] = ContributionTally(of, self._dht, self.clock, self._rpc.gate)
        return self._tallies[role]

    def snapshots(self) -> Snapshots:
        """State transfer of one post: fetches its state, and serves it together with this peer's other posts."""
        return Snapshots(self._rpc, self.clock.rng("state"), self._giving)

    @cached_property
    def _giving(self) -> StateServer:
        giving = StateServer(self._rpc)
        giving.is_member = self._is_member
        return giving

    def _is_member(self, peer: PeerId) -> bool:
        return peer in self.following.known()

    def assembling(self) -> Preconnector:
        """For a member or a helper: connects to all other peers of its rounds before the rounds begin."""
        return Preconnector(self._host, self.following, self.run.averaging.group_size)

    def placing(self) -> StageFinder:
        """For a stage peer: finds the stage to serve when it joins, and when another stage becomes empty."""
        rivals = Rivals(self.fingerprint, self._rpc, self._host, self.following)
        return StageFinder(self.fingerprint, self.following, rivals, self.clock)

    def calling_in(self) -> TrainerDialer:
        """For a stage peer: dials trainers, which cannot dial this peer if it accepts no inbound connections."""
        return TrainerDialer(self._host, self._dht, self.directory)

    def fetcher(self) -> SnapshotFetcher:
        """For an observer: fetches states from stage peers."""
        return SnapshotFetcher(self._rpc, self.clock.rng("state"))

    def kept_fetcher(self) -> SnapshotFetcher:
        """For a stage peer: fetches checkpoints that backbones keep."""
        return SnapshotFetcher(self._rpc, self.clock.rng("kept"), KEPT)

    def kept_giving(self) -> StateServer:
        """For a backbone: serves the checkpoints that it keeps, by `kept/1`, from now on."""
        giving = StateServer(self._rpc, KEPT)
        giving.is_member = self._is_member
        return giving

    @cached_property
    def conducting(self) -> ConductorServer:
        """This peer's conductor service, idle until the peer becomes the conductor. Its post of stage 0 runs it."""
        run = self.run
        sizes = ConductorConfig(
            stages=run.pipeline.stages,
            microbatches=run.batch.target_samples // run.pipeline.microbatch,
            microbatch_samples=run.pipeline.microbatch,
            delayed=run.optimizer.delayed,
            filled_at_once=run.optimizer.asynchronous,
            total_steps=run.optimizer.total_steps,
            own_pace=False if run.experts is not None else None,  # trainers wait for experts, not for their machines
            group_size=run.averaging.group_size,
            weighs=run.averaging.contributors == "chosen" and run.experts is None,  # experts set their trainers' pace
            factors=run.averaging.code == "powersgd",
            moves=run.pipeline.placement != "fixed" and run.pipeline.stages > 1,
            least_gain=_LARGE_GAIN if run.pipeline.placement == "network" else _LEAST_GAIN,
            forsake_s=3.0,
            forsake_unseen_s=20.0,
            forsake_most_s=600.0,
            first_save=run.checkpoint.every_steps or run.optimizer.total_steps or 1 << 53,
        )
        config = ConductingConfig(
            fingerprint=self.fingerprint,
            conductor=sizes,
            samples=run.batch.target_samples,
            prepare_timeout_s=_PREPARE_S + _SILENCES * run.averaging.sender_timeout_s,
        )
        conducting = ConductorServer(config, self._rpc, self._host, self.clock, self.following, self.proofs)
        conducting.publish_counts(CountedRecord(run.run, self._dht, self._rpc.gate))
        return conducting
