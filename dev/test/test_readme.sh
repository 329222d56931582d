#!/bin/sh
# Every link [name](train_cpu.c#L123) of the README must point at the line that defines name. With --fix, make it so.
set -u
if [ "${1:-}" = --fix ]; then
    for name in $(grep -o '\[[a-z_0-9]*\](train_cpu.c#L[0-9]*)' README.md | sed 's/^\[\([a-z_0-9]*\)\].*/\1/' | sort -u); do
        line=$(grep -n "^static .*[ *]$name(.*{" train_cpu.c | head -n 1 | cut -d: -f1)
        sed -i "s/\[$name\](train_cpu.c#L[0-9]*)/[$name](train_cpu.c#L$line)/g" README.md
    done
fi
passed=0
failed=0
for link in $(grep -o '\[[a-z_0-9]*\](train_cpu.c#L[0-9]*)' README.md | sort -u); do
    name=$(echo "$link" | sed 's/^\[\([a-z_0-9]*\)\].*/\1/')
    line=$(echo "$link" | sed 's/.*#L\([0-9]*\))/\1/')
    if sed -n "${line}p" train_cpu.c | grep -q "^static .*[ *]$name("; then
        echo "ok   README: $name is in line $line"
        passed=$((passed + 1))
    else
        echo "FAIL README: $name is not defined in line $line of train_cpu.c (sh dev/test/test_readme.sh --fix mends it)"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
