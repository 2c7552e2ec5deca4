"""Parameters in host memory, copied to the computing device one block at a time.

For a stage whose parameters do not fit on its device (SWARM, section 4.2; Pudipeddi et al. 2020). A block is one layer
of the stage's piece. Its parameters are copied to the device just before it computes; the copy of the next block starts
ahead, and a copy is freed after its block, so at most two exist at a time. A backward recomputes each block from its
input, so it needs each copy again, in reverse order. The gradients of a block are copied to host memory as soon as they
are complete. On a CUDA device, copies use a stream of their own and pinned host memory, if the system allows pinning;
other devices use plain copies.

Invariants: a copy is used in the pass that started it and dropped with it, so it always has the values of the
parameters. Each tensor of a copy begins at the same offset within a cache line as its parameter, and blocks are
computed by the same operations, so the bits equal those of parameters that stay on the device. There is one exception:
in 16 bits, the gradient of a weight that is used several times is summed in the parameters' dtype, not in 16 bits.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from peerd.codec.flat import FlatLayout
from peerd.codec.gpu import is_gpu
from peerd.model.layers import Embedding
from peerd.model.stage.partition import ModelPiece
from peerd.run.runfile import RunFile

_ALIGN_BYTES: Final = 512  # of torch's allocations on a CUDA device; on the CPU it is 64


def offloads(run: RunFile, device: torch.device | str) -> bool:
    """True if a stage of `run` keeps its parameters in host memory and computes on `device`. Always False in a run with
    experts, where `check` rejects the option.
    """
    return run.limits.offload and run.experts is None and has_own_memory(device)


def has_own_memory(device: torch.device | str) -> bool:
    """False for the CPU, whose memory is host memory."""
    return torch.device(device).type != "cpu"


@dataclass(frozen=True, slots=True)
class _Run:
    """Parameters of one block that are adjacent in the flat tensor."""

    source: Tensor  # their part of the flat tensor
    lead: int  # values between the last aligned address and its begin
    layout: FlatLayout  # of that part; names as in the block


@dataclass(frozen=True, slots=True)
class _Block:
    layer: nn.Module
    times: int  # how often the layer is applied
    parameters: tuple[nn.Parameter, ...]  # in host memory, in the order of `runs`
    runs: tuple[_Run, ...]
    again: bool  # recomputed in the backward

    @property
    def names(self) -> list[str]:
        return [name for run in self.runs for name in run.layout.names]


@dataclass(slots=True)
class _Copy:
    """The parameters of one block on the device. `ready`: event after the copy; None for a plain copy."""

    number: int
    tensors: list[Tensor]
    ready: torch.cuda.Event | None


class ParameterOffload:
    """Computes a piece block by block on `device`, with its parameters in `flat`, in host memory.

    `flat` holds the parameters in their order, and is never moved. `keeps_last`: the last block is not recomputed,
    since its backward follows at once. For one thread at a time; autograd's thread counts as the one that waits for it.
    """

    def __init__(self, piece: ModelPiece, flat: Tensor, device: torch.device, keeps_last: bool) -> None:
        self._device = device
        self._blocks = _blocks(piece, flat, keeps_last)
        self._next: _Copy | None = None  # started ahead
        self._stream = torch.cuda.Stream(device) if is_gpu(device) else None  # type: ignore[no-untyped-call]
        if self._stream is not None and (unlock := _lock(flat, device)) is not None:
            weakref.finalize(self, unlock).atexit = False  # the end of the process unpins it
        for module in piece.modules():  # buffers are small, and forwards may change them: on the device
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.to(device) if buffer is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        """The piece's output for `x`, which is on the device."""
        self.forget()
        for number, block in enumerate(self._blocks):
            if block.again and torch.is_grad_enabled():
                x = self._checkpointed(number, x)
            else:
                x = self._through(number, x, self._after(number), {})
        return x

    def forget(self) -> None:
        """Drop a copy that was started ahead and not used, such as after a failed pass."""
        dropped, self._next = self._next, None
        if dropped is not None and dropped.ready is not None:
            dropped.ready.synchronize()  # so that its source may change and its memory be reused

    def _after(self, number: int) -> int | None:
        """The block that is computed after block `number` of a forward, or None."""
        if number + 1 < len(self._blocks):
            return number + 1
        kept = torch.is_grad_enabled() and not self._blocks[number].again  # its backward comes next
        return self._before(number) if kept else None

    def _before(self, number: int) -> int | None:
        """The block that is computed after block `number` of a backward, or None."""
        return number - 1 if number > 0 and self._blocks[number - 1].again else None

    def _checkpointed(self, number: int, x: Tensor) -> Tensor:
        """A block's output. The backward recomputes it, with the buffers as they were before this pass."""
        buffers = {name: buffer.clone() for name, buffer in self._blocks[number].layer.named_buffers()}
        passes = itertools.count()

        def compute(x: Tensor) -> Tensor:
            if next(passes) == 0:
                return self._through(number, x, self._after(number), {})
            return self._through(number, x, self._before(number), dict(buffers))

        y: Tensor = checkpoint(compute, x, use_reentrant=False)
        return y

    def _through(self, number: int, x: Tensor, after: int | None, buffers: dict[str, Tensor]) -> Tensor:
        """A block's output. `after`: block whose copy is started ahead, if any; `buffers`: used instead of the block's
        own.
        """
        block = self._blocks[number]
        parameters: tuple[Tensor, ...] = ()
        if block.parameters:
            with torch.enable_grad():  # torch's products depend on `requires_grad`, so the copies always have it
                parameters = _OnDevice.apply(self, number, *block.parameters)  # type: ignore[no-untyped-call]
        if after is not None:
            self._next = self._begun(after)

        def once(x: Tensor, *parameters: Tensor) -> Tensor:
            y: Tensor = functional_call(block.layer, dict(zip(block.names, parameters, strict=True)) | buffers, (x,))
            return y

        for _ in range(block.times - 1):
            if torch.is_grad_enabled():
                x = checkpoint(once, x, *parameters, use_reentrant=False)
            else:
                x = once(x, *parameters)
        return once(x, *parameters)

    def on_device(self, number: int) -> list[Tensor]:
        """The parameters of a block on the device, for use on the current stream."""
        if self._next is None or self._next.number != number:
            self.forget()
            self._next = self._begun(number)
        copy, self._next = self._next, None
        if copy.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.ready)
        return copy.tensors

    def _begun(self, number: int) -> _Copy:
        """Start copying a block's parameters.

        The memory belongs to the current stream, which waits for the copy before it uses it, and frees it. The copy
        waits for all earlier work of the current stream, which may still use the same memory for an earlier block.
        """
        runs = self._blocks[number].runs
        spots = [self._spot(run) for run in runs]
        if self._stream is None:
            for run, spot in zip(runs, spots, strict=True):
                spot.copy_(run.source)
            return _Copy(number, _tensors(runs, spots), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for run, spot in zip(runs, spots, strict=True):
                spot.copy_(run.source, non_blocking=True)
        return _Copy(number, _tensors(runs, spots), self._stream.record_event())

    def _spot(self, run: _Run) -> Tensor:
        """Device memory for a part of the flat tensor, at the same offset within a cache line."""
        return torch.empty(run.lead + len(run.source), dtype=run.source.dtype, device=self._device)[run.lead :]


class _OnDevice(torch.autograd.Function):
    """Maps a block's host parameters to their device copies; the backward copies gradients to the host."""

    @staticmethod
    def forward(ctx: Any, offload: ParameterOffload, number: int, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(offload.on_device(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient.cpu() if gradient is not None else None for gradient in gradients)


def _blocks(piece: ModelPiece, flat: Tensor, keeps_last: bool) -> list[_Block]:
    begins, begin = {}, 0
    for parameter in piece.parameters():
        begins[id(parameter)] = begin
        begin += parameter.numel()
    blocks = []
    for number, (name, times) in enumerate(piece.steps):
        layer = piece.get_submodule(name)
        named = dict(layer.named_parameters())
        places = [(own, begins[id(parameter)], parameter.shape) for own, parameter in named.items()]
        kept = keeps_last and number == len(piece.steps) - 1
        again = not kept and not isinstance(layer, Embedding)  # it saves nothing of its table for the backward
        blocks.append(_Block(layer, times, tuple(named.values()), tuple(_runs(flat, places)), again))
    return blocks


def _runs(flat: Tensor, places: list[tuple[str, int, torch.Size]]) -> Iterator[_Run]:
    """The parts of the flat tensor with a block's parameters: one, unless it shares some with other blocks."""
    while places:
        count, (_, begin, _) = 0, places[0]
        names, shapes = [], []
        while places and places[0][1] == begin + count:
            name, _, shape = places.pop(0)
            names.append(name)
            shapes.append(shape)
            count += shape.numel()
        lead = begin * flat.itemsize % _ALIGN_BYTES // flat.itemsize
        yield _Run(flat[begin : begin + count], lead, FlatLayout(tuple(names), tuple(shapes)))


def _tensors(runs: tuple[_Run, ...], spots: list[Tensor]) -> list[Tensor]:
    """Each parameter's part of a copy, detached so that autograd does not treat them as views of one tensor."""
    return [view.detach() for run, spot in zip(runs, spots, strict=True) for view in run.layout.views(spot)]


def _lock(flat: Tensor, device: torch.device) -> Callable[[], None] | None:
    """Pin the memory of `flat`, so that a GPU can copy from it while it computes. Returns the function that unpins it,
    or None if the system refuses.
    """
    if not len(flat):
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.device(device):
            torch.cuda.check_error(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # CUDA reports the error once more, to the next kernel
            torch.zeros(1, device=device).add_(1)
        return None

    def unlock() -> None:
        runtime.cudaHostUnregister(flat.data_ptr())

    return unlock
