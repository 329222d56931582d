// The CUDA trainer's own attention on the device it runs on: the core over selected rows, a whole layer, sparse beside dense.
// Includes train_gpt_sparse.cu, so what is timed is what trains.
//
//   make build/bench_attention && build/bench_attention core|layer|crossover [seed] [--tokens N] [--heads N] [--topk N]
//
// core       attention over selected rows, one KV row for all heads: forward; backward without and with the indexer's KL. T = 16384 and 65536;
//            --tokens asks for any one length instead (262144, 1048576), --heads and --topk for a part of the shapes
// layer      one D layer (hidden size 2048, 16 heads over a 576-wide row, 16 index heads of 128), and how its time divides
// crossover  one D and one F layer of the presets d12 and d24, k = 1024, at T = 2048 .. 32768
//
// One JSON object a line; the first names the machine and two ceilings measured in this run. Fields:
//   program, mode, what            what: machine | check | skipped | forward | backward | backward_kl | layer | crossover
//   device, driver, cuda, date, git, precision, seed; product_tflops (8192^3, cuBLASLt), copy_gbs (device to device, bytes read + written)
//   X_ms, X_ms_low, X_ms_high, X_reps   median, smallest, largest time and repetitions of part X (without prefix where there is one part): CUDA events
//                                  around a CUDA graph up to 65536 rows, as in training, around the launches beyond; two warm-ups are not counted
//   path                           the trainer's choice, core_path(): gathered, products, by_head; or plain
//   kv_lora, rope, heads, k, tokens, index_heads, index_dim, selection
//                                  random: one row in each of k equal parts of what a query sees. recent: like a trained indexer's, half of them in the last 2k
//                                  tokens and half before
//   pairs                          (query, selected row): sum over queries t of min(t + 1, k). Two operations a multiply-add; H heads, keys Dk, values Dv wide
//   flop, tflops, tflops_of_product   forward 2 pairs H (Dk + Dv). backward 2 pairs H (3 Dk + 2 Dv): logits again, d_oc v, dq, dk, dv: about 2.5 times
//                                  the forward. backward_kl adds 6 pairs HI DI: the scores and their two gradients. What padding adds is not counted
//   gather_gbs, gather_of_copy     bytes of the selected rows, each pair's once, by time; as a share of copy_gbs (above 1: most come from L2)
//   error                          core: largest relative error of oc and lse of 16 queries against a plain loop in double on the same inputs
//   output_error, grad_error, index_error, cosine, unexplained   check: a small step of the same widths against the CPU reference (--verify does the same)
//   layer: select, core_forward, core_backward (with the KL), whole (attention forward + backward, projections included), rest_ms = whole less the three,
//          core_ms = the three together, plan_gib (all device memory of the plan), quoted_*: Megatron-LM's default backend (2026-08-22) on one H200, its core alone
//   crossover: d_, f_: forward, backward (attention with its projections), block (with norms and MLP, both ways); ratio D/F of forward + backward, block_ratio
//
// Outputs are NaN before the first run. A shape whose check fails is named on standard error and not timed; the exit status is then 1.
#define TESTING
#include "../../train_gpt_sparse.cu"
#include <algorithm>
#ifdef PRECISION_FP32
#error "bench_attention times the bf16 kernels: build without PRECISION_FP32"
#endif

static uint64_t seed;
static int64_t only_tokens, only_heads, only_topk; // 0: all
static const char *mode;
static double copy_gbs, product_tflops;
static int failures, lines; // of checks; printed

// ---- timing

typedef struct { double ms, low, high; int n; } Time;

// Median, smallest and largest of 3 to 20 runs of work, about 100 ms of them; before() runs ahead of each, not timed.
template <class B, class W> static Time measure(B before, W work) {
    enum { MOST = 20 };
    double ms[MOST];
    float x;
    int reps = MOST;
    cudaEvent_t start, end;
    cudaGraph_t graph;
    cudaGraphExec_t exec = NULL;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    before();
    work(); // products choose their algorithms
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaGetLastError());
    if (G_.g.N <= GRAPH_ROWS) {
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        work();
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    for (int r = -1; r < reps; r++) {
        before();
        CUDA_CHECK(cudaEventRecord(start, stream));
        if (exec) CUDA_CHECK(cudaGraphLaunch(exec, stream));
        else work();
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaEventElapsedTime(&x, start, end));
        if (r >= 0) ms[r] = (double)x;
        else reps = (int)fmax(3, fmin(MOST, 100 / (double)x));
    }
    if (exec) CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    std::sort(ms, ms + reps);
    Time t = {reps % 2 ? ms[reps / 2] : (ms[reps / 2 - 1] + ms[reps / 2]) / 2, ms[0], ms[reps - 1], reps};
    return t;
}

// ---- JSON lines

