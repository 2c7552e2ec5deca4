"""The optimizer in a user's own loop: what it refuses, what he hears when something goes wrong, how it ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peerd
from peerd.core.errors import ConfigError, PeerdError, Unreachable
from peerd.daemon.control import leave_deadlines
from peerd.library import background
from peerd.model.checkpoint import Checkpoints
from peerd.run.config import load_run
from peerd.run.runfile import LimitsSection, fingerprint
from tests.kit.amount import thorough

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


def made(model: nn.Module | None = None, **changes: Any) -> peerd.AveragingOptimizer:
    model = model or nn.Linear(3, 2)
    make = changes.pop("make", lambda p: torch.optim.SGD(p, lr=0.1))
    settings: dict[str, Any] = {"run": "test", "target_samples": 8, "samples_per_step": 4, "listen": LOOPBACK}
    named = model.named_parameters()
    return peerd.AveragingOptimizer(make(model.parameters()), named_parameters=named, **settings | changes)


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 3)).square().mean().backward()


# --- what is refused before anything starts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_samples": 9}, "target_samples is 9; allowed: a multiple of samples_per_step"),
        ({"target_samples": 4 * 20_000}, "allowed: a multiple of samples_per_step .4., up to 65536"),
        ({"samples_per_step": 0}, "samples_per_step is 0"),
        ({"samples_per_step": 4.0}, "samples_per_step is 4.0; it must be a whole number"),
        ({"run": ""}, "run has 0 characters; allowed: 1 to 64"),
        ({"min_peers": 0}, "min_peers is 0"),
        ({"scheduler": lambda o: None}, "scheduler must return a torch scheduler of the optimizer"),
        ({"lr": float, "scheduler": lambda o: None}, "scheduler and lr are both given"),
        ({"model": nn.BatchNorm1d(2), "buffers": "mean"}, "buffers is 'mean'; allowed: average, first, local"),
        ({"wait_s": 0}, "wait_s is 0; it must be above 0"),
        ({"save_steps": 0}, "save_steps is 0; it must be a whole number above 0"),
        ({"upload_mbit": -1.0}, "limits.upload_mbit is -1.0; allowed: 0 .no limit. to 1000000"),
        ({"token": "a-file"}, "token is given without organizer"),
        ({"organizer": "12D3KooW"}, "organizer is given without data_dir"),
        ({"organizer": "somebody", "data_dir": "x"}, "access.organizer is somebody; .*must be the organizer's peer id"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0; it must be a number above 0"),
        ({"code": "int9"}, "code is int9 .text.; allowed: one of none, bf16, .*; did you mean int8?"),
        ({"code": "powersgd", "rank": 0}, "averaging.rank is 0; allowed: 1 to 128"),
        ({"code": "int8", "rank": 2}, "averaging.rank is 2, but int8 has no rank"),
        ({"bootstrap": "/ip4/127.0.0.1/tcp/1"}, "give a list of addresses"),
        ({"bootstrap": ["somewhere"]}, "bootstrap: "),
        ({"listen": ["/ip4/nowhere/tcp/1"]}, "listen: "),
    ],
)
def test_senseless_settings_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**changes)


def test_a_run_file_for_others_has_what_all_share_and_nothing_of_this_peer(tmp_path: Path) -> None:
    opt = made(upload_mbit=7.5, download_mbit=20, bootstrap=["/ip4/127.0.0.1/tcp/9"], save_steps=7)
    assert (opt._run.limits.upload_mbit, opt._run.limits.download_mbit) == (7.5, 20)
    assert opt.join_line == ""
    opt.write_run_file(tmp_path / "run.yaml")
    found = load_run(tmp_path / "run.yaml").run
    assert fingerprint(found) == fingerprint(opt._run)
    assert (found.limits, found.bootstrap) == (LimitsSection(), ["/ip4/127.0.0.1/tcp/9"])
    assert found.checkpoint.every_steps == 7


def test_peerd_has_nothing_else_that_comes_late() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AveragingOptimiser'"):
        peerd.AveragingOptimiser  # type: ignore[attr-defined]  # noqa: B018


def test_a_step_before_the_start_or_after_the_end_is_an_error_and_closing_is_not() -> None:
    opt = made()
    for _ in range(2):
        with pytest.raises(PeerdError, match="not running"):
            opt.step()
        opt.close()


# --- a peer of its own --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.socket
def test_one_peer_alone_trains_and_closes_twice(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    addresses: list[str] = []
    with made(model, announce=addresses.append, data_dir=tmp_path / "data", lr=lambda step: 0.1) as opt:
        assert addresses == [opt.address]
        before = opt.digest()
        while opt.global_step < 3:
            backward(model)
            opt.step()
            opt.zero_grad()
        assert opt.digest() != before
        assert opt.status()["peers"] == 1
        with pytest.raises(ConfigError, match="started already"):
            opt.start()
    opt.close()
    assert opt.status()["global_step"] == 3
    backward(model)
    with pytest.raises(PeerdError, match="not running"):
        opt.step()
    again = nn.Linear(3, 2)
    with made(again, data_dir=tmp_path / "data", lr=lambda step: 0.1) as opt:
        assert opt.global_step == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize("fault", ["lr", "nan", "group", "user", "scheduler"])
def test_what_goes_wrong_is_raised_in_the_users_loop(fault: str) -> None:
    def lr(step: int) -> float:
        return 1 / step if fault == "lr" else 0.1

    kinds: dict[str, type[BaseException]] = {"lr": ZeroDivisionError, "nan": FloatingPointError, "group": ConfigError}
    kinds["scheduler"] = ConfigError
    model = nn.Linear(3, 2)
    opt = made(model, lr=lr)

    def loop() -> None:
        while opt.global_step < 3:
            backward(model)
            if fault == "nan":
                model.bias.grad.fill_(float("nan"))  # type: ignore[union-attr]
            elif fault == "group":
                opt.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
            elif fault == "scheduler":
                opt.param_groups[0]["lr"] *= 0.5  # as a scheduler that steps by itself
            elif fault == "user":
                raise KeyError("the user's own")
            opt.step()
            opt.zero_grad()

    with pytest.raises(kinds.get(fault, KeyError)), opt:
        loop()
    assert opt._thread is not None
    assert not opt._thread.is_alive()


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_samples": 16}, "batch.target_samples is 16 here and 8 there"),
        ({"code": "powersgd"}, "averaging.code is 'powersgd' here and 'none' there"),
        ({"make": lambda p: torch.optim.AdamW(p, lr=0.1)}, "loop.optimizer is .*AdamW.* here and .*SGD.* there"),
        ({"model": nn.Linear(3, 3)}, "loop.model is .*weight .3, 3. .* here and .*weight .2, 3. .* there"),
    ],
)
def test_another_run_of_the_same_name_is_refused_with_the_difference(changes: dict[str, Any], words: str) -> None:
    with made() as first, pytest.raises(ConfigError, match=words), made(bootstrap=[first.address], **changes):
        raise AssertionError("it must not begin")


@pytest.mark.slow
@pytest.mark.socket
def test_a_gradient_that_is_not_finite_is_an_error_that_names_it_and_the_loop_may_go_on() -> None:
    model = nn.Linear(3, 2)
    with made(model) as opt:
        backward(model)
        opt.step()
        model.weight.grad[1, 1] = float("nan")  # type: ignore[index]
        with pytest.raises(
            FloatingPointError, match=r"the gradient of weight is not finite \(1 of 6 values\)"
        ) as caught:
            opt.step()
        print(caught.value)
        opt.zero_grad()
        while opt.global_step < 2:
            backward(model)
            opt.step()
            opt.zero_grad()
        assert opt.status()["not_finite"] == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


def scaled(model: nn.Module, opt: peerd.AveragingOptimizer, factors: list[float]) -> list[float]:
    """A loop with torch's scaler, as for half precision: it skips what is not finite by itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for factor in factors:
        scaler.scale(model(torch.ones(4, 3)).square().mean() * factor).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.slow
