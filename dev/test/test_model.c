// Tests of the trainer's parts and of the properties it promises: matrix product and layers against plain double loops,
// what a query can and cannot see, equal bits whatever the threads, the batch, the recomputation or a restart,
// optimizer, data order, checkpoints, generation, and the published faults of sparse attention (hot keys, empty rows).
// Usage, from the repository root: test_model [SEED]
#define NO_MAIN
#include "../../train_cpu.c"
#include "model.h"

// ---- inputs and comparisons

static char folder[256]; // temporary, removed at the end

static double rnd(void) { return 2 * rng_uniform(seed, 98, drawn++) - 1; } // in (-1, 1)
static int64_t ri(int64_t lo, int64_t hi) { return lo + (int64_t)(rng_u64(seed, 99, drawn++) % (uint64_t)(hi - lo + 1)); }
static void fill(real *p, int64_t n, double scale) { for (int64_t i = 0; i < n; i++) p[i] = (real)(scale * rnd()); }
static int same(const void *a, const void *b, int64_t n, size_t size) { return !memcmp(a, b, (size_t)n * size); }
static void *copy_of(const void *p, int64_t n, size_t size) { return memcpy(xalloc((size_t)n * size), p, (size_t)n * size); }

// Norm-wise relative difference; infinite where one is not finite, so that every "< tolerance" fails.
static double relative(const real *a, const real *want, int64_t n) {
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - (double)want[i]) * ((double)a[i] - (double)want[i]);
        s += (double)want[i] * (double)want[i];
    }
    return isfinite(d) && isfinite(s) ? s > 0 ? sqrt(d / s) : sqrt(d) : INFINITY;
}
static double relative_d(const real *a, const double *want, int64_t n) { // the same against doubles
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)a[i] - want[i]) * ((double)a[i] - want[i]);
        s += want[i] * want[i];
    }
    return isfinite(d) && isfinite(s) ? s > 0 ? sqrt(d / s) : sqrt(d) : INFINITY;
}

// ---- small models

// A configuration with random odd sizes: nothing is a multiple of a vector or of a tile but by chance.
static Config config(const char *layers, int64_t L, int64_t B, int64_t T, int64_t k) {
    Config c;
    config_defaults(&c);
    strcpy(c.layers, layers);
    strcpy(c.model_type, ri(0, 1) ? "glm_moe_dsa" : "deepseek_v32");
    strcpy(c.rope_type, ri(0, 1) ? "yarn" : "default");
    c.rope_original = 64;
    c.L = L; c.B = B; c.T = T; c.topk = k;
    c.C = ri(9, 40); c.H = ri(1, 6); c.q_lora = ri(5, 24); c.kv_lora = ri(5, 24);
    c.nope = ri(1, 9); c.rope = 2 * ri(1, 4); c.v_dim = ri(1, 9); c.F = ri(5, 50);
    c.HI = ri(1, 5); c.DI = c.rope + ri(0, 9); c.V = ri(COPY_SYMBOLS, 90);
    c.seed = ri(0, 1000000);
    c.probe = 0;
    config_check(&c);
    return c;
}

// Buffers for B rows of T, poisoned: whatever is read before it was written is NaN (or an index of -1).
static void replan(Model *m, int64_t B, int64_t T, int training) {
    activations_plan(m, B, T, training, 0);
    memset(m->arena.base, 0xff, m->arena.peak);
    rope_tables(&m->c, T, m->cos_sin);
    free(m->all_logits);
    m->all_logits = (real *)xalloc((size_t)(m->N * m->c.V) * sizeof(real));
}

// A model whose parameters are large enough that attention is far from uniform and no norm is trivial.
static void make(Model *m, const Config *c, int training) {
    model_build(m, c);
    model_init_params(m, 1);
    m->select_seed = (uint64_t)c->seed;
    for (int i = 0; i < m->n_tensors; i++) {
        const Tensor *t = &m->tensors[i];
        for (int64_t j = 0; j < t->saved_rows * t->cols; j++)
            param(m, i)[j] = (real)(t->ndim == 2 ? rnd() * (i == m->embed ? 1 : 2 / sqrt((double)t->cols)) : t->init + 1.0 * (t->init < 0 ? 2 : 0) + 0.3 * rnd());
    }
    replan(m, c->B, c->T, training);
}
static void done(Model *m) { free(m->all_logits); model_free(m); }

// Tensors of the same name get the same values.
static void copy_params(Model *to, const Model *from) {
    for (int i = 0; i < to->n_tensors; i++)
        for (int j = 0; j < from->n_tensors; j++)
            if (!strcmp(to->tensors[i].name, from->tensors[j].name)) memcpy(param(to, i), param(from, j), (size_t)to->tensors[i].size * sizeof(real));
}

static void random_tokens(int32_t *x, int64_t n, int64_t V) { for (int64_t i = 0; i < n; i++) x[i] = (int32_t)ri(0, V - 1); }

// Forward over all rows, and backward when learning; targets NULL: none. Logits and gradients are poisoned or cleared.
static double run(Model *m, const int32_t *tokens, const int32_t *targets, int learning) {
    double loss = 0;
    memcpy(m->tokens, tokens, (size_t)m->N * sizeof *tokens);
    if (targets) memcpy(m->targets, targets, (size_t)m->N * sizeof *targets);
    else memset(m->targets, 0xff, (size_t)m->N * sizeof *m->targets);
    memset(m->all_logits, 0xff, (size_t)(m->N * m->c.V) * sizeof(real));
    m->learning = learning;
    m->r0 = 0;
    m->nr = m->N;
    m->loss_scale = m->kl_scale = 1.0 / (double)m->N;
    model_forward(m);
    if (learning) {
        memset(m->grads, 0, (size_t)m->n_params * sizeof(real));
        model_backward(m);
    }
    for (int64_t i = 0; i < m->N; i++) loss += (double)m->row_loss[i];
    return loss;
}

static real *logits_at(const Model *m, int64_t i) { return m->all_logits + i * m->c.V; }
static int same_logits(const Model *a, int64_t i, const Model *b, int64_t j, int64_t n) { return same(logits_at(a, i), logits_at(b, j), n * a->c.V, sizeof(real)); }

// ---- primitives

// One element as the header comment of the matrix product promises it: a single chain over k, fused or not.
static real chain(real c, const real *a, int64_t aks, const real *b, int64_t bks, int64_t K, int fused) {
    for (int64_t k = 0; k < K; k++) {
        if (fused) c = sizeof(real) == 4 ? (real)fmaf((float)a[k * aks], (float)b[k * bks], (float)c) : (real)fma((double)a[k * aks], (double)b[k * bks], (double)c);
        else {
            volatile real product = a[k * aks] * b[k * bks]; // volatile: the compiler would fuse it
            c += product;
        }
    }
    return c;
}

static void test_matmul(void) {
    int64_t wrong = 0, elements = 0, gaps = 0, broken[2] = {0, 0}, blocks = 0, thread_bits = 0;
    double u = sizeof(real) == 4 ? 0x1p-24 : 0x1p-53;
    for (int trial = 0; trial < 40; trial++) {
        int64_t M = ri(1, 300), N = ri(1, 300), K = ri(1, 300);
        int ta = trial & 1, tb = trial >> 1 & 1, add = (int)ri(0, 1), shape = trial / 4; // every form meets every special shape
        if (shape == 0) { M = MC + ri(1, 90); N = ri(1, 70); K = ri(1, 40); }
        if (shape == 1) { M = ri(1, 40); N = NC + ri(1, 90); K = KC + ri(1, 100); }
        if (shape == 2) { M = ri(1, 60); N = ri(1, 60); K = ri(2 * KC, 1100); }
        if (shape == 3) { M = ri(1, 2); N = ri(1, 2); K = ri(1, 3); }
        if (shape == 4) { M = TILE_M * ri(1, 2); N = TILE_N * ri(1, 2); K = KC; }
        if (shape == 5) { M = ri(1, 300); N = ri(1, 16); K = KC + 1; }
        int64_t lda = (ta ? M : K) + ri(0, 5), ldb = (tb ? K : N) + ri(0, 5), ldc = N + ri(0, 5);
        int64_t ars = ta ? 1 : lda, aks = ta ? lda : 1, bks = tb ? 1 : ldb, bcs = tb ? ldb : 1;
        real *a = (real *)xalloc((size_t)((ta ? K : M) * lda) * sizeof(real)), *b = (real *)xalloc((size_t)((tb ? N : K) * ldb) * sizeof(real));
        real *before = (real *)xalloc((size_t)(M * ldc) * sizeof(real));
        fill(a, (ta ? K : M) * lda, 1);
        fill(b, (tb ? N : K) * ldb, 1);
        fill(before, M * ldc, 1);
        if (!add) for (int64_t i = 0; i < M; i++) memset(before + i * ldc, 0xff, (size_t)N * sizeof(real)); // NaN must not survive
        real *c = (real *)copy_of(before, M * ldc, sizeof(real));
        threads(1);
        matmul_own(c, ldc, a, ars, aks, b, bks, bcs, M, N, K, add);
        int64_t bad = 0;
        for (int64_t i = 0; i < M; i++) {
            for (int64_t j = 0; j < N; j++) {
                double want = add ? (double)before[i * ldc + j] : 0, size = fabs(want);
                for (int64_t k = 0; k < K; k++) {
                    double p = (double)a[i * ars + k * aks] * (double)b[k * bks + j * bcs];
                    want += p;
                    size += fabs(p);
                }
                wrong += !(fabs((double)c[i * ldc + j] - want) <= (double)(K + 2) * u * size + 1e-15 * size);
                bad += c[i * ldc + j] != chain(add ? before[i * ldc + j] : 0, a + i * ars, aks, b + j * bcs, bks, K, 1);
            }
            gaps += !same(c + i * ldc + N, before + i * ldc + N, ldc - N, sizeof(real));
        }
        broken[1] += bad;
        if (bad)
            for (int64_t i = 0; i < M; i++)
                for (int64_t j = 0; j < N; j++) broken[0] += c[i * ldc + j] != chain(add ? before[i * ldc + j] : 0, a + i * ars, aks, b + j * bcs, bks, K, 0);
        elements += M * N;
        for (int n = 2; n <= 3; n++) {
            real *d = (real *)copy_of(before, M * ldc, sizeof(real));
            threads(n);
            matmul_own(d, ldc, a, ars, aks, b, bks, bcs, M, N, K, add);
            thread_bits += !same(c, d, M * ldc, sizeof(real));
            free(d);
        }
        for (int r = 0; r < 4; r++) { // a block of the result alone
            int64_t i0 = ri(0, M - 1), j0 = ri(0, N - 1), h = ri(1, M - i0), w = ri(1, N - j0);
            real *d = (real *)xalloc((size_t)(h * w) * sizeof(real));
            for (int64_t i = 0; i < h; i++) memcpy(d + i * w, before + (i0 + i) * ldc + j0, (size_t)w * sizeof(real));
            matmul_own(d, w, a + i0 * ars, ars, aks, b + j0 * bcs, bks, bcs, h, w, K, add);
            for (int64_t i = 0; i < h; i++) blocks += !same(d + i * w, c + (i0 + i) * ldc + j0, w, sizeof(real));
            free(d);
        }
        free(a); free(b); free(c); free(before);
    }
    check(wrong == 0, "matrix product: %lld of %lld elements beyond the bound, all stride forms", (long long)wrong, (long long)elements);
    check(gaps == 0, "matrix product: %lld rows written beyond their end", (long long)gaps);
    check(broken[1] == 0 || broken[0] == 0, "matrix product: every element is one chain over k (%lld fused, %lld unfused differ)", (long long)broken[1], (long long)broken[0]);
    check(blocks == 0, "matrix product: a block alone has the bits it has in the whole: %lld rows differ", (long long)blocks);
    check(thread_bits == 0, "matrix product: 1, 2, 3 threads give equal bits: %lld differ", (long long)thread_bits);
}

