exec bash "$(dirname "$0")/run.sh" table11 "$@"
