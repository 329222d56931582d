// The CUDA trainer against the CPU reference: the whole step (losses, layer outputs, selections, every gradient) for every
// layer letter over awkward sizes, both stages, with documents and targets left out; twenty training steps; determinism;
// recomputation. Before that every kernel by itself: dev/test/kernels.h. Includes train_gpt_sparse.cu. Fresh random inputs
// every run, seed printed (or given as argv[1]).
#define TESTING
#include "train_gpt_sparse.cu"
#include "dev/test/check.h"

static Engine cpu_engine, gpu_engine_;
static uint64_t seed, draws;
static int64_t draw(int64_t n) { return (int64_t)(rng_u64(seed, 77, draws++) % (uint64_t)n); }

// A small configuration with sizes that divide nothing.
static int sizes; // 0: they divide nothing; 1, 2: those that the tensor-core kernels have, 2 with more than 16 heads
static Config small_config(const char *layers, int64_t T, int64_t B, int64_t k, const char *type) {
    Config c;
    config_defaults(&c);
    strcpy(c.layers, layers);
    strcpy(c.model_type, type);
    c.L = (int64_t)strlen(layers);
    c.C = 40; c.H = 6; c.q_lora = 28; c.kv_lora = 36; c.nope = 12; c.rope = 8; c.v_dim = 20; c.F = 56; c.HI = 3; c.DI = 24; c.V = 97;
    c.head_dim = 24; c.kv_heads = 2; c.window = 7; c.csa_ratio = 4; c.hca_ratio = 8; c.qsa_ratio = 4; c.o_groups = 2; c.o_lora = 20;
    if (sizes) { c.C = 64; c.q_lora = 32; c.kv_lora = 64; c.nope = 16; c.rope = 16; c.v_dim = 24; c.DI = 32; c.HI = 6; c.head_dim = 64; c.window = 70; c.o_lora = 24; }
    if (sizes == 2) { c.H = 20; c.kv_lora = 256; c.rope = 32; c.DI = 64; c.HI = 12; c.nope = c.v_dim = 64; c.head_dim = 128; c.kv_heads = 1; }
    c.topk = k; c.T = T; c.B = B; c.steps = 20; c.warmup = 2; c.lr = 1e-3;
    c.seed = (int64_t)(seed % 1000003);
    config_check(&c);
    return c;
}

// A host model with buffers, parameters large enough that selection and softmax are not trivial, random tokens with
// documents, one target in nine left out.
static void small_model(Model *m, const Config *c) {
    model_build(m, c);
    m->eot = 5;
    model_init_params(m, 1);
    for (int i = 0; i < m->n_tensors; i++)
        for (int64_t j = 0; j < m->tensors[i].saved_rows * m->tensors[i].cols; j++)
            param(m, i)[j] = (float)(m->tensors[i].init < 0 ? 0.5 + rng_uniform(seed, 100 + (uint64_t)i, (uint64_t)j) : 0.15 * rng_normal(seed, 100 + (uint64_t)i, (uint64_t)j));
    for (int64_t i = 0; i < m->n_params; i++) m->params[i] = (float)(floatX)m->params[i]; // both sides start from the same matrices
    activations_plan(m, c->B, c->T, 1, 0);
    for (int64_t i = 0; i < m->N; i++) {
        m->tokens[i] = (int32_t)(draw(40) == 0 ? m->eot : draw(c->V));
        m->targets[i] = (int32_t)(draw(9) == 0 ? -1 : draw(c->V));
    }
    m->learning = 1;
    m->loss_scale = 1.0 / (double)m->N;
    m->kl_scale = c->kl_coef / (double)m->N;
}

static void whole_step(const char *layers, int64_t T, int64_t B, int64_t k, int dense, const char *type) {
    Config c = small_config(layers, T, B, k, type);
    Model m;
    c.warmup_dense = dense;
    small_model(&m, &c);
    m.dense = dense;
    gpu_open(&m, B, T);
    CUDA_CHECK(cudaMemset(G_.probs, 0xff, (size_t)G_.space * sizeof(float))); // NaN where nothing is written
    CUDA_CHECK(cudaMemset(G_.ds, 0xff, (size_t)G_.space * sizeof(float)));
    Verdict v = gpu_compare(&m, 0);
    check(verdict_good(&v), "%-8s T=%-4lld B=%lld k=%-3lld %s %-12s loss %.1e KL %.1e out %.1e index %.1e grad %.1e (%s) cosine %.6f; %lld/%lld differ, %lld unexplained", layers, (long long)T, (long long)B,
          (long long)k, dense ? "dense" : "     ", type, v.loss, v.kl, v.output, v.index, v.grad, v.worst, v.cosine, (long long)v.differ, (long long)v.chosen, (long long)v.unexplained);
    gpu_close();
    model_free(&m);
}

