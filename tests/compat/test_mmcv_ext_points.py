"""The entries of mmcv._ext for point clouds: they write into given tensors, as mmcv's wrappers expect."""

import pytest
import torch
from entries import device, leaf  # noqa: F401
from torch.testing import assert_close

from visdet import ops
from visdet.compat import bev_ext, gaussian_ext, gaussian_prob_ext, gaussian_sq_ext, mmcv_ext
from visdet.ops import furthest_point_sample, point_neighbours
from visdet.ops.mmcv import points_in_boxes
from visdet.ops.mmcv.local_aggregate import local_aggregate, local_aggregate_prob

pytestmark = pytest.mark.usefixtures("device")


def test_neighbours():
    points, centers = torch.rand(2, 9, 3), torch.rand(2, 4, 3)
    index = torch.full((2, 4, 3), -7).int()
    mmcv_ext.ball_query_forward(
        centers, points, index, b=2, n=9, m=4, min_radius=0.0, max_radius=0.4, nsample=3
    )
    assert torch.equal(index, point_neighbours.ball_query(0, 0.4, 3, points, centers))
    squared = torch.zeros(2, 4, 3)
    mmcv_ext.knn_forward(points, centers, index, squared, b=2, n=9, m=4, nsample=3)
    assert torch.equal(index, point_neighbours.knn(3, points, centers)[0])
    mmcv_ext.three_nn_forward(centers, points, squared, index, b=2, n=4, m=9)
    assert_close(squared.sqrt(), point_neighbours.three_nn(centers, points)[0])
    mmcv_ext.knn_forward(points[:, :1], centers, index, squared, b=2, n=1, m=4, nsample=3)
    assert (squared[:, :, 1:] == 1e10).all() and (index == 0).all()
    samples = torch.zeros(2, 5).int()
    mmcv_ext.furthest_point_sampling_forward(points, torch.full((2, 9), 1e10), samples, b=2, n=9, m=5)
    assert torch.equal(samples, furthest_point_sample(points, 5))


def test_three_nn_of_points_with_the_number_of_their_image():
    known, unknown = torch.rand(1, 12, 4), torch.rand(1, 7, 4)
    known[..., 0], unknown[..., 0] = (
        torch.arange(12) % 2,
        torch.arange(7) % 3,
    )  # No point is known of the image 2.
    squared, index = torch.empty(1, 7, 3), torch.empty(1, 7, 3, dtype=torch.int32)
    mmcv_ext.three_nn_forward(unknown, known, squared, index, b=1, n=7, m=12)
    for n, point in enumerate(unknown[0]):
        apart = (known[0, :, 1:] - point[1:]).square().sum(1).where(known[0, :, 0] == point[0], torch.inf)
        distances, nearest = (sorted_ones[:3] for sorted_ones in apart.sort(stable=True))
        if point[0] == 2:  # no point is of that image
            distances, nearest = torch.full_like(distances, 1e10), torch.zeros_like(nearest)
        assert index[0, n].tolist() == nearest.tolist()
        assert_close(squared[0, n], distances)


def test_boxes():
    points, boxes = torch.rand(1, 50, 3), torch.rand(1, 4, 7)
    every = points_in_boxes.points_in_boxes_all(points, boxes)
    given = torch.zeros(4, 50).int()
    mmcv_ext.points_in_boxes_cpu_forward(boxes[0], points[0], given)
    assert torch.equal(given, every[0].T)
    first = torch.full((1, 50), -1).int()
    mmcv_ext.points_in_boxes_part_forward(boxes, points, first)
    assert torch.equal(first, points_in_boxes.points_in_boxes_part(points, boxes))


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_roiaware_pooling(mode):
    points, boxes, features = torch.rand(60, 3), torch.ones(3, 7) * 0.7, leaf(60, 2)
    expected = points_in_boxes.roiaware_pool3d(boxes, points, features, 2, 6, mode)
    grad = torch.randn_like(expected)
    pooled, argmax = torch.zeros_like(expected), torch.zeros(expected.shape).int()
    collected, grad_features = torch.zeros(3, 2, 2, 2, 6).int(), torch.zeros_like(features)
    number = ("max", "avg").index(mode)
    mmcv_ext.roiaware_pool3d_forward(boxes, points, features.detach(), argmax, collected, pooled, number)
    mmcv_ext.roiaware_pool3d_backward(collected, argmax, grad, grad_features, pool_method=number)
    assert_close(pooled, expected.detach())
    assert_close(grad_features, torch.autograd.grad(expected, features, grad)[0])


