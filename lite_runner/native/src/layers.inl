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
template <class General>
inline void add_residual(const Layer& layer, const General& general, float* added, const float* x,
                         int64_t count, int64_t hidden, int64_t stride, float* out) {
  const Norm& norm = general.post_norm;
  const float scale = static_cast<float>(general.residual_scale);
  const float kept = static_cast<float>(general.normed_residual);
  const float* normed = scratch<float>(kNormed, count * stride);
  over_rows(count, [&](int64_t row) {
    float* from = added + row * hidden;
    if (norm.gamma) normalize(layer, norm, from, hidden, from, hidden);
    for (int64_t i = 0; i < hidden; ++i) {
      const float base = kept != 0.0f ? kept * normed[row * stride + i] : x[row * hidden + i];
      out[row * hidden + i] = base + scale * from[i];
    }
  });
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
        value = data[(k / 8 * kPanel + column) * 4 + nibble / 2] >> (nibble % 2 * 4) & 15;
        break;
      }
      default:
        break;
    }
    if (m.group) {
      const int64_t at = (panel * m.groups() + k / m.group) * kPanel + column;
      value *= float_of_half(m.halves(m.scales)[at]);
      if (m.minimums) value += float_of_half(m.halves(m.minimums)[at]);
    } else if (m.scales) {
      value *= scales[column];
    }
    to[k] = add ? to[k] + value : value;
  }
}

inline void embedding(const EmbeddingLayer& layer, const Step& step, Adapters adapters,
                      float* out) {
  const Matrix& table = layer.matrix(layer.table);
  over_rows(step.count, [&](int64_t row) {
    float* to = out + row * layer.hidden;
    read_row(table, step.token[row], to, false);
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
    if (layer.has_norm) normalize(layer, layer.norm, to, layer.hidden, to, layer.hidden);
  });
}

// Each of `parts` equal parts of a row [width] by itself, where there is such a norm.
inline void normalize_heads(const Layer& layer, const Norm& norm, float* x, int64_t parts,
                            int64_t width) {
  const int64_t dim = width / parts;
  for (int64_t head = 0; norm.gamma && head < parts; ++head)
    normalize(layer, norm, x + head * dim, dim, x + head * dim, dim);
}

