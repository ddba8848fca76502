// A published checkpoint whose tensors have other types, shapes and names than they should: refused
// with an Error, or weights that can be read to their last byte.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/model.hpp"
#include "checkpoint/read_weights.hpp"
#include "shunt/error.hpp"
#include "shunt/safetensors.hpp"

namespace {

using shunt::DType;
using shunt::Tensor;

struct Fixture {
  std::string config;
  shunt::SafetensorsFile file;
};

const std::vector<Fixture>& fixtures() {
  static const std::vector<Fixture> all = [] {
    std::vector<std::string> folders;
    for (const auto& entry :
         std::filesystem::directory_iterator(SHUNT_SOURCE_DIR "/tests/data/quantised")) {
      if (entry.is_directory()) folders.push_back(entry.path().string());
    }
    std::sort(folders.begin(), folders.end());
    std::vector<Fixture> result;
    for (const std::string& folder : folders) {
      std::ifstream config(folder + "/config.json");
      result.push_back({{std::istreambuf_iterator<char>(config), {}},
                        shunt::SafetensorsFile::open(folder + "/model.safetensors")});
    }
    return result;
  }();
  return all;
}

// What is left of the input, a byte after the other; zeros behind its end.
struct Bytes {
  const std::uint8_t* at;
  const std::uint8_t* end;
  bool more() const { return at < end; }
  std::size_t next(std::size_t below) {
    return at < end ? *at++ % std::max<std::size_t>(1, below) : 0;
  }
};

constexpr DType dtypes[] = {DType::f32,     DType::bf16,   DType::f16, DType::i8,
                            DType::u8,      DType::i32,    DType::i64, DType::f8_e4m3,
                            DType::f8_e8m0, DType::f4_e2m1};
constexpr std::int64_t sizes[] = {0, 1, 2, 3, 4, 8, 16, 17, 32, 64, 128, 136};

void change(Tensor& t, Bytes& bytes) {
  const std::size_t d = bytes.next(static_cast<std::size_t>(std::max(1, t.rank)));
  switch (bytes.next(6)) {
    case 0:
      t.dtype = dtypes[bytes.next(std::size(dtypes))];
      break;
    case 1:
      t.shape[d] = sizes[bytes.next(std::size(sizes))];
      break;
    case 2:
      t.shape[d] *= std::int64_t{1} << bytes.next(3);
      break;
    case 3:
      t.shape[d] >>= bytes.next(4);
      break;
    case 4:
      std::swap(t.shape[d], t.shape[0]);
      break;
    default:
      t.rank = static_cast<int>(bytes.next(shunt::max_rank + 1));
      for (std::size_t i = static_cast<std::size_t>(t.rank); i < shunt::max_rank; ++i)
        t.shape[i] = 0;
      for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i) {
        t.shape[i] = std::max<std::int64_t>(1, t.shape[i]);
      }
  }
}

void read_all(const std::vector<shunt::PackedMatrix>& matrices) {
  for (const shunt::PackedMatrix& m : matrices) {
    shunt::check_packed("matrix", m, shunt::Device{});
    std::vector<float> values(static_cast<std::size_t>(m.n * m.k));
    shunt::unpack(m, shunt::view(values.data(), {m.n, m.k}));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes{data, data + size};
  const Fixture& fixture = fixtures()[bytes.next(fixtures().size())];
  const Fixture& words = bytes.next(4) == 0 ? fixtures()[bytes.next(fixtures().size())] : fixture;
  std::map<std::string, Tensor> tensors;
  for (const std::string& name : fixture.file.names()) {
    tensors.emplace(name, fixture.file.get(name));
  }
  while (bytes.more()) {
    const auto at =
        std::next(tensors.begin(), static_cast<std::ptrdiff_t>(bytes.next(tensors.size())));
    switch (bytes.next(4)) {
      case 0:
        if (tensors.size() > 1) tensors.erase(at);
        break;
      case 1: {
        const auto other =
            std::next(tensors.begin(), static_cast<std::ptrdiff_t>(bytes.next(tensors.size())));
        const std::string name = at->first.substr(0, at->first.rfind('.')) +
                                 other->first.substr(other->first.rfind('.'));
        tensors[name] = at->second;
        break;
      }
      default:
        change(at->second, bytes);
    }
  }
  // Each in memory of exactly its size, so that a read behind its end is seen.
  std::vector<std::unique_ptr<char[]>> memory;
  for (auto& [name, t] : tensors) {
    std::int64_t stride = 1;
    for (int d = t.rank - 1; d >= 0; --d) {
      const auto i = static_cast<std::size_t>(d);
      t.strides[i] = stride;
      stride *= t.shape[i];
      if (stride > 1 << 20) return 0;
    }
    const auto wanted = static_cast<std::size_t>(t.bytes());
    const auto source = fixture.file.contains(name) ? fixture.file.get(name) : Tensor{};
    memory.push_back(std::make_unique<char[]>(wanted));
    if (source) {
      std::memcpy(memory.back().get(), source.data,
                  std::min(wanted, static_cast<std::size_t>(source.bytes())));
    }
    t.data = memory.back().get();
  }
  try {
    const shunt::Model model = shunt::read_model("config.json", words.config);
    const shunt::LayerSpec spec = model.spec(0);
    const std::string prefix = fixture.file.names().front().substr(
        0, fixture.file.names().front().find("layers.0.") + std::strlen("layers.0."));
    const shunt::LayerWeights weights =
        shunt::read_weights(shunt::TensorStore::of("folder", tensors), model.plan.names,
                            model.quantised, spec, prefix, true);
    read_all(weights.experts.packed_gate);
    read_all(weights.experts.packed_up);
    read_all(weights.experts.packed_down);
  } catch (const shunt::Error& error) {
    for (const char* c = error.what(); *c != '\0'; ++c) {
      if (*c == '\n') std::abort();
    }
  }
  return 0;
}
