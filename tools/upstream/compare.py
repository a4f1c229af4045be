"""A repository's SparseDrive beside visdet's own model, with the same weights on the same frames."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from visdet.models.sparsedrive.box3d_decoder import of_samples
from visdet.models.sparsedrive.sample_batch import batch_of
from visdet.registry import MODELS
from visdet.structures import DrivingDataSample

__all__ = ["compare", "without_randomness"]

LIMITS = {"loss": 1e-3, "prediction": 1e-3, "gradients": 2e-3}
_VALUES = {  # Both models compute these alike. Flash attention rounds to 16 bits.
    "drop_out": 0.0,
    "dropout": 0.0,
    "attn_drop": 0.0,
    "ffn_drop": 0.0,
    "use_grid_mask": False,
    "use_rescore": False,
    "with_cp": False,
}


def without_randomness(settings: Any) -> None:
    """Switch dropout, GridMask, 16-bit attention and the rescoring of the plan off in a config, in place."""
    for key, value in list(settings.items() if isinstance(settings, dict) else enumerate(settings)):
        if isinstance(value, (dict, list)):
            without_randomness(value)
        elif key in _VALUES:
            settings[key] = _VALUES[key]
        elif value == "MultiheadFlashAttention":
            settings[key] = "MultiheadAttention"


def compare(runner: Any, work: Path, device: str, scale: float, report: Any, forward: Callable) -> None:
    """Train and predict two frames with both models, and report the largest differences."""
    with report.stage("imports"):
        runner.imports()
    with report.stage("builds") as result:
        theirs = runner.build(work, device, scale)
        spread_scores(theirs)
        ours = MODELS.build(runner.plain_model).to(device)
        ours.load_state_dict(theirs.state_dict())
        result(f"{sum(p.numel() for p in theirs.parameters()) / 1e6:.1f} M")
    largest = dict.fromkeys(LIMITS, 0.0)
    for training in (True, False):
        for model in (theirs, ours):
            model.train(training)
        for batch in runner.batches(work, training):
            data = runner.scattered(batch)
            images, samples = data["img"], samples_of(data)
            if not training:
                with torch.no_grad(), forward():
                    boxes = theirs(**copy.deepcopy(data))[0]["img_bbox"]
                with torch.no_grad():
                    outs = ours(images, samples, mode="tensor")
                own = of_samples(ours.head.select(outs, batch_of(samples)), ours.head.of_sample)[0]
                update(
                    largest,
                    "prediction",
                    {key: difference(boxes[key], own[key]) for key in boxes if key in own},
                )
                continue
            theirs.zero_grad()
            ours.zero_grad()
            with forward():
                losses = theirs(**copy.deepcopy(data))
            own_losses = ours(images, samples, mode="loss")
            update(largest, "loss", {key: difference(losses[key], own_losses[key]) for key in losses})
            sum(losses.values()).backward()
            sum(own_losses.values()).backward()
            own_norms = norms(ours)
            update(
                largest,
                "gradients",
                {key: difference(norm, own_norms[key]) for key, norm in norms(theirs).items()},
            )
    for stage, value in largest.items():
        report.add(stage, f"{value:.1e}")
        if value > LIMITS[stage]:
            report.add("obstacle", f"{stage}: the models differ by {value:.1e}, more than {LIMITS[stage]}")


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


def norms(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}


def difference(theirs: Any, ours: Any) -> float:
    """Return the largest difference, relative to the largest number where that is more than one."""
    theirs, ours = (torch.as_tensor(value).detach().double() for value in (theirs, ours))
    if theirs.shape != ours.shape:
        return float("inf")
    if not theirs.numel():
        return 0.0
    scale = 1.0 if theirs.dim() else max(float(theirs.abs()), 1e-4)
    return float((theirs - ours).abs().max()) / max(scale, float(theirs.abs().max()) if theirs.dim() else 0.0)


def update(largest: dict[str, float], stage: str, found: dict[str, float]) -> None:
    for name, value in sorted(found.items(), key=lambda entry: -entry[1])[:5]:
        print(f"{stage} {name}: {value:.2e}", flush=True)
    largest[stage] = max(largest[stage], *found.values())
