// nms: its schema, and its function for CPU tensors. The contract is in nms.h, and cpu/kernels.h names the other parts.
#include "nms.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/classes.h"
#include "cpu/dispatch.h"
#include "cpu/nms.h"

namespace visdet {
namespace {

constexpr int64_t kBoxesOfOneList = 512;  // Classes of more boxes are divided into strips of the plane.
constexpr int64_t kBoxesOfStrip = 256, kMostStrips = 1 << 12;
constexpr int64_t kStripsOfBox = 8;  // A box across more strips is in a list of its own.

// A key that ascends as the score descends, from NaN on.
template <typename A>
uint64_t descending_key(A score) {
  using Bits = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;
  if (std::isnan(score)) return 0;
  score += 0;  // -0 is 0
  Bits bits;
  std::memcpy(&bits, &score, sizeof(bits));
  constexpr Bits sign = Bits{1} << (8 * sizeof(A) - 1);
  return static_cast<Bits>(bits & sign ? bits : ~(bits | sign));
}

// The kept boxes of a class, as the kernel reads them.
template <typename A>
class BoxList {
 public:
  void add(const A* box) {
    const int64_t lane = count_++ % kAnyLanes;
    if (lane == 0) std::fill_n(blocks_.emplace_back().numbers, kBoxBlock, std::numeric_limits<A>::quiet_NaN());
    for (int64_t k = 0; k < kBoxColumns; ++k) blocks_.back().numbers[k * kAnyLanes + lane] = box[k];
  }
  bool suppresses(const A* box, const AlignedLimit<A>& rule, const NmsKernels<A>& kernels) const {
    return !blocks_.empty() &&
           kernels.is_suppressed(blocks_[0].numbers, static_cast<int64_t>(blocks_.size()), box, rule.limit, rule.low);
  }

 private:
  struct alignas(64) Block {
    A numbers[kBoxBlock];
  };

  std::vector<Block> blocks_;
  int64_t count_ = 0;
};

// The axis-aligned boxes of a class, one after another. Many boxes are divided by strips across x or y, since boxes
// that share no strip do not overlap.
template <typename A>
class AlignedClass {
 public:
  AlignedClass(const A* boxes, const A* areas, const int32_t* members, int64_t count, double iou_threshold)
      : boxes_(boxes), areas_(areas), rule_(iou_threshold), strips_(1) {
    if (count > kBoxesOfOneList && rule_.limit >= 0) divide(members, count);
  }

  // Whether no box before overlaps this one too much. It then counts for those that follow.
  bool keeps(int32_t index) {
    const A* corners = boxes_ + 4 * static_cast<int64_t>(index);
    const A box[kBoxColumns] = {corners[0], corners[1], corners[2], corners[3], areas_[index]};
    // Without an extent, the intersection is 0, and with an infinite area or a NaN, the overlap is 0 or NaN.
    if (rule_.limit >= 0 && !has_extent(box)) return true;
    const int64_t begin = strip_of(box[axis_]), end = strip_of(box[axis_ + 2]) + 1;
    for (int64_t strip = begin; strip < end; ++strip) {
      if (strips_[strip].suppresses(box, rule_, kernels_)) return false;
    }
    if (wide_.suppresses(box, rule_, kernels_)) return false;
    if (end - begin > kStripsOfBox) {
      wide_.add(box);
    } else {
      for (int64_t strip = begin; strip < end; ++strip) strips_[strip].add(box);
    }
    return true;
  }

 private:
  static bool has_extent(const A* box) { return box[2] > box[0] && box[3] > box[1] && std::isfinite(box[4]); }

  int64_t strip_of(A coordinate) const {
    return strips_.size() == 1 ? 0 : static_cast<int64_t>((static_cast<double>(coordinate) - start_) * per_unit_);
  }

  // Chooses the axis along which boxes are the shorter part of the whole.
  void divide(const int32_t* members, int64_t count) {
    double best = 0;
    for (int axis = 0; axis < 2; ++axis) {
      double low = INFINITY, high = -INFINITY, sides = 0;
      for (int64_t i = 0; i < count; ++i) {
        const A* box = boxes_ + 4 * static_cast<int64_t>(members[i]);
        const A with_area[kBoxColumns] = {box[0], box[1], box[2], box[3], areas_[members[i]]};
        if (!has_extent(with_area)) continue;
        low = std::min<double>(low, box[axis]), high = std::max<double>(high, box[axis + 2]);
        sides += static_cast<double>(box[axis + 2]) - box[axis];
      }
      const double strips =
          std::min<double>(std::min(kMostStrips, count / kBoxesOfStrip), 2 * count * (high - low) / sides);
      if (!(strips > best)) continue;
      best = strips, axis_ = axis, start_ = low, per_unit_ = std::floor(strips) / (high - low);
    }
    // The end of the last box may be rounded into one strip more.
    if (best >= 2 && std::isfinite(per_unit_)) strips_.resize(static_cast<size_t>(best) + 2);
  }

