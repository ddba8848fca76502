/* Checkpoints and layers through the C ABI. */
#include <stdlib.h>

#include "check.h"

#define TINY_MOE SHUNT_SOURCE_DIR "/models/tiny-moe"

void test_layers(const shunt_context* context);
void test_layers_on_gpu(const shunt_context* context);

static shunt_tensor on_device(shunt_tensor tensor, int32_t device) {
  tensor.device_type = device;
  return tensor;
}

/* One expert of width 1 over H = 2, written out: y = down * silu(gate . x) * (up . x). */
static void test_own_weights(const shunt_context* context) {
  const char* spec =
      "{\"hidden\": 2, \"route\": {\"experts\": 1, \"top_k\": 1, \"renormalize\": true},"
      " \"experts\": {\"experts\": 1, \"hidden\": 2, \"intermediate\": 1}}";
  const float router[2] = {1, 1}, gate[2] = {1, 0}, up[2] = {0, 3}, down[2] = {2, -1};
  const float x[2] = {1, 2};
  float y[2] = {0, 0}, weights[1] = {0};
  int32_t ids[1] = {77};
  const shunt_tensor t_router = shunt_view_2d(router, SHUNT_F32, 1, 2);
  const shunt_tensor t_gate = shunt_view_2d(gate, SHUNT_F32, 1, 2);
  const shunt_tensor t_up = shunt_view_2d(up, SHUNT_F32, 1, 2);
  const shunt_tensor t_down = shunt_view_2d(down, SHUNT_F32, 2, 1);
  const shunt_tensor t_x = shunt_view_2d(x, SHUNT_F32, 1, 2);
  const shunt_tensor t_y = shunt_view_2d(y, SHUNT_F32, 1, 2);
  const shunt_tensor t_ids = shunt_view_2d(ids, SHUNT_I32, 1, 1);
  const shunt_tensor t_weights = shunt_view_2d(weights, SHUNT_F32, 1, 1);
  shunt_expert_weights experts = {
      .struct_size = sizeof experts, .count = 1, .gate = &t_gate, .up = &t_up, .down = &t_down};
  const shunt_layer_weights all = {
      .struct_size = sizeof all, .router = &t_router, .experts = &experts};
  const shunt_layer_inputs in = {.struct_size = sizeof in, .hidden = &t_x};
  const shunt_layer_outputs out = {
      .struct_size = sizeof out, .output = &t_y, .ids = &t_ids, .weights = &t_weights};
  shunt_layer_options options = SHUNT_LAYER_OPTIONS_INIT;
  shunt_layer *layer = NULL, *loaded = NULL;
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;
  char text[16];
  size_t length = 0;

  options.dtype = SHUNT_F32;
  CHECK_OK(shunt_layer_supports(context, spec, &options));
  CHECK_OK(shunt_layer_create(context, spec, &all, &options, &layer));
  if (layer == NULL) return;
  CHECK(shunt_layer_prepared_bytes(layer) > 0);
  CHECK(shunt_layer_hidden_size(layer) == 2 && shunt_layer_hidden_size(NULL) == 0);
  CHECK_OK(shunt_layer_workspace_bytes(layer, 1, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  CHECK_OK(shunt_layer_forward(layer, &in, &out, shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(y, 2 * 6 * 0.731058578630005, -6 * 0.731058578630005);
  CHECK_INTS(ids, 0);
  CHECK_FLOATS(weights, 1);
  CHECK(shunt_layer_forward(layer, &in, &out, NULL, 0) == SHUNT_INVALID_ARGUMENT);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "layer is NULL",
              shunt_layer_forward(NULL, &in, &out, shunt_buffer_data(workspace), bytes));

  /* Texts: the length is the whole one, and what is written ends in 0. */
  memset(text, 'x', sizeof text);
  CHECK_OK(shunt_layer_spec(layer, text, 9, &length));
  CHECK(strlen(text) == 8 && text[9] == 'x' && length > 100);
  CHECK_OK(shunt_layer_spec(layer, NULL, 0, &length));
  CHECK_OK(shunt_layer_describe(layer, text, sizeof text, &length));
  CHECK(strlen(text) == sizeof text - 1 && length > sizeof text);
  CHECK_OK(shunt_layer_explain(layer, 1, NULL, 0, &length));
  CHECK(length > 0);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "nothing was overwritten", shunt_layer_unprepare(layer));
  CHECK_OK(shunt_layer_save_prepared(layer, "test_c_layers.saved"));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "path is '': must name a file",
              shunt_layer_load_prepared(context, "", &loaded));
  CHECK_OK(shunt_layer_load_prepared(context, "test_c_layers.saved", &loaded));
  y[0] = y[1] = 0;
  CHECK_OK(shunt_layer_forward(loaded, &in, &out, shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(y, 2 * 6 * 0.731058578630005, -6 * 0.731058578630005);
  shunt_layer_destroy(loaded);
  CHECK(remove("test_c_layers.saved") == 0);
  CHECK_FAILS(SHUNT_IO, "test_c_layers.saved",
              shunt_layer_load_prepared(context, "test_c_layers.saved", &loaded));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "text is NULL", shunt_layer_spec(layer, NULL, 1, &length));
  shunt_buffer_destroy(workspace);
  shunt_layer_destroy(layer);
  layer = NULL;

  experts.down = NULL;
  CHECK(shunt_layer_create(context, spec, &all, &options, &layer) == SHUNT_INVALID_ARGUMENT);
  experts.down = &t_down;
  experts.count = -1;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "weights.experts.count is -1",
              shunt_layer_create(context, spec, &all, &options, &layer));
  experts.reserved = 3;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "weights.experts.reserved is 3",
              shunt_layer_create(context, spec, &all, &options, &layer));
  experts.reserved = 0;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "LayerSpec.hidden is missing",
              shunt_layer_create(context, "{}", &all, &options, &layer));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec_json is NULL",
              shunt_layer_create(context, NULL, &all, &options, &layer));
  options.dtype = SHUNT_I32;
  CHECK(shunt_layer_supports(context, spec, &options) == SHUNT_UNSUPPORTED);
  CHECK(layer == NULL);
}

