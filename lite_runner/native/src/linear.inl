// Products of rows with panels of a matrix. Every output is summed up over its inputs in their
// order, whatever the number of rows or threads, so that a row's bits never depend on others.

// Calls body with 0, 1, .. count - 1 as constants.
template <int64_t count, class Body>
inline __attribute__((always_inline)) void unrolled(Body&& body) {
  if constexpr (count > 0) {
    unrolled<count - 1>(body);
    body(std::integral_constant<int64_t, count - 1>{});
  }
}

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

// Prefetch distance in bytes: by itself the processor looks
// ahead too little while it multiplies several rows. Measured with 1, 8 and 32 rows.
constexpr int64_t kAhead = 4096;

// tile [rows][32] += x [rows][depth] * panel [depth][32]. Of inputs in bfloat16 the second of each
// pair goes first, as in accumulate_pairs: the sums have the same bits, since a product is exact.
template <int64_t rows, class F, class X>
inline __attribute__((always_inline)) void multiply(Tile<rows>& tile, const X* x, int64_t stride,
                                                    const uint8_t* panel, int64_t depth) {
  constexpr bool turned = std::is_same_v<X, Rounded>;
  for (int64_t i = 0; i < depth; ++i) {
    const int64_t k = turned && (i | 1) < depth ? i ^ 1 : i;
    fetch<F::bytes>(panel + i * F::bytes + kAhead);
    const typename F::Raw column = F::read(panel + k * F::bytes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; ++r) {
      const Floats one = splat(widened(x[r * stride + k]));
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) tile.at[r][p] += one * column.part[p];
    }
  }
}

template <int64_t count>
inline __attribute__((always_inline)) void load_tile(Tile<count>& tile, const float* from) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) tile.at[r][p] = load(from + r * kPanel + p * kLanes);
}

// The same over memory: sums [rows][32] grow by the product, or begin with it.
template <int64_t rows, class F, class X>
__attribute__((noinline)) void accumulate(float* sums, const X* x, int64_t stride,
                                          const uint8_t* panel, int64_t depth, bool begin) {
  Tile<rows> tile{};
  if (!begin) load_tile(tile, sums);
  multiply<rows, F>(tile, x, stride, panel, depth);
  store_tile(tile, sums);
}

inline int64_t even(int64_t count) { return (count + 1) & ~1; }

// Runs body<n> over all rows from `row` on in tiles of at most `most`.
template <int64_t most, class Body>
inline void in_tiles(int64_t rows, Body&& body, int64_t row = 0) {
  for (; row + most <= rows; row += most) body(std::integral_constant<int64_t, most>{}, row);
  unrolled<most - 1>([&](auto index) {
    if (rows - row == index + 1) body(std::integral_constant<int64_t, index + 1>{}, row);
  });
}

// Sums begin with zeros; those of AMX's tiles by themselves.
template <int64_t count>
inline __attribute__((always_inline)) void clear(Ints (&sums)[count][kParts]) {
#pragma GCC unroll 16
  for (int64_t r = 0; count != kAmxRows && r < count; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) sums[r][p] = Ints{};
}

constexpr int64_t kTile = WIDTH == 16 ? 12 : WIDTH == 8 ? 3 : 4;  // rows that registers hold
constexpr int64_t kIntegerTile = WIDTH == 16 ? 8 : 2;
constexpr int64_t kSplitTile = WIDTH == 16 ? 4 : 1;  // rows up to which it pays that they are two bytes
constexpr int64_t kItemBytes = 128 << 10;  // of a matrix, that a thread takes at least for one row
constexpr int64_t kBlock = 256;            // inputs whose panel stays in the L1 cache

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
  const uint8_t* tiles = nullptr;    // for blocks, below once more as tiles: [count / 16, depth / 32, 16, 32]
};

// sums [count][32] += the inputs x [count][stride] from k on * block [depth][32].
template <class F, class X>
inline void multiply_block(const X* x, int64_t count, int64_t stride, const uint8_t* block, int64_t k,
                           int64_t depth, float* sums) {
  in_tiles<kTile>(count, [&](auto rows, int64_t row) {
    accumulate<rows, F>(sums + row * kPanel, x + row * stride + k, stride, block, depth, k == 0);
  });
}

constexpr int64_t kFewTiles = 2;  // of rows that each widen the panel for themselves

