"""Links files: what they mean, and each mistake by file, line and what is allowed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.plan.links_file import DEVICES, LoadedLinks, load_links
from peerd.core.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parents[3] / "configs" / "links.yaml"
SOUND = """devices:
  - {name: a, count: 2, place: here}
  - {name: b, place: there}
places:
  - {inside: here, delay_ms: 1, rate_mbit: 800}
  - {between: [here, there], delay_ms: 50, rate_mbit: 80}
"""


def loaded(tmp_path: Path, text: str) -> LoadedLinks:
    file = tmp_path / "links.yaml"
    file.write_text(text)
    return load_links(file)


def said(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    return str(caught.value).replace(str(tmp_path), "")


def test_a_count_makes_devices_and_places_make_their_links(tmp_path: Path) -> None:
    links = loaded(tmp_path, SOUND)
    assert [device.name for device in links.devices] == ["a-1", "a-2", "b"]
    assert [device.place for device in links.devices] == ["here", "here", "there"]
    assert links.network.delay_s.tolist() == [[0, 0.001, 0.05], [0.001, 0, 0.05], [0.05, 0.05, 0]]
    assert links.network.rate[0].tolist() == [np.inf, 1e8, 1e7]
    assert links.stages == ()


def test_a_pair_wins_over_its_places_and_a_direction_of_its_own_over_the_way_back(tmp_path: Path) -> None:
    links = loaded(
        tmp_path,
        SOUND
        + "pairs:\n  - {from: a-1, to: b, delay_ms: 7, rate_mbit: 8}\n  - {between: [a-2, b], unreachable: true}\n"
        + "  - {from: b, to: a-1, delay_ms: 9, rate_mbit: 16}\n",
    )
    assert (links.network.delay_s[0, 2], links.network.delay_s[2, 0]) == (0.007, 0.009)
    assert (links.network.rate[0, 2], links.network.rate[2, 0]) == (1e6, 2e6)
    assert links.network.rate[1, 2] == links.network.rate[2, 1] == 0


def test_an_entry_for_one_direction_stands_for_the_other_without_one(tmp_path: Path) -> None:
    links = loaded(tmp_path, SOUND + "pairs: [{from: a-1, to: b, delay_ms: 7, rate_mbit: 8}]\nsymmetric: true\n")
    assert links.network.delay_s[2, 0] == 0.007


def test_the_example_is_sound_and_is_what_its_comments_say() -> None:
    links = load_links(EXAMPLE)
    assert len(links.devices) == 64
    assert len({device.place for device in links.devices}) == 10
    assert np.array_equal(links.network.delay_s, links.network.delay_s.T)
    assert (links.network.rate > 0).all()
    assert len(links.stages) == 8


WORK = "workload: {stages: 2, gradient_mb: 1, activation_mb: 1}\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("delay_ms: 50", "delay_ms: .nan"), "line 6: places[1].delay_ms is nan; allowed: a finite number"),
        (("delay_ms: 50", "delay_ms: -3"), "line 6: places[1].delay_ms is -3; allowed: 0 to 3,600,000"),
        (("rate_mbit: 80}", "rate_mbit: 0}"), "line 6: places[1].rate_mbit is 0; allowed: above 0 to 1,000,000,000"),
        (("rate_mbit: 80}", "unreachable: true}"), "line 6: places[1] is unreachable, and has a delay or a rate"),
        ((", rate_mbit: 80}", "}"), "line 6: places[1].rate_mbit is missing; allowed: above 0"),
        (
            ("  - {between: [here, there], delay_ms: 50, rate_mbit: 80}\n", ""),
            "line 3: no link between here and there; allowed: an entry `between: [here, there]`",
        ),
        (("  - {inside: here, delay_ms: 1, rate_mbit: 800}\n", ""), "line 2: no link inside here; allowed: an entry"),
        (("name: b", "name: a-2"), "line 3: devices[1].name gives device a-2 a second time, first on line 2"),
        (("[here, there]", "[here, here]"), "line 6: places[1] must name two different places"),
        (("[here, there]", "[here, ther]"), "line 6: places[1] names ther, which no device is in; did you mean there?"),
        (("inside: here", "inside: here, to: there"), "line 5: places[0] must name the ends of its link in one way"),
        (("count: 2", f"count: {DEVICES}"), f"line 3: devices[1].count is 1; allowed: 1 or more, and {DEVICES:,}"),
        (("place: there", "place: there, speed_tflops: -1"), "line 3: devices[1].speed_tflops is -1; allowed:"),
        (("place: there", "place: there, speed_tflops: 1"), "line 2: devices[0].speed_tflops is missing"),
        (("name: b", "nam: b"), "devices[1].nam is not a known key; did you mean name?"),
        (("name: b, ", ""), "line 3: devices[1].name is missing; allowed: text"),
        (("places:", "links:"), "line 4: links is not a known key"),
    ],
)
def test_a_mistake_is_named_by_file_and_line_with_what_is_allowed(
    change: tuple[str, str], told: str, tmp_path: Path
) -> None:
    assert change[0] in SOUND
    message = said(tmp_path, SOUND.replace(*change))
    assert message.startswith("/links.yaml")
    assert told in message


@pytest.mark.parametrize(
    ("added", "told"),
    [
        (
            "  - {between: [there, here], delay_ms: 5, rate_mbit: 8}\n",
            "line 7: places[2] gives the link from there to here again",
        ),
        (
            "pairs: [{between: [a, b], delay_ms: 5, rate_mbit: 8}]\n",
            "line 7: pairs[0] names a, which no device is called; did you mean a-1?",
        ),
        (
            "pairs: [{inside: here, delay_ms: 5, rate_mbit: 8}]\n",
            "line 7: pairs[0] must name the ends of its link in one way",
        ),
        (
            "symmetric: true\npairs:\n  - {from: a-1, to: b, delay_ms: 5, rate_mbit: 8}\n"
            "  - {from: b, to: a-1, delay_ms: 6, rate_mbit: 8}\n",
            "line 10: pairs[1] differs from the other direction on line 9; allowed with",
        ),
        (WORK.replace("gradient_mb: 1", "gradient_mb: -1"), "line 7: workload.gradient_mb has a value below 0"),
        (
            WORK.replace("gradient_mb: 1", "gradient_mb: [1]"),
            "workload.gradient_mb has 1 values; allowed: one, or one for each",
        ),
        (WORK.replace("stages: 2", "stages: 0"), "workload.stages is 0; allowed: 1 to 1,024"),
    ],
)
def test_a_mistake_in_what_is_added_is_named_too(added: str, told: str, tmp_path: Path) -> None:
    assert told in said(tmp_path, SOUND + added)


def test_many_missing_links_are_told_by_their_number(tmp_path: Path) -> None:
    devices = "".join(f"  - {{name: d{n}}}\n" for n in range(8))
    message = said(tmp_path, "devices:\n" + devices)
    assert message.count("no link between d") == 5
    assert "(and 23 more pairs, at least)" in message


@given(st.text(max_size=40), st.integers(0, len(SOUND)))
def test_whatever_is_written_into_a_file_is_read_or_refused_as_a_mistake(
    tmp_path_factory: pytest.TempPathFactory, text: str, at: int
) -> None:
    file = tmp_path_factory.mktemp("links") / "links.yaml"
    file.write_text(SOUND[:at] + text + SOUND[at:], encoding="utf-8")
    with contextlib.suppress(ConfigError):
        links = load_links(file)
        assert len(links.network.delay_s) == len(links.devices)
