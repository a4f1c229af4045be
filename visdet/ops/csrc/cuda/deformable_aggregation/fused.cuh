// deformable_aggregation_fused on CUDA. One kernel makes locations and weights, and the kernels of
// deformable_aggregation follow. In the backward, one kernel follows the kernels of deformable_aggregation's backward.
// The contract is in deformable_aggregation_fused.h.
#pragma once

#include <tuple>
#include <type_traits>

#include "common/launch.h"
#include "common/values.cuh"
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
  bool has_camera, has_keep;
};

// The logits of a query: at(v, j) is that of camera v and entry j = (l * P + p) * G + g.
template <typename TL, typename A>
struct Logits {
  const TL* query;   // [V, L, P, G], or [L, P, G] beside camera
  const TL* camera;  // [V, L, P, G] or null
  int64_t stride;    // entries of a camera

  __device__ __forceinline__ A at(int v, int64_t j) const {
    if (camera == nullptr) return to_accumulate(query[v * stride + j]);
    return to_accumulate(query[j]) + to_accumulate(camera[v * stride + j]);
  }
};
template <typename TL, typename A>
__device__ __forceinline__ Logits<TL, A> logits_of(const TL* logits, const TL* camera_logits, const FusedSizes& sizes,
                                                   int64_t query) {
  const int64_t stride = static_cast<int64_t>(sizes.L) * sizes.P * sizes.G, b = query / sizes.Q;
  if (!sizes.has_camera) return {logits + query * sizes.V * stride, nullptr, stride};
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

constexpr int kMaxThreads = 1024;  // of a block

// Called by all threads of a block: combines the numbers of all threads n of the same n % groups by f, in order, so
// that every run gives the same bits. Threads from groups * (blockDim.x / groups) on are ignored.
template <typename A, typename F>
__device__ __forceinline__ A combine(A mine, int groups, A* shared, const F& f) {
  const int members = blockDim.x / groups;
  shared[threadIdx.x] = mine;
  __syncthreads();
  A all = shared[threadIdx.x % groups];
  for (int n = 1; n < members; ++n) all = f(all, shared[n * groups + threadIdx.x % groups]);
  __syncthreads();  // shared may be written again
  return all;
}

// A block owns a query. Its threads first project the points into the cameras. Then the threads n with the same n % G
// compute the maximum and the sum of the softmax of group n % G. Last, the warps take the pairs in turn; a warp writes
// the L * G weights of a pair if the pair is visible, since the weights of other pairs are never read.
// stats [B * Q, G, 2]: maximum and reciprocal sum, for the backward.
template <typename TL, typename A>
__global__ void __launch_bounds__(kMaxThreads)
    prepare_kernel(const A* __restrict__ key_points, const A* __restrict__ projection, const A* __restrict__ image_wh,
                   const TL* __restrict__ logits, const TL* __restrict__ camera_logits, const bool* __restrict__ keep,
                   A keep_scale, Pack<A, 2>* __restrict__ locations, A* __restrict__ weights, A* __restrict__ stats,
                   const FusedSizes sizes) {
  extern __shared__ __align__(16) char shared[];
  auto* scratch = reinterpret_cast<A*>(shared);  // [blockDim.x]
  const int V = sizes.V, L = sizes.L, P = sizes.P, G = sizes.G;
  const int64_t query = blockIdx.x, b = query / sizes.Q, pairs = static_cast<int64_t>(P) * V;
  Pack<A, 2>* my_locations = locations + query * pairs;
  for (int v = 0; v < V; ++v) {
    const Camera<A> camera(projection, image_wh, b * V + v);
    for (int p = threadIdx.x; p < P; p += blockDim.x) {
      const A* point = key_points + (query * P + p) * 3;
      const A at[3] = {point[0], point[1], point[2]};
      const A raw = camera.pixel(2, at), depth = raw < A(kMinDepth) ? A(kMinDepth) : raw;  // NaN stays
      const bool counts = !sizes.has_keep || keep[(query * V + v) * P + p];
      my_locations[static_cast<int64_t>(p) * V + v] = {counts ? camera.pixel(0, at) / depth / camera.width : A(-1),
                                                       counts ? camera.pixel(1, at) / depth / camera.height : A(-1)};
    }
  }
  const auto my_logits = logits_of<TL, A>(logits, camera_logits, sizes, query);
  for (int g0 = 0; g0 < G; g0 += blockDim.x) {
    const int groups = min(G - g0, static_cast<int>(blockDim.x)), members = blockDim.x / groups;
    const int g = g0 + threadIdx.x % groups, first = threadIdx.x / groups;
    const int entries = L * P;
    A most = -INFINITY, sum = 0;
    if (first < members) {
      for (int v = 0; v < V; ++v) {
        for (int i = first; i < entries; i += members) {
          const A x = my_logits.at(v, static_cast<int64_t>(i) * G + g);
          most = x > most || x != x ? x : most;
        }
      }
    }
    most = combine(most, groups, scratch, [](A x, A y) { return y > x || y != y ? y : x; });
    if (first < members) {
      for (int v = 0; v < V; ++v) {
        for (int i = first; i < entries; i += members) {
          sum += exp(my_logits.at(v, static_cast<int64_t>(i) * G + g) - most);
        }
      }
    }
    sum = combine(sum, groups, scratch, [](A x, A y) { return x + y; });
    if (first == 0) {
      stats[(query * G + g) * 2] = most;
      stats[(query * G + g) * 2 + 1] = 1 / sum;
    }
  }
  __syncthreads();  // locations and stats are written
  const int lane = threadIdx.x % 32, numbers = L * G;
  for (int64_t pair = threadIdx.x / 32; pair < pairs; pair += blockDim.x / 32) {
    if (!is_visible(my_locations[pair])) continue;
    const int p = static_cast<int>(pair / V), v = static_cast<int>(pair - static_cast<int64_t>(p) * V);
    A* to = weights + (query * pairs + pair) * numbers;
    for (int n = lane; n < numbers; n += 32) {
      const int l = n / G, g = n - l * G;
      const A* my_stats = stats + (query * G + g) * 2;
      to[n] = exp(my_logits.at(v, (static_cast<int64_t>(l) * P + p) * G + g) - my_stats[0]) * my_stats[1] * keep_scale;
    }
  }
}

// A block owns a query and writes the gradients of its logits, through the softmax, and of its points, through the
// projection. grad_pairs [B * Q, V, L, P, G] are the gradients of the logits for each camera, from which the gradients
// of camera_logits are made. It is null without camera_logits.
template <typename TL, typename A>
__global__ void __launch_bounds__(kMaxThreads)
    finish_kernel(const A* __restrict__ key_points, const A* __restrict__ projection, const A* __restrict__ image_wh,
                  const TL* __restrict__ logits, const TL* __restrict__ camera_logits, A keep_scale,
                  const Pack<A, 2>* __restrict__ locations, const A* __restrict__ weights, const A* __restrict__ stats,
                  const Pack<A, 2>* __restrict__ grad_locations, const A* __restrict__ grad_weights,
                  A* __restrict__ grad_key_points, TL* __restrict__ grad_logits, A* __restrict__ grad_pairs,
                  const FusedSizes sizes) {
  extern __shared__ __align__(16) char shared[];
  auto* scratch = reinterpret_cast<A*>(shared);  // [blockDim.x]
  const int V = sizes.V, L = sizes.L, P = sizes.P, G = sizes.G;
  const int64_t query = blockIdx.x, b = query / sizes.Q, pairs = static_cast<int64_t>(P) * V;
  const Pack<A, 2>* my_locations = locations + query * pairs;
  const A *my_weights = weights + query * pairs * L * G, *my_grads = grad_weights + query * pairs * L * G;
  for (int p = threadIdx.x; p < P; p += blockDim.x) {
    const A* point = key_points + (query * P + p) * 3;
    const A at[3] = {point[0], point[1], point[2]};
    A grad[3] = {};
    for (int v = 0; v < V; ++v) {
      const int64_t pair = static_cast<int64_t>(p) * V + v;
      const Pack<A, 2> location = my_locations[pair];
      if (!is_visible(location)) continue;
      const Camera<A> camera(projection, image_wh, b * V + v);
      const Pack<A, 2> grad_location = grad_locations[query * pairs + pair];
      const A raw = camera.pixel(2, at), depth = raw < A(kMinDepth) ? A(kMinDepth) : raw;
      const A x = grad_location.at[0] / camera.width / depth, y = grad_location.at[1] / camera.height / depth;
      const A z = raw < A(kMinDepth) ? A(0) : -(x * location.at[0] * camera.width + y * location.at[1] * camera.height);
#pragma unroll
      for (int i = 0; i < 3; ++i) grad[i] += camera.row[0][i] * x + camera.row[1][i] * y + camera.row[2][i] * z;
    }
    for (int i = 0; i < 3; ++i) grad_key_points[(query * P + p) * 3 + i] = grad[i];
  }
  const auto my_logits = logits_of<TL, A>(logits, camera_logits, sizes, query);
  const int64_t stride = my_logits.stride;
  for (int g0 = 0; g0 < G; g0 += blockDim.x) {
    const int groups = min(G - g0, static_cast<int>(blockDim.x)), members = blockDim.x / groups;
    const int g = g0 + threadIdx.x % groups, first = threadIdx.x / groups;
    A dot = 0;
    if (first < members) {
      for (int64_t i = first; i < pairs * L; i += members) {
        if (is_visible(my_locations[i / L])) dot += my_weights[i * G + g] * my_grads[i * G + g];
      }
    }
    dot = combine(dot, groups, scratch, [](A x, A y) { return x + y; });
    if (first >= members) continue;
    const A most = stats[(query * G + g) * 2], reciprocal = stats[(query * G + g) * 2 + 1];
    for (int i = first; i < L * P; i += members) {
      const int l = i / P, p = i - l * P;
      const int64_t j = static_cast<int64_t>(i) * G + g;
      A sum = 0;
      for (int v = 0; v < V; ++v) {
        const int64_t pair = static_cast<int64_t>(p) * V + v;
        const A grad = is_visible(my_locations[pair]) ? my_grads[(pair * L + l) * G + g] * keep_scale : A(0);
        const A through = exp(my_logits.at(v, j) - most) * reciprocal * (grad - dot);
        if (sizes.has_camera) {
          sum += through;
          grad_pairs[(query * V + v) * stride + j] = through;
        } else {
          grad_logits[(query * V + v) * stride + j] = from_accumulate<TL>(through);
        }
      }
      if (sizes.has_camera) grad_logits[query * stride + j] = from_accumulate<TL>(sum);
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
  int64_t blocks;
  int threads;
};

// Calls f(TL{}, A{}) for the types of logits and key points.
template <typename F>
void dispatch_logits(const Tensor& features, const Tensor& logits, const F& f) {
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    if (logits.scalar_type() == features.scalar_type()) return f(T{}, A{});
    if constexpr (!std::is_same_v<T, A>) f(A{}, A{});
  });
}

Prepared prepare(const DeviceScope& scope, const Tensor& features, const FusedAggregationInputs& inputs) {
  const auto [B, Q, V, L, P, G, has_camera, has_keep] = inputs.problem;
  VISDET_CHECK(kFusedOp, 1.0 * V * L * P * G < (1 << 30), "V * L * P * G must be under 2^30 on CUDA, got ", V, " * ", L,
               " * ", P, " * ", G);
  Prepared it{inputs,
              new_empty(inputs.key_points, {B, Q, G, 2}),
              {Q, static_cast<int32_t>(V), static_cast<int32_t>(L), static_cast<int32_t>(P), static_cast<int32_t>(G),
               has_camera, has_keep},
              B * Q,
              V * L * P * G > 16384 ? kMaxThreads : 256};
  if (it.weights.numel() == 0) return it;
  dispatch_logits(features, it.logits, [&]<typename TL, typename A>(TL, A) {
    launch({kFusedOp, "prepare_kernel", scope, it.blocks, it.threads, it.threads * static_cast<int64_t>(sizeof(A))},
           prepare_kernel<TL, A>, data_of<A>(it.key_points), data_of<A>(it.projection), data_of<A>(it.image_wh),
           data_of<TL>(it.logits), data_of<TL>(it.camera_logits), data_of<bool>(it.keep), static_cast<A>(it.keep_scale),
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
  dispatch_logits(features, it.logits, [&]<typename TL, typename A>(TL, A) {
    auto* of_pairs = mutable_data_of<A>(grad_pairs);
    launch(
        {kFusedBackwardOp, "finish_kernel", scope, it.blocks, it.threads, it.threads * static_cast<int64_t>(sizeof(A))},
        finish_kernel<TL, A>, data_of<A>(it.key_points), data_of<A>(it.projection), data_of<A>(it.image_wh),
        data_of<TL>(it.logits), data_of<TL>(it.camera_logits), static_cast<A>(it.keep_scale),
        data_of<Pack<A, 2>>(it.locations), data_of<A>(it.weights), data_of<A>(it.stats),
        data_of<Pack<A, 2>>(grad_locations), data_of<A>(grad_weights), mutable_data_of<A>(grad_key_points),
        mutable_data_of<TL>(grad_logits), of_pairs, it.sizes);
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
