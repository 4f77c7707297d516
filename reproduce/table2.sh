#!/usr/bin/env bash
# Table 2 of the papers: `bash reproduce/table2.sh [paper=sste] [tier=smoke|mini|full]`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_environment
exec "$python" -m reproduce table2 "$@"
