// The layer letters C, H, W (DeepSeek-V4) and Q (Qwen QSA), alone and mixed with D, S, F, in double: gradients against
// finite differences, every layer against a dense reference written from the published formulas, documents, causality,
// generation from the caches, thread counts, sinks, checkpoints, selection against a sort. Usage: test_letters [seed]
// The reference treats each document as a sequence of its own, so it knows neither batch rows nor pool numbers.
#define NO_MAIN
#include "../../train_cpu.c"
#include "model.h"

typedef char build_with_REAL_double[sizeof(real) == 8 ? 1 : -1];
enum { EOT = 3, MAX_LAYERS = 8, MAX_T = 1024 };
static const double TOLERANCE = 1e-6; // finite differences, relative to the largest gradient of the tensor

static Model m;
static int probes;                     // random elements of each tensor, besides the one of largest gradient
static int32_t *tokens, *targets;      // the rows: poisoning wipes the model's copy
static int32_t *chosen[MAX_LAYERS];    // the selection to hold on to
static char *positive;                 // which index dot products are positive at the point of the gradient

static void *copy_of(const void *p, size_t bytes) { return memcpy(xalloc(bytes), p, bytes); }

// Fill all buffers with NaN (integers: -1), as if a stranger had used the memory, and put the rows and constants back.
static void poison(void) {
    size_t bytes = (size_t)(ROPE_KINDS * m.T * m.c.rope) * sizeof(real);
    real *tables = (real *)copy_of(m.cos_sin, bytes);
    memset(m.arena.base, 0xff, m.arena.peak);
    memcpy(m.cos_sin, tables, bytes);
    free(tables);
    memcpy(m.tokens, tokens, (size_t)m.N * sizeof *tokens);
    memcpy(m.targets, targets, (size_t)m.N * sizeof *targets);
}

// Buffers for B rows of T tokens, poisoned; the parameters stay.
static void plan(int64_t B, int64_t T, int training) {
    activations_plan(&m, B, T, training, 0);
    free(m.all_logits);
    m.all_logits = (real *)xalloc((size_t)(m.N * m.c.V) * sizeof(real));
    poison();
}

// Rows of random tokens. style 0: one document a row, 1: a second one begins inside, 2: many short ones.
static void draw_rows(int64_t B, int64_t T, int style) {
    for (int64_t i = 0; i < B * T; i++) {
        do tokens[i] = (int32_t)below(m.c.V); while (tokens[i] == EOT);
        if (style == 2 && uniform() < 0.35) tokens[i] = EOT;
        targets[i] = uniform() < 0.2 ? -1 : (int32_t)below(m.c.V);
    }
    for (int64_t b = 0; style == 1 && T > 1 && b < B; b++) tokens[b * T + 1 + below(T - 1)] = EOT;
}

// A small model with parameters large enough that softmax, relu, gates and selection do something. Its RoPE bases and
// its epsilon are such that a wrong one shows at once. Later options win.
static void setup(const char *layers, int64_t B, int64_t T, int style, const char *more) {
    Config c;
    config_defaults(&c);
    config_set_all(&c, "hidden-size=20 num-attention-heads=4 head-dim=8 qk-rope-head-dim=4 q-lora-rank=10 sliding-window=3 csa-ratio=3 hca-ratio=5 qsa-ratio=3 "
                "o-groups=2 o-lora-rank=6 num-key-value-heads=2 index-n-heads=2 index-head-dim=6 index-topk=2 kv-lora-rank=12 qk-nope-head-dim=6 "
                "v-head-dim=5 intermediate-size=18 vocab-size=37 rms-norm-eps=1e-3 rope-theta=50 compress-rope-theta=8", "test");
    config_set_all(&c, more, "test");
    strcpy(c.layers, layers);
    c.L = (int64_t)strlen(layers);
    config_check(&c);
    model_build(&m, &c);
    model_init_params(&m, 1);
    m.eot = EOT;
    for (int i = 0; i < m.n_tensors; i++) {
        double scale = 0.2 + 0.1 * uniform();
        for (int64_t j = 0; j < m.tensors[i].size; j++) param(&m, i)[j] = (m.tensors[i].init < 0 ? 1 : 0) + scale * normal(); // the padding as well
    }
    tokens = (int32_t *)xalloc((size_t)(B * T) * sizeof *tokens);
    targets = (int32_t *)xalloc((size_t)(B * T) * sizeof *targets);
    draw_rows(B, T, style);
    plan(B, T, 1);
    for (int64_t l = 0; l < c.L; l++) chosen[l] = (int32_t *)xalloc((size_t)(m.N * c.topk) * sizeof(int32_t));
    positive = (char *)xalloc((size_t)(c.L * m.N * c.HI * T));
}

static void teardown(void) {
    for (int64_t l = 0; l < m.c.L; l++) free(chosen[l]);
    free(tokens);
    free(targets);
    free(positive);
    free(m.all_logits);
    model_free(&m);
}

static size_t sel_bytes(void) { return (size_t)(m.N * m.c.topk) * sizeof(int32_t); }
static void keep_selection(void) {
    for (int64_t l = 0; l < m.c.L; l++)
        if (m.layers[l].sel) memcpy(chosen[l], m.layers[l].sel, sel_bytes());
}

// Fresh gradients of loss_scale * language loss + kl_scale * KL.
static void gradients(double loss_scale, double kl_scale) {
    m.learning = 1;
    m.loss_scale = loss_scale;
    m.kl_scale = kl_scale;
    memset(m.grads, 0, (size_t)m.n_params * sizeof(real));
    model_forward(&m);
    model_backward(&m);
}

// The logits of B rows of T, in a new buffer. Evaluates with buffers as for generation or as for training.
static real *logits_of(int64_t B, int64_t T, const int32_t *row, int training) {
    memcpy(tokens, row, (size_t)(B * T) * sizeof *tokens);
    plan(B, T, training);
    m.learning = 0;
    model_forward(&m);
    return (real *)copy_of(m.all_logits, (size_t)(m.N * m.c.V) * sizeof(real));
}

// Where in its row the document of row i begins.
static int64_t doc_of(int64_t i) {
    int64_t t = i % m.T;
    while (t > 0 && tokens[i / m.T * m.T + t] != EOT) t--;
    return t;
}

// Tokens of a candidate of a layer; 0: it has none.
static int64_t ratio_of(char letter) { return letter == 'C' ? m.c.csa_ratio : letter == 'H' ? m.c.hca_ratio : letter == 'Q' ? m.c.qsa_ratio : letter == 'W' ? 0 : 1; }

// ----------------------------------------------------------------------------
// 1. The two losses from their definitions, and finite differences

// Sum of -log softmax(logits)[target] over the rows that have a target.
static double language_loss(void) {
    double total = 0;
    for (int64_t i = 0; i < m.N; i++) {
        const real *z = m.all_logits + i * m.c.V;
        double top = -INFINITY, sum = 0;
        if (targets[i] < 0) continue;
        for (int64_t v = 0; v < m.c.V; v++) top = fmax(top, z[v]);
        for (int64_t v = 0; v < m.c.V; v++) sum += exp(z[v] - top);
        total += top + log(sum) - z[targets[i]];
    }
    return total;
}

