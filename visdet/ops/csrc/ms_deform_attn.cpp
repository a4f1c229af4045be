// ms_deform_attn and ms_deform_attn_fused: schemas, and the functions for CPU tensors. cpu/kernels.h names the other
// parts.
#include "ms_deform_attn.h"

#include "cpu/dispatch.h"
#include "cpu/ms_deform_attn/arrays.h"

namespace visdet {
namespace {

// An encoder's queries are the texels of the pyramid itself; taken in 8 x 8 squares, their samples have in common most
// of their texels. Other queries are taken in order.
constexpr int64_t kTileSide = 8;

// Returns the queries in the order in which they are worked on, or none for their own order. It is a matter of locality
// alone: results do not depend on it.
std::vector<int64_t> query_order(const MsDeformAttnProblem& problem, const int64_t* level_shapes) {
  std::vector<int64_t> order;
  if (problem.Q != problem.S) return order;
  order.reserve(static_cast<size_t>(problem.Q));
  int64_t start = 0;
  for (int64_t l = 0; l < problem.L; ++l) {
    const int64_t H = level_shapes[2 * l], W = level_shapes[2 * l + 1];
    for (int64_t y0 = 0; y0 < H; y0 += kTileSide) {
      for (int64_t x0 = 0; x0 < W; x0 += kTileSide) {
        for (int64_t y = y0; y < std::min(y0 + kTileSide, H); ++y) {
          for (int64_t x = x0; x < std::min(x0 + kTileSide, W); ++x) order.push_back(start + y * W + x);
        }
      }
    }
    start += H * W;
  }
  return order;
}

// Lists the level of each of a row's K samples, and the order of queries. num_points has the samples of each level, or
// is null if each has P.
struct Geometry {
  std::vector<int32_t> level, H, W;
  std::vector<int64_t> start, points, order;

  Geometry(const MsDeformAttnProblem& problem, const Tensor& level_shapes, const Tensor& level_starts,
           const int64_t* num_points) {
    const Tensor dense_shapes = dense(level_shapes), dense_starts = dense(level_starts);
    const int64_t* shapes = data_of<int64_t>(dense_shapes);
    const int64_t* starts = data_of<int64_t>(dense_starts);
    check_levels(problem, shapes, starts);
    order = query_order(problem, shapes);
    for (int64_t l = 0; l < problem.L; ++l) {
      const int64_t P = num_points == nullptr ? problem.P : num_points[l];
      level.insert(level.end(), static_cast<size_t>(P), static_cast<int32_t>(l));
      H.insert(H.end(), static_cast<size_t>(P), static_cast<int32_t>(shapes[2 * l]));
      W.insert(W.end(), static_cast<size_t>(P), static_cast<int32_t>(shapes[2 * l + 1]));
      start.insert(start.end(), static_cast<size_t>(P), starts[l]);
      points.insert(points.end(), static_cast<size_t>(P), P);
    }
    H.insert(H.end(), kBlock, 1);
    W.insert(W.end(), kBlock, 1);
    start.insert(start.end(), kBlock, 0);
  }
};

// Returns what both forms of a call have. The caller fills in the arrays of samples.
template <typename T, typename A>
MsDeformAttnArrays<T, A> arrays_of(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& value) {
  MsDeformAttnArrays<T, A> a{};
  a.B = problem.B, a.S = problem.S, a.G = problem.G, a.C = problem.C, a.Q = problem.Q, a.L = problem.L, a.K = problem.K;
  a.level = geometry.level.data();
  a.H = geometry.H.data(), a.W = geometry.W.data(), a.start = geometry.start.data();
  a.order = geometry.order.empty() ? nullptr : geometry.order.data();
  a.value = data_of<T>(value);
  return a;
}

// Returns whether a head has so many samples that it pays to lay its values out in one piece. A decoder has too few.
bool pays_to_gather(const MsDeformAttnProblem& problem) { return problem.Q * problem.K > problem.S; }

// The levels whose rows of a head the forward copies into one piece. It copies a level if a thread takes at least twice
// as many samples from it as it has texels.
struct Copies {
  std::vector<int32_t> copied;
  std::vector<int64_t> start;
  int64_t rows = 0;

