"""The first voxels of rays, and the distances that a density lets them go, beside plain torch and by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.check import bits
from tests.fuzz.problem import Draw, Operator, Problem, nothing, rand, wide_of
from visdet.ops import cast_rays, render_rays
from visdet.ops.cast_rays import cast_rays_reference, render_rays_reference


def _draw_rays(draw: Draw, grid: str) -> dict[str, Any]:
    """Return rays around grids. In some problems they begin, end and turn on borders of voxels."""
    B, D, H, W, N = (draw.size(limit) for limit in (3, 6, 8, 9, 30))
    T, S = draw.pick((1, 1), (1, 3), (3, 3))
    numbers, size = draw.numbers(B, T, D, H, W).abs(), torch.tensor([W, H, D]) + 1.0
    places = [draw.uniform(-0.4, 1.3, B, count, 3) * size for count in (S, N)]
    if draw.chance(0.3):
        places = [(2 * place).round() / 2 for place in places]
    dtype = draw.dtype()
    given = {grid: draw.place(numbers * draw.pick(0.1, 1), dtype, bad=0.5)}
    for name, place in zip(("origins", "points"), places, strict=True):
        given[name] = draw.place(place, draw.dtype(dtype, torch.float32), bad=0.5)
    return given | {"times": draw.index(*draw.pick((0, S), (-1, S + 1)), B, N)}


def _draw_casts(draw: Draw) -> Problem:
    return Problem(_draw_rays(draw, "occupancy"))


def _draw_renders(draw: Draw) -> Problem:
    given = _draw_rays(draw, "density")
    return Problem(given, ("density",), ("origins", "points"), wide=wide_of(given["density"].dtype))


def _same_voxels(problem: Problem, got: Any, expected: Any) -> str:
    occupancy, origins, points, times = problem.arguments.values()
    wide = wide_of(occupancy.dtype)
    wanted = cast_rays_reference(*(one.to(wide) for one in (occupancy, origins, points)), times.long())
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if not torch.equal(bits(one), bits(other.to(one.dtype))):
            return f"result {number}: {one.tolist()}, expected {other.tolist()}"
    return ""


def _rendered(**given: Tensor) -> Tensor:
    return render_rays_reference(*list(given.values())[:3], given["times"].long())[..., 0]


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    """The gradient is a difference of sums, to which a voxel without a length adds nothing."""
    problem.absolute["density"] = 1e-12 * bounds.get("grad_total", 0.0)


def _of_size(grid: str, n: int) -> Problem:
    given = {grid: rand(2, 2, 3, 4, 5), "origins": 4 * rand(2, 2, 3), "points": 6 * rand(2, n, 3) - 1}
    return Problem(given | {"times": torch.arange(2 * n).view(2, n) % 2}, ("density",) * (grid == "density"))


LAUNCHES = dict(origins="B G 3 wide", points="B N 3 wide", times="B N int64")
OPERATORS = (
    Operator(
        "cast_rays",
        cast_rays,
        _draw_casts,
        nothing,
        compare=_same_voxels,
        of_size=(lambda n: _of_size("occupancy", n),),
        launches=sizes.arguments(occupancy="B G H H W", **LAUNCHES),
    ),
    Operator(
        "render_rays",
        lambda **given: render_rays(**given)[0],
        _draw_renders,
        _rendered,
        _bounds,
        of_size=(lambda n: _of_size("density", n),),
        launches=sizes.arguments(density="B G H H W", **LAUNCHES),
    ),
)


def test_a_row_of_voxels(device):
    """The ray begins half a voxel before the grid, and the one against it at the far end of the second voxel."""
    row = torch.tensor([0.0, 0.2, 0.7, 0.9], device=device).view(1, 1, 1, 1, 4)
    origins = torch.tensor([[[-1.5, 0.5, 0.5], [1.75, 0.5, 0.5]]], device=device)
    points = torch.tensor([[[9.0, 0.5, 0.5], [0, 0.5, 0.5], [9, 9, 9]]], device=device)
    times = torch.tensor([[0, 1, 2]], device=device)
    distances, exits, voxels = cast_rays(row, origins, points, times)
    ends = [[5.5, 1.75, -1]]
    assert distances.tolist() == [[4.5, 1.75, -1]] and exits.tolist() == ends
    assert voxels.tolist() == [[[2, 0, 0], [0, 0, 0], [-1, -1, -1]]]
    expected, exits = render_rays(row, origins, points, times)
    left = [1, 1, math.exp(-0.2), math.exp(-0.9), math.exp(-1.8)]
    first = sum((left[i] - left[i + 1]) * (2.5 + i) for i in range(4)) + left[4] * 5.5
    passed = math.exp(-0.15)
    second = (1 - passed) * 0.75 + passed * 1.75
    assert expected.tolist() == [pytest.approx([first, second, -1])] and exits.tolist() == ends


def test_a_ray_to_a_point_before_the_grid_ends_there(device):
    row = torch.ones(1, 1, 1, 1, 4, device=device)
    origin, point = torch.tensor([[[[-9.5, 0.5, 0.5]], [[-6.25, 0.5, 0.5]]]], device=device)[0].split(1)
    given = row, origin, point, torch.zeros(1, 1, dtype=torch.int64, device=device)
    assert render_rays(*given)[0].item() == -1 and cast_rays(*given)[0].item() == 10.5


def test_all_derivatives():
    density, *rays = (value for value in _of_size("density", 4).arguments.values())
    leaf = density.double().requires_grad_()

    def call(density):
        return render_rays(density, *rays)[0]

    assert torch.autograd.gradcheck(call, leaf, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaf, fast_mode=True)


@pytest.mark.parametrize("call, grid", [(cast_rays, "occupancy"), (render_rays, "density")])
def test_messages(call, grid):
    given = list(_of_size(grid, 4).arguments.values())
    with pytest.raises(
        RuntimeError, match=f"{call.__name__}: {grid} must have 1 or 2 grids of an image, got 3"
    ):
        call(given[0][:, :1].expand(2, 3, 3, 4, 5), *given[1:])
    with pytest.raises(ValueError, match=rf"{call.__name__}: times must be \[2, 4\], got \[2, 3\]"):
        call(*given[:3], given[3][:, :3])
