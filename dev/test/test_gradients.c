// Gradients of every parameter tensor against finite differences, in double: the language loss and the indexer's KL,
// for every layer letter, both model types, sparse and dense stage. Then what must not change a gradient: micro-batches,
// recomputation, thread count, earlier contents of the buffers. Usage: test_gradients [seed]
// The losses are computed here, in double, from logits, queries, rows and selections: the model keeps them in float.
#define NO_MAIN
#include "../../train_cpu.c"
#include "model.h"

enum { EOT = 3, MAX_LAYERS = 8 };
static const double TOLERANCE = 1e-6; // relative to the largest gradient of the tensor

static Model m;
static int probes = 3; // random elements of each tensor, besides the one of largest gradient
static int32_t *tokens, *targets;      // the rows: poisoning wipes the model's copy
static int32_t *chosen[MAX_LAYERS];    // the selection to hold on to
static char *positive;                 // which index dot products are positive at the point of the gradient
static int64_t reselected, moved;      // probes with the selection made anew; of these where it became another

// Fill all buffers with NaN (integers: -1), as if a stranger had used the memory, and put the rows and constants back.
static void poison(void) {
    memset(m.arena.base, 0xff, m.arena.peak);
    rope_tables(&m.c, m.T, m.cos_sin);
    memcpy(m.tokens, tokens, (size_t)m.N * sizeof *tokens);
    memcpy(m.targets, targets, (size_t)m.N * sizeof *targets);
}

static void keep_selection(void) {
    for (int64_t l = 0; l < m.c.L; l++)
        if (m.layers[l].sel) memcpy(chosen[l], m.layers[l].sel, (size_t)(m.N * m.c.topk) * sizeof(int32_t));
}
static void restore_selection(void) {
    for (int64_t l = 0; l < m.c.L; l++)
        if (m.layers[l].sel) memcpy(m.layers[l].sel, chosen[l], (size_t)(m.N * m.c.topk) * sizeof(int32_t));
}
static int same_selection(void) {
    int same = 1;
    for (int64_t l = 0; l < m.c.L; l++)
        if (m.layers[l].sel) same &= !memcmp(m.layers[l].sel, chosen[l], (size_t)(m.N * m.c.topk) * sizeof(int32_t));
    return same;
}

// Buffers for B rows of T tokens, taken from the row at first of those drawn by setup().
static void plan(int64_t B, int64_t T) {
    activations_plan(&m, B, T, 1, 0);
    free(m.all_logits);
    m.all_logits = (real *)xalloc((size_t)(m.N * m.c.V) * sizeof(real));
}

// A small model with parameters large enough that softmax, relu and selection do something, and rows with documents
// (one begins inside every row) and gaps in the targets.
static void setup(const char *type, const char *layers, int L, int64_t B, int64_t T, const char *more) {
    Config c;
    config_defaults(&c);
    config_set_all(&c, "hidden-size=20 num-attention-heads=3 q-lora-rank=14 kv-lora-rank=12 qk-nope-head-dim=6 qk-rope-head-dim=4 v-head-dim=5 "
                "intermediate-size=18 index-n-heads=3 index-head-dim=8 index-topk=5 vocab-size=37 doc-mask=1", "test");
    config_set_all(&c, more, "test");
    strcpy(c.model_type, type);
    strcpy(c.layers, layers);
    c.L = L;
    config_check(&c);
    model_build(&m, &c);
    model_init_params(&m, 1);
    m.eot = EOT;
    for (int i = 0; i < m.n_tensors; i++) {
        double scale = 0.2 + 0.1 * uniform();
        for (int64_t j = 0; j < m.tensors[i].size; j++) // the padding as well: it must have no part in anything
            param(&m, i)[j] = (real)((m.tensors[i].init < 0 ? 1 : 0) + scale * normal());
    }
    plan(B, T);
    tokens = (int32_t *)xalloc((size_t)m.N * sizeof *tokens);
    targets = (int32_t *)xalloc((size_t)m.N * sizeof *targets);
    for (int64_t i = 0; i < m.N; i++) tokens[i] = (int32_t)below(c.V);
    for (int64_t b = 0; b < B; b++) tokens[b * T + 1 + below(T / 2)] = EOT;
    for (int64_t i = 0; i < m.N; i++) targets[i] = uniform() < 0.2 ? -1 : (int32_t)below(c.V);
    for (int64_t l = 0; l < c.L; l++) chosen[l] = (int32_t *)xalloc((size_t)(m.N * c.topk) * sizeof(int32_t));
    positive = (char *)xalloc((size_t)(c.L * m.N * c.HI * T));
    poison();
}

