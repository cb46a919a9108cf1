// Products of rows with panels of integers: exact within a group of inputs, which has a scale.

constexpr int64_t kIntegerTile = WIDTH == 16 ? 8 : 2;
constexpr int64_t kSplitTile = WIDTH == 16 ? 4 : 1;  // rows up to which it pays that they are two bytes

// Sums begin with zeros; those of AMX's tiles by themselves.
template <int64_t count>
inline __attribute__((always_inline)) void clear(Ints (&sums)[count][kParts]) {
#pragma GCC unroll 16
  for (int64_t r = 0; count != kAmxRows && r < count; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) sums[r][p] = Ints{};
}

// The scales of a group from number `at` on.
inline Floats load_scales(const Matrix& m, int64_t at) {
  if (m.scale_type == ScaleType::kFloat32) return load(reinterpret_cast<const float*>(m.at(m.scales)) + at);
  return m.scale_type == ScaleType::kHalf ? load_half(m.halves(m.scales) + at)
                                          : load_bfloat16(m.halves(m.scales) + at);
}

// The same additions for one row and for many.
inline void add_products(Floats& total, Ints sum, Floats factor, float scale) {
  total += to_float(sum) * (factor * splat(scale));
}
inline void add_minimum(Floats& total, Floats minimum, float sum) { total += minimum * splat(sum); }

// Adds to the totals the sums of one group of inputs, which are exact up to here: by the scale of
// the weights' group, if they have groups, and that of the row.
template <int64_t count>
inline __attribute__((always_inline)) void add_group(const Matrix& m, const Rows& rows,
                                                     int64_t row, int64_t panel, int64_t group,
                                                     const Ints (&sums)[count][kParts],
                                                     Tile<count>& totals) {
  const int64_t groups = m.input_groups(), scale = (panel * m.groups() + group) * kPanel;
#pragma GCC unroll 8
  for (int64_t p = 0; p < kParts; ++p) {
    Floats factor = splat(1.0f), minimum{};
    Ints zero = splat_int(static_cast<int32_t>(m.zero));
    if (m.group) factor = load_scales(m, scale + p * kLanes);
    if (m.minimums) minimum = load_half(m.halves(m.minimums) + scale + p * kLanes);
    if (m.zeros) zero = load_bytes(reinterpret_cast<const int8_t*>(m.at(m.zeros)) + scale + p * kLanes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = (row + r) * groups + group;
      Floats& total = totals.at[r][p];
      Ints above = sums[r][p];  // the zero
      if (m.zeros || m.zero) above -= zero * rows.totals[at];
      add_products(total, above, factor, rows.scales[at]);
      if (m.minimums) add_minimum(total, minimum, rows.sums[at]);
    }
  }
}

#if BYTE_PRODUCTS
// True if one of the rows from `row` on has 16 bits in a group of inputs.
template <int64_t count>
inline __attribute__((always_inline)) bool any_wide(const Rows& rows, int64_t row, int64_t groups,
                                                    int64_t group) {
  int wide = 0;
#pragma GCC unroll 16
  for (int64_t r = 0; r < count; ++r) wide |= rows.wide[(row + r) * groups + group];
  return wide;
}

