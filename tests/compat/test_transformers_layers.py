"""visdet.compat.transformers: frozen norms, and the linear layers and norms around deformable attention."""

import gc
import weakref

import pytest
import tiny_transformers
import torch
from torch import nn
from transformers_checks import Recorder, modeling

from visdet.compat import _layers, _projection
from visdet.compat import transformers as bridge
from visdet.compat.transformers import installed

SHAPES = [(40, 33), (20, 17), (10, 9), (5, 5)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    bridge.uninstall()


def frozen_norm(channels, dtype=torch.float32, device="cpu"):
    norm = modeling("rt_detr").RTDetrFrozenBatchNorm2d(channels)
    generator = torch.Generator().manual_seed(0)
    for name, buffer in norm.named_buffers():
        buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.1 * (name == "running_var"))
    return norm.to(device, dtype)


def outputs_and_gradients(layer, inputs, index=None):
    """Return the output of a layer, and the gradients of its first input and its parameters."""
    inputs = [inputs[0].detach().requires_grad_(), *inputs[1:]]
    output = layer(*inputs)
    output = output if index is None else output[index]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad((output * weights).sum(), [inputs[0], *trained], allow_unused=True)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "a part"])
def test_frozen_norms_are_those_of_stock(layout, dtype, device):
    norm = frozen_norm(6, torch.float64 if dtype == torch.float64 else torch.float32, device)
    input = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if layout == "channels last":
        input = input.contiguous(memory_format=torch.channels_last)
    if layout == "a part":
        input = input[:, :, 1:, ::2]
    expected = outputs_and_gradients(norm, [input])
    with installed():
        found = outputs_and_gradients(norm, [input])
        with torch.no_grad():
            predicted = norm(input)
    eps = 1e-12 if dtype == torch.float64 else 1e-5
    for one, other, name in zip([*found, predicted], [*expected, expected[0]], "ogp", strict=True):
        assert one.dtype == other.dtype and (name == "g" or one.stride() == other.stride())
        near = torch.finfo(dtype).eps if name == "g" and dtype in (torch.float16, torch.bfloat16) else eps
        torch.testing.assert_close(one, other, rtol=near, atol=near)


def test_frozen_norms_are_differentiable_twice():
    norm = frozen_norm(3, torch.float64)
    input = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    with installed():
        assert torch.autograd.gradgradcheck(norm, (input,))


@pytest.mark.cuda
def test_frozen_norms_of_halves_are_differentiable_twice():
    norm = frozen_norm(3, device="cuda")
    input = torch.randn(2, 3, 4, 4, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def second():
        (grad,) = torch.autograd.grad(norm(input).square().sum(), input, create_graph=True)
        return torch.autograd.grad(grad.float().sum(), input)[0]

    expected = second()
    with installed():
        torch.testing.assert_close(second(), expected)


@pytest.mark.parametrize("change", ["trained", "three dimensions", "another class of tensors", "types"])
def test_frozen_norms_that_stock_computes(change):
    norm = frozen_norm(4)
    input = torch.randn(2, 4, 3, 3)
    if change == "trained":
        norm.weight.requires_grad_()
    if change == "three dimensions":
        input = input[0]
    if change == "another class of tensors":
        input = nn.Parameter(input)
    if change == "types":
        norm.bias = norm.bias.double()
    expected = norm(input)
    with installed():
        found = norm(input)
    assert found.dtype == expected.dtype and found.requires_grad == expected.requires_grad
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_frozen_norm_with_another_epsilon_is_left_alone(monkeypatch):
    owner = modeling("rt_detr").RTDetrFrozenBatchNorm2d
    stock = owner.forward

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-3).rsqrt()
        return (x - self.running_mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]

    monkeypatch.setattr(owner, "forward", forward)
    bridge.install()
    assert owner.forward is forward is not stock


def encoder_layer(device="cpu", activation="relu"):
    """Return a layer of Grounding DINO's encoder, and arguments with many rows."""
    model, _, _ = tiny_transformers.build("grounding_dino")
    owner = modeling("grounding_dino").GroundingDinoDeformableLayer
    layer = next(module for module in model.modules() if isinstance(module, owner)).eval()
    if activation != "relu":
        del layer.activation_fn
        layer.activation_fn = activation
    shapes = SHAPES[: layer.self_attn.n_levels]
    rows, generator = sum(height * width for height, width in shapes), torch.Generator().manual_seed(2)
    hidden, positions = torch.randn(2, 2, rows, layer.embed_dim, generator=generator)
    points = torch.rand(2, rows, len(shapes), 2, generator=generator)
    mask = torch.rand(2, rows, generator=generator) > 0.1
    tensors = [tensor.to(device) for tensor in (hidden, mask, positions, points, torch.tensor(shapes))]
    return layer.to(device), [*tensors, shapes]


