// What is in checkpoints that were converted.
#include "convert/conversion.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "checkpoint/quantised_changed.hpp"
#include "convert/cases.hpp"
#include "convert/dialect.hpp"
#include "convert/values.hpp"
#include "core/convert.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string bytes_of(const Tensor& tensor) {
  return {tensor.as<const char>(), static_cast<std::size_t>(tensor.bytes())};
}

// The names of a model's tensors that are of routed experts.
bool of_an_expert(const std::string& name) { return name.find("experts.") != std::string::npos; }

// Whatever the layout (merged, interleaved, transposed, flat), every weight lands where it was.
TEST(Convert, EveryFamilyKeepsItsWeightsInF32) {
  const Context context = cpu();
  const std::vector<std::string> families = small_golden_families();
  EXPECT_GT(families.size(), 60U);
  for (const std::string& family : families) {
    const std::string in = golden(family);
    SCOPED_TRACE(in);
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
  }
}

TEST(Convert, CopiesEverythingElse) {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  convert_checkpoint(cpu(), tiny_moe, out, to("nvfp4"));
  EXPECT_EQ(read_file(out + "/heldout.txt"), read_file(tiny_moe + "/heldout.txt"));
  EXPECT_FALSE(fs::exists(out + "/activations.safetensors")) << "recorded in another precision";
  const SafetensorsFile before = SafetensorsFile::open(tiny_moe + "/model.safetensors"),
                        after = SafetensorsFile::open(out + "/model.safetensors");
  for (const std::string& name : before.names()) {
    if (of_an_expert(name)) {
      EXPECT_FALSE(after.contains(name)) << name;
    } else {
      EXPECT_EQ(bytes_of(before.get(name)), bytes_of(after.get(name))) << name;
    }
  }
}

// Python writes numbers that are none into config.json: they stay, and strings of their names too.
TEST(Convert, NonNumbersOfTheConfigStay) {
  const TemporaryFolder folder;
  const std::string in = folder / "in";
  fs::create_directory(in);
  fs::copy_file(golden("qwen3_moe") + "/model.safetensors", in + "/model.safetensors");
  const std::string fields =
      "  \"time_step_limit\": [\n    0.0,\n    Infinity\n  ],\n"
      "  \"lowest\": -Infinity,\n"
      "  \"none\": {\n    \"value\": NaN,\n    \"name\": \"NaN\",\n"
      "    \"marked\": \"~NaN\",\n    \"again\": \"~~Infinity\"\n  },\n";
  std::string config = read_file(golden("qwen3_moe") + "/config.json");
  config.insert(config.find('\n') + 1, fields);
  write_file(in + "/config.json", config);
  for (const char* format : {"f16", "nvfp4"}) {
    convert_checkpoint(cpu(), in, folder / format, to(format));
    const std::string made = read_file((folder / format) + "/config.json");
    EXPECT_NE(made.find(fields), std::string::npos) << made;
    EXPECT_EQ(Checkpoint::open(folder / format).layers().size(), 2U);
  }
}

// A vision tower's convolution has more dimensions than a matrix of ours can.
TEST(Convert, CopiesTensorsOfAnyRank) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  fs::create_directory(in);
  fs::copy_file(golden("qwen3_moe") + "/config.json", in + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(golden("qwen3_moe") + "/model.safetensors");
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : file.names()) tensors.emplace_back(name, file.get(name));
  const std::string patches = "model.visual.patch_embed.proj.weight";
  std::vector<float> values(48);
  std::iota(values.begin(), values.end(), 0.0F);
  tensors.emplace_back(patches, view(values.data(), {2, 3, 2, 4}));
  write_safetensors(in + "/model.safetensors", tensors);
  // The same bytes in five dimensions, which a Tensor has not.
  const std::string bytes = read_file(in + "/model.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  std::string header = bytes.substr(8, length);
  const std::size_t at = header.find("[2,3,2,4]");
  ASSERT_NE(at, std::string::npos);
  header.replace(at, 9, "[1,2,3,2,4]");
  while (header.size() % 8 != 0) header += ' ';
  const std::uint64_t longer = header.size();
  write_file(in + "/model.safetensors", std::string(reinterpret_cast<const char*>(&longer), 8) +
                                            header + bytes.substr(8 + length));
  EXPECT_EQ(SafetensorsFile::open(in + "/model.safetensors").shape(patches),
            (std::vector<std::int64_t>{1, 2, 3, 2, 4}));
  convert_checkpoint(cpu(), in, out, to("nvfp4"));
  const SafetensorsFile after = SafetensorsFile::open(out + "/model.safetensors");
  EXPECT_EQ(after.shape(patches), (std::vector<std::int64_t>{1, 2, 3, 2, 4}));
  const Tensor flat = after.flat(patches);
  ASSERT_EQ(flat.elements(), 48);
  EXPECT_EQ(std::vector<float>(flat.as<float>(), flat.as<float>() + 48), values);
}

