"""What a simulated engine computes in each step: vLLM's scheduler in small, on our own block pool. Knows no clock.

As vLLM V1 does: sequences that decode go first, then the prompt under way, then waiting ones in order of priority and
arrival, as long as the step's budget of tokens lasts. Blocks are allocated for the chunk that a step computes; a
waiting request is admitted if its whole prompt would fit; where a running one lacks a block, the youngest gives up its
blocks and starts over. Blocks can be found as soon as the step that fills them is scheduled.
"""

from __future__ import annotations

import heapq
import math
import struct
from bisect import bisect_right
from dataclasses import dataclass

from shared.errors import EngineError, OutOfBlocks
from shared.hashing import TOKEN_SIZE_BYTES, block_keys
from shared.types import FinishReason
from worker.blocks import BlockPool
from worker.engines.base import EngineDelta
from worker.engines.profiles import LatencyProfile
from worker.engines.simulated import NORMAL_PRIORITY, Simulated, State, answer


@dataclass(slots=True)
class Plan:
    """One step, or several in a row that differ only in how much context is read."""

    num_prefill_tokens: int
    num_prefill_pairs: float
    """Pairs of a prompt token and a token before it."""
    num_decode_seqs: int
    num_context_tokens: int
    """Of what decodes, in the first of the steps; each later step reads one more for each sequence."""
    num_steps: int

    def duration_s(self, profile: LatencyProfile, num_steps: int) -> float:
        """The time of the first steps."""
        each_s = (
            profile.step_s
            + profile.prefill_s_per_token * self.num_prefill_tokens
            + profile.prefill_s_per_token_context * self.num_prefill_pairs
            + profile.decode_s_per_seq * self.num_decode_seqs
            + profile.decode_s_per_context_token * self.num_context_tokens
        )
        num_more_tokens = self.num_decode_seqs * (num_steps * (num_steps - 1) / 2)
        return num_steps * each_s + profile.decode_s_per_context_token * num_more_tokens


