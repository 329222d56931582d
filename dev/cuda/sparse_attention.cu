// Attention over selected rows, forward and backward: the core of all sparse layers.
//
// N = B*T queries of H heads. A sequence has n_rows KV rows of R floats; G key-value heads lie in a row: head h reads group g = h / (H/G), whose
// key is row[g*Dk .. +Dk) and whose value is row[v_off + g*Dv .. +Dv). One layout serves MLA (G=1, v_off=0: the value is the head of the key),
// CSA (G=1, v_off=0, Dv=Dk) and grouped queries (R=2*G*D, v_off=G*D). place[i, 0..count[i]) names the rows that query i attends to, no row twice.
//   logit[h,j] = scale q[h] . key(j)        P = softmax over j, with exp(sinks[h]) added to the denominator      lse = log of the denominator
//   oc[h]      = sum_j P[h,j] value(j)                                                               count 0: oc = 0, lse = -inf or the sink
// Backward, with delta[h] = d_oc[h] . oc[h] given:
//   P = exp(logit - lse)      dP[h,j] = d_oc[h] . value(j)      dS = scale P (dP - delta)           d_qrow[h]  = sum_j dS[h,j] key(j)
//   psum[j] = sum_h P[h,j], what the indexer is taught          d_rows[place j] += sum_h dS[h,j] q[h] to the key, sum_h P[h,j] d_oc[h] to the value
//
// All but the last line belongs to one query. The last line is the wall: k rows of R floats a query to be added where other queries add too.
//
// kernel 1  plain, any size, float or bf16: writes P and dS down; d_rows by walking each row's list of (query, place)
// kernel 2  tensor cores (sm_80 and later), one CTA a query and up to 64 of its heads; three ways to d_rows:
//           "atomic":          red.global.add.v4.f32 (sm_90; four atomicAdd before), the order of a sum left to chance
//           "rows bf16/float": every (query, place) writes its row where the list sorted by KV row has it; a second kernel sums in that order
//           "psum":            no gradient, only psum: the teacher in a forward pass
//
// Run: sparse_attention [seed [small]]; small: checks only.
#include "pair_lists.h"

// What all versions need beside the tensors, whose type differs: qrow, d_qrow [N, H, Dk], rows [B, n_rows, R], oc, d_oc [N, H, Dv].
typedef struct {
    int T, H, G, Dk, Dv, R, v_off; // T queries a sequence
    int n_rows, S;                 // KV rows of a sequence; places a query has room for
    const int32_t *place, *count;  // [N, S] rows within the sequence, what stands behind the last is not read; [N]
    const float *sinks;            // [H], or NULL
    float scale;
} SparseAttention;

// ---- CPU reference, float64

// Host operands widened to float. oc [N, H, Dv] and lse [N, H] are written.
static void sparse_forward_cpu(SparseAttention c, const float *q, const float *rows, double *oc, double *lse, int N) {
    double *p = (double *)malloc(sizeof(double) * (size_t)(c.S + 1));
    for (int i = 0; i < N; i++)
        for (int h = 0; h < c.H; h++) {
            int g = h / (c.H / c.G), n = c.count[i];
            const float *qh = q + ((int64_t)i * c.H + h) * c.Dk, *base = rows + (int64_t)(i / c.T) * c.n_rows * c.R;
            double top = c.sinks ? (double)c.sinks[h] : -INFINITY, sum = 0, *o = oc + ((int64_t)i * c.H + h) * c.Dv;
            for (int j = 0; j < n; j++) {
                const float *key = base + (int64_t)c.place[(int64_t)i * c.S + j] * c.R + g * c.Dk;
                double v = 0;
                for (int d = 0; d < c.Dk; d++) v += (double)qh[d] * (double)key[d];
                p[j] = v * (double)c.scale;
                top = fmax(top, p[j]);
            }
            for (int j = 0; j < n; j++) sum += p[j] = exp(p[j] - top);
            if (c.sinks) sum += exp((double)c.sinks[h] - top);
            lse[(int64_t)i * c.H + h] = sum > 0 ? top + log(sum) : -INFINITY;
            for (int d = 0; d < c.Dv; d++) o[d] = 0;
            for (int j = 0; j < n; j++) {
                const float *value = base + (int64_t)c.place[(int64_t)i * c.S + j] * c.R + c.v_off + g * c.Dv;
                for (int d = 0; d < c.Dv; d++) o[d] += p[j] / sum * (double)value[d];
            }
        }
    free(p);
}

// d_q and psum are written, d_rows is added to. lse and delta are the floats that the kernels are given.
static void sparse_backward_cpu(SparseAttention c, const float *q, const float *rows, const float *d_oc, const float *lse, const float *delta,
                                double *d_q, double *d_rows, double *psum, int N) {
    for (int64_t x = 0; x < (int64_t)N * c.H * c.Dk; x++) d_q[x] = 0;
    for (int64_t x = 0; x < (int64_t)N * c.S; x++) psum[x] = 0;
    for (int i = 0; i < N; i++)
        for (int h = 0; h < c.H; h++) {
            int g = h / (c.H / c.G);
            int64_t ih = (int64_t)i * c.H + h;
            for (int j = 0; j < c.count[i]; j++) {
                int64_t row = ((int64_t)(i / c.T) * c.n_rows + c.place[(int64_t)i * c.S + j]) * c.R, at = row + c.v_off + g * c.Dv;
                row += g * c.Dk;
                double s = 0, dp = 0;
                for (int d = 0; d < c.Dk; d++) s += (double)q[ih * c.Dk + d] * (double)rows[row + d];
                for (int d = 0; d < c.Dv; d++) dp += (double)d_oc[ih * c.Dv + d] * (double)rows[at + d];
                double p = exp(s * (double)c.scale - (double)lse[ih]), ds = p * (dp - (double)delta[ih]) * (double)c.scale;
                psum[(int64_t)i * c.S + j] += p;
                for (int d = 0; d < c.Dk; d++) {
                    d_q[ih * c.Dk + d] += ds * (double)rows[row + d];
                    d_rows[row + d] += ds * (double)q[ih * c.Dk + d];
                }
                for (int d = 0; d < c.Dv; d++) d_rows[at + d] += p * (double)d_oc[ih * c.Dv + d];
            }
        }
}

// ---- the pairs (query, place) of a chunk of queries, sorted by KV row: kernel 1 walks them, kernel 2 writes its rows in that order

// key = the pair's row among all B*n_rows, or none behind the last place; pair = (i - i0) * S + j.
__global__ static void pairs_kernel(SparseAttention c, uint32_t *key, uint32_t *pair, int i0, uint32_t none, int n) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (x >= n) return;
    int i = i0 + x / c.S, j = x % c.S;
    key[x] = j < c.count[i] ? (uint32_t)(i / c.T * c.n_rows + c.place[(int64_t)i * c.S + j]) : none;
    pair[x] = (uint32_t)x;
}

// ---- kernel 1: the plain version
// A block a query writes down what the formulas say: all P and dS to memory, then every output by its own loop. d_rows turns the sum around: a
// block a row walks the sorted pairs, so that no two blocks add to one place and the order never changes.

enum { PLAIN_THREADS = 256 };

// dot of two vectors by the lanes of a warp; all lanes get it.
template <class X> __device__ static inline float warp_dot(const X *a, const X *b, int n) {
    float v = 0;
    for (int d = threadIdx.x % 32; d < n; d += 32) v += (float)a[d] * (float)b[d];
    return warp_sum(v);
}
// out[h, d] = sum_j p[j, h] row(j)[off + g*D + d], threads over (h, d).
template <class X> __device__ static void support_sum(SparseAttention c, X *out, const float *p, const X *rows, const int32_t *place, int n, int off, int D) {
    for (int x = threadIdx.x; x < c.H * D; x += blockDim.x) {
        const X *column = rows + off + x / D / (c.H / c.G) * D + x % D;
        float v = 0;
        #pragma unroll 4
        for (int j = 0; j < n; j++) v += p[(int64_t)j * c.H + x / D] * (float)column[(int64_t)place[j] * c.R];
        out[x] = (X)v;
    }
}

// p [queries, S, H] is scratch.
template <class X> __global__ static void sparse_forward_kernel1(SparseAttention c, const X *q, const X *rows, X *oc, float *lse, float *p, int i0) {
    int64_t i = i0 + (int64_t)blockIdx.x;
    int n = c.count[i], warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int32_t *place = c.place + i * c.S;
    q += i * c.H * c.Dk;
    rows += i / c.T * c.n_rows * c.R;
    p += (int64_t)blockIdx.x * c.S * c.H;
    for (int j = warp; j < n; j += warps)
        for (int h = 0; h < c.H; h++) {
            float v = warp_dot(q + (int64_t)h * c.Dk, rows + (int64_t)place[j] * c.R + h / (c.H / c.G) * c.Dk, c.Dk);
            if (lane == 0) p[(int64_t)j * c.H + h] = v * c.scale;
        }
    __syncthreads();
    for (int h = warp; h < c.H; h += warps) {
        float top = c.sinks ? c.sinks[h] : -INFINITY, sum = 0;
        for (int j = lane; j < n; j += 32) top = fmaxf(top, p[(int64_t)j * c.H + h]);
        top = warp_max(top);
        for (int j = lane; j < n; j += 32) sum += p[(int64_t)j * c.H + h] = expf(p[(int64_t)j * c.H + h] - top);
        sum = warp_sum(sum);
        if (c.sinks) sum += expf(c.sinks[h] - top);
        for (int j = lane; j < n; j += 32) p[(int64_t)j * c.H + h] /= sum;
        if (lane == 0) lse[i * c.H + h] = n || c.sinks ? top + logf(sum) : -INFINITY;
    }
    __syncthreads();
    support_sum(c, oc + i * c.H * c.Dv, p, rows, place, n, c.v_off, c.Dv);
}

