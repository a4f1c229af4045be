// Third and last stage of the path "sorted": records that are sorted by cell become gradients.
//
// A block of gather_kernel owns a tile of texels and the cells around it. A group of LANES threads (with tensor cores,
// a warp) owns a cell, or a part of a cell that holds many records: it holds the cell's four texels of value and their
// four gradients in registers and walks the records, reading one row of grad_output each. The block then adds up, for
// each texel of its tile, the sums of the four cells around it, and writes the texel's row of grad_value.
//
// No writes race. Cells on the seam of two tiles are walked by both blocks for grad_value; the block in whose tile the
// cell begins writes the gradients of its samples.
#pragma once

#include "cuda/ms_deform_attn/backward_records.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kGatherThreads = 256;
constexpr int kSlots = 96;  // cells of a tile times the groups that share a cell: 48 KB of sums at 128 bytes a corner

// The two gradients of a cell's samples are matrix products: with the records as rows, grad_output (records x channels)
// times the corners (channels x 4) gives the dots, and the corner weights (4 x records) times grad_output the sums. In
// bfloat16 they run on the tensor cores, a warp a cell, 16 records at a time. The products are exact and added in
// float32. A corner weight goes in as two bfloat16 numbers, its rounding and the rounding of the rest (relative error
// 2^-17), in matrix rows 8 apart, whose sums meet in one thread. float16 cannot hold every weight.
constexpr int kMmaRecords = 16;
constexpr int kMmaChannels = 32;

__device__ __forceinline__ void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Of an 8 x 8 matrix of 16-bit numbers, thread 4 r + t holding columns 2 t and 2 t + 1 of row r: its transpose.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 750
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
#endif
  return out;
}

// Of a row, 128 bytes of sums at a time: so much that the planes of a tile's cells fit shared memory.
template <typename T, typename A>
constexpr int kGatherLanes = 128 / kRowVec<T> / static_cast<int>(sizeof(A));
constexpr int kGatherBatch = 4;  // records that a group walks at a time

