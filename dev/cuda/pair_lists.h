// The transpose of a selection, for the lessons that sum what queries give to the rows they chose.
#ifndef HYSCALE_PAIR_LISTS_H
#define HYSCALE_PAIR_LISTS_H
#include "common.h"
#include <cub/cub.cuh>

// The list of (query, slot) pairs of a chunk of queries, sorted by the row (a KV row, a candidate) that stands in the slot; for at most max_pairs
// pairs and this many rows.
typedef struct { uint32_t *key, *key2, *pair, *pair2; int32_t *slot_of, *start; void *space; size_t bytes; } PairLists;
static PairLists pair_lists_new(int64_t max_pairs, int64_t rows) {
    PairLists p;
    p.key = device_poison<uint32_t>(max_pairs);
    p.key2 = device_poison<uint32_t>(max_pairs);
    p.pair = device_poison<uint32_t>(max_pairs);
    p.pair2 = device_poison<uint32_t>(max_pairs);
    p.slot_of = device_poison<int32_t>(max_pairs);
    p.start = device_poison<int32_t>(rows + 1);
    p.bytes = 0;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(NULL, p.bytes, p.key, p.key2, p.pair, p.pair2, (int)max_pairs));
    CUDA_CHECK(cudaMalloc(&p.space, p.bytes));
    return p;
}
static void pair_lists_free(PairLists *p) {
    void *all[] = {p->key, p->key2, p->pair, p->pair2, p->slot_of, p->start, p->space};
    for (void *one : all) CUDA_CHECK(cudaFree(one));
}

// slot_of[pair] = its rank in the sorted list; start [rows + 1]: where the pairs of each row begin.
__global__ static void ranks_kernel(const uint32_t *key, const uint32_t *pair, int32_t *slot_of, int32_t *start, int rows, int n) {
    int x = (int)(blockIdx.x * blockDim.x + threadIdx.x), a = 0, b = n;
    if (x < n) slot_of[pair[x]] = x;
    if (x > rows) return;
    while (a < b) {
        int mid = a + (b - a) / 2;
        if (key[mid] < (uint32_t)x) a = mid + 1;
        else b = mid;
    }
    start[x] = a;
}

// Sort the pairs, whose rows stand in p->key ("rows" itself: no row) and numbers in p->pair; then the ranks. Stable: a row's pairs keep their order.
static void pair_lists_sort(PairLists *p, int pairs, int rows) {
    int bits = 1;
    while (rows >> bits) bits++;
    CUDA_CHECK(cub::DeviceRadixSort::SortPairs(p->space, p->bytes, p->key, p->key2, p->pair, p->pair2, pairs, 0, bits));
    ranks_kernel<<<blocks_for(std::max(pairs, rows + 1), 256), 256>>>(p->key2, p->pair2, p->slot_of, p->start, rows, pairs);
    CUDA_CHECK(cudaGetLastError());
}
#endif
