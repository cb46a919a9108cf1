// The layers that a network is made of: embedding, attention, feed-forward, head.

inline void normalize(const Layer& layer, const Norm& norm, const float* x, int64_t size,
                      float* to, int64_t stride) {
  const float* gamma = layer.at<float>(norm.gamma);
  const float* beta = norm.centred ? layer.at<float>(norm.beta) : nullptr;
  const int64_t whole = size / kLanes * kLanes;
  float mean = 0;
  if (norm.centred) {
    Floats total{};
    for (int64_t i = 0; i < whole; i += kLanes) total = total + load(x + i);
    mean = sum(total);
    for (int64_t i = whole; i < size; ++i) mean += x[i];
    mean /= static_cast<float>(size);
  }
  Floats squares{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats value = load(x + i) - mean;
    squares = squares + value * value;
  }
  float total = sum(squares);
  for (int64_t i = whole; i < size; ++i) total += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(size) +
                                              static_cast<float>(norm.epsilon));
  for (int64_t i = 0; i < whole; i += kLanes) {
    Floats value = (load(x + i) - mean) * factor * load(gamma + i);
    if (beta) value = value + load(beta + i);
    store(to + i, value);
  }
  for (int64_t i = whole; i < size; ++i)
    to[i] = (x[i] - mean) * factor * gamma[i] + (beta ? beta[i] : 0.0f);
  for (int64_t i = size; i < stride; ++i) to[i] = 0.0f;
}

// Rows behind their norm, where there is one: [count, depth of the matrix].
inline Rows normalized(const Layer& layer, const Norm& norm, const Matrix& m, const float* x,
                       int64_t count, const int32_t* chosen = nullptr) {
  const int64_t stride = m.depth();
  float* to = scratch<float>(kNormed, count * stride);
  over_rows(count, [&](int64_t row) {
    const float* from = x + (chosen ? chosen[row] : row) * m.in;
    float* target = to + row * stride;
    if (norm.gamma)
      normalize(layer, norm, from, m.in, target, stride);
    else
      for (int64_t i = 0; i < stride; ++i) target[i] = i < m.in ? from[i] : 0.0f;
  });
  return prepared(m, to, count, stride);
}

// Copies the columns of some panels from sums [rows][32] to rows of `width` numbers, plus `added`.
inline void spread(const float* sums, int64_t rows, int64_t panel, int64_t width, float* to,
                   int64_t stride, const float* added = nullptr) {
  const int64_t first = panel * kPanel, count = smaller_of(kPanel, width - first);
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = sums + row * kPanel;
    float* at = to + row * stride + first;
    const float* plus = added ? added + row * stride + first : nullptr;
    if (count == kPanel) {
      for (int64_t c = 0; c < kPanel; c += kLanes)
        store(at + c, plus ? load(plus + c) + load(from + c) : load(from + c));
    } else {
      for (int64_t c = 0; c < count; ++c) at[c] = plus ? plus[c] + from[c] : from[c];
    }
  }
}

// Adds what a layer has computed to its input [count][hidden], or to the normed input that
// `normalized` has left, with rows of `stride` numbers; `out` may be `x`.
inline void add_residual(const Layer& layer, const Residual& residual, float* added, const float* x,
                         int64_t count, int64_t hidden, int64_t stride, float* out) {
  const Norm& norm = residual.norm;
  const float scale = static_cast<float>(residual.scale);
  const float kept = static_cast<float>(residual.normed_input);
  const float* normed = scratch<float>(kNormed, count * stride);
  over_rows(count, [&](int64_t row) {
    float* from = added + row * hidden;
    if (norm.gamma) normalize(layer, norm, from, hidden, from, hidden);
    for (int64_t i = 0; i < hidden; ++i) {
      const float base = kept != 0.0f ? kept * normed[row * stride + i] : x[row * hidden + i];
      out[row * hidden + i] = base + scale * from[i];
    }
    float* to = out + row * hidden;
    if (residual.sum_norm.gamma) normalize(layer, residual.sum_norm, to, hidden, to, hidden);
  });
}

