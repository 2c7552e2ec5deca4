"""Vocabularies: conversion between bytes and token numbers, either one token per byte or by a tokenizers JSON file.

Independent of text files and samples. A vocabulary's separator is the token between two documents.
"""

from __future__ import annotations

import functools
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import outcome

from peerd.core.errors import ConfigError

if TYPE_CHECKING:
    Tokens = npt.NDArray[np.generic]

# Names of the token between documents in common tokenizers, the most common first.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """A vocabulary of `size` tokens, numbered from 0. `separator` is the token between documents, or None."""

    size: int
    separator: int | None
    tokens_per_s: float  # of `encode` on one core, roughly; limits how much is read at once

    def encode(self, text: bytes) -> Tokens:
        """Encode UTF-8 text into a 1-D array of the smallest unsigned dtype that holds `size`."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens into text; invalid UTF-8 becomes the replacement character, separators become line ends."""
        ...


class ByteTokenizer:
    """256 tokens, one per byte. The byte 0, which does not occur in text, separates documents."""

    size = 256
    separator: int | None = 0
    tokens_per_s = 1e7

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).replace(b"\0", b"\n").decode("utf-8", errors="replace")


class FileTokenizer:
    """A vocabulary read from a JSON file by the `tokenizers` package."""

    tokens_per_s = 5e5

    def __init__(self, tokenizer: Any, path: str) -> None:
        """`path`: for messages. Disables truncation and padding set in the file, because all tokens are needed."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._path = tokenizer, path
        self.size = 1 + max(tokenizer.get_vocab().values(), default=0)  # numbers may have gaps
        found = (tokenizer.token_to_id(name) for name in _SEPARATORS)
        self.separator: int | None = next((token for token in found if token is not None), None)
        self._dtype = np.uint16 if self.size <= 1 << 16 else np.uint32

    def encode(self, text: bytes) -> Tokens:
        """Raises ConfigError if the tokenizer has no tokens for a part of the text."""
        plain = text.decode("utf-8", errors="replace")
        # tokenizers raises bare Exception, so the outcome is inspected instead.
        result = outcome.capture(self._tokenizer.encode, plain, add_special_tokens=False)
        if isinstance(result, outcome.Error):
            if not isinstance(result.error, Exception):
                raise result.error
            remedy = "use a tokenizer with an unknown token, or a byte-level one"
            raise ConfigError(
                f"model.vocab: {self._path} cannot encode the text: {result.error} (text: {plain[:80]!r}); {remedy}"
            ) from result.error
        return np.asarray(result.unwrap().ids, dtype=self._dtype)

    def decode(self, tokens: list[int]) -> str:
        parts: list[list[int]] = [[]]
        for token in tokens:
            if token == self.separator:
                parts.append([])
            else:
                parts[-1].append(token)
        return "\n".join(self._tokenizer.decode(part) if part else "" for part in parts)


@functools.lru_cache(maxsize=8)
def load_vocabulary(vocab: str) -> Tokenizer:
    """Load the vocabulary `bytes` or a tokenizers JSON file; ConfigError names the file and the fault."""
    if vocab == "bytes":
        return ByteTokenizer()
    try:
        text = Path(vocab).read_text(encoding="utf-8")
        json.loads(text)
    except OSError as error:
        raise ConfigError(f"model.vocab: cannot read {vocab}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model.vocab: {vocab} is not a JSON file: {error}") from error
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as error:
        message = f"model.vocab: {vocab} needs the tokenizers package: pip install 'peerd[data]', or use vocab: bytes"
        raise ConfigError(message) from error
    # tokenizers raises bare Exception for an invalid file, so the outcome is inspected instead.
    result = outcome.capture(tokenizers.Tokenizer.from_str, text)
    if isinstance(result, outcome.Error):
        if not isinstance(result.error, Exception):
            raise result.error
        raise ConfigError(f"model.vocab: {vocab} is not a tokenizers file: {result.error}") from result.error
    return FileTokenizer(result.unwrap(), vocab)
