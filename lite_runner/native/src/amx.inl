// Products of bytes by AMX's tiles, of kAmx alone: exact sums of 32 bits, as those of add_quads.
// A panel's words lie as a tile takes its weights: in each of its rows four inputs of 16 outputs. The
// instructions stand as they are, so that no compiler's headers or flags are needed.

#if AMX && WIDTH == 16
constexpr int64_t kAmxRows = 16;  // that tiles take at once

// The tiles of this thread, while one of these lives: 0 and 1 are the sums of 16 outputs each, 2 the
// rows' inputs, so many at once, 3 and 4 the weights by which these are multiplied.
template <int64_t inputs>
class AmxTiles {
 public:
  // Of `rows` they take as many as fill them, where they are in use.
  explicit AmxTiles(int64_t rows, bool used = &lite_runner::kernels() == &kAmx)
      : rows_(used ? rows / kAmxRows * kAmxRows : 0) {
    if (rows_ == 0) return;
    constexpr uint8_t rows_of_weights = inputs / 4;
    const struct {
      uint8_t palette, first, none[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shapes = {1, 0, {}, {64, 64, inputs, 64, 64}, {16, 16, 16, rows_of_weights, rows_of_weights}};
    __asm__ volatile("ldtilecfg (%0)" : : "r"(&shapes) : "memory");
  }
  ~AmxTiles() {
    if (rows_) __asm__ volatile("tilerelease" : : : "memory");
  }
  AmxTiles(const AmxTiles&) = delete;

  int64_t rows() const { return rows_; }

  // sums [16][32] = rows x [16][stride] * words [depth / 4][32], or grow by that. Unsigned rows by signed
  // weights, or the other way round.
  template <bool unsigned_rows>
  static inline __attribute__((always_inline)) void multiply(const uint8_t* x, int64_t stride,
                                                             const void* words, int64_t depth,
                                                             bool begin,
                                                             Ints (&sums)[kAmxRows][kParts]) {
    constexpr int64_t step = 4 * kPanel;
    if (begin)
      __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1" : :);
    else
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm0\n\ttileloadd 64(%0,%1,1), %%tmm1"
                       : : "r"(&sums[0][0]), "r"(step) : "memory");
    for (int64_t k = 0; k < depth; k += inputs) {
      __asm__ volatile(
          "tileloadd (%0,%1,1), %%tmm2\n\ttileloadd (%2,%3,1), %%tmm3\n\ttileloadd 64(%2,%3,1), %%tmm4"
          : : "r"(x + k), "r"(stride), "r"(static_cast<const uint8_t*>(words) + k / 4 * step), "r"(step)
          : "memory");
      if (unsigned_rows)
        __asm__ volatile("tdpbusd %%tmm3, %%tmm2, %%tmm0\n\ttdpbusd %%tmm4, %%tmm2, %%tmm1" : :);
      else
        __asm__ volatile("tdpbsud %%tmm3, %%tmm2, %%tmm0\n\ttdpbsud %%tmm4, %%tmm2, %%tmm1" : :);
    }
    __asm__ volatile("tilestored %%tmm0, (%0,%1,1)\n\ttilestored %%tmm1, 64(%0,%1,1)"
                     : : "r"(&sums[0][0]), "r"(step) : "memory");
  }

 private:
  const int64_t rows_;
};

// True if tiles give the sums that C++ does; bytes of all values, as both sides and in both shapes.
template <int64_t inputs, bool unsigned_rows>
inline bool amx_multiplies() {
  constexpr int64_t depth = 2 * inputs;
  uint8_t x[kAmxRows * depth], words[kPanel * depth];
  for (int64_t i = 0; i < kAmxRows * depth; ++i) x[i] = static_cast<uint8_t>(37 * i + i / 256);
  for (int64_t i = 0; i < kPanel * depth; ++i) words[i] = static_cast<uint8_t>(91 * i + i / 256);
  Ints sums[kAmxRows][kParts];
  {
    const AmxTiles<inputs> tiles(kAmxRows, true);
    for (const bool begin : {true, false})
      tiles.template multiply<unsigned_rows>(x, depth, words, depth, begin, sums);
  }
  bool same = true;
  for (int64_t row = 0; row < kAmxRows; ++row)
    for (int64_t out = 0; out < kPanel; ++out) {
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const uint8_t one = x[row * depth + k], other = words[(k / 4 * kPanel + out) * 4 + k % 4];
        sum += 2 * (unsigned_rows ? one * static_cast<int8_t>(other) : static_cast<int8_t>(one) * other);
      }
      same &= sums[row][out / kLanes][out % kLanes] == sum;
    }
  return same;
}

inline bool amx_works() {
  return amx_multiplies<16, false>() && amx_multiplies<32, false>() && amx_multiplies<32, true>();
}
#else
constexpr int64_t kAmxRows = 0;

template <int64_t inputs>
struct AmxTiles {
  explicit AmxTiles(int64_t) {}
  static constexpr int64_t rows() { return 0; }
  template <bool unsigned_rows, class Sums>
  static void multiply(const uint8_t*, int64_t, const void*, int64_t, bool, Sums&);  // not called
};
#endif
