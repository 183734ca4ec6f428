// The inner loops of recurrent layers.
namespace gnomon::GNOMON_ISA {

// R rows of a gated delta state over one token: s *= g; d = (v - s . k) * beta; s += k d; y = s . q. `g` is one number, or one per column.
template <int R> INLINE void delta_rows(float* s, int n, const float* k, const float* q, const float* g, bool each, const float* v, float beta, float* y) {
  vf acc[R][PARTS];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PARTS; p++) acc[r][p] = zero();
  const vf one = set1(g[0]);
  for (int i = 0; i < n; i += 16)
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
      const int at = i + p * W;
      const vf kv = load(k + at), decay = each ? load(g + at) : one;
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const vf x = mul(load(s + (size_t)r * n + at), decay);
        store(s + (size_t)r * n + at, x);
        acc[r][p] = fma(x, kv, acc[r][p]);
      }
    }
  vf delta[R];
  for (int r = 0; r < R; r++) delta[r] = set1((v[r] - sum(acc[r])) * beta);
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PARTS; p++) acc[r][p] = zero();
  for (int i = 0; i < n; i += 16)
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
      const int at = i + p * W;
      const vf kv = load(k + at), qv = load(q + at);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const vf x = fma(kv, delta[r], load(s + (size_t)r * n + at));
        store(s + (size_t)r * n + at, x);
        acc[r][p] = fma(x, qv, acc[r][p]);
      }
    }
  for (int r = 0; r < R; r++) y[r] = sum(acc[r]);
}
static void delta_step(float* s, int rows, int n, const float* k, const float* q, const float* g, bool each, const float* v, float beta, float* y) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) delta_rows<4>(s + (size_t)r * n, n, k, q, g, each, v + r, beta, y + r);
  for (; r < rows; r++) delta_rows<1>(s + (size_t)r * n, n, k, q, g, each, v + r, beta, y + r);
}

// y[c] = sum over j of x[j][c] * w[j][c], then perhaps silu. x holds `taps` rows of channels.
static void convolve(const float* const* x, const float* w, int taps, int channels, bool silu, float* y) {
  for (int c = 0; c < channels; c += W) {
    vf acc = zero();
    for (int j = 0; j < taps; j++) acc = fma(load_row(x[j], c, channels), load_row(w + (size_t)j * channels, c, channels), acc);
    store_row(y, c, channels, silu ? activate<SILU>(acc) : acc);
  }
}
}  // namespace gnomon::GNOMON_ISA
