/*
hyscale.c: the CUDA trainer. It includes train_cpu.c (its main left out) and replaces the mathematics by kernels, so
both programs share one configuration, one table of parameters, one memory plan, one data loader, one checkpoint, one
command line; and this one can check itself against the reference at any time: --verify 1.

Build and run:  make run          (or: make train_gpt_sparse && ./train_gpt_sparse --help)

This version is the whole model in float32 with plain kernels: correct first. Everything is deterministic: no kernel
uses atomics, sums run in a fixed order.

Contents, in the order of train_cpu.c
   1  utilities            checked calls, launches
   2  matrix product       cuBLASLt
   3  layers               norms, RoPE, SwiGLU, embedding, elementwise
   4  selection            HyTopK (streaming), one block of threads a query
   5  sparse attention     the core of all letters: support, softmax, sums; the indexer's KL; backward by inverse lists
   6  attention layers     MLA, compressed, grouped-query: projections around the core
   7  the model            classifier, forward, backward
   8  optimizer            AdamW, gradient norm
   9  transfers, --verify  between host and device; against the CPU reference
  10  training loop, command line

Pointers in a Model named g point to device memory; m is the host's model.
*/
#define NO_MAIN
#include "train_cpu.c"
#include <cuda_runtime.h>
#include <cublasLt.h>
#include <cub/device/device_radix_sort.cuh>

// ----------------------------------------------------------------------------
// 1. Utilities

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
static void cuda_check(cudaError_t e, const char *call, const char *file, int line) {
    if (e != cudaSuccess) die("CUDA: %s at %s:%d: %s", call, file, line, cudaGetErrorString(e));
}
static void cublas_check(cublasStatus_t e, const char *what) {
    if (e != CUBLAS_STATUS_SUCCESS) die("cuBLASLt: %s: status %d", what, (int)e);
}

enum { WARP = 32, BLOCK = 256 };

static unsigned blocks_for(int64_t n, int64_t per_block) { return (unsigned)((n + per_block - 1) / per_block); }

// Device memory as the plan of train_cpu.c, and what only this program needs.
typedef struct {
    Model g;                     // buffers on the device
    int64_t space, kl_space;     // floats of probs and of ds, of dots: they bound the queries of a chunk
    float *probs, *ds;           // (queries, support, H) of a chunk: probabilities, gradients to logits
    int32_t *place;              // (queries, support) KV rows of the supports
    float *target, *dots;        // (queries, candidates), (queries, HI, candidates) of the KL
    float *delta;                // (N, H) d_oc . oc
    float *partial;              // partial sums of reductions down the rows
    uint32_t *pair_key, *pair_key2; // (N * k) candidate of each chosen slot, sorted
    uint32_t *pair, *pair2;      // (N * k) query * k + slot, sorted along
    int2 *list;                  // (N * k) the inverse lists: query and slot, by candidate
    int32_t *list_start;         // (B * n_cand + 1) where a candidate's list starts
    void *sort_space;
    size_t sort_bytes;
    double *norm_parts;          // (NORM_BLOCKS)
    unsigned long long *nan_count;
    int64_t logit_rows;          // rows of a chunk of logits
    float *logits;               // (logit_rows, Vp)
} Gpu;
static Gpu G_;
static Engine cpu_engine; // what the loop used before gpu_open()

static cudaStream_t stream;

// ----------------------------------------------------------------------------
// 2. Matrix product
// cuBLASLt is column-major: C^T = B^T A^T. One stride of each operand is 1, which says whether it is transposed there.

typedef struct { int64_t v[14]; cublasLtMatmulDesc_t op; cublasLtMatrixLayout_t a, b, c; cublasLtMatmulAlgo_t algo; } GemmPlan;
static GemmPlan gemm_plans[512];
static int n_gemm_plans;
static cublasLtHandle_t lt;
static void *lt_workspace;
enum { LT_WORKSPACE = 32 << 20 };

static cublasLtMatrixLayout_t gemm_layout(int64_t rows, int64_t cols, int64_t ld, int64_t count, int64_t stride) {
    cublasLtMatrixLayout_t l;
    int32_t n = (int32_t)count;
    cublas_check(cublasLtMatrixLayoutCreate(&l, CUDA_R_32F, (uint64_t)rows, (uint64_t)cols, ld), "layout");
    cublas_check(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n), "batch count");
    cublas_check(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride), "batch stride");
    return l;
}

// count products C = (add ? C : 0) + A B, strides as in matmul(), the matrices of product i offset by i times sc, sa, sb.
static void gpu_matmul_batch(float *C, int64_t ldc, int64_t sc, const float *A, int64_t ars, int64_t aks, int64_t sa, const float *B, int64_t bks, int64_t bcs, int64_t sb,
                             int64_t M, int64_t N, int64_t K, int add, int64_t count) {
    int64_t key[14] = {ldc, sc, ars, aks, sa, bks, bcs, sb, M, N, K, add, count, (int64_t)(((uintptr_t)A | (uintptr_t)B | (uintptr_t)C) % 16)};
    int i = 0;
    if (M == 0 || N == 0) return;
    while (i < n_gemm_plans && memcmp(gemm_plans[i].v, key, sizeof key)) i++;
    GemmPlan *p = &gemm_plans[i];
    float alpha = 1, beta = (float)add;
    if (i == n_gemm_plans) {
        if (i == (int)(sizeof gemm_plans / sizeof gemm_plans[0])) die("more than %d shapes of matrix products", i);
        memcpy(p->v, key, sizeof key);
        cublasOperation_t ta = bcs == 1 ? CUBLAS_OP_N : CUBLAS_OP_T, tb = aks == 1 ? CUBLAS_OP_N : CUBLAS_OP_T;
        cublas_check(cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
        cublas_check(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta), "transpose");
        cublas_check(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb), "transpose");
        p->a = bcs == 1 ? gemm_layout(N, K, bks, count, sb) : gemm_layout(K, N, bcs, count, sb);
        p->b = aks == 1 ? gemm_layout(K, M, ars, count, sa) : gemm_layout(M, K, aks, count, sa);
        p->c = gemm_layout(N, M, ldc, count, sc);
        cublasLtMatmulPreference_t pref;
        cublasLtMatmulHeuristicResult_t found;
        int n_found = 0;
        size_t space = LT_WORKSPACE;
        uint32_t align = key[13] % 16 ? 4 : 16;
        cublas_check(cublasLtMatmulPreferenceCreate(&pref), "preference");
        cublas_check(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof space), "workspace");
        cublas_check(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align, sizeof align), "alignment");
        cublas_check(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align, sizeof align), "alignment");
        cublas_check(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align, sizeof align), "alignment");
        cublas_check(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align, sizeof align), "alignment");
        cublas_check(cublasLtMatmulAlgoGetHeuristic(lt, p->op, p->a, p->b, p->c, p->c, pref, 1, &found, &n_found), "heuristic");
        if (!n_found) die("cuBLASLt has no algorithm for a product of %lld x %lld x %lld", (long long)M, (long long)N, (long long)K);
        p->algo = found.algo;
        cublasLtMatmulPreferenceDestroy(pref);
        n_gemm_plans++;
    }
    cublas_check(cublasLtMatmul(lt, p->op, &alpha, B, p->a, A, p->b, &beta, C, p->c, C, p->c, &p->algo, lt_workspace, LT_WORKSPACE, stream), "product");
}

static void gpu_matmul(float *C, int64_t ldc, const float *A, int64_t ars, int64_t aks, const float *B, int64_t bks, int64_t bcs, int64_t M, int64_t N, int64_t K, int add) {
    gpu_matmul_batch(C, ldc, 0, A, ars, aks, 0, B, bks, bcs, 0, M, N, K, add, 1);
}

// y[n, out] = x[n, in] w[out, in]^T
static void gpu_linear_forward(float *y, const float *x, const float *w, int64_t n, int64_t in, int64_t out) {
    gpu_matmul(y, out, x, in, 1, w, 1, in, n, out, in, 0);
}

// dx (+)= dy w unless dx is NULL; dw += dy^T x
static void gpu_linear_backward(float *dx, int add_dx, float *dw, const float *dy, const float *x, const float *w, int64_t n, int64_t in, int64_t out) {
    if (dx) gpu_matmul(dx, in, dy, out, 1, w, in, 1, n, in, out, add_dx);
    gpu_matmul(dw, in, dy, 1, out, x, in, 1, out, in, n, 1);
}

// ----------------------------------------------------------------------------
// 3. Layers

__device__ static float warp_sum(float v) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
__device__ static float warp_max(float v) {
    for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

// A view of rows inside sequences: row i of the batch starts at base + ((i / T) * seq_rows + i % T) * ld.
typedef struct { float *base; int64_t ld, seq_rows; } Rows;
__device__ static float *row_at(Rows r, int64_t i, int64_t T) { return r.base + (i / T * r.seq_rows + i % T) * r.ld; }
static Rows plain_rows(float *base, int64_t ld) { Rows r = {base, ld, 0}; return r; } // seq_rows 0: filled in by the launch

// y = x * rstd * (plus + w), one warp a row.
__global__ static void rmsnorm_forward_kernel(Rows y, float *rstd, Rows x, const float *w, float plus, int64_t n, int64_t d, float eps, int64_t T) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    const float *xi = row_at(x, i, T);
    float *yi = row_at(y, i, T), s = 0;
    for (int64_t j = lane; j < d; j += WARP) s += xi[j] * xi[j];
    float r = 1 / sqrtf(warp_sum(s) / (float)d + eps);
    for (int64_t j = lane; j < d; j += WARP) yi[j] = xi[j] * r * (w ? plus + w[j] : 1);
    if (lane == 0) rstd[i] = r;
}
static void gpu_rmsnorm_forward(Rows y, float *rstd, Rows x, const float *w, float plus, int64_t n, int64_t d, double eps, int64_t T) {
    if (!y.seq_rows) y.seq_rows = T;
    if (!x.seq_rows) x.seq_rows = T;
    rmsnorm_forward_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(y, rstd, x, w, plus, n, d, (float)eps, T);
}

// dx (+)= rstd (g - xh mean(g xh)), g = dy (plus + w), one warp a row.
__global__ static void rmsnorm_backward_kernel(Rows dx, int add, Rows dy, const float *rstd, Rows x, const float *w, float plus, int64_t n, int64_t d, int64_t T) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    const float *xi = row_at(x, i, T), *dyi = row_at(dy, i, T);
    float *dxi = row_at(dx, i, T), r = rstd[i], s = 0;
    for (int64_t j = lane; j < d; j += WARP) s += dyi[j] * (w ? plus + w[j] : 1) * xi[j];
    s = warp_sum(s) * r * r / (float)d;
    for (int64_t j = lane; j < d; j += WARP) {
        float v = r * (dyi[j] * (w ? plus + w[j] : 1) - xi[j] * s);
        dxi[j] = add ? dxi[j] + v : v;
    }
}

enum { ROW_PARTS = 64 }; // pieces in which sums down the rows are cut: fixed, so that their order is