// Calls body(first, end) for the numbers 0..count-1, thousands at a time.
template <class Body>
inline void over_numbers(int64_t count, Body&& body) {
  constexpr int64_t kSome = 4096;
  parallel_for((count + kSome - 1) / kSome, [&](int64_t some, int) {
    body(some * kSome, smaller_of((some + 1) * kSome, count));
  });
}

// to [count] = the ranks' `own` [count] summed in the order of ranks, plus `added`; all get the same
// bits, whichever comes first.
inline void sum_over_ranks(Peers& peers, const float* own, int64_t count, const float* added,
                           float* to) {
  const Peers::Exchange exchange(peers, count);
  for (int64_t start = 0; start < count; start += Peers::kPlace) {
    const int64_t here = smaller_of(Peers::kPlace, count - start);
    over_numbers(here, [&](int64_t first, int64_t end) {
      __builtin_memcpy(peers.own() + first, own + start + first, 4 * (end - first));
    });
    if (!peers.meet(here)) return;
    over_numbers(here, [&](int64_t first, int64_t end) {
      int64_t i = first;
      for (; i + kLanes <= end; i += kLanes) {
        Floats total = load(peers.of(0) + i);
        for (int64_t rank = 1; rank < peers.size(); ++rank) total = total + load(peers.of(rank) + i);
        store(to + start + i, added ? load(added + start + i) + total : total);
      }
      for (; i < end; ++i) {
        float total = peers.of(0)[i];
        for (int64_t rank = 1; rank < peers.size(); ++rank) total += peers.of(rank)[i];
        to[start + i] = added ? added[start + i] + total : total;
      }
    });
  }
}

// Puts the ranks' columns [rows][width] of x [rows][size * width], of which each has its own there,
// to where the others lack them.
inline void gather_over_ranks(Peers& peers, int64_t rows, int64_t width, float* x) {
  const int64_t count = rows * width, stride = peers.size() * width;
  const Peers::Exchange exchange(peers, count);
  // Calls body(column of the part, its place in x, numbers) for numbers first..end of a rank's.
  const auto over_parts = [&](int64_t rank, int64_t first, int64_t end, auto&& body) {
    for (int64_t at = first, next; at < end; at = next) {
      next = smaller_of((at / width + 1) * width, end);
      body(at, x + at / width * stride + rank * width + at % width, next - at);
    }
  };
  for (int64_t start = 0; start < count; start += Peers::kPlace) {
    const int64_t here = smaller_of(Peers::kPlace, count - start);
    float* own = peers.own();
    over_numbers(here, [&](int64_t first, int64_t end) {
      over_parts(peers.rank(), start + first, start + end, [&](int64_t at, float* from, int64_t n) {
        __builtin_memcpy(own + at - start, from, 4 * n);
      });
    });
    if (!peers.meet(here)) return;
    over_numbers(here, [&](int64_t first, int64_t end) {
      for (int64_t rank = 0; rank < peers.size(); ++rank)
        if (rank != peers.rank())
          over_parts(rank, start + first, start + end, [&](int64_t at, float* to, int64_t n) {
            __builtin_memcpy(to, peers.of(rank) + at - start, 4 * n);
          });
    });
  }
}

// The output of the last matrix of a layer, of which `back` is the adapters' part, summed over the
// ranks and added to the layer's input `x` [count][hidden]; `stride`: of the normed input's rows.
template <class Of>
inline void add_output(const Of& layer, const Matrix& matrix, const Rows& rows, Lowered& back,
                       const Step& step, const float* x, int64_t stride, float* out) {
  const int64_t count = step.count, hidden = layer.hidden;
  const bool plain = layer.residual.plain();
  float* added = plain && !step.peers ? out : scratch<float>(kAdded, count * hidden);
  linear<1>(matrix, rows, back, [&](int64_t panel, float* sums) {
    back.add_panel(&layer.hidden, panel, sums);
    spread(sums, count, panel, hidden, added, hidden, plain && !step.peers ? x : nullptr);
  });
  if (step.peers)
    sum_over_ranks(*step.peers, added, count * hidden, plain ? x : nullptr, plain ? out : added);
  if (!plain) add_residual(layer, layer.residual, added, x, count, hidden, stride, out);
}

