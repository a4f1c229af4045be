// deform_conv2d: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "deform_conv2d.h"

#include "cpu/deform_conv2d/arrays.h"
#include "cpu/dispatch.h"

namespace visdet::deform_conv2d {
namespace {

using torch::stable::parallel_for;

constexpr int64_t kTileNumbers = int64_t{1} << 17;   // of columns, that a task makes at a time
constexpr int64_t kChunkNumbers = int64_t{1} << 22;  // of columns, that a backward holds at a time
constexpr int64_t kMaxTile = 8;                      // blocks of a task
constexpr int64_t kPixels = 256;                     // of a task that copies images

// Calls run(b, first, last) for parts of the pixels of every image.
template <typename F>
void for_pixels(int64_t B, int64_t map, const F& run) {
  const int64_t parts = ceil_of(map, kPixels);
  parallel_each(B * parts, 1, [&](int64_t task) {
    const int64_t first = task % parts * kPixels;
    run(task / parts, first, std::min(first + kPixels, map));
  });
}

// A call has its arrays here, and the memory of those that it makes.
template <typename T, typename A>
class Convolution {
 public:
  static constexpr int64_t L = kLine<A>, P = kPanel<A>;

  Convolution(const DeformConvProblem& p, const Tensor& input, const Tensor& offset, const std::optional<Tensor>& mask)
      : B_(p.B), offset_(dense(offset)), mask_(mask ? std::optional<Tensor>(dense(*mask)) : std::nullopt) {
    a.C = p.C, a.H = p.H, a.W = p.W, a.M = p.M, a.KW = p.KW, a.taps = p.taps();
    a.width = p.width, a.positions = p.positions(), a.groups = p.groups, a.G = p.G;
    for (int d = 0; d < 2; ++d) {
      a.stride[d] = p.stride[d], a.padding[d] = p.padding[d], a.dilation[d] = p.dilation[d];
    }
    a.per_group = p.C / p.groups, a.per_offset = p.C / p.G, a.per_output = p.M / p.groups;
    a.lines = ceil_of(a.per_offset, L), a.blocks = ceil_of(a.positions, kRows);
    a.offset = data_of(offset_);
    a.mask = data_of(mask_);
    zeros_.assign(static_cast<size_t>(a.lines * L), A(0));
    a.zeros = zeros_.data();
    set_term_offsets();
    set_images(input);
  }

  // Returns how many blocks a task takes at a time. No result depends on it.
  int64_t tile() const {
    const int64_t fair = B_ * a.blocks / (2 * static_cast<int64_t>(torch::stable::get_num_threads()));
    return std::max<int64_t>(1, std::min({kTileNumbers / a.block(), kMaxTile, fair}));
  }

  void forward(const Tensor& weight, Tensor& output) {
    const Scratch<A> matrix = pack_weight<false>(weight);
    a.weight = matrix.data(), a.output = data_of(output);
    const int64_t tile = this->tile(), parts = ceil_of(a.blocks, tile);
    const auto run = best_kernels<DeformConvKernels<T, A>>().forward_tile;
    parallel_for(0, B_ * parts, 1, [&](int64_t begin, int64_t end) {
      const Scratch<A> scratch(a.forward_scratch(tile));
      const Scratch<DeformSample<A>> samples(a.block_samples());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task % parts * tile;
        run(a, scratch.data(), samples.data(), task / parts, first, std::min(tile, a.blocks - first));
      }
    });
  }

