"""Packet rules of a LAN's router, for nftables; pure text.

| kind            | outside port                                | lets in                                          |
|-----------------|---------------------------------------------|--------------------------------------------------|
| none            | no translation, hosts have public addresses | all                                              |
| full-cone       | one for each inside address and port        | anybody, to a port that has sent something       |
| addr-restricted | the same                                    | addresses that the port has sent to              |
| port-restricted | the same                                    | addresses and ports that the port has sent to    |
| symmetric       | another one for each destination            | the same                                         |
| firewall        | no translation, hosts have public addresses | answers                                          |

A cone's outside port is a hash of the inside address and port, and of a key, so that it is one port however many
connections begin at once (the kernel alone would give each of these its own). Two kinds let in senders that were not
sent to: they learn from what leaves which host is behind a port. An unexpected packet to a NAT ends at the router
itself, and is dropped or refused; no kind sends back what a LAN sends to its own outside address (no hairpin).
"""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["none", "full-cone", "addr-restricted", "port-restricted", "symmetric", "firewall"]
Unexpected = Literal["drop", "reset"]  # what is done with a SYN that nobody waits for
KINDS: tuple[Kind, ...] = get_args(Kind)
ROUTED: tuple[Kind, ...] = ("none", "firewall")
LEARNING: tuple[Kind, ...] = ("full-cone", "addr-restricted")
PORTS = range(10000, 30000)  # below those that the kernel gives to sockets
MAPPING_S = 7200
TABLE = "lab"


def rules(kind: Kind, unexpected: Unexpected, key: int) -> str:
    """The ruleset of a router whose devices are wan0 and lan0. Another `key` of 32 bits gives a cone other ports."""
    parts = [] if kind in ROUTED else [_learnt(kind), _inward(kind), _outward(kind, key)]
    return f"table ip {TABLE} {{\n" + "\n".join([*parts, _forward(kind, unexpected), _to_router(unexpected)]) + "\n}\n"


def forwarded(kind: Kind, protocol: str, port: int, inside: str) -> str:
    """The rule that leads a port of the router to the same port of a host behind it."""
    if kind in ROUTED:
        return f'insert rule ip {TABLE} forward iifname "wan0" ip daddr {inside} {protocol} dport {port} accept\n'
    return f"add rule ip {TABLE} forwards {protocol} dport {port} dnat to {inside}\n"


def renumbered(kind: Kind, key: int) -> str:
    """Commands that give connections from now on other outside ports."""
    return "" if kind in ROUTED else f"flush chain ip {TABLE} outward\ntable ip {TABLE} {{\n{_outward(kind, key)}\n}}\n"


def forgotten(kind: Kind) -> str:
    """Commands that empty what the router has learnt (connections that the kernel follows are not among it)."""
    if kind not in LEARNING:
        return ""
    return "".join(f"flush map ip {TABLE} {p}_inside\nflush set ip {TABLE} {p}_met\n" for p in ("tcp", "udp"))


def _learnt(kind: Kind) -> str:
    if kind not in LEARNING:
        return ""
    how = f"flags dynamic,timeout; timeout {MAPPING_S}s; size 65535;"
    lines = []
    for protocol in ("tcp", "udp"):
        lines += [
            f"map {protocol}_inside {{ type inet_service : ipv4_addr . inet_service; {how} }}",
            f"set {protocol}_met {{ type inet_service . ipv4_addr; {how} }}",
        ]
    source = "ct original ip saddr . ct original proto-src"
    lines += ["chain learn {", "type filter hook postrouting priority 300; policy accept;"]
    for protocol in ("tcp", "udp"):
        out = f'oifname "wan0" meta l4proto {protocol}'
        lines += [
            f"{out} ct direction original update @{protocol}_inside {{ {protocol} sport : {source} }}",
            f"{out} update @{protocol}_met {{ {protocol} sport . ip daddr }}",
        ]
    return "\n".join([*lines, "}"])


def _inward(kind: Kind) -> str:
    lines = ["chain forwards {", "}", "chain inward {", "type nat hook prerouting priority dstnat; policy accept;"]
    lines += ['iifname "wan0" jump forwards']
    for protocol in ("tcp", "udp") if kind in LEARNING else ():
        met = f"{protocol} dport . ip saddr @{protocol}_met " if kind == "addr-restricted" else ""
        lines += [f'iifname "wan0" {met}dnat ip to {protocol} dport map @{protocol}_inside']
    return "\n".join([*lines, "}"])


def _outward(kind: Kind, key: int) -> str:
    if kind == "symmetric":
        port = f"{PORTS[0]}-{PORTS[-1]} fully-random"
    else:
        port = f"jhash ip saddr . th sport mod {len(PORTS)} seed {key} offset {PORTS[0]}"
    return f"""chain outward {{
type nat hook postrouting priority srcnat; policy accept;
oifname "wan0" meta l4proto {{ tcp, udp }} masquerade to :{port}
oifname "wan0" masquerade
}}"""


def _forward(kind: Kind, unexpected: Unexpected) -> str:
    lines = ["chain forward {", "type filter hook forward priority filter; policy drop;"]
    if kind == "none":
        lines += ["accept"]
    else:
        lines += ["ct state invalid drop", "ct state established,related accept", 'iifname "lan0" accept']
        lines += ["ct status dnat accept", *_refusals(unexpected)]
    return "\n".join([*lines, "}"])


def _to_router(unexpected: Unexpected) -> str:
    """A packet that is dropped here leaves no trace in the router: its port can still be the way of a connection."""
    lines = ["chain to_router {", "type filter hook input priority filter; policy drop;"]
    lines += ["ct state established,related accept", "icmp type echo-request accept", *_refusals(unexpected)]
    return "\n".join([*lines, "}"])


def _refusals(unexpected: Unexpected) -> list[str]:
    return ["tcp flags & (syn | ack) == syn reject with tcp reset"] if unexpected == "reset" else []
