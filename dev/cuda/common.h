// What the kernel course shares: checked calls, random inputs, poison, comparison, timing, the three instructions that every
// tensor-core kernel for sm_80 and later is made of (ldmatrix, mma, cp.async), and whether there is wgmma.
#ifndef HYSCALE_CUDA_COMMON_H
#define HYSCALE_CUDA_COMMON_H
#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>
#include <string.h>
#include <math.h>
#include <time.h>
#include <algorithm>
#include <cuda_runtime.h>
#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;

#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)
static inline void cuda_check(cudaError_t e, const char *call, const char *file, int line) {
    if (e == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "CUDA: %s at %s:%d: %s\n", call, file, line, cudaGetErrorString(e));
    exit(1);
}

// ---- random inputs: a hash of (seed, stream, index), the same on host and device

__host__ __device__ static inline uint64_t rng_mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
__host__ __device__ static inline uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t i) { return rng_mix(rng_mix(rng_mix(seed) ^ stream) ^ i); }
__host__ __device__ static inline float rng_uniform(uint64_t seed, uint64_t stream, uint64_t i) { return ((float)(rng_u64(seed, stream, i) >> 40) + 0.5f) / 16777216.0f; }
// Sum of four uniforms, centred and scaled to unit variance: near enough to a normal, and exact on both sides.
__host__ __device__ static inline float rng_normal(uint64_t seed, uint64_t stream, uint64_t i) {
    uint64_t z = rng_u64(seed, stream, i);
    float s = (float)(z & 65535) + (float)(z >> 16 & 65535) + (float)(z >> 32 & 65535) + (float)(z >> 48);
    return (s - 131070.0f) * (1.7320508f / 65536.0f);
}
static inline uint64_t seed_of(int argc, char **argv) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
    printf("seed %llu\n", (unsigned long long)seed);
    return seed;
}

template <class X> __global__ void fill_normal_kernel(X *x, int64_t n, uint64_t seed, uint64_t stream, float scale) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) x[i] = (X)(scale * rng_normal(seed, stream, (uint64_t)i));
}
template <class X> static X *device_normal(int64_t n, uint64_t seed, uint64_t stream, float scale) {
    X *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)n * sizeof(X)));
    fill_normal_kernel<<<1024, 256>>>(p, n, seed, stream, scale);
    CUDA_CHECK(cudaGetLastError());
    return p;
}
// Memory of NaNs (all bits set): what a kernel does not write stays visible.
template <class X> static X *device_poison(int64_t n) {
    X *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)(n ? n : 1) * sizeof(X)));
    CUDA_CHECK(cudaMemset(p, 0xff, (size_t)n * sizeof(X)));
    return p;
}
template <class X> static X *to_host(const X *device, int64_t n) {
    X *p = (X *)malloc((size_t)(n ? n : 1) * sizeof(X));
    CUDA_CHECK(cudaMemcpy(p, device, (size_t)n * sizeof(X), cudaMemcpyDeviceToHost));
    return p;
}

// ---- comparison

static int n_passed, n_failed;
static inline int check(int ok, const char *name, double value) {
    printf("%s %-72s %.3g\n", ok ? "ok  " : "FAIL", name, value);
    n_passed += ok != 0;
    n_failed += ok == 0;
    return ok;
}
static inline int check_summary(void) {
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
// ||a - b|| / ||b||; NaN if a or b has one.
template <class X, class Y> static double relative_error(const X *a, const Y *b, int64_t n) {
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = (double)(float)a[i], y = (double)b[i];
        d += (x - y) * (x - y);
        s += y * y;
    }
    return sqrt(d) / (sqrt(s) + 1e-30);
}

// ---- timing: median, smallest and largest of reps launches of "body", in ms, after one that is not counted

typedef struct { double median, lo, hi; } Timing;
template <class F> static Timing time_kernel(int reps, F body) {
    double ms[64];
    cudaEvent_t a, b;
    if (reps > 64) reps = 64;
    CUDA_CHECK(cudaEventCreate(&a));
    CUDA_CHECK(cudaEventCreate(&b));
    for (int r = -1; r < reps; r++) {
        float t;
        CUDA_CHECK(cudaEventRecord(a));
        body();
        CUDA_CHECK(cudaEventRecord(b));
        CUDA_CHECK(cudaEventSynchronize(b));
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaEventElapsedTime(&t, a, b));
        if (r >= 0) ms[r] = t;
    }
    std::sort(ms, ms + reps);
    CUDA_CHECK(cudaEventDestroy(a));
    CUDA_CHECK(cudaEventDestroy(b));
    Timing t = {ms[reps / 2], ms[0], ms[reps - 1]};
    return t;
}

// ---- tensor-core instructions of sm_80 and later

__device__ static inline uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
// d[16x8] += a[16x16] b[16x8], bf16 in, float sums. Lane l holds of a: rows l/4 and l/4+8, columns 2(l%4)+{0,1} and +8;
// of b (column-major): column l/4, rows 2(l%4)+{0,1} and +8; of d: rows l/4 and l/4+8, columns 2(l%4)+{0,1}.
__device__ static inline void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8x8 matrices of bf16; lane l gives the address of row l%8 of matrix l/8.
__device__ static inline void ldmatrix_x4(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ static inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
// 16 bytes from global to shared memory; zeros when not take.
__device__ static inline void cp_async_16(uint32_t to, const void *from, bool take) {
    int n = take ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}
__device__ static inline void cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ static inline void cp_async_wait(void) { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ static inline uint32_t pack_bf16(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    uint32_t r;
    memcpy(&r, &v, 4);
    return r;
}

// ---- Hopper's products (sm_90a): their fences, and whether this machine and this program have them

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ static inline void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ static inline void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
#endif
__global__ static void has_wgmma_kernel(int *yes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    *yes = 1;
#endif
}
// Whether this card runs wgmma and this program was compiled for it.
static int has_wgmma(void) {
    static int known = -1, *yes;
    if (known >= 0) return known;
    CUDA_CHECK(cudaMalloc(&yes, sizeof(int)));
    CUDA_CHECK(cudaMemset(yes, 0, sizeof(int)));
    has_wgmma_kernel<<<1, 1>>>(yes);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaMemcpy(&known, yes, sizeof(int), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(yes));
    return known;
}

// ---- launches and reductions

static inline unsigned blocks_for(int64_t n, int64_t block) { return (unsigned)((n + block - 1) / block); }
__device__ static inline float warp_sum(float v) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
__device__ static inline float warp_max(float v) {
    for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
#endif
