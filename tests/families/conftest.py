"""The device and the quiet, deterministic surroundings of the parity tests."""

from tests.parity.conftest import deterministic, device

__all__ = ["deterministic", "device"]
