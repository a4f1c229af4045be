"""A nuScenes data set of two driving scenes: the tables, samples, map expansion and CAN bus as they lie on disk."""

import shutil
from pathlib import Path

import numpy as np
from datasets.driving_files import SMALL, driving_infos, driving_scenes, lidar_pose
from json_files import read_json, write_json
from PIL import Image
from scipy.spatial.transform import Rotation

from visdet.datasets.nuscenes_converter import NuScenesConverter
from visdet.datasets.synthetic.driving_world import make_world
from visdet.structures.poses import pose_matrix, quaternion_from_matrix, rotation_from_quaternion

LOCATION = "boston-seaport"
CATEGORIES = {
    "car": "vehicle.car",
    "truck": "vehicle.truck",
    "pedestrian": "human.pedestrian.adult",
    "bicycle": "vehicle.bicycle",
    "traffic_cone": "movable_object.trafficcone",
}
NAMES = ("scene-0061", "scene-0103")  # of the mini split: training and validation


def write_nuscenes(root: Path, version: str = "v1.0-mini") -> list[dict]:
    """Write the data set and return the driving infos that it was made from."""
    infos = driving_infos(split="val")
    shutil.copytree(Path(driving_scenes()) / "samples", root / "samples")
    tables = {
        name: [] for name in ("scene", "sample", "sample_data", "ego_pose", "sample_annotation", "instance")
    }
    tables["attribute"] = [{"token": "moving", "name": "vehicle.moving"}]
    tables["category"] = [{"token": name, "name": category} for name, category in CATEGORIES.items()]
    tables["log"] = [{"token": "log", "location": LOCATION}]
    channels = [*infos[0]["cams"], "LIDAR_TOP"]
    tables["sensor"] = [{"token": f"sensor-{name}", "channel": name} for name in channels]
    tables["calibrated_sensor"] = [_calibration(infos[0], name) for name in channels]
    scenes = [[info for info in infos if info["scene_token"] == scene] for scene in ("val-0000", "val-0001")]
    for name, frames in zip(NAMES, scenes, strict=True):
        tokens = [info["token"] for info in frames]
        tables["scene"].append(
            {
                "token": frames[0]["scene_token"],
                "name": name,
                "log_token": "log",
                "first_sample_token": tokens[0],
            }
        )
        for number, info in enumerate(frames):
            _add_frame(tables, info, tokens, number)
        _add_annotations(tables, frames)
    folder = root / version
    folder.mkdir(parents=True)
    for name, records in tables.items():
        write_json(folder / f"{name}.json", records)
    _write_can_bus(root / "can_bus", scenes)
    _write_map(root / "maps" / "expansion")
    return infos


def _calibration(info, name):
    if name == "LIDAR_TOP":
        pose = {"translation": info["lidar2ego_translation"], "rotation": info["lidar2ego_rotation"]}
        intrinsic = []
    else:
        camera = info["cams"][name]
        pose = {"translation": camera["sensor2ego_translation"], "rotation": camera["sensor2ego_rotation"]}
        intrinsic = camera["cam_intrinsic"].tolist()
    return {"token": f"cs-{name}", "sensor_token": f"sensor-{name}", "camera_intrinsic": intrinsic, **pose}


def _add_frame(tables, info, tokens, number):
    before = tokens[number - 1] if number else ""
    after = tokens[number + 1] if number + 1 < len(tokens) else ""
    token = info["token"]
    sample = {"token": token, "timestamp": info["timestamp"], "scene_token": info["scene_token"]}
    tables["sample"].append(sample | {"prev": before, "next": after})
    pose = {"translation": info["ego2global_translation"], "rotation": info["ego2global_rotation"]}
    tables["ego_pose"].append({"token": f"ego-{token}", "timestamp": info["timestamp"], **pose})
    files = {name: camera["data_path"] for name, camera in info["cams"].items()} | {
        "LIDAR_TOP": info["lidar_path"]
    }
    for name, path in files.items():
        data = {
            "token": f"{name}-{token}",
            "sample_token": token,
            "ego_pose_token": f"ego-{token}",
            "calibrated_sensor_token": f"cs-{name}",
            "timestamp": info["timestamp"],
            "filename": path,
            "is_key_frame": True,
            "prev": f"{name}-{before}" if before else "",
            "next": "",
        }
        tables["sample_data"].append(data)
        # What lies between the key frames must not be taken for one.
        tables["sample_data"].append(
            data | {"token": f"between-{name}-{token}", "is_key_frame": False, "filename": "sweeps/none"}
        )


