"""Every family against plain PyTorch: losses, every gradient, norms and weights, bit for bit on a CPU."""

import pytest
import torch

from tests.families.catalogue import FAMILIES
from tests.parity.harness import PRECISIONS, check

ADAMW = {"lr": 1e-2, "fused": True, "weight_decay": 0.1}


def given(family, number, dtype, device):
    def suited(value):
        return value.to(device, dtype if value.is_floating_point() else None)

    return {name: suited(value) for name, value in family.inputs(number).items()}


def training(family, dtype, *, accumulate, clip):
    """Three steps of ``accumulate`` micro-batches, with clipping if ``clip`` is a norm."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, **ADAMW)
        for step in range(3):
            for micro in range(accumulate):
                batch = given(family, 2 * step + micro, dtype, run.device)
                loss = run.forward(**batch).loss / accumulate
                run.see("loss", loss)
                run.backward(loss, is_last=micro == accumulate - 1)
            run.see_gradients()
            if clip is not None:
                norm = run.clip(clip)
                assert float(norm) > clip, "the clip is active"
            optimizer.step()
            optimizer.zero_grad()
            run.see_weights()

    return script


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("policy", ["exact", "immediate"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(device, name, policy, precision):
    """exact: accumulation and clipping are active; immediate, which refuses them, goes without."""
    family, (dtype, autocast) = FAMILIES[name], PRECISIONS[precision]
    script = training(
        family,
        dtype,
        accumulate=2 if policy == "exact" else 1,
        clip=0.05 if policy == "exact" else None,
    )
    check(lambda: family.make(dtype), script, device, policy=policy, autocast=autocast)
