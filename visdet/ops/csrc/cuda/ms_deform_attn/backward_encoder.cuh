// Path "encoder": the queries are the texels of the pyramid, so that neighbouring queries sample neighbouring texels.
//
// A block owns a chunk of the queries of one (batch, head) in the order of regions and sorts their samples, a few
// points of a level at a time, by the square of four texels that they read. Each group of LANES threads then owns a
// part of the sorted list: it keeps the square's values and gradients in registers and adds the gradients of a texel to
// grad_sums when its walk goes on from that texel, not once a sample. The thread that located a sample writes the
// gradients of its location and weight.
//
// Races: groups and blocks add to the same rows of grad_sums, which is cleared before, by atomic additions of float32.
// Their order differs between runs, so grad_value does, too; no other address is written twice.
#pragma once

#include "common/block_scan.cuh"
#include "cuda/ms_deform_attn/backward_call.cuh"
#include "cuda/ms_deform_attn/regions.cuh"

namespace visdet::ms_deform_attn {
namespace {

// The backward of an encoder, whose queries are the pyramid's own texels. A block owns a chunk of the queries of one
// head in the order of regions, so that its samples share most of their texels. Level after level, and kPassPoints
// samples of a query at a time, it sorts the samples by their square of texels (see first_texel()) in shared memory;
// then each group of LANES threads walks as many of them as any other, with the square's values and gradients in
// registers and the rows of grad_output in shared memory. Where the walk leaves a texel, it adds the texel's gradient
// to grad_sums by one reduction, which other blocks and groups do, too; from a square to its right neighbour only two
// texels change. The dots with the four texels, of which the sample's own gradients are made, take its place in shared
// memory.
constexpr int kChunkThreads = 512;
constexpr int kPassPoints = 4;
constexpr int kChunkEach = 3;  // samples a thread locates in a pass, at the most
constexpr int kMaxChunk = kChunkThreads * kChunkEach / kPassPoints;
constexpr int64_t kChunkShared = 80 << 10;  // of a block, two on a multiprocessor; the rest is first-level cache
// Squares that lie 64 columns or 32 rows apart share a bucket, which costs reductions only.
constexpr int kColumnBits = 6, kBuckets = 4 * kChunkThreads;

struct ChunkSizes {
  int64_t S, rows;  // rows: B * G * Q
  int32_t Q, G, C, L, K;
  uint32_t share;  // queries of a block
};

// Shared memory of a block that owns so many queries.
int64_t chunk_bytes(const MsDeformAttnProblem& problem, int64_t element, bool has_softmax, int64_t queries) {
  const int64_t of_query = kPassPoints * (sizeof(Pack<float, 4>) + sizeof(uint16_t)) + problem.C * element +
                           sizeof(uint32_t) + (has_softmax ? sizeof(SoftmaxRow<float>) : 0);
  return queries * of_query + kBuckets * sizeof(uint16_t) + problem.L * static_cast<int64_t>(sizeof(Level));
}

// order[i] = the query that is number i; from the first to the last unless the levels follow one another.
constexpr int kOrderQueryThreads = 1024, kOrderQueryBlocks = 32;
__global__ void __launch_bounds__(kOrderQueryThreads)
    order_queries_kernel(const Levels levels, const Regions known, int L, int64_t S, uint32_t* __restrict__ order) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<Level*>(shared);  // [L]
  const bool contiguous = load_levels(levels, L, S, table);
  const auto level_at = [&](int l) { return table[l]; };
  const Regions regions = levels.by_value() ? known : Regions::of(L, level_at);
  const uint32_t Q = static_cast<uint32_t>(S), share = (Q + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  if (first >= Q) return;
  const uint32_t count = min(share, Q - first);
  if (!contiguous || !regions.fit) {
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = first + i;
    return;
  }
  const RegionTable places(regions, L, level_at, reinterpret_cast<char*>(table + L));
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = places.query_at(first + i);
}

// One load of values, unpacked at once: bfloat16 that is unpacked where it is used takes registers in both forms (an
// encoder's backward 343 instead of 337 us, the fused form's 412 instead of 399).
template <typename T, int VEC>
__device__ __forceinline__ void load_now(const T* from, float (&to)[VEC]) {
  load_pack<T, VEC>(from, to);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) asm volatile("" : "+f"(to[v]));
  }
}

