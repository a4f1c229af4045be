"""What kernels share in ``csrc/common``: exchanges of a warp, compaction and cells, in a block that a CPU emulates."""

import ctypes
import random

import pytest
from emulation import compiled

PROGRAM = """
#include "common/cells.cuh"
#include "common/compact.cuh"
#include "common/warp.cuh"

using namespace visdet;

// Of 32 values: [32] what each lane returns.
#define OF_WARP(name, ...)                                             \\
  extern "C" void name(const double* values, int begin, int end, double* out) { \\
    emulated::run_block(32, [&] {                                      \\
      const int lane = threadIdx.x;                                    \\
      const double value = values[lane];                               \\
      out[lane] = __VA_ARGS__;                                         \\
    });                                                                \\
  }
OF_WARP(sums, sum_lanes(value, begin, end))
OF_WARP(greatest, max_lanes(value, begin, end))
OF_WARP(least, min_lanes(value, begin, end))
OF_WARP(running_sums, inclusive_sum_lanes(value, end))
// Only the lanes from begin to end take part.
OF_WARP(masked_sums, lane >= begin && lane < end ? sum_lanes(value, 1, end - begin, (1u << (end - begin)) - 1 << begin)
                                                 : value)

extern "C" void sums_of_two(const double* values, int begin, int end, double* out) {  // [32, 2]
  emulated::run_block(32, [&] {
    double mine[2] = {values[2 * threadIdx.x], values[2 * threadIdx.x + 1]};
    sum_lanes(mine, begin, end);
    out[2 * threadIdx.x] = mine[0], out[2 * threadIdx.x + 1] = mine[1];
  });
}

template <int N>
void transposed(const double* values, int end, double* out) {
  emulated::run_block(32, [&] {
    double mine[N];
    for (int i = 0; i < N; ++i) mine[i] = values[N * threadIdx.x + i];
    out[threadIdx.x] = transposed_sum_lanes(mine, end);
  });
}
extern "C" void transposed_sums(const double* values, int N, int end, double* out) {  // [32, N] to [32]
  if (N == 1) transposed<1>(values, end, out);
  if (N == 4) transposed<4>(values, end, out);
  if (N == 16) transposed<16>(values, end, out);
}

// keeps: [rounds, 96]. Returns how many are kept, whose numbers go to `kept`.
extern "C" int compacted(const int* keeps, int rounds, int* kept) {
  int total = 0;
  emulated::run_block(96, [&] {
    const auto is_kept = [&](int round) { return keeps[round * 96 + threadIdx.x] != 0; };
    const auto put = [&](int round, int position) { kept[position] = round * 96 + threadIdx.x; };
    const int found = compact_block<96, 3>(rounds, is_kept, put);
    if (threadIdx.x == 0) total = found;
  });
  return total;
}

extern "C" int scanned(int* counts, int begin, int end, int carry) {  // in place
  int total = 0;
  emulated::run_block(64, [&] {
    const int found = scan_counts<64>(counts, counts, begin, end, carry);
    if (threadIdx.x == 0) total = found;
  });
  return total;
}

struct Record {
  int32_t sample, origin;
};
extern "C" void ordered(Record* from, Record* to, int count) {
  static OrderBitmap bitmap;
  emulated::run_block(32, [&] { order_records(from, to, count, bitmap); });
}

extern "C" int cell(double x, double y, int W) { return static_cast<int>(cell_of(x, y, W)); }
extern "C" int cells(int H, int W) { return static_cast<int>(cell_count(H, W)); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("device_library"), PROGRAM)


def doubles(values):
    return (ctypes.c_double * len(values))(*values)


def of_warp(function, values, begin=1, end=32):
    out = doubles([0] * 32)
    function(doubles(values), begin, end, out)
    return list(out)


VALUES = [float((7 * lane) % 32 - 11) for lane in range(32)]


def group(lane, begin, end):
    """Return the lanes of the lane's group of ``end`` whose numbers agree with its number modulo ``begin``."""
    first = lane // end * end
    return [other for other in range(first, first + end) if other % begin == lane % begin]


