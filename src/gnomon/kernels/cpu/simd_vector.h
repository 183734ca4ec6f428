// Sixteen lanes in four registers of four, in the compilers' vector extensions: NEON on arm64, SSE2 on x86-64 without AVX2.
#pragma once
#include <math.h>
#include <string.h>
#include "table.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))
namespace gnomon::GNOMON_ISA {
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
typedef float vf_any __attribute__((vector_size(16), aligned(4), may_alias));
#if defined(__aarch64__)
constexpr int W = 4, PARTS = 4, TILE_ROWS = 6, PANEL_TILE = 4, DIRECT_ROWS = 4;
#else
constexpr int W = 4, PARTS = 4, TILE_ROWS = 4, PANEL_TILE = 2, DIRECT_ROWS = 2;
#endif

INLINE vf zero() { return vf{}; }
INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf v) { *(vf_any*)p = v; }
INLINE vf load_n(const float* p, int n) {
  if (n >= 4) return load(p);
  vf v = {};
  for (int i = 0; i < n; i++) v[i] = p[i];
  return v;
}
INLINE void store_n(float* p, int n, vf v) {
  if (n >= 4) return store(p, v);
  for (int i = 0; i < n; i++) p[i] = v[i];
}
#if defined(__aarch64__)
INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf sqrt(vf a) { return (vf)vsqrtq_f32((float32x4_t)a); }
INLINE vf round(vf a) { return (vf)vrndnq_f32((float32x4_t)a); }
#else
// No fused instruction is certain here: two roundings, so these results differ in their last bits from the other sets'.
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf sqrt(vf a) { return vf{sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
INLINE vf round(vf a) { return vf{rintf(a[0]), rintf(a[1]), rintf(a[2]), rintf(a[3])}; }
#endif
INLINE vf add(vf a, vf b) { return a + b; }
INLINE vf sub(vf a, vf b) { return a - b; }
INLINE vf mul(vf a, vf b) { return a * b; }
INLINE vf div(vf a, vf b) { return a / b; }
INLINE vf select(vi mask, vf y, vf otherwise) { return (vf)(((vi)y & mask) | ((vi)otherwise & ~mask)); }
INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
INLINE vf exp2i(vf n) { return (vf)((__builtin_convertvector(n, vi) + 127) << 23); }
// y * 2^n for whole n within [-252, 254], in two steps: neither factor leaves the range of exponents, and only the second product can round.
INLINE vf times_exp2(vf y, vf n) {
  const vf half = round(mul(n, set1(0.5f)));
  return mul(mul(y, exp2i(half)), exp2i(sub(n, half)));
}
INLINE vf where_less(vf x, vf limit, vf y, vf otherwise) { return select(x < limit, y, otherwise); }
INLINE vf where_greater(vf x, vf limit, vf y, vf otherwise) { return select(x > limit, y, otherwise); }
INLINE vf where_nan(vf x, vf y, vf otherwise) { return select(x != x, y, otherwise); }
INLINE bool any_nan(vf x) {
  vi m = x != x;
  return (m[0] | m[1] | m[2] | m[3]) != 0;
}
INLINE float half_to_float(uint16_t h, Type t) {
  uint32_t u;
  float f;
  if (t == BF16) {
    u = (uint32_t)h << 16;
  } else {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    if (e == 0) {
      f = (float)m * 5.9604644775390625e-8f;
      return sign ? -f : f;
    }
    u = e == 31 ? (sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0)) : (sign | ((e + 112) << 23) | (m << 13));
  }
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t float_to_half(float f, Type t) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (t == BF16) {
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 64);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a >= 0x7f800000) return (uint16_t)(sign | (a > 0x7f800000 ? 0x7e00 | ((a >> 13) & 0x3ff) : 0x7c00));
  if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (a < 0x38800000) {  // subnormal in half precision: adding 0.5 lets the FPU round at the right bit
    float s;
    memcpy(&s, &a, 4);
    s += 0.5f;
    memcpy(&a, &s, 4);
    return (uint16_t)(sign | (a - 0x3f000000));
  }
  return (uint16_t)(sign | ((a + 0xc8000fffu + ((a >> 13) & 1)) >> 13));
}
INLINE vf load_half(const uint16_t* p, int n, Type t) {
  vf v = {};
  for (int i = 0; i < W; i++)
    if (i < n) v[i] = half_to_float(p[i], t);
  return v;
}
// One number in all lanes.
INLINE vf spread_half(const uint16_t* p, Type t) {
  float one[W];
  store(one, load_half(p, 1, t));
  return set1(one[0]);
}
INLINE void store_half(uint16_t* p, int n, Type t, vf v) {
  for (int i = 0; i < W; i++)
    if (i < n) p[i] = float_to_half(v[i], t);
}
INLINE float sum(const vf* v) {
  vf q = (v[0] + v[2]) + (v[1] + v[3]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
INLINE void sum4(const vf* a, const vf* b, const vf* c, const vf* d, float* out) {
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
}

struct Linear {
  float scale, bias;
  void __attribute__((always_inline)) group(float s, float b) { scale = s, bias = b; }
  vf __attribute__((always_inline)) value(vu codes) const {
    return fma(__builtin_convertvector((vi)codes, vf), set1(scale), set1(bias));
  }
};
template <int CODEC> struct Unpack;
// `h` counts registers: lanes 4 * (h % 4) .. of the block's half h / 4.
template <> struct Unpack<Q4> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    vu words;
    memcpy(&words, p, 16);
    return value((words >> (uint32_t)(4 * (h / 4) + 8 * (h % 4))) & 15u);
  }
};
template <> struct Unpack<Q2> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    uint32_t a, b;
    memcpy(&a, p, 4);
    memcpy(&b, p + 4, 4);
    uint32_t s = 2 * (h / 4) + 8 * (h % 4);
    return value(vu{a >> s, b >> s, a >> (s + 4), b >> (s + 4)} & 3u);
  }
};
template <> struct Unpack<Q3> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    int bit = 12 * h;
    uint32_t w = (p[bit / 8] | (uint32_t)p[bit / 8 + 1] << 8) >> (bit % 8);
    return value(vu{w, w >> 3, w >> 6, w >> 9} & 7u);
  }
};
template <> struct Unpack<Q5> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    int bit = 20 * h;
    const uint8_t* q = p + bit / 8;
    uint32_t w = (q[0] | (uint32_t)q[1] << 8 | (uint32_t)q[2] << 16) >> (bit % 8);
    return value(vu{w, w >> 5, w >> 10, w >> 15} & 31u);
  }
};
template <> struct Unpack<Q6> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    const uint8_t* q = p + 3 * h;
    uint32_t w = q[0] | (uint32_t)q[1] << 8 | (uint32_t)q[2] << 16;
    return value(vu{w, w >> 6, w >> 12, w >> 18} & 63u);
  }
};
template <> struct Unpack<Q8> : Linear {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const {
    const uint8_t* q = p + 4 * h;
    return value(vu{q[0], q[1], q[2], q[3]});
  }
};
template <> struct Unpack<D_F32> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load((const float*)p + 4 * h); }
};
template <> struct Unpack<D_F16> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load_half((const uint16_t*)p + 4 * h, 4, F16); }
};
template <> struct Unpack<D_BF16> {
  vf __attribute__((always_inline)) vec(const uint8_t* p, int h) const { return load_half((const uint16_t*)p + 4 * h, 4, BF16); }
};

