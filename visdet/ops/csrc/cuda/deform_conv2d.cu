// deform_conv2d on CUDA. The contract is in ../deform_conv2d.h.
//
// Images are read as [B, H, W, C] and columns written as [B, groups, H' * W', KH * KW, C / groups]: the channels of a
// sample lie next to each other, so that reading a corner, writing a column and adding to a pixel are whole lines, and
// a sample's place is computed once for all of its channels. NCHW images and weights are first copied into that order.
// The products are torch's.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <tuple>

#include "../common/bilinear.h"
#include "../common/cuda_utils.cuh"
#include "../deform_conv2d.h"

namespace visdet {
namespace {

constexpr int kThreads = 256;
constexpr int kPlaces = 8;  // of the output, in a tile
constexpr int kTaps = 16;   // whose samples a block keeps at a time

struct Sizes {
  int32_t C, H, W, KW, taps, width, places;
  int32_t groups, per_group;  // channels of a group of the weight
  int32_t G, per_offset;      // channels that share an offset
  int32_t stride[2], padding[2], dilation[2];
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
  __device__ __forceinline__ int64_t tap(const Sizes& z, int k) const { return (image * z.G + g) * z.taps + k; }
};

template <typename A>
struct alignas(16) Sample {
  int32_t pixel[4];  // of each corner, -1 outside the map
  A fx, fy, mask;