static double dot(const real *a, const real *b, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

// Sum over rows and D, C, Q layers of KL(p || softmax(I)) (DESIGN.md, section 4) over the chosen candidates, in the dense
// stage over all complete ones. p: each head's softmax over all it attends to and the sink; the mass of a candidate
// summed over heads (Q: the largest of its tokens), normalised. row[N], unless NULL, takes each row's part. With bend = 0
// every relu stays on the side it was on at the last call with bend = 1, so that differences of any width are smooth.
static double index_loss(double *row, int bend) {
    const Config *c = &m.c;
    double total = 0;
    char *side = positive;
    for (int64_t i = 0; row && i < m.N; i++) row[i] = 0;
    for (int64_t l = 0; l < c->L; l++) {
        const Layer *y = &m.layers[l];
        char a = c->layers[l];
        if (!strchr("DCQ", a)) continue;
        int64_t r = ratio_of(a), unit = a == 'Q' ? r : 1, R = a == 'D' ? c->kv_lora + c->rope : a == 'C' ? c->head_dim : 2 * c->kv_heads * c->head_dim;
        int64_t key = a == 'D' ? R : c->head_dim;
        for (int64_t i = 0; i < m.N; i++) {
            int64_t b = i / m.T, d = doc_of(i), t = i % m.T - d, from = a == 'C' ? max64(0, t + 1 - c->window) : a == 'Q' ? (t + 1) / r * r : t + 1;
            int64_t n = 0, place[MAX_T], fixed = 0, at[MAX_T];
            if (m.dense) for (n = 0; n < (t + 1) / r; n++) place[n] = n;
            else for (n = 0; n < c->topk && y->sel[i * c->topk + n] >= 0; n++) place[n] = y->sel[i * c->topk + n] - d / r;
            if (!n) continue; // nothing to learn from
            for (int64_t s = from; s <= t; s++) at[fixed++] = d + s;
            for (int64_t j = 0; j < n; j++)
                for (int64_t u = 0; u < unit; u++) at[fixed + j * unit + u] = a == 'C' ? m.T + d / r + place[j] : d + place[j] * unit + u;
            double mass[MAX_T] = {0}, e[MAX_T], p[MAX_T] = {0}, score[MAX_T] = {0}, p_sum = 0, sum = 0, kl = 0;
            for (int64_t h = 0; h < c->H; h++) {
                int64_t group = a == 'Q' ? h / (c->H / c->kv_heads) : 0;
                double z = a == 'C' ? exp(param(&m, y->sinks)[h]) : 0;
                for (int64_t j = 0; j < fixed + n * unit; j++)
                    z += e[j] = exp(y->scale * dot(y->qrow + (i * c->H + h) * key, y->rows + (b * y->n_rows + at[j]) * R + group * key, key));
                for (int64_t j = 0; j < n * unit; j++) mass[j] += e[fixed + j] / z;
            }
            for (int64_t j = 0; j < n * unit; j++) p[j / unit] = fmax(p[j / unit], mass[j]);
            for (int64_t j = 0; j < n; j++) p_sum += p[j];
            for (int64_t h = 0; h < c->HI; h++) {
                for (int64_t j = 0; j < n; j++, side++) {
                    double x = dot(y->q_index + (i * c->HI + h) * c->DI, y->k_index + (b * y->n_cand + d / r + place[j]) * c->DI, c->DI);
                    if (bend) *side = x > 0;
                    score[j] += *side ? y->w_index[i * c->HI + h] * x : 0;
                }
            }
            for (int64_t j = 0; j < n; j++) sum += exp(score[j]);
            for (int64_t j = 0; j < n; j++) kl += p[j] / p_sum * (log(p[j] / p_sum) - (score[j] - log(sum)));
            total += kl;
            if (row) row[i] += kl;
        }
    }
    return total;
}

// Fourth-order central difference of a loss along one parameter, the selection held.
static double difference(int tensor, int64_t e, int kl) {
    static const int steps[4] = {2, 1, -1, -2};
    real *p = param(&m, tensor) + e, at = *p;
    double f[4], h = 3e-5;
    m.learning = 0;
    for (int j = 0; j < 4; j++) {
        *p = at + steps[j] * h;
        model_forward(&m);
        f[j] = kl ? m.kl_scale * index_loss(NULL, 0) : m.loss_scale * language_loss();
    }
    *p = at;
    return (8 * (f[1] - f[2]) - (f[0] - f[3])) / (12 * h);
}

// Gradients of the language loss (kl = 0, the main tensors) or the KL (kl = 1, the index tensors) against differences.
// The other tensors must receive exactly nothing.
static void compare(int kl, const char *what) {
    int64_t n_targets = 0, leaked = 0, not_finite = 0;
    int tensors = 0, worst_tensor = -1;
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < m.N; i++) n_targets += targets[i] >= 0;
    m.fixed_selection = 1;
    gradients(kl ? 0 : 1.0 / (double)n_targets, kl ? 1.0 / (double)m.N : 0);
    real *g = (real *)copy_of(m.grads, (size_t)m.n_params * sizeof(real));
    index_loss(NULL, 1);
    for (int64_t j = 0; j < m.n_params; j++) {
        not_finite += !isfinite(g[j]);
        largest = fmax(largest, fabs(g[j]));
    }
    for (int i = 0; i < m.n_tensors; i++) {
        const Tensor *t = &m.tensors[i];
        int64_t top = 0;
        for (int64_t j = 0; j < t->size; j++) {
            leaked += t->index != kl && g[t->offset + j] != 0;
            if (fabs(g[t->offset + j]) > fabs(g[t->offset + top])) top = j;
        }
        if (t->index != kl) continue;
        double scale = fabs(g[t->offset + top]) + 1e-4 * largest;
        for (int j = 0; j <= probes; j++) {
            int64_t e = j ? below(t->size) : top;
            double slope = difference(i, e, kl), error = fabs(slope - g[t->offset + e]) / scale;
            if (!(error <= TOLERANCE)) printf("  %s[%lld]: gradient %.10g, difference %.10g\n", t->name, (long long)e, g[t->offset + e], slope);
            if (!(error <= worst)) { worst = error; worst_tensor = i; }
        }
        tensors++;
    }
    check(worst <= TOLERANCE && not_finite == 0 && largest > 1e-5 && leaked == 0, "%s: %d tensors, largest gradient %.1e, worst difference %.1e (%s), %lld elements of others",
          what, tensors, largest, worst, worst_tensor < 0 ? "-" : m.tensors[worst_tensor].name, (long long)leaked);
    m.fixed_selection = 0;
    free(g);
}

// row_kl as the model reports it (float), evaluating and learning, against the definition.
static void compare_reported(const char *what) {
    double *kl = (double *)xalloc((size_t)m.N * sizeof(double)), worst = 0;
    m.fixed_selection = 1;
    for (int learning = 0; learning < 2; learning++) {
        memset(m.row_kl, 0x7f, (size_t)m.N * sizeof(float));
        m.learning = learning;
        m.kl_scale = m.loss_scale = 1;
        model_forward(&m);
        if (learning) model_backward(&m);
        index_loss(kl, 1);
        for (int64_t i = 0; i < m.N; i++) {
            double d = fabs(m.row_kl[i] - kl[i]);
            if (!(d <= worst)) worst = d;
        }
    }
    check(worst < 1e-6, "%s: the reported KL is the defined one (differs by %.1e)", what, worst);
    m.fixed_selection = 0;
    free(kl);
}

