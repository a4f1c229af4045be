// Third and last stage of the path "sorted": the records, sorted by cell, become gradients.
//
// A block of gather_kernel owns a tile of texels and the cells around them. A cell lies between four texels; here it is
// cell (x, y) of texels (x - 1, y - 1) to (x, y):
//
//      cell 0   cell 1   cell 2   cell 3     A tile of 3 x 1 texels and its 4 x 2 cells. The first and the last column
//             o        o        o            and row of cells also belong to the neighbouring tiles.
//      cell 4   cell 5   cell 6   cell 7
//
// A group of threads (a warp, with tensor cores) owns a cell, or one of several parts of a cell that holds many
// records. It has the four texels of value and the sums of their four gradients in registers, goes through the records,
// and reads one row of grad_output for each. Then the block adds up, for each texel of its tile, the sums of the four
// cells around it, and writes the texel's row of grad_value.
//
// No writes race. The records of a cell at the border of two tiles are read by both blocks for the sake of grad_value;
// only the block in whose tile the cell begins writes the gradients of its samples.
#pragma once

#include "cuda/ms_deform_attn/backward_records.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kSlots = 96;  // a tile's cells times their parts: with 128 bytes for each corner, the sums take 48 KB
// A group takes so many channels of a row at a time that it has 128 bytes of sums.
template <typename T, typename A>
constexpr int kGatherLanes = 128 / kVectorValues<T> / static_cast<int>(sizeof(A));
template <typename T, typename A>
constexpr int kGatherChannels = kVectorValues<T> * kGatherLanes<T, A>;
constexpr int kGroupBatch = 4;  // the records that a group takes at a time

// What the threads of a block know of their tile. A slot is a part of a cell: part p of n takes every n-th batch of the
// cell's records, the p-th one first.
template <typename T, typename A>
struct TileWork {
  const T *value, *grad_output;  // the first rows of the (batch, head)
  const Record<A>* records;      // the first record of its level
  SampleGrads<A> grads;
  Level level;
  Tile tile;
  int32_t x_first, y_first;     // the first texel
  uint32_t cells_x_reciprocal;  // a little more than 2^16 / tile.cells_x
  uint32_t row_bytes;           // from one row of value or grad_output to the next
  int32_t C, samples_per_query;
  int64_t first_index;  // of the samples of query 0 on the level, among all
  int point_bits;

  // Returns where a cell of the tile lies on the level.
  __device__ __forceinline__ void cell_at(int cell, int& x_in_tile, int& y_in_tile) const {
    y_in_tile = static_cast<uint32_t>(cell) * cells_x_reciprocal >> 16, x_in_tile = cell - y_in_tile * tile.cells_x;
  }
  // Returns whether this tile, of those that have the cell, is the one that writes the gradients of its samples.
  __device__ __forceinline__ bool owns(int x_in_tile, int y_in_tile) const {
    return (x_in_tile < tile.texels_x() || x_first + x_in_tile == level.W) &&
           (y_in_tile < tile.texels_y() || y_first + y_in_tile == level.H);
  }
  // Returns a record, or beyond the end of the slot one of weight zero.
  __device__ __forceinline__ Record<A> record_at(int32_t i, int32_t end) const {
    return i < end ? records[i] : Record<A>{};
  }
  // add: the gradients hold those of other channels already.
  __device__ __forceinline__ void put_grads(const Record<A>& record, const A (&dots)[4], bool add) const {
    const int32_t query = record.sample >> point_bits, point = record.sample & ((1 << point_bits) - 1);
    grads.put(static_cast<int64_t>(query) * samples_per_query + point + first_index, record.weight,
              sample_gradient(dots, record.fx, record.fy, record.weight, level), add);
  }
};

struct Slots {
  const int32_t *begin, *end;  // [kSlots] of the records of the level

  // Of a slot that may not exist, which has no records.
  __device__ __forceinline__ int32_t begin_of(int slot) const { return slot < kSlots ? begin[slot] : 0; }
  __device__ __forceinline__ int32_t end_of(int slot) const { return slot < kSlots ? end[slot] : 0; }
};

