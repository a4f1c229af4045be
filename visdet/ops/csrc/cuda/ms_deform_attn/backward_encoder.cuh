// Path "encoder": the queries are the texels of the pyramid, so that neighbouring queries sample neighbouring texels.
//
// A block owns a chunk of the queries of a (batch, head), in the order of regions (regions.cuh), so that its samples
// have most of their texels in common. Level after level, and kPassPoints points of a query at a time, its threads
//   1. locate the samples, each thread up to kThreadSamplesOfPass of them, and sort them by the square of four
//      neighbouring texels that each reads (first_texel() in sample.cuh), in shared memory;
//   2. walk through the sorted list: each group of LANES threads owns a part of it, with the rows of grad_output in
//      shared memory and the values and gradients of the square in registers; where it goes on to another square, it
//      adds the gradients of the texels that it leaves to grad_sums, so once for many samples. It overwrites each
//      sample with the dot products of its row and the four texels;
//   3. write the gradients of locations and weights that follow from these, each thread those of its samples.
//
// Races: groups and blocks add to the same rows of grad_sums, which is zero before, by atomic additions of float32.
// Their order differs between runs, and with it the rounding of grad_value. Every other address has one writer.
#pragma once

#include "cuda/ms_deform_attn/backward_call.cuh"
#include "cuda/ms_deform_attn/regions.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kChunkThreads = 512;
constexpr int kPassPoints = 4;
constexpr int kThreadSamplesOfPass = 3;
constexpr int kMaxChunk = kChunkThreads * kThreadSamplesOfPass / kPassPoints;
constexpr int64_t kChunkShared = 80 << 10;  // Two blocks fit a multiprocessor; the rest is its first-level cache.
constexpr int64_t kChunkScanShared = kExclusiveSumShared<kChunkThreads>;
// Squares that lie 64 columns or 32 rows apart fall into the same bucket, which only costs additions to grad_sums.
constexpr int kColumnBits = 6, kBuckets = 4 * kChunkThreads;

struct ChunkSizes {
  int64_t S, rows;  // rows: B * G * Q
  int32_t Q, G, C, L, K;
  uint32_t chunk;  // the queries of a block
};

// Returns the bytes of shared memory of a block that owns so many queries.
int64_t chunk_bytes(const MsDeformAttnProblem& problem, int64_t element, bool has_softmax, int64_t queries) {
  const int64_t of_query = kPassPoints * (sizeof(Pack<float, 4>) + sizeof(uint16_t)) + problem.C * element +
                           sizeof(uint32_t) + (has_softmax ? sizeof(SoftmaxRow<float>) : 0);
  return queries * of_query + kBuckets * sizeof(uint16_t) + problem.L * static_cast<int64_t>(sizeof(Level));
}

// Writes the queries in the order of regions; in their own order if the levels do not fill value without a gap. A block
// owns a run of this order.
constexpr int kOrderQueryThreads = 1024, kOrderQueryBlocks = 32;
__global__ void __launch_bounds__(kOrderQueryThreads)
    order_queries_kernel(const Levels levels, const Regions known, int L, int64_t S, uint32_t* __restrict__ order) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<Level*>(shared);  // [L]
  const bool contiguous = load_levels(levels, L, S, table);
  const auto level_at = [&](int l) { return table[l]; };
  const Regions regions = levels.by_value() ? known : Regions::of(L, level_at);
  const uint32_t Q = static_cast<uint32_t>(S), run = (Q + gridDim.x - 1) / gridDim.x, first = blockIdx.x * run;
  if (first >= Q) return;
  const uint32_t count = min(run, Q - first);
  if (!contiguous || !regions.fit) {
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = first + i;
    return;
  }
  const RegionTable table_of_regions(regions, L, level_at, reinterpret_cast<char*>(table + L));
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = table_of_regions.query_at(first + i);
}

