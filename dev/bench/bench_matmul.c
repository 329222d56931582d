// Measures what this machine's cores can do (the fused multiply-add peak) and what matmul_own gets of it, at the
// shapes of a training step of d = 384 with 4096 rows. JSON lines, one a row, then the same as a Markdown table.
//
//   cc -std=gnu99 -O3 -march=native -fno-math-errno -ffp-contract=fast -fopenmp -Wno-unused-function
//      -o build/bench_matmul dev/bench/bench_matmul.c -lm && build/bench_matmul [repetitions, default 11]
//
// The peak is the best repetition (a ceiling); a matrix product's row is the median, with the least and the most.
// Its share is taken of the peak on as many threads. Every product is checked before it is timed.
#define NO_MAIN
#include "../../train_cpu.c"

// Independent chains of multiply-adds. Two pipes of four or five cycles need ten; with 32 vector registers there is
// room for 24, which also fills four pipes.
#if defined(__AVX512F__) || defined(__aarch64__)
enum { CHAINS = 24 };
#else
enum { CHAINS = 12 };
#endif
enum { WIDTH = VBYTES / (int)sizeof(real), MAX_REPS = 101, MAX_ROWS = 64 };

// n multiply-adds on each chain, all in registers. x -> x*a + b stays near b/(1-a), so nothing overflows or turns denormal.
__attribute__((noinline)) static vreal peak_loop(int64_t n, real a1, real b1) {
    vreal zero = {0}, a = zero + a1, b = zero + b1, acc[CHAINS];
    #pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) acc[i] = b * (real)(i + 1);
    for (int64_t k = 0; k < n; k++) {
        #pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) acc[i] = acc[i] * a + b;
    }
    vreal sum = zero;
    #pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) sum += acc[i];
    return sum;
}

static volatile real sink, peak_a = (real)0.75, peak_b = (real)0.25; // volatile: the loop cannot be computed at compile time

// GFLOP/s of one repetition on n threads: from the first thread's start to the last one's end.
static double peak_once(int threads, int64_t n) {
    double first = 1e300, last = 0;
    #pragma omp parallel num_threads(threads) reduction(min : first) reduction(max : last)
    {
        #pragma omp barrier
        first = now();
        vreal v = peak_loop(n, peak_a, peak_b);
        last = now();
        sink = v[0];
    }
    return 2.0 * (double)threads * (double)n * CHAINS * WIDTH / (last - first) * 1e-9;
}

typedef struct { const char *what, *form; int64_t M, N, K; } Shape;
static const Shape SHAPES[] = {
    {"square", "NT", 1024, 1024, 1024},
    {"forward y = x W^T, 384 to 384", "NT", 4096, 384, 384},
    {"forward y = x W^T, 384 to 1024", "NT", 4096, 1024, 384},
    {"forward y = x W^T, 1024 to 384", "NT", 4096, 384, 1024},
    {"backward dx = dy W, 384 to 1024", "NN", 4096, 384, 1024},
    {"backward dW = dy^T x, 1024 to 384", "TN", 384, 1024, 4096},
};

typedef struct { const char *what, *form; int64_t M, N, K; int threads, reps; double median, min, max, error; } Row;

static void row_stats(Row *r, double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    r->min = x[0];
    r->max = x[n - 1];
    r->median = n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
    r->reps = n;
}

static void product(const Shape *s, real *C, const real *A, const real *B) {
    int64_t ars = s->form[0] == 'T' ? 1 : s->K, aks = s->form[0] == 'T' ? s->M : 1;
    int64_t bks = s->form[1] == 'T' ? 1 : s->N, bcs = s->form[1] == 'T' ? s->K : 1;
    matmul_own(C, s->N, A, ars, aks, B, bks, bcs, s->M, s->N, s->K, 0);
}

// The largest error of 20 random elements against dot products in double, as a share of sum |a b|.
static double product_error(const Shape *s, const real *C, const real *A, const real *B) {
    double worst = 0;
    for (uint64_t e = 0; e < 20; e++) {
        int64_t i = (int64_t)(rng_u64(3, 0, e) % (uint64_t)s->M), j = (int64_t)(rng_u64(3, 1, e) % (uint64_t)s->N);
        double dot = 0, size = 1e-30;
        for (int64_t k = 0; k < s->K; k++) {
            double p = (double)(s->form[0] == 'T' ? A[k * s->M + i] : A[i * s->K + k]) * (double)(s->form[1] == 'T' ? B[j * s->K + k] : B[k * s->N + j]);
            dot += p;
            size += fabs(p);
        }
        double error = fabs((double)C[i * s->N + j] - dot) / size;
        if (!(error <= worst)) worst = error; // a NaN is kept
    }
    return worst;
}