static void test_exp(void) {
    double worst = 0, at = 0;
    for (int i = 0; i < 1000000; i++) {
        real x = (real)(i % 2 ? 87 * rnd() : rnd());
        double e = fabs((double)exp_real(x) / exp((double)x) - 1);
        if (!(e <= worst)) { worst = e; at = (double)x; }
    }
    check(worst < 3e-7, "exp_real: relative error %.2e at %g", worst, at);
    check(exp_real(0) == 1 && exp_real(-100) < 1e-43 && exp_real((real)-INFINITY) == 0 && (sizeof(real) == 8 || exp_real(-100) == 0), "exp_real: 0, -100, -inf");
    check(exp_real((real)NAN) != exp_real((real)NAN) && exp_real((real)INFINITY) > 1e38 && exp_real(1000) > 1e38, "exp_real: NaN stays NaN, +inf and 1000 are large");
}

static void test_norms(void) {
    double worst_rms = 0, worst_layer = 0, worst_swiglu = 0, worst_stat = 0;
    int gaps = 0;
    for (int trial = 0; trial < 30; trial++) {
        int64_t n = ri(1, 40), d = trial < 4 ? trial + 1 : ri(1, 300), ldx = d + ri(0, 5), ldy = d + ri(0, 5);
        double eps = ri(0, 1) ? 1e-6 : 1e-2, offset = 3 * rnd();
        real *x = (real *)xalloc((size_t)(n * ldx) * sizeof(real)), *y = (real *)xalloc((size_t)(n * ldy) * sizeof(real)), *w = (real *)xalloc((size_t)d * sizeof(real));
        real *b = (real *)xalloc((size_t)d * sizeof(real)), *rstd = (real *)xalloc((size_t)n * sizeof(real)), *mean = (real *)xalloc((size_t)n * sizeof(real));
        double *want = (double *)xalloc((size_t)(n * ldx) * sizeof(double));
        fill(x, n * ldx, 2);
        fill(w, d, 2);
        fill(b, d, 1);
        for (int64_t i = 0; i < n * ldx; i++) x[i] += (real)offset;
        memset(y, 0xff, (size_t)(n * ldy) * sizeof(real));
        real plus = (real)(trial % 2); // weights stored as they are, or as their distance from 1; every fifth time none
        const real *weights = trial % 5 ? w : NULL;
        rmsnorm_forward(y, ldy, rstd, x, ldx, weights, plus, n, d, eps);
        for (int64_t i = 0; i < n; i++) {
            double s = 0;
            for (int64_t j = 0; j < d; j++) s += (double)x[i * ldx + j] * (double)x[i * ldx + j];
            s = 1 / sqrt(s / (double)d + eps);
            worst_stat = fmax(worst_stat, fabs((double)rstd[i] / s - 1));
            for (int64_t j = 0; j < d; j++) want[j] = (double)x[i * ldx + j] * s * (weights ? (double)plus + (double)w[j] : 1);
            worst_rms = fmax(worst_rms, relative_d(y + i * ldy, want, d));
            for (int64_t j = d; j < ldy; j++) gaps += y[i * ldy + j] == y[i * ldy + j]; // still NaN
        }
        memset(y, 0xff, (size_t)(n * ldy) * sizeof(real));
        layernorm_forward(y, mean, rstd, x, w, b, n, d, eps); // rows without gaps
        for (int64_t i = 0; i < n; i++) {
            double mu = 0, var = 0;
            for (int64_t j = 0; j < d; j++) mu += (double)x[i * d + j] / (double)d;
            for (int64_t j = 0; j < d; j++) var += ((double)x[i * d + j] - mu) * ((double)x[i * d + j] - mu) / (double)d;
            for (int64_t j = 0; j < d; j++) want[j] = ((double)x[i * d + j] - mu) / sqrt(var + eps) * (double)w[j] + (double)b[j];
            for (int64_t j = 0; j < d; j++) // rounding of the mean is divided by the deviation, which may be small
                worst_layer = fmax(worst_layer, fabs((double)y[i * d + j] - want[j]) / (1 + fabs(want[j]) + (1 + fabs(mu)) * fabs((double)w[j]) / sqrt(var + eps)));
            worst_stat = fmax(worst_stat, fabs((double)mean[i] - mu));
        }
        real *g = (real *)copy_of(x, n * ldx, sizeof(real)), *act = (real *)xalloc((size_t)(n * ldx) * sizeof(real));
        for (int64_t i = 0; i < n * ldx; i++) {
            g[i] *= i % 7 ? 1 : 30; // saturated both ways
            want[i] = (double)g[i] / (1 + exp(-(double)g[i])) * (double)x[i];
        }
        swiglu_forward(act, g, x, n * ldx);
        worst_swiglu = fmax(worst_swiglu, relative_d(act, want, n * ldx));
        free(x); free(y); free(w); free(b); free(rstd); free(mean); free(want); free(g); free(act);
    }
    check(worst_rms < 1e-6 && !gaps, "rmsnorm_forward: relative error %.2e, nothing written between rows", worst_rms);
    check(worst_layer < 3e-6, "layernorm_forward: relative error %.2e", worst_layer);
    check(worst_stat < 1e-5, "norms: kept statistics, error %.2e", worst_stat);
    check(worst_swiglu < 1e-6, "swiglu_forward: relative error %.2e", worst_swiglu);
}

// Inverse frequencies and factor on cos and sin as in Hugging Face's _compute_yarn_parameters, written from its text.
static double mscale_of(double scale, double mscale) { return scale <= 1 ? 1 : 0.1 * mscale * log(scale) + 1; }
static double correction_dim(double rotations, double dim, double base, double original) { return dim * log(original / (rotations * 2 * M_PI)) / (2 * log(base)); }
static double yarn_reference(const Config *c, double *inv) {
    double dim = (double)c->rope, f = c->rope_factor, base = c->rope_theta;
    double low = fmax(floor(correction_dim(c->rope_beta_fast, dim, base, (double)c->rope_original)), 0);
    double high = fmin(ceil(correction_dim(c->rope_beta_slow, dim, base, (double)c->rope_original)), dim - 1);
    if (low == high) high += 0.001;
    for (int64_t j = 0; j < c->rope / 2; j++) {
        double pos = pow(base, 2 * (double)j / dim), ramp = fmin(fmax(((double)j - low) / (high - low), 0), 1), keep = 1 - ramp;
        inv[j] = 1 / (f * pos) * (1 - keep) + 1 / pos * keep;
    }
    return c->rope_mscale != 0 && c->rope_mscale_all != 0 ? mscale_of(f, c->rope_mscale) / mscale_of(f, c->rope_mscale_all) : mscale_of(f, 1);
}

