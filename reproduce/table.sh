#!/usr/bin/env bash
# A table or figure of the papers, by the name that the script is called by: tableN.sh and figureN.sh
# are links to this file. `bash reproduce/table1.sh [paper=NAME] [tier=smoke|mini|full]`; all.sh makes
# all of them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_environment hf lm_eval
exec "$python" -m reproduce "$(basename "${BASH_SOURCE[0]}" .sh)" "$@"
