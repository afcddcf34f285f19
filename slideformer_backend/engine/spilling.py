"""What of an engine goes to NVMe: states of which units, inputs of layers; and where to."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..config import SlideFormerConfig
from ..errors import ConfigError, StateError, UnsupportedError
from ..plan import Partition
from ..plan.ledger import Terms
from ..storage import HostMemory, PosixTier, SpillDirectory, System
from ..storage.kvikio_tier import direct_tier
from ..storage.spill import check_parent, reclaim
from ..transfer import Backend
from .binding import Binding
from .boundaries import Boundaries
from .file_shelf import DirectShelf, FileShelf, StagedShelf
from .spill import Spill
from .unit import ParamRecord, Unit

logger = logging.getLogger(__name__)


def check_nvme(config: SlideFormerConfig) -> None:
    """Raise ConfigError for settings that lack a folder, or a folder that spill files are not safe in."""
    if config.nvme_path is not None:
        check_parent(config.nvme_path, System())
        reclaim(config.nvme_path, System())  # before the plan asks how much is free
    elif config.nvme_fraction is not None:
        raise ConfigError(
            f"nvme_fraction: {config.nvme_fraction} of the states have no folder to go to.",
            found="no nvme_path",
            remedy="set nvme_path: /a/folder/on/the/nvme/disk, or remove nvme_fraction",
        )
    else:
        for key in ("optimizer_states", "weights", "activations"):
            if getattr(config, key) == "nvme":
                raise ConfigError(f"{key}: nvme needs a folder.", remedy="set nvme_path: /a/folder/on/the/nvme/disk")


def open_tier(config: SlideFormerConfig, terms: Terms) -> PosixTier | None:
    """The tier for the states and weights that the plan sends to NVMe, in a directory of its own; None where it sends
    none.

    They are in host memory when they travel, so plain system calls carry them; GPUDirect Storage has nothing to add.

    Raises:
        StorageError: the folder cannot be used.
    """
    if not (terms.spilled or terms.filed) or config.nvme_path is None:
        return None
    directory = SpillDirectory(config.nvme_path)
    try:
        return PosixTier(directory, less=_less(config))
    except BaseException:
        directory.close()
        raise


def open_boundaries(config: SlideFormerConfig, backend: Backend, memory: HostMemory) -> Boundaries:
    """What moves inputs of layers where the configuration sends them.

    Raises:
        ConfigError, StorageError: the folder cannot be used.
    """
    boundaries = Boundaries(backend, memory, is_on=config.activations == "host")
    if config.activations == "nvme":
        boundaries.use(open_shelf(config, backend, memory))
    return boundaries


def open_shelf(config: SlideFormerConfig, backend: Backend, memory: HostMemory) -> FileShelf:
    """Files for inputs of layers, in a spill directory of their own below ``nvme_path``: straight from the GPU with
    GPUDirect Storage, else through host memory and plain system calls.

    Raises:
        ConfigError, StorageError: the folder cannot be used; nothing is left behind.
    """
    if config.nvme_path is None:
        raise StateError("inputs of layers have no folder to go to")
    less = "set activations: host or gpu, or train with smaller micro-batches"
    directory = SpillDirectory(config.nvme_path)
    try:
        direct = direct_tier(directory, less=less) if backend.device.type == "cuda" else None
        shelf: FileShelf
        if direct is not None:
            shelf = DirectShelf(backend, direct, directory.close)
        else:
            shelf = StagedShelf(backend, PosixTier(directory, less=less), directory.close, memory)
        logger.info("SlideFormer: inputs of layers may go to files in %s, %s.", directory.path, shelf.way)
        return shelf
    except BaseException:
        directory.close()
        raise


def _less(config: SlideFormerConfig) -> str:
    """What the user can do for fewer files."""
    if config.nvme_fraction:
        return "lower nvme_fraction"
    if config.optimizer_states == "nvme" or config.weights == "nvme":
        return "keep more states in host memory (set nvme_fraction below 1)"
    return "raise host_memory" if config.host_memory != "auto" else "set optimizer_states: host"


def open_spill(backend: Backend, memory: HostMemory, parts: Partition, terms: Terms, tier: PosixTier | None) -> Spill:
    """What moves states and weights between memory and ``tier``, with room there for the weights that the plan files.

    Raises:
        StorageError: there is no such room; nothing is left behind.
    """
    spill = Spill(backend, memory)
    if tier is None:
        return spill
    spill.open(tier, tier.directory.close)
    weights = {
        number: (parts.sliding[number].name, parts.sliding[number].layout.weight_bytes) for number in terms.filed
    }
    try:
        spill.reserve(weights, terms.frames)
    except BaseException:
        spill.close()
        raise
    return spill


def begin_spill(spill: Spill, units: Sequence[Unit], terms: Terms) -> None:
    """Let the states of the units that the plan names be allocated in files. Those on the device need no place."""
    if spill.tier is not None:
        chosen = [unit for unit in units if unit.index in terms.spilled and not unit.updates_on_device]
        spill.begin(chosen, terms.staged)


def refuse_whole(binding: Binding, records: Sequence[ParamRecord]) -> None:
    """Raise UnsupportedError for an optimizer that steps all masters at once while some of them are in files."""
    if binding.rule is None and any(record.unit.spill or record.unit.filed for record in records):
        raise UnsupportedError(
            f"{type(binding.optimizer).__name__} has no fused rule: it keeps its own states in host memory and steps"
            " all master weights at once, so they cannot wait on NVMe, nor can weights.",
            remedy="set optimizer_states: host and weights: host, or use AdamW, Adam, SGD or Lion",
        )
