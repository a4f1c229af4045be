"""The extensions of mmdet3d, OpenPCDet, detectron2 and others against visdet's operators and plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from entries import check_entries, device, leaf  # noqa: F401
from torch.testing import assert_close

from visdet import ops
from visdet.compat import detectron2_ext, points_ext

pytestmark = pytest.mark.usefixtures("device")

FUNCTIONS = points_ext.FUNCTIONS
B, N, M, C, K = 2, 9, 4, 3, 3


def test_neighbours_of_batches():
    points, centers = torch.rand(B, N, 3), torch.rand(B, M, 3)
    expected = ops.ball_query(0, 0.5, K, points, centers)
    for name, radius in (("ball_query_ext", (0.0, 0.5)), ("pointnet2_batch_cuda", (0.5,))):
        index = torch.zeros(B, M, K).int()
        FUNCTIONS[name]["ball_query_wrapper"](B, N, M, *radius, K, centers, points, index)
        assert torch.equal(index, expected)
    assert torch.equal(FUNCTIONS["pointnet2_ops._ext"]["ball_query"](centers, points, 0.5, K), expected)
    distances, wanted = ops.three_nn(centers, points)
    found, index = torch.zeros(B, M, 3), torch.zeros(B, M, 3).int()
    FUNCTIONS["interpolate_ext"]["three_nn_wrapper"](B, M, N, centers, points, found, index)
    assert_close(found.sqrt(), distances)
    assert torch.equal(index, wanted)
    FUNCTIONS["knn_ext"]["knn_wrapper"](B, N, M, 3, points, centers, index.zero_(), found.zero_())
    assert torch.equal(index, wanted)
    assert torch.equal(FUNCTIONS["pointnet2_ops._ext"]["three_nn"](centers, points)[1], wanted)


def test_stacked_clouds():
    ext, counts, groups = (
        FUNCTIONS["pointnet2_stack_cuda"],
        torch.tensor([4, 5]).int(),
        torch.tensor([1, 3]).int(),
    )
    points, centers = torch.rand(N, 3), torch.rand(M, 3)
    clouds = list(zip(points.split([4, 5]), centers.split([1, 3]), strict=True))
    index = torch.zeros(M, K).int()
    ext["ball_query_wrapper"](2, M, 0.4, K, centers, groups, points, counts, index)
    assert torch.equal(index, ops.stack_ball_query(0.4, K, points, counts, centers, groups))
    found, index = torch.zeros(M, 3), torch.zeros(M, 3).int()
    ext["three_nn_wrapper"](centers, groups, points, counts, found, index)
    nearest = [ops.three_nn(center[None], one[None])[1][0] for one, center in clouds]
    assert torch.equal(index, torch.cat([nearest[0], nearest[1] + 4]))
    sampled, numbers = torch.zeros(5).int(), torch.tensor([2, 3]).int()
    ext["stack_farthest_point_sampling_wrapper"](points, torch.zeros(N), counts, sampled, numbers)
    first, second = (ops.furthest_point_sample(one[None], n)[0] for n, (one, _) in enumerate(clouds, 2))
    assert torch.equal(sampled, torch.cat([first, second + 4]))
    features, weight, out = torch.rand(N, C), torch.rand(M, 3), torch.zeros(M, C)
    ext["three_interpolate_wrapper"](features, index, weight, out)
    assert_close(out, torch.einsum("mkc,mk->mc", features[index.long()], weight))
    grad = torch.zeros(N, C)
    ext["three_interpolate_grad_wrapper"](torch.ones(M, C), index, weight, grad)
    expected = torch.zeros(N).index_add(0, index.long().flatten(), weight.flatten())
    assert_close(grad, expected[:, None].expand(N, C))


GATHERED = {  # for each function and its gradient, their extensions: the operator, the shape of indices, leading sizes
    "group_points": (("pointnet2_batch_cuda",), (M, K), (B, C, N, M, K)),
    "gather_points": (("gather_points_ext", "pointnet2_batch_cuda"), (M,), (B, C, N, M)),
    "three_interpolate": (("interpolate_ext", "pointnet2_batch_cuda"), (M, K), (B, C, N, M)),
}


@pytest.mark.parametrize("name", GATHERED)
def test_chosen_features_and_their_gradients(name):
    extensions, shape, sizes = GATHERED[name]
    index, features = torch.randint(0, N, (B, *shape)).int(), torch.rand(B, C, N).requires_grad_()
    weights = [torch.rand(B, M, K)] if name == "three_interpolate" else []
    expected = torch.stack([one[:, i.long()] for one, i in zip(features, index, strict=True)])
    expected = torch.einsum("bcmk,bmk->bcm", expected, weights[0]) if weights else expected
    grad = torch.rand_like(expected)
    (wanted,) = torch.autograd.grad(expected, features, grad)
    for extension in extensions:
        out, found = torch.zeros_like(expected), torch.zeros(B, C, N)
        ext = FUNCTIONS[extension]
        ext[f"{name}_wrapper"](*sizes, features.detach(), index, *weights, out)
        ext[f"{name}_grad_wrapper"](*sizes, grad, index, *weights, found)
        assert_close([out, found], [expected.detach(), wanted])
    ext = FUNCTIONS["pointnet2_ops._ext"]
    assert_close(ext[name](features.detach(), index, *weights), expected.detach())
    assert_close(ext[f"{name}_grad"](grad, index, *weights, N), wanted)


BOXES = [((0.0, 0.0), (4.0, 1.0), 0.5), ((0.5, 0.5), (3.0, 1.5), 1.2), ((-1.0, 0.3), (2.0, 2.0), -0.4)]
PCDET = [[*center, 0.0, *sides, 1.0, angle] for center, sides, angle in BOXES]
MMDET3D = [[x - w / 2, y - h / 2, x + w / 2, y + h / 2, -angle] for (x, y), (w, h), angle in BOXES]


@pytest.mark.parametrize("name, given", [("iou3d_nms_cuda", PCDET), ("iou3d_cuda", MMDET3D)])
def test_boxes_seen_from_above(name, given):
    ext, boxes, own = FUNCTIONS[name], torch.tensor(given), torch.tensor(PCDET)
    area, iou = ops.boxes_overlap_bev(own, own), ops.boxes_iou3d(own, own)
    for function, expected in (("boxes_overlap_bev_gpu", area), ("boxes_iou_bev_gpu", iou)):
        out = torch.zeros(3, 3)
        ext[function](boxes, boxes, out)
        assert_close(out, expected)
    more = torch.cat([boxes, boxes[:1]])
    keep = torch.full((4,), -1, device="cpu")
    assert ext["nms_gpu"](more, keep, 0.9, *([0] if name == "iou3d_cuda" else [])) == 3
    assert keep.tolist() == [0, 1, 2, -1]
    if name == "iou3d_nms_cuda":
        paired = torch.zeros(3, 1)
        ext["boxes_aligned_overlap_bev_gpu"](boxes, boxes.roll(1, 0), paired)
        assert_close(paired[:, 0], area[range(3), [2, 0, 1]])


@pytest.mark.parametrize("name", ["roiaware_pool3d_cuda", "roiaware_pool3d_ext"])
def test_points_in_boxes(name):
    ext, points, features = FUNCTIONS[name], torch.rand(200, 3) * 6 - 3, torch.rand(200, C)
    boxes = torch.tensor(PCDET)
    from_bottom = boxes - torch.tensor([0, 0, 0.5, 0, 0, 0, 0])
    member = ops.points_in_boxes_all(points[None], from_bottom[None])[0].T.bool()
    if name == "roiaware_pool3d_ext":  # (x, y, z of the bottom, w, l, h, angle)
        boxes = torch.tensor([[*c, -0.5, s[1], s[0], 1.0, -a - math.pi / 2] for c, s, a in BOXES])
    every, first = torch.zeros(3, 200).int(), torch.full((1, 200), -1).int()
    ext["points_in_boxes_cpu"](boxes, points, every)
    ext["points_in_boxes_gpu"](boxes[None], points[None], first)
    assert torch.equal(every.bool(), member) and member.any(1).all()
    assert torch.equal(first[0] >= 0, member.any(0))
    sizes = 3, 1, 1, 1
    argmax, collected, pooled = (
        torch.zeros(*sizes, C).int(),
        torch.zeros(*sizes, 201).int(),
        torch.zeros(*sizes, C),
    )
    for mode, expected in ((0, "max"), (1, "mean")):
        ext["forward"](boxes, points, features, argmax, collected, pooled, mode)
        wanted = [features[one] for one in member]
        wanted = [one.amax(0) if expected == "max" else one.mean(0) for one in wanted]
        assert_close(pooled.view(3, C), torch.stack(wanted))


def test_sparse_convolution_and_scores():
    ext, indices = FUNCTIONS["sparse_conv_ext"], torch.tensor([[0, 1, 1], [0, 1, 2]]).int()
    pairs = ext["get_indice_pairs_2d"](
        indices, 1, [4, 4], [4, 4], [3, 3], [1, 1], [1, 1], [1, 1], [0, 0], 1, 0
    )
    features, filters = torch.rand(2, C), torch.rand(3, 3, C, 2)
    dense = torch.zeros(1, C, 4, 4)
    dense[0, :, indices[:, 1].long(), indices[:, 2].long()] = features.T
    expected = F.conv2d(dense, filters.permute(3, 2, 0, 1), padding=1)[0, :, [1, 1], [1, 2]].T
    found = ext["indice_conv_fp32"](features, filters, pairs[1], pairs[2], 2, 0, 1)
    assert_close(found, expected)


@pytest.mark.parametrize("levels", [4, 5])
def test_samples_of_views(levels):
    V, Q, P = 3, 5, 4
    maps = [torch.rand(B, V, 7 - i, 9 - i, C, dtype=torch.float64).requires_grad_() for i in range(levels)]
    at = torch.rand(B, Q, P, 3, dtype=torch.float64) * 1.4 - 0.2
    at[..., 2] = torch.randint(0, V, (B, Q, P)) / (V - 1)
    at.requires_grad_()
    weights = torch.rand(B, Q, P, levels, dtype=torch.float64).requires_grad_()
    grid = (at * 2 - 1)[:, :, :, None]
    sampled = [F.grid_sample(one.movedim(4, 1), grid, align_corners=True)[..., 0] for one in maps]
    expected = torch.einsum("lbcqp,bqpl->bqcp", torch.stack(sampled), weights)
    grad = torch.rand_like(expected)
    wanted = torch.autograd.grad(expected, [*maps, at, weights], grad)
    ext, name = FUNCTIONS["_msmv_sampling_cuda"], f"_ms_deform_attn_cuda_c{'23456'[:levels]}"
    given = [one.detach() for one in (*maps, at, weights)]
    assert_close(ext[f"{name}_forward"](*given), expected.detach())
    found = list(ext[f"{name}_backward"](grad, *given))
    found[-2][..., 2] = wanted[-2][..., 2]  # The view is rounded and has no gradient.
    assert_close(found, list(wanted))


def test_chamfer_distance_of_three_dimensions():
    one, other = (torch.rand(B, n, 3).requires_grad_() for n in (5, 7))
    apart = torch.cdist(one, other).square()
    expected = apart.amin(2), apart.amin(1)
    ext = FUNCTIONS["chamfer"]
    *found, index1, index2 = ext["forward"](one.detach(), other.detach())
    assert_close(found, [tensor.detach() for tensor in expected])
    grads = torch.rand(B, 5), torch.rand(B, 7)
    wanted = torch.autograd.grad(expected, [one, other], grads)
    assert_close(
        ext["backward"](one.detach(), other.detach(), index1, index2, *grads), wanted, rtol=1e-4, atol=1e-5
    )


def test_rotated_boxes_of_detectron2():
    degrees = torch.tensor([[*center, *sides, -math.degrees(angle)] for center, sides, angle in BOXES])
    detectron2 = torch.ops.detectron2
    iou = detectron2.box_iou_rotated(degrees, degrees)
    boxes = torch.tensor(PCDET)
    assert_close(iou, ops.boxes_iou3d(boxes, boxes))
    more, scores = torch.cat([degrees, degrees[:1]]), torch.tensor([0.3, 0.9, 0.5, 0.4])
    assert detectron2.nms_rotated(more, scores, 0.9).tolist() == [1, 2, 3]
    # Samples of a ramp are the x of their bins' centers.
    ramp = torch.arange(20.0).expand(1, 1, 20, 20) + 0.5
    rois = torch.tensor([[0, 10.0, 9.0, 6.0, 4.0, 30.0]])
    pooled = detectron2.roi_align_rotated_forward(ramp, rois, 1.0, 2, 3, 2)
    x, y = torch.tensor([-2.0, 0, 2]), torch.tensor([-1.0, 1])[:, None]
    turn = math.radians(30)
    assert_close(pooled[0, 0], 10 + x * math.cos(turn) + y * math.sin(turn))
    grad = detectron2.roi_align_rotated_backward(pooled, rois, 1.0, 2, 3, 1, 1, 20, 20, 2)
    assert_close((grad * ramp).sum(), pooled.square().sum())


def test_deformable_convolution_of_detectron2():
    deform_conv2d = pytest.importorskip("torchvision.ops").deform_conv2d
    ext, empty, plain, modulated = (
        detectron2_ext,
        torch.zeros(0),
        (2, 3, 1, 2, 0, 1, 1, 1, 1, 1),
        (3, 2, 1, 1, 0, 0, 1, 1, 1, 1, True),
    )
    check_entries(
        lambda x, o, w: deform_conv2d(x, o, w, None, (2, 1), (1, 0), (1, 1)),
        [leaf(1, 4, 7, 6), leaf(1, 12, 4, 5), leaf(2, 4, 3, 2)],
        lambda x, o, w, out: ext.deform_conv_forward(x, w, o, out, empty, empty, *plain, 64),
        lambda grad, x, o, w, gx, go, gw: (
            ext.deform_conv_backward_input(x, o, grad, gx, go, w, empty, *plain, 64),
            ext.deform_conv_backward_filter(x, o, grad, gw, empty, empty, *plain, 1, 64),
        ),
    )
    check_entries(
        lambda x, w, b, o, m: deform_conv2d(x, o, w, b, 1, 0, 1, m),
        [leaf(1, 4, 7, 6), leaf(2, 4, 3, 2), leaf(2), leaf(1, 12, 5, 5), leaf(1, 6, 5, 5)],
        lambda x, w, b, o, m, out: ext.modulated_deform_conv_forward(
            x, w, b, empty, o, m, out, empty, *modulated
        ),
        lambda grad, x, w, b, o, m, *outs: ext.modulated_deform_conv_backward(
            x, w, b, empty, o, m, empty, *outs, grad, *modulated
        ),
    )


def test_one_sample_of_each_kind():
    points, index = torch.rand(B, N, 3), torch.zeros(B, M).int()
    for name in ("furthest_point_sample_ext", "pointnet2_batch_cuda", "pointnet2_stack_cuda"):
        verb = "furthest" if name == "furthest_point_sample_ext" else "farthest"
        FUNCTIONS[name][f"{verb}_point_sampling_wrapper"](B, N, M, points, torch.zeros(B, N), index.zero_())
        assert torch.equal(index, ops.furthest_point_sample(points, M))
