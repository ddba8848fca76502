// Which kernel a grouped GEMM of packed weights takes on a GPU, and in what tiles: a pure function
// of sizes and of what the GPU can do, as product_plan.hpp for plain ones.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "gemm/product_plan.hpp"

namespace shunt::cuda_engine {

struct PackedSizes {
  int groups = 0;
  std::int64_t rows = 0;        // of all groups, at most
  std::int64_t expected = 0;    // of them; 0: all
  std::int64_t group_rows = 0;  // of weights: rows of the layout
  std::int64_t k = 0;
  double bits = 8;            // a weight, with scales
  bool packed_rows = false;   // are fp8 already; few_rows can round others on the way
  bool rows_in_place = true;  // in groups one after the other, for bulk copies
  bool whole_k = false;       // k is not shared out: a row's bits do not depend on the batch
  bool same_sums = false;     // in all kernels, to the bit, unless k is shared out
  bool packed_out = false;    // out is to be fp8, which few_rows does not write
  bool sparse = false;        // two of four kept: half the products
  int tile_before = 0;        // rows of a tile of the product before it in a layer; 0: none
  bool looked_up = false;     // numbers in shared memory, dense3's: more instructions a weight
};

struct PackedPlan {
  enum Kernel { none, few_rows, many_rows, portable };
  Kernel kernel = none;
  int tile_tokens = 0;  // rows of a tile, a cluster's
  int split = 1;        // few_rows: of k, over the blocks of a cluster
  int blocks = 0;       // of the grid
  double us = 0;        // predicted
};

class PackedPlans {
 public:
  void add(const PackedPlan& plan) { plans_[count_++] = plan; }
  const PackedPlan* begin() const { return plans_.data(); }
  const PackedPlan* end() const { return plans_.data() + count_; }
  std::size_t size() const { return count_; }

 private:
  std::array<PackedPlan, 16> plans_;
  std::size_t count_ = 0;
};

// Every plan that can compute it, in a fixed order; none: this GPU cannot.
PackedPlans candidates(const PackedSizes& sizes, const GpuFigures& gpu);
// The fastest of them; its kernel is `none` where there is none.
PackedPlan plan_packed(const PackedSizes& sizes, const GpuFigures& gpu);
std::string describe(const PackedPlan& plan);

}  // namespace shunt::cuda_engine
