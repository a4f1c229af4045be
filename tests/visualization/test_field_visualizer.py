"""Pictures of a field: the ellipses that a plane cuts, and panels of volumes and point samples."""

import numpy as np
import pytest
import torch
from mmengine.structures import InstanceData

from visdet.structures import FieldDataSample
from visdet.visualization import FieldVisualizer, slice_ellipses


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_ellipses_lie_on_the_ellipsoid(axis):
    rng = np.random.default_rng(0)
    factors = np.tril(rng.normal(size=(6, 3, 3))) + 2 * np.eye(3)
    means = 0.5 * rng.normal(size=(6, 3))
    means[3, axis] = 50.0  # missed by the plane
    centres, sizes, angles = slice_ellipses(means, factors @ factors.transpose(0, 2, 1), axis, 0.3)
    assert len(centres) == len(sizes) == len(angles) == 5
    met = [k for k in range(6) if k != 3]
    for n, centre, size, angle in zip(met, centres, sizes, np.radians(angles), strict=True):
        for turn in np.linspace(0, 6, 5):
            along = np.array([0.5 * size[0] * np.cos(turn), 0.5 * size[1] * np.sin(turn)])
            rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            point = np.insert(centre + rotation @ along, axis, 0.3)
            assert np.linalg.norm(np.linalg.solve(factors[n], point - means[n])) == pytest.approx(1)


def points_and_sample(shape):
    if shape is None:
        points, meta = torch.rand(300, 3), {}
    else:
        points = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).view(-1, 3) + 0.5
        meta = {"volume_shape": shape}
    values = torch.linspace(0, 1, len(points))
    return points.numpy(), FieldDataSample(metainfo=meta, gt_field=values, pred_field=values.flip(0))


def draw(points, sample, **options):
    (picture,) = FieldVisualizer(name="test").draw_sample(points, sample, **options)
    assert picture.dtype == np.uint8
    return picture


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 5, 6), None], ids=str)
def test_draws_truth_fit_and_error(shape):
    picture = draw(*points_and_sample(shape))
    assert picture.shape == (900, 900, 3)
    assert all(column.std() > 10 for column in np.split(picture, 3, axis=1))


def test_the_ellipses_are_drawn_over_the_fit():
    points, sample = points_and_sample((4, 5, 6))
    fit = draw(points, sample, draw_gt=False)
    sample.pred_gaussians = InstanceData(
        means=torch.tensor(points).mean(0, keepdim=True),
        covariances=torch.eye(3)[None],
        weights=torch.ones(1),
    )
    is_changed = (draw(points, sample, draw_gt=False) != fit).any(-1)
    assert fit.shape == (900, 300, 3)
    assert all(cut.sum() > 50 for cut in np.split(is_changed, 3)), "an ellipse in each cut"
    truth = draw(points, sample, draw_pred=False)
    assert truth.shape == (900, 300, 3) and not np.array_equal(truth, fit)


def test_a_sample_without_values_is_refused():
    with pytest.raises(ValueError, match="neither gt_field nor pred_field"):
        FieldVisualizer(name="empty").draw_sample(np.zeros((1, 3)), FieldDataSample())