  __device__ __forceinline__ void corner_weights(A (&w)[4]) const {
    w[0] = (1 - fy) * (1 - fx), w[1] = (1 - fy) * fx, w[2] = fy * (1 - fx), w[3] = fy * fx;
  }
};

// All threads of a block: the samples of taps k0 .. k0 + count at the places of its tile, tap by tap.
template <typename T, typename A>
__device__ __forceinline__ void locate_samples(const T* __restrict__ offsets, const T* __restrict__ masks,
                                               const Tile& tile, int k0, int count, const Sizes& z,
                                               Sample<A>* samples) {
  for (int s = threadIdx.x; s < count * kPlaces; s += kThreads) {
    const int k = k0 + s / kPlaces, p = tile.first + s % kPlaces;
    Bilinear<A> at{};
    A mask = 1;
    if (p < z.places) {
      const int row = p / z.width, column = p - row * z.width, i = k / z.KW, j = k - i * z.KW;
      const int64_t tap = tile.tap(z, k);
      const T* offset = offsets + 2 * tap * z.places + p;
      const A y = A(row * z.stride[0] - z.padding[0] + i * z.dilation[0]) + to_accumulate(offset[0]);
      const A x = A(column * z.stride[1] - z.padding[1] + j * z.dilation[1]) + to_accumulate(offset[z.places]);
      locate(x, y, z.H, z.W, at);
      if (masks) mask = to_accumulate(masks[tap * z.places + p]);
    }
    Sample<A> sample;
#pragma unroll
    for (int corner = 0; corner < 4; ++corner) sample.pixel[corner] = at.is_inside[corner] ? at.index[corner] : -1;
    sample.fx = at.fx, sample.fy = at.fy, sample.mask = mask;
    samples[s] = sample;
  }
}

// Where channel c of tap k at place p lies among the columns.
__device__ __forceinline__ int64_t column_of(const Sizes& z, int64_t image, int p, int k, int c) {
  const int group = z.groups == 1 ? 0 : c / z.per_group;
  return (((image * z.groups + group) * z.places + p) * z.taps + k) * z.per_group + (c - group * z.per_group);
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

// Columns. A block owns a tile: it locates the samples of all taps, then 2^lanes_log2 threads take a sample, each
// VEC channels at a time. A pixel is read by every sample around it, mostly from L1.
template <typename T, typename A, int VEC>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const T* __restrict__ images, const T* __restrict__ offsets, const T* __restrict__ masks,
                   T* __restrict__ columns, const Sizes z) {
  __shared__ Sample<A> samples[kTaps * kPlaces];
  const Tile tile(z);
  const T* image = images + tile.image * z.H * z.W * z.C;
  const int lanes = 1 << z.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int unit = threadIdx.x >> z.lanes_log2, units = kThreads >> z.lanes_log2;
  const int first = tile.g * z.per_offset, last = first + z.per_offset;
  for (int k0 = 0; k0 < z.taps; k0 += kTaps) {
    const int count = min(z.taps - k0, kTaps);
    locate_samples(offsets, masks, tile, k0, count, z, samples);
    __syncthreads();
    for (int s = unit; s < count * kPlaces; s += units) {
      const int k = k0 + s / kPlaces, p = tile.first + s % kPlaces;
      if (p >= z.places) continue;
      const Sample<A> sample = samples[s];
      A weight[4];
      sample.corner_weights(weight);
      for (int c = first + lane * VEC; c < last; c += lanes * VEC) {
        A corner[4][VEC], value[VEC];
        load_corners<T, VEC>(image, sample, z, c, corner);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          value[v] = corner[0][v] * weight[0];
#pragma unroll
          for (int n = 1; n < 4; ++n) value[v] += corner[n][v] * weight[n];
          value[v] *= sample.mask;
        }
        store_pack<T, VEC>(columns + column_of(z, tile.image, p, k, c), value);
      }
    }
    __syncthreads();  // samples may be written again
  }
}

// to[i] += from[i], by reductions at the second-level cache.
template <int VEC, typename A>
__device__ __forceinline__ void add_pack(A* to, const A (&from)[VEC]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kFours = VEC % 4 == 0 && sizeof(A) == 4;
#else
  constexpr bool kFours = false;
#endif
  if constexpr (kFours) {
#pragma unroll
    for (int v = 0; v < VEC; v += 4) {
      atomicAdd(reinterpret_cast<float4*>(to + v), make_float4(from[v], from[v + 1], from[v + 2], from[v + 3]));
    }
  } else {
#pragma unroll
    for (int v = 0; v < VEC; ++v) atomicAdd(to + v, from[v]);
  }
}

// What a backward pass computes besides the gradients of offsets and masks; null where it is not wanted.
template <typename T, typename A>
struct Gradients {
  A* images;
  T* offsets;
  T* masks;
  bool columns;  // write the columns over their gradient
};

// All gradients from that of the columns, work divided as for the columns. grad_columns is read once, and where the
// weight's gradient is wanted the columns take its place, written by the thread that read it. Adding to the gradient of
// the images races, so it is atomic. A sample's own gradients are summed over its lanes, then written place by place.
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
    const int count = min(z.taps - k0, kTaps);
    locate_samples(offsets, masks, tile, k0, count, z, samples);
    __syncthreads();
    for (int s0 = 0; s0 < count * kPlaces; s0 += units) {  // whole warps: their lanes are summed
      const int s = s0 + unit, k = k0 + s / kPlaces, p = tile.first + s % kPlaces;
      const bool works = s < count * kPlaces && p < z.places;
      A dot[4] = {};  // of the gradient with each corner
      Sample<A> sample{};
      if (works) {
        sample = samples[s];
        A weight[4];
        sample.corner_weights(weight);
        for (int c = first + lane * VEC; c < last; c += lanes * VEC) {
          T* column = grad_columns + column_of(z, tile.image, p, k, c);
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
      A of_y = sample.mask * ((1 - sample.fx) * (dot[2] - dot[0]) + sample.fx * (dot[3] - dot[1]));
      A of_x = sample.mask * ((1 - sample.fy) * (dot[1] - dot[0]) + sample.fy * (dot[3] - dot[2]));
      for (int step = lanes / 2; step > 0; step /= 2) {
        of_y += __shfl_xor_sync(0xffffffffu, of_y, step);
        of_x += __shfl_xor_sync(0xffffffffu, of_x, step);
        of_mask += __shfl_xor_sync(0xffffffffu, of_mask, step);
      }
      __syncwarp();  // the sample was read by all of its lanes
      if (lane == 0 && works) samples[s].fx = of_x, samples[s].fy = of_y, samples[s].mask = of_mask;
    }
    __syncthreads();
    for (int s = threadIdx.x; grads.offsets && s < count * kPlaces; s += kThreads) {
      const int p = tile.first + s % kPlaces;
      if (p >= z.places) continue;
      const int64_t tap = tile.tap(z, k0 + s / kPlaces);
      T* to = grads.offsets + 2 * tap * z.places + p;
      to[0] = from_accumulate<T>(samples[s].fy), to[z.places] = from_accumulate<T>(samples[s].fx);
      if (grads.masks) grads.masks[tap * z.places + p] = from_accumulate<T>(samples[s].mask);
    }
    __syncthreads();  // samples may be written again
  }
}

// [count, rows, columns] to [count, columns, rows], converted. A block owns a square of kSide x kSide numbers.
constexpr int kSide = 32;

template <typename From, typename To, typename A>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const From* __restrict__ from, To* __restrict__ to, int rows, int columns) {
  __shared__ To square[kSide][kSide + 1];
  const int across = (columns + kSide - 1) / kSide, down = (rows + kSide - 1) / kSide;
  const int64_t matrix = blockIdx.x / (across * down) * (static_cast<int64_t>(rows) * columns);
  const int tile = blockIdx.x % (across * down), row0 = tile / across * kSide, column0 = tile % across * kSide;
  const int lane = threadIdx.x % kSide, warp = threadIdx.x / kSide;
#pragma unroll
  for (int i = warp; i < kSide; i += kThreads / kSide) {
    if (row0 + i < rows && column0 + lane < columns) {
      const int64_t at = matrix + static_cast<int64_t>(row0 + i) * columns + column0 + lane;
      square[i][lane] = from_accumulate<To>(A(to_accumulate(from[at])));
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = warp; i < kSide; i += kThreads / kSide) {
    if (column0 + i < columns && row0 + lane < rows) {
      to[matrix + static_cast<int64_t>(column0 + i) * rows + row0 + lane] = square[lane][i];
    }
  }
}

template <typename A>
__global__ void __launch_bounds__(kThreads)
    add_kernel(A* __restrict__ sums, const A* __restrict__ terms, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) sums[i] += terms[i];
}

