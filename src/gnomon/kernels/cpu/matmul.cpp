#include "matmul.h"
#include <algorithm>

namespace gnomon {
namespace {
constexpr int MOST_ROWS = 480;  // at a time: a multiple of every tile height; bounds the memory for arranged rows
constexpr int WHOLE_PANEL = 32;  // columns of a panel of codes, at most: see integer.inl
// Products with less work than this (weights unpacked plus multiplications, in elements) stay on the calling thread.
constexpr int64_t SHARE_FROM = 400'000;

struct Task {
  const Product* p;
  const float* x;
  int rows;
  int64_t first;  // of the product's rows
  int n0, n1;
};

void round_to(const Table& t, Type type, float* y, int n) {
  if (type == F32) return;
  uint16_t half[256];
  for (int i = 0; i < n; i += 256) {
    const int some = std::min(256, n - i);
    t.from_f32(y + i, type, some, half);
    t.to_f32(half, type, some, y + i);
  }
}

void run_task(const Table& t, const Task& task) {
  const Product& p = *task.p;
  float* room = scratch<1>(scratch_floats(p.w.k));
  const bool straight = p.to.empty();
  const size_t size = type_size(p.out_type);
  if (straight && p.out_type == F32 && !p.bias && !p.up) {
    t.multiply(p.w, task.n0, task.n1, task.x, task.rows, reinterpret_cast<float*>(p.out) + task.first * p.pitch + task.n0, p.pitch, room);
    return;
  }
  const int wide = task.n1 - task.n0;
  const size_t floats = static_cast<size_t>(task.rows) * wide;
  float *y = scratch<2>(2 * floats + 16), *u = y + floats;
  t.multiply(p.w, task.n0, task.n1, task.x, task.rows, y, wide, room);
  if (p.up) t.multiply(*p.up, task.n0, task.n1, task.x, task.rows, u, wide, room);
  for (int m = 0; m < task.rows; m++) {
    float *ym = y + static_cast<size_t>(m) * wide, *um = u + static_cast<size_t>(m) * wide;
    if (p.bias) {
      round_to(t, p.out_type, ym, wide);
      t.add_rows(ym, p.bias + task.n0, wide, ym);
    }
    if (p.up) {
      round_to(t, p.out_type, ym, wide);
      round_to(t, p.out_type, um, wide);
      if (p.up_bias) {
        t.add_rows(um, p.up_bias + task.n0, wide, um);
        round_to(t, p.out_type, um, wide);
      }
      t.gate(p.activation, ym, um, wide, ym);
    }
    const int64_t row = straight ? task.first + m : p.to[task.first + m];
    t.from_f32(ym, p.out_type, wide, p.out + (row * p.pitch + task.n0) * static_cast<int64_t>(size));
  }
}
}  // namespace

void multiply_rows(const Rows& x, std::vector<Product>& products) {
  const Table& t = table();
  auto workers = pool();
  std::vector<Task> tasks;
  size_t floats = 0;
  int64_t work = 0;
  struct Piece {
    Product* p;
    int64_t first;
    int rows;
    size_t at;
    bool arranged;  // by a piece before
  };
  std::vector<Piece> pieces;
  auto flush = [&] {
    float* arranged = scratch<0>(floats + 64);
    struct Tile {
      const Piece* piece;
      int m, rows;
    };
    std::vector<Tile> tiles;
    for (auto& q : pieces)
      for (int m = 0; m < q.rows && !q.arranged;) {
        const int some = t.height(q.rows, m);
        tiles.push_back({&q, m, some});
        m += some;
      }
    auto arrange = [&](int i) {
      auto [q, m, some] = tiles[i];
      const int kp = padded(q->p->w.k);
      for (int r = 0; r < some; r++) {
        const int64_t row = q->p->from.empty() ? q->first + m + r : q->p->from[q->first + m + r];
        t.arrange(x.row(row), x.type, x.step, q->p->w, arranged + q->at + static_cast<size_t>(m) * kp, some, r);
      }
    };
    const bool share = work >= SHARE_FROM;
    if (share && floats > 65536) workers->run(static_cast<int>(tiles.size()), arrange);
    else for (size_t i = 0; i < tiles.size(); i++) arrange(static_cast<int>(i));
    tasks.clear();
    const int size = workers->size();
    int64_t columns = 0;
    for (auto& q : pieces) columns += q.p->n;
    for (auto& q : pieces) {
      const int n = q.p->n;
      int per = n;
      if (share) {
        // Few long stretches for few rows (each start of one waits for memory), narrow ones for many: whole panels, and enough for all threads.
        const bool few = q.rows <= t.direct_most, whole = q.p->w.codec >= I4 && q.p->w.codec <= S8;
        const int least = few || !whole ? TILE : WHOLE_PANEL, most = few ? 1 << 16 : !whole ? 48 : columns < int64_t{32} * size * WHOLE_PANEL ? WHOLE_PANEL : 2 * WHOLE_PANEL;
        const int parts = std::max<int>(1, (2 * size + static_cast<int>(pieces.size()) - 1) / static_cast<int>(pieces.size()));
        per = std::clamp((n + parts - 1) / parts, least, most);
        per = (per + least - 1) / least * least;
      }
      for (int n0 = 0; n0 < n; n0 += per) tasks.push_back({q.p, arranged + q.at, q.rows, q.first, n0, std::min(n, n0 + per)});
    }
    auto run = [&](int i) { run_task(t, tasks[i]); };
    if (share) workers->run(static_cast<int>(tasks.size()), run);
    else for (size_t i = 0; i < tasks.size(); i++) run(static_cast<int>(i));
    pieces.clear();
    floats = 0;
    work = 0;
  };
  for (auto& p : products) {
    const int64_t rows = p.from.empty() ? (p.to.empty() ? x.count : static_cast<int64_t>(p.to.size())) : static_cast<int64_t>(p.from.size());
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
      const int some = static_cast<int>(std::min<int64_t>(MOST_ROWS, rows - first));
      const auto same = std::find_if(pieces.begin(), pieces.end(), [&](const Piece& q) {
        return p.from.empty() && q.p->from.empty() && q.first == first && q.rows == some && q.p->w.codec == p.w.codec && q.p->w.group == p.w.group;
      });
      const bool arranged = same != pieces.end();
      pieces.push_back({&p, first, some, arranged ? same->at : floats, arranged});
      if (!arranged) floats += static_cast<size_t>(some) * padded(p.w.k);
      work += static_cast<int64_t>(p.n) * p.w.k * (some + 2) * (p.up ? 2 : 1);
      if (floats > static_cast<size_t>(MOST_ROWS) * 16384) flush();
    }
    if (!pieces.empty() && rows > MOST_ROWS) flush();
  }
  if (!pieces.empty()) flush();
}

