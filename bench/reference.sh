#!/usr/bin/env bash
# Installs the reference that bench-proxy compares with, OpenEnv's capture server, in .venv-openenv (Python 3.12 if there is one).
set -euo pipefail
cd "$(dirname "$0")/.."

for python in ${PYTHON:-} python3.12 python3.11 python3; do
    if "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi
done
"$python" -m venv --clear .venv-openenv
.venv-openenv/bin/python -m pip install --quiet openenv==0.10.0 fastapi uvicorn uvloop httptools httpx
.venv-openenv/bin/python -c "import openenv.core.harness.capture.server"
echo "the reference is installed in .venv-openenv, on $("$python" --version)"
