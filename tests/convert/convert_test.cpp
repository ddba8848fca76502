// Checkpoints converted: what is in them, and what happens on the way.
#include "convert/conversion.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/temporary.hpp"
#include "convert/dialect.hpp"
#include "convert/values.hpp"
#include "core/convert.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const std::string tiny = SHUNT_SOURCE_DIR "/models/tiny-moe";
std::string golden(const std::string& family) {
  return SHUNT_SOURCE_DIR "/tests/data/goldens/" + family;
}

ConversionOptions to(const std::string& format) {
  return {.spec = conversion_from_string(format), .calibrate = {}};
}
ConversionOptions pruned(const std::string& format, PruneMethod method,
                         PrunePattern pattern = PrunePattern::two_of_four) {
  ConversionOptions options = to(format);
  options.spec.prune = true;
  options.spec.pruning.method = method;
  options.spec.pruning.pattern = pattern;
  if (method != PruneMethod::magnitude) options.calibrate = tiny + "/activations.safetensors";
  return options;
}

std::string bytes_of(const Tensor& tensor) {
  return {tensor.as<const char>(), static_cast<std::size_t>(tensor.bytes())};
}

// The names of a model's tensors that are of routed experts.
bool of_an_expert(const std::string& name) { return name.find("experts.") != std::string::npos; }

// Every file of a folder and its contents.
std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_file(entry.path().string());
  }
  return files;
}

