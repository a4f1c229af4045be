"""SparseCoop's model of one vehicle, on the driving scenes in Griffin's form."""

import numpy as np

from .driving import Driving


class SparseCoop(Driving):
    """A model of four cameras, whose boxes have a velocity in three directions."""

    def complete(self, infos: list[dict]) -> None:
        from pyquaternion import Quaternion

        for info in infos:
            info["gt_velocity"] = np.pad(info["gt_velocity"], ((0, 0), (0, 1)))
            info["gt_inds"] = info["instance_inds"]
            info["cams"] = dict(list(info["cams"].items())[:4])
            for camera in info["cams"].values():
                to_lidar = np.asarray(camera["sensor2lidar_rotation"])
                camera["lidar2cam_rotation"] = list(Quaternion(matrix=to_lidar.T, rtol=1e-4, atol=1e-4))
                camera["lidar2cam_translation"] = -to_lidar.T @ np.asarray(camera["sensor2lidar_translation"])
