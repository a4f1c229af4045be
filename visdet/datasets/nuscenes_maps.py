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
        self._half_size = np.array(roi_size) / 2
        nodes = {node["token"]: (node["x"], node["y"]) for node in layers["node"]}
        polygons = {record["token"]: _polygon(record, nodes) for record in layers["polygon"]}
        lines = {record["token"]: _places(record["node_tokens"], nodes) for record in layers["line"]}

        def areas(name: str) -> list:
            found = [polygons[record["polygon_token"]] for record in layers[name]]
            return [area for area in found if area.is_valid]

        # A tree leaves out areas that are empty.

        self._crossings = shapely.STRtree(areas("ped_crossing"))
        self._roads = shapely.STRtree(areas("road_segment") + areas("lane"))
        records = layers["lane_divider"] + layers["road_divider"]
        dividers = [lines[record["line_token"]] for record in records]
        self._dividers = shapely.STRtree([shapely.LineString(line) for line in dividers if len(line) > 1])

    def around(self, lidar_to_world: np.ndarray) -> dict[int, list[np.ndarray]]:
        """Return the lines [n, 2] of each class (0 crossing, 1 divider, 2 boundary) in the lidar frame."""
        import shapely
        from shapely.geometry.polygon import orient

        half = self._half_size
        center = lidar_to_world[:2, 3]
        turn = turn_about_z(yaw_of(lidar_to_world))
        corners = shapely.get_coordinates(shapely.box(*-half, *half))
        region = shapely.Polygon(corners @ turn.T + center)

        def to_lidar(points: np.ndarray) -> np.ndarray:
            return (points - center) @ turn

        def local(tree: Any) -> Any:
            cut = shapely.intersection(tree.geometries[tree.query(region, "intersects")], region)
            return shapely.transform(cut, to_lidar)

        crossings = [orient(area) for area in _merged(local(self._crossings))]
        return {
            0: [shapely.get_coordinates(area.exterior) for area in crossings],
            1: _lines(local(self._dividers)),
            2: _boundaries(local(self._roads), half - _EDGE_MARGIN_M),
        }


def _merged(crossings: Any) -> list:
    """Return the crossings, after merging those that touch and have the same direction."""
    from shapely import STRtree

    pieces = [piece for piece in _parts(crossings, "Polygon") if piece.area > 0]
    directions = [_direction(piece) for piece in pieces]
    tree = STRtree(pieces)
    joined: set[int] = set()  # those that have become parts of others before them
    merged: list[Any] = []
    for index, piece in enumerate(pieces):
        if index in joined:
            continue
        for other in sorted(tree.query(piece).tolist()):
            is_free = other > index and other not in joined
            if is_free and 1 - abs(directions[index] @ directions[other]) < _SAME_DIRECTION:
                piece = piece.union(pieces[other])
                joined.add(other)
        merged += _parts(piece, "Polygon")
    return merged


def _direction(polygon: Any) -> np.ndarray:
    """Return the unit vector along the longer side of a polygon's smallest rectangle."""
    from shapely import get_coordinates

    sides = np.diff(get_coordinates(polygon.minimum_rotated_rectangle)[:3], axis=0)
    longest = sides[np.linalg.norm(sides, axis=1).argmax()]
    return longest / np.linalg.norm(longest)


def _boundaries(roads: Any, half: np.ndarray) -> list[np.ndarray]:
    """Return the edges of the road within a rectangle of half a size. The road is on their right."""
    import shapely
    from shapely.geometry.polygon import orient

    areas = [orient(area, sign=-1.0) for area in _parts(shapely.unary_union(roads), "Polygon")]
    cut = shapely.intersection(shapely.get_rings(areas), shapely.box(*-half, *half))
    return _lines(shapely.line_merge(cut, directed=True))


def _polygon(record: dict, nodes: dict) -> Any:
    from shapely import Polygon

    outer = _places(record["exterior_node_tokens"], nodes)
    if len(outer) < 3:
        return Polygon()
    holes = [_places(hole["node_tokens"], nodes) for hole in record["holes"]]
    return Polygon(outer, [hole for hole in holes if len(hole) > 2])


def _places(tokens: Iterable[str], nodes: dict) -> list:
    """Return the (x, y) of nodes."""
    return [nodes[token] for token in tokens]


def _lines(geometries: Any) -> list[np.ndarray]:
    """Return the lines [n, 2] of geometries."""
    from shapely import get_coordinates

    return [get_coordinates(line) for line in _parts(geometries, "LineString")]


def _parts(geometries: Any, kind: str) -> list:
    """Return the non-empty parts of geometries that are of one kind."""
    from shapely import get_parts

    return [part for part in get_parts(geometries) if part.geom_type == kind and not part.is_empty]
