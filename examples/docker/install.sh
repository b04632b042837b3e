#!/bin/bash
# Install the wheel of a directory beside the vLLM that is there. What is installed is pip's constraint, so pip adds
# packages and replaces none, or fails; and nothing may be broken afterwards that was not before.
set -euo pipefail
python=${PYTHON:-python3}
before=$(mktemp -d)
"$python" -m pip list --format=freeze --disable-pip-version-check 2>/dev/null |
    grep -vE '^(pip|setuptools|wheel|lora-plugins)==' >"$before/installed.txt"
"$python" -m pip check >"$before/check.txt" || true
wheel=$(echo "$1"/lora_plugins-*.whl)
"$python" -m pip install --no-cache-dir --disable-pip-version-check -c "$before/installed.txt" "${wheel}[s3]"
"$python" -m pip list --format=freeze --disable-pip-version-check 2>/dev/null >"$before/after.txt"
if changed=$(grep -vxFf "$before/after.txt" "$before/installed.txt"); then
    echo "replaced: $changed" >&2
    exit 1
fi
{ "$python" -m pip check || true; } | diff "$before/check.txt" - || { echo "pip check finds more than before" >&2; exit 1; }
