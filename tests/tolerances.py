"""Every tolerance of the tests that compare with plain PyTorch, with its reason. Default: equal bit for bit.

A tolerance is (relative, absolute). To loosen one needs a reason in the change that does it.
"""

import torch

ASSOCIATIVITY = (1e-4, 1e-5)
"""fp32: the gradient of a tensor that a unit and somebody else both use. The identity on a unit's inputs adds its own
terms first, plain autograd adds in order of creation; after a few steps of AdamW, which divides by the root of v,
single ulps have grown to this."""

NORM = (1e-6, 0.0)
"""fp32: a gradient clipped by the norm of DESIGN 4.5 (fp64 sums) against torch's (fp32 sums of a vectorised kernel)."""

KERNELS = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative error (norm of the difference over norm of the truth) of a kernel beyond plain torch's own, by dtype. fp32:
sums in another order. bf16, fp16: one unit roundoff: in a small case few values carry the norm, and how each of them
happens to round differs where an upstream gradient is applied after the rounding instead of before. That the error is
not larger on average has its own test."""

CONVERGENCE = 2.0
"""Loss curves over 32 steps: how many times rounding noise two curves may be apart; each is one noise from the truth.
Noise is the largest distance from the plain curve of plain runs whose batches have their rows in another order, whose
weights start one ulp apart, or, under bf16 autocast, which run in fp32."""