static void line_begin(const char *what) { printf("{\"program\":\"bench_attention\",\"mode\":\"%s\",\"what\":\"%s\"", mode, what); }
static void line_end(void) {
    printf("}\n");
    fflush(stdout);
    lines++;
}
static void put(const char *name, double x) {
    if (isfinite(x)) printf(",\"%s\":%.6g", name, x);
    else printf(",\"%s\":null", name);
}
static void put_count(const char *name, int64_t x) { printf(",\"%s\":%lld", name, (long long)x); }
static void put_text(const char *name, const char *x) { printf(",\"%s\":\"%s\"", name, x); }
static void put_time(const char *prefix, Time t) {
    printf(",\"%sms\":%.6g,\"%sms_low\":%.6g,\"%sms_high\":%.6g,\"%sreps\":%d", prefix, t.ms, prefix, t.low, prefix, t.high, prefix, t.n);
}
static void put_sizes(const Config *c) {
    put_count("kv_lora", c->kv_lora);
    put_count("rope", c->rope);
    put_count("heads", c->H);
    put_count("index_heads", c->HI);
    put_count("index_dim", c->DI);
    put_count("k", c->topk);
    put_count("tokens", c->T);
}
static void skip(const Config *c, const char *reason) {
    line_begin("skipped");
    put_sizes(c);
    put_text("reason", reason);
    line_end();
}
static const char *path_name(const Layer *l) {
    const char *const names[] = {"by_head", "products", "gathered", "plain"}; // as core_path()
    return names[core_path(&G_.g, l)];
}

// A check: what is wrong goes to standard error and to the exit status.
static int require(int ok, const Config *c, const char *what, double found, double limit) {
    if (ok) return 1;
    fflush(stdout);
    fprintf(stderr, "bench_attention: FAILED: %s: %g, expected at most %g (layers %s, kv_lora %lld, rope %lld, heads %lld, k %lld, tokens %lld, seed %llu)\n", what, found, limit, c->layers,
            (long long)c->kv_lora, (long long)c->rope, (long long)c->H, (long long)c->topk, (long long)c->T, (unsigned long long)seed);
    failures++;
    return 0;
}

// ---- inputs

__device__ static uint64_t draw(uint64_t seed, uint64_t stream, uint64_t i) { return gpu_rng_mix(gpu_rng_mix(gpu_rng_mix(seed) ^ stream) ^ i); }

template <class A> __global__ static void normal_kernel(A *x, int64_t n, uint64_t seed, uint64_t stream, float scale) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = draw(seed, stream, (uint64_t)i);
        float u = ((float)(z >> 40) + 0.5f) / 16777216.0f, v = (float)(z & 0xffffff) / 16777216.0f;
        x[i] = (A)(scale * sqrtf(-2 * logf(u)) * cospif(2 * v));
    }
}
template <class A> static void fill_normal(A *x, int64_t n, uint64_t number, double scale) { normal_kernel<<<4096, BLOCK, 0, stream>>>(x, n, seed, number, (float)scale); }

// sel (N, k) of one sequence without documents: ascending, without duplicates, -1 behind the last. Everything seen while that is at most k; then
// "old" rows, one in each equal part of what lies before the last 2k tokens, and the others likewise within these. recent 0: all of one kind.
__global__ static void selection_kernel(int32_t *sel, int64_t N, int64_t k, uint64_t seed, int recent) {
    for (int64_t x = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; x < N * k; x += (int64_t)gridDim.x * blockDim.x) {
        int64_t n = x / k + 1, j = x % k, lo, hi;
        if (n <= k) {
            sel[x] = j < n ? (int32_t)j : -1;
            continue;
        }
        int64_t last = recent ? min(2 * k, n) : 0, before = n - last, old = recent ? min(k - k / 2, before) : k;
        if (j < old) {
            lo = j * before / old;
            hi = (j + 1) * before / old;
        } else {
            lo = before + (j - old) * last / (k - old);
            hi = before + (j - old + 1) * last / (k - old);
        }
        sel[x] = (int32_t)(lo + (int64_t)(draw(seed, 1, (uint64_t)x) % (uint64_t)(hi - lo)));
    }
}

// The pairs (query, selected row) of a sequence.
static double pairs_of(const Config *c) {
    double k = (double)min64(c->T, c->topk);
    return k * (k + 1) / 2 + ((double)c->T - k) * k;
}

// ---- checks

template <class A> __global__ static void not_finite_kernel(const A *x, int64_t n, unsigned long long *count) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        if (!isfinite((float)x[i])) atomicAdd(count, 1ull);
}
// Whether all n values are finite; says so when not.
template <class A> static int all_finite(const Config *c, const char *name, const A *x, int64_t n) {
    unsigned long long *count, host;
    char what[128];
    CUDA_CHECK(cudaMalloc(&count, sizeof *count));
    CUDA_CHECK(cudaMemsetAsync(count, 0, sizeof *count, stream));
    not_finite_kernel<<<4096, BLOCK, 0, stream>>>(x, n, count);
    CUDA_CHECK(cudaGetLastError());
    gpu_copy(&host, count, sizeof host, cudaMemcpyDeviceToHost);
    CUDA_CHECK(cudaFree(count));
    snprintf(what, sizeof what, "values of %s that are not finite", name);
    return require(host == 0, c, what, (double)host, 0);
}

