// The checks of the C tests: one line each, a count at the end. Include after train_cpu.c or alone.
#ifndef CHECK_H
#define CHECK_H
#include <stdio.h>
#include <stdlib.h>
#include <stdarg.h>
#include <stdint.h>
#include <time.h>

static int checks_passed, checks_failed;

// Count one check and print "ok NAME" or "FAIL NAME"; the name is a printf format. Returns ok.
__attribute__((format(printf, 2, 3), unused)) static int check(int ok, const char *fmt, ...) {
    va_list ap;
    printf(ok ? "ok   " : "FAIL ");
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    printf("\n");
    fflush(stdout);
    checks_passed += ok != 0;
    checks_failed += ok == 0;
    return ok;
}

// The closing line and the exit status.
__attribute__((unused)) static int check_summary(void) {
    printf("%d passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed ? 1 : 0;
}

// Fresh inputs every run: the seed is argv[1] when given, else the clock; printed, so that a failure can be repeated.
__attribute__((unused)) static uint64_t check_seed(int argc, char **argv) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
    printf("seed %llu\n", (unsigned long long)seed);
    return seed;
}
#endif
