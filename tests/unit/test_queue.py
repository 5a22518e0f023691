"""The queue alone, over workers that only tell statuses: who goes first, who waits for whom, when anybody is asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from router.bench_rig import INSTANCE, SCHEME, STATUS, Rig, bench_rig
from router.policies.base import Costs, FleetState, Floats, Loads, Requests
from router.policies.cost import CostPolicy
from router.queue import Placement
from router.requests import GenerateRequest
from shared.errors import KvrouteError, NoWorker
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import RequestId, Sampling, WorkerId

W0, W1 = WorkerId("w000"), WorkerId("w001")
BUSY = replace(STATUS, num_running=1, queued_prefill_tokens=2_000)


class _Watched(CostPolicy):
    """Notes how many requests each weighing had."""

    def __init__(self) -> None:
        super().__init__()
        self.num_weighed: list[int] = []
        self.told_s: list[tuple[Floats, Floats]] = []
        """Of each ordering: own prefill of all, and what they take up of a worker."""
        self.is_broken = False

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        if self.is_broken:
            raise ZeroDivisionError("a fault of the policy")
        self.num_weighed.append(len(requests))
        return super().costs(requests, loads, fleet, rng)

    def urgency(self, age_s: Floats, own_s: Floats, work_s: Floats, fleet: FleetState) -> Floats:
        self.told_s.append((own_s, work_s))
        return super().urgency(age_s, own_s, work_s, fleet)


def prompt(start: int, num_tokens: int) -> list[int]:
    return list(range(start, start + num_tokens))


def ask(
    rig: Rig,
    name: str,
    token_ids: Sequence[int],
    excluded: frozenset[WorkerId] = frozenset(),
    worker: WorkerId | None = None,
    max_tokens: int = 8,
) -> asyncio.Task:
    packed = pack_tokens(token_ids)
    request = GenerateRequest(RequestId(name), packed, Sampling(max_tokens=max_tokens), worker=worker)
    keys = block_keys(packed, SCHEME.block_size_tokens, root_key(SCHEME))
    return asyncio.create_task(rig.queue.place(request, keys, excluded, rig.now_s[0]))


def give(rig: Rig, number: int, token_ids: Sequence[int]) -> None:
    """Have a worker hold a prompt."""
    mirror, worker = rig.directory.mirror, rig.clients[number].worker
    copy = mirror.begin(worker, INSTANCE)
    mirror.apply(copy, block_keys(pack_tokens(token_ids), SCHEME.block_size_tokens, root_key(SCHEME)))
    mirror.show(copy)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def worker_of(asked: asyncio.Task[Placement]) -> WorkerId | None:
    return asked.result().booking.worker if asked.done() else None


async def stop(*asked: asyncio.Task[Placement]) -> None:
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def opened(rig: Rig, *statuses: object) -> None:
    for number, client in enumerate(rig.clients):
        give(rig, number, [])
        client.tell(statuses[number] if number < len(statuses) else STATUS)  # type: ignore[arg-type]
    await settle()


async def test_shorter_requests_go_first_until_age_overtakes_them() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, BUSY)
        rig.now_s[0] += 0.1
        long = ask(rig, "long", prompt(0, 8000))
        short = ask(rig, "short", prompt(10_000, 500))
        await settle()
        assert len(rig.queue) == 2
        rig.now_s[0] += 0.1
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        assert [worker_of(asked) for asked in (long, short)] == [None, W0]
        rig.now_s[0] += 3600.0
        late = ask(rig, "late", prompt(20_000, 500))
        rig.clients[0].tell(replace(STATUS, num_running=254))
        await settle()
        assert [worker_of(asked) for asked in (long, late)] == [W0, None]
        await stop(late)


async def test_prompts_that_begin_alike_bear_what_they_share_together_and_go_before_a_shorter_one() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, BUSY)
        alone = ask(rig, "alone", prompt(50_000, 3_000))
        one = ask(rig, "one", [*prompt(0, 4_500), 1])
        await settle()
        other = ask(rig, "other", [*prompt(0, 4_500), 2])
        await settle()
        assert len(rig.queue) == 3
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        assert [worker_of(asked) for asked in (alone, one, other)] == [None, W0, None]
        # Who shares what has been computed has next to nothing of its own left.
        rig.fleet.release(one.result().booking)
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        assert [worker_of(asked) for asked in (alone, other)] == [None, W0]
        await stop(alone)


async def test_policies_are_told_own_prefill_in_full_and_what_is_shared_in_part() -> None:
    policy = _Watched()
    async with bench_rig(1, 0, policy) as rig:
        await opened(rig, BUSY)
        alike = [ask(rig, f"alike-{number}", [*prompt(0, 4_500), number]) for number in range(2)]
        await settle()
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        own_s, work_s = policy.told_s[-1]
        assert own_s.tolist() == [own_s[0]] * 2
        assert (work_s < 0.6 * own_s).all()
        await stop(*alike)


async def test_prompts_that_begin_alike_share_nothing_where_their_beginning_is_held() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, BUSY)
        give(rig, 0, prompt(0, 4_480))
        alone = ask(rig, "alone", prompt(50_000, 500))
        tails = [ask(rig, f"tail-{start}", [*prompt(0, 4_480), *prompt(start, 800)]) for start in (10_000, 20_000)]
        await settle()
        assert len(rig.queue) == 3
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        assert [worker_of(asked) for asked in (alone, *tails)] == [W0, None, None]
        await stop(*tails)


async def test_who_is_cancelled_right_before_a_pass_leaves_no_claim_and_costs_nobody_else() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, BUSY)
        gone = ask(rig, "gone", prompt(0, 400))
        other = ask(rig, "other", prompt(20_000, 800))
        await settle()
        assert len(rig.queue) == 2
        # The pass is before the cancelled task in the loop's next turn.
        rig.clients[0].tell(replace(STATUS, num_running=200))
        gone.cancel()
        await settle()
        assert gone.cancelled()
        rig.clients[0].tell(replace(STATUS, num_running=200))
        await settle()
        assert worker_of(other) == W0
        rig.fleet.release(other.result().booking)
        assert rig.fleet.num_bookings == 0


async def test_nobody_gets_a_worker_any_more_once_the_queue_closes() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, BUSY)
        held = ask(rig, "held", prompt(0, 400))
        await settle()
        # A question to the directory, whose end takes some turns of the loop.
        rig.queue._binder._matching.add(asyncio.create_task(asyncio.sleep(60.0)))
        rig.clients[0].tell(replace(STATUS, num_running=200))
        await rig.queue.close()
        with pytest.raises(NoWorker):
            await held
        assert rig.fleet.num_bookings == 0


async def test_of_equal_prompts_that_with_the_shorter_answer_goes_first() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, BUSY)
        wordy = ask(rig, "wordy", prompt(0, 500), max_tokens=60)
        brief = ask(rig, "brief", prompt(10_000, 500), max_tokens=1)
        await settle()
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        assert [worker_of(asked) for asked in (wordy, brief)] == [None, W0]
        await stop(wordy)


async def test_of_equal_prompts_that_goes_first_whose_beginning_has_got_the_shorter_answers() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, STATUS)
        for start, num_output_tokens in ((0, 300), (10_000, 1)):
            placement = await ask(rig, f"former-{start}", prompt(start, 500), max_tokens=300)
            rig.queue.note_finished(placement, num_output_tokens)
            rig.fleet.release(placement.booking)
        await opened(rig, BUSY)
        wordy = ask(rig, "wordy", prompt(0, 500), max_tokens=300)
        brief = ask(rig, "brief", prompt(10_000, 500), max_tokens=300)
        await settle()
        assert len(rig.queue) == 2
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        assert [worker_of(asked) for asked in (wordy, brief)] == [None, W0]
        await stop(wordy)


async def test_newcomer_does_not_take_what_somebody_more_urgent_has_waited_for() -> None:
    async with bench_rig(1, 0) as rig:
        await opened(rig, BUSY)
        held = ask(rig, "held", prompt(0, 500))
        await settle()
        rig.now_s[0] += 1.0
        newcomer = ask(rig, "newcomer", prompt(10_000, 500))
        rig.clients[0].tell(replace(STATUS, num_running=255))
        await settle()
        assert [worker_of(asked) for asked in (held, newcomer)] == [W0, None]
        await stop(newcomer)


async def test_a_newcomer_is_weighed_alone_and_nobody_while_nothing_happens() -> None:
    policy = _Watched()
    async with bench_rig(2, 0, policy) as rig:
        await opened(rig, BUSY)
        give(rig, 0, prompt(0, 8000))
        waiting = [ask(rig, f"r{number}", [*prompt(0, 7000), number]) for number in range(10)]
        await settle()
        # All wait for their holder, though another worker is idle; each was weighed as it came.
        assert len(rig.queue) == 10
        assert policy.num_weighed == [1] * 10
        await settle()
        assert policy.num_weighed == [1] * 10
        rig.clients[1].tell(STATUS)
        await settle()
        assert policy.num_weighed == [1] * 10 + [10]
        await stop(*waiting)
        assert len(rig.queue) == 0


async def test_nobody_is_weighed_while_no_worker_is_ready() -> None:
    policy = _Watched()
    async with bench_rig(2, 0, policy) as rig:
        await opened(rig, BUSY, BUSY)
        waiting = [ask(rig, f"r{number}", prompt(100 * number, 500)) for number in range(3)]
        await settle()
        policy.num_weighed.clear()
        for client in rig.clients * 5:
            client.tell(BUSY)
            await settle()
        assert policy.num_weighed == []
        await stop(*waiting)


async def test_many_that_wait_for_a_busy_holder_hide_nobody_that_wants_another_worker() -> None:
    async with bench_rig(2, 0) as rig:
        await opened(rig, BUSY, replace(STATUS, num_running=256))
        give(rig, 0, prompt(0, 8000))
        waiting = [ask(rig, f"r{number}", [*prompt(0, 7990), number]) for number in range(300)]
        await settle()
        other = ask(rig, "other", prompt(50_000, 4000))
        await settle()
        for _ in range(3):  # a pass looks at 128
            rig.clients[1].tell(STATUS)
            await settle()
        assert worker_of(other) == W1
        assert not any(asked.done() for asked in waiting)
        await stop(*waiting)


async def test_a_held_request_hears_of_what_workers_have_come_to_hold() -> None:
    async with bench_rig(2, 0) as rig:
        await opened(rig, BUSY, BUSY)
        asked = ask(rig, "r", prompt(0, 4000))
        await settle()
        give(rig, 1, prompt(0, 4000))
        for _ in range(20):
            rig.clients[0].tell(BUSY)
            await settle()
        assert not asked.done()
        rig.clients[1].tell(STATUS)
        await settle()
        assert worker_of(asked) == W1
        assert asked.result().matched_tokens == 3968


async def test_a_worker_that_failed_a_request_is_asked_again_only_where_nobody_else_is_left() -> None:
    async with bench_rig(2, 0) as rig:
        await opened(rig)
        give(rig, 0, prompt(0, 4000))
        elsewhere = await ask(rig, "a", prompt(0, 4000), frozenset({W0}))
        assert elsewhere.booking.worker == W1
        again = await ask(rig, "b", prompt(0, 4000), frozenset({W0, W1}))
        assert again.booking.worker == W0


async def test_workers_that_come_and_go_leave_no_request_with_another_s_credit() -> None:
    async with bench_rig(3, 0) as rig:
        await opened(rig, BUSY, BUSY, BUSY)
        give(rig, 2, prompt(0, 4000))
        asked = ask(rig, "r", prompt(0, 4000))
        await settle()
        rig.clients[0].is_connected = False
        rig.clients[0].on_change()
        await settle()
        rig.clients[2].tell(STATUS)
        await settle()
        assert (worker_of(asked), asked.result().matched_tokens) == (WorkerId("w002"), 3968)


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_fault_of_the_policy_reaches_whoever_waits_and_ends_nothing_else(is_ready: bool) -> None:
    policy = _Watched()
    async with bench_rig(1, 0, policy) as rig:
        await opened(rig, STATUS if is_ready else replace(STATUS, num_running=256))
        policy.is_broken = is_ready
        asked = ask(rig, "r", prompt(0, 500))
        await settle()
        policy.is_broken = True
        rig.clients[0].tell(STATUS)
        with pytest.raises(KvrouteError, match="routing failed: a fault of the policy"):
            await asked
        policy.is_broken = False
        assert (await ask(rig, "again", prompt(0, 500))).booking.worker == W0
        assert len(rig.queue) == 0


async def test_a_request_for_one_worker_waits_for_it_while_others_are_free():
    async with bench_rig(2, 0) as rig:
        await opened(rig, STATUS, BUSY)
        asked = ask(rig, "a", prompt(1, 300), worker=W1)
        free = ask(rig, "b", prompt(5_000, 300))
        await settle()
        assert (worker_of(asked), worker_of(free)) == (None, W0)
        rig.clients[1].tell(STATUS)
        await settle()
        assert worker_of(asked) == W1


async def test_a_request_for_a_worker_that_is_gone_or_has_failed_it_goes_to_another():
    async with bench_rig(2, 0) as rig:
        await opened(rig)
        gone = ask(rig, "a", prompt(1, 300), worker=WorkerId("w9"))
        failed = ask(rig, "b", prompt(5_000, 300), frozenset({W1}), worker=W1)
        await settle()
        assert worker_of(gone) is not None
        assert worker_of(failed) == W0
