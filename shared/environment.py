"""The environment that this process hands on to those that it starts. What it says to us is read in `config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Have the processes that are started meanwhile find the variables in their environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
