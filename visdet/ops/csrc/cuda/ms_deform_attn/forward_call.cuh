// A call of the forward, as its paths see it (common/paths.h), and what several paths need to know of it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/launch.h"
#include "common/paths.h"
#include "cuda/ms_deform_attn/levels.cuh"
#include "cuda/ms_deform_attn/row_split.cuh"
#include "cuda/ms_deform_attn/sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

// Registers of a thread: as many as hold the loads of four samples in flight. Kernels set it by __maxnreg__, because
// with __launch_bounds__ the compiler orders the loads worse.
constexpr int kForwardRegisters = 64;

constexpr int kUsualChannels = 32;  // of a row in nearly every published model; some kernels have a form for them

// A call none of whose tensors is empty. Form: GivenForm or FusedForm.
template <typename Form>
struct ForwardCall {
  const MsDeformAttnProblem& problem;
  const DeviceScope& scope;
  const Levels& levels;
  const Form& form;
  const Tensor& value;
  Tensor& output;

  int64_t element() const { return static_cast<int64_t>(value.element_size()); }
  int64_t texel_bytes() const { return problem.G * problem.C * element(); }
  bool is_double() const { return element() == 8; }
  // Rows in float64 are read value by value, so that one kernel serves all of their lengths.
  RowSplit row() const {
    return row_split(problem.C, !is_double() && aligned(value, kVectorBytes), vector_values(value));
  }

  // Calls f(T, A, VEC, LANES) with the types of values and sums and the constants of row().
  template <typename F>
  void visit(const F& f) const {
    dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
      if constexpr (sizeof(accumulate_tag) == 8) {
        f(value_tag, accumulate_tag, std::integral_constant<int, 1>{}, std::integral_constant<int, 32>{});
      } else {
        dispatch_row<kVectorValues<decltype(value_tag)>>(
            row(), [&](auto vec, auto lanes) { f(value_tag, accumulate_tag, vec, lanes); });
      }
    });
  }

  // Why the paths other than `rows` decline the call's rows, which their kernels read by one load of each lane; or
  // null.
  const char* declines_row() const {
    if (is_double()) return "the values are float64";
    if (row().vec == 1) return "rows of value cannot be read 16 bytes at a time";
    if (problem.C > kMaxChannels) return "a row of value has more than 64 channels";
    return nullptr;
  }

  // Calls f(T, VEC, LANES) with the type of values and the constants of row(), of a call whose row is not declined.
  template <typename F>
  void visit_tuned(const F& f) const {
    visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
      if constexpr (sizeof(accumulate_tag) == 4 && decltype(vec)::value > 1) f(value_tag, vec, lanes);
    });
  }
};

// Sizes that kernels take as one argument.
struct ForwardSizes {
  int64_t S;
  int32_t Q, G, C, L, K;
  uint32_t heads;        // of all images, counting those that a block works on together once: B * G / 2^head_bits
  uint32_t slices;       // the steps that a group of lanes needs for the C channels of a row
  uint32_t texel_bytes;  // from one row of value to the next
  int32_t head_bits;     // log2 of the heads that a block works on together
};

template <typename Form>
ForwardSizes forward_sizes(const ForwardCall<Form>& call, int head_bits) {
  const MsDeformAttnProblem& problem = call.problem;
  const RowSplit row = call.row();
  return {problem.S,
          static_cast<int32_t>(problem.Q),
          static_cast<int32_t>(problem.G),
          static_cast<int32_t>(problem.C),
          static_cast<int32_t>(problem.L),
          static_cast<int32_t>(problem.K),
          static_cast<uint32_t>(problem.B * problem.G >> head_bits),
          static_cast<uint32_t>(ceil_div(problem.C, row.vec * row.lanes)),
          static_cast<uint32_t>(call.texel_bytes()),
          head_bits};
}

// Returns log2 of the number of neighbouring heads that should be read together, because their channels of a texel lie
// in one line of 128 bytes. A block that reads one such head alone uses only some banks of the first-level cache. A
// block has threads for 2^most_bits heads at the most.
template <typename Form>
int heads_of_line_bits(const ForwardCall<Form>& call, int most_bits) {
  const int64_t G = call.problem.G, row_bytes = call.problem.C * call.element();
  int bits = 0;
  while (bits < most_bits && row_bytes << (bits + 1) <= 128 && G % (int64_t{2} << bits) == 0) ++bits;
  return bits;
}

// Returns whether the number of samples that a row has on each level is a multiple of `count`.
inline bool points_divide(const Levels& levels, const MsDeformAttnProblem& problem, int64_t count) {
  for (int l = 0; l < (levels.P > 0 ? 1 : problem.L); ++l) {
    if (points_on(levels, l) % count != 0) return false;
  }
  return true;
}

// Returns whether the host knows the levels, and each has two columns or more.
inline bool levels_have_two_columns(const Levels& levels, const MsDeformAttnProblem& problem) {
  return levels.by_value() && std::all_of(levels.W, levels.W + problem.L, [](int32_t W) { return W > 1; });
}

}  // namespace
}  // namespace visdet::ms_deform_attn