// Inputs of 8 bits, or in some groups of 16, by weights of 8 bits.
template <int64_t count>
void multiply_bytes(const Matrix& m, const Rows& rows, int64_t row, int64_t panel, float* sums) {
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  const int64_t group = m.input_group(), groups = m.input_groups(), depth = m.depth();
  const int32_t* offsets = reinterpret_cast<const int32_t*>(m.at(m.sums)) + panel * groups * kPanel;
  Tile<count> totals{};
  for (int64_t g = 0; g < groups; ++g, offsets += kPanel) {
    Ints sum[count][kParts];
    clear(sum);
    const int64_t first = g * group, end = smaller_of(first + group, depth);
    const auto add = [&](const uint8_t* x, [[maybe_unused]] bool begin) __attribute__((always_inline)) {
      const uint8_t* from = data;
#if AMX && WIDTH == 16
      if constexpr (count == kAmxRows)
        AmxTiles<32>::multiply<TileProduct::kUnsigned>(x + first, 2 * depth, from, end - first, begin,
                                                       sum);
#endif
      for (int64_t k = first; count != kAmxRows && k < end; k += 4, from += Words::bytes) {
        fetch<Words::bytes>(from + kAhead);
        const Words words = Words::read(from);
#pragma GCC unroll 16
        for (int64_t r = 0; r < count; ++r) {
          const Ints four = broadcast_word(x + 2 * r * depth + k);
#pragma GCC unroll 8
          for (int64_t p = 0; p < kParts; ++p)
            sum[r][p] = add_quads(sum[r][p], four, words.part[p]);
        }
      }
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) {
        const Ints offset = kLifted * load(offsets + p * kLanes);
#pragma GCC unroll 16
        for (int64_t r = 0; r < count; ++r) sum[r][p] -= offset;
      }
    };
    const uint8_t* above = rows.bytes + 2 * row * depth;
    const bool wide = any_wide<count>(rows, row, groups, g);
    if (wide) {
      add(above, true);
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; ++p) sum[r][p] <<= 8;
    }
    add(above + depth, !wide);
    data += (end - first) / 4 * Words::bytes;
    add_group(m, rows, row, panel, g, sum, totals);
  }
  store_tile(totals, sums + row * kPanel);
}
#endif

// sum += x * weights, both pairs of 16 bits.
inline Ints add_pairs(Ints sum, Ints x, Ints weights) {
#if WIDTH == 16
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
#elif WIDTH == 8 && BYTE_PRODUCTS
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)weights);
#elif WIDTH == 8
  return sum + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)weights);
#elif defined(__x86_64__)
  return sum + (Ints)_mm_madd_epi16((__m128i)x, (__m128i)weights);
#else
  return sum + (x << 16 >> 16) * (weights << 16 >> 16) + (x >> 16) * (weights >> 16);
#endif
}

// Inputs of 16 bits by weights of 8 or 4 bits.
template <int64_t count, class W>
void multiply_shorts(const Matrix& m, W form, const Rows& rows, int64_t row, int64_t panel,
                     float* sums) {
  constexpr int64_t pairs = W::step / 2;
  constexpr int64_t chains = count == 1 ? pairs : 1;  // one sum alone would have to be waited for
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  const int16_t* x = rows.shorts + row * m.depth();
  const int64_t group = m.input_group(), groups = m.input_groups();
  Tile<count> totals{};
  for (int64_t g = 0; g < groups; ++g) {
    Ints sum[chains][count][kParts] = {};
    const int64_t end = smaller_of((g + 1) * group, m.depth());
    for (int64_t k = g * group; k < end; k += W::step, data += Words::bytes) {
      fetch<Words::bytes>(data + kAhead);
      const Words words = Words::read(data);
      unrolled<pairs>([&](auto i) __attribute__((always_inline)) {
        Ints weights[kParts];
        for (int64_t p = 0; p < kParts; ++p) weights[p] = form.template pair<i>(words.part[p]);
#pragma GCC unroll 16
        for (int64_t r = 0; r < count; ++r) {
          const Ints two = broadcast_word(x + r * m.depth() + k + 2 * i);
#pragma GCC unroll 8
          for (int64_t p = 0; p < kParts; ++p)
            sum[i % chains][r][p] = add_pairs(sum[i % chains][r][p], two, weights[p]);
        }
      });
    }
#pragma GCC unroll 4
    for (int64_t c = 1; c < chains; ++c)
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) sum[0][0][p] += sum[c][0][p];
    add_group(m, rows, row, panel, g, sum[0], totals);
  }
  store_tile(totals, sums + row * kPanel);
}