// Walks through the samples list[0] to list[count - 1] with one group. steps: at least count, and the same for all
// groups of the warp. value, sums: the first texel of the level, at the channels of this lane, if it has any; rows: the
// rows of grad_output at these channels.
template <typename T, int LANES>
__device__ __forceinline__ void walk_samples(const uint16_t* list, int count, int steps, Pack<float, 4>* samples,
                                             const T* rows, const T* value, float* sums, const Level& level,
                                             uint32_t texel_step, int C, bool has_channels) {
  constexpr int VEC = 4;
  const uint32_t right = level.W > 1 ? 1 : 0, below = level.H > 1 ? level.W : 0;
  const int lane = threadIdx.x % LANES;
  float sum[4][VEC] = {}, corner[4][VEC] = {};
  uint32_t texel = 0;  // the upper left one of the square
  // Adds the sums of the square to those of its texels. to_right: the next square is the right neighbour, whose left
  // texels are the right ones of this.
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
    load_pack<T, VEC>(upper + right * texel_step, corner[1]);
    load_pack<T, VEC>(lower + right * texel_step, corner[3]);
    if (!to_right) {
      load_pack<T, VEC>(upper, corner[0]);
      load_pack<T, VEC>(lower, corner[2]);
    }
  };
  const bool walks = count > 0 && has_channels;
  uint32_t id = count > 0 ? *list : 0;
  if (walks) texel = __float_as_uint(samples[id].at[0]), enter(texel, false);
#pragma unroll 1
  for (int step = steps; step > 0; --step, --count) {
    const bool exists = count > 0, has_next = count > 1;
    ++list;
    const uint32_t next_id = has_next ? *list : id;
    Pack<float, 4> sample = {};
    float g_out[VEC] = {};
    if (exists) sample = samples[id];
    if (exists && has_channels) load_pack<T, VEC>(rows + (id / kPassPoints) * C, g_out);
    const uint32_t next = has_next ? __float_as_uint(samples[next_id].at[0]) : texel;
    float weights[4];
    scaled_corner_weights(sample.at[3], sample.at[1], sample.at[2], weights);
    float dot[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[k][v] += weights[k] * g_out[v], dot[k] += corner[k][v] * g_out[v];
    }
    // This comes before the dots are added up, so that the loads are under way meanwhile.
    if (has_channels && next != texel) {
      const bool to_right = next - texel == right;
      enter(next, to_right);
      leave(to_right);
      texel = next;
    }
    const float own_dot = transposed_sum_lanes(dot, LANES);  // of corner lane % 4
    __syncwarp();                                            // the sample has been read
    if (exists && lane < 4) samples[id].at[lane] = own_dot;
    id = next_id;
  }
  if (walks) leave(false);
}

// Along an axis of `size` texels, from the dots with the two texels that a sample at x reads, which are texels of the
// map (first_texel), to those with the two texels that it lies between, zero outside the map. The sample counts.
__device__ __forceinline__ Pack<float, 2> around_sample(float x, int32_t size, float first, float second) {
  const float before = floor(x);
  if (before < 0) return {0.f, first};
  if (before > size - 2) return {size > 1 ? second : first, 0.f};
  return {first, second};
}

// Returns the gradients of a sample from the dots with the four texels that it reads.
__device__ __forceinline__ SampleGradient<float> gradient_of_dots(const Pack<float, 4>& dots, float x, float y,
                                                                  float weight, const Level& level) {
  const Pack<float, 2> upper = around_sample(x, level.W, dots.at[0], dots.at[1]),
                       lower = around_sample(x, level.W, dots.at[2], dots.at[3]),
                       left = around_sample(y, level.H, upper.at[0], lower.at[0]),
                       right = around_sample(y, level.H, upper.at[1], lower.at[1]);
  const float around[4] = {left.at[0], right.at[0], left.at[1], right.at[1]};
  return sample_gradient(around, x - floor(x), y - floor(y), weight, level);
}

// The shared memory of a block. A sample's number is that of its query in the chunk times kPassPoints, plus its point.
template <typename T, typename Source>
struct ChunkMemory {
  Pack<float, 4>* samples;        // [chunk, kPassPoints] first texel on the level, fractions, weight; later the dots
  Level* table;                   // [L]
  uint16_t* buckets;              // [kBuckets] counts, then starts
  T* rows;                        // [chunk, C] of grad_output
  typename Source::Row* softmax;  // [chunk] if the source needs it
  uint32_t* queries;              // [chunk]
  uint16_t* sorted;               // [chunk * kPassPoints] numbers of samples, by bucket