// The model in three files with an index, tensors dealt out by turns.
void split_model(const std::string& source, const std::string& folder) {
  fs::create_directory(folder);
  fs::copy_file(source + "/config.json", folder + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(source + "/model.safetensors");
  std::array<std::vector<std::pair<std::string, Tensor>>, 3> shards;
  Json map = Json::object();
  std::size_t next = 0;
  for (const std::string& name : file.names()) {
    const std::size_t shard = next++ % 3;
    shards[shard].emplace_back(name, file.get(name));
    map[name] = "model-0000" + std::to_string(shard + 1) + "-of-00003.safetensors";
  }
  for (std::size_t i = 0; i < 3; ++i) {
    write_safetensors(folder + "/model-0000" + std::to_string(i + 1) + "-of-00003.safetensors",
                      shards[i], {{"format", "pt"}});
  }
  write_file(folder + "/model.safetensors.index.json",
             Json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
}

// Whatever the layout (merged, interleaved, transposed, flat), every weight lands where it was.
TEST(Convert, EveryFamilyKeepsItsWeightsInF32) {
  const Context context = cpu();
  int families = 0;
  for (const auto& entry : fs::directory_iterator(SHUNT_SOURCE_DIR "/tests/data/goldens")) {
    const std::string in = entry.path().string();
    SCOPED_TRACE(in);
    if (in.ends_with("_real")) continue;  // the same layouts, larger
    const TemporaryFolder folder;
    const std::string out = folder / "out";
    const ConversionReport report = convert_checkpoint(context, in, out, to("f32"));
    EXPECT_FALSE(fs::exists(out + ".partial"));
    const Checkpoint before = Checkpoint::open(in), after = Checkpoint::open(out);
    ASSERT_EQ(before.tensor_names(), after.tensor_names());
    std::size_t experts = 0;
    for (const CheckpointLayer& layer : before.layers()) {
      if (!layer.moe) continue;
      const ExpertWeights a = before.weights(layer.index).experts,
                          b = after.weights(layer.index).experts;
      experts += a.up.size();
      for (const auto member : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
        const std::vector<Tensor>&from = a.*member, &made = b.*member;
        ASSERT_EQ(from.size(), made.size());
        for (std::size_t e = 0; e < from.size(); ++e) {
          EXPECT_EQ(made[e].dtype, DType::f32);
          EXPECT_EQ(values_of(from[e]), values_of(made[e])) << "layer " << layer.index;
        }
      }
    }
    EXPECT_EQ(report.experts.size(), experts);
    for (const ConvertedExpertReport& expert : report.experts) {
      for (const WeightError& error : expert.errors) EXPECT_EQ(error.difference, 0);
    }
    ++families;
  }
  EXPECT_GT(families, 60);
}

TEST(Convert, CopiesEverythingElse) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  convert_checkpoint(cpu(), tiny, out, to("nvfp4"));
  EXPECT_EQ(read_file(out + "/heldout.txt"), read_file(tiny + "/heldout.txt"));
  EXPECT_FALSE(fs::exists(out + "/activations.safetensors")) << "recorded in another precision";
  const SafetensorsFile before = SafetensorsFile::open(tiny + "/model.safetensors"),
                        after = SafetensorsFile::open(out + "/model.safetensors");
  for (const std::string& name : before.names()) {
    if (of_an_expert(name)) {
      EXPECT_FALSE(after.contains(name)) << name;
    } else {
      EXPECT_EQ(bytes_of(before.get(name)), bytes_of(after.get(name))) << name;
    }
  }
}

// The tensors of every format, in a checkpoint whose sizes do not divide: hidden 64, width 48.
TEST(Convert, PackedTensorsAreThoseThatPackMakes) {
  const std::string in = golden("qwen3_moe");
  const Checkpoint source = Checkpoint::open(in);
  const ExpertWeights experts = source.weights(1).experts;
  for (const FormatSpec& given : known_formats()) {
    const FormatSpec format = resolved(given);
    SCOPED_TRACE(to_string(format));
    const TemporaryFolder folder;
    const std::string out = folder / "out";
    const ConversionReport report = convert_checkpoint(cpu(), in, out, to(to_string(format)));
    const SafetensorsFile file = SafetensorsFile::open(out + "/model.safetensors");
    const std::string module = "model.layers.1.mlp.experts.11.";
    const auto expect_matrix = [&](const std::string& name, const Tensor& matrix, float amax) {
      const Buffer memory = cpu().allocate(packed_bytes(format, matrix.shape[0], matrix.shape[1]));
      const bool global = format.format == Format::nvfp4 || format.format == Format::sparse_nvfp4 ||
                          format.format == Format::dense3;
      const PackedMatrix packed = pack(format, matrix, memory, global ? amax : 0);
      for (const DialectTensor& tensor : dialect_tensors({.format = format}, packed)) {
        const Tensor made = file.get(module + name + "." + tensor.plan.name);
        EXPECT_EQ(made.dtype, tensor.plan.dtype);
        EXPECT_EQ(bytes_of(made), std::string(tensor.bytes.begin(), tensor.bytes.end()))
            << name << tensor.plan.name;
      }
    };
    float amax = 0;  // gate and up share it
    for (const auto* list : {&experts.gate, &experts.up}) {
      for (const float value : values_of((*list)[11])) amax = std::max(amax, std::fabs(value));
    }
    expect_matrix("gate_proj", experts.gate[11], amax);
    expect_matrix("up_proj", experts.up[11], amax);
    expect_matrix("down_proj", experts.down[11], 0);

    const Json config = Json::parse(read_file(out + "/config.json"));
    ASSERT_TRUE(config.contains("quantization_config"));
    const Json& quantised = config["quantization_config"];
    const std::string method = quantised["quant_method"];
    const bool own = format.format == Format::dense3 || format.format == Format::sparse_nvfp4;
    EXPECT_EQ(method, own                                  ? "shunt"
                      : format.format == Format::fp8_block ? "fp8"
                                                           : "compressed-tensors");
    const Json& ignored =
        method == "compressed-tensors" ? quantised["ignore"] : quantised["modules_to_not_convert"];
    const std::set<std::string> modules(ignored.begin(), ignored.end());
    EXPECT_TRUE(modules.contains("model.layers.0.mlp.gate"));
    EXPECT_TRUE(modules.contains("model.layers.1.self_attn.q_proj"));
    EXPECT_TRUE(modules.contains("lm_head"));
    EXPECT_EQ(modules.size(), 2 * 5 + 1u);
    // 2 layers of 16 experts of 3 matrices of 64 x 48.
    EXPECT_EQ(report.experts_before, 2 * 16 * 3 * 64 * 48 * 2);
    EXPECT_LT(report.experts_after, report.experts_before);
    EXPECT_EQ(report.bytes_after,
              static_cast<std::int64_t>(fs::file_size(out + "/model.safetensors")));
  }
}

// What Shunt reads back is what it wrote, in every format: the packed matrices' exact values. The
// divisor that compressed-tensors stores for nvfp4 is a reciprocal, so that the scale read back may
// be off by a rounding of f32.
TEST(Convert, EveryFormatIsReadBack) {
  for (const std::string& model : {golden("qwen3_moe"), golden("mixtral_merged")}) {
    const Checkpoint source = Checkpoint::open(model);
    const LayerSpec spec = source.spec(0);
    const LayerWeights weights = source.weights(0);
    for (const FormatSpec& format : known_formats()) {
      SCOPED_TRACE(model + to_string(format));
      const TemporaryFolder folder;
      convert_checkpoint(cpu(), model, folder / "out", to(to_string(format)));
      const Checkpoint made = Checkpoint::open(folder / "out");
      EXPECT_EQ(made.spec(0), spec);
      const LayerWeights read = made.weights(0);
      EXPECT_TRUE(read.experts.up.empty());
      ASSERT_EQ(read.experts.packed_up.size(), weights.experts.up.size());
      for (int e = 0; e < spec.experts.experts; ++e) {
        const ConvertedExpert expert = convert_expert(cpu(), {.format = format}, spec, weights, e);
        const auto index = static_cast<std::size_t>(e);
        const std::array<const PackedMatrix*, 3> matrices = {&read.experts.packed_gate[index],
                                                             &read.experts.packed_up[index],
                                                             &read.experts.packed_down[index]};
        for (std::size_t m = 0; m < 3; ++m) {
          const ConvertedMatrix& wrote = expert.matrices[m];
          // A single block is a single scale.
          const bool one_block =
              format.format == Format::fp8_block && wrote.n <= 128 && wrote.k <= 128;
          EXPECT_EQ(matrices[m]->format,
                    one_block ? FormatSpec{Format::fp8_tensor} : resolved(format));
          std::vector<float> values(wrote.values.size());
          unpack(*matrices[m], view(values.data(), {wrote.n, wrote.k}));
          for (std::size_t i = 0; i < values.size(); ++i) {
            if (format.format == Format::nvfp4) {
              ASSERT_NEAR(values[i], wrote.values[i], std::fabs(wrote.values[i]) * 0x1p-22f);
            } else {
              ASSERT_EQ(values[i], wrote.values[i]) << i;
            }
          }
        }
      }
      // And back: what the packed weights mean, exactly.
      const ConversionReport back =
          convert_checkpoint(cpu(), folder / "out", folder / "again", to("f32"));
      for (const ConvertedExpertReport& expert : back.experts) {
        for (const WeightError& error : expert.errors) EXPECT_EQ(error.difference, 0);
      }
      const Checkpoint again = Checkpoint::open(folder / "again");
      const ExpertWeights plain = again.weights(0).experts;
      std::vector<float> values(static_cast<std::size_t>(plain.up[0].elements()));
      unpack(read.experts.packed_up[0],
             view(values.data(), {plain.up[0].shape[0], plain.up[0].shape[1]}));
      EXPECT_EQ(values_of(plain.up[0]), values);
      EXPECT_EQ(plain.up[0].dtype, DType::f32);
    }
  }
}

// What is stored is by hand, from the bytes: 4 bits low nibble first, times e4m3, over the divisor.
TEST(Convert, Nvfp4DecodesByItsPublishedRule) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  const ConversionReport report = convert_checkpoint(cpu(), tiny, out, to("nvfp4"));
  const SafetensorsFile file = SafetensorsFile::open(out + "/model.safetensors");
  const std::string module = "model.layers.2.mlp.experts.7.down_proj.";
  const Tensor packed = file.get(module + "weight_packed"),
               scale = file.get(module + "weight_scale"),
               divisor = file.get(module + "weight_global_scale");
  EXPECT_EQ(packed.describe(), "u8 [256, 64]");
  EXPECT_EQ(scale.describe(), "f8_e4m3 [256, 8]");
  constexpr std::array<double, 8> magnitudes = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const std::vector<float> before = values_of(Checkpoint::open(tiny).weights(2).experts.down[7]);
  double difference = 0, magnitude = 0;
  for (std::size_t n = 0; n < 256; ++n) {
    for (std::size_t k = 0; k < 128; ++k) {
      const int byte = packed.as<const std::uint8_t>()[n * 64 + k / 2];
      const int code = k % 2 == 0 ? byte & 15 : byte >> 4;
      const double value =
          (code & 8 ? -1 : 1) * magnitudes[static_cast<std::size_t>(code & 7)] *
          static_cast<double>(
              load_f32(scale.data, scale.dtype, static_cast<std::int64_t>(n * 8 + k / 16))) /
          static_cast<double>(*divisor.as<const float>());
      const auto was = static_cast<double>(before[n * 128 + k]);
      difference += (value - was) * (value - was);
      magnitude += was * was;
    }
  }
  const auto found =
      std::find_if(report.experts.begin(), report.experts.end(),
                   [](const auto& expert) { return expert.layer == 2 && expert.expert == 7; });
  ASSERT_NE(found, report.experts.end());
  EXPECT_NEAR(std::sqrt(difference / magnitude), found->errors[2].relative(), 1e-6);
  EXPECT_GT(found->errors[2].relative(), 0.08);
  EXPECT_LT(found->errors[2].relative(), 0.11);
}

