// The lightning indexer from projection to scores: what stands before HyTopK (hytopk.cu).
//
// One sequence of N tokens (documents are a range of s, see hytopk.cu); x [N, C] is the layer's normed input, q_r [N, L] the query latent.
// H index heads of D channels, of which the first "rope" rotate:
//   q[t]   = rope_t(q_r[t] Wq^T)                       [H, D]    every head by itself
//   key[t] = rope_t(LayerNorm(x[t] Wk^T))              [D]       with weight and bias, eps 1e-6
//   w[t]   = (x[t] Ww^T) H^-0.5 D^-0.5                 [H]       float: of either sign, so that scores are differences
//   I[t,s] = sum_h w[t,h] relu(q[t,h] . key[s])        s <= t
// rope_t turns the pairs (j, j + rope/2) by t theta^(-2j/rope): half-split. rope: a multiple of 16, at most 64 and D. D: 32, 64 or 128. H up to 64.
// Scores of the rows first..first+n-1 go to a table of n rows; what a row does not see (s > t) is not written.
//
// 1  plain      one thread an output element, every formula as it stands: what the others are read against
// 2  projection cuBLASLt, then one kernel for all that is left. The lesson is to count bytes: two products instead of three (x is read once for
//               key and weights, whose matrices are stacked), the rest in one pass that reads and writes each value once, 16 bytes an access
// 3  scores     mma.sync (sm_80 and later), H = 1 or even. The lesson is the order of operands: heads permuted so that a thread owns all heads of
//               a (query, key) pair and sums them without a shuffle, keys permuted so that its keys are neighbours and a store is 16 bytes
// 4  scores     wgmma (sm_90a), H = 2, 4, 8, 16, 32, 64. The lesson is balance: how large a tile the L2 cache asks for, and who computes while a warpgroup
//               adds heads and writes. What is left is the table: 4 bytes a score written, then read several times to select from, 2 N^2 bytes in all.
//               HyTopK keeps this product and does without the table.
//
// Run: lightning_indexer [seed [small]]; small: checks only. Needs -lcublasLt.
#include "common.h"
#include <vector>
#include <cublasLt.h>

typedef struct {
    int N, C, L, H, D, rope;
    int pitch;               // of y: D + H, rounded up so that rows are aligned to 16 bytes
    const bf16 *x, *qr;      // [N, C], [N, L]
    const bf16 *wq, *wkw;    // [H*D, L]; [D+H, C]: the key's matrix, then that of the weights
    const float *norm;       // [D] weight and ..
    const float *bias;       // .. bias of the key's LayerNorm
    const float *cos_sin;    // [N, rope/2, 2]
    float *y;                // [N, pitch] workspace: x wkw^T
    bf16 *q, *key;           // [N, H, D], [N, D]
    float *w;                // [N, H]
} Indexer;

typedef struct {
    int N, H, D, first, n;  // rows first..first+n-1 of N
    const bf16 *q, *key;    // [N, H, D], [N, D]
    const float *w;         // [N, H]
    float *table;           // [n, ld], ld a multiple of 4
    int64_t ld;
} Scores;

enum { THREADS = 256 };
static const double THETA = 10000, EPS = 1e-6;
static inline float weight_scale(const Indexer &c) { return (float)(1 / sqrt((double)c.H * c.D)); }

// ---- CPU reference, float64

// Values on the device, widened.
template <class X> static std::vector<double> widened(const X *device, int64_t n) {
    X *p = to_host(device, n);
    std::vector<double> v((size_t)n);
    for (int64_t i = 0; i < n; i++) v[(size_t)i] = (double)(float)p[i];
    free(p);
    return v;
}
// x [n, in] w [out, in]^T, operands on the device
static std::vector<double> linear_cpu(const bf16 *x_device, const bf16 *w_device, int64_t n, int in, int out) {
    std::vector<double> x = widened(x_device, n * in), w = widened(w_device, (int64_t)out * in), y((size_t)(n * out), 0);
    for (int64_t i = 0; i < n; i++)
        for (int64_t o = 0; o < out; o++)
            for (int64_t j = 0; j < in; j++) y[(size_t)(i * out + o)] += x[(size_t)(i * in + j)] * w[(size_t)(o * in + j)];
    return y;
}
// Rotates v's first channels to position t.
static void rope_cpu(double *v, int64_t t, int rope) {
    for (int j = 0; j < rope / 2; j++) {
        double angle = (double)t * pow(THETA, -2.0 * j / rope), c = cos(angle), s = sin(angle), a = v[j], b = v[j + rope / 2];
        v[j] = a * c - b * s;
        v[j + rope / 2] = a * s + b * c;
    }
}
// q, key and w of c's inputs, which are on the device.
static void project_cpu(const Indexer &c, std::vector<double> &q, std::vector<double> &key, std::vector<double> &w) {
    std::vector<double> norm = widened(c.norm, c.D), bias = widened(c.bias, c.D);
    q = linear_cpu(c.qr, c.wq, c.N, c.L, c.H * c.D);
    key = linear_cpu(c.x, c.wkw, c.N, c.C, c.D);
    w = linear_cpu(c.x, c.wkw + (int64_t)c.D * c.C, c.N, c.C, c.H);
    for (double &v : w) v /= sqrt((double)c.H * c.D);
    for (int64_t t = 0; t < c.N; t++) {
        double *k = &key[(size_t)(t * c.D)], mean = 0, var = 0;
        for (int d = 0; d < c.D; d++) mean += k[d] / c.D;
        for (int d = 0; d < c.D; d++) var += (k[d] - mean) * (k[d] - mean) / c.D;
        for (int d = 0; d < c.D; d++) k[d] = (k[d] - mean) / sqrt(var + EPS) * norm[(size_t)d] + bias[(size_t)d];
        rope_cpu(k, t, c.rope);
        for (int h = 0; h < c.H; h++) rope_cpu(&q[(size_t)((t * c.H + h) * c.D)], t, c.rope);
    }
}
// Scores of rows first..first+n-1 [n, N], and size: the sum of their terms' magnitudes, by which an error is judged. 0 for s > t.
static void scores_cpu(const std::vector<double> &q, const std::vector<double> &key, const std::vector<double> &w, int N, int H, int D, int first, int n,
                       std::vector<double> &score, std::vector<double> &size) {
    score.assign((size_t)n * (size_t)N, 0);
    size = score;
    for (int64_t t = first; t < first + n; t++)
        for (int64_t s = 0; s <= t; s++) {
            size_t at = (size_t)((t - first) * N + s);
            for (int h = 0; h < H; h++) {
                const double *y = &q[(size_t)((t * H + h) * D)], *k = &key[(size_t)(s * D)], weight = w[(size_t)(t * H + h)];
                double dot = 0, terms = 0;
                for (int d = 0; d < D; d++) {
                    dot += y[d] * k[d];
                    terms += fabs(y[d] * k[d]);
                }
                score[at] += weight * (dot < 0 ? 0 : dot);
                size[at] += fabs(weight) * terms;
            }
        }
}

