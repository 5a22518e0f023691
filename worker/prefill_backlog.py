"""How much prefill a worker still has before it, as its engine gets on with it."""

from __future__ import annotations

from collections.abc import Hashable

from shared.errors import Outpaced


class PrefillBacklog:
    """Uncached prompt tokens of the requests that have no first token yet, less what the engine has computed of them.

    An engine tells how many prompt tokens it has computed in all, not whose. Those that no finished prefill accounts
    for belong to the request at the head: prefills are served in order, and one alone is under way between two steps.
    So what is counted wrongly (a request that was cancelled half way, the prompt of a pin) is at most one request's
    share, and only until the backlog is empty.
    """

    def __init__(self) -> None:
        self._request_to_tokens: dict[Hashable, int] = {}
        self._num_tokens = 0
        self._num_settled = 0
        """Of the engine's computed tokens, those that belong to no request of the backlog."""

    def add(self, request: Hashable, num_tokens: int, num_prefilled: int) -> None:
        """A request is to be computed, of which so many tokens are expected not to be cached. Modifies."""
        if not self._request_to_tokens:
            self._num_settled = num_prefilled
        self._request_to_tokens[request] = num_tokens
        self._num_tokens += num_tokens

    def note_prefilled(self, request: Hashable, num_tokens: int) -> None:
        """The prefill of a request is over, and took so many tokens. Modifies; a request that is out is no error."""
        if self._remove(request):
            self._num_settled += num_tokens

    def drop(self, request: Hashable, num_prefilled: int) -> None:
        """A request ends before its prefill does. Modifies; a request that is out is no error."""
        if self._remove(request):
            # Nobody knows how far it was: rather nothing is taken for computed than too much.
            self._num_settled = max(self._num_settled, num_prefilled)

    def num_tokens(self, num_prefilled: int) -> int:
        """What is left, where the engine has computed `num_prefilled` prompt tokens since its start."""
        head = next(iter(self._request_to_tokens.values()), 0)
        return self._num_tokens - min(head, max(0, num_prefilled - self._num_settled))

    def check_within(self, max_tokens: int | None, num_prefilled: int) -> None:
        """Raises `Outpaced` where more than this is left. `None`: anything is within it."""
        if max_tokens is not None and (num_tokens := self.num_tokens(num_prefilled)) > max_tokens:
            raise Outpaced(f"{num_tokens} tokens are to be prefilled before the request, which allows {max_tokens}")

    def _remove(self, request: Hashable) -> bool:
        num_tokens = self._request_to_tokens.pop(request, None)
        self._num_tokens -= num_tokens or 0
        return num_tokens is not None
