// deformable_aggregation_with_depth on CUDA. The contract is in deformable_aggregation.h.
//
// Forward: a warp owns a query and a slab of its channels. It looks at 32 (point, camera) pairs at a time, one a lane,
// and then adds the pairs that count one after another, all lanes together, each its own channels. There are no
// atomics.
//
// Backward: a warp owns a query with all channels, and writes the gradients of its locations and weights. It adds the
// gradients of features and depths atomically. In deterministic mode it writes the gradient of each corner's depth
// instead, and scatter_kernel adds the rest: there a warp owns 32 channels, or the depths, of one map, and walks all
// samples of the map in order. That has little to do at a time, and takes many times as long.
#pragma once

#include <tuple>

#include "common/bilinear.h"
#include "common/corners.cuh"
#include "common/warp.cuh"
#include "cuda/deformable_aggregation/call.cuh"

namespace visdet::deformable_aggregation {
namespace {

constexpr const char* kDepthOp = "deformable_aggregation_with_depth";
constexpr const char* kDepthBackwardOp = "deformable_aggregation_with_depth_backward";
constexpr int kDepthThreads = 128;
constexpr int kDepthWarps = kDepthThreads / 32;
constexpr int kSlabChannels = 4;  // of a lane in the forward

template <typename T, typename TW, typename A>
struct DepthInputs {
  Maps maps;
  const T *features, *depths;  // [B, S, C] and [B, S, D], whose rows are feature_row and depth_row numbers apart
  const A* locations;          // [B, Q, P, V, 3]
  const TW* weights;           // [B, Q, P, V, L, G]
  int64_t B, S, C, D, Q, P, V, L, G, feature_row, depth_row;
};

// A pair that counts, in one level.
template <typename A>
struct DepthSample {
  int64_t row[4];  // of each corner among the rows of all images
  bool is_inside[4];
  A bilinear[4], depth[4], slope[4];  // the corner's number at the sample's depth, and its derivative; 0 outside
  A fx, fy, fraction;                 // fraction: of the way from the first depth to the second
  int64_t near;                       // the first depth
};

template <typename T, typename TW, typename A>
__device__ __forceinline__ DepthSample<A> depth_sample(const DepthInputs<T, TW, A>& in, int64_t b, const Map& map,
                                                       const A (&at)[3]) {
  DepthSample<A> sample;
  Bilinear<A> where;
  locate(pixel_of(at[0], map.W), pixel_of(at[1], map.H), map.H, map.W, where);
  where.corner_weights(sample.bilinear);
  const A below = floor(at[2]);
  sample.near = static_cast<int64_t>(below), sample.fraction = at[2] - below;
  sample.fx = where.fx, sample.fy = where.fy;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    sample.row[k] = b * in.S + map.start + where.index[k], sample.is_inside[k] = where.is_inside[k];
    const T* of_texel = in.depths + sample.row[k] * in.depth_row;
    const bool has_near = where.is_inside[k] && sample.near >= 0,
               has_far = where.is_inside[k] && sample.near + 1 < in.D;
    const A near = has_near ? to_accumulate(of_texel[sample.near]) : A(0);
    const A far = has_far ? to_accumulate(of_texel[sample.near + 1]) : A(0);
    sample.depth[k] = (1 - sample.fraction) * near + sample.fraction * far, sample.slope[k] = far - near;
  }
  return sample;
}

// Called by all lanes of a warp: calls f(i, location) for those of `count` pairs that count, in order. Pair i has its
// location at locations + i * step.
template <typename A, typename F>
__device__ __forceinline__ void for_counting_pairs(const A* locations, int64_t count, int64_t step, int64_t D,
                                                   const F& f) {
  for (int64_t first = 0; first < count; first += 32) {
    const int64_t i = first + threadIdx.x % 32;
    A mine[3] = {};  // does not count
    if (i < count) {
#pragma unroll
      for (int d = 0; d < 3; ++d) mine[d] = locations[i * step + d];
    }
    const bool counts = mine[0] > 0 && mine[0] < 1 && mine[1] > 0 && mine[1] < 1 && mine[2] > -1 && mine[2] < A(D);
    for (unsigned ballot = __ballot_sync(kAllLanes, counts); ballot != 0; ballot &= ballot - 1) {
      const int k = __ffs(ballot) - 1;
      const A at[3] = {__shfl_sync(kAllLanes, mine[0], k), __shfl_sync(kAllLanes, mine[1], k),
                       __shfl_sync(kAllLanes, mine[2], k)};
      f(first + k, at);
    }
  }
}

// The number of this thread's warp among those of all blocks.
__device__ __forceinline__ int64_t depth_warp() {
  return static_cast<int64_t>(blockIdx.x) * kDepthWarps + threadIdx.x / 32;
}

template <typename T, typename TW, typename A>
__global__ void __launch_bounds__(kDepthThreads)
    depth_forward_kernel(const __grid_constant__ DepthInputs<T, TW, A> in, T* __restrict__ output) {
  const int lane = threadIdx.x % 32;
  const int64_t queries = in.B * in.Q, pairs = in.P * in.V, group = in.C / in.G;
  const int64_t query = depth_warp() % queries, b = query / in.Q;
  const int64_t first_c = depth_warp() / queries * (32 * kSlabChannels) + lane;
  if (first_c - lane >= in.C) return;
  A sum[kSlabChannels] = {};
  int64_t c[kSlabChannels], g[kSlabChannels];  // those of channel 0 where the lane has none
#pragma unroll
  for (int j = 0; j < kSlabChannels; ++j) {
    c[j] = first_c + 32 * j < in.C ? first_c + 32 * j : 0;
    g[j] = c[j] / group;
  }
  for_counting_pairs(in.locations + 3 * query * pairs, pairs, 3, in.D, [&](int64_t i, const A(&at)[3]) {
    for (int64_t l = 0; l < in.L; ++l) {
      const Map map = map_of(in.maps, static_cast<int>(i % in.V * in.L + l));
      const TW* weights = in.weights + ((query * pairs + i) * in.L + l) * in.G;
      if (map.H == 0) {
#pragma unroll
        for (int j = 0; j < kSlabChannels; ++j) sum[j] = quiet_nan<A>();
        continue;
      }
      const DepthSample<A> sample = depth_sample(in, b, map, at);
#pragma unroll
      for (int j = 0; j < kSlabChannels; ++j) {
        A value = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          value +=
              sample.bilinear[k] * sample.depth[k] * to_accumulate(in.features[sample.row[k] * in.feature_row + c[j]]);
        }
        sum[j] += to_accumulate(weights[g[j]]) * value;
      }
    }
  });
#pragma unroll
  for (int j = 0; j < kSlabChannels; ++j) {
    if (first_c + 32 * j < in.C) output[query * in.C + c[j]] = from_accumulate<T>(sum[j]);
  }
}

