// cast_rays and render_rays: rays through grids of voxels, each ray by itself, for both kinds of device.
//
// grid [B, T, D, H, W] of voxels of the size 1, origins [B, S, 3] and points [B, N, 3] as (x, y, z), all float32 or all
// float64; times [B, N] int64. T is 1 or S. Ray n goes from origin times[b, n] through point n, in grid times[b, n] or
// in the only one. It begins in the voxel of the origin's whole parts (towards 0; NaN is 0), and goes on to the
// neighbour whose border is nearest, of equal ones z before y before x, for at most 1001 voxels and until it has left
// the grid. The distance of a voxel is that at which the ray leaves it. Everything is computed in float64, and rounded.
//
// cast_rays: distances [B, N] of the first voxel above 0.5, or else of the last one in the grid; exits [B, N], of the
//   last one; voxels [B, N, 3] int32 (x, y, z), of the first result.
// render_rays: [B, N, 2], sum_i (e[i - 1] - e[i]) * distance[i] + e[last] * distance[last], and distance[last], where
//   e[i] = exp(-sum_(j <= i) grid[j] * length[j]) and e[-1] = 1. Such a ray also ends, outside the grid, beyond its
//   point. The first number is differentiable with respect to the grid. On CUDA, threads add to it in any order.
//
// A ray without a voxel in the grid, or with a time outside 0..S-1, has -1 everywhere.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <tuple>

#include "common/each.h"
#include "common/rounded.h"

namespace visdet {

template <typename A>
struct Rays {
  int64_t T, D, H, W, S, N;
  const A *grid, *origins, *points;
  const int64_t* times;

  VISDET_HOST_DEVICE int64_t numbers() const { return D * H * W; }

  // The grid of a ray, counted over all of B, or -1 for a ray with no time.
  VISDET_HOST_DEVICE int64_t grid_of(int64_t ray) const {
    const int64_t time = times[ray];
    return time < 0 || time >= S ? -1 : ray / N * T + (T == 1 ? 0 : time);
  }

  // Calls visit(voxel, start, end) for the voxels in the grid in order, with the distances at which the ray enters and
  // leaves them. to_point: whether the ray ends outside the grid once it is beyond its point.
  template <bool to_point, typename F>
  VISDET_HOST_DEVICE void walk(int64_t ray, const F& visit) const {
    if (grid_of(ray) < 0) return;
    const A* origin = origins + (ray / N * S + times[ray]) * 3;
    double path[3], border[3], pace[3], squares = 0;
    int64_t voxel[3];
    const int64_t sizes[3] = {W, H, D};
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      path[axis] = static_cast<double>(points[3 * ray + axis]) - static_cast<double>(origin[axis]);
      squares = sum(squares, product(path[axis], path[axis]));
    }
    const double length = sqrt(squares);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const double at = origin[axis], along = path[axis] / length;
      voxel[axis] = at != at ? 0 : static_cast<int64_t>(fmin(fmax(at, -1e9), 1e9));
      path[axis] = along >= 0 ? 1 : -1;
      border[axis] = along != 0 ? (static_cast<double>(voxel[axis] + (along >= 0)) - at) / along : DBL_MAX;
      pace[axis] = along != 0 ? path[axis] / along : DBL_MAX;
    }
    double start = 0;
    for (int step = 0; step <= 1000; ++step) {
      bool is_inside = true, is_beyond = false;  // beyond the grid, which the ray will not enter any more
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        is_inside = is_inside && voxel[axis] >= 0 && voxel[axis] < sizes[axis];
        is_beyond = is_beyond || (path[axis] > 0 ? voxel[axis] >= sizes[axis] : voxel[axis] < 0);
      }
      if (is_beyond || (to_point && !is_inside && start > length)) return;
      const int64_t at = (voxel[2] * H + voxel[1]) * W + voxel[0];
      const int nearest = border[0] < border[1] ? (border[0] < border[2] ? 0 : 2) : (border[1] < border[2] ? 1 : 2);
      double end = 0;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        if (axis != nearest) continue;
        end = border[axis];
        border[axis] += pace[axis];
        voxel[axis] += path[axis] > 0 ? 1 : -1;
      }
      if (is_inside) visit(at, start, end);
      start = end;
    }
  }
};

template <typename A>
struct CastRays : Rays<A> {
  A *distances, *exits;
  int32_t* voxels;

  VISDET_HOST_DEVICE void operator()(int64_t ray) const {
    const A* values = this->grid + this->grid_of(ray) * this->numbers();
    double distance = -1, exit = -1;
    int64_t found = -1;
    bool is_hit = false;
    this->template walk<false>(ray, [&](int64_t voxel, double, double end) {
      exit = end;
      if (is_hit) return;
      distance = end, found = voxel, is_hit = values[voxel] > A(0.5);
    });
    distances[ray] = static_cast<A>(distance), exits[ray] = static_cast<A>(exit);
    const int64_t row = found < 0 ? -1 : found / this->W;
    voxels[3 * ray] = static_cast<int32_t>(found < 0 ? -1 : found - row * this->W);
    voxels[3 * ray + 1] = static_cast<int32_t>(found < 0 ? -1 : row % this->H);
    voxels[3 * ray + 2] = static_cast<int32_t>(found < 0 ? -1 : row / this->H);
  }
};

VISDET_HOST_DEVICE double length_of(double start, double end) { return end - start > 0 ? end - start : 0; }

template <typename A>
struct RenderRays : Rays<A> {
  A* output;

  VISDET_HOST_DEVICE void operator()(int64_t ray) const {
    const A* values = this->grid + this->grid_of(ray) * this->numbers();
    double depth = 0, left = 1, expected = 0, exit = -1;
    bool has_voxel = false;
    this->template walk<true>(ray, [&](int64_t voxel, double start, double end) {
      depth += values[voxel] * length_of(start, end);
      const double leaves = exp(-depth);
      expected += (left - leaves) * end;
      left = leaves, exit = end, has_voxel = true;
    });
    output[2 * ray] = static_cast<A>(has_voxel ? expected + left * exit : -1);
    output[2 * ray + 1] = static_cast<A>(exit);
  }
};

// The gradient of the grids. A computation is a ray on a GPU, and a grid on a CPU.
template <typename A>
struct RayGradient : Rays<A> {
  const A* grad_output;
  A* grad_grid;

  // The derivative by voxel k is -length[k] * sum_(i >= k) e[i] * (distance[i + 1] - distance[i]): the whole sum is
  // found first, and what lies before k is taken from it.
  VISDET_HOST_DEVICE void add(int64_t ray) const {
    const int64_t first = this->grid_of(ray) * this->numbers();
    double rest = 0;
    for (int pass = 0; pass < 2; ++pass) {
      double depth = 0, before = 0;
      bool has_voxel = false;
      this->template walk<true>(ray, [&](int64_t voxel, double start, double end) {
        if (has_voxel) rest += (pass == 0 ? 1 : -1) * exp(-depth) * (end - before);
        const double length = length_of(start, end);
        depth += this->grid[first + voxel] * length;
        before = end, has_voxel = true;
        if (pass == 0) return;
        const A grad = static_cast<A>(-grad_output[2 * ray] * length * rest);
#if defined(__CUDA_ARCH__)
        atomicAdd(grad_grid + first + voxel, grad);
#else
        grad_grid[first + voxel] += grad;
#endif
      });
    }
  }

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
#if defined(__CUDACC__)
    add(i);
#else
    for (int64_t ray = i / this->T * this->N, end = ray + this->N; ray < end; ++ray)
      if (this->grid_of(ray) == i) add(ray);
#endif
  }
};

// The arguments of both operators, checked and dense.
struct RayInputs {
  Tensor grid, origins, points, times;

  RayInputs(const char* op, const char* name, const Tensor& grid_in, const Tensor& origins_in, const Tensor& points_in,
            const Tensor& times_in)
      : grid(dense(grid_in)), origins(dense(origins_in)), points(dense(points_in)), times(dense(times_in)) {
    check_sums(op, name, grid, {"B", "T", "D", "H", "W"});
    const int64_t B = grid.size(0), T = grid.size(1);
    check_like(op, "origins", origins, {{"B", B}, "S", 3}, name, grid);
    VISDET_CHECK(op, T == 1 || T == origins.size(1), name, " must have 1 or ", origins.size(1),
                 " grids of an image, got ", T);
    check_like(op, "points", points, {{"B", B}, "N", 3}, name, grid);
    check_typed(op, "times", times, {{"B", B}, {"N", points.size(1)}}, ScalarType::Long, name, grid);
  }

  template <typename A>
  Rays<A> rays() const {
    return {grid.size(1),   grid.size(2),  grid.size(3),     grid.size(4),    origins.size(1),
            points.size(1), data_of(grid), data_of(origins), data_of(points), data_of(times)};
  }
};

constexpr int64_t kCostOfRay = 4000;

inline std::tuple<Tensor, Tensor, Tensor> cast_rays(const Tensor& occupancy, const Tensor& origins,
                                                    const Tensor& points, const Tensor& times) {
  constexpr const char* op = "cast_rays";
  const RayInputs given(op, "occupancy", occupancy, origins, points, times);
  const OnDevice device(op, occupancy);
  const int64_t B = points.size(0), N = points.size(1);
  const Tensor distances = new_empty(occupancy, {B, N}), exits = new_empty(occupancy, {B, N});
  const Tensor voxels = new_empty(occupancy, {B, N, 3}, ScalarType::Int);
  dispatch_sum_type(occupancy.scalar_type(), [&]<typename A>(A) {
    device.each(B * N, kCostOfRay, CastRays<A>{given.rays<A>(), data_of(distances), data_of(exits), data_of(voxels)});
  });
  return {distances, exits, voxels};
}

inline Tensor render_rays(const Tensor& density, const Tensor& origins, const Tensor& points, const Tensor& times) {
  constexpr const char* op = "render_rays";
  const RayInputs given(op, "density", density, origins, points, times);
  const OnDevice device(op, density);
  const int64_t B = points.size(0), N = points.size(1);
  const Tensor output = new_empty(density, {B, N, 2});
  dispatch_sum_type(density.scalar_type(), [&]<typename A>(A) {
    device.each(B * N, kCostOfRay, RenderRays<A>{given.rays<A>(), data_of(output)});
  });
  return output;
}

inline Tensor render_rays_backward(const Tensor& grad_output_in, const Tensor& density, const Tensor& origins,
                                   const Tensor& points, const Tensor& times) {
  constexpr const char* op = "render_rays_backward";
  const RayInputs given(op, "density", density, origins, points, times);
  const int64_t B = points.size(0), N = points.size(1);
  check_like(op, "grad_output", grad_output_in, {{"B", B}, {"N", N}, 2}, "density", density);
  const OnDevice device(op, density);
  const Tensor grad_output = dense(grad_output_in);
  Tensor grad_density = new_like(given.grid);
  zero_(grad_density);
#if defined(__CUDACC__)
  const int64_t count = B * N;
#else
  const int64_t count = B * density.size(1);
#endif
  dispatch_sum_type(density.scalar_type(), [&]<typename A>(A) {
    device.each(count, kCostOfRay, RayGradient<A>{given.rays<A>(), data_of(grad_output), data_of(grad_density)});
  });
  return grad_density;
}

VISDET_OPERATORS(cast_rays, m) {
  m.impl("cast_rays", TORCH_BOX(&cast_rays));
  m.impl("render_rays", TORCH_BOX(&render_rays));
  m.impl("render_rays_backward", TORCH_BOX(&render_rays_backward));
}

}  // namespace visdet
