// Products with GGUF's blocks as they are: see BlockForm. Their inputs are rounded to 16
// bits, 32 inputs by one scale; so the products of 32 inputs by weights times their integer scales
// add up in 32 bits, and are exact up to there. Where those are too large, to 15 bits; and to 8 where
// the matrix says so, which takes half as many products, but for groups with an outlier.

// 32 * kMostRounded * 31 * 63 is below 2^31, as of Q5_K; and here 32 * 16383 * 32 * 128, as of Q6_K.
constexpr float kFewerBits = 16383.0f;
constexpr int64_t kBlockTile = WIDTH == 8 ? 3 : 4;  // rows whose totals registers hold too

// The integers q of 32 inputs, of the outputs of a part.
template <Format format>
struct Quants {
  static Ints word(const uint8_t* words, int64_t index, int64_t part) {
    return load(reinterpret_cast<const int32_t*>(words) + index * kPanel + part * kLanes);
  }

  // The bits of q above the first kLow of quad `quad`, moved to where its bytes `right` bits further
  // have them.
  template <int64_t quad, int64_t right>
  static Ints high(const uint8_t* words, int64_t part) {
    constexpr int64_t bits = kForm<format>.high_bits(), quads = 8 / bits;  // of a word
    constexpr int64_t at = quad % quads * bits + right;
    const Ints all = word(words, kLow + quad / quads, part);
    return at < kLow ? all << (at < kLow ? kLow - at : 0) : all >> (at < kLow ? 0 : at - kLow);
  }
  static constexpr int64_t kLow = kForm<format>.low_bits(), kQuads = 8 / kLow;  // of a word
  static constexpr int32_t kLowBits = kOfBytes<kLow>;
  static constexpr int32_t kHighBits = kOfBytes<kForm<format>.high_bits()> << kLow;

  // Of inputs 2 i and 2 i + 1, in the halves of words.
  template <int64_t i>
  static Ints pair(const uint8_t* words, int64_t part) {
    if constexpr (kForm<format>.bits == 8) {
      return Int8::pair<i % 2>(word(words, i / 2, part));
    } else {
      constexpr int64_t quad = i / 2;
      const Ints low = word(words, quad / kQuads, part) >> (quad % kQuads * kLow + i % 2 * 8);
      if constexpr (kForm<format>.table)
        return Table{kTable}.pairs(low);
      else if constexpr (kHighBits == 0)
        return low & (kLowBits & 0x00ff00ff);
      else
        return (low & (kLowBits & 0x00ff00ff)) |
               (high<quad, i % 2 * 8>(words, part) & (kHighBits & 0x00ff00ff));
    }
  }

#if BYTE_PRODUCTS
  // Of inputs 4 i, 4 i + 2, 4 i + 1, 4 i + 3, as bytes for add_quads, and how much more those say.
  static constexpr int64_t lifted = kForm<format>.bits == 8 || kForm<format>.table ? kLifted : 0;
  template <int64_t i>
  static Ints quad(const uint8_t* words, int64_t part) {
    if constexpr (kForm<format>.bits == 8) {
      return word(words, i, part) ^ kLiftedWord;
    } else {
      const Ints low = word(words, i / kQuads, part) >> (i % kQuads * kLow) & kLowBits;
      if constexpr (kForm<format>.table)
        return Table{kTable}.lifted(low);
      else if constexpr (kHighBits == 0)
        return low;
      else
        return low | (high<i, 0>(words, part) & kHighBits);
    }
  }
#endif
};

// Of a unit: what the scale of outputs is multiplied with, and the minimums of each 32 inputs.
template <Format format>
inline Floats factor_of(const uint8_t* unit, int64_t part) {
  return load_half(reinterpret_cast<const uint16_t*>(unit) + part * kLanes);
}

template <Format format>
inline Floats minimum_of(const uint8_t* unit, int64_t sub, int64_t part) {
  const Floats all = load_half(reinterpret_cast<const uint16_t*>(unit) + kPanel + part * kLanes);
  if constexpr (!kForm<format>.scales) return all;
  const int8_t* minimums = reinterpret_cast<const int8_t*>(unit) + kForm<format>.minimums_at();
  const Ints own = load_bytes(minimums + sub * kPanel + part * kLanes);
  return -(all * to_float(kForm<format>.nibbles() ? own >> 4 & 15 : own));
}

