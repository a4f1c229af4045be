// ms_deform_attn on CUDA. The contract is in ../ms_deform_attn.h.
//
// A row is one (b, q, g). LANES neighbouring threads own a row's channels, VEC of them each (16 bytes), and SPLIT such
// groups share the row's L * P samples. The threads of a row first compute its samples' metadata once (four clamped
// texel indices, four merged weights), 32 bytes a sample in shared memory that only they read (a warp barrier
// suffices), then walk the samples with branch-free loads: outside corners read a texel inside the map with weight
// zero. Blocks take rows of one head, queries in order: their samples overlap in the first-level cache. Races: the
// forward writes each output once. The backward adds grad_value with atomics from every row that touches a texel;
// grad_locations and grad_weights are written once. In deterministic mode one group of threads walks all queries of a
// head, so that each texel's sums are taken in query order.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "../common/bilinear.h"
#include "../common/cuda_utils.cuh"
#include "../ms_deform_attn.h"

namespace visdet {
namespace {

constexpr int kThreads = 256;        // eight warps: enough groups to hide latency, small enough a tail
constexpr int kSamplesPerPass = 16;  // metadata in shared memory: 16 * 32 B a row
constexpr int kMaxHostLevels = 16;   // levels that travel as kernel arguments; more are copied to the device

// Level geometry by value (from the host) or by pointer (on the device).
struct Levels {
  const int64_t* shapes;  // [L, 2] on the device, or null
  const int64_t* starts;  // [L] on the device, or null
  int32_t H[kMaxHostLevels], W[kMaxHostLevels];
  int64_t start[kMaxHostLevels];
};

struct Level {
  int64_t start;
  int32_t H, W;  // H = 0 for a level that does not lie within S
};

template <typename A>
struct Sample {
  int32_t row[4];  // texel of each corner, counted from the first row of value
  A weight[4];     // attention weight * corner weight
};

__device__ __forceinline__ Level read_level(const Levels& levels, int l, int64_t S) {
  if (levels.shapes == nullptr) return {levels.start[l], levels.H[l], levels.W[l]};
  const int64_t H = levels.shapes[2 * l], W = levels.shapes[2 * l + 1], start = levels.starts[l];
  const bool fits = H > 0 && W > 0 && start >= 0 && H <= S && W <= S && start + H * W <= S;
  return fits ? Level{start, static_cast<int32_t>(H), static_cast<int32_t>(W)} : Level{0, 0, 0};
}

// All threads of the block: the level table into shared memory.
__device__ __forceinline__ void load_levels(const Levels& levels, int L, int64_t S, Level* table) {
  for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = read_level(levels, l, S);
  __syncthreads();
}

template <typename A>
__device__ __forceinline__ A quiet_nan() {
  return static_cast<A>(__int_as_float(0x7fffffff));
}

// value[b, :, g, :] with lanes of a row; one load of VEC values.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void load_pack(const T* from, A (&to)[VEC]) {
  const Pack<T, VEC> pack = *reinterpret_cast<const Pack<T, VEC>*>(from);
#pragma unroll
  for (int i = 0; i < VEC; ++i) to[i] = to_accumulate(pack.at[i]);
}

template <typename T, typename A, int VEC, int LANES, int SPLIT>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ value, const Levels levels, const A* __restrict__ locations,
                   const A* __restrict__ weights, T* __restrict__ output, const MsDeformAttnProblem problem) {
  constexpr int kGroup = LANES * SPLIT;     // threads of a row
  constexpr int kRows = kThreads / kGroup;  // rows of a block
  extern __shared__ char shared[];
  auto* samples = reinterpret_cast<Sample<A>*>(shared);  // [kRows, kSamplesPerPass]
  auto* table = reinterpret_cast<Level*>(shared + sizeof(Sample<A>) * kRows * kSamplesPerPass);  // [L]
  const int L = static_cast<int>(problem.L), P = static_cast<int>(problem.P), K = L * P;
  load_levels(levels, L, problem.S, table);

  const int64_t tiles = (problem.Q + kRows - 1) / kRows;
  const int64_t head = blockIdx.x / tiles;  // b * G + g
  const int64_t b = head / problem.G, g = head % problem.G;
  const int row_in_block = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const int64_t q = (blockIdx.x % tiles) * kRows + row_in_block;
  if (q >= problem.Q) return;  // whole groups leave; only warp barriers with this group's mask follow
  const unsigned mask = kGroup == 32 ? 0xffffffffu : ((1u << kGroup) - 1) << (threadIdx.x % 32 / kGroup * kGroup);

  const int64_t row = (b * problem.Q + q) * problem.G + g;
  const int64_t texel_stride = problem.G * problem.C;
  const T* value_head = value + b * problem.S * texel_stride + g * problem.C;
  Sample<A>* my_samples = samples + row_in_block * kSamplesPerPass;
  const int channel_lane = lane % LANES, part = lane / LANES;

  for (int64_t c0 = 0; c0 < problem.C; c0 += LANES * VEC) {
    const int64_t c = c0 + channel_lane * VEC;
    A sum[VEC] = {};
    for (int k0 = 0; k0 < K; k0 += kSamplesPerPass) {
      const int count = min(kSamplesPerPass, K - k0);
      __syncwarp(mask);  // the previous pass has been read
      for (int i = lane; i < count; i += kGroup) {
        const int64_t index = row * K + k0 + i;
        const Level level = table[(k0 + i) / P];
        const A weight = level.H > 0 ? weights[index] : quiet_nan<A>();
        Bilinear<A> at;
        Sample<A> sample = {};
        const A x = locations[2 * index] * level.W - A(0.5), y = locations[2 * index + 1] * level.H - A(0.5);
        if (level.H > 0 && locate(x, y, level.H, level.W, at)) {
          at.corner_weights(sample.weight);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            sample.row[k] = static_cast<int32_t>(level.start) + at.index[k];
            sample.weight[k] *= weight;
          }
        } else if (level.H == 0) {
          sample.weight[0] = weight;
        }
        my_samples[i] = sample;
      }
      __syncwarp(mask);  // this pass's metadata is complete
      if (c < problem.C) {
#pragma unroll 4
        for (int i = part; i < count; i += SPLIT) {
          const Sample<A> sample = my_samples[i];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            A corner[VEC];
            load_pack<T, VEC>(value_head + sample.row[k] * texel_stride + c, corner);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += corner[v] * sample.weight[k];
          }
        }
      }
    }
