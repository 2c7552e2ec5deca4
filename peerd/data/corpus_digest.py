"""Digest of the text that a trainer reads, compared between trainers, wherever each of them keeps its text.

For files it is made of the SHA-256 of each. Names count only with FEW_FILES or more, where whole files are held out;
with fewer, where parts of every file are held out, they do not. An index under an http(s) address contains the SHA-256
of its files, so a local copy has the same digest. A run file's `digest` may also be that of the index. For a `dataset`
it is the digest of the function's source. Digests of files are cached by path, size and modification time, so that a
large corpus is read only once. Python's own sources count as one text, although each version has different ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from peerd.core.errors import ConfigError
from peerd.data.corpus import FEW_FILES, Corpus, find_files
from peerd.data.files.file_index import IndexedFile, encode_index, with_pieces
from peerd.data.files.remote_files import RemoteFileCache, is_remote, remote_files
from peerd.data.text_stream import open_text
from peerd.data.tokenizer import Tokenizer, load_vocabulary
from peerd.run.contents import source_of
from peerd.run.runfile import RunFile, SourceSection, sources_of
from peerd.run.user_code import find_function

_PIECE_BYTES: Final = 8 << 20
_REMEMBERED: Final = 100_000  # files
PROMPT_BYTES: Final = 64 << 20  # of files without a cached digest; takes less than a second
_CHECKED: Final = 10_000  # files that are opened before joining; the others when their turn comes


@dataclass(slots=True)
class FileDigests:
    """SHA-256 of files, cached in the file `memory`. `go_on`: called between pieces; if False, raises Interrupted."""

    memory: Path | None = None
    go_on: Callable[[], bool] = lambda: True
    _known: dict[str, list[Any]] = field(default_factory=dict)
    _learnt: bool = False

    def open(self) -> None:
        """Load the cache. An unreadable or damaged one is ignored."""
        if self.memory is not None:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self.memory.read_text())
                if isinstance(found, dict) and found.get("seal") == _seal(found.get("files")):
                    self._known = found["files"]

    def of(self, file: Path) -> str:
        """The digest of a file's bytes; raises OSError."""
        about = file.stat()
        mark, key = [about.st_size, about.st_mtime_ns], str(file)
        known = self._known.get(key)
        if isinstance(known, list) and known[:2] == mark and isinstance(known[-1], str):
            return known[-1]
        whole = hashlib.sha256()
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                whole.update(piece)
                if not self.go_on():
                    raise Interrupted
        self._known[key] = [*mark, whole.hexdigest()]
        self._learnt = True
        return whole.hexdigest()

    def remembered(self, index: str) -> str | None:
        """Cached digest of an index with pieces. `index`: the digest of the same files' index without pieces."""
        known = self._known.get(f"index {index}")
        return known[-1] if isinstance(known, list) and known and isinstance(known[-1], str) else None

    def remember(self, index: str, with_pieces: str) -> None:
        """Cache the digest of an index with pieces. `index`: the digest of the same files' index without pieces."""
        self._known[f"index {index}"] = [with_pieces]
        self._learnt = True

    def knows(self, file: Path) -> bool:
        """True if the digest of a file is cached; raises OSError."""
        about, known = file.stat(), self._known.get(str(file))
        return isinstance(known, list) and known[:2] == [about.st_size, about.st_mtime_ns]

    def save(self) -> None:
        """Save the cache. Ignores errors such as a full disk."""
        if self.memory is None or not self._learnt:
            return
        newest = dict(list(self._known.items())[-_REMEMBERED:])
        spare = self.memory.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            self.memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            spare.write_text(json.dumps({"seal": _seal(newest), "files": newest}))
            os.replace(spare, self.memory)


def _seal(files: object) -> str:
    """Digest of the cache's content, so that a faulty disk cannot make one text look like another."""
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


class Interrupted(Exception):
    """Raised because the digest is no longer needed."""


def takes_long(run: RunFile, digests: FileDigests) -> bool:
    """True if digests need more than PROMPT_BYTES of text to be read, and the run file contains none of them.

    Text with a digest in the run file is always read first, because nothing may be contributed from another text.
    """
    digests.open()
    unread = 0
    for key, source in sources_of(run.data):
        if (
            source.kind != "dataset"
            and source.digest != "any"
            and source.path != "stdlib"
            and not is_remote(source.path)
        ):
            if source.digest:
                return False
            try:
                files = [file for file in find_files(source.path, key).values() if not digests.knows(file)]
                unread += sum(file.stat().st_size for file in files)
            except OSError as error:
                raise _unreadable(key, error) from error
    return unread > PROMPT_BYTES


def _unreadable(key: str, error: OSError) -> ConfigError:
    return ConfigError(f"{key}.path: {error.filename} cannot be read: {error.strerror}")


