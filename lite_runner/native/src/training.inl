// Kernels of training: products of any two matrices, attention and its gradients, and the operations
// between. Nothing is shared with other operators: several threads may be here at once.

constexpr int64_t kProductRows = 256;  // of the first matrix, that stay in the L2 cache

#if WIDTH == 16
// Turns 16 vectors of 16: each round shifts the bits of an element's row and column by one.
inline void transpose(Floats (&rows)[16]) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int round = 0; round < 4; ++round) {
    Floats next[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512 a = (__m512)rows[i], b = (__m512)rows[i + 8];
      next[2 * i] = (Floats)_mm512_permutex2var_ps(a, low, b);
      next[2 * i + 1] = (Floats)_mm512_permutex2var_ps(a, high, b);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = next[i];
  }
}
#endif

// Inputs of bfloat16 are added in the order of the instruction for pairs of them: see `multiply`.
template <bool turned>
inline int64_t place_of(int64_t k, int64_t depth) {
  return turned && (k | 1) < depth ? k ^ 1 : k;
}

// A panel [depth][32] of the first `count` columns of b, with zeros behind them. `fetches`: of the panel
// that comes next too, where no tile does.
template <bool turned, class T>
inline void pack_panel(const View<T>& b, int64_t depth, int64_t count, float* to, bool fetches) {
  const T* from = b.at;
  int64_t first = 0;  // inputs that are done
  if (count == kPanel && b.column == 1) {
    for (; first < depth; ++first) {
      if (fetches) fetch<kPanel * sizeof(T)>(from + first * b.row + kPanel);
      for (int64_t p = 0; p < kPanel; p += kLanes)
        store(to + place_of<turned>(first, depth) * kPanel + p,
              widened(from + first * b.row + p));
    }
    return;
  }
#if WIDTH == 16
  if (count == kPanel && b.row == 1) {
    for (; first + kLanes <= depth; first += kLanes)
      for (int64_t p = 0; p < kPanel; p += kLanes) {
        Floats part[kLanes];
        for (int64_t c = 0; c < kLanes; ++c) {
          part[c] = widened(from + first + (p + c) * b.column);
          if (fetches) fetch<64>(from + first + (kPanel + p + c) * b.column);
        }
        transpose(part);
        for (int64_t i = 0; i < kLanes; ++i)
          store(to + place_of<turned>(first + i, depth) * kPanel + p, part[i]);
      }
  }
#endif
  for (; first < depth; ++first)
    for (int64_t c = 0; c < kPanel; ++c)
      to[place_of<turned>(first, depth) * kPanel + c] =
          c < count ? widened(from[first * b.row + c * b.column]) : 0.0f;
}

// Rows of a from (row, k) on, side by side: the inputs from `place` on in rows of `padded`; of bfloat16
// where they are for `pairs`.
template <bool turned>
inline void pack_rows(const View<float>& a, int64_t row, int64_t k, int64_t count, int64_t depth,
                      float* rows, int64_t place, int64_t padded, bool pairs) {
  float* to = rows + place;
  const float* from = a.at + row * a.row + k * a.column;
  int64_t r = 0;
#if WIDTH == 16
  if (!turned && a.row == 1)
    for (; r + kLanes <= count; r += kLanes) {
      int64_t i = 0;
      for (; i + kLanes <= depth; i += kLanes) {
        Floats part[kLanes];
        for (int64_t c = 0; c < kLanes; ++c) part[c] = load(from + r + (i + c) * a.column);
        transpose(part);
        for (int64_t c = 0; c < kLanes; ++c) store(to + (r + c) * padded + i, part[c]);
      }
      for (; i < depth; ++i)
        for (int64_t c = 0; c < kLanes; ++c)
          to[(r + c) * padded + i] = from[r + c + i * a.column];
    }
#endif
  for (; r < count; ++r) {
    int64_t i = 0;
#if WIDTH == 16
    for (; turned && a.column == 1 && i + kLanes <= depth; i += kLanes) {
      const Floats value = load(from + r * a.row + i);
      int16_t halves[kLanes];
      store_upper_halves(halves, value);
      if (pairs)
        __builtin_memcpy(reinterpret_cast<int16_t*>(rows) + r * padded + place + i, halves,
                         sizeof(halves));
      else  // neighbours change places: see place_of
        _mm512_storeu_ps(to + r * padded + i,
                         _mm512_permute_ps((__m512)widened(reinterpret_cast<UpperHalf*>(halves)), 0xb1));
    }
#endif
    for (; i < depth; ++i) {
      const float value = from[r * a.row + i * a.column];
      const int16_t half = turned ? upper_half(value) : int16_t{0};
      if (pairs)
        reinterpret_cast<int16_t*>(rows)[r * padded + place + i] = half;
      else
        to[r * padded + place_of<turned>(i, depth)] =
            turned ? widened(static_cast<UpperHalf>(half)) : value;
    }
  }
}

