"""The surroundings of parity tests, and those of tests that launch or construct an ``Accelerator``."""

from tests.launch.conftest import active, clean, environ, fake_api, fresh_state, python, site, warm_python, warm_server
from tests.parity.conftest import deterministic, device

__all__ = ["active", "clean", "deterministic", "device", "environ", "fake_api", "fresh_state", "python", "site",
           "warm_python", "warm_server"]  # fmt: skip
