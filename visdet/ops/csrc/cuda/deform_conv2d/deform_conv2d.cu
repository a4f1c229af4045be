// deform_conv2d on CUDA. The contract is in ../deform_conv2d.h.
//
// Images are read as [B, H, W, C] and columns written as [groups, B * H' * W', KH * KW, C / groups]: the channels of a
// sample lie next to each other, so that reading a corner, writing a column and adding to a pixel are whole lines, and
// a sample's place is computed once for all of its channels. The products, torch's, see all images at once and rows
// that begin at whole packs. What comes as NCHW is copied into that order first, and results are copied back.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <numeric>
#include <optional>
#include <tuple>
#include <type_traits>

#include "common/aten.h"
#include "common/bilinear.h"
#include "common/cuda_utils.cuh"
#include "common/launch.h"
#include "common/paths.h"
#include "deform_conv2d.h"

namespace visdet {
namespace {

constexpr int kThreads = 256;
constexpr int kPlaces = 8;  // of the output, in a tile
constexpr int kTaps = 16;   // whose samples a block keeps at a time

struct Sizes {
  int32_t C, H, W, KW, taps, width, places;
  int32_t groups, per_group;  // channels of a group of the weight
  int32_t G, per_offset;      // channels that share an offset
  int32_t slice, slices;      // channels that share both; such slices of per_offset
  int32_t stride[2], padding[2], dilation[2];
  int32_t images;      // at a time
  int32_t tiles;       // of an image
  int32_t lanes_log2;  // threads that share a sample
};

// A block's part: kPlaces places of the output, for the channels of one group of offsets.
struct Tile {
  int64_t image;
  int32_t g, first;

  __device__ __forceinline__ explicit Tile(const Sizes& z) {
    const unsigned of_image = blockIdx.x / z.tiles;
    first = static_cast<int32_t>(blockIdx.x - of_image * z.tiles) * kPlaces;
    image = of_image / z.G, g = static_cast<int32_t>(of_image % z.G);
  }
  // Among offsets and masks.
  __device__ __forceinline__ int64_t tap(const Sizes& z, int k) const { return (image * z.G + g) * z.taps + k; }
  // The first column of channel c of the input, those of a sample being `row` * per_group further.
  __device__ __forceinline__ int64_t column(const Sizes& z, int c) const {
    const int group = z.groups == 1 ? 0 : c / z.per_group;
    return ((group * static_cast<int64_t>(z.images) + image) * z.places + first) * z.taps * z.per_group + c -
           group * z.per_group;
  }
};

template <typename A>
struct alignas(16) Sample {
  int32_t pixel[4];  // of each corner, -1 outside the map
  A fx, fy, mask;
  int32_t row;  // place in the tile * taps + tap, -1 past the last place

