#include "gemm/fragment_prepare.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>

#include "core/convert.hpp"
#include "cpu/free_threads.hpp"
#include "format/codes.hpp"
#include "format/dense3.hpp"
#include "gemm/cuda_engine.hpp"
#include "gemm/fragment_lane.hpp"
#include "gemm/k_order.hpp"

// Products here are offsets in a tile of 16 KB.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace shunt::cuda_engine {

namespace {

std::int64_t cut(std::int64_t k, std::int64_t group) { return (k + group - 1) / group; }

// A row of the layout in its matrix.
struct Row {
  const PackedMatrix* matrix = nullptr;  // null: none
  std::int64_t row = 0;
  const std::int32_t* order = nullptr;  // which k stands at each place; null: as they are

  std::uint8_t byte(const Tensor& tensor, std::int64_t columns, std::int64_t at) const {
    return tensor.as<const std::uint8_t>()[row * columns + at];
  }
  // The codes at places `first` to `first` + count, of sparse ones of those kept: past the end what
  // counts as zero. Returns how many are not past it.
  int codes(std::int64_t first, int count, std::uint8_t* to) const {
    const PackedMatrix& m = *matrix;
    const Format format = m.format.format;
    const bool sparse = format == Format::sparse_nvfp4;
    const std::int64_t all = sparse ? cut(m.k, 4) * 2 : m.k;
    const auto inside = static_cast<int>(std::clamp<std::int64_t>(all - first, 0, count));
    const auto* const values = m.values.as<const std::uint8_t>();
    if (format == Format::int8) {
      const std::uint8_t* const from = values + row * m.k + first;
      for (int i = 0; i < inside; ++i) to[i] = from[i] ^ 0x80;
    } else if (m.values.dtype == DType::f8_e4m3) {
      std::copy_n(values + row * m.k + first, inside, to);
    } else if (format == Format::dense3) {
      // `first` begins a group, of 8 codes every 3 bytes.
      const std::uint8_t* const from =
          values + (row * cut(m.k, dense3_group) + first / dense3_group) * dense3_group_bytes;
      for (int i = 0; i < inside; ++i) {
        const std::uint8_t* const three = from + i / 8 * 3;
        const int bits = three[0] | three[1] << 8 | three[2] << 16;
        to[i] = static_cast<std::uint8_t>(bits >> (i % 8 * 3) & 7);
      }
    } else if (order != nullptr) {
      const std::uint8_t* const from = values + row * cut(m.k, 2);
      for (int i = 0; i < inside; ++i) {
        const std::int64_t k = order[first + i];
        to[i] = from[k / 2] >> (k % 2 * 4) & 15;
      }
    } else {  // `first` is even
      const std::uint8_t* const from = values + row * cut(m.k, sparse ? 4 : 2) + first / 2;
      for (int i = 0; i < inside / 2; ++i) to[2 * i] = from[i] & 15, to[2 * i + 1] = from[i] >> 4;
      if (inside % 2 != 0) to[inside - 1] = from[inside / 2] & 15;
    }
    for (int i = inside; i < count; ++i) {
      to[i] = format == Format::int4 ? zero(first + i) : format == Format::int8 ? 128 : 0;
    }
    return inside;
  }
  // The four bits of the group of four at 4 `four`; past the end 0 and 1.
  std::uint32_t positions(std::int64_t four) const {
    if (four >= cut(matrix->k, 4)) return 4;
    const std::uint8_t two = byte(matrix->positions, cut(matrix->k, 8), four / 2);
    return four % 2 == 0 ? two & 15U : two >> 4U;
  }
  // Of formats with a byte for each `group` of k.
  template <int group>
  std::uint8_t scale_byte(std::int64_t k) const {
    return byte(matrix->scales, cut(matrix->k, group), k / group);
  }
  // k of a group, of int4.
  std::int64_t group() const { return matrix->format.group; }
  // Of int4.
  std::int64_t scale_at(std::int64_t k) const {
    return row * cut(matrix->k, group()) + k / group();
  }
  // Also behind the end, where its group reaches so far.
  std::uint8_t zero(std::int64_t k) const {
    if (!matrix->zeros || k / group() >= cut(matrix->k, group())) return 8;
    return matrix->zeros.as<const std::uint8_t>()[scale_at(k)] & 15;
  }
};

Row row_of(const FragmentLayout& layout, const PackedMatrix& gate, const PackedMatrix* up,
           const std::int32_t* order, std::int64_t at) {
  const std::int64_t row = layout.order().source(at), firsts = layout.out_columns();
  if (row < 0) return {};
  return row < firsts ? Row{&gate, row, order} : Row{up, row - firsts, order};
}

// What a row's scales are relative to, and the factor that its sums get.
struct RowScale {
  int largest = 0;   // mxfp4, mxfp8: code of a block that is not zeros
  int exponent = 0;  // int4: scales times 2^-exponent are at most 2^11
  float factor = 0;
  bool finite = true;
};

RowScale row_scale(const Row& row) {
  RowScale result;
  const PackedMatrix& m = *row.matrix;
  switch (m.format.format) {
    case Format::nvfp4:
    case Format::sparse_nvfp4:
    case Format::fp8_tensor:
      result.factor = m.global_scale;
      break;
    case Format::int8:
    case Format::fp8_channel:
      result.factor = m.scales.as<const float>()[row.row] * m.global_scale;
      break;
    case Format::fp8_block:
      result.factor = m.global_scale;
      break;
    case Format::dense3:
      result.factor = m.global_scale * dense3_unit;
      break;
    case Format::mxfp4:
    case Format::mxfp8: {
      const bool wide = m.format.format == Format::mxfp8;
      for (std::int64_t k = 0; k < m.k; k += 32) {
        std::array<std::uint8_t, 32> codes;
        row.codes(k, 32, codes.data());
        int any = 0;
        for (const std::uint8_t code : codes) any |= code;
        if ((any & (wide ? 0x7f : 7)) != 0)
          result.largest = std::max<int>(result.largest, row.scale_byte<32>(k));
      }
      result.finite = result.largest < 255;
      result.factor = std::ldexp(1.0F, result.largest - (wide ? 134 : 128));
      break;
    }
    case Format::int4: {
      float most = 0;
      for (std::int64_t k = 0; k < m.k; k += row.group()) {
        const float scale = std::fabs(load_f32(m.scales.data, m.scales.dtype, row.scale_at(k)));
        if (!std::isfinite(scale)) result.finite = false;
        most = std::max(most, scale);
      }
      int exponent = 0;
      if (most > 0 && result.finite) std::frexp(most, &exponent), exponent -= 11;
      result.exponent = std::clamp(exponent, -126, 126);
      result.factor = std::ldexp(1.0F, result.exponent);
      break;
    }
    default:
      break;
  }
  result.finite = result.finite && std::isfinite(result.factor);
  return result;
}

float block_scale(const Row& row, std::int64_t step) {
  const PackedMatrix& m = *row.matrix;
  return load_f32(m.scales.data, m.scales.dtype, row.row / 128 * cut(m.k, 128) + step);
}

void put_word(char* to, std::uint32_t word) { std::memcpy(to, &word, 4); }
std::uint32_t word_at(const char* from) {
  std::uint32_t word = 0;
  std::memcpy(&word, from, 4);
  return word;
}

template <bool bf16>
class TileWriter {
 public:
  TileWriter(const FragmentLayout& layout, const Row* rows, const RowScale* scales)
      : layout_(layout), codes_(layout.codes()), rows_(rows), scales_(scales) {}

