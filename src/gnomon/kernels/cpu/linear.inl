// Products with packed or dense weights. Include after one of the simd headers, inside no namespace.
namespace gnomon::GNOMON_ISA {

static void to_f32(const void* x, Type type, size_t n, float* y) {
  if (type == F32) {
    memcpy(y, x, n * 4);
    return;
  }
  for (size_t i = 0; i < n; i += W) {
    int left = n - i < (size_t)W ? (int)(n - i) : W;
    store_n(y + i, left, load_half((const uint16_t*)x + i, left, type));
  }
}
static void from_f32(const float* x, Type type, size_t n, void* y) {
  if (type == F32) {
    memcpy(y, x, n * 4);
    return;
  }
  for (size_t i = 0; i < n; i += W) {
    int left = n - i < (size_t)W ? (int)(n - i) : W;
    store_half((uint16_t*)y + i, left, type, load_n(x + i, left));
  }
}

// Place in a block of lane l of half j, by codec: the packed words are spread over the lanes, so values are taken out by one shift.
INLINE int place(Codec codec, int j, int l) {
  if (codec == Q4) return 8 * (l % 4) + j + 2 * (l / 4);
  if (codec == Q2) return 16 * (l % 2) + j + 2 * (l / 2);
  return 16 * j + l;
}

static void arrange_integer(const void* x, Type type, int64_t stride, const Weights& w, float* row);

static void arrange(const void* x, Type type, int64_t stride, const Weights& w, float* tile, int rows, int i) {
  const int k = w.k;
  const Codec codec = w.codec;
  if (codec == I4 || codec == I8 || codec == S4 || codec == S8) return arrange_integer(x, type, stride, w, tile + (size_t)i * k);
  const bool spread = codec == Q2;
  int order[BLOCK];
  if (spread)
    for (int p = 0; p < BLOCK; p++) order[p] = place(codec, p / 16, p % 16);
  for (int b = 0; b * BLOCK < k; b++) {
    float block[BLOCK];
    int left = k - b * BLOCK < BLOCK ? k - b * BLOCK : BLOCK;
    if (left < BLOCK) memset(block, 0, sizeof block);
    const size_t at = (size_t)b * BLOCK;
    if (stride == 1) {
      to_f32((const char*)x + at * type_size(type), type, left, block);
    } else {
      for (int p = 0; p < left; p++) to_f32((const char*)x + (int64_t)(at + p) * stride * (int64_t)type_size(type), type, 1, block + p);
    }
    for (int j = 0; j < 2; j++) {
      float* to = tile + ((size_t)(2 * b + j) * rows + i) * 16;
      if (spread)
        for (int l = 0; l < 16; l++) to[l] = block[order[16 * j + l]];
      else
        memcpy(to, block + 16 * j, 64);
    }
  }
}

template <int CODEC> constexpr bool packed = CODEC <= Q8;
template <int CODEC> constexpr int block_bytes = CODEC <= Q8 ? 4 * CODEC : (CODEC == D_F32 ? 128 : 64);

template <int CODEC> INLINE void set_group(Unpack<CODEC>& u, const float* scales, const float* biases, int g) {
  if constexpr (packed<CODEC>) u.group(scales[g], biases[g]);
}

// Scales and biases of R rows as floats: [R][groups] each.
template <int CODEC, int R> INLINE void load_scales(const Weights& w, int64_t n, float* scales, float* biases) {
  if constexpr (packed<CODEC>) {
    const size_t groups = w.k / w.group, at = n * groups * type_size(w.scale_type);
    to_f32((const char*)w.scales + at, w.scale_type, groups * R, scales);
    to_f32((const char*)w.biases + at, w.scale_type, groups * R, biases);
  }
}

// The last block of a dense row whose K is no multiple of it, filled up with zeros.
template <int CODEC> INLINE const uint8_t* whole_block(const uint8_t* p, int left, uint8_t* room) {
  constexpr int size = block_bytes<CODEC> / BLOCK;
  memset(room, 0, block_bytes<CODEC>);
  memcpy(room, p, (size_t)left * size);
  return room;
}

// M rows of x (`wide` floats between their blocks of 16) times R rows of weights, unpacked in registers. R interleaved streams defeat the
// hardware's prefetchers, so each line asks for the one that the next group of rows will want.
template <int CODEC, int M, int R>
INLINE void direct(const Weights& w, int64_t n, const float* x, int interleaved, float* y, int64_t ldy, float* scratch) {
  constexpr int B = block_bytes<CODEC>;
  const int wide = R > 1 ? 16 * M : interleaved;
  const int blocks = w.k / BLOCK, group = packed<CODEC> ? w.group / BLOCK : (blocks ? blocks : 1);
  const int groups = packed<CODEC> ? w.k / w.group : 1;
  float *scales = scratch, *biases = scratch + R * groups;
  load_scales<CODEC, R>(w, n, scales, biases);
  const uint8_t* p[R];
  for (int r = 0; r < R; r++) p[r] = w.data + (n + r) * w.row_bytes;
  const int64_t ahead = (4096 / (R * w.row_bytes + 1) + 1) * R * w.row_bytes;
  vf acc[M][R][PARTS];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++)
      for (int q = 0; q < PARTS; q++) acc[m][r][q] = zero();
  Unpack<CODEC> unpack[R];
  const float* xb = x;
  for (int g = 0; g < groups; g++) {
    for (int r = 0; r < R; r++) set_group<CODEC>(unpack[r], scales + r * groups, biases + r * groups, g);
    const int some = packed<CODEC> ? group : blocks;
    for (int b = 0; b < some; b++, xb += 2 * wide) {
      if constexpr (R > 1)
        for (int r = 0; r < R; r++)
          for (int line = 0; line < B; line += 64) __builtin_prefetch(p[r] + ahead + line);
#pragma GCC unroll 8
      for (int h = 0; h < 2 * PARTS; h++) {
        vf v[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) v[r] = unpack[r].vec(p[r], h);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          vf xv = load(xb + (h / PARTS) * wide + m * 16 + (h % PARTS) * W);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) acc[m][r][h % PARTS] = fma(v[r], xv, acc[m][r][h % PARTS]);
        }
      }
      for (int r = 0; r < R; r++) p[r] += B;
    }
  }
  if constexpr (!packed<CODEC>) {
    if (w.k % BLOCK) {
      alignas(64) uint8_t room[R][B];
      for (int r = 0; r < R; r++) whole_block<CODEC>(p[r], w.k % BLOCK, room[r]);
      for (int h = 0; h < 2 * PARTS; h++)
        for (int m = 0; m < M; m++) {
          vf xv = load(xb + (h / PARTS) * wide + m * 16 + (h % PARTS) * W);
          for (int r = 0; r < R; r++) acc[m][r][h % PARTS] = fma(unpack[r].vec(room[r], h), xv, acc[m][r][h % PARTS]);
        }
    }
  }
  for (int m = 0; m < M; m++) {
    if constexpr (R == 4)
      sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], y + m * ldy);
    else
      for (int r = 0; r < R; r++) y[m * ldy + r] = sum(acc[m][r]);
  }
}

