// Products of rows with panels of integers: exact within a group of inputs, which has a scale.

constexpr int64_t kIntegerTile = WIDTH == 16 ? 8 : 2;
constexpr int64_t kSplitTile = WIDTH == 16 ? 4 : 1;  // rows up to which it pays that they are two bytes

// The scales of a group from number `at` on.
inline Floats load_scales(const Matrix& m, int64_t at) {
  if (m.scale_type == ScaleType::kFloat32) return load(reinterpret_cast<const float*>(m.at(m.scales)) + at);
  return m.scale_type == ScaleType::kHalf ? load_half(m.halves(m.scales) + at)
                                          : load_bfloat16(m.halves(m.scales) + at);
}

// The same additions for one row and for many.
inline void add_products(Floats& total, Floats sum, Floats factor, float scale) {
  total += sum * (factor * splat(scale));
}
inline void add_products(Floats& total, Ints sum, Floats factor, float scale) {
  add_products(total, to_float(sum), factor, scale);
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

// sum += the products of inputs x of some rows, lifted bytes, and signed words; offsets: what the words
// of the group sum up to.
template <int64_t count>
inline __attribute__((always_inline)) void add_bytes(const uint8_t* words, const uint8_t* x,
                                                     int64_t stride, int64_t inputs,
                                                     const int32_t* offsets,
                                                     Ints (&sum)[count][kParts]) {
  for (int64_t k = 0; k < inputs; k += 4, words += Words::bytes) {
    fetch<Words::bytes>(words + kAhead);
    const Words weights = Words::read(words);
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; ++r) {
      const Ints four = broadcast_word(x + r * stride + k);
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) sum[r][p] = add_quads(sum[r][p], four, weights.part[p]);
    }
  }
#pragma GCC unroll 8
  for (int64_t p = 0; p < kParts; ++p) {
    const Ints offset = kLifted * load(offsets + p * kLanes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; ++r) sum[r][p] -= offset;
  }
}

