// Attention over the live part of the cache, a chunk of keys at a time.
//
// The scores of a chunk are summed up on their own and then merged, always in the order of the
// chunks: decoding shares the chunks out over threads, a prompt goes through them in turn, and
// both come to the same bits.

constexpr int64_t kQueries = 96;  // rows of queries at most that go through the keys together
constexpr int64_t kQueriesInPairs = 192;  // the same, where keys are first laid out as pairs of bfloat16

struct Running {  // of some rows of queries
  float *most, *total;  // [rows]: log2(e) times the largest score; sum of exponentials
  float* mixed;         // [head_dim / 32][rows][32]
};

struct Keys {  // one slot and key/value head
  const Cache& cache;
  const int32_t* blocks;  // of the slot
  int64_t head, dim;

  // Start of the numbers of a panel of keys, or of a position's values, of `size` bytes each.
  void* key(int64_t panel, int64_t size) const {
    constexpr int64_t panels = kChunk / kPanel;
    const int64_t row = head * panels + panel % panels;
    return in_block(cache.keys, panel / panels) + row * dim * kPanel * size;
  }
  void* value(int64_t position, int64_t size) const {
    const int64_t row = head * dim_panels() * kChunk + position % kChunk;
    return in_block(cache.values, position / kChunk) + row * kPanel * size;
  }
  float* scale(float* scales, int64_t position) const {
    char* block = in_block(scales, position / kChunk);
    return reinterpret_cast<float*>(block) + head * kChunk + position % kChunk;
  }
  int64_t dim_panels() const { return (dim + kPanel - 1) / kPanel; }

 private:
  char* in_block(void* array, int64_t chunk) const {
    return static_cast<char*>(array) + blocks[chunk] * cache.block_bytes;
  }
};

// Calls body with how the cache's numbers are read.
template <class Body>
inline void with_numbers(CacheType type, Body&& body) {
  switch (type) {
    case CacheType::kFloat32:
      return body(Numbers<float>{});
    case CacheType::kFloat16:
      return body(Numbers<Half>{});
    case CacheType::kInt8:
      return body(Numbers<int8_t>{});
  }
}

struct Seen {  // by a row of queries: keys of these positions
  int32_t first, last;
};

// Where sums of rows with panels go: numbers from a row's to the next row's, and from a panel's.
struct Sums {
  float* at;
  int64_t row, panel;
};

// sums of `panels` times 32 for each row, at places as in Sums, = x [rows][depth] * panels of
// [depth][32] that start `apart` bytes from each other. Several at a time: the sums of a few rows
// with one alone would have to be waited for. Not `begin`: added to what is there. Where sums go is
// three arguments: a struct would be passed through memory, and loaded before its store is done.
template <int64_t rows, int64_t panels, class F>
__attribute__((noinline)) void multiply_panels(float* sums, int64_t row_apart,
                                               int64_t panel_apart, const float* x, int64_t stride,
                                               const uint8_t* panel, int64_t apart, int64_t depth,
                                               int64_t ahead, bool begin = true) {
  Tile<rows> tiles[panels] = {};
  const auto over_vectors = [&](auto&& body) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < panels; ++p)
#pragma GCC unroll 16
      for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int64_t i = 0; i < kParts; ++i)
          body(tiles[p].at[r][i], sums + p * panel_apart + r * row_apart + i * kLanes);
  };
  if (!begin) over_vectors([](Floats& sum, const float* from) { sum = load(from); });
  for (int64_t k = 0; k < depth; ++k) {
    const uint8_t* from = panel + k * F::bytes;
#pragma GCC unroll 4
    for (int64_t p = 0; p < panels; ++p, from += apart) {
      fetch<F::bytes>(from + ahead);
      const typename F::Raw column = F::read(from);
#pragma GCC unroll 16
      for (int64_t r = 0; r < rows; ++r) {
        const Floats one = splat(x[r * stride + k]);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kParts; ++i) tiles[p].at[r][i] += one * column.part[i];
      }
    }
  }
  over_vectors([](const Floats& sum, float* to) { store(to, sum); });
}

