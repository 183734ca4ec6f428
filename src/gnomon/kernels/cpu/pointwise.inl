// Norms, activations and reductions along a row. Lane l adds the values whose place is l modulo 16, then the fixed tree: a row's result doesn't
// depend on where the row lies. Short ends go through the same instructions as whole registers, filled up with zeros.
namespace gnomon::GNOMON_ISA {

// e^x within 2 units in the last place; exact limits, subnormal results, NaN. Cephes' expf with fused steps.
INLINE vf exp(vf x) {
  const vf high = set1(88.8f), low = set1(-104.0f);
  vf t = min(max(x, low), high);
  vf n = round(mul(t, set1(1.44269504088896341f)));
  vf r = fma(n, set1(-0.693359375f), t);
  r = fma(n, set1(2.12194440e-4f), r);
  vf y = fma(r, set1(1.9875691500e-4f), set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = fma(y, mul(r, r), add(r, set1(1.0f)));
  y = times_exp2(y, n);
  y = where_greater(x, high, set1(__builtin_inff()), y);
  y = where_less(x, low, zero(), y);
  return where_nan(x, x, y);
}

INLINE vf load_row(const float* x, int i, int n) { return n - i >= W ? load(x + i) : load_n(x + i, n - i); }
INLINE void store_row(float* y, int i, int n, vf v) {
  if (n - i >= W) store(y + i, v);
  else store_n(y + i, n - i, v);
}

static void rms_norm(const float* x, const float* w, int n, float eps, float* y) {
  vf acc[PARTS];
  for (int q = 0; q < PARTS; q++) acc[q] = zero();
  for (int i = 0; i < n; i += 16)
    for (int q = 0; q < PARTS && i + q * W < n; q++) {
      vf v = load_row(x, i + q * W, n);
      acc[q] = fma(v, v, acc[q]);
    }
  const vf r = set1(1.0f / __builtin_sqrtf(sum(acc) / (float)n + eps));
  for (int i = 0; i < n; i += W) {
    vf v = mul(load_row(x, i, n), r);
    store_row(y, i, n, w ? mul(v, load_row(w, i, n)) : v);
  }
}

static void layer_norm(const float* x, const float* w, const float* b, int n, float eps, float* y) {
  vf acc[PARTS];
  for (int q = 0; q < PARTS; q++) acc[q] = zero();
  for (int i = 0; i < n; i += 16)
    for (int q = 0; q < PARTS && i + q * W < n; q++) acc[q] = add(acc[q], load_row(x, i + q * W, n));
  const float mean = sum(acc) / (float)n;
  for (int q = 0; q < PARTS; q++) acc[q] = zero();
  for (int i = 0; i < n; i += 16)
    for (int q = 0; q < PARTS && i + q * W < n; q++) {
      const int at = i + q * W;
      if (n - at >= W) {
        vf d = sub(load(x + at), set1(mean));
        acc[q] = fma(d, d, acc[q]);
      } else {
        float rest[W] = {};
        for (int j = at; j < n; j++) rest[j - at] = x[j] - mean;
        vf d = load(rest);
        acc[q] = fma(d, d, acc[q]);
      }
    }
  const vf r = set1(1.0f / __builtin_sqrtf(sum(acc) / (float)n + eps)), m = set1(mean);
  for (int i = 0; i < n; i += W) {
    vf v = mul(sub(load_row(x, i, n), m), r);
    if (w) v = mul(v, load_row(w, i, n));
    if (b) v = add(v, load_row(b, i, n));
    store_row(y, i, n, v);
  }
}

// tanh through e^-2|x|: (1 - e) / (1 + e), with a series where that would cancel.
INLINE vf tanh(vf x) {
  vf a = max(x, sub(zero(), x));
  vf e = exp(mul(a, set1(-2.0f)));
  vf t = div(sub(set1(1.0f), e), add(set1(1.0f), e));
  vf s = mul(x, x);
  vf p = fma(s, set1(-5.70498872745e-3f), set1(2.06390887954e-2f));
  p = fma(p, s, set1(-5.37397155531e-2f));
  p = fma(p, s, set1(1.33314422036e-1f));
  p = fma(p, s, set1(-3.33332819422e-1f));
  p = fma(mul(p, s), x, x);
  t = where_less(x, zero(), sub(zero(), t), t);
  t = where_less(a, set1(0.625f), p, t);
  return where_nan(x, x, t);
}
// erf within 4e-7 absolutely (Abramowitz and Stegun 7.1.26 would give 1.5e-7 at a division more; the relative error matters near 0).
INLINE vf erf(vf x) {
  vf a = max(x, sub(zero(), x));
  vf t = div(set1(1.0f), fma(set1(0.5f), a, set1(1.0f)));
  // Numerical Recipes' erfcc: fractional error of erfc below 1.2e-7.
  vf p = fma(t, set1(0.17087277f), set1(-0.82215223f));
  p = fma(p, t, set1(1.48851587f));
  p = fma(p, t, set1(-1.13520398f));
  p = fma(p, t, set1(0.27886807f));
  p = fma(p, t, set1(-0.18628806f));
  p = fma(p, t, set1(0.09678418f));
  p = fma(p, t, set1(0.37409196f));
  p = fma(p, t, set1(1.00002368f));
  p = fma(p, t, set1(-1.26551223f));
  vf c = mul(t, exp(fma(sub(zero(), a), a, p)));
  vf e = sub(set1(1.0f), c);
  vf s = mul(x, x);
  vf q = fma(s, set1(7.853861353153693e-5f), set1(-8.010193625184903e-4f));
  q = fma(q, s, set1(5.188327685732524e-3f));
  q = fma(q, s, set1(-2.685381193529856e-2f));
  q = fma(q, s, set1(1.128358514861418e-1f));
  q = fma(q, s, set1(-3.761262582423300e-1f));
  q = fma(q, s, set1(1.128379165726710f));
  e = where_less(x, zero(), sub(zero(), e), e);
  e = where_less(a, set1(1.0f), mul(q, x), e);
  return where_nan(x, x, e);
}

template <Activation A> INLINE vf activate(vf x) {
  if constexpr (A == SILU) return div(x, add(set1(1.0f), exp(sub(zero(), x))));
  if constexpr (A == SIGMOID) return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x))));
  if constexpr (A == GELU_TANH) {
    vf inner = mul(set1(0.7978845608028654f), fma(mul(mul(x, x), x), set1(0.044715f), x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
  }
  return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.7071067811865476f)))));
}
template <Activation A> INLINE void gate_all(const float* g, const float* u, size_t n, float* y) {
  for (size_t i = 0; i < n; i += W) {
    const int left = n - i < (size_t)W ? (int)(n - i) : W;
    vf a = activate<A>(load_n(g + i, left));
    store_n(y + i, left, u ? mul(a, load_n(u + i, left)) : a);
  }
}
static void gate(Activation a, const float* g, const float* u, size_t n, float* y) {
  switch (a) {
    case SILU: return gate_all<SILU>(g, u, n, y);
    case GELU_TANH: return gate_all<GELU_TANH>(g, u, n, y);
    case GELU_ERF: return gate_all<GELU_ERF>(g, u, n, y);
    case SIGMOID: return gate_all<SIGMOID>(g, u, n, y);
  }
}

