"""Room for what a stage keeps beside its state: what is left of a frozen state when the next step comes before it was
read, and what the code of averaging missed.

With `limits.memory_gb`, or if it is large, a copy goes to an unnamed file in the role's folder, so that a slow disk, or
a newcomer on a slow line, never brings the process to its limit, nor makes it much larger than its steps do. A small
one goes to memory, as does one that the disk cannot take, if there is memory. A large residual goes to such a file as
well, unless rounds are so short that the disk would wear out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from peerd.compute.model.footprint import lacking_for_call, spare_bytes
from peerd.core.errors import NoMemory
from peerd.core.limits import WORTH_A_FILE_BYTES
from peerd.core.run.runfile import RunFile
from peerd.service.state.state_room import StateRoom

_WORTH_WRITING_S: Final = 60.0  # writing a residual in each round is then less than a few times what the line carries


def room_for_copy(run: RunFile, folder: Path, size: int) -> StateRoom | None:
    """A file in `folder` for a copy of `size` bytes, or None if it may lie in memory. NoMemory says why there is room
    in neither.
    """
    limited = run.limits.memory_gb > 0
    fits = not limited and lacking_for_call(run, size) is None
    if fits and size < WORTH_A_FILE_BYTES:
        return None
    try:
        return StateRoom(size, folder, needs_file=True)
    except OSError as error:
        if fits or (limited and spare_bytes(run, size) >= size):
            return None
        memory = f"limits.memory_gb allows {run.limits.memory_gb:g} GB" if limited else "the machine has no memory left"
        reason = error.strerror or error
        raise NoMemory(f"a copy takes {size / 1e6:.1f} MB, {memory}, and {folder}: {reason}") from None


def room_for_residual(run: RunFile, folder: Path, size: int, round_s: float) -> StateRoom | None:
    """A file in `folder` for a residual of `size` bytes, which is written once a round; None: it lies in memory.

    Where memory is short it goes to the file however long rounds take (`round_s`). If the disk cannot take it, the
    room is memory, and the log says so.
    """
    if size < WORTH_A_FILE_BYTES:
        return None
    spare = not run.limits.memory_gb and lacking_for_call(run, size) is None
    return None if spare and round_s < _WORTH_WRITING_S else StateRoom(size, folder)