// The lines of memory that a panel is packed of, as offsets from its first number. Read from memory when
// it is packed, they take a tenth of a product's time: the tiles of the panel before ask for them, a
// line every kLineInputs inputs.
constexpr int64_t kLineInputs = 8, kLine = 64, kInputs = 4 * kBlock;  // at most, of a panel in memory
struct Lines {
  int64_t count = 0;
  int32_t at[kInputs * kPanel * sizeof(float) / kLine + kInputs / kLineInputs] = {};

  template <class T>
  void of(const View<T>& b, int64_t depth) {
    constexpr int64_t numbers = kLine / sizeof(T);
    if (b.column == 1)
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t p = 0; p < kPanel; p += numbers) add((k * b.row + p) * sizeof(T));
    else if (b.row == 1)
      for (int64_t k = 0; k < depth; k += numbers)
        for (int64_t c = 0; c < kPanel; ++c) add((k + c * b.column) * sizeof(T));
  }

 private:
  void add(int64_t offset) { at[count++] = static_cast<int32_t>(offset); }
};

// c [rows][32], rows of which lie `width` apart, grows by x [rows][depth] * panel, or begins with it;
// lines of `next` come into the L2 cache.
template <int64_t rows>
__attribute__((noinline)) void product_tile(float* c, int64_t width, const float* x, int64_t stride,
                                            const float* panel, int64_t depth, bool begin,
                                            const char* next, const int32_t* lines) {
  Tile<rows> tile{};
#pragma GCC unroll 16
  for (int64_t r = 0; r < rows && !begin; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) tile.at[r][p] = load(c + r * width + p * kLanes);
  const auto add_input = [&](int64_t k) __attribute__((always_inline)) {
    const auto column = Numbers<float>::read(reinterpret_cast<const uint8_t*>(panel + k * kPanel));
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p)
        tile.at[r][p] += splat(x[r * stride + k]) * column.part[p];
  };
  int64_t k = 0;
  for (; k + kLineInputs <= depth; k += kLineInputs) {
    __builtin_prefetch(next + lines[k / kLineInputs], 0, 2);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kLineInputs; ++i) add_input(k + i);
  }
  for (; k < depth; ++k) add_input(k);
#pragma GCC unroll 16
  for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; ++p) store(c + r * width + p * kLanes, tile.at[r][p]);
}

