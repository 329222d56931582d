/*
hyscale.c: train a small GPT with learned sparse attention, in plain C.

This one file is the whole trainer for the CPU and the reference that judges the CUDA trainer. A lightning
indexer scores all earlier tokens for each query, HyTopK keeps the exact top-k of those scores without ever
storing the score table, and attention reads only what was chosen. The indexer learns by imitating the
attention it serves (a KL divergence); the rest of the model learns from the text, as any GPT.

Build and run:  make run          (or: make train_cpu && ./train_cpu --help)

Contents, in the order in which the data flows
   1  utilities            errors, clock, random numbers, files
   2  configuration        one table of options: command line, presets, config.json, help, printed settings
   3  tokens in            streams of text or llm.c shards, shuffled order, the copy task
   4  parameters           one table of tensors: names, shapes, offsets, initial values
   5  activations          one plan of all buffers, made before the first step
   6  matrix product       a blocked, vectorised kernel
   7  layers               RMSNorm, LayerNorm, RoPE, SwiGLU, embedding: forward and backward
   8  selection            index scores, HyTopK (streaming) and the table arm, the control selectors; packing what is kept
   9  sparse attention     one core for every layer letter, with the indexer's KL, forward and backward
  10  attention layers     what a letter puts around the core: projections, index queries, index keys
  11  the model            classifier and loss, forward, backward
  12  optimizer            gradient norm, AdamW, schedules
  13  checkpoints          directories that transformers can open; resume
  14  generation           incremental, with the caches that the activations already are
  15  training loop        evaluation, probe, log, summary
  16  command line

Layer letters (--layers): D S F multi-head latent attention (chosen by its indexer, chosen by the last D's, full),
C H W window and compressed entries (C chosen, H all, W none), Q grouped-query attention over chosen blocks.

Letters used throughout (as in llm.c):
  B batch, T sequence length, N = B*T rows, C channels, H heads, V vocabulary, Vp padded vocabulary,
  HI index heads, DI index head size, k selected candidates a query, R width of the shared KV row.
A weight is stored [out, in] as in the published checkpoints. Sizes are written behind each pointer.
*/
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <math.h>
#include <time.h>
#include <errno.h>
#include <signal.h>
#include <unistd.h>
#include <fcntl.h>
#include <dirent.h>
#include <sys/stat.h>
#include <sys/resource.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef USE_BLAS
#include <cblas.h>
#endif
#include "data/safetensors.h"
#include "data/tokens.h"
#include "data/tokenizer.h"

// The type of every parameter, activation and gradient: float, or double for the gradient checks.
#ifndef REAL
#define REAL float
#endif
typedef REAL real;

// ----------------------------------------------------------------------------
// 1. Utilities

// Print one line that says what was expected, and stop. Nothing has been written at this point: files are
// published by rename only (section 13).
__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *fmt, ...) {
    va_list ap;
    fflush(stdout);
    fprintf(stderr, "hyscale: ");
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\n");
    exit(1);
}

// Zeroed memory, aligned to 64 bytes so that vector loads never straddle a cache line. Stops when there is none.
static void *xalloc(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 64)) die("no memory: %zu bytes were asked for", bytes);
    memset(p, 0, bytes);
    return p;
}

// Seconds since an arbitrary start.
static double now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

// Counter-based random numbers: a hash of (seed, stream, index), so that any number can be had without those
// before it. Resuming, reordering and any thread count give the same values. Mixer: splitmix64 (Steele et al. 2014).
static uint64_t rng_mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
static uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t i) { return rng_mix(rng_mix(rng_mix(seed) ^ stream) ^ i); }
static double rng_uniform(uint64_t seed, uint64_t stream, uint64_t i) { // in (0, 1)
    return ((double)(rng_u64(seed, stream, i) >> 11) + 0.5) / 9007199254740992.0;
}
static double rng_normal(uint64_t seed, uint64_t stream, uint64_t i) { // Box-Muller
    return sqrt(-2 * log(rng_uniform(seed, stream, 2 * i))) * cos(6.283185307179586 * rng_uniform(seed, stream, 2 * i + 1));
}
enum { RNG_INIT = 1 << 20, RNG_ORDER = 2 << 20, RNG_TASK = 3 << 20, RNG_SAMPLE = 4 << 20, RNG_SELECT = 5 << 20 };

