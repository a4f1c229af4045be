// ms_deform_attn on the CPU. The contract is in ../ms_deform_attn.h; how this file is compiled, in vec.h.
//
// Forward: parallel over (b, q); for each head the samples that count are listed once (four row offsets, four merged
// weights), then the list is summed in registers, a block of channels at a time. Backward: parallel over (b, g): one
// task owns all of grad_value[b, :, g, :], which it sums in a contiguous [S, C] scratch (2 MB at the usual sizes: it
// stays in the cache), so there are no races and the result does not depend on the number of threads.
#include "../common/bilinear.h"
#include "vec.h"

namespace visdet {

// The tensors of one call, all contiguous.
template <typename T, typename A>
struct MsDeformAttnArrays {
  int64_t B, S, G, C, Q, L, P;
  const int64_t* level_shapes;  // [L, 2]
  const int64_t* level_starts;  // [L]
  const T* value;               // [B, S, G, C]
  const A* locations;           // [B, Q, G, L, P, 2]
  const A* weights;             // [B, Q, G, L, P]
  T* output;                    // [B, Q, G, C]           forward
  const T* grad_output;         // [B, Q, G, C]           backward
  T* grad_value;                // [B, S, G, C]
  A* grad_locations;            // [B, Q, G, L, P, 2]
  A* grad_weights;              // [B, Q, G, L, P]
};

namespace VISDET_ISA {

constexpr int kMaxSamples = 64;  // samples listed before they are summed: 3.5 KB, in the first-level cache

// The samples of one query and head that count: rows of value[b, :, g, :] and their weights.
template <typename A>
struct SampleList {
  int count = 0;
  int64_t offset[kMaxSamples][4];  // element offset of each corner
  A weight[kMaxSamples][4];        // attention weight * corner weight
};

// acc[c] += the listed samples, for NV registers of channels.
template <int NV, typename T, typename A>
VISDET_INLINE void sum_samples(const SampleList<A>& list, const T* value, A* acc) {
  constexpr int W = kLanes<A>;
  Vec<A> sum[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) sum[v] = load(acc + v * W);
  for (int i = 0; i < list.count; ++i) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const T* row = value + list.offset[i][k];
      const A w = list.weight[i][k];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) sum[v] += load(row + v * W) * w;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store(acc + v * W, sum[v]);
}

template <typename T, typename A>
VISDET_INLINE void sum_all_channels(const SampleList<A>& list, const T* value, A* acc, int64_t C) {
  constexpr int W = kLanes<A>;
  int64_t c = 0;
  for (; c + 4 * W <= C; c += 4 * W) sum_samples<4>(list, value + c, acc + c);
  for (; c + 2 * W <= C; c += 2 * W) sum_samples<2>(list, value + c, acc + c);
  for (; c + W <= C; c += W) sum_samples<1>(list, value + c, acc + c);
  if (c == C) return;
  for (int i = 0; i < list.count; ++i) {
    for (int k = 0; k < 4; ++k) {
      const T* row = value + list.offset[i][k];
      for (int64_t t = c; t < C; ++t) acc[t] += to_accumulate(row[t]) * list.weight[i][k];
    }
  }
}

// Rows [begin, end) of the flattened (b, q); acc is a scratch of C numbers.
template <typename T, typename A>
void forward_rows(const MsDeformAttnArrays<T, A>& a, A* acc, int64_t begin, int64_t end) {
  const int64_t row_stride = a.G * a.C;
  for (int64_t row = begin; row < end; ++row) {
    const T* value_b = a.value + row / a.Q * a.S * row_stride;
    for (int64_t g = 0; g < a.G; ++g) {
      const int64_t first = (row * a.G + g) * a.L * a.P;
      const T* value = value_b + g * a.C;
      for (int64_t c = 0; c < a.C; ++c) acc[c] = 0;
      SampleList<A> list;
      for (int64_t l = 0; l < a.L; ++l) {
        const int32_t H = static_cast<int32_t>(a.level_shapes[2 * l]),
                      W = static_cast<int32_t>(a.level_shapes[2 * l + 1]);
        const int64_t start = a.level_starts[l];
        for (int64_t p = 0; p < a.P; ++p) {
          const int64_t sample = first + l * a.P + p;
          const A x = a.locations[2 * sample] * W - A(0.5), y = a.locations[2 * sample + 1] * H - A(0.5);
          Bilinear<A> at;
          if (!locate(x, y, H, W, at)) continue;
          A corner_weight[4];
          at.corner_weights(corner_weight);
          for (int k = 0; k < 4; ++k) {
            list.offset[list.count][k] = (start + at.index[k]) * row_stride;
            list.weight[list.count][k] = corner_weight[k] * a.weights[sample];
          }
          if (++list.count == kMaxSamples) {
            sum_all_channels(list, value, acc, a.C);
            list.count = 0;
          }
        }
      }
      sum_all_channels(list, value, acc, a.C);
      T* out = a.output + (row * a.G + g) * a.C;
      for (int64_t c = 0; c < a.C; ++c) from_accumulate(acc[c], out[c]);
    }
  }
}

// dots[k] += <g, corner k> and grad rows += coefficient[k] * g, for NV registers of channels.
template <int NV, typename T, typename A>
VISDET_INLINE void scatter_block(const A* g, const T* const (&rows)[4], A* const (&grads)[4], const A (&coefficient)[4],
                                 Vec<A> (&dots)[4]) {
  constexpr int W = kLanes<A>;
  Vec<A> g_vec[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) g_vec[v] = load(g + v * W);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      dots[k] += load(rows[k] + v * W) * g_vec[v];
      if (coefficient[k] != 0) store(grads[k] + v * W, load(grads[k] + v * W) + g_vec[v] * coefficient[k]);
    }
  }
}

