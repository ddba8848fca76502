// Packed weights in fragment order: what the lanes of a kernel decode from the prepared bytes, put
// together as the tensor cores do, is what the format's own words say. No GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "format/plain.hpp"
#include "gemm/few_chain.hpp"
#include "gemm/fragment_lane.hpp"
#if SHUNT_CUDA_BUILT
#include "gemm/fragment_prepare.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/fragment_teams.hpp"
#include "gemm/h200.hpp"
#endif

namespace shunt::cuda_engine {
namespace {

TEST(FragmentLayout, EveryValueOfATileHasItsPlace) {
  std::set<std::tuple<int, int, int, int, int>> seen;
  for (int row = 0; row < 128; ++row) {
    for (int column = 0; column < 128; ++column) {
      const FragmentPlace at = fragment_place(row, column);
      EXPECT_TRUE(seen.insert({at.block, at.fragment, at.lane, at.reg, at.half}).second);
      EXPECT_EQ(row_of(at), row);
      EXPECT_EQ(column_of(at), column);
      EXPECT_LT(at.lane, 32);
      EXPECT_LT(at.reg, 4);
    }
  }
  EXPECT_EQ(tile_parts(Codes::nvfp4, 0).bytes, 128 * 128 * 9 / 16);
  EXPECT_EQ(tile_parts(Codes::sparse, 0).bytes, 128 * 128 * 7 / 16);
  EXPECT_EQ(tile_parts(Codes::mxfp4, 0).bytes, 128 * 128 * 17 / 32);
  EXPECT_EQ(tile_parts(Codes::mxfp8, 0).bytes, 128 * 128 * 33 / 32);
  EXPECT_EQ(tile_parts(Codes::dense3, 0).bytes, 128 * 128 * 13 / 32);
  for (const int groups : {1, 2, 4, 8}) EXPECT_EQ(tile_parts(Codes::int4, groups).bytes % 16, 0);
}

template <bool bf16>
void check_codes() {
  std::mt19937 random(1);
  for (int round = 0; round < 400; ++round) {
    std::uint8_t codes[8][2];
    for (auto& pair : codes) {
      for (auto& code : pair) code = static_cast<std::uint8_t>(random() % 16);
    }
    std::uint32_t w0 = 0, w1 = 0, regs[8];
    encode_e2m1<bf16>(codes, w0, w1);
    decode_e2m1<bf16>(w0, w1, regs);
    for (int i = 0; i < 8; ++i) {
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t bits = regs[i] >> (16 * half) & 0xffff;
        ASSERT_EQ(static_cast<double>(half_value<bf16>(bits)),
                  std::ldexp(plain_e2m1(codes[i][half]), bf16 ? -126 : -14));
        ASSERT_EQ(e2m1_of<bf16>(bits), codes[i][half]);
      }
    }
    encode_int4(codes, w0, w1);
    const std::uint32_t zero = lifted<bf16>(static_cast<std::uint32_t>(round % 16) << 8, 1);
    decode_int4<bf16>(w0, w1, {{zero, zero}, {zero, zero}}, regs);
    for (int i = 0; i < 8; ++i) {
      for (int half = 0; half < 2; ++half) {
        ASSERT_EQ(half_value<bf16>(regs[i] >> (16 * half)),
                  static_cast<float>(codes[i][half] - round % 16));
      }
    }
  }
  for (int first = 0; first < 256; ++first) {
    unsigned char bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(first + 37 * i);
    std::uint32_t words[2], regs[4];
    load_words<2>(bytes, words);
    decode_int8<bf16>(words[0], words[1], regs);
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        ASSERT_EQ(half_value<bf16>(regs[i] >> (16 * half)),
                  static_cast<float>(bytes[wide_byte(0, i, half)] - 128));
      }
    }
    decode_e4m3<bf16>(words[0], words[1], regs);
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        const double want = plain_e4m3(bytes[wide_byte(0, i, half)]);
        if (std::isnan(want)) continue;
        ASSERT_EQ(static_cast<double>(half_value<bf16>(regs[i] >> (16 * half))) *
                      static_cast<double>(unscale(Codes::fp8, bf16)),
                  want);
      }
    }
  }
  // Every product of an e2m1 with an e4m3 and its power of two is exact.
  for (int scale = 1; scale < 127; ++scale) {
    const std::uint32_t factor = twice(
        e5m3_factors<bf16>(std::uint32_t{e5m3_of(static_cast<std::uint8_t>(scale))} << 24, true),
        true);
    for (std::uint32_t code = 0; code < 16; ++code) {
      const std::uint32_t half = (code & 8) << 12 | (code & 7) << (bf16 ? 6 : 9);
      ASSERT_EQ(static_cast<double>(half_value<bf16>(times<bf16>(half, factor))) * 128,
                plain_e2m1(static_cast<int>(code)) * plain_e4m3(scale))
          << scale << ' ' << code;
    }
  }
}

