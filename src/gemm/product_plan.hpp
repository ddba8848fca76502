// Which kernel a grouped GEMM takes on a GPU, and in what tiles: a pure function of sizes and of
// what the GPU can do. Candidates and their predicted times can be asked for; nothing is tuned.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// What a plan needs to know of a GPU.
struct GpuFigures {
  int compute = 0;  // 90 for 9.0
  int multiprocessors = 0;
  int shared_bytes = 0;  // that a block may ask for
  int largest_cluster = 1;
  double read_gbps = 0;  // of memory, by its clock and width
  double clock_ghz = 0;
};

struct ProductSizes {
  DType dtype = DType::f32;  // of weights and sums' inputs
  int groups = 0;
  std::int64_t rows = 0;        // of all groups, at most
  std::int64_t expected = 0;    // of them; 0: all
  std::int64_t group_rows = 0;  // of weights: rows of the layout
  std::int64_t k = 0;
  // Rows that lie in groups one after the other, of `dtype`: else they are gathered.
  bool gathered = false;
  // Rows and weights can be read in whole pieces of 16 bytes, in the type that they are stored in.
  bool in_place = true;
  // Each row is weighed: its sums are, by few_rows and by the portable kernel.
  bool weighed = false;
  // Not to be shared out along k, so that a row's bits are the same for any number of rows.
  bool whole_k = false;
  // Of few_rows, where the product before it in a layer is that kernel: rows of its tile; else 0.
  int few_before = 0;
  // Results would be the layer's outputs, which many_rows writes at once; else a pass moves them.
  bool placed = false;
};

struct ProductPlan {
  enum Kernel { portable, few_rows, many_rows, blackwell };
  Kernel kernel = portable;
  int tile_tokens = 64;  // rows of a tile
  int tile_rows = 64;    // rows of weights of a tile, a block's
  int split = 1;         // few_rows: of k, over the blocks of a cluster
  int blocks = 0;        // of the grid; 0: grouped_cuda.cu, which sees to it
  double us = 0;         // predicted
};

// A list without memory of its own: plans are made on the hot path.
class ProductPlans {
 public:
  void add(const ProductPlan& plan) { plans_[count_++] = plan; }
  const ProductPlan* begin() const { return plans_.data(); }
  const ProductPlan* end() const { return plans_.data() + count_; }
  std::size_t size() const { return count_; }

 private:
  std::array<ProductPlan, 24> plans_;
  std::size_t count_ = 0;
};

// The fastest of candidates().
ProductPlan plan_product(const ProductSizes& sizes, const GpuFigures& gpu);
// Whether rows of 16 bits that a permutation picks are predicted to be multiplied sooner with a
// pass that gathers them, and weighs them, than by kernels that gather them on the way.
bool gather_first(ProductSizes sizes, const GpuFigures& gpu);
// Every plan that can compute it, in a fixed order; last the fastest of portable_candidates().
ProductPlans candidates(const ProductSizes& sizes, const GpuFigures& gpu);
// Of what any GPU since compute capability 8.0 runs: the tiles of mma_rows.cu, or grouped_cuda.cu
// (no blocks), which takes what they do not.
ProductPlans portable_candidates(const ProductSizes& sizes, const GpuFigures& gpu);
// "wgmma, tiles of 128 weights x 16 rows, k over 4 blocks, 132 blocks, 12.3 us predicted"
std::string describe(const ProductPlan& plan);

}  // namespace shunt::cuda_engine
