// Vectors of WIDTH floats in GCC's vector extensions, and operations that they lack.

typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH), aligned(4)));
constexpr int64_t kLanes = WIDTH;
constexpr int64_t kParts = kPanel / kLanes;  // vectors of a panel

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline Ints load(const int32_t* from) { return *reinterpret_cast<const Ints*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }
inline void store(int32_t* to, Ints value) { *reinterpret_cast<Ints*>(to) = value; }
inline Floats splat(float value) { return value - Floats{}; }
inline Ints splat_int(int32_t value) { return value - Ints{}; }
inline Floats to_float(Ints value) { return __builtin_convertvector(value, Floats); }

// Calls body with a flag as a constant.
template <class Body>
inline void with_flag(bool flag, Body&& body) {
  if (flag)
    body(std::true_type{});
  else
    body(std::false_type{});
}

// Calls body with 0, 1, .. count - 1 as constants.
template <int64_t count, class Body>
inline __attribute__((always_inline)) void unrolled(Body&& body) {
  if constexpr (count > 0) {
    unrolled<count - 1>(body);
    body(std::integral_constant<int64_t, count - 1>{});
  }
}

#if BYTE_PRODUCTS
// What the instruction for products of bytes takes as `lifted` bytes: 128 more than they say and
// unsigned on x86, signed as they are on ARM.
#if WIDTH > 4
constexpr int32_t kLifted = 128;
#else
constexpr int32_t kLifted = 0;
#endif
constexpr int32_t kLiftedWord = kLifted * 0x01010101u;

// Every word of `sum` + the products of its four lifted bytes by the four signed ones.
inline Ints add_quads(Ints sum, Ints lifted, Ints bytes) {
#if WIDTH == 16
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)lifted, (__m512i)bytes);
#elif WIDTH == 8
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)lifted, (__m256i)bytes);
#else
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)lifted, (int8x16_t)bytes);
#endif
}
#endif

inline float float_of_half(uint16_t half) {
#if WIDTH > 4
  return _cvtsh_ss(half);
#else
  uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  float value;
  if (rest >= 0x7c00u) {  // infinity or NaN
    uint32_t bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    __builtin_memcpy(&value, &bits, 4);
    return value;
  }
  if (rest < 0x400u) {  // subnormal, which as a float may count as 0 (MindSpore asks for that)
    value = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  uint32_t bits = rest << 13;  // the exponent's bias is corrected by the product
  __builtin_memcpy(&value, &bits, 4);
  value *= 5.192296858534828e33f;  // 2^112
  return sign ? -value : value;
#endif
}

inline Floats load_half(const uint16_t* from) {
#if WIDTH == 16
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif WIDTH == 8
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2)));
  const Ints raw = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints);
  const Ints rest = (raw & 0x7fff) << 13;  // the exponent's bias is corrected by the product
  const Ints finite = reinterpret_cast<Ints>(reinterpret_cast<Floats>(rest) * 5.192296858534828e33f);
  const Ints small = reinterpret_cast<Ints>(to_float(raw & 0x7fff) * 5.9604644775390625e-8f);
  const Ints known = rest < 0x400 << 13 ? small : finite;  // see float_of_half
  const Ints magnitude = rest < 0x7c00 << 13 ? known : rest | 0x7f800000;
  return reinterpret_cast<Floats>(magnitude | (raw & 0x8000) << 16);
#endif
}

inline uint16_t half_of_float(float value) {
#if WIDTH > 4
  return _cvtss_sh(value, 0);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // below the smallest normal number: its unit is 2^-24
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(__builtin_rintf(magnitude * 16777216.0f)));
  }
  bits += 0xc8000fffu + (bits >> 13 & 1);  // to nearest, ties to even
  return static_cast<uint16_t>(sign | bits >> 13);
#endif
}

// Many at once: their floats may lie in another processor's cache, for which single ones would wait.
inline void halves_of(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if WIDTH == 16
  for (; i + 16 <= count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#elif WIDTH == 8
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
  for (; i < count; ++i) to[i] = half_of_float(from[i]);
}

// The upper half of the nearest bfloat16, ties to even.
inline int16_t upper_half(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  bits = value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return static_cast<int16_t>(bits >> 16);
}

inline void store_upper_halves(int16_t* to, Floats value) {
  typedef int16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2)));
  const Ints bits = reinterpret_cast<Ints>(value);
  const Ints nearest = bits + (0x7fff + (bits >> 16 & 1));
  const Ints kept = value == value ? nearest : bits | 0x400000;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(kept >> 16, Halves);
}