/* Layer 0 of the small model against what was recorded of it, and made twice: from the checkpoint,
 * and from its spec and tensors. */
static void test_checkpoint(const shunt_context* context, int32_t device) {
  shunt_checkpoint* checkpoint = NULL;
  shunt_safetensors* recorded = NULL;
  shunt_checkpoint_layer info = {.struct_size = sizeof info};
  shunt_layer_options options = SHUNT_LAYER_OPTIONS_INIT;
  shunt_layer* layers[2] = {NULL, NULL};
  shunt_tensor x, want, router, weights[3][16];
  shunt_expert_weights experts = {.struct_size = sizeof experts, .count = 16};
  shunt_layer_weights all = {.struct_size = sizeof all, .router = &router, .experts = &experts};
  shunt_buffer *inputs = NULL, *output = NULL, *workspace = NULL;
  static float got[2][256 * 256];
  const size_t size = sizeof got[0];
  static const char* const parts[3] = {"gate_proj", "up_proj", "down_proj"};
  char spec[4096], name[128];
  size_t length = 0, bytes = 0;
  double worst = 0, largest = 0;
  int e, p, i;

  CHECK_FAILS(SHUNT_IO, "nowhere", shunt_checkpoint_open("/nowhere/at/all", &checkpoint));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "folder is NULL", shunt_checkpoint_open(NULL, &checkpoint));
  CHECK(checkpoint == NULL);
  CHECK_OK(shunt_checkpoint_open(TINY_MOE, &checkpoint));
  CHECK_OK(shunt_safetensors_open(TINY_MOE "/activations.safetensors", &recorded));
  if (checkpoint == NULL || recorded == NULL) return;

  CHECK(strcmp(shunt_checkpoint_family(checkpoint), "qwen3_moe") == 0);
  CHECK(shunt_checkpoint_model_name(checkpoint) != NULL);
  CHECK(shunt_checkpoint_family(NULL) == NULL);
  CHECK_OK(shunt_checkpoint_summary(checkpoint, name, sizeof name, &length));
  CHECK(length > 0 && strlen(name) > 0);
  CHECK(shunt_checkpoint_layer_count(checkpoint) == 4);
  CHECK_OK(shunt_checkpoint_layer_info(checkpoint, 3, &info));
  CHECK(info.index == 3 && info.moe == 1 && strcmp(info.note, "") == 0);
  CHECK(strcmp(info.module, "model.layers.3.mlp") == 0);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "layer is 4: must be 0 to 3",
              shunt_checkpoint_layer_info(checkpoint, 4, &info));
  CHECK(shunt_checkpoint_tensor_count(checkpoint) > 100);
  CHECK(strcmp(shunt_checkpoint_tensor_name(checkpoint, 0), "model.embed_tokens.weight") == 0);
  CHECK(shunt_checkpoint_tensor_name(checkpoint, -1) == NULL);
  CHECK(shunt_checkpoint_tensor_name(checkpoint, 1 << 20) == NULL);
  CHECK_FAILS(SHUNT_BAD_FILE, "no.such.tensor",
              shunt_checkpoint_tensor(checkpoint, "no.such.tensor", &x));
  CHECK_OK(shunt_known_families(NULL, 0, &length));
  CHECK(length > 100);

  CHECK_OK(shunt_checkpoint_layer_spec(checkpoint, 0, spec, sizeof spec, &length));
  CHECK(length < sizeof spec);
  CHECK_OK(shunt_checkpoint_tensor(checkpoint, "model.layers.0.mlp.gate.weight", &router));
  for (e = 0; e < 16; ++e) {
    for (p = 0; p < 3; ++p) {
      snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.%s.weight", e, parts[p]);
      CHECK_OK(shunt_checkpoint_tensor(checkpoint, name, &weights[p][e]));
    }
  }
  experts.gate = weights[0];
  experts.up = weights[1];
  experts.down = weights[2];
  options.dtype = SHUNT_F32;
  options.format = "int4:64:zeros";
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "LayerOptions.format is int4:64:zeros",
              shunt_layer_create_from_checkpoint(context, checkpoint, 0, &options, &layers[0]));
  options.format = NULL;
  CHECK_OK(shunt_layer_create_from_checkpoint(context, checkpoint, 0, &options, &layers[0]));
  CHECK_OK(shunt_layer_create(context, spec, &all, &options, &layers[1]));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "",
              shunt_layer_create_from_checkpoint(context, checkpoint, 9, NULL, &layers[0]));
  shunt_checkpoint_destroy(checkpoint); /* layers hold their weights themselves */

  CHECK_OK(shunt_safetensors_tensor(recorded, "layers.0.input", &x));
  CHECK_OK(shunt_safetensors_tensor(recorded, "layers.0.output", &want));
  CHECK_OK(shunt_buffer_create(context, size, &inputs));
  CHECK_OK(shunt_context_copy(context, shunt_buffer_data(inputs), x.data, size));
  x = on_device(shunt_view_2d(shunt_buffer_data(inputs), SHUNT_F32, 256, 256), device);
  for (i = 0; i < 2 && layers[i] != NULL; ++i) {
    shunt_tensor y;
    shunt_layer_inputs in = {.struct_size = sizeof in, .hidden = &x};
    shunt_layer_outputs out = {.struct_size = sizeof out, .output = &y};
    CHECK_OK(shunt_buffer_create(context, size, &output));
    y = on_device(shunt_view_2d(shunt_buffer_data(output), SHUNT_F32, 256, 256), device);
    CHECK_OK(shunt_layer_workspace_bytes(layers[i], 256, &bytes));
    CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
    CHECK_OK(shunt_layer_forward(layers[i], &in, &out, shunt_buffer_data(workspace), bytes));
    CHECK_OK(shunt_context_copy(context, got[i], shunt_buffer_data(output), size));
    shunt_buffer_destroy(workspace);
    shunt_buffer_destroy(output);
    shunt_layer_destroy(layers[i]);
  }
  CHECK(memcmp(got[0], got[1], size) == 0);
  for (i = 0; i < 256 * 256; ++i) {
    const double right = (double)((const float*)want.data)[i];
    CHECK(isfinite(got[0][i]));
    worst = fmax(worst, fabs((double)got[0][i] - right));
    largest = fmax(largest, fabs(right));
  }
  CHECK(largest > 0 && worst <= 1e-5 * largest);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "to is NULL",
              shunt_context_copy(context, NULL, want.data, size));
  shunt_buffer_destroy(inputs);
  shunt_safetensors_destroy(recorded);
}

void test_layers(const shunt_context* context) {
  test_own_weights(context);
  test_checkpoint(context, SHUNT_CPU);
}

void test_layers_on_gpu(const shunt_context* context) { test_checkpoint(context, SHUNT_CUDA); }