// Goes through the records of every kGroups-th slot, kGroupBatch at a time. sums: [4, kSlots, kChannels] of the
// corners' gradients, which it writes. weights: scratch for the corner weights of a batch, queries: for its queries.
// The groups of a warp call it together.
template <typename T, typename A>
__device__ __forceinline__ void walk_slots(const TileWork<T, A>& work, const Slots& slots, int32_t c0, A* sums,
                                           A* weights, int32_t* queries) {
  constexpr int VEC = kVectorValues<T>, LANES = kGatherLanes<T, A>, kBatch = kGroupBatch;
  constexpr int kGroups = kGatherThreads / LANES;
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const Level& level = work.level;
  const int32_t c = c0 + lane * VEC, stride = kBatch << work.tile.part_bits;
  const bool has_channels = c < work.C;
  const char* value = reinterpret_cast<const char*>(work.value + c);
  const char* grad_output = reinterpret_cast<const char*>(work.grad_output + c);
  weights += group * kBatch * 4, queries += group * kBatch;
  const int in_batch = lane % kBatch;  // which record of a batch this lane loads
  Record<A> next = work.record_at(slots.begin[group] + in_batch, slots.end[group]);
  for (int slot = group; slot < kSlots; slot += kGroups) {
    const int32_t begin = slots.begin[slot], end = slots.end[slot];
    const int32_t next_begin = slots.begin_of(slot + kGroups), next_end = slots.end_of(slot + kGroups);
    // The groups of a warp go on together as long as one of them has records.
    const int32_t batches = max_lanes(end > begin ? (end - begin + stride - 1) / stride : 0, LANES);
    A sum[4][VEC] = {};
    A corner[4][VEC] = {};
    bool owns = false;
    if (batches == 0) {
      next = work.record_at(next_begin + in_batch, next_end);
    } else {
      int x_in_tile, y_in_tile;
      work.cell_at(slot >> work.tile.part_bits, x_in_tile, y_in_tile);
      const int32_t x = work.x_first + x_in_tile, y = work.y_first + y_in_tile;
      owns = work.owns(x_in_tile, y_in_tile);
      const bool reads = begin < end && has_channels && owns;
      const bool left = x > 0 && reads, right = x < level.W && reads, top = y > 0, bottom = y < level.H;
      const bool is_inside[4] = {top && left, top && right, bottom && left, bottom && right};
      const int32_t texel = level.start + (y - 1) * level.W + x - 1;
      const int32_t texels[4] = {texel, texel + 1, texel + level.W, texel + level.W + 1};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (!is_inside[k]) continue;
        load_pack<T, VEC>(value + static_cast<uint64_t>(static_cast<uint32_t>(texels[k])) * work.row_bytes, corner[k]);
      }
    }
    for (int32_t batch = 0, i = begin; batch < batches; ++batch, i += stride) {
      const Record<A> record = next;
      if (lane < kBatch) {
        Pack<A, 4> corner_weights;
        scaled_corner_weights(record.weight, record.fx, record.fy, corner_weights.at);
        reinterpret_cast<Pack<A, 4>*>(weights)[in_batch] = corner_weights;
        queries[in_batch] = record.sample >> work.point_bits;
      }
      __syncwarp();  // the batch is complete
      Pack<T, VEC> rows[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) rows[u].at[v] = from_accumulate<T>(A(0));
        if (has_channels && i + u < end) {
          rows[u] = *reinterpret_cast<const Pack<T, VEC>*>(
              grad_output + static_cast<uint64_t>(static_cast<uint32_t>(queries[u])) * work.row_bytes);
        }
      }
      const bool exists = i + in_batch < end;
      // The next batch is loaded ahead; after the slot's last one it is the first of the next slot.
      if (batch + 1 < batches) {
        next = work.record_at(i + stride + in_batch, end);
      } else {
        next = work.record_at(next_begin + in_batch, next_end);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const Pack<A, 4> corner_weights = reinterpret_cast<const Pack<A, 4>*>(weights)[u];
        A g_out[VEC];
        unpack(rows[u], g_out);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[k][v] += corner_weights.at[k] * g_out[v];
        }
      }
      __syncwarp();  // the batch has been read
      A dots[4];     // lane i's are those of record i % kBatch
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        A of_record[kBatch] = {};
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          A g_out[VEC];
          unpack(rows[u], g_out);
