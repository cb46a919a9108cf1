// Products of pairs of bfloat16, by an instruction for them where that is fast: it adds the product
// of the second of a pair, then that of the first. Each is exact in float32, so `multiply` comes to
// the same bits without the instruction. An Intel processor has it at half the speed of float32
// (Emerald Rapids: 43 and 92 GMAC/s a core), others at twice.

#if BFLOAT16_PRODUCTS
const bool pairs_pay = __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");

// Inputs of a panel as pairs: which words of 16 bits of two vectors become one.
inline __attribute__((always_inline)) __m512i paired(__m512i first, __m512i second, int from, int step) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(step)),
                                       _mm512_set1_epi32(from));
  const __m512i high = _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(32)), 16);
  return _mm512_permutex2var_epi16(first, _mm512_or_si512(low, high), second);
}

// Two inputs of a panel, of numbers that bfloat16 holds; without the second: 0 in its place.
template <class F>
inline __attribute__((always_inline)) void read_pairs(const uint8_t* from, bool second,
                                                      __m512i (&pairs)[kParts]) {
  const __m512i none = _mm512_setzero_si512();
  if constexpr (std::is_same_v<F, Numbers<UpperHalf>>) {
    const __m512i one = _mm512_loadu_si512(from);
    const __m512i other = second ? _mm512_loadu_si512(from + F::bytes) : none;
    for (int p = 0; p < kParts; ++p) pairs[p] = paired(one, other, p * kLanes, 1);
  } else {
    const typename F::Raw one = F::read(from), other = F::read(from + (second ? F::bytes : 0));
    for (int p = 0; p < kParts; ++p)
      pairs[p] = paired((__m512i)one.part[p], second ? (__m512i)other.part[p] : none, 1, 2);
  }
}

// See accumulate.
template <int64_t rows, class F>
__attribute__((noinline, target("avx512bf16"))) void accumulate_pairs(
    float* sums, const UpperHalf* x, int64_t stride, const uint8_t* panel, int64_t depth,
    bool begin) {
  Tile<rows> tile{};
  if (!begin) load_tile(tile, sums);
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * F::bytes) {
    fetch<2 * F::bytes>(panel + kAhead);
    __m512i weights[kParts];
    read_pairs<F>(panel, k + 1 < depth, weights);
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; ++r) {
      const __m512bh two = (__m512bh)broadcast_word(x + r * stride + k);
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p)
        tile.at[r][p] = (Floats)_mm512_dpbf16_ps((__m512)tile.at[r][p], two, (__m512bh)weights[p]);
    }
  }
  store_tile(tile, sums);
}

// Any number of rows by a panel whose numbers bfloat16 holds. Behind an odd number of inputs one more
// may be read.
template <class F>
inline void product_of_pairs(float* sums, const UpperHalf* x, int64_t rows, int64_t stride,
                             const uint8_t* panel, int64_t depth, bool begin) {
  in_tiles<kTile>(rows, [&](auto count, int64_t row) {
    accumulate_pairs<count, F>(sums + row * kPanel, x + row * stride, stride, panel, depth, begin);
  });
}
#else
constexpr bool pairs_pay = false;
template <class F>
inline void product_of_pairs(float*, const UpperHalf*, int64_t, int64_t, const uint8_t*, int64_t, bool) {}
#endif

#if AMX && WIDTH == 16
// The order in which AMX's tiles sum up: of 32 inputs those at even places and those at odd ones for
// themselves, then both together to what was before. Rows that fill no tile follow it too, so that a
// row's bits do not depend on how many there are. (Tiles take numbers below 2^-126 for zeros.)
constexpr int64_t kTileInputs = 32;

