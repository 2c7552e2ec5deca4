"""Room for what is left of a frozen state when the next step comes before it was read.

With `limits.memory_gb`, or if it is large, the copy goes to an unnamed file in the role's folder, so that a slow disk,
or a newcomer on a slow line, never brings the process to its limit, nor makes it much larger than its steps do. A small
one goes to memory, as does one that the disk cannot take, if there is memory.
"""

from __future__ import annotations

from pathlib import Path

from peerd.compute.model.footprint import lacking_for_call, spare_bytes
from peerd.core.errors import NoMemory
from peerd.core.run.runfile import RunFile
from peerd.service.state.state_room import WORTH_A_FILE_BYTES, StateRoom


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
