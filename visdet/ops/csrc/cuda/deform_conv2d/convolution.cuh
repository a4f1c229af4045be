// One convolution as a sequence of steps: images with their channels innermost, columns, products with the weight, and
// the gradients of each. The products, which are torch's, see all images of a part of the batch at once and rows that
// begin at whole packs. What comes as [B, C, H, W] is copied to [B, H, W, C] first, and results are copied back.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <type_traits>

#include "common/aten.h"
#include "common/launch.h"
#include "cuda/deform_conv2d/columns.cuh"
#include "cuda/deform_conv2d/gradients.cuh"
#include "cuda/deform_conv2d/matrices.cuh"
#include "deform_conv2d.h"

namespace visdet::deform_conv2d {
namespace {

// How many neighbouring channels have a group of the weight and an offset in common.
int64_t slice_of(const DeformConvProblem& p) { return std::gcd(p.C / p.groups, p.C / p.G); }

// Channels of a pack: of columns 16 bytes, which a thread moves by one load, of gradients four sums, which it adds by
// one atomic. float64 has no packs.
template <typename T>
constexpr int kPack = sizeof(T) == 8 ? 1 : kVectorValues<T>;
template <typename A>
constexpr int kSums = sizeof(A) == 8 ? 1 : 4;

// The gradient of columns in a pass over numbers of T. float16 ends at 65504, which a sum over output channels may pass
// although what becomes of it fits; torch then writes it in float32.
template <typename T>
using ColumnGradient = std::conditional_t<std::is_same_v<T, __half>, float, T>;

// One convolution: its sizes, its device, and each step of a pass over `count` images from `first` on.
template <typename T, typename A>
class Convolution {
 public:
  Convolution(const char* op, const DeformConvProblem& problem, const DeviceScope& scope, const Tensor& input,
              const Tensor& offset, const std::optional<Tensor>& mask, const Tensor& weight)
      : op_(op),
        p_(problem),
        scope_(scope),
        is_channels_last_(is_channels_last(input) && aligned(input, kVectorBytes)),
        input_(is_channels_last_ ? input : dense(input)),
        offset_(dense(offset)),
        mask_(mask ? std::optional<Tensor>(dense(*mask)) : std::nullopt),
        sizes_(sizes_of(problem)),
        weight_(new_matrices(p_.M / p_.groups, row())) {
    const Tensor from = dense(weight);
    transpose(data_of<T>(from), mutable_data_of<T>(weight_), sizes_.per_group, sizes_.taps, p_.M);
  }

  // Equal parts of the batch, with at most kBytes of columns, whose tiles a launch can have.
  int64_t images_at_once() const {
    constexpr int64_t kBytes = int64_t{256} << 20;  // more gains under 2 % at any number of images
    const int64_t of_columns =
        kBytes / static_cast<int64_t>(sizeof(ColumnGradient<T>)) / (p_.groups * row()) / p_.positions();
    const int64_t of_tiles = INT32_MAX / (p_.G * sizes_.tiles);
    const int64_t most = std::max<int64_t>(1, std::min({p_.step, p_.B, of_columns, of_tiles}));
    return ceil_div(p_.B, ceil_div(p_.B, most));
  }

  // [count, H, W, C]
  Tensor images(int64_t first, int64_t count) {
    if (is_channels_last_) return narrow(input_, 0, first, count);
    Tensor out = new_empty(input_, {count, p_.H, p_.W, p_.C});
    const int64_t map = p_.H * p_.W;
    transpose(data_of<T>(input_) + first * p_.C * map, mutable_data_of<T>(out), p_.C, map, count);
    return out;
  }

  // [groups, count * H' * W', KH * KW * C / groups]; by packs of kPack<T> channels, or by one channel at a time.
  Tensor columns(const Tensor& images, int64_t first, int64_t count, bool by_packs) const {
    Tensor out = new_matrices(count * p_.positions(), row());
    const Sizes sizes = sizes_for(count, by_packs ? kPack<T> : 1, sizes_.slice);
    launch({op_, "columns_kernel", scope_, tiles_of(count), kThreads},
           by_packs ? columns_kernel<T, A, kPack<T>> : columns_kernel<T, A, 1>, data_of(images), offsets(first),
           masks(first), data_of(out), sizes);
    return out;
  }

  // Writes the product of columns and weight to images `first` .. `first` + `count` of the output [B, M, H', W'].
  void multiply(const Tensor& columns, Tensor& output, int64_t first, int64_t count) const {
    Tensor product = new_matrices(count * p_.positions(), p_.M / p_.groups);
    multiply(columns, torch::stable::transpose(weight_, -2, -1), product);
    transpose(data_of<T>(product), mutable_data_of<T>(output) + first * p_.M * p_.positions(), p_.positions(),
              p_.M / p_.groups, p_.groups, count);
  }

  // The gradient of that product, [groups, count * H' * W', M / groups].
  Tensor grad_products(const Tensor& grad_output, int64_t first, int64_t count) const {
    Tensor out = new_matrices(count * p_.positions(), p_.M / p_.groups);
    transpose(data_of<T>(grad_output) + first * p_.M * p_.positions(), mutable_data_of<T>(out), p_.M / p_.groups,
              p_.positions(), count, p_.groups);
    return out;
  }

