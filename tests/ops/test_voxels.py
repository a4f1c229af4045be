"""Voxels and sums over cells, against loops."""

import pytest
import torch

from visdet.ops.mmcv.local_aggregate import local_aggregate, local_aggregate_prob
from visdet.ops.mmcv.voxels import (
    bev_pool,
    bev_pool_v2,
    dynamic_scatter,
    dynamic_voxelize,
    hard_voxelize,
    voxel_pooling,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SIZE, RANGE = (0.5, 0.5, 1.0), (0, -1, -2, 2, 1, 2)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def scene(count=200, seed=0):
    points = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) * 5 - 2.5
    points[0, 0], points[1, 2] = torch.nan, torch.inf
    points[2, :3] = torch.tensor(RANGE[3:])  # the upper corner is outside
    points[3, :3] = torch.tensor(RANGE[:3])  # the lower one inside
    return points


def voxel_of(point):
    place = [(float(p) - low) / size for p, low, size in zip(point, RANGE, SIZE, strict=False)]
    grid = [round((RANGE[3 + i] - RANGE[i]) / SIZE[i]) for i in range(3)]
    if not all(0 <= p < n for p, n in zip(place, grid, strict=True)):
        return [-1, -1, -1]
    return [int(p) for p in reversed(place)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dynamic_voxelize_is_the_loop(dtype, device):
    points = scene().to(dtype)
    voxels = dynamic_voxelize(points.to(device), SIZE, torch.tensor(RANGE, dtype=torch.float32))
    assert voxels.dtype == torch.int32
    assert voxels.tolist() == [voxel_of(point) for point in points]


@pytest.mark.parametrize("max_points, max_voxels", [(35, 100), (2, 100), (3, 7), (1, 0), (4, -1)])
def test_hard_voxelize_is_the_loop(max_points, max_voxels, device):
    points = scene()
    order, members = [], {}
    for point in points:
        voxel = tuple(voxel_of(point))
        if voxel[0] < 0 or (voxel not in members and 0 <= max_voxels <= len(order)):
            continue
        if voxel not in members:
            order.append(voxel)
            members[voxel] = []
        if len(members[voxel]) < max_points:
            members[voxel].append(point)
    voxels, places, counts = hard_voxelize(points.to(device), SIZE, RANGE, max_points, max_voxels)
    assert places.tolist() == [list(voxel) for voxel in order]
    assert counts.tolist() == [len(members[voxel]) for voxel in order]
    for voxel, rows in zip(voxels.cpu(), (members[voxel] for voxel in order), strict=True):
        assert torch.equal(voxel[: len(rows)], torch.stack(rows)) and (voxel[len(rows) :] == 0).all()


def test_a_grid_of_more_than_2_to_the_31_voxels(device):
    points = torch.tensor([[1.0, 1, 1], [9999, 9999, 999], [1, 1, 1.0]], device=device)
    voxels, places, counts = hard_voxelize(points, (1, 1, 1), (0, 0, 0, 10000, 10000, 1000))
    assert places.tolist() == [[1, 1, 1], [999, 9999, 9999]] and counts.tolist() == [2, 1]
    coordinates = torch.tensor([[2**31 - 1] * 4, [0] * 4, [2**31 - 1] * 4], dtype=torch.int32, device=device)
    features, voxels = dynamic_scatter(points, coordinates, "sum")
    assert voxels.tolist() == [[0] * 4, [2**31 - 1] * 4]
    assert features.tolist() == [[9999, 9999, 999], [2, 2, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reduce_type", ["max", "sum", "mean"])
def test_dynamic_scatter_is_the_loop(reduce_type, dtype, device):
    generator = torch.Generator().manual_seed(1)
    features = torch.randint(-8, 8, (60, 3), generator=generator).to(dtype)
    places = torch.randint(-1, 3, (60, 3), generator=generator, dtype=torch.int32)
    members = {}
    for feature, place in zip(features, places.tolist(), strict=True):
        if min(place) >= 0:
            members.setdefault(tuple(place), []).append(feature.double())
    reduced, voxels = dynamic_scatter(features.to(device), places.to(device), reduce_type)
    assert [tuple(voxel) for voxel in voxels.tolist()] == sorted(members)
    reduce = {"max": torch.amax, "sum": torch.sum, "mean": torch.mean}[reduce_type]
    expected = torch.stack([reduce(torch.stack(members[voxel]), 0) for voxel in sorted(members)])
    torch.testing.assert_close(reduced.cpu(), expected.to(dtype))


def test_sums_of_cells_are_the_loop(device):
    features = torch.rand(50, 4)
    places = torch.randint(-1, 4, (50, 4), dtype=torch.int32)
    expected = torch.zeros(3, 2, 3, 3, 4)
    for feature, (x, y, z, image) in zip(features, places.tolist(), strict=True):
        if 0 <= x < 3 and 0 <= y < 3 and 0 <= z < 2 and 0 <= image < 3:
            expected[image, z, x, y] += feature
    result = bev_pool(features.to(device), places.to(device), 3, 2, 3, 3)
    torch.testing.assert_close(result.cpu(), expected)
    pillars = voxel_pooling(places[None, :, :3].to(device), features[None].to(device), (3, 2, 2))
    expected = torch.zeros(1, 2, 3, 4)
    for feature, (x, y, z, _) in zip(features, places.tolist(), strict=True):
        if 0 <= x < 3 and 0 <= y < 2 and 0 <= z < 2:
            expected[0, y, x] += feature
    torch.testing.assert_close(pillars.cpu(), expected)


def test_bev_pool_v2_is_the_loop(device):
    depth, features = torch.rand(1, 2, 3, 4, 5), torch.rand(1, 2, 4, 5, 6)
    ranks = torch.randint(0, depth.numel(), (70,)), torch.randint(0, 40, (70,)), torch.randint(0, 9, (70,))
    expected = torch.zeros(9, 6)
    for d, f, b in zip(*(rank.tolist() for rank in ranks), strict=True):
        expected[b] += depth.flatten()[d] * features.view(-1, 6)[f]
    pooled = bev_pool_v2(depth.to(device), features.to(device), *(rank.int().to(device) for rank in ranks), 9)
    torch.testing.assert_close(pooled.cpu(), expected)


def gaussians(G=6, N=40):
    generator = torch.Generator().manual_seed(3)
    points = torch.rand(N, 3, generator=generator, dtype=torch.float64) * 4
    means = torch.rand(G, 3, generator=generator, dtype=torch.float64) * 4
    factors = torch.rand(G, 3, 3, generator=generator, dtype=torch.float64)
    inverse = factors @ factors.transpose(1, 2) + torch.eye(3)
    radii = torch.randint(1, 3, (G,), generator=generator, dtype=torch.int32)
    opacities = torch.rand(G, generator=generator, dtype=torch.float64)
    semantics = torch.rand(G, 5, generator=generator, dtype=torch.float64)
    entries = inverse.flatten(1)[:, [0, 4, 8, 1, 5, 2]]
    return points, points.int(), means, means.int(), opacities, semantics, radii, entries, inverse


def test_local_aggregate_is_the_loop(device):
    *arguments, inverse = gaussians()
    points, voxels, means, centers, opacities, semantics, radii, _ = arguments
    expected = torch.zeros(len(points), 5, dtype=torch.float64)
    for n in range(len(points)):
        for g in range(len(means)):
            if (voxels[n] - centers[g]).abs().max() <= radii[g]:
                d = means[g] - points[n]
                expected[n] += opacities[g] * torch.exp(-0.5 * d @ inverse[g] @ d) * semantics[g]
    result = local_aggregate(*(tensor.to(device) for tensor in arguments), 4, 4, 4)
    torch.testing.assert_close(result.cpu(), expected)


def test_gradients():
    def wide(*shape):
        return torch.rand(shape, dtype=torch.float64, requires_grad=True)

    check = torch.autograd.gradcheck
    places = torch.randint(-1, 3, (12, 4))
    for reduce_type in ("max", "sum", "mean"):
        assert check(lambda f, how=reduce_type: dynamic_scatter(f, places[:, :2], how)[0], wide(12, 2))
    assert check(lambda f: bev_pool(f, places, 3, 3, 3, 3), wide(12, 2))
    assert check(lambda f: voxel_pooling(places[None, :, :3], f, (3, 3, 3)), wide(1, 12, 2))
    ranks = torch.randint(0, 24, (9,)), torch.randint(0, 12, (9,)), torch.randint(0, 5, (9,))
    assert check(lambda d, f: bev_pool_v2(d, f, *ranks, 5), (wide(1, 1, 2, 3, 4), wide(1, 1, 3, 4, 2)))
    points, voxels, means, centers, opacities, semantics, radii, entries, _ = gaussians(3, 9)
    inputs = [tensor.requires_grad_() for tensor in (means, opacities, semantics, entries)]
    assert check(
        lambda m, o, s, e: local_aggregate(points, voxels, m, centers, o, s, radii, e, 4, 4, 4), inputs
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: dynamic_voxelize(x[:, :2], SIZE, RANGE), r"points must be \[N, 3 or more\], got \[5, 2\]"),
        (lambda x: dynamic_voxelize(x, (1, 1), RANGE), r"voxel_size must be \[3\], got \[2\]"),
        (lambda x: hard_voxelize(x, SIZE, (0, 1)), r"coors_range must be \[6\], got \[2\]"),
        (lambda x: hard_voxelize(x, SIZE, RANGE, 0), "max_points must be at least 1, got 0"),
        (lambda x: dynamic_scatter(x, x[:3].int()), r"dynamic_scatter: coors must be \[5, D\], got \[3, 3\]"),
        (lambda x: dynamic_scatter(x, x.int(), "min"), "must be one of 'max', 'sum', 'mean', got 'min'"),
        (lambda x: bev_pool(x, x.int(), 1, 1, 1, 1), r"bev_pool: coords must be \[5, 4\], got \[5, 3\]"),
        (lambda x: voxel_pooling(x, x[None], (1, 1, 1)), r"geom_xyz must be \[1, 5, 3\], got \[5, 3\]"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(5, 3))


def test_a_largest_feature_of_0_has_its_whole_gradient(device):
    features = torch.tensor([[0.0], [-1.0], [0.0], [0.0]], device=device, requires_grad=True)
    voxels = torch.tensor([[0], [0], [1], [1]], dtype=torch.int32, device=device)
    dynamic_scatter(features, voxels, "max")[0].sum().backward()
    assert features.grad.flatten().tolist() == [1.0, 0.0, 0.5, 0.5]


def test_local_aggregate_prob_of_two_gaussians_by_hand(device):
    # The first point is at the mean of a Gaussian and out of the other's reach. The second one sees none.
    points = torch.tensor([[0.5, 0.5, 0.5], [3.5, 0.5, 0.5]], device=device)
    means = torch.tensor([[0.5, 0.5, 0.5], [0.5, 1.5, 0.5]], device=device, requires_grad=True)
    semantics = torch.tensor([[1.0, 2, 3], [4, 5, 6]], device=device)
    precision = torch.tensor([[1.0, 1, 1, 0, 0, 0]] * 2, device=device)
    given = points, points.int(), means, means.int(), torch.ones(2, device=device), semantics
    sizes = torch.tensor([1, 0], device=device), precision, 4, 4, 4
    expected, occupied, density = local_aggregate_prob(*given, *sizes)
    assert expected.tolist() == [[1, 2, 3], [0.5, 0.5, 0.5]]
    assert occupied.tolist() == [1, 0] and density.tolist() == [1, 0]
    torch.autograd.backward([expected.sum() + occupied.sum() + density.sum()])
    assert means.grad.isfinite().all()
