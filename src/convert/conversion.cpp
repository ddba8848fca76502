#include "convert/conversion.hpp"

#include <fmt/ranges.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/access.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/quantised.hpp"
#include "checkpoint/strict_json.hpp"
#include "convert/beside.hpp"
#include "convert/config.hpp"
#include "convert/dialect.hpp"
#include "convert/finished.hpp"
#include "convert/journal.hpp"
#include "convert/plain_experts.hpp"
#include "convert/recorded_inputs.hpp"
#include "convert/shard_writer.hpp"
#include "convert/source.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* index_name = "model.safetensors.index.json";
// What is written beside the shards.
constexpr std::array<std::string_view, 3> own_files = {"config.json", index_name,
                                                       "hf_quant_config.json"};

// How the experts of the new checkpoint are stored.
enum class Naming {
  as_source,  // a plain format: the same tensors, another dtype
  each,       // a matrix an expert, in a dialect's tensors
  gpt_oss,    // blocks and scales of all experts together, gate and up row by row
};

const char* dtype_name(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::bf16 ? "bfloat16" : "float16";
}

class Conversion {
 public:
  Conversion(const Context& context, const std::string& in, const std::string& out,
             const ConversionOptions& options, const ConversionProgress& progress);
  ConversionReport run();

 private:
  Naming naming() const;
  Json settings() const;
  std::vector<PlannedTensor> plan(const SourceFile& file) const;
  void check_space(const PartialFolder& folder) const;
  // Its weights are loaded, and calibrated, with the first expert of the layer.
  ConvertedExpert converted(int layer, int expert);
  void make(const SourceFile& file, PartialFolder& folder);
  void make_all(PartialFolder& folder, ConversionReport& report);
  void write_each(ShardWriter& writer, const ConvertedExpert& expert,
                  const SourceMatrix& matrix) const;
  void write_gpt_oss(ShardWriter& writer, const ConvertedExpert& expert,
                     const SourceMatrix& matrix) const;
  void write_beside(const PartialFolder& folder) const;
  void find_beside();
  std::string config_text() const;
  void write_module(ShardWriter& writer, const PackedModule& module) const;
  // What the tensors of these files hold, by tensor.
  std::map<std::string, std::string> weight_map() const;
  const LayerCalibration* calibration(int layer);
  void remember(const std::vector<FinishedMatrix>& matrices);
  // Of a tensor of any rank.
  std::int64_t bytes_of(const std::string& name) const {
    return CheckpointAccess::store(checkpoint_).flat(name).bytes();
  }
  bool converts(const std::string& tensor) const { return expert_tensors_.contains(tensor); }
  bool decodes(const std::string& tensor) const { return module_tensors_.contains(tensor); }
  // Of linear layers beside the experts that were packed.
  DType decoded() const { return naming_ == Naming::as_source ? options_.spec.dtype : DType::bf16; }

  Context context_;
  std::string in_, out_;
  ConversionOptions options_;
  ConversionProgress progress_;
  Checkpoint checkpoint_;
  std::vector<SourceFile> files_;
  std::set<std::string> expert_tensors_, module_tensors_;
  bool was_packed_ = false;  // the experts, or anything beside them
  Naming naming_ = Naming::as_source;
  Dialect dialect_;  // of Naming::each
  std::unique_ptr<const RecordedInputs> recorded_;
  Beside beside_;
  CacheScheme cache_scheme_;
  std::int64_t done_ = 0, total_ = 0;  // weights

  // Of the layer at work.
  int layer_ = -1;
  LayerSpec spec_;
  LayerWeights weights_;
  std::unique_ptr<LayerCalibration> calibration_;

  std::map<std::pair<int, int>, ConvertedExpertReport> reports_;
};

// A conversion writes files of its own beside the shards, under these names and, until they are
// whole, with an ending.
void check_shard_name(const std::string& folder, const std::string& name) {
  const bool own = std::find(own_files.begin(), own_files.end(), name) != own_files.end();
  if (!own && name != journal_name && !name.ends_with(".new")) return;
  fail(Status::unsupported,
       "convert: {}/{} is a shard: must not be named as what a conversion writes beside them, {}, "
       "{} or *.new",
       folder, name, fmt::join(own_files, ", "), journal_name);
}

