// Prints the class, the score and the box of each object in a JPEG or a PNG, (x1, y1, x2, y2) or (cx, cy, w, h, angle):
// detect FOLDER PICTURE [SCORE], where FOLDER is the result of `visdet export --format aoti`, and SCORE replaces the
// thresholds of its model.json.
#include "model.h"
#include "picture.h"

// Returns the number that a text is.
double number(const char* text) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  TORCH_CHECK(end != text && *end == 0 && std::isfinite(value), "SCORE must be a number, got ", text);
  return value;
}

void detect(int argc, char** argv) {
  TORCH_CHECK(argc > 2, "usage: detect FOLDER PICTURE [SCORE]");
  const double score = argc > 3 ? number(argv[3]) : 0;
  Model model(argv[1]);
  TORCH_CHECK(model.facts["inputs"] == "picture", argv[1], " does not take a picture: export it without --no-embed");
  const std::vector<std::string> classes = model.texts("classes");
  std::vector<double> least = model.numbers("score_thresholds");
  if (argc > 3) least.assign(classes.size(), score);
  Tensors found = model.run({{"picture", read_picture(argv[2])}}, argv[2]);
  const at::Tensor boxes = found["bboxes"][0].cpu(), scores = found["scores"][0].cpu();
  const at::Tensor labels = found["labels"][0].cpu();
  for (int64_t k = 0; k < scores.size(0); ++k) {
    const int64_t label = labels[k].item<int64_t>();
    if (scores[k].item<double>() < least.at(label)) continue;
    std::cout << classes.at(label) << " " << scores[k].item<double>();
    for (int64_t side = 0; side < boxes.size(1); ++side) std::cout << " " << boxes[k][side].item<double>();
    std::cout << "\n";
  }
}

int main(int argc, char** argv) {
  return status_of("detect", [=] { detect(argc, argv); });
}