// p and ds [queries, S, H] are left for the rows; d_q and psum are written.
template <class X> __global__ static void sparse_backward_kernel1(SparseAttention c, const X *q, const X *rows, const X *d_oc, const float *lse, const float *delta,
                                                                  X *d_q, float *psum, float *p, float *ds, int i0) {
    int64_t i = i0 + (int64_t)blockIdx.x;
    int n = c.count[i], warps = blockDim.x / 32;
    const int32_t *place = c.place + i * c.S;
    q += i * c.H * c.Dk;
    d_oc += i * c.H * c.Dv;
    rows += i / c.T * c.n_rows * c.R;
    p += (int64_t)blockIdx.x * c.S * c.H;
    ds += (int64_t)blockIdx.x * c.S * c.H;
    for (int j = threadIdx.x / 32; j < n; j += warps) {
        float mass = 0;
        for (int h = 0; h < c.H; h++) {
            int g = h / (c.H / c.G);
            const X *row = rows + (int64_t)place[j] * c.R;
            float s = warp_dot(q + (int64_t)h * c.Dk, row + g * c.Dk, c.Dk), dp = warp_dot(d_oc + (int64_t)h * c.Dv, row + c.v_off + g * c.Dv, c.Dv);
            s = expf(s * c.scale - lse[i * c.H + h]);
            mass += s;
            if (threadIdx.x % 32) continue;
            p[(int64_t)j * c.H + h] = s;
            ds[(int64_t)j * c.H + h] = s * (dp - delta[i * c.H + h]) * c.scale;
        }
        if (threadIdx.x % 32 == 0) psum[i * c.S + j] = mass;
    }
    for (int j = n + (int)threadIdx.x; j < c.S; j += blockDim.x) psum[i * c.S + j] = 0;
    __syncthreads();
    support_sum(c, d_q + i * c.H * c.Dk, ds, rows, place, n, 0, c.Dk);
}

// d_rows[row] += sum over its pairs, in order, of what each gives. A block a row, a thread for each of its floats.
template <class X> __global__ static void rows_gather_kernel1(SparseAttention c, float *d_rows, const X *q, const X *d_oc, const float *p, const float *ds,
                                                              const uint32_t *pair, const int32_t *start, int i0) {
    int hg = c.H / c.G;
    for (int x = threadIdx.x; x < c.R; x += blockDim.x) {
        int y = x - c.v_off, is_key = x < c.G * c.Dk, is_value = y >= 0 && y < c.G * c.Dv;
        float v = 0;
        for (int r = start[blockIdx.x]; r < start[blockIdx.x + 1]; r++) {
            int64_t i = i0 + (int64_t)(pair[r] / (uint32_t)c.S), at = (int64_t)pair[r] * c.H;
            int hk = x / c.Dk * hg, hv = y / c.Dv * hg;
            for (int h = hk; is_key && h < hk + hg; h++) v += ds[at + h] * (float)q[(i * c.H + h) * c.Dk + x % c.Dk];
            for (int h = hv; is_value && h < hv + hg; h++) v += p[at + h] * (float)d_oc[(i * c.H + h) * c.Dv + y % c.Dv];
        }
        d_rows[(int64_t)blockIdx.x * c.R + x] += v;
    }
}

// ---- kernel 2: one CTA a query, all of its heads against tiles of gathered rows
// Heads are what makes a matrix product of a single query: 16, 32 or 64 of them (padded with zeros) share every gathered row. Rows come by cp.async
// into one of two buffers while the other is being multiplied; the KV rows of the tile after that are already named in registers. Queries are
// launched in order, so that the sorted lists of those in flight sweep the keys together and most reads hit L2.
// A value that is part of its key (MLA, CSA) is loaded once. A matrix in shared memory has rows of D values, D a multiple of 16; for ldmatrix eight
// neighbouring rows must not meet in a bank: where D is a multiple of 64 the 16-byte chunks of a row are permuted (chunk xor row mod 8), which
// costs no memory, else the row is padded by one chunk, which makes its length odd in chunks.

enum { SA_PSUM, SA_ATOMIC, SA_ROWS_BF16, SA_ROWS_FLOAT }; // forms of the backward kernel
enum { SA_STATIC = 2560, MAX_D = 576 };                   // bytes of static shared memory, at most; largest Dk, Dv

// The heads h0 .. h0+nh of one launch, all of one group; where its keys and values stand in a KV row, and in a row of the tile.
typedef struct { int h0, nh, key, value, wide, value_at, set; } Share; // set: psum is set by this launch, not added to

__host__ __device__ static inline int pitch_of(int D) { return D % 64 ? D + 8 : D; }
// A lane's row of a matrix in shared memory: its address, and what its chunks are xored with.
typedef struct { uint32_t at; int x; } LaneRow;
__device__ static inline LaneRow lane_row(uint32_t matrix, int row, int D) {
    LaneRow r = {matrix + (uint32_t)(row * pitch_of(D) * 2), D % 64 ? 0 : row & 7};
    return r;
}
__device__ static inline uint32_t chunk_at(LaneRow r, int chunk) { return r.at + (uint32_t)((chunk ^ r.x) << 4); }

// The KV rows at places first.. of the thread's rows of a tile; -1 behind the last. Eight threads copy a row, 128 bytes at a time.
template <int TILE, int THREADS> __device__ static inline void tile_places(int *index, const int32_t *place, int first, int n) {
    #pragma unroll
    for (int p = 0; p < TILE * 8 / THREADS; p++) {
        int j = first + (int)threadIdx.x / 8 + p * (THREADS / 8);
        index[p] = j < n ? place[j] : -1;
    }
}
// Those rows into the tile as [key | value]; zeros for -1. rows: of the sequence, at the key of the share's group.
template <int TILE, int THREADS> __device__ static inline void gather_tile(uint32_t to, const bf16 *rows, const int *index, Share z, int Dk, int R) {
    int keys = Dk / 8, jump = z.value - z.key - Dk; // from the key's end to the value
    #pragma unroll
    for (int p = 0; p < TILE * 8 / THREADS; p++) {
        int take = index[p] >= 0;
        LaneRow row = lane_row(to, (int)threadIdx.x / 8 + p * (THREADS / 8), z.wide);
        const bf16 *from = rows + (take ? (int64_t)index[p] * R : 0);
        for (int chunk = (int)threadIdx.x % 8; chunk < z.wide / 8; chunk += 8)
            cp_async_16(chunk_at(row, chunk), from + (take ? chunk * 8 + (chunk >= keys ? jump : 0) : 0), take);
    }
}
// x[h0 .. h0+nh, 0..D) of a query; zeros up to HP heads.
template <int HP, int THREADS> __device__ static inline void gather_heads(uint32_t to, const bf16 *x, Share z, int D) {
    for (int h = (int)threadIdx.x / 8; h < HP; h += THREADS / 8) {
        int take = h < z.nh;
        LaneRow row = lane_row(to, h, D);
        for (int chunk = (int)threadIdx.x % 8; chunk < D / 8; chunk += 8)
            cp_async_16(chunk_at(row, chunk), x + (take ? (int64_t)(z.h0 + h) * D + chunk * 8 : 0), take);
    }
}

static size_t forward_bytes(SparseAttention c, Share z, int heads, int tile) {
    return ((size_t)heads * (size_t)(pitch_of(c.Dk) + pitch_of(tile)) + 2 * (size_t)tile * (size_t)pitch_of(z.wide)) * 2;
}

