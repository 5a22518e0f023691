"""How a batch tells of itself while it runs: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from tqdm import tqdm

from router.openai import Usage

DESCRIPTION = "Running batch"
PLAIN_INTERVAL_S = 10.0
"""Time between two plain lines: a log that somebody watches stays alive, a night's log stays short."""


class Progress:
    """Counts finished rows and shows them on one stream. Never changes what is counted elsewhere.

    `clock` is the loop's. On a stream that is no terminal nothing is shown unless `wanted` is true. A stream that
    breaks, as that of a closed terminal does, is shown nothing more: what nobody sees ends no run.
    """

    def __init__(
        self, stream: TextIO, *, num_rows: int, num_done: int, clock: Callable[[], float], wanted: bool | None = None
    ) -> None:
        is_terminal = stream.isatty()
        self._stream = stream
        self._clock = clock
        self._is_plain = bool(wanted) and not is_terminal
        self._num_rows = num_rows
        self._num_done = self._num_done_before = num_done
        self._num_failed = 0
        self._num_tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._started_at_s = self._shown_at_s = clock()
        self._bar: tqdm[Any] | None = None
        if is_terminal and wanted is not False:
            with self._while_it_lasts():
                self._bar = tqdm(desc=DESCRIPTION, unit="req", total=num_rows, initial=num_done, file=stream)

    def answered(self, usage: Usage) -> None:
        """Count one answered row."""
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        self._num_tokens += usage.prompt_tokens + usage.completion_tokens
        self._advance()

    def failed(self) -> None:
        """Count one row that ended in an error."""
        self._num_failed += 1
        self._advance()

    def tick(self) -> None:
        """Show a plain line if one is due. Called about once a second."""
        if self._is_plain and self._clock() - self._shown_at_s >= PLAIN_INTERVAL_S:
            with self._while_it_lasts():
                self._show_line()

    def close(self) -> None:
        """Show the last state and leave the stream alone."""
        with self._while_it_lasts():
            if self._bar is not None:
                self._bar.set_postfix_str(self._postfix(), refresh=False)
                self._bar.close()
            elif self._is_plain:
                self._show_line()

    def _advance(self) -> None:
        self._num_done += 1
        if self._bar is not None:
            with self._while_it_lasts():
                self._bar.set_postfix_str(self._postfix(), refresh=False)
                self._bar.update()

    @contextlib.contextmanager
    def _while_it_lasts(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            if self._bar is not None:
                self._bar.disable = True
            self._bar, self._is_plain = None, False

    def _postfix(self) -> str:
        hit = self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0
        return f"hit={hit:.0%} tok/s={self._rate(self._num_tokens):.0f} failed={self._num_failed}"

    def _rate(self, num: int) -> float:
        """So many for each second of this run."""
        elapsed_s = self._clock() - self._started_at_s
        return num / elapsed_s if elapsed_s > 0 else 0.0

    def _show_line(self) -> None:
        self._shown_at_s = self._clock()
        rate = self._rate(self._num_done - self._num_done_before)
        # What is left takes as long for each row as what this run has done; the bar of a terminal reckons likewise.
        left = tqdm.format_interval((self._num_rows - self._num_done) / rate) if rate else "?"
        self._stream.write(
            f"{DESCRIPTION}: {self._num_done}/{self._num_rows} req, {rate:.2f} req/s, {self._postfix()}, {left} left\n"
        )
        self._stream.flush()
