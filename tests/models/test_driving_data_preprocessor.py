"""Collated driving frames become one batch."""

import numpy as np
import pytest
import torch
from mmengine.dataset import pseudo_collate
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.models.sparsedrive.sample_batch import batch_of
from visdet.registry import MODELS
from visdet.structures import DrivingDataSample

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def item(seed, num_boxes, size=(4, 6)):
    generator = generator_of(seed)
    sample = DrivingDataSample(
        metainfo={
            "T_global": np.eye(4) * seed,
            "token": f"t{seed}",
            "timestamp": 1.5e9 + seed / 8,
            "instance_id": np.arange(num_boxes),
        },
        projection_mat=torch.rand(2, 4, 4, generator=generator),
        gt_depth=[torch.full((2, 4, 6), float(seed)), torch.full((2, 2, 3), float(seed))],
        gt_bboxes_3d=torch.rand(num_boxes, 9),
        gt_ego_fut_cmd=torch.tensor([0.0, 0.0, 1.0]),
    )
    images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8, generator=generator)
    return {"inputs": images, "data_samples": sample}


def test_a_batch():
    items = [item(1, 3), item(2, 0)]
    batch = MODELS.build(dict(type="DrivingDataPreprocessor", mean=MEAN, std=STD, bgr_to_rgb=True))(
        pseudo_collate(items), True
    )
    assert batch["inputs"].shape == (2, 2, 3, 4, 6) and batch["inputs"].dtype == torch.float32
    blue = items[1]["inputs"][1, 0].float()
    assert_close(batch["inputs"][1, 1, 2], (blue - MEAN[2]) / STD[2], atol=1e-5, rtol=1e-5)
    assert [sample.token for sample in batch["data_samples"]] == ["t1", "t2"]
    frames = batch_of(batch["data_samples"])
    assert frames["timestamp"].dtype == torch.float64
    assert frames["timestamp"].tolist() == [1.5e9 + 0.125, 1.5e9 + 0.25]
    assert frames["projection_mat"].shape == (2, 2, 4, 4) and frames["gt_ego_fut_cmd"].shape == (2, 3)
    assert [level.shape for level in frames["gt_depth"]] == [(2, 2, 4, 6), (2, 2, 2, 3)]
    assert frames["gt_depth"][1][:, 0, 0, 0].tolist() == [1, 2]
    assert [len(boxes) for boxes in frames["gt_bboxes_3d"]] == [3, 0]
    assert [meta["token"] for meta in frames["img_metas"]] == ["t1", "t2"]
    assert frames["img_metas"][1]["T_global"][0, 0] == 2 and len(frames["img_metas"][0]["instance_id"]) == 3


def test_all_tensors_of_a_sample_move():
    moved = item(1, 3)["data_samples"].to("meta")
    assert moved.projection_mat.is_meta and all(level.is_meta for level in moved.gt_depth)
    assert moved.token == "t1"


def test_what_the_scene_makes_long_stays_on_the_host():
    sample = item(1, 3)["data_samples"]
    moved = sample.with_inputs_on(torch.device("meta"))
    assert moved.projection_mat.is_meta and moved.gt_ego_fut_cmd.is_meta
    assert all(level.is_meta for level in moved.gt_depth)
    assert moved.gt_bboxes_3d is sample.gt_bboxes_3d and moved.token == "t1"
    assert set(moved.keys()) == set(sample.keys())


def test_images_alone_and_without_statistics():
    batch = MODELS.build(dict(type="DrivingDataPreprocessor"))({"inputs": [torch.ones(2, 3, 4, 4)]})
    assert torch.equal(batch["inputs"], torch.ones(1, 2, 3, 4, 4)) and batch["data_samples"] is None


def test_errors():
    preprocessor = MODELS.build(dict(type="DrivingDataPreprocessor"))
    with pytest.raises(RuntimeError, match=r"equal size, but got \[2, 3, 4, 6\] .* \[2, 3, 4, 8\]"):
        preprocessor(pseudo_collate([item(1, 1), item(2, 1, (4, 8))]))
    with pytest.raises(ValueError, match="mean and std must be given together"):
        MODELS.build(dict(type="DrivingDataPreprocessor", mean=MEAN))


def test_nothing_to_save():
    assert not MODELS.build(dict(type="DrivingDataPreprocessor", mean=MEAN, std=STD)).state_dict()


@pytest.mark.cuda
def test_a_data_loader_pins_all_tensors_of_a_sample():
    pinned = item(1, 3)["data_samples"].pin_memory()
    assert pinned.projection_mat.is_pinned() and all(level.is_pinned() for level in pinned.gt_depth)
    assert pinned.token == "t1" and len(pinned.gt_bboxes_3d) == 3
