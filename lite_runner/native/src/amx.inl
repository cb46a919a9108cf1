// Products by AMX's tiles, of kAmx alone. A panel's words lie as a tile takes its weights: in each of its
// rows four bytes, or two numbers in bfloat16, of 16 outputs. The instructions stand as they are, so that
// no compiler's headers or flags are needed.

#if AMX && WIDTH == 16
constexpr int64_t kAmxRows = 16;   // that tiles take at once
constexpr int64_t kAddedRows = 4;  // whose totals registers hold, beside all that is added

inline bool tiles_used() { return &lite_runner::kernels() == &kAmx; }

// The first of so many rows, of which as many as fill tiles.
inline int64_t rows_in_tiles(int64_t count) { return tiles_used() ? count / kAmxRows * kAmxRows : 0; }

// The same of bytes, whose sums have to be scaled by vectors all the same: with fewer they do not pay.
inline int64_t rows_of_bytes(int64_t count) { return count < 2 * kAmxRows ? 0 : rows_in_tiles(count); }

// A group of inputs of 16 rows of integers, as products by tiles take them. Behind it stand tiles of
// these: [group / inputs, 2, 16, inputs], upper and lower bytes of as many inputs as a tile has, or both
// in bfloat16; of blocks [16, 32], the lower bytes.
struct alignas(64) TileGroup {
  float scales[kAmxRows], sums[kAmxRows];
  int32_t totals[kAmxRows];
  uint8_t wide[kAmxRows];  // 1: the row's integers have 16 bits in this group

  static int64_t size(int64_t bytes) { return sizeof(TileGroup) + kAmxRows * bytes; }
  const uint8_t* tiles() const { return reinterpret_cast<const uint8_t*>(this + 1); }
  const TileGroup& after(int64_t groups, int64_t size) const {
    return *reinterpret_cast<const TileGroup*>(reinterpret_cast<const uint8_t*>(this) + groups * size);
  }
  // Calls body with those of a few rows that have 16 bits.
  template <class Body>
  void each_wide(int64_t first, Body&& body) const {
    uint32_t any;
    static_assert(sizeof any == kAddedRows);
    __builtin_memcpy(&any, wide + first, kAddedRows);
    for (int64_t row = first; any && row < first + kAddedRows; ++row)
      if (wide[row]) body(row);
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
  int64_t rows_at_once() const { return first ? kAmxRows : kRowsAtOnce; }
  int64_t row_bytes() const { return first ? size(kAmxRows) / kAmxRows : 0; }
  TileGroup& of(int64_t row, int64_t group) const {
    const int64_t index = row / kAmxRows * groups + group;
    return *reinterpret_cast<TileGroup*>(first + index * TileGroup::size(bytes));
  }
  void put(int64_t row, int64_t group, float scale, float sum, int32_t total, uint8_t wide) const {
    TileGroup& own = of(row, group);
    own.scales[row % kAmxRows] = scale, own.sums[row % kAmxRows] = sum;
    own.totals[row % kAmxRows] = total, own.wide[row % kAmxRows] = wide;
  }
  // A row of the group's tile `index`, which has so many bytes in each.
  uint8_t* tile(int64_t row, int64_t group, int64_t index, int64_t width) const {
    uint8_t* tiles = reinterpret_cast<uint8_t*>(&of(row, group) + 1);
    return tiles + (index * kAmxRows + row % kAmxRows) * width;
  }
  // 32 of these, from `at` on.
  void put(int64_t row, int64_t group, int64_t index, int64_t width, int64_t at, const uint8_t* from) const {
    __builtin_memcpy(tile(row, group, index, width) + at, from, 32);
  }
};

// Of signed bytes and weights that are unsigned or signed: exact sums of 32 bits, as those of add_quads.
// Of bfloat16: sums of floats in the order of accumulate_as_tiles.
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