  __device__ __forceinline__ ChunkMemory(char* shared, const ChunkSizes& sizes)
      : samples(reinterpret_cast<Pack<float, 4>*>(shared)),
        table(reinterpret_cast<Level*>(samples + sizes.chunk * kPassPoints)),
        buckets(reinterpret_cast<uint16_t*>(table + sizes.L)),
        rows(reinterpret_cast<T*>(buckets + kBuckets)),
        softmax(reinterpret_cast<typename Source::Row*>(rows + static_cast<size_t>(sizes.chunk) * sizes.C)),
        queries(reinterpret_cast<uint32_t*>(softmax + (Source::kNeedsLevel ? sizes.chunk : 0))),
        sorted(reinterpret_cast<uint16_t*>(queries + sizes.chunk)) {}

  // The buckets whose counts this thread adds up.
  __device__ __forceinline__ Pack<uint16_t, 4>& own_buckets() const {
    return reinterpret_cast<Pack<uint16_t, 4>*>(buckets)[threadIdx.x];
  }
  // Counts a sample of the square that begins at texel (x0, y0) and returns its bucket and its rank in the bucket.
  __device__ __forceinline__ uint32_t count_sample(int32_t x0, int32_t y0) const {
    const uint32_t bucket = (y0 << kColumnBits | (x0 & ((1 << kColumnBits) - 1))) & (kBuckets - 1);
    const uint32_t shift = bucket % 2 * 16;
    const uint32_t before = atomicAdd(reinterpret_cast<uint32_t*>(buckets) + bucket / 2, 1u << shift) >> shift;
    return bucket << 16 | (before & 0xffffu);
  }
  // Turns the counts of the buckets into their starts and returns how many samples they have. All threads of the block
  // call it.
  __device__ __forceinline__ int32_t start_buckets() const {
    const Pack<uint16_t, 4> counts = own_buckets();
    int32_t total,
        start = exclusive_sum_block<kChunkThreads>(counts.at[0] + counts.at[1] + counts.at[2] + counts.at[3], total);
    Pack<uint16_t, 4> starts;
#pragma unroll
    for (int i = 0; i < 4; ++i) starts.at[i] = start, start += counts.at[i];
    own_buckets() = starts;
    __syncthreads();  // the buckets' starts are known
    return total;
  }
};

// Works out the softmax of the rows of `count` queries. All threads of the block call it. image: where the samples of
// the image are found; g: the head, of G.
template <typename Source>
__device__ __forceinline__ void load_softmax(const Source& image, const uint32_t* queries, uint32_t count, uint32_t G,
                                             uint32_t g, int K, typename Source::Row* softmax) {
  const uint32_t lane = threadIdx.x % kSoftmaxLanes, first = threadIdx.x / kSoftmaxLanes;
#pragma unroll 1
  for (uint32_t i = first; i - first < count; i += kChunkThreads / kSoftmaxLanes) {
    const bool exists = i < count;
    const auto row = image.row_of_lanes(exists, exists ? (queries[i] * G + g) * K : 0, K, lane, kSoftmaxLanes);
    if (exists && lane == 0) softmax[i] = row;
  }
  __syncthreads();  // the rows' softmax is known
}

