"""The way in: torch calls :func:`autoload` at the end of ``import torch`` (entry point group ``torch.backends``).

https://docs.pytorch.org/docs/stable/accelerator/autoload.html
"""

from __future__ import annotations

import os
import warnings

from slideformer_backend.config import DISABLE_VARIABLE, is_true


def autoload() -> None:
    """Registers the import hooks. Idempotent, imports no other library, and never raises.

    Nothing happens when ``SLIDEFORMER_DISABLE=1``. Otherwise the hooks are there in every program that imports torch,
    because a script can ask for SlideFormer at any time, but what they add looks at each call whether it was asked for.
    """
    if is_true(os.environ.get(DISABLE_VARIABLE)):
        return
    try:
        from slideformer_backend.integrations.hooks import install

        install()
    except Exception as error:  # an exception here would become a RuntimeError out of `import torch`
        warnings.warn(f"slideformer_backend could not register its import hooks: {error!r}", stacklevel=2)
