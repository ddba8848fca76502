#include "capi/call.hpp"

#include <algorithm>
#include <array>
#include <new>

namespace shunt::capi {

namespace {

// A plain array, so that recording an error cannot fail itself.
thread_local std::array<char, 2048> last_error{};

// Larger than any struct here will ever be: a size that was never set is refused before it is
// believed.
constexpr std::uint64_t largest_struct = 4096;

}  // namespace

void set_last_error(const char* message) noexcept {
  const std::size_t length = std::min(std::strlen(message), last_error.size() - 1);
  std::memcpy(last_error.data(), message, length);
  last_error[length] = '\0';
}

shunt_status handle_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    set_last_error(error.what());
    return static_cast<shunt_status>(error.status());
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return SHUNT_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return SHUNT_INTERNAL;
  } catch (...) {
    set_last_error("an unknown exception");
    return SHUNT_INTERNAL;
  }
}

std::size_t Call::known_size(const char* name, const void* given, std::size_t size) const {
  not_null(name, given == nullptr ? nullptr : static_cast<const char*>(given));
  std::uint64_t claimed = 0;
  std::memcpy(&claimed, given, sizeof claimed);
  if (claimed < 8 || claimed > largest_struct || claimed % 8 != 0) {
    wrong("{}.struct_size is {}: must be sizeof the struct, which is {} in this version", name,
          claimed, size);
  }
  const auto* const bytes = static_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min<std::uint64_t>(size, claimed), bytes + claimed,
                  [](unsigned char byte) { return byte != 0; })) {
    wrong("{}.struct_size is {}, and past the {} bytes that this version knows not all is 0", name,
          claimed, size);
  }
  return std::min<std::uint64_t>(size, claimed);
}

Tensor Call::tensor(const char* name, const shunt_tensor* given) const {
  if (given == nullptr) return {};
  if (given->rank < 0 || given->rank > max_rank) {
    wrong("{} has rank {}: must be 0 to {}", name, given->rank, max_rank);
  }
  if (given->dtype < 0 || given->dtype > SHUNT_F4_E2M1) {
    wrong("{} has dtype {}: must be 0 to {}", name, given->dtype, int{SHUNT_F4_E2M1});
  }
  if (given->device_type != SHUNT_CPU && given->device_type != SHUNT_CUDA) {
    wrong("{} has device_type {}: must be {} or {}", name, given->device_type, int{SHUNT_CPU},
          int{SHUNT_CUDA});
  }
  Tensor tensor{.data = given->data,
                .dtype = static_cast<DType>(given->dtype),
                .device = {static_cast<DeviceType>(given->device_type), given->device_index},
                .rank = given->rank};
  std::int64_t elements = 1;
  for (int d = 0; d < given->rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    tensor.shape[i] = given->shape[d];
    tensor.strides[i] = given->strides[d];
    if (given->shape[d] < 0) wrong("{} has shape[{}] {}: below 0", name, d, given->shape[d]);
    elements = checked_product(name, elements, given->shape[d]);
  }
  bytes(tensor.dtype, elements);
  return tensor;
}

bool Call::flag(const char* name, std::int32_t value) const {
  if (value != 0 && value != 1) wrong("{} is {}: must be 0 or 1", name, value);
  return value == 1;
}

void Call::reserved(const char* name, std::int32_t value) const {
  if (value != 0) wrong("{} is {}: must be 0", name, value);
}

void Call::text(const std::string& whole, char* to, std::size_t capacity,
                std::size_t* length) const {
  if (to == nullptr && capacity > 0) wrong("text is NULL, but capacity is {}", capacity);
  if (capacity > 0) {
    std::size_t copied = std::min(whole.size(), capacity - 1);
    // Cut between characters: continuation bytes are 10xxxxxx.
    while (copied < whole.size() && copied > 0 &&
           (static_cast<unsigned char>(whole[copied]) & 0xC0U) == 0x80U) {
      --copied;
    }
    std::memcpy(to, whole.data(), copied);
    to[copied] = '\0';
  }
  if (length != nullptr) *length = whole.size();
}

shunt_tensor to_c(const Tensor& tensor) {
  shunt_tensor result{};
  result.data = tensor.data;
  result.dtype = static_cast<std::int32_t>(tensor.dtype);
  result.device_type = static_cast<std::int32_t>(tensor.device.type);
  result.device_index = tensor.device.index;
  result.rank = tensor.rank;
  for (int d = 0; d < tensor.rank; ++d) {
    result.shape[d] = tensor.shape[static_cast<std::size_t>(d)];
    result.strides[d] = tensor.strides[static_cast<std::size_t>(d)];
  }
  return result;
}

}  // namespace shunt::capi

const char* shunt_version(void) { return SHUNT_VERSION; }

const char* shunt_status_name(shunt_status status) {
  return shunt::to_string(static_cast<shunt::Status>(status));
}

const char* shunt_last_error(void) { return shunt::capi::last_error.data(); }
