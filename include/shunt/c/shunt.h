/* Shunt as a C ABI: the operations of the C++ headers beside this folder, without exceptions and
 * C++ types. Strict C11, and C++.
 *
 * Errors. Every function that can fail returns a shunt_status. When that is not SHUNT_OK,
 * shunt_last_error() is one line that names the argument, its value and what is legal, and outputs
 * are as they were, unless noted.
 *
 * Structs. struct_size comes first and is sizeof the struct as the caller's compiler knows it; the
 * SHUNT_*_INIT macros set it. A smaller struct (an older caller's) is completed with the defaults
 * of SHUNT_*_INIT, or zeros where there is no such macro; sizes are multiples of 8. A larger one (a
 * newer caller's) is accepted when all that the library does not know is zero, and refused
 * otherwise: nothing is ignored. Fields named `reserved` must be 0. Flags are 0 or 1.
 *
 * Ownership. Nothing that a caller passes is kept, unless noted; memory behind a tensor or a
 * workspace stays the caller's. What a *_create, *_open function returns is the caller's to
 * destroy. Destroying NULL does nothing.
 *
 * Threads. shunt_last_error() is each thread's own. A context, and what was created with it, serves
 * one calling thread at a time; two contexts are independent.
 *
 * Sizes count elements and rows unless a name says bytes. T is a number of tokens, H the width of
 * hidden states, E of experts, I their intermediate width, S the ids a token gets (top_k and shared
 * slots), N = T * S. 'float' stands for f32, bf16 or f16. */
#ifndef SHUNT_C_SHUNT_H
#define SHUNT_C_SHUNT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SHUNT_API __attribute__((visibility("default")))
#else
#define SHUNT_API
#endif

/* The function does not look at what that pointer argument points to: no warning for memory that is
 * still to be written. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define SHUNT_UNREAD(argument) __attribute__((access(none, argument)))
#else
#define SHUNT_UNREAD(argument)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- versions and errors ----------------------------------------------------------------------
 */

/* "0.1.0", of the library that is linked. */
SHUNT_API const char* shunt_version(void);

typedef int32_t shunt_status;
enum {
  SHUNT_OK = 0,
  SHUNT_INVALID_ARGUMENT = 1, /* a value, shape, dtype or pointer that is never legal */
  SHUNT_UNSUPPORTED = 2,      /* this engine, device or build does not compute it */
  SHUNT_BAD_FILE = 3,         /* contents of a file malformed or not understood */
  SHUNT_IO = 4,               /* missing file, permission, full disk */
  SHUNT_OUT_OF_MEMORY = 5,
  SHUNT_INTERNAL = 6 /* a bug of the library */
};
/* "invalid argument"; never NULL. */
SHUNT_API const char* shunt_status_name(shunt_status status);
/* What this thread's last call of a function that returns a shunt_status failed for; "" when that
 * did not fail, or there was none. Other functions leave it alone. Valid until the next such call.
 * Never NULL. */
SHUNT_API const char* shunt_last_error(void);

/* ---- tensors ----------------------------------------------------------------------------------
 */

enum {
  SHUNT_F32 = 0,
  SHUNT_F16 = 1,
  SHUNT_BF16 = 2,
  SHUNT_F64 = 3,
  SHUNT_I8 = 4,
  SHUNT_I16 = 5,
  SHUNT_I32 = 6,
  SHUNT_I64 = 7,
  SHUNT_U8 = 8,
  SHUNT_U16 = 9,
  SHUNT_U32 = 10,
  SHUNT_U64 = 11,
  SHUNT_BOOL = 12,
  SHUNT_F8_E4M3 = 13,
  SHUNT_F8_E5M2 = 14,
  SHUNT_F8_E8M0 = 15,
  SHUNT_F4_E2M1 = 16
};
enum { SHUNT_CPU = 0, SHUNT_CUDA = 1 };

/* A view of memory. Being the element of arrays, it has no struct_size and never changes. Functions
 * take pointers to it; NULL stands for 'not given'. Data behind an input is never written. */
typedef struct shunt_tensor {
  void* data;           /* on `device`; may be NULL when a dimension is 0 */
  int32_t dtype;        /* SHUNT_F32, .. */
  int32_t device_type;  /* SHUNT_CPU, SHUNT_CUDA */
  int32_t device_index; /* 0 for the CPU */
  int32_t rank;         /* 0 .. 4 */
  int64_t shape[4];
  int64_t strides[4]; /* in elements; may be 0 */
} shunt_tensor;

/* Dense row-major views of CPU memory; rank 1 .. 4. */
SHUNT_UNREAD(1)
static inline shunt_tensor shunt_view(const void* data, int32_t dtype, int32_t rank,
                                      const int64_t* shape) {
  shunt_tensor t;
  int64_t stride = 1;
  int32_t d;
  t.data = (void*)(uintptr_t)data;
  t.dtype = dtype;
  t.device_type = SHUNT_CPU;
  t.device_index = 0;
  t.rank = rank;
  for (d = 3; d >= 0; --d) {
    t.shape[d] = d < rank ? shape[d] : 0;
    t.strides[d] = d < rank ? stride : 0;
    if (d < rank) stride *= shape[d];
  }
  return t;
}
SHUNT_UNREAD(1)
static inline shunt_tensor shunt_view_1d(const void* data, int32_t dtype, int64_t a) {
  return shunt_view(data, dtype, 1, &a);
}
SHUNT_UNREAD(1)
static inline shunt_tensor shunt_view_2d(const void* data, int32_t dtype, int64_t a, int64_t b) {
  int64_t shape[2];
  shape[0] = a;
  shape[1] = b;
  return shunt_view(data, dtype, 2, shape);
}
SHUNT_UNREAD(1)
static inline shunt_tensor shunt_view_3d(const void* data, int32_t dtype, int64_t a, int64_t b,
                                         int64_t c) {
  int64_t shape[3];
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  return shunt_view(data, dtype, 3, shape);
}

/* ---- contexts and memory ----------------------------------------------------------------------
 */

/* Where operations run: threads of the CPU, or a stream of a GPU. One context is for one calling
 * thread at a time. On CUDA its kernels share counters, so that they must run one after the other,
 * as they do on its stream; graphs captured from one context likewise: never two replays at once,
 * which would give wrong sums or wait for each other for ever. For work side by side make two
 * contexts, with a stream each. Operations may be called whichever GPU is the thread's current one.
 */
typedef struct shunt_context shunt_context;

/* threads: 1 .. 1024, the caller included; 0: every core that this process may use. */
SHUNT_API shunt_status shunt_context_create_cpu(int32_t threads, shunt_context** context);
/* stream: a cudaStream_t, which stays the caller's and must outlive the context and all that is
 * made with it, layers and captured graphs too; index: the device. SHUNT_UNSUPPORTED without a GPU,
 * or when the library was built without CUDA. */
SHUNT_API shunt_status shunt_context_create_cuda(void* stream, int32_t index,
                                                 shunt_context** context);