  // False: a code or a scale is not finite.
  bool write(std::int64_t step, char* tile) {
    first_ = step * FragmentLayout::tile_k;
    const TileParts parts = layout_.parts();
    const bool sparse = codes_ == Codes::sparse;
    for (int row = 0; row < FragmentLayout::tile_rows; ++row) read_codes(row);
    for (int block = 0; block < 8; ++block) {
      for (int pair = 0; pair < (sparse ? 2 : 4); ++pair) {
        for (int lane = 0; lane < 32; ++lane) write_pair(block, pair, lane, tile);
      }
      if (sparse) {
        for (int word = 0; word < 64; ++word) {
          put_word(tile + parts.positions + positions_at(block, word / 32, word % 32),
                   positions(block, word / 32, word % 32));
        }
      }
      for (int q = 0; q < 8; ++q) {
        for (int upper = 0; upper < 2; ++upper) write_scales(block, q, upper, tile, parts);
      }
    }
    if (codes_ == Codes::fp8_block) {
      for (int half = 0; half < 2; ++half) {
        // Rows of either half of 16 lie in one block of 128 of their matrix.
        const Row& row = rows_[8 * half];
        const float scale = row.matrix != nullptr ? block_scale(row, step) : 0;
        finite_ = finite_ && std::isfinite(scale);
        std::memcpy(tile + parts.scales + 4 * half, &scale, 4);
      }
    }
    return finite_;
  }

