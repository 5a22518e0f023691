from __future__ import annotations

import pytest

from shared.errors import ConfigError, OutOfBlocks, PinRefused, UnknownPin
from shared.hashing import pack_tokens
from shared.types import BlockKey
from tests.support.blocks import BLOCK_SIZE, OTHER_ROOT, ROOT, make_pool, run, start, state, text, weak_chain
from tests.support.operations import count_operations
from worker.blocks import BlockPool
from worker.sequences import BlockCopy


@pytest.mark.parametrize("block_size", [16, 17, 32, 64, 128, 256])
def test_any_block_size_from_16_to_256_shares_full_blocks_of_an_equal_beginning(block_size: int):
    pool = BlockPool(12, block_size, "lru", max_sequence_tokens=4 * block_size)
    prefix = list(range(2 * block_size))
    first = start(pool, "r1", pack_tokens([*prefix, 1]))
    second = start(pool, "r2", pack_tokens([*prefix, 2]))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 2 * block_size)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    pool.check()


@pytest.mark.parametrize("block_size", [15, 257, 0, -1])
def test_other_block_sizes_are_refused_with_the_limits(block_size: int):
    with pytest.raises(ConfigError, match=f"block size {block_size}: must be 16 to 256 tokens"):
        BlockPool(12, block_size, "lru", max_sequence_tokens=1)


def test_a_pool_too_small_for_one_longest_sequence_is_refused_with_the_figures():
    with pytest.raises(ConfigError, match="3 blocks of 16 tokens hold 48 tokens, less than one longest sequence of 49"):
        make_pool(3, max_sequence_tokens=49)


def test_a_block_in_the_middle_matches_only_behind_the_same_beginning():
    pool = make_pool(12)
    run(pool, "r1", text(1, 2, 3))
    assert run(pool, "r2", text(4, 2, 3)) == 0
    assert run(pool, "r3", text(2, 3, tail=1)) == 0


def test_the_last_token_of_a_prompt_is_always_computed():
    pool = make_pool(12)
    run(pool, "r1", text(1, 2))
    assert (run(pool, "r2", text(1, 2)), run(pool, "r3", text(1, 2, tail=1))) == (BLOCK_SIZE, 2 * BLOCK_SIZE)


def test_tenants_share_nothing():
    pool = make_pool(12)
    run(pool, "r1", text(1, 2, tail=1))
    assert run(pool, "r2", text(1, 2, tail=1), root=OTHER_ROOT) == 0
    pool.check()


def test_blocks_cannot_be_found_before_they_are_computed():
    pool = make_pool(12)
    sequence = pool.allocate("r1", text(1, 2, 3), ROOT)
    assert pool.num_cached_tokens(text(1, 2, 3), ROOT) == 0
    pool.commit(sequence, 2 * BLOCK_SIZE + 5)
    assert pool.num_cached_tokens(text(1, 2, 3, tail=1), ROOT) == 2 * BLOCK_SIZE
    with pytest.raises(ValueError, match="37 to 48"):
        pool.commit(sequence, 36)
    with pytest.raises(ValueError, match="37 to 48"):
        pool.commit(sequence, 49)


def test_generated_blocks_are_found_by_the_next_turn():
    pool = make_pool(12)
    first_turn = start(pool, "turn 1", text(1, tail=10))
    answer = pack_tokens(range(500, 530))
    for token in range(30):
        pool.append(first_turn, answer[token * 4 : token * 4 + 4])
    pool.commit(first_turn, first_turn.num_tokens - 1)
    pool.release(first_turn)
    history = text(1, tail=10) + answer
    assert run(pool, "turn 2", history + pack_tokens([7] * 20)) == 3 * BLOCK_SIZE
    pool.check()


def test_a_refused_allocation_changes_nothing():
    pool = make_pool(6, "adaptive")
    run(pool, "r1", text(1, 2, 3))
    start(pool, "r2", text(4, 5, 6))
    before = state(pool)
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 of 6 can be had, 0 are pinned"):
        pool.allocate("r3", text(1, 2, 7, 8), ROOT)
    assert state(pool) == before
    pool.check()


