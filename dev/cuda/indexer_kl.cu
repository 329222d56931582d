// The indexer's loss over the selected set, forward and gradients.
//
// N = B*T queries with HI index heads of DI each; n_cand index keys a sequence; sel names up to k candidates a query. For query i:
//   X[h,j]  = q[h] . k[sel[j]]                                  I[j] = sum_h w[h] relu(X[h,j])
//   p[j]    = mass[j] / sum(mass)                               what the main attention thought of the chosen ones
//   KL      = sum_j p[j] (log p[j] - log softmax(I)[j])         row_kl[i]     += KL / teachers
//   dI[j]   = scale (softmax(I)[j] - p[j])                      d_w[i,h]      += sum_j dI[j] relu(X[h,j])
//   d_X[h,j]= dI[j] w[h] [X[h,j] > 0]                           d_q[i,h]      += sum_j d_X[h,j] k[sel[j]]
//                                                               d_k[sel[j]]   += sum_h d_X[h,j] q[h]
// A query without a slot, or whose mass sums to 0, has no loss and no gradient. HI up to 64, k up to 4096 (the scores of a query stay in shared memory).
//
// Everything but the last line belongs to one query, so one CTA a query needs no other. The last line is the lesson: T*k rows of DI floats
// are to be added to n_cand rows, and moving them takes longer than all the arithmetic.
//
// kernel 1  plain float, any size, float or bf16 inputs; d_k by walking each candidate's list of (query, slot)
// kernel 2  one fused tensor-core kernel (sm_80 and later), DI 32, 64 or 128, with two ways to scatter d_k:
//           "atomic": red.global.add.v4.f32 (sm_90; four atomicAdd before), the sum's order left to chance
//           "rows":   every (query, slot) writes its row where the list sorted by candidate has it; a second kernel sums in order
// The dense stage (all candidates visible) is plain matrix products but for its middle, a kernel a row: dense_kl_kernel at the end.
//
// Run: indexer_kl [seed [small]]; small: checks only.
#include "pair_lists.h"

// Operands that all versions share; the index queries and keys, whose type differs, come beside it.
typedef struct {
    int T, n_cand, HI, DI, k;        // T queries a sequence
    const float *w;                  // [N, HI] head weights, every scale inside
    const int32_t *sel;              // [N, k] ascending candidates, -1 behind the last
    const float *mass;               // [N, k] not normalised; undefined behind the last
    float *row_kl, *d_w, *d_k;       // [N], [N, HI], [B, n_cand, DI]: all added to
    float scale, teachers;
} IndexerKL;

// ---- CPU reference, float64

// The loss of one row and its gradients to scores, products and weights. x [HI, n] becomes d_X; returns 0 when there is nothing to imitate.
static int kl_row_cpu(double *x, const float *w, const double *mass, int HI, int n, double scale, double *kl, double *d_w) {
    double total = 0, top = -INFINITY, sum = 0;
    double *score = (double *)calloc((size_t)n + 1, sizeof(double));
    for (int j = 0; j < n; j++) {
        total += mass[j];
        for (int h = 0; h < HI; h++) score[j] += (double)w[h] * fmax(x[(int64_t)h * n + j], 0.0);
        top = fmax(top, score[j]);
    }
    for (int j = 0; j < n; j++) sum += exp(score[j] - top);
    *kl = 0;
    for (int j = 0; j < n && total > 0; j++) {
        double p = mass[j] / total, log_soft = score[j] - top - log(sum), d_score = scale * (exp(log_soft) - p);
        if (p > 0) *kl += p * (log(p) - log_soft);
        for (int h = 0; h < HI; h++) {
            double *v = x + (int64_t)h * n + j;
            d_w[h] += d_score * fmax(*v, 0.0);
            *v = *v > 0 ? d_score * (double)w[h] : 0;
        }
    }
    free(score);
    return total > 0;
}

// c's pointers are host memory; q, k widened to float; row_kl, d_w, d_q, d_k are sums that start at what they hold.
static void indexer_kl_cpu(IndexerKL c, const float *q, const float *k, int N, double *row_kl, double *d_w, double *d_q, double *d_k) {
    double *x = (double *)malloc(sizeof(double) * (size_t)c.HI * (size_t)c.k), *mass = (double *)malloc(sizeof(double) * (size_t)c.k), kl;
    for (int i = 0; i < N; i++) {
        const int32_t *sel = c.sel + (int64_t)i * c.k;
        int64_t base = (int64_t)(i / c.T) * c.n_cand, qi = (int64_t)i * c.HI * c.DI;
        int n = 0;
        while (n < c.k && sel[n] >= 0) n++;
        for (int j = 0; j < n; j++) {
            mass[j] = c.mass[(int64_t)i * c.k + j];
            for (int h = 0; h < c.HI; h++) {
                double v = 0;
                for (int d = 0; d < c.DI; d++) v += (double)q[qi + h * c.DI + d] * (double)k[(base + sel[j]) * c.DI + d];
                x[(int64_t)h * n + j] = v;
            }
        }
        if (!kl_row_cpu(x, c.w + (int64_t)i * c.HI, mass, c.HI, n, (double)c.scale, &kl, d_w + (int64_t)i * c.HI)) continue;
        row_kl[i] += kl / (double)c.teachers;
        for (int h = 0; h < c.HI; h++)
            for (int j = 0; j < n; j++)
                for (int d = 0; d < c.DI; d++) {
                    d_q[qi + h * c.DI + d] += x[(int64_t)h * n + j] * (double)k[(base + sel[j]) * c.DI + d];
                    d_k[(base + sel[j]) * c.DI + d] += x[(int64_t)h * n + j] * (double)q[qi + h * c.DI + d];
                }
    }
    free(x);
    free(mass);
}

// ---- shared by the kernels

// Sum, or maximum, over a block of at most 32 warps; all threads get it. shared [32].
__device__ static float block_sum(float v, float *shared) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float s = 0;
    for (int u = 0; u < (int)(blockDim.x / 32); u++) s += shared[u];
    return s;
}
__device__ static float block_max(float v, float *shared) {
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    float s = -INFINITY;
    for (int u = 0; u < (int)(blockDim.x / 32); u++) s = fmaxf(s, shared[u]);
    return s;
}

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

// Chosen slots of a query and the sum of their mass, to all threads of the block. chosen [k] gets the candidates (or NULL).
__device__ static int slots_of_query(const int32_t *sel, const float *mass, int k, int32_t *chosen, float *total, float *shared) {
    float n = 0, sum = 0; // at most 4096 slots: exact in float
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        int e = sel[j];
        if (chosen) chosen[j] = e;
        if (e >= 0) {
            n += 1;
            sum += mass[j];
        }
    }
    n = block_sum(n, shared);
    *total = block_sum(sum, shared);
    return (int)n;
}

// ---- the list of (query, slot) pairs of a chunk of queries, sorted by candidate: kernel 1 walks it, kernel 2 writes its rows in that order

// key = candidate among all B*n_cand, or none; pair = (query - i0) * k + slot. sel points at the chunk.
__global__ static void pairs_kernel(const int32_t *sel, uint32_t *key, uint32_t *pair, int i0, int T, int k, int n_cand, uint32_t none, int n) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (x >= n) return;
    key[x] = sel[x] < 0 ? none : (uint32_t)((i0 + x / k) / T * n_cand + sel[x]);
    pair[x] = (uint32_t)x;
}

// ---- kernel 1: the plain version
// One block a query writes down what the formula says: all products to memory, the loss, then each gradient by its own loop. d_k turns the
// sum around: one block a candidate walks the sorted list, so that no two blocks add to the same place and the order never changes.