// Steps 1 to 3 above.
template <typename T, typename Source, int LANES>
__global__ void __launch_bounds__(kChunkThreads, 2)
    pyramid_grad_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const Levels levels,
                        const uint32_t* __restrict__ order, const Source source, float* __restrict__ grad_sums,
                        const SampleGrads<float> grads, const ChunkSizes sizes) {
  constexpr int VEC = 4, kGroups = kChunkThreads / LANES;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = sizes.K, G = sizes.G, C = sizes.C;
  const uint32_t Q = sizes.Q, chunk = sizes.chunk;
  const ChunkMemory<T, Source> memory(shared, sizes);
  const Level* table = memory.table;
  uint32_t* queries = memory.queries;
  const int group = threadIdx.x / LANES, c = threadIdx.x % LANES * VEC;
  const bool has_channels = c < C;
  const uint32_t texel_step = G * C;

  const int64_t begin = static_cast<int64_t>(blockIdx.x) * chunk;
  uint32_t head = static_cast<uint32_t>(begin / Q),
           first = static_cast<uint32_t>(begin - static_cast<int64_t>(head) * Q);
  uint32_t remaining = static_cast<uint32_t>(min(sizes.rows - begin, static_cast<int64_t>(chunk)));
  memory.own_buckets() = {};
  load_levels(levels, L, sizes.S, memory.table);
  const auto first_of = [&](int l) { return l > 0 ? table[l - 1].end : 0; };  // the level's first sample of a row
  while (remaining > 0) {  // A chunk may end in another head than it begins in.
    const uint32_t count = min(remaining, Q - first);
    for (uint32_t i = threadIdx.x; i < count; i += kChunkThreads) queries[i] = order[first + i];
    __syncthreads();  // the list is complete
    const uint32_t b = head / G, g = head - b * G;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, image_rows * K);
    const T* image_output = grad_output + (image_rows + g) * C + c;
    for (uint32_t i = group; i < count; i += kGroups) {
      if (!has_channels) break;
      *reinterpret_cast<Pack<T, VEC>*>(memory.rows + i * C + c) = load_once(
          reinterpret_cast<const Pack<T, VEC>*>(image_output + static_cast<int64_t>(queries[i]) * texel_step));
    }
    const int64_t image_value = (static_cast<int64_t>(b) * sizes.S * G + g) * C + c;
    if constexpr (Source::kNeedsLevel) load_softmax(image, queries, count, G, g, K, memory.softmax);

    int pass = 0;  // the first point of the level that the pass takes
#pragma unroll 1
    for (int l = 0; l < L; first_of(l) + pass + kPassPoints < table[l].end ? pass += kPassPoints : (pass = 0, ++l)) {
      const Level level = table[l];
      const int first_point = first_of(l) + pass, points = level.end - first_of(l);
      const uint32_t pass_points = min(level.end - first_point, kPassPoints);
      typename Source::Raw raw[kThreadSamplesOfPass];
      uint32_t bucket_and_rank[kThreadSamplesOfPass];  // or ~0u
      const auto id_of = [&](int j) { return threadIdx.x + j * kChunkThreads; };
      const auto exists = [&](int j) { return id_of(j) / kPassPoints < count && id_of(j) % kPassPoints < pass_points; };
      const auto row_of = [&](int j) { return queries[id_of(j) / kPassPoints] * G + g; };
      const auto weight_of = [&](int j) {
        typename Source::Row row;
        if constexpr (Source::kNeedsLevel) row = memory.softmax[id_of(j) / kPassPoints];
        return source.weight(raw[j], row);
      };
      const auto fetch = [&] {
#pragma unroll
        for (int j = 0; j < kThreadSamplesOfPass; ++j) {
          raw[j] = {};
          if (!exists(j)) continue;
          const uint32_t at = row_of(j) * K + first_point + id_of(j) % kPassPoints;
          raw[j] = image.template fetch_position<true, true>(at, queries[id_of(j) / kPassPoints] * L + l);
          image.template fetch_weight<true, true>(at, raw[j]);
        }
      };
      // Finds the position of a sample and returns whether it counts.
      const auto position = [&](int j, float& x, float& y) {
        source.position(raw[j], level, points, x, y);
        return level.H > 0 && x > -1 && y > -1 && x < level.W && y < level.H;
      };
      fetch();
#pragma unroll
      for (int j = 0; j < kThreadSamplesOfPass; ++j) {
        bucket_and_rank[j] = ~0u;
        float x, y, fx, fy, part_x, part_y;
        if (!position(j, x, y) || !exists(j)) continue;
        const int32_t x0 = first_texel(x, level.W, fx, part_x), y0 = first_texel(y, level.H, fy, part_y);
        const float weight = weight_of(j);
        memory.samples[id_of(j)] = {__int_as_float(y0 * level.W + x0), fx, fy, weight * (part_x * part_y)};
        bucket_and_rank[j] = memory.count_sample(x0, y0);
      }
      __syncthreads();  // the buckets are counted
      const int32_t listed = memory.start_buckets();
#pragma unroll
      for (int j = 0; j < kThreadSamplesOfPass; ++j) {
        if (bucket_and_rank[j] == ~0u) continue;
        memory.sorted[memory.buckets[bucket_and_rank[j] >> 16] + (bucket_and_rank[j] & 0xffffu)] = id_of(j);
      }
      __syncthreads();  // the samples are sorted
      memory.own_buckets() = {};
      const int steps = (listed + kGroups - 1) / kGroups, from = group * steps;
      const int64_t level_value = image_value + static_cast<int64_t>(level.start) * texel_step;
      walk_samples<T, LANES>(memory.sorted + from, min(steps, listed - from), steps, memory.samples, memory.rows + c,
                             value + level_value, grad_sums + level_value, level, texel_step, C, has_channels);
      __syncthreads();  // the dots are complete
      fetch();
#pragma unroll
      for (int j = 0; j < kThreadSamplesOfPass; ++j) {
        if (!exists(j)) continue;
        const int64_t row = image_rows + row_of(j);
        const float weight = weight_of(j);
        SampleGradient<float> grad = gradient_of_uncounted<float>(level);
        float x, y;
        if (position(j, x, y)) grad = gradient_of_dots(memory.samples[id_of(j)], x, y, weight, level);
        put_once(grads, row * K + first_point + id_of(j) % kPassPoints, source, raw[j], level, points, weight, grad);
      }
    }
    remaining -= count, ++head, first = 0;
    if (remaining > 0) __syncthreads();  // the list and the rows have been read
  }
}