// The same of any number of rows and panels. X: float, or UpperHalf where keys and values are such
// that bfloat16 holds. What is read next follows the panels, as the next head's do in a block, or
// for many rows is at `next`. depth_of(row, panel): how many of the first inputs the rows up to
// this one need; more do no harm.
template <class F, class X, class DepthOf>
inline void product(Sums sums, const X* x, int64_t rows, int64_t stride, const void* first,
                    int64_t panels, int64_t apart, int64_t depth, const void* next,
                    DepthOf&& depth_of) {
  const uint8_t* panel = static_cast<const uint8_t*>(first);
  if constexpr (std::is_same_v<X, UpperHalf>) {
    for (int64_t p = 0; p < panels; ++p, panel += apart)
      product_in_bfloat16<F>(sums.at + p * sums.panel, x, rows, stride, panel, depth);
  } else if (rows > kFewTiles * kTile) {
    alignas(64) float wide[kBlock * kPanel];  // a panel, widened once for all tiles
    for (int64_t p = 0; p < panels; ++p, panel += apart, sums.at += sums.panel) {
      const auto* following = p + 1 < panels ? panel + apart : static_cast<const uint8_t*>(next);
      for (int64_t k = 0; k < depth; k += kBlock) {
        const uint8_t* from = panel + k * F::bytes;
        const int64_t here = smaller_of(kBlock, depth - k);
        if constexpr (!std::is_same_v<F, Numbers<float>>) {
          for (int64_t i = 0; i < here; ++i) {
            const typename F::Raw column = F::read(from + i * F::bytes);
            for (int64_t v = 0; v < kParts; ++v) store(wide + i * kPanel + v * kLanes, column.part[v]);
          }
          from = reinterpret_cast<const uint8_t*>(wide);
        }
        in_tiles<kTile>(rows, [&](auto count, int64_t row) {
          const int64_t needed = smaller_of(depth_of(row + count - 1, p) - k, here);
          if (needed <= 0 && k) return;
          const auto ahead = reinterpret_cast<intptr_t>(following) - reinterpret_cast<intptr_t>(from);
          multiply_panels<count, 1, Numbers<float>>(sums.at + row * sums.row, sums.row, 0,
                                                    x + row * stride + k, stride, from, 0, needed,
                                                    row == 0 ? ahead : 0, k == 0);
        });
      }
    }
  } else {
    in_tiles<kTile>(rows, [&](auto count, int64_t row) {
      constexpr int64_t most = smaller_of<int64_t>(4, kTile / count);
      in_tiles<most>(panels, [&](auto several, int64_t p) {
        multiply_panels<count, several, F>(sums.at + p * sums.panel + row * sums.row, sums.row,
                                           sums.panel, x + row * stride, stride, panel + p * apart,
                                           apart, depth, several * apart);
      });
    });
  }
}

struct Scores {  // what becomes of scores
  const float* slope;  // [rows] ALiBi's; nullptr: none
  float softcap;       // 0: none
};