def test_a_refused_append_changes_nothing():
    pool = make_pool(4)
    sequence = start(pool, "r1", text(1, 2, tail=5))
    fork = pool.fork(sequence)
    start(pool, "r2", text(3))
    before = state(pool)
    with pytest.raises(OutOfBlocks, match="1 blocks needed, 0 of 4"):
        pool.append(fork, pack_tokens([1]))
    assert state(pool) == before


def test_cached_blocks_of_a_refused_prompt_do_not_count_as_room():
    pool = make_pool(4)
    run(pool, "r1", text(1, 2))
    held = start(pool, "r2", text(3, 4))
    with pytest.raises(OutOfBlocks, match="1 blocks needed, 0 of 4 can be had"):
        pool.allocate("r3", text(1, 2, tail=1), ROOT)
    pool.release(held)
    assert run(pool, "r3", text(1, 2, tail=1)) == 2 * BLOCK_SIZE


def test_sequences_beyond_the_longest_and_empty_ones_are_refused():
    pool = make_pool(4, max_sequence_tokens=20)
    with pytest.raises(ValueError, match="21 tokens: at most 20 in a sequence"):
        pool.allocate("r1", text(1, tail=5), ROOT)
    sequence = start(pool, "r1", text(1, tail=4))
    with pytest.raises(ValueError, match="21 tokens"):
        pool.append(sequence, pack_tokens([1]))
    for nothing in (b"", b"abc"):
        with pytest.raises(ValueError, match="not one or more packed tokens"):
            pool.allocate("r2", nothing, ROOT)


def test_double_release_and_foreign_sequences_are_errors_and_change_nothing():
    pool, other = make_pool(6), make_pool(6)
    released, foreign = start(pool, "r1", text(1, 2)), start(other, "r1", text(1, 2))
    pool.release(released)
    before = state(pool)
    for sequence in (released, foreign):
        for call in (
            lambda: pool.release(sequence),  # noqa: B023
            lambda: pool.fork(sequence),  # noqa: B023
            lambda: pool.append(sequence, pack_tokens([1])),  # noqa: B023
            lambda: pool.commit(sequence, sequence.num_tokens),  # noqa: B023
            lambda: pool.pin("p", sequence, now_s=0.0),  # noqa: B023
            lambda: pool.tokens_of(sequence),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="is not this pool's, or has been released"):
                call()
    with pytest.raises(ValueError, match="no group 'r1'"):
        pool.release_group("r1")
    assert state(pool) == before


def test_blocks_go_leaf_first_in_exact_order():
    pool = make_pool(6)
    first, second = start(pool, "r1", text(1, 2, 3)), start(pool, "r2", text(1, 2, 4, tail=3))
    assert (first.blocks, second.blocks) == ([0, 1, 2], [0, 1, 3, 4])
    pool.release(first)
    pool.release(second)
    # The partial tail can serve nobody; of private and shared blocks of one age the private ones are later.
    assert pool._store.free.in_order() == [4, 5, 2, 3, 1, 0]


def test_a_group_is_released_at_once_leaf_first():
    pool = make_pool(11)
    parent = start(pool, "r1", text(1, 2, tail=4))
    for token in range(3):
        child = pool.fork(parent)
        pool.append(child, pack_tokens([token] * BLOCK_SIZE))
        pool.commit(child, child.num_tokens)
    other = start(pool, "r2", text(5))
    assert pool.statistics().num_free == (1, 0, 0, 0)
    assert pool.release_group("r1") == 4
    pool.check()
    assert pool.statistics().num_sequences == 1
    assert pool._store.free.in_order()[-2:] == [1, 0]
    pool.release(other)


def test_low_priority_blocks_go_before_older_ones():
    pool = make_pool(4, "lru")
    run(pool, "r1", text(1, tail=1))
    run(pool, "batch", text(2, 3, tail=1), is_low_priority=True)
    run(pool, "r2", text(4, 5, tail=1))
    assert [pool.num_cached_tokens(text(n, tail=1), ROOT) for n in (1, 2, 4)] == [BLOCK_SIZE, 0, BLOCK_SIZE]