class Batch:
    """The sequences of one engine and the steps that they take.

    Use: `add`, then `plan` and, when its time has passed, `complete`, in turn; `remove` at any time. All sequences that
    decode gain one token with each step, so that only sequences to which something happens are ever touched: `_due`
    holds one entry for each, the step after which it ends, needs a block or has tokens to tell.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        step_budget_tokens: int,
        vocabulary_size: int,
        tokens_per_delta: int = 1,
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._step_budget_tokens = step_budget_tokens
        self._vocabulary_size = vocabulary_size
        self._tokens_per_delta = tokens_per_delta
        self._waiting: list[tuple[int, int, Simulated]] = []
        """A heap; entries of ended sequences are skipped."""
        self._num_waiting = 0
        self._prefilling: list[Simulated] = []
        self._decoding: dict[Simulated, None] = {}
        self._due: list[tuple[int, int, Simulated]] = []
        """A heap; an entry counts only if its sequence decodes and is due after that step still."""
        self._growing: list[Simulated] = []
        """Decoding ones that need a block for the next step."""
        self._joining: list[Simulated] = []
        """Prefilling ones whose last chunk the step under way computes."""
        self._step = 0
        """The last one that has ended."""
        self._ended_at_s = 0.0
        self._context_base_tokens = 0
        """Context of what decodes is this plus, for each sequence, the number of the step."""
        self._plan: Plan | None = None
        self._num_added = 0
        self._slow_steps: list[tuple[int, float]] = []
        """Steps that took longer than all after them, and how long: what the longest gap of a sequence follows from."""
        self.num_preemptions = 0
        self.num_prefilled_tokens = 0
        """Prompt tokens that steps have computed on the way to first tokens."""
        self._num_planned_tokens = 0
        """The same, of the step under way."""

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def add(self, sequence: Simulated) -> None:
        """Let a sequence wait for its turn. What it will find in the cache counts as just used."""
        sequence.number = self._num_added
        self._num_added += 1
        sequence.keys = block_keys(sequence.packed_prompt, self._pool.block_size_tokens, sequence.root)
        self._pool.expect(sequence.packed_prompt, sequence.root, keys=sequence.keys)
        self._wait(sequence)

    def remove(self, sequence: Simulated) -> None:
        """End a sequence and give its blocks back; one that has ended is no error."""
        if sequence.state is State.WAITING:
            self._num_waiting -= 1
            sequence.state = State.ENDED
        elif sequence.state is not State.ENDED:
            self._leave(sequence, State.ENDED)

    def plan(self) -> Plan | None:
        """Schedule what comes next, and take blocks for it; None if there is nothing to compute. Modifies."""
        step = self._step + 1
        num_preemptions = self.num_preemptions
        for sequence in sorted(self._growing, key=_order):
            if sequence.state is State.DECODING:
                self._grow(sequence)
        self._growing.clear()
        num_decode_seqs, num_context_tokens = len(self._decoding), self._context_tokens(step)
        budget = max(0, self._step_budget_tokens - num_decode_seqs)
        num_tokens, num_pairs = 0, 0.0
        for sequence in list(self._prefilling):
            chunk = self._extend(sequence, budget - num_tokens)
            num_pairs += _pairs(sequence, chunk)
            num_tokens += chunk
        while self._num_waiting and num_tokens < budget and self.num_running < self._max_num_seqs:
            if self.num_preemptions != num_preemptions and self.num_running:
                break  # as in vLLM: who was preempted waits for another step
            admitted = self._admit(budget - num_tokens)
            if admitted is None:
                break
            chunk = admitted.num_computed_tokens - (admitted.held.num_cached_tokens if admitted.held else 0)
            num_pairs += _pairs(admitted, chunk)
            num_tokens += chunk
        is_anyone_preempted = self.num_preemptions != num_preemptions
        if is_anyone_preempted:
            num_decode_seqs, num_context_tokens = len(self._decoding), self._context_tokens(step)
        if not num_tokens and not num_decode_seqs:
            self._plan = None
            return None
        # Who was preempted may have room in the next step already.
        is_single = num_tokens or self._prefilling or is_anyone_preempted
        num_steps = 1 if is_single else self._num_steps_alike()
        self._plan = Plan(num_tokens, num_pairs, num_decode_seqs, num_context_tokens, num_steps)
        return self._plan

    def complete(self, ended_at_s: float, longest_step_s: float) -> None:
        """The plan's steps have been computed: tell tokens and ends. `longest_step_s` is the time of the last one."""
        assert self._plan is not None
        self._step += self._plan.num_steps
        self._ended_at_s = ended_at_s
        self._plan = None
        self.num_prefilled_tokens += self._num_planned_tokens
        self._num_planned_tokens = 0
        self._note_slow(longest_step_s)
        for sequence in self._joining:
            if sequence.state is State.PREFILLING:
                self._join(sequence)
        self._joining.clear()
        due = self._due
        while due and due[0][0] <= self._step:
            due_step, _, sequence = heapq.heappop(due)
            if sequence.state is State.DECODING and due_step == sequence.due_step:
                self._advance(sequence)
        if not self._decoding:
            self._slow_steps.clear()

    def fail_all(self, error: EngineError) -> None:
        """Tell everybody that the engine is dead."""
        waiting = [sequence for _, _, sequence in self._waiting if sequence.state is State.WAITING]
        for sequence in [*self._decoding, *self._prefilling, *sorted(waiting, key=_order)]:
            self.remove(sequence)
            sequence.listener.fail(error)

    # Scheduling.

    def _wait(self, sequence: Simulated) -> None:
        sequence.state = State.WAITING
        heapq.heappush(self._waiting, (*sequence.order, sequence))
        self._num_waiting += 1

    def _num_steps_alike(self) -> int:
        """How many steps from the next one on differ in nothing but context."""
        due = self._due
        while due[0][2].state is not State.DECODING or due[0][0] != due[0][2].due_step:
            heapq.heappop(due)
        return due[0][0] - self._step

    def _context_tokens(self, step: int) -> int:
        return self._context_base_tokens + step * len(self._decoding)

    def _grow(self, sequence: Simulated) -> None:
        """Another block for one that decodes, or its preemption. The block before it is full now."""
        held = sequence.held
        assert held is not None
        num_held = held.num_tokens
        num_full = -(-num_held // self._pool.block_size_tokens) * self._pool.block_size_tokens
        more = self._output_part(sequence, num_held, num_full + 1)
        while sequence.state is State.DECODING:
            try:
                self._pool.append(held, more)
            except OutOfBlocks:
                self._preempt_youngest()
                continue
            self._pool.commit(held, num_full)
            self._push_due(sequence)
            return

    def _extend(self, sequence: Simulated, budget: int) -> int:
        """The next chunk of a prompt under way; the tokens of it, 0 where there is no room for any."""
        held = sequence.held
        num_done = sequence.num_computed_tokens
        tokens = sequence.prefill()
        num_end = min(num_done + budget, len(tokens) // TOKEN_SIZE_BYTES)
        if num_end <= num_done or held is None:
            return 0
        block_size = self._pool.block_size_tokens
        keys = sequence.keys[num_done // block_size : num_end // block_size]
        while sequence.state is State.PREFILLING:
            try:
                self._pool.append(held, tokens[num_done * TOKEN_SIZE_BYTES : num_end * TOKEN_SIZE_BYTES], keys=keys)
            except OutOfBlocks:
                self._preempt_youngest()
                continue
            self._computed(sequence, num_end, len(tokens) // TOKEN_SIZE_BYTES)
            return num_end - num_done
        return 0

    def _admit(self, budget: int) -> Simulated | None:
        """Begin the first of the waiting, if there is room for all of it; None if not."""
        while self._waiting[0][2].state is not State.WAITING:
            heapq.heappop(self._waiting)
        sequence = self._waiting[0][2]
        tokens, keys = sequence.prefill(), sequence.keys
        num_tokens = len(tokens) // TOKEN_SIZE_BYTES
        num_cached, num_left = self._pool.room_after(tokens, sequence.root, keys=keys)
        if num_left < 0:
            return None
        num_end = min(num_cached + budget, num_tokens)
        held = self._pool.allocate(
            sequence.request,
            tokens[: num_end * TOKEN_SIZE_BYTES],
            sequence.root,
            keys=keys[: num_end // self._pool.block_size_tokens],
            is_low_priority=sequence.priority > NORMAL_PRIORITY,
        )
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        sequence.held = held
        sequence.num_computed_tokens = held.num_cached_tokens
        sequence.state = State.PREFILLING
        if sequence.cached_tokens is None:
            sequence.cached_tokens = held.num_cached_tokens
        self._prefilling.append(sequence)
        self._computed(sequence, num_end, num_tokens)
        return sequence

    def _computed(self, sequence: Simulated, num_tokens: int, num_wanted: int) -> None:
        """The step that is being planned computes a sequence up to `num_tokens`."""
        assert sequence.held is not None
        if sequence.output is None:
            self._num_planned_tokens += num_tokens - sequence.num_computed_tokens
        sequence.num_computed_tokens = num_tokens
        self._pool.commit(sequence.held, num_tokens)
        if num_tokens == num_wanted:
            self._joining.append(sequence)

    def _preempt_youngest(self) -> None:
        """Take the blocks of the last in order among those that run; it waits again, and computes all of it anew."""
        victim = max([*self._prefilling, *self._decoding], key=_order)
        self.num_preemptions += 1
        num_generated = victim.num_before_join
        if victim.state is State.DECODING:
            self._note_gap(victim)
            victim.last_token_at_s = self._ended_at_s
            num_generated = victim.num_generated(self._step)
        self._leave(victim, State.WAITING)
        victim.num_before_join = num_generated
        victim.keys = block_keys(victim.prefill(), self._pool.block_size_tokens, victim.root)
        self._wait(victim)

    def _leave(self, sequence: Simulated, state: State) -> None:
        """Take a running sequence out, and its blocks back."""
        if sequence.state is State.DECODING:
            del self._decoding[sequence]
            self._context_base_tokens -= self._context_at_step_0(sequence)
        else:
            self._prefilling.remove(sequence)
            if sequence in self._joining:
                self._joining.remove(sequence)
        assert sequence.held is not None
        self._pool.release(sequence.held)
        sequence.held = None
        sequence.state = state

    # What steps bring.

    def _join(self, sequence: Simulated) -> None:
        """The last chunk is computed: here is the first token, or the next one after a preemption."""
        self._prefilling.remove(sequence)
        sequence.state = State.DECODING
        sequence.joined_step = self._step
        self._decoding[sequence] = None
        self._context_base_tokens += self._context_at_step_0(sequence)
        if sequence.output is None:
            sequence.output = answer(
                sequence.packed_prompt, sequence.max_output_tokens, self._vocabulary_size, sequence.stop_token_ids
            )
            sequence.packed_output = struct.pack(f"<{len(sequence.output)}i", *sequence.output)
        if sequence.last_token_at_s is not None:
            sequence.longest_gap_s = max(sequence.longest_gap_s, self._ended_at_s - sequence.last_token_at_s)
            sequence.last_token_at_s = None
        self._advance(sequence)

    def _advance(self, sequence: Simulated) -> None:
        """Tell what is due of one that decodes, and note what comes next."""
        assert sequence.output is not None
        num_generated = sequence.num_generated(self._step)
        if num_generated >= len(sequence.output):
            self._finish(sequence)
            return
        is_first = not sequence.num_told_tokens
        if is_first or num_generated - sequence.num_told_tokens >= self._tokens_per_delta:
            self._tell(sequence, num_generated, None)
        if self._step_before_growth(sequence) <= self._step:
            self._growing.append(sequence)
        else:
            self._push_due(sequence)

    def _finish(self, sequence: Simulated) -> None:
        held, output = sequence.held, sequence.output
        assert held is not None
        assert output is not None
        # The last token is sampled, but never computed.
        num_computed = sequence.num_prompt_tokens + len(output) - 1
        if num_computed > held.num_tokens:
            self._pool.append(held, self._output_part(sequence, held.num_tokens, num_computed))
        self._pool.commit(held, num_computed)
        self._note_gap(sequence)
        if sequence.keep is not None:
            sequence.keep(held)
        self._leave(sequence, State.ENDED)
        is_stopped = output[-1] in sequence.stop_token_ids
        self._tell(sequence, len(output), FinishReason.STOP if is_stopped else FinishReason.LENGTH)

    def _tell(self, sequence: Simulated, num_tokens: int, finish: FinishReason | None) -> None:
        assert sequence.output is not None
        num_told = sequence.num_told_tokens
        sequence.num_told_tokens = num_tokens
        cached_tokens = None if num_told else sequence.cached_tokens
        sequence.listener.push(
            EngineDelta(sequence.output[num_told:num_tokens], finish, cached_tokens), sequence.longest_gap_s
        )

    def _push_due(self, sequence: Simulated) -> None:
        """Note the step after which something will happen to one that decodes."""
        assert sequence.output is not None
        first = sequence.joined_step - sequence.num_before_join - 1
        num_next = min(len(sequence.output), sequence.num_told_tokens + self._tokens_per_delta)
        sequence.due_step = min(first + num_next, self._step_before_growth(sequence))
        heapq.heappush(self._due, (sequence.due_step, sequence.number, sequence))

    def _step_before_growth(self, sequence: Simulated) -> int:
        """The last step that needs no block more than the sequence has."""
        assert sequence.held is not None
        num_slots = len(sequence.held.blocks) * self._pool.block_size_tokens
        return sequence.joined_step + num_slots - sequence.num_prompt_tokens - sequence.num_before_join

    def _context_at_step_0(self, sequence: Simulated) -> int:
        return sequence.num_prompt_tokens + sequence.num_before_join - sequence.joined_step

    def _output_part(self, sequence: Simulated, start: int, end: int) -> bytes:
        """Packed tokens of the answer, by their places in the whole sequence."""
        num_prompt = sequence.num_prompt_tokens
        return sequence.packed_output[(start - num_prompt) * TOKEN_SIZE_BYTES : (end - num_prompt) * TOKEN_SIZE_BYTES]

    # Gaps between tokens.

    def _note_slow(self, step_s: float) -> None:
        slow = self._slow_steps
        while slow and slow[-1][1] <= step_s:
            slow.pop()
        slow.append((self._step, step_s))

    def _note_gap(self, sequence: Simulated) -> None:
        """Take the steps since a sequence began to decode into account."""
        slow = self._slow_steps
        at = bisect_right(slow, (sequence.joined_step, math.inf))
        if at < len(slow):
            sequence.longest_gap_s = max(sequence.longest_gap_s, slow[at][1])


def _order(sequence: Simulated) -> tuple[int, int]:
    return sequence.order


def _pairs(sequence: Simulated, chunk: int) -> float:
    """Pairs of a token in the chunk that ends a sequence's computed part and a token before it."""
    return chunk * (sequence.num_computed_tokens - chunk / 2)