// The operator `name` of torch.
template <typename... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Products of matrices [N, m, k] and [N, k, n] into `to`. A single one goes another way, which may split k.
void multiply(const Tensor& left, const Tensor& right, Tensor to) {
  if (left.size(0) == 1) {
    call("aten::mm", "out", select(left, 0, 0), select(right, 0, 0), select(to, 0, 0));
  } else {
    call("aten::bmm", "out", left, right, to);
  }
}

// One convolution: its sizes, its stream, and each step of a pass over `count` images from `first` on.
template <typename T, typename A>
class Convolution {
 public:
  Convolution(const char* op, const DeformConvProblem& problem, const Tensor& input, const Tensor& offset,
              const std::optional<Tensor>& mask, const Tensor& weight)
      : op_(op),
        p_(problem),
        is_channels_last_(is_channels_last(input) && aligned(input, 16)),
        input_(is_channels_last_ ? input : contiguous(input)),
        offset_(contiguous(offset)),
        mask_(mask ? std::optional<Tensor>(contiguous(*mask)) : std::nullopt),
        stream_(current_stream(input)),
        sizes_(sizes_of(problem)) {
    // [groups, M / groups, KH * KW * C / groups]
    weight_ = new_empty(input, {p_.groups, p_.M / p_.groups, row()});
    transpose<T, T>(contiguous(weight), weight_.mutable_data_ptr(), p_.M, sizes_.per_group, sizes_.taps);
  }

  int64_t images_at_once() const {
    constexpr int64_t kBytes = int64_t{256} << 20;  // of columns
    const int64_t bytes = p_.groups * p_.places() * row() * static_cast<int64_t>(sizeof(T));
    return std::max<int64_t>(1, std::min({p_.step, p_.B, kBytes / bytes}));
  }

