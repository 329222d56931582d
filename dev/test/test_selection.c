// The selection against its contract (DESIGN.md, section 2): the k visible candidates with the largest (score, then
// lowest index), ascending, -1 behind the last; streaming (hytopk) and whole-row (table) alike, for score rows that
// broke published kernels (hytopk.md, section 6; faults.md, table A). Usage: test_selection [seed]
// Expected lists come from sorting float64 scores that are computed here from the definition.
#define NO_MAIN
#include "../../train_cpu.c"
#include "model.h"

enum { MAX_THREADS = 3 };
static int64_t scratch_overruns; // bytes written behind the first thread's scratch while only that thread ran

// ----------------------------------------------------------------------------
// A model of one D layer whose index queries, keys and weights are set by hand

// Scratch is planned for the method that needs more; run() gives each method exactly what it asks for.
static void make_model(Model *m, const char *more, int64_t B, int64_t T) {
    char text[1024];
    size_t need[2];
    Config c;
    config_defaults(&c);
    snprintf(text, sizeof text, "layers=D num-hidden-layers=1 hidden-size=2 num-attention-heads=1 q-lora-rank=1 kv-lora-rank=2 qk-nope-head-dim=1 "
             "qk-rope-head-dim=2 v-head-dim=1 intermediate-size=1 vocab-size=2 %s", more);
    config_set_all(&c, text, "test");
    config_check(&c);
    model_build(m, &c);
    threads(MAX_THREADS); // scratch for as many
    m->T = T;
    for (int table = 0; table < 2; table++) {
        strcpy(m->c.topk_method, table ? "table" : "hytopk");
        need[table] = thread_scratch(m);
    }
    if (need[0] > need[1]) strcpy(m->c.topk_method, "hytopk");
    activations_plan(m, B, T, 0, 0);
    memset(m->scratch, 0xff, m->scratch_bytes * (size_t)max_threads());
    threads(1);
}

enum { NO_DOCS, ONE_DOC, MANY_DOCS, SINGLE_TOKENS, DOC_STYLES };

// Document starts of batch row b: none but the row's own, one more, many, or every token alone.
static void set_documents(Model *m, int64_t b, int style) {
    int64_t T = m->T, start = 0, one = T > 37 && uniform() < 0.5 ? 37 : below(T), mean = 1 + below(T);
    for (int64_t t = 0; t < T; t++) {
        if (style == SINGLE_TOKENS || (style == ONE_DOC && t == one) || (style == MANY_DOCS && uniform() * (double)mean < 2)) start = t;
        m->doc[b * T + t] = (int32_t)start;
    }
}

// ----------------------------------------------------------------------------
// The reference

typedef struct { double score; int64_t s; } Candidate;

// NaN first, then descending; among equals (+0 and -0 are) the lower index first. A total order.
static int selection_order(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    int nx = isnan(x->score) != 0, ny = isnan(y->score) != 0;
    if (nx != ny) return ny - nx;
    if (!nx && x->score != y->score) return x->score < y->score ? 1 : -1;
    return x->s < y->s ? -1 : x->s > y->s;
}

// From all candidates of a row in selection order, the list of one query: the first k inside [lo, hi), ascending, -1
// behind. Returns how many of them are NaN.
static int64_t expected_list(const Candidate *sorted, int64_t n, int64_t lo, int64_t hi, int64_t k, int32_t *want) {
    char *taken = (char *)xalloc((size_t)hi);
    int64_t count = 0, nans = 0;
    for (int64_t j = 0; j < n && count < k && count < hi - lo; j++) {
        if (sorted[j].s < lo || sorted[j].s >= hi) continue;
        taken[sorted[j].s] = 1;
        nans += isnan(sorted[j].score) != 0;
        count++;
    }
    int64_t at = 0;
    for (int64_t s = lo; s < hi; s++)
        if (taken[s]) want[at++] = (int32_t)s;
    while (at < k) want[at++] = -1;
    free(taken);
    return nans;
}

