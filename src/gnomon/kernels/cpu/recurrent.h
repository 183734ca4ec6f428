#pragma once
#include <optional>
#include "matmul.h"

namespace gnomon {

// The gated delta rule over T tokens: q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk] float32, beta [B, T, Hv],
// state [B, Hv, Dv, Dk], mask [B, T] bool or none. Returns y [B, T, Hv, Dv] and the state after; masked tokens leave it and give zeros.
std::vector<mx::array> gated_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g, const mx::array& beta, const mx::array& state,
                                   const std::optional<mx::array>& mask, mx::StreamOrDevice s);
// Depthwise convolution without padding: x [B, T + taps - 1, C], w [C, taps, 1], to [B, T, C], then perhaps silu.
mx::array short_convolution(const mx::array& x, const mx::array& w, bool silu, mx::StreamOrDevice s);


// The mixer of Qwen 3.5 before its output projection, over x [B, T, K]: projections to qkv [2 * k_heads * Dk + v_heads * Dv], z [v_heads * Dv], b and
// a [v_heads], a short convolution `conv` [C, taps, 1] with silu over qkv, queries and keys of length 1 (queries then divided by the root of Dk), the gated
// delta rule with g = exp(-exp(a_log) * softplus(a + dt_bias)) and beta = sigmoid(b), and RMS norm over each head's values times silu(z).
// `before` [B, taps - 1, C] are the convolution's last inputs, `state` [B, v_heads, Dv, Dk]; without them zeros. With `counts` [B] row b has so many real
// tokens: what follows them leaves both as they are and gives zeros.
struct DeltaForm {
  int k_heads, v_heads, dk, dv;
  float norm_eps;
};
// Returns y [B, T, v_heads * Dv], the convolution's last inputs and the state (float32, if there was none) after the window.
std::vector<mx::array> delta_mixer(const mx::array& x, const Projection& qkv, const Projection& z, const Projection& b, const Projection& a, const mx::array& conv, const mx::array& a_log,
                                   const mx::array& dt_bias, const mx::array& norm, int k_heads, int v_heads, float norm_eps, const std::optional<mx::array>& before,
                                   const std::optional<mx::array>& state, const std::optional<mx::array>& counts, mx::StreamOrDevice s);

}  // namespace gnomon
