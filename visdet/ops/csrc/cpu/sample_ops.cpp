// sample_sum and sample_dot on the CPU. The contract, and the three passes, are in ../sample_ops.h; how this file is
// compiled, in vec.h.
//
// Images are read as [B, H, W, C]: NCHW ones are copied into that order first. The sum and dots passes are parallel
// over (b, q), the scatter pass over (b, chunk of channels), so there are no races and no dependence on the number of
// threads.
#include "../common/bilinear.h"
#include "vec.h"

namespace visdet {

template <typename T, typename A>
struct SampleArrays {
  int64_t B, C, H, W, Q, D, G, K;
  const T* images;        // [B, H, W, C]
  const A* samples;       // [B, Q, D, 2]
  const A* coefficients;  // [B, G, Q, D], or null
  const A* rows;          // [B, G, Q, K], or null
  const A* depths;        // [B, Q, D], or null: K = C
  A* sums;                // [B, G, Q, K], or null
  A* dots;                // [B, G, Q, D], or null
  A* grad_samples;        // [B, Q, D, 2], or null
  A* grad_depths;         // [B, Q, D], or null
  A* grad_images;         // [B, H, W, C], zeroed, or null
};

// The four corners of a sample that counts.
template <typename A>
struct SampleCorners {
  int64_t offset[4];  // element of images[b] where each corner's channels begin
  A weight[4];
  A is_inside[4];
  A fx, fy;
};

namespace VISDET_ISA {

template <typename T, typename A>
VISDET_INLINE bool locate_sample(const SampleArrays<T, A>& a, const A* sample, SampleCorners<A>& out) {
  Bilinear<A> at;
  const A x = (sample[0] + 1) * (A(a.W) / 2) - A(0.5), y = (sample[1] + 1) * (A(a.H) / 2) - A(0.5);
  if (!locate(x, y, static_cast<int32_t>(a.H), static_cast<int32_t>(a.W), at)) return false;
  at.corner_weights(out.weight);
  for (int k = 0; k < 4; ++k) {
    out.offset[k] = at.index[k] * a.C;
    out.is_inside[k] = at.is_inside[k] ? A(1) : A(0);
  }
  out.fx = at.fx, out.fy = at.fy;
  return true;
}

// Calls f(c, vector tag) for whole vectors and g(c) for single channels of [begin, end).
template <typename A, typename F, typename S>
VISDET_INLINE void for_channels(int64_t begin, int64_t end, const F& vector, const S& scalar) {
  int64_t c = begin;
  for (; c + kLanes<A> <= end; c += kLanes<A>) vector(c);
  for (; c < end; ++c) scalar(c);
}

template <typename A>
VISDET_INLINE A sum_of_lanes(Vec<A> v) {
  A sum = 0;
  for (int i = 0; i < kLanes<A>; ++i) sum += v[i];
  return sum;
}

// The encoding of one depth, [2 * octaves], and its derivative. The turns are taken modulo one, where sin and cos keep
// their digits.
template <typename A>
VISDET_INLINE void encode_depth(A depth, int64_t octaves, A* encoding, A* derivative) {
  constexpr A kTurn = A(6.283185307179586476925286766559);
  A turns = depth, rate = kTurn;
  for (int64_t k = 0; k < octaves; ++k, turns *= 2, rate *= 2) {
    const A angle = kTurn * (turns - static_cast<A>(__builtin_floor(static_cast<double>(turns))));
    const A sine = static_cast<A>(__builtin_sin(static_cast<double>(angle)));
    const A cosine = static_cast<A>(__builtin_cos(static_cast<double>(angle)));
    encoding[2 * k] = sine, encoding[2 * k + 1] = cosine;
    derivative[2 * k] = rate * cosine, derivative[2 * k + 1] = -rate * sine;
  }
}

// Channels [c, c + W) of the sum pass for GROUPS groups from g0 on, over the samples of a query that count.
template <int GROUPS, typename T, typename A>
VISDET_INLINE void sum_vector(const SampleArrays<T, A>& a, const T* image, const SampleCorners<A>* corners,
                              const int32_t* which, int64_t count, int64_t b, int64_t q, int64_t g0, int64_t c) {
  Vec<A> sums[GROUPS] = {};
  const A* coefficients[GROUPS];
  for (int g = 0; g < GROUPS; ++g) coefficients[g] = a.coefficients + ((b * a.G + g0 + g) * a.Q + q) * a.D;
  for (int64_t i = 0; i < count; ++i) {
    const SampleCorners<A>& at = corners[i];
    const Vec<A> s = (load(image + at.offset[0] + c) * at.weight[0] + load(image + at.offset[1] + c) * at.weight[1]) +
                     (load(image + at.offset[2] + c) * at.weight[2] + load(image + at.offset[3] + c) * at.weight[3]);
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) sums[g] += s * coefficients[g][which[i]];
  }
  for (int g = 0; g < GROUPS; ++g) store(a.sums + ((b * a.G + g0 + g) * a.Q + q) * a.K + c, sums[g]);
}

// One (b, q) of the sum pass. corners, which: scratch of D.
template <typename T, typename A>
void sum_query(const SampleArrays<T, A>& a, SampleCorners<A>* corners, int32_t* which, int64_t query) {
  const int64_t b = query / a.Q, q = query - b * a.Q;
  const T* image = a.images + b * a.H * a.W * a.C;
  int64_t count = 0;
  for (int64_t d = 0; d < a.D; ++d) {
    which[count] = static_cast<int32_t>(d);
    count += locate_sample(a, a.samples + 2 * (query * a.D + d), corners[count]);
  }
  for_channels<A>(
      0, a.K,
      [&](int64_t c) {
        int64_t g = 0;
        for (; g + 4 <= a.G; g += 4) sum_vector<4>(a, image, corners, which, count, b, q, g, c);
        for (; g < a.G; ++g) sum_vector<1>(a, image, corners, which, count, b, q, g, c);
      },
      [&](int64_t c) {
        for (int64_t g = 0; g < a.G; ++g) {
          const int64_t row = (b * a.G + g) * a.Q + q;
          A sum = 0;
          for (int64_t i = 0; i < count; ++i) {
            A s = 0;
            for (int k = 0; k < 4; ++k) s += to_accumulate(image[corners[i].offset[k] + c]) * corners[i].weight[k];
            sum += s * a.coefficients[row * a.D + which[i]];
          }
          a.sums[row * a.K + c] = sum;
        }
      });
}

// One (b, q) of the dots pass. scratch: [C] for s and then h, [4 * octaves] for the encoding and its derivative.
template <typename T, typename A>
void dot_query(const SampleArrays<T, A>& a, A* scratch, int64_t query) {
  const int64_t b = query / a.Q, q = query - b * a.Q, octaves = (a.C - a.K) / 2;
  const T* image = a.images + b * a.H * a.W * a.C;
  A *h = scratch, *encoding = scratch + a.C, *derivative = encoding + 2 * octaves;
  for (int64_t d = 0; d < a.D; ++d) {
    const int64_t sample = query * a.D + d;
    if (a.grad_samples) a.grad_samples[2 * sample] = a.grad_samples[2 * sample + 1] = 0;
    if (a.grad_depths) a.grad_depths[sample] = 0;
    SampleCorners<A> at;
    const bool counts = locate_sample(a, a.samples + 2 * sample, at);
    if (!counts) {
      for (int64_t g = 0; a.dots && g < a.G; ++g) a.dots[((b * a.G + g) * a.Q + q) * a.D + d] = 0;
      continue;
    }
    const T* r[4];
    for (int k = 0; k < 4; ++k) r[k] = image + at.offset[k];
    const auto sampled = [&](int64_t c) {
      A s = 0;
      for (int k = 0; k < 4; ++k) s += to_accumulate(r[k][c]) * at.weight[k];
      return s;
    };
    A of_encoding = 0, of_derivative = 0;
    if (octaves > 0) {
      encode_depth(a.depths[sample], octaves, encoding, derivative);
      for (int64_t j = 0; j < 2 * octaves; ++j) {
        const A s = sampled(a.K + j);
        of_encoding += s * encoding[j], of_derivative += s * derivative[j];
      }
    }
    if (a.dots) {
      for_channels<A>(
          0, a.K,
          [&](int64_t c) {
            store(h + c, (load(r[0] + c) * at.weight[0] + load(r[1] + c) * at.weight[1]) +
                             (load(r[2] + c) * at.weight[2] + load(r[3] + c) * at.weight[3]));
          },
          [&](int64_t c) { h[c] = sampled(c); });
      for (int64_t g = 0; g < a.G; ++g) {
        const int64_t row = (b * a.G + g) * a.Q + q;
        const A* with = a.rows + row * a.K;
        Vec<A> sum = {};
        A rest = 0;
        for_channels<A>(
            0, a.K, [&](int64_t c) { sum += load(h + c) * load(with + c); },
            [&](int64_t c) { rest += h[c] * with[c]; });
        a.dots[row * a.D + d] = sum_of_lanes<A>(sum) + rest + of_encoding;
      }
    }
    if (!a.grad_samples) continue;
    A total = 0;
    for (int64_t c = 0; c < a.K; ++c) h[c] = 0;
    for (int64_t g = 0; g < a.G; ++g) {
      const int64_t row = (b * a.G + g) * a.Q + q;
      const A* with = a.rows + row * a.K;
      const A coefficient = a.coefficients[row * a.D + d];
      total += coefficient;
      for_channels<A>(
          0, a.K, [&](int64_t c) { store(h + c, load(h + c) + load(with + c) * coefficient); },
          [&](int64_t c) { h[c] += with[c] * coefficient; });
    }
    for (int64_t j = 0; j < 2 * octaves; ++j) h[a.K + j] = total * encoding[j];
    Vec<A> products[4] = {};
    A dots[4], rest[4] = {};
    for_channels<A>(
        0, a.C,
        [&](int64_t c) {
          const Vec<A> with = load(h + c);
          for (int k = 0; k < 4; ++k) products[k] += load(r[k] + c) * with;
        },
        [&](int64_t c) {
          for (int k = 0; k < 4; ++k) rest[k] += to_accumulate(r[k][c]) * h[c];
        });
    horizontal_sums(products, dots);
    for (int k = 0; k < 4; ++k) dots[k] = at.is_inside[k] != 0 ? dots[k] + rest[k] : A(0);
    a.grad_samples[2 * sample] = A(a.W) / 2 * ((1 - at.fy) * (dots[1] - dots[0]) + at.fy * (dots[3] - dots[2]));
    a.grad_samples[2 * sample + 1] = A(a.H) / 2 * ((1 - at.fx) * (dots[2] - dots[0]) + at.fx * (dots[3] - dots[1]));
    if (a.grad_depths) a.grad_depths[sample] = total * of_derivative;
  }
}

// Channels [begin, end) of image b of the scatter pass. scratch: [end - begin] for h, [4 * octaves] as above.
template <typename T, typename A>
void scatter_channels(const SampleArrays<T, A>& a, A* scratch, int64_t b, int64_t begin, int64_t end) {
  const int64_t octaves = (a.C - a.K) / 2, in_rows = end < a.K ? end : (begin < a.K ? a.K : begin);
  A *h = scratch - begin, *encoding = scratch + (end - begin), *derivative = encoding + 2 * octaves;
  A* image = a.grad_images + b * a.H * a.W * a.C;
  for (int64_t q = 0; q < a.Q; ++q) {
    for (int64_t d = 0; d < a.D; ++d) {
      const int64_t sample = (b * a.Q + q) * a.D + d;
      SampleCorners<A> at;
      if (!locate_sample(a, a.samples + 2 * sample, at)) continue;
      A total = 0;
      for (int64_t c = begin; c < end; ++c) h[c] = 0;
      for (int64_t g = 0; g < a.G; ++g) {
        const int64_t row = (b * a.G + g) * a.Q + q;
        const A* with = a.rows + row * a.K;
        const A coefficient = a.coefficients[row * a.D + d];
        total += coefficient;
        for_channels<A>(
            begin, in_rows, [&](int64_t c) { store(h + c, load(h + c) + load(with + c) * coefficient); },
            [&](int64_t c) { h[c] += with[c] * coefficient; });
      }
      if (in_rows < end) {
        encode_depth(a.depths[sample], octaves, encoding, derivative);
        for (int64_t c = in_rows; c < end; ++c) h[c] = total * encoding[c - a.K];
      }
      for (int k = 0; k < 4; ++k) {
        if (at.weight[k] == 0) continue;
        A* to = image + at.offset[k];
        for_channels<A>(
            begin, end, [&](int64_t c) { store(to + c, load(to + c) + load(h + c) * at.weight[k]); },
            [&](int64_t c) { to[c] += h[c] * at.weight[k]; });
      }
    }
  }
}

#define VISDET_INSTANTIATE(T, A)                                                                  \
  template void sum_query<T, A>(const SampleArrays<T, A>&, SampleCorners<A>*, int32_t*, int64_t); \
  template void dot_query<T, A>(const SampleArrays<T, A>&, A*, int64_t);                          \
  template void scatter_channels<T, A>(const SampleArrays<T, A>&, A*, int64_t, int64_t, int64_t);
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
#include <tuple>

#include "../sample_ops.h"
#include "dispatch.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                        \
  namespace isa {                                                                  \
  template <typename T, typename A>                                                \
  void sum_query(const SampleArrays<T, A>&, SampleCorners<A>*, int32_t*, int64_t); \
  template <typename T, typename A>                                                \
  void dot_query(const SampleArrays<T, A>&, A*, int64_t);                          \
  template <typename T, typename A>                                                \
  void scatter_channels(const SampleArrays<T, A>&, A*, int64_t, int64_t, int64_t); \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

constexpr int64_t kGrain = 4;      // queries of one piece of work
constexpr int64_t kChannels = 32;  // of one task of the scatter pass

// [planes, rows, columns] to [planes, columns, rows], converted.
template <typename From, typename To>
void transpose(const From* from, To* to, int64_t planes, int64_t rows, int64_t columns) {
  constexpr int64_t kTile = 32;
  torch::stable::parallel_for(0, planes * ((columns + kTile - 1) / kTile), 1, [&](int64_t begin, int64_t end) {
    const int64_t tiles = (columns + kTile - 1) / kTile;
    From square[kTile * (kTile + 1)];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t plane = task / tiles, c0 = (task - plane * tiles) * kTile, c1 = std::min(c0 + kTile, columns);
      const From* source = from + plane * rows * columns;
      To* target = to + plane * rows * columns;
      for (int64_t r0 = 0; r0 < rows; r0 += kTile) {
        const int64_t r1 = std::min(r0 + kTile, rows);
        // Through a small square: strides of a power of two would all fall into one set of the cache.
        for (int64_t r = r0; r < r1; ++r) {
          for (int64_t c = c0; c < c1; ++c) square[(c - c0) * (kTile + 1) + r - r0] = source[r * columns + c];
        }
        for (int64_t c = c0; c < c1; ++c) {
          for (int64_t r = r0; r < r1; ++r) {
            const From value = square[(c - c0) * (kTile + 1) + r - r0];
            if constexpr (std::is_same_v<From, To>) {
              target[c * rows + r] = value;
            } else {
              baseline::from_accumulate(value, target[c * rows + r]);
            }
          }
        }
      }
    }
  });
}

// images as [B, H, W, C] in memory: themselves, or a copy.
template <typename T>
Tensor in_channels_last(const Tensor& images, const SampleProblem& problem) {
  if (problem.channels_last) return images;
  const Tensor dense = contiguous(images);
  Tensor copy = new_empty(images, {problem.B, problem.H, problem.W, problem.C});
  transpose(static_cast<const T*>(dense.const_data_ptr()), static_cast<T*>(copy.mutable_data_ptr()), problem.B,
            problem.C, problem.H * problem.W);
  return copy;
}

template <typename T, typename A>
SampleArrays<T, A> arrays_of(const SampleProblem& problem, const Tensor& images, const Tensor& samples) {
  SampleArrays<T, A> a{};
  a.B = problem.B, a.C = problem.C, a.H = problem.H, a.W = problem.W;
  a.Q = problem.Q, a.D = problem.D, a.G = problem.G, a.K = problem.K;
  a.images = static_cast<const T*>(images.const_data_ptr());
  a.samples = static_cast<const A*>(samples.const_data_ptr());
  return a;
}

template <typename A>
const A* data_of(const Tensor& tensor) {
  return static_cast<const A*>(tensor.const_data_ptr());
}
template <typename A>
A* data_of(Tensor& tensor) {
  return static_cast<A*>(tensor.mutable_data_ptr());
}

template <typename T, typename A>
void run_sum(const SampleArrays<T, A>& a) {
  const auto run = VISDET_BEST_ISA(sum_query, T, A);
  torch::stable::parallel_for(0, a.B * a.Q, kGrain, [&](int64_t begin, int64_t end) {
    Scratch<SampleCorners<A>> corners(a.D + 1);
    Scratch<int32_t> which(a.D + 1);
    for (int64_t query = begin; query < end; ++query) run(a, corners.data(), which.data(), query);
  });
}

template <typename T, typename A>
void run_dots(const SampleArrays<T, A>& a) {
  const auto run = VISDET_BEST_ISA(dot_query, T, A);
  torch::stable::parallel_for(0, a.B * a.Q, kGrain, [&](int64_t begin, int64_t end) {
    Scratch<A> scratch(a.C + 2 * (a.C - a.K));
    for (int64_t query = begin; query < end; ++query) run(a, scratch.data(), query);
  });
}

// The gradient of images, in their layout and type.
template <typename T, typename A>
Tensor run_scatter(SampleArrays<T, A> a, const SampleProblem& problem, const Tensor& images, const Tensor& samples) {
  Tensor sums = new_empty(samples, {a.B, a.H, a.W, a.C});
  zero_(sums);
  a.grad_images = data_of<A>(sums);
  const auto run = VISDET_BEST_ISA(scatter_channels, T, A);
  const int64_t chunks = (a.C + kChannels - 1) / kChannels;
  torch::stable::parallel_for(0, a.B * chunks, 1, [&](int64_t begin, int64_t end) {
    Scratch<A> scratch(kChannels + 2 * (a.C - a.K));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / chunks, first = (task - b * chunks) * kChannels;
      run(a, scratch.data(), b, first, std::min(first + kChannels, a.C));
    }
  });
  Tensor grad = empty_like(images);
  const bool stays = problem.channels_last;
  transpose(a.grad_images, data_of<T>(grad), stays ? 1 : a.B, stays ? 1 : a.H * a.W,
            stays ? a.B * a.H * a.W * a.C : a.C);
  return grad;
}

