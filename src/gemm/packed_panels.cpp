#include "gemm/packed_panels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/shape.hpp"
#include "format/codes.hpp"
#include "format/dense3.hpp"
#include "gemm/k_order.hpp"

namespace shunt::cpu_engine {
namespace {

bool is_fp8(Format f) {
  return f == Format::fp8_tensor || f == Format::fp8_channel || f == Format::fp8_block ||
         f == Format::mxfp8;
}
bool one_scale(Format f) {
  return f == Format::fp8_tensor || f == Format::fp8_channel || f == Format::int8;
}

// What a step holds: k, bytes of a column's word, and bytes of a step.
struct Step {
  std::int64_t k, word, bytes;
};
Step step_of(Format f) {
  if (is_fp8(f)) return {2, 2, 128};
  if (f == Format::int8) return {4, 4, 256};
  if (f == Format::dense3) return {32, 12, 768};
  if (f == Format::sparse_nvfp4) return {16, 6, 384};
  return {8, 4, 256};
}
// Bytes of `values` for the first `k` of a row.
std::int64_t value_bytes(Format f, std::int64_t k) {
  if (is_fp8(f) || f == Format::int8) return k;
  if (f == Format::dense3) return groups_of(k, 32) * dense3_group_bytes;
  return groups_of(k, f == Format::sparse_nvfp4 ? 4 : 2);
}

// One matrix's row into column c of a panel; `order`: which k stands at each place, or null.
class Column {
 public:
  // `halves`: of the header.
  Column(const PackedPanels& layout, const PackedMatrix& m, std::int64_t row, std::int64_t column,
         const std::int32_t* order, bool halves)
      : layout_(layout),
        m_(m),
        order_(order),
        halves_(halves),
        row_(row),
        column_(column),
        format_(layout.format.format) {}

  bool write(char* at) {
    const std::int64_t group = layout_.group();
    const Step step = step_of(format_);
    const std::int64_t row_bytes = value_bytes(format_, layout_.k);
    const auto* const values = m_.values.as<const char>() + row_ * row_bytes;
    for (std::int64_t g = 0; g * group < layout_.k; ++g) {
      const std::int64_t count = std::min(group, layout_.k - g * group);
      scale(g, at);
      at += layout_.scale_bytes();
      for (std::int64_t k = 0; order_ != nullptr && k < count; k += step.k) {
        ordered_codes(values, g * group + k, std::min(step.k, count - k), at);
        at += step.bytes;
      }
      for (std::int64_t k = 0; order_ == nullptr && k < count; k += step.k) {
        const std::int64_t from = value_bytes(format_, g * group + k);
        const std::int64_t size = std::min(
            value_bytes(format_, g * group + std::min(k + step.k, count)) - from, step.word);
        codes(values + from, size, g * group + k, at);
        at += step.bytes;
      }
    }
    return finite_;
  }

 private:
  void scale(std::int64_t g, char* at) {
    const std::int64_t groups = m_.scales.rank == 2 ? m_.scales.shape[1] : 0;
    const auto* const bytes = m_.scales.as<const std::uint8_t>();
    switch (format_) {
      case Format::fp8_tensor:
        return put(at + 4 * column_, m_.global_scale);
      case Format::fp8_channel:
      case Format::int8:
        return put(at + 4 * column_, m_.scales.as<const float>()[row_]);
      case Format::fp8_block:
        return put(at + column_ / 16 * 4, m_.scales.as<const float>()[row_ / 128 * groups + g]);
      case Format::int4: {
        const auto scale = load_f32(m_.scales.data, m_.scales.dtype, row_ * groups + g);
        std::uint16_t half = 0;
        if (m_.scales.dtype == DType::f16) {
          half = m_.scales.as<const std::uint16_t>()[row_ * groups + g];
        } else {
          half = halves_ ? f32_to_f16(scale) : f32_to_bf16(scale);
        }
        finite_ = finite_ && std::isfinite(scale);
        std::memcpy(at + 2 * column_, &half, 2);
        if (layout_.format.zeros) {
          const auto* const zeros = m_.zeros.as<const std::uint8_t>();
          at[128 + column_] = static_cast<char>(zeros != nullptr ? zeros[row_ * groups + g] : 8);
        }
        return;
      }
      default: {
        const std::uint8_t code = bytes[row_ * groups + g];
        const bool power = format_ == Format::mxfp4 || format_ == Format::mxfp8;
        finite_ = finite_ && !(power ? code == 255 : e4m3_is_nan(code));
        at[column_] = static_cast<char>(code);
      }
    }
  }
  void put(char* at, float scale) {
    finite_ = finite_ && std::isfinite(scale);
    std::memcpy(at, &scale, 4);
  }