#pragma unroll
    for (int step = LANES; step < kGroup; step *= 2) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[v] += __shfl_xor_sync(mask, sum[v], step);
    }
    if (part == 0 && c < problem.C) {
      Pack<T, VEC> pack;
#pragma unroll
      for (int v = 0; v < VEC; ++v) pack.at[v] = from_accumulate<T>(sum[v]);
      *reinterpret_cast<Pack<T, VEC>*>(output + row * problem.C + c) = pack;
    }
  }
}

template <int VEC>
__device__ __forceinline__ void add_pack(float* to, const float (&values)[VEC]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kHasVectorReduction = VEC == 4;
#else
  constexpr bool kHasVectorReduction = false;
#endif
  if constexpr (kHasVectorReduction) {
    atomicAdd(reinterpret_cast<float4*>(to), make_float4(values[0], values[1], values[2], values[3]));
  } else {
#pragma unroll
    for (int v = 0; v < VEC; ++v) atomicAdd(to + v, values[v]);
  }
}

template <int VEC>
__device__ __forceinline__ void add_pack(double* to, const double (&values)[VEC]) {
#pragma unroll
  for (int v = 0; v < VEC; ++v) atomicAdd(to + v, values[v]);
}

// grad_value is zero-filled, in the type of sums. ordered: one group of threads walks every query of its head.
template <typename T, typename A, int VEC, int LANES>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const Levels levels,
                    const A* __restrict__ locations, const A* __restrict__ weights, A* __restrict__ grad_value,
                    A* __restrict__ grad_locations, A* __restrict__ grad_weights, const MsDeformAttnProblem problem,
                    bool ordered) {
  constexpr int kRows = kThreads / LANES;
  extern __shared__ char shared[];
  auto* table = reinterpret_cast<Level*>(shared);  // [L]
  const int L = static_cast<int>(problem.L), P = static_cast<int>(problem.P), K = L * P;
  load_levels(levels, L, problem.S, table);

  const int row_in_block = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int64_t tiles = ordered ? 1 : (problem.Q + kRows - 1) / kRows;
  const int64_t head = blockIdx.x / tiles;
  const int64_t b = head / problem.G, g = head % problem.G;
  const int64_t first = ordered ? 0 : (blockIdx.x % tiles) * kRows + row_in_block;
  const int64_t last = ordered ? (row_in_block == 0 ? problem.Q : 0) : min(first + 1, problem.Q);
  const unsigned mask = LANES == 32 ? 0xffffffffu : ((1u << LANES) - 1) << (threadIdx.x % 32 / LANES * LANES);
  const int64_t texel_stride = problem.G * problem.C;
  const int64_t head_offset = b * problem.S * texel_stride + g * problem.C;

  for (int64_t q = first; q < last; ++q) {
    const int64_t row = (b * problem.Q + q) * problem.G + g;
    for (int i = 0; i < K; ++i) {
      const int64_t index = row * K + i;
      const Level level = table[i / P];
      Bilinear<A> at;
      const A x = locations[2 * index] * level.W - A(0.5), y = locations[2 * index + 1] * level.H - A(0.5);
      const A weight = weights[index];
      A d[4] = {}, corner_weight[4] = {};
      const bool counts = level.H > 0 && locate(x, y, level.H, level.W, at);
      if (counts) {
        at.corner_weights(corner_weight);
        for (int64_t c = lane * VEC; c < problem.C; c += LANES * VEC) {
          A g_out[VEC];
          load_pack<T, VEC>(grad_output + row * problem.C + c, g_out);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (!at.is_inside[k]) continue;
            const int64_t offset = head_offset + (level.start + at.index[k]) * texel_stride + c;
            A corner[VEC], add[VEC];
            load_pack<T, VEC>(value + offset, corner);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
              d[k] += corner[v] * g_out[v];
              add[v] = weight * corner_weight[k] * g_out[v];
            }
            add_pack<VEC>(grad_value + offset, add);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) d[k] += __shfl_xor_sync(mask, d[k], step);
      }
      if (lane == 0) {
        A grad_weight = 0, grad_x = 0, grad_y = 0;
        if (counts) {
#pragma unroll
          for (int k = 0; k < 4; ++k) grad_weight += corner_weight[k] * d[k];
          grad_x = level.W * weight * ((1 - at.fy) * (d[1] - d[0]) + at.fy * (d[3] - d[2]));
          grad_y = level.H * weight * ((1 - at.fx) * (d[2] - d[0]) + at.fx * (d[3] - d[1]));
        } else if (level.H == 0) {
          grad_weight = grad_x = grad_y = quiet_nan<A>();
        }
        grad_weights[index] = grad_weight;
        grad_locations[2 * index] = grad_x;
        grad_locations[2 * index + 1] = grad_y;
      }
    }
  }
}