typedef struct shunt_cuda_options {
  uint64_t struct_size;
  void* stream;  /* a cudaStream_t; NULL: the default stream */
  int32_t index; /* of the GPU */
  /* flag: programmatic dependent launch. Kernels of one operation after another may start before
   * their predecessor has ended, and wait for its results themselves; what else runs on the stream
   * need not take part. Only Hopper and newer; elsewhere it changes nothing. */
  int32_t dependent_launch;
} shunt_cuda_options;
#define SHUNT_CUDA_OPTIONS_INIT \
  { sizeof(shunt_cuda_options), NULL, 0, 0 }

/* shunt_context_create_cuda, with all that it can be told. */
SHUNT_API shunt_status shunt_context_create_cuda_with(const shunt_cuda_options* options,
                                                      shunt_context** context);
/* Layers created with it stay usable. */
SHUNT_API void shunt_context_destroy(shunt_context* context);
/* Threads of the CPU engine, the caller included; 1 on CUDA; 0 for NULL. */
SHUNT_API int32_t shunt_context_threads(const shunt_context* context);
/* Waits for everything enqueued. A CPU call has always finished when it returns. */
SHUNT_API shunt_status shunt_context_synchronize(const shunt_context* context);

/* Memory on the context's device, zeroed, aligned for any use here: workspaces, prepared weights.
 * Operations accept any other memory as well: workspaces and prepared weights 64-byte aligned (CPU)
 * or 256-byte aligned (CUDA), a workspace apart from all that the call reads and writes. */
typedef struct shunt_buffer shunt_buffer;
SHUNT_API shunt_status shunt_buffer_create(const shunt_context* context, size_t bytes,
                                           shunt_buffer** buffer);
SHUNT_API void shunt_buffer_destroy(shunt_buffer* buffer);
/* NULL for NULL and for 0 bytes. */
SHUNT_API void* shunt_buffer_data(const shunt_buffer* buffer);
SHUNT_API size_t shunt_buffer_bytes(const shunt_buffer* buffer);
/* Copies `size` bytes between the context's device and the host, either way, in the order of its
 * stream, and waits: for set-up. */
SHUNT_API shunt_status shunt_context_copy(const shunt_context* context, void* to, const void* from,
                                          size_t size);

/* For every operation X below:
 *
 * shunt_X_supports(context, spec): SHUNT_OK: it computes that spec. SHUNT_UNSUPPORTED: it does not,
 *   and shunt_last_error() is the reason. A context on a GPU asks that GPU, which may lack the
 *   kernels that others have.
 * shunt_X_workspace_bytes(.., bytes): *bytes of scratch memory that one call needs.
 * shunt_X(context, spec, inputs, outputs, workspace, workspace_bytes): the call itself: takes no
 *   memory for tensors and does not wait. Outputs lie apart from inputs, but where they may be one
 *   of them itself (the same memory, dtype and strides). SHUNT_INVALID_ARGUMENT for a missing,
 *   superfluous or misshapen tensor, a workspace too small and a spec that is never legal;
 *   SHUNT_UNSUPPORTED for a spec that this engine does not compute. */

/* ---- route: which experts a token goes to, and with what weights; shunt/route.hpp -------------
 */

enum {
  SHUNT_SCORE_NONE = 0,
  SHUNT_SCORE_SOFTMAX = 1,
  SHUNT_SCORE_SIGMOID = 2,
  SHUNT_SCORE_SQRT_SOFTPLUS = 3,
  SHUNT_SCORE_SPARSEMIXER = 4
};
enum { SHUNT_BEFORE_TOP_K = 0, SHUNT_AFTER_TOP_K = 1 };
enum { SHUNT_GROUP_MAX = 0, SHUNT_GROUP_SUM_OF_TOP_2 = 1 };
enum { SHUNT_EPSILON_ADDED = 0, SHUNT_EPSILON_FLOOR = 1 };
enum {
  SHUNT_SHARED_ONE = 0,
  SHUNT_SHARED_INVERSE_SCALE = 1,
  SHUNT_SHARED_SUM_OVER_SCALE = 2,
  SHUNT_SHARED_SIGMOID_GATE = 3,
  SHUNT_SHARED_JOINT = 4
};

typedef struct shunt_route_spec {
  uint64_t struct_size;
  int32_t experts;        /* E, 1 .. 4096 */
  int32_t top_k;          /* k, 1 .. min(64, E) */
  int32_t score;          /* SHUNT_SCORE_* */
  int32_t score_stage;    /* SHUNT_BEFORE_TOP_K, SHUNT_AFTER_TOP_K */
  int32_t router_bias;    /* flag: logits += router_bias */
  float soft_cap;         /* 0: none */
  int32_t selection_bias; /* flag: selection compares score + selection_bias */
  int32_t group_count;    /* groups of E / count consecutive experts */
  int32_t group_keep;     /* groups that stay eligible */
  int32_t group_rank;     /* SHUNT_GROUP_* */
  int32_t renormalize;    /* flag */
  float renormalize_epsilon;
  int32_t epsilon_rule; /* SHUNT_EPSILON_* */
  float scale;          /* routed scaling factor */
  int32_t scale_in_weights;
  int32_t per_expert_scale;
  int32_t hashed;        /* flag: ids = hash_table[token_id] */
  float jitter;          /* of sparsemixer */
  int32_t shared_count;  /* ids E, E + 1, .. appended to each row */
  int32_t shared_weight; /* SHUNT_SHARED_* */
  int32_t weight_on_input;
  int32_t batch_invariant; /* flag: the same bits whatever the other tokens are */
  float logit_scale;       /* logits *= logit_scale, before the bias; 0 counts as 1 */
  int32_t group_limit;     /* experts of one group that are chosen at most; 0: any number */
} shunt_route_spec;
#define SHUNT_ROUTE_SPEC_INIT                                                                      \
  {                                                                                                \
    sizeof(shunt_route_spec), 0, 0, SHUNT_SCORE_SOFTMAX, SHUNT_BEFORE_TOP_K, 0, 0, 0, 1, 1,        \
        SHUNT_GROUP_MAX, 0, 1e-20f, SHUNT_EPSILON_ADDED, 1, 1, 0, 0, 0, 0, SHUNT_SHARED_ONE, 0, 0, \
        1, 0                                                                                       \
  }

/* Logits, or hidden and router_weight. C is E, or E + shared_count with SHUNT_SHARED_JOINT. Rows
 * may be strided. */
typedef struct shunt_route_inputs {
  uint64_t struct_size;
  const shunt_tensor* logits;           /* [T, C] float */
  const shunt_tensor* hidden;           /* [T, H] float */
  const shunt_tensor* router_weight;    /* [C, H] float */
  const shunt_tensor* router_bias;      /* [C] float; iff spec.router_bias */
  const shunt_tensor* selection_bias;   /* [E] float; iff spec.selection_bias */
  const shunt_tensor* per_expert_scale; /* [C] float; iff spec.per_expert_scale */
  const shunt_tensor* token_ids;        /* [T] i32 | i64; iff spec.hashed */
  const shunt_tensor* hash_table;       /* [V, k] i32 | i64; iff spec.hashed */
  const shunt_tensor* shared_logits;    /* [T, shared_count] f32; iff SHUNT_SHARED_SIGMOID_GATE */
  const shunt_tensor* valid_tokens;     /* [1] i32, optional */
} shunt_route_inputs;

