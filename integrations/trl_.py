"""TRL: log-probabilities of given tokens from lazy logits, without computing the logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slideformer_backend.integrations.patches import Patch


def wrap_selective_log_softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    """``selective_log_softmax``: on a GPU, TRL's own kernel for it reads the logits, all of them.

    Only calls with lazy logits are answered here, in one pass over the head; ``row_mask`` and ``temperature`` as there.
    """

    @functools.wraps(original)
    def selective_log_softmax(logits: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        from slideformer_backend.integrations.lazy_logits_tensor import LazyLogits

        is_known = not args and not kwargs.keys() - {"temperature", "row_mask"} and kwargs.get("temperature", 1.0) > 0
        if not is_known or type(logits) is not LazyLogits or index.shape != logits.shape[:-1]:
            return original(logits, index, *args, **kwargs)
        temperature, mask = kwargs.get("temperature", 1.0), kwargs.get("row_mask")
        scaled = logits if temperature == 1.0 else logits / temperature
        found = scaled.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return found if mask is None else found.masked_fill(mask == 0, 0.0)

    return selective_log_softmax


def patches() -> tuple[Patch, ...]:
    """The patch of TRL."""
    purpose = "token log-probabilities in TRL without full logits"
    target = "selective_log_softmax"
    return (Patch("trl.trainer.utils", target, wrap_selective_log_softmax, purpose, ("logits", "index")),)
