"""What kernels share in ``csrc/common``: exchanges of a warp, compaction and cells, in a block that a CPU emulates."""

import random

import pytest
import torch
from emulation import called

from tests.fuzz.problem import generator_of

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

extern "C" void cells_ordered(Record* from, Record* to, const int* starts) {  // of 32 cells
  static OrderBitmap bitmap;
  emulated::run_block(32, [&] {
    const int begin = starts[threadIdx.x];
    order_records_of_cells(from, to, begin, starts[threadIdx.x + 1] - begin, bitmap);
  });
}

extern "C" int cell(double x, double y, int W) { return static_cast<int>(cell_of(x, y, W)); }
extern "C" int cells(int H, int W) { return static_cast<int>(cell_count(H, W)); }
"""


LANES = torch.arange(32)
VALUES = (7 * LANES % 32 - 11).double()


def of_warp(function, values, begin=1, end=32):
    out = torch.zeros(32, dtype=torch.float64)
    called(function, values, begin, end, out)
    return out


def groups(begin, end):
    """Return the lanes of each lane's group of ``end`` whose numbers agree with its number modulo ``begin``."""
    return (LANES[:, None] // end == LANES // end) & (LANES[:, None] % begin == LANES % begin)


@pytest.mark.parametrize("begin, end", [(1, 32), (1, 4), (4, 32), (2, 8), (8, 8)])
@pytest.mark.parametrize(
    "name, combine, none",
    [("sums", torch.sum, 0), ("greatest", torch.amax, -torch.inf), ("least", torch.amin, torch.inf)],
)
def test_a_warp_combines_the_values_of_groups(library, name, combine, none, begin, end):
    expected = combine(VALUES.where(groups(begin, end), none), 1)
    assert torch.equal(of_warp(getattr(library, name), VALUES, begin, end), expected)


def test_a_warp_sums_several_values_at_once(library):
    values = torch.stack([VALUES, VALUES.abs()], 1)
    out = torch.zeros_like(values)
    called(library.sums_of_two, values, 2, 16, out)
    assert torch.equal(out, groups(2, 16).double() @ values)


def test_lanes_outside_a_mask_take_no_part(library):
    expected = VALUES.clone()
    expected[8:16] = VALUES[8:16].sum()
    assert torch.equal(of_warp(library.masked_sums, VALUES, 8, 16), expected)


@pytest.mark.parametrize("end", [32, 16, 1])
def test_running_sums_of_a_warp(library, end):
    assert torch.equal(of_warp(library.running_sums, VALUES, end=end)[:end], VALUES.cumsum(0)[:end])


@pytest.mark.parametrize("N, end", [(1, 32), (4, 32), (4, 4), (16, 16), (16, 32)])
def test_transposed_sums_leave_each_lane_one_of_the_sums(library, N, end):
    values = (5 * torch.arange(32 * N) % 61).double().view(32, N)
    sums = groups(1, end).double() @ values
    assert torch.equal(of_warp(library.transposed_sums, values, N, end), sums[LANES, LANES % N])


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("share", [0, 1, 30, 100])
def test_compaction_lists_what_is_kept_in_order(library, rounds, share):
    generator = generator_of(share)
    keeps = (torch.rand(96 * rounds, generator=generator) * 100 < share).int()
    kept = torch.zeros_like(keeps)
    count = called(library.compacted, keeps, rounds, kept)
    assert torch.equal(kept[:count], keeps.nonzero()[:, 0].int())


@pytest.mark.parametrize("begin, end", [(0, 1), (0, 256), (3, 700), (5, 5)])
def test_a_scan_turns_counts_into_starts(library, begin, end):
    counts = (3 * torch.arange(720) % 7).int()
    scanned, expected, within = counts.clone(), counts.clone(), counts[begin:end]
    assert called(library.scanned, scanned, begin, end, 40) == 40 + within.sum()
    expected[begin:end] = 40 + within.cumsum(0) - within
    assert torch.equal(scanned, expected)


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
    given = torch.tensor([samples, list(range(len(samples)))], dtype=torch.int32).T.contiguous()
    ordered = torch.zeros_like(given)
    called(library.ordered, given, ordered, len(samples))
    assert torch.equal(ordered, given[given[:, 0].argsort()])


def test_the_cells_of_all_lanes_are_ordered_each_by_its_samples(library):
    counts = torch.tensor([0, 1, 2, 16, 17, 40, 3, 0] * 4)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    total = int(starts[-1])
    given = torch.stack([torch.randperm(total), torch.arange(total)], 1).int()
    ordered = torch.zeros_like(given)
    called(library.cells_ordered, given.clone(), ordered, starts)
    expected = [cell[cell[:, 0].argsort()] for cell in given.split(counts.tolist())]
    assert torch.equal(ordered, torch.cat(expected))


def test_cells_are_numbered_row_by_row_from_the_border_on(library):
    H, W = 3, 5
    found = [called(library.cell, x - 0.5, y - 0.5, W) for y in range(H + 1) for x in range(W + 1)]
    assert found == list(range(library.cells(H, W))) and library.cells(0, 9) == 0
    assert called(library.cell, 0.0, 0.0, W) == called(library.cell, 0.99, 0.99, W) == W + 2
