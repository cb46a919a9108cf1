// What training computes, for Python through ctypes. See training.inl.
#include <atomic>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#include "instruction_set.h"

namespace lite_runner {
namespace {

// A matrix as its owner holds it: element (i, j) is at[i * row + j * column].
template <class T>
struct View {
  const T* at;
  int64_t row, column;
};

// c [m, n], whose rows lie c_row apart, is a [m, k] * b [k, n], to which what was there is added or not.
struct Product {
  const float* a;
  int64_t a_row, a_column;
  const void* b;  // of float32, or of bfloat16: a is rounded to it, too
  int64_t b_row, b_column, bfloat16;
  int64_t m, n, k;
  float* c;
  int64_t c_row, add;
};

// Causal attention within each of `count` texts, one behind the other: queries [tokens, heads *
// head_dim], keys and values [tokens, kv_heads * head_dim], out as queries. Gradients are alike.
struct TrainedAttention {
  const float *q, *k, *v;
  float* out;
  const float* to_out;
  float *to_q, *to_k, *to_v, *to_sinks;  // to_k, to_v, to_sinks are added to; to_sinks: or nullptr
  const int64_t* lengths;
  int64_t count, heads, kv_heads, head_dim, window;  // 0: every key before is seen
  const float *slopes, *sinks;                       // [heads] of ALiBi, and scores of nothing, or nullptr
  float scale, softcap;                              // 0: none
};

// Rows of `width` with what their norm keeps; means: nullptr where they are not centered.
struct Normed {
  const float *x, *gain, *shift;  // shift: or nullptr
  float *factors, *means;
  int64_t width;
  float eps;
};

// Pairs of heads to turn: see turned_pairs.
struct Turned {
  const float *x, *cos, *sin;
  float* out;
  int64_t heads, half, back;
};

struct TrainingKernels {
  void (*product)(const Product&, int64_t first, int64_t end);     // columns of c
  void (*attention)(const TrainedAttention&, int64_t kv);          // of a head of keys
  void (*attention_gradients)(const TrainedAttention&, int64_t kv);
  double (*softmax)(float* rows, int64_t count, int64_t width, float weight);
  void (*gated)(const float* x, const float* times, int64_t count, float rate, float* out);
  void (*gated_gradients)(const float* x, const float* times, const float* grad, int64_t count,
                          float rate, float* to_x, float* to_times);
  void (*normed)(const Normed&, int64_t count, float* out);
  void (*normed_gradients)(const Normed&, int64_t count, const float* grad, float* to_x);
  void (*turned)(const Turned&, int64_t count);
};

}  // namespace

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                              \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define WIDTH 16
#define BFLOAT16_PRODUCTS (__clang_major__ >= 9 || __GNUC__ >= 10)
namespace training_avx512 {
#include "simd.inl"
#include "linear.inl"
#include "bfloat16.inl"
#include "training.inl"
}  // namespace training_avx512
#undef WIDTH
#undef BFLOAT16_PRODUCTS
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define WIDTH 8
namespace training_avx2 {
#include "simd.inl"
#include "linear.inl"
#include "bfloat16.inl"
#include "training.inl"
}  // namespace training_avx2
#undef WIDTH
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#define WIDTH 4
namespace training_portable {
#include "simd.inl"
#include "linear.inl"
#include "bfloat16.inl"
#include "training.inl"
}  // namespace training_portable

namespace {

const TrainingKernels& best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    return training_avx512::kTraining;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return training_avx2::kTraining;
#endif
  return training_portable::kTraining;
}

const TrainingKernels& kernels = best();

// Calls body(part) for 0 .. parts - 1, each in a thread of its own; -1 if out of memory. No exception
// may reach a caller in C.
template <class Body>
int each_part(int64_t parts, Body&& body) {
  std::atomic<int> result{0};
  const auto guarded = [&](int64_t part) {
    try {
      body(part);
    } catch (const std::bad_alloc&) {
      result = -1;
    }
  };
  std::vector<std::thread> others;
  int64_t part = 1;
  try {
    for (; part < parts; ++part) others.emplace_back(guarded, part);
  } catch (const std::exception&) {  // the system gives no more threads
  }
  guarded(0);
  for (; part < parts; ++part) guarded(part);
  for (std::thread& one : others) one.join();
  return result;
}

}  // namespace
}  // namespace lite_runner

using namespace lite_runner;

#pragma GCC visibility push(default)
extern "C" {

// Here and below: 0: done, -1: out of memory.
int lite_runner_product(const Product* of, int64_t threads) {
  const int64_t panels = (of->n + kPanel - 1) / kPanel;
  const int64_t parts = threads < panels ? threads : panels;
  return each_part(parts, [=](int64_t part) {
    const int64_t end = part + 1 == parts ? of->n : panels * (part + 1) / parts * kPanel;
    kernels.product(*of, panels * part / parts * kPanel, end);
  });
}

// Its gradients are asked for by `to_out`.
int lite_runner_trained_attention(const TrainedAttention* of, int64_t threads) {
  const int64_t heads = of->kv_heads, parts = threads < heads ? threads : heads;
  return each_part(parts, [=](int64_t part) {
    for (int64_t kv = heads * part / parts; kv < heads * (part + 1) / parts; ++kv)
      (of->to_out ? kernels.attention_gradients : kernels.attention)(*of, kv);
  });
}

// Rows [count][width] become `weight` times their softmax; the sum of their log-sum-exps.
double lite_runner_softmax(float* rows, int64_t count, int64_t width, float weight) {
  return kernels.softmax(rows, count, width, weight);
}

// x * sigmoid(rate * x), times `times` if it is not nullptr.
int lite_runner_gated(const float* x, const float* times, int64_t count, float rate, float* out) {
  kernels.gated(x, times, count, rate, out);
  return 0;
}

int lite_runner_gated_gradients(const float* x, const float* times, const float* grad, int64_t count,
                                float rate, float* to_x, float* to_times) {
  kernels.gated_gradients(x, times, grad, count, rate, to_x, to_times);
  return 0;
}

// `out` [count][width], or with `grad` the gradient of x.
int lite_runner_normed(const Normed* of, int64_t count, const float* grad, float* out) {
  if (grad)
    kernels.normed_gradients(*of, count, grad, out);
  else
    kernels.normed(*of, count, out);
  return 0;
}

int lite_runner_turned(const Turned* of, int64_t count) {
  kernels.turned(*of, count);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
