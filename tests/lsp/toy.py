"""A model with matrices on both sides of the rank, the engine over it, and the same training by sequential torch.

The sequential side owns the same projectors and runs every step to its end before the next: it is the synchronous
schedule, and knows nothing of lanes, predictions or lazily applied updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from slideformer_backend.api import Engine, attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.engine.unit import KINDS, ONE
from slideformer_backend.lsp import Beta, OrthonormalProjector, SparseProjector, carry_moments
from slideformer_backend.lsp_settings import LspSettings
from slideformer_backend.optim import twins
from slideformer_backend.optim.norm import block_count, clip_coefficient
from slideformer_backend.optim.rules import rule_for
from slideformer_backend.plan.cores import is_compressed
from slideformer_backend.transfer import Monitor

SETTINGS = {"rank": 8, "nonzeros": 3, "check_interval": 3, "alpha": 0.6, "timeout": 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.up = nn.Linear(20, 27)
        self.small = nn.Linear(27, 6, bias=False)
        self.mix = nn.Linear(6, 6, bias=False)
        self.down = nn.Linear(6, 20, bias=False)
        self.out = nn.Linear(27, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.out(hidden) + self.down(self.mix(self.small(hidden)))


class Toy(nn.Module):
    """In each block ``up`` and ``out`` have cores of 8 x 8, ``small`` and ``down`` of 6 x 8 and 8 x 6, ``mix`` none."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 20)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Toy().to(dtype)


def make_optimizer(model: nn.Module, rule: str = "adamw", lr: float = 2e-2) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]
    if rule == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(iter(model.parameters())).dtype
    x = torch.randn(16, 7, generator=generator)
    target = torch.sin(3 * x.flip(1))
    device = getattr(model, "device_of_inputs", torch.device("cpu"))
    with torch.autocast(device.type, torch.bfloat16, enabled=getattr(model, "autocasts", False)):
        found = model(x.to(device, dtype))
    return (found.float() - target.to(found.device)).square().mean()


@dataclass(frozen=True)
class Event:
    """``backward`` (batch, is it the last before a step), ``clip`` (bound), ``step``, ``zero``, ``lr``, ``read``, or
    ``assign`` (name of a matrix: user code sets its gradient, to ones)."""

    name: str
    value: Any = None


class EngineSide:
    def __init__(
        self,
        dtype: torch.dtype,
        rule: str = "adamw",
        monitor: Monitor | None = None,
        lr: float = 2e-2,
        device: str = "cpu",
        autocasts: bool = False,
        **lsp: Any,
    ) -> None:
        self.model = make_model(dtype)
        self.optimizer = make_optimizer(self.model, rule, lr)
        self.engine: Engine = attach(
            self.model,
            SlideFormerConfig(strategy="lsp", lsp={**SETTINGS, **lsp}, cpu_threads=1),
            device=torch.device(device),
            autocast_dtype=torch.bfloat16 if autocasts else None,
            monitor=monitor,
        )
        self.model.device_of_inputs, self.model.autocasts = self.engine.device, autocasts
        self.engine.bind(self.optimizer)

    def run(self, events: Sequence[Event]) -> list[Any]:
        shown: list[Any] = []
        for event in events:
            if event.name == "backward":
                batch, is_last = event.value
                self.engine.last_microbatch = lambda flag=is_last: flag
                loss = loss_of(self.model, batch)
                loss.backward()
                shown.append(loss.detach().clone())
            elif event.name == "clip":
                shown.append(self.engine.clip_grad_norm_(self.model.parameters(), event.value))
            elif event.name == "step":
                self.optimizer.step()
            elif event.name == "zero":
                self.optimizer.zero_grad()
            elif event.name == "lr":
                for group in self.optimizer.param_groups:
                    group["lr"] = event.value
            elif event.name == "read":
                shown += [parameter.detach().clone() for parameter in self.model.parameters()]
            elif event.name == "assign":
                weight = self.model.get_parameter(event.value)
                weight.grad = torch.ones_like(weight)
        return shown

    def core(self, name: str):
        core = self.engine.record_of(self.model.get_parameter(name)).core
        assert core is not None
        return core

    def close(self) -> None:
        try:
            if not self.engine.is_detached:
                self.engine.detach()
        finally:
            self.engine.backend.close()
            self.engine.workers.close()


