"""Formats numbers, times and names for users: with units, separators and few digits.

Never shows `nan`, or a peer id in full, and exponents only for very small or large numbers. Output for programs
(`--json`) does not use this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

UNKNOWN: Final = "-"
_PEER_ID: Final = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_SHOWN: Final = 6  # most entries of a list that are shown


def known(value: object) -> float | None:
    """`value` if it is a finite number, else None. A snapshot may have the text "nan" for a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def count(value: object) -> str:
    """A whole number with separators, as in 14,930."""
    number = known(value)
    return UNKNOWN if number is None else f"{round(number):,}"


def counted(number: int, thing: str) -> str:
    """A count with its noun, as in 1 peer and 2,000 peers."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def number(value: object) -> str:
    """A number with about four digits, as in 14,930 and 12.5 and 0.0312."""
    told = known(value)
    if told is None:
        return UNKNOWN
    if abs(told) >= 1000 or told == int(told):
        return f"{told:,.0f}"
    if abs(told) >= 1e-4:
        return f"{told:.{max(0, 3 - math.floor(math.log10(abs(told))))}f}".rstrip("0").rstrip(".")
    return f"{told:.2g}"


def loss(value: object) -> str:
    """A loss, as in 3.412."""
    told = known(value)
    if told is None:
        return UNKNOWN
    return f"{told:.3f}" if abs(told) < 1e4 else f"{told:.3g}"


def rate(value: object, thing: str = "samples") -> str:
    """A rate per second, as in 22.4 samples/s and 2,870 tokens/s."""
    told = known(value)
    if told is None:
        return f"{UNKNOWN} {thing}/s"
    return f"{told:,.0f} {thing}/s" if told >= 100 or told == 0 else f"{told:.1f} {thing}/s"


def size(value: object) -> str:
    """A number of bytes with a readable unit, as in 378.7 MB."""
    told = known(value)
    if told is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB"):
        if abs(told) < 1000:
            return f"{told:.0f} {unit}" if unit == "B" else f"{told:.1f} {unit}"
        told /= 1000
    return f"{told:.1f} TB"


def share(value: object) -> str:
    """A share in percent, as in 18 % and 0.4 %."""
    told = known(value)
    if told is None:
        return UNKNOWN
    hundredths = 100 * told
    return f"{hundredths:.0f} %" if hundredths >= 10 or hundredths == 0 else f"{hundredths:.1f} %"


def duration(seconds: object) -> str:
    """A duration in its two largest units, as in 5 s, 1 min 01 s, 2 h 10 min and 3 d 04 h."""
    told = known(seconds)
    if told is None:
        return UNKNOWN
    minutes, rest = divmod(int(max(0.0, told)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def took(seconds: object) -> str:
    """A measured time, below a second in milliseconds, as in 164 ms, 2.5 s and 1 min 01 s."""
    told = known(seconds)
    if told is None:
        return UNKNOWN
    if told < 0.9995:
        return f"{1000 * told:.0f} ms"
    return f"{told:.1f} s" if told < 60 else duration(told)


def soon(seconds: float) -> str:
    """Time until a predicted event, in words, as in "in about 12 s"."""
    if seconds < 1:
        return "any moment"
    return f"in about {round(seconds)} s" if seconds < 100 else f"in about {duration(seconds)}"


def short(peer: str) -> str:
    """A peer id shortened to its last eight characters, which differ between peers."""
    return "…" + peer[-8:] if peer.startswith("12D3KooW") else peer


def named(text: str, names: Mapping[str, str]) -> str:
    """Replace the peer ids in `text`, whole or short, by the peers' names, or by short ids. `names` is by whole id."""
    text = _PEER_ID.sub(lambda found: names.get(found[0]) or short(found[0]), text)
    if "…" in text:
        for peer, name in names.items():
            if name:
                text = text.replace(short(peer), name)
    return text


def brief(value: object) -> str:
    """Any plain value as short text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        return UNKNOWN if value in ("nan", "inf", "-inf") else short(value)
    if isinstance(value, dict):
        told = {short(str(key)): item for key, item in value.items() if item not in (None, {}, "")}
        return ", ".join(f"{key} {brief(item)}" for key, item in told.items())
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return "1 entry" if len(value) == 1 else f"{len(value):,} entries"
        return ", ".join(map(brief, value[:_SHOWN])) + (", …" if len(value) > _SHOWN else "")
    return UNKNOWN if value is None else str(value)
