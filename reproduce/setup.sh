# Sourced by the scripts of this repository. `use_environment [EXTRA]` enters the repository root,
# makes `.venv` there if there is none, installs the project into it if that was not done for this
# pyproject.toml, and sets `python` to its interpreter. Nothing else of the machine is touched.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

fail() {
    echo "error: $*" >&2
    exit 1
}

create_venv() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13 python; do
        # A Python without ensurepip cannot make an environment with pip in it.
        if "$candidate" -c "import ensurepip; $supported" 2>/dev/null; then
            echo "creating .venv with $candidate ($("$candidate" --version))"
            "$candidate" -m venv .venv || fail "'$candidate -m venv .venv' failed"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip on the PATH" \
        "(python3 is $(python3 --version 2>/dev/null || echo missing)); install one (Debian and Ubuntu:" \
        "the packages python3 and python3-venv)"
}

# The stamp's first word says what is installed, the others which extras: "- dev".
fingerprint() {
    "$python" -c 'import hashlib, pathlib, sys
state = sys.argv[1].encode() + pathlib.Path("pyproject.toml").read_bytes()
print(hashlib.sha256(state).hexdigest())' "$root"
}

use_environment() {
    local extra=${1:-} current stamp=.venv/.sparse24-installed installed=""
    cd "$root"
    [ -e .venv ] || create_venv
    python=$root/.venv/bin/python
    # Threads that wait for work sleep. Those that spin hold the cores that other programs, or the
    # threads they wait for, want: small models then train some ten times slower.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
    "$python" -c "$supported" 2>/dev/null ||
        fail "$root/.venv has no working Python 3.11, 3.12 or 3.13; remove that folder and start again"
    current=$(fingerprint)
    [ ! -f "$stamp" ] || installed=$(cat "$stamp")
    case "$installed " in
        "$current -"*"${extra:+ $extra }"*) return ;;
        "$current -"*) installed="$installed $extra" ;;
        *) installed="$current -${extra:+ $extra}" ;;
    esac
    echo "installing sparse24${extra:+[$extra]} into .venv; PyTorch alone is gigabytes, so the first" \
        "time takes minutes"
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip
    "$python" -m pip install --disable-pip-version-check -e ".${extra:+[$extra]}" ||
        fail "the installation failed; pip says why above. Start the same command again to go on"
    echo "$installed" >"$stamp"
}
