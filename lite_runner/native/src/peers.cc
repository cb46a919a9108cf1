#include "peers.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>
#include <new>

#include "layers.h"
#include "threads.h"

namespace lite_runner {
namespace {

using Clock = std::chrono::steady_clock;

// A rank that waits lets others have the core so long before it sleeps: longer than ranks with a
// core each are apart. Where there are fewer cores this is over as soon as another has had one.
constexpr std::chrono::microseconds kYields{300};
constexpr long kNapNs = 100 * 1000 * 1000;

struct flock byte_of(int64_t rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* time) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, time, nullptr, 0);
}

}  // namespace

size_t Peers::bytes(int64_t size) {
  return static_cast<size_t>(size) * (sizeof(Line) + 2 * kPlace * sizeof(float));
}

Peers::Peers(void* memory, int file, int64_t rank, int64_t size, int64_t patience)
    : lines_(static_cast<Line*>(memory)),
      places_(reinterpret_cast<float*>(lines_ + size)),
      file_(file),
      rank_(rank),
      size_(size),
      patience_(patience) {
  struct flock lock = byte_of(rank);
  locked_ = fcntl(file_, F_OFD_SETLK, &lock) == 0;
}

Peers* Peers::open(int file, int64_t rank, int64_t size, int64_t patience, AllGather all_gather) {
  void* memory = mmap(nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  Peers* peers = new (std::nothrow) Peers(memory, file, rank, size, patience);
  if (!peers) {
    munmap(memory, bytes(size));
    close(file);
    return nullptr;
  }
  peers->mapped_ = true;
  peers->all_gather_ = all_gather;
  if (peers->locked_) return peers;
  delete peers;
  return nullptr;
}

Peers::~Peers() {
  close(file_);
  if (mapped_) munmap(lines_, bytes(size_));
}

int64_t nanoseconds() {
  const auto since = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

Peers::Exchange::Exchange(Peers& peers, int64_t count) : time_(peers.time_) {
  if (!time_) return;
  time_->began = nanoseconds();
  time_->last_waited = 0;
  time_->bytes += 4 * count;
}

Peers::Exchange::~Exchange() {
  if (!time_) return;
  time_->ended = nanoseconds();
  time_->spent += time_->ended - time_->began;
  time_->waited += time_->last_waited;
  ++time_->calls;
}

bool Peers::meet(int64_t count) {
  if (lost_ >= 0) return false;
  ++turn_;
  if (all_gather_) {
    if (all_gather_(place(turn_ - 1, 0), kPlace, count) == 0) return true;
    lost_ = rank_;
    return false;
  }
  Line& own = lines_[rank_];
  // seq_cst on both sides: either a sleeper sees the new turn, or it is seen asleep here.
  own.turn.store(turn_);
  if (own.sleepers.load() > 0) futex(own.turn, FUTEX_WAKE, INT_MAX, nullptr);
  if (!time_) return wait_for_all();
  const int64_t began = nanoseconds();
  const bool all = wait_for_all();
  time_->last_waited += nanoseconds() - began;
  return all;
}

bool Peers::wait_for_all() {
  for (int64_t rank = 0; rank < size_; ++rank)
    if (rank != rank_ && !wait(rank)) return false;
  return true;
}

bool Peers::wait(int64_t rank) {
  Line& line = lines_[rank];
  // A rank is ahead by one turn at most; turns start over after the last.
  const auto ahead = [&](uint32_t turn) { return static_cast<int32_t>(turn - turn_) >= 0; };
  const auto there = [&] { return ahead(line.turn.load(std::memory_order_acquire)); };
  for (int spins = 0; spins < kSpins; ++spins) {
    if (there()) return true;
    pause_cpu();
  }
  auto seen = Clock::now();  // that the rank is alive
  for (const auto end = seen + kYields; Clock::now() < end; sched_yield())
    if (there()) return true;
  while (!there()) {
    line.sleepers.fetch_add(1);
    const uint32_t turn = line.turn.load();
    const timespec nap{0, kNapNs};
    if (!ahead(turn)) futex(line.turn, FUTEX_WAIT, turn, &nap);
    line.sleepers.fetch_sub(1);
    if (is_there(rank)) {
      seen = Clock::now();
    } else if (Clock::now() - seen > std::chrono::milliseconds(patience_) && !there()) {
      lost_ = rank;
      return false;
    }
  }
  return true;
}

bool Peers::is_there(int64_t rank) const {
  struct flock lock = byte_of(rank);
  return fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace lite_runner
