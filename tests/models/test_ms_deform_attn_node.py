"""MultiScaleDeformableAttention as one node of the autograd graph: the same numbers, and where layers are called."""

import copy
import types

import pytest
import torch
from attention_module_cases import SHAPES, S, inputs, module


def watch(layer):
    """A layer that somebody watches is called by itself."""
    layer.register_forward_hook(lambda *_: None)


def is_one_node(out):
    """Whether the graph that ends at ``out`` holds the module's layers and the operator as one node."""
    nodes, found = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        found.add(type(node).__name__)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return "_ProjectedBackward" in found


# Autocast's type or None, the type of everything that has one, and how far gradients may be from one another: separate
# layers round those of parameters to 16 bit, the one node does not on CUDA.
PRECISIONS = {
    "float64": (None, torch.float64, 1e-12),
    "float32": (None, torch.float32, 1e-5),
    "bfloat16": (None, torch.bfloat16, 2e-2),
    "autocast to bfloat16": (torch.bfloat16, torch.float32, 2e-2),
    "autocast to float16": (torch.float16, torch.float32, 3e-3),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_one_node_of_the_graph_is_the_layers(device, precision, batch_first, masked):
    autocast, dtype, tolerance = PRECISIONS[precision]
    attention = module(batch_first=batch_first).to(device, dtype)
    watched = copy.deepcopy(attention)
    watch(watched.value_proj)
    given = {
        name: tensor.to(device, dtype if name != "reference_points" else None).requires_grad_()
        for name, tensor in inputs(4).items()
        if name != "spatial_shapes"
    }
    if not batch_first:
        given.update({name: given[name].transpose(0, 1) for name in ("query", "value", "query_pos")})
    others = {"spatial_shapes": SHAPES}
    if masked:
        others["key_padding_mask"] = torch.rand(2, S).to(device) < 0.3
    results = []
    for layers in (attention, watched):
        with torch.autocast(device, autocast, enabled=autocast is not None):
            out = layers(**given, **others)
        assert is_one_node(out) == (layers is attention)
        torch.manual_seed(2)
        grad = torch.randn(out.shape).to(out)
        results.append((out, torch.autograd.grad(out, [*given.values(), *layers.parameters()], grad)))
    (one, one_grads), (separate, separate_grads) = results
    assert torch.equal(one, separate)
    for ours, theirs in zip(one_grads, separate_grads, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_one_node_of_layers_in_two_types(device):
    """Offsets and logits have one product for their gradients; the bfloat16 layer gets its part in its own type."""
    attention, given = module().to(device), {name: t.to(device) for name, t in inputs().items()}
    given["spatial_shapes"] = SHAPES
    attention.attention_weights.bfloat16()
    watched = copy.deepcopy(attention)
    watch(watched.value_proj)
    grads = []
    for layers in (attention, watched):
        with torch.autocast(device, torch.bfloat16):
            out = layers(**given)
        assert is_one_node(out) == (layers is attention)
        grads.append(torch.autograd.grad(out.square().sum(), list(layers.parameters())))
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize(
    ("identity", "dropout", "batch_first", "is_in_the_node"),
    [
        (lambda: torch.randn(2, 6, 12), 0.0, True, True),
        (lambda: torch.randn(6, 2, 12), 0.0, False, True),
        (lambda: torch.randn(2, 6, 12, dtype=torch.float64), 0.0, True, True),
        (lambda: torch.randn(6, 12), 0.0, True, False),
        (lambda: torch.randn(2, 12), 0.0, False, False),
        (lambda: torch.randn(2, 6, 12), 0.5, True, False),
    ],
    ids=["same kind", "queries first", "float64", "of all images", "of all queries", "dropout"],
)
def test_the_node_adds_the_identity_where_nothing_lies_between(
    identity, dropout, batch_first, is_in_the_node
):
    attention, given = module(dropout=dropout, batch_first=batch_first).train(), inputs()
    if not batch_first:
        given.update({name: given[name].transpose(0, 1) for name in ("query", "value", "query_pos")})
    watched = copy.deepcopy(attention)
    watch(watched.value_proj)
    identity = identity().requires_grad_()
    results = []
    for layers in (attention, watched):
        torch.manual_seed(3)  # of the dropout
        out = layers(**given, identity=identity)
        results.append((out, *torch.autograd.grad(out.square().sum(), [identity, *layers.parameters()])))
        assert is_one_node(out) == (layers is attention)
        name = type(out.grad_fn).__name__
        last = "_ProjectedBackward" if batch_first else "TransposeBackward0"
        assert name == (last if is_in_the_node and layers is attention else "AddBackward0")
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_column_sums(device, dtype):
    """The sums that the biases' gradients are: of any number of matrices, of any size, in either type."""
    torch.manual_seed(0)
    for shapes in (
        [(3000, 96), (700, 64), (700, 32)],
        [(7, 3)],
        [(0, 5), (9, 16)],
        [(100, 2500)],
        [(65, 31)] * 6,
    ):
        matrices = [torch.randn(shape).to(dtype) for shape in shapes]
        expected = torch.cat([matrix.double().sum(0) for matrix in matrices])
        size = torch.cat([matrix.double().norm(dim=0) for matrix in matrices])
        matrices = [matrix.to(device) for matrix in matrices]
        for out in {dtype, torch.promote_types(dtype, torch.float32)}:
            sums = torch.ops.visdet.column_sums(matrices, out)
            # A product on the CPU sums one by one, and rounds to the matrices' type.
            error = 32 * torch.finfo(dtype).eps if device == "cpu" else 4 * torch.finfo(out).eps
            assert sums.dtype == out
            assert ((sums.cpu() - expected).abs() <= error * (size + expected.abs())).all()
            assert torch.equal(sums, torch.ops.visdet.column_sums(matrices, out))


def test_a_backward_that_fails_names_the_product():
    numbers = {"num_points": [1], "num_heads": 1, "wanted": [1] * 11, "deterministic": False}
    rows, weights = [torch.zeros(1, 2, 4)] * 2, [torch.zeros(size, 4) for size in (3, 4, 4)]
    saved = [*rows, *weights, *rows, torch.zeros(1, 2, 2), torch.zeros(1, 2, 1)]
    geometry = [None, torch.tensor([[1, 2]]), torch.tensor([0]), torch.zeros(1, 2, 1, 2)]
    with pytest.raises(RuntimeError, match=r"aten::mm: (mat1 and mat2 .*2x5 and 4x4|it failed)"):
        torch.ops.visdet.ms_deform_attn_projected_backward(torch.zeros(1, 2, 5), saved, *geometry, **numbers)


def test_one_node_gives_the_gradients_that_are_asked_for():
    attention, given = module(), inputs()
    everything = dict(attention.named_parameters())
    expected = {}
    for name, parameter in everything.items():
        attention.zero_grad(set_to_none=True)
        attention(**given).square().sum().backward()
        expected[name] = parameter.grad
    for asked in everything:
        attention.zero_grad(set_to_none=True)
        for name, parameter in everything.items():
            parameter.requires_grad_(name == asked)
        out = attention(**given)
        assert is_one_node(out)
        out.square().sum().backward()
        assert [name for name, parameter in everything.items() if parameter.grad is not None] == [asked]
        assert torch.equal(everything[asked].grad, expected[asked])


def replace_by_subclass(attention):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    attention.output_proj.__class__ = Doubled


def replace_forward(attention):
    attention.output_proj.forward = lambda x: 2 * torch.nn.Linear.forward(attention.output_proj, x)


def watch_output(attention):
    attention.output_proj.register_forward_hook(lambda _, __, out: 2 * out)


def watch_input(attention):
    attention.output_proj.register_forward_pre_hook(lambda _, arguments: (2 * arguments[0],))


def replace_weight(attention):
    class Doubling(torch.nn.Parameter):
        """A parameter that a linear layer takes for twice its numbers."""

        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            with torch._C.DisableTorchFunctionSubclass():
                out = function(*arguments, **(options or {}))
                return 2 * out if function is torch.nn.functional.linear else out

    attention.output_proj.weight = Doubling(attention.output_proj.weight.detach())


@pytest.mark.parametrize(
    "change", [replace_by_subclass, replace_forward, replace_weight, watch_output, watch_input]
)
def test_changed_layers_are_called(change):
    attention, given = module(), inputs()
    attention.output_proj.bias.data.zero_()
    before = attention(**given) - given["query"]
    change(attention)
    out = attention(**given)
    assert not is_one_node(out)
    torch.testing.assert_close(out - given["query"], 2 * before)


def test_layers_without_biases_and_other_types_are_called():
    attention, given = module(), inputs()
    attention.output_proj.bias = None
    assert not is_one_node(attention(**given))
    mixed = module()
    mixed.value_proj.double()
    given["value"] = given["value"].double()
    with pytest.raises(RuntimeError, match=r"must have the same dtype"):
        mixed(**given)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda query: query[..., :8], "12x8 and 12x"),
        ("value", lambda value: value[:, :-1], "must lie within the S = 46 rows of value"),
        (
            "value",
            lambda value: value[:1],
            r"reference_points must be .* B = 1 as in value and L = 2, got \(2, 6, 2, 2\)",
        ),
        (
            "key_padding_mask",
            lambda _: torch.zeros(2, 5) > 0,
            r"must be \[B, S\] of value, \(2, 47\), got \(2, 5\)",
        ),
    ],
)
def test_bad_inputs_are_named(with_gradients, name, change, message):
    given = inputs()
    given[name] = change(given.get(name))
    with torch.set_grad_enabled(with_gradients), pytest.raises((RuntimeError, ValueError), match=message):
        module()(**{**given, "query_pos": None})