#if BYTE_PRODUCTS
// Up to 32 integers as 256 * above + below, both signed bytes, of each 8 in the order of W.
template <class W>
inline void split_bytes(const int16_t* from, int64_t count, uint8_t* above, uint8_t* below) {
#if WIDTH == 16
  int64_t order;
  __builtin_memcpy(&order, W::order, 8);
  const __m256i in_order = _mm256_add_epi8(
      _mm256_set1_epi64x(order), _mm256_set_epi64x(0x0808080808080808, 0, 0x0808080808080808, 0));
  const __mmask32 live = count < 32 ? (1u << count) - 1 : ~0u;
  const __m512i all = _mm512_maskz_loadu_epi16(live, from);
  const __m512i rounded = _mm512_add_epi16(all, _mm512_set1_epi16(128));
  const __m256i upper = _mm512_cvtepi16_epi8(_mm512_srai_epi16(rounded, 8));
  const __m256i lower = _mm512_cvtepi16_epi8(all);
  _mm256_mask_storeu_epi8(above, live, _mm256_shuffle_epi8(upper, in_order));
  _mm256_mask_storeu_epi8(below, live, _mm256_shuffle_epi8(lower, in_order));
#else
  for (int64_t k = 0; k < count; ++k) {
    const int16_t one = from[k / 8 * 8 + W::order[k % 8]];
    above[k] = static_cast<uint8_t>((one + 128) >> 8);
    below[k] = static_cast<uint8_t>(one);
  }
#endif
}

// The same as multiply_shorts, and the same sums: four inputs by two products of bytes, which leaves
// less to unpack.
template <int64_t count, class W>
void multiply_split(const Matrix& m, W form, const Rows& rows, int64_t row, int64_t panel,
                    float* sums) {
  constexpr int64_t chains = count * kParts < 4 ? 2 : 1;  // one sum would have to be waited for
  constexpr int64_t bytes = 8 / W::step * Words::bytes;
  const int64_t group = m.input_group(), groups = m.input_groups(), depth = m.depth();
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  const uint8_t* x = rows.bytes + 2 * row * depth;
  Tile<count> totals{};
  for (int64_t g = 0; g < groups; ++g) {
    Ints high[chains][count][kParts] = {}, low[chains][count][kParts] = {};
    const int64_t end = smaller_of((g + 1) * group, depth);
    for (int64_t k = g * group; k < end; k += 8, data += bytes) {
      fetch<bytes>(data + kAhead);
      unrolled<2>([&](auto i) __attribute__((always_inline)) {
        Ints weights[kParts];
        for (int64_t p = 0; p < kParts; ++p) weights[p] = form.template quad<i>(data, p);
#pragma GCC unroll 16
        for (int64_t r = 0; r < count; ++r) {
          const uint8_t* four = x + 2 * r * depth + k + 4 * i;
          const Ints above = broadcast_word(four), below = broadcast_word(four + depth);
#pragma GCC unroll 8
          for (int64_t p = 0; p < kParts; ++p) {
            Ints &upper = high[i % chains][r][p], &lower = low[i % chains][r][p];
            upper = add_quads(upper, weights[p], above);
            lower = add_quads(lower, weights[p], below);
          }
        }
      });
    }
    Ints sum[count][kParts];
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; ++r) {
      const int32_t offset = W::lifted * rows.totals[(row + r) * groups + g];
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) {
        Ints upper = high[0][r][p], lower = low[0][r][p];
        if (chains == 2) upper += high[chains - 1][r][p], lower += low[chains - 1][r][p];
        sum[r][p] = (upper << 8) + lower - offset;
      }
    }
    add_group(m, rows, row, panel, g, sum, totals);
  }
  store_tile(totals, sums + row * kPanel);
}
#endif

#if AMX && WIDTH == 16
constexpr int64_t kAddedRows = 4;  // whose totals registers hold, beside all that is added

