// Checkpoints and files of the C ABI.
#include "shunt/checkpoint.hpp"

#include "capi/call.hpp"
#include "capi/handles.hpp"

using shunt::capi::Call;
using shunt::capi::run;

shunt_status shunt_checkpoint_open(const char* folder, shunt_checkpoint** checkpoint) {
  return run(__func__, [&](const Call& call) {
    shunt_checkpoint*& out = call.not_null("checkpoint", checkpoint);
    const shunt::Checkpoint opened = shunt::Checkpoint::open(&call.not_null("folder", folder));
    out = new shunt_checkpoint{opened, opened.tensor_names()};
  });
}

void shunt_checkpoint_destroy(shunt_checkpoint* checkpoint) { delete checkpoint; }

const char* shunt_checkpoint_family(const shunt_checkpoint* checkpoint) {
  return checkpoint == nullptr ? nullptr : checkpoint->checkpoint.family().c_str();
}

const char* shunt_checkpoint_model_name(const shunt_checkpoint* checkpoint) {
  return checkpoint == nullptr ? nullptr : checkpoint->checkpoint.model_name().c_str();
}

shunt_status shunt_checkpoint_summary(const shunt_checkpoint* checkpoint, char* text,
                                      size_t capacity, size_t* length) {
  return run(__func__, [&](const Call& call) {
    call.text(call.not_null("checkpoint", checkpoint).checkpoint.summary(), text, capacity, length);
  });
}

int32_t shunt_checkpoint_layer_count(const shunt_checkpoint* checkpoint) {
  return checkpoint == nullptr ? 0 : static_cast<int32_t>(checkpoint->checkpoint.layers().size());
}

int32_t shunt_checkpoint_first_moe_layer(const shunt_checkpoint* checkpoint) {
  return checkpoint == nullptr ? -1 : checkpoint->checkpoint.first_moe_layer();
}

shunt_status shunt_checkpoint_layer_info(const shunt_checkpoint* checkpoint, int32_t layer,
                                         shunt_checkpoint_layer* info) {
  return run(__func__, [&](const Call& call) {
    const auto& layers = call.not_null("checkpoint", checkpoint).checkpoint.layers();
    if (layer < 0 || static_cast<std::size_t>(layer) >= layers.size()) {
      call.wrong("layer is {}: must be 0 to {}", layer, static_cast<int>(layers.size()) - 1);
    }
    const shunt::CheckpointLayer& found = layers[static_cast<std::size_t>(layer)];
    shunt_checkpoint_layer result{};
    result.index = found.index;
    result.moe = found.moe ? 1 : 0;
    result.note = found.note.c_str();
    result.module = found.module.c_str();
    call.write("info", info, result);
  });
}

shunt_status shunt_checkpoint_layer_spec(const shunt_checkpoint* checkpoint, int32_t layer,
                                         char* text, size_t capacity, size_t* length) {
  return run(__func__, [&](const Call& call) {
    call.text(shunt::to_json(call.not_null("checkpoint", checkpoint).checkpoint.spec(layer)), text,
              capacity, length);
  });
}

int64_t shunt_checkpoint_tensor_count(const shunt_checkpoint* checkpoint) {
  return checkpoint == nullptr ? 0 : static_cast<int64_t>(checkpoint->tensor_names.size());
}

const char* shunt_checkpoint_tensor_name(const shunt_checkpoint* checkpoint, int64_t index) {
  if (index < 0 || index >= shunt_checkpoint_tensor_count(checkpoint)) return nullptr;
  return checkpoint->tensor_names[static_cast<std::size_t>(index)].c_str();
}

shunt_status shunt_checkpoint_tensor(const shunt_checkpoint* checkpoint, const char* name,
                                     shunt_tensor* tensor) {
  return run(__func__, [&](const Call& call) {
    shunt_tensor& out = call.not_null("tensor", tensor);
    out = shunt::capi::to_c(
        call.not_null("checkpoint", checkpoint).checkpoint.tensor(&call.not_null("name", name)));
  });
}

shunt_status shunt_safetensors_open(const char* path, shunt_safetensors** file) {
  return run(__func__, [&](const Call& call) {
    shunt_safetensors*& out = call.not_null("file", file);
    out = new shunt_safetensors{shunt::SafetensorsFile::open(&call.not_null("path", path))};
  });
}

void shunt_safetensors_destroy(shunt_safetensors* file) { delete file; }

shunt_status shunt_safetensors_tensor(const shunt_safetensors* file, const char* name,
                                      shunt_tensor* tensor) {
  return run(__func__, [&](const Call& call) {
    shunt_tensor& out = call.not_null("tensor", tensor);
    out = shunt::capi::to_c(call.not_null("file", file).file.get(&call.not_null("name", name)));
  });
}

shunt_status shunt_known_families(char* text, size_t capacity, size_t* length) {
  return run(__func__, [&](const Call& call) {
    std::string lines;
    for (const std::string& family : shunt::known_families()) lines += family + "\n";
    call.text(lines, text, capacity, length);
  });
}