// Adds the gradients of a sample's corners' depths to that of depths [B, S, D]. add(to, number).
template <typename A, typename Add>
__device__ __forceinline__ void scatter_depth(const DepthSample<A>& sample, const A (&of_depth)[4], int64_t D,
                                              A* grad_depths, const Add& add) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (!sample.is_inside[k]) continue;
    A* to = grad_depths + sample.row[k] * D + sample.near;
    if (lane == 2 * k && sample.near >= 0) add(to, (1 - sample.fraction) * of_depth[k]);
    if (lane == 2 * k + 1 && sample.near + 1 < D) add(to + 1, sample.fraction * of_depth[k]);
  }
}

// corner_grads: [B, Q, P, V, L, 4] in deterministic mode, else null. The gradients of locations and weights are zero
// before.
template <typename T, typename TW, typename A>
__global__ void __launch_bounds__(kDepthThreads)
    depth_backward_kernel(const __grid_constant__ DepthInputs<T, TW, A> in, const T* __restrict__ grad_output,
                          A* __restrict__ grad_features, A* __restrict__ grad_depths, A* __restrict__ grad_locations,
                          TW* __restrict__ grad_weights, A* __restrict__ corner_grads) {
  const int lane = threadIdx.x % 32;
  const int64_t query = depth_warp(), pairs = in.P * in.V, group = in.C / in.G, b = query / in.Q;
  if (query >= in.B * in.Q) return;
  for_counting_pairs(in.locations + 3 * query * pairs, pairs, 3, in.D, [&](int64_t i, const A(&at)[3]) {
    A grad_location[3] = {};
    for (int64_t l = 0; l < in.L; ++l) {
      const Map map = map_of(in.maps, static_cast<int>(i % in.V * in.L + l));
      const int64_t line = (query * pairs + i) * in.L + l;
      if (map.H == 0) {
        grad_location[0] = grad_location[1] = grad_location[2] = quiet_nan<A>();
        for (int64_t g = lane; g < in.G; g += 32) grad_weights[line * in.G + g] = from_accumulate<TW>(quiet_nan<A>());
        continue;
      }
      const DepthSample<A> sample = depth_sample(in, b, map, at);
      A of_corner[4] = {};  // the sum over the groups of weight * <grad_output, features of the corner>
      for (int64_t g = 0; g < in.G; ++g) {
        const A weight = to_accumulate(in.weights[line * in.G + g]);
        A dots[4] = {};
        for (int64_t c = g * group + lane; c < (g + 1) * group; c += 32) {
          const A grad = to_accumulate(grad_output[query * in.C + c]);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (!sample.is_inside[k]) continue;
            dots[k] += grad * to_accumulate(in.features[sample.row[k] * in.feature_row + c]);
            if (corner_grads) continue;
            atomicAdd(grad_features + sample.row[k] * in.C + c, sample.bilinear[k] * sample.depth[k] * weight * grad);
          }
        }
        sum_lanes(dots);
        A of_weight = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          of_weight += sample.bilinear[k] * sample.depth[k] * dots[k];
          of_corner[k] += weight * dots[k];
        }
        if (lane == 0) grad_weights[line * in.G + g] = from_accumulate<TW>(of_weight);
      }
      A of_depth[4], of_value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        of_depth[k] = sample.bilinear[k] * of_corner[k], of_value[k] = sample.depth[k] * of_corner[k];
        grad_location[2] += sample.slope[k] * of_depth[k];
        if (corner_grads && lane == k) corner_grads[line * 4 + k] = of_depth[k];
      }
      const Interpolation<A> by = interpolate_numbers(of_value, sample.fx, sample.fy);
      grad_location[0] += by.by_x * A(map.W), grad_location[1] += by.by_y * A(map.H);
      if (!corner_grads) {
        scatter_depth(sample, of_depth, in.D, grad_depths, [](A* to, A number) { atomicAdd(to, number); });
      }
    }
    if (lane != 0) return;
