// What a transformer block computes, over memory: fused primitives and runs of blocks share it, so they give the same bits.
#pragma once
#include <array>
#include <optional>
#include "coded.h"
#include "fused.h"

namespace gnomon {

// An RMS norm. `prepare` widens its weights, which must be computed by then.
class Normaliser {
 public:
  Normaliser(const mx::array& w, float eps) : w_(w), type_(type_of(w.dtype())), n_(static_cast<int>(w.size())), eps_(eps) {}
  void prepare(const Table& t);
  // y = norm(x) rounded to `type`; x and y may be the same.
  void apply(const Table& t, const float* x, float* y, Type type) const;

 private:
  Packed w_;
  Type type_;
  int n_;
  float eps_;
  std::vector<float> wide_;
};

// A linear map's weights where they lie.
struct Ready {
  Weights w;
  const float* bias;
  int n;
  Product product(char* out, Type type) const;
};

// Memory that the layers of one step use one after the other.
struct Room {
  std::vector<float> normed;
  std::vector<char> wide;
  std::vector<int32_t> order, starts;
};

// The rows at `data`, `width` values each, as many as `like` has.
Rows dense_rows(const Rows& like, const char* data, Type type, int width);
// x itself, or its normalised rows in `room` as floats.
Rows normalised(const Table& t, const Rows& x, const std::optional<Normaliser>& norm, Type type, std::vector<float>& room);
// Rows of `out` normalised, then added to the rows of `residual`.
void finish(const Table& t, char* out, Type type, int64_t rows, int n, const std::optional<Normaliser>& norm, const std::optional<Rows>& residual);

// Heads of q, k, v: norm, projections, norms per head, rotation. After `prepare` it changes no more.
struct HeadsParts {
  HeadForm form;
  std::optional<Normaliser> norm, head_norms[2];
  std::optional<Packed> freqs;
  std::vector<Operands> operands;
  std::vector<Ready> ready;

  void prepare(const Table& t);
  // To `to[0]`, `to[1]`, `to[2]` as [B, L, heads, D] with positions outside heads, as the products write them, queries perhaps with gates behind each.
  // Row b starts at position starts[b].
  void run(const Rows& x, Type type, int d, int64_t length, const int32_t* starts, char* const* to, Room& room) const;
  const float* waves = nullptr;  // set by `prepare`
};

// A ring that positions go around in: that of row b's position p is slot (p - phases[b]) % size. A query sees `window` positions up to its own.
// `size` 0: none, positions are slots.
struct Ring {
  int size = 0, window = 0;
  std::vector<int32_t> phases;
  int64_t slot(int b, int64_t p) const { return size ? ((p - phases[b]) % size + size) % size : p; }
  // Of [size, window, a phase for each of `rows` rows], or nothing. Throws std::invalid_argument for numbers that no window of `length` tokens can have.
  static Ring of(const std::vector<int>& numbers, int rows, int64_t length);
};

// Buffers of keys [B or more, heads, slots, D] and values; with `codes`, of rows of bytes.
struct Buffers {
  char* data[2];
  int64_t slots;
  const RowCodes* codes[2] = {};
  Ring ring;
  // Throws std::out_of_range where the `length` positions of row b from `start` on don't fit.
  void check(int b, int64_t start, int64_t length) const;
};

// Pages of `size` tokens that lie one behind the other in buffers of one row: position p is in slot p % size of page rows[b][p / size].
struct Pages {
  // A page that is written to for the first time: slots before `offset` are those of page `source` if that isn't negative, from `end` on there are zeros.
  struct Fresh {
    int page, source, offset, end;
  };
  int size;
  std::vector<std::vector<int>> rows;
  std::vector<int> counts;  // of a window's tokens in each row, the first ones, that are written
  std::vector<Fresh> fresh;
  Pages(int size, std::vector<std::vector<int>> rows, std::vector<int> counts, const std::vector<std::array<int, 4>>& fresh);
};

// Which rows of buffers the rows of a batch append and attend to, and from which positions on.
struct Places {
  int batch;
  int64_t length;
  const int32_t* starts;
  const int32_t* homes = nullptr;  // else row b to row b
  const Pages* pages = nullptr;
  const int32_t* order = nullptr;  // with pages: [rows of pages, end], slots of positions
  int end() const { return *std::max_element(starts, starts + batch) + static_cast<int>(length); }
};

// Heads, their append at `starts` where the buffers lie, attention over them, and the output projection: the fourth operand.
struct AttentionParts : HeadsParts {
  float scale = 1;
  std::optional<Normaliser> after;

  void prepare(const Table& t);
  void attend_rows(const Rows& x, Type type, const Places& places, const Buffers& buffers, const std::optional<Rows>& residual, char* to, Room& room) const;
  int d() const { return ready[0].n / form.q_heads / (form.gated ? 2 : 1); }
  int dv() const { return ready[2].n / form.k_heads; }

 private:
  void append(const char* const* heads, Type type, const Places& places, const Buffers& buffers) const;
};

// down(activation(gate) * up) with the norms around it, plus x if `residual`. Operands: gate, up, down.
struct MlpParts {
  Activation activation = SILU;
  bool residual = false;
  std::optional<Normaliser> before, after;
  std::vector<Operands> operands;
  std::vector<Ready> ready;

  void prepare(const Table& t);
  void run(const Rows& x, Type type, char* to, Room& room) const;
};

// One block, whose weights are computed and prepared.
struct Block {
  int outputs;
  AttentionParts attention;
  MlpParts mlp;
};
// Blocks one after the other.
struct Blocks {
  std::vector<std::shared_ptr<const Block>> all;
  // The arguments of attention_layer and of gated_mlp. Holds the weights' arrays, and computes them now.
  void add(const std::optional<mx::array>& norm, float eps, const Projection& q, const Projection& k, const Projection& v, const Projection& o, const std::optional<mx::array>& q_norm,
           const std::optional<mx::array>& k_norm, const HeadForm& form, const std::optional<mx::array>& freqs, float scale, const std::optional<mx::array>& after, float after_eps,
           const std::optional<mx::array>& mlp_norm, float mlp_eps, const Projection& gate, const Projection& up, const Projection& down, int activation,
           const std::optional<mx::array>& mlp_after, float mlp_after_eps);
};

// How keys and values of a layer are coded.
using CodesPair = std::pair<CodesForm, CodesForm>;

// The blocks over x [B, L, K]: attention appends to `buffers` (keys and values by turns) at positions `starts` [B], where they lie, as attention_layer
// does, row b to row homes[b] of the buffers (none: to row b), where rows of one home see what each appends; both residuals are added. `before` is waited for, if given. Returns the last block's output, and an array that is computed once all is
// appended: whoever reads the buffers depends on it, as they are no outputs (MLX's work grows with the square of those). `rings` are none, or those
// of the blocks, as Ring::of takes them. `codes` are none, or say of every block whether its buffers are codes. With `pages` buffers are [heads, pages, size, D], and there are no rings.
// Nothing if a buffer's type or shape is another than the heads' or their codes'. Throws std::out_of_range where a row doesn't fit its buffers.
std::optional<std::pair<mx::array, mx::array>> run_blocks(const Blocks& blocks, const mx::array& x, const std::vector<int>& starts, const std::vector<mx::array>& buffers,
                                                          const std::optional<mx::array>& before, const std::vector<int>& homes, const std::vector<std::vector<int>>& rings,
                                                          const std::vector<std::optional<CodesPair>>& codes, const std::optional<Pages>& pages, mx::StreamOrDevice s);

}  // namespace gnomon
