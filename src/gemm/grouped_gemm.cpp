// The public grouped GEMM: what is legal, then the engine.
#include <fmt/core.h>

#include <algorithm>

#include "activate/cpu_engine.hpp"
#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/workspace.hpp"
#include "cuda/current.hpp"
#include "format/rules.hpp"
#include "gemm/check_prepared.hpp"
#include "gemm/cpu_engine.hpp"
#include "gemm/cuda_engine.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/fragment_prepare.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/layout.hpp"
#include "gemm/packed_panels.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/packed_product.hpp"

namespace shunt {
namespace {

bool float_dtype(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

std::size_t bias_bytes(const GroupedGemmSpec& spec) {
  return spec.bias ? static_cast<std::size_t>(spec.groups * spec.n) * sizeof(float) : 0;
}

// The bias as the engine takes it: dense f32. Itself when it is that, else a copy.
const float* dense_bias(const Tensor& bias, float* to) {
  if (bias.dtype == DType::f32 && bias.contiguous()) return bias.as<const float>();
  for (std::int64_t g = 0; g < bias.shape[0]; ++g) {
    for (std::int64_t j = 0; j < bias.shape[1]; ++j) {
      to[g * bias.shape[1] + j] =
          load_f32(bias.data, bias.dtype, g * bias.strides[0] + j * bias.strides[1]);
    }
  }
  return to;
}

PanelLayout panel_layout(const GroupedGemmSpec& spec) {
  PanelLayout layout(spec.dtype, spec.n, spec.k, false);
  layout.format = resolved(spec.format);
  return layout;
}

constexpr std::initializer_list<DType> fp8_only = {DType::f8_e4m3};

void check_offsets(const GroupedGemmSpec& spec, const std::int32_t* offsets, std::int64_t rows) {
  if (offsets[0] != 0) {
    fail(Status::invalid_argument, "grouped_gemm: offsets[0] is {}: must be 0", offsets[0]);
  }
  for (int g = 0; g < spec.groups; ++g) {
    if (offsets[g + 1] < offsets[g] || offsets[g + 1] > rows) {
      fail(Status::invalid_argument,
           "grouped_gemm: offsets[{}] is {}: must be {} (the one before) to {} (the rows)", g + 1,
           offsets[g + 1], offsets[g], rows);
    }
  }
}

void check_counts(const GroupedGemmSpec& spec, const std::int32_t* counts, std::int64_t capacity) {
  for (int g = 0; g < spec.groups; ++g) {
    if (counts[g] < 0 || counts[g] > capacity) {
      fail(Status::invalid_argument,
           "grouped_gemm: counts[{}] is {}: must be 0 to {} (the capacity)", g, counts[g],
           capacity);
    }
  }
}

// Whether rows, offsets and counts are of one walk.
void check_walk(const GroupedGemmSpec& spec, const GroupedGemmInputs& in) {
  const bool apart = in.rows.rank == 3;
  if (in.offsets && in.counts) {
    fail(Status::invalid_argument,
         "grouped_gemm: counts are given beside offsets: must be one of the two, or neither");
  }
  if (apart ? static_cast<bool>(in.offsets) : static_cast<bool>(in.counts)) {
    fail(
        Status::invalid_argument,
        "grouped_gemm: {} are given for rows {}: must be rows [R, {}] with offsets, [{}, capacity, "
        "{}] with counts",
        apart ? "offsets" : "counts", in.rows.describe(), spec.k, spec.groups, spec.k);
  }
  if (!apart && !in.offsets && spec.groups != 1) {
    fail(Status::invalid_argument,
         "grouped_gemm: offsets are missing for rows {} of {} groups: without them rows must be "
         "[{}, capacity, {}]",
         in.rows.describe(), spec.groups, spec.groups, spec.k);
  }
  if (in.expected_rows < 0) {
    fail(Status::invalid_argument, "grouped_gemm: expected_rows is {}: must be 0 or more",
         in.expected_rows);
  }
}

// What says how many rows a group has; its values too, where the host can read them.
void check_sizes(const GroupedGemmSpec& spec, const GroupedGemmInputs& in, Device device) {
  const bool readable = device.type == DeviceType::cpu;
  if (in.offsets) {
    check_tensor("grouped_gemm: offsets", in.offsets,
                 {.dtypes = {DType::i32}, .shape = {spec.groups + 1}, .dense = true}, device);
    if (readable) check_offsets(spec, in.offsets.as<const std::int32_t>(), in.rows.shape[0]);
  }
  if (in.counts) {
    check_tensor("grouped_gemm: counts", in.counts,
                 {.dtypes = {DType::i32}, .shape = {spec.groups}, .dense = true}, device);
    if (readable) check_counts(spec, in.counts.as<const std::int32_t>(), in.rows.shape[1]);
  }
}

// Tensors that have a row for each of the product's, checked, as [R, ..] whatever they were.
class RowTensors {
 public:
  Tensor rows{}, row_scales{}, out{};

  RowTensors(const GroupedGemmSpec& spec, const GroupedGemmInputs& in, const Tensor& to,
             Device device)
      : groups_(spec.groups), apart_(in.rows.rank == 3), device_(device) {
    const bool rounded = static_cast<bool>(in.row_scales);
    rows = checked("grouped_gemm: rows", in.rows, rounded ? fp8_only : float_dtypes, any_size,
                   spec.k, {.rows_dense = true});
    const std::int64_t each = in.rows.shape[apart_ ? 1 : 0];
    if (rounded) row_scales = checked_scales(spec, in.row_scales, each);
    if (!rounded && spec.rows == RowFormat::fp8_token) {
      fail(Status::invalid_argument,
           "grouped_gemm: row_scales are missing: rows of fp8_token must be f8_e4m3, with them");
    }
    out = checked("grouped_gemm: out", to, float_dtypes, each, spec.n,
                  {.rows_dense = true, .written = true});
  }

 private:
  Tensor checked_scales(const GroupedGemmSpec& spec, const Tensor& scales, std::int64_t each) {
    constexpr std::string_view name = "grouped_gemm: row_scales";
    if (spec.rows == RowFormat::as_dtype || spec.rows == RowFormat::nvfp4) {
      fail(Status::invalid_argument, "{} are given: the spec's rows are not fp8", name);
    }
    if (spec.rows == RowFormat::fp8_block) {
      return checked(name, scales, {DType::f32}, each, (spec.k + 127) / 128, {});
    }
    if (apart_) {
      check_tensor(name, scales, {.dtypes = {DType::f32}, .shape = {groups_, each}}, device_);
    } else {
      check_tensor(name, scales, {.dtypes = {DType::f32}, .shape = {each}}, device_);
    }
    return flat(name, scales);
  }
  struct Strides {
    bool rows_dense = false, written = false;  // of TensorRule
  };
  // [each, width], or that for every group.
  Tensor checked(std::string_view name, const Tensor& t, std::initializer_list<DType> dtypes,
                 std::int64_t each, std::int64_t width, Strides strides) {
    TensorRule rule{.dtypes = dtypes, .rows_dense = strides.rows_dense, .written = strides.written};
    const std::initializer_list<std::int64_t> grouped = {groups_, each, width},
                                              plain = {each, width};
    rule.shape = apart_ ? grouped : plain;
    check_tensor(name, t, rule, device_);
    return flat(name, t, strides.written);
  }
  // The first two dimensions become one, where groups stand apart.
  Tensor flat(std::string_view name, Tensor t, bool written = false) const {
    if (!apart_) return t;
    const std::int64_t capacity = t.shape[1], row = t.strides[1];
    if (groups_ > 1 && capacity > 1 && t.strides[0] != capacity * row) {
      fail(Status::invalid_argument,
           "{}: stride 0 is {}: must be {} (capacity x stride 1), no gap between groups", name,
           t.strides[0], capacity * row);
    }
    if (written && groups_ > 1 && capacity == 1 && t.strides[0] < t.shape[2]) {
      fail(Status::invalid_argument, "{} has a row stride of {}: must be its width, {}, or more",
           name, t.strides[0], t.shape[2]);
    }
    t.rank -= 1;
    t.strides = {capacity > 1 ? row : t.strides[0], t.strides[2]};
    t.shape = {checked_product(name, groups_, capacity), t.shape[2]};
    return t;
  }

  std::int64_t groups_;
  bool apart_;
  Device device_;
};

}  // namespace

Support supports(const GroupedGemmSpec& spec, Device device) {
  if (spec.groups < 1) return refuse("groups is {}: must be 1 or more", spec.groups);
  if (spec.n < 0) return refuse("n is {}: must be 0 or more", spec.n);
  if (spec.k < 0) return refuse("k is {}: must be 0 or more", spec.k);
  if (!float_dtype(spec.dtype)) {
    return refuse("dtype is {}: must be f32, bf16 or f16", to_string(spec.dtype));
  }
  const bool packed = spec.format != FormatSpec{};
  if (!is_known(spec.format.format)) {
    return refuse("format is {}: must be one of shunt::Format", to_string(spec.format));
  }
  if (spec.format != spec.format.of_matrix() && spec.format.format != Format::int4) {
    return refuse("format is {}: only int4 can be ordered or have zeros", to_string(spec.format));
  }
  if (packed && spec.rows == RowFormat::as_dtype && device.type == DeviceType::cpu) {
    if (!spec.prepared) {
      return refuse("format is {}: must be plain, or prepared true", to_string(spec.format));
    }
  } else if (packed || spec.rows != RowFormat::as_dtype) {
    const bool decoded = spec.rows == RowFormat::as_dtype;
    if (device.type != DeviceType::cuda || !spec.prepared ||
        !(decoded || cuda_engine::computed(spec.format.format, spec.rows))) {
      return refuse(
          "format is {} with rows {}: must be plain with as_dtype, on the CPU prepared with "
          "as_dtype, or on a GPU prepared with as_dtype, fp8_block with fp8_block, "
          "fp8_channel or fp8_tensor with fp8_token, nvfp4 or sparse_nvfp4 with nvfp4",
          to_string(spec.format), to_string(spec.rows));
    }
    if (decoded && spec.dtype == DType::f32) {
      return refuse("dtype is f32 and format {}: must be bf16 or f16 on a GPU",
                    to_string(spec.format));
    }
    if (spec.k < 1) return refuse("k is {}: must be 1 or more", spec.k);
    if (spec.groups > 1024) return refuse("groups is {}: must be 1 to 1024", spec.groups);
    if constexpr (cuda_engine::built) {
      Support kernels = cuda_engine::packed_support(device, spec.format, spec.rows);
      if (!kernels) return kernels;
    }
  }
  if (spec.fast_accumulation) {
    const Support fast = cuda_engine::fast_accumulation_fits("", spec.rows, spec.batch_invariant);
    if (!fast) return fast;
  }
  return cuda_engine::supported_device("grouped_gemm", device);
}

namespace {
// Sizes and dtypes are legal where the CPU multiplies such plain weights.
void require_product(const GroupedGemmSpec& spec, Device device) {
  GroupedGemmSpec plain = spec;
  plain.format = {};
  plain.rows = RowFormat::as_dtype;
  plain.fast_accumulation = false;
  require_legal(supports(plain, Device{}), "grouped_gemm");
  require(supports(spec, device), "grouped_gemm");
}
}  // namespace

std::size_t grouped_gemm_workspace_bytes(const Context& context, const GroupedGemmSpec& spec,
                                         std::int64_t rows) {
  require_product(spec, context.device());
  if (rows < 0) fail(Status::invalid_argument, "grouped_gemm: rows is {}: must be >= 0", rows);
  // Sizes that overflow.
  (void)prepared_bytes(context, spec.dtype, spec.format, spec.groups, spec.n, spec.k, false,
                       spec.rows);
  (void)checked_product("grouped_gemm: rows x k", rows, std::max<std::int64_t>(spec.k, 1) * 4 + 64);
  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context) && spec.rows == RowFormat::nvfp4) {
      const bool sparse = spec.format.format == Format::sparse_nvfp4;
      return cuda_engine::Fp4Rows::at(nullptr, rows, spec.k, sparse).bytes;
    }
    if (cuda_engine::on_gpu(context) && spec.format.ordered) {
      return cuda_engine::ordered_rows_bytes(rows, spec.k);
    }
  }
  if (cuda_engine::on_gpu(context)) return 0;
  Carver carver;
  carver.take_bytes(bias_bytes(spec));
  carver.take_bytes(cpu_engine::product_workspace_bytes(context.pool(), panel_layout(spec),
                                                        spec.groups, rows, rows, spec.prepared));
  return carver.used();
}