TEST(Convert, MergedExpertsGetNamesOfTheirOwn) {
  const TemporaryFolder folder;
  convert_checkpoint(cpu(), golden("mixtral_merged"), folder / "merged", to("mxfp4"));
  convert_checkpoint(cpu(), golden("mixtral"), folder / "each", to("mxfp4"));
  const SafetensorsFile merged = SafetensorsFile::open(folder / "merged/model.safetensors");
  EXPECT_TRUE(merged.contains("model.layers.0.block_sparse_moe.experts.3.w1.weight_packed"));
  EXPECT_EQ(merged.get("model.layers.0.block_sparse_moe.experts.3.w2.weight_scale").describe(),
            "u8 [48, 1]");
}

TEST(Convert, GptOssIsWrittenAsItIsPublished) {
  const TemporaryFolder folder;
  const std::string in = golden("gpt_oss"), out = folder / "out";
  const Checkpoint source = Checkpoint::open(in);
  const ExpertSpec spec = source.spec(0).experts;
  if (spec.hidden % 32 != 0 || spec.intermediate % 32 != 0) {
    EXPECT_NE(
        error_of([&] { convert_checkpoint(cpu(), in, out, to("mxfp4")); }).find("multiples of 32"),
        std::string::npos);
    return;
  }
  convert_checkpoint(cpu(), in, out, to("mxfp4"));
  const SafetensorsFile file = SafetensorsFile::open(out + "/model.safetensors");
  const std::string module = "model.layers.0.mlp.experts.";
  const Tensor blocks = file.get(module + "gate_up_proj_blocks"),
               scales = file.get(module + "gate_up_proj_scales");
  ASSERT_EQ(blocks.rank, 4);
  EXPECT_EQ(blocks.shape[1], 2 * spec.intermediate);
  EXPECT_TRUE(file.contains(module + "gate_up_proj_bias"));
  // Row 2j + 1 of expert 1 is up j.
  const Tensor up = source.weights(0).experts.up[1];
  const Buffer memory = cpu().allocate(packed_bytes({Format::mxfp4}, up.shape[0], up.shape[1]));
  const PackedMatrix packed = pack({Format::mxfp4}, up, memory);
  for (std::int64_t j = 0; j < up.shape[0]; ++j) {
    EXPECT_EQ(std::memcmp(blocks[1][2 * j + 1].data, packed.values[j].data,
                          static_cast<std::size_t>(up.shape[1] / 2)),
              0);
    EXPECT_EQ(std::memcmp(scales[1][2 * j + 1].data, packed.scales[j].data,
                          static_cast<std::size_t>(up.shape[1] / 32)),
              0);
  }
  const Json config = Json::parse(read_file(out + "/config.json"));
  EXPECT_EQ(config["quantization_config"]["quant_method"], "mxfp4");
  const LayerWeights read = Checkpoint::open(out).weights(0);
  std::vector<float> values(static_cast<std::size_t>(up.elements())), expected(values.size());
  unpack(read.experts.packed_up[1], view(values.data(), {up.shape[0], up.shape[1]}));
  unpack(packed, view(expected.data(), {up.shape[0], up.shape[1]}));
  EXPECT_EQ(values, expected);
}