static int max_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
static int thread_id(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

__attribute__((unused)) static int in_parallel(void) { // unused without OpenMP
#ifdef _OPENMP
    return omp_in_parallel();
#else
    return 1;
#endif
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// ----------------------------------------------------------------------------
// 2. Configuration
// One table, OPTIONS, is the command line, the presets, --help, the printed settings, the log's first line and
// the model's part of config.json. A field is an int64_t, a double or a char[256].

typedef struct {
    // the model (config.json keeps these under the same names, with _ for -)
    char model_type[256], layers[256], rope_type[256];
    int64_t C, L, H, q_lora, kv_lora, nope, rope, v_dim, F, HI, DI, topk, V;
    int64_t head_dim, kv_heads, window, csa_ratio, hca_ratio, qsa_ratio, o_groups, o_lora;
    double rms_eps, rope_theta, compress_theta, rope_factor, rope_beta_fast, rope_beta_slow, rope_mscale, rope_mscale_all;
    int64_t rope_original;
    // the run
    char preset[256], train[256], val[256], task[256], tokenizer[256], out[256], resume[256], generate[256], prompt[256];
    char selector[256], topk_method[256], index_target[256], schedule[256], recompute[256], replay_store[256];
    int64_t T, B, accum, steps, warmup, warmup_dense, decay_steps, doc_mask, seed, threads;
    int64_t eval_every, eval_batches, sample_every, sample_tokens, save_every, keep, probe, dry_run, replay, replay_offload, verify, phases;
    double lr, index_lr_mult, min_lr, weight_decay, beta1, beta2, adam_eps, clip, kl_coef;
    int64_t top_k;
    double temperature, top_p;
} Config;

enum { ARCH = 1, PATH = 2, NOT_MLA = 4 }; // ARCH: part of the model, must agree on resume. PATH: free text. NOT_MLA: of C H W Q only
typedef struct {
    const char *name;
    char type; // i, d or s
    size_t offset;
    const char *def;
    double lo, hi;       // numbers: the accepted range
    const char *choices; // strings: "a|b|c", NULL for free text
    int flags;
    const char *help;
} Option;

#define F_(field) offsetof(Config, field)
static const Option OPTIONS[] = {
    {"preset", 's', F_(preset), "tiny", 0, 0, "tiny|copy|glm|v4flash|qsa|small|d12|d24|d48", 0, "sizes to start from; options given as well win"},
    {"model-type", 's', F_(model_type), "deepseek_v32", 0, 0, "deepseek_v32|glm_moe_dsa", ARCH, "RoPE of the indexer: half-split (V3.2) or interleaved (GLM)"},
    {"layers", 's', F_(layers), "D", 0, 0, NULL, ARCH, "pattern over depth of the letters D S F (MLA), C H W (compressed), Q (GQA): see the README"},
    {"num-hidden-layers", 'i', F_(L), "4", 1, 1000, NULL, ARCH, "number of blocks"},
    {"hidden-size", 'i', F_(C), "128", 1, 65536, NULL, ARCH, "channels of the residual stream, C"},
    {"num-attention-heads", 'i', F_(H), "4", 1, 1024, NULL, ARCH, "heads, H"},
    {"q-lora-rank", 'i', F_(q_lora), "96", 1, 65536, NULL, ARCH, "width of the query latent"},
    {"kv-lora-rank", 'i', F_(kv_lora), "64", 1, 65536, NULL, ARCH, "width of the KV latent"},
    {"qk-nope-head-dim", 'i', F_(nope), "32", 1, 4096, NULL, ARCH, "head size without RoPE"},
    {"qk-rope-head-dim", 'i', F_(rope), "16", 2, 4096, NULL, ARCH, "head size with RoPE (even)"},
    {"v-head-dim", 'i', F_(v_dim), "32", 1, 4096, NULL, ARCH, "value head size"},
    {"head-dim", 'i', F_(head_dim), "32", 2, 4096, NULL, ARCH | NOT_MLA, "C H W Q: head size; C H W rotate the last --qk-rope-head-dim channels, Q the first"},
    {"num-key-value-heads", 'i', F_(kv_heads), "2", 1, 1024, NULL, ARCH | NOT_MLA, "Q: key-value heads"},
    {"sliding-window", 'i', F_(window), "32", 1, 1 << 30, NULL, ARCH | NOT_MLA, "C H W: tokens of the window, the query's own included"},
    {"csa-ratio", 'i', F_(csa_ratio), "4", 1, 1 << 20, NULL, ARCH | NOT_MLA, "C: tokens of a compressed entry"},
    {"hca-ratio", 'i', F_(hca_ratio), "32", 1, 1 << 20, NULL, ARCH | NOT_MLA, "H: tokens of a compressed entry"},
    {"qsa-ratio", 'i', F_(qsa_ratio), "4", 1, 1 << 20, NULL, ARCH | NOT_MLA, "Q: tokens of a block"},
    {"o-groups", 'i', F_(o_groups), "2", 1, 1024, NULL, ARCH | NOT_MLA, "C H W: groups of heads in the output projection"},
    {"o-lora-rank", 'i', F_(o_lora), "64", 1, 65536, NULL, ARCH | NOT_MLA, "C H W: width of a group's output latent"},
    {"compress-rope-theta", 'd', F_(compress_theta), "160000", 1.001, 1e12, NULL, ARCH | NOT_MLA, "C H: RoPE base"},
    {"intermediate-size", 'i', F_(F), "344", 1, 1 << 20, NULL, ARCH, "width of the MLP, F"},
    {"index-n-heads", 'i', F_(HI), "4", 1, 64, NULL, ARCH, "index heads, HI"},
    {"index-head-dim", 'i', F_(DI), "32", 2, 256, NULL, ARCH, "index head size, DI"},
    {"index-topk", 'i', F_(topk), "64", 1, 1 << 20, NULL, ARCH, "candidates kept for each query, k (D tokens, C entries, Q blocks)"},
    {"vocab-size", 'i', F_(V), "0", 0, 1 << 24, NULL, ARCH, "vocabulary; 0 takes it from the data"},
    {"rms-norm-eps", 'd', F_(rms_eps), "1e-6", 0, 1, NULL, ARCH, "epsilon of the block norms"},
    {"rope-theta", 'd', F_(rope_theta), "10000", 1.001, 1e12, NULL, ARCH, "RoPE base"},
    {"rope-type", 's', F_(rope_type), "default", 0, 0, "default|yarn", ARCH, "RoPE frequencies: plain or YaRN"},
    {"rope-factor", 'd', F_(rope_factor), "40", 1, 1e6, NULL, ARCH, "YaRN: context extension factor"},
    {"rope-original", 'i', F_(rope_original), "4096", 1, 1 << 30, NULL, ARCH, "YaRN: original context"},
    {"rope-beta-fast", 'd', F_(rope_beta_fast), "32", 0.001, 1e6, NULL, ARCH, "YaRN: beta_fast"},
    {"rope-beta-slow", 'd', F_(rope_beta_slow), "1", 0.001, 1e6, NULL, ARCH, "YaRN: beta_slow"},
    {"rope-mscale", 'd', F_(rope_mscale), "1", 0, 100, NULL, ARCH, "YaRN: mscale"},
    {"rope-mscale-all-dim", 'd', F_(rope_mscale_all), "1", 0, 100, NULL, ARCH, "YaRN: mscale_all_dim"},
    {"train", 's', F_(train), "data/austen", 0, 0, NULL, PATH, "training text: files, folders, globs, comma-separated; llm.c .bin shards"},
    {"val", 's', F_(val), "data/austen/persuasion.txt", 0, 0, NULL, PATH, "validation text, left out of the training set"},
    {"task", 's', F_(task), "text", 0, 0, "text|copy", 0, "text, or the synthetic copy task (64 symbols, second half repeats the first)"},
    {"tokenizer", 's', F_(tokenizer), "", 0, 0, NULL, PATH, "llm.c tokenizer.bin for printing shards' tokens"},
    {"seq-len", 'i', F_(T), "512", 1, 1 << 30, NULL, 0, "tokens of a row, T"},
    {"batch-size", 'i', F_(B), "8", 1, 1 << 20, NULL, 0, "rows of a micro-batch, B"},
    {"grad-accum", 'i', F_(accum), "1", 1, 1 << 20, NULL, 0, "micro-batches of a step"},
    {"doc-mask", 'i', F_(doc_mask), "1", 0, 1, NULL, 0, "a query sees only its own document"},
    {"steps", 'i', F_(steps), "450", 0, 1 << 30, NULL, 0, "optimizer steps in all"},
    {"lr", 'd', F_(lr), "2e-3", 0, 10, NULL, 0, "peak learning rate"},
    {"index-lr-mult", 'd', F_(index_lr_mult), "5", 0, 1000, NULL, 0, "learning rate of the indexer, as a multiple of --lr"},
    {"schedule", 's', F_(schedule), "cosine", 0, 0, "cosine|wsd", 0, "after the warm-up: cosine, or constant with a linear end (wsd)"},
    {"warmup", 'i', F_(warmup), "40", 0, 1 << 30, NULL, 0, "steps of linear warm-up"},
    {"decay-steps", 'i', F_(decay_steps), "0", 0, 1 << 30, NULL, 0, "wsd: steps of the linear end; 0 takes a fifth of the run"},
    {"min-lr", 'd', F_(min_lr), "0.1", 0, 1, NULL, 0, "last learning rate as a share of the peak"},
    {"warmup-dense", 'i', F_(warmup_dense), "100", 0, 1 << 30, NULL, 0, "first steps with dense attention, the indexer learning from all visible tokens"},
    {"weight-decay", 'd', F_(weight_decay), "0.1", 0, 10, NULL, 0, "decoupled; none on norms and biases"},
    {"beta1", 'd', F_(beta1), "0.9", 0, 0.9999999, NULL, 0, "AdamW"},
    {"beta2", 'd', F_(beta2), "0.95", 0, 0.9999999, NULL, 0, "AdamW"},
    {"adam-eps", 'd', F_(adam_eps), "1e-8", 0, 1, NULL, 0, "AdamW"},
    {"clip", 'd', F_(clip), "1", 0, 1e9, NULL, 0, "largest gradient norm, model and indexer each; 0 is off"},
    {"kl-coef", 'd', F_(kl_coef), "1", 0, 1e6, NULL, 0, "weight of the indexer's KL; 0 leaves the indexer untrained"},
    {"index-target", 's', F_(index_target), "own", 0, 0, "own|served", 0, "a D layer imitates its own attention, or the mean over the layers it serves"},
    {"selector", 's', F_(selector), "indexer", 0, 0, "indexer|random|window|oracle", 0, "who chooses: controls for evaluation"},
    {"topk", 's', F_(topk_method), "hytopk", 0, 0, "hytopk|table", 0, "streaming top-k, or the whole score row first; the same set"},
    {"recompute", 's', F_(recompute), "none", 0, 0, "none|block", 0, "block: keep layer inputs and selections, recompute the rest in backward"},
    {"replay", 'i', F_(replay), "1", 0, 1, NULL, 0, "with --recompute block: 1 reuses the stored selection, 0 selects again"},
    {"replay-store", 's', F_(replay_store), "u16", 0, 0, "int32|u16|ef", 0, "with --recompute block: kept selections as they are, as 16 bits and a page, or as Elias-Fano (about 12)"},
    {"replay-offload", 'i', F_(replay_offload), "0", 0, 1, NULL, 0, "CUDA trainer: packed selections wait in pinned host memory, and come back one layer ahead"},
    {"seed", 'i', F_(seed), "1337", 0, 9e15, NULL, 0, "of the initial values, the data order and the samples"},
    {"threads", 'i', F_(threads), "0", 0, 4096, NULL, 0, "CPU threads; 0 takes all. Results do not depend on it"},
    {"eval-every", 'i', F_(eval_every), "50", 0, 1 << 30, NULL, 0, "steps between evaluations; 0 is never"},
    {"eval-batches", 'i', F_(eval_batches), "8", 0, 1 << 30, NULL, 0, "batches of an evaluation on the way; 0 is all. The last one takes all"},
    {"probe", 'i', F_(probe), "16", 0, 1 << 20, NULL, 0, "queries for recall@k and mass@k against dense attention at each evaluation; 0 is off"},
    {"sample-every", 'i', F_(sample_every), "150", 0, 1 << 30, NULL, 0, "steps between printed samples; 0 is never"},
    {"sample-tokens", 'i', F_(sample_tokens), "200", 1, 1 << 30, NULL, 0, "length of a sample or of --generate"},
    {"prompt", 's', F_(prompt), "It is a truth universally acknowledged, that", 0, 0, NULL, PATH, "start of samples"},
    {"temperature", 'd', F_(temperature), "0.8", 0, 100, NULL, 0, "of samples; 0 takes the likeliest token"},
    {"top-k", 'i', F_(top_k), "0", 0, 1 << 24, NULL, 0, "samples take one of the k likeliest tokens; 0 is off"},
    {"top-p", 'd', F_(top_p), "0.95", 0, 1, NULL, 0, "samples take from the likeliest tokens of this total probability"},
    {"out", 's', F_(out), "out", 0, 0, NULL, PATH, "folder for log.jsonl and checkpoints; empty writes nothing"},
    {"save-every", 'i', F_(save_every), "0", 0, 1 << 30, NULL, 0, "steps between checkpoints; 0 saves at the end only"},
    {"keep", 'i', F_(keep), "3", 1, 1 << 20, NULL, 0, "newest checkpoints kept"},
    {"resume", 's', F_(resume), "", 0, 0, NULL, PATH, "auto (newest valid one in --out) or a checkpoint folder"},
    {"generate", 's', F_(generate), "", 0, 0, NULL, PATH, "print text from this checkpoint folder and stop"},
    {"phases", 'i', F_(phases), "0", 0, 1, NULL, 0, "CUDA trainer: print the time of each phase of a step (CUDA graphs are off then)"},
    {"verify", 'i', F_(verify), "0", 0, 1, NULL, 0, "CUDA trainer: compare one step with the CPU reference, and stop"},
    {"dry-run", 'i', F_(dry_run), "0", 0, 1, NULL, 0, "print the configuration and the memory plan, and stop"},
};
enum { N_OPTIONS = sizeof(OPTIONS) / sizeof(OPTIONS[0]) };

typedef struct { const char *name, *settings; } Preset;
static const Preset PRESETS[] = {
    {"tiny", ""}, // the defaults of the table: about 1M parameters
    {"copy", "task=copy num-hidden-layers=2 hidden-size=64 q-lora-rank=64 intermediate-size=128 index-topk=16 seq-len=256 batch-size=16 "
             "steps=600 lr=3e-3 warmup=50 warmup-dense=250 eval-every=100 eval-batches=4 sample-every=0 weight-decay=0"},
    {"glm", "layers=DSSS num-hidden-layers=8 model-type=glm_moe_dsa index-n-heads=4"}, // GLM-5.2: one indexer for four layers
    {"v4flash", "layers=WWCHCHCH num-hidden-layers=8 num-attention-heads=4 q-lora-rank=64 head-dim=64 qk-rope-head-dim=8 o-groups=2 o-lora-rank=64 index-topk=32 "
                "index-n-heads=4 index-head-dim=32"}, // DeepSeek-V4-Flash: two windows, then CSA and HCA in turn
    {"qsa", "layers=Q num-attention-heads=6 num-key-value-heads=1 head-dim=32 qk-rope-head-dim=8 index-topk=16 index-n-heads=4 index-head-dim=128"}, // Qwen3.8-Flash-Next: 4 index heads of 128
    {"small", "num-hidden-layers=8 hidden-size=256 num-attention-heads=8 q-lora-rank=192 kv-lora-rank=128 intermediate-size=704 index-topk=256 seq-len=8192 "
              "batch-size=2 steps=2400 lr=3e-3 min-lr=0 weight-decay=1 warmup=60 warmup-dense=12 eval-every=200 eval-batches=8 sample-every=800"}, // 7M, make run on a GPU: 11 passes over the novels
    // GPT-2's sizes for any pattern of letters; the second line of each is for C H W Q
    {"d12", "num-hidden-layers=12 hidden-size=768 num-attention-heads=12 q-lora-rank=384 kv-lora-rank=256 qk-nope-head-dim=64 qk-rope-head-dim=32 "
            "v-head-dim=64 intermediate-size=2560 index-n-heads=8 index-head-dim=64 index-topk=1024 seq-len=8192 batch-size=1 lr=6e-4 "
            "head-dim=64 num-key-value-heads=1 sliding-window=128 hca-ratio=128 o-groups=2 o-lora-rank=256"},
    {"d24", "num-hidden-layers=24 hidden-size=1024 num-attention-heads=16 q-lora-rank=512 kv-lora-rank=256 qk-nope-head-dim=64 qk-rope-head-dim=64 "
            "v-head-dim=64 intermediate-size=3328 index-n-heads=8 index-head-dim=128 index-topk=1024 seq-len=8192 batch-size=1 lr=3e-4 "
            "head-dim=128 num-key-value-heads=2 sliding-window=128 hca-ratio=128 o-groups=4 o-lora-rank=256"},
    {"d48", "num-hidden-layers=48 hidden-size=1600 num-attention-heads=25 q-lora-rank=768 kv-lora-rank=512 qk-nope-head-dim=64 qk-rope-head-dim=64 "
            "v-head-dim=64 intermediate-size=4800 index-n-heads=16 index-head-dim=128 index-topk=2048 seq-len=8192 batch-size=1 lr=2e-4 "
            "head-dim=128 num-key-value-heads=5 sliding-window=128 hca-ratio=128 o-groups=5 o-lora-rank=320"},
};

// Set one option from text. Stops with one line on an unknown name or a bad value; where says who gave it.
static void config_set(Config *c, const char *name, const char *value, const char *where) {
    const Option *o = NULL;
    for (int i = 0; i < N_OPTIONS; i++)
        if (!strcmp(OPTIONS[i].name, name)) o = &OPTIONS[i];
    if (!o) die("%s: unknown option --%s; ./train_cpu --help lists them", where, name);
    char *field = (char *)c + o->offset, *end;
    if (o->type == 's') {
        if (strlen(value) >= 256) die("%s: --%s takes at most 255 characters, got %zu", where, name, strlen(value));
        if (o->choices) {
            size_t n = strcspn(value, "|");
            const char *p = value[n] ? NULL : o->choices; // a value with a | in it is none of them
            int found = 0;
            while (p) {
                found |= !strncmp(p, value, n) && n && (p[n] == '|' || !p[n]);
                p = strchr(p, '|');
                p = p ? p + 1 : NULL;
            }
            if (!found) die("%s: --%s takes one of %s, got '%s'", where, name, o->choices, value);
        }
        for (size_t i = 0, n = strlen(value), step; i < n; i += step) // checkpoints and logs are JSON
            if (!(step = (size_t)json_utf8_length(value + i, n - i))) die("%s: --%s takes UTF-8 text, got an invalid byte 0x%02x at offset %zu", where, name, (unsigned char)value[i], i);
        strcpy(field, value);
        return;
    }
    errno = 0;
    double d = strtod(value, &end);
    if (end == value || *end || errno || !(d >= o->lo && d <= o->hi) || (o->type == 'i' && d != floor(d)))
        die("%s: --%s takes %s from %g to %g, got '%s'", where, name, o->type == 'i' ? "a whole number" : "a number", o->lo, o->hi, value);
    if (o->type == 'i') *(int64_t *)field = (int64_t)d;
    else *(double *)field = d;
}

// The value of an option as text.
static const char *config_text(const Config *c, const Option *o, char buf[300]) {
    const char *field = (const char *)c + o->offset;
    if (o->type == 's') snprintf(buf, 300, "%s", field);
    else if (o->type == 'i') snprintf(buf, 300, "%lld", (long long)*(const int64_t *)field);
    else {
        double d = *(const double *)field; // the shortest text that reads back as the same number
        int whole = d == floor(d) && fabs(d) < 1e9;
        for (int p = 1; p <= 17 && !whole; p++) {
            snprintf(buf, 300, "%.*g", p, d);
            if (strtod(buf, NULL) == d) break;
        }
        if (whole) snprintf(buf, 300, "%.0f", d);
    }
    return buf;
}

static void config_defaults(Config *c) {
    memset(c, 0, sizeof *c);
    for (int i = 0; i < N_OPTIONS; i++) config_set(c, OPTIONS[i].name, OPTIONS[i].def, "built-in default");
}

// Set options from "name=value name=value".
static void config_set_all(Config *c, const char *text, const char *where) {
    char buf[1024], *save = NULL;
    snprintf(buf, sizeof buf, "%s", text);
    for (char *p = strtok_r(buf, " ", &save); p; p = strtok_r(NULL, " ", &save)) {
        char *eq = strchr(p, '=');
        if (!eq) die("%s: expected name=value, got '%s'", where, p);
        *eq = 0;
        config_set(c, p, eq + 1, where);
    }
}

static void config_preset(Config *c, const char *name) {
    for (size_t i = 0; i < sizeof PRESETS / sizeof PRESETS[0]; i++)
        if (!strcmp(PRESETS[i].name, name)) config_set_all(c, PRESETS[i].settings, "built-in preset");
    config_set(c, "preset", name, "command line");
}

static int is_sparse(char letter) { return letter == 'D' || letter == 'C' || letter == 'Q'; } // has an indexer of its own
static int is_mla(char letter) { return letter == 'D' || letter == 'S' || letter == 'F'; }
static int is_v4(char letter) { return letter == 'C' || letter == 'H' || letter == 'W'; }
static char layer_letter(const Config *c, int64_t l) { return c->layers[l % (int64_t)strlen(c->layers)]; }

// Whatever one option cannot say about another. Stops with one line.
static void config_check(const Config *c) {
    if (!c->layers[0]) die("--layers takes a pattern of the letters D, S, F, C, H, W, Q, got an empty one");
    for (const char *p = c->layers; *p; p++)
        if (!strchr("DSFCHWQ", *p)) die("--layers takes a pattern of the letters D, S, F, C, H, W, Q, got '%s'", c->layers);
    int seen = 0;
    for (int64_t l = 0; l < c->L; l++) {
        seen |= layer_letter(c, l) == 'D';
        if (layer_letter(c, l) == 'S' && !seen) die("--layers: layer %lld is S, but no D before it made a selection to share; got '%s'", (long long)l, c->layers);
    }
    if (c->rope % 2) die("--qk-rope-head-dim must be even, got %lld", (long long)c->rope);
    if (c->DI < c->rope) die("--index-head-dim (%lld) must be at least --qk-rope-head-dim (%lld): the indexer rotates that many of its channels", (long long)c->DI, (long long)c->rope);
    for (int64_t l = 0; l < c->L; l++) {
        char letter = layer_letter(c, l);
        if (!is_mla(letter) && c->head_dim < c->rope) die("--head-dim (%lld) must be at least --qk-rope-head-dim (%lld)", (long long)c->head_dim, (long long)c->rope);
        if (is_v4(letter) && c->H % c->o_groups) die("--num-attention-heads (%lld) must be a multiple of --o-groups (%lld)", (long long)c->H, (long long)c->o_groups);
        if (letter == 'Q' && c->H % c->kv_heads) die("--num-attention-heads (%lld) must be a multiple of --num-key-value-heads (%lld)", (long long)c->H, (long long)c->kv_heads);
    }
    if (c->replay_offload && (strcmp(c->recompute, "block") || !strcmp(c->replay_store, "int32")))
        die("--replay-offload 1 moves packed selections: it takes --recompute block and --replay-store u16 or ef, got %s and %s", c->recompute, c->replay_store);
    if (!strcmp(c->task, "copy") && c->T % 2) die("--task copy needs an even --seq-len, got %lld", (long long)c->T);
    if (c->decay_steps > c->steps) die("--decay-steps (%lld) must not exceed --steps (%lld)", (long long)c->decay_steps, (long long)c->steps);
}

// All options as "name value" lines in two columns, as set.
static void config_print(const Config *c) {
    char a[300], line[700];
    int column = 0;
    for (int i = 0; i < N_OPTIONS; i++) {
        snprintf(line, sizeof line, "%-20s %s", OPTIONS[i].name, config_text(c, &OPTIONS[i], a));
        if (column && strlen(line) > 54) { printf("\n"); column = 0; }
        printf("| %-54s ", line);
        column = !column && strlen(line) <= 54;
        if (!column) printf("\n");
    }
    if (column) printf("\n");
}

static void config_help(void) {
    printf("Usage: train_cpu [--option value | --option=value]...\n\nOptions, with defaults:\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const Option *o = &OPTIONS[i];
        printf("  --%-21s %s%s%s%s [%s]\n", o->name, o->help, o->choices ? " (" : "", o->choices ? o->choices : "", o->choices ? ")" : "", o->def);
    }
    printf("\nPresets (--preset NAME), as changes to the defaults:\n");
    for (size_t i = 0; i < sizeof PRESETS / sizeof PRESETS[0]; i++) printf("  %-5s %s\n", PRESETS[i].name, PRESETS[i].settings);
}

// Fill c from argv: defaults, then the preset, then what was given. Stops on anything unknown.
static void config_parse(Config *c, int argc, char **argv) {
    config_defaults(c);
    for (int pass = 0; pass < 2; pass++) { // the preset first, wherever it stands
        for (int i = 1; i < argc; i++) {
            if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) { config_help(); exit(0); }
            if (strncmp(argv[i], "--", 2)) die("command line: expected an option such as --steps 100, got '%s'", argv[i]);
            char name[64];
            const char *eq = strchr(argv[i], '='), *value;
            snprintf(name, sizeof name, "%.*s", eq ? (int)(eq - argv[i] - 2) : 60, argv[i] + 2);
            if (eq) value = eq + 1;
            else if (i + 1 < argc) value = argv[++i];
            else { value = NULL; die("command line: --%s needs a value", name); }
            if (pass == 0 && !strcmp(name, "preset")) { config_set(c, name, value, "command line"); config_preset(c, value); }
            if (pass == 1 && strcmp(name, "preset")) config_set(c, name, value, "command line");
        }
    }
    config_check(c);
}

// Write the model's options as members of a JSON object, names as in the published config.json.
static void config_write_arch(FILE *f, const Config *c) {
    char v[300], key[64];
    int others = 0; // a published MLA configuration must not meet keys that mean something else to its readers
    for (int64_t l = 0; l < c->L; l++) others |= !is_mla(layer_letter(c, l));
    for (int i = 0; i < N_OPTIONS; i++) {
        if (!(OPTIONS[i].flags & ARCH) || (!others && OPTIONS[i].flags & NOT_MLA)) continue;
        snprintf(key, sizeof key, "%s", OPTIONS[i].name);
        for (char *p = key; *p; p++) if (*p == '-') *p = '_';
        if (!strncmp(key, "rope_", 5) || !strcmp(key, "model_type")) continue; // written by the caller, in the published form
        if (!strcmp(key, "layers")) strcpy(key, "hyscale_layers"); // not a key of the published configurations
        config_text(c, &OPTIONS[i], v);
        fprintf(f, "  \"%s\": ", key);
        if (OPTIONS[i].type == 's') json_write_string(f, v);
        else fprintf(f, "%s", v);
        fprintf(f, ",\n");
    }
}

// Set the model's options from a config.json object (ours, or one of transformers). Absent keys keep their value.
static void config_read_arch(Config *c, const Json *j, const char *where) {
    static const char *const rope_keys[][2] = {{"rope-theta", "rope_theta"}, {"rope-type", "rope_type"}, {"rope-factor", "factor"},
        {"rope-original", "original_max_position_embeddings"}, {"rope-beta-fast", "beta_fast"}, {"rope-beta-slow", "beta_slow"},
        {"rope-mscale", "mscale"}, {"rope-mscale-all-dim", "mscale_all_dim"}};
    char key[64], v[64];
    for (int i = 0; i < N_OPTIONS; i++) {
        const Option *o = &OPTIONS[i];
        if (!(o->flags & ARCH)) continue;
        snprintf(key, sizeof key, "%s", o->name);
        for (char *p = key; *p; p++) if (*p == '-') *p = '_';
        const Json *x = json_get(j, !strcmp(key, "layers") ? "hyscale_layers" : key);
        const Json *rope = json_get(j, "rope_parameters");
        for (size_t r = 0; rope && r < sizeof rope_keys / sizeof rope_keys[0]; r++)
            if (!strcmp(o->name, rope_keys[r][0]) && json_get(rope, rope_keys[r][1])) x = json_get(rope, rope_keys[r][1]);
        if (!x || x->type == JSON_NULL) continue;
        if (!strcmp(key, "model_type") && json_get(j, "hyscale_model_type")) x = json_get(j, "hyscale_model_type");
        if (!strcmp(key, "model_type") && strcmp(x->str ? x->str : "", "glm_moe_dsa")) { strcpy(c->model_type, "deepseek_v32"); continue; }
        if (x->type == JSON_STRING) config_set(c, o->name, x->str, where);
        else if (x->type == JSON_NUMBER) { snprintf(v, sizeof v, "%.17g", x->num); config_set(c, o->name, v, where); }
        else die("%s: \"%s\" must be a number or a string", where, key);
    }
    const Json *types = json_get(j, "indexer_types"); // GLM: "full" or "shared" for each layer
    if (!json_get(j, "hyscale_layers") && types && types->type == JSON_ARRAY && types->n < 256) {
        for (int i = 0; i < types->n; i++) c->layers[i] = types->items[i].str && !strcmp(types->items[i].str, "shared") ? 'S' : 'D';
        c->layers[types->n] = 0;
    }
}

// ----------------------------------------------------------------------------
// 3. Tokens in
// Training rows are the stream cut at multiples of T, visited in an order that is a function of (seed, epoch):
// nothing to store, any position can be resumed, and every row comes once an epoch.

typedef struct {
    TokenStream stream;  // unused for the copy task
    int copy, vocab, eot; // eot < 0: no documents
    int64_t T, n_rows;   // rows of an epoch
    uint64_t seed;
    int shuffle;
} Loader;

enum { COPY_SYMBOLS = 64 };

// Open the training (val = 0) or validation stream. Stops with one line when it holds no whole row.
static void loader_open(Loader *d, const Config *c, int val) {
    char err[4096];
    memset(d, 0, sizeof *d);
    d->T = c->T;
    d->seed = (uint64_t)c->seed;
    d->shuffle = !val;
    if (!strcmp(c->task, "copy")) {
        d->copy = 1;
        d->vocab = COPY_SYMBOLS;
        d->eot = -1;
        d->n_rows = val ? 256 : (int64_t)1 << 40;
        d->seed = rng_mix(d->seed + (uint64_t)val); // validation rows differ from training rows
        return;
    }
    if (tokens_open(&d->stream, val ? c->val : c->train, val ? NULL : c->val, err, sizeof err)) die("--%s: %s", val ? "val" : "train", err);
    d->vocab = d->stream.vocab;
    d->eot = d->stream.eot;
    d->n_rows = (d->stream.n_tokens - 1) / d->T;
    if (d->n_rows < 1)
        die("--%s %s: %lld tokens, but a row of --seq-len %lld needs %lld", val ? "val" : "train", val ? c->val : c->train,
            (long long)d->stream.n_tokens, (long long)d->T, (long long)d->T + 1);
}

static void loader_close(Loader *d) { if (!d->copy) tokens_close(&d->stream); }

// The i-th of n rows in this epoch's order: a four-round Feistel network on the smallest even number of bits
// that holds n, walked until it lands below n (Black and Rogaway 2002). A bijection of [0, n).
static int64_t permuted(uint64_t seed, uint64_t epoch, int64_t i, int64_t n) {
    int half = 1;
    while (((int64_t)1 << (2 * half)) < n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1, x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t next = left ^ (rng_u64(seed, RNG_ORDER + round, epoch << 40 ^ right) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

// Fill tokens [T] and targets [T] (the next token; -1 where there is no loss) of the index-th row ever asked for.
static void loader_row(const Loader *d, int64_t index, int32_t *tokens, int32_t *targets) {
    int64_t T = d->T;
    if (d->copy) {
        for (int64_t t = 0; t < T; t++) tokens[t] = (int32_t)(rng_u64(d->seed, RNG_TASK + (uint64_t)(t % (T / 2)), (uint64_t)index) % COPY_SYMBOLS);
        for (int64_t t = 0; t < T; t++) targets[t] = t < T / 2 ? -1 : tokens[(t + 1) % T];
        return;
    }
    char err[4096];
    int32_t last = 0;
    int64_t row = d->shuffle ? permuted(d->seed, (uint64_t)(index / d->n_rows), index % d->n_rows, d->n_rows) : index % d->n_rows;
    if (tokens_read(&d->stream, row * T, T, tokens, err, sizeof err) || tokens_read(&d->stream, row * T + T, 1, &last, err, sizeof err)) die("%s", err);
    memcpy(targets, tokens + 1, (size_t)(T - 1) * sizeof *targets);
    targets[T - 1] = last;
}

// ----------------------------------------------------------------------------
// 4. Parameters
// One flat buffer, one table. The table drives allocation, initial values, weight decay, learning rates and
// checkpoints; a layer only holds indices into it.

typedef struct {
    char name[96];  // as published
    int64_t rows, cols;  // vectors have rows = 1
    int64_t saved_rows;  // fewer than rows where the vocabulary is padded: checkpoints hold no padding
    int ndim;
    int64_t offset, size;
    int index;      // belongs to the indexer: its own learning rate and gradient norm, fed by the KL alone
    int decay;
    double init;    // > 0: normal with this deviation; 0: zeros; < 0: ones
} Tensor;

// How a row of a selection is packed while it waits for the backward pass (section 8).
typedef struct {
    int ef, low;                 // Elias-Fano, else 16 bits and a page; Elias-Fano: low bits of a candidate
    int64_t k, slots;            // slots of an unpacked row; those that can hold a candidate
    int64_t head, words;         // 32-bit words of the first part and of the whole
} Packing;

// One attention layer's handles and buffers. Everything a letter needs stands here; rows are (b, t). A letter differs
// in how queries, KV rows, index queries and index keys are made; what a candidate is, is the geometry below.
typedef struct {
    char letter;
    int source;                  // the layer whose selection and indexer this one uses; -1: none
    int all;                     // attends to every visible candidate: nothing is selected
    // parameters, as indices into the table; -1 where the letter has none
    int input_norm, post_norm, gate, up, down;
    int q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o;      // MLA; C H W: kv_a is kv_proj, o is o_b_proj
    int iq, ik, ik_norm, ik_bias, iw;                      // indexer; Q: iq is the joint projection, ik_bias the query norm
    int o_a, sinks, comp_kv, comp_gate, comp_bias, comp_norm, icomp_gate, icomp_bias; // C H W; icomp: the indexer's compressor
    int q_proj, k_proj, v_proj, q_norm, k_norm;            // Q
    // geometry of the attention core
    int64_t G, Dk, Dv, R;        // key-value heads, key and value sizes, floats of a KV row
    int64_t v_off;               // where the values start in a row (keys start at 0)
    int64_t r;                   // tokens of a candidate
    double scale;                // of the attention logits
    int64_t n_cand, n_rows;      // candidates and KV rows of a sequence: its tokens, then its compressed entries (C H)
    int64_t n_q, n_att;          // widths of the query projection and of the input to the output projection
    const real *cos_sin;         // (T, rope/2, 2) its RoPE table
    // kept from forward to backward, or as a cache while generating
    real *x;                     // (N, C) layer input
    real *rows;                  // (B, n_rows, R) KV rows. MLA: latent | rotated key. C H W: key = value. Q: keys | values
    real *k_index;               // (B, n_cand, DI) index keys
    int32_t *sel;                // (N, k) chosen candidates, ascending, -1 behind the last; see Model.sel
    uint32_t *packed;            // (N, packing.words) the same, while other layers use sel; else NULL
    Packing packing;
    real *q_index, *w_index;     // (N, HI, DI) index queries, (N, HI) head weights, scales included
    real *comp, *icomp;          // C H: (N, 2, width) values and gates before pooling; Q: icomp (N, HI + 1, DI) raw index projections
    // recomputable from x
    real *lse;                   // (N, H) log of the softmax denominator
    real *xn, *rstd;             // (N, C) normed input, (N)
    real *qa, *qr, *rstd_q;      // (N, q_lora) query latent before and after its norm, (N)
    real *q, *rstd_h;            // (N, n_q) query projection, (N, H) of its norm by head
    real *kva, *rstd_kv;         // (N, R) key-value projection before the norm, (N); Q: (G, N)
    real *qrow;                  // (N, H, Dk) queries as the core takes them
    real *oc, *att;              // (N, H, Dv) sums of values, (N, n_att) input of the output projection
    real *oa;                    // (N, o_groups * o_lora) C H W
    real *ent, *rstd_e;          // (B, n_cand, D) entries before their norm, (B, n_cand)
    real *ika, *mean_k, *rstd_k; // (B, n_cand, DI) index keys before their norm, (B, n_cand) each
    real *rstd_iq;               // (HI, N) Q: of the index queries' norm
    real *x2, *xn2, *rstd2;      // (N, C) after attention, normed, (N)
    real *g, *u, *act;           // (N, F) gate, up, silu(gate) * up; backward leaves their gradients there
} Layer;

// One line of the memory plan: all buffers of one name together.
typedef struct { char name[64]; size_t bytes; } PlanItem;
// act_bytes: of one activation; 0: sizeof(real). pinned: what a device's plan needs besides, on the host
typedef struct { char *base; size_t used, peak, act_bytes, pinned; PlanItem items[96]; int n_items; } Arena;

// What the KL cannot see: how much of dense attention the selection covers, on sampled queries (means over queries).
typedef struct { int64_t queries; double mass, recall, window_mass, oracle_mass; int64_t n; } Probe;

// Sums over the rows of one or more passes.
typedef struct { double loss, kl, hits; int64_t targets, kl_rows; } Stats;

typedef struct {
    Config c;
    int64_t B, T, N, Vp;          // N = B*T rows, Vp = V padded to a multiple of 64
    int training;                 // buffers for backward exist
    int dense;                    // warm-up stage: D layers attend to everything, the KL runs over everything
    int fixed_selection;          // use the stored selections as they are (replay; gradient checks)
    int64_t r0, nr;               // rows being computed: all, or the new ones while generating
    int eot;                      // token that starts a document; -1: none
    Tensor *tensors;
    int n_tensors, embed, final_norm, head;
    int64_t n_params;             // with padding
    real *params, *grads, *m, *v; // flat, by the table
    Layer *layers;
    int32_t *sel;                 // (N, k) with recomputation: the one selection that is unpacked; layers' sel point here
    int held;                     // the layer whose selection that is; -1: none
    Arena arena, *waiting;        // waiting: where packed selections are planned; NULL: with all else
    // buffers that belong to no layer
    int32_t *tokens, *targets;    // (N)
    int32_t *doc;                 // (N) first position of the row's document
    real *cos_sin;                // (ROPE_KINDS, T, rope/2, 2), section 7
    real *xf, *rstd_f, *y;        // (N, C) final normed, (N), (N, C) branch output (the CUDA trainer's products add the residual: it has none)
    int64_t logit_rows;           // rows of a chunk of logits
    real *logits, *all_logits;    // (logit_rows, Vp); (N, V) when a test asks for them, else NULL
    float *row_loss, *row_kl;     // (N)
    int32_t *row_hit;             // (N) 1 where the likeliest token is the target
    real *last_x;                 // (N, C) output of the last block
    // backward
    real *dx, *dxn, *d_att, *d_oa, *d_oc, *d_qrow, *d_rows, *d_q, *d_qr, *d_kva;
    real *d_qi, *d_wi, *d_ki, *d_ki2; // (N, HI, DI), (N, HI), (B, n_cand, DI) twice: after and before their norm
    real *d_comp, *d_ent, *d_sink; // as comp, ent; (N, H)
    real *lane_rows, *lane_ki;    // (LANES, n_rows, R), (LANES, n_cand, DI) partial sums, see section 9
    char *scratch;                // (threads, scratch_bytes)
    size_t scratch_bytes;
    int64_t most_cand;            // candidates of a sequence in the layer that has most
    int lanes;                    // accumulators of the backward pass (section 9); 0: the CUDA trainer has none
    int learning;                 // this forward pass will be followed by backward
    double loss_scale, kl_scale;  // 1 / targets of the whole step, kl_coef / queries of the whole step
    Stats sums;                   // of the passes counted since the last look
    Probe probe;
    int64_t index_scans;          // layers whose index scores were scanned, since start
    int64_t nan_scores;           // selected candidates whose score is NaN: bad activations are seen, not hidden
    uint64_t select_seed;
} Model;

// Append a tensor to the table. Returns its index.
static int tensor_add(Model *m, int64_t rows, int64_t cols, double init, int index, const char *fmt, ...) {
    m->tensors = (Tensor *)realloc(m->tensors, (size_t)(m->n_tensors + 1) * sizeof(Tensor));
    if (!m->tensors) die("no memory for the parameter table");
    Tensor *t = &m->tensors[m->n_tensors];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(t->name, sizeof t->name, fmt, ap);
    va_end(ap);
    t->rows = t->saved_rows = rows ? rows : 1;
    t->cols = cols;
    t->ndim = rows ? 2 : 1; // rows = 0 asks for a vector
    t->offset = m->n_params;
    t->size = t->rows * cols;
    t->index = index;
    t->decay = t->ndim == 2;
    t->init = init;
    m->n_params += t->size;
    return m->n_tensors++;
}

static real *param(const Model *m, int i) { return m->params + m->tensors[i].offset; }
static real *grad(const Model *m, int i) { return m->grads + m->tensors[i].offset; }

// MLA layers: parameters and geometry. One KV row [latent | rotated key] serves all heads.
static void mla_build(Model *m, Layer *l, int n, double std, double out) {
    const Config *c = &m->c;
    l->G = l->r = 1;
    l->Dk = l->R = c->kv_lora + c->rope;
    l->Dv = c->kv_lora;
    double mscale = !strcmp(c->rope_type, "yarn") && c->rope_factor > 1 ? 0.1 * c->rope_mscale_all * log(c->rope_factor) + 1 : 1;
    l->scale = pow((double)(c->nope + c->rope), -0.5) * mscale * mscale; // YaRN sharpens the softmax
    l->n_q = c->H * (c->nope + c->rope);
    l->n_att = c->H * c->v_dim;
    l->q_a = tensor_add(m, c->q_lora, c->C, std, 0, "model.layers.%d.self_attn.q_a_proj.weight", n);
    l->q_a_norm = tensor_add(m, 0, c->q_lora, -1, 0, "model.layers.%d.self_attn.q_a_layernorm.weight", n);
    l->q_b = tensor_add(m, l->n_q, c->q_lora, std, 0, "model.layers.%d.self_attn.q_b_proj.weight", n);
    l->kv_a = tensor_add(m, l->R, c->C, std, 0, "model.layers.%d.self_attn.kv_a_proj_with_mqa.weight", n);
    l->kv_a_norm = tensor_add(m, 0, c->kv_lora, -1, 0, "model.layers.%d.self_attn.kv_a_layernorm.weight", n);
    l->kv_b = tensor_add(m, c->H * (c->nope + c->v_dim), c->kv_lora, std, 0, "model.layers.%d.self_attn.kv_b_proj.weight", n);
    l->o = tensor_add(m, c->C, l->n_att, out, 0, "model.layers.%d.self_attn.o_proj.weight", n);
    if (!is_sparse(l->letter)) return;
    l->iq = tensor_add(m, c->HI * c->DI, c->q_lora, std, 1, "model.layers.%d.self_attn.indexer.wq_b.weight", n);
    l->ik = tensor_add(m, c->DI, c->C, std, 1, "model.layers.%d.self_attn.indexer.wk.weight", n);
    l->ik_norm = tensor_add(m, 0, c->DI, -1, 1, "model.layers.%d.self_attn.indexer.k_norm.weight", n);
    l->ik_bias = tensor_add(m, 0, c->DI, 0, 1, "model.layers.%d.self_attn.indexer.k_norm.bias", n);
    l->iw = tensor_add(m, c->HI, c->C, std, 1, "model.layers.%d.self_attn.indexer.weights_proj.weight", n);
}

// C, H and W layers: a sliding window of tokens with a sink, and compressed entries behind the tokens (C: chosen,
// H: all, W: none). A row is key and value at once.
static void v4_build(Model *m, Layer *l, int n, double std, double out) {
    const Config *c = &m->c;
    const char *p = "model.layers.%d.self_attn.";
    int64_t D = c->head_dim, wide = l->letter == 'C' ? 2 : 1; // CSA entries overlap: each token serves two
    char f[96];
    l->G = 1;
    l->r = l->letter == 'C' ? c->csa_ratio : l->letter == 'H' ? c->hca_ratio : 0;
    l->Dk = l->Dv = l->R = D;
    l->scale = pow((double)D, -0.5);
    l->n_q = l->n_att = c->H * D;
#define NAME(suffix) (snprintf(f, sizeof f, "%s%s", p, suffix), f)
    l->q_a = tensor_add(m, c->q_lora, c->C, std, 0, NAME("q_a_proj.weight"), n);
    l->q_a_norm = tensor_add(m, 0, c->q_lora, -1, 0, NAME("q_a_norm.weight"), n);
    l->q_b = tensor_add(m, l->n_q, c->q_lora, std, 0, NAME("q_b_proj.weight"), n);
    l->kv_a = tensor_add(m, D, c->C, std, 0, NAME("kv_proj.weight"), n);
    l->kv_a_norm = tensor_add(m, 0, D, -1, 0, NAME("kv_norm.weight"), n);
    l->o_a = tensor_add(m, c->o_groups * c->o_lora, l->n_att / c->o_groups, std, 0, NAME("o_a_proj.weight"), n);
    l->o = tensor_add(m, c->C, c->o_groups * c->o_lora, out, 0, NAME("o_b_proj.weight"), n);
    l->sinks = tensor_add(m, 0, c->H, 0, 0, NAME("sinks"), n);
    if (l->letter == 'W') return;
    l->comp_kv = tensor_add(m, wide * D, c->C, std, 0, NAME("compressor.kv_proj.weight"), n);
    l->comp_gate = tensor_add(m, wide * D, c->C, std, 0, NAME("compressor.gate_proj.weight"), n);
    l->comp_bias = tensor_add(m, l->r, wide * D, 0, 0, NAME("compressor.position_bias"), n);
    l->comp_norm = tensor_add(m, 0, D, -1, 0, NAME("compressor.kv_norm.weight"), n);
    m->tensors[l->comp_bias].decay = 0;
    if (l->letter == 'H') return;
    l->iq = tensor_add(m, c->HI * c->DI, c->q_lora, std, 1, NAME("compressor.indexer.q_b_proj.weight"), n);
    l->ik = tensor_add(m, 2 * c->DI, c->C, std, 1, NAME("compressor.indexer.kv_proj.weight"), n);
    l->icomp_gate = tensor_add(m, 2 * c->DI, c->C, std, 1, NAME("compressor.indexer.gate_proj.weight"), n);
    l->icomp_bias = tensor_add(m, l->r, 2 * c->DI, 0, 1, NAME("compressor.indexer.position_bias"), n);
    l->ik_norm = tensor_add(m, 0, c->DI, -1, 1, NAME("compressor.indexer.kv_norm.weight"), n);
    m->tensors[l->icomp_bias].decay = 0;
    l->iw = tensor_add(m, c->HI, c->C, std, 1, NAME("compressor.indexer.scorer.weights_proj.weight"), n);
#undef NAME
}

// Q layers: grouped-query attention with gated output; a candidate is a block of tokens. Norm weights are stored as w
// and applied as 1 + w.
static void qsa_build(Model *m, Layer *l, int n, double std, double out) {
    const Config *c = &m->c;
    int64_t D = c->head_dim;
    l->G = c->kv_heads;
    l->r = c->qsa_ratio;
    l->Dk = l->Dv = D;
    l->scale = pow((double)D, -0.5);
    l->v_off = l->G * D;
    l->R = 2 * l->G * D;
    l->n_q = c->H * 2 * D; // per head: query, gate
    l->n_att = c->H * D;
    l->q_proj = tensor_add(m, l->n_q, c->C, std, 0, "model.layers.%d.self_attn.q_proj.weight", n);
    l->k_proj = tensor_add(m, l->G * D, c->C, std, 0, "model.layers.%d.self_attn.k_proj.weight", n);
    l->v_proj = tensor_add(m, l->G * D, c->C, std, 0, "model.layers.%d.self_attn.v_proj.weight", n);
    l->o = tensor_add(m, c->C, l->n_att, out, 0, "model.layers.%d.self_attn.o_proj.weight", n);
    l->q_norm = tensor_add(m, 0, D, 0, 0, "model.layers.%d.self_attn.q_norm.weight", n);
    l->k_norm = tensor_add(m, 0, D, 0, 0, "model.layers.%d.self_attn.k_norm.weight", n);
    l->iq = tensor_add(m, (c->HI + 1) * c->DI, c->C, std, 1, "model.layers.%d.self_attn.indexer.index_qk_proj.weight", n);
    l->ik_bias = tensor_add(m, 0, c->DI, 0, 1, "model.layers.%d.self_attn.indexer.q_layernorm.weight", n);
    l->ik_norm = tensor_add(m, 0, c->DI, 0, 1, "model.layers.%d.self_attn.indexer.k_layernorm.weight", n);
}

// Build the table of tensors and the layers from the configuration. Projections that write into the residual
// stream start smaller by sqrt(2L) (GPT-2), so that its variance does not grow with depth.
static void model_build(Model *m, const Config *c) {
    memset(m, 0, sizeof *m);
    m->c = *c;
    m->eot = -1;
    m->Vp = (c->V + 63) / 64 * 64;
    m->layers = (Layer *)xalloc((size_t)c->L * sizeof(Layer));
    double std = 0.02, out = 0.02 / sqrt(2.0 * (double)c->L);
    int source = -1;
    m->embed = tensor_add(m, m->Vp, c->C, std, 0, "model.embed_tokens.weight");
    for (int64_t i = 0; i < c->L; i++) {
        Layer *l = &m->layers[i];
        int n = (int)i;
        memset(l, 0xff, offsetof(Layer, G)); // handles: -1
        l->letter = layer_letter(c, i);
        if (l->letter == 'D') source = n;
        l->source = is_sparse(l->letter) ? n : l->letter == 'S' ? source : -1;
        l->all = !is_sparse(l->letter) && l->letter != 'S';
        l->input_norm = tensor_add(m, 0, c->C, -1, 0, "model.layers.%d.input_layernorm.weight", n);
        if (is_mla(l->letter)) mla_build(m, l, n, std, out);
        else if (is_v4(l->letter)) v4_build(m, l, n, std, out);
        else qsa_build(m, l, n, std, out);
        l->post_norm = tensor_add(m, 0, c->C, -1, 0, "model.layers.%d.post_attention_layernorm.weight", n);
        l->gate = tensor_add(m, c->F, c->C, std, 0, "model.layers.%d.mlp.gate_proj.weight", n);
        l->up = tensor_add(m, c->F, c->C, std, 0, "model.layers.%d.mlp.up_proj.weight", n);
        l->down = tensor_add(m, c->C, c->F, out, 0, "model.layers.%d.mlp.down_proj.weight", n);
    }
    m->final_norm = tensor_add(m, 0, c->C, -1, 0, "model.norm.weight");
    m->head = tensor_add(m, m->Vp, c->C, std, 0, "lm_head.weight");
    m->tensors[m->embed].saved_rows = m->tensors[m->head].saved_rows = c->V;
}

// Give the parameters memory (with gradients and moments when training) and initial values.
static void model_init_params(Model *m, int training) {
    size_t bytes = (size_t)m->n_params * sizeof(real);
    m->params = (real *)xalloc(bytes);
    if (training) {
        m->grads = (real *)xalloc(bytes);
        m->m = (real *)xalloc(bytes);
        m->v = (real *)xalloc(bytes);
    }
    for (int i = 0; i < m->n_tensors; i++) {
        const Tensor *t = &m->tensors[i];
        real *p = param(m, i);
        #pragma omp parallel for
        for (int64_t j = 0; j < t->saved_rows * t->cols; j++) // padding stays zero
            p[j] = (real)(t->init < 0 ? 1 : t->init == 0 ? 0 : t->init * rng_normal((uint64_t)m->c.seed, RNG_INIT + (uint64_t)i, (uint64_t)j));
    }
}

static void model_free(Model *m) {
    free(m->params); free(m->grads); free(m->m); free(m->v);
    free(m->arena.base); free(m->layers); free(m->tensors);
    memset(m, 0, sizeof *m);
}

// ----------------------------------------------------------------------------
// 5. Activations
// activations_plan() walks all buffers once to add up their sizes and once more to hand out the memory, so the
// printed plan is the allocation. Buffers that are never needed at the same time share one place: those of the layers
// when they can be recomputed, and the parts of a pass that follow one another (plan_walk).

// Note bytes under a name, as a line of the plan.
static void plan_note(Arena *a, const char *name, size_t bytes) {
    int i = 0;
    while (i < a->n_items && strcmp(a->items[i].name, name)) i++;
    if (i == (int)(sizeof a->items / sizeof a->items[0])) die("the memory plan has more than %d lines", i);
    if (i == a->n_items) {
        a->n_items++;
        a->items[i].bytes = 0;
        snprintf(a->items[i].name, sizeof a->items[i].name, "%s", name);
    }
    a->items[i].bytes += bytes;
}

// Take bytes from the arena under a name. While measuring (no base yet) it returns NULL and notes what it adds to the peak.
static void *plan_take(Arena *a, const char *name, size_t bytes) {
    char *p = a->base ? a->base + a->used : NULL;
    size_t padded = (bytes + 63) / 64 * 64;
    if (!a->base) plan_note(a, name, a->used + padded > a->peak ? a->used + padded - a->peak : 0);
    a->used += padded;
    if (a->used > a->peak) a->peak = a->used;
    return p;
}
static real *plan_real(Arena *a, const char *name, int64_t n) { return (real *)plan_take(a, name, (size_t)n * sizeof(real)); }
// Activations, which the CUDA trainer may keep in fewer bytes; sums and statistics (plan_real) it does not.
static real *plan_act(Arena *a, const char *name, int64_t n) { return (real *)plan_take(a, name, (size_t)n * (a->act_bytes ? a->act_bytes : sizeof(real))); }
static int32_t *plan_int(Arena *a, const char *name, int64_t n) { return (int32_t *)plan_take(a, name, (size_t)n * sizeof(int32_t)); }

enum { ROPE_MLA, ROPE_PLAIN, ROPE_COMPRESS, ROPE_KINDS }; // D S F; W Q; C H
enum { LANES = 8, SCORE_ROWS = 256, SCORE_KEYS = 256, CLASSIFIER_ROWS = 256 };

// Queries that one thread scores together: about SCORE_ROWS rows of (query, head).
static int64_t score_queries(const Config *c) { return max64(1, SCORE_ROWS / c->HI); }

// Width of a token's compressor projections: values, then gates. C entries overlap, so their halves serve two entries.
static int64_t comp_width(const Layer *l, int64_t d) { return 2 * (l->letter == 'C' ? 2 : 1) * d; }

// What a layer's keys are made of: recomputable in training, caches while generating.
static void plan_layer_keys(Model *m, Layer *l, Arena *a, const char *name) {
    const Config *c = &m->c;
    l->rows = plan_act(a, name, m->B * l->n_rows * l->R);
    if (l->letter == 'C' || l->letter == 'H') l->comp = plan_act(a, name, m->N * comp_width(l, c->head_dim));
    if (l->letter == 'C') l->icomp = plan_act(a, name, m->N * comp_width(l, c->DI));
    if (l->letter == 'Q') l->icomp = plan_act(a, name, m->N * (c->HI + 1) * c->DI);
}

static void plan_layer_index(Model *m, Layer *l, Arena *a, const char *name) {
    const Config *c = &m->c;
    l->k_index = plan_act(a, name, m->B * l->n_cand * c->DI);
    l->q_index = plan_act(a, name, m->N * c->HI * c->DI);
    l->w_index = plan_real(a, name, m->N * c->HI);
}

// With recomputation: whether a layer's selection outlasts it: for replay, or for the S layers that read it.
static int selection_kept(const Model *m, const Layer *l) {
    int kept = (int)m->c.replay;
    for (int64_t i = 0; i < m->c.L; i++) kept |= m->layers[i].letter == 'S' && m->layers + m->layers[i].source == l;
    return kept;
}

// Whether a layer has no buffer of its own for its selection as attention reads it, but takes its turn with Model.sel.
static int selection_takes_turns(const Model *m, const Layer *l) {
    return is_sparse(l->letter) && m->training && !strcmp(m->c.recompute, "block") && !(selection_kept(m, l) && !strcmp(m->c.replay_store, "int32"));
}

static Packing packing_of(int ef, int64_t k, int64_t n_cand);

// Buffers that outlast the layer: its input and its selection; caches while generating; index queries and keys when
// other layers' attention will still teach this layer's indexer.
static void plan_layer_kept(Model *m, Layer *l, Arena *a) {
    const Config *c = &m->c;
    l->n_cand = l->r ? m->T / l->r : 0;
    l->n_rows = m->T + (is_v4(l->letter) ? l->n_cand : 0);
    l->cos_sin = m->cos_sin + m->T * c->rope * (is_mla(l->letter) ? ROPE_MLA : l->letter == 'C' || l->letter == 'H' ? ROPE_COMPRESS : ROPE_PLAIN);
    l->x = plan_act(a, "layer inputs", m->N * c->C);
    l->packed = NULL;
    if (selection_takes_turns(m, l)) {
        l->sel = m->sel;
        l->packing = packing_of(!strcmp(c->replay_store, "ef"), c->topk, l->n_cand);
        if (selection_kept(m, l)) l->packed = (uint32_t *)plan_int(m->waiting ? m->waiting : a, "selections", m->N * l->packing.words);
    } else if (is_sparse(l->letter)) l->sel = plan_int(a, "selections", m->N * c->topk);
    if (!m->training) plan_layer_keys(m, l, a, "KV rows (cache)");
    if (is_sparse(l->letter) && (!m->training || !strcmp(c->index_target, "served"))) plan_layer_index(m, l, a, "index queries and keys");
}

// A layer's attention, from the normed input to the input of the output projection.
static void plan_layer_attention(Model *m, Layer *l, Arena *a) {
    const Config *c = &m->c;
    int64_t N = m->N, H = c->H;
    const char *name = "layer activations";
    l->xn = plan_act(a, name, N * c->C);
    l->rstd = plan_real(a, name, N);
    if (l->letter != 'Q') {
        l->qa = plan_act(a, name, N * c->q_lora);
        l->qr = plan_act(a, name, N * c->q_lora);
        l->rstd_q = plan_real(a, name, N);
    }
    l->q = plan_act(a, name, N * l->n_q);
    if (!is_mla(l->letter)) l->rstd_h = plan_real(a, name, N * H);
    l->kva = plan_act(a, name, N * l->R);
    l->rstd_kv = plan_real(a, name, N * l->G);
    l->qrow = plan_act(a, name, N * H * l->Dk);
    l->oc = plan_act(a, name, N * H * l->Dv);
    l->att = plan_act(a, name, N * l->n_att);
    l->lse = plan_real(a, name, N * H);
    if (is_v4(l->letter)) l->oa = plan_act(a, name, N * c->o_groups * c->o_lora);
    if (l->letter == 'C' || l->letter == 'H') {
        l->ent = plan_act(a, name, m->B * l->n_cand * l->R);
        l->rstd_e = plan_real(a, name, m->B * l->n_cand);
    }
    if (m->training) plan_layer_keys(m, l, a, name);
    if (is_sparse(l->letter)) {
        l->ika = plan_act(a, name, m->B * l->n_cand * c->DI);
        l->rstd_k = plan_real(a, name, m->B * l->n_cand);
        if (l->letter == 'D') l->mean_k = plan_real(a, name, m->B * l->n_cand);
        if (l->letter == 'Q') l->rstd_iq = plan_real(a, name, N * c->HI);
        if (m->training && strcmp(c->index_target, "served")) plan_layer_index(m, l, a, name);
    }
}

// A layer's MLP, with the norm before it.
static void plan_layer_mlp(Model *m, Layer *l, Arena *a) {
    const char *name = "layer activations";
    l->x2 = plan_act(a, name, m->N * m->c.C);
    l->xn2 = plan_act(a, name, m->N * m->c.C);
    l->rstd2 = plan_real(a, name, m->N);
    l->g = plan_act(a, name, m->N * m->c.F);
    l->u = plan_act(a, name, m->N * m->c.F);
    l->act = plan_act(a, name, m->N * m->c.F);
}

// Bytes one thread needs: for selection (scores of a block of queries, candidate buffers or the table's rows) or
// for attention (one query's support with all heads), whichever is larger.
static size_t thread_scratch(const Model *m) {
    const Config *c = &m->c;
    int64_t queries = score_queries(c), n = queries * SCORE_KEYS, attend, k = min64(c->topk, m->T);
    int64_t select = n * c->HI * (int64_t)sizeof(real) + n * (int64_t)sizeof(float) + 16384; // dots, scores of a chunk
    if (!strcmp(c->topk_method, "table")) select += m->T * (int64_t)sizeof(uint64_t) + queries * m->T * (int64_t)sizeof(float);
    else select += queries * (2 * k + SCORE_KEYS) * (int64_t)sizeof(uint64_t);
    attend = (m->T + min64(m->T, c->window)) * (int64_t)(sizeof(int32_t) * 2 + sizeof(uint64_t) + (2 * (size_t)c->H + (size_t)c->HI + 4) * sizeof(real)) + 16384;
    return (size_t)(max64(select, attend) + 63) / 64 * 64;
}

// End a group of buffers that shares its place, from start on, with the groups before it: the next one starts there again.
// end: where the longest so far ends; returns it with this one taken in.
static size_t plan_group(Arena *a, size_t start, size_t end) {
    end = a->used > end ? a->used : end;
    a->used = start;
    return end;
}

// In the order of a pass, what is alive when: a layer's attention, then its MLP, forward; the classifier once all layers
// are done; backward a layer's MLP, then its attention, which has the gradients of section 10 to itself. So MLP, classifier
// and those gradients share one place; the MLP's buffers only when no other layer's wait for backward.
static void plan_walk(Model *m, Arena *a) {
    const Config *c = &m->c;
    int shared = !m->training || !strcmp(c->recompute, "block"); // all layers share one place
    int64_t N = m->N, H = c->H, q = 0, att = 0, oa = 0, qrow = 0, oc = 0, rows = 0, kva = 0, comp = 0, ent = 0, lane = 0;
    m->tokens = plan_int(a, "tokens, targets, documents", N);
    m->targets = plan_int(a, "tokens, targets, documents", N);
    m->doc = plan_int(a, "tokens, targets, documents", N);
    m->row_hit = plan_int(a, "tokens, targets, documents", N);
    m->row_loss = (float *)plan_int(a, "tokens, targets, documents", N);
    m->row_kl = (float *)plan_int(a, "tokens, targets, documents", N);
    m->cos_sin = plan_real(a, "RoPE tables", ROPE_KINDS * m->T * c->rope);
    int turns = 0;
    for (int64_t l = 0; l < c->L; l++) turns |= selection_takes_turns(m, &m->layers[l]);
    if (turns) m->sel = plan_int(a, "selection, unpacked", N * c->topk);
    for (int64_t l = 0; l < c->L; l++) plan_layer_kept(m, &m->layers[l], a);
    m->last_x = plan_act(a, "layer inputs", N * c->C);
    m->rstd_f = plan_real(a, "final norm, branch output", N);
    m->scratch = (char *)plan_take(a, "scratch of the threads", m->scratch_bytes * (size_t)max_threads());
    const char *name = "gradients of activations"; // one set for all layers: as large as the largest needs
    m->most_cand = 0;
    for (int64_t i = 0; i < c->L; i++) {
        const Layer *l = &m->layers[i];
        q = max64(q, N * l->n_q);
        att = max64(att, N * l->n_att);
        qrow = max64(qrow, N * H * l->Dk);
        oc = max64(oc, N * H * l->Dv);
        rows = max64(rows, m->B * l->n_rows * l->R);
        lane = max64(lane, l->n_rows * l->R);
        kva = max64(kva, N * l->R);
        m->most_cand = max64(m->most_cand, l->n_cand);
        if (is_sparse(l->letter) && !m->lanes) oc = max64(oc, N * c->HI * (c->DI + 1)); // the CUDA trainer's rounded d_qi and d_wi take its place
        if (is_v4(l->letter)) oa = N * c->o_groups * c->o_lora;
        if (l->letter == 'C' || l->letter == 'H') {
            comp = max64(comp, N * max64(comp_width(l, c->head_dim), comp_width(l, c->DI)));
            ent = max64(ent, m->B * l->n_cand * l->R);
        }
        if (l->letter == 'Q') comp = max64(comp, N * (c->HI + 1) * c->DI);
    }
    if (m->training) {
        m->dx = plan_act(a, name, N * c->C);
        m->dxn = plan_act(a, name, N * c->C);
        m->d_qi = plan_real(a, name, N * c->HI * c->DI); // sums over the layers that an indexer serves
        m->d_wi = plan_real(a, name, N * c->HI);
        m->d_ki = plan_real(a, name, m->B * m->most_cand * c->DI);
    }
    size_t start = a->used, end;
    m->xf = plan_act(a, "final norm, branch output", N * c->C);
    m->logits = plan_act(a, "logits of one chunk", m->logit_rows * m->Vp);
    end = plan_group(a, start, 0);
    if (m->lanes) m->y = plan_act(a, "final norm, branch output", N * c->C);
    size_t mark = a->used;
    for (int64_t l = 0; l < c->L && shared; l++) {
        a->used = mark;
        plan_layer_mlp(m, &m->layers[l], a);
    }
    end = plan_group(a, start, end);
    if (m->training) {
        m->d_att = plan_act(a, name, att);
        m->d_oa = plan_act(a, name, oa);
        m->d_oc = plan_act(a, name, oc);
        m->d_qrow = plan_act(a, name, qrow);
        m->d_rows = plan_real(a, name, rows);
        m->d_q = plan_act(a, name, q);
        m->d_qr = plan_act(a, name, N * c->q_lora);
        m->d_kva = plan_act(a, name, kva);
        m->d_ki2 = plan_act(a, name, m->B * m->most_cand * c->DI);
        m->d_comp = plan_act(a, name, comp);
        m->d_ent = plan_act(a, name, ent);
        m->d_sink = plan_real(a, name, N * H);
        m->lane_rows = plan_real(a, "partial sums of the lanes", m->lanes * lane);
        m->lane_ki = plan_real(a, "partial sums of the lanes", m->lanes * m->most_cand * c->DI);
    }
    a->used = mark = plan_group(a, start, end);
    for (int64_t l = 0; l < c->L; l++) {
        if (shared) a->used = mark;
        plan_layer_attention(m, &m->layers[l], a);
        if (!shared) plan_layer_mlp(m, &m->layers[l], a);
    }
}

static void rope_tables(const Config *c, int64_t T, real *cos_sin);

// Plan the buffers for B rows of T tokens; allocate them unless only_plan. May be called again for another size.
static void activations_plan(Model *m, int64_t B, int64_t T, int training, int only_plan) {
    free(m->arena.base);
    memset(&m->arena, 0, sizeof m->arena);
    m->B = B;
    m->T = T;
    m->N = B * T;
    m->r0 = 0;
    m->nr = m->N;
    m->training = training;
    m->lanes = LANES;
    m->logit_rows = CLASSIFIER_ROWS;
    m->scratch_bytes = thread_scratch(m);
    plan_walk(m, &m->arena);
    if (only_plan) return;
    m->arena.base = (char *)xalloc(m->arena.peak);
    m->arena.used = 0;
    plan_walk(m, &m->arena);
    rope_tables(&m->c, T, m->cos_sin);
}

// The plan of a training run, parameters included, without allocating.
static void plan_only(Model *m) {
    size_t p = (size_t)m->n_params * sizeof(real);
    if (m->c.replay_offload) die("--replay-offload 1 is the CUDA trainer's: selections of this program are in the host's memory anyway");
    activations_plan(m, m->c.B, m->c.T, 1, 1);
    plan_note(&m->arena, "parameters", p);
    plan_note(&m->arena, "gradients", p);
    plan_note(&m->arena, "AdamW moments", 2 * p);
    m->arena.peak += 4 * p;
}

// The memory plan, line by line.
static void plan_print(const Model *m) {
    double mib = 1024.0 * 1024.0;
    printf("memory plan (MiB)\n");
    for (int i = 0; i < m->arena.n_items; i++) printf("  %-32s %10.1f\n", m->arena.items[i].name, (double)m->arena.items[i].bytes / mib);
    printf("  %-32s %10.1f\n", "total", (double)m->arena.peak / mib);
    if (m->arena.pinned) printf("  %-32s %10.1f\n", "pinned memory of the host", (double)m->arena.pinned / mib);
}

// ----------------------------------------------------------------------------
// 6. Matrix product
// C[M,N] = A[M,K] B[K,N] with any strides, so that one kernel serves y = x W^T, dx = dy W and dW = dy^T x.
// The scheme is Goto and van de Geijn's (2008): panels of A and B are copied ("packed") so that the inner kernel
// reads both in order, and the inner kernel keeps a tile of C in vector registers. Every element of C is one chain
// of fused multiply-adds over k in ascending order, whatever the tiling, the edges or the thread count: index
// scores are therefore the same bits wherever they are computed.

#if defined(__AVX512F__)
#define VBYTES 64
enum { MR = 12 };
#elif defined(__AVX2__)
#define VBYTES 32
enum { MR = 6 };
#else
#define VBYTES 16
enum { MR = 6 };
#endif
enum { NR = 2 * VBYTES / (int)sizeof(real), KC = 256, MC = 1536, NC = 2048, TILE_M = 4 * MR, TILE_N = 4 * NR };
typedef real vreal __attribute__((vector_size(VBYTES), aligned(sizeof(real)), may_alias));

// c[MR, NR] += sum over kc of a[k, MR] * b[k, NR]: 2*MR vector accumulators, two loads and MR broadcasts a step.
static void matmul_tile(int64_t kc, const real *a, const real *b, real *c, int64_t ldc) {
    vreal acc[MR][2];
    for (int i = 0; i < MR; i++) {
        acc[i][0] = *(const vreal *)(c + i * ldc);
        acc[i][1] = *(const vreal *)(c + i * ldc + NR / 2);
    }
    for (int64_t k = 0; k < kc; k++, a += MR, b += NR) {
        vreal b0 = *(const vreal *)b, b1 = *(const vreal *)(b + NR / 2);
        for (int i = 0; i < MR; i++) {
            acc[i][0] += a[i] * b0;
            acc[i][1] += a[i] * b1;
        }
    }
    for (int i = 0; i < MR; i++) {
        *(vreal *)(c + i * ldc) = acc[i][0];
        *(vreal *)(c + i * ldc + NR / 2) = acc[i][1];
    }
}

// Copy kc columns of n (at most width) rows of a matrix into dst[k, width], zero beyond n.
static void matmul_pack(real *dst, const real *src, int64_t row_stride, int64_t k_stride, int64_t n, int width, int64_t kc) {
    if (row_stride == 1) {
        for (int64_t k = 0; k < kc; k++) {
            for (int64_t i = 0; i < n; i++) dst[k * width + i] = src[k * k_stride + i];
            for (int64_t i = n; i < width; i++) dst[k * width + i] = 0;
        }
    } else {
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < kc; k++) dst[k * width + i] = src[i * row_stride + k * k_stride];
        for (int64_t i = n; i < width; i++)
            for (int64_t k = 0; k < kc; k++) dst[k * width + i] = 0;
    }
}

// The packed panels of the calling thread, grown on demand and reused.
static real *pack_buffer(int64_t n) {
    static __thread real *buffer;
    static __thread int64_t capacity;
    if (n > capacity) {
        free(buffer);
        buffer = (real *)xalloc((size_t)n * sizeof(real));
        capacity = n;
    }
    return buffer;
}

// C[i*ldc + j] = (add ? C : 0) + sum_k A[i*ars + k*aks] B[k*bks + j*bcs]. Runs on all threads, or on the calling
// one inside a parallel region.
static void matmul_own(real *C, int64_t ldc, const real *A, int64_t ars, int64_t aks, const real *B, int64_t bks, int64_t bcs,
                       int64_t M, int64_t N, int64_t K, int add) {
    for (int64_t jc = 0; jc < N; jc += NC) {
        for (int64_t ic = 0; ic < M; ic += MC) {
            int64_t n = min64(NC, N - jc), mm = min64(MC, M - ic);
            int64_t n_panels = (n + NR - 1) / NR, m_panels = (mm + MR - 1) / MR;
            int64_t n_tiles = (n + TILE_N - 1) / TILE_N, m_tiles = (mm + TILE_M - 1) / TILE_M;
            real *bp = pack_buffer((n_panels * NR + m_panels * MR) * KC), *ap = bp + n_panels * NR * KC;
            #pragma omp parallel if (mm * n * K > 32 * 1024 && !in_parallel())
            for (int64_t pc = 0; pc < K; pc += KC) {
                int64_t kc = min64(KC, K - pc);
                #pragma omp for schedule(static) nowait
                for (int64_t p = 0; p < n_panels; p++)
                    matmul_pack(bp + p * NR * KC, B + pc * bks + (jc + p * NR) * bcs, bcs, bks, min64(NR, n - p * NR), NR, kc);
                #pragma omp for schedule(static)
                for (int64_t p = 0; p < m_panels; p++)
                    matmul_pack(ap + p * MR * KC, A + pc * aks + (ic + p * MR) * ars, ars, aks, min64(MR, mm - p * MR), MR, kc);
                #pragma omp for schedule(dynamic)
                for (int64_t tile = 0; tile < m_tiles * n_tiles; tile++) {
                    int64_t i0 = tile / n_tiles * TILE_M, j0 = tile % n_tiles * TILE_N;
                    for (int64_t j = j0; j < min64(j0 + TILE_N, n); j += NR) {
                        for (int64_t i = i0; i < min64(i0 + TILE_M, mm); i += MR) {
                            real *c = C + (ic + i) * ldc + jc + j, edge[MR * NR];
                            int64_t w = min64(NR, n - j), h = min64(MR, mm - i);
                            int fresh = pc == 0 && !add, whole = w == NR && h == MR;
                            real *t = whole ? c : edge;
                            int64_t ldt = whole ? ldc : (int64_t)NR;
                            if (fresh) for (int64_t y = 0; y < MR; y++) memset(t + y * ldt, 0, NR * sizeof(real));
                            else if (!whole) {
                                memset(edge, 0, sizeof edge);
                                for (int64_t y = 0; y < h; y++) memcpy(edge + y * NR, c + y * ldc, (size_t)w * sizeof(real));
                            }
                            matmul_tile(kc, ap + i * KC, bp + j * KC, t, ldt);
                            if (!whole) for (int64_t y = 0; y < h; y++) memcpy(c + y * ldc, edge + y * NR, (size_t)w * sizeof(real));
                        }
                    }
                }
            }
        }
    }
}

// As matmul_own, or by the BLAS library when built with BLAS=1. One stride of A and of B must be 1.
static void matmul(real *C, int64_t ldc, const real *A, int64_t ars, int64_t aks, const real *B, int64_t bks, int64_t bcs,
                   int64_t M, int64_t N, int64_t K, int add) {
#ifdef USE_BLAS
    CBLAS_TRANSPOSE ta = aks == 1 ? CblasNoTrans : CblasTrans, tb = bcs == 1 ? CblasNoTrans : CblasTrans;
    int lda = (int)(aks == 1 ? ars : aks), ldb = (int)(bcs == 1 ? bks : bcs);
    if (sizeof(real) == 4) cblas_sgemm(CblasRowMajor, ta, tb, (int)M, (int)N, (int)K, 1, (const float *)A, lda, (const float *)B, ldb, (float)add, (float *)C, (int)ldc);
    else cblas_dgemm(CblasRowMajor, ta, tb, (int)M, (int)N, (int)K, 1, (const double *)A, lda, (const double *)B, ldb, add, (double *)C, (int)ldc);
#else
    matmul_own(C, ldc, A, ars, aks, B, bks, bcs, M, N, K, add);
#endif
}

// y[n, out] = x[n, in] w[out, in]^T
static void linear_forward(real *y, const real *x, const real *w, int64_t n, int64_t in, int64_t out) {
    matmul(y, out, x, in, 1, w, 1, in, n, out, in, 0);
}

// dw[out, in] += dy^T x; then dx[n, in] (+)= dy[n, out] w[out, in] unless dx is NULL. dx may be x: it is read before.
static void linear_backward(real *dx, int add_dx, real *dw, const real *dy, const real *x, const real *w, int64_t n, int64_t in, int64_t out) {
    matmul(dw, in, dy, 1, out, x, in, 1, out, in, n, 1);
    if (dx) matmul(dx, in, dy, out, 1, w, in, 1, n, in, out, add_dx);
}

// ----------------------------------------------------------------------------
// 7. Layers

// exp(x). For float: x = n ln 2 + f, a polynomial for exp(f), n added to the exponent bits. Within 2 units in the
// last place for -87 < x < 88, 0 below; written without branches so that compilers vectorise the loops around it.
static inline real exp_real(real x) {
#ifdef EXP_LIBM
    return (real)exp((double)x);
#else
    if (sizeof(real) == 8) return (real)exp((double)x);
    float y = (float)x;
    float clamped = y > -87.0f ? y > 88.0f ? 88.0f : y : -87.0f; // NaN as well: the conversion below must be defined
    float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f; // adding 1.5 * 2^23 rounds to the nearest integer
    float f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;    // ln 2 in two pieces
    float p = 1.0f / 5040 + f * (1.0f / 40320);
    p = 1.0f / 720 + f * p;
    p = 1.0f / 120 + f * p;
    p = 1.0f / 24 + f * p;
    p = 1.0f / 6 + f * p;
    p = 0.5f + f * p;
    p = 1.0f + f * p;
    p = 1.0f + f * p;
    union { int32_t i; float f; } two_n;
    two_n.i = ((int32_t)n + 127) << 23;
    p *= two_n.f;
    p = y < -87.0f ? 0.0f : p;
    return (real)(y != y ? y : p);
#endif
}

// One row of rmsnorm_forward. Returns its rstd.
static inline real rmsnorm_row(real *y, const real *x, const real *w, real plus, int64_t d, double eps) {
    real s = 0;
    #pragma omp simd reduction(+ : s)
    for (int64_t j = 0; j < d; j++) s += x[j] * x[j];
    real r = (real)(1 / sqrt((double)s / (double)d + eps));
    for (int64_t j = 0; j < d; j++) y[j] = x[j] * r;
    for (int64_t j = 0; w && j < d; j++) y[j] *= plus + w[j];
    return r;
}

// y[n, d] = x * rstd * (plus + w) with rstd[n] = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019). plus is 0, or 1
// where weights are stored as their distance from 1; w may be NULL (no weights). Rows may be wider than d: ldx, ldy.
static void rmsnorm_forward(real *y, int64_t ldy, real *rstd, const real *x, int64_t ldx, const real *w, real plus, int64_t n, int64_t d, double eps) {
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) rstd[i] = rmsnorm_row(y + i * ldy, x + i * ldx, w, plus, d, eps);
}

enum { COLUMNS = 32 }; // channels a thread sums down the rows: fixed order, so no dependence on the thread count

// dx (+)= gradient to x, dw[d] += gradient to w (w, dw may be NULL). With xh = x * rstd and g = dy (plus + w):
// dx = rstd (g - xh mean(g xh)). dx may be dy.
static void rmsnorm_backward(real *dx, int64_t lddx, int add, real *dw, const real *dy, int64_t lddy, const real *rstd, const real *x, int64_t ldx,
                             const real *w, real plus, int64_t n, int64_t d) {
    #pragma omp parallel for schedule(static)
    for (int64_t j0 = 0; j0 < (dw ? d : 0); j0 += COLUMNS) {
        int64_t j1 = min64(j0 + COLUMNS, d);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = j0; j < j1; j++) dw[j] += dy[i * lddy + j] * x[i * ldx + j] * rstd[i];
    }
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const real *xi = x + i * ldx, *dyi = dy + i * lddy;
        real *dxi = dx + i * lddx, r = rstd[i], s = 0;
        #pragma omp simd reduction(+ : s)
        for (int64_t j = 0; j < d; j++) s += dyi[j] * (w ? plus + w[j] : 1) * xi[j];
        s *= r * r / (real)d;
        #pragma omp simd
        for (int64_t j = 0; j < d; j++) dxi[j] = (add ? dxi[j] : 0) + r * (dyi[j] * (w ? plus + w[j] : 1) - xi[j] * s);
    }
}