template <typename T, typename A, bool TENSOR_CORES>
__global__ void __launch_bounds__(kGatherThreads, TENSOR_CORES ? 4 : 2)  // what fits the registers without spills
    gather_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const int32_t* __restrict__ starts, const Record<A>* __restrict__ records, T* __restrict__ grad_value,
                  const SampleGrads<A> grads, const MsDeformAttnProblem problem, int64_t head_slots, int point_bits) {
  constexpr int VEC = kRowVec<T>, LANES = kGatherLanes<T, A>, kGroups = kGatherThreads / LANES;
  constexpr int kChannels = LANES * VEC;
  constexpr int kBatch = TENSOR_CORES ? kMmaRecords : kGatherBatch;  // of a group, or with tensor cores of a warp
  extern __shared__ __align__(16) char shared[];
  auto* planes = reinterpret_cast<A*>(shared);                                       // [4, kSlots, kChannels]
  auto* batches = planes + static_cast<size_t>(4) * kSlots * kChannels;              // [kGroups, kBatch, 4]
  auto* batch_queries = reinterpret_cast<int32_t*>(batches + kGroups * kBatch * 4);  // [kGroups, kBatch]
  __shared__ int32_t slot_begin[kSlots], slot_end[kSlots];
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  A* my_weights = batches + group * kBatch * 4;
  int32_t* my_queries = batch_queries + group * kBatch;
  const int32_t G = static_cast<int32_t>(problem.G), C = static_cast<int32_t>(problem.C);
  const uint32_t row_bytes = static_cast<uint32_t>(G * C * sizeof(T));
  constexpr unsigned kAll = 0xffffffffu;
  // One head after another, so that its rows of grad_output stay in the second-level cache.
  const uint32_t head = blockIdx.y + blockIdx.z * 65535u;
  if (head >= static_cast<uint32_t>(problem.B) * G) return;
  const uint32_t b = head / G, g = head - b * G;
  const int64_t image_value = (static_cast<int64_t>(b) * problem.S * G + g) * C;
  const int64_t image_output = (static_cast<int64_t>(b) * problem.Q * G + g) * C;
  // Levels that share rows are the business of one block a head, one after another: nobody has such tables.
  const bool add = !plan[0].disjoint;
  if (add && blockIdx.x > 0) return;

  for (uint32_t task = blockIdx.x;; task += add ? 1 : gridDim.x) {
    // The last level first: it is the coarsest, whose tiles take longest.
    uint32_t in_level = task;
    int l = static_cast<int>(problem.L) - 1;
    while (l >= 0 && in_level >= static_cast<uint32_t>(plan[l].tiles)) in_level -= plan[l--].tiles;
    if (l < 0) return;
    const Level level = plan[l].level;
    const Tile tile = tile_of_shape(plan[l].tile_shape);
    const int32_t texels_x = tile.texels_x(), texels_y = tile.texels_y();
    const uint32_t tiles_x = static_cast<uint32_t>(level.W + texels_x - 1) / texels_x, tile_y = in_level / tiles_x;
    const int32_t y_first = tile_y * texels_y, x_first = (in_level - tile_y * tiles_x) * texels_x;
    const int32_t* level_starts = starts + head * head_slots + plan[l].first_slot;
    const Record<A>* level_records = records + (head * problem.K + plan[l].first_point) * problem.Q;
    const uint32_t cells_x_inverse = 65536u / tile.cells_x + 1, texels_x_inverse = 65536u / texels_x + 1;
    const auto cell_at = [&](int cell, int& x, int& y) {
      y = static_cast<uint32_t>(cell) * cells_x_inverse >> 16, x = cell - y * tile.cells_x;
    };

    // Slot = cell * parts + part: a part takes every parts-th batch of the cell's records. Cell (x, y) lies between
    // texels x - 1 and x, y - 1 and y.
    for (int slot = threadIdx.x; slot < kSlots; slot += kGatherThreads) {
      int x_in_tile, y_in_tile;
      cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
      const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
      int32_t begin = 0, end = 0;
      if (x <= level.W && y <= level.H) {
        const int64_t at = static_cast<int64_t>(y) * (level.W + 1) + x;
        begin = level_starts[at] + (slot & ((1 << tile.part_bits) - 1)) * kBatch, end = level_starts[at + 1];
      }
      slot_begin[slot] = begin, slot_end[slot] = end;
    }
    __syncthreads();  // the slots' records are known
    const int32_t step = kBatch << tile.part_bits;
    const int32_t samples_per_query = static_cast<int32_t>(problem.G * problem.K);
    const int64_t first_index = (static_cast<int64_t>(b) * problem.Q * G + g) * problem.K + plan[l].first_point;
    // From the dots of a record of query q.
    const auto put_grads = [&](const SampleGrads<A>& to, const Record<A>& record, const A(&d)[4], const Level& level,
                               int32_t q, bool more) {
      const A fx = record.fx, fy = record.fy, weight = record.weight;
      const int64_t index =
          static_cast<int64_t>(q) * samples_per_query + (record.sample & ((1 << point_bits) - 1)) + first_index;
      const A top = d[0] + fx * (d[1] - d[0]), bottom = d[2] + fx * (d[3] - d[2]);
      const A left = d[2] - d[0], right = d[3] - d[1];
      to.put(index, weight, top + fy * (bottom - top), level.W * weight * ((d[1] - d[0]) + fy * (right - left)),
             level.H * weight * (left + fx * (right - left)), more);
    };
    // Loaded ahead, of this or the next slot. Past the end: a record of weight zero.
    const auto load_record = [&](int32_t i, int32_t end) { return i < end ? level_records[i] : Record<A>{}; };
    for (int32_t c0 = 0; c0 < C; c0 += kChannels) {
      const int32_t c = c0 + lane * VEC;
      const bool has_channels = c < C;
      const char* value_base = reinterpret_cast<const char*>(value + image_value + c);
      const char* g_base = reinterpret_cast<const char*>(grad_output + image_output + c);
      if constexpr (TENSOR_CORES) {
        const int warp = threadIdx.x / 32, corner_row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        // [corner][t]: of records 2 t, 2 t + 1: the rounded weights, the rests; of 2 t + 8, 2 t + 9: the same.
        auto* warp_weights = reinterpret_cast<uint16_t*>(batches) + warp * 4 * 4 * 8;
        const int mine = corner_row + t % 2 * 8;  // the record that this lane loads, and finishes if t < 2
        const int slot_in_pair = corner_row / 2 * 8 + t % 2 * 4 + corner_row % 2;
        const char* lane_value = reinterpret_cast<const char*>(value + image_value + c0 + t * 8);
        const char* lane_g = reinterpret_cast<const char*>(grad_output + image_output + c0 + t * 8);
        constexpr int kWarps = kGatherThreads / 32;
        Record<A> next = load_record(slot_begin[warp] + mine, slot_end[warp]);
        for (int slot = warp; slot < kSlots; slot += kWarps) {
          const int32_t begin = slot_begin[slot], end = slot_end[slot];
          const bool is_last = slot + kWarps >= kSlots;
          const int32_t next_begin = is_last ? 0 : slot_begin[slot + kWarps];
          const int32_t next_end = is_last ? 0 : slot_end[slot + kWarps];
          int x_in_tile, y_in_tile;
          cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
          const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
          const bool owns = (x_in_tile < texels_x || x == level.W) && (y_in_tile < texels_y || y == level.H);
          float sums[4][4] = {};
          uint4 corner = {};
          if (begin < end && owns && corner_row < 4) {
            const int32_t corner_x = x - 1 + corner_row % 2, corner_y = y - 1 + corner_row / 2;
            if (corner_x >= 0 && corner_x < level.W && corner_y >= 0 && corner_y < level.H) {
              const uint32_t texel = level.start + corner_y * level.W + corner_x;
              corner = *reinterpret_cast<const uint4*>(lane_value + static_cast<uint64_t>(texel) * row_bytes);
            }
          }
          if (begin >= end) next = load_record(next_begin + mine, next_end);
          for (int32_t i = begin; i < end; i += step) {
            const Record<A> record = next;
            const int32_t q = record.sample >> point_bits, other = __shfl_xor_sync(kAll, q, 1);
            uint4 g0 = {}, g1 = {};  // of records corner_row and corner_row + 8
            const int32_t q0 = t % 2 ? other : q, q1 = t % 2 ? q : other;
            if (i + corner_row < end) {
              g0 = *reinterpret_cast<const uint4*>(lane_g +
                                                   static_cast<uint64_t>(static_cast<uint32_t>(q0)) * row_bytes);
            }
            if (i + corner_row + 8 < end) {
              g1 = *reinterpret_cast<const uint4*>(lane_g +
                                                   static_cast<uint64_t>(static_cast<uint32_t>(q1)) * row_bytes);
            }
            next = i + step < end ? load_record(i + step + mine, end) : load_record(next_begin + mine, next_end);
            __syncwarp();  // the previous weights have been read
            if (t < 2) {
              const A bottom = record.fy * record.weight, top = record.weight - bottom;
              const A right_top = top * record.fx, right_bottom = bottom * record.fx;
              const A corner_weights[4] = {top - right_top, right_top, bottom - right_bottom, right_bottom};
#pragma unroll
              for (int k = 0; k < 4; ++k) {
                const auto rounded = from_accumulate<__nv_bfloat16>(static_cast<float>(corner_weights[k]));
                const auto rest =
                    from_accumulate<__nv_bfloat16>(static_cast<float>(corner_weights[k]) - to_accumulate(rounded));
                warp_weights[k * 32 + slot_in_pair] = __bfloat16_as_ushort(rounded);
                warp_weights[k * 32 + slot_in_pair + 2] = __bfloat16_as_ushort(rest);
              }
            }
            __syncwarp();  // these weights are complete
            uint4 a = {};
            if (corner_row < 4) a = reinterpret_cast<const uint4*>(warp_weights)[corner_row * 4 + t];
            multiply_add(sums[0], a.x, a.y, a.z, a.w, transpose(g0.x), transpose(g1.x));
            multiply_add(sums[1], a.x, a.y, a.z, a.w, transpose(g0.y), transpose(g1.y));
            multiply_add(sums[2], a.x, a.y, a.z, a.w, transpose(g0.z), transpose(g1.z));
            multiply_add(sums[3], a.x, a.y, a.z, a.w, transpose(g0.w), transpose(g1.w));
            if (!owns) continue;
            float dots[4] = {};  // corners 2 t and 2 t + 1 of record corner_row, then of record corner_row + 8
            multiply_add(dots, g0.x, g1.x, g0.y, g1.y, corner.x, corner.y);
            multiply_add(dots, g0.z, g1.z, g0.w, g1.w, corner.z, corner.w);
            const float even = __shfl_xor_sync(kAll, t % 2 ? dots[0] : dots[2], 1);
            const float odd = __shfl_xor_sync(kAll, t % 2 ? dots[1] : dots[3], 1);
            if (t < 2 && i + mine < end) {
              const float d[4] = {t ? even : dots[0], t ? odd : dots[1], t ? dots[2] : even, t ? dots[3] : odd};
              put_grads(grads, record, d, level, q, c0 > 0);
            }
          }
          if (corner_row < 4) {
            auto* to = planes + (corner_row * kSlots + slot) * kChannels + t * 8;
            const A low[4] = {sums[0][0] + sums[0][2], sums[0][1] + sums[0][3], sums[1][0] + sums[1][2],
                              sums[1][1] + sums[1][3]};
            const A high[4] = {sums[2][0] + sums[2][2], sums[2][1] + sums[2][3], sums[3][0] + sums[3][2],
                               sums[3][1] + sums[3][3]};
            store_pack<A, 4>(to, low);
            store_pack<A, 4>(to + 4, high);
          }
        }
      } else {
        const int mine = lane % kBatch;  // the record of a batch that this lane prepares
        Record<A> next = load_record(slot_begin[group] + mine, slot_end[group]);
        for (int slot = group; slot < kSlots; slot += kGroups) {
          const int32_t begin = slot_begin[slot], end = slot_end[slot];
          const bool is_last = slot + kGroups >= kSlots;
          const int32_t next_begin = is_last ? 0 : slot_begin[slot + kGroups];
          const int32_t next_end = is_last ? 0 : slot_end[slot + kGroups];
          // The groups of a warp walk together, as long as the longest.
          int32_t turns = end > begin ? (end - begin + step - 1) / step : 0;
#pragma unroll
          for (int s = LANES; s < 32; s *= 2) turns = max(turns, __shfl_xor_sync(kAll, turns, s));
          A sum[4][VEC] = {};
          A corner[4][VEC] = {};
          bool owns = false;  // of two tiles that walk the cell, the one it begins in writes the samples' own gradients
          if (turns == 0) {
            next = load_record(next_begin + mine, next_end);
          } else {
            int x_in_tile, y_in_tile;
            cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
            const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
            owns = (x_in_tile < texels_x || x == level.W) && (y_in_tile < texels_y || y == level.H);
            const bool reads = begin < end && has_channels && owns;
            const bool left = x > 0 && reads, right = x < level.W && reads, top = y > 0, bottom = y < level.H;
            const bool is_inside[4] = {top && left, top && right, bottom && left, bottom && right};
            const int32_t texel = level.start + (y - 1) * level.W + x - 1;
            const int32_t texels[4] = {texel, texel + 1, texel + level.W, texel + level.W + 1};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (is_inside[k])
                load_pack<T, VEC>(value_base + static_cast<uint64_t>(static_cast<uint32_t>(texels[k])) * row_bytes,
                                  corner[k]);
            }
          }
          for (int32_t turn = 0, i = begin; turn < turns; ++turn, i += step) {
            const Record<A> record = next;
            const int32_t q = record.sample >> point_bits;
            if (lane < kBatch) {
              Pack<A, 4> corner_weights;
              const A bottom = record.fy * record.weight, top = record.weight - bottom;
              corner_weights.at[1] = top * record.fx, corner_weights.at[0] = top - corner_weights.at[1];
              corner_weights.at[3] = bottom * record.fx, corner_weights.at[2] = bottom - corner_weights.at[3];
              reinterpret_cast<Pack<A, 4>*>(my_weights)[mine] = corner_weights;
              my_queries[mine] = q;
            }
            __syncwarp();  // the batch is complete
            Pack<T, VEC> g_pack[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) g_pack[u].at[v] = from_accumulate<T>(A(0));
              if (has_channels && i + u < end) {
                g_pack[u] = *reinterpret_cast<const Pack<T, VEC>*>(
                    g_base + static_cast<uint64_t>(static_cast<uint32_t>(my_queries[u])) * row_bytes);
              }
            }
            const bool exists = i + mine < end;
            if (turn + 1 < turns) {
              next = load_record(i + step + mine, end);
            } else {
              next = load_record(next_begin + mine, next_end);
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
              const Pack<A, 4> corner_weights = reinterpret_cast<const Pack<A, 4>*>(my_weights)[u];
              A g_out[VEC];
              unpack(g_pack[u], g_out);
#pragma unroll
              for (int v = 0; v < VEC; ++v) {
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[k][v] += corner_weights.at[k] * g_out[v];
              }
            }
            __syncwarp();  // the batch has been read
            A d[4];        // lane i: the dots of record i % kBatch
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              A dot[kBatch] = {};
#pragma unroll
              for (int u = 0; u < kBatch; ++u) {
                A g_out[VEC];
                unpack(g_pack[u], g_out);
#pragma unroll
                for (int v = 0; v < VEC; ++v) dot[u] += corner[k][v] * g_out[v];
              }
              const A even = exchange(kAll, lane & 1, dot[0], dot[1], 1);
              const A odd = exchange(kAll, lane & 1, dot[2], dot[3], 1);
              d[k] = exchange(kAll, lane & 2, even, odd, 2);
#pragma unroll
              for (int s = kBatch; s < LANES; s *= 2) d[k] += __shfl_xor_sync(kAll, d[k], s);
            }
            if (owns && exists && lane < kBatch) {
              put_grads(grads, record, d, level, q, c0 > 0);
            }
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            store_pack<A, VEC>(planes + (k * kSlots + slot) * kChannels + lane * VEC, sum[k]);
          }
        }
      }
      __syncthreads();  // the slots' sums are complete
      for (int texel = group; texel < texels_x * texels_y; texel += kGroups) {
        const int y_in_tile = static_cast<uint32_t>(texel) * texels_x_inverse >> 16,
                  x_in_tile = texel - y_in_tile * texels_x;
        const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
        if (x >= level.W || y >= level.H || !has_channels) continue;
        A sum[VEC] = {};
        T* to = grad_value + image_value + c + (level.start + static_cast<int64_t>(y) * level.W + x) * (G * C);
        if (add) load_pack<T, VEC>(to, sum);
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // the texel is corner k of this cell
          const int cell = (y_in_tile + 1 - k / 2) * tile.cells_x + x_in_tile + 1 - k % 2;
#pragma unroll 1
          for (int part = 0; part < 1 << tile.part_bits; ++part) {
            A of_part[VEC];
            load_pack<A, VEC>(planes + (k * kSlots + (cell << tile.part_bits) + part) * kChannels + lane * VEC,
                              of_part);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += of_part[v];
          }
        }
        store_pack<T, VEC>(to, sum);
      }
      __syncthreads();  // planes and slots may be written again
    }
  }
}