// sums [count][32] = the rows x [count][stride] * a panel [depth][32].
template <class F, class X>
void multiply_floats(const uint8_t* panel, int64_t depth, const X* x, int64_t count, int64_t stride,
                     float* sums) {
  for (int64_t k = 0; k < depth; k += kBlock, panel += kBlock * F::bytes) {
    const int64_t here = smaller_of(kBlock, depth - k);
    if (std::is_same_v<F, Numbers<float>> || count <= kFewTiles * kTile) {
      multiply_block<F>(x, count, stride, panel, k, here, sums);
    } else {  // widened once for all tiles
      alignas(64) float wide[kBlock * kPanel];
      for (int64_t i = 0; i < here; ++i) {
        fetch<F::bytes>(panel + i * F::bytes + kAhead);
        const typename F::Raw column = F::read(panel + i * F::bytes);
        for (int64_t p = 0; p < kParts; ++p) store(wide + i * kPanel + p * kLanes, column.part[p]);
      }
      multiply_block<Numbers<float>>(x, count, stride, reinterpret_cast<const uint8_t*>(wide), k,
                                     here, sums);
    }
  }
}

template <class T, class X>
void multiply_floats(const Matrix& m, const Rows& rows, const X* x, int64_t panel, float* sums) {
  multiply_floats<Numbers<T>>(m.at(m.data) + panel * m.panel_bytes(), m.depth(), x, rows.count,
                              rows.stride, sums);
}

// The scales of a group from number `at` on.
inline Floats load_scales(const Matrix& m, int64_t at) {
  if (m.scale_type == ScaleType::kFloat32) return load(reinterpret_cast<const float*>(m.at(m.scales)) + at);
  return m.scale_type == ScaleType::kHalf ? load_half(m.halves(m.scales) + at)
                                          : load_bfloat16(m.halves(m.scales) + at);
}

// Floats of 8 bits, or indices into a table, whose groups of inputs have scales; each group is widened
// once for all rows.
inline void multiply_scaled(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  const bool table = m.format == Format::kTable4;
  const auto* data = reinterpret_cast<const int8_t*>(m.at(m.data)) + panel * m.panel_bytes();
  const float* entries = reinterpret_cast<const float*>(m.at(m.table));
  for (int64_t k = 0; k < m.in; k += m.group) {
    alignas(64) float wide[kBlock * kPanel];
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Floats scale = load_scales(m, (panel * m.groups() + k / m.group) * kPanel + p);
      for (int64_t i = 0; i < m.group; ++i) {
        const int64_t input = k + i, shift = input % 2 * 4;
        if (!table) fetch<kPanel>(data + input * kPanel + kAhead);
        const Floats value =
            table ? looked_up(entries, load_bytes(data + input / 2 * kPanel + p) >> shift & 15)
                  : load_float8(data + input * kPanel + p);
        store(wide + i * kPanel + p, value * scale);
      }
    }
    multiply_block<Numbers<float>>(rows.x, rows.count, rows.stride,
                                   reinterpret_cast<const uint8_t*>(wide), k, m.group, sums);
  }
}

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
      total += to_float(above) * (factor * rows.scales[at]);
      if (m.minimums) total += splat(rows.sums[at]) * minimum;
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
  in_tiles<kIntegerTile>(rows.count, [&](auto count, int64_t row) {
#if BYTE_PRODUCTS
    if constexpr (count <= kSplitTile) return multiply_split<count>(m, form, rows, row, panel, sums);
#endif
    multiply_shorts<count>(m, form, rows, row, panel, sums);
  });
}

// True if inputs are rounded to bfloat16, as the weights are.
inline bool multiplies_bfloat16(const Matrix& m) {
  return m.format == Format::kBFloat16 && m.rounded_input;
}

void multiply_bfloat16(const Matrix& m, const Rows& rows, int64_t panel, float* sums);
void round_to_bfloat16(Rows& rows);
void multiply_blocks(const Matrix& m, const Rows& rows, int64_t panel, float* sums);
Rows prepared_for_blocks(const Matrix& m, const float* x, int64_t count, int64_t stride);

