// The NEON kernels against double precision, and rows among others against rows alone. Prints what differs; the exit status is the number of it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>
#include "table.h"
using namespace gnomon;

static int failures = 0;
static void expect(bool good, const char* what, int a, int b) {
  if (!good) std::printf("%s differs at %d, %d\n", what, a, b), failures++;
}
static bool close(double got, double wanted, double magnitude, int terms) {
  return std::fabs(got - wanted) <= 1.2e-7 * std::fabs(wanted) + 1e-6 * std::sqrt(terms) * magnitude + 1e-40;
}
static std::mt19937 draw(7);
static std::vector<float> normal(size_t n) {
  std::normal_distribution<float> d;
  std::vector<float> x(n);
  for (auto& v : x) v = d(draw);
  return x;
}
static float* aligned(size_t floats) { return static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)); }

static std::vector<float> multiply(const Table& t, const Weights& w, int n, const float* x, int rows) {
  const int kp = padded(w.k);
  float *arranged = aligned(static_cast<size_t>(rows) * kp + 64), *room = aligned(scratch_floats(w.k));
  for (int m = 0; m < rows;) {
    const int some = t.height(rows, m);
    for (int r = 0; r < some; r++) t.arrange(x + static_cast<size_t>(m + r) * w.k, F32, 1, w, arranged + static_cast<size_t>(m) * kp, some, r);
    m += some;
  }
  std::vector<float> y(static_cast<size_t>(rows) * n);
  t.multiply(w, 0, n, arranged, rows, y.data(), n, room);
  std::free(arranged);
  std::free(room);
  return y;
}

// What products in whole numbers make of activations, from the contract: spans as d * q.
static std::vector<double> rounded(const std::vector<float>& x, size_t span, float most) {
  std::vector<double> seen(x.size());
  for (size_t b = 0; b < x.size(); b += span) {
    float top = 0;
    for (size_t i = b; i < b + span; i++) top = std::fmax(top, std::fabs(x[i]));
    for (size_t i = b; i < b + span; i++) seen[i] = static_cast<double>(std::nearbyint(x[i] * (most / top))) * (top / most);
  }
  return seen;
}

static void products(const Table& t, Codec codec, int k, int group) {
  const bool bytes = codec == I4 || codec == I8, whole = bytes || codec == S4 || codec == S8;
  const int n = 23, bits = codec == I4 || codec == S4 ? 4 : codec == I8 || codec == S8 ? 8 : codec <= Q8 ? codec : 32;
  const auto x = normal(static_cast<size_t>(17) * k), dense = normal(static_cast<size_t>(n) * k);
  const auto scales = normal(static_cast<size_t>(n) * (k / group)), biases = normal(static_cast<size_t>(n) * (k / group));
  std::vector<uint8_t> packed(static_cast<size_t>(n) * k * bits / 8 + 64);
  std::vector<double> wide(static_cast<size_t>(n) * k);
  for (int j = 0; j < n; j++)
    for (int i = 0; i < k; i++) {
      const size_t at = static_cast<size_t>(j) * k + i;
      if (bits == 32) {
        wide[at] = dense[at];
        continue;
      }
      const unsigned code = draw() & ((1u << bits) - 1);
      for (int b = 0; b < bits; b++)
        if (code >> b & 1) packed[static_cast<size_t>(j) * k * bits / 8 + (static_cast<size_t>(i) * bits + b) / 8] |= 1 << ((static_cast<size_t>(i) * bits + b) % 8);
      const size_t g = static_cast<size_t>(j) * (k / group) + i / group;
      wide[at] = static_cast<double>(code) * scales[g] + biases[g];
    }
  const auto seen = bytes ? rounded(x, 32, 127.0f) : whole ? rounded(x, group, 32512.0f) : std::vector<double>(x.begin(), x.end());
  const Weights w{bits == 32 ? reinterpret_cast<const uint8_t*>(dense.data()) : packed.data(), scales.data(), biases.data(), static_cast<int64_t>(k) * bits / 8, k, group, codec, F32};
  std::vector<std::vector<float>> alone;
  for (int m = 0; m < 17; m++) {
    alone.push_back(multiply(t, w, n, x.data() + static_cast<size_t>(m) * k, 1));
    for (int j = 0; j < n; j++) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < k; i++) {
        const double v = seen[static_cast<size_t>(m) * k + i], p = v * wide[static_cast<size_t>(j) * k + i];
        // Code times scale and bias are added apart there.
        sum += p, magnitude += std::fabs(p) + (whole ? 2 * std::fabs(v * biases[static_cast<size_t>(j) * (k / group) + i / group]) : 0);
      }
      expect(close(alone[m][j], sum, magnitude, k), "a product", codec, j);
    }
  }
  for (int rows : {2, 3, 4, 5, 6, 8, 9, 17}) {
    const auto y = multiply(t, w, n, x.data(), rows);
    for (int m = 0; m < rows; m++) expect(!std::memcmp(y.data() + static_cast<size_t>(m) * n, alone[m].data(), static_cast<size_t>(n) * 4), "a row among others", codec, rows);
  }
}

