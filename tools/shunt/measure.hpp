// Timing one case against ceilings that are measured around it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "cost.hpp"
#include "report.hpp"
#include "shunt/context.hpp"

namespace shunt::tool {

struct Case {
  std::string op;
  std::string label;
  DType dtype = DType::f32;
  // Variant i reads other weights or rows than variant i - 1; after the last comes the first.
  std::int64_t variants = 1;
  std::function<void(std::int64_t)> call;
  std::function<Cost(std::int64_t)> cost;
};

// Runs the case for about `seconds`, in blocks. Before and after each block the read bandwidth and
// the peak are measured; every sample is divided into the floor of its own block, and the share is
// the median of these ratios: on a shared machine, figures of another moment do not compare.
// `ceilings` gets what was measured last.
Row measure(const Context& context, const Case& what, double seconds, Ceilings& ceilings);

double median(std::vector<double> values);

}  // namespace shunt::tool
