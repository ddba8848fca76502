// What `shunt bench` was asked for, and the parts of it that measure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/shapes/grid.hpp"
#include "machine.hpp"
#include "measure.hpp"
#include "report.hpp"
#include "routing.hpp"
#include "shunt/layer.hpp"

namespace shunt::tool {

struct BenchPlan {
  std::string title;  // of the model, or "given shape"
  LayerSpec spec;
  bool whole = true;  // all of spec is given; else what the stage needs
  DType dtype = DType::bf16;
  Spread spread = Spread::uniform;
  std::vector<std::int64_t> tokens;
  std::int64_t rotate_bytes = 0;
  double seconds = 1;
  int tile = 0;                // order: of the padded form
  FormatSpec format{};         // gemm, indexed, layer, pack: of the experts
  FormatSpec shared_format{};  // layer: of the shared one
};

// Where measurements go.
struct Emit {
  std::function<void()> start;  // called once, when the first case is about to run
  std::function<void(const Row&, const Ceilings&)> row;
  bool started = false;
};

void bench_layer(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_route(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_gate(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_order(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_shuffle(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_gather(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_gemm(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_indexed(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_activate(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_combine(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_combine_shuffling(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_split_shuffling(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_scatter_add(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_pack(const BenchPlan& plan, const Context& context, Emit& emit);
void bench_chain(const BenchPlan& plan, const Context& context, Emit& emit);

// Measures a case and hands its row over.
void run_case(const BenchPlan& plan, const Context& context, Emit& emit, const Case& work);
// "T16", or "T16 zipf"; every case begins with it.
std::string token_label(const BenchPlan& plan, std::int64_t tokens);
// How many copies of `bytes` it takes to pass plan.rotate_bytes, within [1, most].
// `besides`: bytes of every run that lie in one place.
std::int64_t copies_to_rotate(const BenchPlan& plan, double bytes, std::int64_t most,
                              double besides = 0);
// Throws Error{out_of_memory} with a way out when `bytes` are not to be had.
void require_memory(const BenchPlan& plan, double bytes);

// The plan's shape as cases of one of the stages around the experts' GEMMs, one a token count.
std::vector<bench::StageShape> stage_shapes(const BenchPlan& plan, const std::string& stage);
void print_columns();
void print_row(const Row& row);

// On a GPU: every case is checked against the CPU engine, then timed in a CUDA graph.
struct GpuBench {
  std::string title;
  std::vector<bench::StageShape> shapes;
  Spread spread = Spread::uniform;
  std::int64_t rotate_bytes = 0;  // 0: twice the L2, at least 120 MB
  double seconds = 0.06;          // a case
  bool dependent_launch = false;
  bool skip_unsupported = false;  // say so and go on; else throw
};
int bench_gpu(const GpuBench& wanted, const JsonOption& json);

}  // namespace shunt::tool
