# Sourced by what builds llama.cpp. GCC takes the configuration of AMX's tiles for a dead store, and
# without these flags llama.cpp ends by an illegal instruction (ggml-org/llama.cpp#26954).
# shellcheck shell=bash
export CFLAGS="-fno-tree-dse -fno-dse" CXXFLAGS="-fno-tree-dse -fno-dse"