// Run the selection of the rows [r0, r0 + nr) into poisoned lists. 1 when these, and only these, are as wanted (from
// row r0 on) and the NaN among them were counted.
static int run(Model *m, const char *method, int64_t r0, int64_t nr, int n_threads, const int32_t *want, int64_t want_nans) {
    Layer *l = &m->layers[0];
    int64_t k = m->c.topk, nans = m->nan_scores, stray = 0;
    const unsigned char *sel = (const unsigned char *)l->sel, *behind;
    size_t row = (size_t)k * sizeof(int32_t);
    strcpy(m->c.topk_method, method);
    m->scratch_bytes = thread_scratch(m);
    behind = (const unsigned char *)m->scratch + m->scratch_bytes;
    int64_t from = max64(0, r0 - 3), to = min64(m->N, r0 + nr + 3); // neighbours are watched
    memset((char *)l->sel + (size_t)from * row, 0x7f, (size_t)(to - from) * row);
    threads(n_threads);
    m->r0 = r0;
    m->nr = nr;
#ifdef _OPENMP
    int watch = n_threads == 1;
    if (watch) memset(m->scratch + m->scratch_bytes, 0xff, (size_t)min64(4096, (int64_t)m->scratch_bytes));
#else
    int watch = 0;
#endif
    select_forward(m, l);
    for (int64_t j = 0; watch && j < min64(4096, (int64_t)m->scratch_bytes); j++) scratch_overruns += behind[j] != 0xff;
    for (size_t j = (size_t)from * row; j < (size_t)r0 * row; j++) stray += sel[j] != 0x7f;
    for (size_t j = (size_t)(r0 + nr) * row; j < (size_t)to * row; j++) stray += sel[j] != 0x7f;
    m->r0 = 0;
    m->nr = m->N;
    threads(1);
    return !memcmp(l->sel + r0 * k, want, (size_t)nr * row) && m->nan_scores - nans == want_nans && stray == 0;
}

// ----------------------------------------------------------------------------
// Score patterns

static const char *const KINDS[] = {"normal", "all equal", "all zero", "95 % zeros", "99.9 % zeros", "fewer than k positive", "zeros and negatives", "two levels",
    "eight levels", "+0 and -0", "ascending", "descending", "[1, 1+1e-3)", "100 winners", "few NaN", "three finite, rest NaN", "all NaN", "some infinite", "three finite, rest -inf",
    "all -inf", "all +inf", "denormals", "sawtooth", "local window", "winners at the end", "front block", "bf16 values", "duplicates", "random walk", "spikes at multiples",
    "spikes between", "neighbouring floats", "huge", "one strip of winners", "alternating signs", "random bits"};
enum { N_KINDS = sizeof KINDS / sizeof KINDS[0] };

// Fill x[T] with scores of a kind.
static void fill_scores(int kind, float *x, int64_t T, int64_t k) {
    int64_t period = (int64_t)32 << below(3), phase = below(period), at = below(T), span = uniform() < 0.5 ? 2 * T : T / 8 + 1;
    double walk = 0, share = kind == 3 ? 0.05 : 0.001;
    uint32_t one = 0x3f800000u, bits;
    for (int64_t s = 0; s < T; s++) {
        double z = normal(), u = uniform();
        float y = (float)z;
        switch (kind) {
            case 1: y = 1; break;
            case 2: y = 0; break;
            case 3: case 4: y = u < share ? (float)fabs(z) : 0; break;
            case 5: y = u < 0.5 * (double)k / (double)T ? (float)fabs(z) : 0; break;
            case 6: y = u < 0.5 ? 0 : -(float)fabs(z); break;
            case 7: y = u < 0.5 ? 1 : 2; break;
            case 8: y = (float)below(8); break;
            case 9: y = u < 0.45 ? 0.0f : u < 0.9 ? -0.0f : (float)z; break;
            case 10: y = (float)s; break;
            case 11: y = (float)(T - s); break;
            case 12: y = 1 + 1e-3f * (float)u; break;
            case 13: y = u < 100 / (double)T ? 1 + (float)u : 0; break;
            case 14: if (u < 0.02) y = NAN; break;
            case 15: if (u > 3 / (double)T) y = u < 0.5 ? NAN : -NAN; break;
            case 16: y = NAN; break;
            case 17: if (u < 0.2) y = u < 0.1 ? INFINITY : -INFINITY; break;
            case 18: if (u > 3 / (double)T) y = -INFINITY; break;
            case 19: y = -INFINITY; break;
            case 20: y = INFINITY; break;
            case 21: y = (float)(z * 1e-40); break;
            case 22: y = (float)(s % period); break;
            case 23: y = (float)(z + (llabs((long long)(s - at)) < period ? 10 : 0)); break;
            case 24: y = (float)(z + (s >= T - 2 * k ? 100 : 0)); break;
            case 25: y = (float)(z + (s < k ? 100 : 0)); break;
            case 26: case 27: break;
            case 28: y = (float)(walk += z); break;
            case 29: y = s % period == phase ? (float)(10 + u) : (float)u; break;
            case 30: y = s % period == phase ? (float)u : (float)(10 + u); break;
            case 31: bits = one + (uint32_t)below(span); memcpy(&y, &bits, 4); break;
            case 32: y = (float)(z > 0 ? 1 : -1) * (float)(3e38 + 4e37 * u); break;
            case 33: y = s / 16 == at / 16 ? (float)(5 + u) : (float)-u; break;
            case 34: y = (float)((s % 2 ? -1.0 : 1.0) * (double)s); break;
            case 35: bits = (uint32_t)rng_u64(seed, 3, drawn++); memcpy(&y, &bits, 4); break;
        }
        if (kind == 26) { memcpy(&bits, &y, 4); bits &= 0xffff0000u; memcpy(&y, &bits, 4); }
        x[s] = y;
    }
    for (int64_t s = period; kind == 27 && s < T; s++) x[s] = x[s - period]; // key rows repeated far apart
}

