"""Pictures of a field: panels of volumes and point samples."""

import numpy as np
import pytest
import torch

from visdet.structures import FieldDataSample
from visdet.visualization import FieldVisualizer


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


def test_one_column_may_be_drawn_alone():
    points, sample = points_and_sample((4, 5, 6))
    fit, truth = draw(points, sample, draw_gt=False), draw(points, sample, draw_pred=False)
    assert fit.shape == truth.shape == (900, 300, 3) and not np.array_equal(truth, fit)


def test_a_sample_without_values_is_refused():
    with pytest.raises(ValueError, match="neither gt_field nor pred_field"):
        FieldVisualizer(name="empty").draw_sample(np.zeros((1, 3)), FieldDataSample())
