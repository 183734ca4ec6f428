// What a kernel file offers, one table per instruction set. C headers only: these files are compiled with per-set flags, so an inline
// function of the C++ library compiled here could be the one the linker keeps, and then run on a CPU without that set.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "codes.h"

namespace gnomon {

enum Type : int { F32 = 0, F16 = 1, BF16 = 2 };
inline constexpr size_t type_size(Type t) { return t == F32 ? 4 : 2; }

// How the weights of a linear map are stored: affine-quantised in as many bits, or dense in a float type.
// Q4 and Q8 are multiplied as S4 and S8, by activations of 16 bits, or as I4 and I8, by activations of 8.
enum Codec : int { Q2 = 2, Q3 = 3, Q4 = 4, Q5 = 5, Q6 = 6, Q8 = 8, I4 = 9, I8 = 10, S4 = 11, S8 = 12, D_F16 = 14, D_BF16 = 15, D_F32 = 16 };

enum Activation : int { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, SIGMOID = 3 };

// A block is 32 values along K. Every output is 16 partial sums, one for each lane, of values in increasing block order, added by a fixed
// tree. The lane of a value depends on its place in the block and on the codec alone, so an output's bits depend on nothing else.
inline constexpr int BLOCK = 32;

// Rows of weights that stand side by side in tiled ones.
inline constexpr int TILE = 16;

// N rows of K weights, `row_bytes` apart; scales and biases are [N, K / group], contiguous (unused by the dense codecs).
// The first `tiled` rows, whole TILEs, have their words as [N / TILE][K * bits / 32][TILE] instead, scales and biases as [N / TILE][K / group][TILE].
struct Weights {
  const uint8_t* data;
  const void* scales;
  const void* biases;
  int64_t row_bytes;
  int k, group;
  Codec codec;
  Type scale_type;
  int tiled = 0;
};

// Room for a panel of at most 48 columns (or one tile of them) and the scales of four rows; or for 32 columns of bytes with their scales, and a turned tile.
inline constexpr size_t scratch_floats(int k) { return 52 * 1024 + (size_t)16 * (k + 64); }

inline constexpr int padded(int k) { return (k + BLOCK - 1) / BLOCK * BLOCK; }

// Height of the tile at row m of `rows`: as even as can be, so that 8 rows are 4 + 4 and not 6 + 2.
inline constexpr int tile_height(int rows, int m, int most) {
  const int tiles = (rows - m + most - 1) / most;
  return (rows - m + tiles - 1) / tiles;
}

struct Table {
  const char* name;
  int tile_rows;    // most rows of x in a tile
  int direct_most;  // up to so many rows, tiles have at most 4
  int height(int rows, int m) const { return tile_height(rows, m, rows <= direct_most ? 4 : tile_rows); }
  // Writes a row of k values (`stride` values apart) into lane order as row `i` of a tile of `rows`: tile[(k / 16 * rows + i) * 16 + lane].
  // For whole products: as bytes with their scales (see integer.inl) at tile + i * k.
  void (*arrange)(const void* x, Type type, int64_t stride, const Weights& w, float* tile, int rows, int i);
  // y[m * ldy + n - n0] for m < rows, n0 <= n < n1, from x arranged in the tiles that height() tells.
  // `scratch` holds scratch_floats(k) floats, 64-byte aligned. n0 is a multiple of TILE, n1 is one or the last.
  void (*multiply)(const Weights& w, int n0, int n1, const float* x, int rows, float* y, int64_t ldy, float* scratch);
  // One row of weights as floats in the natural order.
  void (*decode_row)(const Weights& w, int64_t n, float* out);
  void (*rms_norm)(const float* x, const float* w, int n, float eps, float* y);
  void (*layer_norm)(const float* x, const float* w, const float* b, int n, float eps, float* y);
  void (*gate)(Activation a, const float* g, const float* u, size_t n, float* y);  // y = a(g) * u, or a(g) without u
  void (*add_rows)(const float* a, const float* b, size_t n, float* y);
  float (*row_max)(const float* x, int n);
  float (*exp_sum)(const float* x, int n, float m, float* y);
  void (*scale_row)(float* x, int n, float by);
  void (*divide_row)(float* x, int n, float by);
  void (*rotate)(const float* x, const float* cos, const float* sin, int h, bool traditional, float* y);
  void (*scores)(const float* q, int64_t ldq, int rows, const float* k, int64_t ldk, int keys, int d, float scale, float* s, int64_t lds);
  void (*weigh)(const float* p, int64_t ldp, int rows, const float* v, int64_t ldv, int keys, int d, float* o, int64_t ldo);
  void (*delta_step)(float* s, int rows, int n, const float* k, const float* q, const float* g, bool each, const float* v, float beta, float* y);
  void (*convolve)(const float* const* x, const float* w, int taps, int channels, bool silu, float* y);
  void (*to_f32)(const void* x, Type type, size_t n, float* y);
  void (*from_f32)(const float* x, Type type, size_t n, void* y);
  // Elements [from, from + count), multiples of 16, of rows of codes that are `pitch` bytes apart, to rows of out `ldo` apart.
  void (*decode_codes)(const RowCodes& c, const uint8_t* row, int64_t pitch, int rows, int from, int count, float* out, int64_t ldo);
  void (*encode_codes)(const RowCodes& c, const float* x, uint8_t* row, float* room);  // `room` holds dim floats
  void (*turn_back)(const RowCodes& c, float* x);                                      // what ROTATED turned
  // `scores` over rows of codes that are `pitch` bytes apart; `room` holds what they stand for.
  void (*scores_of_codes)(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, const float* q, int64_t ldq, int rows, float scale, float* s, int64_t lds, float* room);
  // `weigh` over elements [from, from + count) of rows of codes, where that pays: for few rows. Whether it was done.
  bool (*weigh_codes)(const RowCodes& c, const uint8_t* row, int64_t pitch, int keys, int from, int count, const float* p, int64_t ldp, int rows, float* o, int64_t ldo);
};

const Table* table_portable();
#if defined(__x86_64__)
const Table* table_avx2();
const Table* table_avx512();
const Table* table_avx512vnni();
#elif defined(__aarch64__)
const Table* table_neon();
#endif

}  // namespace gnomon
