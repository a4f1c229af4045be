// The sum pass of sample_sum and sample_dot: [B, G, Q, K] of coefficients times samples.
//
// A block owns a query. First it lists the samples that count, with their corners and coefficients. Then its threads
// form slots. A slot has a thread for each pack of VEC channels, and the slots take the samples one after another. A
// thread keeps the sums of its pack for kGroups groups in registers, so that each corner is read once for all of them.
// At the end the slots' sums are added in order, through shared memory: results do not differ from run to run, and each
// output is written once.
#pragma once

#include "cuda/sample/inputs.cuh"

namespace visdet::sample {
namespace {

constexpr int kSumThreads = 256;

template <typename T, typename TO, typename A, int VEC>
__global__ void __launch_bounds__(kSumThreads, sizeof(A) == 4 ? 4 : 2)
    sum_kernel(const T* images, const Pack<A, 2>* __restrict__ samples, const A* __restrict__ coefficients,
               TO* __restrict__ sums, const Sizes sizes) {
  struct Lists {
    CornerRows<A> samples[kSumThreads];
    Pack<A, kGroups> coefficients[kSumThreads];
  };
  __shared__ union Shared {
    Lists lists;
    A planes[kGroups * VEC][kSumThreads];
    __device__ Shared() {}
  } shared;
  allow_next_launch();
  const Query at = Query::of_block(sizes);
  const int64_t b = at.b, q = at.q, query = b * sizes.Q + q;
  const auto* image = reinterpret_cast<const char*>(images + b * sizes.H * sizes.W * sizes.C);
  const uint32_t pixel_bytes = sizes.C * sizeof(T);
  const int packs = (sizes.K + VEC - 1) / VEC, in_slot = min(packs, kSumThreads), slots = kSumThreads / in_slot;
  const int slot = threadIdx.x / in_slot, pack_in_slot = threadIdx.x - slot * in_slot;
  for (int g0 = 0; g0 < sizes.G; g0 += kGroups) {
    for (int p0 = 0; p0 < packs; p0 += in_slot) {
      const int pack = p0 + pack_in_slot;
      const bool works = slot < slots && pack < packs;
      const int c = works ? pack * VEC : 0;
      A sum[kGroups][VEC] = {};
      for (int d0 = 0; d0 < sizes.D; d0 += kSumThreads) {
        const auto mine = load_coefficients(coefficients, b, q, g0, d0 + threadIdx.x, sizes);
        const int count = list_samples<kSumThreads>(
            samples + query * sizes.D, d0, sizes,
            [&](int position, int, A, A, const Bilinear<A>& at) {
              shared.lists.samples[position] = CornerRows<A>::of(at);
              shared.lists.coefficients[position] = mine;
            },
            [](int) {});
        await_previous_launch();  // the copy of the images
        if (works) {
#pragma unroll 1
          for (int i = slot; i < count; i += slots) {
            const CornerRows<A> sample = shared.lists.samples[i];
            A corner[4][VEC], s[VEC];
            load_corners<T, VEC>(image + c * sizeof(T), sample.row, pixel_bytes, corner);
            interpolate(corner, sample.weight, s);
            const Pack<A, kGroups> coefficient = shared.lists.coefficients[i];
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) sum[g][v] += s[v] * coefficient.at[g];
            }
          }
        }
        __syncthreads();  // the lists have been read
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) shared.planes[g * VEC + v][threadIdx.x] = sum[g][v];
      }
      __syncthreads();  // the slots' sums are complete

      // Each slot adds the sums of all slots for some of the groups.
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (!works || g0 + g >= sizes.G || g % slots != slot) continue;
        A total[VEC] = {};
        for (int other = 0; other < slots; ++other) {
#pragma unroll
          for (int v = 0; v < VEC; ++v) total[v] += shared.planes[g * VEC + v][other * in_slot + pack_in_slot];
        }
        store_pack<TO, VEC>(sums + ((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.K + c, total);
      }
      __syncthreads();  // planes may be written again
    }
  }
}

template <typename T, typename A, typename TO>
void launch_sum(const Inputs<T, A>& in, const ImageRun& run, const A* coefficients, TO* sums) {
  const Sizes& sizes = in.sizes;
  if (in.queries() == 0 || sizes.G == 0 || sizes.K == 0) return;
  const int64_t query = run.first * sizes.Q;
  in.with_vec(sums, [&](auto vec) {
    launch({in.op, "sum_kernel", in.scope, run.count * sizes.Q, kSumThreads, 0, 0, run.overlaps},
           sum_kernel<T, TO, A, decltype(vec)::value>, in.image_data(run.first), in.sample_data(query),
           coefficients + query * sizes.G * sizes.D, sums + query * sizes.G * sizes.K, sizes);
  });
}

}  // namespace
}  // namespace visdet::sample
