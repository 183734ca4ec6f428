// RowCodes of keys and values: from floats, to floats, and the rotation. Lanes are elements in their natural order.
namespace gnomon::GNOMON_ISA {

template <int BITS> struct Multiplied {
  vf s, b;
  void __attribute__((always_inline)) group(vf scale, vf bias) { s = scale, b = bias; }
  vf __attribute__((always_inline)) at(const uint8_t* p, int part) const { return fma(to_float(clean<BITS>(raw_codes<BITS>(p, part))), s, b); }
};
template <int BITS> struct Moved {
  vf s, z;
  void __attribute__((always_inline)) group(vf scale, vf zero) { s = scale, z = zero; }
  vf __attribute__((always_inline)) at(const uint8_t* p, int part) const {
    return mul(add(to_float(BITS == 8 ? signed_codes(p, part) : clean<BITS>(raw_codes<BITS>(p, part))), z), s);
  }
};
template <int BITS> struct Looked {
  Levels<BITS> levels;
  void __attribute__((always_inline)) group(vf scale, vf) { levels.by(scale); }
  vf __attribute__((always_inline)) at(const uint8_t* p, int part) const { return levels.at(raw_codes<BITS>(p, part)); }
};
template <bool FEW, template <int> class A, template <int> class B, int BITS> struct Either { using type = A<BITS>; };
template <template <int> class A, template <int> class B, int BITS> struct Either<false, A, B, BITS> { using type = B<BITS>; };
template <int CODING, int BITS> struct Decoder;
template <int BITS> struct Decoder<AFFINE, BITS> : Either<(BITS <= LOOKED_UP), Affine, Multiplied, BITS>::type {
  explicit Decoder(const RowCodes&) {}
};
template <int BITS> struct Decoder<SHIFTED, BITS> : Either<(BITS <= LOOKED_UP), Shifted, Moved, BITS>::type {
  explicit Decoder(const RowCodes&) {}
};
template <int BITS> struct Decoder<ROTATED, BITS> : Looked<BITS> {
  explicit __attribute__((always_inline)) Decoder(const RowCodes& c) { this->levels.set(c.levels); }
};

// Numbers [first, first + n) behind a row's codes, where they lie or in `room`.
INLINE const float* numbers(const RowCodes& c, const uint8_t* row, int first, int n, float* room) {
  const uint8_t* p = row + c.code_bytes();
  if (c.type == F32) return (const float*)p + first;
  for (int i = 0; i < n; i += W) store(room + i, load_half((const uint16_t*)p + first + i, n - i < W ? n - i : W, c.type));
  return room;
}

// Elements [from, from + count), multiples of 16, of `rows` rows that are `pitch` bytes apart.
template <int CODING, int BITS> static void decode_as(const RowCodes& c, const uint8_t* row, int64_t pitch, int rows, int from, int count, float* out, int64_t ldo) {
  Decoder<CODING, BITS> d(c);
  const int g0 = from / c.group, g1 = (from + count - 1) / c.group + 1, n = g1 - g0, all = c.groups();
  for (int r = 0; r < rows; r++, row += pitch, out += ldo) {
    float first_room[MOST_GROUPS], second_room[MOST_GROUPS];
    const float* s = numbers(c, row, g0, n, first_room);
    const float* b = CODING != ROTATED ? numbers(c, row, all + g0, n, second_room) : s;
    for (int g = 0; g < n; g++) {
      d.group(set1(s[g]), set1(b[g]));
      const int first = (g0 + g) * c.group, low = first < from ? from : first;
      const int high = first + c.group < from + count ? first + c.group : from + count;
      for (int i = low; i < high; i += 16)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) store(out + i - from + p * W, d.at(row + i / 8 * BITS, p));
    }
  }
}
template <int CODING> static void decode_coding(const RowCodes& c, const uint8_t* row, int64_t pitch, int rows, int from, int count, float* out, int64_t ldo) {
  switch (c.bits) {
    case 2: return decode_as<CODING, 2>(c, row, pitch, rows, from, count, out, ldo);
    case 3: return decode_as<CODING, 3>(c, row, pitch, rows, from, count, out, ldo);
    case 4: return decode_as<CODING, 4>(c, row, pitch, rows, from, count, out, ldo);
    case 5: return decode_as<CODING, 5>(c, row, pitch, rows, from, count, out, ldo);
    case 6: if constexpr (CODING == AFFINE) return decode_as<CODING, 6>(c, row, pitch, rows, from, count, out, ldo);
    default: return decode_as<CODING, 8>(c, row, pitch, rows, from, count, out, ldo);
  }
}
static void decode_codes(const RowCodes& c, const uint8_t* row, int64_t pitch, int rows, int from, int count, float* out, int64_t ldo) {
  if (c.coding == AFFINE) decode_coding<AFFINE>(c, row, pitch, rows, from, count, out, ldo);
  else if (c.coding == SHIFTED) decode_coding<SHIFTED>(c, row, pitch, rows, from, count, out, ldo);
  else decode_coding<ROTATED>(c, row, pitch, rows, from, count, out, ldo);
}