  int64_t row() const { return static_cast<int64_t>(sizes_.taps) * sizes_.per_group; }

  // [count * groups, M / groups, KH * KW * C / groups]
  Tensor weights(int64_t count) const {
    const Tensor repeated = call("aten::expand", "", unsqueeze(weight_, 0),
                                 std::vector<int64_t>{count, p_.groups, p_.M / p_.groups, row()}, false);
    return reshape(repeated, {count * p_.groups, p_.M / p_.groups, row()});
  }

  // The part of an output, or of its gradient, as [count * groups, M / groups, H' * W'].
  Tensor outputs(Tensor output, int64_t first, int64_t count) const {
    return view(narrow(output, 0, first, count), {count * p_.groups, p_.M / p_.groups, p_.places()});
  }

  // [count, H, W, C]
  Tensor images(int64_t first, int64_t count) {
    Tensor part = narrow(input_, 0, first, count);
    if (is_channels_last_) return part;
    Tensor out = new_empty(input_, {count, p_.H, p_.W, p_.C});
    transpose<T, T>(part, out.mutable_data_ptr(), count, p_.C, p_.H * p_.W);
    return out;
  }

  // [count * groups, H' * W', KH * KW * C / groups]
  Tensor columns(const Tensor& images, int64_t first, int64_t count) {
    Tensor out = new_empty(input_, {count * p_.groups, p_.places(), row()});
    launch<16 / sizeof(T)>(count, [&](auto vec, const dim3& grid, const Sizes& sizes) {
      columns_kernel<T, A, decltype(vec)::value>
          <<<grid, kThreads, 0, stream_>>>(static_cast<const T*>(images.const_data_ptr()), offsets(first), masks(first),
                                           static_cast<T*>(out.mutable_data_ptr()), sizes);
    });
    return out;
  }

  // Turns the gradient of columns into columns if `writes_columns`.
  void gradients(const Tensor& images, Tensor& grad_columns, int64_t first, int64_t count, Tensor* grad_images,
                 Tensor* grad_offset, Tensor* grad_mask, bool writes_columns) {
    Gradients<T, A> grads{};
    if (grad_images) grads.images = static_cast<A*>(grad_images->mutable_data_ptr());
    if (grad_offset) grads.offsets = static_cast<T*>(grad_offset->mutable_data_ptr()) + first * of_offsets();
    if (grad_mask) grads.masks = static_cast<T*>(grad_mask->mutable_data_ptr()) + first * of_offsets() / 2;
    grads.columns = writes_columns;
    launch<16 / sizeof(A)>(count,  // an addition of 16 bytes
                           [&](auto vec, const dim3& grid, const Sizes& sizes) {
                             gradients_kernel<T, A, decltype(vec)::value><<<grid, kThreads, 0, stream_>>>(
                                 static_cast<const T*>(images.const_data_ptr()), offsets(first), masks(first),
                                 static_cast<T*>(grad_columns.mutable_data_ptr()), grads, sizes);
                           });
  }

  // Adds the products of `grads` [count * groups, M / groups, H' * W'] and columns to `sums`, which it makes at first.
  void add_weight_gradient(const Tensor& grads, const Tensor& columns, int64_t count, std::optional<Tensor>& sums) {
    Tensor product = p_.groups == 1 ? product_over_images(grads, columns, count)
                                    : sum_over_images(multiply_wide("aten::bmm", grads, columns), count);
    if (!sums) {
      sums = product;
      return;
    }
    const int64_t numbers = product.numel();
    add_kernel<A><<<static_cast<unsigned>(ceil_div(numbers, kThreads)), kThreads, 0, stream_>>>(
        static_cast<A*>(sums->mutable_data_ptr()), static_cast<const A*>(product.const_data_ptr()), numbers);
    check_launch(op_);
  }