Levels levels_of(const MsDeformAttnProblem& problem, const Tensor& shapes, const Tensor& starts) {
  Levels levels{};
  if (problem.levels_on_host) {
    const int64_t *host_shapes = shapes.const_data_ptr<int64_t>(), *host_starts = starts.const_data_ptr<int64_t>();
    check_levels(problem, host_shapes, host_starts);
    VISDET_CHECK("ms_deform_attn", problem.L <= kMaxHostLevels, "level_shapes on the CPU may name ", kMaxHostLevels,
                 " levels at the most, got ", problem.L, "; pass them on value's device");
    for (int64_t l = 0; l < problem.L; ++l) {
      levels.H[l] = static_cast<int32_t>(host_shapes[2 * l]);
      levels.W[l] = static_cast<int32_t>(host_shapes[2 * l + 1]);
      levels.start[l] = host_starts[l];
    }
  } else {
    levels.shapes = shapes.const_data_ptr<int64_t>();
    levels.starts = starts.const_data_ptr<int64_t>();
  }
  return levels;
}

bool aligned(const Tensor& tensor, size_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

// Calls f(integral_constant LANES) with the smallest power of two of threads, up to a warp, that covers `packs` loads.
template <typename F>
void dispatch_lanes(int64_t packs, const F& f) {
  if (packs <= 1) return f(std::integral_constant<int, 1>{});
  if (packs <= 2) return f(std::integral_constant<int, 2>{});
  if (packs <= 4) return f(std::integral_constant<int, 4>{});
  if (packs <= 8) return f(std::integral_constant<int, 8>{});
  if (packs <= 16) return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, 32>{});
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  VISDET_CHECK("ms_deform_attn", problem.S <= INT32_MAX, "value must have fewer than 2^31 rows S, got ", problem.S);
  const torch::stable::accelerator::DeviceGuard guard(value_in.get_device_index());
  const Tensor value = contiguous(value_in), level_shapes = contiguous(level_shapes_in),
               level_starts = contiguous(level_starts_in), locations = contiguous(locations_in),
               weights = contiguous(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts);
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0) return zero_(output);
  const cudaStream_t stream = current_stream(value);

  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const auto launch = [&](auto vec, auto lanes) {
      constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
      // Few rows (a decoder): let several groups share a row's samples, so that the machine is full.
      constexpr int kSplit = kLanes <= 8 ? 4 : 1;
      const auto run = [&](auto kernel, int split) {
        const int rows = kThreads / (kLanes * split);
        const int64_t blocks = problem.B * problem.G * ceil_div(problem.Q, rows);
        VISDET_CHECK("ms_deform_attn", blocks <= INT32_MAX,
                     "B * G * Q is too large: ", problem.B * problem.G * problem.Q);
        const size_t shared = sizeof(Sample<A>) * rows * kSamplesPerPass + sizeof(Level) * problem.L;
        if (shared > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        kernel<<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(
            static_cast<const T*>(value.const_data_ptr()), levels, static_cast<const A*>(locations.const_data_ptr()),
            static_cast<const A*>(weights.const_data_ptr()), static_cast<T*>(output.mutable_data_ptr()), problem);
      };
      if (problem.B * problem.Q * problem.G * kLanes < 132 * 1024) {
        run(forward_kernel<T, A, kVec, kLanes, kSplit>, kSplit);
      } else {
        run(forward_kernel<T, A, kVec, kLanes, 1>, 1);
      }
    };
    constexpr int kVec = 16 / sizeof(T);
    if (problem.C % kVec == 0 && aligned(value, 16)) {
      dispatch_lanes(problem.C / kVec, [&](auto lanes) { launch(std::integral_constant<int, kVec>{}, lanes); });
    } else {
      dispatch_lanes(problem.C, [&](auto lanes) { launch(std::integral_constant<int, 1>{}, lanes); });
    }
  });
  check_launch("ms_deform_attn");
  return output;
}

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool deterministic) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const torch::stable::accelerator::DeviceGuard guard(value_in.get_device_index());
  const Tensor grad_output = contiguous(grad_output_in), value = contiguous(value_in),
               level_shapes = contiguous(level_shapes_in), level_starts = contiguous(level_starts_in),
               locations = contiguous(locations_in), weights = contiguous(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts);
  Tensor grad_sum = new_zeros(value, value.sizes(), accumulate_dtype(value.scalar_type())),
         grad_locations = new_empty(locations, locations.sizes()), grad_weights = new_empty(weights, weights.sizes());
  if (problem.C == 0 || problem.S == 0) {
    zero_(grad_locations), zero_(grad_weights);
  } else if (grad_weights.numel() > 0) {
    const cudaStream_t stream = current_stream(value);
    dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
      using T = decltype(value_tag);
      using A = decltype(accumulate_tag);
      const auto launch = [&](auto vec, auto lanes) {
        constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
        const int64_t blocks = problem.B * problem.G * (deterministic ? 1 : ceil_div(problem.Q, kThreads / kLanes));
        VISDET_CHECK("ms_deform_attn", blocks <= INT32_MAX,
                     "B * G * Q is too large: ", problem.B * problem.G * problem.Q);
        backward_kernel<T, A, kVec, kLanes>
            <<<static_cast<unsigned>(blocks), kThreads, sizeof(Level) * problem.L, stream>>>(
                static_cast<const T*>(grad_output.const_data_ptr()), static_cast<const T*>(value.const_data_ptr()),
                levels, static_cast<const A*>(locations.const_data_ptr()),
                static_cast<const A*>(weights.const_data_ptr()), static_cast<A*>(grad_sum.mutable_data_ptr()),
                static_cast<A*>(grad_locations.mutable_data_ptr()), static_cast<A*>(grad_weights.mutable_data_ptr()),
                problem, deterministic);
      };
      // Four sums a thread: one 16-byte reduction in float32.
      if (problem.C % 4 == 0 && aligned(value, 16) && aligned(grad_output, 16)) {
        dispatch_lanes(problem.C / 4, [&](auto lanes) { launch(std::integral_constant<int, 4>{}, lanes); });
      } else {
        dispatch_lanes(problem.C, [&](auto lanes) { launch(std::integral_constant<int, 1>{}, lanes); });
      }
    });
    check_launch("ms_deform_attn_backward");
  }
  return {torch::stable::to(grad_sum, value.scalar_type()), grad_locations, grad_weights};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CUDA, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn_backward));
}
