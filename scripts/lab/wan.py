"""The WAN of a wide lab: one process (wan.c, compiled when it is first needed) between all lines, and the lines."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from .rates import Traffic
from .space import NAMES, LabError, Space, call

SOURCE = Path(__file__).with_name("wan.c")
QUEUE_MS = 50.0
TUN_PACKETS = 10_000  # that wait for the WAN's process when it is late


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One access line. Rates in 10^6 bits of Ethernet frames per second, None: as fast as the machine can; delays one
    way, so that two hosts are both delays twice apart; loss of single frames, in each direction, 0 to 1; `twice`: the
    share of the frames that come in which come in twice."""

    up_mbit: float | None = None
    down_mbit: float | None = None
    delay_ms: float = 0.0
    loss: float = 0.0
    twice: float = 0.0
    queue_ms: float = QUEUE_MS  # at a rate: what would wait longer is dropped

    def lanes(self) -> list[str]:
        rest = f"{round(self.delay_ms * 1e6)} {self.loss:g} {round(self.queue_ms * 1e6)}"
        rates = {"up": self.up_mbit, "down": self.down_mbit}
        return [f"{direction} {round((rate or 0) * 1e6)} {rest}" for direction, rate in rates.items()]


class Wan(Space):
    """The process that carries packets, in a namespace of its own."""

    def __init__(self, label: str) -> None:
        super().__init__("wan", label)
        self._lock = threading.Lock()
        self._process = self.popen([str(program())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str) -> str:
        """The answer to a command of wan.c."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        with self._lock:
            asked.write(command + "\n")
            asked.flush()
            verdict, _, rest = answers.readline().strip().partition(" ")
        if verdict != "ok":
            raise LabError(f"the WAN says to {command!r}: {rest or 'nothing, it has ended'}")
        return rest

    def attach(self, space: Space, address: str, quality: Quality) -> Line:
        """Give `space` a line: its device wan0, with this address."""
        line = Line(self, int(self.ask(f"line {NAMES / space.label}")), quality)
        line.own(address)
        space.links(
            f"link set wan0 txqueuelen {TUN_PACKETS} up",
            f"addr add {address}/32 dev wan0",
            "route add default dev wan0",
        )
        return line


class Line:
    """Connection of a host or a router to the WAN."""

    def __init__(self, wan: Wan, number: int, quality: Quality) -> None:
        self._wan, self._number, self.quality = wan, number, quality
        self.change()

    def change(self, **quality: float | None) -> None:
        """Other properties, by the names of Quality; those that are not named stay."""
        self.quality = replace(self.quality, **quality)  # type: ignore[arg-type]
        for lane in self.quality.lanes():
            self._wan.ask(f"lane {self._number} {lane}")
        self._wan.ask(f"twice {self._number} {self.quality.twice:g}")

    def cut(self, seconds: float | None = None) -> None:
        """Lose every packet, silently and at once, for so long; None: until `mend`."""
        self._wan.ask(f"cut {self._number} {-1 if seconds is None else round(seconds * 1000)}")

    def mend(self) -> None:
        self._wan.ask(f"cut {self._number} 0")

    def own(self, address: str) -> None:
        """Packets to this address take this line too."""
        self._wan.ask(f"own {self._number} {address}")

    def traffic(self) -> Traffic:
        sent, received, *_ = self._wan.ask(f"count {self._number}").split()
        return Traffic(int(sent), int(received))


def program() -> Path:
    """The compiled wan.c; kept between runs, under the name of what it was made from."""
    source = SOURCE.read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peerd-lab"
    kept = folder / f"wan-{hashlib.sha256(source).hexdigest()[:16]}"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            made = Path(beside) / "wan"
            call("gcc", "-O2", "-o", str(made), str(SOURCE))
            made.replace(kept)  # at once: others may be doing the same
    return kept