  // A gradient that is not wanted is null.
  void backward(const Tensor& grad_output, const Tensor& weight, Tensor* grad_input, Tensor* grad_offset,
                Tensor* grad_mask, Tensor* grad_weight) {
    const int64_t all = B_ * a.blocks, chunk = std::min(all, std::max<int64_t>(1, kChunkNumbers / a.block()));
    const bool needs_columns = grad_weight != nullptr, needs_grads = grad_input || grad_offset;
    const Scratch<A> matrix = needs_grads ? pack_weight<true>(weight) : Scratch<A>(0);
    const Scratch<A> grad_columns(needs_grads ? chunk * a.block() : 0);
    const Scratch<A> columns(needs_columns ? chunk * a.block() : 0);
    const Scratch<A> products(needs_columns ? a.groups * a.tiles() * chunk * kRows * kRows : 0);
    const Scratch<DeformSample<A>> samples(chunk * a.block_samples());
    const int64_t pixels = grad_input ? B_ * a.H * a.W * a.pixel() : 0;
    const Scratch<A> grad_images(pixels);
    a.transposed = matrix.data(), a.grad_output = data_of(grad_output), a.samples = samples.data();
    a.grad_columns = needs_grads ? grad_columns.data() : nullptr;
    a.columns = needs_columns ? columns.data() : nullptr, a.grad_products = products.data();
    a.grad_offset = data_of(grad_offset);
    a.grad_mask = data_of(grad_mask);
    if (needs_columns) set_lines();
    const int64_t weights = needs_columns ? a.groups * a.pairs * a.tiles() * kTile<A> : 0;
    const Scratch<A> sums(weights);
    a.grad_images = grad_images.data(), a.grad_weight = sums.data();
    std::fill_n(a.grad_weight, weights, A(0));
    parallel_for(0, pixels, 1 << 16,
                 [&](int64_t begin, int64_t end) { std::fill(a.grad_images + begin, a.grad_images + end, A(0)); });
    for (a.first = 0; a.first < all; a.first += chunk) {
      a.count = std::min(chunk, all - a.first);
      make_gradients();
      if (grad_input) add_to_images();
      if (grad_weight) add_to_sums();
    }
    if (grad_input) {
      a.grad_input = data_of(*grad_input);
      const auto run = best_kernels<DeformConvKernels<T, A>>().copy_grad_image;
      for_pixels(B_, a.H * a.W, [&](int64_t b, int64_t first, int64_t last) { run(a, b, first, last); });
    }
    if (grad_weight) unpack_grad_weight(data_of(*grad_weight));
  }

 private:
  void set_term_offsets() {
    term_offsets_.reserve(static_cast<size_t>(a.groups * a.terms()));
    for (int64_t group = 0; group < a.groups; ++group) {
      for (int64_t k = 0; k < a.taps; ++k) {
        for (int64_t i = 0; i < a.per_group; ++i) {
          const int64_t c = group * a.per_group + i, g = c / a.per_offset, of_offset = c % a.per_offset;
          term_offsets_.push_back(((k * a.G + g) * a.lines + of_offset / L) * kRows * L + of_offset % L);
        }
      }
    }
    a.term_offset = term_offsets_.data();
    for (int64_t t = 0; t < a.terms(); ++t) in_kernel_.push_back(t % a.per_group * a.taps + t / a.per_group);
  }

  void set_images(const Tensor& input) {
    if (std::is_same<T, A>::value && !a.is_padded() && is_channels_last(input)) {
      input_ = input;
      a.images = data_of(*input_);
      return;
    }
    input_ = dense(input);
    a.input = data_of(*input_);
    copy_.emplace(B_ * a.H * a.W * a.pixel());
    const auto run = best_kernels<DeformConvKernels<T, A>>().copy_image;
    for_pixels(B_, a.H * a.W, [&](int64_t b, int64_t first, int64_t last) { run(a, copy_->data(), b, first, last); });
    a.images = copy_->data();
  }

  // Returns the weight as [groups, panels of `columns`, rows, P], zeros past the last column: the columns are output
  // channels and the rows terms or, TRANSPOSED, the other way round.
  template <bool TRANSPOSED>
  Scratch<A> pack_weight(const Tensor& weight) const {
    const Tensor from = dense(weight);
    const T* kernels = data_of(from);
    const int64_t terms = a.terms(), columns = TRANSPOSED ? terms : a.per_output,
                  rows = TRANSPOSED ? a.per_output : terms, panels = ceil_of(columns, P);
    Scratch<A> matrix(a.groups * panels * rows * P);
    parallel_each(a.groups * panels, 1, [&](int64_t task) {
      const int64_t first = task % panels * P, here = std::min(P, columns - first);
      const T* kernel = kernels + task / panels * a.per_output * terms;
      A* to = matrix.data() + task * rows * P;
      for (int64_t row = 0; row < rows; ++row, to += P) {
        for (int64_t j = 0; j < here; ++j) {
          const int64_t m = TRANSPOSED ? row : first + j, t = TRANSPOSED ? first + j : row;
          to[j] = to_accumulate(kernel[m * terms + in_kernel_[static_cast<size_t>(t)]]);
        }
        std::fill(to + here, to + P, A(0));
      }
    });
    return matrix;
  }

  // Lists, for each group, the lines of a block that hold its channels, in pairs. All groups have as many pairs as the
  // one with most.
  void set_lines() {
    std::vector<std::vector<int64_t>> lines(static_cast<size_t>(a.groups));
    for (int64_t group = 0; group < a.groups; ++group) {
      auto& mine = lines[static_cast<size_t>(group)];
      for (int64_t t = 0; t < a.terms(); ++t) {
        const int64_t line = a.term_offset[group * a.terms() + t] / (kRows * L);
        if (mine.empty() || mine.back() != line) mine.push_back(line);
        slot_.push_back(static_cast<int64_t>(mine.size()) - 1);
      }
      a.pairs = std::max(a.pairs, ceil_of(static_cast<int64_t>(mine.size()), 2));
    }
    for (auto& mine : lines) {
      mine.resize(static_cast<size_t>(2 * a.pairs), mine.back());
      line_pair_.insert(line_pair_.end(), mine.begin(), mine.end());
    }
    a.line_pair = line_pair_.data();
  }

