// Path "sorted": the samples are sorted by cell, and a cell's are taken together. It serves every call, and its results
// do not differ between runs.
//
// A cell is the square between four texel centres into which a sample falls. A level has (H + 1) * (W + 1) cells,
// because the border has cells, too. The samples of each (batch, head, level) are sorted by cell, in three stages:
//
//   backward_records.cuh  count_kernel, scan_kernel, scatter_kernel: samples -> records in bins of neighbouring cells
//   backward_sort.cuh     sort_kernel: the records of a bin -> the same in the order of cells
//   backward_gather.cuh   gather_kernel: the records of a cell -> gradients
//
// A sample then reads one row of grad_output. Without the order, it would read four rows of value and add to four rows
// of gradients. grad_value is written once, in its own type. It therefore needs no atomic additions, no zeros before
// and no copy in float32. Scratch memory: 32 bytes a sample (64 in float64) and 4 a cell.
#pragma once

#include "cuda/ms_deform_attn/backward_gather.cuh"
#include "cuda/ms_deform_attn/backward_sort.cuh"

namespace visdet::ms_deform_attn {
namespace {

template <typename Form>
void sorted_launch(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const SortedSizes sizes = sorted_sizes(call);
  const int64_t heads = problem.B * problem.G, samples = heads * problem.Q * problem.K;
  VISDET_CHECK(kOp, sizes.bin_starts <= INT32_MAX, "Q * L * P and S are too large: ", sizes.bin_starts, " bins");
  launch({kOp, "zero_kernel", call.scope, call.scope.device().multiprocessors * 2, kZeroThreads}, zero_kernel,
         call.plans.get(), data_of(call.grad_value), call.grad_value.numel() * call.element());
  Tensor cell_starts = new_empty(call.value, {heads * sizes.cell_starts}, ScalarType::Int),
         bin_starts = new_zeros(call.value, {2, heads * sizes.bin_starts}, ScalarType::Int);
  int32_t* of_cells = data_of(cell_starts);
  int32_t* of_bins = data_of(bin_starts);
  dispatch_value_type(call.value.scalar_type(), [&]<typename T, typename A>(T, A) {
    const int64_t record_bytes = samples * static_cast<int64_t>(sizeof(Record<A>));
    Tensor binned = new_empty(call.value, {record_bytes}, ScalarType::Byte),
           sorted = new_empty(call.value, {record_bytes}, ScalarType::Byte);
    Record<A>* binned_records = data_of(binned);
    Record<A>* sorted_records = data_of(sorted);
    const SampleGrads<A> grads = call.form.template grads<A>();
    call.form.template with_source<A>(
        [&](const auto& source) { write_records(call, sizes, source, grads, of_bins, binned_records); });
    sort_records(call, sizes, of_bins, binned_records, sorted_records, of_cells);
    gather<T>(call, sizes, grads, of_cells, sorted_records);
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn
