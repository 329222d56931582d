#!/bin/sh
# The trainings that prove it learns (make test-long; a quarter of an hour on two cores). Called with TRAINER and BUILD set.
#  - the copy task: a second half that repeats the first can only be predicted by looking T/2 tokens back. The learned
#    selection must reach 99 % accuracy; a window of the same k stays at ln 64 = 4.159; a random one stays far away.
#  - the presets in the published proportions on Austen, a few hundred steps each: below the order-2 rung.
set -u
out=$BUILD/long
mkdir -p "$out"
passed=0
failed=0

# value FILE FIELD: a number of the last evaluation in a log
value() { grep '"eval"' "$1/log.jsonl" | tail -n 1 | sed "s/.*\"$2\": \([-0-9.e]*\).*/\1/"; }

# expect NAME VALUE OPERATOR BOUND
expect() {
    if awk "BEGIN { exit !($2 $3 $4) }"; then
        echo "ok   $1: $2 $3 $4"
        passed=$((passed + 1))
    else
        echo "FAIL $1: expected $3 $4, found $2"
        failed=$((failed + 1))
    fi
}

train() {
    name=$1
    shift
    started=$(date +%s)
    "$TRAINER" "$@" --out "$out/$name" --sample-every 0 >"$out/$name.log" 2>&1 || { echo "FAIL $name: $(tail -n 1 "$out/$name.log")"; failed=$((failed + 1)); }
    echo "# $name: $(($(date +%s) - started)) s"
}

train learned --preset copy
expect "copy task, learned selection: accuracy" "$(value "$out/learned" accuracy)" '>=' 0.99
expect "copy task, learned selection: loss" "$(value "$out/learned" loss)" '<=' 0.05
train window --preset copy --selector window --warmup-dense 0
expect "copy task, window: loss above ln 64 - 0.01" "$(value "$out/window" loss)" '>=' 4.149
train random --preset copy --selector random --warmup-dense 0
expect "copy task, random selection: loss" "$(value "$out/random" loss)" '>=' 1
for preset in tiny glm v4flash qsa; do
    train $preset --preset $preset --steps 400
    expect "$preset on Austen after 400 steps: below order-2" "$(value "$out/$preset" loss)" '<' 1.978
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
