// How well a byte-level language model predicts a text.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "eval/language_model.hpp"

namespace shunt {

// Windows of `context` bytes start every `stride` bytes. Each byte but the first of all is scored
// once, in the first window that has it: the first window scores all of its bytes, every other its
// last `stride`, so that what is scored has at least context - stride bytes before it.
struct Windows {
  std::int64_t context = 512;
  std::int64_t stride = 256;  // 1 to context - 1
  bool operator==(const Windows&) const = default;
};

struct BitsPerByte {
  double bits = 0;         // -log2 p, over all scored bytes
  std::int64_t bytes = 0;  // scored
  double per_byte() const { return bytes > 0 ? bits / static_cast<double>(bytes) : 0; }
};

// Computed batch by batch of about `batch` tokens, summed in double in the order of the text: the
// same for any number of threads. `progress` gets the bytes scored so far, `hook` the hidden states
// of each byte once, in the order of the text, from the window that scores it. Throws
// Error{unsupported} for a model whose tokens are not the 256 bytes, Error{invalid_argument} for
// windows out of range or a text shorter than two bytes.
BitsPerByte bits_per_byte(LanguageModel& model, std::span<const std::uint8_t> text,
                          const Windows& windows,
                          const std::function<void(std::int64_t)>& progress = nullptr,
                          const HiddenHook& hook = nullptr, std::int64_t batch = 2048);

}  // namespace shunt
