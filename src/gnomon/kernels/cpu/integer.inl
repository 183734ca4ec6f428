// Products of 4- and 8-bit codes with activations in block fixed point. Include after linear.inl.
//
// A span of activations is d * q with whole q. In two bytes, a span is a group of the weights and d = max |x| / 32512; in one, it is a block of 32
// and d = max |x| / 127. An output is, span by span, a sum of whole products (exact) that enters one float by two fused multiply-adds: its bits
// depend neither on tiles nor on the instruction set. Lanes are columns: four codes of each of W rows of weights stand in a register. So they lie
// if the weights are tiled; the words of other rows are transposed first.
#include <math.h>
namespace gnomon::GNOMON_ISA {

constexpr int STEPS = BLOCK / 4;  // of four codes in a block
// Most rows of x that pass over words while they are unpacked, and the tile of rows by registers of columns for more.
constexpr int FEW = W == 16 ? 8 : 4, SOME_COLUMNS = W == 16 ? 2 : 1;
// Up to so many rows, unpacking words of tiles for every FEW of them costs less than a panel.
#if defined(__AVX512VNNI__)
constexpr int UNPACKED_AGAIN = 48;
#else
constexpr int UNPACKED_AGAIN = 0;
#endif
template <int BYTES> constexpr int SOME_ROWS = W == 16 && BYTES == 1 ? 6 : 4;
template <int BYTES> INLINE int blocks_of_span(const Weights& w) { return BYTES == 1 ? 1 : w.group / BLOCK; }

// A row as it is arranged: BYTES * k bytes, then d of every span, then (k / BLOCK floats on) d times the sum of its q.
template <int BYTES> struct Quantised {
  const int8_t* q;
  const float *d, *sums;
  Quantised(const float* row, int k) : q((const int8_t*)row), d(row + k / 4 * BYTES), sums(row + k / 4 * BYTES + k / BLOCK) {}
};

// Four codes' activations: bytes; or the high and the low bytes of four whole numbers, or the even and the odd ones (IN_PAIRS).
template <int BYTES> struct Factors {
  vi x;
  explicit __attribute__((always_inline)) Factors(const int8_t* p) : x(four(p)) {}
};
template <> struct Factors<2> {
  vi x, y;
  explicit __attribute__((always_inline)) Factors(const int8_t* p) : x(four(p)), y(four(p + 4)) {}
};

// From where the values of eight neighbours come: those for 4-bit codes as the low and then the high halves of a word's bytes do.
template <int BITS, int BYTES> constexpr int from_place(int i) {
  if (BYTES == 2 && IN_PAIRS<BITS>) i = i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
  return BITS == 4 ? i % 4 * 2 + i / 4 : i;
}

// Eight values as whole numbers near x * by, ties to even, as `Factors` takes them; returns their sum.
#if defined(__AVX2__)
template <int BITS, int BYTES> struct Order {
  alignas(16) uint8_t at[16];
  constexpr Order() : at() {
    for (int i = 0; i < 8; i++) {
      const int from = 2 * from_place<BITS, BYTES>(i);
      if (BYTES == 1) at[i] = (uint8_t)from, at[8 + i] = 128;
      else if (IN_PAIRS<BITS>) at[2 * i] = (uint8_t)from, at[2 * i + 1] = (uint8_t)(from + 1);
      else at[i / 4 * 8 + i % 4] = (uint8_t)(from + 1), at[i / 4 * 8 + 4 + i % 4] = (uint8_t)from;
    }
  }
};
template <int BITS, int BYTES> INLINE __m128i round_eight(const float* x, float by, int8_t* to) {
  static constexpr Order<BITS, BYTES> order;
  const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(by)));
  __m128i v = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  const __m128i sums = _mm_madd_epi16(v, _mm_set1_epi16(1));
  if (BYTES == 2 && !IN_PAIRS<BITS>)  // the low byte has a sign: the high one is that of the nearest multiple of 256
    v = _mm_or_si128(_mm_and_si128(v, _mm_set1_epi16(255)), _mm_andnot_si128(_mm_set1_epi16(255), _mm_add_epi16(v, _mm_set1_epi16(128))));
  v = _mm_shuffle_epi8(v, _mm_load_si128((const __m128i*)order.at));
  if (BYTES == 1) _mm_storel_epi64((__m128i*)to, v);
  else _mm_storeu_si128((__m128i*)to, v);
  return sums;
}
template <int BITS, int BYTES> INLINE int round_all(const float* x, int n, float by, int8_t* to) {
  __m128i sums = _mm_setzero_si128();
  for (int i = 0; i < n; i += 8) sums = _mm_add_epi32(sums, round_eight<BITS, BYTES>(x + i, by, to + BYTES * i));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
}
#else
template <int BITS, int BYTES> INLINE int round_all(const float* x, int n, float by, int8_t* to) {
  static_assert(BYTES == 1 || IN_PAIRS<BITS>);
  int16_t codes[128];
  int sum = 0;
  for (int i = 0; i < n; i++) {
    // Adding 1.5 * 2^23 rounds to even, and the low half of the bits is the number.
    const float v = x[i] * by + 12582912.0f;
    uint32_t bits;
    memcpy(&bits, &v, 4);
    codes[i] = (int16_t)bits;
    sum += codes[i];
  }
  for (int i = 0; i < n; i++) {
    const int16_t code = codes[i / 8 * 8 + from_place<BITS, BYTES>(i % 8)];
    if (BYTES == 1) to[i] = (int8_t)code;
    else memcpy(to + 2 * i, &code, 2);
  }
  return sum;
}
#endif

