"""Rendering of the synthetic driving scenes. The ground is sampled from a map, and agents are painted as cuboids."""

from dataclasses import InitVar, dataclass

import cv2
import numpy as np

from visdet.structures.polylines import polygon_inside
from visdet.structures.poses import (
    FIXED_POINT_BITS,
    box_corners,
    fixed_point,
    projected,
    seen_from,
    turn_about_z,
    yaw_of,
)

from .driving_world import World

GROUND_Z = -1.84  # in the lidar frame, which has x to the right, y ahead and z up
_NEAR = 0.3
_FAR = 70.0  # of the points
_MOST_POINTS = 34_720  # a sweep of nuScenes' lidar has as many
_MAP_RANGE = 56.0  # the ground is painted up to this distance in metres
_MAP_RESOLUTION = 0.2
_MAP_SIZE = round(2 * _MAP_RANGE / _MAP_RESOLUTION)
_NOISE = 8
_WHITE = (240, 240, 240)
_YELLOW = (60, 200, 235)
_PAVEMENT = (150, 150, 150)
# The front, rear, left, right and top of a box by the numbers of its corners, and how bright they are. The front is
# lighter, so that a heading can be seen.
_FACES = np.array([[0, 1, 5, 4], [3, 2, 6, 7], [0, 3, 7, 4], [1, 2, 6, 5], [4, 5, 6, 7]])
_SHADE = np.array([1.15, 0.55, 0.8, 0.8, 1.0])


@dataclass
class Camera:
    """A pinhole camera, and what its pixels show if there are no agents.

    Attributes:
        rotation, translation: [3, 3] and [3], which transform its points to the lidar frame.
        intrinsic: [3, 3].
        width, height: those of its images in pixels.
        rays: [H, W, 3], the point of each pixel in camera coordinates with z = 1.
        depth: [H, W], that of the ground, which is infinite in the sky.
        map_pixels: float32 [H, W, 2], the places on the map of the ground.
    """

    name: str
    rotation: np.ndarray
    translation: np.ndarray
    intrinsic: np.ndarray
    width: InitVar[int]
    height: InitVar[int]

    def __post_init__(self, width: int, height: int) -> None:
        u, v = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
        rotation = self.rotation
        position = self.translation
        self.rays = rays = np.stack([u, v, np.ones_like(u)], axis=-1) @ np.linalg.inv(self.intrinsic).T
        slope = rays @ rotation[2]
        drop = GROUND_Z - position[2]
        self.depth = depth = np.where(slope < 0, drop / np.minimum(slope, -1e-6), np.inf)
        reach = np.minimum(depth, 1e4)[..., None]
        ground = (rays * reach) @ rotation.T + position
        self.map_pixels = _map_pixels(ground[..., :2]).astype(np.float32)


# Each camera has a name, a heading in degrees from straight ahead to the left, a position in the lidar frame, and a
# field of view in degrees.
RIG = (
    ("CAM_FRONT", 0.0, (0.0, 0.75, -0.33), 70.0),
    ("CAM_FRONT_RIGHT", -55.0, (0.5, 0.6, -0.33), 70.0),
    ("CAM_FRONT_LEFT", 55.0, (-0.5, 0.6, -0.33), 70.0),
    ("CAM_BACK", 180.0, (0.0, -0.9, -0.33), 110.0),
    ("CAM_BACK_LEFT", 110.0, (-0.5, -0.1, -0.33), 70.0),
    ("CAM_BACK_RIGHT", -110.0, (0.5, -0.1, -0.33), 70.0),
)


@dataclass
class Shot:
    """What the cameras see at one time.

    Attributes:
        images: BGR uint8 [H, W, 3] of each camera.
        visible: int64 [n], the number of pixels of each agent in all cameras.
        points: float32 [m, 3] in the lidar frame, the points that a grid of pixels shows.
    """

    images: list[np.ndarray]
    visible: np.ndarray
    points: np.ndarray


def _map_pixels(xy: np.ndarray) -> np.ndarray:
    """Return the pixels of the map at places [..., 2] in the lidar frame. The vehicle looks towards the top."""
    return (xy * (1, -1) + _MAP_RANGE) / _MAP_RESOLUTION - 0.5