// part[p, j] = sum over the p-th piece of rows of dy * (x - mean) * rstd (rstd NULL: of dy); mean may be NULL.
__global__ static void column_parts_kernel(float *part, Rows dy, Rows x, const float *rstd, const float *mean, int64_t n, int64_t d, int64_t T) {
    int64_t j = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, p = blockIdx.y, per = (n + ROW_PARTS - 1) / ROW_PARTS;
    if (j >= d) return;
    float s = 0;
    for (int64_t i = p * per; i < (p + 1) * per && i < n; i++) {
        float g = row_at(dy, i, T)[j];
        s += rstd ? g * (row_at(x, i, T)[j] - (mean ? mean[i] : 0)) * rstd[i] : g;
    }
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
static void gpu_column_sum(float *out, Rows dy, Rows x, const float *rstd, const float *mean, int64_t n, int64_t d, int64_t T) {
    column_parts_kernel<<<dim3(blocks_for(d, WARP), ROW_PARTS), WARP, 0, stream>>>(G_.partial, dy, x, rstd, mean, n, d, T);
    column_total_kernel<<<blocks_for(d, WARP), WARP, 0, stream>>>(out, G_.partial, d);
}

static void gpu_rmsnorm_backward(Rows dx, int add, float *dw, Rows dy, const float *rstd, Rows x, const float *w, float plus, int64_t n, int64_t d, int64_t T) {
    if (!dx.seq_rows) dx.seq_rows = T;
    if (!dy.seq_rows) dy.seq_rows = T;
    if (!x.seq_rows) x.seq_rows = T;
    if (dw) gpu_column_sum(dw, dy, x, rstd, NULL, n, d, T); // before dx: it may overwrite dy
    rmsnorm_backward_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(dx, add, dy, rstd, x, w, plus, n, d, T);
}

__global__ static void layernorm_forward_kernel(float *y, float *mean, float *rstd, const float *x, const float *w, const float *b, int64_t n, int64_t d, float eps) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    const float *xi = x + i * d;
    float s = 0, v = 0;
    for (int64_t j = lane; j < d; j += WARP) s += xi[j];
    float mu = warp_sum(s) / (float)d;
    for (int64_t j = lane; j < d; j += WARP) v += (xi[j] - mu) * (xi[j] - mu);
    float r = 1 / sqrtf(warp_sum(v) / (float)d + eps);
    for (int64_t j = lane; j < d; j += WARP) y[i * d + j] = (xi[j] - mu) * r * w[j] + b[j];
    if (lane == 0) { mean[i] = mu; rstd[i] = r; }
}
__global__ static void layernorm_backward_kernel(float *dx, const float *dy, const float *mean, const float *rstd, const float *x, const float *w, int64_t n, int64_t d) {
    int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (i >= n) return;
    float a = 0, b = 0, mu = mean[i], r = rstd[i];
    for (int64_t j = lane; j < d; j += WARP) {
        a += dy[i * d + j] * w[j];
        b += dy[i * d + j] * w[j] * (x[i * d + j] - mu) * r;
    }
    a = warp_sum(a) / (float)d;
    b = warp_sum(b) / (float)d;
    for (int64_t j = lane; j < d; j += WARP) dx[i * d + j] = r * (dy[i * d + j] * w[j] - a - (x[i * d + j] - mu) * r * b);
}

// dst[i, head, pairs] = src rotated, one thread a pair. Positions count from the document's start.
__global__ static void rope_kernel(Rows dst, int64_t dst_head, Rows src, int64_t src_head, int64_t heads, const float *cos_sin, const int32_t *doc, int64_t half,
                                   int layout, float sign, int64_t n, int64_t T) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= n * heads * half) return;
    int64_t j = x % half, h = x / half % heads, i = x / half / heads;
    const float *cs = cos_sin + ((i % T - doc[i]) * half + j) * 2, *s = row_at(src, i, T) + h * src_head;
    float *d = row_at(dst, i, T) + h * dst_head;
    int64_t p = layout == HALF_SPLIT ? j : 2 * j, q = layout == HALF_SPLIT ? j + half : 2 * j + 1;
    float a = s[p], b = s[q], c = cs[0], sn = sign * cs[1];
    d[p] = a * c - b * sn;
    d[q] = a * sn + b * c;
}
static void gpu_rope(const Model *g, const Layer *l, Rows dst, int64_t dst_head, Rows src, int64_t src_head, int64_t heads, int layout, int sign) {
    if (!dst.seq_rows) dst.seq_rows = g->T;
    if (!src.seq_rows) src.seq_rows = g->T;
    int64_t half = g->c.rope / 2;
    rope_kernel<<<blocks_for(g->N * heads * half, BLOCK), BLOCK, 0, stream>>>(dst, dst_head, src, src_head, heads, l->cos_sin, g->doc, half, layout, (float)sign, g->N, g->T);
}
// In place.
static void gpu_rotate(const Model *g, const Layer *l, Rows x, int64_t head, int64_t heads, int layout, int sign) { gpu_rope(g, l, x, head, x, head, heads, layout, sign); }

__global__ static void swiglu_forward_kernel(float *act, const float *g, const float *u, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) act[i] = g[i] / (1 + expf(-g[i])) * u[i];
}
__global__ static void swiglu_backward_kernel(float *dg, float *du, const float *dact, const float *g, const float *u, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = 1 / (1 + expf(-g[i])), silu = g[i] * s;
    dg[i] = dact[i] * u[i] * (s + silu * (1 - s));
    du[i] = dact[i] * silu;
}
__global__ static void add_kernel(float *out, const float *a, const float *b, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
__global__ static void scale_kernel(float *x, float s, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] *= s;
}
__global__ static void fill_kernel(float *x, float v, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] = v;
}
// One element a thread over n.
#define ELEMENTWISE(kernel, n, ...) kernel<<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(__VA_ARGS__, n)

__global__ static void embedding_forward_kernel(float *x, const float *e, const int32_t *tokens, int64_t C, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) x[i] = e[tokens[i / C] * C + i % C];
}
// One block a token of the vocabulary: it adds the rows where that token stands, in order.
__global__ static void embedding_backward_kernel(float *de, const float *dx, const int32_t *tokens, int64_t C, int64_t N) {
    __shared__ int32_t found[BLOCK];
    __shared__ int count;
    int64_t v = blockIdx.x;
    for (int64_t i0 = 0; i0 < N; i0 += blockDim.x) {
        int64_t i = i0 + threadIdx.x;
        int hit = i < N && tokens[i] == v;
        unsigned mask = __ballot_sync(0xffffffffu, hit);
        __shared__ int warp_count[BLOCK / WARP];
        if (threadIdx.x % WARP == 0) warp_count[threadIdx.x / WARP] = __popc(mask);
        __syncthreads();
        int before = __popc(mask & ((1u << threadIdx.x % WARP) - 1));
        for (int w = 0; w < (int)threadIdx.x / WARP; w++) before += warp_count[w];
        if (hit) found[before] = (int32_t)i;
        if (threadIdx.x == 0) {
            count = 0;
            for (int w = 0; w < BLOCK / WARP; w++) count += warp_count[w];
        }
        __syncthreads();
        for (int64_t c = threadIdx.x; c < C && count; c += blockDim.x) {
            float s = de[v * C + c];
            for (int j = 0; j < count; j++) s += dx[found[j] * C + c];
            de[v * C + c] = s;
        }
        __syncthreads();
    }
}

// ----------------------------------------------------------------------------
// 4. Selection

// What the kernels of selection and attention need of a layer. Rows of the batch and of a sequence fit 32 bits, which
// divide much faster than 64; products of them do not.
typedef struct {
    int T, N, H, HI, DI, k, W, r, unit, n_cand, n_rows, G, Dk, Dv, R, v_off, support;
    int v4, qsa, all;
    float scale;
    const int32_t *doc, *sel, *place;
    const float *rows, *qrow, *sinks;
    const float *q_index, *w_index, *k_index; // of the source layer
} Core;

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
    c.place = G_.place;
    c.scale = (float)l->scale;
    c.doc = g->doc; c.rows = l->rows; c.qrow = l->qrow;
    c.sinks = c.v4 ? param(g, l->sinks) : NULL;
    if (src) { c.sel = src->sel; c.q_index = src->q_index; c.w_index = src->w_index; c.k_index = src->k_index; }
    return c;
}

// Visible candidates [lo, lo + n) of row i.
__device__ static void gpu_visible(const Core &c, int i, int *lo, int *n) {
    *lo = c.r ? c.doc[i] / c.r : 0;
    *n = c.r ? (i % c.T - c.doc[i] + 1) / c.r : 0;
}
// First float of KV row "row" of the sequence that batch row i belongs to, and the same for index keys.
__device__ static const float *kv_row(const Core &c, int i, int row) { return c.rows + ((int64_t)(i / c.T) * c.n_rows + row) * c.R; }
__device__ static const float *index_key(const Core &c, int i, int e) { return c.k_index + ((int64_t)(i / c.T) * c.n_cand + e) * c.DI; }

