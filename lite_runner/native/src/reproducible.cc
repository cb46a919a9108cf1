// The operators in vectors of 4 floats, each product rounded before it is added (setup.py compiles
// this file without contraction): the same bits on every processor.
#include "instruction_set.h"

#define WIDTH 4
#define BYTE_PRODUCTS 0
namespace lite_runner {
namespace reproducible {
#include "kernels.inl"
}  // namespace reproducible

const Kernels kReproducible = reproducible::kernels("reproducible");
#if defined(__x86_64__)
// Nothing is contracted without FMA, which x86-64 by itself has not: the same code.
const Kernels kPortable = reproducible::kernels("portable");
#endif

}  // namespace lite_runner
