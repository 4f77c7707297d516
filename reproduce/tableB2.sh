#!/usr/bin/env bash
# Table B.2 of the papers: `bash reproduce/tableB2.sh [paper=NAME] [tier=smoke|mini|full]`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_table tableB2 "$@"
