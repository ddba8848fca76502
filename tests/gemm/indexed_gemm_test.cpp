// The indexed GEMM: the batched GEMV of pairs.
#include "shunt/indexed_gemm.hpp"
#include "gemm/on_hopper.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>

#include "core/convert.hpp"
#include "engine.hpp"
#include "format/k_major.hpp"
#ifdef SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"
#endif

namespace shunt {
namespace {

constexpr int experts = 5;
constexpr std::int64_t n = 70, k = 144;

// Experts in the k-major layout, read and prepared.
struct Experts {
  std::vector<std::unique_ptr<KMajor>> k_major;
  Buffer memory;
  PreparedWeights prepared;
  GroupedGemmSpec spec;

  explicit Experts(const Context& context) {
    const FormatSpec format{Format::sparse_nvfp4};
    spec = {.groups = experts,
            .n = n,
            .k = k,
            .dtype = test::on_gpu() ? DType::bf16 : DType::f32,
            .format = format};
    const Context host = cpu({.threads = 1});
    std::vector<Buffer> packed;
    std::vector<PackedMatrix> matrices;
    for (int e = 0; e < experts; ++e) {
      const Packed p = Packed::of(format, normal_values(n * k, static_cast<unsigned>(e + 1)), n, k);
      k_major.push_back(std::make_unique<KMajor>(n, k));
      to_k_major(p.packed, k_major.back()->views);
      packed.push_back(host.allocate(packed_bytes(format, n, k)));
      matrices.push_back(from_k_major(k_major.back()->views, packed.back()));
    }
    memory = context.allocate(prepared_bytes(context, spec.dtype, format, experts, n, k));
    prepared = prepare_packed(context, spec.dtype, matrices, memory);
  }
};

struct Pairs {
  std::vector<float> x;
  std::vector<std::int32_t> ids;
  Pairs(std::int64_t tokens, int slots, unsigned seed)
      : x(static_cast<std::size_t>(tokens * k)), ids(static_cast<std::size_t>(tokens * slots)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : x) value = bf16_to_f32(f32_to_bf16(normal(random)));
    // Some are of other ranks, or nobody's.
    std::uniform_int_distribution<std::int32_t> any(-1, experts);
    for (std::int32_t& id : ids) id = any(random);
  }
};

void expect_products(const Experts& of, const Pairs& pairs, int slots,
                     const std::vector<float>& out) {
  for (std::size_t pair = 0; pair < pairs.ids.size(); ++pair) {
    const std::int32_t id = pairs.ids[pair];
    const float* const x = pairs.x.data() + pair / static_cast<std::size_t>(slots) * k;
    for (std::int64_t row = 0; row < n; ++row) {
      double sum = 0, size = 0;
      if (id >= 0 && id < experts) {
        of.k_major[static_cast<std::size_t>(id)]->each(row, [&](double w, std::int64_t at) {
          sum += w * static_cast<double>(x[at]);
          size += std::abs(w * static_cast<double>(x[at]));
        });
      }
      const auto got = static_cast<double>(out[pair * n + static_cast<std::size_t>(row)]);
      ASSERT_NEAR(got, sum, 1e-5 * size) << "pair " << pair << ", expert " << id << ", " << row;
    }
  }
}

TEST(IndexedGemm, IsABatchedGemvOfTheKMajorLayout) {
  const Context context = test::engine();
  const Experts of(context);
  for (const auto& [tokens, slots] :
       {std::pair<std::int64_t, int>{1, 1}, {1, 8}, {6, 3}, {40, 2}, {300, 4}}) {
    const Pairs pairs(tokens, slots, static_cast<unsigned>(tokens));
    std::vector<float> out(pairs.ids.size() * n, std::nanf(""));
    const Buffer workspace =
        context.allocate(indexed_gemm_workspace_bytes(context, of.spec, tokens, slots));
    test::Mirror mirror(context);
    indexed_gemm(context, of.spec,
                 {.rows = mirror.in(view(pairs.x.data(), {tokens, k})),
                  .ids = mirror.in(view(pairs.ids.data(), {tokens, slots})),
                  .prepared = of.prepared},
                 mirror.out(view(out.data(), {tokens * slots, n})), workspace);
    mirror.fetch();
    expect_products(of, pairs, slots, out);
  }
}

TEST(IndexedGemm, HasTheBitsOfTheGroupedGemm) {
  SHUNT_ON_CPU_ONLY();
  const Context context = test::engine();
  const std::int64_t tokens = 9, slots = 3;
  const Pairs pairs(tokens, slots, 2);
  for (const FormatSpec& format :
       {FormatSpec{}, FormatSpec{Format::nvfp4}, FormatSpec{Format::int4}}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      GroupedGemmSpec spec{.groups = experts,
                           .n = n,
                           .k = k,
                           .dtype = dtype,
                           .bias = true,
                           .format = resolved(format)};
      const std::vector<float> plain = normal_values(experts * n * k, 7),
                               bias = normal_values(experts * n, 8);
      std::vector<Tensor> matrices;
      std::vector<Packed> packed;
      std::vector<PackedMatrix> packed_views;
      for (int e = 0; e < experts; ++e) {
        const std::vector<float> one(plain.begin() + e * n * k, plain.begin() + (e + 1) * n * k);
        matrices.push_back(view(plain.data() + e * n * k, {n, k}));
        if (format == FormatSpec{}) continue;
        packed.push_back(Packed::of(format, one, n, k));
        packed_views.push_back(packed.back().packed);
      }
      const Buffer memory =
          context.allocate(prepared_bytes(context, dtype, spec.format, experts, n, k));
      const PreparedWeights prepared = format == FormatSpec{}
                                           ? prepare(context, dtype, matrices, memory)
                                           : prepare_packed(context, dtype, packed_views, memory);
      const Tensor t_bias = view(bias.data(), {experts, n});
      std::vector<float> out(pairs.ids.size() * n, std::nanf(""));
      const Buffer workspace = context.allocate(
          indexed_gemm_workspace_bytes(context, spec, tokens, static_cast<int>(slots)));
      indexed_gemm(context, spec,
                   {.rows = view(pairs.x.data(), {tokens, k}),
                    .ids = view(pairs.ids.data(), {tokens, slots}),
                    .prepared = prepared,
                    .bias = t_bias},
                   view(out.data(), {tokens * slots, n}), workspace);
      const Buffer room = context.allocate(grouped_gemm_workspace_bytes(context, spec, 1));
      for (std::size_t pair = 0; pair < pairs.ids.size(); ++pair) {
        const std::int32_t id = pairs.ids[pair];
        std::vector<float> alone(n, 0);
        if (id >= 0 && id < experts) {
          std::vector<std::int32_t> offsets(experts + 1, 0);
          std::fill(offsets.begin() + id + 1, offsets.end(), 1);
          grouped_gemm(context, spec,
                       {.rows = view(pairs.x.data() + pair / 3 * k, {1, k}),
                        .offsets = view(offsets.data(), {experts + 1}),
                        .prepared = prepared,
                        .bias = t_bias},
                       view(alone.data(), {1, n}), room);
        }
        const auto* const got = out.data() + pair * n;
        EXPECT_EQ(alone, std::vector<float>(got, got + n))
            << to_string(spec.format) << ", pair " << pair;
      }
    }
  }
}