inline Floats load_bfloat16(const uint16_t* from) {
#if WIDTH == 16
  __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
#else
  typedef uint16_t Half __attribute__((vector_size(2 * WIDTH), aligned(2)));
  typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
  return reinterpret_cast<Floats>(
      __builtin_convertvector(*reinterpret_cast<const Half*>(from), Words) << 16);
#endif
}

inline Ints load_bytes(const int8_t* from) {
#if WIDTH == 16  // GCC widens them one by one
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif WIDTH == 8
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(WIDTH), aligned(1)));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
#endif
}

inline Floats load_int8(const int8_t* from) { return to_float(load_bytes(from)); }

// Floats of 8 bits, e4m3: 2^8 times the halves with the same exponent and fraction.
inline Floats load_float8(const int8_t* from) {
#if WIDTH == 16
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4080));
  return (Floats)_mm512_cvtph_ps(halves) * 256.0f;
#elif WIDTH == 8
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(-0x4080));
  return (Floats)_mm256_cvtph_ps(halves) * 256.0f;
#else
  uint16_t halves[WIDTH];
  for (int64_t i = 0; i < WIDTH; ++i)
    halves[i] = static_cast<uint16_t>(from[i] * 128) & 0xbf80;
  return load_half(halves) * 256.0f;
#endif
}

// Entries of a table of 16, at indices of 4 bits.
inline Floats looked_up(const float* table, Ints index) {
#if WIDTH == 16
  return (Floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif WIDTH == 8
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
  return (Floats)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
  Floats found;
  for (int64_t i = 0; i < WIDTH; ++i) found[i] = table[index[i]];
  return found;
#endif
}

// Integers of 8 bits at indices of 4.
struct Table {
  const int8_t* entries;  // [16]

  // Of the lower 4 bits of the halves of words, ignoring higher bits.
  Ints pairs(Ints indices) const {
#if WIDTH == 16
    const __m256i twice = _mm256_broadcastsi128_si256(bytes());
    return (Ints)_mm512_permutexvar_epi16((__m512i)indices, _mm512_cvtepi8_epi16(twice));
#elif WIDTH == 8
    const __m256i found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes()),
                                              _mm256_slli_epi16((__m256i)(indices & 0x000f000f), 8));
    return (Ints)_mm256_srai_epi16(found, 8);
#else
    int16_t found[2 * WIDTH];
    const Shorts index = reinterpret_cast<Shorts>(indices);
    for (int lane = 0; lane < 2 * WIDTH; ++lane) found[lane] = entries[index[lane] & 15];
    Ints values;
    __builtin_memcpy(&values, found, sizeof values);
    return values;
#endif
  }

#if BYTE_PRODUCTS
  // Of bytes that are indices, lifted for add_quads.
  Ints lifted(Ints indices) const {
#if WIDTH == 4
    const uint8x16_t found = vqtbl1q_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(entries)), (uint8x16_t)indices);
    return (Ints)found;
#else
    const __m128i all = _mm_xor_si128(bytes(), _mm_set1_epi8(static_cast<char>(kLifted)));
#if WIDTH == 16
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)indices);
#else
    return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), (__m256i)indices);
#endif
#endif
  }
#endif

#if WIDTH > 4
 private:
  __m128i bytes() const { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)); }
#endif
};

// Prefetches memory that will be read soon. Into all caches: with the hint that it is read only once, an
// Emerald Rapids core reads memory at 8 GB/s, else at 27.
template <int64_t bytes>
inline __attribute__((always_inline)) void fetch(const void* from) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

