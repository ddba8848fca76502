// The indexed GEMM as a benchmark calls it: its matrices, a call's tensors, and whether the result
// is right. On any device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/shapes/grid.hpp"
#include "bench_tensors.hpp"
#include "cost.hpp"
#include "shunt/gemm.hpp"

namespace shunt::tool {

// Copies of the matrices of all groups, prepared, and what those of copy 0 hold.
class IndexedMatrices {
 public:
  IndexedMatrices(const Context& context, const GroupedGemmSpec& spec, std::int64_t copies);
  const GroupedGemmSpec& spec() const { return spec_; }
  const PreparedWeights& operator[](std::int64_t copy) const {
    return prepared_[at(copy % static_cast<std::int64_t>(prepared_.size()))];
  }
  // A row [k] of a group's matrix of copy 0.
  std::vector<float> row(const Context& context, std::int64_t group, std::int64_t n) const;

 private:
  void pack_all(const Context& context, std::int64_t copies);
  void prepare_all(const Context& context, std::int64_t copies);

  GroupedGemmSpec spec_;
  std::vector<Buffer> memory_;
  std::vector<PreparedWeights> prepared_;
  Variants on_gpu_;                           // copy 0 there: [groups * n, k]
  std::shared_ptr<RandomPool> on_cpu_;        // or here
  std::vector<Tensor> plain_;                 // its matrices; or, packed,
  std::vector<std::vector<float>> unpacked_;  // [n, k] of some, which take turns
};

// The shape's product, as rows times matrices: T rows of k ids, or a row for each id.
GroupedGemmSpec indexed_spec(const bench::StageShape& shape);
struct IndexedSize {
  std::int64_t rows = 0;
  int slots = 0;
  std::int64_t pairs() const { return rows * slots; }
};
IndexedSize indexed_size(const bench::StageShape& shape);
// Matrices once, rows once, ids and results. `hit`: matrices; `used`: ids that name one.
Cost indexed_cost(const bench::StageShape& shape, std::int64_t hit, std::int64_t used);
// `tokens`: how the case begins, "T16".
std::string indexed_label(const bench::StageShape& shape, const std::string& tokens);

// On the context's device; ids [rows, slots], out [rows * slots, n].
struct IndexedCall {
  Tensor rows, ids, out;
};
// Throws what differs() does unless some results are sums in double precision over the matrices of
// copy 0 that the ids name, and 0 where they name none: of 64 pairs the first, the last and others,
// four columns each.
void check_indexed(const std::string& label, const Context& context,
                   const IndexedMatrices& matrices, const IndexedCall& call);

}  // namespace shunt::tool