// Every query takes its document's first k candidates: the same few entries receive all gradients (faults 26 and 32).
static void select_hot(void) {
    for (int64_t l = 0; l < m.c.L; l++)
        for (int64_t i = 0, r = ratio_of(m.c.layers[l]); m.layers[l].sel && i < m.N; i++)
            for (int64_t j = 0, d = doc_of(i); j < m.c.topk; j++)
                m.layers[l].sel[i * m.c.topk + j] = j < (i % m.T - d + 1) / r ? (int32_t)(d / r + j) : -1;
}

// All comparisons for one pattern: sparse stage, dense stage, hot candidates.
static void test_differences(const char *layers, int64_t T, int some, const char *more) {
    static const char *const stages[] = {"sparse", "dense", "hot"};
    char what[200];
    int sparse = strpbrk(layers, "DCQ") != NULL;
    probes = some;
    setup(layers, T > 100 ? 1 : 2, T, 1, more);
    m.learning = 1;
    model_forward(&m);
    for (int stage = 0; stage < (sparse ? 3 : 1); stage++) {
        m.dense = stage == 1;
        if (stage == 2) select_hot();
        snprintf(what, sizeof what, "%s, T %lld, %s%s%s: language loss", layers, (long long)T, stages[stage], *more ? " " : "", more);
        if (T < 100 || stage == 0) compare(0, what);
        snprintf(strrchr(what, ':'), 20, ": KL");
        if (sparse) compare(1, what);
        if (sparse) compare_reported(what);
    }
    teardown();
}

// ----------------------------------------------------------------------------
// 2. The layers from the published formulas (DeepSeek-V4 report 2.3, Qwen QSA report 2.1.2), one document at a time

static double pool[1 << 20]; // memory of the reference
static int64_t pool_used;
static int64_t wrong_sets;   // queries whose selection is not the reference's, although the scores are apart

static double *take(int64_t n) {
    double *p = pool + pool_used;
    pool_used += n;
    if (pool_used > (int64_t)(sizeof pool / sizeof *pool)) die("test: the reference needs a larger pool");
    memset(p, 0, (size_t)n * sizeof *p);
    return p;
}

// A parameter of the layer's attention by its published name.
static const real *weight(const Layer *l, const char *name) {
    char full[200];
    snprintf(full, sizeof full, "model.layers.%d.self_attn.%s", (int)(l - m.layers), name);
    for (int i = 0; i < m.n_tensors; i++)
        if (!strcmp(m.tensors[i].name, full)) return param(&m, i);
    die("test: no tensor %s", full);
}

// x[n, in] W^T, W [out, in].
static double *project(const double *x, int64_t n, int64_t in, const real *w, int64_t out) {
    double *y = take(n * out);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < out; j++)
            for (int64_t k = 0; k < in; k++) y[i * out + j] += x[i * in + k] * w[j * in + k];
    return y;
}

// x / sqrt(mean x^2 + eps), times (plus + w) unless w is NULL.
static void rms(double *x, int64_t d, const real *w, double plus) {
    double s = 0;
    for (int64_t j = 0; j < d; j++) s += x[j] * x[j] / (double)d;
    for (int64_t j = 0; j < d; j++) x[j] *= (w ? plus + w[j] : 1) / sqrt(s + m.c.rms_eps);
}

// The pair that turns this many times over the original context (YaRN, Peng et al. 2023).
static double yarn_pair(double turns, double theta) { return (double)m.c.rope * log((double)m.c.rope_original / (turns * 2 * M_PI)) / (2 * log(theta)); }

// Turn pair j of x[rope] by pos * theta^(-2j/rope). split: pairs (j, j + rope/2), else (2j, 2j + 1). YaRN slows the pairs
// of C and H, never those of W, and leaves cos and sin their size (DeepSeek-V4).
static void turn(double *x, double pos, double theta, int split) {
    int64_t rope = m.c.rope;
    for (int64_t j = 0; j < rope / 2; j++) {
        double inv = pow(theta, -2.0 * (double)j / (double)rope);
        if (!strcmp(m.c.rope_type, "yarn") && theta == m.c.compress_theta) {
            double low = fmax(0, floor(yarn_pair(m.c.rope_beta_fast, theta))), high = fmin((double)rope - 1, ceil(yarn_pair(m.c.rope_beta_slow, theta)));
            double slow = fmin(1, fmax(0, ((double)j - low) / (high - low)));
            inv = slow * inv / m.c.rope_factor + (1 - slow) * inv;
        }
        double angle = pos * inv, *a = x + (split ? j : 2 * j), *b = x + (split ? j + rope / 2 : 2 * j + 1), t = *a;
        *a = t * cos(angle) - *b * sin(angle);
        *b = t * sin(angle) + *b * cos(angle);
    }
}

// Compressed entries [n / r, d] of x[n, C]: a softmax over slots for each channel, RMS, RoPE at the first own token. With
// overlap (C) projections are 2d wide: the slots are the previous window's tokens with the first half, then its own with
// the second half.
static double *compress(const double *x, int64_t n, int64_t r, int64_t d, int overlap, const real *wkv, const real *wgate, const real *ape, const real *norm) {
    int64_t wide = overlap ? 2 * d : d, first = overlap ? -r : 0;
    double *v = project(x, n, m.c.C, wkv, wide), *g = project(x, n, m.c.C, wgate, wide), *e = take(n / r * d);
    for (int64_t j = 0; j < n / r; j++) {
        for (int64_t ch = 0; ch < d; ch++) {
            double sum = 0;
            for (int64_t s = first; s < r; s++) {
                int64_t token = j * r + s, at = token * wide + (overlap && s >= 0 ? d : 0) + ch;
                if (token < 0) continue;
                double p = exp(g[at] + ape[token % r * wide + at % wide]);
                sum += p;
                e[j * d + ch] += p * v[at];
            }
            e[j * d + ch] /= sum;
        }
        rms(e + j * d, d, norm, 0);
        turn(e + j * d + d - m.c.rope, (double)(j * r), m.c.compress_theta, 0);
    }
    return e;
}

