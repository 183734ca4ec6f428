#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

// y = x @ w.T for affine-quantised w [N, K * bits / 32]. Falls back to nothing: the caller has checked `supports`.
mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, mx::StreamOrDevice s);
// As mlx's gather_qmm with transpose: out[..., :, n] = x[lhs] @ w[rhs].T.
mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales, const mx::array& biases, const std::optional<mx::array>& lhs,
                     const mx::array& rhs, int group, int bits, mx::StreamOrDevice s);
// Rows `ids` of an affine-quantised table.
mx::array quantized_embedding(const mx::array& ids, const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, mx::StreamOrDevice s);
// y = x @ w.T for dense w [N, K].
mx::array dense_matmul(const mx::array& x, const mx::array& w, mx::StreamOrDevice s);

// Some rows of x against one matrix; row i's outputs go to row to[i] of the result (i where `to` is empty).
struct Product {
  Weights w;
  int n;
  std::vector<int64_t> from, to;
};
void multiply_rows(const Rows& x, std::vector<Product>& products, char* out, Type out_type);

}  // namespace gnomon
