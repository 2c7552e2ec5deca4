"""Several sources in one stream: each has its share at every moment, begins again when it ends, and can be resumed."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.core.errors import ConfigError
from peerd.data.mixture import Mixture
from peerd.data.stream import SampleStream, samples_of
from peerd.data.tokenizer import load_vocabulary
from peerd.run.runfile import DataSection, ModelSection, RunFile, SourceSection
from tests.kit.amount import examples

CONTEXT = 8
WEIGHTS = st.lists(st.floats(0.001, 1000).map(lambda weight: round(weight, 3)), min_size=1, max_size=8)


def mixed(folders: dict[Path, float], **settings: object) -> DataSection:
    sources = [SourceSection(path=str(folder), weight=weight) for folder, weight in folders.items()]
    return DataSection(sources=sources, **({"holdout": 0.0, "shuffle_buffer": 64} | settings))  # type: ignore[arg-type]


def stream(data: DataSection, peer: str = "me", split: str = "train") -> SampleStream:
    return SampleStream(data, load_vocabulary("bytes"), CONTEXT, 1, peer, split)  # type: ignore[arg-type]


@pytest.fixture
def folders(tmp_path: Path) -> dict[Path, float]:
    """Three sources of the letters a, b and c; that of c is two samples long."""
    sizes, found = {"a": 3000, "b": 5000, "c": 15}, {}
    for letter, weight in (("a", 0.23), ("b", 0.57), ("c", 0.2)):
        found[tmp_path / letter] = weight
        (tmp_path / letter).mkdir()
        for file in range(3):
            (tmp_path / letter / f"{file}.txt").write_text(letter * (sizes[letter] // 3))
    return found


def sources_of_samples(samples: torch.Tensor) -> Counter[str]:
    """Which letter each sample has most of."""
    return Counter(Counter(bytes(row.tolist()).decode()).most_common(1)[0][0] for row in samples)


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(weights=WEIGHTS, seed=st.integers(0, 1 << 20), draws=st.integers(1, 300))
def test_every_source_has_its_share_give_or_take_one_at_every_moment(
    weights: list[float], seed: int, draws: int
) -> None:
    mixture = Mixture(weights, random.Random(seed))
    total = sum(map(Fraction, map(repr, weights)))
    for number in range(1, draws + 1):
        mixture.draw()
        for count, weight in zip(mixture.counts, weights, strict=True):
            assert abs(count - number * Fraction(repr(weight)) / total) <= 1


@settings(max_examples=examples(50))
@given(weights=WEIGHTS, seed=st.integers(0, 1 << 20), taken=st.integers(0, 200))
def test_a_mixture_goes_on_from_its_counts(weights: list[float], seed: int, taken: int) -> None:
    straight, later = (Mixture(weights, random.Random(seed)) for _ in range(2))
    for _ in range(taken):
        straight.draw()
    later.counts = list(straight.counts)
    assert [straight.draw() for _ in range(50)] == [later.draw() for _ in range(50)]


def test_a_stream_has_its_sources_in_proportion_and_a_small_one_again_and_again(folders: dict[Path, float]) -> None:
    source = stream(mixed(folders))
    counts = sources_of_samples(source.take(1000))
    assert source.drawn == [counts["a"], counts["b"], counts["c"]]
    for letter, share in (("a", 230), ("b", 570), ("c", 200)):
        assert abs(counts[letter] - share) <= 1


def test_a_runs_stream_has_the_runs_settings(folders: dict[Path, float]) -> None:
    run = RunFile(run="r", seed=1, data=mixed(folders), model=ModelSection(context=CONTEXT))
    assert torch.equal(samples_of(run, "me").take(30), stream(mixed(folders)).take(30))
    assert not torch.equal(samples_of(run, "you").take(30), stream(mixed(folders)).take(30))


def test_weights_count_by_their_ratio_alone(folders: dict[Path, float]) -> None:
    halved = {folder: weight / 2 for folder, weight in folders.items()}
    assert torch.equal(stream(mixed(folders)).take(200), stream(mixed(halved)).take(200))


def test_peers_see_a_mixture_in_different_orders_and_each_the_same_again(folders: dict[Path, float]) -> None:
    mine, again, other = (stream(mixed(folders), peer).take(300) for peer in ("me", "me", "you"))
    assert torch.equal(mine, again)
    assert not torch.equal(mine, other)


@settings(max_examples=examples(25))
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=2, max_size=4),
    taken=st.integers(0, 150),
    buffer=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_any_mixture_resumes_anywhere(
    tmp_path_factory: pytest.TempPathFactory, weights: list[float], taken: int, buffer: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("mixture")
    chars, sources = random.Random(seed), {}
    for number, weight in enumerate(weights):
        file = folder / f"{number}.txt"
        file.write_bytes(bytes(chars.choices(range(1, 256), k=chars.randrange(20, 400))))
        sources[file] = weight
    data = mixed(sources, shuffle_buffer=buffer)
    source, later = stream(data), stream(data)
    source.take(taken)
    position = json.loads(json.dumps(source.position()))
    later.take(7)
    later.resume(position)
    assert later.position() == position
    assert torch.equal(later.take(60), source.take(60))


def test_the_shuffle_buffer_is_divided_by_the_weights(folders: dict[Path, float]) -> None:
    source = stream(mixed(folders, shuffle_buffer=100))
    source.take(2000)
    assert [place["size"] for place in source.position()["sources"]] == [23, 56, 20]


def test_each_source_holds_out_its_own_part(tmp_path: Path) -> None:
    folders = {}
    for index, letter in enumerate("xy"):
        file = tmp_path / f"{letter}.txt"
        file.write_text(f"{letter}\n" * 400 + f"{letter.upper()}\n" * 400)
        folders[file] = 1.0 + index
    data = mixed(folders, holdout=0.5)
    train, valid = (bytes(stream(data, split=split).take(90).flatten().tolist()) for split in ("train", "valid"))
    assert set(train) - {0} == set(b"xy\n")
    assert set(valid) - {0} == set(b"XY\n")


@pytest.mark.parametrize("change", ["fewer sources", "more counts", "negative", "one source", "text", "elsewhere"])
def test_a_position_of_another_mixture_is_refused_and_changes_nothing(folders: dict[Path, float], change: str) -> None:
    source, other = stream(mixed(folders)), stream(mixed(folders))
    source.take(50)
    position = source.position()
    if change == "fewer sources":
        position["sources"].pop()
    elif change == "more counts":
        position["drawn"].append(0)
    elif change == "negative":
        position["drawn"][0] = -1
    elif change == "one source":
        position = position["sources"][0]
    elif change == "text":
        position["drawn"] = "many"
    else:
        position["sources"][2]["place"][1] = 99
    with pytest.raises(ConfigError, match="position of a sample stream"):
        other.resume(position)
    assert torch.equal(other.take(50), stream(mixed(folders)).take(50))


def test_a_fault_in_one_source_names_its_key(folders: dict[Path, float], tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"body": 1}\n')
    sources = [*mixed(folders).sources, SourceSection(path=str(tmp_path / "nothing"))]
    with pytest.raises(ConfigError, match=r"^data.sources\[3\].path .*nothing: no file matches"):
        stream(DataSection(sources=sources))
    sources[3] = SourceSection(path=str(tmp_path / "d.jsonl"), kind="jsonl")
    with pytest.raises(ConfigError, match=r"d.jsonl, line 1: .* 'text' \(data.sources\[3\].field\)"):
        stream(DataSection(sources=sources, holdout=0.0))
