#!/usr/bin/env bash
# Runs ten commands on a machine with an Ascend card and writes one file to send back:
#   bash scripts/ascend_smoke.sh [OUTPUT]          default: ascend_smoke.txt, in the current folder
# Each command has its exit code, seconds and last lines in it, and the next one follows whatever
# it ends with. Names of the user, the host and the home folder, addresses and tokens are replaced
# before a line is written. DEVICE=CPU runs the same on the processor; MODEL is the model (default:
# tiny_llama, random weights), SECONDS_EACH the longest that a command may take.
set -uo pipefail

output=$(realpath -m "${1:-ascend_smoke.txt}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 3
# shellcheck source=scripts/own_python.sh
source scripts/own_python.sh
readonly device=${DEVICE:-Ascend} model=${MODEL:-tiny_llama} each=${SECONDS_EACH:-120}
readonly lines=25 wide=400
work=$(mktemp -d) || exit 3
trap 'rm -rf "$work"' EXIT
: >"$output" || exit 3

# What must not leave the machine. sed's own characters in a name are escaped.
hide() {
  local name script='s/[[:alnum:]._%+-]+@[[:alnum:].-]+/ADDRESS/g'
  script+=';s/\b[0-9]{2,3}(\.[0-9]{1,3}){3}\b/ADDRESS/g'  # 8.0.0.1 is a version
  script+=';s/([0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}/ADDRESS/g'
  script+=';s/\b(hf_|sk-|ghp_)[[:alnum:]_-]{8,}/TOKEN/g'
  script+=';s/((token|key|secret|passw(or)?d)(_[[:alnum:]_]*)?[[:space:]]*[=:][[:space:]]*)[^[:space:]]+/\1HIDDEN/gI'
  while IFS='|' read -r name to; do
    [[ ${#name} -gt 1 ]] || continue
    name=$(printf '%s' "$name" | sed 's/[][\.*^$+?(){}|/]/\\&/g')
    script+=";s/(^|[^[:alnum:]])$name([^[:alnum:]]|\$)/\1$to\2/g"
  done < <(
    printf '%s\n' "$work|WORK" "$PWD|CHECKOUT" "${HOME:-}|HOME" "$(id -un)|USER" \
      "$(hostname 2>/dev/null)|HOST" "$(hostname -f 2>/dev/null)|HOST" |
      awk '{ print length($0) "|" $0 }' | sort -rn | cut -d '|' -f 2-  # the longest first
  )
  sed -E "$script" | cut -c "1-$wide"
}

# A line for each argument.
say() { printf '%s\n' "$@" | hide >>"$output"; }

# section NAME COMMAND...: what a quick command prints, all of it.
section() {
  say "" "== $1"
  timeout 30 "${@:2}" 2>&1 </dev/null | hide | head -80 >>"$output"
}

# try NAME COMMAND...: one of the ten. The last lines of standard output and error.
try() {
  local name=$1 code began=$SECONDS
  shift
  count=$((count + 1))
  echo "$count of 10: $name ..." >&2
  timeout --kill-after=10 "$each" "$@" >"$work/log" 2>&1 </dev/null
  code=$?
  ((code == 0)) || failed=$((failed + 1))
  say "" "== $count. $name" "command: $*"
  say "exit code: $code$([[ $code != 124 ]] || echo " (longer than $each s)"), seconds: $((SECONDS - began))"
  tr '\r' '\n' <"$work/log" | hide | tail -n "$lines" | sed 's/^/  | /' >>"$output"
}

lite() { # lite NAME SETTINGS...
  local name=$1
  shift
  try "$name" "$python" run_lite.py "model=$model" "context.device_target=$device" \
    "output_dir=$work/outputs" "$@"
}

readonly toolkit=${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}
count=0 failed=0
say "ascend_smoke of $(git describe --always --dirty 2>/dev/null || echo lite-runner), device $device"
section "machine" uname -srm
section "packages" "$python" -c '
from importlib import metadata
import platform
print("python", platform.python_version())
for name in ("mindspore-lite-runner", "mindspore", "mindspore_lite", "mindformers", "numpy"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "-")'
section "CANN" cat "$toolkit"/version.cfg "$toolkit"/compiler/version.info
section "environment" sh -c 'env | grep -E "^(ASCEND|HCCL|MS_|GLOG|DEVICE_ID|RANK|LCCL|NPU|CANN)" | sort'
section "npu-smi" npu-smi info
section "processor" "$python" -c 'from lite_runner.system import environment; print(environment.ascend_soc())'

greedy=('predict_data=[The capital of France is,I love Beijing]' max_new_tokens=8 stream=false)
half=model.model_config.compute_dtype=float16
lite "predict in float32: the plain operators" "${greedy[@]}" model.model_config.compute_dtype=float32
lite "predict in float16: the fused operators" "${greedy[@]}" "$half"
MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST=PagedAttention \
  lite "the same without MindSpore's own PagedAttention" "${greedy[@]}" "$half"
lite "quantized weights" "${greedy[@]}" quant=a16w8
lite "two ranks" "${greedy[@]}" parallel=tp2
lite "export a pair" run_mode=export export.layout=static_pair "export_output=$work/pair" \
  predict_batch_size=2 infer.infer_seq_length=64
lite "run the pair with MindSpore" "${greedy[@]}" backend=mslite "infer.model_dir=$work/pair" \
  engine=graph-cell
lite "run the pair with MindSpore Lite and the processor's GE options" "${greedy[@]}" \
  backend=mslite "infer.model_dir=$work/pair" engine=lite
lite "a pair that chooses the token, with MindSpore Lite" "${greedy[@]}" backend=mslite \
  engine=lite export.layout=static_pair model.model_config.is_sample_acceleration=true
try "MindSpore and MindSpore Lite in one process" "$python" -c \
  'import mindspore, mindspore_lite; print(mindspore.__version__, mindspore_lite.__version__)'

say "" "== $((count - failed)) of $count ended with 0"
echo "$((count - failed)) of $count ended with 0; send back $output" >&2
