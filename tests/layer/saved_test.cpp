// Layers on disk, and layers whose weights were prepared in place.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "engine.hpp"
#include "gemm/on_hopper.hpp"
#include "layer/random_layer.hpp"
#include "models.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/layer.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {
namespace {

using test::error_of;
using test::TemporaryFolder;
using testing::layer_specs;
using testing::NamedSpec;
using testing::RandomLayer;
using testing::small_layer;

std::vector<float> output(const Context& context, const Layer& layer, const LayerInputs& in) {
  const std::int64_t tokens = in.hidden.shape[0];
  std::vector<float> y(static_cast<std::size_t>(tokens * layer.spec().hidden), std::nanf(""));
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  test::Mirror mirror(context);
  layer.forward({.hidden = mirror.in(in.hidden), .token_ids = mirror.in(in.token_ids)},
                {.output = mirror.out(view(y.data(), {tokens, layer.spec().hidden}))}, workspace);
  mirror.fetch();
  return y;
}

class SavedLayer : public ::testing::TestWithParam<NamedSpec> {};

TEST_P(SavedLayer, GivesTheSameBits) {
  RandomLayer random(GetParam().spec, 41);
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "layer.safetensors";
  LayerInputs in{.hidden = random.hidden_states(9)};
  if (random.spec.route.hashed) in.token_ids = random.token_ids(9);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Layer layer(random.spec, random.weights, context, {.dtype = dtype});
    layer.save_prepared(path);
    const Layer read = Layer::load_prepared(path, context);
    EXPECT_EQ(read.spec(), layer.spec());
    EXPECT_EQ(read.options().dtype, dtype);
    EXPECT_EQ(read.prepared_bytes(), layer.prepared_bytes());
    EXPECT_EQ(output(context, read, in), output(context, layer, in));
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, SavedLayer, ::testing::ValuesIn(layer_specs()),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(SavedLayer, PackedExpertsStayPacked) {
  LayerSpec spec = small_layer({.experts = 4, .top_k = 2}, 128, 64);
  spec.shared = {.intermediate = 24};
  RandomLayer random(spec, 45);
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "layer.safetensors", other = folder / "other.safetensors";
  const LayerInputs in{.hidden = random.hidden_states(9)};
  std::vector<LayerOptions> all;
  for (const char* name : {"fp8_block", "nvfp4", "int4:64", "sparse_nvfp4", "dense3"}) {
    all.push_back({.format = format_from_string(name)});
  }
  if (test::on_hopper()) {
    all.push_back({.format = {Format::fp8_block}, .rows = RowFormat::fp8_block});
  }
  for (const LayerOptions& options : all) {
    const Layer layer(spec, random.weights, context, options);
    layer.save_prepared(path);
    const Layer read = Layer::load_prepared(path, context);
    EXPECT_EQ(read.options().format, options.format);
    EXPECT_EQ(read.options().rows, options.rows);
    EXPECT_EQ(read.prepared_bytes(), layer.prepared_bytes());
    EXPECT_EQ(output(context, read, in), output(context, layer, in));

    const SafetensorsFile good = SafetensorsFile::open(path);
    auto metadata = good.metadata();
    std::string& words = metadata.at("options");
    const std::string format = to_string(options.format);
    const bool rounded = options.rows != RowFormat::as_dtype;
    words.replace(words.find(format), format.size(),
                  rounded ? "nvfp4" : "mxfp4");  // not what the experts are in
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const std::string& name : good.names()) tensors.emplace_back(name, good.get(name));
    write_safetensors(other, tensors, metadata);
    EXPECT_NE(error_of([&] {
                Layer::load_prepared(other, context);
              }).find(rounded ? "LayerOptions.rows" : "the layer's options say mxfp4"),
              std::string::npos);
  }
}

// Its rows are rounded as the others', or stay as they are where it is of another format.
TEST(SavedLayer, ASharedExpertKeepsItsRows) {
  if (!test::on_hopper()) GTEST_SKIP() << "about rows in fp8, of a Hopper GPU";
  LayerSpec spec = small_layer({.experts = 4, .top_k = 2}, 128, 64);
  spec.shared = {.intermediate = 24};
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "layer.safetensors";
  for (const Format format : {Format::fp8_block, Format::fp8_channel}) {
    RandomLayer random(spec, 47);
    random.pack(random.weights.shared, {format}, {format});
    const Layer layer(spec, random.weights, context,
                      {.format = {Format::fp8_block}, .rows = RowFormat::fp8_block});
    layer.save_prepared(path);
    const Layer read = Layer::load_prepared(path, context);
    for (const std::int64_t tokens : {1, 9, 300}) {
      const LayerInputs in{.hidden = random.hidden_states(tokens)};
      EXPECT_EQ(read.explain(tokens), layer.explain(tokens));
      EXPECT_EQ(output(context, read, in), output(context, layer, in));
    }
  }
}

TEST(SavedLayer, GroupsThatAreWholeRows) {
  RandomLayer random(small_layer({.experts = 4, .top_k = 2}, 128, 64), 46);
  random.pack(random.weights.experts, {Format::int4, 128}, {Format::int4, 64});
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "layer.safetensors";
  const LayerInputs in{.hidden = random.hidden_states(9)};
  const Layer layer(random.spec, random.weights, context);
  layer.save_prepared(path);
  EXPECT_EQ(output(context, Layer::load_prepared(path, context), in), output(context, layer, in));
}

TEST(SavedLayer, OtherFilesAreRefusedByName) {
  LayerSpec spec = small_layer({.experts = 4, .top_k = 2, .router_bias = true}, 64, 64);
  spec.experts.down_bias = true;
  RandomLayer random(spec, 42);
  const Context context = test::engine();
  const TemporaryFolder folder;
  const std::string path = folder / "layer.safetensors", other = folder / "other.safetensors";
  Layer(spec, random.weights, context).save_prepared(path);
  const SafetensorsFile good = SafetensorsFile::open(path);
  const auto refusal = [&](const std::map<std::string, std::string>& metadata,
                           const std::string& left_out, Status want) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    for (const std::string& name : good.names()) {
      if (name != left_out) tensors.emplace_back(name, good.get(name));
    }
    write_safetensors(other, tensors, metadata);
    Status status = Status::ok;
    const std::string message = error_of([&] { Layer::load_prepared(other, context); }, &status);
    EXPECT_EQ(status, want) << message;
    EXPECT_EQ(message.rfind(other, 0), 0U) << message;
    return message;
  };
  const auto with = [&](const char* key, const std::string& value) {
    auto metadata = good.metadata();
    metadata[key] = value;
    return metadata;
  };
  const auto& said = good.metadata();
  EXPECT_NE(refusal({}, "", Status::bad_file).find("no 'shunt.layer'"), std::string::npos);
  for (const char* key : {"spec", "options"}) {
    auto metadata = said;
    metadata.erase(key);
    EXPECT_EQ(refusal(metadata, "", Status::bad_file),
              other + ": holds no prepared layer: its metadata has no '" + key + "'");
  }
  refusal(with("shunt.layer", "2"), "", Status::unsupported);
  refusal(with("spec", "{"), "", Status::bad_file);
  refusal(with("options", "{}"), "", Status::bad_file);
  refusal(with("experts.down", "{}"), "", Status::bad_file);
  refusal(with("experts.down", said.at("experts.gate_up")), "", Status::bad_file);
  for (const char* name : {"router", "router_bias", "experts.gate_up", "experts.down_bias"}) {
    EXPECT_NE(refusal(said, name, Status::bad_file).find(name), std::string::npos);
  }
  LayerSpec wider = spec;
  wider.experts.intermediate = 128;
  EXPECT_NE(refusal(with("spec", to_json(wider)), "", Status::bad_file).find("the layer's spec"),
            std::string::npos);
  LayerSpec illegal = spec;
  illegal.zero_experts = 4;
  EXPECT_EQ(refusal(with("spec", to_json(illegal)), "", Status::bad_file),
            other + ": LayerSpec.zero_experts is 4: must be 0 to 3, below route.experts");
}

