"""Composition root of the integrations: which patch waits for which module. Imports no other library."""

from __future__ import annotations

import os
from types import ModuleType

from slideformer_backend._imports import finder
from slideformer_backend.integrations.patches import Patch, registry

# A script that trains with SlideFormer imports one of these before it makes a model. By then torch is complete, which
# it is not when it calls our entry point.
_BEFORE_MODELS = ("accelerate.accelerator", "transformers.modeling_utils")


def install() -> None:
    """Registers all patches with the import hook. Idempotent.

    With ``SLIDEFORMER_DISABLE=1`` (reached only through a plugin in the script) the constructor of ``Accelerator`` is
    still taught to accept the plugin, and nothing else: the script runs, without SlideFormer.
    """
    from slideformer_backend.integrations import (
        accelerate_,
        checkpoints,
        launch,
        questionnaire,
        recipe_flag,
        trainer,
        transformers_,
        trl_,
    )
    from slideformer_backend.integrations.session import disabled

    found = accelerate_.patches()
    if not disabled(os.environ):
        found += (*checkpoints.patches(), *launch.patches(), *questionnaire.patches(), *recipe_flag.patches())
        found += (*transformers_.patches(), *trainer.patches(), *trl_.patches())
    finder.install()
    for patch in found:
        wait_for(patch)
    for name in _BEFORE_MODELS:
        if name not in registry.waiting:
            registry.waiting.add(name)
            finder.register(name, lambda module: keep_off_gpu())


def keep_off_gpu() -> None:
    """Puts off moves of models to the GPU. This changes torch itself, so only when SlideFormer is asked for."""
    from slideformer_backend.integrations.session import session

    if session.is_active():
        from slideformer_backend.integrations import placement

        for patch in placement.patches():
            wait_for(patch)


def wait_for(patch: Patch) -> None:
    """Applies ``patch`` as soon as its module is imported; at once if it is."""

    def apply(module: ModuleType) -> None:
        registry.apply(patch, module)

    if patch.name not in registry.waiting:
        registry.waiting.add(patch.name)
        finder.register(patch.module, apply)


def uninstall() -> None:
    """Puts everything back as it was before :func:`install`."""
    finder.remove()
    registry.undo_all()
