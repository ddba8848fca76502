// Quantised checkpoints of tests/data/quantised with something changed.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/golden.hpp"
#include "checkpoint/temporary.hpp"

namespace shunt::test {

inline const std::string quantised_folder = SHUNT_SOURCE_DIR "/tests/data/quantised";

using Tensors = std::map<std::string, Tensor>;
using Json = nlohmann::json;

// `data` as a dense tensor of any rank.
inline Tensor of_shape(const void* data, DType dtype, const std::vector<std::int64_t>& shape) {
  Tensor t = view(data, dtype, {});
  t.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    t.shape[d] = shape[d];
    t.strides[d] = stride;
    stride *= shape[d];
  }
  return t;
}

// A copy of `name` whose config.json `change` has changed.
inline std::string changed(const TemporaryFolder& at, const char* name,
                           const std::function<void(nlohmann::json&)>& change) {
  const std::string from = quantised_folder + "/" + name;
  nlohmann::json config = nlohmann::json::parse(read_file(from + "/config.json"));
  change(config);
  write_file(at / "config.json", config.dump());
  write_file(at / "model.safetensors", read_file(from + "/model.safetensors"));
  return at.path();
}

// The same, and `change` has changed its tensors.
inline std::string rewritten(const TemporaryFolder& at, const char* name,
                             const std::function<void(Json&)>& change_config,
                             const std::function<void(Tensors&)>& change) {
  changed(at, name, change_config);
  const SafetensorsFile file =
      SafetensorsFile::open(quantised_folder + "/" + name + "/model.safetensors");
  Tensors tensors;
  for (const std::string& tensor : file.names()) tensors.emplace(tensor, file.get(tensor));
  change(tensors);
  write_safetensors(at / "model.safetensors", {tensors.begin(), tensors.end()}, {{"format", "pt"}});
  return at.path();
}

inline const std::string gate = "model.layers.0.mlp.experts.0.gate_proj";

// One field of quantization_config (a JSON pointer) set, or with an empty value erased, and all
// tensors that end so removed. The message, empty where it is read.
struct Edit {
  const char* name;
  const char* field;
  const char* value;
  const char* without;
  std::string message;
};

inline void check_edits(const std::vector<Edit>& edits) {
  for (const Edit& e : edits) {
    SCOPED_TRACE(fmt::format("{}: {} = {}, without {}", e.name, e.field, e.value, e.without));
    const TemporaryFolder at;
    const auto configure = [&](Json& config) {
      Json& object = config["quantization_config"];
      if (*e.field == '\0') return;
      if (*e.value == '\0') {
        object.erase(e.field + 1);
      } else {
        object[Json::json_pointer(e.field)] = Json::parse(e.value);
      }
    };
    rewritten(at, e.name, configure, [&](Tensors& tensors) {
      std::erase_if(tensors, [&](const auto& item) {
        return *e.without != '\0' && item.first.ends_with(e.without);
      });
    });
    const std::string message = error_of([&] { (void)Checkpoint::open(at.path()).weights(0); });
    if (e.message.empty()) {
      EXPECT_EQ(message, std::string());
    } else {
      EXPECT_NE(message.find(e.message), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos);
    }
  }
}

// What experts of the fixture decode to must be what the changed checkpoint's decode to.
inline void expect_same_values(const std::string& changed_folder, const char* name) {
  const Checkpoint here = Checkpoint::open(changed_folder);
  const Checkpoint fixture = Checkpoint::open(quantised_folder + "/" + name);
  const LayerWeights now_all = here.weights(0), then_all = fixture.weights(0);
  const ExpertWeights &now = now_all.experts, &then = then_all.experts;
  ASSERT_EQ(now.packed_down.size(), then.packed_down.size());
  for (std::size_t e = 0; e < then.packed_down.size(); ++e) {
    const PackedMatrix& a = now.packed_down[e];
    const PackedMatrix& b = then.packed_down[e];
    std::vector<float> got(static_cast<std::size_t>(a.n * a.k)), wanted(got.size());
    unpack(a, view(got.data(), {a.n, a.k}));
    unpack(b, view(wanted.data(), {b.n, b.k}));
    EXPECT_EQ(got, wanted);
  }
}

}  // namespace shunt::test
