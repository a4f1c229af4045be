// The dots pass of sample_sum and sample_dot. DOTS: the dot products [B, G, Q, D] of samples with rows and, where there
// is one, the encoding of their depth. GRAD: the gradients of samples and depths. Both together only without an
// encoding, K = C.
//
// A block owns a query. It lists the samples that count with their corners and works out their encodings; its warps
// take the samples in turn, one or two at a time, and the 32 lanes divide the channels among them. If all channels of
// the query's rows fit, a lane keeps its own in registers: HELD packs of VEC channels, one or two, and with TAIL one
// channel more. With HELD = 0 it reads the rows again for every sample. Groups are processed kGroups at a time. For the
// gradients a lane multiplies each corner with h, the sum over groups of coefficients times rows (see
// csrc/sample_ops.h). A transposed sum then gives four lanes the dot product of a corner each, from which they compute
// the gradient of the location. One lane writes it, and adds what it wrote for earlier groups. No two threads write the
// same address, except for the counters below.
//
// GRAD also counts the samples of each cell for the scatter pass; the count that a sample finds is its rank there.
#pragma once

#include "cuda/sample/inputs.cuh"

namespace visdet::sample {
namespace {

// A block lists as many samples at a time as it has threads: so few that the encodings of kMaxOctaves octaves fit into
// the 64 KB of every GPU.
template <typename A>
constexpr int kDotThreads = sizeof(A) == 8 ? 64 : 128;
constexpr int kMaxOctaves = 30;  // that check_sample_dot lets through

template <typename A>
struct Position {
  A fx, fy;
  int32_t d, inside;  // inside: a bit a corner
};

template <typename A, bool GRAD>
struct DotsLists {
  CornerRows<A> samples[kDotThreads<A>];
  Position<A> positions[kDotThreads<A>];
  Pack<A, kGroups> coefficients[GRAD ? kDotThreads<A> : 1];
};

// What a lane adds up for a sample. In a forward, `values` are the dot products of the sample with the rows, and
// `of_encoding` is its dot product with the encoding, which all groups have in common. In a backward (GRAD), `values`
// begin with the dot products of the four corners with h. The dot products with the rows, or the gradient of the depth,
// follow.
template <typename A, bool DOTS, bool GRAD>
struct SampleSums {
  static constexpr int kFirstDot = GRAD ? 4 : 0;

  A* values;
  const CornerRows<A>& sample;
  const A* encoding;
  Pack<A, kGroups> coefficient;
  A all_coefficients, of_encoding;

  // Adds VEC channels from c on, given those of the corners and, for c < K, of the rows.
  template <int VEC>
  __device__ __forceinline__ void add(int c, const A (&corner)[4][VEC], const A (&row)[kGroups][VEC],
                                      const Sizes& sizes) {
    A sampled[VEC], h[VEC] = {};
    interpolate(corner, sample.weight, sampled);
    if (c < sizes.K) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          if (DOTS) values[kFirstDot + g] += sampled[v] * row[g][v];
          if (GRAD) h[v] += coefficient.at[g] * row[g][v];
        }
      }
    } else if constexpr (!(DOTS && GRAD)) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        const int j = c + v - sizes.K;
        if (DOTS) of_encoding += sampled[v] * encoding[j];
        if constexpr (GRAD) {
          const A rate = all_coefficients * scalbn(A(6.283185307179586476925286766559), j / 2);
          h[v] = all_coefficients * encoding[j];
          values[4] += sampled[v] * (j % 2 ? -rate : rate) * encoding[j ^ 1];
        }
      }
    }
    if constexpr (GRAD) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) values[k] += corner[k][v] * h[v];
      }
    }
  }
};