  Copies(const MsDeformAttnProblem& problem, const Geometry& geometry)
      : copied(geometry.start.size(), 0), start(geometry.start) {
    // Rows that fill no registers of 16 are copied with zeros after them, so the levels are copied all or none.
    const bool each = problem.C % 16 == 0;
    if (problem.G == 1 || (!each && !pays_to_gather(problem))) return;
    const int64_t heads = problem.B * problem.G;
    const int64_t threads_of_head = ceil_of(torch::stable::get_num_threads(), heads);
    for (size_t k = 0, next = 0; next < static_cast<size_t>(problem.K); k = next) {
      next = k + static_cast<size_t>(geometry.points[k]);
      const int64_t texels = int64_t{geometry.H[k]} * geometry.W[k];
      if (each && problem.Q * geometry.points[k] <= 2 * texels * threads_of_head) continue;
      for (size_t i = k; i < next; ++i) copied[i] = 1, start[i] = rows;
      rows += texels;
    }
  }
};

// fill(arrays) adds the samples.
template <typename Fill>
Tensor forward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& value, const Fill& fill) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.K == 0) return zero_(output);
  const Copies copies(problem, geometry);
  dispatch_value_type(value.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = arrays_of<T, A>(problem, geometry, value);
    fill(a);
    a.output = mutable_data_of<T>(output);
    a.copied = copies.copied.data(), a.copy_start = copies.start.data(), a.copy_rows = copies.rows;
    const std::vector<A> zeros(static_cast<size_t>((problem.C + 15) / 16 * 16));
    a.zeros = reinterpret_cast<const T*>(zeros.data());
    const auto run = best_kernels<MsDeformAttnForward<T, A>>().rows;
    const int64_t Q = problem.Q, G = problem.G;
    if (copies.rows > 0) {
      // A thread's rows have as many samples as it copies texels, or more.
      const int64_t grain = copies.rows / problem.K + 1;
      torch::stable::parallel_for(0, problem.B * G * Q, grain, [&](int64_t begin, int64_t end) {
        Scratch<A> scratch(forward_scratch(a));
        for (int64_t rows; begin < end; begin += rows) {
          const int64_t head = begin / Q, first = begin % Q;
          rows = std::min(Q - first, end - begin);
          run(a, scratch.data(), head / G, head % G, first, rows);
        }
      });
    } else {
      torch::stable::parallel_for(0, problem.B * Q, 1, [&](int64_t begin, int64_t end) {
        Scratch<A> scratch(forward_scratch(a));
        run(a, scratch.data(), begin / Q, 0, begin % Q, (end - begin) * G);
      });
    }
  });
  return output;
}

// fill(arrays) adds the samples and their gradients, none of which is empty.
template <typename Fill>
void backward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& grad_output,
              const Tensor& value_in, Tensor& grad_value, const Fill& fill) {
  const Tensor value = dense(value_in);
  dispatch_value_type(value.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = arrays_of<T, A>(problem, geometry, value);
    fill(a);
    a.grad_output = data_of<T>(grad_output);
    a.grad_value = mutable_data_of<T>(grad_value);
    a.gathered = !std::is_same<T, A>::value || pays_to_gather(problem);
    if (!a.gathered) zero_(grad_value);
    const auto run = best_kernels<MsDeformAttnBackward<T, A>>().head;
    torch::stable::parallel_for(0, problem.B * problem.G, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(backward_scratch(a));
      for (int64_t task = begin; task < end; ++task) {
        run(a, scratch.data(), task / problem.G, task % problem.G);
      }
    });
  });
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes, level_starts, locations_in, weights_in);
  const Tensor value = dense(value_in), locations = dense(locations_in), weights = dense(weights_in);
  const Geometry geometry(problem, level_shapes, level_starts, nullptr);
  return forward(problem, geometry, value, [&](auto& a) {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.locations = data_of<A>(locations);
    a.weights = data_of<A>(weights);
  });
}

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes, const Tensor& level_starts,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool /*deterministic: always*/) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes, level_starts, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = dense(grad_output_in), locations = dense(locations_in), weights = dense(weights_in);
  const Geometry geometry(problem, level_shapes, level_starts, nullptr);
  Tensor grad_value = new_like(value_in), grad_locations = new_like(locations), grad_weights = new_like(weights);
  if (problem.Q == 0 || problem.C == 0 || problem.K == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }
  backward(problem, geometry, grad_output, value_in, grad_value, [&](auto& a) {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.locations = data_of<A>(locations);
    a.weights = data_of<A>(weights);
    a.grad_locations = mutable_data_of<A>(grad_locations);
    a.grad_weights = mutable_data_of<A>(grad_weights);
  });
  return {grad_value, grad_locations, grad_weights};
}

// FusedInputs has the inputs of the fused form, contiguous, and tables of what a unit of offset is.
struct FusedInputs {
  Tensor reference, offsets, logits;
  std::vector<int32_t> center;  // of MsDeformAttnArrays
  std::vector<double> scale;    // likewise
  std::vector<float> scale_float;