// In the type of images.
template <typename T, typename A>
Tensor rounded(Tensor& sums, const Tensor& images) {
  if constexpr (std::is_same_v<T, A>) return sums;
  Tensor out = new_empty(images, sums.sizes());
  transpose(data_of<A>(sums), data_of<T>(out), 1, 1, sums.numel());
  return out;
}

Tensor sample_sum(const Tensor& images_in, const Tensor& samples_in, const Tensor& weights_in) {
  const auto problem = check_sample_sum("sample_sum", images_in, samples_in, weights_in);
  const Tensor samples = contiguous(samples_in), weights = contiguous(weights_in);
  Tensor output = images_in;
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    Tensor sums = new_empty(samples, {problem.B, problem.G, problem.Q, problem.C});
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of<A>(weights), a.sums = data_of<A>(sums);
    run_sum(a);
    output = rounded<T, A>(sums, images_in);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> sample_sum_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                       const Tensor& samples_in, const Tensor& weights_in,
                                                       bool /*deterministic: always*/) {
  constexpr const char* op = "sample_sum_backward";
  auto problem = check_sample_sum(op, images_in, samples_in, weights_in);
  check_grouped(op, "grad_output", "C", grad_output_in, problem.C, samples_in, problem, false);
  const Tensor grad_output = contiguous(grad_output_in), samples = contiguous(samples_in),
               weights = contiguous(weights_in);
  Tensor grad_images = images_in, grad_samples = new_empty(samples, samples.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of<A>(weights), a.rows = data_of<A>(grad_output);
    a.dots = data_of<A>(grad_weights), a.grad_samples = data_of<A>(grad_samples);
    run_dots(a);
    grad_images = run_scatter(a, problem, images_in, samples);
  });
  return {grad_images, grad_samples, grad_weights};
}

