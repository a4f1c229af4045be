"""How an operator's gradient is reached: eagerly, through torch.ops, in a trace, under vmap; and only once.

Derivatives that no operator has, and tensors without data beside others, are refused instead of wrong numbers.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from visdet.ops import (
    box_key_points,
    carafe,
    deform_conv2d,
    deformable_aggregation,
    deformable_aggregation_with_depth,
    gaussian_field,
    mahalanobis_distance,
    ms_deform_attn,
    ms_deform_attn_fused,
    roi_align,
    roi_pool,
    sample_dot,
    sample_sum,
    sigmoid_focal_loss,
)
from visdet.ops.fused import autocast_linear, batch_norm_add_relu, dropout_add_layer_norm, relu_dropout
from visdet.ops.ms_deform_attn import level_starts_of

LEVELS = [(4, 5)]
SHAPES = torch.tensor(LEVELS)
STARTS = level_starts_of(SHAPES)


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def attention_arguments():
    return rand(2, 20, 2, 3), LEVELS, None, rand(2, 6, 2, 1, 2, 2), rand(2, 6, 2, 1, 2)


def fused_arguments():
    return rand(2, 20, 2, 3), LEVELS, None, rand(2, 6, 1, 2), rand(2, 6, 2, 2, 2), rand(2, 6, 2, 2), 2


CALLS = {
    ms_deform_attn: attention_arguments,
    ms_deform_attn_fused: fused_arguments,
    deformable_aggregation: lambda: (
        rand(1, 40, 4),
        [[(4, 5)], [(4, 5)]],
        [[0], [20]],
        rand(1, 3, 2, 2, 2),
        rand(1, 3, 2, 2, 1, 2),
    ),
    deformable_aggregation_with_depth: lambda: (
        rand(1, 40, 4),
        rand(1, 40, 3),
        [[(4, 5)], [(4, 5)]],
        [[0], [20]],
        rand(1, 3, 2, 2, 3),
        rand(1, 3, 2, 2, 1, 2),
    ),
    sample_sum: lambda: (rand(1, 3, 4, 5), rand(1, 2, 3, 2), rand(1, 1, 2, 3)),
    sample_dot: lambda: (rand(1, 3, 4, 5), rand(1, 2, 3, 2), rand(1, 1, 2, 3), rand(1, 2, 3)),
    gaussian_field: lambda: (rand(5, 3), rand(4, 3), rand(4, 3, 3).tril() + torch.eye(3), rand(4)),
    mahalanobis_distance: lambda: (rand(5, 3), rand(4, 3), rand(4, 3, 3).tril() + torch.eye(3)),
    box_key_points: lambda: (rand(1, 2, 11), rand(3, 3)),
    carafe: lambda: (rand(1, 2, 3, 3), rand(1, 9, 6, 6), 3, 1, 2),
    deform_conv2d: lambda: (rand(1, 2, 4, 4), rand(1, 18, 2, 2), rand(3, 2, 3, 3)),
    roi_align: lambda: (rand(1, 2, 6, 6), torch.tensor([[0, 0, 0, 4, 4]]).double(), 2),
    roi_pool: lambda: (rand(1, 2, 6, 6), torch.tensor([[0, 0, 0, 4, 4]]).double(), 2),
    sigmoid_focal_loss: lambda: (rand(4, 3), torch.tensor([0, 1, 2, 3])),
}


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_no_gradient_is_differentiated(op):
    torch.manual_seed(0)
    first, *rest = CALLS[op]()
    first.requires_grad_()
    (grad,) = torch.autograd.grad(op(first, *rest).square().sum(), first, create_graph=True)
    assert grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "op", [op for op in CALLS if op not in (roi_align, roi_pool)], ids=lambda op: op.__name__
)
def test_a_gradient_of_a_plain_sum_is_not_differentiated_either(op):
    """The gradient of the result is then a constant, but the operator's gradient depends on its arguments.

    That of a pooling does not, because its result is linear in the map.
    """
    torch.manual_seed(0)
    first, *rest = CALLS[op]()
    first.requires_grad_()
    (grad,) = torch.autograd.grad(op(first, *rest).sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (grad.square().sum() + first.sum()).backward()


def moved(argument, device):
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


def assert_recomputed_gradients_are_equal(function, leaf, **options):
    """A checkpoint lets each node read its saved tensors once, and then computes the function again."""
    recomputed = checkpoint(function, leaf, use_reentrant=False)
    (found,) = torch.autograd.grad(recomputed.square().sum(), leaf, **options)
    (expected,) = torch.autograd.grad(function(leaf).square().sum(), leaf, **options)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_operators_under_activation_checkpointing(op, create_graph, device):
    torch.manual_seed(0)
    first, *rest = (moved(argument, device) for argument in CALLS[op]())
    assert_recomputed_gradients_are_equal(
        lambda x: op(x, *rest), first.requires_grad_(), create_graph=create_graph
    )


def channels(count, device):
    return torch.rand(count, device=device) + 0.5


NODES = {
    "dropout_add_layer_norm": lambda x: dropout_add_layer_norm(
        x, x, channels(8, x.device), channels(8, x.device)
    ),
    "dropout_layer_norm": lambda x: dropout_add_layer_norm(
        x, None, channels(8, x.device), channels(8, x.device), 0.5
    ),
    "relu_dropout": lambda x: relu_dropout(x, 0.5),
    "batch_norm_add_relu": lambda x: batch_norm_add_relu(
        x.view(3, 8, 1, 1), None, channels(8, x.device), channels(8, x.device)
    ),
    "autocast_linear": lambda x: autocast_linear(
        x, torch.rand(8, 8, device=x.device), channels(8, x.device), torch.bfloat16
    ),
}


ON_CPU = ("autocast_linear",)


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in ON_CPU]
    # The gradient of relu_dropout depends only on where its input is positive.
    + [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in NODES if name != "relu_dropout"],
)
def test_nodes_are_not_differentiated_twice_either(name, device):
    torch.manual_seed(0)
    leaf = torch.randn(1, 3, 8, device=device, requires_grad=True)
    output = NODES[name](leaf)
    (grad,) = torch.autograd.grad((output * torch.rand_like(output)).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (grad.square().sum() + leaf.sum()).backward()


@pytest.mark.cuda
@pytest.mark.parametrize("name", NODES)
def test_nodes_of_a_gpu_under_activation_checkpointing(name):
    def function(x):
        torch.manual_seed(0)
        return NODES[name](x)

    leaf = torch.randn(1, 3, 8, device="cuda", requires_grad=True)
    assert_recomputed_gradients_are_equal(function, leaf)


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("has_grad", [False, True])
def test_forward_mode_derivatives_are_refused(op, has_grad):
    """torch would return tangents of zeros for the operators of a library."""
    first, *rest = CALLS[op]()
    with torch.set_grad_enabled(has_grad), pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: op(x, *rest), (first,), (torch.ones_like(first),))
    with torch.set_grad_enabled(has_grad), forward_ad.dual_level():
        dual = forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(NotImplementedError, match=f"{op.__name__}: forward-mode"):
            op(dual, *rest)
        op(first, *rest)


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_tensors_without_data_beside_others_are_refused(op):
    """For such arguments, torch calls the function that returns shapes alone, on the device of the first one."""
    first, *rest = CALLS[op]()
    for index, argument in enumerate(rest):
        if isinstance(argument, torch.Tensor):
            given = [*rest[:index], argument.to("meta"), *rest[index + 1 :]]
            with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match="meta"):
                op(first, *given)


def test_eager_calls_and_torch_ops_agree():
    torch.manual_seed(0)
    value, levels, _, *rest = attention_arguments()
    leaves = [t.requires_grad_() for t in (value, *rest)]
    overload = torch.ops.visdet.ms_deform_attn(leaves[0], SHAPES, STARTS, *leaves[1:])
    eager = ms_deform_attn(leaves[0], levels, None, *leaves[1:])
    assert torch.equal(eager, overload)
    grad = rand(*eager.shape)
    found, expected = (torch.autograd.grad(output, leaves, grad) for output in (eager, overload))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_a_trace_holds_the_operator(tmp_path):
    torch.manual_seed(0)
    value, levels, _, *rest = attention_arguments()
    traced = torch.jit.trace(lambda v, *r: ms_deform_attn(v, SHAPES, STARTS, *r), (value, *rest))
    traced.save(str(tmp_path / "traced.pt"))
    again = torch.jit.load(str(tmp_path / "traced.pt"))
    assert torch.equal(again(value * 2, *rest), ms_deform_attn(value * 2, levels, None, *rest))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_calls_the_operator_entry_by_entry():
    torch.manual_seed(0)
    value, levels, _, *rest = attention_arguments()
    stacked = torch.stack([value, value * 2])
    out = torch.func.vmap(lambda v: ms_deform_attn(v, SHAPES, STARTS, *rest))(stacked)
    assert torch.equal(out[1], ms_deform_attn(value * 2, levels, None, *rest))