def test_the_first_point_with_the_largest_feature_has_the_gradient():
    features = torch.tensor([[1.0, 5], [3, 5], [3, 2], [9, 9]])
    places = torch.tensor([[0, 1], [0, 1], [0, 1], [-1, 0]]).int()
    reduced, voxels, voxel, count = mmcv_ext.dynamic_point_to_voxel_forward(features, places, "max")
    assert voxels.tolist() == [[0, 1]] and voxel.tolist() == [0, 0, 0, -1] and count.tolist() == [3]
    grad = torch.full_like(features, 7)
    arguments = torch.tensor([[2.0, 4]]), features, reduced, voxel, count, "max"
    mmcv_ext.dynamic_point_to_voxel_backward(grad, *arguments)
    assert grad.tolist() == [[0, 4], [2, 0], [0, 0], [0, 0]]
    mmcv_ext.dynamic_point_to_voxel_backward(grad, *arguments[:-1], "mean")
    assert_close(grad, torch.tensor([[2 / 3, 4 / 3]] * 3 + [[0, 0]]))


def test_hard_voxelize_writes_the_first_rows():
    points = torch.tensor([[0.5, 0.5, 0.5, 7], [9, 9, 9, 8], [0.6, 0.6, 0.6, 9]])
    voxels, places, counts = torch.zeros(4, 2, 4), torch.zeros(4, 3).int(), torch.zeros(4).int()
    number = torch.zeros((), dtype=torch.int64, device="cpu")
    size, corners = torch.ones(3), torch.tensor([0.0, 0, 0, 2, 2, 2])
    outs = voxels, places, counts
    mmcv_ext.hard_voxelize_forward(
        points, size, corners, *outs, number, max_points=2, max_voxels=4, NDim=3, deterministic=False
    )
    assert number == 1 and counts.tolist() == [2, 0, 0, 0] and voxels[0, :, 3].tolist() == [7, 9]
    assert bev_ext.hard_voxelize(points, *outs, (1, 1, 1), (0, 0, 0, 2, 2, 2), 2, 4) == 1
    with pytest.raises(ValueError, match=r"voxels must be \[1, 3, 4\], got \[1, 2, 4\]"):
        mmcv_ext.hard_voxelize_forward(points, size, corners, *outs, number, 3, 4)


def test_pairs_with_a_table_of_the_grid():
    indices = torch.tensor([[0, 1, 1], [0, 1, 2]]).int()
    settings = (1, [4, 4], [4, 4], [3, 3], [1, 1], [1, 1], [1, 1], [0, 0], 1, 0)
    plain = mmcv_ext.get_indice_pairs_2d_forward(indices, *settings)
    with_grid = mmcv_ext.get_indice_pairs_2d_backward(indices, torch.zeros(16), *settings)
    assert all(map(torch.equal, plain, with_grid)) and plain[2].sum() == 4


def test_synchronised_batch_normalisation_is_batch_norm():
    x = torch.randn(3, 4, 5).requires_grad_()
    weight, bias = (torch.rand(4).requires_grad_() for _ in range(2))
    moving = torch.rand(4), torch.rand(4)
    expected_moving = [tensor.clone() for tensor in moving]
    expected = torch.nn.functional.batch_norm(x, *expected_moving, weight, bias, True, 0.1, 1e-5)
    mean, var, std, norm, out = (torch.zeros(n) for n in ((4,), (4,), (4,), (3, 4, 5), (3, 4, 5)))
    with torch.no_grad():
        mmcv_ext.sync_bn_forward_mean(x, mean)
        mmcv_ext.sync_bn_forward_var(x, mean, var)
        rest = dict(eps=1e-5, momentum=0.1, group_size=1)
        mmcv_ext.sync_bn_forward_output(x, mean, var, weight, bias, *moving, norm, std, out, **rest)
        assert_close(out, expected)
        assert_close(list(moving), expected_moving)
        grad = torch.randn_like(out)
        grads = torch.zeros(4), torch.zeros(4), torch.zeros_like(out)
        mmcv_ext.sync_bn_backward_param(grad, norm, *grads[:2])
        mmcv_ext.sync_bn_backward_data(grad, weight, *grads[:2], norm, std, grads[2])
    assert_close(grads, torch.autograd.grad(expected, (weight, bias, x), grad), atol=1e-5, rtol=1e-4)


def test_birds_eye_views():
    sizes = torch.tensor(
        [4.0, 5, 3, 2]
    )  # height, width, depth and images, in a tensor as OccFormer's programs give them
    x, places = torch.rand(20, 6, requires_grad=True), (torch.rand(20, 4) * sizes).int()
    H, W, D, B = sizes
    pooled = bev_ext.bev_pool_forward(x.detach(), places, None, None, B, D, H, W)
    expected = ops.bev_pool(x, places, 2, 3, 4, 5)
    assert torch.equal(pooled, expected) and pooled.shape == (2, 3, 4, 5, 6)
    weights = torch.rand_like(pooled)
    grad = bev_ext.bev_pool_backward(weights, places, None, None, B, D, H, W)
    assert torch.equal(grad, torch.autograd.grad(expected, x, weights)[0])
    ranks = torch.randint(0, 48, (9,)), torch.randint(0, 24, (9,)), torch.randint(0, 4, (9,))
    depth, features, out = torch.rand(1, 2, 2, 3, 4), torch.rand(1, 2, 3, 4, 5), torch.zeros(1, 1, 2, 2, 5)
    bev_ext.bev_pool_v2_forward(depth, features, out, *ranks, None, None)
    grads = torch.zeros_like(depth), torch.zeros_like(features)
    bev_ext.bev_pool_v2_backward(torch.ones_like(out), *grads, depth, features, *ranks, None, None)
    # The sum of the result is bilinear in both inputs.
    assert_close((grads[0] * depth).sum(), out.sum())
    assert_close((grads[1] * features).sum(), out.sum())