  __device__ __forceinline__ void corner_weights(A (&w)[4]) const {
    w[0] = (1 - fy) * (1 - fx), w[1] = (1 - fy) * fx, w[2] = fy * (1 - fx), w[3] = fy * fx;
  }
};

// All threads of a block: the samples of taps k0 .. k0 + count at the places of its tile, place by place.
template <typename T, typename A>
__device__ __forceinline__ void locate_samples(const T* __restrict__ offsets, const T* __restrict__ masks,
                                               const Tile& tile, int k0, int count, const Sizes& z,
                                               Sample<A>* samples) {
  for (int n = threadIdx.x; n < count * kPlaces; n += kThreads) {
    const int k = k0 + n / kPlaces, p = tile.first + n % kPlaces;
    Bilinear<A> at{};
    Sample<A> sample{};
    sample.row = -1, sample.mask = 1;
    if (p < z.places) {
      const int row = p / z.width, column = p - row * z.width, i = k / z.KW, j = k - i * z.KW;
      const int64_t tap = tile.tap(z, k);
      const T* offset = offsets + 2 * tap * z.places + p;
      const A y = A(row * z.stride[0] - z.padding[0] + i * z.dilation[0]) + to_accumulate(offset[0]);
      const A x = A(column * z.stride[1] - z.padding[1] + j * z.dilation[1]) + to_accumulate(offset[z.places]);
      locate(x, y, z.H, z.W, at);
      if (masks) sample.mask = to_accumulate(masks[tap * z.places + p]);
      sample.row = n % kPlaces * z.taps + k;
    }
#pragma unroll
    for (int corner = 0; corner < 4; ++corner) sample.pixel[corner] = at.is_inside[corner] ? at.index[corner] : -1;
    sample.fx = at.fx, sample.fy = at.fy;
    samples[n % kPlaces * count + n / kPlaces] = sample;
  }
}

// The corners of a sample at VEC channels, zeros outside the map. All four are on their way at once.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void load_corners(const T* __restrict__ image, const Sample<A>& sample, const Sizes& z,
                                             int c, A (&corner)[4][VEC]) {
  Pack<T, VEC> pack[4] = {};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (sample.pixel[n] >= 0) {
      pack[n] = *reinterpret_cast<const Pack<T, VEC>*>(image + static_cast<int64_t>(sample.pixel[n]) * z.C + c);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) unpack(pack[n], corner[n]);
}

// Columns. A block owns a tile: it locates the samples of all taps, then 2^lanes_log2 threads take a slice of a sample,
// each VEC channels at a time, neighbours the next tap, whose columns follow. A pixel is read by every sample around
// it, mostly from L1.
template <typename T, typename A, int VEC>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const T* __restrict__ images, const T* __restrict__ offsets, const T* __restrict__ masks,
                   T* __restrict__ columns, const Sizes z) {
  __shared__ Sample<A> samples[kTaps * kPlaces];
  const Tile tile(z);
  const T* image = images + tile.image * z.H * z.W * z.C;
  const int lanes = 1 << z.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int unit = threadIdx.x >> z.lanes_log2, units = kThreads >> z.lanes_log2;
  for (int k0 = 0; k0 < z.taps; k0 += kTaps) {
    const int count = min(z.taps - k0, kTaps), here = count * kPlaces;
    locate_samples(offsets, masks, tile, k0, count, z, samples);
    __syncthreads();
    for (int u = unit; u < here * z.slices; u += units) {
      const int slice = z.slices == 1 ? 0 : u / here;
      const Sample<A> sample = samples[u - slice * here];
      if (sample.row < 0) continue;
      A weight[4];
      sample.corner_weights(weight);
      const int first = tile.g * z.per_offset + slice * z.slice;
      T* to = columns + tile.column(z, first) + static_cast<int64_t>(sample.row) * z.per_group;
      for (int c = lane * VEC; c < z.slice; c += lanes * VEC) {
        A corner[4][VEC], value[VEC];
        load_corners<T, VEC>(image, sample, z, first + c, corner);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          value[v] = corner[0][v] * weight[0];
#pragma unroll
          for (int n = 1; n < 4; ++n) value[v] += corner[n][v] * weight[n];
          value[v] *= sample.mask;
        }
        store_pack<T, VEC>(to + c, value);
      }
    }
    __syncthreads();  // samples may be written again
  }
}

// What a backward pass writes; null where it is not wanted.
template <typename T, typename A>
struct Gradients {
  A* images;  // zero at first
  T* offsets;
  T* masks;      // with offsets only
  bool columns;  // over their gradient
};

