#!/usr/bin/env bash
# All checks: `bash tests/run.sh [pytest arguments]`. Needs no GPU, and no network once installed.
# Every check runs whatever the others say; exit status 0 only if all are clean. The first argument may be
#   all               run every test, those that are marked as extra too, and again with another
#                     instruction set those whose numbers depend on the CPU
#   newest or oldest  the tests alone, with the newest or the lowest versions that pyproject.toml allows,
#                     in an environment of their own
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../reproduce/setup.sh"
# One thread per worker: two workers with two threads each fight for two cores.
export OMP_NUM_THREADS=1
tests() {
    HF_HUB_OFFLINE=1 "$python" -m pytest -n 2 --dist loadfile -m "$which" "$@"
}
lowest() { # NAME==VERSION of each range in pyproject.toml
    "$python" -c 'import pathlib, re
text = pathlib.Path("pyproject.toml").read_text().split("[project]")[1]
for name, version in {*re.findall(r"\"([a-z-]+)(?:\[\w+\])?>=([\d.]+)", text)}:
    print(f"{name}=={version}")'
}
which="not extra"
case ${1:-} in
    newest | oldest)
        cd "$root"
        venv=.venv-$1 python=$root/.venv-$1/bin/python
        if [ "$1" = newest ]; then
            create_venv "$venv" python3 python3.12 python3.11 python3.13 python
            install dev --upgrade --upgrade-strategy eager
        else # the only one that all of them have wheels for
            create_venv "$venv" python3.11 python3
            install dev -c <(lowest)
        fi
        shift
        tests "$@"
        exit
        ;;
    all) all=1 which= && shift ;;
    *) all= ;;
esac
use_environment dev importlinter

failed=()
check() {
    echo "== $*"
    "$@" || failed+=("$(basename "$1")")
}
bin=${python%/*}
linters() {
    check "$bin/ruff" check .
    check "$bin/mypy"
    check "$bin/lint-imports"
    [ ${#failed[@]} -eq 0 ] || echo "== failed so far: ${failed[*]}"
    [ ${#failed[@]} -eq 0 ]
}
# Beside the first tests, since mypy keeps one core busy for half a minute; told of after them.
said=$(mktemp)
trap 'rm -f "$said"' EXIT
linters >"$said" 2>&1 &
linting=$!
# The folders whose tests compare numbers run with the sums of another instruction set, too: some
# minutes. Ranks with shards compare with a process of their own
# kind. Status 5: the arguments choose no test here.
tests_under_avx2() {
    ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 tests "$@" \
        --ignore=tests/experiments --ignore=tests/reproduce --ignore=tests/test_evidence.py \
        --ignore=tests/test_docs.py --ignore=tests/test_examples.py \
        --ignore=tests/methods/test_sharding.py --ignore=tests/methods/nn/test_sharding.py ||
        [ $? -eq 5 ]
}
check tests "$@"
wait "$linting" || failed+=(linters)
cat "$said"
[ -z "$all" ] || which="not extra" check tests_under_avx2 "$@"
[ ${#failed[@]} -eq 0 ]
