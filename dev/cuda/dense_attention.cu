// Causal dense attention of MLA layers in the per-head form, forward and backward, without a [T, T] table in memory.
//
// N = B*T rows; row i is position t = i % T of sequence i / T and attends to the positions doc[i] .. t of its sequence: its own document so far.
//   q   [N, H, nope|rope]  queries, the rope part rotated              kr [N, rope], rows kr_ld apart: the rotated key that all heads share
//   kv  [N, H, nope|v]     a head's key without position, and its value
//   logit[h,s] = scale (q_nope[h] . kv_nope[s,h] + q_rope[h] . kr[s])  P = softmax over s = doc[i] .. t      lse = log of the denominator, natural
//   att[h]     = sum_s P[h,s] kv_v[s,h]
// Backward:
//   delta[h]   = d_att[h] . att[h]         dP[h,s] = d_att[h] . kv_v[s,h]            dS = scale P (dP - delta)
//   d_q[h]     = sum_s dS[h,s] key(s,h)    d_kv_v[s,h] = sum_t P[h,s] d_att[t,h]     d_kv_nope[s,h] = sum_t dS[h,s] q_nope[t,h]
//   d_kr[s]    = sum_h sum_t dS[h,s] q_rope[t,h]
// doc does not decrease within a sequence and doc[i] <= t, so every row sees at least itself. scale > 0.
//
// kernel 1  plain: a warp a query (forward, d_q) or a key (d_kv), any sizes up to 384 channels, float or bf16
// kernel 2  tensor cores (sm_80 and later), a CTA a tile of queries or keys of one head; (nope, rope, v) = (64,32,64), (64,64,64), (32,16,32), (128,64,128)
// kernel 3  wgmma (sm_90a), (64,32,64) and (64,64,64)
// No sum is left to chance: every output has one owner, and d_kr is summed from the heads' shares in order.
//
// Run: dense_attention [seed [small]]; small: checks only.
#include "common.h"

typedef struct {
    int T, H, nope, rope, v; // T tokens a sequence
    int kr_ld;               // kernel 2: a multiple of 8, and kr aligned to 16 bytes
    const int32_t *doc;      // [N] first position of the row's document
    float scale;
} DenseAttention;

#define LOG2E 1.4426950408889634f

// ---- CPU reference, float64

// Operands widened to float. att [N, H, v] and lse [N, H] are written.
static void dense_attention_forward_cpu(DenseAttention c, const float *q, const float *kv, const float *kr, double *att, double *lse, int N) {
    double *p = (double *)malloc(sizeof(double) * (size_t)c.T);
    for (int i = 0; i < N; i++)
        for (int h = 0; h < c.H; h++) {
            int64_t ih = (int64_t)i * c.H + h, base = i - i % c.T;
            double top = -INFINITY, sum = 0, *o = att + ih * c.v;
            for (int s = c.doc[i]; s <= i % c.T; s++) {
                const float *k = kv + ((base + s) * c.H + h) * (c.nope + c.v), *r = kr + (base + s) * c.kr_ld, *x = q + ih * (c.nope + c.rope);
                double v = 0;
                for (int d = 0; d < c.nope; d++) v += (double)x[d] * (double)k[d];
                for (int d = 0; d < c.rope; d++) v += (double)x[c.nope + d] * (double)r[d];
                top = fmax(top, p[s] = v * (double)c.scale);
            }
            for (int s = c.doc[i]; s <= i % c.T; s++) sum += p[s] = exp(p[s] - top);
            lse[ih] = top + log(sum);
            for (int d = 0; d < c.v; d++) o[d] = 0;
            for (int s = c.doc[i]; s <= i % c.T; s++)
                for (int d = 0; d < c.v; d++) o[d] += p[s] / sum * (double)kv[((base + s) * c.H + h) * (c.nope + c.v) + c.nope + d];
        }
    free(p);
}

// The forward's att and lse; d_q, d_kv, d_kr [N, rope] are written.
static void dense_attention_backward_cpu(DenseAttention c, const float *q, const float *kv, const float *kr, const double *att, const double *lse, const float *d_att,
                                         double *d_q, double *d_kv, double *d_kr, int N) {
    int D = c.nope + c.rope, E = c.nope + c.v;
    memset(d_q, 0, sizeof(double) * (size_t)N * (size_t)(c.H * D));
    memset(d_kv, 0, sizeof(double) * (size_t)N * (size_t)(c.H * E));
    memset(d_kr, 0, sizeof(double) * (size_t)N * (size_t)c.rope);
    for (int i = 0; i < N; i++)
        for (int h = 0; h < c.H; h++) {
            int64_t ih = (int64_t)i * c.H + h, base = i - i % c.T;
            const float *x = q + ih * D, *g = d_att + ih * c.v;
            double delta = 0;
            for (int d = 0; d < c.v; d++) delta += (double)g[d] * att[ih * c.v + d];
            for (int s = c.doc[i]; s <= i % c.T; s++) {
                int64_t k = ((base + s) * c.H + h) * E, r = (base + s) * c.kr_ld;
                double v = 0, dp = 0;
                for (int d = 0; d < c.nope; d++) v += (double)x[d] * (double)kv[k + d];
                for (int d = 0; d < c.rope; d++) v += (double)x[c.nope + d] * (double)kr[r + d];
                for (int d = 0; d < c.v; d++) dp += (double)g[d] * (double)kv[k + c.nope + d];
                double p = exp(v * (double)c.scale - lse[ih]), ds = p * (dp - delta) * (double)c.scale;
                for (int d = 0; d < c.nope; d++) {
                    d_q[ih * D + d] += ds * (double)kv[k + d];
                    d_kv[k + d] += ds * (double)x[d];
                }
                for (int d = 0; d < c.rope; d++) {
                    d_q[ih * D + c.nope + d] += ds * (double)kr[r + d];
                    d_kr[(base + s) * c.rope + d] += ds * (double)x[c.nope + d];
                }
                for (int d = 0; d < c.v; d++) d_kv[k + c.nope + d] += p * (double)g[d];
            }
        }
}

// ---- what both kernels' backward needs around its core

