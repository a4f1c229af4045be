// deformable_aggregation_fused on CUDA. One kernel makes locations and weights, and the kernels of
// deformable_aggregation follow. In the backward, one kernel follows the kernels of deformable_aggregation's backward.
// The contract is in deformable_aggregation_fused.h.
#pragma once

#include <algorithm>
#include <limits>
#include <tuple>
#include <type_traits>

#include "common/launch.h"
#include "common/values.cuh"
#include "common/warp.cuh"
#include "cuda/deformable_aggregation/visible.cuh"
#include "deformable_aggregation_fused.h"

namespace visdet::deformable_aggregation {
namespace {

// The operator's two directions; deformable_aggregation.cu defines them.
Tensor forward(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts, const Tensor& locations,
               const Tensor& weights);
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& features,
                                            const Tensor& level_shapes, const Tensor& level_starts,
                                            const Tensor& locations, const Tensor& weights, bool deterministic);

}  // namespace
}  // namespace visdet::deformable_aggregation

namespace visdet::deformable_aggregation_fused {
namespace {

using deformable_aggregation::is_visible;

constexpr const char* kFusedOp = "deformable_aggregation_fused";
constexpr const char* kFusedBackwardOp = "deformable_aggregation_fused_backward";

struct FusedSizes {
  int64_t Q;
  int32_t V, L, P, G;
  int32_t packs;  // of neighbouring groups, which a thread works on together
  int32_t width;  // a power of two of lanes with different packs: as many as there are packs, but at most a warp
  bool has_camera, has_keep;
};

// The logits of a query, of packs of K groups.
template <typename TL>
struct Logits {
  const TL* of_query;   // [L, P, G] beside of_camera
  const TL* of_camera;  // [V, L, P, G]; those of the query alone, if they differ from camera to camera
  int64_t stride;       // entries of a camera

  // What is added to the logits of all cameras at entry j = (l * P + p) * G + g.
  template <int K, typename A>
  __device__ __forceinline__ void read_base(int64_t j, A (&base)[K]) const {
    if (of_query != nullptr) {
      load_pack<TL>(of_query + j, base);
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k) base[k] = 0;
    }
  }
  template <int K, typename A>
  __device__ __forceinline__ void read(int v, int64_t j, const A (&base)[K], A (&logits)[K]) const {
    load_pack<TL>(of_camera + v * stride + j, logits);
#pragma unroll
    for (int k = 0; k < K; ++k) logits[k] += base[k];
  }
};
template <typename TL>
__device__ __forceinline__ Logits<TL> logits_of(const TL* logits, const TL* camera_logits, const FusedSizes& sizes,
                                                int64_t query) {
  const int64_t stride = static_cast<int64_t>(sizes.L) * sizes.P * sizes.G, b = query / sizes.Q;
  if (!sizes.has_camera) return {nullptr, logits + query * sizes.V * stride, stride};
  return {logits + query * stride, camera_logits + b * sizes.V * stride, stride};
}

// A camera: the first three rows of its matrix, and the size of its image.
template <typename A>
struct Camera {
  A row[3][4], width, height;

