// Few pairs as each block of the experts' products orders them on a GPU, on the host lane by lane:
// the offsets, permutation and inverse that order() gives.
// clang-format off
#include "cuda/warp_on_host.hpp"

inline struct { unsigned x = 0; } blockIdx;
template <class T>
T __ldcg(const T* from) { return *from; }

#include "gemm/few_walk.cuh"
// clang-format on

#include <gtest/gtest.h>

#include <random>

#include "shunt/shunt.hpp"

namespace shunt::test {
namespace {

struct Args {
  GroupWalk walk;
  int groups = 0;
  const std::int32_t* permutation = nullptr;
};

struct Ordered {
  std::vector<std::int32_t> offsets, permutation, inverse;
  bool operator==(const Ordered&) const = default;
};

Ordered expected(const std::vector<std::int32_t>& given, int groups) {
  std::vector<std::int32_t> ids = given;
  const auto pairs = static_cast<std::int64_t>(ids.size());
  Ordered o{.offsets = std::vector<std::int32_t>(static_cast<std::size_t>(groups) + 1),
            .permutation = std::vector<std::int32_t>(ids.size(), -1),
            .inverse = std::vector<std::int32_t>(ids.size(), -7)};
  const Context context = cpu({.threads = 1});
  const OrderSpec spec{.experts = groups + 3, .slots = 1, .local_experts = groups};
  const Buffer workspace = context.allocate(order_workspace_bytes(context, spec, pairs));
  order(context, spec, {.ids = view(ids.data(), {pairs, 1})},
        {.offsets = view(o.offsets.data(), {groups + 1}),
         .permutation = view(o.permutation.data(), {pairs}),
         .inverse = view(o.inverse.data(), {pairs, 1})},
        workspace);
  o.permutation.resize(static_cast<std::size_t>(o.offsets.back()));
  return o;
}

Ordered found(const std::vector<std::int32_t>& ids, int groups, bool permuted, bool first) {
  constexpr int warps = 3;
  std::vector<std::int32_t> memory(
      static_cast<std::size_t>(cuda_engine::FewWalk::bytes(groups)) / 4, -9);
  Ordered o{.inverse = std::vector<std::int32_t>(ids.size(), -7)};
  const std::int32_t any = 0;
  const Args args{.walk = {.offsets = &any, .rows = static_cast<std::int64_t>(ids.size())},
                  .groups = groups,
                  .permutation = permuted ? &any : nullptr};
  std::vector<float> weights;
  for (std::size_t pair = 0; pair < ids.size(); ++pair) {
    weights.push_back(0.5F + static_cast<float>(pair));
  }
  const cuda_engine::FewChain chain{.ids = ids.data(),
                                    .weights = weights.data(),
                                    .pairs = static_cast<int>(ids.size()),
                                    .inverse = o.inverse.data()};
  blockIdx.x = first ? 0 : 5;
  HostWarp::run_block(warps, [&](int warp, int lane) {
    const auto walk = cuda_engine::FewWalk::of<cuda_engine::FewForm::any>(
        args, nullptr, chain, memory.data(), 32 * warp + lane, 32 * warps);
    if (warp != warps - 1 || lane != 7) return;
    o.offsets.assign(walk.groups.offsets, walk.groups.offsets + groups + 1);
    if (walk.permutation != nullptr) {
      o.permutation.assign(walk.permutation, walk.permutation + o.offsets.back());
      for (std::size_t row = 0; row < o.permutation.size(); ++row) {
        EXPECT_EQ(walk.weights[row], weights[static_cast<std::size_t>(o.permutation[row])]);
      }
    }
  });
  return o;
}

TEST(FewWalk, OrdersAsOrderDoes) {
  std::mt19937 random(5);
  for (const int groups : {1, 2, 31, 32, 128, 511, 512}) {
    for (const std::size_t pairs : {1, 2, 8, 31, 32}) {
      std::vector<std::int32_t> ids(pairs);
      for (std::int32_t& id : ids) {  // some of none, few of many, so that they meet
        id = static_cast<std::int32_t>(random() % static_cast<unsigned>(groups + 3));
        if (id >= groups + 2) id = -1;
        if (random() % 3 == 0) id = ids[0];
      }
      const Ordered want = expected(ids, groups);
      EXPECT_EQ(found(ids, groups, true, true), want) << groups << " groups, " << pairs << " pairs";
      const Ordered other = found(ids, groups, false, false);
      EXPECT_EQ(other.offsets, want.offsets);
      EXPECT_TRUE(other.permutation.empty());
      EXPECT_EQ(other.inverse, std::vector<std::int32_t>(pairs, -7));  // the first block's
    }
  }
}

}  // namespace
}  // namespace shunt::test
