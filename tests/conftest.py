"""Fixtures for all tests."""

from __future__ import annotations

import signal

import pytest

from tests.support.leaks import LeakCheck

pytest_plugins = ["tests.support.engines"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option of its own, since `-m` counts once only: one that selects among other tests would bring these in."""
    parser.addoption("--cluster", action="store_true", help="run the tests marked cluster, and no others")


def pytest_configure(config: pytest.Config) -> None:
    """Look after every test for what it has left."""
    config.pluginmanager.register(LeakCheck(), "leaks")
    # A script that starts the suite in the background has SIGINT ignored, and so would every command that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes many minutes, unless it is asked for."""
    is_wanted = config.getoption("--cluster")
    left_out = [item for item in items if (item.get_closest_marker("cluster") is not None) != is_wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
