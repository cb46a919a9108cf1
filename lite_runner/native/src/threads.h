// A pool of threads that share the work of one operator at a time.
#pragma once
#include <sched.h>

#include <cstdint>

namespace lite_runner {

// Threads that work, the caller's own among them; takes effect at the next parallel_for.
void set_threads(int count);
int threads();

using Task = void (*)(void* context, int64_t item, int thread);
// Calls task(context, item, thread) for every item in 0..items-1, on any thread (0..threads()-1).
void run_tasks(int64_t items, Task task, void* context);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins this often before it lets other processes have the core.
constexpr int kSpins = 2000;

// Waits for another thread: until there() is true.
template <class There>
void wait_until(There&& there) {
  for (int spins = 0; !there(); ++spins)
    spins < kSpins ? pause_cpu() : static_cast<void>(sched_yield());
}

template <class Body>
void parallel_for(int64_t items, Body&& body) {
  if (items == 1) return body(int64_t{0}, 0);
  run_tasks(
      items,
      [](void* context, int64_t item, int thread) { (*static_cast<Body*>(context))(item, thread); },
      &body);
}

// The same, of which a thread takes `each` at a time, neighbours.
template <class Body>
void parallel_for_some(int64_t items, int64_t each, Body&& body) {
  parallel_for((items + each - 1) / each, [&](int64_t some, int thread) {
    const int64_t end = (some + 1) * each < items ? (some + 1) * each : items;
    for (int64_t item = some * each; item < end; ++item) body(item, thread);
  });
}

constexpr int64_t kRowsAtOnce = 4;  // sharing costs more than a row does

// The same for rows.
template <class Body>
void over_rows(int64_t count, Body&& body, int64_t each = kRowsAtOnce) {
  parallel_for_some(count, each, [&](int64_t row, int) { body(row); });
}

}  // namespace lite_runner