// All gradients from that of the columns. A block owns a tile; 2^lanes_log2 threads take a sample with all of its
// channels, so that what they add lies in whole lines. grad_columns is read once, and where the weight's gradient is
// wanted the columns take its place, written by the thread that read it. Adding to the gradient of the images races, so
// it is atomic. A sample's own gradients are summed over its lanes, then written place by place.
template <typename T, typename A, int VEC>
__global__ void __launch_bounds__(kThreads)
    gradients_kernel(const T* __restrict__ images, const T* __restrict__ offsets, const T* __restrict__ masks,
                     T* grad_columns, const Gradients<T, A> grads, const Sizes z) {
  __shared__ Sample<A> samples[kTaps * kPlaces];
  const Tile tile(z);
  const int64_t pixels = tile.image * z.H * z.W * z.C;
  const T* image = images + pixels;
  const int lanes = 1 << z.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int unit = threadIdx.x >> z.lanes_log2, units = kThreads >> z.lanes_log2;
  const int first = tile.g * z.per_offset, last = first + z.per_offset;
  for (int k0 = 0; k0 < z.taps; k0 += kTaps) {
    const int count = min(z.taps - k0, kTaps), here = count * kPlaces;
    locate_samples(offsets, masks, tile, k0, count, z, samples);
    __syncthreads();
    for (int s0 = 0; s0 < here; s0 += units) {  // whole warps: their lanes are summed
      const int s = s0 + unit;
      A dot[4] = {};  // of the gradient with each corner
      Sample<A> sample{};
      sample.row = -1;
      if (s < here) sample = samples[s];
      const bool works = sample.row >= 0;
      if (works) {
        A weight[4];
        sample.corner_weights(weight);
        for (int c = first + lane * VEC; c < last; c += lanes * VEC) {
          T* column = grad_columns + tile.column(z, c) + static_cast<int64_t>(sample.row) * z.per_group;
          A grad[VEC], corner[4][VEC], value[VEC] = {};
          load_pack<T, VEC>(column, grad);
          load_corners<T, VEC>(image, sample, z, c, corner);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if (sample.pixel[n] < 0) continue;
            const A factor = weight[n] * sample.mask;
            A add[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
              dot[n] += grad[v] * corner[n][v];
              value[v] += corner[n][v] * weight[n];
              add[v] = factor * grad[v];
            }
            if (grads.images && factor != 0) {
              add_pack<VEC>(grads.images + pixels + static_cast<int64_t>(sample.pixel[n]) * z.C + c, add);
            }
          }
          if (grads.columns) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) value[v] *= sample.mask;
            store_pack<T, VEC>(column, value);
          }
        }
      }
      if (!grads.offsets) continue;
      A weight[4];
      sample.corner_weights(weight);
      A of_mask = weight[0] * dot[0] + weight[1] * dot[1] + weight[2] * dot[2] + weight[3] * dot[3];
      A of_y = (1 - sample.fx) * (dot[2] - dot[0]) + sample.fx * (dot[3] - dot[1]);
      A of_x = (1 - sample.fy) * (dot[1] - dot[0]) + sample.fy * (dot[3] - dot[2]);
      of_y = of_y == 0 ? A(0) : of_y * sample.mask;  // outside the map 0, whatever the mask
      of_x = of_x == 0 ? A(0) : of_x * sample.mask;
      for (int step = lanes / 2; step > 0; step /= 2) {
        of_y += __shfl_xor_sync(0xffffffffu, of_y, step);
        of_x += __shfl_xor_sync(0xffffffffu, of_x, step);
        of_mask += __shfl_xor_sync(0xffffffffu, of_mask, step);
      }
      __syncwarp();  // the sample was read by all of its lanes
      if (lane == 0 && works) samples[s].fx = of_x, samples[s].fy = of_y, samples[s].mask = of_mask;
    }
    __syncthreads();
    for (int n = threadIdx.x; grads.offsets && n < here; n += kThreads) {
      const int p = tile.first + n % kPlaces;
      if (p >= z.places) continue;
      const Sample<A>& sums = samples[n % kPlaces * count + n / kPlaces];
      const int64_t tap = tile.tap(z, k0 + n / kPlaces);
      T* to = grads.offsets + 2 * tap * z.places + p;
      to[0] = from_accumulate<T>(sums.fy), to[z.places] = from_accumulate<T>(sums.fx);
      if (grads.masks) grads.masks[tap * z.places + p] = from_accumulate<T>(sums.mask);
    }
    __syncthreads();  // samples may be written again
  }
}

constexpr int kSide = 64;

