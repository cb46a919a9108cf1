// Products of rows with panels of a matrix. Every output is summed up over its inputs in their
// order, whatever the number of rows or threads, so that a row's bits never depend on others.

// tile [rows][32] += x [rows][depth] * panel [depth][32]. Of inputs in bfloat16 the second of each
// pair goes first, as in accumulate_pairs: the sums have the same bits, since a product is exact.
template <int64_t rows, class F, class X>
inline __attribute__((always_inline)) void multiply(Tile<rows>& tile, const X* x, int64_t stride,
                                                    const uint8_t* panel, int64_t depth) {
  constexpr bool turned = std::is_same_v<X, Rounded>;
  for (int64_t i = 0; i < depth; ++i) {
    const int64_t k = turned && (i | 1) < depth ? i ^ 1 : i;
    fetch<F::bytes>(panel + i * F::bytes + kAhead);
    const typename F::Raw column = F::read(panel + k * F::bytes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; ++r) {
      const Floats one = splat(widened(x[r * stride + k]));
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; ++p) tile.at[r][p] += one * column.part[p];
    }
  }
}

// The same over memory: sums [rows][32] grow by the product, or begin with it.
template <int64_t rows, class F, class X>
__attribute__((noinline)) void accumulate(float* sums, const X* x, int64_t stride,
                                          const uint8_t* panel, int64_t depth, bool begin) {
  Tile<rows> tile{};
  if (!begin) load_tile(tile, sums);
  multiply<rows, F>(tile, x, stride, panel, depth);
  store_tile(tile, sums);
}

// sums [count][32] += the inputs x [count][stride] from k on * block [depth][32].
template <class F, class X>
inline void multiply_block(const X* x, int64_t count, int64_t stride, const uint8_t* block, int64_t k,
                           int64_t depth, float* sums) {
  in_tiles<kTile>(count, [&](auto rows, int64_t row) {
    accumulate<rows, F>(sums + row * kPanel, x + row * stride + k, stride, block, depth, k == 0);
  });
}

constexpr int64_t kFewTiles = 2;  // of rows that each widen the panel for themselves

// sums [count][32] = the rows x [count][stride] * a panel [depth][32].
template <class F, class X>
void multiply_floats(const uint8_t* panel, int64_t depth, const X* x, int64_t count, int64_t stride,
                     float* sums) {
  for (int64_t k = 0; k < depth; k += kBlock, panel += kBlock * F::bytes) {
    const int64_t here = smaller_of(kBlock, depth - k);
    if (std::is_same_v<F, Numbers<float>> || count <= kFewTiles * kTile) {
      multiply_block<F>(x, count, stride, panel, k, here, sums);
    } else {  // widened once for all tiles
      alignas(64) float wide[kBlock * kPanel];
      for (int64_t i = 0; i < here; ++i) {
        fetch<F::bytes>(panel + i * F::bytes + kAhead);
        const typename F::Raw column = F::read(panel + i * F::bytes);
        for (int64_t p = 0; p < kParts; ++p) store(wide + i * kPanel + p * kLanes, column.part[p]);
      }
      multiply_block<Numbers<float>>(x, count, stride, reinterpret_cast<const uint8_t*>(wide), k,
                                     here, sums);
    }
  }
}

template <class T, class X>
void multiply_floats(const Matrix& m, const Rows& rows, const X* x, int64_t panel, float* sums) {
  multiply_floats<Numbers<T>>(m.at(m.data) + panel * m.panel_bytes(), m.depth(), x, rows.count,
                              rows.stride, sums);
}

// Floats of 8 bits, or indices into a table, whose groups of inputs have scales; each group is widened
// once for all rows.
inline void multiply_scaled(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  const bool table = m.format == Format::kTable4;
  const auto* data = reinterpret_cast<const int8_t*>(m.at(m.data)) + panel * m.panel_bytes();
  const float* entries = reinterpret_cast<const float*>(m.at(m.table));
  for (int64_t k = 0; k < m.in; k += m.group) {
    alignas(64) float wide[kBlock * kPanel];
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Floats scale = load_scales(m, (panel * m.groups() + k / m.group) * kPanel + p);
      for (int64_t i = 0; i < m.group; ++i) {
        const int64_t input = k + i, shift = input % 2 * 4;
        if (!table) fetch<kPanel>(data + input * kPanel + kAhead);
        const Floats value =
            table ? looked_up(entries, load_bytes(data + input / 2 * kPanel + p) >> shift & 15)
                  : load_float8(data + input * kPanel + p);
        store(wide + i * kPanel + p, value * scale);
      }
    }
    multiply_block<Numbers<float>>(rows.x, rows.count, rows.stride,
                                   reinterpret_cast<const uint8_t*>(wide), k, m.group, sums);
  }
}

