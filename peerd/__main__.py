"""`python -m peerd` is the same as the `peerd` command."""

from peerd.cli import main

main()
