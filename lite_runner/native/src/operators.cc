// The functions that Python calls through ctypes.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "layers.h"
#include "peers.h"
#include "scratch.h"
#include "threads.h"

namespace lite_runner {

constexpr size_t kHugePage = 2 << 20;

// Memory of megabytes is mapped in huge pages: a prompt's rows are more small pages than the processor
// remembers the addresses of.
void* scratch_bytes(Scratch which, size_t bytes) {
  static void* memory[kScratches];
  static size_t sizes[kScratches];
  if (sizes[which] < bytes) {
    std::free(memory[which]);
    const size_t page = bytes < kHugePage ? 64 : kHugePage;
    sizes[which] = (bytes + page - 1) / page * page;
    memory[which] = std::aligned_alloc(page, sizes[which]);
    if (!memory[which]) {
      sizes[which] = 0;
      throw std::bad_alloc();
    }
    if (page == kHugePage) madvise(memory[which], sizes[which], MADV_HUGEPAGE);
  }
  return memory[which];
}

bool Step::fits(const BoundModel& model, int64_t size, const int32_t* places) const {
  const int64_t rows = size - 2 - (model.prefix ? 5 : 4) * model.capacity;
  if (count < 0 || count > model.capacity) return false;
  if (wanted < 0 || wanted > rows || wanted > model.logit_rows) return false;
  const auto within = [](int64_t value, int64_t end) { return value >= 0 && value < end; };
  int64_t chunk = 0, near = 0;
  for (int32_t t = 0; t < count; ++t) {
    if (!within(token[t], model.vocabulary) || !within(slot[t], model.slots) ||
        !within(position[t], model.positions) || !within(rope[t], model.rope_rows))
      return false;
    if (model.prefix && !within(last_seen[t], model.positions)) return false;
    // Of the slot, those before are within, or before all windows.
    const bool first = t == 0 || slot[t] != slot[t - 1] || position[t] < position[t - 1];
    if (first) chunk = 0;
    const int32_t last = model.prefix ? std::max(position[t], last_seen[t]) : position[t];
    for (; chunk <= last / kChunk; ++chunk)
      if (!within(model.tables[slot[t] * model.table_width + chunk], model.blocks)) return false;
    if (model.window) {
      if (first) near = std::max<int64_t>(0, position[t] + 1 - model.window) / kChunk;
      for (; near <= last / kChunk; ++near)
        if (!within(model.window_tables[slot[t] * model.table_width + near], model.window_blocks))
          return false;
    }
    if (places && !within(places[t] + int64_t{1}, model.adapter_slots + 1)) return false;
  }
  for (int32_t i = 0; i < wanted; ++i)
    if (!within(row[i], count)) return false;
  return true;
}

namespace {

std::mutex one_at_a_time;

// The result of `work`, one at a time; -1 if out of memory. No exception may reach a caller in C.
template <class Work>
int guarded(Work&& work) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

// "used", or why AMX's tiles are not; empty if the processor has none. `emulated`: it and the system
// are not asked.
const char* state_of_amx([[maybe_unused]] bool emulated) {
#if AMX
  unsigned a = 0, b = 0, c = 0, d = 0;
  // AMX-BF16, AMX-TILE and AMX-INT8.
  const bool there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 13) == 13;
  if (!has_avx512() || !(there || emulated)) return "";
  // For all threads, of which each has memory for its tiles from the first use on.
  constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (!emulated && syscall(SYS_arch_prctl, kAskFor, kTileData) != 0) return "the system does not grant it";
  return amx_works() ? "used" : "its products are wrong";
#else
  return "";
#endif
}

const char* amx = state_of_amx(false);

// The kernels that this processor runs, the fastest first.
std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if AMX
  if (std::strcmp(amx, "used") == 0) found.push_back(&kAmx);
#endif
  if (has_avx512()) found.push_back(&kAvx512);
#if AVX_VNNI
  unsigned a = 0, b = 0, c = 0, d = 0;  // not every compiler's __builtin_cpu_supports has avxvnni
  if (avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1)) found.push_back(&kAvxVnni);