// True if inputs are rounded to bfloat16, as the weights are.
inline bool multiplies_bfloat16(const Matrix& m) {
  return m.format == Format::kBFloat16 && m.rounded_input;
}

void multiply_bfloat16(const Matrix& m, const Rows& rows, int64_t panel, float* sums);
void round_to_bfloat16(Rows& rows);
void multiply_blocks(const Matrix& m, const Rows& rows, int64_t panel, float* sums);
Rows prepared_for_blocks(const Matrix& m, const float* x, int64_t count, int64_t stride);

// sums [rows][32]: the rows times one panel, with scale and bias.
inline void multiply_panel(const Matrix& m, const Rows& rows, int64_t panel, float* sums) {
  if (m.format == Format::kJoined) {
    const JoinedMatrix& joined = *reinterpret_cast<const JoinedMatrix*>(&m);
    int64_t part = joined.by_turns ? panel % joined.count : 0;
    int64_t own = joined.by_turns ? panel / joined.count : panel;
    while (own >= joined.part(part).panels()) own -= joined.part(part++).panels();
    multiply_panel(joined.part(part), rows, own, sums);
  } else if (m.blocks()) {
    multiply_blocks(m, rows, panel, sums);
  } else if (m.format == Format::kFloat32) {
    multiply_floats<float>(m, rows, rows.x, panel, sums);
  } else if (multiplies_bfloat16(m) && (rows.shorts || rows.rounded)) {
    multiply_bfloat16(m, rows, panel, sums);
  } else if (m.format == Format::kBFloat16) {
    multiply_floats<UpperHalf>(m, rows, rows.x, panel, sums);
  } else if (m.format == Format::kFloat16) {
    multiply_floats<Half>(m, rows, rows.x, panel, sums);
  } else if (m.format == Format::kTable4 || (m.format == Format::kFloat8 && m.group)) {
    multiply_scaled(m, rows, panel, sums);
  } else if (m.format == Format::kFloat8) {
    multiply_floats<Float8>(m, rows, rows.x, panel, sums);
  } else if (m.format == Format::kInt4 && m.table) {
    multiply_integers(m, Index4{{m.integer_table()}}, rows, panel, sums);
  } else if (m.format == Format::kInt4) {
    multiply_integers(m, Int4{}, rows, panel, sums);
  } else {
    multiply_integers(m, Int8{}, rows, panel, sums);
  }
  const auto at = [&](int64_t offset) {
    return offset ? reinterpret_cast<const float*>(m.at(offset)) + panel * kPanel : nullptr;
  };
  const float* scales = m.group == 0 ? at(m.scales) : nullptr;
  const float* bias = at(m.bias);
  if (!scales && !bias) return;
  for (int64_t p = 0; p < kPanel; p += kLanes)
    for (int64_t row = 0; row < rows.count; ++row) {
      Floats value = load(sums + row * kPanel + p);
      if (scales) value = value * load(scales + p);
#if WIDTH == 16
      __asm__("" : "+v"(value));  // rounded before the bias is added, however this is compiled
#endif
      if (bias) value = value + load(bias + p);
      store(sums + row * kPanel + p, value);
    }
}

// Of inputs of 8 bits a group has 16 if its largest is over so many times the mean of all groups'
// largest in its row: an outlier would leave few steps to the others of its group. With SmolLM2 that
// is a tenth of the groups, and takes four fifths of the KL divergence that 8 bits cost.
constexpr float kOutlier = 1.75f;
constexpr float kMostRounded = 32512.0f, kEightBits = 127.0f;