TEST(FragmentCodes, AreExactInBf16) { check_codes<true>(); }
TEST(FragmentCodes, AreExactInF16) { check_codes<false>(); }

#if SHUNT_CUDA_BUILT

// All weights of a group as a kernel has them: w[row of the layout][k], times what its sums get.
template <class L>
std::vector<double> decoded(const FragmentLayout& layout, const char* group, bool rounded) {
  const std::int64_t steps = layout.steps(), width = steps * 128;
  std::vector<double> w(static_cast<std::size_t>(layout.row_tiles() * 128 * width));
  const auto factors = reinterpret_cast<const float*>(group + layout.factors_at());
  EXPECT_EQ(L::parts.bytes, layout.parts().bytes);
  for (std::int64_t row = 0; row < layout.row_tiles(); ++row) {
    for (std::int64_t step = 0; step < steps; ++step) {
      const auto* const tile = reinterpret_cast<const unsigned char*>(
          group + (row * steps + step) * layout.parts().bytes);
      for (int block = 0; block < 8; ++block) {
        for (int lane = 0; lane < 32; ++lane) {
          L mine;
          mine.load_scales(tile, block, lane);
          for (int pair = 0; pair < L::pairs; ++pair) {
            std::uint32_t regs[8];
            rounded ? mine.template decode<true>(tile, block, pair, lane, regs)
                    : mine.template decode<false>(tile, block, pair, lane, regs);
            for (int i = 0; i < 16; ++i) {
              // The fragment's column and row as the tensor cores define them.
              const int reg = i / 2 % 4, fragment = 2 * pair + i / 8;
              const int line = 16 * block + lane / 4 + (reg % 2 == 1 ? 8 : 0);
              int column = 2 * (lane % 4) + (reg >= 2 ? 8 : 0) + i % 2;
              double value =
                  static_cast<double>(half_value<L::bf16>(regs[i / 2] >> (16 * (i % 2))));
              if (L::scaled_sums && !(rounded && L::codes != Codes::fp8_block)) {
                const int g = fragment / L::scaled_fragments;
                value *= static_cast<double>(mine.scale(g, reg % 2));
              }
              if (L::sparse) {
                // Two of four: the metadata comes from the lane of this row's quad that has the
                // column's half, of the threads that the selector (the fragment's parity) names.
                const int from = lane / 4 * 4 + fragment % 2 * 2 + column / 8;
                const std::uint32_t word = L::positions(tile, block, fragment / 2, from);
                const int nibble = reg % 2 * 16 + column % 8 / 2 * 4;
                const int two = static_cast<int>(word >> nibble & 15);
                EXPECT_LT(two & 3, two >> 2);
                column = fragment * 32 + column / 2 * 4 + (column % 2 == 0 ? two & 3 : two >> 2);
              } else {
                column += fragment * 16;
              }
              const std::int64_t at = row * 128 + line;
              w[static_cast<std::size_t>(at * width + step * 128 + column)] +=
                  value * static_cast<double>(unscale(L::codes, L::bf16)) *
                  static_cast<double>(factors[at]);
            }
          }
        }
      }
    }
  }
  return w;
}

