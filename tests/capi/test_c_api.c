/* Every stage through the C ABI against values worked out by hand, and what it refuses. */
#include <stdlib.h>

#include "check.h"

int failures = 0;
void test_layers(const shunt_context* context);
void test_layers_on_gpu(const shunt_context* context);
void test_packed(const shunt_context* context);

static shunt_tensor ints(const int32_t* data, int64_t n) {
  return shunt_view_1d(data, SHUNT_I32, n);
}
static shunt_tensor floats(const float* data, int64_t n) {
  return shunt_view_1d(data, SHUNT_F32, n);
}

static void test_errors(const shunt_context* context) {
  shunt_order_spec spec = SHUNT_ORDER_SPEC_INIT;
  shunt_context* other = NULL;
  size_t bytes = 0;

  CHECK(strcmp(shunt_version(), SHUNT_VERSION) == 0);
  CHECK(strcmp(shunt_status_name(SHUNT_OK), "ok") == 0);
  CHECK(strcmp(shunt_status_name(SHUNT_BAD_FILE), "bad file") == 0);
  CHECK(strcmp(shunt_status_name(99), "unknown status") == 0);

  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "threads is -1", shunt_context_create_cpu(-1, &other));
  CHECK(other == NULL);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "shunt_context_create_cpu: context is NULL",
              shunt_context_create_cpu(1, NULL));
  shunt_context_destroy(NULL);
  shunt_buffer_destroy(NULL);
  shunt_layer_destroy(NULL);
  shunt_checkpoint_destroy(NULL);
  shunt_safetensors_destroy(NULL);
  CHECK(shunt_context_threads(NULL) == 0);
  CHECK(shunt_buffer_data(NULL) == NULL);
  CHECK(shunt_buffer_bytes(NULL) == 0);

  spec.experts = 4;
  spec.slots = 2;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "shunt_order_supports: spec is NULL",
              shunt_order_supports(context, NULL));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "shunt_order_supports: context is NULL",
              shunt_order_supports(NULL, &spec));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "bytes is NULL",
              shunt_order_workspace_bytes(context, &spec, 1, NULL));
  CHECK_OK(shunt_order_workspace_bytes(context, &spec, 1, &bytes));
  CHECK(bytes > 0);
  spec.expert_map = 2;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.expert_map is 2: must be 0 or 1",
              shunt_order_supports(context, &spec));
  spec.expert_map = 0;
  spec.slots = 200;
  CHECK_FAILS(SHUNT_UNSUPPORTED, "slots is 200: must be 1 to 128",
              shunt_order_supports(context, &spec));
  spec.slots = 2;
  CHECK_OK(shunt_order_supports(context, &spec));
}

/* Options are looked at before there has to be a GPU. */
static void test_cuda_options(void) {
  shunt_cuda_options options = SHUNT_CUDA_OPTIONS_INIT;
  shunt_context* context = NULL;
  shunt_status status;

  options.dependent_launch = 2;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "options.dependent_launch is 2",
              shunt_context_create_cuda_with(&options, &context));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "options is NULL",
              shunt_context_create_cuda_with(NULL, &context));
  options.dependent_launch = 1;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "context is NULL",
              shunt_context_create_cuda_with(&options, NULL));
  options.index = 4000;
  CHECK_FAILS(SHUNT_UNSUPPORTED, "", shunt_context_create_cuda_with(&options, &context));
  CHECK(context == NULL);
  /* An older caller's, which ends before the flag. */
  options.index = 0;
  options.struct_size = 16;
  status = shunt_context_create_cuda_with(&options, &context);
  CHECK(status == SHUNT_OK || status == SHUNT_UNSUPPORTED);
  CHECK((status == SHUNT_OK) == (context != NULL));
  shunt_context_destroy(context);
}

static void test_struct_sizes(const shunt_context* context) {
  /* A newer caller's struct: this version's, and a field more. */
  struct {
    shunt_order_spec known;
    int64_t added;
  } newer = {SHUNT_ORDER_SPEC_INIT, 0};
  shunt_order_spec spec = SHUNT_ORDER_SPEC_INIT;
  shunt_prepared_weights prepared;
  float data[1] = {1};
  shunt_tensor matrix = shunt_view_2d(data, SHUNT_F32, 1, 1);

  newer.known.experts = 4;
  newer.known.slots = 2;
  newer.known.struct_size = sizeof newer;
  CHECK_OK(shunt_order_supports(context, &newer.known));
  newer.added = (int64_t)1 << 40;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.struct_size is 48, and past the 40 bytes",
              shunt_order_supports(context, &newer.known));

  /* An older caller's, which ends before local_experts: that is -1 by default, not 0. */
  spec.experts = 4;
  spec.slots = 2;
  spec.local_experts = 99;
  spec.sentinel = -99;
  CHECK_FAILS(SHUNT_UNSUPPORTED, "local_experts is 99", shunt_order_supports(context, &spec));
  spec.struct_size = 16;
  CHECK_OK(shunt_order_supports(context, &spec));

  spec.struct_size = 0;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT,
              "spec.struct_size is 0: must be sizeof the struct, which is 40",
              shunt_order_supports(context, &spec));
  spec.struct_size = 12;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.struct_size is 12",
              shunt_order_supports(context, &spec));
  spec.struct_size = (uint64_t)1 << 60;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.struct_size is 1152921504606846976",
              shunt_order_supports(context, &spec));

  memset(&prepared, 0, sizeof prepared);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "prepared.struct_size is 0",
              shunt_prepare(context, SHUNT_F32, &matrix, 1, data, sizeof data, &prepared));
}

