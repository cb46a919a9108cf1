// A mixture of experts: only what the step's tokens chose is read, each expert's matrices once.

// The rows of a step by the experts that they go to. A row is a token that has chosen an expert;
// those of an expert follow each other.
struct Routes {
  int64_t chosen;   // rows of a token
  int64_t active;   // experts that have rows
  int64_t longest;  // rows of the expert that has most
  int32_t* expert;  // [active], rising
  int32_t* first;   // [active + 1]: of an expert's rows
  int32_t* token;   // [rows]
  int32_t* row;     // [tokens, chosen]: of a token, the most probable expert's first
  float* factor;    // [tokens, chosen]
};

// A token's most probable experts, and how much of the output each is, by its logits [experts],
// which are used up; of equal ones the first. Whatever the logits are, these are `chosen` experts.
inline void choose(const FeedForwardLayer& layer, float* logits, int64_t stride, int32_t* expert,
                   float* factor) {
  constexpr float kTaken = -__builtin_inff();
  for (int64_t i = layer.experts; i < stride; ++i) logits[i] = kTaken;
  float top = kTaken;
  for (int64_t i = 0; i < layer.experts; ++i) top = logits[i] > top ? logits[i] : top;
  Floats total{};
  for (int64_t i = 0; i < stride; i += kLanes) total = total + exponential(load(logits + i) - top);
  float scale = 0;
  for (int64_t c = 0; c < layer.chosen; ++c) {
    int64_t best = -1;
    for (int64_t i = 0; i < layer.experts; ++i) {
      bool taken = false;  // alone no sign of it: a logit may be infinite or NaN
      if (best < 0 || logits[i] > logits[best])
        for (int64_t t = 0; t < c; ++t) taken = taken || expert[t] == i;
      if (!taken && (best < 0 || logits[i] > logits[best])) best = i;
    }
    expert[c] = static_cast<int32_t>(best);
    alignas(64) float one[kLanes] = {logits[best] - top};
    store(one, exponential(load(one)));
    factor[c] = one[0];
    scale += one[0];
  }
  if (!layer.renormalized) scale = sum(total);
  for (int64_t c = 0; c < layer.chosen; ++c) factor[c] /= scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(splat(-x))[0]); }

// As `choose`, where what is chosen by is not the order of the logits: these become probabilities,
// and a bias is added to them, or only the best groups count.
inline void choose_by_scores(const FeedForwardLayer& layer, float* logits, int64_t stride,
                             int32_t* expert, float* factor) {
  constexpr float kLowest = -__builtin_inff();
  float top = kLowest;
  for (int64_t i = 0; i < layer.experts; ++i) top = logits[i] > top ? logits[i] : top;
  for (int64_t i = layer.experts; i < stride; ++i) logits[i] = kLowest;
  Floats total{};
  for (int64_t i = 0; i < stride; i += kLanes) {
    const Floats logit = load(logits + i);
    const Floats one = layer.sigmoid ? 1.0f / (1.0f + exponential(-logit)) : exponential(logit - top);
    total = total + one;
    store(logits + i, one);
  }
  const float whole = layer.sigmoid ? 1.0f : sum(total);
  const float* bias = layer.choice_bias ? layer.at<float>(layer.choice_bias) : nullptr;
  const auto score = [&](int64_t i) { return logits[i] / whole + (bias ? bias[i] : 0.0f); };
  const int64_t size = layer.experts / layer.groups;
  uint64_t allowed = layer.chosen_groups < layer.groups ? 0 : ~uint64_t{0};
  for (int64_t c = 0; c < layer.chosen_groups && layer.chosen_groups < layer.groups; ++c) {
    int64_t best = -1;
    float most = kLowest;
    for (int64_t g = 0; g < layer.groups; ++g) {
      if (allowed >> g & 1) continue;
      float first = kLowest, second = kLowest;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) {
        const float one = score(i);
        if (one > first) second = first, first = one;
        else if (one > second) second = one;
      }
      const float both = layer.best_of_group > 1 ? first + second : first;
      if (best < 0 || both > most) best = g, most = both;
    }
    allowed |= uint64_t{1} << best;
  }
  float shares = 0;
  for (int64_t c = 0; c < layer.chosen; ++c) {
    int64_t best = -1;
    float most = kLowest;
    for (int64_t i = 0; i < layer.experts; ++i) {
      if (!(allowed >> i / size & 1)) continue;
      const float one = score(i);
      if (best >= 0 && !(one > most)) continue;
      bool taken = false;
      for (int64_t t = 0; t < c; ++t) taken = taken || expert[t] == i;
      if (!taken) best = i, most = one;
    }
    expert[c] = static_cast<int32_t>(best);
    shares += factor[c] = logits[best] / whole;
  }
  for (int64_t c = 0; layer.renormalized && c < layer.chosen; ++c) factor[c] /= shares;
}