// y[n, d] = (x - mean) * rstd * w + b (Ba et al. 2016)
static void layernorm_forward(real *y, real *mean, real *rstd, const real *x, const real *w, const real *b, int64_t n, int64_t d, double eps) {
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const real *xi = x + i * d;
        real mu = 0, var = 0;
        for (int64_t j = 0; j < d; j++) mu += xi[j];
        mu /= (real)d;
        for (int64_t j = 0; j < d; j++) var += (xi[j] - mu) * (xi[j] - mu);
        real r = (real)(1 / sqrt((double)var / (double)d + eps));
        for (int64_t j = 0; j < d; j++) y[i * d + j] = (xi[j] - mu) * r * w[j] + b[j];
        mean[i] = mu;
        rstd[i] = r;
    }
}

// dx = gradient to x; dw, db += their gradients. With g = dy * w: dx = rstd (g - mean(g) - xh mean(g xh)).
static void layernorm_backward(real *dx, real *dw, real *db, const real *dy, const real *mean, const real *rstd, const real *x, const real *w, int64_t n, int64_t d) {
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < d; j++) {
            dw[j] += dy[i * d + j] * (x[i * d + j] - mean[i]) * rstd[i];
            db[j] += dy[i * d + j];
        }
    }
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const real *xi = x + i * d, *dyi = dy + i * d;
        real a = 0, b = 0;
        for (int64_t j = 0; j < d; j++) {
            a += dyi[j] * w[j];
            b += dyi[j] * w[j] * (xi[j] - mean[i]) * rstd[i];
        }
        for (int64_t j = 0; j < d; j++) dx[i * d + j] = rstd[i] * (dyi[j] * w[j] - a / (real)d - (xi[j] - mean[i]) * rstd[i] * b / (real)d);
    }
}