#pragma unroll
          for (int v = 0; v < VEC; ++v) of_record[u] += corner[k][v] * g_out[v];
        }
        dots[k] = transposed_sum_lanes(of_record, LANES);
      }
      if (owns && exists && lane < kBatch) work.put_grads(record, dots, c0 > 0);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      store_pack<A, VEC>(sums + (k * kSlots + slot) * (LANES * VEC) + lane * VEC, sum[k]);
    }
  }
}

// The two sums over a cell's records are matrix products: with the records as rows, grad_output (records x channels)
// times the corners (channels x 4) gives the dots, and the corner weights (4 x records) times grad_output gives the
// gradients of the corners. In bfloat16 they run on the tensor cores, a warp a cell, kMmaRecords records at a time. The
// products are exact and are added in float32. A corner weight goes in as two bfloat16 numbers, its rounding and the
// rounding of the rest (relative error 2^-17), in matrix rows 8 apart, whose sums meet in one thread. float16 cannot
// hold every weight.
constexpr int kMmaRecords = 16;
constexpr int kMmaChannels = 32;

// Whether the code that is compiled has these products. The host chooses a kernel by the GPU, which may be newer than
// its code: the driver compiles PTX of 7.5 for an A100.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasProducts = false;
#else
constexpr bool kHasProducts = true;
#endif

// Adds a product of matrices of 16 x 16 and 16 x 8 numbers to `sums`.
__device__ __forceinline__ void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Returns the transpose of an 8 x 8 matrix of 16-bit numbers; thread 4 r + t has columns 2 t and 2 t + 1 of row r.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 750
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
#endif
  return out;
}

