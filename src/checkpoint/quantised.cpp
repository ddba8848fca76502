#include "checkpoint/quantised.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checkpoint/quantised_tensors.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/shape.hpp"
#include "format/codes.hpp"

namespace shunt {

namespace {

std::string base_of(const std::string& name) {
  constexpr std::string_view ending = ".weight";
  return name.ends_with(ending) ? name.substr(0, name.size() - ending.size()) : name;
}

// Power-of-two scales are stored under either.
bool exponents(DType dtype) { return dtype == DType::u8 || dtype == DType::f8_e8m0; }

// One number for all of n rows, or one for each.
bool of_rows(const Tensor& scales, std::int64_t n) {
  return scales.elements() == 1 || has_shape(scales, {n}) || has_shape(scales, {n, 1}) ||
         has_shape(scales, {1, n});
}

// all_words() of zero points packed along n, [n / 8, groups]: the last may have fewer than eight.
bool all_rows(const Tensor& zeros, std::int64_t n, std::uint32_t usual) {
  if (n % 8 == 0) return all_words(zeros, usual);
  const std::int64_t last = zeros.shape[0] - 1;
  const std::uint32_t used = (std::uint32_t{1} << (n % 8 * 4)) - 1;
  const auto* const words = zeros[last].as<const std::uint32_t>();
  return all_words(zeros.rows(0, last), usual) &&
         std::all_of(words, words + zeros.shape[1],
                     [&](std::uint32_t word) { return (word & used) == (usual & used); });
}

}  // namespace

void QuantisedReader::mismatch(const std::string& name, const std::string& wanted) const {
  if (!store_.contains(name)) {
    fail(Status::bad_file, "{}: has no tensor '{}': must be {}", store_.folder(), clean(name),
         wanted);
  }
  fail(Status::bad_file, "{}: tensor '{}' is {}: must be {}", store_.file_of(name), clean(name),
       tensor(name).describe(), wanted);
}

std::string QuantisedReader::only(const std::string& stem,
                                  std::initializer_list<const char*> endings) const {
  std::string found;
  for (const char* ending : endings) {
    const std::string name = stem + ending;
    if (!store_.contains(name)) continue;
    if (!found.empty()) {
      fail(Status::bad_file, "{}: tensors '{}' and '{}' are both there: must be one of them",
           store_.file_of(name), clean(found), clean(name));
    }
    found = name;
  }
  return found.empty() ? stem + *endings.begin() : found;
}

void QuantisedReader::check_one_form(const std::string& name) const {
  (void)only(name, {"", "_blocks"});
  (void)only(base_of(name), {".weight", ".weight_packed", ".qweight"});
}

// What would change the values and is not read.
void QuantisedReader::refuse_extras(const std::string& base,
                                    std::initializer_list<const char*> more) const {
  std::vector<const char*> all = {".pre_quant_scale", ".input_rotation", ".bitmask", ".row_offsets",
                                  ".weight_scale_offset"};
  all.insert(all.end(), more);
  for (const char* extra : all) {
    if (!store_.contains(base + extra)) continue;
    // Quark writes zero points of 0, which are none.
    if (std::string_view(extra) == ".weight_zero_point" && is_zero(base + extra)) continue;
    fail(Status::unsupported, "{}: tensor '{}' is there: not read with this format",
         store_.file_of(base + extra), clean(base + extra));
  }
}

bool QuantisedReader::is_zero(const std::string& name) const {
  const Tensor t = tensor(name);
  const auto* const bytes = static_cast<const char*>(t.data);
  return std::all_of(bytes, bytes + t.bytes(), [](char byte) { return byte == 0; });
}

float QuantisedReader::number(const std::string& name) const {
  if (!store_.contains(name)) mismatch(name, "one f32");
  const Tensor t = tensor(name);
  if (!plain(t.dtype) || t.elements() != 1) mismatch(name, "one f32");
  return load_f32(t.data, t.dtype, 0);
}

// `count` scales of any float type, as f32; one stands for all of them.
Tensor QuantisedReader::floats(const std::string& name, std::int64_t count) const {
  const Tensor t = tensor(name);
  const bool single = t.elements() == 1;
  if ((!plain(t.dtype) && !exponents(t.dtype)) || (!single && t.elements() != count)) {
    mismatch(name, fmt::format("{} f32, bf16, f16 or e8m0", count));
  }
  if (t.dtype == DType::f32 && t.elements() == count &&
      reinterpret_cast<std::uintptr_t>(t.data) % alignof(float) == 0) {
    return view(t.data, DType::f32, {count});
  }
  auto* const to = static_cast<float*>(repacking_.take(static_cast<std::size_t>(count) * 4));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = single ? 0 : i;
    to[i] = exponents(t.dtype) ? e8m0_to_f32(t.as<const std::uint8_t>()[at])
                               : load_f32(t.data, t.dtype, at);
  }
  return view(to, DType::f32, {count});
}

