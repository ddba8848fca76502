// Layers in every kind of format that a GPU multiplies by a kernel of its own.
#pragma once

#include <vector>

#include "shunt/layer.hpp"

namespace shunt::testing {

struct FormatCase {
  const char* name;
  LayerOptions options;
};

inline LayerOptions options_of(DType dtype, FormatSpec format,
                               RowFormat rows = RowFormat::as_dtype) {
  return {.dtype = dtype, .format = format, .rows = rows};
}

inline std::vector<FormatCase> format_cases() {
  return {{"bf16", options_of(DType::bf16, {})},
          {"f16", options_of(DType::f16, {})},
          {"fp8_block", options_of(DType::bf16, {Format::fp8_block}, RowFormat::fp8_block)},
          {"fp8_channel", options_of(DType::bf16, {Format::fp8_channel}, RowFormat::fp8_token)},
          {"nvfp4", options_of(DType::bf16, {Format::nvfp4})},
          {"mxfp4 f16", options_of(DType::f16, {Format::mxfp4})},
          {"int4", options_of(DType::bf16, {Format::int4, 32})},
          {"int8", options_of(DType::bf16, {Format::int8})},
          {"sparse_nvfp4", options_of(DType::f16, {Format::sparse_nvfp4})}};
}

}  // namespace shunt::testing
