// The kernels of deform_conv2d on the CPU, which arrays.h names.
//
// Numbers are handled in lines of 64 bytes, whatever the instruction set: the channels of a deformable group fill whole
// lines, with zeros after the last. kRows positions of the output make a block, and a block of columns is [lines of a
// position, kRows, numbers of a line]. So a sample is located once for all of its channels, a line of it is one or a
// few registers, and a matrix product reads numbers of kRows positions, or a line of each, at distances the compiler
// knows.
//
// The matrix products are in this file, too. They read the blocks as they lie in memory, and add the terms of each
// number in one order, whatever the tiles and the number of threads.
#include <type_traits>

#include "common/bilinear.h"
#include "cpu/deform_conv2d/arrays.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Adds rows of one matrix times a panel of another to c [2, kRows, kLine]. walk(v, visit) calls visit(a, b0, b1) for
// each term, a pointing to the term's numbers of the rows, STRIDE apart, b0 and b1 to the vectors v and v + 1 of the
// panel.
template <int STRIDE, typename A, typename Walk>
VISDET_INLINE void add_products(A* c, bool is_first, const Walk& walk) {
  constexpr int W = kLanes<A>, L = kLine<A>;
  constexpr int kSums = kVectorBytes == 64 ? 12 : 6;  // two sums of each row leave registers for the operands
  for (int row = 0; row < kRows; row += kSums) {
    for (int v = 0; v < kPanel<A> / W; v += 2) {
      A* const to0 = c + (v * W / L * kRows + row) * L + v * W % L;
      A* const to1 = c + ((v + 1) * W / L * kRows + row) * L + (v + 1) * W % L;
      Vec<A> sum0[kSums] = {}, sum1[kSums] = {};
      if (!is_first) {
#pragma GCC unroll 12
        for (int r = 0; r < kSums; ++r) sum0[r] = load(to0 + r * L), sum1[r] = load(to1 + r * L);
      }
      walk(v, [&](const A* a, const A* b0, const A* b1) __attribute__((always_inline)) {
        const Vec<A> one = load(b0), other = load(b1);
#pragma GCC unroll 12
        for (int r = 0; r < kSums; ++r) {
          const A factor = a[(row + r) * STRIDE];
          sum0[r] += factor * one;
          sum1[r] += factor * other;
        }
      });
#pragma GCC unroll 12
      for (int r = 0; r < kSums; ++r) store(to0 + r * L, sum0[r]), store(to1 + r * L, sum1[r]);
    }
  }
}

template <typename T, typename A>
void copy_image(const DeformConvArrays<T, A>& a, A* images, int64_t b, int64_t first, int64_t last) {
  constexpr int64_t L = kLine<A>;
  const int64_t map = a.H * a.W, pixel = a.pixel(), padded = a.lines * L;
  const T* const from = a.input + b * a.C * map;
  A* const to = images + b * map * pixel;
  for (int64_t p0 = first; p0 < last; p0 += L) {
    const int64_t end = last < p0 + L ? last : p0 + L;
    for (int64_t g = 0; g < a.G; ++g) {
      for (int64_t c = 0; c < padded; ++c) {
        const T* channel = from + (g * a.per_offset + c) * map;
        A* at = to + g * padded + c;
        if (c < a.per_offset) {
          for (int64_t p = p0; p < end; ++p) at[p * pixel] = to_accumulate(channel[p]);
        } else {
          for (int64_t p = p0; p < end; ++p) at[p * pixel] = 0;
        }
      }
    }
  }
}

template <typename T, typename A>
void copy_grad_image(const DeformConvArrays<T, A>& a, int64_t b, int64_t first, int64_t last) {
  constexpr int64_t L = kLine<A>;
  const int64_t map = a.H * a.W, pixel = a.pixel(), padded = a.lines * L;
  T* const to = a.grad_input + b * a.C * map;
  const A* const from = a.grad_images + b * map * pixel;
  for (int64_t p0 = first; p0 < last; p0 += L) {
    const int64_t end = last < p0 + L ? last : p0 + L;
    for (int64_t c = 0; c < a.C; ++c) {
      const A* at = from + c / a.per_offset * padded + c % a.per_offset;
      for (int64_t p = p0; p < end; ++p) from_accumulate(at[p * pixel], to[c * map + p]);
    }
  }
}