// stat [B*H, T] = (lse log2(e), delta) of every row and head, a head's rows side by side as its tiles read them. 8 threads a row, 16 bytes of bf16 each.
template <class X> __global__ static void row_stat_kernel(DenseAttention c, const X *att, const X *d_att, const float *lse, float2 *stat, int N) {
    int64_t row = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 8, rows = (int64_t)N * c.H;
    int take = row < rows;
    float sum = 0;
    const X *a = att + row * c.v, *b = d_att + row * c.v;
    if (take && sizeof(X) == 2 && c.v % 8 == 0) {
        for (int d = (int)threadIdx.x % 8 * 8; d < c.v; d += 64) {
            uint4 x = *(const uint4 *)(a + d), y = *(const uint4 *)(b + d);
            uint32_t u[4] = {x.x, x.y, x.z, x.w}, w[4] = {y.x, y.y, y.z, y.w};
            #pragma unroll
            for (int j = 0; j < 4; j++)
                sum += __uint_as_float(u[j] << 16) * __uint_as_float(w[j] << 16) + __uint_as_float(u[j] & 0xffff0000u) * __uint_as_float(w[j] & 0xffff0000u);
        }
    } else if (take) {
        for (int d = threadIdx.x % 8; d < c.v; d += 8) sum += (float)a[d] * (float)b[d];
    }
    for (int o = 4; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (!take || threadIdx.x % 8) return;
    int64_t i = row / c.H, h = row % c.H;
    stat[(i / c.T * c.H + h) * c.T + i % c.T] = make_float2(lse[row] * LOG2E, sum);
}

// d_kr [N, rope] = the sum over the heads of their shares [N, H, rope], in order.
template <class X> __global__ static void key_rope_sum_kernel(DenseAttention c, const X *share, float *d_kr, int N) {
    int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (x >= (int64_t)N * c.rope) return;
    const X *from = share + x / c.rope * c.H * c.rope + x % c.rope;
    float sum = 0;
    #pragma unroll 4
    for (int h = 0; h < c.H; h++) sum += (float)from[(int64_t)h * c.rope];
    d_kr[x] = sum;
}

// ---- kernel 1: the plain version
// What makes the table unnecessary is the online softmax: keys come one by one, a running maximum and a running sum go along, and when the maximum
// rises, all that was summed before shrinks by the same factor. A warp has one query and a lane every 32nd channel. Backward knows lse already, so
// P comes back from one exp; d_q belongs to the query's warp, d_kv and the head's share of d_kr to the key's, which walks the queries that see it.

enum { PLAIN_THREADS = 256, PLAIN_LANE = 12, PLAIN_MAX = 32 * PLAIN_LANE }; // a lane's channels, and so the largest nope+rope and v

// The lane's channels of x[0..n0) followed by y[0..n1), zeros behind.
template <class X> __device__ static inline void lane_channels(float r[PLAIN_LANE], const X *x, int n0, const X *y, int n1) {
    #pragma unroll
    for (int j = 0; j < PLAIN_LANE; j++) {
        int d = j * 32 + (int)threadIdx.x % 32;
        r[j] = d < n0 ? (float)x[d] : d < n0 + n1 ? (float)y[d - n0] : 0.0f;
    }
}
__device__ static inline float lane_dot(const float a[PLAIN_LANE], const float b[PLAIN_LANE]) {
    float v = 0;
    #pragma unroll
    for (int j = 0; j < PLAIN_LANE; j++) v += a[j] * b[j];
    return warp_sum(v);
}
// The lane's channels of key and value at row s.
template <class X> __device__ static inline void plain_key(float k[PLAIN_LANE], float v[PLAIN_LANE], DenseAttention c, const X *kv, const X *kr, int64_t s, int64_t h) {
    const X *row = kv + (s * c.H + h) * (c.nope + c.v);
    lane_channels(k, row, c.nope, kr + s * c.kr_ld, c.rope);
    lane_channels(v, row + c.nope, c.v, row, 0);
}

template <class X> __global__ static void attention_forward_kernel1(DenseAttention c, const X *q, const X *kv, const X *kr, X *att, float *lse, int N) {
    int64_t ih = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32, i = ih / c.H, h = ih % c.H, base = i / c.T * c.T;
    if (i >= N) return;
    int D = c.nope + c.rope;
    float x[PLAIN_LANE], k[PLAIN_LANE], v[PLAIN_LANE], o[PLAIN_LANE] = {0}, top = -INFINITY, sum = 0;
    lane_channels(x, q + ih * D, D, q, 0);
    for (int64_t s = base + c.doc[i]; s <= i; s++) {
        plain_key(k, v, c, kv, kr, s, h);
        float logit = lane_dot(x, k) * c.scale, rise = fmaxf(top, logit), keep = expf(top - rise), p = expf(logit - rise);
        top = rise;
        sum = sum * keep + p;
        #pragma unroll
        for (int j = 0; j < PLAIN_LANE; j++) o[j] = o[j] * keep + p * v[j];
    }
    #pragma unroll
    for (int j = 0; j < PLAIN_LANE; j++) {
        int d = j * 32 + (int)threadIdx.x % 32;
        if (d < c.v) att[ih * c.v + d] = (X)(o[j] / sum);
    }
    if (threadIdx.x % 32 == 0) lse[ih] = top + logf(sum);
}

template <class X> __global__ static void attention_backward_q_kernel1(DenseAttention c, const X *q, const X *kv, const X *kr, const X *d_att, const float2 *stat, X *d_q, int N) {
    int64_t ih = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32, i = ih / c.H, h = ih % c.H, base = i / c.T * c.T;
    if (i >= N) return;
    int D = c.nope + c.rope;
    float x[PLAIN_LANE], g[PLAIN_LANE], k[PLAIN_LANE], v[PLAIN_LANE], dq[PLAIN_LANE] = {0};
    float2 z = stat[(i / c.T * c.H + h) * c.T + i % c.T];
    lane_channels(x, q + ih * D, D, q, 0);
    lane_channels(g, d_att + ih * c.v, c.v, d_att, 0);
    for (int64_t s = base + c.doc[i]; s <= i; s++) {
        plain_key(k, v, c, kv, kr, s, h);
        float p = exp2f(lane_dot(x, k) * (c.scale * LOG2E) - z.x), ds = p * (lane_dot(g, v) - z.y) * c.scale;
        #pragma unroll
        for (int j = 0; j < PLAIN_LANE; j++) dq[j] += ds * k[j];
    }
    #pragma unroll
    for (int j = 0; j < PLAIN_LANE; j++) {
        int d = j * 32 + (int)threadIdx.x % 32;
        if (d < D) d_q[ih * D + d] = (X)dq[j];
    }
}

// share [N, H, rope]: what each head gives to d_kr.
template <class X> __global__ static void attention_backward_kv_kernel1(DenseAttention c, const X *q, const X *kv, const X *kr, const X *d_att, const float2 *stat,
                                                                        X *d_kv, X *share, int N) {
    int64_t ih = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32, i = ih / c.H, h = ih % c.H, end = (i / c.T + 1) * c.T;
    if (i >= N) return;
    int D = c.nope + c.rope;
    float x[PLAIN_LANE], g[PLAIN_LANE], k[PLAIN_LANE], v[PLAIN_LANE], dk[PLAIN_LANE] = {0}, dv[PLAIN_LANE] = {0};
    plain_key(k, v, c, kv, kr, i, h);
    for (int64_t t = i; t < end && c.doc[t] <= i % c.T; t++) {
        float2 z = stat[(t / c.T * c.H + h) * c.T + t % c.T];
        lane_channels(x, q + (t * c.H + h) * D, D, q, 0);
        lane_channels(g, d_att + (t * c.H + h) * c.v, c.v, d_att, 0);
        float p = exp2f(lane_dot(x, k) * (c.scale * LOG2E) - z.x), ds = p * (lane_dot(g, v) - z.y) * c.scale;
        #pragma unroll
        for (int j = 0; j < PLAIN_LANE; j++) {
            dk[j] += ds * x[j];
            dv[j] += p * g[j];
        }
    }
    #pragma unroll
    for (int j = 0; j < PLAIN_LANE; j++) {
        int d = j * 32 + (int)threadIdx.x % 32;
        if (d < c.nope) d_kv[ih * (c.nope + c.v) + d] = (X)dk[j];
        else if (d < D) share[ih * c.rope + d - c.nope] = (X)dk[j];
        if (d < c.v) d_kv[ih * (c.nope + c.v) + c.nope + d] = (X)dv[j];
    }
}

template <class X> static void dense_attention_forward_plain(DenseAttention c, const X *q, const X *kv, const X *kr, X *att, float *lse, int N) {
    attention_forward_kernel1<X><<<blocks_for((int64_t)N * c.H * 32, PLAIN_THREADS), PLAIN_THREADS>>>(c, q, kv, kr, att, lse, N);
    CUDA_CHECK(cudaGetLastError());
}
template <class X> static void dense_attention_backward_plain(DenseAttention c, const X *q, const X *kv, const X *kr, const X *att, const float *lse, const X *d_att,
                                                              X *d_q, X *d_kv, float *d_kr, float2 *stat, X *share, int N) {
    unsigned warps = blocks_for((int64_t)N * c.H * 32, PLAIN_THREADS);
    row_stat_kernel<X><<<blocks_for((int64_t)N * c.H * 8, 256), 256>>>(c, att, d_att, lse, stat, N);
    attention_backward_q_kernel1<X><<<warps, PLAIN_THREADS>>>(c, q, kv, kr, d_att, stat, d_q, N);
    attention_backward_kv_kernel1<X><<<warps, PLAIN_THREADS>>>(c, q, kv, kr, d_att, stat, d_kv, share, N);
    key_rope_sum_kernel<X><<<blocks_for((int64_t)N * c.rope, 256), 256>>>(c, share, d_kr, N);
    CUDA_CHECK(cudaGetLastError());
}

// ---- kernel 2: tensor cores
// A CTA owns a tile of queries (or keys) of one head and streams the other side through shared memory, 64 rows at a time, the next tile being copied
// while this one is multiplied. A warp owns whole rows of the products, so that softmax needs no other warp, and what one product leaves in the
// registers of a lane (rows l/4 and l/4+8, columns 2(l%4) and +1) is where the next one wants its left operand: P and dS never touch memory.
//
// A row of a tile in shared memory is [key | value] or [query | d_att], one chunk of 16 bytes longer than that: an odd number of chunks, so the eight
// rows that ldmatrix reads at once lie in eight different bank groups, and each address is a lane's base plus a constant.
//
// MT is the number of 16-row blocks a warp owns. The right operand is read from shared memory for each warp, once for all of its blocks: two halve the
// reads, which for one are slower than the tensor cores, but cost twice the registers.
//
// Tiles outside the documents of their rows, and above the diagonal, are skipped; only the tiles at those borders look at the mask. The longest
// rows of work are launched first, so that the last CTAs to start are short.

enum { TILE = 64, QUERIES = 128 }; // rows streamed at a time; queries a CTA of the forward and the d_q kernel owns

__device__ static inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 4 or 8 bytes from global to shared memory; zeros when not take.
template <int BYTES> __device__ static inline void cp_async_small(uint32_t to, const void *from, bool take) {
    int n = take ? BYTES : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(n) : "memory");
}
// CHUNKS*8 channels of ROWS rows, ld apart in memory and PITCH in shared memory; rows n and later become zeros.
template <int CHUNKS, int ROWS, int PITCH, int THREADS> __device__ static inline void load_part(uint32_t to, const bf16 *from, int ld, int n) {
    static_assert(THREADS % CHUNKS == 0 && ROWS * CHUNKS % THREADS == 0, "every thread copies the same chunk of as many rows");
    int row = (int)threadIdx.x / CHUNKS, x = (int)threadIdx.x % CHUNKS * 8;
    to += (uint32_t)(row * PITCH + x) * 2;
    from += x;
    #pragma unroll
    for (int p = 0; p < ROWS * CHUNKS / THREADS; p++) {
        int r = row + p * (THREADS / CHUNKS);
        cp_async_16(to + (uint32_t)(p * (THREADS / CHUNKS) * PITCH) * 2, from + (int64_t)min(r, n - 1) * ld, r < n);
    }
}
// Keys and values of n rows of one head as rows [nope | rope | v]. kv, kr: at the first row.
template <int NOPE, int ROPE, int V, int ROWS, int PITCH, int THREADS>
__device__ static inline void load_keys(uint32_t to, const bf16 *kv, const bf16 *kr, DenseAttention c, int n) {
    load_part<NOPE / 8, ROWS, PITCH, THREADS>(to, kv, c.H * (NOPE + V), n);
    load_part<ROPE / 8, ROWS, PITCH, THREADS>(to + NOPE * 2, kr, c.kr_ld, n);
    load_part<V / 8, ROWS, PITCH, THREADS>(to + (NOPE + ROPE) * 2, kv + NOPE, c.H * (NOPE + V), n);
}
template <int NOPE, int ROPE, int ROWS, int PITCH, int THREADS> __device__ static inline void load_queries(uint32_t to, const bf16 *q, DenseAttention c, int n) {
    load_part<NOPE / 8, ROWS, PITCH, THREADS>(to, q, c.H * (NOPE + ROPE), n);
    load_part<ROPE / 8, ROWS, PITCH, THREADS>(to + NOPE * 2, q + NOPE, c.H * (NOPE + ROPE), n);
}
// Where this lane reads a 16x16 block of a matrix by ldmatrix. As left operand (rows by channels), and transposed as right operand (summed over rows):
// rows lane%16, the upper lanes 8 channels on. As right operand summed over channels: the second eight lanes 8 channels on, the upper lanes 8 rows on.
template <int PITCH> __device__ static inline uint32_t lane_by_rows(uint32_t matrix) { return matrix + (threadIdx.x % 16 * PITCH + threadIdx.x % 32 / 16 * 8) * 2; }
template <int PITCH> __device__ static inline uint32_t lane_by_channels(uint32_t matrix) {
    return matrix + ((threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8) * PITCH + threadIdx.x % 16 / 8 * 8) * 2;
}
// out[m][n] += a[m] b over STEPS*16 channels, for N16 blocks of 16 rows of b; b: this lane's address (by channels) of the first row and channel.
template <int MT, int STEPS, int N16, int PITCH> __device__ static inline void product_by_channels(float out[MT][2 * N16][4], const uint32_t a[MT][STEPS][4], uint32_t b) {
    #pragma unroll
    for (int k = 0; k < STEPS; k++)
        #pragma unroll
        for (int n = 0; n < N16; n++) {
            uint32_t r[4];
            ldmatrix_x4(r, b + (uint32_t)(n * 16 * PITCH + k * 16) * 2);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_16816(out[m][2 * n], a[m][k], r);
                mma_16816(out[m][2 * n + 1], a[m][k], r + 2);
            }
        }
}
// The same with the left operand's fragments in registers for the first KEPT steps, x[k][m]; the others are read again, at: this lane's address (by rows).
template <int MT, int STEPS, int KEPT, int N16, int LEFT_PITCH, int PITCH>
__device__ static inline void product_part_kept(float out[MT][2 * N16][4], const uint32_t x[][MT][4], uint32_t at, uint32_t b) {
    #pragma unroll
    for (int k = 0; k < STEPS; k++) {
        uint32_t a[MT][1][4];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            if (k >= KEPT) ldmatrix_x4(a[m][0], at + (uint32_t)(m * 16 * LEFT_PITCH + k * 16) * 2);
            else memcpy(a[m][0], x[k][m], 16);
        }
        product_by_channels<MT, 1, N16, PITCH>(out, a, b + (uint32_t)k * 32);
    }
}
// out[m][n] += a[m] b over the 16 rows of b, for N16 blocks of 16 channels; b: this lane's address (by rows) of the first row and channel.
template <int MT, int N16> __device__ static inline void product_by_rows(float out[MT][2 * N16][4], const uint32_t a[MT][4], uint32_t b) {
    #pragma unroll
    for (int n = 0; n < N16; n++) {
        uint32_t r[4];
        ldmatrix_x4_trans(r, b + (uint32_t)n * 32);
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            mma_16816(out[m][2 * n], a[m], r);
            mma_16816(out[m][2 * n + 1], a[m], r + 2);
        }
    }
}
// Two neighbouring 8-column blocks of a product as the left operand of the next.
__device__ static inline void as_left(uint32_t a[4], const float lo[4], const float hi[4]) {
    a[0] = pack_bf16(lo[0], lo[1]);
    a[1] = pack_bf16(lo[2], lo[3]);
    a[2] = pack_bf16(hi[0], hi[1]);
    a[3] = pack_bf16(hi[2], hi[3]);
}
// scale times the channels n*8+2(l%4) and +1 of one row, from element e (0: row l/4, 2: row l/4+8) of each block; to: the row's first channel.
template <int N8> __device__ static inline void store_row(bf16 *to, const float (*x)[4], int e, float scale) {
    #pragma unroll
    for (int n = 0; n < N8; n++) *(uint32_t *)(to + n * 8 + threadIdx.x % 4 * 2) = pack_bf16(x[n][e] * scale, x[n][e + 1] * scale);
}

