// layer: the plan over the stages, with the weights of one MoE block prepared once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shunt/activate.hpp"
#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/format.hpp"
#include "shunt/route.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// The experts that a grouped GEMM computes, each down(act(gate x, up x)) with gate, up [I, H] and
// down [H, I].
struct ExpertSpec {
  int experts = 0;                // route.experts - zero_experts + route.shared.count
  std::int64_t hidden = 0;        // H; the latent width where the layer has one
  std::int64_t intermediate = 0;  // I
  ActivationSpec activation{};
  bool gate_up_bias = false;
  bool down_bias = false;
  bool operator==(const ExpertSpec&) const = default;
};

// An expert that every token goes to.
struct SharedExpertSpec {
  std::int64_t intermediate = 0;  // 0: none. Several shared experts are one, wider
  ActivationSpec activation{};
  bool gate_up_bias = false;
  bool down_bias = false;
  bool sigmoid_gate = false;  // its output times sigmoid(g . x), Qwen2-MoE
  float scale = 1;            // its output times this, Cohere's 'average'
  bool operator==(const SharedExpertSpec&) const = default;
};

// RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight * multiplier, in f32.
struct NormSpec {
  bool enabled = false;
  float epsilon = 1e-6f;
  bool weight = false;  // a weight as wide as x; else 1
  float multiplier = 1;
  bool weight_first = false;  // x * weight in place of x, and no weight behind: Muse Spark
  bool operator==(const NormSpec&) const = default;
};

//   r = router_norm(x);  ids, w = route(r)
//   u = input_norm(x);   u = latent_input_norm(latent_down u)     where latent > 0
//   y = sum over slots of w * expert_norm(expert(u))   zero-compute experts return x
//   y = latent_up latent_norm(y)                       where latent > 0
//   y = output_norm(y + shared.scale * sigmoid(g . x) * shared(x) + output_bias)
struct LayerSpec {
  std::int64_t hidden = 0;  // H of x and y; experts.hidden unless latent > 0
  RouteSpec route{};
  ExpertSpec experts{};
  SharedExpertSpec shared{};  // of x, H wide
  // Every call gives ids and weights, as on a rank that has some of the experts: of `route`
  // experts, top_k (ids a token, which may be more than the experts) and weight_on_input count
  // alone, and there is no router.
  bool routed_outside = false;
  int zero_experts = 0;          // the last ids of route.experts return their input: LongCat
  std::int64_t latent = 0;       // experts live in this width, between two projections: Nemotron-3
  bool output_bias = false;      // [H], once a token: JetMoE
  NormSpec router_norm{};        // Gemma 4
  NormSpec input_norm{};         // of the routed experts' input: Gemma 4
  NormSpec output_norm{};        // A.X K1
  NormSpec latent_norm{};        // of the sum, latent wide; only where latent > 0: Kimi K3
  NormSpec latent_input_norm{};  // of the experts' input, latent wide; likewise: Muse Spark
  NormSpec expert_norm{};        // of every expert's output, experts.hidden wide: Muse Spark
  bool operator==(const LayerSpec&) const = default;
};

// Written and read back whole. Throws Error{invalid_argument} for keys that are not known, and for
// what is no such object.
std::string to_json(const LayerSpec& spec);
LayerSpec layer_spec_from_json(const std::string& json);
std::string describe(const LayerSpec& spec);

// One view an expert, f32 | bf16 | f16, one dtype for all matrices; strides express every layout
// that checkpoints use: gate and up as halves of one tensor, interleaved, or transposed.
struct ExpertWeights {
  std::vector<Tensor> gate;                // E x [I, H]; empty when the activation is not gated
  std::vector<Tensor> up;                  // E x [I, H]
  std::vector<Tensor> down;                // E x [H, I]
  std::vector<Tensor> gate_bias, up_bias;  // E x [I], or empty
  std::vector<Tensor> down_bias;           // E x [H], or empty
  // The same three in a format (format.hpp): either these or those above, never both. Gate and up
  // keep a global scale each.
  std::vector<PackedMatrix> packed_gate, packed_up, packed_down;
  // Of what a checkpoint does not store as a PackedMatrix has it: kept as long as any copy of this.
  std::shared_ptr<const void> memory{};
};

