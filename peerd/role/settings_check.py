"""Comparison of this peer's settings and text with those that the other peers of the run have published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import trio

from peerd.core.errors import ConfigError, RemoteError
from peerd.messages.settings import PublishedSettings, differences
from peerd.rpc.rpc_types import AccessGuard
from peerd.run.contents import named_files
from peerd.run.runfile import RunFile, shared_text, sources_of
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.directory import Directory
from peerd.swarm.run_view import RunView

_COMPARED_AGAIN_S: Final = 5.0  # how often we check whether the conductor refuses our settings


class SettingsCheck:
    """Compares and publishes the settings of one peer. `gate`: the guard of a run with tokens."""

    def __init__(
        self, run: RunFile, directory: Directory, following: ConductorClient, view: RunView, gate: AccessGuard | None
    ) -> None:
        self._run, self._directory, self._following, self._view, self._gate = run, directory, following, view, gate
        self._corpus: dict[str, str] = {}

    async def compare(self, corpus: Mapping[str, str] | None = None) -> None:
        """Compare our settings with the run's published ones and publish ours. Raises ConfigError with all differences.

        Waits first until this peer has a view of the run, because without a view no settings seem to be published.
        `corpus`: for a trainer, the digest of each text that it reads, by the key of its source. A difference from the
        other trainers' texts is an error, too.
        """
        if corpus is not None:
            self._corpus = self._compared(corpus)
        await self._view.settled()
        try:
            await self._compare()
        except RemoteError:
            return  # nobody answers now; peers with other settings are refused later
        await self.publish()

    @property
    def has_tokens(self) -> bool:
        """True if only peers with a token for this run may take part."""
        return self._gate is not None

    async def compare_late(self, corpus: Mapping[str, str]) -> list[str]:
        """Compare the text of a trainer that is already training with the text of the other trainers.

        Returns a sentence for each difference in an open run, where any stranger can publish a digest and must not end
        a trainer at work. In a run with tokens, only members publish digests, and a difference raises ConfigError.
        """
        if self.has_tokens:
            await self.compare(corpus)
            return []
        self._corpus = self._compared(corpus)
        told: list[str] = []
        with suppress(RemoteError):
            told = await self.other_texts() if self._corpus else []
            await self.publish()
        return told

    def _compared(self, corpus: Mapping[str, str]) -> dict[str, str]:
        """The digests to compare with other trainers', without the sources whose digest is in the run file already."""
        named = {key for key, source in sources_of(self._run.data) if source.digest}
        return {key: digest for key, digest in corpus.items() if digest and key not in named}

    async def agrees(self) -> bool:
        """True if the run's published settings equal ours, False if there are none. Raises ConfigError otherwise."""
        published = await self._directory.published_settings()
        found = Counter(settings.shared for settings in published.serving)
        if found and shared_text(self._run) not in found:
            most = max(found, key=lambda shared: (found[shared], shared))
            told = differences(shared_text(self._run), most, named_files(self._run))
            raise ConfigError(f"run {self._run.run!r} is running with other settings:{_listed(told)}")
        return bool(found)

    async def keep_comparing(self) -> None:
        """Compare our settings again until a conductor has answered us. Raises ConfigError with all differences.

        Peers that start together compare before any settings are published. Only a peer whose run file the conductor
        refuses compares again, so that a stranger's settings never end the peer that conducts.
        """
        while not self._following.answered:
            await trio.sleep(_COMPARED_AGAIN_S)
            if self._following.differs:
                with suppress(RemoteError):
                    await self.agrees()

    async def _compare(self) -> None:
        await self.agrees()
        told = await self.other_texts() if self._corpus else []
        if told:
            raise ConfigError(f"run {self._run.run!r} is running with other text:{_listed(told)}")

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
            raise ConfigError(f"trainers of run {self._run.run!r} started together with other text:{_listed(told)}")

    async def _others_read(self) -> dict[str, Counter[str]]:
        """For each source, the digests of the texts that other trainers with our settings read, with their numbers."""
        published = (await self._directory.published_settings()).training
        published = [settings for settings in published if settings.shared == shared_text(self._run)]
        return {key: Counter(s.corpus[key] for s in published if key in s.corpus) for key in self._corpus}

    def _other_text(self, key: str, theirs: str) -> str:
        path = {key: source.path for key, source in sources_of(self._run.data)}[key]
        return (
            f"{key}.path {path[:200]}: the text is not that of the other trainers (sha256 {self._corpus[key][:12]}... "
            f"here, {theirs[:12]}... there); read the same text, or let the organizer set {key}.digest: any, "
            "with which every trainer reads its own"
        )

    async def publish(self) -> None:
        """Publish our settings as a record of the run. Raises RemoteError."""
        token = self._gate.token if self._gate is not None else b""
        await self._directory.publish_settings(PublishedSettings(shared_text(self._run), self._corpus, token))


def _listed(told: Sequence[str]) -> str:
    return f" {told[0]}" if len(told) == 1 else "".join(f"\n  {one}" for one in told)