def test_what_stands_behind_blocks_of_low_priority_goes_with_them_whatever_its_request_wants_later():
    pool = make_pool(4)
    run(pool, "r1", text(1, tail=1), is_low_priority=True)
    run(pool, "r1", text(1, 2, tail=1))  # the same request has come back with another priority
    run(pool, "r2", text(8, tail=1))
    run(pool, "r3", text(9, tail=1))
    pool.check()
    assert [pool.num_cached_tokens(text(*starts, tail=1), ROOT) for starts in ((1, 2), (8,), (9,))] == [16, 16, 16]


def test_shared_blocks_outlive_private_ones():
    pool = make_pool(6, "shared_first")
    for request in ("r1", "r2"):
        run(pool, request, text(1, 2, tail=1))
    for number in range(20):
        run(pool, f"one-off {number}", text(100 + 2 * number, 101 + 2 * number, tail=1))
    assert pool.num_cached_tokens(text(1, 2, tail=1), ROOT) == 2 * BLOCK_SIZE


def test_what_a_queued_request_will_find_counts_as_just_used():
    pool = make_pool(4)
    run(pool, "r1", text(1, 2))
    run(pool, "r2", text(3, 4))
    pool.expect(text(1, 2, tail=1), ROOT)
    run(pool, "r3", text(5, 6))
    assert [pool.num_cached_tokens(text(n, n + 1, tail=1), ROOT) for n in (1, 3)] == [2 * BLOCK_SIZE, 0]


def test_duplicated_blocks_of_two_requests_at_once_share_one_key_and_both_go():
    pool = make_pool(6, "shared_first")
    first, second = (pool.allocate(request, text(1, 2), ROOT) for request in ("r1", "r2"))
    pool.commit(first, 2 * BLOCK_SIZE)
    pool.commit(second, 2 * BLOCK_SIZE)
    assert not set(first.blocks) & set(second.blocks)
    assert pool.statistics().num_cached == 2
    pool.release(first)
    pool.release(second)
    pool.check()
    assert pool.statistics().num_free == (2, 0, 0, 4)
    start(pool, "r3", text(3, 4, 5, 6))
    assert pool.num_cached_tokens(text(1, 2, tail=1), ROOT) == 2 * BLOCK_SIZE
    pool.check()


def test_a_preempted_request_returns_to_its_blocks_and_shares_with_nobody():
    pool = make_pool(6)
    prompt = text(1, 2, tail=3)
    pool.release(start(pool, "r1", prompt))
    again = start(pool, "r1", prompt)
    assert again.num_cached_tokens == 2 * BLOCK_SIZE
    pool.release(again)
    assert pool.statistics().num_free == (4, 0, 2, 0)


def test_a_class_change_while_a_request_is_queued_moves_its_free_blocks():
    pool = make_pool(8, "shared_first")
    run(pool, "r1", text(1, 2))
    pool.expect(text(1, 2, tail=1), ROOT)
    second = start(pool, "r2", text(1, 3))
    pool.release(second)
    pool.check()
    assert pool.statistics().num_free == (5, 0, 2, 1)
    assert run(pool, "queued", text(1, 2, tail=1)) == 2 * BLOCK_SIZE


def test_a_shared_prefix_that_is_missed_after_it_went_moves_the_rule_once():
    pool = make_pool(4, "adaptive")
    for request in ("r1", "r2"):
        run(pool, request, text(1, tail=1))
    for number in range(2, 5):
        run(pool, f"one-off {number}", text(number, number + 10, number + 20, tail=1))
    adaptive = pool._store.free.adaptive
    assert adaptive is not None
    assert (adaptive.num_ghosts[1], adaptive.num_ghost_hits) == (1, [0, 0])
    run(pool, "r3", text(1, tail=1))
    run(pool, "r4", text(1, tail=1))
    assert (adaptive.num_ghosts[1], adaptive.num_ghost_hits) == (0, [0, 1])
    assert adaptive.pool_sizes > 1