template <int BITS, int BYTES> static void arrange_spans(const void* x, Type type, int64_t stride, const Weights& w, float* row) {
  constexpr float LARGEST = BYTES == 1 ? 127.0f : 32512.0f;  // the high byte of 32513 and more would be 128
  const int span = blocks_of_span<BYTES>(w) * BLOCK;
  int8_t* q = (int8_t*)row;
  float *ds = row + w.k / 4 * BYTES, *sums = ds + w.k / BLOCK;
  for (int s = 0; s * span < w.k; s++) {
    float room[128];
    const float* values = room;
    const char* from = (const char*)x + (int64_t)s * span * stride * (int64_t)type_size(type);
    if (stride == 1 && type == F32) values = (const float*)from;
    else if (stride == 1) to_f32(from, type, span, room);
    else
      for (int i = 0; i < span; i++) to_f32(from + i * stride * (int64_t)type_size(type), type, 1, room + i);
    vf most = zero();
    bool is_nan = false;
    for (int i = 0; i < span; i += W) {
      const vf v = load(values + i);
      most = max(most, max(v, sub(zero(), v)));
      is_nan |= any_nan(v);
    }
    const float top = is_nan ? NAN : largest(most);
    if (top < 7.888609052210118e-31f) {  // 2^-100: its reciprocal would leave the range
      memset(q + BYTES * s * span, 0, BYTES * span);
      ds[s] = sums[s] = 0;
    } else {
      ds[s] = top / LARGEST;
      sums[s] = ds[s] * (float)round_all<BITS, BYTES>(values, span, LARGEST / top, q + BYTES * s * span);
    }
  }
}
static void arrange_integer(const void* x, Type type, int64_t stride, const Weights& w, float* row) {
  switch (w.codec) {
    case I4: return arrange_spans<4, 1>(x, type, stride, w, row);
    case I8: return arrange_spans<8, 1>(x, type, stride, w, row);
    case S4: return arrange_spans<4, 2>(x, type, stride, w, row);
    default: return arrange_spans<8, 2>(x, type, stride, w, row);
  }
}

// A tile's words [k * bits / 32][TILE] and its scales and biases [groups][TILE].
struct Tile {
  const uint32_t* words;
  const uint8_t *scales, *biases;
  Type type;
};

// TILE rows' scales or biases as they lie, turned to floats [groups][TILE].
static void turn_scales(const void* from, Type type, int64_t n, int columns, int groups, float* to) {
  const size_t size = type_size(type);
  const int per = (int)(64 / size);
  alignas(64) uint32_t words[16 * TILE];
  for (int first = 0; first < TILE; first += W) {
    const uint8_t* p[W];
    for (int c = 0; c < W; c++) p[c] = (const uint8_t*)from + (size_t)(n + (first + c < columns ? first + c : columns - 1)) * groups * size;
    for (int g = 0; g < groups;) {
      const int some = per < groups - g ? per : groups - g;
      turn(p, (int)(some * size), words);
      for (int i = 0; i < some; i++) {
        float* at = to + (size_t)(g + i) * TILE + first;
        if (type == F32) memcpy(at, words + i * TILE, W * 4);
        else store(at, half_of(words + i / 2 * TILE, i % 2, type));
      }
      for (int c = 0; c < W; c++) p[c] += some * size;
      g += some;
    }
  }
}

