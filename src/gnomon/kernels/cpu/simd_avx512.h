// Sixteen lanes in one register.
#pragma once
#include <immintrin.h>
#include <string.h>
#include "table.h"
#define INLINE static inline __attribute__((always_inline))
namespace gnomon::GNOMON_ISA {
constexpr int W = 16, PARTS = 1, TILE_ROWS = 6, PANEL_TILE = 4, DIRECT_ROWS = 4;
using vf = __m512;
using vi = __m512i;

INLINE vf zero() { return _mm512_setzero_ps(); }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
INLINE __mmask16 first(int n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }
INLINE vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE void store_n(float* p, int n, vf v) { _mm512_mask_storeu_ps(p, first(n), v); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf sqrt(vf a) { return _mm512_sqrt_ps(a); }
INLINE vf round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// y * 2^n for whole n
INLINE vf times_exp2(vf y, vf n) { return _mm512_scalef_ps(y, n); }
// a where a < b is false and comparable... selects y where x is below the limit
INLINE vf where_less(vf x, vf limit, vf y, vf otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), otherwise, y);
}
INLINE vf where_greater(vf x, vf limit, vf y, vf otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), otherwise, y);
}
INLINE vf where_nan(vf x, vf y, vf otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), otherwise, y);
}
INLINE bool any_nan(vf x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
INLINE vf load_half(const uint16_t* p, int n, Type t) {
  __m256i h = _mm256_maskz_loadu_epi16(first(n), p);
  if (t == F16) return _mm512_cvtph_ps(h);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
// One number in all lanes.
INLINE vf spread_half(const uint16_t* p, Type t) {
  if (t == F16) return _mm512_cvtph_ps(_mm256_set1_epi16((short)*p));
  return _mm512_castsi512_ps(_mm512_set1_epi32((int)((uint32_t)*p << 16)));
}
INLINE void store_half(uint16_t* p, int n, Type t, vf v) {
  __m256i h;
  if (t == F16) {
    h = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
    r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
    h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
  }
  _mm256_mask_storeu_epi16(p, first(n), h);
}

// The tree: lanes 8 apart, then 4, 2, 1.
INLINE __m128 quarter(vf v) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
INLINE float sum(const vf* v) {
  __m128 q = quarter(v[0]);
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
INLINE __m128 sum4_of(vf a, vf b, vf c, vf d) {
  __m128 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
  __m128 pq = _mm_add_ps(_mm_unpacklo_ps(p, q), _mm_unpackhi_ps(p, q));
  __m128 rs = _mm_add_ps(_mm_unpacklo_ps(r, s), _mm_unpackhi_ps(r, s));
  return _mm_add_ps(_mm_movelh_ps(pq, rs), _mm_movehl_ps(rs, pq));
}
INLINE void sum4(const vf* a, const vf* b, const vf* c, const vf* d, float* out) { _mm_storeu_ps(out, sum4_of(*a, *b, *c, *d)); }

INLINE vi lanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

template <int CODEC> struct Unpack;
// Up to 16 code values fit a table of one register, so looking up scales too: no conversion and no multiplication for a weight.
template <int BITS> struct Lookup {
  vf table;
  INLINE vf make(float s, float b) {
    vi codes = _mm512_and_si512(lanes(), _mm512_set1_epi32((1 << BITS) - 1));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(s), _mm512_set1_ps(b));
  }
  void __attribute__((always_inline)) group(float s, float b) { table = make(s, b); }
};
template <> struct Unpack<Q4> : Lookup<4> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    const vi shift = _mm512_set_epi32(24, 24, 24, 24, 16, 16, 16, 16, 8, 8, 8, 8, 0, 0, 0, 0);
    vi words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, _mm512_add_epi32(shift, _mm512_set1_epi32(4 * h))), table);
  }
};
template <> struct Unpack<Q2> : Lookup<2> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    const vi shift = _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
    long long two;
    memcpy(&two, p, 8);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(two), _mm512_add_epi32(shift, _mm512_set1_epi32(2 * h))), table);
  }
};
template <> struct Unpack<Q3> : Lookup<3> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    uint32_t low;
    uint16_t high;
    memcpy(&low, p + 6 * h, 4);
    memcpy(&high, p + 6 * h + 4, 2);
    uint64_t v = (uint64_t)high << 32 | low;
    vi w = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi32((int)(v & 0xffffff))), _mm256_set1_epi32((int)(v >> 24)), 1);
    const vi shift = _mm512_set_epi32(21, 18, 15, 12, 9, 6, 3, 0, 21, 18, 15, 12, 9, 6, 3, 0);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(w, shift), table);
  }
};
struct Linear {
  vf scale, bias;
  void __attribute__((always_inline)) group(float s, float b) {
    scale = _mm512_set1_ps(s);
    bias = _mm512_set1_ps(b);
  }
  vf __attribute__((always_inline)) value(vi codes) const { return _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), scale, bias); }
};
// Four 32-bit windows, each with the codes of four lanes.
INLINE vi windows(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  __m256i lo = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi32((int)a)), _mm_set1_epi32((int)b), 1);
  __m256i hi = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_set1_epi32((int)c)), _mm_set1_epi32((int)d), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
}
template <> struct Unpack<Q5> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    uint64_t v;
    uint16_t t;
    memcpy(&v, p + 10 * h, 8);
    memcpy(&t, p + 10 * h + 8, 2);
    vi w = windows((uint32_t)v, (uint32_t)(v >> 20), (uint32_t)(v >> 40), (uint32_t)(v >> 60) | (uint32_t)t << 4);
    const vi shift = _mm512_set_epi32(15, 10, 5, 0, 15, 10, 5, 0, 15, 10, 5, 0, 15, 10, 5, 0);
    return value(_mm512_and_si512(_mm512_srlv_epi32(w, shift), _mm512_set1_epi32(31)));
  }
};
template <> struct Unpack<Q6> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    const uint8_t* q = p + 12 * h;
    uint32_t a, b, c, d;
    memcpy(&a, q, 4);
    memcpy(&b, q + 3, 4);
    memcpy(&c, q + 6, 4);
    memcpy(&d, q + 8, 4);
    vi w = windows(a, b, c, d >> 8);
    const vi shift = _mm512_set_epi32(18, 12, 6, 0, 18, 12, 6, 0, 18, 12, 6, 0, 18, 12, 6, 0);
    return value(_mm512_and_si512(_mm512_srlv_epi32(w, shift), _mm512_set1_epi32(63)));
  }
};
template <> struct Unpack<Q8> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    return value(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p + 16 * h))));
  }
};
template <> struct Unpack<D_F32> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load((const float*)p + 16 * h); }
};
template <> struct Unpack<D_F16> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load_half((const uint16_t*)p + 16 * h, 16, F16); }
};
template <> struct Unpack<D_BF16> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load_half((const uint16_t*)p + 16 * h, 16, BF16); }
};