static void test_rope(void) {
    double worst[2] = {0, 0}, rotate = 0, inverse = 0, scale = 0;
    for (int trial = 0; trial < 40; trial++) {
        Config c = config("D", 1, 1, 8, 4);
        int yarn = trial & 1;
        double inv[64], factor = 1;
        int64_t T = ri(1, 300);
        strcpy(c.rope_type, yarn ? "yarn" : "default");
        c.rope = 2 * ri(1, 64);
        c.rope_theta = ri(0, 1) ? 10000 : (double)ri(100, 2000000);
        c.rope_factor = trial % 5 ? (double)ri(2, 64) : 1;
        c.rope_original = 16 << ri(0, 10);
        c.rope_mscale = trial % 3 ? 1 : trial % 2 ? 0 : 0.707;
        c.rope_mscale_all = trial % 4 ? 1 : ri(0, 1) ? 0 : 0.5;
        c.rope_beta_fast = (double)ri(8, 40);
        for (int64_t j = 0; j < c.rope / 2; j++) inv[j] = pow(c.rope_theta, -2 * (double)j / (double)c.rope);
        if (yarn) factor = yarn_reference(&c, inv);
        real *table = (real *)xalloc((size_t)(T * c.rope) * sizeof(real));
        memset(table, 0xff, (size_t)(T * c.rope) * sizeof(real));
        rope_table(&c, ROPE_MLA, T, table);
        for (int64_t t = 0; t < T; t++) {
            for (int64_t j = 0; j < c.rope / 2; j++) {
                const real *z = table + (t * c.rope / 2 + j) * 2;
                double e = fmax(fabs((double)z[0] - factor * cos((double)t * inv[j])), fabs((double)z[1] - factor * sin((double)t * inv[j])));
                worst[yarn] = e <= worst[yarn] ? worst[yarn] : e;
            }
        }
        int64_t half = c.rope / 2, t = ri(0, T - 1);
        for (int layout = 0; layout < 2; layout++) {
            real x[128], y[128];
            fill(x, c.rope, 1);
            memcpy(y, x, sizeof y);
            rope_apply(y, table + t * c.rope, half, layout ? HALF_SPLIT : INTERLEAVED, 1);
            for (int64_t j = 0; j < half; j++) {
                int64_t i0 = layout ? j : 2 * j, i1 = layout ? j + half : 2 * j + 1;
                double co = factor * cos((double)t * inv[j]), si = factor * sin((double)t * inv[j]);
                rotate = fmax(rotate, fabs((double)y[i0] - ((double)x[i0] * co - (double)x[i1] * si)));
                rotate = fmax(rotate, fabs((double)y[i1] - ((double)x[i0] * si + (double)x[i1] * co)));
            }
            rope_apply(y, table + t * c.rope, half, layout ? HALF_SPLIT : INTERLEAVED, -1);
            for (int64_t j = 0; j < c.rope; j++) inverse = fmax(inverse, fabs((double)y[j] / (factor * factor) - (double)x[j]));
        }
        Model m;
        c.DI = c.rope + 3;
        model_build(&m, &c);
        double want = 1 / sqrt((double)(c.nope + c.rope)) * (yarn ? pow(mscale_of(c.rope_factor, c.rope_mscale_all), 2) : 1); // 1 when mscale_all_dim is 0
        scale = fmax(scale, fabs(m.layers[0].scale / want - 1));
        model_free(&m);
        free(table);
    }
    check(worst[0] < 1e-6, "rope_table default: error %.2e", worst[0]);
    check(worst[1] < 1e-6, "rope_table YaRN: error %.2e against the published formula", worst[1]);
    check(scale < 1e-12, "softmax scale with and without YaRN: error %.2e", scale);
    check(rotate < 1e-5 && inverse < 1e-6, "rope_apply, both layouts: rotation %.2e, inverse restores to %.2e", rotate, inverse);
}

// ---- the attention core against a dense reference in double (faults 21 to 38)

// Everything sparse_attention_forward and _backward produce for layer l, from its queries, rows, selections.
typedef struct { double *oc, *lse, *kl, *d_qrow, *d_rows, *d_qi, *d_wi, *d_ki; } Core;
static double *doubles(int64_t n) { return (double *)xalloc((size_t)n * sizeof(double)); }

static void core_reference(const Model *m, const Layer *l, int teachers, Core *r) {
    const Config *c = &m->c;
    const Layer *src = l->source < 0 ? l : &m->layers[l->source];
    int64_t N = m->N, T = m->T, H = c->H, Dk = l->Dk, Dv = l->Dv, HI = c->HI, DI = c->DI;
    r->oc = doubles(N * H * Dv); r->lse = doubles(N * H); r->kl = doubles(N); r->d_qrow = doubles(N * H * Dk); r->d_rows = doubles(N * Dk);
    r->d_qi = doubles(N * HI * DI); r->d_wi = doubles(N * HI); r->d_ki = doubles(N * DI);
    double *p = doubles(T), *mean = doubles(T), *score = doubles(T);
    for (int64_t i = 0; i < N; i++) {
        int64_t b = i / T, t = i % T;
        char *in = (char *)xalloc((size_t)T); // the mask of the dense form
        for (int64_t s = m->doc[i]; s <= t; s++) in[s] = (char)attends_to_all(m, l);
        if (!attends_to_all(m, l))
            for (int64_t j = 0; j < c->topk; j++)
                if (src->sel[i * c->topk + j] >= 0) in[src->sel[i * c->topk + j]] = 1;
        memset(mean, 0, (size_t)T * sizeof(double));
        for (int64_t h = 0; h < H; h++) {
            const real *q = l->qrow + (i * H + h) * Dk, *d_o = m->d_oc + (i * H + h) * Dv;
            double top = -INFINITY, sum = 0, delta = 0;
            for (int64_t s = 0; s < T; s++) {
                p[s] = 0;
                for (int64_t d = 0; in[s] && d < Dk; d++) p[s] += (double)q[d] * (double)l->rows[(b * T + s) * Dk + d] * l->scale;
                if (in[s]) top = fmax(top, p[s]);
            }
            for (int64_t s = 0; s < T; s++) sum += p[s] = in[s] ? exp(p[s] - top) : 0;
            r->lse[i * H + h] = top + log(sum);
            for (int64_t s = 0; s < T; s++) {
                p[s] /= sum;
                mean[s] += p[s] / (double)H;
                for (int64_t d = 0; in[s] && d < Dv; d++) r->oc[(i * H + h) * Dv + d] += p[s] * (double)l->rows[(b * T + s) * Dk + d];
            }
            for (int64_t d = 0; d < Dv; d++) delta += (double)d_o[d] * r->oc[(i * H + h) * Dv + d];
            for (int64_t s = 0; s < T; s++) {
                double dp = 0;
                if (!in[s]) continue;
                const real *row = l->rows + (b * T + s) * Dk;
                for (int64_t d = 0; d < Dv; d++) dp += (double)d_o[d] * (double)row[d];
                double ds = p[s] * (dp - delta) * l->scale;
                for (int64_t d = 0; d < Dk; d++) {
                    r->d_qrow[(i * H + h) * Dk + d] += ds * (double)row[d];
                    r->d_rows[(b * T + s) * Dk + d] += ds * (double)q[d] + (d < Dv ? p[s] * (double)d_o[d] : 0);
                }
            }
        }
        if (teachers) {
            double top = -INFINITY, sum = 0;
            for (int64_t pass = 0; pass < 2; pass++) {
                for (int64_t s = 0; s < T; s++) {
                    if (!in[s]) continue;
                    double g = pass ? m->kl_scale / teachers * (exp(score[s] - top) / sum - mean[s]) : 0;
                    if (!pass) score[s] = 0;
                    for (int64_t h = 0; h < HI; h++) {
                        const real *q = src->q_index + (i * HI + h) * DI, *k = src->k_index + (b * T + s) * DI;
                        double dot = 0, w = (double)src->w_index[i * HI + h];
                        for (int64_t d = 0; d < DI; d++) dot += (double)q[d] * (double)k[d];
                        if (!pass) score[s] += w * (dot > 0 ? dot : 0);
                        if (!pass || dot <= 0) continue;
                        r->d_wi[i * HI + h] += g * dot;
                        for (int64_t d = 0; d < DI; d++) {
                            r->d_qi[(i * HI + h) * DI + d] += g * w * (double)k[d];
                            r->d_ki[(b * T + s) * DI + d] += g * w * (double)q[d];
                        }
                    }
                    top = fmax(top, score[s]);
                }
                if (!pass) for (int64_t s = 0; s < T; s++) sum += in[s] ? exp(score[s] - top) : 0;
            }
            for (int64_t s = 0; s < T; s++)
                if (in[s] && mean[s] > 0) r->kl[i] += mean[s] * (log(mean[s]) - (score[s] - top - log(sum))) / teachers;
        }
        free(in);
    }
    free(p); free(mean); free(score);
}
static void core_free(Core *r) { free(r->oc); free(r->lse); free(r->kl); free(r->d_qrow); free(r->d_rows); free(r->d_qi); free(r->d_wi); free(r->d_ki); }

// The selections: 0 random sets, 1 hot keys (every query of a document takes its first keys), 2 all visible (dense).
static void test_core(const char *layers, int layer, int served, int kind) {
    Config c = config(layers, (int64_t)strlen(layers), ri(1, 3), ri(30, 160), ri(2, 12)); // all lanes are in use from T = 113 on; with k = 1 most is 0
    Model m;
    Core r;
    strcpy(c.index_target, served ? "served" : "own");
    make(&m, &c, 1);
    Layer *l = &m.layers[layer], *src = l->source < 0 ? NULL : &m.layers[l->source];
    int64_t N = m.N, T = m.T, H = c.H, k = c.topk, unselected = 0, leaked = 0;
    // who teaches this layer's indexer, counted from the pattern
    int teachers = src ? 1 : 0;
    if (src && served) for (int j = (int)(src - m.layers) + 1; layers[j] && layers[j] != 'D'; j++) teachers += layers[j] == 'S';
    if (l->letter == 'S' && !served) teachers = 0;
    m.eot = 0;
    random_tokens(m.tokens, N, 25);
    find_documents(&m);
    fill(l->qrow, N * H * l->Dk, 1);
    fill(l->rows, N * l->R, 1.5);
    fill(m.d_oc, N * H * l->Dv, 1);
    if (src) {
        fill(src->q_index, N * c.HI * c.DI, 1);
        fill(src->k_index, N * c.DI, 1);
        fill(src->w_index, N * c.HI, 1);
    }
    char *used = (char *)xalloc((size_t)N);
    for (int64_t i = 0; i < N; i++) {
        int64_t lo = m.doc[i], n = min64(k, i % T + 1 - lo), seen = i % T + 1 - lo, left = n;
        if (!src) continue;
        memset(src->sel + i * k, 0xff, (size_t)k * sizeof(int32_t));
        for (int64_t s = 0; s < seen; s++)
            if (kind == 1 ? s < n : ri(1, seen - s) <= left) { // Knuth's selection sampling
                src->sel[i * k + n - left--] = (int32_t)(lo + s);
                used[i / T * T + lo + s] = 1;
            }
    }
    m.dense = kind == 2;
    for (int64_t i = 0; i < N && src && kind < 2; i++) // what nobody chose must never be read
        if (!used[i]) { memset(l->rows + i * l->R, 0xff, (size_t)l->R * sizeof(real)); unselected++; }
    m.kl_scale = 0.7;
    m.learning = 0;
    memset(m.row_kl, 0, (size_t)N * sizeof(float));
    sparse_attention_forward(&m, l);
    float *kl = (float *)copy_of(m.row_kl, N, sizeof(float));
    m.learning = 1;
    memset(l->oc, 0xff, (size_t)(N * H * l->Dv) * sizeof(real));
    sparse_attention_forward(&m, l);
    memset(m.row_kl, 0, (size_t)N * sizeof(float));
    memset(m.d_qi, 0, (size_t)(N * c.HI * c.DI) * sizeof(real));
    memset(m.d_wi, 0, (size_t)(N * c.HI) * sizeof(real));
    memset(m.d_ki, 0, (size_t)(N * c.DI) * sizeof(real));
    sparse_attention_backward(&m, l);
    core_reference(&m, l, teachers, &r);
    double e[8] = {relative_d(l->oc, r.oc, N * H * l->Dv), relative_d(l->lse, r.lse, N * H), relative_d(m.d_qrow, r.d_qrow, N * H * l->Dk), relative_d(m.d_rows, r.d_rows, N * l->R),
                   relative_d(m.d_qi, r.d_qi, N * c.HI * c.DI), relative_d(m.d_wi, r.d_wi, N * c.HI), relative_d(m.d_ki, r.d_ki, N * c.DI), 0}, worst = 0;
    for (int64_t i = 0; i < N; i++) e[7] = fmax(e[7], fmax(fabs((double)kl[i] - r.kl[i]), fabs((double)m.row_kl[i] - r.kl[i])) / (1 + fabs(r.kl[i])));
    for (int i = 0; i < 8; i++) worst = e[i] <= worst ? worst : e[i];
    static const char *const kinds[] = {"random sets", "hot keys", "all visible"};
    check(worst < 2e-5, "core %s layer %d, %s, %s: oc %.0e lse %.0e dq %.0e drows %.0e dqi %.0e dwi %.0e dki %.0e KL %.0e", layers, layer, served ? "served" : "own", kinds[kind],
          e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]);
    for (int64_t i = 0; i < N && src && kind < 2; i++)
        for (int64_t d = 0; d < l->R && !used[i]; d++) leaked += m.d_rows[i * l->R + d] != 0;
    if (kind == 1) check(leaked == 0 && unselected > 0, "core %s layer %d, hot keys: gradient of %lld keys that nobody chose is 0", layers, layer, (long long)unselected);
    core_free(&r);
    free(used);
    free(kl);
    done(&m);
}

