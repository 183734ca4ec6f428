// Products of 4- and 8-bit codes with activations rounded to 8 bits. Include after linear.inl.
//
// A block of 32 activations is d * q with q whole in [-127, 127] and d = max |x| / 127. An output is, block by block, a sum of whole products
// (exact) that enters one float by two fused multiply-adds: its bits depend neither on tiles nor on the instruction set.
// Lanes are columns: four codes of each of W rows of weights stand in a register, after the rows' words were transposed.
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

// Scales or biases of W rows from row n (the last one again where there are no more) as [groups][W].
static void turn_scales(const void* from, Type type, int64_t n, int columns, int groups, float* to) {
  const size_t size = type_size(type);
  const uint8_t* p[W];
  for (int c = 0; c < W; c++) p[c] = (const uint8_t*)from + (size_t)(n + (c < columns ? c : columns - 1)) * groups * size;
  alignas(64) uint32_t words[16 * W];
  for (int g = 0; g < groups;) {
    const int some = (int)(64 / size) < groups - g ? (int)(64 / size) : groups - g;
    turn(p, (int)(some * size), words);
    for (int i = 0; i < some; i++) {
      if (type == F32) memcpy(to + (size_t)(g + i) * W, words + i * W, W * 4);
      else store(to + (size_t)(g + i) * W, half_of(words + i / 2 * W, i % 2, type));
    }
    for (int c = 0; c < W; c++) p[c] += some * size;
    g += some;
  }
}

template <int BITS> struct Tile {
  static constexpr int LINE = 64, BYTES = BLOCK * BITS / 8, PER = LINE / BYTES;  // bytes of a line, of a block; blocks in a line
  const uint8_t* p[W];
  int bytes, left;
  Tile(const Weights& w, int64_t n, int columns) : bytes(w.k * BITS / 8), left(bytes) {
    for (int c = 0; c < W; c++) p[c] = w.data + (n + (c < columns ? c : columns - 1)) * w.row_bytes;
  }
  // The next line of every row, transposed; returns how many blocks it has.
  int next(uint32_t* words, int64_t ahead) {
    const int some = left < LINE ? left : LINE;
    for (int c = 0; c < W; c++) __builtin_prefetch(p[c] + ahead, 0, 2);  // not into the first level: lines of long rows fall on each other there
    turn(p, some, words);
    for (int c = 0; c < W; c++) p[c] += some;
    left -= some;
    return some / BYTES;
  }
};

// What a block's sums add to the outputs: scale * d * sum + bias * (d * sum of q).
INLINE vf enter(vf y, vi sum, vf scale, vf bias, float d, float q) { return fma(bias, set1(q), fma(to_float(sum), mul(scale, set1(d)), y)); }

template <int BITS, int M>
static void few_rows(const Weights& w, int n0, int n1, const float* x, float* y, int64_t ldy, float* scratch) {
  const int groups = w.k / w.group, per_group = w.group / BLOCK;
  float *scales = scratch, *biases = scratch + (size_t)groups * W;
  alignas(64) uint32_t words[16 * W];
  const int8_t* q[M];
  for (int m = 0; m < M; m++) q[m] = Quantised(x + (size_t)m * w.k, w.k).q;
  const float *d = Quantised(x, w.k).d, *sums = Quantised(x, w.k).sums;
  const int64_t ahead = w.row_bytes < 2048 ? W * w.row_bytes : 256;  // the next columns, or further along long rows
  for (int n = n0; n < n1; n += W) {
    const int columns = n1 - n < W ? n1 - n : W;
    turn_scales(w.scales, w.scale_type, n, columns, groups, scales);
    turn_scales(w.biases, w.scale_type, n, columns, groups, biases);
    vf acc[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[m] = zero();
    Tile<BITS> tile(w, n, columns);
    for (int b = 0; tile.left;) {
      const int blocks = tile.next(words, ahead);
      for (int i = 0; i < blocks; i++, b++) {
        Dot<BITS> dot[M];
        const int at = b * BLOCK;
        const uint32_t* from = words + i * Tile<BITS>::BYTES / 4 * W;
        if constexpr (BITS == 4) {
#pragma GCC unroll 4
          for (int s = 0; s < STEPS; s += 2) {
            const vi both = iload(from + s / 2 * W);
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
            const Codes<8> codes(iload(from + s * W));
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) dot[m].add(codes, four(q[m] + at + 4 * s));
          }
        }
        const vf scale = load(scales + (size_t)(b / per_group) * W), bias = load(biases + (size_t)(b / per_group) * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) acc[m] = enter(acc[m], dot[m].sum(), scale, bias, d[(size_t)m * w.k + b], sums[(size_t)m * w.k + b]);
      }
    }
    for (int m = 0; m < M; m++) store_n(y + m * ldy + (n - n0), columns, acc[m]);
  }
}

// Codes of W columns as bytes: panel[(k / 4 * W + column) * 4 + k % 4], 4-bit ones in the order of the activations.
template <int BITS> static void fill_codes(const Weights& w, int n, int columns, uint32_t* panel) {
  Tile<BITS> tile(w, n, columns);
  alignas(64) uint32_t words[16 * W];
  while (tile.left) {
    if constexpr (BITS == 8) {
      panel += (size_t)tile.next(panel, 0) * STEPS * W;
    } else {
      const int count = tile.next(words, 0) * STEPS / 2;
      for (int i = 0; i < count; i++, panel += 2 * W) {
        const vi both = iload(words + i * W);
        istore(panel, low_halves(both));
        istore(panel + W, high_halves(both));
      }
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
  float *scales = scratch + C * wide, *biases = scales + C * groups;
  for (int n = n0; n < n1; n += C * W) {
    const int columns = n1 - n < C * W ? n1 - n : C * W;
    for (int c = 0; c < C; c++) {
      // Columns beyond the last one: something finite that nobody reads.
      const int from = c * W < columns ? c * W : 0, some = columns - from < W ? columns - from : W;
      fill_codes<BITS>(w, n + from, some, panel + c * wide);
      turn_scales(w.scales, w.scale_type, n + from, some, w.k / w.group, scales + c * groups);
      turn_scales(w.biases, w.scale_type, n + from, some, w.k / w.group, biases + c * groups);
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
