// A matrix as `shunt bench` packs it.
#pragma once

#include <cstdint>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/format.hpp"
#include "shunt/gemm.hpp"

namespace shunt::tool {

// Stays whole where it is moved. Of an ordered format k's groups are shuffled, the same for every
// matrix of that k, as gate and up of an expert have them; of one with zeros, zero points are
// random.
class BenchMatrix {
 public:
  BenchMatrix(const Context& host, const FormatSpec& format, const Tensor& plain);
  const PackedMatrix& matrix() const { return matrix_; }

 private:
  Buffer memory_;
  std::vector<std::int32_t> group_of_;
  std::vector<std::uint8_t> zeros_;
  PackedMatrix matrix_;
};

// So many of the same prepared weights, each in memory of its own: laid out once and copied, which
// takes a fraction of that time.
void prepare_copies(const Context& context, DType dtype, const std::vector<PackedMatrix>& all,
                    RowFormat rows, std::int64_t copies, std::vector<Buffer>& memory,
                    std::vector<PreparedWeights>& prepared);

}  // namespace shunt::tool