// The rows of a warp within its sequence: first .. last (last < first: none), and where the documents of these two begin.
typedef struct { int first, last, doc_first, doc_last; } WarpRows;
__device__ static inline WarpRows warp_rows(DenseAttention c, int64_t base, int first, int n) {
    WarpRows w = {first, first < c.T ? min(first + n, c.T) - 1 : -1, 0, 0};
    if (first >= c.T) return w;
    w.doc_first = c.doc[base + first];
    w.doc_last = c.doc[base + w.last];
    return w;
}

// -INFINITY where the row of a logit does not see its key; first: the warp's first row, k0: the first key.
template <int MT, int N8> __device__ static inline void mask_logits(float s[MT][N8][4], DenseAttention c, int64_t base, int first, int k0) {
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            int t = first + m * 16 + e * 8 + (int)threadIdx.x % 32 / 4, doc = c.doc[base + min(t, c.T - 1)];
            #pragma unroll
            for (int n = 0; n < N8; n++)
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    int key = k0 + n * 8 + (int)threadIdx.x % 4 * 2 + j;
                    if (key > t || key < doc) s[m][n][2 * e + j] = -INFINITY;
                }
        }
}

// One row of logits s (element e and e+1 of each block) to exp(logit - top); the row's output so far shrinks with its sum when top rises.
template <int N8, int V8> __device__ static inline void online_softmax(float s[N8][4], float o[V8][4], float *top, float *sum, int e, float scale) {
    float rise = *top, part = 0;
    #pragma unroll
    for (int n = 0; n < N8; n++) rise = fmaxf(rise, fmaxf(s[n][e], s[n][e + 1]));
    rise = fmaxf(rise, __shfl_xor_sync(0xffffffffu, rise, 1));
    rise = fmaxf(rise, __shfl_xor_sync(0xffffffffu, rise, 2));
    float from = rise == -INFINITY ? 0 : rise * scale, keep = exp2_fast(*top * scale - from); // a row that has seen no key keeps zeros
    #pragma unroll
    for (int n = 0; n < N8; n++) {
        s[n][e] = exp2_fast(s[n][e] * scale - from);
        s[n][e + 1] = exp2_fast(s[n][e + 1] * scale - from);
        part += s[n][e] + s[n][e + 1];
    }
    *top = rise;
    *sum = *sum * keep + part; // of this lane's columns; the four lanes of a row add up at the end
    #pragma unroll
    for (int n = 0; n < V8; n++) {
        o[n][e] *= keep;
        o[n][e + 1] *= keep;
    }
}
// Query t of the sequence at base: att and lse.
template <int V8> __device__ static inline void store_query(DenseAttention c, const float (&o)[V8][4], float top, float sum, int e, int t, int64_t base, int h,
                                                            bf16 *att, float *lse) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (t >= c.T) return;
    int64_t ih = (base + t) * c.H + h;
    store_row<V8>(att + ih * V8 * 8, o, e, 1 / sum);
    if (threadIdx.x % 4 == 0) lse[ih] = top * c.scale + logf(sum);
}

template <int NOPE, int ROPE, int V> static constexpr int forward_bytes(void) { return QUERIES * (NOPE + ROPE + 8) * 2 + 2 * TILE * (NOPE + ROPE + V + 8) * 2; }

// Grid: B*H * tiles of queries, the last tiles first. KEPT: of how many 16 channels the queries stay in registers.
template <int NOPE, int ROPE, int V, int MT, int KEPT> __global__ __launch_bounds__(QUERIES * 2 / MT)
static void attention_forward_kernel2(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, bf16 *att, float *lse, int heads) {
    enum { D = NOPE + ROPE, QP = D + 8, P = D + V + 8, THREADS = QUERIES * 2 / MT, STAGE = TILE * P * 2 };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, h = (int)blockIdx.x % heads % c.H;
    int q0 = ((int)(gridDim.x - 1 - blockIdx.x) / heads) * QUERIES;
    int64_t base = (int64_t)((int)blockIdx.x % heads / c.H) * c.T;
    uint32_t queries = smem_address(smem), tiles = queries + QUERIES * QP * 2;
    kv += (base * c.H + h) * (NOPE + V);
    kr += base * c.kr_ld;
    int begin = c.doc[base + q0] / TILE * TILE, end = min(q0 + QUERIES, c.T);
    load_queries<NOPE, ROPE, QUERIES, QP, THREADS>(queries, q + ((base + q0) * c.H + h) * D, c, c.T - q0);
    load_keys<NOPE, ROPE, V, TILE, P, THREADS>(tiles, kv + (int64_t)begin * c.H * (NOPE + V), kr + (int64_t)begin * c.kr_ld, c, c.T - begin);
    cp_async_commit();
    WarpRows w = warp_rows(c, base, q0 + warp * 16 * MT, 16 * MT);
    uint32_t x[KEPT][MT][4], at = lane_by_rows<QP>(queries) + (uint32_t)(warp * MT * 16 * QP) * 2;
    float o[MT][V / 8][4] = {}, top[MT][2], sum[MT][2] = {};
    float scale = c.scale * LOG2E;
    #pragma unroll
    for (int m = 0; m < MT; m++) top[m][0] = top[m][1] = -INFINITY;
    cp_async_wait<0>();
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < KEPT; k++)
        #pragma unroll
        for (int m = 0; m < MT; m++) ldmatrix_x4(x[k][m], at + (uint32_t)(m * 16 * QP + k * 16) * 2);
    for (int k0 = begin, stage = 0; k0 < end; k0 += TILE, stage ^= 1) {
        int next = k0 + TILE;
        if (next < end) load_keys<NOPE, ROPE, V, TILE, P, THREADS>(tiles + (stage ^ 1) * STAGE, kv + (int64_t)next * c.H * (NOPE + V), kr + (int64_t)next * c.kr_ld, c, c.T - next);
        cp_async_commit();
        if (k0 <= w.last && next > w.doc_first) {
            uint32_t tile = tiles + stage * STAGE;
            float s[MT][TILE / 8][4] = {};
            product_part_kept<MT, D / 16, KEPT, TILE / 16, QP, P>(s, x, at, lane_by_channels<P>(tile));
            if (next - 1 > w.first || k0 < w.doc_last) mask_logits<MT, TILE / 8>(s, c, base, w.first, k0);
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int e = 0; e < 2; e++) online_softmax<TILE / 8, V / 8>(s[m], o[m], &top[m][e], &sum[m][e], 2 * e, scale);
            #pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                uint32_t p[MT][4];
                #pragma unroll
                for (int m = 0; m < MT; m++) as_left(p[m], s[m][2 * k], s[m][2 * k + 1]);
                product_by_rows<MT, V / 16>(o, p, lane_by_rows<P>(tile) + (uint32_t)(k * 16 * P + D) * 2);
            }
        }
        cp_async_wait<0>();
        __syncthreads();
    }
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int e = 0; e < 2; e++) store_query(c, o[m], top[m][e], sum[m][e], 2 * e, w.first + m * 16 + e * 8 + lane / 4, base, h, att, lse);
}

// ---- kernel 3: wgmma (sm_90a), forward
// The same walk on Hopper's own product: 4 warps issue one instruction for 64 rows, whose right operand comes straight from shared memory. No ldmatrix, so
// the reads that bound kernel 2 are gone, and the fragments of left operand and result are those of kernel 2. A CTA is two such groups of 64 queries; two
// CTAs share a multiprocessor, so that one group's softmax runs under the products of the other three.
// A matrix in shared memory is made of panels of 64 rows and 64 (or 32) channels: rows of 128 (64) bytes, whose 16-byte chunks are permuted within each
// group of 8 rows as the descriptor says. For Q K' the channels are what is summed over, for P V the rows are: the transposed form, for which the same
// panel and descriptor serve, only the steps from one 16 to the next differ.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static inline void fence_async_proxy(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What a product reads or adds to must be in its registers before the fence: nothing says so to the compiler but this.
template <int N> __device__ static inline void in_registers(float (&c)[N][4]) {
    #pragma unroll
    for (int j = 0; j < N; j++) asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}
