// Sixteen lanes in two registers of eight.
#pragma once
#include <immintrin.h>
#include <string.h>
#include "table.h"
#define INLINE static inline __attribute__((always_inline))
namespace gnomon::GNOMON_ISA {
constexpr int W = 8, PARTS = 2, TILE_ROWS = 4, PANEL_TILE = 3, DIRECT_ROWS = 2;
using vf = __m256;
using vi = __m256i;

INLINE vf zero() { return _mm256_setzero_ps(); }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
INLINE vi first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0)); }
INLINE vf load_n(const float* p, int n) { return n >= 8 ? load(p) : _mm256_maskload_ps(p, first(n)); }
INLINE void store_n(float* p, int n, vf v) {
  if (n >= 8) store(p, v);
  else _mm256_maskstore_ps(p, first(n), v);
}
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf sqrt(vf a) { return _mm256_sqrt_ps(a); }
INLINE vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf exp2i(vf n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// y * 2^n for whole n within [-252, 254], in two steps: neither factor leaves the range of exponents, and only the second product can round.
INLINE vf times_exp2(vf y, vf n) {
  const vf half = round(mul(n, set1(0.5f)));
  return mul(mul(y, exp2i(half)), exp2i(sub(n, half)));
}
INLINE vf where_less(vf x, vf limit, vf y, vf otherwise) { return _mm256_blendv_ps(otherwise, y, _mm256_cmp_ps(x, limit, _CMP_LT_OQ)); }
INLINE vf where_greater(vf x, vf limit, vf y, vf otherwise) { return _mm256_blendv_ps(otherwise, y, _mm256_cmp_ps(x, limit, _CMP_GT_OQ)); }
INLINE vf where_nan(vf x, vf y, vf otherwise) { return _mm256_blendv_ps(otherwise, y, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
INLINE bool any_nan(vf x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
INLINE vf load_half(const uint16_t* p, int n, Type t) {
  __m128i h;
  if (n >= 8) {
    h = _mm_loadu_si128((const __m128i*)p);
  } else {
    uint16_t some[8] = {};
    for (int i = 0; i < n; i++) some[i] = p[i];
    h = _mm_loadu_si128((const __m128i*)some);
  }
  if (t == F16) return _mm256_cvtph_ps(h);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
// One number in all lanes.
INLINE vf spread_half(const uint16_t* p, Type t) {
  float one[W];
  store(one, load_half(p, 1, t));
  return set1(one[0]);
}
INLINE void store_half(uint16_t* p, int n, Type t, vf v) {
  __m128i h;
  if (t == F16) {
    h = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    vi u = _mm256_castps_si256(v);
    vi odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    vi r = _mm256_add_epi32(u, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd));
    vi quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    r = _mm256_srli_epi32(r, 16);
    h = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }
  if (n >= 8) {
    _mm_storeu_si128((__m128i*)p, h);
  } else {
    uint16_t some[8];
    _mm_storeu_si128((__m128i*)some, h);
    for (int i = 0; i < n; i++) p[i] = some[i];
  }
}

INLINE __m128 quarter(const vf* v) {
  __m256 h = _mm256_add_ps(v[0], v[1]);
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
INLINE float sum(const vf* v) {
  __m128 q = quarter(v);
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE void sum4(const vf* a, const vf* b, const vf* c, const vf* d, float* out) {
  __m128 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
  __m128 pq = _mm_add_ps(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
  __m128 rs = _mm_add_ps(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(pq, rs), _mm_movehl_ps(rs, pq)));
}

struct Linear {
  float scale, bias;
  void __attribute__((always_inline)) group(float s, float b) { scale = s, bias = b; }
  vf __attribute__((always_inline)) value(vi codes) const {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(scale), _mm256_set1_ps(bias));
  }
};
template <int CODEC> struct Unpack;
// `h` counts registers: lanes 8 * (h % 2) .. of the block's half h / 2.
template <> struct Unpack<Q4> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    const vi shift = _mm256_set_epi32(8, 8, 8, 8, 0, 0, 0, 0);
    vi words = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    vi v = _mm256_srlv_epi32(words, _mm256_add_epi32(shift, _mm256_set1_epi32(16 * (h & 1) + 4 * (h >> 1))));
    return value(_mm256_and_si256(v, _mm256_set1_epi32(15)));
  }
};
template <> struct Unpack<Q2> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    const vi shift = _mm256_set_epi32(12, 12, 8, 8, 4, 4, 0, 0);
    long long two;
    memcpy(&two, p, 8);
    vi v = _mm256_srlv_epi32(_mm256_set1_epi64x(two), _mm256_add_epi32(shift, _mm256_set1_epi32(16 * (h & 1) + 2 * (h >> 1))));
    return value(_mm256_and_si256(v, _mm256_set1_epi32(3)));
  }
};
template <> struct Unpack<Q3> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    uint16_t low;
    memcpy(&low, p + 3 * h, 2);
    const vi shift = _mm256_set_epi32(21, 18, 15, 12, 9, 6, 3, 0);
    vi v = _mm256_srlv_epi32(_mm256_set1_epi32((int)(low | (uint32_t)p[3 * h + 2] << 16)), shift);
    return value(_mm256_and_si256(v, _mm256_set1_epi32(7)));
  }
};
INLINE vi windows(uint32_t a, uint32_t b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi32((int)a)), _mm_set1_epi32((int)b), 1);
}
template <> struct Unpack<Q5> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    uint32_t low;
    memcpy(&low, p + 5 * h, 4);
    uint64_t v = low | (uint64_t)p[5 * h + 4] << 32;
    const vi shift = _mm256_set_epi32(15, 10, 5, 0, 15, 10, 5, 0);
    vi c = _mm256_srlv_epi32(windows((uint32_t)v, (uint32_t)(v >> 20)), shift);
    return value(_mm256_and_si256(c, _mm256_set1_epi32(31)));
  }
};
template <> struct Unpack<Q6> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    uint32_t low, high;
    memcpy(&low, p + 6 * h, 4);
    memcpy(&high, p + 6 * h + 2, 4);
    const vi shift = _mm256_set_epi32(18, 12, 6, 0, 18, 12, 6, 0);
    vi c = _mm256_srlv_epi32(windows(low, high >> 8), shift);
    return value(_mm256_and_si256(c, _mm256_set1_epi32(63)));
  }
};
template <> struct Unpack<Q8> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    return value(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * h))));
  }
};
template <> struct Unpack<D_F32> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load((const float*)p + 8 * h); }
};
template <> struct Unpack<D_F16> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load_half((const uint16_t*)p + 8 * h, 8, F16); }
};
template <> struct Unpack<D_BF16> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load_half((const uint16_t*)p + 8 * h, 8, BF16); }
};

