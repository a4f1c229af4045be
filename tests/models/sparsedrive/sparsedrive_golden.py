"""Golden cases of SparseDrive and its parts: build, load, run, compare."""

import json
from typing import NamedTuple

import golden as golden_files
import numpy as np
import torch
from driving_samples import samples_of
from golden import golden, golden_state, under
from training_steps import gradients_of

from visdet.engine.stages import StagedModel
from visdet.models.sparsedrive.base_target import assigned_instances
from visdet.models.sparsedrive.boxes.box3d_decoder import results_of
from visdet.models.sparsedrive.sample_batch import batch_of
from visdet.registry import MODELS, TASK_UTILS

_CACHE = {}


def module_case(name):
    """Return (config, state, input, output) of one case of modules.npz, or skip."""
    if "modules" not in _CACHE:
        _CACHE["modules"] = golden("modules")
    arrays = _CACHE["modules"]
    config = json.loads(str(arrays[f"{name}/config"]))
    return config, *(under(arrays, f"{name}/{part}") for part in ("state", "input", "output"))


def built(name, kind=None, registry=MODELS):
    """Return (module with the peer's weights, input, output) of a case."""
    config, state, given, expected = module_case(name)
    module = registry.build({"type": kind or name, **config})
    if registry is not TASK_UTILS:
        module.load_state_dict(state, strict=True)
        module.eval()
    return module, given, expected


def close(actual, expected, tolerance=6e-5):
    """Compare as ``golden.close`` does. Measured: up to 4.6e-5, behind a backbone whose norms are folded."""
    golden_files.close(actual, expected, tolerance)


def build(arrays):
    """Return the golden model with its weights; anchors come from the state, the config has none."""
    config = json.loads(str(arrays["config"]))["model"]
    state = under(arrays, "state")  # holds the anchors at least
    for name in ("det_head", "map_head"):
        bank = config["head"][name]["instance_bank"]
        bank["anchor"] = np.zeros(state[f"head.{name}.instance_bank.anchor"].shape, dtype=np.float32)
    if "motion_plan_head" in config["head"] and config["head"]["task_config"]["with_motion_plan"]:
        for name in ("motion_anchor", "plan_anchor"):
            config["head"]["motion_plan_head"][name] = np.zeros(
                state[f"head.motion_plan_head.{name}"].shape, dtype=np.float32
            )
    model = MODELS.build(config)
    model.load_state_dict(golden_state(model, arrays), strict=True)
    return model


def lists(values, name):
    """Return values[name/0], values[name/1], ... as a list."""
    return [values[f"{name}/{i}"] for i in range(sum(key.startswith(f"{name}/") for key in values))]


def frame_of(arrays, index):
    """Return (images, samples) of a frame in the form the preprocessor gives."""
    values = under(arrays, f"input/frame{index}")
    data = {name: value for name, value in values.items() if "/" not in name}
    data |= {name: lists(values, name) for name in {key.split("/")[0] for key in values if "/" in key}}
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
    return data.pop("img"), samples_of(data)


def part(values, name):
    """Return the entry ``a/b/0`` of nested dicts, lists and tuples."""
    for key in name.split("/"):
        values = values[int(key)] if isinstance(values, (list, tuple)) else values[key]
    return values


def matches_of(index, counts):
    """Return (predictions, instances), two index tensors of each sample, given an assignment [B, Q]."""
    return [
        ((row < count).nonzero().flatten(), row[row < count])
        for row, count in zip(index, counts, strict=True)
    ]


@torch.no_grad()
def evaluate(model, arrays):
    """Run both frames; yield what each returns: {det, map, motion, planning, decoded}, with banks in det and map."""
    model.eval()
    state = None
    for index in range(2):
        images, samples = frame_of(arrays, index)
        outs, state = model.step(images, samples, state)
        results = results_of(model.head.select(outs, batch_of(samples)))
        for result in results:
            result["cls_scores_aligned"] = result.get("cls_scores")
        values = {
            name: out if out is None else dict(out)
            for name, out in zip(("det", "map", "motion", "planning"), outs, strict=True)
        }
        for name in ("det", "map"):
            bank = state.head[name].bank
            values[name]["bank"] = {
                "cached_anchor": bank.cached_anchor,
                "confidence": bank.confidence,
                "kept_instance_id": bank.instance_id,
            }
        values["decoded"] = dict.fromkeys(("det", "map", "motion"), results)
        yield values


@torch.no_grad()
def features_and_depth(model, arrays):
    """Return {name in the golden file: values of each level} of the first frame."""
    model.eval()
    images, samples = frame_of(arrays, 0)
    use_flat, model.use_deformable_func = model.use_deformable_func, False
    maps, depths = model.extract_feat(images, return_depth=True, metas=batch_of(samples))
    model.use_deformable_func = use_flat
    return {
        "feature_maps_sample0_cam0_cam4": [level[0, [0, 4]] for level in maps],
        "depth_sample0": [level[:6] for level in depths],
    }


class TrainingStep(NamedTuple):
    """What a frame in training gives: the losses and their total, the last layer's outputs, norms of gradients."""

    losses: dict
    outs: dict
    grad_norms: dict


def train(model, arrays):
    """Run both frames in training without an update of the weights; yield a ``TrainingStep`` of each."""
    model.train()
    staged = StagedModel(model)
    for index in range(2):
        images, samples = frame_of(arrays, index)
        model.zero_grad()
        seen = {}
        handle = model.head.register_forward_hook(
            lambda module, args, result, seen=seen: seen.update(outs=result[0])
        )
        losses = dict(staged.losses(images, samples))
        handle.remove()
        losses["total"] = sum(losses.values())
        losses["total"].backward()
        outs = {
            name: {key: out[key][-1] for key in ("classification", "prediction")}
            for name, out in zip(("det", "map"), seen["outs"], strict=False)
        }
        truth = model.head.ground_truth(batch_of(samples))
        costs = model.head.pair_costs(seen["outs"], truth)
        matches = matches_of(assigned_instances(costs, truth)["det"].index[-1], truth["det"].counts)
        outs["det"]["pred_index"], outs["det"]["gt_index"] = zip(*matches, strict=True)
        norms = {name: float(gradient.norm()) for name, gradient in gradients_of(model).items()}
        yield TrainingStep(losses, outs, norms)


def decoded(decoder, *arguments):
    """Return the results of each sample on the CPU."""
    return results_of(decoder.select(*arguments))