// Threads in turn take the elements (row, column) of a matrix that fits into a square, row by row; rows past the last
// are none.
template <typename F>
__device__ __forceinline__ void for_elements(int columns, const F& f) {
  int row = threadIdx.x / columns, column = threadIdx.x - row * columns;
  const int down = kThreads / columns, across = kThreads - down * columns;
#pragma unroll
  for (int turn = 0; turn < kSide * kSide / kThreads; ++turn) {
    f(turn, row, column);
    row += down, column += across;
    if (column >= columns) column -= columns, ++row;
  }
}

// Matrices [rows, columns], of which there are [outer, inner], to [inner, outer] of [columns, rows], converted. A block
// owns a square of kSide x kSide numbers.
template <typename From, typename To, typename A>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const From* __restrict__ from, To* __restrict__ to, int rows, int columns, int outer, int inner) {
  __shared__ To square[kSide][kSide + 1];
  const int across = (columns + kSide - 1) / kSide, down = (rows + kSide - 1) / kSide;
  const int matrix = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
  const int row0 = tile / across * kSide, column0 = tile % across * kSide;
  const int height = min(rows - row0, kSide), width = min(columns - column0, kSide);
  const int64_t numbers = static_cast<int64_t>(rows) * columns;
  from += matrix * numbers + static_cast<int64_t>(row0) * columns + column0;
  From value[kSide * kSide / kThreads];
  for_elements(width, [&](int turn, int row, int column) {  // without a branch: all are on their way at once
    value[turn] = from[row < height ? static_cast<int64_t>(row) * columns + column : 0];
  });
  for_elements(width, [&](int turn, int row, int column) {
    if (row < height) square[row][column] = from_accumulate<To>(A(to_accumulate(value[turn])));
  });
  __syncthreads();
  to += (matrix % inner * outer + matrix / inner) * numbers + static_cast<int64_t>(column0) * rows + row0;
  for_elements(height, [&](int, int row, int column) {
    if (row < width) to[static_cast<int64_t>(row) * rows + column] = square[column][row];
  });
}

template <typename A>
__global__ void __launch_bounds__(kThreads)
    add_kernel(A* __restrict__ sums, const A* __restrict__ terms, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) sums[i] += terms[i];
}

// What kernels compute in int32.
void check_sizes(const char* op, const DeformConvProblem& p) {
  VISDET_CHECK(op, p.C <= 1 << 23, "input must have at most 2^23 channels on CUDA, got ", p.C);
  VISDET_CHECK(op, p.M <= 1 << 30, "weight must have at most 2^30 output channels on CUDA, got ", p.M);
}

// Neighbouring channels that share a group of the weight and an offset.
int64_t slice_of(const DeformConvProblem& p) { return std::gcd(p.C / p.groups, p.C / p.G); }

// Channels that a thread takes at a time if it can: in columns by one load, in gradients by one addition. float64 has
// no loads of packs.
template <typename T>
constexpr int kPack = sizeof(T) == 8 ? 1 : 16 / sizeof(T);
template <typename A>
constexpr int kSums = sizeof(A) == 8 ? 1 : 4;

// One convolution: its sizes, its device, and each step of a pass over `count` images from `first` on.
template <typename T, typename A>
class Convolution {
 public:
  Convolution(const char* op, const DeformConvProblem& problem, const DeviceScope& scope, const Tensor& input,
              const Tensor& offset, const std::optional<Tensor>& mask, const Tensor& weight)
      : op_(op),
        p_(problem),
        scope_(scope),
        is_channels_last_(is_channels_last(input) && aligned(input, 16)),
        input_(is_channels_last_ ? input : dense(input)),
        offset_(dense(offset)),
        mask_(mask ? std::optional<Tensor>(dense(*mask)) : std::nullopt),
        sizes_(sizes_of(problem)),
        weight_(new_matrices(p_.M / p_.groups, row())) {
    const Tensor from = dense(weight);
    transpose(data<T>(from), mutable_data<T>(weight_), sizes_.per_group, sizes_.taps, p_.M);
  }