// The tile at row n, a multiple of TILE: where it lies, or turned in `room` (tile_floats(k)) if these rows lie one after the other.
// Columns beyond the last one are the last one again.
static Tile tile_at(const Weights& w, int64_t n, int columns, float* room) {
  const int groups = w.k / w.group;
  if (n < w.tiled) {
    const size_t at = (size_t)n * groups * type_size(w.scale_type);
    return Tile{(const uint32_t*)(w.data + n * w.row_bytes), (const uint8_t*)w.scales + at, (const uint8_t*)w.biases + at, w.scale_type};
  }
  uint32_t* words = (uint32_t*)room;
  float *scales = room + w.row_bytes / 4 * TILE, *biases = scales + (size_t)groups * TILE;
  const int64_t ahead = w.row_bytes < 2048 ? TILE * w.row_bytes : 256;  // the next tile, or further along long rows
  for (int first = 0; first < TILE; first += W) {
    const uint8_t* p[W];
    for (int c = 0; c < W; c++) p[c] = w.data + (n + (first + c < columns ? first + c : columns - 1)) * w.row_bytes;
    for (int at = 0; at < w.row_bytes; at += 64) {
      for (int c = 0; c < W; c++) __builtin_prefetch(p[c] + ahead, 0, 2);  // not into the first level: lines of long rows fall on each other there
      turn(p, w.row_bytes - at < 64 ? (int)w.row_bytes - at : 64, words + (size_t)at / 4 * TILE + first);
      for (int c = 0; c < W; c++) p[c] += 64;
    }
  }
  turn_scales(w.scales, w.scale_type, n, columns, groups, scales);
  turn_scales(w.biases, w.scale_type, n, columns, groups, biases);
  return Tile{words, (const uint8_t*)scales, (const uint8_t*)biases, F32};
}

INLINE vf scales_at(const uint8_t* p, size_t at, Type type) {
  return type == F32 ? load((const float*)p + at) : load_half((const uint16_t*)p + at, W, type);
}

// What a span's sums add to the outputs: scale * d * sum + bias * (d * sum of q).
INLINE vf enter(vf y, vi sum, vf scale, vf bias, float d, float q) { return fma(bias, set1(q), fma(to_float(sum), mul(scale, set1(d)), y)); }

template <int BITS, int BYTES, int M>
static void few_rows(const Weights& w, int n0, int n1, const float* x, float* y, int64_t ldy, float* scratch) {
  const int spans = w.k / BLOCK / blocks_of_span<BYTES>(w), per_span = blocks_of_span<BYTES>(w), per_group = w.group / BLOCK / per_span;
  const int8_t* q[M];
  for (int m = 0; m < M; m++) q[m] = Quantised<BYTES>(x + (size_t)m * w.k, w.k).q;
  const float *d = Quantised<BYTES>(x, w.k).d, *sums = Quantised<BYTES>(x, w.k).sums;
  for (int n = n0; n < n1; n += TILE) {
    const int columns = n1 - n < TILE ? n1 - n : TILE;
    const Tile tile = tile_at(w, n, columns, scratch);
    for (int first = 0; first < columns; first += W) {
      vf acc[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) acc[m] = zero();
      const uint32_t* from = tile.words + first;
      for (int i = 0, at = 0; i < spans; i++) {
        Dot<BITS, BYTES> dot[M];
        for (int b = 0; b < per_span; b++, from += BITS * TILE, at += BLOCK * BYTES) {
          if constexpr (BITS == 4) {
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s += 2) {
              const vi both = iload(from + s / 2 * TILE);
              const Codes<4, BYTES> low(low_halves(both)), high(high_halves(both));
#pragma GCC unroll 8
              for (int m = 0; m < M; m++) {
                dot[m].add(low, Factors<BYTES>(q[m] + at + 4 * BYTES * s));
                dot[m].add(high, Factors<BYTES>(q[m] + at + 4 * BYTES * (s + 1)));
              }
            }
          } else {
#pragma GCC unroll 8
            for (int s = 0; s < STEPS; s++) {
              const Codes<8, BYTES> codes(iload(from + s * TILE));
#pragma GCC unroll 8
              for (int m = 0; m < M; m++) dot[m].add(codes, Factors<BYTES>(q[m] + at + 4 * BYTES * s));
            }
          }
        }
        const size_t g = (size_t)(i / per_group) * TILE + first;
        const vf scale = scales_at(tile.scales, g, tile.type), bias = scales_at(tile.biases, g, tile.type);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) acc[m] = enter(acc[m], dot[m].sum(), scale, bias, d[(size_t)m * w.k + i], sums[(size_t)m * w.k + i]);
      }
      for (int m = 0; m < M; m++) store_n(y + m * ldy + (n - n0 + first), columns - first < W ? columns - first : W, acc[m]);
    }
  }
}