Conversion::Conversion(const Context& context, const std::string& in, const std::string& out,
                       const ConversionOptions& options, const ConversionProgress& progress)
    : context_(context), in_(in), out_(out), options_(options), progress_(progress) {
  while (out_.size() > 1 && out_.back() == '/') out_.pop_back();
  std::error_code ignored;
  if (fs::equivalent(in_, out_, ignored)) {
    fail(Status::invalid_argument, "convert: {} is to become itself: name another folder", out_);
  }
  if (fs::equivalent(in_, out_ + ".partial", ignored)) {
    fail(Status::invalid_argument, "convert: {} is worked on in {}: name another folder", out_,
         in_);
  }
  if (fs::exists(fs::symlink_status(out_))) {
    fail(Status::invalid_argument, "convert: {} exists: nothing is overwritten", out_);
  }
  const fs::path parent = fs::absolute(out_).parent_path();
  if (!fs::is_directory(parent, ignored)) {
    fail(Status::io, "convert: {} is no folder", parent.string());
  }
  for (fs::path above = fs::weakly_canonical(parent, ignored); above.has_relative_path();
       above = above.parent_path()) {
    if (fs::equivalent(above, in_, ignored)) {
      fail(Status::invalid_argument, "convert: {} lies in {}: name a folder outside it", out_, in_);
    }
  }
  check_prunable(options_.spec);
  if (options_.spec.prune && options_.spec.pruning.method != PruneMethod::magnitude &&
      options_.calibrate.empty()) {
    fail(Status::invalid_argument,
         "convert: {} needs recorded hidden states to calibrate by, which are not given",
         to_string(options_.spec.pruning.method));
  }
  checkpoint_ = Checkpoint::open(in_);
  if (checkpoint_.first_moe_layer() < 0) {
    fail(Status::invalid_argument, "convert: {} has no MoE layer: {}", in_, checkpoint_.summary());
  }
  naming_ = naming();
  dialect_.format = options_.spec.format;
  files_ = source_files(checkpoint_, [&](SourceMatrix& matrix, const PackedMatrix& packed) {
    if (!keeps(options_.spec, packed)) return;
    matrix.scales = packed.scales.dtype;
    dialect_.add(packed);
  });
  if (naming_ == Naming::gpt_oss) merge_experts(checkpoint_, files_);
  for (const SourceFile& file : files_) {
    check_shard_name(in_, file.name);
    expert_tensors_.insert(file.experts.begin(), file.experts.end());
    module_tensors_.insert(file.packed.begin(), file.packed.end());
    was_packed_ = was_packed_ || !file.modules.empty();
    for (const SourceMatrix& matrix : file.matrices) {
      was_packed_ = was_packed_ || matrix.packed;
      total_ += matrix.view.elements();
    }
  }
  if (!options_.calibrate.empty()) {
    recorded_ = std::make_unique<const RecordedInputs>(options_.calibrate, checkpoint_);
  }
  find_beside();
  // Refuse before anything is written.
  for (const SourceFile& file : files_) plan(file);
  config_text();
}

Naming Conversion::naming() const {
  const FormatSpec& format = options_.spec.format;
  if (format.format == Format::plain) return Naming::as_source;
  if (checkpoint_.family() == "gpt_oss" && format.format == Format::mxfp4) return Naming::gpt_oss;
  return Naming::each;
}

Json Conversion::settings() const {
  Json source = Json::object();
  source["config.json"] = fingerprint(in_ + "/config.json");
  for (const SourceFile& file : files_) source[file.name] = mark_of(in_ + "/" + file.name);
  Json json = {{"made_by", "shunt convert"},
               {"to", to_string(options_.spec)},
               {"damping", options_.spec.pruning.damping},
               {"source", source}};
  // What every file of it has to agree with.
  if (naming_ == Naming::each) json["config"] = dialect_config(dialect_, {});
  if (recorded_) json["calibrate"] = mark_of(options_.calibrate);
  return json;
}