template <bool bf16>
std::vector<double> decoded(const FragmentLayout& layout, const char* group, bool rounded) {
  std::vector<double> w;
  const auto go = [&]<class L>(std::type_identity<L>) { w = decoded<L>(layout, group, rounded); };
  switch (layout.codes()) {
    case Codes::nvfp4:
      return decoded<Lane<Codes::nvfp4, 0, bf16>>(layout, group, rounded);
    case Codes::mxfp4:
      return decoded<Lane<Codes::mxfp4, 0, bf16>>(layout, group, rounded);
    case Codes::sparse:
      return decoded<Lane<Codes::sparse, 0, bf16>>(layout, group, rounded);
    case Codes::dense3:
      return decoded<Lane<Codes::dense3, 0, bf16>>(layout, group, rounded);
    case Codes::int4:
      with_int4_lane<bf16>(layout, go);
      return w;
    default:
      with_wide_lane<bf16>(layout, go);
      return w;
  }
}

// Both dtypes; `loss`: of a weight's magnitude and of its row's largest.
void check(const PackedMatrix& gate, const PackedMatrix* up, double loss = 0, double of_row = 0) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const FragmentLayout layout{gate.format, dtype, up != nullptr ? 2 * gate.n : gate.n, gate.k,
                                up != nullptr};
    SCOPED_TRACE(to_string(gate.format) + " [" + std::to_string(layout.n) + ", " +
                 std::to_string(gate.k) + "] " + to_string(dtype) +
                 (layout.paired ? " paired" : ""));
    std::vector<char> bytes(static_cast<std::size_t>(layout.group_bytes()), 0x5a);
    ASSERT_TRUE(lay_out(layout, gate, up, bytes.data()));
    for (const bool rounded : {false, true}) {
      const std::vector<double> got = dtype == DType::bf16
                                          ? decoded<true>(layout, bytes.data(), rounded)
                                          : decoded<false>(layout, bytes.data(), rounded);
      // The f16 scale's eleven bits to bf16's eight, then the product; f16: the product alone,
      // whose smallest step is 2^-24 where the row's largest is 2^10 or more.
      // dense3: eleven bits to bf16's eight; exact in f16.
      const bool inexact =
          rounded && (gate.format.format == Format::int4 ||
                      (gate.format.format == Format::dense3 && dtype == DType::bf16));
      const double most = loss + (inexact ? (dtype == DType::bf16 ? 0x1.01p-7 : 0x1p-11) : 0);
      std::vector<double> back(static_cast<std::size_t>(gate.k));
      for (std::int64_t row = 0; row < layout.row_tiles() * 128; ++row) {
        const std::int64_t source = row < layout.rows() ? layout.order().source(row) : -1;
        const double* const w = got.data() + row * layout.steps() * 128;
        const bool second = up != nullptr && source >= gate.n;
        const PackedMatrix& from = second ? *up : gate;
        double largest = 0;
        for (std::int64_t k = 0; k < gate.k && source >= 0; ++k) {
          largest = std::max(largest, std::abs(plain_weight(from, source % gate.n, k)));
        }
        if (source >= 0 && !rounded) read_row(layout, bytes.data(), source, back.data());
        for (std::int64_t k = 0; k < layout.steps() * 128; ++k) {
          const bool there = source >= 0 && k < gate.k;
          const double want = there ? plain_weight(from, source % gate.n, k) : 0;
          // Past the end of k these may have any weight: rows have zeros there.
          const Format format = gate.format.format;
          if (!there && source >= 0 &&
              (format == Format::sparse_nvfp4 || format == Format::dense3)) {
            continue;
          }
          ASSERT_NEAR(w[k], want,
                      most * std::abs(want) + (of_row + (inexact ? 0x1p-33 : 0)) * largest)
              << "row " << row << " (" << source << "), k " << k << (rounded ? ", rounded" : "");
          if (there && !rounded) {
            ASSERT_EQ(back[static_cast<std::size_t>(k)], w[k]) << "read back";
          }
        }
      }
    }
  }
}