namespace {
// Of `tiled` rows the whole tiles stand in tiles.
Weights stored(const char* w, const char* scales, const char* biases, int k, int group, int bits, Type scale_type, int tiled = 0) {
  return Weights{reinterpret_cast<const uint8_t*>(w), scales, biases, static_cast<int64_t>(k) * bits / 8, k, group, static_cast<Codec>(bits), scale_type, tiled / TILE * TILE};
}
// For products: those with 4 and 8 bits are whole, `integer` with activations of one byte instead of two; the other widths stay float.
Weights quantised(const char* w, const char* scales, const char* biases, int k, int group, int bits, Type scale_type, bool integer, int tiled) {
  Weights weights = stored(w, scales, biases, k, group, bits, scale_type, tiled);
  if (bits == 4) weights.codec = integer ? I4 : S4;
  if (bits == 8) weights.codec = integer ? I8 : S8;
  return weights;
}

// Only products in whole numbers read tiles.
void check_tiled(int bits, bool tiled) {
  if (tiled && bits != 4 && bits != 8) throw std::invalid_argument("tiled weights of " + std::to_string(bits) + " bits have no product");
}

// Weights [.., N, words], or their scales or biases, with every TILE rows interleaved. Lines of tiles are lines of the cache.
class Tiled : public Native {
 public:
  using Native::Native;
  const char* name() const override { return "GnomonTiled"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    const int64_t n = out.shape(-2), width = out.shape(-1), size = static_cast<int64_t>(out.itemsize());
    auto room = mx::allocator::malloc(out.nbytes() + 64);
    const auto place = static_cast<int64_t>(reinterpret_cast<uintptr_t>(room.buffer().raw_ptr()) % 64);
    mx::Strides strides(out.ndim(), 1);
    for (int i = static_cast<int>(out.ndim()) - 2; i >= 0; i--) strides[i] = strides[i + 1] * out.shape(i + 1);
    out.set_data(std::move(room), out.size(), strides, mx::array::Flags{true, true, false}, (64 - place) % 64);  // in bytes
    if (out.size() == 0) return;
    dispatch(name(), stream(), [x = Packed(in[0]), n, width, size, matrices = static_cast<int64_t>(out.size()) / (n * width), to = out.data<char>()]() mutable {
      const char* from = x.data();
      const int64_t tiles = n / TILE, step = TILE * width * size, matrix = n * width * size;
      split(matrices * tiles, matrices * n * width, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) {
          const int64_t at = i / tiles * matrix + i % tiles * step;
          if (size == 4) interleave<uint32_t>(from + at, width, to + at);
          else interleave<uint16_t>(from + at, width, to + at);
        }
      });
      for (int64_t e = 0; e < matrices; e++) std::memcpy(to + e * matrix + tiles * step, from + e * matrix + tiles * step, static_cast<size_t>(matrix - tiles * step));
    });
  }

 private:
  template <class T> static void interleave(const char* from, int64_t width, char* to) {
    auto* x = reinterpret_cast<const T*>(from);
    auto* y = reinterpret_cast<T*>(to);
    for (int64_t j = 0; j < width; j++, y += TILE)
      for (int r = 0; r < TILE; r++) y[r] = x[r * width + j];
  }
};

