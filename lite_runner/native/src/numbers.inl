// Stored numbers, and the floats that they stand for.
enum class Half : uint16_t {};
enum class UpperHalf : uint16_t {};  // of a float32: bfloat16
enum class Float8 : uint8_t {};      // e4m3
enum class Rounded : uint32_t {};    // a float32 that bfloat16 holds
inline float widened(float value) { return value; }
inline float widened(Rounded number) {
  float value;
  __builtin_memcpy(&value, &number, 4);
  return value;
}
inline float widened(UpperHalf half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline float widened(Half half) { return float_of_half(static_cast<uint16_t>(half)); }
inline Floats widened(const float* from) { return load(from); }
inline Floats widened(const int8_t* from) { return load_int8(from); }
inline Floats widened(const Half* from) {
  return load_half(reinterpret_cast<const uint16_t*>(from));
}
inline Floats widened(const UpperHalf* from) {
  return load_bfloat16(reinterpret_cast<const uint16_t*>(from));
}

inline Floats widened(const Float8* from) {
  return load_float8(reinterpret_cast<const int8_t*>(from));
}

// The layout of the 32 values of an input in a panel of such numbers.
template <class T>
struct Numbers {
  static constexpr int64_t bytes = sizeof(T) * kPanel;
  struct Raw {
    Floats part[kParts];
  };
  static Raw read(const uint8_t* from) {
    Raw raw;
    for (int64_t i = 0; i < kParts; ++i)
      raw.part[i] = widened(reinterpret_cast<const T*>(from) + i * kLanes);
    return raw;
  }
};

// Words of 32 bits, each of some inputs of one output.
struct Words {
  static constexpr int64_t bytes = 4 * kPanel;
  Ints part[kParts];

  static Words read(const uint8_t* from) {
    Words words;
    for (int64_t i = 0; i < kParts; ++i)
      words.part[i] = load(reinterpret_cast<const int32_t*>(from) + i * kLanes);
    return words;
  }
};

// The integers of a word as pairs of 16 bits, of inputs 2 i and 2 i + 1. The bytes, or nibbles, of
// a word are ordered for this when it is packed. And those of 8 inputs as two quads of bytes for
// add_quads, which say `lifted` more, of inputs order[4 i] .. order[4 i + 3].
struct Int8 {
  static constexpr int64_t step = 4;
  template <int64_t i>
  static Ints pair(Ints word) {
    return reinterpret_cast<Ints>(i == 0 ? reinterpret_cast<Shorts>(word) << 8 >> 8
                                         : reinterpret_cast<Shorts>(word) >> 8);
  }

  static constexpr int8_t order[] = {0, 2, 1, 3, 4, 6, 5, 7};
#if BYTE_PRODUCTS
  static constexpr int32_t lifted = kLifted;
  template <int64_t i>
  static Ints quad(const uint8_t* words, int64_t part) {
    const Ints word = load(reinterpret_cast<const int32_t*>(words + i * Words::bytes) + part * kLanes);
    return word ^ kLiftedWord;
  }
#endif
};

struct Int4 {
  static constexpr int64_t step = 8;
  template <int64_t i>
  static Ints pair(Ints word) {
    return word >> (4 * i) & 0x000f000f;
  }

  static constexpr int8_t order[] = {0, 4, 1, 5, 2, 6, 3, 7};
  static constexpr int32_t lifted = 0;
  template <int64_t i>
  static Ints quad(const uint8_t* words, int64_t part) {
    return load(reinterpret_cast<const int32_t*>(words) + part * kLanes) >> (4 * i) & 0x0f0f0f0f;
  }
};

struct Index4 {  // into the table of a matrix
  static constexpr int64_t step = Int4::step;
  Table table;

  template <int64_t i>
  Ints pair(Ints word) const {
    return table.pairs(word >> (4 * i));
  }

#if BYTE_PRODUCTS
  static constexpr int32_t lifted = kLifted;
  template <int64_t i>
  Ints quad(const uint8_t* words, int64_t part) const {
    return table.lifted(Int4::quad<i>(words, part));
  }
#endif
};
