// Keys and values in fewer bits: a token's share of a head is a row of bytes, codes first, then a number or two per group. C headers only.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace gnomon {
enum Type : int;

// AFFINE       code * scale + bias, both of type `type`, as mx.quantize makes them
// SHIFTED      (code + zero) * scale, both float16; codes of 8 bits are signed
// ROTATED      levels[code] * scale, float16, of the vector turned by a Walsh-Hadamard transform with signs
enum Coding : int { AFFINE = 0, SHIFTED = 1, ROTATED = 2 };

struct RowCodes {
  Coding coding;
  int bits, group, dim;
  Type type;            // of scales and biases
  const float* levels;  // ROTATED: at least 16, the 2^bits repeated if they are fewer
  const float* bounds;  // ROTATED: the 2^bits - 1 between levels
  const float* signs;   // ROTATED: dim of them
  int groups() const { return dim / group; }
  int code_bytes() const { return dim * bits / 8; }
  int row_bytes() const { return code_bytes() + groups() * (static_cast<int>(type) ? 2 : 4) * (coding == ROTATED ? 1 : 2); }  // float32 is type 0
};
inline constexpr int MOST_GROUPS = 64;
inline constexpr int MOST_ROTATED = 512;  // elements of a head
}  // namespace gnomon
