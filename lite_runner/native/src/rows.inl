// Rows that a matrix is multiplied with, and tiles of their sums.

inline Ints broadcast_word(const void* from) {
  int32_t word;
  __builtin_memcpy(&word, from, 4);
  return splat_int(word);
}

template <int64_t rows>
struct Tile {
  Floats at[rows][kParts];
};

template <int64_t count>
inline __attribute__((always_inline)) void store_tile(const Tile<count>& tile, float* to) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) store(to + r * kPanel + p * kLanes, tile.at[r][p]);
}

template <int64_t count>
inline __attribute__((always_inline)) void load_tile(Tile<count>& tile, const float* from) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) tile.at[r][p] = load(from + r * kPanel + p * kLanes);
}

// Prefetch distance in bytes: by itself the processor looks ahead too little while it multiplies
// several rows. Measured with 1, 8 and 32 rows.
constexpr int64_t kAhead = 4096;

inline int64_t even(int64_t count) { return (count + 1) & ~1; }
inline int64_t in_lines(int64_t bytes) { return (bytes + 63) & ~63; }  // of cache, whole

// Runs body<n> over all rows from `row` on in tiles of at most `most`.
template <int64_t most, class Body>
inline void in_tiles(int64_t rows, Body&& body, int64_t row = 0) {
  for (; row + most <= rows; row += most) body(std::integral_constant<int64_t, most>{}, row);
  unrolled<most - 1>([&](auto index) {
    if (rows - row == index + 1) body(std::integral_constant<int64_t, index + 1>{}, row);
  });
}

constexpr int64_t kTile = WIDTH == 16 ? 12 : WIDTH == 8 ? 3 : 4;  // rows that registers hold
constexpr int64_t kItemBytes = 128 << 10;  // of a matrix, that a thread takes at least for one row
constexpr int64_t kBlock = 256;            // inputs whose panel stays in the L1 cache
constexpr int64_t kUnpacked = 256;         // inputs that are unpacked for several rows

// The rows that a matrix is multiplied with, prepared for its format.
struct Rows {
  const float* x;  // [count, stride]; zeros up to the matrix's depth
  int64_t count, stride;
  // For add_quads. [count, 2, depth]: above and below of split_bytes, for multiply_bytes lifted and in
  // their order; for blocks [count, depth / 32, 2, 32].
  const uint8_t* bytes;
  // [count, depth]: rounded to 16 or 8 bits, or to bfloat16 where pairs of it are multiplied.
  const int16_t* shorts;
  const uint8_t* wide;  // [count, input groups]: 1 where a group has 16 bits, and else 8
  const float *scales, *sums;  // [count, input groups] of the integers; sums times scale
  const int32_t* totals;       // [count, input groups] of the integers; for blocks [count, depth / 16]
  const Rounded* rounded = nullptr;  // [count, depth] for bfloat16, where pairs are not multiplied
  TileGroups tiles{};  // of integers, where these are multiplied by tiles
};