  __device__ __forceinline__ Camera(const A* projection, const A* image_wh, int64_t camera) {
    for (int i = 0; i < 12; ++i) row[i / 4][i % 4] = projection[camera * 16 + i];
    width = image_wh[camera * 2], height = image_wh[camera * 2 + 1];
  }
  __device__ __forceinline__ A pixel(int i, const A (&at)[3]) const {
    return row[i][0] * at[0] + row[i][1] * at[1] + row[i][2] * at[2] + row[i][3];
  }
};

constexpr int kMaxThreads = 256;  // of a block
constexpr int kMaxWarps = kMaxThreads / 32;
template <int K>
constexpr int kColumns = 32 * K;  // groups that a block works on at a time

// Which groups a thread works on: K from g on, with every `members`-th thing from `first` on.
template <int K>
struct Share {
  int g, first, members;
  bool is_active;
  __device__ __forceinline__ Share(const FusedSizes& sizes, int from) {
    const int pack = from + threadIdx.x % sizes.width;
    is_active = pack < sizes.packs;
    g = (is_active ? pack : 0) * K;
    first = threadIdx.x / sizes.width, members = blockDim.x / sizes.width;
  }
};

// Called by all threads of a block: calls f(pair, l) for the levels of the visible pairs, each with one lane of every
// pack. `listed` is for the warp alone.
template <typename A, typename F>
__device__ __forceinline__ void for_visible(const Pack<A, 2>* locations, const FusedSizes& sizes, int (&listed)[32],
                                            const F& f) {
  const int lane = threadIdx.x % 32, pairs = sizes.P * sizes.V;
  for (int from = threadIdx.x - lane; from < pairs; from += blockDim.x) {
    const bool visible = from + lane < pairs && is_visible(locations[from + lane]);
    const unsigned ballot = __ballot_sync(kAllLanes, visible);
    if (visible) listed[rank_in_ballot(ballot)] = from + lane;
    __syncwarp();
    const int count = __popc(ballot) * sizes.L;
    for (int n = lane / sizes.width; n < count; n += 32 / sizes.width) {
      const int i = n / sizes.L;
      f(listed[i], n - i * sizes.L);
    }
    __syncwarp();  // listed may be written again
  }
}

// Called by all threads of a block: combines each of the K numbers of a share over the block, in a fixed order, by f,
// which is associative and commutative up to rounding.
template <int K, typename A, typename F>
__device__ __forceinline__ void combine_block(A (&values)[K], int width, A (&shared)[kMaxWarps][kColumns<K>],
                                              const F& f) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % width * K;
#pragma unroll
  for (int k = 0; k < K; ++k) values[k] = reduce_lanes(values[k], f, width);
  if (lane < width) {
#pragma unroll
    for (int k = 0; k < K; ++k) shared[warp][column + k] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    values[k] = shared[0][column + k];
    for (int w = 1; w < blockDim.x / 32; ++w) values[k] = f(values[k], shared[w][column + k]);
  }
  __syncthreads();  // shared may be written again
}

template <typename A>
__device__ __forceinline__ A sum_of(A a, A b) {
  return a + b;
}

// A block owns a query. Its threads first project the points into the cameras. Then each computes maximum and sum of
// the softmax of its groups over a share of the logits, which it reads once; these are combined. Last, the warps write
// the weights of the visible pairs, since those of other pairs are never read.
// stats [B * Q, 2, G]: maximum and reciprocal sum, for the backward.
template <typename TL, typename A, int K>
__global__ void __launch_bounds__(kMaxThreads)
    prepare_kernel(const A* __restrict__ key_points, const A* __restrict__ projection, const A* __restrict__ image_wh,
                   const TL* __restrict__ logits, const TL* __restrict__ camera_logits, const bool* __restrict__ keep,
                   A keep_scale, Pack<A, 2>* __restrict__ locations, A* __restrict__ weights, A* __restrict__ stats,
                   const FusedSizes sizes) {
  __shared__ A shared[kMaxWarps][kColumns<K>];
  __shared__ int listed[kMaxWarps][32];
  const int V = sizes.V, L = sizes.L, P = sizes.P, G = sizes.G, pairs = P * V;
  const int64_t query = blockIdx.x, b = query / sizes.Q;
  Pack<A, 2>* my_locations = locations + query * pairs;
  for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
    const int p = pair / V, v = pair - p * V;
    const Camera<A> camera(projection, image_wh, b * V + v);
    const A* point = key_points + (query * P + p) * 3;
    const A at[3] = {point[0], point[1], point[2]};
    const A raw = camera.pixel(2, at), depth = raw < A(kMinDepth) ? A(kMinDepth) : raw;  // NaN stays
    const bool counts = !sizes.has_keep || keep[(query * V + v) * P + p];
    my_locations[pair] = {counts ? camera.pixel(0, at) / depth / camera.width : A(-1),
                          counts ? camera.pixel(1, at) / depth / camera.height : A(-1)};
  }
  const Logits<TL> my_logits = logits_of(logits, camera_logits, sizes, query);
  for (int from = 0; from < sizes.packs; from += sizes.width) {
    const Share<K> mine(sizes, from);
    A most[K], sum[K];
#pragma unroll
    for (int k = 0; k < K; ++k) most[k] = std::numeric_limits<A>::lowest(), sum[k] = 0;
    for (int i = mine.first; i < L * P; i += mine.members) {
      const int64_t j = static_cast<int64_t>(i) * G + mine.g;
      A base[K];
      my_logits.read_base(j, base);
#pragma unroll 3
      for (int v = 0; v < V; ++v) {
        A x[K];
        my_logits.read(v, j, base, x);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const A above = x[k] - most[k], other = exp(-abs(above));  // NaN makes the sum NaN
          sum[k] = above > 0 ? sum[k] * other + 1 : sum[k] + other;
          if (above > 0) most[k] = x[k];
        }
      }
    }
    A own[K];
