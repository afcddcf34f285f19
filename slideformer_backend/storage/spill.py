"""The spill directory of a run: private, locked by the kernel, reclaimed when its owner is dead (HAZARDS 12, 13).

Below the user's folder every run has ``slideformer-spill-PID-RANDOM`` (mode 0700) with a file ``lock``, on which it
holds a ``flock`` that the kernel releases when the process is gone, however it died. A start removes directories whose
lock it can take, and nothing else: not by name, not by age, not by whether a process with that number exists.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import weakref
from pathlib import Path

from ..errors import ConfigError, StorageError
from .system import System, undone

logger = logging.getLogger(__name__)

_RUN = re.compile(r"slideformer-spill-\d+-[0-9a-f]{8}")
LOCK = "lock"
SUFFIX = ".spill"
ATTEMPTS = 16
"""Directories that starting neighbours may take away from us, one after another, before we give up."""


class SpillDirectory:
    """A directory for the spill files of this process. ``close`` removes it, and so does the end of the interpreter.

    Args:
        parent: the user's folder (``nvme_path``).
        system: system calls.

    Attributes:
        path: the directory.
        reclaimed: directories of dead runs that were removed.

    Raises:
        ConfigError: ``parent`` is missing, a link, no directory, or writable for everybody.
        StorageError: the system refuses; nothing is left behind.
    """

    def __init__(self, parent: str, system: System | None = None) -> None:
        self.system = system or System()
        parent = os.path.abspath(parent)
        check_parent(parent, self.system)
        self.reclaimed = reclaim(parent, self.system)
        self.path, lock = _create(parent, self.system)
        self._close = weakref.finalize(self, _remove, self.path, lock, self.system, os.getpid())

    def file(self, name: str) -> str:
        """The path of the spill file of ``name`` (a unit and what of it)."""
        return os.path.join(self.path, re.sub(r"[^A-Za-z0-9_.-]+", "_", name) + SUFFIX)

    def close(self) -> None:
        """Remove the directory with its files and release the lock. Idempotent."""
        self._close()


def check_parent(parent: str, system: System) -> None:
    """Raise ConfigError for a folder that spill files are not safe in."""
    try:
        found = system.status(parent)
    except FileNotFoundError:
        raise ConfigError(
            f"nvme_path: {parent} does not exist.", remedy=f"mkdir -p {parent} on the NVMe disk, or mount it"
        ) from None
    except OSError as error:
        raise StorageError("Looking at", path=parent, error=error, remedy="check nvme_path and its disk") from error
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(
            f"nvme_path: {parent} is a symbolic link.",
            remedy=f"name the folder itself: {Path(parent).resolve()}",
        )
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"nvme_path: {parent} is no folder.", remedy="name a folder on the NVMe disk")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"nvme_path: everybody may rename and delete what is in {parent}.",
            found=f"mode {stat.S_IMODE(found.st_mode):o}",
            remedy=f"chmod o-w {parent} (or chmod +t, as /tmp has it)",
        )


def reclaim(parent: str, system: System) -> int:
    """Remove directories of dead runs of this user below ``parent``; returns how many."""
    removed = 0
    try:
        names = [name for name in system.names(parent) if _RUN.fullmatch(name)]
    except OSError as error:
        raise _refused("Listing", parent, error) from error
    for name in names:
        path = os.path.join(parent, name)
        try:
            removed += _reclaim(path, system)
        except FileNotFoundError:
            continue  # a neighbour was faster
        except OSError as error:
            logger.warning("SlideFormer: %s is left of a dead run and cannot be removed: %s", path, error)
    if removed:
        logger.warning("SlideFormer: removed the spill files of %d dead run(s) below %s.", removed, parent)
    return removed


def _reclaim(path: str, system: System) -> bool:
    found = system.status(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    try:
        lock = system.open(os.path.join(path, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if system.names(path):
            return False  # not one of ours after all
        system.remove_directory(path)  # died between mkdir and lock; a live neighbour there tries again
        return False
    try:
        if not system.try_lock(lock):
            return False
        _empty(path, system)
        return True
    finally:
        undone(system.close, lock, path)


def _create(parent: str, system: System) -> tuple[str, int]:
    """A new directory and the descriptor that holds its lock."""
    for _ in range(ATTEMPTS):
        path = os.path.join(parent, f"slideformer-spill-{os.getpid()}-{secrets.token_hex(4)}")
        lock, is_made = -1, False
        try:
            system.make_directory(path)
            is_made = True
            lock = system.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            # a neighbour that starts now may find the directory before it is locked, and remove it
            if system.try_lock(lock) and system.status_of(lock).st_nlink:
                return path, lock
            undone(system.close, lock, path)
        except FileNotFoundError as error:
            if not is_made:
                raise _refused("Making a spill directory in", parent, error) from error
            continue
        except OSError as error:
            _withdraw(path, lock, system)
            raise _refused("Making a spill directory in", parent, error) from error
    raise StorageError(
        "Making a spill directory in", path=parent, remedy="many runs start at once there: start them one by one"
    )


def _withdraw(path: str, lock: int, system: System) -> None:
    undone(system.unlink, os.path.join(path, LOCK), path)
    undone(system.remove_directory, path, path)
    if lock >= 0:
        undone(system.close, lock, path)


def _refused(what: str, parent: str, error: OSError) -> StorageError:
    return StorageError(
        what, path=parent, error=error, remedy="let nvme_path be a folder on a local disk that you may write to"
    )


def _empty(path: str, system: System) -> None:
    """Remove our files, the lock last: until then the directory can be told from one that is being made."""
    names = system.names(path)
    for name in [*(name for name in names if name.endswith(SUFFIX)), *(name for name in names if name == LOCK)]:
        system.unlink(os.path.join(path, name))
    system.remove_directory(path)


def _remove(path: str, lock: int, system: System, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the directory is its parent's
    try:
        _empty(path, system)
    except FileNotFoundError:
        logger.debug("%s is gone already: somebody has removed it.", path)
    except OSError as error:
        logger.warning("SlideFormer: cannot remove %s (%s); the next start tries again.", path, error)
    finally:
        undone(system.close, lock, path)