// Columns `first` to `end` of c [m, n], rows of which lie `width` apart: the product of a [m, k] and
// b [k, n], or what was there and it. Every output is summed up in the order of k. With b in bfloat16
// a is rounded to it. `panels`: b, of float32, lies as panels
// [n / 32][k][32], with zeros behind its columns, and is the view of one.
template <class T>
void product(const View<float>& a, const View<T>& b, int64_t m, int64_t first, int64_t end,
             int64_t k, float* c, int64_t width, bool add, bool panels = false) {
  constexpr bool halves = std::is_same_v<T, UpperHalf>;
  const bool pairs = halves && pairs_pay;
  alignas(64) static thread_local float sums[kProductRows * kPanel];
  alignas(64) float panel[kBlock * kPanel];
  // Few inputs: rows stay in the L2 cache whole.
  const bool few = k <= kInputs;
  const int64_t blocks = larger_of<int64_t>(1, (k + kBlock - 1) / kBlock);
  int64_t most = larger_of<int64_t>(16, ((k + blocks - 1) / blocks + 15) / 16 * 16);
  if (panels && few) most = larger_of<int64_t>(k, 1);  // read in place: the L1 cache has no copy
  const bool packs = halves || a.column != 1 || a.row % 1024 == 0;
  Lines lines;
  if (m >= kLineInputs * kTile) lines.of(b, smaller_of(most, k));  // few rows have no time to look ahead
  const auto numbers = [&](int64_t at, int64_t j) {
    return b.at + at * b.row + j * (panels ? k : b.column);
  };
  // The numbers of the panel behind one, in the order in which they are packed.
  const auto behind = [&](int64_t at, int64_t j) {
    if (few) {
      at += most;
      if (at >= k) at = 0, j += kPanel;
    } else {
      j += kPanel;
      if (j >= end) j = first, at += most;
    }
    return reinterpret_cast<const char*>(numbers(at, j));
  };
  const int64_t padded = (few ? (k + most - 1) / most : 1) * most + kLanes;  // else rows share lines of the L1 cache
  float* packed = packs ? thread_floats(kPackedRows, kProductRows * padded) : nullptr;
  for (int64_t row = 0; row < m; row += kProductRows) {
    const int64_t count = smaller_of(kProductRows, m - row);
    // c [rows][32] of a panel grows by the inputs from `at` on, or begins with them.
    const auto add_block = [&](int64_t at, int64_t j, int64_t wide, float* to, int64_t to_row,
                               bool begin) {
      const int64_t depth = smaller_of(most, k - at), place = few ? at : 0;
      const float* x = packs ? packed + place : a.at + row * a.row + at;
      const int64_t stride = packs ? padded : a.row;
      const View<T> from{numbers(at, j), b.row, b.column};
      if (pairs) {
        pack_panel<false>(from, depth, wide, panel, true);
        return product_of_pairs<Numbers<float>>(
            to, reinterpret_cast<const UpperHalf*>(packed) + place, count, padded,
            reinterpret_cast<const uint8_t*>(panel), depth, begin);
      }
      if (!panels) pack_panel<halves>(from, depth, wide, panel, !lines.count);
      const auto* block = panels ? reinterpret_cast<const float*>(from.at) : panel;
      const char* next = behind(at, j);
      int64_t line = 0;
      in_tiles<kTile>(count, [&](auto tile, int64_t r) {
        product_tile<tile>(to + r * to_row, to_row, x + r * stride, stride, block, depth, begin, next,
                           lines.at + smaller_of(line, lines.count));
        line += depth / kLineInputs;
      });
    };
    // All inputs of a panel from `at` on, up to `until`. Sums of fewer columns are not in c meanwhile.
    const auto add_blocks = [&](int64_t at, int64_t until, int64_t j) {
      const int64_t wide = smaller_of(kPanel, end - j);
      const bool whole = wide == kPanel && !pairs;
      float *from = c + row * width + j, *to = whole ? from : sums;
      if (!whole && (at || add))
        for (int64_t r = 0; r < count; ++r)
          __builtin_memcpy(sums + r * kPanel, from + r * width, wide * sizeof(float));
      do {
        add_block(at, j, wide, to, whole ? width : kPanel, at == 0 && !add);
        at += most;
      } while (at < until);
      for (int64_t r = 0; r < count && !whole; ++r)
        __builtin_memcpy(from + r * width, sums + r * kPanel, wide * sizeof(float));
    };
    const int64_t step = few ? larger_of<int64_t>(k, 1) : most;  // inputs whose rows are packed at a time
    for (int64_t at = 0; at == 0 || at < k; at += step) {
      const int64_t until = smaller_of(at + step, k);
      for (int64_t i = at; packs && i < until; i += most)
        pack_rows<halves>(a, row, i, count, smaller_of(most, k - i), packed, few ? i : 0, padded,
                          pairs);
      for (int64_t j = first; j < end; j += kPanel) add_blocks(at, until, j);
    }
  }
}

inline void any_product(const Product& of, int64_t first, int64_t end) {
  const View<float> a{of.a, of.a_row, of.a_column};
  const auto times = [&](auto* b) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(b)>>;
    product(a, View<T>{b, of.b_row, of.b_column}, of.m, first, end, of.k, of.c, of.c_row, of.add != 0,
            of.panels != 0);
  };
  if (of.bfloat16)
    times(static_cast<const UpperHalf*>(of.b));
  else
    times(static_cast<const float*>(of.b));
}