static void test_tensors(const shunt_context* context) {
  float x[6] = {0};
  const shunt_tensor view = shunt_view_3d(x, SHUNT_F32, 1, 2, 3);
  shunt_tensor bad = shunt_view_2d(x, SHUNT_F32, 2, 3);
  shunt_activation_spec spec = SHUNT_ACTIVATION_SPEC_INIT;

  CHECK(view.rank == 3 && view.shape[2] == 3 && view.shape[3] == 0);
  CHECK(view.strides[0] == 6 && view.strides[1] == 3 && view.strides[2] == 1);
  bad.rank = 5;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "up has rank 5",
              shunt_activate(context, &spec, NULL, &bad, &bad, NULL));
  bad.rank = 2;
  bad.dtype = 17;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "up has dtype 17",
              shunt_activate(context, &spec, NULL, &bad, &bad, NULL));
  bad.dtype = SHUNT_F32;
  bad.device_type = -1;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "up has device_type -1",
              shunt_activate(context, &spec, NULL, &bad, &bad, NULL));
  bad.device_type = SHUNT_CPU;
  bad.shape[0] = -2;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "up has shape[0] -2",
              shunt_activate(context, &spec, NULL, &bad, &bad, NULL));
  bad.shape[0] = INT64_MAX;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "overflows 64 bits",
              shunt_activate(context, &spec, NULL, &bad, &bad, NULL));
}

static void test_route(const shunt_context* context) {
  const float logits[8] = {0, 1, 2, 3, 3, 1, 2, 0};
  const float hidden[4] = {1, 2, 3, -1};
  const float router[8] = {0, 0, 1, 0, 0, 1, 1, 1};
  int32_t ids[4];
  float weights[4], dense[8];
  const shunt_tensor l = shunt_view_2d(logits, SHUNT_F32, 2, 4);
  const shunt_tensor x = shunt_view_2d(hidden, SHUNT_F32, 2, 2);
  const shunt_tensor r = shunt_view_2d(router, SHUNT_F32, 4, 2);
  const shunt_tensor i = shunt_view_2d(ids, SHUNT_I32, 2, 2);
  const shunt_tensor w = shunt_view_2d(weights, SHUNT_F32, 2, 2);
  const shunt_tensor d = shunt_view_2d(dense, SHUNT_F32, 2, 4);
  shunt_route_spec spec = SHUNT_ROUTE_SPEC_INIT;
  shunt_route_inputs in = {.struct_size = sizeof in, .logits = &l};
  const shunt_route_outputs out = {
      .struct_size = sizeof out, .ids = &i, .weights = &w, .dense = &d};
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;
  const double a = 1 / (1 + exp(-1.0)); /* softmax of two logits that differ by 1 */

  spec.experts = 4;
  spec.top_k = 2;
  spec.renormalize = 1;
  CHECK_OK(shunt_route_supports(context, &spec));
  CHECK_OK(shunt_route_workspace_bytes(context, &spec, 2, 2, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes > 0 ? bytes : 64, &workspace));
  CHECK_OK(shunt_route(context, &spec, &in, &out, shunt_buffer_data(workspace),
                       shunt_buffer_bytes(workspace)));
  CHECK_INTS(ids, 3, 2, 0, 2);
  CHECK(fabs((double)weights[0] - a) < 1e-6 && fabs((double)weights[1] - (1 - a)) < 1e-6);
  CHECK(fabs((double)dense[3] - a) < 1e-6 && dense[0] == 0 && dense[1] == 0);

  /* From hidden states: logits {0, 1, 2, 3} and {0, 3, -1, 2}; twice the weight. */
  in.logits = NULL;
  in.hidden = &x;
  in.router_weight = &r;
  spec.scale = 2;
  CHECK_OK(shunt_route(context, &spec, &in, &out, shunt_buffer_data(workspace),
                       shunt_buffer_bytes(workspace)));
  CHECK_INTS(ids, 3, 2, 1, 3);
  CHECK(fabs((double)weights[2] - 2 * a) < 1e-6);

  in.router_weight = NULL;
  CHECK(shunt_route(context, &spec, &in, &out, shunt_buffer_data(workspace),
                    shunt_buffer_bytes(workspace)) == SHUNT_INVALID_ARGUMENT);
  in.struct_size = 8; /* an input struct of no field: nothing is given */
  CHECK(shunt_route(context, &spec, &in, &out, shunt_buffer_data(workspace),
                    shunt_buffer_bytes(workspace)) == SHUNT_INVALID_ARGUMENT);
  spec.score = 5;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "shunt_route_supports: spec.score is 5: must be 0 to 4",
              shunt_route_supports(context, &spec));
  spec.score = SHUNT_SCORE_SIGMOID;
  spec.top_k = 5;
  CHECK_FAILS(SHUNT_UNSUPPORTED, "top_k", shunt_route_supports(context, &spec));
  spec.top_k = 2;
  spec.batch_invariant = 2;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.batch_invariant is 2: must be 0 or 1",
              shunt_route_supports(context, &spec));
  shunt_buffer_destroy(workspace);
}

