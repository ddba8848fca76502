// Specs from JSON: any bytes give a spec that survives the way back, or an Error of one line.
#include <cstddef>
#include <cstdint>
#include <string>

#include "shunt/layer.hpp"
#include "shunt/route.hpp"

namespace {

template <class Read>
void try_to_read(Read read, const std::string& text) {
  try {
    const auto spec = read(text);
    const std::string json = to_json(spec);
    if (!(read(json) == spec) || describe(spec).find('\n') != std::string::npos) __builtin_trap();
  } catch (const shunt::Error& error) {
    const std::string message = error.what();
    if (message.empty() || message.find('\n') != std::string::npos) __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try_to_read(shunt::route_spec_from_json, text);
  try_to_read(shunt::layer_spec_from_json, text);
  return 0;
}