// How the scores come about. SIGNED: two heads of opposite sign, I = x. RELU: one head, I = max(x, 0). NEGATED: one
// head of negative weight, I = -max(x, 0), so zeros are -0. A query is of one of four classes.
enum { SIGNED, RELU, NEGATED, MODES };
enum { PLAIN, MIRRORED, NAN_QUERY, ODD_WEIGHT, CLASSES }; // odd weight: 0 in SIGNED mode, else infinite

// Head h's query (its first channel) and weight for a class.
static void query_of(int mode, int class, int h, double *q, double *w) {
    *q = class == NAN_QUERY ? NAN : h ? -1 : 1;
    *w = (mode == NEGATED) == h ? 1 : -1;
    if (class == MIRRORED && mode == SIGNED) *w = -*w;
    else if (class == MIRRORED) *q = -*q;
    if (class == ODD_WEIGHT) *w *= mode == SIGNED ? 0 : INFINITY;
}

// Fill the model: kinds[b] for each batch row, documents, a class for each query. Returns the wanted lists of the rows
// [r0, r0 + nr), to be freed, and the number of NaN in them.
static int32_t *arrange(Model *m, int mode, const int *kinds, int64_t r0, int64_t nr, int64_t *want_nans) {
    Layer *l = &m->layers[0];
    int64_t T = m->T, HI = m->c.HI, k = m->c.topk;
    int32_t *want = (int32_t *)xalloc((size_t)(nr * k) * sizeof *want);
    float *x = (float *)xalloc((size_t)T * sizeof *x);
    char *class_of = (char *)xalloc((size_t)T);
    Candidate *sorted = (Candidate *)xalloc((size_t)T * sizeof *sorted);
    *want_nans = 0;
    for (int64_t b = 0; b < m->B; b++) {
        fill_scores(kinds[b], x, T, k);
        set_documents(m, b, (int)below(DOC_STYLES + 2) % DOC_STYLES); // no documents and one more often
        for (int64_t t = 0; t < T; t++) {
            double u = uniform(), q, w;
            int class = u < 0.7 ? PLAIN : u < 0.9 ? MIRRORED : u < 0.93 ? NAN_QUERY : ODD_WEIGHT;
            class_of[t] = (char)class;
            l->k_index[(b * T + t) * 2] = (real)x[t];
            l->k_index[(b * T + t) * 2 + 1] = (real)normal(); // multiplied by 0
            for (int64_t h = 0; h < HI; h++) {
                query_of(mode, class, (int)h, &q, &w);
                l->q_index[((b * T + t) * HI + h) * 2] = (real)q;
                l->q_index[((b * T + t) * HI + h) * 2 + 1] = 0;
                l->w_index[(b * T + t) * HI + h] = (real)w;
            }
        }
        for (int class = 0; class < CLASSES; class++) {
            for (int64_t s = 0; s < T; s++) {
                double score = 0, q, w;
                for (int64_t h = 0; h < HI; h++) {
                    query_of(mode, class, (int)h, &q, &w);
                    double d = q * (double)x[s];
                    score += w * (d < 0 ? 0 : d);
                }
                sorted[s].score = score;
                sorted[s].s = s;
            }
            qsort(sorted, (size_t)T, sizeof *sorted, selection_order);
            for (int64_t t = 0; t < T; t++) {
                int64_t i = b * T + t;
                if (class_of[t] == class && i >= r0 && i < r0 + nr) *want_nans += expected_list(sorted, T, m->doc[i], t + 1, k, want + (i - r0) * k);
            }
        }
    }
    free(x);
    free(class_of);
    free(sorted);
    return want;
}

