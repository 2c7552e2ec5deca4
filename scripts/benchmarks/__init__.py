"""The benchmarks that scripts/bench.py knows: one module each."""
