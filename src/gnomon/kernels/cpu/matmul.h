#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

// y = x @ w.T for affine-quantised w [N, K * bits / 32]; `integer` multiplies 4- and 8-bit codes by x rounded to 8 bits instead of 16. Of these widths,
// weights may be `tiled`: w, scales and biases each went through `tiled`.
mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, bool integer, bool tiled, mx::StreamOrDevice s);
// As mlx's gather_qmm with transpose: out[..., :, n] = x[lhs] @ w[rhs].T.
mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales, const mx::array& biases, const std::optional<mx::array>& lhs,
                     const mx::array& rhs, int group, int bits, bool integer, bool tiled, mx::StreamOrDevice s);
// As mlx's gather_mm for b [E, K, N]; best where b is a transposed view of [E, N, K].
mx::array gather_mm(const mx::array& x, const mx::array& b, const std::optional<mx::array>& lhs, const mx::array& rhs, mx::StreamOrDevice s);
// Rows of words [.., k * bits / 32] with their scales and biases [.., k / group] as values [.., k] of the scales' type.
mx::array dequantise(const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, mx::StreamOrDevice s);
// Rows `ids` of an affine-quantised table.
mx::array quantized_embedding(const mx::array& ids, const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, bool tiled, mx::StreamOrDevice s);
// The values of w [.., N, width] with every TILE rows interleaved: [.., N / TILE, width, TILE], and then the rows that are left as they were.
mx::array tiled(const mx::array& w, mx::StreamOrDevice s);
// y = x @ w.T for dense w [N, K].
mx::array dense_matmul(const mx::array& x, const mx::array& w, mx::StreamOrDevice s);

// Some rows of x against one matrix: row i's outputs go to row to[i] of `out` (i where `to` is empty), `pitch` values apart.
// Every step of what follows the product rounds to the output's type, as if it were an operation of its own.
struct Product {
  Weights w;
  int n;
  char* out;
  Type out_type;
  int64_t pitch;
  std::vector<int64_t> from, to;
  const float* bias = nullptr;  // [n], added
  std::optional<Weights> up;    // then activation(y) * (x @ up.T + up_bias); of w's codec and group
  const float* up_bias = nullptr;
  Activation activation = SILU;
};
void multiply_rows(const Rows& x, std::vector<Product>& products);

// The weights of a linear map as MLX has them: packed with scales and biases, or dense. Holds the arrays.
struct Projection {
  mx::array w;
  std::optional<mx::array> scales, biases, bias;
  int group, bits;
  bool integer, tiled;
  Projection(mx::array w, std::optional<mx::array> scales, std::optional<mx::array> biases, std::optional<mx::array> bias, int group, int bits, bool integer, bool tiled);
  int outputs() const { return w.shape(0); }
  int inputs() const { return scales ? scales->shape(1) * group : w.shape(1); }
  mx::Dtype type() const { return scales ? scales->dtype() : w.dtype(); }
  void push(std::vector<mx::array>& in) const;
};
// The same at evaluation, from a primitive's inputs.
class Operands {
 public:
  Operands(const Projection& p, const std::vector<mx::array>& in, size_t& next);
  Weights weights();
  const float* bias();
  int n;

 private:
  int k_, group_, bits_;
  bool integer_, tiled_;
  Type type_, bias_type_ = F32;
  std::optional<Packed> w_, scales_, biases_, bias_;
  std::vector<float> wide_bias_;
};

// Matrices [E, N, K] of experts, from a primitive's inputs in the same way.
class Stack {
 public:
  Stack(const Projection& p, const std::vector<mx::array>& in, size_t& next);
  void prepare();
  Weights weights(int64_t e) const;
  int n;

 private:
  int k_, group_, bits_;
  bool integer_, tiled_;
  Type type_;
  std::optional<Packed> w_, scales_, biases_;
  const char *data_ = nullptr, *scale_data_ = nullptr, *bias_data_ = nullptr;
};

}  // namespace gnomon