inline void clear_behind(float* x, int64_t rows, int64_t width, int64_t stride) {
  for (int64_t row = 0; row < rows && width < stride; ++row)
    for (int64_t i = width; i < stride; ++i) x[row * stride + i] = 0.0f;
}

inline void read_row(const Matrix& m, int64_t index, float* to, bool add) {
  if (m.blocks()) return read_row_of_blocks(m, index, to);  // tables of tokens: add is false
  const int64_t panel = index / kPanel, column = index % kPanel;
  const uint8_t* data = m.at(m.data) + panel * m.panel_bytes();
  const float* scales = reinterpret_cast<const float*>(m.at(m.scales)) + panel * kPanel;
  for (int64_t k = 0; k < m.in; ++k) {
    float value = 0;
    switch (m.format) {
      case Format::kFloat32:
        value = reinterpret_cast<const float*>(data)[k * kPanel + column];
        break;
      case Format::kBFloat16:
        value = widened(reinterpret_cast<const UpperHalf*>(data)[k * kPanel + column]);
        break;
      case Format::kFloat16:
        value = widened(reinterpret_cast<const Half*>(data)[k * kPanel + column]);
        break;
      case Format::kInt8: {
        const int64_t byte = m.rounded_input ? k % 4 : k % 2 * 2 + k % 4 / 2;
        value = static_cast<int8_t>(data[(k / 4 * kPanel + column) * 4 + byte]);
        break;
      }
      case Format::kInt4: {
        const int64_t nibble = k % 2 * 4 + k % 8 / 2;
        const int64_t q = data[(k / 8 * kPanel + column) * 4 + nibble / 2] >> (nibble % 2 * 4) & 15;
        value = m.table ? m.integer_table()[q] : static_cast<float>(q);
        break;
      }
      case Format::kFloat8: {
        const uint32_t bits = data[k * kPanel + column];
        value = 256.0f * float_of_half(static_cast<uint16_t>((bits & 0x7f) << 7 | (bits & 0x80) << 8));
        break;
      }
      case Format::kTable4:
        value = reinterpret_cast<const float*>(
            m.at(m.table))[data[k / 2 * kPanel + column] >> (k % 2 * 4) & 15];
        break;
      default:
        break;
    }
    value -= static_cast<float>(m.zero);
    if (m.group) {
      const int64_t at = (panel * m.groups() + k / m.group) * kPanel + column;
      if (m.zeros) value -= reinterpret_cast<const int8_t*>(m.at(m.zeros))[at];
      value *= m.scale_type == ScaleType::kFloat32
                   ? reinterpret_cast<const float*>(m.at(m.scales))[at]
               : m.scale_type == ScaleType::kHalf
                   ? float_of_half(m.halves(m.scales)[at])
                   : widened(static_cast<UpperHalf>(m.halves(m.scales)[at]));
      if (m.minimums) value += float_of_half(m.halves(m.minimums)[at]);
    } else if (m.scales) {
      value *= scales[column];
    }
    const int64_t input = m.order ? reinterpret_cast<const int32_t*>(m.at(m.order))[k] : k;
    to[input] = add ? to[input] + value : value;
  }
}

// The numbers of the tokens for each layer, by the tokens and by their embeddings x: they stay in
// kSide [count][layers * side] until the step is done.
inline void embed_sides(const EmbeddingLayer& layer, const Step& step, const float* x) {
  const Matrix &table = layer.matrix(layer.side_table), &inward = layer.matrix(layer.side_inward);
  const int64_t count = step.count, width = layer.side * layer.side_layers;
  float* sides = scratch<float>(kSide, count * width);
  float* looked_up = scratch<float>(kGathered, count * width);
  Lowered none;
  linear<1>(inward, normalized(layer, Norm{}, inward, x, count), none,
            [&](int64_t panel, const float* sums) {
    spread(sums, count, panel, width, sides, width);
  });
  over_rows(count, [&](int64_t row) {
    float *to = sides + row * width, *from = looked_up + row * width;
    read_row(table, step.token[row], from, false);
    for (int64_t at = 0; at < width; at += layer.side)
      normalize(layer, layer.side_norm, to + at, layer.side, to + at, layer.side);
    const float table_scale = static_cast<float>(layer.table_scale);
    const float scale = static_cast<float>(layer.side_scale);
    for (int64_t i = 0; i < width; ++i) to[i] = (to[i] + from[i] * table_scale) * scale;
  });
}

