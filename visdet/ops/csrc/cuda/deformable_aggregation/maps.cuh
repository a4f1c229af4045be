// The feature maps of a call: where the map of each camera and level lies in features, and its cells, which the
// backward pass counts samples by. maps_of_call() makes them of the tables that the operator is given.
#pragma once

#include "common/cells.cuh"
#include "common/constants.h"
#include "common/launch.h"
#include "common/values.cuh"
#include "deformable_aggregation.h"

namespace visdet::deformable_aggregation {
namespace {

constexpr const char* kOp = "deformable_aggregation";
constexpr const char* kBackwardOp = "deformable_aggregation_backward";

// The map of one camera and level. A cell is the square between four texel centres that a sample falls into; with the
// cells at the border, which have centres on some sides only, a map has (H + 1) * (W + 1).
struct alignas(16) Map {
  int32_t start, H, W;  // H is 0 for a map that does not lie within S
  uint32_t first_cell;  // where its cells begin in an image's table of cells, which has cells_of(map) + 1 entries of it
};

// The maps of all cameras and levels, by value if the host has the tables, else by a pointer to what maps_kernel wrote.
struct Maps {
  const Map* device;
  Map host[kMaxHostMaps];
};

__host__ __device__ __forceinline__ int64_t cells_of(const Map& map) { return cell_count(map.H, map.W); }

constexpr int kMapsThreads = 64;

// Reads tables that are on the device, in one block. An image's table of cells has room for `cell_entries` numbers.
// Only maps that overlap can need more, and those without room are treated as maps that do not lie within S.
__global__ void __launch_bounds__(kMapsThreads)
    maps_kernel(const int64_t* __restrict__ shapes, const int64_t* __restrict__ starts, Map* __restrict__ maps,
                int count, int64_t S, int64_t cell_entries) {
  for (int m = threadIdx.x; m < count; m += blockDim.x) {
    const int64_t H = shapes[2 * m], W = shapes[2 * m + 1], start = starts[m];
    const bool fits = H > 0 && W > 0 && start >= 0 && H <= S && W <= S && start <= S - H * W;
    maps[m] = fits ? Map{static_cast<int32_t>(start), static_cast<int32_t>(H), static_cast<int32_t>(W), 0} : Map{};
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t cell = 0;
  for (int m = 0; m < count; ++m) {
    if (cell + cells_of(maps[m]) + 1 > cell_entries) maps[m].H = 0;
    maps[m].first_cell = static_cast<uint32_t>(cell);
    cell += maps[m].H > 0 ? cells_of(maps[m]) + 1 : 0;
  }
}

__device__ __forceinline__ Map map_of(const Maps& maps, int m) { return maps.device ? maps.device[m] : maps.host[m]; }

// Called by all threads of a block: copies the maps into shared memory.
__device__ __forceinline__ void load_maps(const Maps& maps, int count, Map* table) {
  for (int m = threadIdx.x; m < count; m += blockDim.x) table[m] = map_of(maps, m);
  __syncthreads();
}

// Returns the pixel coordinate of a location among `size` texels. It is one fused multiply-add, so that every kernel
// gets the same number.
template <typename A>
__device__ __forceinline__ A pixel_of(A location, int32_t size) {
  return fma(location, A(size), A(-0.5));
}

void check_sizes(const DeformableAggregationProblem& problem) {
  VISDET_CHECK(kOp, problem.S < (1 << 30), "features must have fewer than 2^30 rows S on CUDA, got ", problem.S);
  VISDET_CHECK(kOp, problem.C < (1 << 28), "features must have fewer than 2^28 channels C on CUDA, got ", problem.C);
  const double samples = 1.0 * problem.Q * problem.P * problem.V * problem.L;
  VISDET_CHECK(kOp, samples < (1 << 30), "Q * P * V * L must be under 2^30 on CUDA, got ", problem.Q, " * ", problem.P,
               " * ", problem.V, " * ", problem.L);
  VISDET_CHECK(kOp, 1.0 * problem.L * problem.G < (1 << 21), "L * G must be under 2^21 on CUDA, got ", problem.L, " * ",
               problem.G);
  VISDET_CHECK(kOp, 1.0 * problem.V * problem.L <= 512, "V * L must be at most 512 on CUDA, got ", problem.V, " * ",
               problem.L);
}

// The maps of a call as an argument of kernels, and the sizes of memory that depend on them.
struct CallMaps {
  Maps maps;
  Tensor scratch;        // what maps.device points to
  int64_t cell_entries;  // of an image in the table of cells
  int64_t table_bytes;   // of all maps in shared memory
};

// Tables that are on the device are read there, so that the host waits for nothing.
CallMaps maps_of_call(const char* op, const DeviceScope& scope, const DeformableAggregationProblem& problem,
                      const Tensor& shapes_in, const Tensor& starts_in, const Tensor& features) {
  const Tensor shapes = dense(shapes_in), starts = dense(starts_in);
  const int64_t count = problem.V * problem.L;
  CallMaps call{{}, features, 0, static_cast<int64_t>(sizeof(Map)) * count};
  const auto *shape_data = data_of<int64_t>(shapes), *start_data = data_of<int64_t>(starts);
  if (shapes.is_cpu()) {
    check_camera_levels(problem, shape_data, start_data);
    VISDET_CHECK(kOp, count <= kMaxHostMaps, "level_shapes on the CPU may name ", kMaxHostMaps,
                 " maps V * L at the most, got ", count, "; pass the tables on features' device");
    for (int64_t m = 0; m < count; ++m) {
      Map& map = call.maps.host[m];
      map.start = static_cast<int32_t>(start_data[m]);
      map.H = static_cast<int32_t>(shape_data[2 * m]), map.W = static_cast<int32_t>(shape_data[2 * m + 1]);
      map.first_cell = static_cast<uint32_t>(call.cell_entries);
      call.cell_entries += cells_of(map) + 1;
    }
    VISDET_CHECK(kOp, call.cell_entries <= UINT32_MAX, "level_shapes must hold fewer than 2^32 texels on CUDA, got ",
                 call.cell_entries, " with their borders");
    return call;
  }
  call.cell_entries = 2 * problem.S + 3 * count;  // H * W + H + W + 1 <= 2 * H * W + 2
  call.scratch = new_empty(features, {call.table_bytes}, ScalarType::Byte);
  auto* maps = mutable_data_of<Map>(call.scratch);
  launch({op, "maps_kernel", scope, 1, kMapsThreads}, maps_kernel, shape_data, start_data, maps,
         static_cast<int>(count), problem.S, call.cell_entries);
  call.maps.device = maps;
  return call;
}

}  // namespace
}  // namespace visdet::deformable_aggregation
