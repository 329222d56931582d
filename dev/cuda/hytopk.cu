// HyTopK: the exact top-k of lightning-indexer scores, without a stored table of scores.
//
// Row i = b*T + t has H index heads q[i] [H, D] and weights w[i] [H] (every scale inside); sequence b has n_cand index keys [n_cand, D]:
//   I[t,s] = sum_h w[t,h] relu(q[t,h] . k[s])
// Row i sees the candidates [lo, lo + n), lo = doc[i] / r, n = (t - doc[i] + 1) / r: tokens for r = 1, else complete pools of r tokens of
// its document. sel[i] = the k visible candidates with the largest (score, then lowest index), ascending, -1 behind the last. +0 equals
// -0. NaN is largest, and a NaN that is chosen is counted. A row with n <= k takes all it sees and is not scored at all.
//
// (score, index) is a total order, so the set is unique: candidates may be collected in any order, with any buffer and any threshold,
// as long as none of the k best is lost. Each version therefore is exact with respect to its own scores, and all but version 2 (whose
// dot products add in another order) aim at the same bits: two chains of fmaf, even heads and odd heads, each in order, then their sum;
// x + |x| with half the weight stands for relu(x), since it keeps a NaN and max(x, 0) does not. (An infinite product becomes NaN.)
//
// 1  table          scores of a chunk of rows to memory, then a radix selection per row: the baseline that `--topk table` keeps
// 2  stream, FMA    scores of 256 keys at a time; those above the row's threshold go to a buffer; a full buffer is cut to its k best
// 3  stream, mma    the same with mma.sync (sm_80 and later): any H in 1..64, any D of 32, 64, 128; needs no workspace
// 4  wgmma scan     sm_90a, H >= 4: one pass over the keys at tensor speed, scores above a *given* threshold to lists; select from the lists
// 5  HyTopK         4 with thresholds guessed from 1 of 64 keys; rows whose guess fails (count < k, or a list full) are found on the device
//                   and done again by 3: a buffer is a cache, never a bound on correctness
// H < 4 or another card than sm_90a: 5 is not available, use 3.
//
// Run: hytopk [seed [small]]; small: checks only. Needs -lcublasLt (the rate of a plain bf16 product is the unit of the timings).
#include "common.h"
#include <limits.h>
#include <float.h>
#include <vector>
#include <cuda.h>
#include <cublasLt.h>

typedef struct {
    int B, T, n_cand, H, D, k, r;
    const bf16 *q, *key;      // [B*T, H, D], [B, n_cand, D]
    const float *w;           // [B*T, H]
    const int32_t *doc;       // [B*T] first position of the row's document
    int32_t *sel;             // [B*T, k]
    unsigned long long *nans; // chosen NaN scores, added to
} TopK;

enum { THREADS = 256, WARPS = THREADS / 32, CHUNK = 256, SCORE_PITCH = CHUNK + 8, HEADS_MAX = 64 };

// ---- the order of selection

// Monotone unsigned integer of a float: -0 as +0, NaN largest. 0 is no score's.
__host__ __device__ static inline uint32_t ordered(float s) {
    uint32_t u;
    s += 0.0f;
    memcpy(&u, &s, 4);
    u ^= (0u - (u >> 31)) | 0x80000000u;
    return s != s ? 0xffffffffu : u;
}
__host__ __device__ static inline uint64_t order_key(float s, uint32_t index) { return (uint64_t)ordered(s) << 32 | (uint32_t)~index; }
// A threshold just below the score that stands behind an ordered integer; a score passes when not (score <= threshold), so a NaN always
// passes and a NaN threshold lets everything pass. Below +0 comes -FLT_MIN: the next float down is -0, which equals it.
__host__ __device__ static inline float just_below(uint32_t o) {
    float f;
    if (o == 0xffffffffu) return INFINITY;
    if (o == 0x80000000u) return -FLT_MIN;
    if (o <= 0x007fffffu) return NAN;
    o--;
    o = o >> 31 ? o & 0x7fffffffu : ~o;
    memcpy(&f, &o, 4);
    return f;
}
// The candidates that a row sees: first (in its sequence) and number.
__host__ __device__ static inline int2 visible(const TopK &c, int64_t row) {
    int d = c.doc[row];
    return make_int2(d / c.r, ((int)(row % c.T) - d + 1) / c.r);
}
// Column p of a group of (query, head) columns. The order makes an mma result hold all heads of a (query, key) pair in one thread: thread
// l has columns 8j + 2(l%4) + {0,1}, which are heads 2(j mod H/2) + {0,1} of query 4 floor(j / (H/2)) + l%4. H even.
__host__ __device__ static inline int column_query(int p, int H) { return p / 8 / (H / 2) * 4 + p % 8 / 2; }
__host__ __device__ static inline int column_head(int p, int H) { return p / 8 % (H / 2) * 2 + p % 2; }
__host__ __device__ static inline int column_of(int query, int head, int H) { return (query / 4 * (H / 2) + head / 2) * 8 + query % 4 * 2 + head % 2; }

// ---- CPU reference, float64: the scores of one row, and the test of a selection against them

static void scores_cpu(const TopK &c, const float *q, const float *key, int64_t row, double *score) {
    int2 v = visible(c, row);
    for (int s = 0; s < v.y; s++) {
        const float *x = key + ((row / c.T) * c.n_cand + v.x + s) * c.D;
        score[s] = 0;
        for (int h = 0; h < c.H; h++) {
            const float *y = q + (row * c.H + h) * c.D;
            double dot = 0;
            for (int d = 0; d < c.D; d++) dot += (double)x[d] * (double)y[d];
            score[s] += (double)c.w[row * c.H + h] * (dot < 0 ? 0 : dot);
        }
    }
}
// The exact answer for scores [n] of candidates lo..: k best by (score, lowest index), ascending. Returns how many of them are NaN.
static int select_cpu(const float *score, int lo, int n, int k, int32_t *sel) {
    std::vector<uint64_t> key((size_t)n);
    int m = std::min(n, k), nans = 0;
    for (int s = 0; s < n; s++) key[(size_t)s] = order_key(score[s], (uint32_t)(lo + s));
    if (n > k) std::nth_element(key.begin(), key.begin() + (k - 1), key.end(), [](uint64_t a, uint64_t b) { return a > b; });
    for (int j = 0; j < m; j++) {
        sel[j] = (int32_t)~(uint32_t)key[(size_t)j];
        nans += key[(size_t)j] >> 32 == 0xffffffffu;
    }
    std::sort(sel, sel + m);
    for (int j = m; j < k; j++) sel[j] = -1;
    return n > k ? nans : 0;
}

// ---- shared by the kernels: radix selection

// The digit in which the k-th largest lies, of 256 counts; *left: its rank within that digit, *count: how many there are. One warp.
__device__ static int find_digit(const int *hist, int k, int *left, int *count) {
    int lane = threadIdx.x % 32, own = 0, digit = 255 - 8 * lane, rank;
    for (int j = 0; j < 8; j++) own += hist[digit - j];
    int sum = own;
    for (int o = 1; o < 32; o *= 2) {
        int v = __shfl_up_sync(0xffffffffu, sum, o);
        if (lane >= o) sum += v;
    }
    int who = __ffs((int)__ballot_sync(0xffffffffu, sum >= k)) - 1;
    rank = k - (sum - own);
    if (lane == who)
        while (hist[digit] < rank) rank -= hist[digit--];
    digit = __shfl_sync(0xffffffffu, digit, who);
    *left = __shfl_sync(0xffffffffu, rank, who);
    *count = hist[digit];
    return digit;
}

typedef struct { int hist[256], digit, left, count; uint32_t lo, hi; } Radix; // in shared memory
typedef struct { uint32_t bound; int ties; } Cut; // chosen are all above bound and, of those equal to it, the first "ties"

// The k-th largest (1 <= k <= n) of load(0..n-1), by a whole block. Digits are taken from the range that the values really span: candidates
// of a top-k lie close together. digits = 4: exact. Fewer: a bound at or below the k-th, off by 2^-8 digits of the range. 0: stop as soon as
// a bound between the k-th and the next value is known. In both of these cases ties = INT_MAX: all that equal the bound belong.
template <class F> __device__ static Cut block_kth(F load, int n, int k, int digits, Radix *s) {
    uint32_t lo = 0xffffffffu, hi = 0, prefix = 0;
    __syncthreads();
    if (threadIdx.x == 0) { s->lo = lo; s->hi = hi; }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        uint32_t x = load(i);
        lo = min(lo, x);
        hi = max(hi, x);
    }
    lo = __reduce_min_sync(0xffffffffu, lo);
    hi = __reduce_max_sync(0xffffffffu, hi);
    if (threadIdx.x % 32 == 0) { atomicMin(&s->lo, lo); atomicMax(&s->hi, hi); }
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
            if (((uint64_t)(x ^ prefix) >> (shift + bits)) == 0) atomicAdd(&s->hist[x >> shift & ((1u << bits) - 1)], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            int left, count, digit = find_digit(s->hist, k, &left, &count);
            if (threadIdx.x == 0) { s->digit = digit; s->left = left; s->count = count; }
        }
        __syncthreads();
        prefix |= (uint32_t)s->digit << shift;
        k = s->left;
        done = shift > 0 && (digits == 0 || (digits < 0 && s->count == k));
        if (done) k = INT_MAX;
        __syncthreads();
    }
    Cut cut = {lo + prefix, k};
    return cut;
}

