// Selection by itself: HyTopK beside the rate of the matrix product it contains, and beside the baseline with a table of scores. Uses the
// trainer's own kernels: includes train_gpt_sparse.cu.
//
//   bench_select                          gaussian queries and keys, one causal sequence, the configurations below
//   bench_select --resume DIR [options]   index queries and keys of a trained model (options as of the trainer: --preset, --seq-len, ...), layer by layer,
//                                         and how many keys an exact bound of each block's scores could leave out
//
// One JSON object a line. The first: device, date, seed, gemm_tflops (8192^3 bf16 product by cuBLASLt, this run). Then for each case
//   kind, layer, T, H, D, k      H index heads of D channels
//   flops, gemm_ms               of the causal half: T^2 H D; the time these would take at gemm_tflops
//   select_ms, lo, hi, ratio     everything: sample, scan, top-k, retries; median and range; select_ms / gemm_ms
//   thresholds_ms, scores_ms, topk_ms   of one run: sample and guess; scan; selection from the lists and retries
//   table_ms, table_lo, table_hi, table_scores_ms, table_topk_ms   --topk table
//   workspace, retry_rows, tie_rows   bytes; rows whose guess failed; rows whose k-th best is one of many equals
//   rows_differ                  rows in which HyTopK and the table choose differently: 0
//   rows_checked, rows_wrong     sampled rows held against scores from a plain kernel: 0 wrong
// and for trained layers "prune": for blocks of 16, 32, 64, 128 keys the share of (query, block) and of (tile of queries, block) whose bound
// lies below the query's k-th score (all queries' of the tile).
#define TESTING
#include "../../train_gpt_sparse.cu"
#include <algorithm>
#include <vector>

typedef struct { double median, lo, hi; } Timing;
template <class F> static Timing time_runs(int runs, F work) {
    std::vector<double> ms;
    cudaEvent_t a, b;
    CUDA_CHECK(cudaEventCreate(&a));
    CUDA_CHECK(cudaEventCreate(&b));
    for (int i = 0; i < runs + 1; i++) { // the first warms up
        float t;
        CUDA_CHECK(cudaEventRecord(a, stream));
        work();
        CUDA_CHECK(cudaEventRecord(b, stream));
        CUDA_CHECK(cudaEventSynchronize(b));
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaEventElapsedTime(&t, a, b));
        if (i) ms.push_back((double)t);
    }
    CUDA_CHECK(cudaEventDestroy(a));
    CUDA_CHECK(cudaEventDestroy(b));
    std::sort(ms.begin(), ms.end());
    Timing t = {ms[ms.size() / 2], ms.front(), ms.back()};
    return t;
}

template <class A> static A *device_array(int64_t n) {
    A *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(A)));
    CUDA_CHECK(cudaMemset(p, 0xff, (size_t)n * sizeof(A)));
    return p;
}
// Sum of four uniforms of variance 1/12: near enough to a normal.
template <class A> __global__ static void normal_kernel(A *x, int64_t n, uint64_t seed, float scale, int weights) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = gpu_rng_mix(gpu_rng_mix(seed) ^ (uint64_t)i);
        float four = (float)(z & 65535) + (float)(z >> 16 & 65535) + (float)(z >> 32 & 65535) + (float)(z >> 48);
        x[i] = (A)(scale * (weights ? ((float)(z & 65535) + 0.5f) / 65536 : (four - 131070.0f) * (1.7320508f / 65536.0f)));
    }
}
__global__ static void compare_kernel(const int32_t *a, const int32_t *b, int k, int64_t rows, int *count) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int differ = 0;
        for (int j = threadIdx.x; j < k; j += blockDim.x) differ |= a[row * k + j] != b[row * k + j];
        if (__syncthreads_or(differ) && threadIdx.x == 0) atomicAdd(count, 1);
    }
}

