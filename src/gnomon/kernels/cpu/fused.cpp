#include "fused.h"
#include <array>
#include "attention.h"

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

// Heads of q, k, v: norm, projections, norms per head, rotation.
struct HeadsWork {
  Rows x;
  Type type;
  std::optional<Normaliser> norm, head_norms[2];
  std::optional<Packed> offset, freqs;
  int64_t num_offsets = 0;
  std::vector<Operands> operands;

  HeadsWork(const mx::array& x, Type type) : x(x), type(type) {}
  // Position of a row's first token.
  int32_t start(int64_t row) const { return offset ? starts_[num_offsets == 1 ? 0 : row] : 0; }

  // To `to[0]`, `to[1]`, `to[2]` as [B, L, heads, D] with positions outside heads, as the products write them.
  void run(const HeadForm& form, int d, int64_t length, char* const* to) {
    const Table& t = table();
    std::vector<float> room;
    const Rows rows = normalised(t, x, norm, type, room);
    std::vector<Product> products;
    for (int i = 0; i < 3; i++) {
      auto& o = operands[i];
      products.push_back({o.weights(), o.n, to[i], type, o.n});
      products.back().bias = o.bias();
    }
    multiply_rows(rows, products);
    if (offset) starts_ = reinterpret_cast<const int32_t*>(offset->data());
    const int h = form.rope_dims / 2;
    if (!h && !head_norms[0] && !head_norms[1]) return;
    Angles* turn = h ? &angles(form.rope_dims, form.base, form.scale, freqs ? reinterpret_cast<const float*>(freqs->data()) : nullptr) : nullptr;
    for (auto& n : head_norms)
      if (n) n->prepare(t);
    const size_t size = type_size(type);
    float* both = scratch<1>(2 * (d + 64));
    float* other = both + d + 64;
    for (int64_t i = 0; i < x.count; i++) {
      const float* cos = turn ? turn->at(start(i / length) + i % length) : nullptr;
      for (int which = 0; which < 2; which++) {
        const int count = which ? form.k_heads : form.q_heads;
        for (int head = 0; head < count; head++) {
          char* at = to[which] + (i * count + head) * d * static_cast<int64_t>(size);
          float* y = type == F32 ? reinterpret_cast<float*>(at) : both;
          if (type != F32) t.to_f32(at, type, d, y);
          if (head_norms[which]) head_norms[which]->apply(t, y, y, type);
          if (turn) {
            t.rotate(y, cos, cos + h, h, form.traditional, other);
            std::memcpy(y, other, static_cast<size_t>(2 * h) * 4);
          }
          if (type != F32) t.from_f32(y, type, d, at);
        }
      }
    }
  }

 private:
  const int32_t* starts_ = nullptr;
};

class Heads : public mx::Primitive {
 public:
  Heads(mx::Stream s, HeadForm form, std::vector<Projection> p, bool norm, float eps, bool q_norm, bool k_norm, bool offset, bool freqs)
      : Primitive(s), form_(form), p_(std::move(p)), eps_(eps), norm_(norm), q_norm_(q_norm), k_norm_(k_norm), offset_(offset), freqs_(freqs) {}
  const char* name() const override { return "GnomonHeads"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonHeads runs on the CPU only"); }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    size_t next = 1;
    auto w = take(in, next, type_of(out[0].dtype()));
    std::array<char*, 3> to;
    for (int i = 0; i < 3; i++) {
      const int64_t h = out[i].shape(1), l = out[i].shape(2), d = out[i].shape(3);
      out[i].set_data(mx::allocator::malloc(out[i].nbytes()), out[i].size(), mx::Strides{l * h * d, d, h * d, 1}, mx::array::Flags{true, l == 1 || h == 1, false});
      to[i] = out[i].data<char>();
    }
    if (in[0].size() == 0) return;
    dispatch(name(), stream(), [w, to, form = form_, d = out[0].shape(3), length = static_cast<int64_t>(in[0].shape(1))] { w->run(form, d, length, to.data()); });
  }

 protected:
  std::shared_ptr<HeadsWork> take(const std::vector<mx::array>& in, size_t& next, Type type) const {
    auto w = std::make_shared<HeadsWork>(in[0], type);
    if (norm_) w->norm.emplace(in[next++], eps_);
    if (q_norm_) w->head_norms[0].emplace(in[next++], form_.norm_eps);
    if (k_norm_) w->head_norms[1].emplace(in[next++], form_.norm_eps);
    if (offset_) w->num_offsets = static_cast<int64_t>(in[next].size()), w->offset.emplace(in[next++]);
    if (freqs_) w->freqs.emplace(in[next++]);
    for (int i = 0; i < 3; i++) w->operands.emplace_back(p_[i], in, next);
    return w;
  }
  HeadForm form_;
  std::vector<Projection> p_;

 private:
  float eps_;
  bool norm_, q_norm_, k_norm_, offset_, freqs_;
};

