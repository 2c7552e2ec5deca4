"""A run's settings as peers publish them, and the list of keys in which two peers' settings differ, for users.

Each peer publishes the `shared_text` of its run file. Trainers add digests of the training text that they read and, in
a run with tokens, their token. Values may be a stranger's bytes: unreadable ones are reported as such, and text shown
from them is bounded and printable.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from peerd.messages.encoding import BAD_INPUT

DIFFERENCES: Final = 12  # listed at most
_VALUE_CHARS: Final = 160
_CORPUS: Final = "corpus"
_TOKEN: Final = "token"
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_SOURCE: Final = re.compile(r"data(\.sources\[\d{1,3}\])?")


@dataclass(frozen=True, slots=True)
class PublishedSettings:
    """One peer's published settings. `corpus`, of trainers only: source's key -> digest of the text that it reads."""

    shared: bytes
    corpus: Mapping[str, str] = field(default_factory=dict)
    token: bytes = b""

    def encode(self) -> bytes:
        """Encode as a record's value."""
        if not self.corpus:
            return self.shared
        tree = msgspec.json.decode(self.shared)
        tree[_CORPUS] = dict(self.corpus)
        if self.token:
            tree[_TOKEN] = base64.b64encode(self.token).decode()
        return msgspec.json.encode(tree, order="sorted")


def read_settings(value: bytes) -> PublishedSettings:
    """Decode a record's value. An invalid value becomes `shared` unchanged, which differs from all valid settings."""
    try:
        tree = msgspec.json.decode(value)
        if not isinstance(tree, dict) or _CORPUS not in tree:
            return PublishedSettings(value)
        corpus, token = tree.pop(_CORPUS), base64.b64decode(tree.pop(_TOKEN, ""), validate=True)
        shared = msgspec.json.encode(tree, order="sorted")
    except (*BAD_INPUT, TypeError):
        return PublishedSettings(value)
    told = corpus.items() if isinstance(corpus, dict) else ()
    return PublishedSettings(shared, {key: digest for key, digest in told if _is_of_a_source(key, digest)}, token)


def _is_of_a_source(key: object, digest: object) -> bool:
    texts = isinstance(key, str) and isinstance(digest, str)
    return texts and bool(_SOURCE.fullmatch(str(key)) and _DIGEST.fullmatch(str(digest)))


def differences(mine: bytes, theirs: bytes, files: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each key in which two `shared_text`s differ; empty if they agree.

    `theirs` may be a stranger's bytes. `files`: key of a digest -> the local file with this digest.
    """
    try:
        published = msgspec.json.decode(theirs)
    except BAD_INPUT:
        return ["what is published cannot be read"]
    found = list(_differences(msgspec.json.decode(mine), published, "", files or {}))
    more = len(found) - DIFFERENCES
    return [*found[:DIFFERENCES], f"and {more} more"] if more > 1 else found


def _differences(mine: object, theirs: object, path: str, files: Mapping[str, str]) -> Iterator[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted(mine.keys() | theirs.keys()):
            name = key if key.isprintable() else ascii(key)
            yield from _differences(mine.get(key), theirs.get(key), f"{path}.{name}" if path else name, files)
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from _differences(one, other, f"{path}[{index}]", files)
    elif mine != theirs:
        yield _told(path[:200], mine, theirs, files.get(path))


def _told(path: str, mine: object, theirs: object, file: str | None) -> str:
    if file is None:
        return f"{path} is {_shown(mine)} here and {_shown(theirs)} there"
    return other_content(path.removesuffix("_digest"), file, str(mine), str(theirs))


def other_content(key: str, file: str, mine: str, theirs: str) -> str:
    """A sentence on a file whose content differs from the run's. An empty digest means unknown."""
    here = f"{_short(mine)} here" if mine else "no such file here"
    there = f"{_short(theirs)} there" if theirs else "unknown there"
    return f"{key}: {file[:200]} differs from the run's (sha256 {here}, {there})"


def _short(digest: str) -> str:
    text = digest if digest.isprintable() else ascii(digest)
    return f"{text[:12]}..." if len(text) > 12 else text


def _shown(value: object) -> str:
    text = "not given" if value is None else repr(value)
    return text if len(text) <= _VALUE_CHARS else f"{text[:_VALUE_CHARS]}..."