// Codes of W columns of a tile as bytes: panel[(k / 4 * W + column) * 4 + k % 4], 4-bit ones in the order of the activations.
template <int BITS> static void fill_codes(const Tile& tile, int first, int k, uint32_t* panel) {
  const uint32_t* from = tile.words + first;
  for (int i = 0; i < k * BITS / 32; i++, from += TILE) {
    const vi words = iload(from);
    if constexpr (BITS == 8) {
      istore(panel + i * W, words);
    } else {
      istore(panel + 2 * i * W, low_halves(words));
      istore(panel + (2 * i + 1) * W, high_halves(words));
    }
  }
}

template <int BITS, int BYTES, int M>
static void some_rows(const Weights& w, const float* x, const uint32_t* panel, const float* scales, const float* biases, int columns, float* y, int64_t ldy) {
  constexpr int C = SOME_COLUMNS;
  const int per_group = w.group / BLOCK, per_span = blocks_of_span<BYTES>(w);
  const size_t wide = (size_t)w.k / 4 * W, groups = (size_t)w.k / w.group * W;
  const int8_t* q[M];
  for (int m = 0; m < M; m++) q[m] = Quantised<BYTES>(x + (size_t)m * w.k, w.k).q;
  const float *d = Quantised<BYTES>(x, w.k).d, *sums = Quantised<BYTES>(x, w.k).sums;
  vf acc[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) acc[m][c] = zero();
  for (int b = 0; b < w.k / BLOCK; d++, sums++) {
    Dot<BITS, BYTES> dot[M][C];
    const int end = b + per_span;
    for (; b < end; b++) {
#pragma GCC unroll 8
      for (int s = 0; s < STEPS; s++, panel += W) {
        Codes<BITS, BYTES> codes[C];
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) codes[c] = Codes<BITS, BYTES>(iload(panel + c * wide));
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const Factors<BYTES> xv(q[m] + (b * BLOCK + 4 * s) * BYTES);
#pragma GCC unroll 2
          for (int c = 0; c < C; c++) dot[m][c].add(codes[c], xv);
        }
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) {
      const size_t at = c * groups + (size_t)((b - 1) / per_group) * W;
      const vf scale = load(scales + at), bias = load(biases + at);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) acc[m][c] = enter(acc[m][c], dot[m][c].sum(), scale, bias, d[(size_t)m * w.k], sums[(size_t)m * w.k]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C && columns > c * W; c++) store_n(y + m * ldy + c * W, columns - c * W < W ? columns - c * W : W, acc[m][c]);
}

// Asks the second-level cache for parts [part, to) of `parts` of what columns [n, n + columns) of a matrix are stored as, tiled or not.
// Always inline: GCC takes a function that only asks for one without effects, and drops its calls.
INLINE void fetch(const Weights& w, int64_t n, int columns, int part, int to, int parts) {
  const int64_t scales = (int64_t)(w.k / w.group) * (int64_t)type_size(w.scale_type), each[3] = {w.row_bytes, scales, scales};
  const char* from[3] = {(const char*)w.data, (const char*)w.scales, (const char*)w.biases};
  for (int i = 0; i < 3; i++) {
    const int64_t lines = (columns * each[i] + 63) / 64, end = lines * to / parts;
    for (int64_t line = lines * part / parts; line < end; line++) __builtin_prefetch(from[i] + n * each[i] + 64 * line, 0, 2);
  }
}