// Writes all samples of block n of image b: [G, taps, kRows]. Those past the last position do not count.
template <typename T, typename A>
VISDET_INLINE void locate_block(const DeformConvArrays<T, A>& a, int64_t b, int64_t n, DeformSample<A>* sample) {
  const int64_t rows = a.rows(n);
  for (int64_t g = 0; g < a.G; ++g) {
    for (int64_t k = 0; k < a.taps; ++k) {
      const int64_t tap = (b * a.G + g) * a.taps + k;
      const T* offset = a.offset + 2 * tap * a.positions + n * kRows;
      const int64_t down = k / a.KW * a.dilation[0] - a.padding[0], across = k % a.KW * a.dilation[1] - a.padding[1];
      int64_t row = n * kRows / a.width, column = n * kRows % a.width;
      for (int r = 0; r < kRows; ++r, ++sample) {
        *sample = {{-1, -1, -1, -1}, 0, 0, 0};
        if (r >= rows) continue;
        Bilinear<A> at;
        const A y = A(row * a.stride[0] + down) + to_accumulate(offset[r]);
        const A x = A(column * a.stride[1] + across) + to_accumulate(offset[a.positions + r]);
        locate(x, y, static_cast<int32_t>(a.H), static_cast<int32_t>(a.W), at);
        for (int i = 0; i < 4; ++i) sample->pixel[i] = at.is_inside[i] ? at.index[i] : -1;
        sample->fx = at.fx, sample->fy = at.fy;
        sample->mask = a.mask ? to_accumulate(a.mask[tap * a.positions + n * kRows + r]) : A(1);
        if (++column == a.width) column = 0, ++row;
      }
    }
  }
}

template <typename A>
VISDET_INLINE void corner_weights(const DeformSample<A>& s, A (&w)[4]) {
  w[0] = (1 - s.fy) * (1 - s.fx), w[1] = (1 - s.fy) * s.fx, w[2] = s.fy * (1 - s.fx), w[3] = s.fy * s.fx;
}

// Visits the samples of a block with the channels of each corner, and the sample's first line in the block.
template <typename T, typename A, typename F>
VISDET_INLINE void for_samples(const DeformConvArrays<T, A>& a, int64_t b, const DeformSample<A>* sample,
                               const F& visit) {
  constexpr int64_t L = kLine<A>;
  for (int64_t g = 0; g < a.G; ++g) {
    const A* map = a.images + b * a.H * a.W * a.pixel() + g * a.lines * L;
    for (int64_t k = 0; k < a.taps; ++k) {
      for (int r = 0; r < kRows; ++r, ++sample) {
        const A* corner[4];
        for (int i = 0; i < 4; ++i) {
          corner[i] = sample->pixel[i] < 0 ? a.zeros : map + sample->pixel[i] * a.pixel();
        }
        visit(*sample, corner, ((k * a.G + g) * a.lines * kRows + r) * L, g, k, r);
      }
    }
  }
}

template <typename T, typename A>
VISDET_INLINE void write_columns(const DeformConvArrays<T, A>& a, int64_t b, const DeformSample<A>* samples,
                                 A* columns) {
  constexpr int L = kLine<A>, W = kLanes<A>;
  for_samples(a, b, samples,
              [&](const DeformSample<A>& sample, const A* const(&corner)[4], int64_t at, int64_t, int64_t, int)
                  __attribute__((always_inline)) {
                    A w[4];
                    corner_weights(sample, w);
                    for (int64_t line = 0; line < a.lines; ++line) {
                      for (int v = 0; v < L; v += W) {
                        const int64_t c = line * L + v;
                        Vec<A> value = load(corner[0] + c) * w[0];
                        for (int i = 1; i < 4; ++i) value += load(corner[i] + c) * w[i];
                        store(columns + at + line * kRows * L + v, value * sample.mask);
                      }
                    }
                  });
}

