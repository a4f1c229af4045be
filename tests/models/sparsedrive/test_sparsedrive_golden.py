"""SparseDrive over two frames against a peer's numbers: outputs, results, losses and gradients."""

import copy
import json

import numpy as np
import pytest
import torch
from golden import golden, published_shapes, under
from sparsedrive_golden import close

from visdet.models.sparsedrive import MultiheadFlashAttention
from visdet.registry import MODELS

STAGES = (1, 2)


def build(arrays):
    """Return the golden model with its weights; anchors come from the state, the config has none."""
    config = json.loads(str(arrays["config"]))["model"]
    state = under(arrays, "state")
    for name in ("det_head", "map_head"):
        bank = config["head"][name]["instance_bank"]
        bank["anchor"] = np.zeros(state[f"head.{name}.instance_bank.anchor"].shape, dtype=np.float32)
    if "motion_plan_head" in config["head"] and config["head"]["task_config"]["with_motion_plan"]:
        for name in ("motion_anchor", "plan_anchor"):
            config["head"]["motion_plan_head"][name] = np.zeros(
                state[f"head.motion_plan_head.{name}"].shape, dtype=np.float32
            )
    model = MODELS.build(config)
    model.load_state_dict(state, strict=True)
    return model


def frame_of(arrays, index):
    """Return (images, data) of a frame in the form the preprocessor gives."""
    values = under(arrays, f"input/frame{index}")
    data = {name: value for name, value in values.items() if "/" not in name}
    for name in {key.split("/")[0] for key in values if "/" in key}:
        count = sum(key.startswith(f"{name}/") for key in values)
        data[name] = [values[f"{name}/{i}"] for i in range(count)]
    ids = data.pop("instance_id")
    data["img_metas"] = [
        {
            "T_global": pose.numpy(),
            "T_global_inv": np.linalg.inv(pose.numpy()),
            "timestamp": float(time),
            "instance_id": id_.numpy(),
        }
        for pose, time, id_ in zip(data["T_global"], data["timestamp"], ids, strict=True)
    ]
    return data.pop("img"), data


@pytest.fixture(scope="module", params=STAGES)
def case(request):
    arrays = golden(f"sparsedrive_stage{request.param}")
    return arrays, build(arrays)


def check(arrays, prefix, outs):
    """Compare every stored array under ``prefix`` with the entry of that name; returns how many were compared."""
    count = 0
    for name, expected in under(arrays, prefix).items():
        value = outs
        for part in name.split("/"):
            value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
        close(value, expected, 2e-5)
        count += 1
    return count


def test_two_frames(case):
    arrays, model = case
    model.eval()
    model.reset_temporal_state()
    for index in range(2):
        images, data = frame_of(arrays, index)
        with torch.no_grad():
            det, lines, motion, planning = model(images, data, mode="tensor")
            results = model.head.post_process((det, lines, motion, planning), data)
        prefix = f"output/frame{index}"
        for name, outs in (("det", det), ("map", lines), ("motion", motion), ("planning", planning)):
            if outs is not None:
                outs = {key: value for key, value in outs.items() if value is not None}
                stored = {
                    k: v for k, v in arrays.items() if k.startswith(f"{prefix}/{name}/") and "/bank/" not in k
                }
                assert check(stored, f"{prefix}/{name}", outs) > 3
        for name, head in (("det", model.head.det_head), ("map", model.head.map_head)):
            bank = head.instance_bank
            for key, expected in under(arrays, f"{prefix}/{name}/bank").items():
                close(bank.instance_id if key == "kept_instance_id" else getattr(bank, key), expected, 2e-5)
        for key, expected in under(arrays, f"{prefix}/decoded").items():
            task, sample, name = key.split("/")
            # cls_scores: ours belong to their boxes. planning scores: see the tests of the planning decoder.
            if name == "cls_scores" or task.startswith("planning"):
                continue
            value = results[int(sample)][name.removesuffix("_aligned")]
            close(np.stack(value) if name == "vectors" else value, expected, 2e-5)


def test_features_and_depth(case):
    arrays, model = case
    model.eval()
    images, data = frame_of(arrays, 0)
    use_flat, model.use_deformable_func = model.use_deformable_func, False
    with torch.no_grad():
        maps, depths = model.extract_feat(images, return_depth=True, metas=data)
    model.use_deformable_func = use_flat
    for level, expected in enumerate(
        [v for k, v in sorted(under(arrays, "output/frame0").items()) if k.startswith("feature_maps")]
    ):
        close(maps[level][0, [0, 4]], expected, 2e-5)
    for level in range(3):
        close(depths[level][:6], arrays[f"output/frame0/depth_sample0/{level}"], 2e-5)


def test_losses_and_gradients(case):
    arrays, model = case
    model = copy.deepcopy(model)
    model.reset_temporal_state()
    model.train()
    model.reset_temporal_state()
    for index in range(2):
        images, data = frame_of(arrays, index)
        model.zero_grad()
        seen = {}
        handle = model.head.register_forward_hook(
            lambda module, args, outs, seen=seen: seen.update(outs=outs)
        )
        losses = model(images, data, mode="loss")
        handle.remove()
        expected = under(arrays, f"loss/frame{index}")
        assert set(losses) == set(expected) - {"total"}
        for name, value in losses.items():
            close(value, expected[name], 1e-5)
        for name, outs in zip(("det", "map"), seen["outs"], strict=False):
            for key in ("classification", "prediction"):
                close(outs[key][-1], arrays[f"train/frame{index}/{name}/{key}"], 2e-5)
        for sample, (pred, gt) in enumerate(model.head.det_head.sampler.indices):
            close(pred, arrays[f"train/frame{index}/det/pred_index/{sample}"])
            close(gt, arrays[f"train/frame{index}/det/gt_index/{sample}"])
        total = sum(losses.values())
        close(total, expected["total"], 1e-5)
        total.backward()
        parameters = dict(model.named_parameters())
        names = [str(name) for name in arrays[f"grad_norm/frame{index}/names"]]
        for name, norm in zip(names, arrays[f"grad_norm/frame{index}/values"], strict=True):
            assert float(parameters[name].grad.norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("stage", STAGES)
def test_golden_config_is_left_alone(stage):
    arrays = golden(f"sparsedrive_stage{stage}")
    config = json.loads(str(arrays["config"]))["model"]["head"]["det_head"]["deformable_model"]
    before = copy.deepcopy(config)
    MODELS.build(config)
    assert config == before


def test_flash_attention_name_is_registered():
    assert MODELS.get("MultiheadFlashAttention") is MultiheadFlashAttention
    assert published_shapes("sparsedrive_stage1")["head.det_head.layers.4.attn.in_proj_weight"] == (1536, 512)