// Forward. MT: tiles of 16 heads; TILE: rows at once; VT: tiles of 8 value columns that a warp owns. A tile takes three steps:
//   logits: a warp has 16 rows and MS tiles of heads; the largest of each head goes to shared memory
//   P: with the largest of all row groups known, exp2; in bf16 to shared memory, as every warp needs all of P
//   O: a warp has all heads and rows, and its own columns: no sum over warps is left at the end, and O takes few registers
template <int MT, int WARPS, int TILE, int VT> __global__ static void __launch_bounds__(WARPS * 32, MT == 1 ? (VT <= 4 ? 4 : 2) : 1)
sparse_forward_kernel2(SparseAttention c, Share z, const bf16 *q, const bf16 *rows, bf16 *oc, float *lse, int i0) {
    constexpr int THREADS = WARPS * 32, HP = MT * 16, WN = TILE / 16, WM = WARPS / WN, MS = MT / WM, CHAINS = MS == 1 ? 2 : 1;
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ float tops[WN][HP], sums[WN][HP], factor[HP];
    int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, quad = lane % 4, wn = warp % WN, wm = warp / WN; // 16 rows, MS head tiles
    int64_t i = i0 + (int64_t)blockIdx.x;
    int n = c.count[i], tile_bytes = TILE * pitch_of(z.wide) * 2, index[TILE * 8 / THREADS];
    const int32_t *place = c.place + i * c.S;
    unsigned char *p_tile = smem + HP * pitch_of(c.Dk) * 2 + 2 * tile_bytes;
    uint32_t q_at = smem_address(smem), tiles_at = q_at + (uint32_t)(HP * pitch_of(c.Dk) * 2), p_at = smem_address(p_tile);
    float o[MT][VT][4], top[MS][2], sum[MS][2], scale = c.scale * 1.4426950408889634f; // in base 2
    for (int m = 0; m < MT; m++)
        for (int t = 0; t < VT; t++)
            for (int e = 0; e < 4; e++) o[m][t][e] = 0;
    for (int m = 0; m < MS; m++) {
        top[m][0] = top[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0;
    }
    rows += i / c.T * c.n_rows * c.R + z.key;
    gather_heads<HP, THREADS>(q_at, q + i * c.H * c.Dk, z, c.Dk);
    tile_places<TILE, THREADS>(index, place, 0, n);
    gather_tile<TILE, THREADS>(tiles_at, rows, index, z, c.Dk, c.R);
    cp_async_commit();
    tile_places<TILE, THREADS>(index, place, TILE, n);
    for (int first = 0, turn = 0; first < n; first += TILE, turn ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); // this tile is there for all; nobody reads the other one, P or the statistics any more
        if (first + TILE < n) gather_tile<TILE, THREADS>(tiles_at + (uint32_t)((turn ^ 1) * tile_bytes), rows, index, z, c.Dk, c.R);
        cp_async_commit();
        tile_places<TILE, THREADS>(index, place, first + 2 * TILE, n);
        uint32_t tile = tiles_at + (uint32_t)(turn * tile_bytes);

        // s[m]: heads lane/4 and +8 of a tile by rows 2 quad + {0,1} of either half; two chains of sums where there would be few to overlap
        float s[CHAINS][MS][2][4];
        for (int x = 0; x < CHAINS * MS * 8; x++) s[x / (MS * 8)][x / 8 % MS][x / 4 % 2][x % 4] = 0;
        LaneRow keys = lane_row(tile, wn * 16 + lane / 16 * 8 + lane % 8, z.wide), heads[MS];
        #pragma unroll
        for (int m = 0; m < MS; m++) heads[m] = lane_row(q_at, (wm * MS + m) * 16 + lane % 16, c.Dk);
        #pragma unroll 2
        for (int k = 0; k < c.Dk / 16; k += CHAINS)
            #pragma unroll
            for (int u = 0; u < CHAINS; u++)
                if (k + u < c.Dk / 16) {
                    uint32_t a[4], b[4];
                    ldmatrix_x4(b, chunk_at(keys, 2 * (k + u) + lane / 8 % 2));
                    #pragma unroll
                    for (int m = 0; m < MS; m++) {
                        ldmatrix_x4(a, chunk_at(heads[m], 2 * (k + u) + lane / 16));
                        mma_16816(s[u][m][0], a, b);
                        mma_16816(s[u][m][1], a, b + 2);
                    }
                }
        #pragma unroll
        for (int m = 0; m < MS; m++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                float most = -INFINITY;
                #pragma unroll
                for (int x = 0; x < 4; x++) {
                    float *v = &s[0][m][x / 2][r * 2 + x % 2];
                    if (CHAINS == 2) *v += s[CHAINS - 1][m][x / 2][r * 2 + x % 2];
                    *v = first + wn * 16 + x / 2 * 8 + quad * 2 + x % 2 < n ? *v * scale : -INFINITY;
                    most = fmaxf(most, *v);
                }
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                if (quad == 0) tops[wn][(wm * MS + m) * 16 + r * 8 + lane / 4] = most;
            }
        __syncthreads();
        #pragma unroll
        for (int m = 0; m < MS; m++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                int h = (wm * MS + m) * 16 + r * 8 + lane / 4;
                float most = top[m][r], f;
                #pragma unroll
                for (int w = 0; w < WN; w++) most = fmaxf(most, tops[w][h]);
                f = exp2f(top[m][r] - most); // most is finite: a tile has a row
                top[m][r] = most;
                sum[m][r] *= f;
                if (wn == 0 && quad == 0) factor[h] = f;
                #pragma unroll
                for (int t = 0; t < 2; t++) {
                    float u = exp2f(s[0][m][t][r * 2] - most), v = exp2f(s[0][m][t][r * 2 + 1] - most);
                    sum[m][r] += u + v;
                    *(uint32_t *)(p_tile + chunk_at(lane_row(0, h, TILE), wn * 2 + t) + quad * 4) = pack_bf16(u, v);
                }
            }
        __syncthreads();
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            float f0 = factor[m * 16 + lane / 4], f1 = factor[m * 16 + 8 + lane / 4];
            #pragma unroll
            for (int t = 0; t < VT; t++) {
                o[m][t][0] *= f0;
                o[m][t][1] *= f0;
                o[m][t][2] *= f1;
                o[m][t][3] *= f1;
            }
        }
        #pragma unroll
        for (int u = 0; u < TILE / 32; u++) { // 32 rows: two steps of 16
            uint32_t a[2][MT][4];
            LaneRow values = lane_row(tile, u * 32 + lane, z.wide);
            #pragma unroll
            for (int x = 0; x < 2 * MT; x++) ldmatrix_x4(a[x % 2][x / 2], chunk_at(lane_row(p_at, x / 2 * 16 + lane % 16, TILE), u * 4 + x % 2 * 2 + lane / 16));
            #pragma unroll
            for (int t = 0; t < VT; t++) {
                uint32_t b[4];
                if ((warp + t * WARPS) * 8 >= c.Dv) break;
                ldmatrix_x4_trans(b, chunk_at(values, z.value_at / 8 + warp + t * WARPS));
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_16816(o[m][t], a[0][m], b);
                    mma_16816(o[m][t], a[1][m], b + 2);
                }
            }
        }
    }
    cp_async_wait<0>(); // of an empty support: the copies of q
    #pragma unroll
    for (int m = 0; m < MS; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 1);
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 2);
            if (quad == 0) sums[wn][(wm * MS + m) * 16 + r * 8 + lane / 4] = sum[m][r];
        }
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < MS; m++)
        #pragma unroll
        for (int r = 0; r < 2; r++) { // top is the same in all row groups: one of them finishes the head
            int h = (wm * MS + m) * 16 + r * 8 + lane / 4;
            if (wn || quad) continue;
            float sink = c.sinks && h < z.nh ? c.sinks[z.h0 + h] * 1.4426950408889634f : -INFINITY, most = fmaxf(top[m][r], sink), total = 0, f = 0;
            if (most > -INFINITY) {
                f = exp2f(top[m][r] - most);
                for (int w = 0; w < WN; w++) total += sums[w][h];
                total = f * total + exp2f(sink - most);
                f /= total;
            }
            factor[h] = f;
            if (h < z.nh) lse[i * c.H + z.h0 + h] = most > -INFINITY ? (most + log2f(total)) * 0.6931471805599453f : -INFINITY;
        }
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < MT; m++)
        #pragma unroll
        for (int t = 0; t < VT; t++) {
            int h = m * 16 + lane / 4, column = (warp + t * WARPS) * 8 + quad * 2;
            bf16 *to = oc + (i * c.H + z.h0 + h) * c.Dv + column;
            if (column >= c.Dv) break;
            if (h < z.nh) *(uint32_t *)to = pack_bf16(o[m][t][0] * factor[h], o[m][t][1] * factor[h]);
            if (h + 8 < z.nh) *(uint32_t *)(to + 8 * c.Dv) = pack_bf16(o[m][t][2] * factor[h + 8], o[m][t][3] * factor[h + 8]);
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

static size_t backward_bytes(SparseAttention c, Share z, int heads, int tile) {
    return ((size_t)heads * (size_t)(pitch_of(c.Dk) + pitch_of(c.Dv)) + 2 * (size_t)tile * (size_t)(pitch_of(z.wide) + heads + 8)) * 2;
}

// Backward. QT: tiles of 8 columns of d_q that a warp owns. The products of a tile:
//   rows x heads:    logits K Q^T and dP = V d_oc^T; a warp has 16 rows and 16 heads. No softmax: lse is known. P and dS go to shared memory in bf16
//   rows x columns:  what each row receives, dS Q + P d_oc (summed over heads inside the product); a warp has 16 rows and one of WM parts of the columns
//   heads x columns: d_q += dS^T K, summed over all tiles in registers
// out is d_rows for SA_ATOMIC, else rows of z.wide values at slot_of (slot_of [queries, S] and out belong to the chunk; the rest to all N).
template <int MT, int WARPS, int QT, int FORM> __global__ static void __launch_bounds__(WARPS * 32, MT == 1 ? (QT <= 5 ? 3 : 2) : 1)
sparse_backward_kernel2(SparseAttention c, Share z, const bf16 *q, const bf16 *rows, const bf16 *d_oc, const float *lse, const float *delta,
                        bf16 *d_q, void *out, const int32_t *slot_of, float *psum, int i0) {
    constexpr int WM = MT, WN = WARPS / WM, TILE = WN * 16, THREADS = WARPS * 32, HP = MT * 16, PP = HP + 8; // PP: pitch of P and dS
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ float mass[WM][TILE];
    int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, quad = lane % 4, wn = warp % WN, wm = warp / WN, hidden;
    int64_t i = i0 + (int64_t)blockIdx.x;
    int n = c.count[i], tile_bytes = TILE * pitch_of(z.wide) * 2, index[TILE * 8 / THREADS];
    const int32_t *place = c.place + i * c.S, *where = FORM == SA_ATOMIC ? place : slot_of + (int64_t)blockIdx.x * c.S;
    uint32_t q_at = smem_address(smem), o_at = q_at + (uint32_t)(HP * pitch_of(c.Dk) * 2), tiles_at = o_at + (uint32_t)(HP * pitch_of(c.Dv) * 2);
    unsigned char *p_tile = smem + HP * (pitch_of(c.Dk) + pitch_of(c.Dv)) * 2 + 2 * tile_bytes, *g_tile = p_tile + TILE * PP * 2;
    uint32_t p_at = smem_address(p_tile), g_at = smem_address(g_tile);
    float dq[MT][QT][4], low[2][2], dot[2][2], scale = c.scale * 1.4426950408889634f; // low, dot: of the lane's heads 8t + 2 quad + {0,1}
    for (int m = 0; m < MT; m++)
        for (int t = 0; t < QT; t++)
            for (int e = 0; e < 4; e++) dq[m][t][e] = 0;
    for (int x = 0; x < 4; x++) {
        int h = wm * 16 + x / 2 * 8 + quad * 2 + x % 2;
        low[x / 2][x % 2] = h < z.nh ? lse[i * c.H + z.h0 + h] * 1.4426950408889634f : INFINITY; // a head that is not there has no probability
        dot[x / 2][x % 2] = FORM != SA_PSUM && h < z.nh ? delta[i * c.H + z.h0 + h] : 0;
    }
    if (psum && z.set)
        for (int j = n + tid; j < c.S; j += THREADS) psum[i * c.S + j] = 0;
    int64_t sequence = i / c.T * c.n_rows;
    rows += sequence * c.R + z.key;
    gather_heads<HP, THREADS>(q_at, q + i * c.H * c.Dk, z, c.Dk);
    if (FORM != SA_PSUM) gather_heads<HP, THREADS>(o_at, d_oc + i * c.H * c.Dv, z, c.Dv);
    tile_places<TILE, THREADS>(index, place, 0, n);
    gather_tile<TILE, THREADS>(tiles_at, rows, index, z, c.Dk, c.R);
    cp_async_commit();
    tile_places<TILE, THREADS>(index, place, TILE, n);
    for (int first = 0, turn = 0; first < n; first += TILE, turn ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); // this tile is there for all; nobody reads the other one, P, dS or mass any more
        if (first + TILE < n) gather_tile<TILE, THREADS>(tiles_at + (uint32_t)((turn ^ 1) * tile_bytes), rows, index, z, c.Dk, c.R);
        cp_async_commit();
        tile_places<TILE, THREADS>(index, place, first + 2 * TILE, n);
        // Shared-memory addresses depend on the lane alone. The compiler would keep them all in registers over the loop, and spill; a thread number
        // that it cannot see through makes it compute them where they are used.
        asm volatile("mov.b32 %0, %1;" : "=r"(hidden) : "r"(tid));
        lane = hidden % 32, warp = hidden / 32, quad = hidden % 4, wn = warp % WN, wm = warp / WN;
        uint32_t tile = tiles_at + (uint32_t)(turn * tile_bytes);
        int row = wn * 16 + lane / 4, j[2] = {first + row, first + row + 8}; // the lane's two rows
        int64_t at[2] = {-1, -1};                                             // and where what they receive goes
        if (FORM != SA_PSUM)
            for (int r = 0; r < 2; r++)
                if (j[r] < n) at[r] = FORM == SA_ATOMIC ? (sequence + where[j[r]]) * c.R : (int64_t)where[j[r]] * z.wide;

        // p, ds: rows lane/4 and +8 by heads 8t + 2 quad + {0,1}
        float p[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, ds[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        LaneRow keys = lane_row(tile, wn * 16 + lane % 16, z.wide);
        LaneRow q_row = lane_row(q_at, wm * 16 + lane / 16 * 8 + lane % 8, c.Dk), o_row = lane_row(o_at, wm * 16 + lane / 16 * 8 + lane % 8, c.Dv);
        int values = FORM == SA_PSUM ? 0 : c.Dv / 16, inside = z.value_at ? 0 : values; // values inside the keys are read once for both products
        #pragma unroll 2
        for (int k = 0; k < c.Dk / 16; k++) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, chunk_at(keys, 2 * k + lane / 16));
            ldmatrix_x4(b, chunk_at(q_row, 2 * k + lane / 8 % 2));
            mma_16816(p[0], a, b);
            mma_16816(p[1], a, b + 2);
            if (k >= inside) continue;
            ldmatrix_x4(b, chunk_at(o_row, 2 * k + lane / 8 % 2));
            mma_16816(ds[0], a, b);
            mma_16816(ds[1], a, b + 2);
        }
        for (int k = inside; k < values; k++) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, chunk_at(keys, z.value_at / 8 + 2 * k + lane / 16));
            ldmatrix_x4(b, chunk_at(o_row, 2 * k + lane / 8 % 2));
            mma_16816(ds[0], a, b);
            mma_16816(ds[1], a, b + 2);
        }
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float all = 0;
            #pragma unroll
            for (int t = 0; t < 2; t++) {
                float *u = &p[t][r * 2], *v = &ds[t][r * 2];
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    u[e] = j[r] < n ? exp2f(u[e] * scale - low[t][e]) : 0;
                    v[e] = u[e] * (v[e] - dot[t][e]) * c.scale;
                    all += u[e];
                }
                if (FORM != SA_PSUM) {
                    int offset = (row + r * 8) * (PP * 2) + (wm * 16 + t * 8 + quad * 2) * 2;
                    *(uint32_t *)(p_tile + offset) = pack_bf16(u[0], u[1]);
                    *(uint32_t *)(g_tile + offset) = pack_bf16(v[0], v[1]);
                }
            }
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            if (quad == 0) mass[wm][row + r * 8] = all;
        }
        __syncthreads();
        if (psum && tid < TILE && first + tid < n) {
            float v = 0, *to = psum + i * c.S + first + tid;
            for (int w = 0; w < WM; w++) v += mass[w][tid];
            *to = z.set ? v : *to + v;
        }
        if constexpr (FORM != SA_PSUM) {
            uint32_t ap[MT][4], ag[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                uint32_t offset = (uint32_t)((wn * 16 + lane % 16) * (PP * 2) + (m * 2 + lane / 16) * 16);
                ldmatrix_x4(ap[m], p_at + offset);
                ldmatrix_x4(ag[m], g_at + offset);
            }
            for (int column = wm * 16; column < z.wide; column += WM * 16) {
                float y[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
                uint32_t b[4];
                int value = column - z.value_at;
                if (column < c.Dk)
                    #pragma unroll
                    for (int m = 0; m < MT; m++) {
                        ldmatrix_x4_trans(b, chunk_at(lane_row(q_at, m * 16 + lane % 16, c.Dk), column / 8 + lane / 16));
                        mma_16816(y[0], ag[m], b);
                        mma_16816(y[1], ag[m], b + 2);
                    }
                if (value >= 0 && value < c.Dv)
                    #pragma unroll
                    for (int m = 0; m < MT; m++) {
                        ldmatrix_x4_trans(b, chunk_at(lane_row(o_at, m * 16 + lane % 16, c.Dv), value / 8 + lane / 16));
                        mma_16816(y[0], ap[m], b);
                        mma_16816(y[1], ap[m], b + 2);
                    }
                // A lane has two columns of each half. Neighbours swap, so that the even lane gets four of the first half and the odd lane four of
                // the second: 16-byte writes, 64 bytes in a row from the four lanes of a quad.
                int odd = lane & 1, to = column + odd * 8 + quad / 2 * 4;
                if (FORM == SA_ATOMIC) to += column < c.Dk ? z.key : z.value - c.Dk;
                #pragma unroll
                for (int r = 0; r < 2; r++) {
                    float *own = y[0] + 2 * r, *other = y[1] + 2 * r;
                    float u = __shfl_xor_sync(0xffffffffu, odd ? own[0] : other[0], 1), v = __shfl_xor_sync(0xffffffffu, odd ? own[1] : other[1], 1);
                    float4 four = odd ? make_float4(u, v, other[0], other[1]) : make_float4(own[0], own[1], u, v);
                    if (at[r] < 0) continue;
                    if (FORM == SA_ATOMIC) add_4((float *)out + at[r] + to, four);
                    else if (FORM == SA_ROWS_FLOAT) store_4((float *)out + at[r] + to, four);
                    else store_4((bf16 *)out + at[r] + to, four);
                }
            }
            #pragma unroll
            for (int u = 0; u < TILE / 32; u++) { // 32 rows: two steps of 16
                uint32_t a[2][MT][4];
                LaneRow k_row = lane_row(tile, u * 32 + lane, z.wide);
                #pragma unroll
                for (int x = 0; x < 2 * MT; x++) // dS lies row-major, its transpose is wanted
                    ldmatrix_x4_trans(a[x % 2][x / 2], g_at + (uint32_t)((u * 32 + x % 2 * 16 + lane / 16 * 8 + lane % 8) * (PP * 2) + (x / 2 * 2 + lane / 8 % 2) * 16));
                #pragma unroll
                for (int t = 0; t < QT; t++) {
                    uint32_t b[4];
                    if ((warp + t * WARPS) * 8 >= c.Dk) break;
                    ldmatrix_x4_trans(b, chunk_at(k_row, warp + t * WARPS));
                    #pragma unroll
                    for (int m = 0; m < MT; m++) {
                        mma_16816(dq[m][t], a[0][m], b);
                        mma_16816(dq[m][t], a[1][m], b + 2);
                    }
                }
            }
        }
    }
    if constexpr (FORM != SA_PSUM) {
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int t = 0; t < QT; t++) {
                int h = m * 16 + lane / 4, column = (warp + t * WARPS) * 8 + quad * 2;
                bf16 *to = d_q + (i * c.H + z.h0 + h) * c.Dk + column;
                if (column >= c.Dk) break;
                if (h < z.nh) *(uint32_t *)to = pack_bf16(dq[m][t][0], dq[m][t][1]);
                if (h + 8 < z.nh) *(uint32_t *)(to + 8 * c.Dk) = pack_bf16(dq[m][t][2], dq[m][t][3]);
            }
    }
    cp_async_wait<0>();
}

