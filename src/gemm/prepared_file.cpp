// Prepared weights as files.
#include "gemm/prepared_file.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>
static_assert(XXH_VERSION_NUMBER >= 800, "XXH3 gives other numbers before xxHash 0.8");

#include "core/check.hpp"
#include "core/json.hpp"
#include "core/shown.hpp"
#include "gemm/check_prepared.hpp"
#include "gemm/fragment_layout.hpp"
#include "gemm/k_order.hpp"
#include "gemm/packed_panels.hpp"

namespace shunt {

namespace {

constexpr const char* kind_key = "shunt.prepared_weights";
constexpr const char* words_key = "weights";
constexpr const char* tensor_name = "prepared";
constexpr const char* checksum_key = "checksum.";
constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};

DType dtype_named(const std::string& name) {
  for (const DType dtype : dtypes) {
    if (name == to_string(dtype)) return dtype;
  }
  fail(Status::invalid_argument, "dtype is '{}': must be f32, bf16 or f16", name);
}

std::string checksum_of(const Tensor& dense) {
  return fmt::format("{:016x}", XXH3_64bits(dense.data, static_cast<std::size_t>(dense.bytes())));
}

}  // namespace

std::string layout_name(DeviceType device, DType dtype, const FormatSpec& format, RowFormat rows) {
  if (format != FormatSpec{}) {
    if (device == DeviceType::cpu) return "cpu.packed64";
    if (rows != RowFormat::as_dtype) return "cuda.packed128x128";
    // Files that call this layout by the plain name have its codes in other places.
    const bool e2m1 = format.format == Format::nvfp4 || format.format == Format::mxfp4 ||
                      format.format == Format::sparse_nvfp4;
    return dtype == DType::f16 && e2m1 ? "cuda.fragments128x128.e2m1_f16" : "cuda.fragments128x128";
  }
  if (device == DeviceType::cpu) return "cpu.panels64";
  return dtype == DType::f32 ? "cuda.rows16" : "cuda.tiles128x64";
}

std::string saved_words(const PreparedWeights& weights) {
  if (weights.rows == RowFormat::nvfp4) {
    // Compute capabilities 10.0 and 12.0 have a layout each, which no name tells apart here.
    fail(Status::unsupported, "save_prepared: weights are for rows in nvfp4: prepare them anew");
  }
  SpecWriter words;
  words.add("layout",
            layout_name(weights.device.type, weights.dtype, weights.format, weights.rows));
  words.add("dtype", to_string(weights.dtype));
  words.add("groups", weights.groups);
  words.add("n", weights.n);
  words.add("k", weights.k);
  words.add("paired", weights.paired);
  if (weights.format != FormatSpec{}) words.add("format", to_string(weights.format));
  if (weights.rows != RowFormat::as_dtype) words.add("rows", static_cast<int>(weights.rows));
  return words.text();
}