// The integer path: lanes are columns.
INLINE float largest(vf v) { return _mm512_reduce_max_ps(v); }
INLINE vi iload(const void* p) { return _mm512_loadu_si512(p); }
INLINE void istore(void* p, vi v) { _mm512_storeu_si512(p, v); }
INLINE vi four(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}
INLINE vf to_float(vi v) { return _mm512_cvtepi32_ps(v); }
INLINE vi low_halves(vi v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE vi high_halves(vi v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
INLINE vf half_of(const uint32_t* words, int high, Type t) {
  const vi v = _mm512_loadu_si512(words);
  if (t == BF16) return _mm512_castsi512_ps(high ? _mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(v, 16));
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(high ? _mm512_srli_epi32(v, 16) : v));
}
INLINE void turn_quads(vi* r, int n) {
#pragma GCC unroll 4
  for (int i = 0; i < n; i += 4) {
    const vi a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    const vi c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
    r[i] = _mm512_unpacklo_epi64(a, c), r[i + 1] = _mm512_unpackhi_epi64(a, c);
    r[i + 2] = _mm512_unpacklo_epi64(b, d), r[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
}
// `bytes` (at most 64) of 16 rows: word j of row c goes to out[16 * j + c].
INLINE void turn(const uint8_t* const* p, int bytes, uint32_t* out) {
  vi r[16];
  if (bytes <= 32) {
    const __mmask32 some = bytes == 32 ? 0xffffffffu : (1u << bytes) - 1;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const int c = i < 4 ? i : i + 4;
      r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(some, p[c])), _mm256_maskz_loadu_epi8(some, p[c + 4]), 1);
    }
    turn_quads(r, 8);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      istore(out + 16 * c, _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88));
      istore(out + 16 * (4 + c), _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd));
    }
    return;
  }
  const __mmask64 some = bytes == 64 ? ~0ull : (1ull << bytes) - 1;
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi8(some, p[i]);
  turn_quads(r, 16);
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const vi a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const vi d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    istore(out + 16 * c, _mm512_shuffle_i32x4(a, b, 0x88));
    istore(out + 16 * (4 + c), _mm512_shuffle_i32x4(d, e, 0x88));
    istore(out + 16 * (8 + c), _mm512_shuffle_i32x4(a, b, 0xdd));
    istore(out + 16 * (12 + c), _mm512_shuffle_i32x4(d, e, 0xdd));
  }
}
#if defined(__AVX512VNNI__)
template <int BITS> constexpr bool IN_PAIRS = false;
template <int BITS, int BYTES> struct Codes {
  vi c;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : c(v) {}
};
template <int BITS, int BYTES> struct Dot {
  vi a = _mm512_setzero_si512();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) { a = _mm512_dpbusd_epi32(a, w.c, f.x); }
  vi __attribute__((always_inline)) sum() const { return a; }
};
template <int BITS> struct Dot<BITS, 2> {
  vi high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) {
    high = _mm512_dpbusd_epi32(high, w.c, f.x);
    low = _mm512_dpbusd_epi32(low, w.c, f.y);
  }
  vi __attribute__((always_inline)) sum() const { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
};
#else
template <int BITS> constexpr bool IN_PAIRS = true;
// GCC would add up many products before it adds them to a sum, and spill them.
INLINE vi in_turn(vi sum) {
  asm("" : "+v"(sum));
  return sum;
}
// Two bytes: words of 16 bits, whose pairs of products are added in 32.
template <int BITS, int BYTES> struct Codes {
  vi even, odd;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : even(_mm512_and_si512(v, _mm512_set1_epi16(255))), odd(_mm512_srli_epi16(v, 8)) {}
};
template <int BITS, int BYTES> struct Dot {
  vi a = _mm512_setzero_si512();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) {
    a = in_turn(_mm512_add_epi32(a, _mm512_madd_epi16(w.even, f.x)));
    a = in_turn(_mm512_add_epi32(a, _mm512_madd_epi16(w.odd, f.y)));
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
  vi a = _mm512_setzero_si512();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) { a = in_turn(_mm512_add_epi16(a, _mm512_maddubs_epi16(w.c, f.x))); }
  vi __attribute__((always_inline)) sum() const { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
};
template <> struct Dot<8, 1> {
  vi low = _mm512_setzero_si512(), high = _mm512_setzero_si512();
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) {
    low = in_turn(_mm512_add_epi16(low, _mm512_maddubs_epi16(w.low, f.x)));
    high = in_turn(_mm512_add_epi16(high, _mm512_maddubs_epi16(w.high, f.x)));
  }
  vi __attribute__((always_inline)) sum() const {
    return _mm512_add_epi32(_mm512_madd_epi16(low, _mm512_set1_epi16(1)), _mm512_madd_epi16(high, _mm512_set1_epi16(16)));
  }
};
#endif