  // Equal parts of the batch, with at most kBytes of columns, whose tiles a launch can have.
  int64_t images_at_once() const {
    constexpr int64_t kBytes = int64_t{256} << 20;  // more gains under 2 % at any number of images
    const int64_t of_columns = kBytes / static_cast<int64_t>(sizeof(T)) / (p_.groups * row()) / p_.places();
    const int64_t of_tiles = INT32_MAX / (p_.G * sizes_.tiles);
    const int64_t most = std::max<int64_t>(1, std::min({p_.step, p_.B, of_columns, of_tiles}));
    return ceil_div(p_.B, ceil_div(p_.B, most));
  }

  // [count, H, W, C]
  Tensor images(int64_t first, int64_t count) {
    if (is_channels_last_) return narrow(input_, 0, first, count);
    Tensor out = new_empty(input_, {count, p_.H, p_.W, p_.C});
    const int64_t map = p_.H * p_.W;
    transpose(data<T>(input_) + first * p_.C * map, mutable_data<T>(out), p_.C, map, count);
    return out;
  }

  // [groups, count * H' * W', KH * KW * C / groups]; by packs of kPack<T> channels, or by one channel at a time.
  Tensor columns(const Tensor& images, int64_t first, int64_t count, bool by_packs) const {
    Tensor out = new_matrices(count * p_.places(), row());
    const Sizes sizes = sizes_for(count, by_packs ? kPack<T> : 1, sizes_.slice);
    launch({op_, "columns_kernel", scope_, tiles_of(count), kThreads},
           by_packs ? columns_kernel<T, A, kPack<T>> : columns_kernel<T, A, 1>, data<T>(images), offsets(first),
           masks(first), mutable_data<T>(out), sizes);
    return out;
  }

  // Writes the product of columns and weight to images `first` .. `first` + `count` of the output [B, M, H', W'].
  void multiply(const Tensor& columns, Tensor& output, int64_t first, int64_t count) const {
    Tensor product = new_matrices(count * p_.places(), p_.M / p_.groups);
    multiply(columns, torch::stable::transpose(weight_, -2, -1), product);
    transpose(data<T>(product), mutable_data<T>(output) + first * p_.M * p_.places(), p_.places(), p_.M / p_.groups,
              p_.groups, count);
  }

  // The gradient of that product, [groups, count * H' * W', M / groups].
  Tensor grad_products(const Tensor& grad_output, int64_t first, int64_t count) const {
    Tensor out = new_matrices(count * p_.places(), p_.M / p_.groups);
    transpose(data<T>(grad_output) + first * p_.M * p_.places(), mutable_data<T>(out), p_.M / p_.groups, p_.places(),
              count, p_.groups);
    return out;
  }

  Tensor grad_columns(const Tensor& grad_products, int64_t count) const {
    Tensor out = new_matrices(count * p_.places(), row());
    multiply(grad_products, weight_, out);
    return out;
  }

  // Turns the gradient of columns into columns if `writes_columns`. By packs of kSums<A> channels, or one at a time.
  void gradients(const Tensor& images, Tensor& grad_columns, int64_t first, int64_t count, Tensor* grad_images,
                 Tensor* grad_offset, Tensor* grad_mask, bool writes_columns, bool by_packs) const {
    Gradients<T, A> grads{};
    if (grad_images) grads.images = mutable_data<A>(*grad_images);
    if (grad_offset) grads.offsets = mutable_data<T>(*grad_offset) + first * of_offsets();
    if (grad_mask) grads.masks = mutable_data<T>(*grad_mask) + first * of_offsets() / 2;
    grads.columns = writes_columns;
    const Sizes sizes = sizes_for(count, by_packs ? kSums<A> : 1, sizes_.per_offset);
    launch({op_, "gradients_kernel", scope_, tiles_of(count), kThreads},
           by_packs ? gradients_kernel<T, A, kSums<A>> : gradients_kernel<T, A, 1>, data<T>(images), offsets(first),
           masks(first), mutable_data<T>(grad_columns), grads, sizes);
  }

  // Writes [count, H, W, C] to images `first` .. `first` + `count` of the gradient [B, C, H, W].
  void grad_input(const Tensor& grad_images, Tensor& grad_input, int64_t first, int64_t count) const {
    const int64_t map = p_.H * p_.W;
    transpose(data<A>(grad_images), mutable_data<T>(grad_input) + first * p_.C * map, map, p_.C, count);
  }

