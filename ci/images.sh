#!/usr/bin/env bash
# The RUN steps of a Dockerfile, in order, in a new virtual environment instead of a container:
#
#   bash ci/images.sh [deploy/Dockerfile.cpu] [--dry-run]
#
# SOURCE is this checkout and PREFIX the environment; what the Dockerfile copies must be here. Then the image's command
# has to start. --dry-run makes pip resolve what it would install, and ends there. $PYTHON chooses the interpreter.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
file=$(realpath "${1:-$root/deploy/Dockerfile.cpu}")
cd "$root"
. ci/venv.sh
interpreter=$(_venv_interpreter)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$interpreter" -m venv "$work/venv"
export SOURCE="$work/source" PREFIX="$work/venv" PATH="$work/venv/bin:$PATH" HOME="$work"
[ "${2:-}" = --dry-run ] && export PIP_DRY_RUN=1

# Continued lines as one; comments between them away.
steps=$(grep -v '^#' "$file" | sed -e ':again' -e '/\\$/{N; s/\\\n */ /; b again}')
while IFS= read -r step; do
    case $step in
    "COPY "*)
        read -ra words <<<"${step#COPY }"
        target=${words[-1]/'${SOURCE}'/$SOURCE}
        mkdir -p "$target"
        for word in "${words[@]:0:${#words[@]}-1}"; do
            if [ -d "$word" ]; then cp -r "$word/." "$target"; else cp "$word" "$target"; fi
        done
        ;;
    "RUN "*)
        echo "+ ${step#RUN }"
        sh -euc "${step#RUN }"
        if [ -n "${PIP_DRY_RUN:-}" ]; then
            echo "$file: pip resolves it; nothing was installed"
            exit 0
        fi
        ;;
    "CMD "*) command=$(python -c 'import json, shlex, sys; print(shlex.join(json.loads(sys.argv[1])))' "${step#CMD }") ;;
    esac
done <<<"$steps"

# The image's command, by the shim that the operator and the Helm chart call; on free ports, until it is ready.
cd "$work"
"$PREFIX/bin/dask-scheduler" ${command#dask scheduler} --host 127.0.0.1 --port 0 --dashboard-address 127.0.0.1:0 \
    --scheduler-file "$work/scheduler.json" >"$work/log" 2>&1 &
scheduler=$!
for _ in $(seq 600); do
    [ -s "$work/scheduler.json" ] && break
    kill -0 $scheduler 2>/dev/null || break
    sleep 0.1
done
if [ -s "$work/scheduler.json" ]; then
    address=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["address"])' "$work/scheduler.json")
    dask gpurt status "$address" | head -1
fi
kill $scheduler 2>/dev/null || { cat "$work/log"; exit 1; }
wait $scheduler || true
echo "$file: every step passed, and its command starts"