TEST(Convert, PrunedMatricesHaveTwoOfFour) {
  std::map<PruneMethod, double> errors;
  for (const PruneMethod method : {PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs}) {
    const TemporaryFolder folder;
    const std::string out = folder / "out";
    const ConversionReport report = convert_checkpoint(cpu(), tiny, out, pruned("bf16", method));
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
  convert_checkpoint(cpu(), tiny, folder / "wanda", pruned("sparse_nvfp4", PruneMethod::wanda));
  convert_checkpoint(cpu(), tiny, folder / "plain", pruned("bf16", PruneMethod::wanda));
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

// In pairs: what Blackwell's sparse tensor cores take, whichever method chose.
TEST(Convert, PairsAreAlignedAndShareAScale) {
  for (const PruneMethod method : {PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs}) {
    const TemporaryFolder folder;
    ConversionOptions options = pruned("sparse_nvfp4", method, PrunePattern::pairs);
    if (method != PruneMethod::magnitude) {
      options.calibrate = golden("qwen3_moe/golden.safetensors");
    }
    convert_checkpoint(cpu(), golden("qwen3_moe"), folder / "out", options);
    const Checkpoint after = Checkpoint::open(folder / "out");
    const LayerWeights weights = after.weights(1);
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

TEST(Convert, AnInterruptedConversionGoesOnAndGivesTheSameBytes) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  split_model(golden("qwen3_moe"), in);
  const ConversionOptions options = to("int4:32");
  convert_checkpoint(cpu(), in, folder / "whole", options);

  // The second file's first expert ends it, as a full disk would.
  const ConversionProgress stop = [](const std::string& file, std::int64_t, std::int64_t) {
    if (file.find("00002-of") != std::string::npos) throw Error(Status::io, "no space");
  };
  Status status = Status::ok;
  const std::string message =
      error_of([&] { convert_checkpoint(cpu(), in, out, options, stop); }, &status);
  EXPECT_EQ(status, Status::io);
  EXPECT_NE(message.find("no space; what is finished stays in " + out + ".partial"),
            std::string::npos)
      << message;
  EXPECT_FALSE(fs::exists(out));
  const std::string finished = out + ".partial/model-00001-of-00003.safetensors";
  const auto when = fs::last_write_time(finished);

  EXPECT_NE(
      error_of([&] { convert_checkpoint(cpu(), in, out, to("int4:64")); }).find("other settings"),
      std::string::npos);
  const ConversionReport report = convert_checkpoint(cpu({.threads = 3}), in, out, options);
  EXPECT_EQ(report.shards, 3);
  EXPECT_EQ(report.shards_resumed, 1);
  EXPECT_EQ(report.experts.size(), 32u);
  EXPECT_EQ(fs::last_write_time(out + "/model-00001-of-00003.safetensors"), when);
  EXPECT_FALSE(fs::exists(out + ".partial"));
  EXPECT_EQ(contents(out), contents(folder / "whole"));

  // Files and index agree.
  const Json index = Json::parse(read_file(out + "/model.safetensors.index.json"));
  std::size_t tensors = 0;
  for (const char* shard : {"1", "2", "3"}) {
    const std::string name = std::string("model-0000") + shard + "-of-00003.safetensors";
    for (const std::string& tensor : SafetensorsFile::open(out + "/" + name).names()) {
      EXPECT_EQ(index["weight_map"][tensor], name);
      ++tensors;
    }
  }
  EXPECT_EQ(index["weight_map"].size(), tensors);
}

// What stays, and what to do with it, is said; nothing stays where nothing is finished.
TEST(Convert, ARefusalOnTheWaySaysWhatStays) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  split_model(golden("qwen3_moe"), in);
  for (const char* file : {"00002-of", "00001-of"}) {
    const ConversionProgress stop = [&](const std::string& at, std::int64_t, std::int64_t) {
      if (at.find(file) != std::string::npos) throw Error(Status::invalid_argument, "no number");
    };
    const std::string message =
        error_of([&] { convert_checkpoint(cpu(), in, out, to("int4:32"), stop); });
    const bool first = std::string(file) == "00001-of";
    EXPECT_EQ(message, first ? "no number"
                             : "no number; what is finished stays in " + out +
                                   ".partial: remove it to convert otherwise");
    EXPECT_EQ(fs::exists(out + ".partial"), !first);
    fs::remove_all(out + ".partial");
  }
}

// A file that was said to be finished and is not whole any more is made again.
TEST(Convert, ATornFileIsMadeAgain) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  split_model(golden("qwen3_moe"), in);
  const ConversionProgress stop = [](const std::string& file, std::int64_t, std::int64_t) {
    if (file.find("00003-of") != std::string::npos) throw Error(Status::io, "no space");
  };
  error_of([&] { convert_checkpoint(cpu(), in, out, to("bf16"), stop); });
  fs::resize_file(out + ".partial/model-00001-of-00003.safetensors", 100);
  const ConversionReport report = convert_checkpoint(cpu(), in, out, to("bf16"));
  EXPECT_EQ(report.shards_resumed, 1);
  convert_checkpoint(cpu(), in, folder / "whole", to("bf16"));
  EXPECT_EQ(contents(out), contents(folder / "whole"));
}

TEST(Convert, BitsDoNotDependOnThreads) {
  const TemporaryFolder folder;
  const std::string in = golden("qwen3_moe");
  ConversionOptions options = pruned("sparse_nvfp4", PruneMethod::obs);
  options.calibrate = in + "/golden.safetensors";
  for (const int threads : {1, 3}) {
    convert_checkpoint(cpu({.threads = threads}), in, folder / std::to_string(threads), options);
  }
  EXPECT_EQ(contents(folder / "1"), contents(folder / "3"));
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

TEST(Convert, RefusesBeforeItWrites) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  const auto message = [&](const std::string& in, const std::string& where,
                           const ConversionOptions& options) {
    const std::string text = error_of([&] { convert_checkpoint(cpu(), in, where, options); });
    EXPECT_FALSE(fs::exists(out));
    EXPECT_FALSE(fs::exists(out + ".partial")) << text;
    return text;
  };
  EXPECT_NE(message(tiny, tiny, to("nvfp4")).find("itself"), std::string::npos);
  EXPECT_NE(message(tiny, tiny + "/../tiny-moe/", to("nvfp4")).find("itself"), std::string::npos);
  EXPECT_NE(message(tiny, folder.path(), to("nvfp4")).find("exists"), std::string::npos);
  EXPECT_NE(message(tiny, folder / "no/out", to("nvfp4")).find("no folder"), std::string::npos);
  EXPECT_NE(message(folder / "none", out, to("nvfp4")).find("none"), std::string::npos);
  ConversionOptions options = pruned("bf16", PruneMethod::obs);
  options.calibrate.clear();
  EXPECT_NE(message(tiny, out, options).find("obs needs"), std::string::npos);
  options.calibrate = golden("qwen3_moe") + "/golden.safetensors";
  EXPECT_NE(message(tiny, out, options).find("model.layers.0.mlp.input"), std::string::npos);

  // Hidden states that say nothing.
  const auto hidden = [&](float value, std::int64_t tokens) {
    const std::vector<float> rows(256 * 2, value);
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (int layer = 0; layer < 4; ++layer) {
      tensors.emplace_back("layers." + std::to_string(layer) + ".input",
                           view(rows.data(), {layer < 3 ? 2 : tokens, 256}));
    }
    options.calibrate = folder / "hidden.safetensors";
    write_safetensors(options.calibrate, tensors, {});
    return message(tiny, out, options);
  };
  EXPECT_NE(hidden(1, 0).find("'layers.3.input' is f32 [0, 256]: holds no hidden states"),
            std::string::npos);
  EXPECT_NE(hidden(std::nanf(""), 2).find("'layers.0.input' has nan at [0, 0]: must be finite"),
            std::string::npos);

  // No experts anywhere.
  fs::create_directory(folder / "dense");
  fs::copy_file(golden("qwen3_moe") + "/model.safetensors", folder / "dense/model.safetensors");
  std::string config = read_file(golden("qwen3_moe") + "/config.json");
  const std::string field = "\"mlp_only_layers\": []";
  config.replace(config.find(field), field.size(), "\"mlp_only_layers\": [0, 1]");
  write_file(folder / "dense/config.json", config);
  EXPECT_NE(message(folder / "dense", out, to("nvfp4")).find("no MoE layer"), std::string::npos);
  EXPECT_EQ(
      error_of([] { conversion_from_string("fp2"); }),
      "format is 'fp2': must be one of f32, bf16, f16, fp8_tensor, fp8_channel, fp8_block, "
      "mxfp8, nvfp4, mxfp4, int8, int4, dense3, sparse_nvfp4, or int4:GROUP, GROUP a multiple "
      "of 16");
  EXPECT_NE(error_of([] { conversion_from_string("plain"); }).find("'plain': must be one of f32"),
            std::string::npos);
}

TEST(Convert, LeavesFoldersOfOthersAlone) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "out.partial");
  write_file(folder / "out.partial/mine", "x");
  EXPECT_NE(error_of([&] {
              convert_checkpoint(cpu(), tiny, folder / "out", to("bf16"));
            }).find("no interrupted conversion"),
            std::string::npos);
  EXPECT_EQ(read_file(folder / "out.partial/mine"), "x");
}

}  // namespace
}  // namespace shunt::test