// ---- what a query sees

static void test_dense_equals_full(const char *sparse, const char *full) {
    int64_t B = 2, T = ri(20, 70);
    Config c = config(sparse, (int64_t)strlen(sparse), B, T, T + ri(0, 9)), f = c;
    Model a, d;
    int32_t x[200], y[200];
    strcpy(f.layers, full);
    make(&a, &c, 1);
    make(&d, &f, 1);
    copy_params(&d, &a);
    a.eot = d.eot = 0;
    random_tokens(x, B * T, c.V);
    random_tokens(y, B * T, c.V);
    double la = run(&a, x, y, 1), ld = run(&d, x, y, 1), worst = 0;
    for (int i = 0; i < d.n_tensors; i++)
        for (int j = 0; j < a.n_tensors; j++)
            if (!strcmp(d.tensors[i].name, a.tensors[j].name)) {
                double e = relative(grad(&a, j), grad(&d, i), d.tensors[i].size);
                worst = e <= worst ? worst : e;
            }
    check(fabs(la / ld - 1) < 1e-6 && relative(a.all_logits, d.all_logits, a.N * c.V) < 1e-5, "k >= T: %s has the loss %.4f and the logits of %s", sparse, la, full);
    check(worst < 1e-5, "k >= T: %s has the gradients of %s: %.1e", sparse, full, worst);
    done(&a);
    done(&d);
}

// One layer, the window selector: token t sees t-k+1..t and nothing else.
static void test_window(void) {
    int64_t T = ri(40, 80), k = ri(1, 12), outside = 0, inside = 0;
    Config c = config("D", 1, 1, T, k);
    Model a, b;
    int32_t x[200];
    strcpy(c.selector, "window");
    make(&a, &c, 1);
    make(&b, &c, 1);
    copy_params(&b, &a);
    random_tokens(x, T, c.V);
    run(&a, x, NULL, 0);
    for (int trial = 0; trial < 12; trial++) {
        int64_t t = ri(k + 1, T - 1), far = trial % 2 ? t - k : ri(0, t - k), near = trial % 2 ? t - k + 1 : ri(t - k + 1, t);
        for (int in = 0; in < 2; in++) {
            int32_t *changed = &x[in ? near : far], old = *changed;
            *changed = (int32_t)((old + 1) % c.V);
            run(&b, x, NULL, 0);
            *(in ? &inside : &outside) += same_logits(&a, t, &b, t, 1);
            *changed = old;
        }
    }
    // inside, a probability may be too small to show, but not often
    check(outside == 12 && inside < 5, "window k=%lld: a token outside changes nothing (%lld of 12), one inside does (%lld equal)", (long long)k, (long long)outside, (long long)inside);
    done(&a);
    done(&b);
}

static void test_causality(const char *layers, int64_t k) {
    int64_t T = ri(30, 70), before = 0, after = 0, n = 6;
    Config c = config(layers, (int64_t)strlen(layers), 1, T, k);
    Model a, b;
    int32_t x[200];
    make(&a, &c, 1);
    make(&b, &c, 1);
    copy_params(&b, &a);
    random_tokens(x, T, c.V);
    run(&a, x, NULL, 0);
    for (int trial = 0; trial < n; trial++) {
        int64_t t = trial ? ri(0, T - 1) : T - 1;
        int32_t old = x[t];
        x[t] = (int32_t)((old + 1) % c.V);
        run(&b, x, NULL, 0);
        before += same_logits(&a, 0, &b, 0, t);
        after += !same_logits(&a, t, &b, t, 1);
        x[t] = old;
    }
    check(before == n && after == n, "causality %s: logits before a changed token keep their bits (%lld of %lld), its own change (%lld)", layers, (long long)before, (long long)n, (long long)after);
    done(&a);
    done(&b);
}

// Two documents in a row: the second is what it is alone at the start of a row, whatever stands before it.
static void test_documents(const char *layers, int64_t T, int64_t k) {
    Config c = config(layers, (int64_t)strlen(layers), 1, T, k);
    Model a, b;
    int32_t *x = (int32_t *)xalloc((size_t)T * sizeof *x), *y = (int32_t *)xalloc((size_t)T * sizeof *y);
    int64_t p = ri(T / 4, T / 2), agree = 1, differ = 1;
    make(&a, &c, 1);
    make(&b, &c, 1);
    copy_params(&b, &a);
    a.eot = b.eot = 1;
    for (int64_t i = 0; i < T; i++) {
        x[i] = (int32_t)ri(2, c.V - 1);
        y[i] = (int32_t)ri(2, c.V - 1);
    }
    x[p] = 1;
    memcpy(y, x + p, (size_t)(T - p) * sizeof *x);
    for (int mask = 0; mask < 2; mask++) {
        a.c.doc_mask = b.c.doc_mask = mask;
        run(&a, x, NULL, 0);
        run(&b, y, NULL, 0);
        if (mask) agree = same_logits(&a, p, &b, 0, T - p);
        else differ = !same_logits(&a, p, &b, 0, T - p);
    }
    check(agree && differ, "documents %s, T=%lld, k=%lld, second from %lld: as if alone with the mask (%d), not so without (%d)", layers, (long long)T, (long long)k, (long long)p, (int)agree, (int)differ);
    free(x);
    free(y);
    done(&a);
    done(&b);
}

// A row's logits do not depend on the other rows, nor on whether a backward pass will follow (fault 52).
static void test_batch(const char *layers) {
    int64_t T = ri(30, 300), alone = 0, learning;
    Config c = config(layers, (int64_t)strlen(layers), 3, T, ri(2, 20));
    Model a, b;
    int32_t *x = (int32_t *)xalloc((size_t)(3 * T) * sizeof *x);
    make(&a, &c, 1);
    make(&b, &c, 1);
    copy_params(&b, &a);
    a.eot = b.eot = 0;
    random_tokens(x, 3 * T, c.V);
    run(&a, x, NULL, 0);
    run(&b, x, x, 1);
    learning = same_logits(&a, 0, &b, 0, a.N);
    replan(&b, 1, T, 1);
    for (int64_t row = 0; row < 3; row++) {
        run(&b, x + row * T, NULL, 0);
        alone += same_logits(&a, row * T, &b, 0, T);
    }
    check(alone == 3 && learning, "batch %s: rows alone have the bits they have together (%lld of 3), learning or not (%d)", layers, (long long)alone, (int)learning);
    free(x);
    done(&a);
    done(&b);
}

// Prefill and single tokens from the caches give what one pass gives, selections included.
static void test_incremental(const char *layers, int64_t T, int64_t k) {
    int64_t L = (int64_t)strlen(layers), sel_wrong = 0;
    Config c = config(layers, L, 1, T, k);
    Model a, b;
    int32_t *x = (int32_t *)xalloc((size_t)T * sizeof *x);
    make(&a, &c, 1);
    make(&b, &c, 0);
    copy_params(&b, &a);
    a.eot = b.eot = 1;
    random_tokens(x, T, c.V);
    run(&a, x, NULL, 0);
    memset(b.targets, 0xff, (size_t)T * sizeof *b.targets);
    b.learning = 0;
    for (int64_t at = 0, n = ri(1, T / 2); at < T; at += n, n = ri(0, 5) ? 1 : ri(1, 4)) {
        n = min64(n, T - at);
        memcpy(b.tokens + at, x + at, (size_t)n * sizeof *x); // later tokens stay poisoned
        b.r0 = at;
        b.nr = n;
        model_forward(&b);
    }
    for (int64_t l = 0; l < L; l++)
        if (a.layers[l].sel) sel_wrong += !same(a.layers[l].sel, b.layers[l].sel, T * k, sizeof(int32_t));
    int bits = same_logits(&a, 0, &b, 0, T);
    double e = relative(b.all_logits, a.all_logits, T * c.V);
    check(e <= 1e-6 && sel_wrong == 0, "incremental %s, T=%lld, k=%lld: %s, relative %.1e, %lld layers select otherwise", layers, (long long)T, (long long)k, bits ? "same bits" : "other bits", e, (long long)sel_wrong);
    free(x);
    done(&a);
    done(&b);
}