// Sorts the rows of `count` tokens by expert, which their router's logits [count, stride] choose.
inline Routes routed(const FeedForwardLayer& layer, float* logits, int64_t stride, int64_t count) {
  const int64_t rows = count * layer.chosen, experts = layer.experts;
  int32_t* memory = scratch<int32_t>(kRouted, 4 * rows + 3 * experts + 1);
  Routes routes{layer.chosen, 0, 0, memory, memory + experts, nullptr, nullptr, nullptr};
  int32_t* next = routes.first + experts + 1;  // [experts]: rows, then where the next one goes
  int32_t* expert = next + experts;            // [tokens, chosen]
  routes.token = expert + rows;
  routes.row = routes.token + rows;
  routes.factor = reinterpret_cast<float*>(routes.row + rows);
  const bool by_scores = layer.sigmoid || layer.choice_bias || layer.chosen_groups < layer.groups;
  over_rows(count, [&](int64_t token) {
    float* factor = routes.factor + token * layer.chosen;
    (by_scores ? choose_by_scores : choose)(layer, logits + token * stride, stride,
                                            expert + token * layer.chosen, factor);
    for (int64_t c = 0; layer.scale != 1.0 && c < layer.chosen; ++c)
      factor[c] *= static_cast<float>(layer.scale);
    for (int64_t c = 0; layer.expert_scales && c < layer.chosen; ++c)
      factor[c] *= layer.at<float>(layer.expert_scales)[expert[token * layer.chosen + c]];
  });
  for (int64_t e = 0; e < experts; ++e) next[e] = 0;
  for (int64_t row = 0; row < rows; ++row) ++next[expert[row]];
  int32_t end = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t here = next[e];
    next[e] = end;
    if (here == 0) continue;
    routes.expert[routes.active] = static_cast<int32_t>(e);
    routes.first[routes.active++] = end;
    routes.longest = larger_of<int64_t>(routes.longest, here);
    end += here;
  }
  routes.first[routes.active] = end;
  for (int64_t row = 0; row < rows; ++row) {
    routes.row[row] = next[expert[row]]++;
    routes.token[routes.row[row]] = static_cast<int32_t>(row / layer.chosen);
  }
  return routes;
}

// As linear, of the matrix of each active expert at `offsets` with its rows: calls finish(first row,
// rows, panel, sums). One token's rows may be the same for all: then there is one.
template <int64_t together, class Finish>
inline void linear_of_experts(const Layer& layer, const int64_t* offsets, const Routes& routes,
                              const Rows& rows, Finish&& finish) {
  const Matrix& one = layer.matrix(offsets[0]);
  const int64_t units = one.panels() / together, size = together * routes.longest * kPanel;
  const int64_t bytes = routes.active * one.panels() * one.panel_bytes();
  const bool even = routes.longest == 1;
  Lowered none;
  float* all = scratch<float>(kPanels, threads() * size);
  over_units(routes.active * units, bytes * (1 + routes.longest / 4), even, none,
             [&](int64_t item, int thread) {
    const int64_t at = item / units, unit = item % units, first = routes.first[at];
    const Matrix& m = layer.matrix(offsets[routes.expert[at]]);
    const int64_t count = routes.first[at + 1] - first;
    const Rows own = some_of(rows, m, rows.count == 1 ? 0 : first, count);
    float* sums = all + thread * size;
    for (int64_t panel = 0; panel < together; ++panel)
      multiply_panel(m, own, unit * together + panel, sums + panel * count * kPanel);
    finish(first, count, unit, sums);
  });
}

// sums = f(gates) * ups, or f(sums): what of `together` panels of a unit is left is in the first.
template <int64_t together, class Function>
inline void activate(const FeedForwardLayer& layer, Function function, float* sums, int64_t rows) {
  if constexpr (together == 2) {
    gate(layer, function, sums, sums + rows * kPanel, rows * kPanel);
  } else {
    for (int64_t i = 0; i < rows * kPanel; i += kLanes)
      store(sums + i, function.of(load(sums + i)));
  }
}

// Calls body with how many panels a unit of gates and ups has.
template <class Body>
inline void with_units(const FeedForwardLayer& layer, Body&& body) {
  if (layer.gated)
    body(std::integral_constant<int64_t, 2>{});
  else
    body(std::integral_constant<int64_t, 1>{});
}

