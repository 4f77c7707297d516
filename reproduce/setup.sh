# Sourced by the scripts of this repository. `use_environment [EXTRA MODULE]` enters the repository root
# and sets `python` to an interpreter with the project: that of the active environment if it has this
# checkout installed and MODULE, which EXTRA brings, else that of `.venv`, which is made if there is none
# and gets the versions of constraints.txt, once for what that file and pyproject.toml say. Nothing else
# of the machine is touched.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

create_venv() { # FOLDER PYTHON...
    local folder=$1 candidate
    [ ! -e "$folder" ] || return 0
    shift
    for candidate in "$@"; do
        # A Python without ensurepip cannot make an environment with pip in it.
        if supported "$candidate" && "$candidate" -c "import ensurepip" 2>/dev/null; then
            echo "creating $folder with $candidate ($("$candidate" --version))"
            "$candidate" -m venv "$folder" || fail "'$candidate -m venv $folder' failed"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip on the PATH" \
        "(python3 is $(python3 --version 2>/dev/null || echo missing)); install one (Debian and Ubuntu:" \
        "the packages python3 and python3-venv)"
}

cpu_torch() { # PyTorch's CPU build where there is no NVIDIA GPU, if the reader wants it
    local build=${SPARSE24_TORCH:-} answer
    if [ "$(uname -s)" != Linux ] || [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null ||
        "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))"; then
        return 0
    fi
    if [ -z "$build" ] && [ -t 0 ]; then
        read -rp "no NVIDIA GPU here: install PyTorch's CPU build, 4 GB less? [Y/n] " answer
        case $answer in [nN]*) ;; *) build=cpu ;; esac
    fi
    # Without dependencies, of which that index lacks some versions: `install` gets them from PyPI.
    [ "$build" != cpu ] || "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --no-deps --index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch torchvision ||
        echo "PyTorch's CPU build cannot be had from download.pytorch.org; the ordinary one follows"
}

install() { # EXTRA OPTION...: into the environment of $python, with these options of pip
    local extra=$1
    shift
    echo "installing sparse24${extra:+[$extra]}, which takes minutes the first time"
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip
    cpu_torch
    # Python compiles a module when it is first imported; pip would compile the tens of thousands that
    # never are, too.
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@" \
        -e ".${extra:+[$extra]}" ||
        fail "the installation failed; pip says why above. Start the same command again to go on"
}

has() { # PYTHON [MODULE]: it runs this checkout, wherever it is started, and has the module
    (cd / && "$1" -c 'import importlib.util as u, pathlib, sys
found = [u.find_spec(name) for name in ("reproduce", *sys.argv[2:])]
sys.exit(not all(found) or not pathlib.Path(found[0].origin).parents[1].samefile(sys.argv[1]))
' "$root" ${2:+"$2"}) 2>/dev/null
}

use_environment() {
    local extra=${1:-} active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} current stamp installed=""
    cd "$root"
    if [ -n "$active" ] && [ ! "$active" -ef .venv ]; then
        python=$active/bin/python
        ! has "$python" "${2:-}" || return 0
        echo "using .venv: $active has no sparse24${extra:+[$extra]} of this checkout"
    fi
    create_venv .venv python3 python3.12 python3.11 python3.13 python
    python=$root/.venv/bin/python
    # Where Python is told to keep no compiled modules, as in many containers, it compiles PyTorch anew in
    # every process, which takes seconds. They are kept in .venv then, and the checkout stays as it is.
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        unset PYTHONDONTWRITEBYTECODE
        export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$root/.venv/pycache}
    fi
    supported "$python" ||
        fail "$root/.venv has no working Python 3.11, 3.12 or 3.13; remove that folder and start again"
    # The stamp's first word says what is installed, the others which extras: "- dev".
    stamp=.venv/.sparse24-installed
    current=$( (echo "$root" && cat pyproject.toml constraints.txt) | cksum | tr ' ' _)
    [ ! -f "$stamp" ] || installed=$(cat "$stamp")
    case "$installed " in
        "$current -"*"${extra:+ $extra }"*) return ;;
        "$current -"*) installed="$installed $extra" ;;
        *) installed="$current -${extra:+ $extra}" ;;
    esac
    install "$extra" -c constraints.txt
    echo "$installed" >"$stamp"
}