std::vector<FormatSpec> formats() {
  std::vector<FormatSpec> list = known_formats();
  for (const int group : {16, 48, 64, 128, 256}) list.push_back({Format::int4, group});
  return list;
}

TEST(FragmentPrepare, LanesDecodeWhatTheFormatsSay) {
  EXPECT_EQ(formats().size(), 15U);
  for (const FormatSpec& spec : formats()) {
    for (const auto& [n, k] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {130, 129}, {24, 400}, {72, 16}, {9, 259}}) {
      const Packed gate = Packed::of(spec, normal_values(n * k, 1), n, k);
      const Packed up = Packed::of(spec, normal_values(n * k, 2, 3), n, k);
      check(gate.packed, nullptr);
      check(gate.packed, &up.packed);
      if (HasFatalFailure()) return;
    }
  }
}

std::uint8_t* bytes_of(const Tensor& tensor) { return tensor.as<std::uint8_t>(); }

TEST(FragmentPrepare, ScalesOfEveryKind) {
  constexpr std::int64_t n = 20, k = 400;
  std::mt19937 random(7);
  for (const Format format : {Format::nvfp4, Format::sparse_nvfp4}) {
    for (const float global : {1.0F, 0x1p-120F, 3e34F, -0.3F, 0.0F}) {
      Packed p = Packed::of({format}, normal_values(n * k, 3), n, k);
      for (std::int64_t i = 0; i < p.packed.scales.elements(); ++i) {
        auto code = static_cast<std::uint8_t>(random());
        bytes_of(p.packed.scales)[i] = (code & 0x7f) == 0x7f ? 0 : code;  // signs and zeros too
      }
      p.packed.global_scale = global;
      check(p.packed, nullptr);
    }
  }
  // dense3's are positive, or zero.
  Packed three = Packed::of({Format::dense3}, normal_values(n * k, 3), n, k);
  for (std::int64_t i = 0; i < three.packed.scales.elements(); ++i) {
    bytes_of(three.packed.scales)[i] = static_cast<std::uint8_t>(random() % 127);
  }
  for (const float global : {1.0F, 0x1p-100F, 3e34F, -0.3F, 0.0F}) {
    three.packed.global_scale = global;
    check(three.packed, nullptr);
  }
  // Powers of two: exact as far as a dtype reaches, else little of a row's largest is lost.
  // mxfp8's codes span 2^17 more.
  for (const Format format : {Format::mxfp4, Format::mxfp8}) {
    Packed mx = Packed::of({format}, normal_values(n * k, 3), n, k);
    const auto draw = [&](unsigned base, unsigned range) {
      for (std::int64_t i = 0; i < mx.packed.scales.elements(); ++i) {
        bytes_of(mx.packed.scales)[i] = static_cast<std::uint8_t>(base + random() % range);
      }
    };
    draw(100, format == Format::mxfp4 ? 24 : 22);
    check(mx.packed, nullptr);
    for (const auto& [base, range] : {std::pair{0U, 55U}, {200U, 55U}, {0U, 255U}}) {
      draw(base, range);
      check(mx.packed, nullptr, 0, 0x1p-25);
    }
  }

  Packed four = Packed::of({Format::int4, 32}, normal_values(n * k, 3), n, k);
  std::vector<std::uint8_t> zeros(static_cast<std::size_t>(four.packed.scales.elements()));
  for (auto& zero : zeros) zero = static_cast<std::uint8_t>(random() % 16);
  four.packed.zeros =
      view(static_cast<const void*>(zeros.data()), DType::u8, {n, four.packed.scales.shape[1]});
  check(four.packed, nullptr);
  std::vector<std::uint16_t> halves(zeros.size());
  for (auto& half : halves)
    half = f32_to_f16(std::ldexp(1.0F + static_cast<float>(random() % 1024) / 1024,
                                 -static_cast<int>(random() % 14)));
  four.packed.scales =
      view(static_cast<const void*>(halves.data()), DType::f16, {n, four.packed.scales.shape[1]});
  check(four.packed, nullptr);
}

TEST(FragmentPrepare, WhatIsNotFiniteIsRefused) {
  constexpr std::int64_t n = 20, k = 40;
  const auto refused = [&](const PackedMatrix& m) {
    const FragmentLayout layout{m.format, DType::bf16, n, k, false};
    std::vector<char> bytes(static_cast<std::size_t>(layout.group_bytes()));
    return !lay_out(layout, m, nullptr, bytes.data());
  };
  for (const FormatSpec& spec : formats()) {
    SCOPED_TRACE(to_string(spec));
    Packed p = Packed::of(spec, normal_values(n * k, 3), n, k);
    EXPECT_FALSE(refused(p.packed));
    if (p.packed.scales) {
      if (p.packed.scales.dtype == DType::f32) {
        p.packed.scales.as<float>()[0] = NAN;
      } else if (spec.format == Format::int4) {
        p.packed.scales.as<std::uint16_t>()[0] = 0x7f80;
      } else {
        bytes_of(p.packed.values)[0] = 3;
        bytes_of(p.packed.scales)[0] = p.packed.scales.dtype == DType::f8_e8m0 ? 255 : 0x7f;
      }
      EXPECT_TRUE(refused(p.packed));
    }
    if (spec.format == Format::dense3) {  // whose scales have no sign there
      Packed q = Packed::of(spec, normal_values(n * k, 3), n, k);
      bytes_of(q.packed.scales)[1] |= 0x80;
      EXPECT_TRUE(refused(q.packed));
      bytes_of(q.packed.scales)[1] = 0;
      EXPECT_FALSE(refused(q.packed));
    }
    if (p.packed.values.dtype == DType::f8_e4m3) {
      Packed q = Packed::of(spec, normal_values(n * k, 3), n, k);
      bytes_of(q.packed.values)[n * k - 1] = 0xff;
      EXPECT_TRUE(refused(q.packed));
    }
  }
}

PackedSizes sizes(int groups, std::int64_t rows, std::int64_t n, std::int64_t k) {
  return {.groups = groups, .rows = rows, .group_rows = n, .k = k, .bits = 4.5};
}

TEST(FragmentPlan, FewRowsAndMany) {
  for (const auto& s : {sizes(128, 8, 1536, 2048), sizes(128, 128, 2048, 768),
                        sizes(16, 128, 2048, 5120), sizes(8, 16, 28672, 4096)}) {
    const PackedPlan plan = plan_fragments(s, h200);
    EXPECT_EQ(plan.kernel, PackedPlan::few_rows) << fragment_words(plan);
    EXPECT_LE(plan.tile_tokens, 24) << fragment_words(plan);
  }
  EXPECT_GE(plan_fragments(sizes(32, 1, 4096, 7168), h200).split, 2);
  for (const auto& s : {sizes(8, 256, 28672, 4096), sizes(8, 256, 4096, 14336),
                        sizes(32, 1024, 5760, 2880), sizes(128, 8192, 2048, 768)}) {
    const PackedPlan plan = plan_fragments(s, h200);
    EXPECT_EQ(plan.kernel, PackedPlan::many_rows) << fragment_words(plan);
    EXPECT_LE(plan.tile_tokens, most_middle_tokens) << fragment_words(plan);
  }
  // 128 rows in the mean: a tile for each group.
  for (const auto& s : {sizes(32, 4096, 5760, 2880), sizes(8, 1024, 4096, 14336)}) {
    EXPECT_EQ(plan_fragments(s, h200).tile_tokens, 160);
  }
  for (const auto& s : {sizes(16, 16384, 5120, 1024), sizes(128, 65536, 2048, 768)}) {
    const PackedPlan plan = plan_fragments(s, h200);
    EXPECT_EQ(plan.kernel, PackedPlan::many_rows) << fragment_words(plan);
    EXPECT_GE(plan.tile_tokens, 192) << fragment_words(plan);
  }
}

