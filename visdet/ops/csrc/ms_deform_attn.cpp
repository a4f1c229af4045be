// ms_deform_attn and ms_deform_attn_fused: schemas, and the functions for CPU tensors. cpu/kernels.h names the other
// parts.
#include "ms_deform_attn.h"

#include "cpu/dispatch.h"
#include "cpu/ms_deform_attn/host.h"

namespace visdet {
namespace {

// The tables of a call, whose levels are checked.
Geometry geometry_of(const MsDeformAttnProblem& problem, const Tensor& level_shapes, const Tensor& level_starts,
                     const int64_t* num_points) {
  const Tensor shapes = dense(level_shapes), starts = dense(level_starts);
  check_levels(problem, data_of(shapes), data_of(starts));
  return {problem, data_of(shapes), data_of(starts), num_points};
}

// fill(arrays) adds the samples.
template <typename Fill>
Tensor forward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& value, const Fill& fill) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.K == 0) return zero_(output);
  dispatch_value_type(value.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = arrays_of<T, A>(problem, geometry, data_of(value));
    fill(a);
    a.output = data_of(output);
    run_forward(problem, Copies(problem, geometry, torch::stable::get_num_threads()), a,
                [](auto... of_loop) { torch::stable::parallel_for(of_loop...); });
  });
  return output;
}

// fill(arrays) adds the samples and their gradients, none of which is empty.
template <typename Fill>
void backward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& grad_output,
              const Tensor& value_in, Tensor& grad_value, const Fill& fill) {
  const Tensor value = dense(value_in);
  dispatch_value_type(value.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = arrays_of<T, A>(problem, geometry, data_of(value));
    fill(a);
    a.grad_output = data_of(grad_output);
    a.grad_value = data_of(grad_value);
    a.gathered = !std::is_same<T, A>::value || pays_to_gather(problem);
    if (!a.gathered) zero_(grad_value);
    const auto run = best_kernels<MsDeformAttnBackward<T, A>>().head;
    parallel_each<A>(problem.B * problem.G, 1, backward_scratch(a),
                     [&](A* scratch, int64_t task) { run(a, scratch, task / problem.G, task % problem.G); });
  });
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes, level_starts, locations_in, weights_in);
  const Tensor value = dense(value_in), locations = dense(locations_in), weights = dense(weights_in);
  const Geometry geometry = geometry_of(problem, level_shapes, level_starts, nullptr);
  return forward(problem, geometry, value, [&](auto& a) {
    a.locations = data_of(locations);
    a.weights = data_of(weights);
  });
}

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes, const Tensor& level_starts,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool /*deterministic: always*/) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes, level_starts, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = dense(grad_output_in), locations = dense(locations_in), weights = dense(weights_in);
  const Geometry geometry = geometry_of(problem, level_shapes, level_starts, nullptr);
  Tensor grad_value = new_like(value_in), grad_locations = new_like(locations), grad_weights = new_like(weights);
  if (problem.Q == 0 || problem.C == 0 || problem.K == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }
  backward(problem, geometry, grad_output, value_in, grad_value, [&](auto& a) {
    a.locations = data_of(locations);
    a.weights = data_of(weights);
    a.grad_locations = data_of(grad_locations);
    a.grad_weights = data_of(grad_weights);
  });
  return {grad_value, grad_locations, grad_weights};
}

// FusedInputs has the inputs of the fused form, contiguous, and tables of what a unit of offset is.
struct FusedInputs {
  Tensor reference, offsets, logits;
  std::vector<int32_t> center;  // of MsDeformAttnArrays
  std::vector<double> scale;    // likewise
  std::vector<float> scale_float;

  FusedInputs(const Geometry& geometry, const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in)
      : reference(dense(reference_in)), offsets(dense(offsets_in)), logits(dense(logits_in)) {
    const bool boxes = reference.size(3) == 4;
    for (size_t k = 0; k < geometry.points.size(); ++k) {
      const double unit = 0.5 / static_cast<double>(geometry.points[k]);
      scale.push_back(boxes ? unit : 1.0 / geometry.W[k]);
      scale.push_back(boxes ? unit : 1.0 / geometry.H[k]);
      center.push_back(geometry.level[k] * (boxes ? 4 : 2));
      center.push_back(center.back() + 1);
    }
    scale.insert(scale.end(), 2 * kBlock, 0.0);
    center.insert(center.end(), 2 * kBlock, 0);
    scale_float.assign(scale.begin(), scale.end());
  }