TEST(Convert, LeavesOtherWeightsBehindAndCopiesWhatCannotBeWritten) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  copy_without_recordings("qwen3_moe", in);
  for (const char* name : {"pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json",
                           "q4.gguf", "tokenizer.json"}) {
    write_file(in + "/" + name, name);
  }
  fs::permissions(in + "/tokenizer.json", fs::perms::owner_read);
  const ConversionReport report = convert_checkpoint(cpu(), in, out, to("nvfp4"));
  EXPECT_EQ(report.left_out, (std::vector<std::string>{"pytorch_model-00001-of-00001.bin",
                                                       "pytorch_model.bin.index.json", "q4.gguf"}));
  for (const std::string& name : report.left_out) EXPECT_FALSE(fs::exists(out + "/" + name));
  EXPECT_EQ(read_file(out + "/tokenizer.json"), "tokenizer.json");
  EXPECT_NE(fs::status(out + "/tokenizer.json").permissions() & fs::perms::owner_write,
            fs::perms::none);
}

// One scale is of a tensor or of a row, which a matrix of one row does not tell.
TEST(Convert, MatricesOfOneRowAreReadBack) {
  constexpr std::array<std::pair<std::int64_t, std::int64_t>, 4> sizes = {
      {{1, 1}, {1, 7}, {17, 1}, {1, 40}}};  // H, I
  for (const auto& [hidden, inner] : sizes) {
    const TemporaryFolder folder;
    const std::string in = folder / "in";
    fs::create_directory(in);
    write_file(in + "/config.json", Json{{"model_type", "qwen3_moe"},
                                         {"hidden_size", hidden},
                                         {"moe_intermediate_size", inner},
                                         {"num_experts", 2},
                                         {"num_experts_per_tok", 1},
                                         {"num_hidden_layers", 1},
                                         {"norm_topk_prob", true},
                                         {"hidden_act", "silu"}}
                                        .dump());
    std::vector<float> numbers(64);
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = 0.25F * static_cast<float>(i + 1);
    const std::string block = "model.layers.0.mlp.";
    std::vector<std::pair<std::string, Tensor>> tensors = {
        {block + "gate.weight", view(numbers.data(), {2, hidden})}};
    for (const std::string expert : {"experts.0.", "experts.1."}) {
      for (const char* name : {"gate_proj.weight", "up_proj.weight"}) {
        tensors.emplace_back(block + expert + name, view(numbers.data(), {inner, hidden}));
      }
      tensors.emplace_back(block + expert + "down_proj.weight",
                           view(numbers.data(), {hidden, inner}));
    }
    write_safetensors(in + "/model.safetensors", tensors, {});
    for (const char* format : {"mxfp8", "fp8_channel", "fp8_tensor", "fp8_block", "int8"}) {
      SCOPED_TRACE(std::string(format) + " " + std::to_string(hidden) + " x " +
                   std::to_string(inner));
      const std::string out = folder / format;
      convert_checkpoint(cpu(), in, out, to(format));
      const LayerWeights weights = Checkpoint::open(out).weights(0);
      ASSERT_EQ(weights.experts.packed_up.size(), 2U);
      const Format read = weights.experts.packed_up[0].format.format;
      EXPECT_EQ(weights.experts.packed_down[0].format.format, read);
      if (std::string(format) != "fp8_block") {
        EXPECT_EQ(to_string(FormatSpec{read}), format);
      }
      EXPECT_EQ(error_of([&] { Layer(Checkpoint::open(out), 0, cpu()); }), "");
    }
  }
}

// Nothing of a folder stays behind unsaid, and no file of it becomes what a conversion writes
// itself.
TEST(Convert, NamesWhateverStaysBehind) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  copy_without_recordings("qwen3_moe", in);
  for (const char* name : {"adapter_model.safetensors", "mtp.safetensors", "tokenizer.json",
                           "conversion.json", "hf_quant_config.json"}) {
    write_file(in + "/" + name, "{}");
  }
  fs::create_directory(in + "/original");
  fs::create_directory_symlink("original", in + "/linked");
  fs::create_symlink("nowhere", in + "/dangling.json");
  fs::create_symlink("tokenizer.json", in + "/vocab.json");
  const ConversionReport report = convert_checkpoint(cpu(), in, out, to("nvfp4"));
  EXPECT_EQ(
      report.left_out,
      (std::vector<std::string>{
          "adapter_model.safetensors", "conversion.json, whose name the journal of conversions has",
          "dangling.json, a link to nothing", "linked/", "mtp.safetensors", "original/"}));
  std::set<std::string> made;
  for (const auto& [name, bytes] : contents(out)) made.insert(name);
  EXPECT_EQ(made, (std::set<std::string>{"config.json", "model.safetensors", "tokenizer.json",
                                         "vocab.json"}));
}