constexpr int PANEL_COLUMNS = 48;
// Up to so many rows of x, unpacking weights for each tile costs less than a panel does.
constexpr int DIRECT_MOST = W == 16 ? 8 : 4;
// Rows of weights at a time for M rows of x: as many sums as there are registers for.
constexpr int rows_at_once(int m) { return W == 16 ? (m <= 4 ? 4 : 2) : (m == 1 ? DIRECT_ROWS : m <= 2 ? 2 : 1); }

// Up to two tiles of x, one after the other while the weights are in the first-level cache.
template <int CODEC, int M> INLINE void direct_some(const Weights& w, int n0, int n1, const float* x, float* y, int64_t ldy, float* scratch) {
  constexpr int R = rows_at_once(M);
  for (int n = n0; n < n1; n += R) {
    if (n1 - n0 >= R) {  // the last ones perhaps again with some that are done: the same bits
      const int from = n + R <= n1 ? n : n1 - R;
      direct<CODEC, M, R>(w, from, x, 16 * M, y + (from - n0), ldy, scratch);
    } else {
      for (int one = n; one < n1; one++)
        for (int m = 0; m < M; m++) direct<CODEC, 1, 1>(w, one, x + 16 * m, 16 * M, y + m * ldy + (one - n0), ldy, scratch);
    }
  }
}
template <int CODEC> static void direct_tile(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
  switch (rows) {
    case 1: return direct_some<CODEC, 1>(w, n0, n1, x, y, ldy, scratch);
    case 2: return direct_some<CODEC, 2>(w, n0, n1, x, y, ldy, scratch);
    case 3: return direct_some<CODEC, 3>(w, n0, n1, x, y, ldy, scratch);
    default: return direct_some<CODEC, 4>(w, n0, n1, x, y, ldy, scratch);
  }
}