// Selection when load(0..n-1) stands in index order, by a whole block: out gets index(i) of the k largest, in order. Warps own
// consecutive stretches: one pass counts, one writes. n > k. shared [2 * 32]. Adds chosen NaNs to *nans.
template <class F, class G> __device__ static void select_in_order(F load, G index, int n, int k, int32_t *out, Radix *s, int *shared, unsigned long long *nans) {
    Cut cut = block_kth(load, n, k, 0, s);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, bad = 0;
    int from = (int)((int64_t)n * warp / warps), to = (int)((int64_t)n * (warp + 1) / warps), above = 0, equal = 0;
    for (int i = from + lane; i < to; i += 32) {
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
    for (int i0 = from; i0 < to; i0 += 32) {
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
    if (lane == 0 && bad) atomicAdd(nans, (unsigned long long)bad);
}

// A row that sees no more than k candidates takes all of them.
__device__ static void take_all(int32_t *out, int2 v, int k, int thread, int threads) {
    for (int j = thread; j < k; j += threads) out[j] = j < v.y ? v.x + j : -1;
}

// ---- shared by versions 1 to 3: scores of 256 keys for a few queries, in shared memory

// The rows that a block serves at a time, in shared memory: from a list of rows, or consecutive ones; -1: none. Keys are numbered over all
// sequences, so that any rows may share a group; a row sees keys lo..hi-1, all of them keys from..to-1.
typedef struct { int64_t row[8]; int lo[8], hi[8], from, to; } Group;

// By a whole block, barriers included.
__device__ static void group_of(Group *g, const TopK &c, const int *list, int64_t first, int64_t end, int qb) {
    __syncthreads();
    if (threadIdx.x == 0) {
        g->from = INT_MAX;
        g->to = 0;
        for (int j = 0; j < qb; j++) {
            int64_t row = first + j < end ? (list ? list[first + j] : first + j) : -1;
            int2 v = row < 0 ? make_int2(0, 0) : visible(c, row);
            g->row[j] = row;
            g->lo[j] = g->hi[j] = 0;
            if (v.y <= c.k) continue; // takes all: nothing to score
            g->lo[j] = (int)(row / c.T) * c.n_cand + v.x;
            g->hi[j] = g->lo[j] + v.y;
            g->from = min(g->from, g->lo[j]);
            g->to = max(g->to, g->hi[j]);
        }
    }
    __syncthreads();
}

// Shared memory of a block that serves qb queries: keys [CHUNK, D+8], columns [max(qb,4) * HP, D+8], half weights [max(qb,4), HP], scores
// [max(qb,4), SCORE_PITCH], and for streaming a histogram a warp and a buffer of "capacity" a query. HP = max(H, 2): H = 1 gets a head of zeros.
typedef struct { bf16 *key, *q; float *w, *score; int *hist; uint64_t *buffer; } Shared;
__host__ __device__ static size_t shared_layout(const TopK &c, int qb, int capacity, char *base, Shared *s) {
    int hp = c.H > 2 ? c.H : 2, nq = qb > 4 ? qb : 4;
    size_t at = 0, sizes[6] = {(size_t)qb * (size_t)capacity * 8, (size_t)CHUNK * (size_t)(c.D + 8) * 2, (size_t)(nq * hp) * (size_t)(c.D + 8) * 2,
                               (size_t)(nq * hp) * 4, (size_t)nq * SCORE_PITCH * 4, capacity ? (size_t)WARPS * 1024 : 0};
    char *p[6];
    for (int i = 0; i < 6; i++) { p[i] = base + at; at += (sizes[i] + 15) / 16 * 16; }
    if (s) {
        s->buffer = (uint64_t *)p[0];
        s->key = (bf16 *)p[1];
        s->q = (bf16 *)p[2];
        s->w = (float *)p[3];
        s->score = (float *)p[4];
        s->hist = (int *)p[5];
    }
    return at;
}

__device__ static void stage_queries(const TopK &c, const Group &g, int qb, Shared s) {
    int hp = max(c.H, 2), nq = max(qb, 4), words = c.D / 8;
    for (int x = threadIdx.x; x < nq * hp * words; x += THREADS) {
        int p = x / words, d = x % words * 8, j = column_query(p, hp), h = column_head(p, hp);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (j < qb && h < c.H && g.row[j] >= 0) v = *(const uint4 *)(c.q + (g.row[j] * c.H + h) * c.D + d);
        *(uint4 *)(s.q + p * (c.D + 8) + d) = v;
    }
    for (int x = threadIdx.x; x < nq * hp; x += THREADS) {
        int j = x / hp, h = x % hp;
        s.w[x] = j < qb && h < c.H && g.row[j] >= 0 ? 0.5f * c.w[g.row[j] * c.H + h] : 0;
    }
}
__device__ static void stage_keys(const TopK &c, int s0, bf16 *to) {
    int words = c.D / 8, last = c.B * c.n_cand;
    for (int x = threadIdx.x; x < CHUNK * words; x += THREADS) {
        int i = x / words, d = x % words * 8, take = s0 + i < last;
        cp_async_16(smem_address(to + i * (c.D + 8) + d), c.key + (int64_t)(take ? s0 + i : 0) * c.D + d, take);
    }
    cp_async_commit();
}

enum { FMA, MMA };

// Plain: a thread has a key.
template <int D> __device__ static void score_fma(Shared s, int H, int nq) {
    const bf16 *x = s.key + threadIdx.x * (D + 8);
    for (int j = 0; j < nq; j++) {
        float even = 0, odd = 0;
        for (int h = 0; h < H; h++) {
            const bf16 *y = s.q + column_of(j, h, H) * (D + 8);
            float dot = 0;
            for (int d = 0; d < D; d++) dot = fmaf((float)y[d], (float)x[d], dot);
            float &sum = h % 2 ? odd : even;
            sum = fmaf(dot + fabsf(dot), s.w[j * H + h], sum);
        }
        s.score[j * SCORE_PITCH + threadIdx.x] = even + odd;
    }
}

// Tensor cores: a warp has 32 keys (two tiles of 16 rows, in registers) and walks all columns, 8 at a time. A thread finds all heads of its
// queries in its own accumulators (see column_query), so the sum over heads needs no shuffle.
template <int D> __device__ static void score_mma(Shared s, int H, int nq) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t a[2][D / 16][4], b[4];
    for (int m = 0; m < 2; m++)
        for (int d = 0; d < D / 16; d++) ldmatrix_x4(a[m][d], smem_address(s.key + (warp * 32 + m * 16 + lane % 16) * (D + 8) + d * 16 + lane / 16 * 8));
    for (int g = 0; g < nq / 4; g++) {
        float even[4] = {0}, odd[4] = {0};
        int query = g * 4 + lane % 4;
        for (int j = 0; j < H / 2; j++) {
            float x[2][4] = {{0}};
            for (int d = 0; d < D / 32; d++) {
                ldmatrix_x4(b, smem_address(s.q + ((g * (H / 2) + j) * 8 + lane % 8) * (D + 8) + d * 32 + lane / 8 * 8));
                for (int m = 0; m < 2; m++) {
                    mma_16816(x[m], a[m][2 * d], b);
                    mma_16816(x[m], a[m][2 * d + 1], b + 2);
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
template <int METHOD, int D> __device__ static void score_chunk(Shared s, int H, int nq) {
    if (METHOD == FMA) score_fma<D>(s, H, nq);
    else score_mma<D>(s, H, nq);
}

// ---- kernel 1: the table
// Scores of rows first..first+n-1 to table [n, n_cand] (only visible ones), then one block a row selects. Memory n * n_cand * 4 bytes, and the
// table crosses the memory bus at least five times: once written, then read for the range, one to four digits, the count and the output.

template <int METHOD, int D> __global__ __launch_bounds__(THREADS) static void table_kernel(TopK c, int qb, float *table, int64_t first, int n) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Group g;
    Shared s;
    shared_layout(c, qb, 0, memory, &s);
    group_of(&g, c, NULL, first + (int64_t)blockIdx.x * qb, first + n, qb);
    if (g.from >= g.to) return;
    stage_keys(c, g.from, s.key);
    stage_queries(c, g, qb, s);
    for (int s0 = g.from; s0 < g.to; s0 += CHUNK) {
        cp_async_wait<0>();
        __syncthreads();
        score_chunk<METHOD, D>(s, max(c.H, 2), max(qb, 4));
        __syncthreads();
        if (s0 + CHUNK < g.to) stage_keys(c, s0 + CHUNK, s.key);
        int at = s0 + (int)threadIdx.x;
        for (int j = 0; j < qb; j++)
            if (at >= g.lo[j] && at < g.hi[j]) table[(g.row[j] - first) * c.n_cand + at - (int)(g.row[j] / c.T) * c.n_cand] = s.score[j * SCORE_PITCH + threadIdx.x];
    }
}

__global__ static void table_select_kernel(TopK c, const float *table, int64_t first) {
    __shared__ Radix radix;
    __shared__ int shared[64];
    int64_t row = first + blockIdx.x;
    int2 v = visible(c, row);
    const float *score = table + (int64_t)blockIdx.x * c.n_cand + v.x;
    if (v.y <= c.k) take_all(c.sel + row * c.k, v, c.k, threadIdx.x, blockDim.x);
    else select_in_order([=](int i) { return ordered(score[i]); }, [=](int i) { return v.x + i; }, v.y, c.k, c.sel + row * c.k, &radix, shared, c.nans);
}

// ---- kernels 2 and 3: streaming
// The keys come in ascending order, 256 at a time. A query has a buffer of order keys and a threshold tau, at first 0. A warp appends, in index
// order, what is above tau. When the buffer might not take the next chunk it is cut to its k largest, and the k-th becomes tau: nothing below
// it can be among the k best any more. The cut keeps the order, so at the end the buffer's indices already ascend.

// The k-th largest of n distinct keys, by one warp. hist [256].
__device__ static uint64_t warp_kth(const uint64_t *key, int n, int k, int *hist) {
    uint64_t prefix = 0, mask = 0;
    int lane = threadIdx.x % 32, left, count;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = lane; i < 256; i += 32) hist[i] = 0;
        __syncwarp();
        for (int i = lane; i < n; i += 32)
            if ((key[i] & mask) == prefix) atomicAdd(&hist[key[i] >> shift & 255], 1);
        __syncwarp();
        int digit = find_digit(hist, k, &left, &count);
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
    int lane = threadIdx.x % 32, kept = 0;
    for (int i0 = 0; i0 < n; i0 += 32) {
        uint64_t x = i0 + lane < n ? key[i0 + lane] : 0;
        int pass = i0 + lane < n && x >= bound;
        unsigned ballot = __ballot_sync(0xffffffffu, pass); // also: all lanes have read before any writes
        if (pass) key[kept + __popc(ballot & ((1u << lane) - 1))] = x;
        kept += __popc(ballot);
        __syncwarp();
    }
    return kept;
}

enum { RETRY_ROWS = 64, RETRY_PARTS = 16 }; // so few rows of a list are split over the keys, see version 5

// qb (8, 4, 2 or 1) queries a block, warp j keeps the buffer of query j. Rows first..first+n-1 (list NULL; last ones, which see most, begin), or
// list[0..*count-1]. In a list of at most RETRY_ROWS rows each group's keys are dealt out to RETRY_PARTS blocks, which leave their k best in
// partial [row of the list, part, k] and their number in partial_n, for merge_kernel.
template <int METHOD, int D> __global__ __launch_bounds__(THREADS) static void stream_kernel(TopK c, int qb, int capacity, const int *list, const int *count,
                                                                                         int64_t first, int n_rows, uint64_t *partial, int *partial_n) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Group g;
    Shared s;
    shared_layout(c, qb, capacity, memory, &s);
    int total = list ? *count : n_rows, groups = (total + qb - 1) / qb, parts = list && total <= RETRY_ROWS ? RETRY_PARTS : 1;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t *key = s.buffer + (warp < qb ? warp : 0) * capacity;
    for (int item = blockIdx.x; item < groups * parts; item += gridDim.x) {
        int group = groups - 1 - item / parts, part = item % parts, n = 0;
        int64_t at = (list ? 0 : first) + (int64_t)group * qb, end = (list ? 0 : first) + total;
        group_of(&g, c, list, at, end, qb);
        uint64_t tau = 0;
        int64_t row = warp < qb ? g.row[warp] : -1;
        int lo = warp < qb ? g.lo[warp] : 0, hi = warp < qb ? g.hi[warp] : 0, from = g.from, to = g.to;
        if (parts > 1) { // this part's share, in whole chunks
            int chunks = (to - from + CHUNK - 1) / CHUNK;
            to = min(to, from + (int)((int64_t)chunks * (part + 1) / parts) * CHUNK);
            from += (int)((int64_t)chunks * part / parts) * CHUNK;
        }
        if (from < to) {
            stage_keys(c, from, s.key);
            stage_queries(c, g, qb, s);
        }
        for (int s0 = from; s0 < to; s0 += CHUNK) {
            cp_async_wait<0>();
            __syncthreads();
            score_chunk<METHOD, D>(s, max(c.H, 2), max(qb, 4));
            __syncthreads();
            if (s0 + CHUNK < to) stage_keys(c, s0 + CHUNK, s.key);
            if (warp >= qb || s0 >= hi || s0 + CHUNK <= lo) continue;
            if (n + CHUNK > capacity) {
                tau = warp_kth(key, n, c.k, s.hist + warp * 256);
                n = warp_keep(key, n, tau);
            }
            for (int i = lane; i < CHUNK; i += 32) {
                uint64_t x = s0 + i >= lo && s0 + i < hi && s0 + i < to ? order_key(s.score[warp * SCORE_PITCH + i], (uint32_t)(s0 + i)) : 0;
                unsigned ballot = __ballot_sync(0xffffffffu, x > tau);
                if (x > tau) key[n + __popc(ballot & ((1u << lane) - 1))] = x;
                n += __popc(ballot);
            }
            __syncwarp();
        }
        if (row < 0) continue;
        int2 v = visible(c, row);
        if (v.y <= c.k) { // never in a list
            take_all(c.sel + row * c.k, v, c.k, lane, 32);
            continue;
        }
        if (n > c.k) n = warp_keep(key, n, warp_kth(key, n, c.k, s.hist + warp * 256));
        if (parts > 1) {
            int64_t place = (at + warp) * parts + part;
            for (int j = lane; j < n; j += 32) partial[place * c.k + j] = key[j];
            if (lane == 0) partial_n[place] = n;
            continue;
        }
        int base = (int)(row / c.T) * c.n_cand;
        for (int j = lane; j < c.k; j += 32) {
            c.sel[row * c.k + j] = (int32_t)~(uint32_t)key[j] - base;
            if (key[j] >> 32 == 0xffffffffu) atomicAdd(c.nans, 1ull);
        }
    }
}

// The k best of the parts of one row: parts follow each other in index order, and so do the keys of each.
__global__ static void merge_kernel(TopK c, const int *list, const int *count, const uint64_t *partial, const int *partial_n) {
    __shared__ Radix radix;
    __shared__ int shared[64];
    if (*count > RETRY_ROWS || (int)blockIdx.x >= *count) return;
    int64_t row = list[blockIdx.x];
    int base = (int)(row / c.T) * c.n_cand, k = c.k;
    const uint64_t *key = partial + (int64_t)blockIdx.x * RETRY_PARTS * k;
    const int *n = partial_n + blockIdx.x * RETRY_PARTS;
    select_in_order([=](int i) { return i % k < n[i / k] ? (uint32_t)(key[i] >> 32) : 0u; }, [=](int i) { return (int32_t)~(uint32_t)key[i] - base; },
                    RETRY_PARTS * k, k, c.sel + row * k, &radix, shared, c.nans);
}

// ---- kernels 4 and 5: the wgmma scan (sm_90a)
// A tile is 256 columns = 256/H queries times H heads, permuted as above and kept in shared memory; the keys stream by, 128 a block, brought by
// TMA, 64 for each of two warpgroups: D[64 keys, 256 columns] = K Q^T. A thread gets the scores of 64/H queries for keys g and g + 8, its
// head weights and thresholds stay in registers. If either score of such a pair passes, the pair is appended, as one 16-byte record
// (score, score, key, -), to the list that belongs to this thread and query: 64 lists a row. No vote, no branch, no mask: everything behind the
// compare is predicated, so the cost does not depend on how many pass. What a row may not see, and the half of a pair that did not pass, is
// dropped by the select kernel. A list that is full keeps overwriting its last record; the select kernel sees that and has the row done again.
//
// SPLIT = 0: the product of all 256 columns, then the epilogue. The warpgroups take turns: the other may issue its product as soon as this
// one has issued its own, so that one computes scores while the other's product runs.
// SPLIT = 1: two products of 128 columns. While a thread works on the one half's result, its own product of the other half runs, and so does
// the other warpgroup's: the tensor cores have up to four products to choose from and no turns are needed. For D <= 64 the epilogue is as
// long as the product, and turns would leave the tensor cores idle.

enum { SCAN_THREADS = 384, SCAN_KEYS = 128, COLUMNS = 256, LISTS = 64, K_PANEL = SCAN_KEYS * 128, Q_PANEL = COLUMNS * 128 };

typedef struct {
    const float *w, *tau;                // [B*T, H]; [tiles of the chunk, 4, 64/H] thresholds: of query 4j + c at [c][j]
    const int2 *plan;                    // [tiles]: first key (in its sequence), blocks of keys, a multiple of unroll_of(D)
    int first_tile, tiles, tiles_per_seq, T, n_keys;
    float *table;                        // TABLE: scores [tiles * COLUMNS/H, stride]
    int64_t stride;
    uint4 *lists;                        // [tiles, cap, COLUMNS/H, LISTS] (score, score of key + 8, key, unused)
    int *counts, cap;                    // [tiles, COLUMNS/H, LISTS]; cap - 1 is full
} Scan;

// D = 32 stands in panels for 64 channels, the other half filled with zeros by TMA and never multiplied.
__host__ __device__ static inline constexpr int panels_of(int D) { return D > 64 ? D / 64 : 1; }
__host__ __device__ static inline constexpr int stages_of(int D) { return D > 64 ? 4 : 8; }
__host__ __device__ static inline constexpr int unroll_of(int D) { return D > 64 ? 2 : 4; } // blocks of keys come in multiples of it
static inline size_t scan_shared_bytes(int D) { return 1024 + (size_t)panels_of(D) * (Q_PANEL + (size_t)stages_of(D) * K_PANEL) + 8 * (2 * (size_t)stages_of(D) + 2); }

// The i-th tile of a block: longest tiles first, and every other round in reverse, so that all blocks get the same length. -1: no more.
__device__ static inline int scan_tile(int i, int tiles) {
    int from_end = i * (int)gridDim.x + (int)(i % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return from_end < tiles ? tiles - 1 - from_end : -1;
}

__device__ static inline void barrier_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ static inline void barrier_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ static inline void barrier_wait(uint32_t b, int phase) {
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT_%=;\n}" ::"r"(b), "r"(phase) : "memory");
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static inline void barrier_expect(uint32_t b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ static inline void tma_load(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}
// Rows of 128 bytes, 128-byte swizzle: groups of 8 rows are 1024 bytes apart. Descriptors differ in the address alone, in units of 16 bytes.
__device__ static inline uint64_t wgmma_descriptor(uint32_t at16) { return (uint64_t)(at16 | 1u << 16) | 64ull << 32 | 1ull << 62; }
template <int N> __device__ static inline void wgmma_wait(void) { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define R8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define R64(c, i) R8(c, i), R8(c, i + 8), R8(c, i + 16), R8(c, i + 24), R8(c, i + 32), R8(c, i + 40), R8(c, i + 48), R8(c, i + 56)
// c [64 keys, 128 columns] (+)= a[64, 16] b[128, 16]^T; c is overwritten when not accumulate.
__device__ static inline void wgmma(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                 "%64, %65, p, 1, 1, 0, 0;\n}" : R64(c, 0) : "l"(a), "l"(b), "r"(accumulate));
}
// The same with 256 columns.
__device__ static inline void wgmma(float (&c)[128], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
                 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
                 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,"
                 "%124,%125,%126,%127}, %128, %129, p, 1, 1, 0, 0;\n}" : R64(c, 0), R64(c, 64) : "l"(a), "l"(b), "r"(accumulate));
}
// Products in flight write registers behind the compiler's back: what reads them must not move above the wait.
template <int N> __device__ static inline void registers_ready(float (&c)[N]) {
    #pragma unroll
    for (int j = 0; j < N; j++) asm volatile("" : "+f"(c[j])::"memory");
}

// Issue D/16 products of the keys at "keys" with N columns at "columns" (shared addresses in units of 16 bytes, the same in all threads).
template <int D, int N> __device__ static inline void issue_products(float (&c)[N], uint32_t keys, uint32_t columns) {
    wgmma_fence();
    #pragma unroll
    for (int d = 0; d < D / 16; d++) {
        constexpr int panel_k = K_PANEL / 16, panel_q = Q_PANEL / 16;
        wgmma(c, wgmma_descriptor(keys + (uint32_t)(d / 4 * panel_k + d % 4 * 2)), wgmma_descriptor(columns + (uint32_t)(d / 4 * panel_q + d % 4 * 2)), d > 0);
    }
    wgmma_commit();
}

// What a thread keeps for a tile. w holds H half weights for each of 64/H queries.
template <int H> struct Lane {
    float w[64], tau[H == 4 ? 4 : 64 / H];
    const float *tau_from;     // H = 4: the thresholds, of which 4 at a time stand in tau
    uint32_t n[64 / H], last;  // where each list ends, and the last place, in bytes
    char *out;                 // TABLE: score of its first query and key 0; else first record of its first list
    int64_t stride;
    float even[2], odd[2];     // sums under way, for keys g and g + 8
};

// One pair of scores: if not (both <= tau), append. Predicated by hand: a compiler would branch. n, last: in bytes.
template <int H, int QUERY> __device__ static inline void append_pair(float a, float b, float tau, int key, uint32_t &n, uint32_t last, const char *list) {
    asm volatile("{\n.reg .pred p;\n.reg .b64 at;\n.reg .b32 unused;\n"
                 "setp.gtu.f32 p, %1, %3;\n"
                 "setp.gtu.or.f32 p, %2, %3, p;\n"
                 "cvt.u64.u32 at, %0;\n"
                 "add.u64 at, at, %5;\n"
                 "@p st.global.v4.b32 [at + %8], {%1, %2, %4, unused};\n"
                 "@p add.u32 %0, %0, %7;\n"
                 "@p min.u32 %0, %0, %6;\n}"
                 : "+r"(n) : "f"(a), "f"(b), "f"(tau), "r"(key), "l"(list), "r"(last), "n"(COLUMNS / H * LISTS * 16), "n"(QUERY * 4 * LISTS * 16) : "memory");
}
// Four thresholds from memory (the L1 cache) when registers are short; volatile, or the compiler would keep them in registers after all.
__device__ static inline float4 load_thresholds(const float *p) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}

// N accumulators, from column pair FROM on: add their heads, and finish the queries that end here. key: that of row g of this thread's fragment.
template <int H, int TABLE, int N, int FROM, int I> __device__ static inline void finish_scores(Lane<H> &t, const float (&c)[N], int key, int n_keys) {
    if constexpr (I < N / 4) {
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
        finish_scores<H, TABLE, N, FROM, I + 1>(t, c, key, n_keys);
    }
}

template <int H, int D, int TABLE, int SPLIT> __device__ static void scan_consumer(const Scan &s, uint32_t keys, uint32_t columns, uint32_t full, uint32_t empty,
                                                                                               uint32_t q_full, uint32_t q_empty) {
    constexpr int NQ = COLUMNS / H, STAGES = stages_of(D), UNROLL = unroll_of(D), STAGE = panels_of(D) * K_PANEL / 16, HALF = COLUMNS / 2 * 128 / 16;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); // known to be the same in a warp: descriptors stay in uniform registers
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, c4 = lane % 4, list = group * 32 + warp * 8 + lane / 4;
    int stage = 0, phase = 0, q_phase = 0, row_in_block = group * 64 + warp * 16 + lane / 4;
    keys = keys / 16 + (uint32_t)group * (64 * 128 / 16);
    columns /= 16;
    Lane<H> t;
    t.last = (uint32_t)(s.cap - 1) * (NQ * LISTS * 16);
    t.stride = s.stride;
    if (!SPLIT && group == 1) asm volatile("bar.arrive 2, 256;" ::: "memory"); // warpgroup 0 has the first turn
    for (int i = 0, tile; (tile = scan_tile(i, s.tiles)) >= 0 || i * (int)gridDim.x < s.tiles; i++) {
        int2 plan = tile < 0 ? make_int2(0, 0) : s.plan[tile];
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
        if constexpr (SPLIT) {
            float a[64], b[64];
            #pragma unroll 1
            for (int block = 0; block < plan.y; block += UNROLL) {
                barrier_wait(full + 8 * stage, phase);
                issue_products<D>(a, keys + stage * STAGE, columns);
                #pragma unroll
                for (int u = 0; u < UNROLL; u++, key += SCAN_KEYS) {
                    issue_products<D>(b, keys + stage * STAGE, columns + HALF);
                    wgmma_wait<1>();
                    registers_ready(a);
                    finish_scores<H, TABLE, 64, 0, 0>(t, a, key, s.n_keys);
                    int done = stage;
                    if (++stage == STAGES) { stage = 0; phase ^= 1; }
                    if (u + 1 < UNROLL) {
                        barrier_wait(full + 8 * stage, phase);
                        issue_products<D>(a, keys + stage * STAGE, columns);
                        wgmma_wait<1>();
                    } else wgmma_wait<0>();
                    registers_ready(b);
                    if (lane == 0) barrier_arrive(empty + 8 * done);
                    finish_scores<H, TABLE, 64, 16, 0>(t, b, key, s.n_keys);
                }
            }
        } else {
            #pragma unroll 1
            for (int block = 0; block < plan.y; block++, key += SCAN_KEYS) {
                float c[128];
                barrier_wait(full + 8 * stage, phase);
                asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory"); // my turn
                issue_products<D>(c, keys + stage * STAGE, columns);
                asm volatile("bar.arrive %0, 256;" ::"r"(3 - group) : "memory"); // the other's turn
                wgmma_wait<0>();
                registers_ready(c);
                if (lane == 0) barrier_arrive(empty + 8 * stage);
                finish_scores<H, TABLE, 128, 0, 0>(t, c, key, s.n_keys);
                if (++stage == STAGES) { stage = 0; phase ^= 1; }
            }
        }
        if (lane == 0) barrier_arrive(q_empty);
        if (!TABLE)
            for (int q = 0; q < 64 / H; q++) s.counts[((int64_t)tile * NQ + 4 * q + c4) * LISTS + list] = (int)(t.n[q] / (NQ * LISTS * 16));
    }
}
#endif

template <int H, int D, int TABLE, int SPLIT> __global__ void __launch_bounds__(SCAN_THREADS, 1)
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
        for (int i = 0, tile; (tile = scan_tile(i, s.tiles)) >= 0 || i * (int)gridDim.x < s.tiles; i++) {
            int2 plan = tile < 0 ? make_int2(0, 0) : s.plan[tile];
            if (plan.y == 0) continue;
            int y = (s.first_tile + tile) / s.tiles_per_seq * s.n_keys + plan.x;
            barrier_wait(q_empty, q_phase);
            q_phase ^= 1;
            barrier_expect(q_full, PANELS * Q_PANEL);
            for (int p = 0; p < PANELS; p++) tma_load(columns + p * Q_PANEL, &map_q, q_full, p * 64, tile * COLUMNS);
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
    scan_consumer<H, D, TABLE, SPLIT>(s, keys, columns, full, empty, q_full, q_empty);
#endif
}

// ---- around the scan: what is scanned, thresholds, selection from the lists

// Sample j of the keys: one of every "stride", at a place that a hash jitters, so that no period of the data can hide from it.
__host__ __device__ static inline int sample_position(int j, int stride) { return j * stride + (int)(rng_mix((uint64_t)j) % (uint64_t)stride); }
// Samples among the candidates [lo, lo + n): first and number.
__host__ __device__ static inline int2 sample_range(int lo, int n, int stride, int n_sample) {
    int a = lo / stride, b = (lo + n) / stride;
    a += sample_position(a, stride) < lo;
    b += sample_position(b, stride) < lo + n;
    a = a < n_sample ? a : n_sample;
    b = b < n_sample ? b : n_sample;
    return make_int2(a, b > a ? b - a : 0);
}
// The sample's score of this rank is the guess. q of the k best are expected among m of n; four standard deviations more and the guess is too
// high for one row in 10,000, whatever the scores' distribution.
__host__ __device__ static inline int sample_rank(int k, int m, int n) {
    float q = (float)k * (float)m / (float)n;
    return (int)ceilf(q + 4 * sqrtf(q));
}
// One key of 8 to 64, so that about 16 samples (64 for the largest k) are among the k best; at most 16384 samples.
static inline int sample_stride(int k, int n_cand) {
    int stride = 8;
    while ((stride < 64 && stride * 32 <= k) || n_cand / stride > 16384) stride *= 2;
    return stride;
}
// Where a tile keeps the threshold of its query q: see Scan.
__host__ __device__ static inline int64_t tau_at(int64_t tile, int q, int NQ) { return tile * NQ + q % 4 * (NQ / 4) + q / 4; }

// One warp a tile: the range of keys that its scored rows see, the same among the samples, and thresholds: given ones, or NaN (all pass, until a
// guess comes), or infinity for rows that are not scored.
__global__ static void plan_kernel(TopK c, int first_tile, int tiles, int tiles_per_seq, int NQ, int unroll, int stride, int n_sample, const float *given,
                                   int2 *plan, int2 *plan_sample, float *tau) {
    int tile = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32), lane = threadIdx.x % 32;
    int lo = INT_MAX, hi = 0, first = INT_MAX, last = 0;
    if (tile >= tiles) return;
    for (int q = lane; q < NQ; q += 32) {
        int t = (first_tile + tile) % tiles_per_seq * NQ + q;
        float x = INFINITY;
        if (t < c.T) {
            int64_t row = (int64_t)((first_tile + tile) / tiles_per_seq) * c.T + t;
            int2 v = visible(c, row);
            if (v.y > c.k) {
                x = given ? given[row] : NAN;
                lo = min(lo, v.x);
                hi = max(hi, v.x + v.y);
                int2 m = n_sample ? sample_range(v.x, v.y, stride, n_sample) : make_int2(0, 0);
                if (sample_rank(c.k, m.y, v.y) <= m.y && m.y > 0) {
                    first = min(first, m.x);
                    last = max(last, m.x + m.y);
                }
            }
        }
        tau[tau_at(tile, q, NQ)] = x;
    }
    lo = __reduce_min_sync(0xffffffffu, lo);
    hi = __reduce_max_sync(0xffffffffu, hi);
    first = __reduce_min_sync(0xffffffffu, first);
    last = __reduce_max_sync(0xffffffffu, last);
    int step = SCAN_KEYS * unroll;
    if (lane == 0) {
        plan[tile] = hi > lo ? make_int2(lo, (hi - lo + step - 1) / step * unroll) : make_int2(0, 0);
        plan_sample[tile] = last > first ? make_int2(first, (last - first + step - 1) / step * unroll) : make_int2(0, 0);
    }
}

// Rows (tile, column) of D channels from q, in the order of column_query and column_head; zeros behind the end of a sequence.
__global__ static void permute_kernel(TopK c, int first_tile, int tiles, int tiles_per_seq, bf16 *to) {
    int words = c.D / 8, NQ = COLUMNS / c.H;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (int64_t)tiles * COLUMNS * words; i += (int64_t)gridDim.x * blockDim.x) {
        int p = (int)(i / words % COLUMNS), d = (int)(i % words) * 8, tile = first_tile + (int)(i / words / COLUMNS);
        int t = tile % tiles_per_seq * NQ + column_query(p, c.H);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (t < c.T) v = *(const uint4 *)(c.q + (((int64_t)(tile / tiles_per_seq) * c.T + t) * c.H + column_head(p, c.H)) * c.D + d);
        *(uint4 *)(to + i * 8) = v;
    }
}
__global__ static void gather_sample_kernel(TopK c, int stride, int n_sample, bf16 *to) {
    int words = c.D / 8;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (int64_t)c.B * n_sample * words; i += (int64_t)gridDim.x * blockDim.x) {
        int j = (int)(i / words), b = j / n_sample, d = (int)(i % words) * 8;
        *(uint4 *)(to + i * 8) = *(const uint4 *)(c.key + ((int64_t)b * c.n_cand + sample_position(j % n_sample, stride)) * c.D + d);
    }
}