Tensor sample_dot(const Tensor& images_in, const Tensor& samples_in, const Tensor& queries_in, const Tensor& depths_in,
                  int64_t num_octaves) {
  const auto problem = check_sample_dot("sample_dot", images_in, samples_in, queries_in, depths_in, num_octaves);
  const Tensor samples = contiguous(samples_in), queries = contiguous(queries_in), depths = contiguous(depths_in);
  Tensor output = images_in;
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    Tensor dots = new_empty(samples, {problem.B, problem.G, problem.Q, problem.D});
    auto a = arrays_of<T, A>(problem, images, samples);
    a.rows = data_of<A>(queries), a.depths = data_of<A>(depths), a.dots = data_of<A>(dots);
    run_dots(a);
    output = rounded<T, A>(dots, images_in);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_dot_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                               const Tensor& samples_in, const Tensor& queries_in,
                                                               const Tensor& depths_in, int64_t num_octaves,
                                                               bool /*deterministic: always*/) {
  constexpr const char* op = "sample_dot_backward";
  auto problem = check_sample_dot(op, images_in, samples_in, queries_in, depths_in, num_octaves);
  check_grouped(op, "grad_output", "D", grad_output_in, problem.D, samples_in, problem, false);
  const Tensor grad_output = contiguous(grad_output_in), samples = contiguous(samples_in),
               queries = contiguous(queries_in), depths = contiguous(depths_in);
  Tensor grad_images = images_in, grad_samples = new_empty(samples, samples.sizes()),
         grad_queries = new_empty(queries, queries.sizes()), grad_depths = new_empty(depths, depths.sizes());
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of<A>(grad_output), a.rows = data_of<A>(queries), a.depths = data_of<A>(depths);
    a.sums = data_of<A>(grad_queries);
    run_sum(a);
    a.grad_samples = data_of<A>(grad_samples), a.grad_depths = data_of<A>(grad_depths);
    run_dots(a);
    grad_images = run_scatter(a, problem, images_in, samples);
  });
  return {grad_images, grad_samples, grad_queries, grad_depths};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("sample_sum", TORCH_BOX(&visdet::sample_sum));
  m.impl("sample_sum_backward", TORCH_BOX(&visdet::sample_sum_backward));
  m.impl("sample_dot", TORCH_BOX(&visdet::sample_dot));
  m.impl("sample_dot_backward", TORCH_BOX(&visdet::sample_dot_backward));
}

#endif  // VISDET_ISA_BASELINE