inline float sum(Floats value) {
#if WIDTH == 16
  return _mm512_reduce_add_ps(value);
#else
  float total = 0;
  for (int lane = 0; lane < WIDTH; ++lane) total += value[lane];
  return total;
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <class T>
constexpr T larger_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
constexpr T smaller_of(T a, T b) {
  return a < b ? a : b;
}

inline float largest(Floats value) {
#if WIDTH == 16
  return _mm512_reduce_max_ps(value);
#else
  float most = value[0];
  for (int lane = 1; lane < WIDTH; ++lane) most = larger_of(most, value[lane]);
  return most;
#endif
}

// The largest magnitude in x [count]; NaN if one of them is.
inline float bound_of(const float* x, int64_t count) {
  // Without their signs, the bits of floats are in the order of their values, and those of
  // NaN come last.
  Ints most{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints bits = reinterpret_cast<Ints>(load(x + i)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
#if WIDTH == 16
  int32_t bound = _mm512_reduce_max_epi32((__m512i)most);
#else
  int32_t bound = 0;
  for (int lane = 0; lane < WIDTH; ++lane) bound = larger_of<int32_t>(bound, most[lane]);
#endif
  for (; i < count; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bound = larger_of(bound, bits & 0x7fffffff);
  }
  float value;
  __builtin_memcpy(&value, &bound, 4);
  return value;
}

// Rounds `count` numbers to integers, by 16 a time where there are vectors of so many; their sum.
inline int32_t round_all(const float* from, int64_t count, float factor, int16_t* to) {
  int32_t sum = 0;
  int64_t i = 0;
#if WIDTH == 16
  __m512i sums = _mm512_setzero_si512();
  for (; i + 16 <= count; i += 16) {
    const __m512i whole = _mm512_cvtps_epi32((__m512)(load(from + i) * factor));
    const __m256i shorts = _mm512_cvtepi32_epi16(whole);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), shorts);
    sums = _mm512_add_epi32(sums, _mm512_cvtepi16_epi32(shorts));
  }
  sum = _mm512_reduce_add_epi32(sums);
#endif
  for (; i < count; ++i) {
    to[i] = static_cast<int16_t>(__builtin_rintf(from[i] * factor));
    sum += to[i];
  }
  return sum;
}

// The factor that makes numbers up to `bound` integers up to `most`; 0 where that
// would be infinite.
inline float integer_factor(float bound, float most) { return bound > 1e-33f ? most / bound : 0.0f; }

// e^x within 2 units in the last place; 0 where x is below -87, e^88 where it is above 88.
// Source: Cephes, expf.
inline Floats exponential(Floats x) {
  Floats bounded = larger(splat(-87.0f), x);  // in this order NaN stays NaN
  bounded = bounded > 88.0f ? splat(88.0f) : bounded;
  Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats n = (bounded * 1.44269504088896341f + magic) - magic;
  Floats r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return x < -87.0f ? Floats{} : p * reinterpret_cast<Floats>(power);
}

constexpr float kLog2e = 1.44269504088896341f;

// 2^x of x up to 0 within 2 units in the last place; 0 where it would be subnormal. For weights of
// keys, which take it more often than anything: half of what exponential does.
inline Floats power_of_two(Floats x) {
#if WIDTH == 16
  // The nearest polynomial with 2^f from 0 to 1.
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x), and 0 of infinity
  Floats p = splat(1.8671305e-3f);
  p = p * f + 9.017029e-3f;
  p = p * f + 5.5799913e-2f;
  p = p * f + 2.4016444e-1f;
  p = p * f + 6.931513e-1f;
  p = p * f + 1.0f;
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
#else
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x + magic, f = x - (shifted - magic);
  Floats p = splat(1.3276472e-3f);  // the nearest polynomial with 2^f within -1/2 and 1/2
  p = p * f + 9.675541e-3f;
  p = p * f + 5.550713e-2f;
  p = p * f + 2.402212e-1f;
  p = p * f + 6.9314694e-1f;
  p = p * f + 1.0f;
  const Ints power = (reinterpret_cast<Ints>(shifted) << 23) + (127 << 23);
  return x < -126.0f ? Floats{} : p * reinterpret_cast<Floats>(power);
#endif
}

// Within -bound and bound: bound * tanh(x / bound).
inline Floats capped(Floats x, float bound) {
  return (1.0f - 2.0f / (1.0f + exponential(x * (2.0f / bound)))) * bound;
}