// dots [queries, HI, k] is left as d_X. d_q NULL: the loss only. Dynamic shared memory: k floats.
template <class X, class DQ> __global__ static void indexer_kl_kernel1(IndexerKL c, const X *q_index, const X *k_index, DQ *d_q, float *dots, int i0) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ float shared[32];
    float *score = (float *)smem, total;
    int64_t i = i0 + (int64_t)blockIdx.x;
    const int32_t *sel = c.sel + i * c.k;
    const float *mass = c.mass + i * c.k, *w = c.w + i * c.HI;
    const X *q = q_index + i * c.HI * c.DI, *keys = k_index + i / c.T * c.n_cand * c.DI;
    float *x = dots + (int64_t)blockIdx.x * c.HI * c.k;
    int n = slots_of_query(sel, mass, c.k, NULL, &total, shared), lane = threadIdx.x % 32;
    if (n == 0 || total <= 0) {
        for (int h = 0; h < c.HI; h++)
            for (int j = threadIdx.x; j < n; j += blockDim.x) x[(int64_t)h * c.k + j] = 0;
        return;
    }
    for (int j = threadIdx.x / 32; j < n; j += blockDim.x / 32) { // one warp a product
        float s = 0;
        for (int h = 0; h < c.HI; h++) {
            float v = 0;
            for (int d = lane; d < c.DI; d += 32) v += (float)q[h * c.DI + d] * (float)keys[(int64_t)sel[j] * c.DI + d];
            v = warp_sum(v);
            if (lane == 0) x[(int64_t)h * c.k + j] = v;
            s += w[h] * fmaxf(v, 0.0f);
        }
        if (lane == 0) score[j] = s;
    }
    __syncthreads();
    float kl = scores_to_gradients(score, mass, n, total, c.scale, shared);
    if (threadIdx.x == 0) c.row_kl[i] += kl / c.teachers;
    if (!d_q) return;
    __syncthreads();
    for (int h = 0; h < c.HI; h++) {
        float sum = 0;
        for (int j = threadIdx.x; j < n; j += blockDim.x) {
            float v = x[(int64_t)h * c.k + j];
            sum += v > 0 ? score[j] * v : 0;
            x[(int64_t)h * c.k + j] = v > 0 ? score[j] * w[h] : 0;
        }
        sum = block_sum(sum, shared);
        if (threadIdx.x == 0) c.d_w[i * c.HI + h] += sum;
    }
    __syncthreads();
    for (int y = threadIdx.x; y < c.HI * c.DI; y += blockDim.x) {
        float v = 0;
        for (int j = 0; j < n; j++) v += x[(int64_t)(y / c.DI) * c.k + j] * (float)keys[(int64_t)sel[j] * c.DI + y % c.DI];
        d_q[i * c.HI * c.DI + y] = (DQ)((float)d_q[i * c.HI * c.DI + y] + v);
    }
}

// d_k[candidate] += sum over its pairs, in order, of d_X[:, slot] . q. One block a candidate, threads over DI.
template <class X> __global__ static void key_gather_kernel1(IndexerKL c, const X *q_index, const float *dots, const uint32_t *pair, const int32_t *start, int i0) {
    for (int d = threadIdx.x; d < c.DI; d += blockDim.x) {
        float v = 0;
        for (int y = start[blockIdx.x]; y < start[blockIdx.x + 1]; y++) {
            int query = (int)(pair[y] / (uint32_t)c.k), slot = (int)(pair[y] % (uint32_t)c.k);
            const float *x = dots + (int64_t)query * c.HI * c.k + slot;
            const X *q = q_index + (int64_t)(i0 + query) * c.HI * c.DI + d;
            for (int h = 0; h < c.HI; h++) v += x[(int64_t)h * c.k] * (float)q[h * c.DI];
        }
        c.d_k[(int64_t)blockIdx.x * c.DI + d] += v;
    }
}

// ---- kernel 2: everything of a query in one kernel, on the tensor cores
// The keys are tiny and stay in L2, so gathering them twice is cheap; writing X out is not. Sweep 1 gathers tiles of 64 keys, takes X^T = K Q^T
// (16 keys a warp) and keeps only the k scores. Softmax. Sweep 2 gathers again and takes X again: the same instructions on the same operands
// give the same bits, so the mask [X > 0] is that of the loss, in float. (keep: hold the float X of sweep 1 in shared memory instead; it
// saves a quarter of the products and costs k*HI floats, which is residency. For up to 16 heads only.)
// Of sweep 2's two products one is free of data movement: the accumulators of X^T have, lane for lane, the layout of the left operand of
// d_K = d_X^T Q. The other, d_Q += d_X K, sums over all keys of the tile, so d_X goes through shared memory in bf16 and each warp owns DI/4 columns.
// All rows in shared memory are xor-swizzled in chunks of 16 bytes: eight neighbouring rows at one chunk touch all 32 banks, for cp.async,
// ldmatrix and its transposed form.

enum { KL_THREADS = 128, KL_TILE = 64 };
enum { KL_ONLY, KL_ATOMIC, KL_ROWS_BF16, KL_ROWS_FLOAT }; // the loss alone, or with gradients and this scatter of d_k

// Byte offset of a 16-byte chunk in a tile of rows of ROW bytes (32, 64, 128 or 256).
template <int ROW> __device__ static inline uint32_t swizzle(int row, int chunk) {
    constexpr int rows_a_line = ROW < 128 ? 128 / ROW : 1, chunks = ROW < 128 ? ROW / 16 : 8;
    return (uint32_t)(row * ROW + (chunk ^ (row / rows_a_line & (chunks - 1))) * 16);
}

// Key rows chosen[first..first+64) to shared memory; zeros behind slot n.
template <int DI> __device__ static inline void gather_tile(uint32_t to, const bf16 *keys, const int32_t *chosen, int first, int n) {
    #pragma unroll
    for (int u = 0; u < KL_TILE * (DI / 8) / KL_THREADS; u++) {
        int x = (int)threadIdx.x + u * KL_THREADS, row = x / (DI / 8), chunk = x % (DI / 8), take = first + row < n;
        const bf16 *from = keys + (take ? (int64_t)chosen[first + row] * DI + chunk * 8 : 0);
        cp_async_16(to + swizzle<DI * 2>(row, chunk), from, take);
    }
}

__device__ static inline void add_4(float *to, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#else
    atomicAdd(to, v.x);
    atomicAdd(to + 1, v.y);
    atomicAdd(to + 2, v.z);
    atomicAdd(to + 3, v.w);
#endif
}
__device__ static inline void store_4(float *to, float4 v) { *(float4 *)to = v; }
__device__ static inline void store_4(bf16 *to, float4 v) { *(uint2 *)to = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }
__device__ static inline void add_2(float *to, float a, float b) {
    float2 v = *(float2 *)to;
    *(float2 *)to = make_float2(v.x + a, v.y + b);
}
__device__ static inline void add_2(bf16 *to, float a, float b) { *(uint32_t *)to = pack_bf16((float)to[0] + a, (float)to[1] + b); }

// Dynamic shared memory in bytes: two key tiles, Q, d_X of a tile, scores, candidates, kept X.
static size_t indexer_kl_bytes(int HP, int DI, int k, int keep) {
    size_t slots = (size_t)(k + KL_TILE - 1) / KL_TILE * KL_TILE, heads = HP < 16 ? 16 : (size_t)HP;
    return 2 * KL_TILE * (size_t)DI * 2 + heads * (size_t)DI * 2 + KL_TILE * heads * 2 + slots * 8 + (keep ? slots * (size_t)HP * 4 : 0);
}

