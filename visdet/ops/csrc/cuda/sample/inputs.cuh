// What the three passes of sample_sum and sample_dot read, and how images are copied while the passes run.
#pragma once

#include "cuda/sample/nhwc_copy.cuh"

namespace visdet::sample {
namespace {

// The query that a block of the sum or dots pass owns. Blocks take the queries from the last to the first, because the
// image that was copied last is still in the second-level cache.
struct Query {
  uint32_t b, q;

  static __device__ __forceinline__ Query of_block(const Sizes& sizes) {
    const uint32_t i = gridDim.x - 1 - blockIdx.x, Q = static_cast<uint32_t>(sizes.Q);
    return {i / Q, i % Q};
  }
};

// A run of images of a call, whose queries one launch serves. overlaps: whether it may overlap the launch before it.
struct ImageRun {
  int64_t first, count;
  bool overlaps;
};

// What every pass reads. T: of images; A: of everything else, and of sums.
template <typename T, typename A>
struct Inputs {
  using Value = T;
  using Sum = A;

  const char* op;
  const DeviceScope& scope;
  Sizes sizes;
  const Images<T>& images;
  const Tensor& samples;

  int64_t queries() const { return sizes.B * sizes.Q; }
  // From query `query` of all images on.
  const Pack<A, 2>* sample_data(int64_t query = 0) const { return data_of<Pack<A, 2>>(samples) + query * sizes.D; }
  const T* image_data(int64_t image) const { return images.data + image * sizes.H * sizes.W * sizes.C; }

  ImageRun all() const { return {0, sizes.B, false}; }

  void copy_all() const {
    if (images.is_copy) images.start_copy(op, scope, sizes, 0, sizes.B, false);
  }
  // Calls f(run) for the runs of images that are copied together, each after the launch of its copy. f() launches one
  // kernel, which awaits the copy if there are samples.
  template <typename F>
  void copy_by_runs(const F& f) const {
    if (queries() == 0 || sizes.G == 0) return;
    if (!images.is_copy) return f(all());
    const bool overlaps = scope.device().capability >= kOverlapCapability && sizes.D > 0;
    const int64_t image_bytes = int64_t{sizes.H} * sizes.W * sizes.C * sizeof(T);
    const int64_t count = images_at_once(scope.device(), sizes.B, image_bytes);
    for (int64_t first = 0; first < sizes.B; first += count) {
      const ImageRun run{first, std::min(count, sizes.B - first), overlaps};
      images.start_copy(op, scope, sizes, run.first, run.count, overlaps && first > 0);
      f(run);
    }
  }

  // Calls f(VEC), where VEC is the number of channels that a thread loads by one instruction. It is kPackChannels if
  // the images and the tensor `other`, whose rows have K channels, both begin and divide such that this is possible.
  // Otherwise it is 1. readable() has made it possible for all images of 16 bits.
  template <typename F>
  void with_vec(const void* other, const F& f) const {
    constexpr bool kIs16Bit = sizeof(T) == 2;
    if constexpr (sizeof(A) == 4) {
      const bool packed = has_packs(sizes.C, sizes.K) && aligned(images.data, 16) && aligned(other, 16);
      if (kIs16Bit || packed) return f(std::integral_constant<int, kPackChannels>{});
    }
    if constexpr (!kIs16Bit) f(std::integral_constant<int, 1>{});
  }
};

}  // namespace
}  // namespace visdet::sample
