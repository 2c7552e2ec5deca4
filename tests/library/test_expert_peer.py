"""The peer behind layers of experts in a user's loop: what it refuses, what its callers hear, how it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import peerd
from peerd.core.errors import ConfigError, Unreachable
from peerd.core.run.runfile import ExpertsSection, ModelSection, RunFile
from peerd.library.background import Closed

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
RUN = RunFile(run="test", model=ModelSection(d_model=8), experts=ExpertsSection(grid=[2, 2], timeout_s=1.0))
SCORES = [np.zeros((1, 2), np.float32)] * 2


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": RunFile(run="test")}, "run 'test' has no experts"),
        ({"bootstrap": "/ip4/127.0.0.1/tcp/1"}, "give a list of addresses"),
        ({"listen": ["somewhere"]}, "listen: "),
        ({"wait_s": 0}, "wait_s is 0; it must be above 0"),
        ({"run": "/nowhere/moe.yaml"}, "/nowhere/moe.yaml"),
    ],
)
def test_senseless_settings_are_refused_in_words(changes: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"run": RUN} | changes
    with pytest.raises(ConfigError, match=words):
        peerd.ExpertPeer(settings.pop("run"), **settings)


def test_a_peer_that_does_not_run_says_so_in_each_call() -> None:
    peer = peerd.ExpertPeer(RUN)
    layer = peerd.DMoE(peer.run, 0, peer)
    with pytest.raises(Closed, match="with block"):
        layer(torch.zeros(3, 8))
    assert peer.status() == {}
    peer.close()  # changes nothing


@pytest.mark.slow
@pytest.mark.socket
def test_calls_go_through_it_from_any_thread_until_it_is_closed() -> None:
    with peerd.ExpertPeer(RUN, listen=LOOPBACK) as peer:
        assert peer.address
        found: list[Any] = []
        callers = [threading.Thread(target=lambda: found.append(peer.choose(0, SCORES, 2))) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert found == [[[]]] * 3  # nobody hosts anything
        assert peer.status()["experts"]["forwards"] == 0
        with pytest.raises(ConfigError, match="started already"):
            peer.start()
    with pytest.raises(Closed):
        peer.choose(0, SCORES, 2)
    peer.close()


@pytest.mark.slow
@pytest.mark.socket
def test_an_address_where_nobody_answers_ends_the_start_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    peer = peerd.ExpertPeer(RUN, listen=LOOPBACK, bootstrap=["/ip4/127.0.0.1/tcp/1"], wait_s=1.0)
    with pytest.raises(Unreachable):
        peer.start()
    assert not any(thread.name == "peerd test" and thread.is_alive() for thread in threading.enumerate())
