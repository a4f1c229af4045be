// The numbers that the Python functions share with the kernels, which read them by visdet::constants().
#pragma once

#include <cstdint>

namespace visdet {

constexpr int kMaxHostLevels = 16;  // Levels on the host travel as kernel arguments; a longer table must be on the GPU.
constexpr int kMaxHostMaps = 64;    // So do the maps of deformable_aggregation.
constexpr int kNormPack = 8;        // that a thread of the normalisations holds side by side
constexpr int kMaxNormChannels = 32 * kNormPack * 2;  // of dropout_add_layer_norm: a lane has at most two packs
constexpr int kMaxNeighbours = 128;                   // of knn

}  // namespace visdet
