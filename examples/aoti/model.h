// A model exported by `visdet export --format aoti`, as a function of named tensors. All that is known of it is in the
// package itself.
#pragma once
#include <ATen/ATen.h>
#include <ATen/DynamicLibrary.h>
#include <openssl/evp.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <regex>
#include <sstream>

using Tensors = std::unordered_map<std::string, at::Tensor>;

// Returns a tensor by its name.
inline const at::Tensor& named(const Tensors& tensors, const std::string& name, const std::string& where) {
  TORCH_CHECK(tensors.count(name), where, " lacks ", name);
  return tensors.at(name);
}

// Returns the content of a file.
inline std::string content_of(const std::filesystem::path& path) {
  TORCH_CHECK(exists(path), path.parent_path().string(), " lacks ", path.filename().string());
  std::string content(file_size(path), '\0');
  TORCH_CHECK(std::ifstream(path, std::ios::binary).read(content.data(), content.size()), "cannot read ",
              path.string());
  return content;
}

// Refuses a file of the model that is not the one which model.json describes. Older ones have no SHA-256.
inline void check_model(const std::filesystem::path& path) {
  const std::string content = content_of(path), described = content_of(path.parent_path() / "model.json");
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  EVP_Digest(content.data(), content.size(), digest, &length, EVP_sha256(), nullptr);
  std::ostringstream found;
  for (unsigned int i = 0; i < length; ++i) found << std::hex << std::setfill('0') << std::setw(2) << int(digest[i]);
  std::smatch expected;
  TORCH_CHECK(!std::regex_search(described, expected, std::regex("\"model.pt2\":\\s*\"([0-9a-f]{64})\"")) ||
                  expected[1] == found.str(),
              path.string(), " is not the file that model.json describes: its SHA-256 is another one");
}

// Returns the exit status of a program. An error is a line, and so is one of the last writes to the output.
inline int status_of(const std::string& program, const std::function<void()>& run) try {
  run();
  TORCH_CHECK(std::cout.flush(), "cannot write the output");
  return 0;
} catch (const c10::Error& error) {
  std::cerr << program << ": " << error.what_without_backtrace() << "\n";
  return 1;
} catch (const std::exception& error) {
  std::cerr << program << ": " << error.what() << "\n";
  return 1;
}

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
  // Returns whether a tensor has the sizes of model.json, of which names are those that may change. ``known`` are those
  // that inputs before it have.
  bool fits(const at::Tensor& tensor, const std::string& name, std::unordered_map<std::string, int64_t>& known) {
    const auto fit = [&](const std::string& size, int64_t found) {
      if (!std::isalpha(size[0])) return std::stoll(size) == found;
      const auto range = numbers("ranges." + size);
      return (range.empty() || (range[0] <= found && found <= range[1])) &&
             known.emplace(size, found).first->second == found;
    };
    const auto sizes = texts("inputs." + name + ".shape");
    return std::equal(sizes.begin(), sizes.end(), tensor.sizes().begin(), tensor.sizes().end(), fit);
  }
  // Returns the outputs. Errors begin with where the inputs come from: a package would read other types and sizes in
  // silence.
  Tensors run(const Tensors& inputs, const std::string& where) {
    std::vector<at::Tensor> given;
    std::unordered_map<std::string, int64_t> known;
    for (const auto& name : texts("inputs")) {
      const at::Tensor& tensor = named(inputs, name, where);
      const std::string& type = facts["inputs." + name + ".type"];
      TORCH_CHECK(tensor.scalar_type() == c10::getStringToDtypeMap().at(type), where, ": ", name,
                  " must be a tensor of ", type, ", got ", c10::getDtypeNames(tensor.scalar_type()).first);
      TORCH_CHECK(fits(tensor, name, known), where, ": ", name, " has the sizes ", tensor.sizes(),
                  ", which model.json does not allow");
      given.push_back(tensor.to(facts["AOTI_DEVICE_KEY"]).contiguous());
    }
    const std::vector<at::Tensor> results = loader.run(given);
    Tensors outputs;
    for (size_t i = 0; const auto& name : texts("outputs")) outputs[name] = results[i++];
    return outputs;
  }
  // The operators register themselves with torch. The library of CUDA needs that of the CPU, which declares them.
  static std::string with_operators(const std::filesystem::path& folder) {
    check_model(folder / "model.pt2");
    for (const auto& name : {"libvisdet_cpu.so", "libvisdet_cuda.so"})
      if (exists(folder / name)) at::DynamicLibrary((folder / name).c_str(), nullptr, /*leak_handle=*/true);
    return folder / "model.pt2";
  }
  torch::inductor::AOTIModelPackageLoader loader;
  std::unordered_map<std::string, std::string> facts;
};