template <typename T, typename TO, typename A, int VEC, int HELD, bool TAIL, bool DOTS, bool GRAD>
__global__ void __launch_bounds__(kDotThreads<A>, GRAD&& HELD < 2 ? 4 : 3)
    dots_kernel(const T* images, const Pack<A, 2>* __restrict__ samples, const A* __restrict__ coefficients,
                const A* __restrict__ rows, const A* __restrict__ depths, TO* __restrict__ dots,
                Pack<A, 2>* __restrict__ grad_samples, A* __restrict__ grad_depths, int32_t* __restrict__ counts,
                int32_t* __restrict__ ranks, const Sizes sizes) {
  using Sums = SampleSums<A, DOTS, GRAD>;
  constexpr int kValues = GRAD ? 8 : kGroups, kPack = 32 * VEC, kBatch = sizeof(A) == 4 ? 2 : 1, kTail = HELD * kPack,
                kThreads = kDotThreads<A>, kWarps = kThreads / 32;
  extern __shared__ __align__(16) char dynamic_shared[];
  __shared__ DotsLists<A, GRAD> lists;
  A* encodings = reinterpret_cast<A*>(dynamic_shared);  // [kThreads][C - K]
  allow_next_launch();
  const Query at = Query::of_block(sizes);
  const int64_t b = at.b, q = at.q, query = b * sizes.Q + q, first = query * sizes.D;
  const auto* image = reinterpret_cast<const char*>(images + b * sizes.H * sizes.W * sizes.C);
  const uint32_t pixel_bytes = sizes.C * sizeof(T);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, encoded = sizes.C - sizes.K, tail = kTail + lane;
  for (int g0 = 0; g0 < sizes.G; g0 += kGroups) {
    const int groups = min(kGroups, sizes.G - g0);
    const int64_t group_rows = sizes.Q * sizes.K, group_dots = sizes.Q * sizes.D;
    const A* my_rows = rows + ((b * sizes.G + g0) * sizes.Q + q) * sizes.K;
    TO* my_dots = DOTS ? dots + ((b * sizes.G + g0) * sizes.Q + q) * sizes.D : nullptr;
    const auto load_rows = [&](int c, auto& row) {  // [kGroups][channels]
      constexpr int kVec = sizeof(row[0]) / sizeof(A);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) load_pack<A, kVec>(my_rows + min(g, groups - 1) * group_rows + c, row[g]);
    };
    A held[greatest(HELD, 1)][kGroups][VEC], held_tail[kGroups][1];
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      if (n * kPack + lane * VEC < sizes.K) load_rows(n * kPack + lane * VEC, held[n]);
    }
    if (TAIL && tail < sizes.K) load_rows(tail, held_tail);
    for (int d0 = 0; d0 < sizes.D; d0 += kThreads) {
      const int mine = d0 + threadIdx.x;
      Pack<A, kGroups> my_coefficients = {};
      if (GRAD) my_coefficients = load_coefficients(coefficients, b, q, g0, mine, sizes);
      const A my_depth = encoded > 0 && mine < sizes.D ? depths[first + mine] : A(0);
      const int count = list_samples<kThreads>(
          samples + first, d0, sizes,
          [&](int n, int d, A x, A y, const Bilinear<A>& at) {
            lists.samples[n] = CornerRows<A>::of(at);
            Position<A> entry{at.fx, at.fy, d, 0};
#pragma unroll
            for (int k = 0; k < 4; ++k) entry.inside |= at.is_inside[k] << k;
            lists.positions[n] = entry;
            if (GRAD) lists.coefficients[n] = my_coefficients;
            if (GRAD && g0 == 0) ranks[first + d] = atomicAdd(counts + b * sizes.cells + cell_of(x, y, sizes.W), 1);
            for (int octave = 0; 2 * octave < encoded; ++octave) {
              A* to = encodings + n * encoded + 2 * octave;
              sincospi(scalbn(my_depth, octave + 1), to, to + 1);
            }
          },
          [&](int d) {
            for (int g = 0; DOTS && g < groups; ++g) my_dots[g * group_dots + d] = from_accumulate<TO>(A(0));
            if (GRAD && g0 == 0) {
              ranks[first + d] = -1;
              grad_samples[first + d] = {0, 0};
              if (!DOTS) grad_depths[first + d] = 0;
            }
          });
      await_previous_launch();  // the copy of the images

      // A warp takes kBatch samples at once, to keep more loads in flight. Past the last sample it repeats that one.
#pragma unroll 1
      for (int i0 = warp * kBatch; i0 < count; i0 += kWarps * kBatch) {
        A value[kBatch * kValues] = {};
        A corner[kBatch][greatest(HELD, 1)][4][VEC], corner_tail[kBatch][4][1];
        if constexpr (HELD > 0) {
#pragma unroll
          for (int s = 0; s < kBatch; ++s) {
            const CornerRows<A>& sample = lists.samples[min(i0 + s, count - 1)];
#pragma unroll
            for (int n = 0; n < HELD; ++n) {
              const int c = n * kPack + lane * VEC;
              if (c < sizes.C) load_corners<T, VEC>(image + c * sizeof(T), sample.row, pixel_bytes, corner[s][n]);
            }
            if (TAIL && tail < sizes.C) {
              load_corners<T, 1>(image + tail * sizeof(T), sample.row, pixel_bytes, corner_tail[s]);
            }
          }
        }
#pragma unroll
        for (int s = 0; s < kBatch; ++s) {
          const int i = min(i0 + s, count - 1);
          Sums sums{value + s * kValues, lists.samples[i], encodings + i * encoded, {}, 0, 0};
          if constexpr (GRAD) {
            sums.coefficient = lists.coefficients[i];
#pragma unroll
            for (int g = 0; g < kGroups; ++g) sums.all_coefficients += sums.coefficient.at[g];
          }
          if constexpr (HELD > 0) {
#pragma unroll
            for (int n = 0; n < HELD; ++n) {
              const int c = n * kPack + lane * VEC;
              if (c < sizes.C) sums.add(c, corner[s][n], held[n], sizes);
            }
            if (TAIL && tail < sizes.C) sums.add(tail, corner_tail[s], held_tail, sizes);
          } else {
            for (int c = lane * VEC; c < sizes.C; c += kPack) {
              A row[kGroups][VEC];
              load_corners<T, VEC>(image + c * sizeof(T), sums.sample.row, pixel_bytes, corner[s][0]);
              if (c < sizes.K) load_rows(c, row);
              sums.add(c, corner[s][0], row, sizes);
            }
          }
#pragma unroll
          for (int g = 0; DOTS && !GRAD && g < kGroups; ++g) sums.values[g] += sums.of_encoding;
        }
        // Lane s * kValues + j has sum j of sample s.
        const A sum = transposed_sum_lanes(value);
        const int of_sample = lane / kValues, j = lane % kValues, g = j - Sums::kFirstDot;
        const bool works = of_sample < kBatch && i0 + of_sample < count;
        const Position<A> position = lists.positions[works ? i0 + of_sample : i0];
        if (DOTS && works && g >= 0 && g < groups) my_dots[g * group_dots + position.d] = from_accumulate<TO>(sum);
        if constexpr (GRAD) {
          const CornerFactors<A> factors = corner_factors(j, position.fx, position.fy);
          const A of_corner = j < 4 && position.inside >> j & 1 ? sum : A(0);
          A by_xy[2] = {of_corner * factors.by_x, of_corner * factors.by_y};
          sum_lanes(by_xy, 1, 4);
          if (works && j == 0) {
            Pack<A, 2> grad = {A(sizes.W) / 2 * by_xy[0], A(sizes.H) / 2 * by_xy[1]};
            if (g0 > 0) {
              const Pack<A, 2> before = grad_samples[first + position.d];
              grad.at[0] += before.at[0], grad.at[1] += before.at[1];
            }
            grad_samples[first + position.d] = grad;
          }
          if (!DOTS && works && j == 4) {
            grad_depths[first + position.d] = (g0 > 0 ? grad_depths[first + position.d] : A(0)) + sum;
          }
        }
      }
      __syncthreads();  // the lists have been read
    }
  }
}

