/* Packed weights through the C ABI: packed, prepared, multiplied, on disk and in a layer. */
#include <stdlib.h>

#include "check.h"

void test_packed(const shunt_context* context);

enum { N = 36, K = 64, ROWS = 5, GROUPS = 2 };

/* Numbers of either sign, no two rows alike. */
static void fill(float* to, int count, int seed) {
  int i;
  for (i = 0; i < count; ++i) to[i] = (float)((i * 37 + seed * 11) % 101 - 50) / 64;
}

/* out[row] = rows[row] W^T of its group, in double. */
static double product(const float* rows, const float* weights, int row, int column) {
  double sum = 0;
  int k;
  for (k = 0; k < K; ++k) sum += (double)rows[row * K + k] * (double)weights[column * K + k];
  return sum;
}

static void test_format(const shunt_context* context, const char* format, double loss) {
  static float plain[GROUPS][N * K], back[GROUPS][N * K], again[N * K], rows[ROWS * K];
  static float out[ROWS * N];
  const int32_t offsets[GROUPS + 1] = {0, 2, ROWS};
  const shunt_tensor t_rows = shunt_view_2d(rows, SHUNT_F32, ROWS, K);
  const shunt_tensor t_offsets = shunt_view_1d(offsets, SHUNT_I32, GROUPS + 1);
  const shunt_tensor t_out = shunt_view_2d(out, SHUNT_F32, ROWS, N);
  const shunt_tensor t_again = shunt_view_2d(again, SHUNT_F32, N, K);
  shunt_packed_matrix packed[GROUPS];
  shunt_buffer *memory[GROUPS] = {NULL}, *laid_out = NULL, *workspace = NULL, *loaded = NULL;
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  shunt_prepared_weights from_disk = {.struct_size = sizeof from_disk};
  shunt_grouped_gemm_spec spec = SHUNT_GROUPED_GEMM_SPEC_INIT;
  shunt_grouped_gemm_inputs in = {.struct_size = sizeof in};
  size_t bytes = 0;
  int g, i, j, disk;

  fill(rows, ROWS * K, 3);
  for (g = 0; g < GROUPS; ++g) {
    const shunt_tensor t_plain = shunt_view_2d(plain[g], SHUNT_F32, N, K);
    const shunt_tensor t_back = shunt_view_2d(back[g], SHUNT_F32, N, K);
    double error = 0, norm = 0;
    fill(plain[g], N * K, g);
    CHECK_OK(shunt_packed_bytes(format, N, K, &bytes));
    CHECK_OK(shunt_buffer_create(context, bytes, &memory[g]));
    CHECK_OK(shunt_pack(format, &t_plain, 0, shunt_buffer_data(memory[g]), bytes, &packed[g]));
    CHECK(strncmp(packed[g].format, format, strlen(format)) == 0);
    CHECK(packed[g].n == N && packed[g].k == K && packed[g].values.rank == 2);
    CHECK_OK(shunt_unpack(&packed[g], &t_back));
    for (i = 0; i < N * K; ++i) {
      error += pow((double)plain[g][i] - (double)back[g][i], 2);
      norm += pow((double)plain[g][i], 2);
    }
    CHECK(sqrt(error / norm) > 0 && sqrt(error / norm) < loss);
  }

  CHECK_OK(shunt_prepared_packed_bytes(context, SHUNT_F32, format, SHUNT_ROWS_AS_DTYPE, GROUPS, N,
                                       K, 0, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &laid_out));
  CHECK_OK(shunt_prepare_packed(context, SHUNT_F32, SHUNT_ROWS_AS_DTYPE, packed, GROUPS,
                                shunt_buffer_data(laid_out), bytes, &prepared));
  CHECK(prepared.groups == GROUPS && prepared.n == N && prepared.k == K);
  CHECK(strcmp(prepared.format, packed[0].format) == 0);
  CHECK_OK(shunt_unprepare(context, &prepared, 1, &t_again));
  CHECK(memcmp(again, back[1], sizeof again) == 0);

  spec.groups = GROUPS;
  spec.n = N;
  spec.k = K;
  spec.format = packed[0].format;
  CHECK_OK(shunt_grouped_gemm_supports(context, &spec));
  CHECK_OK(shunt_grouped_gemm_workspace_bytes(context, &spec, ROWS, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  CHECK_OK(shunt_prepared_save(context, &prepared, "test_c_packed.saved"));
  CHECK_OK(shunt_prepared_load(context, "test_c_packed.saved", &loaded, &from_disk));
  CHECK(remove("test_c_packed.saved") == 0);
  in.rows = &t_rows;
  in.offsets = &t_offsets;
  for (disk = 0; disk < 2; ++disk) {
    in.prepared = disk ? &from_disk : &prepared;
    memset(out, 0, sizeof out);
    CHECK_OK(shunt_grouped_gemm(context, &spec, &in, &t_out, shunt_buffer_data(workspace), bytes));
    for (i = 0; i < ROWS; ++i) {
      for (j = 0; j < N; ++j) {
        const double want = product(rows, back[i < 2 ? 0 : 1], i, j);
        if (!(fabs((double)out[i * N + j] - want) <= 1e-4)) {
          printf("%s: row %d, column %d is %g, not %g\n", format, i, j, (double)out[i * N + j],
                 want);
          ++failures;
          return;
        }
      }
    }
  }
  /* Prepared weights say what they are: a spec must say the same. */
  spec.format = NULL;
  CHECK(shunt_grouped_gemm(context, &spec, &in, &t_out, shunt_buffer_data(workspace), bytes) ==
        SHUNT_INVALID_ARGUMENT);
  /* An older caller's struct has no room for the format. */
  prepared.struct_size = offsetof(shunt_prepared_weights, format);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "prepared.struct_size",
              shunt_prepare_packed(context, SHUNT_F32, SHUNT_ROWS_AS_DTYPE, packed, GROUPS,
                                   shunt_buffer_data(laid_out), 1u << 20, &prepared));
  shunt_buffer_destroy(loaded);
  shunt_buffer_destroy(workspace);
  shunt_buffer_destroy(laid_out);
  for (g = 0; g < GROUPS; ++g) shunt_buffer_destroy(memory[g]);
}

/* Paired matrices come back with gate's rows first. */
static void test_paired(const shunt_context* context) {
  static float gate[N * K], up[N * K], back[2 * N * K], want[N * K];
  const shunt_tensor t_gate = shunt_view_2d(gate, SHUNT_F32, N, K);
  const shunt_tensor t_up = shunt_view_2d(up, SHUNT_F32, N, K);
  const shunt_tensor t_back = shunt_view_2d(back, SHUNT_F32, 2 * N, K);
  const shunt_tensor t_want = shunt_view_2d(want, SHUNT_F32, N, K);
  shunt_packed_matrix first, second;
  shunt_buffer *memory[2] = {NULL, NULL}, *laid_out = NULL;
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  size_t bytes = 0;
  fill(gate, N * K, 1);
  fill(up, N * K, 2);
  CHECK_OK(shunt_packed_bytes("nvfp4", N, K, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &memory[0]));
  CHECK_OK(shunt_buffer_create(context, bytes, &memory[1]));
  CHECK_OK(shunt_pack("nvfp4", &t_gate, 0, shunt_buffer_data(memory[0]), bytes, &first));
  CHECK_OK(shunt_pack("nvfp4", &t_up, 100, shunt_buffer_data(memory[1]), bytes, &second));
  CHECK(first.global_scale < second.global_scale);
  CHECK_OK(shunt_prepared_packed_bytes(context, SHUNT_BF16, "nvfp4", SHUNT_ROWS_AS_DTYPE, 1, 2 * N,
                                       K, 1, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &laid_out));
  CHECK_OK(shunt_prepare_packed_paired(context, SHUNT_BF16, SHUNT_ROWS_AS_DTYPE, &first, &second, 1,
                                       shunt_buffer_data(laid_out), bytes, &prepared));
  CHECK(prepared.paired == 1 && prepared.n == 2 * N);
  CHECK_OK(shunt_unprepare(context, &prepared, 0, &t_back));
  CHECK_OK(shunt_unpack(&first, &t_want));
  CHECK(memcmp(back, want, sizeof want) == 0);
  CHECK_OK(shunt_unpack(&second, &t_want));
  CHECK(memcmp(back + N * K, want, sizeof want) == 0);
  shunt_buffer_destroy(laid_out);
  shunt_buffer_destroy(memory[0]);
  shunt_buffer_destroy(memory[1]);
}

/* Zero points of 8 say nothing, and are not kept; others are. */
static void test_zeros(const shunt_context* context) {
  static float plain[N * K], back[N * K], want[N * K];
  static uint8_t zeros[N * (K / 32)];
  const shunt_tensor t_plain = shunt_view_2d(plain, SHUNT_F32, N, K);
  const shunt_tensor t_back = shunt_view_2d(back, SHUNT_F32, N, K);
  const shunt_tensor t_want = shunt_view_2d(want, SHUNT_F32, N, K);
  shunt_packed_matrix packed;
  shunt_buffer *memory = NULL, *laid_out = NULL;
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  char format[32];
  size_t bytes = 0, without = 0;
  int one;
  fill(plain, N * K, 1);
  CHECK_OK(shunt_packed_bytes("int4:32", N, K, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &memory));
  CHECK_OK(shunt_pack("int4:32", &t_plain, 0, shunt_buffer_data(memory), bytes, &packed));
  memset(zeros, 8, sizeof zeros);
  packed.zeros = shunt_view_2d(zeros, SHUNT_U8, N, K / 32);
  CHECK_OK(shunt_prepared_packed_bytes(context, SHUNT_F32, "int4:32", SHUNT_ROWS_AS_DTYPE, 1, N, K,
                                       0, &without));
  for (one = 8; one >= 7; --one) {
    zeros[3] = (uint8_t)one;
    CHECK_OK(shunt_prepared_format(&packed, NULL, 1, format, sizeof format));
    CHECK(strcmp(format, one == 8 ? "int4:32" : "int4:32:zeros") == 0);
    CHECK_OK(shunt_prepared_packed_bytes(context, SHUNT_F32, format, SHUNT_ROWS_AS_DTYPE, 1, N, K,
                                         0, &bytes));
    CHECK(one == 8 ? bytes == without : bytes > without);
    CHECK_OK(shunt_buffer_create(context, bytes, &laid_out));
    CHECK_OK(shunt_prepare_packed(context, SHUNT_F32, SHUNT_ROWS_AS_DTYPE, &packed, 1,
                                  shunt_buffer_data(laid_out), bytes, &prepared));
    CHECK(strcmp(prepared.format, format) == 0);
    CHECK_OK(shunt_unprepare(context, &prepared, 0, &t_back));
    CHECK_OK(shunt_unpack(&packed, &t_want));
    CHECK(memcmp(back, want, sizeof want) == 0);
    shunt_buffer_destroy(laid_out);
  }
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "must be 14 for int4:32:zeros",
              shunt_prepared_format(&packed, NULL, 1, format, 13));
  shunt_buffer_destroy(memory);
}