inline void attention(const AttentionLayer& layer, const Step& step, Adapters adapters,
                      const float* x, const float* rope, Cache cache, float* out) {
  const int64_t count = step.count, dim = layer.head_dim;
  const int64_t queries = layer.heads * dim, keys = layer.kv_heads * dim;
  const Matrix& inward = layer.matrix(layer.query_key_value);
  const Matrix& outward = layer.matrix(layer.projection);
  const int64_t stride = inward.out;
  const bool bfloat16 = multiplies_bfloat16(outward);
  const GeneralAttentionLayer* general = layer.general();
  if (general && general->parallel)  // before `out`, which may be `x`, is written
    __builtin_memcpy(scratch<float>(kBlockInput, count * layer.hidden), x,
                     4 * count * layer.hidden);
  float* fused = scratch<float>(kFused, count * stride);
  const Rows rows = normalized(layer, layer.norm, inward, x, count);
  const int64_t outs[] = {queries, keys, keys};
  Lowered low(layer.adapters, adapters, 0, 3, rows, layer.hidden);
  linear<1>(inward, rows, low, [&](int64_t panel, float* sums) {
    low.add_panel(outs, panel, sums);
    spread(sums, count, panel, stride, fused, stride);
  });
  const ExtendedAttentionLayer* extended = layer.extended();
  const int64_t rope_width = general ? general->rope_width : dim;
  if (general) rope += general->rope_offset;
  over_rows(count, [&](int64_t row) {
    float* query = fused + row * stride;
    float *key = query + queries, *value = key + keys;
    if (extended) {
      const bool joint = general && general->joint_norm;
      normalize_heads(layer, extended->query_norm, query, joint ? 1 : layer.heads, queries);
      normalize_heads(layer, extended->key_norm, key, joint ? 1 : layer.kv_heads, keys);
    }
    if (layer.rotary)
      for (int64_t head = 0; head < layer.heads + layer.kv_heads; ++head)
        rotate(query + head * dim, rope + step.rope[row] * rope_width, dim);
    for (int64_t k = 0; bfloat16 && k < 2 * keys; ++k)
      key[k] = widened(static_cast<UpperHalf>(upper_half(key[k])));
    for (int64_t head = 0; head < layer.kv_heads; ++head)
      remember({cache, step.slot[row] * layer.kv_heads + head, dim}, step.position[row],
               key + head * dim, value + head * dim);
  });
  float* mixed = scratch<float>(kMixed, count * outward.depth());
  clear_behind(mixed, count, queries, outward.depth());
  const int64_t window = extended ? extended->window : 0;
  const float softcap = general ? static_cast<float>(general->softcap) : 0.0f;
  const bool prefix = general && general->prefix;
  Attention{layer, window, softcap, prefix, bfloat16, step, cache, fused, stride, mixed, outward.depth()}
      .run();
  const Rows mixed_rows = prepared(outward, mixed, count, outward.depth());
  Lowered back(layer.adapters, adapters, 3, 1, mixed_rows, queries);
  float* added = general ? scratch<float>(kAdded, count * layer.hidden) : out;
  linear<1>(outward, mixed_rows, back, [&](int64_t panel, float* sums) {
    back.add_panel(&layer.hidden, panel, sums);
    spread(sums, count, panel, layer.hidden, added, layer.hidden,
           layer.residual && !general ? x : nullptr);
  });
  if (general)
    add_residual(layer, *general, added, x, count, layer.hidden, inward.depth(), out);
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

// Calls body with the function.
template <class Body>
inline void with_activation(Activation activation, Body&& body) {
  if (activation == Activation::kSilu)
    body(Silu{});
  else if (activation == Activation::kGelu)
    body(Gelu{});
  else
    body(ExactGelu{});
}

inline void feed_forward(const FeedForwardLayer& layer, const Step& step, Adapters adapters,
                         const float* x, float* out) {
  const int64_t count = step.count;
  const Matrix &up = layer.matrix(layer.up), &down = layer.matrix(layer.down);
  const int64_t stride = down.depth();
  float* hidden = scratch<float>(kHidden, count * stride);
  clear_behind(hidden, count, layer.wide, stride);
  const GeneralFeedForwardLayer* general = layer.general();
  const bool parallel = general && general->parallel;
  const float* from = parallel ? scratch<float>(kBlockInput, count * layer.hidden) : x;
  const Rows rows = normalized(layer, layer.norm, up, from, count);
  Lowered low(layer.adapters, adapters, layer.gated ? 0 : 1, layer.gated ? 2 : 1, rows,
              layer.hidden);
  const Activation usual = layer.gated ? Activation::kSilu : Activation::kGelu;
  with_activation(general ? general->activation : usual, [&](auto function) {
    if (layer.gated) {
      linear<2>(up, rows, low, [&](int64_t unit, float* sums) {
        float* ups = sums + count * kPanel;
        low.add(0, unit * kPanel, layer.wide, 0, sums);
        low.add(1, unit * kPanel, layer.wide, 0, ups);
        for (int64_t i = 0; i < count * kPanel; i += kLanes)
          store(sums + i, function.of(load(sums + i)) * load(ups + i));
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
  float* added = general ? scratch<float>(kAdded, count * layer.hidden) : out;
  linear<1>(down, hidden_rows, back, [&](int64_t panel, float* sums) {
    back.add_panel(&layer.hidden, panel, sums);
    spread(sums, count, panel, layer.hidden, added, layer.hidden,
           layer.residual && !general ? x : nullptr);
  });
  if (general) add_residual(layer, *general, added, x, count, layer.hidden, up.depth(), out);
}

inline void head(const HeadLayer& layer, const Matrix& matrix, const Step& step,
                 Adapters adapters, float softcap, const float* x, float* logits) {
  const Rows rows = normalized(layer, layer.norm, matrix, x, step.wanted, step.row);
  Lowered low(layer.adapters, adapters, 0, 1, rows, layer.hidden, step.row);
  linear<1>(matrix, rows, low, [&](int64_t panel, float* sums) {
    low.add_panel(&matrix.out, panel, sums);
    if (softcap != 0.0f)
      for (int64_t i = 0; i < step.wanted * kPanel; i += kLanes)
        store(sums + i, capped(load(sums + i), softcap));
    spread(sums, step.wanted, panel, matrix.out, logits, matrix.out);
  });
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
    for (int64_t c = 0; c < kPanel; ++c)  // behind the last row any row does, by zero
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