template <int N> __device__ static inline void in_registers(uint32_t (&a)[N][4]) {
    #pragma unroll
    for (int j = 0; j < N; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
}
// Products in flight write registers behind the compiler's back: what reads or reuses them must not move above the wait.
template <int N> __device__ static inline void wgmma_wait_all(float (&c)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    in_registers(c);
}
#define ROW4(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
// c [64, 64] += a [64, 16] b, a in registers, b 16 rows by 64 channels of a panel.
__device__ static inline void wgmma_rs(float (&c)[8][4], const uint32_t a[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                 "{%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : ROW4(c, 0), ROW4(c, 1), ROW4(c, 2), ROW4(c, 3), ROW4(c, 4), ROW4(c, 5), ROW4(c, 6), ROW4(c, 7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same with 32 columns.
__device__ static inline void wgmma_rs(float (&c)[4][4], const uint32_t a[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 1;"
                 : ROW4(c, 0), ROW4(c, 1), ROW4(c, 2), ROW4(c, 3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// c [64, 64] (+)= a b', both 64 rows by 16 channels of panels.
__device__ static inline void wgmma_ss(float (&c)[8][4], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                 "%32, %33, p, 1, 1, 0, 0;\n}"
                 : ROW4(c, 0), ROW4(c, 1), ROW4(c, 2), ROW4(c, 3), ROW4(c, 4), ROW4(c, 5), ROW4(c, 6), ROW4(c, 7) : "l"(a), "l"(b), "r"(accumulate));
}
#endif

// A panel of 64 or 32 channels: groups of 8 rows follow each other; swizzle of 128 or 64 bytes.
template <int CHANNELS> __device__ static inline uint64_t panel_descriptor(uint32_t at) {
    return (uint64_t)(at >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)CHANNELS << 32 | (CHANNELS == 64 ? 1ull : 2ull) << 62;
}
// CHANNELS of 64 rows into a panel; rows n and later become zeros. Bits 4.. of an address are xored with its bits 7.., as the descriptor's swizzle has it.
template <int CHANNELS, int THREADS> __device__ static inline void load_panel(uint32_t to, const bf16 *from, int ld, int n) {
    enum { CHUNKS = CHANNELS / 8 };
    int x = (int)threadIdx.x % CHUNKS;
    #pragma unroll
    for (int p = 0; p < TILE * CHUNKS / THREADS; p++) {
        int r = (int)threadIdx.x / CHUNKS + p * (THREADS / CHUNKS);
        uint32_t at = (uint32_t)(r * CHANNELS * 2 + x * 16);
        cp_async_16(to + (at ^ (at >> 7 & (CHUNKS - 1)) << 4), from + (int64_t)min(r, n - 1) * ld + x * 8, r < n);
    }
}
// Three panels, 64 rows of [64 | ROPE | 64] channels: a tile of keys with values, or of queries with d_att. b_ld: of the rope part.
enum { PANEL = TILE * 128 };
template <int ROPE> __host__ __device__ static constexpr int panels_bytes(void) { return 2 * PANEL + TILE * ROPE * 2; }
template <int ROPE, int THREADS> __device__ static inline void load_panels(uint32_t to, const bf16 *a, int a_ld, const bf16 *b, int b_ld, const bf16 *d, int d_ld, int n) {
    load_panel<64, THREADS>(to, a, a_ld, n);
    load_panel<ROPE, THREADS>(to + 2 * PANEL, b, b_ld, n);
    load_panel<64, THREADS>(to + PANEL, d, d_ld, n);
}
__device__ static inline uint32_t aligned_smem(const void *smem) { return (smem_address(smem) + 1023) & ~1023u; } // as the swizzle needs it

enum { WGMMA_THREADS = 256 };
template <int ROPE> static constexpr int forward_wgmma_bytes(void) { return 1024 + 2 * panels_bytes<ROPE>() + QUERIES * (64 + ROPE) * 2; }

// nope = v = 64, ROPE 32 or 64. Grid as kernel 2's.
template <int ROPE> __global__ __launch_bounds__(WGMMA_THREADS, 2)
static void attention_forward_kernel3(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, bf16 *att, float *lse, int heads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum { NOPE = 64, V = 64, D = NOPE + ROPE, OWN = PANEL + TILE * ROPE * 2, STAGE = panels_bytes<ROPE>() };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, h = (int)blockIdx.x % heads % c.H;
    int q0 = ((int)(gridDim.x - 1 - blockIdx.x) / heads) * QUERIES;
    int64_t base = (int64_t)((int)blockIdx.x % heads / c.H) * c.T;
    uint32_t tiles = aligned_smem(smem), queries = tiles + 2 * STAGE, own = queries + warp / 4 * OWN; // of its group: [64 | ROPE] channels of 64 queries
    kv += (base * c.H + h) * (NOPE + V);
    kr += base * c.kr_ld;
    auto load_tile = [&](int k0, int stage) {
        const bf16 *from = kv + (int64_t)k0 * c.H * (NOPE + V);
        load_panels<ROPE, WGMMA_THREADS>(tiles + stage * STAGE, from, c.H * (NOPE + V), kr + (int64_t)k0 * c.kr_ld, c.kr_ld, from + NOPE, c.H * (NOPE + V), c.T - k0);
    };
    int begin = c.doc[base + q0] / TILE * TILE, end = min(q0 + QUERIES, c.T);
    for (int g = 0; g < QUERIES / TILE && q0 + g * TILE < c.T; g++) {
        const bf16 *from = q + ((base + q0 + g * TILE) * c.H + h) * D;
        load_panel<64, WGMMA_THREADS>(queries + g * OWN, from, c.H * D, c.T - q0 - g * TILE);
        load_panel<ROPE, WGMMA_THREADS>(queries + g * OWN + PANEL, from + 64, c.H * D, c.T - q0 - g * TILE);
    }
    load_tile(begin, 0);
    cp_async_commit();
    WarpRows w = warp_rows(c, base, q0 + warp * 16, 16), group = warp_rows(c, base, q0 + warp / 4 * 64, 64); // a group decides as one what to skip
    float o[V / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    float scale = c.scale * LOG2E;
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
    for (int k0 = begin, stage = 0; k0 < end; k0 += TILE, stage ^= 1) {
        int next = k0 + TILE;
        if (next < end) load_tile(next, stage ^ 1);
        cp_async_commit();
        if (k0 <= group.last && next > group.doc_first) {
            uint32_t tile = tiles + stage * STAGE, p[TILE / 16][4];
            float s[1][TILE / 8][4];
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < 4; k++) wgmma_ss(s[0], panel_descriptor<64>(own + k * 32), panel_descriptor<64>(tile + k * 32), k > 0);
            #pragma unroll
            for (int k = 0; k < ROPE / 16; k++) wgmma_ss(s[0], panel_descriptor<ROPE>(own + PANEL + k * 32), panel_descriptor<ROPE>(tile + 2 * PANEL + k * 32), 1);
            wgmma_commit();
            wgmma_wait_all(s[0]);
            if (next - 1 > w.first || k0 < w.doc_last) mask_logits<1, TILE / 8>(s, c, base, w.first, k0);
            #pragma unroll
            for (int e = 0; e < 2; e++) online_softmax<TILE / 8, V / 8>(s[0], o, &top[e], &sum[e], 2 * e, scale);
            #pragma unroll
            for (int k = 0; k < TILE / 16; k++) as_left(p[k], s[0][2 * k], s[0][2 * k + 1]);
            in_registers(o);
            in_registers(p);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < TILE / 16; k++) wgmma_rs(o, p[k], panel_descriptor<64>(tile + PANEL + k * 2048));
            wgmma_commit();
            wgmma_wait_all(o);
        }
        cp_async_wait<0>();
        fence_async_proxy();
        __syncthreads();
    }
    #pragma unroll
    for (int e = 0; e < 2; e++) store_query(c, o, top[e], sum[e], 2 * e, w.first + e * 8 + lane / 4, base, h, att, lse);
#endif
}

// ---- kernel 2, backward: d_q. As forward, but lse is known: P at once, dP = d_att V' beside it, and dS as left operand against the keys. Keys are taken
// 16 at a time, as many as the last product sums over: that leaves registers for d_q and for the fragments of the queries and of d_att.

template <int NOPE, int ROPE, int V> static constexpr int backward_q_bytes(void) {
    return (QUERIES + 2 * TILE) * (NOPE + ROPE + V + 8) * 2 + QUERIES * (int)sizeof(float2);
}

// Grid as forward's.
template <int NOPE, int ROPE, int V, int MT, int KEPT> __global__ __launch_bounds__(QUERIES * 2 / MT)
static void attention_backward_q_kernel2(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, const bf16 *d_att, const float2 *stat, bf16 *d_q, int heads) {
    enum { D = NOPE + ROPE, P = D + V + 8, THREADS = QUERIES * 2 / MT, STAGE = TILE * P * 2 };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, bh = (int)blockIdx.x % heads, h = bh % c.H;
    int q0 = ((int)(gridDim.x - 1 - blockIdx.x) / heads) * QUERIES;
    int64_t base = (int64_t)(bh / c.H) * c.T;
    uint32_t queries = smem_address(smem), tiles = queries + QUERIES * P * 2;
    const float2 *row_stat = (const float2 *)(smem + (QUERIES + 2 * TILE) * P * 2); // [QUERIES]
    kv += (base * c.H + h) * (NOPE + V);
    kr += base * c.kr_ld;
    int begin = c.doc[base + q0] / TILE * TILE, end = min(q0 + QUERIES, c.T);
    load_queries<NOPE, ROPE, QUERIES, P, THREADS>(queries, q + ((base + q0) * c.H + h) * D, c, c.T - q0);
    load_part<V / 8, QUERIES, P, THREADS>(queries + D * 2, d_att + ((base + q0) * c.H + h) * V, c.H * V, c.T - q0);
    load_keys<NOPE, ROPE, V, TILE, P, THREADS>(tiles, kv + (int64_t)begin * c.H * (NOPE + V), kr + (int64_t)begin * c.kr_ld, c, c.T - begin);
    if (threadIdx.x < QUERIES)
        cp_async_small<8>(smem_address(row_stat + threadIdx.x), stat + (int64_t)bh * c.T + min(q0 + (int)threadIdx.x, c.T - 1), q0 + (int)threadIdx.x < c.T);
    cp_async_commit();
    WarpRows w = warp_rows(c, base, q0 + warp * 16 * MT, 16 * MT);
    uint32_t x[KEPT][MT][4], g[MT][V / 16][4], at = lane_by_rows<P>(queries) + (uint32_t)(warp * MT * 16 * P) * 2;
    float dq[MT][D / 8][4] = {};
    float scale = c.scale * LOG2E;
    cp_async_wait<0>();
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        #pragma unroll
        for (int k = 0; k < KEPT; k++) ldmatrix_x4(x[k][m], at + (uint32_t)(m * 16 * P + k * 16) * 2);
        #pragma unroll
        for (int k = 0; k < V / 16; k++) ldmatrix_x4(g[m][k], at + (uint32_t)(m * 16 * P + D + k * 16) * 2);
    }
    for (int k0 = begin, stage = 0; k0 < end; k0 += TILE, stage ^= 1) {
        int next = k0 + TILE;
        if (next < end) load_keys<NOPE, ROPE, V, TILE, P, THREADS>(tiles + (stage ^ 1) * STAGE, kv + (int64_t)next * c.H * (NOPE + V), kr + (int64_t)next * c.kr_ld, c, c.T - next);
        cp_async_commit();
        int masked = next - 1 > w.first || k0 < w.doc_last;
        #pragma unroll
        for (int sub = 0; sub < TILE; sub += 16) {
            if (k0 + sub > w.last || k0 + sub + 16 <= w.doc_first) continue;
            uint32_t block = tiles + stage * STAGE + sub * P * 2;
            float s[MT][2][4] = {}, dp[MT][2][4] = {};
            product_part_kept<MT, D / 16, KEPT, 1, P, P>(s, x, at, lane_by_channels<P>(block));
            product_by_channels<MT, V / 16, 1, P>(dp, g, lane_by_channels<P>(block) + D * 2);
            if (masked) mask_logits<MT, 2>(s, c, base, w.first, k0 + sub);
            uint32_t ds[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 z = row_stat[warp * 16 * MT + m * 16 + e / 2 * 8 + lane / 4];
                    #pragma unroll
                    for (int n = 0; n < 2; n++) s[m][n][e] = exp2_fast(s[m][n][e] * scale - z.x) * (dp[m][n][e] - z.y);
                }
                as_left(ds[m], s[m][0], s[m][1]);
            }
            product_by_rows<MT, D / 16>(dq, ds, lane_by_rows<P>(block));
        }
        cp_async_wait<0>();
        __syncthreads();
    }
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            int t = w.first + m * 16 + e * 8 + lane / 4;
            if (t < c.T) store_row<D / 8>(d_q + ((base + t) * c.H + h) * D, dq[m], 2 * e, c.scale);
        }
}

// ---- kernel 2, backward: d_kv. The same turned around: a warp owns 16 keys and walks the queries that see them, S' = K Q' and dP' = V d_att', so that
// P' and dS' stand ready as left operands of d_v += P' d_att and d_k += dS' Q. Queries are columns now, and a lane reads their lse and delta from shared
// memory. S and dP are computed twice in backward, here and for d_q: the price of owners instead of atomics, 7 products for 5.

enum { KEYS = 64, KV_THREADS = KEYS * 2 }; // keys a CTA owns

template <int NOPE, int ROPE, int V> static constexpr int backward_kv_bytes(void) {
    return (KEYS + 2 * TILE) * (NOPE + ROPE + V + 8) * 2 + 2 * TILE * (int)(sizeof(float2) + sizeof(int));
}

// Grid: B*H * tiles of keys, the first tiles (which most queries see) first. QN queries at a time; KEEP: the fragments of keys and values stay in registers,
// else they are read again. share [N, H, ROPE]: what each head gives to d_kr.
template <int NOPE, int ROPE, int V, int QN, int KEEP, int CTAS> __global__ __launch_bounds__(KV_THREADS, CTAS)
static void attention_backward_kv_kernel2(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, const bf16 *d_att, const float2 *stat,
                                          bf16 *d_kv, bf16 *share, int heads) {
    enum { D = NOPE + ROPE, P = D + V + 8, STAGE = TILE * P * 2 };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, bh = (int)blockIdx.x % heads, h = bh % c.H, k0 = (int)blockIdx.x / heads * KEYS;
    int64_t base = (int64_t)(bh / c.H) * c.T;
    uint32_t keys = smem_address(smem), tiles = keys + KEYS * P * 2;
    const float2 *tile_stat = (const float2 *)(smem + (KEYS + 2 * TILE) * P * 2); // [2][TILE]
    const int *tile_doc = (const int *)(tile_stat + 2 * TILE);                    // [2][TILE]
    const int32_t *doc = c.doc + base;
    q += (base * c.H + h) * D;
    d_att += (base * c.H + h) * V;
    stat += (int64_t)bh * c.T;
    // One tile of queries: [query | d_att], (lse, delta), doc. Behind the last row all are zeros, which add nothing.
    auto load_tile = [&](int q0, int stage) {
        uint32_t to = tiles + stage * STAGE;
        load_queries<NOPE, ROPE, TILE, P, KV_THREADS>(to, q + (int64_t)q0 * c.H * D, c, c.T - q0);
        load_part<V / 8, TILE, P, KV_THREADS>(to + D * 2, d_att + (int64_t)q0 * c.H * V, c.H * V, c.T - q0);
        int r = (int)threadIdx.x % TILE, take = q0 + r < c.T, from = take ? q0 + r : q0;
        if (threadIdx.x < TILE) cp_async_small<8>(smem_address(tile_stat + stage * TILE + r), stat + from, take);
        else cp_async_small<4>(smem_address(tile_doc + stage * TILE + r), doc + from, take);
    };
    load_keys<NOPE, ROPE, V, KEYS, P, KV_THREADS>(keys, kv + ((base + k0) * c.H + h) * (NOPE + V), kr + (base + k0) * c.kr_ld, c, c.T - k0);
    load_tile(k0, 0);
    cp_async_commit();
    int key = k0 + warp * 16 + lane / 4, last = min(k0 + KEYS, c.T) - 1; // the lane's keys are key and key+8
    int first_doc = k0 + TILE < c.T ? doc[k0 + TILE] : c.T;              // where the document of the next tile's first query begins
    uint32_t a_keys = lane_by_rows<P>(keys) + (uint32_t)(warp * 16 * P) * 2;
    uint32_t x[KEEP ? D / 16 : 1][4], y[KEEP ? V / 16 : 1][4];
    float dk[1][D / 8][4] = {}, dv[1][V / 8][4] = {};
    float scale = c.scale * LOG2E;
    cp_async_wait<0>();
    __syncthreads();
    if (KEEP) {
        #pragma unroll
        for (int k = 0; k < D / 16; k++) ldmatrix_x4(x[KEEP ? k : 0], a_keys + k * 32);
        #pragma unroll
        for (int k = 0; k < V / 16; k++) ldmatrix_x4(y[KEEP ? k : 0], a_keys + D * 2 + k * 32);
    }
    for (int q0 = k0, stage = 0;; q0 += TILE, stage ^= 1) {
        int more = first_doc <= last, next = q0 + TILE;
        if (more) {
            load_tile(next, stage ^ 1);
            first_doc = next + TILE < c.T ? doc[next + TILE] : c.T;
        }
        cp_async_commit();
        const int *docs = tile_doc + stage * TILE;
        int masked = q0 == k0 || docs[min((int)TILE, c.T - q0) - 1] > k0;
        #pragma unroll
        for (int sub = 0; sub < TILE; sub += QN) {
            if (q0 + sub + QN <= k0 + warp * 16) continue; // all before the warp's keys
            uint32_t block = tiles + stage * STAGE + sub * P * 2, channels = lane_by_channels<P>(block);
            float s[1][QN / 8][4] = {}, dp[1][QN / 8][4] = {};
            #pragma unroll
            for (int k = 0; k < D / 16; k++) {
                if (!KEEP) ldmatrix_x4(x[0], a_keys + k * 32);
                product_by_channels<1, 1, QN / 16, P>(s, (const uint32_t(*)[1][4]) & x[KEEP ? k : 0], channels + k * 32);
            }
            #pragma unroll
            for (int k = 0; k < V / 16; k++) {
                if (!KEEP) ldmatrix_x4(y[0], a_keys + D * 2 + k * 32);
                product_by_channels<1, 1, QN / 16, P>(dp, (const uint32_t(*)[1][4]) & y[KEEP ? k : 0], channels + D * 2 + k * 32);
            }
            if (masked) {
                #pragma unroll
                for (int n = 0; n < QN / 8; n++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int column = sub + n * 8 + lane % 4 * 2 + e % 2, at = key + e / 2 * 8;
                        s[0][n][e] = (at > q0 + column) | (at < docs[column]) ? -INFINITY : s[0][n][e];
                    }
            }
            #pragma unroll
            for (int n = 0; n < QN / 8; n++) {
                int column = sub + n * 8 + lane % 4 * 2;
                float4 z = *(const float4 *)(tile_stat + stage * TILE + column);
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[0][n][e] = exp2_fast(s[0][n][e] * scale - (e % 2 ? z.z : z.x));
                    dp[0][n][e] = s[0][n][e] * (dp[0][n][e] - (e % 2 ? z.w : z.y));
                }
            }
            #pragma unroll
            for (int n = 0; n < QN / 16; n++) {
                uint32_t p[1][4], ds[1][4], rows = lane_by_rows<P>(block) + (uint32_t)(n * 16 * P) * 2;
                as_left(p[0], s[0][2 * n], s[0][2 * n + 1]);
                as_left(ds[0], dp[0][2 * n], dp[0][2 * n + 1]);
                product_by_rows<1, V / 16>(dv, p, rows + D * 2);
                product_by_rows<1, D / 16>(dk, ds, rows);
            }
        }
        cp_async_wait<0>();
        __syncthreads();
        if (!more) break;
    }
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int at = key + e * 8;
        if (at >= c.T) continue;
        int64_t sh = (base + at) * c.H + h;
        store_row<NOPE / 8>(d_kv + sh * (NOPE + V), dk[0], 2 * e, c.scale);
        store_row<ROPE / 8>(share + sh * ROPE, dk[0] + NOPE / 8, 2 * e, c.scale);
        store_row<V / 8>(d_kv + sh * (NOPE + V) + NOPE, dv[0], 2 * e, 1);
    }
}