// d_rows[row] += the sum of its written rows, a contiguous stretch. One block a row: V values a thread, several written rows at a time (a key that
// all queries chose is one block's work), each always by the same group of threads, and the groups added in order.
enum { SUM_THREADS = 256 };
template <class P> __global__ static void rows_sum_kernel(float *d_rows, int R, Share z, int Dk, const P *written, const int32_t *start) {
    constexpr int V = 16 / sizeof(P);
    __shared__ float sums[SUM_THREADS * V];
    int parts = z.wide / V, span = min(parts, (int)SUM_THREADS), groups = SUM_THREADS / span, group = (int)threadIdx.x / span;
    int from = start[blockIdx.x], to = start[blockIdx.x + 1];
    if (from == to) return;
    for (int part0 = 0; part0 < parts; part0 += span) { // once, but for rows wider than the block
        int part = part0 + (int)threadIdx.x % span;
        float v[V];
        for (int e = 0; e < V; e++) v[e] = 0;
        if (group < groups && part < parts) {
            #pragma unroll 8
            for (int r = from + group; r < to; r += groups) {
                uint4 raw = *(const uint4 *)(written + (int64_t)r * z.wide + part * V);
                P x[V];
                memcpy(x, &raw, 16);
                #pragma unroll
                for (int e = 0; e < V; e++) v[e] += (float)x[e];
            }
            for (int e = 0; e < V; e++) sums[(group * span + part - part0) * V + e] = v[e];
        }
        __syncthreads();
        for (int x = (int)threadIdx.x; x < span * V && part0 * V + x < z.wide; x += SUM_THREADS) {
            int column = part0 * V + x;
            float s = 0;
            for (int u = 0; u < groups; u++) s += sums[u * span * V + x];
            d_rows[(int64_t)blockIdx.x * R + (column < Dk ? z.key + column : z.value + column - Dk)] += s;
        }
        __syncthreads();
    }
}

