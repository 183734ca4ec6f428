#include "fused.h"

namespace gnomon {
namespace {

// A norm's weights at evaluation.
class Normaliser {
 public:
  Normaliser(const mx::array& w, float eps) : w_(w), type_(type_of(w.dtype())), n_(static_cast<int>(w.size())), eps_(eps) {}
  // y = norm(x) rounded to `type`; x and y may be the same. The calling thread's weights are widened once by `prepare`.
  void prepare(const Table& t) {
    wide_.resize(n_ + 16);
    t.to_f32(w_.data(), type_, n_, wide_.data());
  }
  void apply(const Table& t, const float* x, float* y, Type type) const {
    t.rms_norm(x, wide_.data(), n_, eps_, y);
    if (type == F32) return;
    uint16_t half[512];
    for (int i = 0; i < n_; i += 512) {
      const int some = std::min(512, n_ - i);
      t.from_f32(y + i, type, some, half);
      t.to_f32(half, type, some, y + i);
    }
  }

 private:
  Packed w_;
  Type type_;
  int n_;
  float eps_;
  std::vector<float> wide_;
};

// x itself, or its normalised rows in `room` as floats.
Rows normalised(const Table& t, const Rows& x, std::optional<Normaliser>& norm, Type type, std::vector<float>& room) {
  if (!norm) return x;
  norm->prepare(t);
  room.resize(static_cast<size_t>(x.count) * x.width + 16);
  split(x.count, x.count * x.width, [&](int64_t from, int64_t end) {
    for (int64_t i = from; i < end; i++) {
      float* y = room.data() + i * x.width;
      norm->apply(t, widen(t, x.row(i), x.type, x.step, x.width, y), y, type);
    }
  });
  Rows y = x;
  y.data = reinterpret_cast<const char*>(room.data());
  y.type = F32;
  y.step = 1;
  y.even = true;
  y.pitch = x.width;
  return y;
}

// Rows of `out` normalised, then added to the rows of `residual`.
void finish(const Table& t, char* out, Type type, int64_t rows, int n, std::optional<Normaliser>& norm, const std::optional<Rows>& residual) {
  if (!norm && !residual) return;
  if (norm) norm->prepare(t);
  const int np = (n + 63) / 16 * 16;
  split(rows, rows * n, [&](int64_t from, int64_t end) {
    float* room = scratch<1>(2 * np);
    for (int64_t i = from; i < end; i++) {
      char* at = out + i * n * static_cast<int64_t>(type_size(type));
      float* y = type == F32 ? reinterpret_cast<float*>(at) : room;
      if (type != F32) t.to_f32(at, type, n, y);
      if (norm) norm->apply(t, y, y, type);
      if (residual) t.add_rows(widen(t, residual->row(i), residual->type, residual->step, n, room + np), y, n, y);
      if (type != F32) t.from_f32(y, type, n, at);
    }
  });
}

class Heads : public mx::Primitive {
 public:
  Heads(mx::Stream s, HeadForm form, std::vector<Projection> p, bool norm, float eps, bool q_norm, bool k_norm, bool offset, bool freqs)
      : Primitive(s), form_(form), p_(std::move(p)), eps_(eps), norm_(norm), q_norm_(q_norm), k_norm_(k_norm), offset_(offset), freqs_(freqs) {}
  const char* name() const override { return "GnomonHeads"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonHeads runs on the CPU only"); }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    size_t next = 1;
    struct Work {
      Rows x;
      std::optional<Normaliser> norm, head_norms[2];
      std::optional<Packed> offset, freqs;
      int64_t num_offsets = 0;
      std::vector<Operands> operands;
      char* to[3];
      Type type;
    };
    auto w = std::make_shared<Work>(Work{Rows(in[0]), {}, {}, {}, {}, 0, {}, {}, type_of(out[0].dtype())});
    if (norm_) w->norm.emplace(in[next++], eps_);
    if (q_norm_) w->head_norms[0].emplace(in[next++], form_.norm_eps);
    if (k_norm_) w->head_norms[1].emplace(in[next++], form_.norm_eps);
    if (offset_) w->num_offsets = static_cast<int64_t>(in[next].size()), w->offset.emplace(in[next++]);
    if (freqs_) w->freqs.emplace(in[next++]);
    for (auto& p : p_) w->operands.emplace_back(p, in, next);
    for (int i = 0; i < 3; i++) {
      // Positions outside heads, as the products write them.
      const int64_t h = out[i].shape(1), l = out[i].shape(2), d = out[i].shape(3);
      out[i].set_data(mx::allocator::malloc(out[i].nbytes()), out[i].size(), mx::Strides{l * h * d, d, h * d, 1}, mx::array::Flags{true, l == 1 || h == 1, false});
      w->to[i] = out[i].data<char>();
    }
    if (in[0].size() == 0) return;
    const int d = out[0].shape(3);
    const int64_t length = in[0].shape(1);
    dispatch(name(), stream(), [w, form = form_, d, length] {
      const Table& t = table();
      std::vector<float> room;
      const Rows x = normalised(t, w->x, w->norm, w->type, room);
      std::vector<Product> products;
      for (int i = 0; i < 3; i++) {
        auto& o = w->operands[i];
        products.push_back({o.weights(), o.n, w->to[i], w->type, o.n});
        products.back().bias = o.bias();
      }
      multiply_rows(x, products);
      const int h = form.rope_dims / 2;
      if (!h && !w->head_norms[0] && !w->head_norms[1]) return;
      Angles* turn = h ? &angles(form.rope_dims, form.base, form.scale, w->freqs ? reinterpret_cast<const float*>(w->freqs->data()) : nullptr) : nullptr;
      auto* off = w->offset ? reinterpret_cast<const int32_t*>(w->offset->data()) : nullptr;
      for (auto& n : w->head_norms)
        if (n) n->prepare(t);
      const size_t size = type_size(w->type);
      float* both = scratch<1>(2 * (d + 64));
      float* other = both + d + 64;
      for (int64_t i = 0; i < x.count; i++) {
        const float* cos = turn ? turn->at((off ? off[w->num_offsets == 1 ? 0 : i / length] : 0) + i % length) : nullptr;
        for (int which = 0; which < 2; which++) {
          const int count = which ? form.k_heads : form.q_heads;
          for (int head = 0; head < count; head++) {
            char* at = w->to[which] + (i * count + head) * d * static_cast<int64_t>(size);
            float* y = w->type == F32 ? reinterpret_cast<float*>(at) : both;
            if (w->type != F32) t.to_f32(at, w->type, d, y);
            if (w->head_norms[which]) w->head_norms[which]->apply(t, y, y, w->type);
            if (turn) {
              t.rotate(y, cos, cos + h, h, form.traditional, other);
              std::memcpy(y, other, static_cast<size_t>(2 * h) * 4);
            }
            if (w->type != F32) t.from_f32(y, w->type, d, at);
          }
        }
      }
    });
  }

