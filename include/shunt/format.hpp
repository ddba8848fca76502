// Weight formats: what a packed matrix holds, what its bytes mean, and how to get there and back.
//
// A checkpoint's dialect (which tensors, which names, scales or their reciprocals, which order of
// nibbles) ends where it is read: behind that, every matrix of a format has the one form below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// w[n, k] is a weight of a matrix [N, K], K the inner, contiguous one. e2m1 and 4-bit integers lie
// two to a byte, the even k in the low nibble; a row takes ceil(K / 2) bytes, and the nibble past
// an odd K is 0. A group that K cuts short has a scale as any other.
enum class Format : std::int32_t {
  plain = 0,        // f32 | bf16 | f16: what a Tensor says, no PackedMatrix
  fp8_tensor = 1,   // e4m3 [N, K] * global_scale
  fp8_channel = 2,  // e4m3 [N, K] * scales f32 [N]
  fp8_block = 3,    // e4m3 [N, K] * scales f32 [ceil(N / 128), ceil(K / 128)]
  mxfp8 = 4,        // e4m3 [N, K] * scales e8m0 [N, ceil(K / 32)]
  nvfp4 = 5,        // e2m1 [N, K] * scales e4m3 [N, ceil(K / 16)] * global_scale
  mxfp4 = 6,        // e2m1 [N, K] * scales e8m0 [N, ceil(K / 32)]
  int8 = 7,         // i8 [N, K] * scales f32 [N]
  int4 = 8,    // (u4 [N, K] - zero) * scales [N, groups]; zero 8, or zeros u8 [N, groups], 0 to 16
  dense3 = 9,  // 3-bit codes * scales e4m3 [N, ceil(K / 32)] * global_scale: Shunt's own, below
  sparse_nvfp4 = 10,  // nvfp4 of which two of every four along K are kept, 3.5 bits a weight
};

// dense3: `values` has 12 bytes for 32 of k, little endian. Weight i of them is the number of its
// window, bits 3 (i - 1) to 3 i + 2 (before the first stand zeros): its own three bits over those
// of the weight before. The 64 numbers, exact in bf16, and how codes are chosen stand in
// docs/formats.md.

// What the rows that a grouped GEMM multiplies are rounded to.
enum class RowFormat : std::int32_t {
  as_dtype = 0,   // the operation's dtype: weights alone are packed
  fp8_token = 1,  // e4m3 with a scale a row; weights fp8_tensor or fp8_channel
  fp8_block = 2,  // e4m3 with a scale for 128 of k; weights fp8_block
  // e2m1 with an e4m3 for 16 of k and an f32 a row, each row rounded as a matrix of its own; with
  // sparse_nvfp4 an e4m3 for 32. Weights nvfp4, or sparse_nvfp4 in pairs (docs/formats.md); on a
  // GPU of compute capability 10.0 or 12.0. A row that holds NaN or infinities gives NaN.
  nvfp4 = 3,
};
// "fp8_block"; of a number that is none of the enumeration, the number.
std::string to_string(RowFormat format);

// What a matrix is to be packed as. Printed and parsed as "nvfp4", "int4:64", "int4:64:ordered",
// "int4:64:ordered:zeros".
struct FormatSpec {
  Format format = Format::plain;
  int group = 0;  // int4: along K per scale, 32 | 64 | 128 or a multiple of 16; 0: 32. Others: 0
  // Of prepared weights alone, int4 in a whole: no PackedMatrix says so itself.
  bool ordered = false;  // one has group_of: k stand in order of groups, and rows are put so too
  bool zeros = false;    // one has zero points other than 8: without, the CPU keeps none
  // Without these two: what the matrices of prepared weights are.
  FormatSpec of_matrix() const { return {format, group}; }
  bool operator==(const FormatSpec&) const = default;
};
// Of a format that is none of the enumeration the number.
std::string to_string(const FormatSpec& spec);
// The same with int4's group said, as every PackedMatrix has it.
FormatSpec resolved(const FormatSpec& spec);
// Throws Error{invalid_argument} naming the text and every format there is.
FormatSpec format_from_string(const std::string& text);
// All formats that pack() makes, in the order of the enum, int4 once.
std::vector<FormatSpec> known_formats();
// Scales included, and zero points as nibbles, of a large matrix.
double bits_per_weight(const FormatSpec& spec);

// A view of one packed matrix. Every tensor is dense.
struct PackedMatrix {
  FormatSpec format{};  // resolved()
  std::int64_t n = 0, k = 0;
  Tensor values{};     // u8 [N, bytes of a row]; f8_e4m3 and i8: [N, K]
  Tensor scales{};     // f32, f8_e4m3 or f8_e8m0 as the enum says; int4: f16 | bf16 | f32
  Tensor zeros{};      // int4 with zero points of its own: u8 [N, groups], one to a byte
  Tensor group_of{};   // int4 in GPTQ's order of activations: i32 [K], the group of each k
  Tensor positions{};  // sparse_nvfp4: u8 [N, ceil(K / 8)], two groups of four to a byte: bits
                       // 1:0 and 3:2 are where the first's two values lie (ascending), 5:4 and
                       // 7:6 the second's. `values` then holds [N, ceil(K / 4)] bytes
  // Of fp8_tensor, nvfp4, sparse_nvfp4 and dense3; 1 elsewhere. It multiplies, whatever the
  // checkpoint's dialect does.
  float global_scale = 1;
  // A matrix that is given: `values` is.
  explicit operator bool() const { return static_cast<bool>(values); }
  std::size_t bytes() const;
  // A view of some of the rows: gate's or up's where both are stacked in one matrix. Throws Error
  // for rows out of range, and for fp8_block where they do not begin with a block of 128.
  PackedMatrix rows(std::int64_t begin, std::int64_t end) const;
};

// Throws Error{invalid_argument} naming the tensor of `matrix` that does not fit the others.
void check_packed(const std::string& name, const PackedMatrix& matrix, Device device);

// Bytes of all tensors of a packed [n, k], each aligned to 64. Throws Error for a group that the
// format does not have and for sizes that are negative or overflow.
std::size_t packed_bytes(const FormatSpec& spec, std::int64_t n, std::int64_t k);
// Rounds `matrix` [n, k] (f32 | bf16 | f16, any strides, on the host) to nearest even under the
// format's published scale rule (docs/formats.md), into `memory` (packed_bytes on the host). A
// magnitude that the scale cannot reach saturates. sparse_nvfp4 keeps the two largest magnitudes of
// every four, of equal ones the lower k. Throws Error{invalid_argument} for NaN and infinities.
// global_amax: a format with a global scale takes it for this magnitude instead of the matrix's own
// largest (gate and up of one checkpoint may share it); others refuse it; 0: the own. Shared out to
// threads of its own, one for each core that the process may use; the bytes do not depend on how
// many.
PackedMatrix pack(const FormatSpec& spec, const Tensor& matrix, Workspace memory,
                  float global_amax = 0);
// The exact values, rounded once to out's dtype: out [n, k] f32 | bf16 | f16, any strides, on the
// host. f16 saturates.
void unpack(const PackedMatrix& matrix, Tensor out);

}  // namespace shunt
