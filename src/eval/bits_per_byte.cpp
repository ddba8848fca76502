#include "eval/bits_per_byte.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.hpp"

namespace shunt {

namespace {

// -log2 of the softmax at `target`.
double surprise(std::span<const float> logits, std::size_t target) {
  const double largest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return (std::log(sum) + largest - static_cast<double>(logits[target])) / std::log(2.0);
}

// The rows of windows that are no repetition: of bytes from `scored` on, and of the first byte.
// They are gathered into `rows`.
Tensor view_once(const Tensor& hidden, const std::vector<std::int64_t>& begins,
                 const std::vector<std::int64_t>& lengths, std::int64_t scored,
                 std::vector<float>& rows) {
  const std::int64_t width = hidden.shape[1];
  rows.clear();
  std::int64_t first = 0, reached = scored == 1 ? 0 : scored;
  for (std::size_t w = 0; w < begins.size(); ++w) {
    const std::int64_t end = begins[w] + lengths[w];
    const float* from = hidden.as<const float>() + (first + reached - begins[w]) * width;
    rows.insert(rows.end(), from, from + (end - reached) * width);
    reached = end;
    first += lengths[w];
  }
  return view(rows.data(), {static_cast<std::int64_t>(rows.size()) / width, width});
}

}  // namespace

BitsPerByte bits_per_byte(LanguageModel& model, std::span<const std::uint8_t> text,
                          const Windows& windows, const std::function<void(std::int64_t)>& progress,
                          const HiddenHook& hook, std::int64_t batch) {
  const std::int64_t vocabulary = model.spec().vocabulary;
  if (vocabulary != 256) {
    fail(Status::unsupported,
         "the model has {} tokens: only byte-level models, of 256, are evaluated; Shunt has no "
         "tokenizer",
         vocabulary);
  }
  if (windows.context < 2 || windows.context > model.spec().max_positions) {
    fail(Status::invalid_argument, "context is {}: must be 2 to the model's {} positions",
         windows.context, model.spec().max_positions);
  }
  if (windows.stride < 1 || windows.stride >= windows.context) {
    fail(Status::invalid_argument, "stride is {}: must be 1 to {}, less than the context",
         windows.stride, windows.context - 1);
  }
  const auto size = static_cast<std::int64_t>(text.size());
  if (size < 2) fail(Status::invalid_argument, "the text has {} bytes: must be at least 2", size);

  BitsPerByte result;
  std::int64_t begin = 0;   // of the next window
  std::int64_t scored = 1;  // bytes before this one are done
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> begins, lengths;
  std::vector<float> logits, rows;
  while (scored < size) {
    tokens.clear();
    begins.clear();
    lengths.clear();
    std::int64_t reached = scored;
    while (
        reached < size &&
        (tokens.empty() || static_cast<std::int64_t>(tokens.size()) + windows.context <= batch)) {
      const std::int64_t end = std::min(begin + windows.context, size);
      for (std::int64_t i = begin; i < end; ++i)
        tokens.push_back(text[static_cast<std::size_t>(i)]);
      begins.push_back(begin);
      lengths.push_back(end - begin);
      reached = end;
      begin += windows.stride;
    }
    logits.resize(tokens.size() * static_cast<std::size_t>(vocabulary));
    HiddenHook once;
    if (hook) {
      once = [&](int layer, const Tensor& hidden) {
        hook(layer, view_once(hidden, begins, lengths, scored, rows));
      };
    }
    model.forward(tokens, lengths, logits, once);
    std::int64_t row = 0;
    for (std::size_t w = 0; w < begins.size(); ++w) {
      const std::int64_t end = begins[w] + lengths[w];
      for (std::int64_t i = scored; i < end; ++i) {
        const auto at = static_cast<std::size_t>((row + i - 1 - begins[w]) * vocabulary);
        result.bits += surprise({logits.data() + at, static_cast<std::size_t>(vocabulary)},
                                text[static_cast<std::size_t>(i)]);
        ++result.bytes;
      }
      scored = end;
      row += lengths[w];
    }
    if (progress) progress(scored);
  }
  return result;
}

}  // namespace shunt