#pragma unroll
    for (int k = 0; k < K; ++k) own[k] = most[k];
    combine_block(most, sizes.width, shared, [](A a, A b) { return b > a ? b : a; });
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] *= exp(own[k] - most[k]);
    combine_block(sum, sizes.width, shared, sum_of<A>);
    A reciprocal[K];
#pragma unroll
    for (int k = 0; k < K; ++k) reciprocal[k] = 1 / sum[k];
    if (mine.is_active && threadIdx.x < sizes.width) {
      store_pack(stats + query * 2 * G + mine.g, most);
      store_pack(stats + (query * 2 + 1) * G + mine.g, reciprocal);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) reciprocal[k] *= keep_scale;
    // The barriers of combine_block are also those after which all locations are written.
    for_visible(my_locations, sizes, listed[threadIdx.x / 32], [&](int pair, int l) {
      const int p = pair / V, v = pair - p * V;
      const int64_t j = (static_cast<int64_t>(l) * P + p) * G + mine.g;
      A base[K], x[K];
      my_logits.read_base(j, base);
      my_logits.read(v, j, base, x);
#pragma unroll
      for (int k = 0; k < K; ++k) x[k] = exp(x[k] - most[k]) * reciprocal[k];
      if (mine.is_active) store_pack(weights + ((query * pairs + pair) * L + l) * G + mine.g, x);
    });
  }
}

