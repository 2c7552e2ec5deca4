"""Runs one peer in this process: opens its directory, identity, clock and log, and runs the daemon.

`peerd join` and `peerd backbone` call it. Outside its hours, a volunteer's peer rests: the daemon leaves in order, and
a new one is built when the hours begin. Signals are passed to the one that is active.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterable, Iterator
from pathlib import Path
from typing import TextIO

import trio

from peerd.access.token_files import CredentialFiles, own_papers
from peerd.core.keys import Keypair
from peerd.daemon.control.connectivity import own_surroundings
from peerd.daemon.control.open_hours import OpenHours
from peerd.daemon.control.rester import Rester
from peerd.daemon.daemon import Daemon, DaemonPlan, LocalResources, say
from peerd.log import EventLog
from peerd.role.peer_stack import peer_stack
from peerd.role.role import ActsAs
from peerd.run.home import RunningDaemon, load_identity, locked, make_private_dir, noted, socket_path
from peerd.wire.clock import RealClock
from peerd.wire.tcp.rate_limit import LimitedLine


async def main(plan: DaemonPlan) -> None:
    """Run one peer until it has finished or a signal stops it. Raises PeerdError if it could not do its work."""
    # Signals first, so that none is lost.
    with trio.open_signal_receiver(*_stop_signals()) as signals, grounded(plan, sys.stderr) as ground:
        ground.log.adopt_logging()
        # Otherwise each full collection scans the objects of all modules, which are never freed: 0.1 s with torch, in
        # which no thread runs, the event loop's included. Not done in programs that embed a peer: they must decide it.
        gc.freeze()
        await in_its_hours(plan, ground, signals)


async def in_its_hours(plan: DaemonPlan, ground: LocalResources, signals: AsyncIterable[int]) -> None:
    """Run the peer. Outside its hours it rests, and a new daemon is built when they begin."""
    hours = ground.hours or OpenHours("", ground.clock)
    rester = Rester(
        home=ground.home,
        peer=ground.keypair.peer_id,
        run=plan.run.run if plan.run is not None else "",
        roles=[cls.name for cls in plan.roles],
        limits=plan.own_limits,
        hours=hours,
        log=ground.log,
    )
    while True:
        if not hours.open:
            say(f"rests until {hours.opens} (limits.hours {hours.text}); Ctrl+C ends it")
            if not await rester.rest(signals):
                return
        peer = Daemon(plan, ground, peer_stack(ground.keypair, ground.clock, [ground.line.tcp()]))
        await peer.run(signals)
        if not peer.rests:
            return


@contextlib.contextmanager
def assembled(plan: DaemonPlan, stream: TextIO | None) -> Iterator[Daemon]:
    """Create the daemon of `plan`; its directory is locked until the block ends. Events also go to `stream`."""
    with grounded(plan, stream) as ground:
        yield Daemon(plan, ground, peer_stack(ground.keypair, ground.clock, [ground.line.tcp()]))


@contextlib.contextmanager
def grounded(plan: DaemonPlan, stream: TextIO | None) -> Iterator[LocalResources]:
    """Open the local resources of `plan`'s peer; its directory is locked until the block ends."""
    home = make_private_dir(plan.data_dir)
    run = plan.run.run if plan.run is not None else ""
    with locked(home), contextlib.ExitStack() as stack:
        keypair = load_identity(home)
        papers = _papers(plan, home, keypair)
        clock = RealClock(_own_seed(plan.seed, keypair))
        log = EventLog(clock, level=plan.log_level, stream=stream, path=home / "events.jsonl")
        stack.callback(log.close)
        names = [cls.name for cls in plan.roles]
        stack.enter_context(noted(RunningDaemon(os.getpid(), str(home), str(socket_path(home)), run, names)))
        ways, line = own_surroundings(clock), LimitedLine(plan.own_limits)
        hours = OpenHours(plan.own_limits.hours, clock) if plan.own_limits.hours else None
        yield LocalResources(
            home=home, keypair=keypair, clock=clock, log=log, papers=papers, ways=ways, line=line, hours=hours
        )


def _papers(plan: DaemonPlan, home: Path, keypair: Keypair) -> CredentialFiles | None:
    """This peer's credentials in a run with tokens; None in an open run. Raises ConfigError if they are missing."""
    if plan.run is None or plan.run.access.allow == "open":
        return None
    roles = [cls.acts_as if isinstance(cls, ActsAs) else cls.name for cls in plan.roles]
    return own_papers(plan.run, roles, home, keypair.peer_id, time.time())


def _stop_signals() -> list[signal.Signals]:
    """Signals that stop the peer: Ctrl+C, SIGTERM, and a closed terminal unless nohup set it to be ignored."""
    asked = [signal.SIGINT, signal.SIGTERM]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        asked.append(signal.SIGHUP)
    return asked


def _own_seed(seed: int | None, keypair: Keypair) -> int | None:
    """Seed derived from the user's seed and the peer id, so that peers with the same seed make different choices."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}/{keypair.peer_id}".encode()).digest()[:8], "big")