#endif
  if (avx2) found.push_back(&kAvx2);
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(&kDotprod);
#endif
  found.push_back(&kPortable);
  return found;
}

const Kernels* chosen = usable().front();

template <class T>
const T& as(const void* pointer) {
  return *static_cast<const T*>(pointer);
}

Adapters adapters_of(const BoundLayer& layer, const LoraPair& parts, const int32_t* places) {
  if (parts.rank == 0) return {nullptr, nullptr, 0, false};
  return {places, layer.pool, layer.pool_stride, layer.pool_bfloat16 != 0};
}

void compute_embedding(const BoundLayer& bound, const Step& step, const int32_t* places, float* out) {
  const EmbeddingLayer& layer = as<EmbeddingLayer>(bound.block);
  chosen->embedding(layer, step, adapters_of(bound, layer.adapters, places), out);
}

// false: an unknown kind, or one that needs words which the step does not have, or keys before
// the `window` of a BoundModel.
bool compute_layer(const BoundLayer& bound, const Step& step, int64_t window,
                   const int32_t* places, const float* rope, const float* x, float* out) {
  const Kind kind = as<Kind>(bound.block);
  if (kind == Kind::kAttention) {
    const AttentionLayer& layer = as<AttentionLayer>(bound.block);
    if (layer.prefix && !step.last_seen) return false;
    const int64_t seen = layer.chunk ? layer.chunk : layer.window;
    if (bound.windowed && (!seen || seen > window)) return false;
    chosen->attention(layer, step, adapters_of(bound, layer.adapters, places), x, rope,
                       bound.cache, out);
  } else if (kind == Kind::kFeedForward) {
    const FeedForwardLayer& layer = as<FeedForwardLayer>(bound.block);
    chosen->feed_forward(layer, step, adapters_of(bound, layer.adapters, places), x, out);
  } else if (kind == Kind::kExperts) {
    chosen->experts(as<FeedForwardLayer>(bound.block), step, x, out);
  } else if (kind == Kind::kRecurrent) {
    const RecurrentLayer& layer = as<RecurrentLayer>(bound.block);
    chosen->recurrent(layer, step, adapters_of(bound, layer.adapters, places), x, bound.state,
                       bound.state_stride, out);
  } else if (kind == Kind::kJoin) {
    chosen->join(as<JoinLayer>(bound.block), step, bound.state, out);
  } else {
    return kind == Kind::kNone;
  }
  return true;
}

// `embedding`: its matrix may be the head's; softcap 0: none.
void compute_head(const BoundLayer& bound, const void* embedding, const Step& step,
                  const int32_t* places, float softcap, const float* x, float* logits) {
  const HeadLayer& layer = as<HeadLayer>(bound.block);
  const EmbeddingLayer& first = as<EmbeddingLayer>(embedding);
  const Matrix& matrix =
      layer.matrix_offset ? layer.matrix(layer.matrix_offset) : first.matrix(first.table);
  chosen->head(layer, matrix, step, adapters_of(bound, layer.adapters, places), softcap,
                x, logits);
}

// Count the keys of a step in a layer of this window (0: all).
void count_keys(const Step& step, int64_t window, LayerTime& time) {
  for (int32_t t = 0; t < step.count; ++t) {
    const int64_t all = int64_t{step.position[t]} + 1;
    const int64_t keys = window && window < all ? window : all;
    time.seen += keys;
    if (t + 1 == step.count || step.slot[t + 1] != step.slot[t]) time.read += keys;
  }
}

// `work`, which is of one layer; its time is added if it is recorded.
template <class Work>
auto timed(const BoundModel* model, const BoundLayer* layer, const Step& step, Work&& work) {
  if (!model->times) return work();
  LayerTime& time = model->times[layer - model->layers];
  if (step.peers) step.peers->time(&time.exchange);
  time.began = nanoseconds();
  const auto result = work();
  time.ended = nanoseconds();
  if (step.peers) step.peers->time(nullptr);
  time.spent += time.ended - time.began;
  ++time.calls;
  const bool last = layer == model->layers + model->count - 1;
  time.tokens += last ? step.wanted : step.count;
  if (!last && layer != model->layers && as<Kind>(layer->block) == Kind::kAttention)
    count_keys(step, as<AttentionLayer>(layer->block).window, time);
  return result;
}

