#!/usr/bin/env bash
# Runs a config on the cards of a rank table, called as MindFormers' script of this name, once on
# each machine:
#   run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_STATUS [RANK_SIZE]
#   run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE predict [RANK_SIZE] PREDICT_DATA
# DEVICE_RANGE are the ranks of this machine, '[0,8]' for 0 to 7, or the devices of the only one;
# RANK_SIZE those of all machines. A number alone is RANK_SIZE.
# It stays until the job is done and ends with the job's exit code.
set -euo pipefail

if (($# < 4 || $# > 6)); then
  echo "usage: run_distribute.sh RANK_TABLE_FILE CONFIG_PATH DEVICE_RANGE RUN_STATUS" \
    "[RANK_SIZE [PREDICT_DATA]]" >&2
  exit 2
fi
if [[ $# == 5 && $4 == predict && ! $5 =~ ^[0-9]*$ ]]; then
  set -- "${@:1:4}" "" "$5"
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
# shellcheck source=scripts/own_python.sh
source "$here/own_python.sh"

words=("${here%/*}/run_mindformer.py" --config "$(realpath -m -- "$2")" --run_mode "$4")
(($# < 6)) || words+=(--predict_data "$6")
# Not printf %q: in some locales it writes $'\344', which only bash reads.
command=$("$python" -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "${words[@]}")
unset INPUT_DATA # run_dist_gen.sh would add it
exec "$here/run_dist_gen.sh" "$command" "$1" "$3" "${5:-}"
