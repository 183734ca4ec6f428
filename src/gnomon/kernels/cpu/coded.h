#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

// How keys or values are coded (see codes.h), with the tables that it needs.
class CodesForm {
 public:
  // `type` is that of scales and biases: 0 float32, 1 float16, 2 bfloat16. `levels`, `bounds` and `signs` are for ROTATED alone.
  CodesForm(int coding, int bits, int group, int dim, int type, std::vector<float> levels, std::vector<float> bounds, std::vector<float> signs);
  const RowCodes& codes() const { return tables_->codes; }
  int row_bytes() const { return codes().row_bytes(); }
  std::shared_ptr<const void> owner() const { return tables_; }

 private:
  struct Tables {
    std::vector<float> levels, bounds, signs;
    RowCodes codes;
  };
  std::shared_ptr<const Tables> tables_;
};

// Attention as in attention.h over words [B, Hk, slots, row bytes / 4] of keys and values, of which the first `keys` slots count; with an order
// [B, keys] or [1, keys], those that it names.
mx::array coded_attention(const mx::array& q, const mx::array& k, const mx::array& v, const CodesForm& key_form, const CodesForm& value_form, int keys, float scale, int kind,
                          const std::optional<mx::array>& mask, const std::optional<mx::array>& starts, int window, const std::optional<mx::array>& sinks,
                          const std::optional<mx::array>& order, mx::StreamOrDevice s);
// The words of x [B, heads, n, dim].
mx::array encode(const mx::array& x, const CodesForm& form, mx::StreamOrDevice s);
// RowCodes keys [B, heads, L, dim] and values into the slots from starts[b] on of rows b of contiguous buffers, where these lie. Returns the buffers: whoever
// needs what was appended depends on these.
std::vector<mx::array> coded_append(const mx::array& k, const mx::array& v, const CodesForm& key_form, const CodesForm& value_form, const mx::array& starts, const mx::array& keys,
                                    const mx::array& values, mx::StreamOrDevice s);

}  // namespace gnomon
