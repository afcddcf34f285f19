"""The plugin that a script passes to ``Accelerator(kwargs_handlers=[SlideFormerPlugin(...)])``."""

from __future__ import annotations

from slideformer_backend.config import SlideFormerConfig


class SlideFormerPlugin:
    """Turns SlideFormer on from inside a script; takes the keys of :class:`SlideFormerConfig`.

    Attributes:
        settings: the keys as given.
        config: the checked configuration.

    Raises:
        ConfigError: an unknown key (the message names the nearest valid one) or a bad value.
    """

    def __init__(self, **settings: object) -> None:
        self.settings = dict(settings)
        self.config = SlideFormerConfig.from_mapping(settings, source="SlideFormerPlugin")
        # Accelerate knows no third-party handlers, so its constructor must be hooked by now. The entry point has done
        # it, unless torch's autoload is switched off or the package is used without being installed.
        from slideformer_backend.integrations.hooks import install

        install()

    def __repr__(self) -> str:
        return f"SlideFormerPlugin({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"