inline void embedding(const EmbeddingLayer& layer, const Step& step, Adapters adapters,
                      float* out) {
  const Matrix& table = layer.matrix(layer.table);
  const bool shared = step.peers && table.out < step.vocabulary;
  if (shared) {  // a token is in the table of one rank, and zeros in those of others
    float* found = scratch<float>(kAdded, step.count * layer.hidden);
    over_rows(step.count, [&](int64_t row) {
      const int64_t own = step.token[row] - step.first_token;
      float* to = found + row * layer.hidden;
      if (own >= 0 && own < table.out)
        read_row(table, own, to, false);
      else
        __builtin_memset(to, 0, 4 * layer.hidden);
    });
    sum_over_ranks(*step.peers, found, step.count * layer.hidden, nullptr, out);
  }
  over_rows(step.count, [&](int64_t row) {
    float* to = out + row * layer.hidden;
    if (!shared) read_row(table, step.token[row], to, false);
    if (adapters.place && adapters.place[row] >= 0 && layer.adapters.down[0] >= 0)
      with_pool(adapters, [&](const auto* pool) {
        const auto* place = pool + adapters.place[row] * adapters.stride;
        const int64_t rank = layer.adapters.rank;
        const auto* factors = place + layer.adapters.down[0] + step.token[row] * rank;
        const auto* up = place + layer.adapters.up[0];
        for (int64_t r = 0; r < rank; ++r)
          for (int64_t i = 0; i < layer.hidden; ++i)
            to[i] += widened(factors[r]) * widened(up[(i / kPanel * rank + r) * kPanel + i % kPanel]);
      });
    if (layer.positions) read_row(layer.matrix(layer.positions), step.position[row], to, true);
    if (layer.norm.gamma) normalize(layer, layer.norm, to, layer.hidden, to, layer.hidden);
  });
  if (layer.side) embed_sides(layer, step, out);
}

// Each of `parts` equal parts of a row [width] by itself, where there is such a norm.
inline void normalize_heads(const AttentionLayer& layer, Norm norm, float* x, int64_t parts,
                            int64_t width) {
  const int64_t dim = width / parts, bytes = layer.apart_norm ? dim * sizeof(float) : 0;
  for (int64_t head = 0; norm.gamma && head < parts; ++head) {
    normalize(layer, norm, x + head * dim, dim, x + head * dim, dim);
    norm.gamma += bytes;
    norm.beta += bytes;
  }
}

// to [columns] = row [rows] by a matrix [rows, columns]
inline void combine(const float* row, const float* matrix, int64_t rows, int64_t columns, float* to) {
  for (int64_t i = 0; i < columns; ++i) to[i] = 0.0f;
  for (int64_t k = 0; k < rows; ++k)
    for (int64_t i = 0; i < columns; ++i) to[i] += row[k] * matrix[k * columns + i];
}

// Of latent attention: queries of the latent vector, and it as the only key and value
// [count][(heads + 2) * head_dim], from what the first matrix gave [count][stride].
inline float* absorbed(const AttentionLayer& layer, const float* inward, int64_t stride,
                       int64_t count) {
  const int64_t dim = layer.head_dim, heads = layer.heads, width = layer.latent_width;
  const float* queries = inward;
  int64_t queries_stride = stride;
  const int64_t kept = layer.query_rank ? layer.query_rank : heads * width;
  if (layer.query_rank) {
    const Matrix& query = layer.matrix(layer.query);
    float* normed = scratch<float>(kHidden, count * query.depth());
    over_rows(count, [&](int64_t row) {
      normalize(layer, layer.latent_query_norm, inward + row * stride, layer.query_rank,
                normed + row * query.depth(), query.depth());
    });
    float* wide = scratch<float>(kExpertOut, count * heads * width);
    Lowered none;
    linear<1>(query, prepared(query, normed, count, query.depth()), none,
              [&](int64_t panel, const float* sums) {
      spread(sums, count, panel, heads * width, wide, heads * width);
    });
    queries = wide, queries_stride = heads * width;
  }
  const int64_t all = (heads + 2) * dim;
  float* fused = scratch<float>(kFused, count * all);
  parallel_for(heads, [&](int64_t head, int) {
    for (int64_t row = 0; row < count; ++row)
      combine(queries + row * queries_stride + head * width,
              layer.at<float>(layer.absorb) + head * width * dim, width, dim,
              fused + row * all + head * dim);
  });
  const int32_t* places = layer.at<int32_t>(layer.places);
  float* vectors = scratch<float>(kHidden, count * dim);
  over_rows(count, [&](int64_t row) {
    const float* from = inward + row * stride + kept;
    float* vector = vectors + row * dim;
    normalize(layer, layer.latent_norm, from, layer.latent, vector, layer.latent);
    for (int64_t i = layer.latent; i < dim; ++i) vector[i] = from[i];
    float *key = fused + row * all + heads * dim, *value = key + dim;
    for (int64_t i = 0; i < dim; ++i) key[places[i]] = value[places[i]] = vector[i];
  });
  return fused;
}

