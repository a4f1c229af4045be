// Path "strips", for calls with few samples, as a decoder makes them. A head's samples on one level fit into shared
// memory.
//
// A block owns a strip: some neighbouring rows of a level for one (batch, head). Its threads
//   1. read the locations of the head's samples on the level, and keep the samples that read texels of the strip;
//   2. sort these by cell (common/cells.cuh) and number, and keep a record of each in shared memory;
//   3. write the gradients of the samples whose cells begin in the strip, a group of threads one of them at a time, or
//      two in float32;
//   4. write each texel of grad_value once, a group of threads two neighbouring texels, or several groups where the
//      cells hold many samples. The records of the cells above the two stand side by side, and so do those below.
//
// No writes race. Only where a sample stands before it is sorted depends on the order of the threads, so that the
// results do not differ between runs.
#pragma once

#include "cuda/ms_deform_attn/backward_gather.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kStripThreads = 512;
constexpr int kPartRecords = 8;
// Of float32 pyramids with more texels, the path "direct" is faster.
constexpr int64_t kMostFloatTexels = 65536;

// How the levels are cut.
struct Strips {
  int32_t rows[kMaxHostLevels];   // of a strip of the level; its last strip may have fewer
  int32_t first[kMaxHostLevels];  // the number of the level's first strip among those of a head
  int32_t count;                  // the strips of a head
  int64_t samples, cells;         // the most that a strip can have
};

// A sample that reads a texel of the strip. sample: query << point_bits | point. rank: how many samples of its cell
// were found before it.
struct alignas(8) FoundSample {
  uint32_t cell;
  uint16_t sample, rank;
};

// The shared memory of a block.
struct StripScratch {
  Record<float>* records;  // [samples] in the order of cells and samples; fx and fy stay the position in texels
  FoundSample* found;      // [samples] in any order, in the place of the records
  int32_t* starts;         // [cells + 1] of the samples of a cell; before that, their number, and last that of all
  uint16_t* samples;       // [samples] in the order of cells

  static int64_t bytes(const Strips& strips) {
    return strips.samples * (sizeof(Record<float>) + sizeof(uint16_t)) + (strips.cells + 1) * sizeof(int32_t);
  }
  __device__ __forceinline__ StripScratch(char* shared, const Strips& strips)
      : records(reinterpret_cast<Record<float>*>(shared)),
        found(reinterpret_cast<FoundSample*>(shared)),
        starts(reinterpret_cast<int32_t*>(records + strips.samples)),
        samples(reinterpret_cast<uint16_t*>(starts + strips.cells + 1)) {}
};

// What the threads of a block know of their strip.
template <typename Source>
struct Strip {
  Source source;  // of the image
  SampleGrads<float> grads;
  Level level;
  int32_t y_first, rows;  // of texels
  int32_t points, point_bits;
  int32_t Q, G, K, L, l;
  uint32_t first_index;   // of the samples of query 0 on the level, among those of the image
  int64_t image_samples;  // those of the images before
  int64_t first_row;      // of query 0, among all rows

  __device__ __forceinline__ int32_t columns() const { return level.W + 1; }  // of cells
  __device__ __forceinline__ int32_t cells() const { return (rows + 1) * columns(); }
  __device__ __forceinline__ uint32_t index_of(int32_t query, int32_t point) const {
    return static_cast<uint32_t>(query) * static_cast<uint32_t>(G * K) + first_index + point;
  }
  __device__ __forceinline__ typename Source::Raw fetch(int32_t query, int32_t point) const {
    return source.fetch_position(index_of(query, point), static_cast<uint32_t>(query * L + l));
  }
  __device__ __forceinline__ float weight(int32_t query, int32_t point, typename Source::Raw& raw) const {
    source.fetch_weight(index_of(query, point), raw);
    return source.weight(raw, source.row_at(first_row + static_cast<int64_t>(query) * G));
  }
  __device__ __forceinline__ bool counts(float x, float y) const {
    return x > -1.f && y > -1.f && x < static_cast<float>(level.W) && y < static_cast<float>(level.H);
  }
  // Whether a sample that counts reads a texel of the strip.
  __device__ __forceinline__ bool reads(float y) const {
    return y >= static_cast<float>(y_first - 1) && y < static_cast<float>(y_first + rows);
  }
  // The number within the strip of the cell of a sample that reads one of its texels.
  __device__ __forceinline__ uint32_t cell(float x, float y) const {
    return cell_of<uint32_t>(x, y, level.W) - static_cast<uint32_t>(y_first) * columns();
  }
  __device__ __forceinline__ void put(int32_t query, int32_t point, float weight, SampleGradient<float> grad,
                                      bool add = false) const {
    grads.put(image_samples + index_of(query, point), weight, grad, add);
  }
};