static void rows(const Table& t, int n) {
  const auto x = normal(n), w = normal(n);
  std::vector<float> y(n + 64);
  double squares = 0, total = 0, top = -INFINITY;
  for (int i = 0; i < n; i++) squares += static_cast<double>(x[i]) * x[i], top = std::fmax(top, x[i]);
  t.rms_norm(x.data(), w.data(), n, 1e-5f, y.data());
  for (int i = 0; i < n; i++) expect(close(y[i], x[i] / std::sqrt(squares / n + 1e-5) * w[i], std::fabs(x[i] * w[i]), n), "rms_norm", n, i);
  expect(t.row_max(x.data(), n) == static_cast<float>(top), "row_max", n, 0);
  for (int i = 0; i < n; i++) total += std::exp(static_cast<double>(x[i]) - static_cast<float>(top));
  expect(close(t.exp_sum(x.data(), n, static_cast<float>(top), y.data()), total, total, n), "exp_sum", n, 0);
  t.gate(SILU, x.data(), w.data(), n, y.data());
  for (int i = 0; i < n; i++) expect(close(y[i], x[i] / (1 + std::exp(-static_cast<double>(x[i]))) * w[i], std::fabs(x[i] * w[i]), 4), "silu", n, i);
  t.gate(GELU_ERF, x.data(), w.data(), n, y.data());
  for (int i = 0; i < n; i++) expect(close(y[i], 0.5 * x[i] * (1 + std::erf(x[i] / std::sqrt(2.0))) * w[i], std::fabs(x[i] * w[i]), 9), "gelu", n, i);
  for (Type type : {F16, BF16}) {
    std::vector<uint16_t> half(n);
    t.from_f32(x.data(), type, n, half.data());
    t.to_f32(half.data(), type, n, y.data());
    for (int i = 0; i < n; i++) expect(std::fabs(y[i] - x[i]) <= std::fabs(x[i]) * (type == F16 ? 4.9e-4 : 3.91e-3) + 3e-8, "rounding", n, i);
  }
}

static void attend(const Table& t, int d, int keys) {
  const auto q = normal(static_cast<size_t>(5) * d), k = normal(static_cast<size_t>(keys) * d);
  std::vector<float> s(5 * keys), o(5 * d, 0.0f);
  t.scores(q.data(), d, 5, k.data(), d, keys, d, 0.25f, s.data(), keys);
  for (int r = 0; r < 5; r++)
    for (int i = 0; i < keys; i++) {
      double sum = 0, magnitude = 0;
      for (int c = 0; c < d; c++) sum += static_cast<double>(q[r * d + c]) * k[i * d + c], magnitude += std::fabs(static_cast<double>(q[r * d + c]) * k[i * d + c]);
      expect(close(s[r * keys + i], sum / 4, magnitude, d), "a score", r, i);
    }
  t.weigh(s.data(), keys, 5, k.data(), d, keys, d, o.data(), d);
  for (int r = 0; r < 5; r++)
    for (int c = 0; c < d; c++) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < keys; i++) sum += static_cast<double>(s[r * keys + i]) * k[i * d + c], magnitude += std::fabs(static_cast<double>(s[r * keys + i]) * k[i * d + c]);
      expect(close(o[r * d + c], sum, magnitude, keys), "a weighted value", r, c);
    }
}

