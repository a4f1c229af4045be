// The CPU kernels of ms_deform_attn and deformable_aggregation as operations of OpenVINO, in float32 and forward alone.
// The arguments are those of the operators of torch. visdet/export compiles this against the headers of OpenVINO's
// wheel, and Core::add_extension loads it.
#include <tbb/parallel_for.h>

#include <openvino/core/op_extension.hpp>
#include <openvino/frontend/onnx/extension/op.hpp>
#include <openvino/op/op.hpp>

#include "cpu/deformable_aggregation/arrays.h"
#include "cpu/ms_deform_attn/host.h"

namespace visdet {
namespace {

// torch's parallel_for, with the threads of OpenVINO's plugin, in whose arena an operation is evaluated.
const auto parallel_for = [](int64_t begin, int64_t end, int64_t grain, const auto& f) {
  tbb::parallel_for(tbb::blocked_range<int64_t>(begin, end, static_cast<size_t>(grain)),
                    [&](const auto& range) { f(range.begin(), range.end()); });
};

// Inputs has what an operation reads. The plugin turns tables of 64-bit integers into 32-bit ones.
struct Inputs {
  explicit Inputs(const ov::TensorVector& given)
      : values(given[0].data<float>()),
        locations(given[3].data<float>()),
        weights(given[4].data<float>()),
        groups(static_cast<int64_t>(given[4].get_shape().back())) {
    for (const auto& [to, from] : {std::pair(&shapes, given[1]), std::pair(&starts, given[2])}) {
      to->resize(from.get_size());
      if (from.get_element_type() == ov::element::i32) {
        std::copy_n(from.data<int32_t>(), to->size(), to->begin());
      } else {
        std::copy_n(from.data<int64_t>(), to->size(), to->begin());
      }
    }
    const auto rows = static_cast<int64_t>(given[0].get_shape()[1]);
    for (size_t l = 0; l < starts.size(); ++l) {
      const int64_t H = shapes.at(2 * l), W = shapes.at(2 * l + 1);
      OPENVINO_ASSERT(H > 0 && W > 0 && starts[l] >= 0 && starts[l] <= rows - H * W, "visdet: level ", l, " of ", H,
                      " x ", W, " from row ", starts[l], " must lie within the ", rows, " rows of the values");
    }
  }
  const float *values, *locations, *weights;
  int64_t groups;
  std::vector<int64_t> shapes, starts;
};

// Operation has what the operations have in common. `output` of Kind gives the shape of the result.
template <typename Kind>
struct Operation : ov::op::Op {
  static const ov::DiscreteTypeInfo& get_type_info_static() {
    static const ov::DiscreteTypeInfo info(Kind::name, "visdet");
    return info;
  }
  const ov::DiscreteTypeInfo& get_type_info() const override { return get_type_info_static(); }
  Operation() = default;
  explicit Operation(const ov::OutputVector& inputs) : Op(inputs) { constructor_validate_and_infer_types(); }
  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    return std::make_shared<Operation>(inputs);
  }
  bool visit_attributes(ov::AttributeVisitor&) override { return true; }
  bool has_evaluate() const override { return true; }
  void validate_and_infer_types() override {
    OPENVINO_ASSERT(get_input_size() == 5, Kind::name, " takes five inputs, got ", get_input_size());
    for (const size_t i : {0, 3, 4}) {
      OPENVINO_ASSERT(get_input_element_type(i).compatible(ov::element::f32), Kind::name, ": input ", i,
                      " must be float32, got ", get_input_element_type(i));
    }
    const ov::PartialShape values = get_input_partial_shape(0), locations = get_input_partial_shape(3);
    const bool is_known = values.rank().is_static() && locations.rank().is_static();
    set_output_type(0, ov::element::f32, is_known ? Kind::output(values, locations) : ov::PartialShape::dynamic(3));
  }
  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& given) const override {
    const ov::Shape values = given[0].get_shape(), locations = given[3].get_shape();
    outputs[0].set_shape(Kind::output(values, locations).to_shape());
    if (outputs[0].get_size() > 0) Kind::run(values, locations, Inputs(given), outputs[0].data<float>());
    return true;
  }
};

struct MsDeformAttn {
  static constexpr const char* name = "ms_deform_attn";
  static ov::PartialShape output(const ov::PartialShape& value, const ov::PartialShape& locations) {
    return {value[0], locations[1], value[2] * value[3]};
  }
  static void run(const ov::Shape& value, const ov::Shape& locations, const Inputs& of, float* output) {
    MsDeformAttnProblem problem{};
    problem.B = value[0], problem.S = value[1], problem.G = value[2], problem.C = value[3], problem.Q = locations[1];
    problem.L = locations[3], problem.P = locations[4], problem.K = problem.L * problem.P;
    const Geometry geometry(problem, of.shapes.data(), of.starts.data(), nullptr);
    auto a = arrays_of<float, float>(problem, geometry, of.values);
    a.locations = of.locations, a.weights = of.weights, a.output = output;
    run_forward(problem, Copies(problem, geometry, tbb::this_task_arena::max_concurrency()), a, parallel_for);
  }
};

struct DeformableAggregation {
  static constexpr const char* name = "deformable_aggregation";
  static ov::PartialShape output(const ov::PartialShape& features, const ov::PartialShape& locations) {
    return {features[0], locations[1], features[2]};
  }
  static void run(const ov::Shape& features, const ov::Shape& locations, const Inputs& of, float* output) {
    DeformableAggregationArrays<float, float, float> a{};
    a.B = features[0], a.S = features[1], a.C = a.feature_row = features[2];
    a.Q = locations[1], a.P = locations[2], a.V = locations[3], a.L = of.starts.size() / a.V, a.G = of.groups;
    a.level_shapes = of.shapes.data(), a.level_starts = of.starts.data();
    a.features = of.values, a.locations = of.locations, a.weights = of.weights, a.output = output;
    const auto run = best_kernels<DeformableAggregationKernels<float, float>>().forward_row;
    parallel_for(0, a.B * a.Q, 8, [&](int64_t begin, int64_t end) {
      Scratch<float> sums(a.C);
      for (int64_t row = begin; row < end; ++row) run(a, sums.data(), row);
    });
  }
};

template <typename Kind>
void add_to(std::vector<ov::Extension::Ptr>& extensions) {
  extensions.push_back(std::make_shared<ov::OpExtension<Operation<Kind>>>());
  extensions.push_back(std::make_shared<ov::frontend::onnx::OpExtension<Operation<Kind>>>(Kind::name, "visdet"));
}

std::vector<ov::Extension::Ptr> extensions() {
  std::vector<ov::Extension::Ptr> all;
  add_to<MsDeformAttn>(all), add_to<DeformableAggregation>(all);
  return all;
}

}  // namespace
}  // namespace visdet

OPENVINO_CREATE_EXTENSIONS(visdet::extensions())
