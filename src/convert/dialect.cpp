#include "convert/dialect.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/shape.hpp"

namespace shunt {

bool has_divisor(float scale) {
  const float divisor = 1 / scale;
  return std::isfinite(divisor) && 1 / divisor == scale;
}

namespace {

using Json = nlohmann::ordered_json;
using Bytes = std::vector<std::uint8_t>;

Bytes bytes_of(const void* data, std::size_t size) {
  const auto* first = static_cast<const std::uint8_t*>(data);
  return {first, first + size};
}
Bytes bytes_of(const Tensor& tensor) {
  return bytes_of(tensor.data, static_cast<std::size_t>(tensor.bytes()));
}

// Rows of `row` bytes, each padded with zeros to `padded`.
Bytes padded_rows(const Tensor& tensor, std::int64_t row, std::int64_t padded) {
  Bytes result(static_cast<std::size_t>(tensor.shape[0] * padded), 0);
  for (std::int64_t n = 0; n < tensor.shape[0]; ++n) {
    std::memcpy(result.data() + n * padded, tensor.as<const std::uint8_t>() + n * row,
                static_cast<std::size_t>(row));
  }
  return result;
}

// Nibble n % 8 of word [n / 8, group]; 8 where the matrix has none of its own.
Bytes zero_words(const PackedMatrix& matrix) {
  const std::int64_t groups = matrix.scales.shape[1];
  std::vector<std::uint32_t> words(static_cast<std::size_t>(groups_of(matrix.n, 8) * groups));
  for (std::int64_t n = 0; n < matrix.n; ++n) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::uint32_t zero =
          matrix.zeros ? matrix.zeros.as<const std::uint8_t>()[n * groups + g] : 8;
      words[static_cast<std::size_t>(n / 8 * groups + g)] |= zero << (n % 8 * 4);
    }
  }
  return bytes_of(words.data(), words.size() * sizeof(std::uint32_t));
}

// The group of each k.
Bytes order_words(const PackedMatrix& matrix) {
  if (matrix.group_of) return bytes_of(matrix.group_of);
  std::vector<std::int32_t> order(static_cast<std::size_t>(matrix.k));
  for (std::size_t k = 0; k < order.size(); ++k) {
    order[k] = static_cast<std::int32_t>(k) / matrix.format.group;
  }
  return bytes_of(order.data(), order.size() * sizeof(std::int32_t));
}

// weights of config_groups; activations as they come.
Json group_of(int bits_of, const char* type, const char* strategy, Json group_size,
              Json activations = nullptr) {
  Json weights = {{"num_bits", bits_of},
                  {"type", type},
                  {"symmetric", true},
                  {"strategy", strategy},
                  {"group_size", std::move(group_size)},
                  {"dynamic", false}};
  return {{"targets", {"Linear"}},
          {"weights", std::move(weights)},
          {"input_activations", std::move(activations)},
          {"output_activations", nullptr}};
}

Json compressed_tensors(const char* format, Json group, const std::vector<std::string>& ignore) {
  group["format"] = format;
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"quantization_status", "compressed"},
          {"config_groups", {{"group_0", std::move(group)}}},
          {"ignore", ignore},
          {"kv_cache_scheme", nullptr}};
}

}  // namespace

void Dialect::add(const PackedMatrix& kept) {
  const auto* const zero = kept.zeros.as<const std::uint8_t>();
  zeros = zeros || std::any_of(zero, zero + (kept.zeros ? kept.zeros.elements() : 0),
                               [](std::uint8_t z) { return z != 8; });
  ordered = ordered || kept.group_of;
  multiplies =
      multiplies || (kept.format.format == Format::nvfp4 && !has_divisor(kept.global_scale));
}

