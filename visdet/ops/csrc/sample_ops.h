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

inline SampleProblem check_samples(const char* op, const Tensor& images, const Tensor& samples) {
  check_values(op, "images", images, {"B", "C", "H", "W"});
  check_beside(op, "samples", samples, {{"B", images.size(0)}, "Q", "D", 2}, "images", images);
  SampleProblem problem{};
  problem.B = images.size(0), problem.C = images.size(1), problem.H = images.size(2), problem.W = images.size(3);
  problem.Q = samples.size(1), problem.D = samples.size(2);
  VISDET_CHECK(op, problem.H > 0 && problem.W > 0 && problem.H <= INT32_MAX / problem.W,
               "images must have a positive height and width and fewer than 2^31 pixels, got ", problem.H, " x ",
               problem.W);
  problem.channels_last = is_channels_last(images);
  return problem;
}

// A [B, G, Q, last] tensor. groups: G, or -1 for any.
inline void check_grouped(const char* op, const char* name, const Tensor& tensor, const Dimension& last,
                          const Tensor& samples, const SampleProblem& problem, int64_t groups) {
  check_like(op, name, tensor, {{"B", problem.B}, {"G", groups}, {"Q", problem.Q}, last}, "samples", samples);
}

inline SampleProblem check_sample_sum(const char* op, const Tensor& images, const Tensor& samples,
                                      const Tensor& weights) {
  SampleProblem problem = check_samples(op, images, samples);
  check_grouped(op, "weights", weights, {"D", problem.D}, samples, problem, -1);
  problem.K = problem.C, problem.G = weights.size(1);
  return problem;
}

inline SampleProblem check_sample_dot(const char* op, const Tensor& images, const Tensor& samples,
                                      const Tensor& queries, const Tensor& depths, int64_t num_octaves) {
  SampleProblem problem = check_samples(op, images, samples);
  VISDET_CHECK(op, num_octaves >= 0 && num_octaves <= 30 && 2 * num_octaves <= problem.C,
               "num_octaves must be from 0 to 30, twice it at most the channels C = ", problem.C, " of images, got ",
               num_octaves);
  problem.K = problem.C - 2 * num_octaves;
  check_grouped(op, "queries", queries, {"C - 2 * num_octaves", problem.K}, samples, problem, -1);
  problem.G = queries.size(1);
  check_like(op, "depths", depths, {{"B", problem.B}, {"Q", problem.Q}, {"D", problem.D}}, "samples", samples);
  return problem;
}

}  // namespace visdet
