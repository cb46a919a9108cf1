#!/usr/bin/env bash
# What a machine without a network needs to run a model on its processor: the wheels of lite-runner
# without MindSpore, the model in its cache, and install.sh. For this kind of processor and this
# version of Python.
#
#   scripts/bundle.sh FOLDER model=smollm2_135m quant=a16w8
#
# The words behind the folder are those of a run: the model is fetched and packed as they say.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: scripts/bundle.sh FOLDER model=NAME [key=value ...]" >&2
    exit 2
fi
if [[ -e $1 ]]; then
    echo "error: $1 is there already; expected the name of a new folder" >&2
    exit 2
fi
mkdir -p "$1"
bundle=$(cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "wheels"
# What it runs on is what the lock has up to here, checked by its hashes.
sed '/^# extras$/q' requirements/lock.txt >"$work/core.txt"
"$python" -m pip wheel --quiet --require-hashes --no-deps --no-build-isolation \
    --wheel-dir "$bundle/wheels" --requirement "$work/core.txt"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$bundle/wheels" .

LITE_RUNNER_CACHE=$bundle/cache "$python" run_lite.py "$@" \
    predict_data=hi max_new_tokens=1 "output_dir=$work/run" >"$work/said"

cat >"$bundle/install.sh" <<'EOF'
#!/usr/bin/env bash
# Install into a new environment, without a network: ./install.sh [FOLDER]; PYTHON=... chooses one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
sha256sum --check --quiet SHA256SUMS
environment=${1:-$PWD/environment}
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --no-index --no-deps wheels/*.whl
echo "installed; a run:"
EOF
# shellcheck disable=SC2016  # the two folders are those of install.sh
printf 'echo "  LITE_RUNNER_CACHE=$PWD/cache $environment/bin/run-lite %s predict_data=hello"\n' \
    "${*@Q}" >>"$bundle/install.sh"
chmod +x "$bundle/install.sh"
(cd "$bundle" && find . -type f ! -name SHA256SUMS -exec sha256sum {} + >"$work/sums")
mv "$work/sums" "$bundle/SHA256SUMS"
du -sh "$bundle"