// HP: heads padded to 8, 16, 32 or 64. slot_of [queries * k] and rows [queries * k, DI] belong to the chunk; sel, mass, q_index, d_q ... to all N.
template <int HP, int DI, int FORM, class DQ> __global__ static void __launch_bounds__(KL_THREADS, HP * DI >= 4096 ? (HP == 64 ? 2 : 3) : HP == 64 ? 3 : 4)
indexer_kl_kernel2(IndexerKL c, const bf16 *q_index, const bf16 *k_index, DQ *d_q, const int32_t *slot_of, void *rows, int keep, int i0) {
    constexpr int NT = HP / 8, HQ = HP < 16 ? 16 : HP, MT = HQ / 16, DT = DI / 32; // tiles of 8 heads, of 16 heads, of 8 columns a warp
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ __align__(16) float shared[32], weight[HP], d_weight[KL_THREADS / 32][HP];
    int slots = (c.k + KL_TILE - 1) / KL_TILE * KL_TILE, tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, quad = lane % 4, hidden;
    unsigned char *q_tile = smem + 2 * KL_TILE * DI * 2, *g_tile = q_tile + HQ * DI * 2;
    float *score = (float *)(g_tile + KL_TILE * HQ * 2), total;
    int32_t *chosen = (int32_t *)(score + slots);
    float4 *kept = (float4 *)(chosen + slots);
    uint32_t key_at = smem_address(smem), q_at = smem_address(q_tile), g_at = smem_address(g_tile);
    int64_t i = i0 + (int64_t)blockIdx.x, base = i / c.T * c.n_cand;
    const bf16 *keys = k_index + base * DI, *q = q_index + i * c.HI * DI;
    const float *mass = c.mass + i * c.k;
    const int32_t *slot_of_i = slot_of + (int64_t)blockIdx.x * c.k;

    int n = slots_of_query(c.sel + i * c.k, mass, c.k, chosen, &total, shared);
    if (n == 0 || total <= 0) { // no loss; but its rows are in the list that will be summed
        if (FORM == KL_ROWS_BF16 || FORM == KL_ROWS_FLOAT)
            for (int x = tid; x < n * (DI / 4); x += KL_THREADS) {
                int64_t at = (int64_t)slot_of_i[x / (DI / 4)] * DI + x % (DI / 4) * 4;
                if (FORM == KL_ROWS_FLOAT) store_4((float *)rows + at, make_float4(0, 0, 0, 0));
                else store_4((bf16 *)rows + at, make_float4(0, 0, 0, 0));
            }
        return;
    }
    for (int x = tid; x < HQ * (DI / 8); x += KL_THREADS) {
        int h = x / (DI / 8), chunk = x % (DI / 8);
        cp_async_16(q_at + swizzle<DI * 2>(h, chunk), h < c.HI ? q + h * DI + chunk * 8 : q, h < c.HI);
    }
    if (tid < HP) weight[tid] = tid < c.HI ? c.w[i * c.HI + tid] : 0;
    if (HP < 16 && tid < KL_TILE) *(uint4 *)(g_tile + swizzle<HQ * 2>(tid, 1)) = make_uint4(0, 0, 0, 0); // heads 8..15 that nobody has
    for (int j = n + tid; j < slots; j += KL_THREADS) score[j] = 0;                                     // dI behind the last slot

    int tiles = (n + KL_TILE - 1) / KL_TILE, steps = FORM == KL_ONLY ? tiles : 2 * tiles;
    float dq[MT][DT][4], dw[NT][2];
    for (int m = 0; m < MT; m++)
        for (int t = 0; t < DT; t++)
            for (int e = 0; e < 4; e++) dq[m][t][e] = 0;
    for (int t = 0; t < NT; t++) dw[t][0] = dw[t][1] = 0;

    gather_tile<DI>(key_at, keys, chosen, 0, n);
    cp_async_commit();
    for (int step = 0;; step++) {
        // This barrier shows tile "step" to all warps, and says that all are done with the other buffer and with d_X of the step before.
        cp_async_wait<0>();
        __syncthreads();
        int learn = step >= tiles, tile = learn ? step - tiles : step, next = step + 1 < tiles ? step + 1 : step + 1 - tiles;
        if (step + 1 < steps) gather_tile<DI>(key_at + (step + 1) % 2 * (KL_TILE * DI * 2), keys, chosen, next * KL_TILE, n);
        cp_async_commit();
        if (step == tiles) {
            float kl = scores_to_gradients(score, mass, n, total, c.scale, shared);
            if (tid == 0) c.row_kl[i] += kl / c.teachers;
            __syncthreads();
        }
        if (step == steps) break;
        // Some fifty shared-memory addresses depend on the lane alone. The compiler would keep them all in registers over the loop, and spill;
        // a thread number that it cannot see through makes it compute them where they are used.
        asm volatile("mov.b32 %0, %1;" : "=r"(hidden) : "r"(tid));
        lane = hidden % 32, warp = hidden / 32, quad = hidden % 4;
        uint32_t tile_at = key_at + step % 2 * (KL_TILE * DI * 2);
        int row = warp * 16 + lane / 4, j0 = tile * KL_TILE + row, j1 = j0 + 8, at0 = 0, at1 = 0; // the lane's two slots, and where d_k of them goes
        if (FORM != KL_ONLY && learn) {
            const int32_t *where = FORM == KL_ATOMIC ? chosen : slot_of_i;
            if (j0 < n) at0 = where[j0];
            if (j1 < n) at1 = where[j1];
        }

        // X^T of the warp's 16 keys: x[t] = keys (lane/4, +8) by heads 8t + 2 quad + {0,1}
        float x[NT][4];
        if (HP <= 16 && keep && learn) {
            #pragma unroll
            for (int t = 0; t < NT; t++) {
                float4 v = kept[(tile * NT + t) * KL_THREADS + tid];
                x[t][0] = v.x;
                x[t][1] = v.y;
                x[t][2] = v.z;
                x[t][3] = v.w;
            }
        } else {
            for (int t = 0; t < NT; t++)
                for (int e = 0; e < 4; e++) x[t][e] = 0;
            #pragma unroll
            for (int s = 0; s < DI / 32; s++) {
                uint32_t a[2][4], b[4];
                ldmatrix_x4(a[0], tile_at + swizzle<DI * 2>(warp * 16 + lane % 16, 4 * s + lane / 16));
                ldmatrix_x4(a[1], tile_at + swizzle<DI * 2>(warp * 16 + lane % 16, 4 * s + 2 + lane / 16));
                #pragma unroll
                for (int t = 0; t < NT; t++) {
                    ldmatrix_x4(b, q_at + swizzle<DI * 2>(t * 8 + lane % 8, 4 * s + lane / 8));
                    mma_16816(x[t], a[0], b);
                    mma_16816(x[t], a[1], b + 2);
                }
            }
        }
        if (!learn) {
            float s0 = 0, s1 = 0;
            #pragma unroll
            for (int t = 0; t < NT; t++) {
                float2 w = *(float2 *)(weight + t * 8 + quad * 2);
                s0 += w.x * fmaxf(x[t][0], 0.0f) + w.y * fmaxf(x[t][1], 0.0f);
                s1 += w.x * fmaxf(x[t][2], 0.0f) + w.y * fmaxf(x[t][3], 0.0f);
                if (HP <= 16 && keep) kept[(tile * NT + t) * KL_THREADS + tid] = make_float4(x[t][0], x[t][1], x[t][2], x[t][3]);
            }
            for (int o = 1; o < 4; o *= 2) { // the four lanes of a quad hold different heads
                s0 += __shfl_xor_sync(0xffffffffu, s0, o);
                s1 += __shfl_xor_sync(0xffffffffu, s1, o);
            }
            if (quad == 0 && j0 < n) score[j0] = s0;
            if (quad == 0 && j1 < n) score[j1] = s1;
            continue;
        }
        if (FORM == KL_ONLY) continue;

        // d_X^T, in bf16: to shared memory for d_Q, and in registers as the left operand of d_K
        uint32_t g[MT][4];
        float g0 = score[j0], g1 = score[j1];
        if (HP < 16) g[0][2] = g[0][3] = 0;
        #pragma unroll
        for (int t = 0; t < NT; t++) {
            float2 w = *(float2 *)(weight + t * 8 + quad * 2);
            dw[t][0] += g0 * fmaxf(x[t][0], 0.0f) + g1 * fmaxf(x[t][2], 0.0f);
            dw[t][1] += g0 * fmaxf(x[t][1], 0.0f) + g1 * fmaxf(x[t][3], 0.0f);
            uint32_t lo = pack_bf16(x[t][0] > 0 ? g0 * w.x : 0, x[t][1] > 0 ? g0 * w.y : 0);
            uint32_t hi = pack_bf16(x[t][2] > 0 ? g1 * w.x : 0, x[t][3] > 0 ? g1 * w.y : 0);
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
                ldmatrix_x4_trans(b, q_at + swizzle<DI * 2>(m * 16 + lane % 16, 2 * t + lane / 16));
                mma_16816(y[0], g[m], b);
                mma_16816(y[1], g[m], b + 2);
            }
            int odd = lane & 1, column = t * 16 + odd * 8 + quad / 2 * 4;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float *own = y[0] + 2 * half, *other = y[1] + 2 * half;
                float u = __shfl_xor_sync(0xffffffffu, odd ? own[0] : other[0], 1), v = __shfl_xor_sync(0xffffffffu, odd ? own[1] : other[1], 1);
                float4 four = odd ? make_float4(u, v, other[0], other[1]) : make_float4(own[0], own[1], u, v);
                if ((half ? j1 : j0) >= n) continue;
                int64_t at = half ? at1 : at0;
                if (FORM == KL_ATOMIC) add_4(c.d_k + (base + at) * DI + column, four);
                else if (FORM == KL_ROWS_FLOAT) store_4((float *)rows + at * DI + column, four);
                else store_4((bf16 *)rows + at * DI + column, four);
            }
        }

        // d_Q[heads, the warp's columns] += d_X [heads, 64 keys] K [64 keys, columns]; both operands lie key-major: transposed loads
        __syncthreads();
        #pragma unroll
        for (int s = 0; s < KL_TILE / 32; s++) {
            uint32_t b[DT][4];
            #pragma unroll
            for (int t = 0; t < DT; t++) ldmatrix_x4_trans(b[t], tile_at + swizzle<DI * 2>(s * 32 + lane, warp * DT + t));
            #pragma unroll
            for (int v = 0; v < 2; v++)
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    uint32_t a[4];
                    ldmatrix_x4_trans(a, g_at + swizzle<HQ * 2>(s * 32 + v * 16 + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
                    #pragma unroll
                    for (int t = 0; t < DT; t++) mma_16816(dq[m][t], a, b[t] + 2 * v);
                }
        }
    }
    if constexpr (FORM != KL_ONLY) {
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int t = 0; t < DT; t++) {
                int h = m * 16 + lane / 4;
                DQ *to = d_q + (i * c.HI + h) * DI + (warp * DT + t) * 8 + quad * 2;
                if (h < c.HI) add_2(to, dq[m][t][0], dq[m][t][1]);
                if (h + 8 < c.HI) add_2(to + 8 * DI, dq[m][t][2], dq[m][t][3]);
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
            c.d_w[i * c.HI + tid] += v;
        }
    }
}

