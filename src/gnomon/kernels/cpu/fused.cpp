#include "fused.h"
#include <array>
#include "block.h"

namespace gnomon {
namespace {

class Heads : public mx::Primitive {
 public:
  Heads(mx::Stream s, HeadForm form, std::vector<Projection> p, bool norm, float eps, bool q_norm, bool k_norm, bool offset, bool freqs)
      : Primitive(s), form_(form), p_(std::move(p)), eps_(eps), norm_(norm), q_norm_(q_norm), k_norm_(k_norm), offset_(offset), freqs_(freqs) {}
  const char* name() const override { return "GnomonHeads"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonHeads runs on the CPU only"); }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    size_t next = 1;
    auto w = std::make_shared<HeadsParts>(HeadsParts{form_});
    auto offset = take(*w, in, next);
    std::array<char*, 3> to;
    for (int i = 0; i < 3; i++) {
      const int64_t h = out[i].shape(1), l = out[i].shape(2), d = out[i].shape(3);
      out[i].set_data(mx::allocator::malloc(out[i].nbytes()), out[i].size(), mx::Strides{l * h * d, d, h * d, 1}, mx::array::Flags{true, l == 1 || h == 1, false});
      to[i] = out[i].data<char>();
    }
    if (in[0].size() == 0) return;
    dispatch(name(), stream(), [w, offset, x = Rows(in[0]), to, type = type_of(out[0].dtype()), d = out[0].shape(3), batch = in[0].shape(0), length = static_cast<int64_t>(in[0].shape(1))]() mutable {
      w->prepare(table());
      Room room;
      w->run(x, type, d, length, starts(offset, batch).data(), to.data(), room);
    });
  }

 protected:
  // The parts from a primitive's inputs, and the array of offsets if there is one.
  std::optional<mx::array> take(HeadsParts& w, const std::vector<mx::array>& in, size_t& next) const {
    if (norm_) w.norm.emplace(in[next++], eps_);
    if (q_norm_) w.head_norms[0].emplace(in[next++], form_.norm_eps);
    if (k_norm_) w.head_norms[1].emplace(in[next++], form_.norm_eps);
    std::optional<mx::array> offset;
    if (offset_) offset = in[next++];
    if (freqs_) w.freqs.emplace(in[next++]);
    for (auto& p : p_) w.operands.emplace_back(p, in, next);
    return offset;
  }
  // Positions of the rows' first tokens.
  static std::vector<int32_t> starts(const std::optional<mx::array>& offset, int batch) {
    std::vector<int32_t> found(batch, 0);
    if (!offset) return found;
    Packed packed(*offset);
    auto* given = reinterpret_cast<const int32_t*>(packed.data());
    for (int b = 0; b < batch; b++) found[b] = given[offset->size() == 1 ? 0 : b];
    return found;
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
  AttentionLayer(mx::Stream s, HeadForm form, std::vector<Projection> p, bool norm, float eps, bool q_norm, bool k_norm, bool freqs, float scale, bool after, float after_eps, bool residual, Ring ring)
      : Heads(s, form, std::move(p), norm, eps, q_norm, k_norm, true, freqs), scale_(scale), after_eps_(after_eps), after_(after), residual_(residual), ring_(std::move(ring)) {}
  const char* name() const override { return "GnomonAttentionLayer"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    struct Work {
      AttentionParts parts;
      std::optional<mx::array> offset;
      std::optional<Rows> residual;
      std::shared_ptr<mx::array::Data> held[2];  // until the step has run
      Buffers buffers;
    };
    auto w = std::make_shared<Work>(Work{{{form_}}, {}, {}, {}, {}});
    size_t next = 1;
    w->offset = take(w->parts, in, next);
    w->parts.scale = scale_;
    if (after_) w->parts.after.emplace(in[next++], after_eps_);
    if (residual_) w->residual.emplace(in[next++]);
    allocate(out[0]);
    for (int i = 0; i < 2; i++) {
      const mx::array& buffer = in[next++];
      if (!buffer.flags().row_contiguous) throw std::invalid_argument("buffers of keys and values must be contiguous to be appended to in place");
      out[1 + i].copy_shared_buffer(buffer);
      w->held[i] = out[1 + i].data_shared_ptr();
      w->buffers.data[i] = out[1 + i].data<char>();
    }
    w->buffers.slots = out[1].shape(2);
    w->buffers.ring = ring_;
    if (in[0].size() == 0) return;
    dispatch(name(), stream(), [w, x = Rows(in[0]), to = out[0].data<char>(), type = type_of(out[0].dtype()), batch = in[0].shape(0), length = static_cast<int64_t>(in[0].shape(1))] {
      w->parts.prepare(table());
      Room room;
      const std::vector<int32_t> first = starts(w->offset, batch);
      w->parts.attend_rows(x, type, {batch, length, first.data()}, w->buffers, w->residual, to, room);
    });
  }

 private:
  float scale_, after_eps_;
  bool after_, residual_;
  Ring ring_;
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
      if (w->norm) w->norm->prepare(table());
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
    auto w = std::make_shared<MlpParts>();
    w->activation = activation_;
    w->residual = residual_;
    if (before_) w->before.emplace(in[next++], before_eps_);
    if (after_) w->after.emplace(in[next++], after_eps_);
    for (auto& p : p_) w->operands.emplace_back(p, in, next);
    dispatch(name(), stream(), [w, x = Rows(in[0]), to = out.data<char>(), type = type_of(out.dtype())] {
      w->prepare(table());
      Room room;
      w->run(x, type, to, room);
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
  if (form.gated) throw std::invalid_argument("gated heads are a whole attention layer's");
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
                                       const std::optional<mx::array>& residual, const std::vector<int>& ring, mx::StreamOrDevice s) {
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
                                            after.has_value(), after_eps, residual.has_value(), Ring::of(ring, x.shape(0), x.shape(1)));
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
