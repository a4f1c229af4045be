"""Python's garbage collector during a training."""

import gc

from visdet.engine.loops import living_objects_not_collected


def test_a_training_leaves_living_objects_to_the_collector_afterwards():
    gc.unfreeze()  # conftest.py has frozen the modules and the tests
    with living_objects_not_collected():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_itself_remains_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with living_objects_not_collected():
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == frozen
