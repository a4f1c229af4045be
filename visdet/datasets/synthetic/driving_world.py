"""The world of the synthetic driving scenes: a road, and the motion of the ego vehicle and of all other agents."""

from dataclasses import dataclass
from math import pi

import numpy as np

from visdet.structures.poses import directions_of

# The names are those of nuScenes, so that its metrics apply.
DRIVING_CLASSES = ("car", "truck", "pedestrian", "bicycle", "traffic_cone")
STEP_S = 0.5  # time between key frames

# Length, width and height in metres of the vehicle, which is 4.1 x 1.7, together with the space that it keeps clear.
_EGO_ROOM = np.array([6.6, 2.2, 1.6])
_MEAN_SIZE = {  # length, width, height, m
    "car": (4.4, 1.85, 1.6),
    "truck": (7.0, 2.4, 3.0),
    "pedestrian": (0.7, 0.7, 1.75),
    "bicycle": (1.75, 0.65, 1.65),
    "traffic_cone": (0.45, 0.45, 0.9),
}
_SHARES = {"driving": 0.32, "parked": 0.2, "walking": 0.14, "crossing": 0.08, "cycling": 0.1, "cone": 0.16}
_LANE_WIDTH = 3.5
_STATION_SPACING = 0.5
_GAP_M = 0.3  # between agents side by side
_EASE_S = 3.0  # in which a driver changes the speed
_FOLLOWING_M = 13.0  # how far behind the vehicle ahead a driver stops
_HEADWAY_S = 1.2  # in which a driver would cover the rest of the gap

# The class, the station and the offset, at all or at each of the times, and the angle from the road.
_Motion = tuple[str, np.ndarray | float, np.ndarray | float, float]

_TICK_S = 0.1  # time step of the driver model
_ACCELERATION = _LATERAL_ACCELERATION = 2.0  # comfortable values in m/s^2


