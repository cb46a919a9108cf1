// Products by AMX's tiles, of kAmx alone. A panel's words lie as a tile takes its weights: in each of its
// rows four bytes, or two numbers in bfloat16, of 16 outputs. The instructions stand as they are, so that
// no compiler's headers or flags are needed.

#if AMX && WIDTH == 16
constexpr int64_t kAmxRows = 16;  // that tiles take at once

inline bool tiles_used() { return &lite_runner::kernels() == &kAmx; }

// The first of so many rows, of which as many as fill tiles.
inline int64_t rows_in_tiles(int64_t count) { return tiles_used() ? count / kAmxRows * kAmxRows : 0; }

// The same of bytes, whose sums have to be scaled by vectors all the same: with fewer they do not pay.
inline int64_t rows_of_bytes(int64_t count) { return count < 2 * kAmxRows ? 0 : rows_in_tiles(count); }

// A group of inputs of 16 rows of integers, as products by tiles take them. Behind it stand the bytes:
// [group / inputs, 2, 16, inputs], upper and lower ones of as many inputs as a tile has, or of blocks
// [16, 32] the lower ones.
struct alignas(64) TileGroup {
  float scales[kAmxRows], sums[kAmxRows];
  int32_t totals[kAmxRows];
  uint8_t wide[kAmxRows];  // 1: the row's integers have 16 bits in this group

  static int64_t size(int64_t bytes) { return sizeof(TileGroup) + kAmxRows * bytes; }
  const uint8_t* tiles() const { return reinterpret_cast<const uint8_t*>(this + 1); }
  const TileGroup& after(int64_t groups, int64_t size) const {
    return *reinterpret_cast<const TileGroup*>(reinterpret_cast<const uint8_t*>(this) + groups * size);
  }
};

// All groups [rows / 16, groups] of rows that have so many bytes in each; of some rows, `lead` of which
// stand before the first tile.
struct TileGroups {
  uint8_t* first;
  int64_t groups, bytes, lead = 0;

  TileGroups from(int64_t row) const {
    const int64_t next = (row + kAmxRows - 1) / kAmxRows;
    return {first ? first + next * size(kAmxRows) : nullptr, groups, bytes, next * kAmxRows - row};
  }
  // Those of `count` that are multiplied by tiles.
  int64_t rows(int64_t count) const { return first ? rows_of_bytes(count - lead) : 0; }
  int64_t size(int64_t rows) const { return rows / kAmxRows * groups * TileGroup::size(bytes); }
  // Rows that a thread makes ready: those of a tile share lines of cache.
  int64_t rows_at_once() const { return first ? kAmxRows : 4; }
  TileGroup& of(int64_t row, int64_t group) const {
    const int64_t index = row / kAmxRows * groups + group;
    return *reinterpret_cast<TileGroup*>(first + index * TileGroup::size(bytes));
  }
  void put(int64_t row, int64_t group, float scale, float sum, int32_t total, uint8_t wide) const {
    TileGroup& own = of(row, group);
    own.scales[row % kAmxRows] = scale, own.sums[row % kAmxRows] = sum;
    own.totals[row % kAmxRows] = total, own.wide[row % kAmxRows] = wide;
  }
  // 32 bytes of a row, from `at` on in those of the group's tile `index`, of `inputs` in a row.
  void put(int64_t row, int64_t group, int64_t index, int64_t inputs, int64_t at,
           const uint8_t* from) const {
    uint8_t* tiles = reinterpret_cast<uint8_t*>(&of(row, group) + 1);
    __builtin_memcpy(tiles + (index * kAmxRows + row % kAmxRows) * inputs + at, from, 32);
  }
};

// Of bytes, the rows unsigned and the weights signed or the other way round: exact sums of 32 bits, as
// those of add_quads. Of bfloat16: sums of floats in the order of accumulate_as_tiles.
enum class TileProduct { kUnsigned, kSigned, kBFloat16 };

// The tiles of this thread, while one of these lives: 0 and 1 are the sums of 16 outputs each, 2 and 3
// those of as many rows more, 4 and 5 the inputs of both, so many bytes at once, 6 and 7 the weights by
// which these are multiplied.
template <int64_t bytes>
class AmxTiles {
 public:
  // For `rows` at once; 0: for none, and the processor is not asked.
  explicit AmxTiles(int64_t rows) : rows_(static_cast<uint8_t>(rows)) {
    if (rows_ == 0) return;
    constexpr uint8_t weights = bytes / 4;
    const struct {
      uint8_t palette, first, none[14];
      uint16_t widths[16];
      uint8_t rows[16];
    } shapes = {1, 0, {}, {64, 64, 64, 64, bytes, bytes, 64, 64},
                {rows_, rows_, rows_, rows_, rows_, rows_, weights, weights}};
    __asm__ volatile("ldtilecfg (%0)" : : "r"(&shapes) : "memory");
  }
  ~AmxTiles() {
    if (rows_) __asm__ volatile("tilerelease" : : : "memory");
  }
  AmxTiles(const AmxTiles&) = delete;

