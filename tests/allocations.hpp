// Counts what a whole executable allocates: include it in one file of it. Not under a sanitizer,
// which has its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "engine.hpp"
#include "sanitizer.hpp"

namespace shunt::test {

inline std::atomic<long> news{0}, mallocs{0};
// So many more by new succeed, then one fails; below 0: all do.
inline std::atomic<long> before_failure{-1};
// By new, and on the CPU by malloc and its kin too, which a GPU's driver calls as it likes.
inline long allocations() { return on_gpu() ? news.load() : mallocs.load(); }

}  // namespace shunt::test

#if !SHUNT_SANITIZED

// Not inlined: the compiler would take malloc and free for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++shunt::test::news;
  std::atomic<long>& left = shunt::test::before_failure;
  if (left.load() >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
  ++shunt::test::mallocs;
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  ++shunt::test::mallocs;
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
  ++shunt::test::mallocs;
  return __libc_realloc(memory, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  ++shunt::test::mallocs;
  return __libc_memalign(alignment, bytes);
}
}

#endif
