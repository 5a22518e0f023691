from tests.support.stores import keys
from worker.sequences import ResidentChanges


def test_what_came_and_went_or_went_and_came_back_is_no_change() -> None:
    first, second, third, fourth = keys(range(4))
    changes = ResidentChanges()
    changes.note_stored([first, second])
    changes.note_removed([second, third])
    changes.note_stored([third, fourth])
    assert changes.take() == ((first, fourth), ())
    assert changes.take() == ((), ())


def test_what_comes_back_after_it_was_told_to_have_gone_is_told_again() -> None:
    (key,) = keys(range(1))
    changes = ResidentChanges()
    for _ in range(2):
        changes.note_removed([key])
        assert changes.take() == ((), (key,))
        changes.note_stored([key])
        assert changes.take() == ((key,), ())
