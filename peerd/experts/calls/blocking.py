"""Blocking calls to experts, for plain threads: implements `run.expert_network.ExpertCaller` over trio tasks.

Many threads may call at once; each waits for its own call. A call runs in the trio run that `token` names, until it is
done, the caller is closed, or the run ends; in the last two cases its thread gets Unreachable. Ctrl+C in a waiting
thread takes effect only after its call, which ends by its own deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from peerd.core.errors import LocalError, Unreachable
from peerd.run.expert_network import ExpertCall, ExpertNetwork, ExpertReply
from peerd.run.grid import Uid

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class BlockingExperts:
    """Lets plain threads call experts. Create it in the trio run, and close it there before that run ends."""

    def __init__(self, network: ExpertNetwork, token: trio.lowlevel.TrioToken | None = None) -> None:
        """`token` identifies the trio run of `network`; the default is the current one."""
        self._network = network
        self._token = token or trio.lowlevel.current_trio_token()
        self._home = threading.get_ident() if token is None else None
        self._scopes = set[trio.CancelScope]()  # scopes of running calls; only used in the trio run
        self._closed = False

    def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        """The best `k` live experts for each sample, best first; fewer if fewer are live."""
        return self._call(partial(self._network.choose, layer, scores, k))

    def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]:
        """The experts' outputs, None for those that failed or were late. Raises TooFewExperts."""
        return self._call(partial(self._network.forward, asks, samples))

    def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]:
        """Gradients of the inputs, None for experts that failed: these count as constants (no gradient)."""
        return self._call(partial(self._network.backward, asks))

    def close(self) -> None:
        """Cancel running calls and refuse further ones. Call it in the trio run."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()

    def _call(self, job: Callable[[], Awaitable[T]]) -> T:
        if threading.get_ident() == self._home:
            raise LocalError("a blocking call to experts in the trio thread that would have to process it")
        try:
            return trio.from_thread.run(self._run, job, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise _gone() from None

    async def _run(self, job: Callable[[], Awaitable[T]]) -> T:
        if self._closed:
            raise _gone()
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await job()
            finally:
                self._scopes.discard(scope)
        raise _gone()


def _gone() -> Unreachable:
    return Unreachable("this peer has left the run")