// cos_sin[T, rope/2, 2]: the rotation of pair j at position t, by t * theta^(-2j/rope) (Su et al. 2021). YaRN (Peng
// et al. 2023): pairs that turn less than beta_slow times over the original context are slowed by the factor, those
// above beta_fast are kept, those between are mixed; cos and sin carry the attention factor. W and Q have no YaRN.
static void rope_table(const Config *c, int kind, int64_t T, real *cos_sin) {
    int64_t half = c->rope / 2;
    int yarn = !strcmp(c->rope_type, "yarn") && kind != ROPE_PLAIN;
    double theta = kind == ROPE_COMPRESS ? c->compress_theta : c->rope_theta;
    double d = (double)c->rope, tau = 6.283185307179586, base = log(theta), factor = 1;
    double low = floor(d * log((double)c->rope_original / (c->rope_beta_fast * tau)) / (2 * base));
    double high = ceil(d * log((double)c->rope_original / (c->rope_beta_slow * tau)) / (2 * base));
    low = low < 0 ? 0 : low;
    high = high > d - 1 ? d - 1 : high;
    if (high == low) high += 0.001;
    if (yarn && c->rope_factor > 1 && kind == ROPE_MLA) { // DeepSeek-V4 leaves cos and sin as they are
        double logf = 0.1 * log(c->rope_factor);
        factor = c->rope_mscale > 0 && c->rope_mscale_all > 0 ? (c->rope_mscale * logf + 1) / (c->rope_mscale_all * logf + 1) : logf + 1;
    }
    for (int64_t j = 0; j < half; j++) {
        double inv = pow(theta, -2.0 * (double)j / d), slow = ((double)j - low) / (high - low);
        slow = slow < 0 ? 0 : slow > 1 ? 1 : slow;
        if (yarn) inv = inv / c->rope_factor * slow + inv * (1 - slow);
        for (int64_t t = 0; t < T; t++) {
            cos_sin[(t * half + j) * 2] = (real)(cos((double)t * inv) * factor);
            cos_sin[(t * half + j) * 2 + 1] = (real)(sin((double)t * inv) * factor);
        }
    }
}

static void rope_tables(const Config *c, int64_t T, real *cos_sin) {
    for (int kind = 0; kind < ROPE_KINDS; kind++) rope_table(c, kind, T, cos_sin + kind * T * c->rope);
}

enum { INTERLEAVED = 0, HALF_SPLIT = 1 };

// Rotate the pairs of x[rope] in place: (0,1),(2,3).. or (0,half),(1,half+1)..; sign -1 is the inverse and the backward.
static inline void rope_apply(real *x, const real *cos_sin, int64_t half, int layout, real sign) {
    int64_t step = layout == HALF_SPLIT ? 1 : 2, other = layout == HALF_SPLIT ? half : 1;
    for (int64_t j = 0; j < half; j++) {
        real c = cos_sin[2 * j], s = sign * cos_sin[2 * j + 1], a = x[j * step], b = x[j * step + other];
        x[j * step] = a * c - b * s;
        x[j * step + other] = a * s + b * c;
    }
}

// Rotation of row i in a layer: positions count from the start of its document, so a document means the same
// wherever it stands.
static const real *rope_row(const Model *m, const Layer *l, int64_t i) { return l->cos_sin + (i % m->T - m->doc[i]) * m->c.rope; }

// Rotate vectors of the rows being computed in place: heads vectors of a row, the first at
// x + row * row_step, the others head_step apart. sign -1 is the inverse.
static void rotate(const Model *m, const Layer *l, real *x, int64_t row_step, int64_t heads, int64_t head_step, int layout, real sign) {
    #pragma omp parallel for schedule(static)
    for (int64_t i = m->r0; i < m->r0 + m->nr; i++)
        for (int64_t h = 0; h < heads; h++) rope_apply(x + i * row_step + h * head_step, rope_row(m, l, i), m->c.rope / 2, layout, sign);
}

// act = silu(g) * u
static void swiglu_forward(real *act, const real *g, const real *u, int64_t n) {
    #pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) act[i] = g[i] / (1 + exp_real(-g[i])) * u[i];
}

// dg may be g, du may be u.
static void swiglu_backward(real *dg, real *du, const real *dact, const real *g, const real *u, int64_t n) {
    #pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) {
        real s = 1 / (1 + exp_real(-g[i])), silu = g[i] * s;
        dg[i] = dact[i] * u[i] * (s + silu * (1 - s));
        du[i] = dact[i] * silu;
    }
}

// ----------------------------------------------------------------------------
// 8. Selection
// The lightning indexer's score of candidate s for query t (DeepSeek-V3.2, eq. 1):
//   I[t,s] = sum over index heads h of w[t,h] * relu(q[t,h] . k[s]),
// scales folded into w, heads added in order, in float. The selected set is the k visible candidates with the largest
// (score, then lowest index): a total order, so the set is unique and no tiling, buffer or thread count can change it.

// The visible candidates of row i: [lo, hi), in tokens (or pools of r tokens) of its batch row. Causality and
// document borders are an index range, never a score of -inf. Pools count from the document's start, and pool j of a
// document that starts at token d has number d / r + j in its batch row: numbers of different documents never meet.
static void visible(const Model *m, const Layer *l, int64_t i, int64_t *lo, int64_t *hi) {
    *lo = l->r ? m->doc[i] / l->r : 0;
    *hi = l->r ? *lo + (i % m->T - m->doc[i] + 1) / l->r : 0; // complete pools only
}

// Score and index in one integer whose order is the order of selection. -0 equals +0; NaN is largest.
static inline uint64_t order_key(float score, int64_t s) {
    uint32_t bits;
    score += 0.0f; // -0 becomes +0
    memcpy(&bits, &score, 4);
    bits ^= (0u - (bits >> 31)) | 0x80000000u; // negative: all bits turned, positive: the sign alone
    bits = score != score ? 0xffffffffu : bits;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)s;
}
static inline int64_t key_index(uint64_t key) { return (int64_t)(uint32_t)~(uint32_t)key; }
static inline int key_is_nan(uint64_t key) { return key >> 32 == 0xffffffffu; }

// The k-th largest of n distinct keys (1 <= k <= n): radix selection from the highest
// bit in which they differ, a byte at a time.
static uint64_t kth_largest(const uint64_t *key, int64_t n, int64_t k) {
    uint64_t differ = 0;
    for (int64_t i = 1; i < n; i++) differ |= key[i] ^ key[0];
    int shift = 64; // bits above it are the same in all keys
    while (shift > 0 && !(differ >> (shift - 1))) shift--;
    uint64_t mask = shift == 64 ? 0 : ~(uint64_t)0 << shift, prefix = key[0] & mask;
    while (shift > 0) {
        int bits = shift < 8 ? shift : 8, digit = (1 << bits) - 1;
        int32_t count[256] = {0};
        shift -= bits;
        for (int64_t i = 0; i < n; i++)
            if ((key[i] & mask) == prefix) count[key[i] >> shift & (uint64_t)digit]++;
        while (count[digit] < k) k -= count[digit--];
        mask = ~(uint64_t)0 << shift;
        prefix |= (uint64_t)digit << shift;
        if (count[digit] == k) break; // all of this bucket belong: its smallest key bounds them
    }
    return prefix;
}

// Keep the k largest of n keys, in the order they stand. Returns the smallest kept key's bound: nothing below it
// can be among the k largest of any larger set.
static uint64_t keep_largest(uint64_t *key, int64_t n, int64_t k) {
    uint64_t bound = kth_largest(key, n, k);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++)
        if (key[i] >= bound) key[kept++] = key[i];
    return bound;
}

// scores[nq, ns] of queries t0.. against candidates s0.. of batch row b. dots is scratch [nq * HI, ns].
static void index_scores(const Model *m, const Layer *l, int64_t b, int64_t t0, int64_t nq, int64_t s0, int64_t ns, real *dots, float *scores) {
    int64_t HI = m->c.HI, DI = m->c.DI, row = b * m->T + t0;
    matmul_own(dots, ns, l->q_index + row * HI * DI, DI, 1, l->k_index + (b * l->n_cand + s0) * DI, 1, DI, nq * HI, ns, DI, 0);
    for (int64_t q = 0; q < nq; q++) {
        float *out = scores + q * ns;
        for (int64_t h = 0; h < HI; h++) {
            float w = (float)l->w_index[(row + q) * HI + h];
            const real *d = dots + (q * HI + h) * ns;
            if (h == 0) for (int64_t s = 0; s < ns; s++) out[s] = w * (float)(d[s] < 0 ? 0 : d[s]); // a NaN stays NaN
            else for (int64_t s = 0; s < ns; s++) out[s] += w * (float)(d[s] < 0 ? 0 : d[s]);
        }
    }
}

// Write the n chosen keys of row i, which stand in index order, and pad with -1.
static void emit_selection(Model *m, Layer *l, int64_t i, const uint64_t *key, int64_t n) {
    int32_t *sel = l->sel + i * m->c.topk;
    int64_t nans = 0;
    for (int64_t j = 0; j < n; j++) {
        sel[j] = (int32_t)key_index(key[j]);
        nans += key_is_nan(key[j]);
    }
    for (int64_t j = n; j < m->c.topk; j++) sel[j] = -1;
    if (nans) {
        #pragma omp atomic
        m->nan_scores += nans;
    }
}

// HyTopK, streaming: scores come in chunks of candidates in ascending order and are forgotten. A query keeps a
// buffer of keys above its threshold tau; when the next chunk might not fit, the buffer is cut to its k largest,
// and the k-th becomes tau, below which nothing can be chosen any more. Memory is O(k) a query, not O(T).
static void select_hytopk(Model *m, Layer *l, int64_t b, int64_t t0, int64_t nq, char *scratch) {
    int64_t k = m->c.topk, capacity = 2 * min64(k, m->T) + SCORE_KEYS, first = m->T, last = 0;
    uint64_t *keys = (uint64_t *)scratch;                       // [nq, capacity]
    real *dots = (real *)(keys + nq * capacity);                // [nq * HI, SCORE_KEYS]
    float *scores = (float *)(dots + nq * m->c.HI * SCORE_KEYS); // [nq, SCORE_KEYS]
    int64_t count[SCORE_ROWS] = {0};
    uint64_t tau[SCORE_ROWS] = {0};
    for (int64_t q = 0; q < nq; q++) {
        int64_t lo, hi;
        visible(m, l, b * m->T + t0 + q, &lo, &hi);
        first = min64(first, lo);
        last = max64(last, hi);
    }
    for (int64_t s0 = first; s0 < last; s0 += SCORE_KEYS) {
        int64_t ns = min64(SCORE_KEYS, last - s0);
        index_scores(m, l, b, t0, nq, s0, ns, dots, scores);
        for (int64_t q = 0; q < nq; q++) {
            int64_t lo, hi;
            uint64_t *key = keys + q * capacity;
            visible(m, l, b * m->T + t0 + q, &lo, &hi);
            if (count[q] + ns > capacity) {
                tau[q] = keep_largest(key, count[q], k);
                count[q] = k;
            }
            int64_t n = count[q];
            for (int64_t s = max64(lo, s0); s < min64(hi, s0 + ns); s++) {
                key[n] = order_key(scores[q * ns + s - s0], s);
                n += key[n] > tau[q]; // no branch: about half of the first chunks pass
            }
            count[q] = n;
        }
    }
    for (int64_t q = 0; q < nq; q++) {
        if (count[q] > k) keep_largest(keys + q * capacity, count[q], k);
        emit_selection(m, l, b * m->T + t0 + q, keys + q * capacity, min64(count[q], k));
    }
}

// The baseline: the whole row of scores first, then the k largest of it.
static void select_table(Model *m, Layer *l, int64_t b, int64_t t0, int64_t nq, char *scratch) {
    int64_t k = m->c.topk, last = 0, lo, hi;
    uint64_t *keys = (uint64_t *)scratch;                       // [T], one query at a time
    real *dots = (real *)(keys + m->T);                         // [nq * HI, SCORE_KEYS]
    float *scores = (float *)(dots + nq * m->c.HI * SCORE_KEYS); // [nq, SCORE_KEYS]
    float *table = scores + nq * SCORE_KEYS;                    // [nq, T]
    for (int64_t q = 0; q < nq; q++) {
        visible(m, l, b * m->T + t0 + q, &lo, &hi);
        last = max64(last, hi);
    }
    for (int64_t s0 = 0; s0 < last; s0 += SCORE_KEYS) {
        int64_t ns = min64(SCORE_KEYS, last - s0);
        index_scores(m, l, b, t0, nq, s0, ns, dots, scores);
        for (int64_t q = 0; q < nq; q++) memcpy(table + q * m->T + s0, scores + q * ns, (size_t)ns * sizeof(float));
    }
    for (int64_t q = 0; q < nq; q++) {
        visible(m, l, b * m->T + t0 + q, &lo, &hi);
        for (int64_t s = lo; s < hi; s++) keys[s - lo] = order_key(table[q * m->T + s], s);
        if (hi - lo > k) keep_largest(keys, hi - lo, k);
        emit_selection(m, l, b * m->T + t0 + q, keys, min64(hi - lo, k));
    }
}

static char *my_scratch(const Model *m) { return m->scratch + (size_t)thread_id() * m->scratch_bytes; }

static void attention_mass(const Model *m, const Layer *l, int64_t i, real *mass, char *scratch);

// The controls, one query at a time: a random set of k, the last k, or the k with the largest attention.
static void select_control(Model *m, Layer *l, int64_t i, char *scratch) {
    int64_t lo, hi, k = m->c.topk;
    uint64_t *keys = (uint64_t *)scratch; // [T]
    real *mass = (real *)(keys + m->T);   // [T]
    int oracle = !strcmp(m->c.selector, "oracle"), random = !strcmp(m->c.selector, "random");
    visible(m, l, i, &lo, &hi);
    if (oracle) attention_mass(m, l, i, mass, (char *)(mass + m->T));
    for (int64_t s = lo; s < hi; s++) {
        if (oracle) keys[s - lo] = order_key((float)mass[s - lo], s);
        else if (random) keys[s - lo] = order_key((float)(rng_u64(m->select_seed, RNG_SELECT + (uint64_t)(l - m->layers), (uint64_t)(i * m->T + s)) >> 40), s);
        else keys[s - lo] = (uint64_t)s << 32 | (uint32_t)~(uint32_t)s; // window: the positions themselves, exact at any length
    }
    if (hi - lo > k) keep_largest(keys, hi - lo, k);
    emit_selection(m, l, i, keys, min64(hi - lo, k));
}

// Fill l->sel for the rows being computed.
static void select_forward(Model *m, Layer *l) {
    int64_t block = score_queries(&m->c), last = m->r0 + m->nr;
    int control = strcmp(m->c.selector, "indexer") != 0, table = !strcmp(m->c.topk_method, "table");
    int64_t per_row = m->B == 1 ? (m->nr + block - 1) / block : (m->T + block - 1) / block;
    if (control) {
        #pragma omp parallel for schedule(dynamic)
        for (int64_t i = m->r0; i < last; i++) select_control(m, l, i, my_scratch(m));
        return;
    }
    m->index_scans++;
    #pragma omp parallel for schedule(dynamic)
    for (int64_t j = 0; j < m->B * per_row; j++) { // the last blocks of a row see the most keys: take them first
        int64_t b = j % m->B, start = m->B == 1 ? m->r0 : 0, end = m->B == 1 ? last : m->T;
        int64_t t0 = start + (per_row - 1 - j / m->B) * block, nq = min64(block, end - t0);
        (table ? select_table : select_hytopk)(m, l, b, t0, nq, my_scratch(m));
    }
}

// Stored selections. With recomputation a selection is made forward and read again backward. In between only a packed
// form is kept, rows of a fixed number of 32-bit words:
//   u16    for each page of 65536 candidates the number of slots up to its end, then the low 16 bits of each slot. Slots
//          ascend, so a slot's page is the first whose number exceeds the slot's: 16 bits a slot and little more
//   ef     Elias-Fano: the low bits of each slot one behind the other, then the rest in unary: bit (candidate >> low) + j
//          set for slot j, so that the j-th set bit, less j, is slot j's high part. With low = log2(n_cand / k) that is
//          about low + 2 bits a slot, less than half a bit above what any code needs
// -1 behind the last slot costs nothing: u16's last number, ef's set bits tell how many slots there are.
static Packing packing_of(int ef, int64_t k, int64_t n_cand) {
    Packing p = {ef, 0, k, min64(k, n_cand), (n_cand + 65535) / 65536, 0};
    if (!ef) {
        p.words = p.head + (p.slots + 1) / 2;
        return p;
    }
    while (p.slots && n_cand >> (p.low + 1) >= p.slots) p.low++;
    p.head = (p.slots * p.low + 31) / 32;
    p.words = p.head + (p.slots ? p.slots + ((n_cand - 1) >> p.low) + 31 : 0) / 32;
    return p;
}

// to[words] from row[k]: ascending candidates below n_cand, -1 behind the last.
static void pack_row(const Packing *p, uint32_t *to, const int32_t *row) {
    memset(to, 0, (size_t)p->words * sizeof *to);
    for (int64_t j = 0; j < p->slots && row[j] >= 0; j++) {
        uint32_t x = (uint32_t)row[j];
        if (!p->ef) {
            to[x >> 16]++;
            to[p->head + j / 2] |= (x & 0xffff) << j % 2 * 16;
            continue;
        }
        int64_t at = j * p->low, bit = (int64_t)(x >> p->low) + j;
        uint64_t low = (uint64_t)(x & (((uint32_t)1 << p->low) - 1)) << at % 32;
        to[at / 32] |= (uint32_t)low;
        if (low >> 32) to[at / 32 + 1] |= (uint32_t)(low >> 32);
        to[p->head + bit / 32] |= (uint32_t)1 << bit % 32;
    }
    for (int64_t page = 1; !p->ef && page < p->head; page++) to[page] += to[page - 1];
}

// row[k] from what pack_row() made of it.
static void unpack_row(const Packing *p, int32_t *row, const uint32_t *from) {
    int64_t j = 0;
    const uint32_t *second = from + p->head;
    for (int64_t page = 0; !p->ef && page < p->head; page++)
        for (; j < from[page]; j++) row[j] = (int32_t)(page << 16 | (second[j / 2] >> j % 2 * 16 & 0xffff));
    for (int64_t bit = 0; p->ef && bit < (p->words - p->head) * 32; bit++) {
        if (!(second[bit / 32] >> bit % 32 & 1)) continue;
        int64_t at = j * p->low, x = (bit - j) << p->low;
        if (p->low) x |= (int64_t)((from[at / 32] | (uint64_t)from[at / 32 + 1] << 32) >> at % 32 & (((uint64_t)1 << p->low) - 1)); // the word behind is ours, too
        row[j++] = (int32_t)x;
    }
    while (j < p->k) row[j++] = -1;
}

// Keep the selection that l has just made.
static void selection_store(Model *m, const Layer *l) {
    m->held = (int)(l - m->layers);
    if (!l->packed) return;
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < m->N; i++) pack_row(&l->packing, l->packed + i * l->packing.words, l->sel + i * l->packing.k);
}

// Make sure that the selection that l reads, its own or its source's, is unpacked.
static void selection_restore(Model *m, const Layer *l) {
    const Layer *src = &m->layers[l->source];
    if (!src->packed || m->held == l->source) return;
    m->held = l->source;
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < m->N; i++) unpack_row(&src->packing, src->sel + i * src->packing.k, src->packed + i * src->packing.words);
}

// ----------------------------------------------------------------------------
// 9. Sparse attention
// One core for all letters. A query's support is a list of KV rows: first those it always sees (the sliding window of
// C H W, the tail of Q: a range that need not be stored), then those of its chosen candidates (D S: a token each, C: an
// entry, Q: the tokens of a block). Dense attention (F, H, and every letter while warming up) is the same code with all
// visible candidates chosen. A row holds what the heads of all groups read: for MLA in its absorbed form one
// [latent | rotated key], whose first Dv floats are the value; for C H W key = value; for Q the keys, then the values.
// Two primitives carry all of it: dot products of H vectors with the listed rows, and sums of scaled rows.

