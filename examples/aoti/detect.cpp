// Prints the class, the score and the box (x1, y1, x2, y2) in pixels of each object in a JPEG, from SCORE (0.3) on:
// detect FOLDER IMAGE [SCORE], where FOLDER is the result of `visdet export --format aoti`.
#include <cstdio>
#include <string_view>

#include "model.h"
// These need cstdio.
#include "jerror.h"
#include "jpeglib.h"

// Ends the program with the message of libjpeg.
void fail(j_common_ptr jpeg) {
  char message[JMSG_LENGTH_MAX];
  jpeg->err->format_message(jpeg, message);
  std::cerr << "detect: cannot read " << static_cast<const char*>(jpeg->client_data) << ": " << message << "\n";
  std::exit(1);
}

// libjpeg fills a file that ends too early with grey pixels, which Python refuses.
void refuse_cut_files(j_common_ptr jpeg, int) {
  if (jpeg->err->msg_code == JWRN_JPEG_EOF) fail(jpeg);
}

// Returns the orientation that the EXIF data of a JPEG say, from 1 to 8, or 1 without them.
int orientation(jpeg_saved_marker_ptr marker) {
  using std::string_view_literals::operator""sv;
  for (; marker; marker = marker->next) {
    const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
    if (!data.starts_with("Exif\0\0"sv)) continue;
    const auto number = [tiff = data.substr(6)](size_t start, size_t count) {
      uint32_t value = 0;
      for (size_t i = 0; i < count && start + count <= tiff.size(); ++i)
        value = value << 8 | static_cast<uint8_t>(tiff[tiff[0] == 'I' ? start + count - 1 - i : start + i]);
      return value;
    };
    const size_t directory = number(4, 4);
    for (size_t entry = directory + 2; entry < directory + 2 + 12 * number(directory, 2); entry += 12)
      if (number(entry, 2) == 0x0112) {
        const uint32_t found = number(entry + 8, 2);
        return 1 <= found && found <= 8 ? found : 1;
      }
  }
  return 1;
}

// Returns pixels [1, 3, H, W] turned as an orientation says.
at::Tensor turned(at::Tensor pixels, int orientation) {
  if (orientation >= 5) pixels = pixels.transpose(2, 3);
  if (orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8) pixels = pixels.flip(2);
  if (orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7) pixels = pixels.flip(3);
  return pixels.contiguous(at::MemoryFormat::ChannelsLast);
}

// Returns a JPEG as [1, 3, H, W] uint8, RGB, with one pixel after the other in memory, as in Python.
at::Tensor read_image(const char* path, bool ignores_orientation) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "rb"), std::fclose);
  TORCH_CHECK(file, "cannot read ", path);
  jpeg_decompress_struct jpeg{};
  jpeg_error_mgr errors;
  jpeg.err = jpeg_std_error(&errors);
  errors.error_exit = fail;
  errors.emit_message = refuse_cut_files;
  jpeg_create_decompress(&jpeg);
  jpeg.client_data = const_cast<char*>(path);
  jpeg_save_markers(&jpeg, JPEG_APP0 + 1, 0xFFFF);
  jpeg_stdio_src(&jpeg, file.get());
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = JCS_RGB;
  jpeg_start_decompress(&jpeg);
  const at::Tensor pixels = at::empty({jpeg.output_height, jpeg.output_width, 3}, at::kByte);
  for (JSAMPROW row = pixels.data_ptr<uint8_t>(); jpeg.output_scanline < jpeg.output_height;)
    row += 3 * jpeg.output_width * jpeg_read_scanlines(&jpeg, &row, 1);
  const int found = ignores_orientation ? 1 : orientation(jpeg.marker_list);
  jpeg_finish_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
  return turned(pixels.permute({2, 0, 1}).unsqueeze(0), found);
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

// Returns the number that a text is.
double number(const char* text) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  TORCH_CHECK(end != text && *end == 0 && std::isfinite(value), "SCORE must be a number, got ", text);
  return value;
}

void detect(int argc, char** argv) {
  TORCH_CHECK(argc > 2, "usage: detect FOLDER IMAGE [SCORE]");
  const double least = argc > 3 ? number(argv[3]) : 0.3;
  Model model(argv[1]);
  const auto& colour = model.facts["preprocessing.pipeline.LoadImageFromFile.color_type"];
  at::Tensor image = read_image(argv[2], colour == "color_ignore_orientation");
  const double height = image.size(2), width = image.size(3);
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
}

int main(int argc, char** argv) {
  return status_of("detect", [=] { detect(argc, argv); });
}
