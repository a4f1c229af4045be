// sample_sum and sample_dot on CUDA: the passes that each of them takes. The contract, and the three passes, are in
// sample_ops.h; how the work of a pass is laid out, above its kernel in sum.cuh, dot.cuh and scatter.cuh.
#include <algorithm>
#include <tuple>
#include <type_traits>

#include "common/torch.h"
#include "cuda/sample/dot.cuh"
#include "cuda/sample/scatter.cuh"
#include "cuda/sample/sum.cuh"

namespace visdet::sample {
namespace {

// Calls passes(inputs) with the inputs of the passes that an operator takes.
template <typename Passes>
void run(const char* op, const SampleProblem& problem, const DeviceScope& scope, const Tensor& images,
         const Tensor& samples, const Passes& passes) {
  dispatch_value_type(images.scalar_type(), [&]<typename T, typename A>(T, A) {
    const Images<T> in_order(images, problem);
    passes(Inputs<T, A>{op, scope, sizes_of(problem), in_order, samples});
  });
}

// The result in the type of the images that the operator was given, see readable().
Tensor in_type_of(const Tensor& images, const Tensor& result) {
  const ScalarType type = images.scalar_type();
  return result.scalar_type() == type ? result : converted(result, type);
}

// An empty tensor in the layout of images: channels last, or contiguous.
Tensor like_images(const Tensor& images, const SampleProblem& problem) {
  return problem.channels_last ? empty_like(images) : new_like(images);
}

Tensor sample_sum(const Tensor& images_in, const Tensor& samples_in, const Tensor& weights_in) {
  constexpr const char* op = "sample_sum";
  const auto problem = check_sample_sum(op, images_in, samples_in, weights_in);
  check_sizes(op, problem);
  const DeviceScope scope(images_in);
  const Tensor images = readable(images_in, problem), samples = contiguous_pairs(samples_in),
               weights = dense(weights_in);
  Tensor output = new_empty(images, {problem.B, problem.G, problem.Q, problem.C});
  run(op, problem, scope, images, samples, [&](const auto& in) {
    using In = std::decay_t<decltype(in)>;
    in.copy_by_runs([&](const ImageRun& run) {
      launch_sum(in, run, data_of<typename In::Sum>(weights), mutable_data_of<typename In::Value>(output));
    });
  });
  return in_type_of(images_in, output);
}

std::tuple<Tensor, Tensor, Tensor> sample_sum_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                       const Tensor& samples_in, const Tensor& weights_in,
                                                       bool deterministic) {
  constexpr const char* op = "sample_sum_backward";
  const auto problem = check_sample_sum(op, images_in, samples_in, weights_in);
  check_grouped(op, "grad_output", grad_output_in, {"C", problem.C}, samples_in, problem, problem.G);
  check_sizes(op, problem);
  const DeviceScope scope(images_in);
  const Tensor images = readable(images_in, problem), grad_output = contiguous_pairs(grad_output_in),
               samples = contiguous_pairs(samples_in), weights = dense(weights_in);
  Tensor grad_images = like_images(images, problem), grad_samples = new_like(samples), grad_weights = new_like(weights);
  if (problem.G == 0) zero_(grad_samples);
  run(op, problem, scope, images, samples, [&](const auto& in) {
    using A = typename std::decay_t<decltype(in)>::Sum;
    const A *coefficients = data_of(weights), *rows = data_of(grad_output), *depths = nullptr;
    const DotsOutputs<A, A> out{data_of(grad_weights), data_of(grad_samples), nullptr};
    in.copy_all();
    const CellCounts cells = launch_dots<true, true>(in, in.all(), coefficients, rows, depths, out);
    launch_scatter(in, cells, coefficients, rows, depths, grad_images, problem.channels_last, deterministic);
  });
  return {in_type_of(images_in, grad_images), grad_samples, grad_weights};
}

Tensor sample_dot(const Tensor& images_in, const Tensor& samples_in, const Tensor& queries_in, const Tensor& depths_in,
                  int64_t num_octaves) {
  constexpr const char* op = "sample_dot";
  const auto problem = check_sample_dot(op, images_in, samples_in, queries_in, depths_in, num_octaves);
  check_sizes(op, problem);
  const DeviceScope scope(images_in);
  const Tensor images = readable(images_in, problem), samples = contiguous_pairs(samples_in),
               queries = contiguous_pairs(queries_in), depths = dense(depths_in);
  Tensor output = new_empty(images, {problem.B, problem.G, problem.Q, problem.D});
  run(op, problem, scope, images, samples, [&](const auto& in) {
    using In = std::decay_t<decltype(in)>;
    using A = typename In::Sum;
    const DotsOutputs<typename In::Value, A> out{data_of(output), nullptr, nullptr};
    in.copy_by_runs([&](const ImageRun& run) {
      launch_dots<true, false>(in, run, static_cast<const A*>(nullptr), data_of<A>(queries), data_of<A>(depths), out);
    });
  });
  return in_type_of(images_in, output);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_dot_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                               const Tensor& samples_in, const Tensor& queries_in,
                                                               const Tensor& depths_in, int64_t num_octaves,
                                                               bool deterministic) {
  constexpr const char* op = "sample_dot_backward";
  const auto problem = check_sample_dot(op, images_in, samples_in, queries_in, depths_in, num_octaves);
  check_grouped(op, "grad_output", grad_output_in, {"D", problem.D}, samples_in, problem, problem.G);
  check_sizes(op, problem);
  const DeviceScope scope(images_in);
  const Tensor images = readable(images_in, problem), grad_output = dense(grad_output_in),
               samples = contiguous_pairs(samples_in), queries = contiguous_pairs(queries_in),
               depths = dense(depths_in);
  Tensor grad_images = like_images(images, problem), grad_samples = new_like(samples), grad_queries = new_like(queries),
         grad_depths = new_like(depths);
  if (problem.G == 0) zero_(grad_samples), zero_(grad_depths);
  run(op, problem, scope, images, samples, [&](const auto& in) {
    using A = typename std::decay_t<decltype(in)>::Sum;
    const A *coefficients = data_of(grad_output), *rows = data_of(queries), *depth_data = data_of(depths);
    in.copy_all();
    launch_sum(in, in.all(), coefficients, mutable_data_of<A>(grad_queries));
    const DotsOutputs<A, A> out{nullptr, data_of(grad_samples), data_of(grad_depths)};
    const CellCounts cells = launch_dots<false, true>(in, in.all(), coefficients, rows, depth_data, out);
    launch_scatter(in, cells, coefficients, rows, depth_data, grad_images, problem.channels_last, deterministic);
  });
  return {in_type_of(images_in, grad_images), grad_samples, grad_queries, grad_depths};
}

}  // namespace
}  // namespace visdet::sample

VISDET_CUDA_OPERATORS(sample, m) {
  m.impl("sample_sum", TORCH_BOX(&visdet::sample::sample_sum));
  m.impl("sample_sum_backward", TORCH_BOX(&visdet::sample::sample_sum_backward));
  m.impl("sample_dot", TORCH_BOX(&visdet::sample::sample_dot));
  m.impl("sample_dot_backward", TORCH_BOX(&visdet::sample::sample_dot_backward));
}
