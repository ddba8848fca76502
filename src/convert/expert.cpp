#include "convert/expert.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "convert/dialect.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/workspace.hpp"
#include "format/codes.hpp"
#include "format/pairs.hpp"
#include "format/rules.hpp"

namespace shunt {

namespace {

// A matrix of the layer in f32, wherever it lies and whatever it is stored as.
std::vector<float> load(const std::vector<Tensor>& plain, const std::vector<PackedMatrix>& packed,
                        std::size_t expert, std::int64_t& n, std::int64_t& k) {
  if (expert < packed.size()) {
    const PackedMatrix& matrix = packed[expert];
    n = matrix.n;
    k = matrix.k;
    std::vector<float> values(static_cast<std::size_t>(n * k));
    unpack(matrix, view(values.data(), {n, k}));
    return values;
  }
  const Tensor& matrix = plain.at(expert);
  n = matrix.shape[0];
  k = matrix.shape[1];
  std::vector<float> values(static_cast<std::size_t>(n * k));
  // In tiles, so that a transposed matrix is read by whole lines too.
  for (std::int64_t first = 0; first < k; first += 16) {
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t i = first; i < std::min(first + 16, k); ++i) {
        values[static_cast<std::size_t>(row * k + i)] =
            load_f32(matrix.data, matrix.dtype, row * matrix.strides[0] + i * matrix.strides[1]);
      }
    }
  }
  return values;
}

float largest(const std::vector<float>& values) {
  float most = 0;
  for (const float value : values) most = std::max(most, std::fabs(value));
  return most;
}

bool has_global_scale(Format format) {
  return format == Format::nvfp4 || format == Format::sparse_nvfp4 || format == Format::dense3;
}

bool has_blocks_of_16(Format format) {
  return format == Format::nvfp4 || format == Format::sparse_nvfp4;
}

// Packs values that are codes under the scales already.
void pack_rounded(const PruneRounding& rounding, ConvertedMatrix& matrix) {
  const PackedMatrix& packed = matrix.packed;
  const std::int64_t k = matrix.k, groups = groups_of(k, 16);
  const bool sparse = packed.format.format == Format::sparse_nvfp4;
  matrix.packed.global_scale = rounding.global;
  std::copy(rounding.scales.begin(), rounding.scales.end(), packed.scales.as<std::uint8_t>());
  for (std::int64_t row = 0; row < matrix.n; ++row) {
    const float* const values = matrix.values.data() + row * k;
    const auto code = [&](std::int64_t i) -> std::uint8_t {
      if (i >= k) return 0;
      const std::uint8_t scale = rounding.scales[static_cast<std::size_t>(row * groups + i / 16)];
      return to_e2m1(static_cast<double>(values[i]), static_cast<double>(e4m3_to_f32(scale)) *
                                                         static_cast<double>(rounding.global));
    };
    if (!sparse) {
      auto* const codes = packed.values.as<std::uint8_t>() + row * groups_of(k, 2);
      for (std::int64_t i = 0; i < k; ++i) put_nibble(codes, i, code(i));
      continue;
    }
    auto* const codes = packed.values.as<std::uint8_t>() + row * groups_of(k, 4);
    const auto* const places = packed.positions.as<std::uint8_t>() + row * groups_of(k, 8);
    for (std::int64_t i = 0; i < k; i += 4) {
      const int place = places[i / 8] >> (i % 8 == 0 ? 0 : 4);
      codes[i / 4] =
          static_cast<std::uint8_t>(code(i + (place & 3)) | code(i + (place >> 2 & 3)) << 4);
    }
  }
}

// The scales of a matrix that has them for blocks of 16 already, where what is left of it can keep
// them and lose nothing; else none. In pairs, two blocks share one.
PruneRounding kept_scales(const ConversionSpec& spec, const PackedMatrix& matrix) {
  const Format to = spec.format.format, from = matrix.format.format;
  if (!has_blocks_of_16(to) || !has_blocks_of_16(from)) return {};
  if (spec.prune && spec.pruning.pattern == PrunePattern::pairs) return {};
  if (!(matrix.global_scale > 0)) return {};  // codes are sought by magnitudes
  if (to == Format::nvfp4 && !has_divisor(matrix.global_scale)) return {};  // as it is written
  constexpr std::uint8_t least = 1, largest = 0x7e;                         // 0: a block of zeros
  const auto* const scales = matrix.scales.as<const std::uint8_t>();
  PruneRounding kept{.global = matrix.global_scale};
  kept.scales.assign(scales, scales + matrix.scales.elements());
  for (std::uint8_t& scale : kept.scales) {
    if (scale > largest) return {};  // negative, or none
    scale = std::max(scale, least);
  }
  return kept;
}