static double gemm_rate(uint64_t seed) {
    int64_t n = 8192;
    floatX *x = device_array<floatX>(n * n), *y = device_array<floatX>(n * n), *z = device_array<floatX>(n * n), *none = NULL;
    normal_kernel<<<1024, 256, 0, stream>>>(x, n * n, seed, 1.0f, 0);
    normal_kernel<<<1024, 256, 0, stream>>>(y, n * n, seed + 1, 1.0f, 0);
    Timing t = time_runs(10, [&] { gpu_linear_forward(z, none, x, y, n, n, n); });
    CUDA_CHECK(cudaFree(x));
    CUDA_CHECK(cudaFree(y));
    CUDA_CHECK(cudaFree(z));
    return 2.0 * (double)n * (double)n * (double)n / t.median * 1e3;
}

// Sampled rows of sel that the scores of a plain kernel refute: an unchosen candidate is better, or a chosen one worse, than the k-th best by more than rounding.
static int rows_wrong(const Core &c, const int32_t *sel, int rows, uint64_t seed) {
    float *device = device_array<float>(c.n_cand);
    std::vector<float> score((size_t)c.n_cand), sorted;
    std::vector<int32_t> chosen((size_t)c.k);
    int wrong = 0;
    for (int j = 0; j < rows; j++) {
        int row = j ? (int)(rng_mix(seed + (uint64_t)j) % (uint64_t)c.N) : c.N - 1, t = row % c.T, doc;
        gpu_copy(&doc, c.doc + row, sizeof doc, cudaMemcpyDeviceToHost);
        int lo = doc / c.r, n = (t - doc + 1) / c.r, m = std::min(n, c.k), bad = 0;
        gpu_copy(chosen.data(), sel + (int64_t)row * c.k, (size_t)c.k * 4, cudaMemcpyDeviceToHost);
        for (int i = 0; i < c.k; i++) bad += i < m ? chosen[i] < lo || chosen[i] >= lo + n || (i && chosen[i] <= chosen[i - 1]) : chosen[i] != -1;
        if (n > c.k && !bad) {
            table_kernel<<<dim3(blocks_for(c.n_cand, BLOCK), 1), BLOCK, 0, stream>>>(c, device, row);
            gpu_copy(score.data(), device, (size_t)c.n_cand * 4, cudaMemcpyDeviceToHost);
            sorted.assign(score.begin() + lo, score.begin() + lo + n);
            std::nth_element(sorted.begin(), sorted.begin() + (c.k - 1), sorted.end(), std::greater<float>());
            double kth = (double)sorted[(size_t)c.k - 1], size = 0;
            for (int i = lo; i < lo + n; i++) size = std::max(size, fabs((double)score[(size_t)i]));
            for (int i = lo, at = 0; i < lo + n; i++) {
                int in = at < c.k && chosen[(size_t)at] == i;
                double above = (double)score[(size_t)i] - kth;
                at += in;
                bad += in ? above < -2e-5 * size : above > 2e-5 * size;
            }
        }
        wrong += bad > 0;
    }
    CUDA_CHECK(cudaFree(device));
    return wrong;
}

