"""The background peer of a user's own loop: creates its daemon, and turns the reason why it ended into one error.

Shared by the library's classes. Starts no thread itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import outcome

from peerd.core.errors import ConfigError, PeerdError
from peerd.daemon.control.company import CompanyConfig
from peerd.daemon.daemon import Daemon, DaemonPlan, leaf
from peerd.daemon.launch import assembled
from peerd.role.role import Role
from peerd.run.config import check_addresses
from peerd.run.runfile import RunFile

CLOSE_S: Final = 10.0  # for the daemon's drain; then the thread is abandoned, unless it still saves a state


class Closed(PeerdError):
    """The background peer has been closed, or never ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundConfig:
    """A user's settings of the peer. `home` None: a temporary folder; `log_level` None: no log on stderr."""

    bootstrap: tuple[str, ...]
    listen: tuple[str, ...]
    home: Path | None
    company: CompanyConfig
    log_level: str | None

    @classmethod
    def of(
        cls,
        bootstrap: Sequence[str],
        listen: Sequence[str],
        data_dir: str | os.PathLike[str] | None,
        company: tuple[bool, float | None],
        log_level: str | None,
    ) -> BackgroundConfig:
        """Settings from a user's arguments. `company`: alone and wait_s. Raises ConfigError for invalid ones."""
        check_texts("bootstrap", bootstrap)
        check_texts("listen", listen)
        return cls(
            bootstrap=tuple(bootstrap),
            listen=tuple(listen),
            home=Path(data_dir) if data_dir is not None else None,
            company=company_wish(*company),
            log_level=log_level,
        )

    def daemon(
        self, stack: contextlib.ExitStack, run: RunFile, role: type[Role], announce: Callable[[str], None]
    ) -> Daemon:
        """The daemon with this one role; its resources stay open until `stack` closes."""

        def warn(text: str) -> None:
            with contextlib.suppress(OSError, ValueError):
                print(f"peerd {run.run}: {text}", file=sys.stderr, flush=True)

        silent = self.log_level is None
        plan = DaemonPlan(
            roles=(role,),
            run=run,
            bootstrap=self.bootstrap,
            listen=self.listen,
            data_dir=self.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peerd-"))),
            log_level=self.log_level or "info",
            announce=announce,
            company=self.company,
            warn=warn if silent else lambda text: None,  # otherwise it is in the log
        )
        return stack.enter_context(assembled(plan, None if silent else sys.stderr))


def company_wish(alone: bool, wait_s: float | None) -> CompanyConfig:
    """How to wait for other peers at the start, from the arguments of a library user."""
    if wait_s is not None and not wait_s > 0:
        raise ConfigError(f"wait_s is {wait_s}; it must be above 0, or None to wait without limit")
    patience_s = math.inf if wait_s is None else wait_s
    return CompanyConfig(alone=alone, advice="alone=True begins without", patience_s=patience_s)


def check_texts(option: str, addresses: Sequence[str]) -> None:
    """Raises ConfigError for a single text instead of a list, or for an invalid address."""
    if isinstance(addresses, str):
        raise ConfigError(f"{option}: give a list of addresses, not one text")
    check_addresses(option, addresses)


def wait_until_left(thread: threading.Thread, daemon: Daemon | None) -> None:
    """Wait until the peer in `thread` has left its run: at most CLOSE_S, or longer while it saves a state.

    A peer takes longer only for a state that no other peer is known to have, and reports it on stderr or in its log. A
    KeyboardInterrupt ends the wait at once.
    """
    end = time.monotonic() + CLOSE_S
    while thread.is_alive():
        left_s = max(end, daemon.leaves_until() if daemon is not None else 0.0) - time.monotonic()
        if left_s <= 0:
            return
        thread.join(left_s)


def failure_of(result: outcome.Outcome[None], closed: str) -> BaseException:
    """The error that ended a background loop, or `Closed` with the text `closed` if there was none."""
    if not isinstance(result, outcome.Error):
        return Closed(closed)
    return leaf(result.error) if isinstance(result.error, ExceptionGroup) else result.error
