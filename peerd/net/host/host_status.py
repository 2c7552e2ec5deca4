"""A host's part of `peerd status`: faults of ours, and the users of most of what it shares out."""

from __future__ import annotations

from typing import Any

from peerd.machine.budget.book import Book
from peerd.net.faults import Faults


def faults_told(faults: Faults) -> dict[str, Any]:
    """Number of faults, the place of the last one, and each place with what it ended last."""
    places = [
        {"place": place, "count": fault.count, "ended": fault.where, "error": fault.error}
        for place, fault in faults.places.items()
    ]
    return {"count": faults.total, "last": faults.last or None, "places": places}


def budgets_told(book: Book) -> list[dict[str, Any]]:
    """Use of each resource, and the fullest peer, place and region with what each of them may have."""
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
