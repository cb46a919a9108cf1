#!/usr/bin/env bash
# Makes the environment of `make`, with exactly the packages of requirements/; does nothing
# when its stamp fits. PYTHON=... chooses the interpreter, PYTHON37=... that of lite, PYTHON39=...
# that of mindformers.
#   scripts/setup.sh run           .venv to run jobs; without MindSpore, four fifths of what there is to
#                                  fetch, but on a machine with Ascend's devices
#   scripts/setup.sh mindspore     .venv with MindSpore too
#   scripts/setup.sh dev           .venv to run the tests too
#   scripts/setup.sh peers         .venv-bench with torch, transformers and llama.cpp, to compare
#   scripts/setup.sh clients       .venv-clients with lm-eval and LangChain, which the tests of the
#                                  server speak through
#   scripts/setup.sh lite          .venv-lite with MindSpore Lite, for the offline engine; with
#                                  --optional, a machine that has no Python 3.7 goes without it
#   scripts/setup.sh mindformers   .venv-mindformers with MindFormers 1.0.2, for
#                                  backend=mindformers and to compare with; --optional as of lite
#   scripts/setup.sh mindformers-1.9  .venv-mindformers-1.9 with MindFormers 1.9.0, for the same;
#                                  beside .venv, whose packages it sees
#   scripts/setup.sh docs          .venv-docs with mkdocs, for the documentation site
#   scripts/setup.sh cluster       .venv-cluster with launchers of Hydra's; beside .venv, whose
#                                  packages it sees
#   scripts/setup.sh ray           .venv-ray with Ray Serve and Hydra's launcher on Ray, to test both; beside .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly target=${1:?usage: scripts/setup.sh run|mindspore|dev|peers|clients|docs|lite|mindformers|mindformers-1.9|cluster|ray [--optional]}
readonly optional=${2:-}
old="" product="" again="" # the one old Python that an environment needs, for what, made by what
readonly ascend=${ASCEND_DEVICE:-/dev/davinci_manager} # which the driver makes
wish=${PYTHON:-} # of lite and mindformers another one: make test PYTHON=... means .venv
case $target in
  run)
    venv=.venv lock=requirements/lock.txt above=mindspore supported="3.11 3.12 3.10"
    [[ ! -e $ascend ]] || above=tests
    ;;
  mindspore) venv=.venv lock=requirements/lock.txt above=tests supported="3.11 3.12 3.10" ;;
  dev) venv=.venv lock=requirements/lock.txt above=end supported="3.11 3.12 3.10" ;;
  peers) venv=.venv-bench lock=requirements/peers.txt supported="3.11 3.12" ;;
  clients) venv=.venv-clients lock=requirements/clients.txt supported="3.11 3.12" ;;
  docs) venv=.venv-docs lock=requirements/docs.txt supported="3.11 3.12" ;;
  lite)
    venv=.venv-lite lock=requirements/lite.txt old=3.7
    product="MindSpore Lite" again="make lite" wish=${PYTHON37:-}
    ;;
  mindformers)
    venv=.venv-mindformers lock=requirements/mindformers.txt old=3.9
    product="MindFormers 1.0.2" again="make mindformers" wish=${PYTHON39:-}
    ;;
  mindformers-1.9)
    venv=.venv-mindformers-1.9 lock=requirements/mindformers-1.9.txt
    supported="3.11 3.12 3.10" wish=.venv/bin/python
    ;;
  cluster)
    venv=.venv-cluster lock=requirements/cluster.txt supported="3.11 3.12 3.10" wish=.venv/bin/python
    ;;
  ray) venv=.venv-ray lock=requirements/ray.txt supported="3.11 3.12 3.10" wish=.venv/bin/python ;;
  *)
    echo "error: unknown set-up '$target'; there are run, mindspore, dev, peers, clients, docs, lite," \
      "mindformers, mindformers-1.9, cluster and ray" >&2
    exit 2
    ;;
esac
[[ -z $old ]] || supported=$old
readonly venv lock supported wish old product again
readonly own=.python$old # an old Python that this script got
readonly uv=uv==0.6.17   # the last one that has Python 3.7
readonly operators=lite_runner/native # what the set-up compiles
readonly unfinished=$venv/.unfinished # stands while packages change; left behind by a killed set-up

say() { echo "set-up: $*" >&2; }

