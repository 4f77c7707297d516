exec bash "$(dirname "$0")/run.sh" figure2 "$@"