static void add_rows(const float* a, const float* b, size_t n, float* y) {
  for (size_t i = 0; i < n; i += W) {
    const int left = n - i < (size_t)W ? (int)(n - i) : W;
    store_n(y + i, left, add(load_n(a + i, left), load_n(b + i, left)));
  }
}

// The largest value, NaN if there is one; -inf for none.
static float row_max(const float* x, int n) {
  vf m = set1(-__builtin_inff());
  bool nan = false;
  int i = 0;
  for (; i + W <= n; i += W) {
    vf v = load(x + i);
    nan = nan || any_nan(v);
    m = max(m, v);
  }
  float best = -__builtin_inff();
  float lane[W];
  store(lane, m);
  for (int l = 0; l < W; l++) best = lane[l] > best ? lane[l] : best;
  for (; i < n; i++) {
    nan = nan || x[i] != x[i];
    best = x[i] > best ? x[i] : best;
  }
  return nan ? __builtin_nanf("") : best;
}

// y = e^(x - m), and their sum.
static float exp_sum(const float* x, int n, float m, float* y) {
  vf acc[PARTS];
  for (int q = 0; q < PARTS; q++) acc[q] = zero();
  const vf mv = set1(m);
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int q = 0; q < PARTS; q++) {
      vf e = exp(sub(load(x + i + q * W), mv));
      if (y) store(y + i + q * W, e);
      acc[q] = add(acc[q], e);
    }
  if (i < n) {
    float rest[16];
    for (int j = 0; j < 16; j++) rest[j] = i + j < n ? x[i + j] - m : -__builtin_inff();
    for (int q = 0; q < PARTS; q++) {
      vf e = exp(load(rest + q * W));
      acc[q] = add(acc[q], e);
      store(rest + q * W, e);
    }
    if (y) memcpy(y + i, rest, (size_t)(n - i) * 4);
  }
  return sum(acc);
}

static void scale_row(float* x, int n, float by) {
  const vf b = set1(by);
  for (int i = 0; i < n; i += W) store_row(x, i, n, mul(load_row(x, i, n), b));
}
static void divide_row(float* x, int n, float by) {
  const vf b = set1(by);
  for (int i = 0; i < n; i += W) store_row(x, i, n, div(load_row(x, i, n), b));
}

// Pairs (x[i], x[i + h]), or (x[2i], x[2i + 1]) when `traditional`, turned by the angles whose cosines and sines are given.
static void rotate(const float* x, const float* cos, const float* sin, int h, bool traditional, float* y) {
  if (traditional) {
    for (int i = 0; i < h; i++) {
      const float a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = a * cos[i] - b * sin[i];
      y[2 * i + 1] = a * sin[i] + b * cos[i];
    }
    return;
  }
  for (int i = 0; i < h; i += W) {
    vf a = load_row(x, i, h), b = load_row(x + h, i, h), c = load_row(cos, i, h), s = load_row(sin, i, h);
    store_row(y, i, h, sub(mul(a, c), mul(b, s)));
    store_row(y + h, i, h, add(mul(a, s), mul(b, c)));
  }
}
}  // namespace gnomon::GNOMON_ISA
