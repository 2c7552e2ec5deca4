"""Published settings: every key that differs is told, whatever a stranger publishes."""

from __future__ import annotations

import msgspec

from peerd.messages.settings import DIFFERENCES, PublishedSettings, differences, read_settings
from peerd.run.runfile import DataSection, ModelSection, OptimizerSection, RunFile, SourceSection, shared_text

RUN = RunFile(run="r", model=ModelSection(vocab="tok.json", vocab_digest="1a2b" * 16))


def text(**changes: object) -> bytes:
    return shared_text(msgspec.structs.replace(RUN, **changes))


def test_every_key_that_differs_is_told_with_both_values() -> None:
    other = text(seed=3, optimizer=OptimizerSection(lr=0.5), data=DataSection(kind="jsonl"))
    assert differences(text(), other) == [
        "data.kind is 'text' here and 'jsonl' there",
        "optimizer.lr is 0.001 here and 0.5 there",
        "seed is 0 here and 3 there",
    ]


def test_contents_that_differ_are_told_with_the_file_and_both_digests() -> None:
    other = text(model=ModelSection(vocab="elsewhere.json", vocab_digest="9f8e" * 16))
    assert differences(text(), other, {"model.vocab_digest": "tok.json"}) == [
        "model.vocab: tok.json differs from the run's (sha256 1a2b1a2b1a2b... here, 9f8e9f8e9f8e... there)"
    ]


def test_where_text_and_tokenizer_lie_is_each_peers_own_matter() -> None:
    here = text(data=DataSection(path="/home/a/*.txt"))
    there = text(data=DataSection(path="corpus"), model=ModelSection(vocab="b.json", vocab_digest="1a2b" * 16))
    assert here == there
    mixed = [
        DataSection(sources=[SourceSection(path=one), SourceSection(path="b", field=two)]) for one, two in ("ax", "cy")
    ]
    assert differences(text(data=mixed[0]), text(data=mixed[1])) == ["data.sources[1].field is 'x' here and 'y' there"]


def test_what_a_trainer_reads_travels_beside_the_settings() -> None:
    told = PublishedSettings(text(), {"data": "ab" * 32}, b"token")
    assert read_settings(told.encode()) == told
    assert read_settings(text()) == PublishedSettings(text())


def test_a_strangers_words_are_few_and_short() -> None:
    keys = {f"k{i}\n": "\x1b[31m" * 500 for i in range(50)}
    told = differences(text(), msgspec.json.encode(keys))
    assert len(told) == DIFFERENCES + 1
    assert all(one.isprintable() and len(one) < 600 for one in told)
    assert differences(text(), b"[" * 5000) == ["what is published cannot be read"]
    odd = msgspec.json.encode({"corpus": {"data": "x", "more": "ab" * 32, "data.sources[1]": "cd" * 32}})
    assert read_settings(odd).corpus == {"data.sources[1]": "cd" * 32}
