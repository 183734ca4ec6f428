// The inner products of attention over codes of few queries: keys and values become floats in registers, and are not written down. The bits are those
// of `scores` and `weigh` over what `decode_codes` gives.
namespace gnomon::GNOMON_ISA {

// More queries than that share what is decoded through memory.
constexpr int FEW_QUERIES = 4;
constexpr bool IN_REGISTERS = W == 16;  // narrower sets have too few of them

// The i-th number behind a row's codes, in all lanes.
INLINE vf number(const RowCodes& c, const uint8_t* row, int i) {
  const uint8_t* p = row + c.code_bytes();
  return c.type == F32 ? set1(((const float*)p)[i]) : spread_half((const uint16_t*)p + i, c.type);
}

// s[r * lds + i] for `some` keys, at most four.
template <int CODING, int BITS, int R>
static void scores_tile_of_codes(const RowCodes& c, const uint8_t* row, int64_t pitch, int some, const float* q, int64_t ldq, float scale, float* s, int64_t lds) {
  using D = Decoder<CODING, BITS>;
  const uint8_t* keys[4];
  for (int k = 0; k < 4; k++) keys[k] = row + (k < some ? k : some - 1) * pitch;
  vf acc[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) acc[r][k] = zero();
  D d[4] = {D(c), D(c), D(c), D(c)};
  const int all = c.groups();
  for (int g = 0, i = 0; g < all; g++) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) d[k].group(number(c, keys[k], g), number(c, keys[k], all + g));
    for (const int end = i + c.group; i < end; i += 16) {
      vf kv[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) kv[k] = d[k].at(keys[k] + i / 8 * BITS, 0);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const vf qv = load(q + r * ldq + i);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) acc[r][k] = fma(qv, kv[k], acc[r][k]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    float four[4];
    sum4(&acc[r][0], &acc[r][1], &acc[r][2], &acc[r][3], four);
    for (int k = 0; k < some; k++) s[r * lds + k] = four[k] * scale;
  }
}
template <int CODING, int BITS>
static void scores_as(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, const float* q, int64_t ldq, int rows, float scale, float* s, int64_t lds) {
  for (int i = 0; i < keys; i += 4, row += 4 * pitch) {
    const int some = keys - i < 4 ? keys - i : 4;
    if (rows == 1) scores_tile_of_codes<CODING, BITS, 1>(c, row, pitch, some, q, ldq, scale, s + i, lds);
    else if (rows == 2) scores_tile_of_codes<CODING, BITS, 2>(c, row, pitch, some, q, ldq, scale, s + i, lds);
    else if (rows == 3) scores_tile_of_codes<CODING, BITS, 3>(c, row, pitch, some, q, ldq, scale, s + i, lds);
    else scores_tile_of_codes<CODING, BITS, 4>(c, row, pitch, some, q, ldq, scale, s + i, lds);
  }
}
// `scores` over the keys of rows of codes that are `pitch` bytes apart. `room` holds what they stand for, dim floats each.
static void scores_of_codes(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, const float* q, int64_t ldq, int rows, float scale, float* s, int64_t lds, float* room) {
  if constexpr (IN_REGISTERS)
    if (rows <= FEW_QUERIES) {
      if (c.coding == AFFINE && c.bits == 8) return scores_as<AFFINE, 8>(c, row, pitch, keys, q, ldq, rows, scale, s, lds);
      if (c.coding == AFFINE && c.bits == 4) return scores_as<AFFINE, 4>(c, row, pitch, keys, q, ldq, rows, scale, s, lds);
      if (c.coding == SHIFTED && c.bits == 8) return scores_as<SHIFTED, 8>(c, row, pitch, keys, q, ldq, rows, scale, s, lds);
      if (c.coding == SHIFTED && c.bits == 4) return scores_as<SHIFTED, 4>(c, row, pitch, keys, q, ldq, rows, scale, s, lds);
    }
  decode_codes(c, row, pitch, keys, 0, c.dim, room, c.dim);
  scores(q, ldq, rows, room, c.dim, keys, c.dim, scale, s, lds);
}

// C vectors of the values from element `from` on.
template <int CODING, int BITS, int R, int C>
static void weigh_tile_of_codes(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, int from, const float* p, int64_t ldp, float* o, int64_t ldo) {
  vf acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < C; v++) acc[r][v] = load(o + r * ldo + v * W);
  Decoder<CODING, BITS> d(c);
  const int group = from / c.group, all = c.groups();
  const bool two = C > 2 && c.group == 32;
  for (int i = 0; i < keys; i++, row += pitch) {
    vf weight[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) weight[r] = set1(p[r * ldp + i]);
#pragma GCC unroll 4
    for (int v = 0; v < C; v++) {
      if (v == 0 || (v == 2 && two)) {
        const int g = group + v / 2;
        const vf scale = number(c, row, g);
        d.group(scale, CODING == ROTATED ? scale : number(c, row, all + g));
      }
      const vf value = d.at(row + (from / 16 + v) * 2 * BITS, 0);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) acc[r][v] = fma(weight[r], value, acc[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < C; v++) store(o + r * ldo + v * W, acc[r][v]);
}
template <int CODING, int BITS, int R>
static void weigh_rows_of_codes(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, int from, int count, const float* p, int64_t ldp, float* o, int64_t ldo) {
  int at = 0;
  for (; at + 64 <= count && !(from + at & 63); at += 64) weigh_tile_of_codes<CODING, BITS, R, 4>(c, row, pitch, keys, from + at, p, ldp, o + at, ldo);
  for (; at < count; at += 32) weigh_tile_of_codes<CODING, BITS, R, 2>(c, row, pitch, keys, from + at, p, ldp, o + at, ldo);
}
template <int CODING, int BITS>
static void weigh_as(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, int from, int count, const float* p, int64_t ldp, int rows, float* o, int64_t ldo) {
  if (rows == 1) weigh_rows_of_codes<CODING, BITS, 1>(c, row, pitch, keys, from, count, p, ldp, o, ldo);
  else if (rows == 2) weigh_rows_of_codes<CODING, BITS, 2>(c, row, pitch, keys, from, count, p, ldp, o, ldo);
  else if (rows == 3) weigh_rows_of_codes<CODING, BITS, 3>(c, row, pitch, keys, from, count, p, ldp, o, ldo);
  else weigh_rows_of_codes<CODING, BITS, 4>(c, row, pitch, keys, from, count, p, ldp, o, ldo);
}
// `weigh` over elements [from, from + count) of values in rows of codes. Whether it was done: there is none for these codes, many queries, or columns that are no whole groups of 32.
static bool weigh_codes(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, int from, int count, const float* p, int64_t ldp, int rows, float* o, int64_t ldo) {
  if constexpr (IN_REGISTERS)
    if (rows <= FEW_QUERIES && c.group % 32 == 0 && from % 32 == 0 && count % 32 == 0) {
      if (c.coding == AFFINE && c.bits == 8) return weigh_as<AFFINE, 8>(c, row, pitch, keys, from, count, p, ldp, rows, o, ldo), true;
      if (c.coding == AFFINE && c.bits == 4) return weigh_as<AFFINE, 4>(c, row, pitch, keys, from, count, p, ldp, rows, o, ldo), true;
      if (c.coding == ROTATED && c.bits == 3) return weigh_as<ROTATED, 3>(c, row, pitch, keys, from, count, p, ldp, rows, o, ldo), true;
      if (c.coding == ROTATED && c.bits == 4) return weigh_as<ROTATED, 4>(c, row, pitch, keys, from, count, p, ldp, rows, o, ldo), true;
    }
  return false;
}
}  // namespace gnomon::GNOMON_ISA
