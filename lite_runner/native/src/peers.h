// The ranks that share a model, each with a part of every layer: what they compute of the same
// numbers meets in memory that all of them map, or between machines through a collective.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lite_runner {

struct ExchangeTime;

int64_t nanoseconds();  // on the clock that is steady

// They take turns together. In a turn each rank writes to its own place, meets the others and then
// reads theirs. There are two places a rank, by turns: one is written while others still read the
// one before, and nobody writes that one again before all have met once more.
class Peers {
 public:
  static constexpr int64_t kPlace = int64_t{1} << 18;  // numbers of a place

  // The collective: puts the first `count` numbers of each rank's own place to `places` + its rank *
  // `place`, where those of this rank are already. 0: done.
  using AllGather = int (*)(float* places, int64_t place, int64_t count);

  // Bytes of the memory, which is zeros at first.
  static size_t bytes(int64_t size);

  // `file`: an open file description of this rank alone, of a file that all have open. Its lock says
  // that this rank is there, until it is closed here or the process ends. A rank that waits for one
  // that is not gives up after `patience` ms, in which whoever started them may end it.
  Peers(void* memory, int file, int64_t rank, int64_t size, int64_t patience);
  // The same, with the file mapped to memory; nullptr: the system does not allow it. With
  // `all_gather` the file is this rank's alone.
  static Peers* open(int file, int64_t rank, int64_t size, int64_t patience,
                     AllGather all_gather = nullptr);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  int64_t lost() const { return lost_; }  // the rank that has ended; -1: none

  float* own() { return place(turn_, rank_); }
  // Waits until all have written the first `count` numbers; false: one of them has ended, and nothing
  // can be read.
  bool meet(int64_t count);
  // The numbers that a rank has written before all met.
  const float* of(int64_t rank) { return place(turn_ - 1, rank); }

  // The exchanges from now on are timed here; nullptr: not recorded.
  void time(ExchangeTime* time) { time_ = time; }

  // An exchange of `count` numbers, from its making to its end.
  class Exchange {
   public:
    Exchange(Peers& peers, int64_t count);
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

   private:
    ExchangeTime* time_;
  };

 private:
  struct alignas(64) Line {
    std::atomic<uint32_t> turn;      // that the rank has written
    std::atomic<uint32_t> sleepers;  // that wait for it
  };

  float* place(uint32_t turn, int64_t rank) {
    return places_ + (turn % 2 * size_ + rank) * kPlace;
  }
  bool wait_for_all();
  bool wait(int64_t rank);
  bool is_there(int64_t rank) const;

  Line* lines_;
  float* places_;
  int file_;
  AllGather all_gather_ = nullptr;
  ExchangeTime* time_ = nullptr;
  int64_t rank_, size_, patience_, lost_ = -1;
  uint32_t turn_ = 0;
  bool locked_, mapped_ = false;
};

}  // namespace lite_runner