__device__ static uint64_t gpu_order_key(float score, int64_t s) {
    score += 0.0f;
    uint32_t bits = __float_as_uint(score);
    bits ^= (0u - (bits >> 31)) | 0x80000000u;
    bits = score != score ? 0xffffffffu : bits;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)s;
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
__global__ static void hytopk_kernel(Core c, int32_t *sel, unsigned long long *nans) {
    extern __shared__ uint64_t buffers[];
    __shared__ float tile[BLOCK / WARP][WARP][TILE + 1]; // by warp; the pad keeps columns in different banks
    __shared__ int count[256], shared[3], warp_count[BLOCK / WARP];
    int groups = (c.T + QB - 1) / QB, b = (int)blockIdx.x / groups, t0 = (int)blockIdx.x % groups * QB;
    int capacity = 2 * c.k + BLOCK, width = c.HI * c.DI, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int lo[QB], hi[QB], n[QB], from = c.T, to = 0;
    uint64_t tau[QB];
    float *q = (float *)(buffers + QB * capacity), *w = q + QB * width;
    for (int j = 0; j < QB; j++) {
        int visible = 0;
        lo[j] = n[j] = 0;
        tau[j] = 0;
        if (t0 + j < c.T) gpu_visible(c, b * c.T + t0 + j, &lo[j], &visible);
        hi[j] = lo[j] + visible;
        if (visible) { from = min(from, lo[j]); to = max(to, hi[j]); }
    }
    int64_t row0 = (int64_t)b * c.T + t0, rows = min(QB, c.T - t0);
    for (int x = threadIdx.x; x < rows * width; x += BLOCK) q[x] = c.q_index[row0 * width + x];
    for (int x = threadIdx.x; x < rows * c.HI; x += BLOCK) w[x] = c.w_index[row0 * c.HI + x];
    __syncthreads();
    for (int s0 = from; s0 < to; s0 += BLOCK) {
        int s = s0 + (int)threadIdx.x;
        float score[QB], dot[QB];
        for (int h = 0; h < c.HI; h++) {
            for (int j = 0; j < QB; j++) dot[j] = 0;
            for (int d0 = 0; d0 < c.DI; d0 += TILE) {
                int nd = min(TILE, c.DI - d0);
                if (h == 0 || c.DI > TILE) { // one tile holds a whole small key: read it once for all heads
                    __syncwarp();
                    for (int x = 0; x < WARP; x++) {
                        int key = s0 + warp * WARP + x;
                        if (key < to && lane < nd) tile[warp][x][lane] = c.k_index[((int64_t)b * c.n_cand + key) * c.DI + d0 + lane];
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
            uint64_t *key = buffers + j * capacity, x = s >= lo[j] && s < hi[j] ? gpu_order_key(score[j], s) : 0;
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
            if (x < n[j] && key[x] >> 32 == 0xffffffffu) atomicAdd(nans, 1ull);
        }
    }
}

// As many queries a block as shared memory holds buffers for.
template <int QB>
static int gpu_hytopk(const Core &c, int32_t *sel, int B) {
    size_t bytes = QB * ((size_t)(2 * c.k + BLOCK) * sizeof(uint64_t) + (size_t)(c.HI * c.DI + c.HI) * sizeof(float));
    if (bytes > (QB > 1 ? 80 : 180) * 1024) return 0; // more than one block should fit a multiprocessor
    CUDA_CHECK(cudaFuncSetAttribute(hytopk_kernel<QB>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    hytopk_kernel<QB><<<(unsigned)(B * ((c.T + QB - 1) / QB)), BLOCK, bytes, stream>>>(c, sel, G_.nan_count);
    return 1;
}

static void gpu_select_forward(Model *g, Layer *l) {
    Core c = core_of(g, l);
    if (!gpu_hytopk<8>(c, l->sel, (int)g->B) && !gpu_hytopk<4>(c, l->sel, (int)g->B) && !gpu_hytopk<2>(c, l->sel, (int)g->B) && !gpu_hytopk<1>(c, l->sel, (int)g->B))
        die("--index-topk %d with %d index heads of %d: the candidate buffer needs more shared memory than a block has", c.k, c.HI, c.DI);
    g->index_scans++;
}

// ----------------------------------------------------------------------------
// 5. Sparse attention
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
}

enum { LANES_DOT = 8 }; // threads that share one dot product: three shuffles instead of five, four places a warp

// p[q, j, h] = scale * a[i, h] . row(j)[off + group * d ..]: logits, or the products d_oc . v. Eight threads a place.
__global__ static void support_dot_kernel(Core c, float *p, const float *a, int off, int d, float scale, int i0) {
    int j = (int)(blockIdx.x * (BLOCK / LANES_DOT) + threadIdx.x / LANES_DOT), i = i0 + (int)blockIdx.y, lane = threadIdx.x % LANES_DOT;
    if (blockIdx.x * (BLOCK / LANES_DOT) >= gpu_span(c, i).n) return;
    int inside = j < gpu_span(c, i).n; // all threads stay: they shuffle
    const float *row = kv_row(c, i, inside ? c.place[(int64_t)blockIdx.y * c.support + j] : 0) + off;
    float *out = p + ((int64_t)blockIdx.y * c.support + j) * c.H;
    int whole = d % 4 == 0 && c.R % 4 == 0 && off % 4 == 0;
    for (int h = 0; h < c.H; h++) {
        const float *x = a + ((int64_t)i * c.H + h) * d, *r = row + h / (c.H / c.G) * d;
        float v = 0;
        if (whole) {
            for (int k = lane; k < d / 4; k += LANES_DOT) {
                float4 y = ((const float4 *)x)[k], z = ((const float4 *)r)[k];
                v += y.x * z.x + y.y * z.y + y.z * z.z + y.w * z.w;
            }
        } else for (int k = lane; k < d; k += LANES_DOT) v += x[k] * r[k];
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
__global__ static void support_sum_kernel(Core c, float *out, const float *p, int off, int d, int i0) {
    int i = i0 + (int)blockIdx.x, n = gpu_span(c, i).n;
    const int32_t *place = c.place + (int64_t)blockIdx.x * c.support;
    for (int x = threadIdx.x; x < c.H * d; x += blockDim.x) {
        int h = x / d;
        const float *ph = p + (int64_t)blockIdx.x * c.support * c.H + h, *column = kv_row(c, i, 0) + off + h / (c.H / c.G) * d + x % d;
        float v = 0;
        #pragma unroll 4
        for (int j = 0; j < n; j++) v += ph[(int64_t)j * c.H] * column[(int64_t)place[j] * c.R];
        out[(int64_t)i * c.H * d + x] = v;
    }
}

// delta[i, h] = d_oc . oc, and the sinks' gradient of row i. One warp a (row, head).
__global__ static void delta_kernel(Core c, float *delta, float *d_sink, const float *d_oc, const float *oc, const float *lse, int n) {
    int x = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    if (x >= n) return;
    float v = 0;
    for (int d = threadIdx.x % WARP; d < c.Dv; d += WARP) v += d_oc[(int64_t)x * c.Dv + d] * oc[(int64_t)x * c.Dv + d];
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
__device__ static float row_share(const Core &c, const float *p, const float *ds, const float *d_oc, int q, int i, int j, int x) {
    int hg = c.H / c.G, y = x - c.v_off;
    int64_t at = ((int64_t)q * c.support + j) * c.H;
    float v = 0;
    if (x < c.G * c.Dk) {
        int h0 = x / c.Dk * hg;
        const float *s = ds + at + h0, *key = c.qrow + ((int64_t)i * c.H + h0) * c.Dk + x % c.Dk;
        for (int h = 0; h < hg; h++) v += s[h] * key[h * c.Dk];
    }
    if (y >= 0 && y < c.G * c.Dv) {
        int h0 = y / c.Dv * hg;
        const float *s = p + at + h0, *value = d_oc + ((int64_t)i * c.H + h0) * c.Dv + y % c.Dv;
        for (int h = 0; h < hg; h++) v += s[h] * value[h * c.Dv];
    }
    return v;
}

// d_rows[b, row] += sum over the chunk's queries i0..i1 that attend to the row, in their order. One block a row, a
// thread for each of its floats. A query comes to a row through its window or tail, or through a candidate: one that it
// chose (found by the inverse list of (query, slot)), or any visible one when it attends to everything.
__global__ static void row_gather_kernel(Core c, float *d_rows, const float *p, const float *ds, const float *d_oc, const int2 *list, const int32_t *list_start, int i0, int i1) {
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

// Inverse lists: all chosen slots (i * k + j) sorted by candidate, stable, so in the order of the queries.
__global__ static void pairs_kernel(const int32_t *sel, uint32_t *key, uint32_t *pair, int64_t T, int64_t k, int64_t n_cand, uint32_t none, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= n) return;
    key[x] = sel[x] < 0 ? none : (uint32_t)(x / k / T * n_cand + sel[x]);
    pair[x] = (uint32_t)x;
}
// Where each candidate's list starts, and the pairs as (query, slot).
__global__ static void lists_kernel(const uint32_t *key, const uint32_t *pair, int2 *list, int32_t *start, int k, int candidates, int n) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (x < n) list[x] = make_int2((int)(pair[x] / (unsigned)k), (int)(pair[x] % (unsigned)k));
    if (x > candidates) return;
    int a = 0, b = n; // the first pair of candidate x
    while (a < b) {
        int mid = a + (b - a) / 2;
        if (key[mid] < (uint32_t)x) a = mid + 1;
        else b = mid;
    }
    start[x] = a;
}
static void gpu_inverse_lists(const Model *g, const Layer *src) {
    int64_t n = g->N * g->c.topk, candidates = g->B * src->n_cand;
    pairs_kernel<<<blocks_for(n, BLOCK), BLOCK, 0, stream>>>(src->sel, G_.pair_key, G_.pair, g->T, g->c.topk, src->n_cand, (uint32_t)candidates, n);
    int bits = 1;
    while (candidates >> bits) bits++;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(G_.sort_space, G_.sort_bytes, G_.pair_key, G_.pair_key2, G_.pair, G_.pair2, (int)n, 0, bits, stream));
    lists_kernel<<<blocks_for(max64(n, candidates + 1), BLOCK), BLOCK, 0, stream>>>(G_.pair_key2, G_.pair2, G_.list, G_.list_start, (int)g->c.topk, (int)candidates, (int)n);
}

// Sum over a block; the result is in all threads.
__device__ static float block_sum(float v, float *shared) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    float s = 0;
    for (int w = 0; w < (int)(blockDim.x / WARP); w++) s += shared[w];
    return s;
}

// dots[q, h, j] = q_index . k_index of candidate j, one warp a candidate.
__global__ static void index_dot_kernel(Core c, float *dots, int width, int i0) {
    int j = (int)(blockIdx.x * (BLOCK / WARP) + threadIdx.x / WARP), i = i0 + (int)blockIdx.y, lane = threadIdx.x % WARP;
    Span s = gpu_span(c, i);
    if (j >= s.n_cand) return;
    const float *key = index_key(c, i, gpu_candidate(c, s, i, j));
    for (int h = 0; h < c.HI; h++) {
        const float *q = c.q_index + ((int64_t)i * c.HI + h) * c.DI;
        float v = 0;
        for (int d = lane; d < c.DI; d += WARP) v += q[d] * key[d];
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
    top = warp_max(top);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = top;
    __syncthreads();
    for (int v = 0; v < BLOCK / WARP; v++) top = fmaxf(top, shared[v]);
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
    const float *keys = index_key(c, i, 0);
    for (int x = threadIdx.x; x < c.HI * c.DI; x += blockDim.x) {
        const float *g = dots + ((int64_t)blockIdx.x * c.HI + x / c.DI) * width;
        float v = 0;
        for (int j = 0; j < s.n_cand; j++) v += g[j] * keys[(int64_t)gpu_candidate(c, s, i, j) * c.DI + x % c.DI];
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
            const float *g = dots + (int64_t)(i - i0) * c.HI * width + slot, *q = c.q_index + (int64_t)i * c.HI * c.DI + d;
            for (int h = 0; h < c.HI; h++) v += g[(int64_t)h * width] * q[(int64_t)h * c.DI];
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

static void gpu_sparse_attention_forward(Model *g, Layer *l) {
    Core c = core_of(g, l);
    int teach = !g->learning && kl_teachers(g, l), chunk = chunk_queries(&c);
    for (int i0 = 0; i0 < c.N; i0 += chunk) {
        int n = (int)min64(chunk, c.N - i0);
        place_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.place, i0);
        support_dot_kernel<<<dim3(blocks_for(c.support, BLOCK / LANES_DOT), (unsigned)n), BLOCK, 0, stream>>>(c, G_.probs, c.qrow, 0, c.Dk, c.scale, i0);
        softmax_kernel<<<blocks_for((int64_t)n * c.H * WARP, BLOCK), BLOCK, 0, stream>>>(c, G_.probs, l->lse, i0, n);
        support_sum_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, l->oc, G_.probs, c.v_off, c.Dv, i0);
        if (teach) gpu_indexer_kl(g, l, &c, i0, n, 0);
    }
}

static void gpu_sparse_attention_backward(Model *g, Layer *l) {
    Core c = core_of(g, l);
    int teach = g->kl_scale != 0 && kl_teachers(g, l), chunk = chunk_queries(&c);
    if (!c.all) gpu_inverse_lists(g, &g->layers[l->source]);
    CUDA_CHECK(cudaMemsetAsync(g->d_rows, 0, (size_t)(g->B * l->n_rows * l->R) * sizeof(float), stream));
    delta_kernel<<<blocks_for((int64_t)c.N * c.H * WARP, BLOCK), BLOCK, 0, stream>>>(c, G_.delta, g->d_sink, g->d_oc, l->oc, l->lse, c.N * c.H);
    for (int i0 = 0; i0 < c.N; i0 += chunk) {
        int n = (int)min64(chunk, c.N - i0);
        dim3 places(blocks_for(c.support, BLOCK / LANES_DOT), (unsigned)n);
        place_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.place, i0);
        support_dot_kernel<<<places, BLOCK, 0, stream>>>(c, G_.probs, c.qrow, 0, c.Dk, c.scale, i0);
        probs_again_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.probs, l->lse, i0);
        support_dot_kernel<<<places, BLOCK, 0, stream>>>(c, G_.ds, g->d_oc, c.v_off, c.Dv, 1.0f, i0);
        ds_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, G_.ds, G_.probs, G_.delta, i0);
        support_sum_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, g->d_qrow, G_.ds, 0, c.Dk, i0);
        unsigned threads = blocks_for(min64(l->R, 256), WARP) * WARP;
        row_gather_kernel<<<(unsigned)(g->B * l->n_rows), threads, 0, stream>>>(c, g->d_rows, G_.probs, G_.ds, g->d_oc, G_.list, G_.list_start, i0, i0 + n);
        if (teach) gpu_indexer_kl(g, l, &c, i0, n, 1);
    }
}

// ----------------------------------------------------------------------------
// 6. Attention layers
// The host side of train_cpu.c's section 10, call for call.

static void gpu_mla_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->N, H = c->H, hd = c->nope + c->rope, wide = c->nope + c->v_dim, T = g->T;
    gpu_linear_forward(l->qa, l->xn, param(g, l->q_a), n, c->C, c->q_lora);
    gpu_rmsnorm_forward(plain_rows(l->qr, c->q_lora), l->rstd_q, plain_rows(l->qa, c->q_lora), param(g, l->q_a_norm), 0, n, c->q_lora, 1e-6, T);
    gpu_linear_forward(l->q, l->qr, param(g, l->q_b), n, c->q_lora, H * hd);
    gpu_linear_forward(l->kva, l->xn, param(g, l->kv_a), n, c->C, l->R);
    gpu_rmsnorm_forward(plain_rows(l->rows, l->R), l->rstd_kv, plain_rows(l->kva, l->R), param(g, l->kv_a_norm), 0, n, c->kv_lora, 1e-6, T);
    gpu_matmul_batch(l->qrow, H * l->Dk, l->Dk, l->q, H * hd, 1, hd, param(g, l->kv_b), c->kv_lora, 1, wide * c->kv_lora, n, c->kv_lora, c->nope, 0, H);
    gpu_rope(g, l, plain_rows(l->rows + c->kv_lora, l->R), 0, plain_rows(l->kva + c->kv_lora, l->R), 0, 1, INTERLEAVED, 1);
    gpu_rope(g, l, plain_rows(l->qrow + c->kv_lora, H * l->Dk), l->Dk, plain_rows(l->q + c->nope, H * hd), hd, H, INTERLEAVED, 1);
}

