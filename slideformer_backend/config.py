"""The configuration: one frozen, validated object, whatever it was read from (YAML, flags, environment, code)."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from slideformer_backend.errors import ConfigError
from slideformer_backend.lsp_settings import WORDS, section

ENABLE_VARIABLE = "ACCELERATE_USE_SLIDEFORMER"
CONFIG_VARIABLE = "SLIDEFORMER_CONFIG"
DISABLE_VARIABLE = "SLIDEFORMER_DISABLE"
PREFIX = "SLIDEFORMER_"
_TEST_PREFIX = "SLIDEFORMER_TEST_"  # switches of the test harness: no configuration

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """The values that a key takes.

    Args:
        text: the values in words, for messages and ``--help``.
        parse: turns a value (from YAML, JSON, code, or text from flags and variables) into its normal form;
            raises ``ValueError`` for anything else.
    """

    text: str
    parse: Callable[[object], object]


def one_of(*names: str) -> Kind:
    """One of a few names; YAML 1.1 reads ``off`` and ``no`` as false, which means ``off`` here."""

    def parse(value: object) -> str:
        name = "off" if value is False and "off" in names else value
        if not isinstance(name, str) or name.lower() not in names:
            raise ValueError
        return name.lower()

    return Kind(", ".join(names), parse)


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise ValueError


def _whole(least: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError
        number = int(value)
        if number < least:
            raise ValueError
        return number

    return parse


def _size(value: object) -> int:
    """Bytes, from a whole number or text such as ``24GiB``, ``800M``, ``1.5 GB``."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        match = (
            re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", value.strip().lower()) if isinstance(value, str) else None
        )
        if match is None or match[2] not in _UNITS:
            raise ValueError
        number = int(float(match[1]) * _UNITS[match[2]])
    if number <= 0:
        raise ValueError
    return number


def _fraction(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError
    return number


def _path(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError
    return os.fspath(cast("str | os.PathLike[str]", value))


KERNELS = ("rms_norm", "gated", "rotary")
"""The fused kernels that can replace a model's own layers."""


def _kernels(value: object) -> str | tuple[str, ...]:
    """``auto``, ``off``, or kernel names as a list or comma-separated text."""
    if value is False:
        return "off"
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) and part.strip() for part in parts):
        raise ValueError
    names = tuple(dict.fromkeys(part.strip().lower() for part in parts))
    if names in (("auto",), ("off",)):
        return names[0]
    if not names or not set(names) <= set(KERNELS):
        raise ValueError
    return names


def _or(word: str | None, kind: Kind) -> Kind:
    """The values of ``kind``, or ``word`` (``None``: unset)."""

    def parse(value: object) -> object:
        text = value.lower() if isinstance(value, str) else value
        return word if text == word else kind.parse(value)

    return Kind(kind.text if word is None else f"{word} or {kind.text}", parse)


def _key(default: T, kind: Kind, doc: str, *, built: bool = True) -> T:
    """Declares a key. ``built=False``: recognised and checked, but any value except the default is refused."""
    return dataclasses.field(default=default, metadata={"kind": kind, "doc": doc, "built": built})


BOOLEAN = Kind("true or false", _boolean)
SIZE = Kind("a size such as 24GiB", _size)
PATH = Kind("a path", _path)