  // sums [rows][32] = x [rows][stride] * words [depth / 4][32], or grow by that; depth, stride and
  // `further`, where the next inputs of a row are, in bytes. `twice`: of 16 rows and the 16 behind them,
  // for the processor to add to four tiles in turn.
  template <TileProduct what, bool twice = false>
  static inline __attribute__((always_inline)) void multiply(const void* x, int64_t stride,
                                                             const void* words, int64_t depth,
                                                             bool begin, void* sums,
                                                             int64_t further = bytes) {
    constexpr int64_t step = 4 * kPanel;
    uint8_t* more = static_cast<uint8_t*>(sums) + kAmxRows * step;
    static_assert(!twice || what != TileProduct::kUnsigned);
    if (begin)
      __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1" : :);
    else
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm0\n\ttileloadd 64(%0,%1,1), %%tmm1"
                       : : "r"(sums), "r"(step) : "memory");
    if (twice && begin)
      __asm__ volatile("tilezero %%tmm2\n\ttilezero %%tmm3" : :);
    else if (twice)
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm2\n\ttileloadd 64(%0,%1,1), %%tmm3"
                       : : "r"(more), "r"(step) : "memory");
    for (int64_t k = 0; k < depth; k += bytes) {
      const uint8_t* from = static_cast<const uint8_t*>(x) + k / bytes * further;
      __asm__ volatile("tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%2,%3,1), %%tmm6\n\t"
                       "tileloadd 64(%2,%3,1), %%tmm7"
                       : : "r"(from), "r"(stride),
                           "r"(static_cast<const uint8_t*>(words) + k / 4 * step), "r"(step)
                       : "memory");
      if (twice)
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm5"
                         : : "r"(from + kAmxRows * stride), "r"(stride) : "memory");
      if (what == TileProduct::kUnsigned)
        __asm__ volatile("tdpbusd %%tmm6, %%tmm4, %%tmm0\n\ttdpbusd %%tmm7, %%tmm4, %%tmm1" : :);
      else if (what == TileProduct::kSigned)
        __asm__ volatile("tdpbsud %%tmm6, %%tmm4, %%tmm0\n\ttdpbsud %%tmm7, %%tmm4, %%tmm1" : :);
      else
        __asm__ volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1" : :);
      if (twice && what == TileProduct::kSigned)
        __asm__ volatile("tdpbsud %%tmm6, %%tmm5, %%tmm2\n\ttdpbsud %%tmm7, %%tmm5, %%tmm3" : :);
      else if (twice)
        __asm__ volatile("tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" : :);
    }
    __asm__ volatile("tilestored %%tmm0, (%0,%1,1)\n\ttilestored %%tmm1, 64(%0,%1,1)"
                     : : "r"(sums), "r"(step) : "memory");
    if (twice)
      __asm__ volatile("tilestored %%tmm2, (%0,%1,1)\n\ttilestored %%tmm3, 64(%0,%1,1)"
                       : : "r"(more), "r"(step) : "memory");
  }

 private:
  const uint8_t rows_;
};

// True if tiles give the sums that C++ does; bytes of all values, as both sides.
template <TileProduct what>
inline bool amx_multiplies() {
  constexpr int64_t depth = 64;
  uint8_t x[kAmxRows * depth], words[kPanel * depth];
  for (int64_t i = 0; i < kAmxRows * depth; ++i) x[i] = static_cast<uint8_t>(37 * i + i / 256);
  for (int64_t i = 0; i < kPanel * depth; ++i) words[i] = static_cast<uint8_t>(91 * i + i / 256);
  Ints sums[kAmxRows][kParts];
  {
    const AmxTiles<32> tiles(kAmxRows);
    for (const bool begin : {true, false})
      tiles.multiply<what>(x, depth, words, depth, begin, sums);
  }
  bool same = true;
  for (int64_t row = 0; row < kAmxRows; ++row)
    for (int64_t out = 0; out < kPanel; ++out) {
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const uint8_t one = x[row * depth + k], other = words[(k / 4 * kPanel + out) * 4 + k % 4];
        sum += 2 * (what == TileProduct::kUnsigned ? one * static_cast<int8_t>(other)
                                               : static_cast<int8_t>(one) * other);
      }
      same &= sums[row][out / kLanes][out % kLanes] == sum;
    }
  return same;
}
#else
constexpr int64_t kAmxRows = 0;

inline bool tiles_used() { return false; }
inline int64_t rows_of_bytes(int64_t) { return 0; }

struct TileGroups {
  uint8_t* first;
  int64_t groups, bytes, lead = 0;

  TileGroups from(int64_t) const { return *this; }
  int64_t rows(int64_t) const { return 0; }
  int64_t size(int64_t) const { return 0; }
  int64_t rows_at_once() const { return 4; }
  void put(int64_t, int64_t, float, float, int32_t, uint8_t) const {}
  void put(int64_t, int64_t, int64_t, int64_t, int64_t, const uint8_t*) const {}
};

template <int64_t bytes>
struct AmxTiles {
  explicit AmxTiles(int64_t) {}
};
#endif