// ---- version 1: plain kernels

// y [n, out], rows ldy apart, = x [n, in] w[out, in]^T
__global__ static void linear_kernel1(float *y, int64_t ldy, const bf16 *x, const bf16 *w, int64_t n, int in, int out) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, row = i / out;
    int o = (int)(i % out);
    if (row >= n) return;
    float sum = 0;
    for (int j = 0; j < in; j++) sum += (float)x[row * in + j] * (float)w[(int64_t)o * in + j];
    y[row * ldy + o] = sum;
}

// Channel d after the rotation of a vector whose channels at() gives. cs [rope/2, 2]: cosines and sines of its position.
template <class F> __device__ static float rotated(F at, int d, int rope, const float *cs) {
    int half = rope / 2;
    if (d >= rope) return at(d);
    float cosine = cs[d % half * 2], sine = cs[d % half * 2 + 1];
    return d < half ? at(d) * cosine - at(d + half) * sine : at(d - half) * sine + at(d) * cosine;
}
// From the products y and yq [N, H*D] to the outputs; of a row D channels of the key, H weights, H*D channels of queries.
__global__ static void finish_kernel1(Indexer c, const float *yq, float scale) {
    int64_t width = c.D + c.H + (int64_t)c.H * c.D, i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, t = i / width;
    int e = (int)(i % width), D = c.D;
    if (t >= c.N) return;
    const float *y = c.y + t * c.pitch, *cs = c.cos_sin + t * c.rope;
    if (e < D) {
        float mean = 0, var = 0;
        for (int d = 0; d < D; d++) mean += y[d];
        mean /= (float)D;
        for (int d = 0; d < D; d++) var += (y[d] - mean) * (y[d] - mean);
        float rstd = rsqrtf(var / (float)D + (float)EPS);
        c.key[t * D + e] = (bf16)rotated([=](int d) { return (y[d] - mean) * rstd * c.norm[d] + c.bias[d]; }, e, c.rope, cs);
    } else if (e < D + c.H) c.w[t * c.H + e - D] = y[e] * scale;
    else {
        int64_t at = t * c.H * D + e - D - c.H;
        int d = (int)(at % D);
        const float *q = yq + (at - d);
        c.q[at] = (bf16)rotated([=](int j) { return q[j]; }, d, c.rope, cs);
    }
}
// yq [N, H*D]: workspace.
static void project1(const Indexer &c, float *yq) {
    linear_kernel1<<<blocks_for((int64_t)c.N * (c.D + c.H), THREADS), THREADS>>>(c.y, c.pitch, c.x, c.wkw, c.N, c.C, c.D + c.H);
    linear_kernel1<<<blocks_for((int64_t)c.N * c.H * c.D, THREADS), THREADS>>>(yq, c.H * c.D, c.qr, c.wq, c.N, c.L, c.H * c.D);
    finish_kernel1<<<blocks_for((int64_t)c.N * (c.D + c.H + c.H * c.D), THREADS), THREADS>>>(c, yq, weight_scale(c));
    CUDA_CHECK(cudaGetLastError());
}

// Grid: (keys, rows).
__global__ static void scores_kernel1(Scores c) {
    int64_t s = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, t = c.first + (int64_t)blockIdx.y;
    if (s > t) return;
    float score = 0;
    for (int h = 0; h < c.H; h++) {
        float dot = 0;
        for (int d = 0; d < c.D; d++) dot += (float)c.q[(t * c.H + h) * c.D + d] * (float)c.key[s * c.D + d];
        score += c.w[t * c.H + h] * (dot < 0 ? 0 : dot);
    }
    c.table[blockIdx.y * c.ld + s] = score;
}

// ---- version 2: two products and one kernel
// What must move: x and q_r in, q, key and w out. The product of x has only D+H columns and moves bytes rather than computes, so x is read once for both of its
// matrices, [Wk; Ww] stacked. Its result y is float: w asks for it, the key is rounded but once, and D+H channels are few beside the H*D of the queries. Those
// are written in bf16 by their product, then rotated in place and so rounded a second time; only their first "rope" channels move again.

static void lt_check(cublasStatus_t s, const char *what) {
    if (s == CUBLAS_STATUS_SUCCESS) return;
    fflush(stdout);
    fprintf(stderr, "cuBLASLt: %s failed with status %d\n", what, (int)s);
    exit(1);
}
enum { LT_WORKSPACE = 32 << 20 };
static cublasLtHandle_t lt;
static void *lt_workspace;

// y [n, out], rows ld apart, = x [n, in] w[out, in]^T. cuBLASLt is column-major: y^T = w x^T, of which it sees w as [in, out] to be transposed.
typedef struct { cublasLtMatmulDesc_t op; cublasLtMatrixLayout_t w, x, y; cublasLtMatmulAlgo_t algo; } Product;
static Product product_new(cudaDataType_t type, int64_t n, int in, int out, int ld) {
    Product p;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t best;
    size_t bytes = LT_WORKSPACE;
    int found = 0;
    lt_check(cublasLtMatmulDescCreate(&p.op, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
    lt_check(cublasLtMatmulDescSetAttribute(p.op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), "transpose");
    lt_check(cublasLtMatrixLayoutCreate(&p.w, CUDA_R_16BF, (uint64_t)in, (uint64_t)out, in), "layout");
    lt_check(cublasLtMatrixLayoutCreate(&p.x, CUDA_R_16BF, (uint64_t)in, (uint64_t)n, in), "layout");
    lt_check(cublasLtMatrixLayoutCreate(&p.y, type, (uint64_t)out, (uint64_t)n, ld), "layout");
    lt_check(cublasLtMatmulPreferenceCreate(&preference), "preference");
    lt_check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes), "workspace");
    lt_check(cublasLtMatmulAlgoGetHeuristic(lt, p.op, p.w, p.x, p.y, p.y, preference, 1, &best, &found), "heuristic");
    lt_check(found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED, "a product of this shape");
    lt_check(cublasLtMatmulPreferenceDestroy(preference), "preference");
    p.algo = best.algo;
    return p;
}
static void product_run(const Product &p, void *y, const bf16 *x, const bf16 *w) {
    float one = 1, zero = 0;
    lt_check(cublasLtMatmul(lt, p.op, &one, w, p.w, x, p.x, &zero, y, p.y, y, p.y, &p.algo, lt_workspace, LT_WORKSPACE, 0), "product");
}
static void product_free(const Product &p) {
    for (cublasLtMatrixLayout_t l : {p.w, p.x, p.y}) lt_check(cublasLtMatrixLayoutDestroy(l), "layout");
    lt_check(cublasLtMatmulDescDestroy(p.op), "descriptor");
}

