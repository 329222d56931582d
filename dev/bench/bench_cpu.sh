#!/bin/sh
# The CPU measurements: matrix products, a training step beside llm.c's, and sparse against dense attention by length.
#
#   sh dev/bench/bench_cpu.sh [folder, default dev/bench/results-cpu]        from the repository root
#   LLMC=/path/to/llm.c sh dev/bench/bench_cpu.sh                            with llm.c's train_gpt2.c beside ours
#
# Environment: CC, REPS (11, of a matrix product), PAIRS (3), STEPS (12), LLMC_STEPS (6), LENGTHS ("512 1024 2048 4096
# 8192"), CROSS_STEPS (5), TOKENS (8192, of a step in the comparison by length), ONLY (a word of "matmul step cross").
# Every row is a line of JSON with the median under its own name and NAME_min, NAME_max beside it. Measure on a machine
# that does nothing else: OpenMP's threads wait for each other.
set -eu
export LC_ALL=C
out=${1:-dev/bench/results-cpu}
CC=${CC:-cc}
REPS=${REPS:-11} PAIRS=${PAIRS:-3} STEPS=${STEPS:-12} LLMC_STEPS=${LLMC_STEPS:-6} LENGTHS=${LENGTHS:-512 1024 2048 4096 8192}
CROSS_STEPS=${CROSS_STEPS:-5} TOKENS=${TOKENS:-8192} ONLY=${ONLY:-matmul step cross} LLMC=${LLMC:-}
fail() { echo "bench_cpu.sh: $*" >&2; exit 1; }
[ -f train_cpu.c ] && [ -d data/austen ] || fail "run it from the repository root, with data/austen in place"
[ "$STEPS" -gt 2 ] && [ "$CROSS_STEPS" -gt 2 ] && [ "$LLMC_STEPS" -gt 1 ] || fail "STEPS and CROSS_STEPS must be above 2, LLMC_STEPS above 1"
mkdir -p "$out"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM

# --- helpers
has() { case " $ONLY " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
date_utc() { date -u +%Y-%m-%dT%H:%M:%SZ; }
quote() { printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g'; }
# median min max of the numbers on stdin
stats() { sort -g | awk '{ x[NR] = $1 } END { if (!NR) exit 1; m = NR % 2 ? x[(NR + 1) / 2] : (x[NR / 2] + x[NR / 2 + 1]) / 2; printf "%.6g %.6g %.6g\n", m, x[1], x[NR] }'; }
# field NAME FILE: one number of every step line
field() { sed -n '/"event": "step"/s/.*"'"$1"'": \([0-9.e+-]*\).*/\1/p' "$2"; }
calc() { awk "BEGIN { printf \"%.6g\", $1 }"; }
# train ARGS: run the trainer quietly; its log is $tmp/run/log.jsonl
train() {
    rm -rf "$tmp/run"
    command="./train_cpu $* --eval-every 0 --sample-every 0 --probe 0 --warmup-dense 0"
    "$tmp/train_cpu" "$@" --eval-every 0 --sample-every 0 --probe 0 --warmup-dense 0 --val "$tmp/val.txt" --out "$tmp/run" > "$tmp/stdout" 2>&1 || { cat "$tmp/stdout" >&2; fail "$command failed"; }
}

# --- (a) the machine
hash=$(git describe --always --dirty 2>/dev/null || echo unknown)
model=$(lscpu 2>/dev/null | sed -n 's/^Model name: *//p' | head -n 1)
[ -n "$model" ] || model=$(sysctl -n machdep.cpu.brand_string 2>/dev/null || uname -m)
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo unknown)
isa=$(lscpu 2>/dev/null | tr ' ' '\n' | grep -x 'avx512f\|avx2\|fma\|asimd' | tr '\n' ' ' | sed 's/ $//' || true)
compiler=$($CC --version | head -n 1)
load=$(uptime | sed 's/.*average[s]*: *//')
flags="-std=gnu99 -O3 -march=native -fno-math-errno -ffp-contract=fast -fopenmp"
printf '{"bench": "machine", "cpu": "%s", "cores": "%s", "isa": "%s", "threads": "%s", "compiler": "%s", "flags": "%s", "git": "%s", "load": "%s", "command": "lscpu", "date": "%s"}\n' \
    "$(quote "$model")" "$cores" "$isa" "${OMP_NUM_THREADS:-all}" "$(quote "$compiler")" "$flags" "$hash" "$load" "$(date_utc)" | tee "$out/machine.jsonl"

$CC $flags -Wno-unused-function -o "$tmp/train_cpu" train_cpu.c -lm
# The trainer evaluates once at its end, outside the timed steps: a short text keeps that short.
head -c $((TOKENS + 2)) data/austen/persuasion.txt > "$tmp/val.txt"

# --- (b) matrix products
if has matmul; then
    $CC $flags -Wno-unused-function -o "$tmp/bench_matmul" dev/bench/bench_matmul.c -lm
    "$tmp/bench_matmul" "$REPS" > "$tmp/matmul.txt"
    grep '^{' "$tmp/matmul.txt" > "$out/matmul.jsonl"
    grep '^|' "$tmp/matmul.txt" > "$tmp/matmul.md"
    cat "$tmp/matmul.md"
fi

# --- (c) a training step of C = 384, 6 layers, 6 heads, T = 512, B = 8, beside llm.c
if has step; then
    rows=4096 # B * T
    if [ -n "$LLMC" ]; then
        LLMC=$(cd "$LLMC" && pwd) && [ -f "$LLMC/train_gpt2.c" ] || fail "LLMC: no train_gpt2.c in '$LLMC'"
        # Our own driver of llm.c's functions: a model of that size with random parameters, on random tokens.
        cat > "$tmp/driver.c" <<'DRIVER'
#define TESTING // leaves out its main
#include LLMC_SOURCE
#include <stdint.h>
static uint64_t state = 1337;
static unsigned next_random(void) { state = state * 6364136223846793005u + 1442695040888963407u; return (unsigned)(state >> 33); }
static double seconds_now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }
int main(int argc, char **argv) {
    enum { B = 8, T = 512 };
    int steps = argc > 1 ? atoi(argv[1]) : 6;
    static int tokens[B * T], next[B * T];
    GPT2 g;
    memset(&g, 0, sizeof g);
    g.config.max_seq_len = T;
    g.config.vocab_size = 257;
    g.config.padded_vocab_size = 320;
    g.config.num_layers = 6;
    g.config.num_heads = 6;
    g.config.channels = 384;
    fill_in_parameter_sizes(g.param_sizes, g.config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) g.num_parameters += g.param_sizes[i];
    g.params_memory = malloc_and_point_parameters(&g.params, g.param_sizes);
    for (size_t i = 0; i < g.num_parameters; i++) g.params_memory[i] = 0.07f * ((float)(next_random() & 65535) / 65536.0f - 0.5f); // deviation 0.02
    for (size_t i = 0; i < g.param_sizes[2]; i++) g.params.ln1w[i] = g.params.ln2w[i] = 1;
    for (size_t i = 0; i < g.param_sizes[14]; i++) g.params.lnfw[i] = 1;
    g.mean_loss = -1;
    double C = 384, L = 6, pairs = (T + 1) / 2.0; // a token's pairs; per pair and channel 2 products forward, 4 backward
    double weights = 12 * L * C * C + 320 * C, flops = B * T * (6 * weights + L * pairs * 12 * C);
    for (int step = 1; step <= steps; step++) {
        for (int i = 0; i < B * T; i++) { tokens[i] = (int)(next_random() % 257); next[i] = (int)(next_random() % 257); }
        double start = seconds_now();
        gpt2_forward(&g, tokens, next, B, T);
        gpt2_zero_grad(&g);
        gpt2_backward(&g);
        gpt2_update(&g, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, step);
        printf("{\"event\": \"step\", \"step\": %d, \"loss\": %.4f, \"seconds\": %.4f, \"tokens\": %d, \"model_flops\": %.4g, \"params\": %zu}\n",
               step, g.mean_loss, seconds_now() - start, B * T, flops, g.num_parameters);
        fflush(stdout);
    }
    gpt2_free(&g);
    return 0;
}
DRIVER
        llmc_flags="-O3 -march=native -fopenmp -Ofast -DOMP"
        llmc_hash=$(git -C "$LLMC" rev-parse --short HEAD 2>/dev/null || echo unknown)
        $CC $llmc_flags -w "-DLLMC_SOURCE=\"$LLMC/train_gpt2.c\"" -o "$tmp/driver" "$tmp/driver.c" -lm || fail "llm.c's train_gpt2.c does not compile with $CC $llmc_flags"
    else
        echo "LLMC is not set: the row of llm.c is skipped"
    fi
    : > "$out/step.jsonl"
    : > "$tmp/pairs"
    # row PROGRAM LOG SKIP PARAMS COMMAND: the row of one run, printed and kept; its median seconds are left in $median
    row() {
        set -- "$1" "$2" "$3" "$4" "$5" $(field seconds "$2" | tail -n +$(($3 + 1)) | stats)
        median=$6
        flops=$(field model_flops "$2" | tail -n 1)
        printf '{"bench": "step", "program": "%s", "pair": %d, "tok_s": %s, "tok_s_min": %s, "tok_s_max": %s, "seconds": %s, "seconds_min": %s, "seconds_max": %s, "steps_timed": %d, "params": %s, "mflop_per_token": %s, "gflops": %s, "command": "%s", "date": "%s"}\n' \
            "$1" "$pair" "$(calc "$rows / $6")" "$(calc "$rows / $8")" "$(calc "$rows / $7")" "$6" "$7" "$8" "$(($(field seconds "$2" | wc -l) - $3))" "$4" \
            "$(calc "$flops / $rows * 1e-6")" "$(calc "$flops / $6 * 1e-9")" "$(quote "$5")" "$(date_utc)" | tee -a "$out/step.jsonl"
        printf '| %s | %d | %.0f | %.0f .. %.0f | %s | %.2f | %.1f |\n' "$1" "$pair" "$(calc "$rows / $6")" "$(calc "$rows / $8")" "$(calc "$rows / $7")" "$4" \
            "$(calc "$flops / $rows * 1e-6")" "$(calc "$flops / $6 * 1e-9")" >> "$tmp/step.md"
    }
    pair=1
    while [ "$pair" -le "$PAIRS" ]; do
        train --layers F --num-hidden-layers 6 --hidden-size 384 --num-attention-heads 6 --q-lora-rank 192 --kv-lora-rank 128 --qk-rope-head-dim 32 \
            --qk-nope-head-dim 32 --v-head-dim 64 --intermediate-size 1024 --seq-len 512 --batch-size 8 --steps "$STEPS"
        row hyscale.c "$tmp/run/log.jsonl" 2 "$(sed -n 's/.*"params": \([0-9]*\).*/\1/p' "$tmp/run/log.jsonl" | head -n 1)" "$command"
        ours=$median
        if [ -n "$LLMC" ]; then
            "$tmp/driver" "$LLMC_STEPS" > "$tmp/llmc.txt" || fail "the llm.c driver failed"
            row llm.c "$tmp/llmc.txt" 1 "$(sed -n 's/.*"params": \([0-9]*\).*/\1/p' "$tmp/llmc.txt" | head -n 1)" "driver $LLMC_STEPS (llm.c $llmc_hash, $CC $llmc_flags)"
            calc "$median / $ours" >> "$tmp/pairs"
            echo >> "$tmp/pairs"
        fi
        pair=$((pair + 1))
    done
    if [ -n "$LLMC" ]; then
        ratio=$(stats < "$tmp/pairs")
        set -- $ratio
        printf '{"bench": "step_ratio", "what": "tokens/s of hyscale.c over llm.c, pair by pair", "ratio": %s, "ratio_min": %s, "ratio_max": %s, "pairs": %d, "command": "bench_cpu.sh", "date": "%s"}\n' \
            "$1" "$2" "$3" "$PAIRS" "$(date_utc)" | tee -a "$out/step.jsonl"
    fi
