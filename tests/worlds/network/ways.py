"""Further links between two hosts, of any kind of way, as relays and hole punching make them."""

from __future__ import annotations

import itertools

import trio

from peerd.machine.connectivity.path_selection import PathKind
from peerd.net.host.host import Host
from peerd.net.link.link import Link
from tests.worlds.network.hosts import Hosts
from tests.worlds.network.virtual import connected

_numbers = itertools.count()


async def join(hosts: Hosts, a: Host, b: Host, way: PathKind, **line: float) -> tuple[Link, Link]:
    """A link dialed by `a`, of kind `way` for both: the two ends."""
    number = next(_numbers)
    near, far = await connected(hosts.net, f"way {number} from", f"way {number} to", **line)
    ends: dict[str, Link] = {}

    async def enter(host: Host, initiator: bool) -> None:
        ends[str(host.id)] = await host.join(near if initiator else far, way, initiator=initiator)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(enter, a, True)
        nursery.start_soon(enter, b, False)
    return ends[str(a.id)], ends[str(b.id)]