PreparedWeights read_saved_words(const Context& context, const std::string& where,
                                 const std::string& words, const Tensor& bytes) {
  PreparedWeights weights{.device = context.device()};
  std::string layout, dtype;
  try {
    SpecReader reader("metadata", words);
    const auto text = [&](const char* key) {
      std::optional<std::string> value = reader.take_text(key);
      if (!value) fail(Status::invalid_argument, "metadata has no '{}'", key);
      return *value;
    };
    layout = text("layout");
    dtype = text("dtype");
    weights.dtype = dtype_named(dtype);
    if (reader.has("format")) weights.format = resolved(format_from_string(text("format")));
    for (const char* key : {"groups", "n", "k", "paired"}) reader.require(key);
    reader.read("groups", weights.groups, 0, 1 << 24);
    reader.read("n", weights.n, 0, std::int64_t{1} << 40);
    reader.read("k", weights.k, 0, std::int64_t{1} << 40);
    reader.read("paired", weights.paired);
    int rows = 0;
    reader.read("rows", rows, 0, static_cast<int>(RowFormat::fp8_block));
    weights.rows = static_cast<RowFormat>(rows);
    reader.finish();
    if (layout == layout_name(context.device().type, weights.dtype, weights.format, weights.rows)) {
      weights.bytes = prepared_bytes(context, weights.dtype, weights.format, weights.groups,
                                     weights.n, weights.k, weights.paired, weights.rows);
    }
  } catch (const Error& error) {
    fail(Status::bad_file, "{}: {}", where, error.what());
  }
  const std::string ours =
      layout_name(context.device().type, weights.dtype, weights.format, weights.rows);
  if (layout != ours) {
    fail(
        Status::unsupported,
        "{}: the layout is {}: this engine reads {} for {}; prepare the checkpoint's weights on it",
        where, layout, ours, weights.format == FormatSpec{} ? dtype : to_string(weights.format));
  }
  if (bytes.dtype != DType::u8 || bytes.rank != 1 ||
      bytes.shape[0] != static_cast<std::int64_t>(weights.bytes)) {
    fail(Status::bad_file, "{}: the bytes are {}: must be u8 [{}] for {} [{}, {}, {}]", where,
         bytes.describe(), weights.bytes, dtype, weights.groups, weights.n, weights.k);
  }
  const auto check_groups = [&](std::int64_t group_bytes, const auto& follows) {
    for (int g = 0; g < weights.groups; ++g) {
      if (follows(bytes.as<const char>() + g * group_bytes)) continue;
      fail(Status::bad_file, "{}: the order of group {}'s columns is damaged: must be 0 to {}",
           where, g, weights.k - 1);
    }
  };
  if (weights.format != FormatSpec{} && context.device().type == DeviceType::cpu) {
    const cpu_engine::PackedPanels panels{weights.format, weights.n, weights.k, weights.paired};
    check_groups(panels.group_bytes(),
                 [&](const char* group) { return can_be_followed(panels, group); });
  } else if (weights.format.ordered) {
    const cuda_engine::FragmentLayout fragments{weights.format, weights.dtype, weights.n, weights.k,
                                                weights.paired};
    check_groups(fragments.group_bytes(), [&](const char* group) {
      return follows_k(group + fragments.order_at(), weights.k);
    });
  }
  return weights;
}

void write_with_checksums(const std::string& path,
                          const std::vector<std::pair<std::string, Tensor>>& tensors,
                          std::map<std::string, std::string> metadata) {
  for (const auto& [name, tensor] : tensors) metadata[checksum_key + name] = checksum_of(tensor);
  write_safetensors(path, tensors, metadata);
}

void check_checksums(const SafetensorsFile& file) {
  const auto& metadata = file.metadata();
  const std::string key = checksum_key;
  const auto any = metadata.lower_bound(key);
  if (any == metadata.end() || !any->first.starts_with(key)) return;
  for (const std::string& name : file.names()) {
    const auto saved = metadata.find(key + name);
    const std::string here = checksum_of(file.flat(name));
    if (saved != metadata.end() && here == saved->second) continue;
    fail(Status::bad_file, "{}: the bytes of {} are damaged: their checksum is {}: must be {}",
         file.path(), clean(name), here,
         saved == metadata.end() ? "said, as others' are" : clean(saved->second));
  }
}

void save_prepared(const Context& context, const PreparedWeights& weights,
                   const std::string& path) {
  if (!weights && (weights.bytes > 0 || weights.groups == 0)) {
    fail(Status::invalid_argument, "save_prepared: no weights are given");
  }
  if (weights) check_prepared_memory("save_prepared", weights, context);
  std::vector<char> copy;
  const void* data = weights.data;
  if (weights.device.type != DeviceType::cpu) {
    copy.resize(weights.bytes);
    context.copy(copy.data(), weights.data, weights.bytes);
    data = copy.data();
  }
  write_with_checksums(
      path, {{tensor_name, view(data, DType::u8, {static_cast<std::int64_t>(weights.bytes)})}},
      {{kind_key, std::string(saved_version)}, {words_key, saved_words(weights)}});
}

PreparedWeights load_prepared(const Context& context, const std::string& path, Buffer& memory) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto& metadata = file.metadata();
  const auto kind = metadata.find(kind_key), words = metadata.find(words_key);
  if (kind == metadata.end() || words == metadata.end()) {
    fail(Status::bad_file, "{}: holds no prepared weights: its metadata has no '{}'", path,
         kind == metadata.end() ? kind_key : words_key);
  }
  if (kind->second != saved_version) {
    fail(Status::unsupported, "{}: {} is '{}': this build reads version {}", path, kind_key,
         kind->second, saved_version);
  }
  const Tensor bytes = file.get(tensor_name);
  PreparedWeights weights = read_saved_words(context, path, words->second, bytes);
  check_checksums(file);
  Buffer there = context.allocate(weights.bytes);
  context.copy(there.data(), bytes.data, weights.bytes);
  memory = std::move(there);
  weights.data = memory.data();
  return weights;
}

}  // namespace shunt