@pytest.mark.socket
def test_torchs_gradient_scaler_skips_what_is_not_finite_and_hands_in_the_rest() -> None:
    model = nn.Linear(3, 2)
    with made(model) as opt:
        assert scaled(model, opt, [1, float("inf"), 1, 1, 1]) == [4, 2, 2, 2, 2]
        assert opt.global_step == 2
        assert opt.status()["not_finite"] == 0


def test_the_optimizers_state_is_told_and_taken_before_the_start() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    plain = torch.optim.Adam(other.parameters(), lr=0.7)
    backward(other)
    plain.step()
    opt = made(model, make=lambda p: torch.optim.Adam(p, lr=0.1))
    before = opt._run.loop
    with pytest.raises(ConfigError, match=r"this state has no global_step.*0 restarts the schedule"):
        opt.load_state_dict(plain.state_dict())
    with pytest.raises(ConfigError, match="global_step is -1"):
        opt.load_state_dict(plain.state_dict(), global_step=-1)
    opt.load_state_dict(plain.state_dict(), global_step=3)
    assert opt.param_groups is opt.optimizer.param_groups
    assert opt.param_groups[0]["lr"] == 0.7
    assert str(opt.state_dict()) == str({**plain.state_dict(), "global_step": 3})
    assert opt._run.loop != before, "others must agree with what was loaded"
    opt._model.check_unchanged()


