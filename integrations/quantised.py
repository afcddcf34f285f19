"""Frozen quantised weights (QLoRA): the bytes slide like any frozen weight, their scales stay on the device.

Known: bitsandbytes 4-bit layers, whose parameters carry a ``quant_state`` with the scales. Its 8-bit layers keep an
alias of the weight's memory in the layer, which would be used in place of the weight that slides: refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slideformer_backend.errors import UnsupportedError

if TYPE_CHECKING:
    from slideformer_backend.api import Engine


def refuse(model: nn.Module) -> None:
    """Refuses 8-bit layers of bitsandbytes.

    Raises:
        UnsupportedError: names the first one.
    """
    for name, module in model.named_modules():
        if any(base.__name__ == "Linear8bitLt" for base in type(module).__mro__):
            raise UnsupportedError(
                f"{name} is an 8-bit layer of bitsandbytes, which keeps its weight where SlideFormer cannot move it.",
                remedy="load in 4 bit (load_in_4bit=True), whose weights slide, or do not quantise: without it weights"
                " live in host memory anyway",
            )


def install(engine: Engine) -> None:
    """Puts the scales of quantised weights on the engine's device; back into host memory when it is detached."""
    found = (getattr(parameter, "quant_state", None) for parameter in engine.model.parameters())
    states = [state for state in found if state is not None]
    if not states:
        return
    _move(states, engine.device)
    engine.on_detach(lambda: _move(states, torch.device("cpu")))


def _move(states: list[Any], device: torch.device) -> None:
    for state in states:
        state.to(device)
