// The stages around the experts' GEMMs as cases that run on any device: their tensors, the call,
// what it costs at least, and a check against the CPU engine.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "bench/shapes/grid.hpp"
#include "cost.hpp"
#include "routing.hpp"

namespace shunt::tool {

struct StageCase {
  std::string op;
  std::string label;
  DType dtype = DType::f32;
  // Call i reads and writes other memory than call i - 1; after the last comes the first.
  std::int64_t variants = 1;
  Cost cost;
  bool on_tensor_cores = false;  // cost.flops count towards the floor
  bool fp8_rows = false;         // at twice the rate of bf16
  std::function<void(std::int64_t)> call;
  // Throws Error{internal} when what call(0) leaves is not the CPU engine's result.
  std::function<void()> check;
};

// Throws Error{unsupported} with the engine's reason where it does not compute the shape.
StageCase make_case(const Context& context, const bench::StageShape& shape, Spread spread,
                    std::int64_t rotate_bytes);
// The part of it that makes gather and combine.
StageCase rows_case(const Context& context, const bench::StageShape& shape, Spread spread,
                    std::int64_t rotate_bytes);
// The part of it that makes activate.
StageCase activate_case(const Context& context, const bench::StageShape& shape,
                        std::int64_t rotate_bytes);
// The part of it that makes whole layers.
StageCase layer_case(const Context& context, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes);
// The part of it that makes grouped GEMMs.
StageCase gemm_case(const Context& context, const bench::StageShape& shape, Spread spread,
                    std::int64_t rotate_bytes);
// The part of it that makes indexed GEMMs.
StageCase indexed_case(const Context& context, const bench::StageShape& shape, Spread spread,
                       std::int64_t rotate_bytes);

// The operations of an expert-parallel group: combine_shuffling, split_shuffling, scatter_add.
StageCase ranks_case(const Context& context, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes);
// route, order, gather and combine.
StageCase chain_case(const Context& given, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes);

}  // namespace shunt::tool
