#include "bench_packed.hpp"

#include <algorithm>
#include <random>

namespace shunt::tool {

BenchMatrix::BenchMatrix(const Context& host, FormatSpec format, const Tensor& plain) {
  const std::int64_t n = plain.shape[0], k = plain.shape[1];
  const bool ordered = format.ordered;
  format.ordered = false;
  memory_ = host.allocate(packed_bytes(format, n, k));
  matrix_ = pack(format, plain, memory_);
  if (!ordered) return;
  for (std::int32_t i = 0; i < k; ++i) group_of_.push_back(i / matrix_.format.group);
  std::mt19937 random(1);
  std::shuffle(group_of_.begin(), group_of_.end(), random);
  matrix_.group_of = view(group_of_.data(), {k});
}

}  // namespace shunt::tool
