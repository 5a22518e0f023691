"""The Ray actor around a worker: a thin shell, so that a worker is the same with and without Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray
import ray.util
from ray.util.placement_group import get_current_placement_group, remove_placement_group

from shared.telemetry import set_up_logging
from shared.telemetry_ray import keep_in_ray
from shared.types import WorkerInfo
from shared.wire import encode_record
from worker.process import Worker, WorkerOptions

logger = logging.getLogger(__name__)

_RESTART_PAUSE_S = 5.0
"""Between a failed start and the next one; also the time that whoever waits for `ready` has to hear why."""
_LEAVE_S = 10.0
"""Between the end of a drained worker and that of its actor, which whoever drained it is to bring about before."""
_ENGINE_DEAD_EXIT_CODE = 70
"""`EX_SOFTWARE`: Ray starts the actor again in a new process."""


class WorkerActor:
    """Owns one worker on an event loop of its own thread.

    The worker starts with the constructor and not with a method, so that Ray's restart of a dead actor is the whole
    recovery: nobody has to notice it and call something. For the same reason a start that fails ends the process: the
    reason may be gone by the next one, as a lease or a GPU's memory that the former life still held.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = WorkerOptions.from_wire(options)
        set_up_logging(self._options.settings.log_level, self._options.settings.log_format)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker", daemon=True)
        self._thread.start()
        # A worker that comes back, perhaps while the store is away, serves all the same.
        with warnings.catch_warnings():
            # Ray's property reads one that Ray has deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            is_first_life = not ray.get_runtime_context().was_current_actor_reconstructed
        self._worker = Worker(
            self._options, _exit_process, ray.util.get_node_ip_address(), must_reach_store=is_first_life
        )
        labels = {"worker": self._options.worker}
        self._metrics = asyncio.run_coroutine_threadsafe(keep_in_ray(self._worker.metrics, labels), self._loop)
        self._start = asyncio.run_coroutine_threadsafe(self._worker.start(), self._loop)
        self._start.add_done_callback(self._end_if_failed)
        self._drain: Future[int] | None = None

    def __repr__(self) -> str:
        """Where Ray shows more than the actor's name, as in its dashboard and before lines of its log."""
        return f"{self._options.worker} {self._options.settings.model_name}"

    def ready(self) -> bytes:
        """Wait for the worker's start: its `WorkerInfo` as `messages.encode_record` gives it, or the start's error."""
        return encode_record(self._start.result())

    def pid(self) -> int:
        """The process to kill when a test or an operator wants to see this worker die."""
        return os.getpid()

    def stop(self) -> None:
        """End the worker politely: its entries leave the directory, its engine ends.

        A worker that is still starting has promised nothing to anybody: it ends with its process.
        """
        if self._start.done():
            asyncio.run_coroutine_threadsafe(self._worker.stop(), self._loop).result()

    def drain(self, timeout_s: float) -> int:
        """Let the worker finish within `timeout_s` what it has, and end it; how many requests were cut off.

        The actor goes for good, soon after whoever has called this has heard of it or died. A second call waits for the
        first one's end.
        """
        if not self._start.done() or self._start.exception() is not None:
            return 0
        if self._drain is None:
            self._drain = asyncio.run_coroutine_threadsafe(self._worker.drain(timeout_s), self._loop)
            own_handle = ray.get_runtime_context().current_actor
            self._drain.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._leave, own_handle))
        return self._drain.result()

    def is_leaving(self) -> bool:
        """Whether it has been told to drain."""
        return self._drain is not None

    def _leave(self, own_handle: Any) -> None:
        self._loop.call_later(_LEAVE_S, _end_for_good, own_handle)

    def _end_if_failed(self, start: Future[WorkerInfo]) -> None:
        if not start.cancelled() and (error := start.exception()) is not None:
            logger.error("worker %s did not start and is tried again: %s", self._options.worker, error)
            self._loop.call_later(_RESTART_PAUSE_S, _exit_process, str(error))


def _exit_process(reason: str) -> None:
    """A worker without its engine is of no use; a new process is the cleanest way to a new engine."""
    os._exit(_ENGINE_DEAD_EXIT_CODE)


def _end_for_good(actor: Any) -> None:
    """End this process without Ray starting it again, and give its place back."""
    group = get_current_placement_group()
    if group is not None:
        remove_placement_group(group)
    ray.kill(actor, no_restart=True)