// Steps of AdamW on both sides from the same start, each choosing for itself; returns the device's parameters' checksum.
// The third pass on is replayed from a CUDA graph. Rounding may swap a candidate, after which the two sides drift apart a little.
static uint64_t some_steps(const char *layers, int64_t steps, int compare, const char *recompute, const char *store, int offload) {
    Config c = small_config(layers, 130, 2, 9, "deepseek_v32");
    Model m, h;
    strcpy(c.recompute, recompute);
    strcpy(c.replay_store, store);
    c.replay_offload = offload;
    c.warmup_dense = steps / 4;
    small_model(&m, &c);
    small_model(&h, &c); // the tokens are drawn again, but both sides get m's
    memcpy(h.params, m.params, (size_t)m.n_params * sizeof(float));
    gpu_open(&m, 2, 130);
    double worst = 0, norm[2];
    int64_t scans = 0, passes = 0;
    for (int64_t s = 0; s < steps; s++) {
        double loss[2] = {0, 0};
        for (int side = 0; side <= compare; side++) {
            Model *x = side ? &h : &m;
            Stats stats;
            if (side) { memcpy(h.tokens, m.tokens, (size_t)m.N * 4); memcpy(h.targets, m.targets, (size_t)m.N * 4); }
            engine = side ? cpu_engine : gpu_engine_;
            x->dense = s < c.warmup_dense;
            engine.zero_grads(x);
            engine.forward(x);
            scans = x->index_scans;
            engine.backward(x);
            engine.count(x);
            if (!side && !strcmp(recompute, "block")) passes += x->index_scans == scans;
            check(engine.update(x, s + 1, 1e-3, &stats, norm), "%s step %lld: finite", layers, (long long)s);
            loss[side] = stats.loss / (double)x->N;
        }
        if (compare && fabs(loss[0] - loss[1]) > worst) worst = fabs(loss[0] - loss[1]);
    }
    if (!strcmp(recompute, "block")) check(passes == steps, "%s: recomputation adds no index scan in %lld of %lld steps", layers, (long long)passes, (long long)steps);
    if (compare) check(worst < (sizeof(floatX) == 4 ? 1e-2 : 1e-1), "%s: %lld steps follow the reference's loss: largest difference %.1e", layers, (long long)steps, worst);
    engine = gpu_engine_;
    gpu_to_host(&m);
    uint64_t hash = 0;
    for (int64_t i = 0; i < m.n_params; i++) {
        uint32_t bits;
        memcpy(&bits, &m.params[i], 4);
        hash = rng_mix(hash ^ bits);
    }
    gpu_close();
    model_free(&m);
    model_free(&h);
    return hash;
}

// Incremental logits of a row, token by token after a first pass, against one pass over all of it: the reference's in
// float32; in bf16, where the reference may choose other candidates, the device's own.
static void generation(const char *layers) {
    Config c = small_config(layers, 64, 1, 5, "deepseek_v32");
    Model m, g;
    memset(c.prompt, 'x', 20);
    c.prompt[20] = 0;
    c.sample_tokens = 30;
    c.sample_every = 1;
    small_model(&m, &c);
    int64_t V = c.V, Vp = m.Vp, n = 40, first = 1 + draw(19), good = 0;
    float *all;
    m.learning = 0;
    m.all_logits = (real *)xalloc((size_t)(m.N * V) * sizeof(real));
    model_forward(&m);
    gpu_open(&m, 1, 64);
    gpu_forward(&m);
    all = gpu_read(X(G_.g.logits), m.N * Vp);
    gpu_row_open(&g, &m, n);
    memcpy(g.tokens, m.tokens, (size_t)n * sizeof(int32_t));
    g.nr = first;
    for (int64_t i = first; i < n; i++) {
        real *logits = gpu_row_logits(&g);
        double worst = 0, size = 0;
        for (int64_t v = 0; v < V; v++) {
            double want = (double)(sizeof(floatX) == 4 ? m.all_logits[(i - 1) * V + v] : all[(i - 1) * Vp + v]);
            worst = fmax(worst, fabs((double)logits[v] - want));
            size = fmax(size, fabs(want));
        }
        good += worst < (sizeof(floatX) == 4 ? 1e-4 : 0.05) * size;
        g.r0 = i;
        g.nr = 1;
    }
    check(good >= (sizeof(floatX) == 4 ? n - first : (n - first) * 8 / 10), "%s: incremental logits agree with one pass for %lld of %lld tokens", layers, (long long)good, (long long)(n - first));
    gpu_row_close(&g);
    gpu_close();
    free(all);
    free(m.all_logits);
    model_free(&m);
}

