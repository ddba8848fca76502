// Rows in NVFP4 through the public operation, on whichever GPU is here: Blackwell's products
// against the reference, and the refusal by name of any other.
#include <gtest/gtest.h>

#if SHUNT_CUDA_BUILT

#include <string>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "core/convert.hpp"
#include "engine.hpp"
#include "format/pairs.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/reference.hpp"
#include "shunt/gemm.hpp"

namespace shunt::cuda_engine {
namespace {

using test::Array;

// Weights of all groups, as the format has them and as numbers.
struct Weights {
  std::vector<Buffer> memory;
  std::vector<PackedMatrix> packed;
  Array exact;
  Weights(Format format, int groups, std::int64_t n, std::int64_t k)
      : exact(DType::f32, {groups, n, k}) {
    for (int g = 0; g < groups; ++g) {
      Array plain = test::random_array(DType::f32, {n, k}, 10 + static_cast<unsigned>(g));
      memory.push_back(cpu({.threads = 1}).allocate(packed_bytes({format}, n, k)));
      packed.push_back(
          format == Format::sparse_nvfp4
              ? pack_in_pairs(format, plain.tensor.as<const float>(), n, k, memory.back())
              : pack({format}, plain.tensor, memory.back()));
      unpack(packed.back(), exact.tensor[g]);
    }
  }
};

void check(const Context& context, Format format, std::int64_t n, std::int64_t k, DType dtype,
           bool masked, bool bias) {
  SCOPED_TRACE(to_string(FormatSpec{format}) + " n " + std::to_string(n) + " k " +
               std::to_string(k) + " " + to_string(dtype) + (masked ? " masked" : " ragged") +
               (bias ? " bias" : ""));
  constexpr int groups = 4;
  const std::int64_t capacity = 130;
  std::vector<std::int32_t> counts = {3, 0, 130, 65}, offsets = {0, 3, 3, 133, 198};
  const std::int64_t rows = masked ? groups * capacity : offsets.back();
  const Weights weights(format, groups, n, k);
  const GroupedGemmSpec spec{.groups = groups,
                             .n = n,
                             .k = k,
                             .dtype = dtype,
                             .bias = bias,
                             .format = {format},
                             .rows = RowFormat::nvfp4};
  const Buffer memory = context.allocate(
      prepared_bytes(context, dtype, {format}, groups, n, k, false, RowFormat::nvfp4));
  const PreparedWeights prepared =
      prepare_packed(context, dtype, weights.packed, memory, RowFormat::nvfp4);
  Array x = masked ? test::random_array(dtype, {groups, capacity, k}, 5)
                   : test::random_array(dtype, {rows, k}, 5);
  Array added = test::random_array(DType::bf16, {groups, n}, 6);
  Array out = masked ? Array(DType::f32, {groups, capacity, n}) : Array(DType::f32, {rows, n});
  GroupedGemmInputs in{.rows = x.tensor, .weights = weights.exact.tensor};
  if (bias) in.bias = added.tensor;
  if (masked) {
    in.counts = view(counts.data(), {groups});
  } else {
    in.offsets = view(offsets.data(), {groups + 1});
  }
  std::vector<double> size;
  const std::vector<double> expected = grouped_gemm_reference(spec, in, &size);
  test::Mirror mirror(context);
  for (Tensor* const tensor : {&in.rows, &in.bias, &in.counts, &in.offsets}) {
    *tensor = mirror.in(*tensor);
  }
  in.weights = {};
  in.prepared = prepared;
  const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, spec, rows));
  grouped_gemm(context, spec, in, mirror.out(out.tensor), workspace);
  mirror.fetch();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(out.get(static_cast<std::int64_t>(i))), expected[i],
                size[i] * 0x1p-16)
        << i;
  }
}

TEST(Fp4Gemm, IsWhatTheReferenceSays) {
  if (!test::on_gpu()) GTEST_SKIP() << "about GPUs";
  const Context context = cuda();
  if (fp4_kernel(context.gpu().compute) == Fp4Kernel::none) {
    GTEST_SKIP() << "about Blackwell's kernels";
  }
  for (const Format format : {Format::nvfp4, Format::sparse_nvfp4}) {
    check(context, format, 256, 512, DType::bf16, false, false);
    check(context, format, 200, 264, DType::f16, false, true);
    check(context, format, 37, 209, DType::f32, true, true);
    check(context, format, 16, 1, DType::bf16, true, false);
  }
}

TEST(Fp4Gemm, OtherGpusRefuseByName) {
  if (!test::on_gpu()) GTEST_SKIP() << "about GPUs";
  const Context context = cuda();
  if (fp4_kernel(context.gpu().compute) != Fp4Kernel::none) GTEST_SKIP() << "not about Blackwell";
  const Weights weights(Format::nvfp4, 1, 16, 64);
  const std::string message = test::error_of([&] {
    const Buffer memory = context.allocate(1 << 16);
    prepare_packed(context, DType::bf16, weights.packed, memory, RowFormat::nvfp4);
  });
  EXPECT_NE(message.find("rows in nvfp4 have no kernel"), std::string::npos) << message;
  const GroupedGemmSpec spec{.groups = 1,
                             .n = 16,
                             .k = 64,
                             .dtype = DType::bf16,
                             .format = {Format::nvfp4},
                             .rows = RowFormat::nvfp4};
  EXPECT_NE(test::error_of([&] {
              grouped_gemm_workspace_bytes(context, spec, 8);
            }).find("must be 10.0 or 12.0"),
            std::string::npos);
}

}  // namespace
}  // namespace shunt::cuda_engine

#endif
