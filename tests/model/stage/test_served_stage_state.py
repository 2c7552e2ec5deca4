"""A served stage's state as bytes and back: names and shapes without a copy, tensors that share the bytes."""

from __future__ import annotations

import pytest
import torch

from peerd.messages.state import StateLayout, TensorSpec
from peerd.model.stage.served_stage import ServedStage, items_of, state_of
from peerd.run.runfile import DataSection, ModelSection, OptimizerSection, PipelineSection, RunFile


def served() -> ServedStage:
    run = RunFile(
        run="state",
        model=ModelSection(d_model=16, heads=2, layers=2, context=16),
        pipeline=PipelineSection(stages=2, microbatch=2),
        optimizer=OptimizerSection(name="adamw"),
        data=DataSection(),
    )
    return ServedStage(run, 1, "cpu")


def test_an_outline_is_what_describe_gives_without_the_values() -> None:
    stage = served()
    given = items_of(stage.state())
    assert stage.outline() == [TensorSpec(name, dtype, shape) for name, dtype, shape, _ in given]
    assert [spec.nbytes for spec in stage.outline()] == [data.nbytes for *_, data in given]


def test_a_state_goes_through_bytes_and_back_without_being_copied() -> None:
    stage, other = served(), served()
    stage.commit(0, torch.randn(stage.module.layout.count).numpy(), 2)
    given = items_of(stage.state())
    layout = StateLayout(stage.outline(), piece_bytes=1000)
    row = memoryview(bytearray(layout.total_bytes))
    for piece in range(layout.pieces):
        begin, end = layout.piece(piece)
        row[begin:end] = layout.cut_out(piece, [data for *_, data in given])
    state = state_of((n, d, s, view) for (n, d, s, _), view in zip(given, layout.views(row), strict=True))
    other.load(state)
    assert other.module.digest() == stage.module.digest()
    flat = torch.frombuffer(row, dtype=torch.uint8)
    for name, tensor in state.items():
        inside = flat.data_ptr() <= tensor.data_ptr() < flat.data_ptr() + len(flat)
        assert inside or tensor.numel() == 0 or flat.data_ptr() % 8, name


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (3,)), ("complex64", (1,))])
def test_bytes_that_do_not_make_up_the_tensor_are_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is no"):
        state_of([("x", dtype, shape, memoryview(bytes(8)))])