/* What route and order say, in one call. */
static void test_route_and_order(const shunt_context* context) {
  const float logits[12] = {0, 3, 1, 2, 5, 4, 0, 0, 1, 0, 0, 9};
  float weights[6];
  int32_t ids[6], offsets[5], permutation[6], inverse[6];
  const shunt_tensor l = shunt_view_2d(logits, SHUNT_F32, 3, 4);
  const shunt_tensor t_ids = shunt_view_2d(ids, SHUNT_I32, 3, 2);
  const shunt_tensor t_weights = shunt_view_2d(weights, SHUNT_F32, 3, 2);
  const shunt_tensor t_offsets = ints(offsets, 5), t_permutation = ints(permutation, 6);
  const shunt_tensor t_inverse = shunt_view_2d(inverse, SHUNT_I32, 3, 2);
  shunt_route_spec route = SHUNT_ROUTE_SPEC_INIT;
  shunt_order_spec order = SHUNT_ORDER_SPEC_INIT;
  const shunt_route_inputs in = {.struct_size = sizeof in, .logits = &l};
  const shunt_route_outputs routed = {
      .struct_size = sizeof routed, .ids = &t_ids, .weights = &t_weights};
  const shunt_order_outputs ordered = {.struct_size = sizeof ordered,
                                       .offsets = &t_offsets,
                                       .permutation = &t_permutation,
                                       .inverse = &t_inverse};
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;

  route.experts = order.experts = 4;
  route.top_k = 2;
  order.slots = 3;
  CHECK_FAILS(SHUNT_UNSUPPORTED, "slots of the order is 3: must be 2",
              shunt_route_and_order_supports(context, &route, &order));
  order.slots = 2;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "route_spec is NULL",
              shunt_route_and_order_supports(context, NULL, &order));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "order_spec is NULL",
              shunt_route_and_order_workspace_bytes(context, &route, NULL, 3, 0, &bytes));
  CHECK_OK(shunt_route_and_order_supports(context, &route, &order));
  CHECK_OK(shunt_route_and_order_workspace_bytes(context, &route, &order, 3, 0, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  CHECK_OK(shunt_route_and_order(context, &route, &in, &routed, &order, &ordered, NULL,
                                 shunt_buffer_data(workspace), bytes));
  CHECK_INTS(ids, 1, 3, 0, 1, 3, 0);
  CHECK_INTS(offsets, 0, 2, 4, 4, 6);
  CHECK_INTS(permutation, 2, 5, 0, 3, 1, 4);
  CHECK_INTS(inverse, 2, 4, 0, 3, 5, 1);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "ordered is NULL",
              shunt_route_and_order(context, &route, &in, &routed, &order, NULL, NULL,
                                    shunt_buffer_data(workspace), bytes));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "workspace",
              shunt_route_and_order(context, &route, &in, &routed, &order, &ordered, NULL,
                                    shunt_buffer_data(workspace), 0));
  shunt_buffer_destroy(workspace);
}