fail() {
  echo "error: $1" >&2
  [[ -z ${2:-} ]] || echo "  -> $2" >&2
  exit 3
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

is_supported() { [[ " $supported " == *" $1 "* ]]; }

# What a ready environment depends on: this text is its stamp. The path, because an editable
# install and the scripts of an environment hold it.
stamp() {
  cat setup.cfg setup.py pyproject.toml "$lock" | cksum
  if [[ $venv == .venv ]]; then
    cat "$operators"/src/* | cksum
    ls dist/*.whl 2>/dev/null || true # may have them built
    echo "${CXX:-} $(command -v c++ g++ clang++)" # one that was missing may be there now
  fi
  "$venv/bin/python" -V
  pwd
}

is_ready() {
  [[ -f $venv/.ready-$target && "$(stamp 2>/dev/null)" == "$(<"$venv/.ready-$target")" ]] &&
    { [[ -z $wish ]] || [[ $(version_of "$wish") == $(version_of "$venv/bin/python") ]]; }
}

# Gets a Python of the old version into $own, from conda-forge or with uv, and sets `python` to it.
# Where there is none to be had, adds what was tried to `seen`.
get_python() {
  local tool helper log=$own/setup.log
  for tool in micromamba mamba conda; do
    command -v "$tool" >/dev/null || continue
    say "getting Python $old with $tool, into $own"
    mkdir -p "$own"
    python=$own/conda/bin/python$old
    if "$tool" create --yes --quiet --prefix "$own/conda" --channel conda-forge "python=$old" \
      >>"$log" 2>&1 && [[ $(version_of "$python") == "$old" ]]; then
      return
    fi
    seen+="; $tool got none (log: $log)"
  done
  for helper in .venv/bin/python python3; do
    "$helper" -m pip --version >/dev/null 2>&1 || continue
    say "getting Python $old with $uv, into $own"
    mkdir -p "$own"
    if "$helper" -m pip install --quiet --no-input --target "$own/uv" "$uv" >>"$log" 2>&1 &&
      "$own/uv/bin/uv" python install --install-dir "$own" "$old" >>"$log" 2>&1; then
      for python in "$own"/cpython-*/bin/"python$old"; do
        [[ $(version_of "$python") != "$old" ]] || return 0
      done
    fi
    seen+="; uv got none (log: $log)"
    break
  done
  return 1
}

# Sets `python` to the first interpreter that will do, or fails with one line.
find_python() {
  local candidate version seen=""
  local candidates=(python3.11 python3.12 python3.10 python3)
  # pyenv's python3.7 on PATH runs only where that version was chosen; its own place is sure.
  [[ -z $old ]] ||
    candidates=("python$old" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$old".*/bin/"python$old"
      "$own"/*/bin/"python$old")
  [[ -z $wish ]] || candidates=("$wish")
  for candidate in "${candidates[@]}"; do
    if ! version=$(version_of "$candidate"); then
      [[ -z $wish ]] || seen+="; $candidate does not run"
    elif ! is_supported "$version"; then
      seen+="; $candidate is $version"
    elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      seen+="; $candidate cannot make environments (install python$version-venv)"
    else
      python=$candidate
      return
    fi
  done
  if [[ -n $old ]]; then
    seen=${seen:-; none is on PATH, and pyenv has none}
    [[ -n $wish ]] || ! get_python || return 0
    local what="$product needs Python $old$seen"
    local remedy="pyenv install $old, or: conda create -n py${old/./} python=$old; then: \
$again, or: $again PYTHON${old/./}=/path/to/python$old"
    [[ -n $optional ]] || fail "$what" "$remedy"
    say "without $product: $what"
    say "  -> $remedy"
    exit 0
  fi
  fail "Python 3.11 is needed (accepted: ${supported// /, })${seen:-; none is on PATH}; \
choose one with: make run PYTHON=/path/to/python3.11"
}

# An environment that is whole and of the right Python is updated, any other made anew.
is_usable() {
  local version
  [[ ! -e $unfinished ]] && version=$(version_of "$venv/bin/python") && is_supported "$version" &&
    { [[ -z $wish ]] || [[ $version == $(version_of "$wish") ]]; } &&
    "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

# Takes away what shadows the editable package in .venv: a distribution of its former name, which is
# that of another project on the package index.
uninstall_namesake() {
  rm -rf lite_runner.egg-info
  "$venv/bin/python" -m pip uninstall --yes lite-runner >/dev/null 2>&1 || true
}

# Says how far pip is, as its log has it, until it is killed or the set-up is: in a line of the
# terminal that changes, elsewhere in a new line now and then.
follow() { # the log
  local every=20 text pins names
  [[ ! -t 2 ]] || every=1
  pins=$(grep -c '==' "$lock" || true)
  while sleep "$every" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    if names=$(grep '^Installing collected packages: ' "$1"); then
      text="writing $(tr -cd , <<<"$names," | wc -c) packages"
    elif grep -q '^Building wheel' "$1"; then
      text="building packages from source"
    else
      text="$(grep -c '^Collecting ' "$1" || true) of at most $pins packages fetched"
    fi
    if [[ -t 2 ]]; then
      printf '\r\e[Kset-up: %s, %s s' "$text" "$SECONDS" >&2
    else
      say "$text, $SECONDS s"
    fi
  done
}

install() { # arguments of pip install
  local log=$venv/setup.log follower failed=0
  : >"$log"
  follow "$log" 9>&- &
  follower=$!
  # Both names of the same setting, of older and newer pip, so that build tools are pinned too.
  PYTHONUNBUFFERED=1 PIP_CONSTRAINT=${pins-} PIP_BUILD_CONSTRAINT=${pins-} \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install --no-input --progress-bar off "$@" >"$log" 2>&1 || failed=1
  kill "$follower" 2>/dev/null || true
  wait "$follower" 2>/dev/null || true
  [[ ! -t 2 ]] || printf '\r\e[K' >&2
  if ((failed)); then
    tail -n 15 "$log" >&2
    ! grep -q 'DO NOT MATCH THE HASHES' "$log" ||
      fail "a package is not the file that was tested: its SHA-256 is another than in $lock" \
        "$venv/bin/python -m pip cache purge, then run make again; an index that still gives it is not to be trusted"
    fail "installing the packages failed; the end of $log stands above" \
      "check the network, pip's index settings and the free disk (5 GB), then run make again"
  fi
}

# Of packages in the lock, and of what builds those that come as source. The latter are taken by
# their versions alone: pip has hashes for all that it installs, or for nothing.
install_pinned() { # arguments of pip install
  local pins=$venv/versions.txt
  sed -n 's/^\([^# ][^ ]*==[^ ]*\).*/\1/p' "$lock" >"$pins"
  install "$@" --requirement "${locked:-$lock}"
}

install_above() { # a comment of the lock: the packages above it, all of them without one
  sed "/^# $1$/q" "$lock" >"$venv/locked.txt"
  install --require-hashes --no-build-isolation --use-pep517 --requirement "$venv/locked.txt"
}

! is_ready || exit 0

# One set-up at a time; the lock goes with the process. (flock is not on every system.)
if command -v flock >/dev/null; then
  exec 9<"$lock"
  if ! flock -n 9; then
    say "waiting for another set-up to finish"
    flock 9
    ! is_ready || exit 0
  fi
fi

if is_usable; then
  say "updating $venv"
else
  find_python
  say "making $venv with $("$python" -V) ($(command -v "$python")); this takes a minute or more"
  rm -rf "$venv"
  mkdir "$venv"
  touch "$unfinished" # before there is an interpreter that somebody could take
  "$python" -m venv "$venv" || fail "$python -m venv $venv failed, see above"
fi
touch "$unfinished"
rm -f "$venv"/.ready-*

say "installing the packages of $lock (log: $venv/setup.log)"
[[ $venv != .venv ]] || uninstall_namesake
[[ $target != peers ]] || say "llama.cpp is built from source once, in 3 to 10 minutes; pip keeps it"
case $target in
  run | mindspore | dev)
    install_above core # they build others
    install_above "$above"
    install --no-deps --no-build-isolation --editable .
    ;;
  lite) install --require-hashes --requirement "$lock" ;;
  peers) # torch is another file on each index, and may bring packages that are not pinned
    # shellcheck source=scripts/llama_flags.sh
    source scripts/llama_flags.sh
    locked=$venv/locked.txt
    sed '/^torch==/d' "$lock" >"$locked"
    install_pinned --require-hashes --no-deps
    sed -n '/^torch==/p' "$lock" >"$locked"
    install_pinned
    ;;
  clients | docs) install_pinned --require-hashes ;;
  # A run imports a tenth of what pip would compile here, in a minute.
  mindformers) install_pinned --require-hashes --no-compile ;;
  mindformers-1.9 | cluster | ray)
    place='import sysconfig; print(sysconfig.get_path("purelib"))'
    beside=$("$venv/bin/python" -c "$place")/beside.pth
    rm -f "$beside" # pip is to see the packages of this environment alone
    no_compile=$([[ $target == ray ]] || echo --no-compile)
    install_pinned --require-hashes --no-deps ${no_compile:+"$no_compile"}
    .venv/bin/python -c "$place" >"$beside"
    ;;
esac

# pip compiles what it installs, but no editable package. Where PYTHONDONTWRITEBYTECODE is set, as in
# many containers, every start would compile the modules anew, which takes a third of a second.
case $target in
  run | mindspore | dev) "$venv/bin/python" -m compileall -q lite_runner || true ;;
esac

stamp >"$venv/.ready-$target"
case $target in # what holds more serves for less
  dev) cp "$venv/.ready-dev" "$venv/.ready-mindspore" ;;&
  dev | mindspore) cp "$venv/.ready-$target" "$venv/.ready-run" ;;
esac
[[ $venv != .venv || -f $operators/operators.so ]] ||
  say "without the operators of $operators (python setup.py build_ext --inplace says why)"
rm "$unfinished"
say "done in $SECONDS s"
