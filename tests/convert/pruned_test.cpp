// Pruning on the way: what is kept, by which hidden states, and that formats keep it.
#include "convert/conversion.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <set>
#include <tuple>

#include "convert/cases.hpp"
#include "convert/values.hpp"
#include "core/convert.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;

TEST(Convert, PrunedMatricesHaveTwoOfFour) {
  std::map<PruneMethod, double> errors;
  for (const PruneMethod method : {PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs}) {
    const TemporaryFolder folder;
    const std::string out = folder / "out";
    const ConversionReport report =
        convert_checkpoint(cpu(), tiny_moe, out, pruned("bf16", method));
    const Checkpoint after = Checkpoint::open(out);
    WeightError sum;
    std::int64_t tokens = 0;
    for (const ConvertedExpertReport& expert : report.experts) {
      for (const WeightError& error : expert.errors) sum.add(error);
      tokens += expert.tokens;
    }
    EXPECT_EQ(tokens, method == PruneMethod::magnitude ? -64 : 4 * 256 * 4);
    errors[method] = sum.relative();
    for (int layer = 0; layer < 4; ++layer) {
      const ExpertWeights experts = after.weights(layer).experts;
      for (const auto* list : {&experts.gate, &experts.up, &experts.down}) {
        for (const Tensor& matrix : *list) {
          const std::vector<float> values = values_of(matrix);
          for (std::size_t i = 0; i < values.size(); i += 4) {
            ASSERT_LE(std::count_if(values.begin() + std::ptrdiff_t(i),
                                    values.begin() + std::ptrdiff_t(i + 4),
                                    [](float value) { return value != 0; }),
                      2);
          }
        }
      }
    }
  }
  // The weights themselves change least by magnitude.
  EXPECT_LT(errors[PruneMethod::magnitude], errors[PruneMethod::wanda]);
  EXPECT_LT(errors[PruneMethod::wanda], errors[PruneMethod::obs]);
}

// sparse_nvfp4 keeps what pruning chose, not the two largest of what was there.
TEST(Convert, SparseFormatKeepsWhatPruningKept) {
  const TemporaryFolder folder;
  convert_checkpoint(cpu(), tiny_moe, folder / "wanda", pruned("sparse_nvfp4", PruneMethod::wanda));
  convert_checkpoint(cpu(), tiny_moe, folder / "plain", pruned("bf16", PruneMethod::wanda));
  const SafetensorsFile file = SafetensorsFile::open(folder / "wanda/model.safetensors");
  const std::vector<float> kept =
      values_of(Checkpoint::open(folder / "plain").weights(1).experts.up[4]);
  const Tensor positions = file.get("model.layers.1.mlp.experts.4.up_proj.weight_positions");
  ASSERT_EQ(positions.describe(), "u8 [128, 32]");
  for (std::size_t n = 0; n < 128; ++n) {
    for (std::size_t g = 0; g < 64; ++g) {
      const int bits = positions.as<const std::uint8_t>()[n * 32 + g / 2] >> (g % 2 * 4);
      const std::set<std::size_t> places = {static_cast<std::size_t>(bits & 3),
                                            static_cast<std::size_t>(bits >> 2 & 3)};
      EXPECT_EQ(places.size(), 2u);
      for (std::size_t i = 0; i < 4; ++i) {
        if (kept[n * 256 + g * 4 + i] != 0) {
          EXPECT_TRUE(places.contains(i)) << n << " " << g;
        }
      }
    }
  }
}

// What is left of NVFP4's codes keeps its scales: nothing is rounded anew, dense or sparse, nor on
// the way back. (Dense, compressed-tensors' alone: it writes a divisor, which ModelOpt's global
// scales need not have.)
TEST(Convert, PrunedNvfp4KeepsItsCodes) {
  const std::string quantised = SHUNT_SOURCE_DIR "/tests/data/quantised/";
  for (const auto& [source, format] : {std::pair("nvfp4_compressed", "sparse_nvfp4"),
                                       {"nvfp4_compressed", "nvfp4"},
                                       {"nvfp4_modelopt", "sparse_nvfp4"}}) {
    SCOPED_TRACE(std::string(source) + " to " + format);
    const TemporaryFolder folder;
    const auto before = all_values(Checkpoint::open(quantised + source));
    convert_checkpoint(cpu(), quantised + source, folder / "out",
                       pruned(format, PruneMethod::magnitude));
    const auto now = all_values(Checkpoint::open(folder / "out"));
    ASSERT_EQ(now.size(), before.size());
    std::size_t left = 0;
    for (std::size_t m = 0; m < now.size(); ++m) {
      for (std::size_t i = 0; i < now[m].size(); ++i) {
        if (now[m][i] == 0) continue;
        ++left;
        ASSERT_EQ(now[m][i], before[m][i]) << "matrix " << m << ", weight " << i;
      }
    }
    EXPECT_GT(left, 0U);
    if (source == std::string("nvfp4_modelopt") || format == std::string("nvfp4")) continue;
    convert_checkpoint(cpu(), folder / "out", folder / "again", to("nvfp4"));
    EXPECT_EQ(all_values(Checkpoint::open(folder / "again")), now);
  }
}