// Where memory decides, as on an H100, small tiles leave the most of it: what was faster there
// (docs/notes/cuda-w4.md, "Where memory decides").
TEST(FragmentPlan, SlowerMemoryKeepsToFewRows) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  for (const double bits : {3.5, 4.5, 8.0}) {
    for (const std::int64_t tokens : {6, 8, 12, 16, 24, 32, 48}) {
      for (PackedSizes s :
           {sizes(128, 8 * tokens, 1536, 2048), sizes(128, 8 * tokens, 2048, 768)}) {
        s.bits = bits;
        s.sparse = bits < 4;
        const PackedPlan plan = plan_fragments(s, h100);
        EXPECT_EQ(plan.kernel, PackedPlan::few_rows) << tokens << ", " << bits;
        EXPECT_EQ(plan.tile_tokens, 8) << tokens << ", " << bits;
        EXPECT_EQ(plan.split, 1) << tokens << ", " << bits;
      }
    }
    for (PackedSizes s : {sizes(128, 768, 1536, 2048), sizes(128, 768, 2048, 768)}) {
      s.bits = bits;
      s.sparse = bits < 4;
      EXPECT_EQ(plan_fragments(s, h100).tile_tokens, 24) << bits;
    }
  }
}

// A tile holds a group of 128 rows, or half of one of 256. On an H100 that was faster than tiles of
// 192 and 256 for either product (docs/notes/cuda-w4.md, "Tiles of 160, weighed anew").
TEST(FragmentPlan, TilesOf160AroundGroupsOf128AndOf256) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  for (const auto& [tokens, bits] : {std::pair{2048, 3.5}, {2048, 4.5}, {4096, 4.5}}) {
    for (PackedSizes s : {sizes(128, std::int64_t{8} * tokens, 1536, 2048),
                          sizes(128, std::int64_t{8} * tokens, 2048, 768)}) {
      s.bits = bits;
      s.sparse = bits < 4;
      EXPECT_EQ(plan_fragments(s, h100).tile_tokens, 160) << tokens << ", " << bits;
    }
  }
  EXPECT_EQ(plan_fragments(sizes(8, 6144, 28672, 4096), h100).tile_tokens, 160);
}

// A second kernel in a layer costs some 8 us (docs/notes/cuda-layer.md, "Code that is fetched
// anew"): the product after another takes its tiles unless others are faster by more.
TEST(FragmentPlan, TheSecondProductTakesTheTilesOfTheFirst) {
  GpuFigures h100 = h200;
  h100.read_gbps = 3352;
  const auto after = [&](PackedSizes s, int tile) {
    s.tile_before = tile;
    return plan_fragments(s, h100);
  };
  const auto us_in_tiles_of = [&](const PackedSizes& s, int tile) {
    double least = INFINITY;
    for (const PackedPlan& plan : fragment_candidates(s, h100)) {
      if (plan.tile_tokens == tile) least = std::min(least, plan.us);
    }
    return least;
  };
  // Granite 3.0 1B with 768 tokens, whose down by itself takes another kernel than its gate_up.
  const PackedSizes granite = sizes(32, 6144, 1024, 512);
  PackedSizes gate_up = sizes(32, 6144, 1024, 1024);
  gate_up.rows_in_place = false;
  EXPECT_EQ(plan_fragments(gate_up, h100).tile_tokens, 128);
  EXPECT_EQ(plan_fragments(granite, h100).tile_tokens, 256);
  EXPECT_EQ(after(granite, 128).tile_tokens, 128);
  // What is predicted stays the kernel's own time.
  EXPECT_EQ(after(granite, 128).us, us_in_tiles_of(granite, 128));
  int others = 0;
  for (const std::int64_t tokens : {1, 4, 16, 64, 256, 1024, 4096}) {
    for (const auto& s : {sizes(128, 8 * tokens, 2048, 768), sizes(32, 4 * tokens, 2880, 2880),
                          sizes(8, 2 * tokens, 4096, 14336)}) {
      const PackedPlan alone = plan_fragments(s, h100);
      EXPECT_EQ(after(s, alone.tile_tokens).us, alone.us);
      for (const int tile : {8, 24, 64, 128, 160, 192, 256}) {
        const PackedPlan plan = after(s, tile);
        const double same = us_in_tiles_of(s, tile), dearer = same - alone.us;
        EXPECT_EQ(plan.tile_tokens, dearer <= 8 ? tile : alone.tile_tokens)
            << tokens << " tokens, k " << s.k << ", tiles of " << tile << ": " << same << ", "
            << alone.us;
        others += dearer > 8;
      }
    }
  }
  EXPECT_GT(others, 0);
}