// d_k[candidate] += the sum of its rows, a contiguous stretch of the list. One block a candidate: a row is read by DI*sizeof(R)/16 threads, many rows
// at a time (a key that all queries chose is one block's work), row r always by the same group and the groups added in order.
template <class R> __global__ static void rows_sum_kernel(float *d_k, const R *rows, const int32_t *start, int DI) {
    __shared__ float sums[KL_THREADS * 16 / sizeof(R)];
    constexpr int V = 16 / sizeof(R);
    int parts = DI / V, groups = KL_THREADS / parts, group = (int)threadIdx.x / parts, part = (int)threadIdx.x % parts;
    int from = start[blockIdx.x], to = start[blockIdx.x + 1];
    if (from == to) return;
    float v[V];
    for (int e = 0; e < V; e++) v[e] = 0;
    #pragma unroll 4
    for (int r = from + group; r < to; r += groups) {
        uint4 raw = *(const uint4 *)(rows + (int64_t)r * DI + part * V);
        R row[V];
        memcpy(row, &raw, 16);
        #pragma unroll
        for (int e = 0; e < V; e++) v[e] += (float)row[e];
    }
    for (int e = 0; e < V; e++) sums[group * DI + part * V + e] = v[e];
    __syncthreads();
    if ((int)threadIdx.x < DI) {
        float s = 0;
        for (int u = 0; u < groups; u++) s += sums[u * DI + threadIdx.x];
        d_k[(int64_t)blockIdx.x * DI + threadIdx.x] += s;
    }
}

// ---- the dense stage: every visible candidate is in the support
// X = Q K^T of a chunk of queries, d_Q = d_X K and d_K = d_X^T Q are matrix products for the library. Between them stands this: one block a
// query reads X [HI, n_cand], and overwrites it by d_X. V elements (16 bytes) a thread, heads four at a time in the second pass so that dI is
// read once for four. Only [lo, hi) is read: what lies outside may be anything, and becomes exactly 0.

enum { DENSE_THREADS = 256, DENSE_HEADS = 4, MAX_HEADS = 64 };

// x [n, HI, n_cand]; w, d_w [n, HI]; mass, score [n, n_cand] (score is scratch); visible [n] = (lo, hi); row_kl [n]. All point at the chunk.
template <class X, int V> __global__ static void __launch_bounds__(DENSE_THREADS)
dense_kl_kernel(X *x, const float *w, const float *mass, float *score, const int2 *visible, int n_cand, int HI, float *row_kl, float *d_w,
                float scale, float teachers, int learn) {
    __shared__ float shared[32], weight[MAX_HEADS], d_weight[DENSE_THREADS / 32][MAX_HEADS];
    typedef struct { alignas(V * sizeof(X)) X e[V]; } Pack;
    int64_t i = blockIdx.x;
    int lo = visible[i].x, hi = visible[i].y, tid = (int)threadIdx.x;
    float total = 0;
    x += i * HI * n_cand;
    mass += i * n_cand;
    score += i * n_cand;
    if (tid < HI) weight[tid] = w[i * HI + tid];
    for (int j = lo + tid; j < hi; j += DENSE_THREADS) total += mass[j];
    total = block_sum(total, shared);
    if (lo >= hi || total <= 0) lo = hi = 0; // nothing to learn: all of d_X is 0
    for (int at = lo / V * V + tid * V; at < hi; at += DENSE_THREADS * V) {
        float s[V];
        for (int e = 0; e < V; e++) s[e] = 0;
        #pragma unroll 4
        for (int h = 0; h < HI; h++) {
            Pack v = *(const Pack *)(x + (int64_t)h * n_cand + at);
            #pragma unroll
            for (int e = 0; e < V; e++) s[e] += weight[h] * fmaxf((float)v.e[e], 0.0f);
        }
        for (int e = 0; e < V; e++) score[at + e] = s[e];
    }
    __syncthreads();
    if (lo < hi) {
        float kl = scores_to_gradients(score + lo, mass + lo, hi - lo, total, scale, shared);
        if (tid == 0) row_kl[i] += kl / teachers;
    }
    if (!learn) return;
    __syncthreads();
    for (int h0 = 0; h0 < HI; h0 += DENSE_HEADS) {
        float sum[DENSE_HEADS] = {0, 0, 0, 0};
        for (int at = tid * V; at < n_cand; at += DENSE_THREADS * V) {
            int seen = at + V > lo && at < hi;
            float g[V];
            if (seen)
                for (int e = 0; e < V; e++) g[e] = score[at + e];
            #pragma unroll
            for (int u = 0; u < DENSE_HEADS; u++) {
                if (h0 + u >= HI) break;
                Pack *to = (Pack *)(x + (int64_t)(h0 + u) * n_cand + at), v;
                if (seen) v = *to;
                #pragma unroll
                for (int e = 0; e < V; e++) {
                    float y = seen && at + e >= lo && at + e < hi ? (float)v.e[e] : 0;
                    sum[u] += y > 0 ? g[e] * y : 0;
                    v.e[e] = (X)(y > 0 ? g[e] * weight[h0 + u] : 0.0f);
                }
                *to = v;
            }
        }
        #pragma unroll
        for (int u = 0; u < DENSE_HEADS; u++) {
            float s = warp_sum(sum[u]);
            if (h0 + u < HI && tid % 32 == 0) d_weight[tid / 32][h0 + u] = s;
        }
    }
    __syncthreads();
    if (tid < HI && lo < hi) {
        float s = 0;
        for (int u = 0; u < DENSE_THREADS / 32; u++) s += d_weight[u][tid];
        d_w[i * HI + tid] += s;
    }
}

// ---- launchers

// Queries i0..i0+n. The sort is stable: a candidate's pairs stay in the order of the queries.
static void pair_lists_build(PairLists *p, IndexerKL c, int B, int i0, int n) {
    int pairs = n * c.k, candidates = B * c.n_cand;
    pairs_kernel<<<blocks_for(pairs, 256), 256>>>(c.sel + (int64_t)i0 * c.k, p->key, p->pair, i0, c.T, c.k, c.n_cand, (uint32_t)candidates, pairs);
    pair_lists_sort(p, pairs, candidates);
}

// Kernel 1 for queries i0..i0+n; lists are those of the chunk.
template <class X, class DQ> static void indexer_kl_plain(IndexerKL c, const X *q, const X *k, DQ *d_q, float *dots, const PairLists *lists, int B, int i0, int n) {
    indexer_kl_kernel1<X, DQ><<<(unsigned)n, 256, (size_t)c.k * sizeof(float)>>>(c, q, k, d_q, dots, i0);
    if (d_q) key_gather_kernel1<X><<<(unsigned)(B * c.n_cand), 128>>>(c, q, dots, lists->pair2, lists->start, i0);
    CUDA_CHECK(cudaGetLastError());
}

