"""What a hook of ours becomes in a pickled model."""

from __future__ import annotations


class NoHook:
    """A module hook that does nothing: ``torch.save(model)`` writes a plain model."""

    def __call__(self, *arguments: object) -> None:
        return