def scheduled(model: nn.Module, **more: Any) -> peerd.AveragingOptimizer:
    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, lr=0.1)

    return made(model, make=make, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5), **more)


@pytest.mark.slow
@pytest.mark.socket
def test_step_schedule_and_moments_come_back_together(tmp_path: Path) -> None:
    """A loop that saves as one does with torch, and another process's that goes on: as one that was never ended."""
    file, whole, part = tmp_path / "mine.pt", nn.Linear(3, 2), nn.Linear(3, 2)
    part.load_state_dict(whole.state_dict())
    for model, steps in ((whole, 7), (part, 3)):
        with scheduled(model) as opt:
            while opt.global_step < steps:
                backward(model)
                opt.step()
                opt.zero_grad()
            if steps == 3:
                torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    again, saved = nn.Linear(3, 2), torch.load(file)
    again.load_state_dict(saved["model"])
    opt = scheduled(again)
    opt.load_state_dict(saved["opt"])
    assert (opt.global_step, opt.param_groups[0]["lr"]) == (3, 0.05)
    with opt:
        assert opt.global_step == 3
        while opt.global_step < 7:
            backward(again)
            opt.step()
            opt.zero_grad()
        assert opt.param_groups[0]["lr"] == 0.0125
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.socket
def test_a_step_takes_a_closure_and_fewer_samples() -> None:
    model = nn.Linear(3, 2)
    with made(model) as opt:

        def closure() -> float:
            opt.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            return float(loss.detach())

        with torch.no_grad():
            losses = [opt.step(closure) for _ in range(6)]
        assert all(loss is not None for loss in losses)
        assert opt.global_step == 3
        backward(model)
        for samples in (0, 5, 2.5):
            with pytest.raises(ConfigError, match=r"allowed: 1 to samples_per_step \(4\)"):
                opt.step(samples=samples)  # type: ignore[arg-type]
        opt.step(samples=3)


def dead() -> str:
    """An address where nobody listens: its port is none that a system hands out by itself."""
    for port in random.Random(os.getpid()).sample(range(10_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"/ip4/127.0.0.1/tcp/{port}"
    raise AssertionError("no port is free")


@pytest.mark.slow
@pytest.mark.socket
def test_nobody_trains_alone_unawares(capfd: pytest.CaptureFixture[str]) -> None:
    """A bootstrap that does not answer: one line says so, and the time that the user gives ends in an error."""
    addr = dead()
    tried = f"reached no peer at the bootstrap address {addr}: connection refused"
    with pytest.raises(Unreachable) as caught, made(bootstrap=[addr], wait_s=2):
        raise AssertionError("it must not begin")
    assert str(caught.value) == f"{tried}; waited for 2 s"
    assert capfd.readouterr().err == f"peerd test: {tried}; retrying; alone=True begins without\n"
    with made(bootstrap=[addr], alone=True) as opt:
        assert opt.status()["peers"] == 1
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.socket
def test_a_loop_that_waits_begins_when_its_bootstrap_comes(capfd: pytest.CaptureFixture[str]) -> None:
    addr = dead()
    second = made(bootstrap=[addr])
    thread = threading.Thread(target=second.start)
    thread.start()
    try:
        with made(listen=[addr]):
            assert capfd.readouterr().err.count("peerd test:") <= 1, "who has no bootstrap says nothing"
            thread.join(100)
            assert not thread.is_alive()
    finally:
        second.close()


def test_closing_waits_for_as_long_as_the_peer_saves_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 0.0)
    saved = threading.Event()
    thread = threading.Thread(target=saved.wait, daemon=True)
    thread.start()
    asked = []

    class Saves:
        """A daemon that extends its deadline twice and then has saved its state."""

        def leaves_until(self) -> float:
            asked.append(len(asked))
            if len(asked) == 3:
                saved.set()
            return time.monotonic() + (0.01 if len(asked) < 3 else 60.0)

    background.wait_until_left(thread, Saves())  # type: ignore[arg-type]
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.socket
def test_the_last_loop_saves_its_state_on_a_disk_that_is_slower_than_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 3.0)
    monkeypatch.setattr(leave_deadlines, "LEAVE_S", 0.0)
    model, save, closing_at = nn.Linear(3, 2), Checkpoints.save, []

    def slow(*args: Any, **more: Any) -> Any:
        while not (opt._daemon and opt._daemon.leaves_until() and time.monotonic() > closing_at[0] + 3.5):
            time.sleep(0.01)
        return save(*args, **more)

    monkeypatch.setattr(Checkpoints, "save", slow)
    with made(model, data_dir=tmp_path / "data") as opt:
        while opt.global_step < 2:
            backward(model)
            opt.step()
            opt.zero_grad()
        closing_at.append(time.monotonic())
    assert opt._thread is not None
    assert not opt._thread.is_alive()
    assert [path.name for path in (tmp_path / "data").rglob("step-*.json")] == ["step-00000002.json"]
    out, err = capfd.readouterr()
    said = "peerd test: saving step 2, which no other peer is known to have; Ctrl+C to stop without it"
    assert (out, err.splitlines()[-1]) == ("", said)