void grouped_gemm(const Context& context, const GroupedGemmSpec& spec, const GroupedGemmInputs& in,
                  Tensor out, Workspace workspace) {
  const cuda_engine::Current current(context);
  const Device device = context.device();
  require_product(spec, device);
  check_walk(spec, in);
  const RowTensors of(spec, in, out, device);
  check_sizes(spec, in, device);
  const std::int64_t rows = of.rows.shape[0];
  if (spec.prepared) check_prepared("grouped_gemm", spec, in.prepared, context);
  if (check_given("grouped_gemm: weights", in.weights, !spec.prepared, "the spec's prepared")) {
    check_tensor("grouped_gemm: weights", in.weights,
                 {.dtypes = float_dtypes, .shape = {spec.groups, spec.n, spec.k}}, device);
  }
  if (check_given("grouped_gemm: bias", in.bias, spec.bias, "the spec's bias")) {
    check_tensor("grouped_gemm: bias", in.bias,
                 {.dtypes = float_dtypes, .shape = {spec.groups, spec.n}}, device);
  }
  Tensor prepared;
  if (spec.prepared && in.prepared) {
    prepared = bytes_at(in.prepared.data, in.prepared.bytes, device);
  }
  const NamedTensor written[] = {{"out", of.out}};
  const NamedTensor read[] = {{"rows", of.rows},       {"row_scales", of.row_scales},
                              {"offsets", in.offsets}, {"counts", in.counts},
                              {"weights", in.weights}, {"prepared weights", prepared},
                              {"bias", in.bias}};
  check_all_apart("grouped_gemm", written, read);
  const auto* const offsets = in.offsets.as<const std::int32_t>();
  const auto* const counts = in.counts.as<const std::int32_t>();
  check_workspace_apart("grouped_gemm", workspace,
                        grouped_gemm_workspace_bytes(context, spec, rows), device, written, read);

  if constexpr (cuda_engine::built) {
    if (cuda_engine::on_gpu(context) && spec.rows == RowFormat::nvfp4) {
      const int compute = context.gpu().compute;
      return cuda_engine::multiply_fp4_rows(
          context.gpu(),
          {.layout = {cuda_engine::fp4_kernel(compute), spec.format.format, spec.n, spec.k, false},
           .groups = spec.groups,
           .prepared = in.prepared.data,
           .offsets = offsets,
           .counts = counts,
           .rows = of.rows,
           .bias = in.bias,
           .out = of.out},
          workspace.data);
    }
    if (cuda_engine::on_gpu(context) && spec.rows != RowFormat::as_dtype) {
      return cuda_engine::multiply_packed(context.gpu(),
                                          {.layout = {spec.format.format, spec.n, spec.k, false},
                                           .groups = spec.groups,
                                           .prepared = in.prepared.data,
                                           .offsets = offsets,
                                           .counts = counts,
                                           .group_rows = in.expected_rows,
                                           .whole_k = spec.batch_invariant,
                                           .fast_accumulation = spec.fast_accumulation,
                                           .rows = of.rows,
                                           .row_scales = of.row_scales,
                                           .bias = in.bias,
                                           .out = of.out});
    }
    if (cuda_engine::on_gpu(context) && spec.format != FormatSpec{}) {
      return cuda_engine::multiply_fragments(
          context.gpu(),
          {.layout = {resolved(spec.format), spec.dtype, spec.n, spec.k, false},
           .groups = spec.groups,
           .prepared = in.prepared.data,
           .offsets = offsets,
           .counts = counts,
           .group_rows = in.expected_rows,
           .whole_k = spec.batch_invariant,
           .rows = of.rows,
           .bias = in.bias,
           .out = of.out},
          workspace.data);
    }
    if (cuda_engine::on_gpu(context)) {
      return cuda_engine::multiply_groups(context.gpu(),
                                          {.layout = {spec.dtype, spec.n, spec.k, false},
                                           .groups = spec.groups,
                                           .prepared = in.prepared.data,
                                           .matrices = in.weights,
                                           .offsets = offsets,
                                           .counts = counts,
                                           .group_rows = in.expected_rows,
                                           .whole_k = spec.batch_invariant,
                                           .rows = of.rows,
                                           .bias = in.bias,
                                           .out = of.out});
    }
  }
  Carver carver(workspace);
  auto* const bias = static_cast<float*>(carver.take_bytes(bias_bytes(spec)));
  cpu_engine::GroupedProduct product{.layout = panel_layout(spec),
                                     .groups = spec.groups,
                                     .walk = GroupWalk::of_rows(offsets, counts, spec.groups, rows),
                                     .rows = of.rows,
                                     .out = of.out};
  if (spec.prepared) {
    product.prepared = in.prepared.data;
  } else {
    product.matrices = in.weights;
  }
  if (spec.bias) product.bias = dense_bias(in.bias, bias);
  const std::size_t used = carver.used();
  cpu_engine::multiply_groups(context.pool(), product,
                              {static_cast<char*>(workspace.data) + used, workspace.bytes - used});
}

}  // namespace shunt