// A copy of what `keeps` names, as a matrix of exactly that format.
PackedMatrix copied(const PackedMatrix& from, const FormatSpec& format, Buffer& memory) {
  PackedMatrix to = from;
  to.format = format;
  if (format.format == Format::fp8_block && !from.scales) {  // of one block
    to.scales = view(&from.global_scale, {1, 1});
    to.global_scale = 1;
  }
  const std::initializer_list<Tensor*> parts = {&to.values, &to.scales, &to.zeros, &to.group_of,
                                                &to.positions};
  const auto each = [&](auto&& fn) {
    for (Tensor* part : parts) {
      if (*part) fn(*part, static_cast<std::size_t>(part->bytes()));
    }
  };
  Carver measure;
  each([&](const Tensor&, std::size_t bytes) { measure.take_bytes(bytes); });
  memory = cpu({.threads = 1}).allocate(measure.used());
  Carver carver(memory);
  each([&](Tensor& part, std::size_t bytes) {
    void* const data = carver.take_bytes(bytes);
    std::memcpy(data, part.data, bytes);
    part.data = data;
  });
  return to;
}

// Whatever is refused in a matrix says in which.
template <class Fn>
void in_matrix(int expert, ExpertMatrix which, Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    fail(error.status(), "expert {}, {}: {}", expert, to_string(which), error.what());
  }
}

// Dense codes of a pruned matrix, their scales fitted to what is left: one for 16, or 32 in pairs.
void pack_fitted(std::int64_t scaled, ConvertedMatrix& matrix) {
  const std::int64_t groups = groups_of(matrix.k, 16);
  PruneRounding rounding{.global = matrix.packed.global_scale};
  rounding.scales.resize(static_cast<std::size_t>(matrix.n * groups));
  for (std::int64_t row = 0; row < matrix.n; ++row) {
    for_each_group(matrix.k, scaled, [&](std::int64_t, std::int64_t first, std::int64_t count) {
      const std::uint8_t scale =
          nvfp4_fitted_scale(matrix.values.data() + row * matrix.k + first, count, rounding.global);
      for (std::int64_t k = first; k < first + count; k += 16) {
        rounding.scales[static_cast<std::size_t>(row * groups + k / 16)] = scale;
      }
    });
  }
  pack_rounded(rounding, matrix);
}

// Rounds the values of `matrix` to the format, unless it is kept; `before`: what they were.
// `rounding`: what pruning has rounded them to, if it has.
void round_to(const ConversionSpec& spec, float global_amax, const std::vector<float>& before,
              const PruneRounding& rounding, ConvertedMatrix& matrix) {
  if (matrix.packed) {
    // As it was.
  } else if (spec.format.format == Format::plain) {
    for (float& value : matrix.values) {
      double rounded = 0;  // room for any
      store_f32(&rounded, spec.dtype, 0, value);
      value = load_f32(&rounded, spec.dtype, 0);
    }
  } else {
    matrix.memory = cpu({.threads = 1}).allocate(packed_bytes(spec.format, matrix.n, matrix.k));
    const bool in_pairs = spec.prune && spec.pruning.pattern == PrunePattern::pairs &&
                          has_blocks_of_16(spec.format.format);
    matrix.packed = in_pairs ? pack_in_pairs(spec.format.format, matrix.values.data(), matrix.n,
                                             matrix.k, matrix.memory, global_amax)
                             : pack(spec.format, matrix.view(), matrix.memory, global_amax);
    if (!rounding.scales.empty()) {
      pack_rounded(rounding, matrix);
    } else if (spec.prune && spec.format.format == Format::nvfp4) {
      pack_fitted(in_pairs ? 32 : 16, matrix);
    }
    unpack(matrix.packed, matrix.view());
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    const auto was = static_cast<double>(before[i]);
    const double difference = was - static_cast<double>(matrix.values[i]);
    matrix.error.difference += difference * difference;
    matrix.error.magnitude += was * was;
  }
  // The largest f32 is none of bf16's numbers.
  if (!std::isfinite(matrix.error.difference)) check_finite(matrix.view());
}

}  // namespace

