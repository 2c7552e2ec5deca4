"""A torch IterableDataset as a source: documents of every allowed kind, epochs, resuming, and what it may get wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peerd.core.errors import ConfigError
from peerd.data.files.http_fetch import DataUnavailable
from peerd.data.stream import SampleStream
from peerd.data.tokenizer import load_vocabulary
from peerd.run.runfile import DataSection

CONTEXT = 4
CODE = """
import builtins
import http.client
import os
import random
import numpy as np
import torch
from torch.utils.data import IterableDataset

class TimeoutException(Exception):
    __module__ = "httpx"

class ReadTimeout(TimeoutException):
    __module__ = "httpx"

IncompleteRead = http.client.IncompleteRead

class Letters(IterableDataset):
    def __init__(self, split, seed):
        self.first = 65 if split == "train" else 97
        self.seed = seed

    def __iter__(self):
        order = list(range(26))
        random.Random(self.seed).shuffle(order)
        for letter in order:
            yield chr(self.first + letter) * 7

def letters(split, seed):
    return Letters(split, seed)

def kinds(split, seed):
    return ["text", b"bytes", torch.tensor([1, 2, 3]), np.array([4, 5], dtype=np.int32)]

def nothing(split, seed):
    return None

def empty(split, seed):
    return []

def shaken(split, seed):
    for number, document in enumerate(Letters(split, seed)):
        if number % 5 == 4 and os.path.exists("fails"):
            with open("fails") as file:
                kind = file.read()
            os.remove("fails")
            raise (globals().get(kind) or getattr(builtins, kind))("of the user's")
        yield document

def endless(split, seed):
    number = 0
    while True:
        yield torch.tensor([number % 256] * CONTEXT)
        number += 1

CONTEXT = 4

def item(value):
    return lambda split, seed: ["fine", value]

fraction = item(torch.tensor([0.5]))
table = item(torch.zeros(2, 2, dtype=torch.int64))
large = item(torch.tensor([3, 256]))
negative = item(np.array([-1]))
number = item(7)
"""


@pytest.fixture(autouse=True)
def _local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return


def stream(function: str, peer: str = "me", split: str = "train", buffer: int = 13) -> SampleStream:
    data = DataSection(kind="dataset", path=f"mine:{function}", shuffle_buffer=buffer, holdout=0.1)
    return SampleStream(data, load_vocabulary("bytes"), CONTEXT, 1, peer, split)  # type: ignore[arg-type]


def test_an_iterable_dataset_serves_epoch_after_epoch_in_new_orders() -> None:
    source = stream("letters", buffer=52)  # 26 documents of 7 letters and a separator are 52 samples
    epochs = [source.take(52)[:, :-1] for _ in range(3)]
    for epoch in epochs:
        assert torch.equal(torch.bincount(epoch.flatten())[65:91], torch.full((26,), 7))
    assert not torch.equal(epochs[0], epochs[1])


def test_peers_and_splits_get_their_own() -> None:
    mine, again, other = (stream("letters", peer).take(40) for peer in ("me", "me", "you"))
    assert torch.equal(mine, again)
    assert not torch.equal(mine, other)
    held_out = stream("letters", split="valid").take(40)
    assert set(held_out.flatten().tolist()) <= {0, *range(97, 123)}


def test_documents_may_be_text_bytes_tensors_or_arrays() -> None:
    source = stream("kinds", buffer=1)
    tokens = source.take(10)[:, :-1].flatten().tolist()
    document = [*b"text\0bytes\0", 1, 2, 3, 0, 4, 5, 0]
    assert tokens == (document * 3)[: len(tokens)]


@pytest.mark.parametrize("function", ["letters", "endless"])
@pytest.mark.parametrize("taken", [0, 5, 13, 100])
def test_a_dataset_resumes_by_running_through_what_came_before(function: str, taken: int) -> None:
    source, later = stream(function), stream(function)
    source.take(taken)
    later.resume(source.position())
    assert torch.equal(later.take(60), source.take(60))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("absent", r"^data.path mine:absent: mine has no function absent"),
        ("nothing", r"^data.path mine:nothing returned NoneType; expected an IterableDataset"),
        ("empty", r"^data.path mine:empty: no train text in the 1 files"),
        ("fraction", r"^data.path mine:fraction, document 1: expected str, bytes or a 1-D tensor of integers"),
        ("table", r"document 1: expected .*, found int64 \[2, 2\]"),
        ("number", r"document 1: expected .*, found 7"),
        ("large", r"document 1: has tokens 3 to 256; the vocabulary has 0 to 255"),
        ("negative", r"document 1: has tokens -1 to -1; the vocabulary has 0 to 255"),
    ],
)
def test_what_a_dataset_gets_wrong_is_named(function: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stream(function).take(20)


@pytest.mark.parametrize("kind", ["ConnectionError", "TimeoutError", "OSError", "IncompleteRead", "ReadTimeout"])
def test_a_function_that_fails_for_a_while_is_asked_again_for_the_same_documents(kind: str) -> None:
    steady, shaken = stream("letters"), stream("shaken")
    failures = []
    for _ in range(40):
        expected = steady.take(7)
        Path("fails").write_text(kind)
        try:
            found = shaken.take(7)
        except DataUnavailable as failure:
            failures.append(str(failure))
            found = shaken.take(7)
        assert torch.equal(found, expected)
    assert len(failures) > 5
    words = rf"^data.path mine:shaken, document \d+: the function raised {kind}: .+ \(.*mine.py, line \d+\)"
    assert all(re.match(words, failure) for failure in failures)


@pytest.mark.parametrize("kind", ["ValueError", "FileNotFoundError", "KeyError"])
def test_a_function_that_fails_for_good_is_named_with_the_document(kind: str) -> None:
    Path("fails").write_text(kind)
    words = (
        rf"^data.path mine:shaken, document 4: the function raised {kind}: .*of the user's.* \(.*mine.py, line \d+\)"
    )
    with pytest.raises(ConfigError, match=words):
        stream("shaken")