// The integer path: lanes are columns.
INLINE float largest(vf v) {
  float top = v[0];
  for (int i = 1; i < 4; i++) top = v[i] > top ? v[i] : top;
  return top;
}
INLINE vi iload(const void* p) {
  vi v;
  memcpy(&v, p, 16);
  return v;
}
INLINE void istore(void* p, vi v) { memcpy(p, &v, 16); }
INLINE vi four(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return vi{word, word, word, word};
}
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi low_halves(vi v) { return v & 0x0f0f0f0f; }
INLINE vi high_halves(vi v) { return (vi)((vu)v >> 4u) & 0x0f0f0f0f; }
INLINE vf half_of(const uint32_t* words, int high, Type t) {
  vf v = {};
  for (int c = 0; c < 4; c++) v[c] = half_to_float((uint16_t)(words[c] >> (high ? 16 : 0)), t);
  return v;
}
// `bytes` (at most 64) of 4 rows: word j of row c goes to out[TILE * j + c].
INLINE void turn(const uint8_t* const* p, int bytes, uint32_t* out) {
  for (int at = 0; at < bytes; at += 4, out += TILE)
    for (int c = 0; c < 4; c++) {
      out[c] = 0;
      memcpy(out + c, p[c] + at, (size_t)(bytes - at < 4 ? bytes - at : 4));
    }
}
template <int BITS> constexpr bool IN_PAIRS = true;
// Two bytes: words of 16 bits, two to a lane.
template <int BITS, int BYTES> struct Codes {
  vi even, odd;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : even(v & 0x00ff00ff), odd((vi)((vu)v >> 8u) & 0x00ff00ff) {}
};
#if defined(__aarch64__)
template <int BITS, int BYTES> struct Dot {
  int32x4_t a = vdupq_n_s32(0), b = vdupq_n_s32(0);
  void __attribute__((always_inline)) add_pairs(vi w, vi x) {
    const int16x8_t c = (int16x8_t)w, y = (int16x8_t)x;
    a = vmlal_s16(a, vget_low_s16(c), vget_low_s16(y));
    b = vmlal_s16(b, vget_high_s16(c), vget_high_s16(y));
  }
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) { add_pairs(w.even, f.x), add_pairs(w.odd, f.y); }
  vi __attribute__((always_inline)) sum() const { return (vi)vpaddq_s32(a, b); }
};
#else
INLINE vi pairs(vi w, vi x) {
#if defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
  return (w & 0xffff) * ((vi)((vu)x << 16u) >> 16) + (w >> 16) * (x >> 16);
#endif
}
template <int BITS, int BYTES> struct Dot {
  vi a = {};
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) { a += pairs(w.even, f.x) + pairs(w.odd, f.y); }
  vi __attribute__((always_inline)) sum() const { return a; }
};
#endif
// One byte.
template <int BITS> struct Codes<BITS, 1> {
  vi c;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : c(v) {}
};
#if defined(__aarch64__)
template <> struct Codes<8, 1> {
  vi low, high;
  Codes() = default;
  explicit __attribute__((always_inline)) Codes(vi v) : low(low_halves(v)), high(high_halves(v)) {}
};
// Eight products of a 4-bit code stay below 2^15, so they are added in 16 bits; 8-bit codes go by halves.
struct Halves {
  int16x8_t a = vdupq_n_s16(0), b = vdupq_n_s16(0);
  void __attribute__((always_inline)) add(vi w, vi x) {
    const int8x16_t c = (int8x16_t)w, y = (int8x16_t)x;
    a = vmlal_s8(a, vget_low_s8(c), vget_low_s8(y));
    b = vmlal_s8(b, vget_high_s8(c), vget_high_s8(y));
  }
  int32x4_t __attribute__((always_inline)) sum() const { return vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)); }
};
template <int BITS> struct Dot<BITS, 1> {
  Halves a;
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) { a.add(w.c, f.x); }
  vi __attribute__((always_inline)) sum() const { return (vi)a.sum(); }
};
template <> struct Dot<8, 1> {
  Halves low, high;
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) { low.add(w.low, f.x), high.add(w.high, f.x); }
  vi __attribute__((always_inline)) sum() const { return (vi)vaddq_s32(low.sum(), vshlq_n_s32(high.sum(), 4)); }
};
#else
template <int BITS> struct Dot<BITS, 1> {
  vi a = {};
  template <class C, class F> void __attribute__((always_inline)) add(const C& w, const F& f) {
    for (int i = 0; i < 4; i++) a += (vi)(((vu)w.c >> (uint32_t)(8 * i)) & 255u) * (vi)((vi)((vu)f.x << (uint32_t)(24 - 8 * i)) >> 24);
  }
  vi __attribute__((always_inline)) sum() const { return a; }
};
#endif

