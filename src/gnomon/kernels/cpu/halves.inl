// 4-bit codes by activations of 16 bits where nothing multiplies bytes and adds in one instruction (AVX2). Include after integer.inl.
//
// An activation is 256 times a signed byte and another one. A register of codes as bytes is multiplied by either; pairs of products are added in 16
// bits, where a block's sum fits (15 * 128 * 32 / 2 = 30,720), and a block's sums enter 32 bits. What bounds this is instructions: the ports take about
// 3.2 a cycle of as many multiplications as additions, if little else is asked of them. So up to three rows, whose sums fill the registers, pass by both
// registers of a tile at once, and an activation is spread over a register once. More rows pass in turn, and all but the first take the codes that
// the first unpacked, along one stretch of K before the next so that they stay in the first-level cache.
namespace gnomon::GNOMON_ISA {

constexpr int SIDES = TILE / W;
static_assert(SIDES == 2);
constexpr int STRETCH_BLOCKS = 32;  // 16 KiB of codes as bytes
constexpr int STRETCH_ROWS = 64;    // whose sums wait while others pass
constexpr int MOST_IN_PASS = 3;     // rows
constexpr int AHEAD = 8;            // blocks whose words are asked for when three rows pass

// Where a pass has its codes from: words of a tile, and if they are to be KEPT it leaves them, [block][step].
enum Source { WORDS, WORDS_TO_KEEP, KEPT };

struct Pair {
  vi a, b;
};
// In one piece: GCC would load activations far ahead and have no registers left for sums.
INLINE Pair add_products(Pair sum, Pair codes, const int8_t* p) {
  vi made, more;
  asm("vpbroadcastd %4, %2\n\tvpmaddubsw %2, %5, %3\n\tvpmaddubsw %2, %6, %2\n\tvpaddw %3, %0, %0\n\tvpaddw %2, %1, %1"
      : "+x"(sum.a), "+x"(sum.b), "=&x"(made), "=&x"(more)
      : "m"(*(const int32_t*)p), "x"(codes.a), "x"(codes.b));
  return sum;
}
INLINE Pair products(Pair codes, const int8_t* p) {
  const vi x = four(p);
  return Pair{_mm256_maddubs_epi16(codes.a, x), _mm256_maddubs_epi16(codes.b, x)};
}
INLINE vi widened(vi high, vi low) { return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(low, _mm256_set1_epi16(1))); }

// Adds blocks `from` up to `to`, whole groups, of M rows of x to sums[M][TILE], which begin at block 0. OF_BLOCKS: groups of one block.
template <int M, Source SOURCE, bool OF_BLOCKS>
static void pass_along(const Weights& w, const Tile& tile, int from, int to, const float* x, Pair* kept, float* sums) {
  const int per_span = OF_BLOCKS ? 1 : w.group / BLOCK;
  const size_t k = (size_t)w.k;
  const Type type = tile.type;
  const uint8_t *scales = tile.scales, *biases = tile.biases;
  const uint32_t* words = tile.words + (size_t)from * 4 * TILE;
  size_t g = (size_t)(from / per_span) * TILE;
  const int8_t* q[M];
  for (int m = 0; m < M; m++) q[m] = Quantised<2>(x + m * k, w.k).q + (size_t)from * BLOCK * 2;
  const float *d = Quantised<2>(x, w.k).d + from / per_span, *dq = Quantised<2>(x, w.k).sums + from / per_span;
  vf acc[M][SIDES];
  vi total[M][SIDES];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int c = 0; c < SIDES; c++) acc[m][c] = from ? load(sums + m * TILE + c * W) : zero(), total[m][c] = _mm256_setzero_si256();
  for (int b = from, left = per_span; b < to; b++) {
    if constexpr (SOURCE != KEPT && M > 2) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) __builtin_prefetch(words + (4 * AHEAD + i) * TILE);
    }
    Pair high[M], low[M], word;
