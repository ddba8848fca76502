#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine.hpp"
#include "shunt/error.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

void refused(const std::function<void()>& call, const char* word) {
  try {
    call();
    ADD_FAILURE() << "accepted: " << word;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

struct Call {
  Context context = cpu({.threads = 1});
  GroupedGemmSpec spec{.groups = 2, .n = 3, .k = 4, .prepared = false};
  std::vector<float> numbers = std::vector<float>(100, 1.0F);
  std::vector<std::int32_t> offsets = {0, 2, 5};
  Buffer workspace = context.allocate(1 << 20);
  GroupedGemmInputs in{.rows = view(numbers.data(), {5, 4}),
                       .offsets = view(offsets.data(), {3}),
                       .weights = view(numbers.data(), {2, 3, 4})};
  Tensor out = view(numbers.data() + 50, {5, 3});
  void operator()() { grouped_gemm(context, spec, in, out, workspace); }
};

TEST(GroupedGemmRefuses, WhatDoesNotFitByName) {
  SHUNT_ON_CPU_ONLY();
  Call fits;
  EXPECT_NO_THROW(fits());
  const auto with = [](const std::function<void(Call&)>& change, const char* word) {
    Call call;
    change(call);
    refused([&] { call(); }, word);
  };
  with([](Call& c) { c.spec.groups = 0; }, "groups is 0");
  with([](Call& c) { c.spec.n = -1; }, "n is -1");
  with([](Call& c) { c.spec.k = -4; }, "k is -4");
  with([](Call& c) { c.spec.dtype = DType::i32; }, "dtype is i32");
  with([](Call& c) { c.spec.format = {Format{99}}; }, "format is 99: must be one of");
  with([](Call& c) { c.spec.fast_accumulation = true; },
       "fast_accumulation is true with rows as_dtype: must be false");
  with([](Call& c) { c.in.rows = {}; }, "rows");
  with([](Call& c) { c.in.rows = view(c.numbers.data(), {5, 5}); }, "rows");
  with(
      [](Call& c) {
        c.in.rows = c.in.rows.transposed().transposed();
        c.in.rows.strides[1] = 2;
      },
      "rows");
  with([](Call& c) { c.in.rows.dtype = DType::f64; }, "rows");
  with([](Call& c) { c.out = view(c.numbers.data(), {4, 3}); }, "out");
  with(
      [](Call& c) {
        c.out = view(c.numbers.data() + 19, {5, 3});
      },
      "grouped_gemm: out overlaps rows: must lie apart");
  with(
      [](Call& c) {
        std::memcpy(c.numbers.data() + 62, c.offsets.data(), 3 * sizeof(std::int32_t));
        c.in.offsets = view(c.numbers.data() + 62, DType::i32, {3});
      },
      "grouped_gemm: out overlaps offsets: must lie apart");
  with(
      [](Call& c) {
        c.in.weights = view(c.numbers.data() + 64, {2, 3, 4});
      },
      "grouped_gemm: out overlaps weights: must lie apart");
  with(
      [](Call& c) {  // every second number of a group's transposed matrix
        c.in.weights = view(c.numbers.data() + 29, {2, 4, 3}).transposed(1, 2);
        c.in.weights.strides = {30, 2, 6, 0};
      },
      "grouped_gemm: out overlaps weights: must lie apart");
  with(
      [](Call& c) {
        c.spec.bias = true;
        c.in.bias = view(c.numbers.data() + 64, {3, 2}).transposed();
      },
      "grouped_gemm: out overlaps bias: must lie apart");
  with([](Call& c) { c.out.data = c.workspace.data(); },
       "grouped_gemm: workspace overlaps out: must lie apart");
  with([](Call& c) { c.in.rows.data = c.workspace.data(); },
       "grouped_gemm: workspace overlaps rows: must lie apart");
  with([](Call& c) { c.in.weights.data = c.workspace.data(); },
       "grouped_gemm: workspace overlaps weights: must lie apart");
  with([](Call& c) { c.in.rows.data = reinterpret_cast<char*>(c.numbers.data()) + 2; },
       "must be aligned to its elements, 4 bytes");
  with([](Call& c) { c.in.rows.strides[0] = std::int64_t{1} << 62; }, "it reaches beyond 64 bits");
  with([](Call& c) { c.in.weights = {}; }, "weights");
  with([](Call& c) { c.in.weights = view(c.numbers.data(), {2, 4, 3}); }, "weights");
  with([](Call& c) { c.in.bias = view(c.numbers.data(), {2, 3}); }, "bias");
  with([](Call& c) { c.spec.bias = true; }, "bias");
  with([](Call& c) { c.spec.prepared = true; }, "prepared");
  with([](Call& c) { c.in.offsets = view(c.offsets.data(), {2}); }, "offsets");
  with([](Call& c) { c.offsets[0] = 1; }, "offsets[0] is 1");
  with([](Call& c) { c.offsets[1] = 6; }, "offsets[1] is 6");
  with([](Call& c) { c.offsets[2] = 1; }, "offsets[2] is 1");
  with([](Call& c) { c.offsets[2] = -5; }, "offsets[2] is -5");
  with([](Call& c) { c.workspace = {}; }, "workspace");
}

TEST(GroupedGemmRefuses, WalksThatAreNone) {
  SHUNT_ON_CPU_ONLY();
  const std::vector<std::int32_t> counts = {3, 0};
  const auto with = [&](const std::function<void(Call&)>& change, const char* word) {
    Call call;
    call.in.rows = view(call.numbers.data(), {2, 3, 4});
    call.in.offsets = {};
    call.in.counts = view(counts.data(), {2});
    call.out = view(call.numbers.data() + 50, {2, 3, 3});
    if (word != nullptr) {
      change(call);
      refused([&] { call(); }, word);
    } else {
      EXPECT_NO_THROW(call());
    }
  };
  with([](Call&) {}, nullptr);
  with([](Call& c) { c.in.offsets = view(c.offsets.data(), {3}); }, "counts are given beside");
  with(
      [](Call& c) {
        c.in.counts = {};
        c.in.offsets = view(c.offsets.data(), {3});
      },
      "offsets are given for rows f32 [2, 3, 4]");
  with([](Call& c) { c.in.rows = view(c.numbers.data(), {6, 4}); }, "counts are given for rows");
  with(
      [](Call& c) {
        c.in.counts = {};
        c.in.rows = view(c.numbers.data(), {6, 4});
      },
      "offsets are missing");
  with([](Call& c) { c.in.rows = view(c.numbers.data(), {3, 2, 4}); }, "rows is f32 [3, 2, 4]");
  with([](Call& c) { c.in.rows.strides[0] = 16; }, "stride 0 is 16: must be 12");
  with([](Call& c) { c.out.strides[0] = 8; }, "stride 0 is 8: must be 9");
  with([](Call& c) { c.out = view(c.numbers.data() + 50, {6, 3}); }, "out is f32 [6, 3]");
  with([](Call& c) { c.in.expected_rows = -1; }, "expected_rows is -1");
  with([](Call& c) { c.in.counts = view(c.offsets.data(), {3}); }, "counts");
  for (const std::int32_t count : {-1, 4}) {
    const std::vector<std::int32_t> wrong = {0, count};
    with([&](Call& c) { c.in.counts = view(wrong.data(), {2}); },
         count < 0 ? "counts[1] is -1: must be 0 to 3" : "counts[1] is 4: must be 0 to 3");
  }
}

TEST(GroupedGemmRefuses, PreparedWeightsOfAnotherShape) {
  SHUNT_ON_CPU_ONLY();
  Call call;
  const Buffer memory = call.context.allocate(prepared_bytes(call.context, DType::f32, 2, 4, 4));
  const Tensor matrix = view(call.numbers.data(), {4, 4});
  call.spec.prepared = true;
  call.in.weights = {};
  call.in.prepared = prepare(call.context, DType::f32, {matrix, matrix}, memory);
  refused([&] { call(); }, "[2, 4, 4]");
  const Tensor half = view(call.numbers.data(), {2, 4});
  call.spec.n = 4;
  call.out = view(call.numbers.data(), {5, 4});
  call.in.prepared = prepare_paired(call.context, DType::f32, {half, half}, {half, half}, memory);
  refused([&] { call(); }, "paired");
  call.in.prepared = prepare(call.context, DType::f32, {matrix, matrix}, memory);
  call.spec.k = 4;
  call.in.rows = view(call.numbers.data(), {5, 4});
  PreparedWeights short_of = call.in.prepared, shifted = short_of;
  short_of.bytes -= 1;
  shifted.data = static_cast<char*>(shifted.data) + 4;
  call.in.prepared = short_of;
  refused([&] { call(); }, "prepared weights have ");
  call.in.prepared = shifted;
  refused([&] { call(); }, "must be 64-byte aligned");
  call.in.prepared = prepare(call.context, DType::f32, {matrix, matrix}, memory);
  call.out = view(static_cast<const float*>(memory.data()) + 3, {5, 4});
  refused([&] { call(); }, "grouped_gemm: out overlaps prepared weights: must lie apart");
  const Tensor back = view(call.numbers.data(), {4, 4});
  refused([&] { unprepare(call.context, short_of, 0, back); }, "prepared weights have ");
  refused([&] { save_prepared(call.context, short_of, "nowhere"); }, "prepared weights have ");
  Tensor ranked = call.in.rows;
  for (const int rank : {-1, 9}) {
    ranked.rank = rank;
    call.in.rows = ranked;
    refused([&] { call(); }, "must be 0 to 4");
  }
}

TEST(PrepareRefuses, WhatDoesNotFitByName) {
  SHUNT_ON_CPU_ONLY();
  const Context context = cpu({.threads = 1});
  const std::vector<float> numbers(100, 1.0F);
  const Tensor matrix = view(numbers.data(), {3, 4});
  const Buffer memory = context.allocate(1 << 16);
  refused([&] { prepare(context, DType::f32, {}, memory); }, "matrices");
  refused([&] { prepare(context, DType::i8, {matrix}, memory); }, "dtype is i8");
  refused(
      [&] {
        prepare(context, DType::f32, {matrix, view(numbers.data(), {4, 3})}, memory);
      },
      "matrices[1]");
  refused(
      [&] {
        prepare(context, DType::f32, {view(numbers.data(), {3, 4, 1})}, memory);
      },
      "matrices[0]");
  refused([&] { prepare_paired(context, DType::f32, {matrix}, {}, memory); }, "ups");
  refused([&] { prepare(context, DType::f32, {matrix}, {}); }, "prepare: memory is null: ");
  refused(
      [&] {
        prepare(context, DType::f32, {matrix}, {memory.data(), 4});
      },
      "prepare: memory has 4 bytes, ");
  refused([&] { prepared_bytes(context, DType::f32, -1, 1, 1); }, "groups is -1");
  refused([&] { prepared_bytes(context, DType::f32, 1, 3, 1, true); }, "n is 3");
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  refused([&] { prepared_bytes(context, DType::f32, 4096, huge, huge); }, "64-bit");
  const PreparedWeights w = prepare(context, DType::f32, {matrix}, memory);
  std::vector<float> out(12);
  refused([&] { unprepare(context, w, 1, view(out.data(), {3, 4})); }, "group is 1");
  refused([&] { unprepare(context, w, 0, view(out.data(), {4, 3})); }, "out");
  refused([&] { unprepare(context, {}, 0, view(out.data(), {3, 4})); }, "weights");
  auto* const prepared = static_cast<float*>(memory.data());
  const char* const over = "unprepare: out overlaps prepared weights: must lie apart";
  refused([&] { unprepare(context, w, 0, view(prepared, {3, 4})); }, over);
  refused([&] { unprepare(context, w, 0, view(prepared + 5, {4, 3}).transposed()); }, over);
  const char* const read = "prepare: memory overlaps matrices: must lie apart";
  refused([&] { prepare(context, DType::f32, {matrix, view(prepared, {3, 4})}, memory); }, read);
  // Every second number: one of them is within.
  Tensor second = view(prepared - 22, {4, 3}).transposed();
  second.strides = {2, 6, 0, 0};
  refused([&] { prepare(context, DType::f32, {second}, memory); }, read);
  refused(
      [&] {
        prepare_paired(context, DType::f32, {matrix}, {view(prepared + 1, {3, 4})}, memory);
      },
      "prepare_paired: memory overlaps up: must lie apart");
  const std::vector<float> ones(64, 1);
  const Buffer room = context.allocate(1 << 14);
  const PackedMatrix packed = pack({Format::int8}, view(ones.data(), {4, 16}), room);
  refused([&] { prepare_packed(context, DType::f32, {packed}, room); },
          "memory overlaps matrix.values: must lie apart");
  Tensor same_row = view(out.data(), {3, 4});
  same_row.strides[0] = 0;
  refused([&] { unprepare(context, w, 0, same_row); },
          "unprepare: out has strides 0 and 1: its elements must not overlap");
}

}  // namespace
}  // namespace shunt
