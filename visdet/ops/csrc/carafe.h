// carafe: the contract.
//
// features [B, C, H, W], masks [B, G * K * K, H * s, W * s] of the same type, K odd, G divides C. With (h, w) =
// (y / s, x / s) rounded down, g = c / (C / G) likewise, and features 0 outside the map:
//
//   output[b, c, y, x] = sum over i, j < K of masks[b, (g * K + i) * K + j, y, x] * features[b, c, h + i - K / 2, w + j
//   - K / 2]
//
// Sums are taken in float32, float64 for float64. Every output and every gradient is a sum with one owner, taken in a
// fixed order: nothing is added atomically.
#pragma once

#include <cstdint>

namespace visdet {

struct CarafeProblem {
  int64_t B, C, H, W, G, K, s;
};

template <typename T, typename A>
struct CarafeArrays : CarafeProblem {
  const T* features;     // [B, C, H, W]
  const T* masks;        // [B, G * K * K, H * s, W * s]
  const T* grad_output;  // [B, C, H * s, W * s]
  A* phases;             // [B, G, H, s * s, K * K, W]: masks, later their gradients
  T* output;             // [B, C, H * s, W * s]
  T* grad_features;      // [B, C, H, W]
  T* grad_masks;         // as masks
};

template <typename T, typename A>
struct CarafeKernels {
  // These copy row h of group g of image b: from masks to phases, and from the gradients of phases to those of masks.
  void (*masks_to_phases)(const CarafeArrays<T, A>& a, int64_t b, int64_t g, int64_t h);
  void (*phases_to_masks)(const CarafeArrays<T, A>& a, int64_t b, int64_t g, int64_t h);
  // Writes the output in row h of group g of image b. scratch: [K * (W + K - 1) + W].
  void (*upsample_row)(const CarafeArrays<T, A>& a, A* scratch, int64_t b, int64_t g, int64_t h);
  // Writes the gradient of phases in row h to `grads` [s * s, K * K, W]. scratch is as above.
  void (*grad_masks_row)(const CarafeArrays<T, A>& a, A* grads, A* scratch, int64_t b, int64_t g, int64_t h);
  // Writes the gradient of channel c of image b. scratch: [(H + K - 1) * (W + K - 1) + W].
  void (*grad_features_map)(const CarafeArrays<T, A>& a, A* scratch, int64_t b, int64_t c);
};

}  // namespace visdet

#ifndef VISDET_ISA  // The files of the CPU kernels include nothing of torch.
#include <tuple>

#include "common/each.h"

namespace visdet {

inline void check_carafe_shape(const char* op, const char* name, const Tensor& tensor, const Tensor& features,
                               int64_t channels, int64_t s) {
  check_like(op, name, tensor, {features.size(0), channels, features.size(2) * s, features.size(3) * s}, "features",
             features);
}

inline CarafeProblem check_carafe(const char* op, const Tensor& features, const Tensor& masks, int64_t kernel_size,
                                  int64_t group_size, int64_t scale_factor) {
  check_values(op, "features", features, {"B", "C", "H", "W"});
  VISDET_CHECK(op, kernel_size >= 1 && kernel_size % 2 == 1 && kernel_size < 256,
               "kernel_size must be odd and below 256, got ", kernel_size);
  VISDET_CHECK(op, scale_factor >= 1 && scale_factor < 256, "scale_factor must be from 1 to 255, got ", scale_factor);
  VISDET_CHECK(op, group_size >= 1 && features.size(1) % group_size == 0, "features must have a multiple of ",
               group_size, " channels, got ", features.size(1));
  check_carafe_shape(op, "masks", masks, features, kernel_size * kernel_size * group_size, scale_factor);
  return {features.size(0), features.size(1), features.size(2), features.size(3),
          group_size,       kernel_size,      scale_factor};
}

template <typename T, typename A>
CarafeArrays<T, A> carafe_arrays(const CarafeProblem& p, const Tensor& features, const Tensor& masks) {
  CarafeArrays<T, A> a{p};
  a.features = data_of(features);
  a.masks = data_of(masks);
  return a;
}

// These compute the output, and both gradients.
template <typename T, typename A>
void carafe_upsample(const OnDevice& device, CarafeArrays<T, A>& a);
template <typename T, typename A>
void carafe_gradients(const OnDevice& device, CarafeArrays<T, A>& a);

inline Tensor carafe_forward(const Tensor& features_in, const Tensor& masks_in, int64_t K, int64_t G, int64_t s) {
  constexpr const char* op = "carafe";
  const auto problem = check_carafe(op, features_in, masks_in, K, G, s);
  const OnDevice device(op, features_in);
  const Tensor features = dense(features_in), masks = dense(masks_in);
  Tensor output = new_empty(features, {problem.B, problem.C, problem.H * s, problem.W * s});
  if (output.numel() == 0) return output;
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = carafe_arrays<T, A>(problem, features, masks);
    a.output = data_of(output);
    carafe_upsample(device, a);
  });
  return output;
}

inline std::tuple<Tensor, Tensor> carafe_backward(const Tensor& grad_output_in, const Tensor& features_in,
                                                  const Tensor& masks_in, int64_t K, int64_t G, int64_t s) {
  constexpr const char* op = "carafe_backward";
  const auto problem = check_carafe(op, features_in, masks_in, K, G, s);
  check_carafe_shape(op, "grad_output", grad_output_in, features_in, problem.C, s);
  const OnDevice device(op, features_in);
  const Tensor grad_output = dense(grad_output_in), features = dense(features_in), masks = dense(masks_in);
  Tensor grad_features = new_like(features), grad_masks = new_like(masks);
  if (grad_output.numel() == 0) return {zero_(grad_features), zero_(grad_masks)};
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = carafe_arrays<T, A>(problem, features, masks);
    a.grad_output = data_of(grad_output);
    a.grad_features = data_of(grad_features);
    a.grad_masks = data_of(grad_masks);
    carafe_gradients(device, a);
  });
  return {grad_features, grad_masks};
}

VISDET_OPERATORS(carafe, m) {
  m.impl("carafe", TORCH_BOX(&carafe_forward));
  m.impl("carafe_backward", TORCH_BOX(&carafe_backward));
}

}  // namespace visdet
#endif
