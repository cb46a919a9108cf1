// From GGUF's blocks, which lie one after the other along a row, to panels of units: see BlockForm.

// One block taken apart: what a unit has of one output.
struct Parts {
  uint16_t halves[2];  // d, and the second where there are minimums
  int8_t scales[16], minimums[16];
  alignas(64) uint8_t q[256];  // in the order of the inputs; of 8 bits int8
};

inline uint16_t half_at(const uint8_t* from) {
  uint16_t half;
  __builtin_memcpy(&half, from, 2);
  return half;
}

// to[i] and to[i + count] are the low and the high nibbles of from [count].
inline void split_nibbles(const uint8_t* from, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] & 15;
  for (int64_t i = 0; i < count; ++i) to[count + i] = from[i] >> 4;
}

// Six bits of each scale and minimum of Q4_K and Q5_K, in 12 bytes.
inline void take_scales(const uint8_t* from, Parts& to) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t scale = from[i], minimum = from[4 + i], rest = from[8 + i];
    to.scales[i] = static_cast<int8_t>(scale & 63);
    to.minimums[i] = static_cast<int8_t>(minimum & 63);
    to.scales[4 + i] = static_cast<int8_t>((rest & 15) | (scale >> 2 & 48));
    to.minimums[4 + i] = static_cast<int8_t>(rest >> 4 | (minimum >> 2 & 48));
  }
}

