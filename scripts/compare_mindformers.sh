#!/usr/bin/env bash
# Makes the fixtures of the real MindFormers anew and compares them with what is committed, and has
# it load what this project writes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

convert() { # output, case of tests/fixtures/reference, overrides
  (
    root=$PWD
    cd "$work" # where a run leaves outputs/
    "$root/.venv/bin/python" "$root/run_lite.py" run_mode=convert model=auto \
      load_checkpoint="$root/tests/fixtures/reference/$2" convert_output="$1" "${@:3}"
  )
}

.venv-mindformers/bin/python scripts/make_mindformers.py --check
for case in bloom gpt2 llama_tied_mha; do
  convert "$case.ckpt" "$case" convert_format=ckpt
done
convert gpt2_adapter gpt2 convert_format=mindformers mindformers.release=1.0 \
  adapter_path="$PWD/tests/fixtures/adapters/gpt2/attention"
.venv-mindformers/bin/python scripts/load_in_mindformers.py "$work"
