"""A state written piece by piece is a safetensors file, and the digest of the writing is the state's."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from peerd.compute.frozen_state import PIECE_BYTES, FrozenState
from peerd.compute.tensor_file import write_state
from peerd.compute.tensors import TORCH_DTYPES, state_digest


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