#pragma GCC unroll 8
    for (int s = 0; s < STEPS; s++) {
      Pair codes;
      if constexpr (SOURCE == KEPT) {
        codes = kept[s];
      } else {
        if (s % 2 == 0) word = Pair{iload(words + s / 2 * TILE), iload(words + s / 2 * TILE + W)};
        codes = s % 2 ? Pair{high_halves(word.a), high_halves(word.b)} : Pair{low_halves(word.a), low_halves(word.b)};
        if constexpr (SOURCE == WORDS_TO_KEEP) kept[s] = codes;
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const int8_t* p = q[m] + 8 * s;
        high[m] = s ? add_products(high[m], codes, p) : products(codes, p);
        low[m] = s ? add_products(low[m], codes, p + 4) : products(codes, p + 4);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      total[m][0] = _mm256_add_epi32(total[m][0], widened(high[m].a, low[m].a));
      total[m][1] = _mm256_add_epi32(total[m][1], widened(high[m].b, low[m].b));
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) q[m] += 2 * BLOCK;
    words += 4 * TILE, kept += STEPS;
    if (--left) continue;
    left = per_span;
#pragma GCC unroll 2
    for (int c = 0; c < SIDES; c++) {
      const vf scale = scales_at(scales, g + c * W, type), bias = scales_at(biases, g + c * W, type);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        acc[m][c] = enter(acc[m][c], total[m][c], scale, bias, d[m * k], dq[m * k]);
        total[m][c] = _mm256_setzero_si256();
      }
    }
    d++, dq++, g += TILE;
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int c = 0; c < SIDES; c++) store(sums + m * TILE + c * W, acc[m][c]);
}
template <int M, Source SOURCE>
INLINE void pass(const Weights& w, const Tile& tile, int from, int to, const float* x, Pair* kept, float* sums) {
  if (w.group == BLOCK) pass_along<M, SOURCE, true>(w, tile, from, to, x, kept, sums);
  else pass_along<M, SOURCE, false>(w, tile, from, to, x, kept, sums);
}
template <Source SOURCE> INLINE void pass(int rows, const Weights& w, const Tile& tile, int from, int to, const float* x, Pair* kept, float* sums) {
  switch (rows) {
    case 1: return pass<1, SOURCE>(w, tile, from, to, x, kept, sums);
    case 2: return pass<2, SOURCE>(w, tile, from, to, x, kept, sums);
    default: return pass<3, SOURCE>(w, tile, from, to, x, kept, sums);
  }
}

static void multiply_by_halves(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch) {
  Pair* kept = (Pair*)scratch;
  float *sums = scratch + STRETCH_BLOCKS * STEPS * TILE, *room = sums + STRETCH_ROWS * TILE;
  // Stretches as even as can be, of whole groups.
  const int blocks = w.k / BLOCK, groups = w.k / w.group, parts = (blocks + STRETCH_BLOCKS - 1) / STRETCH_BLOCKS;
  const int stretch = (groups + parts - 1) / parts * (w.group / BLOCK);
  for (int n = n0; n < n1; n += TILE) {
    const int columns = n1 - n < TILE ? n1 - n : TILE;
    const Tile tile = tile_at(w, n, columns, room);
    for (int first = 0; first < rows; first += STRETCH_ROWS) {
      const int some = rows - first < STRETCH_ROWS ? rows - first : STRETCH_ROWS;
      const float* xs = x + (size_t)first * w.k;
      if (some <= MOST_IN_PASS) {
        pass<WORDS>(some, w, tile, 0, blocks, xs, kept, sums);
      } else {
        for (int from = 0, to; from < blocks; from = to) {
          to = blocks - from < stretch ? blocks : from + stretch;
          for (int m = 0, height; m < some; m += height) {
            height = tile_height(some, m, MOST_IN_PASS);
            if (m == 0) pass<WORDS_TO_KEEP>(height, w, tile, from, to, xs, kept, sums);
            else pass<KEPT>(height, w, tile, from, to, xs + (size_t)m * w.k, kept, sums + m * TILE);
          }
        }
      }
      for (int m = 0; m < some; m++)
        for (int c = 0; c < columns; c += W) store_n(y + (first + m) * ldy + (n - n0) + c, columns - c < W ? columns - c : W, load(sums + m * TILE + c));
    }
  }
}
}  // namespace gnomon::GNOMON_ISA