 private:
  // A row's codes of the step as they are stored: nvfp4's scales have no sign, and none is zero, in
  // the tile; a block of mxfp4 or mxfp8 that is too small for a factor counts as zeros.
  void read_codes(int row) {
    std::uint8_t* const to = codes_of_[row];
    const Row& from = rows_[row];
    const bool sparse = codes_ == Codes::sparse;
    const int count = sparse ? FragmentLayout::tile_k / 2 : FragmentLayout::tile_k;
    if (from.matrix == nullptr) {
      std::fill_n(to, count, codes_ == Codes::int4 ? 8 : codes_ == Codes::int8 ? 128 : 0);
      return;
    }
    const int inside = from.codes(sparse ? first_ / 2 : first_, count, to);
    const auto each_block = [&](int columns, std::int64_t k, const auto& change) {
      for (int at = 0; at < inside; at += columns) {
        const std::int64_t first = first_ + at / columns * k;
        change(first, to + at, std::min(columns, inside - at));
      }
    };
    if (codes_ == Codes::nvfp4 || sparse) {
      each_block(sparse ? 8 : 16, 16, [&](std::int64_t k, std::uint8_t* of_block, int many) {
        const std::uint8_t scale = from.scale_byte<16>(k);
        const std::uint8_t kept = (scale & 0x7f) == 0 ? 0 : 0xff, sign = scale >> 4 & 8 & kept;
        for (int i = 0; i < many; ++i) of_block[i] = (of_block[i] ^ sign) & kept;
      });
    } else if (mx(codes_)) {
      each_block(32, 32, [&](std::int64_t k, std::uint8_t* of_block, int many) {
        if (power(row, k) < 1) std::fill_n(of_block, many, std::uint8_t{0});
      });
    }
    if (eight_bits(codes_) && codes_ != Codes::int8) {
      std::uint8_t most = 0;  // a NaN is the largest magnitude
      for (int i = 0; i < count; ++i) most = std::max<std::uint8_t>(most, to[i] & 0x7f);
      finite_ = finite_ && !e4m3_is_nan(most);
    }
  }
  int power(int row, std::int64_t k) const {
    return most_power(bf16) + rows_[row].scale_byte<32>(k) - scales_[row].largest;
  }

  void write_pair(int block, int pair, int lane, char* tile) {
    const auto from = [&](int i) {  // the two codes of register i of the pair's eight
      const FragmentPlace at{block, 2 * pair + i / 4, lane, i % 4, 0};
      return &codes_of_[shunt::cuda_engine::row_of(at)][column_of(at)];
    };
    char* const to = tile + codes_at(codes_, block, pair, lane);
    if (eight_bits(codes_)) {
      char bytes[16];
      for (int i = 0; i < 8; ++i) {
        for (int half = 0; half < 2; ++half) {
          bytes[wide_byte(i / 4, i % 4, half)] = static_cast<char>(from(i)[half]);
        }
      }
      std::memcpy(to, bytes, sizeof bytes);
      return;
    }
    std::uint8_t codes[8][2];
    for (int i = 0; i < 8; ++i) codes[i][0] = from(i)[0], codes[i][1] = from(i)[1];
    if (codes_ == Codes::dense3) {
      std::uint32_t word = 0;
      std::uint16_t half = 0;
      encode_dense3(codes, word, half);
      put_word(to, word);
      std::memcpy(tile + dense3_half_at(block, pair, lane), &half, sizeof half);
      return;
    }
    std::uint32_t w0 = 0, w1 = 0;
    if (codes_ == Codes::int4) {
      encode_int4(codes, w0, w1);
    } else {
      encode_e2m1<bf16>(codes, w0, w1);
    }
    put_word(to, w0);
    put_word(to + 4, w1);
  }

