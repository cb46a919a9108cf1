// All operators in vectors of WIDTH floats, once for each set of instructions, in its namespace.
#include "simd.inl"
#include "numbers.inl"
#include "amx.inl"
#include "rows.inl"
#include "integers.inl"
#include "linear.inl"
#include "bfloat16.inl"
#include "blocks.inl"
#include "gguf.inl"
#include "adapters.inl"
#include "attention.inl"
#include "layers.inl"
#include "experts.inl"
#include "recurrent.inl"
namespace training {
#include "training.inl"
}  // namespace training

constexpr Kernels kernels(const char* name) {
  return {name, embedding, attention,    feed_forward, experts,     recurrent,
          join, head,      plain_linear, widen,        pack_blocks, &training::kTraining};
}
