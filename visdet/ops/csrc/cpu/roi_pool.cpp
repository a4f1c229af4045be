// roi_pool on the CPU. The contract is in ../roi_pool.h; how this file is compiled, in vec.h.
//
// Forward: parallel over regions; each row of bins first takes the maximum down the columns of the region, a vector of
// columns at a time, then along each bin. Backward: parallel over channels, each adding its regions in order.
#include "vec.h"

namespace visdet {

template <typename T>
struct RoIPoolArrays {
  int64_t B, C, H, W, N, PH, PW;
  const T* input;   // [B, C, H, W]
  T* output;        // [N, C, PH, PW]
  int32_t* argmax;  // [N, C, PH, PW]
};

// One region's bins: rows of PH and columns of PW half-open intervals inside the map.
struct RoIPoolBins {
  int64_t b;               // image, or -1: no region
  const int32_t* rows;     // [PH, 2]
  const int32_t* columns;  // [PW, 2]
};

namespace VISDET_ISA {

// The maxima of columns [left, right) over rows [top, bottom), and the first row of each; NaN counts as -inf. Vectors
// that would pass the end of a row start earlier, so both arrays are written from some column before `left` on.
template <typename T, typename A>
VISDET_INLINE void columns_of_band(const T* map, int64_t W, int32_t top, int32_t bottom, int32_t left, int32_t right,
                                   A* best, int32_t* best_row) {
  constexpr int kStep = kLanes<A>;
  if (W < kStep) {
    for (int32_t w = left; w < right; ++w) {
      best[w] = -A(__builtin_inf()), best_row[w] = top;
      for (int32_t h = top; h < bottom; ++h) {
        const A value = to_accumulate(map[h * W + w]);
        if (value > best[w]) best[w] = value, best_row[w] = h;
      }
    }
    return;
  }
  for (int32_t w = left; w < right; w += kStep) {
    const int32_t from = w + kStep <= W ? w : static_cast<int32_t>(W) - kStep;
    Vec<A> most = {};
    most -= A(__builtin_inf());
    auto row = most != most;  // integers as wide as A; zeros
    row += top;
    for (int32_t h = top; h < bottom; ++h) {
      const Vec<A> value = load(map + h * W + from);
      const auto is_better = value > most;
      most = is_better ? value : most;
      row = is_better ? (row - row) + h : row;
    }
    store(best + from, most);
    if constexpr (sizeof(A) == sizeof(int32_t)) {
      std::memcpy(best_row + from, &row, sizeof(row));
    } else {
      for (int lane = 0; lane < kStep; ++lane) best_row[from + lane] = static_cast<int32_t>(row[lane]);
    }
  }
}

// Region n. best and best_row: [W] each.
template <typename T, typename A>
void pool_region(const RoIPoolArrays<T>& a, const RoIPoolBins& bins, int64_t n, A* best, int32_t* best_row) {
  int32_t left = static_cast<int32_t>(a.W), right = 0;
  for (int64_t q = 0; q < a.PW; ++q) {
    left = bins.columns[2 * q] < left ? bins.columns[2 * q] : left;
    right = bins.columns[2 * q + 1] > right ? bins.columns[2 * q + 1] : right;
  }
  for (int64_t c = 0; c < a.C; ++c) {
    const T* map = a.input + (bins.b * a.C + c) * a.H * a.W;
    int64_t at = (n * a.C + c) * a.PH * a.PW;
    for (int64_t p = 0; p < a.PH; ++p) {
      const int32_t top = bins.rows[2 * p], bottom = bins.rows[2 * p + 1];
      if (top < bottom) columns_of_band(map, a.W, top, bottom, left, right, best, best_row);
      for (int64_t q = 0; q < a.PW; ++q, ++at) {
        const int32_t begin = bins.columns[2 * q], end = bins.columns[2 * q + 1];
        int32_t index = -1;
        if (top < bottom && begin < end) {
          A peak = best[begin];
          int32_t row = best_row[begin], column = begin;
          for (int32_t w = begin + 1; w < end; ++w) {
            const bool is_better = (best[w] > peak) | ((best[w] == peak) & (best_row[w] < row));
            peak = is_better ? best[w] : peak;
            row = is_better ? best_row[w] : row;
            column = is_better ? w : column;
          }
          index = row * static_cast<int32_t>(a.W) + column;
        }
        a.argmax[at] = index;
        if (index >= 0) {
          a.output[at] = map[index];
        } else {
          from_accumulate(A(0), a.output[at]);
        }
      }
    }
  }
}

#define VISDET_INSTANTIATE(T, A) \
  template void pool_region<T, A>(const RoIPoolArrays<T>&, const RoIPoolBins&, int64_t, A*, int32_t*);
VISDET_INSTANTIATE(float, float)
VISDET_INSTANTIATE(double, double)
VISDET_INSTANTIATE(Float16, float)
VISDET_INSTANTIATE(BFloat16, float)
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "../roi_pool.h"
#include "dispatch.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                             \
  namespace isa {                                                                       \
  template <typename T, typename A>                                                     \
  void pool_region(const RoIPoolArrays<T>&, const RoIPoolBins&, int64_t, A*, int32_t*); \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

// Bins of start..end, each [begin, end) within 0..size; false without extent. Multiplications and additions are kept
// apart by the volatile: see the contract.
template <typename A>
bool write_bins(A start, A end, int64_t count, int64_t size, int32_t* bins) {
  if (!(end > start)) return false;
  const A width = (end - start) / static_cast<A>(count);
  for (int64_t k = 0; k < count; ++k) {
    volatile A low = static_cast<A>(k) * width, high = static_cast<A>(k + 1) * width;
    const A limit = static_cast<A>(size), first = std::floor(low + start), last = std::ceil(high + start);
    // NaN, of a region without end, makes the bin empty.
    bins[2 * k] = static_cast<int32_t>(first < limit ? (first > 0 ? first : A(0)) : limit);
    bins[2 * k + 1] = static_cast<int32_t>(last > 0 ? (last < limit ? last : limit) : A(0));
  }
  return true;
}

std::tuple<Tensor, Tensor> roi_pool(const Tensor& input_in, const Tensor& rois_in, int64_t PH, int64_t PW,
                                    double spatial_scale) {
  const auto problem = check_roi_pool(input_in, rois_in, PH, PW);
  const Tensor input = contiguous(input_in), rois = contiguous(rois_in);
  Tensor output = new_empty(input, {problem.N, problem.C, PH, PW});
  Tensor argmax = new_empty(input, {problem.N, problem.C, PH, PW}, ScalarType::Int);
  dispatch_value_type(input.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const RoIPoolArrays<T> a{problem.B,
                             problem.C,
                             problem.H,
                             problem.W,
                             problem.N,
                             PH,
                             PW,
                             static_cast<const T*>(input.const_data_ptr()),
                             static_cast<T*>(output.mutable_data_ptr()),
                             argmax.mutable_data_ptr<int32_t>()};
    const A* boxes = rois.const_data_ptr<A>();
    const A scale = static_cast<A>(spatial_scale);
    const auto run = VISDET_BEST_ISA(pool_region, T, A);
    torch::stable::parallel_for(0, a.N, 1, [&](int64_t begin, int64_t end) {
      const Scratch<A> best(a.W);
      const Scratch<int32_t> best_row(a.W), intervals(2 * (PH + PW));
      int32_t *rows = intervals.data(), *columns = rows + 2 * PH;
      for (int64_t n = begin; n < end; ++n) {
        const A* box = boxes + 5 * n;
        const bool is_image = box[0] >= 0 && box[0] < static_cast<A>(a.B);
        const bool is_region = is_image && write_bins<A>(box[2] * scale, (box[4] + 1) * scale, PH, a.H, rows) &&
                               write_bins<A>(box[1] * scale, (box[3] + 1) * scale, PW, a.W, columns);
        if (!is_region) std::fill(rows, rows + 2 * (PH + PW), 0);
        run(a, {is_region ? static_cast<int64_t>(box[0]) : 0, rows, columns}, n, best.data(), best_row.data());
      }
    });
  });
  return {output, argmax};
}

Tensor roi_pool_backward(const Tensor& grad_output_in, const Tensor& rois_in, const Tensor& argmax_in, int64_t B,
                         int64_t H, int64_t W) {
  const auto problem = check_roi_pool_backward(grad_output_in, rois_in, argmax_in, B, H, W);
  const Tensor grad_output = contiguous(grad_output_in), rois = contiguous(rois_in), argmax = contiguous(argmax_in);
  Tensor grad_input = new_empty(rois, {B, problem.C, H, W});
  zero_(grad_input);
  const int64_t bins = problem.PH * problem.PW, pixels = H * W;
  dispatch_value_type(grad_output.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const T* gradient = static_cast<const T*>(grad_output.const_data_ptr());
    const A* boxes = rois.const_data_ptr<A>();
    const int32_t* index = argmax.const_data_ptr<int32_t>();
    A* sums = grad_input.mutable_data_ptr<A>();
    torch::stable::parallel_for(0, problem.C, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = 0; n < problem.N; ++n) {
        const A b = boxes[5 * n];
        if (!(b >= 0 && b < static_cast<A>(B))) continue;
        for (int64_t c = begin; c < end; ++c) {
          A* map = sums + (static_cast<int64_t>(b) * problem.C + c) * pixels;
          const int64_t first = (n * problem.C + c) * bins;
          for (int64_t i = first; i < first + bins; ++i) {
            if (index[i] >= 0 && index[i] < pixels) map[index[i]] += baseline::to_accumulate(gradient[i]);
          }
        }
      }
    });
  });
  return grad_input;
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("roi_pool", TORCH_BOX(&visdet::roi_pool));
  m.impl("roi_pool_backward", TORCH_BOX(&visdet::roi_pool_backward));
}

#endif  // VISDET_ISA_BASELINE
