"""Under immediate the backward takes gradients: they are there, as in torch, and nothing may use them."""

import pytest
import torch

from slideformer_backend.errors import UnsupportedError
from tests.parity.harness import check, run_managed
from tests.parity.models import batch, language_loss, stack, steps

USES = {
    "norm": lambda weights, sliding: sum(weight.grad.norm() for weight in weights if weight.grad is not None),
    "clip": lambda weights, sliding: torch.nn.utils.clip_grad_norm_(weights, 1.0),
    "clip value": lambda weights, sliding: torch.nn.utils.clip_grad_value_(weights, 1.0),
    "edit": lambda weights, sliding: sliding.grad.mul_(0.5),
    "detach": lambda weights, sliding: sliding.grad.detach(),
    "total": lambda weights, sliding: torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None]),
}


@pytest.mark.parametrize("use", USES)
def test_immediate_refuses_what_would_use_a_gradient_that_is_spent(device, use):
    """Torch's own clip would find no gradients, return 0 and clip nothing."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        ids = batch(0, device=run.device)
        run.backward(language_loss(run.forward(ids), ids))
        weights = list(run.model.parameters())
        sliding = next(run.model.blocks[1].parameters())
        assert sliding.grad is not None
        assert (sliding.grad.shape, sliding.grad.dtype) == (sliding.shape, sliding.dtype)
        sliding.grad = sliding.grad
        with pytest.raises(UnsupportedError, match=r"blocks\.\d\..* was applied during backward .*update: exact"):
            USES[use](weights, sliding)
        optimizer.step()
        assert sliding.grad is not None  # as in torch, until it is reset
        optimizer.zero_grad()
        assert sliding.grad is None
        steps(run, optimizer, 1, first=1)

    run_managed(stack(), script, device, policy="immediate")


@pytest.mark.parametrize("reset", ["zero", "foreach", "model", "none", "delete", "never"])
def test_immediate_resets_gradients_that_are_spent(device, reset):
    """In each way that torch has, and ``free_memory`` without any."""

    def script(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
        for number in range(3):
            ids = batch(number, device=run.device)
            run.backward(language_loss(run.forward(ids), ids))
            optimizer.step()
            if reset == "zero":
                for weight in [weight for weight in run.model.parameters() if weight.grad is not None]:
                    weight.grad.detach_()
                    weight.grad.zero_()
            elif reset == "foreach":
                optimizer.zero_grad(set_to_none=False)
            elif reset == "model":
                run.model.zero_grad()
            elif reset == "none":
                for weight in run.model.parameters():
                    weight.grad = None
            elif reset == "delete":
                for weight in run.model.parameters():
                    del weight.grad
            elif number == 2:
                return
            else:
                optimizer.zero_grad()
            run.see_weights()

    check(stack(), script, device, policy="immediate")
