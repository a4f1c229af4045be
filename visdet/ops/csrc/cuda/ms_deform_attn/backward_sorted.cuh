// Path "sorted": samples sorted by cell, and gathered. It serves every call, and its results do not differ between
// runs.
//
// A cell is the square between four texel centres that a sample falls into: a level has (H + 1) * (W + 1) of them,
// those on the border included. The samples of each (batch, head, level) are sorted by cell and, in a cell, by query
// and point: backward_records.cuh writes them into bins of neighbouring cells, backward_sort.cuh sorts each bin, and
// backward_gather.cuh takes the samples of a cell together. So a sample costs the read of one row of grad_output,
// instead of the read of four rows of value and additions to four rows of gradients, and grad_value is written once, in
// its own type: without atomics, without being cleared first, and without a copy in float32.
//
// Scratch memory: 32 bytes a sample (64 in float64) and 4 bytes a cell.
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
  VISDET_CHECK(kOp, sizes.head_bins <= INT32_MAX, "Q * L * P and S are too large: ", sizes.head_bins, " bins");
  const LevelPlan* plan = call.plans.get();
  Tensor starts = new_empty(call.value, {heads * sizes.head_slots}, ScalarType::Int);
  auto* start_data = static_cast<int32_t*>(starts.mutable_data_ptr());
  launch({kOp, "zero_kernel", call.scope, call.scope.device().multiprocessors * 2, kZeroThreads}, zero_kernel, plan,
         static_cast<char*>(call.grad_value.mutable_data_ptr()), call.grad_value.numel() * call.element());

  dispatch_value_type(call.value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const int64_t record_bytes = samples * static_cast<int64_t>(sizeof(Record<A>));
    Tensor records = new_empty(call.value, {record_bytes}, ScalarType::Byte),
           sorted = new_empty(call.value, {record_bytes}, ScalarType::Byte);
    auto* sorted_data = static_cast<Record<A>*>(sorted.mutable_data_ptr());
    auto* record_data = static_cast<Record<A>*>(records.mutable_data_ptr());
    // Where the records of the bins start, and how far the bins are filled.
    Tensor bins = new_zeros(call.value, {2, heads * sizes.head_bins}, ScalarType::Int);
    auto* bin_starts = static_cast<int32_t*>(bins.mutable_data_ptr());
    const SampleGrads<A> grads = call.form.template grads<A>();
    call.form.template with_source<A>(
        [&](const auto& source) { write_records(call, sizes, source, grads, bin_starts, record_data); });
    sort_records<A>(call, sizes, bin_starts, record_data, sorted_data, start_data);
    gather<T, A>(call, sizes, grads, start_data, sorted_data);
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn
