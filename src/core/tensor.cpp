#include "shunt/tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/memory.hpp"

namespace shunt {

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f64:
      return "f64";
    case DType::i8:
      return "i8";
    case DType::i16:
      return "i16";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
    case DType::u16:
      return "u16";
    case DType::u32:
      return "u32";
    case DType::u64:
      return "u64";
    case DType::boolean:
      return "bool";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::f8_e5m2:
      return "f8_e5m2";
    case DType::f8_e8m0:
      return "f8_e8m0";
    case DType::f4_e2m1:
      return "f4_e2m1";
  }
  return "unknown dtype";
}

int bits(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 64;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 32;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16:
      return 16;
    case DType::i8:
    case DType::u8:
    case DType::boolean:
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::f8_e8m0:
      return 8;
    case DType::f4_e2m1:
      return 4;
  }
  fail(Status::invalid_argument, "dtype: {} is none of the enumeration",
       static_cast<std::int32_t>(dtype));
}

std::int64_t bytes(DType dtype, std::int64_t elements) {
  const int width = bits(dtype);
  if (width >= 8) return checked_product("bytes", elements, width / 8);
  return elements / 2 + (elements % 2 > 0 ? 1 : 0);
}

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f64;
}

std::int64_t Tensor::elements() const {
  if (!*this || rank < 0 || rank > max_rank) return 0;
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  std::int64_t product = 1;
  bool over = false;
  for (std::size_t d = 0; d < static_cast<std::size_t>(rank); ++d) {
    if (shape[d] <= 0) return 0;
    over = over || __builtin_mul_overflow(product, shape[d], &product);
  }
  return over ? most : product;
}