  const NmsKernels<A>& kernels_ = best_kernels<NmsKernels<A>>();
  const A *boxes_, *areas_;
  AlignedLimit<A> rule_;
  std::vector<BoxList<A>> strips_;
  BoxList<A> wide_;
  int axis_ = 0;
  double start_ = 0, per_unit_ = 0;
};

// The rotated boxes, or the quadrilaterals, of a class, one after another.
template <typename A, bool ROTATED>
class PolygonClass {
 public:
  PolygonClass(const A* boxes, double iou_threshold) : boxes_(boxes), limit_(static_cast<A>(iou_threshold)) {}

  bool keeps(int32_t index) {
    const Quadrilateral box = box_at<ROTATED>(boxes_, index);
    for (const Quadrilateral& better : kept_) {
      if (overlap_of<A, ROTATED>(better, box, OverlapMode::iou) > limit_) return false;
    }
    kept_.push_back(box);
    return true;
  }

 private:
  const A* boxes_;
  A limit_;
  std::vector<Quadrilateral> kept_;
};

// The ranks of the boxes in the order of their scores, class by class.
struct Order {
  std::vector<int32_t> by_score;  // indices
  Classes of_ranks;
};

template <typename A>
Order order_boxes(const A* scores, const int64_t* classes, int64_t N) {
  Order order{counted(N), {}};
  std::vector<uint64_t> keys(N);
  for (int64_t n = 0; n < N; ++n) keys[n] = descending_key(scores[n]);
  sort_by_keys(keys, order.by_score);
  for (int64_t rank = 0; rank < N; ++rank) keys[rank] = classes == nullptr ? 0 : classes[order.by_score[rank]];
  order.of_ranks = group_by_class(keys);
  return order;
}

Tensor nms(const Tensor& boxes_in, const Tensor& scores_in, const std::optional<Tensor>& classes_in,
           const std::optional<Tensor>& is_candidate_in, double iou_threshold) {
  check_nms(boxes_in, scores_in, classes_in, is_candidate_in);
  const Tensor boxes = dense(boxes_in), scores = dense(scores_in);
  const Tensor classes = classes_in ? dense(*classes_in) : scores, chosen = dense(is_candidate_in.value_or(scores));
  const int64_t N = boxes.size(0), D = boxes.size(1);
  const bool* is_candidate = data_of(is_candidate_in ? &chosen : nullptr);
  std::vector<int32_t> kept;
  dispatch_sum_type(boxes.scalar_type(), [&]<typename A>(A) {
    const Order order = order_boxes<A>(data_of(scores), data_of(classes_in ? &classes : nullptr), N);
    const std::vector<int32_t>& ranks = order.of_ranks.members;
    const std::vector<int64_t>& starts = order.of_ranks.starts;
    const A* box = data_of(boxes);
    std::vector<A> areas(D == 4 ? N : 0);
    if (D == 4) best_kernels<NmsKernels<A>>().write_areas(box, N, areas.data());
    std::vector<char> is_kept(N);  // by rank
    torch::stable::parallel_for(0, static_cast<int64_t>(starts.size()) - 1, 1, [&](int64_t begin, int64_t end) {
      std::vector<int32_t> members;
      for (int64_t c = begin; c < end; ++c) {
        members.clear();
        for (int64_t p = starts[c]; p < starts[c + 1]; ++p) members.push_back(order.by_score[ranks[p]]);
        const auto suppress = [&](auto&& of_class) {
          for (size_t i = 0; i < members.size(); ++i) {
            const bool takes_part = is_candidate == nullptr || is_candidate[members[i]];
            is_kept[ranks[starts[c] + i]] = takes_part && of_class.keeps(members[i]);
          }
        };
        if (D == 4) suppress(AlignedClass<A>(box, areas.data(), members.data(), members.size(), iou_threshold));
        if (D == 5) suppress(PolygonClass<A, true>(box, iou_threshold));
        if (D == 8) suppress(PolygonClass<A, false>(box, iou_threshold));
      }
    });
    for (int64_t rank = 0; rank < N; ++rank) {
      if (is_kept[rank]) kept.push_back(order.by_score[rank]);
    }
  });
  Tensor keep = new_empty(boxes, {static_cast<int64_t>(kept.size())}, ScalarType::Long);
  std::copy(kept.begin(), kept.end(), mutable_data_of<int64_t>(keep));
  return keep;
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("nms(Tensor boxes, Tensor scores, Tensor? classes, Tensor? is_candidate, float iou_threshold) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) { m.impl("nms", TORCH_BOX(&visdet::nms)); }