// A block owns a query and writes the gradients of its logits, through the softmax, and of its points, through the
// projection. grad_pairs [B * Q, V, L, P, G] are the gradients of the logits for each camera, from which the gradients
// of camera_logits are made. It is null without camera_logits.
template <typename TL, typename A, int K>
__global__ void __launch_bounds__(kMaxThreads)
    finish_kernel(const A* __restrict__ key_points, const A* __restrict__ projection, const A* __restrict__ image_wh,
                  const TL* __restrict__ logits, const TL* __restrict__ camera_logits, A keep_scale,
                  const Pack<A, 2>* __restrict__ locations, const A* __restrict__ weights, const A* __restrict__ stats,
                  const Pack<A, 2>* __restrict__ grad_locations, const A* __restrict__ grad_weights,
                  A* __restrict__ grad_key_points, TL* __restrict__ grad_logits, A* __restrict__ grad_pairs,
                  const FusedSizes sizes) {
  __shared__ A shared[kMaxWarps][kColumns<K>];
  __shared__ int listed[kMaxWarps][32];
  const int V = sizes.V, L = sizes.L, P = sizes.P, G = sizes.G, pairs = P * V, lane = threadIdx.x % 32;
  const int64_t query = blockIdx.x, b = query / sizes.Q;
  const Pack<A, 2>* my_locations = locations + query * pairs;
  const A *my_weights = weights + query * pairs * L * G, *my_grads = grad_weights + query * pairs * L * G;
  const int lanes = V > 16 ? 32 : V > 8 ? 16 : V > 4 ? 8 : 4;  // of a point
  for (int from = (threadIdx.x - lane) / lanes; from < P; from += blockDim.x / lanes) {
    const int p = from + lane / lanes;
    A grad[3] = {};
    for (int v = lane % lanes; v < V && p < P; v += lanes) {
      const int pair = p * V + v;
      const Pack<A, 2> location = my_locations[pair];
      if (!is_visible(location)) continue;
      const A* point = key_points + (query * P + p) * 3;
      const A at[3] = {point[0], point[1], point[2]};
      const Camera<A> camera(projection, image_wh, b * V + v);
      const Pack<A, 2> grad_location = grad_locations[query * pairs + pair];
      const A raw = camera.pixel(2, at), depth = raw < A(kMinDepth) ? A(kMinDepth) : raw;
      const A x = grad_location.at[0] / camera.width / depth, y = grad_location.at[1] / camera.height / depth;
      const A z = raw < A(kMinDepth) ? A(0) : -(x * location.at[0] * camera.width + y * location.at[1] * camera.height);
#pragma unroll
      for (int i = 0; i < 3; ++i) grad[i] += camera.row[0][i] * x + camera.row[1][i] * y + camera.row[2][i] * z;
    }
    sum_lanes(grad, 1, lanes);
    if (lane % lanes == 0 && p < P) {
      for (int i = 0; i < 3; ++i) grad_key_points[(query * P + p) * 3 + i] = grad[i];
    }
  }
  const Logits<TL> my_logits = logits_of(logits, camera_logits, sizes, query);
  const int64_t stride = my_logits.stride;
  for (int from = 0; from < sizes.packs; from += sizes.width) {
    const Share<K> mine(sizes, from);
    A dot[K] = {};
    for_visible(my_locations, sizes, listed[threadIdx.x / 32], [&](int pair, int l) {
      A weight[K], grad[K];
      load_pack<A>(my_weights + (static_cast<int64_t>(pair) * L + l) * G + mine.g, weight);
      load_pack<A>(my_grads + (static_cast<int64_t>(pair) * L + l) * G + mine.g, grad);
#pragma unroll
      for (int k = 0; k < K; ++k) dot[k] += weight[k] * grad[k];
    });
    combine_block(dot, sizes.width, shared, sum_of<A>);
    A most[K], reciprocal[K];
    load_pack<A>(stats + query * 2 * G + mine.g, most);
    load_pack<A>(stats + (query * 2 + 1) * G + mine.g, reciprocal);
    for (int i = mine.first; i < L * P && mine.is_active; i += mine.members) {
      const int l = i / P, p = i - l * P;
      const int64_t j = static_cast<int64_t>(i) * G + mine.g;
      A base[K], sum[K] = {};
      my_logits.read_base(j, base);
#pragma unroll 3
      for (int v = 0; v < V; ++v) {
        const int pair = p * V + v;
        A grad[K] = {}, x[K];
        if (is_visible(my_locations[pair])) {
          load_pack<A>(my_grads + (static_cast<int64_t>(pair) * L + l) * G + mine.g, grad);
        }
        my_logits.read(v, j, base, x);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          x[k] = exp(x[k] - most[k]) * reciprocal[k] * (grad[k] * keep_scale - dot[k]);
          sum[k] += x[k];
        }
        if (sizes.has_camera) {
          store_pack(grad_pairs + (query * V + v) * stride + j, x);
        } else {
          store_pack(grad_logits + (query * V + v) * stride + j, x);
        }
      }
      if (sizes.has_camera) store_pack(grad_logits + query * stride + j, sum);
    }
  }
}

