// What a benchmark compares the indexed GEMM with: a right result passes, a wrong one does not.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "bench_cases.hpp"
#include "bench_indexed.hpp"
#include "shunt/indexed_gemm.hpp"

namespace shunt::tool {
namespace {

constexpr int groups = 5;
constexpr std::int64_t rows = 6, slots = 2, n = 24, k = 96;

// What indexed_gemm gave of random rows.
class Multiplied {
 public:
  explicit Multiplied(const FormatSpec& format = {})
      : matrices_(context_, {.groups = groups, .n = n, .k = k, .format = format}, 2) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& x : rows_) x = normal(random);
    const GroupedGemmSpec& spec = matrices_.spec();
    const Buffer workspace =
        context_.allocate(indexed_gemm_workspace_bytes(context_, spec, rows, slots));
    indexed_gemm(context_, spec, {.rows = call().rows, .ids = call().ids, .prepared = matrices_[0]},
                 call().out, workspace);
  }

  // What the check says; empty: nothing.
  std::string complaint() {
    try {
      check_indexed("T6", context_, matrices_, call());
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::internal);
      return error.what();
    }
    return "";
  }
  std::int32_t& id(std::int64_t pair) { return ids_[at(pair)]; }
  std::vector<float>& out() { return out_; }

 private:
  IndexedCall call() {
    return {view(rows_.data(), {rows, k}), view(ids_.data(), {rows, slots}),
            view(out_.data(), {rows * slots, n})};
  }

  Context context_ = cpu({.threads = 1});
  IndexedMatrices matrices_;
  std::vector<float> rows_ = std::vector<float>(at(rows * k));
  std::vector<std::int32_t> ids_ = {0, 1, 2, 3, 4, 0, -1, 4, groups, 2, 3, 3};
  std::vector<float> out_ = std::vector<float>(at(rows * slots * n), std::nanf(""));
};

TEST(IndexedCheck, RightResultsPass) {
  EXPECT_EQ(Multiplied().complaint(), "");
  for (const FormatSpec& format : known_formats()) {
    EXPECT_EQ(Multiplied(format).complaint(), "") << to_string(format);
  }
}

TEST(IndexedCheck, WrongOnesDoNot) {
  for (const FormatSpec& format : {FormatSpec{}, FormatSpec{Format::nvfp4}}) {
    SCOPED_TRACE(to_string(format));
    Multiplied zeros(format);
    for (float& x : zeros.out()) x = 0;
    EXPECT_NE(zeros.complaint().find("T6: the result is not the CPU engine's: pair 0, column "),
              std::string::npos)
        << zeros.complaint();
    for (std::int64_t pair = 0; pair < rows * slots; ++pair) {
      const std::string name = "pair " + std::to_string(pair) + ", column ";
      Multiplied other(format);
      std::int32_t& id = other.id(pair);
      id = id < 0 || id == groups ? 1 : (id + 1) % groups;
      EXPECT_NE(other.complaint().find(name), std::string::npos) << other.complaint();
      Multiplied nobodys(format);
      if (nobodys.id(pair) < 0 || nobodys.id(pair) == groups) continue;
      nobodys.id(pair) = -1;
      EXPECT_NE(nobodys.complaint().find(name), std::string::npos) << nobodys.complaint();
    }
    Multiplied nan(format);
    nan.out().back() = std::nanf("");
    EXPECT_NE(nan.complaint().find("pair 11, column 23 is nan"), std::string::npos)
        << nan.complaint();
  }
}

// A token's row meets each of its matrices, or each pair has a row: and bytes are counted so.
TEST(IndexedCheck, CasesAreRightOnTheCpu) {
  for (const bool row_a_pair : {false, true}) {
    for (const FormatSpec& format : {FormatSpec{}, FormatSpec{Format::sparse_nvfp4}}) {
      RouteSpec route;
      route.experts = groups;
      route.top_k = 2;
      const bench::StageShape shape{.stage = "indexed",
                                    .route = route,
                                    .tokens = 7,
                                    .hidden = k,
                                    .dtype = DType::bf16,
                                    .columns = n,
                                    .row_a_pair = row_a_pair,
                                    .format = format};
      const StageCase made = indexed_case(cpu({.threads = 2}), shape, Spread::one_hot, 0);
      EXPECT_EQ(made.op, "indexed_gemm");
      EXPECT_EQ(made.label,
                std::string("T7 G5 R14 N24 K96") + (format == FormatSpec{} ? "" : " sparse_nvfp4"));
      made.call(0);
      made.check();
      const double weight = format == FormatSpec{} ? 2 : 3.5 / 8;
      EXPECT_DOUBLE_EQ(made.cost.bytes,
                       weight * 2 * n * k + 2.0 * ((row_a_pair ? 14 : 7) * k + 14 * n) + 4 * 14);
      EXPECT_DOUBLE_EQ(made.cost.flops, 2.0 * 14 * n * k);
    }
  }
}

}  // namespace
}  // namespace shunt::tool
