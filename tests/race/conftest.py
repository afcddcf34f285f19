"""Engines that these tests break on purpose stay attached, which no other test is to see."""

import pytest

from slideformer_backend import api


@pytest.fixture(scope="module", autouse=True)
def broken_engines():
    yield
    api._ENGINES.clear()
