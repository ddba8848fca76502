// A stable counting sort. Each thread counts the pairs of its tokens by expert; one scan over
// (expert, thread) turns counts into first rows; each thread then places its pairs in the order
// that it met them. Rows depend on the pairs before them only, so any number of threads gives the
// same result.
//
// Bytes: ids are read twice, each output is written once. Time: about 2 ns a pair and thread.
#include <algorithm>
#include <cstring>

#include "cpu/pool.hpp"
#include "order/engine.hpp"

namespace shunt {

namespace {

struct Sort {
  const OrderCall& call;
  int parts;
  std::int64_t valid;    // tokens
  std::int32_t* next;    // [parts, locals] counts, then the next row of each part and expert
  std::int32_t* first;   // [locals + 1] first compact row of each expert
  std::int32_t* padded;  // [locals + 1] first padded row of each expert

  std::int32_t* row_of(int part) const {
    return next + static_cast<std::ptrdiff_t>(part) * call.locals;
  }

  void count(int part) const {
    std::int32_t* counts = row_of(part);
    std::fill_n(counts, call.locals, 0);
    const auto [begin, end] = cpu_engine::share(call.tokens, part, parts);
    for (std::int64_t p = begin * call.slots; p < std::min(end, valid) * call.slots; ++p) {
      const std::int32_t expert = call.local(call.ids[p]);
      if (expert >= 0) ++counts[expert];
    }
  }

  void scan() const {
    std::int32_t row = 0;
    std::int32_t padded_row = 0;
    for (int e = 0; e < call.locals; ++e) {
      first[e] = row;
      padded[e] = padded_row;
      for (int part = 0; part < parts; ++part) {
        std::int32_t& cell = row_of(part)[e];
        const std::int32_t counted = cell;
        cell = row;
        row += counted;
      }
      if (call.tile > 0) {
        const std::int32_t rows = row - first[e];
        const std::int32_t tiles =
            rows > 0 ? (rows - 1) / call.tile + 1 : static_cast<int>(call.tile_for_empty_expert);
        padded_row += tiles * call.tile;
      }
    }
    first[call.locals] = row;
    padded[call.locals] = padded_row;
    if (call.offsets != nullptr) std::copy_n(first, call.locals + 1, call.offsets);
    if (call.num_tokens_post_padded != nullptr) *call.num_tokens_post_padded = padded_row;
    if (call.num_sorted_tiles != nullptr) *call.num_sorted_tiles = padded_row / call.tile;
  }

  void place(int part) const {
    std::int32_t* rows = row_of(part);
    const auto [begin, end] = cpu_engine::share(call.tokens, part, parts);
    for (std::int64_t token = begin; token < end; ++token) {
      for (int slot = 0; slot < call.slots; ++slot) {
        const std::int64_t pair = token * call.slots + slot;
        const std::int32_t expert = token < valid ? call.local(call.ids[pair]) : -1;
        std::int32_t row = -1;
        std::int32_t padded_row = -1;
        if (expert >= 0) {
          row = rows[expert]++;
          padded_row = padded[expert] + (row - first[expert]);
          const float weight = call.weights != nullptr ? call.weights[pair] : 0;
          if (call.permutation != nullptr) call.permutation[row] = static_cast<std::int32_t>(pair);
          if (call.row_weights != nullptr) call.row_weights[row] = weight;
          if (call.sorted_token_ids != nullptr) {
            call.sorted_token_ids[padded_row] = static_cast<std::int32_t>(token);
          }
          if (call.sorted_weights != nullptr) call.sorted_weights[padded_row] = weight;
        }
        if (call.inverse != nullptr) call.inverse[pair] = row;
        if (call.padded_inverse != nullptr) call.padded_inverse[pair] = padded_row;
      }
    }
  }

  // Padding rows, tiles, what lies past the last tile, and the buffer to be zeroed.
  void fill(int part) const {
    if (call.tile > 0) {
      const auto [begin, end] = cpu_engine::share(call.locals, part, parts);
      for (std::int64_t e = begin; e < end; ++e) {
        pad(padded[e] + first[e + 1] - first[e], padded[e + 1]);
        tiles(padded[e], padded[e + 1], static_cast<std::int32_t>(e));
      }
      const std::int64_t used = padded[call.locals];
      const auto [tail, tail_end] = cpu_engine::share(call.capacity - used, part, parts, call.tile);
      pad(used + tail, used + tail_end);
      tiles(used + tail, used + tail_end, -1);
    }
    const auto [begin, end] =
        cpu_engine::share(static_cast<std::int64_t>(call.zeroed_bytes), part, parts, 4096);
    if (begin < end) std::memset(call.zeroed + begin, 0, static_cast<std::size_t>(end - begin));
  }

  void pad(std::int64_t begin, std::int64_t end) const {
    if (call.sorted_token_ids != nullptr) {
      std::fill(call.sorted_token_ids + begin, call.sorted_token_ids + end, call.sentinel);
    }
    if (call.sorted_weights != nullptr) {
      std::fill(call.sorted_weights + begin, call.sorted_weights + end, 0.0F);
    }
  }

  void tiles(std::int64_t begin, std::int64_t end, std::int32_t expert) const {
    if (call.sorted_expert_ids == nullptr) return;
    std::fill(call.sorted_expert_ids + begin / call.tile, call.sorted_expert_ids + end / call.tile,
              expert);
  }
};

}  // namespace

std::size_t order_cpu_workspace_bytes(int threads, int locals) {
  return ((static_cast<std::size_t>(threads) + 2) * static_cast<std::size_t>(locals) + 2) *
         sizeof(std::int32_t);
}

void order_cpu(const Context& context, const OrderCall& call, Workspace workspace) {
  const int threads = context.threads();
  // Below this, waking the threads or scanning their counts costs more than they save.
  const bool together =
      threads > 1 &&
      (call.tokens * call.slots / threads >= std::max<std::int64_t>(8192, call.locals) ||
       call.zeroed_bytes / static_cast<std::size_t>(threads) >= std::size_t{256} << 10);
  Sort sort{.call = call, .parts = together ? threads : 1, .valid = call.tokens};
  if (call.valid_tokens != nullptr) {
    sort.valid = std::clamp<std::int64_t>(*call.valid_tokens, 0, call.tokens);
  }
  sort.first = static_cast<std::int32_t*>(workspace.data);
  sort.padded = sort.first + call.locals + 1;
  sort.next = sort.padded + call.locals + 1;

  if (!together) {
    sort.count(0);
    sort.scan();
    sort.place(0);
    sort.fill(0);
    return;
  }
  cpu_engine::Pool& pool = context.pool();
  pool.run([&](int thread) {
    sort.count(thread);
    pool.barrier();
    if (thread == 0) sort.scan();
    pool.barrier();
    sort.place(thread);
    sort.fill(thread);
  });
}

}  // namespace shunt