// Finds the samples that read texels of the strip, and counts those of each cell. The first strip of a level writes the
// gradients of the samples that do not count.
template <typename Source>
__device__ __forceinline__ void find_samples(const Strip<Source>& strip, const StripScratch& scratch) {
  constexpr int kEach = 4;  // the loads that a thread has in flight
  const int32_t cells = strip.cells(), points = max(strip.points, 1);
  for (int i = threadIdx.x; i <= cells; i += kStripThreads) scratch.starts[i] = 0;
  __syncthreads();  // the counters are zero
  // A thread has one point of every stride-th query.
  const int32_t stride = kStripThreads / points, first_query = threadIdx.x / points,
                point = threadIdx.x - first_query * points;
  const int32_t Q = first_query < stride && strip.points > 0 ? strip.Q : 0;
  for (int32_t first = first_query; first < Q; first += kEach * stride) {
    typename Source::Raw raw[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) raw[i] = strip.fetch(min(first + i * stride, Q - 1), point);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t query = first + i * stride;
      if (query >= Q) break;
      float x, y;
      strip.source.position(raw[i], strip.level, strip.points, x, y);
      if (strip.reads(y) && strip.counts(x, y)) {
        const uint32_t cell = strip.cell(x, y);
        const int32_t rank = atomicAdd(scratch.starts + cell, 1), index = atomicAdd(scratch.starts + cells, 1);
        scratch.found[index] = {cell, static_cast<uint16_t>(query << strip.point_bits | point),
                                static_cast<uint16_t>(rank)};
      } else if (strip.y_first == 0 && !strip.counts(x, y)) {
        const float weight = strip.grads.packed != nullptr ? strip.weight(query, point, raw[i]) : 0.f;
        strip.put(query, point, weight, gradient_of_uncounted<float>(strip.level));
      }
    }
  }
  __syncthreads();  // the samples are found
}

// Writes the records of the samples in the order of their cells and, within a cell, of their numbers.
template <typename Source>
__device__ __forceinline__ void sort_samples(const Strip<Source>& strip, const StripScratch& scratch) {
  const int32_t cells = strip.cells(), count = scratch.starts[cells];
  scan_counts<kStripThreads>(scratch.starts, scratch.starts, 0, cells, 0);
  __syncthreads();  // the starts are known
  for (int32_t i = threadIdx.x; i < count; i += kStripThreads) {
    const FoundSample found = scratch.found[i];
    scratch.samples[scratch.starts[found.cell] + found.rank] = found.sample;
  }
  __syncthreads();  // the samples stand in their cells, and records may take the place of what was found
  for (int32_t i = threadIdx.x; i < count; i += kStripThreads) {
    const int32_t sample = scratch.samples[i], query = sample >> strip.point_bits,
                  point = sample & ((1 << strip.point_bits) - 1);
    typename Source::Raw raw = strip.fetch(query, point);
    const float weight = strip.weight(query, point, raw);
    float x, y;
    strip.source.position(raw, strip.level, strip.points, x, y);
    const uint32_t cell = strip.cell(x, y);
    const int32_t begin = scratch.starts[cell], end = scratch.starts[cell + 1];
    int32_t at = begin;
    for (int32_t other = begin; other < end; ++other) at += scratch.samples[other] < sample;
    scratch.records[at] = {sample, x, y, weight};
  }
  __syncthreads();  // the records are sorted
}

// Returns the address of a row. This is one instruction here, where the compiler would take the sum apart and need two
// more for each row.
__device__ __forceinline__ const char* row_at(const char* rows, int32_t row, uint32_t row_bytes) {
  const char* at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(row_bytes), "l"(rows));
  __builtin_assume(__isGlobal(at));
  return at;
}