/* A layer of packed experts gives what one of the same numbers unpacked gives. */
static void test_layer(const shunt_context* context) {
  enum { EXPERTS = 2, H = 64, I = 32, T = 3 };
  const char* spec =
      "{\"hidden\": 64, \"route\": {\"experts\": 2, \"top_k\": 1, \"renormalize\": true},"
      " \"experts\": {\"experts\": 2, \"hidden\": 64, \"intermediate\": 32}}";
  static float router[EXPERTS * H], x[T * H], y[2][T * H], plain[3][EXPERTS][H * I];
  const shunt_tensor t_router = shunt_view_2d(router, SHUNT_F32, EXPERTS, H);
  const shunt_tensor t_x = shunt_view_2d(x, SHUNT_F32, T, H);
  shunt_tensor matrices[3][EXPERTS];
  shunt_packed_matrix packed[3][EXPERTS];
  shunt_buffer* memory[3][EXPERTS] = {{NULL}};
  shunt_layer_options options = SHUNT_LAYER_OPTIONS_INIT;
  size_t bytes = 0;
  int m, e, way;
  fill(router, EXPERTS * H, 5);
  fill(x, T * H, 6);
  options.dtype = SHUNT_F32;
  CHECK_OK(shunt_packed_bytes("mxfp8", H, H, &bytes));
  for (m = 0; m < 3; ++m) {
    for (e = 0; e < EXPERTS; ++e) {
      fill(plain[m][e], H * I, 3 * m + e);
      matrices[m][e] = shunt_view_2d(plain[m][e], SHUNT_F32, m < 2 ? I : H, m < 2 ? H : I);
      CHECK_OK(shunt_buffer_create(context, bytes, &memory[m][e]));
      CHECK_OK(shunt_pack("mxfp8", &matrices[m][e], 0, shunt_buffer_data(memory[m][e]), bytes,
                          &packed[m][e]));
      CHECK_OK(shunt_unpack(&packed[m][e], &matrices[m][e]));
    }
  }
  for (way = 0; way < 2; ++way) {
    const shunt_tensor t_y = shunt_view_2d(y[way], SHUNT_F32, T, H);
    const shunt_layer_inputs in = {.struct_size = sizeof in, .hidden = &t_x};
    const shunt_layer_outputs out = {.struct_size = sizeof out, .output = &t_y};
    shunt_expert_weights experts = {.struct_size = sizeof experts, .count = EXPERTS};
    const shunt_layer_weights all = {
        .struct_size = sizeof all, .router = &t_router, .experts = &experts};
    shunt_layer* layer = NULL;
    shunt_buffer* workspace = NULL;
    if (way == 0) {
      experts.gate = matrices[0];
      experts.up = matrices[1];
      experts.down = matrices[2];
    } else {
      experts.packed_gate = packed[0];
      experts.packed_up = packed[1];
      experts.packed_down = packed[2];
    }
    CHECK_OK(shunt_layer_create(context, spec, &all, &options, &layer));
    if (layer == NULL) return;
    CHECK_OK(shunt_layer_workspace_bytes(layer, T, &bytes));
    CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
    CHECK_OK(shunt_layer_forward(layer, &in, &out, shunt_buffer_data(workspace), bytes));
    shunt_buffer_destroy(workspace);
    shunt_layer_destroy(layer);
  }
  for (m = 0; m < T * H; ++m) {
    CHECK(fabs((double)y[0][m] - (double)y[1][m]) <= 1e-4 * (1 + fabs((double)y[0][m])));
  }
  CHECK(y[0][0] != 0.0F);
  for (m = 0; m < 3; ++m) {
    for (e = 0; e < EXPERTS; ++e) shunt_buffer_destroy(memory[m][e]);
  }
}