// In pairs: what Blackwell's sparse tensor cores take, whichever method chose.
TEST(Convert, PairsAreAlignedAndShareAScale) {
  const std::string plain = golden("qwen3_moe"),
                    packed = SHUNT_SOURCE_DIR "/tests/data/quantised/nvfp4_compressed";
  for (const auto& [method, source, layer] : {std::tuple(PruneMethod::magnitude, plain, 1),
                                              {PruneMethod::wanda, plain, 1},
                                              {PruneMethod::obs, plain, 1},
                                              {PruneMethod::magnitude, packed, 0}}) {
    const TemporaryFolder folder;
    ConversionOptions options = pruned("sparse_nvfp4", method, PrunePattern::pairs);
    if (method != PruneMethod::magnitude) options.calibrate = plain + "/golden.safetensors";
    convert_checkpoint(cpu(), source, folder / "out", options);
    const Checkpoint after = Checkpoint::open(folder / "out");
    const LayerWeights weights = after.weights(layer);
    for (const auto list :
         {&ExpertWeights::packed_gate, &ExpertWeights::packed_up, &ExpertWeights::packed_down}) {
      for (const PackedMatrix& m : weights.experts.*list) {
        const auto* const places = m.positions.as<const std::uint8_t>();
        for (std::int64_t i = 0; i < m.positions.elements(); ++i) {
          for (const int four : {places[i] & 15, places[i] >> 4}) {
            ASSERT_TRUE(four == 0b0100 || four == 0b1110) << to_string(method) << " " << four;
          }
        }
        const auto* const scales = m.scales.as<const std::uint8_t>();
        const std::int64_t blocks = m.scales.shape[1];  // of a row; an odd last one has its own
        for (std::int64_t row = 0; row < m.scales.shape[0]; ++row) {
          for (std::int64_t b = 0; b + 1 < blocks; b += 2) {
            ASSERT_EQ(scales[row * blocks + b], scales[row * blocks + b + 1]) << to_string(method);
          }
        }
      }
    }
  }
}

// What pruning keeps has the same codes and scales dense or sparse: one and the same weights.
void check_codes(PruneMethod method, PrunePattern pattern) {
  SCOPED_TRACE(to_string(pattern) + " by " + to_string(method));
  const TemporaryFolder folder;
  const std::string in = golden("qwen3_moe");
  const auto make = [&](const std::string& format) {
    ConversionOptions options = pruned(format, method, pattern);
    if (method != PruneMethod::magnitude) {
      options.calibrate = golden("qwen3_moe/golden.safetensors");
    }
    return convert_checkpoint(cpu(), in, folder / format, options);
  };
  const ConversionReport sparse = make("sparse_nvfp4"), dense = make("nvfp4");
  const Checkpoint a = Checkpoint::open(folder / "sparse_nvfp4"),
                   b = Checkpoint::open(folder / "nvfp4");
  const ExpertWeights first = a.weights(1).experts, second = b.weights(1).experts;
  for (std::size_t e = 0; e < first.packed_down.size(); ++e) {
    for (const auto list : {&ExpertWeights::packed_up, &ExpertWeights::packed_down}) {
      const PackedMatrix &x = (first.*list)[e], &y = (second.*list)[e];
      std::vector<float> one(static_cast<std::size_t>(x.n * x.k)), other(one.size());
      unpack(x, view(one.data(), {x.n, x.k}));
      unpack(y, view(other.data(), {x.n, x.k}));
      for (std::size_t i = 0; i < one.size(); ++i) {
        // compressed-tensors' divisor is rounded.
        ASSERT_NEAR(one[i], other[i], std::fabs(one[i]) * 0x1p-21F);
      }
    }
  }
  for (std::size_t i = 0; i < sparse.experts.size(); ++i) {
    EXPECT_EQ(sparse.experts[i].errors[0].relative(), dense.experts[i].errors[0].relative());
  }
}

