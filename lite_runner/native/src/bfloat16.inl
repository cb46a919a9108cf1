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

inline void round_to_bfloat16(Rows& rows) {
  const int64_t stride = rows.stride, all = rows.count * stride;
  int16_t* halves = pairs_pay ? scratch<int16_t>(kShorts, all) : nullptr;
  uint32_t* wide = pairs_pay ? nullptr : scratch<uint32_t>(kShorts, all);
  over_rows(rows.count, [=, x = rows.x](int64_t row) {
    for (int64_t k = row * stride; k < (row + 1) * stride; ++k) {
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
  if (!pairs_pay) return multiply_floats<UpperHalf>(m, rows, rows.rounded, panel, sums);
  const UpperHalf* x = reinterpret_cast<const UpperHalf*>(rows.shorts);
  using F = Numbers<UpperHalf>;
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  for (int64_t k = 0; k < m.depth(); k += kBlock, data += kBlock * F::bytes)
    product_of_pairs<F>(sums, x + k, rows.count, rows.stride, data,
                        smaller_of(kBlock, m.depth() - k), k == 0);
}
