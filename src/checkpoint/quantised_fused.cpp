// Experts in one tensor: e4m3 or NVFP4 of all of them, and what their scales' shapes say.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "checkpoint/quantised.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/shape.hpp"
#include "format/codes.hpp"

namespace shunt {

namespace {

bool number_type(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 ||
         dtype == DType::f8_e8m0;
}

float number_at(const Tensor& t, std::int64_t i) {
  return t.dtype == DType::f8_e8m0 ? e8m0_to_f32(t.as<const std::uint8_t>()[i])
                                   : load_f32(t.data, t.dtype, i);
}

}  // namespace

bool QuantisedReader::has_fused(const std::string& name) const {
  if (!store_.contains(name)) return false;
  const DType dtype = tensor(name).dtype;
  return dtype == DType::f8_e4m3 || dtype == DType::u8 || dtype == DType::i8;
}

bool QuantisedReader::fused_fits(const std::string& name, std::int64_t rows, std::int64_t k,
                                 bool transposed) const {
  const Tensor t = tensor(name);
  const std::int64_t width = t.dtype == DType::f8_e4m3 ? k : groups_of(k, 2);
  return t.rank == 3 && t.shape[transposed ? 2 : 1] == rows && t.shape[transposed ? 1 : 2] == width;
}

// The part's rows of bytes [E, rows, width] or [E, width, rows]: a view where they lie so.
Tensor QuantisedReader::fused_rows(const Tensor& all, const FusedPart& part, std::int64_t width,
                                   DType dtype) const {
  const auto* const from = all.as<const char>() + part.expert * part.rows * width;
  const std::int64_t n = part.n, first = part.first, step = part.step, rows = part.rows;
  if (!part.transposed && step == 1) return view(from + first * width, dtype, {n, width});
  auto* const to = static_cast<char*>(repacking_.take(static_cast<std::size_t>(n * width)));
  repacking_.later([=, transposed = part.transposed] {
    if (!transposed) {
      for (std::int64_t row = 0; row < n; ++row) {
        std::memcpy(to + row * width, from + (first + row * step) * width,
                    static_cast<std::size_t>(width));
      }
      return;
    }
    // In tiles, so that whole lines are read.
    for (std::int64_t begin = 0; begin < width; begin += 64) {
      for (std::int64_t row = 0; row < n; ++row) {
        for (std::int64_t i = begin; i < std::min(begin + 64, width); ++i) {
          to[row * width + i] = from[first + row * step + i * rows];
        }
      }
    }
  });
  return view(to, dtype, {n, width});
}

// Whether scales [E, 2, 1] are one for 128 x 128 rather than gate's and up's number.
bool QuantisedReader::two_blocks(const std::string& name, const FusedPart& part) const {
  const std::int64_t rows = groups_of(part.rows, 128), wide = groups_of(part.k, 128);
  if (part.transposed ? wide != 2 || rows != 1 : rows != 2 || wide != 1) return false;
  const bool alike = !part.transposed && part.n % 128 == 0;
  if (!alike && !config_.blocks) {
    fail(Status::unsupported,
         "{}: tensor '{}' may be one number for gate and one for up, or one for 128 x 128: "
         "quantization_config must say which",
         store_.file_of(name), clean(name));
  }
  return alike || *config_.blocks;
}

// One number for everything, one an expert, or one for gate and one for up of each.
bool QuantisedReader::fused_number(const std::string& name, const FusedPart& part,
                                   float& number) const {
  const Tensor scales = tensor(name);
  if (!number_type(scales.dtype)) return false;
  const std::int64_t experts = part.stored, half = part.first * 2 < part.rows ? 0 : 1;
  if (scales.elements() == 1) {
    number = number_at(scales, 0);
  } else if (scales.shape[0] == experts && scales.elements() == experts) {
    number = number_at(scales, part.expert);
  } else if (part.rows == 2 * part.n && part.step == 1 && scales.elements() == 2 * experts &&
             (has_shape(scales, {experts, 2}) ||
              (has_shape(scales, {experts, 2, 1}) && !two_blocks(name, part)))) {
    number = number_at(scales, 2 * part.expert + half);
  } else {
    return false;
  }
  return true;
}

// Scales of 128 x 128 of all rows, [E, blocks of rows, blocks of k] or the other way round.
bool QuantisedReader::fused_blocks(const std::string& name, const FusedPart& part,
                                   PackedMatrix& m) const {
  const Tensor scales = tensor(name);
  if (!number_type(scales.dtype) || scales.rank != 3 || scales.shape[0] != part.stored)
    return false;
  const std::int64_t blocks = scales.shape[part.transposed ? 2 : 1], wide = groups_of(part.k, 128);
  if (scales.shape[part.transposed ? 1 : 2] != wide) return false;
  const std::int64_t own = groups_of(part.n, 128), whole = groups_of(part.rows, 128);
  std::int64_t first = 0;
  if (part.rows == part.n) {
    if (blocks != own) return false;
  } else if (part.step == 1 && part.n % 128 == 0) {
    if (blocks != whole) return false;
    first = part.first / 128;
  } else if (part.step == 1 && blocks == 2 * own && blocks != whole) {
    first = part.first > 0 ? own : 0;  // made of gate's and up's, one behind the other
  } else if (blocks != 1 || whole != 1) {
    if (blocks != whole) return false;
    fail(Status::unsupported,
         "{}: tensor '{}' has blocks of 128 rows that gate and up share, each of {} rows: read are "
         "multiples of 128",
         store_.file_of(name), clean(name), part.n);
  }
  auto* const to = static_cast<float*>(repacking_.take(static_cast<std::size_t>(own * wide) * 4));
  const std::int64_t at = part.expert * blocks * wide;
  for (std::int64_t r = 0; r < own; ++r) {
    for (std::int64_t c = 0; c < wide; ++c) {
      to[r * wide + c] = number_at(
          scales, at + (part.transposed ? c * blocks + first + r : (first + r) * wide + c));
    }
  }
  m.format = {Format::fp8_block};
  m.scales = view(to, DType::f32, {own, wide});
  return true;
}

PackedMatrix QuantisedReader::fused(const std::string& name, FusedPart part) const {
  const PackedMatrix m = fused_matrix(name, part);
  check_described(name, m);
  return m;
}

PackedMatrix QuantisedReader::fused_matrix(const std::string& name, FusedPart part) const {
  const Tensor values = tensor(name);
  const bool nibbles = values.dtype != DType::f8_e4m3;
  const std::int64_t width = nibbles ? groups_of(part.k, 2) : part.k;
  part.stored = values.rank == 3 ? values.shape[0] : 0;
  if (!fused_fits(name, part.rows, part.k, part.transposed) || part.stored < part.experts) {
    mismatch(name, part.transposed ? fmt::format("[{}, {}, {}]", part.experts, width, part.rows)
                                   : fmt::format("[{}, {}, {}]", part.experts, part.rows, width));
  }
  const std::string scale_name =
      only(name, {"_scale_inv", "_weight_scale_inv", "_weight_scale", "_scale"});
  if (!store_.contains(scale_name)) mismatch(scale_name, "the scales of " + name);
  std::vector<const char*> extras = {"_pre_quant_scale", "_input_rotation", "_weight_zero_point"};
  if (!nibbles) extras.insert(extras.end(), {"_weight_scale_2", "_outer_scale_denominator"});
  for (const char* extra : extras) {
    if (!store_.contains(name + extra)) continue;
    fail(Status::unsupported, "{}: tensor '{}' is there: not read with this format",
         store_.file_of(name + extra), clean(name + extra));
  }
  const Tensor scales = tensor(scale_name);
  const std::int64_t experts = part.stored, rows = part.rows;
  PackedMatrix m{.n = part.n, .k = part.k};
  m.values = fused_rows(values, part, width, nibbles ? DType::u8 : DType::f8_e4m3);
  if (nibbles) {
    const std::int64_t groups = groups_of(part.k, 16);
    const bool fits = part.transposed ? has_shape(scales, {experts, groups, rows})
                                      : has_shape(scales, {experts, rows, groups});
    const std::string second = name + "_weight_scale_2", amax = name + "_amax";
    if (part.k % 2 != 0 || scales.dtype != DType::f8_e4m3 || !fits) {
      mismatch(scale_name, fmt::format("f8_e4m3, one for 16 of {}, k = {}", name, part.k));
    }
    const std::string under = name + "_outer_scale_denominator";
    if (store_.contains(amax) || store_.contains(under)) {
      // Inkling 2 Loop's: over what it was scaled to.
      float denominator = 0;
      if (store_.contains(second)) {
        fail(Status::bad_file, "{}: tensors '{}' and '{}' are there: must be one of them",
             store_.file_of(second), clean(store_.contains(amax) ? amax : under), clean(second));
      }
      if (!store_.contains(amax) || !fused_number(amax, part, m.global_scale)) {
        mismatch(amax, "one number, or one an expert");
      }
      if (!store_.contains(under) || !fused_number(under, part, denominator)) {
        mismatch(under, "one number, or one an expert");
      }
      for (const auto& [tensor_name, value] :
           {std::pair(&amax, m.global_scale), std::pair(&under, denominator)}) {
        const bool legal = std::isfinite(value) && (tensor_name == &amax || value != 0);
        if (legal) continue;
        fail(Status::bad_file, "{}: tensor '{}' holds {}: must be finite{}",
             store_.file_of(*tensor_name), clean(*tensor_name), value,
             tensor_name == &under ? " and not 0" : "");
      }
      m.global_scale /= denominator;
    } else if (!store_.contains(second) || !fused_number(second, part, m.global_scale)) {
      mismatch(second, "one number, or one an expert");
    }
    m.format = {Format::nvfp4};
    m.scales = fused_rows(scales, part, groups, DType::f8_e4m3);
    return m;
  }
  if (fused_number(scale_name, part, m.global_scale)) {
    m.format = {Format::fp8_tensor};
    return m;
  }
  const std::int64_t groups = groups_of(part.k, 32);
  if ((scales.dtype == DType::u8 || scales.dtype == DType::f8_e8m0) &&
      (part.transposed ? has_shape(scales, {experts, groups, rows})
                       : has_shape(scales, {experts, rows, groups}))) {
    m.format = {Format::mxfp8};
    m.scales = fused_rows(scales, part, groups, DType::f8_e8m0);
    return m;
  }
  // One a row, whichever way they lie.
  if (number_type(scales.dtype) &&
      (has_shape(scales, {experts, rows, 1}) || has_shape(scales, {experts, 1, rows}) ||
       has_shape(scales, {experts, rows}))) {
    auto* const to = static_cast<float*>(repacking_.take(static_cast<std::size_t>(part.n) * 4));
    for (std::int64_t row = 0; row < part.n; ++row) {
      to[row] = number_at(scales, part.expert * rows + part.first + row * part.step);
    }
    m.format = {Format::fp8_channel};
    m.scales = view(to, DType::f32, {part.n});
    return m;
  }
  if (!fused_blocks(scale_name, part, m)) {
    mismatch(scale_name,
             fmt::format("one number, one an expert, [{}, {}, 1] or one for 128 x 128 of {} rows "
                         "and {} columns",
                         experts, rows, rows, part.k));
  }
  return m;
}

}  // namespace shunt
