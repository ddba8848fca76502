// indexed_gemm: rows times matrices that ids pick, results in the order of the rows. A batched GEMV
// of (token, expert) pairs is one, whatever format the matrices are packed in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/gemm.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

struct IndexedGemmInputs {
  Tensor rows{};  // [T, k] f32 | bf16 | f16, may be strided
  Tensor ids{};   // [T, S] i32, dense, S 1 .. 128: which matrices a row is multiplied with
  PreparedWeights prepared{};
  Tensor bias{};  // [groups, n] f32, dense; iff spec.bias
};

// Whether indexed_gemm() computes it: what grouped_gemm() does with prepared weights and
// RowFormat::as_dtype.
Support supports_indexed(const GroupedGemmSpec& spec, Device device);
// For up to `tokens` rows T with `slots` ids each.
std::size_t indexed_gemm_workspace_bytes(const Context& context, const GroupedGemmSpec& spec,
                                         std::int64_t tokens, int slots);
// out [T * S, n] f32 | bf16 | f16, rows may be strided:
//   out[t * S + s] = W[ids[t, s]] rows[t] + bias[ids[t, s]],  0 where that id is out of range
// It is order(), a grouped GEMM that reads rows where they lie, and combine(): a matrix crosses
// memory once however many rows want it, and sums have the order that grouped_gemm() gives them.
// Like those it neither allocates nor waits, and a captured graph follows the ids. Throws Error for
// bad shapes and what supports_indexed() refuses.
void indexed_gemm(const Context& context, const GroupedGemmSpec& spec, const IndexedGemmInputs& in,
                  Tensor out, Workspace workspace);

}  // namespace shunt
