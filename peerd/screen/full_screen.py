"""Shows a changing picture on a terminal's full screen, always drawn at its current size.

Uses the alternate screen, so the earlier contents reappear at the end. If the size changes between two pictures,
`follow_size` draws the last one again, so that no broken frame remains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from peerd.screen.frame import Framed, FramePicture

RESIZE_S: Final = 0.1  # between two checks of the screen's size


class FullScreen:
    """Full-screen display of pictures. Use it as a context manager, and draw with `show`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(Text(""), console=console, screen=True, auto_refresh=False)
        self._picture: FramePicture | None = None
        self._size = (0, 0)

    def __enter__(self) -> FullScreen:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, picture: FramePicture) -> None:
        """Draw a picture over the whole screen."""
        self._picture, size = picture, self._now()
        if size != self._size:
            self.console.clear()
        self._size = size
        self._live.update(Framed(picture), refresh=True)

    def follow_size(self) -> None:
        """Draw the last picture again if the size of the screen has changed."""
        if self._picture is not None and self._now() != self._size:
            self.show(self._picture)

    def _now(self) -> tuple[int, int]:
        """Current columns and lines of the screen."""
        size = self.console.size
        return size.width, size.height

    def pause(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait for `seconds`, and redraw the picture if the screen's size changes meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            sleep(min(RESIZE_S, left))
            self.follow_size()