/* Any subset, at least one. S = top_k + shared_count. */
typedef struct shunt_route_outputs {
  uint64_t struct_size;
  const shunt_tensor* ids;     /* [T, S] i32, best first */
  const shunt_tensor* weights; /* [T, S] f32 */
  const shunt_tensor* dense;   /* [T, E + shared_count] f32 */
  const shunt_tensor* logits;  /* [T, C] f32 */
  const shunt_tensor* replay;  /* [T, top_k] i16: the selected experts alone */
} shunt_route_outputs;

SHUNT_API shunt_status shunt_route_supports(const shunt_context* context,
                                            const shunt_route_spec* spec);
/* hidden: H, or 0 when routing from logits. */
SHUNT_API shunt_status shunt_route_workspace_bytes(const shunt_context* context,
                                                   const shunt_route_spec* spec, int64_t tokens,
                                                   int64_t hidden, size_t* bytes);
SHUNT_API shunt_status shunt_route(const shunt_context* context, const shunt_route_spec* spec,
                                   const shunt_route_inputs* inputs,
                                   const shunt_route_outputs* outputs, void* workspace,
                                   size_t workspace_bytes);

/* ---- order: (token, slot) pairs sorted by expert, stably; shunt/order.hpp ---------------------
 */

typedef struct shunt_order_spec {
  uint64_t struct_size;
  int32_t experts;       /* ids run over [0, experts); 1 .. 65536 */
  int32_t slots;         /* S, 1 .. 128 */
  int32_t first_expert;  /* local experts are [first_expert, first_expert + local_experts) */
  int32_t local_experts; /* L; -1: all from first_expert on */
  int32_t expert_map;    /* flag: inputs.expert_map says which experts are local */
  int32_t tile;          /* of the padded form, 1 .. 65536; 0: compact form only */
  int32_t sentinel;      /* token id of a padding row, >= T; -1: T */
  int32_t tile_for_empty_expert; /* flag */
} shunt_order_spec;
#define SHUNT_ORDER_SPEC_INIT \
  { sizeof(shunt_order_spec), 0, 0, 0, -1, 0, 0, -1, 1 }

typedef struct shunt_order_inputs {
  uint64_t struct_size;
  const shunt_tensor* ids;          /* [T, S] i32; ids < 0 or >= experts are skipped */
  const shunt_tensor* weights;      /* [T, S] f32; required by the outputs that carry weights */
  const shunt_tensor* expert_map;   /* [experts] i32, 0 .. L - 1 or -1; iff spec.expert_map */
  const shunt_tensor* valid_tokens; /* [1] i32, optional: tokens at or past it are skipped */
} shunt_order_inputs;

/* Any subset, at least one, all dense. P = shunt_padded_rows_capacity. */
typedef struct shunt_order_outputs {
  uint64_t struct_size;
  /* compact: R = offsets[L] rows */
  const shunt_tensor* offsets;     /* [L + 1] i32 */
  const shunt_tensor* permutation; /* [N] i32: pair index token * S + slot of each row */
  const shunt_tensor* inverse;     /* [T, S] i32: row of each pair, or -1 */
  const shunt_tensor* weights;     /* [N] f32: weight of each row */
  /* padded tiles; padding rows hold the sentinel and weight 0, unused tiles -1 */
  const shunt_tensor* sorted_token_ids;       /* [P] i32 */
  const shunt_tensor* sorted_weights;         /* [P] f32 */
  const shunt_tensor* sorted_expert_ids;      /* [P / tile] i32 */
  const shunt_tensor* num_tokens_post_padded; /* [1] i32 */
  const shunt_tensor* num_sorted_tiles;       /* [1] i32 */
  const shunt_tensor* padded_inverse;         /* [T, S] i32: padded row of each pair, or -1 */
  const shunt_tensor* zeroed;                 /* any dtype and shape: set to 0 */
} shunt_order_outputs;

/* Rows that the padded form can need for so many tokens, whatever their ids. */
SHUNT_API shunt_status shunt_padded_rows_capacity(const shunt_order_spec* spec, int64_t tokens,
                                                  int64_t* rows);
SHUNT_API shunt_status shunt_order_supports(const shunt_context* context,
                                            const shunt_order_spec* spec);
SHUNT_API shunt_status shunt_order_workspace_bytes(const shunt_context* context,
                                                   const shunt_order_spec* spec, int64_t tokens,
                                                   size_t* bytes);
SHUNT_API shunt_status shunt_order(const shunt_context* context, const shunt_order_spec* spec,
                                   const shunt_order_inputs* inputs,
                                   const shunt_order_outputs* outputs, void* workspace,
                                   size_t workspace_bytes);

/* ---- route and order together: shunt/route_and_order.hpp --------------------------------------
 * One launch on a GPU while the batch is small; the results of shunt_route, then shunt_order. */

/* order_spec: slots is top_k + shared_count, experts is experts + shared_count of route_spec. */
SHUNT_API shunt_status shunt_route_and_order_supports(const shunt_context* context,
                                                      const shunt_route_spec* route_spec,
                                                      const shunt_order_spec* order_spec);
/* hidden: H, or 0 when routing from logits. */
SHUNT_API shunt_status shunt_route_and_order_workspace_bytes(const shunt_context* context,
                                                             const shunt_route_spec* route_spec,
                                                             const shunt_order_spec* order_spec,
                                                             int64_t tokens, int64_t hidden,
                                                             size_t* bytes);
/* routed: any subset, none included; ids and weights dense. ordered: at least one; zeroed must not
 * overlap what is read. expert_map: as of shunt_order_inputs, or NULL. */
SHUNT_API shunt_status
shunt_route_and_order(const shunt_context* context, const shunt_route_spec* route_spec,
                      const shunt_route_inputs* inputs, const shunt_route_outputs* routed,
                      const shunt_order_spec* order_spec, const shunt_order_outputs* ordered,
                      const shunt_tensor* expert_map, void* workspace, size_t workspace_bytes);

/* ---- gather: rows of hidden states in that order ----------------------------------------------
 */

enum { SHUNT_QUANTISE_NONE = 0, SHUNT_QUANTISE_ROW = 1, SHUNT_QUANTISE_BLOCK_128 = 2 };

typedef struct shunt_gather_spec {
  uint64_t struct_size;
  int32_t slots;               /* S of the order */
  int32_t scale_by_weight;     /* flag: rows times their weight, in f32 */
  int32_t quantise;            /* SHUNT_QUANTISE_*: to fp8 e4m3, which values share a scale */
  float scale_upper_bound;     /* of the largest magnitude; 0: none */
  int32_t power_of_two_scales; /* flag */
  int32_t reserved;
} shunt_gather_spec;
#define SHUNT_GATHER_SPEC_INIT \
  { sizeof(shunt_gather_spec), 0, 0, SHUNT_QUANTISE_NONE, 0, 0, 0 }

typedef struct shunt_gather_inputs {
  uint64_t struct_size;
  const shunt_tensor* hidden;      /* [T, H] float, rows may be strided */
  const shunt_tensor* permutation; /* [N] i32 */
  const shunt_tensor* rows;        /* [1] i32: how many rows there are (offsets[L]) */
  const shunt_tensor* weights;     /* [N] f32; iff spec.scale_by_weight */
  const shunt_tensor* inverse;     /* [T, S] i32, optional: a GPU then reads every token once */
} shunt_gather_inputs;

