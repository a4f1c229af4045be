"""Anchors of driving models, which k-means finds in the training frames of an info file."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.cluster.vq import kmeans2

from visdet.errors import InvalidInputError
from visdet.structures.polylines import cut_to_region
from visdet.structures.poses import distance_in_plane, turn_about_z

from .frame_records import value_of

_HALF_MAP_ANCHOR_M = 4.0


def cluster(
    samples: np.ndarray, num_clusters: int, seed: int = 0, num_rounds: int = 50, max_samples: int = 200_000
) -> np.ndarray:
    """Return the centres [num_clusters, d] of ``samples`` [n, d] by k-means.

    The seeds are those of k-means++, and Lloyd's algorithm refines them. A cluster that loses its last sample keeps its
    centre. If there are fewer distinct samples than clusters, samples are repeated. Without samples, the centres are 0.

    Args:
        samples: float [n, d].
        num_clusters: number of clusters.
        seed: seed of the random numbers.
        num_rounds: number of rounds of Lloyd's algorithm.
        max_samples: the greatest number of samples to use. Of more samples, this many are drawn at random.
    """
    rng = np.random.default_rng(seed)
    samples = np.asarray(samples, dtype=np.float64)
    if len(samples) > max_samples:
        samples = samples[rng.choice(len(samples), max_samples, replace=False)]
    distinct = np.unique(samples, axis=0)
    if len(distinct) <= num_clusters:
        return np.resize(
            distinct, (num_clusters, samples.shape[1])
        )  # which repeats them, or is 0 without any
    seeds = _spread_seeds(samples, num_clusters, rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # scipy warns about clusters without samples.
        return kmeans2(samples, seeds, iter=num_rounds, minit="matrix", check_finite=False)[0]


def _spread_seeds(samples: np.ndarray, num_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Return k-means++ seeds.

    A sample becomes the next seed with a probability proportional to its squared distance from the nearest seed so far.
    scipy's own k-means++ computes all distances anew for each seed, which takes minutes for 900 seeds of 200 000
    samples.
    """
    chosen = [samples[rng.integers(len(samples))]]
    squared = np.full(len(samples), np.inf)
    for _ in range(num_clusters - 1):
        squared = np.minimum(squared, ((samples - chosen[-1]) ** 2).sum(axis=1))
        total = np.cumsum(squared)
        chosen.append(samples[np.searchsorted(total, rng.random() * total[-1])])
    return np.array(chosen)


def detection_anchors(
    infos: Sequence[dict], num_anchors: int, max_distance: float = 55.0, seed: int = 0
) -> np.ndarray:
    """Return box anchors [num_anchors, 11].

    The centres are clustered. All other numbers are the same in each anchor: log sizes 1, 1, 1, sine 1, cosine 0 and
    velocity 0.

    Args:
        infos: the training frames.
        num_anchors: number of anchors.
        max_distance: boxes farther away in x and y are left out, in metres.
        seed: seed of the random numbers.

    Raises:
        ValueError: a frame has no ``gt_boxes``, or no frame has a box within ``max_distance``.
    """
    points = np.concatenate([np.zeros((0, 7)), *_values(infos, "gt_boxes")])[:, :3]
    points = points[distance_in_plane(points) < max_distance]
    if not len(points):
        raise InvalidInputError(
            f"none of {len(infos)} frames has a box within {max_distance} m (max_distance)"
        )
    anchors = np.zeros((num_anchors, 11))
    anchors[:, :3] = cluster(points, num_anchors, seed)
    anchors[:, 3:7] = 1
    return anchors


def map_anchors(infos: Sequence[dict], num_anchors: int, num_points: int = 20, seed: int = 0) -> np.ndarray:
    """Return polyline anchors [num_anchors, num_points, 2] in metres.

    Each is a line of 8 m that points straight ahead. The centres of the lines are those of clustered map lines, cut to
    the region of 30 x 60 m.

    Raises:
        ValueError: a frame has no ``map_annos``, or no frame has a line.
    """
    means = []
    for annotated in _values(infos, "map_annos"):
        for label, lines in annotated.items():
            for line in lines:
                means += [part[:, :2].mean(axis=0) for part in cut_to_region(line, label == 0)]
    if not means:
        raise InvalidInputError(f"none of {len(infos)} frames has a line in map_annos within the region")
    offsets = np.linspace((0, -_HALF_MAP_ANCHOR_M), (0, _HALF_MAP_ANCHOR_M), num_points)
    return cluster(np.array(means), num_anchors, seed)[:, None] + offsets


def motion_anchors(
    infos: Sequence[dict], classes: Sequence[str], num_modes: int, max_distance: float = 55.0, seed: int = 0
) -> np.ndarray:
    """Return the clustered future paths [num classes, num_modes, T, 2] of agents.

    They are positions in metres in the frame of the agent, with x along its heading. Those of a class without a whole
    path are 0.

    Raises:
        ValueError: a frame has no ``gt_boxes`` or ``gt_agent_fut_trajs``.
    """
    paths: dict[str, list[np.ndarray]] = {name: [] for name in classes}
    num_steps = 12
    for info, boxes in zip(infos, _values(infos, "gt_boxes"), strict=True):
        if not len(boxes):
            continue
        futures, masks, names = (
            _value(info, key, {"n": len(boxes)})
            for key in ("gt_agent_fut_trajs", "gt_agent_fut_masks", "gt_names")
        )
        num_steps = futures.shape[1]
        usable = (masks.sum(axis=1) == num_steps) & (distance_in_plane(boxes) < max_distance)
        local = np.einsum("ijn,ntj->nti", turn_about_z(-boxes[:, 6]), futures.cumsum(axis=1))
        for name, found in paths.items():
            found.extend(local[usable & (names == name)])
    return _clustered(paths.values(), num_modes, num_steps, seed)


def planning_anchors(infos: Sequence[dict], num_modes: int, seed: int = 0) -> np.ndarray:
    """Return the clustered future paths [3, num_modes, T, 2] of the vehicle for the commands right, left and straight.

    They are positions in metres in the lidar frame. Those of a command without a whole path are 0.

    Raises:
        ValueError: a frame has no ``gt_ego_fut_trajs``.
    """
    paths: list[list[np.ndarray]] = [[], [], []]
    num_steps = 6
    for info in infos:
        future, masks, command = (_value(info, f"gt_ego_fut_{key}") for key in ("trajs", "masks", "cmd"))
        num_steps = len(future)
        if masks.sum() == num_steps:
            paths[int(np.argmax(command))].append(future.cumsum(axis=0))
    return _clustered(paths, num_modes, num_steps, seed)


def _clustered(paths: Iterable[list[np.ndarray]], num_modes: int, num_steps: int, seed: int) -> np.ndarray:
    """Return the clustered paths [groups, num_modes, T, 2] of groups of paths [T, 2]."""
    flat = (np.array(found).reshape(-1, 2 * num_steps) for found in paths)
    return np.stack([cluster(found, num_modes, seed).reshape(-1, num_steps, 2) for found in flat])


def _values(infos: Sequence[dict], key: str) -> list:
    return [_value(info, key) for info in infos]


def _value(info: dict, key: str, sizes: dict | None = None) -> Any:
    """Return the checked value of a key that the frame must have, see :func:`value_of`. Boxes have seven columns."""
    where = f"frame {info.get('token', 'without a token')}"
    # Here, boxes may come without names.
    value = value_of({key: info.get(key)}, key, where, sizes)
    if value is None:
        raise InvalidInputError(f"{where}: {key} is missing")
    return value[:, :7] if key == "gt_boxes" else value