class QuantizedMatmul : public Native {
 public:
  QuantizedMatmul(mx::Stream s, int group, int bits, bool integer, bool tiled) : Native(s), group_(group), bits_(bits), integer_(integer), tiled_(tiled) {}
  const char* name() const override { return "GnomonQuantizedMatmul"; }
  bool is_equivalent(const mx::Primitive& o) const override {
    auto& q = static_cast<const QuantizedMatmul&>(o);
    return q.group_ == group_ && q.bits_ == bits_ && q.integer_ == integer_ && q.tiled_ == tiled_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override {
    auto s = in[0].shape();
    s.back() = in[1].shape(0);
    return {s};
  }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    dispatch(name(), stream(), [x = Rows(in[0]), w = Packed(in[1]), s = Packed(in[2]), b = Packed(in[3]), n = in[1].shape(0), group = group_, bits = bits_,
                        integer = integer_, tiled = tiled_, st = type_of(in[2].dtype()), to = out.data<char>(), ot = type_of(out.dtype())]() mutable {
      std::vector<Product> products;
      products.push_back({quantised(w.data(), s.data(), b.data(), x.width, group, bits, st, integer, tiled ? n : 0), n, to, ot, n});
      multiply_rows(x, products);
    });
  }

 private:
  int group_, bits_;
  bool integer_, tiled_;
};

