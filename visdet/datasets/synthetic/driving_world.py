"""The world of the synthetic driving scenes: a road, and the motion of the ego vehicle and of all other agents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

# The names are those of nuScenes, so that its metrics apply.
DRIVING_CLASSES = ("car", "truck", "pedestrian", "bicycle", "traffic_cone")
STEP_S = 0.5  # time between key frames

# Length, width and height in metres of the vehicle, which is 4.1 x 1.7, together with the space that it keeps clear.
_EGO_ROOM = (6.6, 2.2, 1.6)
_MEAN_SIZE = {  # length, width, height, m
    "car": (4.4, 1.85, 1.6),
    "truck": (7.0, 2.4, 3.0),
    "pedestrian": (0.7, 0.7, 1.75),
    "bicycle": (1.75, 0.65, 1.65),
    "traffic_cone": (0.45, 0.45, 0.9),
}
_LANE_WIDTH = 3.5
_STATION_SPACING = 0.5

_TICK_S = 0.1  # time step of the driver model
_ACCELERATION, _BRAKING, _LATERAL_ACCELERATION = 1.6, 2.0, 2.0  # comfortable values in m/s^2
_HEADWAY_S, _STANDING_GAP_M = 1.2, 2.0
_AHEAD_M = np.arange(0, 40, _STATION_SPACING)  # distances at which a driver looks for turns


@dataclass
class Road:
    """A centre line of varying curvature. Lateral offsets are positive to the left of its direction.

    Attributes:
        stations: [K], distances along the line in metres.
        xy, heading, curvature: [K, 2], [K] and [K], in the world at these stations.
        lanes: (offset, direction) of each lane. The direction is +1 along the line and -1 against it.
        half_width: half the width of the road in metres.
        crossings: the station of the middle of each pedestrian crossing.
    """

    stations: np.ndarray
    xy: np.ndarray
    heading: np.ndarray
    curvature: np.ndarray  # [K], 1/m, positive to the left
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

    def nearest_station(self, xy: np.ndarray) -> float:
        """Return the station of the point of the line that is nearest to a place [2] in the world."""
        return float(self.stations[np.argmin(((self.xy - xy) ** 2).sum(axis=1))])

    def line(self, offset: float, start: float, stop: float) -> np.ndarray:
        """Return the polyline [n, 2] at ``offset`` between two stations."""
        stations = np.linspace(start, stop, max(2, int((stop - start) / 1.0)))
        return self.place(stations, np.full_like(stations, offset))[0]


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
    look: dict = field(default_factory=dict)


def make_world(rng: np.random.Generator, num_frames: int) -> World:
    """Return a random scene of ``num_frames`` steps of 0.5 s, drawn from ``rng``."""
    times = np.arange(num_frames) * STEP_S
    road = _make_road(rng)
    pick = min if rng.random() < 0.5 else max
    ego_lane = pick(lane for lane, direction in road.lanes if direction > 0)
    ego_station, ego_speed, met = _drive_ego(rng, road, times, ego_lane)
    ego_xy, ego_yaw = road.place(ego_station, np.full_like(ego_station, ego_lane))
    agents = _make_agents(rng, road, times, ego_station, (ego_xy, ego_yaw), met)
    look = {
        "road": rng.integers(70, 115),
        "verge": rng.integers((50, 80, 45), (90, 130, 80)),
        "pavement": rng.integers(130, 165),
        "sky": rng.integers((170, 150, 110), (240, 210, 190)),
        "texture": int(rng.integers(1 << 30)),
    }
    return World(road, ego_speed, ego_xy, ego_yaw, agents, look)


def _make_road(rng: np.random.Generator) -> Road:
    stations = np.arange(-90.0, 260.0, _STATION_SPACING)
    # A turn is a long bend or a corner. Its ends are smooth.
    curvature = rng.normal(0, 0.001) + np.zeros_like(stations)
    turn = rng.choice((-1, 0, 1), p=(0.375, 0.25, 0.375))
    if turn:
        if rng.random() < 0.5:
            start, length, ease, bend = (
                rng.uniform(-15, 25),
                rng.uniform(35, 80),
                12.0,
                rng.uniform(0.012, 0.03),
            )
        else:
            bend, ease = rng.uniform(0.04, 0.06), 8.0
            start, length = rng.uniform(0, 40), rng.uniform(0.8, 1.5) / bend + ease
        curvature = curvature + turn * bend * np.clip(
            np.minimum(stations - start, start + length - stations) / ease, 0, 1
        )
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
    return Road(stations, xy, heading, curvature, lanes, half_width, crossings)


def _drive(
    rng: np.random.Generator, times: np.ndarray, road: Road, start: float, direction: int, desired: float
) -> np.ndarray:
    """Return the stations of a vehicle that keeps its speed, or for a while drives at another speed or stops."""
    change, begin = rng.uniform(0.0, 1.5), rng.uniform(0, times[-1])
    hold = rng.uniform(2.0, 8.0)
    kind = rng.random()
    factor = 1.0 if kind < 0.5 else change if kind < 0.8 else 0.0

    def wanted(time: float) -> float:
        return desired * factor if begin <= time < begin + hold else desired

    return _follow(times, road, start, direction, desired, wanted)[0]


def _follow(
    times: np.ndarray,
    road: Road,
    start: float,
    direction: int,
    speed: float,
    wanted: Callable[[float], float],
    obstacles: Sequence[Callable[[float, float], tuple[float, float]]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return stations [T] and speeds [T] of a driver who slows down in turns and keeps a distance from obstacles.

    Args:
        times: [T], the times of the frames in seconds.
        road: the road.
        start: the first station. direction: +1 along the road, -1 against it.
        speed: the speed at the start in m/s.
        wanted: a function from the time to the wanted speed in m/s.
        obstacles: a function of each obstacle, from the time and the station to its (free distance in m, speed in m/s).

    Source: the intelligent driver model, Treiber, Hennecke and Helbing 2000.
    """
    stations, speeds, station = np.empty_like(times), np.empty_like(times), start
    per_frame = round(STEP_S / _TICK_S)
    # A driver brakes before a turn. The braking distance limits the speed.
    bends = np.maximum(np.abs(road.curvature), 1e-6)
    limit = np.sqrt(_LATERAL_ACCELERATION / bends)
    for frame, time in enumerate(times):
        stations[frame], speeds[frame] = station, speed
        for tick in range(per_frame):
            now = time + tick * _TICK_S
            index = (station - road.stations[0]) / _STATION_SPACING
            ahead = limit[_ahead(int(index), direction, len(limit))]
            curve = np.sqrt(ahead**2 + 2 * _BRAKING * _AHEAD_M[: len(ahead)]).min()
            target = max(min(wanted(now), curve), 0.1)
            acceleration = _ACCELERATION * (1 - min(speed / target, 2.0) ** 4)
            for obstacle in obstacles:
                gap, other = obstacle(now, station)
                closing = speed * (speed - other) / (2 * np.sqrt(_ACCELERATION * _BRAKING))
                room = _STANDING_GAP_M + max(0.0, _HEADWAY_S * speed + closing)
                acceleration = min(acceleration, _ACCELERATION * (1 - (room / max(gap, 0.1)) ** 2))
            before, speed = speed, max(0.0, speed + np.clip(acceleration, -6.0, _ACCELERATION) * _TICK_S)
            station += direction * (before + speed) / 2 * _TICK_S
    return stations, speeds


