// The CUDA engine of route, for its own files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/runtime.hpp"
#include "order/engine.hpp"
#include "route/device.hpp"
#include "route/engine.hpp"
#include "route/router_plan.hpp"

namespace shunt::routing {

// N for which rows.cuh is compiled: experts that a lane holds in the quick selection.
inline constexpr int per_lane_choices[] = {1, 2, 4, 5, 8, 12, 16, 32};

// Calls body.operator()<N>() for N = per_lane.
template <class Body>
void with_per_lane(int per_lane, Body&& body) {
  switch (per_lane) {
    case 2:
      return body.template operator()<2>();
    case 4:
      return body.template operator()<4>();
    case 5:
      return body.template operator()<5>();
    case 8:
      return body.template operator()<8>();
    case 12:
      return body.template operator()<12>();
    case 16:
      return body.template operator()<16>();
    case 32:
      return body.template operator()<32>();
    default:
      return body.template operator()<1>();
  }
}

// What kernels need of a call; whether selection may be quick, and how.
DeviceRoute device_route(const RouteCall& call);

// Lays the quick selection out for lanes of `per_lane` experts; where groups do not fit, selection
// is exact.
void fit_per_lane(DeviceRoute& r, int per_lane);

// The rule of most that have no bias: a softmax of the selected and nothing else. Kernels that
// are compiled for it have less code between what they run, and take less time: 8192 tokens of 256
// experts 4.6 us, not 5.6.
inline bool is_softmax_of_top(const DeviceRoute& r) {
  return r.plain_best != 0 && r.rule.weigh == Weigh::softmax_of_selected && !r.rule.renormalize &&
         r.rule.factor == 1 && r.router_bias.data == nullptr &&
         r.per_expert_scale.data == nullptr && r.replay.data == nullptr;
}

// DeepSeek-V3's rule and nothing else, likewise: k = 8 of 256 experts, 4 of 8 groups.
inline bool is_deepseek_v3(const DeviceRoute& r) {
  return r.fast.in_groups && r.rule.top_k == 8 && r.rule.experts == 256 && r.rule.keep == 4 &&
         r.rule.weigh == Weigh::sigmoid && r.rule.scores_rank && r.rule.rank_by_two_best &&
         r.rule.renormalize && !r.rule.epsilon_is_floor && r.router_bias.data == nullptr &&
         r.per_expert_scale.data == nullptr && r.replay.data == nullptr;
}

// How fast_rows.cuh serves the rule. `many`: tokens enough to fill the GPU with more than one to a
// warp. `gate`: for fast_gate.cu, which has shares too.
FastPlan fast_plan(const DeviceRoute& r, bool many, bool gate = false);

// Each returns false, and does nothing, where the rule is not one of those. few_gate_cuda and
// token_gate_cuda and deepseek_gate_cuda: nor where tokens are many.
bool few_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits);
bool first_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits);
bool token_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits);
bool deepseek_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits);
bool plain_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits);
bool fast_gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits);

void gate_cuda(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const Tensor& logits);

// x [T, H] and W [C, H] of one 16-bit type, whose rows begin at multiples of 16 bytes.
struct WholeOperands {
  const void* x = nullptr;
  const void* w = nullptr;
  std::int64_t x_stride = 0, w_stride = 0;  // elements
  int hidden = 0;
  bool bf16 = false;
};

// One token and up to 256 columns; returns false, and does nothing, for more. `r` and `ordered` as
// below.
bool router_one(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                const OrderCall* ordered);
// Two to eight tokens and up to 256 columns, by the rules of token_rows.cuh, with the bits of
// router_few(); returns false, and does nothing, for others. `plan`: parts that meet in memory.
bool router_flat(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan, const OrderCall* ordered);
// Up to 16 columns of up to 256 numbers by the usual rule; returns false, and does nothing, for
// others. The bits are those of router_few().
bool router_rows(const cuda_engine::Gpu& gpu, const DeviceRoute& r, const WholeOperands& operands,
                 const RouterPlan& plan);
// `r` is laid out by fit_shared_rows. The workspace is that of router_workspace_bytes. `ordered`:
// sorts the ids too, or null.
void router_few(const cuda_engine::Gpu& gpu, DeviceRoute r, const WholeOperands& operands,
                const RouterPlan& plan, float* workspace, const OrderCall* ordered);
// Strides are at least H. `memory`: that of router_workspace_bytes; with more than 512 columns
// [T, C] raw sums go there, and nothing is routed. Returns false, and does nothing, where the build
// or the driver has no such kernel.
bool router_many(const cuda_engine::Gpu& gpu, DeviceRoute r, const WholeOperands& operands,
                 const RouterPlan& plan, float* memory);
// As router_many(), and routes always: at most 512 columns.
bool router_blackwell(const cuda_engine::Gpu& gpu, const DeviceRoute& r,
                      const WholeOperands& operands, const RouterPlan& plan);

void router_cuda(const cuda_engine::Gpu& gpu, const RouteCall& call, DeviceRoute r,
                 Workspace workspace);

}  // namespace shunt::routing
