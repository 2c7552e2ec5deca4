"""Valid examples of any msgspec type, made from its annotations: so every message is fuzzed, even one added later."""

from __future__ import annotations

import importlib
import pkgutil
import random
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import inspect as mi

import peerd
from peerd.core.limits import STAGES
from peerd.messages.encoding import Message
from peerd.messages.handover import Ticket

PACKAGES = ("messages", "dht", "rpc", "access", "role", "swarm", "averaging", "pipeline", "state", "experts.calls")
DEPTH_MAX = 8


def message_types() -> list[type[Message]]:
    """Every message that the core, the machines and the services define, by name."""
    for package in (f"peerd.{name}" for name in PACKAGES):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    found: list[type[Message]] = []
    waiting: list[type[Message]] = [Message]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith(f"{peerd.__name__}."):
                found.append(kind)
    return sorted(set(found), key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def example(kind: Any, rng: random.Random) -> Any:
    """A valid value of type `kind`."""
    return msgspec.convert(_value(mi.type_info(kind), rng, 0), kind)


def _value(info: mi.Type, rng: random.Random, depth: int) -> Any:
    match info:
        case mi.NoneType():
            return None
        case mi.BoolType():
            return rng.random() < 0.5
        case mi.IntType():
            return _int(info, rng)
        case mi.FloatType():
            low, high = _bound(info.ge, info.gt, 0.0), _bound(info.le, info.lt, 1e6)
            return rng.uniform(low + (high - low) * 1e-6, high)
        case mi.StrType():
            return "".join(rng.choices("abcdé/-1", k=_length(info, rng)))
        case mi.BytesType():
            return rng.randbytes(_length(info, rng))
        case mi.ListType() | mi.VarTupleType():
            count = 0 if depth > DEPTH_MAX else _length(info, rng, usual=4)
            return [_value(info.item_type, rng, depth + 1) for _ in range(count)]
        case mi.TupleType():
            return [_value(item, rng, depth + 1) for item in info.item_types]
        case mi.DictType():
            count = 0 if depth > DEPTH_MAX else _length(info, rng, usual=4)
            keys = [_value(info.key_type, rng, depth + 1) for _ in range(count)]
            return {key: _value(info.value_type, rng, depth + 1) for key in keys}
        case mi.UnionType():
            return _value(rng.choice(info.types), rng, depth + 1)
        case mi.LiteralType():
            return rng.choice(info.values)
        case mi.StructType():
            return _struct(info, rng, depth)
        case mi.DataclassType():
            return {field.encode_name: _value(field.type, rng, depth + 1) for field in info.fields}
        case mi.AnyType():
            return rng.choice([None, 1, "any", [1, 2]])
        case mi.RawType() | mi.Metadata():
            raise TypeError(f"a message should not hold {info}")
    raise TypeError(f"no examples are made of {info} yet: add it here")


def _ticket(rng: random.Random) -> Ticket:
    low, count, before, after = rng.randrange(1, 9), rng.randrange(1, 5), rng.randrange(2), rng.randrange(2)
    route = ["".join(rng.choices("abcd", k=8)) for _ in range(before + count + after)]
    numbers = [rng.randrange(1 << 30) for _ in range(2)]
    return Ticket(*numbers, rng.randrange(9), low, low + count - 1, low - before, route, rng.randbytes(64))


MADE = {Ticket: _ticket}  # types whose fields must fit together as chance does not have them


def _struct(info: mi.StructType, rng: random.Random, depth: int) -> Any:
    """Some types refuse what each of their fields allows."""
    if info.cls in MADE:
        return MADE[info.cls](rng)
    for _ in range(100):
        values = {field.name: _value(field.type, rng, depth + 1) for field in info.fields}
        if info.cls is Ticket:
            values |= _way(len(values["route"]), rng)
        with suppress(ValueError):
            return info.cls(**values)
    raise TypeError(f"no example of {info.cls} was accepted")


def _way(peers: int, rng: random.Random) -> dict[str, int]:
    """The stages of a ticket with so many peers, which chance hardly ever finds."""
    first = rng.randrange(STAGES - peers + 1)
    gives_input, gives_gradient = rng.choice([(0, 0), *[(1, 0), (0, 1)] * (peers > 1), *[(1, 1)] * (peers > 2)])
    return {"first": first, "low": first + gives_input, "high": first + peers - 1 - gives_gradient}


def _int(info: mi.IntType, rng: random.Random) -> int:
    low = int(_bound(info.ge, None if info.gt is None else info.gt + 1, 0))
    high = int(_bound(info.le, None if info.lt is None else info.lt - 1, (1 << 63) - 1))
    return rng.choice([low, high, rng.randint(low, high), min(high, low + rng.randrange(300))])


def _bound(inclusive: float | None, exclusive: float | None, default: float) -> float:
    if inclusive is not None:
        return inclusive
    return default if exclusive is None else exclusive


def _length(info: Any, rng: random.Random, usual: int = 40) -> int:
    low = info.min_length or 0
    high = max(low, min(info.max_length if info.max_length is not None else usual, max(usual, low)))
    return rng.randint(low, high)
