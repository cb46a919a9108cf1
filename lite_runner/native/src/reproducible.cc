// The operators in vectors of 4 floats, each product rounded before it is added (setup.py compiles
// this file without contraction): the same bits on every processor.
#include "instruction_set.h"

#define WIDTH 4
#define BYTE_PRODUCTS 0
namespace lite_runner {
namespace reproducible {
#include "kernels.inl"
#include "search.inl"
}  // namespace reproducible

const Kernels kReproducible = reproducible::kernels("reproducible");
#if defined(__x86_64__)
// Nothing is contracted without FMA, which plain x86-64 does not have: the same code.
const Kernels kPortable = reproducible::kernels("portable");
#endif

}  // namespace lite_runner

using namespace lite_runner::reproducible;

#pragma GCC visibility push(default)
extern "C" {

// Scales of groups of `size` values, 16 or 32, and of 32 with levels 0 their negated minimums; see
// search.inl. It may be called from several threads at once.
int lite_runner_search(const float* values, const float* errors, int64_t groups, int64_t size, int64_t levels,
                       const float* firsts, int64_t count, float* scales, float* minimums) {
  if (!levels)
    scales_and_minimums<32>(values, errors, groups, firsts, count, scales, minimums);
  else if (size == 32)
    symmetric_scales<32>(values, errors, groups, levels, firsts, count, scales);
  else
    symmetric_scales<16>(values, errors, groups, levels, firsts, count, scales);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