static void test_threads(const char *layers) {
    static const int counts[] = {1, 2, 3, 5};
    int64_t B = 2, T = ri(100, 200), logits = 0, grads = 0;
    Config c = config(layers, (int64_t)strlen(layers), B, T, ri(5, 30));
    strcpy(c.index_target, ri(0, 1) ? "served" : "own");
    c.C = ri(60, 100); // large enough for the parallel branch of the matrix product
    c.F = ri(100, 200);
    int32_t *x = (int32_t *)xalloc((size_t)(B * T) * sizeof *x);
    random_tokens(x, B * T, c.V);
    Model m[4];
    for (int i = 0; i < 4; i++) {
        threads(counts[i]);
        make(&m[i], &c, 1);
        m[i].eot = 3;
        if (i) copy_params(&m[i], &m[0]);
        run(&m[i], x, x, 1);
        logits += !same_logits(&m[i], 0, &m[0], 0, B * T) || !same(m[i].row_loss, m[0].row_loss, B * T, 4) || !same(m[i].row_kl, m[0].row_kl, B * T, 4);
        grads += !same(m[i].grads, m[0].grads, m[0].n_params, sizeof(real));
    }
    double norm = grad_norm(&m[0], 0);
    check(logits == 0 && grads == 0 && norm > 0 && isfinite(norm), "threads %s: 1, 2, 3, 5 give equal logits, losses, KLs (%lld differ) and gradients (%lld differ), norm %.3g", layers, (long long)logits, (long long)grads, norm);
    for (int i = 0; i < 4; i++) done(&m[i]);
    free(x);
    threads(1);
}

// ---- selections

static void test_selections(void) {
    int64_t bad = 0, plateau = 0, controls = 0;
    for (int trial = 0; trial < 12; trial++) {
        static const int64_t lengths[] = {1, 2, 63, 65, 127, 130, 257, 300};
        static const char *const selectors[] = {"indexer", "indexer", "indexer", "random", "window", "oracle"};
        int64_t T = lengths[ri(0, 7)], k = ri(1, 40), B = ri(1, 2);
        Config c = config("D", 1, B, T, k);
        Model m;
        strcpy(c.selector, selectors[trial % 6]);
        strcpy(c.topk_method, ri(0, 1) ? "table" : "hytopk");
        make(&m, &c, 1);
        if (trial % 6 == 1) memset(param(&m, m.layers[0].iw), 0, (size_t)(c.HI * c.C) * sizeof(real)); // all scores are 0
        int32_t x[600];
        m.eot = 0;
        random_tokens(x, B * T, c.V);
        memset(m.layers[0].sel, 0x7f, (size_t)(m.N * k) * sizeof(int32_t)); // the poison of the buffers would pass for -1
        double loss = run(&m, x, x, 1);
        bad += !isfinite(loss) || !isfinite(grad_norm(&m, 0)) || !isfinite(grad_norm(&m, 1));
        for (int64_t i = 0; i < m.N; i++) {
            const int32_t *sel = m.layers[0].sel + i * k;
            int64_t t = i % T, lo = t, n;
            while (lo > 0 && x[i - t + lo] != 0) lo--; // start of the document, from the tokens
            n = min64(k, t + 1 - lo);
            for (int64_t j = 0; j < k; j++) bad += j < n ? sel[j] < lo || sel[j] > t || (j && sel[j] <= sel[j - 1]) : sel[j] != -1;
            for (int64_t j = 0; j < n; j++) {
                plateau += trial % 6 == 1 && sel[j] != lo + j;         // ties go to the lowest index
                controls += trial % 6 == 4 && sel[j] != t - n + 1 + j; // the window is the last k
            }
        }
        done(&m);
    }
    check(bad == 0, "selections: ascending, without duplicates, inside the document, -1 behind the last; losses and gradients finite: %lld bad", (long long)bad);
    check(plateau == 0, "selections: equal scores go to the lowest index: %lld bad", (long long)plateau);
    check(controls == 0, "selections: the window is the last k: %lld bad", (long long)controls);
}

// The order of selection on pairs of scores, special values among them: score, then lowest index; NaN above all.
static void test_order(void) {
    int bad = 0;
    for (int i = 0; i < 20000; i++) {
        const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 1e-42f, -1e-42f, (float)rnd(), (float)rnd(), 1, -1};
        float a = special[ri(0, 11)], b = special[ri(0, 11)];
        int64_t s = ri(0, 1) ? ri(0, 3) : ri(0, INT32_MAX), t = ri(0, 3);
        int above = a != a ? b == b || s < t : b != b ? 0 : a > b || (a == b && s < t); // a is chosen before b
        bad += (order_key(a, s) > order_key(b, t)) != above && !(s == t && (a == b || (a != a && b != b)));
        bad += key_index(order_key(a, s)) != s || key_is_nan(order_key(a, s)) != (a != a);
    }
    check(bad == 0, "selections: order of keys: score, then lowest index, -0 equals +0, NaN largest: %d bad", bad);
}

// Loss, hits and the padding: from the logits, over the V columns that exist.
static void test_loss(void) {
    int64_t T = ri(20, 300), hits = 0, padding = 0;
    Config c = config("DF", 2, 1, T, 5);
    Model m;
    int32_t x[300], y[300];
    double worst = 0;
    make(&m, &c, 1);
    random_tokens(x, T, c.V);
    for (int64_t i = 0; i < T; i++) y[i] = (int32_t)ri(-1, c.V - 1);
    for (int learning = 0; learning < 2; learning++) {
        run(&m, x, y, learning);
        for (int64_t i = 0; i < T; i++) {
            double sum = 0, top = -INFINITY;
            const real *z = logits_at(&m, i);
            for (int64_t v = 0; v < c.V; v++) top = fmax(top, (double)z[v]);
            for (int64_t v = 0; v < c.V; v++) sum += exp((double)z[v] - top);
            double e = fabs((double)m.row_loss[i] - (y[i] < 0 ? 0 : top + log(sum) - (double)z[y[i]]));
            worst = e <= worst ? worst : e;
            if (y[i] >= 0) hits += m.row_hit[i] != ((double)z[y[i]] == top);
        }
    }
    for (int64_t j = c.V * c.C; j < m.Vp * c.C; j++) padding += grad(&m, m.head)[j] != 0 || grad(&m, m.embed)[j] != 0;
    check(worst < 1e-5 && hits == 0 && padding == 0, "loss: from the logits to %.1e, %lld hits wrong, %lld gradients in the padding of the vocabulary (%lld of %lld)", worst,
          (long long)hits, (long long)padding, (long long)c.V, (long long)m.Vp);
    done(&m);
}

// Rows without any target: no loss, no gradient, and the other rows learn as if they were alone.
static void test_empty_targets(void) {
    int64_t T = ri(20, 60);
    Config c = config("DSF", 3, 2, T, 7);
    Model a, b;
    int32_t x[200], y[200];
    make(&a, &c, 1);
    make(&b, &c, 1);
    copy_params(&b, &a);
    random_tokens(x, 2 * T, c.V);
    random_tokens(y, 2 * T, c.V);
    memset(y, 0xff, (size_t)T * sizeof *y); // row 0 has none
    double together = run(&a, x, y, 1);
    replan(&b, 1, T, 1);
    double alone = run(&b, x + T, y + T, 1), worst = 0, first = 0;
    for (int64_t i = 0; i < T; i++) first += fabs((double)a.row_loss[i]);
    for (int i = 0; i < a.n_tensors; i++) {
        if (a.tensors[i].index) continue; // the KL counts every query, with or without a target
        for (int64_t j = 0; j < a.tensors[i].size; j++) grad(&b, i)[j] *= (real)0.5; // run() divides by N, twice as large together
        double e = relative(grad(&a, i), grad(&b, i), a.tensors[i].size);
        worst = e <= worst ? worst : e;
    }
    check(first == 0 && fabs(together / alone - 1) < 1e-6 && worst < 1e-5, "empty targets: row 0 has no loss, the gradient is that of row 1 alone: %.1e", worst);
    memset(y, 0xff, sizeof y);
    double none = run(&a, x, y, 1), norm = grad_norm(&a, 0);
    check(none == 0 && norm == 0 && isfinite(grad_norm(&a, 1)), "empty targets: none at all gives loss %g and gradient %g", none, norm);
    done(&a);
    done(&b);
}

// ---- training steps

// Steps [from, to) on the copy task; returns the sum of the step losses, infinity when a step is refused.
static double steps(Model *m, int64_t from, int64_t to) {
    Loader d;
    double sum = 0;
    loader_open(&d, &m->c, 0);
    for (int64_t s = from; s < to; s++) {
        Stats stats;
        double norm[2], lr;
        if (!train_step(m, &d, s, s * m->B * m->c.accum, &stats, norm, &lr)) return INFINITY;
        sum += stats.loss;
    }
    loader_close(&d);
    return sum;
}

static Config training_config(const char *layers, int64_t B, int64_t T) {
    Config c = config(layers, (int64_t)strlen(layers), B, T, ri(3, T / 2));
    strcpy(c.task, "copy");
    c.steps = 20;
    c.warmup = 2;
    c.warmup_dense = 1;
    return c;
}

// Plain initial values, as in a real run.
static void fresh(Model *m, const Config *c) {
    model_build(m, c);
    model_init_params(m, 1);
    m->select_seed = (uint64_t)c->seed;
    replan(m, c->B, c->T, 1);
}

static void test_recompute(const char *layers, const char *target) {
    Config c = training_config(layers, 2, 2 * ri(10, 30));
    static const struct { const char *recompute, *store; int64_t replay; } runs[] = {
        {"none", "u16", 1}, {"block", "int32", 1}, {"block", "u16", 1}, {"block", "ef", 1}, {"block", "int32", 0}, {"block", "ef", 0}};
    enum { RUNS = sizeof runs / sizeof runs[0] };
    Model m[RUNS];
    int64_t d = 0;
    double loss[RUNS];
    strcpy(c.index_target, target);
    c.accum = 2;
    for (const char *p = layers; *p; p++) d += *p == 'D';
    for (int i = 0; i < RUNS; i++) {
        strcpy(c.recompute, runs[i].recompute);
        strcpy(c.replay_store, runs[i].store);
        c.replay = runs[i].replay;
        fresh(&m[i], &c);
        loss[i] = steps(&m[i], 0, 3);
    }
    int bits = 1;
    for (int i = 1; i < RUNS; i++) bits &= same(m[i].params, m[0].params, m[0].n_params, sizeof(real)) && loss[i] == loss[0];
    check(bits && isfinite(loss[0]), "recompute %s %s: three steps give the same bits", layers, target);
    int64_t want = d * 2 * 2, scans = 1; // D layers, micro-batches, steps after the dense one
    for (int i = 0; i < RUNS; i++) scans &= m[i].index_scans == (runs[i].replay ? want : 2 * want);
    check((int)scans, "recompute %s: %lld index scans, with replay as without recomputation, twice as many when selecting again", layers, (long long)want);
    for (int i = 0; i < RUNS; i++) done(&m[i]);
}

