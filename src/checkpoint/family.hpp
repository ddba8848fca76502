// What the table of model families says about one of them.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config.hpp"
#include "shunt/layer.hpp"

namespace shunt {

// Where a tensor may lie, relative to its decoder layer ("model.layers.7.").
struct Source {
  std::string name;
  bool transposed = false;    // a matrix stored the other way round
  int row = -1;               // take this row of a matrix
  float times = 1, plus = 0;  // read as that much of it and more
};

// One way of storing the weights of the experts. "{}" in a name stands for the expert's number.
struct ExpertNames {
  enum class Form {
    each,    // a tensor an expert: gate, up [I, H], down [H, I]
    merged,  // up: [E, 2I, H], gate and up together; down [E, H, I]. One expert: without E
    apart,   // gate, up [E, I, H], down [E, H, I]
    flat,    // gate, up, down [E * I, H]: DBRX
  };
  Form form = Form::each;
  std::string gate{}, up{}, down{};  // gate is empty where gate and up are one, or there is none
  std::string up_bias{}, down_bias{};
  enum class Inner { last, first, either };
  Inner inner = Inner::last;  // first: stored [E, H, 2I] and [E, I, H]. Either: the shapes tell
  bool interleaved = false;   // rows 2j and 2j + 1 are gate j and up j; else two halves
};

struct TensorNames {
  std::string stack = "layers";  // of the decoder layers
  std::string module = "mlp";    // the block within its layer, as transformers 5 calls it
  // Alternatives: the first that is there is read.
  std::vector<Source> router, router_bias, selection_bias, per_expert_scale, hash_table;
  bool router_apart = false;  // it reads another input than the block: calls give its logits
  std::vector<ExpertNames> experts;
  bool others_beside = false;       // another block's router and experts are under these names too
  std::vector<std::string> beside;  // tensors of what runs beside the block
  std::vector<ExpertNames> slots;   // experts of the shared slots: ids behind the routed ones
  std::vector<ExpertNames> shared;  // one MLP
  std::vector<Source> shared_gate, latent_down, latent_up, output_bias;
  std::vector<Source> router_norm, input_norm, output_norm, latent_norm, latent_input_norm,
      expert_norm;
};

struct LayerKind {
  bool moe = true;
  std::string note;  // what the layer has instead
};

// Everything that a config.json says about the MoE blocks of its model.
struct Plan {
  LayerSpec spec;                                  // of an MoE layer
  std::function<void(int, LayerSpec&)> per_layer;  // how one differs, or null
  std::vector<LayerKind> layers;
  TensorNames names;
  std::string beside;  // what runs beside the block in its layer and is not part of it
};

// A row of the table.
struct Family {
  std::string_view type;  // model_type
  std::string_view title;
  Plan (*plan)(Config& config);
};

// Families that have experts and that Shunt does not compute.
struct Refusal {
  std::string_view type;
  std::string_view reason;
};

const std::vector<Family>& family_table();
const std::vector<Refusal>& refusal_table();

// ---- what the rows are made of ----------------------------------------------------------------

inline constexpr std::int64_t max_experts = 4096;
inline constexpr std::int64_t max_choices = 64;
inline constexpr std::int64_t max_layers = 10'000;
inline constexpr std::int64_t max_width = std::int64_t{1} << 24;

// Starts a plan: hidden size, layers (all MoE), experts [E, I, H] and k, activation by `act_field`,
// and the fields that every family has and that change nothing.
struct Basics {
  Config::Names experts = {"num_experts", "num_local_experts"};
  Config::Names top_k = {"num_experts_per_tok"};
  Config::Names intermediate = {"moe_intermediate_size"};
  Config::Names hidden = {"hidden_size"};
  Config::Names layers = {"num_hidden_layers"};  // empty: the row counts them itself
  std::string_view act_field = "hidden_act";
};
Plan start(Config& config, const Basics& basics);
// The same, with E, k and I already known.
Plan start(Config& config, const Basics& basics, std::int64_t experts, std::int64_t top_k,
           std::int64_t intermediate);

// A member of a family without experts, which does not look at `fields`.
Plan without_experts(Config& config, const Config::Names& fields);

// The activation that transformers calls `name`; throws for one that Shunt does not have.
ActivationSpec activation_by_name(const Config& config, std::string_view field,
                                  const std::string& name);

// A shared expert of `count` times `each`, with the activation of the routed ones.
void add_shared(Plan& plan, std::int64_t width, const std::string& module);
void add_shared_count(Plan& plan, Config& config, const Config::Names& count, std::int64_t absent,
                      const std::string& module);

// Softmax over all, top-k; renormalised or not.
void route_softmax(Plan& plan, bool renormalize);
// Top-k of the logits, softmax over them.
void route_top_k_softmax(Plan& plan);
// Sigmoid, top-k of score + bias, renormalised with `epsilon` added.
void route_sigmoid_bias(Plan& plan, bool renormalize, double epsilon, double scale);

// mlp_layer_types, or `otherwise(i)` where it is absent: 'is layer i sparse'.
void layers_by_type(Plan& plan, Config& config, const std::function<bool(int)>& otherwise);
void layers_by(Plan& plan, const std::function<bool(int)>& sparse, const std::string& note);
// Every decoder_sparse_step-th, but for mlp_only_layers, or `absent` where there is no such list.
void layers_by_step(Plan& plan, Config& config, const std::vector<std::int64_t>& absent = {});
// mlp_layer_types, or first_k_dense_replace, with moe_layer_freq 1.
void layers_from(Plan& plan, Config& config, std::int64_t absent);
std::function<bool(int)> from(std::int64_t first);

// Limits on act(gate) and up that a layer has for itself, from lists of a number a layer; 0 and
// null are none.
void limits_by_layer(Plan& plan, Config& config, const char* of_experts, const char* of_shared);

// mlp.gate.weight; mlp.experts.{}.gate_proj.weight .., or mlp.experts.gate_up_proj, down_proj.
TensorNames standard_names(const std::string& module = "mlp");
ExpertNames each_expert(const std::string& prefix, const char* gate = "gate_proj",
                        const char* up = "up_proj", const char* down = "down_proj");
ExpertNames merged_experts(const std::string& prefix, const char* up = "gate_up_proj",
                           const char* down = "down_proj");
// A tensor an expert, as packed checkpoints have them: the family's names for that or, where it has
// none, EXPERTS.{}.gate_proj.weight .. beside what its first alternative calls its experts. Biases
// stay in that alternative's tensors.
ExpertNames single_experts(const TensorNames& names);

}  // namespace shunt