// The integer path: lanes are columns.
INLINE float largest(vf v) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE vi iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE void istore(void* p, vi v) { _mm256_storeu_si256((__m256i*)p, v); }
INLINE vi four(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
INLINE vf to_float(vi v) { return _mm256_cvtepi32_ps(v); }
INLINE vi low_halves(vi v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE vi high_halves(vi v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
INLINE vf half_of(const uint32_t* words, int high, Type t) {
  const vi v = iload(words);
  if (t == BF16) return _mm256_castsi256_ps(high ? _mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(v, 16));
  const vi h = high ? _mm256_srli_epi32(v, 16) : _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}
// `bytes` (at most 64) of 8 rows: word j of row c goes to out[TILE * j + c].
INLINE void turn(const uint8_t* const* p, int bytes, uint32_t* out) {
  for (int at = 0; at < bytes; at += 32, out += 8 * TILE) {
    vi r[8];
    if (bytes - at >= 32) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) r[i] = iload(p[i] + at);
    } else {
      alignas(32) uint8_t room[8][32] = {};
      for (int i = 0; i < 8; i++) {
        memcpy(room[i], p[i] + at, (size_t)(bytes - at));
        r[i] = iload(room[i]);
      }
    }
    vi t[8];
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      const vi a = _mm256_unpacklo_epi32(r[i], r[i + 1]), b = _mm256_unpackhi_epi32(r[i], r[i + 1]);
      const vi c = _mm256_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm256_unpackhi_epi32(r[i + 2], r[i + 3]);
      t[i] = _mm256_unpacklo_epi64(a, c), t[i + 1] = _mm256_unpackhi_epi64(a, c);
      t[i + 2] = _mm256_unpacklo_epi64(b, d), t[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      istore(out + TILE * c, _mm256_permute2x128_si256(t[c], t[4 + c], 0x20));
      istore(out + TILE * (4 + c), _mm256_permute2x128_si256(t[c], t[4 + c], 0x31));
    }
  }
}
// Activations of 16 bits for 4-bit codes are taken by bytes: see halves.inl.
#define GNOMON_BY_HALVES
template <int BITS> constexpr bool IN_PAIRS = BITS == 8;
// GCC would add up many products before it adds them to a sum, and spill them.
INLINE vi in_turn(vi sum) {
  asm("" : "+x"(sum));
  return sum;
}
// Two bytes: words of 16 bits, whose pairs of products are added in 32.
template <int BITS, int BYTES> struct Codes {
  vi even, odd;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : even(_mm256_and_si256(v, _mm256_set1_epi16(255))), odd(_mm256_srli_epi16(v, 8)) {}
};
template <int BITS, int BYTES> struct Dot {
  vi a = _mm256_setzero_si256();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) {
    a = in_turn(_mm256_add_epi32(a, _mm256_madd_epi16(w.even, f.x)));
    a = in_turn(_mm256_add_epi32(a, _mm256_madd_epi16(w.odd, f.y)));
  }
  vi __attribute__((always_inline)) sum() const { return a; }
};
// One byte: pairs of products are added in 16 bits. Eight steps of 4-bit codes stay below 2^15; 8-bit codes go by halves.
template <> struct Codes<4, 1> {
  vi c;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : c(v) {}
};
template <> struct Codes<8, 1> {
  vi low, high;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : low(low_halves(v)), high(high_halves(v)) {}
};
template <> struct Dot<4, 1> {
  vi a = _mm256_setzero_si256();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) { a = in_turn(_mm256_add_epi16(a, _mm256_maddubs_epi16(w.c, f.x))); }
  vi __attribute__((always_inline)) sum() const { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
};
template <> struct Dot<8, 1> {
  vi low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) {
    low = in_turn(_mm256_add_epi16(low, _mm256_maddubs_epi16(w.low, f.x)));
    high = in_turn(_mm256_add_epi16(high, _mm256_maddubs_epi16(w.high, f.x)));
  }
  vi __attribute__((always_inline)) sum() const {
    return _mm256_add_epi32(_mm256_madd_epi16(low, _mm256_set1_epi16(1)), _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
  }
};

