"""Blocks of experts: shapes, and starting weights as a function of seed and name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peerd.core.errors import ConfigError
from peerd.experts.model.blocks import block_outline, build_block, try_block
from peerd.run.grid import Uid
from tests.kit.expert_runs import WIDTH, expert_run, values

UID = Uid(0, (1, 2))


def state(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in block.named_parameters()}


@pytest.mark.parametrize(
    ("block", "sample"), [("ffn", [WIDTH]), ("ffn", [3, WIDTH]), ("ffn1", [WIDTH]), ("transformer", [4, WIDTH])]
)
def test_a_block_gives_back_the_shape_of_its_samples(block: str, sample: list[int]) -> None:
    run = expert_run(block=block, input=sample, heads=2)
    assert build_block(run, UID)(values(5, *sample)).shape == (5, *sample)
    try_block(run)


def test_an_expert_begins_the_same_wherever_it_is_made() -> None:
    first, again = (state(build_block(expert_run(seed=3), UID)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(("seed", "uid"), [(4, UID), (3, Uid(0, (2, 1)))])
def test_experts_of_another_name_or_seed_begin_elsewhere(seed: int, uid: Uid) -> None:
    first = state(build_block(expert_run(seed=3), UID))
    other = state(build_block(expert_run(seed=seed), uid))
    assert not torch.equal(first["up.weight"], other["up.weight"])
    assert first["up.weight"].std() == pytest.approx(1 / WIDTH**0.5, rel=0.2)


def test_starting_weights_draw_nothing_from_the_common_stream_of_random_numbers() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_block(expert_run(), UID)
    assert torch.equal(torch.rand(3), expected)


def test_a_transformer_block_is_causal() -> None:
    block = build_block(expert_run(block="transformer", input=[4, WIDTH], heads=2), UID)
    x = values(1, 4, WIDTH)
    changed = x.clone()
    changed[:, 2:] += 1
    assert torch.allclose(block(x)[:, :2], block(changed)[:, :2])
    assert not torch.allclose(block(x)[:, 2:], block(changed)[:, 2:])


def test_an_outline_takes_no_memory_and_has_the_same_names() -> None:
    run = expert_run(hidden=1 << 20)
    assert all(p.is_meta for p in block_outline(run).parameters())
    assert list(state(block_outline(expert_run()))) == list(state(build_block(expert_run(), UID)))


def own_block(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    (folder / "mine.py").write_text(f"import torch\n\n\ndef block(run):\n    {body}\n")
    monkeypatch.chdir(folder)
    return "mine.py:block"


def test_a_block_of_ones_own_is_found_and_depends_on_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = expert_run(block=own_block(tmp_path, monkeypatch, "return torch.nn.Linear(8, 3)"), output=[3])
    try_block(run)
    first, again, other = (state(build_block(run, uid)) for uid in (UID, UID, Uid(0, (0, 0))))
    assert torch.equal(first["weight"], again["weight"])
    assert not torch.equal(first["weight"], other["weight"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return torch.nn.Linear(8, 4)", r"returns \[1, 4\] for a batch of 1; expected \[1, 8\]"),
        ("return torch.nn.Linear(7, 8)", "failed on a sample"),
        ("return 5", r"must return a torch\.nn\.Module"),
        ("return torch.nn.ReLU()", "that has parameters"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_block_that_does_not_fit_is_refused_in_words(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = expert_run(block=own_block(tmp_path, monkeypatch, body))
    with pytest.raises(ConfigError, match=message):
        try_block(run)


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"experts\.heads is 3"):
        build_block(expert_run(block="transformer", input=[4, WIDTH], heads=3), UID)
