# Sourced by the launch scripts: `python` is that of the project's own environment, which make run
# sets up, or where there is none the first on PATH.
# shellcheck shell=bash disable=SC2034
python=${BASH_SOURCE[0]%/*}/../.venv/bin/python
if [[ ! -x $python || -e ${python%/bin/python}/.unfinished ]]; then
  python=python3
fi