// Codes of keys and values in their natural order: 8 of 16 that begin at p, with whatever comes before and behind them in the higher bits.
template <int BITS> INLINE vi raw_codes(const uint8_t* p, int part) {
  p += BITS * part;
  if constexpr (BITS == 8) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  } else if constexpr (BITS == 4) {
    return _mm256_srlv_epi32(_mm256_broadcastd_epi32(_mm_loadu_si32(p)), _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
  } else if constexpr (BITS == 2) {
    uint16_t w;
    memcpy(&w, p, 2);
    return _mm256_srlv_epi32(_mm256_set1_epi32(w), _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0));
  } else if constexpr (BITS == 3) {
    uint16_t low;
    memcpy(&low, p, 2);
    return _mm256_srlv_epi32(_mm256_set1_epi32((int)(low | (uint32_t)p[2] << 16)), _mm256_set_epi32(21, 18, 15, 12, 9, 6, 3, 0));
  } else if constexpr (BITS == 5) {
    uint32_t low;
    memcpy(&low, p, 4);
    const uint64_t v = low | (uint64_t)p[4] << 32;
    return _mm256_srlv_epi32(windows((uint32_t)v, (uint32_t)(v >> 20)), _mm256_set_epi32(15, 10, 5, 0, 15, 10, 5, 0));
  } else {
    uint32_t low, high;
    memcpy(&low, p, 4);
    memcpy(&high, p + 2, 4);
    return _mm256_srlv_epi32(windows(low, high >> 8), _mm256_set_epi32(18, 12, 6, 0, 18, 12, 6, 0));
  }
}
template <int BITS> INLINE vi clean(vi raw) { return BITS == 8 ? raw : _mm256_and_si256(raw, _mm256_set1_epi32((1 << BITS) - 1)); }
INLINE vi signed_codes(const uint8_t* p, int part) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * part))); }
// What 2^BITS codes stand for, at least 16 of them in memory; `by` sets a factor.
template <int BITS> struct Levels {
  const float* level;
  vf s;
  void __attribute__((always_inline)) set(const float* p) { level = p; }
  void __attribute__((always_inline)) by(vf x) { s = x; }
  vf __attribute__((always_inline)) at(vi raw) const { return mul(_mm256_i32gather_ps(level, clean<BITS>(raw), 4), s); }
};
struct EightLevels {
  vf level, scaled;
  void __attribute__((always_inline)) set(const float* p) { level = load(p); }
  void __attribute__((always_inline)) by(vf s) { scaled = mul(level, s); }
  vf __attribute__((always_inline)) at(vi raw) const { return _mm256_permutevar8x32_ps(scaled, raw); }
};
template <> struct Levels<2> : EightLevels {};
template <> struct Levels<3> : EightLevels {};
template <> struct Levels<4> {
  vf low, high, a, b;
  void __attribute__((always_inline)) set(const float* p) { low = load(p), high = load(p + 8); }
  void __attribute__((always_inline)) by(vf s) { a = mul(low, s), b = mul(high, s); }
  vf __attribute__((always_inline)) at(vi raw) const {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(a, raw), _mm256_permutevar8x32_ps(b, raw), _mm256_castsi256_ps(_mm256_slli_epi32(raw, 28)));
  }
};
constexpr int LOOKED_UP = 0;
template <int BITS> struct Affine;
template <int BITS> struct Shifted;
}  // namespace gnomon
