#include "recurrent.h"
#include <cmath>

namespace gnomon {
namespace {
constexpr int ROWS_OF_STATE = 16;  // at a time: with them, k and q stay in the first-level cache

// The rule over everything evaluated. `state` null: it starts at zero.
struct DeltaJob {
  const Rows &q, &k, &v;
  const float* gates;
  bool each;
  const char* betas;
  Type beta_type;
  const Rows* state;
  const bool* seen;
  int batch, tokens, k_heads, v_heads, dk, dv;
  char* y;
  Type yt;
  char* to;
  Type st;

  void run() const {
    const Table& t = table();
    const int dkp = (dk + 15) / 16 * 16, repeat = v_heads / k_heads, parts = (dv + ROWS_OF_STATE - 1) / ROWS_OF_STATE;
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
      for (int r = 0; state && r < rows; r++) copy(*state, (static_cast<int64_t>(b) * v_heads + h) * dv + d0 + r, dk, s + static_cast<size_t>(r) * dkp);
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
  }
};

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
      DeltaJob job{q, k, v, reinterpret_cast<const float*>(g.data()), each, beta.data(), beta_type, &state, mask ? reinterpret_cast<const bool*>(mask->data()) : nullptr,
                   batch, tokens, k_heads, v_heads, dk, dv, y, yt, to, st};
      job.run();
    });
  }

 private:
  bool masked_;
};

// Weights [C, taps, 1] as floats [taps, C].
std::vector<float> by_tap(const Table& t, const char* w, Type type, int channels, int taps) {
  std::vector<float> plain(static_cast<size_t>(channels) * taps + 16), turned(plain.size());
  t.to_f32(w, type, static_cast<size_t>(channels) * taps, plain.data());
  for (int i = 0; i < channels; i++)
    for (int j = 0; j < taps; j++) turned[static_cast<size_t>(j) * channels + i] = plain[static_cast<size_t>(i) * taps + j];
  return turned;
}

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
      const auto weights = by_tap(t, w.data(), wt, c, taps);
      const int64_t rows = static_cast<int64_t>(batch) * tokens;
      split(rows, rows * c * taps, [&](int64_t from, int64_t end) {
        float* room = scratch<1>(static_cast<size_t>(taps + 1) * (c + 16));
        std::vector<const float*> window(taps);
        for (int64_t i = from; i < end; i++) {
          for (int j = 0; j < taps; j++) window[j] = widen(t, x.row(i / tokens * length + i % tokens + j), x.type, x.step, c, room + static_cast<size_t>(j) * (c + 16));
          float* y = ot == F32 ? reinterpret_cast<float*>(to) + i * c : room + static_cast<size_t>(taps) * (c + 16);
          t.convolve(window.data(), weights.data(), taps, c, silu, y);
          if (ot != F32) t.from_f32(y, ot, c, to + i * c * 2);
        }
      });
    });
  }

 private:
  bool silu_;
};