// The walk of one group over `count` samples, list[0] and on; `turns` is at least that, and the same for the whole
// block. value and sums: of the level's first texel, at the lane's channels, if it has any; rows: of its channels.
template <typename T, int LANES>
__device__ __forceinline__ void walk_samples(const uint16_t* list, int count, int turns, Pack<float, 4>* samples,
                                             const T* rows, const T* value, float* sums, const Level& level,
                                             uint32_t texel_step, int C, bool has_channels) {
  constexpr int VEC = 4;
  constexpr unsigned kAll = 0xffffffffu;
  const uint32_t right = level.W > 1 ? 1 : 0, below = level.H > 1 ? level.W : 0;
  const int lane = threadIdx.x % LANES;
  float sum[4][VEC] = {}, corner[4][VEC] = {};
  uint32_t texel = 0;  // the upper left one of the square
  const auto leave = [&](bool to_right) {
    float* upper = sums + static_cast<uint64_t>(texel) * texel_step;
    float* lower = sums + static_cast<uint64_t>(texel + below) * texel_step;
    add_pack<VEC>(upper, sum[0]);
    add_pack<VEC>(lower, sum[2]);
    if (!to_right) {
      add_pack<VEC>(upper + right * texel_step, sum[1]);
      add_pack<VEC>(lower + right * texel_step, sum[3]);
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
      sum[0][v] = to_right ? sum[1][v] : 0.f, sum[2][v] = to_right ? sum[3][v] : 0.f;
      sum[1][v] = sum[3][v] = 0;
    }
  };
  const auto enter = [&](uint32_t next, bool to_right) {
    const T* upper = value + static_cast<uint64_t>(next) * texel_step;
    const T* lower = value + static_cast<uint64_t>(next + below) * texel_step;
#pragma unroll
    for (int v = 0; v < VEC; ++v) corner[0][v] = corner[1][v], corner[2][v] = corner[3][v];
    load_now<T, VEC>(upper + right * texel_step, corner[1]);
    load_now<T, VEC>(lower + right * texel_step, corner[3]);
    if (!to_right) {
      load_now<T, VEC>(upper, corner[0]);
      load_now<T, VEC>(lower, corner[2]);
    }
  };
  const bool walks = count > 0 && has_channels;
  uint32_t id = count > 0 ? *list : 0;
  if (walks) texel = __float_as_uint(samples[id].at[0]), enter(texel, false);
#pragma unroll 1
  for (int turn = turns; turn > 0; --turn, --count) {
    const bool exists = count > 0, has_next = count > 1;
    ++list;
    const uint32_t next_id = has_next ? *list : id;
    Pack<float, 4> sample = {};
    float g_out[VEC] = {};
    if (exists) sample = samples[id];
    if (exists && has_channels) load_now<T, VEC>(rows + (id / kPassPoints) * C, g_out);
    const uint32_t next = has_next ? __float_as_uint(samples[next_id].at[0]) : texel;
    const float weight = sample.at[3];
    const float bottom = sample.at[2] * weight, top = weight - bottom;
    const float right_top = top * sample.at[1], right_bottom = bottom * sample.at[1];
    const float weights[4] = {top - right_top, right_top, bottom - right_bottom, right_bottom};
    float dot[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[k][v] += weights[k] * g_out[v], dot[k] += corner[k][v] * g_out[v];
    }
    // Before the dots are reduced, so that the loads are under way meanwhile.
    if (has_channels && next != texel) {
      const bool to_right = next - texel == right;
      enter(next, to_right);
      leave(to_right);
      texel = next;
    }
    const float even = exchange(kAll, lane & 1, dot[0], dot[1], 1);
    const float odd = exchange(kAll, lane & 1, dot[2], dot[3], 1);
    float mine = exchange(kAll, lane & 2, even, odd, 2);  // lane i: of corner i % 4
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) mine += __shfl_xor_sync(kAll, mine, step);
    __syncwarp();  // the sample has been read
    if (exists && lane < 4) samples[id].at[lane] = mine;
    id = next_id;
  }
  if (walks) leave(false);
}

// Of a sample at x that counts, along one axis of `size` texels: from the dots with the two texels of its moved square
// to those with the two texels that it lies between, zero outside the map.
__device__ __forceinline__ Pack<float, 2> unmove(float x, int32_t size, float first, float second) {
  const float from = floor(x);
  if (from < 0) return {0.f, first};
  if (from > size - 2) return {size > 1 ? second : first, 0.f};
  return {first, second};
}

