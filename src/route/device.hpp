// What a routing kernel is given, by value: the rule, and where everything lies on the GPU.
#pragma once

#include <cstdint>

#include "route/rule.hpp"

namespace shunt::routing {

// f32, bf16 or f16 elements; null: not given.
struct DeviceVector {
  const void* data = nullptr;
  Form form = Form::f32;
};

// i32 or i64 elements.
struct DeviceIndices {
  const void* data = nullptr;
  bool wide = false;
};

// A matrix of outputs; null: not asked for.
template <class T>
struct DeviceRows {
  T* data = nullptr;
  std::int64_t stride = 0;  // elements from row to row
};

// What fast_rows.cuh is compiled for, and what of it serves a rule.
struct FastPlan {
  int lanes = 0;        // of a token; 0: the rule is not one of those
  int best = 8;         // P: 8 or 16; 24, with lanes 0: token_rows.cuh alone serves the rule
  int blocks = 1;       // of 32 experts: a power of two
  bool scored = false;  // scores and a bias are compared, not logits
  bool in_groups = false;
  bool shares = false;  // the scores are of a softmax: fast_gate.cu's alone
  // By some kernel.
  bool served() const { return lanes > 0 || best > 16; }
};

struct DeviceRoute {
  Rule rule;  // its own pointers are null
  std::int64_t tokens = 0;
  const std::int32_t* valid_tokens = nullptr;  // [1] or null
  DeviceRows<std::int32_t> ids;                // [T, S]; beside what every kernel reads first
  DeviceRows<float> weights;                   // [T, S]
  DeviceVector router_bias;                    // [C]
  DeviceVector selection_bias;                 // [E]
  DeviceVector per_expert_scale;               // [C]

  bool hashed = false;
  DeviceIndices token_ids, hash_table;
  std::int64_t token_stride = 0, hash_row_stride = 0, hash_column_stride = 0, vocabulary = 0;

  DeviceRows<const float> shared_logits;  // [T, shared_count]
  DeviceRows<float> dense;                // [T, E + shared_count]
  DeviceRows<float> logits_out;           // [T, C]
  DeviceRows<std::int16_t> replay;        // [T, k]

  // The quick selection of rows.cuh: whether the rule and the shape allow it, and how.
  bool quick = false;
  int per_lane = 1;         // N, experts of a lane
  bool grouped = false;     // lanes hold runs of experts, and a group is lanes_per_group lanes
  int lanes_per_group = 1;  // a power of two
  // What it compares is off by at most this; 0: nothing but the bits that make room for an index.
  float approximation = 0;
  // Those bits are zero in every value, so that equal keys are equal values.
  bool keys_are_exact = false;
  FastPlan fast;  // one token to a warp
  // P of plain_rows.cuh, 4 or 8; 0: the rule is not plain.
  int plain_best = 0;
};

}  // namespace shunt::routing
