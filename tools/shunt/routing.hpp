// Synthetic routing for benchmarks: which experts tokens go to, and hidden states that make a
// router choose just these.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/route.hpp"

namespace shunt::tool {

enum class Spread {
  uniform,
  skewed,   // popularity exp(0.6 z), z normal: of 128 experts the busiest has some four times the
            // mean
  zipf,     // the expert of rank r with probability ~ 1 / r
  one_hot,  // every token to the same k experts
};
const char* to_string(Spread spread);
// Throws Error{invalid_argument} for another name.
Spread spread_from_string(const std::string& name);

// Draws one run after another. Where a run hits at most half of the experts, they are renamed to
// those whose last use is longest ago (within the groups of a grouped rule): the draw keeps its
// shape, and no run finds its weights in a cache for the sake of the run before.
class RoutingSource {
 public:
  RoutingSource(const RouteSpec& spec, Spread spread, std::uint64_t seed);
  // ids [tokens, top_k], different within a row.
  std::vector<std::int32_t> next(std::int64_t tokens);

 private:
  std::vector<std::int32_t> draw(std::int64_t tokens);
  void rename_to_least_recent(std::vector<std::int32_t>& ids);

  int experts_, top_k_, groups_, keep_;
  Spread spread_;
  std::mt19937_64 random_;
  std::vector<double> cumulative_;        // of expert weights
  std::vector<double> group_cumulative_;  // of group weights
  std::vector<std::int64_t> last_use_;
  std::int64_t run_ = 0;
};

// Experts below `experts` that occur in ids.
std::int64_t distinct_experts(const std::vector<std::int32_t>& ids, std::int64_t experts);

// Rows of length 1 in random directions, as a router's weights [experts, hidden].
std::vector<float> unit_rows(std::int64_t experts, std::int64_t hidden, std::uint64_t seed);
// hidden states [tokens, hidden] into `out` (f32 | bf16 | f16): each the sum of its experts' router
// rows, weighted a little less from slot to slot, so that the k best logits are its ids in order.
void states_for(const Context& context, const std::vector<float>& router,
                const std::vector<std::int32_t>& ids, std::int64_t top_k, Tensor out);
// logits [tokens, columns] into `out` (f32 | bf16 | f16, on the host): its ids are the k best of a
// row, in order.
void logits_for(const Context& context, const std::vector<std::int32_t>& ids, std::int64_t top_k,
                Tensor out);

// A buffer of random numbers of magnitude 1/64 to 1/8, cheap to make by the gigabyte.
class RandomPool {
 public:
  RandomPool(const Context& context, DType dtype, std::int64_t elements, std::uint64_t seed = 1);
  // A dense view, each at another place of the pool; views overlap once the pool is used up.
  Tensor take(std::int64_t rows, std::int64_t columns);
  Tensor take(std::int64_t elements);

 private:
  const char* advance(std::int64_t elements);
  DType dtype_;
  Buffer buffer_;
  std::int64_t elements_;
  std::int64_t next_ = 0;
};

}  // namespace shunt::tool
