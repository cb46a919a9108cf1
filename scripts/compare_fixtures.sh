#!/usr/bin/env bash
# Makes every fixture of the tests anew with torch, transformers and peft and compares it with what
# is committed:  scripts/compare_fixtures.sh GGUF
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly gguf=${1:?usage: scripts/compare_fixtures.sh GGUF} python=.venv-bench/bin/python
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"$python" scripts/make_reference.py --check --model "$gguf"
"$python" scripts/make_embedding_reference.py --check
"$python" scripts/make_next_token_reference.py --check
"$python" -W ignore scripts/make_adapters.py --check "$fresh/adapters"
"$python" -W ignore tests/fixtures/generation/make_fixtures.py "$fresh"
"$python" -W ignore tests/fixtures/tokenizers/make_fixtures.py "$gguf" "$fresh"
for file in "$fresh"/*.json; do
  cmp "$file" tests/fixtures/*/"${file##*/}"
  echo "${file##*/}: equal"
done