// A random layer as it was saved, and where it may be written with something changed.
struct SavedTensors {
  TemporaryFolder folder;
  std::string other = folder / "other.safetensors";
  SafetensorsFile good;
  std::vector<std::pair<std::string, Tensor>> tensors;

  SavedTensors(const LayerSpec& spec, unsigned seed, const Context& context) {
    const RandomLayer random(spec, seed);
    const std::string path = folder / "layer.safetensors";
    Layer(spec, random.weights, context).save_prepared(path);
    good = SafetensorsFile::open(path);
    for (const std::string& name : good.names()) tensors.emplace_back(name, good.get(name));
  }
};

// One bit of any tensor.
TEST(SavedLayer, DamagedBytesAreRefusedByName) {
  LayerSpec spec = small_layer({.experts = 4, .top_k = 2, .router_bias = true}, 64, 64);
  spec.shared = {.intermediate = 24};
  const Context context = test::engine();
  SavedTensors saved(spec, 48, context);
  EXPECT_GE(saved.tensors.size(), 6U);
  for (auto& [name, tensor] : saved.tensors) {
    const Tensor whole = tensor;
    const auto size = static_cast<std::size_t>(whole.bytes());
    for (const std::size_t at : {std::size_t{0}, size / 2, size - 1}) {
      std::vector<char> bytes(whole.as<char>(), whole.as<char>() + size);
      bytes[at] = static_cast<char>(bytes[at] ^ 0x10);
      tensor.data = bytes.data();
      write_safetensors(saved.other, saved.tensors, saved.good.metadata());
      tensor = whole;
      Status status = Status::ok;
      const std::string message =
          error_of([&] { Layer::load_prepared(saved.other, context); }, &status);
      EXPECT_EQ(message.rfind(saved.other + ": the bytes of " + name + " are damaged", 0), 0U)
          << message;
      EXPECT_EQ(status, Status::bad_file);
    }
  }
  auto metadata = saved.good.metadata();
  metadata.erase("checksum.experts.down");
  write_safetensors(saved.other, saved.tensors, metadata);
  EXPECT_NE(error_of([&] {
              Layer::load_prepared(saved.other, context);
            }).find("the bytes of experts.down are damaged"),
            std::string::npos);
  // Without checksums, as files were before, nothing is noticed.
  EXPECT_EQ(std::erase_if(metadata,
                          [](const auto& said) { return said.first.rfind("checksum.", 0) == 0; }),
            saved.tensors.size() - 1);
  write_safetensors(saved.other, saved.tensors, metadata);
  EXPECT_NO_THROW(Layer::load_prepared(saved.other, context));
}

