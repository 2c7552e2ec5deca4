"""Link entries of a links file: their format, their checks, and the directed links that they define."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from peerd.log import clean
from peerd.run.runfile import BYTES_PER_MBIT, Section
from peerd.run.typed_yaml import KeyPath, YamlFaults

_DELAY_MS: Final = 3.6e6  # an hour; a higher value is a typing error
_RATE_MBIT: Final = 1e9


class LinkEntry(Section, frozen=True):
    """A link `between` two ends, `from` one `to` another, or `inside` a place."""

    between: list[str] = msgspec.field(default_factory=list)
    from_: str = msgspec.field(default="", name="from")
    to: str = ""
    inside: str = ""
    delay_ms: float | None = None  # one way
    rate_mbit: float | None = None  # 10^6 bits a second
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Directed:
    """A link in one direction, and the entry that defines it.

    `stated` is False if the entry gives only the opposite direction, and this one takes its values.
    """

    delay_s: float
    rate: float  # bytes per second; 0 if unreachable
    path: KeyPath
    stated: bool


def directed(
    key: Literal["places", "pairs"], entries: Sequence[LinkEntry], known: Collection[str], faults: YamlFaults
) -> dict[tuple[str, str], Directed]:
    """Links by (from, to), each in both directions, with the same values unless another entry sets those back."""
    found: dict[tuple[str, str], Directed] = {}
    for index, entry in enumerate(entries):
        path: KeyPath = (key, index)
        ends = _ends(key, entry, path, known, faults)
        values = _values(entry, path, faults)
        if ends is None or values is None:
            continue
        one, other, both = ends
        for end in dict.fromkeys([(one, other), (other, one)] if both else [(one, other)]):
            if end in found and found[end].stated:
                first = faults.line_of(found[end].path)
                faults.add(path, f"gives the link from {clean(end[0])} to {clean(end[1])} again, first on line {first}")
                break
            found[end] = Directed(*values, path, stated=True)
        found.setdefault((other, one), Directed(*values, path, stated=False))
    return found


def _ends(
    key: str, entry: LinkEntry, path: KeyPath, known: Collection[str], faults: YamlFaults
) -> tuple[str, str, bool] | None:
    """From, to, and whether the entry is for both directions. Returns None after adding a fault."""
    ways = [bool(entry.between), bool(entry.from_ or entry.to), bool(entry.inside)]
    allowed = "between: [A, B], or from: A and to: B" + (", or inside: A" if key == "places" else "")
    if sum(ways) != 1 or (entry.inside and key != "places") or (ways[1] and not (entry.from_ and entry.to)):
        faults.add(path, f"must name the ends of its link in one way; allowed: {allowed}")
        return None
    names = entry.between or ([entry.inside] * 2 if entry.inside else [entry.from_, entry.to])
    if len(names) != 2 or (names[0] == names[1] and not entry.inside):
        again = "; links inside a place: inside: A" if key == "places" else ""
        faults.add(path, f"must name two different {key.replace('pairs', 'devices')}; allowed: {allowed}{again}")
        return None
    for name in dict.fromkeys(names):
        if name not in known:
            near = [f"{name}-1"] if f"{name}-1" in known else difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {clean(near[0])}?" if near else f"allowed: {_some(known)}"
            faults.add(
                path, f"names {clean(name)}, which no device {'is in' if key == 'places' else 'is called'}; {hint}"
            )
            return None
    return names[0], names[1], not ways[1]


def _some(known: Collection[str]) -> str:
    names = list(map(clean, known))
    if not names:
        return "the `place` of a device; none has one"
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")


def _values(entry: LinkEntry, path: KeyPath, faults: YamlFaults) -> tuple[float, float] | None:
    """Delay in seconds and rate in bytes per second. Returns None after adding a fault."""
    if entry.unreachable:
        if entry.delay_ms is None and entry.rate_mbit is None:
            return 0.0, 0.0
        faults.add(path, "is unreachable, and has a delay or a rate; allowed: one or the other")
        return None
    sound = True
    for key, value, least, most in (
        ("delay_ms", entry.delay_ms, 0.0, _DELAY_MS),
        ("rate_mbit", entry.rate_mbit, 1e-6, _RATE_MBIT),
    ):
        allowed = f"{'0' if not least else 'above 0'} to {most:,.0f}"
        if value is None:
            faults.add((*path, key), f"is missing; allowed: {allowed}, or unreachable: true for the link")
            sound = False
        elif not least <= value <= most:
            faults.add((*path, key), f"is {value:g}; allowed: {allowed}")
            sound = False
    if not sound or entry.delay_ms is None or entry.rate_mbit is None:
        return None
    return entry.delay_ms / 1000, entry.rate_mbit * BYTES_PER_MBIT
