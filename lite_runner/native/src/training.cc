// The functions of training that Python calls through ctypes. They may be called from several threads
// at once, so they have no part in the lock and the threads of others.
#include <atomic>
#include <exception>
#include <new>
#include <thread>
#include <vector>

#include "layers.h"
#include "training.h"

namespace lite_runner {

float* thread_floats(ThreadMemory which, int64_t count) {
  static thread_local std::vector<float> memory[kThreadMemories];
  std::vector<float>& one = memory[which];
  if (one.size() < static_cast<size_t>(count)) one.resize(count);
  return one.data();
}

namespace {

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
    kernels().training->product(*of, panels * part / parts * kPanel, end);
  });
}

// Its gradients are asked for by `to_out`.
int lite_runner_trained_attention(const TrainedAttention* of, int64_t threads) {
  const int64_t heads = of->kv_heads, parts = threads < heads ? threads : heads;
  return each_part(parts, [=](int64_t part) {
    const auto& training = *kernels().training;
    for (int64_t kv = heads * part / parts; kv < heads * (part + 1) / parts; ++kv)
      (of->to_out ? training.attention_gradients : training.attention)(*of, kv);
  });
}

// Rows [count][width], `stride` apart, become `weight` times their softmax; the sum of their
// log-sum-exps.
double lite_runner_softmax(float* rows, int64_t count, int64_t width, int64_t stride, float weight) {
  return kernels().training->softmax(rows, count, width, stride, weight);
}

// x * sigmoid(rate * x), times `times` if it is not nullptr.
int lite_runner_gated(const float* x, const float* times, int64_t count, float rate, float* out) {
  kernels().training->gated(x, times, count, rate, out);
  return 0;
}

int lite_runner_gated_gradients(const float* x, const float* times, const float* grad, int64_t count,
                                float rate, float* to_x, float* to_times) {
  kernels().training->gated_gradients(x, times, grad, count, rate, to_x, to_times);
  return 0;
}

// `out` [count][width], or with `grad` the gradient of x.
int lite_runner_normed(const Normed* of, int64_t count, const float* grad, float* out) {
  if (grad)
    kernels().training->normed_gradients(*of, count, grad, out);
  else
    kernels().training->normed(*of, count, out);
  return 0;
}

int lite_runner_turned(const Turned* of, int64_t count) {
  kernels().training->turned(*of, count);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