@dataclass
class Road:
    """A centre line of varying curvature. Lateral offsets are positive to the left of its direction.

    Traffic keeps to the right: lanes with a negative offset run along the line, and the others against it.

    Attributes:
        stations: [K], distances along the line in metres.
        xy, heading, speed: [K, 2], [K] and [K], in the world at these stations. The speed is the greatest one, in m/s,
            at which a comfortable driver reaches the turns before and behind a station.
        dividers: the offsets of the lines between lanes, from right to left. The one at 0 separates the directions.
        half_width: half the width of the road in metres.
        crossings: the station of the middle of each pedestrian crossing.
    """

    stations: np.ndarray
    xy: np.ndarray
    heading: np.ndarray
    speed: np.ndarray
    dividers: np.ndarray
    half_width: float
    crossings: list[float]

    @property
    def lanes(self) -> np.ndarray:
        """The offsets of the middles of the lanes, from right to left."""
        return self.dividers[:-1] + _LANE_WIDTH / 2

    def place(self, station: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return world positions [..., 2] and headings [...] of road coordinates [...]."""
        columns = (*self.xy.T, self.heading)
        x, y, heading = (np.interp(station, self.stations, column) for column in columns)
        xy = np.stack([x - offset * np.sin(heading), y + offset * np.cos(heading)], axis=-1)
        return xy, heading

    def nearest_station(self, xy: np.ndarray) -> float:
        """Return the station of the point of the line that is nearest to a place [2] in the world."""
        return self.stations[np.argmin(((self.xy - xy) ** 2).sum(axis=1))]

    def line(self, offset: float, start: float, stop: float) -> np.ndarray:
        """Return the polyline [n, 2] at ``offset`` from one station to another."""
        stations = np.linspace(start, stop, max(2, int(abs(stop - start))))
        return self.place(stations, np.full_like(stations, offset))[0]

    def strip(self, right: float, left: float, start: float, stop: float) -> np.ndarray:
        """Return the outline [n, 2] of the ground between two offsets and two stations."""
        line = self.line
        return np.concatenate([line(right, start, stop), line(left, stop, start)])


@dataclass
class Agents:
    """All agents except the ego vehicle, with classes and sizes [n] and motion in the world [n, T]."""

    labels: np.ndarray
    sizes: np.ndarray  # [n, 3] length, width, height
    xy: np.ndarray  # [n, T, 2]
    yaw: np.ndarray  # [n, T]
    velocity: np.ndarray  # [n, T, 2]
    colors: np.ndarray  # [n, 3] uint8


@dataclass
class World:
    """A scene, which consists of the road, the motion [T] of the ego vehicle's rear axle, and the agents."""

    road: Road
    ego_speed: np.ndarray
    ego_xy: np.ndarray  # [T, 2]
    ego_yaw: np.ndarray  # [T]
    agents: Agents
    look: dict[str, list[int]]  # the BGR colours of the road, of the verge and of the sky


def make_world(rng: np.random.Generator, num_frames: int) -> World:
    """Return a random scene of ``num_frames`` steps of 0.5 s, drawn from ``rng``."""
    uniform = rng.uniform
    integers = rng.integers
    times = np.arange(num_frames) * STEP_S
    road = _make_road(rng)
    lanes = road.lanes
    ego_lane = np.full(num_frames, rng.choice(lanes[lanes < 0]))
    leader = None
    if rng.random() < 0.5:
        leader = _drive(road, _wanted_speed(rng, times), uniform(_FOLLOWING_M, 30.0), 1)
    ego_station = _drive(road, np.full(num_frames, uniform(4.5, 9.0)), 0.0, 1, leader)
    ego_xy, ego_yaw = road.place(ego_station, ego_lane)
    look = {
        "road": [int(integers(70, 115))] * 3,
        "verge": integers((50, 80, 45), (90, 130, 80)).tolist(),
        "sky": integers((170, 150, 110), (240, 210, 190)).tolist(),
    }
    agents = _make_agents(rng, road, times, (ego_station, ego_lane), leader)
    return World(road, np.gradient(ego_station, STEP_S), ego_xy, ego_yaw, agents, look)


def _make_road(rng: np.random.Generator) -> Road:
    stations = np.arange(-90.0, 260.0, _STATION_SPACING)
    uniform = rng.uniform
    bend = uniform(0.012, 0.03)
    length = uniform(35, 80)
    ease = 12.0
    if rng.random() < 0.5:  # a corner instead of a long bend
        bend = uniform(0.04, 0.06)
        ease = 8.0
        length = uniform(0.8, 1.5) / bend + ease
    start = uniform(-5, 35)
    turn = rng.choice((-1, 0, 1), p=(0.375, 0.25, 0.375))
    curvature = rng.normal(0, 0.001) + turn * bend * _eased(stations, start, length, ease)
    origin = np.argmin(np.abs(stations))
    heading = np.cumsum(curvature) * _STATION_SPACING
    heading = heading - heading[origin] + uniform(-pi, pi)
    xy = np.cumsum(directions_of(heading), axis=0) * _STATION_SPACING
    xy = xy - xy[origin] + uniform(-500, 500, 2)
    squared = _LATERAL_ACCELERATION / np.maximum(np.abs(curvature), 1e-6)
    apart = np.abs(stations[:, None] - stations)
    speed = np.sqrt((squared + 2 * _ACCELERATION * apart).min(axis=1))
    right, left = rng.integers(1, 3, 2)  # lanes along and against the line
    half_width = 2 * _LANE_WIDTH + uniform(2.2, 2.8)  # a strip for parking on both sides
    crossings = np.arange(uniform(-30, 30), 180, uniform(35, 70)).tolist()
    dividers = np.arange(-right, left + 1) * _LANE_WIDTH
    return Road(stations, xy, heading, speed, dividers, half_width, crossings)


def _drive(
    road: Road, wanted: np.ndarray, start: float, direction: int, leader: np.ndarray | None = None
) -> np.ndarray:
    """Return the stations [T] of a driver who slows down for turns and keeps a distance from the vehicle ahead.

    Args:
        road: the road.
        wanted: [T], the wanted speed at each frame in m/s.
        start: the first station. direction: +1 along the road, -1 against it.
        leader: [T], the stations of the vehicle ahead, if there is one.
    """
    stations = np.empty_like(wanted)
    station = start
    for frame, speed in enumerate(wanted):
        stations[frame] = station
        for _ in range(round(STEP_S / _TICK_S)):
            if leader is not None:
                speed = min(speed, max(leader[frame] - station - _FOLLOWING_M, 0.0) / _HEADWAY_S)
            station += direction * _TICK_S * min(speed, np.interp(station, road.stations, road.speed))
    return stations


def _wanted_speed(rng: np.random.Generator, times: np.ndarray) -> np.ndarray:
    """Return the speed [T] of a driver who keeps it, or for a while drives at another one or stops."""
    uniform = rng.uniform
    usual = uniform(2.0, 10.0)
    begin = uniform(0, times[-1])
    hold = uniform(2.0, 8.0)
    factor = rng.choice((1.0, uniform(0.0, 1.5), 0.0), p=(0.5, 0.3, 0.2))
    return usual * (1 + (factor - 1) * _eased(times, begin, hold, _EASE_S))


def _eased(values: np.ndarray, start: float, length: float, ease: float) -> np.ndarray:
    """Return 1 for values in a range, 0 for others, and shares between within ``ease`` of its ends."""
    return np.clip(np.minimum(values - start, start + length - values) / ease, 0, 1)


def _make_agents(
    rng: np.random.Generator,
    road: Road,
    times: np.ndarray,
    ego: tuple[np.ndarray, np.ndarray],
    leader: np.ndarray | None,
) -> Agents:
    """Draw agents one after another, and keep those that do not collide with another or with the ego vehicle."""
    kept: list[tuple] = []
    ego_station, ego_lane = ego
    occupied = [(ego_station, ego_lane, _EGO_ROOM)]
    drawn: list[_Motion] = [] if leader is None else [("car", leader, ego_lane, 0.0)]
    drawn += [_draw_agent(rng, road, times, ego_station[-1] + 40) for _ in range(rng.integers(32, 52))]
    for kind, station, offset, turn in drawn:
        size = np.array(_MEAN_SIZE[kind]) * rng.uniform(0.85, 1.15, 3)
        station, offset = np.broadcast_arrays(station, offset, times)[:2]
        if any(_meet(station, offset, size, *other) for other in occupied):
            continue
        occupied.append((station, offset, size))
        xy, heading = road.place(station, offset)
        velocity = np.gradient(xy, STEP_S, axis=0)
        kept.append((DRIVING_CLASSES.index(kind), size, xy, heading + turn, velocity, _color(rng, kind)))
    return Agents(*map(np.array, zip(*kept, strict=True)))


def _draw_agent(rng: np.random.Generator, road: Road, times: np.ndarray, end: float) -> _Motion:
    """Return the motion of a random agent, which starts at a station up to ``end``."""
    uniform = rng.uniform
    choice = rng.choice
    start = uniform(-28, end)
    side = choice((-1, 1))
    kerb = side * road.half_width
    facing = pi * (side > 0)
    vehicle = "car" if rng.random() < 0.72 else "truck"
    kind = choice(list(_SHARES), p=list(_SHARES.values()))
    match kind:
        case "driving":
            lane = choice(road.lanes)
            station = _drive(road, _wanted_speed(rng, times), start, -np.sign(lane))
            return vehicle, station, lane, pi * (lane > 0)
        case "parked":
            return vehicle, start, kerb - side * 1.35, facing
        case "walking":
            speed = uniform(-1.8, 1.8)
            return "pedestrian", start + speed * times, kerb + side * uniform(0.8, 3.0), pi * (speed < 0)
        case "crossing":
            way = uniform(0.9, 1.7) * np.clip(times - uniform(-2, times[-1]), 0, None)
            station = choice(road.crossings) + uniform(-1, 1)
            return "pedestrian", station, kerb + side * (0.8 - way), -side * pi / 2
        case "cycling":
            return "bicycle", start - side * uniform(2.0, 5.5) * times, kerb - side * 2.6, facing
    return "traffic_cone", start, kerb - side * uniform(0.2, 3.0), 0.0


def _meet(
    station: np.ndarray,
    offset: np.ndarray,
    size: np.ndarray,
    other_station: np.ndarray,
    other_offset: np.ndarray,
    other_size: np.ndarray,
) -> bool:
    """Return whether two agents may come close to each other. They may be twice as long inside of a bend."""
    is_near = np.abs(station - other_station) < size[0] + other_size[0]
    is_beside = np.abs(offset - other_offset) < (size[1] + other_size[1]) / 2 + _GAP_M
    return bool((is_near & is_beside).any())


def _color(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Return a random BGR colour. Cones are orange, and other agents are not as grey as the road."""
    integers = rng.integers
    if kind == "traffic_cone":
        return np.array([20, 90, 235]) + integers(-15, 16, 3)
    color = integers(20, 235, 3)
    color[integers(3)] = rng.choice((25, 230))
    return color