class _Matrix:
    """A matrix of the sequential side."""

    def __init__(self, shape: tuple[int, ...], number: int, settings: LspSettings, dtype: torch.dtype) -> None:
        device = torch.device("cpu")
        if settings.projector == "lsp":
            self.projector: Any = SparseProjector.random(
                shape, settings.rank, settings.nonzeros, seed=number, device=device
            )
        else:
            self.projector = OrthonormalProjector.random(shape, settings.rank, seed=number, device=device)
        self.number = number
        self.residual = torch.zeros(shape, dtype=dtype)
        self.core: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        """The gradient itself, which only its norm is taken of."""


class PlainSide:
    """Sequential torch with the same arithmetic."""

    def __init__(
        self, dtype: torch.dtype, rule: str = "adamw", lr: float = 2e-2, autocasts: bool = False, **lsp: Any
    ) -> None:
        self.settings = LspSettings(**{**SETTINGS, **lsp})
        self.model = make_model(dtype)
        self.model.autocasts = autocasts
        self.optimizer = make_optimizer(self.model, rule, lr)
        found = rule_for(self.optimizer)
        assert found is not None
        self.rule = found
        self.groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        self.steps = {id(p): 0 for p in self.model.parameters()}
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self.masters = {id(p): p.detach().float().clone() for p in self.model.parameters()}
        self.matrices: dict[int, _Matrix] = {}
        self.squares: dict[int, float] = {}
        self.coefficients: dict[int, np.float32] = {}
        for block in self.model.blocks:
            for parameter in block.parameters():
                if is_compressed(parameter.shape, self.settings):
                    number = len(self.matrices)
                    self.matrices[id(parameter)] = _Matrix(tuple(parameter.shape), number, self.settings, dtype)

    def run(self, events: Sequence[Event]) -> list[Any]:
        shown: list[Any] = []
        for event in events:
            if event.name == "backward":
                loss = loss_of(self.model, event.value[0])
                loss.backward()
                shown.append(loss.detach().clone())
                for parameter in self.model.parameters():
                    self._arrived(parameter)
            elif event.name == "clip":
                shown.append(self._clip(event.value))
            elif event.name == "step":
                for parameter in self.model.parameters():
                    self._step(parameter)
            elif event.name == "zero":
                self.optimizer.zero_grad()
                for matrix in self.matrices.values():
                    matrix.core = None
                self.coefficients.clear()
            elif event.name == "lr":
                for group in self.optimizer.param_groups:
                    group["lr"] = event.value
            elif event.name == "read":
                shown += [parameter.detach().clone() for parameter in self.model.parameters()]
            elif event.name == "assign":
                weight = self.model.get_parameter(event.value)
                self.matrices[id(weight)].core = None
                self.coefficients.pop(id(weight), None)
                weight.grad = torch.ones_like(weight)
                self._arrived(weight)
        return shown

    def _arrived(self, parameter: nn.Parameter) -> None:
        gradient, matrix = parameter.grad, self.matrices.get(id(parameter))
        assert gradient is not None
        self.squares[id(parameter)] = _squares(gradient)
        if matrix is None:
            return
        parameter.grad = None
        if matrix.core is None:
            matrix.total = gradient.clone()
        else:
            twins.scale(matrix.total.view(-1), KINDS[gradient.dtype], self.coefficients.get(id(parameter), ONE))
            matrix.total += gradient
            self.squares[id(parameter)] = _squares(matrix.total)
        if matrix.core is None and self.steps[id(parameter)] % self.settings.check_interval == 0:
            self._look(parameter, matrix, gradient)
        whole = gradient + matrix.residual if matrix.projector.keeps_residual else gradient
        core = matrix.projector.compress(whole)
        if matrix.projector.keeps_residual:
            matrix.residual = (whole - matrix.projector.expand(core)).to(whole.dtype)
        if matrix.core is not None:
            twins.scale(matrix.core.view(-1), KINDS[core.dtype], self.coefficients.get(id(parameter), ONE))
            core = matrix.core + core
        matrix.core = core
        self.coefficients.pop(id(parameter), None)

    def _look(self, parameter: nn.Parameter, matrix: _Matrix, gradient: torch.Tensor) -> None:
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        steps = self.steps[id(parameter)]
        error = matrix.projector.error(matrix.projector.compress(gradient.float()), norm)
        if not error > self.settings.alpha:
            return
        learned = matrix.projector.learn(
            [gradient], alpha=self.settings.alpha, timeout=self.settings.timeout, seed=steps * 7919 + matrix.number
        )
        if learned.error < error:
            if steps:
                group = self.groups[id(parameter)]
                beta = Beta(*group["betas"], steps) if self.settings.projector == "orthonormal" else None
                overlaps = learned.projector.overlaps(matrix.projector)
                self.states[id(parameter)] = carry_moments(self.states[id(parameter)], overlaps, beta)
            matrix.projector = learned.projector

    def _clip(self, max_norm: float) -> torch.Tensor:
        present = [p for p in self.model.parameters() if p.grad is not None or self._core_of(p) is not None]
        blocks = [p for p in present if p in set(self.model.blocks.parameters())]
        edges = [p for p in present if p not in set(blocks)]
        for parameter in present:  # what an earlier clip left
            coefficient = self.coefficients.pop(id(parameter), ONE)
            core = self._core_of(parameter)
            if parameter.grad is not None:
                self.squares[id(parameter)] = _squares(parameter.grad)
            elif core is not None and coefficient != ONE:
                for tensor in (core, self.matrices[id(parameter)].total):
                    twins.scale(tensor.view(-1), KINDS[core.dtype], coefficient)
                self.squares[id(parameter)] *= float(coefficient) ** 2
        total = 0.0
        for parameter in (*blocks, *edges):
            total += self.squares[id(parameter)]
        norm = float(np.sqrt(total))
        coefficient = clip_coefficient(norm, max_norm)
        if coefficient != ONE:
            for parameter in present:
                if parameter.grad is not None:
                    twins.scale(parameter.grad.view(-1), KINDS[parameter.dtype], coefficient)
                else:
                    self.coefficients[id(parameter)] = coefficient
        return torch.tensor(norm, dtype=torch.float32)

    def _core_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        matrix = self.matrices.get(id(parameter))
        return None if matrix is None else matrix.core

    @torch.no_grad()
    def _step(self, parameter: nn.Parameter) -> None:
        key, group = id(parameter), self.groups[id(parameter)]
        matrix, kind = self.matrices.get(key), KINDS[parameter.dtype]
        scalars = self.rule.scalars(group, self.steps[key] + 1)
        states = self.states.setdefault(key, {})
        names = self.rule.states_used(group)
        if matrix is None:
            if parameter.grad is None:
                return
            master = self.masters[key].view(-1)
            held = tuple(states.setdefault(name, torch.zeros_like(master)) for name in names)
            gradient, target = parameter.grad.reshape(-1), parameter.data.view(-1)
            twins.update(self.rule, master, held, gradient, kind, ONE, scalars, target, kind)
        elif matrix.core is not None:
            shape = matrix.core.shape
            held = tuple(states.setdefault(name, torch.zeros(shape)).view(-1) for name in names)
            update, nothing = torch.zeros(shape, dtype=parameter.dtype), torch.zeros(shape).view(-1)
            bare = self.rule.scalars({**group, "weight_decay": 0.0}, self.steps[key] + 1)
            c = self.coefficients.get(key, ONE)
            twins.update(self.rule, nothing, held, matrix.core.view(-1), kind, c, bare, update.view(-1), kind)
            decay = float(scalars[1]) if group.get("weight_decay") else 1.0
            seed = (self.steps[key] * 1_000_003 + matrix.number) & 0x7FFFFFFF
            matrix.projector.apply_(parameter.data, update, decay, seed)
        else:
            return
        self.steps[key] += 1


def _squares(gradient: torch.Tensor) -> float:
    partials = torch.zeros(block_count(gradient.numel()), dtype=torch.float64)
    twins.sum_squares(gradient.reshape(-1), KINDS[gradient.dtype], partials)
    return float(sum(partials.tolist()))
