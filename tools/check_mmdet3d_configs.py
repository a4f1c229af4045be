"""Check that unmodified mmdet3d 1.4 configs run on mmcv-lite and visdet's operators.

Each model is built without weights, and runs one training step and one prediction on random points or images. The
environment needs mmcv-lite, mmdet and mmdet3d (docs/mmcv.md).
"""

import math
import sys
from pathlib import Path
from typing import Any

from check_mmdet_configs import allow_cpu, check_configs, train_and_predict, without_weights

CONFIGS = (
    "pointpillars/pointpillars_hv_secfpn_8xb6-160e_kitti-3d-3class.py",
    "pointpillars/pointpillars_hv_fpn_sbn-all_8xb4-2x_nus-3d.py",
    "dynamic_voxelization/pointpillars_dv_secfpn_8xb6-160e_kitti-3d-car.py",
    "dynamic_voxelization/second_dv_secfpn_8xb6-80e_kitti-3d-car.py",
    "second/second_hv_secfpn_8xb6-80e_kitti-3d-3class.py",
    "centerpoint/centerpoint_pillar02_second_secfpn_8xb4-cyclic-20e_nus-3d.py",
    "centerpoint/centerpoint_voxel01_second_secfpn_head-dcn_8xb4-cyclic-20e_nus-3d.py",
    "free_anchor/pointpillars_hv_fpn_head-free-anchor_sbn-all_8xb4-2x_nus-3d.py",
    "ssn/ssn_hv_secfpn_sbn-all_16xb2-2x_nus-3d.py",
    "parta2/parta2_hv_secfpn_8xb2-cyclic-80e_kitti-3d-3class.py",
    "pv_rcnn/pv_rcnn_8xb2-80e_kitti-3d-3class.py",
    "point_rcnn/point-rcnn_8xb2_kitti-3d-3class.py",
    "3dssd/3dssd_4xb4_kitti-3d-car.py",
    "votenet/votenet_8xb16_sunrgbd-3d.py",
    "votenet/votenet_8xb8_scannet-3d.py",
    "h3dnet/h3dnet_8xb3_scannet-seg.py",
    "groupfree3d/groupfree3d_head-L6-O256_4xb8_scannet-seg.py",
    "fcos3d/fcos3d_r101-caffe-dcn_fpn_head-gn_8xb2-1x_nus-mono3d.py",
    "pgd/pgd_r101-caffe_fpn_head-gn_4xb3-4x_kitti-mono3d.py",
    "smoke/smoke_dla34_dlaneck_gn-all_4xb8-6x_kitti-mono3d.py",
    "imvoxelnet/imvoxelnet_8xb4_kitti-3d-car.py",
    "sassd/sassd_8xb6-80e_kitti-3d-3class.py",
    "regnet/pointpillars_hv_regnet-400mf_fpn_sbn-all_8xb4-2x_nus-3d.py",
    "pointnet2/pointnet2_ssg_2xb16-cosine-200e_scannet-seg.py",
    "pointnet2/pointnet2_msg_2xb16-cosine-80e_s3dis-seg.py",
    "paconv/paconv_ssg_8xb8-cosine-150e_s3dis-seg.py",
    "paconv/paconv_ssg-cuda_8xb8-cosine-200e_s3dis-seg.py",
    "dgcnn/dgcnn_4xb32-cosine-100e_s3dis-seg_test-area1.py",
    "cylinder3d/cylinder3d_4xb4-3x_semantickitti.py",
)
MONOCULAR = ("fcos3d", "pgd", "smoke", "imvoxelnet")
BOXES = 6
# In pixels: height and width of the images, and the focal length.
IMAGE = (256, 640)
FOCAL = 400.0


def is_indoor(name: str) -> bool:
    """Return whether a config is of a data set of rooms."""
    return "sunrgbd" in name or "scannet" in name