def _add_annotations(tables, frames):
    """Add the boxes of a scene; those of one agent in successive frames know each other."""
    last: dict[int, dict] = {}
    for frame, info in enumerate(frames):
        lidar = lidar_pose(info)
        for row, agent in enumerate(info["instance_inds"].tolist()):
            instance = f"{info['scene_token']}-{agent}"
            if agent not in last:
                tables["instance"].append({"token": instance, "category_token": str(info["gt_names"][row])})
            x, y, z, length, width, height, yaw = info["gt_boxes"][row]
            pose = lidar @ pose_matrix((x, y, z), Rotation.from_euler("z", yaw).as_matrix())
            record = {
                "token": f"{instance}-{frame}",
                "sample_token": info["token"],
                "instance_token": instance,
                "attribute_tokens": ["moving"] if info["gt_names"][row] == "car" else [],
                "translation": pose[:3, 3].tolist(),
                "size": [width, length, height],
                "rotation": quaternion_from_matrix(pose[:3, :3]),
                "num_lidar_pts": int(info["num_lidar_pts"][row]),
                "num_radar_pts": 0,
                "prev": "",
                "next": "",
            }
            before = last.get(agent)
            if before is not None and before["token"] == f"{instance}-{frame - 1}":
                record["prev"], before["next"] = before["token"], record["token"]
            last[agent] = record
            tables["sample_annotation"].append(record)


def _write_can_bus(folder, scenes):
    """Write the messages of the first scene only, 10 ms late."""
    folder.mkdir()
    pose, steering = [], []
    for info in scenes[0]:
        status = info["ego_status"].tolist()
        time = info["timestamp"] + 10_000
        pose.append({"utime": time, "accel": status[:3], "rotation_rate": status[3:6], "vel": status[6:9]})
        steering.append({"utime": time, "value": status[9]})
    write_json(folder / f"{NAMES[0]}_pose.json", pose)
    write_json(folder / f"{NAMES[0]}_steeranglefeedback.json", steering)


def _write_map(folder):
    """Write the roads of both scenes in the map expansion's layers."""
    names = "polygon", "line", "ped_crossing", "road_segment", "lane", "lane_divider", "road_divider"
    nodes, layers = [], {name: [] for name in names}

    def tokens_of(points):
        first = len(nodes)
        nodes.extend(
            {"token": f"n{k}", "x": float(x), "y": float(y)} for k, (x, y) in enumerate(points, first)
        )
        return [node["token"] for node in nodes[first:]]

    def add_area(layer, points):
        token = f"p{len(layers['polygon'])}"
        layers["polygon"].append({"token": token, "exterior_node_tokens": tokens_of(points), "holes": []})
        layers[layer].append({"token": f"{layer}{token}", "polygon_token": token})

    def add_line(layer, points):
        token = f"l{len(layers['line'])}"
        layers["line"].append({"token": token, "node_tokens": tokens_of(points)})
        layers[layer].append({"token": f"{layer}{token}", "line_token": token})

    for scene in range(2):
        world = make_world(np.random.default_rng([0, 1, scene]), SMALL["num_frames"] + 6)
        road, half = world.road, world.road.half_width
        # Two overlapping road segments: their union is the road.
        for start, stop in ((-80.0, 40.0), (38.0, 200.0)):
            add_area("road_segment", road.strip(-half, half, start, stop))
        for offset in road.dividers:
            add_line("lane_divider" if offset else "road_divider", road.line(offset, -80, 200))
        for crossing in road.crossings:
            for low, high in ((-half, 0.5), (0.0, half)):  # in two parts that belong together
                add_area("ped_crossing", road.strip(low, high, crossing - 1.5, crossing + 1.5))
    folder.mkdir(parents=True)
    write_json(folder / f"{LOCATION}.json", layers | {"node": nodes})


def tilt_and_complete(root: Path, version: str = "v1.0-mini") -> None:
    """Tilt the vehicle a little, as roads do, and add what the devkit wants to see and the converter does not."""
    folder = root / version

    def change(table, update):
        records = read_json(folder / f"{table}.json")
        for record in records:
            record.update(update(record))
        write_json(folder / f"{table}.json", records)

    rng = np.random.default_rng(0)
    annotations = read_json(folder / "sample_annotation.json")
    tokens: dict[str, list[str]] = {}
    for record in annotations:
        tokens.setdefault(record["instance_token"], []).append(record["token"])

    def tilted(record):
        tilt = Rotation.from_euler("xyz", rng.normal(0, 0.03, 3))
        return {
            "rotation": quaternion_from_matrix(
                rotation_from_quaternion(record["rotation"]) @ tilt.as_matrix()
            )
        }

    def ends(record):
        mine = tokens[record["token"]]
        return {
            "nbr_annotations": len(mine),
            "first_annotation_token": mine[0],
            "last_annotation_token": mine[-1],
        }

    change("ego_pose", tilted)
    change("instance", ends)
    change("sample_annotation", lambda record: {"visibility_token": ""})
    change("sample_data", lambda record: {"fileformat": "jpg", "height": 48, "width": 128})
    change(
        "sensor", lambda record: {"modality": "lidar" if record["channel"].startswith("LIDAR") else "camera"}
    )
    (folder / "visibility.json").write_text("[]")
    mask = {"token": "mask", "log_tokens": ["log"], "filename": "maps/mask.png", "category": "semantic_prior"}
    write_json(folder / "map.json", [mask])
    Image.new("L", (4, 4)).save(root / "maps" / "mask.png")


def converted(root, with_map, **arguments):
    """Return the infos of all scenes of the data set below ``root``, and the converter."""
    converter = NuScenesConverter(root, "v1.0-mini", with_map=with_map, **arguments)
    return [
        info for scene in converter.tables.scenes() for info in converter.infos_of_scene(scene)
    ], converter
