// The grouped GEMM of the CPU engine.
//
// A task is (block of rows of one group, panel): the block's rows times the panel, in stretches of
// k whose part of the panel stays in the L2, then the epilogue. Tasks are numbered panel by panel
// within a block, so that a thread's next task reads the memory that follows; threads share them
// out as Team::for_each does. Every sum runs over k from first to last in one chain, so its bits
// depend on nothing but its own row and weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activate/kernels.hpp"
#include "cpu/form.hpp"
#include "cpu/pool.hpp"
#include "gemm/group_walk.hpp"
#include "gemm/kernels.hpp"
#include "gemm/layout.hpp"
#include "shunt/gemm.hpp"

namespace shunt::cpu_engine {

const GemmKernels& gemm_kernels(Isa isa);

struct GroupedProduct {
  PanelLayout layout;
  int groups = 0;
  const void* prepared = nullptr;  // null: `matrices`
  Tensor matrices{};               // [groups, n, k], any strides
  GroupWalk walk;

  Tensor rows{};                              // [T, k], rows may be strided
  const std::int32_t* permutation = nullptr;  // row r reads rows[permutation[r] / slots]
  int slots = 1;
  const float* row_scale = nullptr;  // times row_scale[r]

  const float* bias = nullptr;  // [groups, n]
  ActivationRule activation{.kind = ActivationRule::identity, .gated = false};
  Tensor out{};  // [R, out columns], rows may be strided
};

// How a product is computed; a function of sizes and the instruction set alone.
struct ProductPlan {
  Form operand = Form::f32;     // how rows stand in memory when they are multiplied
  bool dot = false;             // pairs of k by vdpbf16ps
  std::size_t fixed = 0;        // rows in blocks of so many 16-bit integers: fixed_rows.hpp
  RowTiles tiles;               // what puts many rows beside each other; none: `from` is 0
  bool widen = false;           // large blocks: weights become f32 a stretch at a time
  std::int64_t stretch = 0;     // of k
  std::int64_t block_rows = 0;  // at most
};
ProductPlan plan_product(Isa isa, const PanelLayout& layout, std::int64_t rows);

// Enough for any product of up to `rows` rows. `source_rows`: of the input, when they are fewer,
// read through a permutation and not scaled.
std::size_t product_workspace_bytes(const Pool& pool, const PanelLayout& layout, int groups,
                                    std::int64_t rows, std::int64_t source_rows, bool prepared);
// Arguments are checked by the caller. Allocates nothing.
void multiply_groups(Pool& pool, const GroupedProduct& product, Workspace workspace);

}  // namespace shunt::cpu_engine