  // `count` nibbles from the place `first` on.
  void ordered_codes(const char* row, std::int64_t first, std::int64_t count, char* at) const {
    std::uint32_t word = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t k = order_[first + i];
      const auto byte = static_cast<std::uint8_t>(row[k / 2]);
      word |= (static_cast<std::uint32_t>(byte) >> (k % 2 * 4) & 15U) << packed_nibble_bit(i);
    }
    std::memcpy(at + 4 * column_, &word, 4);
  }

  // `size` bytes of codes of k on.
  void codes(const char* from, std::int64_t size, std::int64_t k, char* at) {
    if (is_fp8(format_)) {
      for (std::int64_t i = 0; i < size; ++i) {
        finite_ = finite_ && !e4m3_is_nan(static_cast<std::uint8_t>(from[i]));
      }
      std::memcpy(at + 2 * column_, from, static_cast<std::size_t>(size));
    } else if (format_ == Format::dense3) {
      for (std::int64_t word = 0; word < 3; ++word) {
        std::memcpy(at + word * 256 + 4 * column_, from + 4 * word, 4);
      }
    } else if (format_ == Format::sparse_nvfp4) {
      const std::int64_t row_bytes = groups_of(layout_.k, 8);
      const auto* const places = m_.positions.as<const char>() + row_ * row_bytes + k / 8;
      std::memcpy(at + 2 * column_, places,
                  static_cast<std::size_t>(std::min<std::int64_t>(2, row_bytes - k / 8)));
      nibbles(from, size, at + 128 + 4 * column_);
    } else if (format_ == Format::int8) {
      std::memcpy(at + 4 * column_, from, static_cast<std::size_t>(size));
    } else {
      nibbles(from, size, at + 4 * column_);
    }
  }
  // `size` bytes of two nibbles into the order of a word.
  static void nibbles(const char* from, std::int64_t size, char* to) {
    std::uint32_t word = 0;
    for (std::int64_t i = 0; i < 2 * size; ++i) {
      const std::uint32_t code = static_cast<std::uint8_t>(from[i / 2]) >> (i % 2 * 4) & 15U;
      word |= code << packed_nibble_bit(i);
    }
    std::memcpy(to, &word, 4);
  }

  const PackedPanels& layout_;
  const PackedMatrix& m_;
  const std::int32_t* order_;
  bool halves_;
  std::int64_t row_, column_;
  Format format_;
  bool finite_ = true;
};

}  // namespace

std::int64_t PackedPanels::group() const {
  switch (format.format) {
    case Format::fp8_block:
      return 128;
    case Format::mxfp8:
    case Format::mxfp4:
    case Format::dense3:
      return 32;
    case Format::nvfp4:
    case Format::sparse_nvfp4:
      return 16;
    case Format::int4:
      return format.group;
    default:
      return std::max<std::int64_t>(k, 1);
  }
}

std::int64_t PackedPanels::scale_bytes() const {
  if (one_scale(format.format)) return 256;
  if (format.format == Format::int4) return format.zeros ? 192 : 128;
  return 64;
}

std::int64_t PackedPanels::code_bytes(std::int64_t count) const {
  const Step step = step_of(format.format);
  return groups_of(count, step.k) * step.bytes;
}

std::int64_t PackedPanels::panel_bytes() const {
  const std::int64_t whole = k / group(), rest = k % group();
  return whole * (scale_bytes() + code_bytes(group())) +
         (rest > 0 ? scale_bytes() + code_bytes(rest) : 0);
}