def test_a_planted_collision_never_shares_and_nothing_behind_it_does():
    pool = make_pool(12)
    run(pool, "r1", text(1, 2, 3))
    planted = pool._keys_of(text(1, 2, 3), ROOT)
    assert run(pool, "r2", text(4, 2, 3), keys=planted) == 0
    assert pool.statistics().num_collisions == 1
    assert run(pool, "r3", text(4, 2, 3, tail=1), keys=planted) == 0
    assert run(pool, "r4", text(1, 2, 3, tail=1)) == 3 * BLOCK_SIZE


def test_equal_tokens_under_one_key_behind_another_beginning_never_share():
    pool = make_pool(12)
    one, two, both = (BlockKey(bytes([number]) * 16) for number in range(3))
    run(pool, "r1", text(1, 3), keys=[one, both])
    assert run(pool, "r2", text(2, 3), keys=[two, both]) == 0
    assert run(pool, "r3", text(2, 3, tail=1), keys=[two, both]) == BLOCK_SIZE
    assert run(pool, "r4", text(1, 3, tail=1), keys=[one, both]) == 2 * BLOCK_SIZE


def test_a_first_block_that_repeats_its_own_key_is_not_found_behind_itself():
    pool = make_pool(12, hash_chain=weak_chain)
    key = BlockKey(bytes(16))
    run(pool, "r1", text(1, 1, tail=1), keys=[key, key])
    assert run(pool, "r2", text(1, 1, tail=1), keys=[key, key]) == BLOCK_SIZE


def test_a_fork_takes_no_block_and_the_first_writer_copies_the_shared_tail():
    pool = make_pool(8)
    parent = start(pool, "r1", text(1, tail=4))
    child = pool.fork(parent)
    assert (child.blocks, pool.statistics().num_used, pool.statistics().num_shared) == ([0, 1], 2, 2)
    assert pool.append(child, pack_tokens([7])) == BlockCopy(source=1, target=2, num_tokens=4)
    assert pool.append(parent, pack_tokens([8])) is None
    assert (pool.tokens_of(parent), pool.tokens_of(child)) == (
        text(1, tail=4) + pack_tokens([8]),
        text(1, tail=4) + pack_tokens([7]),
    )
    assert (parent.blocks, child.blocks) == ([0, 1], [0, 2])
    pool.check()


def test_a_fork_inside_a_cached_block_copies_it_though_nobody_else_holds_it():
    pool = make_pool(8)
    parent = start(pool, "r1", text(1, 2))
    child = pool.fork(parent, num_tokens=BLOCK_SIZE + 3)
    pool.release(parent)
    assert pool.append(child, pack_tokens([7])) == BlockCopy(source=1, target=2, num_tokens=3)
    assert pool.num_cached_tokens(text(1, 2, tail=1), ROOT) == 2 * BLOCK_SIZE
    assert pool.tokens_of(child) == text(1, 2)[: (BLOCK_SIZE + 3) * 4] + pack_tokens([7])
    pool.check()


def test_a_copy_and_the_blocks_behind_it_are_taken_at_once():
    pool = make_pool(8)
    parent = start(pool, "r1", text(1, tail=4))
    child = pool.fork(parent)
    more = pack_tokens(range(3 * BLOCK_SIZE))
    assert pool.append(child, more) == BlockCopy(source=1, target=2, num_tokens=4)
    assert child.blocks == [0, 2, 3, 4, 5]
    pool.commit(child, child.num_tokens)
    assert (pool.tokens_of(child), pool.tokens_of(parent)) == (text(1, tail=4) + more, text(1, tail=4))
    pool.check()


def test_forks_of_one_request_do_not_make_its_blocks_shared_by_two_requests():
    pool = make_pool(8)
    parent = start(pool, "r1", text(1, 2))
    child = pool.fork(parent)
    pool.commit(child, child.num_tokens)
    pool.release_group("r1")
    assert pool.statistics().num_free == (6, 0, 2, 0)


