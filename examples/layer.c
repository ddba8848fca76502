/* The same from C: example_layer_c [DIR] */
#include <shunt/c/shunt.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(void) {
  fprintf(stderr, "%s\n", shunt_last_error());
  return 1;
}

int main(int argc, char** argv) {
  enum { tokens = 4 };
  shunt_context* engine = NULL;
  shunt_checkpoint* model = NULL;
  shunt_layer* layer = NULL;
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;
  char rule[512];

  if (shunt_context_create_cpu(0, &engine)) return failed();
  if (shunt_checkpoint_open(argc > 1 ? argv[1] : "models/tiny-moe", &model)) return failed();
  const shunt_layer_options options = {.struct_size = sizeof options, .dtype = SHUNT_BF16};
  if (shunt_layer_create_from_checkpoint(engine, model, shunt_checkpoint_first_moe_layer(model),
                                         &options, &layer)) {
    return failed();
  }
  if (shunt_layer_describe(layer, rule, sizeof rule, NULL)) return failed();
  printf("%s\n", rule);

  const int64_t hidden = shunt_layer_hidden_size(layer);
  float* const x = malloc((size_t)(tokens * hidden) * sizeof *x);
  float* const y = malloc((size_t)(tokens * hidden) * sizeof *y);
  if (x == NULL || y == NULL) return 1;
  for (int64_t i = 0; i < tokens * hidden; ++i) x[i] = 0.5f;
  const shunt_tensor in = shunt_view_2d(x, SHUNT_F32, tokens, hidden);
  const shunt_tensor out = shunt_view_2d(y, SHUNT_F32, tokens, hidden);
  const shunt_layer_inputs inputs = {.struct_size = sizeof inputs, .hidden = &in};
  const shunt_layer_outputs outputs = {.struct_size = sizeof outputs, .output = &out};
  if (shunt_layer_workspace_bytes(layer, tokens, &bytes)) return failed();
  if (shunt_buffer_create(engine, bytes, &workspace)) return failed();
  if (shunt_layer_forward(layer, &inputs, &outputs, shunt_buffer_data(workspace), bytes)) {
    return failed();
  }
  printf("y[0, 0] = %g\n", (double)y[0]);
  free(x);
  free(y);
  shunt_buffer_destroy(workspace);
  shunt_layer_destroy(layer);
  shunt_checkpoint_destroy(model);
  shunt_context_destroy(engine);
  return 0;
}