// sums [rows][32]: the rows times one panel, with scale and bias.
inline void multiply_panel(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  if (m.format == Format::kJoined) {
    const JoinedMatrix& joined = *reinterpret_cast<const JoinedMatrix*>(&m);
    int64_t part = joined.by_turns ? panel % joined.count : 0;
    int64_t own = joined.by_turns ? panel / joined.count : panel;
    while (own >= joined.part(part).panels()) own -= joined.part(part++).panels();
    multiply_panel(joined.part(part), rows, own, sums);
  } else if (m.blocks()) {
    multiply_blocks(m, rows, panel, sums);
  } else if (m.format == Format::kFloat32) {
    multiply_floats<float>(m, rows, rows.x, panel, sums);
  } else if (multiplies_bfloat16(m) && (rows.shorts || rows.rounded)) {
    multiply_bfloat16(m, rows, panel, sums);
  } else if (m.format == Format::kBFloat16) {
    multiply_floats<UpperHalf>(m, rows, rows.x, panel, sums);
  } else if (m.format == Format::kFloat16) {
    multiply_floats<Half>(m, rows, rows.x, panel, sums);
  } else if (m.format == Format::kTable4 || (m.format == Format::kFloat8 && m.group)) {
    multiply_scaled(m, rows, panel, sums);
  } else if (m.format == Format::kFloat8) {
    multiply_floats<Float8>(m, rows, rows.x, panel, sums);
  } else if (m.format == Format::kInt4 && m.table) {
    multiply_integers(m, Index4{{m.integer_table()}}, rows, panel, sums);
  } else if (m.format == Format::kInt4) {
    multiply_integers(m, Int4{}, rows, panel, sums);
  } else {
    multiply_integers(m, Int8{}, rows, panel, sums);
  }
  const auto at = [&](int64_t offset) {
    return offset ? reinterpret_cast<const float*>(m.at(offset)) + panel * kPanel : nullptr;
  };
  const float* scales = m.group == 0 ? at(m.scales) : nullptr;
  const float* bias = at(m.bias);
  if (!scales && !bias) return;
  for (int64_t p = 0; p < kPanel; p += kLanes)
    for (int64_t row = 0; row < rows.count; ++row) {
      Floats value = load(sums + row * kPanel + p);
      if (scales) value = value * load(scales + p);
#if WIDTH == 16
      __asm__("" : "+v"(value));  // rounded before the bias is added, however this is compiled
#endif
      if (bias) value = value + load(bias + p);
      store(sums + row * kPanel + p, value);
    }
}

// Of inputs of 8 bits a group has 16 if its largest is over so many times the mean of all groups'
// largest in its row: an outlier would leave few steps to the others of its group. With SmolLM2 that
// is a tenth of the groups, and takes four fifths of the KL divergence that 8 bits cost.
constexpr float kOutlier = 1.75f;
constexpr float kMostRounded = 32512.0f, kEightBits = 127.0f;

// Bounds of the groups of a row's inputs x [width], and which of them have 16 bits: all, where
// inputs are not rounded to 8.
inline void find_wide(const float* x, int64_t width, int64_t group, bool eight, float* bounds,
                      uint8_t* wide) {
  const int64_t groups = (width + group - 1) / group;
  float total = 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    bounds[g] = bound_of(x + g * group, smaller_of(group, width - g * group));
    total += bounds[g];
  }
  const float most = total * (kOutlier / static_cast<float>(groups));
  for (int64_t g = 0; g < groups; ++g) wide[g] = !eight || bounds[g] > most;
}

// Rows x [count, stride] made ready for a matrix: where that is of integers they are rounded too,
// each group of inputs by a scale of its own, to 8 bits or to 16.
inline Rows prepared(const Matrix& m, const float* x, int64_t count, int64_t stride) {
  Rows rows{x, count, stride, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (m.blocks()) return prepared_for_blocks(m, x, count, stride);
  if (multiplies_bfloat16(m)) round_to_bfloat16(rows);
  if (!m.integers()) return rows;
  const int64_t group = m.input_group(), groups = m.input_groups();
  int16_t* shorts = scratch<int16_t>(kShorts, count * stride);
  uint8_t* bytes = scratch<uint8_t>(kBytes, 2 * count * stride);
  float* scales = scratch<float>(kScales, 2 * count * groups);
  float* sums = scales + count * groups;
  int32_t* totals = scratch<int32_t>(kTotals, count * groups);
  uint8_t* wide = scratch<uint8_t>(kWide, count * groups);
  float* ordered = m.order ? scratch<float>(kOrdered, count * stride) : nullptr;
  over_rows(count, [=, &m](int64_t row) {
    const float* from = x + row * stride;
    if (ordered) {
      const int32_t* order = reinterpret_cast<const int32_t*>(m.at(m.order));
      for (int64_t k = 0; k < stride; ++k)
        ordered[row * stride + k] = k < m.in ? from[order[k]] : 0.0f;
      from = ordered + row * stride;
    }
    find_wide(from, stride, group, m.rounded_input, scales + row * groups, wide + row * groups);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * group, end = smaller_of(first + group, stride);
      int16_t* to = shorts + row * stride;
      const float bound = scales[row * groups + g];
      const float most = wide[row * groups + g] ? kMostRounded : kEightBits;
      const float factor = integer_factor(bound, most), scale = bound / most;
      const int32_t sum = round_all(from + first, end - first, factor, to + first);
      scales[row * groups + g] = scale;
      sums[row * groups + g] = static_cast<float>(sum) * scale;
      totals[row * groups + g] = sum;
#if BYTE_PRODUCTS
      uint8_t *above = bytes + 2 * row * stride, *below = above + stride;
      for (int64_t k = first; m.rounded_input && k < end; ++k) {
        above[k] = static_cast<uint8_t>(((to[k] + 128) >> 8) + kLifted);
        below[k] = static_cast<uint8_t>(to[k] + kLifted);
      }
#else
      for (int64_t k = first; m.rounded_input && k < end; k += 4) std::swap(to[k + 1], to[k + 2]);
#endif
    }
#if BYTE_PRODUCTS
    uint8_t* target = bytes + 2 * row * stride;
    for (int64_t k = 0; !m.rounded_input && k < stride; k += 32) {
      const int16_t* from = shorts + row * stride + k;
      const int64_t here = smaller_of<int64_t>(32, stride - k);
      if (m.format == Format::kInt4)
        split_bytes<Int4>(from, here, target + k, target + stride + k);
      else
        split_bytes<Int8>(from, here, target + k, target + stride + k);
    }
#endif
  });
  rows.bytes = bytes;
  rows.shorts = shorts;
  rows.wide = wide;
  rows.scales = scales;
  rows.sums = sums;
  rows.totals = totals;
  return rows;
}