// One case: c has its queries, keys and documents; sel [N, k] of each way is written here.
static void measure(Core c, const char *kind, int layer, double rate, int runs, int rows, uint64_t seed) {
    if (select_path(c, 1, 1) != SELECT_SCAN) {
        printf("{\"kind\":\"%s\",\"layer\":%d,\"H\":%d,\"D\":%d,\"k\":%d,\"skipped\":\"the wgmma scan has not these sizes\"}\n", kind, layer, c.HI, c.DI, c.k);
        return;
    }
    Select x;
    char *planned = G_.select;
    int32_t *sel = device_array<int32_t>((int64_t)c.N * c.k), *by_table = device_array<int32_t>((int64_t)c.N * c.k);
    int *count = device_array<int>(1), differ, bad;
    size_t bytes[2];
    Timing t[2];
    double ms[2][PHASES];
    Retry retry = {0, 0, 0, 0};
    for (int table = 0; table < 2; table++) {
        bytes[table] = select_layout(c, table, &x);
        G_.select = device_array<char>((int64_t)bytes[table]);
        t[table] = time_runs(runs, [&] { scan_select(c, table ? by_table : sel, table); });
        G_.timed = 1;
        G_.n_marks = 0;
        scan_select(c, table ? by_table : sel, table);
        phase_begin(PHASE_REST);
        CUDA_CHECK(cudaStreamSynchronize(stream));
        phase_times(ms[table]);
        G_.timed = 0;
        select_layout(c, table, &x);
        if (!table) gpu_copy(&retry, x.retry, sizeof retry, cudaMemcpyDeviceToHost);
        CUDA_CHECK(cudaFree(G_.select));
    }
    CUDA_CHECK(cudaMemsetAsync(count, 0, sizeof(int), stream));
    compare_kernel<<<1024, 256, 0, stream>>>(sel, by_table, c.k, c.N, count);
    gpu_copy(&differ, count, sizeof differ, cudaMemcpyDeviceToHost);
    bad = rows_wrong(c, sel, rows, seed);
    double flops = (double)c.T * (double)c.n_cand * (double)(c.N / c.T) * c.HI * c.DI, gemm_ms = flops / rate * 1e3; // half of all pairs, two operations each
    printf("{\"kind\":\"%s\",\"layer\":%d,\"T\":%d,\"H\":%d,\"D\":%d,\"k\":%d,\"flops\":%.4g,\"gemm_ms\":%.3f,\"select_ms\":%.3f,\"lo\":%.3f,\"hi\":%.3f,\"ratio\":%.3f,"
           "\"thresholds_ms\":%.3f,\"scores_ms\":%.3f,\"topk_ms\":%.3f,\"table_ms\":%.3f,\"table_lo\":%.3f,\"table_hi\":%.3f,\"table_scores_ms\":%.3f,\"table_topk_ms\":%.3f,"
           "\"workspace\":%zu,\"retry_rows\":%d,\"tie_rows\":%d,\"underflow\":%d,\"overflow\":%d,\"rows_differ\":%d,\"rows_checked\":%d,\"rows_wrong\":%d}\n",
           kind, layer, c.T, c.HI, c.DI, c.k, flops, gemm_ms, t[0].median, t[0].lo, t[0].hi, t[0].median / gemm_ms, ms[0][PHASE_GUESS], ms[0][PHASE_SCORES], ms[0][PHASE_TOPK],
           t[1].median, t[1].lo, t[1].hi, ms[1][PHASE_SCORES], ms[1][PHASE_TOPK], bytes[0], retry.count, retry.ties, retry.underflow, retry.overflow, differ, rows, bad);
    fflush(stdout);
    CUDA_CHECK(cudaFree(sel));
    CUDA_CHECK(cudaFree(by_table));
    CUDA_CHECK(cudaFree(count));
    G_.select = planned;
    if (differ || bad) die("HyTopK chose wrongly: %d rows differ from the table's, %d of %d sampled rows are refuted", differ, bad, rows);
}

static void gaussian(uint64_t seed, double rate, int T, int H, int D, int k, int runs, int rows) {
    int64_t nq = (int64_t)T * H * D, nk = (int64_t)T * D;
    floatX *q = device_array<floatX>(nq), *key = device_array<floatX>(nk);
    float *w = device_array<float>((int64_t)T * H);
    int32_t *doc = device_array<int32_t>(T);
    normal_kernel<<<1024, 256, 0, stream>>>(q, nq, seed, 1.0f, 0);
    normal_kernel<<<1024, 256, 0, stream>>>(key, nk, seed + 1, 1.0f, 0);
    normal_kernel<<<1024, 256, 0, stream>>>(w, (int64_t)T * H, seed + 2, 1 / sqrtf((float)(H * D)), 1);
    CUDA_CHECK(cudaMemsetAsync(doc, 0, (size_t)T * 4, stream));
    Core c;
    memset(&c, 0, sizeof c);
    c.T = c.N = c.n_cand = T; c.HI = H; c.DI = D; c.k = k; c.r = 1;
    c.q_index = q; c.k_index = key; c.w_index = w; c.doc = doc;
    measure(c, "gaussian", -1, rate, runs, rows, seed);
    CUDA_CHECK(cudaFree(q));
    CUDA_CHECK(cudaFree(key));
    CUDA_CHECK(cudaFree(w));
    CUDA_CHECK(cudaFree(doc));
}