bool QuantisedReader::has(const std::string& name) const {
  const std::string base = base_of(name);
  for (const char* part : {".weight_packed", ".qweight"}) {
    if (store_.contains(base + part)) return true;
  }
  if (!store_.contains(name)) return false;
  return !plain(tensor(name).dtype);
}

PackedMatrix QuantisedReader::matrix(const std::string& name, std::int64_t n,
                                     std::int64_t k) const {
  const std::string base = base_of(name);
  PackedMatrix m;
  if (store_.contains(base + ".qweight")) {
    if (config_.method == "gptq") {
      m = gptq(base, n, k);
    } else if (config_.method == "awq") {
      m = awq(base, n, k);
    } else {
      fail(Status::unsupported, "{}: tensor '{}' is there: must come with quant_method gptq or awq",
           store_.file_of(base + ".qweight"), clean(base + ".qweight"));
    }
  } else if (const std::string packed = base + ".weight_packed"; store_.contains(packed)) {
    m = config_.method == "shunt" ? own(base, n, k)
        : integers_in(base)       ? integers(base, n, k)
                                  : four_bits(base, packed, n, k);
    check_weight_shape(base, n, k);
  } else {
    const Tensor values = tensor(name);
    if (values.dtype == DType::f8_e4m3 ||
        (values.dtype == DType::i8 && has_shape(values, {n, k}))) {
      m = eight_bits(base, n, k);
    } else if (values.dtype == DType::u8 || values.dtype == DType::i8) {
      m = four_bits(base, name, n, k);
    } else {
      fail(Status::unsupported,
           "{}: tensor '{}' is {}: read are f32, bf16, f16, f8_e4m3, i8 and 4 bits",
           store_.file_of(name), clean(name), values.describe());
    }
  }
  m.n = n;
  m.k = k;
  check_described(base, m);
  return m;
}

// e4m3 or i8 [n, k]; what its scales mean, their shape says.
PackedMatrix QuantisedReader::eight_bits(const std::string& base, std::int64_t n,
                                         std::int64_t k) const {
  refuse_extras(base, {".weight_zero_point", ".weight_scale_2", ".weight_global_scale"});
  const std::string values = base + ".weight";
  PackedMatrix m{.values = tensor(values)};
  if (!has_shape(m.values, {n, k})) mismatch(values, fmt::format("[{}, {}]", n, k));
  const std::string name = only(base, {".weight_scale", ".weight_scale_inv", ".scale"});
  if (!store_.contains(name)) mismatch(name, "the scales of " + values);
  if (config_.method == "compressed-tensors" && name != base + ".weight_scale") {
    fail(Status::bad_file, "{}: tensor '{}' is there: quant_method compressed-tensors has '{}'",
         store_.file_of(name), clean(name), clean(base + ".weight_scale"));
  }
  const Tensor scales = tensor(name);
  if (config_.blocks_of_32 && m.values.dtype == DType::f8_e4m3) {
    // A scale for 32 rows is one of each of them.
    const std::int64_t groups = groups_of(k, 32);
    if (!exponents(scales.dtype) || !has_shape(scales, {groups_of(n, 32), groups})) {
      mismatch(name, fmt::format("e8m0 [{}, {}]", groups_of(n, 32), groups));
    }
    auto* const to = static_cast<char*>(repacking_.take(static_cast<std::size_t>(n * groups)));
    const auto* const from = scales.as<const char>();
    repacking_.later([from, to, n, groups] {
      for (std::int64_t row = 0; row < n; ++row) {
        std::memcpy(to + row * groups, from + row / 32 * groups, static_cast<std::size_t>(groups));
      }
    });
    m.format = {Format::mxfp8};
    m.scales = view(to, DType::f8_e8m0, {n, groups});
    return m;
  }
  // One scale of one row is of a tensor, a block or a row alike: compressed-tensors has [1, 1] for
  // a row's.
  const bool of_one_row =
      config_.method == "compressed-tensors" && has_shape(scales, {1, 1}) && n == 1;
  if (m.values.dtype == DType::i8) {
    if (!of_rows(scales, n)) mismatch(name, fmt::format("one number, [{}, 1] or [{}]", n, n));
    m.format = {Format::int8};
    m.scales = floats(name, n);
  } else if (exponents(scales.dtype) && has_shape(scales, {n, groups_of(k, 32)})) {
    m.format = {Format::mxfp8};
    m.scales = view(scales.data, DType::f8_e8m0, {n, groups_of(k, 32)});
  } else if (scales.elements() == 1 && !of_one_row) {
    m.format = {Format::fp8_tensor};
    m.global_scale = floats(name, 1).as<const float>()[0];
  } else if (!of_one_row &&
             (has_shape(scales, {groups_of(n, 128), groups_of(k, 128)}) ||
              has_shape(scales, {groups_of(n, 128), 1, groups_of(k, 128), 1}))) {  // FP8_PB_WO
    m.format = {Format::fp8_block};
    m.scales = floats(name, scales.elements());
    m.scales = view(m.scales.data, DType::f32, {groups_of(n, 128), groups_of(k, 128)});
  } else if (has_shape(scales, {n, 1}) || has_shape(scales, {n})) {
    m.format = {Format::fp8_channel};
    m.scales = floats(name, n);
  } else {
    mismatch(name, fmt::format("one number, [{}, 1], [{}, {}] or e8m0 [{}, {}]", n,
                               groups_of(n, 128), groups_of(k, 128), n, groups_of(k, 32)));
  }
  return m;
}