template <typename T, typename A>
void forward_tile(const DeformConvArrays<T, A>& a, A* scratch, DeformSample<A>* samples, int64_t b, int64_t n0,
                  int64_t count) {
  constexpr int64_t P = kPanel<A>, L = kLine<A>;
  const int64_t terms = a.terms(), panels = ceil_of(a.per_output, P);
  A *columns = scratch, *products = scratch + count * a.block();  // [count, block], [panels, count, kTile]
  for (int64_t n = 0; n < count; ++n) {
    locate_block(a, b, n0 + n, samples);
    write_columns(a, b, samples, columns + n * a.block());
  }
  for (int64_t group = 0; group < a.groups; ++group) {
    const int64_t* term_offset = a.term_offset + group * terms;
    for (int64_t t0 = 0; t0 < terms; t0 += kDepth) {
      const int64_t t1 = terms < t0 + kDepth ? terms : t0 + kDepth;
      for (int64_t panel = 0; panel < panels; ++panel) {
        const A* weight = a.weight + (group * panels + panel) * terms * P;
        for (int64_t n = 0; n < count; ++n) {
          const A* block = columns + n * a.block();
          add_products<L>(products + (panel * count + n) * kTile<A>, t0 == 0,
                          [&](int v, const auto& visit) __attribute__((always_inline)) {
                            const A* row = weight + t0 * P + v * kLanes<A>;
                            for (int64_t t = t0; t < t1; ++t, row += P) {
                              visit(block + term_offset[t], row, row + kLanes<A>);
                            }
                          });
        }
      }
    }
    for (int64_t m = 0; m < a.per_output; ++m) {
      T* out = a.output + (b * a.M + group * a.per_output + m) * a.positions + n0 * kRows;
      for (int64_t n = 0; n < count; ++n) {
        const A* from = products + (m / P * count + n) * kTile<A> + m % P / L * kRows * L + m % L;
        for (int64_t r = 0; r < a.rows(n0 + n); ++r) from_accumulate(from[r * L], out[n * kRows + r]);
      }
    }
  }
}

// Writes the gradient of the products of a block, [M, kRows], with zeros past the last position; and, if the weight
// wants its own, by output channel.
template <typename T, typename A>
VISDET_INLINE void copy_grad_products(const DeformConvArrays<T, A>& a, int64_t b, int64_t n, int64_t t, A* grad) {
  const int64_t rows = a.rows(n), tiles = a.tiles();
  for (int64_t m = 0; m < a.M; ++m) {
    const T* from = a.grad_output + (b * a.M + m) * a.positions + n * kRows;
    for (int64_t r = 0; r < kRows; ++r) grad[m * kRows + r] = r < rows ? to_accumulate(from[r]) : A(0);
  }
  if (a.columns == nullptr) return;
  for (int64_t tile = 0; tile < a.groups * tiles; ++tile) {
    A* to = a.grad_products + (tile * a.count + t) * kRows * kRows;
    const int64_t first = tile % tiles * kRows, m0 = tile / tiles * a.per_output + first;
    for (int64_t i = 0; i < kRows; ++i) {
      const bool is_channel = first + i < a.per_output;
      for (int64_t r = 0; r < kRows; ++r) to[r * kRows + i] = is_channel ? grad[(m0 + i) * kRows + r] : A(0);
    }
  }
}

// Copies a panel of a product, whose columns are `count` terms of a kernel, to where a block of columns holds these
// terms.
template <typename A>
VISDET_INLINE void scatter_panel(const A* from, const int64_t* term_offset, int64_t count, A* block) {
  constexpr int64_t L = kLine<A>;
  for (int64_t j0 = 0; j0 < count; j0 += L, from += kRows * L) {
    const int64_t here = count - j0 < L ? count - j0 : L, start = term_offset[j0];
    if (here == L && start % L == 0 && term_offset[j0 + L - 1] == start + L - 1) {
      for (int64_t i = 0; i < kRows * L; ++i) block[start + i] = from[i];
      continue;
    }
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < here; ++j) block[term_offset[j0 + j] + r * L] = from[r * L + j];
    }
  }
}

