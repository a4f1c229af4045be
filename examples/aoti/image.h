// Images of a camera or a disk as tensors of torch.
#pragma once

#include <ATen/ATen.h>

#include <cstdio>
#include <fstream>
#ifdef HAS_JPEG
#include <jpeglib.h>
#endif

// Returns a binary PPM or, if this was compiled with libjpeg, a JPEG as [1, 3, H, W] uint8 in the order red, green,
// blue. In memory, one pixel stands after the other, as in Python: torch resizes other layouts by other sums.
inline at::Tensor read_image(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  int H = 0, W = 0, header = 0;
  at::Tensor pixels;
  if (std::sscanf(bytes.c_str(), "P6 %d %d 255%n", &W, &H, &header) == 2 && H > 0 && W > 0 && header > 0 &&
      bytes.size() == header + 1 + size_t(3) * H * W) {
    pixels = at::empty({H, W, 3}, at::kByte);
    std::copy(bytes.begin() + header + 1, bytes.end(), static_cast<char*>(pixels.data_ptr()));
#ifdef HAS_JPEG
  } else if (bytes.compare(0, 2, "\xff\xd8") == 0) {
    jpeg_decompress_struct jpeg{};
    jpeg_error_mgr errors;  // An error is printed and ends the program.
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&jpeg);
    jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
    jpeg_read_header(&jpeg, TRUE);
    jpeg.out_color_space = JCS_RGB;
    jpeg_start_decompress(&jpeg);
    pixels = at::empty({jpeg.output_height, jpeg.output_width, 3}, at::kByte);
    while (jpeg.output_scanline < jpeg.output_height) {
      JSAMPROW row = pixels[jpeg.output_scanline].data_ptr<uint8_t>();
      jpeg_read_scanlines(&jpeg, &row, 1);
    }
    jpeg_destroy_decompress(&jpeg);
#endif
  } else {
    throw std::runtime_error(path +
                             " is no image that this program reads: a binary PPM, or a JPEG if CMake found JPEG");
  }
  return pixels.permute({2, 0, 1}).unsqueeze(0);
}