// All kinds of scores for one length and k. Long rows (window > 0): only that many queries, with B = 1, somewhere or at
// the end; otherwise all queries of B rows. Every method, several thread counts, repeats, and cuts into slices.
static void test_patterns(int64_t T, int64_t k, int64_t B, int mode, int64_t window) {
    char more[100], first[200] = "";
    Model m;
    int64_t cases = 0, wrong = 0;
    snprintf(more, sizeof more, "index-n-heads=%d index-head-dim=2 index-topk=%lld", mode == SIGNED ? 2 : 1, (long long)k);
    make_model(&m, more, B, T);
    for (int kind = 0; kind < N_KINDS; kind += (int)B) {
        int kinds[3] = {kind, (kind + 1) % N_KINDS, (kind + 2) % N_KINDS}, bad = 0;
        int64_t nr = window ? min64(window, T) : m.N, r0 = window && uniform() < 0.5 ? below(T - nr + 1) : m.N - nr, nans;
        int32_t *want = arrange(&m, mode, kinds, r0, nr, &nans);
        bad |= !run(&m, "hytopk", r0, nr, 1, want, nans);
        bad |= !run(&m, "table", r0, nr, 1, want, nans) << 1;
        for (int n = 2; n <= MAX_THREADS && kind % 4 == 0; n++) {
            bad |= !run(&m, "hytopk", r0, nr, n, want, nans) << 2;
            bad |= !run(&m, "table", r0, nr, n, want, nans) << 3;
        }
        if (m.B == 1) { // as generation does: some rows at a time; each slice against the same lists
            int64_t all = m.nan_scores, step;
            for (int64_t r = r0; r < r0 + nr; r += step) {
                step = min64(1 + below(1 + nr / 3), r0 + nr - r);
                int64_t before = m.nan_scores, k_row = (r - r0) * k;
                run(&m, r % 2 ? "hytopk" : "table", r, step, 1, want + k_row, 0);
                bad |= memcmp(m.layers[0].sel + r * k, want + k_row, (size_t)(step * k) * sizeof(int32_t)) ? 16 : 0;
                bad |= m.nan_scores < before ? 16 : 0;
            }
            bad |= m.nan_scores - all != nans ? 16 : 0;
        }
        cases++;
        wrong += bad != 0;
        if (bad && !*first) snprintf(first, sizeof first, "; first: '%s', B %d, failures %d", KINDS[kind], (int)B, bad);
        free(want);
    }
    check(wrong == 0, "T %lld, k %lld, B %lld, %s: %lld score patterns%s", (long long)T, (long long)k, (long long)B,
          mode == SIGNED ? "signed" : mode == RELU ? "relu" : "negated relu", (long long)cases, first);
    model_free(&m);
}

// 25 repeats on plateaus give the same lists, on any number of threads.
static void test_repeats(int64_t T, int64_t k) {
    static const int plateaus[] = {2, 4, 7, 27, 15};
    for (size_t j = 0; j < sizeof plateaus / sizeof plateaus[0]; j++) {
        char more[100];
        Model m;
        int64_t nans, same = 0;
        int kinds[2] = {plateaus[j], plateaus[j]};
        snprintf(more, sizeof more, "index-n-heads=1 index-head-dim=2 index-topk=%lld", (long long)k);
        make_model(&m, more, 2, T);
        int32_t *want = arrange(&m, RELU, kinds, 0, m.N, &nans);
        for (int r = 0; r < 25; r++) same += run(&m, r % 2 ? "table" : "hytopk", 0, m.N, 1 + r % MAX_THREADS, want, nans);
        check(same == 25, "T %lld, k %lld, %s: %lld of 25 repeats as expected", (long long)T, (long long)k, KINDS[plateaus[j]], (long long)same);
        free(want);
        model_free(&m);
    }
}

// ----------------------------------------------------------------------------
// Many heads