// Index scores I[n, E] of a C or Q layer. qr: C's query latent.
static double *scores_of(const Layer *l, const double *x, const double *qr, int64_t n, int64_t r) {
    const Config *c = &m.c;
    int64_t HI = c->HI, DI = c->DI, E = n / r;
    double *score = take(n * E), *q = take(n * HI * DI), *w = take(n * HI), *k;
    if (l->letter == 'C') {
        q = project(qr, n, c->q_lora, weight(l, "compressor.indexer.q_b_proj.weight"), HI * DI);
        w = project(x, n, c->C, weight(l, "compressor.indexer.scorer.weights_proj.weight"), HI);
        k = compress(x, n, r, DI, 1, weight(l, "compressor.indexer.kv_proj.weight"), weight(l, "compressor.indexer.gate_proj.weight"),
                     weight(l, "compressor.indexer.position_bias"), weight(l, "compressor.indexer.kv_norm.weight"));
        for (int64_t i = 0; i < n * HI; i++) turn(q + (i + 1) * DI - c->rope, (double)(i / HI), c->compress_theta, 0);
        for (int64_t i = 0; i < n * HI; i++) w[i] /= sqrt((double)(HI * DI));
    } else {
        double *raw = project(x, n, c->C, weight(l, "indexer.index_qk_proj.weight"), (HI + 1) * DI);
        k = take(E * DI);
        for (int64_t i = 0; i < n * HI; i++) {
            memcpy(q + i * DI, raw + i / HI * (HI + 1) * DI + i % HI * DI, (size_t)DI * sizeof *q);
            rms(q + i * DI, DI, weight(l, "indexer.q_layernorm.weight"), 1);
            turn(q + i * DI, (double)(i / HI), c->rope_theta, 1);
            w[i] = 1 / sqrt((double)DI);
        }
        for (int64_t e = 0; e < E; e++) {
            for (int64_t s = e * r; s < (e + 1) * r; s++)
                for (int64_t d = 0; d < DI; d++) k[e * DI + d] += raw[s * (HI + 1) * DI + HI * DI + d] / (double)r;
            rms(k + e * DI, DI, weight(l, "indexer.k_layernorm.weight"), 1);
            turn(k + e * DI, (double)(e * r), c->rope_theta, 1);
        }
    }
    for (int64_t t = 0; t < n; t++)
        for (int64_t e = 0; e < E; e++)
            for (int64_t h = 0; h < HI; h++) score[t * E + e] += w[t * HI + h] * fmax(0, dot(q + (t * HI + h) * DI, k + e * DI, DI));
    return score;
}

// in[E] = 1 for the k best (score, then lowest index) of the first n entries of score. The model's set is compared and
// wins where float scores may fall either way.
static void choose(const double *score, int64_t n, const int32_t *sel, int64_t base, char *in) {
    int64_t k = min64(m.c.topk, n), same = 1;
    char own[MAX_T] = {0};
    double last = 0, next = -INFINITY;
    for (int64_t j = 0; j < k; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < n; e++)
            if (!own[e] && (best < 0 || score[e] > score[best])) best = e;
        own[best] = 1;
        last = score[best];
    }
    for (int64_t e = 0; e < n; e++)
        if (!own[e]) next = fmax(next, score[e]);
    for (int64_t j = 0, before = -1; j < m.c.topk; j++) {
        int64_t e = sel[j] < 0 ? -1 : sel[j] - base;
        same &= j < k ? e > before && e < n && own[e] : sel[j] == -1;
        if (j < k && e > before && e < n) in[e] = 1;
        before = e;
    }
    wrong_sets += !same && (last - next > 1e-5 || (last == 0 && next == 0));
}

// y[n, C] and kl[n] of layer l for one document x[n, C] that stands at rows i0.. of the model (its selection is read
// there). all: every complete candidate is attended to. Masks over all positions, one query after the other.
static void reference(const Layer *l, int64_t i0, int64_t n, const double *x, int all, double *y, double *kl) {
    const Config *c = &m.c;
    char a = l->letter;
    int v4 = a != 'Q', sparse = a == 'C' || a == 'Q';
    int64_t H = c->H, D = c->head_dim, G = v4 ? 1 : c->kv_heads, r = ratio_of(a), E = r ? n / r : 0, S = n + (v4 ? E : 0), wide = H * D / c->o_groups;
    double theta = a == 'C' || a == 'H' ? c->compress_theta : c->rope_theta, *q, *k, *v, *qr = NULL, *gate = NULL, *score = NULL, *o;
    pool_used = 0;
    o = take(n * H * D);
    if (v4) {
        qr = project(x, n, c->C, weight(l, "q_a_proj.weight"), c->q_lora);
        for (int64_t t = 0; t < n; t++) rms(qr + t * c->q_lora, c->q_lora, weight(l, "q_a_norm.weight"), 0);
        q = project(qr, n, c->q_lora, weight(l, "q_b_proj.weight"), H * D);
        double *kv = project(x, n, c->C, weight(l, "kv_proj.weight"), D);
        for (int64_t t = 0; t < n; t++) {
            rms(kv + t * D, D, weight(l, "kv_norm.weight"), 0);
            turn(kv + (t + 1) * D - c->rope, (double)t, theta, 0);
            for (int64_t h = 0; h < H; h++) {
                rms(q + (t * H + h) * D, D, NULL, 0);
                turn(q + (t * H + h + 1) * D - c->rope, (double)t, theta, 0);
            }
        }
        k = v = take(S * D);
        memcpy(k, kv, (size_t)(n * D) * sizeof *k);
        if (E) memcpy(k + n * D, compress(x, n, r, D, a == 'C', weight(l, "compressor.kv_proj.weight"), weight(l, "compressor.gate_proj.weight"),
                                          weight(l, "compressor.position_bias"), weight(l, "compressor.kv_norm.weight")), (size_t)(E * D) * sizeof *k);
    } else {
        double *both = project(x, n, c->C, weight(l, "q_proj.weight"), 2 * H * D);
        q = take(n * H * D);
        gate = take(n * H * D);
        k = project(x, n, c->C, weight(l, "k_proj.weight"), G * D);
        v = project(x, n, c->C, weight(l, "v_proj.weight"), G * D);
        for (int64_t i = 0; i < n * H; i++) {
            memcpy(q + i * D, both + 2 * i * D, (size_t)D * sizeof *q);
            memcpy(gate + i * D, both + (2 * i + 1) * D, (size_t)D * sizeof *q);
            rms(q + i * D, D, weight(l, "q_norm.weight"), 1);
            turn(q + i * D, (double)(i / H), theta, 1);
        }
        for (int64_t i = 0; i < n * G; i++) {
            rms(k + i * D, D, weight(l, "k_norm.weight"), 1);
            turn(k + i * D, (double)(i / G), theta, 1);
        }
    }
    if (sparse) score = scores_of(l, x, qr, n, r);
    for (int64_t t = 0; t < n; t++) {
        char in[MAX_T] = {0};
        double mass[MAX_T] = {0}, p[MAX_T], block[MAX_T] = {0}, block_sum = 0, exp_sum = 0;
        for (int64_t e = 0; e < E; e++) in[e] = (all || a == 'H') && r * (e + 1) - 1 <= t; // complete: its last token is at or before t
        if (sparse && !all) choose(score + t * E, (t + 1) / r, l->sel + (i0 + t) * c->topk, i0 % m.T / r, in);
        for (int64_t h = 0; h < H; h++) {
            double z = v4 ? exp(weight(l, "sinks")[h]) : 0;
            for (int64_t s = 0; s < S; s++) {
                int sees = v4 ? (s < n ? s <= t && s > t - c->window : in[s - n]) : s <= t && (s >= (t + 1) / r * r || in[s / r]);
                p[s] = sees ? exp(dot(q + (t * H + h) * D, k + (s * G + h / (H / G)) * D, D) / sqrt((double)D)) : 0;
                z += p[s];
            }
            for (int64_t s = 0; s < S; s++) {
                mass[s] += p[s] / z;
                for (int64_t d = 0; d < D; d++) o[(t * H + h) * D + d] += p[s] / z * v[(s * G + h / (H / G)) * D + d];
            }
            double *oh = o + (t * H + h) * D;
            if (v4) turn(oh + D - c->rope, -(double)t, theta, 0);
            for (int64_t d = 0; !v4 && d < D; d++) oh[d] /= 1 + exp(-gate[(t * H + h) * D + d]);
        }
        kl[t] = 0;
        for (int64_t s = v4 ? n : 0; s < S; s++) {
            int64_t e = v4 ? s - n : s / r;
            if (e < E && in[e]) block[e] = fmax(block[e], mass[s]);
        }
        for (int64_t e = 0; sparse && e < E; e++) block_sum += block[e], exp_sum += in[e] ? exp(score[t * E + e]) : 0;
        for (int64_t e = 0; sparse && e < E; e++)
            if (in[e]) kl[t] += block[e] / block_sum * (log(block[e] / block_sum) - score[t * E + e] + log(exp_sum));
    }
    double *out;
    if (v4) {
        double *mid = take(n * c->o_groups * c->o_lora);
        for (int64_t t = 0; t < n; t++)
            for (int64_t j = 0; j < c->o_groups * c->o_lora; j++)
                mid[t * c->o_groups * c->o_lora + j] = dot(weight(l, "o_a_proj.weight") + j * wide, o + t * H * D + j / c->o_lora * wide, wide);
        out = project(mid, n, c->o_groups * c->o_lora, weight(l, "o_b_proj.weight"), c->C);
    } else out = project(o, n, H * D, weight(l, "o_proj.weight"), c->C);
    memcpy(y, out, (size_t)(n * c->C) * sizeof *y);
}

