"""Python's garbage collector during a training."""

import gc

from visdet.engine.loops import living_objects_not_collected


def test_a_training_leaves_living_objects_to_the_collector_afterwards():
    before = gc.get_freeze_count()
    with living_objects_not_collected():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0
