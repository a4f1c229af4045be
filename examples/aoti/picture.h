// Pictures as visdet reads them in Python: RGB of 8 bits, turned as their EXIF data say.
#pragma once
#include <ATen/ATen.h>
#include <png.h>

#include <cstdio>
#include <iostream>
#include <string_view>
// These need cstdio.
#include <jerror.h>
#include <jpeglib.h>

using std::string_view_literals::operator""sv;

// Ends the program. libjpeg and libpng want that their handlers of errors do not return.
[[noreturn]] inline void refuse(const void* path, const char* reason) {
  std::cerr << "cannot read " << static_cast<const char*>(path) << ": " << reason << "\n";
  std::exit(1);
}

[[noreturn]] inline void refuse_jpeg(j_common_ptr jpeg) {
  char message[JMSG_LENGTH_MAX];
  jpeg->err->format_message(jpeg, message);
  refuse(jpeg->client_data, message);
}

// libjpeg fills a file that ends too early with grey pixels, which Python refuses.
inline void refuse_cut_jpeg(j_common_ptr jpeg, int) {
  if (jpeg->err->msg_code == JWRN_JPEG_EOF) refuse_jpeg(jpeg);
}

[[noreturn]] inline void refuse_png(png_structp png, png_const_charp message) {
  refuse(png_get_error_ptr(png), message);
}

// Returns the orientation in EXIF data, from 1 to 8, or 1 without one.
inline int orientation(std::string_view exif) {
  const auto number = [exif](size_t start, size_t count) {
    uint32_t value = 0;
    for (size_t i = 0; i < count && start + count <= exif.size(); ++i)
      value = value << 8 | static_cast<uint8_t>(exif[exif[0] == 'I' ? start + count - 1 - i : start + i]);
    return value;
  };
  const size_t directory = number(4, 4);
  for (size_t entry = directory + 2; entry < directory + 2 + 12 * number(directory, 2); entry += 12)
    if (number(entry, 2) == 0x0112) {
      const uint32_t found = number(entry + 8, 2);
      return 1 <= found && found <= 8 ? found : 1;
    }
  return 1;
}

// Returns pixels [H, W, 3] turned as an orientation says.
inline at::Tensor turned(at::Tensor pixels, int orientation) {
  if (orientation >= 5) pixels = pixels.transpose(0, 1);
  const int mirrored = (orientation - 1) % 4;  // not, left and right, both, top and bottom
  if (mirrored >= 2) pixels = pixels.flip(0);
  if (mirrored == 1 || mirrored == 2) pixels = pixels.flip(1);
  return pixels.contiguous();
}

inline at::Tensor read_jpeg(FILE* file, const char* path) {
  jpeg_decompress_struct jpeg{};
  jpeg_error_mgr errors;
  jpeg.err = jpeg_std_error(&errors);
  errors.error_exit = refuse_jpeg;
  errors.emit_message = refuse_cut_jpeg;
  jpeg_create_decompress(&jpeg);
  jpeg.client_data = const_cast<char*>(path);
  jpeg_save_markers(&jpeg, JPEG_APP0 + 1, 0xFFFF);
  jpeg_stdio_src(&jpeg, file);
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = JCS_RGB;
  jpeg_start_decompress(&jpeg);
  const at::Tensor pixels = at::empty({jpeg.output_height, jpeg.output_width, 3}, at::kByte);
  for (JSAMPROW row = pixels.data_ptr<uint8_t>(); jpeg.output_scanline < jpeg.output_height;)
    row += 3 * jpeg.output_width * jpeg_read_scanlines(&jpeg, &row, 1);
  int found = 1;
  for (jpeg_saved_marker_ptr marker = jpeg.marker_list; marker && found == 1; marker = marker->next) {
    const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
    if (data.starts_with("Exif\0\0"sv)) found = orientation(data.substr(6));
  }
  jpeg_finish_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
  return turned(pixels, found);
}

inline at::Tensor read_png(FILE* file, const char* path) {
  png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, const_cast<char*>(path), refuse_png,
                                           [](png_structp, png_const_charp) {});
  png_infop info = png_create_info_struct(png);
  png_init_io(png, file);
  png_read_info(png, info);
  png_bytep exif = nullptr;
  png_uint_32 size = 0;
  png_get_eXIf_1(png, info, &size, &exif);
  const int found = orientation({reinterpret_cast<const char*>(exif), size});
  // Palettes and greys become colours, 16 bits lose the lower 8, and alpha is dropped.
  png_set_expand(png);
  png_set_strip_16(png);
  png_set_strip_alpha(png);
  png_set_gray_to_rgb(png);
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  const at::Tensor pixels = at::empty({png_get_image_height(png, info), png_get_image_width(png, info), 3}, at::kByte);
  std::vector<png_bytep> rows;
  for (int64_t y = 0; y < pixels.size(0); ++y) rows.push_back(pixels[y].data_ptr<uint8_t>());
  png_read_image(png, rows.data());
  png_read_end(png, nullptr);
  png_destroy_read_struct(&png, &info, nullptr);
  return turned(pixels, found);
}

// Returns a JPEG or a PNG as [H, W, 3] uint8. A file that is damaged or cut ends the program.
inline at::Tensor read_picture(const char* path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "rb"), std::fclose);
  TORCH_CHECK(file, "cannot read ", path);
  png_byte signature[8]{};
  const size_t length = std::fread(signature, 1, sizeof(signature), file.get());
  std::rewind(file.get());
  return length == 8 && !png_sig_cmp(signature, 0, 8) ? read_png(file.get(), path) : read_jpeg(file.get(), path);
}
