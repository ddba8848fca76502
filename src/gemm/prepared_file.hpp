// What a file says of prepared weights beside their bytes, and whether an engine reads them.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shunt/gemm.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {

// The version of what is written here and of saved layers. A layout that changes gets another name,
// not another version.
inline constexpr std::string_view saved_version = "1";

// The name of the layout that the engine of a device reads: "cpu.panels64", "cuda.tiles128x64"; of
// packed weights "cpu.packed64", "cuda.fragments128x128" (with ".e2m1_f16" of 4-bit floats for
// f16), and "cuda.packed128x128" for fp8 rows.
std::string layout_name(DeviceType device, DType dtype, const FormatSpec& format = {},
                        RowFormat rows = RowFormat::as_dtype);

// Layout, dtype, sizes and, of packed weights, format and rows as JSON: {"layout":
// "cuda.tiles128x64", "dtype": "bf16", ..}. Throws Error{unsupported} for rows in nvfp4.
std::string saved_words(const PreparedWeights& weights);
// The inverse, for bytes [B] u8 of a file. `where` begins messages: "weights.safetensors: experts".
// Throws Error{bad_file} for words that are damaged or do not fit the bytes, Error{unsupported} for
// a layout that the context's engine does not read. The result has no data yet.
PreparedWeights read_saved_words(const Context& context, const std::string& where,
                                 const std::string& words, const Tensor& bytes);

// As write_safetensors(), with a checksum of each tensor in the metadata ("checksum.experts.down").
void write_with_checksums(const std::string& path,
                          const std::vector<std::pair<std::string, Tensor>>& tensors,
                          std::map<std::string, std::string> metadata);
// Throws Error{bad_file} naming the first tensor whose bytes have another, or that has none where
// others have. Files from before there were any pass.
void check_checksums(const SafetensorsFile& file);

}  // namespace shunt