// Random queries, keys and weights. exact: small integers and quarters, so that float32 sums are exact, ties are many
// and the lists must be those of the float64 scores. Otherwise normals: candidates closer to the k-th score than
// rounding may differ, no others; and hytopk must equal table bit for bit.
static void test_heads(int64_t HI, int64_t DI, int exact) {
    char more[100];
    Model m;
    int64_t B = 2, T = 100 + below(60), k = 1 + below(40), N = B * T, wrong = 0, close = 0;
    snprintf(more, sizeof more, "index-n-heads=%lld index-head-dim=%lld index-topk=%lld", (long long)HI, (long long)DI, (long long)k);
    make_model(&m, more, B, T);
    Layer *l = &m.layers[0];
    for (int64_t j = 0; j < N * DI; j++) l->k_index[j] = (real)(exact ? (double)(below(5) - 2) : normal());
    for (int64_t j = 0; j < N * HI * DI; j++) l->q_index[j] = (real)(exact ? (double)(below(5) - 2) : normal());
    for (int64_t i = 0; i < N; i++) {
        double u = uniform();
        for (int64_t h = 0; h < HI; h++) {
            double w = exact ? (double)(below(13) - 6) / 4 : normal();
            if (u < 0.2) w = -fabs(w);                 // all negative
            else if (u < 0.3) w = 0;
            else if (u < 0.4) w *= h == HI / 2 ? 64 : 1; // one head rules
            l->w_index[i * HI + h] = (real)w;
        }
    }
    for (int64_t b = 0; b < B; b++) set_documents(&m, b, (int)below(SINGLE_TOKENS));
    Candidate *sorted = (Candidate *)xalloc((size_t)T * sizeof *sorted);
    double *score = (double *)xalloc((size_t)T * sizeof *score);
    int32_t *want = (int32_t *)xalloc((size_t)(N * k) * sizeof *want), *got = (int32_t *)xalloc((size_t)(N * k) * sizeof *got);
    double *kth = (double *)xalloc((size_t)N * sizeof *kth), *margin = (double *)xalloc((size_t)N * sizeof *margin);
    double *scores = (double *)xalloc((size_t)(N * T) * sizeof *scores);
    for (int64_t i = 0; i < N; i++) {
        int64_t b = i / T, n = i % T - m.doc[i] + 1;
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0;
            int64_t s = m.doc[i] + j;
            for (int64_t h = 0; h < HI; h++) {
                double d = 0, w = (double)l->w_index[i * HI + h];
                for (int64_t e = 0; e < DI; e++) d += (double)l->q_index[(i * HI + h) * DI + e] * (double)l->k_index[(b * T + s) * DI + e];
                sum += w * fmax(d, 0);
                size += fabs(w) * fmax(d, 0);
            }
            scores[i * T + s] = sorted[j].score = sum;
            sorted[j].s = s;
            margin[i] = fmax(margin[i], 1e-5 * size);
        }
        qsort(sorted, (size_t)n, sizeof *sorted, selection_order);
        kth[i] = sorted[min64(k, n) - 1].score;
        expected_list(sorted, n, m.doc[i], i % T + 1, k, want + i * k);
    }
    int ok = 1;
    if (exact) {
        ok &= run(&m, "hytopk", 0, N, 1, want, 0);
        ok &= run(&m, "table", 0, N, 2, want, 0);
    } else {
        run(&m, "table", 0, N, 1, want, 0);
        memcpy(got, l->sel, (size_t)(N * k) * sizeof *got);
        ok &= run(&m, "hytopk", 0, N, 3, got, 0);
        for (int64_t i = 0; i < N; i++) {
            int64_t n = min64(k, i % T - m.doc[i] + 1);
            for (int64_t j = 0; j < k; j++) { // in range, ascending, then -1
                int32_t s = got[i * k + j];
                wrong += j < n ? s < (j ? got[i * k + j - 1] + 1 : m.doc[i]) || s > i % T : s != -1;
            }
            for (int64_t j = 0, a = 0, c = 0; j < T; j++) { // each candidate in one list only lies at the border
                int in_want = a < n && want[i * k + a] == j, in_got = c < n && got[i * k + c] == j;
                a += in_want;
                c += in_got;
                if (in_want == in_got) continue;
                close++;
                wrong += !(fabs(scores[i * T + j] - kth[i]) <= margin[i]);
            }
        }
    }
    check(ok && wrong == 0 && close < N / 4, "%lld heads of %lld, T %lld, k %lld, %s: %lld wrong, %lld at the border", (long long)HI, (long long)DI, (long long)T, (long long)k,
          exact ? "exact sums" : "normals", (long long)wrong, (long long)close);
    free(sorted); free(score); free(want); free(got); free(kth); free(margin); free(scores);
    model_free(&m);
}

// ----------------------------------------------------------------------------
// The parts

static int descending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

