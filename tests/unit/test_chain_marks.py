from router.chain_marks import chain_marks, last_mark_within
from tests.support.stores import keys


def test_the_last_mark_within_a_depth_is_the_deepest_of_the_marks_up_to_there() -> None:
    chain = keys(range(100))
    for depth in range(len(chain)):
        assert last_mark_within(chain, depth) == list(chain_marks(chain[: depth + 1]))[-1]
