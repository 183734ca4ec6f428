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
  bool gated = false;  // the projection to queries gives each head its gate behind its query: outputs are multiplied by the sigmoid of that
  int query_step(int d) const { return gated ? 2 * d : d; }
};
// Of a form that isn't gated: q, k, v [B, heads, L, D] of x [B, L, K], which is RMS-normalised first if there is a `norm`.
std::vector<mx::array> heads(const mx::array& x, const std::optional<mx::array>& norm, float eps, const Projection& q, const Projection& k, const Projection& v,
                             const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm, const HeadForm& form, const std::optional<mx::array>& offset,
                             const std::optional<mx::array>& freqs, mx::StreamOrDevice s);
// A whole attention layer: heads as above, appended at `offset` (int32 [B] or [1]) to keys [B or more, heads, slots, D] and values where they lie,
// causal attention over each row's positions up to its own, then project with `o`. Returns its output and the buffers after the append: the given
// ones must not be read beyond the rows' offsets by anything else. `ring` is [] or [size, window, a phase for each row]: position p of row b then is at
// slot (p - phase) % size, a query sees the last `window` positions up to its own, and nothing else may read the buffers at all.
std::vector<mx::array> attention_layer(const mx::array& x, const std::optional<mx::array>& norm, float eps, const Projection& q, const Projection& k, const Projection& v, const Projection& o,
                                       const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm, const HeadForm& form, const mx::array& offset,
                                       const std::optional<mx::array>& freqs, float scale, const mx::array& keys, const mx::array& values, const std::optional<mx::array>& after, float after_eps,
                                       const std::optional<mx::array>& residual, const std::vector<int>& ring, mx::StreamOrDevice s);
// p(x), then RMS-normalised if there is a `norm`, then added to `residual` if there is one.
mx::array project(const mx::array& x, const Projection& p, const std::optional<mx::array>& norm, float eps, const std::optional<mx::array>& residual, mx::StreamOrDevice s);
// down(activation(gate(n)) * up(n)) for n = x, RMS-normalised if there is a `before`; the result normalised if there is an `after`, then added to x if `residual`.
mx::array gated_mlp(const mx::array& x, const std::optional<mx::array>& before, float before_eps, const Projection& gate, const Projection& up, const Projection& down, int activation,
                    const std::optional<mx::array>& after, float after_eps, bool residual, mx::StreamOrDevice s);

}  // namespace gnomon