  void make_gradients() {
    const int64_t tile = std::min(this->tile(), a.count);
    const auto run = best_kernels<DeformConvKernels<T, A>>().backward_tile;
    parallel_each<A>(ceil_of(a.count, tile), 1, a.backward_scratch(tile), [&](A* scratch, int64_t task) {
      run(a, scratch, task * tile, std::min(tile, a.count - task * tile));
    });
  }

  // A task takes some lines of channels and a band of rows of an image; the fewer the lines, the more bands.
  void add_to_images() {
    const int64_t b0 = a.first / a.blocks, images = (a.first + a.count - 1) / a.blocks - b0 + 1;
    const int64_t slices = ceil_of(a.lines, kAtOnce), parts = images * a.G * slices;
    const int64_t wanted = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
    const int64_t bands = std::min(a.H, ceil_of(wanted, parts));
    const auto run = best_kernels<DeformConvKernels<T, A>>().add_to_pixels;
    parallel_each(parts * bands, 1, [&](int64_t task) {
      const int64_t band = task % bands, slice = task / bands % slices, g = task / (bands * slices) % a.G;
      const int64_t b = b0 + task / (bands * slices * a.G);
      const int64_t t0 = std::max<int64_t>(0, b * a.blocks - a.first);
      const int64_t t1 = std::min(a.count, (b + 1) * a.blocks - a.first);
      run(a, b, t0, t1, g, slice * kAtOnce, std::min((slice + 1) * kAtOnce, a.lines), a.H * band / bands * a.W,
          a.H * (band + 1) / bands * a.W);
    });
  }

  void add_to_sums() {
    const auto run = best_kernels<DeformConvKernels<T, A>>().add_to_weight;
    parallel_each(a.groups * a.pairs, 1, [&](int64_t task) { run(a, task / a.pairs, task % a.pairs); });
  }

  void unpack_grad_weight(T* to) const {
    const int64_t terms = a.terms(), tiles = a.tiles();
    parallel_each(a.M, 1, [&](int64_t m) {
      const int64_t group = m / a.per_output, tile = m % a.per_output / kRows, row = m % a.per_output % kRows;
      for (int64_t t = 0; t < terms; ++t) {
        const int64_t slot = slot_[static_cast<size_t>(group * terms + t)], lane = a.term_offset[group * terms + t] % L;
        const A* from = a.grad_weight + ((group * a.pairs + slot / 2) * tiles + tile) * kTile<A>;
        from_accumulate(from[(slot % 2 * kRows + row) * L + lane], to[m * terms + in_kernel_[static_cast<size_t>(t)]]);
      }
    });
  }

  DeformConvArrays<T, A> a{};
  int64_t B_;
  std::optional<Tensor> input_;
  Tensor offset_;
  std::optional<Tensor> mask_;
  std::optional<Scratch<A>> copy_;
  std::vector<A> zeros_;
  std::vector<int64_t> term_offsets_, line_pair_;
  std::vector<int64_t> in_kernel_;  // [terms] where a term, [tap, channel], lies in a kernel, [channel, tap]
  std::vector<int64_t> slot_;       // [groups, terms] the line of each term among those of its group
};

}  // namespace

void compute(const OnDevice&, const Arguments& given, Tensor& output) {
  dispatch_value_type(output.scalar_type(), [&]<typename T, typename A>(T, A) {
    Convolution<T, A>(given.problem, given.input, given.offset, given.mask).forward(given.weight, output);
  });
}

void compute_gradients(const OnDevice&, const Arguments& given, const Tensor& grad_output,
                       const GradientTensors& gradients) {
  dispatch_value_type(grad_output.scalar_type(), [&]<typename T, typename A>(T, A) {
    Convolution<T, A>(given.problem, given.input, given.offset, given.mask)
        .backward(grad_output, given.weight, gradients.input, gradients.offset, gradients.mask, gradients.weight);
  });
}

}  // namespace visdet::deform_conv2d

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor? mask, Tensor weight, int[] stride, int[] padding,"
      " int[] dilation, int deform_groups, int im2col_step) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor? mask, Tensor weight,"
      " int[] stride, int[] padding, int[] dilation, int deform_groups, int im2col_step, bool needs_input,"
      " bool needs_offset, bool needs_weight)"
      " -> (Tensor grad_input, Tensor grad_offset, Tensor grad_mask, Tensor grad_weight)");
}