// ---- kernel 3, backward: the same two kernels by wgmma, one group of 4 warps and 64 rows a CTA. Left operands of the first two products are panels too,
// which leaves the registers to the sums; P and dS are left operands in registers as before.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// s = own rows against tile rows over [64 | ROPE] channels, dp = the same over the last 64; waits for both.
template <int ROPE> __device__ static inline void panels_products(float (&s)[8][4], float (&dp)[8][4], uint32_t own, uint32_t tile) {
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

enum { GROUP_THREADS = 128 };
template <int ROPE> static constexpr int backward_q_wgmma_bytes(void) { return 1024 + 3 * panels_bytes<ROPE>(); }
template <int ROPE> static constexpr int backward_kv_wgmma_bytes(void) { return 1024 + 3 * panels_bytes<ROPE>() + 2 * TILE * (int)(sizeof(float2) + sizeof(int)); }

// Grid: B*H * tiles of 64 queries, the last tiles first.
template <int ROPE> __global__ __launch_bounds__(GROUP_THREADS, ROPE == 32 ? 3 : 2)
static void attention_backward_q_kernel3(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, const bf16 *d_att, const float2 *stat, bf16 *d_q, int heads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum { D = 64 + ROPE, E = 128, STAGE = panels_bytes<ROPE>() };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, bh = (int)blockIdx.x % heads, h = bh % c.H;
    int q0 = ((int)(gridDim.x - 1 - blockIdx.x) / heads) * TILE;
    int64_t base = (int64_t)(bh / c.H) * c.T, row = (base + q0) * c.H + h;
    uint32_t own = aligned_smem(smem), tiles = own + STAGE;
    kv += (base * c.H + h) * E;
    kr += base * c.kr_ld;
    auto load_tile = [&](int k0, int stage) {
        const bf16 *from = kv + (int64_t)k0 * c.H * E;
        load_panels<ROPE, GROUP_THREADS>(tiles + stage * STAGE, from, c.H * E, kr + (int64_t)k0 * c.kr_ld, c.kr_ld, from + 64, c.H * E, c.T - k0);
    };
    int begin = c.doc[base + q0] / TILE * TILE, end = min(q0 + TILE, c.T);
    load_panels<ROPE, GROUP_THREADS>(own, q + row * D, c.H * D, q + row * D + 64, c.H * D, d_att + row * 64, c.H * 64, c.T - q0);
    load_tile(begin, 0);
    cp_async_commit();
    WarpRows w = warp_rows(c, base, q0 + warp * 16, 16);
    float2 z[2];
    float dq[8][4] = {}, dr[ROPE / 8][4] = {}, scale = c.scale * LOG2E;
    #pragma unroll
    for (int e = 0; e < 2; e++) {
        int t = w.first + e * 8 + lane / 4;
        z[e] = t < c.T ? stat[(int64_t)bh * c.T + t] : make_float2(0, 0);
    }
    for (int k0 = begin, stage = 0; k0 < end; k0 += TILE, stage ^= 1) {
        cp_async_wait<0>();
        fence_async_proxy();
        __syncthreads();
        if (k0 + TILE < end) load_tile(k0 + TILE, stage ^ 1);
        cp_async_commit();
        uint32_t tile = tiles + stage * STAGE, ds[TILE / 16][4];
        float s[1][8][4], dp[8][4];
        panels_products<ROPE>(s[0], dp, own, tile);
        if (k0 + TILE - 1 > w.first || k0 < w.doc_last) mask_logits<1, TILE / 8>(s, c, base, w.first, k0);
        #pragma unroll
        for (int n = 0; n < TILE / 8; n++)
            #pragma unroll
            for (int e = 0; e < 4; e++) s[0][n][e] = exp2_fast(s[0][n][e] * scale - z[e / 2].x) * (dp[n][e] - z[e / 2].y);
        #pragma unroll
        for (int k = 0; k < TILE / 16; k++) as_left(ds[k], s[0][2 * k], s[0][2 * k + 1]);
        in_registers(dq);
        in_registers(dr);
        in_registers(ds);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
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

// Grid and share as kernel 2's.
template <int ROPE> __global__ __launch_bounds__(GROUP_THREADS, 2)
static void attention_backward_kv_kernel3(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, const bf16 *d_att, const float2 *stat,
                                          bf16 *d_kv, bf16 *share, int heads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    enum { D = 64 + ROPE, E = 128, STAGE = panels_bytes<ROPE>() };
    extern __shared__ __align__(128) unsigned char smem[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, bh = (int)blockIdx.x % heads, h = bh % c.H, k0 = (int)blockIdx.x / heads * TILE;
    int64_t base = (int64_t)(bh / c.H) * c.T, row = (base + k0) * c.H + h;
    uint32_t own = aligned_smem(smem), tiles = own + STAGE;
    const float2 *tile_stat = (const float2 *)(smem + (own - smem_address(smem)) + 3 * STAGE); // [2][TILE]
    const int *tile_doc = (const int *)(tile_stat + 2 * TILE);                                 // [2][TILE]
    const int32_t *doc = c.doc + base;
    q += (base * c.H + h) * D;
    d_att += (base * c.H + h) * 64;
    stat += (int64_t)bh * c.T;
    auto load_tile = [&](int q0, int stage) {
        const bf16 *from = q + (int64_t)q0 * c.H * D;
        load_panels<ROPE, GROUP_THREADS>(tiles + stage * STAGE, from, c.H * D, from + 64, c.H * D, d_att + (int64_t)q0 * c.H * 64, c.H * 64, c.T - q0);
        int r = (int)threadIdx.x % TILE, take = q0 + r < c.T, at = take ? q0 + r : q0;
        if (threadIdx.x < TILE) cp_async_small<8>(smem_address(tile_stat + stage * TILE + r), stat + at, take);
        else cp_async_small<4>(smem_address(tile_doc + stage * TILE + r), doc + at, take);
    };
    load_panels<ROPE, GROUP_THREADS>(own, kv + row * E, c.H * E, kr + (base + k0) * c.kr_ld, c.kr_ld, kv + row * E + 64, c.H * E, c.T - k0);
    load_tile(k0, 0);
    cp_async_commit();
    int key = k0 + warp * 16 + lane / 4, last = min(k0 + TILE, c.T) - 1; // the lane's keys are key and key+8
    int first_doc = k0 + TILE < c.T ? doc[k0 + TILE] : c.T;              // where the document of the next tile's first query begins
    float dk[8][4] = {}, dr[ROPE / 8][4] = {}, dv[8][4] = {}, scale = c.scale * LOG2E;
    for (int q0 = k0, stage = 0, more = 1; more; q0 += TILE, stage ^= 1) {
        int next = q0 + TILE;
        more = first_doc <= last;
        cp_async_wait<0>();
        fence_async_proxy();
        __syncthreads();
        if (more) {
            load_tile(next, stage ^ 1);
            first_doc = next + TILE < c.T ? doc[next + TILE] : c.T;
        }
        cp_async_commit();
        const int *docs = tile_doc + stage * TILE;
        uint32_t tile = tiles + stage * STAGE, p[TILE / 16][4], ds[TILE / 16][4];
        float s[8][4], dp[8][4];
        panels_products<ROPE>(s, dp, own, tile);
        if (q0 == k0 || docs[min((int)TILE, c.T - q0) - 1] > k0) {
            #pragma unroll
            for (int n = 0; n < TILE / 8; n++)
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    int column = n * 8 + lane % 4 * 2 + e % 2, at = key + e / 2 * 8;
                    s[n][e] = (at > q0 + column) | (at < docs[column]) ? -INFINITY : s[n][e];
                }
        }
        #pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            float4 z = *(const float4 *)(tile_stat + stage * TILE + n * 8 + lane % 4 * 2);
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = exp2_fast(s[n][e] * scale - (e % 2 ? z.z : z.x));
                dp[n][e] = s[n][e] * (dp[n][e] - (e % 2 ? z.w : z.y));
            }
        }
        #pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
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
        for (int k = 0; k < TILE / 16; k++) {
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

// ---- the launches. Other sizes than those compiled go to kernel 1; the result says which kernel ran.

template <int NOPE, int ROPE, int V, int MT, int KEPT> static void forward_launch(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, bf16 *att, float *lse, int N) {
    int bytes = forward_bytes<NOPE, ROPE, V>(), heads = N / c.T * c.H, tiles = (c.T + QUERIES - 1) / QUERIES;
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_kernel2<NOPE, ROPE, V, MT, KEPT>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_forward_kernel2<NOPE, ROPE, V, MT, KEPT><<<(unsigned)(heads * tiles), QUERIES * 2 / MT, (size_t)bytes>>>(c, q, kv, kr, att, lse, heads);
    CUDA_CHECK(cudaGetLastError());
}
template <int NOPE, int ROPE, int V, int MT, int KEPT, int QN, int KEEP, int CTAS>
static void backward_launch(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, const bf16 *d_att, const float2 *stat, bf16 *d_q, bf16 *d_kv, bf16 *share, int N) {
    int bytes_q = backward_q_bytes<NOPE, ROPE, V>(), bytes_kv = backward_kv_bytes<NOPE, ROPE, V>(), heads = N / c.T * c.H;
    int tiles_q = (c.T + QUERIES - 1) / QUERIES, tiles_kv = (c.T + KEYS - 1) / KEYS;
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_q_kernel2<NOPE, ROPE, V, MT, KEPT>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_q));
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_kv_kernel2<NOPE, ROPE, V, QN, KEEP, CTAS>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_kv));
    attention_backward_kv_kernel2<NOPE, ROPE, V, QN, KEEP, CTAS><<<(unsigned)(heads * tiles_kv), KV_THREADS, (size_t)bytes_kv>>>(c, q, kv, kr, d_att, stat, d_kv, share, heads);
    attention_backward_q_kernel2<NOPE, ROPE, V, MT, KEPT><<<(unsigned)(heads * tiles_q), QUERIES * 2 / MT, (size_t)bytes_q>>>(c, q, kv, kr, d_att, stat, d_q, heads);
    CUDA_CHECK(cudaGetLastError());
}
static int sizes_are(DenseAttention c, int nope, int rope, int v) { return c.nope == nope && c.rope == rope && c.v == v; }