// Few tokens get the kernel that may be told their pairs, whatever the memory; hundreds of rows a
// group do not.
TEST(FragmentPlan, FewPairsKeepToFewRows) {
  for (const auto& [experts, k, hidden, inner] : {std::array{128, 8, 2048, 768},
                                                  {512, 10, 2048, 512},
                                                  {32, 4, 2880, 2880},
                                                  {8, 2, 4096, 14336},
                                                  {40, 8, 1536, 512},
                                                  {64, 8, 2048, 1024}}) {
    for (const double bits : {3.5, 4.25, 4.5, 8.25}) {
      for (int tokens = 1; tokens <= 8 && tokens * k <= most_chained_pairs; ++tokens) {
        for (const bool down : {false, true}) {
          PackedSizes s = sizes(experts, std::int64_t{tokens} * k, down ? hidden : 2 * inner,
                                down ? inner : hidden);
          s.bits = bits;
          s.sparse = bits < 4;
          for (const double gbps : {2039.0, 3352.0, 4917.0}) {
            GpuFigures gpu = h200;
            gpu.read_gbps = gbps;
            EXPECT_EQ(plan_fragments(s, gpu).kernel, PackedPlan::few_rows)
                << experts << " experts, " << tokens << " tokens, " << bits << " bits, " << gbps;
          }
        }
      }
    }
  }
  EXPECT_EQ(plan_fragments(sizes(8, 4096, 28672, 4096), h200).kernel, PackedPlan::many_rows);
}

// dense3: no plan is cheaper for it than for a format of its bits that is decoded by arithmetic.
TEST(FragmentPlan, LookUpsAreNotFree) {
  for (const std::int64_t rows : {8, 128, 1024, 8192, 65536}) {
    PackedSizes plain = sizes(128, rows, 1536, 2048);
    plain.bits = 3.25;
    PackedSizes looked_up = plain;
    looked_up.looked_up = true;
    const auto a = fragment_candidates(plain, h200), b = fragment_candidates(looked_up, h200);
    ASSERT_EQ(a.size(), b.size());
    int dearer = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a.begin()[i].tile_tokens, b.begin()[i].tile_tokens);
      EXPECT_GE(b.begin()[i].us, a.begin()[i].us);
      dearer += b.begin()[i].us > a.begin()[i].us ? 1 : 0;
    }
    EXPECT_GT(dearer, 0) << rows;
  }
}

TEST(FragmentPlan, EveryCandidateFitsItsSizes) {
  for (const int groups : {1, 7, 128, 1024}) {
    for (const std::int64_t rows : {1, 64, 65536}) {
      for (const std::int64_t n : {1, 1408, 5760}) {
        for (const std::int64_t k : {1, 128, 300, 2880}) {
          PackedSizes s = sizes(groups, rows, n, k);
          for (const PackedPlan& plan : fragment_candidates(s, h200)) {
            EXPECT_GT(plan.us, 0);
            EXPECT_GT(plan.blocks, 0);
            EXPECT_LE(plan.blocks, 132);
            EXPECT_EQ(plan.blocks % (plan.split / teams_of_tile(plan)), 0);
            EXPECT_LE(plan.split, (k + 127) / 128);
          }
          s.whole_k = true;  // one kernel, and no split
          for (const PackedPlan& plan : fragment_candidates(s, h200)) {
            EXPECT_EQ(plan.kernel, PackedPlan::few_rows);
            EXPECT_EQ(plan.split, 1);
          }
          s.same_sums = true;  // any kernel, and no split
          bool many = false;
          for (const PackedPlan& plan : fragment_candidates(s, h200)) {
            EXPECT_EQ(plan.split, 1);
            many = many || plan.kernel == PackedPlan::many_rows;
          }
          EXPECT_TRUE(many);
        }
      }
    }
  }
  EXPECT_EQ(plan_fragments(sizes(1025, 100, 64, 64), h200).kernel, PackedPlan::portable);
  EXPECT_EQ(plan_fragments(sizes(4, 0, 64, 64), h200).kernel, PackedPlan::none);
}

