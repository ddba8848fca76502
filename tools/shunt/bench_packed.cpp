#include "bench_packed.hpp"

#include <algorithm>
#include <random>

namespace shunt::tool {

BenchMatrix::BenchMatrix(const Context& host, const FormatSpec& format, const Tensor& plain) {
  const std::int64_t n = plain.shape[0], k = plain.shape[1];
  memory_ = host.allocate(packed_bytes(format.of_matrix(), n, k));
  matrix_ = pack(format.of_matrix(), plain, memory_);
  std::mt19937 random(1);
  if (format.ordered) {
    for (std::int32_t i = 0; i < k; ++i) group_of_.push_back(i / matrix_.format.group);
    std::shuffle(group_of_.begin(), group_of_.end(), random);
    matrix_.group_of = view(group_of_.data(), {k});
  }
  if (format.zeros) {
    zeros_.resize(static_cast<std::size_t>(matrix_.scales.elements()));
    for (std::uint8_t& zero : zeros_) zero = static_cast<std::uint8_t>(random() % 16);
    matrix_.zeros =
        view(static_cast<const void*>(zeros_.data()), DType::u8, {n, matrix_.scales.shape[1]});
  }
}

void prepare_copies(const Context& context, DType dtype, const std::vector<PackedMatrix>& all,
                    RowFormat rows, std::int64_t copies, std::vector<Buffer>& memory,
                    std::vector<PreparedWeights>& prepared) {
  const PackedMatrix& one = all.front();
  const std::size_t bytes = prepared_bytes(context, dtype, prepared_format(all),
                                           static_cast<int>(all.size()), one.n, one.k, false, rows);
  for (std::int64_t i = 0; i < copies; ++i) {
    memory.push_back(context.allocate(bytes));
    if (i == 0) {
      prepared.push_back(prepare_packed(context, dtype, all, memory.back(), rows));
      continue;
    }
    prepared.push_back(prepared.front());
    prepared.back().data = memory.back().data();
    context.copy(prepared.back().data, prepared.front().data, bytes);
  }
}

}  // namespace shunt::tool