template <int ROPE> static void forward_wgmma_launch(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, bf16 *att, float *lse, int N) {
    int bytes = forward_wgmma_bytes<ROPE>(), heads = N / c.T * c.H, tiles = (c.T + QUERIES - 1) / QUERIES;
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_kernel3<ROPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_forward_kernel3<ROPE><<<(unsigned)(heads * tiles), WGMMA_THREADS, (size_t)bytes>>>(c, q, kv, kr, att, lse, heads);
    CUDA_CHECK(cudaGetLastError());
}
template <int ROPE> static void backward_wgmma_launch(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, const bf16 *d_att, const float2 *stat,
                                                      bf16 *d_q, bf16 *d_kv, bf16 *share, int N) {
    int bytes_q = backward_q_wgmma_bytes<ROPE>(), bytes_kv = backward_kv_wgmma_bytes<ROPE>(), heads = N / c.T * c.H, tiles = (c.T + TILE - 1) / TILE;
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_q_kernel3<ROPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_q));
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_kv_kernel3<ROPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_kv));
    attention_backward_kv_kernel3<ROPE><<<(unsigned)(heads * tiles), GROUP_THREADS, (size_t)bytes_kv>>>(c, q, kv, kr, d_att, stat, d_kv, share, heads);
    attention_backward_q_kernel3<ROPE><<<(unsigned)(heads * tiles), GROUP_THREADS, (size_t)bytes_q>>>(c, q, kv, kr, d_att, stat, d_q, heads);
    CUDA_CHECK(cudaGetLastError());
}