// Kernel 2 for queries i0..i0+n. Returns 0 when there is no instance for this size, or it does not fit in shared memory: then kernel 1 has to do.
template <int HP, int DI, int FORM, class DQ> static int fused_launch(IndexerKL c, const bf16 *q, const bf16 *k, DQ *d_q,
    const int32_t *slot_of, void *rows, int keep, int i0, int n) {
    size_t bytes = indexer_kl_bytes(HP, DI, c.k, keep);
    if (bytes > 220 * 1024 || (keep && HP > 16)) return 0;
    CUDA_CHECK(cudaFuncSetAttribute(indexer_kl_kernel2<HP, DI, FORM, DQ>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    indexer_kl_kernel2<HP, DI, FORM, DQ><<<(unsigned)n, KL_THREADS, bytes>>>(c, q, k, d_q, slot_of, rows, keep, i0);
    CUDA_CHECK(cudaGetLastError());
    return 1;
}
template <int DI, int FORM, class DQ> static int fused_heads(IndexerKL c, const bf16 *q, const bf16 *k, DQ *d_q,
    const int32_t *slot_of, void *rows, int keep, int i0, int n) {
    if (c.HI <= 8) return fused_launch<8, DI, FORM, DQ>(c, q, k, d_q, slot_of, rows, keep, i0, n);
    if (c.HI <= 16) return fused_launch<16, DI, FORM, DQ>(c, q, k, d_q, slot_of, rows, keep, i0, n);
    if (c.HI <= 32) return fused_launch<32, DI, FORM, DQ>(c, q, k, d_q, slot_of, rows, keep, i0, n);
    return c.HI <= 64 ? fused_launch<64, DI, FORM, DQ>(c, q, k, d_q, slot_of, rows, keep, i0, n) : 0;
}
template <int FORM, class DQ> static int indexer_kl_fused(IndexerKL c, const bf16 *q, const bf16 *k, DQ *d_q,
    const int32_t *slot_of, void *rows, int keep, int i0, int n) {
    if (c.DI == 32) return fused_heads<32, FORM, DQ>(c, q, k, d_q, slot_of, rows, keep, i0, n);
    if (c.DI == 64) return fused_heads<64, FORM, DQ>(c, q, k, d_q, slot_of, rows, keep, i0, n);
    return c.DI == 128 ? fused_heads<128, FORM, DQ>(c, q, k, d_q, slot_of, rows, keep, i0, n) : 0;
}
// The "rows" form for N queries, in chunks that the buffer rows (of type R) and the lists hold.
template <int FORM, class R, class DQ> static int indexer_kl_rows(IndexerKL c, const bf16 *q, const bf16 *k, DQ *d_q, PairLists *lists, R *rows,
    int B, int N, int chunk) {
    for (int i0 = 0; i0 < N; i0 += chunk) {
        int n = std::min(chunk, N - i0);
        pair_lists_build(lists, c, B, i0, n);
        if (!indexer_kl_fused<FORM, DQ>(c, q, k, d_q, lists->slot_of, rows, 0, i0, n)) return 0;
        rows_sum_kernel<R><<<(unsigned)(B * c.n_cand), KL_THREADS>>>(c.d_k, rows, lists->start, c.DI);
        CUDA_CHECK(cudaGetLastError());
    }
    return 1;
}

// n queries. Whole 16-byte packs need rows that start on one.
template <class X> static void dense_kl(X *x, const float *w, const float *mass, float *score, const int2 *visible, int n_cand, int HI, float *row_kl, float *d_w,
                                        float scale, float teachers, int learn, int n) {
    constexpr int V = 16 / sizeof(X);
    auto kernel = n_cand % V == 0 ? dense_kl_kernel<X, V> : dense_kl_kernel<X, 1>;
    kernel<<<(unsigned)n, DENSE_THREADS>>>(x, w, mass, score, visible, n_cand, HI, row_kl, d_w, scale, teachers, learn);
    CUDA_CHECK(cudaGetLastError());
}

// ---- checks

enum { GUARD = 256 }; // elements of NaN before and behind every array of a check
template <class X> static X *guarded(const X *host, int64_t n) {
    X *p = device_poison<X>(n + 2 * GUARD) + GUARD;
    CUDA_CHECK(cudaMemcpy(p, host, (size_t)n * sizeof(X), cudaMemcpyHostToDevice));
    return p;
}
// Frees a guarded array; counts the guard's bytes that somebody wrote.
template <class X> static int guarded_free(X *p, int64_t n) {
    int bad = 0;
    unsigned char *all = (unsigned char *)to_host(p - GUARD, n + 2 * GUARD);
    for (int64_t i = 0; i < (int64_t)(GUARD * sizeof(X)); i++) bad += (all[i] != 0xff) + (all[i + (n + GUARD) * (int64_t)sizeof(X)] != 0xff);
    free(all);
    CUDA_CHECK(cudaFree(p - GUARD));
    return bad;
}

// What a version added to an output that started at base, against what it should have: error over limit, and infinity below cosine 0.9995.
template <class X> static double added_error(const X *out, const X *base, const double *want, int64_t n, double limit) {
    double d = 0, s = 0, dot = 0, got = 0;
    for (int64_t i = 0; i < n; i++) {
        double v = (double)(float)out[i] - (double)(float)base[i];
        d += (v - want[i]) * (v - want[i]);
        s += want[i] * want[i];
        dot += v * want[i];
        got += v * v;
    }
    if (!(d >= 0)) return INFINITY; // a NaN
    if (s > 0 && !(dot / sqrt(s * got) > 0.9995)) return INFINITY;
    return sqrt(d) / (sqrt(s) + 1e-30) / limit;
}

// One case: host operands, what each output starts from, and what should be added to it.
typedef struct {
    int B, N; IndexerKL c;
    float *qf, *kf, *base_kl, *base_w, *base_q, *base_k; bf16 *q, *k, *base_q16;
    double *row_kl, *d_w, *d_q, *d_k;
} Case;
// What a version left behind.
typedef struct { float *row_kl, *d_w, *d_k; void *d_q; int stray, ran; } Output;

static float *host_normal(int64_t n, uint64_t seed, uint64_t stream, float scale) {
    float *p = (float *)malloc((size_t)n * sizeof(float));
    for (int64_t i = 0; i < n; i++) p[i] = scale * rng_normal(seed, stream, (uint64_t)i);
    return p;
}

// m of n candidates for a query, ascending; the first always among them: a key that everybody wants.
static void choose(int32_t *sel, int k, int m, int n, uint64_t seed, uint64_t stream) {
    int have = 0;
    for (int e = 0; e < n && have < m; e++)
        if (e == 0 || rng_uniform(seed, stream, (uint64_t)e) * (float)(n - e) < (float)(m - have)) sel[have++] = e;
    for (int j = have; j < k; j++) sel[j] = -1;
}

static Case case_new(uint64_t seed, int B, int T, int n_cand, int HI, int DI, int k) {
    Case s;
    int N = B * T;
    int64_t nq = (int64_t)N * HI * DI, nk = (int64_t)B * n_cand * DI, places = (int64_t)N * k;
    memset(&s, 0, sizeof s);
    s.B = B;
    s.N = N;
    s.qf = host_normal(nq, seed, 1, 1.0f);
    s.kf = host_normal(nk, seed, 2, 1.5f / sqrtf((float)DI));
    s.q = (bf16 *)malloc((size_t)nq * 2);
    s.k = (bf16 *)malloc((size_t)nk * 2);
    for (int64_t i = 0; i < nq; i++) s.qf[i] = (float)(s.q[i] = (bf16)s.qf[i]);
    for (int64_t i = 0; i < nk; i++) s.kf[i] = (float)(s.k[i] = (bf16)s.kf[i]);
    float *w = host_normal((int64_t)N * HI, seed, 3, 1 / sqrtf((float)HI)), *mass = (float *)malloc((size_t)places * sizeof(float));
    int32_t *sel = (int32_t *)malloc((size_t)places * sizeof(int32_t));
    for (int i = 0; i < N; i++) {
        int most = std::min(k, n_cand), any = (int)(rng_u64(seed, 4, (uint64_t)i) % (uint64_t)(most + 1));
        int m = i == 0 ? 0 : i == 1 ? 1 : i == 3 ? std::min(most, k / 2 + 1) : i % 5 == 4 ? any : most;
        choose(sel + (int64_t)i * k, k, m, n_cand, seed, 1000 + (uint64_t)i);
        for (int j = 0; j < k; j++) {
            float v = rng_uniform(seed, 5, (uint64_t)(i * (int64_t)k + j));
            mass[(int64_t)i * k + j] = sel[(int64_t)i * k + j] < 0 ? NAN : i == 2 || v < 0.1f ? 0 : 4 * v * v;
        }
        for (int h = 0; h < HI; h++)
            if (i == 5) w[i * HI + h] = 0;
            else if (i == 6) w[i * HI + h] = -fabsf(w[i * HI + h]);
    }
    IndexerKL c = {T, n_cand, HI, DI, k, w, sel, mass, NULL, NULL, NULL, 0.75f, 2.0f};
    s.c = c;
    s.base_kl = host_normal(N, seed, 6, 0.1f);
    s.base_w = host_normal((int64_t)N * HI, seed, 7, 1e-3f);
    s.base_q = host_normal(nq, seed, 8, 1e-3f);
    s.base_k = host_normal(nk, seed, 9, 1e-3f);
    s.base_q16 = (bf16 *)malloc((size_t)nq * 2);
    for (int64_t i = 0; i < nq; i++) s.base_q16[i] = (bf16)s.base_q[i];
    s.row_kl = (double *)calloc((size_t)N, 8);
    s.d_w = (double *)calloc((size_t)N * (size_t)HI, 8);
    s.d_q = (double *)calloc((size_t)nq, 8);
    s.d_k = (double *)calloc((size_t)nk, 8);
    indexer_kl_cpu(c, s.qf, s.kf, N, s.row_kl, s.d_w, s.d_q, s.d_k);
    return s;
}
static void case_free(Case *s) {
    const void *all[] = {s->qf, s->kf, s->q, s->k, s->c.w, s->c.sel, s->c.mass, s->base_kl, s->base_w, s->base_q, s->base_k, s->base_q16,
                         s->row_kl, s->d_w, s->d_q, s->d_k};
    for (const void *one : all) free((void *)one);
}

enum { PLAIN_FLOAT, PLAIN_BF16, LOSS, ATOMIC, ATOMIC_KEEP, ROWS_BF16, ROWS_FLOAT, VERSIONS };
static const char *version_name[VERSIONS] = {"1 plain float", "1 plain bf16", "2 loss only", "2 atomic", "2 atomic, X kept", "2 rows bf16", "2 rows float"};

// Runs a version on guarded copies of the operands, scratch full of NaN. X: type of q and k; DQ: type of d_q.
template <class X, class DQ> static Output case_run(const Case *s, const X *q_host, const X *k_host, const DQ *base_q, int version, int chunk) {
    IndexerKL c = s->c;
    int N = s->N;
    int64_t nq = (int64_t)N * c.HI * c.DI, nk = (int64_t)s->B * c.n_cand * c.DI, places = (int64_t)N * c.k, pairs = (int64_t)chunk * c.k;
    X *q = guarded(q_host, nq), *k = guarded(k_host, nk);
    DQ *d_q = guarded(base_q, nq);
    float *w = guarded(s->c.w, (int64_t)N * c.HI), *mass = guarded(s->c.mass, places);
    int32_t *sel = guarded(s->c.sel, places);
    c.w = w;
    c.mass = mass;
    c.sel = sel;
    c.row_kl = guarded(s->base_kl, N);
    c.d_w = guarded(s->base_w, (int64_t)N * c.HI);
    c.d_k = guarded(s->base_k, nk);
    PairLists lists = pair_lists_new(pairs, (int64_t)s->B * c.n_cand);
    float *scratch = device_poison<float>(std::max(pairs * c.HI, pairs * c.DI) + 2 * GUARD) + GUARD;
    Output o;
    o.ran = 1;
    if constexpr (sizeof(X) == 2 && sizeof(DQ) == 4) {
        if (version == LOSS) o.ran = indexer_kl_fused<KL_ONLY, float>(c, q, k, d_q, NULL, NULL, 0, 0, N);
        else if (version == ROWS_FLOAT) o.ran = indexer_kl_rows<KL_ROWS_FLOAT, float, float>(c, q, k, d_q, &lists, scratch, s->B, N, chunk);
        else o.ran = indexer_kl_fused<KL_ATOMIC, float>(c, q, k, d_q, NULL, NULL, version == ATOMIC_KEEP, 0, N);
    } else if constexpr (sizeof(X) == 2) {
        if (version == ROWS_BF16) o.ran = indexer_kl_rows<KL_ROWS_BF16, bf16, bf16>(c, q, k, d_q, &lists, (bf16 *)scratch, s->B, N, chunk);
    }
    if (version == PLAIN_FLOAT || version == PLAIN_BF16)
        for (int i0 = 0; i0 < N; i0 += chunk) {
            int n = std::min(chunk, N - i0);
            pair_lists_build(&lists, c, s->B, i0, n);
            indexer_kl_plain<X, DQ>(c, q, k, d_q, scratch, &lists, s->B, i0, n);
        }
    CUDA_CHECK(cudaDeviceSynchronize());
    o.row_kl = to_host(c.row_kl, N);
    o.d_w = to_host(c.d_w, (int64_t)N * c.HI);
    o.d_k = to_host(c.d_k, nk);
    o.d_q = to_host(d_q, nq);
    o.stray = guarded_free(q, nq) + guarded_free(k, nk) + guarded_free(d_q, nq) + guarded_free(w, (int64_t)N * c.HI) + guarded_free(mass, places) +
              guarded_free(sel, places) + guarded_free(c.row_kl, N) + guarded_free(c.d_w, (int64_t)N * c.HI) + guarded_free(c.d_k, nk) +
              guarded_free(scratch, std::max(pairs * c.HI, pairs * c.DI));
    pair_lists_free(&lists);
    return o;
}
static void output_free(Output *o) {
    free(o->row_kl);
    free(o->d_w);
    free(o->d_k);
    free(o->d_q);
}
static Output version_run(const Case *s, int version) {
    int part = std::max(1, s->N / 3 + 1);
    if (version == PLAIN_FLOAT) return case_run<float, float>(s, s->qf, s->kf, s->base_q, version, part);
    if (version == PLAIN_BF16) return case_run<bf16, bf16>(s, s->q, s->k, s->base_q16, version, s->N);
    if (version == ROWS_BF16) return case_run<bf16, bf16>(s, s->q, s->k, s->base_q16, version, part);
    return case_run<bf16, float>(s, s->q, s->k, s->base_q, version, s->N);
}

static void check_case(uint64_t seed, int B, int T, int n_cand, int HI, int DI, int k) {
    Case s = case_new(seed, B, T, n_cand, HI, DI, k);
    int64_t nq = (int64_t)s.N * HI * DI, nk = (int64_t)B * n_cand * DI, nw = (int64_t)s.N * HI;
    Output atomic;
    memset(&atomic, 0, sizeof atomic);
    for (int version = 0; version < VERSIONS; version++) {
        char name[128];
        snprintf(name, sizeof name, "%-16s B=%d T=%d n_cand=%d HI=%d DI=%d k=%d", version_name[version], B, T, n_cand, HI, DI, k);
        Output o = version_run(&s, version);
        int fast = DI == 32 || DI == 64 || DI == 128, plain = version == PLAIN_FLOAT || version == PLAIN_BF16;
        int half_q = version == PLAIN_BF16 || version == ROWS_BF16;
        if (!o.ran) {
            if (fast && (version != ATOMIC_KEEP || HI <= 16)) check(0, name, NAN); // all others have an instance
            output_free(&o);
            continue;
        }
        double limit = plain ? 1e-5 : 1.5e-2, e[4] = {added_error(o.row_kl, s.base_kl, s.row_kl, s.N, plain ? 1e-5 : 1e-3), 0, 0, 0};
        if (version == LOSS) { // the gradients must not have been touched
            e[1] = memcmp(o.d_w, s.base_w, (size_t)nw * 4) ? INFINITY : 0;
            e[2] = memcmp(o.d_q, s.base_q, (size_t)nq * 4) ? INFINITY : 0;
            e[3] = memcmp(o.d_k, s.base_k, (size_t)nk * 4) ? INFINITY : 0;
        } else {
            e[1] = added_error(o.d_w, s.base_w, s.d_w, nw, limit);
            e[2] = half_q ? added_error((bf16 *)o.d_q, s.base_q16, s.d_q, nq, 1.5e-2) : added_error((float *)o.d_q, s.base_q, s.d_q, nq, limit);
            e[3] = added_error(o.d_k, s.base_k, s.d_k, nk, limit);
        }
        double worst = std::max(std::max(e[0], e[1]), std::max(e[2], e[3]));
        int64_t touched = 0; // d_k that should not have moved
        for (int64_t i = 0; i < nk; i++) touched += s.d_k[i] == 0 && o.d_k[i] != s.base_k[i];
        if (!check(worst < 1 && !o.stray && !touched, name, worst))
            printf("     error over limit: row_kl %.3g d_w %.3g d_q %.3g d_k %.3g; %d stray bytes, %lld keys moved\n",
                   e[0], e[1], e[2], e[3], o.stray, (long long)touched);
        if (version == ATOMIC) atomic = o;
        else if (version == ATOMIC_KEEP) {
            int differ = memcmp(o.row_kl, atomic.row_kl, (size_t)s.N * 4) || memcmp(o.d_w, atomic.d_w, (size_t)nw * 4) ||
                         memcmp(o.d_q, atomic.d_q, (size_t)nq * 4);
            check(!differ, "                 X taken again has the bits of X kept", differ);
        } else if (!(version == LOSS)) {
            Output again = version_run(&s, version);
            int differ = memcmp(o.row_kl, again.row_kl, (size_t)s.N * 4) || memcmp(o.d_w, again.d_w, (size_t)nw * 4) ||
                         memcmp(o.d_q, again.d_q, (size_t)nq * (half_q ? 2 : 4)) || memcmp(o.d_k, again.d_k, (size_t)nk * 4);
            if (differ) check(0, "                 bit-equal on repeat", differ);
            output_free(&again);
        }
        if (version != ATOMIC) output_free(&o);
    }
    output_free(&atomic);
    case_free(&s);
}

// The dense stage's middle: n queries with ranges [lo, hi) of every kind; what lies outside is NaN in X, mass and score.
template <class X> static void check_dense(uint64_t seed, int n, int n_cand, int HI) {
    int64_t nx = (int64_t)n * HI * n_cand, nm = (int64_t)n * n_cand;
    X *x = (X *)malloc((size_t)nx * sizeof(X));
    float *mass = (float *)malloc((size_t)nm * sizeof(float)), *w = host_normal((int64_t)n * HI, seed, 3, 1 / sqrtf((float)HI));
    float *base_kl = host_normal(n, seed, 6, 0.1f), *base_w = host_normal((int64_t)n * HI, seed, 7, 1e-3f);
    int2 *visible = (int2 *)malloc((size_t)n * sizeof(int2));
    double *want_x = (double *)calloc((size_t)nx, 8), *want_kl = (double *)calloc((size_t)n, 8), *want_w = (double *)calloc((size_t)n * (size_t)HI, 8);
    for (int i = 0; i < n; i++) {
        int lo = i % 3 == 2 ? (int)(rng_u64(seed, 10, (uint64_t)i) % (uint64_t)n_cand) : 0, any = (int)(rng_u64(seed, 11, (uint64_t)i) % (uint64_t)(n_cand - lo + 1));
        int hi = i == 0 ? lo : i == 1 ? 1 : i == 3 ? n_cand : lo + any, v = hi - lo;
        double *row = (double *)malloc(sizeof(double) * (size_t)(HI * v + 1)), *m = (double *)malloc(sizeof(double) * (size_t)(v + 1)), kl = 0;
        visible[i] = make_int2(lo, hi);
        for (int j = 0; j < n_cand; j++) {
            int in = j >= lo && j < hi;
            float u = rng_uniform(seed, 12, (uint64_t)(i * (int64_t)n_cand + j));
            mass[(int64_t)i * n_cand + j] = !in ? NAN : i == 4 || u < 0.1f ? 0 : u * u;
            if (in) m[j - lo] = mass[(int64_t)i * n_cand + j];
            for (int h = 0; h < HI; h++) {
                int64_t at = ((int64_t)i * HI + h) * n_cand + j;
                x[at] = (X)(in ? 1.5f * rng_normal(seed, 13, (uint64_t)at) : NAN);
                if (in) row[(int64_t)h * v + j - lo] = (double)(float)x[at];
            }
        }
        if (kl_row_cpu(row, w + i * HI, m, HI, v, 0.75, &kl, want_w + (int64_t)i * HI)) {
            want_kl[i] = kl / 2;
            for (int h = 0; h < HI; h++)
                for (int j = 0; j < v; j++) want_x[((int64_t)i * HI + h) * n_cand + lo + j] = row[(int64_t)h * v + j];
        }
        free(row);
        free(m);
    }
    X *d_x = guarded(x, nx);
    float *d_mass = guarded(mass, nm), *d_weight = guarded(w, (int64_t)n * HI), *d_kl = guarded(base_kl, n), *d_w = guarded(base_w, (int64_t)n * HI);
    float *score = device_poison<float>(nm + 2 * GUARD) + GUARD;
    int2 *d_visible = guarded(visible, n);
    dense_kl<X>(d_x, d_weight, d_mass, score, d_visible, n_cand, HI, d_kl, d_w, 0.75f, 2.0f, 1, n);
    CUDA_CHECK(cudaDeviceSynchronize());
    X *got_x = to_host(d_x, nx), *zero = (X *)calloc((size_t)nx, sizeof(X));
    float *got_kl = to_host(d_kl, n), *got_w = to_host(d_w, (int64_t)n * HI);
    double e[3], worst;
    e[0] = added_error(got_kl, base_kl, want_kl, n, 1e-5);
    e[1] = added_error(got_w, base_w, want_w, (int64_t)n * HI, 1e-5);
    e[2] = added_error(got_x, zero, want_x, nx, sizeof(X) == 2 ? 5e-3 : 1e-5);
    worst = std::max(std::max(e[0], e[1]), e[2]);
    int64_t not_zero = 0;
    for (int64_t i = 0; i < nx; i++) not_zero += want_x[i] == 0 && !((float)got_x[i] == 0);
    int stray = guarded_free(d_x, nx) + guarded_free(d_mass, nm) + guarded_free(d_weight, (int64_t)n * HI) + guarded_free(d_kl, n) +
                guarded_free(d_w, (int64_t)n * HI) + guarded_free(score, nm) + guarded_free(d_visible, n);
    char name[128];
    snprintf(name, sizeof name, "dense %-10s n=%d n_cand=%d HI=%d", sizeof(X) == 2 ? "bf16" : "float", n, n_cand, HI);
    if (!check(worst < 1 && !stray && !not_zero, name, worst))
        printf("     error over limit: row_kl %.3g d_w %.3g d_X %.3g; %d stray bytes, %lld not zero\n", e[0], e[1], e[2], stray, (long long)not_zero);
    const void *all[] = {x, mass, w, base_kl, base_w, visible, want_x, want_kl, want_w, got_x, zero, got_kl, got_w};
    for (const void *one : all) free((void *)one);
}

// ---- timing

// k of the t+1 candidates that query t sees, one from each of k equal stretches; all of them while there are no more than k.
__global__ static void spread_sel_kernel(int32_t *sel, int k, int64_t n, uint64_t seed) {
    for (int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; x < n; x += (int64_t)gridDim.x * blockDim.x) {
        int64_t t = x / k, j = x % k, v = t + 1, from = j * v / k, to = (j + 1) * v / k;
        sel[x] = (int32_t)(v <= k ? j < v ? j : -1 : from + (int64_t)(rng_u64(seed, 20, (uint64_t)x) % (uint64_t)(to - from)));
    }
}
__global__ static void uniform_kernel(float *x, int64_t n, uint64_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) x[i] = rng_uniform(seed, 21, (uint64_t)i);
}
template <class X> static X *device_zero(int64_t n) {
    X *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(X)));
    CUDA_CHECK(cudaMemset(p, 0, (size_t)n * sizeof(X)));
    return p;
}