std::vector<PlannedTensor> Conversion::plan(const SourceFile& file) const {
  std::vector<PlannedTensor> planned;
  for (const std::string& name : file.tensors) {
    if (converts(name) || decodes(name)) continue;
    const TensorStore& store = CheckpointAccess::store(checkpoint_);
    planned.push_back({name, store.flat(name).dtype, store.shape(name)});
  }
  for (const PackedModule& module : file.modules) {
    planned.push_back({module.module + ".weight", decoded(), {module.n, module.k}});
  }
  std::set<std::string> fused;
  if (naming_ == Naming::as_source) {
    for (const SourceMatrix& matrix : file.matrices) {
      if (fused.insert(matrix.tensor).second) {
        planned.push_back({matrix.tensor, options_.spec.dtype, matrix.shape});
      }
    }
    return planned;
  }
  for (const SourceMatrix& matrix : file.matrices) {
    const std::int64_t n = matrix.view.shape[0], k = matrix.view.shape[1];
    if (naming_ == Naming::each) {
      const std::string module =
          expert_module(checkpoint_, matrix.layer, matrix.expert, matrix.which);
      for (PlannedTensor& tensor : dialect_plan(dialect_, n, k, matrix.scales)) {
        tensor.name = module + "." + tensor.name;
        planned.push_back(std::move(tensor));
      }
    } else if (fused.insert(matrix.tensor).second) {
      if (k % 32 != 0) {
        fail(Status::unsupported,
             "convert: {} has rows of {}: gpt-oss's mxfp4 takes multiples of 32", matrix.tensor, k);
      }
      const std::int64_t rows = matrix.which == ExpertMatrix::down ? n : 2 * n;
      const std::int64_t experts = checkpoint_.spec(matrix.layer).experts.experts;
      planned.push_back({matrix.tensor + "_blocks", DType::u8, {experts, rows, k / 32, 16}});
      planned.push_back({matrix.tensor + "_scales", DType::u8, {experts, rows, k / 32}});
    }
  }
  return planned;
}

void Conversion::check_space(const PartialFolder& folder) const {
  std::int64_t wanted = 0;
  const auto there = [&](const std::string& name) {
    std::error_code none;
    const auto bytes = fs::file_size(folder.file(name), none);
    return none ? std::int64_t{0} : static_cast<std::int64_t>(bytes);
  };
  for (const auto& [name, bytes] : beside_.copied) wanted += bytes - there(name);
  for (const SourceFile& file : files_) {
    if (folder.finished(file.name).is_null()) {
      wanted += ShardWriter::planned_bytes(plan(file), file.metadata);
      wanted -= there(file.name);  // of a file that was begun, what it has is there again
    }
  }
  struct statvfs system {};
  if (::statvfs(folder.path().c_str(), &system) != 0) return;
  const double free = static_cast<double>(system.f_bavail) * static_cast<double>(system.f_frsize);
  if (static_cast<double>(wanted) > free) {
    fail(Status::io, "convert: {} needs {} bytes more: the disk has {} free", folder.path(), wanted,
         static_cast<std::int64_t>(free));
  }
}

const LayerCalibration* Conversion::calibration(int layer) {
  if (layer_ != layer) {
    layer_ = layer;
    spec_ = checkpoint_.spec(layer);
    calibration_.reset();  // has views of the weights
    weights_ = {};         // or those of two layers would be in memory
    weights_ = checkpoint_.weights(layer);
    if (recorded_) {
      const RecordedLayer& inputs = recorded_->of(layer);
      calibration_ = std::make_unique<LayerCalibration>(context_, spec_, weights_, inputs.hidden,
                                                        inputs.token_ids);
    }
  }
  return calibration_.get();
}

// What is packed beside the experts becomes plain: the new checkpoint says one method of its own.
void Conversion::write_module(ShardWriter& writer, const PackedModule& module) const {
  Repacking repacking;
  const QuantisedReader reader(CheckpointAccess::store(checkpoint_),
                               CheckpointAccess::model(checkpoint_).quantised, repacking);
  const std::string name = module.module + ".weight";
  const PackedMatrix matrix = reader.matrix(name, module.n, module.k);
  const std::shared_ptr<const void> memory = repacking.finish(true);
  std::vector<std::uint8_t> bytes(
      static_cast<std::size_t>(module.n * module.k * bits(decoded()) / 8));
  const Tensor values = view(bytes.data(), decoded(), {module.n, module.k});
  try {
    unpack(matrix, values);
    check_finite(values);
  } catch (const Error& error) {
    fail(error.status(), "{}: {}: {}", in_, module.module, error.what());
  }
  writer.write(name, bytes.data(), bytes.size());
}

void Conversion::write_each(ShardWriter& writer, const ConvertedExpert& expert,
                            const SourceMatrix& matrix) const {
  const std::string module = expert_module(checkpoint_, matrix.layer, matrix.expert, matrix.which);
  const ConvertedMatrix& from = expert.matrices[static_cast<std::size_t>(matrix.which)];
  for (const DialectTensor& tensor : dialect_tensors(dialect_, from.packed)) {
    writer.write(module + "." + tensor.plan.name, tensor.bytes.data(), tensor.bytes.size());
  }
}