// Sum of the lanes of a vector: halved down to 16 bytes, written out because compilers add lane after lane.
static inline real lanes_sum(vreal v) {
    typedef real v16 __attribute__((vector_size(16)));
    union { vreal v; v16 part[VBYTES / 16]; } x;
    union { v16 v; real f[16 / sizeof(real)]; } y;
    x.v = v;
#if VBYTES == 64
    y.v = (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
#elif VBYTES == 32
    y.v = x.part[0] + x.part[1];
#else
    y.v = x.part[0];
#endif
    return sizeof(real) == 8 ? y.f[0] + y.f[1] : (y.f[0] + y.f[1]) + (y.f[16 / sizeof(real) - 2] + y.f[16 / sizeof(real) - 1]);
}

// s[h*n + j] = a[h] . rows[pos[j]], over d floats. Four heads share the loads of a row.
static void rows_dot(real *s, const real *a, int64_t H, int64_t lda, const real *rows, int64_t ldr, const int32_t *pos, int64_t n, int64_t d) {
    enum { W = VBYTES / (int)sizeof(real) };
    for (int64_t j = 0; j < n; j++) {
        const real *r = rows + pos[j] * ldr;
        for (int64_t h = 0; h < H; h += 4) {
            int64_t last = H - 1 - h, i = 0; // fewer than four heads left: the last one is computed again
            const real *a0 = a + h * lda, *a1 = a0 + min64(1, last) * lda, *a2 = a0 + min64(2, last) * lda, *a3 = a0 + min64(3, last) * lda;
            vreal v0 = {0}, v1 = {0}, v2 = {0}, v3 = {0};
            for (; i + W <= d; i += W) {
                vreal x = *(const vreal *)(r + i);
                v0 += *(const vreal *)(a0 + i) * x;
                v1 += *(const vreal *)(a1 + i) * x;
                v2 += *(const vreal *)(a2 + i) * x;
                v3 += *(const vreal *)(a3 + i) * x;
            }
            real s0 = lanes_sum(v0), s1 = lanes_sum(v1), s2 = lanes_sum(v2), s3 = lanes_sum(v3);
            for (; i < d; i++) {
                s0 += a0[i] * r[i];
                s1 += a1[i] * r[i];
                s2 += a2[i] * r[i];
                s3 += a3[i] * r[i];
            }
            s[h * n + j] = s0;
            if (last > 0) s[(h + 1) * n + j] = s1;
            if (last > 1) s[(h + 2) * n + j] = s2;
            if (last > 2) s[(h + 3) * n + j] = s3;
        }
    }
}

// y[d] += sum over j of a[j*lda] * rows[pos[j]] (pos NULL: row j)
static void rows_sum(real *y, const real *a, int64_t lda, const real *rows, int64_t ldr, const int32_t *pos, int64_t n, int64_t d) {
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
        const real *r0 = rows + (pos ? pos[j] : j) * ldr, *r1 = rows + (pos ? pos[j + 1] : j + 1) * ldr;
        const real *r2 = rows + (pos ? pos[j + 2] : j + 2) * ldr, *r3 = rows + (pos ? pos[j + 3] : j + 3) * ldr;
        real a0 = a[j * lda], a1 = a[(j + 1) * lda], a2 = a[(j + 2) * lda], a3 = a[(j + 3) * lda];
        #pragma omp simd
        for (int64_t i = 0; i < d; i++) y[i] += (a0 * r0[i] + a1 * r1[i]) + (a2 * r2[i] + a3 * r3[i]);
    }
    for (; j < n; j++) {
        const real *r = rows + (pos ? pos[j] : j) * ldr;
        real a0 = a[j * lda];
        #pragma omp simd
        for (int64_t i = 0; i < d; i++) y[i] += a0 * r[i];
    }
}

// True when this layer attends to every visible candidate of the row: F and H always, the others while warming up.
static int attends_to_all(const Model *m, const Layer *l) { return l->all || m->dense; }

// The support of one query, in a thread's buffers.
typedef struct {
    int32_t *pos;     // [n] KV rows of its sequence; those of candidate j are unit rows from first + j * unit
    int32_t *cand;    // [n_cand] candidates, ascending
    int64_t n, first, n_cand, unit;
    real *reals;      // free space behind, for H * n probabilities and more
} Support;

// Collect what row i attends to; all = every visible candidate instead of the chosen ones.
static Support support(const Model *m, const Layer *l, int64_t i, int all, char *scratch) {
    int64_t lo, hi, t = i % m->T, doc = m->doc[i], width = (m->T + min64(m->T, m->c.window) + 15) / 16 * 16, from = t + 1;
    Support s;
    s.pos = (int32_t *)scratch;
    s.cand = s.pos + width;
    s.reals = (real *)(s.cand + width);
    s.n = s.n_cand = 0;
    s.unit = l->letter == 'Q' ? l->r : 1;
    visible(m, l, i, &lo, &hi);
    if (is_v4(l->letter)) from = max64(doc, t + 1 - m->c.window);
    if (l->letter == 'Q') from = doc + (hi - lo) * l->r; // tokens after the last complete block
    while (from <= t) s.pos[s.n++] = (int32_t)from++;
    s.first = s.n;
    if (all) while (s.n_cand < hi - lo) { s.cand[s.n_cand] = (int32_t)(lo + s.n_cand); s.n_cand++; }
    else {
        s.n_cand = min64(hi - lo, m->c.topk);
        memcpy(s.cand, m->layers[l->source].sel + i * m->c.topk, (size_t)s.n_cand * sizeof *s.cand);
    }
    for (int64_t j = 0; j < s.n_cand; j++) {
        int64_t row = is_v4(l->letter) ? m->T + s.cand[j] : l->letter == 'Q' ? doc + (s.cand[j] - lo) * l->r : s.cand[j];
        for (int64_t u = 0; u < s.unit; u++) s.pos[s.n++] = (int32_t)(row + u);
    }
    return s;
}

// Attention logits of row i over its support into p[H, n], then softmax in place; lse[H] is the natural log of the
// denominator, to which the sink of C H W adds a term. An empty list gives lse = -inf and no probabilities.
static void attention_probs(const Model *m, const Layer *l, int64_t i, const Support *s, real *p, real *lse) {
    int64_t H = m->c.H, hg = H / l->G, n = s->n;
    const real *rows = l->rows + i / m->T * l->n_rows * l->R, *sinks = is_v4(l->letter) ? param(m, l->sinks) : NULL;
    for (int64_t g = 0; g < l->G; g++)
        rows_dot(p + g * hg * n, l->qrow + (i * H + g * hg) * l->Dk, hg, l->Dk, rows + g * l->Dk, l->R, s->pos, n, l->Dk);
    for (int64_t h = 0; h < H; h++) {
        real *ph = p + h * n, top = sinks ? sinks[h] : (real)-INFINITY, sum = 0, scale = (real)l->scale;
        for (int64_t j = 0; j < n; j++) {
            ph[j] *= scale;
            top = ph[j] > top ? ph[j] : top;
        }
        #pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) {
            ph[j] = exp_real(ph[j] - top);
            sum += ph[j];
        }
        if (sinks) sum += exp_real(sinks[h] - top);
        for (int64_t j = 0; j < n; j++) ph[j] /= sum;
        lse[h] = n || sinks ? top + (real)log((double)sum) : (real)-INFINITY;
    }
}

// What the indexer should imitate: the attention probs[H, n] summed over heads, for a block the largest of its tokens,
// normalised over the candidates into p[n_cand]. Each head's softmax ran over window, candidates and sink together.
// Returns 0 when there is nothing to imitate.
static int index_target(const Model *m, const Support *s, const real *probs, real *p) {
    double sum = 0;
    for (int64_t j = 0; j < s->n_cand; j++) p[j] = 0;
    for (int64_t u = 0; u < s->unit; u++) {
        for (int64_t j = 0; j < s->n_cand; j++) {
            const real *at = probs + s->first + j * s->unit + u;
            real mass = 0;
            for (int64_t h = 0; h < m->c.H; h++) mass += at[h * s->n];
            p[j] = mass > p[j] ? mass : p[j];
        }
    }
    for (int64_t j = 0; j < s->n_cand; j++) sum += (double)p[j];
    for (int64_t j = 0; j < s->n_cand; j++) p[j] = sum > 0 ? (real)((double)p[j] / sum) : 0;
    return sum > 0;
}

// mass[hi - lo]: dense attention of row i, as the indexer should see it.
static void attention_mass(const Model *m, const Layer *l, int64_t i, real *mass, char *scratch) {
    Support s = support(m, l, i, 1, scratch);
    attention_probs(m, l, i, &s, s.reals, s.reals + m->c.H * s.n);
    index_target(m, &s, s.reals, mass);
}

// How many layers teach the indexer of the layer's source: itself, and with --index-target served also the S layers
// that follow it. 0: this layer teaches none.
static int64_t kl_teachers(const Model *m, const Layer *l) {
    int served = !strcmp(m->c.index_target, "served");
    int64_t n = 0;
    if (l->source < 0 || (l->letter == 'S' && !served)) return 0;
    for (int64_t j = 0; j < m->c.L; j++) n += m->layers[j].source == l->source && (served || m->layers[j].letter != 'S');
    return n;
}

// The indexer's loss for row i: KL(p || softmax of the index scores over the same candidates), where p is
// index_target(), a constant (DeepSeek-V3.2, eq. 3 and 4). The gradient to a score is exactly softmax - p; with lane_ki
// given it flows on to index queries, head weights and keys. Loss and gradient are shared among the indexer's teachers
// (kl_teachers()); returns this one's part.
static double indexer_kl(Model *m, const Layer *l, int64_t i, const Support *s, const real *probs, int64_t teachers, real *lane_ki, real *scratch) {
    const Layer *src = &m->layers[l->source];
    int64_t HI = m->c.HI, DI = m->c.DI, n = s->n_cand;
    real *dot = scratch, *score = dot + HI * n, *p = score + n; // [HI, n], [n], [n]
    const real *w = src->w_index + i * HI, *keys = src->k_index + i / m->T * src->n_cand * DI, *q = src->q_index + i * HI * DI;
    if (!index_target(m, s, probs, p)) return 0;
    rows_dot(dot, q, HI, DI, keys, DI, s->cand, n, DI);
    memset(score, 0, (size_t)n * sizeof(real));
    for (int64_t h = 0; h < HI; h++)
        for (int64_t j = 0; j < n; j++) score[j] += w[h] * (dot[h * n + j] < 0 ? 0 : dot[h * n + j]);
    real top = score[0];
    double sum = 0, kl = 0;
    for (int64_t j = 1; j < n; j++) top = score[j] > top ? score[j] : top;
    for (int64_t j = 0; j < n; j++) sum += exp((double)(score[j] - top));
    double log_sum = (double)top + log(sum);
    for (int64_t j = 0; j < n; j++)
        if (p[j] > 0) kl += (double)p[j] * (log((double)p[j]) - ((double)score[j] - log_sum));
    kl /= (double)teachers;
    if (!lane_ki) return kl;
    real *d_w = m->d_wi + i * HI, *d_q = m->d_qi + i * HI * DI, *d_score = score;
    double scale = m->kl_scale / (double)teachers;
    for (int64_t j = 0; j < n; j++) d_score[j] = (real)(scale * (exp((double)score[j] - log_sum) - (double)p[j]));
    for (int64_t h = 0; h < HI; h++) {
        real *x = dot + h * n, sum_w = 0;
        for (int64_t j = 0; j < n; j++) {
            sum_w += x[j] > 0 ? d_score[j] * x[j] : 0;
            x[j] = x[j] > 0 ? d_score[j] * w[h] : 0; // from here on: gradient to the dot product
        }
        d_w[h] += sum_w;
        rows_sum(d_q + h * DI, x, 1, keys, DI, s->cand, n, DI);
    }
    for (int64_t j = 0; j < n; j++) rows_sum(lane_ki + s->cand[j] * DI, dot + j, n, q, DI, NULL, HI, DI);
    return kl;
}

// oc[i, h] = sum over the support of softmax(scale * q . key) * value, and lse. When only evaluating, the KL as well;
// in training the backward pass has the probabilities anyway and takes it there.
static void sparse_attention_forward(Model *m, Layer *l) {
    int64_t H = m->c.H, hg = H / l->G, teachers = m->learning ? 0 : kl_teachers(m, l);
    #pragma omp parallel for schedule(dynamic, 16)
    for (int64_t i = m->r0; i < m->r0 + m->nr; i++) {
        Support s = support(m, l, i, attends_to_all(m, l), my_scratch(m));
        real *p = s.reals;
        const real *values = l->rows + i / m->T * l->n_rows * l->R + l->v_off;
        attention_probs(m, l, i, &s, p, l->lse + i * H);
        for (int64_t h = 0; h < H; h++) {
            real *o = l->oc + (i * H + h) * l->Dv;
            memset(o, 0, (size_t)l->Dv * sizeof(real));
            rows_sum(o, p + h * s.n, 1, values + h / hg * l->Dv, l->R, s.pos, s.n, l->Dv);
        }
        if (teachers) m->row_kl[i] += (float)indexer_kl(m, l, i, &s, p, teachers, NULL, p + H * s.n);
    }
}

// Backward for row i: d_qrow, d_sink, and sums into one lane's d_rows and d_keys. P is recomputed from the logits and
// lse: dP = d_oc . v, dS = P (dP - d_oc . oc) scale, dq = dS k, dk = dS^T q, dv = P^T d_oc. The KL rides along.
static void attention_row_backward(Model *m, Layer *l, int64_t i, int64_t teachers, real *lane_rows, real *lane_ki) {
    int64_t H = m->c.H, hg = H / l->G, Dk = l->Dk, Dv = l->Dv, R = l->R;
    Support s = support(m, l, i, attends_to_all(m, l), my_scratch(m));
    int64_t n = s.n;
    const real *rows = l->rows + i / m->T * l->n_rows * R, *lse = l->lse + i * H, *sinks = is_v4(l->letter) ? param(m, l->sinks) : NULL;
    real *p = s.reals, *ds = p + H * n; // [H, n] each
    for (int64_t g = 0; g < l->G; g++)
        rows_dot(p + g * hg * n, l->qrow + (i * H + g * hg) * Dk, hg, Dk, rows + g * Dk, R, s.pos, n, Dk);
    for (int64_t h = 0; h < H; h++) {
        #pragma omp simd
        for (int64_t j = 0; j < n; j++) p[h * n + j] = exp_real(p[h * n + j] * (real)l->scale - lse[h]);
    }
    if (teachers) m->row_kl[i] += (float)indexer_kl(m, l, i, &s, p, teachers, lane_ki, ds);
    for (int64_t g = 0; g < l->G; g++) {
        const real *q = l->qrow + (i * H + g * hg) * Dk, *d_o = m->d_oc + (i * H + g * hg) * Dv;
        real *pg = p + g * hg * n, *dg = ds + g * hg * n;
        rows_dot(dg, d_o, hg, Dv, rows + l->v_off + g * Dv, R, s.pos, n, Dv);
        for (int64_t h = 0; h < hg; h++) {
            int64_t head = i * H + g * hg + h;
            real delta = 0, *dq = m->d_qrow + head * Dk;
            for (int64_t d = 0; d < Dv; d++) delta += d_o[h * Dv + d] * l->oc[head * Dv + d];
            for (int64_t j = 0; j < n; j++) dg[h * n + j] = pg[h * n + j] * (dg[h * n + j] - delta) * (real)l->scale;
            memset(dq, 0, (size_t)Dk * sizeof(real));
            rows_sum(dq, dg + h * n, 1, rows + g * Dk, R, s.pos, n, Dk);
            if (sinks) m->d_sink[head] = -exp_real(sinks[h] - lse[h]) * delta;
        }
        for (int64_t j = 0; j < n; j++) {
            rows_sum(lane_rows + s.pos[j] * R + g * Dk, dg + j, n, q, Dk, NULL, hg, Dk);
            rows_sum(lane_rows + s.pos[j] * R + l->v_off + g * Dv, pg + j, n, d_o, Dv, NULL, hg, Dv);
        }
    }
}

// d_qrow, d_rows, d_sink from d_oc, and the KL's gradient in the same pass. Many queries add to the same row. To keep
// the sums independent of the thread count without atomics, the queries of a sequence are dealt to LANES fixed lanes,
// each with its own accumulator, added up in order at the end.
static void sparse_attention_backward(Model *m, Layer *l) {
    int64_t T = m->T, R = l->R, DI = m->c.DI, teachers = m->kl_scale == 0 ? 0 : kl_teachers(m, l);
    int64_t rows = l->n_rows, cands = teachers ? m->layers[l->source].n_cand : 0;
    for (int64_t b = 0; b < m->B; b++) {
        #pragma omp parallel for schedule(dynamic)
        for (int64_t lane = 0; lane < LANES; lane++) {
            real *lane_rows = m->lane_rows + lane * rows * R, *lane_ki = m->lane_ki + lane * cands * DI;
            memset(lane_rows, 0, (size_t)(rows * R) * sizeof(real));
            memset(lane_ki, 0, (size_t)(cands * DI) * sizeof(real));
            for (int64_t t = 0; t < T; t++)
                if (t / 16 % LANES == lane) attention_row_backward(m, l, b * T + t, teachers, lane_rows, lane_ki);
        }
        #pragma omp parallel for schedule(static)
        for (int64_t t = 0; t < rows; t++) {
            real *d_row = m->d_rows + (b * rows + t) * R, *d_key = m->d_ki + (b * cands + t) * DI;
            memset(d_row, 0, (size_t)R * sizeof(real));
            for (int64_t lane = 0; lane < LANES; lane++) {
                for (int64_t j = 0; j < R; j++) d_row[j] += m->lane_rows[(lane * rows + t) * R + j];
                for (int64_t j = 0; t < cands && j < DI; j++) d_key[j] += m->lane_ki[(lane * cands + t) * DI + j];
            }
        }
    }
}

// ----------------------------------------------------------------------------
// 10. Attention layers
// 10a. D, S, F
// Multi-head latent attention (DeepSeek-V2, section 2.1) in absorbed form: the up-projection of keys is applied to
// the query, the up-projection of values to the result, so that one row of latents serves all heads.

// to = the rotary channels of from, rotated; steps between rows and between heads of both.
static void mla_rotate(const Model *m, const Layer *l, real *to, int64_t to_row, int64_t to_head, const real *from, int64_t from_row, int64_t from_head, int64_t heads, real sign) {
    #pragma omp parallel for schedule(static)
    for (int64_t i = m->r0; i < m->r0 + m->nr; i++)
        for (int64_t h = 0; h < heads; h++) memcpy(to + i * to_row + h * to_head, from + i * from_row + h * from_head, (size_t)m->c.rope * sizeof(real));
    rotate(m, l, to, to_row, heads, to_head, INTERLEAVED, sign);
}

// Queries qrow and KV rows from the normed input xn.
static void mla_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, H = c->H, hd = c->nope + c->rope, wide = c->nope + c->v_dim;
    real *q = l->q + r0 * H * hd, *qr = l->qr + r0 * c->q_lora, *kva = l->kva + r0 * l->R, *xn = l->xn + r0 * c->C;
    linear_forward(l->qa + r0 * c->q_lora, xn, param(m, l->q_a), n, c->C, c->q_lora);
    rmsnorm_forward(qr, c->q_lora, l->rstd_q + r0, l->qa + r0 * c->q_lora, c->q_lora, param(m, l->q_a_norm), 0, n, c->q_lora, 1e-6);
    linear_forward(q, qr, param(m, l->q_b), n, c->q_lora, H * hd);
    linear_forward(kva, xn, param(m, l->kv_a), n, c->C, l->R);
    rmsnorm_forward(l->rows + r0 * l->R, l->R, l->rstd_kv + r0, kva, l->R, param(m, l->kv_a_norm), 0, n, c->kv_lora, 1e-6);
    for (int64_t h = 0; h < H; h++)
        matmul(l->qrow + (r0 * H + h) * l->Dk, H * l->Dk, q + h * hd, H * hd, 1, param(m, l->kv_b) + h * wide * c->kv_lora, c->kv_lora, 1, n, c->kv_lora, c->nope, 0);
    mla_rotate(m, l, l->rows + c->kv_lora, l->R, 0, l->kva + c->kv_lora, l->R, 0, 1, 1);
    mla_rotate(m, l, l->qrow + c->kv_lora, H * l->Dk, l->Dk, l->q + c->nope, H * hd, hd, H, 1);
}

// y = values of all heads through o_proj, from the summed latents oc.
static void mla_output_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, H = c->H, wide = c->nope + c->v_dim;
    for (int64_t h = 0; h < H; h++)
        matmul(l->att + (r0 * H + h) * c->v_dim, H * c->v_dim, l->oc + (r0 * H + h) * l->Dv, H * l->Dv, 1,
               param(m, l->kv_b) + (h * wide + c->nope) * c->kv_lora, 1, c->kv_lora, n, c->v_dim, c->kv_lora, 0);
    linear_forward(m->y + r0 * c->C, l->att + r0 * H * c->v_dim, param(m, l->o), n, H * c->v_dim, c->C);
}

// d_oc from dy, with the gradients of o_proj and of the value half of kv_b.
static void mla_output_backward(Model *m, Layer *l, const real *dy) {
    const Config *c = &m->c;
    int64_t N = m->N, H = c->H, wide = c->nope + c->v_dim;
    linear_backward(m->d_att, 0, grad(m, l->o), dy, l->att, param(m, l->o), N, H * c->v_dim, c->C);
    for (int64_t h = 0; h < H; h++) {
        int64_t w = (h * wide + c->nope) * c->kv_lora;
        real *d_att = m->d_att + h * c->v_dim;
        matmul(m->d_oc + h * l->Dv, H * l->Dv, d_att, H * c->v_dim, 1, param(m, l->kv_b) + w, c->kv_lora, 1, N, c->kv_lora, c->v_dim, 0);
        matmul(grad(m, l->kv_b) + w, c->kv_lora, d_att, 1, H * c->v_dim, l->oc + h * l->Dv, H * l->Dv, 1, c->v_dim, c->kv_lora, N, 1);
    }
}

// dxn from d_qrow and d_rows, with the gradients of the projections.
static void mla_backward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t N = m->N, H = c->H, hd = c->nope + c->rope, wide = c->nope + c->v_dim;
    for (int64_t h = 0; h < H; h++) {
        int64_t w = h * wide * c->kv_lora;
        real *dq = m->d_qrow + h * l->Dk;
        matmul(m->d_q + h * hd, H * hd, dq, H * l->Dk, 1, param(m, l->kv_b) + w, 1, c->kv_lora, N, c->nope, c->kv_lora, 0);
        matmul(grad(m, l->kv_b) + w, c->kv_lora, l->q + h * hd, 1, H * hd, dq, H * l->Dk, 1, c->nope, c->kv_lora, N, 1);
    }
    mla_rotate(m, l, m->d_q + c->nope, H * hd, hd, m->d_qrow + c->kv_lora, H * l->Dk, l->Dk, H, -1);
    mla_rotate(m, l, m->d_kva + c->kv_lora, l->R, 0, m->d_rows + c->kv_lora, l->R, 0, 1, -1);
    linear_backward(m->d_qr, 0, grad(m, l->q_b), m->d_q, l->qr, param(m, l->q_b), N, c->q_lora, H * hd);
    rmsnorm_backward(m->d_qr, c->q_lora, 0, grad(m, l->q_a_norm), m->d_qr, c->q_lora, l->rstd_q, l->qa, c->q_lora, param(m, l->q_a_norm), 0, N, c->q_lora);
    linear_backward(m->dxn, 0, grad(m, l->q_a), m->d_qr, l->xn, param(m, l->q_a), N, c->C, c->q_lora);
    rmsnorm_backward(m->d_kva, l->R, 0, grad(m, l->kv_a_norm), m->d_rows, l->R, l->rstd_kv, l->kva, l->R, param(m, l->kv_a_norm), 0, N, c->kv_lora);
    linear_backward(m->dxn, 1, grad(m, l->kv_a), m->d_kva, l->xn, param(m, l->kv_a), N, c->C, l->R);
}

// The published scales HI^-0.5 and DI^-0.5 go into the head weights: x *= both, over the rows being computed.
static void scale_index_weights(const Model *m, real *x) {
    real scale = (real)pow((double)(m->c.HI * m->c.DI), -0.5);
    for (int64_t i = m->r0 * m->c.HI; i < (m->r0 + m->nr) * m->c.HI; i++) x[i] *= scale;
}

static int index_layout(const Config *c) { return !strcmp(c->model_type, "glm_moe_dsa") ? INTERLEAVED : HALF_SPLIT; }

// Index queries, keys and head weights of a D layer. Queries come from the query latent, keys and weights from the
// normed input; RoPE on the first rope channels.
static void mla_index_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, HI = c->HI, DI = c->DI;
    const real *xn = l->xn + r0 * c->C;
    linear_forward(l->q_index + r0 * HI * DI, l->qr + r0 * c->q_lora, param(m, l->iq), n, c->q_lora, HI * DI);
    linear_forward(l->ika + r0 * DI, xn, param(m, l->ik), n, c->C, DI);
    layernorm_forward(l->k_index + r0 * DI, l->mean_k + r0, l->rstd_k + r0, l->ika + r0 * DI, param(m, l->ik_norm), param(m, l->ik_bias), n, DI, 1e-6);
    linear_forward(l->w_index + r0 * HI, xn, param(m, l->iw), n, c->C, HI);
    scale_index_weights(m, l->w_index);
    rotate(m, l, l->k_index, DI, 1, 0, index_layout(c), 1);
    rotate(m, l, l->q_index, HI * DI, HI, DI, index_layout(c), 1);
}

// Gradients of the indexer's parameters from d_qi, d_ki, d_wi. The inputs are detached: nothing flows on to xn or the
// query latent.
static void mla_index_backward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t N = m->N, HI = c->HI, DI = c->DI;
    scale_index_weights(m, m->d_wi);
    rotate(m, l, m->d_ki, DI, 1, 0, index_layout(c), -1);
    rotate(m, l, m->d_qi, HI * DI, HI, DI, index_layout(c), -1);
    linear_backward(NULL, 0, grad(m, l->iq), m->d_qi, l->qr, param(m, l->iq), N, c->q_lora, HI * DI);
    layernorm_backward(m->d_ki2, grad(m, l->ik_norm), grad(m, l->ik_bias), m->d_ki, l->mean_k, l->rstd_k, l->ika, param(m, l->ik_norm), N, DI);
    linear_backward(NULL, 0, grad(m, l->ik), m->d_ki2, l->xn, param(m, l->ik), N, c->C, DI);
    linear_backward(NULL, 0, grad(m, l->iw), m->d_wi, l->xn, param(m, l->iw), N, c->C, HI);
}