class DeltaMixer : public mx::Primitive {
 public:
  DeltaMixer(mx::Stream s, DeltaForm form, std::vector<Projection> p, bool before, bool state, bool counts)
      : Primitive(s), form_(form), p_(std::move(p)), before_(before), state_(state), counts_(counts) {}
  const char* name() const override { return "GnomonDeltaMixer"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonDeltaMixer runs on the CPU only"); }
  // inputs: x, conv, a_log, dt_bias, norm, the projections, then before, state, counts where there are
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    struct Work {
      DeltaForm form;
      Rows x;
      int batch, tokens, taps;
      Packed conv, a_log, dt_bias, norm;
      Type types[4];
      std::vector<Operands> operands;
      std::optional<Packed> before, counts;
      std::optional<Rows> state;
    };
    for (auto& o : out) allocate(o);
    auto w = std::make_shared<Work>(Work{form_, Rows(in[0]), in[0].shape(0), in[0].shape(1), in[1].shape(1), Packed(in[1]), Packed(in[2]), Packed(in[3]), Packed(in[4]), {}, {}, {}, {}, {}});
    for (int i = 0; i < 4; i++) w->types[i] = type_of(in[1 + i].dtype());
    size_t next = 5;
    for (auto& p : p_) w->operands.emplace_back(p, in, next);
    if (before_) w->before.emplace(in[next++]);
    if (state_) w->state.emplace(in[next++]);
    if (counts_) w->counts.emplace(in[next++]);
    if (in[0].size() == 0) return;
    dispatch(name(), stream(), [w, to = out[0].data<char>(), kept = out[1].data<char>(), state = out[2].data<char>(), type = type_of(out[0].dtype()), st = type_of(out[2].dtype())] {
      const Table& t = table();
      const DeltaForm& f = w->form;
      const int batch = w->batch, tokens = w->tokens, taps = w->taps, qk = f.k_heads * f.dk, vs = f.v_heads * f.dv, channels = 2 * qk + vs;
      const int64_t size = static_cast<int64_t>(type_size(type)), rows = w->x.count;
      auto small = [&](Packed& a, Type from, int n) {
        std::vector<float> y(n + 16);
        t.to_f32(a.data(), from, n, y.data());
        return y;
      };
      const auto conv = by_tap(t, w->conv.data(), w->types[0], channels, taps);
      const auto a_log = small(w->a_log, w->types[1], f.v_heads), dt_bias = small(w->dt_bias, w->types[2], f.v_heads), norm = small(w->norm, w->types[3], f.dv);
      const int widths[4] = {channels, vs, f.v_heads, f.v_heads};
      std::vector<char> projected[4];
      std::vector<Product> products;
      for (int i = 0; i < 4; i++) {
        projected[i].resize(static_cast<size_t>(rows) * widths[i] * size + 64);
        products.push_back({w->operands[i].weights(), widths[i], projected[i].data(), type, widths[i]});
        products.back().bias = w->operands[i].bias();
      }
      multiply_rows(w->x, products);
      const auto* counts = w->counts ? reinterpret_cast<const int32_t*>(w->counts->data()) : nullptr;
      const char* before = w->before ? w->before->data() : nullptr;
      const std::vector<char> nothing(static_cast<size_t>(channels) * size + 64);
      // Row j of what the convolution of row b of the batch goes over: first what was kept, then the window.
      auto input = [&](int b, int64_t j) -> const char* {
        if (j < taps - 1) return before ? before + (static_cast<int64_t>(b) * (taps - 1) + j) * channels * size : nothing.data();
        const int64_t i = j - (taps - 1);
        return counts && i >= counts[b] ? nothing.data() : projected[0].data() + (static_cast<int64_t>(b) * tokens + i) * channels * size;
      };
      for (int b = 0; b < batch; b++)
        for (int j = 0; j < taps - 1; j++)
          std::memcpy(kept + (static_cast<int64_t>(b) * (taps - 1) + j) * channels * size, input(b, j + (counts ? std::clamp(counts[b], 0, tokens) : tokens)), static_cast<size_t>(channels) * size);
      // q, k and v as floats, each of its own pitch; gates; and which tokens are real.
      std::vector<float> q(static_cast<size_t>(rows) * qk + 16), k(q.size()), v(static_cast<size_t>(rows) * vs + 16), g(static_cast<size_t>(rows) * f.v_heads), beta(g.size());
      std::vector<char> seen(counts ? rows : 0);
      const float scale = 1.0f / std::sqrt(static_cast<float>(f.dk)), eps = 1e-6f * scale * scale;
      split(rows, rows * channels * taps, [&](int64_t from, int64_t end) {
        const size_t pitch = static_cast<size_t>(channels) + 16;
        float *room = scratch<1>(static_cast<size_t>(taps + 1) * pitch), *mixed = room + static_cast<size_t>(taps) * pitch;
        std::vector<const float*> window(taps);
        for (int64_t i = from; i < end; i++) {
          const int b = static_cast<int>(i / tokens);
          for (int j = 0; j < taps; j++) window[j] = widen(t, input(b, i % tokens + j), type, 1, channels, room + static_cast<size_t>(j) * pitch);
          t.convolve(window.data(), conv.data(), taps, channels, true, mixed);
          for (int h = 0; h < f.k_heads; h++) {
            float *qh = q.data() + i * qk + h * f.dk, *kh = k.data() + i * qk + h * f.dk;
            t.rms_norm(mixed + h * f.dk, nullptr, f.dk, eps, qh);
            t.scale_row(qh, f.dk, scale * scale);
            t.rms_norm(mixed + qk + h * f.dk, nullptr, f.dk, eps, kh);
            t.scale_row(kh, f.dk, scale);
          }
          std::memcpy(v.data() + i * vs, mixed + 2 * qk, static_cast<size_t>(vs) * 4);
          float *bh = beta.data() + i * f.v_heads, *gh = g.data() + i * f.v_heads;
          t.to_f32(projected[2].data() + i * f.v_heads * size, type, f.v_heads, bh);
          t.to_f32(projected[3].data() + i * f.v_heads * size, type, f.v_heads, gh);
          for (int h = 0; h < f.v_heads; h++) {
            bh[h] = 1.0f / (1.0f + std::exp(-bh[h]));
            const float a = gh[h] + dt_bias[h];
            gh[h] = std::exp(-std::exp(a_log[h]) * (std::max(a, 0.0f) + std::log1p(std::exp(-std::abs(a)))));
          }
          if (counts) seen[i] = i % tokens < counts[b];
        }
      });
      auto plain = [&](const std::vector<float>& a, int width) {
        Rows y = w->x;
        y.data = reinterpret_cast<const char*>(a.data());
        y.type = F32;
        y.width = width;
        y.step = 1;
        y.even = true;
        y.pitch = width;
        return y;
      };
      std::vector<float> found(static_cast<size_t>(rows) * vs + 16);
      const Rows qr = plain(q, f.dk), kr = plain(k, f.dk), vr = plain(v, f.dv);
      DeltaJob{qr, kr, vr, g.data(), false, reinterpret_cast<const char*>(beta.data()), F32, w->state ? &*w->state : nullptr, counts ? reinterpret_cast<const bool*>(seen.data()) : nullptr,
               batch, tokens, f.k_heads, f.v_heads, f.dk, f.dv, reinterpret_cast<char*>(found.data()), F32, state, st}
          .run();
      split(rows, rows * vs * 4, [&](int64_t from, int64_t end) {
        float *z = scratch<1>(2 * (static_cast<size_t>(vs) + 16)), *y = z + vs + 16;
        for (int64_t i = from; i < end; i++) {
          t.to_f32(projected[1].data() + i * vs * size, type, vs, z);
          for (int h = 0; h < f.v_heads; h++) t.rms_norm(found.data() + i * vs + h * f.dv, norm.data(), f.dv, f.norm_eps, y + h * f.dv);
          t.gate(SILU, z, y, vs, y);
          t.from_f32(y, type, vs, to + i * vs * size);
        }
      });
    });
  }

