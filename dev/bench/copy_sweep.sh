#!/bin/sh
# Where the defaults of --warmup-dense and --index-lr-mult come from: the copy task (two layers, T=256, k=16, 64 symbols)
# with and without a dense start, with two learning rates of the indexer, and the two controls. Run from the repository
# root: sh dev/bench/copy_sweep.sh [OUT.jsonl]   (about ten minutes on two cores; one JSON line an arm)
set -eu
out=${1:-/dev/stdout}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
: >"$tmp/table"
for arm in "indexer 250 5" "indexer 250 1" "indexer 0 5" "indexer 0 1" "window 0 1" "random 0 1"; do
    set -- $arm
    for seed in 1 2 3; do
        command="./train_cpu --preset copy --selector $1 --warmup-dense $2 --index-lr-mult $3 --seed $seed"
        $command --out "$tmp/run" --eval-every 0 >/dev/null
        result=$(grep '"eval"' "$tmp/run/log.jsonl" | tail -n 1 | sed 's/.*\("loss": [^,]*, "accuracy": [^,]*\).*/\1/')
        [ -n "$result" ] || { echo "copy_sweep: no final evaluation from: $command" >&2; exit 1; } # stopped by a signal, say
        echo "{\"bench\": \"copy\", \"selector\": \"$1\", \"warmup_dense\": $2, \"index_lr_mult\": $3, \"seed\": $seed, $result, \"command\": \"$command\", \"date\": \"$(date -u +%FT%TZ)\"}" >>"$tmp/table"
    done
done
cat "$tmp/table" >"$out"