std::vector<PlannedTensor> dialect_plan(const Dialect& dialect, std::int64_t n, std::int64_t k,
                                        DType scales) {
  const FormatSpec format = resolved(dialect.format);
  const PlannedTensor global = {"weight_global_scale", DType::f32, {1}};
  switch (format.format) {
    case Format::fp8_tensor:
      return {{"weight", DType::f8_e4m3, {n, k}}, {"weight_scale", DType::f32, {1}}};
    case Format::fp8_channel:
      return {{"weight", DType::f8_e4m3, {n, k}}, {"weight_scale", DType::f32, {n, 1}}};
    case Format::fp8_block:
      return {{"weight", DType::f8_e4m3, {n, k}},
              {"weight_scale_inv", DType::f32, {groups_of(n, 128), groups_of(k, 128)}}};
    case Format::mxfp8:
      return {{"weight", DType::f8_e4m3, {n, k}},
              {"weight_scale", DType::u8, {n, groups_of(k, 32)}}};
    case Format::int8:
      return {{"weight", DType::i8, {n, k}}, {"weight_scale", DType::f32, {n, 1}}};
    case Format::nvfp4:
      if (dialect.multiplies) {
        return {{"weight", DType::u8, {n, groups_of(k, 2)}},
                {"weight_scale", DType::f8_e4m3, {n, groups_of(k, 16)}},
                {"weight_scale_2", DType::f32, {}}};
      }
      return {{"weight_packed", DType::u8, {n, groups_of(k, 2)}},
              {"weight_scale", DType::f8_e4m3, {n, groups_of(k, 16)}},
              global};
    case Format::mxfp4:
      return {{"weight_packed", DType::u8, {n, groups_of(k, 2)}},
              {"weight_scale", DType::u8, {n, groups_of(k, 32)}}};
    case Format::int4: {
      const std::int64_t groups = groups_of(k, format.group);
      std::vector<PlannedTensor> planned = {{"weight_packed", DType::i32, {n, groups_of(k, 8)}},
                                            {"weight_scale", scales, {n, groups}},
                                            {"weight_shape", DType::i64, {2}}};
      if (dialect.zeros) {
        planned.push_back({"weight_zero_point", DType::i32, {groups_of(n, 8), groups}});
      }
      if (dialect.ordered) planned.push_back({"weight_g_idx", DType::i32, {k}});
      return planned;
    }
    case Format::dense3:
      return {{"weight_packed", DType::u8, {n, 12 * groups_of(k, 32)}},
              {"weight_scale", DType::f8_e4m3, {n, groups_of(k, 32)}},
              {"weight_scale_2", DType::f32, {1}}};
    case Format::sparse_nvfp4:
      return {{"weight_packed", DType::u8, {n, groups_of(k, 4)}},
              {"weight_positions", DType::u8, {n, groups_of(k, 8)}},
              {"weight_scale", DType::f8_e4m3, {n, groups_of(k, 16)}},
              {"weight_scale_2", DType::f32, {1}}};
    default:
      fail(Status::unsupported, "convert: {} has no form in checkpoints yet", to_string(format));
  }
}

std::vector<DialectTensor> dialect_tensors(const Dialect& dialect, const PackedMatrix& matrix) {
  std::vector<DialectTensor> result;
  for (PlannedTensor& plan : dialect_plan(dialect, matrix.n, matrix.k, matrix.scales.dtype)) {
    result.push_back({std::move(plan), {}});
  }
  for (DialectTensor& tensor : result) {
    const std::string& name = tensor.plan.name;
    if (name == "weight") {
      tensor.bytes = bytes_of(matrix.values);
    } else if (name == "weight_packed") {
      tensor.bytes = padded_rows(matrix.values, matrix.values.shape[1],
                                 tensor.plan.bytes() / std::max<std::int64_t>(matrix.n, 1));
    } else if (name == "weight_positions") {
      tensor.bytes = bytes_of(matrix.positions);
    } else if (name == "weight_shape") {
      const std::array<std::int64_t, 2> shape = {matrix.n, matrix.k};
      tensor.bytes = bytes_of(shape.data(), sizeof shape);
    } else if (name == "weight_zero_point") {
      tensor.bytes = zero_words(matrix);
    } else if (name == "weight_g_idx") {
      tensor.bytes = order_words(matrix);
    } else if (name == "weight_global_scale") {
      const float divisor = 1 / matrix.global_scale;
      tensor.bytes = bytes_of(&divisor, sizeof divisor);
    } else if (name == "weight_scale_2" || !matrix.scales) {
      tensor.bytes = bytes_of(&matrix.global_scale, sizeof matrix.global_scale);
    } else {
      tensor.bytes = bytes_of(matrix.scales);
    }
    if (static_cast<std::int64_t>(tensor.bytes.size()) != tensor.plan.bytes()) {
      fail(Status::internal, "convert: tensor {} of {} takes {} bytes: planned were {}", name,
           to_string(matrix.format), tensor.bytes.size(), tensor.plan.bytes());
    }
  }
  return result;
}

