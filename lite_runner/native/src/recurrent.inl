// Layers with a state in place of keys: gated delta nets and Mamba-2. Tokens of a sequence go through
// one by one, so that chunks of a prompt change no bit; heads, and of these the values 32 at a time,
// are computed side by side.

// log(1 + e^x) within 4 units in the last place, by the series of artanh.
inline Floats softplus(Floats x) {
  const Floats u = exponential(larger(x, -x) * -1.0f), s = u / (u + 2.0f), square = s * s;
  Floats series = splat(1.0f / 17.0f);
  series = series * square + 1.0f / 15.0f;
  series = series * square + 1.0f / 13.0f;
  series = series * square + 1.0f / 11.0f;
  series = series * square + 1.0f / 9.0f;
  series = series * square + 1.0f / 7.0f;
  series = series * square + 1.0f / 5.0f;
  series = series * square + 1.0f / 3.0f;
  series = series * square + 1.0f;
  return larger(x, Floats{}) + 2.0f * s * series;
}

// Tokens of a step that belong to one sequence.
struct Run {
  int32_t first, count, slot;
};

struct Recurrence {
  const RecurrentLayer& layer;
  const Step& step;
  const float* in;  // [count][stride]: inputs of the convolution, gates
  int64_t stride;
  float* rates;  // [count][rates_stride]: of a delta net those of writing, then decays
  int64_t rates_stride;
  float* mixed;  // [count][channels], inputs of the convolution
  float* state;  // of the first slot
  int64_t state_stride;
  float* out;  // [count][out_stride]
  int64_t out_stride;

  int64_t keys() const { return layer.key_heads * layer.key_dim; }
  int64_t channels() const { return layer.channels(); }
  int64_t panels() const { return layer.panels(); }
  float* window(const Run& run) const { return state + run.slot * state_stride; }
  int64_t to_kept() const { return step.slots * state_stride; }
  // The token of the step behind which a run's state is kept besides; -1: none.
  int64_t kept(const Run& run) const {
    const int64_t token = step.kept ? step.kept[run.slot] : -1;
    return token >= run.first && token < run.first + run.count ? token : -1;
  }
  float* matrix(const Run& run, int64_t head, int64_t panel) const {
    return window(run) + layer.window_floats() +
           (head * panels() + panel) * layer.key_dim * kPanel;
  }