SHUNT_API shunt_status shunt_gather_supports(const shunt_context* context,
                                             const shunt_gather_spec* spec);
/* rows: [N, H] float, may be strided; those past the count are left alone. f16 saturates. */
SHUNT_API shunt_status shunt_gather(const shunt_context* context, const shunt_gather_spec* spec,
                                    const shunt_gather_inputs* inputs, const shunt_tensor* rows);
/* Iff spec.quantise. rows: [N, H] SHUNT_F8_E4M3. scales: f32, any strides: [N], or
 * [N, ceil(H / 128)] with SHUNT_QUANTISE_BLOCK_128. A value is what rows hold times its scale. */
SHUNT_API shunt_status shunt_gather_quantised(const shunt_context* context,
                                              const shunt_gather_spec* spec,
                                              const shunt_gather_inputs* inputs,
                                              const shunt_tensor* rows, const shunt_tensor* scales);

/* ---- packed weights; shunt/format.hpp ---------------------------------------------------------
 */

/* What the rows that a grouped GEMM multiplies are rounded to: RowFormat of shunt/format.hpp. */
enum {
  SHUNT_ROWS_AS_DTYPE = 0,
  SHUNT_ROWS_FP8_TOKEN = 1,
  SHUNT_ROWS_FP8_BLOCK = 2,
  SHUNT_ROWS_NVFP4 = 3
};

/* A view of one packed matrix [n, k]. PackedMatrix of shunt/format.hpp says which tensors a format
 * has, and how they lie; those that it does not have are of rank 0. Being the element of arrays, it
 * has no struct_size and never changes. */
typedef struct shunt_packed_matrix {
  char format[32]; /* "nvfp4", "int4:128", .. */
  int64_t n;
  int64_t k;
  float global_scale; /* 1 where the format has none */
  int32_t reserved;
  shunt_tensor values;
  shunt_tensor scales;
  shunt_tensor zeros;
  shunt_tensor group_of;
  shunt_tensor positions;
} shunt_packed_matrix;

/* *bytes of all tensors of a packed [n, k]. */
SHUNT_API shunt_status shunt_packed_bytes(const char* format, int64_t n, int64_t k, size_t* bytes);
/* Rounds a matrix [n, k] (float, any strides, on the host) into memory on the host; *packed refers
 * to that memory. global_amax: a format with a global scale takes it for this magnitude; 0: for the
 * matrix's own largest. */
SHUNT_API shunt_status shunt_pack(const char* format, const shunt_tensor* matrix, float global_amax,
                                  void* memory, size_t memory_bytes, shunt_packed_matrix* packed);
/* out: [n, k] float, any strides, on the host. */
SHUNT_API shunt_status shunt_unpack(const shunt_packed_matrix* packed, const shunt_tensor* out);

/* 2:4 sparse FP4 as other kernels lay it out, of a matrix [n, k], k a multiple of 16, all dense on
 * the host with n the inner dimension; shunt/sparse.hpp says what the bytes mean. Being three
 * tensors and a number, it has no struct_size and never changes. */
typedef struct shunt_k_major_sparse {
  shunt_tensor comp;  /* u8 [k / 4, n] */
  shunt_tensor meta;  /* u8 [k / 8, n] */
  shunt_tensor scale; /* u8 or f8_e4m3 [k / 16, n] */
  float global_scale; /* multiplies */
  int32_t reserved;
} shunt_k_major_sparse;

/* As "sparse_nvfp4", in memory on the host: shunt_packed_bytes of it. */
SHUNT_API shunt_status shunt_from_k_major(const shunt_k_major_sparse* matrix, void* memory,
                                          size_t memory_bytes, shunt_packed_matrix* packed);
/* The inverse, into the tensors of *matrix, and its global_scale. */
SHUNT_API shunt_status shunt_to_k_major(const shunt_packed_matrix* packed,
                                        shunt_k_major_sparse* matrix);

/* ---- grouped GEMM, and weights prepared for it; shunt/gemm.hpp --------------------------------
 */

/* A view of prepared weights: of no use to anything but a context of the same device and build. Set
 * struct_size before it is written. */
typedef struct shunt_prepared_weights {
  uint64_t struct_size;
  int32_t dtype; /* SHUNT_F32, SHUNT_BF16, SHUNT_F16 */
  int32_t groups;
  int64_t n; /* columns of the output; gate and up together when paired */
  int64_t k; /* columns of the input */
  int32_t paired;
  int32_t device_type;
  int32_t device_index;
  int32_t reserved;
  void* data; /* the caller's memory */
  uint64_t bytes;
  char format[32]; /* of packed weights; "" or "plain" for others */
  int32_t rows;    /* SHUNT_ROWS_AS_DTYPE, ..: what they are laid out for */
  int32_t reserved_end;
} shunt_prepared_weights;

/* *bytes that `groups` prepared matrices [n, k] take. paired: n counts gate and up. */
SHUNT_API shunt_status shunt_prepared_bytes(const shunt_context* context, int32_t dtype,
                                            int32_t groups, int64_t n, int64_t k, int32_t paired,
                                            size_t* bytes);
/* Lays out `groups` matrices, each [n, k] float with any strides, into memory; *prepared refers to
 * that memory. Matrices on a GPU are read in the order of the context's stream. It waits: they are
 * not needed afterwards. */
SHUNT_API shunt_status shunt_prepare(const shunt_context* context, int32_t dtype,
                                     const shunt_tensor* matrices, int32_t groups, void* memory,
                                     size_t memory_bytes, shunt_prepared_weights* prepared);
/* gate and up: `groups` matrices each, [n / 2, k]. */
SHUNT_API shunt_status shunt_prepare_paired(const shunt_context* context, int32_t dtype,
                                            const shunt_tensor* gate, const shunt_tensor* up,
                                            int32_t groups, void* memory, size_t memory_bytes,
                                            shunt_prepared_weights* prepared);
/* The same three for packed weights: matrices of one format and size, on the host. rows: with which
 * rows a GPU is to multiply them; the CPU takes no notice. format: of shunt_prepared_format().
 * SHUNT_UNSUPPORTED for f32 scales of int4 that are not exact in bf16 and, on the CPU, for those of
 * gate or up that are not exact in f16 where the other's are f16. */
SHUNT_API shunt_status shunt_prepared_packed_bytes(const shunt_context* context, int32_t dtype,
                                                   const char* format, int32_t rows, int32_t groups,
                                                   int64_t n, int64_t k, int32_t paired,
                                                   size_t* bytes);
/* What prepared->format will say: the matrices' own format, but of int4 "int4:64:ordered" where one
 * has group_of, "int4:64:zeros" where one has zero points other than 8, "int4:64:ordered:zeros"
 * with both. up: NULL, or `groups` matrices that are to be paired with the others. room: characters
 * of `format`; 32 are enough. */
SHUNT_API shunt_status shunt_prepared_format(const shunt_packed_matrix* matrices,
                                             const shunt_packed_matrix* up, int32_t groups,
                                             char* format, size_t room);