Json dialect_config(const Dialect& dialect, const std::vector<std::string>& ignore) {
  const FormatSpec format = resolved(dialect.format);
  const auto rows = [](const char* strategy) -> Json {
    return {{"num_bits", 8},
            {"type", "float"},
            {"symmetric", true},
            {"strategy", strategy},
            {"dynamic", true}};
  };
  switch (format.format) {
    case Format::fp8_block:
      return {{"quant_method", "fp8"},
              {"fmt", "e4m3"},
              {"activation_scheme", "dynamic"},
              {"weight_block_size", {128, 128}},
              {"modules_to_not_convert", ignore}};
    case Format::fp8_tensor:
      return compressed_tensors("float-quantized",
                                group_of(8, "float", "tensor", nullptr, rows("tensor")), ignore);
    case Format::fp8_channel:
      return compressed_tensors("float-quantized",
                                group_of(8, "float", "channel", nullptr, rows("token")), ignore);
    case Format::mxfp8: {
      Json group = group_of(8, "float", "group", 32);
      group["weights"]["scale_dtype"] = "torch.uint8";
      return compressed_tensors("mxfp8-quantized", group, ignore);
    }
    case Format::int8: {
      Json activations = rows("token");
      activations["type"] = "int";
      return compressed_tensors("int-quantized",
                                group_of(8, "int", "channel", nullptr, activations), ignore);
    }
    case Format::nvfp4:
      if (dialect.multiplies) {
        const Json weights = {
            {"num_bits", 4}, {"type", "float"}, {"group_size", 16}, {"dynamic", false}};
        return {{"quant_method", "modelopt"},
                {"quant_algo", "W4A16_NVFP4"},
                {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}}}}},
                {"ignore", ignore}};
      }
      return compressed_tensors("nvfp4-pack-quantized", group_of(4, "float", "tensor_group", 16),
                                ignore);
    case Format::mxfp4: {
      Json group = group_of(4, "float", "group", 32);
      group["weights"]["scale_dtype"] = "torch.uint8";
      return compressed_tensors("mxfp4-pack-quantized", group, ignore);
    }
    case Format::int4: {
      Json group = group_of(4, "int", "group", format.group);
      group["weights"]["symmetric"] = !dialect.zeros;
      if (dialect.ordered) group["weights"]["actorder"] = "group";
      return compressed_tensors("pack-quantized", group, ignore);
    }
    default:
      return {{"quant_method", "shunt"},
              {"format", to_string(format)},
              {"modules_to_not_convert", ignore}};
  }
}

void set_cache_scheme(Json& config, Json scheme) {
  // Of a scale a tensor, which ModelOpt does not say and compressed-tensors has to be told.
  if (config["quant_method"] == "compressed-tensors" && scheme.is_object() &&
      scheme.contains("num_bits") && scheme["num_bits"] == 8 && !scheme.contains("strategy")) {
    scheme["strategy"] = "tensor";
    if (!scheme.contains("symmetric")) scheme["symmetric"] = true;
  }
  config["kv_cache_scheme"] = std::move(scheme);
}

}  // namespace shunt
