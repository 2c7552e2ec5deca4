"""Storage, in memory or a file, for data that a stage keeps besides its state: copies of frozen states, and residuals.

The unread rest of a frozen state is copied just before the next step. If the copy is large, or if `limits.memory_gb` is
set, it goes to an unnamed file in the role's folder, so that a slow disk or a newcomer with a slow link never brings
the process to its memory limit, or makes it much larger than its steps do. A small copy goes to memory, and so does one
for which the disk has no space, if there is enough memory. A large residual (what the lossy code of averaging dropped)
also goes to such a file, unless rounds are so short that writing would wear out the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from peerd.core.errors import NoMemory
from peerd.core.limits import WORTH_A_FILE_BYTES
from peerd.model.stage.footprint import lacking_for_call, spare_bytes
from peerd.run.runfile import RunFile
from peerd.state.state_room import StateRoom

_WORTH_WRITING_S: Final = 60.0  # in longer rounds, the disk writes at most a few times the bytes that the line carries


def room_for_copy(run: RunFile, folder: Path, size: int) -> StateRoom | None:
    """Create a file in `folder` for a copy of `size` bytes. Returns None if the copy should use memory.

    Raises NoMemory, with the reasons, if neither memory nor disk has enough space.
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
        raise NoMemory(f"a copy takes {size / 1e6:.1f} MB, {memory}, and no file fits in {folder}: {reason}") from None


def room_for_residual(run: RunFile, folder: Path, size: int, round_s: float) -> StateRoom | None:
    """Create a file in `folder` for a residual of `size` bytes, which is written once per round.

    Returns None if the residual should use ordinary memory: if it is small, or if rounds are short (`round_s`, in
    seconds), memory is free and `limits.memory_gb` is not set. Raises OSError if the disk cannot take the file.
    """
    if size < WORTH_A_FILE_BYTES:
        return None
    spare = not run.limits.memory_gb and lacking_for_call(run, size) is None
    return None if spare and round_s < _WORTH_WRITING_S else StateRoom(size, folder, needs_file=True)
