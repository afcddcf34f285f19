"""Runs one script twice, on plain PyTorch and on a managed model, and compares everything it looked at.

A script is a function of a :class:`Run`. It builds nothing itself that differs between the two: ``run.model`` is the
plain or the managed model, ``run.optimizer`` binds or does not, ``run.see`` notes a value. One run happens after the
other, never interleaved, so that neither hides the races of the other.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from slideformer_backend.api import attach
from slideformer_backend.config import SlideFormerConfig
from slideformer_backend.optim.norm import clip_coefficient
from slideformer_backend.optim.rules import rule_for
from slideformer_backend.plan import find_blocks

POLICIES = ("exact", "immediate")
PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
"""Dtype of the model, and of the autocast around its forward."""


@dataclass
class Run:
    """One of the two runs of a script."""

    model: nn.Module
    device: torch.device
    engine: object = None
    autocast: torch.dtype | None = None
    policy: str = "exact"
    seen: list = field(default_factory=list)
    is_last: bool = True
    is_split: bool = False

    @property
    def is_managed(self) -> bool:
        return self.engine is not None

    def optimizer(self, cls, params=None, **options):
        """An optimizer over ``params`` (all trainable ones by default), bound to the engine in the managed run."""
        if params is None:
            params = [p for p in self.model.parameters() if p.requires_grad]
        return self.bind(cls(params, **options))

    def bind(self, optimizer):
        if self.engine is not None:
            self.engine.bind(optimizer)
        else:
            step_on_masters(optimizer, half_up=self.has_split_masters(optimizer))
        return optimizer

    def has_split_masters(self, optimizer):
        """Whether bf16 weights are the upper half of a split master, which rounds halves up (DESIGN 5)."""
        return self.is_split or (self.policy == "immediate" and rule_for(optimizer) is not None)

    def forward(self, *args, **kwargs):
        with self.cast():
            return self.model(*args, **kwargs)

    def cast(self):
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast)

    def backward(self, loss, *, is_last=True, **options):
        """``loss.backward()``, with what ``accumulate`` would tell the engine about the step to come."""
        self.is_last = is_last
        loss.backward(**options)

    def clip(self, max_norm, params=None, norm_type=2.0):
        """The total norm, after clipping to it by the definition of DESIGN 4.5 (fp64 norm)."""
        params = list(self.model.parameters()) if params is None else list(params)
        if self.engine is not None:
            norm = self.engine.clip_grad_norm_(params, max_norm, norm_type)
        else:
            norm = clip_by_definition(params, max_norm, norm_type)
        self.see("norm", norm)
        return norm

    def see(self, label, value):
        """Note a value; tensors are copied to the CPU."""
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", copy=True)
        self.seen.append((label, value))

    def see_gradients(self):
        """Every gradient; under ``immediate`` they are spent when backward returns."""
        if self.policy == "immediate":
            return
        for name, parameter in self.model.named_parameters():
            self.see(f"grad {name}", parameter.grad)

    def see_weights(self):
        for name, parameter in self.model.named_parameters():
            self.see(f"weight {name}", parameter)


def step_on_masters(optimizer, *, half_up=False):
    """The reference: the optimizer itself, on fp32 host masters. On CPU and fp32 this is the optimizer itself.

    A weight that user code wrote since the last step is taken over by its master.
    """
    masters, kept = {}, []

    def rounded(master, dtype):
        if half_up and dtype == torch.bfloat16:
            return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        return master.to(dtype)

    def before(optimizer, args, kwargs):
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:  # it runs the model
            with torch.enable_grad():
                loss = closure()
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
                continue
            shown = parameter.data
            master = masters.setdefault(parameter, shown.float().cpu())
            changed = rounded(master, shown.dtype).ne(shown.cpu())
            master[changed] = shown.float().cpu()[changed]
            gradient, parameter.grad = parameter.grad, None
            parameter.data = master
            parameter.grad = None if gradient is None else gradient.float().cpu()
            kept.append((parameter, shown, gradient))
            state = optimizer.state.get(parameter, {})
            state.update({name: value.cpu() for name, value in state.items() if isinstance(value, torch.Tensor)})
        return (optimizer, None if closure is None else lambda: loss), {}

    def after(optimizer, args, kwargs):
        for parameter, shown, gradient in kept:
            parameter.grad = None
            master = masters[parameter] = parameter.data
            parameter.data = shown.copy_(rounded(master, shown.dtype))
            parameter.grad = gradient
        kept.clear()

    if any(p.dtype != torch.float32 or p.device.type != "cpu" for g in optimizer.param_groups for p in g["params"]):
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def clip_by_definition(params, max_norm, norm_type=2.0):
    """Torch's own ``clip_grad_norm_`` for fp32 on the CPU and for other norms; else the fp64 norm of DESIGN 4.5."""
    params = list(params)
    gradients = [p.grad for p in params if p.grad is not None]
    if norm_type != 2.0 or all(g.dtype == torch.float32 and g.device.type == "cpu" for g in gradients):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    total = sum(float(g.double().square().sum()) for g in gradients)
    norm = float(np.sqrt(total))
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1 and not np.isinf(max_norm):
        for gradient in gradients:
            gradient.mul_(torch.tensor(coefficient))  # on the host: on the device it would be rounded to the dtype
    return torch.tensor(norm, dtype=torch.float32)


