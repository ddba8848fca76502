// Tensor views: a pointer, a dtype, a shape, strides and a device. Nothing here owns memory.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace shunt {

enum class DType : std::int32_t {
  f32 = 0,
  f16 = 1,   // IEEE binary16
  bf16 = 2,  // the upper half of an f32
  f64 = 3,
  i8 = 4,
  i16 = 5,
  i32 = 6,
  i64 = 7,
  u8 = 8,
  u16 = 9,
  u32 = 10,
  u64 = 11,
  boolean = 12,  // one byte
  f8_e4m3 = 13,
  f8_e5m2 = 14,
  f8_e8m0 = 15,  // a power of two: 2^(byte - 127)
  f4_e2m1 = 16,  // two to a byte, the even element in the low nibble
};
inline constexpr DType f32 = DType::f32;
inline constexpr DType f16 = DType::f16;
inline constexpr DType bf16 = DType::bf16;
inline constexpr DType i32 = DType::i32;
inline constexpr DType i64 = DType::i64;

const char* to_string(DType dtype);
// Bits of one element.
int bits(DType dtype);
// Bytes of `elements` elements, rounded up to a byte.
std::int64_t bytes(DType dtype, std::int64_t elements);
bool is_float(DType dtype);

enum class DeviceType : std::int32_t { cpu = 0, cuda = 1 };
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr int max_rank = 4;

// A view. Strides count elements, and may be 0 (broadcast) or negative; an output's elements do not
// overlap, and its rows lie in order. A Tensor without data and of rank 0 stands for 'not given'.
// An operation never writes through an input, so views of constant memory are legal there.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> strides{};

  explicit operator bool() const { return rank != 0 || data != nullptr; }
  std::int64_t elements() const;  // 0 where rank or a size is none of a tensor; at most 2^63 - 1
  // Dense in row-major order, or without elements; not where rank or a size is none of a tensor.
  bool contiguous() const;
  std::int64_t bytes() const { return shunt::bytes(dtype, elements()); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // The view without its first dimension, at index i.
  Tensor operator[](std::int64_t i) const;
  // Rows [begin, end) of the first dimension.
  Tensor rows(std::int64_t begin, std::int64_t end) const;
  // The same elements with dimensions a and b exchanged.
  Tensor transposed(int a = 0, int b = 1) const;
  // "bf16 [128, 2048]".
  std::string describe() const;
};

// A dense row-major view. Throws Error when a dimension is negative, the rank is over max_rank, or
// the size overflows 64 bits.
Tensor view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
            Device device = {});
inline Tensor view(const float* data, std::initializer_list<std::int64_t> shape) {
  return view(data, DType::f32, shape);
}
inline Tensor view(const std::int32_t* data, std::initializer_list<std::int64_t> shape) {
  return view(data, DType::i32, shape);
}
inline Tensor view(const std::int64_t* data, std::initializer_list<std::int64_t> shape) {
  return view(data, DType::i64, shape);
}

}  // namespace shunt
