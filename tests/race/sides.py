"""The two sides of a comparison: the engine, and sequential torch with the same arithmetic.

The plain side owns an fp32 master and moments per parameter and applies each update at once, in the order of the
program, with the engine's own kernel ``commit``. So only the policy is under test, not the arithmetic.
"""

from __future__ import annotations

import abc
import math
import random
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from slideformer_backend.api import Engine, attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine.clip import as_tensor
from slideformer_backend.engine.redo_log import RedoLog
from slideformer_backend.engine.unit import KINDS, ONE, Unit
from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim.norm import block_count, clip_coefficient
from slideformer_backend.optim.rules import rule_for
from slideformer_backend.plan.placement import Placement
from slideformer_backend.storage import numpy_view
from slideformer_backend.transfer import Monitor

from .toy import AUTOCAST, FROZEN, Toy, make_toy


def make_optimizers(model: nn.Module, count: int, rule: str, *, holds_frozen: bool = False) -> list[Optimizer]:
    """``count`` optimizers over disjoint parameters (units are shared between them), two groups each."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad or holds_frozen]
    made: list[Optimizer] = []
    for number in range(count):
        own = parameters[number::count]
        groups = [{"params": own[::2]}, {"params": own[1::2], "weight_decay": 0.0}]
        if rule == "sgd":
            made.append(torch.optim.SGD(groups, lr=3e-2, momentum=0.9))
        else:
            made.append(torch.optim.AdamW(groups, lr=2e-2, weight_decay=0.1))
    return made


class Start(NamedTuple):
    """What is frozen at first: names begin like this; and whether the optimizers hold it already."""

    frozen: tuple[str, ...] = FROZEN
    holds_frozen: bool = False


START = Start()


class Side(abc.ABC):
    """What events act on."""

    def __init__(self, kind: str, seed: int, optimizers: int, rule: str, start: Start = START) -> None:
        self.kind = kind
        self.model: Toy = make_toy(kind, seed, frozen=start.frozen)
        self.optimizers = make_optimizers(self.model, optimizers, rule, holds_frozen=start.holds_frozen)
        self.memory: dict[str, Any] = {}
        """What events keep for later ones."""

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def hint(self, is_last: bool) -> None:
        """What Accelerate says about the next backward."""
        return

    @abc.abstractmethod
    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        """``clip_grad_norm_``: the total norm before clipping."""

    @abc.abstractmethod
    def step(self, number: int) -> None:
        """``step()`` of optimizer ``number``."""

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        """Weights were written by user code."""
        return

    def move(self, number: int) -> None:
        """The planner makes a unit resident."""
        return

    def states(self) -> list[dict[str, Any]]:
        """Optimizer states as torch's format."""
        return [optimizer.state_dict()["state"] for optimizer in self.optimizers]


class EngineSide(Side):
    """The model under the engine."""

    def __init__(
        self,
        kind: str,
        seed: int,
        optimizers: int,
        rule: str,
        monitor: Monitor | None = None,
        start: Start = START,
        **config: Any,
    ) -> None:
        super().__init__(kind, seed, optimizers, rule, start)
        self.engine: Engine = attach(
            self.model,
            SlideFormerConfig(**{"cpu_threads": 1, **config}),
            device=torch.device("cpu"),
            autocast_dtype=torch.bfloat16 if kind == AUTOCAST else None,
            monitor=monitor,
        )
        self.engine.backward.gradients.measures_slots = seed % 2 == 1  # as on a CUDA device
        if isinstance(self.engine.policy, RedoLog) and seed % 3:
            self.engine.policy.deferred = seed % 3 - 1  # none or one, where all would be put off at first
            self.engine.policy.tail = seed % 3 - 1
        if isinstance(self.engine.policy, RedoLog) and seed % 4 == 1:  # however many are late
            vars(self.engine.policy)["_commit_tail"] = partial(_commit_some, self.engine.policy, random.Random(seed))
        boundaries = self.engine.boundaries
        boundaries.least, boundaries.kept = 0, 1  # two of three leave
        if seed % 5 == 2:  # nothing is recomputed, or the last unit is not: weights stay in slots
            kept = tuple(unit.index for unit in self.engine.sliding[-1 if seed % 2 else 0 :])
            self.engine.window.grow(self.engine.sliding, len(kept))
            self.engine.residency.placement = Placement((), kept, "gpu", len(kept), "")
        if seed % 8 in (2, 5, 6):  # gradients of earlier micro-batches wait on the device, or that of one unit does
            self.engine.window.grow_gradients(self.engine.sliding, 1 if seed % 8 == 5 else len(self.engine.sliding))
        if seed % 7 == 4:  # host memory is short: each gradient waits for the update of one that came before
            self.engine.policy.spare_buffers = 1
        for optimizer in self.optimizers:
            self.engine.bind(optimizer)

    def hint(self, is_last: bool) -> None:
        self.engine.last_microbatch = lambda: is_last

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        return self.engine.clip_grad_norm_(parameters, max_norm)

    def step(self, number: int) -> None:
        self.optimizers[number].step()

    def move(self, number: int) -> None:
        engine = self.engine
        units = [unit for unit in engine.sliding if unit.index == number]
        engine.backward.finish_outside()
        if units and engine.residency.can_move(units[0]) and engine.config.update == "exact":
            engine.move_to_device(units[0])