// oc (SAMPLES, H, Dv) and lse (SAMPLES, H) of queries spread over the sequence, in double: a block a query and head, for one KV row group.
enum { SAMPLES = 16 };
__host__ __device__ static int64_t sample_row(int64_t N, int64_t s) { return (N - 1) * s / (SAMPLES - 1); }
__global__ static void reference_kernel(Core c, float *oc, float *lse) {
    extern __shared__ double p[];
    int i = (int)sample_row(c.N, blockIdx.x), h = (int)blockIdx.y;
    Span s = gpu_span(c, i);
    const floatX *q = c.qrow + ((int64_t)i * c.H + h) * c.Dk;
    double top = -INFINITY, sum = 0;
    for (int j = threadIdx.x; j < s.n; j += blockDim.x) {
        const floatX *key = kv_row(c, i, gpu_candidate(c, s, i, j));
        double dot = 0;
        for (int d = 0; d < c.Dk; d++) dot += (double)(float)q[d] * (double)(float)key[d];
        p[j] = dot * (double)c.scale;
    }
    __syncthreads();
    for (int j = 0; j < s.n; j++) top = fmax(top, p[j]);
    __syncthreads();
    for (int j = threadIdx.x; j < s.n; j += blockDim.x) p[j] = exp(p[j] - top);
    __syncthreads();
    for (int j = 0; j < s.n; j++) sum += p[j];
    for (int d = threadIdx.x; d < c.Dv; d += blockDim.x) {
        double v = 0;
        for (int j = 0; j < s.n; j++) v += p[j] * (double)(float)kv_row(c, i, gpu_candidate(c, s, i, j))[c.v_off + d];
        oc[((int64_t)blockIdx.x * c.H + h) * c.Dv + d] = (float)(v / sum);
    }
    if (threadIdx.x == 0) lse[(int64_t)blockIdx.x * c.H + h] = (float)(top + log(sum));
}
// Largest relative error of oc and lse among the samples; NaN if one is.
static double core_error(const Model *g, const Layer *l) {
    Core c = core_of(g, l);
    int64_t n_oc = (int64_t)c.H * c.Dv;
    double worst = 0;
    float *oc, *lse;
    CUDA_CHECK(cudaMalloc(&oc, (size_t)(SAMPLES * n_oc) * sizeof(float)));
    CUDA_CHECK(cudaMalloc(&lse, (size_t)(SAMPLES * c.H) * sizeof(float)));
    reference_kernel<<<dim3(SAMPLES, (unsigned)c.H), BLOCK, (size_t)c.support * sizeof(double), stream>>>(c, oc, lse);
    CUDA_CHECK(cudaGetLastError());
    float *want_oc = gpu_read(oc, SAMPLES * n_oc), *want_lse = gpu_read(lse, (int64_t)SAMPLES * c.H);
    for (int64_t s = 0; s < SAMPLES; s++) {
        int64_t i = sample_row(c.N, s);
        const double found[2] = {gpu_difference(X(l->oc) + i * n_oc, want_oc + s * n_oc, n_oc, 0).error, gpu_difference(l->lse + i * c.H, want_lse + s * c.H, c.H, 0).error};
        for (int x = 0; x < 2; x++)
            if (!(found[x] <= worst)) worst = found[x];
    }
    free(want_oc);
    free(want_lse);
    CUDA_CHECK(cudaFree(oc));
    CUDA_CHECK(cudaFree(lse));
    return worst;
}

// ---- models

// A preset (NULL: the defaults), then settings; one sequence of T tokens, nothing of a run that the device's plan would provide for.
static Config sizes(const char *preset, const char *settings, int64_t T, int64_t k) {
    Config c;
    config_defaults(&c);
    if (preset) config_preset(&c, preset);
    config_set_all(&c, "vocab-size=64 batch-size=1 warmup-dense=0 sample-every=0", "bench_attention");
    config_set_all(&c, settings, "bench_attention");
    c.T = T;
    c.topk = k;
    c.seed = (int64_t)(seed % 1000003);
    config_check(&c);
    return c;
}

// NaN in all device memory behind the RoPE tables: activations, gradients, scratch. Tokens, documents (all 0: one document) and parameters stay.
static void poison(void) {
    char *from = (char *)G_.g.layers[0].x, *end = G_.g.arena.base + G_.bytes;
    CUDA_CHECK(cudaMemsetAsync(from, 0xff, (size_t)(end - from), stream));
    CUDA_CHECK(cudaMemsetAsync(G_.sums, 0, sizeof *G_.sums, stream));
}

