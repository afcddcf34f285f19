"""``strategy: lsp`` (arXiv 2406.10181): weights stay on the device, cores of gradients go to the host and back.

Per matrix: its gradient is measured, compressed and dropped as soon as autograd has it; the core travels to the host,
where the update of ``step()`` is predicted; the update travels back. All this overlaps the backward of the units before
it, and lanes serve the unit first that the next forward needs first. ``step()`` compares predictions with what it was
asked for (clip, hyper-parameters); the weight gets the update when something uses it next, usually the next forward.
So clipping, accumulation (both: ``core_sums``) and dropped steps keep their meaning, and updates of deep units overlap
that forward too.

Parameters that are no matrices, matrices too small to gain, embeddings and head are updated exactly, on the device; the
last two on the host, as with ``strategy: slide``, where the device has no room for their states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ..config import SlideFormerConfig
from ..errors import UnsupportedError
from ..lsp_settings import LspSettings
from ..optim.rules import Rule
from ..optim.workers import WorkerPool
from ..plan.cores import is_compressed
from ..storage import HostMemory, Slab, Tracked
from ..transfer import Backend, copy
from .core import Core, CoreArithmetic, CoreEntry, Partial, Ready
from .core_projectors import Projectors
from .core_sums import GradientSums, is_clip
from .device_units import DeviceUnits
from .edges import device_gradient, set_device_gradient
from .guard import plain
from .norms import Norms
from .operation import follow
from .policy import UpdatePolicy
from .unit import ONE, Entry, ParamRecord, SquareSum, Unit


class CoreUnits(DeviceUnits):
    """Device units whose large matrices are updated through cores.

    Args:
        config: ``lsp`` are the settings.
        backend: lanes and device.
        norms: measures gradients.
        memory: host allocator.
        workers: for the host arithmetic.
        policy: knows whether the last step was clipped, and counts repairs.
    """

    def __init__(
        self,
        config: SlideFormerConfig,
        backend: Backend,
        norms: Norms,
        memory: HostMemory,
        workers: WorkerPool,
        policy: UpdatePolicy,
    ) -> None:
        super().__init__(norms, in_place=False)
        self.settings = LspSettings.from_section(config.lsp)
        self._policy = policy
        self._backend = backend
        self._memory = memory
        self._arithmetic = CoreArithmetic(workers)
        self._projectors = Projectors(self.settings, backend, memory)
        self._sums = GradientSums(backend, memory, norms, config.gpu_memory)

    def take(self, unit: Unit) -> None:
        """Matrices of a block on the device get their cores."""
        for record in unit.trainable:
            shape = tuple(record.spec.shape)
            if is_compressed(shape, self.settings):
                record.core = self._projectors.make(record, shape)
                self._sums.expect(record)

    # -- gradients -------------------------------------------------------------------------------------------------

    def accumulated(self, record: ParamRecord, *, is_last: bool) -> None:
        core = record.core
        if core is None:
            super().accumulated(record, is_last=is_last)
            return
        gradient = device_gradient(record)
        if gradient is not None:
            with self._plainly():
                self._arrive(record, core, plain(gradient).contiguous(), is_last=is_last)
            self._launched[id(record)] = record
            set_device_gradient(record, None)

    def assign(self, record: ParamRecord, value: torch.Tensor) -> None:
        """User code sets the gradient of a matrix."""
        core = record.core
        if core is not None:
            with self._plainly():
                own = torch.empty(record.spec.shape, dtype=record.spec.dtype, device=self._backend.device)
                self._arrive(record, core, own.copy_(value.detach()), is_last=False)
                self._sums.finish()
            self._norms.collect(record.name, [record])

    def collect(self) -> None:
        with self._plainly():
            self._sums.finish()
        earlier = {
            key: record.square_sum
            for key, record in self._launched.items()
            if record.core is not None and not record.core.is_measured_whole
        }
        launched = dict(self._launched)
        super().collect()
        for key, before in earlier.items():
            record = launched[key]
            if before is not None and record.square_sum is not None:
                parts = before.parts if isinstance(before, Partial) else (before,)
                record.square_sum = Partial([*parts, record.square_sum])

    def observe(self, unit: Unit) -> None:
        for record in unit.trainable:
            if record.core is None:
                record.has_gradient = device_gradient(record) is not None

    def _arrive(self, record: ParamRecord, core: Core, gradient: torch.Tensor, *, is_last: bool) -> None:
        backend = self._backend
        core.is_measured_whole = self._sums.measure(record, core, gradient, is_last=is_last)
        if not record.has_gradient and self._projectors.is_due(record):
            self.present(record)  # by the projector that made it
            self._projectors.look(record, core, gradient)
        compressed = self._projectors.compress(core, gradient)
        travelling = Tracked(f"core of {core.name} on the device", compressed.view(-1).view(torch.uint8))
        backend.touch(f"core of {core.name}", writes=(travelling,))
        target = core.gradient if not record.has_gradient else self._landing(core)
        self._void(core)
        core.filled = backend.d2h.submit(
            f"core of {core.name} to the host",
            partial(copy, core.view(target), compressed),
            after={
                "d2h after compute": backend.mark(f"core of {core.name}"),
                "d2h after core used": core.updated,
            },
            reads=(travelling,),
            writes=(target,),
            keep=compressed,
            line=core.line,
        )
        if record.has_gradient:
            self._apply_coefficient(record, core)
            self._operate(
                core,
                f"sum of cores of {core.name}",
                partial(self._arithmetic.add, core, target),
                reads=(target,),
                writes=(core.gradient,),
            )
        else:
            record.square_sum = None
        record.has_gradient, record.coefficient = True, ONE
        if is_last and not self._policy.is_clipping:
            self._predict(record, core)

    @contextlib.contextmanager
    def _plainly(self) -> Iterator[None]:
        """Without graph and autocast: a weight is asked for inside the forward's region, which may have both."""
        with torch.no_grad(), torch.autocast(self._backend.device.type, enabled=False):
            yield

    def _landing(self, core: Core) -> Slab:
        if core.landing is None:
            size = core.numel * core.dtype.itemsize
            core.landing = self._memory.allocate(f"arriving core of {core.name}", size, dma=True)
        return core.landing

    def forget(self, record: ParamRecord) -> None:
        """``grad = None``."""
        if record.core is not None:
            self._void(record.core)
            self._sums.forget(record)

    # -- norms and clips -------------------------------------------------------------------------------------------

    def knows_norm(self, records: Sequence[ParamRecord], max_norm: float) -> bool:
        """False where a mere measurement asks for the norm of a sum that was not kept.

        Raises:
            UnsupportedError: a clip does.
        """
        summed = [record.name for record in records if isinstance(record.square_sum, Partial)]
        if is_clip(max_norm):
            self._sums.expects_clip()
        if summed and is_clip(max_norm):
            raise UnsupportedError(
                "strategy: lsp does not know the norm of this accumulated gradient: a micro-batch leaves its core, and"
                f" {self._sums.reason()}.",
                found=f"{len(summed)} matrices with several micro-batches, first {summed[0]}",
                remedy="accumulate with accelerator.accumulate() or Trainer's gradient_accumulation_steps and clip from"
                " the first step on; or one micro-batch per step, max_grad_norm: 0, or strategy: slide",
            )
        return not summed

    def clip(self, record: ParamRecord) -> None:
        if record.core is None:
            super().clip(record)

    def apply_coefficient(self, record: ParamRecord) -> None:
        """A clip that was recorded becomes a scaled core, since another one follows."""
        core, coefficient = record.core, record.coefficient
        if core is None or coefficient == ONE:
            return
        before = record.square_sum
        self._void(core)
        self._apply_coefficient(record, core)
        self._sums.clip(record, coefficient)
        record.coefficient = ONE
        if before is not None and before.value is not None:
            record.square_sum = SquareSum()
            record.square_sum.value = before.value * float(coefficient) ** 2

    def _apply_coefficient(self, record: ParamRecord, core: Core) -> None:
        if record.coefficient != ONE:
            run = partial(self._arithmetic.scale, core, record.coefficient)
            self._operate(core, f"clip of {core.name}", run, writes=(core.gradient,))

    # -- updates ---------------------------------------------------------------------------------------------------

    def allocate(self, unit: Unit, rule: Rule | None) -> None:
        cores = [record for record in unit.trainable if record.core is not None]
        if rule is None and cores:
            raise UnsupportedError(
                "strategy: lsp runs the optimizer's rule on cores, which needs a fused rule.",
                remedy="use AdamW, Adam, SGD or Lion, or strategy: slide",
            )
        for record in cores:
            _decays_weights(record, rule)
        super().allocate(unit, rule)
        for record in cores:
            if record.core is not None and rule is not None:
                record.core.allocate_states(rule.states_used(record.group or {}), self._memory)

    def absorb(self, unit: Unit) -> None:
        super().absorb(unit)
        for record in unit.trainable:
            self.present(record)

    def settle(self, unit: Unit) -> None:
        super().settle(unit)
        for record in unit.trainable:
            core = record.core
            if core is not None:
                self._backend.synchronize("host waits for core updated", core.updated)
                slabs = tuple(core.states.values())
                self._backend.touch_host(f"settled {core.name}", reads=slabs, writes=slabs)

    def present(self, record: ParamRecord) -> None:
        core = record.core
        if core is None or core.ready is None:
            return
        ready, core.ready = core.ready, None
        self._backend.order("compute after update on the device", ready.sent)
        what = f"update of {core.name}"
        self._backend.touch(what, reads=(ready.tracked,), writes=(record.unit.resident,))
        if ready.update.is_cuda:  # allocated in backward, read on whichever stream is current now
            ready.update.record_stream(torch.cuda.current_stream(ready.update.device))
        with self._plainly():
            core.projector.apply_(plain(record.parameter), ready.update, ready.decay, ready.seed)

    def step(self, records: Sequence[ParamRecord], entries: Sequence[Entry]) -> None:
        pairs = list(zip(records, entries, strict=True))
        exact = [(record, entry) for record, entry in pairs if record.core is None]
        super().step([record for record, _ in exact], [entry for _, entry in exact])
        for record, entry in sorted(pairs, key=lambda pair: pair[0].unit.index):
            if record.core is not None:
                self._step(record, record.core, entry)
        self._sums.after_step()

    def _step(self, record: ParamRecord, core: Core, entry: Entry) -> None:
        self.present(record)
        wanted = self._entry_of_core(record, entry)
        if core.predicted == wanted:
            run = partial(self._arithmetic.commit, core, wanted.entry)
            self._operate(
                core, f"commit of {core.name}", run, reads=(core.gradient,), writes=tuple(core.states.values())
            )
        else:
            self._policy.repairs += core.predicted is not None
            self._send_update(core, wanted, commits=True)
        arriving, sent = core.arriving, core.sent
        core.predicted = core.arriving = None
        if arriving is not None and sent is not None:
            seed = (record.steps * 1_000_003 + core.number) & 0x7FFFFFFF
            core.ready = Ready(*arriving, sent, wanted.decay, seed)
        record.steps += 1
        torch.autograd.graph.increment_version(plain(record.parameter))  # a graph from before the step is stale

    def _predict(self, record: ParamRecord, core: Core) -> None:
        binding, group = record.binding, record.group
        if binding is not None and binding.rule is not None and group is not None:
            core.predicted = self._entry_of_core(record, binding.entry(record, ONE))
            self._send_update(core, core.predicted, commits=False)

    def _send_update(self, core: Core, wanted: CoreEntry, *, commits: bool) -> None:
        """Compute the update and send it; ``commits``: the step counts already, moments follow in the same pass."""
        backend, moments = self._backend, tuple(core.states.values())
        run = self._arithmetic.update if commits else self._arithmetic.peek
        self._operate(
            core,
            f"update of {core.name}",
            partial(run, core, wanted.entry),
            reads=(core.gradient,) if commits else (core.gradient, *moments),
            writes=(core.update, *moments) if commits else (core.update,),
            is_ahead=True,
        )
        update = torch.empty(core.projector.core_shape, dtype=core.dtype, device=backend.device)
        tracked = Tracked(f"update of {core.name} on the device", update.view(-1).view(torch.uint8))
        backend.touch(f"lease of the memory of {core.name}", writes=(tracked,))
        core.sent = backend.h2d.submit(
            f"update of {core.name} to the device",
            partial(copy, update, core.view(core.update)),
            after={
                "h2d after core updated": core.updated,
                "h2d after memory of update leased": backend.mark(f"memory of the update of {core.name}"),
            },
            reads=(core.update,),
            writes=(tracked,),
            keep=update,
            line=core.line,
        )
        core.arriving = (update, tracked)

    def _entry_of_core(self, record: ParamRecord, entry: Entry) -> CoreEntry:
        # the rule's own 1 - lr · weight_decay, as it rounds it
        decay = float(entry.scalars[1]) if _decays_weights(record, entry.rule) else 1.0
        scalars = entry.rule.scalars({**(record.group or {}), "weight_decay": 0.0}, record.steps + 1)
        return CoreEntry(entry._replace(scalars=scalars), decay)

    @staticmethod
    def _void(core: Core) -> None:
        core.predicted = core.arriving = None

    def _operate(
        self,
        core: Core,
        name: str,
        run: partial[None],
        *,
        reads: Sequence[Tracked] = (),
        writes: Sequence[Tracked] = (),
        is_ahead: bool = False,
    ) -> None:
        before = core.updated

        def run_behind() -> None:
            follow(before)  # the same line of the same lane keeps the order; a failure goes on to what builds on it
            run()

        core.updated = self._backend.update.submit(
            name,
            run_behind,
            after={
                "update after core filled": core.filled,
                "update after last update sent": core.sent if is_ahead else None,
            },
            reads=reads,
            writes=writes,
            line=core.line,
        )


def _decays_weights(record: ParamRecord, rule: Rule | None) -> bool:
    """Whether the weight itself decays; raises UnsupportedError where the decay is a part of the gradient."""
    decay = float((record.group or {}).get("weight_decay", 0.0))
    if decay and rule is not None and rule.name not in ("adamw", "lion"):
        raise UnsupportedError(
            f"strategy: lsp cannot add the weight decay of {record.name} to a gradient: it has its core.",
            found=f"{rule.name} with weight_decay {decay}",
            remedy="take AdamW, whose decay is apart from the gradient, or weight_decay 0",
        )
    return bool(decay)