// 2 bits of 256 values, in 64 bytes: those of 32 values in bits 2 j of 32 bytes.
inline void split_pairs(const uint8_t* from, uint8_t* to) {
  for (int64_t i = 0; i < 256; ++i)
    to[i] = static_cast<uint8_t>(from[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3);
}

// The bytes of a block in a file.
template <Format format>
constexpr int64_t stored_bytes() {
  if (format == Format::kQ4_K || format == Format::kQ5_K) return 16 + kForm<format>.span * kForm<format>.bits / 8;
  if (format == Format::kQ6_K) return 18 + kForm<format>.span * kForm<format>.bits / 8;
  if (format == Format::kQ2_K) return 20 + kForm<format>.span * kForm<format>.bits / 8;
  if (format == Format::kQ3_K) return 14 + kForm<format>.span * kForm<format>.bits / 8;
  if (format == Format::kIQ4_XS) return 8 + kForm<format>.span * kForm<format>.bits / 8;
  return (kForm<format>.minimums ? 4 : 2) + kForm<format>.span * kForm<format>.bits / 8;
}

template <Format format>
inline void take_apart(const uint8_t* from, Parts& to) {
  if constexpr (format == Format::kQ6_K) {
    const uint8_t *low = from, *high = from + 128;
    for (int64_t part = 0; part < 256; part += 128, low += 64, high += 32) {
      split_nibbles(low, 64, to.q + part);
      for (int64_t j = 0; j < 4; ++j)
        for (int64_t i = 0; i < 32; ++i)
          to.q[part + 32 * j + i] |= static_cast<uint8_t>((high[i] >> 2 * j & 3) << 4);
    }
    __builtin_memcpy(to.scales, from + 192, 16);
    to.halves[0] = half_at(from + 208);
    return;
  }
  if constexpr (format == Format::kQ2_K) {
    split_pairs(from + 16, to.q);
    for (int i = 0; i < 16; ++i) {
      to.scales[i] = static_cast<int8_t>(from[i] & 15);
      to.minimums[i] = static_cast<int8_t>(from[i] >> 4);
    }
    for (int i = 0; i < 2; ++i) to.halves[i] = half_at(from + 80 + 2 * i);
    return;
  }
  if constexpr (format == Format::kQ3_K) {
    const uint8_t* scales = from + 96;
    split_pairs(from + 32, to.q);
    for (int64_t i = 0; i < 256; ++i)
      to.q[i] |= static_cast<uint8_t>((from[i % 32] >> i / 32 & 1) << 2);
    for (int i = 0; i < 16; ++i)
      to.scales[i] = static_cast<int8_t>(
          ((scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    to.halves[0] = half_at(from + 108);
    return;
  }
  to.halves[0] = half_at(from);
  if constexpr (kForm<format>.minimums) to.halves[1] = half_at(from + 2);
  if constexpr (format == Format::kQ8_0) {
    __builtin_memcpy(to.q, from + 2, 32);
  } else if constexpr (kForm<format>.span == 32) {
    const uint8_t* rest = from + (kForm<format>.minimums ? 4 : 2);
    split_nibbles(rest + (kForm<format>.bits == 5 ? 4 : 0), 16, to.q);
    if constexpr (kForm<format>.bits == 5) {
      uint32_t high;
      __builtin_memcpy(&high, rest, 4);
      for (int i = 0; i < 32; ++i) to.q[i] |= static_cast<uint8_t>((high >> i & 1) << 4);
    }
  } else if constexpr (format == Format::kIQ4_XS) {
    const uint16_t high = half_at(from + 2);
    for (int i = 0; i < 8; ++i)
      to.scales[i] = static_cast<int8_t>(
          ((from[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4) - 32);
    for (int64_t i = 0; i < 8; ++i) split_nibbles(from + 8 + 16 * i, 16, to.q + 32 * i);
  } else {  // Q4_K, Q5_K
    take_scales(from + 4, to);
    const uint8_t* low = from + (kForm<format>.bits == 5 ? 48 : 16);
    for (int64_t i = 0; i < 4; ++i) split_nibbles(low + 32 * i, 32, to.q + 64 * i);
    if constexpr (kForm<format>.bits == 5)
      for (int64_t j = 0; j < 8; ++j)
        for (int64_t i = 0; i < 32; ++i)
          to.q[32 * j + i] |= static_cast<uint8_t>((from[16 + i] >> j & 1) << 4);
  }
}

// Four bytes as a word in the order of kBytePairs.
inline uint32_t byte_pairs(const uint8_t* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, 4);
  return (word & 0xff0000ffu) | (word >> 8 & 0xff00u) | (word << 8 & 0xff0000u);
}

// The words of 32 inputs of one output: see BlockForm.
template <Format format>
inline void put_words(const uint8_t* q, uint32_t* to) {
  constexpr int64_t low_bits = kForm<format>.low_bits(), high_bits = kForm<format>.high_bits();
  constexpr int64_t quads = 8 / low_bits;  // of a word
  uint32_t high[2] = {};
  for (int64_t quad = 0; quad < 8; ++quad) {
    const uint32_t word = byte_pairs(q + 4 * quad);
    if constexpr (kForm<format>.bits == 8) {
      to[quad * kPanel] = word;
      continue;
    }
    const uint32_t part = (word & kOfBytes<low_bits>) << quad % quads * low_bits;
    uint32_t& low = to[quad / quads * kPanel];
    low = quad % quads ? low | part : part;
    if constexpr (high_bits > 0)
      high[quad * high_bits / 8] |= (word >> low_bits & kOfBytes<high_bits>)
                                    << quad * high_bits % 8;
  }
  for (int64_t i = 0; i < high_bits; ++i) to[(low_bits + i) * kPanel] = high[i];
}

template <Format format>
void pack_blocks_of(const uint8_t* from, int64_t rows, int64_t inputs, int64_t stride, uint8_t* to) {
  const int64_t units = inputs / kForm<format>.span, panels = (rows + kPanel - 1) / kPanel;
  parallel_for(panels, [&](int64_t panel, int) {
    uint8_t* unit = to + panel * stride * units * kForm<format>.bytes();
    const int64_t here = smaller_of(kPanel, rows - panel * kPanel);
    if (here < kPanel) __builtin_memset(unit, 0, units * kForm<format>.bytes());
    for (int64_t k = 0; k < units; ++k, unit += kForm<format>.bytes())
      for (int64_t c = 0; c < here; ++c) {
        Parts parts;
        take_apart<format>(
            from + ((panel * kPanel + c) * units + k) * stored_bytes<format>(), parts);
        uint16_t* halves = reinterpret_cast<uint16_t*>(unit);
        for (int64_t i = 0; i < 1 + kForm<format>.minimums; ++i) halves[i * kPanel + c] = parts.halves[i];
        for (int64_t i = 0; kForm<format>.scales && i < kForm<format>.span / kForm<format>.sub; ++i)
          unit[kForm<format>.scales_at() + i * kPanel + c] = static_cast<uint8_t>(parts.scales[i]);
        for (int64_t i = 0; kForm<format>.scales && kForm<format>.minimums && i < kForm<format>.span / kForm<format>.sub; ++i) {
          uint8_t& minimum = unit[kForm<format>.minimums_at() + i * kPanel + c];
          const uint8_t own = static_cast<uint8_t>(parts.minimums[i]);
          minimum = kForm<format>.nibbles() ? static_cast<uint8_t>(minimum | own << 4) : own;
        }
        for (int64_t i = 0; i < kForm<format>.span / 32; ++i)
          put_words<format>(parts.q + 32 * i,
                            reinterpret_cast<uint32_t*>(unit + kForm<format>.words_at() +
                                                        i * kForm<format>.words_bytes()) + c);
      }
  });
}

inline void pack_blocks(const uint8_t* from, Format format, int64_t rows, int64_t inputs,
                        int64_t stride, uint8_t* to) {
  with_format(format, [&](auto one) { pack_blocks_of<one>(from, rows, inputs, stride, to); });
}
