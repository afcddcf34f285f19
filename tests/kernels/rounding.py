"""Triton's interpreter cuts fp32 off to bf16; devices round to nearest even. Here it rounds, as devices do."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_INTERPRETERS_OWN = interpreter._convert_float


def convert_float(values, source, target, rounding_mode):
    """``_convert_float`` of the interpreter: the bits of ``values`` in the dtype ``target``."""
    if source == tl.float32 and target == tl.bfloat16:
        floats = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.float32))
        return floats.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))
    if source == tl.bfloat16 and target == tl.float32:
        wide = np.ascontiguousarray(values).reshape(-1).view(np.uint16).astype(np.uint32) << 16
        return wide.reshape(np.shape(values))
    return _INTERPRETERS_OWN(values, source, target, rounding_mode)
