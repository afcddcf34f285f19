"""From a model's configuration alone: what training it takes of a machine, and how long a step takes."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import KERNELS, SIZE, SlideFormerConfig, keys
from ..errors import ConfigError
from ..mistakes import check_output
from ..run import read_file

if TYPE_CHECKING:
    import torch

    from ..integrations.meta_model import MetaModel
    from ..plan.activations import UnitActivity
    from ..plan.lsp_plan import LspPlan
    from ..plan.machine import Machine
    from ..plan.partition import Partition
    from ..plan.planner import Plan
    from ..plan.request import Load, Request

OPTIMIZERS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1, "sgd-plain": 0}
"""Moments per parameter."""
LEAST_SIZE = 1 << 20
"""Bytes: a smaller machine is a number whose unit was forgotten."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="slideformer plan", description=__doc__)
    result.add_argument("model", help="folder with a config.json, such a file, or a named shape (see --shapes)")
    result.add_argument("--shapes", action=_ListShapes, help="list the named shapes and exit")
    result.add_argument("--config", metavar="FILE", help="launch configuration with a slideformer_config section")
    result.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of ours, such as lsp.rank, over"
        " --config; also of parts that are not built yet"
    )  # fmt: skip
    batch = result.add_argument_group("batch")
    batch.add_argument("--batch", type=_positive, default=1, help="sequences per micro-batch (1)")
    batch.add_argument("--seq", type=_positive, default=1024, help="tokens per sequence (1024)")
    batch.add_argument("--accumulate", type=_positive, default=1, help="micro-batches per optimizer step (1)")
    model = result.add_argument_group("model")
    model.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights (the model's own)")
    model.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), help="autocast (that of --config, else no)")
    model.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    model.add_argument("--liger", action="store_true", help="the script uses Liger's kernels (else: our key kernels)")
    machine = result.add_argument_group("machine", "this one, unless described")
    machine.add_argument("--gpu-memory", type=_size, metavar="SIZE", help="of a described GPU, such as 24GiB")
    machine.add_argument("--host-memory", type=_size, metavar="SIZE", help="of a described machine")
    machine.add_argument("--nvme", type=_size, metavar="SIZE", help="free space for spill files")
    machine.add_argument("--nvme-path", metavar="FOLDER", help="folder for spill files on this machine")
    machine.add_argument("--gpu-tflops", type=_rate, metavar="N", help="bf16 TFLOP/s of large matrix products")
    machine.add_argument("--gpu-bandwidth", type=_size, metavar="SIZE", help="bytes per second of the GPU's memory")
    machine.add_argument("--link", type=_size, metavar="SIZE", help="bytes per second each way, such as 25GB")
    machine.add_argument("--host-bandwidth", type=_size, metavar="SIZE", help="bytes per second of the CPU's memory")
    machine.add_argument("--nvme-bandwidth", type=_size, metavar="SIZE", help="bytes per second, read and written")
    machine.add_argument("--no-measure", action="store_true", help="do not calibrate this machine (some 20 s, once)")
    output = result.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="as JSON")
    output.add_argument("--yaml", metavar="FILE", help="write a configuration for accelerate launch (- for stdout)")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Returns 0 if it fits, 1 if not.

    Raises:
        SlideFormerError, OSError: a mistake in what was asked (the command's exit status is 2 then).
    """
    return _run(parser().parse_args(arguments))


@dataclass(frozen=True)
class Wishes:
    """What the user has set: ``settings`` as a configuration holds them, ``later``: keys of parts not built yet."""

    config: SlideFormerConfig
    settings: Mapping[str, object]
    later: Mapping[str, object]
    mixed_precision: str


def _run(options: argparse.Namespace) -> int:
    from ..storage.spill import check_parent
    from ..storage.system import System
    from .plan_view import show, to_mapping

    if options.nvme_path:
        check_parent(os.path.abspath(options.nvme_path), System())
    if options.yaml and options.yaml != "-":
        check_output(options.yaml)
    wishes = wishes_of(options)
    plan = plan_of(options, wishes)
    if options.yaml:
        text = configuration(plan, wishes, options.nvme_path)
        if options.yaml == "-":
            print(text, end="")
        else:
            Path(options.yaml).write_text(text)
    if options.json:
        print(json.dumps(to_mapping(plan, options.model), indent=1))
    elif options.yaml != "-":
        show(plan, options.model)
    return 1 if plan.shortages else 0


def plan_of(options: argparse.Namespace, wishes: Wishes) -> Plan | LspPlan:
    """The plan of the strategy that was asked for.

    Raises:
        ConfigError: settings that its ``prepare`` would refuse.
    """
    from ..engine.strategy import check_strategy
    from ..lsp_settings import LspSettings
    from ..plan.lsp_plan import make_lsp_plan
    from ..plan.planner import make_plan

    check_strategy(wishes.config)
    if wishes.config.strategy != "lsp":
        return make_plan(request_of(options, wishes))
    is_fp16 = "float16" in (options.dtype, {"fp16": "float16"}.get(wishes.mixed_precision))
    if is_fp16:
        raise ConfigError("strategy: lsp does not train in fp16, whose gradients need a loss scale.")
    return make_lsp_plan(request_of(options, wishes), LspSettings.from_section(wishes.config.lsp))


def wishes_of(options: argparse.Namespace) -> Wishes:
    """Settings of ``--config`` and ``--set``.

    Raises:
        ConfigError: an unknown key or a bad value.
    """
    import yaml

    whole: Mapping[str, Any] = {}
    if options.config:
        section = read_file(options.config)
        whole = yaml.safe_load(Path(options.config).read_text()) or {}
    else:
        section = {}
    given = dict(section)
    for item in options.set:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item}: no value.", expected="KEY=VALUE")
        name, is_inner, inner = key.partition(".")
        if is_inner:
            held = given.get(name)
            given[name] = {**(held if isinstance(held, Mapping) else {}), inner: value}
        else:
            given[key] = value
    unbuilt = {key.name: key for key in keys() if not key.metadata["built"]}
    settings = {name: value for name, value in given.items() if name not in unbuilt}
    later: dict[str, object] = {}
    for name in given.keys() & unbuilt.keys():
        kind = unbuilt[name].metadata["kind"]
        try:
            later[name] = kind.parse(given[name])
        except ValueError:
            raise ConfigError(
                f"{name}: not a value of this key.", found=repr(given[name]), expected=kind.text
            ) from None  # fmt: skip
    precision = options.mixed_precision or str(whole.get("mixed_precision") or "no")
    return Wishes(
        SlideFormerConfig.from_mapping(settings), settings, later, precision if precision in ("bf16", "fp16") else "no"
    )


def request_of(options: argparse.Namespace, wishes: Wishes) -> Request:
    """What to plan: model, batch, machine, choices."""
    import torch

    from ..plan.partition import partition
    from ..plan.request import MOMENT_BYTES, Choices, Load, Request

    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(wishes.mixed_precision)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    from ..integrations.meta_model import load_meta

    meta = load_meta(options.model, dtype)
    load = Load(sequences=options.batch, length=options.seq, accumulate=options.accumulate)
    parts = partition(meta.model, autocast)
    if not parts.sliding:
        raise ConfigError(f"{options.model} has no repeated blocks: nothing of it can slide.")
    choices = Choices.of(wishes.config, moments=OPTIMIZERS[options.optimizer])
    known = {name: value for name, value in wishes.later.items() if name in Choices.__dataclass_fields__}
    choices = replace(choices, **known)  # type: ignore[arg-type]  # values were parsed by the keys' own kinds
    if "state_dtype" in wishes.later:
        choices = replace(choices, moment_bytes=MOMENT_BYTES[str(wishes.later["state_dtype"])])
    return Request(
        parts=parts,
        activity=_activity(options, wishes, meta, parts, load, autocast),
        load=load,
        vocabulary=meta.vocabulary,
        hidden=meta.hidden,
        machine=_machine(options),
        choices=choices,
        host_base=BASE_BYTES,
    )


BASE_BYTES = 2 << 30
"""What Python, torch, CUDA's libraries and the script's own data take of host memory."""


def _activity(
    options: argparse.Namespace,
    wishes: Wishes,
    meta: MetaModel,
    parts: Partition,
    load: Load,
    autocast: torch.dtype | None,
) -> tuple[UnitActivity, ...]:
    """Of each unit at the batch: its own code on the meta device, or an estimate where that cannot run."""
    import torch

    from ..integrations.meta_model import attention_operations, fuse_layers, load_meta
    from ..plan.activations import estimate_unit, observe_units
    from ..plan.partition import partition

    is_wide = autocast is not None and any(p.dtype == torch.float32 for p in meta.model.parameters())
    if is_wide:  # products run in the autocast dtype, the residual stream stays as it is
        meta = load_meta(options.model, autocast)
    if options.liger:
        fuse_layers(meta.model, in_place=True)
    elif wishes.config.kernels != "off":
        fuse_layers(meta.model, KERNELS if wishes.config.kernels == "auto" else wishes.config.kernels)
    units = partition(meta.model).sliding
    tokens = torch.zeros(load.sequences, load.length, dtype=torch.long, device="meta")
    try:
        found = observe_units(meta.model, units, lambda: meta.model(input_ids=tokens), attention_operations)
    except Exception as error:  # whatever a model's code does not do without data
        print(f"slideformer plan: activations are estimated, {type(error).__name__}: {error}", file=sys.stderr)
        found = [estimate_unit(part, load.tokens) for part in parts.sliding]
    if is_wide:
        found = [unit._replace(boundary=2 * unit.boundary) for unit in found]
    return tuple(found)


def _machine(options: argparse.Namespace) -> Machine:
    from ..plan.machine import ASSUMED, describe_machine, probe_machine
    from .calibrate import calibrated, measure_drive

    machine = probe_machine(nvme_path=options.nvme_path)
    if machine.has_gpu and not options.gpu_memory and not options.no_measure:
        print("measuring this machine, unless that has been done ...", file=sys.stderr)
        machine = calibrated(machine)
    if options.nvme_path and not options.no_measure:
        drive = measure_drive(Path(options.nvme_path))
        machine = machine.with_rates({"nvme_read": drive.read, "nvme_write": drive.write}, "measured")
    machine = describe_machine(machine, gpu=options.gpu_memory, host=options.host_memory, nvme=options.nvme)
    given = {
        "gemm": options.gpu_tflops and options.gpu_tflops * 1e12,
        "gpu_memory": options.gpu_bandwidth,
        "h2d": options.link,
        "d2h": options.link,
        "host": options.host_bandwidth,
        "nvme_read": options.nvme_bandwidth,
        "nvme_write": options.nvme_bandwidth,
    }
    kept = {name: rate for name, rate in machine.rates.items() if not given[name]}
    machine = replace(machine, rates=kept, sources={name: machine.sources[name] for name in kept})
    machine = machine.with_rates({name: float(rate) for name, rate in given.items() if rate}, "given")
    return machine.with_rates(ASSUMED, "assumed") if machine.has_gpu else machine


def configuration(plan: Plan | LspPlan, wishes: Wishes, nvme_path: str | None = None) -> str:
    """A configuration file for ``accelerate launch`` that asks for this plan, with spill files in ``nvme_path``.

    Raises:
        ConfigError: it does not fit, or needs what this version cannot do.
    """
    import yaml

    from ..plan.words import shortage

    if plan.shortages:
        raise ConfigError(
            f"No configuration was written: the plan does not fit ({shortage(plan)}).",
            remedy="see `slideformer plan` without --yaml for changes that would make it fit",
        )
    built = {key.name for key in keys() if key.metadata["built"]}
    section = {key: value for key, value in wishes.config.to_mapping().items() if key in wishes.settings}
    section |= wishes.later
    if plan.terms.spilled:
        section.setdefault("optimizer_states", "nvme" if plan.spill and not plan.spill.host else "auto")
    if plan.terms.filed:
        section.setdefault("weights", "nvme" if len(plan.terms.filed) == len(plan.request.parts.sliding) else "auto")
    if plan.nvme and nvme_path:
        section.setdefault("nvme_path", nvme_path)
    missing = sorted(section.keys() - built)
    if missing:
        raise ConfigError(
            f"No configuration was written: this version cannot do {', '.join(missing)} yet.",
            remedy="plan without it",
        )
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "SLIDEFORMER",
        "mixed_precision": wishes.mixed_precision,
        "num_machines": 1,
        "num_processes": 1,
        "slideformer_config": {"update": wishes.config.update, **section},
    }
    text = str(yaml.safe_dump(content, sort_keys=False))
    if plan.nvme and "nvme_path" not in section:
        return f"# missing in slideformer_config: nvme_path, a folder on the disk of the machine that trains\n{text}"
    return text


class _ListShapes(argparse.Action):
    """``--shapes``."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        from ..integrations.meta_model import NAMED

        print("\n".join(NAMED))
        parser.exit()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a whole number from 1")
    return number


def _rate(text: str) -> float:
    number = float(text)
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError("a number above 0")
    return number


def _size(text: str) -> int:
    try:
        size = int(str(SIZE.parse(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(SIZE.text) from None
    if size < LEAST_SIZE:
        raise argparse.ArgumentTypeError(f"{SIZE.text}; {text} is {size} bytes")
    return size