static void teardown(void) {
    for (int64_t l = 0; l < m.c.L; l++) free(chosen[l]);
    free(tokens);
    free(targets);
    free(positive);
    free(m.all_logits);
    model_free(&m);
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

// ----------------------------------------------------------------------------
// The two losses, from their definitions

// Sum of -log softmax(logits)[target] over the rows that have a target.
static double language_loss(void) {
    double total = 0;
    for (int64_t i = 0; i < m.N; i++) {
        const real *z = m.all_logits + i * m.c.V;
        double top = -INFINITY, sum = 0;
        if (targets[i] < 0) continue;
        for (int64_t v = 0; v < m.c.V; v++) top = fmax(top, (double)z[v]);
        for (int64_t v = 0; v < m.c.V; v++) sum += exp((double)z[v] - top);
        total += top + log(sum) - (double)z[targets[i]];
    }
    return total;
}

static double dot(const real *a, const real *b, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += (double)a[i] * (double)b[i];
    return s;
}

// Sum over rows and D layers of KL(p || softmax(I)) (DESIGN.md, section 4): over all visible positions in the dense
// stage, else over the selected ones; p of a D layer alone, or averaged with the S layers it serves. row[N], unless
// NULL, takes each row's part. With bend = 0 every relu stays on the side it was on at the last call with bend = 1: near
// that point this is the same function, further away it has no kinks, so that differences of any width are smooth.
static double index_loss(double *row, int bend) {
    const Config *c = &m.c;
    int served = !strcmp(c->index_target, "served");
    double total = 0, *p = (double *)xalloc((size_t)m.T * 3 * sizeof(double)), *score = p + m.T, *head = score + m.T;
    char *side = positive;
    for (int64_t i = 0; row && i < m.N; i++) row[i] = 0;
    for (int64_t l = 0, source = -1; l < c->L; l++) {
        char letter = c->layers[l % (int64_t)strlen(c->layers)];
        if (letter == 'D') source = l;
        if (letter == 'F' || (letter == 'S' && !served)) continue;
        int64_t teachers = 1; // the source and, when served, the S layers up to the next D
        for (int64_t j = source + 1; served && j < c->L && c->layers[j % (int64_t)strlen(c->layers)] != 'D'; j++)
            teachers += c->layers[j % (int64_t)strlen(c->layers)] == 'S';
        const Layer *y = &m.layers[l], *d = &m.layers[source];
        int64_t start = 0, R = c->kv_lora + c->rope;
        for (int64_t i = 0; i < m.N; i++) {
            int64_t b = i / m.T, t = i % m.T, n;
            int32_t pos[256];
            if (t == 0 || tokens[i] == EOT) start = t;
            if (m.dense) for (n = 0; start + n <= t; n++) pos[n] = (int32_t)(start + n);
            else for (n = 0; n < c->topk && d->sel[i * c->topk + n] >= 0; n++) pos[n] = d->sel[i * c->topk + n];
            for (int64_t j = 0; j < n; j++) p[j] = score[j] = 0;
            for (int64_t h = 0; h < c->H; h++) {
                double sum = 0;
                for (int64_t j = 0; j < n; j++) sum += head[j] = exp(y->scale * dot(y->qrow + (i * c->H + h) * R, y->rows + (b * m.T + pos[j]) * R, R));
                for (int64_t j = 0; j < n; j++) p[j] += head[j] / sum / (double)c->H;
            }
            for (int64_t h = 0; h < c->HI; h++) {
                for (int64_t j = 0; j < n; j++, side++) {
                    double x = dot(d->q_index + (i * c->HI + h) * c->DI, d->k_index + (b * m.T + pos[j]) * c->DI, c->DI);
                    if (bend) *side = x > 0;
                    score[j] += *side ? (double)d->w_index[i * c->HI + h] * x : 0;
                }
            }
            double sum = 0, kl = 0;
            for (int64_t j = 0; j < n; j++) sum += exp(score[j]);
            for (int64_t j = 0; j < n; j++) kl += p[j] * (log(p[j]) - (score[j] - log(sum)));
            total += kl / (double)teachers;
            if (row) row[i] += kl / (double)teachers;
        }
    }
    free(p);
    return total;
}

// Run the model on the selection held and return the loss.
static double loss_at(int kl) {
    m.learning = 0;
    m.fixed_selection = 1;
    model_forward(&m);
    return kl ? m.kl_scale * index_loss(NULL, 0) : m.loss_scale * language_loss();
}

// ----------------------------------------------------------------------------
// Finite differences

// Fourth-order central difference of the loss along one parameter, the selection held. reselect: also make it anew at
// the outer points and count where it becomes another: there the held one is a device of the test, elsewhere it is
// what training sees.
static double difference(int tensor, int64_t e, int kl, int reselect) {
    static const int steps[4] = {2, 1, -1, -2};
    real *p = param(&m, tensor) + e, at = *p;
    double f[4], h = 3e-5;
    int same = 1;
    for (int j = 0; j < 4; j++) {
        *p = at + (real)(steps[j] * h);
        f[j] = loss_at(kl);
        if (!reselect || j % 3) continue;
        m.fixed_selection = 0;
        model_forward(&m);
        same &= same_selection();
        restore_selection();
    }
    *p = at;
    reselected += reselect;
    moved += !same;
    return (8 * (f[1] - f[2]) - (f[0] - f[3])) / (12 * h);
}

// Gradients of the language loss (kl = 0, the main tensors) or the KL (kl = 1, the index tensors) against differences.
// The other tensors must receive exactly nothing.
static void compare(int kl, int reselect, const char *what) {
    int64_t n_targets = 0, leaked = 0, not_finite = 0;
    int tensors = 0, worst_tensor = -1;
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < m.N; i++) n_targets += targets[i] >= 0;
    gradients(kl ? 0 : 1.0 / (double)n_targets, kl ? 1.0 / (double)m.N : 0);
    real *g = (real *)xalloc((size_t)m.n_params * sizeof(real));
    memcpy(g, m.grads, (size_t)m.n_params * sizeof(real));
    index_loss(NULL, 1);
    for (int64_t j = 0; j < m.n_params; j++) {
        not_finite += !isfinite(g[j]);
        largest = fmax(largest, fabs((double)g[j]));
    }
    for (int i = 0; i < m.n_tensors; i++) {
        const Tensor *t = &m.tensors[i];
        int64_t top = 0;
        for (int64_t j = 0; j < t->size; j++) {
            leaked += t->index != kl && g[t->offset + j] != 0;
            if (fabs((double)g[t->offset + j]) > fabs((double)g[t->offset + top])) top = j;
        }
        if (t->index != kl) continue;
        double scale = fabs((double)g[t->offset + top]) + 1e-4 * largest;
        for (int j = 0; j <= probes; j++) {
            int64_t e = j ? below(t->size) : top;
            double slope = difference(i, e, kl, reselect), error = fabs(slope - (double)g[t->offset + e]) / scale;
            if (!(error <= TOLERANCE)) printf("  %s[%lld]: gradient %.10g, difference %.10g\n", t->name, (long long)e, (double)g[t->offset + e], slope);
            if (!(error <= worst)) { worst = error; worst_tensor = i; }
        }
        tensors++;
    }
    check(worst <= TOLERANCE && not_finite == 0 && largest > 1e-5, "%s: %d tensors, largest gradient %.1e, worst difference %.1e (%s)", what, tensors, largest, worst,
          worst_tensor < 0 ? "-" : m.tensors[worst_tensor].name);
    check(leaked == 0, "%s: exactly nothing reaches the other tensors (%lld elements do)", what, (long long)leaked);
    free(g);
}