// Codes of vectors: what they decode to, read bit by bit, and how near that is to the vectors.
static void codes(const Table& t, Coding coding, int bits, Type type) {
  constexpr int dim = 64, group = 32, rows = 5;
  const int levels = 1 << bits;
  std::vector<float> level(std::max(levels, 16)), bounds(levels - 1), signs(dim);
  for (int i = 0; i < static_cast<int>(level.size()); i++) level[i] = 4.0f * (i % levels + 0.5f) / levels - 2.0f;
  for (int i = 0; i + 1 < levels; i++) bounds[i] = 4.0f * (i + 1) / levels - 2.0f;
  for (int i = 0; i < dim; i++) signs[i] = i % 3 ? 1.0f : -1.0f;
  const RowCodes c{coding, bits, group, dim, type, level.data(), bounds.data(), signs.data()};
  const int numbers = c.groups() * (coding == ROTATED ? 1 : 2), size = c.code_bytes() + numbers * static_cast<int>(type_size(type));
  const auto x = normal(rows * dim);
  std::vector<uint8_t> words(rows * size);
  std::vector<float> room(dim), y(rows * dim), part(rows * group), n(numbers);
  for (int r = 0; r < rows; r++) t.encode_codes(c, &x[r * dim], &words[r * size], room.data());
  t.decode_codes(c, words.data(), size, rows, 0, dim, y.data(), dim);
  t.decode_codes(c, words.data(), size, rows, group, group, part.data(), group);
  for (int r = 0; r < rows; r++) {
    const uint8_t* row = &words[r * size];
    t.to_f32(row + c.code_bytes(), type, numbers, n.data());
    for (int i = 0; i < dim; i++) {
      int code = 0;
      for (int b = 0; b < bits; b++) code |= (row[(i * bits + b) / 8] >> (i * bits + b) % 8 & 1) << b;
      if (coding == SHIFTED && bits == 8) code = static_cast<int8_t>(code);
      const double first = n[i / group], second = coding == ROTATED ? 0 : n[c.groups() + i / group];
      const double wanted = coding == AFFINE ? code * first + second : coding == SHIFTED ? (code + second) * first : level[code] * first;
      expect(close(y[r * dim + i], wanted, std::fabs(code * first) + std::fabs(second), 1), "a decoded code", bits, i);
      if (i >= group) expect(part[r * group + i - group] == y[r * dim + i], "a part of a row", bits, i);
    }
    if (coding == ROTATED) t.turn_back(c, &y[r * dim]);
    double error = 0, whole = 0;
    for (int i = 0; i < dim; i++) error += std::pow(y[r * dim + i] - x[r * dim + i], 2), whole += std::pow(x[r * dim + i], 2);
    expect(error <= whole * (bits == 2 ? 0.3 : 0.1), "what codes keep", bits, r);
  }
}

int main() {
  const Table& t = *table_neon();
  for (Codec codec : {Q2, Q3, Q5, Q6, I4, I8, S4, S8})
    for (int group : {32, 64}) products(t, codec, 192, group);
  products(t, D_F32, 100, 100);
  for (int n : {1, 15, 16, 83, 640}) rows(t, n);
  attend(t, 64, 70);
  attend(t, 16, 3);
  for (int bits : {2, 3, 4, 5, 6, 8}) codes(t, AFFINE, bits, F32);
  for (int bits : {2, 4, 5, 8}) codes(t, SHIFTED, bits, F16);
  for (int bits : {2, 3, 4, 5, 8}) codes(t, ROTATED, bits, F16);
  std::printf("%s: %d differences\n", t.name, failures);
  return failures ? 1 : 0;
}
