"""Before anything is allocated: the plan for this model on this machine, and the refusal of one that cannot work.

A refusal needs certainty: the least that the engine can work with against the most that there is (page cache, this
process's own reserved device memory and swap count as there). Between that and the prediction there is a warning.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import SlideFormerConfig
from ..errors import PlanError
from ..optim.rules import rule_for
from ..plan import Ledger, Part, Partition, Terms, ledger_of
from ..plan.host_budget import probe_host_budget
from ..plan.ledger import spillable_bytes, spilled_parts
from ..plan.machine import Machine, free_space, probe_machine
from ..plan.planner import make_plan
from ..plan.rates_cache import with_cached_rates
from ..plan.remedies import gib
from ..plan.request import Choices, Request
from ..plan.words import host_parts, paragraph, refusal, shortage
from .moves import may_move_to_host
from .unit import ParamRecord, Unit

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

USUAL_MOMENTS = 2
"""Of AdamW, as long as the optimizer is not known."""


class Room(NamedTuple):
    """Where gradients and states of parameters come that train from now on: numbers of units whose states go to NVMe,
    and of units that leave the device again, which has no room for them."""

    spilled: frozenset[int]
    returning: frozenset[int]


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
        self._held = host_bytes(model)
        self._nvme_path = config.nvme_path
        machine = with_cached_rates(machine_of(device, config.nvme_path))
        choices = Choices.of(config, moments=moments_of(optimizers) if optimizers else USUAL_MOMENTS)
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

    def before_admit(self, engine: Engine, records: Sequence[ParamRecord], edges: Sequence[Part]) -> Room:
        """Frozen parameters (``records``, and ``edges`` outside the blocks) are about to get gradients and states.

        Raises:
            PlanError: memory or the disk cannot hold them.
        """
        parts = _with_places(self._parts, {id(record.parameter) for record in records}, edges)
        terms = self._terms_now(engine)
        new = {record.unit.index for record in records}
        new |= {len(engine.units) + number for number in range(len(edges))}
        before = ledger_of(self._parts, terms)
        ways = self._ways(engine, parts, terms, {record.unit for record in records}, new)
        problems = [self._lacking(before, ledger_of(parts, way), engine) for way in ways]
        if None not in problems:
            found, limit = next(problem for problem in reversed(problems) if problem is not None)
            raise PlanError(
                "Parameters that were frozen at prepare() train now, and there is no room for their gradients and"
                " states.",
                found=found,
                expected=limit,
                remedy="unfreeze fewer layers, or have them trainable at prepare(), so that the plan provides for them"
                " (with optimizer_states: nvme, states wait on a disk)",
            )
        chosen = ways[problems.index(None)]
        after = ledger_of(parts, chosen)
        returning = terms.resident - chosen.resident
        logger.info(
            "SlideFormer: %s parameters that were frozen at prepare() train from now on. Host memory: %s (%s), %s more;"
            " NVMe: %s more; GPU: %s more.%s",
            f"{parts.trained - self._parts.trained:,}",
            gib(after.host_least),
            host_parts(after, after.host_pending),
            gib(after.host_least - before.host_least),
            gib(after.nvme_states - before.nvme_states),
            gib(max(0, after.device - before.device)),
            f" {len(returning)} layers that had moved to the GPU slide again." if returning else "",
        )
        self._parts = parts
        self.plan = replace(self.plan, request=replace(self.plan.request, parts=parts))
        return Room(chosen.spilled & new, returning)

    @staticmethod
    def _ways(engine: Engine, parts: Partition, terms: Terms, units: set[Unit], new: set[int]) -> list[Terms]:
        """Where gradients and states of the units numbered ``new`` may be, the best place first."""
        ways = [terms]
        moved = [unit for unit in units if unit.index in terms.resident]
        if moved and all(map(may_move_to_host, moved)):
            ways.append(replace(terms, resident=terms.resident - new))
        if engine.spill.tier is None:
            return ways
        in_files = [replace(way, spilled=way.spilled | new) for way in ways]
        must = engine.config.optimizer_states == "nvme" and not _has_share(parts, terms, engine.config.nvme_fraction)
        return in_files if must else ways + in_files

    def _terms_now(self, engine: Engine) -> Terms:
        """The plan's terms with what has come of them: units that have moved, states that are in files."""
        optimizers = [binding.optimizer for binding in engine.newest_bindings]
        return replace(
            self.plan.terms,
            moments=moments_of(optimizers) if optimizers else self.plan.terms.moments,
            spares=0,
            edges_update_on_device=any(unit.module is None and unit.updates_on_device for unit in engine.units),
            resident=frozenset(u.index for u in engine.units if u.module is not None and u.is_resident),
            spilled=frozenset(unit.index for unit in engine.units if unit.spill is not None),
            filed=frozenset(unit.index for unit in engine.units if unit.filed is not None),
        )

    def _lacking(self, before: Ledger, after: Ledger, engine: Engine) -> tuple[str, str] | None:
        """What is needed and what there is, where that is less; None where it suffices."""
        cap, more = self.plan.request.choices.host_memory, after.host_least - before.host_least
        if cap is not None and after.host_least > cap:
            parts = host_parts(after, after.host_pending)
            return f"at least {gib(after.host_least)} of host memory needed ({parts})", f"{gib(cap)} (host_memory)"
        host = probe_host_budget()
        if more > host.available + host.swap:
            limit = f"{gib(host.available + host.swap)} ({host.limited_by})"
            return f"{gib(more)} more host memory needed", limit
        if self._nvme_path is not None and after.nvme_states > before.nvme_states:
            files, free = after.nvme_states - before.nvme_states, free_space(self._nvme_path)
            if files > free:
                return f"{gib(files)} more on NVMe needed", f"{gib(free)}, which are free on {self._nvme_path}"
        is_tight = after.device_resident > before.device_resident  # for good, where a layer could slide instead
        room = engine.residency.spare if is_tight else engine.residency.room
        if room is not None and after.device - before.device > room:
            return f"{gib(after.device - before.device)} more GPU memory needed", f"{gib(room)}"
        return None

    def _check_states(self, optimizers: Sequence[Optimizer], *, are_weights_placed: bool) -> None:
        """Raise PlanError if host memory cannot hold weights, and states and gradients of what ``optimizers`` train, or
        the disk the states that go there.

        ``are_weights_placed``: whether the weights are in their slabs already, so that only the rest is to come.
        """
        request, trained = self.plan.request, _parameters(optimizers)
        terms = replace(
            self.plan.terms,
            moments=moments_of(optimizers),
            spares=0,
            # the GPU may hold the edge units altogether
            edges_update_on_device=request.machine.has_gpu,
        )
        ledger = ledger_of(_only_trained(self._parts, trained), terms)
        cap = request.choices.host_memory
        if cap is not None and ledger.host_least > cap:
            raise self._host_refusal(ledger, f"at most {gib(cap)} (host_memory)")
        host = probe_host_budget() if are_weights_placed else request.machine.host
        to_come = ledger.host_least - (ledger.host_weights + ledger.host_frames if are_weights_placed else self._held)
        if to_come > host.available + host.swap:
            more = f"at most {gib(host.available + host.swap)} beside what the process holds ({host.limited_by})"
            raise self._host_refusal(ledger, more)
        self._check_nvme(ledger, are_weights_placed=are_weights_placed)

    def _check_nvme(self, ledger: Ledger, *, are_weights_placed: bool) -> None:
        request = self.plan.request
        needed = ledger.nvme_states if are_weights_placed else ledger.nvme
        if self._nvme_path is None or not needed:
            return
        free = free_space(self._nvme_path) if are_weights_placed else request.machine.nvme_free
        if needed > free:
            now = make_plan(replace(request, machine=replace(request.machine, nvme_free=free)))
            what = "weights and optimizer states" if needed > ledger.nvme_states else "optimizer states"
            raise refusal(
                now,
                f"The {what} that go to NVMe do not fit on the disk of {self._nvme_path}.",
                f"at least {needed:,} bytes needed there ({gib(needed)})",
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


def moments_of(optimizers: Sequence[Optimizer]) -> int:
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


def _with_places(parts: Partition, chosen: set[int], edges: Sequence[Part]) -> Partition:
    """The same units, in which the ``chosen`` parameters have places too, and further edge units."""

    def with_chosen(part: Part) -> Part:
        pairs = zip(part.parameters, part.specs, strict=True)
        specs = tuple(spec._replace(is_trainable=True) if id(p) in chosen else spec for p, spec in pairs)
        return part._replace(specs=specs)

    moved = sum(spec.shape.numel() * spec.dtype.itemsize for part in edges for spec in part.specs)
    sliding = tuple(map(with_chosen, parts.sliding))
    return Partition(sliding, (*parts.edges, *edges), parts.frozen_edges - moved)


def _has_share(parts: Partition, terms: Terms, share: float | None) -> bool:
    """Whether that share of the states is in files, at least."""
    everything = sum(spillable_bytes(part, terms) for part in (*parts.sliding, *parts.edges))
    away = sum(spillable_bytes(part, terms) for part in spilled_parts(parts, terms))
    return share is not None and away >= share * everything


def machine_of(device: torch.device, nvme_path: str | None) -> Machine:
    return probe_machine(device if device.type == "cuda" else torch.device("cpu"), nvme_path)


def host_bytes(model: nn.Module) -> int:
    """Bytes of parameters in host memory now, which are given back as slabs are filled."""
    on_host = [parameter for parameter in model.parameters() if parameter.device.type == "cpu"]
    return sum(parameter.numel() * parameter.element_size() for parameter in on_host)
