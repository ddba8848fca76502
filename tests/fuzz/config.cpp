// Any text as a config.json: refused with an Error, or specs that survive their own JSON.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "checkpoint/model.hpp"
#include "shunt/checkpoint.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const shunt::Model model = shunt::read_model("config.json", text);
    for (int layer = 0; layer < 4; ++layer) {
      if (!model.moe(layer)) continue;
      const shunt::LayerSpec spec = model.spec(layer);
      if (!shunt::supports(spec, {}, shunt::Device{})) continue;
      (void)shunt::describe(spec);
      if (shunt::layer_spec_from_json(shunt::to_json(spec)) != spec) std::abort();
    }
  } catch (const shunt::Error& error) {
    for (const char* c = error.what(); *c != '\0'; ++c) {
      if (*c == '\n') std::abort();
    }
  }
  return 0;
}