void Conversion::write_gpt_oss(ShardWriter& writer, const ConvertedExpert& expert,
                               const SourceMatrix& matrix) const {
  const PackedMatrix& from = expert.matrices[static_cast<std::size_t>(matrix.which)].packed;
  const bool down = matrix.which == ExpertMatrix::down;
  const std::int64_t step = down ? 1 : 2;  // rows 2j and 2j + 1 are gate j and up j
  const std::int64_t first =
      matrix.expert * from.n * step + (matrix.which == ExpertMatrix::up ? 1 : 0);
  for (const auto& [suffix, rows] :
       {std::pair<const char*, const Tensor&>{"_blocks", from.values}, {"_scales", from.scales}}) {
    const auto width = static_cast<std::size_t>(rows.shape[1]);
    for (std::int64_t n = 0; n < from.n; ++n) {
      writer.write(matrix.tensor + suffix,
                   rows.as<const std::uint8_t>() + static_cast<std::size_t>(n) * width, width,
                   static_cast<std::size_t>(first + n * step) * width);
    }
  }
}

ConvertedExpert Conversion::converted(int layer, int expert) {
  const LayerCalibration* const inputs = calibration(layer);
  try {
    return convert_expert(context_, options_.spec, spec_, weights_, expert, inputs);
  } catch (const Error& error) {
    fail(error.status(), "{}: layer {}, {}", in_, layer, error.what());
  }
}

void Conversion::make(const SourceFile& file, PartialFolder& folder) {
  ShardWriter writer(folder.file(file.name), plan(file), file.metadata);
  for (const std::string& name : file.tensors) {
    if (converts(name) || decodes(name)) continue;
    const Tensor tensor = CheckpointAccess::store(checkpoint_).flat(name);
    writer.write(name, tensor.data, static_cast<std::size_t>(tensor.bytes()));
  }
  for (const PackedModule& module : file.modules) write_module(writer, module);
  std::vector<FinishedMatrix> finished;
  PlainExperts plain(checkpoint_, options_.spec.dtype, writer);
  for (std::size_t begin = 0; begin < file.matrices.size();) {
    const SourceMatrix& first = file.matrices[begin];
    std::size_t end = begin;
    std::vector<SourceMatrix> matrices;
    std::int64_t weights = 0;
    for (; end < file.matrices.size() && file.matrices[end].layer == first.layer &&
           file.matrices[end].expert == first.expert;
         ++end) {
      matrices.push_back(file.matrices[end]);
      weights += file.matrices[end].view.elements();
    }
    const ConvertedExpert expert = converted(first.layer, first.expert);
    if (naming_ == Naming::as_source) plain.write(expert, matrices);
    for (const SourceMatrix& matrix : matrices) {
      if (naming_ == Naming::each) write_each(writer, expert, matrix);
      if (naming_ == Naming::gpt_oss) write_gpt_oss(writer, expert, matrix);
      const ConvertedMatrix& made = expert.matrices[static_cast<std::size_t>(matrix.which)];
      finished.push_back({.layer = matrix.layer,
                          .expert = matrix.expert,
                          .which = matrix.which,
                          .error = made.error,
                          .tokens = expert.tokens,
                          .fell_back = fell_back(options_.spec, made)});
    }
    done_ += weights;
    if (progress_) progress_(file.name, done_, total_);
    begin = end;
  }
  if (naming_ == Naming::as_source) plain.write_gaps();
  writer.finish();
  finish(folder, file, finished);
  remember(finished);
}

void Conversion::remember(const std::vector<FinishedMatrix>& matrices) {
  for (const FinishedMatrix& matrix : matrices) {
    ConvertedExpertReport& report = reports_[{matrix.layer, matrix.expert}];
    report.layer = matrix.layer;
    report.expert = matrix.expert;
    report.errors[static_cast<std::size_t>(matrix.which)] = matrix.error;
    report.tokens = matrix.tokens;
    report.fell_back = report.fell_back || matrix.fell_back;
  }
}

std::map<std::string, std::string> Conversion::weight_map() const {
  std::map<std::string, std::string> map;
  for (const SourceFile& file : files_) {
    for (const PlannedTensor& tensor : plan(file)) map[tensor.name] = file.name;
  }
  return map;
}

