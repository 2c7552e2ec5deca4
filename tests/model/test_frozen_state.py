"""A frozen state is that of its moment, whatever becomes of the tensors, and it copies only what it must."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from peerd.codec.tensors import TORCH_DTYPES, state_digest
from peerd.core.errors import NoMemory, WorkCancelled
from peerd.model.changes import Changes
from peerd.model.checkpoint import Checkpoints
from peerd.model.frozen_state import PIECE_BYTES, FrozenState, write_state


def live() -> dict[str, Tensor]:
    flat = torch.arange(3.0 * PIECE_BYTES / 4)
    return {
        "b": flat[: PIECE_BYTES // 2].view(2, -1),
        "a": flat[PIECE_BYTES // 2 :],
        "nothing": torch.zeros(0, 3),
        "step": torch.tensor(7),
    }


def values(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in state.items()}


def read_all(frozen: FrozenState) -> dict[str, bytes]:
    found = dict.fromkeys((spec.name for spec in frozen.specs), b"")
    for tensor, begin, piece in frozen.pieces():
        name = frozen.specs[tensor].name
        assert len(found[name]) == begin
        found[name] += bytes(piece)
    return found


@pytest.mark.parametrize("pieces_before", range(6))
def test_what_is_read_is_the_state_of_the_moment_it_was_frozen(pieces_before: int) -> None:
    state, changes = live(), Changes()
    expected = values(state)
    frozen = FrozenState(state, changes)
    found = dict.fromkeys(expected, b"")
    for count, (tensor, _, piece) in enumerate(frozen.pieces()):
        if count == pieces_before:
            with changes.one():
                for value in state.values():
                    value.zero_()
        found[frozen.specs[tensor].name] += bytes(piece) if count != pieces_before else b""
        if count == pieces_before:  # it was read before the change
            found[frozen.specs[tensor].name] += bytes(piece)
    assert found == expected


def test_nothing_is_copied_until_the_parameters_change_and_then_only_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, changes = live(), Changes()
    frozen = FrozenState(state, changes)
    copied: list[int] = []
    plain = Tensor.to

    def to(self: Tensor, *args: object, **named: object) -> Tensor:
        copied.append(self.nbytes)
        return plain(self, *args, **named)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(Tensor, "to", to)
    pieces = frozen.pieces()
    while next(pieces)[0] == 0:
        pass
    assert copied == []
    with changes.one():
        pass
    assert sum(copied) == state["b"].nbytes + state["step"].nbytes
    with changes.one():
        pass
    assert sum(copied) == state["b"].nbytes + state["step"].nbytes


def test_a_state_that_nobody_reads_any_more_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Changes()
    frozen, copied = FrozenState(live(), changes), list[Tensor]()
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_, **__: copied.append(tensor) or tensor.clone())
    del frozen
    with changes.one():
        pass
    assert copied == []
    kept = FrozenState(live(), changes)
    with changes.one():
        pass
    assert len(copied) == len(kept.specs)


def test_a_change_goes_on_without_memory_for_the_copy_and_the_reader_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Changes()
    frozen = FrozenState(live(), changes)

    def no_memory(*_: object, **__: object) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(Tensor, "to", no_memory)
    with changes.one():
        pass
    with pytest.raises(NoMemory):
        next(frozen.pieces())


class CountingRoom:
    """Room in memory for `size` bytes that counts the bytes read or written."""

    def __init__(self, size: int) -> None:
        self.row, self.used_bytes = memoryview(bytearray(size)), 0

    def used(self, count: int) -> None:
        self.used_bytes += count


@pytest.mark.parametrize("pieces_before", range(4))
def test_what_is_left_goes_into_the_room_that_is_made_for_it(
    monkeypatch: pytest.MonkeyPatch, pieces_before: int
) -> None:
    state, changes, rooms = live(), Changes(), list[CountingRoom]()
    expected = values(state)

    def make_room(size: int) -> CountingRoom:
        rooms.append(CountingRoom(size))
        return rooms[-1]

    frozen = FrozenState(state, changes, make_room)
    found, left = dict.fromkeys(expected, b""), 0
    for count, (tensor, _, piece) in enumerate(frozen.pieces()):
        found[frozen.specs[tensor].name] += bytes(piece)
        left += len(piece) if rooms else 0
        if count == pieces_before:
            with monkeypatch.context() as patched:
                patched.setattr(Tensor, "to", None)  # no copy in memory
                with changes.one():
                    for value in state.values():
                        value.zero_()
    assert found == expected
    (room,) = rooms
    assert len(room.row) <= sum(map(len, expected.values()))
    assert room.used_bytes == len(room.row) + left  # bytes copied into it, and bytes read from it


def test_a_change_goes_on_without_room_for_the_copy_and_the_reader_is_told_why() -> None:
    changes = Changes()

    def full(size: int) -> CountingRoom:
        raise NoMemory("the disk is full")

    frozen = FrozenState(live(), changes, full)
    with changes.one():
        pass
    with pytest.raises(NoMemory, match="was lost: the disk is full"):
        next(frozen.pieces())


def test_a_reader_in_another_thread_never_sees_half_a_change() -> None:
    flat, changes = torch.zeros(4 * PIECE_BYTES // 4), Changes()
    for step in range(1, 20):
        frozen = FrozenState({"a": flat}, changes)
        found: list[set[float]] = []

        def read(frozen: FrozenState = frozen, found: list[set[float]] = found) -> None:
            for _, _, piece in frozen.pieces():
                found.append(set(torch.frombuffer(piece, dtype=torch.float32).unique().tolist()))

        reader = threading.Thread(target=read)
        reader.start()
        with changes.one():
            flat.fill_(step)
        reader.join()
        assert found == [{step - 1.0}] * 4


def test_safetensors_reads_every_dtype_as_it_was(tmp_path: Path) -> None:
    state = {
        f"{dtype}/{name}": torch.ones(shape).to(known)
        for dtype, known in TORCH_DTYPES.items()
        for name, shape in {"matrix": (3, 5), "number": (), "nothing": (0, 4)}.items()
    }
    state |= {"large": torch.rand(PIECE_BYTES // 4 + 7), 'an "odd" näme': torch.rand(3), "zzz": torch.zeros(0)}
    assert write_state(tmp_path / "ours", FrozenState(state)) == state_digest(state)
    found = safetensors.torch.load_file(tmp_path / "ours")
    assert state_digest(found) == state_digest(state)
    safetensors.torch.save_file(state, tmp_path / "theirs")
    assert (tmp_path / "ours").stat().st_size == pytest.approx((tmp_path / "theirs").stat().st_size, abs=64)


def test_a_state_that_is_given_up_ends_its_reader_and_leaves_no_file(tmp_path: Path) -> None:
    state, changes = live(), Changes()
    frozen, checkpoints = FrozenState(state, changes), Checkpoints(tmp_path, 1, bytes(32), 0)
    pieces = frozen.pieces()
    next(pieces)
    frozen.give_up()
    with pytest.raises(WorkCancelled, match="no longer needed"):
        next(pieces)
    with changes.one():  # has nothing to copy
        pass
    with pytest.raises(WorkCancelled):
        checkpoints.save(3, frozen)
    assert list(tmp_path.iterdir()) == []
