"""The example of two-view depth: exact pairs, the geometry of the network against them, and that it learns."""

import pytest
import torch
import torch.nn.functional as F
from toolbox import ROOT, succeed_here
from two_view_depth import TwoViewDepthMetric, TwoViewPairs, epipolar_samples

from visdet.engine import read_scalars

CONFIG = ROOT / "examples/two_view_depth/config.py"
SMALL = [
    *("train_dataloader.batch_size=4", "default_hooks.logger.interval=5", "log_processor.window_size=5"),
    *(f"{name}_dataloader.dataset.image_size=[24,32]" for name in ("train", "val", "test")),
    *("val_dataloader.dataset.num_pairs=4", "test_dataloader.dataset.num_pairs=4"),
]


def test_true_depth_leads_to_the_same_colour():
    """Without noise the source view, sampled where the true depth says, is the reference view wherever it is seen."""
    pairs = TwoViewPairs(num_pairs=2, noise=0.0, depth_stride=1)
    at_truth, at_wrong = [], []
    for pair in (pairs[0], pairs[1]):
        views, sample = pair["inputs"].float(), pair["data_samples"]
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


def test_the_metric_by_hand():
    metric = TwoViewDepthMetric()
    pairs = (([3.0, 4.0], [2.0, 4.0]), ([5.25], [5.0]))
    for predicted, truth in pairs:
        metric.process({}, [{"pred_depth": torch.tensor(predicted), "gt_depth": torch.tensor(truth)}])
    found = metric.evaluate(2)
    assert found["two_view/abs_rel"] == pytest.approx((0.5 + 0 + 0.05) / 3)
    assert found["two_view/within_10_percent"] == pytest.approx(2 / 3)
    # The constant is 4, whose inverse is the median.
    assert found["two_view/inverse_error_constant"] == pytest.approx((1 / 4 + 0 + 1 / 20) / 3)


def test_it_trains_and_tests_as_it_validated(tmp_path, monkeypatch, capsys):
    options = ("--cfg-options", *SMALL, "train_cfg.max_iters=40", "train_cfg.val_interval=40")
    succeed_here(monkeypatch, capsys, "train", CONFIG, "--work-dir", tmp_path / "run", *options)
    scalars = read_scalars(str(tmp_path / "run"))
    assert scalars["loss"][40] < 0.9 * scalars["loss"][5]
    checkpoint = tmp_path / "run" / "iter_40.pth"
    printed = succeed_here(
        monkeypatch, capsys, "test", CONFIG, checkpoint, "--work-dir", tmp_path / "test", *options
    )
    assert f"two_view/abs_rel {scalars['two_view/abs_rel'][40]:.4f}" in printed