// One block a row of the chunk: the guess, from the row's sample scores in table [rows, n_sample]. Dynamic shared memory: [n_sample].
__global__ static void guess_kernel(TopK c, int first_tile, int tiles_per_seq, int NQ, int stride, int n_sample, const float *table, float *tau) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Radix radix;
    uint32_t *score = (uint32_t *)memory;
    int tile = (int)blockIdx.x / NQ, q = (int)blockIdx.x % NQ, t = (first_tile + tile) % tiles_per_seq * NQ + q;
    if (t >= c.T) return;
    int2 v = visible(c, (int64_t)((first_tile + tile) / tiles_per_seq) * c.T + t);
    if (v.y <= c.k) return;
    int2 m = sample_range(v.x, v.y, stride, n_sample);
    int rank = sample_rank(c.k, m.y, v.y);
    if (rank > m.y || m.y == 0) return;
    for (int i = threadIdx.x; i < m.y; i += blockDim.x) score[i] = ordered(table[(int64_t)blockIdx.x * n_sample + m.x + i]);
    Cut cut = block_kth([=](int i) { return score[i]; }, m.y, rank, 2, &radix);
    if (threadIdx.x == 0) tau[tau_at(tile, q, NQ)] = just_below(cut.bound);
}

typedef struct { int count, underflow, overflow, unused; } Retry; // rows to do again, and why

