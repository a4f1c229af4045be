// sample_sum and sample_dot: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
//
// Images are read as [B, H, W, pixel]: NCHW ones are copied into that order first. The sum and dots passes are parallel
// over (b, q), the scatter pass over (b, chunk of channels), so there are no races and no dependence on the number of
// threads.
#include "sample_ops.h"

#include "cpu/dispatch.h"
#include "cpu/sample/arrays.h"

namespace visdet {
namespace {

constexpr int64_t kGrain = 4;         // queries of one piece of work
constexpr int64_t kCopyPixels = 128;  // of one task of the copy

// Returns images as [B, H, W, pixel] in memory (see SampleArrays): themselves, or a copy.
template <typename T>
Tensor in_channels_last(const Tensor& images, const SampleProblem& problem) {
  if (problem.channels_last && problem.C >= kChunk) return images;
  const int64_t C = problem.C, pixels = problem.H * problem.W, pixel = std::max(C, kChunk);
  const Tensor given = problem.channels_last ? images : dense(images);
  Tensor copy = new_empty(images, {problem.B, problem.H, problem.W, pixel});
  if (C < kChunk) zero_(copy);
  const T* from = data_of(given);
  T* to = data_of(copy);
  if (problem.channels_last) {
    for (int64_t i = 0; i < problem.B * pixels; ++i) std::copy_n(from + i * C, C, to + i * pixel);
    return copy;
  }
  const auto run = best_kernels<SampleLayout<T, typename AccumulateType<T>::type>>().transpose_values;
  const int64_t tasks = ceil_of(pixels, kCopyPixels);
  parallel_each(problem.B * tasks, 1, [&](int64_t task) {
    const int64_t b = task / tasks, first = (task - b * tasks) * kCopyPixels, remaining = pixels - first;
    run(from + b * C * pixels + first, pixels, to + (b * pixels + first) * pixel, pixel, C,
        std::min(remaining, kCopyPixels));
  });
  return copy;
}

template <typename T, typename A>
SampleArrays<T, A> arrays_of(const SampleProblem& problem, const Tensor& images, const Tensor& samples) {
  SampleArrays<T, A> a{};
  a.B = problem.B, a.C = problem.C, a.H = problem.H, a.W = problem.W;
  a.Q = problem.Q, a.D = problem.D, a.G = problem.G, a.K = problem.K;
  a.pixel = std::max(problem.C, kChunk);
  a.images = data_of(images);
  a.samples = data_of(samples);
  return a;
}

template <typename T, typename A>
void run_sum(const SampleArrays<T, A>& a) {
  const auto run = best_kernels<SampleSum<T, A>>().query;
  parallel_each<SampleCorners<A>>(a.B * a.Q, kGrain, a.D + 1,
                                  [&](SampleCorners<A>* list, int64_t query) { run(a, list, query); });
}

template <typename T, typename A>
void run_dots(const SampleArrays<T, A>& a) {
  const auto run = best_kernels<SampleDot<T, A>>().query;
  torch::stable::parallel_for(0, a.B * a.Q, kGrain, [&](int64_t begin, int64_t end) {
    Scratch<SampleCorners<A>> list(a.D + 1);
    Scratch<A> scratch((a.G + 5) * (a.pixel + kAnyLanes) + (a.C - a.K) * a.D);
    for (int64_t query = begin; query < end; ++query) run(a, list.data(), scratch.data(), query);
  });
}

// Returns the gradient of images, in their layout and type. A task has its sums, few enough for a cache, in memory of
// its own.
template <typename T, typename A>
Tensor run_scatter(const SampleArrays<T, A>& a, const SampleProblem& problem, const Tensor& images) {
  Tensor grad = problem.channels_last ? empty_like(images) : new_like(images);
  T* to = data_of(grad);
  const auto& kernels = best_kernels<SampleScatter<T, A>>();
  const auto& layout = best_kernels<SampleLayout<T, A>>();
  const int64_t chunks = ceil_of(a.C, kChunk), pixels = a.H * a.W, queries = a.B * a.Q;
  const Scratch<SampleCorners<A>> lists(queries * (a.D + 1));  // every chunk of an image reads them
  const Scratch<int64_t> counts(queries);
  parallel_each(queries, kGrain, [&](int64_t query) {
    counts.data()[query] = kernels.list(a, query, lists.data() + query * (a.D + 1));
  });
  torch::stable::parallel_for(0, a.B * chunks, 1, [&](int64_t begin, int64_t end) {
    Scratch<A> scratch(a.G * kChunk + (a.C - a.K) * a.D), sums(pixels * kChunk);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / chunks, first = (task - b * chunks) * kChunk, count = std::min(kChunk, a.C - first);
      std::fill_n(sums.data(), pixels * kChunk, A(0));
      kernels.chunk(a, lists.data() + b * a.Q * (a.D + 1), counts.data() + b * a.Q, scratch.data(), sums.data(), b,
                    first);
      if (problem.channels_last) {
        for (int64_t p = 0; p < pixels; ++p)
          layout.round(sums.data() + p * kChunk, to + (b * pixels + p) * a.C + first, count);
      } else {
        layout.transpose_sums(sums.data(), kChunk, to + (b * a.C + first) * pixels, pixels, pixels, count);
      }
    }
  });
  return grad;
}

// Returns the sums in the type of images.
template <typename T, typename A>
Tensor rounded(const Tensor& sums, const Tensor& images) {
  if constexpr (std::is_same_v<T, A>) return sums;
  Tensor out = new_empty(images, sums.sizes());
  best_kernels<SampleLayout<T, A>>().round(data_of(sums), data_of(out), sums.numel());
  return out;
}

Tensor sample_sum(const Tensor& images_in, const Tensor& samples_in, const Tensor& weights_in) {
  const auto problem = check_sample_sum("sample_sum", images_in, samples_in, weights_in);
  const Tensor samples = dense(samples_in), weights = dense(weights_in);
  Tensor output = images_in;
  dispatch_value_type(images_in.scalar_type(), [&]<typename T, typename A>(T, A) {
    const Tensor images = in_channels_last<T>(images_in, problem);
    Tensor sums = new_empty(samples, {problem.B, problem.G, problem.Q, problem.C});
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of(weights), a.sums = data_of(sums);
    run_sum(a);
    output = rounded<T, A>(sums, images_in);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> sample_sum_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                       const Tensor& samples_in, const Tensor& weights_in,
                                                       bool /*deterministic: always*/) {
  constexpr const char* op = "sample_sum_backward";
  const auto problem = check_sample_sum(op, images_in, samples_in, weights_in);
  check_grouped(op, "grad_output", grad_output_in, {"C", problem.C}, samples_in, problem, problem.G);
  const Tensor grad_output = dense(grad_output_in), samples = dense(samples_in), weights = dense(weights_in);
  Tensor grad_images = images_in, grad_samples = new_like(samples), grad_weights = new_like(weights);
  dispatch_value_type(images_in.scalar_type(), [&]<typename T, typename A>(T, A) {
    const Tensor images = in_channels_last<T>(images_in, problem);
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of(weights), a.rows = data_of(grad_output);
    a.dots = data_of(grad_weights), a.grad_samples = data_of(grad_samples);
    run_dots(a);
    grad_images = run_scatter(a, problem, images_in);
  });
  return {grad_images, grad_samples, grad_weights};
}

Tensor sample_dot(const Tensor& images_in, const Tensor& samples_in, const Tensor& queries_in, const Tensor& depths_in,
                  int64_t num_octaves) {
  const auto problem = check_sample_dot("sample_dot", images_in, samples_in, queries_in, depths_in, num_octaves);
  const Tensor samples = dense(samples_in), queries = dense(queries_in), depths = dense(depths_in);
  Tensor output = images_in;
  dispatch_value_type(images_in.scalar_type(), [&]<typename T, typename A>(T, A) {
    const Tensor images = in_channels_last<T>(images_in, problem);
    Tensor dots = new_empty(samples, {problem.B, problem.G, problem.Q, problem.D});
    auto a = arrays_of<T, A>(problem, images, samples);
    a.rows = data_of(queries), a.depths = data_of(depths), a.dots = data_of(dots);
    run_dots(a);
    output = rounded<T, A>(dots, images_in);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_dot_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                               const Tensor& samples_in, const Tensor& queries_in,
                                                               const Tensor& depths_in, int64_t num_octaves,
                                                               bool /*deterministic: always*/) {
  constexpr const char* op = "sample_dot_backward";
  const auto problem = check_sample_dot(op, images_in, samples_in, queries_in, depths_in, num_octaves);
  check_grouped(op, "grad_output", grad_output_in, {"D", problem.D}, samples_in, problem, problem.G);
  const Tensor grad_output = dense(grad_output_in), samples = dense(samples_in), queries = dense(queries_in),
               depths = dense(depths_in);
  Tensor grad_images = images_in, grad_samples = new_like(samples), grad_queries = new_like(queries),
         grad_depths = new_like(depths);
  dispatch_value_type(images_in.scalar_type(), [&]<typename T, typename A>(T, A) {
    const Tensor images = in_channels_last<T>(images_in, problem);
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of(grad_output), a.rows = data_of(queries), a.depths = data_of(depths);
    a.sums = data_of(grad_queries);
    run_sum(a);
    a.grad_samples = data_of(grad_samples), a.grad_depths = data_of(grad_depths);
    run_dots(a);
    grad_images = run_scatter(a, problem, images_in);
  });
  return {grad_images, grad_samples, grad_queries, grad_depths};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("sample_sum(Tensor images, Tensor samples, Tensor weights) -> Tensor");
  m.def(
      "sample_sum_backward(Tensor grad_output, Tensor images, Tensor samples, Tensor weights, bool deterministic)"
      " -> (Tensor grad_images, Tensor grad_samples, Tensor grad_weights)");
  m.def("sample_dot(Tensor images, Tensor samples, Tensor queries, Tensor depths, int num_octaves) -> Tensor");
  m.def(
      "sample_dot_backward(Tensor grad_output, Tensor images, Tensor samples, Tensor queries, Tensor depths,"
      " int num_octaves, bool deterministic)"
      " -> (Tensor grad_images, Tensor grad_samples, Tensor grad_queries, Tensor grad_depths)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("sample_sum", TORCH_BOX(&visdet::sample_sum));
  m.impl("sample_sum_backward", TORCH_BOX(&visdet::sample_sum_backward));
  m.impl("sample_dot", TORCH_BOX(&visdet::sample_dot));
  m.impl("sample_dot_backward", TORCH_BOX(&visdet::sample_dot_backward));
}