// most: the highest kernel it may take, 3 for the best there is.
static int dense_attention_forward(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, bf16 *att, float *lse, int N, int most) {
    if (most >= 3 && (sizes_are(c, 64, 32, 64) || sizes_are(c, 64, 64, 64)) && has_wgmma()) {
        (c.rope == 32 ? forward_wgmma_launch<32> : forward_wgmma_launch<64>)(c, q, kv, kr, att, lse, N);
        return 3;
    }
    if (most < 2) {
        dense_attention_forward_plain<bf16>(c, q, kv, kr, att, lse, N);
        return 1;
    }
    if (sizes_are(c, 64, 32, 64)) forward_launch<64, 32, 64, 2, 5>(c, q, kv, kr, att, lse, N);
    else if (sizes_are(c, 64, 64, 64)) forward_launch<64, 64, 64, 2, 4>(c, q, kv, kr, att, lse, N);
    else if (sizes_are(c, 32, 16, 32)) forward_launch<32, 16, 32, 2, 3>(c, q, kv, kr, att, lse, N);
    else if (sizes_are(c, 128, 64, 128)) forward_launch<128, 64, 128, 1, 12>(c, q, kv, kr, att, lse, N);
    else {
        dense_attention_forward_plain<bf16>(c, q, kv, kr, att, lse, N);
        return 1;
    }
    return 2;
}
// Scratch: stat [N*H], share [N*H*rope].
static int dense_attention_backward(DenseAttention c, const bf16 *q, const bf16 *kv, const bf16 *kr, const bf16 *att, const float *lse, const bf16 *d_att,
                                    bf16 *d_q, bf16 *d_kv, float *d_kr, float2 *stat, bf16 *share, int N, int most) {
    void (*launch)(DenseAttention, const bf16 *, const bf16 *, const bf16 *, const bf16 *, const float2 *, bf16 *, bf16 *, bf16 *, int) =
        most >= 3 && sizes_are(c, 64, 32, 64) && has_wgmma()   ? backward_wgmma_launch<32>
        : most >= 3 && sizes_are(c, 64, 64, 64) && has_wgmma() ? backward_wgmma_launch<64>
        : sizes_are(c, 64, 32, 64)  ? backward_launch<64, 32, 64, 2, 5, 32, 1, 2>
        : sizes_are(c, 64, 64, 64)  ? backward_launch<64, 64, 64, 2, 1, 32, 1, 2>
        : sizes_are(c, 32, 16, 32)  ? backward_launch<32, 16, 32, 2, 3, 32, 1, 2>
        : sizes_are(c, 128, 64, 128) ? backward_launch<128, 64, 128, 1, 11, 16, 0, 1>
                                    : NULL;
    if (!launch || most < 2) {
        dense_attention_backward_plain<bf16>(c, q, kv, kr, att, lse, d_att, d_q, d_kv, d_kr, stat, share, N);
        return 1;
    }
    row_stat_kernel<bf16><<<blocks_for((int64_t)N * c.H * 8, 256), 256>>>(c, att, d_att, lse, stat, N);
    launch(c, q, kv, kr, d_att, stat, d_q, d_kv, share, N);
    key_rope_sum_kernel<bf16><<<blocks_for((int64_t)N * c.rope, 256), 256>>>(c, share, d_kr, N);
    CUDA_CHECK(cudaGetLastError());
    return launch == backward_wgmma_launch<32> || launch == backward_wgmma_launch<64> ? 3 : 2;
}

// ---- checks

enum { GUARD = 1024 }; // elements of poison before and behind every output

