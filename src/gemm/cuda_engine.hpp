// The grouped GEMM of the CUDA engine, and the writing of weights in its layout.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "activate/kernels.hpp"
#include "cuda/runtime.hpp"
#include "gemm/cuda_layout.hpp"
#include "gemm/few_chain.hpp"
#include "gemm/group_walk.hpp"
#include "gemm/product_plan.hpp"
#include "gemm/row_places.hpp"
#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// Every pointer is the device's, and nothing behind one is read by the host.
struct GroupedProduct {
  RowLayout layout;
  int groups = 0;
  const void* prepared = nullptr;  // null: `matrices`
  Tensor matrices{};               // [groups, n, k], any strides

  // [groups + 1]; null: as many rows for each group, one group after the other, of which the first
  // counts[g] are there, or all where that is null too.
  const std::int32_t* offsets = nullptr;
  const std::int32_t* counts = nullptr;
  std::int64_t group_rows = 0;  // that a group is expected to have; 0: what it has room for
  bool whole_k = false;  // k is not shared out: a row's bits do not depend on how many there are
  // Both, and the weights, were there before the launch that precedes this one, which like every
  // launch of the engine waited for its predecessor before it let this one start: they may be read
  // while that one still runs.
  bool early = false;
  int tile_before = 0;  // ProductSizes::few_before

  Tensor rows{};                              // [T, k], rows may be strided
  const std::int32_t* permutation = nullptr;  // row r reads rows[permutation[r] / slots]
  int slots = 1;
  const float* row_scale = nullptr;  // times row_scale[r]: its sums are

  Tensor bias{};  // [groups, n], any strides; may be absent
  cpu_engine::ActivationRule activation{.kind = cpu_engine::ActivationRule::identity,
                                        .gated = false};
  Tensor out{};  // [R, out columns], rows may be strided
  RowPlaces places{};
};

// Of any of the engine's products.
template <class Product>
GroupWalk walk_of(const Product& p) {
  return GroupWalk::of_rows(p.offsets, p.counts, p.groups, p.out.shape[0]);
}
template <class Product>
std::int64_t expected_rows(const Product& p) {
  const std::int64_t rows = p.out.shape[0];
  return p.group_rows > 0 && p.group_rows < rows / p.groups ? p.group_rows * p.groups : rows;
}

// Enqueues the product. Offsets, counts and a permutation that are out of range give rows that are
// skipped or read as zeros.
void multiply_groups(const Gpu& gpu, const GroupedProduct& product);
// One with a chain; with ids in it, of those products that take them.
void multiply_groups(const Gpu& gpu, const GroupedProduct& product, const FewChain& chain);
bool takes_pairs(const Gpu& gpu, const GroupedProduct& product);
// Whether the product, whose rows have places, puts them there; else it must have none.
bool takes_places(const Gpu& gpu, const GroupedProduct& product);
// Whether rows that a permutation picks are better gathered beforehand.
struct PickedRows {
  bool other = false;    // not as any kernel reads them
  bool weighed = false;  // to be scaled
  bool whole_k = false;
};
bool gathering_pays(const Gpu& gpu, const RowLayout& layout, int groups, std::int64_t rows,
                    const PickedRows& picked);
// Of a product of `rows` rows that lie in order and need no conversion.
ProductSizes sizes_of(const RowLayout& layout, int groups, std::int64_t rows);
// The kernel for it in words; and what ProductSizes::few_before is after it.
std::string product_words(const Gpu& gpu, const ProductSizes& sizes);
int few_tile(const Gpu& gpu, const ProductSizes& sizes);

// One group of prepared weights from its matrix, or its two; device memory, any strides. Enqueued.
void write_group(const Gpu& gpu, const RowLayout& layout, const Tensor& gate, const Tensor& up,
                 void* to);
// All groups, whose matrices may also lie on the host: those are copied over first, which waits and
// takes memory for the largest. `up` is null unless paired.
void write_groups(const Context& context, const RowLayout& layout, const std::vector<Tensor>& gate,
                  const std::vector<Tensor>* up, void* to);
// The inverse of write_group: out [n, k], gate rows first.
void read_group(const Gpu& gpu, const RowLayout& layout, const void* from, const Tensor& out);
// A matrix that the host decodes: `bytes` of a group come over from `from`, row_of(bytes, i,
// values) writes the k numbers of row i, and out [n, k] gets each rounded once. Waits.
using DecodedRow = std::function<void(const char* group, std::int64_t row, double* values)>;
void read_decoded(const Context& context, const void* from, std::int64_t bytes,
                  const DecodedRow& row_of, const Tensor& out);

}  // namespace shunt::cuda_engine