/* Matrices of the k-major layout, read, written and multiplied with rows that ids pick them for. */
static void test_k_major(const shunt_context* context) {
  enum { E = 2, T = 3, S = 2 };
  static float rows[T * K], weights[E][N * K], out[T * S * N];
  static uint8_t comp[2][K / 4 * N], meta[2][K / 8 * N], scale[2][K / 16 * N];
  const int32_t ids[T * S] = {1, 0, -1, 1, 0, E};
  const shunt_tensor t_rows = shunt_view_2d(rows, SHUNT_F32, T, K);
  const shunt_tensor t_ids = shunt_view_2d(ids, SHUNT_I32, T, S);
  const shunt_tensor t_out = shunt_view_2d(out, SHUNT_F32, T * S, N);
  shunt_k_major_sparse views[2];
  shunt_packed_matrix packed[E];
  shunt_buffer *memory[E] = {NULL}, *laid_out = NULL, *workspace = NULL;
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  shunt_grouped_gemm_spec spec = SHUNT_GROUPED_GEMM_SPEC_INIT;
  shunt_indexed_gemm_inputs in = {.struct_size = sizeof in};
  size_t bytes = 0;
  int e, i, j;
  fill(rows, T * K, 4);
  memset(views, 0, sizeof views);
  for (i = 0; i < 2; ++i) {
    views[i].comp = shunt_view_2d(comp[i], SHUNT_U8, K / 4, N);
    views[i].meta = shunt_view_2d(meta[i], SHUNT_U8, K / 8, N);
    views[i].scale = shunt_view_2d(scale[i], SHUNT_U8, K / 16, N);
  }
  CHECK_OK(shunt_packed_bytes("sparse_nvfp4", N, K, &bytes));
  for (e = 0; e < E; ++e) {
    const shunt_tensor t_weights = shunt_view_2d(weights[e], SHUNT_F32, N, K);
    fill(weights[e], N * K, e);
    CHECK_OK(shunt_buffer_create(context, bytes, &memory[e]));
    CHECK_OK(
        shunt_pack("sparse_nvfp4", &t_weights, 0, shunt_buffer_data(memory[e]), bytes, &packed[e]));
    CHECK_OK(shunt_to_k_major(&packed[e], &views[0]));
    memset(shunt_buffer_data(memory[e]), 0, bytes);
    CHECK_OK(shunt_from_k_major(&views[0], shunt_buffer_data(memory[e]), bytes, &packed[e]));
    CHECK_OK(shunt_to_k_major(&packed[e], &views[1]));
    CHECK(memcmp(comp[0], comp[1], sizeof comp[0]) == 0);
    CHECK(memcmp(meta[0], meta[1], sizeof meta[0]) == 0);
    CHECK(memcmp(scale[0], scale[1], sizeof scale[0]) == 0);
    CHECK(views[0].global_scale == views[1].global_scale && views[0].global_scale > 0);
    CHECK_OK(shunt_unpack(&packed[e], &t_weights));
  }
  views[0].reserved = 1;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "matrix.reserved",
              shunt_from_k_major(&views[0], shunt_buffer_data(memory[0]), bytes, &packed[0]));

  CHECK_OK(shunt_prepared_packed_bytes(context, SHUNT_F32, "sparse_nvfp4", SHUNT_ROWS_AS_DTYPE, E,
                                       N, K, 0, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &laid_out));
  CHECK_OK(shunt_prepare_packed(context, SHUNT_F32, SHUNT_ROWS_AS_DTYPE, packed, E,
                                shunt_buffer_data(laid_out), bytes, &prepared));
  spec.groups = E;
  spec.n = N;
  spec.k = K;
  spec.format = "sparse_nvfp4";
  in.rows = &t_rows;
  in.ids = &t_ids;
  in.prepared = &prepared;
  CHECK_OK(shunt_indexed_gemm_supports(context, &spec));
  CHECK_OK(shunt_indexed_gemm_workspace_bytes(context, &spec, T, S, &bytes));
  CHECK_OK(shunt_buffer_create(context, bytes, &workspace));
  CHECK_OK(shunt_indexed_gemm(context, &spec, &in, &t_out, shunt_buffer_data(workspace), bytes));
  for (i = 0; i < T * S; ++i) {
    for (j = 0; j < N; ++j) {
      const double want = ids[i] >= 0 && ids[i] < E ? product(rows, weights[ids[i]], i / S, j) : 0;
      CHECK(fabs((double)out[i * N + j] - want) <= 1e-5 * (1 + fabs(want)));
    }
  }
  in.ids = NULL;
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "ids",
              shunt_indexed_gemm(context, &spec, &in, &t_out, shunt_buffer_data(workspace), bytes));
  spec.prepared = 0;
  CHECK_FAILS(SHUNT_UNSUPPORTED, "prepared", shunt_indexed_gemm_supports(context, &spec));
  shunt_buffer_destroy(workspace);
  shunt_buffer_destroy(laid_out);
  for (e = 0; e < E; ++e) shunt_buffer_destroy(memory[e]);
}