// Codes of keys and values in their natural order: 4 of 16 that begin at p.
template <int BITS> INLINE vi raw_codes(const uint8_t* p, int part) {
  vi v;
  for (int i = 0; i < 4; i++) {
    const int bit = (4 * part + i) * BITS, byte = bit / 8;
    const uint32_t two = p[byte] | (byte + 1 < 2 * BITS ? (uint32_t)p[byte + 1] << 8 : 0);
    v[i] = (int)(two >> bit % 8 & ((1u << BITS) - 1));
  }
  return v;
}
template <int BITS> INLINE vi clean(vi raw) { return raw; }
INLINE vi signed_codes(const uint8_t* p, int part) {
  vi v;
  for (int i = 0; i < 4; i++) v[i] = (int8_t)p[4 * part + i];
  return v;
}
// What 2^BITS codes stand for; `by` sets a factor.
template <int BITS> struct Levels {
  const float* level;
  vf s;
  void __attribute__((always_inline)) set(const float* p) { level = p; }
  void __attribute__((always_inline)) by(vf x) { s = x; }
  vf __attribute__((always_inline)) at(vi codes) const { return mul(vf{level[codes[0]], level[codes[1]], level[codes[2]], level[codes[3]]}, s); }
};
constexpr int LOOKED_UP = 0;
template <int BITS> struct Affine;
template <int BITS> struct Shifted;
}  // namespace gnomon