class Renderer:
    """Six cameras, which paint the frames of a world.

    The horizon is the row of pixels at 0.42 of the height. As in every record, the centre of the first pixel is
    (0.5, 0.5).

    Args:
        width, height: the size of an image in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        cameras: list[Camera] = []
        self.cameras = cameras
        middle = width / 2
        for name, heading, position, field_of_view in RIG:
            focal = middle / np.tan(np.deg2rad(field_of_view) / 2)
            intrinsic = np.array([[focal, 0, middle], [0, focal, 0.42 * height + 0.5], [0, 0, 1]])
            rotation = np.zeros((3, 3))
            rotation[:2, [0, 2]] = turn_about_z(np.deg2rad(heading))  # x to the right, z ahead
            rotation[2, 1] = -1  # y down
            cameras.append(Camera(name, rotation, np.array(position), intrinsic, width, height))

    def shoot(self, world: World, frame: int, lidar_pose: np.ndarray, rng: np.random.Generator) -> Shot:
        """Return what the cameras see at ``frame`` from the lidar pose [4, 4] (lidar to world)."""
        boxes = boxes_in_lidar(world, frame, lidar_pose)
        ground = _paint_ground(world, lidar_pose)
        look = world.look
        images = []
        points = []
        visible = np.zeros(len(boxes), dtype=np.int64)
        for camera in self.cameras:
            map_x, map_y = cv2.split(camera.map_pixels)
            image = cv2.remap(ground, map_x, map_y, cv2.INTER_LINEAR, borderValue=look["verge"])
            image[np.isinf(camera.depth)] = look["sky"]
            face_ids, owners, planes = _paint_boxes(image, camera, boxes, world.agents.colors)
            visible += np.bincount(owners[face_ids[face_ids > 0] - 1], minlength=len(boxes))
            points.append(_seen_points(camera, face_ids, planes))
            noise = rng.integers(-_NOISE, _NOISE + 1, image.shape)
            images.append((image + noise).clip(0, 255).astype(np.uint8))
        seen = np.concatenate(points).astype(np.float32)
        every = -(-len(seen) // _MOST_POINTS)
        return Shot(images, visible, seen[::every])


def _paint_ground(world: World, lidar_pose: np.ndarray) -> np.ndarray:
    """Return the map of the ground around the vehicle, BGR [n, n, 3]."""
    road = world.road
    look = world.look
    left_edge = road.half_width
    right_edge = -left_edge
    station = road.nearest_station(lidar_pose[:2, 3])
    start = station - 75
    stop = station + 75
    strips = [
        (right_edge - 3.5, left_edge + 3.5, start, stop, _PAVEMENT),
        (right_edge - 0.15, left_edge + 0.15, start, stop, _WHITE),
        (right_edge + 0.15, left_edge - 0.15, start, stop, look["road"]),
    ]
    for offset in road.dividers:
        strips.append((offset - 0.1, offset + 0.1, start, stop, _WHITE if offset else _YELLOW))
    for crossing in road.crossings:
        for right in np.arange(right_edge + 0.4, left_edge - 0.5, 1.1):
            strips.append((right, right + 0.55, crossing - 1.5, crossing + 1.5, _WHITE))
    canvas = np.full((_MAP_SIZE, _MAP_SIZE, 3), look["verge"], np.uint8)
    for *edges, color in strips:
        outline = _map_pixels(seen_from(lidar_pose, road.strip(*edges)))
        cv2.fillPoly(canvas, [fixed_point(outline)], color, cv2.LINE_AA, FIXED_POINT_BITS)
    return canvas


def _paint_boxes(
    image: np.ndarray, camera: Camera, boxes: np.ndarray, colors: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Paint all boxes [n, 7] from far to near.

    Returns:
        the face ids [H, W], which count from 1, the box of each painted face, and its plane [F, 5]. A plane is the
        vector n with n . p = 1 for all its points p in camera coordinates, followed by the least and the greatest depth
        of the face.
    """
    face_ids = np.zeros(image.shape[:2], np.int32)
    position = camera.translation
    corners = (box_corners(boxes) - position) @ camera.rotation  # [n, 8, 3]
    distance = np.linalg.norm(boxes[:, :2] - position[:2], axis=1)
    near = np.flatnonzero((corners[..., 2].max(axis=1) > _NEAR) & (distance < _MAP_RANGE))
    owners = []
    planes = []
    for owner in near[np.argsort(-distance[near])]:
        of_box = corners[owner]
        faces = of_box[_FACES]  # [5, 4, 3]
        middles = faces.mean(axis=1)
        outward = middles - of_box.mean(axis=0)
        to_face = np.einsum("fi,fi->f", outward, middles)  # negative for a face that is seen from outside
        for face in np.flatnonzero(to_face < 0):
            outline = faces[face]
            polygon = polygon_inside(outline, outline[:, 2] - _NEAR)
            if len(polygon) < 3:
                continue
            pixels = fixed_point(projected(polygon @ camera.intrinsic.T) - 0.5)
            color = (colors[owner] * _SHADE[face]).clip(0, 255).astype(int).tolist()
            owners.append(owner)
            depths = polygon[:, 2]
            planes.append((*outward[face] / to_face[face], depths.min(), depths.max()))
            cv2.fillConvexPoly(image, pixels, color, cv2.LINE_AA, FIXED_POINT_BITS)
            cv2.fillConvexPoly(face_ids, pixels, len(owners), cv2.LINE_8, FIXED_POINT_BITS)
    return face_ids, np.array(owners, dtype=np.int64), np.array(planes).reshape(-1, 5)


def _seen_points(camera: Camera, face_ids: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Return the points [m, 3] in the lidar frame that every eighth row and fourth column of pixels shows."""
    grid = np.s_[4::8, 2::4]
    ids = face_ids[grid]
    rays = camera.rays[grid]
    depth = camera.depth[grid].copy()
    on_face = ids > 0
    face = planes[ids[on_face] - 1]
    # The ray of a pixel on the rim of a face that is seen from the side may miss the face and meet its plane far away.
    on_plane = 1 / np.einsum("pi,pi->p", face[:, :3], rays[on_face])
    depth[on_face] = np.clip(on_plane, face[:, 3], face[:, 4])
    near = depth < _FAR
    return (rays[near] * depth[near, None]) @ camera.rotation.T + camera.translation


def boxes_in_lidar(world: World, frame: int, lidar_pose: np.ndarray) -> np.ndarray:
    """Return the boxes of all agents at ``frame`` in the lidar frame, [n, 7] (x, y, z, length, width, height, yaw)."""
    agents = world.agents
    xy = seen_from(lidar_pose, agents.xy[:, frame])
    yaw = agents.yaw[:, frame] - yaw_of(lidar_pose)
    sizes = agents.sizes
    z = GROUND_Z + sizes[:, 2] / 2
    return np.column_stack([xy, z, sizes, yaw])
