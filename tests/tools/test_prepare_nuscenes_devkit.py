"""The converter against the devkit, on a small data set in nuScenes' layout."""

import numpy as np
from numpy.testing import assert_allclose
from nuscenes_layout import converted, tilt_and_complete, write_nuscenes
from peers import peer

peer("nuscenes.nuscenes", "nuscenes-devkit", "check-devkit")

from nuscenes.nuscenes import NuScenes
from nuscenes.prediction import PredictHelper, convert_local_coords_to_global
from nuscenes.utils import splits
from pyquaternion import Quaternion

from visdet.datasets.nuscenes_converter import split_of_scene


def test_splits_are_the_same():
    for name in [*splits.train, *splits.val]:
        assert split_of_scene("v1.0-trainval", name) == ("val" if name in splits.val else "train")


def test_annotations_are_the_same(tmp_path):
    write_nuscenes(tmp_path)
    tilt_and_complete(tmp_path)
    infos, converter = converted(tmp_path, with_map=False)
    info_of = {info["token"]: info for info in infos}
    nuscenes = NuScenes("v1.0-mini", str(tmp_path), verbose=False)
    helper = PredictHelper(nuscenes)
    for sample in nuscenes.sample:
        info = info_of[sample["token"]]
        records = converter.tables.annotations_of_sample[sample["token"]]
        row_of = {record["token"]: row for row, record in enumerate(records)}
        to_ego, to_world = (
            Quaternion(info[key]).rotation_matrix for key in ("lidar2ego_rotation", "ego2global_rotation")
        )
        for box in nuscenes.get_sample_data(sample["data"]["LIDAR_TOP"])[1]:
            row = row_of[box.token]
            expected = [*box.center, *box.wlh[[1, 0, 2]], box.orientation.yaw_pitch_roll[0]]
            assert_allclose(info["gt_boxes"][row], expected, atol=1e-9)
            velocity = to_ego.T @ to_world.T @ [*nuscenes.box_velocity(box.token)[:2], 0.0]
            assert_allclose(info["gt_velocity"][row], velocity[:2], atol=1e-9)
            instance = nuscenes.get("sample_annotation", box.token)["instance_token"]
            local = helper.get_future_for_agent(instance, sample["token"], seconds=6, in_agent_frame=True)
            assert info["gt_agent_fut_masks"][row].sum() == len(local)
            if len(local):
                path = convert_local_coords_to_global(
                    local, box.center, Quaternion(matrix=box.rotation_matrix)
                )
                steps = np.diff(np.vstack([box.center[:2], path]), axis=0)
                assert_allclose(info["gt_agent_fut_trajs"][row, : len(local)], steps, atol=1e-5)