// Pairs of a row block of x and a matrix, gathered by matrix; `make(e)` gives the product with matrix e.
template <class F> std::vector<Product> by_expert(const uint32_t* lhs, const uint32_t* rhs, int64_t pairs, int rows, int experts, F&& make) {
  std::vector<int> slot(experts, -1);
  std::vector<Product> products;
  for (int64_t i = 0; i < pairs; i++) {
    const uint32_t e = rhs[i];
    if (e >= static_cast<uint32_t>(experts)) throw std::out_of_range("expert index " + std::to_string(e) + " of " + std::to_string(experts));
    if (slot[e] < 0) {
      slot[e] = static_cast<int>(products.size());
      products.push_back(make(static_cast<int64_t>(e)));
    }
    auto& p = products[slot[e]];
    for (int r = 0; r < rows; r++) {
      p.from.push_back(static_cast<int64_t>(lhs[i]) * rows + r);
      p.to.push_back(i * rows + r);
    }
  }
  return products;
}

class GatherQmm : public Native {
 public:
  GatherQmm(mx::Stream s, int group, int bits, bool integer, bool tiled) : Native(s), group_(group), bits_(bits), integer_(integer), tiled_(tiled) {}
  const char* name() const override { return "GnomonGatherQmm"; }
  bool is_equivalent(const mx::Primitive& o) const override {
    auto& q = static_cast<const GatherQmm&>(o);
    return q.group_ == group_ && q.bits_ == bits_ && q.integer_ == integer_ && q.tiled_ == tiled_;
  }
  // inputs: x [..., M, K], w [E, N, packed], scales, biases, lhs [...] and rhs [...] of equal shape (uint32)
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    dispatch(name(), stream(), [x = Rows(in[0]), w = Packed(in[1]), s = Packed(in[2]), b = Packed(in[3]), lhs = Packed(in[4]), rhs = Packed(in[5]),
                        pairs = static_cast<int64_t>(in[5].size()), m = in[0].shape(-2), experts = in[1].shape(0), n = in[1].shape(1), group = group_, bits = bits_, integer = integer_,
                        tiled = tiled_, st = type_of(in[2].dtype()), to = out.data<char>(), ot = type_of(out.dtype())]() mutable {
      const int64_t row_bytes = static_cast<int64_t>(x.width) * bits / 8, scale_row = static_cast<int64_t>(x.width / group) * static_cast<int64_t>(type_size(st));
      auto products = by_expert(reinterpret_cast<const uint32_t*>(lhs.data()), reinterpret_cast<const uint32_t*>(rhs.data()), pairs, m, experts, [&](int64_t e) {
        return Product{quantised(w.data() + e * n * row_bytes, s.data() + e * n * scale_row, b.data() + e * n * scale_row, x.width, group, bits, st, integer, tiled ? n : 0), n, to, ot, n};
      });
      multiply_rows(x, products);
    });
  }

 private:
  int group_, bits_;
  bool integer_, tiled_;
};

class GatherMm : public Native {
 public:
  using Native::Native;
  const char* name() const override { return "GnomonGatherMm"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  // inputs: x [..., M, K], b [E, K, N], lhs and rhs as above
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    const auto& b = in[1];
    const int experts = b.shape(0), k = b.shape(1), n = b.shape(2);
    const bool straight = b.strides(1) == 1 && b.strides(2) >= k;
    dispatch(name(), stream(), [x = Rows(in[0]), b, straight, lhs = Packed(in[2]), rhs = Packed(in[3]), pairs = static_cast<int64_t>(in[3].size()), m = in[0].shape(-2), experts, k, n,
                        to = out.data<char>(), ot = type_of(out.dtype())]() mutable {
      const Type wt = type_of(b.dtype());
      const int64_t size = static_cast<int64_t>(type_size(wt));
      const char* base = b.data<char>();
      int64_t matrix = b.strides(0) * size, row_bytes = b.strides(2) * size;
      std::vector<char> turned;
      if (!straight) {
        turned.resize(static_cast<size_t>(experts) * n * k * size);
        char* p = turned.data();
        for (int e = 0; e < experts; e++)
          for (int j = 0; j < n; j++)
            for (int i = 0; i < k; i++, p += size) std::memcpy(p, base + (e * b.strides(0) + i * b.strides(1) + j * b.strides(2)) * size, size);
        base = turned.data();
        row_bytes = k * size;
        matrix = n * row_bytes;
      }
      auto products = by_expert(reinterpret_cast<const uint32_t*>(lhs.data()), reinterpret_cast<const uint32_t*>(rhs.data()), pairs, m, experts, [&](int64_t e) {
        return Product{Weights{reinterpret_cast<const uint8_t*>(base + e * matrix), nullptr, nullptr, row_bytes, k, BLOCK, wt == F32 ? D_F32 : wt == F16 ? D_F16 : D_BF16, F32}, n, to, ot, n};
      });
      multiply_rows(x, products);
    });
  }
};