def test_layers_of_another_width_are_refused():
    attention, given = module(), inputs()
    attention.sampling_offsets = torch.nn.Linear(12, 30)
    with pytest.raises(RuntimeError, match=r"shape '\[2, 6, 3, 4, 2\]' is invalid"):
        attention(**given)
    parameters = [
        tensor for layer in attention.children() if hasattr(layer, "weight") for tensor in layer.parameters()
    ]
    starts = torch.tensor([0, 35])
    given = [given["query"], given["value"], None, None, SHAPES, starts, given["reference_points"], [2, 2]]
    operator = torch.ops.visdet.ms_deform_attn_projected
    for num_heads, message in (
        (3, "layer of offsets must have 24 outputs .*, got 30"),
        (0, "must be positive, got 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(*given, num_heads, parameters, torch.float32)


def test_a_compiled_module_is_made_of_its_layers():
    attention, given = module(), inputs()
    attention(**given).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in attention.named_parameters()}
    attention.zero_grad(set_to_none=True)
    out = torch.compile(attention, fullgraph=True, backend="aot_eager")(**given)
    assert not is_one_node(out)
    out.square().sum().backward()
    for name, parameter in attention.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("aten::mm: CUDA out of memory. Tried to allocate 2.00 GiB", torch.OutOfMemoryError),
        ("ms_deform_attn: the CUDA kernel decoder_kernel did not start", RuntimeError),
    ],
    ids=["out-of-memory", "launch"],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_errors_of_the_gpu_reach_the_caller(monkeypatch, message, kind, direction):
    def fails(*_):
        raise RuntimeError(message)

    name = "ms_deform_attn_projected" + ("_backward" if direction == "backward" else "")
    monkeypatch.setattr(torch.ops.visdet, name, types.SimpleNamespace(default=fails))
    with pytest.raises(kind, match=r"out of memory|did not start") as caught:
        module()(**inputs()).sum().backward()
    assert type(caught.value) is kind


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5000, 256), (1, 33, 8), (3, 1, 520), (0, 4, 8), (2, 0, 8)])
def test_rows_are_cleared_where_the_mask_says_so(dtype, shape):
    torch.manual_seed(0)
    rows = torch.randn(shape, device="cuda").to(dtype)
    for share in (0.0, 0.3, 1.0):
        mask = torch.rand(shape[:2], device="cuda") < share
        expected = rows.masked_fill(mask[..., None], 0)
        given = rows.clone()
        result = torch.ops.visdet.clear_rows_(given, mask.t().contiguous().t())
        assert torch.equal(given, expected) and torch.equal(result, expected)