// What docs/notes/cuda-layer.md ("Packed weights on other GPUs") says of Qwen3-30B-A3B's layers.
TEST(FragmentPlan, OtherGpusTakeLargeTilesWhereTheyWereFaster) {
  GpuFigures other = h200;
  other.compute = 0;
  const auto tiles = [&](std::int64_t tokens, bool looked_up) {
    PackedSizes gate_up = sizes(128, 8 * tokens, 1536, 2048),
                down = sizes(128, 8 * tokens, 2048, 768);
    for (PackedSizes* s : {&gate_up, &down}) s->bits = looked_up ? 3.25 : 4.5;
    gate_up.looked_up = down.looked_up = looked_up;
    return std::pair(plan_fragments(gate_up, other).tile_tokens,
                     plan_fragments(down, other).tile_tokens);
  };
  for (const std::int64_t tokens : {1, 16, 64, 128, 256, 512}) {
    EXPECT_EQ(tiles(tokens, false), std::pair(16, 16)) << tokens;
  }
  for (const std::int64_t tokens : {768, 1024, 4096}) {
    EXPECT_EQ(tiles(tokens, false), std::pair(64, 64)) << tokens;
  }
  EXPECT_EQ(tiles(128, true), std::pair(16, 16));
  EXPECT_EQ(tiles(256, true).first, 32);
  for (const std::int64_t tokens : {512, 1024}) {
    EXPECT_EQ(tiles(tokens, true), std::pair(32, 32)) << tokens;
  }
}

// A100, L40, RTX 4090, B200: tiles of few rows for few, of many for many, and blocks that they have
// room for.
TEST(FragmentPlan, OtherGpusHaveTilesThatFitThem) {
  struct Other {
    int compute, multiprocessors, shared_bytes;
  };
  for (const Other& gpu : {Other{80, 108, 166912}, {89, 142, 101376}, {100, 148, 232448}}) {
    GpuFigures other = h200;
    other.compute = gpu.compute;
    other.multiprocessors = gpu.multiprocessors;
    other.shared_bytes = gpu.shared_bytes;
    for (const bool looked_up : {false, true}) {
      for (const double bits : {3.25, 4.5, 8.0}) {
        for (const bool whole_k : {false, true}) {
          for (const std::int64_t rows : {1, 64, 65536}) {
            PackedSizes s = sizes(128, rows, 1536, 2048);
            s.bits = bits, s.looked_up = looked_up, s.whole_k = whole_k;
            const PackedPlans plans = fragment_candidates(s, other);
            EXPECT_EQ(plans.size(), 2U);
            for (const PackedPlan& plan : plans) {
              EXPECT_EQ(plan.kernel, PackedPlan::portable);
              EXPECT_GT(plan.us, 0);
              EXPECT_EQ(plan.split, 1);
              EXPECT_GT(plan.blocks, 0);
              EXPECT_LE(plan.blocks, 4 * gpu.multiprocessors);
            }
            const int many = looked_up ? 32 : 64;
            EXPECT_EQ(plan_fragments(s, other).tile_tokens, rows == 65536 ? many : 16) << rows;
          }
        }
      }
    }
  }
}

#endif

}  // namespace
}  // namespace shunt::cuda_engine
