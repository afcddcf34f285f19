"""A disk that does not take a checkpoint: one error, whoever was writing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from ..errors import StorageError

_REMEDIES = {
    errno.ENOSPC: "free space there, or save into a folder on another disk",
    errno.EDQUOT: "raise the quota there, or save into a folder on another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or save into a folder on another file system",
    errno.EROFS: "mount the file system for writing, or save into another folder",
    errno.EIO: "the disk fails (see the kernel log): save into a folder on another one",
}
_CODE = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def disk_reported(folder: Path) -> Iterator[None]:
    """Inside, a checkpoint is written to ``folder``; complete ones that are there stay.

    Raises:
        StorageError: the disk did not take it; in place of what the writing library raised. Other exceptions pass.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        refused = _refusal(error)
        if refused is None:
            raise
        kept = "the checkpoints that were complete are untouched, and training can go on"
        raise StorageError(
            "Saving a checkpoint in",
            path=str(folder),
            error=refused,
            remedy=f"{_REMEDIES[refused.errno or 0]}; {kept}",
        ) from error


def _refusal(error: OSError | SafetensorError) -> OSError | None:
    """What the system said, if it is the disk's fault. safetensors has the number in its text only."""
    if isinstance(error, OSError):
        code = error.errno or 0
    else:
        found = _CODE.search(str(error))
        code = int(found.group(1)) if found else 0
    return OSError(code, os.strerror(code)) if code in _REMEDIES else None