// See lite_runner_step.
int step_of(const BoundModel* model, const int32_t* words, int64_t size, const float* rope,
            const int32_t* places, float* x, float* logits) {
  if (size < 2 + (model->prefix ? 5 : 4) * model->capacity) return 2;
  Step step(words, model->capacity, size);
  if (!step.fits(*model, size, places)) return 2;
  step.peers = model->peers;
  step.first_token = model->first_token;
  step.vocabulary = model->vocabulary;
  step.kept = model->kept;
  step.slots = model->slots;
  step.tables = model->tables;
  step.table_width = model->table_width;
  Step windowed = step;
  windowed.tables = model->window_tables;
  const BoundLayer *first = model->layers, *last = first + model->count - 1;
  timed(model, first, step, [&] {
    compute_embedding(*first, step, places, x);
    return true;
  });
  for (const BoundLayer* layer = first + 1; layer < last; ++layer)
    if (!timed(model, layer, step,
               [&] {
                 return compute_layer(*layer, layer->windowed ? windowed : step, model->window,
                                      places, rope, x, x);
               }))
      return 1;
  timed(model, last, step, [&] {
    compute_head(*last, first->block, step, places, model->softcap, x, logits);
    return true;
  });
  return step.peers && step.peers->lost() >= 0 ? 3 + static_cast<int>(step.peers->lost()) : 0;
}

}  // namespace

const Kernels& kernels() { return *chosen; }

}  // namespace lite_runner

using namespace lite_runner;

#pragma GCC visibility push(default)
extern "C" {

// The fingerprint of the sources: native/__init__.py looks for it in the library.
extern const char lite_runner_sources[];
const char lite_runner_sources[] = LITE_RUNNER_SOURCES;

// The name of the kernels in use.
const char* lite_runner_instructions() { return chosen->name; }

// Chooses other kernels, "" the best; 0 if this machine does not support them.
int lite_runner_choose(const char* name) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  std::vector<const Kernels*> found = usable();
  found.push_back(&kReproducible);
  for (const Kernels* one : found)
    if (!*name || std::strcmp(name, one->name) == 0) {
      chosen = one;
      return 1;
    }
  return 0;
}

// See state_of_amx, which this looks up again; `emulated`: by a test.
const char* lite_runner_amx(int emulated) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  return amx = state_of_amx(emulated != 0);
}

void lite_runner_set_threads(int count) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  set_threads(count);
}

// Here and below: 0: done, -1: out of memory.
int lite_runner_linear(const void* matrix, const float* x, int64_t rows, float* out) {
  return guarded([&] {
    chosen->linear(as<Matrix>(matrix), x, rows, out);
    return 0;
  });
}

// Rows [rows][width] of words become panels [rows / 32][padded width][32], zeros behind both, of
// which `stride` lie from one to the next. Words are of `size` bytes; of float32 the upper half is
// kept where they become 2.
int lite_runner_pack(const void* from, int64_t rows, int64_t width, int64_t padded, int64_t size,
                     int64_t packed_size, int64_t order, int64_t stride, void* to) {
  const auto pack = [&](auto* source, auto* target, auto change) {
    parallel_for((rows + kPanel - 1) / kPanel, [&](int64_t panel, int) {
      auto* panel_target = target + panel * stride * padded * kPanel;
      const int64_t here = rows - panel * kPanel < kPanel ? rows - panel * kPanel : kPanel;
      for (int64_t k = 0; k < padded; ++k)
        for (int64_t c = 0; c < kPanel; ++c)
          panel_target[k * kPanel + c] = static_cast<std::decay_t<decltype(*target)>>(
              k < width && c < here ? change(source[(panel * kPanel + c) * width + k]) : 0);
    });
  };
  const auto* words = static_cast<const uint32_t*>(from);
  return guarded([&] {
    if (packed_size == 2 && size == 4)
      pack(words, static_cast<uint16_t*>(to), [](uint32_t word) { return word >> 16; });
    else if (packed_size == 1)
      pack(static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to),
           [](uint8_t word) { return word; });
    else if (packed_size == 2)
      pack(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to),
           [](uint16_t word) { return word; });
    else if (static_cast<Order>(order) == Order::kBytePairs)
      pack(words, static_cast<uint32_t*>(to), [](uint32_t word) {
        return (word & 0xff0000ffu) | (word >> 8 & 0xff00u) | (word << 8 & 0xff0000u);
      });
    else if (static_cast<Order>(order) == Order::kNibblePairs)
      pack(words, static_cast<uint32_t*>(to), [](uint32_t word) {
        uint32_t ordered = 0;
        for (int k = 0; k < 8; ++k) ordered |= (word >> 4 * k & 15u) << 4 * (k % 2 * 4 + k / 2);
        return ordered;
      });
    else
      pack(words, static_cast<uint32_t*>(to), [](uint32_t word) { return word; });
    return 0;
  });
}