TEST(IndexedGemm, RefusesWhatDoesNotFitByName) {
  SHUNT_ON_CPU_ONLY();
  const Context context = test::engine();
  const Experts of(context);
  const Pairs pairs(4, 2, 3);
  std::vector<float> out(8 * n);
  const Buffer workspace = context.allocate(indexed_gemm_workspace_bytes(context, of.spec, 4, 2));
  GroupedGemmSpec spec = of.spec;
  IndexedGemmInputs in;
  Tensor to;
  const auto reset = [&] {
    spec = of.spec;
    in = {.rows = view(pairs.x.data(), {4, k}),
          .ids = view(pairs.ids.data(), {4, 2}),
          .prepared = of.prepared};
    to = view(out.data(), {8, n});
  };
  Workspace room = workspace;
  const auto expect = [&](const std::string& words) {
    try {
      indexed_gemm(context, spec, in, to, room);
      ADD_FAILURE() << "not refused: " << words;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
    reset();
  };
  reset();
  indexed_gemm(context, spec, in, to, room);
  spec.prepared = false, expect("prepared is false: must be true");
  spec.rows = RowFormat::fp8_block, expect("rows is fp8_block: must be as_dtype");
  spec.groups = 3, expect("prepared weights are");
  spec.bias = true, expect("bias");
  in.rows = view(pairs.x.data(), {4, k - 1}), expect("rows");
  in.ids = view(pairs.ids.data(), {8, 1}), expect("ids");
  in.ids = view(pairs.x.data(), {4, 2}), expect("ids");
  in.ids = view(pairs.ids.data(), {4, 0}), expect("slots is 0");
  in.prepared = {}, expect("prepared weights are missing");
  to = view(out.data(), {4, n}), expect("out");
  room.bytes = 100, expect("workspace");
  room = workspace;
  to = view(pairs.x.data(), {8, n}), expect("out overlaps rows: must lie apart");
  to = view(pairs.ids.data(), DType::f32, {8, n}), expect("out overlaps ids: must lie apart");
  room.data = const_cast<void*>(static_cast<const void*>(of.prepared.data));
  expect("workspace overlaps weights: must lie apart");
  EXPECT_THROW(indexed_gemm_workspace_bytes(context, spec, -1, 2), Error);
  EXPECT_THROW(indexed_gemm_workspace_bytes(context, spec, 4, 129), Error);
  room = workspace;
  in.rows = view(pairs.x.data(), {0, k}), in.ids = view(pairs.ids.data(), {0, 2});
  to = view(out.data(), {0, n});
  indexed_gemm(context, spec, in, to, room);  // nothing to do is legal
}

#ifdef SHUNT_CUDA_BUILT
TEST(IndexedGemm, AGraphFollowsTheIds) {
  SHUNT_ON_HOPPER_ONLY();
  const test::Stream stream;
  const Context context = cuda({.stream = stream.get()});
  const Experts of(context);
  const std::int64_t tokens = 6;
  const int slots = 3;
  Pairs pairs(tokens, slots, 4);
  const auto copied = [&](const auto& values) {
    Buffer there = context.allocate(values.size() * sizeof values[0]);
    context.copy(there.data(), values.data(), there.bytes());
    return there;
  };
  const Buffer x = copied(pairs.x), ids = copied(pairs.ids);
  std::vector<float> out(pairs.ids.size() * n);
  const Buffer to = copied(out);
  const Buffer workspace =
      context.allocate(indexed_gemm_workspace_bytes(context, of.spec, tokens, slots));
  const auto enqueue = [&] {
    indexed_gemm(context, of.spec,
                 {.rows = view(x.data(), DType::f32, {tokens, k}, context.device()),
                  .ids = view(ids.data(), DType::i32, {tokens, slots}, context.device()),
                  .prepared = of.prepared},
                 view(to.data(), DType::f32, {tokens * slots, n}, context.device()), workspace);
  };
  enqueue();  // loads the kernels
  context.synchronize();
  const test::Graph graph(stream, enqueue);
  for (unsigned seed = 5; seed < 8; ++seed) {
    pairs = Pairs(tokens, slots, seed);
    context.copy(x.data(), pairs.x.data(), x.bytes());
    context.copy(ids.data(), pairs.ids.data(), ids.bytes());
    graph.replay();
    context.copy(out.data(), to.data(), to.bytes());
    expect_products(of, pairs, slots, out);
  }
}
#endif

}  // namespace
}  // namespace shunt