bool keeps(const ConversionSpec& spec, const PackedMatrix& matrix) {
  const FormatSpec to = resolved(spec.format), from = matrix.format;
  if (spec.prune || !matrix) return false;
  if (to.format == Format::fp8_block && from.format == Format::fp8_tensor) {
    return matrix.n <= 128 && matrix.k <= 128;
  }
  if (to.format != Format::int4 || from.format != Format::int4) return from == to;
  const std::int64_t groups = matrix.scales.shape[1];
  if (from != to && (groups != 1 || groups_of(matrix.k, to.group) != 1)) return false;
  const auto* const zeros = matrix.zeros.as<const std::uint8_t>();
  return std::all_of(zeros, zeros + (matrix.zeros ? matrix.zeros.elements() : 0),
                     [](std::uint8_t zero) { return zero < 16; });
}

void check_prunable(const ConversionSpec& spec) {
  constexpr Format none = Format::dense3;  // a code of its is 0 behind some others only
  if (!spec.prune || spec.format.format != none) return;
  std::string names = "f32, bf16, f16";
  for (const FormatSpec& format : known_formats()) {
    if (format.format != none) names += ", " + to_string(FormatSpec{format.format});
  }
  fail(Status::invalid_argument,
       "format is '{}': does not hold every 0, which pruned weights are: must be one of {}",
       to_string(spec.format), names);
}

void check_finite(const Tensor& matrix) {
  for (std::int64_t n = 0; n < matrix.shape[0]; ++n) {
    for (std::int64_t i = 0; i < matrix.shape[1]; ++i) {
      const float value =
          load_f32(matrix.data, matrix.dtype, n * matrix.strides[0] + i * matrix.strides[1]);
      if (!std::isfinite(value)) {
        fail(Status::invalid_argument, "weight [{}, {}] is {}: must be finite", n, i, value);
      }
    }
  }
}

std::string to_string(const ConversionSpec& spec) {
  std::string text =
      spec.format.format == Format::plain ? to_string(spec.dtype) : to_string(spec.format);
  if (spec.prune)
    text += ", " + to_string(spec.pruning.pattern) + " by " + to_string(spec.pruning.method);
  return text;
}

ConversionSpec conversion_from_string(const std::string& text) {
  std::string names;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (text == to_string(dtype)) return {.dtype = dtype};
    names += to_string(dtype) + std::string(", ");
  }
  for (const FormatSpec& format : known_formats()) {
    const std::string name = to_string(FormatSpec{format.format});  // without a group
    names += name + ", ";
    if (text.substr(0, text.find(':')) != name) continue;
    FormatSpec spec;
    try {
      spec = format_from_string(text);
    } catch (const Error&) {  // that speaks of order and zero points too
      fail(Status::invalid_argument,
           "format is '{}': only int4 has a group, a multiple of 16 below 2^31: int4:64", text);
    }
    if (spec == spec.of_matrix()) return {.format = spec};
    fail(Status::invalid_argument,
         "format is '{}': must be {}, whose order and zero points prepared weights alone have",
         text, to_string(spec.of_matrix()));
  }
  fail(Status::invalid_argument,
       "format is '{}': must be one of {}or int4:GROUP, GROUP a multiple of 16", text, names);
}

double bits_per_weight(const ConversionSpec& spec) {
  return spec.format.format == Format::plain ? bits(spec.dtype) : bits_per_weight(spec.format);
}

void WeightError::add(const WeightError& other) {
  difference += other.difference;
  magnitude += other.magnitude;
}

double WeightError::relative() const {
  return difference == 0 ? 0 : std::sqrt(difference / magnitude);
}

const char* to_string(ExpertMatrix matrix) {
  return matrix == ExpertMatrix::gate ? "gate" : matrix == ExpertMatrix::up ? "up" : "down";
}

bool fell_back(const ConversionSpec& spec, const ConvertedMatrix& matrix) {
  return spec.prune && !matrix.values.empty() && matrix.pruned_by != spec.pruning.method;
}