std::string Conversion::config_text() const {
  const std::string path = in_ + "/config.json";
  RewrittenObject object(path, read_text(path, max_config_bytes));
  Json& config = object.json;
  if (was_packed_ || naming_ != Naming::as_source) forget_packing(config);
  if (naming_ == Naming::as_source) {
    for (const char* field : {"dtype", "torch_dtype"}) {
      if (config.contains(field)) config[field] = dtype_name(options_.spec.dtype);
    }
  } else {
    // Modules whose matrix stays, as those who read quantised checkpoints have to be told.
    constexpr std::string_view ending = ".weight";
    std::vector<std::string> others;
    for (const SourceFile& file : files_) {
      for (const std::string& name : file.tensors) {
        if (converts(name) || decodes(name) || !name.ends_with(ending) ||
            CheckpointAccess::store(checkpoint_).shape(name).size() != 2) {
          continue;
        }
        others.push_back(name.substr(0, name.size() - ending.size()));
      }
      for (const PackedModule& module : file.modules) others.push_back(module.module);
    }
    if (std::find(others.begin(), others.end(), "lm_head") == others.end()) {
      others.emplace_back("lm_head");  // tied to the embedding
    }
    std::sort(others.begin(), others.end());
    config["quantization_config"] =
        naming_ == Naming::gpt_oss
            ? Json{{"quant_method", "mxfp4"}, {"modules_to_not_convert", others}}
            : dialect_config(dialect_, others);
    if (!cache_scheme_.scheme.is_null()) {
      set_cache_scheme(config["quantization_config"], cache_scheme_.scheme);
    }
  }
  return object.text() + "\n";
}

void Conversion::write_beside(const PartialFolder& folder) const {
  write_whole(folder.file("config.json"), config_text());
  if (fs::exists(in_ + "/" + index_name)) {
    std::int64_t total = 0;
    for (const SourceFile& file : files_) {
      for (const PlannedTensor& tensor : plan(file)) total += tensor.bytes();
    }
    write_whole(
        folder.file(index_name),
        Json{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map()}}.dump(2) + "\n");
  }
  for (const auto& [name, bytes] : beside_.copied) copy_whole(in_ + "/" + name, folder.file(name));
}

void Conversion::find_beside() {
  std::set<std::string> made(own_files.begin(), own_files.end());
  for (const SourceFile& file : files_) made.insert(file.name);
  beside_ = beside_tensors(in_, CheckpointAccess::store(checkpoint_), made);
  const bool writes_method = naming_ != Naming::as_source;
  cache_scheme_ = cache_scheme_of(in_, writes_method, !writes_method && !was_packed_);
}

void Conversion::make_all(PartialFolder& folder, ConversionReport& report) {
  check_space(folder);
  for (const SourceFile& file : files_) {
    if (plan(file).empty()) {  // its matrices are parts of tensors in other files
      report.bytes_before += file.bytes;
      for (const std::string& name : file.experts) report.experts_before += bytes_of(name);
      continue;
    }
    const Json finished = folder.finished(file.name);
    if (finished.is_null()) {
      make(file, folder);
    } else {
      remember(finished_matrices(folder, file, finished));
      for (const SourceMatrix& matrix : file.matrices) done_ += matrix.view.elements();
      ++report.shards_resumed;
    }
    ++report.shards;
    report.bytes_before += file.bytes;
    report.bytes_after += static_cast<std::int64_t>(fs::file_size(folder.file(file.name)));
    std::set<std::string> kept;
    for (const std::string& name : file.tensors) {
      if (converts(name)) {
        report.experts_before += bytes_of(name);
      } else {
        kept.insert(name);
      }
    }
    for (const PackedModule& module : file.modules) kept.insert(module.module + ".weight");
    for (const PlannedTensor& tensor : plan(file)) {
      if (!kept.contains(tensor.name)) report.experts_after += tensor.bytes();
    }
  }
  write_beside(folder);
}

ConversionReport Conversion::run() {
  ConversionReport report;
  report.left_out = beside_.left_out;
  report.left_out.insert(report.left_out.end(), cache_scheme_.left_out.begin(),
                         cache_scheme_.left_out.end());
  std::sort(report.left_out.begin(), report.left_out.end());
  for (const SourceFile& file : files_) report.unpacked_modules += std::ssize(file.modules);
  report.unpacked_dtype = decoded();
  PartialFolder folder(out_, settings());
  try {
    make_all(folder, report);
  } catch (const Error& error) {
    if (folder.discard_if_unused()) throw;
    fail(error.status(), "{}; what is finished stays in {}: {}", error.what(), folder.path(),
         error.status() == Status::io ? "the same command goes on from there"
                                      : "remove it to convert otherwise");
  }
  folder.publish(out_);
  for (const auto& [place, expert] : reports_) report.experts.push_back(expert);
  return report;
}

}  // namespace

ConversionReport convert_checkpoint(const Context& context, const std::string& in,
                                    const std::string& out, const ConversionOptions& options,
                                    const ConversionProgress& progress) {
  return Conversion(context, in, out, options, progress).run();
}

}  // namespace shunt
