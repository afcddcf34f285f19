"""Shared: a clean process state around each test, as for the launch tests."""

import pytest

from slideformer_backend import api
from tests.launch.conftest import clean, environ, fresh_state, python, site, warm_python, warm_server

__all__ = ["clean", "environ", "fresh_state", "python", "site", "warm_python", "warm_server"]


@pytest.fixture(autouse=True)
def detached():
    """No engine outlives its test. Those that a race test broke on purpose may still be there, and are not its own."""
    before = api.engines()
    yield
    for engine in api.engines():
        if not any(engine is other for other in before):
            engine.detach()