def test_a_fork_before_a_collision_can_be_found_again():
    pool = make_pool(8, hash_chain=weak_chain)
    parent = start(pool, "r1", text(1))
    other = next(
        number for number in range(2, 99) if weak_chain(text(1, number), BLOCK_SIZE, ROOT)[1] == parent.keys[0]
    )
    pool.append(parent, text(other))
    pool.commit(parent, parent.num_tokens)
    assert (parent.is_findable, pool.statistics().num_collisions) == (False, 1)
    child = pool.fork(parent, num_tokens=BLOCK_SIZE)
    third = next(
        number for number in range(2, 99) if weak_chain(text(1, number), BLOCK_SIZE, ROOT)[1] != parent.keys[0]
    )
    pool.append(child, text(third))
    pool.commit(child, child.num_tokens)
    assert child.num_committed_blocks == 2
    pool.check()


def test_a_fork_at_a_place_that_is_not_there_is_an_error():
    pool = make_pool(8)
    parent = start(pool, "r1", text(1))
    for num_tokens in (0, 17):
        with pytest.raises(ValueError, match=f"fork at {num_tokens} tokens: must be 1 to 16"):
            pool.fork(parent, num_tokens=num_tokens)


def test_a_pinned_prefix_survives_whatever_floods_the_pool():
    pool = make_pool(8, max_sequence_tokens=4 * BLOCK_SIZE)
    warm_up = start(pool, "warm-up", text(1, 2, 3, tail=1))
    assert pool.pin("system", warm_up, now_s=0.0) == 3
    pool.release(warm_up)
    for number in range(20):
        run(pool, f"one-off {number}", text(100 + 2 * number, 101 + 2 * number, tail=1))
    assert pool.num_cached_tokens(text(1, 2, 3, tail=1), ROOT) == 3 * BLOCK_SIZE
    assert (pool.statistics().num_pinned, pool.statistics().num_used) == (3, 3)
    assert pool.unpin("system") == 3
    pool.check()
    assert pool.statistics().num_used == 0


def test_pins_over_budget_are_refused_with_the_figures_and_change_nothing():
    pool = make_pool(8, max_sequence_tokens=5 * BLOCK_SIZE)  # room for one longest request leaves three
    first, second = start(pool, "r1", text(1, 2, tail=1)), start(pool, "r2", text(3, 4, tail=1))
    pool.pin("first", first, now_s=0.0)
    before = state(pool)
    with pytest.raises(
        PinRefused,
        match="pin 'second': its 2 blocks would make 4 pinned blocks, the budget is 3, 2 are pinned under other names",
    ):
        pool.pin("second", second, now_s=0.0)
    assert state(pool) == before
    assert pool.pin("first", second, now_s=0.0) == 2
    pool.release_group("r1")
    pool.release_group("r2")
    pool.check()


def test_pins_end_with_their_time():
    pool = make_pool(8, max_sequence_tokens=4 * BLOCK_SIZE)
    sequence = start(pool, "r1", text(1, 2))
    pool.pin("short", sequence, now_s=100.0, ttl_s=5.0)
    pool.pin("long", sequence, now_s=100.0, ttl_s=50.0)
    pool.pin("endless", sequence, now_s=100.0)
    assert pool.expire_pins(104.9) == []
    assert pool.expire_pins(105.0) == ["short"]
    assert [pin.name for pin in pool.pins()] == ["long", "endless"]
    pool.check()


def test_pins_that_keep_nothing_and_unknown_names_are_refused():
    pool = make_pool(8, max_sequence_tokens=4 * BLOCK_SIZE)
    sequence = start(pool, "r1", text(1))
    for ttl_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="must be above 0"):
            pool.pin("p", sequence, now_s=0.0, ttl_s=ttl_s)
    with pytest.raises(ConfigError, match="pin 'p': not one full block to keep"):
        pool.pin("p", pool.allocate("r2", text(tail=5), ROOT), now_s=0.0)
    pool.pin("known", sequence, now_s=0.0)
    with pytest.raises(UnknownPin, match="no pin 'p'; pins are: known"):
        pool.unpin("p")


