/*
hyscale.c: the CUDA trainer. It includes train_cpu.c (its main left out) and replaces the mathematics by kernels, so
both programs share one configuration, one table of parameters, one memory plan, one data loader, one checkpoint, one
command line; and this one can check itself against the reference at any time: --verify 1.

Build and run:  make run          (or: make train_gpt_sparse && ./train_gpt_sparse --help)

Two precisions, chosen when compiling. bf16 (the default): activations and the matrices' working copies in bf16; master
weights, moments, gradients of parameters, all sums and softmax statistics in float32. fp32 (-DPRECISION_FP32): all of
it in float32, to compare with the reference. Everything is deterministic: sums run in a fixed order, no kernel adds
floats atomically.

Contents, in the order of train_cpu.c
   1  utilities            checked calls, precision, vector access, launches
   2  matrix product       cuBLASLt
   3  layers               norms, RoPE, SwiGLU, embedding, elementwise
   4  selection            HyTopK: plain streaming; streaming with tensor cores; the wgmma scan with guessed thresholds; the
                           baseline with a table of scores; select_path() chooses
   5  attention            the core of all letters, in four ways (core_path() chooses): plain kernels over the support, with
                           the indexer's KL and inverse lists; dense MLA by matrix products; tensor cores over gathered
                           rows, with their KL; wgmma, a key and value for each head
   6  attention layers     MLA, compressed, grouped-query: projections around the core
   7  the model            classifier, forward, backward
   8  optimizer            AdamW, gradient norm
   9  the engine           plan, transfers, steps without waiting for the host, CUDA graphs, generation
  10  --verify             against the CPU reference
  11  command line

Pointers in a Model named g point to device memory; m is the host's model. Activations are declared real * in the
shared plan and hold floatX here: X(pointer) says so.
*/
#define NO_MAIN
#include "train_cpu.c"
#include <float.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
#include <cub/device/device_radix_sort.cuh>

// ----------------------------------------------------------------------------
// 1. Utilities

#ifdef PRECISION_FP32
typedef float floatX;
#define PRECISION "float32"
#else
typedef __nv_bfloat16 floatX;
#define PRECISION "bf16 (float32 master weights, moments, gradients and statistics)"
#endif
static floatX *X(const real *p) { return (floatX *)p; }

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
static void cuda_check(cudaError_t e, const char *call, const char *file, int line) {
    if (e != cudaSuccess) die("CUDA: %s at %s:%d: %s", call, file, line, cudaGetErrorString(e));
}
static void cublas_check(cublasStatus_t e, const char *what) {
    if (e != CUBLAS_STATUS_SUCCESS) die("cuBLASLt: %s: status %d", what, (int)e);
}

enum { WARP = 32, BLOCK = 256 };

static unsigned blocks_for(int64_t n, int64_t per_block) { return (unsigned)((n + per_block - 1) / per_block); }

// A part of one tensor: the optimizer's kernels take one block each for all of them at once.
typedef struct { int64_t offset; int32_t n, index, decay; } Chunk;
enum { CHUNK_SIZE = 16384, RING = 4 };

// Phases of a step, for --phases 1.
enum { PHASE_REST, PHASE_GUESS, PHASE_SCORES, PHASE_TOPK, PHASE_FORWARD, PHASE_BACKWARD, PHASE_KL, PHASE_UPDATE, PHASES };
static const char *const phase_name[PHASES] = {"products, norms, classifier", "selection: thresholds", "selection: scores", "selection: top-k", "attention forward", "attention backward", "index KL", "optimizer"};
typedef struct { cudaEvent_t at; int phase; } Mark;

// Numbers of a step that the device keeps: the sums over its rows, and what the optimizer needs. So a step runs from
// tokens to new parameters without the host looking at anything.
typedef struct {
    double loss, kl, hits, norm[2];
    long long targets, nans;
    float clip[2];
    int good;
} Sums;
typedef struct { float lr[2], decay[2], fix1, inv2; } StepNumbers; // by index: learning rate, 1 - rate * weight_decay

// --replay-offload: packed selections wait in pinned host memory. Two buffers on the device stand between; a second stream
// copies. What a stream does to a buffer waits for what the other did to it last: the host waits for nothing.
typedef struct {
    Arena pinned;                // the layers' packed selections
    uint32_t *stage[2];          // (N, packing.words) on the device
    int holds[2], turn, backward; // the layer whose selection a buffer holds or will hold, -1: none; the buffer to fill next; in the backward pass
    cudaStream_t copies;
    cudaEvent_t used[2], copied[2]; // by the main stream, by the second one
} Offload;

// Device memory as the plan of train_cpu.c, and what only this program needs.
typedef struct {
    Model g, row;                // buffers on the device: for training, and for generation
    floatX *weights;             // working copy of the parameters' matrices; float32: the parameters themselves
    int64_t space, kl_space;     // floats of probs and of ds, of dots: they bound the queries of a chunk
    float *probs, *ds;           // (queries, support, H) of a chunk: probabilities, gradients to logits
    int32_t *place;              // (queries, support) KV rows of the supports
    float *target, *dots;        // (queries, candidates), (queries, HI, candidates) of the KL
    float *delta;                // (N, H) d_oc . oc
    float *partial;              // partial sums of reductions down the rows
    floatX *kv, *d_kv, *share;   // F by head: (N, H, nope + v) keys and values, their gradients; (N, H, rope) shares of the rotated key
    float *d_kr;                 // (N, rope)
    float2 *stat;                // (B, H, T) lse and delta as the kernels read them
    int wgmma;                   // the card has Hopper's products, and the program was compiled for them
    int multiprocessors;
    char *select;                // what a layer's selection works with: select_layout(), or a table of scores
    int64_t select_most;         // bytes that its lists or its table may have
    uint32_t *pair_key, *pair_key2, *pair, *pair2; // (queries * slots) row of each slot; query * slots + slot; and both sorted
    int2 *list;                  // (N * k) the inverse lists: query and slot, by candidate
    int32_t *list_start;         // (B * n_cand + 1) where a candidate's list starts
    int32_t *slot_of;            // (queries, slots) rank of each slot among all of a chunk, sorted by row
    floatX *partial_rows;        // (queries, slots, width) what each slot gives to its row, in the order of the ranks
    float *mass, *candidate_mass; // (queries, slots) probabilities summed over heads; (queries, k) the teacher's
    void *sort_space;
    size_t sort_bytes;
    Offload offload;
    Chunk *chunks;               // the table of parameters, cut up
    int64_t n_chunks;
    double *norm_parts;          // (n_chunks)
    double *row_parts;           // (ROW_BLOCKS, 4) of the rows' sums
    Sums *sums;
    StepNumbers *step_numbers;
    // host side
    int32_t *staging;            // pinned: (RING, 3, N) tokens, targets, documents on their way to the device
    cudaEvent_t staged[RING];
    int64_t turn;
    const Model *row_host;       // the host side of the generation that runs
    Sums *sums_host;             // pinned
    StepNumbers *step_numbers_host;
    size_t bytes;                // allocated on the device
    int timed, phase, n_marks, most_marks; // --phases: what runs, and where each began
    Mark *marks;
    unsigned long long *hashes;  // (L) with --phases: of each layer's selection
} Gpu;
static Gpu G_;

static cudaStream_t stream;

// From here on the stream works on this phase. Returns the one before.
static int phase_begin(int phase) {
    int before = G_.phase;
    G_.phase = phase;
    if (!G_.timed) return before;
    if (G_.n_marks == G_.most_marks) {
        G_.most_marks = 2 * G_.most_marks + 256;
        G_.marks = (Mark *)realloc(G_.marks, (size_t)G_.most_marks * sizeof(Mark));
        if (!G_.marks) die("no memory for %d marks of --phases", G_.most_marks);
        for (int i = G_.n_marks; i < G_.most_marks; i++) CUDA_CHECK(cudaEventCreate(&G_.marks[i].at));
    }
    G_.marks[G_.n_marks].phase = phase;
    CUDA_CHECK(cudaEventRecord(G_.marks[G_.n_marks++].at, stream));
    return before;
}
// After the stream has been waited for: milliseconds of each phase since the first mark, which are forgotten.
static void phase_times(double ms[PHASES]) {
    memset(ms, 0, PHASES * sizeof(double));
    for (int i = 0; i + 1 < G_.n_marks; i++) {
        float t;
        CUDA_CHECK(cudaEventElapsedTime(&t, G_.marks[i].at, G_.marks[i + 1].at));
        ms[G_.marks[i].phase] += (double)t;
    }
    G_.n_marks = 0;
}

// The matrices' working copy of a parameter. Vectors (norms, biases, sinks) are read from the float32 parameters.
static floatX *weight(int i) { return G_.weights + G_.g.tensors[i].offset; }

// V consecutive values as floats. V = 8 reads and writes 16 bytes at a time and needs aligned addresses.
template <int V, class A> __device__ static void load(float out[V], const A *p) {
    if constexpr (V == 1) out[0] = (float)*p;
    else {
        alignas(16) A x[V];
        #pragma unroll
        for (int i = 0; i < (int)(V * sizeof(A)); i += 16) *(uint4 *)((char *)x + i) = *(const uint4 *)((const char *)p + i);
        #pragma unroll
        for (int i = 0; i < V; i++) out[i] = (float)x[i];
    }
}
template <int V, class A> __device__ static void store(A *p, const float in[V]) {
    if constexpr (V == 1) *p = (A)in[0];
    else {
        alignas(16) A x[V];
        #pragma unroll
        for (int i = 0; i < V; i++) x[i] = (A)in[i];
        #pragma unroll
        for (int i = 0; i < (int)(V * sizeof(A)); i += 16) *(uint4 *)((char *)p + i) = *(const uint4 *)((const char *)x + i);
    }
}
static int aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

// One thread for V consecutive elements of n, or for one where an operand is not aligned: kernel<8> or kernel<1>.
#define ELEMENTWISE(kernel, ok, n, ...)                                                                              \
    do {                                                                                                             \
        if ((ok) && (n) % 8 == 0) kernel<8><<<blocks_for((n) / 8, BLOCK), BLOCK, 0, stream>>>(__VA_ARGS__, (n));      \
        else if ((n) > 0) kernel<1><<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(__VA_ARGS__, (n));                    \
    } while (0)

__device__ static float warp_sum(float v) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
__device__ static float warp_max(float v) {
    for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
// Sum, or largest, over a block; the result is in all threads.
__device__ static float block_sum(float v, float *shared) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    float s = 0;
    for (int w = 0; w < (int)(blockDim.x / WARP); w++) s += shared[w];
    return s;
}
__device__ static float block_max(float v, float *shared) {
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    for (int w = 0; w < (int)(blockDim.x / WARP); w++) v = fmaxf(v, shared[w]);
    return v;
}

#ifndef PRECISION_FP32
// The instructions that the tensor-core kernels are made of (sm_80 and later).
enum { PAD = 8 }; // values behind each row in shared memory: ldmatrix then meets no bank twice
__device__ static uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
// d[16x8] += a[16x16] b[16x8], bf16 in, float sums. Lane l holds of a: rows l/4 and l/4+8, columns 2(l%4)+{0,1} and +8; of
// b: column l/4, rows 2(l%4)+{0,1} and +8; of d: rows l/4 and l/4+8, columns 2(l%4)+{0,1}.
__device__ static void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8x8 matrices; lane l gives the address of row l%8 of matrix l/8. The second form transposes each.
__device__ static void ldmatrix(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ static void ldmatrix_trans(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
// 16 bytes from global to shared memory, zeros when not take; complete after copies_done().
__device__ static void copy_16(uint32_t to, const floatX *from, int take) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(take ? 16 : 0) : "memory");
}
__device__ static void copies_issued(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ static void copies_done(void) { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
__device__ static uint32_t pack(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&v;
}
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ static void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
#endif
#endif

// ----------------------------------------------------------------------------
// 2. Matrix product
// cuBLASLt is column-major: C^T = B^T A^T. One stride of each operand is 1, which says whether it is transposed there.

typedef struct { int64_t v[16]; cublasLtMatmulDesc_t op; cublasLtMatrixLayout_t a, b, c; cublasLtMatmulAlgo_t algo; } GemmPlan;
static GemmPlan *gemm_plans;
static int n_gemm_plans;
static cublasLtHandle_t lt;
static void *lt_workspace;
enum { LT_WORKSPACE = 32 << 20 };

static cublasLtMatrixLayout_t gemm_layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld, int64_t count, int64_t stride) {
    cublasLtMatrixLayout_t l;
    int32_t n = (int32_t)count;
    cublas_check(cublasLtMatrixLayoutCreate(&l, type, (uint64_t)rows, (uint64_t)cols, ld), "layout");
    cublas_check(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n), "batch count");
    cublas_check(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride), "batch stride");
    return l;
}

// The product's description and algorithm for these sizes, found once. Appends to the list.
static GemmPlan *gemm_plan(const int64_t key[16], cudaDataType_t out) {
    const cudaDataType_t in = sizeof(floatX) == 4 ? CUDA_R_32F : CUDA_R_16BF;
    int64_t ldc = key[0], sc = key[1], ars = key[2], aks = key[3], sa = key[4], bks = key[5], bcs = key[6], sb = key[7], M = key[8], N = key[9], K = key[10], count = key[12];
    if (n_gemm_plans % 64 == 0) gemm_plans = (GemmPlan *)realloc(gemm_plans, (size_t)(n_gemm_plans + 64) * sizeof(GemmPlan));
    if (!gemm_plans) die("no memory for the plans of matrix products");
    GemmPlan *p = &gemm_plans[n_gemm_plans++];
    memcpy(p->v, key, sizeof p->v);
    int b_plain = bcs == 1 && bks >= N, a_plain = aks == 1 && ars >= K; // a vector has both strides 1
    cublasOperation_t ta = b_plain ? CUBLAS_OP_N : CUBLAS_OP_T, tb = a_plain ? CUBLAS_OP_N : CUBLAS_OP_T;
    cublas_check(cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
    cublas_check(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta), "transpose");
    cublas_check(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb), "transpose");
    p->a = b_plain ? gemm_layout(in, N, K, bks, count, sb) : gemm_layout(in, K, N, bcs, count, sb);
    p->b = a_plain ? gemm_layout(in, K, M, ars, count, sa) : gemm_layout(in, M, K, aks, count, sa);
    p->c = gemm_layout(out, N, M, ldc, count, sc);
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t found;
    int n_found = 0;
    size_t space = LT_WORKSPACE;
    uint32_t align = (uint32_t)key[14];
    cublas_check(cublasLtMatmulPreferenceCreate(&pref), "preference");
    cublas_check(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof space), "workspace");
    const cublasLtMatmulPreferenceAttributes_t operands[] = {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++) cublas_check(cublasLtMatmulPreferenceSetAttribute(pref, operands[i], &align, sizeof align), "alignment");
    cublas_check(cublasLtMatmulAlgoGetHeuristic(lt, p->op, p->a, p->b, p->c, p->c, pref, 1, &found, &n_found), "heuristic");
    if (!n_found) die("cuBLASLt has no algorithm for a product of %lld x %lld x %lld", (long long)M, (long long)N, (long long)K);
    p->algo = found.algo;
    cublasLtMatmulPreferenceDestroy(pref);
    return p;
}

// count products D = add + A B (add NULL: none; it has D's strides and may be D), strides as in matmul() of train_cpu.c,
// the matrices of product i offset by i times sc, sa, sb. D and add are floatX or float, A and B are floatX.
template <class Y> static void gpu_matmul_batch(Y *D, int64_t ldc, int64_t sc, const Y *add, const floatX *A, int64_t ars, int64_t aks, int64_t sa, const floatX *B, int64_t bks, int64_t bcs,
                                                int64_t sb, int64_t M, int64_t N, int64_t K, int64_t count) {
    int64_t together = (int64_t)((uintptr_t)A | (uintptr_t)B | (uintptr_t)D | (uintptr_t)add), align = 16;
    while (together % align) align /= 2;
    const int64_t key[16] = {ldc, sc, ars, aks, sa, bks, bcs, sb, M, N, K, add != NULL, count, sizeof(Y), align, add && add != D};
    float alpha = 1, beta = add ? 1 : 0;
    int i = 0;
    if (M == 0 || N == 0) return;
    while (i < n_gemm_plans && memcmp(gemm_plans[i].v, key, sizeof key)) i++;
    GemmPlan *p = i < n_gemm_plans ? &gemm_plans[i] : gemm_plan(key, sizeof(Y) == 4 ? CUDA_R_32F : CUDA_R_16BF);
    cublas_check(cublasLtMatmul(lt, p->op, &alpha, B, p->a, A, p->b, &beta, add ? add : D, p->c, D, p->c, &p->algo, lt_workspace, LT_WORKSPACE, stream), "product");
}

template <class Y> static void gpu_matmul(Y *D, int64_t ldc, const Y *add, const floatX *A, int64_t ars, int64_t aks, const floatX *B, int64_t bks, int64_t bcs, int64_t M, int64_t N, int64_t K) {
    gpu_matmul_batch(D, ldc, 0, add, A, ars, aks, 0, B, bks, bcs, 0, M, N, K, 1);
}

// y[n, out] = x[n, in] w[out, in]^T (+ residual: added in the product's epilogue, before the rounding)
template <class Y> static void gpu_linear_forward(Y *y, const Y *residual, const floatX *x, const floatX *w, int64_t n, int64_t in, int64_t out) {
    gpu_matmul(y, out, residual, x, in, 1, w, 1, in, n, out, in);
}

// dw += dy^T x, in float; then dx (+)= dy w unless dx is NULL. dx may be x: it is read before.
static void gpu_linear_backward(floatX *dx, int add_dx, float *dw, const floatX *dy, const floatX *x, const floatX *w, int64_t n, int64_t in, int64_t out) {
    gpu_matmul(dw, in, dw, dy, 1, out, x, in, 1, out, in, n);
    if (dx) gpu_matmul(dx, in, add_dx ? dx : (floatX *)NULL, dy, out, 1, w, in, 1, n, in, out);
}

// ----------------------------------------------------------------------------
// 3. Layers

// A view of rows inside sequences: row i of the batch starts at base + ((i / T) * seq_rows + i % T) * ld.
template <class A> struct Rows { A *base; int64_t ld, seq_rows; };
template <class A> __device__ static A *row_at(Rows<A> r, int64_t i, int64_t T) { return r.seq_rows ? r.base + (i / T * r.seq_rows + i % T) * r.ld : r.base + i * r.ld; }
template <class A> static Rows<A> rows_of(A *base, int64_t ld, int64_t seq_rows) { Rows<A> r = {base, ld, seq_rows}; return r; }
template <class A> static Rows<A> plain_rows(A *base, int64_t ld) { return rows_of(base, ld, 0); } // one row behind the other
template <class A> static int rows_aligned(Rows<A> r) { return aligned(r.base) && r.ld % 8 == 0; }

// y = x * rstd * (plus + w), one warp a row.
template <int V, class Y, class A>
__global__ static void rmsnorm_forward_kernel(Rows<Y> y, float *rstd, Rows<A> x, const float *w, float plus, int64_t n, int64_t d, float eps, int64_t T) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    const A *xi = row_at(x, i, T);
    Y *yi = row_at(y, i, T);
    float s = 0, a[V], b[V];
    for (int64_t j = lane * V; j < d; j += WARP * V) {
        load<V>(a, xi + j);
        for (int v = 0; v < V; v++) s += a[v] * a[v];
    }
    float r = 1 / sqrtf(warp_sum(s) / (float)d + eps);
    for (int64_t j = lane * V; j < d; j += WARP * V) {
        load<V>(a, xi + j);
        if (w) load<V>(b, w + j);
        for (int v = 0; v < V; v++) a[v] *= r * (w ? plus + b[v] : 1);
        store<V>(yi + j, a);
    }
    if (lane == 0) rstd[i] = r;
}
template <class Y, class A> static void gpu_rmsnorm_forward(Rows<Y> y, float *rstd, Rows<A> x, const float *w, float plus, int64_t n, int64_t d, double eps, int64_t T) {
    unsigned blocks = blocks_for(n * WARP, BLOCK);
    if (rows_aligned(y) && rows_aligned(x) && d % 8 == 0 && aligned(w)) rmsnorm_forward_kernel<8><<<blocks, BLOCK, 0, stream>>>(y, rstd, x, w, plus, n, d, (float)eps, T);
    else rmsnorm_forward_kernel<1><<<blocks, BLOCK, 0, stream>>>(y, rstd, x, w, plus, n, d, (float)eps, T);
}

// dx (+)= rstd (g - xh mean(g xh)), g = dy (plus + w), one warp a row.
template <int V, class Y, class D, class A>
__global__ static void rmsnorm_backward_kernel(Rows<Y> dx, int add, Rows<D> dy, const float *rstd, Rows<A> x, const float *w, float plus, int64_t n, int64_t d, int64_t T) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    const A *xi = row_at(x, i, T);
    const D *dyi = row_at(dy, i, T);
    Y *dxi = row_at(dx, i, T);
    float r = rstd[i], s = 0, a[V], b[V], c[V], e[V];
    for (int64_t j = lane * V; j < d; j += WARP * V) {
        load<V>(a, xi + j);
        load<V>(b, dyi + j);
        if (w) load<V>(c, w + j);
        for (int v = 0; v < V; v++) s += b[v] * (w ? plus + c[v] : 1) * a[v];
    }
    s = warp_sum(s) * r * r / (float)d;
    for (int64_t j = lane * V; j < d; j += WARP * V) {
        load<V>(a, xi + j);
        load<V>(b, dyi + j);
        if (w) load<V>(c, w + j);
        if (add) load<V>(e, dxi + j);
        for (int v = 0; v < V; v++) a[v] = (add ? e[v] : 0) + r * (b[v] * (w ? plus + c[v] : 1) - a[v] * s);
        store<V>(dxi + j, a);
    }
}

enum { ROW_PARTS = 128, ROW_LANES = 8 }; // pieces in which sums down the rows are cut: fixed, so that their order is

// part[p, j] = sum over the p-th piece of rows of dy * (x - mean) * rstd (rstd NULL: of dy); mean may be NULL.
template <class D, class A>
__global__ static void column_parts_kernel(float *part, Rows<D> dy, Rows<A> x, const float *rstd, const float *mean, int64_t n, int64_t d, int64_t T) {
    __shared__ float lanes[ROW_LANES][WARP];
    int64_t j = blockIdx.x * (int64_t)WARP + threadIdx.x, p = blockIdx.y, per = (n + ROW_PARTS - 1) / ROW_PARTS, end = min(n, (p + 1) * per);
    float s = 0;
    for (int64_t i = p * per + threadIdx.y; i < end && j < d; i += ROW_LANES) {
        float g = (float)row_at(dy, i, T)[j];
        s += rstd ? g * ((float)row_at(x, i, T)[j] - (mean ? mean[i] : 0)) * rstd[i] : g;
    }
    lanes[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y || j >= d) return;
    for (int y = 1; y < ROW_LANES; y++) s += lanes[y][threadIdx.x];
    part[p * d + j] = s;
}
__global__ static void column_total_kernel(float *out, const float *part, int64_t d) {
    int64_t j = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (j >= d) return;
    float s = 0;
    for (int p = 0; p < ROW_PARTS; p++) s += part[p * d + j];
    out[j] += s;
}
// out[d] += sum down the rows, see column_parts_kernel.
template <class D, class A> static void gpu_column_sum(float *out, Rows<D> dy, Rows<A> x, const float *rstd, const float *mean, int64_t n, int64_t d, int64_t T) {
    column_parts_kernel<<<dim3(blocks_for(d, WARP), ROW_PARTS), dim3(WARP, ROW_LANES), 0, stream>>>(G_.partial, dy, x, rstd, mean, n, d, T);
    column_total_kernel<<<blocks_for(d, WARP), WARP, 0, stream>>>(out, G_.partial, d);
}

template <class Y, class D, class A>
static void gpu_rmsnorm_backward(Rows<Y> dx, int add, float *dw, Rows<D> dy, const float *rstd, Rows<A> x, const float *w, float plus, int64_t n, int64_t d, int64_t T) {
    unsigned blocks = blocks_for(n * WARP, BLOCK);
    if (dw) gpu_column_sum(dw, dy, x, rstd, NULL, n, d, T); // before dx: it may overwrite dy
    if (rows_aligned(dx) && rows_aligned(dy) && rows_aligned(x) && d % 8 == 0 && aligned(w)) rmsnorm_backward_kernel<8><<<blocks, BLOCK, 0, stream>>>(dx, add, dy, rstd, x, w, plus, n, d, T);
    else rmsnorm_backward_kernel<1><<<blocks, BLOCK, 0, stream>>>(dx, add, dy, rstd, x, w, plus, n, d, T);
}

__global__ static void layernorm_forward_kernel(floatX *y, float *mean, float *rstd, const floatX *x, const float *w, const float *b, int64_t n, int64_t d, float eps) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    const floatX *xi = x + i * d;
    float s = 0, v = 0;
    for (int64_t j = lane; j < d; j += WARP) s += (float)xi[j];
    float mu = warp_sum(s) / (float)d;
    for (int64_t j = lane; j < d; j += WARP) v += ((float)xi[j] - mu) * ((float)xi[j] - mu);
    float r = 1 / sqrtf(warp_sum(v) / (float)d + eps);
    for (int64_t j = lane; j < d; j += WARP) y[i * d + j] = (floatX)(((float)xi[j] - mu) * r * w[j] + b[j]);
    if (lane == 0) { mean[i] = mu; rstd[i] = r; }
}
__global__ static void layernorm_backward_kernel(floatX *dx, const float *dy, const float *mean, const float *rstd, const floatX *x, const float *w, int64_t n, int64_t d) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    float a = 0, b = 0, mu = mean[i], r = rstd[i];
    for (int64_t j = lane; j < d; j += WARP) {
        a += dy[i * d + j] * w[j];
        b += dy[i * d + j] * w[j] * ((float)x[i * d + j] - mu) * r;
    }
    a = warp_sum(a) / (float)d;
    b = warp_sum(b) / (float)d;
    for (int64_t j = lane; j < d; j += WARP) dx[i * d + j] = (floatX)(r * (dy[i * d + j] * w[j] - a - ((float)x[i * d + j] - mu) * r * b));
}

// dst[i, head, pairs] = src rotated, one thread a pair, for the rows i0.. of the batch (dst and src start at row i0).
// Positions count from the document's start.
template <class Y, class A>
__global__ static void rope_kernel(Rows<Y> dst, int64_t dst_head, Rows<A> src, int64_t src_head, int64_t heads, const float *cos_sin, const int32_t *doc, int64_t half, int layout,
                                   float sign, int64_t i0, int64_t n, int64_t T) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= n * heads * half) return;
    int64_t j = x % half, h = x / half % heads, i = x / half / heads;
    const float *cs = cos_sin + (((i0 + i) % T - doc[i0 + i]) * half + j) * 2;
    const A *s = row_at(src, i, T) + h * src_head;
    Y *d = row_at(dst, i, T) + h * dst_head;
    int64_t p = layout == HALF_SPLIT ? j : 2 * j, q = layout == HALF_SPLIT ? j + half : 2 * j + 1;
    float a = (float)s[p], b = (float)s[q], c = cs[0], sn = sign * cs[1];
    d[p] = (Y)(a * c - b * sn);
    d[q] = (Y)(a * sn + b * c);
}
template <class Y, class A>
static void gpu_rope(const Model *g, const Layer *l, Rows<Y> dst, int64_t dst_head, Rows<A> src, int64_t src_head, int64_t heads, int layout, int sign) {
    int64_t half = g->c.rope / 2;
    rope_kernel<<<blocks_for(g->nr * heads * half, BLOCK), BLOCK, 0, stream>>>(dst, dst_head, src, src_head, heads, l->cos_sin, g->doc, half, layout, (float)sign, g->r0, g->nr, g->T);
}
// In place.
template <class A> static void gpu_rotate(const Model *g, const Layer *l, Rows<A> x, int64_t head, int64_t heads, int layout, int sign) { gpu_rope(g, l, x, head, x, head, heads, layout, sign); }

template <int V> __global__ static void swiglu_forward_kernel(floatX *act, const floatX *g, const floatX *u, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V;
    float a[V], b[V];
    if (i >= n) return;
    load<V>(a, g + i);
    load<V>(b, u + i);
    for (int v = 0; v < V; v++) a[v] = a[v] / (1 + expf(-a[v])) * b[v];
    store<V>(act + i, a);
}
// dg may be g, du may be u: a thread reads its values before it writes them.
template <int V> __global__ static void swiglu_backward_kernel(floatX *dg, floatX *du, const floatX *dact, const floatX *g, const floatX *u, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V;
    float a[V], b[V], d[V];
    if (i >= n) return;
    load<V>(a, g + i);
    load<V>(b, u + i);
    load<V>(d, dact + i);
    for (int v = 0; v < V; v++) {
        float s = 1 / (1 + expf(-a[v])), silu = a[v] * s;
        a[v] = d[v] * b[v] * (s + silu * (1 - s));
        b[v] = d[v] * silu;
    }
    store<V>(dg + i, a);
    store<V>(du + i, b);
}
template <int V> __global__ static void scale_kernel(float *x, float s, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V;
    for (int v = 0; v < V && i < n; v++) x[i + v] *= s;
}
template <int V> __global__ static void fill_kernel(float *x, float s, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V;
    for (int v = 0; v < V && i < n; v++) x[i + v] = s;
}
template <int V> __global__ void convert_kernel(floatX *to, const float *from, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V;
    float a[V];
    if (i >= n) return;
    load<V>(a, from + i);
    store<V>(to + i, a);
}
// x as matrix products take it: itself, or rounded into space.
static const floatX *as_operand(const float *x, floatX *space, int64_t n) {
    if constexpr (sizeof(floatX) == sizeof(float)) return (const floatX *)x;
    else {
        ELEMENTWISE(convert_kernel, aligned(x) && aligned(space), n, space, x);
        return space;
    }
}

template <int V> __global__ static void embedding_forward_kernel(floatX *x, const floatX *e, const int32_t *tokens, int64_t C, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V;
    float a[V];
    if (i >= n) return;
    load<V>(a, e + tokens[i / C] * C + i % C);
    store<V>(x + i, a);
}
// de[v, c] += sum of dx over the rows where token v stands, in a fixed order: list holds the rows sorted by token. One
// block a token and 32 channels.
__global__ static void embedding_backward_kernel(float *de, const floatX *dx, const int2 *list, const int32_t *start, int64_t C) {
    __shared__ float lanes[ROW_LANES][WARP];
    int64_t v = blockIdx.x, c = blockIdx.y * (int64_t)WARP + threadIdx.x;
    if (start[v] == start[v + 1]) return;
    float s = 0;
    for (int j = start[v] + (int)threadIdx.y; j < start[v + 1] && c < C; j += ROW_LANES) s += (float)dx[list[j].x * C + c];
    lanes[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y || c >= C) return;
    for (int y = 1; y < ROW_LANES; y++) s += lanes[y][threadIdx.x];
    de[v * C + c] += s;
}

// ----------------------------------------------------------------------------
// 4. Selection

// What the kernels of selection and attention need of a layer. Rows of the batch and of a sequence fit 32 bits, which
// divide much faster than 64; products of them do not.
typedef struct {
    int T, N, H, HI, DI, k, W, r, unit, n_cand, n_rows, G, Dk, Dv, R, v_off, support;
    int v4, qsa, all;
    int control, layer;          // who chooses: SELECT_*; the layer's number, for random choices
    uint64_t seed;
    float scale;
    const int32_t *doc, *sel, *place;
    const floatX *rows, *qrow;
    const float *sinks;
    const floatX *q_index, *k_index; // of the source layer
    const float *w_index;
} Core;

enum { SELECT_INDEXER, SELECT_RANDOM, SELECT_WINDOW };

// KV rows of the longest support of a layer, when it attends to all candidates or to its chosen ones.
static int64_t layer_support(const Model *g, const Layer *l, int all) {
    int64_t n = all ? l->n_cand : min64(l->n_cand, g->c.topk);
    return max64(1, n * (l->letter == 'Q' ? l->r : 1) + (is_v4(l->letter) ? min64(g->c.window, g->T) : l->letter == 'Q' ? l->r : 0));
}

static Core core_of(const Model *g, const Layer *l) {
    Core c;
    memset(&c, 0, sizeof c);
    const Layer *src = l->source >= 0 ? &g->layers[l->source] : NULL;
    c.T = (int)g->T; c.N = (int)g->N; c.H = (int)g->c.H; c.HI = (int)g->c.HI; c.DI = (int)g->c.DI; c.k = (int)g->c.topk; c.W = (int)g->c.window;
    c.r = (int)l->r; c.unit = l->letter == 'Q' ? (int)l->r : 1; c.n_cand = (int)l->n_cand; c.n_rows = (int)l->n_rows;
    c.G = (int)l->G; c.Dk = (int)l->Dk; c.Dv = (int)l->Dv; c.R = (int)l->R; c.v_off = (int)l->v_off;
    c.v4 = is_v4(l->letter); c.qsa = l->letter == 'Q'; c.all = attends_to_all(g, l);
    c.support = (int)layer_support(g, l, c.all);
    c.control = !strcmp(g->c.selector, "random") ? SELECT_RANDOM : !strcmp(g->c.selector, "window") ? SELECT_WINDOW : SELECT_INDEXER;
    c.layer = (int)(l - g->layers);
    c.seed = g->select_seed;
    c.place = G_.place;
    c.scale = (float)l->scale;
    c.doc = g->doc; c.rows = X(l->rows); c.qrow = X(l->qrow);
    c.sinks = c.v4 ? param(g, l->sinks) : NULL;
    if (src) { c.sel = src->sel; c.q_index = X(src->q_index); c.w_index = src->w_index; c.k_index = X(src->k_index); }
    return c;
}

// Visible candidates [lo, lo + n) of row i.
__device__ static void gpu_visible(const Core &c, int i, int *lo, int *n) {
    *lo = c.r ? c.doc[i] / c.r : 0;
    *n = c.r ? (i % c.T - c.doc[i] + 1) / c.r : 0;
}
// First value of KV row "row" of the sequence that batch row i belongs to, and the same for index keys.
__device__ static const floatX *kv_row(const Core &c, int i, int row) { return c.rows + ((int64_t)(i / c.T) * c.n_rows + row) * c.R; }
__device__ static const floatX *index_key(const Core &c, int i, int e) { return c.k_index + ((int64_t)(i / c.T) * c.n_cand + e) * c.DI; }

__device__ static uint64_t gpu_rng_mix(uint64_t z) { // rng_mix()
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Monotone unsigned integer of a score: -0 as +0, NaN largest. 0 is no score's.
__device__ static uint32_t gpu_ordered(float score) {
    score += 0.0f;
    uint32_t bits = __float_as_uint(score);
    bits ^= (0u - (bits >> 31)) | 0x80000000u;
    return score != score ? 0xffffffffu : bits;
}
__device__ static uint64_t gpu_order_key(float score, int64_t s) { return (uint64_t)gpu_ordered(score) << 32 | (uint32_t)~(uint32_t)s; }

// The order of candidate s of row i for the controls, as select_control() of train_cpu.c: random, or the latest.
__device__ static uint64_t gpu_control_key(const Core &c, int64_t i, int64_t s) {
    if (c.control == SELECT_WINDOW) return (uint64_t)s << 32 | (uint32_t)~(uint32_t)s;
    uint64_t z = gpu_rng_mix(gpu_rng_mix(gpu_rng_mix(c.seed) ^ (RNG_SELECT + (uint64_t)c.layer)) ^ (uint64_t)(i * c.T + s));
    return gpu_order_key((float)(z >> 40), s);
}

// All threads of the block: bound such that exactly k of the n distinct keys are at or above it (1 <= k <= n).
__device__ static uint64_t gpu_kth_largest(const uint64_t *key, int n, int k, int *count, int *shared) {
    uint64_t prefix = 0, mask = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int b = threadIdx.x; b < 256; b += blockDim.x) count[b] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            if ((key[i] & mask) == prefix) atomicAdd(&count[key[i] >> shift & 255], 1); // counts: their order does not matter
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255, left = k;
            while (count[digit] < left) left -= count[digit--];
            shared[0] = digit;
            shared[1] = left;
            shared[2] = count[digit] == left;
        }
        __syncthreads();
        prefix |= (uint64_t)shared[0] << shift;
        mask |= (uint64_t)255 << shift;
        k = shared[1];
        int done = shared[2];
        __syncthreads();
        if (done) break;
    }
    return prefix;
}

// Stable compaction of the keys at or above bound, in place, a block-wide chunk at a time. Returns how many are kept.
__device__ static int gpu_keep(uint64_t *key, int n, uint64_t bound, int *warp_count) {
    int kept = 0;
    for (int i0 = 0; i0 < n; i0 += blockDim.x) {
        int i = i0 + threadIdx.x;
        uint64_t x = i < n ? key[i] : 0;
        int pass = i < n && x >= bound;
        unsigned ballot = __ballot_sync(0xffffffffu, pass);
        if (threadIdx.x % WARP == 0) warp_count[threadIdx.x / WARP] = __popc(ballot);
        __syncthreads();
        int at = kept + __popc(ballot & ((1u << threadIdx.x % WARP) - 1)), total = 0;
        for (int w = 0; w < (int)(blockDim.x / WARP); w++) {
            if (w < (int)threadIdx.x / WARP) at += warp_count[w];
            total += warp_count[w];
        }
        if (pass) key[at] = x; // at <= i: this chunk's keys are all in registers by now
        kept += total;
        __syncthreads();
    }
    return kept;
}

enum { TILE = 32 }; // channels of a key that stand in shared memory at a time

// HyTopK: a block of threads serves QB neighbouring queries. A chunk of BLOCK candidates is scored, one thread a candidate
// for all QB queries: keys come through shared memory, TILE channels at a time, so that global reads are whole lines.
// Then, query by query, keys above tau are appended in index order; a full buffer is cut to its k largest. See
// select_hytopk() in train_cpu.c. Dynamic shared memory: QB buffers [2k + BLOCK], queries, weights.
template <int QB>
__global__ static void hytopk_kernel(Core c, int32_t *sel, int first, int count_rows, long long *nans) {
    extern __shared__ uint64_t buffers[];
    __shared__ float tile[BLOCK / WARP][WARP][TILE + 1]; // by warp; the pad keeps columns in different banks
    __shared__ int count[256], shared[3], warp_count[BLOCK / WARP];
    int groups = (count_rows + QB - 1) / QB, b = (int)blockIdx.x / groups, t0 = first + (int)blockIdx.x % groups * QB, end = first + count_rows; // rows of each sequence
    int capacity = 2 * c.k + BLOCK, width = c.HI * c.DI, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int lo[QB], hi[QB], n[QB], from = c.T, to = 0;
    uint64_t tau[QB];
    float *q = (float *)(buffers + QB * capacity), *w = q + QB * width;
    for (int j = 0; j < QB; j++) {
        int visible = 0;
        lo[j] = n[j] = 0;
        tau[j] = 0;
        if (t0 + j < end) gpu_visible(c, b * c.T + t0 + j, &lo[j], &visible);
        hi[j] = lo[j] + visible;
        if (visible) { from = min(from, lo[j]); to = max(to, hi[j]); }
    }
    int64_t row0 = (int64_t)b * c.T + t0, rows = min(QB, end - t0);
    for (int x = threadIdx.x; x < rows * width; x += BLOCK) q[x] = (float)c.q_index[row0 * width + x];
    for (int x = threadIdx.x; x < rows * c.HI; x += BLOCK) w[x] = c.w_index[row0 * c.HI + x];
    __syncthreads();
    for (int s0 = from; s0 < to; s0 += BLOCK) {
        int s = s0 + (int)threadIdx.x;
        float score[QB], dot[QB];
        for (int h = 0; h < c.HI && c.control == SELECT_INDEXER; h++) {
            for (int j = 0; j < QB; j++) dot[j] = 0;
            for (int d0 = 0; d0 < c.DI; d0 += TILE) {
                int nd = min(TILE, c.DI - d0);
                if (h == 0 || c.DI > TILE) { // one tile holds a whole small key: read it once for all heads
                    __syncwarp();
                    for (int x = 0; x < WARP; x++) {
                        int key = s0 + warp * WARP + x;
                        if (key < to && lane < nd) tile[warp][x][lane] = (float)c.k_index[((int64_t)b * c.n_cand + key) * c.DI + d0 + lane];
                    }
                    __syncwarp();
                }
                for (int d = 0; d < nd; d++)
                    for (int j = 0; j < QB; j++) dot[j] = fmaf(q[j * width + h * c.DI + d0 + d], tile[warp][lane][d], dot[j]);
            }
            for (int j = 0; j < QB; j++) {
                float part = w[j * c.HI + h] * (dot[j] < 0 ? 0 : dot[j]); // a NaN stays NaN
                score[j] = h == 0 ? part : score[j] + part;
            }
        }
        for (int j = 0; j < QB; j++) {
            uint64_t *key = buffers + j * capacity, x = 0;
            if (s >= lo[j] && s < hi[j]) x = c.control ? gpu_control_key(c, row0 + j, s) : gpu_order_key(score[j], s);
            if (n[j] + BLOCK > capacity) {
                tau[j] = gpu_kth_largest(key, n[j], c.k, count, shared);
                n[j] = gpu_keep(key, n[j], tau[j], warp_count);
            }
            int pass = x > tau[j];
            unsigned ballot = __ballot_sync(0xffffffffu, pass);
            if (lane == 0) warp_count[warp] = __popc(ballot);
            __syncthreads();
            int at = n[j] + __popc(ballot & ((1u << lane) - 1));
            for (int v = 0; v < BLOCK / WARP; v++) {
                if (v < warp) at += warp_count[v];
                n[j] += warp_count[v];
            }
            if (pass) key[at] = x;
            __syncthreads();
        }
    }
    for (int j = 0; j < rows; j++) {
        uint64_t *key = buffers + j * capacity;
        if (n[j] > c.k) {
            tau[j] = gpu_kth_largest(key, n[j], c.k, count, shared);
            n[j] = gpu_keep(key, n[j], tau[j], warp_count);
        }
        for (int x = threadIdx.x; x < c.k; x += BLOCK) {
            sel[(row0 + j) * c.k + x] = x < n[j] ? (int32_t)(uint32_t)~(uint32_t)key[x] : -1;
            if (!c.control && x < n[j] && key[x] >> 32 == 0xffffffffu) atomicAdd((unsigned long long *)nans, 1ull);
        }
    }
}

// As many queries a block as shared memory holds buffers for.
template <int QB>
static int gpu_hytopk(const Core &c, int32_t *sel, int B, int first, int count_rows) {
    size_t bytes = QB * ((size_t)(2 * c.k + BLOCK) * sizeof(uint64_t) + (size_t)(c.HI * c.DI + c.HI) * sizeof(float));
    if (bytes > (QB > 1 ? 80 : 180) * 1024) return 0; // more than one block should fit a multiprocessor
    CUDA_CHECK(cudaFuncSetAttribute(hytopk_kernel<QB>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    hytopk_kernel<QB><<<(unsigned)(B * ((count_rows + QB - 1) / QB)), BLOCK, bytes, stream>>>(c, sel, first, count_rows, &G_.sums->nans);
    return 1;
}

// The digit in which the k-th largest lies, of 256 counts; *left: its rank within that digit. One warp.
__device__ static int find_digit(const int *hist, int k, int *left) {
    int lane = threadIdx.x % WARP, own = 0, digit = 255 - 8 * lane, rank;
    for (int j = 0; j < 8; j++) own += hist[digit - j];
    int sum = own;
    for (int o = 1; o < WARP; o *= 2) {
        int v = __shfl_up_sync(0xffffffffu, sum, o);
        if (lane >= o) sum += v;
    }
    int who = __ffs((int)__ballot_sync(0xffffffffu, sum >= k)) - 1;
    rank = k - (sum - own);
    if (lane == who)
        while (hist[digit] < rank) rank -= hist[digit--];
    *left = __shfl_sync(0xffffffffu, rank, who);
    return __shfl_sync(0xffffffffu, digit, who);
}

typedef struct { int hist[256], digit, left, count; uint32_t lo, hi; } Radix; // in shared memory; count: values in the last digit's bin
typedef struct { uint32_t bound; int ties; } Cut; // chosen are all above bound and, of those equal to it, the first "ties"

// The k-th largest (1 <= k <= n) of load(0 .. n-1), by a whole block. Digits are taken from the range that the values really span: the
// candidates of a top-k lie close together. digits = 4: exact. Fewer: a bound at or below the k-th, off by 2^-8 digits of the range. 0: stop as
// soon as a bound between the k-th and the next value is known. In both of these cases ties = INT32_MAX: all that equal the bound belong.
template <class F> __device__ static Cut block_kth(F load, int n, int k, int digits, Radix *s) {
    uint32_t lo = 0xffffffffu, hi = 0, prefix = 0;
    __syncthreads();
    if (threadIdx.x == 0) { s->lo = lo; s->hi = hi; s->count = n; }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        uint32_t x = load(i);
        lo = min(lo, x);
        hi = max(hi, x);
    }
    lo = __reduce_min_sync(0xffffffffu, lo);
    hi = __reduce_max_sync(0xffffffffu, hi);
    if (threadIdx.x % WARP == 0) { atomicMin(&s->lo, lo); atomicMax(&s->hi, hi); }
    __syncthreads();
    lo = s->lo;
    for (int shift = 32 - __clz((int)(s->hi - lo)), done = 0; shift > 0 && !done;) {
        digits--;
        int bits = min(8, shift);
        shift -= bits;
        for (int i = threadIdx.x; i < 256; i += blockDim.x) s->hist[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            uint32_t x = load(i) - lo;
            if (((uint64_t)(x ^ prefix) >> (shift + bits)) == 0) atomicAdd(&s->hist[x >> shift & ((1u << bits) - 1)], 1); // counts: their order does not matter
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            int left, digit = find_digit(s->hist, k, &left);
            if (threadIdx.x == 0) { s->digit = digit; s->left = left; s->count = s->hist[digit]; }
        }
        __syncthreads();
        prefix |= (uint32_t)s->digit << shift;
        k = s->left;
        done = shift > 0 && (digits == 0 || (digits < 0 && s->count == k));
        if (done) k = INT32_MAX;
        __syncthreads();
    }
    Cut cut = {lo + prefix, k};
    return cut;
}

// A row that sees no more than k candidates takes all of them.
__device__ static void take_all(int32_t *out, int lo, int n, int k, int thread, int threads) {
    for (int j = thread; j < k; j += threads) out[j] = j < n ? lo + j : -1;
}

enum { SELECT_THREADS = 512, WINDOW_WORDS = 4096 }; // the bitmap by which a row's indices come into order: so many words of 32 candidates at a time

// Room for the candidates of a row, in dynamic shared memory.
typedef struct { uint32_t *score, *index, *bits; int n; } Candidates;
__device__ static Candidates candidates_in(char *memory, int space) {
    Candidates x = {(uint32_t *)memory, (uint32_t *)memory + space, (uint32_t *)memory + 2 * space, 0};
    return x;
}
static int candidates_bytes(int space) { return (2 * space + WINDOW_WORDS) * 4; }

// The k best of a row's candidates (x.n of them, ordered scores, at least k), ascending, to out: radix selection, then a bitmap of the n visible
// ones from lo on. By SELECT_THREADS threads. Chosen NaNs are added to *nans.
__device__ static void emit_best(Candidates x, int k, int lo, int n, int32_t *out, Radix *radix, int *warp_count, long long *nans) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, done = 0;
    Cut cut = {0, INT32_MAX};
    uint32_t tie = 0; // of those equal to the bound, the ones with ~index >= tie
    if (x.n > k) {
        cut = block_kth([=](int i) { return x.score[i]; }, x.n, k, 0, radix);
        if (cut.ties != INT32_MAX) tie = block_kth([=](int i) { return x.score[i] == cut.bound ? ~x.index[i] : 0u; }, x.n, cut.ties, 4, radix).bound;
    }
    for (int from = lo; from < lo + n; from += WINDOW_WORDS * 32) {
        int words = (min(lo + n - from, WINDOW_WORDS * 32) + 31) / 32, per = (words + SELECT_THREADS - 1) / SELECT_THREADS, mark = threadIdx.x * per, sum = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < words; i += SELECT_THREADS) x.bits[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < x.n; i += SELECT_THREADS) {
            uint32_t at = x.index[i] - (uint32_t)from;
            if (at >= (uint32_t)words * 32 || x.score[i] < cut.bound || (x.score[i] == cut.bound && ~x.index[i] < tie)) continue;
            atomicOr(&x.bits[at / 32], 1u << at % 32);
            if (x.score[i] == 0xffffffffu) atomicAdd((unsigned long long *)nans, 1ull);
        }
        __syncthreads();
        for (int i = mark; i < min(mark + per, words); i++) sum += __popc(x.bits[i]);
        int before = sum;
        for (int o = 1; o < WARP; o *= 2) {
            int y = __shfl_up_sync(0xffffffffu, before, o);
            if (lane >= o) before += y;
        }
        if (lane == WARP - 1) warp_count[warp] = before;
        before += done - sum;
        __syncthreads();
        for (int w = 0; w < SELECT_THREADS / WARP; w++) {
            if (w < warp) before += warp_count[w];
            done += warp_count[w];
        }
        for (int i = mark; i < min(mark + per, words); i++)
            for (uint32_t y = x.bits[i]; y; y &= y - 1) out[before++] = from + i * 32 + __ffs((int)y) - 1;
    }
}
// Append those of a warp's candidates (their ordered scores) that pass; *total counts all, also those for which there is no space.
__device__ static void append_candidate(Candidates x, int *total, int space, int pass, uint32_t score, int index) {
    unsigned ballot = __ballot_sync(0xffffffffu, pass);
    int lane = threadIdx.x % WARP, at = 0;
    if (lane == 0 && ballot) at = atomicAdd(total, __popc(ballot)); // the order of candidates does not matter: the set is unique
    at = __shfl_sync(0xffffffffu, at, 0) + __popc(ballot & ((1u << lane) - 1));
    if (pass && at < space) { x.score[at] = score; x.index[at] = (uint32_t)index; }
}

// Selection when load(0 .. n-1) stands in index order, by a whole block: out gets index(i) of the k largest, in order. Warps own consecutive
// stretches: one pass counts, one writes. n > k. shared [2 * 32]. Chosen NaNs are added to *nans.
template <class F, class G> __device__ static void select_in_order(F load, G index, int n, int k, int32_t *out, Radix *radix, int *shared, long long *nans) {
    Cut cut = block_kth(load, n, k, 0, radix);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, bad = 0;
    int from = (int)((int64_t)n * warp / warps), to = (int)((int64_t)n * (warp + 1) / warps), above = 0, equal = 0;
    for (int i = from + lane; i < to; i += WARP) {
        uint32_t x = load(i);
        above += x > cut.bound;
        equal += x == cut.bound;
    }
    above = __reduce_add_sync(0xffffffffu, above);
    equal = __reduce_add_sync(0xffffffffu, equal);
    if (lane == 0) { shared[warp] = above; shared[32 + warp] = equal; }
    __syncthreads();
    above = equal = 0;
    for (int v = 0; v < warp; v++) { above += shared[v]; equal += shared[32 + v]; }
    for (int i0 = from; i0 < to; i0 += WARP) {
        int i = i0 + lane;
        uint32_t x = i < to ? load(i) : 0, before = (1u << lane) - 1;
        unsigned a = __ballot_sync(0xffffffffu, i < to && x > cut.bound), e = __ballot_sync(0xffffffffu, i < to && x == cut.bound);
        int rank = equal + __popc(e & before), at = above + __popc(a & before) + min(rank, cut.ties);
        int chosen = (a >> lane & 1) || ((e >> lane & 1) && rank < cut.ties);
        if (chosen) out[at] = index(i);
        bad += __popc(__ballot_sync(0xffffffffu, chosen && x == 0xffffffffu));
        above += __popc(a);
        equal += __popc(e);
    }
    if (lane == 0 && bad) atomicAdd((unsigned long long *)nans, (unsigned long long)bad);
}

// ---- the baseline: a table of scores, then the k largest of each row
// Rows are numbered (tile, query): tile x of "per_tile" rows of one sequence; row b of the chunk stands in table [b, stride].

enum { TABLE_BINS = 4096, TABLE_SAMPLES = 2048, TABLE_LOADS = 8 };
// Ordered scores i0 + thread, one block's width apart; 0 behind the last. Loads that do not wait for each other: what a row's one block lives on.
__device__ static void load_scores(uint32_t v[TABLE_LOADS], const float *score, int i0, int n) {
    #pragma unroll
    for (int u = 0; u < TABLE_LOADS; u++) {
        int i = i0 + u * SELECT_THREADS + (int)threadIdx.x;
        v[u] = i < n ? gpu_ordered(__ldcs(score + i)) : 0;
    }
}

// One block a row. A histogram between two values of a sample finds a bound just below the k-th best, so that the row is read twice: once
// counted, once collected. Where too many lie at the bound, the row is selected digit by digit instead. Dynamic shared memory: candidates_bytes(space).
__global__ __launch_bounds__(SELECT_THREADS) static void table_select_kernel(Core c, int32_t *sel, const float *table, int64_t stride, int first_tile, int per_tile, int tiles_per_seq,
                                                                            int space, long long *nans) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Radix radix;
    __shared__ int hist[TABLE_BINS], shared[64], total, bin;
    __shared__ uint32_t least, most;
    int tile = first_tile + (int)blockIdx.x / per_tile, t = tile % tiles_per_seq * per_tile + (int)blockIdx.x % per_tile, lo, n, k = c.k, lane = threadIdx.x % WARP;
    if (t >= c.T) return;
    int64_t row = (int64_t)(tile / tiles_per_seq) * c.T + t;
    int32_t *out = sel + row * k;
    gpu_visible(c, (int)row, &lo, &n);
    const float *score = table + blockIdx.x * stride + lo;
    if (n <= k) {
        take_all(out, lo, n, k, threadIdx.x, SELECT_THREADS);
        return;
    }
    if (threadIdx.x == 0) { least = 0xffffffffu; most = 0; total = 0; }
    for (int i = threadIdx.x; i < TABLE_BINS; i += SELECT_THREADS) hist[i] = 0;
    __syncthreads();
    uint32_t x = 0xffffffffu, y = 0;
    int samples = min(n, TABLE_SAMPLES);
    for (int j = threadIdx.x; j < samples; j += SELECT_THREADS) {
        uint32_t v = gpu_ordered(score[(int64_t)j * n / samples]);
        x = min(x, v);
        y = max(y, v);
    }
    y = __reduce_max_sync(0xffffffffu, y);
    x = n / 256 > k ? y : __reduce_min_sync(0xffffffffu, x); // few are wanted: the least of 16 largest of 128 lies below them all
    if (lane == 0) { atomicMin(&least, x); atomicMax(&most, y); }
    __syncthreads();
    uint32_t base = least;
    int shift = max(0, 20 - __clz((int)(most - base))); // TABLE_BINS = 2^12 bins from base on; the last one takes all above
    for (int i0 = 0; i0 < n; i0 += TABLE_LOADS * SELECT_THREADS) {
        uint32_t v[TABLE_LOADS];
        load_scores(v, score, i0, n);
        #pragma unroll
        for (int u = 0; u < TABLE_LOADS; u++)
            if (v[u] >= base && v[u]) atomicAdd(&hist[min((v[u] - base) >> shift, TABLE_BINS - 1u)], 1);
    }
    __syncthreads();
    if (threadIdx.x < WARP) { // the bin of the k-th, from the top, 32 bins at a time
        unsigned there = 0;
        int above = 0, from = TABLE_BINS;
        while (from > 0 && !there) {
            from -= WARP;
            int sum = hist[from + WARP - 1 - lane];
            for (int o = 1; o < WARP; o *= 2) {
                int v = __shfl_up_sync(0xffffffffu, sum, o);
                if (lane >= o) sum += v;
            }
            there = __ballot_sync(0xffffffffu, above + sum >= k);
            above += __shfl_sync(0xffffffffu, sum, WARP - 1);
        }
        if (lane == 0) bin = there ? from + WARP - __ffs((int)there) : -1;
    }
    __syncthreads();
    Candidates candidates = candidates_in(memory, space);
    if (bin >= 0) {
        uint32_t bound = base + ((uint32_t)bin << shift);
        for (int i0 = 0; i0 < n; i0 += TABLE_LOADS * SELECT_THREADS) {
            uint32_t v[TABLE_LOADS];
            load_scores(v, score, i0, n);
            #pragma unroll
            for (int u = 0; u < TABLE_LOADS; u++) append_candidate(candidates, &total, space, v[u] >= bound && v[u], v[u], lo + i0 + u * SELECT_THREADS + (int)threadIdx.x);
        }
    }
    __syncthreads();
    candidates.n = total;
    if (bin >= 0 && total <= space) emit_best(candidates, k, lo, n, out, &radix, shared, nans);
    else select_in_order([=](int i) { return gpu_ordered(score[i]); }, [=](int i) { return lo + i; }, n, k, out, &radix, shared, nans);
}

// Scores of rows first .. first + gridDim.y of the batch to table [row, n_cand], one thread a candidate; the arithmetic is that of hytopk_kernel.
__global__ static void table_kernel(Core c, float *table, int first) {
    int row = first + (int)blockIdx.y, s = (int)(blockIdx.x * blockDim.x + threadIdx.x), lo, n;
    gpu_visible(c, row, &lo, &n);
    if (n <= c.k || s < lo || s >= lo + n) return;
    const floatX *key = index_key(c, row, s);
    float score = 0;
    for (int h = 0; h < c.HI; h++) {
        const floatX *q = c.q_index + ((int64_t)row * c.HI + h) * c.DI;
        float dot = 0;
        for (int d = 0; d < c.DI; d++) dot = fmaf((float)q[d], (float)key[d], dot);
        float part = c.w_index[(int64_t)row * c.HI + h] * (dot < 0 ? 0 : dot); // a NaN stays NaN
        score = h == 0 ? part : score + part;
    }
    table[(int64_t)blockIdx.y * c.n_cand + s] = score;
}

// ---- HyTopK with tensor cores (bf16)
// As above, but the scores of 256 candidates are matrix products, and each query's buffer belongs to one warp. Candidates
// are numbered over all sequences. The columns (query, head) are ordered so that a thread finds all heads of its queries
// in its own accumulators and the sum over heads needs no shuffle.
#ifndef PRECISION_FP32

enum { CHUNK_KEYS = 256, SCORE_PITCH = CHUNK_KEYS + 8, STREAM_WARPS = BLOCK / WARP };

// Column p of a group of four queries: lane l of a product holds columns 8j + 2(l%4) + {0,1}, heads 2(j mod H/2) + {0,1} of
// query 4 floor(j / (H/2)) + l%4. H even.
__device__ static int column_query(int p, int H) { return p / 8 / (H / 2) * 4 + p % 8 / 2; }
__device__ static int column_head(int p, int H) { return p / 8 % (H / 2) * 2 + p % 2; }

// The rows that a block serves, in shared memory; -1: none. A row sees keys lo .. hi, all of them keys from .. to.
typedef struct { int row[8], lo[8], hi[8], from, to; } Group;

// Shared memory of a block that serves qb queries: candidate buffers, keys [CHUNK_KEYS, DI + PAD], columns [max(qb, 4) * heads, DI + PAD], half
// the weights, scores [max(qb, 4), SCORE_PITCH], a histogram a warp. heads: a single one gets a second of zeros.
typedef struct { floatX *key, *q; float *w, *score; int *hist; uint64_t *buffer; } StreamShared;
__host__ __device__ static size_t stream_layout(const Core &c, int qb, char *base, StreamShared *s) {
    int heads = c.HI > 2 ? c.HI : 2, nq = qb > 4 ? qb : 4;
    size_t at = 0, sizes[6] = {(size_t)qb * (size_t)(2 * c.k + CHUNK_KEYS) * 8, (size_t)CHUNK_KEYS * (size_t)(c.DI + PAD) * 2, (size_t)(nq * heads) * (size_t)(c.DI + PAD) * 2,
                               (size_t)(nq * heads) * 4, (size_t)nq * SCORE_PITCH * 4, (size_t)STREAM_WARPS * 1024};
    char *p[6];
    for (int i = 0; i < 6; i++) { p[i] = base + at; at += (sizes[i] + 15) / 16 * 16; }
    if (s) { s->buffer = (uint64_t *)p[0]; s->key = (floatX *)p[1]; s->q = (floatX *)p[2]; s->w = (float *)p[3]; s->score = (float *)p[4]; s->hist = (int *)p[5]; }
    return at;
}

__device__ static void stage_keys(const Core &c, int s0, floatX *to) {
    int words = c.DI / 8, last = c.N / c.T * c.n_cand;
    for (int x = threadIdx.x; x < CHUNK_KEYS * words; x += BLOCK) {
        int i = x / words, d = x % words * 8, take = s0 + i < last;
        copy_16(smem_address(to + i * (c.DI + PAD) + d), c.k_index + (int64_t)(take ? s0 + i : 0) * c.DI + d, take);
    }
    copies_issued();
}

// scores[query, key] of a chunk: a warp has 32 keys (two tiles of 16 rows, in registers) and walks all columns, 8 at a time.
// relu as x + |x| with half weights: a NaN stays one (and an infinite product becomes one).
template <int D> __device__ static void score_chunk(const StreamShared &s, int H, int nq) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t a[2][D / 16][4], b[4];
    for (int m = 0; m < 2; m++)
        for (int d = 0; d < D / 16; d++) ldmatrix(a[m][d], smem_address(s.key + (warp * 32 + m * 16 + lane % 16) * (D + PAD) + d * 16 + lane / 16 * 8));
    for (int g = 0; g < nq / 4; g++) {
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        int query = g * 4 + lane % 4;
        for (int j = 0; j < H / 2; j++) {
            float x[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
            for (int d = 0; d < D / 32; d++) {
                ldmatrix(b, smem_address(s.q + ((g * (H / 2) + j) * 8 + lane % 8) * (D + PAD) + d * 32 + lane / 8 * 8));
                for (int m = 0; m < 2; m++) {
                    mma(x[m], a[m][2 * d], b);
                    mma(x[m], a[m][2 * d + 1], b + 2);
                }
            }
            float2 w = *(const float2 *)(s.w + query * H + 2 * j);
            for (int i = 0; i < 4; i++) {
                float e = x[i / 2][i % 2 * 2], o = x[i / 2][i % 2 * 2 + 1];
                even[i] = fmaf(e + fabsf(e), w.x, even[i]);
                odd[i] = fmaf(o + fabsf(o), w.y, odd[i]);
            }
        }
        for (int i = 0; i < 4; i++) s.score[query * SCORE_PITCH + warp * 32 + i * 8 + lane / 4] = even[i] + odd[i];
    }
}

// Bound such that exactly k of the n distinct keys are at or above it, by one warp. hist [256].
__device__ static uint64_t warp_kth(const uint64_t *key, int n, int k, int *hist) {
    uint64_t prefix = 0, mask = 0;
    int lane = threadIdx.x % WARP, left;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = lane; i < 256; i += WARP) hist[i] = 0;
        __syncwarp();
        for (int i = lane; i < n; i += WARP)
            if ((key[i] & mask) == prefix) atomicAdd(&hist[key[i] >> shift & 255], 1);
        __syncwarp();
        int digit = find_digit(hist, k, &left), count = hist[digit];
        __syncwarp();
        prefix |= (uint64_t)digit << shift;
        mask |= (uint64_t)255 << shift;
        k = left;
        if (count == left) break; // all of this digit belong: its smallest possible key bounds them
    }
    return prefix;
}
// Keep those at or above bound, in order, in place, by one warp. Returns their number.
__device__ static int warp_keep(uint64_t *key, int n, uint64_t bound) {
    int lane = threadIdx.x % WARP, kept = 0;
    for (int i0 = 0; i0 < n; i0 += WARP) {
        uint64_t x = i0 + lane < n ? key[i0 + lane] : 0;
        int pass = i0 + lane < n && x >= bound;
        unsigned ballot = __ballot_sync(0xffffffffu, pass); // also: all lanes have read before any writes
        if (pass) key[kept + __popc(ballot & ((1u << lane) - 1))] = x;
        kept += __popc(ballot);
        __syncwarp();
    }
    return kept;
}

// Rows of a list to do again, and why; RETRY_ROWS or fewer are each split over the keys between RETRY_PARTS blocks. ties: rows of another list, whose
// selection lacks only the first of many candidates that score the same.
typedef struct { int count, underflow, overflow, ties; } Retry;
enum { RETRY_ROWS = 64, RETRY_PARTS = 16 };

// By a whole block, barriers included: the group of the rows row_of(0 .. qb-1), -1 for none.
template <class F> __device__ static void set_group(Group *g, const Core &c, int qb, F row_of) {
    __syncthreads();
    if (threadIdx.x == 0) {
        g->from = INT32_MAX;
        g->to = 0;
        for (int j = 0; j < qb; j++) {
            int row = row_of(j), lo = 0, n = 0;
            if (row >= 0) gpu_visible(c, row, &lo, &n);
            g->row[j] = row;
            g->lo[j] = g->hi[j] = 0;
            if (n <= c.k) continue; // takes all: nothing to score
            g->lo[j] = row / c.T * c.n_cand + lo;
            g->hi[j] = g->lo[j] + n;
            g->from = min(g->from, g->lo[j]);
            g->to = max(g->to, g->hi[j]);
        }
    }
    __syncthreads();
}
// The group's queries and half weights to shared memory, zeros where there is no row or head.
__device__ static void stage_queries(const Core &c, const Group &g, int qb, StreamShared s) {
    int heads = max(c.HI, 2), nq = max(qb, 4), words = c.DI / 8;
    for (int x = threadIdx.x; x < nq * heads * words; x += BLOCK) {
        int p = x / words, d = x % words * 8, j = column_query(p, heads), h = column_head(p, heads);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (j < qb && h < c.HI && g.row[j] >= 0) v = *(const uint4 *)(c.q_index + ((int64_t)g.row[j] * c.HI + h) * c.DI + d);
        *(uint4 *)(s.q + p * (c.DI + PAD) + d) = v;
    }
    for (int x = threadIdx.x; x < nq * heads; x += BLOCK) {
        int j = x / heads, h = x % heads;
        s.w[x] = j < qb && h < c.HI && g.row[j] >= 0 ? 0.5f * c.w_index[(int64_t)g.row[j] * c.HI + h] : 0;
    }
}

// qb (8, 4, 2 or 1) rows a block; warp j keeps the buffer of query j: it appends what is above tau in index order and cuts a full buffer to its k
// largest. Rows first .. first + n_rows (list NULL; the last ones, which see most, first), or list[0 .. retry->count). The parts of a split row
// leave their k best in partial [row of the list, part, k] and their number in partial_n, for merge_kernel.
template <int D> __global__ static void __launch_bounds__(BLOCK) stream_kernel(Core c, int32_t *sel, int qb, int first, int n_rows, const int *list, const Retry *retry,
                                                                              uint64_t *partial, int *partial_n, long long *nans) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Group g;
    StreamShared s;
    stream_layout(c, qb, memory, &s);
    int heads = max(c.HI, 2), nq = max(qb, 4), capacity = 2 * c.k + CHUNK_KEYS, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int total = list ? retry->count : n_rows, groups = (total + qb - 1) / qb, parts = list && total <= RETRY_ROWS ? RETRY_PARTS : 1;
    uint64_t *key = s.buffer + (warp < qb ? warp : 0) * capacity;
    for (int item = blockIdx.x; item < groups * parts; item += gridDim.x) {
        int at = (groups - 1 - item / parts) * qb, part = item % parts;
        set_group(&g, c, qb, [=](int j) { return at + j >= total ? -1 : list ? list[at + j] : first + at + j; });
        int row = warp < qb ? g.row[warp] : -1, lo = warp < qb ? g.lo[warp] : 0, hi = warp < qb ? g.hi[warp] : 0, from = g.from, to = g.to, n = 0;
        uint64_t tau = 0;
        if (parts > 1) { // this part's share, in whole chunks
            int chunks = (to - from + CHUNK_KEYS - 1) / CHUNK_KEYS;
            to = min(to, from + (int)((int64_t)chunks * (part + 1) / parts) * CHUNK_KEYS);
            from += (int)((int64_t)chunks * part / parts) * CHUNK_KEYS;
        }
        if (from < to) {
            stage_keys(c, from, s.key);
            stage_queries(c, g, qb, s);
        }
        for (int s0 = from; s0 < to; s0 += CHUNK_KEYS) {
            copies_done();
            __syncthreads();
            score_chunk<D>(s, heads, nq);
            __syncthreads();
            if (s0 + CHUNK_KEYS < to) stage_keys(c, s0 + CHUNK_KEYS, s.key);
            if (warp >= qb || s0 >= hi || s0 + CHUNK_KEYS <= lo) continue;
            if (n + CHUNK_KEYS > capacity) {
                tau = warp_kth(key, n, c.k, s.hist + warp * 256);
                n = warp_keep(key, n, tau);
            }
            for (int i = lane; i < CHUNK_KEYS; i += WARP) {
                uint64_t x = s0 + i >= lo && s0 + i < min(hi, to) ? gpu_order_key(s.score[warp * SCORE_PITCH + i], s0 + i) : 0;
                unsigned ballot = __ballot_sync(0xffffffffu, x > tau);
                if (x > tau) key[n + __popc(ballot & ((1u << lane) - 1))] = x;
                n += __popc(ballot);
            }
            __syncwarp();
        }
        if (row < 0) continue;
        int32_t *out = sel + (int64_t)row * c.k;
        if (hi == lo) { // never in a list
            int begin, seen;
            gpu_visible(c, row, &begin, &seen);
            take_all(out, begin, seen, c.k, lane, WARP);
            continue;
        }
        if (n > c.k) n = warp_keep(key, n, warp_kth(key, n, c.k, s.hist + warp * 256));
        if (parts > 1) {
            int64_t place = (int64_t)(at + warp) * parts + part;
            for (int j = lane; j < n; j += WARP) partial[place * c.k + j] = key[j];
            if (lane == 0) partial_n[place] = n;
            continue;
        }
        int base = row / c.T * c.n_cand;
        for (int j = lane; j < c.k; j += WARP) {
            out[j] = (int32_t)~(uint32_t)key[j] - base;
            if (key[j] >> 32 == 0xffffffffu) atomicAdd((unsigned long long *)nans, 1ull);
        }
    }
}

// The k best of the parts of one row: parts follow each other in index order, and so do the keys of each.
__global__ static void merge_kernel(Core c, int32_t *sel, const int *list, const Retry *retry, const uint64_t *partial, const int *partial_n, long long *nans) {
    __shared__ Radix radix;
    __shared__ int shared[64];
    if (retry->count > RETRY_ROWS || (int)blockIdx.x >= retry->count) return;
    int row = list[blockIdx.x], base = row / c.T * c.n_cand, k = c.k;
    const uint64_t *key = partial + (int64_t)blockIdx.x * RETRY_PARTS * k;
    const int *n = partial_n + blockIdx.x * RETRY_PARTS;
    select_in_order([=](int i) { return i % k < n[i / k] ? (uint32_t)(key[i] >> 32) : 0u; }, [=](int i) { return (int32_t)~(uint32_t)key[i] - base; },
                    RETRY_PARTS * k, k, sel + (int64_t)row * k, &radix, shared, nans);
}

// Rows whose k-th best is one of many equal scores (a relu's zeros): all that are better stand in sel already, "have" of them. The first
// k - have candidates with this value, in index order, complete the set: a short way from the start, mostly. qb rows a block, a warp each. Rows that have not
// enough of them go to the list of those to do again.
typedef struct { int row, have; float value; } Tie;
template <int D> __global__ static void __launch_bounds__(BLOCK) tie_kernel(Core c, int32_t *sel, int qb, const Tie *ties, Retry *retry, int *retry_rows) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Group g;
    StreamShared s;
    stream_layout(c, qb, memory, &s);
    int heads = max(c.HI, 2), nq = max(qb, 4), total = retry->ties, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int at = blockIdx.x * qb; at < total; at += gridDim.x * qb) {
        set_group(&g, c, qb, [=](int j) { return at + j < total ? ties[at + j].row : -1; });
        int mine = warp < qb && at + warp < total, row = mine ? g.row[warp] : 0, lo = mine ? g.lo[warp] : 0, hi = mine ? g.hi[warp] : 0, have = mine ? ties[at + warp].have : c.k;
        int need = c.k - have, n = 0, base = row / c.T * c.n_cand;
        uint32_t value = mine ? gpu_ordered(ties[at + warp].value) : 0;
        int32_t *found = (int32_t *)(s.buffer + (mine ? warp : 0) * (2 * c.k + CHUNK_KEYS)), *better = found + c.k, *out = sel + (int64_t)row * c.k;
        stage_keys(c, g.from, s.key);
        stage_queries(c, g, qb, s);
        for (int s0 = g.from, done = 0; s0 < g.to && !done; s0 += CHUNK_KEYS) {
            copies_done();
            __syncthreads();
            score_chunk<D>(s, heads, nq);
            __syncthreads();
            if (s0 + CHUNK_KEYS < g.to) stage_keys(c, s0 + CHUNK_KEYS, s.key);
            for (int i = lane; i < CHUNK_KEYS && n < need; i += WARP) {
                int pass = s0 + i >= lo && s0 + i < hi && gpu_ordered(s.score[warp * SCORE_PITCH + i]) == value;
                unsigned ballot = __ballot_sync(0xffffffffu, pass);
                int place = n + __popc(ballot & ((1u << lane) - 1));
                if (pass && place < need) found[place] = s0 + i - base;
                n = min(need, n + __popc(ballot));
            }
            done = __syncthreads_and(n == need);
        }
        copies_done();
        if (!mine) continue;
        if (n < need) {
            if (lane == 0) {
                retry_rows[atomicAdd(&retry->count, 1)] = row;
                atomicAdd(&retry->underflow, 1);
            }
            continue;
        }
        for (int i = lane; i < have; i += WARP) better[i] = out[i];
        __syncwarp();
        for (int i = lane; i < c.k; i += WARP) { // merge two ascending lists: a number's place is its own plus how many of the other's are smaller
            int x = i < have ? better[i] : found[i - have], a = 0, b = i < have ? need : have;
            const int32_t *other = i < have ? found : better;
            while (a < b) {
                int mid = (a + b) / 2;
                if (other[mid] < x) a = mid + 1;
                else b = mid;
            }
            out[a + (i < have ? i : i - have)] = x;
        }
    }
}

// Whether the kernel has the sizes: a block's shared memory holds at least one query's buffer.
static int stream_fits(const Core &c) {
    return !c.control && (c.DI == 32 || c.DI == 64 || c.DI == 128) && (c.HI == 1 || c.HI % 2 == 0) && stream_layout(c, 1, NULL, NULL) <= 226 * 1024;
}
// As many queries a block as leave room for two blocks, else as many as fit at all.
static int stream_queries(const Core &c) {
    int qb = 8;
    while (qb > 1 && stream_layout(c, qb, NULL, NULL) > 112 * 1024) qb /= 2;
    if (stream_layout(c, qb, NULL, NULL) > 112 * 1024)
        for (qb = 8; stream_layout(c, qb, NULL, NULL) > 226 * 1024;) qb /= 2;
    return qb;
}
// Rows first .. first + n_rows, or those of a list on the device (with room for the parts). For sizes that stream_fits() takes.
static void stream_select(const Core &c, int32_t *sel, int first, int n_rows, const int *list, const Retry *retry, uint64_t *partial, int *partial_n) {
    void (*kernel)(Core, int32_t *, int, int, int, const int *, const Retry *, uint64_t *, int *, long long *) = c.DI == 32 ? stream_kernel<32> : c.DI == 64 ? stream_kernel<64> : stream_kernel<128>;
    int qb = stream_queries(c);
    size_t bytes = stream_layout(c, qb, NULL, NULL);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<list ? 2 * G_.multiprocessors : blocks_for(n_rows, qb), BLOCK, bytes, stream>>>(c, sel, qb, first, n_rows, list, retry, partial, partial_n, &G_.sums->nans);
}

// ---- HyTopK at the speed of the product (bf16, wgmma and TMA: sm_90a)
// A tile is 256 columns = 256 / HI queries times HI heads, permuted as above and kept in shared memory; the keys stream by, 128 a block, brought
// by TMA, 64 for each of two warpgroups: D[64 keys, 256 columns] = K Q^T, in two halves: while a thread works on the one half's result, its own
// product of the other half runs, and so do the other warpgroup's. A thread gets the scores of 64 / HI queries for keys g and g + 8; its head
// weights and thresholds stay in registers. If either score of such a pair passes its query's threshold, the pair is appended, as one record
// (score, score, key, -), to the list that belongs to this thread and query: 64 lists a row. No vote, no branch, no mask: all behind the compare
// is predicated, so the cost does not depend on how many pass. What a row may not see, and the half of a pair that did not pass, is dropped by
// select_lists_kernel. The thresholds are guesses, from the scores of a sample of the keys. A list that is full keeps overwriting its last record;
// such rows, and those of which fewer than k passed, go to a list and are done again by stream_kernel: a buffer is a cache, never a bound on
// correctness. dev/cuda/hytopk.cu shows how one gets there, with what each step costs.

enum { SCAN_THREADS = 384, SCAN_KEYS = 128, SCAN_COLUMNS = 256, LISTS = 64, K_PANEL = SCAN_KEYS * 128, Q_PANEL = SCAN_COLUMNS * 128 };

// One launch over "tiles" tiles. An item is a part of a tile's keys.
typedef struct {
    const float *w, *tau;                // (B*T, HI); (tiles, 4, 64 / HI): of query 4j + c at [c][j]
    const int2 *plan;                    // (tiles, parts): first key (in its sequence), blocks of keys, a multiple of unroll_of(D)
    int first_tile, tiles, parts, tiles_per_seq, T, n_keys;
    float *table;                        // TABLE: scores (tiles * 256 / HI, stride)
    int64_t stride;
    uint4 *lists;                        // (tiles, cap, 256 / HI, LISTS) (score, score of key + 8, key, unused)
    int *counts, cap;                    // (tiles, 256 / HI, LISTS); cap - 1 is full
} Scan;

// D = 32 stands in panels for 64 channels, the other half filled with zeros by TMA and never multiplied.
__host__ __device__ static constexpr int panels_of(int D) { return D > 64 ? D / 64 : 1; }
__host__ __device__ static constexpr int stages_of(int D) { return D > 64 ? 4 : 8; }
__host__ __device__ static constexpr int unroll_of(int D) { return D > 64 ? 2 : 4; } // blocks of keys come in multiples of it
static size_t scan_shared_bytes(int D) { return 1024 + (size_t)panels_of(D) * (Q_PANEL + (size_t)stages_of(D) * K_PANEL) + 8 * (2 * (size_t)stages_of(D) + 2); }

// The i-th item of a block: longest tiles first, and every other round in reverse, so that all blocks get the same length. -1: none in this round.
__device__ static int scan_item(int i, int items) {
    int from_end = i * (int)gridDim.x + (int)(i % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return from_end < items ? items - 1 - from_end : -1;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static void barrier_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ static void barrier_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ static void barrier_wait(uint32_t b, int phase) {
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT_%=;\n}" ::"r"(b), "r"(phase) : "memory");
}
__device__ static void barrier_expect(uint32_t b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ static void tma_load(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
// Rows of 128 bytes, 128-byte swizzle: groups of 8 rows are 1024 bytes apart. Descriptors differ in the address alone, in units of 16 bytes.
__device__ static uint64_t scan_descriptor(uint32_t at16) { return (uint64_t)(at16 | 1u << 16) | 64ull << 32 | 1ull << 62; }

#define R8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
// c [64 keys, 128 columns] (+)= a[64, 16] b[128, 16]^T; c is overwritten when not accumulate.
__device__ static void wgmma_128(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                 "%64, %65, p, 1, 1, 0, 0;\n}"
                 : R8(c, 0), R8(c, 8), R8(c, 16), R8(c, 24), R8(c, 32), R8(c, 40), R8(c, 48), R8(c, 56) : "l"(a), "l"(b), "r"(accumulate));
}
// Issue D / 16 products of the keys at "keys" with the 128 columns at "columns" (shared addresses in units of 16 bytes, the same in all threads).
template <int D> __device__ static void issue_products(float (&c)[64], uint32_t keys, uint32_t columns) {
    wgmma_fence();
    #pragma unroll
    for (int d = 0; d < D / 16; d++) {
        constexpr int panel_k = K_PANEL / 16, panel_q = Q_PANEL / 16;
        wgmma_128(c, scan_descriptor(keys + (uint32_t)(d / 4 * panel_k + d % 4 * 2)), scan_descriptor(columns + (uint32_t)(d / 4 * panel_q + d % 4 * 2)), d > 0);
    }
    wgmma_commit();
}
// Wait until at most N products are in flight. They write registers behind the compiler's back: what reads c must not move above the wait.
template <int N> __device__ static void products_ready(float (&c)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    #pragma unroll
    for (int j = 0; j < 64; j++) asm volatile("" : "+f"(c[j])::"memory");
}

// What a thread keeps for a tile. w holds HI half weights for each of 64 / HI queries.
template <int H> struct Lane {
    float w[64], tau[H == 4 ? 4 : 64 / H];
    const float *tau_from;     // H = 4: the thresholds, of which 4 at a time stand in tau
    uint32_t n[64 / H], last;  // where each list ends, and the last place, in bytes
    char *out;                 // TABLE: score of its first query and key 0; else first record of its first list
    int64_t stride;
    float even[2], odd[2];     // sums under way, for keys g and g + 8
};

// One pair of scores: if not (both <= tau), append. Predicated by hand: a compiler would branch. n, last: in bytes.
template <int H, int QUERY> __device__ static void append_pair(float a, float b, float tau, int key, uint32_t &n, uint32_t last, const char *list) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 at;\n.reg .b32 unused;\n"
                 "setp.gtu.f32 p, %1, %3;\n"
                 "setp.gtu.or.f32 p, %2, %3, p;\n"
                 "cvt.u64.u32 at, %0;\n"
                 "add.u64 at, at, %5;\n"
                 "@p st.global.v4.b32 [at + %8], {%1, %2, %4, unused};\n"
                 "@p add.u32 %0, %0, %7;\n"
                 "@p min.u32 %0, %0, %6;\n}"
                 : "+r"(n) : "f"(a), "f"(b), "f"(tau), "r"(key), "l"(list), "r"(last), "n"(SCAN_COLUMNS / H * LISTS * 16), "n"(QUERY * 4 * LISTS * 16) : "memory");
}
// Four thresholds from memory (the L1 cache) when registers are short; volatile, or the compiler would keep them in registers after all.
__device__ static float4 load_thresholds(const float *p) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}

// 64 accumulators, from column pair FROM on: add their heads, and finish the queries that end here. key: that of row g of this thread's fragment.
template <int H, int TABLE, int FROM, int I> __device__ static void finish_scores(Lane<H> &t, const float (&c)[64], int key, int n_keys) {
    if constexpr (I < 16) {
        constexpr int j = FROM + I, query = j / (H / 2), head = 2 * (j % (H / 2));
        if constexpr (head == 0) t.even[0] = t.even[1] = t.odd[0] = t.odd[1] = 0;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            float e = c[4 * I + 2 * i], o = c[4 * I + 2 * i + 1];
            t.even[i] = fmaf(e + fabsf(e), t.w[2 * j], t.even[i]);
            t.odd[i] = fmaf(o + fabsf(o), t.w[2 * j + 1], t.odd[i]);
        }
        if constexpr (!TABLE && H == 4 && head == 0 && query % 4 == 0) {
            float4 v = load_thresholds(t.tau_from + query);
            t.tau[0] = v.x;
            t.tau[1] = v.y;
            t.tau[2] = v.z;
            t.tau[3] = v.w;
        }
        if constexpr (head == H - 2) {
            float a = t.even[0] + t.odd[0], b = t.even[1] + t.odd[1];
            if constexpr (TABLE) {
                float *row = (float *)t.out + query * 4 * t.stride;
                if (key < n_keys) row[key] = a;
                if (key + 8 < n_keys) row[key + 8] = b;
            } else append_pair<H, query>(a, b, t.tau[H == 4 ? query % 4 : query], key, t.n[query], t.last, t.out);
        }
        finish_scores<H, TABLE, FROM, I + 1>(t, c, key, n_keys);
    }
}

template <int H, int D, int TABLE> __device__ static void scan_consumer(const Scan &s, uint32_t keys, uint32_t columns, uint32_t full, uint32_t empty, uint32_t q_full, uint32_t q_empty) {
    constexpr int NQ = SCAN_COLUMNS / H, STAGES = stages_of(D), UNROLL = unroll_of(D), STAGE = panels_of(D) * K_PANEL / 16, HALF = SCAN_COLUMNS / 2 * 128 / 16;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); // known to be the same in a warp: descriptors stay in uniform registers
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, c4 = lane % 4, list = group * 32 + warp * 8 + lane / 4;
    int stage = 0, phase = 0, q_phase = 0, row_in_block = group * 64 + warp * 16 + lane / 4;
    keys = keys / 16 + (uint32_t)group * (64 * 128 / 16);
    columns /= 16;
    Lane<H> t;
    t.last = (uint32_t)(s.cap - 1) * (NQ * LISTS * 16);
    t.stride = s.stride;
    for (int i = 0; i * (int)gridDim.x < s.tiles * s.parts; i++) {
        int item = scan_item(i, s.tiles * s.parts), tile = item / s.parts;
        int2 plan = item < 0 ? make_int2(0, 0) : s.plan[item];
        if (plan.y == 0) continue;
        int sequence = (s.first_tile + tile) / s.tiles_per_seq, t0 = (s.first_tile + tile) % s.tiles_per_seq * NQ + c4;
        #pragma unroll
        for (int j = 0; j < 32; j++) {
            int query = j / (H / 2), head = 2 * (j % (H / 2));
            float2 w = make_float2(0, 0);
            if (t0 + 4 * query < s.T) w = *(const float2 *)(s.w + ((int64_t)sequence * s.T + t0 + 4 * query) * H + head);
            t.w[2 * j] = 0.5f * w.x;
            t.w[2 * j + 1] = 0.5f * w.y;
        }
        #pragma unroll
        for (int q = 0; q < 64 / H; q++) {
            if (H > 4) t.tau[q] = TABLE ? 0 : s.tau[(int64_t)tile * NQ + c4 * (64 / H) + q];
            t.n[q] = 0;
        }
        t.tau_from = s.tau + (int64_t)tile * NQ + c4 * (64 / H);
        if (TABLE) t.out = (char *)(s.table + ((int64_t)tile * NQ + c4) * s.stride);
        else t.out = (char *)(s.lists + ((int64_t)tile * s.cap * NQ + c4) * LISTS + list);
        int key = plan.x + row_in_block;
        barrier_wait(q_full, q_phase);
        q_phase ^= 1;
        float a[64], b[64];
        #pragma unroll 1
        for (int block = 0; block < plan.y; block += UNROLL) {
            barrier_wait(full + 8 * stage, phase);
            issue_products<D>(a, keys + stage * STAGE, columns);
            #pragma unroll
            for (int u = 0; u < UNROLL; u++, key += SCAN_KEYS) {
                issue_products<D>(b, keys + stage * STAGE, columns + HALF);
                products_ready<1>(a);
                finish_scores<H, TABLE, 0, 0>(t, a, key, s.n_keys);
                int done = stage;
                if (++stage == STAGES) { stage = 0; phase ^= 1; }
                if (u + 1 < UNROLL) {
                    barrier_wait(full + 8 * stage, phase);
                    issue_products<D>(a, keys + stage * STAGE, columns);
                    products_ready<1>(b);
                } else products_ready<0>(b);
                if (lane == 0) barrier_arrive(empty + 8 * done);
                finish_scores<H, TABLE, 16, 0>(t, b, key, s.n_keys);
            }
        }
        if (lane == 0) barrier_arrive(q_empty);
        if (!TABLE)
            for (int q = 0; q < 64 / H; q++) s.counts[((int64_t)tile * NQ + 4 * q + c4) * LISTS + list] = (int)(t.n[q] / (NQ * LISTS * 16));
    }
}
#endif

template <int H, int D, int TABLE> __global__ static void __launch_bounds__(SCAN_THREADS, 1)
scan_kernel(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_q, const __grid_constant__ Scan s) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int STAGES = stages_of(D), PANELS = panels_of(D);
    extern __shared__ __align__(16) char memory[];
    uint32_t columns = (smem_address(memory) + 1023) / 1024 * 1024, keys = columns + PANELS * Q_PANEL;
    uint32_t full = keys + STAGES * PANELS * K_PANEL, empty = full + 8 * STAGES, q_full = empty + 8 * STAGES, q_empty = q_full + 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8); // one arrival a warp
        }
        barrier_init(q_full, 1);
        barrier_init(q_empty, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 256) { // the producer: one thread
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 256) return;
        int stage = 0, phase = 1, q_phase = 1; // a fresh barrier counts as having completed phase 1
        for (int i = 0; i * (int)gridDim.x < s.tiles * s.parts; i++) {
            int item = scan_item(i, s.tiles * s.parts), tile = item / s.parts;
            int2 plan = item < 0 ? make_int2(0, 0) : s.plan[item];
            if (plan.y == 0) continue;
            int y = (s.first_tile + tile) / s.tiles_per_seq * s.n_keys + plan.x;
            barrier_wait(q_empty, q_phase);
            q_phase ^= 1;
            barrier_expect(q_full, PANELS * Q_PANEL);
            for (int p = 0; p < PANELS; p++) tma_load(columns + p * Q_PANEL, &map_q, q_full, p * 64, tile * SCAN_COLUMNS);
            for (int b = 0; b < plan.y; b++) {
                barrier_wait(empty + 8 * stage, phase);
                barrier_expect(full + 8 * stage, PANELS * K_PANEL);
                for (int p = 0; p < PANELS; p++) tma_load(keys + (stage * PANELS + p) * K_PANEL, &map_k, full + 8 * stage, p * 64, y + b * SCAN_KEYS);
                if (++stage == STAGES) { stage = 0; phase ^= 1; }
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    scan_consumer<H, D, TABLE>(s, keys, columns, full, empty, q_full, q_empty);
#endif
}

// Sample j of the keys: one of every "stride", at a place that a hash jitters, so that no period of the data can hide from it.
__device__ static int sample_position(int j, int stride) { return j * stride + (int)(gpu_rng_mix((uint64_t)j) % (uint64_t)stride); }
// Samples among the candidates [lo, lo + n): first and number.
__device__ static int2 sample_range(int lo, int n, int stride, int n_sample) {
    int a = lo / stride, b = (lo + n) / stride;
    a += sample_position(a, stride) < lo;
    b += sample_position(b, stride) < lo + n;
    a = min(a, n_sample);
    b = min(b, n_sample);
    return make_int2(a, max(0, b - a));
}
// The sample's score of this rank is the guess. q of the k best are expected among m of n; four standard deviations more and the guess is too
// high for one row in 10,000, whatever the scores' distribution.
__host__ __device__ static int sample_rank(int k, int m, int n) {
    float q = (float)k * (float)m / (float)n;
    return (int)ceilf(q + 4 * sqrtf(q));
}
// Where a tile keeps the threshold of its query q: see Scan.
__device__ static int64_t tau_at(int64_t tile, int q, int NQ) { return tile * NQ + q % 4 * (NQ / 4) + q / 4; }

// How a layer's selection is cut up, and what it works with, carved from G_.select.
typedef struct {
    int NQ, tiles_per_seq, tiles, chunk; // queries a tile; tiles in all and at once
    int stride, n_sample, cap, space;    // one key of "stride" is a sample; records a list; candidates of a row in select_lists_kernel
    int parts;                           // --topk table: parts of a tile's keys, so that few tiles still fill the card
    floatX *q, *sample;                  // (chunk, SCAN_COLUMNS, DI), (B, n_sample, DI)
    uint4 *lists;                        // see Scan; before, the sample's score table (chunk * NQ, n_sample); --topk table: (chunk * NQ, n_cand)
    int *counts, *retry_rows, *partial_n;
    float *tau, *tie;                    // (chunk, NQ) thresholds; (chunk * NQ) the value at which many tie, or NaN
    int2 *plan, *plan_sample;
    Retry *retry;
    Tie *ties;
    uint64_t *partial;
} Select;

// One warp a tile: the range of keys that its scored rows see, the same among the samples, and thresholds: NaN (all pass, until a guess comes),
// or infinity for rows that are not scored.
__global__ static void plan_kernel(Core c, Select x, int first_tile, int tiles) {
    int tile = (int)(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP), lane = threadIdx.x % WARP;
    int lo = INT32_MAX, hi = 0, first = INT32_MAX, last = 0;
    if (tile >= tiles) return;
    for (int q = lane; q < x.NQ; q += WARP) {
        int t = (first_tile + tile) % x.tiles_per_seq * x.NQ + q, begin, n = 0;
        if (t < c.T) gpu_visible(c, (first_tile + tile) / x.tiles_per_seq * c.T + t, &begin, &n);
        x.tau[tau_at(tile, q, x.NQ)] = n > c.k ? NAN : INFINITY;
        x.tie[tile * x.NQ + q] = NAN;
        if (n <= c.k) continue;
        lo = min(lo, begin);
        hi = max(hi, begin + n);
        int2 m = sample_range(begin, n, x.stride, x.n_sample);
        if (m.y == 0 || sample_rank(c.k, m.y, n) > m.y) continue;
        first = min(first, m.x);
        last = max(last, m.x + m.y);
    }
    lo = __reduce_min_sync(0xffffffffu, lo);
    hi = __reduce_max_sync(0xffffffffu, hi);
    first = __reduce_min_sync(0xffffffffu, first);
    last = __reduce_max_sync(0xffffffffu, last);
    int unroll = unroll_of(c.DI), step = SCAN_KEYS * unroll, steps = hi > lo ? (hi - lo + step - 1) / step : 0;
    for (int p = lane; p < x.parts; p += WARP) {
        int a = (int)((int64_t)steps * p / x.parts), b = (int)((int64_t)steps * (p + 1) / x.parts);
        x.plan[tile * x.parts + p] = make_int2(lo + a * step, (b - a) * unroll);
    }
    if (lane == 0) x.plan_sample[tile] = last > first ? make_int2(first, (last - first + step - 1) / step * unroll) : make_int2(0, 0);
}

// Rows (tile, column) of DI channels from the index queries, in the order of column_query and column_head; zeros behind the end of a sequence.
__global__ static void permute_kernel(Core c, Select x, int first_tile, int tiles) {
    int words = c.DI / 8;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (int64_t)tiles * SCAN_COLUMNS * words; i += (int64_t)gridDim.x * blockDim.x) {
        int p = (int)(i / words % SCAN_COLUMNS), d = (int)(i % words) * 8, tile = first_tile + (int)(i / words / SCAN_COLUMNS);
        int t = tile % x.tiles_per_seq * x.NQ + column_query(p, c.HI);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (t < c.T) v = *(const uint4 *)(c.q_index + (((int64_t)(tile / x.tiles_per_seq) * c.T + t) * c.HI + column_head(p, c.HI)) * c.DI + d);
        *(uint4 *)(x.q + i * 8) = v;
    }
}
__global__ static void gather_sample_kernel(Core c, Select x) {
    int words = c.DI / 8;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (int64_t)(c.N / c.T) * x.n_sample * words; i += (int64_t)gridDim.x * blockDim.x) {
        int j = (int)(i / words), b = j / x.n_sample, d = (int)(i % words) * 8;
        *(uint4 *)(x.sample + i * 8) = *(const uint4 *)(c.k_index + ((int64_t)b * c.n_cand + sample_position(j % x.n_sample, x.stride)) * c.DI + d);
    }
}

// The greatest float below the score that stands behind an ordered integer. A score passes when not (score <= threshold), so a NaN always passes
// and a NaN threshold lets everything pass. Below +0 comes -FLT_MIN: the next float down is -0, which equals it.
__device__ static float just_below(uint32_t o) {
    if (o == 0xffffffffu) return INFINITY;
    if (o == 0x80000000u) return -FLT_MIN;
    if (o <= 0x007fffffu) return NAN;
    o--;
    return __uint_as_float(o >> 31 ? o & 0x7fffffffu : ~o);
}

// One block a row of the chunk: the guess, from the row's sample scores, where the lists will stand. When so many samples have the value of the
// guess that the lists would overflow, only what is better shall pass, and x.tie keeps the value. Dynamic shared memory: [n_sample].
__global__ static void guess_kernel(Core c, Select x, int first_tile) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Radix radix;
    uint32_t *score = (uint32_t *)memory;
    int tile = (int)blockIdx.x / x.NQ, q = (int)blockIdx.x % x.NQ, t = (first_tile + tile) % x.tiles_per_seq * x.NQ + q, lo, n;
    if (t >= c.T) return;
    gpu_visible(c, (first_tile + tile) / x.tiles_per_seq * c.T + t, &lo, &n);
    if (n <= c.k) return;
    int2 m = sample_range(lo, n, x.stride, x.n_sample);
    int rank = sample_rank(c.k, m.y, n);
    if (rank > m.y || m.y == 0) return;
    const float *table = (const float *)x.lists + (int64_t)blockIdx.x * x.n_sample + m.x;
    for (int i = threadIdx.x; i < m.y; i += blockDim.x) score[i] = gpu_ordered(table[i]);
    Cut cut = block_kth([=](int i) { return score[i]; }, m.y, rank, 0, &radix);
    if (threadIdx.x) return;
    int many = cut.ties != INT32_MAX && radix.count * x.stride > c.k && cut.bound != 0xffffffffu; // all digits were needed: that many are equal
    float value = __uint_as_float(cut.bound >> 31 ? cut.bound & 0x7fffffffu : ~cut.bound);
    x.tau[tau_at(tile, q, x.NQ)] = many ? value : just_below(cut.bound);
    if (many) x.tie[blockIdx.x] = value;
}

// One block a row of the chunk: its lists to shared memory, then the k best of them. If the lists do not hold the answer the row's number goes
// to the retry list instead. Dynamic shared memory: candidates_bytes(space).
__global__ __launch_bounds__(SELECT_THREADS) static void select_lists_kernel(Core c, Select x, int32_t *sel, int first_tile, long long *nans) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Radix radix;
    __shared__ int number[LISTS], total, most, warp_count[SELECT_THREADS / WARP];
    int tile = (int)blockIdx.x / x.NQ, q = (int)blockIdx.x % x.NQ, t = (first_tile + tile) % x.tiles_per_seq * x.NQ + q, warp = threadIdx.x / WARP, k = c.k, lo, n;
    if (t >= c.T) return;
    int row = (first_tile + tile) / x.tiles_per_seq * c.T + t;
    int32_t *out = sel + (int64_t)row * k;
    gpu_visible(c, row, &lo, &n);
    if (n <= k) {
        take_all(out, lo, n, k, threadIdx.x, SELECT_THREADS);
        return;
    }
    if (threadIdx.x == 0) total = most = 0;
    __syncthreads();
    if (threadIdx.x < LISTS) {
        number[threadIdx.x] = x.counts[((int64_t)tile * x.NQ + q) * LISTS + threadIdx.x];
        atomicMax(&most, number[threadIdx.x]);
    }
    __syncthreads();
    // 64 threads read the same place of all lists, 1 KB; eight places at once
    Candidates candidates = candidates_in(memory, x.space);
    float bound = x.tau[tau_at(tile, q, x.NQ)];
    int mine = number[threadIdx.x % LISTS], full = most >= x.cap - 1;
    for (int place = warp / 2; place < most && !full; place += SELECT_THREADS / LISTS) {
        uint4 record = make_uint4(0, 0, 0, 0);
        if (place < mine) record = x.lists[(((int64_t)tile * x.cap + place) * x.NQ + q) * LISTS + threadIdx.x % LISTS];
        for (int half = 0; half < 2; half++) {
            float score = __uint_as_float(half ? record.y : record.x);
            int i = (int)record.z + 8 * half;
            append_candidate(candidates, &total, x.space, place < mine && i >= lo && i < lo + n && !(score <= bound), gpu_ordered(score), i);
        }
    }
    __syncthreads();
    candidates.n = total;
    float tie = x.tie[blockIdx.x];
    int tied = !full && total < k && tie == tie;
    if (tied) { // NaNs are counted where the selection is finished
        int bad = 0;
        for (int i = threadIdx.x; i < total; i += SELECT_THREADS) bad |= candidates.score[i] == 0xffffffffu;
        tied = !__syncthreads_or(bad);
    }
    if (tied) { // what is better than the many equals; tie_kernel adds the first of these
        if (threadIdx.x == 0) {
            Tie y = {row, total, tie};
            x.ties[atomicAdd(&x.retry->ties, 1)] = y;
        }
        emit_best(candidates, total, lo, n, out, &radix, warp_count, nans);
        return;
    }
    if (full || total > x.space || total < k) {
        if (threadIdx.x == 0) {
            x.retry_rows[atomicAdd(&x.retry->count, 1)] = row;
            atomicAdd(full || total > x.space ? &x.retry->overflow : &x.retry->underflow, 1);
        }
        return;
    }
    emit_best(candidates, k, lo, n, out, &radix, warp_count, nans);
}

// Matrix (rows, D) in boxes of [box, 64 channels]; what lies outside is zero. The driver's function is asked for at run time: no -lcuda.
static CUtensorMap tensor_map(const void *p, int64_t rows, int D, int box) {
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                               CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode encode;
    CUtensorMap map;
    cuuint64_t size[2] = {(cuuint64_t)D, (cuuint64_t)rows}, pitch[1] = {(cuuint64_t)D * 2};
    cuuint32_t boxes[2] = {64, (cuuint32_t)box}, step[2] = {1, 1};
    if (!encode) {
        void *f = NULL;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
#else
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found));
#endif
        if (!f) die("the driver has no cuTensorMapEncodeTiled: expected one for CUDA 12 or later");
        encode = (Encode)f;
    }
    CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p, size, pitch, boxes, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) die("cuTensorMapEncodeTiled: status %d", (int)r);
    return map;
}

// Whether the wgmma scan has the sizes, for all rows at once.
static int scan_fits(const Core &c) {
    return G_.wgmma && stream_fits(c) && c.HI >= 4 && SCAN_COLUMNS % c.HI == 0 && c.k <= 4096;
}

// Sizes, and the parts of G_.select. Returns the bytes; everything but the lists of rows (16 bytes a row) and the sample is bounded by G_.select_most.
static size_t select_layout(const Core &c, int table, Select *x) {
    int expect, rows, most, chunks, sms = G_.multiprocessors, B = c.N / c.T;
    memset(x, 0, sizeof *x);
    x->NQ = SCAN_COLUMNS / c.HI;
    x->tiles_per_seq = (c.T + x->NQ - 1) / x->NQ;
    x->tiles = B * x->tiles_per_seq;
    x->stride = 8; // one key of 8 to 64, so that about 16 samples (64 for the largest k) are among the k best; at most 16384 samples
    while ((x->stride < 64 && x->stride * 32 <= c.k) || c.n_cand / x->stride > 16384) x->stride *= 2;
    x->n_sample = c.n_cand / x->stride;
    expect = sample_rank(c.k, 1 << 20, x->stride * (1 << 20)) * x->stride; // candidates that pass
    float mean = 1.25f * (float)expect / LISTS;
    x->cap = (int)(mean + 5 * sqrtf(mean)) + 4;
    x->space = (int)(1.75f * (float)expect) + 64;
    size_t row = table ? (size_t)max64(c.n_cand, 1) * 4 : (size_t)max64(x->cap * LISTS * (int64_t)sizeof(uint4), x->n_sample * 4ll);
    most = (int)max64(1, min64(G_.select_most / (int64_t)((size_t)x->NQ * row), x->tiles));
    chunks = (x->tiles + most - 1) / most;
    x->chunk = (x->tiles + chunks - 1) / chunks;
    if (chunks > 1 && most > sms) x->chunk = (int)min64(most / sms * sms, (x->chunk + sms - 1) / sms * sms); // whole rounds of the card
    x->parts = table ? (4 * sms + x->chunk - 1) / x->chunk : 1;
    rows = x->chunk * x->NQ;
    size_t at = 0, sizes[13] = {(size_t)rows * row, (size_t)x->chunk * SCAN_COLUMNS * (size_t)c.DI * 2, (size_t)B * (size_t)x->n_sample * (size_t)c.DI * 2, (size_t)rows * LISTS * 4, (size_t)rows * 4,
                                (size_t)x->chunk * (size_t)x->parts * sizeof(int2), (size_t)x->chunk * sizeof(int2), sizeof(Retry), (size_t)c.N * 4,
                                (size_t)RETRY_ROWS * RETRY_PARTS * (size_t)c.k * 8, (size_t)RETRY_ROWS * RETRY_PARTS * 4, (size_t)rows * 4, (size_t)c.N * sizeof(Tie)};
    char *p[13];
    for (int i = 0; i < 13; i++) { p[i] = G_.select + at; at += (sizes[i] + 127) / 128 * 128; } // TMA wants 16, lines 128
    x->lists = (uint4 *)p[0]; x->q = (floatX *)p[1]; x->sample = (floatX *)p[2]; x->counts = (int *)p[3]; x->tau = (float *)p[4]; x->plan = (int2 *)p[5];
    x->plan_sample = (int2 *)p[6]; x->retry = (Retry *)p[7]; x->retry_rows = (int *)p[8]; x->partial = (uint64_t *)p[9]; x->partial_n = (int *)p[10]; x->tie = (float *)p[11]; x->ties = (Tie *)p[12];
    return at;
}

typedef void (*ScanKernel)(const CUtensorMap, const CUtensorMap, const Scan);
template <int D> static ScanKernel scan_of(int H, int table) {
#define F(H) (table ? scan_kernel<H, D, 1> : scan_kernel<H, D, 0>)
    return H == 4 ? F(4) : H == 8 ? F(8) : H == 16 ? F(16) : H == 32 ? F(32) : F(64);
#undef F
}
// One launch of the scan over n tiles of permuted queries in x.q: to lists, or to a table of rows of "stride" floats at x.lists; over the keys, or over the samples.
static void scan(const Core &c, const Select &x, int first, int n, int over_sample, int table, int64_t stride) {
    int n_keys = over_sample ? x.n_sample : c.n_cand, parts = over_sample ? 1 : x.parts;
    if (n_keys == 0) return; // no complete pool
    Scan s = {c.w_index, x.tau, over_sample ? x.plan_sample : x.plan, first, n, parts, x.tiles_per_seq, c.T, n_keys, table ? (float *)x.lists : NULL, stride, x.lists, x.counts, x.cap};
    ScanKernel kernel = c.DI == 32 ? scan_of<32>(c.HI, table) : c.DI == 64 ? scan_of<64>(c.HI, table) : scan_of<128>(c.HI, table);
    size_t bytes = scan_shared_bytes(c.DI);
    CUtensorMap map_k = tensor_map(over_sample ? x.sample : c.k_index, (int64_t)(c.N / c.T) * n_keys, c.DI, SCAN_KEYS), map_q = tensor_map(x.q, (int64_t)x.chunk * SCAN_COLUMNS, c.DI, SCAN_COLUMNS);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<(unsigned)min64((int64_t)n * parts, G_.multiprocessors), SCAN_THREADS, bytes, stream>>>(map_k, map_q, s);
}

// Selection of all rows by the scan: HyTopK, or a table of scores in chunks and the k largest of each row.
static void scan_select(const Core &c, int32_t *sel, int table) {
    Select x;
    select_layout(c, table, &x);
    int shared = candidates_bytes(x.space), guess = x.n_sample > 0 && !table;
    CUDA_CHECK(cudaFuncSetAttribute(select_lists_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    CUDA_CHECK(cudaFuncSetAttribute(table_select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    CUDA_CHECK(cudaFuncSetAttribute(guess_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max(x.n_sample, 1) * 4));
    phase_begin(PHASE_GUESS);
    CUDA_CHECK(cudaMemsetAsync(x.retry, 0, sizeof(Retry), stream));
    if (guess) gather_sample_kernel<<<(unsigned)G_.multiprocessors, BLOCK, 0, stream>>>(c, x);
    for (int first = 0; first < x.tiles; first += x.chunk) {
        int n = (int)min64(x.chunk, x.tiles - first);
        unsigned rows = (unsigned)(n * x.NQ);
        phase_begin(PHASE_GUESS);
        plan_kernel<<<blocks_for(n, BLOCK / WARP), BLOCK, 0, stream>>>(c, x, first, n);
        permute_kernel<<<(unsigned)(16 * G_.multiprocessors), BLOCK, 0, stream>>>(c, x, first, n);
        if (table) {
            phase_begin(PHASE_SCORES);
            scan(c, x, first, n, 0, 1, c.n_cand);
            phase_begin(PHASE_TOPK);
            table_select_kernel<<<rows, SELECT_THREADS, (size_t)shared, stream>>>(c, sel, (const float *)x.lists, c.n_cand, first, x.NQ, x.tiles_per_seq, x.space, &G_.sums->nans);
            continue;
        }
        if (guess) {
            scan(c, x, first, n, 1, 1, x.n_sample);
            guess_kernel<<<rows, x.n_sample > 4096 ? 512 : 128, (size_t)x.n_sample * 4, stream>>>(c, x, first);
        }
        phase_begin(PHASE_SCORES);
        scan(c, x, first, n, 0, 0, 0);
        phase_begin(PHASE_TOPK);
        select_lists_kernel<<<rows, SELECT_THREADS, (size_t)shared, stream>>>(c, x, sel, first, &G_.sums->nans);
    }
    if (table) return;
    void (*tie)(Core, int32_t *, int, const Tie *, Retry *, int *) = c.DI == 32 ? tie_kernel<32> : c.DI == 64 ? tie_kernel<64> : tie_kernel<128>;
    int qb = stream_queries(c), bytes = (int)stream_layout(c, qb, NULL, NULL);
    CUDA_CHECK(cudaFuncSetAttribute(tie, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    tie<<<(unsigned)(2 * G_.multiprocessors), BLOCK, (size_t)bytes, stream>>>(c, sel, qb, x.ties, x.retry, x.retry_rows);
    stream_select(c, sel, 0, 0, x.retry_rows, x.retry, x.partial, x.partial_n);
    merge_kernel<<<RETRY_ROWS, SELECT_THREADS, 0, stream>>>(c, sel, x.retry_rows, x.retry, x.partial, x.partial_n, &G_.sums->nans);
}
#endif

// ---- which of them runs

enum { SELECT_SCAN, SELECT_STREAM, SELECT_PLAIN };
enum { SCAN_LEAST = 4096 }; // fewer candidates hide neither the launches nor the sample
// table: --topk table. whole: all rows at once, which the scan needs.
static int select_path(const Core &c, int table, int whole) {
#ifndef PRECISION_FP32
    if (scan_fits(c) && whole && (table || c.n_cand >= SCAN_LEAST)) return SELECT_SCAN;
    if (stream_fits(c)) return SELECT_STREAM;
#endif
    return SELECT_PLAIN;
}
static int wants_table(const Model *g) { return !strcmp(g->c.topk_method, "table") && !strcmp(g->c.selector, "indexer"); }

// Rows at a time of the plain table.
static int64_t table_rows(const Core &c) { return max64(1, min64(min64(c.N, 65535), G_.select_most / 4 / max64(1, c.n_cand))); }
static void table_select(const Core &c, int32_t *sel) {
    int space = (int)min64(4 * c.k, 6144), bytes = candidates_bytes(space);
    CUDA_CHECK(cudaFuncSetAttribute(table_select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    for (int64_t first = 0, n; first < c.N; first += n) {
        n = min64(table_rows(c), c.N - first);
        phase_begin(PHASE_SCORES);
        if (c.n_cand) table_kernel<<<dim3(blocks_for(c.n_cand, BLOCK), (unsigned)n), BLOCK, 0, stream>>>(c, (float *)G_.select, (int)first);
        phase_begin(PHASE_TOPK);
        table_select_kernel<<<(unsigned)n, SELECT_THREADS, (size_t)bytes, stream>>>(c, sel, (const float *)G_.select, c.n_cand, (int)first, 1, c.T, space, &G_.sums->nans);
    }
}

// Bytes of G_.select that a layer's selection needs when all rows are selected at once.
static int64_t select_space(const Model *g, const Layer *l) {
    Core c = core_of(g, l);
    int table = wants_table(g), path = select_path(c, table, 1);
#ifndef PRECISION_FP32
    Select x;
    if (path == SELECT_SCAN) return (int64_t)select_layout(c, table, &x);
#endif
    return path == SELECT_PLAIN && table ? table_rows(c) * c.n_cand * (int64_t)sizeof(float) : 0;
}

// *hash += one of each selected slot: equal selections have equal sums. Integers: in any order.
__global__ static void hash_kernel(unsigned long long *hash, const int32_t *sel, int64_t n) {
    unsigned long long sum = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) sum += gpu_rng_mix((uint64_t)i << 32 ^ (uint32_t)sel[i] ^ (uint64_t)i >> 32);
    for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (threadIdx.x % WARP == 0) atomicAdd(hash, sum);
}

// Fill l->sel for the rows being computed. A table takes part only when all rows are.
static void gpu_select_forward(Model *g, Layer *l) {
    Core c = core_of(g, l);
    int B = (int)g->B, r0 = (int)g->r0, n = B == 1 ? (int)g->nr : c.T; // all rows of every sequence, or the new ones of one
    int rows = B == 1 ? n : c.N, whole = rows == c.N && g == &G_.g, table = wants_table(g), path = select_path(c, table, whole);
    int before = phase_begin(PHASE_SCORES); // streaming: with the top-k
    g->index_scans += c.control == SELECT_INDEXER;
#ifndef PRECISION_FP32
    if (path == SELECT_SCAN) scan_select(c, l->sel, table);
    if (path == SELECT_STREAM) stream_select(c, l->sel, r0, rows, NULL, NULL, NULL, NULL);
#endif
    if (path == SELECT_PLAIN && table && whole) table_select(c, l->sel);
    else if (path == SELECT_PLAIN && !gpu_hytopk<8>(c, l->sel, B, r0, n) && !gpu_hytopk<4>(c, l->sel, B, r0, n) && !gpu_hytopk<2>(c, l->sel, B, r0, n) && !gpu_hytopk<1>(c, l->sel, B, r0, n))
        die("--index-topk %d with %d index heads of %d: the candidate buffer needs more shared memory than a block has", c.k, c.HI, c.DI);
    phase_begin(before);
    if (!G_.timed) return;
    CUDA_CHECK(cudaMemsetAsync(G_.hashes + c.layer, 0, sizeof *G_.hashes, stream));
    hash_kernel<<<1024, BLOCK, 0, stream>>>(G_.hashes + c.layer, l->sel, (int64_t)c.N * c.k);
}

// Stored selections: pack_row() and unpack_row() of train_cpu.c, one warp a row. Each word, and each slot, is made by one
// thread alone: nothing is added up in memory.

// First slot that is empty, or for which (candidate >> shift) + step * slot reaches the bound: these ascend.
__device__ static int first_slot(const int32_t *row, int slots, int shift, int step, int bound) {
    int lo = 0, hi = slots;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (row[mid] >= 0 && (row[mid] >> shift) + step * mid < bound) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}
__global__ static void pack_kernel(Packing p, uint32_t *packed, const int32_t *sel, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)BLOCK + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP, slots = (int)p.slots, head = (int)p.head;
    if (i >= n) return;
    const int32_t *row = sel + i * p.k;
    uint32_t *to = packed + i * p.words, mask = ((uint32_t)1 << p.low) - 1;
    for (int w = lane; w < (int)p.words; w += WARP) {
        uint32_t word = 0;
        int from = 32 * (w < head ? w : w - head), j; // first bit of this word in its part
        if (!p.ef && w < head) word = (uint32_t)first_slot(row, slots, 16, 0, w + 1);
        else if (!p.ef) {
            for (j = from / 16; j < min(from / 16 + 2, slots) && row[j] >= 0; j++) word |= ((uint32_t)row[j] & 0xffff) << j % 2 * 16;
        } else if (w < head) {
            for (j = from / p.low; j < slots && j * p.low < from + 32 && row[j] >= 0; j++) {
                int at = j * p.low - from; // negative: this word has the upper part of slot j's bits
                word |= at < 0 ? ((uint32_t)row[j] & mask) >> -at : ((uint32_t)row[j] & mask) << at;
            }
        } else {
            for (j = first_slot(row, slots, p.low, 1, from); j < slots && row[j] >= 0 && (row[j] >> p.low) + j < from + 32; j++) word |= (uint32_t)1 << ((row[j] >> p.low) + j - from);
        }
        to[w] = word;
    }
}
__global__ static void unpack_kernel(Packing p, int32_t *sel, const uint32_t *packed, int64_t n) {
    int64_t i = (blockIdx.x * (int64_t)BLOCK + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP, head = (int)p.head, words = (int)p.words, filled = 0;
    if (i >= n) return;
    int32_t *row = sel + i * p.k;
    const uint32_t *from = packed + i * p.words, *second = from + head;
    if (!p.ef) {
        filled = head ? (int)from[head - 1] : 0;
        for (int j = lane; j < filled; j += WARP) {
            int lo = 0, hi = head - 1; // the first page that ends behind slot j
            while (lo < hi) {
                int mid = (lo + hi) / 2;
                if ((int)from[mid] > j) hi = mid;
                else lo = mid + 1;
            }
            row[j] = (int32_t)((uint32_t)lo << 16 | (second[j / 2] >> j % 2 * 16 & 0xffff));
        }
    }
    for (int w0 = 0; p.ef && w0 < words - head; w0 += WARP) { // a word of the high part a thread
        uint32_t word = w0 + lane < words - head ? second[w0 + lane] : 0;
        int upto = __popc(word), count = upto;
        for (int o = 1; o < WARP; o *= 2) {
            int before = __shfl_up_sync(0xffffffffu, upto, o);
            upto += lane >= o ? before : 0;
        }
        for (int j = filled + upto - count; word; j++, word &= word - 1) {
            int at = j * p.low;
            uint32_t x = (uint32_t)(32 * (w0 + lane) + __ffs((int)word) - 1 - j) << p.low;
            if (p.low) x |= (uint32_t)((from[at / 32] | (uint64_t)from[at / 32 + 1] << 32) >> at % 32) & (((uint32_t)1 << p.low) - 1);
            row[j] = (int32_t)x;
        }
        filled += __shfl_sync(0xffffffffu, upto, WARP - 1);
    }
    for (int j = filled + lane; j < (int)p.k; j += WARP) row[j] = -1;
}

// The packed selection of a layer between buffer s and the host, in the second stream.
static void offload_copy(const Model *g, int layer, int s, cudaMemcpyKind kind) {
    Offload *x = &G_.offload;
    const Layer *l = &g->layers[layer];
    size_t bytes = (size_t)(g->N * l->packing.words) * sizeof(uint32_t);
    x->holds[s] = layer;
    x->turn = !s;
    CUDA_CHECK(cudaStreamWaitEvent(x->copies, x->used[s], 0));
    CUDA_CHECK(cudaMemcpyAsync(kind == cudaMemcpyDeviceToHost ? l->packed : x->stage[s], kind == cudaMemcpyDeviceToHost ? x->stage[s] : l->packed, bytes, kind, x->copies));
    CUDA_CHECK(cudaEventRecord(x->copied[s], x->copies));
}
// The buffer that holds a layer's packed selection, fetched when none does.
static int offload_fetch(const Model *g, int layer) {
    Offload *x = &G_.offload;
    for (int s = 0; s < 2; s++)
        if (x->holds[s] == layer) return s;
    int s = x->turn;
    offload_copy(g, layer, s, cudaMemcpyHostToDevice);
    return s;
}
// In the backward pass: fetch the next selection that layers below this one will ask for.
static void offload_ahead(const Model *g, int64_t layer) {
    while (--layer >= 0) {
        const Layer *l = &g->layers[layer];
        if (l->source < 0 || l->source == g->held || attends_to_all(g, l) || !g->layers[l->source].packed) continue;
        offload_fetch(g, l->source);
        return;
    }
}

// selection_store() and selection_restore() of train_cpu.c.
static void gpu_selection_store(Model *g, const Layer *l) {
    Offload *x = &G_.offload;
    int s = x->turn;
    g->held = (int)(l - g->layers);
    if (!l->packed) return;
    if (g->waiting) CUDA_CHECK(cudaStreamWaitEvent(stream, x->copied[s], 0));
    pack_kernel<<<blocks_for(g->N * WARP, BLOCK), BLOCK, 0, stream>>>(l->packing, g->waiting ? x->stage[s] : l->packed, l->sel, g->N);
    if (!g->waiting) return;
    CUDA_CHECK(cudaEventRecord(x->used[s], stream));
    offload_copy(g, g->held, s, cudaMemcpyDeviceToHost);
}
static void gpu_selection_restore(Model *g, const Layer *l) {
    Offload *x = &G_.offload;
    const Layer *src = &g->layers[l->source];
    if (!src->packed || g->held == l->source) return;
    g->held = l->source;
    int s = g->waiting ? offload_fetch(g, l->source) : 0;
    if (g->waiting) CUDA_CHECK(cudaStreamWaitEvent(stream, x->copied[s], 0));
    unpack_kernel<<<blocks_for(g->N * WARP, BLOCK), BLOCK, 0, stream>>>(src->packing, src->sel, g->waiting ? x->stage[s] : src->packed, g->N);
    if (!g->waiting) return;
    CUDA_CHECK(cudaEventRecord(x->used[s], stream));
    x->turn = !s;
    if (x->backward) offload_ahead(g, l - g->layers);
}

// ----------------------------------------------------------------------------
// 5. Attention
// A chunk of queries at a time; probabilities and their gradients stand in (queries, support, H). The gradient to a KV
// row is gathered by that row from the queries that chose it (inverse lists, sorted), never scattered: no atomics.

// The support of row i (see support() in train_cpu.c), as numbers: window rows from..t, then n_cand candidates.
typedef struct { int from, first, lo, n_cand, n; } Span;
__device__ static Span gpu_span(const Core &c, int i) {
    Span s;
    int visible, t = i % c.T, doc = c.doc[i];
    gpu_visible(c, i, &s.lo, &visible);
    s.from = c.v4 ? max(doc, t + 1 - c.W) : c.qsa ? doc + visible * c.r : t + 1;
    s.first = t + 1 - s.from;
    s.n_cand = c.all ? visible : min(visible, c.k);
    s.n = s.first + s.n_cand * c.unit;
    return s;
}
__device__ static int gpu_candidate(const Core &c, const Span &s, int i, int j) { return c.all ? s.lo + j : c.sel[(int64_t)i * c.k + j]; }

// place[q, j]: the KV row at place j of a query's support, within its sequence. One block a query.
__global__ static void place_kernel(Core c, int32_t *place, int i0) {
    int i = i0 + (int)blockIdx.x;
    Span s = gpu_span(c, i);
    for (int j = threadIdx.x; j < s.n; j += blockDim.x) {
        int row = s.from + j, x = j - s.first;
        if (x >= 0) {
            int e = gpu_candidate(c, s, i, x / c.unit);
            row = c.v4 ? c.T + e : c.qsa ? c.doc[i] + (e - s.lo) * c.r + x % c.unit : e;
        }
        place[(int64_t)blockIdx.x * c.support + j] = row;
    }
    for (int j = s.n + (int)threadIdx.x; j < c.support; j += blockDim.x) place[(int64_t)blockIdx.x * c.support + j] = -1;
}

enum { LANES_DOT = 8 }; // threads that share one dot product: three shuffles instead of five, four places a warp

// p[q, j, h] = scale * a[i, h] . row(j)[off + group * d ..]: logits, or the products d_oc . v. Eight threads a place.
__global__ static void support_dot_kernel(Core c, float *p, const floatX *a, int off, int d, float scale, int i0) {
    int j = (int)(blockIdx.x * (BLOCK / LANES_DOT) + threadIdx.x / LANES_DOT), i = i0 + (int)blockIdx.y, lane = threadIdx.x % LANES_DOT;
    if (blockIdx.x * (BLOCK / LANES_DOT) >= gpu_span(c, i).n) return;
    int inside = j < gpu_span(c, i).n; // all threads stay: they shuffle
    const floatX *row = kv_row(c, i, inside ? c.place[(int64_t)blockIdx.y * c.support + j] : 0) + off;
    float *out = p + ((int64_t)blockIdx.y * c.support + j) * c.H;
    int whole = d % 8 == 0 && c.R % 8 == 0 && off % 8 == 0;
    for (int h = 0; h < c.H; h++) {
        const floatX *x = a + ((int64_t)i * c.H + h) * d, *r = row + h / (c.H / c.G) * d;
        float v = 0;
        if (whole) {
            for (int k = lane * 8; k < d; k += LANES_DOT * 8) {
                float y[8], z[8];
                load<8>(y, x + k);
                load<8>(z, r + k);
                #pragma unroll
                for (int e = 0; e < 8; e++) v += y[e] * z[e];
            }
        } else for (int k = lane; k < d; k += LANES_DOT) v += (float)x[k] * (float)r[k];
        for (int o = LANES_DOT / 2; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
        if (lane == 0 && inside) out[h] = v * scale;
    }
}

// Softmax over the support in place, with the sink in the denominator; lse. One warp a (query, head).
__global__ static void softmax_kernel(Core c, float *p, float *lse, int i0, int queries) {
    int x = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP), lane = threadIdx.x % WARP;
    if (x >= queries * c.H) return;
    int i = i0 + x / c.H, h = x % c.H, n = gpu_span(c, i).n;
    float *ph = p + (int64_t)(x / c.H) * c.support * c.H + h, top = c.sinks ? c.sinks[h] : -INFINITY, sum = 0;
    for (int j = lane; j < n; j += WARP) top = fmaxf(top, ph[(int64_t)j * c.H]);
    top = warp_max(top);
    for (int j = lane; j < n; j += WARP) sum += ph[(int64_t)j * c.H] = expf(ph[(int64_t)j * c.H] - top);
    sum = warp_sum(sum);
    if (c.sinks) sum += expf(c.sinks[h] - top);
    for (int j = lane; j < n; j += WARP) ph[(int64_t)j * c.H] /= sum;
    if (lane == 0) lse[(int64_t)i * c.H + h] = n || c.sinks ? top + logf(sum) : -INFINITY;
}

// p = exp(logit - lse): the probabilities again, in backward. One block a query.
__global__ static void probs_again_kernel(Core c, float *p, const float *lse, int i0) {
    int i = i0 + (int)blockIdx.x, n = gpu_span(c, i).n * c.H;
    float *pq = p + (int64_t)blockIdx.x * c.support * c.H;
    for (int x = threadIdx.x; x < n; x += blockDim.x) pq[x] = expf(pq[x] - lse[(int64_t)i * c.H + x % c.H]);
}

// out[i, h, d] = sum over places of p[q, j, h] * row(j)[off + group * d ..]. One block a query, threads over (h, d).
__global__ static void support_sum_kernel(Core c, floatX *out, const float *p, int off, int d, int i0) {
    int i = i0 + (int)blockIdx.x, n = gpu_span(c, i).n;
    const int32_t *place = c.place + (int64_t)blockIdx.x * c.support;
    for (int x = threadIdx.x; x < c.H * d; x += blockDim.x) {
        int h = x / d;
        const float *ph = p + (int64_t)blockIdx.x * c.support * c.H + h;
        const floatX *column = kv_row(c, i, 0) + off + h / (c.H / c.G) * d + x % d;
        float v = 0;
        #pragma unroll 4
        for (int j = 0; j < n; j++) v += ph[(int64_t)j * c.H] * (float)column[(int64_t)place[j] * c.R];
        out[(int64_t)i * c.H * d + x] = (floatX)v;
    }
}

// delta[i, h] = d_oc . oc, and the sinks' gradient of row i. One warp a (row, head).
__global__ static void delta_kernel(Core c, float *delta, float *d_sink, const floatX *d_oc, const floatX *oc, const float *lse, int n) {
    int x = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    if (x >= n) return;
    float v = 0;
    for (int d = threadIdx.x % WARP; d < c.Dv; d += WARP) v += (float)d_oc[(int64_t)x * c.Dv + d] * (float)oc[(int64_t)x * c.Dv + d];
    v = warp_sum(v);
    if (threadIdx.x % WARP) return;
    delta[x] = v;
    if (c.sinks) d_sink[x] = -expf(c.sinks[x % c.H] - lse[x]) * v;
}

// ds = p (dP - delta) scale, in place of dP. One block a query.
__global__ static void ds_kernel(Core c, float *ds, const float *p, const float *delta, int i0) {
    int i = i0 + (int)blockIdx.x, n = gpu_span(c, i).n * c.H;
    int64_t at = (int64_t)blockIdx.x * c.support * c.H;
    for (int x = threadIdx.x; x < n; x += blockDim.x) ds[at + x] = p[at + x] * (ds[at + x] - delta[(int64_t)i * c.H + x % c.H]) * c.scale;
}

// The first place in list[a, b) whose query is not below x.
__device__ static int gpu_lower_bound(const int2 *list, int a, int b, int x) {
    while (a < b) {
        int mid = a + (b - a) / 2;
        if (list[mid].x < x) a = mid + 1;
        else b = mid;
    }
    return a;
}

// What query i gives to float x of a row that stands at place j of its support: ds q to the keys, p d_oc to the values.
__device__ static float row_share(const Core &c, const float *p, const float *ds, const floatX *d_oc, int q, int i, int j, int x) {
    int hg = c.H / c.G, y = x - c.v_off;
    int64_t at = ((int64_t)q * c.support + j) * c.H;
    float v = 0;
    if (x < c.G * c.Dk) {
        int h0 = x / c.Dk * hg;
        const float *s = ds + at + h0;
        const floatX *key = c.qrow + ((int64_t)i * c.H + h0) * c.Dk + x % c.Dk;
        for (int h = 0; h < hg; h++) v += s[h] * (float)key[h * c.Dk];
    }
    if (y >= 0 && y < c.G * c.Dv) {
        int h0 = y / c.Dv * hg;
        const float *s = p + at + h0;
        const floatX *value = d_oc + ((int64_t)i * c.H + h0) * c.Dv + y % c.Dv;
        for (int h = 0; h < hg; h++) v += s[h] * (float)value[h * c.Dv];
    }
    return v;
}

// d_rows[b, row] += sum over the chunk's queries i0..i1 that attend to the row, in their order. One block a row, a
// thread for each of its floats. A query comes to a row through its window or tail, or through a candidate: one that it
// chose (found by the inverse list of (query, slot)), or any visible one when it attends to everything.
__global__ static void row_gather_kernel(Core c, float *d_rows, const float *p, const float *ds, const floatX *d_oc, const int2 *list, const int32_t *list_start, int i0, int i1) {
    int b = (int)blockIdx.x / c.n_rows, row = (int)blockIdx.x % c.n_rows, base = b * c.T;
    int first = max(i0, base), last = min(i1, base + c.T); // the chunk's queries of this sequence
    if (first >= last) return;
    int is_entry = row >= c.T, doc = is_entry ? 0 : c.doc[base + row], e = -1, u = 0;
    if (is_entry) e = row - c.T;
    else if (c.qsa) { e = doc / c.r + (row - doc) / c.r; u = (row - doc) % c.r; }
    else if (!c.v4) e = row;
    int near_from = max(first, base + row), near_to = is_entry ? near_from : min(last, base + row + (c.v4 ? c.W : c.qsa ? c.r : 0));
    int from = is_entry ? first : near_from, to = last, plain = !c.v4 && !c.qsa; // plain: a slot is a place
    if (e < 0 || e >= c.n_cand) to = from;
    else if (!c.all) {
        int start = list_start[b * c.n_cand + e], end = list_start[b * c.n_cand + e + 1];
        from = gpu_lower_bound(list, start, end, first);
        to = gpu_lower_bound(list, start, end, last);
    }
    for (int x = threadIdx.x; x < c.R; x += blockDim.x) {
        float v = d_rows[(int64_t)blockIdx.x * c.R + x];
        for (int i = near_from; i < near_to; i++) {
            int begin = gpu_span(c, i).from;
            if (row >= begin && c.doc[i] == doc) v += row_share(c, p, ds, d_oc, i - i0, i, row - begin, x);
        }
        for (int y = from; y < to; y++) {
            int2 pair = c.all ? make_int2(y, 0) : list[y];
            int i = pair.x, place = pair.y;
            if (c.all || !plain) {
                Span s = gpu_span(c, i);
                int slot = c.all ? e - s.lo : pair.y;
                if (slot < 0 || slot >= s.n_cand || (c.qsa && c.doc[i] != doc)) continue;
                place = s.first + slot * c.unit + u;
            }
            v += row_share(c, p, ds, d_oc, i - i0, i, place, x);
        }
        d_rows[(int64_t)blockIdx.x * c.R + x] = v;
    }
}

// Inverse lists: the slots (i - i0) * k + j of values (n, k) sorted by the row that stands there; -1 is none.
__global__ static void pairs_kernel(const int32_t *values, uint32_t *key, uint32_t *pair, int64_t i0, int64_t T, int64_t k, int64_t rows, uint32_t none, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= n) return;
    key[x] = values[x] < 0 ? none : (uint32_t)((i0 + x / k) / T * rows + values[x]);
    pair[x] = (uint32_t)x;
}
// The first of n sorted pairs whose row is not below x.
__device__ static int gpu_first_pair(const uint32_t *key, int n, int x) {
    int a = 0, b = n;
    while (a < b) {
        int mid = a + (b - a) / 2;
        if (key[mid] < (uint32_t)x) a = mid + 1;
        else b = mid;
    }
    return a;
}
// The sorted pairs as (query, slot), and where each row's list starts.
__global__ static void lists_kernel(const uint32_t *key, const uint32_t *pair, int2 *list, int32_t *start, int k, int rows, int n) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (x < n) list[x] = make_int2((int)(pair[x] / (unsigned)k), (int)(pair[x] % (unsigned)k));
    if (x <= rows) start[x] = gpu_first_pair(key, n, x);
}
// Sort the pairs of the queries i0 .. i0 + n into G_.pair_key2 and G_.pair2; stable, so in the order of the queries. Rows
// are counted by sequence of T queries, "rows" in each. Returns how many they are in all sequences.
static int gpu_sort_pairs(const int32_t *values, int64_t i0, int64_t n, int64_t k, int64_t T, int64_t rows, int64_t sequences) {
    int64_t all = rows * sequences, pairs = n * k;
    int bits = 1;
    while (all >> bits) bits++;
    pairs_kernel<<<blocks_for(pairs, BLOCK), BLOCK, 0, stream>>>(values, G_.pair_key, G_.pair, i0, T, k, rows, (uint32_t)all, pairs);
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(G_.sort_space, G_.sort_bytes, G_.pair_key, G_.pair_key2, G_.pair, G_.pair2, (int)pairs, 0, bits, stream));
    return (int)all;
}
// G_.list and G_.list_start: the places where each of the candidates stands in values (queries, k), n_cand of a sequence.
static void gpu_inverse_lists(const int32_t *values, int64_t queries, int64_t k, int64_t T, int64_t n_cand) {
    int n = (int)(queries * k), all = gpu_sort_pairs(values, 0, queries, k, T, n_cand, queries / T);
    lists_kernel<<<blocks_for(max64(n, all + 1), BLOCK), BLOCK, 0, stream>>>(G_.pair_key2, G_.pair2, G_.list, G_.list_start, (int)k, all, n);
}

// dots[q, h, j] = q_index . k_index of candidate j, one warp a candidate.
__global__ static void index_dot_kernel(Core c, float *dots, int width, int i0) {
    int j = (int)(blockIdx.x * (BLOCK / WARP) + threadIdx.x / WARP), i = i0 + (int)blockIdx.y, lane = threadIdx.x % WARP;
    Span s = gpu_span(c, i);
    if (j >= s.n_cand) return;
    const floatX *key = index_key(c, i, gpu_candidate(c, s, i, j));
    for (int h = 0; h < c.HI; h++) {
        const floatX *q = c.q_index + ((int64_t)i * c.HI + h) * c.DI;
        float v = 0;
        for (int d = lane; d < c.DI; d += WARP) v += (float)q[d] * (float)key[d];
        v = warp_sum(v);
        if (lane == 0) dots[((int64_t)blockIdx.y * c.HI + h) * width + j] = v;
    }
}

// The indexer's KL of row i (see indexer_kl() in train_cpu.c): row_kl, d_w, and dots become the gradients to the dot
// products. One block a query. target is scratch.
__global__ static void index_kl_kernel(Core c, const float *probs, float *target, float *dots, int width, float *row_kl, float *d_w, float scale, float teachers, int learn, int i0) {
    __shared__ float shared[BLOCK / WARP];
    int i = i0 + (int)blockIdx.x;
    Span s = gpu_span(c, i);
    float *p = target + (int64_t)blockIdx.x * width, *x = dots + (int64_t)blockIdx.x * c.HI * width, total = 0, top = -INFINITY, sum = 0, kl = 0;
    const float *w = c.w_index + (int64_t)i * c.HI;
    for (int j = threadIdx.x; j < s.n_cand; j += blockDim.x) {
        float best = 0;
        for (int u = 0; u < c.unit; u++) {
            float mass = 0;
            for (int h = 0; h < c.H; h++) mass += probs[((int64_t)blockIdx.x * c.support + s.first + j * c.unit + u) * c.H + h];
            best = fmaxf(best, mass);
        }
        p[j] = best;
        total += best;
        float score = 0;
        for (int h = 0; h < c.HI; h++) score += w[h] * fmaxf(x[h * width + j], 0.0f);
        top = fmaxf(top, score);
    }
    total = block_sum(total, shared);
    if (total <= 0) { // nothing to imitate
        for (int j = threadIdx.x; j < s.n_cand; j += blockDim.x)
            for (int h = 0; h < c.HI; h++) x[h * width + j] = 0;
        return;
    }
    top = block_max(top, shared);
    for (int j = threadIdx.x; j < s.n_cand; j += blockDim.x) {
        float score = 0;
        for (int h = 0; h < c.HI; h++) score += w[h] * fmaxf(x[h * width + j], 0.0f);
        sum += expf(score - top);
    }
    float log_sum = top + logf(block_sum(sum, shared));
    for (int j = threadIdx.x; j < s.n_cand; j += blockDim.x) {
        float score = 0, q = p[j] / total;
        for (int h = 0; h < c.HI; h++) score += w[h] * fmaxf(x[h * width + j], 0.0f);
        if (q > 0) kl += q * (logf(q) - (score - log_sum));
        p[j] = scale * (expf(score - log_sum) - q); // from here on: the gradient to the score
    }
    kl = block_sum(kl, shared);
    if (threadIdx.x == 0) row_kl[i] += kl / teachers;
    if (!learn) return;
    for (int h = 0; h < c.HI; h++) {
        float sum_w = 0;
        for (int j = threadIdx.x; j < s.n_cand; j += blockDim.x) {
            float d = x[h * width + j];
            sum_w += d > 0 ? p[j] * d : 0;
            x[h * width + j] = d > 0 ? p[j] * w[h] : 0;
        }
        sum_w = block_sum(sum_w, shared);
        if (threadIdx.x == 0) d_w[(int64_t)i * c.HI + h] += sum_w;
    }
}

// d_q[i, h, d] += sum over candidates of the gradients to the dot products times the key.
__global__ static void index_dq_kernel(Core c, float *d_q, const float *dots, int width, int i0) {
    int i = i0 + (int)blockIdx.x;
    Span s = gpu_span(c, i);
    const floatX *keys = index_key(c, i, 0);
    for (int x = threadIdx.x; x < c.HI * c.DI; x += blockDim.x) {
        const float *g = dots + ((int64_t)blockIdx.x * c.HI + x / c.DI) * width;
        float v = 0;
        for (int j = 0; j < s.n_cand; j++) v += g[j] * (float)keys[(int64_t)gpu_candidate(c, s, i, j) * c.DI + x % c.DI];
        d_q[(int64_t)i * c.HI * c.DI + x] += v;
    }
}

// d_k[b, candidate] += sum over the chunk's queries that chose it, in their order. One block a candidate.
__global__ static void key_gather_kernel(Core c, float *d_k, const float *dots, int width, const int2 *list, const int32_t *list_start, int i0, int i1) {
    int b = (int)blockIdx.x / c.n_cand, e = (int)blockIdx.x % c.n_cand, base = b * c.T;
    int from = max(i0, base), to = min(i1, base + c.T);
    if (from >= to) return;
    if (!c.all) {
        int start = list_start[blockIdx.x], end = list_start[blockIdx.x + 1], first = from, last = to;
        from = gpu_lower_bound(list, start, end, first);
        to = gpu_lower_bound(list, start, end, last);
    } else from = max(from, base + e * c.r); // a query before the candidate's first token cannot see it
    for (int d = threadIdx.x; d < c.DI; d += blockDim.x) {
        float v = d_k[(int64_t)blockIdx.x * c.DI + d];
        for (int y = from; y < to; y++) {
            int i = c.all ? y : list[y].x, lo, n, slot;
            if (c.all) {
                gpu_visible(c, i, &lo, &n);
                slot = e - lo;
                if (slot < 0 || slot >= n) continue;
            } else slot = list[y].y;
            const float *g = dots + (int64_t)(i - i0) * c.HI * width + slot;
            const floatX *q = c.q_index + (int64_t)i * c.HI * c.DI + d;
            for (int h = 0; h < c.HI; h++) v += g[(int64_t)h * width] * (float)q[(int64_t)h * c.DI];
        }
        d_k[(int64_t)blockIdx.x * c.DI + d] = v;
    }
}

// Candidates a row of the KL's scratch holds.
static int kl_width(const Core *c) { return c->all ? max(c->n_cand, 1) : c->k; }

// The KL of a chunk of queries, whose probabilities stand in G_.probs; with learn, its gradients as well.
static void gpu_indexer_kl(Model *g, const Layer *l, const Core *c, int i0, int queries, int learn) {
    int width = kl_width(c);
    float teachers = (float)kl_teachers(g, l);
    if (c->n_cand == 0) return; // a row shorter than one pool
    index_dot_kernel<<<dim3(blocks_for(width, BLOCK / WARP), (unsigned)queries), BLOCK, 0, stream>>>(*c, G_.dots, width, i0);
    index_kl_kernel<<<(unsigned)queries, BLOCK, 0, stream>>>(*c, G_.probs, G_.target, G_.dots, width, g->row_kl, g->d_wi, (float)g->kl_scale / teachers, teachers, learn, i0);
    if (!learn) return;
    index_dq_kernel<<<(unsigned)queries, 128, 0, stream>>>(*c, g->d_qi, G_.dots, width, i0);
    key_gather_kernel<<<(unsigned)(g->B * c->n_cand), 64, 0, stream>>>(*c, g->d_ki, G_.dots, width, G_.list, G_.list_start, i0, i0 + queries);
}

// Queries of a chunk: as many as the buffers hold with this layer's support.
static int chunk_queries(const Core *c) {
    int64_t n = min64(G_.space / ((int64_t)c->H * c->support), 32768); // the second grid dimension ends at 65535
    if (c->q_index) n = min64(n, G_.kl_space / ((int64_t)c->HI * kl_width(c)));
    return (int)max64(1, n);
}

static void gpu_support_forward(Model *g, Layer *l, int teach) {
    Core c = core_of(g, l);
    int chunk = chunk_queries(&c), end = (int)(g->r0 + g->nr);
    for (int i0 = (int)g->r0; i0 < end; i0 += chunk) {
        int n = min(chunk, end - i0);
        place_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.place, i0);
        support_dot_kernel<<<dim3(blocks_for(c.support, BLOCK / LANES_DOT), (unsigned)n), BLOCK, 0, stream>>>(c, G_.probs, c.qrow, 0, c.Dk, c.scale, i0);
        softmax_kernel<<<blocks_for((int64_t)n * c.H * WARP, BLOCK), BLOCK, 0, stream>>>(c, G_.probs, l->lse, i0, n);
        support_sum_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, X(l->oc), G_.probs, c.v_off, c.Dv, i0);
        if (teach) gpu_indexer_kl(g, l, &c, i0, n, 0);
    }
}

static void gpu_support_backward(Model *g, Layer *l, int teach) {
    Core c = core_of(g, l);
    int chunk = chunk_queries(&c);
    if (!c.all) gpu_inverse_lists(c.sel, g->N, c.k, g->T, c.n_cand);
    for (int i0 = 0; i0 < c.N; i0 += chunk) {
        int n = min(chunk, c.N - i0);
        dim3 places(blocks_for(c.support, BLOCK / LANES_DOT), (unsigned)n);
        place_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.place, i0);
        support_dot_kernel<<<places, BLOCK, 0, stream>>>(c, G_.probs, c.qrow, 0, c.Dk, c.scale, i0);
        probs_again_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.probs, l->lse, i0);
        support_dot_kernel<<<places, BLOCK, 0, stream>>>(c, G_.ds, X(g->d_oc), c.v_off, c.Dv, 1.0f, i0);
        ds_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.ds, G_.probs, G_.delta, i0);
        support_sum_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, X(g->d_qrow), G_.ds, 0, c.Dk, i0);
        unsigned threads = blocks_for(min64(l->R, 256), WARP) * WARP;
        row_gather_kernel<<<(unsigned)(g->B * l->n_rows), threads, 0, stream>>>(c, g->d_rows, G_.probs, G_.ds, X(g->d_oc), G_.list, G_.list_start, i0, i0 + n);
        if (teach) gpu_indexer_kl(g, l, &c, i0, n, 1);
    }
}

// ---- dense MLA by matrix products
// Where an MLA layer attends to everything (F, and D and S in the dense stage), logits of a chunk of queries of one
// sequence are one product: the heads share the KV row, so (query, head) are simply rows. The same for the indexer. The
// table is (queries, H, wide), wide tokens from the start of the sequence to the chunk's last; no longer than a chunk.

// In the table s of one chunk: row q belongs to query i0 + q of the batch and sees candidates [doc, t].
// p = probabilities of scale * s, 0 where not visible; lse. One block a (query, head).
__global__ static void dense_softmax_kernel(Core c, floatX *p, const float *s, float *lse, int wide, int i0) {
    __shared__ float shared[BLOCK / WARP];
    int i = i0 + (int)blockIdx.x, lo = c.doc[i], hi = i % c.T + 1;
    int64_t at = ((int64_t)blockIdx.x * c.H + blockIdx.y) * wide;
    float top = -INFINITY, sum = 0;
    for (int j = lo + (int)threadIdx.x; j < hi; j += blockDim.x) top = fmaxf(top, s[at + j]);
    top = block_max(top, shared) * c.scale;
    for (int j = lo + (int)threadIdx.x; j < hi; j += blockDim.x) sum += expf(s[at + j] * c.scale - top);
    float log_sum = top + logf(block_sum(sum, shared));
    for (int j = threadIdx.x; j < wide; j += blockDim.x) p[at + j] = (floatX)(j >= lo && j < hi ? expf(s[at + j] * c.scale - log_sum) : 0);
    if (threadIdx.x == 0) lse[(int64_t)i * c.H + blockIdx.y] = log_sum;
}
// In backward: p from lse, and mass[q, j] = sum over heads (unless NULL). One block a query.
__global__ static void dense_probs_kernel(Core c, floatX *p, const float *s, const float *lse, float *mass, int wide, int i0) {
    int i = i0 + (int)blockIdx.x, lo = c.doc[i], hi = i % c.T + 1;
    for (int j = threadIdx.x; j < wide; j += blockDim.x) {
        float total = 0;
        for (int h = 0; h < c.H; h++) {
            int64_t at = ((int64_t)blockIdx.x * c.H + h) * wide + j;
            float v = j >= lo && j < hi ? expf(s[at] * c.scale - lse[(int64_t)i * c.H + h]) : 0;
            if (p) p[at] = (floatX)v;
            total += v;
        }
        if (mass) mass[(int64_t)blockIdx.x * wide + j] = total;
    }
}
// ds = p (dp - delta) scale; p is 0 where nothing is visible. One block a (query, head).
__global__ static void dense_ds_kernel(Core c, floatX *ds, const floatX *p, const float *dp, const float *delta, int wide, int i0) {
    int64_t row = (int64_t)blockIdx.x * c.H + blockIdx.y, at = row * wide;
    float d = delta[(int64_t)i0 * c.H + row];
    for (int j = threadIdx.x; j < wide; j += blockDim.x) ds[at + j] = (floatX)((float)p[at + j] * (dp[at + j] - d) * c.scale);
}
// The indexer's KL of query i0 + blockIdx.x over all visible candidates: as index_kl_kernel, of the table x (queries, HI,
// wide) of dot products; their gradients go to g (unless NULL), 0 where not visible. mass is scratch afterwards.
__global__ static void dense_kl_kernel(Core c, float *mass, const float *x, floatX *g, int wide, float *row_kl, float *d_w, float scale, float teachers, int i0) {
    __shared__ float shared[BLOCK / WARP];
    int i = i0 + (int)blockIdx.x, lo = c.doc[i], hi = i % c.T + 1;
    float *p = mass + (int64_t)blockIdx.x * wide, total = 0, top = -INFINITY, sum = 0, kl = 0;
    const float *w = c.w_index + (int64_t)i * c.HI;
    x += (int64_t)blockIdx.x * c.HI * wide;
    for (int j = lo + (int)threadIdx.x; j < hi; j += blockDim.x) {
        float score = 0;
        for (int h = 0; h < c.HI; h++) score += w[h] * fmaxf(x[(int64_t)h * wide + j], 0.0f);
        total += p[j];
        top = fmaxf(top, score);
    }
    total = block_sum(total, shared);
    top = block_max(top, shared);
    for (int j = lo + (int)threadIdx.x; j < hi; j += blockDim.x) {
        float score = 0;
        for (int h = 0; h < c.HI; h++) score += w[h] * fmaxf(x[(int64_t)h * wide + j], 0.0f);
        sum += expf(score - top);
    }
    float log_sum = top + logf(block_sum(sum, shared));
    for (int j = lo + (int)threadIdx.x; j < hi; j += blockDim.x) {
        float score = 0, q = p[j] / total;
        for (int h = 0; h < c.HI; h++) score += w[h] * fmaxf(x[(int64_t)h * wide + j], 0.0f);
        if (q > 0) kl += q * (logf(q) - (score - log_sum));
        p[j] = scale * (expf(score - log_sum) - q); // from here on: the gradient to the score
    }
    kl = block_sum(kl, shared);
    if (threadIdx.x == 0) row_kl[i] += kl / teachers;
    if (!g) return;
    g += (int64_t)blockIdx.x * c.HI * wide;
    for (int h = 0; h < c.HI; h++) {
        float sum_w = 0;
        for (int j = threadIdx.x; j < wide; j += blockDim.x) {
            float d = j >= lo && j < hi ? x[(int64_t)h * wide + j] : 0;
            sum_w += d > 0 ? p[j] * d : 0;
            g[(int64_t)h * wide + j] = (floatX)(d > 0 ? p[j] * w[h] : 0);
        }
        sum_w = block_sum(sum_w, shared);
        if (threadIdx.x == 0) d_w[(int64_t)i * c.HI + h] += sum_w;
    }
}

// Forward (back = 0) or backward of one layer, chunk by chunk. Forward teaches only in an evaluation.
static void gpu_dense_attention(Model *g, Layer *l, int teach, int back) {
    Core c = core_of(g, l);
    int64_t H = c.H, HI = c.HI, Dk = c.Dk, Dv = c.Dv, R = c.R, DI = c.DI, end = g->r0 + g->nr, wide;
    float teachers = (float)kl_teachers(g, l), *s = G_.probs;
    floatX *none = NULL, *p = (floatX *)G_.ds, *half = (floatX *)G_.probs;
    for (int64_t i0 = g->r0, n; i0 < end; i0 += n) {
        int64_t t0 = i0 % g->T, room = G_.space / (sizeof(floatX) == 4 ? 2 : 1); // ds holds two tables of floatX
        n = min64(end - i0, g->T - t0);
        n = min64(n, max64(1, room / (H * g->T)));
        if (teach) n = min64(n, max64(1, min64(G_.kl_space, G_.space) / (HI * g->T)));
        wide = min64(g->T, (t0 + n + 63) / 64 * 64);
        const floatX *rows = X(l->rows) + i0 / g->T * l->n_rows * R, *q = c.qrow + i0 * H * Dk;
        floatX *ds = p + n * H * wide;
        gpu_matmul(s, wide, (float *)NULL, q, Dk, 1, rows, 1, R, n * H, wide, Dk);
        if (!back) {
            dense_softmax_kernel<<<dim3((unsigned)n, (unsigned)H), BLOCK, 0, stream>>>(c, p, s, l->lse, (int)wide, (int)i0);
            gpu_matmul(X(l->oc) + i0 * H * Dv, Dv, none, p, wide, 1, rows, R, 1, n * H, Dv, wide);
        }
        if (back || teach) dense_probs_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, back ? p : none, s, l->lse, teach ? G_.target : NULL, (int)wide, (int)i0);
        if (back) {
            const floatX *d_oc = X(g->d_oc) + i0 * H * Dv;
            float *d_rows = g->d_rows + i0 / g->T * l->n_rows * R;
            gpu_matmul(s, wide, (float *)NULL, d_oc, Dv, 1, rows, 1, R, n * H, wide, Dv);
            dense_ds_kernel<<<dim3((unsigned)n, (unsigned)H), BLOCK, 0, stream>>>(c, ds, p, s, G_.delta, (int)wide, (int)i0);
            gpu_matmul(X(g->d_qrow) + i0 * H * Dk, Dk, none, ds, wide, 1, rows, R, 1, n * H, Dk, wide);
            gpu_matmul(d_rows, R, d_rows, ds, 1, wide, q, Dk, 1, wide, Dk, n * H);
            gpu_matmul(d_rows, R, d_rows, p, 1, wide, d_oc, Dv, 1, wide, Dv, n * H);
        }
        if (!teach) continue;
        const floatX *keys = c.k_index + i0 / g->T * c.n_cand * DI, *qi = c.q_index + i0 * HI * DI;
        gpu_matmul(G_.dots, wide, (float *)NULL, qi, DI, 1, keys, 1, DI, n * HI, wide, DI);
        dense_kl_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.target, G_.dots, back ? half : none, (int)wide, g->row_kl, g->d_wi, (float)g->kl_scale / teachers, teachers, (int)i0);
        if (!back) continue;
        float *d_qi = g->d_qi + i0 * HI * DI, *d_ki = g->d_ki + i0 / g->T * c.n_cand * DI;
        gpu_matmul(d_qi, DI, d_qi, half, wide, 1, keys, DI, 1, n * HI, DI, wide);
        gpu_matmul(d_ki, DI, d_ki, half, 1, wide, qi, DI, 1, wide, DI, n * HI);
    }
}

// ---- tensor-core kernels over selected rows (bf16)
// One block serves a query and 16 or 32 of its heads. Its warps form groups. A group takes every G-th tile of 16 rows of the support (G groups): it
// copies them to shared memory of its own while it multiplies the tile before, and meets the other groups only at the end, where their sums are
// added. So no group waits for another's rows. Where the sums of a group would not fit the registers of one warp, two or four warps share it: each
// takes a part of the channels in products that sum over channels (the parts are then added), and a part of the columns in the others. Queries run in
// order, so that the sorted lists of those in flight sweep the rows together and most reads hit L2.

#ifdef PRECISION_FP32
static int fast_core(const Model *, const Layer *) { return 0; }
static int64_t fast_stride(const Model *, const Layer *) { return 0; }
static int64_t fast_queries(const Model *, const Layer *) { return 0; }
static int share_width(const Layer *) { return 0; }
static void fast_forward(Model *, Layer *, int) {}
static void fast_backward(Model *, Layer *, int) {}
#else

enum { GROUP_ROWS = 16 };

// One launch's share of a layer: heads h0 .. h0 + nh, which read the keys and values of one KV row group; where these
// stand in a KV row and in a row of the tile (values inside the keys where they are the same channels).
typedef struct {
    int h0, nh, key, value, wide, value_at; // offsets in the KV row; width of a tile's row; where its values start
    int stride;                             // slots of a query in place, slot_of and mass
    const int32_t *place;                   // (queries, stride) KV rows of the supports
} Share;

// For 16 MT heads and keys of up to 160, 320 or 576 channels: warps of a group, such that a lane holds at most 160 sums of a product heads by channels;
// warps of a block; and the blocks that the registers of a multiprocessor are to hold, from the sums of a lane.
__host__ __device__ constexpr int group_warps(int MT, int Dk) {
    int warps = (MT * (Dk <= 160 ? 1 : Dk <= 320 ? 2 : 4) + 1) / 2;
    return warps < 4 ? warps : 4;
}
__host__ __device__ constexpr int block_warps(int MT, int Dk) { return group_warps(MT, Dk) > 2 ? 2 * group_warps(MT, Dk) : 4; }
constexpr int warps_held(int sums) { return sums > 80 ? 8 : sums > 40 ? 12 : 16; } // of 255, 168, 128 registers
constexpr int blocks_held(int sums, int warps) { return warps_held(sums) > warps ? warps_held(sums) / warps : 1; }

// Waits until all but the last of the thread's copies_issued() are complete.
__device__ static void copies_done_but_last(void) { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
// A barrier of the warps of a group.
template <int WARPS> __device__ static void group_sync(int group) {
    if (WARPS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(WARPS * WARP) : "memory");
}
// 16 bytes that this kernel will not read again, if take: without a branch, so that what stands around it can be interleaved.
__device__ static void store_16(floatX *to, const uint32_t v[4], int take) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4}; }"
                 ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(take) : "memory");
}
// One instruction; 0 where exp2f() gives a denormal.
__device__ static float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The transpose of an 8x8 matrix: lane l holds row l/4, columns 2(l%4)+{0,1}, before and after.
__device__ static uint32_t transposed(uint32_t a) {
    uint32_t b;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
    return b;
}

// The lane's KV row of the tile, of 16: what gather_rows() is given. -1 behind the last of n, and in the upper lanes.
__device__ static int tile_place(const int32_t *place, int tile, int n) {
    int lane = threadIdx.x % WARP, j = tile * GROUP_ROWS + lane;
    return lane < GROUP_ROWS && j < n ? place[j] : -1;
}
// A tile's rows as [key | value] of this width, by the warps of a group; zeros for -1. Eight lanes copy a row, 128 bytes at a time. rows: of the
// sequence, R values each, from the lane's first on, number 8 (lane % 8) of the key; the value starts "jump" behind the key's end.
template <int WARPS> __device__ static void gather_rows(uint32_t to, const floatX *rows, int place, int part, int R, int Dk, int jump, int wide) {
    int lane = threadIdx.x % WARP, k = lane % 8 * 8;
    #pragma unroll
    for (int p = 0; p < 4 / WARPS; p++) {
        int r = (p * WARPS + part) * 4 + lane / 8, row = __shfl_sync(0xffffffffu, place, r), take = row >= 0;
        const floatX *from = rows + (int64_t)max(row, 0) * R;
        uint32_t at = to + (uint32_t)((r * (wide + PAD) + k) * 2);
        #pragma unroll
        for (int u = 0; u < wide; u += 64)
            if (u + k < wide) copy_16(at + (uint32_t)(u * 2), from + u + (u + k < Dk ? 0 : jump), take);
    }
}
// x[head, 0..d) into rows of d + PAD; zeros for heads that are not there.
template <int HEADS> __device__ static void gather_heads(uint32_t to, const floatX *x, int nh, int d) {
    for (int h = (int)threadIdx.x / 8; h < HEADS; h += (int)blockDim.x / 8)
        for (int k = (int)threadIdx.x % 8 * 8; k < d; k += 64) copy_16(to + (uint32_t)((h * (d + PAD) + k) * 2), x + (int64_t)(h < nh ? h : 0) * d + k, h < nh);
}

// The warps of a group each have a part of the sums x, accumulators of (16, 8) tiles: all get the total, added in the order of the warps. space: the
// group's, (WARPS, TILES, WARP).
template <int WARPS, int TILES> __device__ static void add_parts(float (*x)[4], float4 *space, int group, int part) {
    int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int t = 0; t < TILES; t++) space[(part * TILES + t) * WARP + lane] = make_float4(x[t][0], x[t][1], x[t][2], x[t][3]);
    group_sync<WARPS>(group);
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
        x[t][0] = x[t][1] = x[t][2] = x[t][3] = 0;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float4 v = space[(w * TILES + t) * WARP + lane];
            x[t][0] += v.x;
            x[t][1] += v.y;
            x[t][2] += v.z;
            x[t][3] += v.w;
        }
    }
}

// to[head, 0..D) = the sum over groups, in their order, of what they hold: x, 16 heads by the TILES * 16 columns from "column" on. space: for
// each group "apart" floats, at least 16 (D + PAD), that nobody needs any more once all are here.
template <int GROUPS, int TILES> __device__ static void merge_groups(floatX *to, const float (*x)[4], float *space, int apart, int group, int column, int heads, int D) {
    int lane = threadIdx.x % WARP;
    float *mine = space + group * apart + lane / 4 * (D + PAD) + lane % 4 * 2;
    __syncthreads();
    #pragma unroll
    for (int t = 0; t < 2 * TILES; t++) {
        if (column + t * 8 >= D) break;
        for (int r = 0; r < 2; r++) *(float2 *)(mine + r * 8 * (D + PAD) + column + t * 8) = make_float2(x[t][2 * r], x[t][2 * r + 1]);
    }
    __syncthreads();
    for (int y = threadIdx.x; y < heads * (D / 8); y += blockDim.x) {
        int h = y / (D / 8), d = y % (D / 8) * 8;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, v[8];
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            load<8>(v, space + g * apart + h * (D + PAD) + d);
            for (int e = 0; e < 8; e++) sum[e] += v[e];
        }
        store<8>(to + (int64_t)h * D + d, sum);
    }
}

// oc = softmax(scale q . k) v and lse of query i0 + blockIdx.x. Each group runs its own online softmax (Milakov and Gimelshein 2018) over its rows. P
// goes from the accumulators of one product straight into the left operand of the next (Dao 2023). WIDE: z.wide of layers of just these DK and DV;
// 0: for all layers up to these.
template <int MT, int DK, int DV, int WIDE> __global__ static void
__launch_bounds__(block_warps(MT, DK) * WARP, blocks_held(MT * DV / group_warps(MT, DK) / 2, block_warps(MT, DK)))
sparse_forward_kernel(Core c, Share z, floatX *oc, float *lse, int i0) {
    constexpr int WARPS = group_warps(MT, DK), GROUPS = block_warps(MT, DK) / WARPS, CHAINS = MT == 1 ? 2 : 1; // two sums where few would overlap
    constexpr int KT = (DK / 16 + WARPS - 1) / WARPS, VT = (DV / 16 + WARPS - 1) / WARPS;                 // a warp's part, in 16 channels
    constexpr int ALL_K = WIDE && DK / 16 % WARPS == 0, ALL_V = WIDE && DV / 16 % WARPS == 0;             // no part is shorter
    extern __shared__ __align__(128) floatX smem_x[];
    __shared__ float tops[GROUPS][MT * 16], sums[GROUPS][MT * 16];
    const int Dk = WIDE ? DK : c.Dk, Dv = WIDE ? DV : c.Dv, wide = WIDE ? WIDE : z.wide, value_at = wide == Dk ? 0 : Dk, ld = wide + PAD, buffer = GROUP_ROWS * ld;
    int i = i0 + (int)blockIdx.x, n = gpu_span(c, i).n, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane % 4, group = warp / WARPS, part = warp % WARPS;
    const int32_t *place = z.place + (int64_t)blockIdx.x * z.stride;
    const floatX *rows = kv_row(c, i, 0) + z.key + lane % 8 * 8;
    floatX *tiles = smem_x + MT * 16 * (Dk + PAD);
    float4 *parts = (float4 *)(tiles + GROUPS * 2 * buffer) + group * WARPS * MT * 2 * WARP;
    uint32_t q_at = smem_address(smem_x), tiles_at = smem_address(tiles + group * 2 * buffer);
    int jump = z.value - z.key - Dk, steps = Dk / 16, k0 = WARPS == 1 ? 0 : min(part * KT, steps), k1 = min(k0 + KT, steps), column = part * VT * 16;
    float o[MT][2 * VT][4], top[MT][2], sum[MT][2], scale = c.scale * 1.4426950408889634f; // base 2
    for (int m = 0; m < MT; m++) {
        for (int t = 0; t < 2 * VT; t++)
            for (int e = 0; e < 4; e++) o[m][t][e] = 0;
        top[m][0] = top[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0;
    }
    gather_heads<MT * 16>(q_at, c.qrow + ((int64_t)i * c.H + z.h0) * Dk, z.nh, Dk);
    copies_issued();
    if (group * GROUP_ROWS < n) gather_rows<WARPS>(tiles_at, rows, tile_place(place, group, n), part, c.R, Dk, jump, wide);
    copies_issued();
    int next = tile_place(place, group + GROUPS, n);
    copies_done_but_last();
    __syncthreads(); // q is there for all
    for (int tile = group, turn = 0; tile * GROUP_ROWS < n; tile += GROUPS, turn ^= 1) {
        copies_done();
        group_sync<WARPS>(group); // this tile is there, and nobody of the group reads the one before any more
        int ahead = tile + GROUPS, left = n - tile * GROUP_ROWS;
        if (ahead * GROUP_ROWS < n) gather_rows<WARPS>(tiles_at + (uint32_t)((turn ^ 1) * buffer * 2), rows, next, part, c.R, Dk, jump, wide);
        copies_issued();
        next = tile_place(place, ahead + GROUPS, n);
        uint32_t at = tiles_at + (uint32_t)(turn * buffer * 2);

        float s[CHAINS * MT * 2][4]; // heads by 16 rows
        for (int x = 0; x < CHAINS * MT * 2; x++)
            for (int e = 0; e < 4; e++) s[x][e] = 0;
        uint32_t q_lane = q_at + (uint32_t)((lane % 16 * (Dk + PAD) + lane / 16 * 8 + k0 * 16) * 2);
        uint32_t k_lane = at + (uint32_t)(((lane / 16 * 8 + lane % 8) * ld + lane / 8 % 2 * 8 + k0 * 16) * 2);
        #pragma unroll
        for (int k = 0; k < KT; k++) {
            if (!ALL_K && k0 + k >= k1) break;
            uint32_t a[4], b[4];
            ldmatrix(b, k_lane + (uint32_t)(k * 32));
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                float (*to)[4] = s + (k % CHAINS * MT + m) * 2;
                ldmatrix(a, q_lane + (uint32_t)((m * 16 * (Dk + PAD) + k * 16) * 2));
                mma(to[0], a, b);
                mma(to[1], a, b + 2);
            }
        }
        for (int x = 0; x < MT * 2 && CHAINS == 2; x++)
            for (int e = 0; e < 4; e++) s[x][e] += s[MT * 2 + x][e];
        if (WARPS > 1) add_parts<WARPS, MT * 2>(s, parts, group, part);

        uint32_t p[MT][4];
        float factor[MT][2];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            float (*x)[4] = s + 2 * m, most[2] = {top[m][0], top[m][1]};
            for (int t = 0; t < 2; t++)
                for (int e = 0; e < 4; e++) {
                    x[t][e] = t * 8 + quad * 2 + e % 2 < left ? x[t][e] * scale : -INFINITY;
                    most[e / 2] = fmaxf(most[e / 2], x[t][e]);
                }
            for (int r = 0; r < 2; r++) {
                most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
                most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
                factor[m][r] = exp2_fast(top[m][r] - most[r]); // at least one row is there: most is finite
                top[m][r] = most[r];
                sum[m][r] *= factor[m][r];
            }
            for (int t = 0; t < 2; t++)
                for (int e = 0; e < 4; e++) {
                    x[t][e] = exp2_fast(x[t][e] - top[m][e / 2]);
                    sum[m][e / 2] += x[t][e];
                }
            p[m][0] = pack(x[0][0], x[0][1]);
            p[m][1] = pack(x[0][2], x[0][3]);
            p[m][2] = pack(x[1][0], x[1][1]);
            p[m][3] = pack(x[1][2], x[1][3]);
        }
        uint32_t v_lane = at + (uint32_t)((lane % 16 * ld + value_at + column + lane / 16 * 8) * 2);
        #pragma unroll
        for (int t = 0; t < VT; t++) {
            if (!ALL_V && column + t * 16 >= Dv) break;
            uint32_t b[4];
            ldmatrix_trans(b, v_lane + (uint32_t)(t * 32));
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                for (int e = 0; e < 8; e++) o[m][2 * t + e / 4][e % 4] *= factor[m][e % 4 / 2];
                mma(o[m][2 * t], p[m], b);
                mma(o[m][2 * t + 1], p[m], b + 2);
            }
        }
    }
    #pragma unroll
    for (int m = 0; m < MT; m++)
        for (int r = 0; r < 2; r++) {
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 1);
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 2);
            if (part == 0 && quad == 0) {
                tops[group][m * 16 + r * 8 + lane / 4] = top[m][r];
                sums[group][m * 16 + r * 8 + lane / 4] = sum[m][r];
            }
        }
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        for (int r = 0; r < 2; r++) {
            int head = m * 16 + r * 8 + lane / 4;
            float sink = c.sinks && head < z.nh ? c.sinks[z.h0 + head] * 1.4426950408889634f : -INFINITY, all, factor, most = sink;
            for (int g = 0; g < GROUPS; g++) most = fmaxf(most, tops[g][head]);
            all = most == -INFINITY ? 0 : exp2f(sink - most);
            for (int g = 0; g < GROUPS; g++) all += most == -INFINITY ? 0 : sums[g][head] * exp2f(tops[g][head] - most);
            factor = all > 0 ? exp2f(top[m][r] - most) / all : 0;
            for (int t = 0; t < 2 * VT; t++) {
                o[m][t][2 * r] *= factor;
                o[m][t][2 * r + 1] *= factor;
            }
            if (warp == 0 && quad == 0 && head < z.nh) lse[(int64_t)i * c.H + z.h0 + head] = all > 0 ? (most + log2f(all)) * 0.6931471805599453f : -INFINITY;
        }
        merge_groups<GROUPS, VT>(oc + ((int64_t)i * c.H + z.h0 + m * 16) * Dv, o[m], (float *)tiles, buffer, group, column, min(16, z.nh - m * 16), Dv);
    }
}

// v[t] of lane l of a quad becomes v[l] of lane t.
__device__ static void quad_transpose(uint32_t v[4]) {
    #pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        int upper = (threadIdx.x & bit) != 0;
        #pragma unroll
        for (int t = 0; t < 4; t++) {
            if (t & bit) continue;
            uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? v[t] : v[t + bit], bit);
            if (upper) v[t] = got;
            else v[t + bit] = got;
        }
    }
}

// Backward of query i0 + blockIdx.x for the heads of z. Written: mass[q, j] = sum over heads of the probabilities (first_heads: set, else added;
// NULL: not wanted); and with LEARN d_qrow, and what each row of the support receives, z.wide wide, into partial at the place slot_of says. DK, DV,
// WIDE as in forward.
template <int MT, int DK, int DV, int WIDE, int LEARN> __global__ static void
__launch_bounds__(block_warps(MT, DK) * WARP, blocks_held(LEARN * MT * DK / group_warps(MT, DK) / 2, block_warps(MT, DK)))
sparse_backward_kernel(Core c, Share z, floatX *d_qrow, floatX *partial, const int32_t *slot_of, float *mass, int first_heads, const floatX *d_oc, const float *lse, const float *delta, int i0) {
    constexpr int WARPS = group_warps(MT, DK), GROUPS = block_warps(MT, DK) / WARPS, NT = 2 * MT; // NT: tiles of 8 heads
    constexpr int KT = (DK / 16 + WARPS - 1) / WARPS, VT = (DV / 16 + WARPS - 1) / WARPS, ALL_K = WIDE && DK / 16 % WARPS == 0;
    extern __shared__ __align__(128) floatX smem_x[];
    const int Dk = WIDE ? DK : c.Dk, Dv = WIDE ? DV : c.Dv, wide = WIDE ? WIDE : z.wide, value_at = wide == Dk ? 0 : Dk;
    const int ld = wide + PAD, lq = Dk + PAD, lo = Dv + PAD, buffer = GROUP_ROWS * ld;
    int i = i0 + (int)blockIdx.x, n = gpu_span(c, i).n, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, quad = lane % 4, group = warp / WARPS, part = warp % WARPS;
    const int32_t *place = z.place + (int64_t)blockIdx.x * z.stride, *slot = slot_of + (int64_t)blockIdx.x * z.stride;
    const floatX *rows = kv_row(c, i, 0) + z.key + lane % 8 * 8;
    int64_t head0 = (int64_t)i * c.H + z.h0;
    floatX *d_o = smem_x + MT * 16 * lq, *tiles = d_o + LEARN * MT * 16 * lo;
    float4 *parts = (float4 *)(tiles + GROUPS * 2 * buffer) + group * WARPS * 2 * NT * WARP;
    uint32_t q_at = smem_address(smem_x), o_at = smem_address(d_o), tiles_at = smem_address(tiles + group * 2 * buffer);
    int jump = z.value - z.key - Dk, steps = Dk / 16, k0 = WARPS == 1 ? 0 : min(part * KT, steps), k1 = min(k0 + KT, steps);
    int both = LEARN && !value_at ? min(k1, Dv / 16) : 0, column = part * KT * 16;
    float dq[MT][2 * KT][4], low[NT][2], dot[NT][2], scale = c.scale * 1.4426950408889634f; // low, dot: of the lane's heads 8t + 2 quad + {0, 1}
    for (int m = 0; m < MT; m++)
        for (int t = 0; t < 2 * KT; t++)
            for (int e = 0; e < 4; e++) dq[m][t][e] = 0;
    #pragma unroll
    for (int t = 0; t < NT; t++)
        for (int e = 0; e < 2; e++) {
            int h = t * 8 + quad * 2 + e;
            low[t][e] = h < z.nh ? lse[head0 + h] * 1.4426950408889634f : INFINITY; // absent heads have no probability
            dot[t][e] = LEARN && h < z.nh ? delta[head0 + h] : 0;
        }
    gather_heads<MT * 16>(q_at, c.qrow + head0 * Dk, z.nh, Dk);
    if (LEARN) gather_heads<MT * 16>(o_at, d_oc + head0 * Dv, z.nh, Dv);
    copies_issued();
    if (group * GROUP_ROWS < n) gather_rows<WARPS>(tiles_at, rows, tile_place(place, group, n), part, c.R, Dk, jump, wide);
    copies_issued();
    int next = tile_place(place, group + GROUPS, n), slots = LEARN ? tile_place(slot, group, n) : -1; // for copies ahead, for this tile
    copies_done_but_last();
    __syncthreads();
    for (int tile = group, turn = 0; tile * GROUP_ROWS < n; tile += GROUPS, turn ^= 1) {
        copies_done();
        group_sync<WARPS>(group);
        int ahead = tile + GROUPS, j[2] = {tile * GROUP_ROWS + lane / 4, tile * GROUP_ROWS + lane / 4 + 8}, to[2]; // the lane's two places
        for (int r = 0; r < 2 && LEARN; r++) to[r] = __shfl_sync(0xffffffffu, slots, lane / 4 + r * 8);
        if (ahead * GROUP_ROWS < n) gather_rows<WARPS>(tiles_at + (uint32_t)((turn ^ 1) * buffer * 2), rows, next, part, c.R, Dk, jump, wide);
        copies_issued();
        next = tile_place(place, ahead + GROUPS, n);
        if (LEARN) slots = tile_place(slot, tile + GROUPS, n);
        uint32_t at = tiles_at + (uint32_t)(turn * buffer * 2);

        float x[2 * NT][4], (*p)[4] = x, (*ds)[4] = x + NT; // 16 rows by heads: logits, then probabilities; d_oc . v, then d_s
        for (int t = 0; t < 2 * NT; t++)
            for (int e = 0; e < 4; e++) x[t][e] = 0;
        uint32_t row_lane = at + (uint32_t)((lane % 16 * ld + lane / 16 * 8) * 2);
        uint32_t q_lane = q_at + (uint32_t)(((lane / 16 * 8 + lane % 8) * lq + lane / 8 % 2 * 8) * 2);
        uint32_t o_lane = o_at + (uint32_t)(((lane / 16 * 8 + lane % 8) * lo + lane / 8 % 2 * 8) * 2);
        auto product = [&](float (*sum)[4], const uint32_t a[4], uint32_t heads, int pitch) { // sum += a times 16 channels of all heads
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                uint32_t b[4];
                ldmatrix(b, heads + (uint32_t)(m * 16 * pitch * 2));
                mma(sum[2 * m], a, b);
                mma(sum[2 * m + 1], a, b + 2);
            }
        };
        #pragma unroll 8
        for (int k = k0; k < both; k++) { // the value is the head of the key: one load for both
            uint32_t a[4];
            ldmatrix(a, row_lane + (uint32_t)(k * 32));
            product(p, a, q_lane + (uint32_t)(k * 32), lq);
            product(ds, a, o_lane + (uint32_t)(k * 32), lo);
        }
        #pragma unroll 8
        for (int k = max(k0, both); k < k1; k++) {
            uint32_t a[4];
            ldmatrix(a, row_lane + (uint32_t)(k * 32));
            product(p, a, q_lane + (uint32_t)(k * 32), lq);
        }
        #pragma unroll 8
        for (int k = part * VT; k < min((part + 1) * VT, Dv / 16) && LEARN && value_at; k++) {
            uint32_t a[4];
            ldmatrix(a, row_lane + (uint32_t)((value_at + k * 16) * 2));
            product(ds, a, o_lane + (uint32_t)(k * 32), lo);
        }
        if (WARPS > 1) add_parts<WARPS, LEARN ? 2 * NT : NT>(x, parts, group, part);
        float all[2] = {0, 0};
        #pragma unroll
        for (int t = 0; t < NT; t++)
            for (int e = 0; e < 4; e++) {
                float v = exp2_fast(p[t][e] * scale - low[t][e % 2]);
                p[t][e] = j[e / 2] < n ? v : 0;
                ds[t][e] = p[t][e] * (ds[t][e] - dot[t][e % 2]) * c.scale;
                all[e / 2] += p[t][e];
            }
        for (int r = 0; r < 2 && mass; r++) {
            all[r] += __shfl_xor_sync(0xffffffffu, all[r], 1);
            all[r] += __shfl_xor_sync(0xffffffffu, all[r], 2);
            if (part == 0 && quad == 0 && j[r] < n) {
                float *sum = mass + (int64_t)blockIdx.x * z.stride + j[r];
                *sum = first_heads ? all[r] : *sum + all[r];
            }
        }
        if constexpr (LEARN) {
            uint32_t ps[MT][4], g[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++)
                for (int e = 0; e < 4; e++) {
                    ps[m][e] = pack(p[2 * m + e / 2][e % 2 * 2], p[2 * m + e / 2][e % 2 * 2 + 1]);
                    g[m][e] = pack(ds[2 * m + e / 2][e % 2 * 2], ds[2 * m + e / 2][e % 2 * 2 + 1]);
                }
            // What the 16 rows receive: d_s^T q to the keys, p^T d_o to the values. 32 columns at a time, two of each 8 in a lane; the four lanes of a
            // quad exchange them, so that each has 8 columns in a row, and writes 16 bytes of the quad's 64.
            uint32_t q_cols = q_at + (uint32_t)((lane % 16 * lq + lane / 16 * 8) * 2), o_cols = o_at + (uint32_t)((lane % 16 * lo + lane / 16 * 8) * 2);
            floatX *out[2];
            for (int r = 0; r < 2; r++) out[r] = partial + (int64_t)max(to[r], 0) * wide + quad * 8;
            auto receive = [&](int first, int keys, int values) { // a key may end in the middle
                float y[4][4];
                for (int t = 0; t < 4; t++)
                    for (int e = 0; e < 4; e++) y[t][e] = 0;
                #pragma unroll
                for (int x = 0; x < 2 * MT; x++) {
                    int half = x / MT, m = x % MT, col = first + half * 16;
                    uint32_t b[4];
                    if (keys && (values || col < Dk)) {
                        ldmatrix_trans(b, q_cols + (uint32_t)((m * 16 * lq + col) * 2));
                        mma(y[2 * half], g[m], b);
                        mma(y[2 * half + 1], g[m], b + 2);
                    }
                    if (values) {
                        ldmatrix_trans(b, o_cols + (uint32_t)((m * 16 * lo + col - value_at) * 2));
                        mma(y[2 * half], ps[m], b);
                        mma(y[2 * half + 1], ps[m], b + 2);
                    }
                }
                for (int r = 0; r < 2; r++) {
                    uint32_t v[4];
                    for (int t = 0; t < 4; t++) v[t] = pack(y[t][2 * r], y[t][2 * r + 1]);
                    quad_transpose(v);
                    store_16(out[r] + first, v, to[r] >= 0 && (values || first + quad * 8 < Dk));
                }
            };
            int shared = value_at ? 0 : Dv; // columns that are both
            #pragma unroll 2
            for (int first = part * 32; first < shared; first += WARPS * 32) receive(first, 1, 1);
            #pragma unroll 2
            for (int first = shared + part * 32; first < Dk; first += WARPS * 32) receive(first, 1, 0);
            #pragma unroll 2
            for (int first = value_at + part * 32; first < wide && value_at; first += WARPS * 32) receive(first, 0, 1);
            // d_q [heads, the warp's columns] += d_s [heads, 16 rows] k [16 rows, columns]
            uint32_t columns = at + (uint32_t)((lane % 16 * ld + column + lane / 16 * 8) * 2);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                uint32_t turned[4] = {transposed(g[m][0]), transposed(g[m][2]), transposed(g[m][1]), transposed(g[m][3])};
                for (int e = 0; e < 4; e++) g[m][e] = turned[e];
            }
            #pragma unroll
            for (int t = 0; t < KT; t++) {
                if (!ALL_K && column + t * 16 >= Dk) break;
                uint32_t b[4];
                ldmatrix_trans(b, columns + (uint32_t)(t * 32));
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma(dq[m][2 * t], g[m], b);
                    mma(dq[m][2 * t + 1], g[m], b + 2);
                }
            }
        }
    }
    if constexpr (LEARN)
        #pragma unroll
        for (int m = 0; m < MT; m++)
            merge_groups<GROUPS, KT>(d_qrow + (head0 + m * 16) * Dk, dq[m], (float *)tiles, buffer, group, column, min(16, z.nh - m * 16), Dk);
}

// slot_of[pair] = its rank among the sorted pairs; start[x] = the first pair of row x.
__global__ static void ranks_kernel(const uint32_t *key, const uint32_t *pair, int32_t *slot_of, int32_t *start, int rows, int n) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (x < n) slot_of[pair[x]] = x;
    if (x <= rows) start[x] = gpu_first_pair(key, n, x);
}
// G_.slot_of and G_.list_start: ranks of the pairs (query, slot) of a chunk by what stands in values (n, k), rows of each sequence.
static void gpu_ranks(const int32_t *values, int i0, int n, int k, int T, int rows, int sequences) {
    int pairs = n * k, all = gpu_sort_pairs(values, i0, n, k, T, rows, sequences);
    ranks_kernel<<<blocks_for(max64(pairs, all + 1), BLOCK), BLOCK, 0, stream>>>(G_.pair_key2, G_.pair2, G_.slot_of, G_.list_start, all, pairs);
}

// out[row] += sum of the row's partial rows, width wide, in the order of the pairs. Columns from split on go to the second
// place (keys and values of a group). A warp a row; a block where many chose it.
enum { FEW_PAIRS = 64, SUM_WARPS = BLOCK / WARP };
__global__ static void rows_sum_kernel(float *out, int64_t ld, int first, int split, int second, const floatX *partial, const int32_t *start, int wide, int rows) {
    __shared__ float sums[BLOCK * 8];
    int parts = wide / 8, groups = BLOCK / parts, group = (int)threadIdx.x / parts, part = (int)threadIdx.x % parts, row0 = (int)blockIdx.x * SUM_WARPS;
    int row = row0 + (int)threadIdx.x / WARP, n = row < rows ? start[row + 1] - start[row] : 0;
    for (int p = threadIdx.x % WARP; p < parts && n > 0 && n <= FEW_PAIRS; p += WARP) {
        float v[8], x[8], *to = out + row * ld + (p * 8 < split ? first + p * 8 : second + p * 8 - split);
        load<8>(v, to);
        #pragma unroll 4
        for (int r = start[row]; r < start[row] + n; r++) {
            load<8>(x, partial + (int64_t)r * wide + p * 8);
            #pragma unroll
            for (int e = 0; e < 8; e++) v[e] += x[e];
        }
        store<8>(to, v);
    }
    for (row = row0; row < min(row0 + SUM_WARPS, rows); row++) {
        int from = start[row], to = start[row + 1];
        if (to - from <= FEW_PAIRS) continue;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, x[8];
        __syncthreads();
        if (group < groups) {
            #pragma unroll 4
            for (int r = from + group; r < to; r += groups) {
                load<8>(x, partial + (int64_t)r * wide + part * 8);
                #pragma unroll
                for (int e = 0; e < 8; e++) v[e] += x[e];
            }
            for (int e = 0; e < 8; e++) sums[group * wide + part * 8 + e] = v[e];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < wide; i += BLOCK) {
            float total = 0;
            for (int u = 0; u < groups; u++) total += sums[u * wide + i];
            out[row * ld + (i < split ? first + i : second + i - split)] += total;
        }
    }
}
static void gpu_rows_sum(float *out, int64_t ld, int first, int split, int second, int wide, int64_t rows) {
    rows_sum_kernel<<<blocks_for(rows, SUM_WARPS), BLOCK, 0, stream>>>(out, ld, first, split, second, G_.partial_rows, G_.list_start, wide, (int)rows);
}

// ---- the indexer's KL over the chosen candidates

enum { KL_THREADS = 128, KL_TILE = 64 };
typedef struct { const float *mass; float *row_kl, *d_w, *d_q, scale, teachers; } Teach; // mass: (queries, k) of the teacher on each chosen slot

// score [n] becomes dI = scale (softmax(score) - p), p = mass / total; returns the KL to all threads of the block. The caller puts a
// barrier between its writes of score and this, and between this and reads of dI by other threads. Logarithms, never a ratio: softmax may be 0.
__device__ static float scores_to_gradients(float *score, const float *mass, int n, float total, float scale, float *shared) {
    float top = -INFINITY, sum = 0, kl = 0;
    for (int j = threadIdx.x; j < n; j += blockDim.x) top = fmaxf(top, score[j]);
    top = block_max(top, shared);
    for (int j = threadIdx.x; j < n; j += blockDim.x) sum += expf(score[j] - top);
    float log_sum = logf(block_sum(sum, shared));
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        float p = mass[j] / total, log_soft = score[j] - top - log_sum;
        if (p > 0) kl += p * (logf(p) - log_soft);
        score[j] = scale * (expf(log_soft) - p);
    }
    return block_sum(kl, shared);
}

// Chosen slots of a query and the sum of their mass, to all threads of the block. chosen [k] gets the candidates.
__device__ static int slots_of_query(const int32_t *sel, const float *mass, int k, int32_t *chosen, float *total, float *shared) {
    float n = 0, sum = 0; // at most 4096 slots: exact in float
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        int e = sel[j];
        chosen[j] = e;
        if (e >= 0) {
            n += 1;
            sum += mass[j];
        }
    }
    n = block_sum(n, shared);
    *total = block_sum(sum, shared);
    return (int)n;
}

// Byte offset of a 16-byte chunk in a tile of rows of ROW bytes (32, 64, 128 or 256).
template <int ROW> __device__ static uint32_t swizzle(int row, int chunk) {
    constexpr int rows_a_line = ROW < 128 ? 128 / ROW : 1, chunks = ROW < 128 ? ROW / 16 : 8;
    return (uint32_t)(row * ROW + (chunk ^ (row / rows_a_line & (chunks - 1))) * 16);
}

// Key rows chosen[first..first+64) to shared memory; zeros behind slot n.
template <int DI> __device__ static void gather_tile(uint32_t to, const floatX *keys, const int32_t *chosen, int first, int n) {
    #pragma unroll
    for (int u = 0; u < KL_TILE * (DI / 8) / KL_THREADS; u++) {
        int x = (int)threadIdx.x + u * KL_THREADS, row = x / (DI / 8), chunk = x % (DI / 8), take = first + row < n;
        const floatX *from = keys + (take ? (int64_t)chosen[first + row] * DI + chunk * 8 : 0);
        copy_16(to + swizzle<DI * 2>(row, chunk), from, take);
    }
}

// Dynamic shared memory in bytes: two key tiles, Q, d_X of a tile, scores, candidates.
static size_t indexer_kl_bytes(int HP, int DI, int k) {
    size_t slots = (size_t)(k + KL_TILE - 1) / KL_TILE * KL_TILE, heads = HP < 16 ? 16 : (size_t)HP;
    return 2 * KL_TILE * (size_t)DI * 2 + heads * (size_t)DI * 2 + KL_TILE * heads * 2 + slots * 8;
}

// The indexer's KL of query i0 + blockIdx.x over its chosen candidates (see indexer_kl() in train_cpu.c), and with LEARN its
// gradients: y.d_q, y.d_w added to; what each chosen key receives goes to rows, DI wide, at the place slot_of says.
// Sweep 1 takes X^T = K Q^T (16 keys a warp) and keeps only the scores; sweep 2 takes X again: the same instructions
// give the same bits, so the mask [X > 0] is that of the loss. The accumulators of X^T have, lane for lane, the layout of the left operand
// of d_K = d_X^T Q. The other product, d_Q += d_X K, sums over all keys, so d_X goes through shared memory and each
// warp owns DI / 4 columns. Rows in shared memory are swizzled: eight neighbours at one chunk touch all banks.
// HP: heads padded to 8, 16, 32 or 64. slot_of, rows and y.mass belong to the chunk.
template <int HP, int DI, int LEARN> __global__ static void __launch_bounds__(KL_THREADS, HP * DI >= 4096 ? (HP == 64 ? 2 : 3) : HP == 64 ? 3 : 4)
indexer_kl_kernel(Core c, Teach y, const int32_t *slot_of, floatX *rows, int i0) {
    constexpr int NT = HP / 8, HQ = HP < 16 ? 16 : HP, MT = HQ / 16, DT = DI / 32; // tiles of 8 heads, of 16 heads, of 8 columns a warp
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ __align__(16) float shared[32], weight[HP], d_weight[KL_THREADS / 32][HP];
    int slots = (c.k + KL_TILE - 1) / KL_TILE * KL_TILE, tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, quad = lane % 4, hidden;
    unsigned char *q_tile = smem + 2 * KL_TILE * DI * 2, *g_tile = q_tile + HQ * DI * 2;
    float *score = (float *)(g_tile + KL_TILE * HQ * 2), total;
    int32_t *chosen = (int32_t *)(score + slots);
    uint32_t key_at = smem_address(smem), q_at = smem_address(q_tile), g_at = smem_address(g_tile);
    int64_t i = i0 + (int64_t)blockIdx.x, base = i / c.T * c.n_cand;
    const floatX *keys = c.k_index + base * DI, *q = c.q_index + i * c.HI * DI;
    const float *mass = y.mass + (int64_t)blockIdx.x * c.k;
    const int32_t *slot_of_i = slot_of + (int64_t)blockIdx.x * c.k;

    int n = slots_of_query(c.sel + i * c.k, mass, c.k, chosen, &total, shared);
    if (n == 0 || total <= 0) { // no loss; but its rows are in the list that will be summed
        for (int x = tid; x < n * (DI / 4) && LEARN; x += KL_THREADS) *(uint2 *)(rows + (int64_t)slot_of_i[x / (DI / 4)] * DI + x % (DI / 4) * 4) = make_uint2(0, 0);
        return;
    }
    for (int x = tid; x < HQ * (DI / 8); x += KL_THREADS) {
        int h = x / (DI / 8), chunk = x % (DI / 8);
        copy_16(q_at + swizzle<DI * 2>(h, chunk), h < c.HI ? q + h * DI + chunk * 8 : q, h < c.HI);
    }
    if (tid < HP) weight[tid] = tid < c.HI ? c.w_index[i * c.HI + tid] : 0;
    if (HP < 16 && tid < KL_TILE) *(uint4 *)(g_tile + swizzle<HQ * 2>(tid, 1)) = make_uint4(0, 0, 0, 0); // heads 8..15 that nobody has
    for (int j = n + tid; j < slots; j += KL_THREADS) score[j] = 0;                                     // dI behind the last slot

    int tiles = (n + KL_TILE - 1) / KL_TILE, steps = LEARN ? 2 * tiles : tiles;
    float dq[MT][DT][4], dw[NT][2];
    for (int m = 0; m < MT; m++)
        for (int t = 0; t < DT; t++)
            for (int e = 0; e < 4; e++) dq[m][t][e] = 0;
    for (int t = 0; t < NT; t++) dw[t][0] = dw[t][1] = 0;

    gather_tile<DI>(key_at, keys, chosen, 0, n);
    copies_issued();
    for (int step = 0;; step++) {
        // This barrier shows tile "step" to all warps, and says that all are done with the other buffer and with d_X of the step before.
        copies_done();
        __syncthreads();
        int learn = step >= tiles, tile = learn ? step - tiles : step, next = step + 1 < tiles ? step + 1 : step + 1 - tiles;
        if (step + 1 < steps) gather_tile<DI>(key_at + (step + 1) % 2 * (KL_TILE * DI * 2), keys, chosen, next * KL_TILE, n);
        copies_issued();
        if (step == tiles) {
            float kl = scores_to_gradients(score, mass, n, total, y.scale, shared);
            if (tid == 0) y.row_kl[i] += kl / y.teachers;
            __syncthreads();
        }
        if (step == steps) break;
        // Some fifty shared-memory addresses depend on the lane alone. The compiler would keep them all in registers over the loop, and spill;
        // a thread number that it cannot see through makes it compute them where they are used.
        asm volatile("mov.b32 %0, %1;" : "=r"(hidden) : "r"(tid));
        lane = hidden % 32, warp = hidden / 32, quad = hidden % 4;
        uint32_t tile_at = key_at + step % 2 * (KL_TILE * DI * 2);
        int row = warp * 16 + lane / 4, j0 = tile * KL_TILE + row, j1 = j0 + 8, at0 = 0, at1 = 0; // the lane's two slots, and where d_k of them goes
        if (LEARN && learn) {
            if (j0 < n) at0 = slot_of_i[j0];
            if (j1 < n) at1 = slot_of_i[j1];
        }

        // X^T of the warp's 16 keys: x[t] = keys (lane/4, +8) by heads 8t + 2 quad + {0,1}
        float x[NT][4];
        for (int t = 0; t < NT; t++)
            for (int e = 0; e < 4; e++) x[t][e] = 0;
        #pragma unroll
        for (int s = 0; s < DI / 32; s++) {
            uint32_t a[2][4], b[4];
            ldmatrix(a[0], tile_at + swizzle<DI * 2>(warp * 16 + lane % 16, 4 * s + lane / 16));
            ldmatrix(a[1], tile_at + swizzle<DI * 2>(warp * 16 + lane % 16, 4 * s + 2 + lane / 16));
            #pragma unroll
            for (int t = 0; t < NT; t++) {
                ldmatrix(b, q_at + swizzle<DI * 2>(t * 8 + lane % 8, 4 * s + lane / 8));
                mma(x[t], a[0], b);
                mma(x[t], a[1], b + 2);
            }
        }
        if (!learn) {
            float s0 = 0, s1 = 0;
            #pragma unroll
            for (int t = 0; t < NT; t++) {
                float2 w = *(float2 *)(weight + t * 8 + quad * 2);
                s0 += w.x * fmaxf(x[t][0], 0.0f) + w.y * fmaxf(x[t][1], 0.0f);
                s1 += w.x * fmaxf(x[t][2], 0.0f) + w.y * fmaxf(x[t][3], 0.0f);
            }
            for (int o = 1; o < 4; o *= 2) { // the four lanes of a quad hold different heads
                s0 += __shfl_xor_sync(0xffffffffu, s0, o);
                s1 += __shfl_xor_sync(0xffffffffu, s1, o);
            }
            if (quad == 0 && j0 < n) score[j0] = s0;
            if (quad == 0 && j1 < n) score[j1] = s1;
            continue;
        }
        if (!LEARN) continue;

        // d_X^T, in floatX: to shared memory for d_Q, and in registers as the left operand of d_K
        uint32_t g[MT][4];
        float g0 = score[j0], g1 = score[j1];
        if (HP < 16) g[0][2] = g[0][3] = 0;
        #pragma unroll
        for (int t = 0; t < NT; t++) {
            float2 w = *(float2 *)(weight + t * 8 + quad * 2);
            dw[t][0] += g0 * fmaxf(x[t][0], 0.0f) + g1 * fmaxf(x[t][2], 0.0f);
            dw[t][1] += g0 * fmaxf(x[t][1], 0.0f) + g1 * fmaxf(x[t][3], 0.0f);
            uint32_t lo = pack(x[t][0] > 0 ? g0 * w.x : 0, x[t][1] > 0 ? g0 * w.y : 0);
            uint32_t hi = pack(x[t][2] > 0 ? g1 * w.x : 0, x[t][3] > 0 ? g1 * w.y : 0);
            *(uint32_t *)(g_tile + swizzle<HQ * 2>(row, t) + quad * 4) = lo;
            *(uint32_t *)(g_tile + swizzle<HQ * 2>(row + 8, t) + quad * 4) = hi;
            g[t / 2][t % 2 * 2] = lo;
            g[t / 2][t % 2 * 2 + 1] = hi;
        }

        // d_K rows of the warp's 16 keys, 16 columns at a time. A lane has two columns of each half; neighbours swap, so that the even lane gets
        // four of the first half and the odd lane four of the second: 16-byte writes, 64 bytes in a row from the four lanes of a quad.
        #pragma unroll 2
        for (int t = 0; t < DI / 16; t++) {
            float y[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                uint32_t b[4];
                ldmatrix_trans(b, q_at + swizzle<DI * 2>(m * 16 + lane % 16, 2 * t + lane / 16));
                mma(y[0], g[m], b);
                mma(y[1], g[m], b + 2);
            }
            int odd = lane & 1, column = t * 16 + odd * 8 + quad / 2 * 4;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float *own = y[0] + 2 * half, *other = y[1] + 2 * half;
                float u = __shfl_xor_sync(0xffffffffu, odd ? own[0] : other[0], 1), v = __shfl_xor_sync(0xffffffffu, odd ? own[1] : other[1], 1);
                float4 four = odd ? make_float4(u, v, other[0], other[1]) : make_float4(own[0], own[1], u, v);
                if ((half ? j1 : j0) >= n) continue;
                int64_t at = half ? at1 : at0;
                *(uint2 *)(rows + at * DI + column) = make_uint2(pack(four.x, four.y), pack(four.z, four.w));
            }
        }

        // d_Q[heads, the warp's columns] += d_X [heads, 64 keys] K [64 keys, columns]; both operands lie key-major: transposed loads
        __syncthreads();
        #pragma unroll
        for (int s = 0; s < KL_TILE / 32; s++) {
            uint32_t b[DT][4];
            #pragma unroll
            for (int t = 0; t < DT; t++) ldmatrix_trans(b[t], tile_at + swizzle<DI * 2>(s * 32 + lane, warp * DT + t));
            #pragma unroll
            for (int v = 0; v < 2; v++)
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    uint32_t a[4];
                    ldmatrix_trans(a, g_at + swizzle<HQ * 2>(s * 32 + v * 16 + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
                    #pragma unroll
                    for (int t = 0; t < DT; t++) mma(dq[m][t], a, b[t] + 2 * v);
                }
        }
    }
    if constexpr (LEARN) {
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int t = 0; t < DT; t++) {
                int h = m * 16 + lane / 4;
                float2 *to = (float2 *)(y.d_q + (i * c.HI + h) * DI + (warp * DT + t) * 8 + quad * 2);
                if (h < c.HI) *to = make_float2(to->x + dq[m][t][0], to->y + dq[m][t][1]);
                if (h + 8 < c.HI) to[4 * DI] = make_float2(to[4 * DI].x + dq[m][t][2], to[4 * DI].y + dq[m][t][3]);
            }
        #pragma unroll
        for (int t = 0; t < NT; t++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                float v = dw[t][e]; // lanes 4 apart hold other keys of the same heads
                for (int o = 4; o < 32; o *= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
                if (lane < 4) d_weight[warp][t * 8 + quad * 2 + e] = v;
            }
        __syncthreads();
        if (tid < c.HI) {
            float v = 0;
            for (int u = 0; u < KL_THREADS / 32; u++) v += d_weight[u][tid];
            y.d_w[i * c.HI + tid] += v;
        }
    }
}

// Bytes of shared memory of a block that takes 16 MT heads: q, with "learn" d_oc, the tiles of its groups, the parts of sums.
static size_t sparse_bytes(const Layer *l, int wide, int MT, int learn, int backward) {
    int warps = block_warps(MT, (int)l->Dk), ways = group_warps(MT, (int)l->Dk), heads = MT * 16;
    int64_t values = heads * (l->Dk + PAD) + (learn ? heads * (l->Dv + PAD) : 0) + warps / ways * 2 * GROUP_ROWS * (wide + PAD);
    return (size_t)values * sizeof(floatX) + (ways > 1 ? (size_t)(warps * MT * 2 * (backward ? 2 : 1) * WARP) * sizeof(float4) : 0);
}
static int share_width(const Layer *l) { return (int)(l->G == 1 && l->v_off == 0 ? l->Dk : l->Dk + l->Dv); }
enum { SHARED_BYTES = 220 * 1024 }; // of a block, at most

// Whether the kernels have instances for the layer's sizes.
static int fast_core(const Model *g, const Layer *l) {
    const Config *c = &g->c;
    int wide = share_width(l), teach = kl_teachers(g, l) > 0;
    int sizes = l->Dk % (wide > l->Dk ? 32 : 16) == 0 && l->Dv % 32 == 0 && l->Dk <= 576 && l->Dv <= l->Dk && l->R % 8 == 0 && l->v_off % 8 == 0 && sparse_bytes(l, wide, 1, 1, 1) <= SHARED_BYTES;
    int index = !teach || (!attends_to_all(g, l) && (c->DI == 32 || c->DI == 64 || c->DI == 128) && indexer_kl_bytes(64, (int)c->DI, (int)c->topk) < 220 * 1024);
    return sizes && index;
}

// Slots of a query in the support of a layer, and queries of a chunk.
static int64_t fast_stride(const Model *g, const Layer *l) { return is_mla(l->letter) && !attends_to_all(g, l) ? g->c.topk : layer_support(g, l, attends_to_all(g, l)); }
static int64_t fast_queries(const Model *g, const Layer *l) {
    int64_t values = fast_stride(g, l) * max64(share_width(l), l->source >= 0 ? g->c.DI : 0); // partial rows of a query
    int64_t most = max64((int64_t)1 << 29, min64((int64_t)1 << 31, g->N * values / 128)); // each chunk reads and writes all of d_rows: not too many of them
    return max64(1, min64(g->N, most / values));
}

// Heads that a block takes, in 16: two where the heads of a KV row group are more than 16, as each launch gathers the rows again.
static int head_tiles(const Model *g, const Layer *l) { return g->c.H / l->G > 16 && sparse_bytes(l, share_width(l), 2, 1, 1) <= SHARED_BYTES ? 2 : 1; }

// The heads of a KV row group that one launch takes, from h0 on.
static Share share_of(const Model *g, const Layer *l, int64_t h0, const int32_t *place) {
    Share z;
    int64_t hg = g->c.H / l->G, group = h0 / hg, inside = share_width(l) == l->Dk;
    z.h0 = (int)h0;
    z.nh = (int)min64(16 * head_tiles(g, l), (group + 1) * hg - h0);
    z.key = (int)(group * l->Dk);
    z.value = (int)(l->v_off + group * l->Dv);
    z.wide = share_width(l);
    z.value_at = inside ? 0 : (int)l->Dk;
    z.stride = (int)fast_stride(g, l);
    z.place = place;
    return z;
}

// KV rows of the supports of queries i0 .. i0 + n: where candidates are rows, the selection itself.
static const int32_t *fast_places(const Core &c, const Layer *l, int i0, int n) {
    if (is_mla(l->letter) && !c.all) return c.sel + (int64_t)i0 * c.k;
    place_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.place, i0);
    return G_.place;
}

template <int MT, int DK, int DV, int WIDE> static void launch_forward(const Core &c, const Layer *l, const Share &z, int i0, int n) {
    size_t bytes = sparse_bytes(l, z.wide, MT, 0, 0);
    CUDA_CHECK(cudaFuncSetAttribute(sparse_forward_kernel<MT, DK, DV, WIDE>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    sparse_forward_kernel<MT, DK, DV, WIDE><<<(unsigned)n, block_warps(MT, DK) * WARP, bytes, stream>>>(c, z, X(l->oc), l->lse, i0);
}
template <int MT, int DK, int DV, int WIDE, int LEARN>
static void launch_backward(const Core &c, const Layer *l, const Share &z, floatX *d_qrow, floatX *partial, float *mass, const floatX *d_oc, int i0, int n) {
    size_t bytes = sparse_bytes(l, z.wide, MT, LEARN, 1);
    CUDA_CHECK(cudaFuncSetAttribute(sparse_backward_kernel<MT, DK, DV, WIDE, LEARN>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    sparse_backward_kernel<MT, DK, DV, WIDE, LEARN>
        <<<(unsigned)n, block_warps(MT, DK) * WARP, bytes, stream>>>(c, z, d_qrow, partial, G_.slot_of, mass, z.h0 == 0, d_oc, l->lse, G_.delta, i0);
}

// LAUNCH(MT, DK, DV, WIDE) of the first instance that takes the layer: one made for its sizes, or one for sizes up to its own.
#define FOR_SIZES(MT, LAUNCH)                                                                       \
    do {                                                                                            \
        if (c.Dk == 144 && c.Dv == 128 && z.wide == 144) LAUNCH(MT, 144, 128, 144); \
        else if (c.Dk == 288 && c.Dv == 256 && z.wide == 288) LAUNCH(MT, 288, 256, 288); \
        else if (c.Dk == 320 && c.Dv == 256 && z.wide == 320) LAUNCH(MT, 320, 256, 320); \
        else if (c.Dk == 576 && c.Dv == 512 && z.wide == 576) LAUNCH(MT, 576, 512, 576); \
        else if (c.Dk <= 160) LAUNCH(MT, 160, 160, 0);                                              \
        else if (c.Dk <= 320) LAUNCH(MT, 320, 320, 0);                                              \
        else LAUNCH(MT, 576, 576, 0);                                                               \
    } while (0)
static void gpu_sparse_forward(const Core &c, const Layer *l, const Share &z, int i0, int n) {
#define LAUNCH(MT, DK, DV, WIDE) launch_forward<MT, DK, DV, WIDE>(c, l, z, i0, n)
    if (z.nh > 16) FOR_SIZES(2, LAUNCH);
    else FOR_SIZES(1, LAUNCH);
#undef LAUNCH
}
// partial NULL: only the mass.
static void gpu_sparse_backward(const Core &c, const Layer *l, const Share &z, floatX *d_qrow, floatX *partial, float *mass, const floatX *d_oc, int i0, int n) {
#define LAUNCH(MT, DK, DV, WIDE)                                                                                 \
    (partial ? launch_backward<MT, DK, DV, WIDE, 1>(c, l, z, d_qrow, partial, mass, d_oc, i0, n)                 \
             : launch_backward<MT, DK, DV, WIDE, 0>(c, l, z, d_qrow, partial, mass, d_oc, i0, n))
    if (z.nh > 16) FOR_SIZES(2, LAUNCH);
    else FOR_SIZES(1, LAUNCH);
#undef LAUNCH
}

template <int HP, int DI> static void launch_kl(const Core &c, const Teach &y, int learn, int i0, int n) {
    size_t bytes = indexer_kl_bytes(HP, DI, c.k);
    if (learn) {
        CUDA_CHECK(cudaFuncSetAttribute(indexer_kl_kernel<HP, DI, 1>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        indexer_kl_kernel<HP, DI, 1><<<(unsigned)n, KL_THREADS, bytes, stream>>>(c, y, G_.slot_of, G_.partial_rows, i0);
    } else {
        CUDA_CHECK(cudaFuncSetAttribute(indexer_kl_kernel<HP, DI, 0>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        indexer_kl_kernel<HP, DI, 0><<<(unsigned)n, KL_THREADS, bytes, stream>>>(c, y, NULL, NULL, i0);
    }
}
template <int DI> static void launch_kl_heads(const Core &c, const Teach &y, int learn, int i0, int n) {
    if (c.HI <= 8) launch_kl<8, DI>(c, y, learn, i0, n);
    else if (c.HI <= 16) launch_kl<16, DI>(c, y, learn, i0, n);
    else if (c.HI <= 32) launch_kl<32, DI>(c, y, learn, i0, n);
    else launch_kl<64, DI>(c, y, learn, i0, n);
}

// mass[q, j] of the teacher on chosen candidate j, from the mass on every place of the support. One block a query.
__global__ static void teacher_mass_kernel(Core c, float *mass, const float *place_mass, int stride, int i0) {
    Span s = gpu_span(c, i0 + (int)blockIdx.x);
    for (int j = threadIdx.x; j < s.n_cand; j += blockDim.x) {
        float best = 0;
        for (int u = 0; u < c.unit; u++) best = fmaxf(best, place_mass[(int64_t)blockIdx.x * stride + s.first + j * c.unit + u]);
        mass[(int64_t)blockIdx.x * c.k + j] = best;
    }
}

// The KL of queries i0 .. i0 + n, whose mass by place stands in G_.mass; the ranks of the places are those of candidates
// where candidates are rows.
static void fast_indexer_kl(Model *g, const Layer *l, const Core &c, int learn, int i0, int n) {
    float teachers = (float)kl_teachers(g, l);
    Teach y = {G_.mass, g->row_kl, g->d_wi, g->d_qi, (float)g->kl_scale / teachers, teachers};
    if (c.n_cand == 0) return; // a row shorter than one pool
    int before = phase_begin(PHASE_KL);
    if (!is_mla(l->letter)) {
        teacher_mass_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.candidate_mass, G_.mass, c.support, i0);
        y.mass = G_.candidate_mass;
        if (learn) gpu_ranks(c.sel + (int64_t)i0 * c.k, i0, n, c.k, c.T, c.n_cand, (int)g->B);
    }
    if (c.DI == 32) launch_kl_heads<32>(c, y, learn, i0, n);
    else if (c.DI == 64) launch_kl_heads<64>(c, y, learn, i0, n);
    else launch_kl_heads<128>(c, y, learn, i0, n);
    if (learn) gpu_rows_sum(g->d_ki, c.DI, 0, c.DI, 0, c.DI, g->B * c.n_cand);
    phase_begin(before);
}

static void fast_forward(Model *g, Layer *l, int teach) {
    Core c = core_of(g, l);
    int chunk = (int)fast_queries(g, l), end = (int)(g->r0 + g->nr);
    for (int i0 = (int)g->r0, n; i0 < end; i0 += n) {
        n = min(chunk, end - i0);
        const int32_t *place = fast_places(c, l, i0, n);
        for (int h0 = 0; h0 < c.H;) {
            Share z = share_of(g, l, h0, place);
            gpu_sparse_forward(c, l, z, i0, n);
            h0 += z.nh;
        }
        for (int h0 = 0; h0 < c.H && teach;) {
            Share z = share_of(g, l, h0, place);
            gpu_sparse_backward(c, l, z, NULL, NULL, G_.mass, NULL, i0, n);
            h0 += z.nh;
        }
        if (teach) fast_indexer_kl(g, l, c, 0, i0, n);
    }
}

static void fast_backward(Model *g, Layer *l, int teach) {
    Core c = core_of(g, l);
    int chunk = (int)fast_queries(g, l);
    for (int i0 = 0, n; i0 < c.N; i0 += n) {
        n = min(chunk, c.N - i0);
        const int32_t *place = fast_places(c, l, i0, n);
        gpu_ranks(place, i0, n, (int)fast_stride(g, l), c.T, c.n_rows, (int)g->B);
        for (int h0 = 0; h0 < c.H;) {
            Share z = share_of(g, l, h0, place);
            gpu_sparse_backward(c, l, z, X(g->d_qrow), G_.partial_rows, teach ? G_.mass : NULL, X(g->d_oc), i0, n);
            gpu_rows_sum(g->d_rows, l->R, z.key, z.value_at ? c.Dk : z.wide, z.value, z.wide, g->B * l->n_rows);
            h0 += z.nh;
        }
        if (teach) fast_indexer_kl(g, l, c, 1, i0, n);
    }
}
#endif

// ---- dense attention with a key and a value for each head (bf16, wgmma: sm_90a)
// Causal, flash style (Dao 2023): no table in memory. q (N, H, nope | rope), kv (N, H, nope | v) by head, kr the rotated key that all heads
// share. 4 warps issue one product of 64 rows, whose operands come straight from shared memory; two blocks share a
// multiprocessor, so that one's softmax runs under the other's products. A matrix in shared memory is made of panels of
// 64 rows and 64 (or 32) channels: rows of 128 (64) bytes, whose 16-byte chunks are permuted within each group of 8 rows as
// the descriptor says. For q k' the channels are what is summed over, for p v the rows are: the transposed form, for which
// the same panel and descriptor serve, only the steps from one 16 to the next differ. Every output has one owner.
#ifndef PRECISION_FP32

typedef struct {
    int T, H, kr_ld;    // nope = v = 64
    const int32_t *doc; // (N) does not decrease within a sequence
    float scale;
} DenseAttention;

#define LOG2E 1.4426950408889634f
enum { TILE_ROWS = 64, QUERIES = 128, PANEL = TILE_ROWS * 128, WGMMA_THREADS = 256, GROUP_THREADS = 128 };

// 4 or 8 bytes from global to shared memory; zeros when not take.
template <int BYTES> __device__ static void copy_small(uint32_t to, const void *from, bool take) {
    int n = take ? BYTES : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(n) : "memory");
}

// Two neighbouring 8-column blocks of a product as the left operand of the next.
__device__ static void as_left(uint32_t a[4], const float lo[4], const float hi[4]) {
    a[0] = pack(lo[0], lo[1]);
    a[1] = pack(lo[2], lo[3]);
    a[2] = pack(hi[0], hi[1]);
    a[3] = pack(hi[2], hi[3]);
}

// scale times the channels n*8+2(l%4) and +1 of one row, from element e (0: row l/4, 2: row l/4+8) of each block; to: the row's first channel.
template <int N8> __device__ static void store_row(floatX *to, const float (*x)[4], int e, float scale) {
    #pragma unroll
    for (int n = 0; n < N8; n++) *(uint32_t *)(to + n * 8 + threadIdx.x % 4 * 2) = pack(x[n][e] * scale, x[n][e + 1] * scale);
}

// The rows of a warp within its sequence: first .. last (last < first: none), and where the documents of these two begin.
typedef struct { int first, last, doc_first, doc_last; } WarpRows;
__device__ static WarpRows warp_rows(DenseAttention c, int64_t base, int first, int n) {
    WarpRows w = {first, first < c.T ? min(first + n, c.T) - 1 : -1, 0, 0};
    if (first >= c.T) return w;
    w.doc_first = c.doc[base + first];
    w.doc_last = c.doc[base + w.last];
    return w;
}

// -INFINITY where the row of a logit does not see its key; first: the warp's first row, k0: the first key.
__device__ static void mask_logits(float (&s)[8][4], DenseAttention c, int64_t base, int first, int k0) {
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int t = first + e * 8 + (int)threadIdx.x % 32 / 4, doc = c.doc[base + min(t, c.T - 1)];
        #pragma unroll
        for (int n = 0; n < 8; n++)
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                int key = k0 + n * 8 + (int)threadIdx.x % 4 * 2 + j;
                if (key > t || key < doc) s[n][2 * e + j] = -INFINITY;
            }
    }
}

// One row of logits s (element e and e+1 of each block) to exp(logit - top); the row's output so far shrinks with its sum when top rises.
__device__ static void online_softmax(float (&s)[8][4], float (&o)[8][4], float *top, float *sum, int e, float scale) {
    float rise = *top, part = 0;
    #pragma unroll
    for (int n = 0; n < 8; n++) rise = fmaxf(rise, fmaxf(s[n][e], s[n][e + 1]));
    rise = fmaxf(rise, __shfl_xor_sync(0xffffffffu, rise, 1));
    rise = fmaxf(rise, __shfl_xor_sync(0xffffffffu, rise, 2));
    float from = rise == -INFINITY ? 0 : rise * scale, keep = exp2_fast(*top * scale - from); // a row that has seen no key keeps zeros
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        s[n][e] = exp2_fast(s[n][e] * scale - from);
        s[n][e + 1] = exp2_fast(s[n][e + 1] * scale - from);
        part += s[n][e] + s[n][e + 1];
    }
    *top = rise;
    *sum = *sum * keep + part; // of this lane's columns; the four lanes of a row add up at the end
    #pragma unroll
    for (int n = 0; n < 8; n++) {
        o[n][e] *= keep;
        o[n][e + 1] *= keep;
    }
}
// Query t of the sequence at base: att and lse.
__device__ static void store_query(DenseAttention c, const float (&o)[8][4], float top, float sum, int e, int t, int64_t base, int h, floatX *att, float *lse) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (t >= c.T) return;
    int64_t ih = (base + t) * c.H + h;
    store_row<8>(att + ih * 64, o, e, 1 / sum);
    if (threadIdx.x % 4 == 0) lse[ih] = top * c.scale + logf(sum);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static void fence_async_proxy(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What a product reads or adds to must be in its registers before the fence: nothing says so to the compiler but this.
template <int N> __device__ static void in_registers(float (&c)[N][4]) {
    #pragma unroll
    for (int j = 0; j < N; j++) asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}
template <int N> __device__ static void in_registers(uint32_t (&a)[N][4]) {
    #pragma unroll
    for (int j = 0; j < N; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
}
// Products in flight write registers behind the compiler's back: what reads or reuses them must not move above the wait.
template <int N> __device__ static void wgmma_wait_all(float (&c)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    in_registers(c);
}
#define ROW4(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
// c [64, 64] += a [64, 16] b, a in registers, b 16 rows by 64 channels of a panel.
__device__ static void wgmma_rs(float (&c)[8][4], const uint32_t a[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                 "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : ROW4(c, 0), ROW4(c, 1), ROW4(c, 2), ROW4(c, 3), ROW4(c, 4), ROW4(c, 5), ROW4(c, 6), ROW4(c, 7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same with 32 columns.
__device__ static void wgmma_rs(float (&c)[4][4], const uint32_t a[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 1;"
                 : ROW4(c, 0), ROW4(c, 1), ROW4(c, 2), ROW4(c, 3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// c [64, 64] (+)= a b', both 64 rows by 16 channels of panels.
__device__ static void wgmma_ss(float (&c)[8][4], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                 "%32, %33, p, 1, 1, 0, 0;\n}"
                 : ROW4(c, 0), ROW4(c, 1), ROW4(c, 2), ROW4(c, 3), ROW4(c, 4), ROW4(c, 5), ROW4(c, 6), ROW4(c, 7) : "l"(a), "l"(b), "r"(accumulate));
}
#endif

// A panel of 64 or 32 channels: groups of 8 rows follow each other; swizzle of 128 or 64 bytes.
template <int CHANNELS> __device__ static uint64_t panel_descriptor(uint32_t at) {
    return (uint64_t)(at >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)CHANNELS << 32 | (CHANNELS == 64 ? 1ull : 2ull) << 62;
}
// CHANNELS of 64 rows into a panel; rows n and later become zeros. Bits 4.. of an address are xored with its bits 7.., as the descriptor's swizzle has it.
template <int CHANNELS, int THREADS> __device__ static void load_panel(uint32_t to, const floatX *from, int ld, int n) {
    enum { CHUNKS = CHANNELS / 8 };
    int x = (int)threadIdx.x % CHUNKS;
    #pragma unroll
    for (int p = 0; p < TILE_ROWS * CHUNKS / THREADS; p++) {
        int r = (int)threadIdx.x / CHUNKS + p * (THREADS / CHUNKS);
        uint32_t at = (uint32_t)(r * CHANNELS * 2 + x * 16);
        copy_16(to + (at ^ (at >> 7 & (CHUNKS - 1)) << 4), from + (int64_t)min(r, n - 1) * ld + x * 8, r < n);
    }
}
// Three panels, 64 rows of [64 | ROPE | 64] channels: a tile of keys with values, or of queries with d_att. b_ld: of the rope part.
template <int ROPE> __host__ __device__ static constexpr int panels_bytes(void) { return 2 * PANEL + TILE_ROWS * ROPE * 2; }
template <int ROPE, int THREADS> __device__ static void load_panels(uint32_t to, const floatX *a, int a_ld, const floatX *b, int b_ld, const floatX *d, int d_ld, int n) {
    load_panel<64, THREADS>(to, a, a_ld, n);
    load_panel<ROPE, THREADS>(to + 2 * PANEL, b, b_ld, n);
    load_panel<64, THREADS>(to + PANEL, d, d_ld, n);
}
__device__ static uint32_t aligned_smem(const void *smem) { return (smem_address(smem) + 1023) & ~1023u; } // as the swizzle needs it

template <int ROPE> static constexpr int forward_wgmma_bytes(void) { return 1024 + 2 * panels_bytes<ROPE>() + QUERIES * (64 + ROPE) * 2; }

// Grid: heads of the batch, times tiles of QUERIES queries, the last and longest first. ROPE 32 or 64.
template <int ROPE> __global__ __launch_bounds__(WGMMA_THREADS, 2)
static void attention_forward_kernel(DenseAttention c, const floatX *q, const floatX *kv, const floatX *kr, floatX *att, float *lse, int heads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum { D = 64 + ROPE, E = 128, OWN = PANEL + TILE_ROWS * ROPE * 2, STAGE = panels_bytes<ROPE>() };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, h = (int)blockIdx.x % heads % c.H;
    int q0 = ((int)(gridDim.x - 1 - blockIdx.x) / heads) * QUERIES;
    int64_t base = (int64_t)((int)blockIdx.x % heads / c.H) * c.T;
    uint32_t tiles = aligned_smem(smem), queries = tiles + 2 * STAGE, own = queries + warp / 4 * OWN; // of its group: [64 | ROPE] channels of 64 queries
    kv += (base * c.H + h) * E;
    kr += base * c.kr_ld;
    auto load_tile = [&](int k0, int stage) {
        const floatX *from = kv + (int64_t)k0 * c.H * E;
        load_panels<ROPE, WGMMA_THREADS>(tiles + stage * STAGE, from, c.H * E, kr + (int64_t)k0 * c.kr_ld, c.kr_ld, from + 64, c.H * E, c.T - k0);
    };
    int begin = c.doc[base + q0] / TILE_ROWS * TILE_ROWS, end = min(q0 + QUERIES, c.T);
    for (int g = 0; g < QUERIES / TILE_ROWS && q0 + g * TILE_ROWS < c.T; g++) {
        const floatX *from = q + ((base + q0 + g * TILE_ROWS) * c.H + h) * D;
        load_panel<64, WGMMA_THREADS>(queries + g * OWN, from, c.H * D, c.T - q0 - g * TILE_ROWS);
        load_panel<ROPE, WGMMA_THREADS>(queries + g * OWN + PANEL, from + 64, c.H * D, c.T - q0 - g * TILE_ROWS);
    }
    load_tile(begin, 0);
    copies_issued();
    WarpRows w = warp_rows(c, base, q0 + warp * 16, 16), group = warp_rows(c, base, q0 + warp / 4 * 64, 64); // a group decides as one what to skip
    float o[8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    float scale = c.scale * LOG2E;
    copies_done();
    fence_async_proxy();
    __syncthreads();
    for (int k0 = begin, stage = 0; k0 < end; k0 += TILE_ROWS, stage ^= 1) {
        int next = k0 + TILE_ROWS;
        if (next < end) load_tile(next, stage ^ 1);
        copies_issued();
        if (k0 <= group.last && next > group.doc_first) {
            uint32_t tile = tiles + stage * STAGE, p[TILE_ROWS / 16][4];
            float s[8][4];
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < 4; k++) wgmma_ss(s, panel_descriptor<64>(own + k * 32), panel_descriptor<64>(tile + k * 32), k > 0);
            #pragma unroll
            for (int k = 0; k < ROPE / 16; k++) wgmma_ss(s, panel_descriptor<ROPE>(own + PANEL + k * 32), panel_descriptor<ROPE>(tile + 2 * PANEL + k * 32), 1);
            wgmma_commit();
            wgmma_wait_all(s);
            if (next - 1 > w.first || k0 < w.doc_last) mask_logits(s, c, base, w.first, k0);
            #pragma unroll
            for (int e = 0; e < 2; e++) online_softmax(s, o, &top[e], &sum[e], 2 * e, scale);
            #pragma unroll
            for (int k = 0; k < TILE_ROWS / 16; k++) as_left(p[k], s[2 * k], s[2 * k + 1]);
            in_registers(o);
            in_registers(p);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < TILE_ROWS / 16; k++) wgmma_rs(o, p[k], panel_descriptor<64>(tile + PANEL + k * 2048));
            wgmma_commit();
            wgmma_wait_all(o);
        }
        copies_done();
        fence_async_proxy();
        __syncthreads();
    }
    #pragma unroll
    for (int e = 0; e < 2; e++) store_query(c, o, top[e], sum[e], 2 * e, w.first + e * 8 + lane / 4, base, h, att, lse);
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// s = own rows against tile rows over [64 | ROPE] channels, dp = the same over the last 64; waits for both.
template <int ROPE> __device__ static void panels_products(float (&s)[8][4], float (&dp)[8][4], uint32_t own, uint32_t tile) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < 4; k++) wgmma_ss(s, panel_descriptor<64>(own + k * 32), panel_descriptor<64>(tile + k * 32), k > 0);
    #pragma unroll
    for (int k = 0; k < ROPE / 16; k++) wgmma_ss(s, panel_descriptor<ROPE>(own + 2 * PANEL + k * 32), panel_descriptor<ROPE>(tile + 2 * PANEL + k * 32), 1);
    #pragma unroll
    for (int k = 0; k < 4; k++) wgmma_ss(dp, panel_descriptor<64>(own + PANEL + k * 32), panel_descriptor<64>(tile + PANEL + k * 32), k > 0);
    wgmma_commit();
    wgmma_wait_all(s);
    wgmma_wait_all(dp);
}
#endif

template <int ROPE> static constexpr int backward_q_wgmma_bytes(void) { return 1024 + 3 * panels_bytes<ROPE>(); }
template <int ROPE> static constexpr int backward_kv_wgmma_bytes(void) { return 1024 + 3 * panels_bytes<ROPE>() + 2 * TILE_ROWS * (int)(sizeof(float2) + sizeof(int)); }

// Grid: B*H * tiles of 64 queries, the last tiles first.
template <int ROPE> __global__ __launch_bounds__(GROUP_THREADS, ROPE == 32 ? 3 : 2)
static void attention_backward_q_kernel(DenseAttention c, const floatX *q, const floatX *kv, const floatX *kr, const floatX *d_att, const float2 *stat, floatX *d_q, int heads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum { D = 64 + ROPE, E = 128, STAGE = panels_bytes<ROPE>() };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, bh = (int)blockIdx.x % heads, h = bh % c.H;
    int q0 = ((int)(gridDim.x - 1 - blockIdx.x) / heads) * TILE_ROWS;
    int64_t base = (int64_t)(bh / c.H) * c.T, row = (base + q0) * c.H + h;
    uint32_t own = aligned_smem(smem), tiles = own + STAGE;
    kv += (base * c.H + h) * E;
    kr += base * c.kr_ld;
    auto load_tile = [&](int k0, int stage) {
        const floatX *from = kv + (int64_t)k0 * c.H * E;
        load_panels<ROPE, GROUP_THREADS>(tiles + stage * STAGE, from, c.H * E, kr + (int64_t)k0 * c.kr_ld, c.kr_ld, from + 64, c.H * E, c.T - k0);
    };
    int begin = c.doc[base + q0] / TILE_ROWS * TILE_ROWS, end = min(q0 + TILE_ROWS, c.T);
    load_panels<ROPE, GROUP_THREADS>(own, q + row * D, c.H * D, q + row * D + 64, c.H * D, d_att + row * 64, c.H * 64, c.T - q0);
    load_tile(begin, 0);
    copies_issued();
    WarpRows w = warp_rows(c, base, q0 + warp * 16, 16);
    float2 z[2];
    float dq[8][4] = {}, dr[ROPE / 8][4] = {}, scale = c.scale * LOG2E;
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int t = w.first + e * 8 + lane / 4;
        z[e] = t < c.T ? stat[(int64_t)bh * c.T + t] : make_float2(0, 0);
    }
    for (int k0 = begin, stage = 0; k0 < end; k0 += TILE_ROWS, stage ^= 1) {
        copies_done();
        fence_async_proxy();
        __syncthreads();
        if (k0 + TILE_ROWS < end) load_tile(k0 + TILE_ROWS, stage ^ 1);
        copies_issued();
        uint32_t tile = tiles + stage * STAGE, ds[TILE_ROWS / 16][4];
        float s[8][4], dp[8][4];
        panels_products<ROPE>(s, dp, own, tile);
        if (k0 + TILE_ROWS - 1 > w.first || k0 < w.doc_last) mask_logits(s, c, base, w.first, k0);
        #pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
            #pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = exp2_fast(s[n][e] * scale - z[e / 2].x) * (dp[n][e] - z[e / 2].y);
        #pragma unroll
        for (int k = 0; k < TILE_ROWS / 16; k++) as_left(ds[k], s[2 * k], s[2 * k + 1]);
        in_registers(dq);
        in_registers(dr);
        in_registers(ds);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < TILE_ROWS / 16; k++) {
            wgmma_rs(dq, ds[k], panel_descriptor<64>(tile + k * 2048));
            wgmma_rs(dr, ds[k], panel_descriptor<ROPE>(tile + 2 * PANEL + k * ROPE * 32));
        }
        wgmma_commit();
        wgmma_wait_all(dq);
        wgmma_wait_all(dr);
    }
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int t = w.first + e * 8 + lane / 4;
        if (t >= c.T) continue;
        store_row<8>(d_q + ((base + t) * c.H + h) * D, dq, 2 * e, c.scale);
        store_row<ROPE / 8>(d_q + ((base + t) * c.H + h) * D + 64, dr, 2 * e, c.scale);
    }
#endif
}

// Grid: heads of the batch, times tiles of keys, the first and longest first. share (N, H, ROPE): to the rotated key, by head.
template <int ROPE> __global__ __launch_bounds__(GROUP_THREADS, 2)
static void attention_backward_kv_kernel(DenseAttention c, const floatX *q, const floatX *kv, const floatX *kr, const floatX *d_att, const float2 *stat,
                                          floatX *d_kv, floatX *share, int heads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum { D = 64 + ROPE, E = 128, STAGE = panels_bytes<ROPE>() };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, bh = (int)blockIdx.x % heads, h = bh % c.H, k0 = (int)blockIdx.x / heads * TILE_ROWS;
    int64_t base = (int64_t)(bh / c.H) * c.T, row = (base + k0) * c.H + h;
    uint32_t own = aligned_smem(smem), tiles = own + STAGE;
    const float2 *tile_stat = (const float2 *)(smem + (own - smem_address(smem)) + 3 * STAGE); // [2][TILE_ROWS]
    const int *tile_doc = (const int *)(tile_stat + 2 * TILE_ROWS);                                 // [2][TILE_ROWS]
    const int32_t *doc = c.doc + base;
    q += (base * c.H + h) * D;
    d_att += (base * c.H + h) * 64;
    stat += (int64_t)bh * c.T;
    auto load_tile = [&](int q0, int stage) {
        const floatX *from = q + (int64_t)q0 * c.H * D;
        load_panels<ROPE, GROUP_THREADS>(tiles + stage * STAGE, from, c.H * D, from + 64, c.H * D, d_att + (int64_t)q0 * c.H * 64, c.H * 64, c.T - q0);
        int r = (int)threadIdx.x % TILE_ROWS, take = q0 + r < c.T, at = take ? q0 + r : q0;
        if (threadIdx.x < TILE_ROWS) copy_small<8>(smem_address(tile_stat + stage * TILE_ROWS + r), stat + at, take);
        else copy_small<4>(smem_address(tile_doc + stage * TILE_ROWS + r), doc + at, take);
    };
    load_panels<ROPE, GROUP_THREADS>(own, kv + row * E, c.H * E, kr + (base + k0) * c.kr_ld, c.kr_ld, kv + row * E + 64, c.H * E, c.T - k0);
    load_tile(k0, 0);
    copies_issued();
    int key = k0 + warp * 16 + lane / 4, last = min(k0 + TILE_ROWS, c.T) - 1; // the lane's keys are key and key+8
    int first_doc = k0 + TILE_ROWS < c.T ? doc[k0 + TILE_ROWS] : c.T;              // where the document of the next tile's first query begins
    float dk[8][4] = {}, dr[ROPE / 8][4] = {}, dv[8][4] = {}, scale = c.scale * LOG2E;
    for (int q0 = k0, stage = 0, more = 1; more; q0 += TILE_ROWS, stage ^= 1) {
        int next = q0 + TILE_ROWS;
        more = first_doc <= last;
        copies_done();
        fence_async_proxy();
        __syncthreads();
        if (more) {
            load_tile(next, stage ^ 1);
            first_doc = next + TILE_ROWS < c.T ? doc[next + TILE_ROWS] : c.T;
        }
        copies_issued();
        const int *docs = tile_doc + stage * TILE_ROWS;
        uint32_t tile = tiles + stage * STAGE, p[TILE_ROWS / 16][4], ds[TILE_ROWS / 16][4];
        float s[8][4], dp[8][4];
        panels_products<ROPE>(s, dp, own, tile);
        if (q0 == k0 || docs[min((int)TILE_ROWS, c.T - q0) - 1] > k0) {
            #pragma unroll
            for (int n = 0; n < TILE_ROWS / 8; n++)
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    int column = n * 8 + lane % 4 * 2 + e % 2, at = key + e / 2 * 8;
                    s[n][e] = (at > q0 + column) | (at < docs[column]) ? -INFINITY : s[n][e];
                }
        }
        #pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++) {
            float4 z = *(const float4 *)(tile_stat + stage * TILE_ROWS + n * 8 + lane % 4 * 2);
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = exp2_fast(s[n][e] * scale - (e % 2 ? z.z : z.x));
                dp[n][e] = s[n][e] * (dp[n][e] - (e % 2 ? z.w : z.y));
            }
        }
        #pragma unroll
        for (int k = 0; k < TILE_ROWS / 16; k++) {
            as_left(p[k], s[2 * k], s[2 * k + 1]);
            as_left(ds[k], dp[2 * k], dp[2 * k + 1]);
        }
        in_registers(dv);
        in_registers(dk);
        in_registers(dr);
        in_registers(p);
        in_registers(ds);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < TILE_ROWS / 16; k++) {
            wgmma_rs(dv, p[k], panel_descriptor<64>(tile + PANEL + k * 2048));
            wgmma_rs(dk, ds[k], panel_descriptor<64>(tile + k * 2048));
            wgmma_rs(dr, ds[k], panel_descriptor<ROPE>(tile + 2 * PANEL + k * ROPE * 32));
        }
        wgmma_commit();
        wgmma_wait_all(dv);
        wgmma_wait_all(dk);
        wgmma_wait_all(dr);
    }
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int at = key + e * 8;
        if (at >= c.T) continue;
        int64_t sh = (base + at) * c.H + h;
        store_row<8>(d_kv + sh * E, dk, 2 * e, c.scale);
        store_row<ROPE / 8>(share + sh * ROPE, dr, 2 * e, c.scale);
        store_row<8>(d_kv + sh * E + 64, dv, 2 * e, 1);
    }
#endif
}

// stat (B, H, T) = (lse log2(e), d_att . att) of every row and head, a head's rows side by side as its tiles read them. 8
// threads a row, 16 bytes each.
__global__ static void row_stat_kernel(DenseAttention c, const floatX *att, const floatX *d_att, const float *lse, float2 *stat, int64_t rows) {
    int64_t row = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 8;
    int take = row < rows, d = (int)threadIdx.x % 8 * 8;
    float sum = 0, a[8], b[8];
    if (take) {
        load<8>(a, att + row * 64 + d);
        load<8>(b, d_att + row * 64 + d);
        for (int j = 0; j < 8; j++) sum += a[j] * b[j];
    }
    for (int o = 4; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (!take || threadIdx.x % 8) return;
    int64_t i = row / c.H, h = row % c.H;
    stat[(i / c.T * c.H + h) * c.T + i % c.T] = make_float2(lse[row] * LOG2E, sum);
}

// d_kr (N, rope) = the sum over the heads of their shares (N, H, rope), in order.
__global__ static void key_rope_sum_kernel(DenseAttention c, const floatX *share, float *d_kr, int rope, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= n) return;
    const floatX *from = share + x / rope * c.H * rope + x % rope;
    float sum = 0;
    #pragma unroll 4
    for (int h = 0; h < c.H; h++) sum += (float)from[(int64_t)h * rope];
    d_kr[x] = sum;
}

template <int ROPE> static void launch_dense_forward(DenseAttention c, const floatX *q, const floatX *kv, const floatX *kr, floatX *att, float *lse, int64_t N) {
    int bytes = forward_wgmma_bytes<ROPE>(), heads = (int)(N / c.T) * c.H, tiles = (c.T + QUERIES - 1) / QUERIES;
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_kernel<ROPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_forward_kernel<ROPE><<<(unsigned)(heads * tiles), WGMMA_THREADS, (size_t)bytes, stream>>>(c, q, kv, kr, att, lse, heads);
}
template <int ROPE> static void launch_dense_backward(DenseAttention c, const floatX *q, const floatX *kv, const floatX *kr, const floatX *d_att, floatX *d_q, floatX *d_kv, int64_t N) {
    int bytes_q = backward_q_wgmma_bytes<ROPE>(), bytes_kv = backward_kv_wgmma_bytes<ROPE>(), heads = (int)(N / c.T) * c.H, tiles = (c.T + TILE_ROWS - 1) / TILE_ROWS;
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_q_kernel<ROPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_q));
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_kv_kernel<ROPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_kv));
    attention_backward_kv_kernel<ROPE><<<(unsigned)(heads * tiles), GROUP_THREADS, (size_t)bytes_kv, stream>>>(c, q, kv, kr, d_att, G_.stat, d_kv, G_.share, heads);
    attention_backward_q_kernel<ROPE><<<(unsigned)(heads * tiles), GROUP_THREADS, (size_t)bytes_q, stream>>>(c, q, kv, kr, d_att, G_.stat, d_q, heads);
}
static DenseAttention dense_of(const Model *g, const Layer *l) {
    DenseAttention c = {(int)g->T, (int)g->c.H, (int)l->R, g->doc, (float)l->scale};
    return c;
}
// Keys and values of each head from the latent; made again in backward, not kept. They cost fewer products than the
// shared row where everything is attended to: nope + rope + v channels a pair instead of 2 kv_lora + rope.
static void gpu_by_head_expand(const Model *g, const Layer *l) {
    const Config *c = &g->c;
    int64_t out = c->H * (c->nope + c->v_dim);
    gpu_matmul(G_.kv, out, (floatX *)NULL, X(l->rows), l->R, 1, weight(l->kv_b), 1, c->kv_lora, g->N, out, c->kv_lora);
}
// att and lse from q (rotated) and the KV rows.
static void gpu_by_head_forward(const Model *g, Layer *l) {
    gpu_by_head_expand(g, l);
    (g->c.rope == 32 ? launch_dense_forward<32> : launch_dense_forward<64>)(dense_of(g, l), X(l->q), G_.kv, X(l->rows) + g->c.kv_lora, X(l->att), l->lse, g->N);
}
// d_q, d_kv and d_kr from d_att.
static void gpu_by_head_backward(const Model *g, Layer *l) {
    DenseAttention c = dense_of(g, l);
    int64_t rows = g->N * g->c.H, n = g->N * g->c.rope;
    gpu_by_head_expand(g, l);
    row_stat_kernel<<<blocks_for(rows * 8, BLOCK), BLOCK, 0, stream>>>(c, X(l->att), X(g->d_att), l->lse, G_.stat, rows);
    (g->c.rope == 32 ? launch_dense_backward<32> : launch_dense_backward<64>)(c, X(l->q), G_.kv, X(l->rows) + g->c.kv_lora, X(g->d_att), X(g->d_q), G_.d_kv, g->N);
    key_rope_sum_kernel<<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(c, G_.share, G_.d_kr, (int)g->c.rope, n);
}
// Whether a layer runs so: F in training, on a card and with sizes that the kernels have.
static int by_head(const Model *g, const Layer *l) {
    const Config *c = &g->c;
    return l->letter == 'F' && g->training && G_.wgmma && c->nope == 64 && c->v_dim == 64 && (c->rope == 32 || c->rope == 64) && l->R % 8 == 0 && c->kv_lora % 8 == 0;
}
#else
static void gpu_by_head_forward(const Model *, Layer *) {}
static void gpu_by_head_backward(const Model *, Layer *) {}
static int by_head(const Model *, const Layer *) { return 0; }
#endif

// Which of the above a layer runs in the present stage. What its buffers hold depends on it: see by_head() in section 6.
enum { CORE_BY_HEAD, CORE_PRODUCTS, CORE_GATHERED, CORE_PLAIN };
static int core_path(const Model *g, const Layer *l) {
    return by_head(g, l) ? CORE_BY_HEAD : is_mla(l->letter) && attends_to_all(g, l) ? CORE_PRODUCTS : fast_core(g, l) ? CORE_GATHERED : CORE_PLAIN;
}

// The core of a layer: oc (by head: att) and lse from its queries and rows.
static void gpu_core_forward(Model *g, Layer *l) {
    int teach = !g->learning && g->training && kl_teachers(g, l), path = core_path(g, l), before = phase_begin(PHASE_FORWARD);
    if (path == CORE_BY_HEAD) gpu_by_head_forward(g, l);
    else if (path == CORE_PRODUCTS) gpu_dense_attention(g, l, teach, 0);
    else if (path == CORE_GATHERED) fast_forward(g, l, teach);
    else gpu_support_forward(g, l, teach);
    phase_begin(before);
}

// d_qrow, d_rows, d_sink from d_oc (by head: d_q, d_kv, d_kr from d_att); and the indexer's gradients.
static void gpu_core_backward(Model *g, Layer *l) {
    Core c = core_of(g, l);
    int teach = g->kl_scale != 0 && kl_teachers(g, l), path = core_path(g, l), before = phase_begin(PHASE_BACKWARD);
    if (path == CORE_BY_HEAD) {
        gpu_by_head_backward(g, l);
        phase_begin(before);
        return;
    }
    CUDA_CHECK(cudaMemsetAsync(g->d_rows, 0, (size_t)(g->B * l->n_rows * l->R) * sizeof(float), stream));
    delta_kernel<<<blocks_for((int64_t)c.N * c.H * WARP, BLOCK), BLOCK, 0, stream>>>(c, G_.delta, g->d_sink, X(g->d_oc), X(l->oc), l->lse, c.N * c.H);
    if (path == CORE_PRODUCTS) gpu_dense_attention(g, l, teach, 1);
    else if (path == CORE_GATHERED) fast_backward(g, l, teach);
    else gpu_support_backward(g, l, teach);
    phase_begin(before);
}

// ----------------------------------------------------------------------------
// 6. Attention layers
// The host side of train_cpu.c's section 10, call for call. Forward works on the rows r0 .. r0 + nr.

static void gpu_mla_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, H = c->H, hd = c->nope + c->rope, wide = c->nope + c->v_dim, T = g->T;
    floatX *none = NULL, *qa = X(l->qa) + r0 * c->q_lora, *qr = X(l->qr) + r0 * c->q_lora, *q = X(l->q) + r0 * H * hd, *kva = X(l->kva) + r0 * l->R, *xn = X(l->xn) + r0 * c->C;
    floatX *rows = X(l->rows) + r0 * l->R, *qrow = X(l->qrow) + r0 * H * l->Dk;
    gpu_linear_forward(qa, none, xn, weight(l->q_a), n, c->C, c->q_lora);
    gpu_rmsnorm_forward(plain_rows(qr, c->q_lora), l->rstd_q + r0, plain_rows(qa, c->q_lora), param(g, l->q_a_norm), 0, n, c->q_lora, 1e-6, T);
    gpu_linear_forward(q, none, qr, weight(l->q_b), n, c->q_lora, H * hd);
    gpu_linear_forward(kva, none, xn, weight(l->kv_a), n, c->C, l->R);
    gpu_rmsnorm_forward(plain_rows(rows, l->R), l->rstd_kv + r0, plain_rows(kva, l->R), param(g, l->kv_a_norm), 0, n, c->kv_lora, 1e-6, T);
    gpu_rope(g, l, plain_rows(rows + c->kv_lora, l->R), 0, plain_rows(kva + c->kv_lora, l->R), 0, 1, INTERLEAVED, 1);
    if (by_head(g, l)) {
        gpu_rotate(g, l, plain_rows(q + c->nope, H * hd), hd, H, INTERLEAVED, 1);
        return;
    }
    gpu_matmul_batch(qrow, H * l->Dk, l->Dk, none, q, H * hd, 1, hd, weight(l->kv_b), c->kv_lora, 1, wide * c->kv_lora, n, c->kv_lora, c->nope, H);
    gpu_rope(g, l, plain_rows(qrow + c->kv_lora, H * l->Dk), l->Dk, plain_rows(q + c->nope, H * hd), hd, H, INTERLEAVED, 1);
}

// x2 = x + o_proj(values of all heads)
static void gpu_mla_output_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, H = c->H, wide = c->nope + c->v_dim;
    floatX *none = NULL, *att = X(l->att) + r0 * l->n_att;
    if (!by_head(g, l))
        gpu_matmul_batch(att, l->n_att, c->v_dim, none, X(l->oc) + r0 * H * l->Dv, H * l->Dv, 1, l->Dv, weight(l->kv_b) + c->nope * c->kv_lora, 1, c->kv_lora, wide * c->kv_lora, n, c->v_dim, c->kv_lora, H);
    gpu_linear_forward(X(l->x2) + r0 * c->C, X(l->x) + r0 * c->C, att, weight(l->o), n, l->n_att, c->C);
}

static void gpu_mla_output_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, wide = c->nope + c->v_dim, v = c->nope * c->kv_lora;
    float *dw = grad(g, l->kv_b) + v;
    floatX *none = NULL, *d_att = X(g->d_att);
    gpu_linear_backward(d_att, 0, grad(g, l->o), X(g->dx), X(l->att), weight(l->o), N, l->n_att, c->C);
    if (by_head(g, l)) return;
    gpu_matmul_batch(X(g->d_oc), H * l->Dv, l->Dv, none, d_att, l->n_att, 1, c->v_dim, weight(l->kv_b) + v, c->kv_lora, 1, wide * c->kv_lora, N, c->kv_lora, c->v_dim, H);
    gpu_matmul_batch(dw, c->kv_lora, wide * c->kv_lora, dw, d_att, 1, l->n_att, c->v_dim, X(l->oc), H * l->Dv, 1, l->Dv, c->v_dim, c->kv_lora, N, H);
}

static void gpu_mla_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, hd = c->nope + c->rope, wide = c->nope + c->v_dim, T = g->T;
    float *dw = grad(g, l->kv_b);
    floatX *none = NULL, *d_q = X(g->d_q), *d_qrow = X(g->d_qrow), *d_qr = X(g->d_qr), *d_kva = X(g->d_kva), *dxn = X(g->dxn);
    if (by_head(g, l)) {
        int64_t out = H * wide;
        gpu_rotate(g, l, plain_rows(d_q + c->nope, H * hd), hd, H, INTERLEAVED, -1);
        gpu_matmul(g->d_rows, l->R, (float *)NULL, G_.d_kv, out, 1, weight(l->kv_b), c->kv_lora, 1, N, c->kv_lora, out);
        gpu_matmul(dw, c->kv_lora, dw, G_.d_kv, 1, out, X(l->rows), l->R, 1, out, c->kv_lora, N);
        gpu_rope(g, l, plain_rows(d_kva + c->kv_lora, l->R), 0, plain_rows(G_.d_kr, c->rope), 0, 1, INTERLEAVED, -1);
    } else {
        gpu_matmul_batch(d_q, H * hd, hd, none, d_qrow, H * l->Dk, 1, l->Dk, weight(l->kv_b), 1, c->kv_lora, wide * c->kv_lora, N, c->nope, c->kv_lora, H);
        gpu_matmul_batch(dw, c->kv_lora, wide * c->kv_lora, dw, X(l->q), 1, H * hd, hd, d_qrow, H * l->Dk, 1, l->Dk, c->nope, c->kv_lora, N, H);
        gpu_rope(g, l, plain_rows(d_q + c->nope, H * hd), hd, plain_rows(d_qrow + c->kv_lora, H * l->Dk), l->Dk, H, INTERLEAVED, -1);
        gpu_rope(g, l, plain_rows(d_kva + c->kv_lora, l->R), 0, plain_rows(g->d_rows + c->kv_lora, l->R), 0, 1, INTERLEAVED, -1);
    }
    gpu_linear_backward(d_qr, 0, grad(g, l->q_b), d_q, X(l->qr), weight(l->q_b), N, c->q_lora, H * hd);
    gpu_rmsnorm_backward(plain_rows(d_qr, c->q_lora), 0, grad(g, l->q_a_norm), plain_rows(d_qr, c->q_lora), l->rstd_q, plain_rows(X(l->qa), c->q_lora), param(g, l->q_a_norm), 0, N, c->q_lora, T);
    gpu_linear_backward(dxn, 0, grad(g, l->q_a), d_qr, X(l->xn), weight(l->q_a), N, c->C, c->q_lora);
    gpu_rmsnorm_backward(plain_rows(d_kva, l->R), 0, grad(g, l->kv_a_norm), plain_rows(g->d_rows, l->R), l->rstd_kv, plain_rows(X(l->kva), l->R), param(g, l->kv_a_norm), 0, N, c->kv_lora, T);
    gpu_linear_backward(dxn, 1, grad(g, l->kv_a), d_kva, X(l->xn), weight(l->kv_a), N, c->C, l->R);
}

static float index_scale(const Config *c) { return (float)pow((double)(c->HI * c->DI), -0.5); }

// Head weights, float32 from the product on.
static void gpu_index_weights_forward(Model *g, Layer *l) {
    int64_t n = g->nr, HI = g->c.HI, r0 = g->r0;
    float *w = l->w_index + r0 * HI;
    gpu_linear_forward(w, (float *)NULL, X(l->xn) + r0 * g->c.C, weight(l->iw), n, g->c.C, HI);
    ELEMENTWISE(scale_kernel, 1, n * HI, w, index_scale(&g->c));
}
// Gradients of the index query and head weight projections; d_qi is rotated back already. Products take both rounded: in
// d_oc, which the core has read.
static void gpu_index_projections_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, HI = c->HI, DI = c->DI;
    ELEMENTWISE(scale_kernel, 1, N * HI, g->d_wi, index_scale(c));
    gpu_linear_backward(NULL, 0, grad(g, l->iq), as_operand(g->d_qi, X(g->d_oc), N * HI * DI), X(l->qr), weight(l->iq), N, c->q_lora, HI * DI);
    gpu_linear_backward(NULL, 0, grad(g, l->iw), as_operand(g->d_wi, X(g->d_oc) + N * HI * DI, N * HI), X(l->xn), weight(l->iw), N, c->C, HI);
}

static void gpu_mla_index_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, HI = c->HI, DI = c->DI;
    floatX *none = NULL, *q = X(l->q_index) + r0 * HI * DI, *ka = X(l->ika) + r0 * DI, *k = X(l->k_index) + r0 * DI;
    gpu_linear_forward(q, none, X(l->qr) + r0 * c->q_lora, weight(l->iq), n, c->q_lora, HI * DI);
    gpu_linear_forward(ka, none, X(l->xn) + r0 * c->C, weight(l->ik), n, c->C, DI);
    layernorm_forward_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(k, l->mean_k + r0, l->rstd_k + r0, ka, param(g, l->ik_norm), param(g, l->ik_bias), n, DI, 1e-6f);
    gpu_index_weights_forward(g, l);
    gpu_rotate(g, l, plain_rows(k, DI), 0, 1, index_layout(c), 1);
    gpu_rotate(g, l, plain_rows(q, HI * DI), DI, HI, index_layout(c), 1);
}

static void gpu_mla_index_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, HI = c->HI, DI = c->DI, T = g->T;
    Rows<float> dk = plain_rows(g->d_ki, DI);
    Rows<floatX> ka = plain_rows(X(l->ika), DI);
    gpu_rotate(g, l, dk, 0, 1, index_layout(c), -1);
    gpu_rotate(g, l, plain_rows(g->d_qi, HI * DI), DI, HI, index_layout(c), -1);
    gpu_index_projections_backward(g, l);
    gpu_column_sum(grad(g, l->ik_norm), dk, ka, l->rstd_k, l->mean_k, N, DI, T);
    gpu_column_sum(grad(g, l->ik_bias), dk, ka, NULL, NULL, N, DI, T);
    layernorm_backward_kernel<<<blocks_for(N * WARP, BLOCK), BLOCK, 0, stream>>>(X(g->d_ki2), g->d_ki, l->mean_k, l->rstd_k, X(l->ika), param(g, l->ik_norm), N, DI);
    gpu_linear_backward(NULL, 0, grad(g, l->ik), X(g->d_ki2), X(l->xn), weight(l->ik), N, c->C, DI);
}

// Pools: completes_pool() and pool_slot() of train_cpu.c on the device, for the tokens i0 .. i0 + n.
typedef struct { int64_t T, i0, n, r, n_cand, wide; const int32_t *doc; } Pool;
static Pool pool_of(const Model *g, const Layer *l) { Pool p = {g->T, g->r0, g->nr, l->r, l->n_cand, l->letter == 'C', g->doc}; return p; }
__device__ static int gpu_completes(const Pool &p, int64_t i, int64_t *e, int64_t *at) {
    int64_t length = i % p.T - p.doc[i] + 1;
    if (length % p.r) return 0;
    *at = length - p.r;
    *e = i / p.T * p.n_cand + p.doc[i] / p.r + *at / p.r;
    return 1;
}
// Index into values or gates [N, width] of slot s, channel j.
__device__ static int64_t gpu_slot(const Pool &p, int64_t i, int64_t at, int64_t d, int64_t s, int64_t j) {
    int64_t slots = p.wide ? 2 * p.r : p.r, skip = p.wide && at == 0 ? p.r : 0, offset = p.wide && s + skip >= p.r ? d : 0;
    return (i + 1 - slots + s + skip) * (p.wide ? 2 * d : d) + offset + j;
}
__device__ static int64_t gpu_slots(const Pool &p, int64_t at) { return p.wide && at > 0 ? 2 * p.r : p.r; }

__global__ static void pool_forward_kernel(Pool p, floatX *ent, const floatX *values, const floatX *gates, int64_t d) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = p.i0 + x / d, j = x % d, e, at;
    if (x >= p.n * d || !gpu_completes(p, i, &e, &at)) return;
    float top = -INFINITY, sum = 0, value = 0;
    for (int64_t s = 0; s < gpu_slots(p, at); s++) top = fmaxf(top, (float)gates[gpu_slot(p, i, at, d, s, j)]);
    for (int64_t s = 0; s < gpu_slots(p, at); s++) {
        int64_t y = gpu_slot(p, i, at, d, s, j);
        float w = expf((float)gates[y] - top);
        sum += w;
        value += w * (float)values[y];
    }
    ent[e * d + j] = (floatX)(value / sum);
}
__global__ static void pool_backward_kernel(Pool p, floatX *d_values, floatX *d_gates, const floatX *d_ent, const floatX *ent, const floatX *values, const floatX *gates, int64_t d) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = p.i0 + x / d, j = x % d, e, at;
    if (x >= p.n * d || !gpu_completes(p, i, &e, &at)) return;
    float top = -INFINITY, sum = 0, dy = (float)d_ent[e * d + j], y = 0;
    for (int64_t s = 0; s < gpu_slots(p, at); s++) top = fmaxf(top, (float)gates[gpu_slot(p, i, at, d, s, j)]);
    for (int64_t s = 0; s < gpu_slots(p, at); s++) {
        int64_t z = gpu_slot(p, i, at, d, s, j);
        float w = expf((float)gates[z] - top);
        sum += w;
        y += w * (float)values[z];
    }
    y /= sum; // the entry, unrounded
    for (int64_t s = 0; s < gpu_slots(p, at); s++) {
        int64_t z = gpu_slot(p, i, at, d, s, j);
        float w = expf((float)gates[z] - top) / sum;
        d_values[z] = (floatX)(w * dy);
        d_gates[z] = (floatX)(w * dy * ((float)values[z] - y));
    }
}
// The rotation of an entry is that of its pool's first token. One thread a (token, pair).
template <class A> __global__ static void pool_rope_kernel(Pool p, Rows<A> out, int64_t offset, const float *cos_sin, int64_t half, int layout, float sign) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = p.i0 + x / half, j = x % half, e, at;
    if (x >= p.n * half || !gpu_completes(p, i, &e, &at)) return;
    A *y = row_at(out, e, p.n_cand) + offset, *a = y + (layout == HALF_SPLIT ? j : 2 * j), *b = layout == HALF_SPLIT ? a + half : a + 1;
    const float *cs = cos_sin + (at * half + j) * 2;
    float u = (float)*a, v = (float)*b, c = cs[0], s = sign * cs[1];
    *a = (A)(u * c - v * s);
    *b = (A)(u * s + v * c);
}
template <class A> static void gpu_pool_rope(const Model *g, const Layer *l, Rows<A> out, int64_t offset, int layout, int sign) {
    int64_t half = g->c.rope / 2;
    pool_rope_kernel<<<blocks_for(g->nr * half, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), out, offset, l->cos_sin, half, layout, (float)sign);
}
// gates += bias of the token's place in its pool
__global__ static void pool_bias_kernel(Pool p, floatX *gates, const float *bias, int64_t width) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = p.i0 + x / width;
    if (x < p.n * width) gates[p.i0 * width + x] = (floatX)((float)gates[p.i0 * width + x] + bias[(i % p.T - p.doc[i]) % p.r * width + x % width]);
}
// d_bias[place, channel] += sum of d_gates over the tokens at that place; one block a place and 32 channels.
__global__ static void pool_bias_backward_kernel(Pool p, float *d_bias, const floatX *d_gates, int64_t width) {
    __shared__ float part[ROW_LANES][WARP];
    int64_t j = blockIdx.x * (int64_t)WARP + threadIdx.x, place = blockIdx.y;
    float s = 0;
    for (int64_t i = threadIdx.y; i < p.n; i += ROW_LANES)
        if ((i % p.T - p.doc[i]) % p.r == place && j < width) s += (float)d_gates[i * width + j];
    part[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y || j >= width) return;
    for (int y = 1; y < ROW_LANES; y++) s += part[y][threadIdx.x];
    d_bias[place * width + j] += s;
}

static void gpu_compress_project(Model *g, Layer *l, floatX *comp, int kv, int gate, int bias, int64_t d) {
    int64_t width = comp_width(l, d) / 2, n = g->nr, r0 = g->r0;
    floatX *none = NULL, *gates = comp + g->N * width, *xn = X(l->xn) + r0 * g->c.C;
    gpu_linear_forward(comp + r0 * width, none, xn, weight(kv), n, g->c.C, width);
    gpu_linear_forward(gates + r0 * width, none, xn, weight(gate), n, g->c.C, width);
    pool_bias_kernel<<<blocks_for(n * width, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), gates, param(g, bias), width);
}
// While generating: is there a new pool, and which? Rows r0 .. r0 + nr of the one sequence are new.
static int gpu_new_pools(const Model *g, const Layer *l, int64_t *first, int64_t *n) {
    int64_t at;
    *first = 0;
    *n = g->B * l->n_cand;
    if (!g->r0) return *n > 0;
    *n = 1;
    return completes_pool(G_.row_host, l, g->r0, first, &at);
}
static void gpu_compress_forward(Model *g, Layer *l, const floatX *comp, int64_t d, floatX *ent, float *rstd, int norm, Rows<floatX> out) {
    int64_t width = comp_width(l, d) / 2, first, n;
    if (!gpu_new_pools(g, l, &first, &n)) return;
    if (!g->r0) CUDA_CHECK(cudaMemsetAsync(ent, 0, (size_t)(n * d) * sizeof(floatX), stream)); // pools that no document fills
    pool_forward_kernel<<<blocks_for(g->nr * d, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), ent, comp, comp + g->N * width, d);
    Rows<floatX> e = rows_of(ent + first * d, d, l->n_cand), o = rows_of(out.base + first * out.ld, out.ld, out.seq_rows);
    gpu_rmsnorm_forward(o, rstd + first, e, param(g, norm), 0, n, d, g->c.rms_eps, l->n_cand);
    gpu_pool_rope(g, l, out, d - g->c.rope, INTERLEAVED, 1);
}
static void gpu_compress_backward(Model *g, Layer *l, floatX *dxn, const floatX *comp, int64_t d, const floatX *ent, const float *rstd, int norm, int kv, int gate, int bias, Rows<float> d_out, floatX *d_ent) {
    Pool p = pool_of(g, l);
    int64_t width = comp_width(l, d) / 2, N = g->N, cands = g->B * l->n_cand;
    floatX *d_values = X(g->d_comp), *d_gates = d_values + N * width;
    if (!cands) return;
    CUDA_CHECK(cudaMemsetAsync(d_values, 0, (size_t)(2 * N * width) * sizeof(floatX), stream));
    gpu_pool_rope(g, l, d_out, d - g->c.rope, INTERLEAVED, -1);
    gpu_rmsnorm_backward(rows_of(d_ent, d, l->n_cand), 0, grad(g, norm), d_out, rstd, rows_of(ent, d, l->n_cand), param(g, norm), 0, cands, d, l->n_cand);
    pool_backward_kernel<<<blocks_for(N * d, BLOCK), BLOCK, 0, stream>>>(p, d_values, d_gates, d_ent, ent, comp, comp + N * width, d);
    pool_bias_backward_kernel<<<dim3(blocks_for(width, WARP), (unsigned)l->r), dim3(WARP, ROW_LANES), 0, stream>>>(p, grad(g, bias), d_gates, width);
    gpu_linear_backward(dxn, 1, grad(g, kv), d_values, X(l->xn), weight(kv), N, g->c.C, width);
    gpu_linear_backward(dxn, 1, grad(g, gate), d_gates, X(l->xn), weight(gate), N, g->c.C, width);
}

// Where the entries of C and H layers stand: behind the tokens of each sequence.
template <class A> static Rows<A> entry_rows(const Model *g, const Layer *l, A *rows) { return rows_of(rows + g->T * l->R, l->R, l->n_rows); }

static void gpu_v4_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, H = c->H, D = c->head_dim, T = g->T;
    floatX *none = NULL, *qa = X(l->qa) + r0 * c->q_lora, *qr = X(l->qr) + r0 * c->q_lora, *q = X(l->q) + r0 * H * D, *kva = X(l->kva) + r0 * D, *xn = X(l->xn) + r0 * c->C;
    floatX *rows = X(l->rows) + r0 * D, *qrow = X(l->qrow) + r0 * H * D; // r0 > 0 only with one sequence
    gpu_linear_forward(qa, none, xn, weight(l->q_a), n, c->C, c->q_lora);
    gpu_rmsnorm_forward(plain_rows(qr, c->q_lora), l->rstd_q + r0, plain_rows(qa, c->q_lora), param(g, l->q_a_norm), 0, n, c->q_lora, c->rms_eps, T);
    gpu_linear_forward(q, none, qr, weight(l->q_b), n, c->q_lora, H * D);
    gpu_rmsnorm_forward(plain_rows(qrow, D), l->rstd_h + r0 * H, plain_rows(q, D), NULL, 0, n * H, D, c->rms_eps, T);
    gpu_linear_forward(kva, none, xn, weight(l->kv_a), n, c->C, D);
    gpu_rmsnorm_forward(rows_of(rows, D, l->n_rows), l->rstd_kv + r0, plain_rows(kva, D), param(g, l->kv_a_norm), 0, n, D, c->rms_eps, T);
    gpu_rotate(g, l, rows_of(rows + D - c->rope, D, l->n_rows), 0, 1, INTERLEAVED, 1);
    gpu_rotate(g, l, plain_rows(qrow + D - c->rope, H * D), D, H, INTERLEAVED, 1);
    if (l->letter == 'W') return;
    gpu_compress_project(g, l, X(l->comp), l->comp_kv, l->comp_gate, l->comp_bias, D);
    gpu_compress_forward(g, l, X(l->comp), D, X(l->ent), l->rstd_e, l->comp_norm, entry_rows(g, l, X(l->rows)));
}

static void gpu_v4_output_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, H = c->H, D = c->head_dim, wide = l->n_att / c->o_groups, mid = c->o_groups * c->o_lora;
    floatX *none = NULL, *att = X(l->att) + r0 * H * D, *oa = X(l->oa) + r0 * mid;
    CUDA_CHECK(cudaMemcpyAsync(att, X(l->oc) + r0 * H * D, (size_t)(n * H * D) * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
    gpu_rotate(g, l, plain_rows(att + D - c->rope, H * D), D, H, INTERLEAVED, -1);
    gpu_matmul_batch(oa, mid, c->o_lora, none, att, H * D, 1, wide, weight(l->o_a), 1, wide, c->o_lora * wide, n, c->o_lora, wide, c->o_groups);
    gpu_linear_forward(X(l->x2) + r0 * c->C, X(l->x) + r0 * c->C, oa, weight(l->o), n, mid, c->C);
}

static void gpu_v4_output_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, D = c->head_dim, wide = l->n_att / c->o_groups, mid = c->o_groups * c->o_lora;
    float *dw = grad(g, l->o_a);
    floatX *none = NULL, *d_oa = X(g->d_oa), *d_oc = X(g->d_oc);
    gpu_linear_backward(d_oa, 0, grad(g, l->o), X(g->dx), X(l->oa), weight(l->o), N, mid, c->C);
    gpu_matmul_batch(d_oc, H * D, wide, none, d_oa, mid, 1, c->o_lora, weight(l->o_a), wide, 1, c->o_lora * wide, N, wide, c->o_lora, c->o_groups);
    gpu_matmul_batch(dw, wide, c->o_lora * wide, dw, d_oa, 1, mid, c->o_lora, X(l->att), H * D, 1, wide, c->o_lora, wide, N, c->o_groups);
    gpu_rotate(g, l, plain_rows(d_oc + D - c->rope, H * D), D, H, INTERLEAVED, 1);
}

static void gpu_v4_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, D = c->head_dim, T = g->T;
    floatX *d_q = X(g->d_q), *d_qrow = X(g->d_qrow), *d_qr = X(g->d_qr), *d_kva = X(g->d_kva), *dxn = X(g->dxn);
    Rows<float> d_rows = rows_of(g->d_rows, D, l->n_rows), sinks = plain_rows(g->d_sink, H);
    gpu_column_sum(grad(g, l->sinks), sinks, sinks, NULL, NULL, N, H, T);
    gpu_rotate(g, l, rows_of(g->d_rows + D - c->rope, D, l->n_rows), 0, 1, INTERLEAVED, -1);
    gpu_rotate(g, l, plain_rows(d_qrow + D - c->rope, H * D), D, H, INTERLEAVED, -1);
    gpu_rmsnorm_backward(plain_rows(d_q, D), 0, NULL, plain_rows(d_qrow, D), l->rstd_h, plain_rows(X(l->q), D), NULL, 0, N * H, D, T);
    gpu_linear_backward(d_qr, 0, grad(g, l->q_b), d_q, X(l->qr), weight(l->q_b), N, c->q_lora, H * D);
    gpu_rmsnorm_backward(plain_rows(d_qr, c->q_lora), 0, grad(g, l->q_a_norm), plain_rows(d_qr, c->q_lora), l->rstd_q, plain_rows(X(l->qa), c->q_lora), param(g, l->q_a_norm), 0, N, c->q_lora, T);
    gpu_linear_backward(dxn, 0, grad(g, l->q_a), d_qr, X(l->xn), weight(l->q_a), N, c->C, c->q_lora);
    gpu_rmsnorm_backward(plain_rows(d_kva, D), 0, grad(g, l->kv_a_norm), d_rows, l->rstd_kv, plain_rows(X(l->kva), D), param(g, l->kv_a_norm), 0, N, D, T);
    gpu_linear_backward(dxn, 1, grad(g, l->kv_a), d_kva, X(l->xn), weight(l->kv_a), N, c->C, D);
    if (l->letter == 'W') return;
    gpu_compress_backward(g, l, dxn, X(l->comp), D, X(l->ent), l->rstd_e, l->comp_norm, l->comp_kv, l->comp_gate, l->comp_bias, entry_rows(g, l, g->d_rows), X(g->d_ent));
}

static void gpu_v4_index_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, HI = c->HI, DI = c->DI;
    floatX *none = NULL, *q = X(l->q_index) + r0 * HI * DI;
    gpu_linear_forward(q, none, X(l->qr) + r0 * c->q_lora, weight(l->iq), n, c->q_lora, HI * DI);
    gpu_index_weights_forward(g, l);
    gpu_rotate(g, l, plain_rows(q + DI - c->rope, HI * DI), DI, HI, INTERLEAVED, 1);
    gpu_compress_project(g, l, X(l->icomp), l->ik, l->icomp_gate, l->icomp_bias, DI);
    gpu_compress_forward(g, l, X(l->icomp), DI, X(l->ika), l->rstd_k, l->ik_norm, rows_of(X(l->k_index), DI, l->n_cand));
}

static void gpu_v4_index_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t HI = c->HI, DI = c->DI;
    gpu_rotate(g, l, plain_rows(g->d_qi + DI - c->rope, HI * DI), DI, HI, INTERLEAVED, -1);
    gpu_index_projections_backward(g, l);
    gpu_compress_backward(g, l, NULL, X(l->icomp), DI, X(l->ika), l->rstd_k, l->ik_norm, l->ik, l->icomp_gate, l->icomp_bias, rows_of(g->d_ki, DI, l->n_cand), X(g->d_ki2));
}

static void gpu_qsa_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, N = g->N, H = c->H, D = c->head_dim, G = l->G, T = g->T;
    floatX *none = NULL, *xn = X(l->xn) + r0 * c->C, *q = X(l->q) + r0 * l->n_q, *kva = X(l->kva) + r0 * l->R, *rows = X(l->rows) + r0 * l->R, *qrow = X(l->qrow) + r0 * H * D;
    gpu_linear_forward(q, none, xn, weight(l->q_proj), n, c->C, l->n_q);
    gpu_rmsnorm_forward(plain_rows(qrow, D), l->rstd_h + r0 * H, plain_rows(q, 2 * D), param(g, l->q_norm), 1, n * H, D, c->rms_eps, T);
    gpu_matmul(kva, l->R, none, xn, c->C, 1, weight(l->k_proj), 1, c->C, n, G * D, c->C);
    gpu_matmul(rows + l->v_off, l->R, none, xn, c->C, 1, weight(l->v_proj), 1, c->C, n, G * D, c->C);
    for (int64_t h = 0; h < G; h++)
        gpu_rmsnorm_forward(plain_rows(rows + h * D, l->R), l->rstd_kv + h * N + r0, plain_rows(kva + h * D, l->R), param(g, l->k_norm), 1, n, D, c->rms_eps, T);
    gpu_rotate(g, l, plain_rows(rows, l->R), D, G, HALF_SPLIT, 1);
    gpu_rotate(g, l, plain_rows(qrow, H * D), D, H, HALF_SPLIT, 1);
}

// att = oc * sigmoid(gate); q holds [query D | gate D] per head.
__global__ static void gate_forward_kernel(floatX *att, const floatX *oc, const floatX *q, int64_t D, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x < n) att[x] = (floatX)((float)oc[x] / (1 + expf(-(float)q[(2 * (x / D) + 1) * D + x % D])));
}
__global__ static void gate_backward_kernel(floatX *d_oc, floatX *d_q, const floatX *d_att, const floatX *oc, const floatX *q, int64_t D, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= n) return;
    int64_t y = (2 * (x / D) + 1) * D + x % D;
    float s = 1 / (1 + expf(-(float)q[y])), g = (float)d_att[x];
    d_oc[x] = (floatX)(g * s);
    d_q[y] = (floatX)(g * (float)oc[x] * s * (1 - s));
}
static void gpu_qsa_output_forward(Model *g, Layer *l) {
    int64_t r0 = g->r0, n = g->nr * l->n_att, at = r0 * l->n_att;
    gate_forward_kernel<<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(X(l->att) + at, X(l->oc) + at, X(l->q) + r0 * l->n_q, g->c.head_dim, n);
    gpu_linear_forward(X(l->x2) + r0 * g->c.C, X(l->x) + r0 * g->c.C, X(l->att) + at, weight(l->o), g->nr, l->n_att, g->c.C);
}
static void gpu_qsa_output_backward(Model *g, Layer *l) {
    int64_t n = g->N * l->n_att;
    gpu_linear_backward(X(g->d_att), 0, grad(g, l->o), X(g->dx), X(l->att), weight(l->o), g->N, l->n_att, g->c.C);
    gate_backward_kernel<<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(X(g->d_oc), X(g->d_q), X(g->d_att), X(l->oc), X(l->q), g->c.head_dim, n);
}

// to[i, 0..width) = from[i, 0..width), rows of ld: the values' gradients as the products take them.
__global__ static void convert_columns_kernel(floatX *to, const float *from, int64_t ld, int64_t width, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x < n * width) to[x / width * ld + x % width] = (floatX)from[x / width * ld + x % width];
}

static void gpu_qsa_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, D = c->head_dim, G = l->G, T = g->T;
    floatX *d_q = X(g->d_q), *d_qrow = X(g->d_qrow), *d_kva = X(g->d_kva), *dxn = X(g->dxn);
    gpu_rotate(g, l, plain_rows(g->d_rows, l->R), D, G, HALF_SPLIT, -1);
    gpu_rotate(g, l, plain_rows(d_qrow, H * D), D, H, HALF_SPLIT, -1);
    gpu_rmsnorm_backward(plain_rows(d_q, 2 * D), 0, grad(g, l->q_norm), plain_rows(d_qrow, D), l->rstd_h, plain_rows(X(l->q), 2 * D), param(g, l->q_norm), 1, N * H, D, T);
    gpu_linear_backward(dxn, 0, grad(g, l->q_proj), d_q, X(l->xn), weight(l->q_proj), N, c->C, l->n_q);
    for (int64_t h = 0; h < G; h++)
        gpu_rmsnorm_backward(plain_rows(d_kva + h * D, l->R), 0, grad(g, l->k_norm), plain_rows(g->d_rows + h * D, l->R), l->rstd_kv + h * N, plain_rows(X(l->kva) + h * D, l->R),
                             param(g, l->k_norm), 1, N, D, T);
    convert_columns_kernel<<<blocks_for(N * G * D, BLOCK), BLOCK, 0, stream>>>(d_kva + l->v_off, g->d_rows + l->v_off, l->R, G * D, N);
    for (int half = 0; half < 2; half++) {
        int w = half ? l->v_proj : l->k_proj;
        const floatX *dy = d_kva + half * l->v_off;
        gpu_matmul(dxn, c->C, dxn, dy, l->R, 1, weight(w), c->C, 1, N, c->C, G * D);
        gpu_matmul(grad(g, w), c->C, grad(g, w), dy, 1, l->R, X(l->xn), c->C, 1, G * D, c->C, N);
    }
}

// mean[e] = average of the raw index keys of the block that token i completes.
__global__ static void block_mean_kernel(Pool p, floatX *mean, const floatX *raw, int64_t width, int64_t offset, int64_t DI) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = p.i0 + x / DI, d = x % DI, e, at;
    if (x >= p.n * DI || !gpu_completes(p, i, &e, &at)) return;
    float s = 0;
    for (int64_t j = i + 1 - p.r; j <= i; j++) s += (float)raw[j * width + offset + d] / (float)p.r;
    mean[e * DI + d] = (floatX)s;
}
__global__ static void block_mean_backward_kernel(Pool p, floatX *d_raw, const floatX *d_mean, int64_t width, int64_t offset, int64_t DI) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = p.i0 + x / DI, d = x % DI, e, at;
    if (x >= p.n * DI || !gpu_completes(p, i, &e, &at)) return;
    for (int64_t j = i + 1 - p.r; j <= i; j++) d_raw[j * width + offset + d] = (floatX)((float)d_mean[e * DI + d] / (float)p.r);
}

static void gpu_qsa_index_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->nr, r0 = g->r0, N = g->N, HI = c->HI, DI = c->DI, width = (HI + 1) * DI, T = g->T, first, cands;
    floatX *none = NULL, *raw = X(l->icomp) + r0 * width, *q = X(l->q_index) + r0 * HI * DI, *mean = X(l->ika), *keys = X(l->k_index);
    gpu_linear_forward(raw, none, X(l->xn) + r0 * c->C, weight(l->iq), n, c->C, width);
    for (int64_t h = 0; h < HI; h++)
        gpu_rmsnorm_forward(plain_rows(q + h * DI, HI * DI), l->rstd_iq + h * N + r0, plain_rows(raw + h * DI, width), param(g, l->ik_bias), 1, n, DI, c->rms_eps, T);
    gpu_rotate(g, l, plain_rows(q, HI * DI), DI, HI, HALF_SPLIT, 1);
    ELEMENTWISE(fill_kernel, 1, n * HI, l->w_index + r0 * HI, (float)pow((double)DI, -0.5));
    if (!gpu_new_pools(g, l, &first, &cands)) return;
    if (!r0) CUDA_CHECK(cudaMemsetAsync(mean, 0, (size_t)(cands * DI) * sizeof(floatX), stream));
    block_mean_kernel<<<blocks_for(n * DI, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), mean, X(l->icomp), width, HI * DI, DI);
    gpu_rmsnorm_forward(plain_rows(keys + first * DI, DI), l->rstd_k + first, plain_rows(mean + first * DI, DI), param(g, l->ik_norm), 1, cands, DI, c->rms_eps, T);
    gpu_pool_rope(g, l, plain_rows(keys, DI), 0, HALF_SPLIT, 1);
}

static void gpu_qsa_index_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, HI = c->HI, DI = c->DI, width = (HI + 1) * DI, T = g->T, cands = g->B * l->n_cand;
    floatX *d_raw = X(g->d_comp), *d_mean = X(g->d_ki2);
    CUDA_CHECK(cudaMemsetAsync(d_raw, 0, (size_t)(N * width) * sizeof(floatX), stream));
    gpu_rotate(g, l, plain_rows(g->d_qi, HI * DI), DI, HI, HALF_SPLIT, -1);
    for (int64_t h = 0; h < HI; h++)
        gpu_rmsnorm_backward(plain_rows(d_raw + h * DI, width), 0, grad(g, l->ik_bias), plain_rows(g->d_qi + h * DI, HI * DI), l->rstd_iq + h * N,
                             plain_rows(X(l->icomp) + h * DI, width), param(g, l->ik_bias), 1, N, DI, T);
    if (cands) {
        Rows<float> dk = plain_rows(g->d_ki, DI);
        gpu_pool_rope(g, l, dk, 0, HALF_SPLIT, -1);
        gpu_rmsnorm_backward(plain_rows(d_mean, DI), 0, grad(g, l->ik_norm), dk, l->rstd_k, plain_rows(X(l->ika), DI), param(g, l->ik_norm), 1, cands, DI, T);
        block_mean_backward_kernel<<<blocks_for(N * DI, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), d_raw, d_mean, width, HI * DI, DI);
    }
    gpu_linear_backward(NULL, 0, grad(g, l->iq), d_raw, X(l->xn), weight(l->iq), N, c->C, width);
}

static void gpu_clear_index_grads(Model *g, int64_t n_cand) {
    CUDA_CHECK(cudaMemsetAsync(g->d_qi, 0, (size_t)(g->N * g->c.HI * g->c.DI) * sizeof(float), stream));
    CUDA_CHECK(cudaMemsetAsync(g->d_wi, 0, (size_t)(g->N * g->c.HI) * sizeof(float), stream));
    CUDA_CHECK(cudaMemsetAsync(g->d_ki, 0, (size_t)(g->B * n_cand * g->c.DI) * sizeof(float), stream));
}

// x2 = x + attention of xn
static void gpu_attention_forward(Model *g, Layer *l) {
    int mla = is_mla(l->letter), v4 = is_v4(l->letter);
    (mla ? gpu_mla_forward : v4 ? gpu_v4_forward : gpu_qsa_forward)(g, l);
    if (is_sparse(l->letter)) {
        (mla ? gpu_mla_index_forward : v4 ? gpu_v4_index_forward : gpu_qsa_index_forward)(g, l);
        if (!g->fixed_selection && !g->dense) {
            gpu_select_forward(g, l);
            gpu_selection_store(g, l);
        }
    }
    if (l->source >= 0 && !attends_to_all(g, l)) gpu_selection_restore(g, l);
    gpu_core_forward(g, l);
    (mla ? gpu_mla_output_forward : v4 ? gpu_v4_output_forward : gpu_qsa_output_forward)(g, l);
}

// dxn = gradient to xn, from dx
static void gpu_attention_backward(Model *g, Layer *l) {
    int mla = is_mla(l->letter), v4 = is_v4(l->letter);
    (mla ? gpu_mla_output_backward : v4 ? gpu_v4_output_backward : gpu_qsa_output_backward)(g, l);
    gpu_core_backward(g, l);
    (mla ? gpu_mla_backward : v4 ? gpu_v4_backward : gpu_qsa_backward)(g, l);
    if (!is_sparse(l->letter)) return;
    (mla ? gpu_mla_index_backward : v4 ? gpu_v4_index_backward : gpu_qsa_index_backward)(g, l);
    gpu_clear_index_grads(g, l->n_cand);
}

// ----------------------------------------------------------------------------
// 7. The model

static void gpu_block_forward(Model *g, Layer *l, floatX *next) {
    const Config *c = &g->c;
    int64_t C = c->C, F = c->F, n = g->nr, r0 = g->r0, T = g->T;
    floatX *none = NULL, *xn2 = X(l->xn2) + r0 * C, *x2 = X(l->x2) + r0 * C, *gate = X(l->g) + r0 * F, *up = X(l->u) + r0 * F, *act = X(l->act) + r0 * F;
    gpu_rmsnorm_forward(plain_rows(X(l->xn) + r0 * C, C), l->rstd + r0, plain_rows(X(l->x) + r0 * C, C), param(g, l->input_norm), 0, n, C, c->rms_eps, T);
    gpu_attention_forward(g, l);
    gpu_rmsnorm_forward(plain_rows(xn2, C), l->rstd2 + r0, plain_rows(x2, C), param(g, l->post_norm), 0, n, C, c->rms_eps, T);
    gpu_linear_forward(gate, none, xn2, weight(l->gate), n, C, F);
    gpu_linear_forward(up, none, xn2, weight(l->up), n, C, F);
    ELEMENTWISE(swiglu_forward_kernel, r0 * F % 8 == 0, n * F, act, gate, up);
    if (next) gpu_linear_forward(next + r0 * C, x2, act, weight(l->down), n, F, C);
}

static void gpu_block_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t C = c->C, F = c->F, N = g->N, T = g->T;
    floatX *dx = X(g->dx), *dxn = X(g->dxn);
    gpu_linear_backward(X(l->act), 0, grad(g, l->down), dx, X(l->act), weight(l->down), N, F, C);
    ELEMENTWISE(swiglu_backward_kernel, 1, N * F, X(l->g), X(l->u), X(l->act), X(l->g), X(l->u));
    gpu_linear_backward(dxn, 0, grad(g, l->gate), X(l->g), X(l->xn2), weight(l->gate), N, C, F);
    gpu_linear_backward(dxn, 1, grad(g, l->up), X(l->u), X(l->xn2), weight(l->up), N, C, F);
    gpu_rmsnorm_backward(plain_rows(dx, C), 1, grad(g, l->post_norm), plain_rows(dxn, C), l->rstd2, plain_rows(X(l->x2), C), param(g, l->post_norm), 0, N, C, T);
    gpu_attention_backward(g, l);
    gpu_rmsnorm_backward(plain_rows(dx, C), 1, grad(g, l->input_norm), plain_rows(dxn, C), l->rstd, plain_rows(X(l->x), C), param(g, l->input_norm), 0, N, C, T);
}

// The better of two (logit, token): the larger, of equals the first token. NaN loses.
__device__ static void keep_better(float *top, int *at, float other, int where) {
    if (other > *top || (other == *top && where < *at)) { *top = other; *at = where; }
}

// Loss, hit and (learning) gradient of one row of logits, in place. One block a row, eight logits a thread at a time
// (Vp is a multiple of 64); one pass finds the largest and the sum of exponentials, one writes. The padding takes no part.
__global__ static void classifier_kernel(floatX *logits, const int32_t *targets, float *row_loss, int32_t *row_hit, int64_t V, int64_t Vp, float loss_scale, int learn) {
    __shared__ float shared[BLOCK / WARP];
    __shared__ int best[BLOCK / WARP];
    floatX *z = logits + blockIdx.x * Vp;
    float top = -INFINITY, sum = 0, x[8];
    int32_t target = targets[blockIdx.x];
    int at = (int)V;
    for (int v = threadIdx.x * 8; v < V; v += BLOCK * 8) {
        float before = top;
        load<8>(x, z + v);
        for (int k = 0; k < 8; k++)
            if (v + k < V) keep_better(&top, &at, x[k], v + k);
        sum *= before == top ? 1 : expf(before - top);
        for (int k = 0; k < 8; k++) sum += v + k < V ? expf(x[k] - top) : 0;
    }
    float mine = top;
    for (int o = 16; o > 0; o /= 2) keep_better(&top, &at, __shfl_xor_sync(0xffffffffu, top, o), __shfl_xor_sync(0xffffffffu, at, o));
    if (threadIdx.x % WARP == 0) { shared[threadIdx.x / WARP] = top; best[threadIdx.x / WARP] = at; }
    __syncthreads();
    for (int w = 0; w < BLOCK / WARP; w++) keep_better(&top, &at, shared[w], best[w]);
    float want = target >= 0 ? (float)z[target] : 0;
    sum = block_sum(mine == -INFINITY ? sum : sum * expf(mine - top), shared); // its barriers also come between reading z[target] and overwriting it
    if (threadIdx.x == 0) {
        row_loss[blockIdx.x] = target < 0 ? 0 : logf(sum) + top - want;
        row_hit[blockIdx.x] = at == target;
    }
    if (!learn) return;
    for (int v = threadIdx.x * 8; v < Vp; v += BLOCK * 8) {
        load<8>(x, z + v);
        for (int k = 0; k < 8; k++) x[k] = target < 0 || v + k >= V ? 0 : loss_scale * (expf(x[k] - top) / sum - (v + k == target));
        store<8>(z + v, x);
    }
}

static void gpu_classifier(Model *g) {
    int64_t C = g->c.C, Vp = g->Vp;
    floatX *none = NULL, *logits = X(g->logits), *xf = X(g->xf), *dxn = X(g->dxn);
    for (int64_t r = 0; r < g->N; r += g->logit_rows) {
        int64_t n = min64(g->logit_rows, g->N - r);
        gpu_linear_forward(logits, none, xf + r * C, weight(g->head), n, C, Vp);
        classifier_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(logits, g->targets + r, g->row_loss + r, g->row_hit + r, g->c.V, Vp, (float)g->loss_scale, g->learning);
        if (g->learning) gpu_linear_backward(dxn + r * C, 0, grad(g, g->head), logits, xf + r * C, weight(g->head), n, C, Vp);
    }
}

// The blocks over the rows r0 .. r0 + nr; the last one's output is last_x.
static void gpu_blocks_forward(Model *g) {
    int64_t C = g->c.C, at = g->r0 * C;
    ELEMENTWISE(embedding_forward_kernel, C % 8 == 0, g->nr * C, X(g->layers[0].x) + at, weight(g->embed), g->tokens + g->r0, C);
    for (int64_t l = 0; l < g->c.L; l++) gpu_block_forward(g, &g->layers[l], X(l + 1 < g->c.L ? g->layers[l + 1].x : g->last_x));
}

// The whole forward pass on the device: row_loss, row_hit and (evaluating) row_kl.
static void gpu_pass_forward(Model *g) {
    int64_t C = g->c.C;
    g->held = G_.offload.holds[0] = G_.offload.holds[1] = -1; // a captured pass runs whatever was unpacked before
    CUDA_CHECK(cudaMemsetAsync(g->row_kl, 0, (size_t)g->N * sizeof(float), stream));
    gpu_blocks_forward(g);
    gpu_rmsnorm_forward(plain_rows(X(g->xf), C), g->rstd_f, plain_rows(X(g->last_x), C), param(g, g->final_norm), 0, g->N, C, g->c.rms_eps, g->T);
    gpu_classifier(g);
}

// The whole backward pass: adds to the gradients, fills row_kl.
static void gpu_pass_backward(Model *g) {
    int64_t C = g->c.C, N = g->N;
    g->held = -1;
    G_.offload.backward = 1;
    if (g->waiting) offload_ahead(g, g->c.L);
    CUDA_CHECK(cudaMemsetAsync(g->row_kl, 0, (size_t)N * sizeof(float), stream));
    gpu_clear_index_grads(g, g->most_cand);
    gpu_rmsnorm_backward(plain_rows(X(g->dx), C), 0, grad(g, g->final_norm), plain_rows(X(g->dxn), C), g->rstd_f, plain_rows(X(g->last_x), C), param(g, g->final_norm), 0, N, C, g->T);
    for (int64_t l = g->c.L - 1; l >= 0; l--) {
        if (!strcmp(g->c.recompute, "block")) { // the selection is kept, not made again (unless --replay 0)
            int fixed = g->fixed_selection;
            g->fixed_selection |= (int)g->c.replay;
            gpu_block_forward(g, &g->layers[l], NULL);
            g->fixed_selection = fixed;
        }
        gpu_block_backward(g, &g->layers[l]);
    }
    G_.offload.backward = 0;
    gpu_inverse_lists(g->tokens, N, 1, N, g->c.V);
    embedding_backward_kernel<<<dim3((unsigned)g->c.V, blocks_for(C, WARP)), dim3(WARP, ROW_LANES), 0, stream>>>(grad(g, g->embed), X(g->dx), G_.list, G_.list_start, C);
}

// ----------------------------------------------------------------------------
// 8. Optimizer

// parts[chunk] = sum of squares of a chunk's gradients, in double and in a fixed order.
__global__ static void norm_kernel(double *parts, const float *grads, const Chunk *chunks) {
    __shared__ double shared[BLOCK];
    Chunk k = chunks[blockIdx.x];
    double s = 0;
    for (int i = threadIdx.x; i < k.n; i += BLOCK) s += (double)grads[k.offset + i] * (double)grads[k.offset + i];
    shared[threadIdx.x] = s;
    for (int o = BLOCK / 2; o > 0; o /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < o) shared[threadIdx.x] += shared[threadIdx.x + o];
    }
    if (threadIdx.x == 0) parts[blockIdx.x] = shared[0];
}

// Both gradient norms, what clipping multiplies by, and whether the step may be applied. One block.
__global__ static void step_kernel(Sums *sums, const double *parts, const Chunk *chunks, int64_t n_chunks, float clip) {
    __shared__ double shared[BLOCK];
    for (int index = 0; index < 2; index++) {
        double s = 0;
        for (int64_t i = threadIdx.x; i < n_chunks; i += BLOCK) s += chunks[i].index == index ? parts[i] : 0;
        __syncthreads();
        shared[threadIdx.x] = s;
        for (int o = BLOCK / 2; o > 0; o /= 2) {
            __syncthreads();
            if ((int)threadIdx.x < o) shared[threadIdx.x] += shared[threadIdx.x + o];
        }
        if (threadIdx.x == 0) {
            double norm = sqrt(shared[0]);
            sums->norm[index] = norm;
            sums->clip[index] = clip > 0 && norm > clip ? (float)(clip / norm) : 1;
        }
    }
    if (threadIdx.x == 0) sums->good = isfinite(sums->loss) && isfinite(sums->kl) && isfinite(sums->norm[0]) && isfinite(sums->norm[1]);
}

// AdamW on one chunk, as adamw_update() of train_cpu.c; weights receive the new values rounded.
__global__ static void adamw_kernel(float *params, floatX *weights, float *m, float *v, const float *grads, const Chunk *chunks, const Sums *sums, const StepNumbers *numbers, float b1, float b2, float eps, int indexers) {
    Chunk k = chunks[blockIdx.x];
    StepNumbers s = *numbers;
    if (!sums->good || (k.index && !indexers)) return; // untrained indexers are not decayed either
    float clip = sums->clip[k.index], decay = k.decay ? s.decay[k.index] : 1, rate = s.lr[k.index] / s.fix1;
    for (int64_t i = k.offset + threadIdx.x; i < k.offset + k.n; i += BLOCK) {
        float g = grads[i] * clip, mi = b1 * m[i] + (1 - b1) * g, vi = b2 * v[i] + (1 - b2) * g * g, p = decay * params[i] - rate * mi / (sqrtf(vi * s.inv2) + eps);
        m[i] = mi;
        v[i] = vi;
        params[i] = p;
        if (sizeof(floatX) < sizeof(float)) weights[i] = (floatX)p;
    }
}

// ----------------------------------------------------------------------------
// 9. The engine
// What train_cpu.c's loop calls. Nothing here waits for the device but the end of a step and of an evaluation.

// A pass that was captured as a CUDA graph, by what its kernels were given.
typedef struct { int back, dense, learning, fixed; double loss_scale, kl_scale; int64_t runs, scans; cudaGraphExec_t exec; } Captured;
static Captured captured[16];
static int n_captured;
enum { GRAPH_ROWS = 1 << 16 }; // longer passes hide their launches

// Run a pass: the first time as it is (products choose their algorithms), the second time it is captured, then replayed.
static void gpu_play(Model *g, int back) {
    void (*work)(Model *) = back ? gpu_pass_backward : gpu_pass_forward;
    Captured *x = captured;
    while (x < captured + n_captured && !(x->back == back && x->dense == g->dense && x->learning == g->learning && x->fixed == g->fixed_selection && x->loss_scale == g->loss_scale && x->kl_scale == g->kl_scale)) x++;
    if (g->N > GRAPH_ROWS || g->waiting || G_.timed || x == captured + sizeof captured / sizeof captured[0]) {
        work(g);
        return;
    }
    if (x == captured + n_captured) {
        memset(x, 0, sizeof *x);
        x->back = back; x->dense = g->dense; x->learning = g->learning; x->fixed = g->fixed_selection; x->loss_scale = g->loss_scale; x->kl_scale = g->kl_scale;
        n_captured++;
    }
    if (x->runs++ == 0) {
        work(g);
        return;
    }
    if (!x->exec) {
        cudaGraph_t graph;
        int64_t scans = g->index_scans;
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        work(g);
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&x->exec, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
        x->scans = g->index_scans - scans;
        g->index_scans = scans;
    }
    CUDA_CHECK(cudaGraphLaunch(x->exec, stream));
    g->index_scans += x->scans;
}

// Copy tokens, targets and documents of m to the device: through a ring of pinned buffers, so that the next micro-batch
// can be prepared while this one is still to be read.
static void gpu_stage(Model *m) {
    Model *g = &G_.g;
    int64_t N = g->N, slot = G_.turn++ % RING;
    int32_t *to = G_.staging + slot * 3 * N, *const device[3] = {g->tokens, g->targets, g->doc}, *const host[3] = {m->tokens, m->targets, m->doc};
    CUDA_CHECK(cudaEventSynchronize(G_.staged[slot]));
    for (int i = 0; i < 3; i++) {
        memcpy(to + i * N, host[i], (size_t)N * sizeof(int32_t));
        CUDA_CHECK(cudaMemcpyAsync(device[i], to + i * N, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
    }
    CUDA_CHECK(cudaEventRecord(G_.staged[slot], stream));
}

static void gpu_forward(Model *m) {
    Model *g = &G_.g;
    g->dense = m->dense;
    g->learning = m->learning;
    g->fixed_selection = m->fixed_selection;
    g->loss_scale = m->loss_scale;
    g->kl_scale = m->kl_scale;
    find_documents(m);
    gpu_stage(m);
    phase_begin(PHASE_REST);
    gpu_play(g, 0);
    m->index_scans = g->index_scans;
}
static void gpu_backward(Model *m) {
    gpu_play(&G_.g, 1);
    m->index_scans = G_.g.index_scans;
}
static void gpu_zero_grads(Model *m) {
    G_.n_marks = 0; // a step begins
    CUDA_CHECK(cudaMemsetAsync(G_.g.grads, 0, (size_t)m->n_params * sizeof(float), stream));
}

enum { ROW_BLOCKS = 64 };

// parts[block] = sums of its share of the rows: loss, KL, hits, targets; in a fixed order.
__global__ static void row_parts_kernel(double *parts, const float *loss, const float *kl, const int32_t *hit, const int32_t *targets, int64_t n) {
    __shared__ double shared[4][BLOCK];
    double s[4] = {0, 0, 0, 0};
    for (int64_t i = blockIdx.x * (int64_t)BLOCK + threadIdx.x; i < n; i += ROW_BLOCKS * BLOCK) {
        int there = targets[i] >= 0;
        s[0] += (double)loss[i];
        s[1] += (double)kl[i];
        s[2] += there && hit[i];
        s[3] += there;
    }
    for (int k = 0; k < 4; k++) shared[k][threadIdx.x] = s[k];
    for (int o = BLOCK / 2; o > 0; o /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < o)
            for (int k = 0; k < 4; k++) shared[k][threadIdx.x] += shared[k][threadIdx.x + o];
    }
    for (int k = 0; k < 4 && threadIdx.x == 0; k++) parts[blockIdx.x * 4 + k] = shared[k][0]; // the sums are its own
}
__global__ static void row_total_kernel(Sums *sums, const double *parts) {
    double s[4] = {0, 0, 0, 0};
    for (int b = 0; b < ROW_BLOCKS; b++)
        for (int k = 0; k < 4; k++) s[k] += parts[b * 4 + k];
    sums->loss += s[0];
    sums->kl += s[1];
    sums->hits += s[2];
    sums->targets += (long long)s[3];
}
static void gpu_count(Model *m) {
    Model *g = &G_.g;
    row_parts_kernel<<<ROW_BLOCKS, BLOCK, 0, stream>>>(G_.row_parts, g->row_loss, g->row_kl, g->row_hit, g->targets, g->N);
    row_total_kernel<<<1, 1, 0, stream>>>(G_.sums, G_.row_parts);
    m->sums.kl_rows += m->N * kl_layers(m);
}

// Wait for the device and read the sums; those of the rows start again.
static Stats gpu_sums(Model *m) {
    Sums *s = G_.sums_host;
    CUDA_CHECK(cudaMemcpyAsync(s, G_.sums, sizeof *s, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemsetAsync(G_.sums, 0, offsetof(Sums, nans), stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaGetLastError());
    m->nan_scores = s->nans;
    Stats out = {s->loss, s->kl, s->hits, s->targets, m->sums.kl_rows};
    m->sums.kl_rows = 0;
    return out;
}

static int gpu_update(Model *m, int64_t step, double lr, Stats *s, double norm[2]) {
    const Config *c = &m->c;
    Model *g = &G_.g;
    StepNumbers *x = G_.step_numbers_host;
    for (int i = 0; i < 2; i++) {
        double rate = lr * (i ? c->index_lr_mult : 1);
        x->lr[i] = (float)rate;
        x->decay[i] = (float)(1 - rate * c->weight_decay);
    }
    x->fix1 = (float)(1 - pow(c->beta1, (double)step));
    x->inv2 = (float)(1 / (1 - pow(c->beta2, (double)step)));
    CUDA_CHECK(cudaMemcpyAsync(G_.step_numbers, x, sizeof *x, cudaMemcpyHostToDevice, stream));
    phase_begin(PHASE_UPDATE);
    norm_kernel<<<(unsigned)G_.n_chunks, BLOCK, 0, stream>>>(G_.norm_parts, g->grads, G_.chunks);
    step_kernel<<<1, BLOCK, 0, stream>>>(G_.sums, G_.norm_parts, G_.chunks, G_.n_chunks, (float)c->clip);
    adamw_kernel<<<(unsigned)G_.n_chunks, BLOCK, 0, stream>>>(g->params, G_.weights, g->m, g->v, g->grads, G_.chunks, G_.sums, G_.step_numbers, (float)c->beta1, (float)c->beta2, (float)c->adam_eps,
                                                             c->kl_coef > 0);
    phase_begin(PHASE_REST);
    *s = gpu_sums(m);
    if (G_.timed) {
        double ms[PHASES];
        phase_times(ms);
        printf("phases, ms");
        for (int i = 0; i < PHASES; i++) printf(" | %s %.2f", phase_name[i], ms[i]);
        printf("\nselections");
        for (int64_t l = 0; l < c->L; l++) {
            unsigned long long hash;
            CUDA_CHECK(cudaMemcpy(&hash, G_.hashes + l, sizeof hash, cudaMemcpyDeviceToHost));
            if (is_sparse(g->layers[l].letter)) printf(" %016llx", hash);
        }
        printf("\n");
    }
    norm[0] = G_.sums_host->norm[0];
    norm[1] = G_.sums_host->norm[1];
    return G_.sums_host->good;
}

static void gpu_copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}
static void gpu_to_host(Model *m) {
    size_t bytes = (size_t)m->n_params * sizeof(float);
    gpu_copy(m->params, G_.g.params, bytes, cudaMemcpyDeviceToHost);
    gpu_copy(m->m, G_.g.m, bytes, cudaMemcpyDeviceToHost);
    gpu_copy(m->v, G_.g.v, bytes, cudaMemcpyDeviceToHost);
}
static void gpu_from_host(Model *m) {
    size_t bytes = (size_t)m->n_params * sizeof(float);
    gpu_copy(G_.g.params, m->params, bytes, cudaMemcpyHostToDevice);
    if (m->m) {
        gpu_copy(G_.g.m, m->m, bytes, cudaMemcpyHostToDevice);
        gpu_copy(G_.g.v, m->v, bytes, cudaMemcpyHostToDevice);
    }
    as_operand(G_.g.params, G_.weights, m->n_params);
}

// Scratch that both models use: as large as the larger needs.
typedef struct { int64_t space, kl_space, place, pairs, lists, starts, delta, wide, slots, partial, chosen, by_head, select; } Needs;
static void gpu_needs(Needs *x, const Model *g) {
    const Config *c = &g->c;
    int64_t longest = 1, cand = 0; // a chunk holds at least one query of the longest support, at most about half a gibibyte
    x->wide = max64(x->wide, max64(max64(c->C, c->q_lora), max64(c->F, c->kv_lora + c->rope)));
    for (int64_t i = 0; i < c->L; i++) {
        const Layer *l = &g->layers[i];
        x->starts = max64(x->starts, g->B * l->n_rows + 1);
        x->wide = max64(x->wide, max64(l->R, c->H));
        if (is_sparse(l->letter) && g->training) x->select = max64(x->select, select_space(g, l));
        for (int dense = 0; dense <= (c->warmup_dense > 0); dense++) { // what the layer needs in each stage
            Model stage = *g;
            stage.dense = dense;
            int all = attends_to_all(&stage, l), path = core_path(&stage, l);
            if (path == CORE_BY_HEAD) x->by_head = g->N * c->H * (c->nope + c->v_dim);
            else if (path == CORE_GATHERED) {
                int64_t queries = fast_queries(&stage, l), slots = queries * fast_stride(&stage, l);
                x->slots = max64(x->slots, slots);
                x->place = max64(x->place, slots);
                x->pairs = max64(x->pairs, slots);
                x->partial = max64(x->partial, slots * max64(share_width(l), l->source >= 0 ? c->DI : 0));
                if (l->source >= 0) x->chosen = max64(x->chosen, queries * c->topk);
            } else {
                longest = max64(longest, layer_support(g, l, all));
                cand = max64(cand, l->source >= 0 ? (all ? max64(l->n_cand, 1) : c->topk) : 0);
                if (path == CORE_PLAIN) x->lists = max64(x->lists, g->N * c->topk);
            }
        }
    }
    int64_t least = max64(2 * c->H * longest, c->HI * cand);
    x->space = max64(x->space, max64(least, min64(g->N * c->H * longest, (int64_t)1 << 27)));
    x->kl_space = max64(x->kl_space, max64(c->HI * cand, min64(g->N * c->HI * cand, (int64_t)1 << 27)));
    x->place = max64(x->place, x->space / c->H);
    x->starts = max64(x->starts, c->V + 1);
    x->lists = max64(x->lists, g->N);
    x->pairs = max64(x->pairs, x->lists);
    x->delta = max64(x->delta, g->N * c->H);
}

// All device memory: the plan of train_cpu.c for training (unless rows only) and for generation, then what only this
// program needs. Walked twice, as there.
static void gpu_plan_walk(Arena *a) {
    Model *g = &G_.g, *models[2] = {g, &G_.row};
    const Config *c = &g->c;
    Needs x;
    memset(&x, 0, sizeof x);
    const char *name = "AdamW moments";
    size_t bytes = (size_t)g->n_params * sizeof(float), rounded = (size_t)g->n_params * sizeof(floatX);
    lt_workspace = plan_take(a, "workspace of the products", LT_WORKSPACE); // first: it must be aligned to 256 bytes
    g->params = (float *)plan_take(a, "parameters (float32)", bytes);
    G_.weights = sizeof(floatX) == sizeof(float) ? (floatX *)g->params : (floatX *)plan_take(a, "working copy of the matrices", rounded);
    if (g->training) {
        g->grads = (float *)plan_take(a, "gradients (float32)", bytes);
        g->m = (float *)plan_take(a, name, bytes);
        g->v = (float *)plan_take(a, name, bytes);
    }
    for (int i = 0; i < 2; i++) {
        Model *m = models[i];
        if (!m->T) continue;
        a->act_bytes = sizeof(floatX);
        plan_walk(m, a);
        a->used = a->peak; // behind the layers' shared place
        gpu_needs(&x, m);
        m->params = g->params;
    }
    G_.space = x.space;
    G_.kl_space = x.kl_space;
    name = "attention of a chunk of queries";
    G_.probs = plan_real(a, name, x.space);
    G_.ds = plan_real(a, name, x.space);
    G_.place = plan_int(a, name, x.place);
    G_.mass = plan_real(a, name, x.slots);
    G_.target = plan_real(a, name, x.kl_space / c->HI);
    G_.dots = plan_real(a, name, x.kl_space);
    // Selection is done before attention begins, partial rows are made in backward: one place for both.
    G_.select = (char *)plan_take(a, "selection, partial rows of a chunk", max((size_t)x.select, g->training ? (size_t)x.partial * sizeof(floatX) : 0));
    G_.partial_rows = (floatX *)G_.select;
    name = "sums, inverse lists, optimizer";
    if (g->training) {
        if (x.by_head) {
            G_.kv = (floatX *)plan_take(a, "F by head", (size_t)x.by_head * sizeof(floatX));
            G_.d_kv = (floatX *)plan_take(a, "F by head", (size_t)x.by_head * sizeof(floatX));
            G_.share = (floatX *)plan_take(a, "F by head", (size_t)(g->N * c->H * c->rope) * sizeof(floatX));
            G_.d_kr = plan_real(a, "F by head", g->N * c->rope);
            G_.stat = (float2 *)plan_take(a, "F by head", (size_t)(g->N * c->H) * sizeof(float2));
        }
        G_.delta = plan_real(a, name, x.delta);
        G_.partial = plan_real(a, name, ROW_PARTS * x.wide);
        G_.pair_key = (uint32_t *)plan_int(a, name, x.pairs);
        G_.pair_key2 = (uint32_t *)plan_int(a, name, x.pairs);
        G_.pair = (uint32_t *)plan_int(a, name, x.pairs);
        G_.pair2 = (uint32_t *)plan_int(a, name, x.pairs);
        G_.list = (int2 *)plan_int(a, name, 2 * x.lists);
        G_.list_start = plan_int(a, name, x.starts);
        G_.slot_of = plan_int(a, name, x.slots);
        G_.candidate_mass = plan_real(a, name, x.chosen);
        G_.sort_bytes = 0;
        CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, G_.sort_bytes, G_.pair_key, G_.pair_key2, G_.pair, G_.pair2, (int)x.pairs, 0, 32, stream));
        G_.sort_space = plan_take(a, name, G_.sort_bytes);
        G_.chunks = (Chunk *)plan_take(a, name, (size_t)G_.n_chunks * sizeof(Chunk));
        G_.norm_parts = (double *)plan_take(a, name, (size_t)G_.n_chunks * sizeof(double));
        G_.row_parts = (double *)plan_take(a, name, ROW_BLOCKS * 4 * sizeof(double));
    }
    int64_t words = 0;
    for (int64_t i = 0; i < c->L; i++)
        if (selection_takes_turns(g, &g->layers[i]) && selection_kept(g, &g->layers[i])) words = max64(words, g->layers[i].packing.words);
    for (int s = 0; s < 2 && g->waiting; s++) G_.offload.stage[s] = (uint32_t *)plan_int(a, "selections to and from the host", g->N * words);
    G_.sums = (Sums *)plan_take(a, name, sizeof(Sums));
    G_.step_numbers = (StepNumbers *)plan_take(a, name, sizeof(StepNumbers));
    G_.hashes = (unsigned long long *)plan_take(a, name, (size_t)c->L * sizeof *G_.hashes);
}

// A device model of B rows of T tokens beside the host's m.
static void gpu_model(Model *g, const Model *m, int64_t B, int64_t T, int training) {
    *g = *m;
    g->layers = (Layer *)xalloc((size_t)m->c.L * sizeof(Layer));
    memcpy(g->layers, m->layers, (size_t)m->c.L * sizeof(Layer));
    memset(&g->arena, 0, sizeof g->arena);
    g->B = B; g->T = T; g->N = B * T; g->r0 = 0; g->nr = g->N;
    g->training = training;
    g->lanes = 0;
    g->scratch_bytes = 0;
    g->logit_rows = training ? max64(1, min64(g->N, ((int64_t)1 << 28) / g->Vp)) : 1; // half a gibibyte in bf16
}

__global__ static void has_wgmma_kernel(int *yes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    *yes = 1;
#else
    *yes = 0;
#endif
}
// Whether this card runs wgmma and this program was compiled for it.
static int gpu_has_wgmma(void) {
    static int known = -1;
    int *yes;
    if (known >= 0) return known;
    CUDA_CHECK(cudaMalloc(&yes, sizeof(int)));
    has_wgmma_kernel<<<1, 1>>>(yes);
    CUDA_CHECK(cudaMemcpy(&known, yes, sizeof(int), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(yes));
    return known;
}

// What device memory a run needs, without taking any: for training when B, and for generation.
static void gpu_prepare(Model *m, int64_t B, int64_t T) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) die("no CUDA device: expected an NVIDIA GPU and its driver; ./train_cpu trains on the CPU");
    memset(&G_, 0, sizeof G_);
    G_.wgmma = sizeof(floatX) < sizeof(float) && gpu_has_wgmma();
    G_.select_most = (int64_t)1 << 30;
    CUDA_CHECK(cudaDeviceGetAttribute(&G_.multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    if (B * T * max64(m->c.topk, 1) >= (int64_t)1 << 31) die("B * T * k = %lld: the inverse lists of this version hold less than 2^31 pairs", (long long)(B * T * m->c.topk));
    gpu_model(&G_.g, m, B, T, B > 0);
    if (!B || m->c.sample_every) gpu_model(&G_.row, m, 1, (int64_t)strlen(m->c.prompt) + 1 + m->c.sample_tokens, 0);
    for (int i = 0; i < m->n_tensors; i++) G_.n_chunks += (m->tensors[i].size + CHUNK_SIZE - 1) / CHUNK_SIZE;
    if (B && m->c.replay_offload) G_.g.waiting = &G_.offload.pinned;
    gpu_plan_walk(&G_.g.arena);
    G_.g.arena.pinned = G_.offload.pinned.peak;
}
// Forget what gpu_prepare() planned.
static void gpu_unprepare(void) {
    free(G_.g.layers);
    free(G_.row.layers);
    memset(&G_, 0, sizeof G_);
}
static void gpu_plan(Model *m) {
    gpu_prepare(m, m->c.B, m->c.T);
    m->arena = G_.g.arena;
    gpu_unprepare();
}

// The nearest options with which training on B rows of T tokens fits into left bytes, found by planning again: recomputation,
// the smaller selections, and these on the host, then half the rows, half the length, and again. text receives them; returns what they need, 0
// when nothing fits. Options that save nothing are not named. Nothing is prepared afterwards.
static size_t gpu_nearest_fit(const Model *m, int64_t B, int64_t T, size_t left, char text[256]) {
    Model x = *m;
    size_t bytes = SIZE_MAX;
    int64_t rows = B, length = T;
    char flags[128] = "", sizes[2][64] = {"", ""};
    for (int step = 0; bytes > left; step++) {
        size_t before = bytes;
        Config as_before = x.c;
        const char *flag = "";
        if (step == 1) { strcpy(x.c.recompute, "block"); flag = " --recompute block"; }
        else if (step == 2) { strcpy(x.c.replay_store, "ef"); flag = " --replay-store ef"; }
        else if (step == 3) { x.c.replay_offload = 1; flag = " --replay-offload 1"; }
        else if (step > 3 && rows > 1) snprintf(sizes[0], sizeof sizes[0], " --batch-size %lld", (long long)(rows /= 2));
        else if (step > 3 && length > 3) snprintf(sizes[1], sizeof sizes[1], " --seq-len %lld", (long long)(length = length / 4 * 2)); // even, as the copy task wants it
        else if (step > 3) return 0;
        gpu_prepare(&x, rows, length);
        bytes = G_.g.arena.peak;
        gpu_unprepare();
        if (bytes < before) strcat(flags, flag);
        else x.c = as_before;
    }
    snprintf(text, 256, "%s%s%s", flags, sizes[0], sizes[1]);
    return bytes;
}

// Take the memory and fill it; tables of RoPE, the chunks, the parameters.
static void gpu_open(Model *m, int64_t B, int64_t T) {
    size_t left, total;
    gpu_prepare(m, B, T);
    Model *g = &G_.g, *models[2] = {g, &G_.row};
    CUDA_CHECK(cudaStreamCreate(&stream));
    cublas_check(cublasLtCreate(&lt), "create");
    G_.timed = (int)m->c.phases;
    G_.bytes = g->arena.peak;
    CUDA_CHECK(cudaMemGetInfo(&left, &total));
    if (G_.bytes > left) {
        char text[256];
        size_t needed = G_.bytes, fits = B ? gpu_nearest_fit(m, B, T, left, text) : 0;
        if (fits) die("the device has %zu MiB free, but %zu MiB are needed; it fits with%s: %zu MiB", left >> 20, needed >> 20, text, fits >> 20);
        die("the device has %zu MiB free, but %zu MiB are needed, and no shorter row makes it fit", left >> 20, needed >> 20);
    }
    CUDA_CHECK(cudaMalloc(&g->arena.base, G_.bytes));
    CUDA_CHECK(cudaMemset(g->arena.base, 0, G_.bytes));
    g->arena.used = g->arena.peak = 0;
    if (g->waiting) {
        Offload *x = &G_.offload;
        if (x->pinned.peak && cudaMallocHost(&x->pinned.base, x->pinned.peak) != cudaSuccess) die("--replay-offload 1: the host has no %zu MiB of pinned memory for the selections", x->pinned.peak >> 20);
        x->pinned.used = 0;
        CUDA_CHECK(cudaStreamCreateWithFlags(&x->copies, cudaStreamNonBlocking));
        for (int s = 0; s < 2; s++) {
            CUDA_CHECK(cudaEventCreateWithFlags(&x->used[s], cudaEventDisableTiming));
            CUDA_CHECK(cudaEventCreateWithFlags(&x->copied[s], cudaEventDisableTiming));
        }
    }
    gpu_plan_walk(&g->arena);
    for (int i = 0; i < 2; i++) {
        Model *x = models[i];
        if (!x->T) continue;
        float *tables = (float *)xalloc((size_t)(ROPE_KINDS * x->T * m->c.rope) * sizeof(float));
        rope_tables(&m->c, x->T, tables);
        gpu_copy(x->cos_sin, tables, (size_t)(ROPE_KINDS * x->T * m->c.rope) * sizeof(float), cudaMemcpyHostToDevice);
        free(tables);
    }
    if (B) {
        Chunk *chunks = (Chunk *)xalloc((size_t)G_.n_chunks * sizeof(Chunk)), *c = chunks;
        for (int i = 0; i < m->n_tensors; i++) {
            const Tensor *t = &m->tensors[i];
            for (int64_t j = 0; j < t->size; j += CHUNK_SIZE) {
                Chunk x = {t->offset + j, (int32_t)min64(CHUNK_SIZE, t->size - j), t->index, t->decay};
                *c++ = x;
            }
        }
        gpu_copy(G_.chunks, chunks, (size_t)G_.n_chunks * sizeof(Chunk), cudaMemcpyHostToDevice);
        free(chunks);
        CUDA_CHECK(cudaMallocHost(&G_.staging, (size_t)(RING * 3 * g->N) * sizeof(int32_t)));
        for (int i = 0; i < RING; i++) CUDA_CHECK(cudaEventCreateWithFlags(&G_.staged[i], cudaEventDisableTiming));
    }
    CUDA_CHECK(cudaMallocHost(&G_.sums_host, sizeof(Sums)));
    CUDA_CHECK(cudaMallocHost(&G_.step_numbers_host, sizeof(StepNumbers)));
    gpu_from_host(m);
}

static void gpu_close(void) {
    for (int i = 0; i < n_gemm_plans; i++) {
        cublasLtMatmulDescDestroy(gemm_plans[i].op);
        cublasLtMatrixLayoutDestroy(gemm_plans[i].a);
        cublasLtMatrixLayoutDestroy(gemm_plans[i].b);
        cublasLtMatrixLayoutDestroy(gemm_plans[i].c);
    }
    free(gemm_plans);
    gemm_plans = NULL;
    n_gemm_plans = 0;
    for (int i = 0; i < n_captured; i++)
        if (captured[i].exec) CUDA_CHECK(cudaGraphExecDestroy(captured[i].exec));
    n_captured = 0;
    cublasLtDestroy(lt);
    if (G_.g.waiting) {
        Offload *x = &G_.offload;
        CUDA_CHECK(cudaStreamSynchronize(x->copies));
        CUDA_CHECK(cudaStreamDestroy(x->copies));
        if (x->pinned.base) CUDA_CHECK(cudaFreeHost(x->pinned.base));
        for (int s = 0; s < 2; s++) {
            CUDA_CHECK(cudaEventDestroy(x->used[s]));
            CUDA_CHECK(cudaEventDestroy(x->copied[s]));
        }
    }
    CUDA_CHECK(cudaFree(G_.g.arena.base));
    for (int i = 0; i < G_.most_marks; i++) CUDA_CHECK(cudaEventDestroy(G_.marks[i].at));
    free(G_.marks);
    if (G_.staging) {
        CUDA_CHECK(cudaFreeHost(G_.staging));
        for (int i = 0; i < RING; i++) CUDA_CHECK(cudaEventDestroy(G_.staged[i]));
    }
    CUDA_CHECK(cudaFreeHost(G_.sums_host));
    CUDA_CHECK(cudaFreeHost(G_.step_numbers_host));
    free(G_.g.layers);
    free(G_.row.layers);
    CUDA_CHECK(cudaStreamDestroy(stream));
    memset(&G_, 0, sizeof G_);
}

// Generation: the host's g holds tokens and the logits of one row; the device's model G_.row the caches.
static void gpu_row_open(Model *g, const Model *m, int64_t T) {
    if (!G_.bytes) gpu_open((Model *)m, 0, 0); // --generate: nothing was trained before
    *g = *m;
    g->B = 1; g->T = g->N = G_.row.T; g->r0 = 0; g->nr = 0;
    if (T > g->T) die("a generation of %lld tokens was asked for, planned were %lld", (long long)T, (long long)g->T);
    g->tokens = (int32_t *)xalloc((size_t)g->N * sizeof(int32_t));
    g->targets = (int32_t *)xalloc((size_t)g->N * sizeof(int32_t));
    g->doc = (int32_t *)xalloc((size_t)g->N * sizeof(int32_t));
    g->logits = (real *)xalloc((size_t)g->Vp * sizeof(real));
    G_.row_host = g;
    G_.row.dense = m->dense;
    G_.row.learning = 0;
}
static real *gpu_row_logits(Model *m) {
    Model *g = &G_.row;
    int64_t C = g->c.C, last = m->r0 + m->nr - 1;
    floatX *none = NULL, *xf = X(g->xf) + last * C, *logits = (floatX *)xalloc((size_t)g->Vp * sizeof(floatX));
    find_documents(m);
    g->r0 = m->r0;
    g->nr = m->nr;
    gpu_copy(g->tokens + m->r0, m->tokens + m->r0, (size_t)m->nr * sizeof(int32_t), cudaMemcpyHostToDevice);
    gpu_copy(g->doc + m->r0, m->doc + m->r0, (size_t)m->nr * sizeof(int32_t), cudaMemcpyHostToDevice);
    gpu_blocks_forward(g);
    gpu_rmsnorm_forward(plain_rows(xf, C), g->rstd_f + last, plain_rows(X(g->last_x) + last * C, C), param(g, g->final_norm), 0, 1, C, g->c.rms_eps, g->T);
    gpu_linear_forward(X(g->logits), none, xf, weight(g->head), 1, C, g->Vp);
    gpu_copy(logits, X(g->logits), (size_t)g->Vp * sizeof(floatX), cudaMemcpyDeviceToHost);
    CUDA_CHECK(cudaGetLastError());
    for (int64_t v = 0; v < g->Vp; v++) m->logits[v] = (float)logits[v];
    free(logits);
    return m->logits;
}
static void gpu_row_close(Model *g) {
    free(g->tokens);
    free(g->targets);
    free(g->doc);
    free(g->logits);
}
static double gpu_memory_mib(void) { return (double)G_.bytes / 1048576.0; }

// From here on the loop computes on the device.
static void gpu_engine(void) {
    Engine device = {gpu_plan, gpu_forward, gpu_backward, gpu_zero_grads, gpu_count, gpu_sums, gpu_update, gpu_to_host, gpu_from_host, gpu_row_open, gpu_row_close, gpu_row_logits, gpu_memory_mib};
    engine = device;
}

// ----------------------------------------------------------------------------
// 10. --verify

// n values of the device as floats; the caller frees them.
template <class A> static float *gpu_read(const A *device, int64_t n) {
    A *x = (A *)xalloc((size_t)n * sizeof(A));
    float *y = (float *)xalloc((size_t)n * sizeof(float));
    gpu_copy(x, device, (size_t)n * sizeof(A), cudaMemcpyDeviceToHost);
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
    free(x);
    return y;
}

// Norm-wise relative difference of n values on the device from a host array, and their cosine. floor is added to the
// norms: a gradient that is zero but for rounding (a softmax over one key) has no relative error and no direction.
typedef struct { double error, cosine; } Difference;
template <class A> static Difference gpu_difference(const A *device, const float *host, int64_t n, double floor) {
    float *x = gpu_read(device, n);
    double diff = 0, ours = 0, norm = 0, dot = 0;
    for (int64_t i = 0; i < n; i++) {
        double a = (double)x[i], b = (double)host[i];
        diff += (a - b) * (a - b);
        ours += a * a;
        norm += b * b;
        dot += a * b;
    }
    free(x);
    Difference d = {sqrt(diff) / (sqrt(norm) + floor + 1e-30), (dot + floor * floor) / (sqrt(ours + floor * floor) * sqrt(norm + floor * floor) + 1e-60)};
    return d;
}

// What a comparison with the reference found, the largest error (smallest cosine) of each kind.
typedef struct { double loss, kl, output, index, grad, cosine; char worst[96]; int64_t targets, chosen, differ, unexplained; } Verdict;

// Limits within which a step agrees with the reference, in this precision. loss: difference in nats a token; gap: share
// of a row's largest sum of heads by which a swapped candidate may miss the reference's k-th.
static const double LIMIT_LOSS = sizeof(floatX) == 4 ? 1e-5 : 1e-2, LIMIT_KL = sizeof(floatX) == 4 ? 1e-3 : 5e-2, LIMIT_OUTPUT = sizeof(floatX) == 4 ? 2e-5 : 2e-2,
                    LIMIT_GRAD = sizeof(floatX) == 4 ? 1e-5 : 5e-2, LIMIT_COSINE = sizeof(floatX) == 4 ? 0.999999 : 0.999, LIMIT_GAP = sizeof(floatX) == 4 ? 1e-4 : 5e-2;
static int verdict_good(const Verdict *v) {
    double few = sizeof(floatX) == 4 ? 1 : 1 + 3 / sqrt((double)max64(1, v->targets)); // roundings average out over many targets only
    return v->loss < LIMIT_LOSS * few && v->kl < LIMIT_KL && v->output < LIMIT_OUTPUT && v->index < LIMIT_OUTPUT && v->grad < LIMIT_GRAD && v->cosine > LIMIT_COSINE && v->unexplained == 0;
}

// Relative error of n values of the device, which the host then takes over.
static double take_over(real *host, const floatX *device, int64_t n) {
    double error = gpu_difference(device, host, n, 0).error;
    float *x = gpu_read(device, n);
    memcpy(host, x, (size_t)n * sizeof(float));
    free(x);
    return error;
}

// The same step on both sides. h is a host model with its buffers planned, tokens and targets set, learning. Selections
// are compared first: where the sets differ, the reference's scores of the swapped candidates must lie within rounding of
// its k-th (unless an earlier layer chose differently: then this one's inputs differ by more). Then the device takes the
// reference's selections; with recomputation there is only this, for scores need the index queries of all layers. The
// reference's backward takes the device's index queries and keys, once these have been compared: the gradient of a relu
// jumps where a dot product crosses 0, and bf16 moves one in seven hundred across. What follows compares arithmetic alone.
static Verdict gpu_compare(Model *h, int print) {
    Model *g = &G_.g;
    Verdict v;
    memset(&v, 0, sizeof v);
    v.cosine = 1;
    model_forward(h);
    gpu_forward(h);
    CUDA_CHECK(cudaDeviceSynchronize());
    int64_t k = h->c.topk, T = h->T, N = h->N;
    int32_t *sel = (int32_t *)xalloc((size_t)(N * k) * sizeof(int32_t));
    real *dots = (real *)xalloc((size_t)(h->c.HI * T) * sizeof(real));
    float *row = (float *)xalloc((size_t)T * sizeof(float));
    for (int64_t j = 0; j < h->c.L && !h->dense; j++) {
        Layer *l = &h->layers[j];
        if (!is_sparse(l->letter)) continue;
        int64_t upstream = v.differ;
        if (l->packed) {
            gpu_copy(g->layers[j].packed, l->packed, (size_t)(N * l->packing.words) * sizeof(uint32_t), cudaMemcpyDefault); // on the device, or pinned
            continue;
        }
        gpu_copy(sel, g->layers[j].sel, (size_t)(N * k) * sizeof(int32_t), cudaMemcpyDeviceToHost);
        for (int64_t i = 0; i < N && strcmp(h->c.recompute, "block"); i++) { // scores need this layer's index queries
            int64_t a = 0, b = 0, lo, hi;
            int32_t *ours = sel + i * k, *ref = l->sel + i * k;
            visible(h, l, i, &lo, &hi);
            v.chosen += min64(hi - lo, k);
            if (!memcmp(ours, ref, (size_t)k * sizeof(int32_t))) continue;
            index_scores(h, l, i / T, i % T, 1, 0, l->n_cand, dots, row);
            float kth = INFINITY, size = 0;
            for (int64_t s = 0; s < k && ref[s] >= 0; s++) kth = row[ref[s]] < kth ? row[ref[s]] : kth;
            for (int64_t s = lo; s < hi; s++) { // before heads of either sign cancel: that is what rounding is relative to
                float sum = 0;
                for (int64_t x = 0; x < h->c.HI; x++) sum += fabsf((float)l->w_index[i * h->c.HI + x]) * fmaxf((float)dots[x * l->n_cand + s], 0.0f);
                size = fmaxf(size, sum);
            }
            while (a < k || b < k) { // merge two ascending lists
                int32_t x = a < k && ours[a] >= 0 ? ours[a] : INT32_MAX, y = b < k && ref[b] >= 0 ? ref[b] : INT32_MAX;
                if (x == INT32_MAX && y == INT32_MAX) break;
                if (x != y) {
                    int32_t s = x < y ? x : y;
                    v.differ++;
                    v.unexplained += s < lo || s >= hi || (!upstream && fabs((double)row[s] - (double)kth) > LIMIT_GAP * (double)size);
                }
                a += x <= y;
                b += y <= x;
            }
        }
        gpu_copy(g->layers[j].sel, l->sel, (size_t)(N * k) * sizeof(int32_t), cudaMemcpyHostToDevice);
    }
    int fixed = h->fixed_selection;
    double loss = 0, kl = 0;
    h->fixed_selection = 1;
    zero_grads(h);
    model_forward(h);
    for (int64_t i = 0; i < N; i++) loss += (double)h->row_loss[i];
    for (int64_t i = 0; i < N; i++) v.targets += h->targets[i] >= 0;
    gpu_sums(h); // those of the first pass are not wanted
    gpu_zero_grads(h);
    gpu_forward(h);
    for (int64_t j = 0; j < h->c.L && strcmp(h->c.recompute, "block"); j++) { // with block only the last layer's are there
        const Layer *l = &h->layers[j], *d = &g->layers[j];
        if (!is_sparse(l->letter)) continue;
        v.index = fmax(v.index, take_over(l->q_index, X(d->q_index), N * h->c.HI * h->c.DI));
        v.index = fmax(v.index, take_over(l->k_index, X(d->k_index), h->B * l->n_cand * h->c.DI));
    }
    model_backward(h);
    for (int64_t i = 0; i < N; i++) kl += (double)h->row_kl[i];
    gpu_backward(h);
    gpu_count(h);
    Stats s = gpu_sums(h);
    h->fixed_selection = fixed;
    v.loss = fabs(s.loss - loss) / (sizeof(floatX) == 4 ? fabs(loss) + 1e-30 : (double)max64(1, v.targets));
    v.kl = fabs(s.kl - kl) / (fabs(kl) + (sizeof(floatX) == 4 ? 1e-6 : 1e-2 * (double)N));
    for (int64_t j = 1; j <= h->c.L; j++) {
        double d = gpu_difference(X(j < h->c.L ? g->layers[j].x : g->last_x), j < h->c.L ? h->layers[j].x : h->last_x, N * h->c.C, 0).error;
        if (print) printf("  output of layer %-3lld (%c)                                          relative error %.2e\n", (long long)j - 1, h->layers[j - 1].letter, d);
        if (!(d <= v.output)) v.output = d;
    }
    for (int i = 0; i < h->n_tensors; i++) {
        const Tensor *t = &h->tensors[i];
        Difference d = gpu_difference(grad(g, i), grad(h, i), t->size, 5e-2 * grad_norm(h, t->index) + 1e-12);
        if (print) printf("  gradient %-62s relative error %.2e, cosine %.6f\n", t->name, d.error, d.cosine);
        if (!(d.error <= v.grad)) { v.grad = d.error; snprintf(v.worst, sizeof v.worst, "%s", t->name); }
        if (!(d.cosine >= v.cosine)) v.cosine = d.cosine;
    }
    free(sel);
    free(dots);
    free(row);
    return v;
}

// ----------------------------------------------------------------------------
// 11. Command line
// The loop is train() of train_cpu.c; this program hands it another engine.

static void gpu_report(void) {
    cudaDeviceProp p;
    int device, driver, runtime;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&p, device));
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    printf("device: %s, sm_%d%d, %zu MiB, %d multiprocessors; CUDA %d.%d, driver %d.%d\n", p.name, p.major, p.minor, p.totalGlobalMem >> 20, p.multiProcessorCount,
           runtime / 1000, runtime % 100 / 10, driver / 1000, driver % 100 / 10);
    printf("precision: %s; deterministic: no float atomics\n", PRECISION);
}

// Which kernels the layers run, and why not the faster ones; once for each letter of the pattern.
static void gpu_report_paths(void) {
    const Model *g = &G_.g;
    if (g->waiting && g->N <= GRAPH_ROWS) printf("no CUDA graphs: with --replay-offload 1 a second stream takes part in every pass\n");
    const char *small = sizeof(floatX) == sizeof(float) ? "float32" : "no kernel for these sizes";
    const char *const paths[] = {"wgmma, a key and value for each head", "matrix products over chunks of queries", "tensor cores over gathered rows", "plain kernels"}; // as core_path()
    char seen[8] = "";
    for (int64_t i = 0; i < g->c.L; i++) {
        const Layer *l = &g->layers[i];
        if (strchr(seen, l->letter)) continue;
        seen[strlen(seen)] = l->letter;
        int path = core_path(g, l);
        printf("layer %c: attention by %s", l->letter, paths[path]);
        if (path == CORE_PRODUCTS) printf(G_.wgmma ? " (no wgmma kernel for these sizes)" : " (no wgmma here)");
        if (path == CORE_PLAIN) printf(" (%s)", small);
        if (is_sparse(l->letter)) {
            Core c = core_of(g, l);
            if (wants_table(g) && select_path(c, 1, 1) == SELECT_STREAM)
                die("--topk table: layer %c's scores come from tensor cores here, a table of them needs a card of sm_90 and --index-n-heads of 4, 8, 16, 32 or 64", l->letter);
            int choose = select_path(c, wants_table(g), 1);
            const char *const how[] = {"wgmma over all keys", "streaming, tensor cores", "streaming, plain"}; // as select_path()
            if (c.control) printf("; selection by --selector %s", g->c.selector);
            else if (wants_table(g)) printf("; selection by a table of scores (--topk table), %s", choose == SELECT_SCAN ? "wgmma" : "plain");
            else printf("; selection by HyTopK, %s", how[choose]);
            if (!c.control && choose == SELECT_PLAIN) printf(" (%s)", small);
            if (!c.control && choose == SELECT_STREAM) printf(" (%s)", c.n_cand < SCAN_LEAST ? "few candidates" : G_.wgmma ? "no wgmma kernel for these sizes" : "no wgmma here");
        }
        printf("\n");
    }
}

#ifndef TESTING
int main(int argc, char **argv) {
    Config c;
    Model m;
    Loader data[2];
    Tokenizer tok;
    gpu_engine();
    if (!prepare(&c, &m, data, &tok, argc, argv)) return 0;
    if (!strcmp(c.selector, "oracle")) die("--selector oracle: expected indexer, random or window; only ./train_cpu computes the attention that the oracle needs");
    if (c.verify && !strcmp(c.recompute, "block") && !c.replay) die("--verify 1 lets both sides use one selection: --replay 0 keeps none");
    gpu_report();
    if (c.probe) printf("probe: not on the device yet, recall@k and mass@k are left out\n");
    if (c.verify) activations_plan(&m, c.B, c.T, 1, 0);
    else { // the host holds what the loop writes
        memset(&m.arena, 0, sizeof m.arena);
        m.B = c.B; m.T = c.T; m.N = c.B * c.T; m.r0 = 0; m.nr = m.N;
        m.tokens = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
        m.targets = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
        m.doc = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
    }
    gpu_open(&m, c.B, c.T);
    gpu_report_paths();
    if (c.verify) {
        for (int64_t b = 0; b < m.B; b++) loader_row(&data[0], b, m.tokens + b * m.T, m.targets + b * m.T);
        m.learning = 1;
        m.dense = c.warmup_dense > 0;
        m.loss_scale = 1.0 / (double)m.N;
        m.kl_scale = c.kl_coef / (double)m.N;
        Verdict v = gpu_compare(&m, 1);
        printf("verify: loss %.2e, KL %.2e, layer outputs %.2e, index queries and keys %.2e, gradients %.2e (%s), cosine %.6f; %lld of %lld chosen candidates differ, %lld beyond rounding\n", v.loss, v.kl, v.output, v.index, v.grad, v.worst,
               v.cosine, (long long)v.differ, (long long)v.chosen, (long long)v.unexplained);
        printf("verify: %s\n", verdict_good(&v) ? "agrees" : "DOES NOT AGREE");
        return verdict_good(&v) ? 0 : 1;
    }
    train(&m, &data[0], &data[1], &tok, argc, argv);
    gpu_close();
    free(m.tokens); free(m.targets); free(m.doc);
    finish(&m, data, &tok);
    return 0;
}
#endif