// Build the model of c and take its device memory. Returns 0, with a line that says why, when the card has too little.
static int open_model(Model *m, const Config *c) {
    size_t left, total;
    char reason[128];
    model_build(m, c);
    gpu_plan(m);
    CUDA_CHECK(cudaMemGetInfo(&left, &total));
    if (m->arena.peak > left) {
        snprintf(reason, sizeof reason, "the plan needs %.1f GiB, the device has %.1f GiB free", (double)m->arena.peak / 1073741824.0, (double)left / 1073741824.0);
        skip(c, reason);
        model_free(m);
        return 0;
    }
    model_init_params(m, 0);
    gpu_open(m, 1, c->T);
    G_.g.learning = 1;
    G_.g.kl_scale = c->kl_coef / (double)G_.g.N;
    poison();
    return 1;
}
static void close_model(Model *m) {
    gpu_close();
    model_free(m);
}

// One step of a small model with the widths of c against the CPU reference, as --verify does; weights of a size that makes selection and softmax uneven.
static int agrees(Config c) {
    Model m;
    c.T = 320;
    c.topk = 96;
    model_build(&m, &c);
    model_init_params(&m, 1);
    for (int i = 0; i < m.n_tensors; i++) {
        const Tensor *t = &m.tensors[i];
        #pragma omp parallel for
        for (int64_t j = 0; j < t->size; j++) {
            double x = t->init < 0 ? 0.5 + rng_uniform(seed, 100 + (uint64_t)i, (uint64_t)j) : rng_normal(seed, 100 + (uint64_t)i, (uint64_t)j) / sqrt((double)t->cols);
            param(&m, i)[j] = (float)(floatX)(float)x; // both sides start from the same matrices
        }
    }
    activations_plan(&m, 1, c.T, 1, 0);
    for (int64_t i = 0; i < m.N; i++) {
        m.tokens[i] = (int32_t)(rng_u64(seed, 2, (uint64_t)i) % (uint64_t)c.V);
        m.targets[i] = (int32_t)(rng_u64(seed, 3, (uint64_t)i) % (uint64_t)c.V);
    }
    m.learning = 1;
    m.loss_scale = 1.0 / (double)m.N;
    m.kl_scale = c.kl_coef / (double)m.N;
    gpu_open(&m, 1, c.T);
    poison();
    Verdict v = gpu_compare(&m, 0);
    int ok = verdict_good(&v);
    line_begin("check");
    put_text("layers", c.layers);
    put_sizes(&c);
    put("loss_error", v.loss);
    put("kl_error", v.kl);
    put("output_error", v.output);
    put("index_error", v.index);
    put("grad_error", v.grad);
    put("cosine", v.cosine);
    put_text("worst_gradient", v.worst);
    put_count("selected", v.chosen);
    put_count("swapped", v.differ);
    put_count("unexplained", v.unexplained);
    put_text("verdict", ok ? "agrees" : "does not agree");
    line_end();
    require(ok, &c, "a step does not agree with the CPU reference: error of the layers' outputs", v.output, LIMIT_OUTPUT);
    close_model(&m);
    return ok;
}

// What a pass adds to is cleared, and the gradient that it starts from put back.
static void before_pass(void) {
    Model *g = &G_.g;
    gpu_clear_index_grads(g, g->most_cand);
    CUDA_CHECK(cudaMemsetAsync(g->row_kl, 0, (size_t)g->N * sizeof(float), stream));
    fill_normal(X(g->dx), g->N * g->c.C, 10, 1.0 / (double)g->N);
}

// ---- the machine

// The driver's version, from the line that the kernel module shows.
static const char *driver_version(char buf[64]) {
    FILE *f = fopen("/proc/driver/nvidia/version", "r");
    char line[256] = "", *save = NULL;
    strcpy(buf, "unknown");
    if (!f) return buf;
    if (fgets(line, sizeof line, f))
        for (char *p = strtok_r(line, " \t\n", &save); p; p = strtok_r(NULL, " \t\n", &save))
            if (p[0] >= '0' && p[0] <= '9' && strchr(p, '.')) {
                snprintf(buf, 64, "%s", p);
                break;
            }
    fclose(f);
    return buf;
}

// A copy by all multiprocessors: faster than the driver's.
__global__ static void copy_kernel(uint4 *to, const uint4 *from, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) to[i] = from[i];
}