// Inputs of 8 bits, or in some groups of 16, by weights of 8 bits.
template <int64_t count>
void multiply_bytes(const Matrix& m, const Rows& rows, int64_t row, int64_t panel, float* sums) {
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  const int64_t group = m.input_group(), groups = m.input_groups(), depth = m.depth();
  const int32_t* offsets = reinterpret_cast<const int32_t*>(m.at(m.sums)) + panel * groups * kPanel;
  Tile<count> totals{};
  for (int64_t g = 0; g < groups; ++g, offsets += kPanel) {
    Ints sum[count][kParts] = {};
    const int64_t first = g * group, inputs = smaller_of(group, depth - first);
    const uint8_t* above = rows.bytes + 2 * row * depth + first;
    if (any_wide<count>(rows, row, groups, g)) {
      add_bytes<count>(data, above, 2 * depth, inputs, offsets, sum);
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; ++p) sum[r][p] <<= 8;
    }
    add_bytes<count>(data, above + depth, 2 * depth, inputs, offsets, sum);
    data += inputs / 4 * Words::bytes;
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

// The same in their order and lifted, for multiply_bytes.
inline void lift_bytes(const int16_t* from, int64_t count, uint8_t* above, uint8_t* below) {
  for (int64_t k = 0; k < count; ++k) {
    above[k] = static_cast<uint8_t>(((from[k] + 128) >> 8) + kLifted);
    below[k] = static_cast<uint8_t>(from[k] + kLifted);
  }
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

// How tiles take the inputs of a matrix, and in how many bytes each: those of 8 bits as they are, the two
// of 16 bits for themselves, or both in bfloat16.
enum class TileForm { kNone = 0, kByte = 1, kTwoBytes = 2, kBFloat16 = 4 };

// Tiles of a matrix: of so many inputs in a row, of groups of so many.
struct TileLayout {
  TileForm form;
  int64_t inputs, group;
};

#if AMX && WIDTH == 16
// Adds up 16 rows over groups of inputs, whose products tiles leave in memory: multiply(group) makes
// those of `each` groups and store(group) leaves them there, add(group, row, totals) takes those of four
// rows of one. Of `together` groups they are there before any is taken, so that totals stay in registers
// meanwhile; and those of the groups behind stand between rows, for the processor to make while vectors
// add: they are stored only once it has.
template <int64_t together, int64_t each, class Multiply, class Store, class Add>
inline __attribute__((always_inline)) void add_up_tiles(int64_t groups, bool begin, float* sums,
                                                        Multiply&& multiply, Store&& store, Add&& add) {
  constexpr int64_t blocks = kAmxRows / kAddedRows, apart = blocks * each / together;
  static_assert(blocks % apart == 0);
  for (int64_t g = 0; g < smaller_of(groups, together); g += each) multiply(g), store(g);
  for (int64_t first = 0; first < groups; first += together)
    unrolled<blocks>([&](auto block) __attribute__((always_inline)) {
      const int64_t next = first + together + block / apart * each;
      if (block % apart == 0 && next < groups) multiply(next);
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
      if ((block + 1) % apart == 0 && next < groups) store(next);
    });
}

// In bfloat16 sums need no vectors to put bytes together and to make floats of them. They are exact:
// integers up to 32 * 32512 * 16, below 2^24.
inline TileLayout tile_layout(const Matrix& m) {
  const int64_t group = m.input_group();
  if (kUnpacked % group || group % 32 || m.depth() % 32) return {TileForm::kNone, 0, group};
  if (m.rounded_input) return {TileForm::kByte, 32, group};
  const bool nibbles = m.format == Format::kInt4 && !m.table && !m.zeros && m.zero >= 0 && m.zero <= 16;
  if (nibbles && group == 32) return {TileForm::kBFloat16, 32, group};
  return {TileForm::kTwoBytes, group % 64 || m.depth() % 64 ? 32 : 64, group};
}

// 32 integers of a row, inputs from k on, for tiles; above, below: as split_bytes gives them.
inline void put_in_tiles(const TileLayout& layout, const TileGroups& tiles, int64_t row, int64_t k,
                         const int16_t* from, const uint8_t* above, const uint8_t* below) {
  const int64_t inputs = layout.inputs, g = k / layout.group, index = k % layout.group / inputs;
  if (layout.form == TileForm::kTwoBytes) {
    tiles.put(row, g, 2 * index, inputs, k % inputs, above);
    tiles.put(row, g, 2 * index + 1, inputs, k % inputs, below);
  } else if (layout.form == TileForm::kByte) {
    const __m256i bytes = _mm512_cvtepi16_epi8(_mm512_loadu_si512(from));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(tiles.tile(row, g, index, inputs)), bytes);
  } else {
    const auto put = [](uint8_t* to, Ints value) {  // exact: its bits
      const __m512i bits = (__m512i)(reinterpret_cast<Ints>(to_float(value)) >> 16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(bits));
    };
    uint8_t* to = tiles.tile(row, g, 0, 64);
    for (int64_t i = 0; i < 32; i += kLanes) {
      const auto* at = reinterpret_cast<const __m256i*>(from + i);
      const Ints all = (Ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256(at)), upper = (all + 128) & ~255;
      put(to + 2 * i, upper);
      put(to + kAmxRows * 64 + 2 * i, all - upper);
    }
  }
}

// Up to 256 inputs of a panel for tiles, and what their groups are added up by: four inputs of an output
// in a word, in the order of W::quad but signed, or two in bfloat16, less the zero.
struct TileWeights {
  alignas(64) int32_t words[kUnpacked / 2][kPanel];
  alignas(64) int32_t zero[kUnpacked / 32][kPanel];
  alignas(64) float factor[kUnpacked / 32][kPanel], minimum[kUnpacked / 32][kPanel];
};

template <TileForm how, class W>
inline void unpack(const Matrix& m, W form, int64_t panel, int64_t k, int64_t inputs, TileWeights& to) {
  constexpr int64_t bytes = 8 / W::step * Words::bytes;
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes() + k / 8 * bytes;
  const Ints whole = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  const Ints even = reinterpret_cast<Ints>(to_float(whole - 16));
  const Ints odd = reinterpret_cast<Ints>(to_float(whole - 15));
  const Ints values = (even >> 16 & 0xffff) | (odd & ~0xffff);  // of -16 to 15
  const Ints lifted = splat_int(0x10001 * (16 - static_cast<int32_t>(m.zero)));
  for (int64_t i = 0; i < inputs; i += 8, data += bytes) {
    fetch<bytes>(data + kAhead);
    for (int64_t p = 0; p < kParts; ++p)
      if constexpr (how == TileForm::kBFloat16)
        unrolled<4>([&](auto pair) __attribute__((always_inline)) {
          const Ints word = load(reinterpret_cast<const int32_t*>(data) + p * kLanes);
          const Ints index = W::template pair<pair>(word) + lifted;
          store(to.words[i / 2 + pair] + p * kLanes,
                (Ints)_mm512_permutexvar_epi16((__m512i)index, (__m512i)values));
        });
      else
        unrolled<2>([&](auto quad) __attribute__((always_inline)) {
          const Ints four = form.template quad<quad>(data, p);
          store(to.words[i / 4 + quad] + p * kLanes, W::lifted ? four ^ kLiftedWord : four);
        });
  }
  const int64_t group = m.input_group();
  for (int64_t g = 0; g * group < inputs; ++g)
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const int64_t scale = (panel * m.groups() + k / group + g) * kPanel + p;
      Ints zero = splat_int(static_cast<int32_t>(m.zero));
      if (m.zeros) zero = load_bytes(reinterpret_cast<const int8_t*>(m.at(m.zeros)) + scale);
      store(to.zero[g] + p, zero);
      store(to.factor[g] + p, m.group ? load_scales(m, scale) : splat(1.0f));
      store(to.minimum[g] + p, m.minimums ? load_half(m.halves(m.minimums) + scale) : Floats{});
    }
}