class QuantizedEmbedding : public Native {
 public:
  QuantizedEmbedding(mx::Stream s, int group, int bits, bool tiled) : Native(s), group_(group), bits_(bits), tiled_(tiled) {}
  const char* name() const override { return "GnomonQuantizedEmbedding"; }
  bool is_equivalent(const mx::Primitive& o) const override {
    auto& q = static_cast<const QuantizedEmbedding&>(o);
    return q.group_ == group_ && q.bits_ == bits_ && q.tiled_ == tiled_;
  }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    dispatch(name(), stream(), [ids = Packed(in[0]), w = Packed(in[1]), s = Packed(in[2]), b = Packed(in[3]), count = static_cast<int64_t>(in[0].size()), n = in[1].shape(0),
                        k = out.shape(-1), group = group_, bits = bits_, tiled = tiled_, st = type_of(in[2].dtype()), to = out.data<char>()]() mutable {
      const Table& t = table();
      auto* id = reinterpret_cast<const int32_t*>(ids.data());
      const Weights weights = stored(w.data(), s.data(), b.data(), k, group, bits, st, tiled ? n : 0);
      float* row = scratch<2>(padded(k));
      for (int64_t i = 0; i < count; i++) {
        const int64_t r = id[i] < 0 ? id[i] + static_cast<int64_t>(n) : id[i];
        if (r < 0 || r >= n) throw std::out_of_range("token id " + std::to_string(id[i]) + " of " + std::to_string(n));
        t.decode_row(weights, r, row);
        t.from_f32(row, st, k, to + i * k * static_cast<int64_t>(type_size(st)));
      }
    });
  }

 private:
  int group_, bits_;
  bool tiled_;
};

class Dequantised : public Native {
 public:
  Dequantised(mx::Stream s, int group, int bits) : Native(s), group_(group), bits_(bits) {}
  const char* name() const override { return "GnomonDequantised"; }
  bool is_equivalent(const mx::Primitive& o) const override {
    auto& q = static_cast<const Dequantised&>(o);
    return q.group_ == group_ && q.bits_ == bits_;
  }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    Rows codes(in[0]);
    codes.type = F32;  // words of 32 bits
    dispatch(name(), stream(), [codes, s = Packed(in[1]), b = Packed(in[2]), k = out.shape(-1), group = group_, bits = bits_, type = type_of(out.dtype()), to = out.data<char>()]() mutable {
      const Table& t = table();
      const char *scales = s.data(), *biases = b.data();
      const int64_t size = static_cast<int64_t>(type_size(type)), each = k / group * size;
      split(codes.count, codes.count * k, [&](int64_t from, int64_t end) {
        float* row = scratch<2>(padded(k));
        float* room = scratch<1>(codes.width);
        for (int64_t i = from; i < end; i++) {
          const char* words = codes.row(i);
          if (codes.step != 1) {
            for (int j = 0; j < codes.width; j++) std::memcpy(room + j, words + 4 * j * codes.step, 4);
            words = reinterpret_cast<const char*>(room);
          }
          const Weights one = stored(words, scales + i * each, biases + i * each, k, group, bits, type);
          t.decode_row(one, 0, row);
          t.from_f32(row, type, k, to + i * k * size);
        }
      });
    });
  }

 private:
  int group_, bits_;
};