#pragma unroll
    for (int d = 0; d < 3; ++d) grad_locations[3 * (query * pairs + i) + d] = grad_location[d];
  });
}

// A warp owns 32 channels of a map of an image, or with slab == slabs - 1 its depths.
template <typename T, typename TW, typename A>
__global__ void __launch_bounds__(kDepthThreads)
    depth_scatter_kernel(const __grid_constant__ DepthInputs<T, TW, A> in, const T* __restrict__ grad_output,
                         const A* __restrict__ corner_grads, A* __restrict__ grad_features, A* __restrict__ grad_depths,
                         int64_t slabs) {
  const int64_t maps = in.V * in.L, task = depth_warp(), slab = task / (in.B * maps);
  if (slab >= slabs) return;
  const int64_t b = task % (in.B * maps) / maps, m = task % maps, v = m / in.L, l = m % in.L;
  const Map map = map_of(in.maps, static_cast<int>(m));
  if (map.H == 0) return;
  const int64_t samples = in.Q * in.P, c = slab * 32 + threadIdx.x % 32, g = c < in.C ? c / (in.C / in.G) : 0;
  const A* locations = in.locations + 3 * (b * samples * in.V + v);
  for_counting_pairs(locations, samples, 3 * in.V, in.D, [&](int64_t n, const A(&at)[3]) {
    const DepthSample<A> sample = depth_sample(in, b, map, at);
    const int64_t line = ((b * samples + n) * in.V + v) * in.L + l;
    if (slab == slabs - 1) {
      const A of_depth[4] = {corner_grads[line * 4], corner_grads[line * 4 + 1], corner_grads[line * 4 + 2],
                             corner_grads[line * 4 + 3]};
      scatter_depth(sample, of_depth, in.D, grad_depths, [](A* to, A number) { *to += number; });
      __syncwarp();  // another lane may add to the same number next
    } else if (c < in.C) {
      const A grad =
          to_accumulate(in.weights[line * in.G + g]) * to_accumulate(grad_output[(b * in.Q + n / in.P) * in.C + c]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (!sample.is_inside[k]) continue;
        grad_features[sample.row[k] * in.C + c] += sample.bilinear[k] * sample.depth[k] * grad;
      }
    }
  });
}

// The tensors of a call in the form that the kernels read.
struct DepthCall {
  const DeformableAggregationProblem& problem;
  const CallMaps& maps;
  const Tensor &features, &depths, &locations, &weights;

  template <typename T, typename TW, typename A>
  DepthInputs<T, TW, A> inputs() const {
    return {maps.maps,
            data_of<T>(features),
            data_of<T>(depths),
            data_of<A>(locations),
            data_of<TW>(weights),
            problem.B,
            problem.S,
            problem.C,
            problem.D,
            problem.Q,
            problem.P,
            problem.V,
            problem.L,
            problem.G,
            features.stride(1),
            depths.stride(1)};
  }
};