fi

# --- (d) a step against the sequence length, dense (F) and sparse (D), at a constant number of tokens
if has cross; then
    : > "$out/crossover.jsonl"
    for T in $LENGTHS; do
        for pattern in F D; do
            train --layers "$pattern" --index-topk 64 --seq-len "$T" --batch-size $((TOKENS / T)) --steps "$CROSS_STEPS"
            set -- $(field seconds "$tmp/run/log.jsonl" | tail -n +3 | stats)
            printf '{"bench": "crossover", "pattern": "%s", "T": %d, "B": %d, "topk": 64, "seconds": %s, "seconds_min": %s, "seconds_max": %s, "tok_s": %s, "model_flops": %s, "index_flops": %s, "steps_timed": %d, "command": "%s", "date": "%s"}\n' \
                "$pattern" "$T" $((TOKENS / T)) "$1" "$2" "$3" "$(calc "$TOKENS / $1")" "$(field model_flops "$tmp/run/log.jsonl" | tail -n 1)" \
                "$(field index_flops "$tmp/run/log.jsonl" | tail -n 1)" $((CROSS_STEPS - 2)) "$(quote "$command")" "$(date_utc)" | tee -a "$out/crossover.jsonl"
            echo "$T $pattern $1 $2 $3" >> "$tmp/cross"
        done
    done
    # Where the two lines cross: log(F/D) interpolated over log T, between the first neighbours of different sign.
    crossover=$(awk '{ s[$1, $2] = $3; if ($2 == "D") t[++n] = $1 }
        END {
            for (i = 1; i <= n; i++) {
                d[i] = log(s[t[i], "F"] / s[t[i], "D"])
                if (i > 1 && !found && d[i - 1] < 0 && d[i] >= 0) {
                    found = exp(log(t[i - 1]) + (log(t[i]) - log(t[i - 1])) * d[i - 1] / (d[i - 1] - d[i]))
                    printf "sparse (D) is the cheaper step from T = %.0f on (interpolated between %d and %d)", found, t[i - 1], t[i]
                }
            }
            if (!found) printf "no crossing between T = %d and %d: %s is the cheaper step at both ends", t[1], t[n], (d[1] >= 0 && d[n] >= 0 ? "sparse (D)" : d[1] < 0 && d[n] < 0 ? "dense (F)" : "neither")
        }' "$tmp/cross")
    echo "$crossover"
    printf '{"bench": "crossover_point", "text": "%s", "command": "bench_cpu.sh", "date": "%s"}\n' "$crossover" "$(date_utc)" >> "$out/crossover.jsonl"
    if command -v python3 > /dev/null; then
        python3 dev/eval/plot.py lines "$out/crossover.svg" "$out/crossover.jsonl" --x T --y seconds --by pattern --logx --logy \
            --title "CPU: a training step of $TOKENS tokens, dense (F) and sparse (D, k = 64)"
    else
        echo "python3 not found: crossover.svg is skipped"
    fi
fi

# --- the summary
{
    echo "# CPU measurements"
    echo
    echo "$model, $cores cores (${isa:-no vector flags known}), threads: ${OMP_NUM_THREADS:-all}. $compiler, \`$flags\`. Version $hash, $(date_utc)."
    echo "Load before the start: $load. Written by \`dev/bench/bench_cpu.sh\`; the rows are in the .jsonl files beside this one."
    if has matmul; then
        printf '\n## Matrix products\n\nfloat, median of %s repetitions of about 50 ms. NT, NN, TN: which operand is transposed.\n\n' "$REPS"
        cat "$tmp/matmul.md"
    fi
    if has step; then
        printf '\n## A training step\n\n384 channels, 6 layers, 6 heads, T = 512, B = 8, bytes (V = 257), dense attention. Median of the steps after the first 2 (llm.c: the first).\n\n'
        echo '| program | pair | tokens/s, median | min .. max | parameters | MFLOP a token | GFLOP/s |'
        echo '|---|---:|---:|---:|---:|---:|---:|'
        cat "$tmp/step.md"
        if [ -n "$LLMC" ]; then
            echo "$ratio" | awk '{ printf "\nTokens/s of hyscale.c over llm.c, pair by pair: median %.2f, %.2f .. %.2f.\n", $1, $2, $3 }'
            cat <<'NOTE'

The models differ: llm.c's `train_gpt2.c` is GPT-2 (multi-head attention, a GELU MLP of 4C, biases, learned positions,
tied classifier); ours is latent attention through a shared KV row of 128 + 32 with a SwiGLU MLP of 1024. Parameters and
FLOPs of each are in the table; ours count the scores that the backward pass computes again. Part of llm.c's time is in
loops written for clarity: its attention backward runs on one thread and goes through a softmax Jacobian.
NOTE
        else
            printf '\nThe row of llm.c was skipped: LLMC (a checkout of karpathy/llm.c) was not set.\n'
        fi
    fi
    if has cross; then
        printf '\n## Dense and sparse attention by length\n\nPreset tiny, %s tokens a step, k = 64, no dense warm-up; seconds a step, median of the steps after the first 2.\n\n' "$TOKENS"
        echo '| T | dense F | min .. max | sparse D | min .. max | F / D |'
        echo '|---:|---:|---:|---:|---:|---:|'
        awk '{ m[$2] = $3; r[$2] = sprintf("%.3f .. %.3f", $4, $5) } $2 == "D" { printf "| %d | %.3f | %s | %.3f | %s | %.2f |\n", $1, m["F"], r["F"], m["D"], r["D"], m["F"] / m["D"] }' "$tmp/cross"
        printf '\n%s.\n' "$crossover"
        [ -f "$out/crossover.svg" ] && printf '\n![time of a step against the sequence length](crossover.svg)\n'
    fi
} > "$out/RESULTS.md"
echo "written: $out/RESULTS.md"