SHUNT_API shunt_status shunt_prepare_packed(const shunt_context* context, int32_t dtype,
                                            int32_t rows, const shunt_packed_matrix* matrices,
                                            int32_t groups, void* memory, size_t memory_bytes,
                                            shunt_prepared_weights* prepared);
SHUNT_API shunt_status shunt_prepare_packed_paired(const shunt_context* context, int32_t dtype,
                                                   int32_t rows, const shunt_packed_matrix* gate,
                                                   const shunt_packed_matrix* up, int32_t groups,
                                                   void* memory, size_t memory_bytes,
                                                   shunt_prepared_weights* prepared);
/* The inverse: matrix `group` into out, [n, k] float with any strides. */
SHUNT_API shunt_status shunt_unprepare(const shunt_context* context,
                                       const shunt_prepared_weights* prepared, int32_t group,
                                       const shunt_tensor* out);
/* In place: matrices, one tensor [groups, n, k], dense, on the context's device, become their own
 * prepared form. paired: each has gate's n / 2 rows before up's. scratch: room for one matrix.
 * 64-byte aligned; n a multiple of 64 on a CPU, in bf16 with an even k, and of 128 on a GPU, with k
 * of 64. */
SHUNT_API shunt_status shunt_prepare_in_place(const shunt_context* context,
                                              const shunt_tensor* matrices, int32_t paired,
                                              void* scratch, size_t scratch_bytes,
                                              shunt_prepared_weights* prepared);
/* The inverse: the bytes become the matrices [groups, n, k] again. */
SHUNT_API shunt_status shunt_unprepare_in_place(const shunt_context* context,
                                                const shunt_prepared_weights* prepared,
                                                void* scratch, size_t scratch_bytes);
/* A safetensors file of prepared weights. */
SHUNT_API shunt_status shunt_prepared_save(const shunt_context* context,
                                           const shunt_prepared_weights* prepared,
                                           const char* path);
/* Its weights in new memory, *memory, which the caller destroys. SHUNT_BAD_FILE for any other file,
 * SHUNT_UNSUPPORTED for a layout that the context's engine does not read. */
SHUNT_API shunt_status shunt_prepared_load(const shunt_context* context, const char* path,
                                           shunt_buffer** memory, shunt_prepared_weights* prepared);

typedef struct shunt_grouped_gemm_spec {
  uint64_t struct_size;
  int32_t groups;
  int32_t dtype; /* of the weights: SHUNT_F32, SHUNT_BF16, SHUNT_F16; rows are rounded to it */
  int64_t n;
  int64_t k;
  int32_t bias;            /* flag */
  int32_t prepared;        /* flag: 0 for plain weights */
  int32_t batch_invariant; /* flag: a row's bits do not depend on the number of others */
  int32_t rows;            /* SHUNT_ROWS_AS_DTYPE, ..; others take rows in fp8 and their scales */
  const char* format;      /* of packed weights, which are prepared; NULL: plain ones */
  /* flag: sums over k may stay in the tensor cores (shunt/gemm.hpp); of SHUNT_ROWS_FP8_TOKEN, and
   * not with batch_invariant */
  int32_t fast_accumulation;
  int32_t reserved; /* 0 */
} shunt_grouped_gemm_spec;
#define SHUNT_GROUPED_GEMM_SPEC_INIT \
  { sizeof(shunt_grouped_gemm_spec), 0, SHUNT_F32, 0, 0, 0, 1, 0, SHUNT_ROWS_AS_DTYPE, NULL, 0, 0 }

typedef struct shunt_grouped_gemm_inputs {
  uint64_t struct_size;
  const shunt_tensor* rows;    /* [R, k] or [groups, capacity, k] float, rows may be strided */
  const shunt_tensor* offsets; /* [groups + 1] i32, ascending from 0, of rows [R, k]; NULL for rows
                                  [groups, capacity, k], and legal for one group */
  const shunt_tensor* weights; /* [groups, n, k] float; iff not spec.prepared */
  const shunt_prepared_weights* prepared; /* iff spec.prepared */
  const shunt_tensor* bias;               /* [groups, n] float; iff spec.bias */
  const shunt_tensor* row_scales; /* [R] or [R, ceil(k / 128)] f32, of rows in fp8; else NULL */
  const shunt_tensor* counts;     /* [groups] i32, 0 to capacity: of rows [groups, capacity, k] the
                                     first counts[g] of a group are there; NULL: all are */
  int64_t expected_rows; /* of a group, for the choice of a kernel on a GPU; 0: as there is room */
} shunt_grouped_gemm_inputs;

SHUNT_API shunt_status shunt_grouped_gemm_supports(const shunt_context* context,
                                                   const shunt_grouped_gemm_spec* spec);
/* rows: R, the most that a call will have, or groups * capacity. */
SHUNT_API shunt_status shunt_grouped_gemm_workspace_bytes(const shunt_context* context,
                                                          const shunt_grouped_gemm_spec* spec,
                                                          int64_t rows, size_t* bytes);
/* out: [R, n] or [groups, capacity, n] float; rows at or past offsets[groups], or in a group at or
 * past its count, are left alone. */
SHUNT_API shunt_status shunt_grouped_gemm(const shunt_context* context,
                                          const shunt_grouped_gemm_spec* spec,
                                          const shunt_grouped_gemm_inputs* inputs,
                                          const shunt_tensor* out, void* workspace,
                                          size_t workspace_bytes);

/* ---- indexed GEMM: a batched GEMV of (token, expert) pairs; shunt/indexed_gemm.hpp ------------
 */

typedef struct shunt_indexed_gemm_inputs {
  uint64_t struct_size;
  const shunt_tensor* rows;               /* [T, k] float, may be strided */
  const shunt_tensor* ids;                /* [T, S] i32: a matrix each; out of range: zeros */
  const shunt_prepared_weights* prepared; /* not paired */
  const shunt_tensor* bias;               /* [groups, n] f32; iff spec.bias */
} shunt_indexed_gemm_inputs;

/* spec: prepared, rows SHUNT_ROWS_AS_DTYPE. */
SHUNT_API shunt_status shunt_indexed_gemm_supports(const shunt_context* context,
                                                   const shunt_grouped_gemm_spec* spec);
/* For up to `tokens` rows with `slots` ids each. */
SHUNT_API shunt_status shunt_indexed_gemm_workspace_bytes(const shunt_context* context,
                                                          const shunt_grouped_gemm_spec* spec,
                                                          int64_t tokens, int32_t slots,
                                                          size_t* bytes);
/* out: [T * S, n] float, rows may be strided: row t * S + s is matrix ids[t, s] times row t. */
SHUNT_API shunt_status shunt_indexed_gemm(const shunt_context* context,
                                          const shunt_grouped_gemm_spec* spec,
                                          const shunt_indexed_gemm_inputs* inputs,
                                          const shunt_tensor* out, void* workspace,
                                          size_t workspace_bytes);

/* ---- activate: the nonlinearity between the two; shunt/activate.hpp ---------------------------
 */