// Adds up 16 rows over groups of inputs, whose products tiles leave in memory: multiply(group) makes
// those of a group, add(group, row, totals) takes those of four rows. Of `together` groups they are made
// before any is taken, so that totals stay in registers meanwhile; and those of the groups behind stand
// between rows, for the processor to make while vectors add.
template <int64_t together, class Multiply, class Add>
inline __attribute__((always_inline)) void add_up_tiles(int64_t groups, bool begin, float* sums,
                                                        Multiply&& multiply, Add&& add) {
  constexpr int64_t blocks = kAmxRows / kAddedRows;
  static_assert(blocks % together == 0);
  for (int64_t g = 0; g < smaller_of(groups, together); ++g) multiply(g);
  for (int64_t first = 0; first < groups; first += together)
    unrolled<blocks>([&](auto block) __attribute__((always_inline)) {
      const int64_t next = first + together + block * together / blocks;
      if (block * together % blocks == 0 && next < groups) multiply(next);
      float* to = sums + block * kAddedRows * kPanel;
      Tile<kAddedRows> totals{};
      if (!begin || first) load_tile(totals, to);
      const auto one = [&](int64_t i) __attribute__((always_inline)) {
        add(first + i, std::integral_constant<int64_t, block * kAddedRows>{}, totals);
      };
      if (first + together <= groups)
        unrolled<together>(one);
      else
        for (int64_t i = 0; i < groups - first; ++i) one(i);
      store_tile(totals, to);
    });
}

// Up to 256 inputs of a panel for tiles: four inputs of an output in a word, as W::quad has them, and
// what their groups are added up by.
struct Quads {
  alignas(64) int32_t words[kUnpacked / 4][kPanel];
  alignas(64) int32_t zero[kUnpacked / 32][kPanel];
  alignas(64) float factor[kUnpacked / 32][kPanel], minimum[kUnpacked / 32][kPanel];
};

template <class W>
inline void unpack(const Matrix& m, W form, int64_t panel, int64_t k, int64_t inputs, Quads& to) {
  constexpr int64_t bytes = 8 / W::step * Words::bytes;
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes() + k / 8 * bytes;
  for (int64_t i = 0; i < inputs; i += 8, data += bytes) {
    fetch<bytes>(data + kAhead);
    unrolled<2>([&](auto quad) __attribute__((always_inline)) {
      for (int64_t p = 0; p < kParts; ++p)
        store(to.words[i / 4 + quad] + p * kLanes, form.template quad<quad>(data, p));
    });
  }
  const int64_t group = m.input_group();
  for (int64_t g = 0; g * group < inputs; ++g)
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const int64_t scale = (panel * m.groups() + k / group + g) * kPanel + p;
      Ints zero = splat_int(static_cast<int32_t>(m.zero));
      if (m.zeros) zero = load_bytes(reinterpret_cast<const int8_t*>(m.at(m.zeros)) + scale);
      store(to.zero[g] + p, zero + W::lifted);
      store(to.factor[g] + p, m.group ? load_scales(m, scale) : splat(1.0f));
      store(to.minimum[g] + p, m.minimums ? load_half(m.halves(m.minimums) + scale) : Floats{});
    }
}

// The same as multiply_split, and the same sums, of 16 rows of tiles by what was unpacked. x: their
// first group.
template <int64_t bytes>
void multiply_split_by_amx(const Matrix& m, bool lifted, const Quads& from, const TileGroup& x,
                           bool begin, int64_t inputs, float* sums) {
  constexpr int64_t together = 2;
  const int64_t group = m.input_group(), size = TileGroup::size(2 * group);
  const bool minimums = m.minimums;
  alignas(64) Ints products[2 * together][2][kAmxRows][kParts];
  const auto multiply = [&](int64_t g) __attribute__((always_inline)) {
    const TileGroup& own = x.after(g, size);
    AmxTiles<bytes>::template multiply<TileProduct::kSigned, true>(
        own.tiles(), bytes, from.words[g * group / 4], smaller_of(group, inputs - g * group), true,
        products[g % (2 * together)], 2 * bytes * kAmxRows);
  };
  const auto add = [&](int64_t g, auto r, Tile<kAddedRows>& totals) __attribute__((always_inline)) {
    const TileGroup& own = x.after(g, size);
    const auto& product = products[g % (2 * together)];
#pragma GCC unroll 2
    for (int64_t p = 0; p < kParts; ++p) {
      const Floats factor = load(from.factor[g] + p * kLanes);
      const Floats minimum = load(from.minimum[g] + p * kLanes);
      const Ints zero = load(from.zero[g] + p * kLanes);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kAddedRows; ++i) {
        Ints sum = (product[0][r + i][p] << 8) + product[1][r + i][p];
        if (lifted) sum -= zero * own.totals[r + i];
        Floats& total = totals.at[i][p];
        add_products(total, sum, factor, own.scales[r + i]);
        if (minimums) add_minimum(total, minimum, own.sums[r + i]);
      }
    }
  };
  add_up_tiles<together>((inputs + group - 1) / group, begin, sums, multiply, add);
}

