#!/usr/bin/env bash
# Runs a command on the cards of a rank table, called as MindFormers' script of this name:
#   run_dist_gen.sh EXECUTE_ORDER RANK_TABLE_PATH DEVICE_RANGE RANK_SIZE
# EXECUTE_ORDER is the command in one word, "run_lite.py --config ... --run_mode predict", or that of
# a Python script ("python generate_custom.py ...": ours, unless there is such a file), whose
# `import mindformers` means lite_runner. Where INPUT_DATA is set, it is the prompt (--input_data of a
# script). DEVICE_RANGE '[0,2]' are the ranks, or the devices, 0 and 1.
# It stays until the job is done and ends with the job's exit code.
set -euo pipefail

if (($# != 4)); then
  echo "usage: run_dist_gen.sh EXECUTE_ORDER RANK_TABLE_PATH DEVICE_RANGE RANK_SIZE" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here
# shellcheck source=scripts/own_python.sh
source "$here/own_python.sh"

node=$("$python" "$here/table_node.py" "$2" "$3" "$4")
read -r workers local_workers master node_rank devices <<<"$node"

table=$(realpath -- "$2")
case $1 in
  *run_lite.py* | *run_mindformer.py* | *run_mindformers.py*)
    words=(--use_parallel True "parallel.rank_table_file=$table")
    [[ -z ${INPUT_DATA:-} ]] || words+=(--predict_data "$INPUT_DATA")
    ;;
  *) # a script over Python's interface, as MindFormers' generate_custom.py
    export RANK_TABLE_FILE=$table
    # msrun numbers the devices of its ranks from 0, among those that they see.
    [[ -z $devices ]] || export ASCEND_RT_VISIBLE_DEVICES=$devices
    words=()
    [[ -z ${INPUT_DATA:-} ]] || words+=(--input_data "$INPUT_DATA")
    ;;
esac
# Not printf %q: in some locales it writes $'\344', which only bash reads.
command="$1 $("$python" -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' ${words[@]+"${words[@]}"})"

if ((workers == local_workers)); then
  exec "$here/msrun_launcher.sh" "$command" "$workers"
fi
exec "$here/msrun_launcher.sh" "$command" "$workers" "$local_workers" "$master" 8118 "$node_rank" \
  output/msrun_log True 7200