// Calls body(unit, thread) for every unit, on all threads, which share `work` bytes; the items of
// `low`, which the body may wait for, go first. Even: units take the same time.
template <class Low, class Body>
inline void over_units(int64_t units, int64_t work, bool even, Low& low, Body&& body) {
  // Parts enough to share evenly, yet few: each costs a line of cache that goes between processors.
  const int64_t most = threads() * (even ? 8 : 32);
  const int64_t parts = smaller_of<int64_t>(larger_of<int64_t>(work / kItemBytes, threads()), most);
  const int64_t each = (units + parts - 1) / parts;
  // Of three quarters every thread has its own run, where what it asks for ahead is its own too.
  const int64_t run = even ? units * 3 / 4 / threads() / each * each : 0;
  const int64_t runs = run ? threads() : 0;
  const int64_t rest = (units - runs * run + each - 1) / each;
  parallel_for(low.items() + runs + rest, [&](int64_t item, int thread) {
    if (item < low.items()) return low.make(item);
    item -= low.items();
    const int64_t first = item < runs ? item * run : runs * run + (item - runs) * each;
    const int64_t end = smaller_of(units, first + (item < runs ? run : each));
    for (int64_t unit = first; unit < end; ++unit) body(unit, thread);
  });
}

// Some of the rows that were prepared for a matrix.
inline Rows some_of(const Rows& rows, const Matrix& m, int64_t first, int64_t count) {
  const auto moved = [&](auto* from, int64_t stride) { return from ? from + first * stride : from; };
  const int64_t groups = m.integers() ? m.input_groups() : 0;
  return {moved(rows.x, rows.stride),
          count,
          rows.stride,
          moved(rows.bytes, 2 * m.depth()),
          moved(rows.shorts, m.depth()),
          moved(rows.wide, groups),
          moved(rows.scales, groups),
          moved(rows.sums, groups),
          moved(rows.totals, m.blocks() ? m.depth() / 16 : groups),
          moved(rows.rounded, m.depth()),
          first == 0 ? rows.tiles : nullptr};
}

// Rows of floats that the L2 cache does not hold go through a few panels in parts, of as many as fill
// registers' tiles and AMX's.
constexpr int64_t kHeldBytes = 5 << 18, kPanelsAtOnce = 4, kWholeTiles = 48;
static_assert(kWholeTiles % kTile == 0 && (kAmxRows == 0 || kWholeTiles % kAmxRows == 0));

// Calls finish(panel, sums [rows][32 * together]) for every `together` panels: see over_units.
template <int64_t together, class Low, class Finish>
inline void linear(const Matrix& m, const Rows& rows, Low& low, Finish&& finish) {
  const int64_t work = m.panels() * m.panel_bytes() * (1 + rows.count / 4);
  const int64_t units = m.panels() / together, size = together * rows.count * kPanel;
  int64_t part = rows.count, each = 1;  // rows, and units that these go through
  if (!m.integers() && 4 * rows.count * rows.stride > kHeldBytes) {
    part = larger_of<int64_t>(96, kHeldBytes / (4 * rows.stride)) / kWholeTiles * kWholeTiles;
    const int64_t some = kPanelsAtOnce * threads(), rounds = (units * together + some - 1) / some;
    each = (units + rounds * threads() - 1) / (rounds * threads());  // all threads have as many
  }
  float* all = scratch<float>(kPanels, threads() * each * size);
  over_units((units + each - 1) / each, work, true, low, [&](int64_t group, int thread) {
    float* sums = all + thread * each * size;
    const int64_t first = group * each, end = smaller_of(units, first + each);
    for (int64_t row = 0; row < rows.count; row += part) {
      const Rows some = some_of(rows, m, row, smaller_of(part, rows.count - row));
      for (int64_t panel = first * together; panel < end * together; ++panel)
        multiply_panel(m, some, panel,
                       sums + ((panel - first * together) * rows.count + row) * kPanel);
    }
    for (int64_t unit = first; unit < end; ++unit) finish(unit, sums + (unit - first) * size);
  });
}