TEST(SavedLayer, RefusesTensorsThatTheSpecDoesNotUse) {
  LayerSpec spec = small_layer({.experts = 4, .top_k = 2}, 64, 64);
  spec.shared = {.intermediate = 24};
  const Context context = test::engine();
  const SavedTensors saved(spec, 47, context);
  auto metadata = saved.good.metadata();
  spec.shared = {};
  metadata["spec"] = to_json(spec);
  write_safetensors(saved.other, saved.tensors, metadata);
  Status status = Status::ok;
  EXPECT_EQ(error_of([&] { Layer::load_prepared(saved.other, context); }, &status),
            saved.other + ": shared.down is given, but the layer's spec does not use it");
  EXPECT_EQ(status, Status::bad_file);
}

// [E, 2I, H] and [E, H, I] on the context's device, and the views that a layer takes.
struct Stacked {
  Buffer gate_up, down;
  LayerWeights weights;
  std::vector<char> first, second;
  Stacked(const Context& context, const RandomLayer& random, DType dtype)
      : weights(random.weights) {
    ExpertWeights& e = weights.experts;
    for (std::size_t i = 0; i < e.up.size(); ++i) {
      for (auto* list : {&e.gate, &e.up}) {
        if (list->empty()) continue;
        append(first, (*list)[i], dtype);
      }
      append(second, e.down[i], dtype);
    }
    gate_up = context.allocate(first.size());
    down = context.allocate(second.size());
    context.copy(gate_up.data(), first.data(), first.size());
    context.copy(down.data(), second.data(), second.size());
    char* next = static_cast<char*>(gate_up.data());
    for (std::size_t i = 0; i < e.up.size(); ++i) {
      for (auto* list : {&e.gate, &e.up}) {
        if (!list->empty()) next = place((*list)[i], next, dtype, context.device());
      }
    }
    next = static_cast<char*>(down.data());
    for (Tensor& one : e.down) next = place(one, next, dtype, context.device());
  }
  static void append(std::vector<char>& to, const Tensor& matrix, DType dtype) {
    const std::size_t at = to.size();
    to.resize(at + static_cast<std::size_t>(bytes(dtype, matrix.elements())));
    for (std::int64_t i = 0; i < matrix.elements(); ++i) {
      store_f32(to.data() + at, dtype, i, load_f32(matrix.data, matrix.dtype, i));
    }
  }
  static char* place(Tensor& matrix, char* at, DType dtype, Device device) {
    matrix = view(at, dtype, {matrix.shape[0], matrix.shape[1]}, device);
    return at + matrix.bytes();
  }
};