enum {
  SHUNT_ACTIVATION_IDENTITY = 0,
  SHUNT_ACTIVATION_RELU = 1,
  SHUNT_ACTIVATION_RELU2 = 2,
  SHUNT_ACTIVATION_SILU = 3,
  SHUNT_ACTIVATION_GELU = 4,
  SHUNT_ACTIVATION_GELU_TANH = 5,
  SHUNT_ACTIVATION_SITU = 6
};
enum { SHUNT_LIMIT_ON_INPUT = 0, SHUNT_LIMIT_ON_OUTPUT = 1 };

typedef struct shunt_activation_spec {
  uint64_t struct_size;
  int32_t kind;     /* SHUNT_ACTIVATION_* */
  int32_t gated;    /* flag: act(gate) * (up + up_offset); else act(up) */
  float alpha;      /* of silu: x * sigmoid(alpha x) */
  float limit;      /* 0: none */
  int32_t limit_on; /* SHUNT_LIMIT_ON_* */
  float up_offset;
  float beta;        /* of situ, 1e-6 to 1e6: beta tanh(x / beta) * sigmoid(x) */
  float linear_beta; /* of a gated situ, likewise: linear_beta tanh(up / linear_beta); 0: up */
} shunt_activation_spec;
#define SHUNT_ACTIVATION_SPEC_INIT \
  { sizeof(shunt_activation_spec), SHUNT_ACTIVATION_SILU, 1, 1, 0, SHUNT_LIMIT_ON_INPUT, 0, 1, 0 }

SHUNT_API shunt_status shunt_activate_supports(const shunt_context* context,
                                               const shunt_activation_spec* spec);
/* gate (NULL unless gated), up, out: [R, I] float, rows may be strided; out may be gate or up.
 * rows: [1] i32 or NULL: rows at or past it are left alone. */
SHUNT_API shunt_status shunt_activate(const shunt_context* context,
                                      const shunt_activation_spec* spec, const shunt_tensor* gate,
                                      const shunt_tensor* up, const shunt_tensor* out,
                                      const shunt_tensor* rows);

typedef struct shunt_quantise_spec {
  uint64_t struct_size;
  int32_t quantise;        /* SHUNT_QUANTISE_ROW, SHUNT_QUANTISE_BLOCK_128 */
  float scale_upper_bound; /* of the largest magnitude; 0: none */
  int32_t power_of_two_scales;
  int32_t reserved;
} shunt_quantise_spec;
#define SHUNT_QUANTISE_SPEC_INIT \
  { sizeof(shunt_quantise_spec), SHUNT_QUANTISE_NONE, 0, 0, 0 }

/* The same with out f8_e4m3 [R, I], neither gate nor up, and scales f32 [R] or [R, ceil(I / 128)]
 * with any strides, as shunt_gather_quantised() has them. */
SHUNT_API shunt_status shunt_activate_quantised(const shunt_context* context,
                                                const shunt_activation_spec* spec,
                                                const shunt_quantise_spec* quantise,
                                                const shunt_tensor* gate, const shunt_tensor* up,
                                                const shunt_tensor* out, const shunt_tensor* scales,
                                                const shunt_tensor* rows);

/* ---- combine: expert rows back into tokens; shunt/combine.hpp ---------------------------------
 */

typedef struct shunt_combine_spec {
  uint64_t struct_size;
  int32_t slots;          /* S, 1 .. 128 */
  int32_t weighted;       /* flag: 0: every weight is 1 */
  int32_t identity_from;  /* ids from here on return the token's hidden state; -1: none */
  int32_t shared_gate;    /* flag: the shared expert's output times sigmoid(shared_gate) */
  float shared_scale;     /* and times this */
  int32_t identity_until; /* and up to here; 0: no end */
} shunt_combine_spec;
#define SHUNT_COMBINE_SPEC_INIT \
  { sizeof(shunt_combine_spec), 0, 1, -1, 0, 1, 0 }

typedef struct shunt_combine_inputs {
  uint64_t struct_size;
  const shunt_tensor* rows;         /* [N, H] float (or [P, H]), rows may be strided */
  const shunt_tensor* inverse;      /* [T, S] i32: inverse or padded_inverse of order */
  const shunt_tensor* weights;      /* [T, S] f32; iff weighted, or identity_from >= 0 */
  const shunt_tensor* ids;          /* [T, S] i32; iff identity_from >= 0 */
  const shunt_tensor* hidden;       /* [T, H] float; iff identity_from >= 0 */
  const shunt_tensor* shared;       /* [T, H] float, optional */
  const shunt_tensor* shared_gate;  /* [T] f32 logits; iff spec.shared_gate */
  const shunt_tensor* residual;     /* [T, H] float, optional */
  const shunt_tensor* valid_tokens; /* [1] i32, optional: rows at or past it are written as 0 */
} shunt_combine_inputs;

SHUNT_API shunt_status shunt_combine_supports(const shunt_context* context,
                                              const shunt_combine_spec* spec);
/* out: [T, H] float, rows may be strided; may be hidden, shared or residual itself. */
SHUNT_API shunt_status shunt_combine(const shunt_context* context, const shunt_combine_spec* spec,
                                     const shunt_combine_inputs* inputs, const shunt_tensor* out);

/* ---- shuffles: rows from and to the ranks of an expert-parallel group; shunt/shuffle.hpp ------
 */

typedef struct shunt_shuffle_spec {
  uint64_t struct_size;
  int32_t ranks;        /* EP, 1 .. 4096 */
  int32_t experts;      /* E, 1 .. 65536; ranks * experts at most 2^20 */
  int32_t first_expert; /* of those that are moved */
  int32_t end_expert;   /* past the last; -1: experts */
  int32_t padded;       /* flag: every rank has T / EP rows, the first of them in use */
  int32_t zero_fill;    /* flag: shunt_split_shuffling sets rows that get nothing to 0 */
} shunt_shuffle_spec;
#define SHUNT_SHUFFLE_SPEC_INIT \
  { sizeof(shunt_shuffle_spec), 0, 0, 0, -1, 0, 0 }

/* Of either shuffle. */
SHUNT_API shunt_status shunt_shuffle_supports(const shunt_context* context,
                                              const shunt_shuffle_spec* spec);
SHUNT_API shunt_status shunt_shuffle_workspace_bytes(const shunt_context* context,
                                                     const shunt_shuffle_spec* spec, size_t* bytes);
/* From the order of ranks to that of experts. tokens, rows: [T, D] of one dtype, rows may be
 * strided. token_counts: [ranks, experts] i32. counts: [L + 1] i32 or NULL: rows of each of the
 * L = end - first experts, then of all. */
SHUNT_API shunt_status shunt_combine_shuffling(const shunt_context* context,
                                               const shunt_shuffle_spec* spec,
                                               const shunt_tensor* tokens,
                                               const shunt_tensor* token_counts,
                                               const shunt_tensor* rows, const shunt_tensor* counts,
                                               void* workspace, size_t workspace_bytes);
/* And back. */
SHUNT_API shunt_status shunt_split_shuffling(const shunt_context* context,
                                             const shunt_shuffle_spec* spec,
                                             const shunt_tensor* rows,
                                             const shunt_tensor* token_counts,
                                             const shunt_tensor* tokens, void* workspace,
                                             size_t workspace_bytes);