class _State:
    """Master and moments of one parameter; ``is_split``: weights are rounded half up, as a split master's high half."""

    def __init__(self, parameter: nn.Parameter, names: tuple[str, ...], is_split: bool) -> None:
        self.is_split = is_split
        self.parameter = parameter
        self.kind = KINDS[parameter.dtype]
        self.master = parameter.detach().float().reshape(-1).clone().numpy()
        self.moments = {name: np.zeros_like(self.master) for name in names}
        self.steps = 0

    @property
    def weights(self) -> np.ndarray:
        return numpy_view(self.parameter.detach().view(-1))

    def round(self) -> None:
        """Weights from the master."""
        if self.is_split:
            kernels.split(self.master, self.weights, np.empty_like(self.weights))
        else:
            kernels.round_into(self.master, self.weights, self.kind)

    def reconcile(self) -> None:
        """The master of what was written to the weights."""
        if self.is_split:
            high, low = np.empty_like(self.weights), np.empty_like(self.weights)
            kernels.split(self.master, high, low)
            kernels.reconcile_split(high, self.weights, low)
            kernels.join(self.weights, low, self.master)
        else:
            kernels.reconcile(self.master, self.weights, self.kind)


class PlainSide(Side):
    """The reference."""

    def __init__(
        self,
        kind: str,
        seed: int,
        optimizers: int,
        rule: str,
        nonfinite: str = "skip",
        update: str = "exact",
        start: Start = START,
    ) -> None:
        super().__init__(kind, seed, optimizers, rule, start)
        self._skips = nonfinite == "skip"
        self._rule = rule_for(self.optimizers[0])
        is_split = update == "immediate" and kind == "bfloat16"
        self._states = {id(p): _State(p, self._rule.state_names, is_split) for p in self.model.parameters()}
        self._order = {
            id(p): ("blocks." not in name, index) for index, (name, p) in enumerate(self.model.named_parameters())
        }
        self.skipped = 0

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        present = [p for p in parameters if p.grad is not None]
        total = 0.0
        for parameter in sorted(present, key=lambda p: self._unit(p)):
            total += self._square_sum(parameter)
        norm = math.sqrt(total) if total == total else total
        gradients = [p.grad for p in present]
        if gradients and all(g.dtype == torch.float32 for g in gradients):  # on a CPU the engine measures fp32 as torch
            norm = torch.nn.utils.get_total_norm(gradients).item()
        coefficient = clip_coefficient(norm, max_norm)
        if not math.isinf(max_norm) and coefficient != ONE:
            for parameter in present:
                kernels.scale(_gradient(parameter), KINDS[parameter.dtype], coefficient)
        return as_tensor(norm, torch.device("cpu"))

    def step(self, number: int) -> None:
        optimizer = self.optimizers[number]
        pairs = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._skips and not all(math.isfinite(self._square_sum(p)) for p, _ in pairs):
            self.skipped += 1
            return
        for parameter, group in pairs:
            state = self._states[id(parameter)]
            state.steps += 1
            moments = tuple(state.moments[name] for name in self._rule.states_used(group))
            scalars = self._rule.scalars(group, state.steps)
            kernels.commit(self._rule, state.master, moments, _gradient(parameter), state.kind, ONE, scalars)
            state.round()

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            state = self._states.get(id(parameter))
            if state is not None:
                state.reconcile()

    def states(self) -> list[dict[str, Any]]:
        made = []
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            made.append({n: self._export(p) for n, p in enumerate(parameters) if self._states[id(p)].steps})
        return made

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Take over states that ``states`` gave."""
        for optimizer, states in zip(self.optimizers, saved, strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                state = self._states[id(parameter)]
                given = states.get(number, {})
                state.steps = int(given.get("step", 1 if given else 0))
                for name, moment in state.moments.items():
                    moment[:] = given[name].reshape(-1).numpy() if name in given else 0
                if "master" in given:
                    state.master[:] = given["master"].reshape(-1).numpy()
                    state.reconcile()

    def _export(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self._states[id(parameter)]
        shape = parameter.shape
        made: dict[str, Any] = {name: torch.tensor(moment).view(shape) for name, moment in state.moments.items()}
        if self._rule.name != "sgd":
            made["step"] = torch.tensor(float(state.steps))
        if parameter.dtype != torch.float32:
            made["master"] = torch.tensor(state.master).view(shape)
        return made

    def _unit(self, parameter: nn.Parameter) -> tuple[bool, int]:
        is_resident, index = self._order[id(parameter)]
        return is_resident, 0 if is_resident else index

    def _square_sum(self, parameter: nn.Parameter) -> float:
        out = np.zeros(block_count(parameter.numel()), np.float64)
        kernels.sum_squares(_gradient(parameter), KINDS[parameter.dtype], out)
        return float(out.sum())


def _commit_some(policy: RedoLog, choose: random.Random, units: Iterable[Unit]) -> None:
    for unit in units:
        if not unit.is_resident and choose.random() < 0.5:
            policy.commit(unit)


def _gradient(parameter: nn.Parameter) -> np.ndarray:
    return numpy_view(parameter.grad.detach().view(-1))
