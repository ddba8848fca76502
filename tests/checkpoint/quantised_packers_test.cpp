// What packers write that have names of their own for formats of others: AutoRound, Quark.
#include "checkpoint/quantised_changed.hpp"

namespace shunt::test {
namespace {

// AutoRound has names of its own for what GPTQ and AWQ say, and packs as they do.
TEST(AutoRound, ReadsWhatGptqAndAwqDo) {
  const auto auto_round = [](const Json& packing, const Json& more) {
    return [packing, more](Json& config) {
      Json q = {{"quant_method", "auto-round"},
                {"bits", 4},
                {"group_size", 32},
                {"sym", false},
                {"data_type", "int"}};
      q.update(packing);
      q.update(more);
      config["quantization_config"] = q;
    };
  };
  const Json mixed = {{"autoround_version", "0.9.0"},
                      {"block_name_to_quantize", "model.visual.blocks, model.layers"},
                      {"extra_config",
                       {{".*self_attn.*", {{"bits", 8}, {"group_size", 64}}},
                        {"model.layers.0.mlp.gate", {{"bits", 16}}},
                        {".*experts.1.up.*", {{"bits", 16}}},  // names go before expressions
                        {"model.layers.0.mlp.experts.1.up_proj", {{"bits", 4}}}}}};
  // Its own packing has zero points as they are; before 0.5 `backend` says which.
  const Json nested = {{"group_size", 16},
                       {"to_quant_block_names", Json::array({Json::array({"model.layers.0"})})}};
  const Json older = {{"group_size", 16}, {"quant_method", "intel/auto-round"}};
  const struct {
    const char* name;
    const char* field;
    const char* packing;
    const Json& more;
  } all[] = {{"gptq", "packing_format", "auto_round:auto_gptq", mixed},
             {"gptq", "backend", "auto_round:gptq:exllamav2", mixed},
             {"gptq", "backend", "auto", mixed},
             {"awq", "packing_format", "auto_round:auto_awq", mixed},
             {"awq", "backend", "auto_round:awq:gemm", mixed},
             {"gptq_v2", "packing_format", "auto_round", nested},
             {"gptq_v2", "packing_format", "auto_round:gptqmodel", nested},
             {"gptq_v2", "backend", "auto_round:exllamav2", older}};
  for (const auto& [name, field, said, more] : all) {
    SCOPED_TRACE(said);
    const Json packing = {{field, said}};
    const TemporaryFolder at;
    const Checkpoint own = Checkpoint::open(quantised_folder + "/" + name);
    const Checkpoint other = Checkpoint::open(changed(at, name, auto_round(packing, more)));
    const ExpertWeights wanted = own.weights(0).experts, got = other.weights(0).experts;
    for (std::size_t e = 0; e < 2; ++e) {
      for (const auto list :
           {&ExpertWeights::packed_gate, &ExpertWeights::packed_up, &ExpertWeights::packed_down}) {
        const PackedMatrix &a = (wanted.*list)[e], &b = (got.*list)[e];
        EXPECT_EQ(a.format, b.format);
        std::vector<float> x(static_cast<std::size_t>(a.n * a.k)), y(x.size());
        unpack(a, view(x.data(), {a.n, a.k}));
        unpack(b, view(y.data(), {b.n, b.k}));
        EXPECT_EQ(x, y);
      }
    }
  }
  const auto refused = [&](const Json& more, const char* words) {
    const TemporaryFolder at;
    const std::string message = error_of([&] {
      Checkpoint::open(
          changed(at, "gptq", auto_round({{"packing_format", "auto_round:auto_gptq"}}, more)))
          .weights(0);
    });
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  refused({{"packing_format", "auto_round:marlin"}}, "packing_format is \"auto_round:marlin\"");
  refused({{"packing_format", nullptr}, {"backend", "marlin"}}, "backend is \"marlin\"");
  refused({{"rotation_config", {{"block_size", 32}}}}, "rotation_config is {");
  refused({{"data_type", "mx_fp"}}, "data_type is \"mx_fp\"");
  refused({{"bits", 2}}, "bits is 2");
  refused({{"extra_config", {{".*experts.*", {{"bits", 8}}}}}}, "bits is 8");
  refused({{"extra_config", {{".*experts.*", {{"bits", 16}}}}}}, "extra_config");
  refused({{"extra_config", {{"model.layers.0.mlp.gate", 7}}}}, "extra_config");
  refused({{"block_name_to_quantize", 7}}, "block_name_to_quantize");
  refused({{"sym", nullptr}}, "zero points of");  // symmetric unless it says otherwise
}

TEST(Quark, ReadsWhatItExports) {
  const Json mxfp4 = {{"dtype", "fp4"},
                      {"qscheme", "per_group"},
                      {"group_size", 32},
                      {"scale_format", "e8m0"},
                      {"is_dynamic", false}};
  const Json channel = {{"dtype", "fp8_e4m3"}, {"qscheme", "per_channel"}, {"ch_axis", 0}};
  const auto quark = [](const Json& global, const Json& layers, const Json& exclude) {
    return Json{{"quant_method", "quark"},
                {"global_quant_config", {{"weight", global}, {"input_tensors", nullptr}}},
                {"layer_quant_config", layers},
                {"layer_type_quant_config", Json::object()},
                {"exclude", exclude},
                {"export", {{"pack_method", "reorder"}, {"weight_format", "real_quantized"}}}};
  };
  // MXFP4 with its names and types; the same numbers as DeepSeek-V4's.
  const auto rename = [](Tensors& tensors) {
    Tensors renamed;
    for (const auto& [name, tensor] : tensors) {
      Tensor t = tensor;
      if (t.dtype == DType::i8 || t.dtype == DType::f8_e8m0) t.dtype = DType::u8;
      const bool scale = name.ends_with(".scale");
      renamed.emplace(scale ? name.substr(0, name.size() - 5) + "weight_scale" : name, t);
    }
    tensors = std::move(renamed);
  };
  const auto read = [&](const TemporaryFolder& at, const Json& q) {
    return Checkpoint::open(rewritten(
        at, "mxfp4_deepseek_v4", [&](Json& config) { config["quantization_config"] = q; }, rename));
  };
  const Checkpoint own = Checkpoint::open(quantised_folder + "/mxfp4_deepseek_v4");
  const ExpertWeights wanted = own.weights(0).experts;
  const Json shared = {"lm_head", "re:model.layers.*self_attn.*", "*shared_experts*"};
  for (const Json& q : {quark(mxfp4, Json::object(), shared),
                        quark(nullptr, {{"*ffn.experts*", {{"weight", mxfp4}}}}, shared),
                        quark(channel, {{"*experts.*", {{"weight", mxfp4}}}}, shared)}) {
    const TemporaryFolder at;
    const Checkpoint other = read(at, q);
    const ExpertWeights got = other.weights(0).experts;
    ASSERT_EQ(got.packed_up.size(), wanted.packed_up.size());
    for (std::size_t e = 0; e < got.packed_up.size(); ++e) {
      const PackedMatrix &a = wanted.packed_up[e], &b = got.packed_up[e];
      EXPECT_EQ(b.format.format, Format::mxfp4);
      std::vector<float> x(static_cast<std::size_t>(a.n * a.k)), y(x.size());
      unpack(a, view(x.data(), {a.n, a.k}));
      unpack(b, view(y.data(), {b.n, b.k}));
      EXPECT_EQ(x, y);
    }
  }
  const TemporaryFolder fp8;
  EXPECT_EQ(Checkpoint::open(changed(fp8, "fp8_channel",
                                     [&](Json& config) {
                                       config["quantization_config"] =
                                           quark(channel, Json::object(), {"lm_head"});
                                     }))
                .weights(0)
                .experts.packed_up[0]
                .format.format,
            Format::fp8_channel);
  // INT8 with a scale a row, and zero points of 0; any other is not read.
  const Json integers = {{"dtype", "int8"}, {"qscheme", "per_channel"}, {"symmetric", true}};
  for (const std::int32_t zero : {0, 1}) {
    const TemporaryFolder at;
    std::vector<std::int32_t> zeros(4096, zero);
    const auto add_zeros = [&](Tensors& tensors) {
      for (const auto& [name, tensor] : Tensors(tensors)) {
        if (!name.ends_with(".weight_scale")) continue;
        tensors[name.substr(0, name.size() - 5) + "zero_point"] =
            view(zeros.data(), {tensor.shape[0]});
      }
    };
    const std::string message = error_of([&] {
      const Checkpoint made = Checkpoint::open(rewritten(
          at, "int8",
          [&](Json& config) {
            config["quantization_config"] = quark(integers, Json::object(), {"lm_head"});
          },
          add_zeros));
      EXPECT_EQ(made.weights(0).experts.packed_up[0].format.format, Format::int8);
    });
    EXPECT_EQ(message.find("weight_zero_point") != std::string::npos, zero != 0) << message;
    EXPECT_EQ(message.empty(), zero == 0) << message;
  }
  const auto refused = [&](const Json& q, const char* words) {
    const TemporaryFolder at;
    const std::string message = error_of([&] { (void)read(at, q).weights(0); });
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  refused(quark(channel, Json::object(), shared), "weight is {");
  refused(quark(nullptr, Json::object(), shared), "nothing has a weight that is packed");
  refused(quark(mxfp4, Json::object(), {"*experts*"}), "exclude leaves it plain");
  const auto with = [&](const Json& algorithm) {
    Json q = quark(mxfp4, Json::object(), shared);
    q["algo_config"] = Json::array({algorithm});
    return q;
  };
  refused(with({{"name", "rotation"}, {"r1", true}, {"r4", true}}), "r4 is true");
  refused(with({{"name", "rotation"}, {"online_r1_rotation", true}}), "online_r1_rotation is true");
  refused(with({{"name", "svdquant"}}), "algo_config is {");
  const TemporaryFolder fused;
  EXPECT_EQ(read(fused, with({{"name", "rotation"}, {"r1", true}, {"r4", false}}))
                .weights(0)
                .experts.packed_up.size(),
            wanted.packed_up.size());
  Json columns = channel;
  columns["ch_axis"] = 1;
  refused(quark(mxfp4, {{"*experts*", {{"weight", columns}}}}, shared), "not read for experts");
  Json fake = quark(mxfp4, Json::object(), shared);
  fake["export"]["weight_format"] = "fake_quantized";
  refused(fake, "weight_format is \"fake_quantized\"");
}

// fnmatch's [..]: sets of characters, and what is in none of them.
TEST(Quark, NamesWithSets) {
  const Json integers = {{"dtype", "int8"}, {"qscheme", "per_channel"}, {"symmetric", true}};
  const auto message = [&](const char* name) {
    const TemporaryFolder at;
    return error_of([&] {
      const Checkpoint made = Checkpoint::open(changed(at, "int8", [&](Json& config) {
        config["quantization_config"] = {{"quant_method", "quark"},
                                         {"global_quant_config", {{"weight", integers}}},
                                         {"exclude", Json::array({name})}};
      }));
      (void)made.weights(0);
    });
  };
  for (const char* of_experts : {"*.experts.[01].up_proj", "*.experts.[!2-9].*",
                                 "model.layers.[0-9].mlp.experts.?.down_proj"}) {
    EXPECT_NE(message(of_experts).find("exclude leaves it plain"), std::string::npos) << of_experts;
  }
  for (const char* of_others : {"*.experts.[2-9].up_proj", "*.experts.[!01].*", "*.mlp.[g]ate",
                                "*.experts.[01].up", "*Xexperts.[01].up_proj", "*+[0]*"}) {
    EXPECT_EQ(message(of_others), "") << of_others;
  }
}

// NVFP4 has its codes and its scales apart; e4m3 one scale.
TEST(Quark, Nvfp4AndFp8OfOneScale) {
  const Json nvfp4 = {{{"dtype", "fp4"}, {"group_size", 16}}, {{"dtype", "fp8_e4m3"}}};
  Json other = nvfp4;
  other[0]["group_size"] = 32;
  const Json tensor = {{"dtype", "fp8_e4m3"}, {"qscheme", "per_tensor"}};
  const struct {
    const char* name;
    const Json& weight;
    bool read;
  } pairs[] = {{"nvfp4_modelopt", nvfp4, true},   {"nvfp4_modelopt", other, false},
               {"nvfp4_modelopt", tensor, false}, {"fp8_tensor", tensor, true},
               {"fp8_tensor", nvfp4, false},      {"fp8_channel", tensor, false}};
  for (const auto& pair : pairs) {
    const TemporaryFolder at;
    const std::string message = error_of([&] {
      const Checkpoint made = Checkpoint::open(changed(at, pair.name, [&](Json& config) {
        config["quantization_config"] = {{"quant_method", "quark"},
                                         {"global_quant_config", {{"weight", pair.weight}}}};
      }));
      (void)made.weights(0);
    });
    EXPECT_EQ(message.empty(), pair.read) << pair.name << " " << pair.weight << ": " << message;
  }
}

}  // namespace
}  // namespace shunt::test
