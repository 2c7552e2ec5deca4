"""Convergence of experts under delays and failures: Learning@home's Figure 5, and Figure 6 in small.

    python scripts/convergence.py                    both in short, one seed: some minutes
    python scripts/convergence.py digits --full      Figure 5: digits, five seeds
    python scripts/convergence.py language --full    Figure 6: a language model of bytes
    python scripts/convergence.py --json             one JSON object as the last line of stdout

Tables go to stdout, curves to build/convergence/*.svg (`--out`). Time is simulated (scripts/learning/trainers.py):
every trainer always has one batch in flight. Each expert is a quarter as wide as the baseline's layer, and each sample
asks four, so that all models compute as much for a sample, up to the products between hidden layers. A request to an
expert fails with probability 0.1; the baseline, whose layers are one expert each, would only begin such a batch again:
its requests do not fail.

The learning rate for digits was chosen by the held-out accuracy of DMoE-64 under both delays (one seed, some six
settings) and for no other model: differences between models are not those of models tuned alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor as Pool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from peerd.core.run.runfile import ExpertOptimizerSection, ExpertsSection, ModelSection, RunFile  # noqa: E402
from scripts.learning.curves import Line, svg  # noqa: E402
from scripts.learning.trainers import Layers, Swarm, Weather  # noqa: E402
from scripts.learning.trunks import Digits, SmallTrunk, Text  # noqa: E402

FAILING = 0.1
GRIDS = {1: [1], 4: [4], 16: [4, 4], 64: [8, 8]}
TAIL = 5  # looks at the end, over which a result is the mean


@dataclass(frozen=True, slots=True)
class Case:
    """One model under one weather."""

    experts: int  # of a layer; 1: the baseline
    weather: Weather

    @property
    def model(self) -> str:
        return "feed-forward" if self.experts == 1 else f"DMoE-{self.experts}"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.weather.trainers} x {self.weather.delay_s:g} s"


@dataclass(frozen=True, slots=True)
class Curve:
    """What one seed gave: values at numbers of batches."""

    at: list[float]
    values: list[float]
    failed: int

    @property
    def end(self) -> float:
        return statistics.mean(self.values[-TAIL:])


def run_of(case: Case, seed: int, model: ModelSection, experts: dict[str, Any]) -> RunFile:
    """The run whose experts a case has; the baseline's is four times as wide."""
    dense = case.experts == 1
    own = experts | {"grid": GRIDS[case.experts], "hidden": experts["hidden"] * (4 if dense else 1)}
    own |= {"top_k": 1 if dense else 4, "input": [model.d_model], "layers": model.layers}
    return RunFile(run="convergence", seed=seed, model=model, experts=ExpertsSection(**own))


def weather(trainers: int, delay_s: float, experts: int) -> Weather:
    return Weather(trainers, delay_s, 0.0 if experts == 1 else FAILING)


# --- Figure 5 -------------------------------------------------------------------------------------------------------