constexpr int64_t kQueries = 64;  // of attention at a time: later keys than its last are not computed

// Scores of a block of queries of a head, as probabilities [rows][stride], and slopes of their cap.
struct Scores {
  int64_t row, first, end, stride;  // of a text: the first query; keys; from one row to the next
  int64_t rows() const { return smaller_of(kQueries, end - row); }
  int64_t keys() const { return end - first; }
};

// Memory for the attention of a block, of up to `keys` keys.
inline float* block_memory(ThreadMemory which, int64_t keys) {
  return thread_floats(which, kQueries * (keys + kLanes));
}

// Probabilities of the keys of each query, `nothing` [rows] that of none of them where it is asked.
inline void probabilities(const TrainedAttention& of, int64_t start, int64_t head, const Scores& at,
                          float* scores, float* slopes) {
  const int64_t dim = of.head_dim, kv = head / (of.heads / of.kv_heads);
  const int64_t q_row = of.heads * dim, kv_row = of.kv_heads * dim;
  product(View<float>{of.q + (start + at.row) * q_row + head * dim, q_row, 1},
          View<float>{of.k + (start + at.first) * kv_row + kv * dim, 1, kv_row}, at.rows(), 0,
          at.keys(), dim, scores, at.stride, false);
  Floats lanes;
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
  for (int64_t r = 0; r < at.rows(); ++r) {
    float* row = scores + r * at.stride;
    const int64_t query = at.row + r, last = query - at.first;  // keys up to this one are seen
    const int64_t from = of.window ? larger_of<int64_t>(0, last - of.window + 1) : 0;
    Floats most = splat(-__builtin_inff());
    for (int64_t i = 0; i < at.stride; i += kLanes) {
      Floats value = load(row + i) * of.scale;
      if (of.softcap != 0) {
        value = capped(value, of.softcap);
        const Floats curve = value / of.softcap;
        store(slopes + r * at.stride + i, 1.0f - curve * curve);
      }
      const Floats key = lanes + static_cast<float>(i);
      if (of.slopes) value -= of.slopes[head] * (static_cast<float>(last) - key);
      value = key <= static_cast<float>(last) ? value : splat(-__builtin_inff());
      value = key >= static_cast<float>(from) ? value : splat(-__builtin_inff());
      store(row + i, value);
      most = larger(value, most);
    }
    float top = largest(most);
    if (of.sinks) top = larger_of(top, of.sinks[head]);
    Floats sums{};
    for (int64_t i = 0; i < at.stride; i += kLanes) {
      const Floats value = exponential(load(row + i) - top);
      store(row + i, value);
      sums += value;
    }
    float total = sum(sums);
    if (of.sinks) total += std::exp(of.sinks[head] - top);
    const float factor = 1.0f / total;
    for (int64_t i = 0; i < at.stride; i += kLanes) store(row + i, load(row + i) * factor);
  }
}

// Calls body(start, head, Scores) for the heads of a head of keys, and each block of queries.
template <class Body>
inline void over_blocks(const TrainedAttention& of, int64_t kv, Body&& body) {
  const int64_t group = of.heads / of.kv_heads;
  int64_t start = 0;
  for (int64_t text = 0; text < of.count; start += of.lengths[text++])
    for (int64_t row = 0; row < of.lengths[text]; row += kQueries) {
      const int64_t end = smaller_of(row + kQueries, of.lengths[text]);
      const int64_t first = of.window ? larger_of<int64_t>(0, row - of.window + 1) : 0;
      const int64_t stride = (end - first + kLanes - 1) / kLanes * kLanes;
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
        body(start, h, Scores{row, first, end, stride});
    }
}

inline void trained_attention(const TrainedAttention& of, int64_t kv) {
  const int64_t dim = of.head_dim, q_row = of.heads * dim, kv_row = of.kv_heads * dim;
  over_blocks(of, kv, [&](int64_t start, int64_t head, const Scores& at) {
    float* scores = block_memory(kScoreRows, at.keys());
    probabilities(of, start, head, at, scores, block_memory(kSlopeRows, at.keys()));
    product(View<float>{scores, at.stride, 1},
            View<float>{of.v + (start + at.first) * kv_row + kv * dim, kv_row, 1}, at.rows(), 0,
            dim, at.keys(), of.out + (start + at.row) * q_row + head * dim, q_row, false);
  });
}

