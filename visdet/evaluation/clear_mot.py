"""Comparison of predicted and true tracks, which counts matches, misses, false alarms and identity switches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

_FAR = 1e6


class Frame(NamedTuple):
    """The objects of one frame.

    Attributes:
        ids: [n]. places: [n, 2] in metres. labels: [n], the classes.
        scores: [n], the scores of the tracks of predicted objects. Those of true objects have no effect.
    """

    ids: np.ndarray
    places: np.ndarray
    scores: np.ndarray
    labels: np.ndarray

    def rows(self, keep: np.ndarray) -> "Frame":
        """Return the objects for which the mask ``keep`` [n] is True."""
        return Frame(*(values[keep] for values in self))


@dataclass
class Counts:
    """The numbers of events in some frames.

    Attributes:
        distance: the sum of distances in metres over matches and switches.
        match_scores: the scores of the matches.
    """

    matches: int = 0
    switches: int = 0
    misses: int = 0
    false_alarms: int = 0
    distance: float = 0.0
    match_scores: list[float] = field(default_factory=list)

    @property
    def objects(self) -> int:
        return self.matches + self.switches + self.misses

    @property
    def mota(self) -> float:
        """MOTA in 0..1, which is 0 without objects."""
        objects = self.objects
        errors = self.misses + self.switches + self.false_alarms
        return max(0.0, 1 - errors / objects) if objects else 0.0

    @property
    def motar(self) -> float:
        """MOTA scaled by the recall, in 0..1, which is 0 if nothing is matched."""
        # Of the errors, the misses and switches are those that the recall has already.
        matches = self.matches
        return max(0.0, 1 - self.false_alarms / matches) if matches else 0.0

    @property
    def motp(self) -> float:
        """The mean distance in metres of the objects that are found, or NaN if there are none."""
        found = self.matches + self.switches
        return self.distance / found if found else float("nan")


def count_events(
    scenes: Sequence[Sequence[tuple[Frame, Frame]]], max_distance: float, threshold: float = -np.inf
) -> Counts:
    """Return the events of all scenes.

    In each frame, an object keeps the track that it was last matched with if that is nearer than ``max_distance``. The
    other objects are assigned to tracks so that the sum of distances is least. If an object gets another track than
    before, that is a switch.

    Args:
        scenes: each scene is a list of (truth, prediction) in order of time.
        max_distance: the greatest distance of a match, in metres.
        threshold: predictions with a lower score are left out.

    Source: CLEAR MOT (Bernardin and Stiefelhagen, 2008). Events are counted as in motmetrics.
    """
    counts = Counts()
    for scene in scenes:
        track_of: dict[int, int] = {}
        for truth, prediction in scene:
            predicted = prediction.rows(prediction.scores >= threshold)
            between = np.linalg.norm(truth.places[:, None] - predicted.places[None], axis=-1)
            between[between >= max_distance] = np.inf
            _count_frame(counts, track_of, truth, predicted, between)
    return counts


def _count_frame(counts: Counts, track_of: dict, truth: Frame, predicted: Frame, between: np.ndarray) -> None:
    ids = truth.ids
    tracks = predicted.ids
    is_near = np.isfinite(between)
    cost = np.where(is_near, between, _FAR)
    last_tracks = np.array([track_of.get(identity, -1) for identity in ids.tolist()])
    continues = (last_tracks[:, None] == tracks) & is_near
    is_first = continues.cumsum(axis=0) == 1  # of the objects that had the track last
    cost[continues & is_first] = -(_FAR**2)
    # scipy.optimize is slow to import, and it is not needed before the first evaluation.
    from scipy.optimize import linear_sum_assignment

    assigned = zip(*linear_sum_assignment(cost), strict=True)
    pairs = [pair for pair in assigned if is_near[pair]]
    num_pairs = len(pairs)
    for pair in pairs:
        row, column = pair
        identity = int(ids[row])
        track = int(tracks[column])
        if track_of.get(identity, track) == track:
            counts.matches += 1
            counts.match_scores.append(float(predicted.scores[column]))
        else:
            counts.switches += 1
        counts.distance += float(between[pair])
        track_of[identity] = track
    counts.misses += len(ids) - num_pairs
    counts.false_alarms += len(tracks) - num_pairs


def recall_thresholds(
    match_scores: Sequence[float], num_objects: int, num_thresholds: int, min_recall: float
) -> np.ndarray:
    """Return the score thresholds [num_thresholds] for recalls from 1 down to ``min_recall``.

    The threshold of a recall that is not reached is NaN.
    """
    if not len(match_scores):
        return np.full(num_thresholds, np.nan)
    scores = np.sort(match_scores)[::-1]
    reached = np.arange(1, len(scores) + 1) / num_objects
    wanted = np.linspace(min_recall, 1, num_thresholds).round(12)
    thresholds = np.interp(wanted, reached, scores, right=0)
    thresholds[wanted > reached[-1]] = np.nan
    return thresholds[::-1]


def motar_curve(
    scenes: Sequence[Sequence[tuple[Frame, Frame]]],
    max_distance: float,
    num_thresholds: int = 40,
    min_recall: float = 0.1,
) -> list[Counts]:
    """Return the events at each recall threshold, without any at a recall that is not reached."""
    everything = count_events(scenes, max_distance)
    thresholds = recall_thresholds(everything.match_scores, everything.objects, num_thresholds, min_recall)
    reached = set(thresholds[~np.isnan(thresholds)].tolist())
    known = {threshold: count_events(scenes, max_distance, threshold) for threshold in reached}
    return [known.get(threshold, Counts()) for threshold in thresholds.tolist()]


def interpolate(frames: Sequence[Frame], times: Sequence[float]) -> list[Frame]:
    """Return the frames after gaps in tracks have been filled as nuscenes-devkit (1.2) fills them.

    Places and scores lie on the line between the two ends of a gap. As in the devkit, each end has the weight that
    would be right for the other one, so that an object goes through a gap of several frames from its end to its start.
    An object that is filled in has the class of the next object of its track.
    """
    seen: dict[int, list[tuple[int, np.ndarray, float, int]]] = {}
    for number, frame in enumerate(frames):
        for identity, *rest in zip(*frame, strict=True):
            seen.setdefault(int(identity), []).append((number, *rest))
    added: list[list[tuple[int, np.ndarray, float, int]]] = [[] for _ in frames]
    for identity, places in seen.items():
        for (first, start, score, _), (last, end, next_score, label) in pairwise(places):
            for number in range(first + 1, last):
                end_time = times[last]
                weight = (end_time - times[number]) / (end_time - times[first])  # of the end, see above
                place = start + (end - start) * weight
                added[number].append((identity, place, score + (next_score - score) * weight, label))
    return [_with_more(frame, more) for frame, more in zip(frames, added, strict=True)]


def _with_more(frame: Frame, more: list[tuple[int, np.ndarray, float, int]]) -> Frame:
    if not more:
        return frame
    columns = zip(frame, zip(*more, strict=True), strict=True)
    return Frame(*(np.concatenate([old, added]) for old, added in columns))
