"""How an operator's gradient is reached: eagerly, through torch.ops, in a trace, under vmap; and only once.

Derivatives that no operator has, and tensors without data beside others, are refused instead of wrong numbers.
"""

import pytest
import torch
from calls import exact
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw
from visdet.execution.tensor_tree import tensors_of
from visdet.ops import carafe, ms_deform_attn
from visdet.ops.fused import autocast_linear, batch_norm_add_relu, dropout_add_layer_norm
from visdet.ops.ms_deform_attn import level_starts_of

LEVELS = [(4, 5)]
SHAPES = torch.tensor(LEVELS)
STARTS = level_starts_of(SHAPES)


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def attention_arguments():
    return rand(2, 20, 2, 3), LEVELS, None, rand(2, 6, 2, 1, 2, 2), rand(2, 6, 2, 1, 2)


NAMES = [
    name for name, operator in OPERATORS.items() if operator.of_size and operator.of_size[0](1).differentiable
]


def call_of(name, device="cpu"):
    """Return an operator as a function of its first differentiable argument, the argument, and the others by name."""
    problem = OPERATORS[name].of_size[0](3)
    given = exact(problem.arguments, device)
    first = problem.differentiable[0]
    return (
        (lambda x, **others: OPERATORS[name].call(**{**given, first: x, **others})),
        given.pop(first),
        given,
    )


# Plain torch serves what their kernels do not.
LINEAR = ("group_points", "three_interpolate")
# On the CPU, box_key_points is plain torch. That of the others has the further derivatives, too.
SMOOTH = ("box_key_points", "render_rays", "deform_conv2d", "modulated_deform_conv2d")
ONCE = [name for name in NAMES if name not in (*LINEAR, *SMOOTH)]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_operators_have_all_derivatives(name):
    function, first, others = call_of(name)
    assert torch.autograd.gradcheck(function, first.requires_grad_(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, first)
    direction = torch.rand_like(first)
    _, tangent = torch.func.jvp(function, (first.detach(),), (direction,))
    assert_close(tangent, function(direction))
    grad = torch.func.grad(lambda x: function(x).square().sum())(first.detach())
    assert_close(grad, torch.autograd.grad(function(first).square().sum(), first)[0])
    if "weight" in others:
        weight = others["weight"].requires_grad_()
        assert torch.autograd.gradgradcheck(lambda x, w: function(x, weight=w), (first, weight))


@pytest.mark.parametrize(
    ("name", "number"), [(n, i) for n in NAMES for i in range(len(OPERATORS[n].of_size))]
)
def test_gradients_numerically(name, number, device):
    problem = OPERATORS[name].of_size[number](3)
    given = exact(problem.arguments, device)
    leaves = [given[key].requires_grad_() for key in problem.differentiable]
    assert torch.autograd.gradcheck(
        lambda *leaves: OPERATORS[name].call(
            **given | dict(zip(problem.differentiable, leaves, strict=True))
        ),
        leaves,
        nondet_tol=1e-12 if device == "cuda" else 0.0,
        fast_mode=True,
    )


def is_smooth(problem):
    """Return whether a problem is sound and has gradients everywhere."""
    is_left_out = any(part if isinstance(part, bool) else part.any() for part in problem.skip.values())
    return not (is_left_out or problem.may_refuse or problem.must_refuse)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in (*NAMES, "autocast_linear")])
