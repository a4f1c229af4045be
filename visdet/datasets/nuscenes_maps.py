"""Polylines around a vehicle from nuScenes' map expansion."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visdet.errors import MissingFileError, MissingPackageError
from visdet.structures.poses import turn_about_z, yaw_of

# Road outlines are cut this far inside the region, so that its edges do not become boundaries.
_EDGE_MARGIN_M = 0.2
_SAME_DIRECTION = 0.01  # Crossings whose directions differ by less than about 8 degrees are merged.


class NuScenesMap:
    """Pedestrian crossings, dividers and road boundaries of one location.

    Args:
        root: the folder that holds ``maps/expansion/<location>.json``.
        location: the name of the location, such as ``boston-seaport``.
        roi_size: width (x) and length (y) of the region around the vehicle, in metres.

    Raises:
        FileNotFoundError: the map expansion is missing.
        ImportError: shapely is missing.

    Source: classes and rules are those of SparseDrive's extraction. This one uses shapely 2 instead of the devkit.
    """

    def __init__(self, root: str | Path, location: str, roi_size: Sequence[float] = (30.0, 60.0)) -> None:
        try:
            import shapely
        except ImportError as error:
            raise MissingPackageError("the map of nuScenes needs shapely 2: pip install shapely") from error
        folder = Path(root) / "maps"
        path = folder / "expansion" / f"{location}.json"
        if not path.exists():
            raise MissingFileError(
                f"{path} does not exist: unpack nuScenes' map expansion (v1.3) into {folder}"
            )
        layers = json.loads(path.read_text())
        self.roi_size = tuple(roi_size)
        nodes = {node["token"]: (node["x"], node["y"]) for node in layers["node"]}
        polygons = {record["token"]: self._polygon(record, nodes) for record in layers["polygon"]}
        lines = {record["token"]: _places(record["node_tokens"], nodes) for record in layers["line"]}

        def areas(name: str) -> list:
            found = [polygons[record["polygon_token"]] for record in layers[name]]
            return [area for area in found if area.is_valid and not area.is_empty]

        self._crossings = shapely.STRtree(areas("ped_crossing"))
        self._roads = shapely.STRtree(areas("road_segment") + areas("lane"))
        records = layers["lane_divider"] + layers["road_divider"]
        dividers = [lines[record["line_token"]] for record in records]
        self._dividers = shapely.STRtree([shapely.LineString(line) for line in dividers if len(line) > 1])

    def _polygon(self, record: dict, nodes: dict) -> Any:
        from shapely import Polygon

        outer = _places(record["exterior_node_tokens"], nodes)
        if len(outer) < 3:
            return Polygon()
        holes = [_places(hole["node_tokens"], nodes) for hole in record["holes"]]
        return Polygon(outer, [hole for hole in holes if len(hole) > 2])

    def around(self, lidar_to_world: np.ndarray) -> dict[int, list[np.ndarray]]:
        """Return the lines [n, 2] of each class (0 crossing, 1 divider, 2 boundary) in the lidar frame."""
        import shapely

        size = np.array(self.roi_size)
        turn = turn_about_z(yaw_of(lidar_to_world))
        center = lidar_to_world[:2, 3]
        corners = (np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) - 0.5) * size
        region = shapely.Polygon(corners @ turn.T + center)

        def to_lidar(points: np.ndarray) -> np.ndarray:
            return (points - center) @ turn

        def local(tree: Any) -> list:
            cut = [tree.geometries[i].intersection(region) for i in tree.query(region, "intersects")]
            return [shapely.transform(geometry, to_lidar) for geometry in cut if not geometry.is_empty]

        rings = [area.exterior for area in self._merged(local(self._crossings))]
        dividers: list[np.ndarray] = []
        for part in local(self._dividers):
            dividers += _lines(part)
        return {
            0: [np.array((ring if ring.is_ccw else ring.reverse()).coords) for ring in rings],
            1: dividers,
            2: self._boundaries(local(self._roads), size / 2),
        }

    def _merged(self, crossings: list) -> list:
        """Return the crossings, after merging those that touch and have the same direction."""
        from shapely import STRtree

        pieces: list[Any] = []
        for crossing in crossings:
            pieces += [piece for piece in _parts(crossing, "Polygon") if piece.area > 0]
        directions = [self._direction(piece) for piece in pieces]
        tree, left = STRtree(pieces), set(range(len(pieces)))
        merged: list[Any] = []
        for index, piece in enumerate(pieces):
            if index not in left:
                continue
            left.remove(index)
            for other in sorted(tree.query(piece)):
                if other in left and 1 - abs(directions[index] @ directions[other]) < _SAME_DIRECTION:
                    piece = piece.union(pieces[other])
                    left.remove(int(other))
            merged += _parts(piece, "Polygon")
        return merged

    def _direction(self, polygon: Any) -> np.ndarray:
        """Return the unit vector along the longer side of a polygon's smallest rectangle."""
        sides = np.diff(np.array(polygon.minimum_rotated_rectangle.exterior.coords)[:3], axis=0)
        longest = sides[np.linalg.norm(sides, axis=1).argmax()]
        return longest / np.linalg.norm(longest)

    def _boundaries(self, roads: list, half: np.ndarray) -> list[np.ndarray]:
        """Return the edges of the road. The road is on their right."""
        import shapely

        inner = shapely.box(*(-half + _EDGE_MARGIN_M), *(half - _EDGE_MARGIN_M))
        lines = []
        for area in _parts(shapely.unary_union(roads), "Polygon"):
            outer = area.exterior.reverse() if area.exterior.is_ccw else area.exterior
            holes = [hole if hole.is_ccw else hole.reverse() for hole in area.interiors]
            for ring in (outer, *holes):
                cut = _parts(shapely.LineString(ring.coords).intersection(inner), "LineString")
                merged = shapely.line_merge(shapely.MultiLineString(cut), directed=True)
                lines += _lines(merged)
        return lines


def _places(tokens: Iterable[str], nodes: dict) -> list:
    """Return the (x, y) of nodes."""
    return [nodes[token] for token in tokens]


def _lines(geometry: Any) -> list[np.ndarray]:
    """Return the lines [n, 2] of a geometry."""
    return [np.array(line.coords) for line in _parts(geometry, "LineString")]


def _parts(geometry: Any, kind: str) -> Iterable:
    """Return the non-empty parts of a geometry that are of one kind."""
    parts = getattr(geometry, "geoms", [geometry])
    return [part for part in parts if part.geom_type == kind and not part.is_empty]
