// The operators in vectors of 4 floats.
#include "instruction_set.h"

#define WIDTH 4
#define BYTE_PRODUCTS 0
namespace lite_runner {
namespace portable {
#include "kernels.inl"
}  // namespace portable

const Kernels kPortable = portable::kernels("portable");

}  // namespace lite_runner