  const float* scale_of(float) const { return scale_float.data(); }
  const double* scale_of(double) const { return scale.data(); }

  template <typename Arrays>
  void fill(Arrays& a) const {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.reference_points = data_of(reference);
    a.boxes = reference.size(3) == 4;
    a.in_sum_type = offsets.scalar_type() == reference.scalar_type();
    a.offsets = offsets.const_data_ptr(), a.logits = logits.const_data_ptr();
    a.center = center.data(), a.scale = scale_of(A{});
  }
};

Tensor ms_deform_attn_fused(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                            const Tensor& reference_points, const Tensor& offsets, const Tensor& logits,
                            std::vector<int64_t> num_points) {
  const auto problem =
      check_ms_deform_attn_fused(value_in, level_shapes, level_starts, reference_points, offsets, logits, num_points);
  const Tensor value = dense(value_in);
  const Geometry geometry = geometry_of(problem, level_shapes, level_starts, num_points.data());
  const FusedInputs inputs(geometry, reference_points, offsets, logits);
  return forward(problem, geometry, value, [&](auto& a) { inputs.fill(a); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ms_deform_attn_fused_backward(
    const Tensor& grad_output_in, const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
    const Tensor& reference_points, const Tensor& offsets, const Tensor& logits, std::vector<int64_t> num_points,
    bool needs_reference, bool /*deterministic: always*/) {
  const auto problem =
      check_ms_deform_attn_fused(value_in, level_shapes, level_starts, reference_points, offsets, logits, num_points);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = dense(grad_output_in);
  const Geometry geometry = geometry_of(problem, level_shapes, level_starts, num_points.data());
  const FusedInputs inputs(geometry, reference_points, offsets, logits);
  Tensor grad_value = new_like(value_in), grad_offsets = new_like(offsets), grad_logits = new_like(logits);
  const int64_t D = inputs.reference.size(3);
  const std::vector<int64_t> part_sizes{problem.B, problem.G, problem.Q, problem.L, D}, none{0};
  Tensor parts = new_empty(inputs.reference, needs_reference ? part_sizes : none);
  if (problem.Q == 0 || problem.C == 0 || problem.K == 0) {
    zero_(grad_value), zero_(grad_offsets), zero_(grad_logits), zero_(parts);
  } else {
    backward(problem, geometry, grad_output, value_in, grad_value, [&](auto& a) {
      inputs.fill(a);
      a.grad_offsets = grad_offsets.mutable_data_ptr(), a.grad_logits = grad_logits.mutable_data_ptr();
      a.grad_reference = data_of(needs_reference ? &parts : nullptr);
    });
  }
  const int64_t heads[] = {1};
  return {grad_value, needs_reference ? sum(parts, torch::headeronly::IntHeaderOnlyArrayRef(heads, 1)) : parts,
          grad_offsets, grad_logits};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "ms_deform_attn(Tensor value, Tensor level_shapes, Tensor level_starts, Tensor locations, Tensor weights)"
      " -> Tensor");
  m.def(
      "ms_deform_attn_backward(Tensor grad_output, Tensor value, Tensor level_shapes, Tensor level_starts,"
      " Tensor locations, Tensor weights, bool deterministic)"
      " -> (Tensor grad_value, Tensor grad_locations, Tensor grad_weights)");
  m.def(
      "ms_deform_attn_fused(Tensor value, Tensor level_shapes, Tensor level_starts, Tensor reference_points,"
      " Tensor offsets, Tensor logits, int[] num_points) -> Tensor");
  m.def(
      "ms_deform_attn_fused_backward(Tensor grad_output, Tensor value, Tensor level_shapes, Tensor level_starts,"
      " Tensor reference_points, Tensor offsets, Tensor logits, int[] num_points, bool needs_reference_points,"
      " bool deterministic)"
      " -> (Tensor grad_value, Tensor grad_reference_points, Tensor grad_offsets, Tensor grad_logits)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn_backward));
  m.impl("ms_deform_attn_fused", TORCH_BOX(&visdet::ms_deform_attn_fused));
  m.impl("ms_deform_attn_fused_backward", TORCH_BOX(&visdet::ms_deform_attn_fused_backward));
}