static void gpu_mla_output_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t H = c->H, wide = c->nope + c->v_dim;
    gpu_matmul_batch(l->att, l->n_att, c->v_dim, l->oc, H * l->Dv, 1, l->Dv, param(g, l->kv_b) + c->nope * c->kv_lora, 1, c->kv_lora, wide * c->kv_lora, g->N, c->v_dim, c->kv_lora, 0, H);
    gpu_linear_forward(g->y, l->att, param(g, l->o), g->N, l->n_att, c->C);
}

static void gpu_mla_output_backward(Model *g, Layer *l, const float *dy) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, wide = c->nope + c->v_dim, v = c->nope * c->kv_lora;
    gpu_linear_backward(g->d_att, 0, grad(g, l->o), dy, l->att, param(g, l->o), N, l->n_att, c->C);
    gpu_matmul_batch(g->d_oc, H * l->Dv, l->Dv, g->d_att, l->n_att, 1, c->v_dim, param(g, l->kv_b) + v, c->kv_lora, 1, wide * c->kv_lora, N, c->kv_lora, c->v_dim, 0, H);
    gpu_matmul_batch(grad(g, l->kv_b) + v, c->kv_lora, wide * c->kv_lora, g->d_att, 1, l->n_att, c->v_dim, l->oc, H * l->Dv, 1, l->Dv, c->v_dim, c->kv_lora, N, 1, H);
}

static void gpu_mla_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, hd = c->nope + c->rope, wide = c->nope + c->v_dim, T = g->T;
    gpu_matmul_batch(g->d_q, H * hd, hd, g->d_qrow, H * l->Dk, 1, l->Dk, param(g, l->kv_b), 1, c->kv_lora, wide * c->kv_lora, N, c->nope, c->kv_lora, 0, H);
    gpu_matmul_batch(grad(g, l->kv_b), c->kv_lora, wide * c->kv_lora, l->q, 1, H * hd, hd, g->d_qrow, H * l->Dk, 1, l->Dk, c->nope, c->kv_lora, N, 1, H);
    gpu_rope(g, l, plain_rows(g->d_q + c->nope, H * hd), hd, plain_rows(g->d_qrow + c->kv_lora, H * l->Dk), l->Dk, H, INTERLEAVED, -1);
    gpu_rope(g, l, plain_rows(g->d_kva + c->kv_lora, l->R), 0, plain_rows(g->d_rows + c->kv_lora, l->R), 0, 1, INTERLEAVED, -1);
    gpu_linear_backward(g->d_qr, 0, grad(g, l->q_b), g->d_q, l->qr, param(g, l->q_b), N, c->q_lora, H * hd);
    gpu_rmsnorm_backward(plain_rows(g->d_qr, c->q_lora), 0, grad(g, l->q_a_norm), plain_rows(g->d_qr, c->q_lora), l->rstd_q, plain_rows(l->qa, c->q_lora), param(g, l->q_a_norm), 0, N, c->q_lora, T);
    gpu_linear_backward(g->dxn, 0, grad(g, l->q_a), g->d_qr, l->xn, param(g, l->q_a), N, c->C, c->q_lora);
    gpu_rmsnorm_backward(plain_rows(g->d_kva, l->R), 0, grad(g, l->kv_a_norm), plain_rows(g->d_rows, l->R), l->rstd_kv, plain_rows(l->kva, l->R), param(g, l->kv_a_norm), 0, N, c->kv_lora, T);
    gpu_linear_backward(g->dxn, 1, grad(g, l->kv_a), g->d_kva, l->xn, param(g, l->kv_a), N, c->C, l->R);
}

static float index_scale(const Config *c) { return (float)pow((double)(c->HI * c->DI), -0.5); }

static void gpu_mla_index_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->N, HI = c->HI, DI = c->DI;
    gpu_linear_forward(l->q_index, l->qr, param(g, l->iq), n, c->q_lora, HI * DI);
    gpu_linear_forward(l->ika, l->xn, param(g, l->ik), n, c->C, DI);
    layernorm_forward_kernel<<<blocks_for(n * WARP, BLOCK), BLOCK, 0, stream>>>(l->k_index, l->mean_k, l->rstd_k, l->ika, param(g, l->ik_norm), param(g, l->ik_bias), n, DI, 1e-6f);
    gpu_linear_forward(l->w_index, l->xn, param(g, l->iw), n, c->C, HI);
    ELEMENTWISE(scale_kernel, n * HI, l->w_index, index_scale(c));
    gpu_rotate(g, l, plain_rows(l->k_index, DI), 0, 1, index_layout(c), 1);
    gpu_rotate(g, l, plain_rows(l->q_index, HI * DI), DI, HI, index_layout(c), 1);
}

static void gpu_mla_index_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, HI = c->HI, DI = c->DI, T = g->T;
    Rows dk = {g->d_ki, DI, T}, ka = {l->ika, DI, T};
    gpu_rotate(g, l, plain_rows(g->d_ki, DI), 0, 1, index_layout(c), -1);
    gpu_rotate(g, l, plain_rows(g->d_qi, HI * DI), DI, HI, index_layout(c), -1);
    ELEMENTWISE(scale_kernel, N * HI, g->d_wi, index_scale(c));
    gpu_linear_backward(NULL, 0, grad(g, l->iq), g->d_qi, l->qr, param(g, l->iq), N, c->q_lora, HI * DI);
    gpu_column_sum(grad(g, l->ik_norm), dk, ka, l->rstd_k, l->mean_k, N, DI, T);
    gpu_column_sum(grad(g, l->ik_bias), dk, ka, NULL, NULL, N, DI, T);
    layernorm_backward_kernel<<<blocks_for(N * WARP, BLOCK), BLOCK, 0, stream>>>(g->d_ki2, g->d_ki, l->mean_k, l->rstd_k, l->ika, param(g, l->ik_norm), N, DI);
    gpu_linear_backward(NULL, 0, grad(g, l->ik), g->d_ki2, l->xn, param(g, l->ik), N, c->C, DI);
    gpu_linear_backward(NULL, 0, grad(g, l->iw), g->d_wi, l->xn, param(g, l->iw), N, c->C, HI);
}

// Pools: completes_pool() and pool_slot() of train_cpu.c on the device.
typedef struct { int64_t T, N, r, n_cand, wide; const int32_t *doc; } Pool;
static Pool pool_of(const Model *g, const Layer *l) { Pool p = {g->T, g->N, l->r, l->n_cand, l->letter == 'C', g->doc}; return p; }
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

__global__ static void pool_forward_kernel(Pool p, float *ent, const float *values, const float *gates, int64_t d) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = x / d, j = x % d, e, at;
    if (i >= p.N || !gpu_completes(p, i, &e, &at)) return;
    float top = -INFINITY, sum = 0, value = 0;
    for (int64_t s = 0; s < gpu_slots(p, at); s++) top = fmaxf(top, gates[gpu_slot(p, i, at, d, s, j)]);
    for (int64_t s = 0; s < gpu_slots(p, at); s++) {
        int64_t y = gpu_slot(p, i, at, d, s, j);
        float w = expf(gates[y] - top);
        sum += w;
        value += w * values[y];
    }
    ent[e * d + j] = value / sum;
}
__global__ static void pool_backward_kernel(Pool p, float *d_values, float *d_gates, const float *d_ent, const float *ent, const float *values, const float *gates, int64_t d) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = x / d, j = x % d, e, at;
    if (i >= p.N || !gpu_completes(p, i, &e, &at)) return;
    float top = -INFINITY, sum = 0, dy = d_ent[e * d + j], y = ent[e * d + j];
    for (int64_t s = 0; s < gpu_slots(p, at); s++) top = fmaxf(top, gates[gpu_slot(p, i, at, d, s, j)]);
    for (int64_t s = 0; s < gpu_slots(p, at); s++) sum += expf(gates[gpu_slot(p, i, at, d, s, j)] - top);
    for (int64_t s = 0; s < gpu_slots(p, at); s++) {
        int64_t z = gpu_slot(p, i, at, d, s, j);
        float w = expf(gates[z] - top) / sum;
        d_values[z] = w * dy;
        d_gates[z] = w * dy * (values[z] - y);
    }
}
// The rotation of an entry is that of its pool's first token. One thread a (token, pair).
__global__ static void pool_rope_kernel(Pool p, Rows out, int64_t offset, const float *cos_sin, int64_t half, int layout, float sign) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = x / half, j = x % half, e, at;
    if (i >= p.N || !gpu_completes(p, i, &e, &at)) return;
    float *y = row_at(out, e, p.n_cand) + offset, *a = y + (layout == HALF_SPLIT ? j : 2 * j), *b = layout == HALF_SPLIT ? a + half : a + 1;
    const float *cs = cos_sin + (at * half + j) * 2;
    float u = *a, v = *b, c = cs[0], s = sign * cs[1];
    *a = u * c - v * s;
    *b = u * s + v * c;
}
// gates += bias of the token's place in its pool
__global__ static void pool_bias_kernel(Pool p, float *gates, const float *bias, int64_t width, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = x / width;
    if (x < n) gates[x] += bias[(i % p.T - p.doc[i]) % p.r * width + x % width];
}
// d_bias[place, channel] += sum of d_gates over the tokens at that place; one block a place and 32 channels.
__global__ static void pool_bias_backward_kernel(Pool p, float *d_bias, const float *d_gates, int64_t width) {
    __shared__ float part[8][WARP];
    int64_t j = blockIdx.x * (int64_t)WARP + threadIdx.x, place = blockIdx.y;
    float s = 0;
    for (int64_t i = threadIdx.y; i < p.N; i += 8)
        if ((i % p.T - p.doc[i]) % p.r == place && j < width) s += d_gates[i * width + j];
    part[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y || j >= width) return;
    for (int y = 1; y < 8; y++) s += part[y][threadIdx.x];
    d_bias[place * width + j] += s;
}

