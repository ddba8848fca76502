// Numbers of a checkpoint that are none.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/golden.hpp"
#include "checkpoint/temporary.hpp"
#include "core/convert.hpp"
#include "shunt/checkpoint.hpp"

namespace shunt::test {
namespace {

// A router's NaN, or a bias's, would only choose other experts. Infinities may be meant.
TEST(Numbers, NaNInRoutersAndBiasesIsRefused) {
  for (const auto& [family, name, column] :
       {std::tuple("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "3, 7"),
        {"deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias", "5"},
        {"gpt_oss", "model.layers.0.mlp.router.bias", "1"},
        {"gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", "1, 2"}}) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder;
    const std::string from = golden(family), file = folder / "model.safetensors";
    std::filesystem::copy_file(from + "/config.json", folder / "config.json");
    const int layer = std::string_view(name).find("layers.1.") != std::string_view::npos ? 1 : 0;
    for (const bool infinite : {true, false}) {
      const SafetensorsFile source = SafetensorsFile::open(from + "/model.safetensors");
      std::vector<std::pair<std::string, Tensor>> tensors;
      std::vector<char> changed;
      for (const std::string& each : source.names()) {
        Tensor t = source.get(each);
        if (each == name) {
          const auto* const bytes = t.as<const char>();
          changed.assign(bytes, bytes + t.bytes());
          std::int64_t at = column[0] - '0';
          if (t.rank == 2) at = at * t.shape[1] + (column[3] - '0');
          store_f32(changed.data(), t.dtype, at, infinite ? -INFINITY : NAN);
          t.data = changed.data();
        }
        tensors.emplace_back(each, t);
      }
      write_safetensors(file, tensors);
      const std::string message =
          error_of([&] { (void)Checkpoint::open(folder.path()).weights(layer); });
      const std::string wanted =
          fmt::format("tensor '{}' holds NaN at [{}]: must be numbers", name, column);
      EXPECT_EQ(message.find(wanted) != std::string::npos, !infinite) << message;
      EXPECT_EQ(message.empty(), infinite);
    }
  }
}

}  // namespace
}  // namespace shunt::test