  // `count` matrices, each [rows, columns], to [columns, rows].
  template <typename From, typename To>
  void transpose(const Tensor& from, void* to, int64_t count, int64_t rows, int64_t columns) const {
    const int64_t blocks = count * ceil_div(rows, kSide) * ceil_div(columns, kSide);
    check_blocks(blocks);
    transpose_kernel<From, To, A><<<static_cast<unsigned>(blocks), kThreads, 0, stream_>>>(
        static_cast<const From*>(from.const_data_ptr()), static_cast<To*>(to), static_cast<int>(rows),
        static_cast<int>(columns));
    check_launch(op_);
  }

 private:
  static bool is_channels_last(const Tensor& images) {
    int64_t expected = 1;
    for (const int d : {1, 3, 2, 0}) {
      if (images.size(d) != 1 && images.stride(d) != expected) return false;
      expected *= images.size(d);
    }
    return true;
  }

  static Sizes sizes_of(const DeformConvProblem& p) {
    Sizes z{};
    z.C = static_cast<int>(p.C), z.H = static_cast<int>(p.H), z.W = static_cast<int>(p.W);
    z.KW = static_cast<int>(p.KW), z.taps = static_cast<int>(p.taps());
    z.width = static_cast<int>(p.width), z.places = static_cast<int>(p.places());
    z.groups = static_cast<int>(p.groups), z.per_group = static_cast<int>(p.C / p.groups);
    z.G = static_cast<int>(p.G), z.per_offset = static_cast<int>(p.C / p.G);
    for (int d = 0; d < 2; ++d) {
      z.stride[d] = static_cast<int>(p.stride[d]), z.padding[d] = static_cast<int>(p.padding[d]);
      z.dilation[d] = static_cast<int>(p.dilation[d]);
    }
    z.tiles = static_cast<int>(ceil_div(p.places(), kPlaces));
    return z;
  }

  void check_blocks(int64_t blocks) const {
    VISDET_CHECK(op_, blocks <= INT32_MAX, "the tensors are too large for one launch; lower im2col_step");
  }

  int64_t of_offsets() const { return p_.G * p_.taps() * 2 * p_.places(); }
  const T* offsets(int64_t first) const {
    return static_cast<const T*>(offset_.const_data_ptr()) + first * of_offsets();
  }
  const T* masks(int64_t first) const {
    return mask_ ? static_cast<const T*>(mask_->const_data_ptr()) + first * of_offsets() / 2 : nullptr;
  }

  // run(channels of a thread, grid, sizes): VEC of them where neither kind of group ends within.
  template <int VEC, typename F>
  void launch(int64_t count, const F& run) const {
    const bool packs = sizes_.per_group % VEC == 0 && sizes_.per_offset % VEC == 0;
    Sizes sizes = sizes_;
    while (sizes.lanes_log2 < 5 && (packs ? VEC : 1) << sizes.lanes_log2 < sizes.per_offset) ++sizes.lanes_log2;
    const int64_t blocks = count * p_.G * sizes.tiles;
    check_blocks(blocks);
    const dim3 grid(static_cast<unsigned>(blocks));
    if (packs) {
      run(std::integral_constant<int, VEC>{}, grid, sizes);
    } else {
      run(std::integral_constant<int, 1>{}, grid, sizes);
    }
    check_launch(op_);
  }

  // In float32 where the operands are of 16 bits.
  static Tensor multiply_wide(const char* name, const Tensor& left, const Tensor& right) {
    if constexpr (std::is_same_v<T, A>) return call(name, "", left, right);
    return call(name, "dtype", left, right, ScalarType::Float);
  }
  Tensor product_over_images(const Tensor& grads, const Tensor& columns, int64_t count) const {
    const Tensor rows = reshape(torch::stable::transpose(grads, 0, 1), {p_.M, count * p_.places()});
    return multiply_wide("aten::mm", rows, view(columns, {count * p_.places(), row()}));
  }
  Tensor sum_over_images(const Tensor& products, int64_t count) const {
    const int64_t dims[] = {0};
    return sum(view(products, {count, p_.M * row()}), torch::headeronly::IntHeaderOnlyArrayRef(dims, 1));
  }