template <class X> static X *guarded_new(int64_t n) { return device_poison<X>(n + 2 * GUARD) + GUARD; }
// Frees it; bytes written outside [0, n).
template <class X> static int guarded_free(X *p, int64_t n) {
    unsigned char *x = (unsigned char *)to_host(p - GUARD, n + 2 * GUARD);
    int stray = 0;
    for (size_t i = 0; i < GUARD * sizeof(X); i++) stray += (x[i] != 0xff) + (x[(size_t)(n + GUARD) * sizeof(X) + i] != 0xff);
    free(x);
    CUDA_CHECK(cudaFree(p - GUARD));
    return stray;
}
// n floats rounded to X and put on the device; wide holds what the rounding left.
template <class X> static X *device_rounded(float *wide, int64_t n) {
    X *p, *x = (X *)malloc((size_t)n * sizeof(X));
    for (int64_t i = 0; i < n; i++) wide[i] = (float)(x[i] = (X)wide[i]);
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(X)));
    CUDA_CHECK(cudaMemcpy(p, x, (size_t)n * sizeof(X), cudaMemcpyHostToDevice));
    free(x);
    return p;
}
static float *host_normal(int64_t n, uint64_t seed, uint64_t stream, float scale) {
    float *x = (float *)malloc((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) x[i] = scale * rng_normal(seed, stream, (uint64_t)i);
    return x;
}
// Error over its limit. Where the truth vanishes (d_q when every row sees only itself) it is measured against 0.1 a value instead. Cosine too, if given.
template <class X> static double over_limit(const X *got, const double *want, int64_t n, double limit, double cosine) {
    double d = 0, s = 0, g = 0, dot = 0, root = sqrt((double)n);
    for (int64_t i = 0; i < n; i++) {
        double x = (double)(float)got[i], y = want[i];
        d += (x - y) * (x - y);
        s += y * y;
        g += x * x;
        dot += x * y;
    }
    int vanishes = sqrt(s) < 1e-6 * root;
    double over = sqrt(d) / (vanishes ? 0.1 * root : sqrt(s)) / limit;
    if (cosine > 0 && !vanishes) over = fmax(over, (1 - dot / sqrt(s * g)) / (1 - cosine));
    return d >= 0 ? over : NAN;
}
// Documents of a sequence of T: one (cut 0), a new one at every position with probability cut, or (cut < 0) at every t with t % 64 = -cut - 1.
static void fill_doc(int32_t *doc, int T, int N, uint64_t seed, float cut) {
    for (int i = 0; i < N; i++) {
        int begins = cut < 0 ? i % T % 64 == (int)-cut - 1 : rng_uniform(seed, 7, (uint64_t)i) < cut;
        doc[i] = i % T == 0 ? 0 : begins ? i % T : doc[i - 1];
    }
}

// One shape by one version, named by the kernels of forward and backward. The gaps between the rows of kr hold NaN.
template <class X> static void check_version(uint64_t seed, int B, int H, int T, int nope, int rope, int v, float cut, int most) {
    int N = B * T, D = nope + rope, E = nope + v, ld = rope + 24;
    int64_t nq = (int64_t)N * H * D, nkv = (int64_t)N * H * E, no = (int64_t)N * H * v, nr = (int64_t)N * ld, rows = (int64_t)N * H, ns = rows * rope, nd = (int64_t)N * rope;
    float *q = host_normal(nq, seed, 1, 1.5f), *kv = host_normal(nkv, seed, 2, 1), *kr = host_normal(nr, seed, 3, 1), *d_att = host_normal(no, seed, 4, 1);
    int32_t *doc = (int32_t *)malloc((size_t)N * sizeof(int32_t)), *d_doc;
    for (int64_t i = 0; i < nr; i++)
        if (i % ld >= rope) kr[i] = NAN;
    fill_doc(doc, T, N, seed, cut);
    CUDA_CHECK(cudaMalloc(&d_doc, (size_t)N * sizeof(int32_t)));
    CUDA_CHECK(cudaMemcpy(d_doc, doc, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice));
    X *dev_q = device_rounded<X>(q, nq), *dev_kv = device_rounded<X>(kv, nkv), *dev_kr = device_rounded<X>(kr, nr), *dev_g = device_rounded<X>(d_att, no);
    DenseAttention c = {T, H, nope, rope, v, ld, doc, 1 / sqrtf((float)D)}, dc = c;
    dc.doc = d_doc;
    double *want_o = (double *)malloc(sizeof(double) * (size_t)no), *want_l = (double *)malloc(sizeof(double) * (size_t)rows);
    double *want_q = (double *)malloc(sizeof(double) * (size_t)nq), *want_kv = (double *)malloc(sizeof(double) * (size_t)nkv), *want_r = (double *)malloc(sizeof(double) * (size_t)nd);
    dense_attention_forward_cpu(c, q, kv, kr, want_o, want_l, N);
    dense_attention_backward_cpu(c, q, kv, kr, want_o, want_l, d_att, want_q, want_kv, want_r, N);
    X *att = guarded_new<X>(no), *d_q = guarded_new<X>(nq), *d_kv = guarded_new<X>(nkv), *share = guarded_new<X>(ns);
    float *lse = guarded_new<float>(rows), *d_kr = guarded_new<float>(nd);
    float2 *stat = guarded_new<float2>(rows);
    int kernel = 1, kernel_back = 1;
    if constexpr (sizeof(X) == 2) {
        kernel = dense_attention_forward(dc, dev_q, dev_kv, dev_kr, att, lse, N, most);
        kernel_back = dense_attention_backward(dc, dev_q, dev_kv, dev_kr, att, lse, dev_g, d_q, d_kv, d_kr, stat, share, N, most);
    } else {
        dense_attention_forward_plain<X>(dc, dev_q, dev_kv, dev_kr, att, lse, N);
        dense_attention_backward_plain<X>(dc, dev_q, dev_kv, dev_kr, att, lse, dev_g, d_q, d_kv, d_kr, stat, share, N);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    X *got_o = to_host(att, no), *got_q = to_host(d_q, nq), *got_kv = to_host(d_kv, nkv);
    float *got_l = to_host(lse, rows), *got_r = to_host(d_kr, nd);
    int half = sizeof(X) == 2;
    double e[5] = {over_limit(got_o, want_o, no, half ? 1e-2 : 1e-5, 0), 0, 0, 0, 0}, worst = 0;
    for (int64_t i = 0; i < rows; i++) e[1] = fmax(e[1], got_l[i] == got_l[i] ? fabs((double)got_l[i] - want_l[i]) / (half ? 1e-3 : 1e-5 * (1 + fabs(want_l[i]))) : INFINITY);
    e[2] = over_limit(got_q, want_q, nq, half ? 1.5e-2 : 1e-5, half ? 0.9995 : 0);
    e[3] = over_limit(got_kv, want_kv, nkv, half ? 1.5e-2 : 1e-5, half ? 0.9995 : 0);
    e[4] = over_limit(got_r, want_r, nd, half ? 1.5e-2 : 1e-5, half ? 0.9995 : 0);
    for (double x : e) worst = x <= worst ? worst : x == x ? x : INFINITY;
    int stray = guarded_free(att, no) + guarded_free(d_q, nq) + guarded_free(d_kv, nkv) + guarded_free(share, ns) + guarded_free(lse, rows) + guarded_free(d_kr, nd) + guarded_free(stat, rows);
    char name[128];
    snprintf(name, sizeof name, "%d,%d %-5s B=%d H=%d T=%-4d (%d,%d,%d) cut %.3g: error/limit", kernel, kernel_back, half ? "bf16" : "float", B, H, T, nope, rope, v, (double)cut);
    if (!check(worst < 1 && !stray, name, worst))
        printf("     error over limit: att %.3g lse %.3g d_q %.3g d_kv %.3g d_kr %.3g; %d stray bytes\n", e[0], e[1], e[2], e[3], e[4], stray);
    const void *host[] = {q, kv, kr, d_att, doc, want_o, want_l, want_q, want_kv, want_r, got_o, got_q, got_kv, got_l, got_r};
    const void *dev[] = {dev_q, dev_kv, dev_kr, dev_g, d_doc};
    for (const void *one : host) free((void *)one);
    for (const void *one : dev) CUDA_CHECK(cudaFree((void *)one));
}
static void check_case(uint64_t seed, int B, int H, int T, int nope, int rope, int v, float cut) {
    int fast = nope % 16 == 0;
    check_version<float>(seed, B, H, T, nope, rope, v, cut, 1);
    check_version<bf16>(seed, B, H, T, nope, rope, v, cut, 1);
    if (fast) check_version<bf16>(seed, B, H, T, nope, rope, v, cut, 2);
    if (fast && nope == 64 && has_wgmma()) check_version<bf16>(seed, B, H, T, nope, rope, v, cut, 3);
}

// ---- operands of a realistic size: many tiles, the fastest against kernel 1, and the times

typedef struct { DenseAttention c; int N; bf16 *q, *kv, *kr, *d_att, *att, *d_q, *d_kv, *share; float *lse, *d_kr; float2 *stat; } Operands;

static Operands operands_new(uint64_t seed, int B, int T, int H, int nope, int rope, int v, float cut) {
    int N = B * T;
    int64_t rows = (int64_t)N * H;
    int32_t *doc = (int32_t *)malloc((size_t)N * sizeof(int32_t)), *d_doc;
    fill_doc(doc, T, N, seed, cut);
    CUDA_CHECK(cudaMalloc(&d_doc, (size_t)N * sizeof(int32_t)));
    CUDA_CHECK(cudaMemcpy(d_doc, doc, (size_t)N * sizeof(int32_t), cudaMemcpyHostToDevice));
    free(doc);
    DenseAttention c = {T, H, nope, rope, v, rope + 256, d_doc, 1 / sqrtf((float)(nope + rope))};
    Operands x = {c, N, device_normal<bf16>(rows * (nope + rope), seed, 1, 1.5f), device_normal<bf16>(rows * (nope + v), seed, 2, 1),
                  device_normal<bf16>((int64_t)N * c.kr_ld, seed, 3, 1), device_normal<bf16>(rows * v, seed, 4, 1), device_poison<bf16>(rows * v),
                  device_poison<bf16>(rows * (nope + rope)), device_poison<bf16>(rows * (nope + v)), device_poison<bf16>(rows * rope),
                  device_poison<float>(rows), device_poison<float>((int64_t)N * rope), device_poison<float2>(rows)};
    return x;
}
static void operands_free(Operands x) {
    const void *all[] = {x.c.doc, x.q, x.kv, x.kr, x.d_att, x.att, x.d_q, x.d_kv, x.share, x.lse, x.d_kr, x.stat};
    for (const void *one : all) CUDA_CHECK(cudaFree((void *)one));
}
static int forward(Operands x, int most) { return dense_attention_forward(x.c, x.q, x.kv, x.kr, x.att, x.lse, x.N, most); }
static int backward(Operands x, int most) {
    return dense_attention_backward(x.c, x.q, x.kv, x.kr, x.att, x.lse, x.d_att, x.d_q, x.d_kv, x.d_kr, x.stat, x.share, x.N, most);
}
template <class X> static void check_same(const X *now, const X *before, int64_t n, double limit, const char *what, Operands x) {
    X *a = to_host(now, n);
    double error = relative_error(a, before, n);
    char name[128];
    snprintf(name, sizeof name, "%s T=%d H=%d (%d,%d,%d)", what, x.c.T, x.c.H, x.c.nope, x.c.rope, x.c.v);
    check(error <= limit, name, error);
    free(a);
}
// The fastest kernels against kernel 1 over many tiles, then a second run bit for bit.
static void check_large(uint64_t seed, int B, int T, int H, int nope, int rope, int v, float cut) {
    Operands x = operands_new(seed, B, T, H, nope, rope, v, cut);
    int64_t rows = (int64_t)x.N * H, no = rows * v, nq = rows * (nope + rope), nkv = rows * (nope + v), nd = (int64_t)x.N * rope;
    bf16 *o = NULL, *dq = NULL, *dkv = NULL;
    float *dkr = NULL;
    for (int round = 0; round < 3; round++) { // kernel 1, the fastest, the fastest
        CUDA_CHECK(cudaMemset(x.att, 0xff, (size_t)no * 2));
        CUDA_CHECK(cudaMemset(x.d_q, 0xff, (size_t)nq * 2));
        CUDA_CHECK(cudaMemset(x.d_kv, 0xff, (size_t)nkv * 2));
        CUDA_CHECK(cudaMemset(x.d_kr, 0xff, (size_t)nd * 4));
        forward(x, round ? 3 : 1);
        backward(x, round ? 3 : 1);
        CUDA_CHECK(cudaDeviceSynchronize());
        if (round) {
            check_same(x.att, o, no, round == 1 ? 1e-2 : 0, round == 1 ? "fast against plain: att" : "fast again: att", x);
            check_same(x.d_q, dq, nq, round == 1 ? 1.5e-2 : 0, round == 1 ? "fast against plain: d_q" : "fast again: d_q", x);
            check_same(x.d_kv, dkv, nkv, round == 1 ? 1.5e-2 : 0, round == 1 ? "fast against plain: d_kv" : "fast again: d_kv", x);
            check_same(x.d_kr, dkr, nd, round == 1 ? 1.5e-2 : 0, round == 1 ? "fast against plain: d_kr" : "fast again: d_kr", x);
        }
        free(o), free(dq), free(dkv), free(dkr);
        o = to_host(x.att, no), dq = to_host(x.d_q, nq), dkv = to_host(x.d_kv, nkv), dkr = to_host(x.d_kr, nd);
    }
    free(o), free(dq), free(dkv), free(dkr);
    operands_free(x);
}

// products: 1 forward, 2.5 backward. Bytes: every operand once.
static void print_time(const char *name, int kernel, Operands x, double products, Timing t) {
    int D = x.c.nope + x.c.rope, E = x.c.nope + x.c.v, v = x.c.v;
    double rows = (double)x.N * x.c.H, flops = products * rows * (x.c.T + 1) * (D + v);
    double bytes = products > 1 ? rows * (4 * D + 4 * E + 4 * v + 4) + 6.0 * x.N * x.c.rope : rows * (2 * D + 2 * E + 2 * v + 4) + 2.0 * x.N * x.c.rope;
    printf("%d %-8s B=%-2d T=%-5d H=%-2d (%d,%d,%d) %9.3f ms (%.3f..%.3f) %7.1f TFLOP/s %6.0f GB/s\n", kernel, name, x.N / x.c.T, x.c.T, x.c.H, x.c.nope, x.c.rope, v,
           t.median, t.lo, t.hi, flops / t.median * 1e-9, bytes / t.median * 1e-6);
}
static void time_case(uint64_t seed, int B, int T, int H, int nope, int rope, int v, int most) {
    Operands x = operands_new(seed, B, T, H, nope, rope, v, 0);
    int reps = most == 1 ? 2 : 9, last = 0, kernel = 0;
    for (int may = most; may >= 1 && (may == most || may > 1); may--) { // every faster kernel that these sizes have
        Timing t = time_kernel(reps, [&] { kernel = forward(x, may); });
        if (kernel != last) print_time("forward", kernel, x, 1, t);
        last = kernel;
    }
    last = 0;
    for (int may = most; may >= 1 && (may == most || may > 1); may--) {
        Timing t = time_kernel(reps, [&] { kernel = backward(x, may); });
        if (kernel != last) print_time("backward", kernel, x, 2.5, t);
        last = kernel;
    }
    operands_free(x);
}

int main(int argc, char **argv) {
    uint64_t seed = seed_of(argc, argv);
    int small = argc > 2 && !strcmp(argv[2], "small");
    static const int sizes[][3] = {{64, 32, 64}, {64, 64, 64}, {32, 16, 32}, {128, 64, 128}, {24, 8, 40}, {5, 3, 70}};
    // B, H, T, and new documents in a thousand positions (negative: at the edges of tiles): one tile and several, full and not, documents that begin inside, at and beyond tiles
    static const int cases[][4] = {{1, 1, 1, 0}, {2, 3, 63, 0}, {1, 6, 64, 300}, {3, 2, 65, 20}, {2, 1, 127, 0}, {1, 2, 128, 1000}, {2, 2, 130, 30}, {1, 2, 257, 0}, {1, 1, 257, 10}, {2, 1, 257, 100},
                                   {1, 2, 257, -64}, {1, 1, 257, -1}, {1, 1, 200, -2}};
    for (const int *s : sizes)
        for (const int *x : cases) check_case(seed, x[0], x[1], x[2], s[0], s[1], s[2], x[3] < 0 ? (float)x[3] : (float)x[3] / 1000);
    printf("wgmma: %s\n", has_wgmma() ? "yes (sm_90a)" : "no, kernel 3 is left out");
    if (!small) {
        check_large(seed, 2, 2000, 3, 64, 32, 64, 0);
        check_large(seed, 2, 2000, 3, 64, 64, 64, 0.002f);
        time_case(seed, 4, 1024, 12, 64, 32, 64, 1);
        time_case(seed, 32, 1024, 12, 64, 32, 64, 3);
        time_case(seed, 4, 8192, 12, 64, 32, 64, 3);
        time_case(seed, 1, 32768, 12, 64, 64, 64, 3);
        time_case(seed, 4, 8192, 8, 128, 64, 128, 3);
    }
    return check_summary();
}
