// Prints the objects that a detector finds in an image: detect FOLDER IMAGE [SCORE]
//
// FOLDER is the result of `visdet export --format aoti`. Each line has a class, a score and a box (x1, y1, x2, y2) in
// pixels of the image. Objects of a lower SCORE, by default 0.3, are left out.
#include <iostream>
#include <set>

#include "image.h"
#include "model.h"

const std::string kPipeline = "preprocessing.pipeline";
const std::set<std::string> kTransforms = {"LoadImageFromFile", "LoadAnnotations", "Resize", "PackDetInputs"};

// The size that the pipeline of the config gives an image.
std::pair<int64_t, int64_t> resized(const Model& model, double height, double width) {
  for (const std::string& transform : model.texts(kPipeline)) {
    if (!kTransforms.count(transform)) throw std::runtime_error("this program lacks the transform " + transform);
  }
  if (!model.says(kPipeline + ".Resize")) return {height, width};
  const auto scale = model.numbers(kPipeline + ".Resize.scale");
  if (model.texts(kPipeline + ".Resize.keep_ratio")[0] != "True") return {scale[1], scale[0]};
  const double factor = std::min(std::max(scale[0], scale[1]) / std::max(height, width),
                                 std::min(scale[0], scale[1]) / std::min(height, width));
  return {height * factor + 0.5, width * factor + 0.5};
}

// How many pixels make a side one that the model takes.
int64_t padding(const Model& model, const std::string& side, int axis, int64_t pixels) {
  const std::string divisor = "preprocessing.data_preprocessor.pad_size_divisor", range = "ranges." + side;
  const int64_t unit = model.says(divisor) ? int64_t(model.numbers(divisor)[0]) : 1;
  const std::string least = model.says(range) ? model.texts(range)[0] : model.texts("inputs.images.shape")[axis];
  return std::max<int64_t>((pixels + unit - 1) / unit * unit, std::stoll(least)) - pixels;
}

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: detect FOLDER IMAGE [SCORE]");
  Model model(argv[1]);
  const double least = argc > 3 ? std::stod(argv[3]) : 0.3;
  at::Tensor image = read_image(argv[2]);
  const double height = image.size(2), width = image.size(3);
  const auto [H, W] = resized(model, height, width);
  image = model.normalised(at::upsample_bilinear2d(image, {H, W}, false));
  image = at::constant_pad_nd(image, {0, padding(model, "width", 3, W), 0, padding(model, "height", 2, H)});
  Tensors found = model.run({{"images", image}, {"image_sizes", at::tensor({H, W}).view({1, 2})}});
  const auto classes = model.texts("classes");
  for (int64_t k = 0; k < found["scores"].size(1); ++k) {
    const double score = found["scores"][0][k].item<double>();
    if (score < least) continue;
    std::printf("%s %.4f", classes.at(found["labels"][0][k].item<int64_t>()).c_str(), score);
    for (int64_t i = 0; i < 4; ++i) {
      std::printf(" %.2f", found["bboxes"][0][k][i].item<double>() * (i % 2 ? height / H : width / W));
    }
    std::printf("\n");
  }
} catch (const std::exception& error) {
  std::cerr << "detect: " << error.what() << "\n";
  return 1;
}