// 10b. C, H, W (DeepSeek-V4, section 2.3; the compressor's overlap as in the published code)

// When row i is the last token of a pool of its document: 1, with the pool's number in *e and the position of its first
// token (counted from the document's start) in *at. Else 0.
static int completes_pool(const Model *m, const Layer *l, int64_t i, int64_t *e, int64_t *at) {
    int64_t length = i % m->T - m->doc[i] + 1;
    if (!l->r || length % l->r) return 0;
    *at = length - l->r;
    *e = i / m->T * l->n_cand + m->doc[i] / l->r + *at / l->r;
    return 1;
}

// The slots of the pool that row i completes: token and channel offset of slot s. C: the first halves of the pool before
// (absent for a document's first pool), then the second halves of its own. H: its own tokens.
static void pool_slot(const Layer *l, int64_t i, int64_t at, int64_t d, int64_t s, int64_t *token, int64_t *offset) {
    int64_t skip = l->letter == 'C' && at == 0 ? l->r : 0, slots = l->letter == 'C' ? 2 * l->r : l->r;
    *token = i + 1 - slots + s + skip;
    *offset = l->letter == 'C' && s + skip >= l->r ? d : 0;
}
static int64_t pool_slots(const Layer *l, int64_t at) { return l->letter == 'C' && at > 0 ? 2 * l->r : l->r; }

// Pool the completed windows of rows i: ent[e, d] = sum over slots of softmax(gate) * value, channel by channel. comp is
// [2][N, width]: values, gates. out = RMS(ent) with the rotation of the pool's first token on the last channels.
static void compress_forward(Model *m, Layer *l, const real *comp, int64_t d, real *ent, real *rstd, int norm, real *out, int64_t out_rows, int64_t out_from) {
    int64_t width = comp_width(l, d) / 2;
    const real *gates = comp + m->N * width;
    if (m->r0 == 0) { // pools that no document fills must be finite in backward
        memset(ent, 0, (size_t)(m->B * l->n_cand * d) * sizeof(real));
        memset(rstd, 0, (size_t)(m->B * l->n_cand) * sizeof(real));
    }
    #pragma omp parallel for schedule(static)
    for (int64_t i = m->r0; i < m->r0 + m->nr; i++) {
        int64_t e, at, token, offset;
        if (!completes_pool(m, l, i, &e, &at)) continue;
        int64_t slots = pool_slots(l, at);
        for (int64_t j = 0; j < d; j++) {
            real top = (real)-INFINITY, sum = 0, value = 0;
            for (int64_t s = 0; s < slots; s++) {
                pool_slot(l, i, at, d, s, &token, &offset);
                real g = gates[token * width + offset + j];
                top = g > top ? g : top;
            }
            for (int64_t s = 0; s < slots; s++) {
                pool_slot(l, i, at, d, s, &token, &offset);
                real p = exp_real(gates[token * width + offset + j] - top);
                sum += p;
                value += p * comp[token * width + offset + j];
            }
            ent[e * d + j] = value / sum;
        }
        real *y = out + (i / m->T * out_rows + out_from + e % l->n_cand) * d;
        rstd[e] = rmsnorm_row(y, ent + e * d, param(m, norm), 0, d, m->c.rms_eps);
        rope_apply(y + d - m->c.rope, l->cos_sin + at * m->c.rope, m->c.rope / 2, INTERLEAVED, 1);
    }
}

// Gradients of the compressor: d_out (as out, rotated back in place) -> norm weights, d_comp [2][N, width], position bias.
static void compress_backward(Model *m, Layer *l, const real *comp, int64_t d, const real *ent, const real *rstd, int norm, int bias,
                              real *d_out, int64_t out_rows, int64_t out_from, real *d_ent, real *d_comp) {
    int64_t width = comp_width(l, d) / 2, N = m->N;
    const real *gates = comp + N * width;
    real *d_gates = d_comp + N * width;
    memset(d_comp, 0, (size_t)(2 * N * width) * sizeof(real));
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N; i++) {
        int64_t e, at;
        if (completes_pool(m, l, i, &e, &at))
            rope_apply(d_out + (i / m->T * out_rows + out_from + e % l->n_cand) * d + d - m->c.rope, l->cos_sin + at * m->c.rope, m->c.rope / 2, INTERLEAVED, -1);
    }
    for (int64_t b = 0; b < m->B; b++)
        rmsnorm_backward(d_ent + b * l->n_cand * d, d, 0, grad(m, norm), d_out + (b * out_rows + out_from) * d, d, rstd + b * l->n_cand,
                         ent + b * l->n_cand * d, d, param(m, norm), 0, l->n_cand, d);
    #pragma omp parallel for schedule(static) // each token and channel serves one pool: no two threads meet
    for (int64_t i = 0; i < N; i++) {
        int64_t e, at, token, offset;
        if (!completes_pool(m, l, i, &e, &at)) continue;
        int64_t slots = pool_slots(l, at);
        for (int64_t j = 0; j < d; j++) {
            real top = (real)-INFINITY, sum = 0, dy = d_ent[e * d + j], y = ent[e * d + j];
            for (int64_t s = 0; s < slots; s++) {
                pool_slot(l, i, at, d, s, &token, &offset);
                top = gates[token * width + offset + j] > top ? gates[token * width + offset + j] : top;
            }
            for (int64_t s = 0; s < slots; s++) {
                pool_slot(l, i, at, d, s, &token, &offset);
                sum += exp_real(gates[token * width + offset + j] - top);
            }
            for (int64_t s = 0; s < slots; s++) {
                pool_slot(l, i, at, d, s, &token, &offset);
                int64_t x = token * width + offset + j;
                real p = exp_real(gates[x] - top) / sum;
                d_comp[x] = p * dy;
                d_gates[x] = p * dy * (comp[x] - y);
            }
        }
    }
    real *d_bias = grad(m, bias);
    #pragma omp parallel for schedule(static)
    for (int64_t j0 = 0; j0 < width; j0 += COLUMNS)
        for (int64_t i = 0; i < N; i++)
            for (int64_t j = j0; j < min64(j0 + COLUMNS, width); j++) d_bias[(i % m->T - m->doc[i]) % l->r * width + j] += d_gates[i * width + j];
}

// The inputs of a compressor: values = xn Wkv, gates = xn Wgate + bias of the token's place in its pool.
static void compress_project(Model *m, Layer *l, real *comp, int kv, int gate, int bias, int64_t d) {
    int64_t width = comp_width(l, d) / 2, r0 = m->r0, n = m->nr, C = m->c.C;
    real *gates = comp + m->N * width;
    linear_forward(comp + r0 * width, l->xn + r0 * C, param(m, kv), n, C, width);
    linear_forward(gates + r0 * width, l->xn + r0 * C, param(m, gate), n, C, width);
    #pragma omp parallel for schedule(static)
    for (int64_t i = r0; i < r0 + n; i++)
        for (int64_t j = 0; j < width; j++) gates[i * width + j] += param(m, bias)[(i % m->T - m->doc[i]) % l->r * width + j];
}

// Queries, window rows and entries from the normed input xn. Queries are normed by head without weights.
static void v4_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, H = c->H, D = c->head_dim;
    const real *xn = l->xn + r0 * c->C;
    real *qr = l->qr + r0 * c->q_lora;
    linear_forward(l->qa + r0 * c->q_lora, xn, param(m, l->q_a), n, c->C, c->q_lora);
    rmsnorm_forward(qr, c->q_lora, l->rstd_q + r0, l->qa + r0 * c->q_lora, c->q_lora, param(m, l->q_a_norm), 0, n, c->q_lora, c->rms_eps);
    linear_forward(l->q + r0 * H * D, qr, param(m, l->q_b), n, c->q_lora, H * D);
    rmsnorm_forward(l->qrow + r0 * H * D, D, l->rstd_h + r0 * H, l->q + r0 * H * D, D, NULL, 0, n * H, D, c->rms_eps);
    linear_forward(l->kva + r0 * D, xn, param(m, l->kv_a), n, c->C, D);
    #pragma omp parallel for schedule(static)
    for (int64_t i = r0; i < r0 + n; i++) {
        real *row = l->rows + (i / m->T * l->n_rows + i % m->T) * D;
        l->rstd_kv[i] = rmsnorm_row(row, l->kva + i * D, param(m, l->kv_a_norm), 0, D, c->rms_eps);
        rope_apply(row + D - c->rope, rope_row(m, l, i), c->rope / 2, INTERLEAVED, 1);
    }
    rotate(m, l, l->qrow + D - c->rope, H * D, H, D, INTERLEAVED, 1);
    if (l->letter == 'W') return;
    compress_project(m, l, l->comp, l->comp_kv, l->comp_gate, l->comp_bias, D);
    compress_forward(m, l, l->comp, D, l->ent, l->rstd_e, l->comp_norm, l->rows, l->n_rows, m->T);
}

// y: the rotated channels of each head's sum are rotated back by the query's position (rows are keys and values at
// once, so values carry their keys' rotation), then heads go in groups through o_a, all together through o_b.
static void v4_output_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, H = c->H, D = c->head_dim, wide = l->n_att / c->o_groups, mid = c->o_groups * c->o_lora;
    memcpy(l->att + r0 * H * D, l->oc + r0 * H * D, (size_t)(n * H * D) * sizeof(real));
    rotate(m, l, l->att + D - c->rope, H * D, H, D, INTERLEAVED, -1);
    for (int64_t g = 0; g < c->o_groups; g++)
        matmul(l->oa + r0 * mid + g * c->o_lora, mid, l->att + r0 * H * D + g * wide, H * D, 1, param(m, l->o_a) + g * c->o_lora * wide, 1, wide, n, c->o_lora, wide, 0);
    linear_forward(m->y + r0 * c->C, l->oa + r0 * mid, param(m, l->o), n, mid, c->C);
}

static void v4_output_backward(Model *m, Layer *l, const real *dy) {
    const Config *c = &m->c;
    int64_t N = m->N, H = c->H, D = c->head_dim, wide = l->n_att / c->o_groups, mid = c->o_groups * c->o_lora;
    linear_backward(m->d_oa, 0, grad(m, l->o), dy, l->oa, param(m, l->o), N, mid, c->C);
    for (int64_t g = 0; g < c->o_groups; g++) {
        int64_t w = g * c->o_lora * wide;
        matmul(m->d_oc + g * wide, H * D, m->d_oa + g * c->o_lora, mid, 1, param(m, l->o_a) + w, wide, 1, N, wide, c->o_lora, 0);
        matmul(grad(m, l->o_a) + w, wide, m->d_oa + g * c->o_lora, 1, mid, l->att + g * wide, H * D, 1, c->o_lora, wide, N, 1);
    }
    rotate(m, l, m->d_oc + D - c->rope, H * D, H, D, INTERLEAVED, 1);
}

// The gradients of a compressor's projections; dxn receives its share unless NULL (the indexer's inputs are detached).
static void compress_project_backward(Model *m, Layer *l, real *dxn, int kv, int gate, int64_t d) {
    int64_t width = comp_width(l, d) / 2;
    linear_backward(dxn, 1, grad(m, kv), m->d_comp, l->xn, param(m, kv), m->N, m->c.C, width);
    linear_backward(dxn, 1, grad(m, gate), m->d_comp + m->N * width, l->xn, param(m, gate), m->N, m->c.C, width);
}

// dxn from d_qrow, d_rows and d_sink, with the gradients of everything on the way.
static void v4_backward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t N = m->N, H = c->H, D = c->head_dim;
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < N; i++) grad(m, l->sinks)[h] += m->d_sink[i * H + h];
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N; i++)
        rope_apply(m->d_rows + (i / m->T * l->n_rows + i % m->T + 1) * D - c->rope, rope_row(m, l, i), c->rope / 2, INTERLEAVED, -1);
    rotate(m, l, m->d_qrow + D - c->rope, H * D, H, D, INTERLEAVED, -1);
    rmsnorm_backward(m->d_q, D, 0, NULL, m->d_qrow, D, l->rstd_h, l->q, D, NULL, 0, N * H, D);
    linear_backward(m->d_qr, 0, grad(m, l->q_b), m->d_q, l->qr, param(m, l->q_b), N, c->q_lora, H * D);
    rmsnorm_backward(m->d_qr, c->q_lora, 0, grad(m, l->q_a_norm), m->d_qr, c->q_lora, l->rstd_q, l->qa, c->q_lora, param(m, l->q_a_norm), 0, N, c->q_lora);
    linear_backward(m->dxn, 0, grad(m, l->q_a), m->d_qr, l->xn, param(m, l->q_a), N, c->C, c->q_lora);
    for (int64_t b = 0; b < m->B; b++)
        rmsnorm_backward(m->d_kva + b * m->T * D, D, 0, grad(m, l->kv_a_norm), m->d_rows + b * l->n_rows * D, D, l->rstd_kv + b * m->T,
                         l->kva + b * m->T * D, D, param(m, l->kv_a_norm), 0, m->T, D);
    linear_backward(m->dxn, 1, grad(m, l->kv_a), m->d_kva, l->xn, param(m, l->kv_a), N, c->C, D);
    if (l->letter == 'W') return;
    compress_backward(m, l, l->comp, D, l->ent, l->rstd_e, l->comp_norm, l->comp_bias, m->d_rows, l->n_rows, m->T, m->d_ent, m->d_comp);
    compress_project_backward(m, l, m->dxn, l->comp_kv, l->comp_gate, D);
}

// Index queries from the query latent, rotated on the last channels; index keys by a compressor of their own.
static void v4_index_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, HI = c->HI, DI = c->DI;
    linear_forward(l->q_index + r0 * HI * DI, l->qr + r0 * c->q_lora, param(m, l->iq), n, c->q_lora, HI * DI);
    linear_forward(l->w_index + r0 * HI, l->xn + r0 * c->C, param(m, l->iw), n, c->C, HI);
    scale_index_weights(m, l->w_index);
    rotate(m, l, l->q_index + DI - c->rope, HI * DI, HI, DI, INTERLEAVED, 1);
    compress_project(m, l, l->icomp, l->ik, l->icomp_gate, l->icomp_bias, DI);
    compress_forward(m, l, l->icomp, DI, l->ika, l->rstd_k, l->ik_norm, l->k_index, l->n_cand, 0);
}

static void v4_index_backward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t N = m->N, HI = c->HI, DI = c->DI;
    scale_index_weights(m, m->d_wi);
    rotate(m, l, m->d_qi + DI - c->rope, HI * DI, HI, DI, INTERLEAVED, -1);
    linear_backward(NULL, 0, grad(m, l->iq), m->d_qi, l->qr, param(m, l->iq), N, c->q_lora, HI * DI);
    linear_backward(NULL, 0, grad(m, l->iw), m->d_wi, l->xn, param(m, l->iw), N, c->C, HI);
    compress_backward(m, l, l->icomp, DI, l->ika, l->rstd_k, l->ik_norm, l->icomp_bias, m->d_ki, l->n_cand, 0, m->d_ki2, m->d_comp);
    compress_project_backward(m, l, NULL, l->ik, l->icomp_gate, DI);
}

// 10c. Q (Qwen3.8-Flash-Next, report section 2.1.2)

// Queries and gates, keys and values; queries and keys normed by head (weights 1 + w), rotated on the first channels.
static void qsa_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, H = c->H, D = c->head_dim, G = l->G;
    const real *xn = l->xn + r0 * c->C;
    linear_forward(l->q + r0 * l->n_q, xn, param(m, l->q_proj), n, c->C, l->n_q);
    rmsnorm_forward(l->qrow + r0 * H * D, D, l->rstd_h + r0 * H, l->q + r0 * l->n_q, 2 * D, param(m, l->q_norm), 1, n * H, D, c->rms_eps);
    matmul(l->kva + r0 * l->R, l->R, xn, c->C, 1, param(m, l->k_proj), 1, c->C, n, G * D, c->C, 0);
    matmul(l->rows + r0 * l->R + l->v_off, l->R, xn, c->C, 1, param(m, l->v_proj), 1, c->C, n, G * D, c->C, 0);
    for (int64_t g = 0; g < G; g++)
        rmsnorm_forward(l->rows + r0 * l->R + g * D, l->R, l->rstd_kv + g * m->N + r0, l->kva + r0 * l->R + g * D, l->R, param(m, l->k_norm), 1, n, D, c->rms_eps);
    rotate(m, l, l->rows, l->R, G, D, HALF_SPLIT, 1);
    rotate(m, l, l->qrow, H * D, H, D, HALF_SPLIT, 1);
}

// y = o_proj(oc * sigmoid(gate))
static void qsa_output_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, H = c->H, D = c->head_dim;
    #pragma omp parallel for schedule(static)
    for (int64_t i = r0 * H; i < (r0 + n) * H; i++)
        for (int64_t d = 0; d < D; d++) l->att[i * D + d] = l->oc[i * D + d] / (1 + exp_real(-l->q[(2 * i + 1) * D + d]));
    linear_forward(m->y + r0 * c->C, l->att + r0 * H * D, param(m, l->o), n, H * D, c->C);
}

// d_oc and the gates' half of d_q from dy.
static void qsa_output_backward(Model *m, Layer *l, const real *dy) {
    const Config *c = &m->c;
    int64_t N = m->N, H = c->H, D = c->head_dim;
    linear_backward(m->d_att, 0, grad(m, l->o), dy, l->att, param(m, l->o), N, H * D, c->C);
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N * H; i++) {
        for (int64_t d = 0; d < D; d++) {
            real s = 1 / (1 + exp_real(-l->q[(2 * i + 1) * D + d])), g = m->d_att[i * D + d];
            m->d_oc[i * D + d] = g * s;
            m->d_q[(2 * i + 1) * D + d] = g * l->oc[i * D + d] * s * (1 - s);
        }
    }
}

static void qsa_backward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t N = m->N, H = c->H, D = c->head_dim, G = l->G;
    rotate(m, l, m->d_rows, l->R, G, D, HALF_SPLIT, -1);
    rotate(m, l, m->d_qrow, H * D, H, D, HALF_SPLIT, -1);
    rmsnorm_backward(m->d_q, 2 * D, 0, grad(m, l->q_norm), m->d_qrow, D, l->rstd_h, l->q, 2 * D, param(m, l->q_norm), 1, N * H, D);
    linear_backward(m->dxn, 0, grad(m, l->q_proj), m->d_q, l->xn, param(m, l->q_proj), N, c->C, l->n_q);
    for (int64_t g = 0; g < G; g++) // in place: the values' half of a row keeps its gradients
        rmsnorm_backward(m->d_rows + g * D, l->R, 0, grad(m, l->k_norm), m->d_rows + g * D, l->R, l->rstd_kv + g * N, l->kva + g * D, l->R, param(m, l->k_norm), 1, N, D);
    for (int half = 0; half < 2; half++) {
        int w = half ? l->v_proj : l->k_proj;
        real *dy = m->d_rows + half * l->v_off;
        matmul(m->dxn, c->C, dy, l->R, 1, param(m, w), c->C, 1, N, c->C, G * D, 1);
        matmul(grad(m, w), c->C, dy, 1, l->R, l->xn, c->C, 1, G * D, c->C, N, 1);
    }
}

// Index queries and keys from one projection of xn: HI query heads, then the key. Keys are averaged raw over a block,
// then normed and rotated at the block's first position. There are no head weights.
static void qsa_index_forward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t n = m->nr, r0 = m->r0, HI = c->HI, DI = c->DI, width = (HI + 1) * DI;
    real scale = (real)pow((double)DI, -0.5);
    linear_forward(l->icomp + r0 * width, l->xn + r0 * c->C, param(m, l->iq), n, c->C, width);
    if (r0 == 0) { // blocks that no document fills must be finite in backward
        memset(l->ika, 0, (size_t)(m->B * l->n_cand * DI) * sizeof(real));
        memset(l->rstd_k, 0, (size_t)(m->B * l->n_cand) * sizeof(real));
    }
    #pragma omp parallel for schedule(static)
    for (int64_t i = r0; i < r0 + n; i++) {
        int64_t e, at;
        for (int64_t h = 0; h < HI; h++) {
            real *q = l->q_index + (i * HI + h) * DI;
            l->rstd_iq[h * m->N + i] = rmsnorm_row(q, l->icomp + i * width + h * DI, param(m, l->ik_bias), 1, DI, c->rms_eps);
            rope_apply(q, rope_row(m, l, i), c->rope / 2, HALF_SPLIT, 1);
            l->w_index[i * HI + h] = scale;
        }
        if (!completes_pool(m, l, i, &e, &at)) continue;
        real *mean = l->ika + e * DI, *key = l->k_index + e * DI;
        memset(mean, 0, (size_t)DI * sizeof(real));
        for (int64_t j = i + 1 - l->r; j <= i; j++)
            for (int64_t d = 0; d < DI; d++) mean[d] += l->icomp[j * width + HI * DI + d] / (real)l->r;
        l->rstd_k[e] = rmsnorm_row(key, mean, param(m, l->ik_norm), 1, DI, c->rms_eps);
        rope_apply(key, l->cos_sin + at * c->rope, c->rope / 2, HALF_SPLIT, 1);
    }
}

static void qsa_index_backward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t N = m->N, HI = c->HI, DI = c->DI, width = (HI + 1) * DI;
    memset(m->d_comp, 0, (size_t)(N * width) * sizeof(real));
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N; i++) {
        int64_t e, at;
        for (int64_t h = 0; h < HI; h++) rope_apply(m->d_qi + (i * HI + h) * DI, rope_row(m, l, i), c->rope / 2, HALF_SPLIT, -1);
        if (completes_pool(m, l, i, &e, &at)) rope_apply(m->d_ki + e * DI, l->cos_sin + at * c->rope, c->rope / 2, HALF_SPLIT, -1);
    }
    for (int64_t h = 0; h < HI; h++)
        rmsnorm_backward(m->d_comp + h * DI, width, 0, grad(m, l->ik_bias), m->d_qi + h * DI, HI * DI, l->rstd_iq + h * N, l->icomp + h * DI, width, param(m, l->ik_bias), 1, N, DI);
    rmsnorm_backward(m->d_ki2, DI, 0, grad(m, l->ik_norm), m->d_ki, DI, l->rstd_k, l->ika, DI, param(m, l->ik_norm), 1, m->B * l->n_cand, DI);
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < N; i++) {
        int64_t e, at;
        if (!completes_pool(m, l, i, &e, &at)) continue;
        for (int64_t j = i + 1 - l->r; j <= i; j++)
            for (int64_t d = 0; d < DI; d++) m->d_comp[j * width + HI * DI + d] = m->d_ki2[e * DI + d] / (real)l->r;
    }
    linear_backward(NULL, 0, grad(m, l->iq), m->d_comp, l->xn, param(m, l->iq), N, c->C, width);
}

// 10d. All letters

// Compare the selection of sampled queries with dense attention: the mass it covers, the share of the true top-k it
// found, and for scale the mass of the last k tokens and of the true top-k.
static void probe_layer(Model *m, Layer *l) {
    Probe *p = &m->probe;
    int64_t k = m->c.topk, lo, hi;
    uint64_t *keys = (uint64_t *)m->scratch;
    real *mass = (real *)(keys + m->T);
    for (int64_t j = 0, tries = 0; j < p->queries && tries < 16 * p->queries; tries++) {
        int64_t i = (int64_t)(rng_u64((uint64_t)m->c.seed, RNG_SELECT - 1, (uint64_t)tries) % (uint64_t)m->N), found = 0;
        visible(m, l, i, &lo, &hi);
        if (hi - lo <= k) continue; // everything is selected: nothing to learn from
        j++;
        attention_mass(m, l, i, mass, (char *)(mass + m->T));
        for (int64_t s = lo; s < hi; s++) keys[s - lo] = order_key((float)mass[s - lo], s);
        uint64_t bound = kth_largest(keys, hi - lo, k);
        for (int64_t s = lo; s < hi; s++) {
            p->oracle_mass += keys[s - lo] >= bound ? (double)mass[s - lo] : 0;
            p->window_mass += s >= hi - k ? (double)mass[s - lo] : 0;
        }
        for (int64_t s = 0; s < k; s++) {
            int64_t x = l->sel[i * k + s] - lo;
            p->mass += (double)mass[x];
            found += keys[x] >= bound;
        }
        p->recall += (double)found / (double)k;
        p->n++;
    }
}

// y = attention of the normed input xn, for the rows being computed.
static void attention_forward(Model *m, Layer *l) {
    int mla = is_mla(l->letter), v4 = is_v4(l->letter);
    (mla ? mla_forward : v4 ? v4_forward : qsa_forward)(m, l);
    if (is_sparse(l->letter)) {
        (mla ? mla_index_forward : v4 ? v4_index_forward : qsa_index_forward)(m, l);
        if (!m->fixed_selection && (!m->dense || m->probe.queries)) {
            select_forward(m, l);
            selection_store(m, l);
        }
    }
    if (l->source >= 0 && !attends_to_all(m, l)) selection_restore(m, l);
    if (is_sparse(l->letter) && m->probe.queries) probe_layer(m, l);
    sparse_attention_forward(m, l);
    (mla ? mla_output_forward : v4 ? v4_output_forward : qsa_output_forward)(m, l);
}

// Zero the accumulators of index gradients, of n_cand keys a sequence.
static void clear_index_grads(Model *m, int64_t n_cand) {
    memset(m->d_qi, 0, (size_t)(m->N * m->c.HI * m->c.DI) * sizeof(real));
    memset(m->d_wi, 0, (size_t)(m->N * m->c.HI) * sizeof(real));
    memset(m->d_ki, 0, (size_t)(m->B * n_cand * m->c.DI) * sizeof(real));
}

// dxn and the gradients of all parameters of the layer from dy. The indexer's accumulators are cleared for the next one.
static void attention_backward(Model *m, Layer *l, const real *dy) {
    int mla = is_mla(l->letter), v4 = is_v4(l->letter);
    (mla ? mla_output_backward : v4 ? v4_output_backward : qsa_output_backward)(m, l, dy);
    sparse_attention_backward(m, l);
    (mla ? mla_backward : v4 ? v4_backward : qsa_backward)(m, l);
    if (!is_sparse(l->letter)) return;
    (mla ? mla_index_backward : v4 ? v4_index_backward : qsa_index_backward)(m, l);
    clear_index_grads(m, l->n_cand);
}

// ----------------------------------------------------------------------------
// 11. The model

