// Runs a driving model on the frames of a drive, and writes the outputs of each: drive FOLDER OUT FRAME.pt ...
//
// FOLDER is the result of `visdet export --format aoti`, and frames are those of examples/drive.py, which draws the
// outputs. The state after each frame goes into the next.
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>

#include "model.h"

// Returns the tensors of a dict that torch.save has written.
Tensors read_frame(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  Tensors frame;
  for (const auto& part : torch::jit::pickle_load(bytes).toGenericDict())
    frame[part.key().toStringRef()] = part.value().toTensor();
  return frame;
}

// Writes pairs of names and tensors, of which torch.load and dict make a dict.
void write(const Tensors& outputs, const std::string& path) {
  std::vector<c10::IValue> pairs;
  for (const auto& [name, value] : outputs) pairs.push_back(c10::ivalue::Tuple::create({name, value.cpu()}));
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(pairs)));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), bytes.size());
  file.close();
  TORCH_CHECK(file, "cannot write ", path);
}

// Returns the state before the first frame, which is zeros.
Tensors empty_state(Model& model, int64_t batch) {
  Tensors state;
  for (const std::string& name : model.texts("states")) {
    std::vector<int64_t> shape;
    for (const std::string& size : model.texts("inputs." + name + ".shape"))
      shape.push_back(size == "batch" ? batch : std::stoll(size));
    state[name] = at::zeros(shape, c10::getStringToDtypeMap().at(model.facts["inputs." + name + ".type"]));
  }
  return state;
}

void drive(int argc, char** argv) {
  TORCH_CHECK(argc > 3, "usage: drive FOLDER OUT FRAME.pt ...");
  Model model(argv[1]);
  Tensors state, previous;
  for (const std::filesystem::path path : std::vector<std::string>(argv + 3, argv + argc)) {
    const Tensors frame = read_frame(path);
    const auto part = [&](const std::string& name) { return named(frame, name, path); };
    if (previous.empty()) {
      previous = frame;
      previous["scene"] = part("scene") - 1;
      state = empty_state(model, part("scene").size(0));
    }
    Tensors inputs = frame;
    inputs.insert(state.begin(), state.end());
    inputs["previous_to_current"] = at::linalg_inv(part("pose")).matmul(previous["pose"]).to(at::kFloat);
    inputs["seconds"] = (part("time") - previous["time"]).to(at::kFloat);
    inputs["same_scene"] = part("scene") == previous["scene"];
    const Tensors outputs = model.run(inputs, path);
    for (auto& [name, value] : state) value = outputs.at("next_" + name);
    write(outputs, argv[2] / path.filename());
    previous = frame;
  }
}

int main(int argc, char** argv) {
  return status_of("drive", [=] { drive(argc, argv); });
}