  // The convolution over the last tokens of each channel, and its activation.
  void convolve(const Run& run, int64_t t) const {
    const int64_t row = run.first + t, width = channels(), taps = layer.kernel;
    const float* weights = layer.at<float>(layer.taps);
    const float* bias = layer.taps_bias ? layer.at<float>(layer.taps_bias) : nullptr;
    float* to = mixed + row * width;
    for (int64_t c = 0; c < width; ++c) to[c] = bias ? bias[c] : 0.0f;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t back = t + tap - (taps - 1);  // the token, from the first of the run on
      const float* from = back < 0 ? window(run) + (taps - 1 + back) * width
                                   : in + (run.first + back) * stride;
      const float* own = weights + tap * width;
      for (int64_t c = 0; c < width; ++c) to[c] += own[c] * from[c];
    }
    over_lanes(to, width, [&](Floats x) { return Silu::of(x); });
  }

  // x [count] = f(x), by whole vectors.
  template <class Function>
  static void over_lanes(float* x, int64_t count, Function&& f) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(x + i, f(load(x + i)));
    if (i == count) return;
    float rest[kLanes] = {};
    for (int64_t k = i; k < count; ++k) rest[k - i] = x[k];
    store(rest, f(load(rest)));
    for (int64_t k = i; k < count; ++k) x[k] = rest[k - i];
  }

  // Queries and keys of length 1, and a token's rates: what is written of a value, and what is kept
  // of the state.
  void prepare(int64_t row) const {
    float* own = rates + row * rates_stride;
    float* kept = own + layer.heads;
    const float* bias = layer.at<float>(layer.rate_bias);
    const float* decay = layer.at<float>(layer.decay);
    if (layer.delta) {
      float* x = mixed + row * channels();
      for (int64_t head = 0; head < 2 * layer.key_heads; ++head) {
        float* key = x + head * layer.key_dim;
        float squares = 0;
        for (int64_t d = 0; d < layer.key_dim; ++d) squares += key[d] * key[d];
        float factor = 1.0f / __builtin_sqrtf(squares + 1e-6f);
        if (head < layer.key_heads)
          factor /= __builtin_sqrtf(static_cast<float>(layer.key_dim));
        for (int64_t d = 0; d < layer.key_dim; ++d) key[d] *= factor;
      }
      over_lanes(own, layer.heads, [&](Floats x) { return 1.0f / (1.0f + exponential(-x)); });
    }
    const float* raw = layer.delta ? kept : own;
    for (int64_t head = 0; head < layer.heads; ++head) kept[head] = raw[head] + bias[head];
    over_lanes(kept, layer.heads, [&](Floats x) { return softplus(x); });
    for (int64_t head = 0; !layer.delta && head < layer.heads; ++head) own[head] = kept[head];
    for (int64_t head = 0; head < layer.heads; ++head) kept[head] *= decay[head];
    over_lanes(kept, layer.heads, [&](Floats x) { return exponential(x); });
  }

  // The tokens of a run, for some values of a head. The state is [key_dim][32].
  template <bool delta>
  void advance(const Run& run, int64_t head, int64_t panel) const {
    const int64_t dim = layer.key_dim, wide = layer.value_dim;
    const int64_t key_head = head / (layer.heads / layer.key_heads);
    const int64_t first = panel * kPanel, here = smaller_of(kPanel, wide - first);
    const float skip = layer.skip ? layer.at<float>(layer.skip)[head] : 0.0f;
    float* own = matrix(run, head, panel);
    const int64_t kept_row = kept(run);
    for (int64_t row = run.first; row < run.first + run.count; ++row) {
      const float* query = mixed + row * channels() + key_head * dim;
      const float* key = query + keys();
      const float* value = mixed + row * channels() + 2 * keys() + head * wide + first;
      const float written = rates[row * rates_stride + head];
      const float kept = rates[row * rates_stride + layer.heads + head];
      float numbers[kPanel] = {};
      for (int64_t c = 0; c < here; ++c) numbers[c] = value[c];
      Floats added[kParts], found[kParts] = {};
      for (int64_t p = 0; p < kParts; ++p) added[p] = load(numbers + p * kLanes);
      if (delta) {
        Floats known[kParts] = {};
        for (int64_t k = 0; k < dim; ++k)
          for (int64_t p = 0; p < kParts; ++p)
            known[p] += load(own + k * kPanel + p * kLanes) * (kept * key[k]);
        for (int64_t p = 0; p < kParts; ++p) added[p] = added[p] - known[p];
      }
      for (int64_t p = 0; p < kParts; ++p) added[p] = added[p] * written;
      for (int64_t k = 0; k < dim; ++k)
        for (int64_t p = 0; p < kParts; ++p) {
          float* at = own + k * kPanel + p * kLanes;
          const Floats next = load(at) * kept + added[p] * key[k];
          store(at, next);
          found[p] += next * query[k];
        }
      for (int64_t p = 0; p < kParts; ++p)
        store(numbers + p * kLanes, found[p] + load(numbers + p * kLanes) * skip);
      float* to = out + row * out_stride + head * wide + first;
      for (int64_t c = 0; c < here; ++c) to[c] = numbers[c];
      if (row == kept_row) __builtin_memcpy(own + to_kept(), own, 4 * dim * kPanel);
    }
  }

  // The gated norm of the heads' outputs.
  void finish(int64_t row) const {
    const int64_t width = layer.heads * layer.value_dim, size = width / layer.groups;
    float* x = out + row * out_stride;
    const float* gates = in + row * stride + channels();
    const auto gate = [&] {
      float opened[kLanes];
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t here = smaller_of(kLanes, width - i);
        for (int64_t k = 0; k < kLanes; ++k) opened[k] = k < here ? gates[i + k] : 0.0f;
        store(opened, Silu::of(load(opened)));
        for (int64_t k = 0; k < here; ++k) x[i + k] *= opened[k];
      }
    };
    if (!layer.delta) gate();
    Norm norm = layer.out_norm;
    for (int64_t group = 0; norm.gamma && group < layer.groups; ++group) {
      normalize(layer, norm, x + group * size, size, x + group * size, size);
      norm.gamma += size * sizeof(float);
    }
    if (layer.delta) gate();
  }

  // Writes what the token behind the first `count` of a run is convolved with.
  void slide(const Run& run, int64_t count, float* to) const {
    const int64_t width = channels(), taps = layer.kernel - 1;
    for (int64_t tap = 0; tap < taps; ++tap) {  // from the oldest on: none is overwritten too early
      const int64_t back = count + tap - taps;
      const float* from =
          back < 0 ? window(run) + (tap + count) * width : in + (run.first + back) * stride;
      __builtin_memcpy(to + tap * width, from, 4 * width);
    }
  }

  // The runs, and which one each token is of.
  int64_t plan(Run* runs, int32_t* owner) const {
    int32_t count = 0;
    for (int32_t token = 0; token < step.count; ++token) {
      if (count && runs[count - 1].slot == step.slot[token])
        ++runs[count - 1].count;
      else
        runs[count++] = {token, 1, step.slot[token]};
      owner[token] = count - 1;
    }
    return count;
  }

  void run() const {
    Run* runs = scratch<Run>(kItems, 2 * step.count);
    int32_t* owner = reinterpret_cast<int32_t*>(runs + step.count);
    const int64_t count = plan(runs, owner);
    over_rows(step.count, [&](int64_t row) {
      const Run& run = runs[owner[row]];
      convolve(run, row - run.first);
      prepare(row);
    });
    parallel_for(count * layer.heads * panels(), [&](int64_t index, int) {
      const int64_t head = index / panels() % layer.heads, panel = index % panels();
      const Run& run = runs[index / panels() / layer.heads];
      if (layer.delta)
        advance<true>(run, head, panel);
      else
        advance<false>(run, head, panel);
    });
    over_rows(step.count, [&](int64_t row) { finish(row); });
    parallel_for(count, [&](int64_t index, int) {
      const Run& run = runs[index];
      const int64_t last = kept(run);
      if (last >= 0) slide(run, last - run.first + 1, window(run) + to_kept());
      slide(run, run.count, window(run));
    });
  }
};

