"""Python's garbage collector during a training."""

import gc

import pytest

from visdet.engine.process.garbage import living_objects_not_collected


@pytest.mark.usefixtures("frozen_objects_are_counted")
def test_a_training_leaves_living_objects_to_the_collector_afterwards():
    gc.unfreeze()  # conftest.py has frozen the modules and the tests
    with living_objects_not_collected():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_itself_remains_frozen():
    own, later = [], None
    gc.freeze()  # the count is no measure: it falls when a frozen object dies, which may be at any moment
    with living_objects_not_collected():
        later = []
        assert not _seen_by_collector(own)
        assert _seen_by_collector(later)
    assert not _seen_by_collector(own)
    assert _seen_by_collector(later)


def _seen_by_collector(wanted):
    return any(item is wanted for item in gc.get_objects())