@pytest.mark.parametrize("device", DEVICES)
def test_encoder_layers_are_those_of_stock(device, monkeypatch):
    monkeypatch.setattr(_projection, "_MIN_ROWS_ON_CUDA", 1024)
    layer, arguments = encoder_layer(device)
    expected = outputs_and_gradients(layer, arguments, 0)
    with installed(), Recorder() as recorder:
        found = outputs_and_gradients(layer, arguments, 0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    assert recorder.calls.count("dropout_add_layer_norm") == (2 if device == "cuda" else 0)


@pytest.mark.parametrize("activation", ["relu", "function", "hook", "gelu", "tanh"])
def test_predictions_of_feed_forward_networks_are_those_of_stock(activation):
    given = {"function": nn.functional.relu, "hook": nn.ReLU(), "gelu": nn.GELU(), "tanh": torch.tanh}
    layer, arguments = encoder_layer(activation=given.get(activation, "relu"))
    seen = []
    if activation == "hook":
        layer.activation_fn.register_forward_hook(lambda module, args, output: seen.append(args[0].min()))
    with torch.no_grad():
        expected = layer(*arguments)[0]
        seen.clear()
        with installed(), Recorder("mkldnn", "aten") as recorder:
            found = layer(*arguments)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if activation == "hook":
        assert len(seen) == 1 and seen[0] < 0
    if _projection._HAS_ONEDNN:
        # Value, offsets, logits and output of the attention, and the two layers of the network.
        assert recorder.calls.count("_linear_pointwise") == 6
        assert recorder.calls.count("relu") == (1 if activation == "hook" else 0)


def test_predictions_of_feed_forward_networks_show_a_broken_weight():
    layer, arguments = encoder_layer()
    with torch.no_grad():
        layer.fc1.weight[3, 2] = torch.nan
        assert layer(*arguments)[0].isnan().all()
        with installed():
            assert layer(*arguments)[0].isnan().all()


@pytest.mark.parametrize("change", ["transposed weight", "strided bias", "one bias", "sparse weight"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_parameters_of_any_layout(change):
    linear = nn.Linear(16, 48).requires_grad_(False)
    if change == "transposed weight":
        linear.weight = nn.Parameter(torch.randn(16, 48).T)
    if change == "strided bias":
        linear.bias = nn.Parameter(torch.randn(48, 2)[:, 0])
    if change == "one bias":
        linear.bias = nn.Parameter(torch.randn(1).expand(48))
    if change == "sparse weight":
        linear.weight = nn.Parameter(linear.weight.relu().to_sparse_csr(), requires_grad=False)
    input = torch.randn(2, 700, 16)
    with torch.no_grad():
        torch.testing.assert_close(_projection.project(linear, input), linear(input), rtol=1e-5, atol=1e-5)


def test_a_forward_that_uses_the_first_layer_twice_keeps_its_activation():
    def forward(self, x):
        return self.activation_fn(self.fc1(x)) + self.fc1(x)

    def other(self, x):
        hidden = self.fc1(x)
        return self.activation_fn(hidden) + hidden

    assert not _layers._activates_at_once(forward) and not _layers._activates_at_once(other)
    assert not _layers._activates_at_once(len)


def test_predictions_leave_nothing_behind(monkeypatch):
    layer, arguments = encoder_layer()
    kept = []
    project = _layers.project_by_onednn

    def watched(*arguments):
        output = project(*arguments)
        kept.append(weakref.ref(output))
        return output

    monkeypatch.setattr(_layers, "project_by_onednn", watched)
    gc.disable()  # so that only what no cycle holds is freed
    try:
        with torch.no_grad(), installed():
            layer(*arguments)
        assert len(kept) == _projection._HAS_ONEDNN and all(output() is None for output in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["sdpa", "of_a_user"])  # in the place of another, and under a new name
def test_attention_functions_of_users_get_the_layer_itself(name, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = tiny_transformers.build("deformable_detr")[0]
    layer = model.model.decoder.layers[0].self_attn.eval()
    given, sdpa = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, *arguments, **named):
        given.append(module)
        return sdpa(module, *arguments, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, attention)
    monkeypatch.setattr(layer.config, "_attn_implementation", name)
    rows = torch.randn(1, 1100, 32)
    with torch.no_grad():
        expected = layer(rows)[0]
        with installed():
            torch.testing.assert_close(layer(rows)[0], expected, rtol=1e-4, atol=1e-4)
    assert given == [layer, layer]


def test_views_have_the_attributes_of_their_layers():
    layer = nn.TransformerEncoderLayer(8, 2)
    layer.layers = nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])
    view = _layers._View(layer, False)
    assert view.linear1.weight is layer.linear1.weight and view.norm1.eps == layer.norm1.eps
    assert view.self_attn is layer.self_attn and view.layers[1] is layer.layers[1]
    assert len(view.layers) == 2 and view.layers[0].in_features == 8
    view.norm_first = True
    assert layer.norm_first is True
    with pytest.raises(AttributeError, match="missing"):
        view.missing  # noqa: B018
    input = torch.randn(3, 8)
    torch.testing.assert_close(view.linear1(input), layer.linear1(input), rtol=0, atol=0)
    torch.testing.assert_close(view.norm1(input), layer.norm1(input), rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_layers_under_autocast_are_one_node(dtype):
    linear = nn.Linear(64, 32, device="cuda")
    with Recorder() as recorder, torch.autocast("cuda", dtype):
        output = _projection.project(linear, torch.randn(2, 4096, 64, device="cuda"))
        output.sum().backward()
    assert output.dtype == dtype and linear.weight.grad.dtype == torch.float32
    assert recorder.calls == ["autocast_linear", "autocast_linear_backward"]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "change", ["frozen", "no bias", "hook", "halves", "no gradients", "no autocast", "few rows"]
)
def test_linear_layers_that_are_called(change):
    linear = nn.Linear(16, 8, bias=change != "no bias", device="cuda")
    seen = []
    if change == "frozen":
        linear.weight.requires_grad_(False)
    if change == "hook":
        linear.register_forward_hook(lambda *_: seen.append(None))
    if change == "halves":
        linear.bfloat16()
    rows = 8191 if change == "few rows" else 8192
    input = torch.randn(rows, 16, device="cuda", dtype=linear.weight.dtype)
    with (
        torch.set_grad_enabled(change != "no gradients"),
        torch.autocast("cuda", torch.bfloat16, enabled=change != "no autocast"),
    ):
        output = _projection.project(linear, input)
        torch.testing.assert_close(output, linear(input), rtol=0, atol=0)
    assert "_AutocastLinear" not in str(output.grad_fn)
    assert len(seen) == 2 * (change == "hook")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [8, 8192])