// On the host, or on the device of the layer's context. f32 | bf16 | f16 but for the hash table.
struct LayerWeights {
  Tensor router{};            // [C, H], C = route.columns(); absent: every call gives ids or logits
  Tensor router_bias{};       // [C]
  Tensor selection_bias{};    // [E]
  Tensor per_expert_scale{};  // [C]
  Tensor hash_table{};        // [V, k] i32 | i64
  ExpertWeights experts;
  ExpertWeights shared;        // one 'expert', or none
  Tensor shared_gate{};        // [H] or [1, H]
  Tensor latent_down{};        // [L, H]
  Tensor latent_up{};          // [H, L]
  Tensor output_bias{};        // [H]
  Tensor router_norm{};        // [H]
  Tensor input_norm{};         // [H]
  Tensor output_norm{};        // [H]
  Tensor latent_norm{};        // [L]
  Tensor latent_input_norm{};  // [L]
  Tensor expert_norm{};        // [experts.hidden]
};

struct LayerOptions {
  // Of plain expert weights and of the rows between stages: the experts' input, their hidden rows
  // and, on CUDA, the rows that they return, which are rounded once before the weighted sum: an
  // output moves by up to 2^-8 (bf16) or 2^-11 (f16) of the sum of |w| |expert(u)|, and f16
  // saturates at 65504. With an expert_norm they are rounded before it and after. The CPU engine
  // keeps those in f32. What latent projections read and write on CUDA has this type too, but f32
  // in front of a norm. Routing and sums are f32 whatever this says.
  DType dtype = DType::bf16;
  // Of the routed experts' matrices in memory. plain: packed weights of a checkpoint are computed
  // in the format that they have, plain ones in `dtype`. Else plain weights are packed as they are
  // prepared; packed ones must have it already (down may have other groups of int4). A shared
  // expert stays what its weights are, plain or packed: every token reads it, and checkpoints keep
  // it in more bits.
  FormatSpec format{};
  // What rows are rounded to in front of the experts' products; of a shared expert's, where its
  // format takes fp8 rows of that kind.
  RowFormat rows = RowFormat::as_dtype;
  // The experts' matrices become their prepared form where they lie, and no second copy stays: of
  // `dtype`, on the context's device, [E, 2I, H] and [E, H, I], each dense and apart from the
  // other, gate's rows before up's, of sizes as prepare_in_place() takes them. They stay the
  // caller's, who keeps them as long as the layer, and Layer::unprepare() restores them.
  bool in_place = false;
  // A token's bits do not depend on how many others there are, nor on which: on a GPU the router
  // takes one form for any number of tokens, and no product's k is shared out. Costs what
  // Layer::explain() says. (On the CPU it is always so.)
  bool batch_invariant = false;
  // Of rows fp8_token: the experts' products as GroupedGemmSpec::fast_accumulation says.
  bool fast_accumulation = false;
};

// A row a stage: what it took and the least it could have taken.
struct StageTime {
  std::string stage;
  double seconds = 0;
  std::int64_t bytes = 0;  // that must cross memory: weights of the experts hit, rows in and out
  std::int64_t flops = 0;
};

