#include "format/dense3_search.hpp"

#include <cstddef>

namespace shunt::cpu_engine::avx512 {
namespace {

constexpr int wide = 2;
#include "format/dense3_search.inl"

}  // namespace

const Dense3Search dense3_search = search;

}  // namespace shunt::cpu_engine::avx512
