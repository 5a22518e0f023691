"""Fixtures for all tests."""

from __future__ import annotations

import pytest

from tests.support.leaks import LeakCheck

pytest_plugins = ["tests.support.engines"]


def pytest_configure(config: pytest.Config) -> None:
    """Look after every test for what it has left."""
    config.pluginmanager.register(LeakCheck(), "leaks")
