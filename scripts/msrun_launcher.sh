#!/usr/bin/env bash
# Runs a command on several cards, called as MindFormers' script of this name:
#   msrun_launcher.sh COMMAND                                                     on 8 cards
#   msrun_launcher.sh COMMAND WORKER_NUM
#   msrun_launcher.sh COMMAND WORKER_NUM MASTER_PORT LOG_DIR JOIN TIMEOUT
#   msrun_launcher.sh COMMAND WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR \
#                     JOIN TIMEOUT                                     once on each machine
# COMMAND is one word of the shell, as in "run_lite.py predict_data='I love Beijing, because'";
# run_lite.py and run_mindformer.py in it mean those beside scripts/. Another Python script is started
# with msrun, and `import mindformers` in it means lite_runner, as by python -m lite_runner.mindformers.
# `python` means the project's own (.venv), unless there is none. It stays until the job is done and
# ends with the job's exit code, unless JOIN is False. TIMEOUT are the seconds that the cards have to
# find each other.
# MF_LOG_SUFFIX is put behind LOG_DIR; PLOG_REDIRECT_TO_OUTPUT=True puts Ascend's logs in output/.
set -euo pipefail

usage() {
  echo "error: $1; usage: msrun_launcher.sh COMMAND [WORKER_NUM [MASTER_PORT LOG_DIR JOIN TIMEOUT]]" \
    "or COMMAND WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR JOIN TIMEOUT" >&2
  exit 2
}

readonly suffix=${MF_LOG_SUFFIX:+_$MF_LOG_SUFFIX}
workers=${2:-8}
settings=()
log_dir=${suffix:+output/msrun_log}
join=True
case $# in
  1 | 2) ;;
  6)
    settings+=("parallel.master_port=$3" "parallel.rendezvous_timeout=$6")
    log_dir=$4 join=$5
    ;;
  9)
    settings+=("parallel.local_worker_num=$3" "parallel.master_addr=$4" "parallel.master_port=$5")
    settings+=("parallel.node_rank=$6" "parallel.rendezvous_timeout=$9")
    log_dir=$7 join=$8
    # On one machine MindFormers' script has no use for the rank of a machine.
    [[ $2 != "$3" ]] || settings+=(parallel.node_rank=0)
    ;;
  *) usage "got $# arguments, expected 1, 2, 6 or 9" ;;
esac
[[ $workers =~ ^[1-9][0-9]{0,5}$ ]] || usage "WORKER_NUM: got '$workers', expected a number from 1"
[[ $join =~ ^(True|true|False|false)$ ]] || usage "JOIN: got '$join', expected True or False"

redirect=${PLOG_REDIRECT_TO_OUTPUT:-${PLOG_REDICT_TO_OUTPUT:-False}} # both spellings are in use
if [[ $redirect != False ]]; then
  export ASCEND_PROCESS_LOG_PATH=$PWD/output/plog$suffix
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/own_python.sh
source "$here/own_python.sh"
exec "$python" "$here/msrun_launcher.py" "$1" "$workers" "$join" "${log_dir:+$log_dir$suffix}" \
  ${settings[@]+"${settings[@]}"}
