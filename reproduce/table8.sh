#!/usr/bin/env bash
# Table 8 of the papers: `bash reproduce/table8.sh [paper=NAME] [tier=smoke|mini|full]`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_table table8 "$@"
