#include "checkpoint/safetensors_header.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

struct DTypeName {
  std::string_view name;
  DType dtype;
};
constexpr std::array<DTypeName, 17> dtype_names = {{{"F32", DType::f32},
                                                    {"F16", DType::f16},
                                                    {"BF16", DType::bf16},
                                                    {"F64", DType::f64},
                                                    {"I8", DType::i8},
                                                    {"I16", DType::i16},
                                                    {"I32", DType::i32},
                                                    {"I64", DType::i64},
                                                    {"U8", DType::u8},
                                                    {"U16", DType::u16},
                                                    {"U32", DType::u32},
                                                    {"U64", DType::u64},
                                                    {"BOOL", DType::boolean},
                                                    {"F8_E4M3", DType::f8_e4m3},
                                                    {"F8_E5M2", DType::f8_e5m2},
                                                    {"F8_E8M0", DType::f8_e8m0},
                                                    {"F4", DType::f4_e2m1}}};

std::uint64_t read_length(const unsigned char* data) {
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | data[i];
  return length;
}

// A non-negative integer below 2^63, or a throw naming the tensor and the field.
std::int64_t natural(const std::string& where, std::string_view field,
                     const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return static_cast<std::int64_t>(number);
    }
  }
  fail(Status::bad_file, "{}: {} holds {}: must be an integer from 0 to 2^63 - 1", where, field,
       shown(value));
}

TensorEntry read_entry(const std::string& where, const nlohmann::json& json, std::uint64_t start,
                       std::uint64_t buffer) {
  if (!json.is_object()) {
    fail(Status::bad_file, "{} is {}: must be an object", where, shown(json));
  }
  for (const auto& item : json.items()) {
    if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets") {
      fail(Status::bad_file, "{}: key '{}' is unknown: must be dtype, shape or data_offsets", where,
           clean(item.key()));
    }
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!json.contains(key)) fail(Status::bad_file, "{}: {} is missing", where, key);
  }
  TensorEntry entry;
  const nlohmann::json& dtype = json["dtype"];
  const DType* known =
      dtype.is_string() ? dtype_by_name(dtype.get_ref<const std::string&>()) : nullptr;
  if (known == nullptr) {
    fail(Status::bad_file,
         "{}: dtype is {}: must be one of F32 F16 BF16 F64 I8 .. U64 BOOL F8_E4M3 "
         "F8_E5M2 F8_E8M0 F4",
         where, shown(dtype));
  }
  entry.dtype = *known;

  const nlohmann::json& shape = json["shape"];
  if (!shape.is_array()) {
    fail(Status::bad_file, "{}: shape is {}: must be an array", where, shown(shape));
  }
  // A dimension of 0 must not hide the overflow of the others.
  const auto width = static_cast<std::uint64_t>(bits(entry.dtype));
  std::uint64_t total_bits = width;
  bool empty = false;
  for (const nlohmann::json& dimension : shape) {
    const std::int64_t size = natural(where, "shape", dimension);
    entry.shape.push_back(size);
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(total_bits, static_cast<std::uint64_t>(size), &total_bits)) {
      fail(Status::bad_file, "{}: shape is {}: the size overflows 64 bits", where, shown(shape));
    }
  }
  if (empty) total_bits = 0;
  if (total_bits % 8 != 0) {
    fail(Status::bad_file, "{}: shape is {}: {} bits are no whole number of bytes", where,
         shown(shape), total_bits);
  }

  const nlohmann::json& offsets = json["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) {
    fail(Status::bad_file, "{}: data_offsets is {}: must be [begin, end]", where, shown(offsets));
  }
  const auto begin = static_cast<std::uint64_t>(natural(where, "data_offsets", offsets[0]));
  const auto end = static_cast<std::uint64_t>(natural(where, "data_offsets", offsets[1]));
  if (begin > end || end > buffer) {
    fail(Status::bad_file,
         "{}: data_offsets is {}: must be ascending and within the {} bytes of "
         "the file behind its header",
         where, shown(offsets), buffer);
  }
  if (end - begin != total_bits / 8) {
    fail(Status::bad_file, "{}: data_offsets is {}, {} bytes: {} {} takes {}", where,
         shown(offsets), end - begin, name_of_dtype(entry.dtype), shown(shape), total_bits / 8);
  }
  entry.begin = start + begin;
  entry.end = start + end;
  return entry;
}

}  // namespace

