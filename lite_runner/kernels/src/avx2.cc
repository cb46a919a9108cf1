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
namespace lite_runner {
namespace avx2 {
#include "simd.inl"
#include "linear.inl"
#include "adapters.inl"
#include "attention.inl"
#include "layers.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#endif

const Kernels kAvx2{"avx2", avx2::embedding, avx2::attention, avx2::feed_forward, avx2::head, avx2::plain_linear,
    avx2::widen};

}  // namespace lite_runner
#endif