// Outputs of the heads [count][stride] from the means of latent vectors [count][heads * head_dim].
inline float* expanded(const AttentionLayer& layer, const float* means, int64_t count,
                       int64_t stride) {
  const int64_t dim = layer.head_dim, heads = layer.heads, value = layer.latent_value;
  float* out = scratch<float>(kHidden, count * stride);
  clear_behind(out, count, heads * value, stride);
  parallel_for(heads, [&](int64_t head, int) {
    for (int64_t row = 0; row < count; ++row)
      combine(means + (row * heads + head) * dim, layer.at<float>(layer.expand) + head * dim * value,
              dim, value, out + row * stride + head * value);
  });
  return out;
}

inline void attention(const AttentionLayer& layer, const Step& step, Adapters adapters,
                      const float* x, const float* rope, Cache cache, float* out) {
  const int64_t count = step.count, dim = layer.head_dim;
  const int64_t queries = layer.heads * dim, keys = layer.borrowed ? 0 : layer.kv_heads * dim;
  const Matrix& inward = layer.matrix(layer.query_key_value);
  const Matrix& outward = layer.matrix(layer.projection);
  const int64_t asked = layer.gated ? 2 * queries : queries;
  int64_t stride = inward.out;
  const bool bfloat16 = multiplies_pairs() && multiplies_bfloat16(outward);
  if (layer.parallel)  // before `out`, which may be `x`, is written
    __builtin_memcpy(scratch<float>(kBlockInput, count * layer.hidden), x,
                     4 * count * layer.hidden);
  float* fused = scratch<float>(layer.latent ? kGathered : kFused, count * stride);
  const Rows rows = normalized(layer, layer.norm, inward, x, count);
  const int64_t outs[] = {asked, keys, keys};
  Lowered low(layer.adapters, adapters, 0, 3, rows, layer.hidden);
  linear<1>(inward, rows, low, [&](int64_t panel, float* sums) {
    low.add_panel(outs, panel, sums);
    spread(sums, count, panel, stride, fused, stride);
  });
  if (layer.latent) {
    fused = absorbed(layer, fused, stride, count);
    stride = queries + 2 * keys;
  }
  rope += layer.rope_offset;
  // The keys of a panel's positions share lines of cache, which two threads would take from each other.
  const int64_t together = count >= threads() * kPanel ? kPanel : 4;
  parallel_for_some(count, together, [&](int64_t row, int) {
    float* query = fused + row * stride;
    float *key = query + asked, *value = key + keys;
    const int64_t kv_heads = layer.borrowed ? 0 : layer.kv_heads;
    if (layer.placed_queries)
      __builtin_memcpy(query, layer.at<float>(layer.placed_queries) + step.position[row] * queries,
                       4 * queries);
    const auto normalize_both = [&] {
      normalize_heads(layer, layer.query_norm, query, layer.joint_norm ? 1 : layer.heads, queries);
      if (kv_heads)
        normalize_heads(layer, layer.key_norm, key, layer.joint_norm ? 1 : kv_heads, keys);
    };
    if (!layer.late_norm) normalize_both();
    for (int64_t i = 0; layer.clip > 0 && i < queries + 2 * keys; ++i) {  // of no gated one
      const float most = static_cast<float>(layer.clip);
      query[i] = query[i] > most ? most : query[i] < -most ? -most : query[i];
    }
    const float* angles = rope + step.rope[row] * layer.rope_width;
    for (int64_t head = 0; layer.rotary && head < layer.heads; ++head)
      rotate(query + head * dim, angles, dim);
    for (int64_t head = 0; layer.rotary && head < kv_heads; ++head)
      rotate(key + head * dim, angles, dim);
    if (layer.late_norm) normalize_both();
    if (kv_heads) normalize_heads(layer, layer.value_norm, value, kv_heads, keys);
    for (int64_t k = 0; bfloat16 && k < 2 * keys; ++k)
      key[k] = widened(static_cast<UpperHalf>(upper_half(key[k])));
    for (int64_t head = 0; head < kv_heads; ++head)
      remember({cache, step.blocks(row), head, dim}, step.position[row], key + head * dim, value + head * dim);
  });
  const int64_t mixed_stride = layer.latent ? queries : outward.depth();
  float* mixed = scratch<float>(kMixed, count * mixed_stride);
  clear_behind(mixed, count, queries, mixed_stride);
  Attention{layer, bfloat16, step, cache, fused, stride, mixed, mixed_stride}.run();
  if (layer.gated)
    over_rows(count, [&](int64_t row) {
      const float* gates = fused + row * stride + queries;
      float* to = mixed + row * mixed_stride;
      for (int64_t d = 0; d < queries; ++d)
        to[d] = to[d] / (1.0f + exponential(splat(-gates[d]))[0]);
    });
  if (layer.latent) mixed = expanded(layer, mixed, count, outward.depth());
  const Rows mixed_rows = prepared(outward, mixed, count, outward.depth());
  const int64_t wide = layer.latent ? layer.heads * layer.latent_value : queries;
  Lowered back(layer.adapters, adapters, 3, 1, mixed_rows, wide);
  add_output(layer, outward, mixed_rows, back, step, x, inward.depth(), out);
}

struct Silu {
  static Floats of(Floats x) { return x / (1.0f + exponential(-x)); }
};

struct Gelu {  // the tanh form
  static Floats of(Floats x) {
    // (1 + tanh(a)) / 2 is 1 / (1 + e^-2a); 1.5957... is 2 sqrt(2 / pi).
    return x / (1.0f + exponential(x * (x * x * 0.044715f + 1.0f) * -1.5957691216057308f));
  }
};

struct ExactGelu {
  // x * P(x) of the normal distribution function P, which is 1 - P(-x). Source: Abramowitz and
  // Stegun, 7.1.26, within 8e-8 of P.
  static Floats of(Floats x) {
    const Floats size = larger(x, -x), t = 1.0f / (size * 0.23164189f + 1.0f);
    Floats p = t * 0.5307027145f - 0.7265760135f;
    p = p * t + 0.7107068705f;
    p = p * t - 0.142248368f;
    p = p * t + 0.127414796f;
    return larger(x, Floats{}) - size * p * t * exponential(size * size * -0.5f);
  }
};

struct QuickGelu {
  static Floats of(Floats x) { return x / (1.0f + exponential(x * -1.702f)); }
};

struct Relu {
  static Floats of(Floats x) { return larger(x, Floats{}); }
};

struct ReluSquared {
  static Floats of(Floats x) { return Relu::of(x) * Relu::of(x); }
};

// sums [numbers] = f(gates) * ups, the gates lie in `sums`.
template <class Function>
inline void gate(const FeedForwardLayer& layer, Function function, float* sums, const float* ups,
                 int64_t numbers) {
  const Floats limit = splat(static_cast<float>(layer.limit));
  for (int64_t i = 0; i < numbers; i += kLanes) {
    Floats gates = load(sums + i), wide = load(ups + i);
    if (layer.limit != 0.0) {
      gates = -larger(-gates, -limit);
      wide = larger(-larger(-wide, -limit), -limit) + 1.0f;
    }
    store(sums + i, function.of(gates) * wide);
  }
}

