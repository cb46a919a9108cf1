// LoRA: B (A x) is added to the outputs of a matrix, each row by its own adapter.

// Calls body with the pool of adapters, as what its numbers are.
template <class Body>
inline void with_pool(const Adapters& adapters, Body&& body) {
  if (adapters.bfloat16)
    body(static_cast<const UpperHalf*>(adapters.pool));
  else
    body(static_cast<const float*>(adapters.pool));
}

constexpr int64_t kTogether = WIDTH == 16 ? 4 : 2;  // rows of one adapter that go together

// to [rows][to_stride] = x [rows][stride] times the `rank` rows of A [rank, in], four at a time,
// while the next four come.
template <int64_t rows, class T>
inline void products(const T* a, int64_t rank, const float* x, int64_t stride, int64_t in,
                     float* to, int64_t to_stride) {
  in_tiles<4>(rank, [&](auto count, int64_t first) {
    Floats total[rows][count] = {};
    const T* own = a + first * in;
    int64_t i = 0;
    for (; i + kLanes <= in; i += kLanes)
      for (int64_t r = 0; r < count; ++r) {
        fetch<1>(own + (r + count) * in + i);
        const Floats one = widened(own + r * in + i);
        for (int64_t row = 0; row < rows; ++row) total[row][r] += one * load(x + row * stride + i);
      }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t r = 0; r < count; ++r) {
        float rest = sum(total[row][r]);
        for (int64_t k = i; k < in; ++k) rest += widened(own[r * in + k]) * x[row * stride + k];
        to[row * to_stride + first + r] = rest;
      }
  });
}

// to [rows][32] += factors [rows][stride] times a panel of B [rank, 32], while the next one comes.
template <int64_t rows, class T>
inline void add_panel_of(const float* factors, int64_t stride, int64_t rank, const T* b,
                         float* to) {
  Tile<rows> total;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t p = 0; p < kParts; ++p) total.at[row][p] = load(to + row * kPanel + p * kLanes);
  for (int64_t r = 0; r < rank; ++r)
    for (int64_t p = 0; p < kParts; ++p) {
      fetch<1>(b + (rank + r) * kPanel + p * kLanes);
      const Floats one = widened(b + r * kPanel + p * kLanes);
      for (int64_t row = 0; row < rows; ++row)
        total.at[row][p] += splat(factors[row * stride + r]) * one;
    }
  store_tile(total, to);
}

// The products of some rows with the A of their adapters, for up to three matrices that share them.
// They are items of the same work as the panels of the matrix, and come first there: a panel is
// multiplied while others still make them, and only then waits.
class Lowered {
 public:
  Lowered() = default;
  // `first`: which of the layer's matrices the first of `matrices` is. `row_of`: which token a row
  // is; nullptr: its own number.
  Lowered(const LoraPair& parts, const Adapters& adapters, int64_t first, int64_t matrices,
          const Rows& rows, int64_t in, const int32_t* row_of = nullptr)
      : parts_(&parts), adapters_(adapters), rows_(&rows), row_of_(row_of), first_(first),
        matrices_(matrices), in_(in) {
    if (!adapters.place) return;
    bool any = false;
    for (int64_t row = 0; row < rows.count; ++row) any = any || place(row) >= 0;
    if (!any) return;
    x_ = scratch<float>(kLowered, rows.count * matrices * parts.rank);
    each_ = larger_of<int64_t>(kTogether, (rows.count + 4 * threads() - 1) / (4 * threads()));
    items_ = left_ = (rows.count + each_ - 1) / each_;
  }

  int64_t items() const { return items_; }

  void make(int64_t item) {
    const int64_t rank = parts_->rank;
    with_pool(adapters_, [&](const auto* pool) {
      const int64_t end = smaller_of(rows_->count, (item + 1) * each_);
      over_adapters(item * each_, end, [&](auto rows, int64_t row) {
        for (int64_t m = 0; m < matrices_; ++m) {
          const int64_t offset = parts_->down[first_ + m];
          if (offset >= 0)
            products<rows>(pool + place(row) * adapters_.stride + offset, rank,
                           rows_->x + row * rows_->stride, rows_->stride, in_,
                           x_ + (row * matrices_ + m) * rank, matrices_ * rank);
        }
      });
    });
    left_.fetch_sub(1, std::memory_order_release);
  }

  // Adds B times the products to sums [rows][32] of a panel of all matrices, whose `outs` follow
  // each other.
  void add_panel(const int64_t* outs, int64_t panel, float* sums) const {
    if (!items_) return;
    int64_t start = 0;
    for (int64_t m = 0; m < matrices_; start += outs[m++]) {
      const int64_t first = larger_of(panel * kPanel, start);
      if (first < smaller_of((panel + 1) * kPanel, start + outs[m]))
        add(m, first - start, outs[m], first - panel * kPanel, sums);
    }
  }

  // Adds to sums [count][32] those of the outputs first..first + 31 of matrix m, of `out` in all,
  // that are there; they stand behind `before` columns. B lies in panels as a matrix does.
  void add(int64_t m, int64_t first, int64_t out, int64_t before, float* sums) const {
    if (!items_) return;
    const int64_t offset = parts_->up[first_ + m], rank = parts_->rank;
    if (offset < 0) return;
    wait();
    const int64_t columns = smaller_of(kPanel - before, out - first);
    with_pool(adapters_, [&](const auto* pool) {
      over_adapters(0, rows_->count, [&](auto rows, int64_t row) {
        const float* factors = x_ + (row * matrices_ + m) * rank;
        const auto* b = pool + place(row) * adapters_.stride + offset;
        b += first / kPanel * rank * kPanel;
        float* to = sums + row * kPanel + before;
        const bool whole = columns == kPanel && first % kPanel == 0;
        if (whole) add_panel_of<rows>(factors, matrices_ * rank, rank, b, to);
        for (int64_t r = 0; r < rows && !whole; ++r, factors += matrices_ * rank, to += kPanel)
          for (int64_t c = 0; c < columns; ++c) {
            const int64_t at = first % kPanel + c;
            for (int64_t k = 0; k < rank; ++k)
              to[c] += factors[k] * widened(b[(at / kPanel * rank + k) * kPanel + at % kPanel]);
          }
      });
    });
  }

 private:
  // Of a row's adapter; below 0: it has none.
  int64_t place(int64_t row) const { return adapters_.place[row_of_ ? row_of_[row] : row]; }

  // Calls body(rows, row) for rows row .. row + rows - 1, which have one adapter; `rows` is a
  // constant.
  template <class Body>
  void over_adapters(int64_t row, int64_t end, Body&& body) const {
    for (int64_t next = row; row < end; row = next) {
      while (next < end && place(next) == place(row)) ++next;
      if (place(row) >= 0)
        in_tiles<kTogether>(next - row, [&](auto rows, int64_t at) { body(rows, row + at); });
    }
  }

  void wait() const {
    wait_until([this] { return left_.load(std::memory_order_acquire) == 0; });
  }

  const LoraPair* parts_ = nullptr;
  Adapters adapters_{};
  const Rows* rows_ = nullptr;
  const int32_t* row_of_ = nullptr;
  int64_t first_ = 0, matrices_ = 0, in_ = 0;
  float* x_ = nullptr;  // [rows][matrices][rank]
  int64_t each_ = 0, items_ = 0;  // rows of an item; 0 items: nothing is added
  std::atomic<int64_t> left_{0};
};
