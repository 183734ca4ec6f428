#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

// Which keys a query may see. NONE: all. CAUSAL: key j for query i of row b when j <= first + i, and j > first + i - window if there is a window,
// `first` being starts[b], or keys - queries without starts. BOOLEAN and ADDITIVE: an array that broadcasts to [B, heads, queries, keys].
enum MaskKind : int { MASK_NONE = 0, MASK_CAUSAL = 1, MASK_BOOLEAN = 2, MASK_ADDITIVE = 3 };

// softmax(scale * q k^T + mask) v for q [B, Hq, L, D], k [B, Hk, S, D], v [B, Hk, S, Dv]; a row that sees no key gives zeros.
// `order` [B, S] or [1, S], a permutation in each row, is the order in which keys are added up: the c-th one is k[b, :, order[b, c]]. Causal masks
// count in that order; arrays of masks lie as the keys do.
mx::array attention(const mx::array& q, const mx::array& k, const mx::array& v, float scale, int kind, const std::optional<mx::array>& mask,
                    const std::optional<mx::array>& starts, int window, const std::optional<mx::array>& sinks, const std::optional<mx::array>& order,
                    mx::StreamOrDevice s);

}  // namespace gnomon