/* Counts [L], or [L + 1] with their sum behind them, to the offsets [L + 1] that
 * shunt_grouped_gemm takes, and back: all i32, dense, on the context's device. */
SHUNT_API shunt_status shunt_offsets_from_counts(const shunt_context* context,
                                                 const shunt_tensor* counts,
                                                 const shunt_tensor* offsets);
SHUNT_API shunt_status shunt_counts_from_offsets(const shunt_context* context,
                                                 const shunt_tensor* offsets,
                                                 const shunt_tensor* counts);

typedef struct shunt_scatter_add_spec {
  uint64_t struct_size;
  int32_t accumulate; /* flag: out is added to; 0: overwritten */
  int32_t reserved;
} shunt_scatter_add_spec;
#define SHUNT_SCATTER_ADD_SPEC_INIT \
  { sizeof(shunt_scatter_add_spec), 1, 0 }

typedef struct shunt_scatter_add_inputs {
  uint64_t struct_size;
  const shunt_tensor* rows;          /* [EP, K, D] float, the last stride 1 */
  const shunt_tensor* token_counts;  /* [E] i32: positions of each expert; EP divides E */
  const shunt_tensor* token_indices; /* [K] i32: the token of each position; -1: skipped */
} shunt_scatter_add_inputs;

SHUNT_API shunt_status shunt_scatter_add_supports(const shunt_context* context,
                                                  const shunt_scatter_add_spec* spec);
/* tokens: T, below 2^31 - 1; positions: K, below 2^31. */
SHUNT_API shunt_status shunt_scatter_add_workspace_bytes(const shunt_context* context,
                                                         const shunt_scatter_add_spec* spec,
                                                         int64_t tokens, int64_t positions,
                                                         size_t* bytes);
/* out: [T, D] float, rows may be strided. */
SHUNT_API shunt_status shunt_scatter_add_padded(const shunt_context* context,
                                                const shunt_scatter_add_spec* spec,
                                                const shunt_scatter_add_inputs* inputs,
                                                const shunt_tensor* out, void* workspace,
                                                size_t workspace_bytes);

/* ---- texts ------------------------------------------------------------------------------------
 */

/* A function that ends in (text, capacity, length) writes at most capacity bytes to text, the last
 * of them a 0, and sets *length to the length of the whole text without its 0. A text that was cut
 * is SHUNT_OK. text may be NULL when capacity is 0; length may be NULL. Texts are UTF-8. */

/* ---- checkpoints; shunt/checkpoint.hpp --------------------------------------------------------
 */

/* A folder with config.json and safetensors files, mapped into memory. */
typedef struct shunt_checkpoint shunt_checkpoint;

typedef struct shunt_checkpoint_layer {
  uint64_t struct_size;
  int32_t index;
  int32_t moe;        /* flag */
  const char* note;   /* why a layer is not MoE; else "" */
  const char* module; /* of the MoE block: "model.layers.0.mlp" */
} shunt_checkpoint_layer;

/* SHUNT_IO, SHUNT_BAD_FILE: a file missing or malformed, a family or field not understood. */
SHUNT_API shunt_status shunt_checkpoint_open(const char* folder, shunt_checkpoint** checkpoint);
/* Tensors and texts of the checkpoint end with it; layers made from it stay. */
SHUNT_API void shunt_checkpoint_destroy(shunt_checkpoint* checkpoint);
/* Both live as long as the checkpoint; NULL for NULL. "qwen3_moe", "Qwen3MoeForCausalLM". */
SHUNT_API const char* shunt_checkpoint_family(const shunt_checkpoint* checkpoint);
SHUNT_API const char* shunt_checkpoint_model_name(const shunt_checkpoint* checkpoint);
/* Family, rule and shapes in a few words. */
SHUNT_API shunt_status shunt_checkpoint_summary(const shunt_checkpoint* checkpoint, char* text,
                                                size_t capacity, size_t* length);
/* 0 for NULL. */
SHUNT_API int32_t shunt_checkpoint_layer_count(const shunt_checkpoint* checkpoint);
/* The first layer that is an MoE block; -1 when there is none, and for NULL. */
SHUNT_API int32_t shunt_checkpoint_first_moe_layer(const shunt_checkpoint* checkpoint);
/* layer: 0 .. count - 1. The texts live as long as the checkpoint. Set info->struct_size before. */
SHUNT_API shunt_status shunt_checkpoint_layer_info(const shunt_checkpoint* checkpoint,
                                                   int32_t layer, shunt_checkpoint_layer* info);
/* The spec of an MoE layer as JSON, as shunt_layer_create takes it. */
SHUNT_API shunt_status shunt_checkpoint_layer_spec(const shunt_checkpoint* checkpoint,
                                                   int32_t layer, char* text, size_t capacity,
                                                   size_t* length);
SHUNT_API int64_t shunt_checkpoint_tensor_count(const shunt_checkpoint* checkpoint);
/* Names in order, 0 .. count - 1; NULL out of range. Lives as long as the checkpoint. */
SHUNT_API const char* shunt_checkpoint_tensor_name(const shunt_checkpoint* checkpoint,
                                                   int64_t index);
/* A view of the mapped file, read only. SHUNT_BAD_FILE when no tensor has that name. */
SHUNT_API shunt_status shunt_checkpoint_tensor(const shunt_checkpoint* checkpoint, const char* name,
                                               shunt_tensor* tensor);
/* One safetensors file of any contents: recordings, test vectors. */
typedef struct shunt_safetensors shunt_safetensors;
SHUNT_API shunt_status shunt_safetensors_open(const char* path, shunt_safetensors** file);
SHUNT_API void shunt_safetensors_destroy(shunt_safetensors* file);
/* A view of the mapped file, read only; lives as long as the file is open. SHUNT_BAD_FILE when no
 * tensor has that name. */
SHUNT_API shunt_status shunt_safetensors_tensor(const shunt_safetensors* file, const char* name,
                                                shunt_tensor* tensor);

/* model_types that shunt_checkpoint_open understands, one a line. */
SHUNT_API shunt_status shunt_known_families(char* text, size_t capacity, size_t* length);

/* ---- layers: the plan over the stages; shunt/layer.hpp ----------------------------------------
 */

/* An MoE block ready to run, with a prepared copy of its weights. */
typedef struct shunt_layer shunt_layer;

typedef struct shunt_layer_options {
  uint64_t struct_size;
  int32_t dtype; /* of the expert weights and of rows between stages: SHUNT_F32, _BF16, _F16 */
  /* flag: the experts' matrices become their prepared form where they lie; LayerOptions of
   * shunt/layer.hpp says how they must lie. They stay the caller's, and the layer needs them. */
  int32_t in_place;
  int32_t batch_invariant; /* flag: a token's bits do not depend on the others */
  int32_t rows; /* of grouped GEMMs: SHUNT_ROWS_AS_DTYPE, _FP8_TOKEN, _FP8_BLOCK, _NVFP4 */
  /* Of the routed experts' matrices: "nvfp4", "int4:64", .. (FormatSpec of shunt/format.hpp); NULL:
   * packed ones as they are, plain ones in `dtype`. */
  const char* format;
  int32_t fast_accumulation; /* flag: as shunt_grouped_gemm_spec's, of the experts' products */
  int32_t reserved;          /* 0 */
} shunt_layer_options;
#define SHUNT_LAYER_OPTIONS_INIT \
  { sizeof(shunt_layer_options), SHUNT_BF16, 0, 0, SHUNT_ROWS_AS_DTYPE, NULL, 0, 0 }