  // Adds the gradient of the weight, [groups, M / groups, KH * KW * C / groups] in A, to `sums`, which it makes at
  // first.
  void add_grad_weight(const Tensor& grad_products, const Tensor& columns, std::optional<Tensor>& sums) const {
    const Tensor product = multiply_wide(torch::stable::transpose(grad_products, -2, -1), columns);
    if (!sums) {
      sums = product;
      return;
    }
    const int64_t numbers = product.numel();
    launch({op_, "add_kernel", scope_, ceil_div(numbers, kThreads), kThreads}, add_kernel<A>, mutable_data<A>(*sums),
           data<A>(product), numbers);
  }

  void grad_weight(const Tensor& sums, Tensor& grad_weight) const {
    transpose(data<A>(sums), mutable_data<T>(grad_weight), sizes_.taps, sizes_.per_group, p_.M);
  }

 private:
  template <typename V>
  static const V* data(const Tensor& tensor) {
    return static_cast<const V*>(tensor.const_data_ptr());
  }
  template <typename V>
  static V* mutable_data(const Tensor& tensor) {
    return static_cast<V*>(tensor.mutable_data_ptr());
  }

  static Sizes sizes_of(const DeformConvProblem& p) {
    Sizes z{};
    z.C = static_cast<int>(p.C), z.H = static_cast<int>(p.H), z.W = static_cast<int>(p.W);
    z.KW = static_cast<int>(p.KW), z.taps = static_cast<int>(p.taps());
    z.width = static_cast<int>(p.width), z.places = static_cast<int>(p.places());
    z.groups = static_cast<int>(p.groups), z.per_group = static_cast<int>(p.C / p.groups);
    z.G = static_cast<int>(p.G), z.per_offset = static_cast<int>(p.C / p.G);
    z.slice = static_cast<int>(slice_of(p)), z.slices = z.per_offset / z.slice;
    for (int d = 0; d < 2; ++d) {
      z.stride[d] = static_cast<int>(p.stride[d]), z.padding[d] = static_cast<int>(p.padding[d]);
      z.dilation[d] = static_cast<int>(p.dilation[d]);
    }
    z.tiles = static_cast<int>(ceil_div(p.places(), kPlaces));
    return z;
  }

  int64_t row() const { return static_cast<int64_t>(sizes_.taps) * sizes_.per_group; }
  int64_t of_offsets() const { return p_.G * p_.taps() * 2 * p_.places(); }
  const T* offsets(int64_t first) const { return data<T>(offset_) + first * of_offsets(); }
  const T* masks(int64_t first) const { return mask_ ? data<T>(*mask_) + first * of_offsets() / 2 : nullptr; }

  int64_t tiles_of(int64_t count) const { return count * p_.G * sizes_.tiles; }

  // For `count` images, where threads that take `vec` channels at a time share `channels`.
  Sizes sizes_for(int64_t count, int vec, int channels) const {
    Sizes sizes = sizes_;
    sizes.images = static_cast<int>(count);
    while (sizes.lanes_log2 < 5 && vec << sizes.lanes_log2 < channels) ++sizes.lanes_log2;
    return sizes;
  }

  // [outer, inner] matrices [rows, columns] to [inner, outer] of [columns, rows].
  template <typename From, typename To>
  void transpose(const From* from, To* to, int64_t rows, int64_t columns, int64_t outer, int64_t inner = 1) const {
    launch(
        {op_, "transpose_kernel", scope_, outer * inner * ceil_div(rows, kSide) * ceil_div(columns, kSide), kThreads},
        transpose_kernel<From, To, A>, from, to, static_cast<int>(rows), static_cast<int>(columns),
        static_cast<int>(outer), static_cast<int>(inner));
  }

