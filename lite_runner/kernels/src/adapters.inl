// What LoRA adapters add to the outputs of a matrix: B (A x), each row by its own adapter.

// The products of some rows with the A of their adapters, for up to three matrices that share them.
struct Lowered {
  const float* x = nullptr;  // [count][matrices][rank]; nullptr: nothing is added
  const AdapterParts* parts = nullptr;
  const Adapters* adapters = nullptr;
  const int32_t* row_of = nullptr;  // which token a row is; nullptr: its own number
  int64_t first = 0, matrices = 0, count = 0;

  const float* place(int64_t row) const {
    const int32_t place = adapters->place[row_of ? row_of[row] : row];
    return place < 0 ? nullptr : adapters->pool + place * adapters->stride;
  }
};

// to[r] = a[r] . x for the `rank` rows of A [rank, in], four at a time.
inline void products(const float* a, int64_t rank, const float* x, int64_t in, float* to) {
  in_tiles<4>(rank, [&](auto rows, int64_t first) {
    Floats total[rows] = {};
    int64_t i = 0;
    for (; i + kLanes <= in; i += kLanes)
      for (int64_t r = 0; r < rows; ++r) total[r] += load(a + (first + r) * in + i) * load(x + i);
    for (int64_t r = 0; r < rows; ++r) {
      float rest = sum(total[r]);
      for (int64_t k = i; k < in; ++k) rest += a[(first + r) * in + k] * x[k];
      to[first + r] = rest;
    }
  });
}

// `first`: which of the layer's matrices the first of `matrices` is.
inline Lowered lowered(const AdapterParts& parts, const Adapters& adapters, int64_t first,
                       int64_t matrices, const Rows& rows, int64_t in,
                       const int32_t* row_of = nullptr) {
  Lowered result;
  if (!adapters.place) return result;
  bool any = false;
  for (int64_t row = 0; row < rows.count; ++row)
    any = any || adapters.place[row_of ? row_of[row] : row] >= 0;
  if (!any) return result;
  const int64_t rank = parts.rank;
  float* to = scratch<float>(kLowered, rows.count * matrices * rank);
  result = {to, &parts, &adapters, row_of, first, matrices, rows.count};
  const int64_t each = (rows.count + threads() - 1) / threads();
  parallel_for((rows.count + each - 1) / each, [&](int64_t item, int) {
    for (int64_t row = item * each; row < smaller_of(rows.count, (item + 1) * each); ++row) {
      const float* place = result.place(row);
      for (int64_t m = 0; place && m < matrices; ++m) {
        const int64_t offset = parts.down[first + m];
        if (offset >= 0)
          products(place + offset, rank, rows.x + row * rows.stride, in,
                   to + (row * matrices + m) * rank);
      }
    }
  });
  return result;
}

// Adds to sums [count][32] those of the outputs first..first + 31 of matrix m, of `out` in all,
// that are there; they stand behind `before` columns. B lies in panels as a matrix does.
inline void add_lowered(const Lowered& low, int64_t m, int64_t first, int64_t out, int64_t before,
                        float* sums) {
  const int64_t offset = low.parts->up[low.first + m], rank = low.parts->rank;
  if (offset < 0) return;
  const int64_t columns = smaller_of(kPanel - before, out - first);
  for (int64_t row = 0; row < low.count; ++row) {
    const float* place = low.place(row);
    if (!place) continue;
    const float* factors = low.x + (row * low.matrices + m) * rank;
    const float* b = place + offset + first / kPanel * rank * kPanel;
    float* to = sums + row * kPanel + before;
    if (columns == kPanel && first % kPanel == 0) {
      Floats total[kParts];
      for (int64_t p = 0; p < kParts; ++p) total[p] = load(to + p * kLanes);
      for (int64_t r = 0; r < rank; ++r)
        for (int64_t p = 0; p < kParts; ++p)
          total[p] += splat(factors[r]) * load(b + r * kPanel + p * kLanes);
      for (int64_t p = 0; p < kParts; ++p) store(to + p * kLanes, total[p]);
      continue;
    }
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t at = first % kPanel + c;
      for (int64_t r = 0; r < rank; ++r)
        to[c] += factors[r] * b[(at / kPanel * rank + r) * kPanel + at % kPanel];
    }
  }
}

// The same for a panel of several matrices whose outputs follow each other.
inline void add_lowered_panel(const Lowered& low, const int64_t* outs, int64_t panel,
                              float* sums) {
  if (!low.x) return;
  int64_t start = 0;
  for (int64_t m = 0; m < low.matrices; start += outs[m++]) {
    const int64_t first = larger_of(panel * kPanel, start);
    if (first < smaller_of((panel + 1) * kPanel, start + outs[m]))
      add_lowered(low, m, first - start, outs[m], first - panel * kPanel, sums);
  }
}
