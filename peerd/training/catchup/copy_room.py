"""Room for what is left of a frozen state when the next step comes before it was read.

With `limits.memory_gb` the copy goes to an unnamed file in the role's folder, so that a slow disk, or a newcomer on a
slow line, never brings the process to its limit. Without, it goes to memory as long as the machine has any.
"""

from __future__ import annotations

from pathlib import Path

from peerd.compute.model.footprint import lacking_for_call, spare_bytes
from peerd.core.errors import NoMemory
from peerd.core.run.runfile import RunFile
from peerd.service.state.state_room import StateRoom


def room_for_copy(run: RunFile, folder: Path, size: int) -> StateRoom | None:
    """A file in `folder` for a copy of `size` bytes, or None if it may lie in memory. NoMemory says why there is room
    in neither.
    """
    limited = run.limits.memory_gb > 0
    if not limited and lacking_for_call(run, size) is None:
        return None
    try:
        return StateRoom(size, folder, needs_file=True)
    except OSError as error:
        if limited and spare_bytes(run, size) >= size:
            return None
        memory = f"limits.memory_gb allows {run.limits.memory_gb:g} GB" if limited else "the machine has no memory left"
        reason = error.strerror or error
        raise NoMemory(f"a copy takes {size / 1e6:.1f} MB, {memory}, and {folder}: {reason}") from None