// ---- what an exact bound could leave out

// Centroid and radius of each block of "size" keys of the sequence. One warp a block.
__global__ static void block_kernel(Core c, int size, float *centroid, float *radius) {
    int block = (int)(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP), lane = threadIdx.x % WARP, first = block * size, n = min(size, c.n_cand - first);
    float most = 0;
    if (n <= 0) return;
    for (int d = lane; d < c.DI; d += WARP) {
        float s = 0;
        for (int i = 0; i < n; i++) s += (float)c.k_index[(int64_t)(first + i) * c.DI + d];
        centroid[(int64_t)block * c.DI + d] = s / (float)n;
    }
    __syncwarp();
    for (int i = 0; i < n; i++) {
        float s = 0;
        for (int d = lane; d < c.DI; d += WARP) {
            float x = (float)c.k_index[(int64_t)(first + i) * c.DI + d] - centroid[(int64_t)block * c.DI + d];
            s += x * x;
        }
        most = fmaxf(most, warp_sum(s));
    }
    if (lane == 0) radius[block] = sqrtf(most);
}
// kth[j] = the smallest chosen score of row rows[j]. One block a row.
__global__ static void kth_kernel(Core c, const int32_t *sel, const int *rows, float *kth) {
    __shared__ float shared[BLOCK / WARP];
    int row = rows[blockIdx.x];
    float least = INFINITY;
    for (int j = threadIdx.x; j < c.k; j += blockDim.x) {
        int s = sel[(int64_t)row * c.k + j];
        if (s < 0) continue;
        float score = 0;
        for (int h = 0; h < c.HI; h++) {
            float dot = 0;
            for (int d = 0; d < c.DI; d++) dot = fmaf((float)c.q_index[((int64_t)row * c.HI + h) * c.DI + d], (float)c.k_index[(int64_t)s * c.DI + d], dot);
            score += c.w_index[(int64_t)row * c.HI + h] * fmaxf(dot, 0.0f);
        }
        least = fminf(least, score);
    }
    least = -block_max(-least, shared);
    if (threadIdx.x == 0) kth[blockIdx.x] = least;
}
// skip[j, block] = 1 when no key of the block can reach row rows[j]'s k-th score: a head's dot product lies within |q| radius of that with the
// centroid; relu is monotone; a head adds at most its weight times the upper end when the weight is positive, times the lower end when not.
__global__ static void bound_kernel(Core c, const int *rows, const float *kth, int size, int blocks, const float *centroid, const float *radius, unsigned char *skip) {
    int row = rows[blockIdx.y], block = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    float most = 0;
    if (block >= blocks) return;
    for (int h = 0; h < c.HI; h++) {
        float dot = 0, norm = 0, w = c.w_index[(int64_t)row * c.HI + h];
        for (int d = 0; d < c.DI; d++) {
            float q = (float)c.q_index[((int64_t)row * c.HI + h) * c.DI + d];
            dot = fmaf(q, centroid[(int64_t)block * c.DI + d], dot);
            norm = fmaf(q, q, norm);
        }
        float reach = sqrtf(norm) * radius[block];
        most += w * fmaxf(w > 0 ? dot + reach : dot - reach, 0.0f);
    }
    skip[(int64_t)blockIdx.y * blocks + block] = most < kth[blockIdx.y];
}