enum { SELECT_THREADS = 512, WINDOW_WORDS = 4096 }; // the bitmap by which a row's indices come into order: so many words of 32 candidates at a time

// One block a row of the chunk: its lists to shared memory, radix selection, indices in order by way of a bitmap. If the lists do not hold the
// answer (a list full, or fewer than k passed) the row's number goes to the retry list instead. Dynamic shared memory: 2 * space + WINDOW_WORDS
// words. kth (may be NULL) [B*T]: a threshold just below the k-th best, such that a scan with it finds the same set.
__global__ __launch_bounds__(SELECT_THREADS) static void select_lists_kernel(TopK c, int first_tile, int tiles_per_seq, int NQ, const float *tau, const uint4 *lists,
                                                                        const int *counts, int cap, int space, float *kth, Retry *retry, int *retry_rows) {
    extern __shared__ __align__(16) char memory[];
    __shared__ Radix radix;
    __shared__ int number[LISTS], total, most, warp_sum[SELECT_THREADS / 32];
    uint32_t *score = (uint32_t *)memory, *index = score + space, *bits = index + space;
    int tile = (int)blockIdx.x / NQ, q = (int)blockIdx.x % NQ, t = (first_tile + tile) % tiles_per_seq * NQ + q;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = c.k;
    if (t >= c.T) return;
    int64_t row = (int64_t)((first_tile + tile) / tiles_per_seq) * c.T + t;
    int2 v = visible(c, row);
    int32_t *out = c.sel + row * k;
    if (v.y <= k) {
        take_all(out, v, k, threadIdx.x, SELECT_THREADS);
        if (kth && threadIdx.x == 0) kth[row] = INFINITY;
        return;
    }
    if (threadIdx.x == 0) total = most = 0;
    __syncthreads();
    if (threadIdx.x < LISTS) {
        number[threadIdx.x] = counts[((int64_t)tile * NQ + q) * LISTS + threadIdx.x];
        atomicMax(&most, number[threadIdx.x]);
    }
    __syncthreads();
    // 64 threads read the same place of all lists, 1 KB; eight places at once
    float bound = tau[tau_at(tile, q, NQ)];
    int mine = number[threadIdx.x % LISTS], full = most >= cap - 1;
    for (int place = warp / 2; place < most && !full; place += SELECT_THREADS / LISTS) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (place < mine) x = lists[(((int64_t)tile * cap + place) * NQ + q) * LISTS + threadIdx.x % LISTS];
        for (int half = 0; half < 2; half++) {
            float s = __uint_as_float(half ? x.y : x.x);
            int i = (int)x.z + 8 * half, pass = place < mine && i >= v.x && i < v.x + v.y && !(s <= bound), at = 0;
            unsigned ballot = __ballot_sync(0xffffffffu, pass);
            if (lane == 0 && ballot) at = atomicAdd(&total, __popc(ballot));
            at = __shfl_sync(0xffffffffu, at, 0) + __popc(ballot & ((1u << lane) - 1));
            if (pass && at < space) { score[at] = ordered(s); index[at] = (uint32_t)i; }
        }
    }
    __syncthreads();
    int n = total;
    if (full || n > space || n < k) {
        if (threadIdx.x == 0) {
            retry_rows[atomicAdd(&retry->count, 1)] = (int)row;
            atomicAdd(full || n > space ? &retry->overflow : &retry->underflow, 1);
            if (kth) kth[row] = NAN;
        }
        return;
    }
    Cut cut = {0, INT_MAX};
    uint32_t tie = 0; // of those equal to the bound, the ones with ~index >= tie
    if (n > k) {
        cut = block_kth([=](int i) { return score[i]; }, n, k, 0, &radix);
        if (cut.ties != INT_MAX) tie = block_kth([=](int i) { return score[i] == cut.bound ? ~index[i] : 0u; }, n, cut.ties, 4, &radix).bound;
    }
    if (kth && threadIdx.x == 0) kth[row] = n > k ? just_below(cut.bound) : bound;
    int done = 0;
    for (int from = v.x; from < v.x + v.y; from += WINDOW_WORDS * 32) {
        int words = (min(v.x + v.y - from, WINDOW_WORDS * 32) + 31) / 32, per = (words + SELECT_THREADS - 1) / SELECT_THREADS, mark = threadIdx.x * per, sum = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < words; i += SELECT_THREADS) bits[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += SELECT_THREADS) {
            uint32_t at = index[i] - (uint32_t)from;
            if (at >= (uint32_t)words * 32 || score[i] < cut.bound || (score[i] == cut.bound && ~index[i] < tie)) continue;
            atomicOr(&bits[at / 32], 1u << at % 32);
            if (score[i] == 0xffffffffu) atomicAdd(c.nans, 1ull);
        }
        __syncthreads();
        for (int i = mark; i < min(mark + per, words); i++) sum += __popc(bits[i]);
        int before = sum;
        for (int o = 1; o < 32; o *= 2) {
            int x = __shfl_up_sync(0xffffffffu, before, o);
            if (lane >= o) before += x;
        }
        if (lane == 31) warp_sum[warp] = before;
        before += done - sum;
        __syncthreads();
        for (int w = 0; w < SELECT_THREADS / 32; w++) {
            if (w < warp) before += warp_sum[w];
            done += warp_sum[w];
        }
        for (int i = mark; i < min(mark + per, words); i++)
            for (uint32_t x = bits[i]; x; x &= x - 1) out[before++] = from + i * 32 + __ffs((int)x) - 1;
    }
}

