#!/usr/bin/env bash
# Writes requirements/lock.txt anew from the bounds of setup.cfg, dev included. It is resolved with
# the oldest Python accepted, so that one list of versions serves all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python=${PYTHON:-python3.10}
if [[ $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') != 3.10 ]]; then
  echo "error: the lock is made with Python 3.10; choose one with: make lock PYTHON=/path/to/python3.10" >&2
  exit 3
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  --dry-run --ignore-installed --report "$work/report.json" --editable '.[bench,chat,dev,serve]'

"$python" - "$work/report.json" >"$work/lock.txt" <<'EOF'
import json
import re
import sys

print("# Made by `make lock` from setup.cfg: every package and version that is tested.")
pins = {}
for item in json.load(open(sys.argv[1]))["install"]:
    name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
    pins[name] = item["metadata"]["version"].split("+")[0]
del pins["lite-runner"]
for name in sorted(pins):
    print(f"{name}=={pins[name]}")
EOF
mv "$work/lock.txt" requirements/lock.txt
