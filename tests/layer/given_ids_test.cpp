// Few tokens whose ids the caller gives, which for one or two the products' blocks order by
// themselves: ids that repeat, of no expert or of another rank, and tokens that are not valid,
// against the CPU engine, or, of rows in fp8, against an order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine.hpp"
#include "layer/format_cases.hpp"
#include "layer/format_limits.hpp"
#include "layer/random_layer.hpp"
#include "layer/run_layer.hpp"
#include "shunt/format.hpp"

namespace shunt {
namespace {

using testing::FormatCase;
using testing::RandomLayer;
using testing::run;
using testing::run_in_stages;
using testing::small_layer;

constexpr int experts = 16, everyones_experts = 40, slots = 4;

std::vector<FormatCase> cases() {
  std::vector<FormatCase> list = testing::format_cases();
  list.push_back({"dense3", testing::options_of(DType::bf16, {Format::dense3})});
  return list;
}

// What a call's ids are like.
enum class Ids { any, one, mapped };

struct Call {
  std::vector<std::int32_t> ids, map;
  std::vector<float> weights;
  std::int32_t valid = 0;
  LayerInputs in;

  Call(RandomLayer& made, std::int64_t tokens, Ids like, std::int32_t valid_tokens, DType dtype,
       std::mt19937& random)
      : valid(valid_tokens) {
    const auto between = [&](int low, int high) {
      return std::uniform_int_distribution<std::int32_t>(low, high)(random);
    };
    const std::int32_t one = between(0, experts - 1);
    for (std::int64_t pair = 0; pair < tokens * slots; ++pair) {
      ids.push_back(like == Ids::one   ? one
                    : like == Ids::any ? between(-2, experts + 1)
                                       : between(-1, everyones_experts));
      weights.push_back(std::uniform_real_distribution<float>(0.1F, 1)(random));
    }
    in = {.hidden = made.hidden_states(tokens, dtype),
          .residual = made.hidden_states(tokens),
          .ids = view(ids.data(), {tokens, slots}),
          .weights = view(weights.data(), {tokens, slots})};
    if (valid <= tokens) in.valid_tokens = view(&valid, {1});
    if (like != Ids::mapped) return;
    map.assign(everyones_experts, -1);
    for (std::int32_t e = 0; e < experts; ++e) {
      map[static_cast<std::size_t>((7 * e + 3) % everyones_experts)] = e;
    }
    in.expert_map = view(map.data(), {everyones_experts});
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

TEST(GivenIds, OfFewTokensGiveOnAGpuWhatTheyGiveElsewhere) {
  if (!test::on_gpu()) GTEST_SKIP() << "about a GPU";
  const Context gpu = cuda(), host = cpu({.threads = 2});
  std::mt19937 random(41);
  for (const bool weight_on_input : {false, true}) {
    const LayerSpec spec = small_layer(
        {.experts = experts, .top_k = slots, .weight_on_input = weight_on_input}, 264, 192);
    RandomLayer made(spec, 42);
    for (const FormatCase& one : cases()) {
      const Layer ours(spec, made.weights, gpu, one.options);
      const bool there = static_cast<bool>(supports(spec, one.options, host.device()));
      const Layer theirs(spec, made.weights, host,
                         there ? one.options : LayerOptions{.dtype = one.options.dtype});
      for (const std::int64_t tokens : {1, 2, 3, 5, 8}) {
        for (const Ids like : {Ids::any, Ids::one, Ids::mapped}) {
          for (const std::int64_t valid : {tokens + 1, tokens, tokens - 1, std::int64_t{-3}}) {
            SCOPED_TRACE(std::string(one.name) + (weight_on_input ? ", weighed first, " : ", ") +
                         std::to_string(tokens) + " tokens, ids " +
                         std::to_string(static_cast<int>(like)) + ", valid " +
                         std::to_string(valid));
            const Call call(made, tokens, like, static_cast<std::int32_t>(valid), one.options.dtype,
                            random);
            const std::vector<float> got = run(gpu, ours, call.in).output;
            const std::vector<float> want =
                (there ? run(host, theirs, call.in) : run_in_stages(gpu, ours, call.in)).output;
            // Sums in another order may round to the e4m3 beside, 2^-3 away.
            const double most = there ? 1e-4 : 9e-4;
            if (valid > 0) {
              ASSERT_LT(test::relative_power(got, want), most);
            }
            const std::int64_t zeros = std::clamp<std::int64_t>(valid, 0, tokens) * spec.hidden;
            for (auto i = static_cast<std::size_t>(zeros); i < got.size(); ++i) {
              ASSERT_EQ(got[i], 0) << "number " << i;
            }
            ASSERT_EQ(run(gpu, ours, call.in).output, got) << "again";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shunt