// ---- host: versions 1 to 3

static int shared_limit(void) {
    int bytes;
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return bytes;
}
static int multiprocessors(void) {
    int n;
    CUDA_CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
    return n;
}
// As many queries a block as leave room for two blocks a multiprocessor; else as many as fit at all. 0: not even one.
static int queries_a_block(const TopK &c, int capacity) {
    int limit = shared_limit();
    for (int half = 1; half >= 0; half--)
        for (int qb = 8; qb > 0; qb /= 2)
            if (shared_layout(c, qb, capacity, NULL, NULL) <= (size_t)(half ? limit / 2 - 1024 : limit)) return qb;
    return 0;
}

#define BY_D(D, F) ((D) == 32 ? F(32) : (D) == 64 ? F(64) : F(128))

// 1: table [chunk, n_cand] is the workspace. score_rows fills it for rows first..first+n-1.
template <int METHOD> static void score_rows(const TopK &c, float *table, int64_t first, int n) {
    int qb = queries_a_block(c, 0), bytes = (int)shared_layout(c, qb, 0, NULL, NULL);
#define F(D) table_kernel<METHOD, D>
    auto kernel = BY_D(c.D, F);
#undef F
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<(unsigned)((n + qb - 1) / qb), THREADS, (size_t)bytes>>>(c, qb, table, first, n);
    CUDA_CHECK(cudaGetLastError());
}
static void topk_table(const TopK &c, float *table, int chunk) {
    for (int64_t first = 0; first < (int64_t)c.B * c.T; first += chunk) {
        int n = (int)std::min((int64_t)chunk, (int64_t)c.B * c.T - first);
        score_rows<MMA>(c, table, first, n);
        table_select_kernel<<<(unsigned)n, 512>>>(c, table, first);
        CUDA_CHECK(cudaGetLastError());
    }
}

// 2 and 3: all rows, or those of a list on the device.
template <int METHOD> static void topk_stream(const TopK &c, const int *list, const int *count, uint64_t *partial, int *partial_n) {
    int capacity = 2 * c.k + CHUNK, qb = queries_a_block(c, capacity), rows = c.B * c.T;
    int blocks = list ? 2 * multiprocessors() : (rows + std::max(qb, 1) - 1) / std::max(qb, 1);
    if (qb == 0) {
        fprintf(stderr, "k = %d, H = %d, D = %d: a block's shared memory does not hold one row's buffer\n", c.k, c.H, c.D);
        exit(1);
    }
    int bytes = (int)shared_layout(c, qb, capacity, NULL, NULL);
#define F(D) stream_kernel<METHOD, D>
    auto kernel = BY_D(c.D, F);
#undef F
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<(unsigned)blocks, THREADS, (size_t)bytes>>>(c, qb, capacity, list, count, 0, rows, partial, partial_n);
    CUDA_CHECK(cudaGetLastError());
}

// ---- host: versions 4 and 5

// Matrix [rows, D] in boxes of [box, 64 channels]; what lies outside is zero. The driver's function is asked for at run time: no -lcuda.
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
        encode = (Encode)f;
    }
    CUresult r = !encode ? CUDA_ERROR_NOT_FOUND : encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p, size, pitch, boxes, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                         CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) {
        fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", (int)r);
        exit(1);
    }
    return map;
}

typedef void (*ScanKernel)(const CUtensorMap, const CUtensorMap, const Scan);
template <int D> static ScanKernel scan_of(int H, int table, int split) {
#define F(H) (table ? scan_kernel<H, D, 1, 0> : split ? scan_kernel<H, D, 0, 1> : scan_kernel<H, D, 0, 0>)
    return H == 4 ? F(4) : H == 8 ? F(8) : H == 16 ? F(16) : H == 32 ? F(32) : F(64);
#undef F
}

// Workspace and sizes of versions 4 and 5 for one problem; everything is bounded by "space" but what a row needs anyway (4 bytes) and the sample keys.
typedef struct {
    int NQ, tiles_per_seq, tiles, chunk; // queries a tile; tiles in all and at once
    int stride, n_sample, cap, space;    // sampling; records a list; candidates a row in the select kernel
    int split;                           // which of the two schedules
    bf16 *q, *sample;                    // [chunk, COLUMNS, D], [B, n_sample, D]
    uint4 *lists;                        // see Scan; before, the sample's score table
    int *counts, *retry_rows, *partial_n;
    float *tau;
    int2 *plan, *plan_sample;
    Retry *retry;
    uint64_t *partial;
    size_t bytes;
    CUtensorMap map_k, map_q, map_s;
} Work;