// attention_forward of layer 0 from random normed inputs, against the reference document by document. Adds to the worst
// differences. full: the reference attends to everything, though the model selects.
static void compare_layer(int full, double *worst_y, double *worst_kl) {
    Layer *l = &m.layers[0];
    int64_t C = m.c.C;
    double *y = (double *)xalloc((size_t)(m.T * C) * sizeof *y), *kl = (double *)xalloc((size_t)m.T * sizeof *kl);
    poison();
    find_documents(&m);
    for (int64_t i = 0; i < m.N * C; i++) l->xn[i] = normal();
    memset(m.row_kl, 0, (size_t)m.N * sizeof *m.row_kl);
    m.learning = 0;
    attention_forward(&m, l);
    for (int64_t i = 0, n; i < m.N; i += n) {
        for (n = 1; (i + n) % m.T && tokens[i + n] != EOT; n++) ;
        reference(l, i, n, l->xn + i * C, full || m.dense, y, kl);
        for (int64_t j = 0; j < n * C; j++) {
            double d = fabs(m.y[i * C + j] - y[j]);
            if (!(d <= *worst_y)) *worst_y = d;
        }
        for (int64_t j = 0; j < n; j++) {
            double d = fabs(m.row_kl[i + j] - kl[j]) / (1 + kl[j]);
            if (!(d <= *worst_kl)) *worst_kl = d;
        }
    }
    free(y);
    free(kl);
}

// One letter at all lengths, ratios, arrangements of documents, each in the sparse and the dense stage; the other sizes
// are drawn: window, k, heads, groups, head sizes (4: all of it is rotated).
static void test_layer(const char *letter) {
    static const int64_t lengths[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31}, ratios[] = {2, 3, 4, 8}, windows[] = {1, 2, 5, 40}, ks[] = {1, 2, 4, 20};
    double worst_y = 0, worst_kl = 0, worst_full = 0;
    int64_t cases = 0, n_full = 0;
    char more[400];
    wrong_sets = 0;
    for (size_t n = 0; n < 2 * sizeof lengths / sizeof *lengths; n++) {
        for (int r = 0; r < (*letter == 'W' ? 1 : 4); r++) {
            for (int style = 0; style < 3; style++) {
                int64_t k = ks[below(4)], T = lengths[n / 2];
                snprintf(more, sizeof more, "csa-ratio=%lld hca-ratio=%lld qsa-ratio=%lld sliding-window=%lld index-topk=%lld num-key-value-heads=%d o-groups=%d head-dim=%d "
                         "index-head-dim=%d index-n-heads=%d", (long long)ratios[r], (long long)ratios[r], (long long)ratios[r], (long long)windows[below(4)], (long long)k,
                         1 << below(3), 1 << below(3), (int)(4 + below(6)), (int)(4 + below(6)), (int)(1 + below(5)));
                setup(letter, 2, T, style, more);
                for (m.dense = 0; m.dense < 2; m.dense++, cases++) compare_layer(0, &worst_y, &worst_kl);
                m.dense = 0;
                if (strchr("CQ", *letter) && k >= T / ratios[r]) {
                    compare_layer(1, &worst_full, &worst_kl);
                    n_full++;
                }
                teardown();
            }
        }
    }
    check(worst_y < 1e-9, "%s: %lld layers as the published formulas, worst difference %.1e", letter, (long long)cases, worst_y);
    if (!strchr("CQ", *letter)) return;
    check(worst_full < 1e-9 && n_full, "%s: k at least the number of candidates attends to everything (%lld layers, %.1e)", letter, (long long)n_full, worst_full);
    check(worst_kl < 1e-6, "%s: KL as defined, worst difference %.1e", letter, worst_kl);
    check(wrong_sets == 0, "%s: selections are the k best of the reference's scores (%lld are not)", letter, (long long)wrong_sets);
}

// The same with YaRN.
static void test_yarn(const char *letter, const char *more) {
    char with[300];
    double worst_y = 0, worst_kl = 0;
    snprintf(with, sizeof with, "rope-type=yarn rope-factor=8 rope-original=64 rope-beta-fast=4 rope-beta-slow=0.5 qk-rope-head-dim=8 head-dim=12 index-head-dim=8 %s", more);
    setup(letter, 2, 31, 1, with);
    compare_layer(0, &worst_y, &worst_kl);
    check(worst_y < 1e-9 && worst_kl < 1e-6, "%s, YaRN%s%s: as published, worst differences %.1e, KL %.1e", letter, *more ? " " : "", more, worst_y, worst_kl);
    teardown();
}

// ----------------------------------------------------------------------------
// 3 to 6. Documents, causality, batches, generation, threads

// Two documents in one row give bit for bit what each gives at the start of a row of its own.
static void test_documents(const char *layers) {
    int64_t wrong = 0, V;
    for (int64_t first = 1; first <= 14; first += 1 + below(2)) {
        int64_t T = 29, second = T - first;
        int32_t row[29], rows[2 * 29];
        setup(layers, 2, T, 0, "");
        V = m.c.V;
        memcpy(row, tokens, sizeof row);
        memcpy(rows, tokens, sizeof rows); // behind the document stands whatever there is
        row[first] = EOT;
        memcpy(rows, row, (size_t)first * sizeof *row);
        memcpy(rows + T, row + first, (size_t)second * sizeof *row);
        real *together = logits_of(1, T, row, 1), *apart = logits_of(2, T, rows, 1);
        wrong += memcmp(together, apart, (size_t)(first * V) * sizeof(real)) != 0;
        wrong += memcmp(together + first * V, apart + T * V, (size_t)(second * V) * sizeof(real)) != 0;
        free(together);
        free(apart);
        teardown();
    }
    check(wrong == 0, "%s: documents that share a row give what each gives alone, bit for bit (%lld do not)", layers, (long long)wrong);
}

