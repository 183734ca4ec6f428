#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

// The gated delta rule over T tokens: q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk] float32, beta [B, T, Hv],
// state [B, Hv, Dv, Dk], mask [B, T] bool or none. Returns y [B, T, Hv, Dv] and the state after; masked tokens leave it and give zeros.
std::vector<mx::array> gated_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g, const mx::array& beta, const mx::array& state,
                                   const std::optional<mx::array>& mask, mx::StreamOrDevice s);
// Depthwise convolution without padding: x [B, T + taps - 1, C], w [C, taps, 1], to [B, T, C], then perhaps silu.
mx::array short_convolution(const mx::array& x, const mx::array& w, bool silu, mx::StreamOrDevice s);

}  // namespace gnomon