// Writes the gradient of the columns of `count` blocks, of which `grads` are the gradients of products.
template <typename T, typename A>
VISDET_INLINE void write_grad_columns(const DeformConvArrays<T, A>& a, const A* grads, A* products, A* to,
                                      int64_t count) {
  constexpr int64_t P = kPanel<A>;
  const int64_t terms = a.terms(), panels = ceil_of(terms, P);
  if (a.is_padded()) {
    for (int64_t i = 0; i < count * a.block(); ++i) to[i] = 0;
  }
  for (int64_t group = 0; group < a.groups; ++group) {
    for (int64_t panel = 0; panel < panels; ++panel) {
      const A* weight = a.transposed + (group * panels + panel) * a.per_output * P;
      for (int64_t m0 = 0; m0 < a.per_output; m0 += kDepth) {
        const int64_t m1 = a.per_output < m0 + kDepth ? a.per_output : m0 + kDepth;
        for (int64_t n = 0; n < count; ++n) {
          const A* grad = grads + (n * a.M + group * a.per_output) * kRows;
          add_products<1>(products + n * kTile<A>, m0 == 0,
                          [&](int v, const auto& visit) __attribute__((always_inline)) {
                            const A* row = weight + m0 * P + v * kLanes<A>;
                            for (int64_t m = m0; m < m1; ++m, row += P) {
                              visit(grad + m * kRows, row, row + kLanes<A>);
                            }
                          });
        }
      }
      const int64_t rest = terms - panel * P;
      for (int64_t n = 0; n < count; ++n) {
        scatter_panel(products + n * kTile<A>, a.term_offset + group * terms + panel * P, rest < P ? rest : P,
                      to + n * a.block());
      }
    }
  }
}

// Writes the gradients of offset and mask of a block, and its columns if they are wanted.
template <typename T, typename A>
VISDET_INLINE void write_grad_offsets(const DeformConvArrays<T, A>& a, int64_t b, int64_t n,
                                      const DeformSample<A>* samples, const A* grad_columns, A* columns) {
  constexpr int L = kLine<A>, W = kLanes<A>;
  const int64_t rows = a.rows(n);
  for_samples(a, b, samples,
              [&](const DeformSample<A>& sample, const A* const(&corner)[4], int64_t at, int64_t g, int64_t k, int r)
                  __attribute__((always_inline)) {
                    A w[4], dot[4];
                    corner_weights(sample, w);
                    Vec<A> sum[4] = {};
                    for (int64_t line = 0; line < a.lines; ++line) {
                      for (int v = 0; v < L; v += W) {
                        const Vec<A> grad = load(grad_columns + at + line * kRows * L + v);
                        Vec<A> value = {};
                        for (int i = 0; i < 4; ++i) {
                          const Vec<A> texel = load(corner[i] + line * L + v);
                          sum[i] += grad * texel;
                          value += texel * w[i];
                        }
                        if (columns) store(columns + at + line * kRows * L + v, value * sample.mask);
                      }
                    }
                    if (r >= rows) return;
                    horizontal_sums(sum, dot);
                    for (int i = 0; i < 4; ++i) dot[i] = sample.pixel[i] < 0 ? A(0) : dot[i];
                    const int64_t tap = (b * a.G + g) * a.taps + k;
                    const A of_y = (1 - sample.fx) * (dot[2] - dot[0]) + sample.fx * (dot[3] - dot[1]);
                    const A of_x = (1 - sample.fy) * (dot[1] - dot[0]) + sample.fy * (dot[3] - dot[2]);
                    T* to = a.grad_offset + 2 * tap * a.positions + n * kRows + r;
                    // Outside the map it is 0, whatever the mask.
                    from_accumulate(of_y == 0 ? A(0) : of_y * sample.mask, to[0]);
                    from_accumulate(of_x == 0 ? A(0) : of_x * sample.mask, to[a.positions]);
                    if (a.grad_mask) {
                      const A of_mask = w[0] * dot[0] + w[1] * dot[1] + w[2] * dot[2] + w[3] * dot[3];
                      from_accumulate(of_mask, a.grad_mask[tap * a.positions + n * kRows + r]);
                    }
                  });
}