__device__ __forceinline__ SampleGradient sample_gradient(const Pack<float, 4>& dots, float x, float y, float weight,
                                                          const Level& level) {
  const Pack<float, 2> upper = unmove(x, level.W, dots.at[0], dots.at[1]),
                       lower = unmove(x, level.W, dots.at[2], dots.at[3]),
                       left = unmove(y, level.H, upper.at[0], lower.at[0]),
                       right = unmove(y, level.H, upper.at[1], lower.at[1]);
  const float fx = x - floor(x), fy = y - floor(y);
  const float top_x = right.at[0] - left.at[0], bottom_x = right.at[1] - left.at[1];
  const float left_y = left.at[1] - left.at[0], right_y = right.at[1] - right.at[0];
  const float top = left.at[0] + fx * top_x, bottom = left.at[1] + fx * bottom_x;
  return {top + fy * (bottom - top), level.W * weight * (top_x + fy * (bottom_x - top_x)),
          level.H * weight * (left_y + fx * (right_y - left_y))};
}

template <typename T, typename Source, int LANES>
__global__ void __launch_bounds__(kChunkThreads, 2)
    pyramid_grad_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const Levels levels,
                        const uint32_t* __restrict__ order, const Source source, float* __restrict__ grad_sums,
                        const SampleGrads<float> grads, const ChunkSizes sizes) {
  constexpr int VEC = 4, kGroups = kChunkThreads / LANES;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = sizes.K, G = sizes.G, C = sizes.C;
  const uint32_t Q = sizes.Q, share = sizes.share;
  // By place in the chunk and point: texel of the level, fractions, weight; later the four dots.
  auto* samples = reinterpret_cast<Pack<float, 4>*>(shared);              // [share, kPassPoints]
  auto* table = reinterpret_cast<Level*>(samples + share * kPassPoints);  // [L]
  auto* buckets = reinterpret_cast<uint16_t*>(table + L);                 // [kBuckets] counts, then starts
  auto* rows = reinterpret_cast<T*>(buckets + kBuckets);                  // [share, C] of grad_output
  auto* softmax = reinterpret_cast<typename Source::Row*>(rows + static_cast<size_t>(share) * C);  // [share] or nothing
  auto* queries = reinterpret_cast<uint32_t*>(softmax + (Source::kNeedsLevel ? share : 0));        // [share]
  auto* sorted = reinterpret_cast<uint16_t*>(queries + share);  // [share * kPassPoints]
  auto* my_buckets = reinterpret_cast<Pack<uint16_t, 4>*>(buckets) + threadIdx.x;
  const int group = threadIdx.x / LANES, c = threadIdx.x % LANES * VEC;
  const bool has_channels = c < C;
  const uint32_t texel_step = G * C;

  const int64_t begin = static_cast<int64_t>(blockIdx.x) * share;
  uint32_t head = static_cast<uint32_t>(begin / Q),
           first = static_cast<uint32_t>(begin - static_cast<int64_t>(head) * Q);
  uint32_t left = static_cast<uint32_t>(min(sizes.rows - begin, static_cast<int64_t>(share)));
  *my_buckets = {};
  load_levels(levels, L, sizes.S, table);
  const auto first_of = [&](int l) { return l > 0 ? table[l - 1].end : 0; };  // of a row's samples on the level
  while (left > 0) {  // a head after the other, or what of it is the block's
    const uint32_t count = min(left, Q - first);
    for (uint32_t i = threadIdx.x; i < count; i += kChunkThreads) queries[i] = order[first + i];
    __syncthreads();  // the list is complete
    const uint32_t b = head / G, g = head - b * G;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, image_rows * K);
    const T* image_output = grad_output + (image_rows + g) * C + c;
    for (uint32_t i = group; i < count; i += kGroups) {
      if (!has_channels) break;
      *reinterpret_cast<Pack<T, VEC>*>(rows + i * C + c) = load_once(
          reinterpret_cast<const Pack<T, VEC>*>(image_output + static_cast<int64_t>(queries[i]) * texel_step));
    }
    const int64_t image_value = (static_cast<int64_t>(b) * sizes.S * G + g) * C + c;
    if constexpr (Source::kNeedsLevel) {
      const int lane = threadIdx.x % kSoftmaxLanes;
#pragma unroll 1
      for (uint32_t i = threadIdx.x / kSoftmaxLanes; i - threadIdx.x / kSoftmaxLanes < count;
           i += kChunkThreads / kSoftmaxLanes) {
        const bool exists = i < count;
        const auto row = image.row_of_lanes(exists, exists ? (queries[i] * G + g) * K : 0, K, lane, kSoftmaxLanes);
        if (exists && lane == 0) softmax[i] = row;
      }
      __syncthreads();  // the rows' softmax is known
    }

    int pass = 0;
#pragma unroll 1
    for (int l = 0; l < L; first_of(l) + pass + kPassPoints < table[l].end ? pass += kPassPoints : (pass = 0, ++l)) {
      Level level = table[l];
      int first_point = first_of(l) + pass, points = level.end - first_of(l);
      uint32_t pass_points = min(level.end - first_point, kPassPoints);
      typename Source::Raw raw[kChunkEach];
      uint32_t place_of[kChunkEach];  // bucket and rank
      const auto id_of = [&](int j) { return threadIdx.x + j * kChunkThreads; };
      const auto exists = [&](int j) { return id_of(j) / kPassPoints < count && id_of(j) % kPassPoints < pass_points; };
      const auto row_of = [&](int j) { return queries[id_of(j) / kPassPoints] * G + g; };
      const auto weight_of = [&](int j) {
        typename Source::Row row;
        if constexpr (Source::kNeedsLevel) row = softmax[id_of(j) / kPassPoints];
        return source.weight(raw[j], row);
      };
      const auto fetch = [&] {
        uint32_t entry = b;
        // What follows from a number of unknown origin is worked out again instead of being kept during the walk.
        if constexpr (Source::kNeedsLevel && sizeof(T) == 4) asm volatile("" : "+r"(entry));
        const Source of_entry =
            source.of_image(static_cast<int64_t>(entry) * Q * L, static_cast<int64_t>(entry) * Q * G * K);
#pragma unroll
        for (int j = 0; j < kChunkEach; ++j) {
          raw[j] = {};
          if (!exists(j)) continue;
          const uint32_t at = row_of(j) * K + first_point + id_of(j) % kPassPoints;
          raw[j] = of_entry.template fetch_position<true, true>(at, queries[id_of(j) / kPassPoints] * L + l);
          of_entry.template fetch_weight<true, true>(at, raw[j]);
        }
      };
      const auto position = [&](int j, float& x, float& y) {  // whether the sample counts
        source.position(raw[j], level, points, x, y);
        return level.H > 0 && x > -1 && y > -1 && x < level.W && y < level.H;
      };
      fetch();
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        place_of[j] = ~0u;
        float x, y, fx, fy, part_x, part_y;
        if (!position(j, x, y) || !exists(j)) continue;
        const int32_t x0 = first_texel(x, level.W, fx, part_x), y0 = first_texel(y, level.H, fy, part_y);
        const float weight = weight_of(j);
        samples[id_of(j)] = {__int_as_float(y0 * level.W + x0), fx, fy, weight * (part_x * part_y)};
        const uint32_t bucket = (y0 << kColumnBits | (x0 & ((1 << kColumnBits) - 1))) & (kBuckets - 1);
        const uint32_t shift = bucket % 2 * 16;
        const uint32_t before = atomicAdd(reinterpret_cast<uint32_t*>(buckets) + bucket / 2, 1u << shift) >> shift;
        place_of[j] = bucket << 16 | (before & 0xffffu);
      }
      __syncthreads();  // the buckets are counted
      const Pack<uint16_t, 4> counts = *my_buckets;
      int32_t listed,
          start = sum_before<kChunkThreads>(counts.at[0] + counts.at[1] + counts.at[2] + counts.at[3], listed);
      Pack<uint16_t, 4> starts;
#pragma unroll
      for (int i = 0; i < 4; ++i) starts.at[i] = start, start += counts.at[i];
      *my_buckets = starts;
      __syncthreads();  // the buckets' starts are known
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        if (place_of[j] != ~0u) sorted[buckets[place_of[j] >> 16] + (place_of[j] & 0xffffu)] = id_of(j);
      }
      __syncthreads();  // the samples are sorted
      *my_buckets = {};
      const int turns = (listed + kGroups - 1) / kGroups, from = group * turns;
      const int64_t level_value = image_value + static_cast<int64_t>(level.start) * texel_step;
      walk_samples<T, LANES>(sorted + from, min(turns, listed - from), turns, samples, rows + c, value + level_value,
                             grad_sums + level_value, level, texel_step, C, has_channels);
      __syncthreads();                      // the dots are complete
      if constexpr (Source::kNeedsLevel) {  // once more, for want of registers during the walk
        level = table[l], first_point = first_of(l) + pass, points = level.end - first_of(l);
        pass_points = min(level.end - first_point, kPassPoints);
      }
      fetch();
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        if (!exists(j)) continue;
        const int64_t row = image_rows + row_of(j);
        const float weight = weight_of(j);
        const float nothing = level.H > 0 ? 0.f : quiet_nan<float>();
        SampleGradient grad = {nothing, nothing, nothing};
        float x, y;
        if (position(j, x, y)) grad = sample_gradient(samples[id_of(j)], x, y, weight, level);
        put_once(grads, row * K + first_point + id_of(j) % kPassPoints, source, raw[j],
                 static_cast<int64_t>(b) * Q + queries[id_of(j) / kPassPoints], level, points, weight, grad);
      }
    }
    left -= count, ++head, first = 0;
    if (left > 0) __syncthreads();  // the list and the rows have been read
  }
}

