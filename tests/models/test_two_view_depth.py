"""Two-view depth: exact pairs, the geometry of the network against them, its losses, its bad calls."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config

from visdet.datasets import TwoViewPairs
from visdet.models.two_view_depth import epipolar_samples
from visdet.registry import MODELS

CONFIG = Path(__file__).resolve().parents[2] / "configs/sample_attention/two_view_depth_synthetic.py"


def model(**options):
    torch.manual_seed(0)
    return MODELS.build({**Config.fromfile(CONFIG).model.to_dict(), **options})


def batch(pairs=2, **options):
    items = [TwoViewPairs(num_pairs=pairs, **{"image_size": (24, 32), **options})[i] for i in range(pairs)]
    inputs = torch.stack([item["inputs"] for item in items])
    return inputs.float(), [item["data_samples"] for item in items]


def test_true_depth_leads_to_the_same_colour():
    """Without noise the source view, sampled where the true depth says, is the reference view wherever it is seen."""
    inputs, samples = batch(2, image_size=(48, 64), noise=0.0, depth_stride=1)
    at_truth, at_wrong = [], []
    for views, sample in zip(inputs, samples, strict=True):
        K, pose, depth = sample.intrinsics, sample.source_from_reference, sample.gt_depth
        for factor, errors in ((1.0, at_truth), (1.3, at_wrong)):
            # One candidate depth a pixel: take each pixel's own from the grid of all pixels.
            values, own = (factor * depth).flatten().unique(return_inverse=True)
            positions, behind = epipolar_samples(K[None], pose[None], values, (48, 64), (48, 64))
            place = positions[0].gather(1, own.view(-1, 1, 1).expand(-1, 1, 2)).view(1, 48, 64, 2)
            assert not behind.any()
            seen = F.grid_sample(views[1:], place, align_corners=False)[0]
            inside = (place.abs() < 0.98).all(-1)[0]
            errors.append((seen - views[0]).abs().mean(0)[inside])
    truth, wrong = torch.cat(at_truth), torch.cat(at_wrong)
    assert truth.median() < 3.0 and wrong.median() > 4 * truth.median()


def test_epipolar_samples_by_hand():
    """Focal length 10, a step of 0.5 to the left of the scene: a point at depth 2 moves 10 * 0.5 / 2 = 2.5 pixels."""
    K = torch.tensor([[[10.0, 0.0, 4.0], [0.0, 10.0, 2.0], [0.0, 0.0, 1.0]]])
    pose = torch.eye(4)[None].clone()
    pose[0, 0, 3] = 0.5
    positions, behind = epipolar_samples(K, pose, torch.tensor([2.0, 5.0]), (4, 8), (2, 4))
    pixels = (positions + 1) / 2 * torch.tensor([8.0, 4.0])
    assert pixels.shape == (1, 8, 2, 2) and not behind.any()
    torch.testing.assert_close(pixels[0, 5], torch.tensor([[5.5, 3.0], [4.0, 3.0]]))  # the cell at (3, 3)
    pose[0, 2, 3] = -3.0  # the nearer point is now behind the source camera
    positions, behind = epipolar_samples(K, pose, torch.tensor([2.0, 5.0]), (4, 8), (2, 4))
    assert behind[0, :, 0].all() and not behind[0, :, 1].any() and positions.isfinite().all()


def test_modes():
    network = model()
    inputs, samples = batch()
    position, weights = network(inputs, samples)
    assert position.shape == (2, 12, 16) and weights.shape == (2, 12 * 16, 32)
    predictions = network(inputs, samples, mode="predict")
    assert len(predictions) == 2 and predictions[1].gt_depth is samples[1].gt_depth
    expected = 1 / (1 / 8.0 + (1 / 1.2 - 1 / 8.0) * position)
    torch.testing.assert_close(torch.stack([pair.pred_depth for pair in predictions]), expected)
    sum(network(inputs, samples, mode="loss").values()).backward()
    unused = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert not unused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model(num_depths=1), "num_depths must be at least 2"),
        (lambda: model()(torch.zeros(2, 3, 8, 8), []), r"inputs must be a \[B, 2, 3, H, W\] tensor"),
        (lambda: model()(torch.zeros(1, 2, 3, 7, 8), []), r"even H and W, got \(1, 2, 3, 7, 8\)"),
        (
            lambda: model()(torch.zeros(1, 2, 3, 8, 8), [], mode="train"),
            "mode must be 'tensor', 'predict' or 'loss'",
        ),
        (lambda: TwoViewPairs(num_pairs=0), "num_pairs must be"),
        (
            lambda: TwoViewPairs(num_pairs=1, image_size=(47, 64)),
            "image_size must be positive multiples of 2",
        ),
        (
            lambda: TwoViewPairs(num_pairs=1, depth_range=(3.0, 2.0)),
            "depth_range must be positive and rising",
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
