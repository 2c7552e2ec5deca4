"""Memory for a whole state outside of the process's own memory: an unnamed file in a folder, mapped.

Used pages are returned to the system regularly (`put_out`). They stay in its page cache while it has memory, and are on
the disk afterwards. The file's space is allocated at once, because writing to a mapped file on a full disk kills the
process. Without a folder, or if the disk has no space, it is ordinary memory, unless the caller requires a file.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

log = logging.getLogger("peerd.state.state_room")

_PUT_OUT_BYTES: Final = 16 << 20  # bytes read or written until pages are returned
_ADVICE: Final = getattr(mmap, "MADV_DONTNEED", None)


class StateRoom:
    """Zeroed, page-aligned memory of `size` bytes: `row`."""

    def __init__(self, size: int, folder: Path | None = None, needs_file: bool = False) -> None:
        """`needs_file`: raise OSError if the file cannot be created in the folder, instead of using memory."""
        mapped: mmap.mmap | None = None
        if folder is not None and size:
            try:
                mapped = _file(size, folder)
            except OSError as error:
                if needs_file:
                    raise
                log.warning(
                    "keeping a state in memory, as it cannot be stored in %s: %s", folder, error.strerror or error
                )
        self._is_file = mapped is not None
        self._mapped = mapped or mmap.mmap(-1, max(1, size))
        self._used_bytes = 0
        self.row = memoryview(self._mapped)[:size]

    def used(self, count: int) -> None:
        """Count bytes that were read or written. Calls `put_out` after each 16 MiB."""
        self._used_bytes += count
        if self._used_bytes >= _PUT_OUT_BYTES:
            self.put_out()

    def put_out(self) -> None:
        """Return all pages to the system if they are in a file. Their content stays, also for current readers."""
        self._used_bytes = 0
        if self._is_file and _ADVICE is not None:
            self._mapped.madvise(_ADVICE)


def _file(size: int, folder: Path) -> mmap.mmap:
    """Create an unnamed file in the folder and map it. Raises OSError if the disk has no space for it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        elif shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)
