// The operators in vectors of 8 floats.
#include "instruction_set.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                              \
    __attribute__((target("avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define WIDTH 8
#define BYTE_PRODUCTS 0
namespace lite_runner {
namespace avx2 {
#include "kernels.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#endif

const Kernels kAvx2 = avx2::kernels("avx2");

}  // namespace lite_runner
#endif