// How many samples each cell has, and the rank of each sample in its cell: -1 of those that do not count.
struct CellCounts {
  Tensor counts, ranks;
};

// What the pass writes; null where it is not wanted.
template <typename TO, typename A>
struct DotsOutputs {
  TO* dots = nullptr;
  A *grad_samples = nullptr, *grad_depths = nullptr;
};

// GRAD: also returns the counts of cells for launch_scatter(); all images are to be one run.
template <bool DOTS, bool GRAD, typename T, typename A, typename TO>
CellCounts launch_dots(const Inputs<T, A>& in, const ImageRun& run, const A* coefficients, const A* rows,
                       const A* depths, const DotsOutputs<TO, A>& out) {
  const Sizes& sizes = in.sizes;
  CellCounts cells{in.samples, in.samples};
  if (in.queries() == 0 || sizes.D == 0 || sizes.G == 0) return cells;  // with no group, gradients are zero already
  int32_t *counts = nullptr, *ranks = nullptr;
  if (GRAD) {
    cells.counts = new_zeros(in.samples, {sizes.B * sizes.cells}, ScalarType::Int);
    cells.ranks = new_empty(in.samples, {in.queries() * sizes.D}, ScalarType::Int);
    counts = data_of(cells.counts), ranks = data_of(cells.ranks);
  }
  const int64_t query = run.first * sizes.Q;
  const A* run_depths = depths == nullptr ? nullptr : depths + query * sizes.D;
  TO* run_dots = DOTS ? out.dots + query * sizes.G * sizes.D : nullptr;
  in.with_vec(rows, [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    constexpr int64_t kOctave = 2 * sizeof(A) * kDotThreads<A>;  // bytes of encodings
    constexpr int64_t kStatic = sizeof(DotsLists<A, GRAD>) + kCompactShared<kDotThreads<A>>;
    static_assert(kStatic + kMaxOctaves * kOctave <= 64 << 10, "every GPU must have so much shared memory");
    const auto start = [&](auto kernel) {
      launch({in.op, "dots_kernel", in.scope, run.count * sizes.Q, kDotThreads<A>, (sizes.C - sizes.K) / 2 * kOctave,
              kStatic, run.overlaps},
             kernel, in.image_data(run.first), in.sample_data(query), coefficients, rows + query * sizes.G * sizes.K,
             run_depths, run_dots, reinterpret_cast<Pack<A, 2>*>(out.grad_samples), out.grad_depths, counts, ranks,
             sizes);
    };
    if constexpr (kVec > 1) {
      if (sizes.C <= 32 * (kVec + 1)) return start(dots_kernel<T, TO, A, kVec, 1, true, DOTS, GRAD>);
      if (sizes.C <= 64 * kVec) return start(dots_kernel<T, TO, A, kVec, 2, false, DOTS, GRAD>);
    }
    start(dots_kernel<T, TO, A, kVec, 0, false, DOTS, GRAD>);
  });
  return cells;
}

}  // namespace
}  // namespace visdet::sample