template <Format format>
inline Ints scale_of(const uint8_t* unit, int64_t sub, int64_t part) {
  const int8_t* scales = reinterpret_cast<const int8_t*>(unit) + kForm<format>.scales_at();
  const Ints own = load_bytes(scales + sub * kPanel + part * kLanes);
  return kForm<format>.nibbles() ? own & 15 : own;
}

// The sum of the inputs that share the minimum `index` of group `at` of 32.
template <Format format>
inline float inputs_of(const Rows& rows, int64_t at, int64_t index) {
  if (kForm<format>.sub == 32) return rows.sums[at];
  return static_cast<float>(rows.totals[2 * at + index]) * rows.scales[at];
}

// sums [count][32] of the inputs of the rows from `row` on that share the scale `index` of 32, from k
// on, by their q - offset. `wide`: some have 16 bits.
template <Format format, bool wide, int64_t index, int64_t count>
inline __attribute__((always_inline)) void multiply_sub(const uint8_t* words, const Rows& rows,
                                                        int64_t row, int64_t k,
                                                        Ints (&sums)[count][kParts]) {
  constexpr int64_t sub = kForm<format>.sub;
#if BYTE_PRODUCTS
  constexpr int64_t offset = kForm<format>.offset + Quants<format>::lifted;
#else
  constexpr int64_t offset = kForm<format>.offset;
#endif
  const int64_t first = row * rows.stride + k;
#pragma GCC unroll 4
  for (int64_t r = 0; r < count; ++r) {
    const int32_t* totals = rows.totals + (first + r * rows.stride) / 16 + index * (sub / 16);
    int32_t inputs = 0;
    for (int64_t i = 0; i < sub / 16; ++i) inputs += totals[i];
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p)
      sums[r][p] = offset ? splat_int(static_cast<int32_t>(-offset) * inputs) : Ints{};
  }
#if BYTE_PRODUCTS
  constexpr int64_t chains = count * kParts < 4 ? 2 : 1;  // one sum would have to be waited for
  const uint8_t* x = rows.bytes + 2 * first;
  Ints high[chains][count][kParts] = {}, low[chains][count][kParts] = {};
  unrolled<sub / 4>([&](auto i) __attribute__((always_inline)) {
    constexpr int64_t quad = index * (sub / 4) + i;
    Ints q[kParts];
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) q[p] = Quants<format>::template quad<quad>(words, p);
#pragma GCC unroll 4
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* four = x + 2 * r * rows.stride + 4 * quad;
      const Ints above = wide ? broadcast_word(four) : Ints{};
      const Ints below = broadcast_word(four + 32);
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) {
        Ints &upper = high[i % chains][r][p], &lower = low[i % chains][r][p];
        if (wide) upper = add_quads(upper, q[p], above);
        lower = add_quads(lower, q[p], below);
      }
    }
  });
#pragma GCC unroll 4
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) {
      Ints upper = high[0][r][p], lower = low[0][r][p];
      if (chains == 2) upper += high[chains - 1][r][p], lower += low[chains - 1][r][p];
      sums[r][p] += lower + (upper << 8);
    }
#else
  static_assert(count == 1);
  const int16_t* x = rows.shorts + first;
  Ints chain[4][kParts] = {};
  unrolled<sub / 2>([&](auto i) __attribute__((always_inline)) {
    constexpr int64_t pair = index * (sub / 2) + i;
    const Ints two = broadcast_word(x + 2 * pair);
    for (int64_t p = 0; p < kParts; ++p)
      chain[i % 4][p] =
          add_pairs(chain[i % 4][p], two, Quants<format>::template pair<pair>(words, p));
  });
  for (int64_t p = 0; p < kParts; ++p)
    sums[0][p] += chain[0][p] + chain[1][p] + (chain[2][p] + chain[3][p]);
#endif
}

constexpr int64_t kFewRows = WIDTH == 16 ? 4 : 1;  // whose sums fit the registers

