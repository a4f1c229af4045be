// A model exported by `visdet export --format aoti`, as a function of named tensors.
#pragma once

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <filesystem>
#include <sstream>

using Tensors = std::unordered_map<std::string, at::Tensor>;

class Model {
 public:
  // folder: the result of the export.
  explicit Model(const std::filesystem::path& folder)
      : loader_(with_operators(folder) / "model.pt2"), facts_(loader_.get_metadata()) {}

  // What model.json says under a name, such as "ranges.height", line by line; of a dict, the names within it. The
  // transforms of the pipeline have their types as names.
  bool says(const std::string& name) const { return facts_.count(name) > 0; }
  std::vector<std::string> texts(const std::string& name) const {
    if (!says(name)) throw std::runtime_error("model.json of the export does not have " + name);
    std::vector<std::string> found;
    std::istringstream lines(facts_.at(name));
    for (std::string line; std::getline(lines, line);) found.push_back(line);
    return found;
  }
  std::vector<double> numbers(const std::string& name) const {
    std::vector<double> found;
    for (const std::string& line : texts(name)) found.push_back(std::stod(line));
    return found;
  }

  // Pixels [..., 3, H, W] in the order red, green, blue as the backbone wants them.
  at::Tensor normalised(const at::Tensor& pixels) const {
    const std::string order = "preprocessing.pipeline.LoadImageFromFile.channel_order",
                      of = "preprocessing.data_preprocessor.";
    const bool is_read_as_rgb = says(order) && texts(order)[0] == "rgb";
    const bool is_swapped = says(of + "bgr_to_rgb") && texts(of + "bgr_to_rgb")[0] == "True";
    const auto of_channels = [&](const char* name) { return at::tensor(numbers(of + name)).view({3, 1, 1}); };
    const at::Tensor ordered = is_read_as_rgb == is_swapped ? pixels.flip(-3) : pixels;
    return ((ordered - of_channels("mean")) / of_channels("std")).to(at::kFloat);
  }

  Tensors run(const Tensors& inputs) {
    std::vector<at::Tensor> given;
    for (const std::string& name : texts("inputs")) given.push_back(inputs.at(name).to(texts("AOTI_DEVICE_KEY")[0]));
    const std::vector<at::Tensor> results = loader_.run(given);
    const std::vector<std::string> names = texts("outputs");
    Tensors outputs;
    for (size_t i = 0; i < names.size(); ++i) outputs[names[i]] = results[i].cpu();
    return outputs;
  }

 private:
  // The operators register themselves with torch. The library of CUDA needs that of the CPU, which declares them.
  static const std::filesystem::path& with_operators(const std::filesystem::path& folder) {
    if (!std::filesystem::exists(folder / "model.pt2")) throw std::runtime_error(folder.string() + " lacks model.pt2");
    for (const char* name : {"libvisdet_cpu.so", "libvisdet_cuda.so"}) {
      const auto path = std::filesystem::absolute(folder / name);
      if (std::filesystem::exists(path) && !dlopen(path.c_str(), RTLD_NOW)) throw std::runtime_error(dlerror());
    }
    return folder;
  }

  torch::inductor::AOTIModelPackageLoader loader_;
  std::unordered_map<std::string, std::string> facts_;
};