// grad_camera_logits [B, N] are the sums of grad_pairs [B, Q, N] over Q. A block owns 32 columns. Each of its warps
// adds every kSumWarps-th query, and then the sums of the warps are added in order.
constexpr int kSumWarps = 16;
template <typename TL, typename A>
__global__ void __launch_bounds__(32 * kSumWarps)
    sum_queries_kernel(const A* __restrict__ grad_pairs, TL* __restrict__ grad_camera_logits, int64_t Q, int64_t N) {
  __shared__ A sums[kSumWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t blocks = (N + 31) / 32, b = blockIdx.x / blocks, n = (blockIdx.x - b * blocks) * 32 + lane;
  A sum = 0;
  if (n < N) {
#pragma unroll 4
    for (int64_t q = warp; q < Q; q += kSumWarps) sum += grad_pairs[(b * Q + q) * N + n];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || n >= N) return;
  for (int w = 1; w < kSumWarps; ++w) sum += sums[w][lane];
  grad_camera_logits[b * N + n] = from_accumulate<TL>(sum);
}

// The inputs, what prepare_kernel writes, and its launch.
struct Prepared : FusedAggregationInputs {
  Tensor stats;
  FusedSizes sizes;
  int64_t blocks, threads;
};

// Calls f(TL{}, A{}, K{}) for the types of logits and key points, and the number of groups in a pack.
template <typename F>
void dispatch_logits(const Tensor& features, const Prepared& it, const F& f) {
  const auto of_type = [&]<typename TL, typename A>(TL, A) {
    constexpr int kPack = kVectorValues<TL>;
    if (it.sizes.packs < it.sizes.G) return f(TL{}, A{}, std::integral_constant<int, kPack>{});
    f(TL{}, A{}, std::integral_constant<int, 1>{});
  };
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    if (it.logits.scalar_type() == features.scalar_type()) return of_type(T{}, A{});
    if constexpr (!std::is_same_v<T, A>) of_type(A{}, A{});
  });
}

Prepared prepare(const DeviceScope& scope, const Tensor& features, const FusedAggregationInputs& inputs) {
  const auto [B, Q, V, L, P, G, has_camera, has_keep] = inputs.problem;
  VISDET_CHECK(kFusedOp, 1.0 * V * L * P * G < (1 << 30), "V * L * P * G must be under 2^30 on CUDA, got ", V, " * ", L,
               " * ", P, " * ", G);
  FusedSizes sizes{Q, static_cast<int32_t>(V), static_cast<int32_t>(L), static_cast<int32_t>(P),
                   static_cast<int32_t>(G)};
  const int64_t values = vector_values(inputs.logits);
  const bool in_packs =
      G % values == 0 && aligned(inputs.logits, kVectorBytes) && aligned(inputs.camera_logits, kVectorBytes);
  sizes.packs = static_cast<int32_t>(in_packs ? G / values : G);
  sizes.width = 1;
  while (sizes.width < std::min(sizes.packs, 32)) sizes.width *= 2;
  sizes.has_camera = has_camera, sizes.has_keep = has_keep;
  // Small blocks are best where a query has few logits, since more of them wait at the same time.
  int64_t threads = 64;
  while (threads < kMaxThreads && threads < L * P * sizes.packs) threads *= 2;
  Prepared it{inputs, new_empty(inputs.key_points, {B, Q, 2, G}), sizes, B * Q, threads};
  if (it.weights.numel() == 0) return it;
  dispatch_logits(features, it, [&]<typename TL, typename A, int K>(TL, A, std::integral_constant<int, K>) {
    launch({kFusedOp, "prepare_kernel", scope, it.blocks, it.threads}, prepare_kernel<TL, A, K>,
           data_of<A>(it.key_points), data_of<A>(it.projection), data_of<A>(it.image_wh), data_of<TL>(it.logits),
           data_of<TL>(it.camera_logits), data_of<bool>(it.keep), static_cast<A>(it.keep_scale),
           mutable_data_of<Pack<A, 2>>(it.locations), mutable_data_of<A>(it.weights), mutable_data_of<A>(it.stats),
           it.sizes);
  });
  return it;
}

