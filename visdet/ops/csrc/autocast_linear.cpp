// A linear layer under autocast, forward and backward, on any device. Each direction is one call from Python, since
// separate calls cost the host more time than their kernels take. The contract is in
// visdet/ops/fused/autocast_linear.py.
#include <vector>

#include "common/matrices.h"

namespace visdet {
namespace {

// Returns the output [..., out], and for the backward the input [..., in] and the weight [out, in], all in this type.
std::vector<Tensor> autocast_linear(const Tensor& input, const Tensor& weight, const Tensor& bias, ScalarType type) {
  VISDET_CHECK("autocast_linear",
               input.dim() > 0 && weight.dim() == 2 && bias.dim() == 1 && bias.size(0) == weight.size(0) &&
                   input.size(input.dim() - 1) == weight.size(1),
               "input must be [..., C], weight [D, C] and bias [D], got ", shape_text(input), ", ", shape_text(weight),
               " and ", shape_text(bias));
  const std::vector<Tensor> all = converted({weight, bias, input}, type);
  const Tensor output = call("aten::linear", "", as_matrix(all[2]), all[0], std::optional<Tensor>(all[1]));
  std::vector<int64_t> sizes = sizes_of(input);
  sizes.back() = weight.size(0);
  return {shaped(output, sizes), all[2], all[0]};
}

// Returns the gradients of weight and bias in float32, and that of input, if it is needed, in this type.
std::vector<Tensor> autocast_linear_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                             bool needs_input, ScalarType type) {
  const Tensor grad = as_matrix(dense(grad_output));
  std::vector<Tensor> grads{
      product(transposed(grad), as_matrix(input), ScalarType::Float),
      call("visdet::column_sums", "", grad, ScalarType::Float),
  };
  if (needs_input) grads.push_back(shaped(product(grad, weight, type), sizes_of(input)));
  return grads;
}

// Returns the sums of a matrix's columns in this type: the matrix's own, or float32 for 16 bits. CUDA has a kernel;
// elsewhere a product with ones takes no longer than torch's sum, and a tenth of its time where 16 bits are summed in
// float32.
Tensor column_sums(const Tensor& matrix, ScalarType type) {
  const Tensor ones = torch::stable::fill_(torch::stable::new_empty(matrix, {1, matrix.size(0)}), 1.0);
  return shaped(product(ones, matrix, type), {matrix.size(1)});
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("autocast_linear(Tensor input, Tensor weight, Tensor bias, ScalarType dtype) -> Tensor[]");
  m.def(
      "autocast_linear_backward(Tensor grad_output, Tensor input, Tensor weight, bool needs_input, ScalarType dtype)"
      " -> Tensor[]");
  m.def("column_sums(Tensor matrix, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CompositeExplicitAutograd, m) {
  m.impl("autocast_linear", TORCH_BOX(&visdet::autocast_linear));
  m.impl("autocast_linear_backward", TORCH_BOX(&visdet::autocast_linear_backward));
  m.impl("column_sums", TORCH_BOX(&visdet::column_sums));
}
