// The search for the scales of GGUF's blocks, of WIDTH groups at a time, each a lane. Sums are added in
// NumPy's order, so that the files are those of a search by NumPy: tests/native/test_search.py.

constexpr float kTiny = 1e-30f;

// Values [groups][size] as [size] vectors of a value of each group; zeros for groups that there are not.
inline void beside(const float* from, int64_t groups, int64_t size, Floats* to) {
  for (int64_t i = 0; i < size; ++i)
    for (int64_t lane = 0; lane < kLanes; ++lane) to[i][lane] = lane < groups ? from[lane * size + i] : 0;
}

inline void give(Floats from, int64_t groups, float* to) {
  for (int64_t lane = 0; lane < groups; ++lane) to[lane] = from[lane];
}

// The nearest integer within `least` and `most`.
inline Floats nearest(Floats value, float least, float most) {
  const Floats magic = splat(12582912.0f);     // 1.5 * 2^23: adding it rounds to an integer
  value = value > most ? splat(most) : value;  // in this order NaN stays NaN
  value = value < least ? splat(least) : value;
  return (value + magic) - magic;
}

// The sum of a[i] * b[i] in the order of einsum: four sums of every fourth, of each 16 from behind.
inline Floats dot(const Floats* a, const Floats* b, int64_t size) {
  Floats parts[4] = {};
  for (int64_t i = 0; i < size; i += 16)
    for (int64_t k = 12; k >= 0; k -= 4)
      for (int64_t part = 0; part < 4; ++part) parts[part] += a[i + k + part] * b[i + k + part];
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// In the order of NumPy's sum: eight sums of every eighth.
inline Floats sum_of(const Floats* a, int64_t size) {
  Floats parts[8] = {};
  for (int64_t i = 0; i < size; i += 8)
    for (int64_t part = 0; part < 8; ++part) parts[part] += a[i + part];
  const Floats first = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  return first + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

// Scales [groups] of values [groups][size] whose integers -levels to levels - 1 are nearest by `errors`,
// the weights of these: of the first scales, which divide the largest value by one of `firsts` [count],
// the best, fitted by least squares.
template <int64_t size>
void symmetric_scales(const float* values, const float* errors, int64_t groups, int64_t levels,
                      const float* firsts, int64_t count, float* scales) {
  const float least = -static_cast<float>(levels), most = -least - 1;
  for (int64_t done = 0; done < groups; done += kLanes) {
    const int64_t here = smaller_of(groups - done, kLanes);
    Floats x[size], weights[size], weights_x[size], q[size];
    beside(values + done * size, here, size, x);
    beside(errors + done * size, here, size, weights);
    Floats bound{}, farthest{};
    for (int64_t i = 0; i < size; ++i) {
      weights_x[i] = weights[i] * x[i];
      const Floats magnitude = x[i] < 0.0f ? -x[i] : x[i];
      farthest = magnitude > bound ? x[i] : farthest;
      bound = larger(magnitude, bound);
    }
    const Floats inverse = bound > kTiny ? 1.0f / farthest : Floats{};
    Floats best{}, scale{};
    for (int64_t first = 0; first < count; ++first) {
      const Floats factor = -firsts[first] * inverse;
      Floats square{};
      for (int64_t i = 0; i < size; ++i) {
        q[i] = nearest(factor * x[i], least, most);
        square += weights[i] * q[i] * q[i];
      }
      const Floats product = dot(weights_x, q, size);
      const Floats slope = square > kTiny ? product / square : Floats{};
      const Floats gain = slope * product;
      scale = gain > best ? slope : scale;
      best = larger(gain, best);
    }
    give(scale, here, scales + done);
  }
}

// Scales and negated minimums of groups whose integers are 0 to 15; the first scales divide what a group
// spans by one of `firsts`.
template <int64_t size>
void scales_and_minimums(const float* values, const float* errors, int64_t groups, const float* firsts,
                         int64_t count, float* scales, float* minimums) {
  for (int64_t done = 0; done < groups; done += kLanes) {
    const int64_t here = smaller_of(groups - done, kLanes);
    Floats x[size], weights[size], weights_x[size], above[size], q[size];
    beside(values + done * size, here, size, x);
    beside(errors + done * size, here, size, weights);
    Floats low{}, high = x[0];
    for (int64_t i = 0; i < size; ++i) {
      weights_x[i] = weights[i] * x[i];
      low = x[i] < low ? x[i] : low;
      high = larger(x[i], high);
    }
    for (int64_t i = 0; i < size; ++i) above[i] = x[i] - low;
    const Floats span = larger(high - low, splat(kTiny));
    const Floats total = sum_of(weights, size), total_x = sum_of(weights_x, size);
    Floats best = splat(__builtin_inff()), scale{}, minimum = low;
    for (int64_t first = 0; first < count; ++first) {
      const Floats inverse = firsts[first] / span;
      Floats sum_qq{};
      for (int64_t i = 0; i < size; ++i) {
        q[i] = nearest(inverse * above[i], 0, 15);
        sum_qq += weights[i] * q[i] * q[i];
      }
      const Floats sum_q = dot(weights, q, size), sum_qx = dot(weights_x, q, size);
      const Floats spread = total * sum_qq - sum_q * sum_q, safe = larger(spread, splat(kTiny));
      Floats slope = (total * sum_qx - total_x * sum_q) / safe;
      Floats offset = (sum_qq * total_x - sum_q * sum_qx) / safe;
      slope = offset > 0.0f ? sum_qx / larger(sum_qq, splat(kTiny)) : slope;
      offset = offset > 0.0f ? Floats{} : offset;
      Floats error{};
      for (int64_t i = 0; i < size; ++i) {
        const Floats off = q[i] * slope + offset - x[i];
        error += weights[i] * off * off;
      }
      const Ints won = (spread > 0.0f) & (error < best);
      best = won ? error : best;
      scale = won ? slope : scale;
      minimum = won ? offset : minimum;
    }
    give(larger(scale, Floats{}), here, scales + done);
    give(-minimum, here, minimums + done);
  }
}