TEST(Convert, PrunedWeightsAreTheSameDenseOrSparse) {
  for (const PruneMethod method : {PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs}) {
    check_codes(method, PrunePattern::two_of_four);
    check_codes(method, PrunePattern::pairs);
  }
}

// obs rounds on the way, to codes under a global scale of its own: it fits weights of any size, so
// that four bits cost little beside what pruning does.
TEST(Convert, ObsRoundsUnderAScaleThatFits) {
  const TemporaryFolder folder;
  const std::string in = folder / "in";
  fs::create_directory(in);
  fs::copy_file(tiny_moe + "/config.json", in + "/config.json");
  const SafetensorsFile whole = SafetensorsFile::open(tiny_moe + "/model.safetensors");
  std::list<std::vector<std::uint16_t>> scaled;
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : whole.names()) {
    Tensor tensor = whole.get(name);
    if (name.find(".experts.") != std::string::npos) {
      ASSERT_EQ(tensor.dtype, DType::bf16);
      auto& numbers = scaled.emplace_back();
      for (std::int64_t i = 0; i < tensor.elements(); ++i) {
        numbers.push_back(f32_to_bf16(0x1p-20F * bf16_to_f32(tensor.as<const std::uint16_t>()[i])));
      }
      tensor.data = numbers.data();
    }
    tensors.emplace_back(name, tensor);
  }
  write_safetensors(in + "/model.safetensors", tensors, {{"format", "pt"}});
  const auto error = [&](const std::string& format) {
    WeightError sum;
    for (const ConvertedExpertReport& expert :
         convert_checkpoint(cpu(), in, folder / format, pruned(format, PruneMethod::obs)).experts) {
      for (const WeightError& each : expert.errors) sum.add(each);
    }
    return sum.relative();
  };
  const double pruned_alone = error("bf16"), rounded = error("sparse_nvfp4");
  EXPECT_GT(rounded, pruned_alone);
  EXPECT_LT(rounded, 1.05 * pruned_alone);
}

// DeepSeek-V4's first layer: its experts are those that token ids say.
TEST(Convert, LayersRoutedByTokenIdsAreCalibratedByThem) {
  const TemporaryFolder folder;
  const std::string in = golden("deepseek_v4"), ids = "model.layers.0.mlp.token_ids";
  const SafetensorsFile recorded = SafetensorsFile::open(in + "/golden.safetensors");
  ConversionOptions options = pruned("sparse_nvfp4", PruneMethod::obs);
  options.calibrate = recorded.path();
  const ConversionReport report = convert_checkpoint(cpu(), in, folder / "out", options);
  for (const int layer : {0, 1}) {
    const Tensor chosen =
        recorded.get("model.layers." + std::to_string(layer) + ".mlp.gate.gate_out.2");
    std::vector<std::int64_t> counts(12);
    for (std::int64_t i = 0; i < chosen.elements(); ++i) {
      ++counts.at(static_cast<std::size_t>(chosen.as<const std::int64_t>()[i]));
    }
    for (std::size_t e = 0; e < counts.size(); ++e) {
      const auto at = static_cast<std::size_t>(layer) * counts.size() + e;
      EXPECT_EQ(report.experts.at(at).tokens, counts[e]) << layer << " " << e;
    }
  }

  const auto refused = [&](const Tensor& given) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const std::string& name : recorded.names()) {
      if (name != ids) tensors.emplace_back(name, recorded.get(name));
    }
    if (given) tensors.emplace_back(ids, given);
    options.calibrate = folder / "hidden.safetensors";
    write_safetensors(options.calibrate, tensors, {});
    const std::string text =
        error_of([&] { convert_checkpoint(cpu(), in, folder / "second", options); });
    EXPECT_FALSE(fs::exists(folder / "second.partial")) << text;
    EXPECT_NE(text.find("hidden.safetensors"), std::string::npos) << text;
    return text;
  };
  EXPECT_NE(refused({}).find("no tensor '" + ids + "'"), std::string::npos);
  std::vector<std::int64_t> given(24);
  EXPECT_NE(refused(view(given.data(), {23})).find("is i64 [23]: must be i32 or i64 [24]"),
            std::string::npos);
  given[5] = 64;
  EXPECT_NE(refused(view(given.data(), {24})).find("has 64 at [5]: must be 0 to 63"),
            std::string::npos);
  given[5] = -1;
  EXPECT_NE(refused(view(given.data(), {24})).find("has -1 at [5]"), std::string::npos);
}

}  // namespace
}  // namespace shunt::test