// The path of encoders.
struct ChunkPlan {
  int64_t share, shared, order_shared;  // share: queries of a block; 0: not one fits
};

template <typename Form>
ChunkPlan chunk_plan(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const int L = static_cast<int>(problem.L);
  const int64_t rows = problem.B * problem.G * problem.Q, slots = 2 * call.scope.device().multiprocessors;
  const auto bytes = [&](int64_t queries) { return chunk_bytes(problem, call.element(), Form::kHasSoftmax, queries); };
  const int64_t most_bytes = std::min(kChunkShared, call.scope.device().shared_for(2) - kScanShared);
  const int64_t each = bytes(1) - bytes(0);
  const int64_t most = std::min<int64_t>(kMaxChunk, (most_bytes - bytes(0)) / each);
  ChunkPlan plan{};
  plan.order_shared =
      static_cast<int64_t>(sizeof(Level)) * L + static_cast<int64_t>(region_bytes(L, known_regions(call.levels, L)));
  if (most < 1) return plan;
  const int64_t waves = ceil_div(rows, slots * most);
  plan.share = ceil_div(rows, slots * waves), plan.shared = bytes(plan.share);
  return plan;
}

template <typename Form>
const char* encoder_declines(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (call.deterministic) return "it adds in no fixed order, and the call is deterministic";
  if (problem.Q != problem.S) return "the queries are not the texels of the pyramid (Q is not S)";
  if (call.is_double()) return "the values are float64";
  if (problem.C > 64) return "a row of value has more than 64 channels";
  // check_sizes sees to samples, texels and heads
  if (problem.Q * problem.L > INT32_MAX) return "Q * L is 2^31 or more";
  const ChunkPlan plan = chunk_plan(call);
  if (plan.share == 0 || plan.order_shared > 48 << 10) return "a block has too little shared memory";
  return nullptr;
}