// ---- launchers

// Queries i0..i0+n. The sort is stable: a row's pairs stay in the order of the queries.
static void pair_lists_build(PairLists *p, SparseAttention c, int B, int i0, int n) {
    int pairs = n * c.S, rows = B * c.n_rows;
    pairs_kernel<<<blocks_for(pairs, 256), 256>>>(c, p->key, p->pair, i0, (uint32_t)rows, pairs);
    pair_lists_sort(p, pairs, rows);
}

// Kernel 1 for queries i0..i0+n; p, ds [n, S, H] scratch; the lists are those of the chunk.
template <class X> static void sparse_forward_plain(SparseAttention c, const X *q, const X *rows, X *oc, float *lse, float *p, int i0, int n) {
    sparse_forward_kernel1<X><<<(unsigned)n, PLAIN_THREADS>>>(c, q, rows, oc, lse, p, i0);
    CUDA_CHECK(cudaGetLastError());
}
template <class X> static void sparse_backward_plain(SparseAttention c, const X *q, const X *rows, const X *d_oc, const float *lse, const float *delta,
                                                     X *d_q, float *d_rows, float *psum, float *p, float *ds, const PairLists *lists, int B, int i0, int n) {
    sparse_backward_kernel1<X><<<(unsigned)n, PLAIN_THREADS>>>(c, q, rows, d_oc, lse, delta, d_q, psum, p, ds, i0);
    rows_gather_kernel1<X><<<(unsigned)(B * c.n_rows), PLAIN_THREADS>>>(c, d_rows, q, d_oc, p, ds, lists->pair2, lists->start, i0);
    CUDA_CHECK(cudaGetLastError());
}

// The share that begins at head h0, of at most this many heads.
static Share share_of(SparseAttention c, int h0, int heads) {
    int hg = c.H / c.G, g = h0 / hg;
    Share z = {h0, std::min(heads, (g + 1) * hg - h0), g * c.Dk, c.v_off + g * c.Dv, c.Dk, 0, h0 == 0};
    if (z.key != z.value || c.Dv > c.Dk) { // the value is not the head of the key
        z.value_at = c.Dk;
        z.wide = c.Dk + c.Dv;
    }
    return z;
}
// How kernel 2 goes about a layer: heads of a launch, warps of a CTA, rows of a tile. heads 0: kernel 1 has to do.
typedef struct { int heads, warps, tile; } Plan;
static size_t smem_limit(void) {
    int limit, device;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return (size_t)limit;
}
// The first that fits in shared memory. As many heads as a group has, up to 64: a launch for each part of them would gather the rows again, and
// scatter to them again. The last needs least: for rows wider than usual, and for cards with less shared memory.
static Plan plan_of(SparseAttention c, int backward) {
    static const Plan plans[] = {{64, 8, 64}, {32, 8, 64}, {16, 4, 64}, {32, 4, 32}}, none = {0, 0, 0};
    int hg = c.H / c.G;
    if (c.Dk % 16 || c.Dv % 16 || c.Dk > MAX_D || c.Dv > MAX_D || c.R % 8 || c.v_off % 8) return none;
    for (int x = hg > 32 ? 0 : hg > 16 ? 1 : 2; x < 4; x++) {
        Plan p = plans[x];
        if (backward && p.heads == 64) p.tile = 32; // beside both q and d_oc of 64 heads
        Share z = share_of(c, 0, p.heads);
        if ((backward ? backward_bytes(c, z, p.heads, p.tile) : forward_bytes(c, z, p.heads, p.tile)) + SA_STATIC <= smem_limit()) return p;
    }
    return none;
}

