// The order of up to 32 pairs as each warp works it out for itself, without counters: ids become
// planes of bits, and of any number the pairs with that id and with lower ones are masks.
#pragma once

#include <cstdint>

#include "gemm/few_chain.hpp"
#include "gemm/group_walk.hpp"

namespace shunt::cuda_engine {

class PairPlanes {
 public:
  // By all lanes of a warp; ids below 1024.
  __device__ __forceinline__ explicit PairPlanes(unsigned id) {
#pragma unroll
    for (int b = 0; b < planes; ++b) plane_[b] = __ballot_sync(0xffffffffu, (id >> b & 1) != 0);
  }
  // Pairs whose id is `of`, and those whose id is below.
  __device__ __forceinline__ void compare(unsigned of, unsigned& same, unsigned& below) const {
    same = 0xffffffffu, below = 0;
#pragma unroll
    for (int b = planes - 1; b >= 0; --b) {
      const unsigned one = 0u - (of >> b & 1);  // all bits, or none
      below |= same & ~plane_[b] & one;
      same &= ~(plane_[b] ^ one);
    }
  }

 private:
  static constexpr int planes = 10;  // 512 groups, and one for pairs of none
  unsigned plane_[planes];
};

// Forms of each kernel for few rows: any, for all that a product may ask for; and for what is
// usual, each kernel says what, of rows without weights: with ids (pairs), else with a bias or
// plain. Code that does not run is in the way of what does, fetched with it, line by line, and
// jumped over.
enum class FewForm { any, plain, biased, pairs };
inline FewForm few_form(bool usual, bool biased, const float* of_rows, const FewChain& chain) {
  if (!usual || of_rows != nullptr || chain.weights != nullptr) return FewForm::any;
  if (chain.ids != nullptr) return FewForm::pairs;
  return biased ? FewForm::biased : FewForm::plain;
}

// That for ids: up to eight rows a group.
template <class S>
inline constexpr FewForm form_of_pairs = S::tokens == 8 ? FewForm::pairs : FewForm::any;

// Of pair `p`, `none` where there is no such group.
__device__ __forceinline__ unsigned group_of_pair(const std::int32_t* ids, const GivenIds& given,
                                                  int p, unsigned none) {
  auto id = static_cast<unsigned>(__ldcg(ids + p));
  if (given.valid != nullptr && p >= min(__ldcg(given.valid), p + 1) * given.slots) return none;
  if (given.map != nullptr) {
    if (id >= static_cast<unsigned>(given.mapped)) return none;
    id = static_cast<unsigned>(__ldcg(given.map + id));
  }
  return min(none, id);
}

// Out of line, so that what others fetch has none of it.
__device__ __noinline__ inline unsigned given_group(const FewChain& chain, int lane,
                                                    unsigned none) {
  return lane < chain.pairs ? group_of_pair(chain.ids, chain.given, lane, none) : none;
}

// A block's walk over groups and where its rows come from: the product's own, or as the chain's ids
// say, in shared memory.
struct FewWalk {
  GroupWalk groups;
  const std::int32_t* permutation;
  const float* weights;  // sums of row r of the order times weights[r], unless null
  // Of shared memory.
  static __host__ __device__ constexpr int bytes(int groups) {
    return 4 * (2 * most_chained_pairs + groups + 1);
  }

  // As the form says. `of_rows`: the product's own weights.
  template <FewForm form, class Args>
  __device__ __forceinline__ static FewWalk of(const Args& args, const float* of_rows,
                                               const FewChain& chain, void* memory, int thread,
                                               int threads) {
    if constexpr (form == FewForm::plain || form == FewForm::biased) return FewWalk(args, nullptr);
    return FewWalk(args, form == FewForm::any ? of_rows : nullptr, chain, memory, thread, threads);
  }

 private:
  // The product's own.
  template <class Args>
  __device__ __forceinline__ FewWalk(const Args& args, const float* of_rows)
      : groups(args.walk), permutation(args.permutation), weights(of_rows) {}
  // By all threads of a block, whole warps, with ids from whoever ran before; ends with a barrier
  // where there are ids. The grid's first block writes the inverse.
  template <class Args>
  __device__ __forceinline__ FewWalk(const Args& args, const float* of_rows, const FewChain& chain,
                                     void* memory, int thread, int threads)
      : FewWalk(args, of_rows) {
    if (chain.ids == nullptr) return;
    auto* const order = static_cast<std::int32_t*>(memory);
    const auto none = static_cast<unsigned>(args.groups);
    const int groups_end = args.groups + 1;
    const int lane = thread % 32;
    unsigned id = none;
    if (lane < chain.pairs) id = min(none, static_cast<unsigned>(__ldcg(chain.ids + lane)));
    if (!chain.given.distinct) id = given_group(chain, lane, none);
    const PairPlanes planes(id);
    unsigned same, below;
    if (thread < 32) {
      planes.compare(id, same, below);
      const int row = __popc(below) + __popc(same & ((1u << lane) - 1));
      if (id < none) {
        order[row] = lane;
        if (chain.weights != nullptr) {
          reinterpret_cast<float*>(order)[most_chained_pairs + groups_end + row] =
              __ldcg(chain.weights + lane);
        }
      }
      if (chain.inverse != nullptr && blockIdx.x == 0 && lane < chain.pairs) {
        chain.inverse[lane] = id < none ? row : -1;
      }
    }
#pragma unroll 1
    for (int group = thread; group <= args.groups; group += threads) {
      planes.compare(static_cast<unsigned>(group), same, below);
      order[most_chained_pairs + group] = __popc(below);
    }
    __syncthreads();
    groups.offsets = order + most_chained_pairs;
    if (permutation != nullptr) permutation = order;
    weights = chain.weights == nullptr
                  ? nullptr
                  : reinterpret_cast<const float*>(order) + most_chained_pairs + groups_end;
  }
};

}  // namespace shunt::cuda_engine