// Sampled tiles of the scan's queries in the second half of the (one) sequence.
static void prune(const Core &c, const int32_t *sel, int layer, uint64_t seed) {
    enum { TILES = 64 };
    int per_tile = SCAN_COLUMNS / c.HI, n = TILES * per_tile;
    std::vector<int> rows((size_t)n);
    for (int j = 0; j < n; j++) rows[(size_t)j] = (c.T / 2 + (int)(rng_mix(seed + (uint64_t)(j / per_tile)) % (uint64_t)(c.T / 2 - per_tile))) / per_tile * per_tile + j % per_tile;
    int *device_rows = device_array<int>(n);
    float *kth = device_array<float>(n);
    gpu_copy(device_rows, rows.data(), (size_t)n * 4, cudaMemcpyHostToDevice);
    kth_kernel<<<(unsigned)n, BLOCK, 0, stream>>>(c, sel, device_rows, kth);
    for (int size = 16; size <= 128; size *= 2) {
        int blocks = (c.n_cand + size - 1) / size;
        int64_t seen = 0, by_query = 0, tile_seen = 0, by_tile = 0;
        float *centroid = device_array<float>((int64_t)blocks * c.DI), *radius = device_array<float>(blocks);
        unsigned char *skip = device_array<unsigned char>((int64_t)n * blocks);
        std::vector<unsigned char> host((size_t)n * (size_t)blocks);
        block_kernel<<<blocks_for(blocks, BLOCK / WARP), BLOCK, 0, stream>>>(c, size, centroid, radius);
        bound_kernel<<<dim3(blocks_for(blocks, BLOCK), (unsigned)n), BLOCK, 0, stream>>>(c, device_rows, kth, size, blocks, centroid, radius, skip);
        gpu_copy(host.data(), skip, host.size(), cudaMemcpyDeviceToHost);
        for (int j = 0; j < n; j += per_tile)
            for (int b = 0; b * size * c.r <= rows[(size_t)j]; b++) {
                int all = 1;
                for (int q = 0; q < per_tile; q++) {
                    int s = host[(size_t)(j + q) * (size_t)blocks + (size_t)b];
                    by_query += s;
                    all &= s;
                }
                seen += per_tile;
                tile_seen++;
                by_tile += all;
            }
        printf("{\"prune\":%d,\"layer\":%d,\"T\":%d,\"k\":%d,\"queries\":%d,\"skipped_by_query\":%.4f,\"tile\":%d,\"skipped_by_tile\":%.4f}\n", size, layer, c.T, c.k, n,
               (double)by_query / (double)seen, per_tile, (double)by_tile / (double)tile_seen);
        CUDA_CHECK(cudaFree(centroid));
        CUDA_CHECK(cudaFree(radius));
        CUDA_CHECK(cudaFree(skip));
    }
    fflush(stdout);
    CUDA_CHECK(cudaFree(device_rows));
    CUDA_CHECK(cudaFree(kth));
}

// Mean sizes of the unions of the selections of 4, 8, 16 and 32 neighbouring queries, in units of k: what they could share.
static void unions(const Core &c, const int32_t *sel, int layer, uint64_t seed) {
    enum { SAMPLES = 128, MOST = 32 };
    std::vector<int32_t> rows((size_t)MOST * (size_t)c.k), all;
    double size[4] = {0, 0, 0, 0};
    for (int j = 0; j < SAMPLES; j++) {
        int row = (c.T / 2 + (int)(rng_mix(seed + 1000 + (uint64_t)j) % (uint64_t)(c.T / 2 - MOST))) / MOST * MOST;
        gpu_copy(rows.data(), sel + (int64_t)row * c.k, rows.size() * 4, cudaMemcpyDeviceToHost);
        for (int g = 0; g < 4; g++) {
            all.assign(rows.begin(), rows.begin() + (4 << g) * (int64_t)c.k);
            std::sort(all.begin(), all.end());
            size[g] += (double)(std::unique(all.begin(), all.end()) - all.begin()) / c.k / SAMPLES;
        }
    }
    printf("{\"unions\":[4,8,16,32],\"layer\":%d,\"T\":%d,\"k\":%d,\"size_over_k\":[%.2f,%.2f,%.2f,%.2f]}\n", layer, c.T, c.k, size[0], size[1], size[2], size[3]);
}

