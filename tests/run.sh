#!/usr/bin/env bash
# All checks: `bash tests/run.sh [pytest arguments]`. Needs no GPU, and no network once installed.
# Every check runs whatever the others say; exit status 0 only if all are clean.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../reproduce/setup.sh"
use_environment dev
export HF_HUB_OFFLINE=1

failed=()
check() {
    echo "== $*"
    "$@" || failed+=("$(basename "$1")")
}
bin=$root/.venv/bin
check "$bin/ruff" check .
check "$bin/mypy"
check "$bin/lint-imports"
[ ${#failed[@]} -eq 0 ] || echo "== failed so far: ${failed[*]}" >&2
# One thread per worker: two workers with two threads each fight for two cores.
OMP_NUM_THREADS=1 check "$python" -m pytest -n 2 --dist loadfile "$@"
[ ${#failed[@]} -eq 0 ]