// kth_largest and keep_largest against a sort, with keys that share leading or trailing bytes.
static void test_largest(void) {
    int64_t wrong_kth = 0, wrong_keep = 0;
    uint64_t *key = (uint64_t *)xalloc(4000 * sizeof *key), *sorted = (uint64_t *)xalloc(4000 * sizeof *key);
    for (int trial = 0; trial < 600; trial++) {
        int64_t n = trial < 20 ? 1 + trial / 4 : 1 + below(trial % 3 ? 40 : 4000), k = trial % 5 == 0 ? n : trial % 5 == 1 ? 1 : 1 + below(n), kept = 0, above = 0;
        uint64_t high = rng_u64(seed, 4, drawn++), step = (uint64_t)1 << (8 * below(7)), start = trial % 2 ? high : 0;
        for (int64_t j = 0; j < n; j++) key[j] = start + (uint64_t)j * step; // distinct: n * step < 2^60
        if (trial % 7 == 0) for (int64_t j = 0; j < n; j++) key[j] = (uint64_t)below(3) << 62 | (uint64_t)(uint32_t)~j;
        if (trial % 7 == 1) key[0] = UINT64_MAX - (start + (uint64_t)(n - 1) * step == UINT64_MAX);
        for (int64_t j = n - 1; j > 0; j--) {
            int64_t o = below(j + 1);
            uint64_t x = key[j];
            key[j] = key[o];
            key[o] = x;
        }
        memcpy(sorted, key, (size_t)n * sizeof *key);
        qsort(sorted, (size_t)n, sizeof *sorted, descending);
        uint64_t bound = kth_largest(key, n, k);
        for (int64_t j = 0; j < n; j++) above += key[j] >= bound;
        wrong_kth += above != k || bound > sorted[k - 1]; // a bound that exactly k keys reach
        uint64_t *copy = (uint64_t *)xalloc((size_t)n * sizeof *copy), got;
        memcpy(copy, key, (size_t)n * sizeof *copy);
        got = keep_largest(copy, n, k);
        wrong_keep += got > sorted[k - 1] || (k < n && got <= sorted[k]); // nothing left out reaches it
        for (int64_t j = 0; j < n; j++) // in the order they stood
            if (key[j] >= sorted[k - 1]) wrong_keep += copy[kept++] != key[j];
        free(copy);
    }
    check(wrong_kth == 0, "kth_largest: a bound reached by exactly k keys");
    check(wrong_keep == 0, "keep_largest: the k largest, in order, and a bound between them and the rest");
    free(key);
    free(sorted);
}

// order_key against the comparison of doubles, for all pairs of special values.
static void test_order_key(void) {
    float x[64] = {0.0f, -0.0f, 1, -1, NAN, -NAN, INFINITY, -INFINITY, 1e-45f, -1e-45f, 3.4028235e38f, -3.4028235e38f, 1.1754944e-38f, -1.1754944e-38f, 1.0000001f, 0.99999994f};
    static const int64_t at[] = {0, 1, 255, 256, 65535, 65536, 16777216, 16777217, 2147483646};
    int64_t wrong = 0, n_at = (int64_t)(sizeof at / sizeof at[0]);
    uint32_t loud = 0x7f800001u;
    memcpy(&x[16], &loud, 4); // a signalling NaN
    for (int j = 17; j < 64; j++) x[j] = (float)(normal() * pow(10, 60 * uniform() - 30));
    for (int64_t a = 0; a < 64 * n_at; a++) {
        Candidate p = {(double)x[a / n_at], at[a % n_at]};
        uint64_t kp = order_key(x[a / n_at], p.s);
        wrong += key_index(kp) != p.s || key_is_nan(kp) != (isnan(p.score) != 0) || kp == 0; // 0 is the lowest threshold
        for (int64_t b = 0; b < 64 * n_at; b++) {
            Candidate q = {(double)x[b / n_at], at[b % n_at]};
            uint64_t kq = order_key(x[b / n_at], q.s);
            wrong += selection_order(&p, &q) != (kp > kq ? -1 : kp < kq);
        }
    }
    check(wrong == 0, "order_key orders as (score, then lowest index), -0 as +0, NaN largest");
}

// ----------------------------------------------------------------------------
// The control selectors