  std::uint32_t positions(int block, int half, int lane) const {
    const int first = 16 * half + lane % 4 / 2 * 8 + lane % 2 * 4;  // of fours
    std::uint32_t word = 0;
    for (int upper = 0; upper < 2; ++upper) {
      const Row& row = rows_[16 * block + 8 * upper + lane / 4];
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t two =
            row.matrix != nullptr ? row.positions(first_ / 4 + first + i) : 4U;
        word |= two << (16 * upper + 4 * i);
      }
    }
    return word;
  }

  void write_scales(int block, int q, int upper, char* tile, const TileParts& parts) {
    const int line = 16 * block + 8 * upper + q;
    const Row& row = rows_[line];
    char* const scales = tile + parts.scales;
    const auto inside = [&](std::int64_t k) { return row.matrix != nullptr && k < row.matrix->k; };
    if (codes_ == Codes::nvfp4 || codes_ == Codes::sparse) {
      for (int i = 0; i < 8; ++i) {
        const std::int64_t k = first_ + 16 * i;
        const std::uint8_t scale = inside(k) ? row.scale_byte<16>(k) : 0;
        finite_ = finite_ && !e4m3_is_nan(scale);
        scales[scales_at(block, q, 8) + 8 * upper + i] = static_cast<char>(
            (scale & 0x7f) == 0 ? least_e5m3 : e5m3_of(static_cast<std::uint8_t>(scale & 0x7f)));
      }
    } else if (codes_ == Codes::dense3) {
      for (int i = 0; i < 4; ++i) {
        const std::int64_t k = first_ + 32 * i;
        const std::uint8_t scale = inside(k) ? row.scale_byte<32>(k) : 0;
        finite_ = finite_ && scale < 0x7f;  // no sign either
        scales[scales_at(block, q, 4) + 4 * upper + i] =
            static_cast<char>(scale == 0 ? 0 : e5m3_of(scale));
      }
    } else if (mx(codes_)) {
      for (int i = 0; i < 4; ++i) {
        const std::int64_t k = first_ + 32 * i;
        if (inside(k)) finite_ = finite_ && row.scale_byte<32>(k) < 255;
        scales[scales_at(block, q, 4) + 4 * upper + i] =
            static_cast<char>(inside(k) ? std::clamp(power(line, k), 1, most_power(bf16)) : 1);
      }
    } else if (codes_ == Codes::int4) {
      const int groups = layout_.groups();
      for (int i = 0; i < groups; ++i) {
        const std::int64_t k = first_ + 128 / groups * i;
        std::uint16_t scale = 0;
        int zero = 8;
        if (inside(k)) {
          const std::int64_t at = row.scale_at(k);
          zero = row.zero(k);
          scale =
              f32_to_f16(std::ldexp(load_f32(row.matrix->scales.data, row.matrix->scales.dtype, at),
                                    -scales_[line].exponent));
        }
        std::memcpy(scales + scales_at(block, q, 2 * groups) + 2 * groups * upper + 2 * i, &scale,
                    2);
        const int nibble = upper * groups + i;
        char& two = tile[parts.zeros + (block * 8 + q) * groups + nibble / 2];
        two = static_cast<char>(nibble % 2 == 0 ? zero : (two & 15) | zero << 4);
      }
    }
  }

  const FragmentLayout& layout_;
  Codes codes_;
  const Row* rows_;
  const RowScale* scales_;
  std::int64_t first_ = 0;
  bool finite_ = true;
  std::uint8_t codes_of_[FragmentLayout::tile_rows][FragmentLayout::tile_k];  // the step's
};

