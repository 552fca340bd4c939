#!/usr/bin/env bash
# Resolves everything that the project, its extras and its dependency groups need, in a clean environment, around the
# pins in constraints.in, and writes the result to constraints.txt. The file is for every platform, so it leaves out
# - the project itself and pip, which `make setup` pins;
# - local version suffixes (2.13.0+cpu), so that a CPU build of torch and the index's build both satisfy it;
# - the CUDA packages, which follow whichever torch is installed.
# Usage: scripts/lock.sh PYTHON PIP_REQUIREMENT EXTRAS
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 pip_requirement=$2 extras=$3

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
pip=("$environment/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet "$pip_requirement"
"${pip[@]}" install --quiet --constraint constraints.in --editable ".[$extras]" --group dev

{
    echo "# Written by \`make lock\` from pyproject.toml and constraints.in; do not edit."
    "${pip[@]}" freeze --all --exclude-editable --exclude pip |
        sed -E 's/\+[A-Za-z0-9.]+$//' |
        grep -vE '^(nvidia|cuda|triton)' |
        LC_ALL=C sort --ignore-case
} >"$environment/constraints.txt"
mv "$environment/constraints.txt" constraints.txt
echo "constraints.txt pins $(grep -c == constraints.txt) packages."
