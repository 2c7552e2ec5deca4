"""The peer behind layers of experts in a user's loop: what it refuses, what its callers hear, how it ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import peerd
from peerd.access.token_files import TOKEN_FILE
from peerd.core.errors import ConfigError, Unreachable
from peerd.library.background import Closed
from peerd.messages.token import Token, to_text
from peerd.run.home import load_identity, make_private_dir
from peerd.run.runfile import AccessSection, ExpertsSection, ModelSection, RunFile
from tests.worlds.network.members import ORGANIZER, token

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


def with_tokens(home: Path, *roles: str) -> RunFile:
    """A run with tokens; in `home` lies one for these roles, none for no role."""
    own, now = load_identity(make_private_dir(home)).peer_id, int(time.time())
    if roles:
        sealed = token(own, *roles, run="test", issued=now, expires=now + 3600)
        (home / TOKEN_FILE).write_text(to_text(Token, sealed) + "\n")
    access = AccessSection(allow="tokens", organizer=ORGANIZER.peer_id.text)
    return msgspec.structs.replace(RUN, access=access)


@pytest.mark.slow
@pytest.mark.socket
def test_with_a_trainers_token_experts_are_called(tmp_path: Path) -> None:
    run = with_tokens(tmp_path / "home", "trainer")
    with peerd.ExpertPeer(run, listen=LOOPBACK, data_dir=tmp_path / "home", alone=True) as peer:
        assert peer.choose(0, SCORES, 2) == [[]]


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (
            (),
            r"run test admits members by token, and there is none in .*access.token; ask .* in the roles trainer, and",
        ),
        (("stage",), r"the token in .*access.token is not for the role trainer; ask the organizer .* for a token"),
    ],
)
def test_without_a_trainers_token_the_start_says_what_to_do(
    roles: tuple[str, ...], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = with_tokens(tmp_path / "home", *roles)
    peer = peerd.ExpertPeer(run, listen=LOOPBACK, data_dir=tmp_path / "home", alone=True)
    with pytest.raises(ConfigError, match=words) as refused:
        peer.start()
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match=words):
        peer.choose(0, SCORES, 2)