// row_kl and row_loss as the model reports them (float), evaluating and learning, against the definitions.
static void compare_reported(const char *what) {
    double *kl = (double *)xalloc((size_t)m.N * sizeof(double)), worst = 0, worst_loss = 0, total = 0, sum = 0;
    for (int learning = 0; learning < 2; learning++) {
        memset(m.row_kl, 0x7f, (size_t)m.N * sizeof(float));
        memset(m.row_loss, 0x7f, (size_t)m.N * sizeof(float));
        m.learning = learning;
        m.kl_scale = 1;
        model_forward(&m);
        if (learning) model_backward(&m);
        index_loss(kl, 1);
        sum = language_loss();
        total = 0;
        for (int64_t i = 0; i < m.N; i++) {
            double d = fabs((double)m.row_kl[i] - kl[i]);
            if (!(d <= worst)) worst = d;
            total += (double)m.row_loss[i];
            if (targets[i] < 0 && m.row_loss[i] != 0) worst_loss = INFINITY;
        }
        if (!(fabs(total - sum) / sum <= worst_loss)) worst_loss = fabs(total - sum) / sum;
    }
    check(worst < 1e-6 && worst_loss < 1e-6, "%s: reported losses are the defined ones (KL differs by %.1e, language loss by %.1e)", what, worst, worst_loss);
    free(kl);
}