// The floats that integers [rows][inputs] of 8 bits, or of 4 and two a byte, stand for, as panels: see
// lite_runner_pack. Scales and minimums (or nullptr) are half [rows][inputs / group].
int lite_runner_widen(const void* values, const uint16_t* scales, const uint16_t* minimums,
                      int64_t rows, int64_t inputs, int64_t bits, int64_t group, int64_t stride,
                      float* to) {
  return guarded([&] {
    chosen->widen(values, scales, minimums, rows, inputs, bits, group, stride, to);
    return 0;
  });
}

// Rows [rows][inputs] of GGUF's blocks, of the type that a Format names, become panels of units, of
// which `stride` lie from one to the next: see BlockForm.
int lite_runner_pack_blocks(const uint8_t* from, int64_t format, int64_t rows, int64_t inputs,
                            int64_t stride, uint8_t* to) {
  return guarded([&] {
    chosen->pack_blocks(from, static_cast<Format>(format), rows, inputs, stride, to);
    return 0;
  });
}

// A step of a whole model. `words` [size]: see Step; `rope` [rows, head_dim]; `places`: of the tokens'
// adapters, or nullptr; `x` [capacity, hidden] is worked in. 0: done, -1: out of memory, 1: a layer's
// kind is not known, 2: the words name parts that the model does not have, 3 + rank: that rank, which
// shares the model, has ended.
int lite_runner_step(const BoundModel* model, const int32_t* words, int64_t size, const float* rope,
                     const int32_t* places, float* x, float* logits) {
  return guarded([&] { return step_of(model, words, size, rope, places, x, logits); });
}

// Reads `count` words on all threads, as fast as the memory gives them; their sum, so that none is
// left out.
int64_t lite_runner_read(const int64_t* words, int64_t count) {
  constexpr int64_t kPart = 1 << 15;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  std::atomic<int64_t> sum{0};
  parallel_for((count + kPart - 1) / kPart, [&](int64_t part, int) {
    const int64_t end = (part + 1) * kPart < count ? (part + 1) * kPart : count;
    int64_t sums[8] = {};
    int64_t i = part * kPart;
    for (; i + 8 <= end; i += 8)
      for (int64_t k = 0; k < 8; ++k) sums[k] += words[i + k];
    for (; i < end; ++i) sums[0] += words[i];
    int64_t all = 0;
    for (int64_t one : sums) all += one;
    sum += all;
  });
  return sum;
}

// Bytes of the file through which `size` ranks meet, zeros at first.
int64_t lite_runner_peers_bytes(int64_t size) { return static_cast<int64_t>(Peers::bytes(size)); }

// `file`, `all_gather`: see Peers; the file is closed with them. nullptr: the system does not allow it.
Peers* lite_runner_peers_open(int file, int64_t rank, int64_t size, int64_t patience,
                              Peers::AllGather all_gather) {
  return Peers::open(file, rank, size, patience, all_gather);
}

void lite_runner_peers_close(Peers* peers) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  delete peers;
}

}  // extern "C"
#pragma GCC visibility pop