template <int BITS, int BYTES>
static void multiply_few(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
  switch (rows) {
    case 1: return few_rows<BITS, BYTES, 1>(w, n0, n1, x, y, ldy, scratch);
    case 2: return few_rows<BITS, BYTES, 2>(w, n0, n1, x, y, ldy, scratch);
    case 3: return few_rows<BITS, BYTES, 3>(w, n0, n1, x, y, ldy, scratch);
    case 4: return few_rows<BITS, BYTES, 4>(w, n0, n1, x, y, ldy, scratch);
  }
  if constexpr (FEW > 4) {
    switch (rows) {
      case 5: return few_rows<BITS, BYTES, 5>(w, n0, n1, x, y, ldy, scratch);
      case 6: return few_rows<BITS, BYTES, 6>(w, n0, n1, x, y, ldy, scratch);
      case 7: return few_rows<BITS, BYTES, 7>(w, n0, n1, x, y, ldy, scratch);
      case 8: return few_rows<BITS, BYTES, 8>(w, n0, n1, x, y, ldy, scratch);
    }
  }
}

template <int BITS, int BYTES>
static void multiply_by_panels(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
  if (rows <= FEW) return multiply_few<BITS, BYTES>(w, n0, n1, x, rows, y, ldy, scratch);
  if (rows <= UNPACKED_AGAIN && n1 <= w.tiled) {
    for (int n = n0; n < n1; n += TILE)
      for (int m = 0, some; m < rows; m += some) {
        some = tile_height(rows, m, FEW);
        fetch(w, n + TILE, TILE, m, m + some, rows);
        multiply_few<BITS, BYTES>(w, n, n + TILE, x + (size_t)m * w.k, some, y + m * ldy + (n - n0), ldy, scratch);
      }
    return;
  }
  constexpr int C = SOME_COLUMNS;
  const size_t wide = (size_t)w.k / 4 * W, groups = (size_t)w.k / w.group * W;
  uint32_t* panel = (uint32_t*)scratch;
  float *scales = scratch + C * wide, *biases = scales + C * groups, *room = biases + C * groups;
  for (int n = n0; n < n1; n += C * W) {
    const int columns = n1 - n < C * W ? n1 - n : C * W;
    for (int c = 0; c < C; c++) {
      // Columns beyond the last one: something finite that nobody reads.
      const int at = n + (c * W < columns ? c * W : 0), start = at / TILE * TILE, first = at - start;
      const Tile tile = tile_at(w, start, n1 - start < TILE ? n1 - start : TILE, room);
      fill_codes<BITS>(tile, first, w.k, panel + c * wide);
      for (size_t g = 0; g < groups / W; g++) {
        store(scales + c * groups + g * W, scales_at(tile.scales, g * TILE + first, tile.type));
        store(biases + c * groups + g * W, scales_at(tile.biases, g * TILE + first, tile.type));
      }
    }
    for (int m = 0; m < rows;) {
      const int some = tile_height(rows, m, SOME_ROWS<BYTES>);
      // The next panel, or the one that the thread next to this one's stretch begins with, while this one is multiplied.
      if (C * W >= TILE) fetch(w, n + C * W, C * W, m, m + some, rows);
      const float* xt = x + (size_t)m * w.k;
      float* yt = y + m * ldy + (n - n0);
      switch (some) {
        case 1: some_rows<BITS, BYTES, 1>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        case 2: some_rows<BITS, BYTES, 2>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        case 3: some_rows<BITS, BYTES, 3>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        case 4: some_rows<BITS, BYTES, 4>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        default:
          if constexpr (SOME_ROWS<BYTES> > 4) {
            if (some == 5) some_rows<BITS, BYTES, 5>(w, xt, panel, scales, biases, columns, yt, ldy);
            else some_rows<BITS, BYTES, 6>(w, xt, panel, scales, biases, columns, yt, ldy);
          }
      }
      m += some;
    }
  }
}

#if defined(GNOMON_BY_HALVES)
static void multiply_by_halves(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch);
#endif
template <int BITS, int BYTES>
static void multiply_integer(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
#if defined(GNOMON_BY_HALVES)
  if constexpr (BITS == 4 && BYTES == 2) multiply_by_halves(w, n0, n1, x, rows, y, ldy, scratch);
  else
#endif
    multiply_by_panels<BITS, BYTES>(w, n0, n1, x, rows, y, ldy, scratch);
}
}  // namespace gnomon::GNOMON_ISA
