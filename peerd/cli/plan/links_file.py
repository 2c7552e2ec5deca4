"""The links file: devices, the network between them, and the work to be placed on them.

Each device may belong to a place. Links are given between two places, inside a place, or between two devices; the
latter takes precedence. An entry counts for both directions. If it has `from` and `to`, another entry may give the
opposite direction. All mistakes are reported at once, with their lines. Every pair of devices needs a link, or an entry
`unreachable`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from peerd.cli.plan.link_entries import Directed, LinkEntry, directed
from peerd.log import clean
from peerd.placement.problem import Network, PlanDevice, StageWork
from peerd.run.runfile import Section
from peerd.run.typed_yaml import YamlFaults, YamlKind, parse_yaml, typed_section

DEVICES: Final = 4096  # three matrices of this size take 400 MB
STAGES: Final = 1024  # same limit as in a run file
NAME_CHARS: Final = 64
MISSING_TOLD: Final = 5
_LOOKED_AT: Final = 100_000  # most missing pairs that are examined for the error message
_TERA, _GIGA, _MEGA = 1e12, 1e9, 1e6


class DeviceEntry(Section, frozen=True):
    name: str
    count: int = 1  # number of equal devices; more than one are called name-1, name-2, ...
    place: str = ""
    speed_tflops: float | None = None  # 10^12 floating-point operations per second, as reached in training
    memory_gb: float | None = None  # of machine and GPU together; None if it is enough for any stage


class WorkloadEntry(Section, frozen=True):
    """The work to place. A list has one value per stage."""

    stages: int
    gradient_mb: float | list[float]  # averaged by the peers of a stage in each step
    activation_mb: float | list[float]  # of a microbatch, to the next stage; its gradient has the same size
    microbatches: int = 1  # per step, over all pipelines
    tflop: float | list[float] = 0.0  # 10^12 operations per microbatch, forward and backward
    memory_gb: float | list[float] = 0.0  # needed by a peer of the stage


class LinksSection(Section, frozen=True):
    devices: list[DeviceEntry]
    places: list[LinkEntry] = msgspec.field(default_factory=list)
    pairs: list[LinkEntry] = msgspec.field(default_factory=list)
    symmetric: bool = False  # True: entries whose two directions differ are an error
    workload: WorkloadEntry | None = None


_LINKS_FILE = YamlKind("links file", "`devices:`", LinksSection, file_bytes=4 << 20, nodes=400_000)


@dataclass(frozen=True, slots=True)
class LoadedLinks:
    """Devices, links and optional workload of a links file."""

    path: Path
    devices: tuple[PlanDevice, ...]
    network: Network
    stages: tuple[StageWork, ...]  # empty without a workload
    microbatches: int
    workload_line: int | None


@dataclass(frozen=True, slots=True)
class _Listed:
    """The devices of a file, and the line number of each."""

    devices: list[PlanDevice]
    lines: list[int | None]


def load_links(path: Path) -> LoadedLinks:
    """Read and check a links file. Raises ConfigError, which lists every mistake."""
    tree, faults = parse_yaml(path, _LINKS_FILE)
    file: LinksSection = typed_section(LinksSection, tree, (), faults)
    if faults.found:
        raise faults.error(path)
    listed = _devices(file.devices, faults)
    stages = _stages(file.workload, faults)
    if faults.found:
        raise faults.error(path)
    network = _network(file, listed, faults)
    if faults.found or network is None:
        raise faults.error(path)
    microbatches = file.workload.microbatches if file.workload is not None else 1
    line = faults.line_of(("workload",)) if file.workload is not None else None
    return LoadedLinks(path, tuple(listed.devices), network, stages, microbatches, line)


def _devices(entries: Sequence[DeviceEntry], faults: YamlFaults) -> _Listed:
    listed = _Listed([], [])
    first: dict[str, int | None] = {}
    if not entries:
        faults.add(("devices",), "is empty; allowed: one device at least")
    for index, entry in enumerate(entries):
        at = ("devices", index)
        for key, chars in (("name", entry.name), ("place", entry.place)):
            if (key == "name" and not chars) or len(chars) > NAME_CHARS or not chars.isprintable():
                faults.add((*at, key), f"is {clean(chars)!r}; allowed: 1 to {NAME_CHARS} printable characters")
        for key, value in (("speed_tflops", entry.speed_tflops), ("memory_gb", entry.memory_gb)):
            if value is not None and value <= 0:
                faults.add((*at, key), f"is {value:g}; allowed: a number above 0")
        if not 1 <= entry.count <= DEVICES - len(listed.devices):
            faults.add((*at, "count"), f"is {entry.count}; allowed: 1 or more, and {DEVICES:,} devices in all")
            continue
        line = faults.line_of((*at, "name"))
        for number in range(entry.count):
            name = entry.name if entry.count == 1 else f"{entry.name}-{number + 1}"
            if name in first:
                faults.add((*at, "name"), f"gives device {clean(name)} a second time, first on line {first[name]}")
                break
            first[name] = line
            speed = entry.speed_tflops * _TERA if entry.speed_tflops is not None else math.inf
            memory = entry.memory_gb * _GIGA if entry.memory_gb is not None else math.inf
            listed.devices.append(PlanDevice(name, speed, memory, entry.place))
            listed.lines.append(line)
    timed = [entry.speed_tflops is not None for entry in entries]
    if any(timed) and not all(timed):
        at = ("devices", timed.index(False))
        faults.add(
            (*at, "speed_tflops"), "is missing, and other devices have it; allowed: for all devices, or for none"
        )
    return listed


def _stages(work: WorkloadEntry | None, faults: YamlFaults) -> tuple[StageWork, ...]:
    """Each stage's work, in bytes and operations. Returns () without a workload, or after adding faults."""
    if work is None:
        return ()
    for key, count, most in (("stages", work.stages, STAGES), ("microbatches", work.microbatches, 1 << 20)):
        if not 1 <= count <= most:
            faults.add(("workload", key), f"is {count}; allowed: 1 to {most:,}")
    if faults.found:
        return ()
    columns: list[list[float]] = []
    scales = {"gradient_mb": _MEGA, "activation_mb": _MEGA, "tflop": _TERA, "memory_gb": _GIGA}
    for key, scale in scales.items():
        given: float | list[float] = getattr(work, key)
        values = given if isinstance(given, list) else [given] * work.stages
        if len(values) != work.stages:
            faults.add(
                ("workload", key), f"has {len(values)} values; allowed: one, or one for each of {work.stages} stages"
            )
        elif not all(math.isfinite(value) and value >= 0 for value in values):
            faults.add(("workload", key), "has a value below 0, or one that is not finite; allowed: 0 or more")
        columns.append([value * scale for value in values])
    return () if faults.found else tuple(StageWork(*values) for values in zip(*columns, strict=True))


