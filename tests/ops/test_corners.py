"""The arithmetic of bilinear samples in ``csrc/common``, compiled for the host, against plain formulas."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

SOURCES = Path(__file__).resolve().parents[2] / "visdet" / "ops" / "csrc"
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


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    if not SOURCES.is_dir():
        pytest.skip("needs the sources, which a wheel does not hold")
    folder = tmp_path_factory.mktemp("corners")
    source, output = folder / "corners.cpp", folder / "corners.so"
    source.write_text(PROGRAM)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{SOURCES}"]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


def numbers(count, kind=ctypes.c_double):
    return (kind * count)()


def call(function, count, *arguments):
    out = numbers(count)
    function(*(ctypes.c_double(x) if isinstance(x, float) else x for x in arguments), out)
    return list(out)


def bilinear(corner, fx, fy):
    top, bottom = (1 - fx) * corner[0] + fx * corner[1], (1 - fx) * corner[2] + fx * corner[3]
    return (1 - fy) * top + fy * bottom


@pytest.mark.parametrize("H, W", [(5, 3), (1, 4), (1, 1)])
def test_corners_and_weights_are_those_of_grid_sample(library, H, W):
    torch.manual_seed(0)
    size = torch.tensor([W, H], dtype=torch.float64)
    inside = torch.rand(200, 2, dtype=torch.float64) * (size + 3) - 2
    edges = [[-1.0, 0.0], [float(W), 0.0], [0.0, float(H)], [W - 1.0, H - 1.0], [-0.5, H - 0.5]]
    strange = [[float("nan"), 0.0], [0.0, float("inf")], [-1e30, 1e30]]
    xy = torch.cat([inside, torch.tensor(edges + strange, dtype=torch.float64)]).contiguous()
    count, image = len(xy), torch.rand(H, W, dtype=torch.float64)
    counts, texels = numbers(count, ctypes.c_int), numbers(4 * count, ctypes.c_int)
    weights, fractions = numbers(4 * count), numbers(2 * count)
    data = ctypes.cast(xy.data_ptr(), ctypes.POINTER(ctypes.c_double))
    library.locate_all(data, count, H, W, counts, texels, weights, fractions)
    texels = torch.tensor(list(texels)).view(count, 4)
    assert texels.min() >= 0 and texels.max() < H * W
    found = (image.flatten()[texels] * torch.tensor(list(weights), dtype=torch.float64).view(count, 4)).sum(1)
    grid = ((xy[:-3] * 2 + 1) / size - 1).view(1, 1, -1, 2)
    expected = F.grid_sample(image.view(1, 1, H, W), grid, align_corners=False).flatten()
    torch.testing.assert_close(found[:-3], expected, rtol=1e-12, atol=1e-12)
    assert found[-3:].tolist() == [0, 0, 0]
    x, y = xy.unbind(1)
    does_count = (x > -1) & (x < W) & (y > -1) & (y < H)
    assert [bool(c) for c in counts] == does_count.tolist()
    fractions = torch.tensor(list(fractions), dtype=torch.float64).view(count, 2)[does_count]
    torch.testing.assert_close(fractions, xy[does_count] - xy[does_count].floor(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fx, fy", FRACTIONS)
@pytest.mark.parametrize("k", range(4))
def test_factors_of_a_corner_are_its_weight_and_the_slopes_of_the_weight(library, k, fx, fy):
    corner = [float(k == i) for i in range(4)]
    weight, by_x, by_y = call(library.factors_of, 3, k, fx, fy)
    assert weight == pytest.approx(bilinear(corner, fx, fy), abs=1e-15)
    assert by_x == pytest.approx(bilinear(corner, 1, fy) - bilinear(corner, 0, fy), abs=1e-15)
    assert by_y == pytest.approx(bilinear(corner, fx, 1) - bilinear(corner, fx, 0), abs=1e-15)


@pytest.mark.parametrize("fx, fy", FRACTIONS)
def test_scaled_weights_are_those_of_the_corners_times_the_scale(library, fx, fy):
    expected = [-1.5 * call(library.factors_of, 3, k, fx, fy)[0] for k in range(4)]
    assert call(library.scaled_weights, 4, -1.5, fx, fy) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("fx, fy", FRACTIONS)
def test_an_interpolation_and_its_slopes_are_those_of_finite_differences(library, fx, fy):
    corner, step = [0.3, -1.2, 2.5, 0.8], 1e-5
    value, by_x, by_y = call(library.interpolated, 3, (ctypes.c_double * 4)(*corner), fx, fy)
    assert value == pytest.approx(bilinear(corner, fx, fy), abs=1e-14)
    slope_x = (bilinear(corner, fx + step, fy) - bilinear(corner, fx - step, fy)) / (2 * step)
    slope_y = (bilinear(corner, fx, fy + step) - bilinear(corner, fx, fy - step)) / (2 * step)
    assert (by_x, by_y) == (pytest.approx(slope_x, abs=1e-9), pytest.approx(slope_y, abs=1e-9))