bool Tensor::contiguous() const {
  if (rank < 0 || rank > max_rank) return false;
  bool empty = false;
  for (std::size_t d = 0; d < static_cast<std::size_t>(rank); ++d) {
    if (shape[d] < 0) return false;
    empty = empty || shape[d] == 0;
  }
  if (empty) return true;  // whatever the strides
  std::int64_t expected = 1;
  for (int d = rank - 1; d >= 0; --d) {
    const auto i = static_cast<std::size_t>(d);
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

namespace {

// From a tensor's first row to row i.
std::int64_t whole_bytes(const Tensor& tensor, std::int64_t i) {
  std::int64_t at = 0;
  if (__builtin_mul_overflow(i, tensor.strides[0], &at) ||
      __builtin_mul_overflow(at, bits(tensor.dtype), &at)) {
    fail(Status::invalid_argument, "tensor {}: row {} of stride {} begins beyond 64 bits",
         tensor.describe(), i, tensor.strides[0]);
  }
  if (at % 8 != 0) {
    fail(Status::invalid_argument, "tensor {}: row {} begins within a byte", tensor.describe(), i);
  }
  return at / 8;
}

}  // namespace

Tensor Tensor::operator[](std::int64_t i) const {
  if (rank < 1 || rank > max_rank) {
    fail(Status::invalid_argument, "tensor {}: has no dimension to index", describe());
  }
  if (i < 0 || i >= shape[0]) {
    fail(Status::invalid_argument, "tensor {}: index {} is out of range: must be 0 to {}",
         describe(), i, shape[0] - 1);
  }
  Tensor result = *this;
  result.data = static_cast<char*>(data) + whole_bytes(*this, i);
  result.rank = rank - 1;
  for (std::size_t d = 0; d + 1 < max_rank; ++d) {
    result.shape[d] = shape[d + 1];
    result.strides[d] = strides[d + 1];
  }
  return result;
}

Tensor Tensor::rows(std::int64_t begin, std::int64_t end) const {
  if (rank < 1 || rank > max_rank || begin < 0 || end < begin || end > shape[0]) {
    fail(Status::invalid_argument, "tensor {}: rows {} to {} are out of range", describe(), begin,
         end);
  }
  Tensor result = *this;
  result.data = static_cast<char*>(data) + whole_bytes(*this, begin);
  result.shape[0] = end - begin;
  return result;
}

Tensor Tensor::transposed(int a, int b) const {
  if (a < 0 || b < 0 || a >= rank || b >= rank || rank > max_rank) {
    fail(Status::invalid_argument, "tensor {}: dimensions {} and {} are not both below its rank",
         describe(), a, b);
  }
  Tensor result = *this;
  std::swap(result.shape[static_cast<std::size_t>(a)], result.shape[static_cast<std::size_t>(b)]);
  std::swap(result.strides[static_cast<std::size_t>(a)],
            result.strides[static_cast<std::size_t>(b)]);
  return result;
}

std::string Tensor::describe() const {
  if (!*this) return "(none)";
  if (rank < 0 || rank > max_rank) return fmt::format("{} of rank {}", to_string(dtype), rank);
  return fmt::format("{} [{}]", to_string(dtype),
                     fmt::join(shape.begin(), shape.begin() + rank, ", "));
}

Tensor view(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
            Device device) {
  if (shape.size() > static_cast<std::size_t>(max_rank)) {
    fail(Status::invalid_argument, "view: rank {} is over {}", shape.size(), max_rank);
  }
  Tensor result;
  result.data = const_cast<void*>(data);
  result.dtype = dtype;
  result.device = device;
  result.rank = static_cast<int>(shape.size());
  std::size_t d = 0;
  for (const std::int64_t size : shape) {
    if (size < 0) fail(Status::invalid_argument, "view: dimension {} is {}, below 0", d, size);
    result.shape[d++] = size;
  }
  std::int64_t stride = 1;
  for (; d-- > 0;) {
    result.strides[d] = stride;
    stride = checked_product("view: elements", stride, result.shape[d]);
  }
  bytes(dtype, stride);
  return result;
}

void require(const Support& support, std::string_view what) {
  if (!support) fail(Status::unsupported, "{}: {}", what, support.reason);
}

void require_legal(const Support& legal, std::string_view what) {
  if (!legal) fail(Status::invalid_argument, "{}: {}", what, legal.reason);
}

namespace {

std::string list(std::initializer_list<DType> dtypes) {
  std::string text;
  for (const DType dtype : dtypes) {
    text += (text.empty() ? "" : " | ") + std::string(to_string(dtype));
  }
  return text;
}

std::string list(std::initializer_list<std::int64_t> shape) {
  std::string text;
  for (const std::int64_t size : shape) {
    text += (text.empty() ? "" : ", ") + (size == any_size ? "any" : std::to_string(size));
  }
  return text;
}

// Whether the distance of a tensor's elements from its first one overflows 64 bits.
bool reaches_too_far(const Tensor& tensor) {
  std::int64_t reach = 0;
  for (std::size_t d = 0; d < static_cast<std::size_t>(tensor.rank); ++d) {
    std::int64_t far = 0;
    const std::int64_t stride = tensor.strides[d];
    if (stride == std::numeric_limits<std::int64_t>::min() ||
        __builtin_mul_overflow(tensor.shape[d] - 1, std::abs(stride), &far) ||
        __builtin_add_overflow(reach, far, &reach)) {
      return true;
    }
  }
  return __builtin_mul_overflow(reach, bits(tensor.dtype), &reach);
}

}  // namespace

void check_tensor(std::string_view name, const Tensor& tensor, const TensorRule& rule,
                  Device device) {
  const auto wrong = [&](std::string_view what) {
    fail(Status::invalid_argument, "{} is {}: {}; legal is {} [{}]", name, tensor.describe(), what,
         list(rule.dtypes), list(rule.shape));
  };
  if (tensor.rank < 0 || tensor.rank > max_rank) {
    fail(Status::invalid_argument, "{} has rank {}: must be 0 to {}", name, tensor.rank, max_rank);
  }
  if (!tensor) wrong("it is missing");
  bool known = false;
  for (const DType dtype : rule.dtypes) known |= dtype == tensor.dtype;
  if (!known) wrong("wrong dtype");
  if (tensor.rank != static_cast<int>(rule.shape.size())) wrong("wrong rank");
  std::size_t d = 0;
  for (const std::int64_t size : rule.shape) {
    if (tensor.shape[d] < 0 || (size != any_size && tensor.shape[d] != size)) wrong("wrong shape");
    ++d;
  }
  if (!(tensor.device == device)) wrong("it is on another device than the context");
  if (tensor.elements() == 0) return;
  if (tensor.data == nullptr) wrong("its data is null");
  const auto strided = [&](std::string_view must) {
    fail(Status::invalid_argument, "{} is {} with strides [{}]: {}", name, tensor.describe(),
         fmt::join(tensor.strides.begin(), tensor.strides.begin() + tensor.rank, ", "), must);
  };
  if (reaches_too_far(tensor)) strided("it reaches beyond 64 bits");
  const int width = bits(tensor.dtype) / 8;
  if (width > 1 && reinterpret_cast<std::uintptr_t>(tensor.data) % width != 0) {
    fail(Status::invalid_argument, "{} is {} at {}: must be aligned to its elements, {} bytes",
         name, tensor.describe(), fmt::ptr(tensor.data), width);
  }
  if (rule.dense && !tensor.contiguous()) strided("it must be dense, row-major");
  if (rule.rows_dense && d > 0 && tensor.shape[d - 1] > 1 && tensor.strides[d - 1] != 1) {
    strided("its last dimension must be dense (stride 1)");
  }
  if (rule.written && d > 1 && tensor.shape[d - 2] > 1 &&
      tensor.strides[d - 2] < tensor.shape[d - 1]) {
    fail(Status::invalid_argument, "{} has a row stride of {}: must be its width, {}, or more",
         name, tensor.strides[d - 2], tensor.shape[d - 1]);
  }
}

bool check_given(std::string_view name, const Tensor& tensor, bool wanted, std::string_view why) {
  if (wanted && !tensor) fail(Status::invalid_argument, "{} is missing: {} asks for it", name, why);
  if (!wanted && tensor) {
    fail(Status::invalid_argument, "{} is given ({}), but {} does not use it", name,
         tensor.describe(), why);
  }
  return wanted;
}

void check_memory(std::string_view what, std::string_view name, Workspace memory,
                  std::size_t needed) {
  if (needed == 0) return;
  if (memory.data == nullptr) {
    fail(Status::invalid_argument, "{}: {} is null: {} bytes are needed", what, name, needed);
  }
  if (memory.bytes < needed) {
    fail(Status::invalid_argument, "{}: {} has {} bytes, {} are needed", what, name, memory.bytes,
         needed);
  }
  if (reinterpret_cast<std::uintptr_t>(memory.data) % 64 != 0) {
    fail(Status::invalid_argument, "{}: {} is not 64-byte aligned", what, name);
  }
}

void check_workspace(std::string_view what, Workspace workspace, std::size_t needed) {
  check_memory(what, "workspace", workspace, needed);
}

namespace {

// Where a view's bytes are: in rows from the lowest address up, one where it is dense.
struct ByteRows {
  std::int64_t first, rows, width, stride;
};

bool last_dense(const Tensor& tensor) {
  const auto last = static_cast<std::size_t>(tensor.rank) - 1;
  return tensor.shape[last] == 1 || tensor.strides[last] == 1;
}

std::optional<ByteRows> byte_rows(const Tensor& tensor) {
  const std::int64_t first = reinterpret_cast<std::intptr_t>(tensor.data);
  if (tensor.contiguous()) return ByteRows{first, 1, tensor.bytes(), 0};
  const bool elements = tensor.rank == 1 && bits(tensor.dtype) >= 8;
  if (!elements && (tensor.rank != 2 || !last_dense(tensor))) return {};
  const std::int64_t stride = bytes(tensor.dtype, tensor.strides[0]);
  std::int64_t last = 0;
  if (__builtin_mul_overflow(tensor.shape[0] - 1, stride, &last)) return {};
  return ByteRows{std::min(first, first + last), stride == 0 ? 1 : tensor.shape[0],
                  bytes(tensor.dtype, elements ? 1 : tensor.shape[1]), std::abs(stride)};
}

// Whether a row of p and one of q share a byte, where both have several, of any strides.
bool rows_meet(const ByteRows& p, const ByteRows& q) {
  const auto end = [](const ByteRows& of) {
    return of.first + (of.rows - 1) * of.stride + of.width;
  };
  if (end(p) <= q.first || end(q) <= p.first) return false;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    const std::int64_t at = p.first + i * p.stride;
    // The first of q's rows that ends behind `at`.
    const std::int64_t behind = at - q.width - q.first;
    const std::int64_t j = behind < 0 ? 0 : behind / q.stride + 1;
    if (j >= q.rows) return false;  // nor does one end behind the next
    if (q.first + j * q.stride < at + p.width) return true;
  }
  return false;
}

// From a view's lowest byte to behind its highest, gaps and all; of none both are 0. Wraps where
// strides are none of memory.
struct Reach {
  std::uintptr_t low = 0, high = 0;
  explicit Reach(const Tensor& tensor) {
    if (!tensor) return;
    std::uint64_t down = 0, up = 1;
    for (std::size_t d = 0; d < static_cast<std::size_t>(tensor.rank); ++d) {
      if (tensor.shape[d] <= 0) return;
      const std::uint64_t stride = static_cast<std::uint64_t>(tensor.strides[d]);
      const std::uint64_t all = (static_cast<std::uint64_t>(tensor.shape[d]) - 1) * stride;
      (tensor.strides[d] < 0 ? down : up) += all;
    }
    const auto width = static_cast<std::uint64_t>(bits(tensor.dtype));
    low = reinterpret_cast<std::uintptr_t>(tensor.data) -
          static_cast<std::uintptr_t>(((0 - down) * width + 7) / 8);
    high = reinterpret_cast<std::uintptr_t>(tensor.data) +
           static_cast<std::uintptr_t>((up * width + 7) / 8);
  }
  bool meets(const Reach& other) const { return low < other.high && other.low < high; }
};

// Of what is in no such rows: whether one of its slices does, along the shortest dimension that
// leaves dense rows whole. False where elements are no bytes, or strides none of memory.
bool slice_shares_a_byte(const Tensor& of, const Tensor& other) {
  if (bits(of.dtype) < 8 || of.rank < 2) return false;
  const int outer = of.rank - (last_dense(of) ? 1 : 0);
  const auto times = [&](int d) {
    const auto i = static_cast<std::size_t>(d);
    return of.strides[i] == 0 ? 1 : of.shape[i];
  };
  int along = 0;
  for (int d = 0; d < of.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(of.shape[i] - 1, of.strides[i], &reach)) return false;
    if (__builtin_mul_overflow(reach, bits(of.dtype), &reach)) return false;
    if (d < outer && times(d) < times(along)) along = d;
  }
  const Tensor slices = of.transposed(0, along);
  for (std::int64_t i = 0; i < times(along); ++i) {
    if (overlap(slices[i], other)) return true;
  }
  return false;
}

}  // namespace

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.device != b.device) return false;
  // Most lie apart as a whole, which is seen soonest.
  if (!Reach(a).meets(Reach(b))) return false;
  if (a.elements() == 0 || b.elements() == 0) return false;
  const std::optional<ByteRows> p = byte_rows(a), q = byte_rows(b);
  if (!p) return slice_shares_a_byte(a, b);
  if (!q) return slice_shares_a_byte(b, a);
  if (p->rows > 1 && q->rows > 1 && p->stride != q->stride) return rows_meet(*p, *q);
  // b begins `ahead` of a; row i of a and row j of b meet where
  // ahead - a's width < (i - j) stride < ahead + b's width.
  const std::int64_t stride = p->rows > 1 ? p->stride : q->rows > 1 ? q->stride : 1;
  const std::int64_t ahead = q->first - p->first;
  const std::int64_t past = ahead - p->width;  // the least multiple that is more
  const std::int64_t least = past / stride + (past >= 0 || past % stride == 0 ? 1 : 0);
  const std::int64_t apart = std::max(least, 1 - q->rows);
  return apart < p->rows && apart * stride < ahead + q->width;
}

