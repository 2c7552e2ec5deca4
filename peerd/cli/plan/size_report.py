"""Report on a run's stages: parameters, work, bytes, memory, and the network rate that a device needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from peerd.model.shapes.model_shapes import first_with_experts
from peerd.model.shapes.model_size import StageSize, boundary_bytes, microbatches
from peerd.run.runfile import BYTES_PER_MBIT, RunFile, precision_text
from peerd.screen.columns import Columns
from peerd.screen.units import counted, number, size

_TERA = 1e12


def size_view(run: RunFile, sizes: Sequence[StageSize], speed: float) -> RenderableType:
    """The report as tables and text. `speed` is the device's FLOP/s, for which the needed link rate is computed.

    Without `sizes`, as for a model of the user's own, whose code is not run, the report has the boundaries only.
    """
    parts: list[RenderableType] = [Text(f"{_model(run)} · {_microbatches(run)}", "bold")]
    sent = f"{size(boundary_bytes(run))} a microbatch over each boundary, and as much back ({_code(run)})"
    parts.append(Text(sent if run.pipeline.stages > 1 else "one stage: no activations travel"))
    if not sizes:
        knows = (
            f"only the code of {run.model.kind} knows; see: peerd doctor --model FILE"
            if run.loop is None
            else f"in the users' own loops: {run.loop.model}"
        )
        unknown = f"parameters, work and memory: {knows}"
        return Group(*parts, Text(unknown, "yellow"))
    rows = [_row(run, one, speed) for one in sizes]
    if len(sizes) > 1:
        total, flops = sum(one.parameters for one in sizes), sum(one.flops for one in sizes)
        rows.append(["all", "", f"{total:,}", operations(flops), "", "", ""])
    heads = ("stage", "layers", "parameters", "FLOPs", "averages", "memory", f"link at {_tflops(speed)}")
    table = Columns(heads, rows, set(range(7)) - {1}, whole=range(7))
    parts += [Text(""), table.table(), Text(""), *_notes(run, sizes, speed)]
    return Group(*parts)


def _row(run: RunFile, one: StageSize, speed: float) -> list[str]:
    layers = f"{one.blocks.start}-{one.blocks.stop - 1}" if len(one.blocks) > 1 else f"{one.blocks.start}"
    ends = ["embed"] * (one.stage == 0) + [layers] + ["head"] * (one.stage == run.pipeline.stages - 1)
    line = f"{mbit(one.saturating_rate(speed))} Mb/s" if one.line_bytes else "-"
    return [
        str(one.stage),
        " ".join(ends),
        f"{one.parameters:,}",
        operations(one.flops),
        size(one.gradient_bytes),
        size(one.memory_bytes),
        line,
    ]


def _notes(run: RunFile, sizes: Sequence[StageSize], speed: float) -> list[Text]:
    first, width = sizes[0], run.model.d_model
    notes = [
        "FLOPs: of a microbatch, forward and backward: 6 for each weight and token, and attention. averages: bytes "
        "that a peer averages in a step. memory: the peak in a step, with gradients, optimizer, averaging and "
        f"activations of a microbatch ({_precision(run)}); Python and torch need memory, too."
    ]
    if first_with_experts(run):
        notes.insert(0, f"A layer has {first.layer_parameters:,} parameters, about 12 x {width:,}².")
    if len(sizes) > 1:
        notes.append(
            f"link: rate, each way, with which a device of {_tflops(speed)} (--speed) never waits for the network. "
            "Stages send activations to each other, and keep their inputs and results for the backward pass; if there "
            "is no memory for that (limits.activations_mb), they recompute the forward pass. Twice the width needs "
            "half the rate: work grows with its square, bytes do not (square-cube law)."
        )
    if run.limits.offload:
        most = max(one.footprint.held("cuda")[0] for one in sizes)
        notes.append(
            f"limits.offload: the GPU holds at most {size(most)} of a stage, besides activations; the machine's memory "
            "holds the rest."
        )
    if run.experts is not None:
        flights = first.footprint.flights
        copies = f" and {flights.copies:,} copies of earlier parameters" if flights.copies else ""
        notes.append(
            f"Of the memory, {size(sum(flights.most))} are for {batches(flights.flights)} in flight{copies}, the most "
            "at once (limits.microbatches_in_flight)."
        )
        notes.append("Experts are not counted: other peers host them (a host shows how many its memory holds).")
    return [Text(note, "dim") for note in notes]


def _precision(run: RunFile) -> str:
    text = precision_text(run)
    return f"in {run.model.dtype}" if text is None else f"computed in {text}"


def size_object(run: RunFile, sizes: Sequence[StageSize], speed: float) -> dict[str, Any]:
    """The report as one object for programs."""
    return {
        "run": run.run,
        "kind": run.model.kind,
        "microbatches": microbatches(run),
        "tokens": run.pipeline.microbatch * run.model.context,
        "boundary_bytes": boundary_bytes(run) if run.pipeline.stages > 1 else 0,
        "speed_flops": speed,
        "stages": [
            {
                "stage": one.stage,
                "layers": len(one.blocks),
                "parameters": one.parameters,
                "layer_parameters": one.layer_parameters,
                "flops": one.flops,
                "work_flops": one.flops,
                "gradient_bytes": one.gradient_bytes,
                "sent_bytes": one.sent_bytes,
                "memory_bytes": one.memory_bytes,
                "device_memory_bytes": one.footprint.held("cuda")[0],
                "saturating_mbit": one.saturating_rate(speed) / BYTES_PER_MBIT,
            }
            for one in sizes
        ],
    }


def operations(flops: float) -> str:
    """FLOPs with a readable unit, as in 42.1 G."""
    for unit in ("M", "G", "T"):
        flops /= 1000 if unit != "M" else 1e6
        if flops < 1000:
            return f"{flops:.3g} {unit}"
    return f"{flops / 1000:,.3g} P"


def mbit(rate: float) -> str:
    """Bytes per second as Mb/s, in about three digits."""
    told = rate / BYTES_PER_MBIT
    return f"{told:,.0f}" if told >= 100 else f"{told:.3g}"


def _model(run: RunFile) -> str:
    model = run.model
    layers = f"{counted(model.layers, 'layer')} of d_model {model.d_model:,}"
    return f"run {run.run}: {model.kind}, {layers}, {counted(run.pipeline.stages, 'stage')}"


def _microbatches(run: RunFile) -> str:
    samples = f"{run.pipeline.microbatch:,} x {run.model.context:,} tokens"
    return f"{batches(microbatches(run))} of {samples} a step"


def batches(count: int) -> str:
    """The count with its noun: "1 microbatch", "64 microbatches"."""
    return f"{count:,} microbatch" + ("" if count == 1 else "es")


def _code(run: RunFile) -> str:
    code = run.pipeline.boundary.code
    return {"none": run.model.dtype, "auto": f"{run.model.dtype} at most: code auto"}.get(code, code)


def _tflops(speed: float) -> str:
    return f"{number(speed / _TERA)} TFLOP/s"
