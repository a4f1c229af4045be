// nms on CUDA. The contract is in ../../nms.h.
#include <optional>

#include "common/aten.h"
#include "common/launch.h"
#include "cuda/nms/boxes.cuh"
#include "cuda/nms/suppress.cuh"
#include "nms.h"

namespace visdet::nms {
namespace {

constexpr const char* kOp = "nms";

struct Problem {
  const DeviceScope& scope;
  const Tensor& boxes;
  const Tensor& order;                          // [N] the indices by rank
  const std::optional<Tensor>& ranks;           // [N] by position, if there are classes
  const std::optional<Tensor>& sorted_classes;  // [N] by position
  const std::optional<Tensor>& is_candidate;
};

// Returns the indices of the kept boxes.
template <typename Boxes, typename A>
Tensor suppress(const Problem& p, const Boxes& rule) {
  using Box = typename Boxes::Box;
  const int64_t N = p.boxes.size(0), tiles = ceil_div(N, kTile), flags = tiles * kTile;
  const Tensor sorted = new_empty(p.boxes, {N * static_cast<int64_t>(sizeof(Box))}, ScalarType::Byte);
  const Tensor starts = new_empty(p.boxes, {N}, ScalarType::Int),
               is_kept = new_empty(p.boxes, {flags}, ScalarType::Byte);
  const Tensor words = new_empty(p.boxes, {2 * tiles + 2}, ScalarType::Long);
  Tensor keep = new_empty(p.order, {N});
  uint64_t* word = data_of(words);
  int64_t* count = reinterpret_cast<int64_t*>(word + 2 * tiles);
  fill_bytes(kOp, p.scope, word, 0, words.numel() * static_cast<int64_t>(sizeof(uint64_t)));
  launch({kOp, "prepare_kernel", p.scope, ceil_div(N, kPrepareThreads), kPrepareThreads}, prepare_kernel<Boxes, A>,
         data_of(p.boxes), data_of(p.order), data_of(p.ranks), data_of(p.sorted_classes), data_of(p.is_candidate),
         static_cast<int32_t>(N), data_of(sorted), data_of(starts));
  launch({kOp, "suppress_kernel", p.scope, tiles, kThreads}, suppress_kernel<Boxes>, rule, data_of(sorted),
         data_of(starts), data_of(p.ranks), static_cast<int32_t>(N),
         Progress{word, reinterpret_cast<uint32_t*>(word + 2 * tiles + 1)}, data_of(is_kept));
  launch({kOp, "select_kernel", p.scope, ceil_div(flags, kSelectThreads * kFlagsOfThread), kSelectThreads},
         select_kernel, data_of(is_kept), data_of(p.order), flags, data_of(keep), count);
  return p.scope.is_plan() ? keep : shaped(keep, {read_number(kOp, p.scope, count)});
}

std::array<Tensor, 2> sorted_by(const Tensor& keys, bool descending) {
  return call_for<2>("aten::sort", "stable", keys, std::optional<bool>(true), int64_t{0}, descending);
}

Tensor forward(const Tensor& boxes_in, const Tensor& scores, const std::optional<Tensor>& classes,
               const std::optional<Tensor>& is_candidate_in, double iou_threshold) {
  check_nms(boxes_in, scores, classes, is_candidate_in);
  const DeviceScope scope(boxes_in);
  if (boxes_in.size(0) == 0) return new_empty(boxes_in, {0}, ScalarType::Long);
  const Tensor boxes = dense(boxes_in), order = sorted_by(scores, true)[1];
  std::optional<Tensor> ranks, sorted_classes, is_candidate;
  if (classes) {
    const auto sorted = sorted_by(call("aten::index_select", "", *classes, int64_t{0}, order), false);
    sorted_classes = sorted[0], ranks = sorted[1];
  }
  if (is_candidate_in) is_candidate = dense(*is_candidate_in);
  const Problem problem{scope, boxes, order, ranks, sorted_classes, is_candidate};
  return dispatch_sum_type(boxes.scalar_type(), [&]<typename A>(A) {
    const A limit = static_cast<A>(iou_threshold);
    if (boxes.size(1) == 5) return suppress<Polygons<A, true>, A>(problem, {limit});
    if (boxes.size(1) == 8) return suppress<Polygons<A, false>, A>(problem, {limit});
    const AlignedLimit<A> aligned(iou_threshold);
    return suppress<AlignedBoxes<A>, A>(problem, {aligned.limit, aligned.low});
  });
}

}  // namespace
}  // namespace visdet::nms

VISDET_CUDA_OPERATORS(nms, m) { m.impl("nms", TORCH_BOX(&visdet::nms::forward)); }
