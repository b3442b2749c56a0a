#!/usr/bin/env bash
# Puts Chromium on a Debian machine, for the test that opens the report's page. Needs root; does nothing where there is one.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
apt=(apt-get -qq -o Acquire::Retries=2)
timeout 120 "${apt[@]}" update
timeout 400 "${apt[@]}" install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
chromium --version