// products: of the three, how many the version takes. Pairs are those that exist: fewer than N*k, as early queries see fewer than k.
static void print_time(const char *name, IndexerKL c, int queries, double pairs, int products, Timing t) {
    double flops = 2.0 * products * pairs * c.HI * c.DI, bytes = (products == 1 ? 1 : 2) * pairs * c.DI * 2;
    printf("%-20s N=%-5d HI=%-2d DI=%-3d k=%-4d %8.3f ms (%.3f..%.3f) %7.1f TFLOP/s %7.0f GB/s gathered\n",
           name, queries, c.HI, c.DI, c.k, t.median, t.lo, t.hi, flops / t.median * 1e-9, bytes / t.median * 1e-6);
}

static void time_case(uint64_t seed, int T, int HI, int DI, int k) {
    const int64_t space = (int64_t)2 << 30; // bytes of rows at once
    int64_t nq = (int64_t)T * HI * DI, nk = (int64_t)T * DI, places = (int64_t)T * k;
    bf16 *q = device_normal<bf16>(nq, seed, 1, 1.0f), *keys = device_normal<bf16>(nk, seed, 2, 1.5f / sqrtf((float)DI)), *d_q16 = device_zero<bf16>(nq);
    float *w = device_normal<float>((int64_t)T * HI, seed, 3, 1 / sqrtf((float)HI)), *mass = device_zero<float>(places), *d_q = device_zero<float>(nq);
    int32_t *sel = device_zero<int32_t>(places);
    spread_sel_kernel<<<1024, 256>>>(sel, k, places, seed);
    uniform_kernel<<<1024, 256>>>(mass, places, seed);
    CUDA_CHECK(cudaGetLastError());
    IndexerKL c = {T, T, HI, DI, k, w, sel, mass, device_zero<float>(T), device_zero<float>((int64_t)T * HI), device_zero<float>(nk), 1.0f / (float)T, 1.0f};
    double pairs = (double)places - (double)k * (k - 1) / 2; // query t lacks k-1-t of them
    int few = 1024; // queries of the plain version
    int chunk16 = (int)std::min((int64_t)T, space / (2 * k * DI)), chunk32 = (int)std::min((int64_t)T, space / (4 * k * DI));
    PairLists lists = pair_lists_new((int64_t)std::max(chunk16, few) * k, T);
    void *rows = device_poison<char>(std::min(space, places * DI * 4));
    float *dots = device_poison<float>((int64_t)few * HI * k);
    pair_lists_build(&lists, c, 1, T - few, few);
    print_time("1 plain bf16", c, few, (double)few * k, 3, time_kernel(2, [&] { indexer_kl_plain<bf16, float>(c, q, keys, d_q, dots, &lists, 1, T - few, few); }));
    print_time("2 loss only", c, T, pairs, 1, time_kernel(5, [&] { indexer_kl_fused<KL_ONLY, float>(c, q, keys, d_q, NULL, NULL, 0, 0, T); }));
    print_time("2 atomic", c, T, pairs, 3, time_kernel(5, [&] { indexer_kl_fused<KL_ATOMIC, float>(c, q, keys, d_q, NULL, NULL, 0, 0, T); }));
    if (indexer_kl_fused<KL_ATOMIC, float>(c, q, keys, d_q, NULL, NULL, 1, 0, 1))
        print_time("2 atomic, X kept", c, T, pairs, 3, time_kernel(5, [&] { indexer_kl_fused<KL_ATOMIC, float>(c, q, keys, d_q, NULL, NULL, 1, 0, T); }));
    print_time("2 rows bf16", c, T, pairs, 3,
               time_kernel(5, [&] { indexer_kl_rows<KL_ROWS_BF16, bf16, bf16>(c, q, keys, d_q16, &lists, (bf16 *)rows, 1, T, chunk16); }));
    print_time("2 rows float", c, T, pairs, 3,
               time_kernel(5, [&] { indexer_kl_rows<KL_ROWS_FLOAT, float, float>(c, q, keys, d_q, &lists, (float *)rows, 1, T, chunk32); }));
    pair_lists_build(&lists, c, 1, 0, chunk16);
    Timing sort = time_kernel(5, [&] { pair_lists_build(&lists, c, 1, 0, chunk16); });
    indexer_kl_fused<KL_ROWS_BF16, bf16>(c, q, keys, d_q16, lists.slot_of, rows, 0, 0, chunk16);
    Timing sum = time_kernel(5, [&] { rows_sum_kernel<bf16><<<(unsigned)T, KL_THREADS>>>(c.d_k, (const bf16 *)rows, lists.start, DI); });
    printf("    of \"rows bf16\", a chunk of %d queries: lists %.3f ms, sum of rows %.3f ms (%.0f GB/s)\n", chunk16, sort.median, sum.median,
           ((double)chunk16 * k) * DI * 2 / sum.median * 1e-6);
    const void *all[] = {q, keys, d_q16, w, mass, d_q, sel, c.row_kl, c.d_w, c.d_k, rows, dots};
    for (const void *one : all) CUDA_CHECK(cudaFree((void *)one));
    pair_lists_free(&lists);
}

