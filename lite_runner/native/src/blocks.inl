// Products with GGUF's blocks as they are: see BlockForm. What multiplies them is rounded to 16
// bits, 32 inputs by one scale; so the products of 32 inputs by weights times their integer scales
// add up in 32 bits, and are exact up to there. Where those are too large, to 15 bits.

constexpr float kMostRounded = 32512.0f;  // 32 * 32512 * 31 * 63 is below 2^31, as of Q5_K
constexpr float kFewerBits = 16383.0f;    // 32 * 16383 * 32 * 128, as of Q6_K
constexpr int64_t kUnpacked = 256;           // inputs that are unpacked for several rows
constexpr int64_t kBlockTile = WIDTH == 16 ? 12 : WIDTH == 8 ? 3 : 4;

inline Ints load_bytes(const int8_t* from) {
#if WIDTH == 16
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif WIDTH == 8
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(WIDTH), aligned(1)));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
#endif
}

// kTable of pairs of indices, whatever lies above their 4 bits.
inline Ints in_table(Ints pair) {
#if WIDTH == 16
  constexpr auto twice = [] {
    struct { alignas(64) int16_t at[32]; } made{};
    for (int i = 0; i < 32; ++i) made.at[i] = kTable[i % 16];
    return made;
  };
  static constexpr auto table = twice();
  return (Ints)_mm512_permutexvar_epi16((__m512i)pair, _mm512_load_si512(table.at));
#elif WIDTH == 8
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(kTable)));
  const __m256i found = _mm256_shuffle_epi8(table, _mm256_slli_epi16((__m256i)(pair & 0x000f000f), 8));
  return (Ints)_mm256_srai_epi16(found, 8);
#else
  int16_t found[2 * WIDTH];
  const Shorts index = reinterpret_cast<Shorts>(pair);
  for (int lane = 0; lane < 2 * WIDTH; ++lane) found[lane] = kTable[index[lane] & 15];
  Ints values;
  __builtin_memcpy(&values, found, sizeof values);
  return values;
#endif
}

// The integers q of 32 inputs, of `lanes` outputs from `part` on: pair i is of inputs 2 i, 2 i + 1.
template <Format format>
struct Quants {
  static Ints word(const uint8_t* words, int64_t index, int64_t part) {
    return load(reinterpret_cast<const int32_t*>(words) + index * kPanel + part * kLanes);
  }

  template <int64_t i>
  static Ints pair(const uint8_t* words, int64_t part) {
    if constexpr (kForm<format>.bits == 8) {
      return Int8::pair<i % 2>(word(words, i / 2, part));
    } else {
      const Ints low = word(words, i / 4, part);
      if constexpr (kForm<format>.table) {
        return in_table(low >> (4 * (i % 4)));
      } else if constexpr (kForm<format>.bits == 4) {
        return Int4::pair<i % 4>(low);
      } else {
        constexpr int64_t bits = kForm<format>.bits - 4, each = 16 / bits, at = i % each * bits;
        constexpr int32_t mask = bits == 1 ? 0x00100010 : 0x00300030;
        const Ints high = word(words, 4 + i / each, part);
        const Ints moved = at < 4 ? high << (at < 4 ? 4 - at : 0) : high >> (at < 4 ? 0 : at - 4);
        return Int4::pair<i % 4>(low) | (moved & mask);
      }
    }
  }
};

// Of a unit: what the scale of outputs is multiplied with, and the minimums of each 32 inputs.
template <Format format>
inline Floats factor_of(const uint8_t* unit, int64_t part) {
  return load_half(reinterpret_cast<const uint16_t*>(unit) + part * kLanes);
}

template <Format format>
inline Floats minimum_of(const uint8_t* unit, int64_t chunk, int64_t part) {
  const Floats all = load_half(reinterpret_cast<const uint16_t*>(unit) + kPanel + part * kLanes);
  if constexpr (!kForm<format>.scales) return all;
  const int8_t* minimums = reinterpret_cast<const int8_t*>(unit) + kForm<format>.minimums_at();
  return -(all * to_float(load_bytes(minimums + chunk * kPanel + part * kLanes)));
}

template <Format format>
inline Ints scale_of(const uint8_t* unit, int64_t sub, int64_t part) {
  const int8_t* scales = reinterpret_cast<const int8_t*>(unit) + kForm<format>.scales_at();
  return load_bytes(scales + sub * kPanel + part * kLanes);
}

// The same additions for one row and for many.
inline void add_products(Floats& total, Ints sum, Floats factor, float scale) {
  total += to_float(sum) * (factor * splat(scale));
}
inline void add_minimum(Floats& total, Floats minimum, float sum) { total += minimum * splat(sum); }