// out = a + b
static void residual_forward(real *out, const real *a, const real *b, int64_t n) {
    #pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

// One block, pre-norm: x2 = x + attention(norm(x)); next = x2 + mlp(norm(x2)). next NULL: only what backward needs.
static void block_forward(Model *m, Layer *l, real *next) {
    const Config *c = &m->c;
    int64_t C = c->C, F = c->F, n = m->nr, r0 = m->r0, at = r0 * C;
    rmsnorm_forward(l->xn + at, C, l->rstd + r0, l->x + at, C, param(m, l->input_norm), 0, n, C, c->rms_eps);
    attention_forward(m, l);
    residual_forward(l->x2 + at, l->x + at, m->y + at, n * C);
    rmsnorm_forward(l->xn2 + at, C, l->rstd2 + r0, l->x2 + at, C, param(m, l->post_norm), 0, n, C, c->rms_eps);
    linear_forward(l->g + r0 * F, l->xn2 + at, param(m, l->gate), n, C, F);
    linear_forward(l->u + r0 * F, l->xn2 + at, param(m, l->up), n, C, F);
    swiglu_forward(l->act + r0 * F, l->g + r0 * F, l->u + r0 * F, n * F);
    if (!next) return;
    linear_forward(m->y + at, l->act + r0 * F, param(m, l->down), n, F, C);
    residual_forward(next + at, l->x2 + at, m->y + at, n * C);
}

// dx holds the gradient to the block's output and receives that to its input. The MLP's gradients replace its activations.
static void block_backward(Model *m, Layer *l) {
    const Config *c = &m->c;
    int64_t C = c->C, F = c->F, N = m->N;
    linear_backward(l->act, 0, grad(m, l->down), m->dx, l->act, param(m, l->down), N, F, C);
    swiglu_backward(l->g, l->u, l->act, l->g, l->u, N * F);
    linear_backward(m->dxn, 0, grad(m, l->gate), l->g, l->xn2, param(m, l->gate), N, C, F);
    linear_backward(m->dxn, 1, grad(m, l->up), l->u, l->xn2, param(m, l->up), N, C, F);
    rmsnorm_backward(m->dx, C, 1, grad(m, l->post_norm), m->dxn, C, l->rstd2, l->x2, C, param(m, l->post_norm), 0, N, C);
    attention_backward(m, l, m->dx);
    rmsnorm_backward(m->dx, C, 1, grad(m, l->input_norm), m->dxn, C, l->rstd, l->x, C, param(m, l->input_norm), 0, N, C);
}

// Cross-entropy of xf against the targets, a chunk of rows at a time, so that the logits [N, V] never exist whole;
// when learning, dxn = gradient to xf and the head's gradient in the same pass. Rows with target -1 have no loss.
// The padded columns of the vocabulary take no part.
static void classifier(Model *m) {
    int64_t C = m->c.C, V = m->c.V, Vp = m->Vp;
    for (int64_t r = m->r0; r < m->r0 + m->nr; r += m->logit_rows) {
        int64_t n = min64(m->logit_rows, m->r0 + m->nr - r);
        linear_forward(m->logits, m->xf + r * C, param(m, m->head), n, C, Vp);
        if (m->all_logits)
            for (int64_t i = 0; i < n; i++) memcpy(m->all_logits + (r + i) * V, m->logits + i * Vp, (size_t)V * sizeof(real));
        #pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            real *z = m->logits + i * Vp, top = z[0], sum = 0, at = 0;
            int32_t target = m->targets[r + i];
            int64_t best = 0;
            for (int64_t v = 1; v < V; v++)
                if (z[v] > top) { top = z[v]; best = v; }
            m->row_hit[r + i] = best == target;
            if (target < 0 && !m->learning) { // nothing to compute: the logits stay, for sampling
                m->row_loss[r + i] = 0;
                continue;
            }
            if (target >= 0) at = z[target];
            #pragma omp simd reduction(+ : sum)
            for (int64_t v = 0; v < V; v++) {
                z[v] = exp_real(z[v] - top);
                sum += z[v];
            }
            m->row_loss[r + i] = target < 0 ? 0 : (float)(log((double)sum) + (double)top - (double)at);
            if (!m->learning) continue;
            real scale = target < 0 ? 0 : (real)(m->loss_scale / (double)sum);
            for (int64_t v = 0; v < V; v++) z[v] *= scale;
            for (int64_t v = V; v < Vp; v++) z[v] = 0;
            if (target >= 0) z[target] -= (real)m->loss_scale;
        }
        if (m->learning) linear_backward(m->dxn + r * C, 0, grad(m, m->head), m->logits, m->xf + r * C, param(m, m->head), n, C, Vp);
    }
}

// Documents of the rows: the position of the last end-of-document token at or before each token of its row.
static void find_documents(Model *m) {
    for (int64_t i = m->r0; i < m->r0 + m->nr; i++) {
        int starts = i % m->T == 0 || (m->c.doc_mask && m->tokens[i] == m->eot);
        m->doc[i] = starts ? (int32_t)(i % m->T) : m->doc[i - 1];
    }
}

// Forward pass over the rows [r0, r0 + nr): per-row losses, hits and (when not learning) KLs. With B = 1 a later
// call may add rows: keys and values of the earlier ones stand in the buffers.
static void model_forward(Model *m) {
    int64_t C = m->c.C;
    m->held = -1;
    find_documents(m);
    memset(m->row_kl + m->r0, 0, (size_t)m->nr * sizeof(float));
    #pragma omp parallel for schedule(static)
    for (int64_t i = m->r0; i < m->r0 + m->nr; i++) memcpy(m->layers[0].x + i * C, param(m, m->embed) + m->tokens[i] * C, (size_t)C * sizeof(real));
    for (int64_t l = 0; l < m->c.L; l++) block_forward(m, &m->layers[l], l + 1 < m->c.L ? m->layers[l + 1].x : m->last_x);
    rmsnorm_forward(m->xf + m->r0 * C, C, m->rstd_f + m->r0, m->last_x + m->r0 * C, C, param(m, m->final_norm), 0, m->nr, C, m->c.rms_eps);
    classifier(m);
}

// Backward pass after model_forward with learning set: adds to the gradients of all parameters, fills row_kl.
static void model_backward(Model *m) {
    int64_t C = m->c.C, N = m->N;
    m->held = -1;
    memset(m->row_kl, 0, (size_t)N * sizeof(float));
    clear_index_grads(m, m->most_cand);
    rmsnorm_backward(m->dx, C, 0, grad(m, m->final_norm), m->dxn, C, m->rstd_f, m->last_x, C, param(m, m->final_norm), 0, N, C);
    for (int64_t l = m->c.L - 1; l >= 0; l--) {
        if (!strcmp(m->c.recompute, "block")) { // the selection is kept, not made again (unless --replay 0)
            int fixed = m->fixed_selection;
            Probe probe = m->probe;
            m->fixed_selection |= (int)m->c.replay;
            m->probe.queries = 0;
            block_forward(m, &m->layers[l], NULL);
            m->fixed_selection = fixed;
            m->probe = probe;
        }
        block_backward(m, &m->layers[l]);
    }
    real *d_embed = grad(m, m->embed);
    #pragma omp parallel for schedule(static)
    for (int64_t j0 = 0; j0 < C; j0 += COLUMNS) // tokens repeat: threads share channels, not rows
        for (int64_t i = 0; i < N; i++)
            for (int64_t j = j0; j < min64(j0 + COLUMNS, C); j++) d_embed[m->tokens[i] * C + j] += m->dx[i * C + j];
}

// Layers whose indexer learns.
static int64_t kl_layers(const Model *m) {
    int64_t n = 0;
    for (int64_t l = 0; l < m->c.L; l++) n += is_sparse(m->layers[l].letter);
    return n;
}

// ----------------------------------------------------------------------------
// 12. Optimizer

// Norm of the gradients of the model (index = 0) or of the indexers (1), summed in a fixed order in double.
static double grad_norm(const Model *m, int index) {
    double total = 0;
    enum { CHUNK = 4096 };
    for (int i = 0; i < m->n_tensors; i++) {
        const Tensor *t = &m->tensors[i];
        const real *g = grad(m, i);
        if (t->index != index) continue;
        for (int64_t j0 = 0; j0 < t->size; j0 += CHUNK) {
            double s = 0;
            #pragma omp simd reduction(+ : s)
            for (int64_t j = j0; j < min64(j0 + CHUNK, t->size); j++) s += (double)g[j] * (double)g[j];
            total += s;
        }
    }
    return sqrt(total);
}

// AdamW (Loshchilov and Hutter 2019), decoupled decay on matrices only; step counts from 1. Gradients are scaled by
// scale[index] (clipping) and the learning rate of the indexers by index_lr_mult.
static void adamw_update(Model *m, int64_t step, double lr, const double scale[2]) {
    const Config *c = &m->c;
    double fix1 = 1 - pow(c->beta1, (double)step), fix2 = 1 - pow(c->beta2, (double)step);
    for (int i = 0; i < m->n_tensors; i++) {
        const Tensor *t = &m->tensors[i];
        real rate = (real)(lr * (t->index ? c->index_lr_mult : 1)), decay = t->decay ? (real)(1 - (double)rate * c->weight_decay) : 1;
        real b1 = (real)c->beta1, b2 = (real)c->beta2, s = (real)scale[t->index], eps = (real)c->adam_eps;
        real rate1 = (real)((double)rate / fix1), inv2 = (real)(1 / fix2);
        real *p = param(m, i), *g = grad(m, i), *mm = m->m + t->offset, *vv = m->v + t->offset;
        if (t->index && c->kl_coef == 0) continue; // untrained: not decayed either
        #pragma omp parallel for simd schedule(static)
        for (int64_t j = 0; j < t->size; j++) {
            real gj = g[j] * s;
            mm[j] = b1 * mm[j] + (1 - b1) * gj;
            vv[j] = b2 * vv[j] + (1 - b2) * gj * gj;
            p[j] = decay * p[j] - rate1 * mm[j] / ((real)sqrt((double)(vv[j] * inv2)) + eps);
        }
    }
}

// Learning rate of a step (from 0): linear warm-up, then cosine to min_lr, or constant and a linear end (wsd).
static double learning_rate(const Config *c, int64_t step) {
    double left, span;
    if (step < c->warmup) return c->lr * (double)(step + 1) / (double)c->warmup;
    if (!strcmp(c->schedule, "cosine")) {
        span = (double)max64(1, c->steps - c->warmup);
        double t = (double)(step - c->warmup) / span;
        return c->lr * (c->min_lr + (1 - c->min_lr) * 0.5 * (1 + cos(3.141592653589793 * (t > 1 ? 1 : t))));
    }
    span = (double)(c->decay_steps ? c->decay_steps : max64(1, c->steps / 5));
    left = (double)(c->steps - step) / span;
    return c->lr * (left >= 1 ? 1 : c->min_lr + (1 - c->min_lr) * (left < 0 ? 0 : left));
}

// ----------------------------------------------------------------------------
// 13. Checkpoints
// A checkpoint is a folder step_N: model.safetensors, config.json and tokenizer files as transformers expects them,
// the optimizer's moments as flat tensors, and state.json, which lists every file with size and checksum. It is
// written under a temporary name, flushed and renamed: a folder named step_N is whole, or was damaged later, which
// the checksums show.

// The model class of transformers that this model is, or NULL; *type is its model_type, or "hyscale".
static const char *published_class(const Config *c, const char **type) {
    int d = 0, s = 0, f = 0, glm = !strcmp(c->model_type, "glm_moe_dsa");
    for (int64_t l = 0; l < c->L; l++) {
        d += layer_letter(c, l) == 'D';
        s += layer_letter(c, l) == 'S';
        f += layer_letter(c, l) == 'F';
    }
    if (f == c->L) return *type = "deepseek_v3", "DeepseekV3ForCausalLM";
    if (d + s == c->L && glm) return *type = "glm_moe_dsa", "GlmMoeDsaForCausalLM";
    if (d == c->L) return *type = "deepseek_v32", "DeepseekV32ForCausalLM";
    return *type = "hyscale", (const char *)NULL;
}

// Open a file of the folder for writing, or stop.
static FILE *create_file(const char *dir, const char *name) {
    char path[2048];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    if (!f) die("cannot write %s: %s", path, strerror(errno));
    return f;
}

// Flush to the disk and close, or stop: a full disk is found here.
static void finish_file(FILE *f, const char *dir, const char *name) {
    if (ferror(f) || fflush(f) || fsync(fileno(f)) || fclose(f)) die("cannot write %s/%s: %s", dir, name, strerror(errno));
}

static void write_config_json(const Model *m, const char *dir) {
    const Config *c = &m->c;
    const char *type, *cls = published_class(c, &type);
    FILE *f = create_file(dir, "config.json");
    fprintf(f, "{\n");
    if (cls) fprintf(f, "  \"architectures\": [\"%s\"],\n", cls);
    fprintf(f, "  \"model_type\": \"%s\",\n", type);
    config_write_arch(f, c);
    if (cls) fprintf(f, "  \"num_key_value_heads\": %lld,\n", (long long)c->H);
    fprintf(f, "  \"hidden_act\": \"silu\",\n  \"attention_bias\": false,\n  \"attention_dropout\": 0.0,\n"
               "  \"tie_word_embeddings\": false,\n  \"max_position_embeddings\": %lld,\n", (long long)max64(c->T, 4096));
    if (!cls) fprintf(f, "  \"hyscale_model_type\": \"%s\",\n", c->model_type);
    fprintf(f, "  \"rope_theta\": %.17g,\n  \"rope_parameters\": {\"rope_type\": \"%s\", \"rope_theta\": %.17g", c->rope_theta, c->rope_type, c->rope_theta);
    if (!strcmp(c->rope_type, "yarn"))
        fprintf(f, ", \"factor\": %.17g, \"original_max_position_embeddings\": %lld, \"beta_fast\": %.17g, \"beta_slow\": %.17g, \"mscale\": %.17g, \"mscale_all_dim\": %.17g",
                c->rope_factor, (long long)c->rope_original, c->rope_beta_fast, c->rope_beta_slow, c->rope_mscale, c->rope_mscale_all);
    fprintf(f, "},\n  \"mlp_layer_types\": [");
    for (int64_t l = 0; l < c->L; l++) fprintf(f, "%s\"dense\"", l ? ", " : "");
    fprintf(f, "],\n  \"first_k_dense_replace\": %lld,\n  \"moe_layer_freq\": 1,\n", (long long)c->L);
    if (!strcmp(type, "glm_moe_dsa")) {
        fprintf(f, "  \"indexer_types\": [");
        for (int64_t l = 0; l < c->L; l++) fprintf(f, "%s\"%s\"", l ? ", " : "", layer_letter(c, l) == 'S' ? "shared" : "full");
        fprintf(f, "],\n");
    }
    if (m->eot >= 0) fprintf(f, "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d,\n", m->eot, m->eot);
    fprintf(f, "  \"pad_token_id\": null,\n  \"dtype\": \"%s\"\n}\n", sizeof(real) == 4 ? "float32" : "float64");
    finish_file(f, dir, "config.json");
}

// tokenizer.json for bytes: a BPE without merges over GPT-2's printable alphabet, so that id = byte value.
static void write_tokenizer_json(const char *dir) {
    FILE *f = create_file(dir, "tokenizer.json");
    fprintf(f, "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [{\"id\": 256, \"content\": \"<|endoftext|>\", "
               "\"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": true}], \"normalizer\": null, "
               "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false}, "
               "\"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false}, "
               "\"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, "
               "\"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": false, \"vocab\": {");
    for (int b = 0, other = 256; b < 256; b++) {
        int printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        fprintf(f, "%s\"\\u%04x\": %d", b ? ", " : "", printable ? b : other, b);
        other += !printable;
    }
    fprintf(f, "}, \"merges\": []}}\n");
    finish_file(f, dir, "tokenizer.json");
    f = create_file(dir, "tokenizer_config.json");
    fprintf(f, "{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"bos_token\": \"<|endoftext|>\", \"eos_token\": \"<|endoftext|>\", \"clean_up_tokenization_spaces\": false}\n");
    finish_file(f, dir, "tokenizer_config.json");
}

// Remove a checkpoint folder. state.json goes first: without it the rest is not taken for a checkpoint.
static void remove_checkpoint(const char *dir) {
    char path[4096];
    snprintf(path, sizeof path, "%s/state.json", dir);
    unlink(path);
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        unlink(path);
    }
    if (d) closedir(d);
    rmdir(dir);
}

// Steps of the checkpoints in --out, largest first. Returns how many (at most max).
static int list_checkpoints(const char *out, int64_t *steps, int max) {
    int n = 0;
    DIR *d = opendir(out);
    for (struct dirent *e; d && (e = readdir(d));) {
        long long step;
        char extra;
        if (sscanf(e->d_name, "step_%lld%c", &step, &extra) != 1 || n == max) continue;
        int i = n++;
        for (; i > 0 && steps[i - 1] < step; i--) steps[i] = steps[i - 1];
        steps[i] = step;
    }
    if (d) closedir(d);
    return n;
}

static void sync_folder(const char *path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fsync(fd)) die("cannot flush folder %s: %s", path, strerror(errno));
    close(fd);
}

static void make_folder(const char *path) {
    if (mkdir(path, 0777) && errno != EEXIST) die("cannot make folder %s: %s", path, strerror(errno));
}

// 64-bit FNV-1a of a text.
static uint64_t text_hash(const char *s, size_t n) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3ull;
    return h;
}

// Remove what saves of processes that are gone have left unfinished.
static void remove_unfinished(const char *out) {
    DIR *d = opendir(out);
    for (struct dirent *e; d && (e = readdir(d));) {
        long long step;
        int pid;
        char path[1024];
        if (sscanf(e->d_name, "step_%lld.tmp.%d", &step, &pid) != 2 || pid == (int)getpid() || kill(pid, 0) == 0 || errno != ESRCH) continue;
        snprintf(path, sizeof path, "%s/%s", out, e->d_name);
        remove_checkpoint(path);
    }
    if (d) closedir(d);
}

// Write the checkpoint of a finished step; keep the newest c->keep.
static void checkpoint_save(const Model *m, int64_t step, int64_t rows_seen) {
    const Config *c = &m->c;
    char dir[600], tmp[700], path[2048], err[4096], value[300];
    const char *dtype = sizeof(real) == 4 ? "F32" : "F64";
    const char *files[] = {"model.safetensors", "optimizer-00000-of-00001.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"};
    snprintf(dir, sizeof dir, "%s/step_%06lld", c->out, (long long)step);
    snprintf(tmp, sizeof tmp, "%s.tmp.%d", dir, (int)getpid());
    remove_unfinished(c->out);
    make_folder(tmp);
    StOut *t = (StOut *)xalloc((size_t)m->n_tensors * sizeof *t);
    for (int i = 0; i < m->n_tensors; i++) {
        const Tensor *s = &m->tensors[i];
        t[i].name = s->name;
        t[i].dtype = dtype;
        t[i].ndim = s->ndim;
        t[i].shape[0] = s->ndim == 2 ? s->saved_rows : s->cols;
        t[i].shape[1] = s->cols;
        t[i].data = param(m, i);
    }
    snprintf(path, sizeof path, "%s/%s", tmp, files[0]);
    if (st_write(path, t, m->n_tensors, NULL, 0, err, sizeof err)) die("%s", err);
    for (int i = 0; i < 2; i++) {
        t[i].name = i ? "v" : "m";
        t[i].dtype = dtype;
        t[i].ndim = 1;
        t[i].shape[0] = m->n_params;
        t[i].data = i ? m->v : m->m;
    }
    snprintf(path, sizeof path, "%s/%s", tmp, files[1]);
    snprintf(value, sizeof value, "0-%lld of %lld", (long long)m->n_params, (long long)m->n_params);
    const char *meta[] = {"flat_range", value};
    if (st_write(path, t, 2, meta, 1, err, sizeof err)) die("%s", err);
    free(t);
    write_config_json(m, tmp);
    int n_files = c->V == 257 ? 5 : 3; // a byte vocabulary has a tokenizer of its own
    if (n_files == 5) write_tokenizer_json(tmp);
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);
    if (!f) die("no memory for state.json");
    fprintf(f, "{\n  \"step\": %lld,\n  \"rows_seen\": %lld,\n  \"options\": {", (long long)step, (long long)rows_seen);
    for (int i = 0; i < N_OPTIONS; i++) {
        fprintf(f, "%s\n    \"%s\": ", i ? "," : "", OPTIONS[i].name);
        json_write_string(f, config_text(c, &OPTIONS[i], value));
    }
    fprintf(f, "\n  },\n  \"files\": {");
    for (int i = 0; i < n_files; i++) {
        int failed = 0;
        struct stat st;
        snprintf(path, sizeof path, "%s/%s", tmp, files[i]);
        uint64_t hash = hash_file(path, err, sizeof err, &failed);
        if (failed || stat(path, &st)) die("cannot read back %s: %s", path, failed ? err : strerror(errno));
        fprintf(f, "%s\n    \"%s\": [\"%lld\", \"%016llx\"]", i ? "," : "", files[i], (long long)st.st_size, (unsigned long long)hash);
    }
    fprintf(f, "\n  },");
    if (fclose(f)) die("no memory for state.json");
    f = create_file(tmp, "state.json");
    fprintf(f, "%s\n  \"seal\": \"%016llx\"\n}\n", text, (unsigned long long)text_hash(text, len));
    finish_file(f, tmp, "state.json");
    free(text);
    sync_folder(tmp);
    if (access(dir, F_OK) == 0) remove_checkpoint(dir); // the same step again, after a resume
    if (rename(tmp, dir)) die("cannot rename %s to %s: %s", tmp, dir, strerror(errno));
    sync_folder(c->out);
    int64_t steps[4096];
    for (int i = (int)c->keep, n = list_checkpoints(c->out, steps, 4096); i < n; i++) {
        snprintf(path, sizeof path, "%s/step_%06lld", c->out, (long long)steps[i]);
        remove_checkpoint(path);
    }
}

// Check a checkpoint folder: state.json readable, every listed file there with its size and checksum. Returns the
// parsed state, or NULL with the reason in err.
static Json *checkpoint_check(const char *dir, char *err, size_t errlen) {
    char path[2048];
    size_t len;
    snprintf(path, sizeof path, "%s/state.json", dir);
    char *text = file_read_all(path, &len, err, errlen);
    if (!text) return NULL;
    char *seal = strstr(text, "\n  \"seal\": "), expected[64] = "", reason[300];
    if (seal) snprintf(expected, sizeof expected, "\n  \"seal\": \"%016llx\"\n}\n", (unsigned long long)text_hash(text, (size_t)(seal - text)));
    if (!seal || strcmp(seal, expected)) { // state.json guards the others, so it guards itself as well
        snprintf(err, errlen, "%s: damaged: expected a last member \"seal\" with the checksum of what stands before it", path);
        free(text);
        return NULL;
    }
    Json *state = json_parse(text, len, reason, sizeof reason);
    if (!state) snprintf(err, errlen, "%s: %s", path, reason);
    free(text);
    const Json *files = state ? json_get(state, "files") : NULL;
    if (!files || files->type != JSON_OBJECT || !json_get(state, "step") || !json_get(state, "rows_seen") || !json_get(state, "options")) {
        if (state) snprintf(err, errlen, "%s: expected the members step, rows_seen, options and files", path);
        json_free(state);
        return NULL;
    }
    for (int i = 0; i < files->n; i++) {
        const Json *f = &files->items[i];
        int failed = 0;
        struct stat st;
        char expect[64], found[64];
        snprintf(path, sizeof path, "%s/%s", dir, files->keys[i]);
        uint64_t hash = hash_file(path, err, errlen, &failed);
        if (!failed && stat(path, &st)) failed = 1;
        if (!failed && (f->type != JSON_ARRAY || f->n != 2 || !f->items[0].str || !f->items[1].str)) failed = 1;
        if (!failed) {
            snprintf(expect, sizeof expect, "%.20s bytes, %.20s", f->items[0].str, f->items[1].str);
            snprintf(found, sizeof found, "%lld bytes, %016llx", (long long)st.st_size, (unsigned long long)hash);
            if (strcmp(expect, found)) snprintf(err, errlen, "%s: damaged: state.json expects %s, found %s", path, expect, found);
            failed = strcmp(expect, found);
        }
        if (failed) { json_free(state); return NULL; }
    }
    return state;
}

// Read the parameters from a model.safetensors. Every tensor of the table must be there with its shape.
static void load_params(Model *m, const char *dir) {
    char path[2048], err[4096];
    StFile f;
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (st_open(&f, path, err, sizeof err)) die("%s", err);
    for (int i = 0; i < m->n_tensors; i++) {
        const Tensor *t = &m->tensors[i];
        const StTensor *s = st_find(&f, t->name);
        if (!s) die("%s: no tensor %s", path, t->name);
        if (s->ndim != t->ndim || s->shape[0] != (t->ndim == 2 ? t->saved_rows : t->cols) || (t->ndim == 2 && s->shape[1] != t->cols))
            die("%s: %s: expected shape [%lld, %lld], found %d dimensions [%lld, %lld]", path, t->name, (long long)t->saved_rows, (long long)t->cols,
                s->ndim, (long long)s->shape[0], (long long)(s->ndim > 1 ? s->shape[1] : 0));
        real *p = param(m, i);
        for (int64_t j = 0; j < st_count(s); j++) p[j] = (real)st_get(&f, s, j);
    }
    st_close(&f);
}

// Load the model, the moments and the cursor from a checkpoint. The model's options must agree with the checkpoint's.
static void checkpoint_load(Model *m, const char *dir, const Json *state, int64_t *step, int64_t *rows_seen) {
    char path[2048], err[4096], value[300];
    const Json *options = json_get(state, "options");
    for (int i = 0; i < N_OPTIONS; i++) {
        const Json *o = json_get(options, OPTIONS[i].name);
        const char *ours = config_text(&m->c, &OPTIONS[i], value);
        if (!o || !o->str || !strcmp(o->str, ours) || OPTIONS[i].flags & PATH) continue;
        if (OPTIONS[i].flags & ARCH) die("--resume %s: --%s is %s there, but %s here", dir, OPTIONS[i].name, o->str, ours);
        printf("resume: --%s changes from %s to %s\n", OPTIONS[i].name, o->str, ours);
    }
    load_params(m, dir);
    StFile f;
    snprintf(path, sizeof path, "%s/optimizer-00000-of-00001.safetensors", dir);
    if (st_open(&f, path, err, sizeof err)) die("%s", err);
    for (int i = 0; i < 2; i++) {
        const StTensor *t = st_find(&f, i ? "v" : "m");
        if (!t || st_count(t) != m->n_params) die("%s: expected a tensor %s of %lld elements", path, i ? "v" : "m", (long long)m->n_params);
        for (int64_t j = 0; j < m->n_params; j++) (i ? m->v : m->m)[j] = (real)st_get(&f, t, j);
    }
    st_close(&f);
    *step = (int64_t)json_get(state, "step")->num;
    *rows_seen = (int64_t)json_get(state, "rows_seen")->num;
}

