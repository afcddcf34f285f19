"""Checkpoint directories that are whole or not there: fsync, a manifest with checksums last, atomic renames.

safetensors loads a flipped bit without a word, and no saver of the Hugging Face libraries calls fsync (HAZARDS 16). A
directory of ours counts once its manifest is there, and the manifest is written when everything else is on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError

MANIFEST = "manifest.json"
MARKER = ".slideformer-incomplete"
"""A file that says: this directory is being written by us, and counts only once it has a manifest."""

_CHUNK = 1 << 22
_THREADS = 4


class Entry(NamedTuple):
    """What a manifest says about one file: bytes and SHA-256."""

    size: int
    sha256: str


def begin(folder: Path) -> None:
    """Make ``folder`` a checkpoint that does not count yet, whatever it was; files in it stay."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        _write(made / MARKER, "")
        made.rename(folder)
    else:
        _write(folder / MARKER, "")
        (folder / MANIFEST).unlink(missing_ok=True)
    _sync(folder)
    _sync(folder.parent)


def seal(folder: Path) -> None:
    """Bring every file to the disk, then write the manifest: from here on the checkpoint counts."""
    paths = _files(folder)
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing and fsync release the GIL
        list(pool.map(_sync, paths))  # takes up what they raised
        found = dict(zip(paths, pool.map(_entry, paths), strict=True))
    entries = {path.relative_to(folder).as_posix(): entry for path, entry in found.items()}
    for directory in [path for path in folder.rglob("*") if path.is_dir()]:
        _sync(directory)
    content = {"format": 1, "files": {name: entry._asdict() for name, entry in sorted(entries.items())}}
    _write(folder / f".{MANIFEST}.new", json.dumps(content, indent=1))
    os.replace(folder / f".{MANIFEST}.new", folder / MANIFEST)
    _sync(folder)
    (folder / MARKER).unlink(missing_ok=True)
    _sync(folder)
    _sync(folder.parent)


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds a whole checkpoint, by names and sizes (``verify`` reads the contents).

    A directory without manifest and marker was not written by us; it counts.
    """
    try:
        entries = _read(folder)
    except CheckpointError:
        return False
    if entries is None:
        return folder.is_dir() and not (folder / MARKER).exists()
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry.size for name, entry in entries.items()
    )


def verify(folder: Path) -> None:
    """Compare every file with the manifest; a directory that is not ours passes.

    Raises:
        CheckpointError: the checkpoint is incomplete, or a file is not the one that was written.
    """
    entries = _read(folder)
    if entries is None:
        if (folder / MARKER).exists():
            raise CheckpointError(
                f"{folder} is incomplete: the process that wrote it ended first.",
                remedy="resume from an earlier checkpoint (resume_from_checkpoint=True takes the newest complete one)",
            )
        return
    for name, entry in entries.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != entry.size:
            raise CheckpointError(
                f"{path} is damaged.", found="no such file" if found is None else f"{found} bytes", expected=entry.size
            )
    with ThreadPoolExecutor(_THREADS) as pool:
        now = pool.map(_entry, [folder / name for name in entries])
        damaged = [name for (name, entry), found in zip(entries.items(), now, strict=True) if entry != found]
    if damaged:
        raise CheckpointError(
            f"{folder / damaged[0]} is damaged: its checksum is not the one of the manifest.",
            remedy="resume from another checkpoint, or restore the file from a copy",
        )


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A directory beside ``folder`` to write a checkpoint into; in its place, complete, when the block is left.

    An earlier checkpoint there is replaced in one rename. What else lies in ``folder`` moves along. An exception leaves
    ``folder`` as it was.
    """
    folder = folder.absolute()
    recover(folder)
    aside = folder.with_name(f".{folder.name}.saving")
    shutil.rmtree(aside, ignore_errors=True)
    begin(aside)
    try:
        yield aside
        seal(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _publish(aside, folder)


def recover(folder: Path) -> None:
    """Finish or undo a replacement of ``folder`` that was interrupted."""
    folder = folder.absolute()
    old = _old(folder)
    if not old.exists():
        return
    if not folder.exists():
        old.rename(folder)
        _sync(folder.parent)
        return
    _move_rest(old, folder)


def discard(folder: Path) -> None:
    """Delete a checkpoint; at no moment is a part of it there under its name."""
    gone = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path, prefix: str) -> None:
    """Delete what interrupted saves and deletions of checkpoints ``prefix...`` have left in ``folder``."""
    for path in folder.glob(f".{prefix}*"):
        if path.suffix in (".new", ".saving", ".deleted"):
            shutil.rmtree(path, ignore_errors=True)


def _publish(aside: Path, folder: Path) -> None:
    if not folder.exists():
        aside.rename(folder)
        _sync(folder.parent)
        return
    old = _old(folder)
    try:
        folder.rename(old)
    except OSError:  # a mount point or the like: entries move one by one, and the directory does not count meanwhile
        begin(folder)
        for path in sorted(aside.iterdir()):
            if path.name != MANIFEST:
                _remove(folder / path.name)
                path.rename(folder / path.name)
        os.replace(aside / MANIFEST, folder / MANIFEST)
        (folder / MARKER).unlink(missing_ok=True)
        _sync(folder)
        aside.rmdir()
        return
    aside.rename(folder)
    _sync(folder.parent)
    _move_rest(old, folder)


def _move_rest(old: Path, folder: Path) -> None:
    """What was not part of the replaced checkpoint stays with its directory."""
    try:
        entries = _read(old) or {}
    except CheckpointError:
        entries = {}
    written = {name.split("/")[0] for name in entries} | {MANIFEST, MARKER, f".{MANIFEST}.new"}
    for path in old.iterdir():
        if path.name not in written and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(old)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    names = {MANIFEST, MARKER, f".{MANIFEST}.new"}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in names)


def _read(folder: Path) -> dict[str, Entry] | None:
    """The manifest's entries, None where there is no manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}.") from None
    try:
        return {name: Entry(**entry) for name, entry in content["files"].items()}
    except (KeyError, TypeError, AttributeError):
        return None  # somebody else's file of that name


def _entry(path: Path) -> Entry:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return Entry(size, digest.hexdigest())


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