// A tile of PANEL_TILE rows of weights as floats, interleaved in lane order: panel[(k / 16 * PANEL_TILE + c) * 16 + lane].
// Missing columns repeat the last one.
template <int CODEC> static void fill_panel(const Weights& w, int64_t n, int columns, float* panel, float* scratch) {
  constexpr int B = block_bytes<CODEC>;
  const int blocks = padded(w.k) / BLOCK, group = packed<CODEC> ? w.group / BLOCK : 1;
  const int groups = packed<CODEC> ? w.k / w.group : 1;
  for (int c = 0; c < PANEL_TILE; c++) {
    const int64_t row = n + (c < columns ? c : columns - 1);
    load_scales<CODEC, 1>(w, row, scratch, scratch + groups);
    const uint8_t* p = w.data + row * w.row_bytes;
    Unpack<CODEC> unpack;
    alignas(64) uint8_t room[B];
    for (int b = 0; b < blocks; b++, p += B) {
      if (packed<CODEC> && b % group == 0) set_group<CODEC>(unpack, scratch, scratch + groups, b / group);
      const uint8_t* from = p;
      if (!packed<CODEC> && (b + 1) * BLOCK > w.k) from = whole_block<CODEC>(p, w.k - b * BLOCK, room);
#pragma GCC unroll 8
      for (int h = 0; h < 2 * PARTS; h++)
        store(panel + ((size_t)(2 * b + h / PARTS) * PANEL_TILE + c) * 16 + (h % PARTS) * W, unpack.vec(from, h));
    }
  }
}

// A tile of M rows times a tile of the panel over all of K.
template <int M> static void tile_times_panel(int steps, const float* x, const float* panel, float* y, int64_t ldy) {
  constexpr int C = PANEL_TILE;
  vf acc[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) acc[m][c] = zero();
  for (int s = 0; s < steps; s++, x += 16 * M, panel += 16 * C) {
    vf v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) v[c] = load(panel + 16 * c);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      vf xv = load(x + 16 * m);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) acc[m][c] = fma(v[c], xv, acc[m][c]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    if constexpr (C == 4) sum4(&acc[m][0], &acc[m][1], &acc[m][2], &acc[m][3], y + m * ldy);
    else
      for (int c = 0; c < C; c++) y[m * ldy + c] = sum(&acc[m][c]);
  }
}