// Calls body with the function.
template <class Body>
inline void with_activation(Activation activation, Body&& body) {
  if (activation == Activation::kSilu)
    body(Silu{});
  else if (activation == Activation::kGelu)
    body(Gelu{});
  else if (activation == Activation::kExactGelu)
    body(ExactGelu{});
  else if (activation == Activation::kRelu)
    body(Relu{});
  else if (activation == Activation::kReluSquared)
    body(ReluSquared{});
  else
    body(QuickGelu{});
}

// The addition after the network of a layer: see Side. `x` is the block's output so far.
inline void add_side(const FeedForwardLayer& layer, const Step& step, float* x) {
  const Side& side = layer.side;
  const int64_t count = step.count, hidden = layer.hidden;
  if (side.width) {
    const Matrix &in = layer.matrix(side.gate), &down = layer.matrix(side.down);
    const int64_t stride = down.depth(), apart = side.width * side.layers;
    const float* factors = scratch<float>(kSide, count * apart) + side.layer * side.width;
    const Floats scale = splat(static_cast<float>(side.gate_scale));
    float* inner = scratch<float>(kHidden, count * stride);
    clear_behind(inner, count, side.width, stride);
    Lowered none;
    with_activation(layer.activation, [&](auto function) {
      linear<1>(in, normalized(layer, Norm{}, in, x, count), none, [&](int64_t panel, float* sums) {
        for (int64_t i = 0; i < count * kPanel; i += kLanes)
          store(sums + i, function.of(load(sums + i) * scale));
        spread(sums, count, panel, side.width, inner, stride);
      });
    });
    over_rows(count, [&](int64_t row) {
      for (int64_t i = 0; i < side.width; ++i) inner[row * stride + i] *= factors[row * apart + i];
    });
    float* added = scratch<float>(kAdded, count * hidden);
    linear<1>(down, prepared(down, inner, count, stride), none,
              [&](int64_t panel, const float* sums) {
      spread(sums, count, panel, hidden, added, hidden);
    });
    add_residual(layer, side.residual, added, x, count, hidden, hidden, x);
  }
  const float factor = static_cast<float>(side.factor);
  if (factor != 0.0f)
    over_rows(count, [&](int64_t row) {
      for (int64_t i = 0; i < hidden; ++i) x[row * hidden + i] *= factor;
    });
}

inline void feed_forward(const FeedForwardLayer& layer, const Step& step, Adapters adapters,
                         const float* x, float* out) {
  const int64_t count = step.count;
  const Matrix &up = layer.matrix(layer.up), &down = layer.matrix(layer.down);
  const int64_t stride = down.depth();
  float* hidden = scratch<float>(kHidden, count * stride);
  clear_behind(hidden, count, layer.wide, stride);
  const float* from = layer.parallel ? scratch<float>(kBlockInput, count * layer.hidden) : x;
  const Rows rows = normalized(layer, layer.norm, up, from, count);
  Lowered low(layer.adapters, adapters, layer.gated ? 0 : 1, layer.gated ? 2 : 1, rows,
              layer.hidden);
  with_activation(layer.activation, [&](auto function) {
    if (layer.gated) {
      linear<2>(up, rows, low, [&](int64_t unit, float* sums) {
        float* ups = sums + count * kPanel;
        low.add(0, unit * kPanel, layer.wide, 0, sums);
        low.add(1, unit * kPanel, layer.wide, 0, ups);
        gate(layer, function, sums, ups, count * kPanel);
        spread(sums, count, unit, layer.wide, hidden, stride);
      });
    } else {
      linear<1>(up, rows, low, [&](int64_t panel, float* sums) {
        low.add_panel(&layer.wide, panel, sums);
        for (int64_t i = 0; i < count * kPanel; i += kLanes)
          store(sums + i, function.of(load(sums + i)));
        spread(sums, count, panel, layer.wide, hidden, stride);
      });
    }
  });
  const Rows hidden_rows = prepared(down, hidden, count, stride);
  Lowered back(layer.adapters, adapters, 2, 1, hidden_rows, layer.wide);
  add_output(layer, down, hidden_rows, back, step, x, up.depth(), out);
  add_side(layer, step, out);
}

