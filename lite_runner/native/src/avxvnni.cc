// The operators in vectors of 8 floats, with products of bytes and of pairs by one instruction.
#include "instruction_set.h"

#if AVX_VNNI
#if defined(__clang__)
#pragma clang attribute push(                                              \
    __attribute__((target("avx2,fma,f16c,avxvnni"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define WIDTH 8
#define BYTE_PRODUCTS 1
namespace lite_runner {
namespace avxvnni {
#include "kernels.inl"
}  // namespace avxvnni
#if defined(__clang__)
#pragma clang attribute pop
#endif

const Kernels kAvxVnni = avxvnni::kernels("avxvnni");

}  // namespace lite_runner
#endif
