// How the linear layers of a checkpoint are quantised: what config.json says of it, and a module's
// tensors as a PackedMatrix.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/excluded.hpp"
#include "checkpoint/repacking.hpp"
#include "checkpoint/tensor_store.hpp"
#include "shunt/format.hpp"

namespace shunt {

// What a field says of packed weights.
struct QuantisedClaim {
  std::string field;            // with its value: "config.json: quantization_config: bits is 4"
  std::vector<Format> formats;  // that agree
  bool unread = false;          // a scheme that is not read, of whatever other layers
};

// All that quantization_config says of some modules' weights. Tensors tell what it leaves out.
struct QuantisedScheme {
  ModuleList targets;  // empty: all linear layers
  std::vector<QuantisedClaim> claims;
  std::vector<int> groups;    // group sizes, -1 for a whole row
  std::optional<bool> zeros;  // whether zero points are stored that are not 8
  bool order = false;         // an order of activations is stored
  std::string strategy;       // how many scales a matrix has: tensor, channel, group or block
  std::string zeros_field, order_field, strategy_field;  // that say so, as QuantisedClaim::field
};

// quantization_config, as far as tensors do not say it themselves, and what they are held to.
struct QuantisedConfig {
  std::string method;          // quant_method; empty: none is given
  bool next_zero = false;      // GPTQ's first format stores a zero point less 1
  bool blocks_of_32 = false;   // fp8: a scale of 32 rows by 32 columns
  std::optional<bool> blocks;  // fp8: whether scales are of 128 rows by 128 columns; none: not said
  FormatSpec own{};            // of the method shunt
  std::vector<QuantisedScheme> schemes;
  std::vector<QuantisedClaim> experts;                        // of routed experts alone
  std::map<std::string, std::vector<QuantisedClaim>> layers;  // of ModelOpt's quantized_layers
  // Modules that stay plain; unless empty, those that alone do not; those that do not whatever
  // `excluded` says.
  ModuleList excluded, targets, named;
  // The field that excludes, and what holds it, for messages.
  std::string list = "modules_to_not_convert", holder = "quantization_config";

  // The schemes that may be meant for a module.
  std::vector<const QuantisedScheme*> schemes_of(const std::string& module) const;
};

// Throws Error{unsupported} naming the method, format or field that is not read. `where` begins
// every message.
QuantisedConfig read_quantised(const std::string& where, const nlohmann::json& object);
// The text of ModelOpt's hf_quant_config.json.
QuantisedConfig read_quantised_beside(const std::string& where, const std::string& text);

// The linear layers of one checkpoint.
class QuantisedReader {
 public:
  QuantisedReader(const TensorStore& store, const QuantisedConfig& config, Repacking& repacking)
      : store_(store), config_(config), repacking_(repacking) {}

  // Whether the matrix that would be called `name` ("..gate_proj.weight" or "..gate_up_proj") is
  // there in a quantised form.
  bool has(const std::string& name) const;
  // Throws Error{bad_file} where a matrix is there in more than one form, plain or quantised.
  void check_one_form(const std::string& name) const;
  // That matrix, [n, k]. Throws Error{bad_file} naming the tensor that is missing, of a wrong shape
  // or not what quantization_config says, Error{unsupported} for a form that is not read.
  PackedMatrix matrix(const std::string& name, std::int64_t n, std::int64_t k) const;

  // Of experts in one tensor.
  struct FusedPart {
    std::int64_t expert = 0, experts = 0;
    // Of an expert; first, first + step, .. are read, n of them.
    std::int64_t rows = 0, first = 0, step = 1;
    std::int64_t n = 0, k = 0;
    bool transposed = false;
    std::int64_t stored = 0;  // experts that the tensor has; fused() finds out
  };
  // gpt-oss: NAME_blocks [E, rows, k / 32, 16] and NAME_scales [E, rows, k / 32].
  bool has_blocks(const std::string& name) const;
  PackedMatrix blocks(const std::string& name, const FusedPart& part) const;
  // NAME, e4m3 or NVFP4: [E, rows, k], or [E, k, rows] where it is transposed; with NAME_scale_inv,
  // NAME_weight_scale or NAME_scale.
  bool has_fused(const std::string& name) const;
  bool fused_fits(const std::string& name, std::int64_t rows, std::int64_t k,
                  bool transposed) const;
  PackedMatrix fused(const std::string& name, FusedPart part) const;

  // Throws Error{bad_file} where quantization_config says otherwise of a module's linear layer than
  // its tensors do: "model.layers.3.mlp.experts.7.gate_proj".
  void check_listed(const std::string& module, bool packed) const;

 private:
  struct Names;
  Tensor tensor(const std::string& name) const { return store_.get(name); }
  [[noreturn]] void mismatch(const std::string& name, const std::string& wanted) const;
  // The one of the tensors STEM.. that is there, or the first name of all; throws where two are.
  std::string only(const std::string& stem, std::initializer_list<const char*> endings) const;
  void refuse_extras(const std::string& base, std::initializer_list<const char*> more) const;
  bool is_zero(const std::string& name) const;
  void check_described(const std::string& module, const PackedMatrix& m) const;
  std::string other_scales(const QuantisedScheme& scheme, const std::string& module,
                           const PackedMatrix& m) const;
  std::string contradiction(const QuantisedScheme& scheme, const std::string& module,
                            const PackedMatrix& m) const;
  void check_weight_shape(const std::string& base, std::int64_t n, std::int64_t k) const;
  float number(const std::string& name) const;
  Tensor floats(const std::string& name, std::int64_t count) const;
  PackedMatrix eight_bits(const std::string& base, std::int64_t n, std::int64_t k) const;
  PackedMatrix four_bits(const std::string& base, const std::string& values, std::int64_t n,
                         std::int64_t k) const;
  bool integers_in(const std::string& base) const;
  PackedMatrix integers(const std::string& base, std::int64_t n, std::int64_t k) const;
  PackedMatrix own(const std::string& base, std::int64_t n, std::int64_t k) const;
  PackedMatrix gptq(const std::string& base, std::int64_t n, std::int64_t k) const;
  PackedMatrix awq(const std::string& base, std::int64_t n, std::int64_t k) const;
  FormatSpec int4(const std::string& base, const std::string& scales, std::int64_t k,
                  std::int64_t groups) const;
  Tensor order(const std::string& name, std::int64_t k, int group, std::int64_t groups) const;
  PackedMatrix fused_matrix(const std::string& name, FusedPart part) const;
  // The part's rows of `width` bytes.
  Tensor fused_rows(const Tensor& all, const FusedPart& part, std::int64_t width,
                    DType dtype) const;
  bool two_blocks(const std::string& name, const FusedPart& part) const;
  bool fused_number(const std::string& name, const FusedPart& part, float& number) const;
  bool fused_blocks(const std::string& name, const FusedPart& part, PackedMatrix& m) const;
  // GPTQ's and AWQ's scales [groups, n], of the words `values`; the other way round; their zeros
  // i32 [groups, n / 8].
  Tensor scales_by_groups(const std::string& scales, const std::string& values,
                          std::int64_t n) const;
  Tensor transposed_scales(const Tensor& scales) const;
  Tensor packed_zeros(const std::string& name, std::int64_t groups, std::int64_t n) const;

  const TensorStore& store_;
  const QuantisedConfig& config_;
  Repacking& repacking_;
};

}  // namespace shunt