// Eight pairs: a turns with b; cs [8, 2] aligned to 16 bytes.
__device__ static inline void rotate_8(float a[8], float b[8], const float *cs) {
    #pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float4 v = *(const float4 *)(cs + 2 * i); // cosine and sine of pair i, then of i + 1
        float a0 = a[i], a1 = a[i + 1];
        a[i] = a0 * v.x - b[i] * v.y;
        b[i] = a0 * v.y + b[i] * v.x;
        a[i + 1] = a1 * v.z - b[i + 1] * v.w;
        b[i + 1] = a1 * v.w + b[i + 1] * v.z;
    }
}
__device__ static inline void load_8(float v[8], const bf16 *from) {
    uint4 u = *(const uint4 *)from;
    uint32_t words[4] = {u.x, u.y, u.z, u.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = __uint_as_float(words[i] << 16);
        v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
__device__ static inline void load_8(float v[8], const float *from) {
    float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
    v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
__device__ static inline void store_8(bf16 *to, const float v[8]) {
    *(uint4 *)to = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

// A warp has 256/D rows. D/8 lanes share a key, 8 channels each: mean and variance are shuffles among them, and so is the exchange of the rotation, whose
// pairs are rope/16 lanes apart. Then all lanes walk the rows' queries, 8 pairs at a time (cosines come from the L1 cache for all heads but the first),
// and the weights.
template <int D> __global__ __launch_bounds__(THREADS, 4) static void finish_kernel2(Indexer c, float scale) {
    enum { LANES = D / 8, ROWS = 32 / LANES };
    int lane = (int)threadIdx.x % 32, l = lane % LANES, half = c.rope / 16;
    int64_t row0 = ((int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * ROWS, row = row0 + lane / LANES;
    int rows = (int)min((int64_t)ROWS, c.N - row0);
    if (rows <= 0) return; // the whole warp
    int64_t from = min(row, (int64_t)c.N - 1); // lanes of a row that is not there take part in the shuffles
    float v[8], norm[8], bias[8], other[8], mean = 0, var = 0;
    load_8(v, c.y + from * c.pitch + 8 * l);
    load_8(norm, c.norm + 8 * l);
    load_8(bias, c.bias + 8 * l);
    for (int i = 0; i < 8; i++) mean += v[i];
    for (int o = 1; o < LANES; o *= 2) mean += __shfl_xor_sync(0xffffffffu, mean, o);
    mean /= D;
    for (int i = 0; i < 8; i++) var += (v[i] - mean) * (v[i] - mean);
    for (int o = 1; o < LANES; o *= 2) var += __shfl_xor_sync(0xffffffffu, var, o);
    float rstd = rsqrtf(var / D + (float)EPS);
    for (int i = 0; i < 8; i++) v[i] = (v[i] - mean) * rstd * norm[i] + bias[i];
    int pair = l < half ? l + half : l < 2 * half ? l - half : l;
    for (int i = 0; i < 8; i++) other[i] = __shfl_sync(0xffffffffu, v[i], lane - l + pair);
    const float *cs = c.cos_sin + from * c.rope;
    if (l < half) rotate_8(v, other, cs + 16 * l); // either lane of a pair keeps its own side
    else if (l < 2 * half) rotate_8(other, v, cs + 16 * (l - half));
    if (row < c.N) store_8(c.key + row * D + 8 * l, v);

    for (int i = lane; i < rows * c.H * half; i += 32) {
        int vector = i / half, p = i % half;
        bf16 *a = c.q + (row0 * c.H + vector) * D + 8 * p, *b = a + 8 * half;
        float x[8], z[8];
        load_8(x, a);
        load_8(z, b);
        rotate_8(x, z, c.cos_sin + (row0 + vector / c.H) * c.rope + 16 * p);
        store_8(a, x);
        store_8(b, z);
    }
    if (c.H % 4 == 0) {
        for (int i = lane * 4; i < rows * c.H; i += 128) {
            float4 u = *(const float4 *)(c.y + (row0 + i / c.H) * c.pitch + D + i % c.H);
            *(float4 *)(c.w + row0 * c.H + i) = make_float4(u.x * scale, u.y * scale, u.z * scale, u.w * scale);
        }
    } else {
        for (int i = lane; i < rows * c.H; i += 32) c.w[row0 * c.H + i] = c.y[(row0 + i / c.H) * c.pitch + D + i % c.H] * scale;
    }
}

#define BY_D(D, KERNEL) ((D) == 32 ? KERNEL<32> : (D) == 64 ? KERNEL<64> : KERNEL<128>)

static void finish2(const Indexer &c) {
    auto kernel = BY_D(c.D, finish_kernel2);
    kernel<<<blocks_for(c.N, THREADS / 32 * (256 / c.D)), THREADS>>>(c, weight_scale(c));
    CUDA_CHECK(cudaGetLastError());
}
// Bytes that finish2 has to move: y, rotated channels of q twice, the table of cosines; key and w.
static double finish2_bytes(const Indexer &c) { return (double)c.N * (4.0 * (c.D + c.H) + 4.0 * c.H * c.rope + 4.0 * c.rope + 2.0 * c.D + 4.0 * c.H); }

typedef struct { Product x, qr; } Products;
static Products products_new(const Indexer &c) {
    Products p = {product_new(CUDA_R_32F, c.N, c.C, c.D + c.H, c.pitch), product_new(CUDA_R_16BF, c.N, c.L, c.H * c.D, c.H * c.D)};
    return p;
}
static void products_free(const Products &p) {
    product_free(p.x);
    product_free(p.qr);
}
static void project2(const Indexer &c, const Products &p) {
    product_run(p.x, c.y, c.x, c.wkw);
    product_run(p.qr, c.q, c.qr, c.wq);
    finish2(c);
}

// ---- versions 3 and 4, in common
// A product of keys with all (query, head) columns leaves each thread two neighbouring columns of every 8. Column p of a group of 4 queries is given to
// query column_query(p) and head column_head(p): thread l then has heads (0,1), (2,3), ... of query l%4 in its own registers and adds relu(dot) w as they come.
// hytopk.cu has the same functions and says more. Two chains of sums, even and odd heads; x + |x| with half the weight is relu(x) that keeps NaN.
// A block has a tile of queries and PART keys at most, and reads its queries once; blocks of one part run together, so that its keys come from the L2 cache.
__device__ static inline int column_query(int p, int H) { return p / 8 / (H / 2) * 4 + p % 8 / 2; }
__device__ static inline int column_head(int p, int H) { return p / 8 % (H / 2) * 2 + p % 2; }

enum { PART = 4096 };

// ---- version 3: mma.sync
// Keys are the left operand, 32 a warp, whole in registers; columns go by in shared memory, 8 at a time. The next 256 keys travel into the same buffer
// meanwhile. Of 32 keys a thread has rows g, g+8, g+16, g+24 (g = lane/4): key 4g + i goes to row 8i + g, and the four are 16 neighbouring bytes of the table.

enum { KEYS3 = 256 };
__host__ __device__ static inline int groups3(int H) { return H < 2 ? 16 : H < 32 ? 32 / H : 1; } // groups of 4 queries: 128 columns or so
static size_t bytes3(int H, int D) {
    size_t columns = (size_t)groups3(H) * 4 * (size_t)std::max(H, 2);
    return (KEYS3 + columns) * (size_t)(D + 8) * 2 + columns * 4;
}

// H = 1 gets a head of zeros. Rows in shared memory are D + 8 channels apart: ldmatrix then touches all banks.
template <int D> __global__ __launch_bounds__(THREADS, 2) static void scores_kernel3(Scores c) {
    extern __shared__ __align__(16) char memory[];
    enum { WORDS = D / 8, P = D + 8 };
    int H = max(c.H, 2), groups = groups3(c.H), columns = groups * 4 * H, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int end = c.first + c.n, t0 = c.first + (int)blockIdx.x * groups * 4, from = (int)blockIdx.y * PART, to = min(min(t0 + groups * 4, end), from + PART);
    bf16 *key = (bf16 *)memory, *q = key + KEYS3 * P;
    float *w = (float *)(q + columns * P); // half weights [queries, H]
    if (from >= to) return;
    auto load_keys = [&](int s0) {
        #pragma unroll 4
        for (int u = 0; u < WORDS; u++) {
            int i = (int)threadIdx.x + u * THREADS, k = i / WORDS, d = i % WORDS * 8, row = k / 32 * 32 + k % 4 * 8 + k % 32 / 4;
            cp_async_16(smem_address(key + row * P + d), c.key + (int64_t)min(s0 + k, to - 1) * D + d, s0 + k < to);
        }
        cp_async_commit();
    };
    for (int i = threadIdx.x; i < columns * WORDS; i += THREADS) {
        int p = i / WORDS, d = i % WORDS * 8, t = t0 + column_query(p, H), h = column_head(p, H), take = t < end && h < c.H;
        cp_async_16(smem_address(q + p * P + d), c.q + ((int64_t)(take ? t : t0) * c.H + (take ? h : 0)) * D + d, take);
    }
    for (int i = threadIdx.x; i < columns; i += THREADS) {
        int t = t0 + i / H, h = i % H;
        w[i] = t < end && h < c.H ? 0.5f * c.w[(int64_t)t * c.H + h] : 0;
    }
    load_keys(from);
    for (int s0 = from; s0 < to; s0 += KEYS3) {
        uint32_t a[2][D / 16][4];
        cp_async_wait<0>();
        __syncthreads();
        #pragma unroll
        for (int m = 0; m < 2; m++)
            #pragma unroll
            for (int d = 0; d < D / 16; d++) ldmatrix_x4(a[m][d], smem_address(key + (warp * 32 + m * 16 + lane % 16) * P + d * 16 + lane / 16 * 8));
        __syncthreads(); // all keys are in registers
        if (s0 + KEYS3 < to) load_keys(s0 + KEYS3);
        int s = s0 + warp * 32 + lane / 4 * 4;
        for (int g = 0; g < groups; g++) {
            float even[4] = {0}, odd[4] = {0};
            int query = g * 4 + lane % 4, t = t0 + query;
            for (int j = 0; j < H / 2; j++) {
                float x[2][4] = {{0}};
                #pragma unroll
                for (int d = 0; d < D / 32; d++) {
                    uint32_t b[4];
                    ldmatrix_x4(b, smem_address(q + ((g * (H / 2) + j) * 8 + lane % 8) * P + d * 32 + lane / 8 * 8));
                    #pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma_16816(x[m], a[m][2 * d], b);
                        mma_16816(x[m], a[m][2 * d + 1], b + 2);
                    }
                }
                float2 v = *(const float2 *)(w + query * H + 2 * j);
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    float e = x[i / 2][i % 2 * 2], o = x[i / 2][i % 2 * 2 + 1];
                    even[i] = fmaf(e + fabsf(e), v.x, even[i]);
                    odd[i] = fmaf(o + fabsf(o), v.y, odd[i]);
                }
            }
            if (t >= end) continue;
            float *row = c.table + (int64_t)(t - c.first) * c.ld + s;
            if (s + 3 <= t) *(float4 *)row = make_float4(even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]);
            else
                for (int i = 0; i < 4; i++)
                    if (s + i <= t) row[i] = even[i] + odd[i];
        }
    }
}

// ---- version 4: wgmma (sm_90a)
// D[64 keys, 128 columns] = K Q^T, both from shared memory. A block is two warpgroups, which share the keys, 64 at a time, and have columns of their own. Two
// limits set the sizes: 256 columns a block, or keys would be fetched from the L2 cache faster than it gives them; and 64 accumulators with 32 weights a thread,
// so that two blocks fit a multiprocessor and four warpgroups take turns by themselves: one adds its heads and writes its scores under the products of the
// others. (hytopk.cu does it with one block of 256 columns a warpgroup, a producer that loads by TMA, and explicit turns.) H = 64: the heads of 4 queries fill
// 256 columns; a warpgroup takes them as two products, and works on the first under the second. Keys come by cp.async, a few blocks ahead in a ring. What ordinary
// instructions wrote is made visible to the tensor cores by a fence of the writer before the barrier.
// Of 16 keys a thread has rows g and g+8: key 2g + i goes to row 8i + g, so that its two scores are 8 neighbouring bytes, 64 bytes a row and warp.

enum { KEYS4 = 64 };
template <int H, int D> struct Tile {
    static constexpr int PASSES = H == 64 ? 2 : 1, GROUP_COLUMNS = 128 * PASSES, COLUMNS = 2 * GROUP_COLUMNS, GROUP_QUERIES = GROUP_COLUMNS / H;
    static constexpr int CHANNELS = D < 64 ? D : 64, PANELS = D / CHANNELS, STAGES = D > 64 ? 2 : 4; // a panel: rows of CHANNELS channels
    static constexpr int KEY_PANEL = KEYS4 * CHANNELS * 2, Q_PANEL = COLUMNS * CHANNELS * 2, BYTES = 1024 + PANELS * (Q_PANEL + STAGES * KEY_PANEL);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static inline void fence_async_proxy(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int N> __device__ static inline void wgmma_wait(void) { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Rows of 128 (or 64) bytes, groups of 8 rows follow each other, 128-byte (64-byte) swizzle.
template <int CHANNELS> __device__ static inline uint64_t panel_descriptor(uint32_t at) {
    return (uint64_t)(at >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)CHANNELS << 32 | (CHANNELS == 64 ? 1ull : 2ull) << 62;
}
// Where the 16-byte chunk of a row stands: bits 4.. of an address are xored with its bits 7.., as the descriptor's swizzle has it.
template <int CHANNELS> __device__ static inline uint32_t chunk_at(int row, int chunk, int panel_bytes) {
    constexpr int CHUNKS = CHANNELS / 8;
    uint32_t at = (uint32_t)(row * CHANNELS * 2 + chunk % CHUNKS * 16);
    return (uint32_t)(chunk / CHUNKS * panel_bytes) + (at ^ (at >> 7 & (CHUNKS - 1)) << 4);
}
#define R8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
// c [64, 128] (+)= a[64, 16] b[128, 16]^T; c is overwritten when not accumulate.
__device__ static inline void wgmma(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                 "%64, %65, p, 1, 1, 0, 0;\n}"
                 : R8(c, 0), R8(c, 8), R8(c, 16), R8(c, 24), R8(c, 32), R8(c, 40), R8(c, 48), R8(c, 56) : "l"(a), "l"(b), "r"(accumulate));
}
// Products in flight write registers behind the compiler's back: what reads them must not move above the wait.
__device__ static inline void registers_ready(float (&c)[64]) {
    #pragma unroll
    for (int j = 0; j < 64; j++) asm volatile("" : "+f"(c[j])::"memory");
}
#endif

template <int H, int D> __global__ __launch_bounds__(THREADS, H == 64 ? 1 : 2) static void scores_kernel4(Scores c) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    typedef Tile<H, D> S;
    enum { WORDS = D / 8, STAGE = S::PANELS * S::KEY_PANEL, STEPS = S::CHANNELS / 16 };
    extern __shared__ __align__(16) char memory[];
    int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); // known to be the same in a warp: descriptors stay in uniform registers
    int warp = (int)threadIdx.x % 128 / 32, lane = (int)threadIdx.x % 32;
    int end = c.first + c.n, tile = c.first + (int)blockIdx.x * 2 * S::GROUP_QUERIES;
    int from = (int)blockIdx.y * PART, to = min(min(tile + 2 * S::GROUP_QUERIES, end), from + PART), blocks = (to - from + KEYS4 - 1) / KEYS4;
    if (from >= to) return;
    uint32_t columns = (smem_address(memory) + 1023) & ~1023u, keys = columns + S::PANELS * S::Q_PANEL;
    auto load_keys = [&](int block) { // zeros behind the last key that a query of this tile sees
        uint32_t stage = keys + (uint32_t)(block % S::STAGES * STAGE);
        #pragma unroll 2
        for (int u = 0; u < KEYS4 * WORDS / THREADS; u++) {
            int i = (int)threadIdx.x + u * THREADS, k = i / WORDS, s = from + block * KEYS4 + k, row = k / 16 * 16 + k % 2 * 8 + k % 16 / 2;
            cp_async_16(stage + chunk_at<S::CHANNELS>(row, i % WORDS, S::KEY_PANEL), c.key + (int64_t)min(s, to - 1) * D + i % WORDS * 8, s < to);
        }
    };
    for (int i = threadIdx.x; i < S::COLUMNS * WORDS; i += THREADS) {
        int p = i / WORDS, t = tile + p / S::GROUP_COLUMNS * S::GROUP_QUERIES + column_query(p % S::GROUP_COLUMNS, H), take = t < end;
        const bf16 *q = c.q + ((int64_t)(take ? t : tile) * H + column_head(p % S::GROUP_COLUMNS, H)) * D + i % WORDS * 8;
        cp_async_16(columns + chunk_at<S::CHANNELS>(p, i % WORDS, S::Q_PANEL), q, take);
    }
    for (int b = 0; b < S::STAGES - 1; b++) {
        if (b < blocks) load_keys(b);
        cp_async_commit(); // the queries belong to the first; an empty group keeps the count
    }
    int t0 = tile + group * S::GROUP_QUERIES + lane % 4, s = from + warp * 16 + lane / 4 * 2; // this thread's queries t0, t0 + 4, ..; keys s, s + 1
    float *out = c.table + (int64_t)(t0 - c.first) * c.ld + s;
    float w[32 * S::PASSES]; // half weights, in the order of its columns
    #pragma unroll
    for (int j = 0; j < 16 * S::PASSES; j++) {
        int t = t0 + j / (H / 2) * 4;
        float2 v = make_float2(0, 0);
        if (t < end) v = *(const float2 *)(c.w + (int64_t)t * H + j % (H / 2) * 2);
        w[2 * j] = 0.5f * v.x;
        w[2 * j + 1] = 0.5f * v.y;
    }
    columns += (uint32_t)(group * S::GROUP_COLUMNS * S::CHANNELS * 2);
    #pragma unroll 1
    for (int b = 0; b < blocks; b++, s += KEYS4, out += KEYS4) {
        float x[S::PASSES][64], even[2] = {0}, odd[2] = {0};
        cp_async_wait<S::STAGES - 2>();
        fence_async_proxy();
        __syncthreads(); // block b has landed, and nobody reads block b - 1 any more
        if (b + S::STAGES - 1 < blocks) load_keys(b + S::STAGES - 1);
        cp_async_commit();
        uint32_t stage = keys + (uint32_t)(b % S::STAGES * STAGE);
        #pragma unroll
        for (int pass = 0; pass < S::PASSES; pass++) {
            wgmma_fence();
            #pragma unroll
            for (int d = 0; d < D / 16; d++)
                wgmma(x[pass], panel_descriptor<S::CHANNELS>(stage + (uint32_t)(d / STEPS * S::KEY_PANEL + d % STEPS * 32)),
                      panel_descriptor<S::CHANNELS>(columns + (uint32_t)(d / STEPS * S::Q_PANEL + pass * 128 * S::CHANNELS * 2 + d % STEPS * 32)), d > 0);
            wgmma_commit();
        }
        #pragma unroll
        for (int pass = 0; pass < S::PASSES; pass++) {
            if (pass == S::PASSES - 1) wgmma_wait<0>();
            else wgmma_wait<1>();
            registers_ready(x[pass]);
            #pragma unroll
            for (int j = 0; j < 16; j++) {
                const int pair = pass * 16 + j, query = pair / (H / 2) * 4, head = pair % (H / 2) * 2;
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    float e = x[pass][4 * j + 2 * i], o = x[pass][4 * j + 2 * i + 1];
                    even[i] = fmaf(e + fabsf(e), w[2 * pair], head ? even[i] : 0);
                    odd[i] = fmaf(o + fabsf(o), w[2 * pair + 1], head ? odd[i] : 0);
                }
                if (head < H - 2) continue;
                float *row = out + query * c.ld;
                if (t0 + query < end && s < t0 + query) *(float2 *)row = make_float2(even[0] + odd[0], even[1] + odd[1]);
                if (t0 + query < end && s == t0 + query) *row = even[0] + odd[0];
            }
        }
    }
#endif
}

template <int H, int D> static void scores4_launch(const Scores &c) {
    typedef Tile<H, D> S;
    CUDA_CHECK(cudaFuncSetAttribute(scores_kernel4<H, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES));
    scores_kernel4<H, D><<<dim3(blocks_for(c.n, 2 * S::GROUP_QUERIES), blocks_for(c.first + c.n, PART)), THREADS, S::BYTES>>>(c);
}
template <int D> static void scores4(const Scores &c) {
    (c.H == 2 ? scores4_launch<2, D> : c.H == 4 ? scores4_launch<4, D> : c.H == 8 ? scores4_launch<8, D> : c.H == 16 ? scores4_launch<16, D> :
     c.H == 32 ? scores4_launch<32, D> : scores4_launch<64, D>)(c);
}

// Whether version 1, 3 or 4 has scores for H heads on this card.
static int has_scores(int version, int H) {
    if (version == 4) return has_wgmma() && H >= 2 && H <= 64 && (H & (H - 1)) == 0;
    return version == 1 || H == 1 || (H % 2 == 0 && H <= 64);
}
static void scores(int version, const Scores &c) {
    if (version == 1) scores_kernel1<<<dim3(blocks_for(c.first + c.n, THREADS), (unsigned)c.n), THREADS>>>(c);
    else if (version == 3) {
        auto kernel = BY_D(c.D, scores_kernel3);
        size_t bytes = bytes3(c.H, c.D);
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        kernel<<<dim3(blocks_for(c.n, groups3(c.H) * 4), blocks_for(c.first + c.n, PART)), THREADS, bytes>>>(c);
    } else BY_D(c.D, scores4)(c);
    CUDA_CHECK(cudaGetLastError());
}

// ---- inputs and outputs

// Inputs on the device; products come out with variance 1.
static Indexer indexer_new(uint64_t seed, int N, int C, int L, int H, int D, int rope) {
    Indexer c = {N, C, L, H, D, rope, (D + H + 3) / 4 * 4, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    std::vector<float> cos_sin((size_t)N * (size_t)rope);
    for (int j = 0; j < rope / 2; j++) {
        double turn = pow(THETA, -2.0 * j / rope);
        for (int64_t t = 0; t < N; t++) {
            cos_sin[(size_t)(t * rope + 2 * j)] = (float)cos((double)t * turn);
            cos_sin[(size_t)(t * rope + 2 * j + 1)] = (float)sin((double)t * turn);
        }
    }
    float *table = device_poison<float>((int64_t)N * rope);
    CUDA_CHECK(cudaMemcpy(table, cos_sin.data(), cos_sin.size() * sizeof(float), cudaMemcpyHostToDevice));
    c.cos_sin = table;
    c.x = device_normal<bf16>((int64_t)N * C, seed, 1, 1.0f);
    c.qr = device_normal<bf16>((int64_t)N * L, seed, 2, 1.0f);
    c.wq = device_normal<bf16>((int64_t)H * D * L, seed, 3, 1 / sqrtf((float)L));
    c.wkw = device_normal<bf16>((int64_t)(D + H) * C, seed, 4, 1 / sqrtf((float)C));
    c.norm = device_normal<float>(D, seed, 5, 1.0f);
    c.bias = device_normal<float>(D, seed, 6, 0.5f);
    return c;
}
static void indexer_free(const Indexer &c) {
    const void *all[] = {c.x, c.qr, c.wq, c.wkw, c.norm, c.bias, c.cos_sin};
    for (const void *p : all) CUDA_CHECK(cudaFree((void *)p));
}

enum { GUARD = 1024 }; // poisoned values before and behind an output
template <class X> static X *guarded(int64_t n) { return device_poison<X>(n + 2 * GUARD) + GUARD; }
// Frees; returns the number of guard bytes that were written.
template <class X> static int guarded_free(X *p, int64_t n) {
    int stray = 0;
    X *all = to_host(p - GUARD, n + 2 * GUARD);
    for (size_t i = 0; i < GUARD * sizeof(X); i++) stray += (((unsigned char *)all)[i] != 255) + (((unsigned char *)(all + GUARD + n))[i] != 255);
    free(all);
    CUDA_CHECK(cudaFree(p - GUARD));
    return stray;
}
static void outputs_new(Indexer *c) {
    c->y = guarded<float>((int64_t)c->N * c->pitch);
    c->q = guarded<bf16>((int64_t)c->N * c->H * c->D);
    c->key = guarded<bf16>((int64_t)c->N * c->D);
    c->w = guarded<float>((int64_t)c->N * c->H);
}
static int outputs_free(const Indexer &c) {
    return guarded_free(c.y, (int64_t)c.N * c.pitch) + guarded_free(c.q, (int64_t)c.N * c.H * c.D) + guarded_free(c.key, (int64_t)c.N * c.D) +
           guarded_free(c.w, (int64_t)c.N * c.H);
}

// ---- checks

// The largest |a - b| / (|b| + scale) over all elements; infinity for NaN.
static double max_error(const std::vector<double> &a, const std::vector<double> &b, double scale) {
    double worst = 0;
    for (size_t i = 0; i < a.size(); i++) {
        double e = fabs(a[i] - b[i]) / (fabs(b[i]) + scale);
        worst = std::max(worst, e == e ? e : INFINITY);
    }
    return worst;
}
// Outputs of a version against float64 [N, H, D], [N, D], [N, H].
static void check_project(const Indexer &c, int version, const std::vector<double> &q, const std::vector<double> &key, const std::vector<double> &w) {
    char name[128];
    // Rounding of the result, at most 2^-8 of it; version 2 rounds queries before the rotation too, where a pair of several units may turn into 0.
    double e_q = max_error(widened(c.q, (int64_t)q.size()), q, 1) / (version == 1 ? 4e-3 : 2e-2), e_key = max_error(widened(c.key, (int64_t)key.size()), key, 1) / 4e-3;
    double e_w = max_error(widened(c.w, (int64_t)w.size()), w, (double)weight_scale(c)) / 2e-5;
    snprintf(name, sizeof name, "%d projection N=%d C=%d L=%d H=%d D=%d rope=%d", version, c.N, c.C, c.L, c.H, c.D, c.rope);
    if (!check(e_q < 1 && e_key < 1 && e_w < 1, name, std::max(e_q, std::max(e_key, e_w)))) printf("     error over limit: q %.3g key %.3g w %.3g\n", e_q, e_key, e_w);
}

// All score versions on rows first..first+n-1, against float64 on the same q, key, w (those of version 2) and against float64 from x on.
static void check_scores(const Indexer &c, int first, int n, const std::vector<double> &q, const std::vector<double> &key, const std::vector<double> &w) {
    int64_t ld = (c.N + 3) / 4 * 4 + 8;
    std::vector<double> want, size, chain, chain_size;
    char name[128];
    scores_cpu(widened(c.q, (int64_t)q.size()), widened(c.key, (int64_t)key.size()), widened(c.w, (int64_t)w.size()), c.N, c.H, c.D, first, n, want, size);
    scores_cpu(q, key, w, c.N, c.H, c.D, first, n, chain, chain_size);
    for (int version : {1, 3, 4}) {
        if (!has_scores(version, c.H)) continue;
        float *table = guarded<float>(n * ld);
        Scores s = {c.N, c.H, c.D, first, n, c.q, c.key, c.w, table, ld};
        scores(version, s);
        CUDA_CHECK(cudaDeviceSynchronize());
        float *got = to_host(table, n * ld);
        int64_t touched = 0;
        double e = 0, e_chain = 0;
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < ld; k++) {
                float v = got[i * ld + k];
                size_t at = (size_t)(i * c.N + k);
                uint32_t bits;
                memcpy(&bits, &v, 4);
                if (k > first + i) touched += bits != 0xffffffffu;
                else {
                    double a = fabs((double)v - want[at]) / (size[at] + 1e-30), b = fabs((double)v - chain[at]) / (chain_size[at] + 1e-30);
                    e = std::max(e, a == a ? a : INFINITY);
                    e_chain = std::max(e_chain, b == b ? b : INFINITY);
                }
            }
        int stray = guarded_free(table, n * ld);
        snprintf(name, sizeof name, "%d scores N=%d H=%d D=%d rows %d..%d", version, c.N, c.H, c.D, first, first + n - 1);
        if (!check(e < 2e-5 && e_chain < 6e-3 && !touched && !stray, name, e))
            printf("     error %.3g (limit 2e-5), from x on %.3g (limit 6e-3), %lld invisible entries and %d guard bytes written\n", e, e_chain, (long long)touched, stray);
        free(got);
    }
}
// Versions 1 and 2 of the projection, then the scores of all versions on what 2 left.
static void check_case(uint64_t seed, int N, int C, int L, int H, int D, int rope) {
    Indexer c = indexer_new(seed, N, C, L, H, D, rope);
    std::vector<double> q, key, w;
    project_cpu(c, q, key, w);
    for (int version = 1; version <= 2; version++) {
        outputs_new(&c);
        if (version == 1) {
            float *yq = device_poison<float>((int64_t)N * H * D);
            project1(c, yq);
            CUDA_CHECK(cudaDeviceSynchronize());
            CUDA_CHECK(cudaFree(yq));
        } else {
            Products p = products_new(c);
            project2(c, p);
            CUDA_CHECK(cudaDeviceSynchronize());
            products_free(p);
        }
        check_project(c, version, q, key, w);
        if (version == 2) {
            if (N < 1000) check_scores(c, 0, N, q, key, w);
            int n = std::min(N - N / 3, N < 1000 ? (N + 1) / 2 : 70); // rows in the middle, or few rows that see several parts of the keys
            check_scores(c, N < 1000 ? N / 3 : N - n, n, q, key, w);
        }
        int stray = outputs_free(c);
        if (stray) check(0, "guard bytes of an output written", stray);
    }
    indexer_free(c);
}

// ---- timing

// Bytes a second of a copy on the device, read and write counted.
static double copy_rate(void) {
    size_t bytes = (size_t)1 << 30;
    char *a = device_poison<char>((int64_t)bytes), *b = device_poison<char>((int64_t)bytes);
    Timing t = time_kernel(10, [&] { CUDA_CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice)); });
    CUDA_CHECK(cudaFree(a));
    CUDA_CHECK(cudaFree(b));
    return 2.0 * (double)bytes / t.median * 1e3;
}
// bf16 product of [n, n] matrices, FLOP/s.
static double gemm_rate(uint64_t seed, int n) {
    bf16 *x = device_normal<bf16>((int64_t)n * n, seed, 1, 1.0f), *w = device_normal<bf16>((int64_t)n * n, seed, 2, 1.0f), *y = device_poison<bf16>((int64_t)n * n);
    Product p = product_new(CUDA_R_16BF, n, n, n, n);
    Timing t = time_kernel(10, [&] { product_run(p, y, x, w); });
    product_free(p);
    for (bf16 *one : {x, w, y}) CUDA_CHECK(cudaFree(one));
    return 2.0 * n * n * n / t.median * 1e3;
}

