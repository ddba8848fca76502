// Any bytes as a safetensors file: refused with an Error, or every tensor lies within them.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "checkpoint/safetensors_header.hpp"
#include "shunt/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A copy of exactly this size, so that a read behind its end is seen.
  const std::vector<unsigned char> bytes(data, data + size);
  try {
    const shunt::SafetensorsHeader header =
        shunt::read_safetensors_header("file", bytes.data(), bytes.size());
    for (const auto& [name, entry] : header.tensors) {
      if (entry.begin > entry.end || entry.end > size) std::abort();
      const int width = shunt::bits(entry.dtype);
      if (width > 8 && entry.begin % static_cast<unsigned>(width / 8) != 0) std::abort();
    }
  } catch (const shunt::Error& error) {
    if (error.status() != shunt::Status::bad_file) std::abort();
    for (const char* c = error.what(); *c != '\0'; ++c) {
      if (*c == '\n') std::abort();  // one line, whatever the file says
    }
  }
  return 0;
}