// Later tokens change no earlier logits, and the other rows of a batch none; each must change something of its own.
static void test_causality(const char *layers, int style) {
    int64_t T = 23, B = 3, wrong = 0, blind = 0;
    setup(layers, B, T, style, "");
    int64_t V = m.c.V;
    int32_t *row = (int32_t *)copy_of(tokens, (size_t)(B * T) * sizeof *row);
    real *base = logits_of(B, T, row, 1);
    for (int64_t b = 0; b < B; b++) {
        real *alone = logits_of(1, T, row + b * T, 0); // other buffers as well: those of generation
        wrong += memcmp(alone, base + b * T * V, (size_t)(T * V) * sizeof(real)) != 0;
        free(alone);
    }
    for (int64_t t = 1; t < T; t++) {
        int32_t *other = (int32_t *)copy_of(row, (size_t)(B * T) * sizeof *row);
        for (int64_t s = t; s < T; s++) other[T + s] = s == t ? (row[T + t] + 1 == EOT ? EOT + 1 : row[T + t] + 1) % (int32_t)V : (int32_t)below(V); // a new document now and then
        real *got = logits_of(B, T, other, 1);
        wrong += memcmp(got, base, (size_t)((T + t) * V) * sizeof(real)) != 0;
        wrong += memcmp(got + 2 * T * V, base + 2 * T * V, (size_t)(T * V) * sizeof(real)) != 0;
        blind += !memcmp(got + (T + t) * V, base + (T + t) * V, (size_t)V * sizeof(real));
        free(got);
        free(other);
    }
    check(wrong == 0 && blind == 0, "%s, documents %d: no logit depends on later tokens or other rows (%lld do, %lld ignore their own)", layers, style, (long long)wrong, (long long)blind);
    free(row);
    free(base);
    teardown();
}

// With k at least the number of candidates the selecting model is the one of the dense stage.
static void test_all_chosen(const char *layers) {
    setup(layers, 2, 37, 1, "index-topk=37");
    m.learning = 0;
    model_forward(&m);
    real *logits = (real *)copy_of(m.all_logits, (size_t)(m.N * m.c.V) * sizeof(real));
    double worst = 0;
    poison();
    m.dense = 1;
    model_forward(&m);
    for (int64_t i = 0; i < m.N * m.c.V; i++) {
        double d = fabs(logits[i] - m.all_logits[i]);
        if (!(d <= worst)) worst = d;
    }
    check(worst < 1e-12, "%s: everything chosen is the dense stage (differs by %.1e)", layers, worst);
    free(logits);
    teardown();
}

// A first part, then a token at a time (or a few) from the caches, gives what one pass gives, selections included.
static void test_incremental(const char *layers, int style) {
    int64_t T = 26, wrong = 0;
    double worst = 0;
    setup(layers, 1, T, style, "");
    int64_t V = m.c.V, k = m.c.topk;
    int32_t *row = (int32_t *)copy_of(tokens, (size_t)T * sizeof *row);
    real *whole = logits_of(1, T, row, 0);
    keep_selection();
    for (int64_t first = 1; first < T; first++) {
        plan(1, T, 0);
        memset(m.tokens, 0xff, (size_t)T * sizeof *row); // the tokens to come are not known yet
        m.learning = 0;
        for (int64_t done = 0; done < T; done += m.nr) {
            m.r0 = done;
            m.nr = done ? first % 3 ? 1 : min64(T - done, 1 + below(4)) : first;
            memcpy(m.tokens + done, row + done, (size_t)m.nr * sizeof *row);
            model_forward(&m);
            for (int64_t i = done * V; i < (done + m.nr) * V; i++) {
                double d = fabs(m.all_logits[i] - whole[i]);
                if (!(d <= worst)) worst = d;
            }
            for (int64_t l = 0; l < m.c.L; l++)
                wrong += m.layers[l].sel && memcmp(m.layers[l].sel + done * k, chosen[l] + done * k, (size_t)(m.nr * k) * sizeof(int32_t)) != 0;
        }
    }
    check(worst < 1e-12 && wrong == 0, "%s, documents %d: token by token as at once (differs by %.1e, %lld selections)", layers, style, worst, (long long)wrong);
    free(row);
    free(whole);
    teardown();
}

// Recomputation, replay and the number of threads give the same bits, whatever the buffers held before; the counter
// shows who scans the index scores again (faults 51 to 53). n_sparse: layers with an indexer.
static void test_same_bits(const char *layers, int n_sparse, int dense) {
    static const struct { const char *recompute, *store; int replay, threads; } runs[] = {
        {"none", "u16", 1, 1}, {"none", "u16", 1, 3}, {"block", "int32", 1, 1}, {"block", "u16", 1, 3}, {"block", "ef", 1, 1}, {"block", "u16", 0, 3}, {"block", "int32", 0, 1}, {"none", "u16", 1, 2}};
    char more[200];
    uint64_t keep_drawn = drawn;
    real *g = NULL, *logits = NULL;
    float *kl = NULL;
    for (size_t r = 0; r < sizeof runs / sizeof runs[0] - (size_t)dense; r++) { // two threads only once: they wait by spinning, slow on a busy machine
        drawn = keep_drawn; // the same parameters and rows again
        snprintf(more, sizeof more, "recompute=%s replay-store=%s replay=%d index-topk=5 sliding-window=7 index-target=%s", runs[r].recompute, runs[r].store, runs[r].replay, dense ? "served" : "own");
        threads(3); // buffers for three
        setup(layers, 2, 150, 1, more);
        threads(runs[r].threads);
        m.dense = dense;
        m.learning = 1;
        m.loss_scale = m.kl_scale = 1.0 / 300;
        model_forward(&m);
        int64_t between = m.index_scans;
        model_backward(&m);
        int64_t after = m.index_scans, again = !runs[r].replay && !dense ? n_sparse : 0;
        size_t bytes = (size_t)m.n_params * sizeof(real), logit_bytes = (size_t)(m.N * m.c.V) * sizeof(real), kl_bytes = (size_t)m.N * sizeof(float);
        if (!g) {
            g = (real *)copy_of(m.grads, bytes);
            logits = (real *)copy_of(m.all_logits, logit_bytes);
            kl = (float *)copy_of(m.row_kl, kl_bytes);
        }
        int same = !memcmp(g, m.grads, bytes) && !memcmp(logits, m.all_logits, logit_bytes) && !memcmp(kl, m.row_kl, kl_bytes), finite = 1;
        for (int64_t j = 0; j < m.n_params; j++) finite &= isfinite(m.grads[j]) != 0;
        check(same && finite && between == (dense ? 0 : n_sparse) && after - between == again, "%s%s, recompute %s, store %s, replay %d, %d threads: the same bits; %lld scans forward, %lld backward",
              layers, dense ? ", dense stage" : "", runs[r].recompute, runs[r].store, runs[r].replay, runs[r].threads, (long long)between, (long long)(after - between));
        threads(1);
        teardown();
    }
    free(g);
    free(logits);
    free(kl);
}

