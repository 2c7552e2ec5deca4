"""Room for a whole state outside of the process's own memory: an unnamed file, mapped, in a folder.

Pages that were used are handed back to the system now and then (`put_out`): they stay in its cache of files as long as
it has memory for that, and are on the disk afterwards. The file's room is taken at once, since writing to a mapped file
on a full disk ends the process. Without a folder, or where the disk has no room, it is ordinary memory, unless the
caller needs a file.
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

log = logging.getLogger("peerd.service.state.state_room")

_PUT_OUT_BYTES: Final = 16 << 20  # of use: then pages are handed back
_ADVICE: Final = getattr(mmap, "MADV_DONTNEED", None)


class StateRoom:
    """Zeroed memory of `size` bytes, which begins at a page: `row`."""

    def __init__(self, size: int, folder: Path | None = None, needs_file: bool = False) -> None:
        """`needs_file`: raise OSError if the folder cannot take the file, instead of taking memory."""
        mapped: mmap.mmap | None = None
        if folder is not None and size:
            try:
                mapped = _file(size, folder)
            except OSError as error:
                if needs_file:
                    raise
                log.warning("a state is kept in memory, %s cannot take it: %s", folder, error.strerror or error)
        self._is_file = mapped is not None
        self._mapped = mapped or mmap.mmap(-1, max(1, size))
        self._used_bytes = 0
        self.row = memoryview(self._mapped)[:size]

    def used(self, count: int) -> None:
        """Take note that so many bytes were read or written; what is in a file is put out now and then."""
        self._used_bytes += count
        if self._used_bytes >= _PUT_OUT_BYTES:
            self.put_out()

    def put_out(self) -> None:
        """Hand all pages back to the system, if they lie in a file. Nothing is lost, also not for those who read."""
        self._used_bytes = 0
        if self._is_file and _ADVICE is not None:
            self._mapped.madvise(_ADVICE)


def _file(size: int, folder: Path) -> mmap.mmap:
    """An unnamed file of the folder, mapped; OSError if the disk cannot take it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        elif shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)