// Every query takes the first k tokens of its document: the same few rows receive all gradients (faults 26 and 32).
static void select_hot(void) {
    find_documents(&m);
    for (int64_t l = 0; l < m.c.L; l++)
        for (int64_t i = 0; m.layers[l].sel && i < m.N; i++)
            for (int64_t j = 0; j < m.c.topk; j++) m.layers[l].sel[i * m.c.topk + j] = m.doc[i] + j <= i % m.T ? (int32_t)(m.doc[i] + j) : -1;
    keep_selection();
}

// All comparisons for one arrangement of layers.
static void test_differences(const char *type, const char *layers, int L, const char *more) {
    char what[400];
    int sparse = strchr(layers, 'D') != NULL;
    for (int served = 0; served < 1 + sparse; served++) {
        char with[200];
        snprintf(with, sizeof with, "%s index-target=%s", more, served ? "served" : "own");
        setup(type, layers, L, 2, 19, with);
        snprintf(what, sizeof what, "%s %s x%d%s%s %s", type, layers, L, *more ? " " : "", more, served ? "served" : "own");
        char *tail = what + strlen(what);
        size_t room = 100;
        m.fixed_selection = 0;
        m.learning = 1;
        model_forward(&m);
        keep_selection();
        m.fixed_selection = 1;
        if (!served) {
            snprintf(tail, room, ": language loss");
            compare(0, sparse, what);
        }
        if (sparse) {
            snprintf(tail, room, ": KL");
            compare(1, 1, what);
            compare_reported(what);
            m.dense = 1;
            snprintf(tail, room, ": KL, dense stage");
            compare(1, 0, what);
            compare_reported(what);
            if (!served) {
                snprintf(tail, room, ": language loss, dense stage");
                compare(0, 0, what);
            }
            m.dense = 0;
            select_hot();
            snprintf(tail, room, ": KL, hot keys");
            compare(1, 0, what);
            if (!served) {
                snprintf(tail, room, ": language loss, hot keys");
                compare(0, 0, what);
            }
        }
        teardown();
    }
}

// One row longer than all lanes of the backward pass together, so that they take turns; fewer probes, as it is slower.
static void test_long_row(void) {
    setup("deepseek_v32", "D", 1, 1, LANES * 16 + 30, "");
    probes = 1;
    m.fixed_selection = 0;
    model_forward(&m);
    keep_selection();
    compare(0, 0, "long row: language loss");
    compare(1, 0, "long row: KL");
    compare_reported("long row");
    probes = 3;
    teardown();
}

// ----------------------------------------------------------------------------
// What must not change a gradient

// Largest difference between the model's gradients and g, each relative to the largest of its tensor.
static double distance(const real *g) {
    double worst = 0;
    for (int i = 0; i < m.n_tensors; i++) {
        const Tensor *t = &m.tensors[i];
        double top = 0, diff = 0;
        for (int64_t j = t->offset; j < t->offset + t->size; j++) {
            double d = fabs((double)m.grads[j] - (double)g[j]);
            top = fmax(top, fabs((double)g[j]));
            if (!(d <= diff)) diff = d;
        }
        if (!(diff <= worst * top)) worst = diff / top;
    }
    return worst;
}

// Four rows as one micro-batch, or one at a time: scales count the whole step, so the sums agree (fault 41).
static void test_micro_batches(int dense) {
    setup("deepseek_v32", "DS", 4, 4, 70, "index-target=served");
    size_t bytes = (size_t)m.n_params * sizeof(real);
    real *g = (real *)xalloc(bytes);
    int32_t *all_tokens = tokens, *all_targets = targets;
    m.dense = dense;
    gradients(1.0 / 200, 1.0 / 280);
    memcpy(g, m.grads, bytes);
    plan(1, 70);
    memset(m.grads, 0, bytes);
    for (int64_t b = 0; b < 4; b++) {
        tokens = all_tokens + b * 70;
        targets = all_targets + b * 70;
        poison();
        model_forward(&m);
        model_backward(&m);
    }
    double d = distance(g);
    check(d < 1e-12, "4 micro-batches of 1 row as 1 of 4%s: gradients differ by %.1e", dense ? ", dense stage" : "", d);
    tokens = all_tokens;
    targets = all_targets;
    free(g);
    teardown();
}

