"""A peer's endless stream of training samples, from one source or from several mixed by weight.

The source of each sample follows a fixed order, in which every source has its share at any time (mixture.py). Within a
source, samples are shuffled (shuffled_source.py); a source that ends restarts in a new order. Validation data is held
out of each source. The sources share the shuffle buffer by weight.

The samples are a function of (seed, peer, split). A position is a few numbers per source; resuming rereads at most a
shuffle buffer, not the stream from its start (except that a `dataset` iterates again over all earlier documents).
ConfigErrors name key, file and line. DataUnavailable reports that a server did not answer: no sample is lost, since the
next `take` requests the same samples again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from peerd.core.decoders import convert
from peerd.core.errors import ConfigError
from peerd.core.work import RateLimitedRead, read_at_once
from peerd.data.corpus import Split
from peerd.data.files.http_fetch import DataUnavailable, HttpFetcher
from peerd.data.files.remote_files import RemoteFileCache, default_folder, is_remote
from peerd.data.mixture import Mixture
from peerd.data.shuffled_source import SampleCutter, SourceStream, StreamPosition
from peerd.data.tokenizer import Tokenizer, load_vocabulary
from peerd.run.runfile import DataSection, RunFile, sources_of

FIRST_BLOCK_S: Final = 0.25  # for reading the first blocks; a shorter first block covers fewer files
FIRST_BLOCK_SAMPLES: Final = 256  # minimum, over all sources


class _Places(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Position of a mixed stream: the number of samples drawn from each source, and the position of each."""

    drawn: list[int]
    sources: list[StreamPosition]


class SampleStream:
    """Samples of one peer. `take` reads files, so call it on a worker."""

    def __init__(
        self,
        section: DataSection,
        vocab: Tokenizer,
        context: int,
        seed: int,
        peer: str,
        split: Split = "train",
        *,
        cache: RemoteFileCache | None = None,
    ) -> None:
        """`peer`: any name; peers with different names read the files in different orders.

        `cache`: stores files fetched over http(s); by default a folder that all runs of this user share.
        """
        self._context = context
        self.origins: list[str] = []  # where the last taken samples begin, for messages
        self._left_at: dict[str, Any] | None = None  # position to return to after a server did not answer
        name = f"peerd data {seed} {peer} {split}"
        sources = sources_of(section)
        total = sum(source.weight for _, source in sources)
        first = max(FIRST_BLOCK_SAMPLES, int(FIRST_BLOCK_S * vocab.tokens_per_s / context))
        self._mixture = Mixture([source.weight for _, source in sources], _rng(f"{name} mixture"))
        self._streams = [
            SourceStream(
                source,
                SampleCutter(
                    vocab=vocab,
                    context=context,
                    split=split,
                    holdout=section.holdout,
                    first_samples=max(1, int(first * source.weight / total)),
                    block_samples=max(1, int(section.shuffle_buffer * source.weight / total)),
                    name=name if len(sources) == 1 else f"{name} {key}",
                    key=key,
                    cache=cache,
                    strict=section.strict,
                ),
            )
            for key, source in sources
        ]

    @property
    def files(self) -> int:
        """Number of files that the stream reads, over all sources."""
        return sum(stream.files for stream in self._streams)

    @property
    def skipped(self) -> int:
        """Number of rows that were left out because they have no text."""
        return sum(stream.skipped.count for stream in self._streams)

    @property
    def newest_faults(self) -> list[str]:
        """The newest fault of a skipped row, for each source that has one."""
        return [stream.skipped.newest for stream in self._streams if stream.skipped.newest]

    @property
    def drawn(self) -> list[int]:
        """Number of samples taken from each source; with a single source, since it was opened."""
        return list(self._mixture.counts)

    def take(self, count: int) -> Tensor:
        """The next `count` samples, int64 [count, context + 1]."""
        if count == 0:
            return torch.empty(0, self._context + 1, dtype=torch.int64)
        if self._left_at is not None:
            self.resume(self._left_at)
        before = self.position()
        try:
            rows, self.origins = [], []
            for _ in range(count):
                stream = self._streams[self._mixture.draw()]
                rows.append(stream.next())
                self.origins.append(stream.origin)
        except DataUnavailable:
            self._left_at = before
            raise
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def position(self) -> dict[str, Any]:
        """The stream's position as plain values that JSON can represent."""
        places = [stream.position() for stream in self._streams]
        position = places[0] if len(places) == 1 else _Places(self.drawn, places)
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(position))
        return plain

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue from a `position()` of a stream with the same files and settings.

        Raises ConfigError for any other position, before a change. After a ConfigError about the text itself, the
        stream is unusable.
        """
        drawn, places = self._parsed(position)
        if not all(stream.has(place) for stream, place in zip(self._streams, places, strict=True)) or min(drawn) < 0:
            raise ConfigError("this position of a sample stream does not belong to these files and settings")
        self._mixture.counts = list(drawn)
        for stream, place in zip(self._streams, places, strict=True):
            stream.go_to(place)
        self._left_at = None

    def _parsed(self, position: Mapping[str, Any]) -> tuple[list[int], list[StreamPosition]]:
        try:
            if len(self._streams) == 1:
                return [0], [convert(dict(position), StreamPosition)]
            found = convert(dict(position), _Places)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a position of a sample stream: {error}") from error
        if not len(found.drawn) == len(found.sources) == len(self._streams):
            raise ConfigError(f"this position of a sample stream is of {len(found.sources)} sources")
        return found.drawn, found.sources


def samples_of(run: RunFile, peer: str, split: Split = "train", cache: RemoteFileCache | None = None) -> SampleStream:
    """The stream of a peer in a run. `cache`: from `cache_of`, for streams that share one."""
    cache = cache or cache_of(run)
    vocab = load_vocabulary(run.model.vocab)
    return SampleStream(run.data, vocab, run.model.context, run.seed, peer, split, cache=cache)


def cache_of(run: RunFile, in_turn: RateLimitedRead = read_at_once) -> RemoteFileCache:
    """The cache of files that this peer fetches, in a folder shared by all runs of this user."""
    own_address = run.line is None or is_remote(run.line.data)  # only their own address may be private
    downloader = HttpFetcher(in_turn=in_turn, public_only=not own_address)
    return RemoteFileCache(default_folder(), run.limits.data_cache_mb << 20, downloader)


def _rng(name: str) -> random.Random:
    return random.Random(hashlib.sha256(name.encode()).digest())