def _network(file: LinksSection, listed: _Listed, faults: YamlFaults) -> Network | None:
    """Delay and rate of every pair of devices, [N, N]. Returns None after adding faults."""
    names = {device.name: index for index, device in enumerate(listed.devices)}
    places: dict[str, int] = {}
    for device in listed.devices:  # a device without a place is a place of its own
        places.setdefault(device.place or f"\0{device.name}", len(places))
    of_places = directed("places", file.places, [place for place in places if not place.startswith("\0")], faults)
    of_pairs = directed("pairs", file.pairs, list(names), faults)
    if file.symmetric:
        _need_symmetry(of_places, faults)
        _need_symmetry(of_pairs, faults)
    if faults.found:
        return None
    delay_s, rate = np.full((len(places),) * 2, np.nan), np.full((len(places),) * 2, np.nan)
    for (one, other), link in of_places.items():
        delay_s[places[one], places[other]], rate[places[one], places[other]] = link.delay_s, link.rate
    index = [places[device.place or f"\0{device.name}"] for device in listed.devices]
    delay_s, rate = delay_s[np.ix_(index, index)], rate[np.ix_(index, index)]
    for (one, other), link in of_pairs.items():
        delay_s[names[one], names[other]], rate[names[one], names[other]] = link.delay_s, link.rate
    np.fill_diagonal(delay_s, 0.0)
    np.fill_diagonal(rate, np.inf)
    _need_all(listed, np.isnan(delay_s), faults)
    return None if faults.found else Network(delay_s, rate)


def _need_symmetry(links: dict[tuple[str, str], Directed], faults: YamlFaults) -> None:
    for (one, other), link in links.items():
        back = links[other, one]
        if (link.delay_s, link.rate) != (back.delay_s, back.rate) and link.path > back.path:
            first = faults.line_of(back.path)
            faults.add(
                link.path,
                f"differs from the other direction on line {first}; allowed with symmetric: true: the same for both",
            )


def _need_all(listed: _Listed, missing: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], faults: YamlFaults) -> None:
    """Add a fault for each pair of places, or devices, that has no link; at most MISSING_TOLD."""
    told: dict[tuple[str, str], int | None] = {}
    rows, columns = np.nonzero(np.triu(missing))
    for one, other in zip(rows[:_LOOKED_AT].tolist(), columns[:_LOOKED_AT].tolist(), strict=True):
        ends = sorted(device.place or device.name for device in (listed.devices[one], listed.devices[other]))
        told.setdefault((ends[0], ends[1]), listed.lines[other])
    more = len(told) - MISSING_TOLD
    for nth, ((one_end, other_end), line) in enumerate(list(told.items())[:MISSING_TOLD], 1):
        inside = one_end == other_end
        where = f"inside {one_end}" if inside else f"between {one_end} and {other_end}"
        entry = f"inside: {one_end}" if inside else f"between: [{one_end}, {other_end}]"
        allowed = f"an entry `{clean(entry)}` with delay_ms and rate_mbit, or unreachable: true"
        rest = f" (and {more:,} more pairs, at least)" if nth == MISSING_TOLD and more > 0 else ""
        faults.found.append((line, f"no link {clean(where)}; allowed: {allowed}{rest}"))