def point_scene(config: Any, name: str) -> tuple[Any, Any]:
    """Return random points [N, D], a hundred of them in each box, and boxes [M, 7 or 9]."""
    import torch

    if is_indoor(name):
        sides, low, high = torch.tensor([[0.8, 0.7, 0.9], [-3, -3, 0], [3, 3, 2]])
        backbone = config.model.backbone
        features = backbone.get("in_channels") or backbone.backbones.in_channels
    else:
        low, high = torch.tensor(config.get("point_cloud_range", [-3, -3, -1, 3, 3, 2])).view(2, 3)
        sides, low, high = torch.tensor([3.9, 1.6, 1.56]), low.clamp(min=-40), high.clamp(max=40)
        steps = {step["type"]: step for step in config.train_pipeline}
        use = steps["LoadPointsFromFile"]["use_dim"]
        if "LoadPointsFromMultiSweeps" in steps:
            use = steps["LoadPointsFromMultiSweeps"].get("use_dim", 4)
        features = use if isinstance(use, int) else len(use)
    centers = low + (0.2 + 0.6 * torch.rand(BOXES, 3)) * (high - low)
    headings = torch.rand(BOXES, 1) * 2 * math.pi - math.pi
    boxes = torch.cat([centers, sides.expand(BOXES, 3), headings], 1)
    inside = (
        centers[:, None] + (torch.rand(BOXES, 100, 3) - 0.5) * sides * 0.6 + sides * torch.tensor([0, 0, 0.5])
    )
    background = low + torch.rand(20000 - BOXES * 100, 3) * (high - low)
    points = torch.rand(20000, features)
    points[:, :3] = torch.cat([inside.flatten(0, 1), background])
    if "nus" in name:
        boxes = torch.cat([boxes, torch.zeros(BOXES, 2)], 1)
    return points, boxes


def camera_scene(name: str) -> tuple[Any, Any, Any]:
    """Return an image, boxes [M, 7 or 9] in the frame of the camera, and its matrix [4, 4]."""
    import torch

    depth = 10 + 20 * torch.rand(BOXES)
    x = (torch.rand(BOXES) - 0.5) * 0.6 * depth * IMAGE[1] / FOCAL
    boxes = torch.stack([x, torch.full_like(x, 1.5), depth], 1)
    boxes = torch.cat([boxes, torch.tensor([3.9, 1.56, 1.6]).expand(BOXES, 3), torch.zeros(BOXES, 1)], 1)
    if "nus" in name:
        boxes = torch.cat([boxes, torch.zeros(BOXES, 2)], 1)
    matrix = torch.eye(4)
    matrix[0, 0] = matrix[1, 1] = FOCAL
    matrix[0, 2], matrix[1, 2] = IMAGE[1] / 2, IMAGE[0] / 2
    return torch.rand(3, *IMAGE) * 255, boxes, matrix


