#!/usr/bin/env bash
# Every 2:4 method against the dense baseline, on a CPU: `bash reproduce/quickstart.sh`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
use_environment
exec "$python" -m reproduce quickstart "$@"