def test_gradients_of_a_random_problem_numerically(name):
    for draw in (Draw(name, seed, "cpu") for seed in range(5, 100)):
        draw.has_bad_numbers = draw.has_empty_sizes = False
        problem = OPERATORS[name].draw(draw)
        if is_smooth(problem):
            break
    given = exact(problem.arguments)
    leaves = {
        key: given[key].clone().requires_grad_() for key in problem.differentiable if given[key] is not None
    }

    def call(*leaves_of_call):
        found = OPERATORS[name].call(**given | dict(zip(leaves, leaves_of_call, strict=True)))
        return tuple(one for one in tensors_of(found) if one.requires_grad)

    assert not leaves or torch.autograd.gradcheck(call, list(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("allow_unused", [False, True])
@pytest.mark.parametrize("name", ONCE)
def test_no_gradient_is_differentiated(name, allow_unused):
    """That of a plain sum is not either: there the gradient of the result is a constant, but the arguments count."""
    function, first, _ = call_of(name)
    first.requires_grad_()
    is_linear = name in ("roi_align", "roi_pool")  # in the map, so that the gradient of a sum is a constant
    for loss in (torch.square,) if is_linear else (torch.square, torch.clone):
        (grad,) = torch.autograd.grad(loss(function(first)).sum(), first, create_graph=True)
        assert grad.abs().sum() > 0
        # On the CPU, deformable_aggregation_fused is made of deformable_aggregation.
        with pytest.raises(
            RuntimeError, match=rf"^{name.split('_fused')[0]}\w*: it has no second derivative"
        ):
            torch.autograd.grad(grad.square().sum() + first.sum(), first, allow_unused=allow_unused)


def test_a_bias_beside_an_operator_hides_no_second_derivative():
    """The result leads to all arguments by way of the bias's gradient, too, which is a part of the derivative alone."""
    x, masks, bias = (rand(*shape).requires_grad_() for shape in ((1, 2, 5, 5), (1, 9, 5, 5), (2, 1, 1)))
    out = carafe(x, masks, 3, 1, 1) + bias
    grads = torch.autograd.grad(out.square().sum(), (x, masks, bias), create_graph=True)
    with pytest.raises(RuntimeError, match="carafe: it has no second derivative"):
        torch.autograd.grad(sum(grad.square().sum() for grad in grads), masks)


def assert_recomputed_gradients_are_equal(function, leaf, **options):
    """A checkpoint lets each node read its saved tensors once, and then computes the function again."""
    recomputed = checkpoint(function, leaf, use_reentrant=False)
    (found,) = torch.autograd.grad(recomputed.square().sum(), leaf, **options)
    (expected,) = torch.autograd.grad(function(leaf).square().sum(), leaf, **options)
    assert expected.abs().sum() > 0
    assert_close(found, expected)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_operators_under_activation_checkpointing(name, create_graph, device):
    function, first, _ = call_of(name, device)
    assert_recomputed_gradients_are_equal(function, first.requires_grad_(), create_graph=create_graph)


def channels(count, device):
    return torch.rand(count, device=device) + 0.5


NODES = {
    "dropout_add_layer_norm": lambda x: dropout_add_layer_norm(
        x, x, channels(8, x.device), channels(8, x.device)
    ),
    "dropout_layer_norm": lambda x: dropout_add_layer_norm(
        x, None, channels(8, x.device), channels(8, x.device), 0.5
    ),
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
    + [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in NODES],
)
def test_nodes_are_not_differentiated_twice_either(name, device):
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


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("has_grad", [False, True])
def test_forward_mode_derivatives_are_refused(name, has_grad):
    """torch would return tangents of zeros for the operators of a library."""
    function, first, _ = call_of(name)
    with torch.set_grad_enabled(has_grad), pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(function, (first,), (torch.ones_like(first),))
    with torch.set_grad_enabled(has_grad), forward_ad.dual_level():
        dual = forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
            function(dual)
        function(first)


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_a_trace_holds_the_operator(tmp_path):
    value, levels, _, *rest = attention_arguments()
    traced = torch.jit.trace(lambda v, *r: ms_deform_attn(v, SHAPES, STARTS, *r), (value, *rest))
    traced.save(str(tmp_path / "traced.pt"))
    again = torch.jit.load(str(tmp_path / "traced.pt"))
    assert torch.equal(again(value * 2, *rest), ms_deform_attn(value * 2, levels, None, *rest))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_calls_the_operator_entry_by_entry():
    value, levels, _, *rest = attention_arguments()
    stacked = torch.stack([value, value * 2])
    out = torch.func.vmap(lambda v: ms_deform_attn(v, SHAPES, STARTS, *rest))(stacked)
    assert torch.equal(out[1], ms_deform_attn(value * 2, levels, None, *rest))
