#include "recurrent.h"

namespace gnomon {
namespace {
constexpr int ROWS_OF_STATE = 16;  // at a time: with them, k and q stay in the first-level cache

class GatedDelta : public mx::Primitive {
 public:
  GatedDelta(mx::Stream s, bool masked) : Primitive(s), masked_(masked) {}
  const char* name() const override { return "GnomonGatedDelta"; }
  bool is_equivalent(const mx::Primitive& o) const override { return static_cast<const GatedDelta&>(o).masked_ == masked_; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonGatedDelta runs on the CPU only"); }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    allocate(out[0]);
    allocate(out[1]);
    const auto &qa = in[0], &va = in[2];
    const int batch = qa.shape(0), tokens = qa.shape(1), k_heads = qa.shape(2), dk = qa.shape(3), v_heads = va.shape(2), dv = va.shape(3);
    std::optional<Packed> mask;
    if (masked_) mask.emplace(in[6]);
    // g has one number per head, or one per column of the state
    const bool each = in[3].ndim() == 4;
    dispatch(name(), stream(), [q = Rows(in[0]), k = Rows(in[1]), v = Rows(in[2]), g = Packed(in[3]), beta = Packed(in[4]), beta_type = type_of(in[4].dtype()), state = Rows(in[5]),
                        mask = std::move(mask), each, batch, tokens, k_heads, dk, v_heads, dv, y = out[0].data<char>(), yt = type_of(out[0].dtype()), to = out[1].data<char>(),
                        st = type_of(out[1].dtype())]() mutable {
      const Table& t = table();
      const int dkp = (dk + 15) / 16 * 16, repeat = v_heads / k_heads, parts = (dv + ROWS_OF_STATE - 1) / ROWS_OF_STATE;
      const auto* gates = reinterpret_cast<const float*>(g.data());
      const char* betas = beta.data();
      const auto* seen = mask ? reinterpret_cast<const bool*>(mask->data()) : nullptr;
      auto one = [&](int n) {
        const int part = n % parts, h = n / parts % v_heads, b = n / parts / v_heads;
        const int d0 = part * ROWS_OF_STATE, rows = std::min(ROWS_OF_STATE, dv - d0);
        float* s = scratch<1>(static_cast<size_t>(ROWS_OF_STATE + 3) * dkp + dv + 2 * ROWS_OF_STATE + 64);
        float *kf = s + static_cast<size_t>(ROWS_OF_STATE) * dkp, *qf = kf + dkp, *gf = qf + dkp, *vf = gf + dkp, *yf = vf + dv + 16;
        std::memset(s, 0, static_cast<size_t>(ROWS_OF_STATE + 3) * dkp * 4);
        auto copy = [&](const Rows& x, int64_t row, int width, float* into) {
          const float* p = widen(t, x.row(row), x.type, x.step, width, into);
          if (p != into) std::memcpy(into, p, static_cast<size_t>(width) * 4);
        };
        for (int r = 0; r < rows; r++) copy(state, (static_cast<int64_t>(b) * v_heads + h) * dv + d0 + r, dk, s + static_cast<size_t>(r) * dkp);
        for (int i = 0; i < tokens; i++) {
          const int64_t token = static_cast<int64_t>(b) * tokens + i, at = token * v_heads + h;
          char* yt_row = y + (at * dv + d0) * static_cast<int64_t>(type_size(yt));
          if (seen && !seen[token]) {
            std::memset(yt_row, 0, rows * type_size(yt));
            continue;
          }
          copy(k, token * k_heads + h / repeat, dk, kf);
          copy(q, token * k_heads + h / repeat, dk, qf);
          copy(v, at, dv, vf);
          if (each) std::memcpy(gf, gates + at * dk, static_cast<size_t>(dk) * 4);
          float bf;
          t.to_f32(betas + at * static_cast<int64_t>(type_size(beta_type)), beta_type, 1, &bf);
          t.delta_step(s, rows, dkp, kf, qf, each ? gf : gates + at, each, vf + d0, bf, yf);
          t.from_f32(yf, yt, rows, yt_row);
        }
        for (int r = 0; r < rows; r++)
          t.from_f32(s + static_cast<size_t>(r) * dkp, st, dk, to + ((static_cast<int64_t>(b) * v_heads + h) * dv + d0 + r) * dk * static_cast<int64_t>(type_size(st)));
      };
      const int tasks = batch * v_heads * parts;
      if (static_cast<int64_t>(tasks) * ROWS_OF_STATE * dk * (tokens + 1) < 65536)
        for (int n = 0; n < tasks; n++) one(n);
      else pool()->run(tasks, one);
    });
  }

 private:
  bool masked_;
};

class ShortConvolution : public Native {
 public:
  ShortConvolution(mx::Stream s, bool silu) : Native(s), silu_(silu) {}
  const char* name() const override { return "GnomonShortConvolution"; }
  bool is_equivalent(const mx::Primitive& o) const override { return static_cast<const ShortConvolution&>(o).silu_ == silu_; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    dispatch(name(), stream(), [x = Rows(in[0]), w = Packed(in[1]), wt = type_of(in[1].dtype()), taps = in[1].shape(1), length = in[0].shape(1), tokens = out.shape(1), batch = out.shape(0),
                        silu = silu_, to = out.data<char>(), ot = type_of(out.dtype())]() mutable {
      const Table& t = table();
      const int c = x.width;
      std::vector<float> plain(static_cast<size_t>(c) * taps), by_tap(static_cast<size_t>(c) * taps);
      t.to_f32(w.data(), wt, plain.size(), plain.data());
      for (int i = 0; i < c; i++)
        for (int j = 0; j < taps; j++) by_tap[static_cast<size_t>(j) * c + i] = plain[static_cast<size_t>(i) * taps + j];
      const int64_t rows = static_cast<int64_t>(batch) * tokens;
      split(rows, rows * c * taps, [&](int64_t from, int64_t end) {
        float* room = scratch<1>(static_cast<size_t>(taps + 1) * (c + 16));
        std::vector<const float*> window(taps);
        for (int64_t i = from; i < end; i++) {
          for (int j = 0; j < taps; j++) window[j] = widen(t, x.row(i / tokens * length + i % tokens + j), x.type, x.step, c, room + static_cast<size_t>(j) * (c + 16));
          float* y = ot == F32 ? reinterpret_cast<float*>(to) + i * c : room + static_cast<size_t>(taps) * (c + 16);
          t.convolve(window.data(), by_tap.data(), taps, c, silu, y);
          if (ot != F32) t.from_f32(y, ot, c, to + i * c * 2);
        }
      });
    });
  }

 private:
  bool silu_;
};
}  // namespace

std::vector<mx::array> gated_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g, const mx::array& beta, const mx::array& state,
                                   const std::optional<mx::array>& mask, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{q, k, v, mx::astype(g, mx::float32, stream), beta, state};
  if (mask) in.push_back(*mask);
  return mx::array::make_arrays({v.shape(), state.shape()}, {q.dtype(), state.dtype()}, std::make_shared<GatedDelta>(stream, mask.has_value()), in);
}
mx::array short_convolution(const mx::array& x, const mx::array& w, bool silu, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  mx::Shape shape{x.shape(0), x.shape(1) - w.shape(1) + 1, x.shape(2)};
  return mx::array(std::move(shape), mx::result_type(x, w), std::make_shared<ShortConvolution>(stream, silu), {x, w});
}
}  // namespace gnomon