// The same over some of K, for registers narrower than 16 lanes: one part of the lanes after the other, so that every sum has its register.
template <int M> static void part_of_tile(int steps, const float* x, const float* panel, float* kept, bool first) {
  constexpr int C = PANEL_TILE;
  for (int q = 0; q < PARTS; q++) {
    vf acc[M][C];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) acc[m][c] = first ? zero() : load(kept + (m * C + c) * 16 + q * W);
    const float *xp = x + q * W, *pp = panel + q * W;
    for (int s = 0; s < steps; s++, xp += 16 * M, pp += 16 * C) {
      vf v[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) v[c] = load(pp + 16 * c);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        vf xv = load(xp + 16 * m);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) acc[m][c] = fma(v[c], xv, acc[m][c]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) store(kept + (m * C + c) * 16 + q * W, acc[m][c]);
  }
}

template <int M> static void tile_times_columns(int columns, int steps, const float* x, const float* panel, float* y, int64_t ldy) {
  constexpr int C = PANEL_TILE;
  if constexpr (PARTS == 1) {
    for (int c = 0; c < columns; c += C) {
      const float* tile = panel + (size_t)c * 16 * steps;
      float some[M * C];
      const bool whole = columns - c >= C;
      tile_times_panel<M>(steps, x, tile, whole ? y + c : some, whole ? ldy : C);
      if (!whole)
        for (int m = 0; m < M; m++) memcpy(y + m * ldy + c, some + m * C, (size_t)(columns - c) * 4);
    }
  } else {
    // Stretches of K for which the rows stay in the first-level cache.
    constexpr int STRETCH = 32;
    alignas(64) float kept[PANEL_COLUMNS * M * 16];
    for (int s = 0; s < steps; s += STRETCH)
      for (int c = 0; c < columns; c += C)
        part_of_tile<M>(steps - s < STRETCH ? steps - s : STRETCH, x + (size_t)s * 16 * M, panel + (size_t)c * 16 * steps + (size_t)s * 16 * C,
                        kept + c * M * 16, s == 0);
    for (int c = 0; c < columns; c++)
      for (int m = 0; m < M; m++) {
        vf v[PARTS];
        for (int q = 0; q < PARTS; q++) v[q] = steps ? load(kept + ((c / C * M + m) * C + c % C) * 16 + q * W) : zero();
        y[m * ldy + c] = sum(v);
      }
  }
}

template <int CODEC>
static void multiply_all(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
  if (rows <= DIRECT_MOST) {
    const int first = tile_height(rows, 0, 4);
    if (first == rows) return direct_tile<CODEC>(w, n0, n1, x, rows, y, ldy, scratch);
    for (int n = n0; n < n1; n += 16) {
      const int end = n1 - n < 16 ? n1 : n + 16;
      direct_tile<CODEC>(w, n, end, x, first, y + (n - n0), ldy, scratch);
      direct_tile<CODEC>(w, n, end, x + (size_t)first * padded(w.k), rows - first, y + first * ldy + (n - n0), ldy, scratch);
    }
    return;
  }
  const int kp = padded(w.k), steps = kp / 16;
  // A panel that stays in the second-level cache while all rows pass over it.
  int wide = 48 * 1024 / (kp + 1) / PANEL_TILE * PANEL_TILE;
  wide = wide < PANEL_TILE ? PANEL_TILE : wide > PANEL_COLUMNS ? PANEL_COLUMNS : wide;
  float *panel = scratch, *room = scratch + (size_t)wide * kp;
  for (int n = n0; n < n1; n += wide) {
    const int columns = n1 - n < wide ? n1 - n : wide;
    for (int c = 0; c < columns; c += PANEL_TILE) fill_panel<CODEC>(w, n + c, columns - c, panel + (size_t)c * kp, room);
    for (int m = 0; m < rows;) {
      const int some = tile_height(rows, m, TILE_ROWS);
      const float* xt = x + (size_t)m * kp;
      float* yt = y + m * ldy + (n - n0);
      switch (some) {
        case 1: tile_times_columns<1>(columns, steps, xt, panel, yt, ldy); break;
        case 2: tile_times_columns<2>(columns, steps, xt, panel, yt, ldy); break;
        case 3: tile_times_columns<3>(columns, steps, xt, panel, yt, ldy); break;
        case 4: tile_times_columns<4>(columns, steps, xt, panel, yt, ldy); break;
        case 5: tile_times_columns<5>(columns, steps, xt, panel, yt, ldy); break;
        default: tile_times_columns<6>(columns, steps, xt, panel, yt, ldy); break;
      }
      m += some;
    }
  }
}

