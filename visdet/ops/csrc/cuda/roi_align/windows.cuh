// Upright regions by their windows: a warp works on a channel, rows and columns one after another.
#pragma once

#include "cuda/roi_align/axis.cuh"

namespace visdet::roi_align {

// Threads of a block. float64 has half as many, whose scratch takes as much shared memory.
template <typename A>
constexpr int kThreads = sizeof(A) == 8 ? 128 : 256;
template <typename A>
constexpr int kWarps = kThreads<A> / 32;
constexpr int kAtOnce = 2;     // channels of a warp, for which it reads the axes once
constexpr int kScratch = 320;  // numbers of a channel, at least kSlots

template <typename A>
struct Window {
  Axis<A> rows, columns;
  A scratch[kWarps<A>][kAtOnce][kScratch];

  // For all threads of a block: lays out the region; returns whether it fits.
  __device__ __forceinline__ bool lay_out(const Upright<A>& region, const RoIAlignProblem& p) {
    const int warp = threadIdx.x / 32, PH = static_cast<int>(p.PH), PW = static_cast<int>(p.PW);
    const int H = static_cast<int>(p.H), W = static_cast<int>(p.W);
    if (warp == 0) roi_align::lay_out(rows, region.y, region.down, PH, H, W);
    if (warp == 1) roi_align::lay_out(columns, region.x, region.across, PW, W, 1);
    __syncthreads();  // the axes are laid out
    return rows.slots >= 0 && columns.slots >= 0;
  }
};

// A pair of indices (row, column) of a table that a lane walks through 32 entries at a time, without divisions.
struct Walk {
  int row, column, width, rows_a_step, columns_a_step;

  __device__ __forceinline__ explicit Walk(int width)
      : row((threadIdx.x % 32) / width),
        column((threadIdx.x % 32) % width),
        width(width),
        rows_a_step(32 / width),
        columns_a_step(32 % width) {}
  __device__ __forceinline__ void step() {
    row += rows_a_step, column += columns_a_step;
    if (column >= width) column -= width, ++row;
  }
};

// For all threads of a block: writes the bins of `channels` channels. maps, output: those of the first of them. A warp
// sums the rows of as many bins as its scratch has room for, pixel by pixel, neighbouring pixels in neighbouring lanes;
// then the columns of each bin.
template <typename T, typename A>
__device__ void average_window(Window<A>& window, const RoIAlignProblem& p, int channels, const T* maps, T* output) {
  const Axis<A>&rows = window.rows, &columns = window.columns;
  const int warp = threadIdx.x / 32, PH = static_cast<int>(p.PH), PW = static_cast<int>(p.PW), width = columns.slots;
  const int64_t plane = p.H * p.W;
  const int group = width > 0 && rows.slots > 0 ? min(kScratch / width, PH) : PH;
  for (int channel = warp * kAtOnce; channel < channels; channel += kWarps<A> * kAtOnce) {
    const int count = min(kAtOnce, channels - channel);
    const T* from = maps + channel * plane;
    const int64_t other = count > 1 ? plane : 0;  // the last channel is read twice if it is alone
    for (int p0 = 0; p0 < PH; p0 += group) {
      const int p1 = min(p0 + group, PH);
      if (width > 0) {
        for (Walk at(width); p0 + at.row < p1; at.step()) {
          const int bin = p0 + at.row, first = rows.first[bin], end = rows.first[bin + 1],
                    slot = rows.slot[bin] - first;
          const T* pixel = from + columns.pixels[at.column];
          A sum[kAtOnce] = {};
#pragma unroll 4
          for (int e = first; e < end; ++e) {
            const A weight = rows.weights[e];
            const T* value = pixel + rows.pixels[slot + e];
            sum[0] += weight * to_accumulate(value[0]);
            sum[1] += weight * to_accumulate(value[other]);
          }
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) window.scratch[warp][k][at.row * width + at.column] = sum[k];
        }
      }
      __syncwarp();  // the sums of rows are complete
      for (Walk at(PW); p0 + at.row < p1; at.step()) {
        const int first = columns.first[at.column], end = columns.first[at.column + 1];
        const int slot = at.row * width + columns.slot[at.column] - first;
        A sum[kAtOnce] = {};
        for (int e = first; e < end; ++e) {
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) sum[k] += columns.weights[e] * window.scratch[warp][k][slot + e];
        }
        T* to = output + (static_cast<int64_t>(channel) * PH + p0 + at.row) * PW + at.column;
        to[0] = from_accumulate<T>(sum[0]);
        if (count > 1) to[static_cast<int64_t>(PH) * PW] = from_accumulate<T>(sum[1]);
      }
      __syncwarp();  // the scratch may be written again
    }
  }
}

// For all threads of a block: adds the gradient of `channels` channels to `sums` from the index `first` on. The way
// back: a warp spreads the bins along the columns, then along the rows, so that it adds once to a pixel, or once for
// each group of bins that touch it.
template <typename T, typename A, typename Sums>
__device__ void spread_window(Window<A>& window, const RoIAlignProblem& p, int channels, const T* grad_output,
                              const Sums& sums, int64_t first) {
  const Axis<A>&rows = window.rows, &columns = window.columns;
  const int warp = threadIdx.x / 32, PH = static_cast<int>(p.PH), PW = static_cast<int>(p.PW), width = columns.slots;
  const int64_t plane = p.H * p.W, bins = static_cast<int64_t>(PH) * PW;
  if (width <= 0 || rows.slots <= 0) return;
  const int group = min(kScratch / width, PH);
  for (int channel = warp * kAtOnce; channel < channels; channel += kWarps<A> * kAtOnce) {
    const int count = min(kAtOnce, channels - channel);
    const int64_t other = count > 1 ? bins : 0;
    for (int p0 = 0; p0 < PH; p0 += group) {
      const int p1 = min(p0 + group, PH);
      const T* from = grad_output + channel * bins + p0 * PW;
      for (Walk at(width); p0 + at.row < p1; at.step()) {
        A sum[kAtOnce] = {};
        for (int q = columns.low[at.column]; q < columns.high[at.column]; ++q) {
          const A weight = columns.weight(q, at.column);
          sum[0] += weight * to_accumulate(from[at.row * PW + q]);
          sum[1] += weight * to_accumulate(from[at.row * PW + q + other]);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) window.scratch[warp][k][at.row * width + at.column] = sum[k];
      }
      __syncwarp();  // the gradients along the columns are complete
      // The rows of these bins; those that have none lie at the ends and have a slot of their neighbours.
      const int begin = rows.slot[p0], end = rows.slot[p1 - 1] + rows.first[p1] - rows.first[p1 - 1];
      const int64_t map = first + channel * plane;
      for (Walk at(width); begin + at.row < end; at.step()) {
        const int slot = begin + at.row, low = max(static_cast<int>(rows.low[slot]), p0);
        const int high = min(static_cast<int>(rows.high[slot]), p1);
        A sum[kAtOnce] = {};
        for (int bin = low; bin < high; ++bin) {
          const A weight = rows.weight(bin, slot);
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            sum[k] += weight * window.scratch[warp][k][(bin - p0) * width + at.column];
          }
        }
        if (low >= high) continue;
        const int64_t pixel = map + rows.pixels[slot] + columns.pixels[at.column];
        sums.add(pixel, sum[0]);
        if (count > 1) sums.add(pixel + plane, sum[1]);
      }
      __syncwarp();  // the scratch may be written again
    }
  }
}

}  // namespace visdet::roi_align