@pytest.mark.parametrize("begin, end", [(1, 32), (1, 4), (4, 32), (2, 8), (8, 8)])
@pytest.mark.parametrize("name, combine", [("sums", sum), ("greatest", max), ("least", min)])
def test_a_warp_combines_the_values_of_groups(library, name, combine, begin, end):
    expected = [combine(VALUES[other] for other in group(lane, begin, end)) for lane in range(32)]
    assert of_warp(getattr(library, name), VALUES, begin, end) == expected


def test_a_warp_sums_several_values_at_once(library):
    values, out = [*VALUES, *map(abs, VALUES)], doubles([0] * 64)
    library.sums_of_two(doubles(values), 2, 16, out)
    for lane in range(32):
        for i in range(2):
            assert out[2 * lane + i] == sum(values[2 * other + i] for other in group(lane, 2, 16))


def test_lanes_outside_a_mask_take_no_part(library):
    expected = [sum(VALUES[8:16]) if 8 <= lane < 16 else VALUES[lane] for lane in range(32)]
    assert of_warp(library.masked_sums, VALUES, 8, 16) == expected


@pytest.mark.parametrize("end", [32, 16, 1])
def test_running_sums_of_a_warp(library, end):
    found = of_warp(library.running_sums, VALUES, end=end)
    assert found[:end] == [sum(VALUES[: lane + 1]) for lane in range(end)]


@pytest.mark.parametrize("N, end", [(1, 32), (4, 32), (4, 4), (16, 16), (16, 32)])
def test_transposed_sums_leave_each_lane_one_of_the_sums(library, N, end):
    values, out = [float((5 * i) % 61) for i in range(32 * N)], doubles([0] * 32)
    library.transposed_sums(doubles(values), N, end, out)
    for lane in range(32):
        lanes = group(lane, 1, end)
        assert out[lane] == sum(values[N * other + lane % N] for other in lanes)


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("share", [0, 1, 30, 100])
def test_compaction_lists_what_is_kept_in_order(library, rounds, share):
    generator = random.Random(share)
    keeps = [int(generator.random() * 100 < share) for _ in range(96 * rounds)]
    kept = (ctypes.c_int * len(keeps))()
    count = library.compacted((ctypes.c_int * len(keeps))(*keeps), rounds, kept)
    assert list(kept[:count]) == [i for i, keep in enumerate(keeps) if keep]


@pytest.mark.parametrize("begin, end", [(0, 1), (0, 256), (3, 700), (5, 5)])
def test_a_scan_turns_counts_into_starts(library, begin, end):
    counts = [(3 * i) % 7 for i in range(720)]
    scanned = (ctypes.c_int * len(counts))(*counts)
    assert library.scanned(scanned, begin, end, 40) == 40 + sum(counts[begin:end])
    expected = [40 + sum(counts[begin:i]) if begin <= i < end else counts[i] for i in range(720)]
    assert list(scanned) == expected


# Up to 32 records are compared with each other. A bitmap has room for 32768 samples. Beyond four of them, digits count.
@pytest.mark.parametrize("span", [0, 100, 70_000, 200_000, 2**31 - 1], ids="span{}".format)
@pytest.mark.parametrize("count", [0, 1, 32, 33, 500])
def test_records_are_ordered_by_their_samples(library, count, span):
    generator = random.Random(count + span)
    first = 0 if span == 2**31 - 1 else 17
    samples = generator.sample(range(first, first + max(span, count)), count)
    if count > 1 and span > count:
        samples[0], samples[1] = first, first + span - 1
        samples = list(dict.fromkeys(samples))
    numbers = [number for origin, sample in enumerate(samples) for number in (sample, origin)]
    given, ordered = (ctypes.c_int * len(numbers))(*numbers), (ctypes.c_int * len(numbers))()
    library.ordered(given, ordered, len(samples))
    found = list(zip(ordered[::2], ordered[1::2], strict=True))
    assert found == sorted((sample, origin) for origin, sample in enumerate(samples))


def test_cells_are_numbered_row_by_row_from_the_border_on(library):
    H, W = 3, 5
    library.cell.argtypes = [ctypes.c_double, ctypes.c_double, ctypes.c_int]
    found = [library.cell(x - 0.5, y - 0.5, W) for y in range(H + 1) for x in range(W + 1)]
    assert found == list(range(library.cells(H, W))) and library.cells(0, 9) == 0
    assert library.cell(0.0, 0.0, W) == library.cell(0.99, 0.99, W) == W + 2
