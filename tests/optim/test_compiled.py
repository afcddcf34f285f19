"""How kernels are compiled: vectorised, without calls, once, before the first step; and how fast they run."""

from __future__ import annotations

import re
import signal
import threading
import time

import numpy as np
import pytest
from optim_cases import F32, make_case, stored

from slideformer_backend.optim import numba_convert, numba_update
from slideformer_backend.optim import numba_kernels as kernels
from slideformer_backend.optim.numba_compile import KernelCache
from slideformer_backend.optim.rules import RULES, Pending

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def compiled(cache: KernelCache):
    return set(cache._kernels)


def loops(kernel):
    """LLVM code of a kernel after optimization."""
    (signature,) = kernel.signatures
    return kernel.inspect_llvm(signature)


@pytest.mark.parametrize(
    ("name", "details"),
    [
        ("commit", ("adamw", 2, "bf16")),
        ("peek", ("adamw", 2, "bf16", "bf16")),
        ("advance", ("adamw", 2, "bf16", "bf16", "bf16")),
        ("update_split", ("adamw", 2, "bf16")),
        ("advance", ("adamw", 2, "fp16", "fp16", "fp16")),
        ("commit", ("sgd", 1, "bf16")),
        ("commit", ("lion", 1, "bf16")),
    ],
)
def test_updates_are_vectorised_and_call_nothing(name, details):
    code = loops(numba_update.kernels(name, *details))
    assert re.search(r"fsub <\d+ x float>|fmul <\d+ x float>", code), "arithmetic on vectors"
    assert re.search(r"call <\d+ x float> @llvm\.fma", code)
    assert re.search(r"load <\d+ x i16>", code), "16-bit loads of whole vectors"
    if name != "commit":
        assert re.search(r"store <\d+ x i16>", code), "16-bit stores of whole vectors"
    if details[0] == "adamw":
        assert re.search(r"call <\d+ x float> @llvm\.sqrt", code)
    called = set(re.findall(r"call [^@\n]*@([\w.]+)", code))
    assert not [c for c in called if not c.startswith(("llvm.", "numba_", "NRT_", "Py", "_ZN"))], called
    assert "contract" not in code
    assert "reassoc" not in code


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["round", "widen", "reconcile", "scale", "sum_squares", "abs_max"])
def test_conversions_are_vectorised(name, kind):
    code = loops(numba_convert.kernels(name, kind))
    assert re.search(r"load <\d+ x (i16|float|i32)>|llvm\.memcpy", code)


@pytest.mark.parametrize("policy", ["exact", "immediate"])
@pytest.mark.parametrize(("g_kind", "w_kind"), [("bf16", "bf16"), ("fp32", "fp32"), ("bf16_as_fp32", "bf16")])
def test_nothing_compiles_after_warm_up(policy, g_kind, w_kind):
    rule = RULES["adamw"]
    kernels.warm_up(rule, g_kind, w_kind, policy)
    if g_kind == w_kind:
        kernels.warm_up_zero(rule, w_kind, states=2)
    before = compiled(numba_update.kernels), compiled(numba_convert.kernels)
    case = make_case("adamw", 2, g_kind, w_kind, 64, 0)
    pending = Pending(case.g, g_kind, F32(0.5), rule.scalars(GROUP, 2))
    hi, lo, out = np.zeros(64, np.uint16), np.zeros(64, np.uint16), np.zeros(1)
    if policy == "exact":
        kernels.commit(rule, case.p, case.states, *pending)
        kernels.peek(rule, case.p, case.states, *pending, case.w, w_kind)
        kernels.advance(rule, case.p, case.states, pending, pending, case.w, w_kind)
        kernels.update(rule, case.p, case.states, *pending, case.w, w_kind)
        if g_kind == w_kind:
            kernels.peek_zero(rule, case.states, *pending, case.w, w_kind)
            kernels.commit_zero(rule, case.states, *pending)
            kernels.update_zero(rule, case.states, *pending, case.w, w_kind)
    elif w_kind == "bf16":
        kernels.split(case.p, hi, lo)
        kernels.update_split(rule, hi, lo, case.states, *pending)
        kernels.join(hi, lo, case.p)
        kernels.reconcile_split(hi, hi, lo)
    else:
        kernels.update(rule, case.p, case.states, *pending, case.p, w_kind)
    kernels.round_into(case.p, case.w, w_kind)
    kernels.widen(case.w, w_kind, case.p)
    kernels.reconcile(case.p, case.w, w_kind)
    kernels.sum_squares(case.g, g_kind, out)
    kernels.abs_max(case.g, g_kind)
    if g_kind in ("bf16", "fp32"):
        kernels.scale(case.g, g_kind, F32(0.5))
    assert (compiled(numba_update.kernels), compiled(numba_convert.kernels)) == before


def test_workers_asking_together_compile_once():
    built = []

    def build():
        built.append(1)
        return numba_convert._build_join()

    cache = KernelCache({"join": build})
    got = []
    threads = [threading.Thread(target=lambda: got.append(cache("join"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len({id(kernel) for kernel in got}) == 1


def best(function, repeats=7):
    """Seconds of this thread alone: what else the machine does takes no part of them."""
    function()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return min(times)


def test_an_interrupt_while_a_kernel_is_compiled_is_raised_afterwards():
    """Inside the compiler's callbacks it would be printed and forgotten."""
    reached = []

    def built():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)  # the interpreter runs pending handlers
        reached.append(True)
        return numba_convert.kernels._builders["widen"]("bf16")

    cache = KernelCache({"widen": built})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            cache("widen")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached
    assert len(cache) == 1


def test_throughput(capsys):
    """A vectorised kernel is bound by memory. The bound is loose, since the machine is shared: a scalar loop takes ten
    times as long as these do."""
    n = 1 << 22
    rng = np.random.default_rng(0)
    rule = RULES["adamw"]
    p, g = (rng.standard_normal(n).astype(F32) for _ in range(2))
    states = (np.zeros(n, F32), np.ones(n, F32))
    s, w, bits = rule.scalars(GROUP, 3), np.empty(n, np.uint16), stored(g, "bf16")
    pending = Pending(bits, "bf16", F32(0.7), s)
    target = np.empty_like(p)
    lines = []
    for name, function, width in (
        ("commit", lambda: kernels.commit(rule, p, states, *pending), 26),
        ("peek", lambda: kernels.peek(rule, p, states, *pending, w, "bf16"), 16),
        ("update_zero", lambda: kernels.update_zero(rule, states, *pending, w, "bf16"), 20),
        ("advance", lambda: kernels.advance(rule, p, states, pending, pending, w, "bf16"), 30),
    ):
        copy = 8 * n / best(lambda: np.copyto(target, p)) / 1e9
        seconds = best(function)
        rate = width * n / seconds / 1e9
        lines.append(f"{name:11s} {rate:.1f} GB/s, {n / seconds / 1e9:.2f} G parameters/s; copy {copy:.1f} GB/s")
        assert rate > copy / 8, lines
    with capsys.disabled():
        print("\n" + "\n".join(lines))
