"""Rendering of the synthetic driving scenes. The ground is sampled from a map, and objects are painted as cuboids."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from visdet.structures.polylines import polygon_inside
from visdet.structures.poses import box_corners, seen_from, turn_about_z, yaw_of

from .driving_world import DRIVING_CLASSES, Road, World

GROUND_Z = -1.84  # in the lidar frame, which has x to the right, y ahead and z up
_NEAR = 0.3
_MAP_RANGE = 56.0  # the ground is painted up to this distance in metres
_MAP_RESOLUTION = 0.2
_SUBPIXEL = 4  # fractional bits of cv2's fixed-point coordinates
_DEPTH_STEP = (8, 4)  # rows and columns between two depth points
_FACES = np.array([[0, 1, 5, 4], [3, 2, 6, 7], [0, 3, 7, 4], [1, 2, 6, 5], [4, 5, 6, 7]])
_FRONT, _REAR, _LEFT, _RIGHT, _TOP = range(5)
_SHADE = np.array([1.15, 0.55, 0.8, 0.8, 1.0])  # The front is lighter, so that a heading can be seen.


@dataclass
class Camera:
    """A pinhole camera. ``rotation`` [3, 3] and ``translation`` [3] transform its points to the lidar frame."""

    name: str
    rotation: np.ndarray
    translation: np.ndarray
    intrinsic: np.ndarray


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


def make_cameras(width: int, height: int) -> list[Camera]:
    """Return the six cameras for images of this size. The horizon is the row of pixels at 0.42 of the height.

    As in every record, the centre of the first pixel is (0.5, 0.5).
    """
    cameras = []
    for name, heading, position, field_of_view in RIG:
        focal = width / 2 / np.tan(np.deg2rad(field_of_view) / 2)
        intrinsic = np.array([[focal, 0, width / 2], [0, focal, 0.42 * height + 0.5], [0, 0, 1]])
        rotation = np.zeros((3, 3))
        rotation[:2, [0, 2]] = turn_about_z(np.deg2rad(heading))  # x to the right, z ahead
        rotation[2, 1] = -1  # y down
        cameras.append(Camera(name, rotation, np.array(position), intrinsic))
    return cameras


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


class Renderer:
    """Paints frames of a world as six cameras see them.

    Args:
        width, height: the size of an image in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.cameras = make_cameras(width, height)
        u, v = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
        pixels = np.stack([u, v, np.ones_like(u)], axis=-1)
        # The ray of each pixel in camera coordinates with z = 1, [H, W, 3].
        self._rays = [pixels @ np.linalg.inv(camera.intrinsic).T for camera in self.cameras]
        self._ground = [
            self._ground_lookup(camera, rays) for camera, rays in zip(self.cameras, self._rays, strict=True)
        ]
        noise = np.random.default_rng(0)
        self._noise = noise.normal(0, 5, (height + 64, width + 64, 3)).astype(np.int16)
        coarse = noise.normal(0, 1, (64, 64)).astype(np.float32)
        fine = noise.normal(0, 1, (512, 512)).astype(np.float32)
        # It is repeated every 512 x 0.2 m.
        self._texture = (
            cv2.resize(coarse, (512, 512), interpolation=cv2.INTER_CUBIC) * 9
            + cv2.GaussianBlur(fine, (0, 0), 1) * 12
        )

    def _ground_lookup(self, camera: Camera, rays: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the map pixels (x and y, float32 [H, W]) that camera pixels show, and the depth of the ground."""
        directions = rays @ camera.rotation.T
        below = directions[..., 2] < -1e-6
        depth = np.where(
            below, (GROUND_Z - camera.translation[2]) / np.where(below, directions[..., 2], -1), np.inf
        )
        reach = np.where(np.isfinite(depth), depth, 0.0)[..., None]
        ground = directions * reach + camera.translation
        x = (ground[..., 0] + _MAP_RANGE) / _MAP_RESOLUTION - 0.5
        y = (_MAP_RANGE - ground[..., 1]) / _MAP_RESOLUTION - 0.5
        x[~below] = -10
        return x.astype(np.float32), y.astype(np.float32), depth

    def shoot(self, world: World, frame: int, lidar_pose: np.ndarray, rng: np.random.Generator) -> Shot:
        """Return what is seen at ``frame`` from the lidar pose [4, 4] (lidar to world)."""
        parts = _parts_of_agents(world, frame, lidar_pose)
        ground = self._paint_ground(world, lidar_pose)
        images, points = [], []
        visible = np.zeros(len(world.agents.labels), dtype=np.int64)
        for index, camera in enumerate(self.cameras):
            image = self._background(world, ground, index)
            owner_of_face, planes, face_ids = self._paint_parts(image, camera, parts)
            seen = np.bincount(face_ids.ravel(), minlength=len(owner_of_face) + 1)[1:]
            np.add.at(visible, owner_of_face, seen)
            points.append(self._depth_points(index, planes, face_ids))
            row, column = rng.integers(0, 64, 2)
            noise = self._noise[row : row + self.height, column : column + self.width]
            images.append(np.clip(image + noise, 0, 255).astype(np.uint8))
        return Shot(images, visible, np.concatenate(points).astype(np.float32))

    def _paint_ground(self, world: World, lidar_pose: np.ndarray) -> np.ndarray:
        """Return the ground around the vehicle from above, BGR [n, n, 3]. The vehicle looks towards the top."""
        size = round(2 * _MAP_RANGE / _MAP_RESOLUTION)
        road, look = world.road, world.look
        canvas = np.empty((size, size, 3), np.uint8)
        canvas[:] = look["verge"]
        station = road.nearest_station(lidar_pose[:2, 3])
        start, stop = station - 75, station + 75

        def pixels(xy: np.ndarray) -> np.ndarray:
            local = seen_from(lidar_pose, xy)
            plane = (
                np.stack([local[:, 0] + _MAP_RANGE, _MAP_RANGE - local[:, 1]], axis=-1) / _MAP_RESOLUTION
                - 0.5
            )
            return np.round(plane * 2**_SUBPIXEL).astype(np.int32)

        def band(
            low: float, high: float, color: Sequence[int], begin: float = start, end: float = stop
        ) -> None:
            outline = np.concatenate([road.line(low, begin, end), road.line(high, begin, end)[::-1]])
            cv2.fillPoly(canvas, [pixels(outline)], [int(c) for c in color], cv2.LINE_AA, _SUBPIXEL)

        half = road.half_width
        band(-half - 3.5, half + 3.5, [look["pavement"]] * 3)
        band(-half, half, [look["road"]] * 3)
        band(-half - 0.15, -half + 0.15, (225, 225, 225))
        band(half - 0.15, half + 0.15, (225, 225, 225))
        for offset in dividers_of(road):
            color = (60, 200, 235) if offset == 0 else (240, 240, 240)
            band(offset - 0.1, offset + 0.1, color)
        for crossing in road.crossings:
            if start < crossing < stop:
                for low in np.arange(-half + 0.4, half - 0.5, 1.1):
                    band(low, low + 0.55, (245, 245, 245), crossing - 1.5, crossing + 1.5)
        return cv2.add(canvas, self._world_texture(lidar_pose, size, look["texture"]), dtype=cv2.CV_8U)

    def _world_texture(self, lidar_pose: np.ndarray, size: int, seed: int) -> np.ndarray:
        """Return brightness offsets int16 [n, n, 3] that do not move relative to the ground."""
        cos, sin = lidar_pose[0, 0], lidar_pose[1, 0]
        half = size / 2
        x = lidar_pose[0, 3] / _MAP_RESOLUTION + seed % 512
        y = lidar_pose[1, 3] / _MAP_RESOLUTION + seed // 512 % 512
        # Map pixel (i, j) is the world point pose @ (i - half, half - j). The texture is repeated.
        matrix = np.array(
            [[cos, sin, x - cos * half - sin * half], [sin, -cos, y - sin * half + cos * half]], np.float32
        )
        matrix[:, 2] %= 512
        warped = cv2.warpAffine(
            self._texture,
            matrix,
            (size, size),
            flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_WRAP,
        )
        return cv2.merge([warped.astype(np.int16)] * 3)

    def _background(self, world: World, ground: np.ndarray, index: int) -> np.ndarray:
        """Return the ground and the sky above it, uint8 [H, W, 3]."""
        x, y, depth = self._ground[index]
        image = cv2.remap(
            ground,
            x,
            y,
            cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_CONSTANT,
            borderValue=[int(c) for c in world.look["verge"]],
        )
        sky = ~np.isfinite(depth)
        fade = np.linspace(0.85, 1.1, self.height)[:, None, None] * world.look["sky"]
        image[sky] = np.clip(fade, 0, 255).astype(np.uint8).repeat(self.width, axis=1)[sky]
        return np.ascontiguousarray(image)

    def _paint_parts(
        self, image: np.ndarray, camera: Camera, parts: "Parts"
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Paint all parts from far to near.

        Returns:
            the owner of each painted face, its plane, and the face ids [H, W], which count from 1. A plane is the
            vector n with n . p = 1 for all its points p in camera coordinates, followed by the least and the greatest
            depth of the face.
        """
        face_ids = np.zeros((self.height, self.width), np.int32)
        corners = (parts.corners - camera.translation) @ camera.rotation  # [m, 8, 3]
        in_front = corners[..., 2].max(axis=1) > _NEAR
        half_tan = self.width / 2 / camera.intrinsic[0, 0]
        beside = np.abs(corners[..., 0]).min(axis=1) - half_tan * corners[..., 2].max(axis=1)
        chosen = np.flatnonzero(in_front & (beside < 0))
        owners, planes = [], []
        # Parts are ordered by the distance of the owner, and within one owner by the part's rank.
        distance = np.linalg.norm((parts.centers - camera.translation)[:, :2], axis=1) - 1e-3 * parts.rank
        for part in chosen[np.argsort(-distance[chosen])]:
            faces = corners[part][_FACES]  # [5, 4, 3]
            normals = np.cross(faces[:, 1] - faces[:, 0], faces[:, 2] - faces[:, 0])
            outward = np.einsum("fi,fi->f", normals, faces.mean(axis=1) - corners[part].mean(axis=0))
            facing = np.einsum("fi,fi->f", normals * np.sign(outward)[:, None], faces[:, 0]) < 0
            for face in np.flatnonzero(facing):
                polygon = polygon_inside(faces[face], faces[face, :, 2] - _NEAR)
                if len(polygon) < 3:
                    continue
                projected = polygon[:, :2] / polygon[:, 2:] * camera.intrinsic[0, 0] + camera.intrinsic[:2, 2]
                projected -= 0.5  # The centre of OpenCV's first pixel is 0.
                projected = np.round(np.clip(projected, -4000, 4000) * 2**_SUBPIXEL).astype(np.int32)
                owners.append(parts.owners[part])
                plane = normals[face] / (normals[face] @ faces[face, 0])
                planes.append((*plane, polygon[:, 2].min(), polygon[:, 2].max()))
                cv2.fillConvexPoly(
                    image, projected, parts.colors[part, face].astype(int).tolist(), cv2.LINE_AA, _SUBPIXEL
                )
                cv2.fillConvexPoly(face_ids, projected, len(owners), cv2.LINE_8, _SUBPIXEL)
        return np.array(owners, dtype=np.int64), np.array(planes).reshape(-1, 5), face_ids

    def _depth_points(self, index: int, planes: np.ndarray, face_ids: np.ndarray) -> np.ndarray:
        """Return the points [m, 3] in the lidar frame that a grid of pixels shows."""
        rows = slice(_DEPTH_STEP[0] // 2, None, _DEPTH_STEP[0])
        columns = slice(_DEPTH_STEP[1] // 2, None, _DEPTH_STEP[1])
        ids, rays = face_ids[rows, columns], self._rays[index][rows, columns]
        depth = self._ground[index][2][rows, columns].copy()
        on_face = ids > 0
        face = planes[ids[on_face] - 1]
        # The ray of a pixel on the rim of a face that is seen from the side may miss the face and meet its plane far
        # away.
        depth[on_face] = np.clip(
            1 / np.einsum("pi,pi->p", face[:, :3], rays[on_face]), face[:, 3], face[:, 4]
        )
        seen = np.isfinite(depth) & (depth > 0) & (depth < 70)
        camera = self.cameras[index]
        return (rays[seen] * depth[seen][:, None]) @ camera.rotation.T + camera.translation


@dataclass
class Parts:
    """Cuboids to paint, with corners [m, 8, 3] in the lidar frame, owners [m], and colours [m, 5, 3] of the faces."""

    corners: np.ndarray
    owners: np.ndarray
    colors: np.ndarray
    centers: np.ndarray  # [m, 3], the centres of the owners
    rank: np.ndarray  # [m], the order in which the parts of one owner are painted


# The parts of each class. A part has its centre along the length and its lowest and highest point, then its length and
# width, all as fractions of the box, and finally its BGR colour, or None for the colour of the agent.
_DARK_GLASS = (70, 60, 50)
_PART_TABLE = {
    "car": (((0.0, 0.0, 0.6), (1.0, 1.0), None), ((-0.05, 0.6, 1.0), (0.55, 0.85), _DARK_GLASS)),
    "truck": (((-0.13, 0.12, 1.0), (0.74, 1.0), None), ((0.38, 0.0, 0.75), (0.24, 0.95), (200, 200, 205))),
    "pedestrian": (
        ((0.0, 0.0, 0.48), (0.4, 0.5), (60, 45, 40)),
        ((0.0, 0.48, 0.85), (0.5, 0.7), None),
        ((0.0, 0.85, 1.0), (0.35, 0.35), (150, 180, 220)),
    ),
    "bicycle": (((0.0, 0.0, 0.4), (1.0, 0.15), (40, 40, 40)), ((-0.05, 0.35, 1.0), (0.3, 0.7), None)),
    "traffic_cone": (
        ((0.0, 0.0, 0.1), (1.0, 1.0), None),
        ((0.0, 0.1, 0.55), (0.6, 0.6), None),
        ((0.0, 0.55, 0.75), (0.45, 0.45), (235, 235, 235)),
        ((0.0, 0.75, 1.0), (0.3, 0.3), None),
    ),
}


def _parts_of_agents(world: World, frame: int, lidar_pose: np.ndarray) -> Parts:
    """Return the cuboids of all agents within the painted range."""
    boxes = boxes_in_lidar(world, frame, lidar_pose)
    rows, owners, colors, rank = [], [], [], []
    for owner, box in enumerate(boxes):
        if np.hypot(box[0], box[1]) > _MAP_RANGE:
            continue
        base = box[2] - box[5] / 2
        table = _PART_TABLE[DRIVING_CLASSES[world.agents.labels[owner]]]
        for number, ((along, low, high), (length, width), color) in enumerate(table):
            shift = along * box[3]
            center = (
                box[0] + shift * np.cos(box[6]),
                box[1] + shift * np.sin(box[6]),
                base + (low + high) / 2 * box[5],
            )
            rows.append([*center, length * box[3], width * box[4], (high - low) * box[5], box[6]])
            plain = world.agents.colors[owner] if color is None else np.array(color)
            shaded = np.clip(plain * _SHADE[:, None], 0, 255)
            if number == 0 and world.agents.labels[owner] in (0, 1):
                shaded[_REAR] = (30, 30, 190)  # tail lights
            owners.append(owner)
            colors.append(shaded)
            rank.append(number)
    return Parts(
        box_corners(np.array(rows).reshape(-1, 7)),
        np.array(owners, dtype=np.int64),
        np.array(colors).reshape(-1, 5, 3),
        boxes[np.array(owners, dtype=np.int64), :3],
        np.array(rank, dtype=np.float64),
    )


def boxes_in_lidar(world: World, frame: int, lidar_pose: np.ndarray) -> np.ndarray:
    """Return the boxes of all agents at ``frame`` in the lidar frame, [n, 7] (x, y, z, length, width, height, yaw)."""
    agents = world.agents
    xy = seen_from(lidar_pose, agents.xy[:, frame])
    yaw = agents.yaw[:, frame] - yaw_of(lidar_pose)
    z = GROUND_Z + agents.sizes[:, 2] / 2
    return np.concatenate([xy, z[:, None], agents.sizes, yaw[:, None]], axis=1)


def dividers_of(road: Road) -> list[float]:
    """Return the lateral offsets of the lane dividers. The one at 0 separates the two directions."""
    edges = set()
    for offset, _ in road.lanes:
        edges |= {round(offset - 1.75, 2), round(offset + 1.75, 2)}
    return sorted(edges)