  const char* op_;
  const DeformConvProblem& p_;
  bool is_channels_last_;
  Tensor input_, offset_;
  std::optional<Tensor> mask_;
  cudaStream_t stream_;
  Sizes sizes_;
  Tensor weight_;
};

using Ints = std::vector<int64_t>;

Tensor deform_conv2d(const Tensor& input, const Tensor& offset, const std::optional<Tensor>& mask, const Tensor& weight,
                     const Ints& stride, const Ints& padding, const Ints& dilation, int64_t deform_groups,
                     int64_t im2col_step) {
  constexpr const char* op = "deform_conv2d";
  const auto p = check_deform_conv(op, input, offset, mask ? &*mask : nullptr, weight, stride, padding, dilation,
                                   deform_groups, im2col_step);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  Tensor output = new_empty(input, {p.B, p.M, p.height, p.width});
  if (output.numel() == 0 || input.numel() == 0) return zero_(output);
  dispatch_value_type(input.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    Convolution<decltype(value_tag), decltype(accumulate_tag)> run(op, p, input, offset, mask, weight);
    const int64_t step = run.images_at_once();
    for (int64_t first = 0; first < p.B; first += step) {
      const int64_t count = std::min(step, p.B - first);
      const Tensor columns = run.columns(run.images(first, count), first, count);
      multiply(run.weights(count), transpose(columns, 1, 2), run.outputs(output, first, count));
    }
  });
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
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const auto gradient_of = [&](const Tensor& tensor, bool needs) {
    return needs ? new_empty(tensor, tensor.sizes()) : new_empty(tensor, {0});
  };
  Tensor grad_input = gradient_of(input, needs_input), grad_offset = gradient_of(offset, needs_offset);
  Tensor grad_mask = gradient_of(mask ? *mask : offset, needs_offset && mask);
  Tensor grad_weight = gradient_of(weight, needs_weight);
  if (grad_output_in.numel() == 0 || input.numel() == 0) {
    return {zero_(grad_input), zero_(grad_offset), zero_(grad_mask), zero_(grad_weight)};
  }
  const Tensor grad_output = call("aten::detach", "", contiguous(grad_output_in));  // torch's products record nothing
  dispatch_value_type(input.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    Convolution<T, A> run(op, p, input, offset, mask, weight);
    const int64_t step = run.images_at_once(), map = p.H * p.W;
    std::optional<Tensor> sums;
    for (int64_t first = 0; first < p.B; first += step) {
      const int64_t count = std::min(step, p.B - first);
      const Tensor grads = run.outputs(grad_output, first, count), images = run.images(first, count);
      if (!needs_input && !needs_offset) {
        run.add_weight_gradient(grads, run.columns(images, first, count), count, sums);
        continue;
      }
      Tensor columns = new_empty(input, {count * p.groups, p.places(), run.row()});
      multiply(transpose(grads, 1, 2), run.weights(count), columns);
      std::optional<Tensor> pixels;
      if (needs_input) {
        pixels = new_empty(input, {count, p.H, p.W, p.C}, accumulate_dtype(input.scalar_type()));
        zero_(*pixels);
      }
      run.gradients(images, columns, first, count, pixels ? &*pixels : nullptr, needs_offset ? &grad_offset : nullptr,
                    needs_offset && mask ? &grad_mask : nullptr, needs_weight);
      if (needs_input) {
        T* to = static_cast<T*>(grad_input.mutable_data_ptr()) + first * p.C * map;
        run.template transpose<A, T>(*pixels, to, count, map, p.C);
      }
      if (needs_weight) run.add_weight_gradient(grads, columns, count, sums);
    }
    if (needs_weight) {
      run.template transpose<A, T>(*sums, grad_weight.mutable_data_ptr(), p.M, p.taps(), p.C / p.groups);
    }
  });
  return {grad_input, grad_offset, grad_mask, grad_weight};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CUDA, m) {
  m.impl("deform_conv2d", TORCH_BOX(&visdet::deform_conv2d));
  m.impl("deform_conv2d_backward", TORCH_BOX(&visdet::deform_conv2d_backward));
}
