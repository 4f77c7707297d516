exec bash "$(dirname "$0")/run.sh" tableB4 "$@"
