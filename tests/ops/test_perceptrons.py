"""Perceptrons whose layers all run in one operator."""

import pytest
import torch
import torch.nn.functional as F

from visdet.ops.perceptrons import PerceptronLayer, perceptrons, perceptrons_reference

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)

# The layers of each perceptron as (inputs, outputs, what follows), and the columns they begin with.
NETS = {
    "boxes": (
        [[(3, 128, "norm")] + [(128, 128, "norm")] * 3, [(2, 32, "norm")] * 1, [(3, 64, "relu norm")]],
        (0, 3, 6),
        11,
    ),
    "regression": ([[(256, 256, "relu"), (256, 256, "relu norm"), (256, 11, "scale")]], (0,), 256),
    "classes": ([[(96, 96, "relu norm"), (96, 96, "relu norm"), (96, 10, "")]], (0,), 96),
    "lines": ([[(40, 256, "relu norm"), (256, 256, "relu norm")]], (0,), 40),
    "odd": ([[(37, 19, "relu norm"), (19, 1, "relu")], [(1, 255, ""), (255, 7, "relu scale")]], (5, 2), 43),
    "one": ([[(5, 3, "")]], (1,), 7),
}


def net(name, dtype=torch.float32, device="cpu", seed=0):
    """Return the layers of a net with leaves that require gradients, the first columns, and the input's width."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size, about=0.0):
        values = torch.randn(*size, generator=generator, dtype=torch.float64) / size[-1] ** 0.5 + about
        return values.to(device, dtype).requires_grad_()

    specs, first_columns, width = NETS[name]
    layers = [
        [
            PerceptronLayer(
                draw(outputs, inputs),
                draw(outputs),
                relu="relu" in then,
                factor=draw(outputs, about=1.0) if "norm" in then or "scale" in then else None,
                offset=draw(outputs) if "norm" in then else None,
            )
            for inputs, outputs, then in of_one
        ]
        for of_one in specs
    ]
    return layers, first_columns, width


def leaves(layers):
    return [tensor for of_one in layers for layer in of_one for tensor in layer.parameters]


def run(function, x, layers, first_columns, grad_output):
    x = x.clone().requires_grad_()
    output = function(x, layers, first_columns)
    return output, torch.autograd.grad(output, [x, *leaves(layers)], grad_output.to(output))


def test_two_layers_by_hand():
    layer = PerceptronLayer(torch.tensor([[1.0, 2.0], [3.0, -4.0]]), torch.tensor([1.0, 0.0]), relu=True)
    scaled = PerceptronLayer(torch.tensor([[2.0, 5.0]]), torch.tensor([0.5]), factor=torch.tensor([10.0]))
    # (1, 1) -> relu(4, -1) = (4, 0) -> 8.5 -> 85; (1, 0) -> (2, 3) -> 19.5 -> 195
    x = torch.tensor([[9.0, 1.0, 1.0], [9.0, 1.0, 0.0]])
    torch.testing.assert_close(perceptrons(x, [[layer, scaled]], [1]), torch.tensor([[85.0], [195.0]]))


def test_results_stand_side_by_side():
    layers, first_columns, width = net("boxes")
    x = torch.randn(2, 5, width)
    output = perceptrons(x, layers, first_columns)
    assert output.shape == (2, 5, 128 + 32 + 64)
    second = layers[1][0]
    alone = F.layer_norm(
        F.linear(x[..., 3:5], second.weight, second.bias), (32,), second.factor, second.offset
    )
    torch.testing.assert_close(output[..., 128:160], alone)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("rows", [(0,), (1,), (7,), (3, 33), (900,), (4883,)], ids=str)
def test_values_and_gradients_are_those_of_float64(name, rows, device):
    layers, first_columns, width = net(name, device=device)
    exact_layers, *_ = net(name, torch.float64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, width, generator=generator, dtype=torch.float64)
    outputs = sum(of_one[-1].weight.shape[0] for of_one in layers)
    grad_output = torch.randn(*rows, outputs, generator=generator, dtype=torch.float64)
    for of_exact, of_one in zip(leaves(exact_layers), leaves(layers), strict=True):
        of_exact.data.copy_(of_one.detach().cpu().double())
    x32 = x.float()
    expected, expected_grads = run(
        perceptrons_reference, x32.double(), exact_layers, first_columns, grad_output.float().double()
    )
    output, grads = run(perceptrons, x32.to(device), layers, first_columns, grad_output.float().to(device))
    if device == "cuda" and x.numel():
        assert type(output.grad_fn).__name__ in ("_PerceptronsBackward", "ViewBackward0")
    # Where a sum is next to zero, rounding decides whether ReLU lets it through. One such sum changes gradients of
    # thousands of rows by 1e-3 of their norm.
    tolerances = [1e-5] + [1e-5 if x.shape[0] < 1000 else 2e-3] * len(grads)
    for found, true, tolerance in zip((output, *grads), (expected, *expected_grads), tolerances, strict=True):
        assert found.dtype == torch.float32 and found.shape == true.shape
        difference = (found.cpu().double() - true).norm()
        assert difference <= tolerance * true.norm() + 1e-6 * max(1, x.shape[0]) ** 0.5


@pytest.mark.cuda
@pytest.mark.parametrize("name", NETS)
def test_results_do_not_change_from_call_to_call(name):
    layers, first_columns, width = net(name, device="cuda")
    x = torch.randn(1234, width, device="cuda")
    grad_output = torch.randn_like(perceptrons(x, layers, first_columns))
    first, first_grads = run(perceptrons, x, layers, first_columns, grad_output)
    again, again_grads = run(perceptrons, x, layers, first_columns, grad_output)
    with torch.no_grad():
        predicted = perceptrons(x, layers, first_columns)
    assert torch.equal(first, again) and torch.equal(first, predicted) and predicted.grad_fn is None
    assert all(torch.equal(a, b) for a, b in zip(first_grads, again_grads, strict=True))


@pytest.mark.cuda
def test_only_wanted_gradients_are_computed():
    layers, first_columns, width = net("classes", device="cuda")
    layers[0][0].weight.requires_grad_(False)
    x = torch.randn(9, width, device="cuda")
    output = perceptrons(x, layers, first_columns)
    output.sum().backward()
    assert layers[0][0].weight.grad is None and layers[0][1].weight.grad is not None
    x.requires_grad_()
    for tensor in leaves(layers):
        tensor.requires_grad_(False)
    (grad,) = torch.autograd.grad(perceptrons(x, layers, first_columns).sum(), x)
    assert grad.abs().sum() > 0


@pytest.mark.cuda
def test_strides_and_other_types():
    layers, first_columns, width = net("classes", device="cuda")
    wide = torch.randn(31, 2 * width, device="cuda")
    torch.testing.assert_close(
        perceptrons(wide[:, ::2], layers, first_columns),
        perceptrons(wide[:, ::2].clone(), layers, first_columns),
    )
    # Other types run layer by layer.
    doubles, *_ = net("classes", torch.float64, "cuda")
    output = perceptrons(wide[:, ::2].double(), doubles, first_columns)
    assert output.dtype == torch.float64 and "Perceptrons" not in type(output.grad_fn).__name__


@pytest.mark.cuda
def test_bad_numbers_stay_in_their_rows():
    layers, first_columns, width = net("regression", device="cuda")
    x = torch.randn(40, width, device="cuda")
    clean = perceptrons(x, layers, first_columns)
    bad = x.clone()
    bad[7, 3], bad[21, 0] = float("nan"), float("inf")
    found = perceptrons(bad, layers, first_columns)
    rows = [i for i in range(40) if i not in (7, 21)]
    assert torch.equal(found[rows], clean[rows]) and found[7].isnan().all()


@pytest.mark.cuda
def test_a_cuda_graph_replays_the_kernels():
    layers, first_columns, width = net("boxes", device="cuda")
    x = torch.randn(64, width, device="cuda")
    with torch.no_grad():
        perceptrons(x, layers, first_columns)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = perceptrons(x, layers, first_columns)
        x.normal_()
        graph.replay()
        assert torch.equal(output, perceptrons(x, layers, first_columns))


@pytest.mark.cuda
def test_a_weight_of_other_channels_is_refused():
    layers, _, width = net("classes", device="cuda")
    x = torch.randn(4, width, device="cuda")
    with pytest.raises(
        RuntimeError, match=r"perceptrons: a perceptron reads columns 1 to 97 of an input of 96"
    ):
        perceptrons(x, layers, [1])
    short = [[layers[0][0], layers[0][1]._replace(bias=torch.zeros(3, device="cuda"))]]
    with pytest.raises(RuntimeError, match=r"perceptrons: bias must be \[outputs\] = \[96\], got \[3\]"):
        perceptrons(x, short, [0])
    on_host = [[layers[0][0]._replace(bias=torch.zeros(96))]]
    with pytest.raises(RuntimeError, match="perceptrons: bias must be on the device of input"):
        perceptrons(x, on_host, [0])


def change(layers, **changed):
    return [[layers[0][0]._replace(**changed), *layers[0][1:]], *layers[1:]]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_does_not_fit_is_refused_by_name(device):
    layers, first_columns, width = net("odd", device=device)
    x = torch.randn(4, width, device=device)
    refused = [
        (x, layers, [5, 10], "first_columns must be such that no two perceptrons read the same column"),
        (x, layers, [7, 2], "a perceptron reads columns 7 to 44 of an input of 43"),
        (x, layers, [5], "first_columns"),
        (
            x,
            change(layers, bias=torch.zeros(3, device=device)),
            first_columns,
            r"bias must be \[outputs\] = \[19\]",
        ),
        (
            x,
            change(layers, factor=torch.ones(3, device=device)),
            first_columns,
            r"factor must be \[outputs\] = \[19\]",
        ),
        (
            x,
            change(layers, weight=torch.ones(18, 37, device=device)),
            first_columns,
            r"must be \[outputs\] = \[18\]",
        ),
    ]
    for input, changed, columns, message in refused:
        with pytest.raises((ValueError, RuntimeError), match=f"perceptrons: .*{message}"):
            perceptrons(input, changed, columns)


@pytest.mark.parametrize(
    ("changed", "columns", "error", "message"),
    [
        ({"weight": torch.ones(2, 3, 4)}, [0], ValueError, r"weight must be \[outputs, inputs\]"),
        (
            {"weight": torch.ones(3, 4).int()},
            [0],
            TypeError,
            "weight must have a floating-point type, got torch.int32",
        ),
        (
            {"factor": None},
            [0],
            ValueError,
            "a layer with a normalisation must have a factor and at least one output",
        ),
        ({"offset": torch.ones(3, device="meta")}, [0], RuntimeError, "offset must be on input's device cpu"),
        ({}, [0, 4], ValueError, r"got \[1\] layers for the columns \[0, 4\]"),
        ({}, [-1], ValueError, "a perceptron reads columns -1 to 3 of an input of 8"),
    ],
)
def test_layers_that_do_not_fit_are_refused_by_name(changed, columns, error, message):
    layer = PerceptronLayer(torch.ones(3, 4), torch.ones(3), False, torch.ones(3), torch.ones(3))
    with pytest.raises(error, match=f"perceptrons: .*{message}"):
        perceptrons(torch.ones(2, 8), [[layer._replace(**changed)]], columns)


@pytest.mark.cuda
def test_strides_of_parameters_do_not_matter():
    layers, first_columns, width = net("classes", device="cuda")
    x = torch.randn(31, width, device="cuda")
    strided = change(layers, weight=layers[0][0].weight.detach().t().contiguous().t())
    assert torch.equal(perceptrons(x, strided, first_columns), perceptrons(x, layers, first_columns))