inline void recurrent(const RecurrentLayer& layer, const Step& step, Adapters adapters,
                      const float* x, float* state, int64_t state_stride, float* out) {
  const int64_t count = step.count, width = layer.heads * layer.value_dim;
  const Matrix &inward = layer.matrix(layer.inward), &outward = layer.matrix(layer.projection);
  const Matrix& rates = layer.matrix(layer.rates);
  const int64_t channels = layer.channels(), rates_stride = 2 * layer.heads;
  float* own = scratch<float>(kGathered, count * rates_stride);
  Lowered none;
  const Rows normed = normalized(layer, layer.norm, rates, x, count);
  linear<1>(rates, normed, none, [&](int64_t panel, const float* sums) {
    spread(sums, count, panel, rates.out, own, rates_stride);
  });
  float* fused = scratch<float>(kFused, count * inward.out);
  const Rows rows = prepared(inward, normed.x, count, normed.stride);
  const int64_t outs[] = {channels, width};
  Lowered low(layer.adapters, adapters, 0, 2, rows, layer.hidden);
  linear<1>(inward, rows, low, [&](int64_t panel, float* sums) {
    low.add_panel(outs, panel, sums);
    spread(sums, count, panel, inward.out, fused, inward.out);
  });
  const int64_t stride = outward.depth();
  float* mixed = scratch<float>(kMixed, count * stride);
  clear_behind(mixed, count, width, stride);
  float* convolved = scratch<float>(kHidden, count * channels);
  Recurrence{layer,     step,  fused,        inward.out, own,   rates_stride,
             convolved, state, state_stride, mixed,      stride}
      .run();
  const Rows mixed_rows = prepared(outward, mixed, count, stride);
  Lowered back(layer.adapters, adapters, 2, 1, mixed_rows, width);
  add_output(layer, outward, mixed_rows, back, step, x, inward.depth(), out);
}
