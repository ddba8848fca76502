// What the engines of order and gather work on: plain pointers, checked by order() and gather().
#pragma once

#include <cstddef>
#include <cstdint>

#include "shunt/order.hpp"

namespace shunt {

struct OrderCall {
  std::int64_t tokens = 0;
  int slots = 0;
  int experts = 0;
  int locals = 0;
  int first_expert = 0;
  int tile = 0;
  std::int32_t sentinel = 0;  // never -1: resolved
  bool tile_for_empty_expert = true;
  std::int64_t capacity = 0;  // rows of the padded arrays

  const std::int32_t* ids = nullptr;
  const float* weights = nullptr;
  const std::int32_t* expert_map = nullptr;
  const std::int32_t* valid_tokens = nullptr;

  // null: not asked for
  std::int32_t* offsets = nullptr;
  std::int32_t* permutation = nullptr;
  std::int32_t* inverse = nullptr;
  float* row_weights = nullptr;
  std::int32_t* sorted_token_ids = nullptr;
  float* sorted_weights = nullptr;
  std::int32_t* sorted_expert_ids = nullptr;
  std::int32_t* num_tokens_post_padded = nullptr;
  std::int32_t* num_sorted_tiles = nullptr;
  std::int32_t* padded_inverse = nullptr;
  std::byte* zeroed = nullptr;
  std::size_t zeroed_bytes = 0;

  // Index among the local experts, or -1.
  std::int32_t local(std::int32_t id) const {
    if (expert_map != nullptr) {
      return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(experts) ? expert_map[id]
                                                                                  : -1;
    }
    const std::uint32_t shifted =
        static_cast<std::uint32_t>(id) - static_cast<std::uint32_t>(first_expert);
    return shifted < static_cast<std::uint32_t>(locals) ? static_cast<std::int32_t>(shifted) : -1;
  }
};

// Throws invalid_argument for a spec that means nothing, unsupported for one without an engine.
void check_spec(const OrderSpec& spec, Device device);

// What order() is asked for, checked. Throws Error as order() does.
OrderCall checked_order(const Context& context, const OrderSpec& spec, const OrderInputs& in,
                        const OrderOutputs& out, Workspace workspace);

std::size_t order_cpu_workspace_bytes(int threads, int locals);
void order_cpu(const Context& context, const OrderCall& call, Workspace workspace);

// No workspace.
void order_cuda(const Context& context, const OrderCall& call);

void gather_cpu(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                const Tensor& rows, const Tensor& scales, std::int64_t count);
void gather_cuda(const Context& context, const GatherSpec& spec, const GatherInputs& in,
                 const Tensor& rows, const Tensor& scales);
// Every token's row in its own order, quantised as gather() does; of tokens at or past `valid` ([1]
// i32, or absent) none.
void quantise_rows_cuda(const Context& context, Quantise quantise, const Tensor& hidden,
                        const Tensor& valid, const Tensor& rows, const Tensor& scales);

}  // namespace shunt
