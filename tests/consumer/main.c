/* Routes two tokens over four experts with the installed library alone. */
#include <shunt/c/shunt.h>
#include <stdio.h>

int main(void) {
  const float logits[8] = {0, 1, 2, 3, 3, 1, 2, 0};
  int32_t ids[4] = {-1, -1, -1, -1};
  const shunt_tensor l = shunt_view_2d(logits, SHUNT_F32, 2, 4);
  const shunt_tensor i = shunt_view_2d(ids, SHUNT_I32, 2, 2);
  const shunt_route_inputs in = {.struct_size = sizeof in, .logits = &l};
  const shunt_route_outputs out = {.struct_size = sizeof out, .ids = &i};
  shunt_route_spec spec = SHUNT_ROUTE_SPEC_INIT;
  shunt_context* context = NULL;
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;
  int right;

  spec.experts = 4;
  spec.top_k = 2;
  right = shunt_context_create_cpu(0, &context) == SHUNT_OK &&
          shunt_route_workspace_bytes(context, &spec, 2, 0, &bytes) == SHUNT_OK &&
          shunt_buffer_create(context, bytes, &workspace) == SHUNT_OK &&
          shunt_route(context, &spec, &in, &out, shunt_buffer_data(workspace), bytes) == SHUNT_OK;
  if (!right) printf("c: %s\n", shunt_last_error());
  right = right && ids[0] == 3 && ids[1] == 2 && ids[2] == 0 && ids[3] == 2;
  printf("c: token 0 goes to experts %d and %d: %s\n", (int)ids[0], (int)ids[1],
         right ? "right" : "WRONG");
  shunt_buffer_destroy(workspace);
  shunt_context_destroy(context);
  return right ? 0 : 1;
}