static void test_not_finite(void) {
    Config c = training_config("DS", 2, 16);
    Model m;
    fresh(&m, &c);
    steps(&m, 0, 1);
    int i = (int)ri(0, m.n_tensors - 1), ok = 1;
    if (m.tensors[i].index) i = m.layers[0].q_a;
    int64_t j = i == m.embed ? m.tokens[3] * c.C : ri(0, m.tensors[i].saved_rows * m.tensors[i].cols - 1);
    if (i == m.embed) for (int64_t v = 0; v < c.V; v++) param(&m, i)[v * c.C] = (real)NAN; // whichever token comes
    else param(&m, i)[j] = (real)NAN;
    real *before[3] = {(real *)copy_of(m.params, m.n_params, sizeof(real)), (real *)copy_of(m.m, m.n_params, sizeof(real)), (real *)copy_of(m.v, m.n_params, sizeof(real))};
    ok &= steps(&m, 1, 2) == INFINITY;
    ok &= same(m.params, before[0], m.n_params, sizeof(real)) && same(m.m, before[1], m.n_params, sizeof(real)) && same(m.v, before[2], m.n_params, sizeof(real));
    check(ok, "not finite: NaN in %s refuses the step and changes neither parameters nor moments", m.tensors[i].name);
    for (int n = 0; n < 3; n++) free(before[n]);
    done(&m);
}

static void test_accumulation(void) {
    Config c = training_config("DSF", 4, 2 * ri(8, 20)), d;
    Model a, b;
    double worst = 0;
    c.adam_eps = 1e-4; // with a tiny epsilon the first steps are signs: rounding of a gradient near 0 would show
    d = c;
    d.B = 1;
    d.accum = 4;
    fresh(&a, &c);
    fresh(&b, &d);
    double la = steps(&a, 0, 3), lb = steps(&b, 0, 3);
    for (int i = 0; i < a.n_tensors; i++) {
        double e = relative(param(&b, i), param(&a, i), a.tensors[i].size);
        worst = e <= worst ? worst : e;
    }
    check(fabs(la / lb - 1) < 1e-6 && worst < 1e-5, "accumulation: 4 x B=1 and B=4 after 3 steps: loss %.1e, parameters %.1e", fabs(la / lb - 1), worst);
    done(&a);
    done(&b);
}

// Three steps against AdamW written out in double from the same gradients, with clipping and decay.
static void test_adamw(void) {
    Config c = training_config("DSF", 2, 16);
    Model m;
    double worst = 0, decayed = 0;
    c.lr = 1e-2; c.index_lr_mult = 3; c.weight_decay = 0.5; c.clip = 1e-3; c.warmup_dense = 0; c.adam_eps = 1e-6; c.kl_coef = 1000;
    fresh(&m, &c);
    for (int i = 0; i < m.n_tensors; i++) // vectors start at 0 or 1: decay would be seen on these ones
        if (m.tensors[i].ndim == 1) fill(param(&m, i), m.tensors[i].size, 2);
    double *p = doubles(m.n_params), *mm = doubles(m.n_params), *vv = doubles(m.n_params), clipped[2] = {0, 0};
    for (int64_t j = 0; j < m.n_params; j++) p[j] = (double)m.params[j];
    for (int64_t s = 0; s < 3; s++) {
        if (!isfinite(steps(&m, s, s + 1))) { worst = INFINITY; break; }
        double norm[2] = {0, 0}, lr = s < 2 ? c.lr * (double)(s + 1) / 2 : c.lr; // warm-up of 2, then the peak
        for (int i = 0; i < m.n_tensors; i++)
            for (int64_t j = 0; j < m.tensors[i].size; j++) norm[strstr(m.tensors[i].name, ".indexer.") != NULL] += (double)grad(&m, i)[j] * (double)grad(&m, i)[j];
        for (int i = 0; i < m.n_tensors; i++) {
            const Tensor *t = &m.tensors[i];
            int index = strstr(t->name, ".indexer.") != NULL, vector = strstr(t->name, "norm") != NULL;
            double scale = fmin(1, c.clip / sqrt(norm[index])), rate = lr * (index ? 3 : 1);
            clipped[index] += scale < 1;
            for (int64_t j = t->offset; j < t->offset + t->size; j++) {
                double g = (double)m.grads[j] * scale;
                mm[j] = c.beta1 * mm[j] + (1 - c.beta1) * g;
                vv[j] = c.beta2 * vv[j] + (1 - c.beta2) * g * g;
                if (!vector) p[j] -= rate * c.weight_decay * p[j];
                p[j] -= rate * mm[j] / (1 - pow(c.beta1, (double)s + 1)) / (sqrt(vv[j] / (1 - pow(c.beta2, (double)s + 1))) + c.adam_eps);
            }
            double e = relative_d(m.params + t->offset, p + t->offset, t->size);
            worst = e <= worst ? worst : e;
            for (int64_t j = t->offset; j < t->offset + t->size; j++) p[j] = (double)m.params[j]; // so that errors do not add up
            if (!vector && t->size) decayed++;
        }
    }
    check(worst < 3e-6 && clipped[0] > 0 && clipped[1] > 0 && decayed > 0, "AdamW: three steps against double loops, decay on matrices only, both groups clipped: %.1e", worst);
    free(p); free(mm); free(vv);
    done(&m);
}

// With beta1 = 0 the first moment is the clipped gradient itself.
static void test_clipping(void) {
    for (int on = 0; on < 2; on++) {
        Config c = training_config("D", 2, 16);
        Model m;
        double raw[2] = {0, 0}, used[2] = {0, 0};
        c.beta1 = 0; c.warmup_dense = 0; c.kl_coef = 1000;
        c.clip = on ? 0.01 : 0;
        fresh(&m, &c);
        steps(&m, 0, 1);
        for (int i = 0; i < m.n_tensors; i++) {
            for (int64_t j = m.tensors[i].offset; j < m.tensors[i].offset + m.tensors[i].size; j++) {
                raw[m.tensors[i].index] += (double)m.grads[j] * (double)m.grads[j];
                used[m.tensors[i].index] += (double)m.m[j] * (double)m.m[j];
            }
        }
        int ok = 1;
        for (int g = 0; g < 2; g++) ok &= raw[g] > 1e-4 && (on ? fabs(sqrt(used[g]) / 0.01 - 1) < 1e-5 : fabs(used[g] / raw[g] - 1) < 1e-6);
        check(ok, "clipping %s: norms %.4f %.4f become %.6f %.6f", on ? "at 0.01" : "off", sqrt(raw[0]), sqrt(raw[1]), sqrt(used[0]), sqrt(used[1]));
        done(&m);
    }
}

static void test_kl_off(void) {
    Config c = training_config("DS", 2, 16);
    Model m;
    int index = 1, model = 0;
    c.kl_coef = 0;
    c.warmup_dense = 1;
    c.weight_decay = 1;
    fresh(&m, &c);
    real *before = (real *)copy_of(m.params, m.n_params, sizeof(real));
    double loss = steps(&m, 0, 3);
    for (int i = 0; i < m.n_tensors; i++) {
        int equal = same(param(&m, i), before + m.tensors[i].offset, m.tensors[i].size, sizeof(real));
        if (strstr(m.tensors[i].name, ".indexer.")) index &= equal;
        else model |= equal;
    }
    check(index && !model && isfinite(loss), "kl-coef 0: index parameters keep their bits, all others move");
    free(before);
    done(&m);
}

static void test_schedule(void) {
    Config c;
    int ok = 1;
    config_defaults(&c);
    c.lr = 0.01 * (2 + rnd());
    c.steps = ri(100, 1000);
    c.warmup = ri(2, 20);
    c.min_lr = 0.2 + 0.1 * rnd();
    for (int wsd = 0; wsd < 3; wsd++) {
        strcpy(c.schedule, wsd ? "wsd" : "cosine");
        c.decay_steps = wsd == 2 ? ri(10, 50) : 0;
        int64_t end = wsd == 2 ? c.decay_steps : c.steps / 5, before = c.steps - end;
        for (int64_t s = 0; s < c.warmup; s++) ok &= fabs(learning_rate(&c, s) - c.lr * (double)(s + 1) / (double)c.warmup) < 1e-12;
        ok &= fabs(learning_rate(&c, c.steps) - c.min_lr * c.lr) < 1e-12 && fabs(learning_rate(&c, c.steps + 50) - c.min_lr * c.lr) < 1e-12;
        for (int64_t s = c.warmup; s < c.steps; s++) {
            double x = (double)(s - c.warmup) / (double)(c.steps - c.warmup), want = c.lr * (c.min_lr + (1 - c.min_lr) * (1 + cos(M_PI * x)) / 2);
            if (wsd) want = s <= before ? c.lr : c.lr * (c.min_lr + (1 - c.min_lr) * (double)(c.steps - s) / (double)end);
            ok &= fabs(learning_rate(&c, s) - want) < 1e-12;
        }
    }
    check(ok, "learning rate: warm-up, cosine and wsd, %lld steps", (long long)c.steps);
    c.warmup = 0;
    ok = isfinite(learning_rate(&c, 0)) && learning_rate(&c, 0) > 0;
    c.steps = 0;
    check(ok && isfinite(learning_rate(&c, 0)), "learning rate: no warm-up, no steps");
}