def batch_of(config: Any, name: str, device: str) -> dict:
    """Return a batch of one sample in the form that mmdet3d's data preprocessors take."""
    import numpy as np
    import torch
    from mmdet3d.structures import (
        CameraInstance3DBoxes,
        DepthInstance3DBoxes,
        Det3DDataSample,
        LiDARInstance3DBoxes,
        PointData,
    )
    from mmengine.structures import InstanceData

    sample, found, flat = Det3DDataSample(), InstanceData(), InstanceData()
    classes = len(config.get("class_names") or config.metainfo["classes"])
    labels = torch.randint(0, classes, (BOXES,), device=device)
    inputs: dict[str, Any] = {}
    if any(word in name for word in MONOCULAR):
        image, boxes, matrix = camera_scene(name)
        kind = LiDARInstance3DBoxes if "imvoxelnet" in name else CameraInstance3DBoxes
        inputs["img"] = [image.to(device)]
        center = boxes[:, :3] @ matrix[:3, :3].T
        center2d, depth = center[:, :2] / center[:, 2:], center[:, 2]
        half = torch.tensor([3.9, 1.56]) / 2 * FOCAL / depth[:, None]
        flat.bboxes = torch.cat([center2d - half, center2d + half], 1).to(device)
        found.centers_2d, found.depths = center2d.to(device), depth.to(device)
        found.attr_labels = torch.zeros_like(labels)
        cam2img = matrix.numpy()
        sample.set_metainfo(
            dict(
                cam2img=cam2img.tolist() if "imvoxelnet" not in name else cam2img,
                img_shape=IMAGE,
                pad_shape=IMAGE,
                ori_shape=IMAGE,
                scale_factor=np.array([1.0, 1.0]),
                trans_mat=np.array([[0.25, 0, 0], [0, 0.25, 0], [0, 0, 1]], np.float32),
                affine_aug=False,
            )
        )
        if kind is LiDARInstance3DBoxes:  # x forward, y left, z up
            boxes = torch.stack([boxes[:, 2], -boxes[:, 0], -boxes[:, 1], *boxes[:, 3:].T], 1)
            turn = torch.tensor([[0.0, -1, 0, 0], [0, 0, -1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
            sample.set_metainfo(dict(lidar2img=(matrix @ turn).numpy()))
    else:
        points, boxes = point_scene(config, name)
        kind = DepthInstance3DBoxes if is_indoor(name) else LiDARInstance3DBoxes
        inputs["points"] = [points.to(device)]
        owner = torch.arange(len(points), device=device).div(100, rounding_mode="floor").clamp(max=BOXES)
        sample.gt_pts_seg = PointData()
        sample.gt_pts_seg.pts_instance_mask = owner
        sample.gt_pts_seg.pts_semantic_mask = torch.cat([labels, labels.new_full((1,), classes)])[owner]
    found.bboxes_3d = kind(boxes.to(device), box_dim=boxes.shape[1], origin=(0.5, 0.5, 0.5))
    found.labels_3d = flat.labels = labels
    sample.set_metainfo(dict(box_type_3d=kind, box_mode_3d=None))
    sample.gt_instances_3d, sample.gt_instances, sample.eval_ann_info = found, flat, None
    return dict(inputs=inputs, data_samples=[sample])


def labelled_points(config: Any, name: str, device: str, is_training: bool) -> dict:
    """Return a batch of two samples, or of one for a prediction, of points in a room or around a car, with classes."""
    import torch
    from mmdet3d.structures import Det3DDataSample, PointData

    features = config.model.backbone.get("in_channels", 4)
    if config.model.test_cfg.get("use_normalized_coord") and not is_training:
        features -= 3  # The test adds them itself.
    points = torch.rand(4096, features, device=device)
    if "semantickitti" in name:
        points[:, :3] = (points[:, :3] - 0.5) * points.new_tensor([20, 20, 4])
    sample = Det3DDataSample(metainfo=dict(box_type_3d=None))
    sample.gt_pts_seg, sample.eval_ann_info = PointData(), None
    classes = config.model.decode_head.num_classes - 1
    sample.gt_pts_seg.pts_semantic_mask = torch.randint(0, classes, (len(points),), device=device)
    count = 2 if is_training else 1
    return dict(inputs=dict(points=[points] * count), data_samples=[sample] * count)


def check(config_path: Path, device: str) -> str:
    """Return a text with the loss of one training step and the number of predicted boxes, or classes of points."""
    import torch
    from mmdet3d.registry import MODELS
    from mmengine.config import Config

    allow_cpu(device)
    torch.manual_seed(0)
    config = Config.fromfile(config_path)
    without_weights(config.model)
    model = MODELS.build(config.model).to(device)
    if "num_classes" in config.model.get("decode_head", {}):
        loss, sample = train_and_predict(
            model, lambda count: labelled_points(config, config_path.name, device, count == 2)
        )
        return f"loss {loss:.3f}, {len(sample.pred_pts_seg.pts_semantic_mask.unique())} classes"
    loss, sample = train_and_predict(model, lambda count: batch_of(config, config_path.name, device))
    return f"loss {loss:.3f}, {len(sample.pred_instances_3d)} boxes"


if __name__ == "__main__":
    sys.exit(check_configs("mmdet3d", CONFIGS, check, __doc__))
