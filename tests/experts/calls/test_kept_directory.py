"""Directory of kept experts: hostile holders have few voices, are called last, and do not flood the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from peerd.core.addr import Multiaddr, parse_addr
from peerd.core.ids import Key, PeerId
from peerd.experts.calls.kept_directory import _SAID_AGAIN_S, CustodyView, KeptDirectory
from peerd.experts.owners.lineage import SettledOwner
from peerd.experts.owners.owner_tree import KeptCopy
from peerd.messages.encoding import encode
from peerd.messages.experts import Announced, CheckpointRef, HolderOffer, Name
from peerd.run.grid import Uid, bitmap, grid_of, prefix_key
from tests.kit.expert_runs import expert_run
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.network.hosts import keypair

RUN = expert_run()
UID = Uid(0, (1, 2))


def peer(name: str) -> PeerId:
    return keypair(name).peer_id


@dataclass
class Connected:
    """A `VaultPeer` that has connections to these addresses, and nothing else."""

    at: dict[PeerId, Multiaddr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        best = lambda peer: SimpleNamespace(remote=self.at[peer]) if peer in self.at else None  # noqa: E731
        self.rpc = SimpleNamespace(gate=None)
        learn = lambda *_, **__: None  # noqa: E731
        self.dht = SimpleNamespace()
        self.host = SimpleNamespace(id=peer("own"), addrs=list, learn=learn, links=SimpleNamespace(best=best))

    def directory(self) -> KeptDirectory:
        return KeptDirectory(RUN, cast(Any, self), InlineWorker())


def over_relay(number: int) -> Multiaddr:
    return parse_addr(f"/ip4/8.8.{number}.4/tcp/4001/p2p/{peer('relay')}/p2p-circuit")


def test_holders_behind_relays_of_many_networks_share_one_voice() -> None:
    at = {peer(f"far{i}"): over_relay(i) for i in range(5)}
    at |= {peer(f"near{i}"): parse_addr(f"/ip4/8.{i}.8.4/tcp/4001") for i in range(2)}
    directory = Connected(at).directory()
    assert len({directory.seat(peer(f"far{i}")) for i in range(5)}) == 1
    assert len({directory.seat(each) for each in at}) == 3
    assert directory.seat(peer("unknown")) is None


def copy(owner: str, generation: int, *holders: str) -> KeptCopy:
    """A checkpoint; who signed it was checked before."""
    made = CheckpointRef(bytes(16), Name.of(UID), generation, 40, bytes(32), 1000, peer(owner).public_key)
    return KeptCopy(made, [made.peer, *map(peer, holders)])


@pytest.mark.parametrize("known", [False, True])
async def test_a_crowd_keeps_no_look_from_calling_the_holders_of_the_owners_checkpoints(known: bool) -> None:
    directory = Connected().directory()
    called = list[PeerId]()

    async def answers(peer: PeerId, timeout_s: float) -> bool:
        await trio.lowlevel.checkpoint()
        called.append(peer)
        return False

    directory.answers = answers  # type: ignore[method-assign]
    crowds = [[f"crowd{i}/{j}" for j in range(40)] for i in range(2)]
    copies = [copy(f"s{i}", 1000 - i, *crowd) for i, crowd in enumerate(crowds)]
    ours = copy("a", 0, "x", "y")
    if known:
        directory.lineages.found(ours.pointer)
        copies += [copy(f"more{i}", 1, f"held{i}") for i in range(60)]
    await directory._settle(CustodyView(), {UID: [*copies, ours]}, whole=True)
    assert {peer("x"), peer("y")} <= set(called)
    assert len(called) == 32


@pytest.mark.parametrize("answered", [False, True])
async def test_a_look_without_an_answer_for_some_key_is_not_whole(answered: bool) -> None:
    announced = Announced(Name.of(UID.prefix), bitmap([2], grid_of(RUN).sides[-1]), [1], [40], 0.0, [])
    record = SimpleNamespace(publisher=peer("s"), value=encode(announced), expires=60.0)
    looks = list[bool]()

    async def read(keys: list[Key], **_: Any) -> tuple[dict[Key, list[Any]], bool]:
        await trio.lowlevel.checkpoint()
        return {prefix_key(RUN.run, UID.prefix): [record]}, answered

    connected = Connected()
    connected.dht = SimpleNamespace(read=read)
    directory = connected.directory()
    directory.lineages.settle = lambda *_, whole: looks.append(whole) or SettledOwner()  # type: ignore[assignment]
    await directory.look([UID.prefix])
    assert looks == [answered]


# --- the log ---------------------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    """Warnings since the last call."""
    count = sum(record.levelno >= logging.WARNING for record in caplog.records)
    caplog.clear()
    return count


async def test_a_fault_of_a_peer_is_a_warning_once_in_ten_minutes_for_ever(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Connected().directory()
    directory.lineages.found(copy("a", 0).pointer)
    for _ in range(3):
        for _ in range(20):
            directory._name_strangers(UID, [copy("s", 0)], [])
            forged = copy("a", 0).pointer  # its owner did not sign it
            assert await directory._copies([(peer("liar"), forged)]) == {}
            record = SimpleNamespace(publisher=peer("garbler"), value=b"no record")
            assert directory._read(HolderOffer, cast(Any, record), "expert") is None
        assert warnings(caplog) == 3
        await trio.sleep(_SAID_AGAIN_S + 1.0)


async def test_a_signature_that_was_found_false_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, verified = Connected().directory(), list[CheckpointRef]()
    monkeypatch.setattr(CheckpointRef, "is_signed", lambda pointer: bool(verified.append(pointer)))
    for _ in range(5):
        assert await directory._copies([(peer("liar"), copy("a", 0).pointer)]) == {}
    assert len(verified) == 1
