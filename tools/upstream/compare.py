"""A repository's SparseDrive beside visdet's own model in float64, with the same weights on the same frames."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from visdet.engine.stages import StagedModel
from visdet.models.sparsedrive.boxes.box3d_decoder import results_of
from visdet.registry import MODELS
from visdet.structures import DrivingDataSample

from .float64 import float32_is_float64, in_float64

__all__ = ["compare"]

STAGES = ("loss", "gradients", "prediction")
LIMIT = 1e-6


@float32_is_float64()
def compare(runner: Any, work: Path, device: str, scale: float, report: Any, answers: Any) -> None:
    """Train and predict two frames with both models, and report the largest differences.

    ``answers`` surrounds the repository's code, and ``answers.available`` its forward.
    """
    with answers, report.stage("imports"):
        runner.imports()
    with answers, report.stage("builds") as result:
        theirs = runner.build(work, device, scale)
        spread_scores(theirs)
        result(f"{sum(p.numel() for p in theirs.parameters()) / 1e6:.1f} M")
    with report.stage("comparison"):
        ours = MODELS.build(runner.plain_model).to(device)
        ours.load_state_dict(theirs.state_dict())
        found: dict[str, list[float]] = {stage: [0.0] for stage in STAGES}
        for training in (True, False):
            # Each turn starts without earlier frames, which the repository's model would remember.
            model, own = (copy.deepcopy(one).train(training) for one in (theirs, ours))
            frames = StagedModel(own)
            for batch in runner.batches(work, training):
                data = in_float64(runner.scattered(batch))
                pairs = (trained if training else predicted)(model, frames, data, answers)
                for stage, (values, own_values) in pairs.items():
                    found[stage] += differences(stage, values, own_values)
    for stage, values in found.items():
        report.add(stage, f"{max(values):.1e}")
        if max(values) > LIMIT:
            report.add("obstacle", f"{stage}: the models differ by {max(values):.1e}, more than {LIMIT:g}")


def trained(theirs: Any, frames: StagedModel, data: dict, answers: Any) -> dict[str, tuple[dict, dict]]:
    """Return the losses and all gradients of both models."""
    for model in (theirs, frames.model):
        model.zero_grad()
    with answers, answers.available():
        losses = theirs(**copy.deepcopy(data))
    with answers:
        sum(losses.values()).backward()
    own_losses = frames.losses(data["img"], samples_of(data))
    sum(own_losses.values()).backward()
    return {"loss": (losses, own_losses), "gradients": (gradients(theirs), gradients(frames.model))}


@torch.no_grad()
def predicted(theirs: Any, frames: StagedModel, data: dict, answers: Any) -> dict[str, tuple[dict, dict]]:
    """Return the boxes, lines, trajectories and plans of both models."""
    with answers, answers.available():
        boxes = theirs(**copy.deepcopy(data))[0]["img_bbox"]
    batch = frames.model.prediction_batch(data["img"], samples_of(data), frames.state)
    outputs = frames.model.detections(batch)
    frames.state = frames.model.state_after(outputs, batch)
    own = results_of(outputs[0])[0]
    # The order of cls_scores differs, and boxes that are found at the same time may be numbered in another order.
    names = [name for name in boxes if name in own and name not in ("cls_scores", "instance_ids")]
    found, own = ({name: as_tensor(values[name]) for name in names} for values in (boxes, own))
    return {"prediction": (found, in_order_of(found, own))}


def in_order_of(found: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return our results with each box and line at the place of the repository's that is the nearest.

    They are sorted by score, and scores that differ by rounding change places. A query may be found as several classes.
    """
    for name, beside in (("boxes_3d", ("labels_3d", "scores_3d")), ("vectors", ("labels", "scores"))):
        keys = [
            torch.cat([one[name].flatten(1), *(one[key][:, None] for key in beside if key in one)], 1)
            for one in (found, own)
        ]
        order = torch.as_tensor(linear_sum_assignment(torch.cdist(*keys).cpu())[1])
        own = {key: value[order] if len(value) == len(order) else value for key, value in own.items()}
    return own


def spread_scores(model: torch.nn.Module) -> None:
    """Draw the last layers of scores, so that boxes count in the loss and the best ones differ clearly in score."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "cls_layers" in name or "quality_layers" in name:
                if parameter.dim() > 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif parameter.shape[0] < 32:
                    parameter.zero_()


def samples_of(data: dict) -> list[DrivingDataSample]:
    """Return the samples of a batch of the repository's pipeline."""
    samples = []
    for index, metas in enumerate(data["img_metas"]):
        sample = DrivingDataSample(metainfo=metas)
        for name, values in data.items():
            if name == "gt_depth":
                sample.set_field([level[index] for level in values], name)
            elif name not in ("img", "img_metas", *metas):
                sample.set_field(values[index], name)
        samples.append(sample)
    return samples


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differences(stage: str, values: dict, own_values: dict) -> list[float]:
    """Print the largest differences of the entries, and return all of them, relative to an entry's largest number.

    Differences of predictions whose numbers are all below one are absolute.
    """
    if stage == "gradients" and values.keys() != own_values.keys():
        raise ValueError(f"only one model has gradients of {sorted(values.keys() ^ own_values.keys())}")
    found = {}
    for name, value in values.items():
        theirs, ours = as_tensor(value), as_tensor(own_values[name])
        if stage == "loss":  # Some of the repository's losses are [1].
            theirs, ours = theirs.squeeze(), ours.squeeze()
        if theirs.shape != ours.shape:
            found[name] = float("inf")
        elif theirs.numel():
            least = 1.0 if stage == "prediction" else 1e-6
            found[name] = float((theirs - ours).abs().max() / theirs.abs().max().clamp(min=least))
    for name in sorted(found, key=lambda name: -found[name])[:5]:
        print(f"{stage} {name}: {found[name]:.1e} (of {len(found)})", flush=True)
    return list(found.values())


def as_tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(np.stack(value) if isinstance(value, list) else value).detach().cpu().double()