// ----------------------------------------------------------------------------
// 7. Sinks, empty lists

// Sum of dy * attention(xn) of layer 0, the selection held.
static double functional(const real *dy) {
    attention_forward(&m, &m.layers[0]);
    return dot(dy, m.y, m.N * m.c.C);
}

// Backward of one attention layer alone, all its main tensors and its input, against differences of a random functional
// of its output. Without the residual stream the result keeps its relative precision, however small a sink of 50 makes it.
static void test_sink(const char *letter, int64_t T, double sink, const char *more) {
    static const int steps[4] = {2, 1, -1, -2};
    setup(letter, 2, T, 0, more);
    Layer *l = &m.layers[0];
    int64_t C = m.c.C, not_finite = 0, leaked = 0;
    double worst = 0, largest_y = 0, sink_gradient = 0;
    for (int64_t h = 0; h < m.c.H; h++) param(&m, l->sinks)[h] = sink + 0.3 * normal();
    real *dy = (real *)xalloc((size_t)(m.N * C) * sizeof(real));
    find_documents(&m);
    for (int64_t i = 0; i < m.N * C; i++) { l->xn[i] = normal(); dy[i] = normal(); }
    memset(m.row_kl, 0, (size_t)m.N * sizeof *m.row_kl);
    memset(m.grads, 0, (size_t)m.n_params * sizeof(real));
    memset(m.d_qi, 0, (size_t)(m.N * m.c.HI * m.c.DI) * sizeof(real));
    memset(m.d_wi, 0, (size_t)(m.N * m.c.HI) * sizeof(real));
    memset(m.d_ki, 0, (size_t)(m.B * l->n_cand * m.c.DI) * sizeof(real));
    m.learning = 1;
    m.kl_scale = 1;
    attention_forward(&m, l);
    m.fixed_selection = 1;
    for (int64_t i = 0; i < m.N * C; i++) largest_y = fmax(largest_y, fabs(m.y[i]));
    attention_backward(&m, l, dy);
    real *dxn = (real *)copy_of(m.dxn, (size_t)(m.N * C) * sizeof(real));
    for (int64_t j = 0; j < m.n_params; j++) not_finite += !isfinite(m.grads[j]);
    for (int i = 0; i <= m.n_tensors; i++) { // one more: the input
        int input = i == m.n_tensors;
        if (!input && (m.tensors[i].index || !strstr(m.tensors[i].name, "self_attn"))) {
            for (int64_t j = 0; T < 3 && m.tensors[i].index && j < m.tensors[i].size; j++) leaked += grad(&m, i)[j] != 0; // no candidates: nothing to learn
            continue;
        }
        int64_t size = input ? m.N * C : m.tensors[i].size, top = 0;
        const real *g = input ? dxn : grad(&m, i);
        for (int64_t j = 0; j < size; j++) top = fabs(g[j]) > fabs(g[top]) ? j : top;
        if (i == l->sinks) sink_gradient = fabs(g[top]);
        for (int j = 0; j < 3; j++) {
            int64_t e = j ? below(size) : top;
            real *p = (input ? l->xn : param(&m, i)) + e, at = *p, f[4];
            for (int s = 0; s < 4; s++) {
                *p = at + steps[s] * 1e-4;
                f[s] = functional(dy);
            }
            *p = at;
            double slope = (8 * (f[1] - f[2]) - (f[0] - f[3])) / 12e-4, scale = fabs(g[top]) + 1e-3 * largest_y, error = fabs(slope - g[e]) / scale;
            if (!(error < TOLERANCE)) printf("  %s[%lld]: gradient %.10g, difference %.10g\n", input ? "input" : m.tensors[i].name, (long long)e, g[e], slope);
            if (!(error <= worst)) worst = error;
        }
    }
    check(worst < TOLERANCE && !not_finite && !leaked && sink_gradient > 0 && largest_y > 0 && (sink < 40 || largest_y < 1e-15),
          "%s, T %lld, sink %g%s%s: output %.1e, gradient of the sinks %.1e, worst difference %.1e", letter, (long long)T, sink, *more ? " " : "", more, largest_y, sink_gradient, worst);
    free(dy);
    free(dxn);
    teardown();
}

// A document of one token: W and C are p * value with p = e^z / (e^z + e^sink), so at equal logits half the value; the
// model as a whole stays finite, has no KL and leaves the indexers alone.
static void test_one_token(void) {
    int64_t wrong = 0;
    setup("WCHQ", 2, 1, 0, "");
    gradients(1, 1);
    for (int i = 0; i < m.n_tensors; i++)
        for (int64_t j = 0; j < m.tensors[i].size; j++) wrong += m.tensors[i].index ? grad(&m, i)[j] != 0 : !isfinite(grad(&m, i)[j]);
    for (int64_t i = 0; i < m.N; i++) wrong += m.row_kl[i] != 0;
    for (int64_t l = 1; l < 4; l += 2)
        for (int64_t j = 0; j < m.N * m.c.topk; j++) wrong += m.layers[l].sel[j] != -1;
    check(wrong == 0, "WCHQ, rows of one token: finite gradients, no candidates, no KL (%lld wrong)", (long long)wrong);
    double worst = 0;
    for (int64_t h = 0; h < m.c.H; h++) { // the sink at the query's own logit
        Layer *w = &m.layers[0];
        param(&m, w->sinks)[h] = w->scale * dot(w->qrow + h * w->Dk, w->rows, w->Dk);
    }
    model_forward(&m);
    for (int64_t h = 0; h < m.c.H; h++)
        for (int64_t d = 0; d < m.c.head_dim; d++) worst = fmax(worst, fabs(m.layers[0].oc[h * m.c.head_dim + d] - m.layers[0].rows[d] / 2));
    check(worst < 1e-14, "W, one token, sink equal to its logit: half the value (differs by %.1e)", worst);
    teardown();
}

// ----------------------------------------------------------------------------
// 8. Checkpoints

