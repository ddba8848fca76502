// How the kernel for few rows (fragment_few_rows.cuh) shares out k.
#pragma once

#include "gemm/packed_plan.hpp"

namespace shunt::cuda_engine {

inline constexpr int few_teams = 4;  // of warps, in a block
// A plan's split of k is over the teams of a block first, then over the blocks of a cluster.
constexpr int teams_of_tile(const PackedPlan& plan) {
  return plan.split < few_teams ? plan.split : few_teams;
}

}  // namespace shunt::cuda_engine
