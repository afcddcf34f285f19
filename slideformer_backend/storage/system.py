"""The system calls of the storage tiers, in one object, so that a test can let each of them fail."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import sys
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class System:
    """The operating system. Every method is one call and raises what that raises (``OSError``)."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """``open(2)``; the descriptor is closed in programs started by this one."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """``close(2)``."""
        os.close(fd)

    def read_at(self, fd: int, buffer: memoryview, offset: int) -> int:
        """``preadv(2)`` into ``buffer``; bytes read, perhaps fewer than asked for."""
        return os.preadv(fd, [buffer], offset)

    def write_at(self, fd: int, buffer: memoryview, offset: int) -> int:
        """``pwritev(2)`` from ``buffer``; bytes written, perhaps fewer than asked for."""
        return os.pwritev(fd, [buffer], offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """``posix_fallocate(3)``: the blocks of the file exist from now on."""
        os.posix_fallocate(fd, 0, nbytes)

    def free_bytes(self, path: str) -> int:
        """What ``statvfs(3)`` says an ordinary user may still write."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def unlink(self, path: str) -> None:
        """``unlink(2)``."""
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        """``mkdir(2)``, for its owner only."""
        os.mkdir(path, 0o700)

    def remove_directory(self, path: str) -> None:
        """``rmdir(2)``."""
        os.rmdir(path)

    def names(self, path: str) -> list[str]:
        """The entries of a directory."""
        return os.listdir(path)

    def status(self, path: str) -> os.stat_result:
        """``lstat(2)``: of a symbolic link itself."""
        return os.lstat(path)

    def status_of(self, fd: int) -> os.stat_result:
        """``fstat(2)``."""
        return os.fstat(fd)

    def try_lock(self, fd: int) -> bool:
        """``flock(2)`` without waiting: whether the lock is ours. The kernel releases it when its holders are gone."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def file_size_limit() -> int:
    """Bytes that a file of this process may have at most (``RLIMIT_FSIZE``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def uninterrupted(call: Callable[..., T], *arguments: object) -> T:
    """The result of a call that a signal may interrupt before it has done anything."""
    while True:
        try:
            return call(*arguments)
        except InterruptedError:
            continue


def undone(call: Callable[..., object], argument: int | str, path: str) -> bool:
    """Undo something (``close``, ``unlink``, ``rmdir``); whether that went well. If not it is said: the next start
    reclaims what is left, and training need not end for it."""
    try:
        call(argument)
    except FileNotFoundError:
        return True
    except OSError as error:
        logger.warning("SlideFormer: %s of %s failed (%s); the next start tries again.", call.__name__, path, error)
        return False
    return True