def separate_inputs(model):
    """Give every block inputs of its own, as a managed unit has: the block's gradient terms then add up first.

    Where a block's input is used elsewhere too (an encoder's output), sums in another order differ by roundings.
    """

    def own(value):
        return value.view_as(value) if isinstance(value, torch.Tensor) and value.requires_grad else value

    def hook(module, args, kwargs):
        return tree_map(own, args), tree_map(own, kwargs)

    for block in find_blocks(model):
        block.module.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def run_plain(make, script, device, *, policy="exact", autocast=None, seed=0, separate=False):
    """What ``script`` sees on plain PyTorch."""
    torch.manual_seed(seed)
    model = make().to(device)
    if separate:
        separate_inputs(model)
    run = Run(model, device, autocast=autocast, policy=policy)
    torch.manual_seed(seed + 1)
    script(run)
    return run


def run_managed(make, script, device, *, policy="exact", autocast=None, seed=0, monitor=None, **config):
    """What ``script`` sees on a managed model; the engine is detached at the end."""
    torch.manual_seed(seed)
    model = make()
    settings = SlideFormerConfig(update=policy, **config)
    engine = attach(model, settings, device=device, autocast_dtype=autocast, monitor=monitor)
    run = Run(model, device, engine, autocast=autocast, policy=policy)
    engine.last_microbatch = lambda: run.is_last
    torch.manual_seed(seed + 1)
    try:
        script(run)
        engine.settle()
    finally:
        engine.detach()
    return run


def check(make, script, device, *, policy="exact", autocast=None, tolerance=None, seed=0, separate=False, **config):
    """Run ``script`` both ways and compare all that was seen; returns the two runs."""
    plain = run_plain(make, script, device, policy=policy, autocast=autocast, seed=seed, separate=separate)
    managed = run_managed(make, script, device, policy=policy, autocast=autocast, seed=seed, **config)
    assert_same(plain.seen, managed.seen, tolerance)
    return plain, managed


def assert_same(expected, found, tolerance=None):
    """Equal bit for bit (NaN equals NaN), or within a tolerance of tests/tolerances.py."""
    assert [label for label, _ in found] == [label for label, _ in expected]
    wrong = []
    for number, ((label, left), (_, right)) in enumerate(zip(expected, found, strict=True)):
        problem = _difference(left, right, tolerance)
        if problem:
            wrong.append(f"#{number} {label}: {problem}")
    more = f"\n... and {len(wrong) - 12} more" if len(wrong) > 12 else ""
    assert not wrong, f"{len(wrong)} of {len(expected)} values differ\n" + "\n".join(wrong[:12]) + more


def _difference(left, right, tolerance):
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return None if left is right or left == right else f"expected {left!r}, found {right!r}"
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"expected {tuple(left.shape)} {left.dtype}, found {tuple(right.shape)} {right.dtype}"
    if not left.is_floating_point():
        return None if torch.equal(left, right) else "differs"
    left, right = left.double(), right.double()
    if tolerance is None:
        is_same = (left == right) | (left.isnan() & right.isnan())
    else:
        relative, absolute = tolerance
        is_same = (left - right).abs() <= absolute + relative * left.abs()
        is_same |= (left == right) | (left.isnan() & right.isnan())
    if bool(is_same.all()):
        return None
    error = (left - right).abs().nan_to_num(float("inf"))
    return f"{int((~is_same).sum())} of {left.numel()} elements, largest error {float(error.max()):.3g}"


def twin(model):
    """A factory that gives equal copies of ``model``."""
    return lambda: copy.deepcopy(model)
