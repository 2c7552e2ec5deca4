"""A trainer's reaction when a stage peer reports a microbatch's result as not finite: ask another peer, or drop it.

`pipeline/routes/second_opinion` has the rules; this module applies them to the available peers and logs the outcome.
"""

from __future__ import annotations

import logging

from peerd.core.errors import NotFiniteHere
from peerd.pipeline.routes.second_opinion import LoneReports, MicrobatchNotFinite, SecondOpinion
from peerd.pipeline.stage_peers import StagePeers
from peerd.run.runfile import RunFile

log = logging.getLogger("peerd.pipeline.not_finite")


class NotFiniteJudge:
    """Judges reports about one trainer's microbatches. `peers` are those that the trainer calls."""

    def __init__(self, run: RunFile, peers: StagePeers) -> None:
        self._peers = peers
        self._lone = LoneReports(run.batch.target_samples // run.pipeline.microbatch)

    def hear(
        self,
        opinion: SecondOpinion,
        stage: int,
        avoid: set[str],
        step: int | None,
        error: NotFiniteHere,
        started: float,
    ) -> None:
        """Judge after a report on `stage` was added to `opinion`. Returns if another peer, not in `avoid`, should be
        asked.

        Raises MicrobatchNotFinite if the microbatch should be dropped. `step` is None for an evaluation, which raises
        too.
        """
        said = opinion.said_by(stage)
        avoid |= said
        if opinion.asks_another(stage, self._peers.others(stage, avoid)):
            log.debug("stage %d: another peer computes the microbatch as well: %s", stage, error)
            return
        if step is None or opinion.is_agreed(stage) or self._lone.take(step):
            raise MicrobatchNotFinite(stage, said, str(error))
        for peer in sorted(said):
            times = self._peers.failed(stage, peer, started, error)
            level = logging.WARNING if times == 1 else logging.DEBUG
            told = "the run has diverged, or the peer is wrong: no more are dropped in this step"
            most = self._lone.most
            log.log(
                level,
                "…%s of stage %d alone reports over %d microbatches as not finite; %s",
                peer[-8:],
                stage,
                most,
                told,
            )

    def computed(self, opinion: SecondOpinion, started: float) -> None:
        """Record that the microbatch was computed: every peer that reported it as not finite is at fault, and rests."""
        for stage, peer in opinion.accused:
            self._peers.failed(stage, peer, started, NotFiniteHere("it reported a microbatch as not finite"))
            told = "reported a microbatch as not finite, but another peer computed it; the first one rests"
            log.warning("…%s of stage %d %s", peer[-8:], stage, told)