static void gpu_compress_project(Model *g, Layer *l, float *comp, int kv, int gate, int bias, int64_t d) {
    int64_t width = comp_width(l, d) / 2;
    float *gates = comp + g->N * width;
    gpu_linear_forward(comp, l->xn, param(g, kv), g->N, g->c.C, width);
    gpu_linear_forward(gates, l->xn, param(g, gate), g->N, g->c.C, width);
    ELEMENTWISE(pool_bias_kernel, g->N * width, pool_of(g, l), gates, param(g, bias), width);
}
static void gpu_compress_forward(Model *g, Layer *l, const float *comp, int64_t d, float *ent, float *rstd, int norm, Rows out) {
    Pool p = pool_of(g, l);
    int64_t width = comp_width(l, d) / 2, cands = g->B * l->n_cand;
    Rows e = {ent, d, l->n_cand};
    if (!cands) return;
    CUDA_CHECK(cudaMemsetAsync(ent, 0, (size_t)(cands * d) * sizeof(float), stream)); // pools that no document fills
    pool_forward_kernel<<<blocks_for(g->N * d, BLOCK), BLOCK, 0, stream>>>(p, ent, comp, comp + g->N * width, d);
    gpu_rmsnorm_forward(out, rstd, e, param(g, norm), 0, cands, d, g->c.rms_eps, l->n_cand);
    pool_rope_kernel<<<blocks_for(g->N * g->c.rope / 2, BLOCK), BLOCK, 0, stream>>>(p, out, d - g->c.rope, l->cos_sin, g->c.rope / 2, INTERLEAVED, 1.0f);
}
static void gpu_compress_backward(Model *g, Layer *l, float *dxn, const float *comp, int64_t d, const float *ent, const float *rstd, int norm, int kv, int gate, int bias, Rows d_out, float *d_ent) {
    Pool p = pool_of(g, l);
    int64_t width = comp_width(l, d) / 2, N = g->N, cands = g->B * l->n_cand;
    float *d_gates = g->d_comp + N * width;
    Rows e = {(float *)ent, d, l->n_cand}, de = {d_ent, d, l->n_cand};
    if (!cands) return;
    CUDA_CHECK(cudaMemsetAsync(g->d_comp, 0, (size_t)(2 * N * width) * sizeof(float), stream));
    pool_rope_kernel<<<blocks_for(N * g->c.rope / 2, BLOCK), BLOCK, 0, stream>>>(p, d_out, d - g->c.rope, l->cos_sin, g->c.rope / 2, INTERLEAVED, -1.0f);
    gpu_rmsnorm_backward(de, 0, grad(g, norm), d_out, rstd, e, param(g, norm), 0, cands, d, l->n_cand);
    pool_backward_kernel<<<blocks_for(N * d, BLOCK), BLOCK, 0, stream>>>(p, g->d_comp, d_gates, d_ent, ent, comp, comp + N * width, d);
    pool_bias_backward_kernel<<<dim3(blocks_for(width, WARP), (unsigned)l->r), dim3(WARP, 8), 0, stream>>>(p, grad(g, bias), d_gates, width);
    gpu_linear_backward(dxn, 1, grad(g, kv), g->d_comp, l->xn, param(g, kv), N, g->c.C, width);
    gpu_linear_backward(dxn, 1, grad(g, gate), d_gates, l->xn, param(g, gate), N, g->c.C, width);
}

// Where the entries of C and H layers stand: behind the tokens of each sequence.
static Rows entry_rows(const Model *g, const Layer *l, float *rows) { Rows r = {rows + g->T * l->R, l->R, l->n_rows}; return r; }

static void gpu_v4_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->N, H = c->H, D = c->head_dim, T = g->T;
    Rows rows = {l->rows, D, l->n_rows}, turned = {l->rows + D - c->rope, D, l->n_rows};
    gpu_linear_forward(l->qa, l->xn, param(g, l->q_a), n, c->C, c->q_lora);
    gpu_rmsnorm_forward(plain_rows(l->qr, c->q_lora), l->rstd_q, plain_rows(l->qa, c->q_lora), param(g, l->q_a_norm), 0, n, c->q_lora, c->rms_eps, T);
    gpu_linear_forward(l->q, l->qr, param(g, l->q_b), n, c->q_lora, H * D);
    gpu_rmsnorm_forward(plain_rows(l->qrow, D), l->rstd_h, plain_rows(l->q, D), NULL, 0, n * H, D, c->rms_eps, T);
    gpu_linear_forward(l->kva, l->xn, param(g, l->kv_a), n, c->C, D);
    gpu_rmsnorm_forward(rows, l->rstd_kv, plain_rows(l->kva, D), param(g, l->kv_a_norm), 0, n, D, c->rms_eps, T);
    gpu_rotate(g, l, turned, 0, 1, INTERLEAVED, 1);
    gpu_rotate(g, l, plain_rows(l->qrow + D - c->rope, H * D), D, H, INTERLEAVED, 1);
    if (l->letter == 'W') return;
    gpu_compress_project(g, l, l->comp, l->comp_kv, l->comp_gate, l->comp_bias, D);
    gpu_compress_forward(g, l, l->comp, D, l->ent, l->rstd_e, l->comp_norm, entry_rows(g, l, l->rows));
}

static void gpu_v4_output_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->N, H = c->H, D = c->head_dim, wide = l->n_att / c->o_groups, mid = c->o_groups * c->o_lora;
    CUDA_CHECK(cudaMemcpyAsync(l->att, l->oc, (size_t)(n * H * D) * sizeof(float), cudaMemcpyDeviceToDevice, stream));
    gpu_rotate(g, l, plain_rows(l->att + D - c->rope, H * D), D, H, INTERLEAVED, -1);
    gpu_matmul_batch(l->oa, mid, c->o_lora, l->att, H * D, 1, wide, param(g, l->o_a), 1, wide, c->o_lora * wide, n, c->o_lora, wide, 0, c->o_groups);
    gpu_linear_forward(g->y, l->oa, param(g, l->o), n, mid, c->C);
}

static void gpu_v4_output_backward(Model *g, Layer *l, const float *dy) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, D = c->head_dim, wide = l->n_att / c->o_groups, mid = c->o_groups * c->o_lora;
    gpu_linear_backward(g->d_oa, 0, grad(g, l->o), dy, l->oa, param(g, l->o), N, mid, c->C);
    gpu_matmul_batch(g->d_oc, H * D, wide, g->d_oa, mid, 1, c->o_lora, param(g, l->o_a), wide, 1, c->o_lora * wide, N, wide, c->o_lora, 0, c->o_groups);
    gpu_matmul_batch(grad(g, l->o_a), wide, c->o_lora * wide, g->d_oa, 1, mid, c->o_lora, l->att, H * D, 1, wide, c->o_lora, wide, N, 1, c->o_groups);
    gpu_rotate(g, l, plain_rows(g->d_oc + D - c->rope, H * D), D, H, INTERLEAVED, 1);
}

static void gpu_v4_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, D = c->head_dim, T = g->T;
    Rows d_rows = {g->d_rows, D, l->n_rows}, turned = {g->d_rows + D - c->rope, D, l->n_rows}, sinks = {g->d_sink, H, T};
    gpu_column_sum(grad(g, l->sinks), sinks, sinks, NULL, NULL, N, H, T);
    gpu_rotate(g, l, turned, 0, 1, INTERLEAVED, -1);
    gpu_rotate(g, l, plain_rows(g->d_qrow + D - c->rope, H * D), D, H, INTERLEAVED, -1);
    gpu_rmsnorm_backward(plain_rows(g->d_q, D), 0, NULL, plain_rows(g->d_qrow, D), l->rstd_h, plain_rows(l->q, D), NULL, 0, N * H, D, T);
    gpu_linear_backward(g->d_qr, 0, grad(g, l->q_b), g->d_q, l->qr, param(g, l->q_b), N, c->q_lora, H * D);
    gpu_rmsnorm_backward(plain_rows(g->d_qr, c->q_lora), 0, grad(g, l->q_a_norm), plain_rows(g->d_qr, c->q_lora), l->rstd_q, plain_rows(l->qa, c->q_lora), param(g, l->q_a_norm), 0, N, c->q_lora, T);
    gpu_linear_backward(g->dxn, 0, grad(g, l->q_a), g->d_qr, l->xn, param(g, l->q_a), N, c->C, c->q_lora);
    gpu_rmsnorm_backward(plain_rows(g->d_kva, D), 0, grad(g, l->kv_a_norm), d_rows, l->rstd_kv, plain_rows(l->kva, D), param(g, l->kv_a_norm), 0, N, D, T);
    gpu_linear_backward(g->dxn, 1, grad(g, l->kv_a), g->d_kva, l->xn, param(g, l->kv_a), N, c->C, D);
    if (l->letter == 'W') return;
    gpu_compress_backward(g, l, g->dxn, l->comp, D, l->ent, l->rstd_e, l->comp_norm, l->comp_kv, l->comp_gate, l->comp_bias, entry_rows(g, l, g->d_rows), g->d_ent);
}

static void gpu_v4_index_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->N, HI = c->HI, DI = c->DI;
    Rows keys = {l->k_index, DI, l->n_cand};
    gpu_linear_forward(l->q_index, l->qr, param(g, l->iq), n, c->q_lora, HI * DI);
    gpu_linear_forward(l->w_index, l->xn, param(g, l->iw), n, c->C, HI);
    ELEMENTWISE(scale_kernel, n * HI, l->w_index, index_scale(c));
    gpu_rotate(g, l, plain_rows(l->q_index + DI - c->rope, HI * DI), DI, HI, INTERLEAVED, 1);
    gpu_compress_project(g, l, l->icomp, l->ik, l->icomp_gate, l->icomp_bias, DI);
    gpu_compress_forward(g, l, l->icomp, DI, l->ika, l->rstd_k, l->ik_norm, keys);
}

static void gpu_v4_index_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, HI = c->HI, DI = c->DI;
    Rows dk = {g->d_ki, DI, l->n_cand};
    gpu_rotate(g, l, plain_rows(g->d_qi + DI - c->rope, HI * DI), DI, HI, INTERLEAVED, -1);
    ELEMENTWISE(scale_kernel, N * HI, g->d_wi, index_scale(c));
    gpu_linear_backward(NULL, 0, grad(g, l->iq), g->d_qi, l->qr, param(g, l->iq), N, c->q_lora, HI * DI);
    gpu_linear_backward(NULL, 0, grad(g, l->iw), g->d_wi, l->xn, param(g, l->iw), N, c->C, HI);
    gpu_compress_backward(g, l, NULL, l->icomp, DI, l->ika, l->rstd_k, l->ik_norm, l->ik, l->icomp_gate, l->icomp_bias, dk, g->d_ki2);
}

static void gpu_qsa_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->N, H = c->H, D = c->head_dim, G = l->G, T = g->T;
    gpu_linear_forward(l->q, l->xn, param(g, l->q_proj), n, c->C, l->n_q);
    gpu_rmsnorm_forward(plain_rows(l->qrow, D), l->rstd_h, plain_rows(l->q, 2 * D), param(g, l->q_norm), 1, n * H, D, c->rms_eps, T);
    gpu_matmul(l->kva, l->R, l->xn, c->C, 1, param(g, l->k_proj), 1, c->C, n, G * D, c->C, 0);
    gpu_matmul(l->rows + l->v_off, l->R, l->xn, c->C, 1, param(g, l->v_proj), 1, c->C, n, G * D, c->C, 0);
    for (int64_t h = 0; h < G; h++)
        gpu_rmsnorm_forward(plain_rows(l->rows + h * D, l->R), l->rstd_kv + h * n, plain_rows(l->kva + h * D, l->R), param(g, l->k_norm), 1, n, D, c->rms_eps, T);
    gpu_rotate(g, l, plain_rows(l->rows, l->R), D, G, HALF_SPLIT, 1);
    gpu_rotate(g, l, plain_rows(l->qrow, H * D), D, H, HALF_SPLIT, 1);
}

