"""What a trainer does when a stage peer calls its result for a microbatch not finite: ask another, drop it, or not.

The rules are `machine/pipeline/second_opinion`'s; here they meet the peers that can be asked, and the log.
"""

from __future__ import annotations

import logging

from peerd.core.errors import NotFiniteHere
from peerd.core.run.runfile import RunFile
from peerd.machine.pipeline.second_opinion import LoneWords, MicrobatchNotFinite, SecondOpinion
from peerd.service.pipeline.stage_peers import StagePeers

log = logging.getLogger("peerd.service.pipeline.not_finite")


class NotFiniteJudge:
    """Judge of one trainer's microbatches; `peers` are those that it calls."""

    def __init__(self, run: RunFile, peers: StagePeers) -> None:
        self._peers = peers
        self._lone = LoneWords(run.batch.target_samples // run.pipeline.microbatch)

    def hear(
        self,
        opinion: SecondOpinion,
        stage: int,
        avoid: set[str],
        step: int | None,
        error: NotFiniteHere,
        started: float,
    ) -> None:
        """Judge after `opinion` has one more word on `stage`. Returns if another peer, none of `avoid`, is to be asked.

        Raises MicrobatchNotFinite if the microbatch is to be dropped. `step` None: an evaluation, which drops nothing.
        """
        said = opinion.said_by(stage)
        avoid |= said
        if opinion.asks_another(stage, self._peers.others(stage, avoid)):
            log.debug("stage %d: another peer computes a microbatch as well: %s", stage, error)
            return
        if step is None or opinion.is_agreed(stage) or self._lone.take(step):
            raise MicrobatchNotFinite(stage, said, str(error))
        for peer in sorted(said):
            times = self._peers.failed(stage, peer, started, error)
            level = logging.WARNING if times == 1 else logging.DEBUG
            told = "the run has diverged, or the peer is wrong: no more are dropped in this step"
            most = self._lone.most
            log.log(
                level, "…%s of stage %d alone calls over %d microbatches not finite; %s", peer[-8:], stage, most, told
            )

    def computed(self, opinion: SecondOpinion, started: float) -> None:
        """The microbatch was computed: every peer that called it not finite is at fault, and rests."""
        for stage, peer in opinion.accused:
            self._peers.failed(stage, peer, started, NotFiniteHere("it called a microbatch not finite"))
            told = "called a microbatch not finite that another peer computes: it rests"
            log.warning("…%s of stage %d %s", peer[-8:], stage, told)