// By what each group of a row's inputs x [width] is rounded to integers of 8 bits, or of up to `most`:
// all, where inputs are not rounded to 8. The scales undo the factors.
inline void find_scales(const float* x, int64_t width, int64_t group, bool eight, float most,
                        uint8_t* wide, float* factors, float* scales) {
  const int64_t groups = (width + group - 1) / group;
  float total = 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    scales[g] = bound_of(x + g * group, smaller_of(group, width - g * group));
    total += scales[g];
  }
  const float outlier = total * (kOutlier / static_cast<float>(groups));
  for (int64_t g = 0; g < groups; ++g) {
    wide[g] = !eight || scales[g] > outlier;
    const float largest = wide[g] ? most : kEightBits;
    factors[g] = integer_factor(scales[g], largest);
    scales[g] /= largest;
  }
}

// Rows x [count, stride] made ready for a matrix: where that is of integers they are rounded too,
// each group of inputs by a scale of its own, to 8 bits or to 16.
inline Rows prepared(const Matrix& m, const float* x, int64_t count, int64_t stride) {
  Rows rows{x, count, stride, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (m.blocks()) return prepared_for_blocks(m, x, count, stride);
  if (multiplies_bfloat16(m)) round_to_bfloat16(rows);
  if (!m.integers()) return rows;
  const int64_t group = m.input_group(), groups = m.input_groups();
  int16_t* shorts = scratch<int16_t>(kShorts, count * stride);
  const TileLayout layout = tile_layout(m);
  const int64_t tiled = layout.form == TileForm::kNone ? 0 : rows_of_bytes(count);
  TileGroups tiles{nullptr, groups, group * static_cast<int64_t>(layout.form)};
  const int64_t both = in_lines(2 * count * stride);  // of upper and lower bytes
  uint8_t* bytes = scratch<uint8_t>(kBytes, both + tiles.size(tiled));
  if (tiled) tiles.first = bytes + both;
  float* scales = scratch<float>(kScales, 2 * count * groups);
  float* sums = scales + count * groups;
  int32_t* totals = scratch<int32_t>(kTotals, count * groups);
  uint8_t* wide = scratch<uint8_t>(kWide, count * groups);
  float* ordered = m.order ? scratch<float>(kOrdered, count * stride) : nullptr;
  over_rows(count, [=, &m](int64_t row) {
    const float* from = x + row * stride;
    if (ordered) {
      const int32_t* order = reinterpret_cast<const int32_t*>(m.at(m.order));
      for (int64_t k = 0; k < stride; ++k)
        ordered[row * stride + k] = k < m.in ? from[order[k]] : 0.0f;
      from = ordered + row * stride;
    }
    find_scales(from, stride, group, m.rounded_input, kMostRounded, wide + row * groups,
                sums + row * groups, scales + row * groups);  // factors first, in the place of sums
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * group, end = smaller_of(first + group, stride), at = row * groups + g;
      int16_t* to = shorts + row * stride;
      totals[at] = round_all(from + first, end - first, sums[at], to + first);
      sums[at] = static_cast<float>(totals[at]) * scales[at];
      if (row < tiled) tiles.put(row, g, scales[at], sums[at], totals[at], wide[at]);
#if !BYTE_PRODUCTS
      for (int64_t k = first; m.rounded_input && k < end; k += 4) std::swap(to[k + 1], to[k + 2]);
#endif
    }
#if BYTE_PRODUCTS
    uint8_t* target = bytes + 2 * row * stride;
    for (int64_t k = 0; k < stride; k += 32) {
      const int16_t* from = shorts + row * stride + k;
      const int64_t here = smaller_of<int64_t>(32, stride - k);
      if (m.rounded_input)
        lift_bytes(from, here, target + k, target + stride + k);
      else if (m.format == Format::kInt4)
        split_bytes<Int4>(from, here, target + k, target + stride + k);
      else
        split_bytes<Int8>(from, here, target + k, target + stride + k);
      if (row < tiled) put_in_tiles(layout, tiles, row, k, from, target + k, target + stride + k);
    }
#endif
  }, tiles.rows_at_once());
  rows.bytes = bytes;
  rows.shorts = shorts;
  rows.wide = wide;
  rows.scales = scales;
  rows.sums = sums;
  rows.totals = totals;
  rows.tiles = tiles;
  return rows;
}

