#pragma once
#include <optional>
#include "runtime.h"

namespace gnomon {

// Which keys a query may see. NONE: all. CAUSAL: key j for query i of row b when j <= first + i, and j > first + i - window if there is a window,
// `first` being starts[b], or keys - queries without starts. BOOLEAN and ADDITIVE: an array that broadcasts to [B, heads, queries, keys].
enum MaskKind : int { MASK_NONE = 0, MASK_CAUSAL = 1, MASK_BOOLEAN = 2, MASK_ADDITIVE = 3 };

// Rows [batch, head, position] of an array or of plain memory.
struct Head {
  const char* data;
  Type type;
  int64_t batch, head, position, step;
  const RowCodes* codes = nullptr;  // of rows of codes: `data` and strides are then in words of four bytes
  Head(const char* p, Type t, int64_t b, int64_t h, int64_t i) : data(p), type(t), batch(b), head(h), position(i), step(1) {}
  explicit Head(const mx::array& a) : data(a.data<char>()), type(type_of(a.dtype())), batch(a.strides(0)), head(a.strides(1)), position(a.strides(2)), step(a.strides(3)) {}
  const char* at(int64_t b, int64_t h, int64_t i) const { return data + (b * batch + h * head + i * position) * static_cast<int64_t>(type_size(type)); }
  bool direct(int d) const { return !codes && type == F32 && step == 1 && d % 16 == 0; }
};

// What an attention computes, with everything evaluated. Keys and values may be codes: they count as the float32 numbers that they stand for.
struct AttentionJob {
  Head q, k, v;
  int batch, q_heads, k_heads, queries, keys, d, dv;
  float scale;
  int kind, window;
  const char* mask = nullptr;
  Type mask_type = F32;
  int64_t mb = 0, mh = 0, mq = 0, mk = 0;
  const int32_t* starts = nullptr;
  const int32_t* order = nullptr;  // [batch, keys], else keys are walked as they lie
  const int32_t* homes = nullptr;  // the row of k and v that each row of q attends to, else the same
  bool paged = false;              // k and v are one row of pages, in which rows of `order` say where the homes' keys are
  int slot(int b, int c) const { return order ? order[static_cast<int64_t>(paged && homes ? homes[b] : b) * keys + c] : c; }
  int home(int b) const { return paged ? 0 : homes ? homes[b] : b; }
  const char* sinks = nullptr;
  Type sink_type = F32;
  char* out;
  Type out_type;
  int dp() const { return (d + 15) / 16 * 16; }
  int dvp() const { return (dv + 15) / 16 * 16; }
  int rep() const { return q_heads / k_heads; }
  bool turned() const { return v.codes && v.codes->coding == ROTATED; }  // so is the output, until it is turned back
};
void attend(const AttentionJob& j);
// Where there are masks, starts, sinks and an order of keys among a primitive's inputs, from `next` on, and what of them stays alive.
class AttentionInputs {
 public:
  // `mask` is broadcast to [B, Hq, L, S] by `push`.
  static void push(std::vector<mx::array>& in, const mx::Shape& scores, int kind, const std::optional<mx::array>& mask, const std::optional<mx::array>& starts,
                   const std::optional<mx::array>& sinks, const std::optional<mx::array>& order, mx::Stream s);
  AttentionInputs(const std::vector<mx::array>& in, size_t next, int kind, bool starts, bool sinks, bool order, AttentionJob& j);
  void fill(AttentionJob& j);

 private:
  std::optional<Packed> starts_, sinks_, order_;
};

// softmax(scale * q k^T + mask) v for q [B, Hq, L, D], k [B, Hk, S, D], v [B, Hk, S, Dv]; a row that sees no key gives zeros.
// `order` [B, S] or [1, S], a permutation in each row, is the order in which keys are added up: the c-th one is k[b, :, order[b, c]]. Causal masks
// count in that order; arrays of masks lie as the keys do. Without such an array an order may be shorter, or longer: it names the keys that there are.
mx::array attention(const mx::array& q, const mx::array& k, const mx::array& v, float scale, int kind, const std::optional<mx::array>& mask,
                    const std::optional<mx::array>& starts, int window, const std::optional<mx::array>& sinks, const std::optional<mx::array>& order,
                    mx::StreamOrDevice s);

}  // namespace gnomon
