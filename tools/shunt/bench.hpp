// What `shunt bench` was asked for, and the parts of it that measure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "machine.hpp"
#include "report.hpp"
#include "routing.hpp"
#include "shunt/layer.hpp"

namespace shunt::tool {

struct BenchPlan {
  std::string title;  // of the model, or "given shape"
  LayerSpec spec;
  DType dtype = DType::bf16;
  Spread spread = Spread::uniform;
  std::vector<std::int64_t> tokens;
  std::int64_t rotate_bytes = 0;
  double seconds = 1;
};

// Rows are handed over as they are measured.
using Emit = std::function<void(const Row&, const Ceilings&)>;

void bench_layer(const BenchPlan& plan, const Context& context, const Emit& emit);
void bench_route(const BenchPlan& plan, const Context& context, const Emit& emit);
void bench_order(const BenchPlan& plan, const Context& context, const Emit& emit);
void bench_gather(const BenchPlan& plan, const Context& context, const Emit& emit);
void bench_gemm(const BenchPlan& plan, const Context& context, const Emit& emit);
void bench_activate(const BenchPlan& plan, const Context& context, const Emit& emit);
void bench_combine(const BenchPlan& plan, const Context& context, const Emit& emit);

// "T16", or "T16 zipf"; every case begins with it.
std::string token_label(const BenchPlan& plan, std::int64_t tokens);
// How many copies of `bytes` it takes to pass plan.rotate_bytes, within [1, most].
std::int64_t copies_to_rotate(const BenchPlan& plan, double bytes, std::int64_t most);
// Throws Error{out_of_memory} with a way out when `bytes` are not to be had.
void require_memory(const BenchPlan& plan, double bytes);

}  // namespace shunt::tool
