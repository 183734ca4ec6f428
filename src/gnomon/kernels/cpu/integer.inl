// Products of 4- and 8-bit codes with activations rounded to 8 bits. Include after linear.inl.
//
// A block of 32 activations is d * q with q whole in [-127, 127] and d = max |x| / 127. An output is, block by block, a sum of whole products
// (exact) that enters one float by two fused multiply-adds: its bits depend neither on tiles nor on the instruction set.
// Lanes are columns: four codes of each of W rows of weights stand in a register. So they lie if the weights are tiled; the words of other rows
// are transposed first.
#include <math.h>
namespace gnomon::GNOMON_ISA {

constexpr int STEPS = BLOCK / 4;  // of four codes in a block
// Most rows of x that pass over words while they are unpacked, and the tile of rows by registers of columns for more.
constexpr int FEW = W == 16 ? 8 : 4, SOME_ROWS = W == 16 ? 6 : 4, SOME_COLUMNS = W == 16 ? 2 : 1;

// A row as it is arranged: k bytes, then d of every block, then d times the sum of its q.
struct Quantised {
  const int8_t* q;
  const float *d, *sums;
  Quantised(const float* row, int k) : q((const int8_t*)row), d(row + k / 4), sums(row + k / 4 + k / BLOCK) {}
};

static void arrange_integer(const void* x, Type type, int64_t stride, int k, Codec codec, float* row) {
  int8_t* q = (int8_t*)row;
  float *ds = row + k / 4, *sums = ds + k / BLOCK;
  for (int b = 0; b < k / BLOCK; b++) {
    float block[BLOCK];
    const char* from = (const char*)x + (int64_t)b * BLOCK * stride * (int64_t)type_size(type);
    if (stride == 1) to_f32(from, type, BLOCK, block);
    else
      for (int i = 0; i < BLOCK; i++) to_f32(from + i * stride * (int64_t)type_size(type), type, 1, block + i);
    vf most = zero();
    bool is_nan = false;
    for (int i = 0; i < BLOCK; i += W) {
      const vf v = load(block + i);
      most = max(most, max(v, sub(zero(), v)));
      is_nan |= any_nan(v);
    }
    float lanes[W], top = 0;
    store(lanes, most);
    for (int i = 0; i < W; i++) top = lanes[i] > top ? lanes[i] : top;
    if (is_nan) top = NAN;
    int8_t codes[BLOCK];
    int sum = 0;
    float d = 0;
    if (top < 7.888609052210118e-31f) {  // 2^-100: its reciprocal would leave the range
      memset(codes, 0, sizeof codes);
    } else {
      d = top / 127.0f;
      const vf by = set1(127.0f / top), magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to even, and the low byte is the number
      for (int i = 0; i < BLOCK; i += W) store(block + i, add(mul(load(block + i), by), magic));
      uint32_t bits[BLOCK];
      memcpy(bits, block, sizeof bits);
      for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)(uint8_t)bits[i];
      for (int i = 0; i < BLOCK; i++) sum += codes[i];
    }
    ds[b] = d;
    sums[b] = d * (float)sum;
    int8_t* to = q + b * BLOCK;
    if (codec == I4)  // as the low and then the high halves of a word's bytes come
      for (int i = 0; i < BLOCK; i++) to[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = codes[i];
    else
      memcpy(to, codes, BLOCK);
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

// What a block's sums add to the outputs: scale * d * sum + bias * (d * sum of q).
INLINE vf enter(vf y, vi sum, vf scale, vf bias, float d, float q) { return fma(bias, set1(q), fma(to_float(sum), mul(scale, set1(d)), y)); }

template <int BITS, int M>
static void few_rows(const Weights& w, int n0, int n1, const float* x, float* y, int64_t ldy, float* scratch) {
  const int blocks = w.k / BLOCK, per_group = w.group / BLOCK;
  const int8_t* q[M];
  for (int m = 0; m < M; m++) q[m] = Quantised(x + (size_t)m * w.k, w.k).q;
  const float *d = Quantised(x, w.k).d, *sums = Quantised(x, w.k).sums;
  for (int n = n0; n < n1; n += TILE) {
    const int columns = n1 - n < TILE ? n1 - n : TILE;
    const Tile tile = tile_at(w, n, columns, scratch);
    for (int first = 0; first < columns; first += W) {
      vf acc[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) acc[m] = zero();
      const uint32_t* from = tile.words + first;
      for (int b = 0; b < blocks; b++, from += BITS * TILE) {
        Dot<BITS> dot[M];
        const int at = b * BLOCK;
        if constexpr (BITS == 4) {
#pragma GCC unroll 4
          for (int s = 0; s < STEPS; s += 2) {
            const vi both = iload(from + s / 2 * TILE);
            const Codes<4> low(low_halves(both)), high(high_halves(both));
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
              dot[m].add(low, four(q[m] + at + 4 * s));
              dot[m].add(high, four(q[m] + at + 4 * s + 4));
            }
          }
        } else {
#pragma GCC unroll 8
          for (int s = 0; s < STEPS; s++) {
            const Codes<8> codes(iload(from + s * TILE));
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) dot[m].add(codes, four(q[m] + at + 4 * s));
          }
        }
        const size_t g = (size_t)(b / per_group) * TILE + first;
        const vf scale = scales_at(tile.scales, g, tile.type), bias = scales_at(tile.biases, g, tile.type);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) acc[m] = enter(acc[m], dot[m].sum(), scale, bias, d[(size_t)m * w.k + b], sums[(size_t)m * w.k + b]);
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

template <int BITS, int M>
static void some_rows(const Weights& w, const float* x, const uint32_t* panel, const float* scales, const float* biases, int columns, float* y, int64_t ldy) {
  constexpr int C = SOME_COLUMNS;
  const int per_group = w.group / BLOCK;
  const size_t wide = (size_t)w.k / 4 * W, groups = (size_t)w.k / w.group * W;
  const int8_t* q[M];
  for (int m = 0; m < M; m++) q[m] = Quantised(x + (size_t)m * w.k, w.k).q;
  const float *d = Quantised(x, w.k).d, *sums = Quantised(x, w.k).sums;
  vf acc[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) acc[m][c] = zero();
  for (int b = 0; b < w.k / BLOCK; b++) {
    Dot<BITS> dot[M][C];
#pragma GCC unroll 8
    for (int s = 0; s < STEPS; s++, panel += W) {
      Codes<BITS> codes[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) codes[c] = Codes<BITS>(iload(panel + c * wide));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const vi xv = four(q[m] + b * BLOCK + 4 * s);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) dot[m][c].add(codes[c], xv);
      }
    }
#pragma GCC unroll 2
    for (int c = 0; c < C; c++) {
      const size_t at = c * groups + (size_t)(b / per_group) * W;
      const vf scale = load(scales + at), bias = load(biases + at);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) acc[m][c] = enter(acc[m][c], dot[m][c].sum(), scale, bias, d[(size_t)m * w.k + b], sums[(size_t)m * w.k + b]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C && columns > c * W; c++) store_n(y + m * ldy + c * W, columns - c * W < W ? columns - c * W : W, acc[m][c]);
}

template <int BITS> static void multiply_integer(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
  if (rows <= FEW) {
    switch (rows) {
      case 1: return few_rows<BITS, 1>(w, n0, n1, x, y, ldy, scratch);
      case 2: return few_rows<BITS, 2>(w, n0, n1, x, y, ldy, scratch);
      case 3: return few_rows<BITS, 3>(w, n0, n1, x, y, ldy, scratch);
      case 4: return few_rows<BITS, 4>(w, n0, n1, x, y, ldy, scratch);
    }
    if constexpr (FEW > 4) {
      switch (rows) {
        case 5: return few_rows<BITS, 5>(w, n0, n1, x, y, ldy, scratch);
        case 6: return few_rows<BITS, 6>(w, n0, n1, x, y, ldy, scratch);
        case 7: return few_rows<BITS, 7>(w, n0, n1, x, y, ldy, scratch);
        case 8: return few_rows<BITS, 8>(w, n0, n1, x, y, ldy, scratch);
      }
    }
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
      const int some = tile_height(rows, m, SOME_ROWS);
      const float* xt = x + (size_t)m * w.k;
      float* yt = y + m * ldy + (n - n0);
      switch (some) {
        case 1: some_rows<BITS, 1>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        case 2: some_rows<BITS, 2>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        case 3: some_rows<BITS, 3>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        case 4: some_rows<BITS, 4>(w, xt, panel, scales, biases, columns, yt, ldy); break;
        default:
          if constexpr (SOME_ROWS > 4) {
            if (some == 5) some_rows<BITS, 5>(w, xt, panel, scales, biases, columns, yt, ldy);
            else some_rows<BITS, 6>(w, xt, panel, scales, biases, columns, yt, ldy);
          }
      }
      m += some;
    }
  }
}
}  // namespace gnomon::GNOMON_ISA
