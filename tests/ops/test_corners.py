"""The arithmetic of bilinear samples in ``csrc/common``, compiled for the host, against plain formulas."""

import pytest
import torch
import torch.nn.functional as F
from emulation import called
from torch.testing import assert_close

PROGRAM = """
#include "common/corners.cuh"

using namespace visdet;

// [count, 2] positions in pixels to: [count] whether they count, [count, 4] texels, weights, [count, 2] fractions.
extern "C" void locate_all(const double* xy, int count, int H, int W, int* counts, int* texels, double* weights,
                           double* fractions) {
  for (int i = 0; i < count; ++i) {
    Bilinear<double> at;
    counts[i] = locate(xy[2 * i], xy[2 * i + 1], H, W, at);
    double weight[4];
    at.corner_weights(weight);
    for (int k = 0; k < 4; ++k) texels[4 * i + k] = at.index[k], weights[4 * i + k] = weight[k];
    fractions[2 * i] = at.fx, fractions[2 * i + 1] = at.fy;
  }
}

// Of one corner: its weight and the derivatives of this weight.
extern "C" void factors_of(int k, double fx, double fy, double* out) {
  const CornerFactors<double> factors = corner_factors(k, fx, fy);
  out[0] = factors.weight, out[1] = factors.by_x, out[2] = factors.by_y;
}

extern "C" void scaled_weights(double scale, double fx, double fy, double* out) {
  double weight[4];
  scaled_corner_weights(scale, fx, fy, weight);
  for (int k = 0; k < 4; ++k) out[k] = weight[k];
}

extern "C" void interpolated(const double* corner, double fx, double fy, double* out) {
  const double corners[4] = {corner[0], corner[1], corner[2], corner[3]};
  const Interpolation<double> at = interpolate_numbers(corners, fx, fy);
  out[0] = at.value, out[1] = at.by_x, out[2] = at.by_y;
}
"""
FRACTIONS = [(0.0, 0.0), (0.25, 0.75), (0.5, 0.1), (1.0, 0.3), (0.7, 1.0)]


def found(function, count, *arguments):
    """Return the numbers that a function of the program writes."""
    out = torch.zeros(count, dtype=torch.float64)
    called(function, *arguments, out)
    return out


def weights_of_corners(fx, fy):
    across, down = torch.stack([1 - fx, fx]), torch.stack([1 - fy, fy])
    return torch.outer(down, across).flatten()


@pytest.mark.parametrize("H, W", [(5, 3), (1, 4), (1, 1)])
def test_corners_and_weights_are_those_of_grid_sample(library, H, W):
    size = torch.tensor([W, H], dtype=torch.float64)
    inside = torch.rand(200, 2, dtype=torch.float64) * (size + 3) - 2
    edges = [[-1.0, 0.0], [float(W), 0.0], [0.0, float(H)], [W - 1.0, H - 1.0], [-0.5, H - 0.5]]
    strange = [[torch.nan, 0.0], [0.0, torch.inf], [-1e30, 1e30]]
    xy = torch.cat([inside, torch.tensor(edges + strange, dtype=torch.float64)])
    count, image = len(xy), torch.rand(H, W, dtype=torch.float64)
    counts, texels = torch.zeros(count, dtype=torch.int32), torch.zeros(count, 4, dtype=torch.int32)
    weights, fractions = torch.zeros_like(xy).repeat(1, 2), torch.zeros_like(xy)
    called(library.locate_all, xy, count, H, W, counts, texels, weights, fractions)
    assert texels.min() >= 0 and texels.max() < H * W
    samples = (image.flatten()[texels] * weights).sum(1)
    grid = (xy[None, None, :-3] * 2 + 1) / size - 1
    expected = F.grid_sample(image[None, None], grid, align_corners=False).flatten()
    assert_close(samples[:-3], expected, rtol=1e-12, atol=1e-12)
    assert samples[-3:].tolist() == [0, 0, 0]
    does_count = ((xy > -1) & (xy < size)).all(1)
    assert torch.equal(counts > 0, does_count)
    assert_close(fractions[does_count], xy[does_count] % 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fx, fy", FRACTIONS)
def test_factors_of_a_corner_are_its_weight_and_the_slopes_of_the_weight(library, fx, fy):
    """Weights times a scale and interpolated numbers, with their slopes, are sums of these factors."""
    at = torch.tensor([fx, fy], dtype=torch.float64).unbind()
    factors = torch.stack([found(library.factors_of, 3, k, fx, fy) for k in range(4)])
    slopes = torch.autograd.functional.jacobian(weights_of_corners, at)
    expected = torch.stack([weights_of_corners(*at), *slopes], 1)
    assert_close(factors, expected, rtol=0, atol=1e-15)
    scaled = found(library.scaled_weights, 4, -1.5, fx, fy)
    assert_close(scaled, -1.5 * factors[:, 0], rtol=0, atol=1e-15)
    numbers = torch.tensor([0.3, -1.2, 2.5, 0.8], dtype=torch.float64)
    interpolated = found(library.interpolated, 3, numbers, fx, fy)
    assert_close(interpolated, numbers @ factors, rtol=0, atol=1e-14)