// The dense middle for the last n queries of a sequence of T tokens.
template <class X> static void time_dense(uint64_t seed, int n, int T, int HI) {
    int64_t nx = (int64_t)n * HI * T, nm = (int64_t)n * T;
    X *x = device_normal<X>(nx, seed, 1, 1.5f);
    float *w = device_normal<float>((int64_t)n * HI, seed, 3, 1 / sqrtf((float)HI)), *mass = device_zero<float>(nm), *score = device_poison<float>(nm);
    float *row_kl = device_zero<float>(n), *d_w = device_zero<float>((int64_t)n * HI);
    int2 *host = (int2 *)malloc((size_t)n * sizeof(int2)), *visible = device_zero<int2>(n);
    uniform_kernel<<<1024, 256>>>(mass, nm, seed);
    for (int i = 0; i < n; i++) host[i] = make_int2(0, T - n + i + 1);
    CUDA_CHECK(cudaMemcpy(visible, host, (size_t)n * sizeof(int2), cudaMemcpyHostToDevice));
    Timing t = time_kernel(5, [&] { dense_kl<X>(x, w, mass, score, visible, T, HI, row_kl, d_w, 1.0f / (float)T, 1.0f, 1, n); });
    printf("dense %-14s n=%-5d n_cand=%d HI=%-2d %8.3f ms (%.3f..%.3f) %7.0f GB/s (X read twice, written once)\n",
           sizeof(X) == 2 ? "bf16" : "float", n, T, HI, t.median, t.lo, t.hi, 3.0 * (double)nx * sizeof(X) / t.median * 1e-6);
    const void *all[] = {x, w, mass, score, row_kl, d_w, visible};
    for (const void *one : all) CUDA_CHECK(cudaFree((void *)one));
    free(host);
}

