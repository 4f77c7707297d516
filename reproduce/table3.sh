#!/usr/bin/env bash
# Table 3 of the papers: `bash reproduce/table3.sh [paper=NAME] [tier=smoke|mini|full]`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_table table3 "$@"