struct LayerInputs {
  Tensor hidden{};        // [T, H] f32 | bf16 | f16, rows may be strided
  Tensor token_ids{};     // [T] i32 | i64; iff route.hashed
  Tensor residual{};      // [T, H] f32 | bf16 | f16, optional, added to the output
  Tensor valid_tokens{};  // [1] i32, optional: rows at or past it are written as 0
  // Where the caller routes, one of the two (with routed_outside ids), and the layer's router is
  // not read:
  Tensor logits{};   // [T, C] f32 | bf16 | f16, C = route.columns(): r W^T; the rest is the layer's
  Tensor ids{};      // [T, S] i32, dense, S = route.slots(), shared ones too; out of range: none
  Tensor weights{};  // [T, S] f32, dense, with ids: whatever the rule would do to them is done
  // [G] i32, with ids, optional: they run over [0, G), G at least the layer's experts, and id i is
  // the layer's expert expert_map[i], or of another rank where that is -1: outputs of the ranks add
  // up, with the shared expert, output_bias and residual of each. Not with zero_experts; of more
  // ids than experts not with latent_norm or output_norm, which are of the whole sum.
  Tensor expert_map{};
};
struct LayerOutputs {
  Tensor output{};   // [T, H] f32 | bf16 | f16
  Tensor ids{};      // [T, k] i32, dense, optional, not where the caller gives ids
  Tensor weights{};  // [T, k] f32, likewise
};

// Of a GPU that is there: what that one computes; else what the engine may.
Support supports(const LayerSpec& spec, const LayerOptions& options, Device device);

class Checkpoint;

// An MoE block ready to run. Holds one prepared copy of its expert weights and small copies of the
// router's; nothing of the source is referred to afterwards, but for what is prepared in place.
// Weights on a GPU are read in the order of the context's stream: what writes them on another must
// have ended. Made and called with one context at a time (context.hpp); move only.
class Layer {
 public:
  // Throws Error for a spec that supports() refuses and for weights that do not fit it.
  Layer(const LayerSpec& spec, const LayerWeights& weights, const Context& context,
        const LayerOptions& options = {});
  Layer(const Checkpoint& checkpoint, int layer, const Context& context,
        const LayerOptions& options = {});
  ~Layer();
  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;

  const LayerSpec& spec() const;
  const LayerOptions& options() const;
  // Of everything held; without what was prepared in place.
  std::size_t prepared_bytes() const;
  // Enough for any forward of up to max_tokens tokens, which are 2^31 / slots - 1 at most.
  std::size_t workspace_bytes(std::int64_t max_tokens) const;

  // y = MoE(x). Allocates nothing, does not wait; the same input gives the same bits for any number
  // of threads. T = 0 is legal. Throws Error before anything is enqueued or written. The output may
  // be the hidden states or the residual themselves; other tensors must not overlap. Pointers are
  // aligned to their elements; rows of a multiple of 16 bytes at addresses that are one are read
  // fastest.
  // On CUDA the host reads nothing of the device's, valid_tokens and the routing neither: a
  // captured graph of a call follows whatever its inputs hold when it is replayed. Call once with
  // as many tokens before a capture, for kernels are loaded when they are first launched; other
  // numbers of tokens may take others. A graph refers to the layer, its context, workspace and
  // tensors, all of which must outlive it, and to what the context's kernels share (context.hpp).
  void forward(const LayerInputs& in, const LayerOutputs& out, Workspace workspace) const;
  void forward(Tensor x, Tensor y, Workspace workspace) const {
    forward(LayerInputs{.hidden = x}, LayerOutputs{.output = y}, workspace);
  }
  // The same, stage by stage, each timed by itself; `times` gets a row a stage. On CUDA by events
  // on the stream; it waits, and cannot be captured.
  void forward_timed(const LayerInputs& in, const LayerOutputs& out, Workspace workspace,
                     std::vector<StageTime>& times) const;
  // What the plan chose for `tokens` tokens, and why; a few lines of text.
  std::string explain(std::int64_t tokens) const;

  // The layer as it is, spec, options and prepared weights, in one safetensors file, written whole
  // or not at all. On CUDA by way of a copy on the host.
  void save_prepared(const std::string& path) const;
  // That layer again, without preparing anything: the bytes are copied to the device as they are.
  // Throws Error{bad_file} for another or a truncated file, Error{unsupported} naming the layout
  // where the context's engine reads another one, Error{io}.
  static Layer load_prepared(const std::string& path, const Context& context);
  // Writes the matrices that options().in_place had overwritten back as they were. Nothing but the
  // destructor may be called afterwards. Throws Error{invalid_argument} for a layer that holds
  // copies.
  void unprepare();

 private:
  struct Impl;
  explicit Layer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shunt