// One chunk of keys for `rows` queries [rows][even(dim)], already scaled. What a row does not see,
// though another does, has a weight of 0, which changes no bit of its sums; where it sees nothing of
// the chunk its total is 0. Only with `windowed` does a row not see all that is before it.
template <class F, class X, bool windowed>  // not inlined: two copies might round differently
__attribute__((noinline)) void attend_chunk(const Keys& keys, const X* queries, int64_t rows,
                         const Seen* seen, Scores form, int64_t first,
                         float* work, Running result) {
  constexpr int64_t size = F::bytes / kPanel;
  constexpr bool pairs = std::is_same_v<X, UpperHalf>;
  // [rows][128], or [4][rows][32]; and [rows][128]: weights of values, floats in place of the scores.
  const Sums scores{work, pairs ? kPanel : kChunk, pairs ? rows * kPanel : kPanel};
  X* factors = reinterpret_cast<X*>(pairs ? work + rows * kChunk : work);
  // Rows are at rising positions: none sees keys before those of the first, or behind the last's.
  const int64_t seen_first = windowed ? larger_of<int64_t>(0, seen[0].first - first) : 0;
  // The same two make a pair, or in tiles the same 32 a sum, whatever a row sees.
  const int64_t begin = pairs ? seen_first & (tiles_used() ? ~31 : ~1) : seen_first;
  const int64_t end = smaller_of<int64_t>(kChunk, seen[rows - 1].last - first + 1);
  const int64_t panel = begin / kPanel, panels = (end + kPanel - 1) / kPanel - panel;
  const void* values = keys.value(first + begin, size);
  product<F>({scores.at + panel * scores.panel, scores.row, scores.panel}, queries, rows,
             even(keys.dim), keys.key(first / kPanel + panel, size), panels, keys.dim * F::bytes,
             keys.dim, values, [&](int64_t row, int64_t p) {
    return seen[row].last - first >= (panel + p) * kPanel ? keys.dim : 0;
  });
  Ints lane;
  for (int i = 0; i < WIDTH; ++i) lane[i] = i;
  const float *key_scales = nullptr, *value_scales = nullptr;
  if (keys.cache.type == CacheType::kInt8) {
    key_scales = keys.scale(keys.cache.key_scales, first);
    value_scales = keys.scale(keys.cache.value_scales, first);
  }
  const bool plain = !windowed && !key_scales && form.softcap == 0.0f && !form.slope;
  const int64_t begin_lanes = begin / kLanes * kLanes, end_lanes = (end + kLanes - 1) / kLanes * kLanes;
  const Floats lowest = splat(-__builtin_inff());
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t from = static_cast<int32_t>(seen[r].first - first);
    const int32_t last = static_cast<int32_t>(seen[r].last - first);
    const auto scores_at = [&](int64_t k) {
      return scores.at + r * scores.row + (pairs ? k / kPanel * scores.panel + k % kPanel : k);
    };
    Floats most = lowest;
    if (plain && last >= end_lanes - 1) {
      for (int64_t k = begin_lanes; k < end_lanes; k += kLanes) most = larger(most, load(scores_at(k)));
    } else {
      for (int64_t k = begin_lanes; k < end_lanes; k += kLanes) {
        Floats score = load(scores_at(k));
        const Ints key = lane + static_cast<int32_t>(k);
        if (key_scales) score = score * load(key_scales + k);
        if (form.softcap != 0.0f) score = capped(score, form.softcap);
        if (form.slope) score = score + form.slope[r] * to_float(key - last);
        score = key <= last ? score : lowest;
        if constexpr (windowed) score = key >= from ? score : lowest;
        store(scores_at(k), score);
        most = larger(most, score);
      }
    }
    const float bound = result.most[r] = largest(most) * kLog2e;
    // Masked keys have the lowest score, and so the weight 0, also where all are masked.
    const float subtracted = bound == lowest[0] ? 0.0f : bound;
    Floats total{};
    for (int64_t k = begin_lanes; k < end_lanes; k += kLanes) {
      Floats weight = power_of_two(load(scores_at(k)) * kLog2e - subtracted);
      total = total + weight;
      if (value_scales) weight = weight * load(value_scales + k);
      if constexpr (pairs)
        store_upper_halves(reinterpret_cast<int16_t*>(factors) + r * kChunk + k, weight);
      else
        store(factors + r * kChunk + k, weight);
    }
    // Beside the last of an odd number: a scale there may be anything.
    if (pairs && end % 2) factors[r * kChunk + end] = X{};
    result.total[r] = sum(total);
  }
  const bool last_chunk = seen[rows - 1].last < first + kChunk;
  const void* next = last_chunk ? values : keys.key((first + kChunk) / kPanel, size);
  product<F>({result.mixed, kPanel, rows * kPanel}, factors + begin, rows, kChunk, values,
             keys.dim_panels(), kChunk * F::bytes, end - begin, next,
             [&](int64_t row, int64_t) { return seen[row].last - first + 1 - begin; });
}

