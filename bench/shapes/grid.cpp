#include "bench/shapes/grid.hpp"

#include <utility>

namespace shunt::bench {

RouteSpec softmax_of_top(int experts, int top_k) {
  RouteSpec spec;
  spec.experts = experts;
  spec.top_k = top_k;
  spec.score_stage = ScoreStage::after_top_k;
  return spec;
}

RouteSpec biased_groups(int experts, int top_k, Groups groups) {
  RouteSpec spec;
  spec.experts = experts;
  spec.top_k = top_k;
  spec.score = Score::sigmoid;
  spec.selection_bias = true;
  spec.groups = groups;
  spec.renormalize = true;
  return spec;
}

namespace {

// The k best of scores that are given, as they are.
RouteSpec best_of_given(int experts, int top_k) {
  RouteSpec spec;
  spec.experts = experts;
  spec.top_k = top_k;
  spec.score = Score::none;
  return spec;
}

// Rows of a tile that a grouped GEMM of so many tokens would take.
int fitting_tile(std::int64_t tokens, int experts, int top_k) {
  const std::int64_t rows = tokens * top_k / experts;
  return rows < 16 ? 16 : rows < 128 ? 64 : 128;
}

std::vector<StageShape> make_grid() {
  std::vector<StageShape> grid;
  struct Router {
    std::int64_t tokens;
    int experts;
    std::int64_t hidden;
  };
  for (const Router& r :
       {Router{512, 8, 128}, Router{512, 16, 128}, Router{1024, 64, 512}, Router{2048, 128, 1024},
        Router{4096, 64, 2048}, Router{4096, 128, 2048}, Router{1, 256, 7168},
        Router{64, 256, 7168}, Router{4096, 256, 7168}, Router{8192, 512, 2048}}) {
    grid.push_back({"route", softmax_of_top(r.experts, 4), r.tokens, r.hidden, f16});
  }

  const RouteSpec deepseek =
      biased_groups(256, 8, {.count = 8, .keep = 4, .rank_by = GroupRank::sum_of_top_2});
  for (const std::int64_t t : {1, 64, 512, 2048, 8192, 32768}) {
    grid.push_back({"gate", deepseek, t, 0, f32});
  }
  for (const std::int64_t t : {1, 64, 512, 2048, 8192, 32768}) {
    grid.push_back({"gate", softmax_of_top(128, 8), t, 0, bf16});
  }
  for (const std::int64_t t : {1, 2048, 8192, 32768}) {
    grid.push_back({"gate", softmax_of_top(256, 8), t, 0, bf16});
  }
  for (const std::int64_t t : {1, 2048, 8192}) {
    grid.push_back({"gate", softmax_of_top(512, 10), t, 0, bf16});
  }
  for (const std::int64_t t : {1, 2048, 8192, 32768}) {
    grid.push_back({"gate", softmax_of_top(32, 4), t, 0, bf16});
    grid.push_back({"gate", softmax_of_top(16, 1), t, 0, bf16});
  }

  for (const int tiled : {0, 1}) {
    for (const std::int64_t t : {1, 64, 512, 2048, 8192, 32768}) {
      const int tile = tiled != 0 ? fitting_tile(t, 128, 8) : 0;
      grid.push_back({"order", best_of_given(128, 8), t, 0, bf16, tile});
    }
  }

  for (const std::int64_t t : {128, 2048, 4096, 8192}) {
    for (const int experts : {16, 128}) {
      grid.push_back({"shuffle", best_of_given(experts, 1), t, 0, bf16});
    }
  }
  for (const std::int64_t t : {128, 2048, 4096, 8192}) {
    grid.push_back({"shuffle", best_of_given(128, 8), t, 0, bf16});
  }

  // Rows of 33 kB to 470 MB.
  for (const char* stage : {"gather", "combine"}) {
    for (const std::int64_t t : {1, 64, 512, 2048, 8192}) {
      grid.push_back({stage, best_of_given(128, 8), t, 2048, bf16});
    }
    for (const std::int64_t t : {64, 4096}) {
      grid.push_back({stage, best_of_given(256, 8), t, 7168, bf16});
    }
  }
  for (const char* stage : {"combine_shuffling", "split_shuffling"}) {
    for (const std::int64_t rows : {512, 4096, 32768}) {
      grid.push_back({stage, best_of_given(128, 8), rows, 2048, bf16, 0, 8});
    }
  }
  for (const std::int64_t t : {64, 1024}) {
    grid.push_back({"scatter_add", best_of_given(128, 8), t, 2048, bf16, 0, 4});
  }
  for (const std::int64_t t : {1, 64, 512, 4096}) {
    for (const bool dependent : {false, true}) {
      grid.push_back({"chain", softmax_of_top(128, 8), t, 2048, bf16, 0, 0, dependent});
    }
  }
  return grid;
}

}  // namespace

const std::vector<StageShape>& gemm_grid() {
  static const std::vector<StageShape> grid = [] {
    std::vector<StageShape> made;
    for (const auto& [groups, rows] : {std::pair{16, 1024}, {128, 128}, {16, 8}, {128, 1}}) {
      for (const auto& [n, k] : {std::pair{2048, 5120}, {5120, 1024}}) {
        made.push_back({.stage = "gemm",
                        .route = best_of_given(groups, 1),
                        .tokens = std::int64_t{groups} * rows,
                        .hidden = k,
                        .dtype = bf16,
                        .columns = n,
                        .group_rows = rows});
      }
    }
    return made;
  }();
  return grid;
}

const std::vector<StageShape>& routing_grid() {
  static const std::vector<StageShape> grid = make_grid();
  return grid;
}

}  // namespace shunt::bench