// x [count][hidden] are embeddings, and become the input of the layer.
inline void join(const JoinLayer& layer, const Step& step, const float* states, float* x) {
  const Matrix& matrix = layer.matrix(layer.matrix_offset);
  const int64_t count = step.count, hidden = layer.hidden, stride = matrix.depth();
  float* both = scratch<float>(kNormed, count * stride);
  over_rows(count, [&](int64_t row) {
    float* to = both + row * stride;
    normalize(layer, layer.norm, x + row * hidden, hidden, to, hidden);
    normalize(layer, layer.hidden_norm, states + row * hidden, hidden, to + hidden, stride - hidden);
  });
  Lowered none;
  linear<1>(matrix, prepared(matrix, both, count, stride), none, [&](int64_t panel, const float* sums) {
    spread(sums, count, panel, hidden, x, hidden);
  });
}

inline void head(const HeadLayer& layer, const Matrix& matrix, const Step& step,
                 Adapters adapters, float softcap, const float* x, float* logits) {
  const Rows rows = normalized(layer, layer.norm, matrix, x, step.wanted, step.row);
  Lowered low(layer.adapters, adapters, 0, 1, rows, layer.hidden, step.row);
  const bool shared = step.peers && matrix.out < step.vocabulary;
  const int64_t stride = shared ? step.vocabulary : matrix.out;
  float* own = shared ? logits + step.first_token : logits;
  linear<1>(matrix, rows, low, [&](int64_t panel, float* sums) {
    low.add_panel(&matrix.out, panel, sums);
    if (softcap != 0.0f)
      for (int64_t i = 0; i < step.wanted * kPanel; i += kLanes)
        store(sums + i, capped(load(sums + i), softcap));
    spread(sums, step.wanted, panel, matrix.out, own, stride);
  });
  if (shared) gather_over_ranks(*step.peers, step.wanted, matrix.out, logits);
}

inline void plain_linear(const Matrix& m, const float* x, int64_t count, float* out) {
  float* rows = scratch<float>(kNormed, count * m.depth());
  for (int64_t row = 0; row < count; ++row)
    for (int64_t k = 0; k < m.depth(); ++k)
      rows[row * m.depth() + k] = k < m.in ? x[row * m.in + k] : 0.0f;
  Lowered none;
  linear<1>(m, prepared(m, rows, count, m.depth()), none, [&](int64_t panel, const float* sums) {
    spread(sums, count, panel, m.out, out, m.out);
  });
}

inline void widen(const void* values, const uint16_t* scales, const uint16_t* minimums,
                  int64_t rows, int64_t inputs, int64_t bits, int64_t group, int64_t stride,
                  float* to) {
  const int64_t depth = (inputs + 7) / 8 * 8, groups = inputs / group;
  parallel_for((rows + kPanel - 1) / kPanel, [&](int64_t panel, int) {
    float* target = to + panel * stride * depth * kPanel;
    const int64_t here = smaller_of(kPanel, rows - panel * kPanel);
    float factor[kPanel] = {}, lowest[kPanel] = {};
    const int8_t* first[kPanel];
    for (int64_t c = 0; c < kPanel; ++c)  // after the last row any row will do, times zero
      first[c] = static_cast<const int8_t*>(values) +
                 (panel * kPanel + smaller_of(c, here - 1)) * inputs * bits / 8;
    for (int64_t k = 0; k < inputs; ++k) {
      if (k % group == 0)
        for (int64_t c = 0; c < here; ++c) {
          const int64_t at = (panel * kPanel + c) * groups + k / group;
          factor[c] = float_of_half(scales[at]);
          lowest[c] = minimums ? float_of_half(minimums[at]) : 0.0f;
        }
      alignas(64) int32_t numbers[kPanel];
      for (int64_t c = 0; c < kPanel; ++c)
        numbers[c] = bits == 8 ? first[c][k] : first[c][k / 2] >> (k % 2 * 4) & 15;
      for (int64_t c = 0; c < kPanel; c += kLanes)
        store(target + k * kPanel + c,
              load(factor + c) * to_float(load(numbers + c)) + load(lowest + c));
    }
  });
}
