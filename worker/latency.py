"""What an engine step costs, learned from the steps as they happen: an online fit, never a table and never a guess."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from worker.engines.base import StepFit

_NUM_TERMS = 3
FORGETTING = 0.998
"""Weight that a step keeps with each later step: about the last 500 steps count."""


class StepTimes:
    """A least-squares fit of `step_s + prefill_s_per_token * prompt tokens + decode_s_per_seq * sequences`.

    Older steps weigh exponentially less. No coefficient is ever negative: where the best fit would have one, the best
    fit without that term is taken. A term that no remembered step had keeps its last value.
    """

    def __init__(self, forgetting: float = FORGETTING) -> None:
        self._forgetting = forgetting
        self._moments = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        self._products = [0.0] * _NUM_TERMS
        self._fit: list[float] = [0.0] * _NUM_TERMS
        self._is_stale = False

    def add(self, elapsed_s: float, num_prefill_tokens: int, num_decode_seqs: int) -> None:
        """Take one step into account. Modifies; constant time."""
        tokens, seqs, kept = float(num_prefill_tokens), float(num_decode_seqs), self._forgetting
        (steps, sum_tokens, sum_seqs), (_, squared_tokens, tokens_seqs), (_, _, squared_seqs) = self._moments
        sum_tokens = sum_tokens * kept + tokens
        sum_seqs = sum_seqs * kept + seqs
        tokens_seqs = tokens_seqs * kept + tokens * seqs
        self._moments = [
            [steps * kept + 1.0, sum_tokens, sum_seqs],
            [sum_tokens, squared_tokens * kept + tokens * tokens, tokens_seqs],
            [sum_seqs, tokens_seqs, squared_seqs * kept + seqs * seqs],
        ]
        elapsed, elapsed_tokens, elapsed_seqs = self._products
        self._products = [
            elapsed * kept + elapsed_s,
            elapsed_tokens * kept + tokens * elapsed_s,
            elapsed_seqs * kept + seqs * elapsed_s,
        ]
        self._is_stale = True

    def fit(self) -> StepFit:
        """The coefficients now; all zero before the first step. Solved only when steps were added since."""
        if self._is_stale:
            self._solve()
            self._is_stale = False
        return StepFit(*self._fit)

    def _solve(self) -> None:
        for i, value in enumerate(non_negative_fit(self._moments, self._products)):
            if value is not None:
                self._fit[i] = value


def non_negative_fit(moments: Sequence[Sequence[float]], products: Sequence[float]) -> list[float | None]:
    """The best fit without a negative coefficient; None for a term that no sample had.

    `moments` are the sums of products of two terms each, `products` those of a term and the outcome. There are few
    terms, so all their subsets are tried.
    """
    scale = [moments[i][i] ** 0.5 for i in range(len(products))]
    known = [i for i in range(len(products)) if scale[i] > 0]
    # Scaled to unit diagonal, so that a term that has been rare for long is solved as well as a common one.
    moments = [[moments[i][j] / (scale[i] * scale[j]) for j in known] for i in known]
    products = [products[i] / scale[i] for i in known]
    best, best_gain = [0.0] * len(known), 0.0
    for size in range(len(known), 0, -1):
        for subset in combinations(range(len(known)), size):
            solution = _solve_linear([[moments[i][j] for j in subset] for i in subset], [products[i] for i in subset])
            if solution is None or min(solution) < 0:
                continue
            # At the least-squares solution of a subset this is how much of the squared error it explains.
            gain = sum(value * products[i] for i, value in zip(subset, solution, strict=True))
            # Of fits that explain as much, the one with more terms, then with earlier ones: a term of which only
            # faint memories are left stays, and what one sequence adds to each step counts as fixed cost.
            if gain > best_gain * (1 + 1e-9):
                best, best_gain = [0.0] * len(known), gain
                for i, value in zip(subset, solution, strict=True):
                    best[i] = value
    fit: list[float | None] = [None] * len(scale)
    for i, value in zip(known, best, strict=True):
        fit[i] = value / scale[i]
    return fit


def _solve_linear(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """The solution of a small symmetric system with unit diagonal; None if its columns are as good as dependent."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for pivot in range(size):
        if rows[pivot][pivot] < 1e-9:
            return None
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot] / rows[pivot][pivot]
                rows[other] = [x - factor * y for x, y in zip(rows[other], rows[pivot], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
