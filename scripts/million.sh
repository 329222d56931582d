#!/bin/sh
# A million tokens on one GPU: a GPT-2-sized model (preset d12) at T = 1,048,576, patterns D and DSSS, HyTopK with selection replay beside the
# baseline (a table of scores, selected again in the recomputation). Stored selections are packed by Elias-Fano, which keeps the run under 100 GiB; a few minutes.
#
#   sh scripts/million.sh [FILE]             results: dev/bench/results-gpu/million.jsonl, and a table on the screen
#   OPTIONS="--train TEXT"                   another text than the novels of data/austen (each row takes 1,048,577 tokens)
#   PATTERNS="D DSSS" ARMS="hytopk:1 table:0" STEPS=2   as in dev/bench/bench_step.sh, which does the work
set -u
FILE=${1:-dev/bench/results-gpu/million.jsonl}
NEW=${TMPDIR:-/tmp}/million.$$
trap 'rm -f "$NEW"' EXIT
PRESETS=d12 LENGTHS=1048576 PATTERNS=${PATTERNS:-"D DSSS"} ARMS=${ARMS:-"hytopk:1 table:0"} STEPS=${STEPS:-2} OPTIONS="--replay-store ef ${OPTIONS:-}" sh "$(dirname "$0")/../dev/bench/bench_step.sh" "$NEW" >/dev/null
status=$?
[ -s "$NEW" ] || exit 1
mkdir -p "$(dirname "$FILE")"
cat "$NEW" >>"$FILE"
awk '
    function text(key,  s) { s = $0; if (!sub(".*\"" key "\":\"", "", s)) return "-"; sub("\".*", "", s); return s }
    function number(key,  s) { s = $0; if (!sub(".*\"" key "\":", "", s)) return "-"; sub("[,}].*", "", s); return s }
    BEGIN { printf "%-6s %-8s %-6s %10s %10s %10s %10s %10s %10s %10s %8s\n", "layers", "top-k", "replay", "s/step", "tokens/s", "select s", "forward s", "backward s", "KL s", "MiB", "speed-up" }
    /"failed"/ { printf "%-6s %-8s %-6s %s\n", text("layers"), text("topk"), number("replay"), text("failed"); next }
    {
        key = text("layers")
        if (!(key in base)) base[key] = number("seconds")
        printf "%-6s %-8s %-6s %10.2f %10d %10.2f %10.2f %10.2f %10.2f %10d %8.2f\n", key, text("topk"), number("replay"), number("seconds"), number("tokens_per_s"),
            (number("selection: thresholds") + number("selection: scores") + number("selection: top-k")) / 1000, number("attention forward") / 1000, number("attention backward") / 1000, number("index KL") / 1000,
            number("memory_mib"), number("seconds") / base[key]
    }' "$NEW"
exit $status