def test_a_weight_that_is_computed_is_computed_once_a_call(rows, device):
    class Counting(nn.Module):
        calls = 0

        def forward(self, weight):
            self.calls += 1
            return 2 * weight

    linear, counting = nn.Linear(16, 8, device=device), Counting()
    nn.utils.parametrize.register_parametrization(linear, "weight", counting)
    counting.calls = 0
    with torch.autocast(device, torch.bfloat16):
        _projection.project(linear, torch.randn(1, rows, 16, device=device))
    assert counting.calls == 1


@pytest.mark.parametrize(("shape", "many"), [((2, 4096, 8), True), ((8191, 8), False), ((2, 4096, 0), False)])
def test_rows_that_pay_on_a_gpu(shape, many):
    assert _projection.has_many_rows(torch.empty(shape, device="meta")) == many


@pytest.mark.parametrize("call", ["long prediction", "short prediction", "training", "strange arguments"])
def test_a_layer_of_which_no_part_is_faster_is_given_itself(call, monkeypatch):
    layer, arguments = encoder_layer()
    views = []
    monkeypatch.setattr(_layers, "_View", lambda layer, *_: views.append(layer) or layer)
    if call == "short prediction":
        shapes = [(2, 2)] * len(arguments[-1])
        rows = 4 * len(shapes)
        arguments = [*(tensor[:, :rows] for tensor in arguments[:4]), torch.tensor(shapes), shapes]
    if call == "strange arguments":
        with pytest.raises(TypeError):
            _layers._viewed_forward(type(layer).forward)(layer)
        with pytest.raises(AttributeError):
            _layers._viewed_forward(type(layer).forward)(layer, None, None)
    else:
        with installed(), torch.set_grad_enabled(call == "training"):
            layer(*arguments)
    assert len(views) == (call == "long prediction")