  // [groups, count * H' * W', KH * KW * C / groups] of ColumnGradient<T>
  Tensor grad_columns(const Tensor& grad_products, int64_t count) const {
    if constexpr (!std::is_same_v<ColumnGradient<T>, T>) return multiply_in_float32(grad_products, weight_);
    Tensor out = new_matrices(count * p_.positions(), row());
    multiply(grad_products, weight_, out);
    return out;
  }

  // Where the columns are written that the gradient of the weight needs: over their gradient, if that has their type.
  Tensor columns_beside(const Tensor& grad_columns, int64_t count) const {
    if constexpr (std::is_same_v<ColumnGradient<T>, T>) return grad_columns;
    return new_matrices(count * p_.positions(), row());
  }

  // Reads the gradient of columns and writes the columns unless that is null. By packs of kSums<A> channels, or one at
  // a time.
  void gradients(const Tensor& images, const Tensor& grad_columns, int64_t first, int64_t count, Tensor* grad_images,
                 Tensor* grad_offset, Tensor* grad_mask, Tensor* columns, bool by_packs) const {
    using G = ColumnGradient<T>;
    Gradients<T, A> grads{};
    grads.images = data_of(grad_images);
    if (grad_offset) grads.offsets = mutable_data_of<T>(*grad_offset) + first * of_offsets();
    if (grad_mask) grads.masks = mutable_data_of<T>(*grad_mask) + first * of_offsets() / 2;
    grads.columns = data_of(columns);
    const Sizes sizes = sizes_for(count, by_packs ? kSums<A> : 1, sizes_.per_offset);
    launch({op_, "gradients_kernel", scope_, tiles_of(count), kThreads},
           by_packs ? gradients_kernel<T, G, A, kSums<A>> : gradients_kernel<T, G, A, 1>, data_of(images),
           offsets(first), masks(first), data_of(grad_columns), grads, sizes);
  }

  // Writes [count, H, W, C] to images `first` .. `first` + `count` of the gradient [B, C, H, W].
  void grad_input(const Tensor& grad_images, Tensor& grad_input, int64_t first, int64_t count) const {
    const int64_t map = p_.H * p_.W;
    transpose(data_of<A>(grad_images), mutable_data_of<T>(grad_input) + first * p_.C * map, map, p_.C, count);
  }

  // Adds the gradient of the weight, [groups, M / groups, KH * KW * C / groups] in A, to `sums`, which it makes at
  // first.
  void add_grad_weight(const Tensor& grad_products, const Tensor& columns, std::optional<Tensor>& sums) const {
    const Tensor product = multiply_in_float32(torch::stable::transpose(grad_products, -2, -1), columns);
    if (!sums) {
      sums = product;
      return;
    }
    const int64_t numbers = product.numel();
    launch({op_, "add_kernel", scope_, ceil_div(numbers, kThreads), kThreads}, add_kernel<A>, data_of(*sums),
           data_of(product), numbers);
  }

  void grad_weight(const Tensor& sums, Tensor& grad_weight) const {
    transpose(data_of<A>(sums), mutable_data_of<T>(grad_weight), sizes_.taps, sizes_.per_group, p_.M);
  }

 private:
  static Sizes sizes_of(const DeformConvProblem& p) {
    Sizes z{};
    z.C = static_cast<int>(p.C), z.H = static_cast<int>(p.H), z.W = static_cast<int>(p.W);
    z.KW = static_cast<int>(p.KW), z.taps = static_cast<int>(p.taps());
    z.width = static_cast<int>(p.width), z.positions = static_cast<int>(p.positions());
    z.groups = static_cast<int>(p.groups), z.per_group = static_cast<int>(p.C / p.groups);
    z.G = static_cast<int>(p.G), z.per_offset = static_cast<int>(p.C / p.G);
    z.slice = static_cast<int>(slice_of(p)), z.slices = z.per_offset / z.slice;
    for (int d = 0; d < 2; ++d) {
      z.stride[d] = static_cast<int>(p.stride[d]), z.padding[d] = static_cast<int>(p.padding[d]);
      z.dilation[d] = static_cast<int>(p.dilation[d]);
    }
    z.tiles = static_cast<int>(ceil_div(p.positions(), kPositions));
    return z;
  }

  int64_t row() const { return static_cast<int64_t>(sizes_.taps) * sizes_.per_group; }
  int64_t of_offsets() const { return p_.G * p_.taps() * 2 * p_.positions(); }
  const T* offsets(int64_t first) const { return data_of<T>(offset_) + first * of_offsets(); }
  const T* masks(int64_t first) const { return mask_ ? data_of<T>(*mask_) + first * of_offsets() / 2 : nullptr; }

  int64_t tiles_of(int64_t count) const { return count * p_.G * sizes_.tiles; }

  // The sizes of a pass over `count` images in which a sample has `channels` and a thread works on `vec` at a time.
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
  // Written into a tensor, a product takes no part in autocast, which would round it.
  void multiply(const Tensor& a, const Tensor& b, const Tensor& to) const {
    call(p_.groups == 1 ? "aten::mm" : "aten::bmm", "out", a, b, to);
  }
  // The product in float32 where a and b are of 16 bits.
  Tensor multiply_in_float32(const Tensor& a, const Tensor& b) const {
    if constexpr (std::is_same_v<T, A>) {
      const Tensor to = new_matrices(a.size(a.dim() - 2), b.size(b.dim() - 1));
      multiply(a, b, to);
      return to;
    } else {
      return call(p_.groups == 1 ? "aten::mm" : "aten::bmm", "dtype", a, b, ScalarType::Float);
    }
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

}  // namespace
}  // namespace visdet::deform_conv2d