// att = oc * sigmoid(gate); q holds [query D | gate D] per head.
__global__ static void gate_forward_kernel(float *att, const float *oc, const float *q, int64_t D, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x < n) att[x] = oc[x] / (1 + expf(-q[(2 * (x / D) + 1) * D + x % D]));
}
__global__ static void gate_backward_kernel(float *d_oc, float *d_q, const float *d_att, const float *oc, const float *q, int64_t D, int64_t n) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= n) return;
    int64_t y = (2 * (x / D) + 1) * D + x % D;
    float s = 1 / (1 + expf(-q[y])), g = d_att[x];
    d_oc[x] = g * s;
    d_q[y] = g * oc[x] * s * (1 - s);
}
static void gpu_qsa_output_forward(Model *g, Layer *l) {
    ELEMENTWISE(gate_forward_kernel, g->N * l->n_att, l->att, l->oc, l->q, g->c.head_dim);
    gpu_linear_forward(g->y, l->att, param(g, l->o), g->N, l->n_att, g->c.C);
}
static void gpu_qsa_output_backward(Model *g, Layer *l, const float *dy) {
    gpu_linear_backward(g->d_att, 0, grad(g, l->o), dy, l->att, param(g, l->o), g->N, l->n_att, g->c.C);
    ELEMENTWISE(gate_backward_kernel, g->N * l->n_att, g->d_oc, g->d_q, g->d_att, l->oc, l->q, g->c.head_dim);
}

static void gpu_qsa_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H, D = c->head_dim, G = l->G, T = g->T;
    gpu_rotate(g, l, plain_rows(g->d_rows, l->R), D, G, HALF_SPLIT, -1);
    gpu_rotate(g, l, plain_rows(g->d_qrow, H * D), D, H, HALF_SPLIT, -1);
    gpu_rmsnorm_backward(plain_rows(g->d_q, 2 * D), 0, grad(g, l->q_norm), plain_rows(g->d_qrow, D), l->rstd_h, plain_rows(l->q, 2 * D), param(g, l->q_norm), 1, N * H, D, T);
    gpu_linear_backward(g->dxn, 0, grad(g, l->q_proj), g->d_q, l->xn, param(g, l->q_proj), N, c->C, l->n_q);
    for (int64_t h = 0; h < G; h++) // in place: values keep their gradients
        gpu_rmsnorm_backward(plain_rows(g->d_rows + h * D, l->R), 0, grad(g, l->k_norm), plain_rows(g->d_rows + h * D, l->R), l->rstd_kv + h * N,
                             plain_rows(l->kva + h * D, l->R), param(g, l->k_norm), 1, N, D, T);
    for (int half = 0; half < 2; half++) {
        int w = half ? l->v_proj : l->k_proj;
        float *dy = g->d_rows + half * l->v_off;
        gpu_matmul(g->dxn, c->C, dy, l->R, 1, param(g, w), c->C, 1, N, c->C, G * D, 1);
        gpu_matmul(grad(g, w), c->C, dy, 1, l->R, l->xn, c->C, 1, G * D, c->C, N, 1);
    }
}

// mean[e] = average of the raw index keys of the block that token i completes.
__global__ static void block_mean_kernel(Pool p, float *mean, const float *raw, int64_t width, int64_t offset, int64_t DI) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = x / DI, d = x % DI, e, at;
    if (i >= p.N || !gpu_completes(p, i, &e, &at)) return;
    float s = 0;
    for (int64_t j = i + 1 - p.r; j <= i; j++) s += raw[j * width + offset + d] / (float)p.r;
    mean[e * DI + d] = s;
}
__global__ static void block_mean_backward_kernel(Pool p, float *d_raw, const float *d_mean, int64_t width, int64_t offset, int64_t DI) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, i = x / DI, d = x % DI, e, at;
    if (i >= p.N || !gpu_completes(p, i, &e, &at)) return;
    for (int64_t j = i + 1 - p.r; j <= i; j++) d_raw[j * width + offset + d] = d_mean[e * DI + d] / (float)p.r;
}

static void gpu_qsa_index_forward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t n = g->N, HI = c->HI, DI = c->DI, width = (HI + 1) * DI, T = g->T, cands = g->B * l->n_cand;
    Rows mean = {l->ika, DI, l->n_cand}, keys = {l->k_index, DI, l->n_cand};
    gpu_linear_forward(l->icomp, l->xn, param(g, l->iq), n, c->C, width);
    for (int64_t h = 0; h < HI; h++)
        gpu_rmsnorm_forward(plain_rows(l->q_index + h * DI, HI * DI), l->rstd_iq + h * n, plain_rows(l->icomp + h * DI, width), param(g, l->ik_bias), 1, n, DI, c->rms_eps, T);
    gpu_rotate(g, l, plain_rows(l->q_index, HI * DI), DI, HI, HALF_SPLIT, 1);
    ELEMENTWISE(fill_kernel, n * HI, l->w_index, (float)pow((double)DI, -0.5));
    if (!cands) return;
    CUDA_CHECK(cudaMemsetAsync(l->ika, 0, (size_t)(cands * DI) * sizeof(float), stream));
    block_mean_kernel<<<blocks_for(n * DI, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), l->ika, l->icomp, width, HI * DI, DI);
    gpu_rmsnorm_forward(keys, l->rstd_k, mean, param(g, l->ik_norm), 1, cands, DI, c->rms_eps, l->n_cand);
    pool_rope_kernel<<<blocks_for(n * c->rope / 2, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), keys, 0, l->cos_sin, c->rope / 2, HALF_SPLIT, 1.0f);
}

static void gpu_qsa_index_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t N = g->N, HI = c->HI, DI = c->DI, width = (HI + 1) * DI, T = g->T, cands = g->B * l->n_cand;
    Rows dk = {g->d_ki, DI, l->n_cand}, dm = {g->d_ki2, DI, l->n_cand}, mean = {l->ika, DI, l->n_cand};
    CUDA_CHECK(cudaMemsetAsync(g->d_comp, 0, (size_t)(N * width) * sizeof(float), stream));
    gpu_rotate(g, l, plain_rows(g->d_qi, HI * DI), DI, HI, HALF_SPLIT, -1);
    for (int64_t h = 0; h < HI; h++)
        gpu_rmsnorm_backward(plain_rows(g->d_comp + h * DI, width), 0, grad(g, l->ik_bias), plain_rows(g->d_qi + h * DI, HI * DI), l->rstd_iq + h * N,
                             plain_rows(l->icomp + h * DI, width), param(g, l->ik_bias), 1, N, DI, T);
    if (cands) {
        pool_rope_kernel<<<blocks_for(N * c->rope / 2, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), dk, 0, l->cos_sin, c->rope / 2, HALF_SPLIT, -1.0f);
        gpu_rmsnorm_backward(dm, 0, grad(g, l->ik_norm), dk, l->rstd_k, mean, param(g, l->ik_norm), 1, cands, DI, l->n_cand);
        block_mean_backward_kernel<<<blocks_for(N * DI, BLOCK), BLOCK, 0, stream>>>(pool_of(g, l), g->d_comp, g->d_ki2, width, HI * DI, DI);
    }
    gpu_linear_backward(NULL, 0, grad(g, l->iq), g->d_comp, l->xn, param(g, l->iq), N, c->C, width);
}

static void gpu_clear_index_grads(Model *g, int64_t n_cand) {
    CUDA_CHECK(cudaMemsetAsync(g->d_qi, 0, (size_t)(g->N * g->c.HI * g->c.DI) * sizeof(float), stream));
    CUDA_CHECK(cudaMemsetAsync(g->d_wi, 0, (size_t)(g->N * g->c.HI) * sizeof(float), stream));
    CUDA_CHECK(cudaMemsetAsync(g->d_ki, 0, (size_t)(g->B * n_cand * g->c.DI) * sizeof(float), stream));
}

static void gpu_attention_forward(Model *g, Layer *l) {
    int mla = is_mla(l->letter), v4 = is_v4(l->letter);
    (mla ? gpu_mla_forward : v4 ? gpu_v4_forward : gpu_qsa_forward)(g, l);
    if (is_sparse(l->letter)) {
        (mla ? gpu_mla_index_forward : v4 ? gpu_v4_index_forward : gpu_qsa_index_forward)(g, l);
        if (!g->fixed_selection && !g->dense) gpu_select_forward(g, l);
    }
    gpu_sparse_attention_forward(g, l);
    (mla ? gpu_mla_output_forward : v4 ? gpu_v4_output_forward : gpu_qsa_output_forward)(g, l);
}

static void gpu_attention_backward(Model *g, Layer *l, const float *dy) {
    int mla = is_mla(l->letter), v4 = is_v4(l->letter);
    (mla ? gpu_mla_output_backward : v4 ? gpu_v4_output_backward : gpu_qsa_output_backward)(g, l, dy);
    gpu_sparse_attention_backward(g, l);
    (mla ? gpu_mla_backward : v4 ? gpu_v4_backward : gpu_qsa_backward)(g, l);
    if (!is_sparse(l->letter)) return;
    (mla ? gpu_mla_index_backward : v4 ? gpu_v4_index_backward : gpu_qsa_index_backward)(g, l);
    gpu_clear_index_grads(g, l->n_cand);
}

// ----------------------------------------------------------------------------
// 7. The model

static void gpu_block_forward(Model *g, Layer *l, float *next) {
    const Config *c = &g->c;
    int64_t C = c->C, F = c->F, n = g->N, T = g->T;
    gpu_rmsnorm_forward(plain_rows(l->xn, C), l->rstd, plain_rows(l->x, C), param(g, l->input_norm), 0, n, C, c->rms_eps, T);
    gpu_attention_forward(g, l);
    ELEMENTWISE(add_kernel, n * C, l->x2, l->x, g->y);
    gpu_rmsnorm_forward(plain_rows(l->xn2, C), l->rstd2, plain_rows(l->x2, C), param(g, l->post_norm), 0, n, C, c->rms_eps, T);
    gpu_linear_forward(l->g, l->xn2, param(g, l->gate), n, C, F);
    gpu_linear_forward(l->u, l->xn2, param(g, l->up), n, C, F);
    ELEMENTWISE(swiglu_forward_kernel, n * F, l->act, l->g, l->u);
    gpu_linear_forward(g->y, l->act, param(g, l->down), n, F, C);
    ELEMENTWISE(add_kernel, n * C, next, l->x2, g->y);
}

static void gpu_block_backward(Model *g, Layer *l) {
    const Config *c = &g->c;
    int64_t C = c->C, F = c->F, N = g->N, T = g->T;
    gpu_linear_backward(g->d_act, 0, grad(g, l->down), g->dx, l->act, param(g, l->down), N, F, C);
    ELEMENTWISE(swiglu_backward_kernel, N * F, g->d_g, g->d_u, g->d_act, l->g, l->u);
    gpu_linear_backward(g->dxn, 0, grad(g, l->gate), g->d_g, l->xn2, param(g, l->gate), N, C, F);
    gpu_linear_backward(g->dxn, 1, grad(g, l->up), g->d_u, l->xn2, param(g, l->up), N, C, F);
    gpu_rmsnorm_backward(plain_rows(g->dx, C), 1, grad(g, l->post_norm), plain_rows(g->dxn, C), l->rstd2, plain_rows(l->x2, C), param(g, l->post_norm), 0, N, C, T);
    gpu_attention_backward(g, l, g->dx);
    gpu_rmsnorm_backward(plain_rows(g->dx, C), 1, grad(g, l->input_norm), plain_rows(g->dxn, C), l->rstd, plain_rows(l->x, C), param(g, l->input_norm), 0, N, C, T);
}

