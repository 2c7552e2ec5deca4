"""One hostile process: does one thing after another, drawn from its seed, until it is told to stop.

    python -m scripts.hostile.process --run FILE --targets ADDR,ADDR --address 127.0.1.7 --seed 3 [--only NAME,NAME]

Each attack goes on for `--most-s` seconds at most. What was done is printed as one JSON object a line: {"did": name},
and at the end {"counts": {...}}.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from peerd.core.addr import parse_addr
from peerd.core.errors import PeerdError
from peerd.run.config import load_run
from scripts.hostile import attacks_positions, attacks_swarm, attacks_transport
from scripts.hostile.field import Field

Attack = Callable[[Field], Awaitable[None]]
ATTACKS: dict[str, Attack] = {
    name: attack
    for module in (attacks_transport, attacks_swarm, attacks_positions)
    for name, attack in vars(module).items()
    if callable(attack) and getattr(attack, "__module__", "") == module.__name__ and name[1:2].isdigit()
}


async def attack_for_ever(there: Field, names: list[str], most_s: float) -> None:
    """One attack after the other. What fails is of no interest: the others shall stand, not this."""
    while True:
        name = there.rng.choice(names)
        with trio.move_on_after(most_s):
            try:
                await ATTACKS[name](there)
            except* (PeerdError, trio.BrokenResourceError, trio.ClosedResourceError, OSError) as group:
                there.done(f"{name} ended by {type(group.exceptions[0]).__name__}")
        there.done(name)
        print(json.dumps({"did": name}), flush=True)
        await trio.sleep(there.rng.uniform(0.0, 1.0))


async def until_told(there: Field, names: list[str], most_s: float) -> None:
    """Until SIGTERM or SIGINT."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attack_for_ever, there, names, most_s)
            await anext(aiter(signals))
            nursery.cancel_scope.cancel()
    print(json.dumps({"counts": there.counts}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack a run.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--targets", required=True)
    parser.add_argument("--address", default="127.0.1.1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=20.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # honest peers have a low priority too
    logging.disable(logging.WARNING)
    names = [name for name in sorted(ATTACKS) if not options.only or name in options.only.split(",")]
    targets = [parse_addr(text) for text in options.targets.split(",")]
    there = Field(targets, load_run(Path(options.run)).run, options.address, random.Random(options.seed))
    trio.run(until_told, there, names, options.most_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
