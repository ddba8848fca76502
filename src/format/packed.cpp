// pack(), unpack() and what they check, for every format.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <memory>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/memory.hpp"
#include "core/workspace.hpp"
#include "cpu/free_threads.hpp"
#include "format/rules.hpp"

namespace shunt {

namespace {

constexpr std::array all_rules = {
    &fp8_tensor_rules, &fp8_channel_rules, &fp8_block_rules, &mxfp8_rules,  &nvfp4_rules,
    &mxfp4_rules,      &int8_rules,        &int4_rules,      &dense3_rules, &sparse_nvfp4_rules};

const FormatRules* find_rules(Format format) {
  for (const FormatRules* rules : all_rules) {
    if (rules->format.format == format) return rules;
  }
  return nullptr;
}

const FormatRules& rules_of(const char* what, const FormatSpec& spec) {
  const FormatRules* const rules = find_rules(spec.format);
  if (rules == nullptr) {
    fail(Status::invalid_argument, "{}: format is {}: has no packed form", what, to_string(spec));
  }
  const bool grouped = spec.format == Format::int4;
  if (grouped ? spec.group < 16 || spec.group % 16 != 0 : spec.group != 0) {
    fail(Status::invalid_argument, "{}: group is {}: must be {}", what, spec.group,
         grouped ? "a multiple of 16" : "0, only int4 has one");
  }
  if (spec != spec.of_matrix()) {
    fail(Status::invalid_argument,
         "{}: format is {}: only prepared weights are ordered or have zeros", what,
         to_string(spec));
  }
  return *rules;
}

constexpr double most_elements = 0x1p60;

PackedMatrix tensors_of(const char* what, const FormatSpec& spec, std::int64_t n, std::int64_t k) {
  const FormatSpec exact = resolved(spec);
  const FormatRules& rules = rules_of(what, exact);
  if (n < 0) fail(Status::invalid_argument, "{}: n is {}: must be >= 0", what, n);
  if (k < 0) fail(Status::invalid_argument, "{}: k is {}: must be >= 0", what, k);
  if ((static_cast<double>(n) + 128) * (static_cast<double>(k) + 128) > most_elements) {
    fail(Status::invalid_argument, "{}: a matrix [{}, {}] does not fit 64-bit sizes", what, n, k);
  }
  PackedMatrix matrix = rules.tensors(exact, n, k);
  matrix.format = exact;
  matrix.n = n;
  matrix.k = k;
  return matrix;
}

// fn(first row, end) in blocks of `block` rows, on all free cores.
template <class Fn>
void for_row_blocks(std::int64_t rows, std::int64_t block, std::int64_t elements, Fn&& fn) {
  cpu_engine::on_free_cores((rows + block - 1) / block, elements, [&](std::int64_t b) {
    const std::int64_t first = b * block;
    fn(first, std::min(first + block, rows));
  });
}

// Rows [first, end) of any float matrix as f32: to[end - first][k].
template <class Load>
void read_rows(const Tensor& matrix, std::int64_t first, std::int64_t end, float* to,
               const Load& load) {
  const std::int64_t k = matrix.shape[1];
  if (matrix.strides[1] == 1) {
    for (std::int64_t row = first; row < end; ++row) {
      const std::int64_t from = row * matrix.strides[0];
      for (std::int64_t i = 0; i < k; ++i) to[(row - first) * k + i] = load(from + i);
    }
    return;
  }
  // In tiles of 16 k, so that a transposed matrix is read by whole lines too.
  for (std::int64_t begin = 0; begin < k; begin += 16) {
    const std::int64_t last = std::min(begin + 16, k);
    for (std::int64_t row = first; row < end; ++row) {
      for (std::int64_t i = begin; i < last; ++i) {
        to[(row - first) * k + i] = load(row * matrix.strides[0] + i * matrix.strides[1]);
      }
    }
  }
}
void read_rows(const Tensor& matrix, std::int64_t first, std::int64_t end, float* to) {
  const auto* const halves = matrix.as<const std::uint16_t>();
  switch (matrix.dtype) {
    case DType::f32:
      return read_rows(matrix, first, end, to,
                       [from = matrix.as<const float>()](std::int64_t i) { return from[i]; });
    case DType::bf16:
      return read_rows(matrix, first, end, to,
                       [&](std::int64_t i) { return bf16_to_f32(halves[i]); });
    default:
      return read_rows(matrix, first, end, to,
                       [&](std::int64_t i) { return load_f32(matrix.data, matrix.dtype, i); });
  }
}

// The largest magnitude. Throws for what is not finite.
float checked_amax(const Tensor& matrix, std::int64_t block) {
  const std::int64_t k = matrix.shape[1];
  // Magnitudes order as their bits do, NaN and infinities last.
  std::atomic<std::uint32_t> most{0};
  for_row_blocks(matrix.shape[0], block, matrix.elements(),
                 [&](std::int64_t first, std::int64_t end) {
                   std::vector<float> rows(static_cast<std::size_t>((end - first) * k));
                   read_rows(matrix, first, end, rows.data());
                   std::uint32_t here = 0;
                   for (const float x : rows) {
                     here = std::max(here, std::bit_cast<std::uint32_t>(x) & 0x7fffffffU);
                   }
                   std::uint32_t seen = most.load();
                   while (seen < here && !most.compare_exchange_weak(seen, here)) {
                   }
                 });
  const std::uint32_t bits = most.load();
  if (bits < 0x7f800000U) return std::bit_cast<float>(bits);
  for (std::int64_t n = 0; n < matrix.shape[0]; ++n) {
    for (std::int64_t i = 0; i < k; ++i) {
      const float x =
          load_f32(matrix.data, matrix.dtype, n * matrix.strides[0] + i * matrix.strides[1]);
      if (!std::isfinite(x)) {
        fail(Status::invalid_argument, "pack: matrix[{}, {}] is {}: must be finite", n, i, x);
      }
    }
  }
  fail(Status::internal, "pack: the matrix changes while it is read");
}

std::string tensor_name(const std::string& name, const char* part) {
  return fmt::format("{}.{}", name, part);
}

}  // namespace

std::vector<FormatSpec> known_formats() {
  std::vector<FormatSpec> result;
  for (const FormatRules* rules : all_rules) result.push_back(rules->format);
  return result;
}

PackedMatrix PackedMatrix::rows(std::int64_t begin, std::int64_t end) const {
  if (begin < 0 || end < begin || end > n) {
    fail(Status::invalid_argument, "packed matrix [{}, {}]: rows {} to {} are out of range", n, k,
         begin, end);
  }
  constexpr std::int64_t block = 128;
  const bool blocks = format.format == Format::fp8_block;
  if (blocks && begin % block != 0) {
    fail(Status::invalid_argument,
         "packed matrix: rows begin at {}: must be a multiple of {} in {}", begin, block,
         to_string(format));
  }
  PackedMatrix part = *this;
  part.n = end - begin;
  part.values = values.rows(begin, end);
  if (scales && blocks) {
    part.scales = scales.rows(begin / block, (end + block - 1) / block);
  } else if (scales) {
    part.scales = scales.rows(begin, end);
  }
  if (zeros) part.zeros = zeros.rows(begin, end);
  if (positions) part.positions = positions.rows(begin, end);
  return part;
}

std::size_t PackedMatrix::bytes() const {
  std::int64_t sum = 0;
  for (const Tensor* tensor : {&values, &scales, &zeros, &group_of, &positions}) {
    if (*tensor) sum += tensor->bytes();
  }
  return static_cast<std::size_t>(sum);
}

void check_packed(const std::string& name, const PackedMatrix& matrix, Device device) {
  const PackedMatrix wanted = tensors_of(name.c_str(), matrix.format, matrix.n, matrix.k);
  if (matrix.format != wanted.format) {
    fail(Status::invalid_argument, "{}: format is {}: must say its group, {}", name,
         to_string(matrix.format), to_string(wanted.format));
  }
  const auto check = [&](const char* part, const Tensor& tensor, const Tensor& like,
                         std::initializer_list<DType> dtypes) {
    const std::string full = tensor_name(name, part);
    if (!like) {
      if (tensor) {
        fail(Status::invalid_argument, "{} is given: {} has none", full, to_string(matrix.format));
      }
      return;
    }
    if (like.rank == 1) {
      check_tensor(full, tensor, {.dtypes = dtypes, .shape = {like.shape[0]}, .dense = true},
                   device);
    } else {
      check_tensor(full, tensor,
                   {.dtypes = dtypes, .shape = {like.shape[0], like.shape[1]}, .dense = true},
                   device);
    }
  };
  const bool grouped = matrix.format.format == Format::int4;
  check("values", matrix.values, wanted.values, {wanted.values.dtype});
  if (grouped) {
    check("scales", matrix.scales, wanted.scales, {DType::f16, DType::bf16, DType::f32});
  } else {
    check("scales", matrix.scales, wanted.scales, {wanted.scales.dtype});
  }
  check("positions", matrix.positions, wanted.positions, {DType::u8});
  const Tensor none{};
  const Tensor zeros = without_data(DType::u8, {wanted.scales.shape[0], wanted.scales.shape[1]});
  const Tensor order = without_data(DType::i32, {matrix.k});
  check("zeros", matrix.zeros, grouped && matrix.zeros ? zeros : none, {DType::u8});
  check("group_of", matrix.group_of, grouped && matrix.group_of ? order : none, {DType::i32});
  if (matrix.group_of && device.type == DeviceType::cpu) {
    const auto* const groups = matrix.group_of.as<const std::int32_t>();
    for (std::int64_t k = 0; k < matrix.k; ++k) {
      if (groups[k] < 0 || groups[k] >= wanted.scales.shape[1]) {
        fail(Status::invalid_argument, "{}.group_of[{}] is {}: must be 0 to {}", name, k, groups[k],
             wanted.scales.shape[1] - 1);
      }
    }
  }
  if (matrix.zeros && device.type == DeviceType::cpu) {
    const auto* const points = matrix.zeros.as<const std::uint8_t>();
    for (std::int64_t i = 0; i < matrix.zeros.elements(); ++i) {
      if (points[i] <= 16) continue;
      const std::int64_t columns = matrix.zeros.shape[1];
      fail(Status::invalid_argument, "{}.zeros[{}, {}] is {}: must be at most 16", name,
           i / columns, i % columns, points[i]);
    }
  }
  if (matrix.positions && device.type == DeviceType::cpu) {
    const auto* const places = matrix.positions.as<const std::uint8_t>();
    for (std::int64_t i = 0; i < matrix.positions.elements(); ++i) {
      const int byte = places[i];
      if ((byte & 3) < (byte >> 2 & 3) && (byte >> 4 & 3) < byte >> 6) continue;
      const std::int64_t columns = matrix.positions.shape[1];
      fail(Status::invalid_argument,
           "{}.positions[{}, {}] is {:#04x}: bits 1:0 must be below 3:2, and 5:4 below 7:6", name,
           i / columns, i % columns, byte);
    }
  }
  const bool global = find_rules(matrix.format.format)->global_scale != nullptr;
  if (global ? !std::isfinite(matrix.global_scale) : matrix.global_scale != 1) {
    fail(Status::invalid_argument, "{}.global_scale is {}: must be {}", name, matrix.global_scale,
         global ? "finite" : "1");
  }
}

std::size_t packed_bytes(const FormatSpec& spec, std::int64_t n, std::int64_t k) {
  const PackedMatrix matrix = tensors_of("packed_bytes", spec, n, k);
  Carver carver;
  for (const Tensor* tensor : {&matrix.values, &matrix.scales, &matrix.positions}) {
    if (*tensor) carver.take_bytes(static_cast<std::size_t>(tensor->bytes()));
  }
  return carver.used();
}

PackedMatrix pack(const FormatSpec& spec, const Tensor& matrix, Workspace memory,
                  float global_amax) {
  const cpu_engine::FloatMode mode;
  check_tensor("pack: matrix", matrix, {.dtypes = float_dtypes, .shape = {any_size, any_size}},
               Device{});
  const std::int64_t n = matrix.shape[0], k = matrix.shape[1];
  PackedMatrix packed = tensors_of("pack", spec, n, k);
  const std::size_t bytes = packed_bytes(spec, n, k);
  check_memory("pack", "memory", memory, bytes);
  check_all_apart("pack", {{"memory", bytes_at(memory.data, bytes, Device{})}},
                  {{"matrix", matrix}});
  const FormatRules& rules = rules_of("pack", packed.format);
  if (!(global_amax >= 0) || !std::isfinite(global_amax)) {
    fail(Status::invalid_argument, "pack: global_amax is {}: must be finite and >= 0", global_amax);
  }
  if (global_amax > 0 && rules.global_scale == nullptr) {
    fail(Status::invalid_argument, "pack: global_amax is {}: {} has no global scale", global_amax,
         to_string(packed.format));
  }
  Carver carver(memory);
  for (Tensor* tensor : {&packed.values, &packed.scales, &packed.positions}) {
    if (*tensor) tensor->data = carver.take_bytes(static_cast<std::size_t>(tensor->bytes()));
  }
  const float amax = checked_amax(matrix, rules.block_rows);
  if (rules.global_scale != nullptr) {
    packed.global_scale = rules.global_scale(global_amax > 0 ? global_amax : amax);
  }
  for_row_blocks(n, rules.block_rows, n * k, [&](std::int64_t first, std::int64_t end) {
    std::vector<float> rows(static_cast<std::size_t>((end - first) * k));
    read_rows(matrix, first, end, rows.data());
    rules.encode({.first = first, .count = end - first, .k = k, .data = rows.data()}, packed);
  });
  return packed;
}

void check_apart_from(std::string_view what, const NamedTensor& written,
                      const PackedMatrix& matrix) {
  check_all_apart(what, {written},
                  {{"matrix.values", matrix.values},
                   {"matrix.scales", matrix.scales},
                   {"matrix.zeros", matrix.zeros},
                   {"matrix.group_of", matrix.group_of},
                   {"matrix.positions", matrix.positions}});
}

void unpack(const PackedMatrix& matrix, Tensor out) {
  const cpu_engine::FloatMode mode;
  check_packed("unpack: matrix", matrix, Device{});
  check_tensor("unpack: out", out, {.dtypes = float_dtypes, .shape = {matrix.n, matrix.k}},
               Device{});
  check_elements_apart("unpack: out", out);
  check_apart_from("unpack", {"out", out}, matrix);
  const FormatRules& rules = rules_of("unpack", matrix.format);
  // Eight rows at once: a transposed `out` is written by pieces of lines.
  for_row_blocks(matrix.n, 8, matrix.n * matrix.k, [&](std::int64_t first, std::int64_t end) {
    std::vector<double> rows(static_cast<std::size_t>((end - first) * matrix.k));
    for (std::int64_t row = first; row < end; ++row) {
      rules.decode(matrix, row, rows.data() + (row - first) * matrix.k);
    }
    for (std::int64_t begin = 0; begin < matrix.k; begin += 16) {
      for (std::int64_t row = first; row < end; ++row) {
        for (std::int64_t i = begin; i < std::min(begin + 16, matrix.k); ++i) {
          store_f64(out.data, out.dtype, row * out.strides[0] + i * out.strides[1],
                    rows[static_cast<std::size_t>((row - first) * matrix.k + i)]);
        }
      }
    }
  });
}

}  // namespace shunt
