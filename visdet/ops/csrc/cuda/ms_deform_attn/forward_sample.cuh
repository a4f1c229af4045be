// How a forward kernel prepares a sample for the threads that sum it, and how they do.
//
// In every forward kernel a few threads own a row, the output of one (b, q, g). Each of its samples is prepared by one
// of them: position, texels and weight become 16 bytes of shared memory. Then all threads of the row read these bytes,
// and each adds its own channels of the sample's four texels.
#pragma once

#include "common/values.cuh"
#include "cuda/ms_deform_attn/levels.cuh"
#include "cuda/ms_deform_attn/sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

// Where every level has a multiple of kRun samples of a row, each kRun samples in succession, a run, lie on one level.
// Kernels then look levels up by run.
constexpr int kRun = 4;

// A prepared sample. It reads a square of four texels that all lie in the map: `texel`, its right neighbour, and the
// two below them (see Steps). So no thread checks a border. Where only a part of the sample falls inside the map, the
// fractions point at the texels inside, and the weight is that part of the sample's own.
template <typename A>
struct alignas(16) Sample {
  A top, bottom;   // the weights of the upper and of the lower pair of texels; they add up to the sample's weight
  A fx;            // the fraction of a pair's weight that its right texel has
  uint32_t texel;  // the row of value that holds the upper left texel; in encoder_kernel, its offset in bytes
};

// How far a texel's right and lower neighbours are, in rows of value; in encoder_kernel, in bytes. On a level with only
// one column or row the step is 0.
struct Steps {
  uint32_t column, row;
  __device__ __forceinline__ static Steps of(const Level& level) {
    return {level.W > 1 ? 1u : 0u, level.H > 1 ? static_cast<uint32_t>(level.W) : 0u};
  }
};

// Returns where the samples of group i begin in shared memory, where each group has `bytes` of them. The gaps let a
// store of neighbouring samples, and a load of one sample of each group, use different banks.
__host__ __device__ constexpr int samples_offset(int bytes, int i) {
  return bytes >= 128 ? i * (bytes + 16) : i / 2 * (2 * bytes + 16) + i % 2 * bytes;
}

// points: the number of samples that the row has on this level. A sample that does not exist gets the weight 0.
template <typename A, typename Source>
__device__ __forceinline__ Sample<A> make_sample(const Source& source, const typename Source::Raw& raw,
                                                 const typename Source::Row& row, const Level& level, int points,
                                                 bool exists) {
  A x, y, fy, inside_x, inside_y;
  source.position(raw, level, points, x, y);
  Sample<A> sample;
  const int32_t first_x = first_texel(x, level.W, sample.fx, inside_x);
  const int32_t first_y = first_texel(y, level.H, fy, inside_y);
  const A inside = inside_x * inside_y;
  A weight = inside > A(0) ? source.weight(raw, row) * inside : A(0);
  if (level.H == 0) weight = quiet_nan<A>();
  if (!exists) weight = 0;
  sample.texel = level.start + first_y * level.W + first_x;
  sample.bottom = weight * fy, sample.top = fma(-weight, fy, weight);
  return sample;
}

// The weights of a sample's texels: upper left, upper right, lower left, lower right.
template <typename A>
struct CornerWeights {
  A at[4];
  __device__ __forceinline__ explicit CornerWeights(const Sample<A>& sample)
      : at{fma(-sample.top, sample.fx, sample.top), sample.top * sample.fx,
           fma(-sample.bottom, sample.fx, sample.bottom), sample.bottom * sample.fx} {}
};

template <typename T, int VEC, typename A>
__device__ __forceinline__ void add_texel(const char* from, A weight, A (&sum)[VEC]) {
  A texel[VEC];
  load_pack<T, VEC>(from, texel);
#pragma unroll
  for (int v = 0; v < VEC; ++v) sum[v] += texel[v] * weight;
}
// Adds VEC channels of the sample, whose texels lie at these addresses.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void add_sample(const Sample<A>& sample, const char* const (&corner)[4], A (&sum)[VEC]) {
  const CornerWeights<A> weights(sample);
#pragma unroll
  for (int j = 0; j < 4; ++j) add_texel<T>(corner[j], weights.at[j], sum);
}
// Adds VEC channels of the sample, whose texels have been loaded.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void add_texels(const Sample<A>& sample, const Pack<T, VEC> (&texels)[4], A (&sum)[VEC]) {
  const CornerWeights<A> weights(sample);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    A texel[VEC];
    unpack(texels[j], texel);
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] += texel[v] * weights.at[j];
  }
}

}  // namespace
}  // namespace visdet::ms_deform_attn