def test_a_prefix_that_several_requests_have_used_is_shared_at_once_when_it_comes_back():
    pool = make_pool(4, "adaptive")
    for request in ("r1", "r2"):
        run(pool, request, text(1, 2, tail=1))
    for number in range(4):
        run(pool, f"one-off {number}", text(*range(10 + 4 * number, 14 + 4 * number)))
    assert run(pool, "r3", text(1, 2, 3, tail=1)) == 0
    assert pool.statistics().num_free == (1, 0, 1, 2)
    pool.check()


def test_reset_gives_up_pins_and_is_refused_while_a_sequence_lives():
    pool = make_pool(8, "adaptive", max_sequence_tokens=4 * BLOCK_SIZE)
    sequence = start(pool, "r1", text(1, 2))
    pool.pin("system", sequence, now_s=0.0)
    before = state(pool)
    assert not pool.reset()
    assert state(pool) == before
    pool.release(sequence)
    assert pool.reset()
    assert (pool.pins(), pool.statistics().num_free, pool.statistics().num_cached) == ([], (8, 0, 0, 0), 0)
    assert run(pool, "r2", text(1, 2)) == 0
    pool.check()


def test_statistics_count_what_is_there():
    pool = make_pool(8, bytes_per_token=10, max_sequence_tokens=4 * BLOCK_SIZE)
    run(pool, "r0", text(9))
    first, _ = start(pool, "r1", text(1, 2, tail=4)), start(pool, "r2", text(1, 2, tail=12))
    pool.pin("system", first, now_s=0.0)
    figures = pool.statistics()
    block_bytes = 10 * BLOCK_SIZE
    assert (figures.num_blocks, figures.num_used, figures.num_shared, figures.num_pinned) == (8, 4, 2, 2)
    assert (figures.num_free, figures.num_cached, figures.num_sequences) == ((3, 0, 1, 0), 3, 2)
    assert (figures.num_prompt_tokens, figures.num_cached_tokens) == (16 + 36 + 44, 32)
    assert figures.fragmentation == (12 + 4) / (4 * BLOCK_SIZE)
    assert (figures.total_bytes, figures.used_bytes) == (8 * block_bytes, 4 * block_bytes)
    assert figures.bytes_saved_by_sharing == 2 * block_bytes
    assert figures.bytes_saved_against_static == 2 * 4 * block_bytes - 4 * block_bytes


def test_check_finds_what_is_broken():
    pool = make_pool(8)
    sequence = start(pool, "r1", text(1, 2))
    pool._store.num_holders[0] += 1
    with pytest.raises(AssertionError, match="block 0 counts 2 holders and has 1"):
        pool.check()
    pool._store.num_holders[0] -= 1
    pool._store.tokens[1] = text(3)
    with pytest.raises(AssertionError, match="a key is not that of its tokens"):
        pool.check()
    pool._store.tokens[1] = text(2)
    pool._store.free.uncache(sequence.blocks[0])
    with pytest.raises(AssertionError, match="block 0 cannot be found by its key"):
        pool.check()


def test_the_cost_of_a_sequence_does_not_depend_on_the_size_of_the_pool():
    def operations(num_blocks: int) -> int:
        pool = make_pool(num_blocks, "adaptive", max_sequence_tokens=10 * BLOCK_SIZE)
        for number in range(num_blocks // 8):
            run(pool, f"r{number}", text(*range(number * 8, number * 8 + 8)))

        def hits_and_misses() -> None:
            for number in range(20):
                run(pool, f"hit {number}", text(*range(8), tail=1))
                run(pool, f"miss {number}", text(*range(-100 - number, -92 - number), tail=1))

        return count_operations(hits_and_misses)

    assert operations(400) == operations(4000)