template <int MT, int WARPS, int TILE, int VT>
static void forward_launch(SparseAttention c, Share z, const bf16 *q, const bf16 *rows, bf16 *oc, float *lse, int i0, int n) {
    size_t bytes = forward_bytes(c, z, MT * 16, TILE);
    CUDA_CHECK(cudaFuncSetAttribute(sparse_forward_kernel2<MT, WARPS, TILE, VT>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    sparse_forward_kernel2<MT, WARPS, TILE, VT><<<(unsigned)n, WARPS * 32, bytes>>>(c, z, q, rows, oc, lse, i0);
    CUDA_CHECK(cudaGetLastError());
}
// Kernel 2 for queries i0..i0+n. Returns the heads of a launch, 0 when kernel 1 has to do.
static int sparse_forward(SparseAttention c, const bf16 *q, const bf16 *rows, bf16 *oc, float *lse, int i0, int n) {
    Plan p = plan_of(c, 0);
    for (int h0 = 0; p.heads && h0 < c.H;) {
        Share z = share_of(c, h0, p.heads);
        if (p.heads == 16) {
            if (c.Dv <= 128) forward_launch<1, 4, 64, 4>(c, z, q, rows, oc, lse, i0, n);
            else if (c.Dv <= 256) forward_launch<1, 4, 64, 8>(c, z, q, rows, oc, lse, i0, n);
            else forward_launch<1, 4, 64, 18>(c, z, q, rows, oc, lse, i0, n);
        } else if (p.heads == 32) {
            if (p.warps == 4) forward_launch<2, 4, 32, 18>(c, z, q, rows, oc, lse, i0, n);
            else if (c.Dv <= 256) forward_launch<2, 8, 64, 4>(c, z, q, rows, oc, lse, i0, n);
            else forward_launch<2, 8, 64, 9>(c, z, q, rows, oc, lse, i0, n);
        } else {
            if (c.Dv <= 256) forward_launch<4, 8, 64, 4>(c, z, q, rows, oc, lse, i0, n);
            else if (c.Dv <= 512) forward_launch<4, 8, 64, 8>(c, z, q, rows, oc, lse, i0, n);
            else forward_launch<4, 8, 64, 9>(c, z, q, rows, oc, lse, i0, n);
        }
        h0 += z.nh;
    }
    return p.heads;
}

// The operands of a backward pass; delta and d_oc may be NULL for SA_PSUM, psum for all others.
typedef struct { const bf16 *q, *rows, *d_oc; const float *lse, *delta; bf16 *d_q; float *d_rows, *psum; } Backward;

template <int MT, int WARPS, int QT, int FORM> static void backward_launch(SparseAttention c, Share z, Backward b, void *out, const int32_t *slot_of, int i0, int n) {
    size_t bytes = backward_bytes(c, z, MT * 16, WARPS / MT * 16);
    CUDA_CHECK(cudaFuncSetAttribute(sparse_backward_kernel2<MT, WARPS, QT, FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    sparse_backward_kernel2<MT, WARPS, QT, FORM><<<(unsigned)n, WARPS * 32, bytes>>>(c, z, b.q, b.rows, b.d_oc, b.lse, b.delta, b.d_q, out, slot_of, b.psum, i0);
    CUDA_CHECK(cudaGetLastError());
}
// One share of heads for queries i0..i0+n.
template <int FORM> static void backward_share(SparseAttention c, Share z, Plan p, Backward b, void *out, const int32_t *slot_of, int i0, int n) {
    if (p.heads == 16) {
        if (c.Dk <= 160) backward_launch<1, 4, 5, FORM>(c, z, b, out, slot_of, i0, n);
        else if (c.Dk <= 320) backward_launch<1, 4, 10, FORM>(c, z, b, out, slot_of, i0, n);
        else backward_launch<1, 4, 18, FORM>(c, z, b, out, slot_of, i0, n);
    } else if (p.heads == 32) {
        if (p.warps == 4) backward_launch<2, 4, 18, FORM>(c, z, b, out, slot_of, i0, n);
        else if (c.Dk <= 320) backward_launch<2, 8, 5, FORM>(c, z, b, out, slot_of, i0, n);
        else backward_launch<2, 8, 9, FORM>(c, z, b, out, slot_of, i0, n);
    } else {
        if (c.Dk <= 320) backward_launch<4, 8, 5, FORM>(c, z, b, out, slot_of, i0, n);
        else backward_launch<4, 8, 9, FORM>(c, z, b, out, slot_of, i0, n);
    }
}
// SA_ATOMIC or SA_PSUM for queries i0..i0+n. Returns the heads of a launch, 0 when kernel 1 has to do.
template <int FORM> static int sparse_backward(SparseAttention c, Backward b, int i0, int n) {
    Plan p = plan_of(c, 1);
    for (int h0 = 0; p.heads && h0 < c.H;) {
        Share z = share_of(c, h0, p.heads);
        backward_share<FORM>(c, z, p, b, b.d_rows, NULL, i0, n);
        h0 += z.nh;
    }
    return p.heads;
}
// The "rows" forms for all N queries, in chunks that the lists and the buffer written (of P) hold.
template <int FORM, class P> static int sparse_backward_rows(SparseAttention c, Backward b, PairLists *lists, P *written, int B, int N, int chunk) {
    Plan p = plan_of(c, 1);
    for (int i0 = 0; p.heads && i0 < N; i0 += chunk) {
        int n = std::min(chunk, N - i0);
        pair_lists_build(lists, c, B, i0, n);
        for (int h0 = 0; h0 < c.H;) {
            Share z = share_of(c, h0, p.heads);
            backward_share<FORM>(c, z, p, b, written, lists->slot_of, i0, n);
            rows_sum_kernel<P><<<(unsigned)(B * c.n_rows), SUM_THREADS>>>(b.d_rows, c.R, z, c.Dk, written, lists->start);
            CUDA_CHECK(cudaGetLastError());
            h0 += z.nh;
        }
    }
    return p.heads;
}

// ---- checks

enum { GUARD = 256 }; // elements of NaN before and behind every array of a check
template <class X> static X *guarded(const X *host, int64_t n) {
    X *p = device_poison<X>(n + 2 * GUARD) + GUARD;
    if (host) CUDA_CHECK(cudaMemcpy(p, host, (size_t)n * sizeof(X), cudaMemcpyHostToDevice));
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

// out - base (base NULL: 0) against want: error over limit; infinity for a NaN, or below cosine 0.9995.
template <class X> static double output_error(const X *out, const float *base, const double *want, int64_t n, double limit) {
    double d = 0, s = 0, dot = 0, got = 0;
    for (int64_t i = 0; i < n; i++) {
        double v = (double)(float)out[i] - (base ? (double)base[i] : 0);
        d += (v - want[i]) * (v - want[i]);
        s += want[i] * want[i];
        dot += v * want[i];
        got += v * v;
    }
    if (!(d >= 0)) return INFINITY;
    if (s > 0 && !(dot / sqrt(s * got) > 0.9995)) return INFINITY;
    return sqrt(d) / (sqrt(s) + 1e-30) / limit;
}
// Largest difference over limit. Infinities have to be the same ones.
static double largest_error(const float *out, const double *want, int64_t n, double limit) {
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isinf(want[i]) && (double)out[i] == want[i]) continue;
        double e = fabs((double)out[i] - want[i]) / limit;
        if (!(e <= worst)) worst = e == e ? e : INFINITY;
    }
    return worst;
}

// A shape: split 0 lays the value into the key, 1 behind all keys with 8 unused floats at the row's end; hot: all queries choose the first rows.
typedef struct { int B, T, n_rows, H, G, Dk, Dv, split, S, sinks, hot; } Shape;
// Host operands in both types, and what should come out; d_rows is added to base.
typedef struct {
    int B, N; SparseAttention c;
    int64_t nq, nr, no, nh, ns;
    float *q, *rows, *d_oc, *lse, *delta, *base; bf16 *q16, *rows16, *d_oc16;
    double *want_oc, *want_lse, *want_q, *want_rows, *want_psum;
    char *reached; // [B, n_rows, R] floats of d_rows that somebody adds to
} Case;
// What a version left behind. heads: of a launch; 0: there is no instance.
typedef struct { void *oc, *d_q; float *lse, *d_rows, *psum; int stray, heads_forward, heads; } Output;

// Normal numbers that are exact in bf16, in both types.
static float *host_normal(int64_t n, uint64_t seed, uint64_t stream, float scale, bf16 **half) {
    float *p = (float *)malloc((size_t)n * sizeof(float));
    *half = (bf16 *)malloc((size_t)n * sizeof(bf16));
    for (int64_t i = 0; i < n; i++) p[i] = (float)((*half)[i] = (bf16)(scale * rng_normal(seed, stream, (uint64_t)i)));
    return p;
}
// m of n rows, ascending; behind them a number that no row has.
static void choose(int32_t *place, int S, int m, int n, int hot, uint64_t seed, uint64_t stream) {
    int have = 0;
    for (int e = 0; e < n && have < m; e++)
        if (hot || rng_uniform(seed, stream, (uint64_t)e) * (float)(n - e) < (float)(m - have)) place[have++] = e;
    for (int j = have; j < S; j++) place[j] = 0x7fffffff;
}

static Case case_new(uint64_t seed, Shape x) {
    Case s;
    bf16 *unused;
    int N = x.B * x.T, R = x.split ? x.G * (x.Dk + x.Dv) + 8 : x.Dk;
    SparseAttention c = {x.T, x.H, x.G, x.Dk, x.Dv, R, x.split ? x.G * x.Dk : 0, x.n_rows, x.S, NULL, NULL, NULL, 1 / sqrtf((float)x.Dk)};
    memset(&s, 0, sizeof s);
    s.B = x.B;
    s.N = N;
    s.nq = (int64_t)N * x.H * x.Dk;
    s.nr = (int64_t)x.B * x.n_rows * R;
    s.no = (int64_t)N * x.H * x.Dv;
    s.nh = (int64_t)N * x.H;
    s.ns = (int64_t)N * x.S;
    s.q = host_normal(s.nq, seed, 1, 2.0f, &s.q16);
    s.rows = host_normal(s.nr, seed, 2, 1.0f, &s.rows16);
    s.d_oc = host_normal(s.no, seed, 3, 1.0f, &s.d_oc16);
    s.base = host_normal(s.nr, seed, 4, 1e-2f, &unused);
    free(unused);
    s.reached = (char *)calloc((size_t)s.nr, 1);
    int32_t *place = (int32_t *)malloc((size_t)s.ns * 4), *count = (int32_t *)malloc((size_t)N * 4);
    for (int i = 0; i < N; i++) {
        int most = std::min(x.S, x.n_rows), any = (int)(rng_u64(seed, 5, (uint64_t)i) % (uint64_t)(most + 1));
        count[i] = i == 0 ? 0 : i == 1 ? std::min(1, most) : i == 3 ? std::min(most, x.S / 2 + 1) : i % 5 == 4 ? any : most;
        choose(place + (int64_t)i * x.S, x.S, count[i], x.n_rows, x.hot, seed, 1000 + (uint64_t)i);
        for (int j = 0; j < count[i]; j++) memset(s.reached + ((int64_t)(i / x.T) * x.n_rows + place[(int64_t)i * x.S + j]) * R, 1, (size_t)(R - x.split * 8));
    }
    c.place = place;
    c.count = count;
    if (x.sinks) {
        c.sinks = host_normal(x.H, seed, 6, 2.0f, &unused);
        free(unused);
    }
    s.c = c;
    s.want_oc = (double *)calloc((size_t)s.no, 8);
    s.want_lse = (double *)calloc((size_t)s.nh, 8);
    s.want_q = (double *)calloc((size_t)s.nq, 8);
    s.want_rows = (double *)calloc((size_t)s.nr, 8);
    s.want_psum = (double *)calloc((size_t)s.ns, 8);
    s.lse = (float *)malloc((size_t)s.nh * 4);
    s.delta = (float *)malloc((size_t)s.nh * 4);
    sparse_forward_cpu(c, s.q, s.rows, s.want_oc, s.want_lse, N);
    for (int64_t y = 0; y < s.nh; y++) {
        double v = 0;
        for (int d = 0; d < x.Dv; d++) v += (double)s.d_oc[y * x.Dv + d] * s.want_oc[y * x.Dv + d];
        s.delta[y] = (float)v;
        s.lse[y] = (float)s.want_lse[y];
    }
    sparse_backward_cpu(c, s.q, s.rows, s.d_oc, s.lse, s.delta, s.want_q, s.want_rows, s.want_psum, N);
    return s;
}
static void case_free(Case *s) {
    const void *all[] = {s->q, s->rows, s->d_oc, s->lse, s->delta, s->base, s->q16, s->rows16, s->d_oc16, s->want_oc, s->want_lse, s->want_q, s->want_rows,
                         s->want_psum, s->reached, s->c.place, s->c.count, s->c.sinks};
    for (const void *one : all) free((void *)one);
}

enum { PLAIN_FLOAT, PLAIN_BF16, PSUM, ATOMIC, ROWS_BF16, ROWS_FLOAT, VERSIONS };
static const char *version_name[VERSIONS] = {"1 plain float", "1 plain bf16", "2 psum", "2 atomic", "2 rows bf16", "2 rows float"};

// Runs a version on guarded copies of the operands; outputs and scratch full of NaN but for d_rows.
template <class X> static Output case_run(const Case *s, const X *q_host, const X *rows_host, const X *d_oc_host, int version) {
    SparseAttention c = s->c;
    int N = s->N, chunk = N / 3 + 1;
    int64_t pairs = (int64_t)chunk * c.S, space = std::max(pairs * c.H, pairs * (c.Dk + c.Dv)), all_rows = (int64_t)s->B * c.n_rows;
    X *q = guarded(q_host, s->nq), *rows = guarded(rows_host, s->nr), *d_oc = guarded(d_oc_host, s->no);
    X *oc = guarded((X *)NULL, s->no), *d_q = guarded((X *)NULL, s->nq);
    int32_t *place = guarded(c.place, s->ns), *count = guarded(c.count, N);
    float *lse_in = guarded(s->lse, s->nh), *delta = guarded(s->delta, s->nh), *d_rows = guarded(s->base, s->nr), *lse = guarded((float *)NULL, s->nh);
    float *psum = guarded((float *)NULL, s->ns), *scratch = guarded((float *)NULL, space), *scratch2 = guarded((float *)NULL, space);
    float *sinks = c.sinks ? guarded(c.sinks, c.H) : NULL;
    c.place = place;
    c.count = count;
    c.sinks = sinks;
    PairLists lists = pair_lists_new(pairs, all_rows);
    Output o;
    memset(&o, 0, sizeof o);
    if (version == PLAIN_FLOAT || version == PLAIN_BF16)
        for (int i0 = 0; i0 < N; i0 += chunk) {
            int n = std::min(chunk, N - i0);
            sparse_forward_plain<X>(c, q, rows, oc, lse, scratch, i0, n);
            pair_lists_build(&lists, c, s->B, i0, n);
            sparse_backward_plain<X>(c, q, rows, d_oc, lse_in, delta, d_q, d_rows, psum, scratch, scratch2, &lists, s->B, i0, n);
            o.heads_forward = o.heads = c.H;
        }
    else if constexpr (sizeof(X) == 2) {
        Backward b = {q, rows, d_oc, lse_in, delta, d_q, d_rows, psum};
        o.heads_forward = sparse_forward(c, q, rows, oc, lse, 0, chunk) ? sparse_forward(c, q, rows, oc, lse, chunk, N - chunk) : 0;
        if (version == PSUM) {
            b.d_oc = NULL;
            b.delta = NULL;
            b.d_q = NULL;
            b.d_rows = NULL;
            o.heads = sparse_backward<SA_PSUM>(c, b, 0, N);
        } else if (version == ATOMIC) o.heads = sparse_backward<SA_ATOMIC>(c, b, 0, N);
        else if (version == ROWS_BF16) o.heads = sparse_backward_rows<SA_ROWS_BF16, bf16>(c, b, &lists, (bf16 *)scratch, s->B, N, chunk);
        else o.heads = sparse_backward_rows<SA_ROWS_FLOAT, float>(c, b, &lists, scratch, s->B, N, chunk);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    o.oc = to_host(oc, s->no);
    o.d_q = to_host(d_q, s->nq);
    o.lse = to_host(lse, s->nh);
    o.d_rows = to_host(d_rows, s->nr);
    o.psum = to_host(psum, s->ns);
    o.stray = guarded_free(q, s->nq) + guarded_free(rows, s->nr) + guarded_free(d_oc, s->no) + guarded_free(oc, s->no) + guarded_free(d_q, s->nq) +
              guarded_free(place, s->ns) + guarded_free(count, N) + guarded_free(lse_in, s->nh) + guarded_free(delta, s->nh) + guarded_free(d_rows, s->nr) +
              guarded_free(lse, s->nh) + guarded_free(psum, s->ns) + guarded_free(scratch, space) + guarded_free(scratch2, space);
    if (sinks) o.stray += guarded_free(sinks, c.H);
    pair_lists_free(&lists);
    return o;
}
static Output version_run(const Case *s, int version) {
    return version == PLAIN_FLOAT ? case_run<float>(s, s->q, s->rows, s->d_oc, version) : case_run<bf16>(s, s->q16, s->rows16, s->d_oc16, version);
}
static void output_free(Output *o) {
    void *all[] = {o->oc, o->d_q, o->lse, o->d_rows, o->psum};
    for (void *one : all) free(one);
}

static void check_case(uint64_t seed, Shape x) {
    Case s = case_new(seed, x);
    for (int version = 0; version < VERSIONS; version++) {
        char name[160];
        Output o = version_run(&s, version);
        snprintf(name, sizeof name, "%-13s B=%d T=%d H=%d G=%d Dk=%d Dv=%d S=%d%s%s%s heads %d %d", version_name[version], x.B, x.T, x.H, x.G, x.Dk, x.Dv, x.S,
                 x.split ? " split" : "", x.sinks ? " sinks" : "", x.hot ? " hot" : "", o.heads_forward, o.heads);
        if (!o.heads || !o.heads_forward) { // sizes that no instance serves are for kernel 1; every other must have run
            int wide = x.Dk + x.split * x.Dv, most = smem_limit() < 160000 ? 144 : MAX_D;
            int fits = x.Dk % 16 == 0 && x.Dv % 16 == 0 && s.c.R % 8 == 0 && wide <= most;
            if (fits) check(0, name, NAN);
            output_free(&o);
            continue;
        }
        int exact = version == PLAIN_FLOAT;
        size_t size = exact ? 4 : 2;
        double e[5] = {0, largest_error(o.lse, s.want_lse, s.nh, exact ? 1e-5 : 1e-4), 0, 0, largest_error(o.psum, s.want_psum, s.ns, exact ? 1e-4 : 1e-2)}, worst = 0;
        e[0] = exact ? output_error((float *)o.oc, NULL, s.want_oc, s.no, 1e-5) : output_error((bf16 *)o.oc, NULL, s.want_oc, s.no, 1e-2);
        if (version != PSUM) {
            e[2] = exact ? output_error((float *)o.d_q, NULL, s.want_q, s.nq, 2e-5) : output_error((bf16 *)o.d_q, NULL, s.want_q, s.nq, 1.5e-2);
            e[3] = output_error(o.d_rows, s.base, s.want_rows, s.nr, exact ? 2e-5 : 1.5e-2);
        }
        for (double v : e) worst = std::max(worst, v);
        int64_t moved = 0; // of d_rows, that should have stayed; of psum, behind the last place
        for (int64_t i = 0; i < s.nr; i++) moved += (!s.reached[i] || version == PSUM) && o.d_rows[i] != s.base[i];
        for (int64_t i = 0; i < s.ns; i++) moved += i % x.S >= s.c.count[i / x.S] && o.psum[i] != 0;
        if (version == PSUM)
            for (int64_t i = 0; i < s.nq * 2; i++) moved += ((unsigned char *)o.d_q)[i] != 0xff;
        if (!check(worst < 1 && !o.stray && !moved, name, worst))
            printf("     error over limit: oc %.3g lse %.3g d_qrow %.3g d_rows %.3g psum %.3g; %d stray bytes, %lld moved\n", e[0], e[1], e[2], e[3], e[4], o.stray,
                   (long long)moved);
        Output again = version_run(&s, version);
        int differ = memcmp(o.oc, again.oc, (size_t)s.no * size) || memcmp(o.lse, again.lse, (size_t)s.nh * 4) || memcmp(o.psum, again.psum, (size_t)s.ns * 4) ||
                     memcmp(o.d_q, again.d_q, (size_t)s.nq * size) || (version != ATOMIC && memcmp(o.d_rows, again.d_rows, (size_t)s.nr * 4));
        if (differ) check(0, "              bit-equal on repeat", differ);
        output_free(&again);
        output_free(&o);
    }
    case_free(&s);
}

// ---- timing

// Places of query t: one row from each of S equal stretches of the t+1 that it sees; all of them while there are no more than S. Neighbour-like:
// the stretches move every 64 queries and a slot keeps its row for 2.5 queries, so that a query shares about 60 % with the one before.
__global__ static void spread_kernel(int32_t *place, int32_t *count, int S, int neighbours, int64_t n, uint64_t seed) {
    for (int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; x < n; x += (int64_t)gridDim.x * blockDim.x) {
        int64_t t = x / S, j = x % S, v = neighbours ? t / 64 * 64 + 1 : t + 1, from = j * v / S, to = (j + 1) * v / S;
        uint64_t turn = neighbours ? (uint64_t)((t * 2 + (int64_t)(rng_u64(seed, 31, (uint64_t)j) % 5)) / 5) : (uint64_t)t;
        place[x] = (int32_t)(v <= S ? j : from + (int64_t)(rng_u64(seed, 32 + turn, (uint64_t)j) % (uint64_t)(to - from)));
        if (j == 0) count[t] = (int32_t)(t + 1 < S ? t + 1 : S);
    }
}
template <class X> static X *device_zero(int64_t n) {
    X *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(X)));
    CUDA_CHECK(cudaMemset(p, 0, (size_t)n * sizeof(X)));
    return p;
}
// flops: a pair and head. Pairs are those that exist: fewer than N*S, as early queries see fewer than S rows.
static void print_time(const char *name, SparseAttention c, int neighbours, int queries, double pairs, double flops, Timing t) {
    printf("%-22s %-11s N=%-5d H=%-2d Dk=%-3d Dv=%-3d k=%-4d %9.3f ms (%.3f..%.3f) %6.1f TFLOP/s %6.0f GB/s gathered\n", name, neighbours ? "neighbour" : "independent",
           queries, c.H, c.Dk, c.Dv, c.S, t.median, t.lo, t.hi, flops * pairs * c.H / t.median * 1e-9, pairs * c.Dk * 2 / t.median * 1e-6);
}

static void time_case(uint64_t seed, int T, int H, int Dk, int Dv, int k, int neighbours) {
    const int64_t space = (int64_t)2 << 30; // bytes of written rows at once
    int64_t nq = (int64_t)T * H * Dk, no = (int64_t)T * H * Dv, nh = (int64_t)T * H, ns = (int64_t)T * k;
    int32_t *place = device_zero<int32_t>(ns), *count = device_zero<int32_t>(T);
    spread_kernel<<<1024, 256>>>(place, count, k, neighbours, ns, seed);
    CUDA_CHECK(cudaGetLastError());
    SparseAttention c = {T, H, 1, Dk, Dv, Dk, 0, T, k, place, count, NULL, 1 / sqrtf((float)Dk)};
    bf16 *q = device_normal<bf16>(nq, seed, 1, 2.0f), *rows = device_normal<bf16>((int64_t)T * Dk, seed, 2, 1.0f), *d_oc = device_normal<bf16>(no, seed, 3, 1.0f);
    bf16 *oc = device_zero<bf16>(no), *d_q = device_zero<bf16>(nq);
    float *lse = device_zero<float>(nh), *delta = device_zero<float>(nh), *d_rows = device_zero<float>((int64_t)T * Dk), *psum = device_zero<float>(ns);
    Backward b = {q, rows, d_oc, lse, delta, d_q, d_rows, psum};
    double pairs = (double)ns - (double)k * (k - 1) / 2, forward = 2.0 * (Dk + Dv), backward = 2.0 * (3 * Dk + 2 * Dv); // query t lacks k-1-t places
    int few = 128; // queries of the plain version
    int chunk16 = (int)std::min((int64_t)T, space / (2 * k * Dk)), chunk32 = (int)std::min((int64_t)T, space / (4 * k * Dk));
    PairLists lists = pair_lists_new((int64_t)std::max(chunk16, few) * k, T);
    void *written = device_poison<char>(std::min(space, ns * Dk * 4));
    float *p = device_poison<float>((int64_t)few * k * H), *ds = device_poison<float>((int64_t)few * k * H);
    if (!neighbours) {
        pair_lists_build(&lists, c, 1, T - few, few);
        Timing t = time_kernel(2, [&] { sparse_forward_plain<bf16>(c, q, rows, oc, lse, p, T - few, few); });
        print_time("1 plain forward", c, 0, few, (double)few * k, forward, t);
        t = time_kernel(2, [&] { sparse_backward_plain<bf16>(c, q, rows, d_oc, lse, delta, d_q, d_rows, psum, p, ds, &lists, 1, T - few, few); });
        print_time("1 plain backward", c, 0, few, (double)few * k, backward, t);
    }
    print_time("2 forward", c, neighbours, T, pairs, forward, time_kernel(5, [&] { sparse_forward(c, q, rows, oc, lse, 0, T); }));
    print_time("2 psum", c, neighbours, T, pairs, 2.0 * Dk, time_kernel(5, [&] { sparse_backward<SA_PSUM>(c, b, 0, T); }));
    print_time("2 backward atomic", c, neighbours, T, pairs, backward, time_kernel(5, [&] { sparse_backward<SA_ATOMIC>(c, b, 0, T); }));
    print_time("2 backward rows bf16", c, neighbours, T, pairs, backward,
               time_kernel(5, [&] { sparse_backward_rows<SA_ROWS_BF16, bf16>(c, b, &lists, (bf16 *)written, 1, T, chunk16); }));
    print_time("2 backward rows float", c, neighbours, T, pairs, backward,
               time_kernel(5, [&] { sparse_backward_rows<SA_ROWS_FLOAT, float>(c, b, &lists, (float *)written, 1, T, chunk32); }));
    int i0 = T - chunk16;
    Plan plan = plan_of(c, 1);
    Share z = share_of(c, 0, plan.heads);
    Timing sort = time_kernel(5, [&] { pair_lists_build(&lists, c, 1, i0, chunk16); });
    Timing main_part = time_kernel(5, [&] { backward_share<SA_ROWS_BF16>(c, z, plan, b, written, lists.slot_of, i0, chunk16); });
    Timing sum = time_kernel(5, [&] { rows_sum_kernel<bf16><<<(unsigned)T, SUM_THREADS>>>(d_rows, c.R, z, c.Dk, (const bf16 *)written, lists.start); });
    printf("    of \"rows bf16\", the last %d queries: lists %.3f ms, kernel %.3f ms, sum of rows %.3f ms (%.0f GB/s)\n", chunk16, sort.median, main_part.median,
           sum.median, (double)chunk16 * k * Dk * 2 / sum.median * 1e-6);
    const void *all[] = {place, count, q, rows, d_oc, oc, d_q, lse, delta, d_rows, psum, written, p, ds};
    for (const void *one : all) CUDA_CHECK(cudaFree((void *)one));
    pair_lists_free(&lists);
}

int main(int argc, char **argv) {
    uint64_t seed = seed_of(argc, argv);
    int small = argc > 2 && !strcmp(argv[2], "small");
    static const Shape shapes[] = { // B, T, n_rows, H, G, Dk, Dv, split, S, sinks, hot
        {1, 7, 40, 1, 1, 20, 12, 0, 9, 0, 0},      {2, 6, 50, 4, 2, 24, 24, 1, 33, 1, 0},      {1, 7, 5, 1, 1, 48, 32, 0, 1, 1, 0},
        {2, 6, 90, 3, 1, 48, 32, 0, 65, 1, 0},     {1, 9, 220, 6, 1, 144, 128, 0, 200, 0, 1},  {2, 7, 150, 8, 1, 144, 128, 0, 64, 0, 0},
        {3, 5, 140, 12, 1, 160, 128, 0, 130, 0, 0}, {1, 8, 210, 12, 1, 288, 256, 0, 200, 0, 0}, {1, 7, 120, 16, 1, 320, 256, 0, 100, 0, 0},
        {1, 6, 80, 16, 1, 576, 512, 0, 70, 0, 0},  {2, 6, 80, 24, 1, 144, 128, 0, 63, 1, 1},   {1, 6, 150, 24, 1, 576, 512, 0, 130, 0, 0},
        {1, 6, 70, 24, 1, 320, 256, 0, 64, 0, 0},  {1, 7, 100, 48, 1, 288, 256, 0, 97, 0, 0},  {1, 6, 100, 48, 1, 160, 128, 0, 33, 1, 0},
        {1, 6, 220, 64, 1, 576, 512, 0, 200, 0, 0}, {2, 5, 70, 64, 1, 320, 256, 0, 66, 1, 1},  {1, 5, 80, 128, 1, 576, 512, 0, 65, 0, 0},
        {1, 6, 60, 128, 1, 48, 32, 0, 33, 1, 0},   {2, 6, 90, 8, 2, 64, 64, 1, 70, 0, 0},      {1, 8, 210, 12, 2, 64, 64, 1, 200, 1, 1},
        {1, 6, 90, 48, 2, 64, 64, 1, 65, 0, 0},    {1, 6, 60, 128, 2, 64, 64, 1, 33, 0, 0},    {2, 6, 70, 6, 2, 48, 32, 1, 64, 1, 0},
        {1, 6, 90, 16, 1, 128, 128, 0, 70, 1, 0},  {1, 6, 70, 64, 1, 512, 512, 0, 65, 1, 0},   {1, 5, 70, 64, 1, 576, 576, 0, 65, 0, 0},
        {1, 6, 60, 16, 2, 256, 256, 1, 33, 0, 0},  {1, 5, 40, 12, 1, 576, 576, 0, 33, 1, 0},   {1, 5, 40, 3, 1, 32, 48, 1, 33, 0, 1}};
    for (Shape x : shapes) check_case(seed, x);
    for (int neighbours = 0; neighbours < 2 && !small; neighbours++) {
        time_case(seed, 16384, 8, 144, 128, 256, neighbours);
        time_case(seed, 16384, 12, 288, 256, 1024, neighbours);
        time_case(seed, 16384, 16, 320, 256, 1024, neighbours);
        time_case(seed, 16384, 64, 576, 512, 2048, neighbours);
    }
    return check_summary();
}