// Loss, hit and (learning) gradient of one row of logits, in place. One block a row; the padding takes no part.
__global__ static void classifier_kernel(float *logits, const int32_t *targets, float *row_loss, int32_t *row_hit, int64_t V, int64_t Vp, float loss_scale, int learn) {
    __shared__ float shared[BLOCK / WARP];
    __shared__ int best[BLOCK / WARP];
    float *z = logits + blockIdx.x * Vp, top = -INFINITY, sum = 0;
    int32_t target = targets[blockIdx.x];
    int64_t at = V;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x)
        if (z[v] > top) { top = z[v]; at = v; }
    for (int o = 16; o > 0; o /= 2) { // the largest, and of equals the first
        float other = __shfl_xor_sync(0xffffffffu, top, o);
        int64_t where = __shfl_xor_sync(0xffffffffu, at, o);
        if (other > top || (other == top && where < at)) { top = other; at = where; }
    }
    if (threadIdx.x % WARP == 0) { shared[threadIdx.x / WARP] = top; best[threadIdx.x / WARP] = (int)at; }
    __syncthreads();
    for (int w = 0; w < BLOCK / WARP; w++)
        if (shared[w] > top || (shared[w] == top && best[w] < at)) { top = shared[w]; at = best[w]; }
    float want = target >= 0 ? z[target] : 0;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) sum += expf(z[v] - top);
    sum = block_sum(sum, shared); // its barriers also come between reading z[target] and overwriting it
    if (threadIdx.x == 0) {
        row_loss[blockIdx.x] = target < 0 ? 0 : logf(sum) + top - want;
        row_hit[blockIdx.x] = at == target;
    }
    if (!learn) return;
    for (int64_t v = threadIdx.x; v < Vp; v += blockDim.x)
        z[v] = target < 0 || v >= V ? 0 : loss_scale * (expf(z[v] - top) / sum - (v == target));
}

static void gpu_classifier(Model *g) {
    int64_t C = g->c.C, Vp = g->Vp;
    for (int64_t r = 0; r < g->N; r += G_.logit_rows) {
        int64_t n = min64(G_.logit_rows, g->N - r);
        gpu_linear_forward(G_.logits, g->xf + r * C, param(g, g->head), n, C, Vp);
        classifier_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(G_.logits, g->targets + r, g->row_loss + r, g->row_hit + r, g->c.V, Vp, (float)g->loss_scale, g->learning);
        if (g->learning) gpu_linear_backward(g->dxn + r * C, 0, grad(g, g->head), G_.logits, g->xf + r * C, param(g, g->head), n, C, Vp);
    }
}

