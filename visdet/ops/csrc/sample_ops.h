// sample_sum and sample_dot: the contract.
//
// images [B, C, H, W] (NCHW or channels last), samples [B, Q, D, 2] = (x, y) in -1..1; s[b, q, d, :] is the bilinear
// sample of images[b] at pixel ((x + 1) * W / 2 - 0.5, (y + 1) * H / 2 - 0.5), border rule of common/bilinear.h.
//
//   sample_sum[b, g, q, c] = sum over d of weights[b, g, q, d] * s[b, q, d, c]
//   sample_dot[b, g, q, d] = sum over c of query[b, g, q, d, c] * s[b, q, d, c], where the first channels of query are
//     queries[b, g, q, :] and the last 2 * octaves, 2 k + phase of them, sin(2 pi 2^k depths[b, q, d] + phase pi / 2)
//
// Three passes do all of it, each given coefficients [B, G, Q, D] and rows [B, G, Q, K], K <= C:
//   sum      [B, G, Q, K] of coefficients * s      sample_sum; the gradient of queries (coefficients: grad_output)
//   dots     [B, G, Q, D] of rows with s           sample_dot; the gradient of weights (rows: grad_output)
//   scatter  coefficients * rows to the corners    the gradient of images
// With h = sum over g of coefficients * rows (and of the encoding), the gradient of a sample is that of <s, h>, which
// the dots pass takes along.
//
// samples and depths are float64 for float64 images, float32 otherwise; weights and queries have that type too, and
// every sum is taken in it. Outputs have the type of images.
#pragma once

#include "common/checks.h"

namespace visdet {

struct SampleProblem {
  int64_t B, C, H, W, Q, D, G;
  int64_t K;           // channels of rows
  bool channels_last;  // images are [B, H, W, C] in memory
};

inline void check_on_device(const char* op, const char* name, const Tensor& tensor, const Tensor& images) {
  VISDET_CHECK(op, on_device_of(images, tensor), name, " must be on the device of images");
}

inline SampleProblem check_samples(const char* op, const Tensor& images, const Tensor& samples) {
  VISDET_CHECK(op, images.dim() == 4, "images must be [B, C, H, W], got ", shape_text(images));
  VISDET_CHECK(op, is_value_dtype(images.scalar_type()), "images must be float64, float32, float16 or bfloat16, got ",
               dtype_text(images));
  VISDET_CHECK(op, samples.dim() == 4 && samples.size(0) == images.size(0) && samples.size(3) == 2,
               "samples must be [B, Q, D, 2] = [", images.size(0), ", Q, D, 2], got ", shape_text(samples));
  const ScalarType type = accumulate_dtype(images.scalar_type());
  VISDET_CHECK(op, samples.scalar_type() == type, "samples must be ", torch::headeronly::toString(type),
               " for images of type ", dtype_text(images), ", got ", dtype_text(samples));
  check_on_device(op, "samples", samples, images);
  SampleProblem problem{};
  problem.B = images.size(0), problem.C = images.size(1), problem.H = images.size(2), problem.W = images.size(3);
  problem.Q = samples.size(1), problem.D = samples.size(2);
  VISDET_CHECK(op, problem.H > 0 && problem.W > 0 && problem.H <= INT32_MAX / problem.W,
               "images must have a positive height and width and fewer than 2^31 pixels, got ", problem.H, " x ",
               problem.W);
  problem.channels_last = is_channels_last(images);
  return problem;
}

// A [B, G, Q, last] tensor; takes G from it, or compares.
inline void check_grouped(const char* op, const char* name, const char* last_name, const Tensor& tensor, int64_t last,
                          const Tensor& samples, SampleProblem& problem, bool takes_groups) {
  VISDET_CHECK(op,
               tensor.dim() == 4 && tensor.size(0) == problem.B && (takes_groups || tensor.size(1) == problem.G) &&
                   tensor.size(2) == problem.Q && tensor.size(3) == last,
               name, " must be [B, G, Q, ", last_name, "] = [", problem.B, ", ",
               takes_groups ? std::string("G") : std::to_string(problem.G), ", ", problem.Q, ", ", last, "], got ",
               shape_text(tensor));
  VISDET_CHECK(op, tensor.scalar_type() == samples.scalar_type(), name, " must have samples' type ",
               dtype_text(samples), ", got ", dtype_text(tensor));
  check_on_device(op, name, tensor, samples);
  if (takes_groups) problem.G = tensor.size(1);
}

inline SampleProblem check_sample_sum(const char* op, const Tensor& images, const Tensor& samples,
                                      const Tensor& weights) {
  SampleProblem problem = check_samples(op, images, samples);
  problem.K = problem.C;
  check_grouped(op, "weights", "D", weights, problem.D, samples, problem, true);
  return problem;
}

inline SampleProblem check_sample_dot(const char* op, const Tensor& images, const Tensor& samples,
                                      const Tensor& queries, const Tensor& depths, int64_t num_octaves) {
  SampleProblem problem = check_samples(op, images, samples);
  VISDET_CHECK(op, num_octaves >= 0 && num_octaves <= 30 && 2 * num_octaves <= problem.C,
               "num_octaves must be from 0 to 30, twice it at most the channels C = ", problem.C, " of images, got ",
               num_octaves);
  problem.K = problem.C - 2 * num_octaves;
  check_grouped(op, "queries", "C - 2 * num_octaves", queries, problem.K, samples, problem, true);
  VISDET_CHECK(
      op,
      depths.dim() == 3 && depths.size(0) == problem.B && depths.size(1) == problem.Q && depths.size(2) == problem.D,
      "depths must be [B, Q, D] = [", problem.B, ", ", problem.Q, ", ", problem.D, "], got ", shape_text(depths));
  VISDET_CHECK(op, depths.scalar_type() == samples.scalar_type(), "depths must have samples' type ",
               dtype_text(samples), ", got ", dtype_text(depths));
  check_on_device(op, "depths", depths, images);
  return problem;
}

}  // namespace visdet