static void test_order_gather_combine(const shunt_context* context) {
  /* The example of moe-sorting: 5 tokens, 6 experts, 3 ids each, tiles of 4, sentinel 6. */
  const int32_t ids[15] = {0, 3, 5, 2, 3, 5, 1, 3, 5, 1, 2, 3, 1, 3, 5};
  const float weights[15] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float hidden[10], rows[30], y[10];
  int32_t offsets[7], permutation[15], inverse[15], token_ids[36], experts[9], padded[1], tiles[1];
  float row_weights[15], zeroed[10], scales[15];
  unsigned char quantised[30];
  const shunt_tensor t_ids = shunt_view_2d(ids, SHUNT_I32, 5, 3);
  const shunt_tensor t_weights = shunt_view_2d(weights, SHUNT_F32, 5, 3);
  const shunt_tensor t_offsets = ints(offsets, 7);
  const shunt_tensor t_permutation = ints(permutation, 15);
  const shunt_tensor t_inverse = shunt_view_2d(inverse, SHUNT_I32, 5, 3);
  const shunt_tensor t_row_weights = floats(row_weights, 15);
  const shunt_tensor t_token_ids = ints(token_ids, 36);
  const shunt_tensor t_experts = ints(experts, 9);
  const shunt_tensor t_padded = ints(padded, 1);
  const shunt_tensor t_tiles = ints(tiles, 1);
  const shunt_tensor t_zeroed = shunt_view_2d(zeroed, SHUNT_F32, 5, 2);
  const shunt_tensor t_hidden = shunt_view_2d(hidden, SHUNT_F32, 5, 2);
  const shunt_tensor t_rows = shunt_view_2d(rows, SHUNT_F32, 15, 2);
  const shunt_tensor t_count = ints(offsets + 6, 1);
  const shunt_tensor t_y = shunt_view_2d(y, SHUNT_F32, 5, 2);
  const shunt_tensor t_quantised = shunt_view_2d(quantised, SHUNT_F8_E4M3, 15, 2);
  const shunt_tensor t_scales = floats(scales, 15);
  shunt_order_spec spec = SHUNT_ORDER_SPEC_INIT;
  shunt_gather_spec gather = SHUNT_GATHER_SPEC_INIT;
  shunt_combine_spec combine = SHUNT_COMBINE_SPEC_INIT;
  const shunt_order_inputs in = {.struct_size = sizeof in, .ids = &t_ids, .weights = &t_weights};
  const shunt_order_outputs out = {.struct_size = sizeof out,
                                   .offsets = &t_offsets,
                                   .permutation = &t_permutation,
                                   .inverse = &t_inverse,
                                   .weights = &t_row_weights,
                                   .sorted_token_ids = &t_token_ids,
                                   .sorted_expert_ids = &t_experts,
                                   .num_tokens_post_padded = &t_padded,
                                   .num_sorted_tiles = &t_tiles,
                                   .zeroed = &t_zeroed};
  shunt_gather_inputs gather_in = {.struct_size = sizeof gather_in,
                                   .hidden = &t_hidden,
                                   .permutation = &t_permutation,
                                   .rows = &t_count,
                                   .weights = &t_row_weights};
  shunt_combine_inputs combine_in = {
      .struct_size = sizeof combine_in, .rows = &t_rows, .inverse = &t_inverse};
  shunt_buffer* workspace = NULL;
  int64_t capacity = 0;
  size_t bytes = 0;
  int t;

  spec.experts = 6;
  spec.slots = 3;
  spec.tile = 4;
  spec.sentinel = 6;
  CHECK_OK(shunt_padded_rows_capacity(&spec, 5, &capacity));
  CHECK(capacity == 36);
  CHECK_OK(shunt_order_workspace_bytes(context, &spec, 5, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  CHECK(shunt_buffer_bytes(workspace) == bytes);
  memset(zeroed, 1, sizeof zeroed);
  CHECK_OK(shunt_order(context, &spec, &in, &out, shunt_buffer_data(workspace), bytes));
  CHECK_INTS(offsets, 0, 1, 4, 6, 11, 11, 15);
  CHECK_INTS(permutation, 0, 6, 9, 12, 3, 10, 1, 4, 7, 11, 13, 2, 5, 8, 14);
  CHECK_INTS(inverse, 0, 6, 11, 4, 7, 12, 1, 8, 13, 2, 5, 9, 3, 10, 14);
  CHECK_INTS(token_ids, 0, 6, 6, 6, 2, 3, 4, 6, 1, 3, 6, 6, 0, 1, 2, 3, 4, 6, 6, 6, 6, 6, 6, 6, 0,
             1, 2, 4, 6, 6, 6, 6, 6, 6, 6, 6);
  CHECK_INTS(experts, 0, 1, 2, 3, 3, 4, 5, -1, -1);
  CHECK_INTS(padded, 28);
  CHECK_INTS(tiles, 7);
  CHECK_FLOATS(row_weights, 1, 7, 10, 13, 4, 11, 2, 5, 8, 12, 14, 3, 6, 9, 15);
  CHECK_FLOATS(zeroed, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "workspace has",
              shunt_order(context, &spec, &in, &out, shunt_buffer_data(workspace), bytes - 1));

  for (t = 0; t < 5; ++t) {
    hidden[2 * t] = (float)t;
    hidden[2 * t + 1] = 1;
  }
  gather.slots = 3;
  gather.scale_by_weight = 1;
  CHECK_OK(shunt_gather_supports(context, &gather));
  CHECK_OK(shunt_gather(context, &gather, &gather_in, &t_rows));
  CHECK_FLOATS(rows, 0, 1, 14, 7, 30, 10, 52, 13, 4, 4, 33, 11, 0, 2, 5, 5, 16, 8);
  gather.scale_by_weight = 0;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "weights is given",
              shunt_gather(context, &gather, &gather_in, &t_rows));

  /* To fp8: a row (t, 1) has the amax max(t, 1), for which 448 (0x7e) stands; 0x76 is 224. */
  gather.quantise = SHUNT_QUANTISE_ROW;
  gather_in.weights = NULL;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "scales is missing",
              shunt_gather(context, &gather, &gather_in, &t_quantised));
  CHECK_OK(shunt_gather_quantised(context, &gather, &gather_in, &t_quantised, &t_scales));
  CHECK_FLOATS(scales, 1.0F / 448, 2.0F / 448, 3.0F / 448, 4.0F / 448, 1.0F / 448, 3.0F / 448);
  CHECK(quantised[0] == 0x00 && quantised[1] == 0x7e); /* (0, 1) */
  CHECK(quantised[2] == 0x7e && quantised[3] == 0x76); /* (2, 1) */
  gather.quantise = 3;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.quantise is 3: must be 0 to 2",
              shunt_gather_quantised(context, &gather, &gather_in, &t_quantised, &t_scales));
  gather.quantise = 1;
  gather.reserved = 7;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.reserved is 7",
              shunt_gather_quantised(context, &gather, &gather_in, &t_quantised, &t_scales));

  /* The weights are in the rows already: y[t] = (t, 1) * the sum of t's weights. */
  combine.slots = 3;
  combine.weighted = 0;
  CHECK_OK(shunt_combine_supports(context, &combine));
  CHECK_OK(shunt_combine(context, &combine, &combine_in, &t_y));
  CHECK_FLOATS(y, 0, 6, 15, 15, 48, 24, 99, 33, 168, 42);
  /* Now weighted as well, with the hidden states on top. */
  combine.weighted = 1;
  combine_in.weights = &t_weights;
  combine_in.residual = &t_hidden;
  CHECK_OK(shunt_combine(context, &combine, &combine_in, &t_y));
  CHECK_FLOATS(y, 0, 15, 78, 78, 390, 195);
  combine.identity_until = 7;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "identity_until is 7: must be 0, or above an identity_from",
              shunt_combine(context, &combine, &combine_in, &t_y));
  shunt_buffer_destroy(workspace);
}