static void *work_alloc(Work *w, size_t bytes) {
    void *p;
    CUDA_CHECK(cudaMalloc(&p, bytes));
    w->bytes += bytes;
    return p;
}
// 0: this shape or card needs version 3.
static int work_new(Work *w, const TopK &c, size_t space) {
    memset(w, 0, sizeof *w);
    if (!has_wgmma() || c.H < 4 || c.H > 64 || COLUMNS % c.H || (c.D != 32 && c.D != 64 && c.D != 128) || c.k > 4096) return 0;
    w->NQ = COLUMNS / c.H;
    w->tiles_per_seq = (c.T + w->NQ - 1) / w->NQ;
    w->tiles = c.B * w->tiles_per_seq;
    w->stride = sample_stride(c.k, c.n_cand);
    w->n_sample = c.n_cand / w->stride;
    float expect = (float)sample_rank(c.k, 1 << 20, w->stride * (1 << 20)) * (float)w->stride, mean = 1.25f * expect / LISTS;
    w->cap = (int)(mean + 5 * sqrtf(mean)) + 4;
    w->space = (int)(1.75f * expect) + 64;
    w->split = c.D <= 64 && c.H <= 32;
    size_t row = std::max((size_t)w->cap * LISTS * sizeof(uint4), (size_t)w->n_sample * 4), tile = (size_t)w->NQ * (row + LISTS * 4 + 4) + COLUMNS * (size_t)c.D * 2 + 16;
    int most = (int)std::max((size_t)1, std::min(space / tile, (size_t)w->tiles)), chunks = (w->tiles + most - 1) / most, sms = multiprocessors();
    w->chunk = (w->tiles + chunks - 1) / chunks;
    if (chunks > 1 && most > sms) w->chunk = std::min(most / sms * sms, (w->chunk + sms - 1) / sms * sms); // whole rounds of the card
    w->q = (bf16 *)work_alloc(w, (size_t)w->chunk * COLUMNS * (size_t)c.D * 2);
    w->lists = (uint4 *)work_alloc(w, (size_t)w->chunk * (size_t)w->NQ * row);
    w->counts = (int *)work_alloc(w, (size_t)w->chunk * (size_t)w->NQ * LISTS * 4);
    w->tau = (float *)work_alloc(w, (size_t)w->chunk * (size_t)w->NQ * 4);
    w->plan = (int2 *)work_alloc(w, (size_t)w->chunk * sizeof(int2));
    w->plan_sample = (int2 *)work_alloc(w, (size_t)w->chunk * sizeof(int2));
    w->sample = (bf16 *)work_alloc(w, (size_t)c.B * (size_t)std::max(w->n_sample, 1) * (size_t)c.D * 2);
    w->retry = (Retry *)work_alloc(w, sizeof(Retry));
    w->retry_rows = (int *)work_alloc(w, (size_t)c.B * (size_t)c.T * 4);
    w->partial = (uint64_t *)work_alloc(w, (size_t)RETRY_ROWS * RETRY_PARTS * (size_t)c.k * 8);
    w->partial_n = (int *)work_alloc(w, (size_t)RETRY_ROWS * RETRY_PARTS * 4);
    w->map_k = tensor_map(c.key, (int64_t)c.B * c.n_cand, c.D, SCAN_KEYS);
    w->map_s = tensor_map(w->sample, (int64_t)c.B * std::max(w->n_sample, 1), c.D, SCAN_KEYS);
    w->map_q = tensor_map(w->q, (int64_t)w->chunk * COLUMNS, c.D, COLUMNS);
    return 1;
}
static void work_free(Work *w) {
    void *all[] = {w->q, w->lists, w->counts, w->tau, w->plan, w->plan_sample, w->sample, w->retry, w->retry_rows, w->partial, w->partial_n};
    for (void *p : all) CUDA_CHECK(cudaFree(p));
}
// What must not matter: all of the workspace that a run is to write before it reads.
static void work_poison(Work *w, const TopK &c) {
    CUDA_CHECK(cudaMemset(w->lists, 0xff, (size_t)w->chunk * (size_t)w->NQ * (size_t)w->cap * LISTS * sizeof(uint4)));
    CUDA_CHECK(cudaMemset(w->counts, 0xff, (size_t)w->chunk * (size_t)w->NQ * LISTS * 4));
    CUDA_CHECK(cudaMemset(w->tau, 0xff, (size_t)w->chunk * (size_t)w->NQ * 4));
    CUDA_CHECK(cudaMemset(w->q, 0xff, (size_t)w->chunk * COLUMNS * (size_t)c.D * 2));
    CUDA_CHECK(cudaMemset(w->plan, 0xff, (size_t)w->chunk * sizeof(int2)));
    CUDA_CHECK(cudaMemset(w->retry, 0xff, sizeof(Retry)));
    CUDA_CHECK(cudaMemset(w->partial, 0xff, (size_t)RETRY_ROWS * RETRY_PARTS * (size_t)c.k * 8));
}

// One launch of the scan over tiles first..first+n-1 of the permuted queries in w->q: keys (sample 0) or samples (1), to lists, or to table when given.
static void scan(Work *w, const TopK &c, int first, int n, int sample, float *table, int64_t stride) {
    Scan s = {c.w, w->tau, sample ? w->plan_sample : w->plan, first, n, w->tiles_per_seq, c.T, sample ? w->n_sample : c.n_cand, table,
              stride, w->lists, w->counts, w->cap};
#define F(D) scan_of<D>(c.H, table != NULL, w->split)
    ScanKernel kernel = BY_D(c.D, F);
#undef F
    size_t bytes = scan_shared_bytes(c.D);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<(unsigned)std::min(n, multiprocessors()), SCAN_THREADS, bytes>>>(sample ? w->map_s : w->map_k, w->map_q, s);
    CUDA_CHECK(cudaGetLastError());
}
// Thresholds, plan and permuted queries of a chunk.
static void prepare(Work *w, const TopK &c, int first, int n, int guess, const float *given) {
    plan_kernel<<<(unsigned)((n + 7) / 8), 256>>>(c, first, n, w->tiles_per_seq, w->NQ, unroll_of(c.D), w->stride, guess ? w->n_sample : 0, given,
                                                  w->plan, w->plan_sample, w->tau);
    permute_kernel<<<(unsigned)(16 * multiprocessors()), 256>>>(c, first, n, w->tiles_per_seq, w->q);
    CUDA_CHECK(cudaGetLastError());
}

typedef struct { double prepass, scan, select, retry; } Phases; // ms

// 5, or with given thresholds [B*T] 4. kth (may be NULL): see select_lists_kernel. phases (may be NULL) costs synchronisation at the end only.
static void topk_hopper(Work *w, const TopK &c, const float *given, float *kth, Phases *phases) {
    std::vector<cudaEvent_t> marks;
    auto mark = [&] {
        cudaEvent_t e;
        if (!phases) return;
        CUDA_CHECK(cudaEventCreate(&e));
        CUDA_CHECK(cudaEventRecord(e));
        marks.push_back(e);
    };
    int guess = !given && w->n_sample > 0, shared = (2 * w->space + WINDOW_WORDS) * 4;
    CUDA_CHECK(cudaFuncSetAttribute(select_lists_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    CUDA_CHECK(cudaFuncSetAttribute(guess_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::max(w->n_sample, 1) * 4));
    mark();
    CUDA_CHECK(cudaMemsetAsync(w->retry, 0, sizeof(Retry)));
    if (guess) gather_sample_kernel<<<(unsigned)multiprocessors(), 256>>>(c, w->stride, w->n_sample, w->sample);
    for (int first = 0; first < w->tiles; first += w->chunk) {
        int n = std::min(w->chunk, w->tiles - first);
        prepare(w, c, first, n, guess, given);
        if (guess) {
            scan(w, c, first, n, 1, (float *)w->lists, w->n_sample);
            guess_kernel<<<(unsigned)(n * w->NQ), 128, (size_t)w->n_sample * 4>>>(c, first, w->tiles_per_seq, w->NQ, w->stride, w->n_sample,
                                                                                         (const float *)w->lists, w->tau);
            CUDA_CHECK(cudaGetLastError());
        }
        mark();
        scan(w, c, first, n, 0, NULL, 0);
        mark();
        select_lists_kernel<<<(unsigned)(n * w->NQ), SELECT_THREADS, (size_t)shared>>>(c, first, w->tiles_per_seq, w->NQ, w->tau, w->lists, w->counts, w->cap,
                                                                                       w->space, kth, w->retry, w->retry_rows);
        CUDA_CHECK(cudaGetLastError());
        mark();
    }
    topk_stream<MMA>(c, w->retry_rows, &w->retry->count, w->partial, w->partial_n);
    merge_kernel<<<RETRY_ROWS, 512>>>(c, w->retry_rows, &w->retry->count, w->partial, w->partial_n);
    CUDA_CHECK(cudaGetLastError());
    mark();
    if (!phases) return;
    CUDA_CHECK(cudaDeviceSynchronize());
    memset(phases, 0, sizeof *phases);
    for (size_t i = 0; i + 1 < marks.size(); i++) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, marks[i], marks[i + 1]));
        *(i + 2 == marks.size() ? &phases->retry : i % 3 == 0 ? &phases->prepass : i % 3 == 1 ? &phases->scan : &phases->select) += (double)ms;
    }
    for (cudaEvent_t e : marks) CUDA_CHECK(cudaEventDestroy(e));
}
static Retry retries_of(const Work *w) {
    Retry r;
    CUDA_CHECK(cudaMemcpy(&r, w->retry, sizeof r, cudaMemcpyDeviceToHost));
    return r;
}

// ---- checks

enum { GAUSS, ALL_ZERO, MOST_ZERO, ALL_EQUAL, DUPLICATES, ASCENDING, DESCENDING, ONE_BLOCK, NANS, NEGATIVE, SPIKE_SAMPLED, SPIKE_OTHERS, KINDS };
static const char *kind_name[] = {"gaussian", "all scores 0", "95% zeros", "all equal", "duplicated keys", "ascending", "descending", "winners in one block",
                                  "NaN rows and keys", "negative weights", "spikes at the samples", "spikes elsewhere"};

template <class X> static X *to_device(const X *p, int64_t n) {
    X *d;
    CUDA_CHECK(cudaMalloc(&d, (size_t)n * sizeof(X)));
    CUDA_CHECK(cudaMemcpy(d, p, (size_t)n * sizeof(X), cudaMemcpyHostToDevice));
    return d;
}

// One input on host (h, with floats that bf16 holds exactly) and device (d).
typedef struct { TopK h, d; std::vector<float> q, key; std::vector<bf16> q16, key16; std::vector<float> w; std::vector<int32_t> doc; } Case;