bool write_packed_panel(const PackedPanels& layout, const PackedMatrix& gate,
                        const PackedMatrix* up, std::int64_t panel, char* group_data) {
  char* const to = group_data + layout.panels_at() + panel * layout.panel_bytes();
  std::memset(to, 0, static_cast<std::size_t>(layout.panel_bytes()));
  const PanelLayout order = layout.order();
  PackedHeader header;
  std::memcpy(&header, group_data, sizeof header);
  bool finite = true;
  for (std::int64_t c = 0; c < panel_columns; ++c) {
    const std::int64_t row = order.row(panel, c);
    if (row < 0) continue;
    const bool second = up != nullptr && row >= gate.n;
    const std::int32_t* const k_order =
        layout.format.ordered ? layout.order_of(group_data, second ? 1 : 0) : nullptr;
    Column one(layout, second ? *up : gate, second ? row - gate.n : row, c, k_order,
               header.halves != 0);
    finite = one.write(to) && finite;
  }
  return finite;
}

bool can_be_followed(const PackedPanels& layout, const char* group_data) {
  PackedHeader header;
  std::memcpy(&header, group_data, sizeof header);
  if (header.apart != 0 && layout.orders() < 2) return false;
  for (std::int64_t which = 0; which < layout.orders(); ++which) {
    const char* const order =
        group_data + PackedPanels::header_bytes + which * layout.order_bytes();
    if (!follows_k(order, layout.k)) return false;
  }
  return true;
}

void write_packed_header(const PackedPanels& layout, const PackedMatrix& gate,
                         const PackedMatrix* up, char* group_data) {
  std::memset(group_data, 0, static_cast<std::size_t>(layout.panels_at()));
  PackedHeader header{
      .global = {gate.global_scale, (up != nullptr ? *up : gate).global_scale},
      .halves = gate.scales.dtype == DType::f16 || (up != nullptr && up->scales.dtype == DType::f16)
                    ? 1U
                    : 0U};
  for (std::int64_t which = 0; which < layout.orders(); ++which) {
    write_k_order(which == 0 ? gate : *up,
                  reinterpret_cast<std::int32_t*>(group_data + PackedPanels::header_bytes +
                                                  which * layout.order_bytes()));
  }
  if (layout.orders() == 2 &&
      !std::equal(layout.order_of(group_data, 0), layout.order_of(group_data, 0) + layout.k,
                  layout.order_of(group_data, 1))) {
    header.apart = 1;
  }
  std::memcpy(group_data, &header, sizeof header);
}