class DenseMatmul : public Native {
 public:
  using Native::Native;
  const char* name() const override { return "GnomonDenseMatmul"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override {
    auto s = in[0].shape();
    s.back() = in[1].shape(0);
    return {s};
  }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    const bool straight = in[1].strides(1) == 1 && in[1].strides(0) >= in[1].shape(1);
    dispatch(name(), stream(), [x = Rows(in[0]), w = Packed(in[1]), in_place = straight ? in[1].data<char>() : nullptr, pitch = straight ? in[1].strides(0) : in[1].shape(1),
                        n = in[1].shape(0), wt = type_of(in[1].dtype()), to = out.data<char>(), ot = type_of(out.dtype())]() mutable {
      Weights weights{reinterpret_cast<const uint8_t*>(in_place ? in_place : w.data()), nullptr, nullptr, static_cast<int64_t>(pitch * type_size(wt)), x.width, BLOCK,
                      wt == F32 ? D_F32 : wt == F16 ? D_F16 : D_BF16, F32};
      std::vector<Product> products;
      products.push_back({weights, n, to, ot, n});
      multiply_rows(x, products);
    });
  }
};
}  // namespace

mx::array quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, bool integer, bool tiled, mx::StreamOrDevice s) {
  check_tiled(bits, tiled);
  auto stream = mx::to_stream(s);
  auto shape = x.shape();
  shape.back() = w.shape(0);
  return mx::array(std::move(shape), mx::result_type(x, scales), std::make_shared<QuantizedMatmul>(stream, group, bits, integer, tiled), {x, w, scales, biases});
}

namespace {
// The index arrays, broadcast against each other; rows of x stand in order without `lhs`.
std::pair<mx::array, mx::array> pairs_of(const mx::array& x, const std::optional<mx::array>& lhs, const mx::array& rhs, mx::Stream stream) {
  mx::Shape batch(x.shape().begin(), x.shape().end() - 2);
  int count = 1;
  for (auto b : batch) count *= b;
  mx::array left = lhs ? *lhs : mx::reshape(mx::arange(count, mx::uint32, stream), batch, stream);
  auto both = mx::broadcast_arrays({mx::astype(left, mx::uint32, stream), mx::astype(rhs, mx::uint32, stream)}, stream);
  return {both[0], both[1]};
}
}  // namespace

mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales, const mx::array& biases, const std::optional<mx::array>& lhs,
                     const mx::array& rhs, int group, int bits, bool integer, bool tiled, mx::StreamOrDevice s) {
  check_tiled(bits, tiled);
  auto stream = mx::to_stream(s);
  auto [left, right] = pairs_of(x, lhs, rhs, stream);
  auto shape = right.shape();
  shape.push_back(x.shape(-2));
  shape.push_back(w.shape(1));
  return mx::array(std::move(shape), mx::result_type(x, scales), std::make_shared<GatherQmm>(stream, group, bits, integer, tiled), {x, w, scales, biases, left, right});
}

mx::array gather_mm(const mx::array& x, const mx::array& b, const std::optional<mx::array>& lhs, const mx::array& rhs, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  auto [left, right] = pairs_of(x, lhs, rhs, stream);
  auto shape = right.shape();
  shape.push_back(x.shape(-2));
  shape.push_back(b.shape(2));
  return mx::array(std::move(shape), mx::result_type(x, b), std::make_shared<GatherMm>(stream), {x, b, left, right});
}

mx::array dequantise(const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  auto shape = scales.shape();
  shape.back() *= group;
  return mx::array(std::move(shape), scales.dtype(), std::make_shared<Dequantised>(stream, group, bits), {w, scales, biases});
}

mx::array quantized_embedding(const mx::array& ids, const mx::array& w, const mx::array& scales, const mx::array& biases, int group, int bits, bool tiled, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  auto shape = ids.shape();
  shape.push_back(scales.shape(1) * group);
  return mx::array(std::move(shape), scales.dtype(), std::make_shared<QuantizedEmbedding>(stream, group, bits, tiled), {mx::astype(ids, mx::int32, stream), w, scales, biases});
}