void check_all_apart(std::string_view what, NamedTensors written, NamedTensors read) {
  const auto check = [&](const NamedTensor& one, const NamedTensor& other) {
    if (!other.tensor || !overlap(one.tensor, other.tensor)) return;
    fail(Status::invalid_argument, "{}: {} overlaps {}: must lie apart", what, one.name,
         other.name);
  };
  for (std::size_t i = 0; i < written.size(); ++i) {
    if (!written[i].tensor) continue;
    for (const NamedTensor& other : read) check(written[i], other);
    for (const NamedTensor& other : written.first(i)) check(written[i], other);
  }
}

void check_workspace_apart(std::string_view what, Workspace workspace, std::size_t needed,
                           Device device, NamedTensors written, NamedTensors read) {
  check_workspace(what, workspace, needed);
  if (needed == 0) return;
  const Tensor used = bytes_at(workspace.data, needed, device);
  const NamedTensor named[] = {{"workspace", used}};
  for (const NamedTensors operands : {written, read}) check_all_apart(what, named, operands);
}

void check_apart(std::string_view name, const Tensor& tensor, std::string_view other,
                 const Tensor& from) {
  if (!overlap(tensor, from)) return;
  fail(Status::invalid_argument, "{} overlaps {}: must lie apart", name, other);
}