inline void attention_gradients(const TrainedAttention& of, int64_t kv) {
  const int64_t dim = of.head_dim, q_row = of.heads * dim, kv_row = of.kv_heads * dim;
  over_blocks(of, kv, [&](int64_t start, int64_t head, const Scores& at) {
    const int64_t queries = (start + at.row) * q_row + head * dim;
    const int64_t keys = (start + at.first) * kv_row + kv * dim;
    float *share = block_memory(kScoreRows, at.keys()), *inner = block_memory(kInnerRows, at.keys());
    float* slopes = block_memory(kSlopeRows, at.keys());
    probabilities(of, start, head, at, share, slopes);
    const View<float> to_out{of.to_out + queries, q_row, 1};
    product(View<float>{share, 1, at.stride}, to_out, at.keys(), 0, dim, at.rows(), of.to_v + keys,
            kv_row, true);
    product(to_out, View<float>{of.v + keys, 1, kv_row}, at.rows(), 0, at.keys(), dim, inner,
            at.stride, false);
    for (int64_t r = 0; r < at.rows(); ++r) {
      float *p = share + r * at.stride, *g = inner + r * at.stride;
      for (int64_t i = at.keys(); i < at.stride; ++i) g[i] = 0;
      Floats sums{}, whole{};
      for (int64_t i = 0; i < at.stride; i += kLanes) {
        sums += load(g + i) * load(p + i);
        whole += load(p + i);
      }
      const float along = sum(sums);
      if (of.to_sinks) of.to_sinks[head] -= along * (1.0f - sum(whole));
      for (int64_t i = 0; i < at.stride; i += kLanes) {
        Floats value = (load(g + i) - along) * load(p + i) * of.scale;
        if (of.softcap != 0) value = value * load(slopes + r * at.stride + i);
        store(g + i, value);
      }
    }
    product(View<float>{inner, at.stride, 1}, View<float>{of.k + keys, kv_row, 1}, at.rows(), 0,
            dim, at.keys(), of.to_q + queries, q_row, false);
    product(View<float>{inner, 1, at.stride}, View<float>{of.q + queries, q_row, 1}, at.keys(), 0,
            dim, at.rows(), of.to_k + keys, kv_row, true);
  });
}

// Rows [count][width] of logits, `stride` apart, become `weight` times their softmax; the sum of their
// log-sum-exps.
inline double softmax_rows(float* rows, int64_t count, int64_t width, int64_t stride, float weight) {
  double total = 0;
  for (int64_t r = 0; r < count; ++r) {
    float* row = rows + r * stride;
    const int64_t whole = width / kLanes * kLanes;
    Floats most = splat(-__builtin_inff());
    for (int64_t i = 0; i < whole; i += kLanes) most = larger(load(row + i), most);
    float top = largest(most);
    for (int64_t i = whole; i < width; ++i) top = larger_of(top, row[i]);
    Floats sums{};
    double rest = 0;
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Floats value = exponential(load(row + i) - top);
      store(row + i, value);
      sums += value;
    }
    for (int64_t i = whole; i < width; ++i) rest += row[i] = std::exp(row[i] - top);
    for (int64_t lane = 0; lane < kLanes; ++lane) rest += sums[lane];
    // Not log of double, whose newest symbol, of glibc 2.29, systems of setup.py's standard lack.
    total += static_cast<double>(std::log(static_cast<long double>(rest))) + top;
    const float factor = static_cast<float>(weight / rest);
    for (int64_t i = 0; i < width; ++i) row[i] *= factor;
  }
  return total;
}

// Calls body(part, keep) for all of `count` numbers, a vector at a time: part(from) are those of an
// array, what the last vector lacks being 0 or as it says; keep(to, value) stores them.
template <class Body>
inline __attribute__((always_inline)) void over_lanes(int64_t count, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    body([=](const float* from, float = 0) { return load(from + i); },
         [=](float* to, Floats value) { store(to + i, value); });
  const size_t rest = static_cast<size_t>(count - i) * sizeof(float);
  if (rest)
    body(
        [=](const float* from, float other = 0) {
          Floats value = splat(other);
          __builtin_memcpy(&value, from + i, rest);
          return value;
        },
        [=](float* to, Floats value) { __builtin_memcpy(to + i, &value, rest); });
}