@pytest.mark.cuda
def test_rows_that_cannot_be_cleared_are_refused():
    rows, mask = torch.ones(2, 4, 8, device="cuda"), torch.ones(2, 4, dtype=torch.bool, device="cuda")
    for wrong, name in (
        ((rows[..., :3].clone(), mask), "rows"),
        ((rows.transpose(0, 1), mask.t()), "rows"),
        ((rows, mask[:1]), "mask"),
        ((rows, mask.int()), "mask"),
        ((rows, mask.cpu()), "mask"),
    ):
        with pytest.raises(RuntimeError, match=f"clear_rows_.*{name} must be"):
            torch.ops.visdet.clear_rows_(*wrong)


@pytest.mark.parametrize("device", DEVICES)
def test_the_output_may_be_changed_in_place(device):
    attention = module(batch_first=True).to(device, torch.float64)
    given = {
        name: tensor.to(device, torch.float64)
        for name, tensor in inputs(4).items()
        if name != "spatial_shapes"
    }
    grads = []
    for changes in (lambda out: out.add_(1).mul_(2), lambda out: 2 * (out + 1)):
        attention.zero_grad()
        out = attention(**given, spatial_shapes=SHAPES)
        assert is_one_node(out)
        changes(out).square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in attention.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_under_autocast_is_the_same(device):
    """The forward may have been in float32, where autocast would round the products of the backward."""
    attention, given = module().to(device), {name: tensor.to(device) for name, tensor in inputs().items()}
    given["spatial_shapes"] = SHAPES
    grads = []
    for is_under in (False, True):
        out = attention(**given)
        assert is_one_node(out)
        with torch.autocast(device, torch.bfloat16, enabled=is_under):
            grads.append(torch.autograd.grad(out, list(attention.parameters()), torch.ones_like(out)))
    for outside, under in zip(*grads, strict=True):
        torch.testing.assert_close(under, outside, rtol=0, atol=0)