// Calls body(unit, thread) for every unit, on all threads, which share `work` bytes; the items of
// `low`, which the body may wait for, go first. Even: units take the same time.
template <class Low, class Body>
inline void over_units(int64_t units, int64_t work, bool even, Low& low, Body&& body) {
  // Parts enough to share evenly, yet few: each costs a line of cache that goes between processors.
  const int64_t most = threads() * (even ? 8 : 32);
  const int64_t parts = smaller_of<int64_t>(larger_of<int64_t>(work / kItemBytes, threads()), most);
  const int64_t each = (units + parts - 1) / parts;
  // Of three quarters every thread has its own run, where what it asks for ahead is its own too.
  const int64_t run = even ? units * 3 / 4 / threads() / each * each : 0;
  const int64_t runs = run ? threads() : 0;
  const int64_t rest = (units - runs * run + each - 1) / each;
  parallel_for(low.items() + runs + rest, [&](int64_t item, int thread) {
    if (item < low.items()) return low.make(item);
    item -= low.items();
    const int64_t first = item < runs ? item * run : runs * run + (item - runs) * each;
    const int64_t end = smaller_of(units, first + (item < runs ? run : each));
    for (int64_t unit = first; unit < end; ++unit) body(unit, thread);
  });
}

// Some of the rows that were prepared for a matrix.
inline Rows some_of(const Rows& rows, const Matrix& m, int64_t first, int64_t count) {
  const auto moved = [&](auto* from, int64_t stride) { return from ? from + first * stride : from; };
  const int64_t groups = m.integers() ? m.input_groups() : 0;
  return {moved(rows.x, rows.stride),
          count,
          rows.stride,
          moved(rows.bytes, 2 * m.depth()),
          moved(rows.shorts, m.depth()),
          moved(rows.wide, groups),
          moved(rows.scales, groups),
          moved(rows.sums, groups),
          moved(rows.totals, m.blocks() ? m.depth() / 16 : groups),
          moved(rows.rounded, m.depth()),
          rows.tiles.from(first)};
}

// Rows of floats, or of tiles, that the L2 cache does not hold go through a few panels in parts, of as
// many as fill registers' tiles and AMX's.
constexpr int64_t kHeldBytes = 5 << 18, kPanelsAtOnce = 4, kWholeTiles = 48;
static_assert(kWholeTiles % kTile == 0 && (kAmxRows == 0 || kWholeTiles % kAmxRows == 0));

// Calls finish(panel, sums [rows][32 * together]) for every `together` panels: see over_units.
template <int64_t together, class Low, class Finish>
inline void linear(const Matrix& m, const Rows& rows, Low& low, Finish&& finish) {
  const int64_t work = m.panels() * m.panel_bytes() * (1 + rows.count / 4);
  const int64_t units = m.panels() / together, size = together * rows.count * kPanel;
  int64_t part = rows.count, each = 1;  // rows, and units that these go through
  const int64_t bytes = m.integers() ? rows.tiles.row_bytes() : 4 * rows.stride;  // a row
  if (rows.count * bytes > kHeldBytes) {
    part = larger_of<int64_t>(96, kHeldBytes / bytes) / kWholeTiles * kWholeTiles;
    const int64_t some = kPanelsAtOnce * threads(), rounds = (units * together + some - 1) / some;
    each = (units + rounds * threads() - 1) / (rounds * threads());  // all threads have as many
  }
  float* all = scratch<float>(kPanels, threads() * each * size);
  over_units((units + each - 1) / each, work, true, low, [&](int64_t group, int thread) {
    float* sums = all + thread * each * size;
    const int64_t first = group * each, end = smaller_of(units, first + each);
    for (int64_t row = 0; row < rows.count; row += part) {
      const Rows some = some_of(rows, m, row, smaller_of(part, rows.count - row));
      for (int64_t panel = first * together; panel < end * together; ++panel)
        multiply_panel(m, some, panel,
                       sums + ((panel - first * together) * rows.count + row) * kPanel);
    }
    for (int64_t unit = first; unit < end; ++unit) finish(unit, sums + (unit - first) * size);
  });
}
