// A model exported by `visdet export --format aoti`, as a function of named tensors.
#pragma once
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <filesystem>
#include <sstream>

using Tensors = std::unordered_map<std::string, at::Tensor>;

struct Model {
  explicit Model(const std::string& folder) : loader(with_operators(folder)), facts(loader.get_metadata()) {}

  // What model.json has under a name, such as "ranges.height", line by line, or nothing. A dict has its names.
  std::vector<std::string> texts(const std::string& name) {
    std::vector<std::string> found;
    std::istringstream lines(facts[name]);
    for (std::string line; std::getline(lines, line);) found.push_back(line);
    return found;
  }
  std::vector<double> numbers(const std::string& name) {
    std::istringstream lines(facts[name]);
    return {std::istream_iterator<double>(lines), {}};
  }
  // Pixels [..., 3, H, W] in the order red, green, blue as the backbone wants them.
  at::Tensor normalised(at::Tensor pixels) {
    const std::string of = "preprocessing.data_preprocessor.";
    const bool is_rgb = facts["preprocessing.pipeline.LoadImageFromFile.channel_order"] == "rgb";
    if (is_rgb == (facts[of + "bgr_to_rgb"] == "True")) pixels = pixels.flip(-3);
    const auto of_channels = [&](const char* name) { return at::tensor(numbers(of + name)).view({3, 1, 1}); };
    return ((pixels - of_channels("mean")) / of_channels("std")).to(at::kFloat);
  }
  Tensors run(const Tensors& inputs) {
    std::vector<at::Tensor> given;
    for (const auto& name : texts("inputs")) given.push_back(inputs.at(name).to(facts["AOTI_DEVICE_KEY"]));
    const std::vector<at::Tensor> results = loader.run(given);
    Tensors outputs;
    for (size_t i = 0; const auto& name : texts("outputs")) outputs[name] = results[i++];
    return outputs;
  }
  // The operators register themselves with torch. The library of CUDA needs that of the CPU, which declares them.
  static std::string with_operators(const std::filesystem::path& folder) {
    TORCH_CHECK(std::filesystem::exists(folder / "model.pt2"), folder.string(), " lacks model.pt2");
    for (const char* name : {"libvisdet_cpu.so", "libvisdet_cuda.so"}) {
      const auto path = std::filesystem::absolute(folder / name);
      TORCH_CHECK(!std::filesystem::exists(path) || dlopen(path.c_str(), RTLD_NOW), dlerror());
    }
    return folder / "model.pt2";
  }
  torch::inductor::AOTIModelPackageLoader loader;
  std::unordered_map<std::string, std::string> facts;
};
