"""Before anything is allocated: the plan for this model on this machine, and the refusal of one that cannot work.

A refusal needs certainty: the least that the engine can work with against the most that there is (page cache, this
process's own reserved device memory and swap count as there). Between that and the prediction there is a warning.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import SlideFormerConfig
from ..errors import PlanError
from ..optim.rules import rule_for
from ..plan import Ledger, Part, Partition, Terms, ledger_of
from ..plan.host_budget import probe_host_budget
from ..plan.machine import Machine, free_space, probe_machine
from ..plan.planner import Choices, Request, make_plan
from ..plan.rates_cache import with_cached_rates
from ..plan.remedies import gib
from ..plan.words import host_parts, paragraph, refusal, shortage

logger = logging.getLogger(__name__)

USUAL_MOMENTS = 2
"""Of AdamW, as long as the optimizer is not known."""


class Preflight:
    """The plan of one model.

    Args:
        model: nothing of it has been moved.
        parts: its units.
        config: ``gpu_memory`` and ``host_memory`` cap the plan.
        device: where compute runs.
        optimizers: that will train it, where the caller knows them already.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Partition,
        config: SlideFormerConfig,
        device: torch.device,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._parts = parts
        self._known = [weakref.ref(optimizer) for optimizer in optimizers]
        self._bound = False
        self._held = _host_bytes(model)
        self._nvme_path = config.nvme_path
        machine = with_cached_rates(_machine(device, config.nvme_path))
        choices = Choices.of(config, moments=_moments(optimizers) if optimizers else USUAL_MOMENTS)
        self.plan = make_plan(Request(parts=parts, machine=machine, choices=choices, host_base=-self._held))

    def check(self) -> Terms:
        """Say what the plan is, and return what it decides.

        Raises:
            PlanError: it cannot fit, whatever the batch.
        """
        self._check_device()
        known = [optimizer for reference in self._known if (optimizer := reference()) is not None]
        if known:
            self._check_states(known, are_weights_placed=False)
        if self.plan.shortages:
            logger.warning(
                "SlideFormer: memory may not suffice. %s. These are peaks that need not come at once, so the run goes"
                " on.",
                shortage(self.plan),
            )
        logger.info("SlideFormer: %s", paragraph(self.plan))
        return self.plan.terms

    def before_bind(self, optimizer: Optimizer) -> None:
        """States of ``optimizer`` are about to be allocated. One that the plan was made with is known to fit.

        Raises:
            PlanError: they cannot fit.
        """
        if not self._bound and not any(optimizer is known() for known in self._known):
            self._check_states([optimizer], are_weights_placed=True)
        self._bound = True  # what a later optimizer takes over is there already

    def _check_states(self, optimizers: Sequence[Optimizer], *, are_weights_placed: bool) -> None:
        """Raise PlanError if host memory cannot hold weights, and states and gradients of what ``optimizers`` train, or
        the disk the states that go there.

        ``are_weights_placed``: whether the weights are in their slabs already, so that only the rest is to come.
        """
        request, trained = self.plan.request, _parameters(optimizers)
        terms = replace(
            self.plan.terms,
            moments=_moments(optimizers),
            spares=0,
            # the GPU may hold the edge units altogether
            edges_update_on_device=request.machine.has_gpu,
        )
        ledger = ledger_of(_only_trained(self._parts, trained), terms)
        cap = request.choices.host_memory
        if cap is not None and ledger.host_least > cap:
            raise self._host_refusal(ledger, f"at most {gib(cap)} (host_memory)")
        host = probe_host_budget() if are_weights_placed else request.machine.host
        to_come = ledger.host_least - (ledger.host_weights if are_weights_placed else self._held)
        if to_come > host.available + host.swap:
            more = f"at most {gib(host.available + host.swap)} beside what the process holds ({host.limited_by})"
            raise self._host_refusal(ledger, more)
        self._check_nvme(ledger, are_weights_placed=are_weights_placed)

    def _check_nvme(self, ledger: Ledger, *, are_weights_placed: bool) -> None:
        request = self.plan.request
        if self._nvme_path is None or not ledger.nvme_states:
            return
        free = free_space(self._nvme_path) if are_weights_placed else request.machine.nvme_free
        if ledger.nvme_states > free:
            now = make_plan(replace(request, machine=replace(request.machine, nvme_free=free)))
            raise refusal(
                now,
                f"The optimizer states that go to NVMe do not fit on the disk of {self._nvme_path}.",
                f"at least {ledger.nvme_states:,} bytes needed there ({gib(ledger.nvme_states)})",
                f"at most {free:,} bytes ({gib(free)}), which are free",
            )

    def _check_device(self) -> None:
        request = self.plan.request
        if not request.machine.has_gpu:
            return
        least = replace(self.plan.terms, prefetch=request.choices.prefetch or 0, edges_update_on_device=False)
        ledger = ledger_of(self._parts, least)
        needed = ledger.device_slots + ledger.device_edges
        if needed > request.gpu_budget:
            cap = request.choices.gpu_memory
            limit = "gpu_memory" if cap == request.gpu_budget else f"free, of {gib(request.machine.gpu_total)}"
            slots = f"slots {gib(ledger.device_slots)}, embeddings and head {gib(ledger.device_edges)}"
            raise refusal(
                self.plan,
                "The model cannot be trained with this GPU memory.",
                f"at least {gib(needed)} needed before any activation ({slots})",
                f"at most {gib(request.gpu_budget)} ({limit})",
            )

    def _host_refusal(self, ledger: Ledger, limit: str) -> PlanError:
        return refusal(
            self.plan,
            "The model cannot be trained with this host memory.",
            f"at least {gib(ledger.host_least)} needed ({host_parts(ledger, ledger.host_pending)})",
            limit,
        )


def _moments(optimizers: Sequence[Optimizer]) -> int:
    """Arrays per parameter that these optimizers keep for certain; none is known of a class that runs as itself."""
    counts = []
    for optimizer in optimizers:
        rule = rule_for(optimizer)
        counts += [len(rule.states_used(group)) if rule is not None else 0 for group in optimizer.param_groups]
    return min(counts, default=0)


def _parameters(optimizers: Sequence[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _only_trained(parts: Partition, trained: set[int]) -> Partition:
    """The same units, in which parameters that no optimizer holds count as frozen."""

    def without(part: Part) -> Part:
        pairs = zip(part.parameters, part.specs, strict=True)
        specs = tuple(spec if id(p) in trained else spec._replace(is_trainable=False) for p, spec in pairs)
        return part._replace(specs=specs)

    return parts._replace(sliding=tuple(map(without, parts.sliding)), edges=tuple(map(without, parts.edges)))


def _machine(device: torch.device, nvme_path: str | None) -> Machine:
    return probe_machine(device if device.type == "cuda" else torch.device("cpu"), nvme_path)


def _host_bytes(model: nn.Module) -> int:
    """Bytes of parameters in host memory now, which are given back as slabs are filled."""
    on_host = [parameter for parameter in model.parameters() if parameter.device.type == "cpu"]
    return sum(parameter.numel() * parameter.element_size() for parameter in on_host)
