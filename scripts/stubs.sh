#!/usr/bin/env bash
# Generates the Python stubs for every file of proto/ into the folder kvbridge/v1 below OUT. The protobuf package is the
# Python package, so the imports that protoc writes resolve as they are.
# Usage: scripts/stubs.sh PYTHON write    replace the committed stubs
#        scripts/stubs.sh PYTHON check    fail, and print the difference, unless the committed stubs are what PYTHON generates
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 mode=$2
package=kvbridge/v1

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

protoc() { # protoc looks its mypy plugins up on the path.
    PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc --proto_path=proto "$@"
}
protoc --python_out="$fresh" --mypy_out=quiet:"$fresh" proto/"$package"/*.proto
# A file without a service would get a gRPC module with nothing in it.
mapfile -t services < <(grep --files-with-matches '^service ' proto/"$package"/*.proto)
protoc --grpc_python_out="$fresh" --mypy_grpc_out=quiet:"$fresh" "${services[@]}"

case $mode in
write)
    rm -f "$package"/*_pb2.py* "$package"/*_pb2_grpc.py*
    cp "$fresh/$package"/* "$package/"
    ;;
check)
    # Only generated files count: the package's own __init__.py is written by hand.
    if ! diff --recursive --unified --new-file --exclude=__init__.py --exclude=__pycache__ "$package" "$fresh/$package"; then
        echo "The committed stubs in $package are stale: run \`make proto\` and commit." >&2
        exit 1
    fi
    echo "The stubs in $package are fresh."
    ;;
*)
    echo "unknown mode: $mode" >&2
    exit 2
    ;;
esac