// Heads, their append to keys and values where those lie, attention over them, and the output projection. The second and third outputs are the
// buffers that were given: whoever needs what was appended depends on them.
class AttentionLayer : public Heads {
 public:
  AttentionLayer(mx::Stream s, HeadForm form, std::vector<Projection> p, bool norm, float eps, bool q_norm, bool k_norm, bool freqs, float scale, bool after, float after_eps, bool residual)
      : Heads(s, form, std::move(p), norm, eps, q_norm, k_norm, true, freqs), scale_(scale), after_eps_(after_eps), after_(after), residual_(residual) {}
  const char* name() const override { return "GnomonAttentionLayer"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    struct Work {
      std::shared_ptr<HeadsWork> heads;
      std::optional<Operands> o;
      std::optional<Normaliser> after;
      std::optional<Rows> residual;
      std::shared_ptr<mx::array::Data> held[2];  // until the step has run
      char* buffer[2];
    };
    const Type type = type_of(out[0].dtype());
    auto w = std::make_shared<Work>();
    size_t next = 1;
    w->heads = take(in, next, type);
    w->o.emplace(p_[3], in, next);
    if (after_) w->after.emplace(in[next++], after_eps_);
    if (residual_) w->residual.emplace(in[next++]);
    allocate(out[0]);
    for (int i = 0; i < 2; i++) {
      const mx::array& buffer = in[next++];
      if (!buffer.flags().row_contiguous) throw std::invalid_argument("buffers of keys and values must be contiguous to be appended to in place");
      out[1 + i].copy_shared_buffer(buffer);
      w->held[i] = out[1 + i].data_shared_ptr();
      w->buffer[i] = out[1 + i].data<char>();
    }
    if (in[0].size() == 0) return;
    dispatch(name(), stream(), [w, to = out[0].data<char>(), type, form = form_, scale = scale_, batch = in[0].shape(0), length = in[0].shape(1), slots = out[1].shape(2), d = out[1].shape(3),
                        dv = out[2].shape(3)] {
      const Table& t = table();
      const int64_t size = static_cast<int64_t>(type_size(type)), count = static_cast<int64_t>(batch) * length;
      const int64_t wide[4] = {static_cast<int64_t>(form.q_heads) * d, static_cast<int64_t>(form.k_heads) * d, static_cast<int64_t>(form.k_heads) * dv, static_cast<int64_t>(form.q_heads) * dv};
      std::vector<char> room(static_cast<size_t>(count * (wide[0] + wide[1] + wide[2] + wide[3]) * size) + 64);
      char* at[4] = {room.data()};
      for (int i = 0; i < 3; i++) at[i + 1] = at[i] + count * wide[i] * size;
      w->heads->run(form, d, length, at);
      std::vector<int32_t> starts(batch);
      int end = 0;
      for (int b = 0; b < batch; b++) {
        starts[b] = w->heads->start(b);
        if (starts[b] < 0 || starts[b] + length > slots)
          throw std::out_of_range("row " + std::to_string(b) + " ends at " + std::to_string(starts[b] + length) + " of " + std::to_string(slots) + " slots");
        end = std::max(end, starts[b] + length);
        for (int i = 0; i < 2; i++) {
          const int64_t bytes = (i ? dv : d) * size;
          for (int l = 0; l < length; l++)
            for (int h = 0; h < form.k_heads; h++)
              std::memcpy(w->buffer[i] + ((static_cast<int64_t>(b) * form.k_heads + h) * slots + starts[b] + l) * bytes, at[1 + i] + ((static_cast<int64_t>(b) * length + l) * form.k_heads + h) * bytes,
                          static_cast<size_t>(bytes));
        }
      }
      AttentionJob j{Head(at[0], type, length * wide[0], d, wide[0]), Head(w->buffer[0], type, static_cast<int64_t>(form.k_heads) * slots * d, static_cast<int64_t>(slots) * d, d),
                     Head(w->buffer[1], type, static_cast<int64_t>(form.k_heads) * slots * dv, static_cast<int64_t>(slots) * dv, dv), batch, form.q_heads, form.k_heads, length, end, d, dv, scale,
                     MASK_CAUSAL, 0};
      j.starts = starts.data();
      j.out = at[3];
      j.out_type = type;
      attend(j);
      Rows y = w->heads->x;
      y.data = at[3];
      y.type = type;
      y.width = static_cast<int>(wide[3]);
      y.step = 1;
      y.even = true;
      y.pitch = wide[3];
      std::vector<Product> products;
      products.push_back({w->o->weights(), w->o->n, to, type, w->o->n});
      products.back().bias = w->o->bias();
      multiply_rows(y, products);
      finish(t, to, type, count, w->o->n, w->after, w->residual);
    });
  }

 private:
  float scale_, after_eps_;
  bool after_, residual_;
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

std::vector<mx::array> attention_layer(const mx::array& x, const std::optional<mx::array>& norm, float eps, const Projection& q, const Projection& k, const Projection& v, const Projection& o,
                                       const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm, const HeadForm& form, const mx::array& offset,
                                       const std::optional<mx::array>& freqs, float scale, const mx::array& keys, const mx::array& values, const std::optional<mx::array>& after, float after_eps,
                                       const std::optional<mx::array>& residual, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x};
  if (norm) in.push_back(*norm);
  if (q_norm) in.push_back(*q_norm);
  if (k_norm) in.push_back(*k_norm);
  in.push_back(mx::astype(offset, mx::int32, stream));
  if (freqs) in.push_back(mx::astype(*freqs, mx::float32, stream));
  for (auto* p : {&q, &k, &v, &o}) p->push(in);
  if (after) in.push_back(*after);
  if (residual) in.push_back(*residual);
  in.push_back(keys);
  in.push_back(values);
  auto shape = x.shape();
  shape.back() = o.outputs();
  auto p = std::make_shared<AttentionLayer>(stream, form, std::vector<Projection>{q, k, v, o}, norm.has_value(), eps, q_norm.has_value(), k_norm.has_value(), freqs.has_value(), scale,
                                            after.has_value(), after_eps, residual.has_value());
  return mx::array::make_arrays({shape, keys.shape(), values.shape()}, {x.dtype(), keys.dtype(), values.dtype()}, p, in);
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