// A few rows from `row` on by one panel, the blocks unpacked in registers.
template <Format format, int64_t count>
void multiply_blocks_by_rows(const Matrix& m, const Rows& rows, int64_t row, int64_t panel,
                             float* to) {
  const uint8_t* unit = m.at(m.data) + panel * m.panel_bytes();
  const int64_t all = rows.stride / 32;
  Tile<count> total{};
  for (int64_t first = 0; first < m.in; first += kForm<format>.span, unit += kForm<format>.bytes()) {
    fetch<kForm<format>.words_at()>(unit + kAhead);
    Floats factor[kParts];
    for (int64_t p = 0; p < kParts; ++p) factor[p] = factor_of<format>(unit, p);
    for (int64_t chunk = 0; chunk < kForm<format>.span / 32; ++chunk) {
      const uint8_t* words = unit + kForm<format>.words_at() + chunk * kForm<format>.words_bytes();
      const int64_t k = first + 32 * chunk;
      fetch<kForm<format>.words_bytes()>(words + kAhead);
      Ints scaled[count][kParts] = {};
#if BYTE_PRODUCTS
      const bool wide = any_wide<count>(rows, row, all, k / 32);
#else
      constexpr bool wide = true;
#endif
      unrolled<32 / kForm<format>.sub>([&](auto index) __attribute__((always_inline)) {
        Ints sums[count][kParts];
        if (wide)
          multiply_sub<format, true, index>(words, rows, row, k, sums);
        else
          multiply_sub<format, false, index>(words, rows, row, k, sums);
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; ++p) {
          Ints scale{};
          if constexpr (kForm<format>.scales)
            scale = scale_of<format>(unit, chunk * (32 / kForm<format>.sub) + index, p);
#pragma GCC unroll 4
          for (int64_t r = 0; r < count; ++r)
            if constexpr (kForm<format>.scales)
              scaled[r][p] += sums[r][p] * scale;
            else
              scaled[r][p] = sums[r][p];
        }
      });
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) {
#pragma GCC unroll 4
        for (int64_t r = 0; r < count; ++r)
          add_products(total.at[r][p], scaled[r][p], factor[p],
                       rows.scales[(row + r) * all + k / 32]);
        constexpr int64_t subs = kForm<format>.minimums ? 32 / kForm<format>.sub : 0;
        for (int64_t i = 0; i < subs; ++i) {
          const Floats minimum = minimum_of<format>(unit, chunk * subs + i, p);
#pragma GCC unroll 4
          for (int64_t r = 0; r < count; ++r)
            add_minimum(total.at[r][p], minimum,
                        inputs_of<format>(rows, (row + r) * all + k / 32, i));
        }
      }
    }
  }
  store_tile(total, to + row * kPanel);
}

// Up to 256 inputs of a panel, unpacked for all rows.
struct Unpacked {
  // Two integers of 16 bits, times their scale; or four unsigned bytes.
  alignas(64) int32_t words[kUnpacked / 2][kPanel];
  alignas(64) int32_t scale[kUnpacked / 16][kPanel];  // of bytes
  alignas(64) float factor[kUnpacked / 32][kPanel], minimum[kUnpacked / 16][kPanel];
};

template <Format format, bool bytes>
#if WIDTH == 4 && defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-ivopts")))  // with it GCC 12.2 drops the whole loop for IQ4_XS
#endif
void unpack(const uint8_t* data, int64_t inputs, Unpacked& to) {
  constexpr int64_t subs = 32 / kForm<format>.sub;
  for (int64_t first = 0; first < inputs; first += kForm<format>.span) {
    const uint8_t* unit = data + first / kForm<format>.span * kForm<format>.bytes();
    fetch<kForm<format>.words_at()>(unit + kAhead);
    for (int64_t chunk = 0; chunk < kForm<format>.span / 32; ++chunk) {
      const int64_t group = first / 32 + chunk;
      const uint8_t* words = unit + kForm<format>.words_at() + chunk * kForm<format>.words_bytes();
      fetch<kForm<format>.words_bytes()>(words + kAhead);
      for (int64_t p = 0; p < kParts; ++p) {
        store(to.factor[group] + p * kLanes, factor_of<format>(unit, p));
        for (int64_t i = 0; kForm<format>.minimums && i < subs; ++i)
          store(to.minimum[group * subs + i] + p * kLanes,
                minimum_of<format>(unit, chunk * subs + i, p));
        Shorts scale[2] = {};
        if constexpr (kForm<format>.scales)
          for (int64_t i = 0; i < subs; ++i) {
            const Ints one = scale_of<format>(unit, chunk * subs + i, p);
            if (bytes) store(to.scale[group * subs + i] + p * kLanes, one);
            scale[i] = reinterpret_cast<Shorts>((one & 0xffff) | one << 16);
          }
#if BYTE_PRODUCTS
        if constexpr (bytes) {
          unrolled<8>([&](auto i) __attribute__((always_inline)) {
            store(to.words[group * 8 + i] + p * kLanes, Quants<format>::template quad<i>(words, p));
          });
          continue;
        }
#endif
        unrolled<16>([&](auto i) __attribute__((always_inline)) {
          Shorts pair = reinterpret_cast<Shorts>(Quants<format>::template pair<i>(words, p));
          if (kForm<format>.offset) pair -= static_cast<int16_t>(kForm<format>.offset);
          if (kForm<format>.scales) pair *= scale[i / (kForm<format>.sub / 2)];
          store(to.words[group * 16 + i] + p * kLanes, reinterpret_cast<Ints>(pair));
        });
      }
    }
  }
}

