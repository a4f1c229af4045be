// Prints the class, the score and the box (x1, y1, x2, y2) in pixels of each object in an image, from SCORE (0.3) on:
// detect FOLDER IMAGE [SCORE], where FOLDER is the result of `visdet export --format aoti`.
#include <iostream>

#include "image.h"
#include "model.h"

// Returns the size that the pipeline of the config gives an image.
std::pair<int64_t, int64_t> resized(Model& model, double height, double width) {
  const std::string of = "preprocessing.pipeline";
  for (const std::string& name : model.texts(of))
    TORCH_CHECK(name == "LoadImageFromFile" || name == "LoadAnnotations" || name == "Resize" || name == "PackDetInputs",
                "this program lacks the transform ", name);
  const auto scale = model.numbers(of + ".Resize.scale");
  if (scale.empty()) return {height, width};
  if (model.facts[of + ".Resize.keep_ratio"] != "True") return {scale[1], scale[0]};
  const double factor = std::min(std::max(scale[0], scale[1]) / std::max(height, width),
                                 std::min(scale[0], scale[1]) / std::min(height, width));
  return {height * factor + 0.5, width * factor + 0.5};
}

// Returns how many pixels make a side one that the model takes.
int64_t padding(Model& model, const std::string& side, int axis, int64_t pixels) {
  const auto divisor = model.numbers("preprocessing.data_preprocessor.pad_size_divisor");
  const int64_t unit = divisor.empty() ? 1 : divisor[0];
  const auto range = model.texts("ranges." + side);
  const std::string least = range.empty() ? model.texts("inputs.images.shape")[axis] : range[0];
  return std::max<int64_t>((pixels + unit - 1) / unit * unit, std::stoll(least)) - pixels;
}

int main(int argc, char** argv) try {
  TORCH_CHECK(argc > 2, "usage: detect FOLDER IMAGE [SCORE]");
  Model model(argv[1]);
  at::Tensor image = read_image(argv[2]);
  const double height = image.size(2), width = image.size(3), least = argc > 3 ? std::stod(argv[3]) : 0.3;
  const auto [H, W] = resized(model, height, width);
  image = model.normalised(at::upsample_bilinear2d(image, {H, W}, false));
  image = at::constant_pad_nd(image, {0, padding(model, "width", 3, W), 0, padding(model, "height", 2, H)});
  Tensors found = model.run({{"images", image}, {"image_sizes", at::tensor({H, W}).view({1, 2})}});
  const auto scale = at::tensor({width / W, height / H}).repeat({2});
  const auto boxes = found["bboxes"][0].cpu() * scale, scores = found["scores"][0].cpu();
  for (int64_t k = 0; k < scores.size(0) && scores[k].item<double>() >= least; ++k) {
    const auto name = model.texts("classes").at(found["labels"][0][k].item<int64_t>());
    const double* box = boxes[k].data_ptr<double>();
    std::printf("%s %.4f %.2f %.2f %.2f %.2f\n", name.c_str(), scores[k].item<double>(), box[0], box[1], box[2],
                box[3]);
  }
} catch (const c10::Error& error) {
  std::cerr << "detect: " << error.what_without_backtrace() << "\n";
  return 1;
}
