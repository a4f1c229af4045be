"""The world of the embedded driving set: a road, the ego vehicle on it and everybody else, as functions of time."""

from dataclasses import dataclass, field

import numpy as np

__all__ = ["DRIVING_CLASSES", "STEP_S", "World", "make_world"]

# Names of nuScenes, so that its metrics know them.
DRIVING_CLASSES = ("car", "truck", "pedestrian", "bicycle", "traffic_cone")
STEP_S = 0.5  # between key frames

_EGO_ROOM = (6.6, 2.2, 1.6)  # length, width, height in m: a vehicle of 4.1 x 1.7 and what it keeps clear
_MEAN_SIZE = {  # length, width, height, m
    "car": (4.4, 1.85, 1.6),
    "truck": (7.0, 2.4, 3.0),
    "pedestrian": (0.7, 0.7, 1.75),
    "bicycle": (1.75, 0.65, 1.65),
    "traffic_cone": (0.45, 0.45, 0.9),
}
_LANE_WIDTH = 3.5
_STATION_SPACING = 0.5


@dataclass
class Road:
    """A centre line of varying curvature; lateral offsets d are positive to the left of its direction.

    stations [K]: distance along the line, m; xy [K, 2] and heading [K] there, in the world.
    lanes: (offset, direction) of each lane, direction +1 with the line and -1 against it.
    """

    stations: np.ndarray
    xy: np.ndarray
    heading: np.ndarray
    lanes: list[tuple[float, int]]
    half_width: float
    crossings: list[float]  # the station of the middle of each pedestrian crossing

    def place(self, station: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return world positions [..., 2] and headings [...] of road coordinates [...]."""
        x = np.interp(station, self.stations, self.xy[:, 0])
        y = np.interp(station, self.stations, self.xy[:, 1])
        heading = np.interp(station, self.stations, self.heading)
        xy = np.stack([x - offset * np.sin(heading), y + offset * np.cos(heading)], axis=-1)
        return xy, heading

    def line(self, offset: float, start: float, stop: float) -> np.ndarray:
        """Return the polyline [n, 2] at ``offset`` between two stations."""
        stations = np.linspace(start, stop, max(2, int((stop - start) / 1.0)))
        return self.place(stations, np.full_like(stations, offset))[0]


@dataclass
class Agents:
    """Everybody but the ego vehicle: classes and sizes [n], and motion in the world [n, T]."""

    labels: np.ndarray
    sizes: np.ndarray  # [n, 3] length, width, height
    xy: np.ndarray  # [n, T, 2]
    yaw: np.ndarray  # [n, T]
    velocity: np.ndarray  # [n, T, 2]
    colors: np.ndarray  # [n, 3] uint8


@dataclass
class World:
    """A scene: the road, the ego vehicle's motion [T] (position of the rear axle), and the agents."""

    road: Road
    ego_station: np.ndarray
    ego_speed: np.ndarray
    ego_xy: np.ndarray  # [T, 2]
    ego_yaw: np.ndarray  # [T]
    agents: Agents
    look: dict = field(default_factory=dict)


def make_world(rng: np.random.Generator, num_frames: int) -> World:
    """Return a scene of ``num_frames`` steps of 0.5 s drawn from ``rng``."""
    times = np.arange(num_frames) * STEP_S
    road = _make_road(rng)
    ego_lane = max(lane for lane, direction in road.lanes if direction > 0)
    if rng.random() < 0.5:
        ego_lane = min(lane for lane, direction in road.lanes if direction > 0)
    ego_station, ego_speed = _drive(rng, times, rng.uniform(3.0, 9.0))
    ego_xy, ego_yaw = road.place(ego_station, np.full_like(ego_station, ego_lane))
    agents = _make_agents(rng, road, times, ego_station, ego_lane, (ego_xy, ego_yaw))
    look = {
        "road": rng.integers(70, 115),
        "verge": rng.integers((50, 80, 45), (90, 130, 80)),
        "pavement": rng.integers(130, 165),
        "sky": rng.integers((170, 150, 110), (240, 210, 190)),
        "texture": int(rng.integers(1 << 30)),
    }
    return World(road, ego_station, ego_speed, ego_xy, ego_yaw, agents, look)


def _make_road(rng: np.random.Generator) -> Road:
    stations = np.arange(-90.0, 260.0, _STATION_SPACING)
    # Straight, a bend to the left and one to the right are as likely; a bend starts and ends smoothly.
    curvature = rng.normal(0, 0.001) + np.zeros_like(stations)
    turn = rng.integers(-1, 2)
    if turn:
        start, length = rng.uniform(-15, 25), rng.uniform(35, 80)
        shape = np.clip(np.minimum(stations - start, start + length - stations) / 12.0, 0, 1)
        curvature = curvature + turn * rng.uniform(0.012, 0.03) * shape
    heading = np.cumsum(curvature) * _STATION_SPACING
    origin = int(np.argmin(np.abs(stations)))
    heading = heading - heading[origin] + rng.uniform(-np.pi, np.pi)
    steps = np.stack([np.cos(heading), np.sin(heading)], axis=-1) * _STATION_SPACING
    xy = np.cumsum(steps, axis=0)
    xy = xy - xy[origin] + rng.uniform(-500, 500, 2)
    right, left = rng.integers(1, 3), rng.integers(1, 3)  # lanes with and against the direction of travel
    lanes = [(-(k + 0.5) * _LANE_WIDTH, 1) for k in range(right)]
    lanes += [((k + 0.5) * _LANE_WIDTH, -1) for k in range(left)]
    half_width = 2 * _LANE_WIDTH + rng.uniform(2.2, 2.8)  # a strip for parking on both sides
    crossings, station = [], rng.uniform(-30, 30)
    while station < 180:
        crossings.append(station)
        station += rng.uniform(35, 70)
    return Road(stations, xy, heading, lanes, half_width, crossings)


def _drive(rng: np.random.Generator, times: np.ndarray, speed: float) -> tuple[np.ndarray, np.ndarray]:
    """Return stations and speeds of a vehicle that starts at 0, keeps its speed and now and then changes it."""
    change = rng.uniform(-1.2, 1.0) if rng.random() < 0.6 else 0.0
    begin = rng.uniform(0, times[-1])
    fine = np.arange(0, times[-1] + 1e-6, 0.05)
    speeds = np.clip(speed + change * np.clip(fine - begin, 0, 4.0), 1.5, 11.0)
    travelled = np.concatenate([[0.0], np.cumsum((speeds[1:] + speeds[:-1]) / 2 * 0.05)])
    return np.interp(times, fine, travelled), np.interp(times, fine, speeds)


def _make_agents(rng, road: Road, times, ego_station, ego_lane, ego_motion) -> Agents:
    """Draw agents one after the other and keep those that hit nobody."""
    kept: list[tuple] = []
    ego_xy, ego_yaw = ego_motion
    forward = np.stack([np.cos(ego_yaw), np.sin(ego_yaw)], axis=-1)
    occupied = [(ego_xy + 1.4 * forward, ego_yaw, _EGO_ROOM)]
    wanted = rng.integers(32, 52)
    for _ in range(int(wanted)):
        kind, station, offset, along = _draw_agent(rng, road, times, ego_station)
        xy, heading = road.place(station, offset)
        yaw = _yaw_of_motion(xy, heading, along)
        size = np.array(_MEAN_SIZE[kind]) * rng.uniform(0.88, 1.12) * rng.uniform(0.95, 1.05, 3)
        if any(_overlap(xy, yaw, size, *other) for other in occupied):
            continue
        occupied.append((xy, yaw, size))
        velocity = np.gradient(xy, STEP_S, axis=0)
        kept.append((DRIVING_CLASSES.index(kind), size, xy, yaw, velocity, _color(rng, kind)))
    columns = list(zip(*kept, strict=True)) if kept else [[]] * 6
    num_times = len(times)
    return Agents(
        np.array(columns[0], dtype=np.int64),
        np.array(columns[1], dtype=np.float64).reshape(-1, 3),
        np.array(columns[2], dtype=np.float64).reshape(-1, num_times, 2),
        np.array(columns[3], dtype=np.float64).reshape(-1, num_times),
        np.array(columns[4], dtype=np.float64).reshape(-1, num_times, 2),
        np.array(columns[5], dtype=np.uint8).reshape(-1, 3),
    )


def _draw_agent(rng, road: Road, times, ego_station) -> tuple[str, np.ndarray, np.ndarray, int]:
    """Return class, stations [T], offsets [T] and direction (+1, -1) of one agent."""
    start = rng.uniform(-28, ego_station[-1] + 40)
    still = np.zeros_like(times)
    kind = str(rng.choice(("vehicle", "parked", "pedestrian", "bicycle", "traffic_cone"), p=_SHARES))
    if kind == "vehicle":
        offset, direction = road.lanes[rng.integers(len(road.lanes))]
        travelled, _ = _drive(rng, times, rng.uniform(2.0, 10.0))
        # Oncoming traffic starts further ahead, so that it is met.
        start = start + 20 if direction < 0 else rng.uniform(-28, 40)
        return _car_or_truck(rng), start + direction * travelled, still + offset, direction
    if kind == "parked":
        side = rng.choice((-1, 1))
        offset = side * (road.half_width - 1.35 + rng.uniform(-0.1, 0.1))
        return _car_or_truck(rng), start + still, offset + still, -int(side)
    if kind == "pedestrian" and rng.random() < 0.35:  # crosses the road
        side, speed = rng.choice((-1, 1)), rng.uniform(0.9, 1.7)
        station = rng.choice(road.crossings) + rng.uniform(-1, 1)
        begin = rng.uniform(-2, times[-1])
        offset = side * (road.half_width + 0.8 - speed * np.clip(times - begin, 0, None))
        return kind, station + still, np.clip(offset, -road.half_width - 4, road.half_width + 4), 0
    side = rng.choice((-1, 1))
    if kind == "pedestrian":
        speed = rng.uniform(0.8, 1.8) * rng.choice((-1, 1)) * (rng.random() < 0.75)
        return (
            kind,
            start + speed * times,
            still + side * (road.half_width + rng.uniform(0.8, 3.0)),
            int(np.sign(speed) or rng.choice((-1, 1))),
        )
    if kind == "bicycle":
        direction = -int(side)
        inset = _LANE_WIDTH * 2 - 0.2 + rng.uniform(-0.3, 0.2)
        return kind, start + direction * rng.uniform(2.0, 5.5) * times, still + side * inset, direction
    inset = rng.uniform(0.2, 1.2) if rng.random() < 0.7 else rng.uniform(3, 5)
    return kind, start + still, still + side * (road.half_width - inset), 1


_SHARES = (0.32, 0.2, 0.22, 0.1, 0.16)


def _car_or_truck(rng) -> str:
    return "car" if rng.random() < 0.72 else "truck"


def _yaw_of_motion(xy, heading, along: int) -> np.ndarray:
    """Return the heading of an agent: along the road, or for 0 (who crosses it) along its own path."""
    if along:
        return heading + (np.pi if along < 0 else 0.0)
    total = xy[-1] - xy[0]
    direction = np.arctan2(total[1], total[0]) if np.hypot(*total) > 0.1 else heading[0] + np.pi / 2
    return np.full(len(xy), direction)


def _overlap(xy, yaw, size, other_xy, other_yaw, other_size) -> bool:
    """Return whether two moving boxes come closer than 0.3 m at any time, erring on the safe side."""
    delta = xy - other_xy
    cos, sin = np.cos(other_yaw), np.sin(other_yaw)
    ahead, beside = delta[:, 0] * cos + delta[:, 1] * sin, -delta[:, 0] * sin + delta[:, 1] * cos
    turned = np.abs(np.sin(yaw - other_yaw)), np.abs(np.cos(yaw - other_yaw))
    reach_ahead = (size[0] * turned[1] + size[1] * turned[0] + other_size[0]) / 2 + 0.3
    reach_beside = (size[0] * turned[0] + size[1] * turned[1] + other_size[1]) / 2 + 0.3
    return bool(np.any((np.abs(ahead) < reach_ahead) & (np.abs(beside) < reach_beside)))


def _color(rng, kind: str) -> np.ndarray:
    """Return a BGR colour; cones are orange, the rest is anything but grey as the road is."""
    if kind == "traffic_cone":
        return np.array([20, 90, 235]) + rng.integers(-15, 16, 3)
    color = rng.integers(20, 235, 3)
    color[rng.integers(3)] = rng.choice((25, 230))
    return color
