"""The benchmarks that scripts/bench.py knows: one module each."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for the worlds of `tests`, which some of them measure in
