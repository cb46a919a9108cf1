#!/usr/bin/env bash
# Writes requirements/lock.txt anew from the bounds of setup.cfg: what builds packages, the packages
# of requirements/core.txt, of charts and chat, MindSpore, those of tests too; each with the hashes of all its files.
# It is resolved for the oldest Python accepted, so that one list of versions serves all of them.
#
# The hashes of the other environments are written anew for the versions that their files name:
# change a version there, then run this. torch of peers has none: it is another file on each index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check uv==0.6.17
readonly lock=$work/lock.txt

add() { # a comment, arguments of uv: the packages that are not in the lock yet
  local pin above=()
  sed -n 's/^\([^ ]*==[^ ]*\).*/\1/p' "$lock" >"$work/above"
  while IFS= read -r pin; do above+=(--no-emit-package "${pin%%==*}"); done <"$work/above"
  echo "# $1" >>"$lock"
  "$work/venv/bin/uv" pip compile --quiet --python-version 3.10 --generate-hashes --no-header \
    --no-annotate --constraint "$work/above" "${above[@]}" "${@:2}" --output-file "$work/added"
  grep -v -e '^#' -e '^$' "$work/added" >>"$lock"
}

echo "# Made by \`make lock\` from setup.cfg: every package that is tested, and its files' SHA-256." >"$lock"
echo 'setuptools >= 77' >"$work/build.in"
add build "$work/build.in"
add core requirements/core.txt
# What charts and chat add is told apart from what MindSpore does, which a first run goes without.
printf '%s\n' "matplotlib >= 3.8" "prompt_toolkit >= 3.0.40" >"$work/extras.in"
add extras requirements/core.txt "$work/extras.in"
add mindspore setup.cfg --extra bench --extra chat --extra serve
add tests setup.cfg --extra bench --extra chat --extra serve --extra dev

hashes() { # an environment, its Python: adds the hashes of all files of each version
  local file=requirements/$1.txt
  sed '/^#/!d' "$file" >"$work/hashed"
  "$work/venv/bin/uv" pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
    --python-version "$2" "$file" --output-file "$work/pins"
  cat "$work/pins" >>"$work/hashed"
  cp "$work/hashed" "$file"
}

hashes clients 3.11
hashes cluster 3.10
hashes docs 3.11.5
hashes mindformers 3.9
hashes mindformers-1.9 3.11
hashes peers 3.11
sed -i '/^torch==/,/[^\\]$/{/^torch/!d;s/ \\$//}' requirements/peers.txt
hashes ray 3.11
mv "$lock" requirements/lock.txt
