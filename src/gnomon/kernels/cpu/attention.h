#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

// Which keys a query may see. NONE: all. CAUSAL: key j for query i of row b when j <= first + i, and j > first + i - window if there is a window,
// `first` being starts[b], or keys - queries without starts. BOOLEAN and ADDITIVE: an array that broadcasts to [B, heads, queries, keys].
enum MaskKind : int { MASK_NONE = 0, MASK_CAUSAL = 1, MASK_BOOLEAN = 2, MASK_ADDITIVE = 3 };

// softmax(scale * q k^T + mask) v for q [B, Hq, L, D], k [B, Hk, S, D], v [B, Hk, S, Dv]; a row that sees no key gives zeros.
mx::array attention(const mx::array& q, const mx::array& k, const mx::array& v, float scale, int kind, const std::optional<mx::array>& mask,
                    const std::optional<mx::array>& starts, int window, const std::optional<mx::array>& sinks, mx::StreamOrDevice s);

}  // namespace gnomon