// Sums of the products of 32 inputs with group `g` of what was unpacked, x those of the first row.
template <Format format, int64_t count>
inline __attribute__((always_inline)) void multiply_pairs(const Unpacked& from, int64_t g,
                                                          const int16_t* x, int64_t stride,
                                                          Ints (&sum)[count][kParts]) {
  for (int64_t i = 0; i < 16; ++i) {
    Ints weights[kParts];
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) weights[p] = load(from.words[g * 16 + i] + p * kLanes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; ++r) {
      const Ints two = broadcast_word(x + r * stride + 2 * i);
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) sum[r][p] = add_pairs(sum[r][p], two, weights[p]);
    }
  }
}

#if BYTE_PRODUCTS
// sum += the products `part` of the inputs of group `g` that share the scale `index`, less their offset
// and by that scale; `totals`: of each 16 of the first row's inputs.
template <Format format, int64_t count>
inline __attribute__((always_inline)) void add_scaled(const Unpacked& from, int64_t g, int64_t index,
                                                      const Ints (&part)[count][kParts],
                                                      const int32_t* totals, int64_t stride,
                                                      Ints (&sum)[count][kParts]) {
  constexpr int64_t sub = kForm<format>.sub, subs = 32 / sub;
  constexpr int64_t offset = kForm<format>.offset + Quants<format>::lifted;
#pragma GCC unroll 16
  for (int64_t r = 0; r < count; ++r) {
    int32_t inputs = 0;
    for (int64_t i = 0; offset && i < sub / 16; ++i)
      inputs += totals[r * stride / 16 + index * (sub / 16) + i];
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) {
      Ints exact = part[r][p] - static_cast<int32_t>(offset) * inputs;
      if (kForm<format>.scales) exact *= load(from.scale[g * subs + index] + p * kLanes);
      sum[r][p] += exact;
    }
  }
}

// The same as multiply_pairs, of bytes. `wide`: some inputs have 16 bits.
template <Format format, int64_t count>
inline __attribute__((always_inline)) void multiply_quads(const Unpacked& from, int64_t g,
                                                          const uint8_t* x, const int32_t* totals,
                                                          int64_t stride, bool wide,
                                                          Ints (&sum)[count][kParts]) {
  constexpr int64_t sub = kForm<format>.sub, quads = sub / 4;
  unrolled<32 / sub>([&](auto index) __attribute__((always_inline)) {
    Ints part[count][kParts] = {};
    const auto add = [&](const uint8_t* bytes) __attribute__((always_inline)) {
      for (int64_t i = index * quads; i < (index + 1) * quads; ++i) {
        Ints weights[kParts];
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; ++p) weights[p] = load(from.words[g * 8 + i] + p * kLanes);
#pragma GCC unroll 16
        for (int64_t r = 0; r < count; ++r) {
          const Ints four = broadcast_word(bytes + 2 * r * stride + 4 * i);
#pragma GCC unroll 8
          for (int64_t p = 0; p < kParts; ++p) part[r][p] = add_quads(part[r][p], weights[p], four);
        }
      }
    };
    if (wide) {
      add(x);
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; ++p) part[r][p] <<= 8;
    }
    add(x + 32);
    add_scaled<format>(from, g, index, part, totals, stride, sum);
  });
}
#endif

