"""`python -m peerd` is the same as the `peerd` command."""

import os
import sys

# `python -m` searches the working directory first. Remove it before other imports, so that files there cannot replace
# modules of peerd or Python.
ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != ours:
    del sys.path[0]

from peerd.cli.cli import main  # noqa: E402

main()
