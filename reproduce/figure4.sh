#!/usr/bin/env bash
# Figure 4 of the papers: `bash reproduce/figure4.sh [paper=NAME] [tier=smoke|mini|full]`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_table figure4 "$@"
