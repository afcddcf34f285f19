"""Every tolerance of the tests that compare with plain PyTorch, with its reason. Default: equal bit for bit.

A tolerance is (relative, absolute). To loosen one needs a reason in the change that does it.
"""

ASSOCIATIVITY = (1e-4, 1e-5)
"""fp32: the gradient of a tensor that a unit and somebody else both use. The identity on a unit's inputs adds the unit's
own terms first, plain autograd adds in order of creation; after a few steps of AdamW, which divides by the root of v,
single ulps have grown to this."""

NORM = (1e-6, 0.0)
"""fp32: a gradient clipped by the norm of DESIGN 4.5 (fp64 sums) against torch's (fp32 sums of a vectorised kernel)."""

SHARED_INPUT_16 = (2e-2, 1e-3)
"""bf16 and autocast, SGD: as ASSOCIATIVITY, where a single rounding is 2^-8."""
