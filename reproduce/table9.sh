#!/usr/bin/env bash
# Table 9 of the papers: `bash reproduce/table9.sh [paper=NAME] [tier=smoke|mini|full]`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_table table9 "$@"