def test_voxel_pooling_notes_the_places_of_the_points():
    places = torch.tensor([[[0, 1, 0], [2, 0, 0], [0, 5, 0]], [[1, 1, 0], [-1, 0, 0], [1, 1, 0]]]).int()
    features, out = torch.rand(2, 3, 4), torch.zeros(2, 2, 3, 4)
    memo = torch.full((2, 3, 3), -1).int()
    bev_ext.voxel_pooling_train_forward_wrapper(2, 3, 4, 3, 2, 1, places, features, out, memo)
    assert memo.tolist() == [[[0, 1, 0], [0, 0, 2], [-1] * 3], [[1, 1, 1], [-1] * 3, [1, 1, 1]]]
    assert torch.equal(out[0, 1, 0], features[0, 0])
    assert_close(out[1, 1, 1], features[1, 0] + features[1, 2])
    cameras = torch.randint(-1, 3, (1, 2, 3, 2, 2, 3)).int()
    depth, context, out = torch.rand(2, 3, 2, 2), torch.rand(2, 4, 2, 2), torch.zeros(1, 2, 3, 4)
    bev_ext.voxel_pooling_inference_forward_wrapper(1, 2, 3, 2, 2, 4, 3, 2, 2, cameras, depth, context, out)
    products = (depth[..., None] * context.permute(0, 2, 3, 1)[:, None]).reshape(1, 24, 4)
    expected = torch.zeros_like(out)
    rest = expected, torch.zeros(1, 24, 3).int()
    bev_ext.voxel_pooling_forward_wrapper(1, 24, 4, 3, 2, 2, cameras.view(1, 24, 3), products, *rest)
    assert_close(out, expected)


def radii_and_centers():
    """Return the radius of each Gaussian in voxels, 1, and its voxel, the first."""
    return torch.ones(4).int(), torch.zeros(4, 3).int()


@pytest.mark.parametrize(
    "operator, ext", [(local_aggregate, gaussian_ext), (local_aggregate_prob, gaussian_prob_ext)]
)
def test_local_aggregate(operator, ext):
    points, voxels = torch.rand(9, 3, dtype=torch.float64), torch.zeros(9, 3).int()
    precision = torch.cat([1 + torch.rand(4, 3), torch.rand(4, 3) / 4], 1).double().requires_grad_()
    inputs = [leaf(4, 3), torch.rand(4, dtype=torch.float64).requires_grad_(), leaf(4, 2), precision]
    means, opacities, semantics, entries = inputs
    radii, centers = radii_and_centers()
    arguments = points, voxels, means, centers, opacities, semantics, radii, entries, 2, 2, 2
    expected = operator(*arguments)
    expected = expected if isinstance(expected, tuple) else (expected,)
    with torch.no_grad():
        count, *found = ext.local_aggregate(*arguments)
    results, kept, probability = found[: len(expected)], found[-3:], found[len(expected) : -3]
    assert_close(results, expected, rtol=0, atol=0)
    grads = [torch.randn_like(one) for one in expected]
    results = results if probability else []
    kept += 2, 2, 2, count, means, points, voxels, entries, opacities, semantics
    given = ext.local_aggregate_backward(*kept, *results, *probability, *grads)
    assert_close(list(given), list(torch.autograd.grad(expected, inputs, grads)))


def test_local_aggregate_of_superquadrics():
    form = [torch.rand(4, 3).double() + 0.5, leaf(4, 9)]  # scales and rotations
    means, opacities, u, v, semantics = (
        leaf(4, 3),
        leaf(4, 1),
        *(torch.rand(2, 4, 1) + 0.5).double(),
        leaf(4, 2),
    )
    inputs = [one.detach().requires_grad_() for one in (means, opacities, u, v, semantics, *form[::-1])]
    means, opacities, u, v, semantics, rotations, scales = inputs
    points, voxels = torch.rand(9, 3).double(), torch.zeros(9, 3).int()
    radii, centers = radii_and_centers()
    arguments = points, voxels, means, centers, opacities, u, v, semantics, scales, rotations, radii, 2, 2, 2
    expected = ops.local_aggregate_prob_sq(*arguments)
    grads = [torch.randn_like(one) for one in expected]
    count, *found = gaussian_sq_ext.local_aggregate(*arguments)
    assert_close(found[:3], expected, rtol=0, atol=0)
    kept = *found[4:], 2, 2, 2, count, means, points, voxels, scales, rotations, opacities, u, v, semantics
    given = gaussian_sq_ext.local_aggregate_backward(*kept, *found[:4], *grads)
    assert_close(given, torch.autograd.grad(expected, inputs, grads))