static void test_shuffles(const shunt_context* context) {
  /* Two ranks, three experts. Rank 0: expert 0 has row 0, expert 2 rows 1 and 2; rank 1: rows 3 and
   * 4, row 5, row 6. */
  const int32_t counts[6] = {1, 0, 2, 2, 1, 1};
  const float tokens[7] = {0, 1, 2, 3, 4, 5, 6};
  float rows[7], back[7];
  int32_t of_experts[4];
  const shunt_tensor t_counts = shunt_view_2d(counts, SHUNT_I32, 2, 3);
  const shunt_tensor t_tokens = shunt_view_2d(tokens, SHUNT_F32, 7, 1);
  const shunt_tensor t_rows = shunt_view_2d(rows, SHUNT_F32, 7, 1);
  const shunt_tensor t_back = shunt_view_2d(back, SHUNT_F32, 7, 1);
  const shunt_tensor t_of_experts = ints(of_experts, 4);
  int32_t offsets[4], only[3];
  const shunt_tensor t_offsets = ints(offsets, 4), t_only = ints(only, 3);
  shunt_shuffle_spec spec = SHUNT_SHUFFLE_SPEC_INIT;
  /* Two ranks with a block of 3 positions each, of 2 experts: positions 0 and 1, then 2. */
  const float blocks[6] = {1, 2, 77, 77, 77, 4};
  const int32_t positions[2] = {2, 1}, token_of[3] = {1, 0, 1};
  float y[2] = {10, 20};
  const shunt_tensor t_blocks = shunt_view_3d(blocks, SHUNT_F32, 2, 3, 1);
  const shunt_tensor t_positions = ints(positions, 2);
  const shunt_tensor t_token_of = ints(token_of, 3);
  const shunt_tensor t_y = shunt_view_2d(y, SHUNT_F32, 2, 1);
  shunt_scatter_add_spec add = SHUNT_SCATTER_ADD_SPEC_INIT;
  shunt_scatter_add_inputs in = {.struct_size = sizeof in,
                                 .rows = &t_blocks,
                                 .token_counts = &t_positions,
                                 .token_indices = &t_token_of};
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;

  CHECK_FAILS(SHUNT_UNSUPPORTED, "ranks is 0", shunt_shuffle_supports(context, &spec));
  spec.ranks = 2;
  spec.experts = 3;
  CHECK_OK(shunt_shuffle_supports(context, &spec));
  CHECK_OK(shunt_shuffle_workspace_bytes(context, &spec, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  CHECK_OK(shunt_combine_shuffling(context, &spec, &t_tokens, &t_counts, &t_rows, &t_of_experts,
                                   shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(rows, 0, 3, 4, 5, 1, 2, 6);
  CHECK_INTS(of_experts, 3, 1, 3, 7);
  CHECK_OK(shunt_offsets_from_counts(context, &t_of_experts, &t_offsets));
  CHECK_INTS(offsets, 0, 3, 4, 7);
  CHECK_OK(shunt_counts_from_offsets(context, &t_offsets, &t_only));
  CHECK_INTS(only, 3, 1, 3);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "it is missing",
              shunt_offsets_from_counts(context, NULL, &t_offsets));
  CHECK_OK(shunt_split_shuffling(context, &spec, &t_rows, &t_counts, &t_back,
                                 shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(back, 0, 1, 2, 3, 4, 5, 6);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "workspace has",
              shunt_split_shuffling(context, &spec, &t_rows, &t_counts, &t_back,
                                    shunt_buffer_data(workspace), bytes - 1));
  spec.zero_fill = 2;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.zero_fill is 2: must be 0 or 1",
              shunt_shuffle_supports(context, &spec));
  shunt_buffer_destroy(workspace);
  workspace = NULL;

  CHECK_OK(shunt_scatter_add_supports(context, &add));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "tokens is 4611686018427387904: must be 0 to 2147483646",
              shunt_scatter_add_workspace_bytes(context, &add, INT64_C(1) << 62, 10, &bytes));
  CHECK_OK(shunt_scatter_add_workspace_bytes(context, &add, 2, 3, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  CHECK_OK(shunt_scatter_add_padded(context, &add, &in, &t_y, shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(y, 12, 25);
  add.accumulate = 0;
  CHECK_OK(shunt_scatter_add_padded(context, &add, &in, &t_y, shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(y, 2, 5);
  in.token_indices = NULL;
  CHECK_FAILS(
      SHUNT_INVALID_ARGUMENT, "token_indices is (none)",
      shunt_scatter_add_padded(context, &add, &in, &t_y, shunt_buffer_data(workspace), bytes));
  add.reserved = 1;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.reserved is 1",
              shunt_scatter_add_supports(context, &add));
  shunt_buffer_destroy(workspace);
}

/* The same weights; two groups with room for two rows each. */
static void test_group_walks(const shunt_context* context, const shunt_grouped_gemm_spec* spec,
                             shunt_grouped_gemm_inputs in, const float* x) {
  const int32_t counts[2] = {1, 1};
  float y[8] = {77, 77, 77, 77, 77, 77, 77, 77};
  const shunt_tensor t_x = shunt_view_3d(x, SHUNT_F32, 2, 2, 3);
  const shunt_tensor t_y = shunt_view_3d(y, SHUNT_F32, 2, 2, 2);
  const shunt_tensor t_counts = ints(counts, 2);
  shunt_buffer* workspace = NULL;
  size_t bytes = 0;

  CHECK_OK(shunt_grouped_gemm_workspace_bytes(context, spec, 4, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  in.rows = &t_x;
  in.counts = &t_counts;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "counts are given beside offsets",
              shunt_grouped_gemm(context, spec, &in, &t_y, shunt_buffer_data(workspace), bytes));
  in.offsets = NULL;
  in.expected_rows = 1;
  CHECK_OK(shunt_grouped_gemm(context, spec, &in, &t_y, shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(y, 11, 28, 77, 77, 54, 31, 77, 77);
  in.counts = NULL;
  CHECK_OK(shunt_grouped_gemm(context, spec, &in, &t_y, shunt_buffer_data(workspace), bytes));
  CHECK_FLOATS(y, 11, 28, 14, 37, 54, 31, 30, 40);
  in.expected_rows = -1;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "expected_rows is -1",
              shunt_grouped_gemm(context, spec, &in, &t_y, shunt_buffer_data(workspace), bytes));
  shunt_buffer_destroy(workspace);
}

/* Two matrices become their own prepared form, and themselves again. */
static void test_in_place(const shunt_context* context) {
  enum { n = 64, k = 64, bytes = 2 * n * k * 4 };
  static float before[2 * n * k], now[2 * n * k];
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  shunt_buffer *memory = NULL, *scratch = NULL;
  shunt_tensor matrices;
  int i;

  for (i = 0; i < 2 * n * k; ++i) before[i] = (float)i;
  CHECK_OK(shunt_buffer_create(context, bytes, &memory));
  CHECK_OK(shunt_buffer_create(context, bytes / 2, &scratch));
  CHECK_OK(shunt_context_copy(context, shunt_buffer_data(memory), before, bytes));
  matrices = shunt_view_3d(shunt_buffer_data(memory), SHUNT_F32, 2, n, k);
  CHECK_OK(shunt_prepare_in_place(context, &matrices, 1, shunt_buffer_data(scratch), bytes / 2,
                                  &prepared));
  CHECK(prepared.groups == 2 && prepared.n == n && prepared.k == k && prepared.paired == 1);
  CHECK(prepared.data == shunt_buffer_data(memory));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "scratch has 64 bytes",
              shunt_unprepare_in_place(context, &prepared, shunt_buffer_data(scratch), 64));
  CHECK_OK(shunt_unprepare_in_place(context, &prepared, shunt_buffer_data(scratch), bytes / 2));
  CHECK_OK(shunt_context_copy(context, now, shunt_buffer_data(memory), bytes));
  CHECK(memcmp(now, before, bytes) == 0);
  shunt_buffer_destroy(scratch);
  shunt_buffer_destroy(memory);
}

static void test_gemm(const shunt_context* context) {
  /* Two groups of [2, 3]; three rows, one of group 0 and two of group 1; a fourth is left alone. */
  const float w[12] = {1, 0, 0, 0, 1, 2, 1, 1, 1, 0, 0, -1};
  const float x[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0};
  const float bias[4] = {10, 20, 30, 40};
  const int32_t offsets[3] = {0, 1, 3};
  float y[8] = {0, 0, 0, 0, 0, 0, 77, 77};
  float back[6];
  const shunt_tensor t_w = shunt_view_3d(w, SHUNT_F32, 2, 2, 3);
  const shunt_tensor t_x = shunt_view_2d(x, SHUNT_F32, 4, 3);
  const shunt_tensor t_bias = shunt_view_2d(bias, SHUNT_F32, 2, 2);
  const shunt_tensor t_offsets = ints(offsets, 3);
  const shunt_tensor t_y = shunt_view_2d(y, SHUNT_F32, 4, 2);
  const shunt_tensor t_back = shunt_view_2d(back, SHUNT_F32, 2, 3);
  shunt_tensor matrices[2];
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  shunt_prepared_weights again = {.struct_size = sizeof again};
  shunt_buffer* loaded = NULL;
  shunt_grouped_gemm_spec spec = SHUNT_GROUPED_GEMM_SPEC_INIT;
  shunt_grouped_gemm_inputs in = {
      .struct_size = sizeof in, .rows = &t_x, .offsets = &t_offsets, .weights = &t_w};
  shunt_buffer *memory = NULL, *workspace = NULL;
  size_t bytes = 0;
  int prepared_too;

  matrices[0] = shunt_view_2d(w, SHUNT_F32, 2, 3);
  matrices[1] = shunt_view_2d(w + 6, SHUNT_F32, 2, 3);
  CHECK_OK(shunt_prepared_bytes(context, SHUNT_F32, 2, 2, 3, 0, &bytes));
  CHECK(bytes >= sizeof w);
  CHECK_OK(shunt_buffer_create(context, bytes, &memory));
  CHECK_OK(
      shunt_prepare(context, SHUNT_F32, matrices, 2, shunt_buffer_data(memory), bytes, &prepared));
  CHECK(prepared.groups == 2 && prepared.n == 2 && prepared.k == 3 && prepared.paired == 0);
  CHECK(prepared.data == shunt_buffer_data(memory) && prepared.struct_size == sizeof prepared);
  CHECK_OK(shunt_unprepare(context, &prepared, 1, &t_back));
  CHECK_OK(shunt_prepared_save(context, &prepared, "test_c_api.prepared"));
  CHECK_OK(shunt_prepared_load(context, "test_c_api.prepared", &loaded, &again));
  CHECK(again.bytes == prepared.bytes && again.data == shunt_buffer_data(loaded) &&
        memcmp(again.data, prepared.data, (size_t)again.bytes) == 0);
  shunt_buffer_destroy(loaded);
  CHECK(remove("test_c_api.prepared") == 0);
  CHECK_FAILS(SHUNT_IO, "test_c_api.prepared",
              shunt_prepared_load(context, "test_c_api.prepared", &loaded, &again));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "path is NULL",
              shunt_prepared_save(context, &prepared, NULL));
  CHECK_FLOATS(back, 1, 1, 1, 0, 0, -1);
  test_in_place(context);
  CHECK_FAILS(
      SHUNT_INVALID_ARGUMENT, "matrices is NULL",
      shunt_prepare(context, SHUNT_F32, NULL, 2, shunt_buffer_data(memory), bytes, &prepared));
  CHECK_FAILS(
      SHUNT_INVALID_ARGUMENT, "groups is -1",
      shunt_prepare(context, SHUNT_F32, matrices, -1, shunt_buffer_data(memory), bytes, &prepared));

  spec.groups = 2;
  spec.n = 2;
  spec.k = 3;
  for (prepared_too = 0; prepared_too < 2; ++prepared_too) {
    spec.prepared = prepared_too;
    spec.bias = prepared_too;
    in.bias = prepared_too ? &t_bias : NULL;
    in.weights = prepared_too ? NULL : &t_w;
    in.prepared = prepared_too ? &prepared : NULL;
    CHECK_OK(shunt_grouped_gemm_supports(context, &spec));
    CHECK_OK(shunt_grouped_gemm_workspace_bytes(context, &spec, 4, &bytes));
    CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
    CHECK_OK(shunt_grouped_gemm(context, &spec, &in, &t_y, shunt_buffer_data(workspace), bytes));
    shunt_buffer_destroy(workspace);
    workspace = NULL;
    if (prepared_too) {
      CHECK_FLOATS(y, 11, 28, 45, 34, 54, 31, 77, 77);
    } else {
      CHECK_FLOATS(y, 1, 8, 15, -6, 24, -9, 77, 77);
    }
  }
  in.weights = NULL;
  in.prepared = &prepared;
  in.bias = &t_bias;
  test_group_walks(context, &spec, in, x);
  spec.dtype = SHUNT_I8;
  CHECK_FAILS(SHUNT_UNSUPPORTED, "dtype", shunt_grouped_gemm_supports(context, &spec));
  shunt_buffer_destroy(memory);
}

static void test_prepare_paired(const shunt_context* context) {
  const float gate[6] = {1, 2, 3, 4, 5, 6}, up[6] = {7, 8, 9, 10, 11, 12};
  float back[12];
  const shunt_tensor t_gate = shunt_view_2d(gate, SHUNT_F32, 2, 3);
  const shunt_tensor t_up = shunt_view_2d(up, SHUNT_F32, 2, 3);
  const shunt_tensor t_back = shunt_view_2d(back, SHUNT_F32, 4, 3);
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  shunt_buffer* memory = NULL;
  size_t bytes = 0;
  CHECK_OK(shunt_prepared_bytes(context, SHUNT_BF16, 1, 4, 3, 1, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &memory));
  CHECK_OK(shunt_prepare_paired(context, SHUNT_BF16, &t_gate, &t_up, 1, shunt_buffer_data(memory),
                                bytes, &prepared));
  CHECK(prepared.paired == 1 && prepared.n == 4 && prepared.dtype == SHUNT_BF16);
  CHECK_OK(shunt_unprepare(context, &prepared, 0, &t_back));
  CHECK_FLOATS(back, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12);
  shunt_buffer_destroy(memory);
}

static void test_activate(const shunt_context* context) {
  const float gate[6] = {0, 1, -1, 100, 2, 77}, up[6] = {3, 2, 1, 0.5F, -1, 77};
  const int32_t count = 2;
  float h[6] = {77, 77, 77, 77, 77, 77};
  const shunt_tensor g = shunt_view_2d(gate, SHUNT_F32, 3, 2);
  const shunt_tensor u = shunt_view_2d(up, SHUNT_F32, 3, 2);
  const shunt_tensor y = shunt_view_2d(h, SHUNT_F32, 3, 2);
  const shunt_tensor rows = ints(&count, 1);
  unsigned char quantised[6] = {0x55, 0x55, 0x55, 0x55, 0x55, 0x55};
  float scales[3] = {77, 77, 77};
  const shunt_tensor t_quantised = shunt_view_2d(quantised, SHUNT_F8_E4M3, 3, 2);
  const shunt_tensor t_scales = shunt_view_1d(scales, SHUNT_F32, 3);
  shunt_quantise_spec quantise = SHUNT_QUANTISE_SPEC_INIT;
  shunt_activation_spec spec = SHUNT_ACTIVATION_SPEC_INIT;

  CHECK_OK(shunt_activate_supports(context, &spec));
  CHECK_OK(shunt_activate(context, &spec, &g, &u, &y, &rows));
  CHECK_FLOATS(h, 0, 2 * 0.731058578630005, -0.268941421369995, 50, 77, 77);
  spec.kind = SHUNT_ACTIVATION_RELU2;
  spec.gated = 0;
  CHECK_OK(shunt_activate(context, &spec, NULL, &u, &y, NULL));
  CHECK_FLOATS(h, 9, 4, 1, 0.25, 0, 77.0 * 77);
  CHECK(shunt_activate(context, &spec, &g, &u, &y, NULL) == SHUNT_INVALID_ARGUMENT);
  CHECK(shunt_activate(context, &spec, NULL, NULL, &y, NULL) == SHUNT_INVALID_ARGUMENT);

  /* To fp8: up^2 of rows (3, 2), (1, 0.5), (-1, 77), of whose largest each is 448 (0x7e); of the
   * first row's 9, 4 is 199.1, which lies nearer to 192 (0x74) than to 208. */
  quantise.quantise = SHUNT_QUANTISE_ROW;
  CHECK_OK(shunt_activate_quantised(context, &spec, &quantise, NULL, &u, &t_quantised, &t_scales,
                                    &rows));
  CHECK_FLOATS(scales, 9.0F / 448, 1.0F / 448, 77);
  CHECK(quantised[0] == 0x7e && quantised[1] == 0x74);
  CHECK(quantised[2] == 0x7e && quantised[3] == 0x6e && quantised[4] == 0x55); /* 112 */
  CHECK_FAILS(
      SHUNT_INVALID_ARGUMENT, "scales is missing",
      shunt_activate_quantised(context, &spec, &quantise, NULL, &u, &t_quantised, NULL, NULL));
  quantise.quantise = SHUNT_QUANTISE_NONE;
  CHECK_FAILS(
      SHUNT_INVALID_ARGUMENT, "quantise is 0 (none)",
      shunt_activate_quantised(context, &spec, &quantise, NULL, &u, &t_quantised, &t_scales, NULL));
  quantise.reserved = 7;
  CHECK_FAILS(
      SHUNT_INVALID_ARGUMENT, "quantise.reserved is 7",
      shunt_activate_quantised(context, &spec, &quantise, NULL, &u, &t_quantised, &t_scales, NULL));
  spec.kind = 7;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "spec.kind is 7: must be 0 to 6",
              shunt_activate_supports(context, &spec));
}

/* With SHUNT_TEST_DEVICE=cuda a layer on the GPU, and nothing else; 77: there is none. */
static int main_on_gpu(void) {
  shunt_context* context = NULL;
  const shunt_status status = shunt_context_create_cuda(NULL, 0, &context);
  if (status == SHUNT_UNSUPPORTED) {
    printf("skipped: %s\n", shunt_last_error());
    return 77;
  }
  CHECK_OK(status);
  if (context == NULL) return 1;
  test_layers_on_gpu(context);
  shunt_context_destroy(context);
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

int main(void) {
  const char* const device = getenv("SHUNT_TEST_DEVICE");
  shunt_context* context = NULL;
  if (device != NULL && strcmp(device, "cuda") == 0) return main_on_gpu();
  CHECK_OK(shunt_context_create_cpu(2, &context));
  if (context == NULL) return 1;
  CHECK(shunt_context_threads(context) == 2);
  CHECK_OK(shunt_context_synchronize(context));
  test_errors(context);
  test_cuda_options();
  test_struct_sizes(context);
  test_tensors(context);
  test_route(context);
  test_route_and_order(context);
  test_order_gather_combine(context);
  test_shuffles(context);
  test_gemm(context);
  test_prepare_paired(context);
  test_activate(context);
  test_layers(context);
  test_packed(context);
  shunt_context_destroy(context);
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