inline int64_t work_floats(int64_t rows) { return rows * kChunk * 3 / 2; }

// Adds the next chunk to what the chunks before it came to.
inline void merge(Running all, Running next, int64_t rows, int64_t panels) {
  for (int64_t first = 0; first < rows; first += kLanes) {  // what lies behind the rows is not used
    const Floats one = load(all.most + first), other = load(next.most + first);
    const Floats most = larger(one, other);
    const Floats before = power_of_two(one - most), added = power_of_two(other - most);
    for (int64_t lane = 0, r = first; lane < kLanes && r < rows; ++lane, ++r) {
      if (next.total[r] == 0.0f) continue;  // the row sees nothing of it
      const bool begins = all.total[r] == 0.0f;  // nor saw it anything before
      all.most[r] = most[lane];
      all.total[r] = begins ? next.total[r] : all.total[r] * before[lane] + next.total[r] * added[lane];
      for (int64_t p = 0; p < panels; ++p)
        for (int64_t c = 0; c < kPanel; c += kLanes) {
          float* to = all.mixed + (p * rows + r) * kPanel + c;
          const Floats mixed = load(next.mixed + (p * rows + r) * kPanel + c);
          store(to, begins ? mixed : load(to) * before[lane] + mixed * added[lane]);
        }
    }
  }
}

inline int64_t running_floats(int64_t rows, int64_t dim) {
  return rows * (2 + (dim + kPanel - 1) / kPanel * kPanel);
}

inline Running running(float* memory, int64_t rows) {
  return {memory, memory + rows, memory + 2 * rows};
}

struct Attention {
  const AttentionLayer& layer;
  bool bfloat16;  // queries, keys, values and their weights are rounded to it, and pairs multiplied
  const Step& step;
  const Cache& cache;
  const float* fused;  // [count][stride]: queries, keys, values
  int64_t stride;
  float* out;  // [count][out_stride]
  int64_t out_stride;

  int64_t group() const { return layer.heads / layer.kv_heads; }
  int64_t queries() const { return larger_of(group(), bfloat16 ? kQueriesInPairs : kQueries); }
  int64_t panels() const { return (layer.head_dim + kPanel - 1) / kPanel; }

  // Some tokens' rows for one key/value head.
  struct Queries {
    float* x;      // [rows][even(head_dim)], scaled; UpperHalf with pairs of bfloat16
    Seen* seen;    // [rows]
    float* slope;  // [rows]
  };

  // The first position that a token at another sees.
  int64_t first_seen(int64_t position) const {
    if (layer.chunk) return position / layer.chunk * layer.chunk;
    return layer.window ? larger_of<int64_t>(0, position - layer.window + 1) : 0;
  }

  int32_t last_seen(int64_t token) const {
    return layer.prefix ? step.last_seen[token] : step.position[token];
  }

  void gather(int64_t token, int64_t tokens, int64_t head, Queries to) const {
    for (int64_t t = 0; t < tokens; ++t) {
      float scale = static_cast<float>(layer.scale);
      if (layer.span)
        scale *= layer.at<float>(layer.temperatures)[(step.position[token + t] + 1) / layer.span];
      for (int64_t g = 0; g < group(); ++g) {
        const int64_t row = t * group() + g, which = head * group() + g;
        const float* from = fused + (token + t) * stride + which * layer.head_dim;
        const int64_t dim = layer.head_dim, at = row * even(dim);
        if (bfloat16) {
          int16_t* halves = reinterpret_cast<int16_t*>(to.x) + at;
          halves[even(dim) - 1] = 0;
          for (int64_t d = 0; d < dim; ++d) halves[d] = upper_half(from[d] * scale);
        } else {
          for (int64_t d = 0; d < dim; ++d) to.x[at + d] = from[d] * scale;
        }
        to.seen[row] = {static_cast<int32_t>(first_seen(step.position[token + t])),
                        last_seen(token + t)};
        if (layer.slopes) to.slope[row] = layer.at<float>(layer.slopes)[which];
      }
    }
  }