def _ahead(index: int, direction: int, count: int) -> slice:
    """Return the indices of the next stations in the direction of travel, the nearest first."""
    reach = len(_AHEAD_M)
    index = min(max(index, 0), count - 1)
    if direction > 0:
        return slice(index, index + reach)
    return slice(index, index - reach if index >= reach else None, -1)


def _drive_ego(
    rng: np.random.Generator, road: Road, times: np.ndarray, lane: float
) -> tuple[np.ndarray, np.ndarray, list[tuple]]:
    """Return stations and speeds of the ego vehicle, and the agents that it gives way to.

    The agents have the form that ``_draw_agent`` returns. The vehicle starts at its desired speed or slower. It follows
    a vehicle ahead in half of the scenes, and it may have to wait for a pedestrian who crosses.
    """
    desired = rng.uniform(4.5, 9.0)
    speed = desired if rng.random() < 0.6 else rng.uniform(0.0, desired)
    met: list[tuple] = []
    obstacles: list[Callable[[float, float], tuple[float, float]]] = []
    if rng.random() < 0.5:
        gap = rng.uniform(6.0, 22.0)
        slower = min(desired * rng.uniform(0.4, 1.0), 1.0 + speed)
        travelled = _drive(rng, times, road, gap + _EGO_ROOM[0], 1, slower)
        met.append((_car_or_truck(rng), travelled, np.full_like(times, lane), 1))
        reach = _EGO_ROOM[0] / 2 + _MEAN_SIZE[met[-1][0]][0] * 0.6 + 1.4
        pace = np.gradient(travelled, STEP_S)

        def vehicle(now: float, station: float) -> tuple[float, float]:
            gap = np.interp(now, times, travelled) - station - reach
            return float(gap), float(np.interp(now, times, pace))

        obstacles.append(vehicle)
    ahead = [crossing for crossing in road.crossings if 12 < crossing < 45]
    if ahead and rng.random() < 0.6:
        crossing, side, walk = ahead[0], rng.choice((-1, 1)), rng.uniform(1.0, 1.8)
        way = road.half_width + 0.8 - side * lane  # from the kerb to the middle of the lane
        arrival = crossing / max(speed, 3.0) + rng.uniform(-1.5, 3.0)
        offset = side * (way - walk * (times - arrival + way / walk)) + lane
        met.append(
            (
                "pedestrian",
                np.full_like(times, crossing + rng.uniform(-0.8, 0.8)),
                np.clip(offset, -road.half_width - 0.8, road.half_width + 0.8),
                0,
            )
        )

        def wait(now: float, station: float) -> tuple[float, float]:
            is_near = -2.4 < walk * (arrival - now) < 5.0
            gap = crossing - 2.2 - (station + _EGO_ROOM[0] / 2 + 1.4)
            return (gap, 0.0) if is_near and gap > -1.0 else (1e3, 0.0)

        obstacles.append(wait)

    def wanted(now: float) -> float:
        return desired

    stations, speeds = _follow(times, road, 0.0, 1, speed, wanted, obstacles)
    return stations, speeds, met