// flops, bytes 0: not said. rate: of the 8192^3 product; copy: of copying.
static void print_time(const char *what, Timing t, double flops, double rate, double bytes, double copy) {
    printf("  %-30s %9.3f ms (%.3f..%.3f)", what, t.median, t.lo, t.hi);
    if (flops > 0) printf(" %7.1f TFLOP/s, %5.1f%% of the 8192^3 product", flops / t.median * 1e-9, 100 * flops / t.median * 1e3 / rate);
    if (bytes > 0) printf(" %6.0f GB/s, %5.1f%% of copying", bytes / t.median * 1e-6, 100 * bytes / t.median * 1e3 / copy);
    printf("\n");
    fflush(stdout);
}

// Repetitions rotate the same queries again and again: a rotation keeps their size.
static void time_project(uint64_t seed, double rate, double copy, int N, int C, int L, int H, int D, int rope) {
    Indexer c = indexer_new(seed, N, C, L, H, D, rope);
    outputs_new(&c);
    printf("projection N=%d C=%d L=%d H=%d D=%d rope=%d\n", N, C, L, H, D, rope);
    double out_x = D + H, out_q = (double)H * D, flops_x = 2.0 * N * C * out_x, flops_q = 2.0 * N * L * out_q;
    if (N <= 16384) {
        float *yq = device_poison<float>((int64_t)N * H * D);
        print_time("1 plain", time_kernel(3, [&] { project1(c, yq); }), flops_x + flops_q, rate, 0, copy);
        CUDA_CHECK(cudaFree(yq));
    }
    Products p = products_new(c);
    print_time("2 all", time_kernel(20, [&] { project2(c, p); }), flops_x + flops_q, rate, 0, copy);
    print_time("  product of x, keys | weights", time_kernel(20, [&] { product_run(p.x, c.y, c.x, c.wkw); }), flops_x, rate, N * (2.0 * C + 4 * out_x) + 2 * C * out_x, copy);
    print_time("  product of q_r", time_kernel(20, [&] { product_run(p.qr, c.q, c.qr, c.wq); }), flops_q, rate, N * (2.0 * L + 2 * out_q) + 2 * L * out_q, copy);
    print_time(N <= 16384 ? "  norm, rotations (partly L2)" : "  norm, rotations", time_kernel(20, [&] { finish2(c); }), 0, rate, finish2_bytes(c), copy);
    products_free(p);
    int stray = outputs_free(c);
    if (stray) check(0, "guard bytes of an output written", stray);
    indexer_free(c);
}