// The options that gpu_nearest_fit() names, set in a configuration, need the bytes that it says, and these fit.
static void nearest_fit(const char *layers) {
    Config c = small_config(layers, 128, 4, 9, "deepseek_v32");
    Model m;
    char text[256], set[256], *save = NULL;
    size_t all, left, bytes;
    c.sample_every = 0;
    small_model(&m, &c);
    Arena host = m.arena;
    gpu_plan(&m);
    all = m.arena.peak;
    for (int i = 0; i < 8; i++) {
        left = i ? LT_WORKSPACE + (size_t)draw((int64_t)(all - LT_WORKSPACE)) : all - 1;
        bytes = gpu_nearest_fit(&m, 4, 128, left, text);
        if (!bytes) {
            m.c.B = 1; m.c.T = 2;
            strcpy(m.c.recompute, "block");
            strcpy(m.c.replay_store, "ef");
            m.c.replay_offload = 1;
            gpu_plan(&m);
            check(m.arena.peak > left, "%s: %zu bytes are too few for any run", layers, left);
        } else {
            m.c = c;
            strcpy(set, text);
            for (char *name = strtok_r(set, " ", &save); name; name = strtok_r(NULL, " ", &save)) config_set(&m.c, name + 2, strtok_r(NULL, " ", &save), "test");
            gpu_plan(&m);
            check(m.arena.peak == bytes && bytes <= left, "%s: %zu bytes are left, and a run with%s needs %zu", layers, left, text, bytes);
        }
        m.c = c;
    }
    m.arena = host;
    model_free(&m);
}

#include "dev/test/kernels.h"

int main(int argc, char **argv) {
    seed = check_seed(argc, argv);
    int small = argc > 2 && !strcmp(argv[2], "small"); // the grid for compute-sanitizer
    const char *patterns[] = {"D", "F", "DS", "W", "C", "H", "Q", "DSFWCHSQ"}, *stores[] = {"int32", "u16", "ef", "u16", "ef"}; // the second S reads what C has taken the place of
    int64_t lengths[] = {1, 63, 65, 127, 130, 257};
    gpu_report();
    cpu_engine = engine;
    gpu_engine();
    gpu_engine_ = engine;
    test_kernels(small);
    nearest_fit("DS");
    nearest_fit("WCHQF");
    for (sizes = 0; sizes < 3; sizes++)
        for (int p = 0; p < 8; p++) {
            for (int t = 0; t < 6; t++) {
                int64_t B = 1 + draw(3);
                if (small && (t != 2 || p == 7)) continue; // one length, each letter once
                whole_step(patterns[p], lengths[t], B, 1 + draw(sizes ? 100 : 12), 0, draw(2) ? "deepseek_v32" : "glm_moe_dsa");
                if (t % 2 || small) whole_step(patterns[p], lengths[t], B, 1 + draw(12), 1, "deepseek_v32");
            }
            if (!small || p == 7) generation(patterns[p]);
        }
    for (sizes = 0; sizes < 2 && !small; sizes++) {
        whole_step("DCQ", 1025, 1, 300, 0, "deepseek_v32"); // several compactions of the candidate buffer
        for (int p = 0; p < 8; p++) {
            if (sizes == 0) some_steps(patterns[p], 20, 1, "none", "u16", 0);
            uint64_t again = draws; // the same inputs each time
            uint64_t a = some_steps(patterns[p], 50, 0, "none", "u16", 0);
            draws = again;
            uint64_t b = some_steps(patterns[p], 50, 0, "none", "u16", 0);
            check(a == b, "%s: two runs of 50 steps give identical parameters (%016llx)", patterns[p], (unsigned long long)a);
            for (int r = 0; r < 5; r++) {
                draws = again;
                check(a == some_steps(patterns[p], 50, 0, "block", stores[r], r > 2), "%s: recomputation with replay from %s%s gives identical parameters", patterns[p], stores[r], r > 2 ? " on the host" : "");
            }
        }
    }
    return check_summary();
}
