"""The CUDA kernels of nms, a block of threads at a time on the CPU, against its function for CPU tensors."""

import ctypes
import itertools

import pytest
import torch
from emulation import compiled
from nms_cases import of_random_problem

from visdet.ops import _library

pytestmark = pytest.mark.skipif(not _library.is_loaded("cpu"), reason="the library is not built")

PROGRAM = """
#include "cuda/nms/boxes.cuh"
#include "cuda/nms/suppress.cuh"

using namespace visdet;
using namespace visdet::nms;

template <typename Boxes, typename A>
int64_t run(const Boxes& rule, const A* boxes, const int64_t* order, const int64_t* ranks, const int64_t* classes,
            const bool* is_candidate, int32_t N, int64_t* keep) {
  const int tiles = (N + kTile - 1) / kTile;
  std::vector<typename Boxes::Box> sorted(N);
  std::vector<int32_t> starts(N);
  std::vector<uint64_t> words(2 * tiles);
  std::vector<uint4> is_kept(tiles * kTile / 16);
  uint32_t next_tile = 0;
  int64_t count = 0;
  uint8_t* flags = reinterpret_cast<uint8_t*>(is_kept.data());
  emulated::run_grid((N + kPrepareThreads - 1) / kPrepareThreads, 1, kPrepareThreads, [&] {
    prepare_kernel<Boxes>(boxes, order, ranks, classes, is_candidate, N, sorted.data(), starts.data());
  });
  emulated::run_grid(tiles, 1, kThreads, [&] {
    suppress_kernel(rule, sorted.data(), starts.data(), ranks, N, Progress{words.data(), &next_tile}, flags);
  });
  const int blocks = (tiles * kTile + kSelectThreads * kFlagsOfThread - 1) / (kSelectThreads * kFlagsOfThread);
  emulated::run_grid(blocks, 1, kSelectThreads, [&] { select_kernel(flags, order, tiles * kTile, keep, &count); });
  return count;
}

template <typename A>
int64_t dispatch(int columns, double threshold, const A* boxes, const int64_t* order, const int64_t* ranks,
                 const int64_t* classes, const bool* is_candidate, int32_t N, int64_t* keep) {
  const auto with = [&](const auto& rule) { return run(rule, boxes, order, ranks, classes, is_candidate, N, keep); };
  if (columns == 5) return with(Polygons<A, true>{static_cast<A>(threshold)});
  if (columns == 8) return with(Polygons<A, false>{static_cast<A>(threshold)});
  const AlignedLimit<A> limit(threshold);
  return with(AlignedBoxes<A>{limit.limit, limit.low});
}

extern "C" int64_t suppress(bool is_double, int columns, double threshold, const void* boxes, const int64_t* order,
                            const int64_t* ranks, const int64_t* classes, const bool* is_candidate, int32_t N,
                            int64_t* keep) {
  return is_double ? dispatch(columns, threshold, static_cast<const double*>(boxes), order, ranks, classes,
                              is_candidate, N, keep)
                   : dispatch(columns, threshold, static_cast<const float*>(boxes), order, ranks, classes,
                              is_candidate, N, keep);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = compiled(tmp_path_factory.mktemp("nms"), PROGRAM)
    library.suppress.restype = ctypes.c_int64
    return library


def kept_by_emulation(library, boxes, scores, classes, is_candidate, threshold):
    order = scores.sort(descending=True, stable=True).indices
    ranks = by_class = None
    if classes is not None:
        by_class, ranks = classes[order].sort(stable=True)
    keep = torch.empty(len(boxes), dtype=torch.int64)
    addresses = [
        ctypes.c_void_p(None if given is None else given.data_ptr())
        for given in (boxes, order, ranks, by_class, is_candidate)
    ]
    arguments = (boxes.dtype == torch.float64, boxes.shape[1], ctypes.c_double(threshold), *addresses)
    return keep[: library.suppress(*arguments, len(boxes), ctypes.c_void_p(keep.data_ptr()))]


@pytest.mark.parametrize("columns", [4, 5, 8])
def test_kernels_keep_what_the_cpu_keeps(library, columns):
    sizes = [1, 2, 63, 64, 65, 130, 300]
    for seed, N in itertools.product(range(6 if columns == 4 else 2), sizes):
        problem = of_random_problem(seed, N, columns)
        expected = torch.ops.visdet.nms(*problem)
        assert torch.equal(kept_by_emulation(library, *problem), expected), (seed, N)
