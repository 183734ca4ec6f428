#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& w, float eps, mx::StreamOrDevice s);
mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& w, const std::optional<mx::array>& b, float eps, mx::StreamOrDevice s);
// a(gate) * up, `a` being 0 silu, 1 gelu by tanh, 2 gelu by erf, 3 sigmoid. Of equal shape and type.
mx::array gated(const mx::array& gate, const mx::array& up, int activation, mx::StreamOrDevice s);
// Over the last axis.
mx::array softmax(const mx::array& x, mx::StreamOrDevice s);
mx::array logsumexp(const mx::array& x, bool keepdims, mx::StreamOrDevice s);
mx::array argmax(const mx::array& x, bool keepdims, mx::StreamOrDevice s);
mx::array rope(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale, const mx::array& offset, const std::optional<mx::array>& freqs,
               mx::StreamOrDevice s);

// Cosines and sines of the angles of some positions.
class Angles {
 public:
  Angles(int half, std::vector<float> frequencies, float scale) : half_(half), frequencies_(std::move(frequencies)), scale_(scale) {}
  // [half] cosines, then [half] sines; valid until the next call.
  const float* at(int64_t position);

 private:
  static constexpr int64_t SLOTS = 4096;
  int half_;
  std::vector<float> frequencies_;
  float scale_;
  std::vector<int64_t> held_;
  std::vector<float> values_;
};
// The calling thread's angles for these parameters; `freqs` (wavelengths, as mlx gives them) or a base.
Angles& angles(int dims, float base, float scale, const float* freqs);

}  // namespace gnomon