const DType* dtype_by_name(std::string_view name) {
  for (const DTypeName& known : dtype_names) {
    if (known.name == name) return &known.dtype;
  }
  return nullptr;
}

std::string_view name_of_dtype(DType dtype) {
  for (const DTypeName& known : dtype_names) {
    if (known.dtype == dtype) return known.name;
  }
  fail(Status::invalid_argument, "dtype: {} is none of the enumeration", static_cast<int>(dtype));
}

SafetensorsHeader read_safetensors_header(const std::string& path, const unsigned char* data,
                                          std::uint64_t size) {
  if (size < 8) {
    fail(Status::bad_file,
         "{}: {} bytes: a safetensors file begins with the 8-byte length of its "
         "header",
         path, size);
  }
  const std::uint64_t length = read_length(data);
  if (length > max_header_bytes) {
    fail(Status::bad_file, "{}: header length is {}: must be at most {}", path, length,
         max_header_bytes);
  }
  if (length > size - 8) {
    fail(Status::bad_file,
         "{}: header length is {}, but only {} bytes follow: the file is "
         "truncated or no safetensors file",
         path, length, size - 8);
  }
  const std::uint64_t start = 8 + length;
  const std::uint64_t buffer = size - start;
  const std::string_view text(reinterpret_cast<const char*>(data) + 8, length);
  const nlohmann::json json = parse_object(path + ": header", text);

  SafetensorsHeader header;
  for (const auto& item : json.items()) {
    if (item.key() == "__metadata__") {
      const nlohmann::json& metadata = item.value();
      if (!metadata.is_object()) {
        fail(Status::bad_file, "{}: __metadata__ is {}: must be an object", path, shown(metadata));
      }
      for (const auto& pair : metadata.items()) {
        if (!pair.value().is_string()) {
          fail(Status::bad_file, "{}: __metadata__ '{}' is {}: must be a string", path,
               clean(pair.key()), shown(pair.value()));
        }
        header.metadata.emplace(pair.key(), pair.value().get<std::string>());
      }
      continue;
    }
    const std::string where = fmt::format("{}: tensor '{}'", path, clean(item.key()));
    header.tensors.emplace(item.key(), read_entry(where, item.value(), start, buffer));
  }

  // The tensors must tile the buffer: no overlap, no gap.
  std::vector<std::pair<const std::string*, const TensorEntry*>> order;
  order.reserve(header.tensors.size());
  for (const auto& [name, entry] : header.tensors) order.emplace_back(&name, &entry);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  std::uint64_t position = start;
  const std::string* previous = nullptr;
  for (const auto& [name, entry] : order) {
    if (entry->begin < position) {
      fail(Status::bad_file, "{}: tensors '{}' and '{}' overlap at byte {}", path, clean(*previous),
           clean(*name), entry->begin);
    }
    if (entry->begin > position) {
      fail(Status::bad_file, "{}: {} bytes before tensor '{}' belong to no tensor", path,
           entry->begin - position, clean(*name));
    }
    position = entry->end;
    previous = name;
  }
  if (position != size) {
    fail(Status::bad_file, "{}: the last {} bytes belong to no tensor", path, size - position);
  }
  return header;
}

std::string write_safetensors_header(const std::vector<WrittenTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::int64_t offset = 0;
  for (const WrittenTensor& tensor : tensors) {
    const std::int64_t end = offset + tensor.bytes;
    header[std::string(tensor.name)] = {{"dtype", name_of_dtype(tensor.dtype)},
                                        {"shape", tensor.shape},
                                        {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

}  // namespace shunt
