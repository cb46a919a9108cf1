// The operators in vectors of 4 floats.
#include "instruction_set.h"


#define WIDTH 4
namespace lite_runner {
namespace portable {
#include "simd.inl"
#include "linear.inl"
#include "adapters.inl"
#include "attention.inl"
#include "layers.inl"
}  // namespace portable

const Kernels kPortable{"portable", portable::embedding, portable::attention, portable::feed_forward, portable::head, portable::plain_linear,
    portable::widen};

}  // namespace lite_runner

