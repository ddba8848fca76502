#include "order/sort_plan.hpp"

#include <algorithm>
#include <bit>

#include "core/check.hpp"

namespace shunt::ordering {

namespace {

template <class T>
constexpr T divide_up(T a, T b) {
  return (a + b - 1) / b;
}

bool wants_padded(const OrderCall& call) {
  return call.sorted_token_ids != nullptr || call.sorted_weights != nullptr ||
         call.sorted_expert_ids != nullptr || call.num_tokens_post_padded != nullptr ||
         call.num_sorted_tiles != nullptr || call.padded_inverse != nullptr;
}

}  // namespace

SortPlan make_plan(const OrderCall& call, const SortLimits& limits, unsigned cluster,
                   unsigned parts, unsigned threads, bool stage) {
  SortPlan plan{.cluster = cluster, .parts = parts, .threads = threads};
  plan.bits = std::bit_width(static_cast<unsigned>(call.locals - 1));
  plan.stride = static_cast<unsigned>(call.locals + 4) / 4 * 4;
  plan.padded = wants_padded(call);
  plan.weighted = call.row_weights != nullptr || call.sorted_weights != nullptr;
  plan.wide_ids = reinterpret_cast<std::uintptr_t>(call.ids) % 16 == 0;

  const auto ints = static_cast<std::int64_t>(limits.shared_bytes) / 4 - SortPlan::sums;
  const std::int64_t fit = ints / plan.stride - 2 - (plan.padded ? 2 : 0);
  if (fit < 1) {
    fail(Status::unsupported,
         "order: local_experts is {}: its tables do not fit the {} bytes of shared memory that a "
         "block of this GPU has",
         call.locals, limits.shared_bytes);
  }
  const std::int64_t blocks = std::int64_t{cluster} * parts;
  const std::int64_t groups =
      std::max<std::int64_t>(1, divide_up(call.tokens * call.slots, 32 * blocks));
  const std::int64_t most = std::min<std::int64_t>(threads / 32, fit);
  plan.chunks = static_cast<unsigned>(divide_up(groups, most));
  plan.rows = static_cast<unsigned>(divide_up<std::int64_t>(groups, plan.chunks));
  plan.share = plan.rows * plan.chunks * 32;
  plan.segment = parts * plan.share;
  // 16 bits for a pair within the part.
  plan.staged = stage && plan.share <= 65536 &&
                plan.share >= 4 * static_cast<unsigned>(call.locals) &&
                (plan.weighted || call.permutation != nullptr || call.sorted_token_ids != nullptr);
  if (plan.shared_bytes() > static_cast<std::size_t>(limits.shared_bytes)) plan.staged = false;
  return plan;
}

SortPlan make_few_plan(const OrderCall& call, unsigned parts, unsigned threads, unsigned lanes) {
  SortPlan plan{.parts = parts, .threads = threads, .compare_lanes = lanes};
  plan.weighted = call.row_weights != nullptr;
  plan.few_shared_bytes = static_cast<std::size_t>(divide_up<std::int64_t>(
                              std::max<std::int64_t>(call.tokens * call.slots, 64), 4)) *
                          16;
  return plan;
}

SortPlan make_few_tiles_plan(const OrderCall& call, unsigned parts, unsigned threads,
                             unsigned lanes) {
  SortPlan plan = make_few_plan(call, parts, threads, lanes);
  plan.padded = true;
  plan.weighted = plan.weighted || call.sorted_weights != nullptr;
  plan.stride = static_cast<unsigned>(call.locals + 4) / 4 * 4;
  plan.few_keys = static_cast<unsigned>(plan.few_shared_bytes / sizeof(std::int32_t));
  plan.few_shared_bytes += (std::size_t{2} * plan.stride + 32) * sizeof(std::int32_t);
  return plan;
}

namespace {

// As comparing_plan; a block has at least a warp for every 16 of the experts that it pads.
SortPlan few_tiles_plan(const OrderCall& call, const SortLimits& limits) {
  const auto pairs = static_cast<unsigned>(call.tokens * call.slots);
  const auto locals = static_cast<unsigned>(call.locals);
  const unsigned lanes = std::clamp(std::bit_ceil(divide_up(pairs, 4U)), 1U, 32U);
  const unsigned threads = locals <= 256 ? 256 : locals <= 512 ? 512 : 1024;
  const unsigned wanted =
      std::max({divide_up(pairs * lanes, threads), divide_up(32 * locals, threads),
                static_cast<unsigned>(divide_up<std::int64_t>(call.capacity, 8192)), 1U});
  return make_few_tiles_plan(call, std::min(wanted, static_cast<unsigned>(limits.multiprocessors)),
                             threads, lanes);
}

// In a launch of their own, more pairs are counted sooner.
constexpr std::int64_t most_compared_alone = worth_comparing / 2;

// A thread compares its question with up to 32 keys; blocks are small, and as many as it takes.
SortPlan comparing_plan(const OrderCall& call, const SortLimits& limits) {
  const auto pairs = static_cast<unsigned>(call.tokens * call.slots);
  const unsigned lanes = std::clamp(std::bit_ceil(divide_up(pairs, 2U)), 1U, 32U);
  const unsigned threads = (pairs + static_cast<unsigned>(call.locals) + 1) * lanes;
  const unsigned most = pairs > 512 ? 512 : 256;
  const unsigned block = std::clamp(divide_up(threads, 32U) * 32, 128U, most);
  const unsigned blocks =
      std::min(divide_up(threads, block), static_cast<unsigned>(limits.multiprocessors));
  return make_few_plan(call, blocks, block, lanes);
}

// By the layouts that were fastest on an NVIDIA H200 (docs/notes/cuda-move.md).
SortPlan counting_plan(const OrderCall& call, const SortLimits& limits) {
  const std::int64_t pairs = call.tokens * call.slots;
  const std::int64_t multiprocessors = limits.multiprocessors;
  unsigned cluster = 1;
  std::int64_t parts = 1;
  unsigned threads = 512;
  if (pairs <= 8192 || limits.largest_cluster < 8) {
    // Few: every block counts all of them.
    parts = std::min(divide_up<std::int64_t>(pairs, 128),
                     pairs <= 8192 ? std::int64_t{32} : multiprocessors);
    // Padding is filled a warp an expert, one after the other.
    if (wants_padded(call)) parts = std::max(parts, std::min<std::int64_t>(4, multiprocessors));
    const int most = pairs <= 2048 ? 256 : 512;
    threads = static_cast<unsigned>(std::max(most, divide_up(std::min(call.locals, 512), 32) * 32));
  } else {
    // Not all groups of multiprocessors are whole: 132 hold 15 clusters of 8 at once, and a second
    // wave would double the time.
    cluster = 8;
    const std::int64_t at_once = std::max<std::int64_t>(1, multiprocessors / 8 - 1);
    parts = std::min(divide_up<std::int64_t>(pairs, 2048), at_once);
    if (pairs > 131072) threads = 768;
  }
  // A block fills some 8192 padding rows in the time of a launch.
  parts =
      std::max(parts, std::min(divide_up<std::int64_t>(call.capacity, std::int64_t{8192} * cluster),
                               multiprocessors / cluster));
  return make_plan(call, limits, cluster, static_cast<unsigned>(std::max<std::int64_t>(parts, 1)),
                   threads);
}

}  // namespace

SortPlan choose_plan(const OrderCall& call, const SortLimits& limits) {
  const std::int64_t pairs = call.tokens * call.slots;
  const bool padded = wants_padded(call);
  SortPlan plan = padded && pairs <= most_few_tiles && call.locals <= most_few_tiles
                      ? few_tiles_plan(call, limits)
                  : !padded && pairs <= most_compared_alone ? comparing_plan(call, limits)
                                                            : counting_plan(call, limits);
  add_zero_blocks(plan, call, limits);
  return plan;
}

SortPlan make_tail_plan(const OrderCall& call, const SortLimits& limits, unsigned blocks,
                        unsigned threads, bool alone) {
  constexpr std::int64_t comparisons = 65536;  // of a block: about 0.4 us
  const std::int64_t pairs = call.tokens * call.slots;
  const std::int64_t questions = pairs + call.locals + 1;
  if (pairs <= most_compared && pairs * questions <= comparisons * blocks && !wants_padded(call)) {
    const std::int64_t lanes =
        std::min(std::int64_t{threads} * blocks / questions, divide_up<std::int64_t>(pairs, 4));
    return make_few_plan(
        call, blocks, threads,
        std::bit_floor(static_cast<unsigned>(std::clamp<std::int64_t>(lanes, 1, 32))));
  }
  // The kernel has arrays of its own.
  SortLimits left = limits;
  left.shared_bytes -= 16 << 10;
  return make_plan(call, left, alone ? 1 : blocks, 1, threads);
}

void add_zero_blocks(SortPlan& plan, const OrderCall& call, const SortLimits& limits) {
  // Two blocks to a multiprocessor.
  constexpr std::int64_t zero_bytes = 32768;
  const auto bytes = static_cast<std::int64_t>(call.zeroed_bytes);
  if (bytes <= 4 * zero_bytes) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(
      divide_up(bytes, zero_bytes), std::int64_t{2} * limits.multiprocessors));
  plan.zero_blocks = divide_up(blocks, plan.cluster) * plan.cluster;
}

}  // namespace shunt::ordering