// The last n rows of N. FLOP: of visible pairs.
static void time_scores(uint64_t seed, double rate, double copy, int N, int n, int H, int D) {
    bf16 *q = device_normal<bf16>((int64_t)N * H * D, seed, 1, 1.0f), *key = device_normal<bf16>((int64_t)N * D, seed, 2, 1.0f);
    float *w = device_normal<float>((int64_t)N * H, seed, 3, 1 / sqrtf((float)(H * D))), *table = device_poison<float>((int64_t)n * N);
    Scores c = {N, H, D, N - n, n, q, key, w, table, N};
    double pairs = (double)n * (N - n) + 0.5 * n * (n + 1.0), flops = 2 * pairs * H * D;
    printf("scores of %d rows, N=%d H=%d D=%d: %.1f GFLOP (%.3f ms at the rate of the 8192^3 product), table of this chunk %.0f MiB, of all rows %.1f GiB\n", n, N, H, D,
           flops * 1e-9, flops / rate * 1e3, pairs * 4 / 1048576, 2.0 * N * (N + 1.0) / 1073741824);
    for (int version : {1, 3, 4}) {
        const char *what[] = {"", "1 plain", "", "3 mma.sync", "4 wgmma"};
        if (!has_scores(version, H)) printf("  %s: not on this card\n", what[version]);
        else print_time(what[version], time_kernel(version == 1 ? 1 : 10, [&] { scores(version, c); }), flops, rate, 4 * pairs, copy);
    }
    const void *all[] = {q, key, w, table};
    for (const void *p : all) CUDA_CHECK(cudaFree((void *)p));
}

