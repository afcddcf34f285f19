"""What the machine can do at best: matrix products, transfers each way and at once, the CPU update's memory traffic.

Every figure is the best of a few repetitions on random data. Host memory is measured with the update's own mix of reads
and writes (master, two moments, two gradients, working weights), once alone and once while the GPU copies both ways, as
it does in training; and with the update's own arithmetic on the same arrays, which says how far the kernel is from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

BYTES = {"advance": 30, "update": 26, "peek": 16, "commit": 26}
"""Per parameter of a bf16 model with fp32 states: what each kind of update reads plus what it writes."""

_REPETITIONS = 5


def measure_limits(device: torch.device, *, quick: bool = False, elements: int | None = None) -> dict[str, float]:
    """The limits, in FLOP/s, byte/s and parameters/s.

    ``quick``: small sizes, for tests; ``elements``: of the host's arrays (None: 128 Mi, or 256 Ki when quick).

    Keys: ``gemm``; ``gpu_memory``, ``h2d``, ``d2h``, ``h2d_both``, ``d2h_both`` (CUDA only); ``host_mix``,
    ``host_mix_dma``: byte/s; ``advance``, ``advance_dma``, ``peek``, ``update``: parameters/s of the kernels;
    ``threads``.
    """
    limits: dict[str, float] = {"gemm": _gemm(device, 256 if quick else 8192)}
    link = None
    if device.type == "cuda":
        limits["gpu_memory"] = _device_copy(device, 1 << (22 if quick else 31))
        link = _Link(device, 1 << (22 if quick else 29))
        limits |= link.measure()
    limits |= _host(elements or 1 << (18 if quick else 27), link)
    return limits


def _best(run: Callable[[], float], repetitions: int = _REPETITIONS) -> float:
    return min(run() for _ in range(repetitions))


def _gemm(device: torch.device, size: int) -> float:
    left = torch.randn(size, size, device=device).bfloat16()
    right = torch.randn(size, size, device=device).bfloat16()

    def run() -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            torch.mm(left, right)
            return time.perf_counter() - start
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(10):
            torch.mm(left, right)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e4

    run()
    return 2.0 * size**3 / _best(run)


def _device_copy(device: torch.device, nbytes: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        target.copy_(source)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    run()
    return 2.0 * nbytes / _best(run)


class _Link:
    """Copies between pinned host memory and the device, on a stream per direction."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._size = nbytes
        self._host = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._remote = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]

    def start(self, *, up: int, down: int) -> None:
        """Queue this many copies each way; does not block."""
        with torch.cuda.stream(self._streams[0]):
            for _ in range(up):
                self._remote[0].copy_(self._host[0], non_blocking=True)
        with torch.cuda.stream(self._streams[1]):
            for _ in range(down):
                self._host[1].copy_(self._remote[1], non_blocking=True)

    def is_idle(self) -> bool:
        """Whether one of the two directions has run out of copies."""
        return any(stream.query() for stream in self._streams)

    def wait(self) -> None:
        """Until all copies are done."""
        for stream in self._streams:
            stream.synchronize()

    def measure(self) -> dict[str, float]:
        """Rates in byte/s, each way alone and both at once."""

        def timed(up: int, down: int) -> float:
            start = time.perf_counter()
            self.start(up=up, down=down)
            self.wait()
            return time.perf_counter() - start

        timed(1, 1)
        count = 4
        both = count * self._size / _best(partial(timed, count, count))
        return {
            "h2d": count * self._size / _best(partial(timed, count, 0)),
            "d2h": count * self._size / _best(partial(timed, 0, count)),
            "h2d_both": both,
            "d2h_both": both,
        }


def _host(count: int, link: _Link | None) -> dict[str, float]:
    from slideformer_backend.optim.norm import BLOCK
    from slideformer_backend.optim.workers import WorkerPool, default_threads

    threads = default_threads()
    pool = WorkerPool(threads)
    size = max(BLOCK, -(-count // threads // BLOCK) * BLOCK)
    count = size * threads
    arrays = _Arrays(count)
    parts = [slice(start, start + size) for start in range(0, count, size)]

    def timed(kernel: Callable[[slice], None], *, dma: bool = False) -> float:
        jobs: list[Callable[[], None]] = [partial(kernel, part) for part in parts]
        if dma and link is not None:
            link.start(up=24, down=24)
        start = time.perf_counter()
        pool.run(jobs)
        seconds = time.perf_counter() - start
        if dma and link is not None:
            if link.is_idle():
                raise RuntimeError("the copies ended before the host's work: use more of them")
            link.wait()
        return seconds

    found = {"threads": float(threads)}
    for name, kernel in arrays.kernels().items():
        timed(kernel)  # compiles, and touches all pages
        found[name] = count / _best(partial(timed, kernel))
        if link is not None and name in ("mix", "advance"):
            found[f"{name}_dma"] = count / _best(partial(timed, kernel, dma=True), 3)
    pool.close()
    for name in ("mix", "mix_dma"):
        if name in found:
            found[f"host_{name}"] = found.pop(name) * BYTES["advance"]
    return found


class _Arrays:
    """Host arrays of one large imaginary parameter, and what runs over slices of them."""

    def __init__(self, count: int) -> None:
        random = np.random.default_rng(0)
        self._master, self._first = (random.standard_normal(count, np.float32) for _ in range(2))
        self._second = np.abs(self._first)
        self._old, self._new = (_bf16(1e-3 * random.standard_normal(count, np.float32)) for _ in range(2))
        self._weights = np.zeros(count, np.uint16)

    def kernels(self) -> dict[str, Callable[[slice], None]]:
        """``mix``: the traffic alone; the others: the rules."""
        import numba

        from slideformer_backend.optim import numba_kernels
        from slideformer_backend.optim.rules import RULES, Pending

        rule = RULES["adamw"]
        scalars = rule.scalars(torch.optim.AdamW([torch.zeros(1)]).param_groups[0], 1)
        one = np.float32(1.0)

        @numba.njit(nogil=True, fastmath=False, error_model="numpy")
        def mix(p: Any, m: Any, v: Any, old: Any, new: Any, w: Any) -> None:
            for i in range(p.size):
                x = np.float32(old[i]) + np.float32(new[i])
                p[i] += x
                m[i] += x
                v[i] += x
                w[i] = old[i] ^ new[i]

        def advance(part: slice) -> None:
            old, new = (Pending(g[part], "bf16", one, scalars) for g in (self._old, self._new))
            numba_kernels.advance(rule, self._master[part], self._moments(part), old, new, self._weights[part], "bf16")

        def plain(kernel: Callable[..., None], part: slice) -> None:
            gradient = self._new[part]
            kernel(
                rule,
                self._master[part],
                self._moments(part),
                gradient,
                "bf16",
                one,
                scalars,
                self._weights[part],
                "bf16",
            )

        def traffic(part: slice) -> None:
            mix(self._master[part], *self._moments(part), self._old[part], self._new[part], self._weights[part])

        return {
            "mix": traffic,
            "advance": advance,
            "peek": partial(plain, numba_kernels.peek),
            "update": partial(plain, numba_kernels.update),
        }

    def _moments(self, part: slice) -> tuple[Any, Any]:
        return self._first[part], self._second[part]


def _bf16(values: Any) -> Any:
    """The bits of ``values`` as bf16. Random bits would not do: squares of the smallest numbers are denormal, which
    costs a processor a hundred times the work of a gradient."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