// What walk_slots() does, by matrix products. weights: scratch of 256 bytes a warp, for the weights of kMmaRecords
// records, [corner][t]: of records 2 t and 2 t + 1 the rounded weights and the rests, of 2 t + 8 and 2 t + 9 the same.
template <typename T>
__device__ __forceinline__ void multiply_slots(const TileWork<T, float>& work, const Slots& slots, int32_t c0,
                                               float* sums, uint16_t* weights) {
  constexpr int kWarps = kGatherThreads / 32;
  const int warp = threadIdx.x / 32, matrix_row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const Level& level = work.level;
  const int32_t stride = kMmaRecords << work.tile.part_bits;
  weights += warp * 4 * 4 * 8;
  const int in_batch = matrix_row + t % 2 * 8;  // the record that this lane loads, and finishes if t < 2
  const int pair_element = matrix_row / 2 * 8 + t % 2 * 4 + matrix_row % 2;
  const char* value = reinterpret_cast<const char*>(work.value + c0 + t * 8);
  const char* grad_output = reinterpret_cast<const char*>(work.grad_output + c0 + t * 8);
  Record<float> next = work.record_at(slots.begin[warp] + in_batch, slots.end[warp]);
  for (int slot = warp; slot < kSlots; slot += kWarps) {
    const int32_t begin = slots.begin[slot], end = slots.end[slot];
    const int32_t next_begin = slots.begin_of(slot + kWarps), next_end = slots.end_of(slot + kWarps);
    int x_in_tile, y_in_tile;
    work.cell_at(slot >> work.tile.part_bits, x_in_tile, y_in_tile);
    const int32_t x = work.x_first + x_in_tile, y = work.y_first + y_in_tile;
    const bool owns = work.owns(x_in_tile, y_in_tile);
    float sum[4][4] = {};
    uint4 corner = {};  // corner matrix_row, if that is under 4
    if (begin < end && owns && matrix_row < 4) {
      const int32_t corner_x = x - 1 + matrix_row % 2, corner_y = y - 1 + matrix_row / 2;
      if (corner_x >= 0 && corner_x < level.W && corner_y >= 0 && corner_y < level.H) {
        const uint32_t texel = level.start + corner_y * level.W + corner_x;
        corner = *reinterpret_cast<const uint4*>(value + static_cast<uint64_t>(texel) * work.row_bytes);
      }
    }
    if (begin >= end) next = work.record_at(next_begin + in_batch, next_end);
    for (int32_t i = begin; i < end; i += stride) {
      const Record<float> record = next;
      const int32_t query = record.sample >> work.point_bits, other = __shfl_xor_sync(kAllLanes, query, 1);
      uint4 g0 = {}, g1 = {};  // rows of records matrix_row and matrix_row + 8
      const uint32_t query0 = t % 2 ? other : query, query1 = t % 2 ? query : other;
      if (i + matrix_row < end) {
        g0 = *reinterpret_cast<const uint4*>(grad_output + static_cast<uint64_t>(query0) * work.row_bytes);
      }
      if (i + matrix_row + 8 < end) {
        g1 = *reinterpret_cast<const uint4*>(grad_output + static_cast<uint64_t>(query1) * work.row_bytes);
      }
      next = i + stride < end ? work.record_at(i + stride + in_batch, end)
                              : work.record_at(next_begin + in_batch, next_end);
      __syncwarp();  // the previous weights have been read
      if (t < 2) {
        float corner_weights[4];
        scaled_corner_weights(record.weight, record.fx, record.fy, corner_weights);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const auto rounded = from_accumulate<__nv_bfloat16>(corner_weights[k]);
          const auto rest = from_accumulate<__nv_bfloat16>(corner_weights[k] - to_accumulate(rounded));
          weights[k * 32 + pair_element] = __bfloat16_as_ushort(rounded);
          weights[k * 32 + pair_element + 2] = __bfloat16_as_ushort(rest);
        }
      }
      __syncwarp();  // these weights are complete
      uint4 a = {};
      if (matrix_row < 4) a = reinterpret_cast<const uint4*>(weights)[matrix_row * 4 + t];
      multiply_add(sum[0], a.x, a.y, a.z, a.w, transpose(g0.x), transpose(g1.x));
      multiply_add(sum[1], a.x, a.y, a.z, a.w, transpose(g0.y), transpose(g1.y));
      multiply_add(sum[2], a.x, a.y, a.z, a.w, transpose(g0.z), transpose(g1.z));
      multiply_add(sum[3], a.x, a.y, a.z, a.w, transpose(g0.w), transpose(g1.w));
      if (!owns) continue;
      // The dot products with corners 2 t and 2 t + 1, first of record matrix_row, then of record matrix_row + 8.
      float dots[4] = {};
      multiply_add(dots, g0.x, g1.x, g0.y, g1.y, corner.x, corner.y);
      multiply_add(dots, g0.z, g1.z, g0.w, g1.w, corner.z, corner.w);
      const float even = __shfl_xor_sync(kAllLanes, t % 2 ? dots[0] : dots[2], 1);
      const float odd = __shfl_xor_sync(kAllLanes, t % 2 ? dots[1] : dots[3], 1);
      if (t < 2 && i + in_batch < end) {
        const float of_record[4] = {t ? even : dots[0], t ? odd : dots[1], t ? dots[2] : even, t ? dots[3] : odd};
        work.put_grads(record, of_record, c0 > 0);
      }
    }
    if (matrix_row < 4) {
      float* to = sums + (matrix_row * kSlots + slot) * kMmaChannels + t * 8;
      const float low[4] = {sum[0][0] + sum[0][2], sum[0][1] + sum[0][3], sum[1][0] + sum[1][2], sum[1][1] + sum[1][3]};
      const float high[4] = {sum[2][0] + sum[2][2], sum[2][1] + sum[2][3], sum[3][0] + sum[3][2],
                             sum[3][1] + sum[3][3]};
      store_pack<float, 4>(to, low);
      store_pack<float, 4>(to + 4, high);
    }
  }
}