// Writes the gradients of the samples whose cells begin in the strip: those of the cells below its last row of texels
// belong to the next strip, if there is one. A group of threads takes kBatch samples at a time, and each of its first
// kBatch threads finishes one of them. grad_output, value: the first rows of the (batch, head).
template <typename T, typename Source>
__device__ __forceinline__ void write_sample_grads(const Strip<Source>& strip, const StripScratch& scratch,
                                                   const char* grad_output, const char* value, int32_t C) {
  constexpr int VEC = kVectorValues<T>, LANES = kGatherLanes<T, float>, kGroups = kStripThreads / LANES;
  constexpr int kBatch = sizeof(T) == 4 ? 2 : 1;
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int32_t H = strip.level.H, W = strip.level.W;
  const uint32_t row_bytes = strip.G * C * sizeof(T);
  const bool is_last = strip.y_first + strip.rows == H;
  const int32_t count = scratch.starts[(strip.rows + is_last) * strip.columns()];
  value += static_cast<uint64_t>(strip.level.start) * row_bytes;
  for (int32_t c0 = 0; c0 < C; c0 += LANES * VEC) {
    const bool has_channels = c0 + lane * VEC < C;
    const int32_t c = has_channels ? c0 + lane * VEC : 0;
    const char *rows = grad_output + c * sizeof(T), *texels = value + c * sizeof(T);
#pragma unroll 1
    for (int32_t first = 0; first < count; first += kGroups * kBatch) {
      const int32_t of_group = first + group * kBatch, mine = of_group + lane % kBatch;
      float of_batch[4][kBatch] = {};
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const Record<float> record = scratch.records[min(of_group + u, count - 1)];
        const int32_t x = __float2int_rd(record.fx), y = __float2int_rd(record.fy), left = max(x, 0),
                      right = min(x + 1, W - 1), top = max(y, 0) * W, bottom = min(y + 1, H - 1) * W;
        const int32_t corners[4] = {top + left, top + right, bottom + left, bottom + right};
        float g_out[VEC];
        load_pack<T, VEC>(row_at(rows, record.sample >> strip.point_bits, row_bytes), g_out);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float corner[VEC];
          load_pack<T, VEC>(row_at(texels, corners[k], row_bytes), corner);
#pragma unroll
          for (int v = 0; v < VEC; ++v) of_batch[k][u] += corner[v] * g_out[v];
          of_batch[k][u] = has_channels ? of_batch[k][u] : 0.f;
        }
      }
      float dots[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) dots[k] = transposed_sum_lanes(of_batch[k], LANES);
      if (mine >= count || lane >= kBatch) continue;
      const Record<float> record = scratch.records[mine];
      const int32_t x = __float2int_rd(record.fx), y = __float2int_rd(record.fy);
      const bool has_column[2] = {x >= 0, x + 1 < W}, has_row[2] = {y >= 0, y + 1 < H};
#pragma unroll
      for (int k = 0; k < 4; ++k) dots[k] = has_column[k % 2] && has_row[k / 2] ? dots[k] : 0.f;
      strip.put(record.sample >> strip.point_bits, record.sample & ((1 << strip.point_bits) - 1), record.weight,
                sample_gradient(dots, record.fx - static_cast<float>(x), record.fy - static_cast<float>(y),
                                record.weight, strip.level),
                c0 > 0);
    }
  }
}