bool lay_out_rows(const FragmentLayout& layout, const PackedMatrix& gate, const PackedMatrix* up,
                  std::int64_t row_tile, char* to) {
  constexpr int count = FragmentLayout::tile_rows;
  std::vector<Row> rows(count);
  std::vector<RowScale> scales(count);
  const auto* const order = layout.format.ordered
                                ? reinterpret_cast<const std::int32_t*>(to + layout.order_at())
                                : nullptr;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int64_t row = row_tile * count + i;
    if (row < layout.rows()) rows[at] = row_of(layout, gate, up, order, row);
    if (rows[at].matrix != nullptr) scales[at] = row_scale(rows[at]);
    finite = finite && scales[at].finite;
    std::memcpy(to + layout.factors_at() + row * 4, &scales[at].factor, 4);
  }
  if (!finite) return false;
  const auto write = [&](auto writer) {
    for (std::int64_t step = 0; step < layout.steps(); ++step) {
      finite = writer.write(step, to + layout.tile(row_tile * count, step * layout.tile_k));
    }
  };
  if (layout.dtype == DType::bf16) {
    write(TileWriter<true>(layout, rows.data(), scales.data()));
  } else {
    write(TileWriter<false>(layout, rows.data(), scales.data()));
  }
  return finite;
}

template <bool bf16>
void read_as(const FragmentLayout& layout, const char* from, std::int64_t row, double* to) {
  const Codes codes = layout.codes();
  const TileParts parts = layout.parts();
  const std::int64_t half = layout.paired && row >= layout.n / 2 ? 1 : 0;
  const std::int64_t within = row - half * layout.n / 2;
  const std::int64_t place = layout.paired ? within / 8 * 16 + half * 8 + within % 8 : row;
  float factor = 0;
  std::memcpy(&factor, from + layout.factors_at() + place * 4, 4);
  const bool sparse = codes == Codes::sparse;
  std::fill_n(to, layout.k, 0.0);
  const std::int64_t columns = sparse ? cut(layout.k, 4) * 2 : layout.k;
  const int step = sparse ? 64 : 128;
  for (std::int64_t c = 0; c < columns; ++c) {
    const char* const tile = from + layout.tile(place, c / step * 128);
    const int column = static_cast<int>(c % step), line = static_cast<int>(place % 128);
    const FragmentPlace at = fragment_place(line, column);
    const int reg = at.fragment % 2 * 4 + at.reg, q = line % 8, upper = line % 16 / 8;
    const char* const scales = tile + parts.scales;
    std::int64_t k = c;
    if (sparse) {
      const int four = column / 2;
      const std::uint32_t word =
          word_at(tile + parts.positions +
                  positions_at(at.block, four / 16, 4 * q + four % 16 / 8 * 2 + four % 8 / 4));
      k = c / 2 * 4 + (word >> (16 * upper + 4 * (four % 4) + 2 * (c % 2)) & 3);
      if (k >= layout.k) continue;
    }
    std::uint32_t regs[8];
    double scale = 1;
    const char* const words = tile + codes_at(codes, at.block, at.fragment / 2, at.lane);
    if (codes == Codes::dense3) {
      Lane<Codes::dense3, 0, bf16> lane;
      const auto* const bytes = reinterpret_cast<const unsigned char*>(tile);
      lane.load_scales(bytes, at.block, at.lane);
      lane.template decode<false>(bytes, at.block, at.fragment / 2, at.lane, regs);
      scale = static_cast<double>(lane.scale(at.fragment / 2, upper));
    } else if (eight_bits(codes)) {
      for (int f = 0; f < 2; ++f) {
        const std::uint32_t w0 = word_at(words + 8 * f), w1 = word_at(words + 8 * f + 4);
        codes == Codes::int8    ? decode_int8<bf16>(w0, w1, regs + 4 * f)
        : codes == Codes::mxfp8 ? spread_e4m3<bf16>(w0, w1, regs + 4 * f)
                                : decode_e4m3<bf16>(w0, w1, regs + 4 * f);
      }
      if (codes == Codes::fp8_block) {
        scale = static_cast<double>(float_of(word_at(scales + 4 * upper)));
      }
    } else {
      const std::uint32_t w0 = word_at(words), w1 = word_at(words + 4);
      if (codes == Codes::int4) {
        const int groups = layout.groups(), group = column / (128 / groups);
        const int nibble = upper * groups + group;
        const int two = static_cast<unsigned char>(
            tile[parts.zeros + (at.block * 8 + q) * groups + nibble / 2]);
        const std::uint32_t zero =
            lifted<bf16>(static_cast<std::uint32_t>(nibble % 2 == 0 ? two & 15 : two >> 4), 0);
        decode_int4<bf16>(w0, w1, {{zero, zero}, {zero, zero}}, regs);
        std::uint16_t h = 0;
        std::memcpy(
            &h, scales + scales_at(at.block, q, 2 * groups) + 2 * groups * upper + 2 * group, 2);
        scale = static_cast<double>(f16_value(h));
      } else {
        decode_e2m1<bf16>(w0, w1, regs);
      }
    }
    if (mx(codes) || codes == Codes::nvfp4 || sparse) {
      const int bytes = mx(codes) ? 4 : 8;
      const int which = column / (mx(codes) ? 32 : sparse ? 8 : 16);
      const auto byte =
          static_cast<unsigned char>(scales[scales_at(at.block, q, bytes) + bytes * upper + which]);
      regs[reg] = times<bf16>(regs[reg], twice(mx(codes) ? power_factors<bf16>(byte, false)
                                                         : e5m3_factors<bf16>(byte, false),
                                               false));
    }
    if (layout.format.ordered) {
      std::int32_t stands = 0;
      std::memcpy(&stands, from + layout.order_at() + 4 * c, sizeof stands);
      k = stands;
    }
    to[k] = static_cast<double>(half_value<bf16>(regs[reg] >> (16 * at.half))) * scale *
            static_cast<double>(unscale(codes, bf16)) * static_cast<double>(factor);
  }
}

}  // namespace