static void case_new(Case *x, uint64_t seed, int kind, int B, int T, int H, int D, int k, int r, int docs) {
    int n_cand = T / r, stride = sample_stride(k, n_cand);
    x->h = {B, T, n_cand, H, D, k, r, NULL, NULL, NULL, NULL, NULL, NULL};
    x->q16.resize((size_t)B * T * H * D);
    x->key16.resize((size_t)B * n_cand * D);
    x->w.resize((size_t)B * T * H);
    x->doc.resize((size_t)B * T);
    int toward = kind == MOST_ZERO || kind == ASCENDING || kind == DESCENDING || kind >= SPIKE_SAMPLED; // queries near the vector of ones
    for (size_t i = 0; i < x->q16.size(); i++) {
        float g = rng_normal(seed, 1, i), v = kind == ALL_ZERO ? 0 : toward ? 1 + 0.05f * g : g;
        int64_t t = (int64_t)(i / (size_t)(H * D)) % T;
        x->q16[i] = (bf16)(kind == NANS && t % 50 == 49 && i % (size_t)(H * D) == 3 ? NAN : v);
    }
    for (size_t i = 0; i < x->key16.size(); i++) {
        int s = (int)(i / (size_t)D) % n_cand, d = (int)(i % (size_t)D);
        float g = rng_normal(seed, 2, i), u = rng_uniform(seed, 3, (uint64_t)(s + (int)(i / (size_t)D) / n_cand * n_cand)), v = g;
        int sampled = s / stride < n_cand / stride && sample_position(s / stride, stride) == s;
        if (kind == MOST_ZERO) v = u < 0.95f ? -1 : u + 0.1f * g;
        if (kind == ALL_EQUAL) v = rng_normal(seed, 2, (uint64_t)d);
        if (kind == DUPLICATES) v = rng_normal(seed, 2, (uint64_t)(s % 17 * D + d));
        if (kind == ASCENDING) v = (float)s / (float)n_cand;
        if (kind == DESCENDING) v = (float)(n_cand - s) / (float)n_cand;
        if (kind == ONE_BLOCK) v = s >= n_cand / 2 && s < n_cand / 2 + 128 ? 8 * g : g;
        if (kind == NANS && s % 97 == 3 && d == 5) v = NAN;
        if (kind == SPIKE_SAMPLED) v = sampled ? 2 + 0.1f * g : 0.2f * g;
        if (kind == SPIKE_OTHERS) v = sampled ? 0.2f * g : 2 + 0.1f * g;
        x->key16[i] = (bf16)v;
    }
    for (size_t i = 0; i < x->w.size(); i++) {
        float u = rng_uniform(seed, 4, i), g = rng_normal(seed, 5, i);
        x->w[i] = (kind == NEGATIVE ? -u : kind == GAUSS && seed % 2 ? g : u) / sqrtf((float)(H * D));
    }
    for (int b = 0; b < B; b++) // documents start at multiples of the pool size
        for (int t = 0, start = 0; t < T; t++) {
            if (docs > 1 && t && rng_uniform(seed, 6, (uint64_t)(b * T + t)) < (float)docs / (float)T) start = t / r * r;
            x->doc[(size_t)(b * T + t)] = start;
        }
    x->q.resize(x->q16.size());
    x->key.resize(x->key16.size());
    for (size_t i = 0; i < x->q.size(); i++) x->q[i] = (float)x->q16[i];
    for (size_t i = 0; i < x->key.size(); i++) x->key[i] = (float)x->key16[i];
    x->h.w = x->w.data();
    x->h.doc = x->doc.data();
    x->d = x->h;
    x->d.q = to_device(x->q16.data(), (int64_t)x->q16.size());
    x->d.key = to_device(x->key16.data(), (int64_t)x->key16.size());
    x->d.w = to_device(x->w.data(), (int64_t)x->w.size());
    x->d.doc = to_device(x->doc.data(), (int64_t)x->doc.size());
}
static void case_free(Case *x) {
    const void *all[] = {x->d.q, x->d.key, x->d.w, x->d.doc};
    for (const void *p : all) CUDA_CHECK(cudaFree((void *)p));
}

enum { GUARD = 1024 }; // int32 of poison before and behind sel

// Run one version on poisoned, guarded memory; the selection and the count of NaNs come back. Returns the number of stray writes.
template <class F> static int run_guarded(Case *x, F body, std::vector<int32_t> &sel, unsigned long long *nans) {
    int64_t n = (int64_t)x->h.B * x->h.T * x->h.k;
    int32_t *p = device_poison<int32_t>(n + 2 * GUARD);
    unsigned long long *count;
    int stray = 0;
    CUDA_CHECK(cudaMalloc(&count, 8));
    CUDA_CHECK(cudaMemset(count, 0, 8));
    x->d.sel = p + GUARD;
    x->d.nans = count;
    body();
    CUDA_CHECK(cudaDeviceSynchronize());
    int32_t *all = to_host(p, n + 2 * GUARD);
    for (int i = 0; i < GUARD; i++) stray += (all[i] != -1) + (all[n + GUARD + i] != -1);
    sel.assign(all + GUARD, all + GUARD + n);
    CUDA_CHECK(cudaMemcpy(nans, count, 8, cudaMemcpyDeviceToHost));
    free(all);
    CUDA_CHECK(cudaFree(p));
    CUDA_CHECK(cudaFree(count));
    return stray;
}

// The answer of exact selection from a table of scores [B*T, n_cand]; other (may be NULL) for rows marked in again.
static unsigned long long expected(const Case &x, const float *table, const float *other, const std::vector<char> &again, std::vector<int32_t> &sel) {
    unsigned long long nans = 0;
    sel.resize((size_t)x.h.B * x.h.T * x.h.k);
    for (int64_t row = 0; row < (int64_t)x.h.B * x.h.T; row++) {
        int2 v = visible(x.h, row);
        const float *s = (other && again[(size_t)row] ? other : table) + row * x.h.n_cand + v.x;
        nans += (unsigned long long)select_cpu(s, v.x, v.y, x.h.k, &sel[(size_t)(row * x.h.k)]);
    }
    return nans;
}
// Rows of a selection that float64 refutes: a chosen score is below one left out by more than rounding can explain. Every step-th row; NaNs as largest.
static int refuted(const Case &x, const std::vector<int32_t> &sel, int step) {
    int bad = 0, k = x.h.k;
    std::vector<double> s((size_t)x.h.n_cand);
    for (int64_t row = 0; row < (int64_t)x.h.B * x.h.T; row += step) {
        int2 v = visible(x.h, row);
        const int32_t *chosen = &sel[(size_t)(row * k)];
        double least = INFINITY, best_out = -INFINITY, scale = 1e-30;
        if (v.y > 0) scores_cpu(x.h, x.q.data(), x.key.data(), row, s.data());
        for (int i = 0, j = 0; i < v.y; i++) {
            double value = s[(size_t)i] != s[(size_t)i] ? INFINITY : s[(size_t)i];
            if (value < INFINITY) scale = std::max(scale, fabs(value));
            if (j < k && chosen[j] == v.x + i) { least = std::min(least, value); j++; }
            else best_out = std::max(best_out, value);
            if (i == v.y - 1) bad += j != std::min(v.y, k) || (j < k && chosen[j] != -1);
        }
        bad += v.y > k && !(least >= best_out - 4e-6 * x.h.D * scale);
    }
    return bad;
}
static int64_t differences(const std::vector<int32_t> &a, const std::vector<int32_t> &b) {
    int64_t n = 0;
    for (size_t i = 0; i < a.size(); i++) n += a[i] != b[i];
    return n;
}

// The table of the wgmma scores, in the order of rows.
static std::vector<float> wgmma_scores(const Case &x) {
    Work w;
    const TopK &c = x.d;
    work_new(&w, c, (size_t)8 << 30);
    float *table = device_poison<float>((int64_t)w.tiles * w.NQ * c.n_cand);
    prepare(&w, c, 0, w.tiles, 0, NULL);
    scan(&w, c, 0, w.tiles, 0, table, c.n_cand);
    std::vector<float> out((size_t)c.B * c.T * c.n_cand);
    float *host = to_host(table, (int64_t)w.tiles * w.NQ * c.n_cand);
    for (int64_t row = 0; row < (int64_t)c.B * c.T; row++)
        memcpy(&out[(size_t)(row * c.n_cand)], host + ((row / c.T) * w.tiles_per_seq * w.NQ + row % c.T) * c.n_cand, (size_t)c.n_cand * 4);
    free(host);
    CUDA_CHECK(cudaFree(table));
    work_free(&w);
    return out;
}
template <int METHOD> static std::vector<float> chunk_scores(const Case &x) {
    int64_t n = (int64_t)x.h.B * x.h.T * x.h.n_cand;
    float *table = device_poison<float>(n);
    score_rows<METHOD>(x.d, table, 0, x.h.B * x.h.T);
    float *host = to_host(table, n);
    std::vector<float> out(host, host + n);
    free(host);
    CUDA_CHECK(cudaFree(table));
    return out;
}

static int64_t same_scores, other_scores; // visible scores in which mma.sync and wgmma agree to the bit, and do not

static void check_case(uint64_t seed, int kind, int B, int T, int H, int D, int k, int r, int docs, int full) {
    Case x;
    Work w;
    int hopper, step = std::max(1, B * T / 60);
    char name[160];
    std::vector<int32_t> want, got, first;
    std::vector<char> again((size_t)B * T, 0);
    unsigned long long nans, want_nans;
    case_new(&x, seed, kind, B, T, H, D, k, r, docs);
    snprintf(name, sizeof name, "%s B=%d T=%d H=%d D=%d k=%d r=%d docs=%d", kind_name[kind], B, T, H, D, k, r, docs);
    std::vector<float> mma = chunk_scores<MMA>(x);
    want_nans = expected(x, mma.data(), NULL, again, want);
    auto judge = [&](const char *version, int stray) {
        int64_t d = differences(got, want);
        int wrong = refuted(x, got, step);
        char text[200];
        snprintf(text, sizeof text, "%-9s %s", version, name);
        if (!check(d == 0 && !stray && !wrong && nans == want_nans, text, (double)d))
            printf("     %lld slots differ, %d stray writes, %d rows refuted by float64, %llu NaNs chosen (%llu expected)\n", (long long)d,
                   stray, wrong, nans, want_nans);
    };
    if (full) {
        float *table = device_poison<float>((int64_t)37 * x.h.n_cand);
        int stray = run_guarded(&x, [&] { topk_table(x.d, table, 37); }, got, &nans);
        judge("1 table", stray);
        CUDA_CHECK(cudaFree(table));
    }
    int stray = run_guarded(&x, [&] { topk_stream<MMA>(x.d, NULL, NULL, NULL, NULL); }, got, &nans);
    judge("3 stream", stray);
    if (full) {
        std::vector<float> fma = chunk_scores<FMA>(x);
        want_nans = expected(x, fma.data(), NULL, again, want);
        stray = run_guarded(&x, [&] { topk_stream<FMA>(x.d, NULL, NULL, NULL, NULL); }, got, &nans);
        judge("2 stream", stray);
    }
    for (int few = 0; few < 1 + full; few++) { // all rows at once, then in small chunks
        hopper = work_new(&w, x.d, few ? (size_t)1 << 20 : (size_t)1 << 30);
        if (!hopper) break;
        std::vector<float> wg = wgmma_scores(x);
        for (int64_t row = 0; row < (int64_t)B * T; row++) {
            int2 v = visible(x.h, row);
            for (int i = v.y > k ? v.x : v.x + v.y; i < v.x + v.y; i++) {
                int64_t at = row * x.h.n_cand + i;
                int same = memcmp(&wg[(size_t)at], &mma[(size_t)at], 4) == 0 || (wg[(size_t)at] != wg[(size_t)at] && mma[(size_t)at] != mma[(size_t)at]);
                same_scores += same;
                other_scores += !same;
            }
        }
        float *kth = device_poison<float>((int64_t)B * T);
        for (int version = 0; version < 2 + full; version++) { // 5 with either schedule; 4 with the thresholds that the last 5 left
            char text[32];
            int given = version == 2;
            if (version < 2) w.split = version;
            for (int repeat = 0; repeat < (few ? 1 : 5); repeat++) {
                work_poison(&w, x.d);
                stray = run_guarded(&x, [&] { topk_hopper(&w, x.d, given ? kth : NULL, given ? NULL : kth, NULL); }, got, &nans);
                if (repeat == 0) first = got;
                else if (differences(got, first)) check(0, "a repetition differs", repeat);
            }
            Retry e = retries_of(&w);
            int *rows = to_host(w.retry_rows, (int64_t)B * T);
            std::fill(again.begin(), again.end(), 0);
            for (int i = 0; i < e.count; i++) again[(size_t)rows[i]] = 1;
            free(rows);
            want_nans = expected(x, wg.data(), mma.data(), again, want);
            snprintf(text, sizeof text, "%s/%d u%d o%d", given ? "4" : "5", w.split, e.underflow, e.overflow);
            judge(text, stray);
        }
        CUDA_CHECK(cudaFree(kth));
        work_free(&w);
    }
    case_free(&x);
}

