// Which kernel a router runs on a GPU, and how its work is laid out: host only, the same for the
// same arguments everywhere. A logit's bits depend on T, C and H through this alone: on `parts`
// (into which H is cut), `ranks` and the kernel, which fix the order of its sum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/runtime.hpp"

namespace shunt::routing {

enum class RouterKernel {
  any,        // router.cu: any types, alignment, columns and GPU
  few,        // router_few.cu: few tokens, or few columns of few numbers
  many,       // router_many.cu: Hopper's tensor cores
  blackwell,  // router_blackwell.cu: those of a B200
};

struct RouterPlan {
  RouterKernel kernel = RouterKernel::any;
  int rows = 64;  // tokens of a block
  // Columns of a block.
  int columns = 64;
  int parts = 1;   // blocks that share out H
  int ranks = 1;   // of those, what forms a cluster; the others meet in memory
  int stages = 0;  // any: of 64 along H that shared memory holds at once
  int pair = 1;    // many: tiles of tokens in a cluster, which share what they read of W
  // many: tiles of 64 columns, whose sums meet in memory, those of `parts / ranks` clusters, too.
  bool meets = false;
};

enum class RouterOperands {
  any,
  whole,  // x and W are of one 16-bit type and their rows begin at multiples of 16 bytes
  boxes,  // so that a tensor map can say it: strides of at least H, places below 2^31
};
// Shared memory of router.cu's blocks: of a stage, of the sums, and of all.
constexpr int any_stage_bytes(int rows, int columns) { return (rows + columns) * 64 * 2; }
constexpr int any_sum_stride(int columns) { return columns + 4; }  // f32, of a row of sums
constexpr int any_split_stride = 40;                               // f32 of a row, of 32 along H
constexpr int any_bytes(bool split, int rows, int columns, int parts, int stages) {
  const int loop =
      split ? (rows + columns) * any_split_stride * 4 : stages * any_stage_bytes(rows, columns);
  // Sums added up lie beyond those that other blocks still read.
  const int added = parts == 1 ? 0 : rows / parts;
  const int sums = (rows + added) * any_sum_stride(columns) * 4;
  return loop > sums ? loop : sums;
}
// Columns that a block of router.cu can have, and so can route by itself; of more, logits go to
// memory.
int widest_any_tile(const cuda_engine::Gpu& gpu);

// `invariant`: kernel and parts, and so the order of a sum, are the same for any T.
RouterPlan plan_router(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns, int hidden,
                       RouterOperands operands, bool invariant = false);

// Bytes of memory that the kernels need for up to so many tokens, whatever the plan.
std::size_t router_workspace_bytes(const cuda_engine::Gpu& gpu, std::int64_t tokens, int columns);

}  // namespace shunt::routing