// The first line: where this runs, and what a product and a copy reach here.
static void machine_line(void) {
    enum { SIDE = 8192 };
    Config c = sizes(NULL, "layers=D num-hidden-layers=1", 64, 16);
    Model m;
    if (!open_model(&m, &c)) die("the device has no memory free");
    int64_t n = (int64_t)SIDE * SIDE;
    size_t bytes = (size_t)1 << 31;
    floatX *a, *b, *d, *none = NULL;
    char *from, *to, date[64], driver[64];
    time_t today = time(NULL);
    cudaDeviceProp p;
    int device, runtime;
    CUDA_CHECK(cudaMalloc(&a, (size_t)n * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc(&b, (size_t)n * sizeof(floatX)));
    CUDA_CHECK(cudaMalloc(&d, (size_t)n * sizeof(floatX)));
    fill_normal(a, n, 20, 1);
    fill_normal(b, n, 21, 1);
    Time product = measure([] {}, [=] { gpu_matmul(d, SIDE, none, a, SIDE, 1, b, 1, SIDE, SIDE, SIDE, SIDE); });
    CUDA_CHECK(cudaFree(a));
    CUDA_CHECK(cudaFree(b));
    CUDA_CHECK(cudaFree(d));
    CUDA_CHECK(cudaMalloc(&from, bytes));
    CUDA_CHECK(cudaMalloc(&to, bytes));
    fill_normal((float *)from, (int64_t)(bytes / sizeof(float)), 22, 1);
    Time copy = measure([] {}, [=] { copy_kernel<<<4096, 256, 0, stream>>>((uint4 *)to, (const uint4 *)from, (int64_t)(bytes / sizeof(uint4))); });
    CUDA_CHECK(cudaFree(from));
    CUDA_CHECK(cudaFree(to));
    product_tflops = 2.0 * SIDE * (double)n / product.ms * 1e-9;
    copy_gbs = 2 * (double)bytes / copy.ms * 1e-6;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&p, device));
    CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&today));
    line_begin("machine");
    put_text("device", p.name);
    put_text("driver", driver_version(driver));
    printf(",\"cuda\":\"%d.%d\"", runtime / 1000, runtime % 100 / 10);
    put_text("date", date);
    put_text("git", GIT_HASH);
    put_text("precision", "bf16");
    put_count("seed", (int64_t)seed);
    put_time("product_", product);
    put("product_tflops", product_tflops);
    put_time("copy_", copy);
    put("copy_gbs", copy_gbs);
    line_end();
    close_model(&m);
}

// ---- core

static void core_line(const char *what, const char *path, const char *selection, const Layer *l, Time t, double flop, double error) {
    const Model *g = &G_.g;
    double gbs = pairs_of(&g->c) * (double)(l->R * (int64_t)sizeof(floatX)) / t.ms * 1e-6, tflops = flop / t.ms * 1e-9;
    line_begin(what);
    put_sizes(&g->c);
    put_text("selection", selection);
    put_text("path", path);
    put_count("pairs", (int64_t)pairs_of(&g->c));
    put_time("", t);
    put("flop", flop);
    put("tflops", tflops);
    put("tflops_of_product", tflops / product_tflops);
    put("gather_gbs", gbs);
    put("gather_of_copy", gbs / copy_gbs);
    if (error >= 0) put("error", error);
    line_end();
}

// The outputs of the core's backward pass.
static int backward_finite(const Layer *l) {
    const Model *g = &G_.g;
    const Config *c = &g->c;
    return all_finite(c, "d_qrow", X(g->d_qrow), g->N * c->H * l->Dk) & all_finite(c, "d_rows", g->d_rows, g->N * l->R) & all_finite(c, "d_qi", g->d_qi, g->N * c->HI * c->DI) &
           all_finite(c, "d_wi", g->d_wi, g->N * c->HI) & all_finite(c, "d_ki", g->d_ki, l->n_cand * c->DI) & all_finite(c, "row_kl", g->row_kl, g->N);
}

// What the plain kernels need beside a plan for the gathered path: inverse lists of all pairs at once.
static void plain_lists(int64_t pairs) {
    uint32_t **const arrays[] = {&G_.pair_key, &G_.pair_key2, &G_.pair, &G_.pair2};
    for (int i = 0; i < 4; i++) CUDA_CHECK(cudaMalloc(arrays[i], (size_t)pairs * sizeof(uint32_t)));
    CUDA_CHECK(cudaMalloc(&G_.list, (size_t)pairs * sizeof(int2)));
    G_.sort_bytes = 0;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, G_.sort_bytes, G_.pair_key, G_.pair_key2, G_.pair, G_.pair2, (int)pairs, 0, 32, stream));
    CUDA_CHECK(cudaMalloc(&G_.sort_space, G_.sort_bytes));
}
static void plain_lists_free(void) {
    void *const arrays[] = {G_.pair_key, G_.pair_key2, G_.pair, G_.pair2, G_.list, G_.sort_space};
    for (int i = 0; i < 6; i++) CUDA_CHECK(cudaFree(arrays[i]));
}

