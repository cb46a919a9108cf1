// The operators in vectors of 4 floats; x86-64 takes those of reproducible.cc.
#include "instruction_set.h"

#if !defined(__x86_64__)
#define WIDTH 4
#define BYTE_PRODUCTS 0
namespace lite_runner {
namespace portable {
#include "kernels.inl"
}  // namespace portable

const Kernels kPortable = portable::kernels("portable");

}  // namespace lite_runner
#endif
