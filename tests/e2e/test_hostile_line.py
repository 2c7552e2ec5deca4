"""A line from a stranger: a backbone that gives a hostile run file over real TCP, and a real `peerd join` process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from peerd.core.addr import parse_addr, tcp_place
from peerd.core.keys import Keypair
from peerd.messages.run_link import JoinLink, RunFileAnswer
from peerd.messages.token import Token, seal, to_text
from peerd.role.peer_stack import peer_stack
from peerd.role.run_offer import RunOffer
from peerd.wire.clock import RealClock
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.worlds.processes.processes import LISTEN, Process, processes

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(300)]
STRANGER = Keypair.from_seed(b"s" * 32)
MODULE = "open('{place}/ran', 'w').write(__name__)\ndef docs(split, seed):\n    return [b'text ' * 100]\n"


@contextlib.contextmanager
def backbone(text: bytes) -> Iterator[str]:
    """The line of a backbone that gives this run file, unsigned."""
    lines, ready, stop = list[str](), threading.Event(), trio.Event()
    token: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        stack = peer_stack(STRANGER, RealClock(), [TcpTransport()])
        async with trio.open_nursery() as nursery:
            await nursery.start(functools.partial(stack.run, [parse_addr(LISTEN)]))
            RunOffer(stack.rpc, "r", lambda: RunFileAnswer(text, b"")).open()
            place = next(place for addr in stack.host.addrs() if (place := tcp_place(addr)) is not None)
            lines.append(JoinLink(place.host, place.port, STRANGER.peer_id, "r").text)
            token.append(trio.lowlevel.current_trio_token())
            ready.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(30)
    try:
        yield lines[0]
    finally:
        token[0].run_sync_soon(stop.set)
        thread.join()


HOSTILE = {
    "code": (
        b'{"run":"r","data":{"sources":[],"kind":"dataset","path":"decoy_installed:docs"}}',
        "data.path is 'decoy_installed:docs': code of the run, which is never sent over the network; allowed: a",
    ),
    "hidden file": (
        b'{"run":"r","data":{"sources":[],"path":".e*","holdout":0},"evaluate":{"every_steps":0}}',
        "data.path is '.e*': the run trains on files; add --data PATH",
    ),
    "disk": (b'{"run":"r","checkpoint":{"keep":1000000000}}', "checkpoint.keep is 1000000000; allowed by a join"),
    "cloud": (
        b'{"run":"r","data":{"path":"http://169.254.169.254/latest","digest":"' + b"0" * 64 + b'"}}',
        "data.path is 'http://169.254.169.254/latest': an address without https; allowed: stdlib, https://, or your",
    ),
    "type": (b'{"run":"r","model":{"layers":"2"}}', "Expected `int`, got `str` - at `$.model.layers`"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_run_file_is_one_message_and_nothing_of_it_is_used(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, says = HOSTILE[case]
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "decoy_installed.py").write_text(MODULE.format(place=modules))
    (tmp_path / ".env").write_text("secret " * 400)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=":")
    monkeypatch.chdir(tmp_path)
    with backbone(text) as line, processes(tmp_path) as started:
        guest = Process("guest", tmp_path, ["join", line, "--yes", "--role", "trainer", "--listen", LISTEN])
        started.all.append(guest)  # not forked: it looks for modules by this environment
        guest.wait_until(lambda: (modules / "ran").exists() or guest.popen.poll() is not None, "it joined", 60)
        assert (guest.popen.poll(), guest.said.count("peerd: ")) == (2, 1), guest.said
    assert says in guest.said
    assert not (modules / "ran").exists()
    assert not list(tmp_path.rglob("run.yaml"))


def test_a_stripped_signature_is_refused_with_a_token(tmp_path: Path) -> None:
    organizer, holder = Keypair.from_seed(b"o" * 32), Keypair.from_seed(b"h" * 32)
    token = Token(bytes(8), holder.peer_id.public_key, "r", "Ann", ["trainer"], 1_700_000_000, 9_900_000_000)
    shown = to_text(Token, seal(token, organizer))
    with backbone(b'{"run":"r"}') as line, processes(tmp_path) as started:
        guest = started.start("guest", "join", line, "--yes", "--token", shown, "--listen", LISTEN)
        guest.wait_until(lambda: guest.popen.poll() is not None, "it joined", 60)
        assert guest.popen.poll() == 2
    assert "access.organizer is missing, and the run file is not signed; allowed with a token" in guest.said
    assert not list(tmp_path.rglob("run.yaml"))