int main(int argc, char **argv) {
    uint64_t seed = seed_of(argc, argv);
    int small = argc > 2 && !strcmp(argv[2], "small");
    printf("wgmma path: %s\n", has_wgmma() ? "yes (sm_90a)" : "no, version 4 is left out");
    lt_check(cublasLtCreate(&lt), "create");
    CUDA_CHECK(cudaMalloc(&lt_workspace, LT_WORKSPACE));
    // N, C, L, H, D, rope: rows below, at and above a warp's, a tile's and a part of the keys; every H with several D
    static const int cases[][6] = {
        {1, 64, 32, 1, 32, 16},    {1, 96, 40, 8, 64, 32},     {63, 64, 48, 1, 64, 64},    {65, 104, 64, 2, 32, 32},  {127, 72, 32, 2, 64, 48},  {130, 96, 40, 2, 128, 64},
        {257, 64, 32, 4, 32, 16},  {130, 200, 72, 4, 64, 32},  {63, 64, 48, 4, 128, 16},   {127, 96, 64, 8, 32, 32},  {257, 128, 96, 8, 64, 32}, {130, 72, 40, 8, 128, 48},
        {65, 64, 48, 16, 32, 16},  {127, 96, 32, 16, 64, 64},  {257, 200, 72, 16, 128, 64}, {63, 72, 40, 32, 32, 32}, {130, 64, 32, 32, 64, 16}, {65, 96, 48, 32, 128, 64},
        {130, 64, 32, 64, 32, 32}, {127, 72, 40, 64, 64, 48},  {257, 64, 32, 64, 128, 64}, {65, 64, 32, 64, 128, 16}, {257, 96, 40, 1, 128, 32}, {63, 64, 48, 6, 64, 32},
        {8300, 64, 32, 8, 64, 32}, {4097, 64, 32, 16, 128, 64}, {4200, 64, 32, 64, 32, 16}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int *x = cases[i];
        check_case(seed + i, x[0], x[1], x[2], x[3], x[4], x[5]);
    }
    if (!small) {
        double rate = gemm_rate(seed, 8192), copy = copy_rate();
        printf("bf16 product of 8192^3 by cuBLASLt: %.1f TFLOP/s; copying on the device: %.0f GB/s\n", rate * 1e-12, copy * 1e-9);
        for (int N : {16384, 131072}) {
            time_project(seed, rate, copy, N, 768, 384, 8, 64, 32);
            time_project(seed, rate, copy, N, 2048, 1536, 16, 128, 64);
        }
        time_scores(seed, rate, copy, 131072, 2048, 8, 64);
        time_scores(seed, rate, copy, 131072, 2048, 16, 128);
    }
    CUDA_CHECK(cudaFree(lt_workspace));
    lt_check(cublasLtDestroy(lt), "destroy");
    return check_summary();
}
