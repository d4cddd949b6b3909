#!/usr/bin/env bash
# Runs the commands that a document shows, and puts what they print in the place of what stood there.
#
#   docs/regenerate.sh docs/vllm.md              all of them; half an hour on two cores
#   docs/regenerate.sh docs/vllm.md runs/docs/raw    those that contain this text
#
# A command is the line behind "$ " that follows ```console; what follows it, up to the closing fence, is its output.
# Blanks at the end of a line are dropped; a last line says how it ended and how long it took.
set -euo pipefail

(($# == 1 || $# == 2)) || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
document=$1
wanted=${2:-}
# One thread for the reference, and lines that fit a page.
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 COLUMNS=110

run() {
    local command=$1 status=0 began=$SECONDS
    # An audit goes on where a run directory ends, and a finished one has nothing left to do.
    if [[ $command =~ --out\ (runs/docs/[a-z0-9-]+) ]]; then
        rm -rf -- "${BASH_REMATCH[1]}"
    fi
    # Only where the machine is busy does a stage take long enough to be told of.
    bash -c "$command" 2>&1 </dev/null | sed -e 's/[[:space:]]*$//' -e '/^note: running: /d' || status=$?
    printf '# exit code %d after %d s\n' "$status" $((SECONDS - began))
}

old_output() {
    local line
    while IFS= read -r line && [[ $line != '```' ]]; do
        printf '%s\n' "$line"
    done
}

fresh=$(mktemp)
trap 'rm -f -- "$fresh"' EXIT
while IFS= read -r line; do
    printf '%s\n' "$line"
    [[ $line == '```console' ]] || continue
    IFS= read -r line
    printf '%s\n' "$line"
    if [[ $line == *"$wanted"* ]]; then
        printf '%s\n' "$line" >&2
        old_output >/dev/null
        run "${line#\$ }"
    else
        old_output
    fi
    printf '```\n'
done <"$document" >"$fresh"
cat -- "$fresh" >"$document"
