/* The same two tokens through the C ABI of the installed library. */
#include <shunt/c/shunt.h>
#include <stdio.h>

static int failed(const char* what, shunt_status status) {
  if (status == SHUNT_OK) return 0;
  fprintf(stderr, "%s: %s: %s\n", what, shunt_status_name(status), shunt_last_error());
  return 1;
}

int main(void) {
  const float logits[8] = {0, 1, 2, 3, 3, 1, 2, 0};
  int32_t ids[4] = {-1, -1, -1, -1};
  shunt_route_spec spec = SHUNT_ROUTE_SPEC_INIT;
  const shunt_tensor logits_view = shunt_view_2d(logits, SHUNT_F32, 2, 4);
  const shunt_tensor ids_view = shunt_view_2d(ids, SHUNT_I32, 2, 2);
  shunt_route_inputs inputs = {sizeof inputs};
  shunt_route_outputs outputs = {sizeof outputs};
  shunt_context* context = NULL;
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;
  int right;

  spec.experts = 4;
  spec.top_k = 2;
  inputs.logits = &logits_view;
  outputs.ids = &ids_view;
  if (failed("context", shunt_context_create_cpu(0, &context)) ||
      failed("workspace", shunt_route_workspace_bytes(context, &spec, 2, 0, &bytes)) ||
      failed("buffer", shunt_buffer_create(context, bytes, &workspace)) ||
      failed("route", shunt_route(context, &spec, &inputs, &outputs, shunt_buffer_data(workspace),
                                  shunt_buffer_bytes(workspace)))) {
    return 1;
  }
  shunt_buffer_destroy(workspace);
  shunt_context_destroy(context);

  right = ids[0] == 3 && ids[1] == 2 && ids[2] == 0 && ids[3] == 2;
  printf("c: shunt %s, token 0 goes to experts %d and %d: %s\n", shunt_version(), (int)ids[0],
         (int)ids[1], right ? "right" : "WRONG");
  return right ? 0 : 1;
}