  void finish(int64_t token, int64_t tokens, int64_t head, Running from) const {
    const int64_t rows = tokens * group();
    for (int64_t row = 0; row < rows; ++row) {
      float inverse = 1.0f / from.total[row];
      if (layer.sinks) {
        const float sink = layer.at<float>(layer.sinks)[head * group() + row % group()] * kLog2e;
        const float most = larger_of(from.most[row], sink);
        const float own = power_of_two(splat(from.most[row] - most))[0];
        inverse = own / (from.total[row] * own + power_of_two(splat(sink - most))[0]);
      }
      float* to = out + (token + row / group()) * out_stride +
                  (head * group() + row % group()) * layer.head_dim;
      for (int64_t d = 0; d < layer.head_dim; ++d)
        to[d] = from.mixed[(d / kPanel * rows + row) * kPanel + d % kPanel] * inverse;
    }
  }

  struct Item {
    int32_t token, tokens, head;
    int32_t chunk;          // -1: all, in turn
    int32_t first, chunks;  // of the tokens: so many, from the first on
  };

  Keys keys_of(const Item& item) const {
    return {cache, step.blocks(item.token), item.head, layer.head_dim};
  }

  // Rows of one slot at following positions are a prompt, of which some go through together. Items
  // of a single token are in the order in which a block has its heads.
  int64_t plan(Item* items) const {
    int64_t count = 0;
    const int64_t together = queries() / group();
    for (int64_t token = 0; token < step.count;) {
      int64_t tokens = 1;
      while (tokens < together && token + tokens < step.count &&
             step.slot[token + tokens] == step.slot[token] &&
             step.position[token + tokens] == step.position[token] + tokens)
        ++tokens;
      const int64_t first = first_seen(step.position[token]) / kChunk;
      const int64_t chunks = last_seen(token + tokens - 1) / kChunk + 1 - first;
      for (int64_t index = 0; index < (tokens == 1 ? chunks : 1); ++index)
        for (int64_t head = 0; head < layer.kv_heads; ++head)
          items[count++] = {static_cast<int32_t>(token), static_cast<int32_t>(tokens),
                            static_cast<int32_t>(head),
                            static_cast<int32_t>(tokens == 1 ? first + index : -1),
                            static_cast<int32_t>(first), static_cast<int32_t>(chunks)};
      token += tokens;
    }
    return count;
  }

