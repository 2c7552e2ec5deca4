"""Grants: the conductor's signatures on admitted microbatches, which trainers show to stage peers (`messages/proof`).

A grant is signed again only if a trainer's list has changed, because a report comes with each microbatch, and most
change nothing. The one trainer that evaluates gets a grant without microbatches, once a step.
"""

from __future__ import annotations

from typing import NamedTuple

from peerd.core.limits import GRANTED_TRAINERS
from peerd.messages.proof import Sign, grant
from peerd.messages.swarm import Grant, GrantStatement, Seqs


class _Granted(NamedTuple):
    """The last signed grant and its content. `helped`: the trainer has contributed to an earlier step."""

    term: int
    step: int
    seqs: list[int]
    helped: bool
    grant: Grant


class GrantSigner:
    """Makes the grants of one tenure, by trainer. `sign` signs with the conductor's identity."""

    def __init__(self, run: bytes, sign: Sign) -> None:
        self._run, self._sign = run, sign
        self._granted: dict[tuple[str, str], _Granted] = {}

    def grant(
        self, term: int, step: int, trainer: str, seqs: list[int], *, early: bool = False, helped: bool = False
    ) -> Grant | None:
        """A grant for these microbatches of `trainer` in `step`, or None if the list is empty.

        `helped`: the trainer has contributed to an earlier step.
        """
        return self._signed(term, step, trainer, seqs, "early" if early else "due", helped) if seqs else None

    def evaluation(self, term: int, step: int, trainer: str) -> Grant:
        """A grant for `trainer` to evaluate at `step`."""
        return self._signed(term, step, trainer, [], "evaluation", helped=False)

    def _signed(self, term: int, step: int, trainer: str, seqs: list[int], use: str, helped: bool) -> Grant:
        key = trainer, use
        known = self._granted.pop(key, None)
        if known is None or known[:4] != (term, step, seqs, helped):
            made = grant(self._sign, GrantStatement(self._run, term, step, trainer, Seqs.of(seqs), helped))
            known = _Granted(term, step, seqs, helped, made)
        self._granted[key] = known
        if len(self._granted) > GRANTED_TRAINERS:
            del self._granted[next(iter(self._granted))]
        return known.grant