// Codes of keys and values in their natural order: 16 that begin at p, with whatever comes before and behind them in the higher bits.
template <int BITS> INLINE vi raw_codes(const uint8_t* p, int) {
  if constexpr (BITS == 8) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  } else if constexpr (BITS == 4) {
    const vi shift = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    const vi low = _mm512_broadcastd_epi32(_mm_loadu_si32(p));
    return _mm512_srlv_epi32(_mm512_mask_broadcastd_epi32(low, 0xff00, _mm_loadu_si32(p + 4)), shift);
  } else if constexpr (BITS == 2) {
    const vi shift = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_srlv_epi32(_mm512_broadcastd_epi32(_mm_loadu_si32(p)), shift);
  } else if constexpr (BITS == 3) {
    uint32_t low;
    uint16_t high;
    memcpy(&low, p, 4);
    memcpy(&high, p + 4, 2);
    const uint64_t v = (uint64_t)high << 32 | low;
    const vi shift = _mm512_set_epi32(21, 18, 15, 12, 9, 6, 3, 0, 21, 18, 15, 12, 9, 6, 3, 0);
    return _mm512_srlv_epi32(_mm512_mask_set1_epi32(_mm512_set1_epi32((int)low), 0xff00, (int)(v >> 24)), shift);
  } else if constexpr (BITS == 5) {
    uint64_t v;
    uint16_t t;
    memcpy(&v, p, 8);
    memcpy(&t, p + 8, 2);
    const vi shift = _mm512_set_epi32(15, 10, 5, 0, 15, 10, 5, 0, 15, 10, 5, 0, 15, 10, 5, 0);
    return _mm512_srlv_epi32(windows((uint32_t)v, (uint32_t)(v >> 20), (uint32_t)(v >> 40), (uint32_t)(v >> 60) | (uint32_t)t << 4), shift);
  } else {
    uint32_t a, b, c, d;
    memcpy(&a, p, 4);
    memcpy(&b, p + 3, 4);
    memcpy(&c, p + 6, 4);
    memcpy(&d, p + 8, 4);
    const vi shift = _mm512_set_epi32(18, 12, 6, 0, 18, 12, 6, 0, 18, 12, 6, 0, 18, 12, 6, 0);
    return _mm512_srlv_epi32(windows(a, b, c, d >> 8), shift);
  }
}
template <int BITS> INLINE vi clean(vi raw) { return BITS == 8 ? raw : _mm512_and_si512(raw, _mm512_set1_epi32((1 << BITS) - 1)); }
INLINE vi signed_codes(const uint8_t* p, int) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
// What 2^BITS codes stand for, at least 16 of them in memory; `by` sets a factor.
template <int BITS> struct Levels {
  vf level, scaled;
  void __attribute__((always_inline)) set(const float* p) { level = load(p); }
  void __attribute__((always_inline)) by(vf s) { scaled = mul(level, s); }
  vf __attribute__((always_inline)) at(vi raw) const { return _mm512_permutexvar_ps(raw, scaled); }
};
template <> struct Levels<5> {
  vf low, high, a, b;
  void __attribute__((always_inline)) set(const float* p) { low = load(p), high = load(p + 16); }
  void __attribute__((always_inline)) by(vf s) { a = mul(low, s), b = mul(high, s); }
  vf __attribute__((always_inline)) at(vi raw) const { return _mm512_permutex2var_ps(a, raw, b); }
};
template <> struct Levels<8> {
  const float* level;
  vf s;
  void __attribute__((always_inline)) set(const float* p) { level = p; }
  void __attribute__((always_inline)) by(vf x) { s = x; }
  vf __attribute__((always_inline)) at(vi codes) const { return mul(_mm512_i32gather_ps(codes, level, 4), s); }
};
// Few codes: what they stand for is looked up, so scaling is free.
template <int BITS> struct Affine {
  vf level;
  void __attribute__((always_inline)) group(vf s, vf b) { level = _mm512_fmadd_ps(_mm512_cvtepi32_ps(clean<BITS>(lanes())), s, b); }
  vf __attribute__((always_inline)) at(const uint8_t* p, int) const { return _mm512_permutexvar_ps(raw_codes<BITS>(p, 0), level); }
};
template <int BITS> struct Shifted {
  vf level;
  void __attribute__((always_inline)) group(vf s, vf z) { level = mul(add(_mm512_cvtepi32_ps(clean<BITS>(lanes())), z), s); }
  vf __attribute__((always_inline)) at(const uint8_t* p, int) const { return _mm512_permutexvar_ps(raw_codes<BITS>(p, 0), level); }
};
constexpr int LOOKED_UP = 4;
}  // namespace gnomon