// Writes the strip's texels. 2^part_bits groups of threads divide the records around two neighbouring texels; where W
// is odd, the last texel of a row is alone. A record that only one of the two reads has a factor of zero for the other,
// so that numbers that are not finite reach both. grad_output: the first row of the (batch, head), grad_value: the row
// of the strip's first texel.
template <typename T, typename Source>
__device__ __forceinline__ void write_strip_texels(const Strip<Source>& strip, const StripScratch& scratch,
                                                   const char* grad_output, char* grad_value, int32_t C,
                                                   int part_bits) {
  constexpr int VEC = kVectorValues<T>, LANES = kGatherLanes<T, float>, kTexels = 2;
  const int32_t W = strip.level.W, in_row = (W + kTexels - 1) / kTexels, tasks = strip.rows * in_row,
                group = threadIdx.x / LANES, groups = kStripThreads / LANES >> part_bits, parts = 1 << part_bits,
                part = group & (parts - 1);
  const uint32_t row_bytes = strip.G * C * sizeof(T);
  const float reciprocal = 1.f / static_cast<float>(in_row);
  for (int32_t c0 = 0; c0 < C; c0 += LANES * VEC) {
    const int32_t c = c0 + threadIdx.x % LANES * VEC;
    const char* rows = grad_output + c * sizeof(T);
    char* texel_rows = grad_value + c * sizeof(T);
#pragma unroll 1
    for (int32_t first = 0; first < tasks; first += groups) {
      const int32_t task = first + (group >> part_bits);
      const bool exists = task < tasks && c < C;
      const int32_t row = static_cast<int32_t>((task + 0.5f) * reciprocal), column = (task - row * in_row) * kTexels;
      const int cells = min(kTexels + 1, W + 1 - column);  // in a row around the texels
      float sum[kTexels][VEC] = {};
      if (exists) {
        const float x = static_cast<float>(column), y = static_cast<float>(strip.y_first + row);
        const int32_t *above = scratch.starts + row * (W + 1) + column, *below = above + W + 1;
        const int32_t of_above = above[cells] - above[0], count = of_above + below[cells] - below[0];
        const Record<float>* from_above = scratch.records + above[0];
        const Record<float>* from_below = scratch.records + (below[0] - of_above);
#pragma unroll 4
        for (int32_t i = part; i < count; i += parts) {
          const Record<float> record = (i < of_above ? from_above : from_below)[i];
          float g_out[VEC];
          load_pack<T, VEC>(row_at(rows, record.sample >> strip.point_bits, row_bytes), g_out);
          const float weight = record.weight * (1.f - fabsf(record.fy - y));
#pragma unroll
          for (int k = 0; k < kTexels; ++k) {
            const float factor = weight * __saturatef(1.f - fabsf(record.fx - x - k));
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[k][v] += factor * g_out[v];
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kTexels; ++k) {
        if (parts > 1) sum_lanes(sum[k], LANES, LANES << part_bits);
        if (exists && part == 0 && k + 1 < cells) {
          char* to = texel_rows + static_cast<uint64_t>(static_cast<uint32_t>(row * W + column + k)) * row_bytes;
          store_pack<T, VEC>(reinterpret_cast<T*>(to), sum[k]);
        }
      }
    }
  }
}

template <typename T, typename Source>
__global__ void __launch_bounds__(kStripThreads, 2)
    strips_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const Levels levels,
                  const Strips strips, const Source source, T* __restrict__ grad_value, const SampleGrads<float> grads,
                  const MsDeformAttnProblem problem, int point_bits) {
  extern __shared__ __align__(16) char shared[];
  const StripScratch scratch(shared, strips);
  const int32_t Q = problem.Q, G = problem.G, K = problem.K, L = problem.L, C = problem.C;
  // The heads of a strip follow each other, so that their rows, which lie side by side, are written at the same time.
  const int32_t task = blockIdx.x / G, g = blockIdx.x - task * G, b = task / strips.count,
                number = task - b * strips.count;
  int l = L - 1;
  while (number < strips.first[l]) --l;
  const Level level = read_level(levels, l, problem.S);
  const int32_t points = points_on(levels, l), y_first = (number - strips.first[l]) * strips.rows[l];
  const int64_t image_queries = static_cast<int64_t>(b) * Q, image_samples = image_queries * G * K;
  const Strip<Source> strip{source.of_image(image_queries * L, image_samples),
                            grads,
                            level,
                            y_first,
                            min(strips.rows[l], level.H - y_first),
                            points,
                            point_bits,
                            Q,
                            G,
                            K,
                            L,
                            l,
                            static_cast<uint32_t>(g * K + level.end - points),
                            image_samples,
                            image_queries * G + g};
  find_samples(strip, scratch);
  sort_samples(strip, scratch);
  const int64_t head_row = static_cast<int64_t>(b) * problem.S * G + g;
  const auto* rows = reinterpret_cast<const char*>(grad_output + strip.first_row * C);
  write_sample_grads<T>(strip, scratch, rows, reinterpret_cast<const char*>(value + head_row * C), C);
  // The number of groups that share two texels doubles as long as each has kPartRecords records a texel on average.
  const int32_t visits = 4 * scratch.starts[strip.cells()], texels = strip.rows * level.W;
  int part_bits = 0;
  while (kGatherLanes<T, float> << part_bits < 32 && visits >= kPartRecords * texels << part_bits) ++part_bits;
  const int64_t first_texel = level.start + static_cast<int64_t>(y_first) * level.W;
  write_strip_texels<T>(strip, scratch, rows, reinterpret_cast<char*>(grad_value + (head_row + first_texel * G) * C), C,
                        part_bits);
}

// Cuts the levels. A strip costs about one unit for each of its texels and kSampleCost for each of its samples. There
// are two strips a multiprocessor, or, of larger calls, strips of the greatest cost. This grows with the samples of a
// level, since every strip reads the locations of all of them.
template <typename Form>
Strips strips_of(const BackwardCall<Form>& call) {
  constexpr int64_t kSampleCost = 8, kLeastCost = 1500, kLargeCost = 4500, kGreatestCost = 9000;
  const MsDeformAttnProblem& problem = call.problem;
  const int64_t of_all = problem.B * problem.G * (problem.S + kSampleCost * problem.Q * problem.K);
  const int64_t cost = std::clamp(of_all / (2 * call.scope.device().multiprocessors), kLeastCost,
                                  std::clamp(problem.Q * problem.P * 5 / 2, kLargeCost, kGreatestCost));
  Strips strips{};
  for (int l = 0; l < static_cast<int>(problem.L); ++l) {
    const int64_t H = call.levels.H[l], W = call.levels.W[l], samples = problem.Q * points_on(call.levels, l);
    const int64_t count = std::clamp<int64_t>((H * W + kSampleCost * samples + cost / 2) / cost, 1, H);
    const int64_t rows = ceil_div(H, count);
    strips.rows[l] = static_cast<int32_t>(rows), strips.first[l] = strips.count;
    strips.count += static_cast<int32_t>(ceil_div(H, rows));
    strips.cells = std::max(strips.cells, (rows + 1) * (W + 1));
    strips.samples = std::max(strips.samples, samples);
  }
  return strips;
}

// Float32 numbers that samples read below which adding to texels directly takes less time than sorting the samples into
// strips: 10.4 instead of 12.3 µs for 460 800 (d-fine-n), 15.4 instead of 12.2 µs for 921 600 (rt-detr; H200).
constexpr int64_t kFewFloats = 1 << 19;

template <typename Form>
const char* strips_declines(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (call.is_double()) return "the values are float64";
  if (!call.levels.contiguous) return "the host does not know the levels, or they do not fill value without a gap";
  if (problem.P > kStripThreads) return "a query has more samples on a level than a block has threads";
  if (problem.Q << point_bits_of(problem) > UINT16_MAX) return "a head has more than 65535 samples on a level";
  if (call.element() == 4 && problem.S > kMostFloatTexels) return "the values are float32, and S is above 65536";
  const int64_t numbers = problem.B * problem.Q * problem.G * problem.K * problem.C;
  if (call.element() == 4 && !call.deterministic && numbers < kFewFloats) return "few float32 numbers are sampled";
  const int64_t shared = StripScratch::bytes(strips_of(call)) + kExclusiveSumShared<kStripThreads>;
  return shared <= call.scope.device().shared_for(2) ? nullptr : "a multiprocessor does not hold two levels' samples";
}

template <typename Form>
void strips_launch(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const Strips strips = strips_of(call);
  dispatch_value_type(call.value.scalar_type(), [&]<typename T>(T, auto accumulate_tag) {
    if constexpr (std::is_same_v<decltype(accumulate_tag), float>) {
      const auto source = call.form.template source_with_softmax<T, float>();
      using Source = std::decay_t<decltype(source)>;
      launch({kOp, "strips_kernel", call.scope, problem.B * problem.G * strips.count, kStripThreads,
              StripScratch::bytes(strips), kExclusiveSumShared<kStripThreads>},
             strips_kernel<T, Source>, data_of(call.grad_output), data_of(call.value), call.levels, strips, source,
             data_of(call.grad_value), call.form.template grads<float>(), problem, point_bits_of(problem));
    }
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn
