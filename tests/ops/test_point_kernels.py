"""The CUDA kernels of clouds of points, a block of threads at a time on the CPU, against their definitions."""

import pytest
import torch
from emulation import called

from tests.fuzz.problem import WIDE_TYPES, Seeded
from visdet.ops.furthest_point_sample import furthest_point_sample_reference
from visdet.ops.point_neighbours import ball_query_reference, knn_reference

PROGRAM = """
#define VISDET_ISA emulated  // of the contracts, what needs no torch
#include "cuda/furthest_point_sample/sample.cuh"
#include "cuda/point_neighbours/search.cuh"

using namespace visdet;

template <typename A>
void sample(const void* points, int64_t B, int64_t N, int64_t num_points, bool is_table, int32_t* samples) {
  const FurthestArrays<A> a{N, num_points, is_table, static_cast<const A*>(points), samples};
  std::vector<A> nearest(B * N);
  emulated::run_grid(B, 1, furthest_point_sample::kThreads, [&] {
    is_table ? furthest_point_sample::sample_kernel<A, true>(a, nearest.data())
             : furthest_point_sample::sample_kernel<A, false>(a, nearest.data());
  });
}

template <typename A>
void ball(const void* points, const void* centers, int64_t B, int64_t N, int64_t M, int64_t count, bool is_stacked,
          double low, double high, int32_t* index) {
  const BallArrays<A> a{B, N, M, count, is_stacked, static_cast<A>(low), static_cast<A>(high),
                        static_cast<const A*>(points), static_cast<const A*>(centers), index};
  const int warps = point_neighbours::kThreads / 32;
  emulated::run_grid((B * M + warps - 1) / warps, 1, point_neighbours::kThreads,
                     [&] { point_neighbours::ball_kernel<A>(a); });
}

template <typename A, int K>
void nearest(const NearestArrays<A>& a) {
  const int64_t blocks = (a.M + point_neighbours::kThreads - 1) / point_neighbours::kThreads;
  emulated::run_grid(a.B * blocks, 1, point_neighbours::kThreads, [&] {
    point_neighbours::nearest_kernel<A, K>(a);
  });
}

template <typename A>
void knn(const void* points, const void* centers, int64_t B, int64_t N, int64_t M, int64_t k, int32_t* index,
         void* distances) {
  const NearestArrays<A> a{B, N, M, k, static_cast<const A*>(points), static_cast<const A*>(centers), index,
                           static_cast<A*>(distances)};
  k <= 3 ? nearest<A, 3>(a) : k <= 16 ? nearest<A, 16>(a) : nearest<A, kMaxNeighbours>(a);
}

#define OF_TYPE(name, A)                                                                                            \\
  extern "C" void sample_##name(const void* points, int64_t B, int64_t N, int64_t num_points, bool is_table,        \\
                                int32_t* samples) {                                                                \\
    sample<A>(points, B, N, num_points, is_table, samples);                                                        \\
  }                                                                                                                \\
  extern "C" void ball_##name(const void* points, const void* centers, int64_t B, int64_t N, int64_t M,            \\
                              int64_t count, bool is_stacked, double low, double high, int32_t* index) {           \\
    ball<A>(points, centers, B, N, M, count, is_stacked, low, high, index);                                        \\
  }                                                                                                                \\
  extern "C" void knn_##name(const void* points, const void* centers, int64_t B, int64_t N, int64_t M, int64_t k,  \\
                             int32_t* index, void* distances) {                                                    \\
    knn<A>(points, centers, B, N, M, k, index, distances);                                                         \\
  }
OF_TYPE(float32, float)
OF_TYPE(float64, double)
"""
TYPES = pytest.mark.parametrize("dtype", WIDE_TYPES, ids=str)


def run(library, name, dtype, *arguments):
    called(getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}"), *arguments)


def cloud(seed, *shape, dtype):
    """Return points with equal distances, equal points and bad numbers, or points of any numbers."""
    points = Seeded(seed).normal(*shape)
    if seed % 2:
        points = (points * 2).round() / 2
    if seed % 3 == 2 and points.numel() > 20:
        for i, bad in enumerate((torch.nan, torch.inf, -torch.inf, 1e30, -0.0)):
            points.view(-1)[(i * 7919 + 13) % points.numel()] = bad
    return points.to(dtype)


of_three_seeds = pytest.mark.parametrize("seed", range(3))


# Up to 8 float32 or 4 float64 points of each of the 1024 threads are in registers.
@TYPES
@of_three_seeds
@pytest.mark.parametrize("B, N, num_points", [(2, 1, 3), (1, 3, 5), (2, 1025, 3), (1, 4097, 3), (1, 9000, 3)])
def test_samples(library, B, N, num_points, seed, dtype):
    points = cloud(seed, B, N, 3, dtype=dtype)
    samples = torch.full((B, num_points), -7, dtype=torch.int32)
    run(library, "sample", dtype, points, B, N, num_points, False, samples)
    assert torch.equal(samples, furthest_point_sample_reference(points, num_points, False))


@TYPES
@of_three_seeds
@pytest.mark.parametrize("B, N", [(2, 3), (1, 1100)])
def test_samples_of_a_table_whose_distances_may_be_negative(library, B, N, seed, dtype):
    table = cloud(seed, B, N, N, dtype=dtype)
    samples = torch.full((B, 3), -7, dtype=torch.int32)
    run(library, "sample", dtype, table, B, N, 3, True, samples)
    assert torch.equal(samples, furthest_point_sample_reference(table, 3, True))
    table.fill_(-torch.inf)
    run(library, "sample", dtype, table, B, N, 3, True, samples)
    assert (samples == 0).all()


@TYPES
@of_three_seeds
@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("B, N, M, count", [(2, 70, 9, 5), (1, 0, 3, 2), (1, 31, 1, 40), (2, 300, 5, 33)])
def test_balls(library, B, N, M, count, is_stacked, seed, dtype):
    points, centers = cloud(seed, B, N, 3, dtype=dtype), cloud(seed + 6, B, M, 3, dtype=dtype)
    if N:
        centers[:, 0] = points[:, N // 2]
    for low, high in ((0.0, 1.0), (0.25, 2.25), (0.0, 0.0), (0.0, 1e-4), (0.0, 100.0)):
        index = torch.full((B, M, count), -7, dtype=torch.int32)
        run(library, "ball", dtype, points, centers, B, N, M, count, is_stacked, low, high, index)
        assert torch.equal(index, ball_query_reference(points, centers, low, high, count, is_stacked))


@TYPES
@of_three_seeds
@pytest.mark.parametrize("k", [1, 3, 4, 16, 17, 128])
@pytest.mark.parametrize("B, N, M", [(2, 70, 9), (1, 0, 3), (1, 2, 130), (2, 600, 3)])
def test_neighbours(library, B, N, M, k, seed, dtype):
    points, centers = cloud(seed, B, N, 3, dtype=dtype), cloud(seed + 6, B, M, 3, dtype=dtype)
    index, distances = torch.full((B, M, k), -7, dtype=torch.int32), torch.full((B, M, k), -7, dtype=dtype)
    run(library, "knn", dtype, points, centers, B, N, M, k, index, distances)
    expected = knn_reference(points, centers, k)
    assert torch.equal(index, expected[0]) and torch.equal(distances, expected[1])