// Mean over all validation rows, whatever the batch: the rows that fill the last batch count for nothing.
static void test_evaluate(void) {
    Config c = training_config("D", 1, 8);
    double loss[3], kl[3];
    int64_t targets = 0, all = 256 * 4; // rows of the copy task, targets of a row
    Model first;
    fresh(&first, &c);
    for (int i = 0; i < 3; i++) {
        Model m;
        Loader val;
        c.B = i == 0 ? 1 : i == 1 ? 100 : 256;
        fresh(&m, &c);
        copy_params(&m, &first);
        loader_open(&val, &c, 1);
        Stats s = evaluate(&m, &val, 0);
        loss[i] = s.loss / (double)s.targets;
        kl[i] = s.kl / (double)s.kl_rows;
        targets += s.targets != all;
        done(&m);
    }
    check(targets == 0 && fabs(loss[1] / loss[0] - 1) < 1e-6 && fabs(loss[2] / loss[0] - 1) < 1e-6, "evaluate: B = 1, 100, 256 see the same targets and loss: %.8f %.8f %.8f", loss[0], loss[1], loss[2]);
    check(isfinite(kl[0]) && fabs(kl[2] / kl[0] - 1) < 1e-5, "evaluate: KL of B = 1 and 256: %.8f %.8f", kl[0], kl[2]);
    done(&first);
}

// ---- data order

static void test_permutation(void) {
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 15, 16, 17, 255, 256, 257, 1000, 4096, 65536, 65537};
    int bad = 0, epochs_equal = 0, seeds_equal = 0, fixed = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        int64_t n = sizes[s], equal_epoch = 0, equal_seed = 0, in_place = 0;
        char *hit = (char *)xalloc((size_t)n);
        uint64_t a = (uint64_t)ri(0, 1 << 20), e = (uint64_t)ri(0, 1000);
        for (int64_t i = 0; i < n; i++) {
            int64_t x = permuted(a, e, i, n);
            if (x < 0 || x >= n) { bad++; continue; }
            bad += hit[x]++ != 0;
            equal_epoch += x == permuted(a, e + 1, i, n);
            equal_seed += x == permuted(a + 1, e, i, n);
            in_place += x == i;
        }
        epochs_equal += n > 100 && equal_epoch > n / 10;
        seeds_equal += n > 100 && equal_seed > n / 10;
        fixed += n > 100 && in_place > n / 10;
        free(hit);
    }
    check(bad == 0, "data order: a bijection for all sizes: %d bad", bad);
    check(!epochs_equal && !seeds_equal && !fixed, "data order: other epochs and seeds give other orders (%d, %d), and none is the identity (%d)", epochs_equal, seeds_equal, fixed);
}

static int compare_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}
static uint64_t hash_row(const int32_t *x, const int32_t *y, int64_t n) {
    uint64_t h = 1;
    for (int64_t i = 0; i < n; i++) h = (h ^ (uint64_t)(uint32_t)x[i] ^ (uint64_t)(uint32_t)y[i] << 32) * 0x9e3779b97f4a7c15ull + (h >> 29);
    return h;
}

// The rows of an epoch are those of the files, read here byte by byte, each once.
static void test_loader(void) {
    static const char *const books[] = {"emma", "mansfield_park", "northanger_abbey", "pride_and_prejudice", "sense_and_sensibility"};
    Config c;
    Loader d;
    int64_t n = 0, T = ri(50, 300);
    int32_t *all = (int32_t *)xalloc(sizeof(int32_t) << 22), x[300], y[300];
    for (int i = 0; i < 5; i++) {
        char path[100];
        snprintf(path, sizeof path, "data/austen/%s.txt", books[i]);
        FILE *f = fopen(path, "rb");
        if (!f) { check(0, "data: %s: run from the repository root", path); return; }
        all[n++] = 256;
        for (int ch; (ch = fgetc(f)) != EOF;) all[n++] = ch;
        fclose(f);
    }
    config_defaults(&c);
    c.T = T;
    c.seed = ri(0, 1000);
    loader_open(&d, &c, 0);
    int64_t rows = (n - 1) / T, moved = 0;
    uint64_t *want = (uint64_t *)xalloc((size_t)rows * 8), *got[2] = {(uint64_t *)xalloc((size_t)rows * 8), (uint64_t *)xalloc((size_t)rows * 8)};
    check(d.n_rows == rows && d.stream.n_tokens == n && d.vocab == 257 && d.eot == 256, "data: %lld tokens, %lld rows of %lld", (long long)d.stream.n_tokens, (long long)d.n_rows, (long long)T);
    for (int64_t i = 0; i < rows && d.n_rows == rows; i++) {
        want[i] = hash_row(all + i * T, all + i * T + 1, T);
        for (int epoch = 0; epoch < 2; epoch++) {
            loader_row(&d, epoch * rows + i, x, y);
            got[epoch][i] = hash_row(x, y, T);
        }
        moved += got[0][i] != got[1][i];
    }
    qsort(want, (size_t)rows, 8, compare_u64);
    for (int epoch = 0; epoch < 2; epoch++) {
        qsort(got[epoch], (size_t)rows, 8, compare_u64);
        check(same(got[epoch], want, rows, 8), "data: epoch %d has each row of the files once, targets one token on", epoch);
    }
    check(moved > rows * 9 / 10, "data: the second epoch has another order (%lld of %lld moved)", (long long)moved, (long long)rows);
    loader_close(&d);
    loader_open(&d, &c, 1);
    loader_row(&d, 0, x, y);
    FILE *f = fopen(c.val, "rb");
    int in_order = x[0] == 256;
    for (int64_t i = 1; i < T && f; i++) in_order &= x[i] == fgetc(f);
    check(f && in_order, "data: validation rows come in the order of the file");
    if (f) fclose(f);
    loader_close(&d);
    free(all); free(want); free(got[0]); free(got[1]);
}

static void test_copy_task(void) {
    Config c = training_config("D", 1, 2 * ri(4, 40));
    Loader d, v;
    int32_t x[100], y[100], z[100];
    int bad = 0, equal = 0;
    loader_open(&d, &c, 0);
    loader_open(&v, &c, 1);
    for (int64_t i = 0; i < 200; i++) {
        loader_row(&d, i, x, y);
        for (int64_t t = 0; t < c.T; t++) {
            bad += x[t] < 0 || x[t] >= 64 || x[t] != x[(t + c.T / 2) % c.T];
            bad += t < c.T / 2 ? y[t] != -1 : y[t] != x[(t + 1) % c.T];
        }
        loader_row(&v, i, z, y);
        equal += same(x, z, c.T, sizeof *x);
        loader_row(&d, i + 1, z, y);
        equal += same(x, z, c.T, sizeof *x);
    }
    check(bad == 0 && equal < 3, "copy task: the second half repeats the first, targets there only; rows differ (%d bad, %d equal)", bad, equal);
}

// ---- checkpoints

// The bytes of a file, or NULL.
static char *slurp(const char *path, size_t *n) {
    char err[256];
    return file_read_all(path, n, err, sizeof err);
}
static void spit(const char *path, const char *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) die("cannot write %s", path);
}

static Json *check_folder(const char *dir, char *err) {
    strcpy(err, "(no message)");
    return checkpoint_check(dir, err, 4096);
}

static void test_checkpoint(int bytes) {
    Config c = training_config("DSF", 1, 16);
    Model m, n;
    char dir[600], path[900], err[4096];
    const char *files[] = {"model.safetensors", "optimizer-00000-of-00001.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"};
    if (bytes) c.V = 257;
    snprintf(c.out, sizeof c.out, "%.200s/check%d", folder, bytes);
    make_folder(c.out);
    make(&m, &c, 1);
    fill(m.m, m.n_params, 1);
    for (int64_t j = 0; j < m.n_params; j++) m.v[j] = (real)fabs(rnd());
    int64_t step = ri(1, 100000), rows = ri(1, (int64_t)1 << 40), step2 = -1, rows2 = -1;
    checkpoint_save(&m, step, rows);
    snprintf(dir, sizeof dir, "%s/step_%06lld", c.out, (long long)step);
    Json *state = check_folder(dir, err);
    if (!check(state != NULL, "checkpoint V=%lld: whole%s%s", (long long)c.V, state ? "" : ": ", state ? "" : err)) return;
    fresh(&n, &c);
    for (int i = 0; i < n.n_tensors; i++) memset(param(&n, i), 0xff, (size_t)(n.tensors[i].saved_rows * n.tensors[i].cols) * sizeof(real)); // padding stays 0
    memset(n.m, 0xff, (size_t)n.n_params * sizeof(real));
    memset(n.v, 0xff, (size_t)n.n_params * sizeof(real));
    checkpoint_load(&n, dir, state, &step2, &rows2);
    check(same(m.params, n.params, m.n_params, sizeof(real)) && same(m.m, n.m, m.n_params, sizeof(real)) && same(m.v, n.v, m.n_params, sizeof(real)) && step == step2 && rows == rows2,
          "checkpoint: parameters, moments, step and cursor come back bit for bit");
    json_free(state);
    for (int i = 0; i < (bytes ? 5 : 3); i++) { // damage, one file at a time
        size_t size;
        int flips = 0, cuts = 0, gone, tries = 10;
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        char *text = slurp(path, &size);
        if (!check(text && size > 0, "checkpoint: %s is there", files[i])) continue;
        for (int t = 0; t < tries; t++) {
            size_t at = (size_t)ri(0, (int64_t)size - 1);
            char bit = (char)(1 << ri(0, 7));
            text[at] ^= bit;
            spit(path, text, size);
            text[at] ^= bit;
            state = check_folder(dir, err);
            flips += !state && strstr(err, files[i]) && strstr(err, "damaged");
            json_free(state);
            spit(path, text, t ? (size_t)ri(0, (int64_t)size - 1) : size - 1);
            state = check_folder(dir, err);
            cuts += !state && strstr(err, files[i]) != NULL;
            json_free(state);
        }
        unlink(path);
        state = check_folder(dir, err);
        gone = !state && strstr(err, files[i]);
        json_free(state);
        spit(path, text, size);
        check(flips == tries && cuts == tries && gone, "checkpoint: damage of %s is found and named: %d of %d flips, %d of %d cuts, missing %d", files[i], flips, tries, cuts, tries, gone);
        free(text);
    }
    // state.json itself
    size_t size = 0;
    int cuts = 0, named = 0, refused, tries = 10;
    snprintf(path, sizeof path, "%s/state.json", dir);
    char *text = slurp(path, &size), *digit = text ? strstr(text, "\"rows_seen\": ") : NULL;
    if (check(digit != NULL, "checkpoint: state.json has rows_seen")) {
        for (int t = 0; t < tries; t++) {
            spit(path, text, (size_t)ri(0, (int64_t)size - 3));
            state = check_folder(dir, err);
            cuts += !state;
            named += !state && strstr(err, "state.json") != NULL;
            json_free(state);
        }
        check(cuts == tries, "checkpoint: a cut state.json is refused: %d of %d", cuts, tries);
        check(named == tries, "checkpoint: a cut state.json is named: %d of %d ('%s')", named, tries, err);
        digit = strchr(digit, ',') - 1; // the last digit: the result is a plausible number
        *digit ^= 1;
        spit(path, text, size);
        state = check_folder(dir, err);
        refused = !state;
        json_free(state);
        check(refused, "checkpoint: a flipped bit in the cursor of state.json is refused");
        *digit ^= 1;
        spit(path, text, size);
        state = check_folder(dir, err);
        check(state != NULL, "checkpoint: whole again after the damage was undone");
        json_free(state);
    }
    free(text);
    done(&m);
    done(&n);
}

