#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

// GCC 12 has a newer version of this function for a change that does not concern callers; by its
// first one the library loads with the libstdc++ of older systems too.
#if defined(__GLIBCXX__) && defined(__linux__)
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif

namespace lite_runner {
namespace {

// A worker without work spins this long before it sleeps: longer than operators of
// one step are apart, short enough that other processes get the core.
constexpr int kYields = 50;

// The job, its number of items and the next one, in one word: a claim is valid or not
// whatever happens meanwhile, so that nobody waits for a worker that has no core to run on.
constexpr int kItemBits = 20;
constexpr uint64_t kItems = (uint64_t{1} << kItemBits) - 1;
constexpr uint64_t next_of(uint64_t word) { return word & kItems; }
constexpr uint64_t count_of(uint64_t word) { return word >> kItemBits & kItems; }

class Pool {
 public:
  explicit Pool(int count) {
    try {
      for (int index = 1; index < count; ++index)
        workers_.emplace_back([this, index] { work(index); });
    } catch (const std::exception&) {
      // The system gives no more threads, or no memory for one: those that there are do the work.
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(int64_t items, Task task, void* context) {
    task_ = task;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    uint64_t job = (word_.load(std::memory_order_relaxed) >> 2 * kItemBits) + 1;
    // seq_cst on both sides: either the sleeper sees the new word, or it is seen asleep here.
    word_.store(job << 2 * kItemBits | static_cast<uint64_t>(items) << kItemBits);
    if (asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    take_part(0);
    wait_until([&] { return done_.load(std::memory_order_acquire) == items; });
  }

 private:
  bool has_work() const {
    uint64_t word = word_.load();
    return next_of(word) < count_of(word);
  }

  void take_part(int thread) {
    while (has_work()) {
      uint64_t word = word_.fetch_add(1, std::memory_order_acq_rel);
      if (next_of(word) >= count_of(word)) return;
      task_(context_, static_cast<int64_t>(next_of(word)), thread);
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  void work(int thread) {
    while (!stopping_) {
      take_part(thread);
      int idle = 0;
      while (!has_work() && idle < kSpins + kYields) {
        idle < kSpins ? pause_cpu() : static_cast<void>(sched_yield());
        ++idle;
      }
      if (has_work()) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      asleep_.fetch_add(1);
      wake_.wait(lock, [this] { return stopping_ || has_work(); });
      asleep_.fetch_sub(1);
    }
  }

  // Each on a line of cache of its own: they go between processors all the time.
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> stopping_{false};
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

int wanted = 1;
std::unique_ptr<Pool> pool;

// A fork copies no threads: the child starts with a pool of its own.
void forget_pool() { pool.release(); }

}  // namespace

void set_threads(int count) { wanted = count < 1 ? 1 : count; }

int threads() { return wanted; }

void run_tasks(int64_t items, Task task, void* context) {
  if (wanted == 1 || items <= 1) {
    for (int64_t item = 0; item < items; ++item) task(context, item, 0);
    return;
  }
  if (!pool || pool->size() != wanted) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    static_cast<void>(registered);
    pool = nullptr;
    pool = std::make_unique<Pool>(wanted);
    wanted = pool->size();
  }
  pool->run(items, task, context);
}

}  // namespace lite_runner