// Adds the output of the network that every token takes, times `gates` where it has some.
inline void add_shared(const FeedForwardLayer& layer, const Rows& normed, const float* x,
                       const float* gates, float* added) {
  const Matrix &up = layer.matrix(layer.shared_up), &down = layer.matrix(layer.shared_down);
  const int64_t count = normed.count, stride = down.depth(), width = layer.hidden;
  float* hidden = scratch<float>(kHidden, count * stride);
  clear_behind(hidden, count, layer.shared, stride);
  const Rows rows = layer.shared_norm.gamma ? normalized(layer, layer.shared_norm, up, x, count)
                                            : prepared(up, normed.x, count, normed.stride);
  Lowered none;
  with_activation(layer.activation, [&](auto function) {
    with_units(layer, [&](auto together) {
      linear<together>(up, rows, none, [&](int64_t unit, float* sums) {
        activate<together>(layer, function, sums, count);
        spread(sums, count, unit, layer.shared, hidden, stride);
      });
    });
  });
  const Rows hidden_rows = prepared(down, hidden, count, stride);
  float* own = scratch<float>(kExpertOut, count * width);
  linear<1>(down, hidden_rows, none, [&](int64_t panel, const float* sums) {
    spread(sums, count, panel, width, own, width);
  });
  over_rows(count, [&](int64_t row) {
    float* from = own + row * width;
    const Norm& norm = layer.shared_out_norm;
    if (norm.gamma) normalize(layer, norm, from, width, from, width);
    const float factor = layer.shared_gate ? gates[row] : 1.0f;
    for (int64_t i = 0; i < width; ++i) added[row * width + i] += factor * from[i];
  });
}

inline void experts(const FeedForwardLayer& layer, const Step& step, const float* x, float* out) {
  const int64_t count = step.count, width = layer.hidden, total = count * layer.chosen;
  if (!count) return;
  const Matrix& router = layer.matrix(layer.router);
  const int64_t *ups = layer.at<int64_t>(layer.up), *downs = layer.at<int64_t>(layer.down);
  Rows normed = normalized(layer, layer.norm, router, x, count);
  const int64_t logits_stride = router.panels() * kPanel;
  float* logits = scratch<float>(kFused, count * logits_stride);
  Lowered none;
  linear<1>(router, normed, none, [&](int64_t panel, float* sums) {
    spread(sums, count, panel, logits_stride, logits, logits_stride);
  });
  float* added = scratch<float>(kAdded, count * (width + 1));
  float* gates = added + count * width;  // of the shared network
  for (int64_t token = 0; layer.shared_gate && token < count; ++token)
    gates[token] = sigmoid(logits[token * logits_stride + layer.experts]);
  const Routes routes = routed(layer, logits, logits_stride, count);

  const Matrix &up = layer.matrix(ups[0]), &down = layer.matrix(downs[0]);
  if (layer.expert_norm.gamma) normed = normalized(layer, layer.expert_norm, up, x, count);
  const float* from = normed.x;
  const bool apart = count > 1 || layer.scaled_inputs;
  if (apart) {
    float* gathered = scratch<float>(kGathered, total * normed.stride);
    over_rows(total, [&](int64_t row) {
      __builtin_memcpy(gathered + row * normed.stride,
                       normed.x + routes.token[row] * normed.stride, 4 * normed.stride);
    });
    for (int64_t row = 0; layer.scaled_inputs && row < total; ++row) {
      float* to = gathered + routes.row[row] * normed.stride;
      for (int64_t i = 0; i < normed.stride; ++i) to[i] *= routes.factor[row];
    }
    from = gathered;
  }
  const Rows rows = prepared(up, from, apart ? total : 1, normed.stride);
  const int64_t stride = down.depth();
  float* hidden = scratch<float>(kHidden, total * stride);
  clear_behind(hidden, total, layer.wide, stride);
  with_activation(layer.activation, [&](auto function) {
    with_units(layer, [&](auto together) {
      linear_of_experts<together>(layer, ups, routes, rows,
                                  [&](int64_t first, int64_t some, int64_t unit, float* sums) {
        activate<together>(layer, function, sums, some);
        spread(sums, some, unit, layer.wide, hidden + first * stride, stride);
      });
    });
  });
  const Rows hidden_rows = prepared(down, hidden, total, stride);
  float* parts = scratch<float>(kExpertOut, total * width);
  linear_of_experts<1>(layer, downs, routes, hidden_rows,
                       [&](int64_t first, int64_t some, int64_t panel, float* sums) {
    spread(sums, some, panel, width, parts + first * width, width);
  });
  // In the order of a token's own choice: its bits do not depend on other tokens.
  over_rows(count, [&](int64_t token) {
    float* to = added + token * width;
    for (int64_t i = 0; i < width; ++i) to[i] = 0.0f;
    for (int64_t c = 0; c < layer.chosen; ++c) {
      const float* part = parts + routes.row[token * layer.chosen + c] * width;
      const float factor = layer.scaled_inputs ? 1.0f : routes.factor[token * layer.chosen + c];
      for (int64_t i = 0; i < width; ++i) to[i] += factor * part[i];
    }
    const Norm& norm = layer.expert_out_norm;
    if (norm.gamma) normalize(layer, norm, to, width, to, width);
  });
  if (layer.shared) add_shared(layer, normed, x, gates, added);
  if (step.peers) sum_over_ranks(*step.peers, added, count * width, nullptr, added);
  add_residual(layer, layer.residual, added, x, count, width, normed.stride, out);
  add_side(layer, step, out);
}
