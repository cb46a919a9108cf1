// Arguments of the kernels of training: see training.inl.
#pragma once
#include <cstdint>

namespace lite_runner {

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
  int64_t b_row, b_column, bfloat16, panels;  // panels: [n / 32][k][32], see training.inl
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

// Memory of a thread of training, kept for its next call.
enum ThreadMemory { kPackedRows, kScoreRows, kInnerRows, kSlopeRows, kThreadMemories };

// At least `count` floats, as this thread left them: zeros at first. Not a template, which would be
// compiled for one set of instructions and called by all.
float* thread_floats(ThreadMemory which, int64_t count);

struct TrainingKernels {
  void (*product)(const Product&, int64_t first, int64_t end);     // columns of c
  void (*attention)(const TrainedAttention&, int64_t kv);          // of a head of keys
  void (*attention_gradients)(const TrainedAttention&, int64_t kv);
  double (*softmax)(float* rows, int64_t count, int64_t width, int64_t stride, float weight);
  void (*gated)(const float* x, const float* times, int64_t count, float rate, float* out);
  void (*gated_gradients)(const float* x, const float* times, const float* grad, int64_t count,
                          float rate, float* to_x, float* to_times);
  void (*normed)(const Normed&, int64_t count, float* out);
  void (*normed_gradients)(const Normed&, int64_t count, const float* grad, float* to_x);
  void (*turned)(const Turned&, int64_t count);
};

}  // namespace lite_runner