  // Tile `index` of the sums, of 16 outputs and, from 2 on, of the 16 rows behind, begins with zeros or
  // as memory has it among sums [rows][32], or goes there.
  template <int64_t index>
  static inline __attribute__((always_inline)) void start(const void* sums = nullptr) {
    if (sums)
      load<index>(at<index>(static_cast<const uint8_t*>(sums)), kStep);
    else
      __asm__ volatile("tilezero %%tmm%c0" : : "i"(index));
  }
  template <int64_t index>
  static inline __attribute__((always_inline)) void store(void* sums) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)"
                     : : "i"(index), "r"(at<index>(static_cast<uint8_t*>(sums))), "r"(kStep) : "memory");
  }

  // The first `tiles` of the sums grow by x [rows][stride] * words [depth / 4][32]; depth, stride and
  // `further`, where the next inputs of a row are, in bytes.
  template <TileProduct what, int64_t tiles>
  static inline __attribute__((always_inline)) void multiply(const void* x, int64_t stride,
                                                             const void* words, int64_t depth,
                                                             int64_t further = bytes) {
    for (int64_t k = 0; k < depth; k += bytes) {
      const uint8_t* from = static_cast<const uint8_t*>(x) + k / bytes * further;
      const uint8_t* weights = static_cast<const uint8_t*>(words) + k / 4 * kStep;
      load<4>(from, stride);
      load<6>(weights, kStep);
      load<7>(weights + kStep / 2, kStep);
      if (tiles > 2) load<5>(from + kAmxRows * stride, stride);
      unrolled<tiles>([](auto index) __attribute__((always_inline)) {
        product<what, index, 4 + index / 2, 6 + index % 2>();
      });
    }
  }

  // Tile `sum` of the sums and the next one grow by the tile x and as many words.
  template <TileProduct what, int64_t sum>
  static inline __attribute__((always_inline)) void multiply_tile(const void* x, const void* words) {
    load<4 + sum / 2>(static_cast<const uint8_t*>(x), bytes);
    load<6>(static_cast<const uint8_t*>(words), kStep);
    product<what, sum, 4 + sum / 2, 6>();
    load<7>(static_cast<const uint8_t*>(words) + kStep / 2, kStep);
    product<what, sum + 1, 4 + sum / 2, 7>();
  }

  // Sums [rows][32] of so many tiles, that grow by a product as above or begin with it.
  template <TileProduct what, int64_t tiles>
  static inline __attribute__((always_inline)) void add_product(const void* x, int64_t stride,
                                                                const void* words, int64_t depth,
                                                                bool begin, void* sums) {
    unrolled<tiles>([&](auto index) { start<index>(begin ? nullptr : sums); });
    multiply<what, tiles>(x, stride, words, depth);
    unrolled<tiles>([&](auto index) { store<index>(sums); });
  }

 private:
  template <int64_t index>
  static inline __attribute__((always_inline)) void load(const uint8_t* from, int64_t stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(index), "r"(from), "r"(stride) : "memory");
  }
  template <TileProduct what, int64_t sum, int64_t x, int64_t words>
  static inline __attribute__((always_inline)) void product() {
    if (what == TileProduct::kUnsigned)
      __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(words));
    else if (what == TileProduct::kSigned)
      __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(words));
    else
      __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(x), "i"(words));
  }
  template <int64_t index, class T>
  static T* at(T* sums) {
    return sums + index / 2 * kAmxRows * kStep + index % 2 * kStep / 2;
  }

  static constexpr int64_t kStep = 4 * kPanel;
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
      tiles.add_product<what, 2>(x, depth, words, depth, begin, sums);
  }
  bool same = true;
  for (int64_t row = 0; row < kAmxRows; ++row)
    for (int64_t out = 0; out < kPanel; ++out) {
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const uint8_t one = x[row * depth + k], other = words[(k / 4 * kPanel + out) * 4 + k % 4];
        sum += 2 * static_cast<int8_t>(one) *
               (what == TileProduct::kUnsigned ? other : static_cast<int8_t>(other));
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
  int64_t rows_at_once() const { return kRowsAtOnce; }
  int64_t row_bytes() const { return 0; }
  void put(int64_t, int64_t, float, float, int32_t, uint8_t) const {}
  void put(int64_t, int64_t, int64_t, int64_t, int64_t, const uint8_t*) const {}
};

template <int64_t bytes>
struct AmxTiles {
  explicit AmxTiles(int64_t) {}
};
#endif