// Writes, or adds to, the rows of grad_value of the tile's texels, each from the sums of the four cells around it.
// grad_value: the first row of the (batch, head).
template <typename T, typename A>
__device__ __forceinline__ void write_texels(const TileWork<T, A>& work, const A* sums, int32_t c0, T* grad_value,
                                             int64_t row_values, bool add) {
  constexpr int VEC = kVectorValues<T>, LANES = kGatherLanes<T, A>, kGroups = kGatherThreads / LANES;
  const Tile tile = work.tile;
  const int lane = threadIdx.x % LANES;
  const int32_t c = c0 + lane * VEC;
  const uint32_t texels_x_reciprocal = 65536u / tile.texels_x() + 1;
  for (int texel = threadIdx.x / LANES; texel < tile.texels_x() * tile.texels_y(); texel += kGroups) {
    const int y_in_tile = static_cast<uint32_t>(texel) * texels_x_reciprocal >> 16,
              x_in_tile = texel - y_in_tile * tile.texels_x();
    const int32_t x = work.x_first + x_in_tile, y = work.y_first + y_in_tile;
    if (x >= work.level.W || y >= work.level.H || c >= work.C) continue;
    A sum[VEC] = {};
    T* to = grad_value + c + (work.level.start + static_cast<int64_t>(y) * work.level.W + x) * row_values;
    if (add) load_pack<T, VEC>(to, sum);
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // the texel is corner k of this cell
      const int cell = (y_in_tile + 1 - k / 2) * tile.cells_x + x_in_tile + 1 - k % 2;
#pragma unroll 1
      for (int part = 0; part < 1 << tile.part_bits; ++part) {
        A of_part[VEC];
        load_pack<A, VEC>(sums + (k * kSlots + (cell << tile.part_bits) + part) * (LANES * VEC) + lane * VEC, of_part);
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] += of_part[v];
      }
    }
    store_pack<T, VEC>(to, sum);
  }
}