static void test_keep(void) {
    Config c = training_config("D", 1, 8);
    Model m;
    int64_t list[16], want[] = {1000000, 100, 20, 10, 9};
    snprintf(c.out, sizeof c.out, "%.200s/keep", folder);
    make_folder(c.out);
    c.keep = 100;
    make(&m, &c, 1);
    int64_t order[] = {9, 100, 10, 1000000, 20};
    for (int i = 0; i < 5; i++) checkpoint_save(&m, order[i], i);
    int n = list_checkpoints(c.out, list, 16);
    check(n == 5 && same(list, want, 5, sizeof *list), "checkpoints are listed by step, newest first (%d)", n);
    m.c.keep = 2;
    checkpoint_save(&m, 1000001, 7);
    n = list_checkpoints(c.out, list, 16);
    int entries = 0; // nothing of the others, and no temporary folder, may be left
    DIR *d = opendir(c.out);
    for (struct dirent *e; d && (e = readdir(d));) entries += e->d_name[0] != '.';
    if (d) closedir(d);
    check(n == 2 && list[0] == 1000001 && list[1] == 1000000 && entries == 2, "keep 2: the newest two stay (%d listed, %d entries)", n, entries);
    checkpoint_save(&m, 1000001, 8); // the same step again
    char path[600], err[4096];
    snprintf(path, sizeof path, "%s/step_1000001", c.out);
    Json *state = check_folder(path, err);
    check(state && json_get(state, "rows_seen")->num == 8, "saving the same step again replaces it");
    json_free(state);
    done(&m);
}

static void test_resume(void) {
    Config c = training_config("DSF", 2, 2 * ri(8, 16));
    Model a, b, r;
    char err[4096], dir[600];
    int64_t step = 0, rows = 0;
    snprintf(c.out, sizeof c.out, "%.200s/resume", folder);
    make_folder(c.out);
    c.accum = 2;
    fresh(&a, &c);
    fresh(&b, &c);
    steps(&a, 0, 6);
    steps(&b, 0, 3);
    checkpoint_save(&b, 3, 12);
    fresh(&r, &c);
    memset(r.params, 0, (size_t)r.n_params * sizeof(real));
    snprintf(dir, sizeof dir, "%s/step_000003", c.out);
    Json *state = check_folder(dir, err);
    if (state) checkpoint_load(&r, dir, state, &step, &rows);
    json_free(state);
    int middle = same(b.params, r.params, r.n_params, sizeof(real));
    steps(&r, 3, 6);
    check(step == 3 && rows == 12 && middle && same(a.params, r.params, a.n_params, sizeof(real)) && same(a.m, r.m, a.n_params, sizeof(real)) && same(a.v, r.v, a.n_params, sizeof(real)),
          "resume: 3 steps, saved, loaded and 3 more give the bits of 6");
    check(!same(a.params, b.params, a.n_params, sizeof(real)), "resume: the steps in between changed something");
    done(&a);
    done(&b);
    done(&r);
}

// ---- generation

// What generate() prints, in a malloc'ed string.
static char *generated(const Model *m, const Tokenizer *tok, const char *prompt, int64_t n) {
    FILE *f = tmpfile();
    if (!f) die("no temporary file");
    generate(m, tok, prompt, n, f);
    long size = ftell(f);
    char *text = (char *)xalloc((size_t)size + 1);
    rewind(f);
    if (fread(text, 1, (size_t)size, f) != (size_t)size) die("cannot read a temporary file");
    fclose(f);
    return text;
}

static void test_generation(const char *layers, int64_t n_prompt) {
    int64_t n = 8, T = n_prompt + n, at = n_prompt;
    Config c = config(layers, (int64_t)strlen(layers), 1, T, ri(2, 30));
    Model m;
    Tokenizer tok;
    char *prompt = (char *)xalloc((size_t)T + 1), *text[5], err[4096];
    c.V = 257;
    c.temperature = 0;
    make(&m, &c, 1);
    m.eot = 256;
    if (tokenizer_bytes(&tok)) die("%s", err);
    for (int64_t i = 0; i < n_prompt; i++) prompt[i] = (char)ri(32, 126);
    text[0] = generated(&m, &tok, prompt, n);
    m.c.top_k = 1;
    m.c.temperature = 1;
    text[1] = generated(&m, &tok, prompt, n);
    m.c.top_k = 0;
    m.c.top_p = 0;
    text[2] = generated(&m, &tok, prompt, n);
    m.c.top_p = 1;
    m.c.temperature = 3;
    text[3] = generated(&m, &tok, prompt, n);
    text[4] = generated(&m, &tok, prompt, n);
    // greedy by a whole forward pass for every token
    int32_t *x = (int32_t *)xalloc((size_t)T * sizeof *x);
    for (int64_t i = 0; i < n_prompt; i++) x[i] = (uint8_t)prompt[i];
    for (; at < T; at++) {
        run(&m, x, NULL, 0);
        int64_t best = 0;
        for (int64_t v = 1; v < c.V; v++)
            if (logits_at(&m, at - 1)[v] > logits_at(&m, at - 1)[best]) best = v;
        if (best == 256) break;
        x[at] = (int32_t)best;
    }
    char *raw = (char *)xalloc((size_t)at + 1);
    for (int64_t i = 0; i < at; i++) raw[i] = (char)x[i];
    FILE *f = tmpfile();
    print_utf8_safe(f, raw, (size_t)at); // raw bytes are printed as \xHH
    fprintf(f, "\n");
    long size = ftell(f);
    char *want = (char *)xalloc((size_t)size + 1);
    rewind(f);
    if (fread(want, 1, (size_t)size, f) != (size_t)size) die("cannot read a temporary file");
    fclose(f);
    check(!strcmp(text[0], want), "generation %s, prompt of %lld: temperature 0 is the argmax of a full pass", layers, (long long)n_prompt);
    check(!strcmp(text[1], want) && !strcmp(text[2], want), "generation %s: so are top-k 1 and top-p 0", layers);
    check(!strcmp(text[3], text[4]) && !strncmp(text[3], prompt, (size_t)n_prompt), "generation %s: the same seed gives the same text, after the prompt", layers);
    m.c.seed++;
    char *other = generated(&m, &tok, prompt, 40);
    m.c.seed++;
    char *third = generated(&m, &tok, prompt, 40);
    check(strcmp(other, third), "generation %s: another seed gives another text", layers);
    for (int i = 0; i < 5; i++) free(text[i]);
    free(other); free(third); free(want); free(raw); free(x); free(prompt);
    tokenizer_free(&tok);
    done(&m);
}

int main(int argc, char **argv) {
    const char *tmp = getenv("TMPDIR");
    seed = check_seed(argc, argv);
    snprintf(folder, sizeof folder, "%.200s/hyscale-test-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(folder)) die("cannot make a temporary folder %s", folder);
    test_matmul();
    threads(1); // but for test_threads: waiting threads would make this slow where the cores are shared
    test_exp();
    test_norms();
    test_rope();
    for (int round = 0; round < 3; round++) { // other sizes every time
        for (int kind = 0; kind < 3; kind++) {
            test_core("D", 0, 0, kind);
            test_core("DS", 1, 0, kind);
            test_core("DSSD", 1, 1, kind);
            test_core("FDS", 1, 1, kind);
        }
        test_core("F", 0, 0, 2);
        test_dense_equals_full("D", "F");
        test_dense_equals_full("DS", "FF");
        test_dense_equals_full("DFS", "FFF");
        test_window();
        test_causality("D", ri(2, 10));
        test_causality("DS", ri(2, 10));
        test_causality("DDSS", ri(2, 10));
        test_causality("F", ri(2, 10));
        test_documents("D", ri(40, 80), ri(2, 10));
        test_documents("DS", ri(40, 80), ri(2, 10));
        test_documents("FD", ri(300, 700), ri(10, 40)); // more keys than one chunk of scores
        test_batch("D");
        test_batch("DSF");
        test_incremental("D", ri(40, 80), ri(2, 10));
        test_incremental("DS", ri(40, 80), ri(2, 10));
        test_incremental("F", ri(40, 80), ri(2, 10));
        test_incremental("DSFD", ri(300, 400), ri(2, 40));
        test_threads("D");
        test_threads("DSF");
        test_selections();
        test_order();
        test_loss();
        test_empty_targets();
        test_recompute("D", "own");
        test_recompute("DSFDS", "own");
        test_recompute("DSS", "served");
        test_not_finite();
        test_accumulation();
        test_adamw();
        test_clipping();
        test_kl_off();
    }
    test_schedule();
    test_evaluate();
    test_permutation();
    test_loader();
    test_copy_task();
    test_checkpoint(0);
    test_checkpoint(1);
    test_keep();
    test_resume();
    test_generation("D", ri(1, 20));
    test_generation("DS", 256); // the last logits stand at the end of a chunk of the classifier
    test_generation("DF", 257);
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command)) die("cannot remove %s", folder);
    return check_summary();
}