template <int BITS, int BYTES>
static void multiply_integer(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch);

static void multiply(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
  switch (w.codec) {
    case Q2: return multiply_all<Q2>(w, n0, n1, x, rows, y, ldy, scratch);
    case Q3: return multiply_all<Q3>(w, n0, n1, x, rows, y, ldy, scratch);
    case Q5: return multiply_all<Q5>(w, n0, n1, x, rows, y, ldy, scratch);
    case Q6: return multiply_all<Q6>(w, n0, n1, x, rows, y, ldy, scratch);
    case I4: return multiply_integer<4, 1>(w, n0, n1, x, rows, y, ldy, scratch);
    case I8: return multiply_integer<8, 1>(w, n0, n1, x, rows, y, ldy, scratch);
    case S4: return multiply_integer<4, 2>(w, n0, n1, x, rows, y, ldy, scratch);
    case S8: return multiply_integer<8, 2>(w, n0, n1, x, rows, y, ldy, scratch);
    case D_F16: return multiply_all<D_F16>(w, n0, n1, x, rows, y, ldy, scratch);
    case D_BF16: return multiply_all<D_BF16>(w, n0, n1, x, rows, y, ldy, scratch);
    case D_F32: return multiply_all<D_F32>(w, n0, n1, x, rows, y, ldy, scratch);
    case Q4: case Q8: break;  // stored so, multiplied as S4 and S8 or I4 and I8
  }
}

template <int CODEC> static void decode(const Weights& w, int64_t n, float* out) {
  constexpr int B = block_bytes<CODEC>;
  const bool tiled = n < w.tiled;
  const int64_t row = tiled ? n / TILE * TILE : n, column = n - row;
  const uint8_t* p = w.data + row * w.row_bytes + 4 * column;
  const int groups = w.k / w.group;
  for (int b = 0; b * BLOCK < w.k; b++, p += tiled ? B * TILE : B) {
    Unpack<CODEC> unpack;
    const size_t g = (size_t)b * BLOCK / w.group, at = (size_t)row * groups + (tiled ? g * TILE + column : g);
    float s, t;
    to_f32((const char*)w.scales + at * type_size(w.scale_type), w.scale_type, 1, &s);
    to_f32((const char*)w.biases + at * type_size(w.scale_type), w.scale_type, 1, &t);
    unpack.group(s, t);
    uint8_t room[B];
    if (tiled)
      for (int i = 0; i < B; i += 4) memcpy(room + i, p + i * TILE, 4);
    alignas(64) float lane[BLOCK];
    for (int h = 0; h < 2 * PARTS; h++) store(lane + h * W, unpack.vec(tiled ? room : p, h));
    for (int q = 0; q < BLOCK; q++) out[b * BLOCK + place((Codec)CODEC, q / 16, q % 16)] = lane[q];
  }
}
static void decode_row(const Weights& w, int64_t n, float* out) {
  switch (w.codec) {
    case Q2: return decode<Q2>(w, n, out);
    case Q3: return decode<Q3>(w, n, out);
    case Q4: return decode<Q4>(w, n, out);
    case Q5: return decode<Q5>(w, n, out);
    case Q6: return decode<Q6>(w, n, out);
    case Q8: return decode<Q8>(w, n, out);
    default: return to_f32(w.data + n * w.row_bytes, w.codec == D_F32 ? F32 : w.codec == D_F16 ? F16 : BF16, w.k, out);
  }
}
}  // namespace gnomon::GNOMON_ISA
