// Images as tensors of torch.
#pragma once
#include <ATen/ATen.h>

#include <cstdio>
#ifdef HAS_JPEG
#include <jpeglib.h>
#endif

// Returns a binary PPM or, with libjpeg, a JPEG as [1, 3, H, W] uint8 in the order red, green, blue. In memory, one
// pixel stands after the other, as in Python: torch resizes other layouts by other sums.
inline at::Tensor read_image(const std::string& path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  TORCH_CHECK(file, "cannot read ", path);
  at::Tensor pixels;
  int H = 0, W = 0;
  if (std::fscanf(file.get(), "P6 %d %d 255", &W, &H) == 2 && std::fgetc(file.get()) != EOF) {
    pixels = at::empty({H, W, 3}, at::kByte);
    TORCH_CHECK(std::fread(pixels.data_ptr(), 3 * W, H, file.get()) == size_t(H), path, " ends too early");
#ifdef HAS_JPEG
  } else {
    std::rewind(file.get());
    jpeg_decompress_struct jpeg{};
    jpeg_error_mgr errors;  // An error is printed and ends the program.
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_decompress(&jpeg);
    jpeg_stdio_src(&jpeg, file.get());
    jpeg_read_header(&jpeg, TRUE);
    jpeg.out_color_space = JCS_RGB;
    jpeg_start_decompress(&jpeg);
    pixels = at::empty({jpeg.output_height, jpeg.output_width, 3}, at::kByte);
    for (JSAMPROW row = pixels.data_ptr<uint8_t>(); jpeg.output_scanline < jpeg.output_height;)
      row += 3 * jpeg.output_width * jpeg_read_scanlines(&jpeg, &row, 1);
    jpeg_destroy_decompress(&jpeg);
#endif
  }
  TORCH_CHECK(pixels.defined(), path, " is no binary PPM, and this program was built without libjpeg");
  return pixels.permute({2, 0, 1}).unsqueeze(0);
}