void read_packed_column(const PackedPanels& layout, const char* group_data, std::int64_t panel,
                        std::int64_t column, double* to) {
  const Format f = layout.format.format;
  const std::int64_t group = layout.group();
  const Step step = step_of(f);
  PackedHeader header;
  std::memcpy(&header, group_data, sizeof header);
  const bool up = layout.paired && column / column_block % 2 != 0;
  const auto global = static_cast<double>(header.global[up ? 1 : 0]);
  const char* at = group_data + layout.panels_at() + panel * layout.panel_bytes();
  const std::int32_t* const k_order =
      layout.format.ordered ? layout.order_of(group_data, up ? 1 : 0) : nullptr;
  const auto number = [](const char* from) {
    float x = 0;
    std::memcpy(&x, from, 4);
    return static_cast<double>(x);
  };
  const auto byte = [](const char* from) { return static_cast<std::uint8_t>(*from); };
  for (std::int64_t begin = 0; begin < layout.k; begin += group) {
    const std::int64_t count = std::min(group, layout.k - begin);
    double scale = 1;
    int zero = 0;
    if (one_scale(f)) {
      scale = number(at + 4 * column);
    } else if (f == Format::fp8_block) {
      scale = number(at + column / 16 * 4);
    } else if (f == Format::int4) {
      std::uint16_t half = 0;
      std::memcpy(&half, at + 2 * column, 2);
      scale = static_cast<double>(header.halves != 0 ? f16_to_f32(half) : bf16_to_f32(half));
      zero = layout.format.zeros ? byte(at + 128 + column) : 8;
    } else if (f == Format::mxfp4 || f == Format::mxfp8) {
      scale = e8m0_to_f64(byte(at + column));
    } else {
      scale = static_cast<double>(e4m3_to_f32(byte(at + column))) * global;
    }
    at += layout.scale_bytes();
    for (std::int64_t k = 0; k < count; k += step.k, at += step.bytes) {
      std::uint8_t word[12] = {};
      if (f == Format::dense3) {
        for (std::ptrdiff_t w = 0; w < 3; ++w) {
          std::memcpy(word + 4 * w, at + 256 * w + std::ptrdiff_t{4} * column, 4);
        }
      } else {
        std::memcpy(word,
                    at + (f == Format::sparse_nvfp4 ? 128 : 0) +
                        std::min<std::int64_t>(step.word, 4) * column,
                    static_cast<std::size_t>(std::min<std::int64_t>(step.word, 4)));
      }
      std::uint16_t places = 0;
      if (f == Format::sparse_nvfp4) std::memcpy(&places, at + 2 * column, 2);
      for (std::int64_t i = 0; i < step.k && k + i < count; ++i) {
        double value = 0;
        std::uint32_t codes = 0;
        std::memcpy(&codes, word, 4);
        const auto nibble = [&](std::int64_t j) {
          return static_cast<int>(codes >> packed_nibble_bit(j) & 15U);
        };
        if (is_fp8(f)) {
          value = static_cast<double>(e4m3_to_f32(word[i]));
        } else if (f == Format::int8) {
          value = static_cast<std::int8_t>(word[i]);
        } else if (f == Format::dense3) {
          value =
              static_cast<double>(dense3_values[static_cast<std::size_t>(dense3_window(word, i))]);
        } else if (f == Format::sparse_nvfp4) {
          for (std::int64_t j = i / 4 * 2; j < i / 4 * 2 + 2; ++j) {
            if ((places >> (2 * j) & 3) == i % 4) {
              value = static_cast<double>(e2m1_values[static_cast<std::size_t>(nibble(j))]);
            }
          }
        } else if (f == Format::int4) {
          value = nibble(i) - zero;
        } else {
          value = static_cast<double>(e2m1_values[static_cast<std::size_t>(nibble(i))]);
        }
        const std::int64_t place = begin + k + i;
        to[k_order != nullptr ? k_order[place] : place] = value * scale;
      }
    }
  }
}

PackedScale packed_scale(Format format, bool halves) {
  switch (format) {
    case Format::fp8_block:
      return PackedScale::block;
    case Format::mxfp8:
    case Format::mxfp4:
      return PackedScale::e8m0;
    case Format::nvfp4:
    case Format::dense3:
    case Format::sparse_nvfp4:
      return PackedScale::e4m3;
    case Format::int4:
      return halves ? PackedScale::f16 : PackedScale::bf16;
    default:
      return PackedScale::column;
  }
}

const PackedKernels& packed_kernels([[maybe_unused]] Isa isa, [[maybe_unused]] bool dot) {
#if SHUNT_X86
  if (dot && isa == Isa::amx_bf16) {
    static const PackedKernels tiles = [] {
      PackedKernels kernels = avx512_bf16::packed_kernels;
      kernels.e4m3 = amx_bf16::e4m3_kernel;
      return kernels;
    }();
    return tiles;
  }
  if (dot) {
    return features().shifts_beside_dots ? avx512_bf16::packed_kernels_by_shifts
                                         : avx512_bf16::packed_kernels;
  }
  if (isa >= Isa::avx512) return avx512::packed_kernels;
  if (isa == Isa::avx2) return avx2::packed_kernels;
#endif
  return scalar::packed_kernels;
}

bool packed_dots(Isa isa, Format format) {
  if (isa == Isa::avx512_bf16) {
    if (format == Format::int8) return !features().int8_by_words;
    return format != Format::dense3;
  }
  const bool e4m3 = format == Format::fp8_tensor || format == Format::fp8_channel ||
                    format == Format::fp8_block || format == Format::mxfp8;
  return isa == Isa::amx_bf16 && e4m3;
}

