#include "format/dense3_search.hpp"

#include <cstddef>

namespace shunt::cpu_engine::avx2 {
namespace {

constexpr int wide = 1;
#include "format/dense3_search.inl"

}  // namespace

const Dense3Search dense3_search = search;

}  // namespace shunt::cpu_engine::avx2