Tensor forward_with_depth(const Tensor& features_in, const Tensor& depths_in, const Tensor& level_shapes,
                          const Tensor& level_starts, const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem =
      check_aggregation_with_depth(features_in, depths_in, level_shapes, level_starts, locations_in, weights_in);
  check_sizes(problem);
  const DeviceScope scope(features_in);
  const Tensor features = rows_of(features_in), depths = rows_of(depths_in), locations = dense(locations_in),
               weights = dense(weights_in);
  const CallMaps maps = maps_of_call(kDepthOp, scope, problem, level_shapes, level_starts, features);
  Tensor output = new_empty(features, {problem.B, problem.Q, problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0 || weights.numel() == 0) return zero_(output);
  const DepthCall call{problem, maps, features, depths, locations, weights};
  dispatch_types(features, weights, [&]<typename T, typename TW, typename A>(T, TW, A) {
    const int64_t warps = problem.B * problem.Q * ceil_div(problem.C, 32 * kSlabChannels);
    launch({kDepthOp, "depth_forward_kernel", scope, ceil_div(warps, kDepthWarps), kDepthThreads},
           depth_forward_kernel<T, TW, A>, call.inputs<T, TW, A>(), mutable_data_of<T>(output));
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_with_depth(const Tensor& grad_output_in, const Tensor& features_in,
                                                               const Tensor& depths_in, const Tensor& level_shapes,
                                                               const Tensor& level_starts, const Tensor& locations_in,
                                                               const Tensor& weights_in, bool deterministic) {
  const auto problem =
      check_aggregation_with_depth(features_in, depths_in, level_shapes, level_starts, locations_in, weights_in);
  check_deformable_aggregation_grad(problem, grad_output_in, features_in, kDepthBackwardOp);
  check_sizes(problem);
  const DeviceScope scope(features_in);
  const Tensor grad_output = dense(grad_output_in), features = rows_of(features_in), depths = rows_of(depths_in),
               locations = dense(locations_in), weights = dense(weights_in);
  const CallMaps maps = maps_of_call(kDepthBackwardOp, scope, problem, level_shapes, level_starts, features);
  const ScalarType type = features.scalar_type(), sums = accumulate_dtype(type);
  Tensor of_features = new_zeros(features, {problem.B, problem.S, problem.C}, sums),
         of_depths = new_zeros(features, {problem.B, problem.S, problem.D}, sums), grad_locations = new_like(locations),
         grad_weights = new_like(weights);
  zero_(grad_locations), zero_(grad_weights);
  if (of_features.numel() > 0 && grad_output.numel() > 0 && weights.numel() > 0) {
    const DepthCall call{problem, maps, features, depths, locations, weights};
    const int64_t corners = deterministic ? 4 * problem.B * problem.Q * problem.P * problem.V * problem.L : 0;
    const Tensor corner_grads = new_empty(features, {corners}, sums);
    dispatch_types(features, weights, [&]<typename T, typename TW, typename A>(T, TW, A) {
      const auto in = call.inputs<T, TW, A>();
      A* of_corners = deterministic ? mutable_data_of<A>(corner_grads) : nullptr;
      launch({kDepthBackwardOp, "depth_backward_kernel", scope, ceil_div(problem.B * problem.Q, kDepthWarps),
              kDepthThreads},
             depth_backward_kernel<T, TW, A>, in, data_of<T>(grad_output), mutable_data_of<A>(of_features),
             mutable_data_of<A>(of_depths), mutable_data_of<A>(grad_locations), mutable_data_of<TW>(grad_weights),
             of_corners);
      if (!deterministic) return;
      const int64_t slabs = ceil_div(problem.C, 32) + 1, warps = problem.B * problem.V * problem.L * slabs;
      launch({kDepthBackwardOp, "depth_scatter_kernel", scope, ceil_div(warps, kDepthWarps), kDepthThreads},
             depth_scatter_kernel<T, TW, A>, in, data_of<T>(grad_output), of_corners, mutable_data_of<A>(of_features),
             mutable_data_of<A>(of_depths), slabs);
    });
  }
  if (sums == type) return {of_features, of_depths, grad_locations, grad_weights};
  Tensor grad_features = new_like(features), grad_depths = new_like(depths);
  copy_(grad_features, of_features), copy_(grad_depths, of_depths);
  return {grad_features, grad_depths, grad_locations, grad_weights};
}

}  // namespace
}  // namespace visdet::deformable_aggregation
