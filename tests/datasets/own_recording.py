"""A small recording without lidar, with five cameras and classes of its own, written as docs/driving_data.md says."""

import re
from pathlib import Path

import cv2
import numpy as np
from programs import ROOT

PAGE = ROOT / "docs/driving_data.md"
CAMERAS = {"front": 0.0, "right": -70.0, "rear_right": -145.0, "rear_left": 145.0, "left": 70.0}
NAMES = ("car", "deer", "lorry")
SIZE = (96, 256)


def code_blocks() -> list[str]:
    """Return the Python code of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def rotation_of(camera: str) -> np.ndarray:
    """Return the rotation from a camera to the lidar frame."""
    yaw = np.deg2rad(CAMERAS[camera])
    ahead = np.array([-np.sin(yaw), np.cos(yaw), 0.0])
    down = np.array([0.0, 0.0, -1.0])
    return np.stack([np.cross(down, ahead), down, ahead], axis=1)


def write_recording(folder: Path, scenes: dict[str, int], save: bool = True) -> dict[str, list[dict]]:
    """Write images and info files of a split for each number of scenes below ``folder``, the working directory."""
    page: dict = {}
    exec(code_blocks()[0], page)
    intrinsics = np.array([[130.0, 0, 128], [0, 130, 48], [0, 0, 1]])
    rng = np.random.default_rng(0)
    found: dict[str, list[dict]] = {}
    for split, number in scenes.items():
        found[split] = []
        for scene in range(number):
            for frame in range(4):
                cameras = {}
                for name in CAMERAS:
                    file = Path("pictures", split, f"{scene}-{frame}-{name}.png")
                    (folder / "data/mine" / file).parent.mkdir(parents=True, exist_ok=True)
                    image = rng.integers(0, 255, (*SIZE, 3), dtype=np.uint8)
                    cv2.imwrite(str(folder / "data/mine" / file), image)
                    cameras[name] = (str(file), rotation_of(name), np.array([0.0, 0.5, -0.2]), intrinsics)
                boxes = np.array(
                    [[0, 12.0, -1, 4.5, 1.9, 1.6, 1.57, 0, 2], [6, 20, -1, 1.5, 0.5, 1.5, 0.3, 1, 0]]
                )
                found[split].append(
                    page["record"](
                        f"{split}-drive-{scene}",
                        frame,
                        1_700_000_000 + 100 * scene + 0.5 * frame,
                        [2.0 * frame, 0.0],
                        0.0,
                        cameras,
                        boxes + rng.normal(0, 0.1, boxes.shape),
                        np.array(["lorry", "deer"] if frame % 2 else ["car", "deer"]),
                        np.array([1, 2]),
                        [np.array([[2.0, -10], [2.0, 30]])],
                    )
                )
        if save:
            page["save"](split, found[split])
    return found