def corpus_digests(run: RunFile, cache: RemoteFileCache, digests: FileDigests) -> dict[str, str]:
    """Digests for comparing the run's text, by the key of each source; excludes sources that are not compared.

    Raises ConfigError if a source does not match the run file's `digest`.
    """
    digests.open()
    try:
        found = {key: _digest(key, source, cache, digests) for key, source in sources_of(run.data)}
    finally:
        digests.save()
    return {key: digest for key, digest in found.items() if digest}


def _digest(key: str, source: SourceSection, cache: RemoteFileCache, digests: FileDigests) -> str:
    if source.digest == "any":
        return ""
    if source.path == "stdlib":
        return hashlib.sha256(b"stdlib").hexdigest()
    if source.kind == "dataset":
        found = source_of(source.path)
        return _checked(key, source, found.digest if found is not None else "")
    if is_remote(source.path):
        files = [file.indexed for file in remote_files(source, key, cache).values()]
        return _of_files(files)  # the index has been compared with `digest` already
    try:
        files = [
            IndexedFile(name, file.stat().st_size, digests.of(file))
            for name, file in sorted(find_files(source.path, key).items())
        ]
        indexes = _indexes(source, key, files, digests) if source.digest else []
    except OSError as error:
        raise _unreadable(key, error) from error
    return _checked(key, source, _of_files(files), *indexes)


def _indexes(source: SourceSection, key: str, files: list[IndexedFile], digests: FileDigests) -> list[str]:
    """Digests of the indexes of these files: without pieces and, if that does not match, with pieces.

    The latter reads the files once more, and is cached.
    """
    plain = hashlib.sha256(encode_index(files)).hexdigest()
    if source.digest in (plain, _of_files(files)):
        return [plain]
    found = digests.remembered(plain)
    if found is None:
        entries = with_pieces(dict(sorted(find_files(source.path, key).items())), digests.go_on)
        if not digests.go_on():
            raise Interrupted
        found = hashlib.sha256(encode_index(entries)).hexdigest()
        digests.remember(plain, found)
    return [plain, found]


def _checked(key: str, source: SourceSection, found: str, *indexes: str) -> str:
    if source.digest and source.digest not in (found, *indexes):
        both = f"sha256 {found[:12]}... here, {source.digest[:12]}... in {key}.digest"
        raise ConfigError(f"{key}.path: {source.path} is not the text of the run ({both})")
    return found


def _of_files(files: list[IndexedFile]) -> str:
    """The digest of several files; an empty file counts like any other."""
    named = len(files) >= FEW_FILES
    rows = sorted(f"{file.sha256} {file.name if named else ''}".rstrip() for file in files)
    return hashlib.sha256("\n".join(rows).encode(errors="replace")).hexdigest() if len(rows) > 1 else rows[0][:64]


def check_text(run: RunFile) -> None:
    """Raises ConfigError if a source is missing, has less than one training sample, or no text to evaluate with.

    Checks only what is on this machine, reads no more than one sample of it, and does not call the function of a
    `dataset`.
    """
    vocab, context = load_vocabulary(run.model.vocab), run.model.context
    evaluates = run.evaluate.every_steps > 0
    for key, source in sources_of(run.data):
        if source.kind == "dataset":
            find_function(source.path, f"{key}.path")
        elif not is_remote(source.path):
            _check_files(source, key)
            train = Corpus(source, run.data.holdout, "train", key, strict=run.data.strict)
            found, nbytes = _tokens(train, vocab, context + 1)
            if found <= context:
                unit = "bytes" if run.model.vocab == "bytes" else "tokens"
                has = f"has {nbytes} bytes to train with in {len(train.files)} files"
                takes = f"one sample of model.context ({context}) takes {context + 1} {unit}"
                raise ConfigError(f"{key}.path: {source.path} {has}; {takes}")
            if evaluates and not _tokens(Corpus(source, run.data.holdout, "valid", key), vocab, 1)[1]:
                why = f"data.holdout ({run.data.holdout}) of it is less than a byte"
                remedy = "give more text, a larger data.holdout, or evaluate: {every_steps: 0}"
                raise ConfigError(f"{key}.path: {source.path} leaves nothing to evaluate with: {why}; {remedy}")


def _check_files(source: SourceSection, key: str) -> None:
    """Raises ConfigError if one of the first _CHECKED files is not text."""
    if source.kind in ("text", "jsonl") and source.path != "stdlib":
        for file in itertools.islice(find_files(source.path, key).values(), _CHECKED):
            try:
                with open_text(file):
                    pass
            except OSError as error:
                raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error


def _tokens(corpus: Corpus, vocab: Tokenizer, enough: int) -> tuple[int, int]:
    """Number of tokens of a corpus and of bytes of its text, counted up to `enough` tokens."""
    count = nbytes = 0
    for file in corpus.files:
        for piece in corpus.read(file):
            assert isinstance(piece.text, bytes)
            count += len(vocab.encode(piece.text)) + (piece.ends and vocab.separator is not None)
            nbytes += len(piece.text)
            if count >= enough:
                return count, nbytes
    return count, nbytes