// Of each file its own, beside the format that readers ask for.
TEST(Convert, MetadataOfFilesStays) {
  const TemporaryFolder folder;
  const std::string in = folder / "in";
  fs::create_directory(in);
  fs::copy_file(golden("qwen3_moe") + "/config.json", in + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(golden("qwen3_moe") + "/model.safetensors");
  std::array<std::vector<std::pair<std::string, Tensor>>, 2> shards;
  Json map = Json::object();
  for (const std::string& name : file.names()) {
    const std::size_t shard = name.find("layers.1.") != std::string::npos ? 1 : 0;
    shards[shard].emplace_back(name, file.get(name));
    map[name] = shard == 1 ? "b.safetensors" : "a.safetensors";
  }
  write_safetensors(in + "/a.safetensors", shards[0], {{"step", "\"1000\""}, {"by", "\u00fc"}});
  write_safetensors(in + "/b.safetensors", shards[1], {{"format", "np"}});
  write_file(in + "/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  for (const char* format : {"bf16", "nvfp4"}) {
    convert_checkpoint(cpu(), in, folder / format, to(format));
    const auto metadata = [&](const char* name) {
      return SafetensorsFile::open((folder / format) + name).metadata();
    };
    using Metadata = std::map<std::string, std::string>;
    EXPECT_EQ(metadata("/a.safetensors"),
              (Metadata{{"format", "pt"}, {"step", "\"1000\""}, {"by", "\u00fc"}}));
    EXPECT_EQ(metadata("/b.safetensors"), (Metadata{{"format", "pt"}}));
  }
}

// What an index lists is weights, whatever it is called.
TEST(Convert, AShardMayBeCalledAnything) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  fs::create_directory(in);
  fs::copy_file(golden("qwen3_moe") + "/config.json", in + "/config.json");
  fs::copy_file(golden("qwen3_moe") + "/model.safetensors", in + "/weights");
  Json map = Json::object();
  for (const std::string& name : SafetensorsFile::open(in + "/weights").names()) {
    map[name] = "weights";
  }
  write_file(in + "/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  convert_checkpoint(cpu(), in, out, to("nvfp4"));
  EXPECT_EQ(Checkpoint::open(out).weights(0).experts.packed_up[0].format.format, Format::nvfp4);
}

// Tensors that an index does not name, or names elsewhere, are said to stay behind: a line a file.
TEST(Convert, SaysWhichTensorsTheIndexDoesNotName) {
  const TemporaryFolder folder;
  const std::string in = folder / "in";
  fs::create_directory(in);
  fs::copy_file(golden("qwen3_moe") + "/config.json", in + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(golden("qwen3_moe") + "/model.safetensors");
  std::vector<std::pair<std::string, Tensor>> first, second;
  Json map = Json::object();
  for (const std::string& name : file.names()) {
    const bool head = name == "lm_head.weight";
    (head ? second : first).emplace_back(name, file.get(name));
    map[name] = head ? "b.safetensors" : "a.safetensors";
  }
  const std::vector<float> one(1, 1.0F);
  first.emplace_back("model.layers.0.self_attn.scale", view(one.data(), {1}));
  first.emplace_back("lm_head.weight", file.get("lm_head.weight"));  // the other file's is read
  second.emplace_back("model.extra", view(one.data(), {1}));
  write_safetensors(in + "/a.safetensors", first);
  write_safetensors(in + "/b.safetensors", second);
  write_file(in + "/model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  for (const char* format : {"f32", "nvfp4"}) {
    const ConversionReport report = convert_checkpoint(cpu(), in, folder / format, to(format));
    EXPECT_EQ(report.left_out,
              (std::vector<std::string>{
                  "tensor lm_head.weight and 1 more of a.safetensors, which the index does not "
                  "name there",
                  "tensor model.extra of b.safetensors, which the index does not name there"}));
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
    EXPECT_EQ(modules.size(), 2 * 5 + 2u);  // and the embedding
    EXPECT_EQ(modules.size(), ignored.size());
    // 2 layers of 16 experts of 3 matrices of 64 x 48.
    EXPECT_EQ(report.experts_before, 2 * 16 * 3 * 64 * 48 * 2);
    EXPECT_LT(report.experts_after, report.experts_before);
    EXPECT_EQ(report.bytes_before,
              static_cast<std::int64_t>(fs::file_size(in + "/model.safetensors")));
    EXPECT_EQ(report.bytes_after,
              static_cast<std::int64_t>(fs::file_size(out + "/model.safetensors")));
  }
}

// Lists name every matrix that stays plain, an embedder's linear layer (Llama 4's) among them, and
// the head of a model whose head is its embedding.
TEST(Convert, ListsNameWhatStaysPlain) {
  const TemporaryFolder folder;
  const std::string in = folder / "in", out = folder / "out";
  fs::create_directory(in);
  fs::copy_file(golden("qwen3_moe") + "/config.json", in + "/config.json");
  const SafetensorsFile file = SafetensorsFile::open(golden("qwen3_moe") + "/model.safetensors");
  const std::vector<float> values(48, 1.0F);
  std::vector<std::pair<std::string, Tensor>> tensors = {
      {"vision_model.patch_embedding.linear.weight", view(values.data(), {6, 8})}};
  for (const std::string& name : file.names()) {
    if (name != "lm_head.weight") tensors.emplace_back(name, file.get(name));
  }
  write_safetensors(in + "/model.safetensors", tensors);
  convert_checkpoint(cpu(), in, out, to("nvfp4"));
  const Json config = Json::parse(read_file(out + "/config.json"));
  const Json& ignored = config["quantization_config"]["ignore"];
  for (const char* module : {"vision_model.patch_embedding.linear", "lm_head"}) {
    EXPECT_EQ(std::count(ignored.begin(), ignored.end(), module), 1) << module;
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
  const ConversionReport report = convert_checkpoint(cpu(), tiny_moe, out, to("nvfp4"));
  const SafetensorsFile file = SafetensorsFile::open(out + "/model.safetensors");
  const std::string module = "model.layers.2.mlp.experts.7.down_proj.";
  const Tensor packed = file.get(module + "weight_packed"),
               scale = file.get(module + "weight_scale"),
               divisor = file.get(module + "weight_global_scale");
  EXPECT_EQ(packed.describe(), "u8 [256, 64]");
  EXPECT_EQ(scale.describe(), "f8_e4m3 [256, 8]");
  constexpr std::array<double, 8> magnitudes = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const std::vector<float> before =
      values_of(Checkpoint::open(tiny_moe).weights(2).experts.down[7]);
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

// Shunt's own formats are held to their sizes and types as those of others are.
TEST(Convert, TensorsOfOwnFormatsAreOfTheirSizes) {
  for (const char* format : {"dense3", "sparse_nvfp4"}) {
    const TemporaryFolder folder;
    convert_checkpoint(cpu(), golden("qwen3_moe"), folder / "out", to(format));
    const SafetensorsFile file = SafetensorsFile::open(folder / "out/model.safetensors");
    const std::string module = "model.layers.0.mlp.experts.0.gate_proj.";
    const std::vector<float> bytes(1 << 14, 1);
    for (const std::string& name : file.names()) {
      if (!name.starts_with(module)) continue;
      const Tensor part = file.get(name);
      std::vector<std::vector<std::int64_t>> shapes = {{part.shape[0] + 1}};
      std::vector<DType> dtypes = {part.dtype};
      if (part.rank == 2) {
        const std::int64_t rows = part.shape[0], columns = part.shape[1];
        shapes = {{rows + 1, columns}, {rows - 1, columns}, {rows, columns + 1}, {rows, columns}};
        dtypes = {part.dtype, part.dtype, part.dtype, DType::i16};
      }
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        std::vector<std::pair<std::string, Tensor>> tensors;
        for (const std::string& each : file.names()) {
          tensors.emplace_back(
              each, each == name ? of_shape(bytes.data(), dtypes[i], shapes[i]) : file.get(each));
        }
        const TemporaryFolder other;
        write_safetensors(other / "model.safetensors", tensors);
        write_file(other / "config.json", read_file(folder / "out/config.json"));
        const std::string message =
            error_of([&] { (void)Checkpoint::open(other.path()).weights(0); });
        EXPECT_NE(message.find("tensor '" + name + "' is "), std::string::npos) << message;
      }
    }
  }
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

}  // namespace
}  // namespace shunt::test
