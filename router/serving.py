"""What every composition hands to a front end: a router over workers that are ready, and what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.runfile import Run
from router.service import Router
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.directory.embedded import EmbeddedStore
from shared.types import CacheScheme, WorkerId, WorkerInfo

Say = Callable[[str], None]
"""Tells the user what is going on, one line at a time."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A router over workers that are ready, and what a front end needs to talk to it."""

    settings: Settings
    router: Router
    tokenizer: Tokenizer
    scheme: CacheScheme
    workers: tuple[WorkerInfo, ...]
    """Those that served when this began."""
    actors: Mapping[WorkerId, Any]
    """Ray handles of workers that were started here; empty where others run them."""
    store: EmbeddedStore | None
    """The store that was started here; `None` where there is none or one was given."""
    run: Run | None
    """What another process needs to serve over the same workers; `None` over attached servers: it finds them itself."""

    @property
    def max_model_len_tokens(self) -> int:
        """The shortest context among the workers: what every one of them can take."""
        return min(info.max_model_len_tokens for info in self.workers)
