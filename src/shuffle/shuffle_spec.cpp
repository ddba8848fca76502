#include <string>

#include "core/check.hpp"
#include "core/json.hpp"
#include "cuda/runtime.hpp"
#include "shunt/shuffle.hpp"

namespace shunt {

namespace {

constexpr int max_ranks = 4096, max_experts = 65536;
constexpr std::int64_t max_segments = std::int64_t{1} << 20;

Support legal(const ShuffleSpec& spec) {
  if (spec.ranks < 1 || spec.ranks > max_ranks) {
    return refuse("ranks is {}: must be 1 to {}", spec.ranks, max_ranks);
  }
  if (spec.experts < 1 || spec.experts > max_experts) {
    return refuse("experts is {}: must be 1 to {}", spec.experts, max_experts);
  }
  if (std::int64_t{spec.ranks} * spec.experts > max_segments) {
    return refuse("experts is {}: times ranks, {}, must be at most {}", spec.experts, spec.ranks,
                  max_segments);
  }
  if (spec.first_expert < 0 || spec.first_expert >= spec.experts) {
    return refuse("first_expert is {}: must be 0 to experts - 1, {}", spec.first_expert,
                  spec.experts - 1);
  }
  if (spec.end_expert != -1 &&
      (spec.end_expert <= spec.first_expert || spec.end_expert > spec.experts)) {
    return refuse("end_expert is {}: must be {} to {}, or -1 for the last", spec.end_expert,
                  spec.first_expert + 1, spec.experts);
  }
  return {};
}

}  // namespace

Support supports(const ShuffleSpec& spec, Device device) {
  if (Support support = legal(spec); !support) return support;
  return cuda_engine::supported_device("shuffle", device);
}

std::string to_json(const ShuffleSpec& spec) {
  return SpecWriter()
      .add("ranks", spec.ranks)
      .add("experts", spec.experts)
      .add("first_expert", spec.first_expert)
      .add("end_expert", spec.end_expert)
      .add("padded", spec.padded)
      .add("zero_fill", spec.zero_fill)
      .text();
}

ShuffleSpec shuffle_spec_from_json(const std::string& json) {
  SpecReader reader("ShuffleSpec", json);
  ShuffleSpec spec;
  reader.require("ranks");
  reader.require("experts");
  reader.read("ranks", spec.ranks, 1, max_ranks);
  reader.read("experts", spec.experts, 1, max_experts);
  reader.read("first_expert", spec.first_expert, 0, max_experts - 1);
  reader.read("end_expert", spec.end_expert, -1, max_experts);
  reader.read("padded", spec.padded);
  reader.read("zero_fill", spec.zero_fill);
  reader.finish();
  if (const Support support = legal(spec); !support) {
    fail(Status::invalid_argument, "ShuffleSpec: {}", support.reason);
  }
  return spec;
}

Support supports(const ScatterAddSpec&, Device device) {
  return cuda_engine::supported_device("scatter_add_padded", device);
}

std::string to_json(const ScatterAddSpec& spec) {
  return SpecWriter().add("accumulate", spec.accumulate).text();
}

ScatterAddSpec scatter_add_spec_from_json(const std::string& json) {
  SpecReader reader("ScatterAddSpec", json);
  ScatterAddSpec spec;
  reader.read("accumulate", spec.accumulate);
  reader.finish();
  return spec;
}

}  // namespace shunt