// The same as multiply_split, or multiply_bytes, and the same sums, of the rows that tiles multiply,
// from `row` on 16 of them, by what was unpacked, from input k on. `how`, with so many bytes in a row.
template <TileForm how, int64_t bytes, bool zeros, bool minimums>
void multiply_by_amx(const Matrix& m, const TileWeights& from, const Rows& rows, int64_t row,
                     int64_t panel, int64_t k, int64_t inputs, float* sums) {
  using Tiles = AmxTiles<bytes>;
  constexpr bool halves = how == TileForm::kBFloat16, two = how == TileForm::kTwoBytes;
  constexpr int64_t sides = two ? 2 : 1, together = 2, each = halves ? 2 : 1;
  const int64_t group = m.input_group(), groups = (inputs + group - 1) / group;
  const int64_t size = TileGroup::size(halves ? 2 * bytes : sides * group);
  const TileGroup& x = rows.tiles.of(row, k / group);
  alignas(64) Ints products[2 * together][sides][kAmxRows][kParts];
  const auto multiply = [&](int64_t g) __attribute__((always_inline)) {
    const uint8_t* tiles = x.after(g, size).tiles();
    unrolled<2 * sides * each>([](auto index) { Tiles::template start<index>(); });
    if constexpr (halves)
      for (int64_t side = 0; side < 2; ++side, tiles += kAmxRows * bytes) {
        Tiles::template multiply_tile<TileProduct::kBFloat16, 0>(tiles, from.words[g * 16]);
        if (g + 1 < groups)
          Tiles::template multiply_tile<TileProduct::kBFloat16, 2>(tiles + size, from.words[g * 16 + 16]);
      }
    else
      Tiles::template multiply<TileProduct::kSigned, 2 * sides>(
          tiles, bytes, from.words[g * group / 4], smaller_of(group, inputs - g * group),
          sides * bytes * kAmxRows);
  };
  const auto store = [&](int64_t g) __attribute__((always_inline)) {
    unrolled<2 * sides * each>([&](auto index) __attribute__((always_inline)) {
      Tiles::template store<index>(products[g % (2 * together)]);
    });
  };
  const auto add = [&](int64_t g, auto r, Tile<kAddedRows>& totals) __attribute__((always_inline)) {
    const TileGroup& own = x.after(g, size);
    auto& product = products[g % (2 * together)];
    if constexpr (how == TileForm::kByte)
      own.each_wide(r, [&](int64_t wide) {
        const int64_t at = rows.tiles.lead + row + wide, first = k + g * group;
        const int64_t here = smaller_of(group, inputs - g * group);
        Ints above[1][kParts] = {};
        add_bytes<1>(m.at(m.data) + panel * m.panel_bytes() + first / 4 * Words::bytes,
                     rows.bytes + 2 * at * m.depth() + first, 0, here,
                     reinterpret_cast<const int32_t*>(m.at(m.sums)) +
                         (panel * m.input_groups() + first / group) * kPanel,
                     above);
        for (int64_t p = 0; p < kParts; ++p) product[0][wide][p] += above[0][p] << 8;
      });
#pragma GCC unroll 2
    for (int64_t p = 0; p < kParts; ++p) {
      const Floats factor = load(from.factor[g] + p * kLanes);
      const Floats minimum = load(from.minimum[g] + p * kLanes);
      const Ints zero = load(from.zero[g] + p * kLanes);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kAddedRows; ++i) {
        Ints sum = product[0][r + i][p];
        if constexpr (two) sum = (sum << 8) + product[1][r + i][p];
        if (zeros) sum -= zero * own.totals[r + i];
        Floats& total = totals.at[i][p];
        if (halves)
          add_products(total, reinterpret_cast<Floats>(sum), factor, own.scales[r + i]);
        else
          add_products(total, sum, factor, own.scales[r + i]);
        if (minimums) add_minimum(total, minimum, own.sums[r + i]);
      }
    }
  };
  add_up_tiles<together, each>(groups, k == 0, sums + row * kPanel, multiply, store, add);
}