template <typename Form>
void encoder_launch(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const int L = static_cast<int>(problem.L);
  const ChunkPlan plan = chunk_plan(call);
  const int64_t rows = problem.B * problem.G * problem.Q;
  const bool is_float = call.value.scalar_type() == ScalarType::Float;
  Tensor sums = is_float ? zero_(call.grad_value) : new_zeros(call.value, call.value.sizes(), ScalarType::Float);
  Tensor order = new_empty(call.value, {problem.Q}, ScalarType::Int);
  auto* order_data = static_cast<uint32_t*>(order.mutable_data_ptr());
  launch({kOp, "order_queries_kernel", call.scope, kOrderQueryBlocks, kOrderQueryThreads, plan.order_shared},
         order_queries_kernel, call.levels, known_regions(call.levels, L), L, problem.S, order_data);
  dispatch_value_type(call.value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    if constexpr (sizeof(A) == 4) {
      const auto source = call.form.template source<T, A>();
      using Source = std::decay_t<decltype(source)>;
      dispatch_lanes(problem.C, [&](auto lanes) {
        launch({kOp, "pyramid_grad_kernel", call.scope, ceil_div(rows, plan.share), kChunkThreads, plan.shared,
                kScanShared},
               pyramid_grad_kernel<T, Source, decltype(lanes)::value>,
               static_cast<const T*>(call.grad_output.const_data_ptr()),
               static_cast<const T*>(call.value.const_data_ptr()), call.levels, order_data, source,
               static_cast<float*>(sums.mutable_data_ptr()), call.form.template final_grads<A>(),
               ChunkSizes{problem.S, rows, static_cast<int32_t>(problem.Q), static_cast<int32_t>(problem.G),
                          static_cast<int32_t>(problem.C), L, static_cast<int32_t>(problem.K),
                          static_cast<uint32_t>(plan.share)});
      });
    }
  });
  if (!is_float) copy_(call.grad_value, sums);
}

}  // namespace
}  // namespace visdet::ms_deform_attn