// Save, check and load a model of all letters bit by bit; config.json gives back every option of the model, and a model
// made from that file alone (as --generate does) has the same logits.
static void test_checkpoint(const char *layers) {
    char folder[] = "/tmp/test_letters_XXXXXX", dir[300], path[400], err[4096], value[300], other[300], tell[200] = "";
    int64_t step = 0, rows = 0, differ = 0, saved = 0;
    size_t len;
    setup(layers, 2, 21, 1, "hca-ratio=7 compress-rope-theta=123456.789 o-lora-rank=5 num-key-value-heads=4 sliding-window=9");
    if (!mkdtemp(folder)) die("test: no temporary folder");
    strcpy(m.c.out, folder);
    for (int64_t j = 0; j < m.n_params; j++) { m.m[j] = normal(); m.v[j] = uniform(); }
    for (int i = 0; i < m.n_tensors; i++) // padding is not saved: it is zero in a real run
        memset(param(&m, i) + m.tensors[i].saved_rows * m.tensors[i].cols, 0, (size_t)(m.tensors[i].size - m.tensors[i].saved_rows * m.tensors[i].cols) * sizeof(real));
    m.learning = 0;
    model_forward(&m);
    checkpoint_save(&m, 7, 99);
    snprintf(dir, sizeof dir, "%s/step_000007", folder);
    Json *state = checkpoint_check(dir, err, sizeof err);
    check(state != NULL, "%s: the checkpoint is whole %s", layers, state ? "" : err);
    Model n;
    model_build(&n, &m.c);
    model_init_params(&n, 1);
    if (state) checkpoint_load(&n, dir, state, &step, &rows);
    size_t bytes = (size_t)m.n_params * sizeof(real);
    check(step == 7 && rows == 99 && !memcmp(n.params, m.params, bytes) && !memcmp(n.m, m.m, bytes) && !memcmp(n.v, m.v, bytes), "%s: loaded bit by bit", layers);
    model_free(&n);
    snprintf(path, sizeof path, "%s/config.json", dir);
    char *text = file_read_all(path, &len, err, sizeof err);
    Json *j = text ? json_parse(text, len, err, sizeof err) : NULL;
    Config c;
    config_defaults(&c);
    if (j) config_read_arch(&c, j, path);
    for (int i = 0; i < N_OPTIONS; i++) {
        if (!(OPTIONS[i].flags & ARCH)) continue;
        saved++;
        if (!strcmp(config_text(&c, &OPTIONS[i], value), config_text(&m.c, &OPTIONS[i], other))) continue;
        differ++;
        snprintf(tell, sizeof tell, "%s: %.40s, read %.40s", OPTIONS[i].name, other, value);
    }
    check(j && differ == 0, "%s: config.json gives back all %lld options of the model %s", layers, (long long)saved, tell);
    config_check(&c);
    model_build(&n, &c);
    n.eot = EOT;
    model_init_params(&n, 0);
    load_params(&n, dir);
    activations_plan(&n, 2, 21, 0, 0);
    n.all_logits = (real *)xalloc((size_t)(n.N * c.V) * sizeof(real));
    memcpy(n.tokens, tokens, (size_t)n.N * sizeof *tokens);
    memset(n.targets, 0xff, (size_t)n.N * sizeof *tokens);
    model_forward(&n);
    check(!memcmp(n.all_logits, m.all_logits, (size_t)(n.N * c.V) * sizeof(real)), "%s: the model made from the folder has the same logits", layers);
    free(n.all_logits);
    model_free(&n);
    json_free(j);
    json_free(state);
    free(text);
    remove_checkpoint(dir);
    rmdir(folder);
    teardown();
}

// ----------------------------------------------------------------------------
// 9. Selection at scale

typedef struct { float score; int64_t index; } Candidate;

// qsort order: score down, then index up.
static int by_score(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->score != y->score ? (x->score > y->score ? -1 : 1) : x->index < y->index ? -1 : 1;
}
static int by_index(const void *a, const void *b) { return ((const Candidate *)a)->index < ((const Candidate *)b)->index ? -1 : 1; }

// Streaming and table against a sort of the visible scores. style 1: one document begins inside, 0: none; 3: several.
static void test_selection(const char *letter, int64_t r, int64_t heads, int style) {
    int64_t T = 600, k = 7, wrong = 0, ties = 0;
    char more[200];
    snprintf(more, sizeof more, "csa-ratio=%lld qsa-ratio=%lld index-topk=7 index-n-heads=%lld", (long long)r, (long long)r, (long long)heads);
    setup(letter, 2, T, style == 3 ? 0 : style, more);
    for (int j = 0; style == 3 && j < 6; j++) tokens[below(m.N)] = EOT;
    Layer *l = &m.layers[0];
    real *dots = (real *)xalloc((size_t)(heads * l->n_cand) * sizeof *dots);
    float *scores = (float *)xalloc((size_t)l->n_cand * sizeof *scores);
    Candidate *list = (Candidate *)xalloc((size_t)l->n_cand * sizeof *list);
    for (int table = 0; table < 2; table++) {
        strcpy(m.c.topk_method, table ? "table" : "hytopk");
        plan(2, T, 0);
        m.learning = 0;
        model_forward(&m);
        for (int64_t i = 0; i < m.N; i++) {
            int64_t d = doc_of(i), n = 0;
            index_scores(&m, l, i / T, i % T, 1, 0, l->n_cand, dots, scores);
            for (int64_t j = 0; d + (j + 1) * r - 1 <= i % T; j++) list[n++] = (Candidate){scores[d / r + j], d / r + j};
            qsort(list, (size_t)n, sizeof *list, by_score);
            ties += n > k && list[k - 1].score == list[k].score;
            qsort(list, (size_t)min64(n, k), sizeof *list, by_index);
            for (int64_t j = 0; j < k; j++) wrong += l->sel[i * k + j] != (j < n ? (int32_t)list[j].index : -1);
        }
    }
    check(wrong == 0, "%s, ratio %lld, %lld index heads, documents %d: streaming and table choose as a sort does (%lld wrong, %lld ties at the border)", letter, (long long)r,
          (long long)heads, style, (long long)wrong, (long long)ties);
    free(dots);
    free(scores);
    free(list);
    teardown();
}

int main(int argc, char **argv) {
    seed = check_seed(argc, argv);
    threads(1);
    static const char *const letters[] = {"C", "H", "W", "Q"}, *const all[] = {"C", "H", "W", "Q", "WCHQ", "DSCHQFW"};
    for (int i = 0; i < 4; i++) test_differences(letters[i], 19, 3, "");
    test_differences("WCHQ", 19, 1, "");
    test_differences("DSCHQFW", 19, 0, "");
    test_differences("CQ", 19, 1, "csa-ratio=1 qsa-ratio=1");
    test_differences("CQ", LANES * 16 + 30, 0, "index-topk=9"); // all lanes of the backward pass, which take turns
    for (int i = 0; i < 4; i++) test_layer(letters[i]);
    test_yarn("C", "");
    test_yarn("H", "");
    test_yarn("W", "");
    test_yarn("C", "rope-mscale=0.5");
    for (int i = 0; i < 6; i++) {
        test_documents(all[i]);
        test_causality(all[i], 1);
        test_causality(all[i], 2);
        test_all_chosen(all[i]);
        for (int style = 0; style < 3; style++) test_incremental(all[i], style);
    }
    test_same_bits("WCHQDS", 3, 0);
    test_same_bits("WCHQDS", 3, 1);
    test_same_bits("DCSQS", 3, 0); // S reads a selection that others have taken the place of
    for (int i = 0; i < 3; i++) {
        test_sink(letters[i], 1, 0, "");
        test_sink(letters[i], 2, 0, ""); // no entry is complete
        test_sink(letters[i], 17, -3, "");
        test_sink(letters[i], 17, 50, "");
        test_sink(letters[i], 17, 0, "sliding-window=1");
    }
    test_one_token();
    test_checkpoint("WCHQ");
    test_checkpoint("DSCHQFW");
    for (int i = 0; i < 4; i += 3) {
        test_selection(letters[i], 4, 2, 3);
        test_selection(letters[i], 4, 1, 3);
        test_selection(letters[i], 4, 2, 0);
        test_selection(letters[i], 2, 1, 1); // more pools than the buffer of a query holds
        test_selection(letters[i], 1, 2, 3);
        test_selection(letters[i], 1, 1, 0);
    }
    return check_summary();
}
