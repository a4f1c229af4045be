// Tells the Python functions the numbers of common/constants.h, by the names of the results.
#include "common/constants.h"

#include <tuple>

#include "common/torch.h"

namespace visdet {
namespace {

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> constants() {
  return {kMaxHostLevels, kMaxHostMaps, kNormPack, kMaxNormChannels, kMaxNeighbours};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "constants() -> (int max_host_levels, int max_host_maps, int norm_pack, int max_norm_channels,"
      " int max_neighbours)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CompositeExplicitAutograd, m) { m.impl("constants", TORCH_BOX(&visdet::constants)); }
