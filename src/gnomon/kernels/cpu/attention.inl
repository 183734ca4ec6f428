// The inner products of attention. Rows of q, k, v are floats with `d` a multiple of 16 (filled up with zeros).
namespace gnomon::GNOMON_ISA {

template <int R> INLINE void scores_tile(const float* q, int64_t ldq, const float* k, int64_t ldk, int d, float scale, float* s, int64_t lds) {
  vf acc[R][4][PARTS];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++)
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) acc[r][c][p] = zero();
  for (int i = 0; i < d; i += 16)
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
      vf kv[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) kv[c] = load(k + c * ldk + i + p * W);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        vf qv = load(q + r * ldq + i + p * W);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) acc[r][c][p] = fma(qv, kv[c], acc[r][c][p]);
      }
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    float four[4];
    sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], four);
    for (int c = 0; c < 4; c++) s[r * lds + c] = four[c] * scale;
  }
}
static void few_scores(const float* q, int64_t ldq, int rows, const float* k, int64_t ldk, int keys, int d, float scale, float* s, int64_t lds) {
  constexpr int R = W == 16 ? 4 : 2;
  for (int i = 0; i < keys; i += 4) {
    const int some = keys - i < 4 ? keys - i : 4;
    // Fewer keys than four: those that are missing stand on the last one.
    const int64_t step = some == 4 ? ldk : 0;
    for (int r = 0; r < rows;) {
      float few[R * 4];
      const bool whole = some == 4;
      const int take = rows - r >= R ? R : rows - r;
      if (whole) {
        const float *qr = q + r * ldq, *kr = k + i * ldk;
        float* to = s + r * lds + i;
        if (take == R) scores_tile<R>(qr, ldq, kr, ldk, d, scale, to, lds);
        else if (R > 3 && take == 3) scores_tile<(R > 3 ? 3 : 1)>(qr, ldq, kr, ldk, d, scale, to, lds);
        else if (R > 2 && take == 2) scores_tile<(R > 2 ? 2 : 1)>(qr, ldq, kr, ldk, d, scale, to, lds);
        else scores_tile<1>(qr, ldq, kr, ldk, d, scale, to, lds);
      } else {
        for (int c = 0; c < some; c++)
          for (int t = 0; t < take; t++) {
            scores_tile<1>(q + (r + t) * ldq, ldq, k + (i + c) * ldk, step, d, scale, few, 4);
            s[(r + t) * lds + i + c] = few[0];
          }
      }
      r += take;
    }
  }
}

// Lanes are keys: element e of sixteen keys lies at turned[16 * e]. The sums are those of scores_tile in its order, but no tree is needed within a register.
template <int R> INLINE void turned_scores_tile(const float* q, int64_t ldq, const float* turned, int d, float scale, float* s, int64_t lds) {
  vf one[R], two[R], four[R], a[R], b[R];
#pragma GCC unroll 8
  for (int n = 0; n < 8; n++) {
    const int lane = (n & 1) * 4 + (n & 2) + n / 4;  // with the one that is eight further; 0 4 2 6 1 5 3 7
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) a[r] = b[r] = zero();
    for (int i = lane; i < d; i += 16) {
      const vf low = load(turned + 16 * i), high = load(turned + 16 * (i + 8));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        a[r] = fma(set1(q[r * ldq + i]), low, a[r]);
        b[r] = fma(set1(q[r * ldq + i + 8]), high, b[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      a[r] = add(a[r], b[r]);
      if (n & 1) a[r] = add(four[r], a[r]);
      else four[r] = a[r];
      if ((n & 3) == 3) a[r] = add(two[r], a[r]);
      else if (n & 1) two[r] = a[r];
      if (n == 7) store(s + r * lds, mul(add(one[r], a[r]), set1(scale)));
      else if (n == 3) one[r] = a[r];
    }
  }
}
// From so many queries on, sixteen keys are worth turning.
constexpr int MANY_QUERIES = 6, MOST_TURNED = 512;
// s[r * lds + i] = scale * q[r] . k[i]
static void scores(const float* q, int64_t ldq, int rows, const float* k, int64_t ldk, int keys, int d, float scale, float* s, int64_t lds) {
  constexpr int R = W == 16 ? 4 : 2;
  for (; keys >= 16 && rows >= MANY_QUERIES && d <= MOST_TURNED; keys -= 16, k += 16 * ldk, s += 16) {
    alignas(64) float turned[16 * MOST_TURNED];
    for (int p = 0; p < 16; p += W)
      for (int i = 0; i < d; i += 16) {
        const uint8_t* from[W];
        for (int c = 0; c < W; c++) from[c] = (const uint8_t*)(k + (p + c) * ldk + i);
        turn(from, 64, (uint32_t*)turned + 16 * i + p);
      }
    for (int p = 0; p < 16; p += W) {
      int r = 0;
      for (; r + R <= rows; r += R) turned_scores_tile<R>(q + r * ldq, ldq, turned + p, d, scale, s + r * lds + p, lds);
      for (; r < rows; r++) turned_scores_tile<1>(q + r * ldq, ldq, turned + p, d, scale, s + r * lds + p, lds);
    }
  }
  few_scores(q, ldq, rows, k, ldk, keys, d, scale, s, lds);
}

template <int R, int C> INLINE void weigh_tile(const float* p, int64_t ldp, const float* v, int64_t ldv, int keys, float* o, int64_t ldo) {
  vf acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = load(o + r * ldo + c * W);
  for (int i = 0; i < keys; i++) {
    vf vv[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) vv[c] = load(v + i * ldv + c * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const vf weight = set1(p[r * ldp + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = fma(weight, vv[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(o + r * ldo + c * W, acc[r][c]);
}
template <int R> static void weigh_rows(const float* p, int64_t ldp, const float* v, int64_t ldv, int keys, int d, float* o, int64_t ldo) {
  constexpr int C = W == 4 ? 4 : W == 8 ? 2 : 4;
  int c = 0;
  for (; c + C * W <= d; c += C * W) weigh_tile<R, C>(p, ldp, v + c, ldv, keys, o + c, ldo);
  if (C > 2 && c + 2 * W <= d) {
    weigh_tile<R, 2>(p, ldp, v + c, ldv, keys, o + c, ldo);
    c += 2 * W;
  }
  for (; c < d; c += W) weigh_tile<R, 1>(p, ldp, v + c, ldv, keys, o + c, ldo);
}
// o[r] += sum over i of p[r * ldp + i] * v[i], one key after the other.
static void weigh(const float* p, int64_t ldp, int rows, const float* v, int64_t ldv, int keys, int d, float* o, int64_t ldo) {
  for (; rows >= 4; rows -= 4, p += 4 * ldp, o += 4 * ldo) weigh_rows<4>(p, ldp, v, ldv, keys, d, o, ldo);
  if (rows == 3) weigh_rows<3>(p, ldp, v, ldv, keys, d, o, ldo);
  if (rows == 2) weigh_rows<2>(p, ldp, v, ldv, keys, d, o, ldo);
  if (rows == 1) weigh_rows<1>(p, ldp, v, ldv, keys, d, o, ldo);
}
}  // namespace gnomon::GNOMON_ISA
