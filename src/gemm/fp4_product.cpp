#include "gemm/fp4_product.hpp"

#include "core/check.hpp"
#include "core/workspace.hpp"
#include "format/codes.hpp"
#include "gemm/cuda_engine.hpp"

#ifndef SHUNT_BUILT_FOR_SM_100A
#define SHUNT_BUILT_FOR_SM_100A 0
#endif
#ifndef SHUNT_BUILT_FOR_SM_120A
#define SHUNT_BUILT_FOR_SM_120A 0
#endif

namespace shunt::cuda_engine {

namespace {

// What both kernels' products are given in the same words.
template <class Layout>
Fp4ProductOf<Layout> product_of(const Layout& layout, const Fp4RowProduct& p, const Fp4Rows& rows) {
  Fp4ProductOf<Layout> product{.layout = layout,
                               .groups = p.groups,
                               .prepared = static_cast<const char*>(p.prepared),
                               .offsets = p.offsets,
                               .counts = p.counts,
                               .rows = p.out.shape[0],
                               .codes = rows.codes,
                               .code_stride = rows.code_stride,
                               .scales = rows.scales,
                               .scale_stride = rows.scale_stride,
                               .row_scales = rows.row_scales,
                               .activation = p.activation,
                               .out = p.out.data,
                               .out_dtype = p.out.dtype,
                               .out_stride = p.out.strides[0]};
  if (p.bias) {
    product.bias = p.bias.data;
    product.bias_dtype = p.bias.dtype;
    product.bias_group_stride = p.bias.strides[0];
    product.bias_stride = p.bias.strides[1];
  }
  return product;
}

}  // namespace

Support fp4_support(int compute, Format format) {
  if (fp4_kernel(compute) == Fp4Kernel::none) {
    return refuse("rows in nvfp4 have no kernel on compute capability {}.{}: must be 10.0 or 12.0",
                  compute / 10, compute % 10);
  }
  if (format != Format::nvfp4 && format != Format::sparse_nvfp4) {
    return refuse("format is {} and rows nvfp4: must be nvfp4 or sparse_nvfp4",
                  to_string(FormatSpec{format}));
  }
  return {};
}

bool fp4_built(int compute) {
  return fp4_kernel(compute) == Fp4Kernel::tiles ? SHUNT_BUILT_FOR_SM_100A != 0
                                                 : SHUNT_BUILT_FOR_SM_120A != 0;
}

Fp4Weights fp4_weights(int compute, const PreparedWeights& w) {
  return {fp4_kernel(compute), w.format.format, w.n, w.k, w.paired};
}

void lay_out(const Fp4Weights& layout, const PackedMatrix& gate, const PackedMatrix* up, char* to) {
  if (layout.kernel == Fp4Kernel::fragments) {
    lay_out_fp4(layout.fragments(), gate, up, to);
  } else {
    lay_out_fp4_tiles(layout.tiles(), gate, up, to);
  }
}

void read_row(const Fp4Weights& layout, const char* from, std::int64_t row, double* to) {
  if (layout.kernel == Fp4Kernel::fragments) {
    read_fp4_row(layout.fragments(), from, row, to);
  } else {
    read_fp4_tiles_row(layout.tiles(), from, row, to);
  }
}

void write_fp4(const char* what, const Context& context, const Fp4Weights& layout,
               const std::vector<PackedMatrix>& gate, const std::vector<PackedMatrix>* up,
               void* to) {
  if (layout.sparse()) {
    for (const auto* const list : {&gate, up}) {
      if (list == nullptr) continue;
      for (const PackedMatrix& matrix : *list) require(fp4_pairs_support(matrix), what);
    }
  }
  const auto bytes = static_cast<std::size_t>(layout.group_bytes());
  std::vector<char> group(bytes);
  for (std::size_t g = 0; g < gate.size(); ++g) {
    lay_out(layout, gate[g], up != nullptr ? &(*up)[g] : nullptr, group.data());
    context.copy(static_cast<char*>(to) + g * bytes, group.data(), bytes);
  }
}

void read_fp4(const Context& context, const Fp4Weights& layout, const void* from,
              const Tensor& out) {
  const auto row_of = [&](const char* group, std::int64_t row, double* values) {
    read_row(layout, group, row, values);
  };
  read_decoded(context, from, layout.group_bytes(), row_of, out);
}

Fp4Rows Fp4Rows::at(void* memory, std::int64_t rows, std::int64_t k, bool sparse) {
  const std::int64_t scaled = sparse ? 32 : 16;
  Fp4Rows to{.code_stride = (k + 31) / 32 * 16,
             .scale_stride = (k + scaled * 4 - 1) / (scaled * 4) * 4};
  Carver carver(Workspace{memory, 0});
  to.codes = carver.take<std::uint8_t>(rows * to.code_stride);
  to.scales = carver.take<std::uint8_t>(rows * to.scale_stride);
  to.row_scales = carver.take<float>(rows);
  to.bytes = carver.used();
  return to;
}

void multiply_fp4_rows(const Gpu& gpu, const Fp4RowProduct& p, void* memory) {
  if (p.out.elements() == 0) return;
  require(fp4_support(gpu.compute, p.layout.format), "grouped_gemm");
  const Fp4Rows rows = Fp4Rows::at(memory, p.out.shape[0], p.layout.k, p.layout.sparse());
  round_rows_to_fp4(gpu, p, rows);
  const bool done = p.layout.kernel == Fp4Kernel::fragments
                        ? multiply_fp4(gpu, product_of(p.layout.fragments(), p, rows))
                        : multiply_fp4_tiles(gpu, product_of(p.layout.tiles(), p, rows));
  if (!done) {
    fail(Status::unsupported,
         "grouped_gemm: {} rows in nvfp4 by {} matrices [{}, {}] have no kernel on this GPU: it "
         "must be of compute capability 10.0 or 12.0, and the library built for it",
         p.out.shape[0], p.groups, p.layout.n, p.layout.k);
  }
}

}  // namespace shunt::cuda_engine
