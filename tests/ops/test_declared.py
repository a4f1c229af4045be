"""Bad indices, masks and sizes are refused by name, autocast moves nothing, and results do not depend on the origin."""

import itertools
import re
import time
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.fuzz.mistakes import mistakes
from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw
from visdet import ops
from visdet.ops import fused
from visdet.ops.mmcv import aligned_pooling, filtered_activations, label_growth


def ones(*shape):
    return torch.ones(shape)


def whole(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def bev(**given):
    rank = torch.zeros(1, dtype=torch.int64)
    ranks = dict(ranks_depth=rank, ranks_feat=rank, ranks_bev=rank, cells=1)
    return ops.bev_pool_v2(ones(1, 1, 6, 1, 1), ones(1, 1, 1, 1, 1), **(ranks | given))


def pairs(indices=((0, 1, 1),), **given):
    sizes = dict(out_shape=(3, 3), spatial_shape=(3, 3), ksize=(3, 3), stride=(1, 1))
    settings = sizes | dict(padding=(1, 1), dilation=(1, 1)) | given
    return ops.get_indice_pairs(torch.as_tensor(indices), 1, **settings)


def sparse(pairs=((0,), (0,)), counts=1, pool=False):
    tables = torch.as_tensor(pairs)[None], torch.as_tensor(counts).view(1)
    weight = () if pool else (ones(1, 1, 1),)
    return (ops.indice_maxpool if pool else ops.indice_conv)(ones(1, 1), *weight, *tables, 1)


def voxels(size=(1.0, 1.0, 1.0), **given):
    return ops.dynamic_voxelize(ones(5, 3), size, (0, 0, 0, 4, 4, 4), **given)


def groups(index, mask=torch.bool):
    labels = torch.tensor([[0, 1, 0], [0, 0, 0]]).to(index)
    return label_growth.pixel_group(
        ones(2, 3), ones(2, 3).to(mask), torch.zeros(2, 3, 2), labels, labels > 0, 2, 1.0
    )


BAD = {
    "negative rank": ("bev_pool_v2: ranks_depth", lambda: bev(ranks_depth=whole(-1))),
    "rank of no pixel": ("bev_pool_v2: ranks_feat", lambda: bev(ranks_feat=whole(1))),
    "rank of no cell": ("bev_pool_v2: ranks_bev", lambda: bev(ranks_bev=whole(1))),
    "place": ("get_indice_pairs: indices", lambda: pairs([[0, -1, 1]])),
    "image": ("get_indice_pairs: indices", lambda: pairs([[-1, 1, 1]])),
    "bool indices": ("get_indice_pairs: indices", lambda: pairs([[True, True, True]])),
    "kernel": ("get_indice_pairs: ksize", lambda: pairs(ksize=(0, 3))),
    "huge kernel": ("get_indice_pairs: ksize", lambda: pairs(ksize=(1 << 31, 1))),
    "huge grid": (
        "get_indice_pairs: out_shape",
        lambda: ops.get_indice_pairs(whole(0, 1, 1, 1)[None], 1, (2**31 - 1,) * 3, *[(1, 1, 1)] * 5),
    ),
    "kernels": (
        "pixel_group: kernel_region_num",
        lambda: label_growth.pixel_group(*[ones(1, 1)] * 2, ones(1, 1, 1), *[whole(0)[None]] * 2, 10**6, 1.0),
    ),
    "large kernel": ("get_indice_pairs: ksize", lambda: pairs(ksize=(1 << 20, 1 << 20))),
    "stride": ("get_indice_pairs: stride", lambda: pairs(stride=(1, 0))),
    "dilation": ("get_indice_pairs: dilation", lambda: pairs(dilation=(0, 1))),
    "padding": ("get_indice_pairs: padding", lambda: pairs(padding=(-1, 1))),
    "size": ("get_indice_pairs: out_shape", lambda: pairs(out_shape=(3, 1.5))),
    "counts": ("indice_conv: indice_pair_num", lambda: sparse(counts=2)),
    "counts of a maximum": ("indice_maxpool: indice_pair_num", lambda: sparse(counts=-1, pool=True)),
    "input": ("indice_conv: indice_pairs", lambda: sparse([[-1], [0]])),
    "output": ("indice_maxpool: indice_pairs", lambda: sparse([[0], [1]], pool=True)),
    "float pairs": ("indice_conv: indice_pairs", lambda: sparse([[0.0], [0.0]])),
    **{
        f"voxels of {size}": ("dynamic_voxelize: voxel_size", lambda size=size: voxels((1.0, size, 1.0)))
        for size in (float("nan"), float("inf"))
    },
    "voxels of a tensor": ("dynamic_voxelize: voxel_size", lambda: voxels(torch.zeros(3))),
    "dimensions": ("dynamic_voxelize: ndim", lambda: voxels(ndim=0)),
    "labels": ("pixel_group: kernel_label", lambda: groups(ones(2, 3))),
    "complex mask": ("pixel_group: mask", lambda: groups(whole(1), torch.complex64)),
    "filter": (
        "active_rotated_filter: indices",
        lambda: ops.active_rotated_filter(ones(1, 1, 1, 1, 1), whole(0).view(1, 1, 1, 1)),
    ),
    "complex start": (
        "ms_deform_attn: level_starts",
        lambda: ops.ms_deform_attn(
            ones(1, 1, 1, 1), [(1, 1)], [0j], ones(1, 1, 1, 1, 1, 2), ones(1, 1, 1, 1, 1)
        ),
    ),
    "what torch refuses": (
        "box_iou_rotated: ",
        lambda: ops.box_iou_rotated(ones(1, 5), ones(1, 5), aligned=torch.ones(2)),
    ),
    "factor": ("upfirdn2d: up", lambda: filtered_activations.upfirdn2d(ones(1, 1, 2, 2), ones(1, 1), (0, 1))),
    "bins": (
        "bezier_align: output_size",
        lambda: aligned_pooling.bezier_align(ones(1, 1, 3, 3), ones(1, 17), (2, 1.5)),
    ),
    "many bins": (
        "prroi_pool: output_size",
        lambda: aligned_pooling.prroi_pool(ones(1, 1, 3, 3), ones(1, 5), (1 << 16, 1 << 16)),
    ),
}


REFUSED = [(call, f"^{named.strip()} ") for named, call in BAD.values()]


def refused():
    """Yield the calls that the operators' files say to be refused, and what the errors say."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for number, row in enumerate(getattr(import_module(file.stem), "REFUSED", ())):
            yield pytest.param(*row, id=f"{file.stem}-{number}")


@pytest.mark.parametrize(("call", "message"), list(refused()))
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises((ValueError, TypeError, RuntimeError, KeyError), match=message):
        call()


def test_gathered_integers_and_complex_numbers_are_exact():
    first, large, number = torch.tensor([[0]]), 2**24 + 1, 1 + 2j
    assert ops.gather_points(torch.tensor([[[large, 3]]]), first).item() == large
    assert ops.gather_points(torch.tensor([[[number]]]), first).item() == number


def test_an_integer_mask_is_one():
    assert groups(whole(1)) == groups(whole(1), torch.int64) == groups(whole(1), torch.float32)


# Functions in the table of operators that are not the operators.
PUBLIC = {**vars(fused), "assign_score_withk": ops.assign_score_withk}


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name != "linear_sum_assignment"]
)  # see its file
def test_a_mistake_is_refused_by_what_must_be(name):
    operator, wrong, accepted = OPERATORS[name], {}, []
    call = PUBLIC.get(name, operator.call)
    for given in itertools.islice(sound_arguments(name), 20):
        if call is not operator.call:
            given = {key: value for key, value in given.items() if key in signature(call).parameters}
        for argument, what, change in mistakes(operator, given):
            wrong.setdefault((argument, what), given | {argument: change(given[argument])})
    assert wrong
    for (argument, what), given in wrong.items():
        try:
            call(**given)
        except (ValueError, TypeError, RuntimeError) as error:
            # What a size or a device must be, another argument may say.
            may_be_other = isinstance(what, int) or what in ("rank", "meta", "[1, 1, 1, 1, 1]")
            named = "|".join(given) if may_be_other else argument
            bound = what if str(what).startswith(("at ", "above ")) else ""
            names = "|".join((name, *operator.aliases))
            said = rf"({names}): .*\b({named})\b.* must .*{bound}.*, got"
            assert re.match(said, str(error)), (argument, what, error)
        else:
            accepted.append((argument, what))
    assert not accepted


def sound_arguments(name):
    """Yield the arguments of calls that an operator takes."""
    for problem in (OPERATORS[name].draw(Draw(name, seed, "cpu")) for seed in range(200)):
        if not problem.must_refuse and not problem.may_refuse:
            yield problem.arguments


SETS = torch.tensor([[0, 0, 4, 0, 4, 3, 0, 3, 2, 1, 1, 2, 3, 1, 2, 2, 1, 1.0]]).double()
QUADS = torch.tensor([[1, 1, 5, 1, 5, 4, 1, 4.0]]).double()
BOXES = torch.tensor([[[0, 0, 4, 3, 0.3], [1, 1, 2, 5, 0.0]]]).double()


@pytest.mark.parametrize(
    ("size", "origin"), [(1, 4.2e6), (1e-2, 1e5), (1e-3, 100), (1, -4.2e6), (1e3, 1e9)], ids=str
)
def test_overlaps_and_boxes_do_not_depend_on_the_origin(size, origin):
    def at(points):
        return points * size + origin

    for one, other in zip(ops.convex_giou(SETS, QUADS), ops.convex_giou(at(SETS), at(QUADS)), strict=True):
        assert_close(other * (1 if one.dim() == 1 else size), one, rtol=0, atol=1e-6)
    assert_close(ops.convex_iou(at(SETS), at(QUADS)), ops.convex_iou(SETS, QUADS))
    box = (ops.min_area_polygons(at(SETS)) - origin) / size
    assert_close(box, ops.min_area_polygons(SETS), rtol=0, atol=1e-5)
    found = []
    for first, scale in (
        (BOXES, 1),
        (torch.cat([at(BOXES[..., :2]), BOXES[..., 2:4] * size, BOXES[..., 4:]], 2), size),
    ):
        leaf = first.clone().requires_grad_()
        overlap = ops.diff_iou_rotated_2d(leaf, first.flip(1))
        (grad,) = torch.autograd.grad(overlap.sum(), leaf)
        found.append((overlap.detach(), grad[..., :4] * scale))
    assert_close(found[1], found[0], rtol=0, atol=1e-5)


def test_a_point_beside_a_side_lies_there_far_from_the_origin_too():
    quads, points = torch.randint(0, 9, (20, 8)).float(), torch.cartesian_prod(*[torch.arange(18.0) / 2] * 2)
    expected = ops.points_in_polygons(points.double(), quads.double())
    assert torch.equal(ops.points_in_polygons(points + 4e6, quads + 4e6), expected)


@pytest.mark.parametrize("aligned", [True, False])
def test_regions_of_any_size_take_bounded_time_and_memory(aligned):
    x, far = ones(1, 4, 50, 50), 1e9
    curve = torch.tensor(
        [[0, *(0, 0, far, far, 2 * far, far, 3 * far, 0), *(3 * far, far, 9, 9, 9, 9, 0, far)]]
    )
    begin = time.monotonic()
    assert aligned_pooling.bezier_align(x, curve, (8, 32), 1.0, 0, aligned).isfinite().all()
    rotated = torch.tensor([[0, 20.0, 20, far, far, 0.3]])
    assert ops.roi_align_rotated(x, rotated, 7, 1.0, 0, aligned).sum() > 0
    assert ops.riroi_align_rotated(x, rotated, 7, 1.0, 0, 4).isfinite().all()
    for step in (10**5, 10**6, 2**31 - 1):
        assert filtered_activations.upfirdn2d(x, ones(2, 2), down=(step, step)).shape == (1, 4, 1, 1)
    labels = [[2**62, 0]]
    assert label_growth.contour_expand(ones(1, 1, 2), torch.tensor(labels), 1, 1) == labels
    assert time.monotonic() - begin < 20