template <typename T, typename A>
VISDET_INLINE void scatter_all_channels(const A* g, const T* value, A* grad, const int64_t (&offset)[4],
                                        const int64_t (&grad_offset)[4], const A (&coefficient)[4], int64_t C,
                                        A (&d)[4]) {
  constexpr int W = kLanes<A>;
  Vec<A> dots[4] = {};
  const T* rows[4];
  A* grads[4];
  int64_t c = 0;
  const auto advance = [&](int64_t to) {
    for (int k = 0; k < 4; ++k) rows[k] = value + offset[k] + to, grads[k] = grad + grad_offset[k] + to;
  };
  for (; c + 2 * W <= C; c += 2 * W) advance(c), scatter_block<2>(g + c, rows, grads, coefficient, dots);
  for (; c + W <= C; c += W) advance(c), scatter_block<1>(g + c, rows, grads, coefficient, dots);
  for (int k = 0; k < 4; ++k) {
    d[k] = horizontal_sum<A>(dots[k]);
    for (int64_t t = c; t < C; ++t) {
      d[k] += to_accumulate(value[offset[k] + t]) * g[t];
      grad[grad_offset[k] + t] += coefficient[k] * g[t];
    }
  }
}

// One task: all gradients of batch entry b and head g. grad is a scratch of S * C numbers, g_row one of C.
template <typename T, typename A>
void backward_head(const MsDeformAttnArrays<T, A>& a, A* grad, A* g_row, int64_t b, int64_t g) {
  const int64_t row_stride = a.G * a.C;
  const T* value = a.value + b * a.S * row_stride + g * a.C;
  std::memset(grad, 0, sizeof(A) * static_cast<size_t>(a.S * a.C));
  for (int64_t q = 0; q < a.Q; ++q) {
    const int64_t row = (b * a.Q + q) * a.G + g;
    for (int64_t c = 0; c < a.C; ++c) g_row[c] = to_accumulate(a.grad_output[row * a.C + c]);
    for (int64_t l = 0; l < a.L; ++l) {
      const int32_t H = static_cast<int32_t>(a.level_shapes[2 * l]),
                    W = static_cast<int32_t>(a.level_shapes[2 * l + 1]);
      const int64_t start = a.level_starts[l];
      for (int64_t p = 0; p < a.P; ++p) {
        const int64_t sample = (row * a.L + l) * a.P + p;
        const A x = a.locations[2 * sample] * W - A(0.5), y = a.locations[2 * sample + 1] * H - A(0.5);
        Bilinear<A> at;
        if (!locate(x, y, H, W, at)) {
          a.grad_weights[sample] = a.grad_locations[2 * sample] = a.grad_locations[2 * sample + 1] = 0;
          continue;
        }
        const A weight = a.weights[sample];
        A corner_weight[4], coefficient[4], d[4];
        int64_t offset[4], grad_offset[4];
        at.corner_weights(corner_weight);
        for (int k = 0; k < 4; ++k) {
          coefficient[k] = corner_weight[k] * weight;
          offset[k] = (start + at.index[k]) * row_stride;
          grad_offset[k] = (start + at.index[k]) * a.C;
        }
        scatter_all_channels(g_row, value, grad, offset, grad_offset, coefficient, a.C, d);
        A grad_weight = 0;
        for (int k = 0; k < 4; ++k) {
          if (!at.is_inside[k]) d[k] = 0;
          grad_weight += corner_weight[k] * d[k];
        }
        a.grad_weights[sample] = grad_weight;
        a.grad_locations[2 * sample] = W * weight * ((1 - at.fy) * (d[1] - d[0]) + at.fy * (d[3] - d[2]));
        a.grad_locations[2 * sample + 1] = H * weight * ((1 - at.fx) * (d[2] - d[0]) + at.fx * (d[3] - d[1]));
      }
    }
  }
  for (int64_t s = 0; s < a.S; ++s) {
    T* out = a.grad_value + (b * a.S + s) * row_stride + g * a.C;
    for (int64_t c = 0; c < a.C; ++c) from_accumulate(grad[s * a.C + c], out[c]);
  }
}

