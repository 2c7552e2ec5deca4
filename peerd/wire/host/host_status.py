"""A host's part of `peerd status`: internal errors, and the largest users of each resource."""

from __future__ import annotations

from typing import Any

from peerd.wire.budget.book import Book
from peerd.wire.faults import Faults


def faults_told(faults: Faults) -> dict[str, Any]:
    """Status of internal errors: their number, the code line of the last one, and the last error at each line."""
    places = [
        {"place": place, "count": fault.count, "ended": fault.where, "error": fault.error}
        for place, fault in faults.places.items()
    ]
    return {"count": faults.total, "last": faults.last or None, "places": places}


def budgets_told(book: Book) -> list[dict[str, Any]]:
    """Use of each resource, and the peer, place (address block) and region that use most, with their limits."""
    rows: list[dict[str, Any]] = []
    for use in book.told():
        bounds = use.bounds
        users = (
            ("peer", use.peer, bounds.peer),
            ("place", use.place, bounds.place),
            ("region", use.region, bounds.region),
        )
        fullest = {kind: {"who": who, "has": has, "of": most} for kind, (who, has), most in users if has}
        rows.append({"means": use.means.value, "used": use.used, "of": bounds.total, **fullest})
    return rows