// Those of all rows that tiles multiply.
template <TileForm how, int64_t bytes, class W>
void multiply_in_tiles(const Matrix& m, W form, const Rows& rows, int64_t panel, float* sums) {
  const int64_t tiled = rows.tiles.rows(rows.count);
  const AmxTiles<bytes> amx(kAmxRows);
  TileWeights weights;
  for (int64_t k = 0; k < m.depth(); k += kUnpacked) {
    const int64_t inputs = smaller_of(kUnpacked, m.depth() - k);
    unpack<how>(m, form, panel, k, inputs, weights);
    with_flag(how != TileForm::kBFloat16 && (m.zeros || m.zero), [&](auto zeros) {
      with_flag(m.minimums, [&](auto minimums) {
        for (int64_t row = 0; row < tiled; row += kAmxRows)
          multiply_by_amx<how, bytes, zeros, minimums>(m, weights, rows, row, panel, k, inputs,
                                                       sums + rows.tiles.lead * kPanel);
      });
    });
  }
}
#else
inline TileLayout tile_layout(const Matrix&) { return {TileForm::kNone, 0, 0}; }
inline void put_in_tiles(const TileLayout&, const TileGroups&, int64_t, int64_t, const int16_t*,
                         const uint8_t*, const uint8_t*) {}
#endif

// Rows of 16 bits, or of 8, by one panel.
template <class W>
void multiply_integers(const Matrix& m, W form, const Rows& rows, int64_t panel, float* sums) {
  const auto multiply = [&](auto count, int64_t row) {
#if BYTE_PRODUCTS
    if (m.rounded_input) return multiply_bytes<count>(m, rows, row, panel, sums);
    if constexpr (count <= kSplitTile) return multiply_split<count>(m, form, rows, row, panel, sums);
#endif
    multiply_shorts<count>(m, form, rows, row, panel, sums);
  };
  const int64_t tiled = rows.tiles.rows(rows.count), lead = tiled ? rows.tiles.lead : 0;
#if AMX && WIDTH == 16
  if (tiled) {
    const TileLayout layout = tile_layout(m);
    if (layout.form == TileForm::kBFloat16) {
      if constexpr (std::is_same_v<W, Int4>)
        multiply_in_tiles<TileForm::kBFloat16, 64>(m, form, rows, panel, sums);
    } else if (layout.form == TileForm::kByte) {
      multiply_in_tiles<TileForm::kByte, 32>(m, form, rows, panel, sums);
    } else if (layout.inputs == 64) {
      multiply_in_tiles<TileForm::kTwoBytes, 64>(m, form, rows, panel, sums);
    } else {
      multiply_in_tiles<TileForm::kTwoBytes, 32>(m, form, rows, panel, sums);
    }
  }
#endif
  in_tiles<kIntegerTile>(lead, multiply);
  in_tiles<kIntegerTile>(rows.count, multiply, lead + tiled);
}
