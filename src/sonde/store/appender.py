"""A file that only grows, one whole write at a time."""

from __future__ import annotations

import os
from errno import EIO
from pathlib import Path


class Appender:
    """Appends to a file so that a failed write leaves no part of itself behind.

    Each append is one `os.write`: what it returned from survives the death of the process.
    """

    def __init__(self, path: Path, *, new: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0) | getattr(os, "O_BINARY", 0)
        self._fd: int | None = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o644)
        self.size = os.fstat(self._fd).st_size
        self._torn = False

    def append(self, record: bytes) -> None:
        """Write `record` whole.

        Raises:
            OSError: It was not written; the file is as it was before.

        """
        fd = self._open_fd()
        self._mend(fd)
        try:
            written = os.write(fd, record)
            if written != len(record):
                # The rest may be refused for a reason (a full disk, a size limit): ask for that reason.
                written += os.write(fd, memoryview(record)[written:])
            if written != len(record):
                raise OSError(EIO, f"only {written} of {len(record)} bytes were written")
        except OSError:
            self._torn = True
            self._mend(fd)
            raise
        self.size += written

    def cut(self, size: int) -> None:
        """Drop what follows the first `size` bytes."""
        os.ftruncate(self._open_fd(), size)
        self.size = size

    def is_lost(self) -> bool:
        """Say whether the file was deleted while open; writes to it succeed, and nobody will ever see them."""
        return os.fstat(self._open_fd()).st_nlink == 0

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._open_fd())

    def close(self) -> None:
        """Close the file; again is fine."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _mend(self, fd: int) -> None:
        if self._torn:
            os.ftruncate(fd, self.size)
            self._torn = False

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        return self._fd