  // A matrix of each group. A single one has no dimension of groups: torch then splits long sums.
  Tensor new_matrices(int64_t rows, int64_t columns) const {
    return p_.groups == 1 ? new_empty(input_, {rows, columns}) : new_empty(input_, {p_.groups, rows, columns});
  }
  void multiply(const Tensor& left, const Tensor& right, const Tensor& to) const {
    call(p_.groups == 1 ? "aten::mm" : "aten::bmm", "out", left, right, to);
  }
  // In float32 where the operands are of 16 bits.
  Tensor multiply_wide(const Tensor& left, const Tensor& right) const {
    const char* name = p_.groups == 1 ? "aten::mm" : "aten::bmm";
    if constexpr (std::is_same_v<T, A>) return call(name, "", left, right);
    return call(name, "dtype", left, right, ScalarType::Float);
  }

  const char* op_;
  const DeformConvProblem& p_;
  const DeviceScope& scope_;
  bool is_channels_last_;
  Tensor input_, offset_;
  std::optional<Tensor> mask_;
  Sizes sizes_;
  Tensor weight_;  // [groups, M / groups, KH * KW * C / groups]
};

// A call of either operator, none of whose tensors is empty.
struct Call {
  const char* op;
  const DeformConvProblem& problem;
  const DeviceScope& scope;
  const Tensor &input, &offset;
  const std::optional<Tensor>& mask;
  const Tensor& weight;
  Tensor* output;  // of the forward

  // Of the backward. A gradient that is not wanted is empty.
  const Tensor* grad_output;
  Tensor *grad_input, *grad_offset, *grad_mask, *grad_weight;
  bool needs_input, needs_offset, needs_weight;

  // Calls part(convolution, first, count) for each part of the batch, then finish(convolution).
  template <typename Part, typename Finish>
  void for_parts(const Part& part, const Finish& finish) const {
    dispatch_value_type(input.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
      Convolution<decltype(value_tag), decltype(accumulate_tag)> run(op, problem, scope, input, offset, mask, weight);
      const int64_t step = run.images_at_once();
      for (int64_t first = 0; first < problem.B; first += step) part(run, first, std::min(step, problem.B - first));
      finish(run);
    });
  }
};

const char* packs_decline(const Call& call, int64_t channels) {
  if (call.input.element_size() == 8) return "the values are float64";
  return slice_of(call.problem) % channels == 0 ? nullptr
                                                : "channels that share a weight and an offset do not fill packs";
}
const char* column_packs_decline(const Call& call) {
  return packs_decline(call, 16 / static_cast<int64_t>(call.input.element_size()));
}
const char* gradient_packs_decline(const Call& call) { return packs_decline(call, kSums<float>); }

template <bool BY_PACKS>
void convolve(const Call& call) {
  call.for_parts(
      [&](auto& run, int64_t first, int64_t count) {
        run.multiply(run.columns(run.images(first, count), first, count, BY_PACKS), *call.output, first, count);
      },
      [](auto&) {});
}

const char* weight_only_declines(const Call& call) {
  return call.needs_input || call.needs_offset ? "the gradient of input or of offset is wanted" : nullptr;
}
void differentiate_weight_only(const Call& call) {
  const bool by_packs = column_packs_decline(call) == nullptr;
  std::optional<Tensor> sums;
  call.for_parts(
      [&](auto& run, int64_t first, int64_t count) {
        const Tensor images = run.images(first, count), products = run.grad_products(*call.grad_output, first, count);
        run.add_grad_weight(products, run.columns(images, first, count, by_packs), sums);
      },
      [&](auto& run) { run.grad_weight(*sums, *call.grad_weight); });
}