 private:
  HeadForm form_;
  std::vector<Projection> p_;
  float eps_;
  bool norm_, q_norm_, k_norm_, offset_, freqs_;
};

class Project : public Native {
 public:
  Project(mx::Stream s, Projection p, bool norm, float eps, bool residual) : Native(s), p_(std::move(p)), eps_(eps), norm_(norm), residual_(residual) {}
  const char* name() const override { return "GnomonProject"; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    size_t next = 1;
    struct Work {
      Rows x;
      std::optional<Normaliser> norm;
      std::optional<Rows> residual;
      std::optional<Operands> operands;
    };
    auto w = std::make_shared<Work>(Work{Rows(in[0]), {}, {}, {}});
    if (norm_) w->norm.emplace(in[next++], eps_);
    if (residual_) w->residual.emplace(in[next++]);
    w->operands.emplace(p_, in, next);
    dispatch(name(), stream(), [w, to = out.data<char>(), type = type_of(out.dtype())] {
      std::vector<Product> products;
      products.push_back({w->operands->weights(), w->operands->n, to, type, w->operands->n});
      products.back().bias = w->operands->bias();
      multiply_rows(w->x, products);
      finish(table(), to, type, w->x.count, w->operands->n, w->norm, w->residual);
    });
  }

 private:
  Projection p_;
  float eps_;
  bool norm_, residual_;
};

class GatedMlp : public Native {
 public:
  GatedMlp(mx::Stream s, std::vector<Projection> p, Activation a, bool before, float before_eps, bool after, float after_eps, bool residual)
      : Native(s), p_(std::move(p)), activation_(a), before_eps_(before_eps), after_eps_(after_eps), before_(before), after_(after), residual_(residual) {}
  const char* name() const override { return "GnomonGatedMlp"; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    size_t next = 1;
    struct Work {
      Rows x;
      std::optional<Normaliser> before, after;
      std::vector<Operands> operands;
    };
    auto w = std::make_shared<Work>(Work{Rows(in[0]), {}, {}, {}});
    if (before_) w->before.emplace(in[next++], before_eps_);
    if (after_) w->after.emplace(in[next++], after_eps_);
    for (auto& p : p_) w->operands.emplace_back(p, in, next);
    dispatch(name(), stream(), [w, to = out.data<char>(), type = type_of(out.dtype()), activation = activation_, residual = residual_] {
      const Table& t = table();
      std::vector<float> room;
      const Rows x = normalised(t, w->x, w->before, type, room);
      auto &gate = w->operands[0], &up = w->operands[1], &down = w->operands[2];
      std::vector<char> hidden(static_cast<size_t>(x.count) * gate.n * type_size(type) + 64);
      std::vector<Product> first, second;
      first.push_back({gate.weights(), gate.n, hidden.data(), type, gate.n});
      first.back().bias = gate.bias();
      first.back().up = up.weights();
      first.back().up_bias = up.bias();
      first.back().activation = activation;
      multiply_rows(x, first);
      Rows h = x;
      h.data = hidden.data();
      h.type = type;
      h.width = gate.n;
      h.step = 1;
      h.even = true;
      h.pitch = gate.n;
      second.push_back({down.weights(), down.n, to, type, down.n});
      second.back().bias = down.bias();
      multiply_rows(h, second);
      finish(t, to, type, x.count, down.n, w->after, residual ? std::optional<Rows>(w->x) : std::nullopt);
    });
  }