// One row by one panel, the blocks unpacked in registers.
template <Format format>
void multiply_blocks_by_row(const Matrix& m, const Rows& rows, int64_t panel, float* to) {
  constexpr int64_t chains = 4;  // one sum alone would have to be waited for
  const uint8_t* unit = m.at(m.data) + panel * m.panel_bytes();
  Floats total[kParts] = {};
  for (int64_t first = 0; first < m.in; first += kForm<format>.span, unit += kForm<format>.bytes()) {
    fetch<kForm<format>.words_at()>(unit + kAhead, false);
    Floats factor[kParts];
    for (int64_t p = 0; p < kParts; ++p) factor[p] = factor_of<format>(unit, p);
    for (int64_t chunk = 0; chunk < kForm<format>.span / 32; ++chunk) {
      const uint8_t* words = unit + kForm<format>.words_at() + chunk * kForm<format>.words_bytes();
      const int64_t k = first + 32 * chunk;
      const int16_t* x = rows.shorts + k;
      fetch<kForm<format>.words_bytes()>(words + kAhead, false);
      Ints scaled[kParts] = {};
      unrolled<32 / kForm<format>.sub>([&](auto half) __attribute__((always_inline)) {
        Ints sum[chains][kParts] = {};
        if (kForm<format>.offset) {
          int32_t inputs = 0;
          for (int64_t i = 0; i < kForm<format>.sub / 16; ++i) inputs += rows.totals[k / 16 + half + i];
          for (int64_t p = 0; p < kParts; ++p)
            sum[0][p] = splat_int(static_cast<int32_t>(-kForm<format>.offset) * inputs);
        }
        unrolled<kForm<format>.sub / 2>([&](auto i) __attribute__((always_inline)) {
          constexpr int64_t index = half * (kForm<format>.sub / 2) + i;
          const Ints two = broadcast_word(x + 2 * index);
          for (int64_t p = 0; p < kParts; ++p)
            sum[i % chains][p] = add_pairs(
                sum[i % chains][p], two, Quants<format>::template pair<index>(words, p));
        });
        for (int64_t p = 0; p < kParts; ++p) {
          sum[0][p] += sum[1][p] + (sum[2][p] + sum[3][p]);
          if constexpr (kForm<format>.scales)
            scaled[p] += sum[0][p] * scale_of<format>(unit, chunk * (32 / kForm<format>.sub) + half, p);
          else
            scaled[p] = sum[0][p];
        }
      });
      for (int64_t p = 0; p < kParts; ++p) {
        add_products(total[p], scaled[p], factor[p], rows.scales[k / 32]);
        if constexpr (kForm<format>.minimums)
          add_minimum(total[p], minimum_of<format>(unit, chunk, p), rows.sums[k / 32]);
      }
    }
  }
  for (int64_t p = 0; p < kParts; ++p) store(to + p * kLanes, total[p]);
}

// Up to 256 inputs of a panel, unpacked for all rows.
struct Unpacked {
  alignas(64) int32_t pairs[kUnpacked / 2][kPanel];  // two integers of 16 bits, times their scale
  alignas(64) float factor[kUnpacked / 32][kPanel], minimum[kUnpacked / 32][kPanel];
};

template <Format format>
#if WIDTH == 4 && defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-ivopts")))  // with it GCC 12.2 drops the whole loop for IQ4_XS
#endif
void unpack(const uint8_t* data, int64_t inputs, Unpacked& to) {
  for (int64_t first = 0; first < inputs; first += kForm<format>.span) {
    const uint8_t* unit = data + first / kForm<format>.span * kForm<format>.bytes();
    fetch<kForm<format>.words_at()>(unit + kAhead, false);
    for (int64_t chunk = 0; chunk < kForm<format>.span / 32; ++chunk) {
      const int64_t group = first / 32 + chunk;
      const uint8_t* words = unit + kForm<format>.words_at() + chunk * kForm<format>.words_bytes();
      fetch<kForm<format>.words_bytes()>(words + kAhead, false);
      for (int64_t p = 0; p < kParts; ++p) {
        store(to.factor[group] + p * kLanes, factor_of<format>(unit, p));
        if (kForm<format>.minimums)
          store(to.minimum[group] + p * kLanes, minimum_of<format>(unit, chunk, p));
        Shorts scale[2] = {};
        if constexpr (kForm<format>.scales)
          for (int64_t i = 0; i < 32 / kForm<format>.sub; ++i) {
            const Ints one = scale_of<format>(unit, chunk * (32 / kForm<format>.sub) + i, p);
            scale[i] = reinterpret_cast<Shorts>((one & 0xffff) | one << 16);
          }
        unrolled<16>([&](auto i) __attribute__((always_inline)) {
          Shorts pair = reinterpret_cast<Shorts>(Quants<format>::template pair<i>(words, p));
          if (kForm<format>.offset) pair -= static_cast<int16_t>(kForm<format>.offset);
          if (kForm<format>.scales) pair *= scale[i / (kForm<format>.sub / 2)];
          *reinterpret_cast<Ints*>(to.pairs[group * 16 + i] + p * kLanes) =
              reinterpret_cast<Ints>(pair);
        });
      }
    }
  }
}