Tensor forward(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts, const Tensor& key_points,
               const Tensor& projection, const Tensor& image_wh, const Tensor& logits, const Tensor& camera_logits,
               const Tensor& keep, double keep_scale) {
  const DeviceScope scope(features);
  const Prepared it =
      prepare(scope, features,
              {features, level_shapes, key_points, projection, image_wh, logits, camera_logits, keep, keep_scale});
  return deformable_aggregation::forward(features, level_shapes, level_starts, it.locations, it.weights);
}

// The gradients of logits, of points, and of camera_logits if there are any.
void launch_finish(const DeviceScope& scope, const Prepared& it, const Tensor& features, const Tensor& grad_locations,
                   const Tensor& grad_weights, const Tensor& grad_key_points, const Tensor& grad_logits,
                   const Tensor& grad_camera_logits) {
  const FusedAggregationProblem& problem = it.problem;
  const int64_t N = problem.V * problem.L * problem.P * problem.G;
  const Tensor grad_pairs = new_empty(it.weights, {problem.has_camera ? problem.B * problem.Q * N : 0});
  dispatch_logits(features, it, [&]<typename TL, typename A, int K>(TL, A, std::integral_constant<int, K>) {
    auto* of_pairs = mutable_data_of<A>(grad_pairs);
    launch({kFusedBackwardOp, "finish_kernel", scope, it.blocks, it.threads}, finish_kernel<TL, A, K>,
           data_of<A>(it.key_points), data_of<A>(it.projection), data_of<A>(it.image_wh), data_of<TL>(it.logits),
           data_of<TL>(it.camera_logits), static_cast<A>(it.keep_scale), data_of<Pack<A, 2>>(it.locations),
           data_of<A>(it.weights), data_of<A>(it.stats), data_of<Pack<A, 2>>(grad_locations), data_of<A>(grad_weights),
           mutable_data_of<A>(grad_key_points), mutable_data_of<TL>(grad_logits), of_pairs, it.sizes);
    if (!problem.has_camera) return;
    launch({kFusedBackwardOp, "sum_queries_kernel", scope, problem.B * ceil_div(N, 32), 32 * kSumWarps},
           sum_queries_kernel<TL, A>, of_pairs, mutable_data_of<TL>(grad_camera_logits), problem.Q, N);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& features,
                                                    const Tensor& level_shapes, const Tensor& level_starts,
                                                    const Tensor& key_points, const Tensor& projection,
                                                    const Tensor& image_wh, const Tensor& logits,
                                                    const Tensor& camera_logits, const Tensor& keep, double keep_scale,
                                                    bool deterministic) {
  using torch::stable::new_empty;
  using torch::stable::zero_;
  const DeviceScope scope(features);
  const Prepared it =
      prepare(scope, features,
              {features, level_shapes, key_points, projection, image_wh, logits, camera_logits, keep, keep_scale});
  const auto [grad_features, grad_locations, grad_weights] = deformable_aggregation::backward(
      grad_output, features, level_shapes, level_starts, it.locations, it.weights, deterministic);
  Tensor grad_key_points = new_like(it.key_points), grad_logits = new_like(it.logits),
         grad_camera_logits = new_like(it.camera_logits);
  if (it.weights.numel() == 0 || features.numel() == 0) {
    zero_(grad_key_points), zero_(grad_logits), zero_(grad_camera_logits);
  } else {
    launch_finish(scope, it, features, grad_locations, grad_weights, grad_key_points, grad_logits, grad_camera_logits);
  }
  return {grad_features, grad_key_points, grad_logits, grad_camera_logits};
}

}  // namespace
}  // namespace visdet::deformable_aggregation_fused