// totals += the sums of some rows of group `g` of what was unpacked. `at`: the first row's group, which
// others have `all` further each.
template <Format format, int64_t count>
inline __attribute__((always_inline)) void add_unpacked(const Unpacked& from, int64_t g,
                                                        const Rows& rows, int64_t at, int64_t all,
                                                        const Ints (&sum)[count][kParts],
                                                        Tile<count>& totals) {
#pragma GCC unroll 8
  for (int64_t p = 0; p < kParts; ++p) {
    const Floats factor = load(from.factor[g] + p * kLanes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; ++r) {
      Floats& total = totals.at[r][p];
      add_products(total, sum[r][p], factor, rows.scales[at + r * all]);
      constexpr int64_t subs = kForm<format>.minimums ? 32 / kForm<format>.sub : 0;
      for (int64_t i = 0; i < subs; ++i)
        add_minimum(total, load(from.minimum[g * subs + i] + p * kLanes),
                    inputs_of<format>(rows, at + r * all, i));
    }
  }
}

// sums [count][32] of the rows from `row` on += their inputs from k on by what was unpacked.
template <Format format, bool bytes, int64_t count>
void multiply_unpacked(const Unpacked& from, const Rows& rows, int64_t row, int64_t k,
                       int64_t inputs, float* sums) {
  const int64_t all = rows.stride / 32;
  Tile<count> totals{};
  if (k) load_tile(totals, sums + row * kPanel);
  for (int64_t g = 0; g < inputs / 32; ++g) {
    Ints sum[count][kParts] = {};
    const int64_t at = row * all + k / 32 + g;
#if BYTE_PRODUCTS
    if constexpr (bytes)
      multiply_quads<format>(from, g, rows.bytes + 64 * at, rows.totals + 2 * at, rows.stride,
                             any_wide<count>(rows, row, all, k / 32 + g), sum);
    else
#endif
      multiply_pairs<format>(from, g, rows.shorts + 32 * at, rows.stride, sum);
    add_unpacked<format>(from, g, rows, at, all, sum, totals);
  }
  store_tile(totals, sums + row * kPanel);
}

#if AMX && WIDTH == 16
// sum += 256 times the products of group `g` and the upper bytes x of a row.
inline void add_above(const Unpacked& from, int64_t g, const uint8_t* x, Ints (&sum)[kParts]) {
  Ints above[kParts] = {};
  for (int64_t i = 0; i < 8; ++i)
    for (int64_t p = 0; p < kParts; ++p)
      above[p] = add_quads(above[p], load(from.words[g * 8 + i] + p * kLanes), broadcast_word(x + 4 * i));
  for (int64_t p = 0; p < kParts; ++p) sum[p] += above[p] << 8;
}

// The same of 16 rows of bytes by AMX's tiles, of formats whose scales are of 32 inputs. Few rows have
// 16 bits in a group, and their upper bytes are multiplied by vectors. x: the first group of the rows;
// above: upper bytes of the first row, which others have `stride` further each.
template <Format format>
void multiply_unpacked_by_amx(const Unpacked& from, const TileGroup& x, const uint8_t* above,
                              int64_t stride, bool begin, int64_t groups, float* sums) {
  static_assert(kForm<format>.sub == 32);
  constexpr int64_t together = 4;
  constexpr int32_t offset = kForm<format>.offset + Quants<format>::lifted;
  const int64_t size = TileGroup::size(32);
  alignas(64) Ints products[2 * together][kAmxRows][kParts];
  const auto multiply = [&](int64_t g) __attribute__((always_inline)) {
    const TileGroup& own = x.after(g, size);
    unrolled<2>([](auto index) { AmxTiles<32>::start<index>(); });
    AmxTiles<32>::multiply<TileProduct::kUnsigned, 2>(own.tiles(), 32, from.words[g * 8], 32);
  };
  const auto store = [&](int64_t g) __attribute__((always_inline)) {
    unrolled<2>([&](auto index) { AmxTiles<32>::store<index>(products[g % (2 * together)]); });
  };
  const auto add = [&](int64_t g, auto r, Tile<kAddedRows>& totals) __attribute__((always_inline)) {
    const TileGroup& own = x.after(g, size);
    auto& product = products[g % (2 * together)];
    own.each_wide(r, [&](int64_t row) { add_above(from, g, above + 64 * g + row * stride, product[row]); });
#pragma GCC unroll 2
    for (int64_t p = 0; p < kParts; ++p) {
      const Floats factor = load(from.factor[g] + p * kLanes);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kAddedRows; ++i) {
        Ints sum = product[r + i][p];
        if (offset) sum -= offset * own.totals[r + i];
        if (kForm<format>.scales) sum *= load(from.scale[g] + p * kLanes);
        add_products(totals.at[i][p], sum, factor, own.scales[r + i]);
        if (kForm<format>.minimums)
          add_minimum(totals.at[i][p], load(from.minimum[g] + p * kLanes), own.sums[r + i]);
      }
    }
  };
  add_up_tiles<together, 1>(groups, begin, sums, multiply, store, add);
}
#endif

