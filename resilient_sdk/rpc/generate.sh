#!/bin/sh
# Makes resilient_pb2*.py from resilient.proto. tests/rpc checks that what is committed is what this makes.
set -eu
cd "$(dirname "$0")/../.."
python -m grpc_tools.protoc -I. --python_out="${1:-.}" --pyi_out="${1:-.}" --grpc_python_out="${1:-.}" \
  resilient_sdk/rpc/resilient.proto
