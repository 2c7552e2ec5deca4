"""The services of one run on one peer. All roles of a process share them; each is built at its first use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from peerd.contents import named_files
from peerd.core.clock import Clock
from peerd.core.errors import ConfigError, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.core.messages.handover import Way
from peerd.core.messages.settings import PublishedSettings, differences
from peerd.core.messages.swarm import Grant
from peerd.core.run.runfile import BYTES_PER_MBIT, RunFile, fingerprint, shared_text, sources_of
from peerd.core.work import Worker
from peerd.machine.connectivity import path_selection
from peerd.machine.swarm.events import ConductorConfig
from peerd.net.host.host import Host
from peerd.service.averaging.preconnect import Preconnector
from peerd.service.conductor.commit_proofs import CommitProofs, trusted_peers
from peerd.service.conductor.conductor_client import ConductorClient
from peerd.service.conductor.conductor_server import ConductorServer
from peerd.service.conductor.orders import ConductingConfig
from peerd.service.conductor.rivals import Rivals
from peerd.service.conductor.stage_finder import StageFinder
from peerd.service.dht.dht import Dht
from peerd.service.network.link_watch import LinkWatch
from peerd.service.pipeline.direct import DirectPipeline
from peerd.service.pipeline.stage_calls import StageCalls
from peerd.service.pipeline.stage_client import TrainerCredentials
from peerd.service.rpc.rpc import Rpc
from peerd.service.state.snapshot import KEPT, SnapshotFetcher, Snapshots, StateServer
from peerd.service.swarm.contributions import ContributionOf, ContributionTally
from peerd.service.swarm.counted_record import CountedRecord
from peerd.service.swarm.dial_trainers import TrainerDialer
from peerd.service.swarm.directory import Directory
from peerd.service.swarm.run_view import RunView

if TYPE_CHECKING:
    from peerd.service.averaging.allreduce import AllReduceService
    from peerd.service.experts.expert_client import ExpertClient
    from peerd.service.experts.expert_directory import ExpertDirectory


_LEAST_GAIN: Final = 0.01  # least gain of rebalancing moves, as a share of the throughput
_LARGE_GAIN: Final = 0.25  # the same for `placement: network`, which may want unequal stages
_COMPARED_AGAIN_S: Final = 5.0  # how often we check whether the conductor refuses our settings
_PREPARE_S: Final = 60.0  # limit for a round, besides the time for its bytes and for silent members
_SILENCES: Final = 6  # silent members, one after the other, for which a round has time
_PROBE_S: Final = 8.0  # for a dial, maybe over a relay, and a ping that queues behind bulk data


@dataclass(frozen=True, slots=True)
class LineSpeeds:
    """Rates of this peer's line in bytes/s: its limits in the run file, else measured rates; 0 if unknown.

    `takes_inbound`: other peers can connect to this one.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    up_measured: bool
    down_measured: bool
    takes_inbound: bool


def _listed(told: Sequence[str]) -> str:
    return f" {told[0]}" if len(told) == 1 else "".join(f"\n  {one}" for one in told)