template <Format format, bool eight>
void multiply_blocks_of(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  if (rows.count <= kFewRows)
    return in_tiles<kFewRows>(rows.count, [&](auto count, int64_t row) {
      multiply_blocks_by_rows<format, count>(m, rows, row, panel, sums);
    });
  constexpr bool bytes = eight && BYTE_PRODUCTS;
  Unpacked unpacked;
  constexpr bool by_amx = bytes && kAmxRows > 0 && kForm<format>.sub == 32;
  const int64_t tiled = by_amx ? rows.tiles.rows(rows.count) : 0, lead = tiled ? rows.tiles.lead : 0;
  const AmxTiles<32> amx(tiled ? kAmxRows : 0);
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  for (int64_t k = 0; k < m.in; k += kUnpacked) {
    const int64_t inputs = smaller_of(kUnpacked, m.in - k);
    unpack<format, bytes>(data + k / kForm<format>.span * kForm<format>.bytes(), inputs, unpacked);
    const auto multiply = [&](auto count, int64_t row) {
      multiply_unpacked<format, bytes, count>(unpacked, rows, row, k, inputs, sums);
    };
#if AMX && WIDTH == 16
    if constexpr (by_amx)
      for (int64_t row = 0; row < tiled; row += kAmxRows)
        multiply_unpacked_by_amx<format>(unpacked, rows.tiles.of(row, k / 32),
                                         rows.bytes + 2 * ((lead + row) * rows.stride + k),
                                         2 * rows.stride, k == 0, inputs / 32,
                                         sums + (lead + row) * kPanel);
#endif
    in_tiles<kBlockTile>(lead, multiply);
    in_tiles<kBlockTile>(rows.count, multiply, lead + tiled);
  }
}

// Calls body with a Format as a constant.
template <class Body>
inline void with_format(Format format, Body&& body) {
  unrolled<sizeof(kBlockForms) / sizeof(kBlockForms[0])>([&](auto index) {
    constexpr Format one = static_cast<Format>(static_cast<int64_t>(Format::kQ4_0) + index);
    if (format == one) body(std::integral_constant<Format, one>{});
  });
}

inline void multiply_blocks(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  with_format(m.format, [&](auto format) {
    if (m.rounded_input)
      multiply_blocks_of<format, true>(m, rows, panel, sums);
    else
      multiply_blocks_of<format, false>(m, rows, panel, sums);
  });
}

// The largest integer that the inputs of a matrix are rounded to, but for those of 8 bits.
inline float most_rounded(const Matrix& m) {
  if (m.format != Format::kJoined)
    return m.format == Format::kQ6_K || m.format == Format::kIQ4_XS ? kFewerBits : kMostRounded;
  const JoinedMatrix& joined = *reinterpret_cast<const JoinedMatrix*>(&m);
  float most = kMostRounded;
  for (int64_t i = 0; i < joined.count; ++i) most = smaller_of(most, most_rounded(joined.part(i)));
  return most;
}

