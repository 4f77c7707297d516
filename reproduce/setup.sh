# Sourced by the scripts of this repository. `use_environment [EXTRA [COMMAND]]` enters the repository
# root, makes `.venv` there if there is none, installs the project into it if that was not done for this
# pyproject.toml, and sets `python` to its interpreter. Nothing else of the machine is touched. COMMAND
# is what does the same in an environment that is active. `check_arguments NAME ARGUMENTS` comes before:
# it answers --help and --list and refuses what no table can be made of, with nothing installed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

fail() {
    echo "error: $*" >&2
    exit 1
}

refuse() {
    echo "error: $*" >&2
    exit 2
}

usage() {
    cat <<END
bash reproduce/$1.sh [paper=NAME] [tier=smoke|mini|full]
    python -m reproduce $1 in .venv, which is made if there is none, with the project installed in
    it, PyTorch's gigabytes too; without paper= of every paper, without tier= the smallest
bash reproduce/$1.sh --list
    which papers have it (all.sh: every table and figure); nothing is installed
END
}

list_tables() {
    local file name
    for file in "$@"; do
        name=$(basename "$file" .yaml)
        case $name in *_*) name="$(command_of "$name") paper=${name%%_*}" ;; esac
        printf '%-22s %s\n' "$name" "$(sed -n 's/^title: *"\{0,1\}\([^"]*\).*/\1/p' "$file")"
    done
    echo "all tables: bash reproduce/all.sh --list; once installed, python -m reproduce --list"
}

command_of() { # slope_figure3b is a part of figure3
    local number=${1#*_}
    echo "${number%[a-z]}"
}

# As `python -m reproduce` does, which looks again, at what goes together too.
check_arguments() {
    local name=$1 option value given=" " specs
    shift
    shopt -s nullglob
    case $name in
        all) specs=("$root"/reproduce/tables/*_*.yaml) ;;
        quickstart) specs=("$root/reproduce/tables/quickstart.yaml") ;;
        *) specs=("$root"/reproduce/tables/*_"$name"{,[a-z]}.yaml) ;;
    esac
    shopt -u nullglob
    for option in "$@"; do
        case $option in
            -h | --help) usage "$name" && exit ;;
            --list) list_tables "${specs[@]}" && exit ;;
        esac
    done
    [ ${#specs[@]} -gt 0 ] || refuse "no table '$name' (see --list)"
    for option in "$@"; do
        value=${option#*=}
        if ! [[ $option =~ ^(paper|tier)=. ]] || [[ $given == *" ${option%%=*} "* ]]; then
            refuse "cannot use '$option'; use paper=NAME and tier=TIER, each once"
        fi
        given+="${option%%=*} "
        case $option in
            paper=*) [[ " ${specs[*]##*/}" == *" ${value}_"* ]] ||
                refuse "no $name of paper '$value' (see --list)" ;;
            tier=*) [[ $value =~ ^(smoke|mini|full)$ ]] &&
                grep -qE "^  $value:|^based_on:" "${specs[@]}" ||
                refuse "no tier '$value' of $name; there are smoke, mini and full, not all of each" ;;
        esac
    done
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
    local extra=${1:-} own=${2:-} current stamp=.venv/.sparse24-installed installed=""
    cd "$root"
    if [ -n "${VIRTUAL_ENV:-}" ] && [ ! "$VIRTUAL_ENV" -ef .venv ]; then
        echo "using .venv${own:+; to use your own: $own}"
    fi
    [ -e .venv ] || create_venv
    python=$root/.venv/bin/python
    # Threads that wait for work sleep. Those that spin hold the cores that other programs, or the
    # threads they wait for, want: small models then train some ten times slower.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
    # Where Python is told to keep no compiled modules, as in many containers, it compiles PyTorch anew in
    # every process, which takes seconds. They are kept in .venv then, and the checkout stays as it is.
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        unset PYTHONDONTWRITEBYTECODE
        export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$root/.venv/pycache}
    fi
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
    # Python compiles a module when it is first imported; pip would compile the tens of thousands that
    # never are, too.
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
        -e ".${extra:+[$extra]}" ||
        fail "the installation failed; pip says why above. Start the same command again to go on"
    echo "$installed" >"$stamp"
}