int main(int argc, char **argv) {
    int reps = argc > 1 ? atoi(argv[1]) : 11, all = max_threads(), n_rows = 0, bad = 0;
    if (argc > 2 || reps < 1 || reps > MAX_REPS) die("usage: %s [repetitions, 1 to %d]", argv[0], (int)MAX_REPS);
    static Row rows[MAX_ROWS];
    double x[MAX_REPS], peaks[2][2 * MAX_REPS];
    int n_threads = all > 1 ? 2 : 1, threads[2] = {1, all}, n_peaks[2] = {0, 0};
    int64_t biggest = 4096 * 1024;
    real *A = (real *)xalloc((size_t)biggest * sizeof(real)), *B = (real *)xalloc((size_t)biggest * sizeof(real)), *C = (real *)xalloc((size_t)biggest * sizeof(real));
    for (int64_t i = 0; i < biggest; i++) {
        A[i] = (real)(2 * rng_uniform(1, 0, (uint64_t)i) - 1);
        B[i] = (real)(2 * rng_uniform(2, 0, (uint64_t)i) - 1);
    }
    int64_t n = 1 << 16; // enough for about 20 ms a repetition
    while (n < (int64_t)1 << 30) {
        double t0 = now();
        peak_once(1, n);
        if (now() - t0 > 0.02) break;
        n *= 2;
    }
    for (int half = 0; half < 2; half++) { // the peak before the products and after them: the clock may change
        for (int t = 0; t < n_threads; t++)
            for (int r = 0; r < reps; r++) peaks[t][n_peaks[t]++] = peak_once(threads[t], n);
        for (int t = 0; t < n_threads && half == 0; t++) {
#ifdef _OPENMP
            omp_set_num_threads(threads[t]);
#endif
            for (size_t k = 0; k < sizeof SHAPES / sizeof SHAPES[0]; k++) {
                const Shape *s = &SHAPES[k];
                double flops = 2.0 * (double)s->M * (double)s->N * (double)s->K, t0 = now();
                memset(C, 0xff, (size_t)(s->M * s->N) * sizeof(real)); // NaN: what is not written shows
                product(s, C, A, B);
                int64_t times = 1 + (int64_t)(0.05 / (now() - t0)); // a repetition takes about 50 ms
                Row *row = &rows[n_rows++];
                *row = (Row){s->what, s->form, s->M, s->N, s->K, threads[t], 0, 0, 0, 0, product_error(s, C, A, B)};
                for (int r = 0; r < reps; r++) {
                    t0 = now();
                    for (int64_t i = 0; i < times; i++) product(s, C, A, B);
                    x[r] = flops * (double)times / (now() - t0) * 1e-9;
                }
                row_stats(row, x, reps);
                bad += !(row->error < (sizeof(real) == 4 ? 1e-5 : 1e-14));
            }
        }
    }
    double peak[2] = {0, 0};
    Row peak_rows[2];
    for (int t = 0; t < n_threads; t++) {
        peak_rows[t] = (Row){"fma peak", "", 0, 0, 0, threads[t], 0, 0, 0, 0, 0};
        row_stats(&peak_rows[t], peaks[t], n_peaks[t]);
        peak[t] = peak_rows[t].max;
    }
    char date[64];
    time_t clock = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&clock));
    for (int pass = 0; pass < 2; pass++) {
        if (pass) printf("\n| what | M x N x K | form | threads | GFLOP/s, median | min .. max | share of peak |\n|---|---|---|---:|---:|---:|---:|\n");
        for (int i = -n_threads; i < n_rows; i++) {
            const Row *r = i < 0 ? &peak_rows[i + n_threads] : &rows[i];
            double top = peak[r->threads == 1 ? 0 : 1], value = i < 0 ? r->max : r->median;
            if (!pass) {
                printf("{\"bench\": \"matmul\", \"what\": \"%s\", \"form\": \"%s\", \"M\": %lld, \"N\": %lld, \"K\": %lld, \"threads\": %d, \"gflops\": %.2f, \"gflops_min\": %.2f, "
                       "\"gflops_max\": %.2f, \"share_of_peak\": %.4f, \"reps\": %d, \"error\": %.2g, \"lanes\": %d, \"real\": %d, \"command\": \"bench_matmul %d\", \"date\": \"%s\"}\n",
                       r->what, r->form, (long long)r->M, (long long)r->N, (long long)r->K, r->threads, r->median, r->min, r->max, value / top, r->reps, r->error, (int)WIDTH,
                       (int)sizeof(real), reps, date);
            } else if (i < 0) {
                printf("| FMA peak, in registers (best of %d) | | | %d | %.1f | %.1f .. %.1f | %.1f = 100 %% |\n", r->reps, r->threads, r->median, r->min, r->max, r->max);
            } else {
                printf("| %s | %lld x %lld x %lld | %s | %d | %.1f | %.1f .. %.1f | %.1f %% |\n", r->what, (long long)r->M, (long long)r->N, (long long)r->K, r->form, r->threads,
                       r->median, r->min, r->max, 100 * value / top);
            }
        }
    }
    if (bad) die("%d products differ from the double-precision dot products by more than rounding", bad);
    free(A);
    free(B);
    free(C);
    return 0;
}
