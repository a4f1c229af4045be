"""Collated driving frames become one batch."""

import numpy as np
import pytest
import torch
from mmengine.dataset import pseudo_collate

from visdet.registry import MODELS

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def item(seed, num_boxes, size=(4, 6)):
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": {"img": torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8, generator=generator)},
        "data_samples": {
            "timestamp": 1.5e9 + seed / 8,
            "projection_mat": torch.rand(2, 4, 4, generator=generator),
            "gt_depth": [torch.full((2, 4, 6), float(seed)), torch.full((2, 2, 3), float(seed))],
            "gt_bboxes_3d": torch.rand(num_boxes, 9),
            "gt_ego_fut_cmd": torch.tensor([0.0, 0.0, 1.0]),
            "img_metas": {
                "T_global": np.eye(4) * seed,
                "token": f"t{seed}",
                "instance_id": np.arange(num_boxes),
            },
        },
    }


def test_a_batch():
    items = [item(1, 3), item(2, 0)]
    collated = pseudo_collate(items)
    batch = MODELS.build(dict(type="DrivingDataPreprocessor", mean=MEAN, std=STD, bgr_to_rgb=True))(
        collated, True
    )
    assert batch["inputs"].shape == (2, 2, 3, 4, 6) and batch["inputs"].dtype == torch.float32
    blue = items[1]["inputs"]["img"][1, 0].float()
    torch.testing.assert_close(batch["inputs"][1, 1, 2], (blue - MEAN[2]) / STD[2], atol=1e-5, rtol=1e-5)
    samples = batch["data_samples"]
    assert samples["timestamp"].dtype == torch.float64 and samples["timestamp"].tolist() == [
        1.5e9 + 0.125,
        1.5e9 + 0.25,
    ]
    assert samples["projection_mat"].shape == (2, 2, 4, 4) and samples["gt_ego_fut_cmd"].shape == (2, 3)
    assert [level.shape for level in samples["gt_depth"]] == [(2, 2, 4, 6), (2, 2, 2, 3)]
    assert samples["gt_depth"][1][:, 0, 0, 0].tolist() == [1, 2]
    assert [len(boxes) for boxes in samples["gt_bboxes_3d"]] == [3, 0]
    assert [meta["token"] for meta in samples["img_metas"]] == ["t1", "t2"]
    assert samples["img_metas"][1]["T_global"][0, 0] == 2 and len(samples["img_metas"][0]["instance_id"]) == 3
    # The collated batch itself stays: metrics read it.
    assert collated["data_samples"]["img_metas"]["token"] == ["t1", "t2"]


def test_images_alone_and_without_statistics():
    batch = MODELS.build(dict(type="DrivingDataPreprocessor"))({"inputs": {"img": [torch.ones(2, 3, 4, 4)]}})
    assert torch.equal(batch["inputs"], torch.ones(1, 2, 3, 4, 4)) and batch["data_samples"] == {}


def test_errors():
    preprocessor = MODELS.build(dict(type="DrivingDataPreprocessor"))
    with pytest.raises(
        ValueError, match=r"img of all samples must be of one shape, got \[\(2, 3, 4, 6\), \(2, 3, 4, 8\)\]"
    ):
        preprocessor(pseudo_collate([item(1, 1), item(2, 1, (4, 8))]))
    uint8, float32 = item(1, 1), item(2, 1)
    float32["inputs"]["img"] = float32["inputs"]["img"].float()
    uint8["inputs"]["img"] = uint8["inputs"]["img"].to(torch.uint8)
    with pytest.raises(ValueError, match=r"one type, got \['torch\.float32', 'torch\.uint8'\]"):
        preprocessor(pseudo_collate([uint8, float32]))
    with pytest.raises(ValueError, match="mean and std must be given together"):
        MODELS.build(dict(type="DrivingDataPreprocessor", mean=MEAN))


def test_nothing_to_save():
    assert not MODELS.build(dict(type="DrivingDataPreprocessor", mean=MEAN, std=STD)).state_dict()