// Act on --resume. auto: the newest checkpoint that is whole; damaged ones are named and passed over. Returns 1
// when something was loaded.
static int checkpoint_resume(Model *m, int64_t *step, int64_t *rows_seen) {
    const Config *c = &m->c;
    char dir[600], err[4096];
    if (!c->resume[0]) return 0;
    if (strcmp(c->resume, "auto")) {
        Json *state = checkpoint_check(c->resume, err, sizeof err);
        if (!state) die("--resume: %s", err);
        checkpoint_load(m, c->resume, state, step, rows_seen);
        json_free(state);
        printf("resumed from %s\n", c->resume);
        return 1;
    }
    int64_t steps[4096];
    int n = list_checkpoints(c->out, steps, 4096);
    for (int i = 0; i < n; i++) {
        snprintf(dir, sizeof dir, "%s/step_%06lld", c->out, (long long)steps[i]);
        Json *state = checkpoint_check(dir, err, sizeof err);
        if (!state) { printf("resume: passing over %s\n", err); continue; }
        checkpoint_load(m, dir, state, step, rows_seen);
        json_free(state);
        printf("resumed from %s\n", dir);
        return 1;
    }
    printf("resume: no whole checkpoint in %s, starting from the beginning\n", c->out);
    return 0;
}

// ----------------------------------------------------------------------------
// 14. Generation

// qsort order: largest key first.
static int compare_keys(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

// Draw a token from logits [V]: temperature, the top_k likeliest, the likeliest of total probability top_p.
static int sample_token(const Config *c, real *logits, uint64_t position) {
    int64_t V = c->V, n = 0;
    if (c->temperature == 0) {
        int64_t best = 0;
        for (int64_t v = 1; v < V; v++) best = logits[v] > logits[best] ? v : best;
        return (int)best;
    }
    uint64_t *keys = (uint64_t *)xalloc((size_t)V * sizeof *keys); // the order of selection serves here too
    for (int64_t v = 0; v < V; v++) keys[v] = order_key((float)logits[v], v);
    int64_t k = c->top_k ? min64(c->top_k, V) : V;
    if (k < V) keep_largest(keys, V, k);
    qsort(keys, (size_t)k, sizeof *keys, compare_keys);
    double top = (double)logits[key_index(keys[0])], sum = 0, draw;
    double *p = (double *)xalloc((size_t)k * sizeof *p);
    for (int64_t i = 0; i < k; i++) sum += p[i] = exp(((double)logits[key_index(keys[i])] - top) / c->temperature);
    for (double mass = 0; n < k && mass < c->top_p * sum; n++) mass += p[n];
    n = max64(n, 1);
    sum = 0;
    for (int64_t i = 0; i < n; i++) sum += p[i];
    draw = rng_uniform((uint64_t)c->seed, RNG_SAMPLE, position) * sum;
    int64_t i = 0;
    for (; i + 1 < n && draw >= p[i]; i++) draw -= p[i];
    int token = (int)key_index(keys[i]);
    free(keys);
    free(p);
    return token;
}

// A model g of one row of T tokens that shares m's parameters; its buffers are the caches.
static void row_open(Model *g, const Model *m, int64_t T) {
    *g = *m;
    g->layers = (Layer *)xalloc((size_t)m->c.L * sizeof(Layer));
    memcpy(g->layers, m->layers, (size_t)m->c.L * sizeof(Layer));
    memset(&g->arena, 0, sizeof g->arena);
    g->learning = g->fixed_selection = 0;
    g->probe.queries = 0;
    g->all_logits = NULL;
    activations_plan(g, 1, T, 0, 0);
}
static real *row_logits(Model *g) {
    model_forward(g);
    return g->logits + (g->nr - 1) % g->logit_rows * g->Vp; // the last row of the last chunk
}
static void row_close(Model *g) {
    free(g->arena.base);
    free(g->layers);
}

static double peak_memory_mib(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
#ifdef __APPLE__
    return (double)u.ru_maxrss / (1024.0 * 1024.0);
#else
    return (double)u.ru_maxrss / 1024.0;
#endif
}

// Add the rows' results of the last pass to the sums.
static void count_rows(Model *m) {
    for (int64_t i = 0; i < m->N; i++) {
        m->sums.loss += (double)m->row_loss[i];
        m->sums.targets += m->targets[i] >= 0;
        m->sums.hits += m->targets[i] >= 0 && m->row_hit[i];
        m->sums.kl += (double)m->row_kl[i];
    }
    m->sums.kl_rows += m->N * kl_layers(m);
}
// Hand the sums out and start again.
static Stats take_sums(Model *m) {
    Stats s = m->sums;
    memset(&m->sums, 0, sizeof m->sums);
    return s;
}

// What clipping multiplies a gradient of this norm by.
static double clip_scale(const Config *c, double norm) { return c->clip > 0 && norm > c->clip ? c->clip / norm : 1; }

// The end of a step: its sums, both gradient norms, clipping, AdamW. Returns 0 and changes no parameter when a loss or
// gradient is not finite.
static int update(Model *m, int64_t step, double lr, Stats *s, double norm[2]) {
    double scale[2];
    *s = take_sums(m);
    for (int i = 0; i < 2; i++) {
        norm[i] = grad_norm(m, i);
        scale[i] = clip_scale(&m->c, norm[i]);
    }
    if (!isfinite(s->loss) || !isfinite(s->kl) || !isfinite(norm[0]) || !isfinite(norm[1])) return 0;
    adamw_update(m, step, lr, scale);
    return 1;
}

static void zero_grads(Model *m) { memset(m->grads, 0, (size_t)m->n_params * sizeof(real)); }
static void nothing_to_do(Model *m) { (void)m; }

// What computes: the functions above, or the CUDA trainer's. The loop below hands over tokens and targets and reads
// sums back; parameters and moments come to the host only when they are written. A generation runs over
// a model g of one row that shares m's parameters: row_logits() computes its new rows and returns the last one's logits.
typedef struct {
    void (*plan)(Model *m);
    void (*forward)(Model *m), (*backward)(Model *m), (*zero_grads)(Model *m), (*count)(Model *m);
    Stats (*sums)(Model *m);
    int (*update)(Model *m, int64_t step, double lr, Stats *s, double norm[2]);
    void (*to_host)(Model *m), (*from_host)(Model *m); // parameters and moments
    void (*row_open)(Model *g, const Model *m, int64_t T), (*row_close)(Model *g);
    real *(*row_logits)(Model *g);
    double (*memory_mib)(void);
} Engine;
static Engine engine = {plan_only, model_forward, model_backward, zero_grads, count_rows, take_sums, update, nothing_to_do, nothing_to_do,
                        row_open, row_close, row_logits, peak_memory_mib};

// Print the prompt and n tokens after it. The prompt is one forward pass, then each new token is a pass over one row:
// KV rows and index keys of the earlier ones stand in the buffers.
static void generate(const Model *m, const Tokenizer *tok, const char *prompt, int64_t n, FILE *f) {
    size_t room = strlen(prompt) + 1;
    int32_t *tokens = (int32_t *)xalloc(room * sizeof *tokens);
    int64_t n_prompt = tokenizer_encode(tok, prompt, room - 1, tokens, room);
    if (n_prompt < 0) die("--prompt has text that the tokenizer has no token for");
    if (n_prompt == 0) { // an empty prompt is the start of a document
        n_prompt = 1;
        tokens[0] = m->eot >= 0 ? m->eot : 0;
    }
    for (int64_t i = 0; i < n_prompt; i++)
        if (tokens[i] >= m->c.V) die("--prompt: token %d is outside the model's vocabulary of %lld", tokens[i], (long long)m->c.V);
    Model g;
    engine.row_open(&g, m, n_prompt + n);
    memcpy(g.tokens, tokens, (size_t)n_prompt * sizeof *tokens);
    memset(g.targets, 0xff, (size_t)g.N * sizeof *g.targets); // no losses
    char *text = (char *)xalloc(strlen(prompt) + (size_t)n * 260 + 1);
    size_t len = strlen(prompt);
    memcpy(text, prompt, len);
    g.nr = n_prompt;
    for (int64_t i = n_prompt; i < n_prompt + n; i++) {
        int32_t token = g.tokens[i] = sample_token(&g.c, engine.row_logits(&g), (uint64_t)i);
        if (token == g.eot) break;
        const char *s;
        int bytes = tokenizer_decode(tok, token, &s);
        if (bytes > 0) memcpy(text + len, s, (size_t)bytes);
        len += bytes > 0 ? (size_t)bytes : 0;
        g.r0 = i;
        g.nr = 1;
    }
    print_utf8_safe(f, text, len);
    fprintf(f, "\n");
    engine.row_close(&g);
    free(tokens);
    free(text);
}

// ----------------------------------------------------------------------------
// 15. Training loop

static volatile sig_atomic_t stop_requested;
static volatile time_t stop_time;
// The first signal ends the run after the current step. One that comes seconds later does not wait; one that comes at
// once is the same request, sent to the process and to its group.
static void request_stop(int signal_number) {
    if (stop_requested && time(NULL) > stop_time + 1) _exit(128 + signal_number);
    if (!stop_requested) stop_time = time(NULL);
    stop_requested = signal_number;
}

// Mean validation loss over the first batches (0: all) of B rows; rows beyond the end count for nothing.
static Stats evaluate(Model *m, const Loader *val, int64_t batches) {
    int64_t all = (val->n_rows + m->B - 1) / m->B;
    batches = batches ? min64(batches, all) : all;
    m->learning = 0;
    memset(&m->probe, 0, sizeof m->probe);
    m->probe.queries = m->c.probe;
    for (int64_t j = 0; j < batches; j++) {
        for (int64_t b = 0; b < m->B; b++) {
            loader_row(val, j * m->B + b, m->tokens + b * m->T, m->targets + b * m->T);
            if (j * m->B + b >= val->n_rows) memset(m->targets + b * m->T, 0xff, (size_t)m->T * sizeof *m->targets);
        }
        engine.forward(m);
        m->probe.queries = 0; // the first batch serves the probe
        engine.count(m);
    }
    return engine.sums(m);
}

// Floating-point operations of one training step: the model, and apart from it what the indexer adds (scan and KL).
static void step_flops(const Model *m, double *model, double *index) {
    const Config *c = &m->c;
    double tokens = (double)(m->N * c->accum), weights = 0, rows = (double)(m->B * c->accum);
    *index = 0;
    for (int i = 0; i < m->n_tensors; i++) {
        const Tensor *t = &m->tensors[i];
        if (t->ndim != 2 || i == m->embed) continue;
        if (t->index) *index += 4 * tokens * (double)t->size; // no gradient to its inputs
        else weights += (double)t->size;
    }
    *model = 6 * tokens * weights;
    for (int64_t j = 0; j < c->L; j++) {
        const Layer *l = &m->layers[j];
        double seen = 0, chosen = 0, pairs = 0, H = (double)c->H, dots = 2 * (double)(c->HI * c->DI);
        for (int64_t t = 0; t < m->T; t++) { // candidates seen and chosen, rows attended to, of one document as long as the row
            int64_t cand = l->r ? (t + 1) / l->r : 0, take = attends_to_all(m, l) ? cand : min64(cand, c->topk);
            seen += (double)cand;
            chosen += (double)take;
            pairs += (double)(take * (l->letter == 'Q' ? l->r : 1) + (is_v4(l->letter) ? min64(t + 1, c->window) : l->letter == 'Q' ? (t + 1) % l->r : 0));
        }
        int by_head = l->letter == 'F'; // dense attention is cheaper with keys and values of each head
        *model += 3 * rows * pairs * 2 * H * (double)(by_head ? c->nope + c->rope + c->v_dim : l->Dk + l->Dv); // backward: twice the forward
        if (is_sparse(l->letter) && !m->dense) *index += rows * seen * dots;           // the scan
        if (kl_teachers(m, l) && c->kl_coef > 0) *index += rows * chosen * dots * 3;   // scores of the support, dq, dk
    }
}

// The rungs of the held-out book (nats a byte; order-n: interpolated Witten-Bell trained on the five other novels).
typedef struct { const char *name; double nats; } Rung;
static const Rung RUNGS[] = {{"uniform over 256", 5.545}, {"order-0 bytes", 3.069}, {"order-1", 2.451}, {"order-2", 1.978}, {"order-3", 1.630},
                             {"order-4", 1.462}, {"order-5", 1.427}, {"PPMd o16", 1.244}, {"PPMd o8", 1.163}};

static int is_austen(const Config *c) {
    size_t n = strlen(c->val);
    return !strcmp(c->task, "text") && n >= 14 && !strcmp(c->val + n - 14, "persuasion.txt");
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// Median of the last (at most 31) step times: the ETA does not jump with one slow step.
static double median_seconds(const double *ring, int64_t steps_done) {
    double sorted[31];
    int n = (int)min64(steps_done, 31);
    memcpy(sorted, ring, (size_t)n * sizeof(double));
    qsort(sorted, (size_t)n, sizeof(double), compare_doubles);
    return n ? sorted[n / 2] : 0;
}

#ifndef GIT_HASH
#define GIT_HASH "unknown"
#endif

// Append to log.jsonl, or NULL when --out is empty. The first line of a run describes it wholly.
static FILE *log_open(const Model *m, int argc, char **argv, int64_t step) {
    char path[600], value[300];
    if (!m->c.out[0]) return NULL;
    make_folder(m->c.out);
    snprintf(path, sizeof path, "%s/log.jsonl", m->c.out);
    FILE *f = fopen(path, step ? "a" : "w");
    if (!f) die("cannot write %s: %s", path, strerror(errno));
    fprintf(f, "{\"event\": \"%s\", \"step\": %lld, \"time\": %lld, \"git\": \"%s\", \"compiler\": ", step ? "resume" : "start", (long long)step, (long long)time(NULL), GIT_HASH);
    json_write_string(f, __VERSION__);
    fprintf(f, ", \"threads\": %d, \"real\": %d, \"params\": %lld, \"argv\": [", max_threads(), (int)sizeof(real), (long long)m->n_params);
    for (int i = 0; i < argc; i++) {
        if (i) fprintf(f, ", ");
        json_write_string(f, argv[i]);
    }
    fprintf(f, "], \"config\": {");
    for (int i = 0; i < N_OPTIONS; i++) {
        fprintf(f, "%s\"%s\": ", i ? ", " : "", OPTIONS[i].name);
        if (OPTIONS[i].type == 's') json_write_string(f, config_text(&m->c, &OPTIONS[i], value));
        else fprintf(f, "%s", config_text(&m->c, &OPTIONS[i], value));
    }
    fprintf(f, "}}\n");
    fflush(f);
    return f;
}

// A member of a log line; JSON has no infinities and NaNs, they become null.
static void log_number(FILE *f, const char *name, double x) {
    if (isfinite(x)) fprintf(f, ", \"%s\": %.10g", name, x);
    else fprintf(f, ", \"%s\": null", name);
}

// Evaluate, print and log. Returns the mean loss.
static double report_eval(Model *m, const Loader *val, int64_t batches, int64_t step, FILE *log) {
    double t0 = now();
    Stats s = evaluate(m, val, batches);
    const Probe *p = &m->probe;
    double loss = s.loss / (double)max64(1, s.targets), kl = s.kl / (double)max64(1, s.kl_rows), n = (double)max64(1, p->n);
    double accuracy = s.hits / (double)max64(1, s.targets);
    printf("  eval %6lld | loss %.4f | %.3f bits | accuracy %.2f %%", (long long)step, loss, loss * 1.4426950408889634, 100 * accuracy);
    if (kl_layers(m)) printf(" | index KL %.4f", kl);
    if (p->n) printf(" | recall@k %.2f mass@k %.2f (window %.2f, best %.2f)", p->recall / n, p->mass / n, p->window_mass / n, p->oracle_mass / n);
    printf(" | %lld tokens, %.1f s\n", (long long)s.targets, now() - t0);
    fflush(stdout);
    if (log) {
        const char *names[] = {"loss", "accuracy", "kl", "tokens", "recall", "mass", "window_mass", "oracle_mass"};
        double values[] = {loss, accuracy, kl, (double)s.targets, p->recall / n, p->mass / n, p->window_mass / n, p->oracle_mass / n};
        fprintf(log, "{\"event\": \"eval\", \"step\": %lld", (long long)step);
        for (int i = 0; i < (p->n ? 8 : 4); i++) log_number(log, names[i], values[i]);
        fprintf(log, "}\n");
        fflush(log);
    }
    return loss;
}

// The settings that a run, a generation and a dry run share, printed before anything large is allocated.
static void report_start(const Model *m) {
    config_print(&m->c);
    int64_t index = 0;
    for (int i = 0; i < m->n_tensors; i++) index += m->tensors[i].index ? m->tensors[i].size : 0;
    printf("parameters: %lld, of these in indexers %lld\n", (long long)m->n_params, (long long)index);
    printf("arithmetic: %s, %d threads, matrix product: %s\n", sizeof(real) == 4 ? "float" : "double", max_threads(),
#ifdef USE_BLAS
           "cblas"
#else
           "own kernel"
#endif
    );
    plan_print(m);
}

// One optimizer step: gradients over all micro-batches, clipping, AdamW. Losses are means over the targets of the
// whole step (one global count), so the result does not depend on how the step is cut into micro-batches. Returns 0
// and changes no parameter when a loss or gradient is not finite.
static int train_step(Model *m, const Loader *train, int64_t step, int64_t rows_seen, Stats *s, double norm[2], double *lr) {
    const Config *c = &m->c;
    engine.zero_grads(m);
    m->dense = step < c->warmup_dense;
    m->learning = 1;
    int64_t per_row = c->T - (train->copy ? c->T / 2 : 0); // every row of a stream has the same number of targets
    m->loss_scale = 1.0 / (double)(per_row * m->B * c->accum);
    m->kl_scale = c->kl_coef / (double)(m->N * c->accum);
    for (int64_t a = 0; a < c->accum; a++) {
        for (int64_t b = 0; b < m->B; b++) loader_row(train, rows_seen + a * m->B + b, m->tokens + b * m->T, m->targets + b * m->T);
        engine.forward(m);
        engine.backward(m);
        engine.count(m);
    }
    *lr = learning_rate(c, step);
    return engine.update(m, step + 1, *lr, s, norm);
}

// The whole run.
static void train(Model *m, const Loader *train_data, const Loader *val_data, const Tokenizer *tok, int argc, char **argv) {
    const Config *c = &m->c;
    int64_t step = 0, rows_seen = 0, bad = 0, saved = -1, first;
    int resumed = checkpoint_resume(m, &step, &rows_seen);
    if (resumed) engine.from_host(m);
    double start = now(), ring[31], val_loss = NAN, model_flops, index_flops;
    first = step;
    FILE *log = log_open(m, argc, argv, resumed ? step : 0);
    signal(SIGINT, request_stop);
    signal(SIGTERM, request_stop);
    while (step < c->steps && !stop_requested) {
        Stats s;
        double t0 = now(), norm[2], lr;
        int64_t scans = m->index_scans;
        int good = train_step(m, train_data, step, rows_seen, &s, norm, &lr);
        double seconds = now() - t0, loss = s.loss / (double)max64(1, s.targets), kl = s.kl / (double)max64(1, s.kl_rows);
        double tokens = (double)(m->N * c->accum), *slot = &ring[(step - first) % 31];
        *slot = seconds;
        step_flops(m, &model_flops, &index_flops);
        rows_seen += m->B * c->accum;
        step++;
        double eta = median_seconds(ring, step - first) * (double)(c->steps - step);
        printf("step %5lld/%lld%s | loss %.4f | %.3f bits | index KL %.4f | norm %.2f %.2f | lr %.2e | %.0f tok/s | %.0f+%.0f GFLOP/s | %.0f MiB | ETA %.0f s\n",
               (long long)step, (long long)c->steps, m->dense ? " dense" : "", loss, loss * 1.4426950408889634, kl, norm[0], norm[1], lr, tokens / seconds,
               model_flops / seconds * 1e-9, index_flops / seconds * 1e-9, engine.memory_mib(), eta);
        if (log) {
            const char *names[] = {"loss", "kl", "norm", "index_norm", "lr", "seconds", "tokens", "model_flops", "index_flops", "dense", "index_scans", "nan_scores"};
            double values[] = {loss, kl, norm[0], norm[1], lr, seconds, tokens, model_flops, index_flops, (double)m->dense, (double)(m->index_scans - scans), (double)m->nan_scores};
            fprintf(log, "{\"event\": \"step\", \"step\": %lld", (long long)step);
            for (int i = 0; i < 12; i++) log_number(log, names[i], values[i]);
            fprintf(log, "}\n");
            fflush(log);
        }
        if (!good) { // the parameters are those of the step before; the same rows are not tried again
            printf("step %lld: loss or gradient is not finite (loss %g, KL %g, norms %g %g): not applied\n", (long long)step, loss, kl, norm[0], norm[1]);
            if (++bad == 5) die("five steps in a row were not finite: stopped; the last checkpoint in '%s' is from before", c->out);
            continue;
        }
        bad = 0;
        if (m->nan_scores) printf("step %lld: %lld selected index scores are NaN so far: activations are bad\n", (long long)step, (long long)m->nan_scores);
        fflush(stdout);
        if (c->eval_every && step % c->eval_every == 0 && step < c->steps) val_loss = report_eval(m, val_data, c->eval_batches, step, log);
        if (c->sample_every && step % c->sample_every == 0 && !train_data->copy) {
            printf("---\n");
            generate(m, tok, c->prompt, c->sample_tokens, stdout);
            printf("---\n");
        }
        if (c->out[0] && c->save_every && step % c->save_every == 0) {
            engine.to_host(m);
            checkpoint_save(m, saved = step, rows_seen);
        }
    }
    double seconds = now() - start;
    if (stop_requested) printf("signal %d: stopping after step %lld\n", (int)stop_requested, (long long)step);
    else val_loss = report_eval(m, val_data, 0, step, log);
    if (c->out[0] && saved != step && (step > first || !resumed)) {
        engine.to_host(m);
        checkpoint_save(m, step, rows_seen);
    }
    if (log) fclose(log);

    printf("\nsummary\n  %-28s %lld of %lld, %.0f tokens in %.0f s\n", "steps", (long long)step, (long long)c->steps, (double)((step - first) * m->N * c->accum), seconds);
    printf("  %-28s %.4f nats, %.3f bits\n", stop_requested ? "validation loss (last)" : "validation loss (all of it)", val_loss, val_loss * 1.4426950408889634);
    if (is_austen(c) && isfinite(val_loss))
        for (size_t i = 0; i < sizeof RUNGS / sizeof RUNGS[0]; i++)
            printf("  %-28s %.3f nats%s\n", RUNGS[i].name, RUNGS[i].nats, val_loss < RUNGS[i].nats ? "   passed" : "");
    if (c->out[0]) printf("  %-28s %s/log.jsonl, %s/step_%06lld\n  %-28s ./train_cpu --generate %s/step_%06lld --prompt \"...\"\n", "written", c->out, c->out, (long long)step,
                          "print text", c->out, (long long)step);
}

// ----------------------------------------------------------------------------
// 16. Command line

// --generate DIR: the model's sizes come from the folder's config.json.
static void run_generate(Config *c) {
    char path[2048], err[4096];
    size_t len;
    snprintf(path, sizeof path, "%s/config.json", c->generate);
    char *text = file_read_all(path, &len, err, sizeof err);
    if (!text) die("--generate: %s", err);
    Json *j = json_parse(text, len, err, sizeof err);
    if (!j) die("--generate: %s: %s", path, err);
    config_read_arch(c, j, path);
    const Json *eos = json_get(j, "eos_token_id");
    config_check(c);
    if (c->V < 1) die("%s: expected a vocab_size", path);
    Model m;
    Tokenizer tok;
    model_build(&m, c);
    m.eot = eos && eos->type == JSON_NUMBER ? (int)eos->num : -1;
    if (c->tokenizer[0] ? tokenizer_open(&tok, c->tokenizer, err, sizeof err) : tokenizer_bytes(&tok)) die("--tokenizer: %s", err);
    if (!c->tokenizer[0] && c->V != 257) die("--generate: a vocabulary of %lld needs --tokenizer FILE (llm.c tokenizer.bin); without one only bytes (257) can be printed", (long long)c->V);
    model_init_params(&m, 0);
    load_params(&m, c->generate);
    generate(&m, &tok, c->prompt, c->sample_tokens, stdout);
    tokenizer_free(&tok);
    model_free(&m);
    json_free(j);
    free(text);
}

static void finish(Model *m, Loader data[2], Tokenizer *tok) {
    loader_close(&data[0]);
    loader_close(&data[1]);
    tokenizer_free(tok);
    model_free(m);
}

// Everything before the first step, for both programs: options, data, the table of parameters, the plan. Returns 0 when
// the run was one that ends here (--help, --generate, --dry-run).
static int prepare(Config *c, Model *m, Loader data[2], Tokenizer *tok, int argc, char **argv) {
    char err[4096];
    config_parse(c, argc, argv);
#ifdef _OPENMP
    if (c->threads) omp_set_num_threads((int)c->threads);
#endif
    if (c->generate[0]) {
        run_generate(c);
        return 0;
    }
    loader_open(&data[0], c, 0);
    loader_open(&data[1], c, 1);
    if (!c->V) c->V = data[0].vocab;
    if (c->V < data[0].vocab || c->V < data[1].vocab)
        die("--vocab-size %lld is smaller than the data's: %d in --train, %d in --val", (long long)c->V, data[0].vocab, data[1].vocab);
    model_build(m, c);
    m->eot = data[0].eot;
    m->select_seed = (uint64_t)c->seed;
    engine.plan(m);
    report_start(m);
    if (!data[0].copy) printf("data: %lld training tokens (%lld rows), %lld validation tokens\n", (long long)data[0].stream.n_tokens, (long long)data[0].n_rows, (long long)data[1].stream.n_tokens);
    if (c->dry_run) {
        memset(tok, 0, sizeof *tok);
        finish(m, data, tok);
        return 0;
    }
    if (c->tokenizer[0] ? tokenizer_open(tok, c->tokenizer, err, sizeof err) : tokenizer_bytes(tok)) die("--tokenizer: %s", err);
    if (!c->tokenizer[0] && c->V != 257) m->c.sample_every = 0; // nothing could be printed
    model_init_params(m, 1);
    return 1;
}

#ifndef NO_MAIN
int main(int argc, char **argv) {
    Config c;
    Model m;
    Loader data[2];
    Tokenizer tok;
    if (!prepare(&c, &m, data, &tok, argc, argv)) return 0;
    if (c.phases) die("--phases is the CUDA trainer's: it times phases of the device's work");
    if (c.verify) die("--verify is the CUDA trainer's: this program is what it compares with");
    activations_plan(&m, c.B, c.T, 1, 0);
    train(&m, &data[0], &data[1], &tok, argc, argv);
    finish(&m, data, &tok);
    return 0;
}
#endif
