// An operator as MindSpore's ops.Custom(func_type="aot") calls it: pointers, ranks, shapes and types
// of the inputs and then of the output. x [..., width], gain [1, width], eps [1] -> [..., width]
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" int RmsNorm(int count, void** data, int* ranks, int64_t** shapes, const char** types,
                       void* /*stream*/, void* /*extra*/) {
  for (int i = 0; i < count; ++i)
    if (std::strcmp(types[i], "float32") != 0) return 1;  // MindSpore raises an error
  const int64_t width = shapes[0][ranks[0] - 1];
  int64_t rows = 1;
  for (int i = 0; i + 1 < ranks[0]; ++i) rows *= shapes[0][i];
  const float *x = static_cast<float*>(data[0]), *gain = static_cast<float*>(data[1]);
  const float eps = *static_cast<float*>(data[2]);
  float* out = static_cast<float*>(data[count - 1]);
  for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
    float sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
    const float scale = 1 / std::sqrt(sum / width + eps);
    for (int64_t i = 0; i < width; ++i) out[i] = x[i] * scale * gain[i];
  }
  return 0;
}

// The output's shape, which MindSpore asks for where that of x is not known before a graph runs.
extern "C" std::vector<int64_t> RmsNormInferShape(int* ranks, int64_t** shapes, void* /*extra*/) {
  return {shapes[0], shapes[0] + ranks[0]};
}
