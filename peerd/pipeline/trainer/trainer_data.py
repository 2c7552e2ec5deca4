"""A trainer's text: the stream of samples, its position across restarts, held-out samples, digests.

All reading runs on a worker. While a server or a user's own dataset function is unavailable, `open` and `take` retry
with pauses that double, and continue with the same samples. `problem` is the reason for a wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
import trio
from torch import Tensor

from peerd.codec.frames import to_frame
from peerd.core.errors import ConfigError
from peerd.core.work import Worker
from peerd.data.corpus_digest import FileDigests, corpus_digests, takes_long
from peerd.data.files.http_fetch import DataUnavailable
from peerd.data.stream import SampleStream, cache_of, samples_of
from peerd.data.tokenizer import load_vocabulary
from peerd.pipeline.microbatch import Microbatch
from peerd.role.role import RoleContext

RETRY_S: Final = 10.0  # pause after the first failure; each further one doubles it
LONGEST_RETRY_S: Final = 300.0
_EVALUATION_BATCH: Final = 16  # samples, or fewer if a microbatch is smaller

T = TypeVar("T")


class TrainerData:
    """Reads the text of one trainer, and stores the position in it."""

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.run is not None
        self._ctx, self._run = ctx, ctx.run
        self._worker = ctx.worker("data")
        self._cache = cache_of(ctx.run, ctx.read_in_turn)
        self._stream: SampleStream | None = None
        self._position: dict[str, Any] = {}
        self._path = ctx.data_dir / f"{ctx.run.run}-position.json"
        self._token_dtype = torch.int64
        self._told = 0  # rows left out when last logged
        self.skipped = 0
        self._problems: dict[str, str] = {}  # job that is retried -> reason
        self.preparing: str | None = None

    @property
    def problem(self) -> str | None:
        """The reason why the text cannot be read now, or None if no job waits for it."""
        return next(iter(self._problems.values()), None)

    async def open(self) -> None:
        """Open the text at the position where this peer last stopped. Raises ConfigError if the text is unusable."""
        self._stream = await self._patiently(self._open, "open the data")

    async def take(self) -> Microbatch:
        """Return the samples of the next microbatch."""
        count = self._run.pipeline.microbatch

        def take() -> tuple[Microbatch, dict[str, Any]]:
            assert self._stream is not None
            samples = self._stream.take(count)
            return self._load(samples, self._stream.origins), self._stream.position()

        load, self._position = await self._patiently(take, "take samples")
        self._tell_skipped()
        return load

    async def held_out(self) -> list[Microbatch]:
        """Return the held-out samples for an evaluation, which are the same each time.

        Runs on a worker of its own, because the samples may be at the end of a file that is still being downloaded, and
        training continues meanwhile.
        """
        return await self._patiently(self._take_held_out, "take held-out samples", self._ctx.worker("held-out"))

    async def prompt_digests(self) -> dict[str, str] | None:
        """Digests of the text, by which trainers compare it, or None if that would take long; then call `digests`."""
        known = FileDigests(self._ctx.data_dir / "digests.json")
        if await self._worker.run(lambda: takes_long(self._run, known), name="look at the data"):
            self._ctx.log.event("data.hashed_later", level="info")
            return None
        self.preparing = "its own text, which is read through once to compare its digest"
        try:
            return await self._digests(self._worker)
        finally:
            self.preparing = None

    async def digests(self) -> dict[str, str]:
        """Digests of the text. The first call on a large text takes a while; samples can be taken meanwhile."""
        return await self._digests(self._ctx.worker("digests"))

    async def _digests(self, worker: Worker) -> dict[str, str]:
        wanted = True
        digests = FileDigests(self._ctx.data_dir / "digests.json", lambda: wanted)
        try:
            found = await self._patiently(
                lambda: corpus_digests(self._run, self._cache, digests), "digest the data", worker
            )
        finally:
            wanted = False  # a cancelled caller leaves the job running; this stops it
        self._ctx.log.event("data.hashed", digests=found)
        return found

    def close(self) -> None:
        """Stop prefetching."""
        self._cache.close()

    async def save_position(self) -> None:
        """Save the position in the data, so that training does not repeat the same text after a restart.

        Runs on another worker than the reads, because a read may be waiting for a server.
        """
        text = json.dumps(self._position)

        def write() -> None:
            spare = self._path.with_suffix(".tmp")
            spare.write_text(text)
            spare.replace(self._path)

        if self._position:
            try:
                await self._ctx.worker("files").run(write, name="save the data position")
            except OSError as error:
                reason = f"{self._path}: {error.strerror}"
                self._ctx.log.event("data.position_not_saved", level="warning", reason=reason)

    async def _patiently(self, job: Callable[[], T], name: str, worker: Worker | None = None) -> T:
        """Run `job` on a worker and return its result; retry while it raises DataUnavailable."""
        pause_s = RETRY_S
        while True:
            try:
                found = await (worker or self._worker).run(job, name=name)
            except DataUnavailable as error:
                self._problems[name] = str(error)
                self._ctx.log.event("data.unavailable", level="warning", reason=str(error), again_in_s=pause_s)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            else:
                self._problems.pop(name, None)
                return found

    def _open(self) -> SampleStream:
        run, name = self._run, self._ctx.host.id.text
        self._token_dtype = _narrowest(load_vocabulary(run.model.vocab).size)
        stream = samples_of(run, name, cache=self._cache)
        if self._path.exists():
            try:
                stream.resume(json.loads(self._path.read_text()))
            except (ValueError, KeyError, TypeError, ConfigError) as error:
                self._ctx.log.event("data.restarted", level="warning", reason=f"{self._path}: {error}")
                stream = samples_of(run, name, cache=self._cache)  # a failed resume may have moved the first stream
        return stream

    def _take_held_out(self) -> list[Microbatch]:
        run = self._run
        samples = samples_of(run, "all", "valid", self._cache).take(run.evaluate.samples)
        count = min(_EVALUATION_BATCH, run.pipeline.microbatch)
        return [self._load(samples[i : i + count]) for i in range(0, len(samples), count)]

    def _load(self, samples: Tensor, origins: Sequence[str] = ()) -> Microbatch:
        """Convert samples [B, L + 1] to a microbatch of inputs [B, L] and targets [B, L], shifted by one token."""
        tokens = samples.to(self._token_dtype)
        return Microbatch(to_frame(tokens[:, :-1].contiguous()), to_frame(tokens[:, 1:].contiguous()), tuple(origins))

    def _tell_skipped(self) -> None:
        """Warn of rows that were left out: at the first one, and each time their number has doubled."""
        assert self._stream is not None
        self.skipped = self._stream.skipped
        if self.skipped > 2 * self._told or (self.skipped and not self._told):
            self._told = self.skipped
            newest = self._stream.newest_faults
            self._ctx.log.event("data.rows_left_out", level="warning", rows=self.skipped, newest=newest)


def _narrowest(vocabulary_size: int) -> torch.dtype:
    """The smallest dtype that can represent every token; it keeps the inputs sent to the stages short."""
    narrow = (torch.uint8, torch.int16, torch.int32)
    return next((dtype for dtype in narrow if vocabulary_size - 1 <= torch.iinfo(dtype).max), torch.int64)