// The plain kernels on the inputs that are there, both ways; as gpu_core_backward() calls them.
static void core_plain(Layer *l, const char *selection, double flop_forward, double flop_backward) {
    Model *g = &G_.g;
    size_t rows = (size_t)(g->N * l->R) * sizeof(float);
    CUDA_CHECK(cudaMemsetAsync(l->oc, 0xff, (size_t)(g->N * g->c.H * l->Dv) * sizeof(floatX), stream));
    plain_lists(g->N * g->c.topk);
    Time forward = measure(before_pass, [=] { gpu_support_forward(g, l, 0); });
    double error = core_error(g, l);
    int ok = require(error <= LIMIT_OUTPUT, &g->c, "plain kernels, error of oc and lse", error, LIMIT_OUTPUT);
    Time backward = measure(before_pass, [=] {
        CUDA_CHECK(cudaMemsetAsync(g->d_rows, 0, rows, stream));
        delta_kernel<<<blocks_for(g->N * g->c.H * WARP, BLOCK), BLOCK, 0, stream>>>(core_of(g, l), G_.delta, g->d_sink, X(g->d_oc), X(l->oc), l->lse, (int)(g->N * g->c.H));
        gpu_support_backward(g, l, 1);
    });
    if (ok & backward_finite(l)) {
        core_line("forward", "plain", selection, l, forward, flop_forward, error);
        core_line("backward_kl", "plain", selection, l, backward, flop_backward, -1);
    }
    plain_lists_free();
}

// All measurements of a shape with one k and one kind of selection. The device model is open; its memory is handed out again for this k.
static void core_measure(int64_t k, int recent, int plain) {
    Model *g = &G_.g;
    Layer *l = &g->layers[0];
    const char *selection = recent ? "recent" : "random";
    g->c.topk = k;
    g->arena.used = g->arena.peak = 0;
    gpu_plan_walk(&g->arena);
    if (g->arena.peak > G_.bytes) die("k = %lld needs %zu bytes of device memory, %zu were taken", (long long)k, g->arena.peak, G_.bytes);
    const Config *c = &g->c;
    int64_t N = g->N, H = c->H;
    double pairs = pairs_of(c), heads = 2 * pairs * (double)H, kl = 6 * pairs * (double)(c->HI * c->DI), kl_scale = g->kl_scale;
    double flop_forward = heads * (double)(l->Dk + l->Dv), flop_backward = heads * (double)(3 * l->Dk + 2 * l->Dv);
    poison();
    fill_normal(X(l->qrow), N * H * l->Dk, 30, 1);
    fill_normal(X(l->rows), N * l->R, 31, 1);
    fill_normal(X(g->d_oc), N * H * l->Dv, 32, 1.0 / (double)N);
    fill_normal(X(l->q_index), N * c->HI * c->DI, 33, 1);
    fill_normal(X(l->k_index), l->n_cand * c->DI, 34, 1);
    fill_normal(l->w_index, N * c->HI, 35, (double)index_scale(c));
    selection_kernel<<<4096, BLOCK, 0, stream>>>(l->sel, N, k, seed, recent);

    Time forward = measure(before_pass, [=] { gpu_core_forward(g, l); });
    double error = core_error(g, l);
    int good = require(error <= LIMIT_OUTPUT, c, "error of oc and lse", error, LIMIT_OUTPUT) & all_finite(c, "oc", X(l->oc), N * H * l->Dv) & all_finite(c, "lse", l->lse, N * H);
    if (!good) return;
    core_line("forward", path_name(l), selection, l, forward, flop_forward, error);
    g->kl_scale = 0;
    Time backward = measure(before_pass, [=] { gpu_core_backward(g, l); });
    g->kl_scale = kl_scale;
    Time backward_kl = measure(before_pass, [=] { gpu_core_backward(g, l); });
    if (!backward_finite(l)) return;
    core_line("backward", path_name(l), selection, l, backward, flop_backward, -1);
    core_line("backward_kl", path_name(l), selection, l, backward_kl, flop_backward + kl, -1);
    if (plain) core_plain(l, selection, flop_forward, flop_backward + kl);
}