namespace {
// Strides of one element are any.
bool same_view(const Tensor& a, const Tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (std::size_t d = 0; d < static_cast<std::size_t>(a.rank); ++d) {
    if (a.shape[d] != b.shape[d]) return false;
    if (a.shape[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}
}  // namespace

void check_same_or_apart(std::string_view name, const Tensor& tensor, std::string_view other,
                         const Tensor& from) {
  if (!overlap(tensor, from) || same_view(tensor, from)) return;
  fail(Status::invalid_argument, "{} overlaps {}: must be the same view, or lie apart", name,
       other);
}

void check_elements_apart(std::string_view name, const Tensor& tensor) {
  if (tensor.elements() == 0) return;
  const bool matrix = tensor.rank > 1;
  const std::int64_t rows = tensor.shape[0], columns = matrix ? tensor.shape[1] : 1;
  const std::int64_t down = std::abs(tensor.strides[0]), across = std::abs(tensor.strides[1]);
  const bool apart = (rows <= 1 || (down > 0 && (columns <= 1 || down >= columns * across))) &&
                     (columns <= 1 || across > 0);
  const bool turned = (columns <= 1 || (across > 0 && (rows <= 1 || across >= rows * down))) &&
                      (rows <= 1 || down > 0);
  if (apart || turned) return;
  fail(Status::invalid_argument, "{} has strides {}: its elements must not overlap", name,
       fmt::join(tensor.strides.begin(), tensor.strides.begin() + tensor.rank, " and "));
}

std::int64_t checked_product(std::string_view what, std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    fail(Status::invalid_argument, "{}: {} * {} overflows 64 bits", what, a, b);
  }
  return product;
}

}  // namespace shunt