 private:
  DeltaForm form_;
  std::vector<Projection> p_;
  bool before_, state_, counts_;
};
}  // namespace

std::vector<mx::array> delta_mixer(const mx::array& x, const Projection& qkv, const Projection& z, const Projection& b, const Projection& a, const mx::array& conv, const mx::array& a_log,
                                   const mx::array& dt_bias, const mx::array& norm, int k_heads, int v_heads, float norm_eps, const std::optional<mx::array>& before,
                                   const std::optional<mx::array>& state, const std::optional<mx::array>& counts, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  const int values = z.outputs(), keys = qkv.outputs() - values;
  if (k_heads < 1 || v_heads < 1 || v_heads % k_heads || values % v_heads || keys < 2 * k_heads || keys % (2 * k_heads) || b.outputs() != v_heads || a.outputs() != v_heads ||
      conv.shape(0) != qkv.outputs() || static_cast<int>(norm.size()) != values / v_heads)
    throw std::invalid_argument("a mixer of " + std::to_string(k_heads) + " and " + std::to_string(v_heads) + " heads can't have projections to " + std::to_string(qkv.outputs()) + " and " +
                                std::to_string(values));
  const DeltaForm form{k_heads, v_heads, keys / (2 * k_heads), values / v_heads, norm_eps};
  std::vector<mx::array> in{x, conv, a_log, dt_bias, norm};
  for (auto* p : {&qkv, &z, &b, &a}) p->push(in);
  if (before) in.push_back(mx::astype(*before, x.dtype(), stream));
  if (state) in.push_back(*state);
  if (counts) in.push_back(mx::astype(*counts, mx::int32, stream));
  auto p = std::make_shared<DeltaMixer>(stream, form, std::vector<Projection>{qkv, z, b, a}, before.has_value(), state.has_value(), counts.has_value());
  return mx::array::make_arrays({{x.shape(0), x.shape(1), values}, {x.shape(0), conv.shape(1) - 1, qkv.outputs()}, {x.shape(0), v_heads, form.dv, form.dk}},
                                {x.dtype(), x.dtype(), state ? state->dtype() : mx::float32}, p, in);
}

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
