// How the kernel of few pairs is cut over a GPU: all of its warps are there at once, or another
// kernel is faster.
#include "gemm/pair_stream.hpp"

#include <algorithm>
#include <cmath>

namespace shunt::cuda_engine {

PairPlan plan_pairs(int tiles, int steps, double groups_hit, int multiprocessors,
                    const PairLimits& limits) {
  constexpr int block_warps = 4;  // or more
  // As many parts as so many warps of a multiprocessor have room for.
  const auto fit = [&](int warps) {
    PairPlan plan;
    for (int parts = limits.least; parts <= std::min(limits.most_parts, steps); parts *= 2) {
      const int sets = std::max(1, block_warps / parts);
      const double blocks = std::ceil(groups_hit * ((tiles + sets - 1) / sets));
      if (blocks <= multiprocessors * (warps / (parts * sets))) plan = {parts, sets, warps};
    }
    return plan;
  };
  constexpr int few_warps = 16, longest_of_few = 16, longest_of_more = 24;
  const PairPlan few = fit(few_warps);
  if (few.parts > 0 && steps <= limits.longest * few.parts) return few;
  const PairPlan more = limits.most > few_warps ? fit(limits.most) : PairPlan{};
  if (more.parts > std::max(1, few.parts) && steps <= longest_of_more * more.parts) return more;
  return steps <= longest_of_few * few.parts ? few : PairPlan{};
}

double groups_hit(int groups, int pairs, int tokens) {
  const double of_token = static_cast<double>(pairs) / tokens;
  const double missed = std::pow(std::max(0.0, 1 - of_token / groups), tokens);
  return std::max(1.0, std::min<double>(pairs, groups * (1 - missed)));
}

}  // namespace shunt::cuda_engine
