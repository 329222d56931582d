#!/bin/sh
# The command line from outside: what a user types wrong, and what must work. Every bad input must end with exactly one
# line on stderr that says what was expected, a non-zero exit, no signal, and an existing checkpoint left as it was.
# Run from the repository root. TRAINER (default ./train_cpu) is the program. Everything is written to a temporary folder, which is removed at the end.
set -u
TRAINER=${TRAINER:-./train_cpu}
PYTHON=$(command -v python3 || true)
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" # threads that spin between tiny steps are slow where cores are shared
dir=$(mktemp -d "${TMPDIR:-/tmp}/hyscale-cli-XXXXXX") || exit 1
mounted=
cleanup() {
    if [ -n "$mounted" ]; then umount "$dir/small" 2>/dev/null; fi
    chmod -R u+w "$dir" 2>/dev/null
    rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 1' INT TERM
passed=0
failed=0

ok() { passed=$((passed + 1)); echo "ok   $1"; }
fail() { failed=$((failed + 1)); echo "FAIL $1: $2"; }
skip() { echo "skip $1: $2"; }
# check NAME WHY COMMAND...: one check that passes when the command does
check() {
    name=$1 why=$2
    shift 2
    if "$@" >/dev/null 2>&1; then ok "$name"; else fail "$name" "$why"; fi
}

# A model that takes a step in milliseconds.
tiny="--num-hidden-layers 2 --layers DS --hidden-size 24 --num-attention-heads 2 --q-lora-rank 12 --kv-lora-rank 8 --qk-nope-head-dim 4
      --qk-rope-head-dim 4 --v-head-dim 4 --intermediate-size 16 --index-n-heads 2 --index-head-dim 6 --index-topk 8 --seq-len 64
      --batch-size 2 --eval-every 0 --sample-every 0 --warmup 2 --warmup-dense 2 --train $dir/a.txt --val $dir/v.txt"
head -c 6000 data/austen/emma.txt >"$dir/a.txt"
head -c 700 data/austen/persuasion.txt >"$dir/v.txt"

# train OUT [OPTION...]: a tiny run into $dir/OUT, its output in $dir/OUT.log
train() {
    to=$1
    shift
    # shellcheck disable=SC2086  # $tiny is a list of words
    "$TRAINER" $tiny --out "$dir/$to" "$@" >"$dir/$to.log" 2>&1
}

# The state of a folder: names and checksums.
state() { (cd "$1" && find . -type f -exec cksum {} + | sort); }

# A checkpoint that every bad command must leave as it is.
if ! train keep --steps 3; then
    fail "a tiny run" "exit $?: $(tail -n 1 "$dir/keep.log")"
    echo "$passed passed, $failed failed"
    exit 1
fi
ckpt=$dir/keep/step_000003
before=$(state "$dir/keep")

# bad NAME HINT OPTION...: the options must be refused with one line that contains HINT (a basic regular expression).
bad() {
    name=$1 hint=$2
    shift 2
    "$TRAINER" "$@" >"$dir/stdout" 2>"$dir/stderr"
    status=$?
    lines=$(wc -l <"$dir/stderr")
    if [ $status = 0 ]; then
        fail "$name" "accepted"
        before=$(state "$dir/keep")
    elif [ $status -ge 128 ]; then fail "$name" "died of a signal, exit $status: $(head -n 3 "$dir/stderr" | tr '\n' ' ')"
    elif [ "$lines" -ne 1 ]; then fail "$name" "$lines lines on stderr: $(head -n 3 "$dir/stderr" | tr '\n' ' ')"
    elif ! grep -q -e "$hint" "$dir/stderr"; then fail "$name" "expected '$hint', got '$(cat "$dir/stderr")'"
    elif [ "$(state "$dir/keep")" != "$before" ]; then
        fail "$name" "the existing checkpoint or log was changed"
        before=$(state "$dir/keep") # so that the next ones are judged for themselves
    else ok "$name"
    fi
}
# The same with the tiny model and the existing folder as --out: refused before anything is written there.
bad_tiny() {
    n=$1 h=$2
    shift 2
    # shellcheck disable=SC2086
    bad "$n" "$h" $tiny --steps 5 --out "$dir/keep" "$@"
}

# ---- options
bad_tiny "unknown option" "unknown option --no-such; .*--help" --no-such 1
bad_tiny "unknown option with =" "unknown option --no-such" --no-such=1
bad_tiny "an option's beginning is not the option" "unknown option --step" --step 1
bad_tiny "missing value" "--lr needs a value" --lr
bad_tiny "stray argument" "expected an option.*'stray'" stray
bad_tiny "single dash" "expected an option.*'-steps'" -steps 3
bad_tiny "two dashes alone" "unknown option --" -- 3
bad_tiny "value too large" "--beta1 takes a number from 0 to .*'1'" --beta1 1
bad_tiny "value too small" "--batch-size takes a whole number from 1 to .*'0'" --batch-size 0
bad_tiny "negative value" "--steps takes a whole number from 0 .*'-3'" --steps -3
bad_tiny "fraction for a whole number" "--steps takes a whole number.*'2.5'" --steps 2.5
bad_tiny "not a number" "--lr takes a number.*'fast'" --lr fast
bad_tiny "number with a tail" "--steps takes a whole number.*'10k'" --steps 10k
bad_tiny "NaN as a number" "--lr takes a number.*'nan'" --lr nan
bad_tiny "infinity as a number" "--clip takes a number.*'inf'" --clip inf
bad_tiny "overflowing number" "--seed takes a whole number.*'1e999'" --seed 1e999
bad_tiny "empty number" "--lr takes a number.*''" --lr ""
bad_tiny "bad choice" "--schedule takes one of cosine|wsd, got 'linear'" --schedule linear
bad_tiny "beginning of a choice" "--schedule takes one of cosine|wsd, got 'cos'" --schedule cos
bad_tiny "two choices" "--schedule takes one of cosine|wsd" --schedule "cosine|wsd"
bad_tiny "empty choice" "--task takes one of" --task ""
bad_tiny "unknown preset" "--preset takes one of tiny|copy|glm|v4flash|qsa|small|d12|d24|d48, got 'huge'" --preset huge
bad_tiny "too long text" "--prompt takes at most 255 characters" --prompt "$(printf '%0300d' 0)"
bad_tiny "bad store" "--replay-store takes one of int32|u16|ef, got 'bytes'" --replay-store bytes
bad_tiny "offload of nothing" "--replay-offload 1 moves packed selections: .*got none and u16" --replay-offload 1
bad_tiny "offload of int32" "--replay-offload 1 moves packed selections: .*got block and int32" --recompute block --replay-store int32 --replay-offload 1
bad_tiny "offload on the CPU" "--replay-offload 1 is the CUDA trainer's" --recompute block --replay-offload 1
bad_tiny "bad layer letters" "--layers takes a pattern of the letters D, S, F, C, H, W, Q, got 'DX'" --layers DX
bad_tiny "empty layers" "--layers takes a pattern" --layers ""
bad_tiny "S before D" "--layers: layer 0 is S, but no D before it" --layers SD
bad_tiny "S after F only" "--layers: layer 1 is S" --layers FS
bad_tiny "odd rope" "--qk-rope-head-dim must be even, got 3" --qk-rope-head-dim 3
bad_tiny "index head smaller than rope" "--index-head-dim (2) must be at least --qk-rope-head-dim (4)" --index-head-dim 2
bad_tiny "odd row for copy" "--task copy needs an even --seq-len, got 63" --task copy --seq-len 63
bad_tiny "decay longer than the run" "--decay-steps (50) must not exceed --steps (5)" --decay-steps 50

# ---- data
bad_tiny "missing training file" "--train: .*none.txt: expected a file" --train "$dir/none.txt"
bad_tiny "missing validation file" "--val: .*none.txt\|none.txt" --val "$dir/none.txt"
: >"$dir/empty.txt"
bad_tiny "empty training file" "empty.txt: expected text of at least 1 byte" --train "$dir/empty.txt"
bad_tiny "empty validation file" "empty.txt: expected text of at least 1 byte" --val "$dir/empty.txt"
head -c 63 data/austen/emma.txt >"$dir/short.txt" # 64 tokens with the start of document, a row needs 65
bad_tiny "text shorter than a row" "64 tokens, but a row of --seq-len 64 needs 65" --train "$dir/short.txt"
bad_tiny "validation shorter than a row" "--val.*64 tokens, but a row of --seq-len 64 needs 65" --val "$dir/short.txt"
head -c 64 data/austen/emma.txt >"$dir/enough.txt"
# shellcheck disable=SC2086
check "one row is enough" "refused" "$TRAINER" $tiny --train "$dir/enough.txt" --dry-run 1
bad_tiny "training set is the validation set" "at least 1 file left after excluding" --train "$dir/v.txt"
bad_tiny "vocabulary too small" "--vocab-size 100 is smaller than the data's: 257" --vocab-size 100

# le32 N...: numbers as little-endian bytes
le32() { for v; do for s in 0 8 16 24; do printf "\\$(printf '%03o' $((v >> s & 255)))"; done; done; }
# bin FILE MAGIC VERSION COUNT: header of an llm.c shard; then the tokens 0..COUNT-1 modulo 1000, two bytes each
bin() {
    { le32 "$2" "$3" "$4"; head -c 1012 /dev/zero; i=0; while [ $i -lt "$4" ]; do
        v=$((i % 1000))
        printf "\\$(printf '%03o' $((v & 255)))\\$(printf '%03o' $((v >> 8)))"
        i=$((i + 1))
    done; } >"$1"
}
bin "$dir/t.bin" 20240520 1 400
bin "$dir/w.bin" 20240520 1 150
wide="--train $dir/t.bin --val $dir/w.bin"
head -c 1700 "$dir/t.bin" >"$dir/cut.bin"
bad_tiny "truncated .bin" "cut.bin: expected 1824 bytes for 400 tokens, found 1700" --train "$dir/cut.bin"
head -c 100 "$dir/t.bin" >"$dir/head.bin"
bad_tiny ".bin without a whole header" "head.bin: expected a header of 1024 bytes" --train "$dir/head.bin"
bin "$dir/magic.bin" 20240521 1 3
bad_tiny "bad magic .bin" "magic.bin: a token file starts with the int32 magic" --train "$dir/magic.bin"
bin "$dir/version.bin" 20240520 2 3
bad_tiny "bad version .bin" "version.bin: expected version 1" --train "$dir/version.bin"
bad_tiny "mixed kinds" "a.txt: expected uint16 tokens\|t.bin: expected text" --train "$dir/t.bin,$dir/a.txt"
# shellcheck disable=SC2086
bad_tiny "vocabulary smaller than the shard's" "--vocab-size 1000 is smaller than the data's: 50257" $wide --vocab-size 1000
# 60000 is not below 50257; it stands in every row, so whichever row comes first has it
{ le32 20240520 1 65; head -c 1012 /dev/zero; i=0; while [ $i -lt 65 ]; do printf '\140\352'; i=$((i + 1)); done; } >"$dir/id.bin"
# The ids are read with the rows: the log has begun by then, so this one writes to a folder of its own.
# shellcheck disable=SC2086
bad "token id beyond the vocabulary" "id.bin: expected token ids below 50257, found 60000" $tiny --steps 5 --out "$dir/ids" --train "$dir/id.bin" --val "$dir/w.bin"
check "token id beyond the vocabulary: no checkpoint" "one was written" test ! -e "$dir/ids/step_000005"

# ---- resume
bad_tiny "resume of a missing folder" "--resume: .*nowhere/state.json" --resume "$dir/nowhere"
for f in model.safetensors optimizer-00000-of-00001.safetensors config.json tokenizer.json; do
    rm -rf "$dir/bad"
    cp -r "$ckpt" "$dir/bad"
    size=$(wc -c <"$ckpt/$f")
    head -c $((size - 1)) "$ckpt/$f" >"$dir/bad/$f"
    bad_tiny "resume with a cut $f" "--resume: .*bad/$f: damaged: .*$size bytes" --resume "$dir/bad"
    # one byte changed in the middle
    { head -c $((size / 2)) "$ckpt/$f"; printf '\377'; tail -c +$((size / 2 + 2)) "$ckpt/$f"; } >"$dir/bad/$f"
    bad_tiny "resume with a changed $f" "--resume: .*bad/$f: damaged" --resume "$dir/bad"
    rm "$dir/bad/$f"
    bad_tiny "resume without $f" "--resume: .*bad/$f" --resume "$dir/bad"
done
rm -rf "$dir/bad"
cp -r "$ckpt" "$dir/bad"
head -c 300 "$ckpt/state.json" >"$dir/bad/state.json"
bad_tiny "resume with a cut state.json" "--resume: .*state.json" --resume "$dir/bad"
bad_tiny "resume with other layers" "--resume .*--layers is DS there, but D here" --resume "$ckpt" --layers D
bad_tiny "resume with another width" "--resume .*--hidden-size is 24 there, but 32 here" --resume "$ckpt" --hidden-size 32
bad_tiny "resume with another k" "--resume .*--index-topk is 8 there, but 9 here" --resume "$ckpt" --index-topk 9
bad_tiny "resume with other RoPE" "--resume .*--rope-type is default there, but yarn here" --resume "$ckpt" --rope-type yarn
bad_tiny "resume auto with another width" "--hidden-size is 24 there, but 32 here" --resume auto --hidden-size 32

# ---- generate
bad "generate from a missing folder" "--generate: .*nowhere/config.json" --generate "$dir/nowhere"
rm -rf "$dir/gen"
mkdir "$dir/gen"
fresh() { cp "$ckpt"/* "$dir/gen/"; }
fresh
echo '{"hidden_size": 24,' >"$dir/gen/config.json"
bad "generate with a cut config.json" "--generate: .*config.json: " --generate "$dir/gen"
echo '[1, 2]' >"$dir/gen/config.json"
bad "generate with an array as config.json" "config.json" --generate "$dir/gen"
sed 's/"hidden_size": 24/"hidden_size": "wide"/' "$ckpt/config.json" >"$dir/gen/config.json"
bad "generate with a word for a size" "config.json: --hidden-size takes a whole number.*'wide'" --generate "$dir/gen"
sed 's/"hidden_size": 24/"hidden_size": -4/' "$ckpt/config.json" >"$dir/gen/config.json"
bad "generate with a negative size" "config.json: --hidden-size takes a whole number.*'-4'" --generate "$dir/gen"
sed 's/"hidden_size": 24/"hidden_size": [24]/' "$ckpt/config.json" >"$dir/gen/config.json"
bad "generate with an array for a size" "config.json: \"hidden_size\" must be a number or a string" --generate "$dir/gen"
sed 's/"hidden_size": 24/"hidden_size": 32/' "$ckpt/config.json" >"$dir/gen/config.json"
bad "generate with a wrong shape" "model.safetensors: model.embed_tokens.weight: expected shape \[257, 32\], found 2 dimensions \[257, 24\]" --generate "$dir/gen"
sed 's/"intermediate_size": 16/"intermediate_size": 20/' "$ckpt/config.json" >"$dir/gen/config.json"
bad "generate with a wrong number of rows" "gate_proj.weight: expected shape \[20, 24\], found 2 dimensions \[16, 24\]" --generate "$dir/gen"
sed 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' "$ckpt/config.json" >"$dir/gen/config.json"
bad "generate with a missing tensor" "model.safetensors: no tensor model.layers.2" --generate "$dir/gen"
sed 's/"vocab_size": 257/"vocab_size": 0/' "$ckpt/config.json" >"$dir/gen/config.json"
bad "generate without a vocabulary" "config.json: expected a vocab_size" --generate "$dir/gen"
fresh
size=$(wc -c <"$ckpt/model.safetensors")
for n in 0 5 100 $((size - 1)); do
    head -c "$n" "$ckpt/model.safetensors" >"$dir/gen/model.safetensors"
    bad "generate with $n bytes of model.safetensors" "model.safetensors: " --generate "$dir/gen"
done
rm "$dir/gen/model.safetensors"
bad "generate without model.safetensors" "model.safetensors: " --generate "$dir/gen"
fresh
# A tokenizer of one token, 'a', besides the end of text: everything else cannot be encoded.
{ le32 20240328 2 2 1; head -c 1008 /dev/zero; printf '\001a\001e'; } >"$dir/one.tok"
bad "prompt that cannot be encoded" "--prompt has text that the tokenizer has no token for" --generate "$dir/gen" --tokenizer "$dir/one.tok" --prompt "ab"
bad "missing tokenizer" "--tokenizer: .*none.tok" --generate "$dir/gen" --tokenizer "$dir/none.tok"
bad "tokenizer of another format" "--tokenizer: .*a.txt" --generate "$dir/gen" --tokenizer "$dir/a.txt"

# ---- places that cannot be written
# shellcheck disable=SC2086
bad "out below a regular file" "cannot make folder .*a.txt/out" $tiny --steps 2 --out "$dir/a.txt/out"
# shellcheck disable=SC2086
bad "out is a regular file" "cannot write .*a.txt/log.jsonl" $tiny --steps 2 --out "$dir/a.txt"
# shellcheck disable=SC2086
bad "out below a missing folder" "cannot make folder .*nowhere/out" $tiny --steps 2 --out "$dir/nowhere/out"
if [ "$(id -u)" != 0 ]; then
    mkdir "$dir/locked"
    chmod 555 "$dir/locked"
    # shellcheck disable=SC2086
    bad "out may not be written" "cannot make folder .*locked/out" $tiny --steps 2 --out "$dir/locked/out"
else
    skip "out may not be written" "root may write everywhere"
fi
mkdir "$dir/small"
if mount -t tmpfs -o size=160k tmpfs "$dir/small" 2>/dev/null; then
    mounted=1
    # shellcheck disable=SC2086
    bad "disk full" "No space left on device" $tiny --steps 2 --out "$dir/small/out"
    check "disk full: nothing passes for a checkpoint" "a folder step_000002 is there" test ! -e "$dir/small/out/step_000002"
    umount "$dir/small" && mounted=
    # Room for the log, the model and the moments, and two pages: a small file is the one that does not fit.
    pages=2
    for f in "$dir/keep/log.jsonl" "$ckpt/model.safetensors" "$ckpt/optimizer-00000-of-00001.safetensors"; do pages=$((pages + ($(wc -c <"$f") + 4095) / 4096)); done
    mount -t tmpfs -o size=$((4 * pages))k tmpfs "$dir/small" && mounted=1
    # shellcheck disable=SC2086
    bad "disk full at a small file" "cannot write .*json: No space left on device" $tiny --steps 3 --out "$dir/small/out"
    check "disk full at a small file: nothing passes for a checkpoint" "a folder step_000003 is there" test ! -e "$dir/small/out/step_000003"
    umount "$dir/small" && mounted=
else
    skip "disk full" "tmpfs cannot be mounted here"
fi
# A limit on the size of files does the same to one write: the model fits, the moments do not.
if (trap '' XFSZ; ulimit -f 100) 2>/dev/null; then
    (
        trap '' XFSZ
        ulimit -f 100 # 512-byte blocks in POSIX, 1024 in some shells
        train limit --steps 2
    )
    status=$?
    if [ $status -gt 0 ] && [ $status -lt 128 ] && grep -q "^hyscale: .*\(File too large\|limit/step_000002\)" "$dir/limit.log" && [ ! -e "$dir/limit/step_000002" ]; then ok "a write that fails in the middle"
    else fail "a write that fails in the middle" "exit $status, $(tail -n 1 "$dir/limit.log"), step_000002 $(ls -d "$dir/limit/step_000002" 2>&1)"
    fi
else
    skip "a write that fails in the middle" "no ulimit -f"
fi

# ---- help and settings
"$TRAINER" --help >"$dir/help" 2>&1
check "--help exits with 0" "exit not 0" "$TRAINER" --help
check "-h is --help" "exit not 0" "$TRAINER" -h
# Every line "  --name  text [default]": the parser takes the name with its own default, in both forms.
sed -n 's/^  --\([a-z0-9-]*\) .* \[\(.*\)\]$/\1	\2/p' "$dir/help" >"$dir/options"
count=$(wc -l <"$dir/options")
check "--help lists the options with defaults" "only $count" test "$count" -gt 50
check "--help: every option has a default" "$(grep -c '^  --' "$dir/help") lines, $count with a default" test "$(grep -c '^  --' "$dir/help")" = "$count"
"$TRAINER" --dry-run 1 >"$dir/plain" 2>&1
wrong=
tab=$(printf '\t')
while IFS="$tab" read -r name value; do
    "$TRAINER" "--$name" "$value" --dry-run 1 >"$dir/one" 2>&1 && cmp -s "$dir/one" "$dir/plain" &&
        "$TRAINER" "--$name=$value" --dry-run 1 >"$dir/two" 2>&1 && cmp -s "$dir/two" "$dir/plain" || wrong="$wrong $name"
done <"$dir/options"
if [ -z "$wrong" ]; then ok "each of the $count defaults of --help, given with and without '=', prints the same settings as none"; else fail "defaults of --help" "$wrong"; fi
"$TRAINER" --lr 3e-3 --layers=DDS --dry-run 1 >"$dir/one" 2>&1
"$TRAINER" --lr=3e-3 --layers DDS --dry-run 1 >"$dir/two" 2>&1
if cmp -s "$dir/one" "$dir/two" && ! cmp -s "$dir/one" "$dir/plain" && grep -q "| lr  *0.003 " "$dir/one" && grep -q "| layers  *DDS " "$dir/one"; then ok "--opt=value and --opt value agree"
else fail "--opt=value and --opt value agree" "$(diff "$dir/one" "$dir/two" | head -n 3 | tr '\n' ' ')"
fi
for preset in tiny copy d12 d24 d48; do
    check "preset $preset" "refused" "$TRAINER" --preset $preset --dry-run 1
done
"$TRAINER" --steps 7 --preset copy --dry-run 1 >"$dir/one" 2>&1
if grep -q "| steps  *7 " "$dir/one" && grep -q "| task  *copy " "$dir/one"; then ok "an option before the preset wins over it"; else fail "an option before the preset wins over it" "see $(grep steps "$dir/one")"; fi

(cd "$dir" && mkdir dry) # nothing may appear here
train dry/out --dry-run 1 --steps 5
status=$?
if [ $status = 0 ] && grep -q "memory plan" "$dir/dry/out.log" && grep -q "parameters: " "$dir/dry/out.log" && [ "$(find "$dir/dry" | wc -l)" = 2 ]; then ok "--dry-run prints the plan and writes nothing"
else fail "--dry-run" "exit $status, $(find "$dir/dry" | tr '\n' ' ')"
fi

# ---- training
# json_lines FILE: every line is a JSON object
json_lines() {
    "$PYTHON" -c 'import json, sys
def no(x): raise ValueError(x)
for line in open(sys.argv[1], encoding="utf-8"): assert isinstance(json.loads(line, parse_constant=no), dict)' "$1"
}
train whole --steps 6 --save-every 3 --eval-every 2 --eval-batches 2 --probe 4 --sample-every 4 --sample-tokens 8 --prompt 'a "quote" \ and ü'
status=$?
check "a tiny run exits with 0" "exit $status: $(tail -n 1 "$dir/whole.log")" test $status = 0
check "a run prints a line for every step" "see the log" test "$(grep -c '^step  *[1-6]/6' "$dir/whole.log")" = 6
check "a run ends with a summary" "none" grep -q '^summary' "$dir/whole.log"
check "log.jsonl has a start, 6 steps and 3 evaluations" "$(cut -c 1-20 "$dir/whole/log.jsonl" | sort | uniq -c | tr '\n' ' ')" \
    test "$(grep -c '"event": "start"' "$dir/whole/log.jsonl")$(grep -c '"event": "step"' "$dir/whole/log.jsonl")$(grep -c '"event": "eval"' "$dir/whole/log.jsonl")" = 163
if [ -n "$PYTHON" ]; then
    check "log.jsonl: every line is valid JSON" "$(json_lines "$dir/whole/log.jsonl" 2>&1 | tail -n 1)" json_lines "$dir/whole/log.jsonl"
    # An absurd learning rate drives the loss to NaN or infinity: the log must stay JSON. (Whether it gets there is checked as well.)
    train wild --steps 12 --lr 10 --clip 0 --warmup 0 --weight-decay 10 --index-lr-mult 1000 --min-lr 1 --beta2 0
    if grep -q "is not finite" "$dir/wild.log"; then check "log.jsonl of a run that is not finite is valid JSON" "$(json_lines "$dir/wild/log.jsonl" 2>&1 | tail -n 1)" json_lines "$dir/wild/log.jsonl"
    else skip "log.jsonl of a run that is not finite" "this one stayed finite"
    fi
else
    skip "log.jsonl: every line is valid JSON" "no python3"
fi
# A path need not be UTF-8, but it stands in log.jsonl and in state.json.
bytes=$dir/$(printf 'odd\377').txt
if cp "$dir/a.txt" "$bytes" 2>/dev/null; then
    train bytes --steps 1 --train "$bytes"
    status=$?
    if [ $status != 0 ]; then # refusing it before anything is written is as good
        check "a file name that is not UTF-8 is refused in one line, before anything is written" "exit $status" test ! -e "$dir/bytes" -a "$(wc -l <"$dir/bytes.log")" = 1
    else
        if [ -n "$PYTHON" ]; then check "a file name that is not UTF-8: log.jsonl is valid JSON" "$(json_lines "$dir/bytes/log.jsonl" 2>&1 | tail -n 1)" json_lines "$dir/bytes/log.jsonl"; fi
        train bytes --steps 2 --train "$bytes" --resume auto
        check "a file name that is not UTF-8: the checkpoint resumes" "$(grep 'resume[d:]' "$dir/bytes.log" | head -n 1)" grep -q "^resumed from .*step_000001" "$dir/bytes.log"
    fi
fi
model=model.safetensors
last=whole/step_000006
# equal NAME A B: the models of two checkpoints have the same bytes
equal() { check "$1" "$2 and $3 differ or are missing" cmp "$dir/$2/$model" "$dir/$3/$model"; }

train half --steps 6 --save-every 3
equal "evaluations, probes and samples do not change the training" half/step_000006 $last
rm -rf "$dir/half/step_000006"
train half --steps 6 --resume auto
check "resume auto takes the newest" "$(grep resume "$dir/half.log")" grep -q "^resumed from .*/half/step_000003" "$dir/half.log"
equal "resumed run equals the uninterrupted one" half/step_000006 $last
check "resume: only the missing steps ran" "see the log" test "$(grep -c '^step ' "$dir/half.log")" = 3
check "resume: log.jsonl goes on" "no resume event" grep -q '"event": "resume", "step": 3' "$dir/half/log.jsonl"
cmp -s "$dir/half/step_000006/optimizer-00000-of-00001.safetensors" "$dir/$last/optimizer-00000-of-00001.safetensors"
check "resumed moments are equal too" "they differ" test $? = 0
rm -rf "$dir/named"
cp -r "$dir/whole" "$dir/named"
rm -rf "$dir/named/step_000006"
train named --steps 6 --resume "$dir/whole/step_000003"
equal "resume from a named folder" named/step_000006 $last
printf x >>"$dir/half/step_000006/$model"
train half --steps 6 --resume auto
check "resume auto passes over a damaged checkpoint and names it" "$(grep -i resum "$dir/half.log" | tr '\n' ' ')" grep -q "passing over .*step_000006/$model: damaged" "$dir/half.log"
check "resume auto then takes the one before" "$(grep -i resum "$dir/half.log" | tr '\n' ' ')" grep -q "^resumed from .*/half/step_000003" "$dir/half.log"
equal "and trains it again" half/step_000006 $last
head -c 200 "$dir/half/step_000006/state.json" >"$dir/cut.json" && cp "$dir/cut.json" "$dir/half/step_000006/state.json"
train half --steps 6 --resume auto
equal "resume auto passes over a cut state.json" half/step_000006 $last
mkdir "$dir/half/step_000009.tmp.1" "$dir/half/step_000008" # left by a killed run; empty
train half --steps 6 --resume auto
check "resume auto passes over empty folders" "$(grep -i resum "$dir/half.log" | tr '\n' ' ')" grep -q "^resumed from .*/half/step_000006" "$dir/half.log"
train nothing --steps 1 --resume auto
check "resume auto without a checkpoint starts from the beginning" "exit $?" grep -q "no whole checkpoint in .*starting from the beginning" "$dir/nothing.log"
train kept --steps 6 --save-every 1 --keep 2
check "keep 2 leaves two checkpoints" "$(ls "$dir/kept" | tr '\n' ' ')" test "$(ls "$dir/kept" | tr '\n' ' ')" = "log.jsonl step_000005 step_000006 "

# A signal: the step in hand is finished, saved, and the program ends well; the rest can be resumed.
: >"$dir/signal.log"
# shellcheck disable=SC2086
"$TRAINER" $tiny --out "$dir/signal" --steps 1000000 --warmup 2 >>"$dir/signal.log" 2>&1 &
pid=$!
tries=0
while [ "$(grep -c '^step ' "$dir/signal.log")" -lt 5 ] && [ $tries -lt 600 ]; do sleep 0.05; tries=$((tries + 1)); done
kill -TERM $pid
# A program that does not stop is a failure, not a test that hangs.
(for _ in $(seq 600); do sleep 0.1; done; kill -KILL $pid) >/dev/null 2>&1 &
watch=$!
wait $pid
status=$?
kill $watch 2>/dev/null
at=$(sed -n 's/^signal 15: stopping after step \([0-9]*\)$/\1/p' "$dir/signal.log")
saved=$dir/signal/step_$(printf '%06d' "${at:-0}")
check "SIGTERM: exits with 0" "exit $status" test $status = 0
check "SIGTERM: saves the step it stopped at" "'$at', $(ls "$dir/signal" | tr '\n' ' ')" test -f "$saved/state.json"
train signal --steps "${at:-0}" --resume auto
check "SIGTERM: the checkpoint is whole" "$(grep -i resum "$dir/signal.log")" grep -q "^resumed from $saved" "$dir/signal.log"

train threads1 --steps 4 --threads 1
train threads2 --steps 4 --threads 2
train threads3 --steps 4 --threads 3
equal "1 and 2 threads give the same model" threads1/step_000004 threads2/step_000004
equal "1 and 3 threads give the same model" threads1/step_000004 threads3/step_000004
train table --steps 4 --topk table
equal "--topk table and hytopk give the same model" threads1/step_000004 table/step_000004
train block --steps 4 --recompute block
equal "--recompute block gives the same model" threads1/step_000004 block/step_000004
train ef --steps 4 --recompute block --replay-store ef
equal "--replay-store ef gives the same model" threads1/step_000004 ef/step_000004
train again --steps 4 --recompute block --replay 0
equal "--replay 0 gives the same model" threads1/step_000004 again/step_000004
train seeds --steps 4 --seed 1338
check "another seed gives another model" "the same bytes" test -f "$dir/seeds/step_000004/$model" -a "$(cksum <"$dir/seeds/step_000004/$model")" != "$(cksum <"$dir/threads1/step_000004/$model")"
for s in window random oracle; do
    train "$s" --steps 4 --selector $s --eval-every 2
    status=$?
    if [ $status = 0 ] && [ -f "$dir/$s/step_000004/$model" ] && ! cmp -s "$dir/$s/step_000004/$model" "$dir/threads1/step_000004/$model" && ! grep -qi "nan" "$dir/$s.log"; then ok "selector $s trains, and otherwise than the indexer"
    else fail "selector $s" "exit $status, or the same model, or a NaN"
    fi
done
train copy --task copy --seq-len 32 --steps 3 --layers DSF --num-hidden-layers 3 --vocab-size 80
check "the copy task trains" "exit $?: $(tail -n 1 "$dir/copy.log")" test -f "$dir/copy/step_000003/$model"
# shellcheck disable=SC2086
train shard --steps 2 $wide --hidden-size 8
check "an llm.c shard trains" "exit $?: $(tail -n 1 "$dir/shard.log")" test -f "$dir/shard/step_000002/$model"
check "a shard's vocabulary is found" "$(grep vocab "$dir/shard/step_000002/config.json")" grep -q '"vocab_size": 50257' "$dir/shard/step_000002/config.json"
bad "generate of a shard's model without a tokenizer" "a vocabulary of 50257 needs --tokenizer" --generate "$dir/shard/step_000002"
# shellcheck disable=SC2086
check "nothing is written without --out" "see above" "$TRAINER" $tiny --steps 1 --out ""

# ---- generation
"$TRAINER" --generate "$dir/$last" --prompt "Emma Woodhouse" --sample-tokens 20 >"$dir/text1" 2>"$dir/stderr"
status=$?
check "--generate prints text that starts with the prompt" "exit $status: $(head -c 60 "$dir/text1")$(cat "$dir/stderr")" grep -q "^Emma Woodhouse" "$dir/text1"
check "--generate goes on after the prompt" "$(wc -c <"$dir/text1") bytes" test "$(wc -c <"$dir/text1")" -gt 20
"$TRAINER" --generate "$dir/$last" --prompt "Emma Woodhouse" --sample-tokens 20 --threads 1 >"$dir/text2" 2>&1
check "--generate gives the same text again, on one thread" "another text" cmp "$dir/text1" "$dir/text2"
check "--generate with an empty prompt" "exit not 0" "$TRAINER" --generate "$dir/$last" --prompt "" --sample-tokens 5
check "--generate leaves the folder as it is" "changed" test "$(state "$dir/keep")" = "$before"

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