class RunServices:
    """Builds the services of one run at their first use. Starts no task."""

    def __init__(self, run: RunFile, host: Host, rpc: Rpc, dht: Dht, clock: Clock) -> None:
        self.run = run
        self.fingerprint = fingerprint(run)
        self.clock = clock
        self._host, self._rpc, self._dht = host, rpc, dht
        self._tallies: dict[str, ContributionTally] = {}
        self._corpus: dict[str, str] = {}
        self.directory = Directory(run.run, run.pipeline.stages, host, dht, rpc.gate)
        self.following = ConductorClient(rpc, host.id, self.directory, ways=self)
        self.proofs = CommitProofs(self.fingerprint, rpc, host, self.following, trusted_peers(run))
        rivals = Rivals(self.fingerprint, rpc, host, self.following)
        self.view = RunView((host, dht), self.directory, rpc.gate, rivals.reachable, clock.rng("run view"))
        self.following.cause = self.view.cause
        host.book.members_by(self.serves)  # in a run with tokens, too: a serving peer has shown its token

    def serves(self, peer: str) -> bool:
        """True if the conductor that we follow lists this peer as serving and as a contributor to an earlier step."""
        return self.following.serves(peer)

    async def compare_settings(self, corpus: Mapping[str, str] | None = None) -> None:
        """Compare our settings with the run's published ones and publish ours. Raises ConfigError with all differences.

        Waits first until this peer has a view of the run, because without a view no settings seem to be published.
        `corpus`: for a trainer, the digest of each text that it reads, by the key of its source. A difference from the
        other trainers' texts is an error, too.
        """
        if corpus is not None:
            self._corpus = self._compared(corpus)
        await self.view.settled()
        try:
            await self._compare()
        except RemoteError:
            return  # nobody answers now; peers with other settings are refused later
        await self.publish_settings()

    @property
    def has_tokens(self) -> bool:
        """True if only peers with a token for this run may take part."""
        return self._rpc.gate is not None

    async def compare_late(self, corpus: Mapping[str, str]) -> list[str]:
        """Compare the text of a trainer that is already training with the text of the other trainers.

        Returns a sentence for each difference in an open run, where any stranger can publish a digest and must not end
        a trainer at work. In a run with tokens, only members publish digests, and a difference raises ConfigError.
        """
        if self.has_tokens:
            await self.compare_settings(corpus)
            return []
        self._corpus = self._compared(corpus)
        told: list[str] = []
        with suppress(RemoteError):
            told = await self.other_texts() if self._corpus else []
            await self.publish_settings()
        return told

    def _compared(self, corpus: Mapping[str, str]) -> dict[str, str]:
        """The digests to compare with other trainers', without the sources whose digest is in the run file already."""
        named = {key for key, source in sources_of(self.run.data) if source.digest}
        return {key: digest for key, digest in corpus.items() if digest and key not in named}

    async def agrees(self) -> bool:
        """True if the run's published settings equal ours, False if there are none. Raises ConfigError otherwise."""
        published = await self.directory.published_settings()
        found = Counter(settings.shared for settings in published.serving)
        if found and shared_text(self.run) not in found:
            most = max(found, key=lambda shared: (found[shared], shared))
            told = differences(shared_text(self.run), most, named_files(self.run))
            raise ConfigError(f"run {self.run.run!r} is running with other settings:{_listed(told)}")
        return bool(found)

    async def keep_comparing(self) -> None:
        """Compare our settings again until a conductor has answered us. Raises ConfigError with all differences.

        Peers that start together compare before any settings are published. Only a peer whose run file the conductor
        refuses compares again, so that a stranger's settings never end the peer that conducts.
        """
        while not self.following.answered:
            await trio.sleep(_COMPARED_AGAIN_S)
            if self.following.differs:
                with suppress(RemoteError):
                    await self.agrees()

    async def _compare(self) -> None:
        await self.agrees()
        told = await self.other_texts() if self._corpus else []
        if told:
            raise ConfigError(f"run {self.run.run!r} is running with other text:{_listed(told)}")

    async def other_texts(self) -> list[str]:
        """A sentence for each source of which all other trainers read another text than we. Raises RemoteError."""
        others = await self._others_read()
        return [
            self._other_text(key, min(others[key]))
            for key, mine in sorted(self._corpus.items())
            if others[key] and mine not in others[key]
        ]

    async def refuse_texts_of_few(self) -> None:
        """Raise ConfigError if more trainers read another text than read ours. In a tie, the larger digest counts.

        For trainers that start together, which compare before any of them has published its digests.
        """
        try:
            others = await self._others_read()
        except RemoteError:
            return
        told = []
        for key, mine in sorted(self._corpus.items()):
            count = others[key] + Counter([mine])
            most = max(count, key=lambda digest: (count[digest], digest))
            told += [self._other_text(key, most)] if most != mine else []
        if told:
            raise ConfigError(f"trainers of run {self.run.run!r} started together with other text:{_listed(told)}")

    async def _others_read(self) -> dict[str, Counter[str]]:
        """For each source, the digests of the texts that other trainers with our settings read, with their numbers."""
        published = (await self.directory.published_settings()).training
        published = [settings for settings in published if settings.shared == shared_text(self.run)]
        return {key: Counter(s.corpus[key] for s in published if key in s.corpus) for key in self._corpus}

    def _other_text(self, key: str, theirs: str) -> str:
        path = {key: source.path for key, source in sources_of(self.run.data)}[key]
        return (
            f"{key}.path {path[:200]}: the text is not that of the other trainers (sha256 {self._corpus[key][:12]}... "
            f"here, {theirs[:12]}... there); read the same text, or let the organizer set {key}.digest: any, "
            "with which every trainer reads its own"
        )

    async def publish_settings(self) -> None:
        """Publish our settings as a record of the run. Raises RemoteError."""
        token = self._rpc.gate.token if self._rpc.gate is not None else b""
        await self.directory.publish_settings(PublishedSettings(shared_text(self.run), self._corpus, token))

    def carries(self) -> LineSpeeds:
        """Rates of this peer's line: limits of the run file, else measured rates."""
        limits, line = self.run.limits, self._host.line
        up, down = limits.upload_mbit * BYTES_PER_MBIT, limits.download_mbit * BYTES_PER_MBIT
        return LineSpeeds(
            up or line.up.told_bytes_per_s(),
            down or line.down.told_bytes_per_s(),
            up_measured=not up,
            down_measured=not down,
            takes_inbound=self._host.takes_inbound,
        )

    @cached_property
    def link_watch(self) -> LinkWatch:
        """Measures this peer's links for the conductor's network map. Run it once in a process."""
        return LinkWatch(self.fingerprint, (self._host, self._rpc), self.clock, self.following, self.carries)

    @cached_property
    def experts(self) -> ExpertDirectory:
        """Directory of the hosts of each expert, in a run with experts. Stays fresh while its task runs."""
        from peerd.service.experts.expert_directory import ExpertDirectory

        return ExpertDirectory(self.run, self._rpc, self._host, self._dht, self.clock)

    def expert_calls(self, worker: Worker) -> ExpertClient:
        """Client for calls to experts, for a trainer or a user's own loop. Chooses and checks on `worker`."""
        from peerd.service.experts.expert_client import ExpertClient  # brings numpy, which a backbone does not need
        from peerd.service.experts.kept_directory import KeptDirectory, ReadingPeer

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
        return DirectPipeline(self.run, self._rpc, self.clock, self, papers)

    def linked(self, peer: PeerId) -> bool:
        """True if calls reach `peer` without a dial: over an existing link, or because it is this peer itself."""
        return peer == self._host.id or self._host.links.best(peer) is not None

    def way(self, peer: PeerId) -> Way:
        """The kind of the best link to `peer`, or "" if there is none."""
        if peer == self._host.id:
            return "direct"
        link = self._host.links.best(peer)
        return "" if link is None else "relay" if link.way == path_selection.PathKind.RELAYED else "direct"

    def doubt(self, peer: PeerId) -> float:
        """Check that `peer` is alive, because an answer is overdue. Returns the seconds since its last byte arrived."""
        link = self._host.links.best(peer)
        return 0.0 if link is None else link.doubt()

    async def probe(self, peer: PeerId) -> None:
        """Ping `peer`, connecting first if needed. Raises RemoteError if it does not answer within 8 s."""
        if peer == self._host.id:
            return
        with trio.move_on_after(_PROBE_S):
            await self._host.ping(peer)
            return
        raise Unreachable("it does not answer", peer)

    @cached_property
    def calls(self) -> StageCalls:
        """Dispatches `stage/6` calls to this peer's posts."""
        return StageCalls(self._rpc, self.run, lambda: self.following.conductor)

    @cached_property
    def averaging(self) -> AllReduceService:
        """All-reduce inside the stages that this peer serves or helps. Serves `average/2` from the first use on."""
        from peerd.service.averaging.allreduce import AllReduceService  # brings numpy, which a backbone does not need

        averaging = AllReduceService(self._rpc, self._host.id, self._host.pace)
        self._host.book.members_by(averaging.takes_part)
        return averaging

    def tally(self, role: str, file: Path, worker: Worker) -> ContributionTally:
        """A role's tally of contributions, for the leader-board. `worker` writes it to `file`, across restarts."""
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