STUCK = """
import threading, torch, peerd
from peerd.model.checkpoint import Checkpoints
from peerd.daemon.control import leave_deadlines
leave_deadlines.LEAVE_S = 0.0
Checkpoints.save = lambda *args, **more: threading.Event().wait()
model = torch.nn.Linear(3, 2)
opt = peerd.AveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), run="ctrl-c", target_samples=8,
    samples_per_step=4, listen=["/ip4/127.0.0.1/tcp/0"], data_dir="data")
with opt:
    while True:
        model(torch.ones(4, 3)).sum().backward()
        opt.step()
        if opt.global_step == 1: print("at it")
"""


@pytest.mark.slow
@pytest.mark.socket
def test_a_second_ctrl_c_ends_a_loop_whose_disk_does_not_take_its_state(tmp_path: Path) -> None:
    with loop_process(STUCK, tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "at it\n"
        process.send_signal(signal.SIGINT)
        told = ", which no other peer is known to have; Ctrl+C to stop without it\n"
        assert any(line.endswith(told) for line in process.stderr), "it never reported what it waits for"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=200)
        assert process.returncode == -signal.SIGINT


LOOP = """
import sys, torch, peerd
model = torch.nn.Linear(3, 2)
settings = dict(run="ctrl-c", target_samples=8, samples_per_step=4, listen=["/ip4/127.0.0.1/tcp/0"], %s)
def announce(address):
    if len(settings) > 4: print("at it")
opt = peerd.AveragingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), announce=announce, **settings)
%s
"""
BODIES = {
    "in the loop": (
        "",
        "with opt:\n  while True: model(torch.ones(4, 3)).sum().backward(); opt.step(); print('at it')",
    ),
    "at the start": ("min_peers=2", "with opt: pass"),
    "at a dead bootstrap": ("bootstrap=['/ip4/127.0.0.1/tcp/9']", "with opt: pass"),
    "forgotten": ("", "opt.start(); print('at it')"),
}


@contextlib.contextmanager
def loop_process(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `code` in `folder`; it is killed at the end of the block."""
    # If the tests run in the background of a script, they ignore SIGINT, and their children would inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, cwd=folder, env=env, preexec_fn=heed, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.socket
@pytest.mark.parametrize(
    "where", ["in the loop", "forgotten", thorough("at the start"), thorough("at a dead bootstrap")]
)
def test_a_process_ends_in_time_by_ctrl_c_and_when_closing_is_forgotten(where: str) -> None:
    with loop_process(LOOP % BODIES[where], ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at it\n", process.stderr and process.stderr.read()
        if where != "forgotten":
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=200)
    assert process.returncode == (0 if where == "forgotten" else -signal.SIGINT), said
    assert ("KeyboardInterrupt" in said) == (where != "forgotten"), said
