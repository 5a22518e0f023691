"""How much prefill a worker still has before it, as its engine gets on with it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from shared.errors import Outpaced
from shared.hashing import TOKEN_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class Prompt:
    """What tells whether two requests can share blocks."""

    token_ids: bytes
    salt: str
    adapter: str

    def num_shared_tokens(self, other: Prompt) -> int:
        """How many leading tokens are the same in both."""
        if (self.salt, self.adapter) != (other.salt, other.adapter):
            return 0
        ours, theirs = self.token_ids, other.token_ids
        low, high = 0, min(len(ours), len(theirs)) // TOKEN_SIZE_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            between = slice(low * TOKEN_SIZE_BYTES, middle * TOKEN_SIZE_BYTES)
            if ours[between] == theirs[between]:
                low = middle
            else:
                high = middle - 1
        return low


class PrefillBacklog:
    """Uncached prompt tokens of the requests that have no first token yet, less what the engine has computed of them.

    An engine tells how many prompt tokens it has computed in all, not whose. Those that no finished prefill accounts
    for belong to the request at the head: prefills are served in order, and one alone is under way between two steps.
    So what is counted wrongly (a request that was cancelled half way, the prompt of a pin) is at most one request's
    share, and only until the backlog is empty.
    """

    def __init__(self) -> None:
        self._request_to_tokens: dict[Hashable, int] = {}
        self._request_to_prompt: dict[Hashable, Prompt] = {}
        self._num_tokens = 0
        self._num_settled = 0
        """Of the engine's computed tokens, those that belong to no request of the backlog."""

    def add(self, request: Hashable, prompt: Prompt, num_known_tokens: int, num_prefilled: int) -> None:
        """A request is to be computed, but for so many tokens that will be cached by then. Modifies."""
        if not self._request_to_tokens:
            self._num_settled = num_prefilled
        num_tokens = max(0, len(prompt.token_ids) // TOKEN_SIZE_BYTES - num_known_tokens)
        self._request_to_tokens[request] = num_tokens
        self._request_to_prompt[request] = prompt
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

    def admit(self, prompt: Prompt, max_tokens: int | None, num_prefilled: int) -> int:
        """How many leading tokens of a prompt are computed for one before it anyway. Does not modify.

        Raises `Outpaced` if more than `max_tokens` and those are to be computed before it: elsewhere it would have to
        compute them itself. `None`: whatever is before it, and nothing of that is looked at.
        """
        if max_tokens is None:
            return 0
        num_shared = max((prompt.num_shared_tokens(other) for other in self._request_to_prompt.values()), default=0)
        num_tokens = self.num_tokens(num_prefilled)
        if num_tokens > max_tokens + num_shared:
            raise Outpaced(f"{num_tokens} tokens are to be prefilled before the request, which allows {max_tokens}")
        return num_shared

    def _remove(self, request: Hashable) -> bool:
        num_tokens = self._request_to_tokens.pop(request, None)
        self._request_to_prompt.pop(request, None)
        self._num_tokens -= num_tokens or 0
        return num_tokens is not None
