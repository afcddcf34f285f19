"""Memory budgets for tests."""

from torch import nn

from slideformer_backend.plan import Terms, ledger_of, partition


def tight(model: nn.Module) -> int:
    """Device bytes for the usual window and the edge units and no more: nothing moves to the device by itself."""
    return ledger_of(partition(model), Terms()).device