@dataclass(frozen=True, kw_only=True)
class SlideFormerConfig:
    """Everything a user can set. Values are checked and brought into one form on construction.

    Raises:
        ConfigError: a value is not among those of its key, or belongs to a part that is not built yet.
    """

    update: Literal["exact", "immediate"] = _key(
        "exact",
        one_of("exact", "immediate"),
        "exact: as plain PyTorch, with clipping and accumulation; immediate: weights change during backward",
    )
    nonfinite: Literal["skip", "raise", "as_plain"] = _key(
        "skip",
        one_of("skip", "raise", "as_plain"),
        "what a step with a NaN or infinite gradient does: nothing at all, raise, or what plain PyTorch does",
    )
    cpu_threads: int | Literal["auto"] = _key(
        "auto", _or("auto", Kind("a whole number from 1", _whole(1))), "threads of the CPU optimizer"
    )
    prefetch: int | Literal["auto"] = _key(
        "auto", _or("auto", Kind("a whole number from 0", _whole(0))), "how many units are fetched ahead of their use"
    )
    pin_memory: bool | Literal["auto"] = _key(
        "auto", _or("auto", BOOLEAN), "whether host buffers that the GPU copies from and to are page-locked"
    )
    status: Literal["off", "auto", "bar", "lines"] = _key(
        "off",
        one_of("off", "auto", "bar", "lines"),
        "a live status: progress, loss, tokens/s, memory, who waits for whom; auto: a bar on a terminal, else lines",
    )
    gpu_memory: int | Literal["auto"] = _key("auto", _or("auto", SIZE), "GPU memory to plan for")
    host_memory: int | Literal["auto"] = _key("auto", _or("auto", SIZE), "host memory to plan for")
    recompute: Literal["auto", "always"] = _key(
        "auto",
        one_of("auto", "always"),
        "auto: layers whose weights stay on the GPU from forward to backward keep their activations where they fit",
    )
    activations: Literal["auto", "gpu", "host", "nvme"] = _key(
        "auto",
        one_of("auto", "gpu", "host", "nvme"),
        "where the inputs of layers wait for backward; auto: on the GPU; in host memory where they would take half of"
        " what is free there, or where their room takes in more layers",
    )
    kernels: str | tuple[str, ...] = _key(
        "auto",
        Kind(f"auto, off or a list of {', '.join(KERNELS)}", _kernels),
        "which layers run as fused kernels, where these give the same; auto: all of them on a GPU, none on a CPU",
    )
    lazy_logits: bool = _key(True, BOOLEAN, "fuse the head with the loss, never holding all logits")
    weights: Literal["auto", "host", "nvme"] = _key(
        "auto",
        one_of("auto", "host", "nvme"),
        "where weights of layers outside the window live; auto: on NVMe only if host memory cannot hold them",
    )
    optimizer_states: Literal["auto", "host", "nvme"] = _key(
        "auto", one_of("auto", "host", "nvme"), "where master weights and moments live"
    )
    nvme_path: str | None = _key(None, _or(None, PATH), "folder on a local NVMe disk, for what goes there")
    nvme_fraction: float | None = _key(
        None,
        _or(None, Kind("a number from 0 to 1", _fraction)),
        "share of what is to go to NVMe (states, weights) that goes there, at least",
    )
    strategy: Literal["slide", "lsp"] = _key(
        "slide",
        one_of("slide", "lsp"),
        "slide: all weights slide, exact; lsp: weights stay on the GPU, compressed gradients go to the CPU",
    )
    lsp: Mapping[str, object] | None = _key(None, _or(None, Kind(WORDS, section)), "settings of strategy lsp")
    state_dtype: Literal["fp32", "bf16", "int8"] = _key(
        "fp32", one_of("fp32", "bf16", "int8"), "storage of the optimizer's moments", built=False
    )
    trace: str | None = _key(None, _or(None, PATH), "file for a timeline of the run (opens in ui.perfetto.dev)")
    report: str | None = _key(None, _or(None, PATH), "file for the figures of the run", built=False)

    def __post_init__(self) -> None:
        for key in dataclasses.fields(self):
            value = getattr(self, key.name)
            kind: Kind = key.metadata["kind"]
            try:
                normal = kind.parse(value)
            except ValueError:
                raise ConfigError(
                    f"{key.name}: not a value of this key.", found=repr(value), expected=kind.text
                ) from None
            if normal != key.default and not key.metadata["built"]:
                raise ConfigError(
                    f"{key.name}: this part of SlideFormer is not built yet.",
                    found=repr(value),
                    expected=f"{key.default!r} (the default)",
                    remedy=f"remove {key.name}",
                )
            object.__setattr__(self, key.name, normal)
        if self.optimizer_states == "host" and self.weights != "nvme" and self.nvme_fraction:
            raise ConfigError(
                f"nvme_fraction: {self.nvme_fraction} has nothing to be a share of.",
                found="optimizer_states: host",
                remedy="set optimizer_states: nvme or weights: nvme, or remove nvme_fraction",
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], *, source: str = "slideformer_config") -> SlideFormerConfig:
        """Builds the configuration from a mapping such as the YAML section.

        Raises:
            ConfigError: an unknown key (the message names the nearest valid one) or a bad value.
        """
        check_keys(mapping, source=source)
        try:
            return cls(**cast("dict[str, Any]", dict(mapping)))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SlideFormerConfig:
        """Builds the configuration from the environment; see :func:`environment_settings`."""
        return cls.from_mapping(environment_settings(environ), source="the environment")

    def to_mapping(self) -> dict[str, object]:
        """All keys with their values in a form that JSON and YAML can hold."""
        values = {key.name: getattr(self, key.name) for key in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def to_json(self) -> str:
        """The keys that differ from their defaults, as a JSON object; ``from_mapping`` reads it back equal."""
        defaults = SlideFormerConfig().to_mapping()
        return json.dumps({name: value for name, value in self.to_mapping().items() if value != defaults[name]})


def keys() -> tuple[dataclasses.Field[Any], ...]:
    """The declared keys in order; each field's metadata holds its ``kind``, ``doc`` and whether it is ``built``."""
    return dataclasses.fields(SlideFormerConfig)


def check_keys(names: Iterable[object], *, source: str) -> None:
    """Refuses names that are no keys.

    Raises:
        ConfigError: names the first unknown key and the nearest valid one.
    """
    valid = [key.name for key in keys()]
    for name in names:
        if name in valid:
            continue
        near = difflib.get_close_matches(str(name).lower(), valid, n=1, cutoff=0.0)
        raise ConfigError(
            f"{source}: unknown key {name!r}.", expected=", ".join(valid), remedy=f"did you mean {near[0]!r}?"
        )


def is_true(value: str | None) -> bool:
    """Whether the text of a switch (environment variable) means yes."""
    return value is not None and value.strip().lower() in _TRUE


def environment_settings(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """The keys set in the environment: ``SLIDEFORMER_CONFIG`` (a JSON object), then ``SLIDEFORMER_<KEY>`` over it.

    Raises:
        ConfigError: ``SLIDEFORMER_CONFIG`` is no JSON object, or a ``SLIDEFORMER_`` variable names no key.
    """
    variables = os.environ if environ is None else environ
    text = variables.get(CONFIG_VARIABLE, "").strip() or "{}"
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{CONFIG_VARIABLE} is not valid JSON ({error}).", found=repr(text)) from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{CONFIG_VARIABLE} must hold a JSON object.", found=repr(text))
    reserved = (CONFIG_VARIABLE, DISABLE_VARIABLE)
    single = {
        name: name[len(PREFIX) :].lower()
        for name in variables
        if name.startswith(PREFIX) and name not in reserved and not name.startswith(_TEST_PREFIX)
    }
    check_keys(settings, source=CONFIG_VARIABLE)
    check_keys(single.values(), source="the environment (SLIDEFORMER_<KEY>)")
    return {**settings, **{key: variables[name] for name, key in single.items()}}