// ---- timing

// bf16 product of [n, n] matrices by cuBLASLt, FLOP/s.
static double gemm_rate(uint64_t seed, int n) {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t algorithm;
    cublasOperation_t transposed = CUBLAS_OP_T;
    int found = 0;
    size_t bytes = (size_t)32 << 20;
    float one = 1, zero = 0;
    void *workspace;
    bf16 *x = device_normal<bf16>((int64_t)n * n, seed, 1, 1.0f), *y = device_normal<bf16>((int64_t)n * n, seed, 2, 1.0f), *z = device_poison<bf16>((int64_t)n * n);
    CUDA_CHECK(cudaMalloc(&workspace, bytes));
    int bad = cublasLtCreate(&lt) || cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
              cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) ||
              cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, (uint64_t)n, (uint64_t)n, n) ||
              cublasLtMatmulPreferenceCreate(&preference) ||
              cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes) ||
              cublasLtMatmulAlgoGetHeuristic(lt, op, a, a, a, a, preference, 1, &algorithm, &found) || !found;
    if (bad) {
        fprintf(stderr, "cuBLASLt has no product of this shape\n");
        exit(1);
    }
    Timing t = time_kernel(10, [&] {
        bad |= cublasLtMatmul(lt, op, &one, x, a, y, a, &zero, z, a, z, a, &algorithm.algo, workspace, bytes, 0) != CUBLAS_STATUS_SUCCESS;
    });
    if (bad) {
        fprintf(stderr, "cuBLASLt: the product failed\n");
        exit(1);
    }
    const void *all[] = {x, y, z, workspace};
    for (const void *p : all) CUDA_CHECK(cudaFree((void *)p));
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatmulDescDestroy(op);
    cublasLtDestroy(lt);
    return 2.0 * n * n * n / t.median * 1e3;
}
__global__ static void uniform_weights_kernel(float *w, int64_t n, uint64_t seed, float scale) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) w[i] = scale * rng_uniform(seed, 3, (uint64_t)i);
}
// Rows in which two selections differ.
__global__ static void compare_kernel(const int32_t *a, const int32_t *b, int k, int64_t rows, int *count) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int differ = 0;
        for (int j = threadIdx.x; j < k; j += blockDim.x) differ |= a[row * k + j] != b[row * k + j];
        if (__syncthreads_or(differ) && threadIdx.x == 0) atomicAdd(count, 1);
    }
}

static void print_time(const char *version, const TopK &c, double flops, size_t bytes, Timing t) {
    printf("%-22s T=%-6d H=%-2d D=%-3d k=%-4d %9.3f ms (%.3f..%.3f) %7.1f TFLOP/s %6.0f MiB workspace\n", version, c.T, c.H, c.D, c.k, t.median, t.lo,
           t.hi, flops / t.median * 1e-9,
           (double)bytes / 1048576);
    fflush(stdout);
}

// One causal sequence. all: versions 1 to 3 too, and every row of 5 against 1.
static void time_case(uint64_t seed, double rate, int T, int H, int D, int k, int all) {
    int64_t nq = (int64_t)T * H * D;
    int32_t *doc, *sel, *sel1 = NULL;
    unsigned long long *nans;
    float *w = device_poison<float>((int64_t)T * H);
    CUDA_CHECK(cudaMalloc(&doc, (size_t)T * 4));
    CUDA_CHECK(cudaMemset(doc, 0, (size_t)T * 4));
    CUDA_CHECK(cudaMalloc(&nans, 8));
    CUDA_CHECK(cudaMemset(nans, 0, 8));
    sel = device_poison<int32_t>((int64_t)T * k);
    uniform_weights_kernel<<<1024, 256>>>(w, (int64_t)T * H, seed, 1 / sqrtf((float)(H * D)));
    TopK c = {1, T, T, H, D, k, 1, device_normal<bf16>(nq, seed, 1, 1.0f), device_normal<bf16>((int64_t)T * D, seed, 2, 1.0f), w, doc, sel, nans};
    double flops = (double)T * T * H * D, gemm_ms = flops / rate * 1e3;
    if (all) {
        int chunk = (int)(((size_t)1 << 30) / ((size_t)T * 4));
        float *table = device_poison<float>((int64_t)chunk * T);
        sel1 = device_poison<int32_t>((int64_t)T * k);
        TopK c1 = c;
        c1.sel = sel1;
        print_time("1 table", c, flops, (size_t)chunk * (size_t)T * 4, time_kernel(1, [&] { topk_table(c1, table, chunk); }));
        CUDA_CHECK(cudaFree(table));
        if (T <= 16384) print_time("2 stream FMA", c, flops, 0, time_kernel(1, [&] { topk_stream<FMA>(c, NULL, NULL, NULL, NULL); }));
        print_time("3 stream mma", c, flops, 0, time_kernel(1, [&] { topk_stream<MMA>(c, NULL, NULL, NULL, NULL); }));
    }
    Work work;
    if (work_new(&work, c, (size_t)2 << 30)) {
        float *kth = device_poison<float>(T);
        int best = work.split;
        for (int other = 0; other < 2; other++) { // the schedule that is not the default first
            work.split = other ? best : !best;
            Timing t = time_kernel(3, [&] { topk_hopper(&work, c, NULL, kth, NULL); });
            Phases p;
            topk_hopper(&work, c, NULL, kth, &p);
            Retry e = retries_of(&work);
            int64_t differ = -1;
            if (all) {
                int *count, n;
                CUDA_CHECK(cudaMalloc(&count, 4));
                CUDA_CHECK(cudaMemset(count, 0, 4));
                compare_kernel<<<1024, 256>>>(sel, sel1, k, T, count);
                CUDA_CHECK(cudaMemcpy(&n, count, 4, cudaMemcpyDeviceToHost));
                CUDA_CHECK(cudaFree(count));
                differ = n;
                if (other_scores == 0) check(n == 0, "5 and 1 select the same at this size (rows that differ)", n);
            }
            print_time(work.split ? "5 HyTopK, halves" : "5 HyTopK, turns", c, flops, work.bytes, t);
            printf("{\"T\":%d,\"H\":%d,\"D\":%d,\"k\":%d,\"split\":%d,\"select_ms\":%.3f,\"gemm_ms\":%.3f,\"ratio\":%.3f,"
                   "\"prepass_ms\":%.3f,\"scan_ms\":%.3f,\"list_select_ms\":%.3f,\"retry_ms\":%.3f,\"retry_rows\":%d,\"underflow\":%d,\"overflow\":%d,"
                   "\"rows_differ_from_table\":%lld,\"workspace_bytes\":%zu,\"chunks\":%d,\"stride\":%d}\n",
                   T, H, D, k, work.split, t.median, gemm_ms, t.median / gemm_ms, p.prepass, p.scan, p.select, p.retry, e.count, e.underflow, e.overflow,
                   (long long)differ, work.bytes,
                   (work.tiles + work.chunk - 1) / work.chunk, work.stride);
        }
        print_time("4 true thresholds", c, flops, work.bytes, time_kernel(3, [&] { topk_hopper(&work, c, kth, NULL, NULL); }));
        CUDA_CHECK(cudaFree(kth));
        work_free(&work);
    } else printf("H=%d D=%d: no wgmma here, version 3 is the fastest\n", H, D);
    const void *everything[] = {c.q, c.key, w, doc, sel, sel1, nans};
    for (const void *p : everything) CUDA_CHECK(cudaFree((void *)p));
}

int main(int argc, char **argv) {
    uint64_t seed = seed_of(argc, argv);
    int small = argc > 2 && !strcmp(argv[2], "small");
    printf("wgmma path: %s\n", has_wgmma() ? "yes (sm_90a)" : "no, versions 4 and 5 are left out");
    for (int kind = 0; kind < KINDS; kind++) check_case(seed + (uint64_t)kind, kind, 1, 1100, 8, 64, 64, 1, 1, kind % 3 == 0);
    for (int kind = 0; kind < KINDS; kind += 1) check_case(seed + 100 + (uint64_t)kind, kind, 2, 333, 4, 32, 20, 1, 4, kind % 4 == 1);
    // B, T, H, D, k, r, documents: every H and D; T below, at and above k; k = 1; pools; T no multiple of a tile or a block of keys
    static const int shapes[][7] = {
        {1, 1, 8, 64, 4, 1, 1}, {2, 65, 1, 32, 1, 1, 1}, {1, 129, 2, 64, 7, 1, 2}, {1, 700, 4, 64, 33, 1, 1}, {2, 257, 4, 128, 9, 1, 3},
        {1, 500, 8, 32, 100, 1, 1}, {2, 391, 8, 128, 31, 1, 5}, {1, 640, 16, 32, 16, 1, 1}, {1, 777, 16, 64, 128, 1, 3}, {1, 600, 16, 128, 50, 1, 1},
        {1, 300, 32, 32, 40, 1, 1}, {1, 410, 32, 64, 3, 1, 2}, {2, 200, 32, 128, 25, 1, 1}, {1, 333, 64, 32, 60, 1, 1}, {1, 290, 64, 64, 8, 1, 2},
        {1, 350, 64, 128, 30, 1, 1}, {2, 1203, 8, 64, 24, 4, 3}, {1, 1600, 4, 32, 64, 4, 1}, {1, 100, 8, 64, 100, 1, 1}, {1, 101, 8, 64, 100, 1, 1},
        {1, 90, 16, 64, 2048, 1, 1}, {1, 2300, 8, 64, 1024, 1, 1}, {1, 2200, 4, 64, 512, 1, 2}, {1, 2500, 4, 32, 2048, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const int *s = shapes[i];
        check_case(seed + 200 + i, GAUSS, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[1] < 1000);
    }
    check_case(seed + 300, DUPLICATES, 2, 900, 8, 64, 48, 4, 3, 0);
    printf("visible scores whose bits are the same by mma.sync and wgmma: %lld, not the same: %lld\n", (long long)same_scores, (long long)other_scores);
    if (!small) {
        double rate = gemm_rate(seed, 8192);
        printf("bf16 product of 8192^3 by cuBLASLt: %.1f TFLOP/s\n", rate * 1e-12);
        time_case(seed, rate, 16384, 8, 64, 1024, 1);
        time_case(seed, rate, 131072, 4, 64, 512, 0);
        time_case(seed, rate, 131072, 8, 64, 1024, 1);
        time_case(seed, rate, 131072, 16, 128, 2048, 0);
        time_case(seed, rate, 262144, 8, 64, 1024, 0);
    }
    return check_summary();
}
