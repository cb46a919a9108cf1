// The operators in vectors of 16 floats.
#include "instruction_set.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                              \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define WIDTH 16
#define BYTE_PRODUCTS 1
#define BFLOAT16_PRODUCTS (__clang_major__ >= 9 || __GNUC__ >= 10)
namespace lite_runner {
namespace avx512 {
#include "kernels.inl"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#endif

const Kernels kAvx512 = avx512::kernels("avx512");
#if AMX
const Kernels kAmx = avx512::kernels("amx");  // the same, but see AmxTiles
bool amx_works() {
  using namespace avx512;
  return amx_multiplies<TileProduct::kUnsigned>() && amx_multiplies<TileProduct::kSigned>() &&
         amx_multiplies_bfloat16();
}
#endif

}  // namespace lite_runner
#endif