  FusedInputs(const Geometry& geometry, const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in)
      : reference(dense(reference_in)), offsets(dense(offsets_in)), logits(dense(logits_in)) {
    const bool boxes = reference.size(3) == 4;
    for (size_t k = 0; k < geometry.points.size(); ++k) {
      const double unit = 0.5 / static_cast<double>(geometry.points[k]);
      scale.push_back(boxes ? unit : 1.0 / geometry.W[k]);
      scale.push_back(boxes ? unit : 1.0 / geometry.H[k]);
      center.push_back(geometry.level[k] * (boxes ? 4 : 2));
      center.push_back(center.back() + 1);
    }
    scale.insert(scale.end(), 2 * kBlock, 0.0);
    center.insert(center.end(), 2 * kBlock, 0);
    scale_float.assign(scale.begin(), scale.end());
  }

  const float* scale_of(float) const { return scale_float.data(); }
  const double* scale_of(double) const { return scale.data(); }

  template <typename Arrays>
  void fill(Arrays& a) const {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.reference_points = data_of<A>(reference);
    a.boxes = reference.size(3) == 4;
    a.in_sum_type = offsets.scalar_type() == reference.scalar_type();
    a.offsets = offsets.const_data_ptr(), a.logits = logits.const_data_ptr();
    a.center = center.data(), a.scale = scale_of(A{});
  }
};

Tensor ms_deform_attn_fused(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                            const Tensor& reference_points, const Tensor& offsets, const Tensor& logits,
                            std::vector<int64_t> num_points) {
  const auto problem =
      check_ms_deform_attn_fused(value_in, level_shapes, level_starts, reference_points, offsets, logits, num_points);
  const Tensor value = dense(value_in);
  const Geometry geometry(problem, level_shapes, level_starts, num_points.data());
  const FusedInputs inputs(geometry, reference_points, offsets, logits);
  return forward(problem, geometry, value, [&](auto& a) { inputs.fill(a); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ms_deform_attn_fused_backward(
    const Tensor& grad_output_in, const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
    const Tensor& reference_points, const Tensor& offsets, const Tensor& logits, std::vector<int64_t> num_points,
    bool needs_reference, bool /*deterministic: always*/) {
  const auto problem =
      check_ms_deform_attn_fused(value_in, level_shapes, level_starts, reference_points, offsets, logits, num_points);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = dense(grad_output_in);
  const Geometry geometry(problem, level_shapes, level_starts, num_points.data());
  const FusedInputs inputs(geometry, reference_points, offsets, logits);
  Tensor grad_value = new_like(value_in), grad_offsets = new_like(offsets), grad_logits = new_like(logits);
  const int64_t D = inputs.reference.size(3);
  const std::vector<int64_t> part_sizes{problem.B, problem.G, problem.Q, problem.L, D}, none{0};
  Tensor parts = new_empty(inputs.reference, needs_reference ? part_sizes : none);
  if (problem.Q == 0 || problem.C == 0 || problem.K == 0) {
    zero_(grad_value), zero_(grad_offsets), zero_(grad_logits), zero_(parts);
  } else {
    backward(problem, geometry, grad_output, value_in, grad_value, [&](auto& a) {
      using A = std::remove_pointer_t<decltype(a.grad_weights)>;
      inputs.fill(a);
      a.grad_offsets = grad_offsets.mutable_data_ptr(), a.grad_logits = grad_logits.mutable_data_ptr();
      a.grad_reference = needs_reference ? mutable_data_of<A>(parts) : nullptr;
    });
  }
  const int64_t heads[] = {1};
  return {grad_value, needs_reference ? sum(parts, torch::headeronly::IntHeaderOnlyArrayRef(heads, 1)) : parts,
          grad_offsets, grad_logits};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "ms_deform_attn(Tensor value, Tensor level_shapes, Tensor level_starts, Tensor locations, Tensor weights)"
      " -> Tensor");
  m.def(
      "ms_deform_attn_backward(Tensor grad_output, Tensor value, Tensor level_shapes, Tensor level_starts,"
      " Tensor locations, Tensor weights, bool deterministic)"
      " -> (Tensor grad_value, Tensor grad_locations, Tensor grad_weights)");
  m.def(
      "ms_deform_attn_fused(Tensor value, Tensor level_shapes, Tensor level_starts, Tensor reference_points,"
      " Tensor offsets, Tensor logits, int[] num_points) -> Tensor");
  m.def(
      "ms_deform_attn_fused_backward(Tensor grad_output, Tensor value, Tensor level_shapes, Tensor level_starts,"
      " Tensor reference_points, Tensor offsets, Tensor logits, int[] num_points, bool needs_reference_points,"
      " bool deterministic)"
      " -> (Tensor grad_value, Tensor grad_reference_points, Tensor grad_offsets, Tensor grad_logits)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn_backward));
  m.impl("ms_deform_attn_fused", TORCH_BOX(&visdet::ms_deform_attn_fused));
  m.impl("ms_deform_attn_fused_backward", TORCH_BOX(&visdet::ms_deform_attn_fused_backward));
}