// e2m1 [n, k / 2]: with e8m0 scales MXFP4, with e4m3 NVFP4, whose second scale multiplies under one
// name and divides under the other.
PackedMatrix QuantisedReader::four_bits(const std::string& base, const std::string& values,
                                        std::int64_t n, std::int64_t k) const {
  refuse_extras(base, {".weight_zero_point"});
  PackedMatrix m{.values = tensor(values)};
  if ((m.values.dtype != DType::u8 && m.values.dtype != DType::i8) ||
      !has_shape(m.values, {n, groups_of(k, 2)})) {
    mismatch(values, fmt::format("u8 [{}, {}]", n, groups_of(k, 2)));
  }
  m.values.dtype = DType::u8;
  const std::string name = only(base, {".weight_scale", ".scale"});
  if (!store_.contains(name)) mismatch(name, "the scales of " + values);
  m.scales = tensor(name);
  if (exponents(m.scales.dtype)) {
    if (!has_shape(m.scales, {n, groups_of(k, 32)})) {
      mismatch(name, fmt::format("[{}, {}]", n, groups_of(k, 32)));
    }
    refuse_extras(base, {".weight_scale_2", ".weight_global_scale"});
    m.scales.dtype = DType::f8_e8m0;
    m.format = {Format::mxfp4};
    return m;
  }
  if (m.scales.dtype != DType::f8_e4m3 || !has_shape(m.scales, {n, groups_of(k, 16)})) {
    mismatch(name, fmt::format("f8_e4m3 [{}, {}] or e8m0 [{}, {}]", n, groups_of(k, 16), n,
                               groups_of(k, 32)));
  }
  m.format = {Format::nvfp4};
  const std::string divides = base + ".weight_global_scale";
  if (only(base, {".weight_scale_2", ".weight_global_scale"}) == divides) {
    const float divisor = number(divides);
    m.global_scale = 1 / divisor;
    if (!std::isfinite(m.global_scale) || !std::isfinite(divisor)) {
      fail(Status::bad_file, "{}: tensor '{}' is {}: must be a number that 1 can be divided by",
           store_.file_of(divides), clean(divides), divisor);
    }
  } else {
    m.global_scale =
        number(config_.method == "compressed-tensors" ? divides : base + ".weight_scale_2");
  }
  return m;
}