int main(int argc, char **argv) {
    uint64_t seed = seed_of(argc, argv);
    int small = argc > 2 && !strcmp(argv[2], "small");
    // B, T, n_cand, HI, DI, k: n_cand below and above k, one and several tiles, heads that fill their tile and that do not
    static const int cases[][6] = {
        {1, 9, 50, 1, 24, 7},    {2, 11, 90, 3, 24, 65},  {1, 9, 40, 4, 32, 1},    {2, 10, 30, 1, 32, 7},    {1, 12, 70, 4, 32, 64},  {2, 13, 90, 3, 32, 65},
        {1, 9, 333, 8, 32, 200}, {2, 9, 310, 16, 32, 300}, {1, 9, 80, 64, 32, 65}, {2, 9, 64, 1, 64, 64},    {1, 10, 100, 3, 64, 65}, {2, 9, 150, 8, 64, 200},
        {1, 9, 400, 4, 64, 300}, {2, 9, 30, 16, 64, 7},   {1, 9, 222, 21, 64, 200}, {1, 8, 90, 64, 64, 64},  {1, 9, 20, 1, 128, 1},   {2, 9, 500, 3, 128, 65},
        {1, 9, 210, 8, 128, 200}, {2, 8, 400, 16, 128, 300}, {1, 8, 100, 33, 128, 65}, {2, 7, 300, 64, 128, 200}, {1, 7, 350, 64, 128, 300}, {1, 9, 77, 32, 128, 64}};
    for (const int *x : cases) check_case(seed, x[0], x[1], x[2], x[3], x[4], x[5]);
    static const int widths[] = {1, 7, 64, 72, 200, 513, 2056}, heads[] = {1, 4, 6, 16, 64};
    for (int width : widths)
        for (int h : heads) {
            check_dense<bf16>(seed, 9, width, h);
            check_dense<float>(seed, 9, width, h);
        }
    if (!small) {
        time_case(seed, 16384, 4, 32, 256);
        time_case(seed, 16384, 8, 64, 1024);
        time_case(seed, 16384, 16, 128, 2048);
        time_case(seed, 16384, 64, 128, 2048);
        time_dense<bf16>(seed, 512, 16384, 4);
        time_dense<bf16>(seed, 512, 16384, 16);
        time_dense<bf16>(seed, 512, 16384, 64);
        time_dense<float>(seed, 512, 16384, 16);
    }
    return check_summary();
}