/* `count` experts. Each array has a tensor an expert, with any strides, or is NULL. */
typedef struct shunt_expert_weights {
  uint64_t struct_size;
  int32_t count;
  int32_t reserved;
  const shunt_tensor* gate;      /* [I, H] float; NULL when the activation is not gated */
  const shunt_tensor* up;        /* [I, H] */
  const shunt_tensor* down;      /* [H, I] */
  const shunt_tensor* gate_bias; /* [I] */
  const shunt_tensor* up_bias;   /* [I] */
  const shunt_tensor* down_bias; /* [H] */
  /* The same three packed, in one format: either these or those above. */
  const shunt_packed_matrix* packed_gate;
  const shunt_packed_matrix* packed_up;
  const shunt_packed_matrix* packed_down;
} shunt_expert_weights;

/* What the spec asks for, and nothing else; float. */
typedef struct shunt_layer_weights {
  uint64_t struct_size;
  const shunt_tensor* router;           /* [C, H]; NULL: every call gives ids or logits */
  const shunt_tensor* router_bias;      /* [C] */
  const shunt_tensor* selection_bias;   /* [E] */
  const shunt_tensor* per_expert_scale; /* [C] */
  const shunt_tensor* hash_table;       /* [V, k] i32 | i64 */
  const shunt_expert_weights* experts;
  const shunt_expert_weights* shared;    /* one expert, or NULL */
  const shunt_tensor* shared_gate;       /* [H] or [1, H] */
  const shunt_tensor* latent_down;       /* [latent, H] */
  const shunt_tensor* latent_up;         /* [H, latent] */
  const shunt_tensor* output_bias;       /* [H] */
  const shunt_tensor* router_norm;       /* [H] */
  const shunt_tensor* input_norm;        /* [H] */
  const shunt_tensor* output_norm;       /* [H] */
  const shunt_tensor* latent_norm;       /* [latent] */
  const shunt_tensor* latent_input_norm; /* [latent] */
  const shunt_tensor* expert_norm;       /* [experts.hidden] */
} shunt_layer_weights;

typedef struct shunt_layer_inputs {
  uint64_t struct_size;
  const shunt_tensor* hidden;       /* [T, H] float, rows may be strided */
  const shunt_tensor* token_ids;    /* [T] i32 | i64; iff the router is hashed */
  const shunt_tensor* residual;     /* [T, H] float, optional: added to the output */
  const shunt_tensor* valid_tokens; /* [1] i32, optional: rows at or past it are written as 0 */
  /* Where the caller routes, one of the two; the layer's router is not read then. */
  const shunt_tensor* logits;  /* [T, C] float: of the router's product, the rest is the layer's */
  const shunt_tensor* ids;     /* [T, S] i32, shared slots too; out of range: no expert */
  const shunt_tensor* weights; /* [T, S] f32, with ids */
  /* [G] i32 or NULL, with ids: they run over [0, G), and id i is the layer's expert expert_map[i],
   * or of another rank where that is -1: outputs of the ranks add up, with the shared expert,
   * output_bias and residual of each. Of more ids than experts not with latent_norm or output_norm,
   * which are of the whole sum. */
  const shunt_tensor* expert_map;
} shunt_layer_inputs;

typedef struct shunt_layer_outputs {
  uint64_t struct_size;
  const shunt_tensor* output;  /* [T, H] float */
  const shunt_tensor* ids;     /* [T, k] i32, optional */
  const shunt_tensor* weights; /* [T, k] f32, optional */
} shunt_layer_outputs;

/* spec_json: a LayerSpec as JSON, whose nesting a struct would freeze: every key of
 * shunt_checkpoint_layer_spec, unknown ones refused by name. options: NULL for the defaults. */
SHUNT_API shunt_status shunt_layer_supports(const shunt_context* context, const char* spec_json,
                                            const shunt_layer_options* options);
/* Copies and prepares the weights, which are not needed afterwards (but for in_place). Weights on a
 * GPU are read in the order of the context's stream. */
SHUNT_API shunt_status shunt_layer_create(const shunt_context* context, const char* spec_json,
                                          const shunt_layer_weights* weights,
                                          const shunt_layer_options* options, shunt_layer** layer);
SHUNT_API shunt_status shunt_layer_create_from_checkpoint(const shunt_context* context,
                                                          const shunt_checkpoint* checkpoint,
                                                          int32_t index,
                                                          const shunt_layer_options* options,
                                                          shunt_layer** layer);
SHUNT_API void shunt_layer_destroy(shunt_layer* layer);
/* The layer with its prepared weights as a safetensors file, and such a file as a layer, without
 * preparing anything. SHUNT_BAD_FILE for any other file, SHUNT_UNSUPPORTED for a layout that the
 * context's engine does not read. */
SHUNT_API shunt_status shunt_layer_save_prepared(const shunt_layer* layer, const char* path);
SHUNT_API shunt_status shunt_layer_load_prepared(const shunt_context* context, const char* path,
                                                 shunt_layer** layer);
/* Of a layer made in_place: its matrices as they were. Only destroy may follow. */
SHUNT_API shunt_status shunt_layer_unprepare(shunt_layer* layer);
SHUNT_API shunt_status shunt_layer_spec(const shunt_layer* layer, char* text, size_t capacity,
                                        size_t* length);
/* Rule and shapes in a few words. */
SHUNT_API shunt_status shunt_layer_describe(const shunt_layer* layer, char* text, size_t capacity,
                                            size_t* length);
/* H, the width of hidden states; 0 for NULL. */
SHUNT_API int64_t shunt_layer_hidden_size(const shunt_layer* layer);
/* Bytes of the prepared copy; 0 for NULL. */
SHUNT_API size_t shunt_layer_prepared_bytes(const shunt_layer* layer);
/* Enough for any forward of up to max_tokens tokens. */
SHUNT_API shunt_status shunt_layer_workspace_bytes(const shunt_layer* layer, int64_t max_tokens,
                                                   size_t* bytes);
/* What the plan chose for so many tokens, and why; a few lines. */
SHUNT_API shunt_status shunt_layer_explain(const shunt_layer* layer, int64_t tokens, char* text,
                                           size_t capacity, size_t* length);
/* output = MoE(hidden), on the context that the layer was created with. The output may be the
 * hidden states or the residual themselves. On CUDA it is enqueued, and can be captured after one
 * call with as many tokens; the graph refers to the layer, its context, the workspace and the
 * tensors. An error comes before anything is enqueued or written. */
SHUNT_API shunt_status shunt_layer_forward(const shunt_layer* layer,
                                           const shunt_layer_inputs* inputs,
                                           const shunt_layer_outputs* outputs, void* workspace,
                                           size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif /* SHUNT_C_SHUNT_H */