#define VISDET_INSTANTIATE(T, A)                                                           \
  template void forward_rows<T, A>(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t); \
  template void backward_head<T, A>(const MsDeformAttnArrays<T, A>&, A*, A*, int64_t, int64_t);
VISDET_INSTANTIATE(float, float)
VISDET_INSTANTIATE(double, double)
VISDET_INSTANTIATE(Float16, float)
VISDET_INSTANTIATE(BFloat16, float)
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "../ms_deform_attn.h"
#include "dispatch.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                      \
  namespace isa {                                                                \
  template <typename T, typename A>                                              \
  void forward_rows(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t);      \
  template <typename T, typename A>                                              \
  void backward_head(const MsDeformAttnArrays<T, A>&, A*, A*, int64_t, int64_t); \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

// Queries a thread takes at the least: some microseconds of work, above the cost of waking a thread.
constexpr int64_t kForwardGrain = 16;

template <typename T, typename A>
MsDeformAttnArrays<T, A> arrays_of(const MsDeformAttnProblem& problem, const Tensor& value, const Tensor& level_shapes,
                                   const Tensor& level_starts, const Tensor& locations, const Tensor& weights) {
  MsDeformAttnArrays<T, A> a{};
  a.B = problem.B, a.S = problem.S, a.G = problem.G, a.C = problem.C, a.Q = problem.Q, a.L = problem.L, a.P = problem.P;
  a.level_shapes = level_shapes.const_data_ptr<int64_t>();
  a.level_starts = level_starts.const_data_ptr<int64_t>();
  a.value = static_cast<const T*>(value.const_data_ptr());
  a.locations = static_cast<const A*>(locations.const_data_ptr());
  a.weights = static_cast<const A*>(weights.const_data_ptr());
  return a;
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  const Tensor value = contiguous(value_in), level_shapes = contiguous(level_shapes_in),
               level_starts = contiguous(level_starts_in), locations = contiguous(locations_in),
               weights = contiguous(weights_in);
  check_levels(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;

  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, value, level_shapes, level_starts, locations, weights);
    a.output = static_cast<T*>(output.mutable_data_ptr());
    const auto run = VISDET_BEST_ISA(forward_rows, T, A);
    torch::stable::parallel_for(0, problem.B * problem.Q, kForwardGrain, [&](int64_t begin, int64_t end) {
      Scratch<A> acc(problem.C);
      run(a, acc.data(), begin, end);
    });
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool /*deterministic: always*/) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = contiguous(grad_output_in), value = contiguous(value_in),
               level_shapes = contiguous(level_shapes_in), level_starts = contiguous(level_starts_in),
               locations = contiguous(locations_in), weights = contiguous(weights_in);
  check_levels(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());
  Tensor grad_value = new_empty(value, value.sizes()), grad_locations = new_empty(locations, locations.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  if (problem.Q == 0 || problem.C == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }

  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, value, level_shapes, level_starts, locations, weights);
    a.grad_output = static_cast<const T*>(grad_output.const_data_ptr());
    a.grad_value = static_cast<T*>(grad_value.mutable_data_ptr());
    a.grad_locations = static_cast<A*>(grad_locations.mutable_data_ptr());
    a.grad_weights = static_cast<A*>(grad_weights.mutable_data_ptr());
    const auto run = VISDET_BEST_ISA(backward_head, T, A);
    torch::stable::parallel_for(0, problem.B * problem.G, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> grad(problem.S * problem.C), g_row(problem.C);
      for (int64_t task = begin; task < end; ++task) {
        run(a, grad.data(), g_row.data(), task / problem.G, task % problem.G);
      }
    });
  });
  return {grad_value, grad_locations, grad_weights};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn_backward));
}

#endif  // VISDET_ISA_BASELINE
