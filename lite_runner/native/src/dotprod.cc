// The operators in vectors of 4 floats, with ARM's products of bytes.
#include "instruction_set.h"

#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(                                              \
    __attribute__((target("dotprod"))), \
    apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define WIDTH 4
#define BYTE_PRODUCTS 1
namespace lite_runner {
namespace dotprod {
#include "kernels.inl"
}  // namespace dotprod
#if defined(__clang__)
#pragma clang attribute pop
#endif

const Kernels kDotprod = dotprod::kernels("dotprod");

}  // namespace lite_runner
#endif