// Recomputation, replay and the number of threads give the same bits, whatever the buffers held before; the counter
// shows who scans the index scores again. Evaluating gives the logits of learning (fault 52), recomputation counts the
// KL once (fault 53).
static void test_same_bits(const char *layers, int n_sparse, const char *target, int dense) {
    char more[100];
    uint64_t keep_seed = seed, keep_drawn = drawn;
    real *g = NULL, *logits = NULL;
    float *kl = NULL;
    static const struct { const char *recompute; int replay, threads; } runs[] = {
        {"none", 1, 1}, {"none", 1, 1}, {"none", 1, 3}, {"block", 1, 1}, {"block", 1, 2}, {"block", 0, 1}, {"block", 0, 3}};
    for (size_t r = 0; r < sizeof runs / sizeof runs[0]; r++) {
        seed = keep_seed;
        drawn = keep_drawn; // the same parameters and rows again
        snprintf(more, sizeof more, "index-target=%s recompute=%s replay=%d", target, runs[r].recompute, runs[r].replay);
        threads(3); // buffers for three
        setup("glm_moe_dsa", layers, 5, 2, 150, more);
        threads(runs[r].threads);
        m.dense = dense;
        m.learning = 1;
        m.loss_scale = m.kl_scale = 1.0 / 300;
        int64_t before = m.index_scans;
        model_forward(&m);
        int64_t between = m.index_scans;
        model_backward(&m);
        int64_t after = m.index_scans, again = !strcmp(runs[r].recompute, "block") && !runs[r].replay && !dense ? n_sparse : 0;
        size_t bytes = (size_t)m.n_params * sizeof(real), logit_bytes = (size_t)(m.N * m.c.V) * sizeof(real);
        if (!g) {
            g = (real *)xalloc(bytes);
            logits = (real *)xalloc(logit_bytes);
            kl = (float *)xalloc((size_t)m.N * sizeof(float));
            memcpy(g, m.grads, bytes);
            memcpy(logits, m.all_logits, logit_bytes);
            memcpy(kl, m.row_kl, (size_t)m.N * sizeof(float));
        }
        int same = !memcmp(g, m.grads, bytes) && !memcmp(logits, m.all_logits, logit_bytes) && !memcmp(kl, m.row_kl, (size_t)m.N * sizeof(float));
        check(same && isfinite(distance(g)), "%s %s%s, %d threads: gradients, logits and KL are the same bits", layers, more, dense ? ", dense stage" : "", runs[r].threads);
        check(between - before == (dense ? 0 : n_sparse) && after - between == again, "%s %s%s: %lld scans forward, %lld backward", layers, more, dense ? ", dense stage" : "",
              (long long)(between - before), (long long)(after - between));
        if (r == 0) {
            m.learning = 0;
            poison();
            model_forward(&m);
            check(!memcmp(logits, m.all_logits, logit_bytes), "%s%s: evaluating gives the logits of learning", layers, dense ? ", dense stage" : "");
        }
        threads(1);
        teardown();
    }
    free(g);
    free(logits);
    free(kl);
}

// A micro-batch in which no row has a target: no loss, no gradient from it, and a finite one from the KL.
static void test_no_targets(void) {
    setup("deepseek_v32", "DSF", 3, 2, 19, "");
    int64_t wrong = 0, index_nonzero = 0;
    for (int64_t i = 0; i < m.N; i++) targets[i] = -1;
    poison();
    gradients(1, 1.0 / (double)m.N);
    for (int i = 0; i < m.n_tensors; i++) {
        for (int64_t j = 0; j < m.tensors[i].size; j++) {
            double x = (double)grad(&m, i)[j];
            wrong += m.tensors[i].index ? !isfinite(x) : x != 0;
            index_nonzero += m.tensors[i].index && x != 0;
        }
    }
    for (int64_t i = 0; i < m.N; i++) wrong += m.row_loss[i] != 0;
    check(wrong == 0 && index_nonzero > 0, "no targets: no language gradient, finite KL gradient");
    teardown();
}

int main(int argc, char **argv) {
    seed = check_seed(argc, argv);
    threads(1);
    const char *types[] = {"deepseek_v32", "glm_moe_dsa"};
    for (int i = 0; i < 2; i++) {
        test_differences(types[i], "D", 2, "");
        test_differences(types[i], "DS", 2, "");
        test_differences(types[i], "F", 2, "");
        test_differences(types[i], "DSF", 3, "");
    }
    test_differences(types[seed % 2], "DFSS", 5, ""); // D F S S D: three teachers, and a second indexer after them
    test_differences("deepseek_v32", "DS", 2, "rope-type=yarn rope-factor=8 rope-original=16 rope-mscale-all-dim=0.5");
    test_long_row();
    check(moved * 3 <= reselected, "the selection is locally constant: of %lld probes it moved at %lld", (long long)reselected, (long long)moved);
    for (int dense = 0; dense < 2; dense++) {
        test_micro_batches(dense);
        test_same_bits("DSF", 2, "own", dense);
        test_same_bits("DFSS", 2, "served", dense);
    }
    test_no_targets();
    return check_summary();
}
