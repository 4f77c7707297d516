#!/usr/bin/env bash
# What tableN.sh, figureN.sh, all.sh and quickstart.sh call: `python -m reproduce NAME [OPTION...]` in an
# environment with what it needs, which is made if there is none. Only evaluations need more than the
# package itself.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) exec cat "$(dirname "${BASH_SOURCE[0]}")/usage.txt" ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [ "${1:-}" = quickstart ]; then use_environment; else use_environment hf lm_eval; fi
exec "$python" -m reproduce "$@"
