"""Pictures of a field: the ellipses that a plane cuts, and panels of volumes and point samples."""

import numpy as np
import pytest
import torch
from PIL import Image

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


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 5, 6), None], ids=str)
def test_draws(tmp_path, shape):
    count = int(np.prod(shape or 300))
    if shape is None:
        points = torch.rand(count, 3)
    else:
        points = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).view(-1, 3) + 0.5
    values = torch.linspace(0, 1, count)
    picture = FieldVisualizer().add_field(
        "field",
        points.float(),
        values,
        values.flip(0),
        shape=shape,
        means=points.float().mean(0, keepdim=True),
        covariances=torch.eye(3)[None],
        out_file=str(tmp_path / "new" / "field.png"),
    )
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    assert np.asarray(Image.open(tmp_path / "new" / "field.png")).std() > 10
