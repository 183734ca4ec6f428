#pragma once
#include "block.h"

namespace gnomon {

// A layer of experts: of router(n), n = x RMS-normalised if there is a `norm`, each row takes the `chosen` largest (the first ones of equals). Its output is
// the sum over those of softmax(router(n))[e] * down_e(activation(gate_e(n)) * up_e(n)), the largest first, with weights that add up to one if
// `normalised`; then x is added if `residual`. gate, up and down have matrices [experts, N, K], as tiles or dense or packed, and no biases.
mx::array experts(const mx::array& x, const std::optional<mx::array>& norm, float eps, const Projection& router, const Projection& gate, const Projection& up, const Projection& down, int chosen,
                  bool normalised, int activation, bool residual, mx::StreamOrDevice s);

}  // namespace gnomon