bool lay_out(const FragmentLayout& layout, const PackedMatrix& gate, const PackedMatrix* up,
             char* to) {
  std::memset(to + layout.factors_at(), 0,
              static_cast<std::size_t>(layout.group_bytes() - layout.factors_at()));
  if (layout.format.ordered) {
    write_k_order(gate, reinterpret_cast<std::int32_t*>(to + layout.order_at()));
  }
  std::atomic<bool> finite{true};
  const std::int64_t tiles = layout.row_tiles();
  cpu_engine::on_free_cores(tiles, tiles * 128 * layout.k, [&](std::int64_t tile) {
    if (!lay_out_rows(layout, gate, up, tile, to)) finite = false;
  });
  return finite;
}

void read_row(const FragmentLayout& layout, const char* from, std::int64_t row, double* to) {
  (layout.dtype == DType::bf16 ? read_as<true> : read_as<false>)(layout, from, row, to);
}

FragmentLayout fragments_of(const PreparedWeights& w) {
  return {w.format, w.dtype, w.n, w.k, w.paired};
}

std::size_t write_fragments(const Context& context, const FragmentLayout& layout,
                            const std::vector<PackedMatrix>& gate,
                            const std::vector<PackedMatrix>* up, void* to) {
  const auto bytes = static_cast<std::size_t>(layout.group_bytes());
  std::vector<char> group(bytes);
  // A matrix that is given again is there already.
  const auto same = [](const PackedMatrix& a, const PackedMatrix& b) {
    return a.values.data == b.values.data && a.scales.data == b.scales.data &&
           a.zeros.data == b.zeros.data && a.positions.data == b.positions.data &&
           a.group_of.data == b.group_of.data && a.global_scale == b.global_scale;
  };
  for (std::size_t g = 0; g < gate.size(); ++g) {
    const bool again =
        g > 0 && same(gate[g], gate[g - 1]) && (up == nullptr || same((*up)[g], (*up)[g - 1]));
    if (!again && !lay_out(layout, gate[g], up != nullptr ? &(*up)[g] : nullptr, group.data())) {
      return g;
    }
    context.copy(static_cast<char*>(to) + g * bytes, group.data(), bytes);
  }
  return gate.size();
}

void read_fragments(const Context& context, const FragmentLayout& layout, const void* from,
                    const Tensor& out) {
  const auto row_of = [&](const char* group, std::int64_t row, double* values) {
    read_row(layout, group, row, values);
  };
  read_decoded(context, from, layout.group_bytes(), row_of, out);
}

}  // namespace shunt::cuda_engine

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
