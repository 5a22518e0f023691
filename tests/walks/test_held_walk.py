"""Random comings, goings and news of held requests: every row of the table stays with its request."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from router.chain_marks import last_mark_depth
from router.credit import Credited
from router.held import Held, HeldTable
from router.requests import GenerateRequest
from shared.hashing import pack_tokens
from shared.types import BlockKey, RequestId, Sampling, WorkerId

NUM_STEPS = 500
BLOCK_SIZE_TOKENS = 2


class _Walk:
    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.table = HeldTable(BLOCK_SIZE_TOKENS)
        self.held: list[Held] = []
        self.bound: set[Held] = set()
        self.facts: dict[Held, tuple[list[int], int]] = {}
        """Matched tokens and next hash of each, as written last."""
        self.num_workers = 0
        self.num_made = 0

    def run(self) -> None:
        actions = [self._add] * 8 + [self._remove] * 6 + [self._credit] * 4 + [self._bind] * 2 + [self._relay]
        for _ in range(NUM_STEPS):
            self.rng.choice(actions)()
            self._check()
        for held in list(self.held):
            self.table.remove(held)
            self.table.remove(held)
        assert len(self.table) == self.table.total_own_tokens == self.table.num_choosy == 0
        assert not len(self.table._beginnings)
        assert not self.table._unindexed

    def _add(self) -> None:
        self.num_made += 1
        path, keys = b"", []
        for _ in range(self.rng.choice((0, 1, 2, 3, 9, 33))):
            path += self.rng.choices((b"a", b"b"), (9, 1))[0]
            keys.append(BlockKey(path.rjust(40, b".")))
        held = Held(
            GenerateRequest(
                RequestId(f"r{self.num_made}"),
                pack_tokens(range(len(keys) * BLOCK_SIZE_TOKENS + self.rng.randint(1, 9))),
                Sampling(max_tokens=1),
                worker=WorkerId("w1") if self.rng.random() < 0.2 else None,
            ),
            keys,
            ordinal=self.num_made,
            prefix_hash=self.rng.getrandbits(64),
            demand_blocks=self.rng.randrange(99),
            arrived_at_s=self.rng.random(),
            excluded=frozenset({WorkerId("w0")}) if self.rng.random() < 0.2 else frozenset(),
            placed=self.loop.create_future(),
        )
        self.held.append(held)
        self.table.add(held, self._draw_credit(held), num_passes=self.num_made)

    def _draw_credit(self, held: Held) -> Credited:
        matched = [self.rng.randrange(90) for _ in range(self.num_workers)]
        self.facts[held] = matched, self.rng.getrandbits(64)
        return Credited(np.array(matched, dtype=np.int64), max(matched, default=0), self.facts[held][1])

    def _remove(self) -> None:
        if self.held:
            held = self.held.pop(self.rng.randrange(len(self.held)))
            self.bound.discard(held)
            self.table.remove(held)

    def _credit(self) -> None:
        unbound = [held for held in self.held if held not in self.bound]
        if unbound:
            held = self.rng.choice(unbound)
            self.table.credit(held, self._draw_credit(held))

    def _bind(self) -> None:
        """Within a pass: bound, and not yet taken out."""
        unbound = [held for held in self.held if held not in self.bound]
        if unbound:
            held = self.rng.choice(unbound)
            self.table.settle(held)
            self.bound.add(held)

    def _relay(self) -> None:
        for held in self.bound:
            self.held.remove(held)
            self.table.remove(held)
        self.bound.clear()
        self.num_workers = self.rng.randint(0, 4)
        self.table.relay(self.num_workers)
        for held in self.held:
            self.table.credit(held, self._draw_credit(held))

    def _check(self) -> None:
        assert set(self.table) == set(self.held)
        order = self.rng.sample(self.held, len(self.held))
        requests = self.table.requests(np.array([held.row for held in order], dtype=np.int64), 2.0)
        assert requests.ordinals.tolist() == [held.ordinal for held in order]
        assert requests.num_prompt_tokens.tolist() == [held.request.num_prompt_tokens for held in order]
        assert requests.prefix_hashes.tolist() == [held.prefix_hash for held in order]
        assert requests.next_hashes.tolist() == [self.facts[held][1] for held in order]
        assert requests.demand_blocks.tolist() == [held.demand_blocks for held in order]
        assert requests.age_s.tolist() == [2.0 - held.arrived_at_s for held in order]
        assert requests.matched_tokens.tolist() == [self.facts[held][0] for held in order]
        own = {
            held: 0
            if held in self.bound
            else max(1, held.request.num_prompt_tokens - max(self.facts[held][0], default=0))
            for held in self.held
        }
        assert [self.table.own_tokens[held.row] for held in self.held] == list(own.values())
        assert self.table.total_own_tokens == sum(own.values())
        assert self.table.num_choosy == sum(held.is_choosy for held in self.held)
        self._check_sharing()
        if self.rng.random() < 0.3:
            self._check_parts(own)

    def _check_parts(self, own: dict[Held, int]) -> None:
        """Several bear together what they have yet to have computed, but for half of what is behind their last mark."""
        part = dict(own)
        for held in self.held:
            depth = last_mark_depth(len(held.keys))
            num_tokens = held.request.num_prompt_tokens
            if held not in self.bound and held.keys and num_tokens - own[held] <= depth * BLOCK_SIZE_TOKENS:
                num_sharing = sum(held.keys[depth] in other.keys for other in self.held if other not in self.bound)
                alone_tokens = (num_tokens - depth * BLOCK_SIZE_TOKENS) / 2
                part[held] = (own[held] - alone_tokens) / num_sharing + alone_tokens
        parts = self.table.shared_own_tokens()
        assert [parts[held.row] for held in self.held] == pytest.approx(list(part.values()))

    def _check_sharing(self) -> None:
        chains = [held.keys for held in self.held if held.keys]
        if chains:
            keys = self.rng.choice(chains)
            depth = self.rng.randrange(len(keys))
            sharing = [h for h in self.held if h not in self.bound and keys[depth] in h.keys]
            found = self.table.sharing(keys, depth)
            assert len(found) == len(sharing)
            assert set(found) == set(sharing)


@pytest.mark.parametrize("seed", range(20))
def test_rows_stay_with_their_requests(seed: int) -> None:
    loop = asyncio.new_event_loop()
    try:
        _Walk(seed, loop).run()
    finally:
        loop.close()


def test_the_most_urgent_are_looked_at_and_parked_ones_after_all_others_in_turn() -> None:
    draws = random.Random(1)
    for _ in range(200):
        num_rows, limit = draws.randint(1, 40), draws.randint(1, 20)
        loop = asyncio.new_event_loop()
        table = HeldTable(BLOCK_SIZE_TOKENS)
        for ordinal in range(num_rows):
            request = GenerateRequest(RequestId(f"r{ordinal}"), pack_tokens([1]), Sampling(max_tokens=1))
            held = Held(request, [], ordinal, 0, 1, 0.0, frozenset(), loop.create_future())
            table.add(held, Credited(np.zeros(0, dtype=np.int64), 0, 0), 0)
        loop.close()
        urgency = np.array([float(draws.randrange(1000)) for _ in range(num_rows)])
        is_parked = np.array([draws.random() < 0.5 for _ in range(num_rows)])
        rows = table.to_weigh(urgency, is_parked, limit, 1).tolist()
        assert len(rows) == len(set(rows)) == min(limit, num_rows)
        assert rows == sorted(rows, key=lambda row: (-urgency[row], row))
        chosen = sorted(urgency[row] for row in rows if not is_parked[row])
        awake = sorted(urgency[~is_parked])
        assert chosen == awake[max(0, len(awake) - limit) :]
        looked_at = set(rows)
        num_turns = max(1, limit - len(awake)) if limit > len(awake) else 0
        for turn in range(2, 2 + (-(-int(is_parked.sum()) // num_turns) if num_turns else 0)):
            looked_at |= set(table.to_weigh(urgency, is_parked, limit, turn).tolist())
        assert not num_turns or looked_at == set(range(num_rows))