// window: the last k. random: k distinct visible ones, a function of the seed alone, every candidate as often as any
// other. oracle: the k with the largest dense attention, which is computed here in float64.
static void test_controls(void) {
    Model m;
    int64_t T = 61, B = 2, k = 9, N = B * T, wrong = 0, near = 0;
    make_model(&m, "index-n-heads=1 index-head-dim=4 index-topk=9 num-attention-heads=3 kv-lora-rank=10 qk-nope-head-dim=6 qk-rope-head-dim=4", B, T);
    Layer *l = &m.layers[0];
    int64_t H = m.c.H, R = m.c.kv_lora + m.c.rope;
    size_t bytes = (size_t)(N * k) * sizeof(int32_t);
    int32_t *want = (int32_t *)xalloc(bytes), *first = (int32_t *)xalloc(bytes);
    for (int64_t j = 0; j < N * H * R; j++) l->qrow[j] = (real)normal();
    for (int64_t j = 0; j < N * R; j++) l->rows[j] = (real)normal();
    set_documents(&m, 0, NO_DOCS);
    set_documents(&m, 1, ONE_DOC);

    strcpy(m.c.selector, "window");
    for (int64_t i = 0; i < N; i++)
        for (int64_t j = 0, s = max64(m.doc[i], i % T - k + 1); j < k; j++, s++) want[i * k + j] = s <= i % T ? (int32_t)s : -1;
    check(run(&m, "hytopk", 0, N, 2, want, 0), "selector window: the last k");
    check(m.index_scans == 0, "controls scan no index scores");

    strcpy(m.c.selector, "random");
    m.select_seed = seed;
    run(&m, "hytopk", 0, N, 1, want, 0);
    memcpy(first, l->sel, bytes);
    for (int64_t i = 0; i < N; i++)
        for (int64_t j = 0, n = min64(k, i % T - m.doc[i] + 1); j < k; j++)
            wrong += j < n ? first[i * k + j] < (j ? first[i * k + j - 1] + 1 : m.doc[i]) || first[i * k + j] > i % T : first[i * k + j] != -1;
    check(wrong == 0, "selector random: k distinct visible tokens, ascending, -1 behind");
    check(run(&m, "hytopk", 0, N, 3, first, 0), "selector random: the same for the same seed, on any threads");
    m.select_seed = seed + 1;
    check(!run(&m, "hytopk", 0, N, 1, first, 0), "selector random: another one for another seed");
    check(memcmp(first + (T - 1) * k, first + (T - 2) * k, (size_t)k * sizeof *first) != 0, "selector random: another one for another query");
    int64_t count[61] = {0}, low = INT64_MAX, high = 0;
    for (int j = 0; j < 2000; j++) {
        m.select_seed = seed + 2 + (uint64_t)j;
        run(&m, "hytopk", T - 1, 1, 1, want, 0);
        for (int64_t e = 0; e < k; e++) count[l->sel[(T - 1) * k + e]]++;
    }
    for (int64_t s = 0; s < T; s++) {
        low = min64(low, count[s]);
        high = max64(high, count[s]);
    }
    check(low > 295 - 6 * 16 && high < 295 + 6 * 16, "selector random: each of 61 tokens is chosen %lld to %lld times, 295 expected", (long long)low, (long long)high);

    strcpy(m.c.selector, "oracle");
    run(&m, "hytopk", 0, N, 2, want, 0);
    wrong = 0;
    for (int64_t i = 0; i < N; i++) {
        double mass[61] = {0}, p[61], kth;
        int64_t n = i % T - m.doc[i] + 1, taken = min64(k, n);
        Candidate sorted[61];
        for (int64_t h = 0; h < H; h++) {
            double sum = 0;
            for (int64_t j = 0; j < n; j++) {
                double d = 0;
                for (int64_t e = 0; e < R; e++) d += (double)l->qrow[(i * H + h) * R + e] * (double)l->rows[(i / T * T + m.doc[i] + j) * R + e];
                sum += p[j] = exp(d / sqrt(10.0));
            }
            for (int64_t j = 0; j < n; j++) mass[j] += p[j] / sum / (double)H;
        }
        for (int64_t j = 0; j < n; j++) {
            sorted[j].score = mass[j];
            sorted[j].s = m.doc[i] + j;
        }
        qsort(sorted, (size_t)n, sizeof *sorted, selection_order);
        kth = sorted[taken - 1].score;
        expected_list(sorted, n, m.doc[i], i % T + 1, k, want + i * k);
        for (int64_t j = 0, a = 0, c = 0; j < T; j++) {
            int in_want = a < taken && want[i * k + a] == j, in_got = c < taken && l->sel[i * k + c] == j;
            a += in_want;
            c += in_got;
            if (in_want == in_got) continue;
            near++;
            wrong += j < m.doc[i] || j > i % T || !(fabs(mass[j - m.doc[i]] - kth) <= 1e-5);
        }
        for (int64_t j = 0; j < k; j++)
            wrong += j < taken ? l->sel[i * k + j] < (j ? l->sel[i * k + j - 1] + 1 : m.doc[i]) || l->sel[i * k + j] > i % T : l->sel[i * k + j] != -1;
    }
    check(wrong == 0 && near < N / 4, "selector oracle: the largest dense attention (%lld wrong, %lld at the border)", (long long)wrong, (long long)near);
    free(want);
    free(first);
    model_free(&m);
}

// ----------------------------------------------------------------------------
// Stored selections

enum { SPREAD, CLUSTERS, FIRST, LAST, ROW_KINDS };

// n ascending candidates of n_cand, -1 behind: over the whole range, in runs, the first ones, the last ones.
static void draw_row(int32_t *row, int64_t k, int64_t n, int64_t n_cand, int kind) {
    int64_t spare = n_cand - n, at = kind == LAST ? spare : 0;
    for (int64_t j = 0; j < k; j++) {
        if (kind == SPREAD && j < n) at = (int64_t)(((double)j + uniform()) / (double)n * (double)(spare + 1));
        if (kind == CLUSTERS && uniform() < 0.05) at += below(spare - at + 1);
        row[j] = j < n ? (int32_t)(at + j) : -1;
    }
}

