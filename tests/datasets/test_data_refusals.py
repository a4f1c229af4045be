"""What data sets, transforms, samplers and metrics refuse, by one message each that names the argument."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from visdet.datasets import (
    ShapesDataset,
    load_infos,
    make_driving_scenes,
    make_shapes,
    save_infos,
)
from visdet.datasets import transforms as T
from visdet.datasets.samplers import GroupInBatchSampler, SceneSampler
from visdet.errors import UserError
from visdet.registry import METRICS


def file(content, name="a.npz"):
    """Write a file to the working directory and return its name."""
    if isinstance(content, dict):
        np.savez(name, **content)
    else:
        Path(name).write_bytes(content)
    return name


def with_pickle(value):
    """Write an info file whose only frame is a pickle of something else, and return its name."""
    save_infos("a.npz", [FRAME], {})
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    return file({**np.load("a.npz"), "content": content, "ends": np.array([len(content)])})


def process(metric, sample, **arguments):
    METRICS.build({"type": metric, **arguments}).process(
        {}, [{"token": "t", "T_global": np.eye(4), **sample}]
    )


FRAME = {"token": "t", "scene_token": "s", "timestamp": 1_700_000_000_000_000}
TWO = {"a": np.eye(3), "b": np.eye(3)}
NAN = torch.tensor([1.0, 2.0, float("nan")])
FUTURE = {
    "gt_bboxes_3d": torch.zeros(1, 9),
    "gt_agent_fut_trajs": torch.zeros(1, 12, 2),
    "gt_agent_fut_masks": torch.ones(1, 12),
}
WAY = {
    "gt_ego_fut_trajs": torch.ones(6, 2),
    "gt_ego_fut_masks": torch.ones(6),
    "fut_boxes": np.array([np.zeros((0, 7))] * 6 + [None], dtype=object)[:6],
}
PICTURE = {"img": torch.zeros(3, 6, 9, dtype=torch.uint8), "img_shape": (6, 9)}
SEQUENCES = SimpleNamespace(flag=np.array([0, 0, 1]))
REFUSED = [
    (lambda: make_shapes("x", num_val=0), "num_val must be .* got 0"),
    (lambda: make_shapes("x", image_size=16), "image_size must be .* 32 .*got 16"),
    (lambda: make_shapes("x", seed=-1), "seed must be .* got -1"),
    (lambda: ShapesDataset(data_root="x", generator=dict(num_images=3)), "num_images"),
    (lambda: make_driving_scenes("x", num_test=0), "num_test must be .* got 0"),
    (lambda: make_driving_scenes("x", image_size=(8, 100)), "image_size must be"),
    (lambda: save_infos("a.npz", [FRAME | {"x": NAN}], {}), "frame t of a.npz: .* but it names torch"),
    (lambda: save_infos("a.npz", [FRAME | {"x": iter(())}], {}), "frame t of a.npz: .* arrays, but it names"),
    (lambda: save_infos("a.npz", [FRAME | {"x": open}], {}), "frame t of a.npz: .* arrays, but it names"),
    (lambda: save_infos("a.pkl", [], {}), "must end with .npz, got .*a.pkl"),
    (lambda: load_infos(file(pickle.dumps([1, 2]), "a.pkl")), "must hold a dict of infos"),
    (lambda: load_infos(file(b"nothing", "a.pkl")), "a.pkl cannot be read"),
    (lambda: load_infos(file(pickle.dumps(os.getcwd), "a.pkl")), "it names (posix|nt).getcwd"),
    (lambda: load_infos(with_pickle(os.getcwd))[0][0], "frame 0 of info file a.npz .* it names (posix|nt)"),
    (lambda: load_infos("none.npz"), "info file none.npz does not exist"),
    (lambda: load_infos(file(b"x", "a.txt")), "must end with .npz or .pkl"),
    (lambda: load_infos(file(TWO)), "is not one of visdet's"),
    (lambda: load_infos(file(b"PK\x03\x04broken")), "is not one of visdet's"),
    (lambda: T.LoadImageFromFile(max_pixels=0), "max_pixels must be"),
    (lambda: T.LoadImageFromFile(color_type="grey"), "color_type must be"),
    (lambda: T.LoadImageFromFile(channel_order="gbr"), "channel_order must be"),
    (lambda: T.LoadImageFromFile(imdecode_backend="cv2"), "imdecode_backend must be"),
    (lambda: T.LoadAnnotations()(T.RandomFlip(0.0)(dict(PICTURE))), "must come before RandomFlip"),
    (
        lambda: T.LoadAnnotations()(T.TorchvisionTransform("CenterCrop", size=4)(dict(PICTURE))),
        "must come before Torchv",
    ),
    (lambda: T.TorchvisionTransform("ToDtype", dtype=torch.float32)(dict(PICTURE)), "from torch.uint8 to"),
    (lambda: T.LoadAnnotations(with_mask=True), "with_mask must be False"),
    (
        lambda: T.BBoxRotation()({"aug_config": {"rotate_3d": 1.0}, "vectors": ()}),
        "BBoxRotation must come before VectorizeMap",
    ),
    (lambda: T.VectorizeMap((30, 60), False, simplify=True, sample_num=20), "either simplify or sample_num"),
    (lambda: T.VectorizeMap((30, 60), False, simplify=True, permute=True), "sample_num with permute"),
    (
        lambda: T.LoadPointsFromFile("LIDAR")({"pts_filename": None, "token": "a"}),
        "frame a has no lidar_path",
    ),
    (lambda: GroupInBatchSampler(dataset=SEQUENCES, batch_size=4), r"4 slots .*as many sequences, got 2"),
    (lambda: GroupInBatchSampler(dataset=[1, 2], batch_size=1), "dataset must be"),
    (lambda: SceneSampler([], shuffle=True), "shuffle must be False"),
    (lambda: process("CocoMetric", {"pred_instances": {}}), "no img_id, which must be among the meta_keys"),
    (lambda: process("MotionMetric", {"gt_bboxes_3d": NAN}), "frame t has no gt_agent_fut_trajs"),
    (lambda: process("MotionMetric", FUTURE), "frame t: the prediction has no trajs_3d"),
    (
        lambda: process(
            "MotionMetric",
            FUTURE
            | {"pred_instances_3d": {"boxes_3d": torch.zeros(3, 9), "trajs_3d": torch.zeros(3, 6, 8, 2)}},
        ),
        r"trajs_3d must be \[3, K, 12, 2\], got \[3, 6, 8, 2\]",
    ),
    (lambda: process("PlanningMetric", WAY), "frame t: the prediction has no final_planning"),
    (
        lambda: process("PlanningMetric", WAY | {"pred_plan": {"final_planning": torch.ones(4, 2)}}),
        r"final_planning must be \[6, 2\], got \[4, 2\]",
    ),
    (
        lambda: process("PlanningMetric", {"pred_plan": {"final_planning": torch.ones(6, 2)}}),
        "frame t has no ",
    ),
    (
        lambda: process("TrackingMetric", {"pred_instances_3d": {"boxes_3d": 0}}),
        "frame t has no gt_bboxes_3d",
    ),
    (lambda: process("VectorMapMetric", {"pred_map": {"vectors": []}}), "frame t has no vectors"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_used_is_one_message(tmp_path, monkeypatch, call, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, TypeError), match=message):
        call()
