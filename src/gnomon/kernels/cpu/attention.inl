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
// s[r * lds + i] = scale * q[r] . k[i]
static void scores(const float* q, int64_t ldq, int rows, const float* k, int64_t ldk, int keys, int d, float scale, float* s, int64_t lds) {
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