 private:
  std::vector<Projection> p_;
  Activation activation_;
  float before_eps_, after_eps_;
  bool before_, after_, residual_;
};
}  // namespace

std::vector<mx::array> heads(const mx::array& x, const std::optional<mx::array>& norm, float eps, const Projection& q, const Projection& k, const Projection& v,
                             const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm, const HeadForm& form, const std::optional<mx::array>& offset,
                             const std::optional<mx::array>& freqs, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x};
  if (norm) in.push_back(*norm);
  if (q_norm) in.push_back(*q_norm);
  if (k_norm) in.push_back(*k_norm);
  if (offset) in.push_back(mx::astype(*offset, mx::int32, stream));
  if (freqs) in.push_back(mx::astype(*freqs, mx::float32, stream));
  for (auto* p : {&q, &k, &v}) p->push(in);
  const int d = q.outputs() / form.q_heads;
  std::vector<mx::Shape> shapes{{x.shape(0), form.q_heads, x.shape(1), d}, {x.shape(0), form.k_heads, x.shape(1), d}, {x.shape(0), form.k_heads, x.shape(1), v.outputs() / form.k_heads}};
  auto p = std::make_shared<Heads>(stream, form, std::vector<Projection>{q, k, v}, norm.has_value(), eps, q_norm.has_value(), k_norm.has_value(), offset.has_value(), freqs.has_value());
  return mx::array::make_arrays(std::move(shapes), {x.dtype(), x.dtype(), x.dtype()}, p, in);
}

mx::array project(const mx::array& x, const Projection& p, const std::optional<mx::array>& norm, float eps, const std::optional<mx::array>& residual, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x};
  if (norm) in.push_back(*norm);
  if (residual) in.push_back(*residual);
  p.push(in);
  auto shape = x.shape();
  shape.back() = p.outputs();
  return mx::array(std::move(shape), x.dtype(), std::make_shared<Project>(stream, p, norm.has_value(), eps, residual.has_value()), std::move(in));
}

mx::array gated_mlp(const mx::array& x, const std::optional<mx::array>& before, float before_eps, const Projection& gate, const Projection& up, const Projection& down, int activation,
                    const std::optional<mx::array>& after, float after_eps, bool residual, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x};
  if (before) in.push_back(*before);
  if (after) in.push_back(*after);
  for (auto* p : {&gate, &up, &down}) p->push(in);
  auto shape = x.shape();
  shape.back() = down.outputs();
  return mx::array(std::move(shape), x.dtype(),
                   std::make_shared<GatedMlp>(stream, std::vector<Projection>{gate, up, down}, static_cast<Activation>(activation), before.has_value(), before_eps, after.has_value(), after_eps, residual),
                   std::move(in));
}
}  // namespace gnomon
