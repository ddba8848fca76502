// A whole checkpoint with its routed experts in another format: shard by shard, in memory of one
// expert (of a layer, where a packed source has to be put in order; by obs also of second moments),
// and never half written.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "convert/expert.hpp"
#include "shunt/context.hpp"

namespace shunt {

struct ConvertedExpertReport {
  int layer = 0, expert = 0;
  std::array<WeightError, expert_matrices> errors{};
  std::int64_t tokens = -1;  // that calibration routed to it; -1: not calibrated
  bool fell_back = false;    // some matrix was pruned by magnitude, for want of inputs
};

struct ConversionReport {
  std::vector<ConvertedExpertReport> experts;          // by layer, then expert
  std::int64_t bytes_before = 0, bytes_after = 0;      // of all files of tensors
  std::int64_t experts_before = 0, experts_after = 0;  // of the routed experts' matrices in them
  int shards = 0, shards_resumed = 0;                  // resumed: found finished
  // Linear layers beside the experts that were packed, and what they became.
  std::int64_t unpacked_modules = 0;
  DType unpacked_dtype = DType::bf16;
  // What of the source is not in the new checkpoint: files, and tensors that its index does not
  // name.
  std::vector<std::string> left_out;
};

struct ConversionOptions {
  ConversionSpec spec;
  // Safetensors with the hidden states that entered each MoE block, as RecordedInputs reads them;
  // for wanda and obs.
  std::string calibrate;
};

// done and total: weights of experts.
using ConversionProgress =
    std::function<void(const std::string& file, std::int64_t done, std::int64_t total)>;

// Reads the checkpoint `in` and makes the folder `out`. Everything is first written to
// "<out>.partial", which is renamed when whole; after an interruption a call with the same settings
// goes on with the first file that is not finished, and what comes out has the same bytes.
//
// Experts of `in` may be packed: what is in the wanted format already is kept bit for bit (`keeps`
// of expert.hpp); others are decoded, exactly, and errors are over what they decode to. Other
// linear layers that are packed become bf16 (of a plain format: its dtype), rounded once, and the
// new config.json says nothing of the source's method but its kv_cache_scheme.
//
// Memory is that of an expert: its weights twice in f32, packed, and as they are written. A packed
// source whose bytes have to be put in order (GPTQ, AWQ, gpt-oss) takes that of one layer's packed
// experts too. Calibration has gate and up once more in f32, and up to 1024 rows that meet them;
// obs also the second moments of inputs, H x H and I x I doubles, and twice as many again for the
// inverse of one: 8 (H^2 + I^2 + 2 max(H, I)^2) bytes, 1.3 GB of H 7168 and I 2048.
//
// Plain formats keep the names and the layout of `in`. Others write a matrix an expert, in the
// names of convert/dialect.hpp, and gpt-oss's mxfp4 as gpt-oss is published. But for matrices of
// routed experts and what was packed everything is copied, other files of the folder too. What is
// not, the report names: folders, links to nothing, weights in other forms than safetensors
// ("pytorch_model.bin"), other safetensors than the model's, and tensors that the index does not
// name.
//
// Throws Error: `out` exists or is `in`; no MoE layer; a format that the checkpoint's family has no
// names for, or one that does not hold what is pruned; weights, scales or codes that are not
// finite, by layer, expert and matrix; hidden states missing or of another shape; a file to be
// copied that cannot be read, before anything is written, and a full disk, where the system tells;
// a partial folder of other settings or in use. What is finished stays in the partial folder, which
// the message then names; where nothing is, the folder goes.
ConversionReport convert_checkpoint(const Context& context, const std::string& in,
                                    const std::string& out, const ConversionOptions& options,
                                    const ConversionProgress& progress = nullptr);

}  // namespace shunt
