"""Parts of scripts/convergence.py: experts in a stack, trainers in simulated time, and curves."""
