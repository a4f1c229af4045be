// Prints the class, the score and the box (x1, y1, x2, y2) in pixels of each object in a JPEG, from SCORE (0.3) on:
// detect FOLDER IMAGE [SCORE], where FOLDER is the result of `visdet export --format aoti`.
#include <iostream>

#include "jpeglib.h"
#include "model.h"

// Returns a JPEG as [1, 3, H, W] uint8, RGB, with one pixel after the other in memory, as in Python.
at::Tensor read_image(const char* path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "rb"), std::fclose);
  TORCH_CHECK(file, "cannot read ", path);
  jpeg_decompress_struct jpeg{};
  jpeg_error_mgr errors;  // An error is printed and ends the program.
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&jpeg);
  jpeg_stdio_src(&jpeg, file.get());
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = JCS_RGB;
  jpeg_start_decompress(&jpeg);
  const at::Tensor pixels = at::empty({jpeg.output_height, jpeg.output_width, 3}, at::kByte);
  for (JSAMPROW row = pixels.data_ptr<uint8_t>(); jpeg.output_scanline < jpeg.output_height;)
    row += 3 * jpeg.output_width * jpeg_read_scanlines(&jpeg, &row, 1);
  jpeg_destroy_decompress(&jpeg);
  return pixels.permute({2, 0, 1}).unsqueeze(0);
}

// Returns the (height, width) that the pipeline of the config gives an image.
std::pair<int64_t, int64_t> resized(Model& model, double height, double width) {
  for (const std::string& name : model.texts("preprocessing.pipeline"))
    TORCH_CHECK(name == "LoadImageFromFile" || name == "LoadAnnotations" || name == "Resize" || name == "PackDetInputs",
                "this program lacks the transform ", name);
  const auto scale = model.numbers("preprocessing.pipeline.Resize.scale");
  if (scale.empty()) return {height, width};
  if (model.facts["preprocessing.pipeline.Resize.keep_ratio"] != "True") return {scale[1], scale[0]};
  const double factor = std::min(std::max(scale[0], scale[1]) / std::max(height, width),
                                 std::min(scale[0], scale[1]) / std::min(height, width));
  return {height * factor + 0.5, width * factor + 0.5};
}

// Returns pixels [1, 3, H, W] as the backbone wants them.
at::Tensor normalised(Model& model, at::Tensor pixels) {
  const bool is_rgb = model.facts["preprocessing.pipeline.LoadImageFromFile.channel_order"] == "rgb";
  if (is_rgb == (model.facts["preprocessing.data_preprocessor.bgr_to_rgb"] == "True")) pixels = pixels.flip(1);
  const auto mean = at::tensor(model.numbers("preprocessing.data_preprocessor.mean")).view({3, 1, 1});
  const auto std = at::tensor(model.numbers("preprocessing.data_preprocessor.std")).view({3, 1, 1});
  return ((pixels - mean) / std).to(at::kFloat);
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
  image = normalised(model, at::upsample_bilinear2d(image, {H, W}, false));
  image = at::constant_pad_nd(image, {0, padding(model, "width", 3, W), 0, padding(model, "height", 2, H)});
  Tensors found = model.run({{"images", image}, {"image_sizes", at::tensor({H, W}).view({1, 2})}}, argv[2]);
  const auto scale = at::tensor({width / W, height / H}).repeat({2});
  const auto boxes = found["bboxes"][0].cpu() * scale, scores = found["scores"][0].cpu();
  for (int64_t k = 0; k < scores.size(0) && scores[k].item<double>() >= least; ++k) {
    std::cout << model.texts("classes").at(found["labels"][0][k].item<int64_t>()) << " " << scores[k].item<double>();
    for (int side = 0; side < 4; ++side) std::cout << " " << boxes[k][side].item<double>();
    std::cout << "\n";
  }
} catch (const c10::Error& error) {
  std::cerr << "detect: " << error.what_without_backtrace() << "\n";
  return 1;
}