RowTiles packed_tiles([[maybe_unused]] Isa isa) {
#if SHUNT_X86
  if (isa == Isa::amx_bf16) return amx_bf16::e4m3_tiles;
#endif
  return {};
}

PackedKernel packed_kernel(const PackedKernels& kernels, Format format) {
  switch (format) {
    case Format::fp8_tensor:
    case Format::fp8_channel:
    case Format::fp8_block:
    case Format::mxfp8:
      return kernels.e4m3;
    case Format::nvfp4:
    case Format::mxfp4:
      return kernels.e2m1;
    case Format::int8:
      return kernels.int8;
    case Format::int4:
      return kernels.int4;
    case Format::dense3:
      return kernels.dense3;
    case Format::sparse_nvfp4:
      return kernels.sparse;
    case Format::plain:
      break;
  }
  fail(Status::internal, "no kernel multiplies packed weights of {}",
       to_string(FormatSpec{format}));
}

FixedProduct fixed_product([[maybe_unused]] Isa isa, [[maybe_unused]] const PackedPanels& panels,
                           [[maybe_unused]] DType dtype) {
#if SHUNT_X86
  const std::size_t group = panels.format.format == Format::int8
                                ? fixed_byte_group
                                : static_cast<std::size_t>(panels.group());
  if (dtype == DType::f32 || group > most_fixed_group) return {};
  const bool dot = dtype == DType::bf16 && packed_dots(isa, panels.format.format);
  const bool has_vnni = isa >= Isa::avx512 && features().avx512_vnni, vnni = has_vnni && !dot;
  static const FixedKernels none;
  const FixedKernels& kernels = isa == Isa::avx2 ? avx2::fixed_kernels
                                : vnni           ? avx512_vnni::fixed_kernels
                                                 : none;
  const bool vbmi = features().avx512_vbmi, tiles = isa == Isa::amx_bf16 && vnni;
  const bool planes = vnni && vbmi && group % 16 == 0;
  const bool bytes = tiles && vbmi && features().amx_int8;
  const auto product = [&](const FixedFormat& format, const FixedTiles& many = {}) {
    return format.row != nullptr ? FixedProduct{format, group, many} : FixedProduct{};
  };
  const auto of_pairs = [&](const FixedTiles& many) {
    return tiles && (group == 16 || group == 32) ? many : FixedTiles{};
  };
  const auto of_nibbles = [&](const FixedFormat& words, const FixedFormat& in_planes,
                              const FixedTiles& many) {
    return planes ? product(in_planes, many) : product(words);
  };
  const auto of_bytes = [&](const FixedTiles& many) {
    return bytes && group % 64 == 0 && group <= most_tiled_group ? many : FixedTiles{};
  };
  switch (panels.format.format) {
    case Format::nvfp4:
      return of_nibbles(kernels.nvfp4, avx512_vbmi::nvfp4_planes, of_pairs(amx_bf16::nvfp4_pairs));
    case Format::mxfp4:
      return of_nibbles(kernels.mxfp4, avx512_vbmi::mxfp4_planes, of_pairs(amx_bf16::mxfp4_pairs));
    case Format::int4:
      return of_nibbles(
          kernels.int4, avx512_vbmi::int4_planes,
          group < 64 ? of_pairs(amx_bf16::int4_pairs) : of_bytes(amx_int8::int4_tiles));
    case Format::int8:
      return product(features().int8_by_words ? kernels.int8_to_l1 : kernels.int8,
                     of_bytes(amx_int8::int8_tiles));
    case Format::sparse_nvfp4:
      return product(vnni ? avx512_vnni::fixed_sparse : FixedFormat{},
                     of_pairs(amx_bf16::sparse_pairs));
    case Format::dense3:
      if (has_vnni && vbmi) {
        return product(
            features().fewer_loads ? avx512_vbmi::fixed_dense3_shared : avx512_vbmi::fixed_dense3,
            bytes ? amx_int8::dense3_tiles : FixedTiles{});
      }
      return product(isa >= Isa::avx2 ? avx2::fixed_dense3 : FixedFormat{});
    default:
      break;
  }
#endif
  return {};
}

}  // namespace shunt::cpu_engine
