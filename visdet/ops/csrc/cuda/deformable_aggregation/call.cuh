// What the kernels of both directions are given: the sizes of a call, the channels that a lane works on, and the types.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/launch.h"
#include "common/values.cuh"
#include "cuda/deformable_aggregation/maps.cuh"
#include "deformable_aggregation.h"

namespace visdet::deformable_aggregation {
namespace {

// The sizes of a call, and how they are divided among lanes and blocks. A warp works on all channels of a query or of a
// texel. 2^lanes_log2 neighbouring lanes work on a group of channels, so that a warp works on 32 >> lanes_log2 groups
// at a time and on all of them in several rounds.
struct Sizes {
  int64_t B, S, Q;
  int64_t cell_entries;  // numbers that an image has in the table of cells
  int32_t C, G, P, V, L;
  int32_t group_channels;
  int32_t lanes_log2;
  int32_t lane_packs;  // packs of VEC channels that a lane has of a group
  int32_t warp_packs;  // packs that a lane has of all groups: lane_packs times the number of rounds
  int32_t splits;      // blocks among which the pairs of a query are divided
};

// Which channels a lane's n-th pack of VEC channels holds. A group has a power of two of lanes and any number of packs.
// So a lane may have a group but no channels of it, and then takes part in sums over the lanes of the group; a lane
// past the last group has neither. Channel c and group g may be read in every case: they are 0 where the lane has none.
struct Channels {
  int32_t c, g;
  bool is_active;  // whether the lane has channels
  bool has_group;
};
template <int VEC>
__device__ __forceinline__ Channels channels_of(const Sizes& sizes, int lane, int n) {
  const int lanes = 1 << sizes.lanes_log2, round = n / sizes.lane_packs, pack = n - round * sizes.lane_packs;
  const int g = (round << (5 - sizes.lanes_log2)) + (lane >> sizes.lanes_log2);
  const int in_group = ((lane & (lanes - 1)) + pack * lanes) * VEC;
  const bool has_group = g < sizes.G, is_active = has_group && in_group < sizes.group_channels;
  return {is_active ? g * sizes.group_channels + in_group : 0, has_group ? g : 0, is_active, has_group};
}

Sizes sizes_of(const DeformableAggregationProblem& problem, int64_t cell_entries, int64_t vec) {
  Sizes sizes{problem.B, problem.S, problem.Q, cell_entries};
  sizes.C = static_cast<int32_t>(problem.C), sizes.G = static_cast<int32_t>(problem.G);
  sizes.P = static_cast<int32_t>(problem.P), sizes.V = static_cast<int32_t>(problem.V);
  sizes.L = static_cast<int32_t>(problem.L);
  sizes.group_channels = sizes.C / sizes.G;
  const int64_t packs = sizes.group_channels / vec;
  while (sizes.lanes_log2 < 5 && (1 << sizes.lanes_log2) < packs) ++sizes.lanes_log2;
  sizes.lane_packs = static_cast<int32_t>(ceil_div(packs, 1 << sizes.lanes_log2));
  sizes.warp_packs = sizes.lane_packs * static_cast<int32_t>(ceil_div(sizes.G, 32 >> sizes.lanes_log2));
  sizes.splits = 1;
  return sizes;
}

// Returns how many blocks are to divide the pairs of a query among them, of at least 64 pairs each. `blocks` is the
// number of blocks without that, `at_once` the number that the GPU works on at a time. Two full waves of blocks are
// best (with one and a half, half of the GPU idles at the end); where that takes fewer than four blocks a query, so
// that waves cannot be full, it is four waves or more.
int32_t splits_of(const DeformableAggregationProblem& problem, int64_t blocks, int64_t at_once) {
  const int64_t most = problem.P * problem.V / 64;
  const int64_t full = 2 * at_once / blocks, splits = full >= 4 ? full : ceil_div(4 * at_once, blocks);
  return static_cast<int32_t>(std::max<int64_t>(1, std::min(most, splits)));
}

// A call whose sizes are all positive: the tensors that both directions read.
struct Call {
  const DeviceScope& scope;
  const DeformableAggregationProblem& problem;
  const CallMaps& maps;
  const Tensor &features, &locations, &weights;
};
struct ForwardCall : Call {
  const Tensor& output;
};
struct BackwardCall : Call {
  const Tensor& grad_output;
  bool deterministic;
  const Tensor &grad_features, &grad_locations, &grad_weights;
};

// A pack is 16 bytes of neighbouring channels, which a lane reads by one load. Kernels with PACKS work on them, the
// general ones on single values.
template <typename T, bool PACKS>
constexpr int kPackValues = PACKS ? kVectorValues<T> : 1;

// Whether there are kernels for values of type T. Those with PACKS decline float64. No published model has 16-bit
// values that are not read in packs: the general kernels are given such values in float32.
template <typename T, bool PACKS>
constexpr bool kHasKernels = PACKS ? sizeof(T) <= 4 : sizeof(T) >= 4;

// Channels of all groups that a lane of the backward's kernels holds in registers: a warp holds 256. And how many packs
// they are.
constexpr int kHeldChannels = 8;
template <typename T>
constexpr int kHeldPacks = kHeldChannels / kPackValues<T, true>;

template <typename AnyCall>
const char* packs_decline(const AnyCall& call) {
  if (call.features.scalar_type() == ScalarType::Double) return "the values are float64";
  if (call.problem.C / call.problem.G % vector_values(call.features) != 0) {
    return "the channels of a group are no multiple of 16 bytes";
  }
  return aligned(call.features, kVectorBytes) ? nullptr : "features do not start at a multiple of 16 bytes";
}

}  // namespace
}  // namespace visdet::deformable_aggregation
