#!/bin/sh
# Run every test and close with one line "N passed, N failed". Called by make test, which sets BUILD (where the
# test programs are), TRAINER and CC. A program that dies counts as one failure. The whole output stays in
# $BUILD/test.log; shown are the failures and a line for each program.
set -u
log=$BUILD/test.log
: >"$log"
passed=0
failed=0
run() {
    name=$1
    shift
    started=$(date +%s)
    "$@" >"$BUILD/one.log" 2>&1
    status=$?
    cat "$BUILD/one.log" >>"$log"
    summary=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$BUILD/one.log" | tail -n 1)
    p=${summary%% passed*}
    f=${summary##*, }
    f=${f%% failed}
    if [ -z "$summary" ]; then
        p=0
        f=1
        tail -n 15 "$BUILD/one.log"
    elif [ "$status" != 0 ] && [ "$f" = 0 ]; then
        f=1
    fi
    grep '^FAIL' "$BUILD/one.log"
    if [ "$f" != 0 ]; then grep '^seed' "$BUILD/one.log"; fi
    passed=$((passed + p))
    failed=$((failed + f))
    printf '%-28s %5d passed, %d failed, %d s\n' "$name" "$p" "$f" $(($(date +%s) - started))
}

run test_safetensors "$BUILD/test_safetensors"
run test_tokens "$BUILD/test_tokens"
run test_selection "$BUILD/test_selection"
run test_model "$BUILD/test_model"
run test_gradients "$BUILD/test_gradients"
run test_letters "$BUILD/test_letters"
run test_oracle "$BUILD/test_oracle" dev/test/oracle/*.safetensors
run test_oracle_double "$BUILD/test_oracle_double" dev/test/oracle/*.safetensors
run test_cli sh dev/test/test_cli.sh
run test_readme sh dev/test/test_readme.sh
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