mx::array dense_matmul(const mx::array& x, const mx::array& w, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  auto shape = x.shape();
  shape.back() = w.shape(0);
  return mx::array(std::move(shape), mx::result_type(x, w), std::make_shared<DenseMatmul>(stream), {x, w});
}

mx::array tiled(const mx::array& w, mx::StreamOrDevice s) {
  if (w.ndim() < 2 || (w.itemsize() != 4 && w.itemsize() != 2)) throw std::invalid_argument("tiles are of matrices of 2 or 4 bytes a value");
  return mx::array(w.shape(), w.dtype(), std::make_shared<Tiled>(mx::to_stream(s)), {w});
}

void Projection::push(std::vector<mx::array>& in) const {
  in.push_back(w);
  if (scales) in.push_back(*scales), in.push_back(*biases);
  if (bias) in.push_back(*bias);
}

Projection::Projection(mx::array w, std::optional<mx::array> scales, std::optional<mx::array> biases, std::optional<mx::array> bias, int group, int bits, bool integer, bool tiled)
    : w(std::move(w)), scales(std::move(scales)), biases(std::move(biases)), bias(std::move(bias)), group(group), bits(bits), integer(integer), tiled(tiled) {
  check_tiled(bits, tiled);
}

Operands::Operands(const Projection& p, const std::vector<mx::array>& in, size_t& next) : n(p.outputs()), k_(p.inputs()), group_(p.group), bits_(p.bits), integer_(p.integer), tiled_(p.tiled), type_(type_of(p.type())) {
  w_.emplace(in[next++]);
  if (p.scales) {
    scales_.emplace(in[next++]);
    biases_.emplace(in[next++]);
  }
  if (p.bias) {
    bias_type_ = type_of(in[next].dtype());
    bias_.emplace(in[next++]);
  }
}
Weights Operands::weights() {
  if (scales_) return quantised(w_->data(), scales_->data(), biases_->data(), k_, group_, bits_, type_, integer_, tiled_ ? n : 0);
  return Weights{reinterpret_cast<const uint8_t*>(w_->data()), nullptr, nullptr, static_cast<int64_t>(k_ * type_size(type_)), k_, BLOCK,
                 type_ == F32 ? D_F32 : type_ == F16 ? D_F16 : D_BF16, F32};
}
const float* Operands::bias() {
  if (!bias_) return nullptr;
  wide_bias_.resize(n);
  table().to_f32(bias_->data(), bias_type_, n, wide_bias_.data());
  return wide_bias_.data();
}

Stack::Stack(const Projection& p, const std::vector<mx::array>& in, size_t& next)
    : n(p.w.shape(1)), k_(p.scales ? p.scales->shape(2) * p.group : p.w.shape(2)), group_(p.group), bits_(p.bits), integer_(p.integer), tiled_(p.tiled), type_(type_of(p.type())) {
  w_.emplace(in[next++]);
  if (!p.scales) return;
  scales_.emplace(in[next++]);
  biases_.emplace(in[next++]);
}
void Stack::prepare() {
  data_ = w_->data();
  if (!scales_) return;
  scale_data_ = scales_->data();
  bias_data_ = biases_->data();
}
Weights Stack::weights(int64_t e) const {
  const int64_t size = static_cast<int64_t>(type_size(type_));
  if (!scales_)
    return Weights{reinterpret_cast<const uint8_t*>(data_ + e * n * k_ * size), nullptr, nullptr, k_ * size, k_, BLOCK, type_ == F32 ? D_F32 : type_ == F16 ? D_F16 : D_BF16, F32};
  const int64_t matrix = e * n * k_ * bits_ / 8, scale = e * n * (k_ / group_) * size;
  return quantised(data_ + matrix, scale_data_ + scale, bias_data_ + scale, k_, group_, bits_, type_, integer_, tiled_ ? n : 0);
}
}  // namespace gnomon