  void run() const {
    Item* items = scratch<Item>(kItems, step.count * layer.kv_heads * step.table_width);
    const int64_t count = plan(items);
    const int64_t rows = queries(), dim = even(layer.head_dim);
    const int64_t one = running_floats(group(), dim), many = running_floats(rows, dim);
    const int64_t local = rows * (dim + 3) + work_floats(rows) + 2 * many + 64;
    float* memory = scratch<float>(kPartial, count * one + threads() * local);
    float* locals = memory + count * one;
    // Heads of a block lie one behind the other, as its successor often does: a thread takes some in
    // a row. Prompts' items are long, and of different length.
    bool prompts = false;
    for (int64_t index = 0; index < count; ++index) prompts = prompts || items[index].chunk < 0;
    const int64_t each = prompts ? 1 : 1 + count / (4 * threads());  // also of an empty step
    parallel_for_some(count, each, [&](int64_t turn, int thread) {
      const int64_t index = prompts ? count - 1 - turn : turn;  // the longest first
      const Item& item = items[index];
      float* x = locals + thread * local;
      float* slope = x + rows * (dim + 2);
      const Queries queries{x, reinterpret_cast<Seen*>(x + rows * dim), slope};
      float* work = slope + rows;
      float* sums = work + work_floats(rows);
      const int64_t used = item.tokens * group();
      gather(item.token, item.tokens, item.head, queries);
      const auto attend = [&](int64_t chunk, Running to) {
        with_numbers(cache.type, [&](auto numbers) {
          const auto with = [&](auto* inputs) {
            using X = std::decay_t<decltype(*inputs)>;
            const auto attend_one = layer.window || layer.chunk
                                        ? attend_chunk<decltype(numbers), X, true>
                                        : attend_chunk<decltype(numbers), X, false>;
            const Scores form{layer.slopes ? slope : nullptr, static_cast<float>(layer.softcap)};
            attend_one(keys_of(item), inputs, used, queries.seen, form, chunk * kChunk, work, to);
          };
          if (bfloat16)
            with(reinterpret_cast<UpperHalf*>(x));
          else
            with(x);
        });
      };
      if (item.chunk >= 0) {
        const Running part = running(memory + index * one, used);
        attend(item.chunk, part);
        if (item.chunks == 1) finish(item.token, 1, item.head, part);
        return;
      }
      const Running all = running(sums, used), next = running(sums + many, used);
      attend(item.first, all);
      for (int64_t chunk = 1; chunk < item.chunks; ++chunk) {
        attend(item.first + chunk, next);
        merge(all, next, used, panels());
      }
      finish(item.token, item.tokens, item.head, all);
    });
    for (int64_t index = 0; index < count; ++index) {
      const Item& item = items[index];
      if (item.chunk != item.first || item.chunks == 1) continue;
      const Running all = running(memory + index * one, group());
      for (int64_t chunk = 1; chunk < item.chunks; ++chunk)
        merge(all, running(memory + (index + chunk * layer.kv_heads) * one, group()), group(), panels());
      finish(item.token, 1, item.head, all);
    }
  }
};

// Rotates pairs (d, d + dim / 2) of one head by the angles whose cos [dim / 2] and sin are given.
inline void rotate(float* x, const float* rope, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; ++d) {
    const float a = x[d], b = x[d + half];
    x[d] = a * rope[d] - b * rope[half + d];
    x[d + half] = b * rope[d] + a * rope[half + d];
  }
}

inline float rounded_to_int8(const float* x, int64_t count, int8_t* to) {
  const float bound = bound_of(x, count), factor = integer_factor(bound, 127.0f);
  for (int64_t i = 0; i < count; ++i)
    to[i] = static_cast<int8_t>(static_cast<int32_t>(__builtin_rintf(x[i] * factor)));
  return bound / 127.0f;
}

// Puts a key and a value [dim] of one head to their place in the cache.
template <class T>
inline void put(const Keys& keys, int64_t position, const T* key, const T* value) {
  T* k = static_cast<T*>(keys.key(position / kPanel, sizeof(T))) + position % kPanel;
  T* v = static_cast<T*>(keys.value(position, sizeof(T)));
  for (int64_t d = 0; d < keys.dim; ++d) {
    k[d * kPanel] = key[d];
    v[d / kPanel * kChunk * kPanel + d % kPanel] = value[d];
  }
}

// The same, in the cache's numbers.
inline void remember(const Keys& keys, int64_t position, const float* key, const float* value) {
  switch (keys.cache.type) {
    case CacheType::kFloat32:
      return put(keys, position, key, value);
    case CacheType::kFloat16: {
      uint16_t k[kMostDim], v[kMostDim];
      halves_of(key, keys.dim, k);
      halves_of(value, keys.dim, v);
      return put(keys, position, k, v);
    }
    case CacheType::kInt8: {
      int8_t k[kMostDim], v[kMostDim];
      *keys.scale(keys.cache.key_scales, position) = rounded_to_int8(key, keys.dim, k);
      *keys.scale(keys.cache.value_scales, position) = rounded_to_int8(value, keys.dim, v);
      return put(keys, position, k, v);
    }
  }
}
