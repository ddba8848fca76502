// A product of one group and few rows that runs while others wait for multiprocessors, as a layer's
// shared expert does beside routing: not the plan that ends first, but one that keeps less of the
// GPU from them (docs/notes/cuda-layer.md, "Tiles of a shared expert").
#pragma once

#include "gemm/fragment_product.hpp"
#include "gemm/hopper_product.hpp"
#include "gemm/packed_product.hpp"

namespace shunt::cuda_engine {

// Of the candidates in the fastest one's kernel, if that is for few rows, and no more blocks than
// tiles; else, and of up to eight rows in fp8, the fastest as it is.
ProductPlan plan_beside(const ProductSizes& sizes, const GpuFigures& gpu);
PackedPlan plan_beside(const PackedSizes& sizes, const GpuFigures& gpu);
// Of weights that are decoded: of 16 to 256 rows on Hopper that of all candidates without clusters,
// whose blocks would wait for several multiprocessors at once; of others the fastest.
PackedPlan plan_fragments_beside(const PackedSizes& sizes, const GpuFigures& gpu);

// The products by these plans. `memory`: as multiply_fragments() has it.
void multiply_beside(const Gpu& gpu, const GroupedProduct& product);
void multiply_beside(const Gpu& gpu, const PackedProduct& product);
void multiply_beside(const Gpu& gpu, const FragmentProduct& product, void* memory);

}  // namespace shunt::cuda_engine
