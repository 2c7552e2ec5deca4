"""Every method that a peer serves, whatever its role, is in the table of peerd/SECURITY.md, as it is declared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peerd.access import access_guard
from peerd.rpc.methods.declaration import Declaration, Needs, Shows
from peerd.rpc.served_call import Method
from peerd.rpc.server import Server
from peerd.run.runfile import CheckpointSection, ExpertsSection, LimitsSection, ModelSection, RunFile
from roles.aggregator import AuxAggregatorRole
from roles.backbone import BackboneRole
from roles.expert import ExpertRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from scripts import method_table
from tests.kit.exact import run_file, write_texts
from tests.worlds.roles.training import pinned, swarm

BY_RUN = {"rows": None, "memory_bytes": 0, "device_s": 0.0, "frame_bytes": 0}  # what a run may set


def test_the_table_is_the_one_that_the_declarations_make() -> None:
    text = method_table.PAGE.read_text("utf-8")
    assert text == method_table.page(text), "type python -m scripts.method_table"


def test_a_method_that_is_not_in_the_table_or_another_value_makes_the_page_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = method_table.declared()
    text = method_table.page(method_table.PAGE.read_text("utf-8"))
    assert method_table.page(text) == text
    for other in (
        found | {"new/1/method": found["vault/2/keep"]},
        found | {"vault/2/keep": replace(found["vault/2/keep"], calls=9)},
        found | {"vault/2/keep": replace(found["vault/2/keep"], shows=Shows.NOTHING)},
    ):
        monkeypatch.setattr(method_table, "declared", lambda other=other: other)
        assert method_table.page(text) != text


def expert_run() -> RunFile:
    return RunFile(
        run="experts",
        seed=3,
        model=ModelSection(d_model=8, heads=2, layers=1, context=4),
        experts=msgspec.convert({"grid": [2, 2], "layers": 1, "hidden": 16}, ExpertsSection),
        limits=LimitsSection(experts=4),
    )


def fixed(declared: Declaration) -> Declaration:
    """What no run changes."""
    return replace(declared, **BY_RUN)


@pytest.mark.slow
async def test_peers_of_every_role_serve_what_the_table_has_and_nothing_else(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    seen: dict[str, Declaration] = {}
    add = Server.add

    def noted(server: Server, method: Method) -> None:
        seen[method.name.full] = method.load.declared
        add(server, method)

    run = run_file("sgd", "float32", write_texts(tmp_path))
    run = msgspec.structs.replace(run, checkpoint=CheckpointSection(every_steps=1))
    experts: Any = expert_run()
    with mock.patch.object(Server, "add", noted):
        async with swarm(tmp_path / "peers") as s:
            await s.start("backbone", BackboneRole, run)
            await s.start("holder", BackboneRole, experts)
            for stage in range(2):
                await s.start(f"stage {stage}", StageRole, pinned(run, stage))
            await s.start("helper", AuxAggregatorRole, run)
            await s.start("trainer", TrainerRole, run)
            await s.start("expert", ExpertRole, experts)
            table = method_table.declared()
            with trio.move_on_after(120):
                while seen.keys() | access_guard.DECLARED.keys() != table.keys():  # noqa: ASYNC110 - nobody announces it
                    await trio.sleep(1)
    assert seen.keys() - table.keys() == set(), "these methods have no entry"
    assert table.keys() - seen.keys() == access_guard.DECLARED.keys(), (
        "nobody serves these"
    )  # it is for runs with tokens
    for method, declared in seen.items():
        assert fixed(declared) == fixed(table[method]), method
        for bound, value in ((name, getattr(table[method], name)) for name in ("rows", "memory_bytes", "device_s")):
            assert isinstance(value, Needs) or getattr(declared, bound) == value, (method, bound)