template <typename T, typename A, typename Form>
void gather(const BackwardCall<Form>& call, const SortedSizes& sizes, const SampleGrads<A>& grads,
            const int32_t* starts, const Record<A>* sorted) {
  const MsDeformAttnProblem& problem = call.problem;
  constexpr int kChannels = kRowVec<T> * kGatherLanes<T, A>, kGroups = kGatherThreads / kGatherLanes<T, A>;
  constexpr bool kTensorCores = std::is_same_v<T, __nv_bfloat16>;
  static_assert(!kTensorCores || kChannels == kMmaChannels, "a matrix covers the channels of a turn");
  // The tensor cores know bfloat16 from sm_80 on, and they take rows of whole matrices only.
  const bool multiplies = problem.C % kMmaChannels == 0 && call.scope.device().capability >= 80;
  const auto kernel = multiplies ? gather_kernel<T, A, kTensorCores> : gather_kernel<T, A, false>;
  const int64_t shared = sizeof(A) * 4 * kSlots * kChannels + kGroups * kGatherBatch * (4 * sizeof(A) + 4);
  launch({kOp, "gather_kernel", call.scope, head_grid(sizes.tiles, problem.B * problem.G), kGatherThreads, shared,
          2 * kSlots * sizeof(int32_t)},
         kernel, static_cast<const T*>(call.grad_output.const_data_ptr()),
         static_cast<const T*>(call.value.const_data_ptr()), call.plans.get(), starts, sorted,
         static_cast<T*>(call.grad_value.mutable_data_ptr()), grads, problem, sizes.head_slots, point_bits_of(problem));
}

}  // namespace
}  // namespace visdet::ms_deform_attn