// Rows of all fillings and kinds come back as they were; nothing is written behind the words that packing_of() says.
static void test_packing(int64_t k, int64_t n_cand) {
    for (int ef = 0; ef < 2; ef++) {
        Packing p = packing_of(ef, k, n_cand);
        int64_t most = min64(k, n_cand), wrong = 0, rows = 0;
        const int64_t fillings[] = {0, 1, most - 1, most, below(most + 1), below(most + 1)};
        int32_t *row = (int32_t *)xalloc((size_t)k * sizeof *row), *back = (int32_t *)xalloc((size_t)(k + 1) * sizeof *back);
        uint32_t *packed = (uint32_t *)xalloc((size_t)(p.words + 1) * sizeof *packed);
        for (int i = 0; i < 6; i++) {
            for (int kind = 0; kind < ROW_KINDS && fillings[i] >= 0 && fillings[i] <= most; kind++, rows++) {
                draw_row(row, k, fillings[i], n_cand, kind);
                memset(packed, 0xa5, (size_t)(p.words + 1) * sizeof *packed);
                memset(back, 0xa5, (size_t)(k + 1) * sizeof *back);
                pack_row(&p, packed, row);
                unpack_row(&p, back, packed);
                wrong += memcmp(back, row, (size_t)k * sizeof *row) != 0 || packed[p.words] != 0xa5a5a5a5u || (uint32_t)back[k] != 0xa5a5a5a5u;
            }
        }
        check(wrong == 0, "%s of %lld slots over %lld candidates: %lld rows come back (%lld words each)", ef ? "ef" : "u16", (long long)k, (long long)n_cand, (long long)rows, (long long)p.words);
        free(row);
        free(back);
        free(packed);
    }
}

int main(int argc, char **argv) {
    static const int64_t lengths[] = {1, 5, 63, 64, 65, 127, 130, 255, 256, 257, 600}, ks[] = {1, 3, 7, 64, 255, 256, 1000, 0}; // 0: more than T
    seed = check_seed(argc, argv);
    threads(1);
    test_order_key();
    test_largest();
    int64_t turn = below(6);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (size_t j = 0; j < sizeof ks / sizeof ks[0]; j++, turn++) { // every other time B = 1: with slices
            int64_t k = ks[j] ? ks[j] : lengths[i] + 1 + below(9);
            test_patterns(lengths[i], k, turn % 2 ? 1 : 2 + turn / 2 % 2, (int)(turn % MODES), 0);
        }
    }
    for (size_t j = 0; j < sizeof ks / sizeof ks[0]; j++, turn++) test_patterns(4095, ks[j] ? ks[j] : 5000, 1, (int)(turn % MODES), 150);
    test_patterns(1500, 64, 2, (int)(turn % MODES), 0);
    test_patterns(16384, 64, 1, SIGNED, 60);
    test_patterns(16384, 500, 1, RELU, 60);
    test_repeats(130, 7);
    test_repeats(600, 64);
    static const int64_t heads[] = {1, 2, 4, 8, 16, 32, 64}, sizes[] = {32, 64, 128};
    for (int i = 0; i < 7; i++) {
        for (int j = 0; j < 3; j++) {
            test_heads(heads[i], sizes[j], 0);
            test_heads(heads[i], sizes[j], 1);
        }
    }
    test_heads(3, 6, 0); // no power of two
    test_heads(5, 34, 1);
    test_controls();
    static const int64_t candidates[] = {0, 1, 2, 100, 1023, 1024, 1025, 65535, 65536, 65537, 131072, 1 << 20, 4 << 20};
    static const int64_t slots[] = {1, 2, 31, 33, 1000, 1024, 2048, 70000};
    for (size_t i = 0; i < sizeof candidates / sizeof candidates[0]; i++)
        for (size_t j = 0; j < sizeof slots / sizeof slots[0]; j++) test_packing(slots[j], candidates[i]);
    test_packing(1 + below(5000), 1 + below(4 << 20));
    int64_t bits[2];
    for (int ef = 0; ef < 2; ef++) bits[ef] = 32 * packing_of(ef, 2048, 1 << 19).words;
    check(bits[0] == 2048 * 16 + 8 * 32 && bits[1] == 2048 * 10, "2048 of 512K: u16 takes 16.1 bits a slot, ef 10");
    check(scratch_overruns == 0, "nothing is written behind a thread's scratch");
    return check_summary();
}