template <typename T, typename A, bool TENSOR_CORES>
__global__ void __launch_bounds__(kGatherThreads, TENSOR_CORES ? 4 : 2)  // as many blocks as need no spilled registers
    gather_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const int32_t* __restrict__ starts, const Record<A>* __restrict__ records, T* __restrict__ grad_value,
                  const SampleGrads<A> grads, const MsDeformAttnProblem problem, int64_t head_cell_starts,
                  int point_bits) {
  constexpr int kChannels = kGatherChannels<T, A>, kGroups = kGatherThreads / kGatherLanes<T, A>;
  constexpr bool kMultiplies = TENSOR_CORES && kHasProducts;
  constexpr int kBatch = kMultiplies ? kMmaRecords : kGroupBatch;
  extern __shared__ __align__(16) char shared[];
  auto* sums = reinterpret_cast<A*>(shared);                                        // [4, kSlots, kChannels]
  auto* weights = sums + static_cast<size_t>(4) * kSlots * kChannels;               // [kGroups, kGroupBatch, 4]
  auto* queries = reinterpret_cast<int32_t*>(weights + kGroups * kGroupBatch * 4);  // [kGroups, kGroupBatch]
  __shared__ int32_t slot_begin[kSlots], slot_end[kSlots];
  const int32_t G = static_cast<int32_t>(problem.G), C = static_cast<int32_t>(problem.C);
  // One head after another, so that its rows of grad_output stay in the second-level cache.
  const uint32_t head = blockIdx.y + blockIdx.z * 65535u;
  if (head >= static_cast<uint32_t>(problem.B) * G) return;
  const uint32_t b = head / G, g = head - b * G;
  const int64_t image_value = (static_cast<int64_t>(b) * problem.S * G + g) * C;
  const int64_t image_output = (static_cast<int64_t>(b) * problem.Q * G + g) * C;
  // If levels have rows in common, one block takes all tiles of a head, one after another. No model has such levels.
  const bool add = !plan[0].disjoint;
  if (add && blockIdx.x > 0) return;

  for (uint32_t task = blockIdx.x;; task += add ? 1 : gridDim.x) {
    // The last level comes first: it is the coarsest, whose tiles take the longest.
    uint32_t tile_of_level = task;
    int l = static_cast<int>(problem.L) - 1;
    while (l >= 0 && tile_of_level >= static_cast<uint32_t>(plan[l].tiles)) tile_of_level -= plan[l--].tiles;
    if (l < 0) return;
    const Level level = plan[l].level;
    const Tile tile = tile_of_shape(plan[l].tile_shape);
    const uint32_t tiles_x = static_cast<uint32_t>(level.W + tile.texels_x() - 1) / tile.texels_x(),
                   tile_y = tile_of_level / tiles_x;
    const int32_t y_first = tile_y * tile.texels_y(), x_first = (tile_of_level - tile_y * tiles_x) * tile.texels_x();
    const TileWork<T, A> work{value + image_value,
                              grad_output + image_output,
                              records + (head * problem.K + plan[l].first_point) * problem.Q,
                              grads,
                              level,
                              tile,
                              x_first,
                              y_first,
                              65536u / tile.cells_x + 1,
                              static_cast<uint32_t>(G * C * sizeof(T)),
                              C,
                              static_cast<int32_t>(problem.G * problem.K),
                              (static_cast<int64_t>(b) * problem.Q * G + g) * problem.K + plan[l].first_point,
                              point_bits};
    const int32_t* level_starts = starts + head * head_cell_starts + plan[l].first_cell_start;
    for (int slot = threadIdx.x; slot < kSlots; slot += kGatherThreads) {
      int x_in_tile, y_in_tile;
      work.cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
      const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
      int32_t begin = 0, end = 0;
      if (x <= level.W && y <= level.H) {
        const int64_t cell = static_cast<int64_t>(y) * (level.W + 1) + x;
        begin = level_starts[cell] + (slot & ((1 << tile.part_bits) - 1)) * kBatch, end = level_starts[cell + 1];
      }
      slot_begin[slot] = begin, slot_end[slot] = end;
    }
    __syncthreads();  // the slots' records are known
    const Slots slots{slot_begin, slot_end};
    for (int32_t c0 = 0; c0 < C; c0 += kChannels) {
      if constexpr (kMultiplies) {
        multiply_slots(work, slots, c0, sums, reinterpret_cast<uint16_t*>(weights));
      } else {
        walk_slots(work, slots, c0, sums, weights, queries);
      }
      __syncthreads();  // the slots' sums are complete
      write_texels(work, sums, c0, grad_value + image_value, static_cast<int64_t>(G) * C, add);
      __syncthreads();  // sums and slots may be written again
    }
  }
}

template <typename T, typename A, typename Form>
void gather(const BackwardCall<Form>& call, const SortedSizes& sizes, const SampleGrads<A>& grads,
            const int32_t* starts, const Record<A>* sorted) {
  const MsDeformAttnProblem& problem = call.problem;
  constexpr int kChannels = kGatherChannels<T, A>, kGroups = kGatherThreads / kGatherLanes<T, A>;
  constexpr bool kTensorCores = std::is_same_v<T, __nv_bfloat16>;
  static_assert(!kTensorCores || kChannels == kMmaChannels, "the channels of a step fill the matrices");
  // The tensor cores take bfloat16 from sm_80 on, and only rows that fill the matrices.
  const bool multiplies = problem.C % kMmaChannels == 0 && call.scope.device().capability >= 80;
  const auto kernel = multiplies ? gather_kernel<T, A, kTensorCores> : gather_kernel<T, A, false>;
  const int64_t shared = sizeof(A) * 4 * kSlots * kChannels + kGroups * kGroupBatch * (4 * sizeof(A) + 4);
  launch({kOp, "gather_kernel", call.scope, head_grid(sizes.tiles, problem.B * problem.G), kGatherThreads, shared,
          2 * kSlots * sizeof(int32_t)},
         kernel, data_of(call.grad_output), data_of(call.value), call.plans.get(), starts, sorted,
         data_of(call.grad_value), grads, problem, sizes.cell_starts, point_bits_of(problem));
}

}  // namespace
}  // namespace visdet::ms_deform_attn
