// What is called from outside: MindSpore's AOT operators, and a few functions for ctypes.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <type_traits>

#include "layers.h"
#include "scratch.h"
#include "threads.h"

namespace lite_runner {

void* scratch_bytes(Scratch which, size_t bytes) {
  static void* memory[kScratches];
  static size_t sizes[kScratches];
  if (sizes[which] < bytes) {
    std::free(memory[which]);
    sizes[which] = (bytes + 63) / 64 * 64;
    memory[which] = std::aligned_alloc(64, sizes[which]);
    if (!memory[which]) {
      sizes[which] = 0;
      throw std::bad_alloc();
    }
  }
  return memory[which];
}

namespace {

std::mutex one_at_a_time;

const Kernels* best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    return &kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kAvx2;
#endif
  return &kPortable;
}

const Kernels* kernels = best();

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
  kernels->embedding(layer, step, adapters_of(bound, layer.adapters, places), out);
}

bool is_attention(Kind kind) {
  return kind == Kind::kAttention || kind == Kind::kExtendedAttention ||
         kind == Kind::kGeneralAttention;
}

bool is_feed_forward(Kind kind) {
  return kind == Kind::kFeedForward || kind == Kind::kGeneralFeedForward;
}

// false: a kind that is not known, or one that needs words which the step has not.
bool compute_layer(const BoundLayer& bound, const Step& step, const int32_t* places,
                   const float* rope, const float* x, float* out) {
  const Kind kind = as<Kind>(bound.block);
  if (is_attention(kind)) {
    const AttentionLayer& layer = as<AttentionLayer>(bound.block);
    if (layer.general() && layer.general()->prefix && !step.last_seen) return false;
    kernels->attention(layer, step, adapters_of(bound, layer.adapters, places), x, rope,
                       bound.cache, out);
  } else if (is_feed_forward(kind)) {
    const FeedForwardLayer& layer = as<FeedForwardLayer>(bound.block);
    kernels->feed_forward(layer, step, adapters_of(bound, layer.adapters, places), x, out);
  } else if (kind == Kind::kExperts) {
    kernels->experts(as<ExpertsLayer>(bound.block), step, x, out);
  } else {
    return false;
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
  kernels->head(layer, matrix, step, adapters_of(bound, layer.adapters, places), softcap,
                x, logits);
}

// The inputs of a MindSpore operator, taken one after the other.
struct Inputs {
  void** p;
  int* ranks;
  int64_t** shapes;
  const char** types;
  int next;

  void* take() { return p[next++]; }

  BoundLayer layer() { return {take(), {}, nullptr, 0, 0}; }

  // Keys, values and their scales follow an attention layer.
  Cache cache() {
    const char* type = types[next];
    const int64_t length = shapes[next + 1][ranks[next + 1] - 2];
    void *keys = take(), *values = take();
    float *key_scales = static_cast<float*>(take()), *value_scales = static_cast<float*>(take());
    return {std::strcmp(type, "float32") == 0   ? CacheType::kFloat32
            : std::strcmp(type, "float16") == 0 ? CacheType::kFloat16
                                                : CacheType::kInt8,
            length, keys, values, key_scales, value_scales};
  }

  // The pool of a layer that adapters change follows it.
  void pool(BoundLayer& layer, const LoraPair& parts) {
    if (parts.rank == 0) return;
    layer.pool_stride = shapes[next][1];
    layer.pool_bfloat16 = std::strcmp(types[next], "float32") != 0;
    layer.pool = take();
  }
};

// See Head below; softcap 0: none.
int head(int count, void** p, int* ranks, int64_t** shapes, const char** types, float softcap) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  Inputs in{p, ranks, shapes, types, 3};
  const Step step(static_cast<const int32_t*>(p[1]), shapes[0][0]);
  BoundLayer layer = in.layer();
  const void* embedding = in.take();
  in.pool(layer, as<HeadLayer>(layer.block).adapters);
  compute_head(layer, embedding, step, static_cast<const int32_t*>(p[2]), softcap,
               static_cast<const float*>(p[0]), static_cast<float*>(p[count - 1]));
  return 0;
}

}  // namespace
}  // namespace lite_runner

using namespace lite_runner;

#pragma GCC visibility push(default)
extern "C" {

// Which sources these were: kernels/__init__.py looks for it in the library.
extern const char lite_runner_sources[];
const char lite_runner_sources[] = LITE_RUNNER_SOURCES;

// Which instructions are used: avx512, avx2 or portable.
const char* lite_runner_instructions() { return kernels->name; }

// Chooses other instructions, for tests; 0 where this machine has them not.
int lite_runner_choose(const char* name) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  const Kernels* found = best();
  if (std::strcmp(name, "portable") == 0) found = &kPortable;
#if defined(__x86_64__)
  if (std::strcmp(name, "avx2") == 0 && best() != &kPortable) found = &kAvx2;
#endif
  if (std::strcmp(name, found->name) != 0) return 0;
  kernels = found;
  return 1;
}

void lite_runner_set_threads(int count) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  set_threads(count);
}