// sums [count][32] of the rows from `row` on += their inputs from k on by what was unpacked.
template <Format format, int64_t count>
void multiply_unpacked(const Unpacked& from, const Rows& rows, int64_t row, int64_t k,
                       int64_t inputs, float* sums) {
  const int64_t all = rows.stride / 32;
  for (int64_t g = 0; g < inputs / 32; ++g) {
    Ints sum[count][kParts] = {};
    const int16_t* x = rows.shorts + row * rows.stride + k + 32 * g;
    for (int64_t i = 0; i < 16; ++i) {
      Ints weights[kParts];
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p)
        weights[p] = load(from.pairs[g * 16 + i] + p * kLanes);
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r) {
        const Ints two = broadcast_word(x + r * rows.stride + 2 * i);
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; ++p) sum[r][p] = add_pairs(sum[r][p], two, weights[p]);
      }
    }
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) {
      const Floats factor = load(from.factor[g] + p * kLanes);
#pragma GCC unroll 16
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = (row + r) * all + k / 32 + g;
        float* target = sums + (row + r) * kPanel + p * kLanes;
        Floats total = k + g ? load(target) : Floats{};
        add_products(total, sum[r][p], factor, rows.scales[at]);
        if constexpr (kForm<format>.minimums)
          add_minimum(total, load(from.minimum[g] + p * kLanes), rows.sums[at]);
        store(target, total);
      }
    }
  }
}

template <Format format>
void multiply_blocks_of(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  if (rows.count == 1) return multiply_blocks_by_row<format>(m, rows, panel, sums);
  Unpacked unpacked;
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  for (int64_t k = 0; k < m.in; k += kUnpacked) {
    const int64_t inputs = smaller_of(kUnpacked, m.in - k);
    unpack<format>(data + k / kForm<format>.span * kForm<format>.bytes(), inputs, unpacked);
    in_tiles<kBlockTile>(rows.count, [&](auto count, int64_t row) {
      multiply_unpacked<format, count>(unpacked, rows, row, k, inputs, sums);
    });
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
  with_format(m.format, [&](auto format) { multiply_blocks_of<format>(m, rows, panel, sums); });
}

// What the inputs of a matrix are rounded to.
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
  over_rows(count, [=](int64_t row) {
    for (int64_t first = 0; first < stride; first += 32) {
      const float* from = x + row * stride;
      int16_t* to = shorts + row * stride;
      const float bound = bound_of(from + first, 32);
      const float factor = integer_factor(bound, most), scale = bound / most;
      int32_t* total = totals + (row * stride + first) / 16;
      for (int64_t half = 0; half < 2; ++half) {
        int32_t sum = 0;
        for (int64_t i = first + 16 * half; i < first + 16 * half + 16; ++i) {
          to[i] = static_cast<int16_t>(__builtin_rintf(from[i] * factor));
          sum += to[i];
        }
        total[half] = sum;
      }
      scales[row * groups + first / 32] = scale;
      sums[row * groups + first / 32] = static_cast<float>(total[0] + total[1]) * scale;
    }
  });
  return {x, count, stride, nullptr, shorts, scales, sums, totals};
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
      const int64_t in = i % 32;
      const auto word = [&](int64_t at) { return words[at * kPanel + column]; };
      int32_t q;
      if (kForm<format>.bits == 8) {
        q = static_cast<int8_t>(word(in / 4) >> 8 * (in % 2 * 2 + in % 4 / 2));
      } else {
        q = word(in / 8) >> 4 * (in % 2 * 4 + in % 8 / 2) & 15;
        constexpr int64_t bits = kForm<format>.bits - 4, each = bits > 0 ? 32 / bits : 1;  // inputs of a word
        if (bits > 0)
          q |= (word(4 + in / each) >> (16 * (in % 2) + in % each / 2 * bits) & ((1 << bits) - 1))
               << 4;
        if (kForm<format>.table) q = kTable[q];
      }
      float factor = float_of_half(halves[0]);
      if (kForm<format>.scales)
        factor *= static_cast<float>(signed_byte(kForm<format>.scales_at() + i / kForm<format>.sub * kPanel));
      float value = factor * static_cast<float>(q - kForm<format>.offset);
      if (kForm<format>.minimums) {
        const float all = float_of_half(halves[kPanel]);
        if (kForm<format>.scales)
          value -= all * static_cast<float>(signed_byte(kForm<format>.minimums_at() + i / 32 * kPanel));
        else
          value += all;
      }
      to[k + i] = value;
    }
  }
}

inline void read_row_of_blocks(const Matrix& m, int64_t index, float* to) {
  with_format(m.format, [&](auto format) { read_row_of<format>(m, index, to); });
}