static void test_refusals(const shunt_context* context) {
  float values[N * K];
  const shunt_tensor matrix = shunt_view_2d(values, SHUNT_F32, N, K);
  shunt_packed_matrix packed;
  shunt_prepared_weights prepared = {.struct_size = sizeof prepared};
  unsigned char memory[1];
  size_t bytes = 0;
  fill(values, N * K, 0);
  memset(&packed, 0, sizeof packed);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "fp5", shunt_packed_bytes("fp5", N, K, &bytes));
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "format is NULL", shunt_packed_bytes(NULL, N, K, &bytes));
  CHECK(shunt_pack("int8", &matrix, 0, memory, sizeof memory, &packed) == SHUNT_INVALID_ARGUMENT);
  CHECK(shunt_unpack(&packed, &matrix) == SHUNT_INVALID_ARGUMENT);
  CHECK_FAILS(
      SHUNT_INVALID_ARGUMENT, "rows is 9",
      shunt_prepare_packed(context, SHUNT_F32, 9, &packed, 1, memory, sizeof memory, &prepared));
  memset(packed.format, 'x', sizeof packed.format);
  CHECK_FAILS(SHUNT_INVALID_ARGUMENT, "packed.format does not end", shunt_unpack(&packed, &matrix));
}

void test_packed(const shunt_context* context) {
  test_format(context, "int8", 0.02);
  test_format(context, "nvfp4", 0.15);
  test_format(context, "mxfp4", 0.2);
  test_format(context, "mxfp8", 0.05);
  test_format(context, "int4:16", 0.15);
  test_format(context, "fp8_block", 0.05);
  test_paired(context);
  test_zeros(context);
  test_layer(context);
  test_k_major(context);
  test_refusals(context);
}
