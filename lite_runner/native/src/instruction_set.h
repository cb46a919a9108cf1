// Included by avx512.cc, avx2.cc and the others before they choose their instructions.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>
#include <cstdint>
#include <atomic>
#include <type_traits>
#include <utility>

#include "layers.h"
#include "peers.h"
#include "scratch.h"
#include "threads.h"
#include "training.h"

namespace lite_runner {
constexpr int64_t kMostDim = 1024;  // of a head
}  // namespace lite_runner