def _make_agents(
    rng: np.random.Generator,
    road: Road,
    times: np.ndarray,
    ego_station: np.ndarray,
    ego_motion: tuple[np.ndarray, np.ndarray],
    met: list[tuple],
) -> Agents:
    """Draw agents one after another, ``met`` first, and keep those that do not collide with another."""
    kept: list[tuple] = []
    ego_xy, ego_yaw = ego_motion
    forward = np.stack([np.cos(ego_yaw), np.sin(ego_yaw)], axis=-1)
    occupied: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = [
        (ego_xy + 1.4 * forward, ego_yaw, np.array(_EGO_ROOM))
    ]
    for number in range(int(rng.integers(32, 52))):
        drawn = met[number] if number < len(met) else _draw_agent(rng, road, times, ego_station)
        kind, station, offset, along = drawn
        xy, heading = road.place(station, offset)
        yaw = _yaw_of_motion(xy, heading, along)
        size = np.array(_MEAN_SIZE[kind]) * rng.uniform(0.88, 1.12) * rng.uniform(0.95, 1.05, 3)
        if any(_overlap(xy, yaw, size, *other) for other in occupied):
            continue
        occupied.append((xy, yaw, size))
        velocity = np.gradient(xy, STEP_S, axis=0)
        kept.append((DRIVING_CLASSES.index(kind), size, xy, yaw, velocity, _color(rng, kind)))
    return Agents(*map(np.array, zip(*kept, strict=True)))


def _draw_agent(
    rng: np.random.Generator, road: Road, times: np.ndarray, ego_station: np.ndarray
) -> tuple[str, np.ndarray, np.ndarray, int]:
    """Return the class, the stations [T], the offsets [T] and the direction (+1 or -1, 0 if it crosses) of an agent."""
    start = rng.uniform(-28, ego_station[-1] + 40)
    still = np.zeros_like(times)
    kind = str(rng.choice(("vehicle", "parked", "pedestrian", "bicycle", "traffic_cone"), p=_SHARES))
    if kind == "vehicle":
        offset, direction = road.lanes[rng.integers(len(road.lanes))]
        # Oncoming traffic starts farther ahead, so that the ego vehicle meets it.
        start = start + 20 if direction < 0 else rng.uniform(-28, 40)
        station = _drive(rng, times, road, start, direction, rng.uniform(2.0, 10.0))
        return _car_or_truck(rng), station, still + offset, direction
    if kind == "parked":
        side = rng.choice((-1, 1))
        offset = side * (road.half_width - 1.35 + rng.uniform(-0.1, 0.1))
        return _car_or_truck(rng), start + still, offset + still, -int(side)
    if kind == "pedestrian" and rng.random() < 0.35:  # This agent crosses the road.
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


def _car_or_truck(rng: np.random.Generator) -> str:
    return "car" if rng.random() < 0.72 else "truck"


def _yaw_of_motion(xy: np.ndarray, heading: np.ndarray, along: int) -> np.ndarray:
    """Return the heading of an agent, which is along the road, or along its own path if it crosses (``along`` is 0)."""
    if along:
        return heading + (np.pi if along < 0 else 0.0)
    total = xy[-1] - xy[0]
    direction = np.arctan2(total[1], total[0]) if np.hypot(*total) > 0.1 else heading[0] + np.pi / 2
    return np.full(len(xy), direction)


def _overlap(
    xy: np.ndarray,
    yaw: np.ndarray,
    size: np.ndarray,
    other_xy: np.ndarray,
    other_yaw: np.ndarray,
    other_size: np.ndarray,
) -> bool:
    """Return whether two moving boxes may come closer than 0.3 m at any time. The test is conservative."""
    delta = xy - other_xy
    cos, sin = np.cos(other_yaw), np.sin(other_yaw)
    ahead, beside = delta[:, 0] * cos + delta[:, 1] * sin, -delta[:, 0] * sin + delta[:, 1] * cos
    turned = np.abs(np.sin(yaw - other_yaw)), np.abs(np.cos(yaw - other_yaw))
    reach_ahead = (size[0] * turned[1] + size[1] * turned[0] + other_size[0]) / 2 + 0.3
    reach_beside = (size[0] * turned[0] + size[1] * turned[1] + other_size[1]) / 2 + 0.3
    return bool(np.any((np.abs(ahead) < reach_ahead) & (np.abs(beside) < reach_beside)))


def _color(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Return a random BGR colour. Cones are orange, and other agents are not as grey as the road."""
    if kind == "traffic_cone":
        return np.array([20, 90, 235]) + rng.integers(-15, 16, 3)
    color = rng.integers(20, 235, 3)
    color[rng.integers(3)] = rng.choice((25, 230))
    return color