TEST(InPlaceLayer, GivesTheSameBitsAndTheMatricesAgain) {
  const Context context = test::engine();
  for (const bool gated : {true, false}) {
    LayerSpec spec =
        small_layer({.experts = 6, .top_k = 2}, 128, gated ? 64 : 128, {.gated = gated});
    spec.shared = {.intermediate = 24};
    RandomLayer random(spec, 43);
    const LayerInputs in{.hidden = random.hidden_states(11)};
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      Stacked stacked(context, random, dtype);
      const Layer copied(spec, random.weights, context, {.dtype = dtype});
      Layer placed(spec, stacked.weights, context, {.dtype = dtype, .in_place = true});
      EXPECT_LT(placed.prepared_bytes() + stacked.first.size(), copied.prepared_bytes());
      EXPECT_EQ(output(context, placed, in), output(context, copied, in));
      std::vector<char> now(stacked.first.size());
      context.copy(now.data(), stacked.gate_up.data(), now.size());
      // In f32 a GPU's layout of rows that are no pairs is the matrix itself.
      if (gated || dtype != DType::f32) {
        EXPECT_NE(now, stacked.first);
      }
      placed.unprepare();
      Status status{};
      for (const std::string& again :
           {error_of([&] { placed.unprepare(); }, &status),
            error_of([&] { (void)output(context, placed, in); }, &status),
            error_of([&] { placed.save_prepared("nowhere"); }, &status)}) {
        EXPECT_NE(again.find("given back by unprepare()"), std::string::npos) << again;
        EXPECT_EQ(status, Status::invalid_argument);
      }
      context.copy(now.data(), stacked.gate_up.data(), now.size());
      EXPECT_EQ(now, stacked.first);
      now.resize(stacked.second.size());
      context.copy(now.data(), stacked.down.data(), now.size());
      EXPECT_EQ(now, stacked.second);
    }
  }
}

TEST(InPlaceLayer, RefusesOtherArrangements) {
  const Context context = test::engine();
  const LayerSpec spec = small_layer({.experts = 4, .top_k = 2}, 128, 64);
  RandomLayer random(spec, 44);
  Status status{};
  const auto refused = [&](const LayerWeights& weights, DType dtype) {
    return error_of([&] { Layer(spec, weights, context, {.dtype = dtype, .in_place = true}); },
                    &status);
  };
  if (test::on_gpu()) {  // in the memory of the host
    EXPECT_NE(refused(random.weights, DType::bf16).find("experts.gate[0]"), std::string::npos);
    EXPECT_EQ(status, Status::invalid_argument);
  }
  Stacked stacked(context, random, DType::bf16);
  EXPECT_NE(refused(stacked.weights, DType::f16).find("experts.gate[0]"), std::string::npos);
  EXPECT_EQ(status, Status::invalid_argument);
  std::swap(stacked.weights.experts.up[0], stacked.weights.experts.up[1]);
  EXPECT_NE(refused(stacked.weights, DType::bf16).find("experts.up[0]"), std::string::npos);
  EXPECT_EQ(status, Status::invalid_argument);
  std::swap(stacked.weights.experts.up[0], stacked.weights.experts.up[1]);
  std::swap(stacked.weights.experts.down[1], stacked.weights.experts.down[2]);
  EXPECT_NE(refused(stacked.weights, DType::bf16).find("experts.down[1]"), std::string::npos);
  std::swap(stacked.weights.experts.down[1], stacked.weights.experts.down[2]);
  const Buffer elsewhere = context.allocate(stacked.second.size() + 64);
  LayerWeights shifted = stacked.weights;
  for (std::size_t e = 0; e < 4; ++e) {
    shifted.experts.down[e].data =
        static_cast<char*>(elsewhere.data()) + 16 + e * stacked.second.size() / 4;
  }
  EXPECT_NE(refused(shifted, DType::bf16).find("must be 64-byte aligned"), std::string::npos);
  // Down over the last of gate and up.
  shifted = stacked.weights;
  for (std::size_t e = 0; e < 4; ++e) {
    shifted.experts.down[e].data = static_cast<char*>(stacked.gate_up.data()) +
                                   stacked.first.size() - 64 + e * stacked.second.size() / 4;
  }
  EXPECT_NE(refused(shifted, DType::bf16)
                .find("experts.down overlaps experts.gate and up: must lie apart"),
            std::string::npos);
  EXPECT_EQ(status, Status::invalid_argument);
  // Nothing was overwritten by any of these.
  std::vector<char> now(stacked.first.size());
  context.copy(now.data(), stacked.gate_up.data(), now.size());
  EXPECT_EQ(now, stacked.first);

  const LayerSpec odd = small_layer({.experts = 4, .top_k = 2}, 40, 33);
  RandomLayer filled(odd, 45);
  Stacked views(context, filled, DType::bf16);
  EXPECT_NE(
      error_of(
          [&] { Layer(odd, views.weights, context, {.dtype = DType::bf16, .in_place = true}); },
          &status),
      "");
  EXPECT_EQ(status, Status::unsupported);
  Layer copied(spec, random.weights, context);
  EXPECT_NE(error_of([&] { copied.unprepare(); }, &status).find("in_place"), std::string::npos);
  const Checkpoint model = Checkpoint::open(test::tiny_moe);
  EXPECT_NE(error_of([&] { Layer(model, 0, context, {.in_place = true}); }, &status)
                .find("mapped read only"),
            std::string::npos);
  EXPECT_EQ(status, Status::unsupported);
}

}  // namespace
}  // namespace shunt
