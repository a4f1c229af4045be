"""The steps of a future, such as 0.5 s, 1.0 s and so on, among the frames of a scene, which may have any rate."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visdet.structures.poses import wrap_angle

STEP_S = 0.5  # of published motion and planning
_SAME_RATE = 0.05  # a scene has the rate of the steps if its median interval differs by less than this share
_SAME_TIME = 0.01  # of a step
_STANDING_S = 0.06  # a box without track and velocity is taken from a frame that is less than this away
_COMMAND_OFFSET_M = 2.0  # how far a path that turns ends to the side
LONGEST_GAP = 2.2  # in steps; frames that are farther apart say nothing about what was between them


def command_of(steps: np.ndarray) -> np.ndarray:
    """Return the command (right, left, straight) that a path follows, float32 [3] with a single 1.

    Args:
        steps: the displacements [n, 2] of the vehicle in the lidar frame, whose x axis points to the right.
    """
    side = steps[:, 0].sum()
    command = 0 if side >= _COMMAND_OFFSET_M else 1 if side <= -_COMMAND_OFFSET_M else 2
    return np.eye(3, dtype=np.float32)[command]


@dataclass(frozen=True)
class Moment:
    """A time between two frames, ``share`` (0 to 1) of the way from frame ``before`` to frame ``after``.

    The two are one frame if the time is that of a frame.
    """

    before: int
    after: int
    share: float

    def between(self, values: np.ndarray) -> np.ndarray:
        """Return the value at this time, given those of all frames [num frames, ...]."""
        first = values[self.before]
        return first + self.share * (values[self.after] - first)


def has_step_rate(times_us: np.ndarray, step_s: float = STEP_S) -> bool:
    """Return whether the frames of a scene are as far apart as the steps, apart from jitter and dropped frames."""
    intervals = np.diff(times_us) / 1e6
    return bool(len(intervals)) and abs(np.median(intervals) / step_s - 1) < _SAME_RATE


def coming_steps(
    times_us: Sequence[int] | np.ndarray, here: int, num_steps: int, step_s: float = STEP_S
) -> list[Moment]:
    """Return where the coming steps of frame ``here`` lie among the frames of its scene.

    In a scene with the rate of the steps, a step is the frame that is less than half a step from its time, because the
    clocks of sensors jitter, and published paths consist of frames. In any other scene it is the frame at its time. A
    step without such a frame lies between two frames. The list ends before the first step that lies behind the last
    frame, or between two frames that are more than 2.2 steps apart.

    Args:
        times_us: the times of the frames of a scene in microseconds, in ascending order.
        here: the position of the frame.
        num_steps: the largest number of steps.
        step_s: the length of a step in seconds.
    """
    times = np.asarray(times_us, dtype=np.int64)
    step_us = step_s * 1e6
    tolerance_us = step_us * (0.5 if has_step_rate(times, step_s) else _SAME_TIME)
    steps: list[Moment] = []
    for number in range(1, num_steps + 1):
        time = times[here] + number * step_us
        distances = np.abs(times - time)
        nearest = int(distances.argmin())
        after = int(np.searchsorted(times, time))
        if distances[nearest] < tolerance_us:
            steps.append(Moment(nearest, nearest, 0.0))
            continue
        before = after - 1
        gap = times[after] - times[before] if after < len(times) else np.inf
        if gap > LONGEST_GAP * step_us:
            break
        steps.append(Moment(before, after, float((time - times[before]) / gap)))
    return steps


def padded_steps(paths: Sequence[np.ndarray], num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return displacements [n, num_steps, 2], which are 0 where they are unknown, and 1 or 0 for each step, float32.

    Args:
        paths: n arrays [m, 2] of displacements, of which the first m are known.
        num_steps: the number of all steps.
    """
    number = len(paths)
    steps = np.zeros((number, num_steps, 2), np.float32)
    masks = np.zeros((number, num_steps), np.float32)
    for row, path in enumerate(paths):
        steps[row, : len(path)] = path
        masks[row, : len(path)] = 1
    return steps, masks


@dataclass
class TrackedBoxes:
    """The boxes of a frame, in the coordinates of any other frame.

    Attributes:
        boxes: [n, 7], x, y, z, length, width, height and yaw.
        velocity: [n, 2] in m/s, NaN where it is unknown.
        tracks: int64 [n], the numbers of the tracks. A negative number is no track.
    """

    boxes: np.ndarray
    velocity: np.ndarray
    tracks: np.ndarray


def boxes_between(
    before: TrackedBoxes, after: TrackedBoxes, share: float, seconds: float
) -> np.ndarray | None:
    """Return the boxes [m, 7] at a time between two frames, or None if one of them cannot be known.

    A box is interpolated if both frames have its track. Any other box of the nearer frame moves by its velocity. If
    that is unknown, it stays where it is; without a track, only if that frame is less than 0.06 s away.

    Args:
        before: the boxes of the frame before. after: those of the frame after, in the same coordinates.
        share: 0 to 1, how much of the time between both frames has passed. seconds: that time.
    """
    nearer, other, passed, elapsed_s = before, after, share, share * seconds
    if share > 0.5:
        nearer, other, passed, elapsed_s = after, before, 1 - share, (share - 1) * seconds
    row_of_track = {track: row for row, track in enumerate(other.tracks.tolist()) if track >= 0}
    found = nearer.boxes.copy()
    for row, (track, velocity) in enumerate(zip(nearer.tracks.tolist(), nearer.velocity, strict=True)):
        if track in row_of_track:
            change = other.boxes[row_of_track[track]] - nearer.boxes[row]
            change[6] = wrap_angle(change[6])
            found[row] += passed * change
        elif np.isfinite(velocity).all():
            found[row, :2] += elapsed_s * velocity
        elif track < 0 and abs(elapsed_s) >= _STANDING_S:
            return None
    return found