static void trained(double rate, uint64_t seed, int argc, char **argv) {
    Config c;
    Model m;
    Loader data[2];
    Tokenizer tok;
    gpu_engine();
    if (!prepare(&c, &m, data, &tok, argc, argv)) return;
    if (c.B != 1) die("bench_select: expected --batch-size 1, not %lld", (long long)c.B);
    memset(&m.arena, 0, sizeof m.arena);
    m.B = c.B; m.T = c.T; m.N = c.B * c.T; m.r0 = 0; m.nr = m.N;
    m.tokens = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
    m.targets = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
    m.doc = (int32_t *)xalloc((size_t)m.N * sizeof(int32_t));
    gpu_open(&m, c.B, c.T);
    int64_t step = 0, rows_seen = 0;
    if (!checkpoint_resume(&m, &step, &rows_seen)) die("bench_select: expected --resume with a checkpoint");
    gpu_from_host(&m);
    loader_row(&data[1], 0, m.tokens, m.targets);
    m.loss_scale = 1.0 / (double)m.N;
    gpu_forward(&m);
    gpu_count(&m);
    Stats s = gpu_sums(&m);
    printf("{\"model\":\"%s\",\"T\":%lld,\"loss\":%.4f}\n", c.resume, (long long)m.T, s.loss / (double)s.targets);
    for (int64_t i = 0; i < c.L; i++) {
        const Layer *l = &G_.g.layers[i];
        if (!is_sparse(l->letter)) continue;
        Core x = core_of(&G_.g, l);
        measure(x, "trained", (int)i, rate, 5, 32, seed);
        prune(x, l->sel, (int)i, seed);
        unions(x, l->sel, (int)i, seed);
    }
    gpu_close();
}

int main(int argc, char **argv) {
    uint64_t seed = (uint64_t)time(NULL);
    cudaDeviceProp p;
    char date[32];
    time_t now = time(NULL);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) die("no CUDA device: expected an NVIDIA GPU and its driver");
    CUDA_CHECK(cudaGetDeviceProperties(&p, 0));
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    G_.wgmma = gpu_has_wgmma();
    G_.select_most = (int64_t)1 << 30;
    G_.multiprocessors = p.multiProcessorCount;
    CUDA_CHECK(cudaStreamCreate(&stream));
    cublas_check(cublasLtCreate(&lt), "create");
    lt_workspace = device_array<char>(LT_WORKSPACE);
    G_.sums = device_array<Sums>(1);
    CUDA_CHECK(cudaMemset(G_.sums, 0, sizeof(Sums)));
    double rate = gemm_rate(seed);
    printf("{\"program\":\"bench_select\",\"device\":\"%s\",\"date\":\"%s\",\"git\":\"%s\",\"seed\":%llu,\"gemm_tflops\":%.1f}\n", p.name, date, GIT_HASH, (unsigned long long)seed, rate * 1e-12);
    if (argc > 1) {
        trained(rate, seed, argc, argv);
        return 0;
    }
    static const int cases[][4] = {{131072, 4, 64, 512}, {131072, 8, 64, 1024}, {131072, 16, 128, 2048}, {131072, 64, 128, 2048}, {1048576, 4, 64, 512}, {1048576, 8, 64, 1024}, {1048576, 16, 128, 2048}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int *x = cases[i];
        gaussian(seed, rate, x[0], x[1], x[2], x[3], x[0] > 500000 ? 2 : 5, x[0] < 500000 ? 32 : x[1] == 8 ? 1000 : 100);
    }
    return 0;
}