template <int64_t rows, class F>
__attribute__((noinline)) void accumulate_as_tiles(float* sums, const UpperHalf* x, int64_t stride,
                                                   const uint8_t* panel, int64_t depth, bool begin) {
  for (int64_t k = 0; k < depth; k += kTileInputs, begin = false) {
    const int64_t end = smaller_of(depth, k + kTileInputs);
    Tile<rows> even{}, odd{}, total{};
    if (!begin) load_tile(total, sums);
    const auto add_pair = [&](int64_t i, auto both) __attribute__((always_inline)) {
      const uint8_t* from = panel + i * F::bytes;
      fetch<2 * F::bytes>(from + kAhead);
      const typename F::Raw first = F::read(from);
      const typename F::Raw second = F::read(from + (both ? F::bytes : 0));
#pragma GCC unroll 8
      for (int64_t r = 0; r < rows; ++r) {
        const Ints two = broadcast_word(x + r * stride + i);
        const Floats one = reinterpret_cast<Floats>(two << 16);
        const Floats other = reinterpret_cast<Floats>(two & ~0xffff);
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; ++p) {
          even.at[r][p] += one * first.part[p];
          if (both) odd.at[r][p] += other * second.part[p];
        }
      }
    };
    for (int64_t i = k; i + 1 < end; i += 2) add_pair(i, std::true_type{});
    if (end % 2) add_pair(end - 1, std::false_type{});
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) total.at[r][p] += even.at[r][p] + odd.at[r][p];
    store_tile(total, sums);
  }
}

// True if tiles sum up so.
inline bool amx_multiplies_bfloat16() {
  constexpr int64_t depth = 2 * kTileInputs;
  UpperHalf x[kAmxRows * depth], panel[depth * kPanel];
  int32_t pairs[depth / 2][kPanel];
  float sums[kAmxRows * kPanel], expected[kAmxRows * kPanel];
  // From 2^-8 to 2^8, of both signs, all bits of which vary.
  const auto some = [](int64_t i) {
    return static_cast<UpperHalf>((0x3b80 + i * 40503 % 0x800) | (i * 7 % 3 == 0 ? 0x8000 : 0));
  };
  for (int64_t i = 0; i < kAmxRows * depth; ++i) x[i] = some(i);
  for (int64_t i = 0; i < depth * kPanel; ++i) panel[i] = some(5 * i + 3);
  for (int64_t k = 0; k < depth; k += 2)
    for (int64_t out = 0; out < kPanel; ++out)
      pairs[k / 2][out] = static_cast<int32_t>(static_cast<uint32_t>(panel[(k + 1) * kPanel + out]) << 16) |
                          static_cast<uint16_t>(panel[k * kPanel + out]);
  {
    const AmxTiles<2 * kTileInputs> amx(kAmxRows);
    for (const bool begin : {true, false})
      amx.add_product<TileProduct::kBFloat16, 2>(x, 2 * depth, pairs, 2 * depth, begin, sums);
  }
  for (const bool begin : {true, false})
    for (int64_t row = 0; row < kAmxRows; ++row)
      accumulate_as_tiles<1, Numbers<UpperHalf>>(expected + row * kPanel, x + row * depth, depth,
                                                 reinterpret_cast<const uint8_t*>(panel), depth, begin);
  return __builtin_memcmp(sums, expected, sizeof sums) == 0;
}

