// Memory that operators need while they run. They run one at a time, so it is kept for the next.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lite_runner {

enum Scratch {
  kNormed,
  kFused,
  kMixed,
  kHidden,
  kAdded,
  kBlockInput,
  kShorts,
  kBytes,
  kScales,
  kTotals,
  kWide,
  kPanels,
  kItems,
  kPartial,
  kLowered,
  kRouted,
  kGathered,
  kOrdered,
  kExpertOut,
  kSide,
  kScratches
};

// At least `bytes` bytes at a multiple of 64, as they were left by the last use of this one.
void* scratch_bytes(Scratch which, size_t bytes);

template <class T>
T* scratch(Scratch which, int64_t count) {
  return static_cast<T*>(scratch_bytes(which, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace lite_runner