template <typename T, typename A>
void backward_tile(const DeformConvArrays<T, A>& a, A* scratch, int64_t t0, int64_t count) {
  A *grads = scratch, *products = scratch + count * a.M * kRows;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t block = a.first + t0 + n;
    copy_grad_products(a, block / a.blocks, block % a.blocks, t0 + n, grads + n * a.M * kRows);
    locate_block(a, block / a.blocks, block % a.blocks, a.samples + (t0 + n) * a.block_samples());
  }
  if (a.grad_columns) write_grad_columns(a, grads, products, a.grad_columns + t0 * a.block(), count);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t block = a.first + t0 + n;
    const DeformSample<A>* samples = a.samples + (t0 + n) * a.block_samples();
    A* columns = a.columns ? a.columns + (t0 + n) * a.block() : nullptr;
    if (a.grad_offset) {
      write_grad_offsets(a, block / a.blocks, block % a.blocks, samples, a.grad_columns + (t0 + n) * a.block(),
                         columns);
    } else if (columns) {
      write_columns(a, block / a.blocks, samples, columns);
    }
  }
}

template <typename T, typename A>
void add_to_pixels(const DeformConvArrays<T, A>& a, int64_t b, int64_t t0, int64_t t1, int64_t g, int64_t line0,
                   int64_t line1, int64_t pixel0, int64_t pixel1) {
  constexpr int L = kLine<A>, W = kLanes<A>;
  A* const map = a.grad_images + b * a.H * a.W * a.pixel() + g * a.lines * L;
  for (int64_t t = t0; t < t1; ++t) {
    const DeformSample<A>* sample = a.samples + (t * a.G + g) * a.taps * kRows;
    const A* block = a.grad_columns + t * a.block();
    for (int64_t k = 0; k < a.taps; ++k) {
      for (int r = 0; r < kRows; ++r, ++sample) {
        const A* grad = block + ((k * a.G + g) * a.lines * kRows + r) * L;
        A w[4];
        corner_weights(*sample, w);
        for (int i = 0; i < 4; ++i) {
          const int64_t pixel = sample->pixel[i];
          const A factor = w[i] * sample->mask;
          if (pixel < pixel0 || pixel >= pixel1 || factor == 0) continue;
          A* const to = map + pixel * a.pixel();
          for (int64_t line = line0; line < line1; ++line) {
            for (int v = 0; v < L; v += W) {
              const int64_t c = line * L + v;
              store(to + c, load(to + c) + factor * load(grad + line * kRows * L + v));
            }
          }
        }
      }
    }
  }
}

template <typename T, typename A>
void add_to_weight(const DeformConvArrays<T, A>& a, int64_t group, int64_t pair) {
  constexpr int64_t L = kLine<A>, kBlocks = kDepth / kRows;
  const int64_t tiles = a.tiles(), *lines = a.line_pair + 2 * (group * a.pairs + pair);
  A* const sums = a.grad_weight + (group * a.pairs + pair) * tiles * kTile<A>;
  for (int64_t t0 = 0; t0 < a.count; t0 += kBlocks) {
    const int64_t t1 = a.count < t0 + kBlocks ? a.count : t0 + kBlocks;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      add_products<1>(sums + tile * kTile<A>, false, [&](int v, const auto& visit) __attribute__((always_inline)) {
        const int w = v * kLanes<A>, next = w + kLanes<A>;
        const A* grad = a.grad_products + ((group * tiles + tile) * a.count + t0) * kRows * kRows;
        const A* one = a.columns + t0 * a.block() + lines[w / L] * kRows * L + w % L;
        const A* other = a.columns + t0 * a.block() + lines[next / L] * kRows * L + next % L;
        for (int64_t t = t0; t < t1; ++t, grad += kRows * kRows, one += a.block(), other += a.block()) {
          for (int r = 0; r < kRows; ++r) visit(grad + r * kRows, one + r * L, other + r * L);
        }
      });
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(DeformConvKernels, copy_image<T, A>, copy_grad_image<T, A>, forward_tile<T, A>, backward_tile<T, A>,
               add_to_pixels<T, A>, add_to_weight<T, A>)