// Any number of rows by a panel whose numbers bfloat16 holds, in that order: as many as pay by tiles,
// the last one of which is smaller. Behind an odd depth one more input may be read.
template <class F>
void product_in_tiles(float* sums, const UpperHalf* x, int64_t rows, int64_t stride,
                      const uint8_t* panel, int64_t depth) {
  constexpr int64_t few = 4;
  const int64_t full = rows_in_tiles(rows), twice = full / (2 * kAmxRows) * (2 * kAmxRows);
  const int64_t tiled = rows - full > few ? rows : full;
  alignas(64) int32_t pairs[kBlock / 2][kPanel];
  for (int64_t k = 0; k < depth; k += kBlock, x += kBlock, panel += kBlock * F::bytes) {
    const int64_t here = smaller_of(kBlock, depth - k), whole = here / kTileInputs * kTileInputs;
    for (int64_t i = 0; tiled && i < whole; i += 2) {
      fetch<2 * F::bytes>(panel + i * F::bytes + kAhead);
      __m512i two[kParts];
      read_pairs<F>(panel + i * F::bytes, true, two);
      for (int64_t p = 0; p < kParts; ++p) store(pairs[i / 2] + p * kLanes, (Ints)two[p]);
    }
    const auto by_tiles = [&](auto tiles, int64_t first, int64_t end, int64_t each) {
      if (whole == 0 || first == end) return;
      const AmxTiles<2 * kTileInputs> amx(each);
      for (int64_t row = first; row < end; row += tiles / 2 * each)
        amx.template add_product<TileProduct::kBFloat16, tiles>(
            x + row * stride, 2 * stride, pairs, 2 * whole, k == 0, sums + row * kPanel);
    };
    const auto by_rows = [&](int64_t first, int64_t end, int64_t from) {
      if (from == here) return;
      in_tiles<few>(end, [&](auto count, int64_t row) {
        accumulate_as_tiles<count, F>(sums + row * kPanel, x + row * stride + from, stride,
                                      panel + from * F::bytes, here - from, k + from == 0);
      }, first);
    };
    by_tiles(std::integral_constant<int64_t, 4>{}, 0, twice, kAmxRows);
    by_tiles(std::integral_constant<int64_t, 2>{}, twice, full, kAmxRows);
    by_tiles(std::integral_constant<int64_t, 2>{}, full, tiled, rows - full);
    by_rows(0, tiled, whole);
    by_rows(tiled, rows, 0);
  }
}
#else
template <class F>
inline void product_in_tiles(float*, const UpperHalf*, int64_t, int64_t, const uint8_t*, int64_t) {}
#endif

// True if products are of pairs of bfloat16: rows are rounded to it, and attention computes in it.
inline bool multiplies_pairs() { return pairs_pay || tiles_used(); }

// Any number of rows by a panel whose numbers bfloat16 holds, by tiles or by the instruction for pairs.
template <class F>
inline void product_in_bfloat16(float* sums, const UpperHalf* x, int64_t rows, int64_t stride,
                                const uint8_t* panel, int64_t depth) {
  if (tiles_used()) return product_in_tiles<F>(sums, x, rows, stride, panel, depth);
  for (int64_t k = 0; k < depth; k += kBlock, panel += kBlock * F::bytes)
    product_of_pairs<F>(sums, x + k, rows, stride, panel, smaller_of(kBlock, depth - k), k == 0);
}

inline void round_to_bfloat16(Rows& rows) {
  const int64_t stride = rows.stride, all = rows.count * stride;
  const bool as_halves = multiplies_pairs();
  int16_t* halves = as_halves ? scratch<int16_t>(kShorts, all) : nullptr;
  uint32_t* wide = as_halves ? nullptr : scratch<uint32_t>(kShorts, all);
  over_rows(rows.count, [=, x = rows.x](int64_t row) {
    int64_t k = row * stride;
    const int64_t end = k + stride;
    for (; halves && k + kLanes <= end; k += kLanes) store_upper_halves(halves + k, load(x + k));
    for (; k < end; ++k) {
      const int16_t half = upper_half(x[k]);
      if (halves)
        halves[k] = half;
      else
        wide[k] = static_cast<uint32_t>(half) << 16;
    }
  });
  rows.shorts = halves;
  rows.rounded = reinterpret_cast<const Rounded*>(wide);
}

inline void multiply_bfloat16(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  if (!rows.shorts) return multiply_floats<UpperHalf>(m, rows, rows.rounded, panel, sums);
  product_in_bfloat16<Numbers<UpperHalf>>(sums, reinterpret_cast<const UpperHalf*>(rows.shorts), rows.count,
                                          rows.stride, m.at(m.data) + panel * m.panel_bytes(), m.depth());
}
