#!/usr/bin/env bash
# Runs a command on several cards, called as MindFormers' script of this name:
#   msrun_launcher.sh COMMAND [WORKER_NUM [...]]
# COMMAND is one word of the shell, as in "run_lite.py predict_data='I love Beijing, because'".
# More than one worker is not available yet; with one, the command runs as it stands.
set -euo pipefail

if (($# < 1)); then
  echo "usage: msrun_launcher.sh COMMAND [WORKER_NUM [...]]" >&2
  exit 2
fi
readonly workers=${2:-8}
if [[ $workers != 1 ]]; then
  echo "error: launching $workers workers is not available yet" >&2
  echo "  -> run on one: msrun_launcher.sh COMMAND 1" >&2
  exit 2
fi

# Split into words with quotes obeyed and nothing expanded: no eval. MindFormers' commands may
# leave out the interpreter.
exec python3 -c '
import os, shlex, sys
try:
    command = shlex.split(sys.argv[1])
    if command and command[0].endswith(".py"):
        command.insert(0, sys.executable)
    if not command:
        raise ValueError("it is empty")
    os.execvp(command[0], command)
except (OSError, ValueError) as error:
    print(f"error: the command {sys.argv[1]!r} cannot be run: {error}", file=sys.stderr)
    sys.exit(2)
' "$1"
