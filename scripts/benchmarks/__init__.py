"""The benchmarks of scripts/bench.py, one module each."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for `tests`, whose simulated worlds some benchmarks use
