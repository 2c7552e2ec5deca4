"""`python -m peerd` is the same as the `peerd` command."""

import os
import sys

# `python -m` searches the working directory first: what lies there must not take the place of our own packages, nor of
# Python's. Before anything else is imported.
ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != ours:
    del sys.path[0]

from peerd.cli import main  # noqa: E402

main()