// Unscaled, in natural order: sums and differences only, so the bits are those of any other way to pair them up.
INLINE void walsh_hadamard(float* x, int d) {
  for (int half = 1; half < d; half *= 2)
    for (int i = 0; i < d; i += 2 * half)
      for (int j = i; j < i + half; j++) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
}
static void turn_back(const RowCodes& c, float* x) {
  const float root = __builtin_sqrtf((float)c.dim);
  walsh_hadamard(x, c.dim);
  for (int i = 0; i < c.dim; i++) x[i] = x[i] / root * c.signs[i];
}

INLINE void put_codes(const uint8_t* codes, int n, int bits, uint8_t* out) {
  for (int i = 0; i < n; i += 8, out += bits) {
    uint64_t v = 0;
    for (int j = 0; j < 8; j++) v |= (uint64_t)codes[i + j] << (j * bits);
    memcpy(out, &v, (size_t)bits);
  }
}
INLINE void put_numbers(const RowCodes& c, const float* x, int n, uint8_t* out) {
  if (c.type == F32) memcpy(out, x, (size_t)n * 4);
  else
    for (int i = 0; i < n; i += W) store_half((uint16_t*)out + i, n - i < W ? n - i : W, c.type, load_n(x + i, n - i));
}
INLINE void extremes(const float* x, int n, float* low, float* high) {
  vf l = load(x), h = l;
  for (int i = W; i < n; i += W) l = min(load(x + i), l), h = max(load(x + i), h);
  float a[W], b[W];
  store(a, l), store(b, h);
  for (int i = 1; i < W; i++) a[0] = a[i] < a[0] ? a[i] : a[0], b[0] = b[i] > b[0] ? b[i] : b[0];
  *low = a[0], *high = b[0];
}

// A vector's row of bytes, with the bits that mx.quantize or the codec's own operations give. `room` holds dim floats.
static void encode_codes(const RowCodes& c, const float* x, uint8_t* row, float* room) {
  const int groups = c.groups(), n = c.group;
  float s[MOST_GROUPS], b[MOST_GROUPS];
  uint8_t codes[128];
  if (c.coding == ROTATED) {
    for (int i = 0; i < c.dim; i++) room[i] = x[i] * c.signs[i];
    walsh_hadamard(room, c.dim);
    const float root = __builtin_sqrtf((float)c.dim);
    for (int i = 0; i < c.dim; i++) room[i] = room[i] / root;
    for (int g = 0; g < groups; g++) {
      const float* y = room + g * n;
      float sum = 0;
      for (int i = 0; i < n; i++) sum += y[i] * y[i];
      s[g] = __builtin_sqrtf(sum / (float)n);
      const float by = s[g] + 1e-8f;
      for (int i = 0; i < n; i++) {
        const float v = y[i] / by;
        int place = 0;
        for (int step = 1 << (c.bits - 1); step; step /= 2) place += c.bounds[place + step - 1] < v ? step : 0;
        codes[i] = (uint8_t)place;
      }
      put_codes(codes, n, c.bits, row + g * n / 8 * c.bits);
    }
    put_numbers(c, s, groups, row + c.code_bytes());
    return;
  }
  const float most = (float)((1 << c.bits) - 1);
  for (int g = 0; g < groups; g++) {
    const float* y = x + g * n;
    float low, high, first = 0, last = most;
    extremes(y, n, &low, &high);
    if (c.coding == AFFINE) {
      const bool below = __builtin_fabsf(low) > __builtin_fabsf(high);
      float scale = (high - low) / most;
      scale = scale > 1e-7f ? scale : 1e-7f;
      scale = below ? scale : -scale;
      const float edge = below ? low : high;
      float one[W];
      store(one, round(set1(edge / scale)));
      s[g] = one[0] != 0 ? edge / one[0] : scale;
      b[g] = one[0] != 0 ? edge : 0;
    } else {
      float one[W];
      if (c.bits == 8) {
        s[g] = (high - low) / 254.0f;
        store(one, round(set1((high + low) / (2.0f * s[g]))));
        first = -127, last = 127;
      } else {
        s[g] = (high - low) / most;
        store(one, round(set1(low / s[g])));
      }
      b[g] = one[0];
    }
    const vf scale = set1(s[g]), zero_or_bias = set1(b[g]);
    for (int i = 0; i < n; i += W) {
      vf v = load(y + i);
      if (c.coding == AFFINE) v = round(div(sub(v, zero_or_bias), scale));
      else v = round(sub(div(v, scale), zero_or_bias));
      v = where_nan(v, zero(), v);
      v = min(max(v, set1(first)), set1(last));
      float f[W];
      store(f, v);
      for (int j = 0; j < W; j++) codes[i + j] = (uint8_t)(int)f[j];
    }
    put_codes(codes, n, c.bits, row + g * n / 8 * c.bits);
  }
  put_numbers(c, s, groups, row + c.code_bytes());
  put_numbers(c, b, groups, row + c.code_bytes() + groups * (int)type_size(c.type));
}
}  // namespace gnomon::GNOMON_ISA