ConvertedExpert convert_expert(const Context& context, const ConversionSpec& spec,
                               const LayerSpec& layer, const LayerWeights& weights, int expert,
                               const LayerCalibration* calibration) {
  const ExpertWeights& experts = weights.experts;
  const bool gated = layer.experts.activation.gated;
  const auto index = static_cast<std::size_t>(expert);
  const bool measured = spec.prune && spec.pruning.method != PruneMethod::magnitude;
  if (measured && calibration == nullptr) {
    fail(Status::invalid_argument, "convert: {} needs recorded hidden states to calibrate by",
         to_string(spec.pruning.method));
  }
  ConvertedExpert result;
  if (calibration != nullptr) result.tokens = calibration->tokens(expert);

  std::array<std::vector<float>, expert_matrices> before;
  std::array<PruneRounding, expert_matrices> roundings;
  std::array<const PackedMatrix*, expert_matrices> packed_before{};
  const bool rounds = spec.prune && spec.pruning.method == PruneMethod::obs &&
                      has_blocks_of_16(resolved(spec.format).format);
  // What is pruned makes others larger: there is room for twice the largest.
  const auto set_global = [&](std::initializer_list<ExpertMatrix> shared) {
    float most = 0;
    for (const ExpertMatrix which : shared) {
      most = std::max(most, largest(before[static_cast<std::size_t>(which)]));
    }
    for (const ExpertMatrix which : shared) {
      roundings[static_cast<std::size_t>(which)].global =
          nvfp4_global_scale(std::min(2 * most, std::numeric_limits<float>::max()));
    }
  };
  const auto prepare_matrix = [&](ExpertMatrix which, const std::vector<Tensor>& plain,
                                  const std::vector<PackedMatrix>& packed) {
    const auto i = static_cast<std::size_t>(which);
    ConvertedMatrix& matrix = result.matrices[i];
    in_matrix(expert, which, [&] {
      before[i] = load(plain, packed, index, matrix.n, matrix.k);
      matrix.values = before[i];
      check_finite(matrix.view());
    });
    if (index < packed.size()) packed_before[i] = &packed[index];
    if (index < packed.size() && keeps(spec, packed[index])) {
      matrix.packed = copied(packed[index], resolved(spec.format), matrix.memory);
    }
  };
  const auto prune_matrix = [&](ExpertMatrix which, const InputStatistics* statistics) {
    ConvertedMatrix& matrix = result.matrices[static_cast<std::size_t>(which)];
    in_matrix(expert, which, [&] {
      matrix.pruned_by =
          prune_2_of_4(context, spec.pruning, matrix.values.data(), matrix.n, matrix.k, statistics,
                       rounds ? &roundings[static_cast<std::size_t>(which)] : nullptr);
    });
  };
  const auto matrix_of = [&](ExpertMatrix which) -> ConvertedMatrix& {
    return result.matrices[static_cast<std::size_t>(which)];
  };

  if (gated) prepare_matrix(ExpertMatrix::gate, experts.gate, experts.packed_gate);
  prepare_matrix(ExpertMatrix::up, experts.up, experts.packed_up);
  prepare_matrix(ExpertMatrix::down, experts.down, experts.packed_down);

  set_global({ExpertMatrix::gate, ExpertMatrix::up});
  set_global({ExpertMatrix::down});
  const bool products = spec.pruning.method == PruneMethod::obs;
  const Tensor no_gate{};
  const auto inputs_of = [&] {
    return calibration->inputs(expert, gated ? matrix_of(ExpertMatrix::gate).view() : no_gate,
                               matrix_of(ExpertMatrix::up).view(), products);
  };
  if (spec.prune) {
    const auto inputs = measured ? inputs_of() : LayerCalibration::Inputs{};
    const InputStatistics* statistics = measured ? &inputs.gate_up : nullptr;
    if (gated) prune_matrix(ExpertMatrix::gate, statistics);
    prune_matrix(ExpertMatrix::up, statistics);
  }
  float amax = 0;
  if (has_global_scale(spec.format.format)) {
    amax = largest(matrix_of(ExpertMatrix::up).values);
    if (gated) amax = std::max(amax, largest(matrix_of(ExpertMatrix::gate).values));
  }
  const auto round_matrix = [&](ExpertMatrix which, float global_amax) {
    const auto i = static_cast<std::size_t>(which);
    // Values that obs has not moved.
    if (roundings[i].scales.empty() && packed_before[i] != nullptr) {
      PruneRounding kept = kept_scales(spec, *packed_before[i]);
      if (!kept.scales.empty()) roundings[i] = std::move(kept);
    }
    in_matrix(expert, which,
              [&] { round_to(spec, global_amax, before[i], roundings[i], matrix_of(which)); });
  };
  if (gated) round_matrix(ExpertMatrix::gate, amax);
  round_matrix(ExpertMatrix::up, amax);
  if (spec.prune) {
    const auto inputs = measured ? inputs_of() : LayerCalibration::Inputs{};
    prune_matrix(ExpertMatrix::down, measured ? &inputs.down : nullptr);
  }
  round_matrix(ExpertMatrix::down, 0);
  return result;
}

}  // namespace shunt
