"""nuScenes' detection and tracking metrics against the devkit, on random boxes."""

import numpy as np
import pytest
from driving_frames import evaluate, frame
from peers import peer

peer("nuscenes.eval.tracking.algo", "nuscenes-devkit", "check-devkit")

from nuscenes.eval.common.config import config_factory
from nuscenes.eval.common.data_classes import EvalBoxes
from nuscenes.eval.common.utils import center_distance
from nuscenes.eval.detection import algo
from nuscenes.eval.detection.data_classes import DetectionBox
from nuscenes.eval.tracking import loaders
from nuscenes.eval.tracking.algo import TrackingEvaluation
from nuscenes.eval.tracking.data_classes import TrackingBox

from visdet.evaluation.detection_curves import average_precision, match_frames, mean_errors


def random_frames(rng, num_frames):
    frames = []
    for _ in range(num_frames):
        count = rng.integers(0, 6)
        values = np.column_stack(
            [
                rng.uniform(-20, 20, (count, 2)),
                np.zeros(count),
                rng.uniform(1, 5, (count, 3)),
                rng.uniform(-4, 4, count),
                rng.normal(0, 2, (count, 2)),
            ]
        )
        found = np.concatenate([values, values[: count // 2], rng.uniform(-20, 20, (2, 9))])
        found = found + rng.normal(0, 0.5, found.shape)
        found[:, 3:6] = np.abs(found[:, 3:6]) + 0.1
        values[rng.random(count) < 0.1, 7:] = np.nan
        # Few distinct scores: ties must be broken alike.
        scores = rng.integers(1, 10, len(found)) / 10
        attributes = dict(gt_attributes=np.full(count, ""), attributes=np.full(len(found), ""))
        frames.append(dict(gt_boxes=values, boxes=found, scores=scores, **attributes))
    return frames


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["car", "barrier", "traffic_cone"])
def test_detection_has_the_same_numbers(seed, name):
    frames = random_frames(np.random.default_rng(seed), 12)

    def boxes_of(key):
        boxes = EvalBoxes()
        for number, one in enumerate(frames):
            rows = []
            scores = one["scores"] if key == "boxes" else np.full(len(one[key]), -1.0)
            for values, score in zip(one[key], scores, strict=True):
                x, y, z, length, width, height, yaw, vx, vy = values
                rows.append(
                    DetectionBox(
                        sample_token=str(number),
                        translation=(x, y, z),
                        size=(width, length, height),
                        rotation=(np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)),
                        velocity=(vx, vy),
                        detection_name=name,
                        detection_score=float(score),
                        attribute_name="",
                    )
                )
            boxes.add_boxes(str(number), rows)
        return boxes

    for distance in (0.5, 1.0, 2.0, 4.0):
        theirs = algo.accumulate(boxes_of("gt_boxes"), boxes_of("boxes"), name, center_distance, distance)
        ours = match_frames(frames, distance)
        errors = mean_errors(frames, ours, np.pi if name == "barrier" else 2 * np.pi)
        assert average_precision(ours) == pytest.approx(algo.calc_ap(theirs, 0.1, 0.1), abs=1e-12)
        for error in ("trans_err", "scale_err", "orient_err", "vel_err"):
            assert errors[error] == pytest.approx(algo.calc_tp(theirs, 0.1, error), abs=1e-9), error


# The devkit takes the names of its classes from this call, before it makes boxes.
TRACKING = config_factory("tracking_nips_2019")


def tracking_boxes(token, ids, places, names, scores):
    return [
        TrackingBox(
            sample_token=token,
            translation=(*place, 0.0),
            size=(1, 1, 1),
            rotation=(1, 0, 0, 0),
            velocity=(0, 0),
            tracking_id=str(identity),
            tracking_name=name,
            tracking_score=float(score),
        )
        for identity, place, name, score in zip(ids, places, names, scores, strict=True)
    ]


def devkit_curve(truths, predictions, name):
    """Return the devkit's numbers of a class over its thresholds."""
    worst = TRACKING.metric_worst
    evaluation = TrackingEvaluation(
        truths, predictions, name, center_distance, 2.0, 0.1, 40, worst, verbose=False
    )
    return evaluation.accumulate()


class OneScene:
    """As much of the devkit's tables as it needs to put boxes into tracks."""

    def __init__(self, num_frames):
        self.num_frames = num_frames

    def get(self, table, token):
        if table == "scene":
            last = str(self.num_frames - 1)
            return {"name": "scene", "first_sample_token": "0", "last_sample_token": last}
        frame = int(token)
        return {"scene_token": "s", "timestamp": frame * 500_000, "next": str(frame + 1)}


@pytest.mark.parametrize("seed", range(4))
def test_tracks_that_change_their_class_have_the_same_numbers(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    names, num_frames, num_objects = ("car", "truck"), 12, 6
    start, speed = rng.uniform(-20, 20, (num_objects, 2)), rng.normal(0, 1, (num_objects, 2))
    labels = np.arange(num_objects) % 2
    true_boxes, predicted_boxes, frames = EvalBoxes(), EvalBoxes(), []
    for number in range(num_frames):
        (seen, found), places = rng.random((2, num_objects)) >= 0.3, start + speed * number
        noisy = places + rng.normal(0, 0.5, places.shape)
        guesses = np.where(rng.random(num_objects) < 0.3, 1 - labels, labels)
        scores = rng.uniform(0.2, 1, num_objects)

        def rows(ids, places, labels, scores, token=str(number)):
            return tracking_boxes(token, ids, places, [names[label] for label in labels], scores)

        ids = np.arange(num_objects)
        truth = ids[seen], places[seen], labels[seen]
        guess = ids[found] + 50, noisy[found], guesses[found]
        true_boxes.add_boxes(str(number), rows(*truth, -np.ones(seen.sum())))
        predicted_boxes.add_boxes(str(number), rows(*guess, scores[found]))
        identities = dict(instance_id=truth[0], instance_ids=guess[0])
        frames.append(frame(*truth[1:], guess[1], scores[found], guess[2], **identities))
    ours = evaluate("TrackingMetric", frames, classes=names)

    monkeypatch.setattr(loaders, "get_scenes_of_split", lambda split_name, nusc: ["scene"])
    true_tracks, predicted_tracks = (
        loaders.create_tracks(boxes, OneScene(num_frames), "val", gt)
        for boxes, gt in ((true_boxes, True), (predicted_boxes, False))
    )
    numbers = []
    for name in names:
        theirs = devkit_curve(true_tracks, predicted_tracks, name)
        motar, motp, mota = (
            np.array(theirs.get_metric(key), dtype=float) for key in ("motar", "motp", "mota")
        )
        best = int(np.nanargmax(mota))
        averages = np.nan_to_num(motar).mean(), np.nan_to_num(motp, nan=2.0).mean()
        numbers.append((*averages, mota[best], theirs.get_metric("ids")[best]))
    amota, amotp, mota, switches = np.transpose(numbers)
    expected = {"AMOTA": amota.mean(), "AMOTP": amotp.mean(), "MOTA": mota.mean(), "IDS": switches.sum()}
    expected |= {f"{name}_AMOTA": number for name, number in zip(names, amota, strict=True)}
    assert {key: ours[key] for key in expected} == pytest.approx(expected, abs=1e-9)
    assert amota.min() > 0