// The group that makes `groups` of k, of those that the config names.
FormatSpec QuantisedReader::int4(const std::string& base, const std::string& scales, std::int64_t k,
                                 std::int64_t groups) const {
  std::string list;
  for (const QuantisedScheme* const scheme : config_.schemes_of(base)) {
    for (const int group : scheme->groups) {
      const std::int64_t size = group == -1 ? groups_of(k, 16) * 16 : group;
      if (groups == groups_of(k, size)) return {Format::int4, static_cast<int>(size)};
      list += fmt::format("{}{}", list.empty() ? "" : " or ", groups_of(k, size));
    }
  }
  mismatch(scales, list.empty() ? "described by quantization_config, which names no group size"
                                : fmt::format("{} groups a row", list));
}

// GPTQ's order of activations: nothing where it is the plain one, or not set.
Tensor QuantisedReader::order(const std::string& name, std::int64_t k, int group,
                              std::int64_t groups) const {
  if (!store_.contains(name)) return {};
  const Tensor t = tensor(name);
  if (t.dtype != DType::i32 || t.elements() != k) mismatch(name, fmt::format("i32 [{}]", k));
  const auto* const of = t.as<const std::int32_t>();
  bool usual = true, unset = true;
  for (std::int64_t i = 0; i < k; ++i) {
    usual = usual && of[i] == i / group;
    unset = unset && of[i] == -1;
  }
  if (usual || unset) return {};
  for (std::int64_t i = 0; i < k; ++i) {
    if (of[i] < 0 || of[i] >= groups) {
      fail(Status::bad_file, "{}: tensor '{}' holds {} at {}: must be 0 to {}",
           store_.file_of(name), clean(name), of[i], i, groups - 1);
    }
  }
  return view(t.data, DType::i32, {k});
}

// Of u8 [n, k / 2] the scales tell: e2m1 has bytes, integers have floats.
bool QuantisedReader::integers_in(const std::string& base) const {
  const std::string scales = base + ".weight_scale";
  return tensor(base + ".weight_packed").dtype == DType::i32 ||
         (store_.contains(scales) && plain(tensor(scales).dtype));
}

// compressed-tensors' pack-quantized: 32-bit words along k, of eight nibbles or four bytes, each
// with half its range added. The same nibbles are found as u8 [n, k / 2] too.
PackedMatrix QuantisedReader::integers(const std::string& base, std::int64_t n,
                                       std::int64_t k) const {
  const std::string values = base + ".weight_packed", scales = base + ".weight_scale";
  const Tensor words = tensor(values);
  if (!store_.contains(scales)) mismatch(scales, "the scales of " + values);
  refuse_extras(base, {".weight_scale_2", ".weight_global_scale"});
  PackedMatrix m;
  m.scales = tensor(scales);
  const bool bytes = words.dtype == DType::u8;
  if (words.dtype == DType::i32 && has_shape(words, {n, groups_of(k, 4)}) &&
      !has_shape(words, {n, groups_of(k, 8)})) {
    refuse_extras(base, {".weight_zero_point"});
    if (!of_rows(m.scales, n)) {
      fail(Status::unsupported, "{}: tensor '{}' is {}: of 8-bit integers one scale a row is read",
           store_.file_of(scales), clean(scales), m.scales.describe());
    }
    m.format = {Format::int8};
    m.scales = floats(scales, n);
    auto* const to = static_cast<std::int8_t*>(repacking_.take(static_cast<std::size_t>(n * k)));
    m.values = view(to, DType::i8, {n, k});
    repacking_.later([words, to, n, k] {
      for (std::int64_t row = 0; row < n; ++row) {
        const auto* const from = words.as<const std::uint8_t>() + row * groups_of(k, 4) * 4;
        for (std::int64_t i = 0; i < k; ++i) {
          to[row * k + i] = static_cast<std::int8_t>(from[i] - 128);
        }
      }
    });
    return m;
  }
  if (bytes ? !has_shape(words, {n, groups_of(k, 2)})
            : words.dtype != DType::i32 || !has_shape(words, {n, groups_of(k, 8)})) {
    mismatch(values,
             fmt::format("i32 [{}, {}] or u8 [{}, {}]", n, groups_of(k, 8), n, groups_of(k, 2)));
  }
  if (!plain(m.scales.dtype) || m.scales.rank != 2 || m.scales.shape[0] != n) {
    mismatch(scales, fmt::format("f32, bf16 or f16 [{}, groups]", n));
  }
  const std::int64_t groups = m.scales.shape[1], row_bytes = groups_of(k, 2);
  const std::int64_t stored = bytes ? row_bytes : groups_of(k, 8) * 4;  // bytes of a row
  m.format = int4(base, scales, k, groups);
  m.group_of = order(base + ".weight_g_idx", k, m.format.group, groups);
  if (k % 2 == 0 && stored == row_bytes) {
    m.values = view(words.data, DType::u8, {n, row_bytes});
  } else {
    auto* const to =
        static_cast<std::uint8_t*>(repacking_.take(static_cast<std::size_t>(n * row_bytes)));
    m.values = view(to, DType::u8, {n, row_bytes});
    repacking_.later([words, to, n, k, row_bytes, stored] {
      for (std::int64_t row = 0; row < n; ++row) {
        std::memcpy(to + row * row_bytes, words.as<const char>() + row * stored,
                    static_cast<std::size_t>(row_bytes));
        if (k % 2 != 0) to[(row + 1) * row_bytes - 1] &= 15;
      }
    });
  }
  const std::string zeros = base + ".weight_zero_point";
  if (store_.contains(zeros)) {
    // Packed along n: nibble n % 8 of word [n / 8, group].
    const Tensor packed = tensor(zeros);
    if (packed.dtype != DType::i32 || !has_shape(packed, {groups_of(n, 8), groups})) {
      mismatch(zeros, fmt::format("i32 [{}, {}]", groups_of(n, 8), groups));
    }
    if (all_rows(packed, n, 0x88888888U)) return m;
    auto* const to =
        static_cast<std::uint8_t*>(repacking_.take(static_cast<std::size_t>(n * groups)));
    m.zeros = view(to, DType::u8, {n, groups});
    repacking_.later([packed, to, n, groups] {
      for (std::int64_t row = 0; row < n; ++row) {
        for (std::int64_t g = 0; g < groups; ++g) {
          const std::uint32_t word = packed.as<const std::uint32_t>()[row / 8 * groups + g];
          to[row * groups + g] = static_cast<std::uint8_t>(word >> (row % 8 * 4) & 15);
        }
      }
    });
  }
  return m;
}

