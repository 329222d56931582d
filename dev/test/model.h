// What the tests of the trainer share. Include after train_cpu.c; check.h comes with it.
#ifndef TEST_MODEL_H
#define TEST_MODEL_H
#include "check.h"

// Threads that OpenMP retires when the count changes take their packing buffers with them: not a leak of the trainer,
// which keeps one count.
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:pack_buffer\n"; }

static uint64_t seed, drawn; // fresh inputs: set from check_seed()
static double uniform(void) { return rng_uniform(seed, 1, drawn++); }                // in (0, 1)
static double normal(void) { return rng_normal(seed, 2, drawn++); }
static int64_t below(int64_t n) { return (int64_t)(uniform() * (double)n); }         // in [0, n)

static void threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}
#endif
