"""The CUDA kernels of perceptrons, in blocks that a CPU emulates."""

import ctypes

import pytest
import torch
from emulation import compiled

from visdet.ops.perceptrons import FIRST, NORM, RELU, SCALE, PerceptronLayer, perceptrons_reference

PROGRAM = """
#include "cuda/perceptrons/backward.cuh"
#include "cuda/perceptrons/forward.cuh"

using namespace visdet::perceptrons;

// layers: kind, inputs, outputs, and where in `saved` the results and the statistics begin, of each layer.
static Net net_of(const int64_t* layers, int count, const int64_t* first_columns, const float* parameters, int64_t rows,
                  int columns) {
  Net net{};
  net.rows = rows, net.columns = columns, net.eps = 1e-5f;
  for (int l = 0; l < count; ++l, layers += 5) {
    Layer& layer = net.layers[net.num_layers];
    layer.kind = layers[0], layer.inputs = layers[1], layer.outputs = layers[2];
    layer.saved = layers[3], layer.statistics = layers[4];
    if (layer.kind & kFirst) {
      if (l > 0) net.outputs += net.layers[l - 1].outputs;
      net.perceptrons[net.count] = {l, 0, static_cast<int>(first_columns[net.count]), net.outputs};
      ++net.count;
    }
    layer.before = net.layer_outputs, layer.gradients = net.num_parameters;
    layer.weight = parameters + net.num_parameters;
    layer.bias = layer.weight + layer.inputs * layer.outputs;
    const bool has_factor = layer.kind & (kNorm | kScale), has_offset = layer.kind & kNorm;
    if (has_factor) layer.factor = layer.bias + layer.outputs;
    if (has_offset) layer.offset = layer.factor + layer.outputs;
    net.layer_outputs += layer.outputs;
    net.num_parameters += layer.outputs * (layer.inputs + 1 + has_factor + has_offset);
    ++net.perceptrons[net.count - 1].num_layers, ++net.num_layers;
  }
  net.outputs += net.layers[count - 1].outputs;
  return net;
}

extern "C" void forward(const int64_t* layers, int count, const int64_t* first_columns, const float* parameters,
                        int64_t rows, int columns, const float* input, float* output, float* saved) {
  const Net net = net_of(layers, count, first_columns, parameters, rows, columns);
  emulated::run_grid((rows + kBlockRows - 1) / kBlockRows, net.count, kThreads,
                     [&] { forward_kernel(net, input, output, saved); });
}

extern "C" void backward(const int64_t* layers, int count, const int64_t* first_columns, const float* parameters,
                         int64_t rows, int columns, const float* input, const float* saved, const float* grad_output,
                         int runs, float* grad_input, float* grad_parameters) {
  const Net net = net_of(layers, count, first_columns, parameters, rows, columns);
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  // What no thread writes is not a number.
  std::vector<float> grad_linear(rows * net.layer_outputs, NAN), sums(blocks * net.layer_outputs * kVectors, NAN),
      parts(runs * net.num_parameters, NAN);
  emulated::run_grid(blocks, net.count, kThreads, [&] {
    rows_kernel(net, grad_output, saved, grad_input, grad_linear.data(), sums.data());
  });
  int tiles = 0;
  for (int l = 0; l < net.num_layers; ++l) tiles += weight_tiles(net.layers[l]);
  const int64_t rows_of_run = (rows + runs * kDepth - 1) / (runs * kDepth) * kDepth;
  emulated::run_grid(tiles, runs, kWeightThreads, [&] {
    weights_kernel(net, input, saved, grad_linear.data(), rows_of_run, parts.data());
  });
  emulated::run_grid((net.num_parameters + kTotals - 1) / kTotals, 1, kTotalThreads, [&] {
    totals_kernel(net, parts.data(), runs, sums.data(), blocks, grad_parameters);
  });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(
        tmp_path_factory.mktemp("perceptron_kernels"),
        PROGRAM,
        ["cuda/perceptrons/forward.cuh", "cuda/perceptrons/backward.cuh"],
        "extern __shared__ float4 memory[];",
        "static float4 memory[sizeof(Shared) / sizeof(float4)];",
    )


# The layers of each perceptron as (inputs, outputs, kind), the columns they begin with, and the input's columns.
NETS = {
    "boxes": (
        [[(3, 32, NORM), (32, 32, NORM | RELU)], [(2, 20, NORM | RELU)]],
        (1, 4),
        7,
    ),
    "regression": ([[(68, 72, RELU), (72, 72, RELU | NORM), (72, 11, SCALE)]], (0,), 68),
    "classes": ([[(40, 256, RELU | NORM), (256, 256, RELU | NORM), (256, 10, 0)]], (0,), 40),
    "odd": ([[(37, 19, RELU | NORM), (19, 1, RELU)], [(1, 255, 0), (255, 7, RELU | SCALE)]], (5, 2), 43),
    "one": ([[(5, 3, 0)]], (1,), 7),
}


def pointer(tensor):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("rows", "runs"), [(1, 1), (16, 1), (37, 2), (50, 4)])
@pytest.mark.parametrize("wants_input", [False, True])
def test_kernels_compute_the_reference(library, name, rows, runs, wants_input):
    specs, first_columns, columns = NETS[name]
    generator = torch.Generator().manual_seed(rows)

    def draw(*size, about=0.0):
        return torch.randn(*size, generator=generator) / size[-1] ** 0.5 + about

    kinds = [(kind, i, o, index) for of_one in specs for index, (i, o, kind) in enumerate(of_one)]
    last = [index + 1 == len(of_one) for of_one in specs for index, _ in enumerate(of_one)]
    layers = [
        [
            PerceptronLayer(
                draw(o, i),
                draw(o),
                bool(kind & RELU),
                draw(o, about=1.0) if kind & (NORM | SCALE) else None,
                draw(o) if kind & NORM else None,
            )
            for i, o, kind in of_one
        ]
        for of_one in specs
    ]
    statistics, results, saved_numbers = [], [], 0
    for kind, *_ in kinds:
        statistics.append(saved_numbers)
        saved_numbers += 2 * rows if kind & NORM else 0
    for (kind, _, o, _), is_last in zip(kinds, last, strict=True):
        is_needed = kind != 0 or not is_last
        results.append(saved_numbers if is_needed else -1)
        saved_numbers += rows * o if is_needed else 0
    table = torch.tensor(
        [
            (kind | (FIRST if index == 0 else 0), i, o, result, of_row)
            for (kind, i, o, index), result, of_row in zip(kinds, results, statistics, strict=True)
        ]
    )
    tensors = [tensor for of_one in layers for layer in of_one for tensor in layer.parameters]
    parameters = torch.cat([tensor.flatten() for tensor in tensors])
    x = torch.randn(rows, columns, generator=generator)
    exact = [
        [
            PerceptronLayer(
                *(y if y is None or isinstance(y, bool) else y.double().requires_grad_() for y in layer)
            )
            for layer in of_one
        ]
        for of_one in layers
    ]
    exact_x = x.double().requires_grad_()
    expected = perceptrons_reference(exact_x, exact, first_columns)
    grad_output = torch.randn(expected.shape, generator=generator)
    leaves = [tensor for of_one in exact for layer in of_one for tensor in layer.parameters]
    expected_grads = torch.autograd.grad(expected, [exact_x, *leaves], grad_output.double())

    call = (pointer(table), len(table), pointer(torch.tensor(first_columns)), pointer(parameters))
    call += (ctypes.c_int64(rows), columns, pointer(x))
    firsts = torch.tensor(first_columns)  # keeps the memory of the call
    call = (*call[:2], pointer(firsts), *call[3:])
    output, saved = (torch.full(size, torch.nan) for size in (expected.shape, (saved_numbers,)))
    library.forward(*call, pointer(output), pointer(saved))
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)
    assert not saved.isnan().any()
    again = torch.full(expected.shape, torch.nan)
    library.forward(*call, pointer(again), pointer(None))  # without what a backward pass needs
    assert torch.equal(again, output)

    grad_input = torch.zeros_like(x) if wants_input else None
    grad_parameters = torch.full_like(parameters, torch.nan)
    library.backward(
        *call, pointer(saved), pointer(grad_output), runs, pointer(grad_input), pointer(grad_parameters)
    )
    found = grad_parameters.split([tensor.numel() for tensor in tensors])
    for grad, true in zip(found, expected_grads[1:], strict=True):
        assert (grad.view_as(true) - true).norm() <= 1e-5 * true.norm() + 1e-6
    if wants_input:
        assert (grad_input - expected_grads[0]).norm() <= 1e-5 * expected_grads[0].norm() + 1e-6


def test_a_row_that_is_no_number_stays_alone(library):
    layer = torch.tensor([(FIRST | RELU | NORM, 5, 20, 80, 0)])
    parameters, x = torch.randn(5 * 20 + 3 * 20), torch.randn(40, 5)
    first = torch.tensor([0])
    x[7, 3], x[21, 0] = torch.nan, torch.inf
    output = torch.zeros(40, 20)
    library.forward(
        pointer(layer),
        1,
        pointer(first),
        pointer(parameters),
        ctypes.c_int64(40),
        5,
        pointer(x),
        pointer(output),
        None,
    )
    assert output[7].isnan().all()
    assert output[[i for i in range(40) if i not in (7, 21)]].isfinite().all()