// Shunt's own formats, as src/convert/dialect.hpp writes them.
PackedMatrix QuantisedReader::own(const std::string& base, std::int64_t n, std::int64_t k) const {
  const bool sparse = config_.own.format == Format::sparse_nvfp4;
  const auto part = [&](const char* suffix, DType dtype, std::int64_t columns) {
    const std::string name = base + suffix;
    const std::string wanted = fmt::format("{} [{}, {}]", to_string(dtype), n, columns);
    if (!store_.contains(name)) mismatch(name, wanted);
    const Tensor t = tensor(name);
    if (t.dtype != dtype || !has_shape(t, {n, columns})) mismatch(name, wanted);
    return t;
  };
  PackedMatrix m{.format = config_.own};
  m.values = part(".weight_packed", DType::u8, sparse ? groups_of(k, 4) : 12 * groups_of(k, 32));
  m.scales = part(".weight_scale", DType::f8_e4m3, groups_of(k, sparse ? 16 : 32));
  if (sparse) m.positions = part(".weight_positions", DType::u8, groups_of(k, 8));
  m.global_scale = number(base + ".weight_scale_2");
  return m;
}

bool QuantisedReader::has_blocks(const std::string& name) const {
  return store_.contains(name + "_blocks");
}

PackedMatrix QuantisedReader::blocks(const std::string& name, const FusedPart& part) const {
  const std::string values = name + "_blocks", scales = name + "_scales";
  const std::int64_t groups = groups_of(part.k, 32);
  const Tensor v = tensor(values);
  if (part.k % 32 != 0 || v.dtype != DType::u8 ||
      !has_shape(v, {part.experts, part.rows, groups, 16})) {
    mismatch(values,
             fmt::format("u8 [{}, {}, {}, 16], 32 k to a block", part.experts, part.rows, groups));
  }
  if (!store_.contains(scales)) mismatch(scales, "the scales of " + values);
  const Tensor s = tensor(scales);
  if (!exponents(s.dtype) || !has_shape(s, {part.experts, part.rows, groups})) {
    mismatch(scales, fmt::format("u8 [{}, {}, {}]", part.experts, part.rows, groups));
  }
  PackedMatrix m{.format = {Format::mxfp4},
                 .n = part.n,
                 .k = part.k,
                 .values = fused_rows(v, part, groups * 16, DType::u8),
                 .scales = fused_rows(s, part, groups, DType::f8_e8m0)};
  check_described(name, m);
  return m;
}

}  // namespace shunt
