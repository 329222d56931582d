#!/bin/sh
# Whole training steps on one GPU: length, pattern, preset, and the four arms (--topk hytopk|table, --replay 1|0), one JSON object a line.
#
#   sh dev/bench/bench_step.sh [FILE]        default: dev/bench/results-gpu/step.jsonl
#   PRESETS="d12 d24" PATTERNS="D DSSS WWCHCHCH Q F" LENGTHS="16384 65536 262144" TOKENS=0 ARMS="hytopk:1 table:0" STEPS=3   choose less, or more
#
# TOKENS: tokens of a step, if more than a row (batch size TOKENS / T). A row is one document (--doc-mask 0): every query sees all before it. The last of STEPS steps is reported. seconds: of that step, wall clock;
# ms: its phases, of the device; gflops: model + indexer, as the trainer counts them; selections: a hash of each layer's selection in that
# step, which must be the same in all arms (the program fails when it is not). A run that does not fit is a line with "failed".
set -u
OUT=${1:-dev/bench/results-gpu/step.jsonl}
TRAINER=${TRAINER:-./train_gpt_sparse}
PRESETS=${PRESETS:-"d12 d24"}
PATTERNS=${PATTERNS:-"D DSSS WWCHCHCH Q F"}
LENGTHS=${LENGTHS:-"16384 65536 262144"}
ARMS=${ARMS:-"hytopk:1 hytopk:0 table:1 table:0"}
STEPS=${STEPS:-3}
TOKENS=${TOKENS:-0}
LOG=${TMPDIR:-/tmp}/bench_step.$$
[ -x "$TRAINER" ] || { echo "bench_step: $TRAINER is not there: make train_gpt_sparse" >&2; exit 1; }
mkdir -p "$(dirname "$OUT")"
trap 'rm -f "$LOG"' EXIT
status=0
for preset in $PRESETS; do for layers in $PATTERNS; do for T in $LENGTHS; do
    B=$((TOKENS > T ? TOKENS / T : 1))
    first=
    for arm in $ARMS; do
        case $layers in *[DCQ]*) ;; *) [ -z "$first" ] || continue ;; esac # nothing is selected: one arm is all
        "$TRAINER" --preset "$preset" --layers "$layers" --seq-len "$T" --batch-size "$B" --recompute block --topk "${arm%:*}" --replay "${arm#*:}" --warmup-dense 0 --doc-mask 0 \
            --val data/austen/emma.txt,data/austen/persuasion.txt --eval-every 0 --sample-every 0 --probe 0 --steps "$STEPS" --phases 1 ${OPTIONS:-} --out= >"$LOG" 2>&1
        rc=$?
        line=$(awk -F' [|] ' -v preset="$preset" -v layers="$layers" -v T="$T" -v B="$B" -v topk="${arm%:*}" -v replay="${arm#*:}" -v rc=$rc -v date="$(date +%Y-%m-%d)" '
            /^device: /    { device = $1; sub("device: ", "", device); sub(",.*", "", device) }
            /^hyscale: /   { error = $0; gsub("\"", "", error) }
            /^phases, ms/  { ms = ""; for (i = 2; i <= NF; i++) { v = $i; sub(".* ", "", v); name = $i; sub(" [0-9.]*$", "", name); ms = ms (i > 2 ? "," : "") "\"" name "\":" v } }
            /^selections/  { hash = $0; sub("selections *", "", hash) }
            /^step /       { loss = $2; sub("loss ", "", loss); rate = $7; sub(" .*", "", rate); flops = $8; sub(" .*", "", flops); memory = $9; sub(" .*", "", memory); n++ }
            END {
                printf "{\"program\":\"bench_step\",\"device\":\"%s\",\"date\":\"%s\",\"preset\":\"%s\",\"layers\":\"%s\",\"T\":%d,\"B\":%d,\"topk\":\"%s\",\"replay\":%d", device, date, preset, layers, T, B, topk, replay
                if (rc || !n) printf ",\"failed\":\"%s\"}\n", error
                else printf ",\"steps\":%d,\"loss\":%s,\"seconds\":%.3f,\"tokens_per_s\":%s,\"gpu_hours_per_1e9_tokens\":%.2f,\"gflops\":\"%s\",\"memory_mib\":%s,\"ms\":{%s},\"selections\":\"%s\"}\n", n, loss, T * B / rate, rate, 1e9 / rate / 3600, flops, memory, ms, hash
            }' "$LOG")
        echo "$line" | tee -a "$OUT"
        hash=${line##*\"selections\":}
        case $line in *'"failed"'*) continue ;; esac
        [ -n "$first" ] || first=$hash
        [ "$hash" = "$first" ] || { echo "bench_step: the arms select differently: $hash here, $first before" >&2; status=1; }
    done
done; done; done
exit $status