inline Rows prepared_for_blocks(const Matrix& m, const float* x, int64_t count, int64_t stride) {
  const int64_t groups = m.input_groups();
  const float most = most_rounded(m);
  int16_t* shorts = scratch<int16_t>(kShorts, count * stride);
  float* scales = scratch<float>(kScales, 2 * count * groups);
  float* sums = scales + count * groups;
  int32_t* totals = scratch<int32_t>(kTotals, count * stride / 16);
  uint8_t* wide = scratch<uint8_t>(kWide, count * groups);
  const int64_t tiled = m.rounded_input ? rows_of_bytes(count) : 0;
  TileGroups tiles{nullptr, groups, 32};
  const int64_t both = in_lines(2 * count * stride);  // of upper and lower bytes
  uint8_t* bytes = BYTE_PRODUCTS ? scratch<uint8_t>(kBytes, both + tiles.size(tiled)) : nullptr;
  if (tiled) tiles.first = bytes + both;
  over_rows(count, [=, &m](int64_t row) {
    const float* from = x + row * stride;
    find_scales(from, stride, 32, m.rounded_input, most, wide + row * groups, sums + row * groups,
                scales + row * groups);  // factors first, in the place of sums
    for (int64_t g = row * groups; g < (row + 1) * groups; ++g, from += 32) {
      int16_t* to = shorts + 32 * g;
      int32_t* total = totals + 2 * g;
      for (int64_t half = 0; half < 2; ++half)
        total[half] = round_all(from + 16 * half, 16, sums[g], to + 16 * half);
      sums[g] = static_cast<float>(total[0] + total[1]) * scales[g];
#if BYTE_PRODUCTS
      split_bytes<Int8>(to, 32, bytes + 64 * g, bytes + 64 * g + 32);
      if (row >= tiled) continue;
      tiles.put(row, g - row * groups, scales[g], sums[g], total[0] + total[1], wide[g]);
      tiles.put(row, g - row * groups, 0, 32, 0, bytes + 64 * g + 32);
#endif
    }
  }, tiles.rows_at_once());
  return {x, count, stride, bytes, shorts, wide, scales, sums, totals, nullptr, tiles};
}

template <Format format>
void read_row_of(const Matrix& m, int64_t row, float* to) {
  const int64_t column = row % kPanel;
  const uint8_t* unit = m.at(m.data) + row / kPanel * m.panel_bytes();
  const auto signed_byte = [&](int64_t at) { return static_cast<int8_t>(unit[at + column]); };
  for (int64_t k = 0; k < m.in; k += kForm<format>.span, unit += kForm<format>.bytes()) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(unit) + column;
    for (int64_t i = 0; i < kForm<format>.span; ++i) {
      const uint32_t* words =
          reinterpret_cast<const uint32_t*>(unit + kForm<format>.words_at() + i / 32 * kForm<format>.words_bytes());
      const int64_t in = i % 32, byte = in % 2 * 2 + in % 4 / 2;
      const auto word = [&](int64_t at) { return words[at * kPanel + column] >> 8 * byte; };
      int32_t q;
      if (kForm<format>.bits == 8) {
        q = static_cast<int8_t>(word(in / 4));
      } else {
        constexpr int64_t low = kForm<format>.low_bits(), high = kForm<format>.high_bits();
        constexpr int64_t lows = 8 / low, highs = high ? 8 / high : 1;  // quads of a word
        q = word(in / 4 / lows) >> in / 4 % lows * low & ((1 << low) - 1);
        if (high)
          q |= (word(low + in / 4 / highs) >> in / 4 % highs * high & ((1 << high) - 1)) << low;
        if (kForm<format>.table) q = kTable[q];
      }
      float factor = float_of_half(halves[0]);
      const int64_t place = i / kForm<format>.sub * kPanel;
      constexpr bool nibbles = kForm<format>.nibbles();
      if (kForm<format>.scales) {
        const int8_t scale = signed_byte(kForm<format>.scales_at() + place);
        factor *= static_cast<float>(nibbles ? scale & 15 : scale);
      }
      float value = factor * static_cast<float>(q - kForm<format>.offset);
      if (kForm<format>.minimums) {
        const float all = float_of_half(halves[kPanel]);
        if (kForm<format>.scales) {
          const int8_t minimum = signed_byte(kForm<format>.minimums_at() + place);
          value -= all * static_cast<float>(nibbles ? minimum >> 4 & 15 : minimum);
        } else
          value += all;
      }
      to[k + i] = value;
    }
  }
}

inline void read_row_of_blocks(const Matrix& m, int64_t index, float* to) {
  with_format(m.format, [&](auto format) { read_row_of<format>(m, index, to); });
}