// Forward over the host model's tokens; row_loss, row_hit and (evaluating) row_kl come back to the host.
static void gpu_forward(Model *m) {
    Model *g = &G_.g;
    int64_t C = g->c.C, N = g->N;
    g->dense = m->dense;
    g->learning = m->learning;
    g->fixed_selection = m->fixed_selection;
    g->loss_scale = m->loss_scale;
    g->kl_scale = m->kl_scale;
    find_documents(m);
    CUDA_CHECK(cudaMemcpyAsync(g->tokens, m->tokens, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(g->targets, m->targets, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemcpyAsync(g->doc, m->doc, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaMemsetAsync(g->row_kl, 0, (size_t)N * sizeof(float), stream));
    CUDA_CHECK(cudaMemsetAsync(G_.nan_count, 0, sizeof *G_.nan_count, stream));
    ELEMENTWISE(embedding_forward_kernel, N * C, g->layers[0].x, param(g, g->embed), g->tokens, C);
    for (int64_t l = 0; l < g->c.L; l++) gpu_block_forward(g, &g->layers[l], l + 1 < g->c.L ? g->layers[l + 1].x : g->last_x);
    gpu_rmsnorm_forward(plain_rows(g->xf, C), g->rstd_f, plain_rows(g->last_x, C), param(g, g->final_norm), 0, N, C, g->c.rms_eps, g->T);
    gpu_classifier(g);
    m->index_scans = g->index_scans;
    unsigned long long nans;
    CUDA_CHECK(cudaMemcpyAsync(m->row_loss, g->row_loss, (size_t)N * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(m->row_hit, g->row_hit, (size_t)N * sizeof(int32_t), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(m->row_kl, g->row_kl, (size_t)N * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaMemcpyAsync(&nans, G_.nan_count, sizeof nans, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaGetLastError());
    m->nan_scores += (int64_t)nans;
}

// Backward after gpu_forward with learning set; row_kl comes back to the host.
static void gpu_backward(Model *m) {
    Model *g = &G_.g;
    int64_t C = g->c.C, N = g->N;
    CUDA_CHECK(cudaMemsetAsync(g->row_kl, 0, (size_t)N * sizeof(float), stream));
    gpu_clear_index_grads(g, g->most_cand);
    gpu_rmsnorm_backward(plain_rows(g->dx, C), 0, grad(g, g->final_norm), plain_rows(g->dxn, C), g->rstd_f, plain_rows(g->last_x, C), param(g, g->final_norm), 0, N, C, g->T);
    for (int64_t l = g->c.L - 1; l >= 0; l--) {
        if (!strcmp(g->c.recompute, "block")) { // the selection is kept, not made again (unless --replay 0)
            int fixed = g->fixed_selection;
            g->fixed_selection |= (int)g->c.replay;
            gpu_block_forward(g, &g->layers[l], g->y);
            g->fixed_selection = fixed;
        }
        gpu_block_backward(g, &g->layers[l]);
    }
    embedding_backward_kernel<<<(unsigned)g->c.V, BLOCK, 0, stream>>>(grad(g, g->embed), g->dx, g->tokens, C, N);
    m->index_scans = g->index_scans;
    CUDA_CHECK(cudaMemcpyAsync(m->row_kl, g->row_kl, (size_t)N * sizeof(float), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaGetLastError());
}

// ----------------------------------------------------------------------------
// 8. Optimizer

enum { NORM_BLOCKS = 256 };

// parts[b] += sum of squares of the b-th share of x, in double and in a fixed order.
__global__ static void norm_kernel(double *parts, const float *x, int64_t n) {
    __shared__ double shared[BLOCK];
    double s = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) s += (double)x[i] * (double)x[i];
    shared[threadIdx.x] = s;
    __syncthreads();
    for (int o = BLOCK / 2; o > 0; o /= 2) {
        if ((int)threadIdx.x < o) shared[threadIdx.x] += shared[threadIdx.x + o];
        __syncthreads();
    }
    if (threadIdx.x == 0) parts[blockIdx.x] += shared[0];
}

static double gpu_grad_norm(const Model *m, int index) {
    const Model *g = &G_.g;
    double parts[NORM_BLOCKS], total = 0;
    (void)m;
    CUDA_CHECK(cudaMemsetAsync(G_.norm_parts, 0, sizeof parts, stream));
    for (int i = 0; i < g->n_tensors; i++)
        if (g->tensors[i].index == index) norm_kernel<<<NORM_BLOCKS, BLOCK, 0, stream>>>(G_.norm_parts, grad(g, i), g->tensors[i].size);
    CUDA_CHECK(cudaMemcpyAsync(parts, G_.norm_parts, sizeof parts, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < NORM_BLOCKS; i++) total += parts[i];
    return sqrt(total);
}

__global__ static void adamw_kernel(float *p, float *m, float *v, const float *g, float b1, float b2, float scale, float decay, float rate, float inv2, float eps, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float gi = g[i] * scale;
    m[i] = b1 * m[i] + (1 - b1) * gi;
    v[i] = b2 * v[i] + (1 - b2) * gi * gi;
    p[i] = decay * p[i] - rate * m[i] / (sqrtf(v[i] * inv2) + eps);
}

static void gpu_update(Model *m, int64_t step, double lr, const double scale[2]) {
    Model *g = &G_.g;
    const Config *c = &m->c;
    double fix1 = 1 - pow(c->beta1, (double)step), fix2 = 1 - pow(c->beta2, (double)step);
    for (int i = 0; i < g->n_tensors; i++) {
        const Tensor *t = &g->tensors[i];
        double rate = lr * (t->index ? c->index_lr_mult : 1);
        if (t->index && c->kl_coef == 0) continue; // untrained: not decayed either
        ELEMENTWISE(adamw_kernel, t->size, param(g, i), g->m + t->offset, g->v + t->offset, grad(g, i), (float)c->beta1, (float)c->beta2, (float)scale[t->index],
                    (float)(t->decay ? 1 - rate * c->weight_decay : 1), (float)(rate / fix1), (float)(1 / fix2), (float)c->adam_eps);
    }
}

static void gpu_zero_grads(Model *m) { CUDA_CHECK(cudaMemsetAsync(G_.g.grads, 0, (size_t)m->n_params * sizeof(float), stream)); }

// ----------------------------------------------------------------------------
// 9. Transfers, --verify

static void gpu_copy(float *to, const float *from, int64_t n, cudaMemcpyKind kind) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, (size_t)n * sizeof(float), kind, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
}
static void gpu_to_host(Model *m) {
    gpu_copy(m->params, G_.g.params, m->n_params, cudaMemcpyDeviceToHost);
    gpu_copy(m->m, G_.g.m, m->n_params, cudaMemcpyDeviceToHost);
    gpu_copy(m->v, G_.g.v, m->n_params, cudaMemcpyDeviceToHost);
}
static void gpu_from_host(Model *m) {
    gpu_copy(G_.g.params, m->params, m->n_params, cudaMemcpyHostToDevice);
    gpu_copy(G_.g.m, m->m, m->n_params, cudaMemcpyHostToDevice);
    gpu_copy(G_.g.v, m->v, m->n_params, cudaMemcpyHostToDevice);
}

static void *device_alloc(size_t bytes) {
    void *p;
    size_t left, total;
    CUDA_CHECK(cudaMemGetInfo(&left, &total));
    if (bytes > left) die("the device has %zu MiB free, but %zu MiB are needed: a smaller --batch-size or --seq-len, or --recompute block", left >> 20, bytes >> 20);
    CUDA_CHECK(cudaMalloc(&p, bytes ? bytes : 1));
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    return p;
}

// The plan of train_cpu.c over device memory, then what only this program needs. Walked twice, as there.
static void gpu_plan_walk(Model *g) {
    Arena *a = &g->arena;
    const Config *c = &g->c;
    int64_t cand = 0, d = max64(max64(c->C, c->q_lora), max64(c->F, c->kv_lora + c->rope));
    plan_walk(g, a);
    a->used = a->peak; // behind the layers' shared place
    int64_t longest = 1; // a chunk must hold one query of the longest support; and about a gibibyte in all
    for (int64_t i = 0; i < c->L; i++) {
        const Layer *l = &g->layers[i];
        int all = l->all || c->warmup_dense > 0;
        longest = max64(longest, layer_support(g, l, all));
        cand = max64(cand, l->source >= 0 ? (all ? max64(l->n_cand, 1) : c->topk) : 0);
        d = max64(d, max64(l->R, c->H));
    }
    int64_t most = g->N * c->H * longest, kl_most = g->N * c->HI * cand;
    G_.space = max64(c->H * longest, min64(most, (int64_t)1 << 27));
    G_.kl_space = max64(c->HI * cand, min64(kl_most, (int64_t)1 << 27));
    const char *name = "attention of a chunk of queries";
    G_.probs = plan_real(a, name, G_.space);
    G_.ds = plan_real(a, name, G_.space);
    G_.place = plan_int(a, name, G_.space / c->H);
    G_.target = plan_real(a, name, G_.kl_space / c->HI);
    G_.dots = plan_real(a, name, G_.kl_space);
    name = "sums and inverse lists";
    G_.delta = plan_real(a, name, g->N * c->H);
    G_.partial = plan_real(a, name, ROW_PARTS * d);
    G_.pair_key = (uint32_t *)plan_int(a, name, g->N * c->topk);
    G_.pair_key2 = (uint32_t *)plan_int(a, name, g->N * c->topk);
    G_.pair = (uint32_t *)plan_int(a, name, g->N * c->topk);
    G_.pair2 = (uint32_t *)plan_int(a, name, g->N * c->topk);
    G_.list = (int2 *)plan_int(a, name, 2 * g->N * c->topk);
    G_.list_start = plan_int(a, name, g->N + g->B + 1);
    G_.sort_bytes = 0;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, G_.sort_bytes, G_.pair_key, G_.pair_key2, G_.pair, G_.pair2, (int)(g->N * c->topk), 0, 32, stream));
    G_.sort_space = plan_take(a, name, G_.sort_bytes);
    G_.norm_parts = (double *)plan_take(a, name, NORM_BLOCKS * sizeof(double));
    G_.nan_count = (unsigned long long *)plan_take(a, name, sizeof(unsigned long long));
    G_.logit_rows = max64(1, min64(g->N, ((int64_t)1 << 26) / g->Vp));
    G_.logits = plan_real(a, "logits of a chunk (device)", G_.logit_rows * g->Vp);
}

// Build the device's model beside the host's m, whose parameters are copied.
static void gpu_open(Model *m, int64_t B, int64_t T) {
    Model *g = &G_.g;
    size_t bytes = (size_t)m->n_params * sizeof(float);
    CUDA_CHECK(cudaStreamCreate(&stream));
    cublas_check(cublasLtCreate(&lt), "create");
    CUDA_CHECK(cudaMalloc(&lt_workspace, LT_WORKSPACE));
    if (B * T * max64(m->c.topk, 1) >= (int64_t)1 << 31) die("B * T * k = %lld: the inverse lists of this version hold less than 2^31 pairs", (long long)(B * T * m->c.topk));
    *g = *m;
    g->layers = (Layer *)xalloc((size_t)m->c.L * sizeof(Layer));
    memcpy(g->layers, m->layers, (size_t)m->c.L * sizeof(Layer));
    memset(&g->arena, 0, sizeof g->arena);
    g->B = B; g->T = T; g->N = B * T; g->r0 = 0; g->nr = g->N;
    g->training = 1;
    g->lanes = 0;
    g->scratch_bytes = 0;
    gpu_plan_walk(g);
    size_t peak = g->arena.peak;
    g->params = (float *)device_alloc(bytes);
    g->grads = (float *)device_alloc(bytes);
    g->m = (float *)device_alloc(bytes);
    g->v = (float *)device_alloc(bytes);
    g->arena.base = (char *)device_alloc(peak);
    g->arena.used = g->arena.peak = 0;
    gpu_plan_walk(g);
    float *tables = (float *)xalloc((size_t)(ROPE_KINDS * T * m->c.rope) * sizeof(float));
    rope_tables(&m->c, T, tables);
    gpu_copy(g->cos_sin, tables, ROPE_KINDS * T * m->c.rope, cudaMemcpyHostToDevice);
    free(tables);
    gpu_from_host(m);
    Engine device = {gpu_forward, gpu_backward, gpu_zero_grads, gpu_grad_norm, gpu_update, gpu_to_host, gpu_from_host};
    cpu_engine = engine;
    engine = device;
}

static void gpu_close(void) {
    Model *g = &G_.g;
    for (int i = 0; i < n_gemm_plans; i++) {
        cublasLtMatmulDescDestroy(gemm_plans[i].op);
        cublasLtMatrixLayoutDestroy(gemm_plans[i].a);
        cublasLtMatrixLayoutDestroy(gemm_plans[i].b);
        cublasLtMatrixLayoutDestroy(gemm_plans[i].c);
    }
    n_gemm_plans = 0;
    cublasLtDestroy(lt);
    CUDA_CHECK(cudaFree(lt_workspace));
    CUDA_CHECK(cudaFree(g->params));
    CUDA_CHECK(cudaFree(g->grads));
    CUDA_CHECK(cudaFree(g->m));
    CUDA_CHECK(cudaFree(g->v));
    CUDA_CHECK(cudaFree(g->arena.base));
    free(g->layers);
    CUDA_CHECK(cudaStreamDestroy(stream));
    memset(&G_, 0, sizeof G_);
    engine = cpu_engine;
}

// Norm-wise relative difference of n floats on the device from a host array. floor is added to the norm: a gradient that
// is zero but for rounding (a softmax over one key) has no relative error.
static double gpu_difference(const float *device, const float *host, int64_t n, double floor) {
    float *x = (float *)xalloc((size_t)n * sizeof(float));
    double diff = 0, norm = 0;
    gpu_copy(x, device, n, cudaMemcpyDeviceToHost);
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)x[i] - (double)host[i]) * ((double)x[i] - (double)host[i]);
        norm += (double)host[i] * (double)host[i];
    }
    free(x);
    return sqrt(diff) / (sqrt(norm) + floor + 1e-30);
}

// What a comparison with the reference found, the largest of each kind.
typedef struct { double loss, kl, output, grad; char worst[96]; int64_t chosen, differ, unexplained; } Verdict;

// The same step on both sides. h is a host model with its buffers planned, tokens and targets set, learning. Selections
// are compared first: where the sets differ, the reference's scores of the swapped candidates must lie within rounding of
// its k-th. Then the device takes the reference's selections, so that what follows compares arithmetic alone.
static Verdict gpu_compare(Model *h, int print) {
    Model *g = &G_.g;
    Verdict v;
    memset(&v, 0, sizeof v);
    model_forward(h);
    gpu_forward(h); // overwrites the host's row results: the reference runs again below
    int64_t k = h->c.topk, T = h->T;
    int32_t *sel = (int32_t *)xalloc((size_t)(h->N * k) * sizeof(int32_t));
    real *dots = (real *)xalloc((size_t)(h->c.HI * T) * sizeof(real));
    float *row = (float *)xalloc((size_t)T * sizeof(float));
    for (int64_t j = 0; j < h->c.L && !h->dense; j++) {
        Layer *l = &h->layers[j];
        if (!is_sparse(l->letter)) continue;
        CUDA_CHECK(cudaMemcpy(sel, g->layers[j].sel, (size_t)(h->N * k) * sizeof(int32_t), cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < h->N && strcmp(h->c.recompute, "block"); i++) { // scores need this layer's index queries
            int64_t a = 0, b = 0, lo, hi;
            int32_t *ours = sel + i * k, *ref = l->sel + i * k;
            visible(h, l, i, &lo, &hi);
            v.chosen += min64(hi - lo, k);
            if (!memcmp(ours, ref, (size_t)k * sizeof(int32_t))) continue;
            index_scores(h, l, i / T, i % T, 1, 0, l->n_cand, dots, row);
            float kth = INFINITY, size = 0;
            for (int64_t s = 0; s < k && ref[s] >= 0; s++) kth = row[ref[s]] < kth ? row[ref[s]] : kth;
            for (int64_t s = lo; s < hi; s++) size = fabsf(row[s]) > size ? fabsf(row[s]) : size;
            while (a < k || b < k) { // merge two ascending lists
                int32_t x = a < k && ours[a] >= 0 ? ours[a] : INT32_MAX, y = b < k && ref[b] >= 0 ? ref[b] : INT32_MAX;
                if (x == INT32_MAX && y == INT32_MAX) break;
                if (x != y) {
                    int32_t s = x < y ? x : y;
                    v.differ++;
                    v.unexplained += s < lo || s >= hi || fabsf(row[s] - kth) > 1e-4f * size;
                }
                a += x <= y;
                b += y <= x;
            }
        }
        CUDA_CHECK(cudaMemcpy(g->layers[j].sel, l->sel, (size_t)(h->N * k) * sizeof(int32_t), cudaMemcpyHostToDevice));
    }
    int fixed = h->fixed_selection;
    double loss = 0, kl = 0, gpu_loss = 0, gpu_kl = 0;
    h->fixed_selection = 1;
    zero_grads(h);
    model_forward(h);
    for (int64_t i = 0; i < h->N; i++) loss += (double)h->row_loss[i];
    model_backward(h);
    for (int64_t i = 0; i < h->N; i++) kl += (double)h->row_kl[i];
    gpu_zero_grads(h);
    gpu_forward(h);
    for (int64_t i = 0; i < h->N; i++) gpu_loss += (double)h->row_loss[i];
    gpu_backward(h);
    for (int64_t i = 0; i < h->N; i++) gpu_kl += (double)h->row_kl[i];
    h->fixed_selection = fixed;
    v.loss = fabs(gpu_loss - loss) / (fabs(loss) + 1e-30);
    v.kl = fabs(gpu_kl - kl) / (fabs(kl) + 1e-6);
    for (int64_t j = 0; j <= h->c.L; j++) {
        double d = j < h->c.L ? gpu_difference(g->layers[j].x, h->layers[j].x, h->N * h->c.C, 0) : gpu_difference(g->last_x, h->last_x, h->N * h->c.C, 0);
        if (print && j) printf("  output of layer %-3lld (%c)                                          relative error %.2e\n", (long long)j - 1, h->layers[j - 1].letter, d);
        if (!(d <= v.output)) v.output = d;
    }
    for (int i = 0; i < h->n_tensors; i++) {
        double d = gpu_difference(grad(g, i), grad(h, i), h->tensors[i].size, 1e-4 * grad_norm(h, h->tensors[i].index));
        if (print) printf("  gradient %-62s relative error %.2e\n", h->tensors[i].name, d);
        if (!(d <= v.grad)) { v.grad = d; snprintf(v.worst, sizeof v.worst, "%s", h->tensors[i].name); }
    }
    free(sel);
    free(dots);
    free(row);
    return v;
}

// ----------------------------------------------------------------------------
// 10. Training loop, command line
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
    printf("kernels: plain, float32, deterministic (no float atomics)\n");
}

#ifndef TESTING
int main(int argc, char **argv) {
    Config c;
    Model m;
    Loader data[2];
    Tokenizer tok;
    if (!prepare(&c, &m, data, &tok, argc, argv)) return 0;
    if (strcmp(c.selector, "indexer") || strcmp(c.topk_method, "hytopk"))
        die("--selector %s --topk %s: the CUDA trainer has only --selector indexer and --topk hytopk so far; ./train_cpu has all", c.selector, c.topk_method);
    gpu_report();
    if (c.probe) printf("probe: not on the device yet, recall@k and mass@k are left out\n");
    if (c.verify) activations_plan(&m, c.B, c.T, 1, 0);
    else { // the host holds what the loop reads and writes
        m.B = c.B; m.T = c.T; m.N = c.B * c.T; m.r0 = 0; m.nr = m.N;
        m.tokens = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
        m.targets = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
        m.doc = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
        m.row_hit = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
        m.row_loss = (float *)xalloc((size_t)m.N * sizeof(float));
        m.row_kl = (float *)xalloc((size_t)m.N * sizeof(float));
    }
    gpu_open(&m, c.B, c.T);
    printf("on the device: %.1f MiB of activations and scratch\n", (double)G_.g.arena.peak / 1048576.0);
    if (c.verify) {
        for (int64_t b = 0; b < m.B; b++) loader_row(&data[0], b, m.tokens + b * m.T, m.targets + b * m.T);
        m.learning = 1;
        m.dense = c.warmup_dense > 0;
        m.loss_scale = 1.0 / (double)m.N;
        m.kl_scale = c.kl_coef / (double)m.N;
        Verdict v = gpu_compare(&m, 1);
        printf("verify: loss %.2e, KL %.2e, layer outputs %.2e, gradients %.2e (%s); %lld of %lld chosen candidates differ, %lld beyond rounding\n", v.loss, v.kl, v.output, v.grad,
               v.worst, (long long)v.differ, (long long)v.chosen, (long long)v.unexplained);
        int good = v.loss < 1e-5 && v.kl < 1e-3 && v.output < 1e-4 && v.grad < 1e-3 && v.unexplained == 0;
        printf("verify: %s\n", good ? "agrees" : "DOES NOT AGREE");
        return good ? 0 : 1;
    }
    train(&m, &data[0], &data[1], &tok, argc, argv);
    gpu_close();
    free(m.tokens); free(m.targets); free(m.doc); free(m.row_hit); free(m.row_loss); free(m.row_kl);
    finish(&m, data, &tok);
    return 0;
}
#endif