template <bool BY_PACKS>
void differentiate(const Call& call) {
  const DeformConvProblem& p = call.problem;
  std::optional<Tensor> sums;
  call.for_parts(
      [&](auto& run, int64_t first, int64_t count) {
        const Tensor images = run.images(first, count), products = run.grad_products(*call.grad_output, first, count);
        Tensor columns = run.grad_columns(products, count);
        std::optional<Tensor> pixels;
        if (call.needs_input) {
          pixels = new_empty(call.input, {count, p.H, p.W, p.C}, accumulate_dtype(call.input.scalar_type()));
          zero_(*pixels);
        }
        run.gradients(images, columns, first, count, pixels ? &*pixels : nullptr,
                      call.needs_offset ? call.grad_offset : nullptr,
                      call.needs_offset && call.mask ? call.grad_mask : nullptr, call.needs_weight, BY_PACKS);
        if (call.needs_input) run.grad_input(*pixels, *call.grad_input, first, count);
        if (call.needs_weight) run.add_grad_weight(products, columns, sums);
      },
      [&](auto& run) {
        if (call.needs_weight) run.grad_weight(*sums, *call.grad_weight);
      });
}

constexpr Path<Call> kForwardPaths[] = {
    {"packs", column_packs_decline, convolve<true>},
    {"values", nullptr, convolve<false>},
};
constexpr Path<Call> kBackwardPaths[] = {
    {"weight_only", weight_only_declines, differentiate_weight_only},
    {"packs", gradient_packs_decline, differentiate<true>},
    {"values", nullptr, differentiate<false>},
};

using Ints = std::vector<int64_t>;

Tensor deform_conv2d(const Tensor& input, const Tensor& offset, const std::optional<Tensor>& mask, const Tensor& weight,
                     const Ints& stride, const Ints& padding, const Ints& dilation, int64_t deform_groups,
                     int64_t im2col_step) {
  constexpr const char* op = "deform_conv2d";
  const auto p = check_deform_conv(op, input, offset, mask ? &*mask : nullptr, weight, stride, padding, dilation,
                                   deform_groups, im2col_step);
  check_sizes(op, p);
  const DeviceScope scope(input);
  Tensor output = new_empty(input, {p.B, p.M, p.height, p.width});
  if (output.numel() == 0 || input.numel() == 0) return zero_(output);
  run_first(op, kForwardPaths, Call{op, p, scope, input, offset, mask, weight, &output});
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> deform_conv2d_backward(
    const Tensor& grad_output_in, const Tensor& input, const Tensor& offset, const std::optional<Tensor>& mask,
    const Tensor& weight, const Ints& stride, const Ints& padding, const Ints& dilation, int64_t deform_groups,
    int64_t im2col_step, bool needs_input, bool needs_offset, bool needs_weight) {
  constexpr const char* op = "deform_conv2d_backward";
  const auto p = check_deform_conv(op, input, offset, mask ? &*mask : nullptr, weight, stride, padding, dilation,
                                   deform_groups, im2col_step);
  check_deform_tensor(op, "grad_output", grad_output_in, input, {p.B, p.M, p.height, p.width});
  check_sizes(op, p);
  const DeviceScope scope(input);
  const auto gradient_of = [&](const Tensor& tensor, bool needs) {
    return needs ? new_empty(tensor, tensor.sizes()) : new_empty(tensor, {0});
  };
  Tensor grad_input = gradient_of(input, needs_input), grad_offset = gradient_of(offset, needs_offset);
  Tensor grad_mask = gradient_of(mask ? *mask : offset, needs_offset && mask);
  Tensor grad_weight = gradient_of(weight, needs_weight);
  if (grad_output_in.numel() == 0 || input.numel() == 0) {
    return {zero_(grad_input), zero_(grad_offset), zero_(grad_mask), zero_(grad_weight)};
  }
  const Tensor grad_output = dense(grad_output_in);
  if (needs_input || needs_offset || needs_weight) {
    run_first(op, kBackwardPaths,
              Call{op, p, scope, input, offset, mask, weight, nullptr, &grad_output, &grad_input, &grad_offset,
                   &grad_mask, &grad_weight, needs_input, needs_offset, needs_weight});
  }
  return {grad_input, grad_offset, grad_mask, grad_weight};
}

}  // namespace
}  // namespace visdet

VISDET_CUDA_OPERATORS(m) {
  m.impl("deform_conv2d", TORCH_BOX(&visdet::deform_conv2d));
  m.impl("deform_conv2d_backward", TORCH_BOX(&visdet::deform_conv2d_backward));
}