static void run_core(void) {
    const struct { int kv_lora, rope, HI, DI; } shapes[] = {{128, 32, 4, 32}, {256, 32, 8, 64}, {256, 64, 8, 128}, {512, 64, 16, 128}}; // index sizes of the presets small, d12, d24, d48
    const int64_t heads[] = {8, 12, 16, 64}, chosen[] = {512, 1024, 2048}, lengths[] = {16384, 65536};
    const double most_plain = 1.6e11; // operations of a forward pass that the plain kernels are asked for as well
    for (int s = 0; s < 4; s++)
        for (int h = 0; h < 4; h++) {
            char text[512];
            if (only_heads && only_heads != heads[h]) continue;
            snprintf(text, sizeof text, "layers=D num-hidden-layers=1 hidden-size=64 q-lora-rank=64 intermediate-size=64 qk-nope-head-dim=64 v-head-dim=8 "
                     "num-attention-heads=%lld kv-lora-rank=%d qk-rope-head-dim=%d index-n-heads=%d index-head-dim=%d",
                     (long long)heads[h], shapes[s].kv_lora, shapes[s].rope, shapes[s].HI, shapes[s].DI);
            if (!agrees(sizes(NULL, text, 320, 96))) continue;
            for (int t = 0; t < (only_tokens ? 1 : 2); t++) {
                int64_t T = only_tokens ? only_tokens : lengths[t], most = 0;
                Model m;
                for (int k = 0; k < 3; k++) {
                    if (only_topk && only_topk != chosen[k]) continue;
                    Config c = sizes(NULL, text, T, chosen[k]);
                    if (T * chosen[k] >= (int64_t)1 << 31) skip(&c, "the trainer takes less than 2^31 selected rows in all");
                    else most = chosen[k];
                }
                Config c = sizes(NULL, text, T, most);
                c.warmup_dense = T <= 16384; // the dense stage's scratch is what the plain kernels need
                if (!most || !open_model(&m, &c)) continue;
                for (int k = 0; k < 3; k++)
                    for (int recent = 0; recent < 2 && chosen[k] <= most && (!only_topk || only_topk == chosen[k]); recent++) {
                        double flop = 2.0 * (double)(T * chosen[k] * heads[h]) * (2 * shapes[s].kv_lora + shapes[s].rope);
                        core_measure(chosen[k], recent, !recent && T <= 16384 && flop <= most_plain);
                    }
                close_model(&m);
            }
        }
}

// ---- layer

// Inputs of every layer, as random numbers.
static void fill_layers(void) {
    Model *g = &G_.g;
    for (int64_t i = 0; i < g->c.L; i++) {
        fill_normal(X(g->layers[i].x), g->N * g->c.C, 40 + (uint64_t)i, 1);
        fill_normal(X(g->layers[i].xn), g->N * g->c.C, 60 + (uint64_t)i, 1);
    }
}
static int layer_finite(const Layer *l) {
    const Model *g = &G_.g;
    const Config *c = &g->c;
    return all_finite(c, "x2", X(l->x2), g->N * c->C) & all_finite(c, "lse", l->lse, g->N * c->H) & all_finite(c, "dxn", X(g->dxn), g->N * c->C) &
           all_finite(c, "gradients", g->grads, g->n_params) & all_finite(c, "row_kl", g->row_kl, g->N);
}
static void attention_pass(Model *g, Layer *l) {
    gpu_attention_forward(g, l);
    gpu_attention_backward(g, l);
}

static void run_layer(void) {
    const struct { int64_t T, k; double ms, gib, select_ms; } quoted[] = {{2048, 512, 26.6, 2.1, 1.4}, {4096, 1024, 99.2, 8.0, 4.6},
                                                                          {8192, 2048, 392, 31, 15.5}, {16384, 2048, 1546, 122.5, 58.9}};
    const char *text = "layers=D num-hidden-layers=1 hidden-size=2048 q-lora-rank=1536 intermediate-size=64 num-attention-heads=16 kv-lora-rank=512 "
                       "qk-rope-head-dim=64 qk-nope-head-dim=128 v-head-dim=128 index-n-heads=16 index-head-dim=128";
    int known = 0;
    if (!agrees(sizes(NULL, text, 320, 96))) return;
    for (int q = 0; q < 4; q++) known |= only_tokens == quoted[q].T;
    for (int q = 0; q < (only_tokens && !known ? 1 : 4); q++)
        for (int own = 0; own < 2; own++) { // k = 2048, and the k of the quoted run where it is another
            int there = !only_tokens || known;
            int64_t T = there ? quoted[q].T : only_tokens, k = own && there ? quoted[q].k : 2048;
            Model m;
            if ((known && T != only_tokens) || (own && k == 2048) || (only_topk && only_topk != k)) continue;
            Config c = sizes(NULL, text, T, k);
            if (!open_model(&m, &c)) continue;
            Model *g = &G_.g;
            Layer *l = &g->layers[0];
            fill_layers();
            Time whole = measure(before_pass, [=] { attention_pass(g, l); });
            Time select = measure(before_pass, [=] { gpu_select_forward(g, l); });
            Time forward = measure(before_pass, [=] { gpu_core_forward(g, l); });
            Time backward = measure(before_pass, [=] { gpu_core_backward(g, l); });
            double error = core_error(g, l), core = select.ms + forward.ms + backward.ms;
            if (require(error <= LIMIT_OUTPUT, &c, "error of oc and lse", error, LIMIT_OUTPUT) & layer_finite(l)) {
                line_begin("layer");
                put_sizes(&c);
                put_text("path", path_name(l));
                put_time("whole_", whole);
                put_time("select_", select);
                put_time("core_forward_", forward);
                put_time("core_backward_", backward);
                put("core_ms", core);
                put("rest_ms", whole.ms - core);
                put("plan_gib", (double)G_.bytes / 1073741824.0);
                put("error", error);
                if (there) {
                    put_count("quoted_k", quoted[q].k);
                    put("quoted_core_ms", quoted[q].ms);
                    put("quoted_select_ms", quoted[q].select_ms);
                    put("quoted_peak_gib", quoted[q].gib);
                }
                line_end();
            }
            close_model(&m);
        }
}

