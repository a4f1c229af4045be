"""Tracking: events by hand, and against the devkit where it is installed."""

import numpy as np
import pytest
from driving_frames import evaluate, frame
from numpy.testing import assert_allclose

from visdet.evaluation.clear_mot import (
    Frame,
    count_events,
    interpolate,
)


def objects(**places):
    ids = np.array([int(name[1:]) for name in places], dtype=int)
    return Frame(ids, np.array(list(places.values()), float).reshape(-1, 2), np.ones(len(ids)), 0 * ids)


def numbers(counts):
    return counts.matches, counts.switches, counts.misses, counts.false_alarms


def test_events_by_hand():
    scene = [
        (objects(o1=(0, 0), o2=(10, 0)), objects(t5=(0.5, 0), t6=(10, 1))),  # two matches
        (objects(o1=(1, 0), o2=(11, 0)), objects(t5=(1, 0), t7=(11, 0))),  # a match and a switch
        (objects(o1=(2, 0), o2=(12, 0)), objects(t7=(12, 0))),  # a miss and a match
        (objects(o1=(3, 0)), objects(t8=(3, 0), t9=(50, 0))),  # back under another name, and a false alarm
    ]
    counts = count_events([scene], 2.0)
    assert numbers(counts) == (4, 2, 1, 1) and counts.objects == 7
    assert counts.distance == pytest.approx(1.5) and counts.motp == pytest.approx(1.5 / 6)
    assert counts.mota == pytest.approx(1 - 4 / 7)
    # misses + switches + false alarms - (1 - recall) objects = 4 - 3.
    assert counts.motar == pytest.approx(1 - 1 / 4)


def test_an_object_keeps_its_track_though_another_is_nearer():
    tracks = [
        objects(t5=(0.1, 0)),
        objects(t5=(1.5, 0), t6=(0, 0)),
        objects(t5=(2.0, 0), t6=(0, 0)),  # two metres are too far
    ]
    standing = objects(o1=(0, 0))
    scene = [(standing, seen) for seen in tracks]
    assert numbers(count_events([scene], 2.0)) == (2, 1, 0, 2)
    # Each scene starts afresh.
    assert numbers(count_events([scene[:1], scene[2:]], 2.0)) == (2, 0, 0, 1)


def test_gaps_are_filled():
    frames = [objects(t1=(0, 0)), objects(), objects(t2=(5, 5)), objects(t1=(4, 8))]
    filled = interpolate(frames, [0.0, 1.0, 2.0, 4.0])
    assert [frame.ids.tolist() for frame in filled] == [[1], [1], [2, 1], [1]]
    # The devkit swaps the weights of the ends (0, 0) and (4, 8).
    assert_allclose(filled[1].places, [[3, 6]])
    assert_allclose(filled[2].places, [[5, 5], [2, 4]])


def metric_over(frames, predicted_labels=None, **arguments):
    """frames: (true boxes, ids), (predicted boxes, ids, scores); class car, but for the given labels of frames."""
    samples = []
    for number, ((boxes, ids), (found, tracks, scores)) in enumerate(frames):
        label = 1 if predicted_labels is None else predicted_labels[number]
        sample = frame(boxes, [1] * len(boxes), found, scores, [label] * len(found), instance_ids=tracks)
        samples.append(sample | {"instance_id": np.array(ids, dtype=np.int64)})
    return evaluate("TrackingMetric", samples, ("traffic_cone", "car", "truck"), **arguments)


def one_track(count, y=5.0):
    """Return frames of an object that moves along x, and of a track beside it."""
    return [(([(k, 5.0)], [3]), ([(k, y)], [8], [0.9])) for k in range(count)]


def test_perfect_tracks():
    metrics = metric_over(one_track(6, y=5.5))
    assert metrics["AMOTA"] == pytest.approx(1) and metrics["AMOTP"] == pytest.approx(0.5)
    assert (
        metrics["MOTA"] == pytest.approx(1)
        and metrics["IDS"] == 0
        and metrics["car_AMOTA"] == metrics["AMOTA"]
    )
    # The same in reversed order: frames are sorted by time. Half the objects: half the recalls are not reached.
    half = metric_over([(([(k, 5.0), (k, 30.0)], [3, 4]), ([(k, 5.5)], [8], [0.9])) for k in range(6)])
    # 18 of the 40 recalls from 0.1 to 1 lie at 0.5 or below.
    assert half["AMOTA"] == pytest.approx(18 / 40) and half["AMOTP"] == pytest.approx(
        (18 * 0.5 + 22 * 2) / 40
    )
    assert half["recall"] == pytest.approx(0.5)


def test_a_track_that_changes_its_class():
    """In each frame the track counts in its class there. Its score and its gaps are those of the whole track."""
    frames = one_track(4)
    frames[1] = (frames[1][0], ([], [], []))  # The gap is filled with a box of the class that follows.
    for labels, found in (([2, 1, 1, 1], 3 / 4), ([1, 1, 2, 1], 2 / 4)):
        metrics = metric_over(frames, predicted_labels=labels)
        assert metrics["recall"] == pytest.approx(found) and metrics["MOTA"] == pytest.approx(found)
    # A cone is not tracked, so that there is a gap of two frames. The devkit swaps their places, which are 1 m apart.
    metrics = metric_over(frames, predicted_labels=[1, 1, 0, 1])
    assert metrics["recall"] == pytest.approx(1) and metrics["AMOTP"] == pytest.approx((0 + 1 + 1 + 0) / 4)


def test_true_boxes_without_a_track_do_not_count():
    untracked = ([(20, 5.0), (30, 5.0)], [-1, -1])
    frames = one_track(6)
    more = [(([*boxes, *untracked[0]], [*ids, *untracked[1]]), found) for (boxes, ids), found in frames]
    assert metric_over(more) == metric_over(frames) and metric_over(more)["AMOTA"] == pytest.approx(1)


def test_what_does_not_count():
    frames = [
        (([(k, 5.0)], [3]), ([(k, 5.0), (k, 9.0), (k, 9.5)], [8, -1, 7], [0.9, 0.9, 0.1])) for k in range(4)
    ]
    assert metric_over(frames)["AMOTA"] == pytest.approx(1)
    assert metric_over(frames, score_threshold=0.05)["AMOTA"] == pytest.approx(
        1
    )  # a better threshold leaves it out
    assert metric_over(frames, class_range=3.0) == pytest.approx(
        dict.fromkeys(("AMOTA", "AMOTP", "MOTA", "recall"), float("nan")) | {"IDS": 0}, nan_ok=True
    )
