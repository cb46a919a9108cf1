#!/usr/bin/env bash
# Builds llama.cpp's server, build/llama.cpp/bin/llama-server, from the source that the package
# llama-cpp-python of requirements/peers.txt has; does nothing where that version is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=$(sed -n 's/^llama-cpp-python==\([0-9.]*\).*/\1/p' requirements/peers.txt)
readonly version folder=build/llama.cpp stamp=build/llama.cpp/.built
[[ ! -f $stamp || $(<"$stamp") != "$version" ]] || exit 0

fail() {
  echo "error: $1" >&2
  exit 3
}

for tool in cmake c++; do
  command -v "$tool" >/dev/null || fail "llama.cpp's server is built with $tool, which is not on PATH"
done
echo "llama-server: building it once, in 3 to 10 minutes (log: $folder/build.log)" >&2
rm -rf "$folder"
mkdir -p "$folder/source"
if ! {
  .venv-bench/bin/python -m pip download --no-input --no-deps \
    --no-binary llama-cpp-python --dest "$folder" "llama-cpp-python==$version"
  tar -xf "$folder"/llama_cpp_python-*.tar.gz -C "$folder/source" --strip-components 1
  # shellcheck source=scripts/llama_flags.sh
  source scripts/llama_flags.sh
  # As setup.sh builds the library: for this machine's processor. The page it could serve is left out.
  cmake -S "$folder/source/vendor/llama.cpp" -B "$folder" -DCMAKE_BUILD_TYPE=Release \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF
  cmake --build "$folder" --parallel "$(nproc)" --target llama-server
} >"$folder/build.log" 2>&1; then
  tail -n 15 "$folder/build.log" >&2
  fail "building llama.cpp's server failed; the end of $folder/build.log stands above"
fi
echo "$version" >"$stamp"