// ---- crossover

static void run_crossover(void) {
    const char *const presets[] = {"d12", "d24"}, *const text = "layers=DF num-hidden-layers=2";
    const char *const names[2][3] = {{"d_forward_", "d_backward_", "d_block_"}, {"f_forward_", "f_backward_", "f_block_"}};
    const int64_t lengths[] = {2048, 4096, 8192, 16384, 32768};
    for (int p = 0; p < 2; p++) {
        if (!agrees(sizes(presets[p], text, 320, 96))) continue;
        for (int t = 0; t < (only_tokens ? 1 : 5); t++) {
            Config c = sizes(presets[p], text, only_tokens ? only_tokens : lengths[t], only_topk ? only_topk : 1024);
            Model m;
            Time times[2][3];
            int good = 1;
            if (!open_model(&m, &c)) continue;
            Model *g = &G_.g;
            fill_layers();
            for (int x = 0; x < 2; x++) {
                Layer *l = &g->layers[x];
                times[x][0] = measure(before_pass, [=] { gpu_attention_forward(g, l); });
                times[x][1] = measure(before_pass, [=] { gpu_attention_backward(g, l); });
                good &= layer_finite(l);
                times[x][2] = measure(before_pass, [=] {
                    gpu_block_forward(g, l, X(g->y));
                    gpu_block_backward(g, l);
                });
                good &= layer_finite(l) & all_finite(&c, "block output", X(g->y), g->N * c.C) & all_finite(&c, "dx", X(g->dx), g->N * c.C);
            }
            if (good) {
                line_begin("crossover");
                put_text("preset", presets[p]);
                put_sizes(&c);
                put_text("d_path", path_name(&g->layers[0]));
                put_text("f_path", path_name(&g->layers[1]));
                for (int x = 0; x < 2; x++)
                    for (int i = 0; i < 3; i++) put_time(names[x][i], times[x][i]);
                put("d_ms", times[0][0].ms + times[0][1].ms);
                put("f_ms", times[1][0].ms + times[1][1].ms);
                put("ratio", (times[0][0].ms + times[0][1].ms) / (times[1][0].ms + times[1][1].ms));
                put("block_ratio", times[0][2].ms / times[1][2].ms);
                line_end();
            }
            close_model(&m);
        }
    }
}

int main(int argc, char **argv) {
    const struct { const char *name; void (*run)(void); } modes[] = {{"core", run_core}, {"layer", run_layer}, {"crossover", run_crossover}};
    const struct { const char *name; int64_t *value; } options[] = {{"--tokens", &only_tokens}, {"--heads", &only_heads}, {"--topk", &only_topk}};
    const char *usage = "expected: bench_attention core|layer|crossover [seed] [--tokens N] [--heads N] [--topk N]";
    struct timespec ts;
    char *end;
    void (*run)(void) = NULL;
    clock_gettime(CLOCK_REALTIME, &ts);
    seed = (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
    for (int i = 0; i < 3 && argc > 1; i++)
        if (!strcmp(argv[1], modes[i].name)) run = modes[i].run;
    if (!run) die("%s, got %s", usage, argc > 1 ? argv[1] : "nothing");
    mode = argv[1];
    for (int i = 2; i < argc; i++) {
        int64_t *value = NULL;
        for (int o = 0; o < 3; o++)
            if (!strcmp(argv[i], options[o].name)) value = options[o].value;
        if (!value && (i != 2 || argv[i][0] < '0' || argv[i][0] > '9')) die("%s, got %s", usage, argv[i]);
        if (value && ++i == argc) die("%s: %s needs a number", usage, argv[i - 1]);
        unsigned long long x = strtoull(argv[i], &end, 10);
        if (*end || (value && (x < 1 || x > 1 << 20))) die("%s: %s takes a whole number%s, got %s", usage, value ? argv[i - 1] : "seed", value ? " from 1 to 1048576" : "", argv[i]);
        if (value) *value = (int64_t)x;
        else seed = (uint64_t)x;
    }
    machine_line();
    run();
    if (lines == 1) die("%s: %s has no shape with these sizes", usage, mode);
    if (failures) fprintf(stderr, "bench_attention: %d checks failed (seed %llu)\n", failures, (unsigned long long)seed);
    return failures ? 1 : 0;
}
