#define GNOMON_ISA isa_avx2
#include "simd_avx2.h"
#include "linear.inl"
#include "integer.inl"
#include "halves.inl"
#include "pointwise.inl"
#include "attention.inl"
#include "recurrent.inl"
#include "codes.inl"
#include "codes_attention.inl"

namespace gnomon {
const Table* table_avx2() {
  using namespace isa_avx2;
  static const Table table = {"avx2", TILE_ROWS, DIRECT_MOST, arrange, multiply, decode_row, rms_norm, layer_norm, gate, add_rows, row_max,
                              exp_sum, scale_row, divide_row, rotate, scores, weigh, delta_step, convolve, to_f32, from_f32, decode_codes, encode_codes, turn_back,
                              scores_of_codes, weigh_codes};
  return &table;
}
}  // namespace gnomon
