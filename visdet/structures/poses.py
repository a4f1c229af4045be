"""Rigid transforms and 3-D boxes in numpy, which driving data sets, metrics and visualizations share."""

from collections.abc import Sequence

import numpy as np

FIXED_POINT_BITS = 4


def rotation_from_quaternion(quaternion_wxyz: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the rotation matrix [3, 3] of a quaternion (w, x, y, z) of any length but zero.

    Raises:
        ValueError: the quaternion is zero.
    """
    from scipy.spatial.transform import Rotation  # slow to import, and not needed before the first pose

    return Rotation.from_quat(quaternion_wxyz, scalar_first=True).as_matrix()


def quaternion_from_matrix(rotation: np.ndarray) -> list[float]:
    """Return the quaternion (w, x, y, z), w >= 0, of a matrix [3, 3], or of the rotation nearest to the matrix."""
    from scipy.spatial.transform import Rotation

    return Rotation.from_matrix(rotation).as_quat(canonical=True, scalar_first=True).tolist()


def pose_matrix(
    translation: Sequence[float] | np.ndarray, rotation: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return the 4x4 float64 matrix of a rotation, followed by a translation.

    Args:
        translation: [3].
        rotation: a quaternion (w, x, y, z) or a matrix [3, 3].
    """
    matrix = np.eye(4)
    matrix[:3, :3] = rotation if np.ndim(rotation) == 2 else rotation_from_quaternion(rotation)
    matrix[:3, 3] = translation
    return matrix


def inverse_pose(pose: np.ndarray) -> np.ndarray:
    """Return the inverse of a rigid transform [4, 4]."""
    turn_back = pose[:3, :3].T
    return pose_matrix(-turn_back @ pose[:3, 3], turn_back)


def turn_about_z(angle: float | np.ndarray) -> np.ndarray:
    """Return the rotation [2, 2] by an angle, which turns the x axis towards the y axis if it is positive.

    Of angles [n], the result is [2, 2, n].
    """
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin], [sin, cos]])


def directions_of(angles: np.ndarray) -> np.ndarray:
    """Return the unit vectors (x, y) [..., 2] at angles from the x axis."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def distance_in_plane(places: np.ndarray) -> np.ndarray:
    """Return the distances [n] of places [n, >= 2] from the origin in x and y."""
    return np.hypot(places[:, 0], places[:, 1])


def pose_in_plane(yaw: float, xy: Sequence[float] | np.ndarray = (0.0, 0.0)) -> np.ndarray:
    """Return the pose [4, 4] of a rotation about the z axis by ``yaw``, followed by a translation in x and y."""
    pose = np.eye(4)
    pose[:2, :2] = turn_about_z(yaw)
    pose[:2, 3] = xy
    return pose


def yaw_of(pose: np.ndarray) -> float:
    """Return the angle about the z axis of a pose [4, 4]."""
    return np.arctan2(pose[1, 0], pose[0, 0])


def projected(points: np.ndarray) -> np.ndarray:
    """Return the places [..., 2] in an image of points [..., >= 3], whose third number divides the first two."""
    return points[..., :2] / points[..., 2:3]


def fixed_point(pixels: np.ndarray) -> np.ndarray:
    """Return the numbers with FIXED_POINT_BITS fractional bits by which OpenCV draws at parts of a pixel, int32.

    Args:
        pixels: places in whose coordinates the centre of the first pixel is 0. Those far away are drawn nearer.
    """
    return np.round(np.clip(pixels, -4000, 4000) * 2**FIXED_POINT_BITS).astype(np.int32)


def moved_points(points: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Return points [..., 3] in other coordinates, given the pose [4, 4] of theirs in these."""
    return points @ pose[:3, :3].T + pose[:3, 3]


def seen_from(pose: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return points [..., 2] of the world in the frame of a pose [4, 4], which is turned about the z axis alone."""
    return (points - pose[:2, 3]) @ pose[:2, :2]


def moved_boxes(boxes: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Return boxes in other coordinates, given the pose [4, 4] of theirs in these.

    Args:
        boxes: [n, 7] (x, y, z, length, width, height, yaw), or [n, 9] with the velocity in x and y.
        pose: a rotation about the z axis, followed by a translation. Of any other rotation, boxes stay upright.
    """
    moved = boxes.copy()
    moved[:, :3] = moved_points(boxes[:, :3], pose)
    turn, yaw = pose[:2, :2], boxes[:, 6]
    x, y = turn @ [np.cos(yaw), np.sin(yaw)]
    moved[:, 6] = wrap_angle(np.arctan2(y, x))
    if boxes.shape[1] > 7:
        moved[:, 7:] = boxes[:, 7:] @ turn.T
    return moved


def wrap_angle(angle: np.ndarray) -> np.ndarray:
    """Return the angle in [-pi, pi)."""
    round_angle = 2 * np.pi
    return angle - round_angle * np.floor(angle / round_angle + 0.5)


def box_corners(boxes: np.ndarray) -> np.ndarray:
    """Return the corners [n, 8, 3] of boxes [n, >=7] (x, y, z of the centre, length, width, height, yaw).

    Corners 0..3 are those of the bottom (front left, front right, rear right, rear left). Corners 4..7 are those of the
    top in the same order.
    """
    places = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0], [1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 1, 1]]
    local = (np.array(places) - 0.5) * boxes[:, None, 3:6]  # in parts of the sides, from the centre
    local[..., :2] = np.einsum("ijn,nkj->nki", turn_about_z(boxes[:, 6]), local[..., :2])
    return local + boxes[:, None, :3]