def digits_curve(case: Case, seed: int, count: int, data: Digits) -> Curve:
    """Accuracy on the digits held out, in percent."""
    optimizer = ExpertOptimizerSection(name="adamw", lr=3e-4, beta1=0.0, beta2=0.99)
    model = ModelSection(d_model=32, layers=2)
    run = run_of(case, seed, model, {"hidden": 32, "balance": 0.05, "optimizer": optimizer})
    trunk = SmallTrunk.of_digits(run)
    swarm = Swarm(trunk, Layers.of(run), case.weather, 3e-4, seed)
    found = Curve([], [], 0)

    def look(done: int) -> None:
        if done % (count // 40) == 0:
            found.at.append(done)
            found.values.append(100 * swarm.loss(data.test, trunk.accuracy))

    swarm.train(data.batches(32, seed), count, look)
    return _told(case, seed, Curve(found.at, found.values, swarm.failed))


def digits(full: bool, out: Path, pool: Pool) -> dict[str, Any]:
    """Figure 5: accuracy of each model with little delay and with much."""
    seeds, count = range(5 if full else 1), 3000 if full else 400
    cases = [Case(e, weather(t, d, e)) for e in GRIDS for t, d in ((16, 0.1), (64, 1.0))]
    curves = _curves(pool, digits_curve, cases, [(seed, count, Digits()) for seed in seeds])
    print(f"\nFigure 5. Digits, {count} batches of 32, {len(seeds)} seeds: accuracy at the end in percent.\n")
    print("| model | 16 trainers, 0.1 s | 64 trainers, 1 s | difference |\n|---|---|---|---|")
    found: dict[str, Any] = {"seeds": len(seeds), "batches": count}
    for near, far in zip(cases[::2], cases[1::2], strict=True):
        ends = [statistics.mean(c.end for c in curves[case]) for case in (near, far)]
        print(f"| {near.model} | {_spread(curves[near])} | {_spread(curves[far])} | {ends[1] - ends[0]:+.2f} |")
        found[near.model] = {"near": round(ends[0], 2), "far": round(ends[1], 2)}
    lost = found["DMoE-64"]["near"] - found["DMoE-64"]["far"]
    print(f"\nDMoE-64 at 1 s ends {lost:.2f} points below its own low-delay accuracy (at most 1): {_word(lost <= 1)}")
    _draw(out / "figure5.svg", "Digits: accuracy under delay", "accuracy, %", curves, (50.0, 100.0))
    return found | {"holds": lost <= 1}


# --- Figure 6 -------------------------------------------------------------------------------------------------------


def language_curve(case: Case, seed: int, count: int, data: Text) -> Curve:
    """Held-out loss, nats a byte."""
    optimizer = ExpertOptimizerSection(name="adamw", lr=1e-3, beta1=0.0, beta2=0.99)
    model = ModelSection(d_model=64, heads=4, layers=2)
    run = run_of(case, seed, model, {"hidden": 64, "balance": 0.02, "block": "ffn1", "optimizer": optimizer})
    trunk = SmallTrunk.of_text(run)
    swarm = Swarm(trunk, Layers.of(run), case.weather, 1e-3, seed)
    found, held_out = Curve([], [], 0), data.held_out(64)

    def look(done: int) -> None:
        if done % (count // 20) == 0:
            found.at.append(done)
            found.values.append(swarm.loss(held_out, trunk.loss))

    swarm.train(data.batches(8, seed), count, look)
    return _told(case, seed, Curve(found.at, found.values, swarm.failed))


def language(full: bool, out: Path, pool: Pool) -> dict[str, Any]:
    """Figure 6 in small: loss of a language model, 32 batches in flight, 1 s delay."""
    seeds, count = range(2 if full else 1), 4000 if full else 200
    cases = [Case(1, Weather(1, 0.0, 0.0)), *(Case(e, weather(32, 1.0, e)) for e in GRIDS)]
    curves = _curves(pool, language_curve, cases, [(seed, count, Text(64)) for seed in seeds])
    print(
        f"\nFigure 6 in small. Bytes of Python, {count} batches of 8 x 64, {len(seeds)} seeds: held-out loss, nats.\n"
    )
    print("| model | in flight, delay | loss |\n|---|---|---|")
    for case in cases:
        print(f"| {case.model} | {case.weather.trainers}, {case.weather.delay_s:g} s | {_spread(curves[case], 3)} |")
    _draw(out / "figure6.svg", "Language model: held-out loss under delay", "nats a byte", curves)
    ends = {case.name: round(statistics.mean(c.end for c in curves[case]), 3) for case in cases}
    return {"seeds": len(seeds), "batches": count, **ends}


# --- telling --------------------------------------------------------------------------------------------------------


def _curves(
    pool: Pool, make: Callable[..., Curve], cases: list[Case], given: list[tuple[Any, ...]]
) -> dict[Case, list[Curve]]:
    """The curves of each case, one for each seed; the models with the most experts, which take longest, begin."""
    jobs = {case: [pool.submit(make, case, *one) for one in given] for case in reversed(cases)}
    found = {case: [job.result() for job in these] for case, these in jobs.items()}
    return {case: found[case] for case in cases}


def _told(case: Case, seed: int, curve: Curve) -> Curve:
    at = time.strftime("%H:%M:%S")
    again = f"{curve.failed} batches began again"
    print(f"{at}  {case.name}, seed {seed}: {curve.end:.3f}, {again}", file=sys.stderr, flush=True)
    return curve


def _spread(curves: list[Curve], digits: int = 2) -> str:
    ends = [curve.end for curve in curves]
    spread = f" ± {statistics.stdev(ends):.{digits}f}" if len(ends) > 1 else ""
    return f"{statistics.mean(ends):.{digits}f}{spread}"


def _word(held: bool) -> str:
    return "holds" if held else "does not hold"


def _draw(
    file: Path,
    title: str,
    unit: str,
    curves: dict[Case, list[Curve]],
    y_range: tuple[float | None, float | None] = (None, None),
) -> None:
    order = list(GRIDS)
    lines = [
        Line(case.name, found[0].at, [c.values for c in found], case.weather.trainers < 32, order.index(case.experts))
        for case, found in curves.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(svg(title, ("batches", unit), lines, *y_range))
    print(f"\n{file}")


FIGURES: dict[str, Callable[[bool, Path, Pool], dict[str, Any]]] = {"digits": digits, "language": language}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figure", nargs="?", choices=list(FIGURES), help="all unless told")
    parser.add_argument("--full", action="store_true", help="as many batches and seeds as the figures have")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "convergence", help="folder of the pictures")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many curves at once")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = parser.parse_args()
    torch.set_num_threads(1)  # these products are small
    names = [name for name in FIGURES if given.figure in (None, name)]
    with Pool(given.processes) as pool:
        found = {name: FIGURES[name](given.full, given.out, pool) for name in names}
    if given.json:
        print(json.dumps(found))
    if not found.get("digits", {}).get("holds", True) and given.full:
        sys.exit("DMoE-64 loses more than one point by delay")


if __name__ == "__main__":
    main()