// The sum of what body(part) gives, see over_lanes.
template <class Body>
inline __attribute__((always_inline)) float total_of(int64_t count, Body&& body) {
  Floats sums{};
  over_lanes(count, [&](auto part, auto) { sums += body(part); });
  return sum(sums);
}

// x * sigmoid(rate * x) * times (nullptr: 1), elementwise.
inline void gated(const float* x, const float* times, int64_t count, float rate, float* out) {
  over_lanes(count, [&](auto part, auto keep) {
    const Floats value = part(x), result = value / (1.0f + exponential(value * -rate));
    keep(out, times ? result * part(times) : result);
  });
}

// Its gradients.
inline void gated_gradients(const float* x, const float* times, const float* grad, int64_t count,
                            float rate, float* to_x, float* to_times) {
  over_lanes(count, [&](auto part, auto keep) {
    const Floats value = part(x), given = part(grad);
    const Floats share = 1.0f / (1.0f + exponential(value * -rate)), out = value * share;
    const Floats slope = (out * (1.0f - share) * rate + share) * given;
    keep(to_x, times ? slope * part(times) : slope);
    if (times) keep(to_times, out * given);
  });
}

// x [count][width] by its root mean square, or less its mean by its deviation, times `gain`, plus
// `shift` or nothing; the factors and means of rows are kept.
inline void normed(const Normed& of, int64_t count, float* out) {
  for (int64_t r = 0; r < count; ++r) {
    const float* x = of.x + r * of.width;
    const float mean = of.means ? of.means[r] = total_of(of.width, [&](auto part) { return part(x); }) / of.width : 0;
    const float squares = total_of(of.width, [&](auto part) {
      const Floats value = part(x, mean) - mean;
      return value * value;
    });
    const float factor = of.factors[r] = 1.0f / std::sqrt(squares / of.width + of.eps);
    over_lanes(of.width, [&](auto part, auto keep) {
      Floats value = (part(x) - mean) * factor * part(of.gain);
      keep(out + r * of.width, of.shift ? value + part(of.shift) : value);
    });
  }
}

// The gradient of x by that of what `normed` gave.
inline void normed_gradients(const Normed& of, int64_t count, const float* grad, float* to_x) {
  for (int64_t r = 0; r < count; ++r) {
    const float *x = of.x + r * of.width, *given = grad + r * of.width;
    const float mean = of.means ? of.means[r] : 0, factor = of.factors[r];
    const float along = total_of(of.width, [&](auto part) {
      return part(given) * part(of.gain) * (part(x, mean) - mean);
    }) * factor / of.width;
    const float middle = of.means ? total_of(of.width, [&](auto part) {
      return part(given) * part(of.gain);
    }) / of.width : 0;
    over_lanes(of.width, [&](auto part, auto keep) {
      const Floats value = (part(x) - mean) * factor;
      keep(to_x + r * of.width, (part(given) * part(of.gain) - middle - value * along) * factor);
    });
  }
}

// Pairs (d, d + half) of each head of x [count][heads][2 * half], turned by angles [count][half];
// back: the other way.
inline void turned_pairs(const Turned& of, int64_t count) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t h = 0; h < of.heads; ++h) {
      const int64_t at = (r * of.heads + h) * 2 * of.half;
      const float *first = of.x + at, *second = first + of.half;
      over_lanes(of.half, [&](auto part, auto keep) {
        const Floats a = part(first), b = part(second), cos = part(of.cos + r * of.half);
        const Floats sin = of.back ? -part(of.sin + r * of.half) : part(of.sin + r * of.half);
        keep(of.out + at, a * cos - b * sin);
        keep(of.out + at + of.half, b * cos + a * sin);
      });
    }
}

constexpr TrainingKernels kTraining = {any_product,   trained_attention, attention_gradients,
                                       softmax_rows,  gated,             gated_gradients,
                                       normed,        normed_gradients,  turned_pairs};