// Those of the rows that tiles multiply.
template <int64_t bytes, class W>
void multiply_split_in_tiles(const Matrix& m, W form, const Rows& rows, int64_t panel, float* sums) {
  const int64_t tiled = rows.tiles.rows(rows.count);
  const AmxTiles<bytes> amx(kAmxRows);
  for (int64_t k = 0; k < m.depth(); k += kUnpacked) {
    Quads quads;
    const int64_t inputs = smaller_of(kUnpacked, m.depth() - k);
    unpack(m, form, panel, k, inputs, quads);
    for (int64_t row = 0; row < tiled; row += kAmxRows)
      multiply_split_by_amx<bytes>(m, m.zeros || m.zero || W::lifted, quads,
                                   rows.tiles.of(row, k / m.input_group()), k == 0, inputs,
                                   sums + (rows.tiles.lead + row) * kPanel);
  }
}
#endif

// Inputs of 16 bits that are multiplied at once where tiles have them; 0: they have not.
inline int64_t tile_inputs(const Matrix& m) {
  const auto whole = [&](int64_t inputs) {
    return m.depth() % inputs == 0 && m.input_group() % inputs == 0;
  };
  if (m.rounded_input || kUnpacked % m.input_group()) return 0;
  return whole(64) ? 64 : whole(32) ? 32 : 0;
}

// Rows of 16 bits, or of 8, by one panel.
template <class W>
void multiply_integers(const Matrix& m, W form, const Rows& rows, int64_t panel, float* sums) {
#if BYTE_PRODUCTS
  if (m.rounded_input) {
    const bool whole = m.input_group() % 32 == 0 && m.depth() % 32 == 0;
    const int64_t tiled = whole ? rows_of_bytes(rows.count) : 0;
    const AmxTiles<32> amx(tiled ? kAmxRows : 0);
    if constexpr (kAmxRows > 0)
      for (int64_t row = 0; row < tiled; row += kAmxRows)
        multiply_bytes<kAmxRows>(m, rows, row, panel, sums);
    return in_tiles<kIntegerTile>(rows.count, [&](auto count, int64_t row) {
      multiply_bytes<count>(m, rows, row, panel, sums);
    }, tiled);
  }
#endif
  const auto multiply = [&](auto count, int64_t row) {
#if BYTE_PRODUCTS
    if constexpr (count <= kSplitTile) return multiply_split<count>(m, form, rows, row, panel, sums);
#endif
    multiply_shorts<count>(m, form, rows, row, panel, sums);
  };
  const int64_t tiled = rows.tiles.rows(rows.count), lead = tiled ? rows.tiles.lead : 0;
#if AMX && WIDTH == 16
  if (tiled && tile_inputs(m) == 64)
    multiply_split_in_tiles<64>(m, form, rows, panel, sums);
  else if (tiled)
    multiply_split_in_tiles<32>(m, form, rows, panel, sums);
#endif
  in_tiles<kIntegerTile>(lead, multiply);
  in_tiles<kIntegerTile>(rows.count, multiply, lead + tiled);
}