struct ChunkPlan {
  int64_t chunk;                 // the queries of a block, or 0 if shared memory does not hold a single one
  int64_t shared, order_shared;  // bytes of shared memory of pyramid_grad_kernel and of order_queries_kernel
};

template <typename Form>
ChunkPlan chunk_plan(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const int L = static_cast<int>(problem.L);
  const int64_t rows = problem.B * problem.G * problem.Q, resident = 2 * call.scope.device().multiprocessors;
  const auto bytes = [&](int64_t queries) { return chunk_bytes(problem, call.element(), Form::kHasSoftmax, queries); };
  const int64_t most_bytes = std::min(kChunkShared, call.scope.device().shared_for(2) - kChunkScanShared);
  const int64_t each = bytes(1) - bytes(0);
  const int64_t most = std::min<int64_t>(kMaxChunk, (most_bytes - bytes(0)) / each);
  ChunkPlan plan{};
  plan.order_shared =
      static_cast<int64_t>(sizeof(Level)) * L + static_cast<int64_t>(region_bytes(L, known_regions(call.levels, L)));
  if (most < 1) return plan;
  const int64_t waves = ceil_div(rows, resident * most);
  plan.chunk = ceil_div(rows, resident * waves), plan.shared = bytes(plan.chunk);
  return plan;
}

template <typename Form>
const char* encoder_declines(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (call.deterministic) return "it adds in no fixed order, and the call is deterministic";
  if (problem.Q != problem.S) return "the queries are not the texels of the pyramid (Q is not S)";
  if (call.is_double()) return "the values are float64";
  if (problem.C > 64) return "a row of value has more than 64 channels";
  // The other sizes that the kernel holds in 32 bits are limited by check_sizes().
  if (problem.Q * problem.L > INT32_MAX) return "Q * L is 2^31 or more";
  const ChunkPlan plan = chunk_plan(call);
  if (plan.chunk == 0 || plan.order_shared > 48 << 10) return "a block has too little shared memory";
  return nullptr;
}

// Calls f(LANES) with the number of threads, 8 or 16, that read a row of up to 64 channels together, four channels
// each.
template <typename F>
void dispatch_lanes(int64_t C, const F& f) {
  if (C <= 32) return f(std::integral_constant<int, 8>{});
  f(std::integral_constant<int, 16>{});
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
  uint32_t* order_data = data_of(order);
  launch({kOp, "order_queries_kernel", call.scope, kOrderQueryBlocks, kOrderQueryThreads, plan.order_shared},
         order_queries_kernel, call.levels, known_regions(call.levels, L), L, problem.S, order_data);
  dispatch_value_type(call.value.scalar_type(), [&]<typename T, typename A>(T, A) {
    if constexpr (sizeof(A) == 4) {
      const auto source = call.form.template source<T, A>();
      using Source = std::decay_t<decltype(source)>;
      dispatch_lanes(problem.C, [&](auto lanes) {
        launch({kOp, "pyramid_grad_kernel", call.scope, ceil_div(rows, plan.chunk), kChunkThreads, plan.shared,
                kChunkScanShared},
               pyramid_grad_kernel<T, Source, decltype(lanes)::value>, data_of(call.grad_output), data_of(call.value),
               call.levels, order_data, source, data_of(sums), call.form.template final_grads<A>(),
               ChunkSizes{problem.S, rows, static_cast<int32_t>(problem.Q), static_cast<int32_t>(problem.G),
                          static_cast<int32_t>(problem.C), L, static_cast<int32_t>(problem.K),
                          static_cast<uint32_t>(plan.chunk)});
      });
    }
  });
  if (!is_float) copy_(call.grad_value, sums);
}

}  // namespace
}  // namespace visdet::ms_deform_attn
