// perceptrons on CUDA. The contract is in visdet/ops/perceptrons.py.
#include <algorithm>
#include <tuple>
#include <vector>

#include "common/launch.h"
#include "cuda/perceptrons/backward.cuh"
#include "cuda/perceptrons/forward.cuh"

namespace visdet::perceptrons {
namespace {

constexpr const char* kOp = "perceptrons";

static_assert(sizeof(Shared) <= 64 << 10, "a block on sm_75 has at most 64 KB of shared memory");

// Which of a layer's parameters there are follows from its kind, and so does their order in the list of all parameters.
class Parameters {
 public:
  Parameters(const Tensor& input, const std::vector<Tensor>& tensors) : input_(input), tensors_(tensors) {}

  const Tensor& next(const char* name, Shape shape) {
    VISDET_CHECK(kOp, at_ < tensors_.size(), "parameters must have a tensor for each parameter of each layer, got ",
                 tensors_.size());
    const Tensor& tensor = tensors_[at_++];
    check_like(kOp, name, tensor, shape, "input", input_);
    VISDET_CHECK(kOp, tensor.is_contiguous(), "parameters must be contiguous");
    return tensor;
  }
  bool is_at_end() const { return at_ == tensors_.size(); }

 private:
  const Tensor& input_;
  const std::vector<Tensor>& tensors_;
  size_t at_ = 0;
};

struct Call {
  Net net{};
  int64_t saved_numbers = 0;
};

Call call_of(const Tensor& input, const std::vector<Tensor>& parameters, const std::vector<int64_t>& first_columns,
             const std::vector<int64_t>& kinds, double eps) {
  check_shape(kOp, "input", input, {"rows", "columns"});
  VISDET_CHECK(kOp, input.scalar_type() == ScalarType::Float && input.is_contiguous(),
               "input must be contiguous float32, got ", dtype_text(input));
  VISDET_CHECK(kOp, kinds.size() <= kMaxLayers && first_columns.size() <= kMaxPerceptrons && !kinds.empty(),
               "there may be at most ", kMaxLayers, " layers of ", kMaxPerceptrons, " perceptrons, got ", kinds.size(),
               " of ", first_columns.size());
  VISDET_CHECK(kOp, input.size(1) < (1 << 20), "input must have fewer than 2^20 columns, got ", input.size(1));
  Call call;
  Net& net = call.net;
  net.rows = input.size(0), net.columns = static_cast<int>(input.size(1)), net.eps = static_cast<float>(eps);
  Parameters all(input, parameters);
  for (const int64_t kind : kinds) {
    const bool is_first = kind & kFirst;
    VISDET_CHECK(kOp, is_first || net.count > 0, "the first kind must begin a perceptron");
    VISDET_CHECK(kOp, !is_first || net.count < static_cast<int>(first_columns.size()),
                 "first_columns must have a column for each perceptron, got ", first_columns.size());
    const bool has_factor = kind & (kNorm | kScale), has_offset = kind & kNorm;
    Layer& layer = net.layers[net.num_layers];
    const Tensor& weight = is_first
                               ? all.next("weight", {"outputs", "inputs"})
                               : all.next("weight", {"outputs", {"inputs", net.layers[net.num_layers - 1].outputs}});
    const int64_t outputs = weight.size(0), inputs = weight.size(1);
    VISDET_CHECK(kOp, inputs > 0 && outputs > 0 && inputs <= kMaxWidth && outputs <= kMaxWidth,
                 "layers must have widths of 1 to ", kMaxWidth, ", got a weight of ", shape_text(weight));
    if (is_first) {
      if (net.count > 0) net.outputs += net.layers[net.num_layers - 1].outputs;
      const int64_t column = first_columns[net.count];
      VISDET_CHECK(kOp, column >= 0 && column + inputs <= net.columns, "a perceptron reads columns ", column, " to ",
                   column + inputs, " of an input of ", net.columns);
      for (int p = 0; p < net.count; ++p) {
        const int other = net.perceptrons[p].first_column;
        VISDET_CHECK(kOp,
                     column + inputs <= other || other + net.layers[net.perceptrons[p].first_layer].inputs <= column,
                     "first_columns must be such that no two perceptrons read the same column");
      }
      net.perceptrons[net.count++] = {net.num_layers, 0, static_cast<int>(column), net.outputs};
    }
    layer.weight = data_of<float>(weight);
    layer.bias = data_of<float>(all.next("bias", {{"outputs", outputs}}));
    if (has_factor) layer.factor = data_of<float>(all.next("factor", {{"outputs", outputs}}));
    if (has_offset) layer.offset = data_of<float>(all.next("offset", {{"outputs", outputs}}));
    layer.inputs = static_cast<int>(inputs), layer.outputs = static_cast<int>(outputs);
    layer.kind = static_cast<int>(kind), layer.before = net.layer_outputs, layer.gradients = net.num_parameters;
    net.layer_outputs += layer.outputs;
    net.num_parameters += outputs * inputs + outputs * (1 + has_factor + has_offset);
    ++net.perceptrons[net.count - 1].num_layers, ++net.num_layers;
  }
  net.outputs += net.layers[net.num_layers - 1].outputs;
  VISDET_CHECK(kOp, all.is_at_end() && net.count == static_cast<int>(first_columns.size()),
               "parameters and first_columns must be those of the layers in kinds");
  // Statistics are pairs, so they come before what may have an odd length.
  for (int l = 0; l < net.num_layers; ++l) {
    if (!(net.layers[l].kind & kNorm)) continue;
    net.layers[l].statistics = call.saved_numbers;
    call.saved_numbers += 2 * net.rows;
  }
  for (int l = 0; l < net.num_layers; ++l) {
    const bool is_last = l + 1 == net.num_layers || (net.layers[l + 1].kind & kFirst);
    const bool is_needed = !is_last || (net.layers[l].kind & ~kFirst);
    net.layers[l].saved = is_needed ? call.saved_numbers : -1;
    if (is_needed) call.saved_numbers += net.rows * net.layers[l].outputs;
  }
  return call;
}

std::tuple<Tensor, Tensor> forward(const Tensor& input, std::vector<Tensor> parameters,
                                   std::vector<int64_t> first_columns, std::vector<int64_t> kinds, double eps,
                                   bool saves) {
  const Call call = call_of(input, parameters, first_columns, kinds, eps);
  const DeviceScope scope(input);
  Tensor output = new_empty(input, {call.net.rows, call.net.outputs});
  Tensor saved = new_empty(input, {saves ? call.saved_numbers : 0});
  launch(
      {kOp, "forward_kernel", scope, {ceil_div(call.net.rows, kBlockRows), call.net.count}, kThreads, sizeof(Shared)},
      forward_kernel, call.net, data_of<float>(input), mutable_data_of<float>(output),
      saves ? mutable_data_of<float>(saved) : nullptr);
  return {output, saved};
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input, const Tensor& saved,
                                    std::vector<Tensor> parameters, std::vector<int64_t> first_columns,
                                    std::vector<int64_t> kinds, bool wants_input) {
  constexpr const char* kBackward = "perceptrons_backward";
  const Call call = call_of(input, parameters, first_columns, kinds, 0);
  const Net& net = call.net;
  check_like(kBackward, "grad_output", grad_output, {{"rows", net.rows}, {"outputs", net.outputs}}, "input", input);
  check_like(kBackward, "saved", saved, {call.saved_numbers}, "input", input);
  VISDET_CHECK(kBackward, grad_output.is_contiguous() && saved.is_contiguous(), "tensors must be contiguous");
  const DeviceScope scope(input);
  Tensor grad_input = new_empty(input, {wants_input ? net.rows : 0, net.columns});
  if (wants_input) {  // Columns that no perceptron reads have no gradient.
    int64_t read = 0;
    for (int p = 0; p < net.count; ++p) read += net.layers[net.perceptrons[p].first_layer].inputs;
    if (read < net.columns) {
      fill_bytes(kBackward, scope, mutable_data_of<float>(grad_input), 0, net.rows * net.columns * sizeof(float));
    }
  }
  Tensor grad_parameters = new_empty(input, {net.num_parameters});
  Tensor grad_linear = new_empty(input, {net.rows * net.layer_outputs});
  int64_t tiles = 0;
  for (int l = 0; l < net.num_layers; ++l) tiles += weight_tiles(net.layers[l]);
  const int64_t wanted = ceil_div(4 * scope.device().multiprocessors, tiles);
  const int64_t runs = std::max<int64_t>(1, std::min(wanted, ceil_div(net.rows, 4 * kDepth)));
  const int64_t rows_of_run = std::max<int64_t>(1, ceil_div(ceil_div(net.rows, runs), kDepth)) * kDepth;
  Tensor parts = new_empty(input, {runs * net.num_parameters});
  const int64_t blocks = ceil_div(net.rows, kBlockRows);
  Tensor block_sums = new_empty(input, {blocks * net.layer_outputs * kVectors});
  launch({kBackward, "rows_kernel", scope, {blocks, net.count}, kThreads, sizeof(Shared)}, rows_kernel, net,
         data_of<float>(grad_output), data_of<float>(saved), wants_input ? mutable_data_of<float>(grad_input) : nullptr,
         mutable_data_of<float>(grad_linear), mutable_data_of<float>(block_sums));
  launch({kBackward, "weights_kernel", scope, {tiles, runs}, kWeightThreads}, weights_kernel, net,
         data_of<float>(input), data_of<float>(saved), data_of<float>(grad_linear), rows_of_run,
         mutable_data_of<float>(parts));
  launch({kBackward, "totals_kernel", scope, ceil_div(net.num_parameters, kTotals), kTotalThreads}, totals_kernel, net,
         data_of<float>(parts), static_cast<int>(runs), data_of<float>(block_sums), static_cast<int>(blocks),
         mutable_data_of<float>(grad_parameters));
  return {grad_input, grad_parameters};
}

}  // namespace
}  // namespace visdet::perceptrons

VISDET_CUDA_OPERATORS(perceptrons, m) {
  using namespace visdet::perceptrons;
  m.impl("perceptrons", TORCH_BOX(&forward));
  m.impl("perceptrons_backward", TORCH_BOX(&backward));
}