void lite_runner_linear(const void* matrix, const float* x, int64_t rows, float* out) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  kernels->linear(as<Matrix>(matrix), x, rows, out);
}

// Rows [rows][width] of words become panels [rows / 32][padded width][32], zeros behind both, of
// which `stride` lie from one to the next. Words are of `size` bytes; of float32 the upper half is
// kept where they become 2.
void lite_runner_pack(const void* from, int64_t rows, int64_t width, int64_t padded, int64_t size,
                      int64_t packed_size, int64_t order, int64_t stride, void* to) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
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
  if (packed_size == 2 && size == 4)
    pack(words, static_cast<uint16_t*>(to), [](uint32_t word) { return word >> 16; });
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
}

// The floats that integers [rows][inputs] of 8 bits, or of 4 and two a byte, stand for, as panels: see
// lite_runner_pack. Scales and minimums (or nullptr) are half [rows][inputs / group].
void lite_runner_widen(const void* values, const uint16_t* scales, const uint16_t* minimums,
                       int64_t rows, int64_t inputs, int64_t bits, int64_t group, int64_t stride,
                       float* to) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  kernels->widen(values, scales, minimums, rows, inputs, bits, group, stride, to);
}

// Rows [rows][inputs] of GGUF's blocks, of the type that a Format names, become panels of units, of
// which `stride` lie from one to the next: see BlockForm.
void lite_runner_pack_blocks(const uint8_t* from, int64_t format, int64_t rows, int64_t inputs,
                             int64_t stride, uint8_t* to) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  kernels->pack_blocks(from, static_cast<Format>(format), rows, inputs, stride, to);
}

// A step of a whole model. `words` [size]: see Step; `rope` [rows, head_dim]; `places`: of the tokens'
// adapters, or nullptr; `x` [capacity, hidden] is worked in. 0: done, else the layer's kind is not known.
int lite_runner_step(const BoundModel* model, const int32_t* words, int64_t size,
                     int64_t capacity, const float* rope, const int32_t* places, float* x, float* logits) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  const Step step(words, capacity, size);
  const BoundLayer *first = model->layers, *last = first + model->count - 1;
  compute_embedding(*first, step, places, x);
  for (const BoundLayer* layer = first + 1; layer < last; ++layer)
    if (!compute_layer(*layer, step, places, rope, x, x)) return 1;
  compute_head(*last, first->block, step, places, model->softcap, x, logits);
  return 0;
}

// MindSpore's AOT operators. Parameters are the inputs and then the output; see networks/native.py.
// `places` are those of the tokens' adapters; a layer that adapters change is followed by its pool.

// step, places, layer -> [capacity, hidden]
int Embedding(int count, void** p, int* ranks, int64_t** shapes, const char** types, void*, void*) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  Inputs in{p, ranks, shapes, types, 2};
  const Step step(static_cast<const int32_t*>(p[0]), shapes[count - 1][0]);
  BoundLayer layer = in.layer();
  in.pool(layer, as<EmbeddingLayer>(layer.block).adapters);
  compute_embedding(layer, step, static_cast<const int32_t*>(p[1]),
                    static_cast<float*>(p[count - 1]));
  return 0;
}

// x, step, rope, places, layers -> [capacity, hidden]. Any number of attention and feed-forward
// layers; that of an attention is followed by keys, values, key scales and value scales.
int Layers(int count, void** p, int* ranks, int64_t** shapes, const char** types, void*, void*) {
  std::lock_guard<std::mutex> lock(one_at_a_time);
  const Step step(static_cast<const int32_t*>(p[1]), shapes[0][0], shapes[1][0]);
  const float *x = static_cast<const float*>(p[0]), *rope = static_cast<const float*>(p[2]);
  const int32_t* places = static_cast<const int32_t*>(p[3]);
  float* out = static_cast<float*>(p[count - 1]);
  for (Inputs in{p, ranks, shapes, types, 4}; in.next < count - 1; x = out) {
    BoundLayer layer = in.layer();
    const Kind kind = as<Kind>(layer.block);
    if (is_attention(kind)) {
      layer.cache = in.cache();
      in.pool(layer, as<AttentionLayer>(layer.block).adapters);
    } else if (is_feed_forward(kind)) {
      in.pool(layer, as<FeedForwardLayer>(layer.block).adapters);
    }
    if (!compute_layer(layer, step, places, rope, x, out)) return 1;
  }
  return 0;
}

// x, step, places, layer, the embedding's layer -> [wanted, vocab]
int Head(int count, void** p, int* ranks, int64_t** shapes, const char** types, void*, void*) {
  return head(count, p, ranks, shapes, types, 0.0f);
}

// The same, of a layer that is a CappedHeadLayer.
int CappedHead(int count, void** p, int* ranks, int64_t** shapes, const char** types, void*,
               void*) {
  const double softcap = as<CappedHeadLayer>(p[3]).softcap;
  return head(count, p, ranks, shapes, types, static_cast<float>(softcap));
}

}  // extern "C"
#pragma GCC visibility pop
