#pragma once
#include "matmul.h"
#include "rows.h"

namespace gnomon {

// How heads are made of projections: RMS norms per head (weights [D], or none), and a rotation (or none).
struct HeadForm {
  int q_heads, k_heads;
  float norm_eps;
  int rope_dims;  // 0: not turned here
  bool traditional;
  float base, scale;
};
// q, k, v [B, heads, L, D] of x [B, L, K], which is RMS-normalised first if there is a `norm`.
std::vector<mx::array> heads(const mx::array& x, const std::optional<mx::array>& norm, float eps, const Projection& q, const Projection& k, const Projection& v,
                             const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm, const HeadForm& form, const std::optional<mx::array>& offset,
                             const std::optional<mx::array>& freqs, mx::StreamOrDevice s);
// p(x), then RMS-normalised if there is a `norm`, then added to `residual` if there is one.
mx::array project(const mx::array& x, const Projection& p, const std::optional<mx::array>& norm, float eps, const std::optional<mx::array>& residual, mx::StreamOrDevice s);
// down(activation(gate(n)) * up(n)) for n = x, RMS-normalised if there is a `before`; the result normalised if there is an `after`, then added to x if `residual`.
mx::array gated_mlp(const mx::array& x, const std::optional<mx::array>& before, float before_eps, const Projection& gate, const Projection& up, const Projection& down, int activation,
                    const std::optional<mx::array>& after, float after_eps, bool residual, mx::StreamOrDevice s);

}  // namespace gnomon
