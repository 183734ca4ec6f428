#include "rows.h"
#include <cmath>
#include <map>

namespace gnomon {
namespace {

class Norm : public Native {
 public:
  Norm(mx::Stream s, float eps, bool centred, bool weighted, bool biased) : Native(s), eps_(eps), centred_(centred), weighted_(weighted), biased_(biased) {}
  const char* name() const override { return centred_ ? "GnomonLayerNorm" : "GnomonRMSNorm"; }
  bool is_equivalent(const mx::Primitive& o) const override {
    auto& n = static_cast<const Norm&>(o);
    return n.eps_ == eps_ && n.centred_ == centred_ && n.weighted_ == weighted_ && n.biased_ == biased_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override { return {in[0].shape()}; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    std::optional<Packed> w, b;
    Type wt = F32, bt = F32;
    if (weighted_) w.emplace(in[1]), wt = type_of(in[1].dtype());
    if (biased_) b.emplace(in[weighted_ ? 2 : 1]), bt = type_of(in[weighted_ ? 2 : 1].dtype());
    dispatch(name(), stream(), [x = Rows(in[0]), w = std::move(w), b = std::move(b), wt, bt, eps = eps_, centred = centred_, to = out.data<char>(), ot = type_of(out.dtype())]() mutable {
      const Table& t = table();
      const int n = x.width, np = (n + 63) / 16 * 16;
      float* shared = scratch<0>(2 * np);
      const float* wf = w ? widen(t, w->data(), wt, 1, n, shared) : nullptr;
      const float* bf = b ? widen(t, b->data(), bt, 1, n, shared + np) : nullptr;
      split(x.count, x.count * n, [&](int64_t from, int64_t end) {
        float* room = scratch<1>(2 * np);
        for (int64_t i = from; i < end; i++) {
          const float* row = widen(t, x.row(i), x.type, x.step, n, room);
          float* y = ot == F32 ? reinterpret_cast<float*>(to) + i * n : room + np;
          if (centred) t.layer_norm(row, wf, bf, n, eps, y);
          else t.rms_norm(row, wf, n, eps, y);
          if (ot != F32) t.from_f32(y, ot, n, to + i * n * 2);
        }
      });
    });
  }

 private:
  float eps_;
  bool centred_, weighted_, biased_;
};

class Gated : public Native {
 public:
  Gated(mx::Stream s, Activation a) : Native(s), activation_(a) {}
  const char* name() const override { return "GnomonGated"; }
  bool is_equivalent(const mx::Primitive& o) const override { return static_cast<const Gated&>(o).activation_ == activation_; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override { return {in[0].shape()}; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    dispatch(name(), stream(), [g = Rows(in[0]), u = Rows(in[1]), a = activation_, to = out.data<char>(), ot = type_of(out.dtype())] {
      const Table& t = table();
      const int n = g.width, np = (n + 63) / 16 * 16;
      split(g.count, g.count * n * 8, [&](int64_t from, int64_t end) {
        float* room = scratch<1>(3 * np);
        for (int64_t i = from; i < end; i++) {
          const float *gr = widen(t, g.row(i), g.type, g.step, n, room), *ur = widen(t, u.row(i), u.type, u.step, n, room + np);
          float* y = ot == F32 ? reinterpret_cast<float*>(to) + i * n : room + 2 * np;
          t.gate(a, gr, ur, n, y);
          if (ot != F32) t.from_f32(y, ot, n, to + i * n * 2);
        }
      });
    });
  }

 private:
  Activation activation_;
};

enum Reduction : int { SOFTMAX, LOGSUMEXP, ARGMAX };
class Reduce : public Native {
 public:
  Reduce(mx::Stream s, Reduction kind) : Native(s), kind_(kind) {}
  const char* name() const override { return kind_ == SOFTMAX ? "GnomonSoftmax" : kind_ == LOGSUMEXP ? "GnomonLogSumExp" : "GnomonArgmax"; }
  bool is_equivalent(const mx::Primitive& o) const override { return static_cast<const Reduce&>(o).kind_ == kind_; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    const Type ot = kind_ == ARGMAX ? F32 : type_of(out.dtype());
    dispatch(name(), stream(), [x = Rows(in[0]), kind = kind_, to = out.data<char>(), ot] {
      const Table& t = table();
      const int n = x.width, np = (n + 63) / 16 * 16;
      split(x.count, x.count * n * 4, [&](int64_t from, int64_t end) {
        float* room = scratch<1>(2 * np);
        for (int64_t i = from; i < end; i++) {
          const float* row = widen(t, x.row(i), x.type, x.step, n, room);
          const float m = t.row_max(row, n);
          if (kind == ARGMAX) {
            uint32_t at = 0;
            if (m == m) {
              while (row[at] != m) at++;
            } else {
              while (row[at] == row[at]) at++;
            }
            reinterpret_cast<uint32_t*>(to)[i] = at;
            continue;
          }
          if (kind == LOGSUMEXP) {
            float y = m;
            if (std::isfinite(m)) y = m + static_cast<float>(std::log(static_cast<double>(t.exp_sum(row, n, m, nullptr))));
            t.from_f32(&y, ot, 1, to + i * static_cast<int64_t>(type_size(ot)));
            continue;
          }
          float* y = ot == F32 ? reinterpret_cast<float*>(to) + i * n : room + np;
          t.divide_row(y, n, t.exp_sum(row, n, m, y));
          if (ot != F32) t.from_f32(y, ot, n, to + i * n * 2);
        }
      });
    });
  }

 private:
  Reduction kind_;
};

class Rope : public Native {
 public:
  Rope(mx::Stream s, int dims, bool traditional, float base, float scale) : Native(s), dims_(dims), traditional_(traditional), base_(base), scale_(scale) {}
  const char* name() const override { return "GnomonRope"; }
  bool is_equivalent(const mx::Primitive& o) const override {
    auto& r = static_cast<const Rope&>(o);
    return r.dims_ == dims_ && r.traditional_ == traditional_ && r.base_ == base_ && r.scale_ == scale_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& in) override { return {in[0].shape()}; }
  // inputs: x [B, .., L, D], offset int32 [1] or [B], perhaps freqs [dims / 2]
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    std::optional<Packed> freqs;
    if (in.size() > 2) freqs.emplace(in[2]);
    dispatch(name(), stream(), [x = Rows(in[0]), offsets = Packed(in[1]), num_offsets = static_cast<int64_t>(in[1].size()), freqs = std::move(freqs), dims = dims_, traditional = traditional_,
                        base = base_, scale = scale_, to = out.data<char>()]() mutable {
      const Table& t = table();
      auto* off = reinterpret_cast<const int32_t*>(offsets.data());
      Angles& turn = angles(dims, base, scale, freqs ? reinterpret_cast<const float*>(freqs->data()) : nullptr);
      const int n = x.width, np = (n + 63) / 16 * 16, h = dims / 2;
      const int64_t length = x.shape.back(), per_batch = x.count / x.shape.front();
      float* room = scratch<1>(2 * np);
      for (int64_t i = 0; i < x.count; i++) {
        const float* cos = turn.at(off[num_offsets == 1 ? 0 : i / per_batch] + i % length);
        const float* row = widen(t, x.row(i), x.type, x.step, n, room);
        float* y = x.type == F32 ? reinterpret_cast<float*>(to) + i * n : room + np;
        t.rotate(row, cos, cos + h, h, traditional, y);
        std::memcpy(y + dims, row + dims, static_cast<size_t>(n - dims) * 4);
        if (x.type != F32) t.from_f32(y, x.type, n, to + i * n * 2);
      }
    });
  }

 private:
  int dims_;
  bool traditional_;
  float base_, scale_;
};
}  // namespace

const float* Angles::at(int64_t position) {
  const size_t slot = static_cast<size_t>(position) % SLOTS;
  if (slot >= held_.size()) {
    const size_t more = std::min<size_t>(SLOTS, std::max<size_t>(slot + 1, 2 * held_.size() + 64));
    held_.resize(more, INT64_MIN);
    values_.resize(more * 2 * half_);
  }
  float* v = &values_[slot * 2 * half_];
  if (held_[slot] != position) {
    const float p = static_cast<float>(position) * scale_;
    for (int i = 0; i < half_; i++) {
      const double angle = p * frequencies_[i];  // rounded to float32 first, as mlx does
      v[i] = static_cast<float>(std::cos(angle));
      v[half_ + i] = static_cast<float>(std::sin(angle));
    }
    held_[slot] = position;
  }
  return v;
}

Angles& angles(int dims, float base, float scale, const float* freqs) {
  const int half = dims / 2;
  static thread_local std::map<std::vector<float>, Angles> known;
  static thread_local std::vector<float> key;
  key.assign({static_cast<float>(dims), scale, freqs ? 0.0f : base});
  if (freqs) key.insert(key.end(), freqs, freqs + half);
  auto found = known.find(key);
  if (found == known.end()) {
    std::vector<float> f(half);
    const float step = std::log(base) / static_cast<float>(half);
    for (int i = 0; i < half; i++) f[i] = freqs ? 1.0f / freqs[i] : std::exp(-static_cast<float>(i) * step);
    if (known.size() >= 64) known.clear();
    found = known.emplace(key, Angles(half, std::move(f), scale)).first;
  }
  return found->second;
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& w, float eps, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x};
  if (w) in.push_back(*w);
  return mx::array(x.shape(), w ? mx::result_type(x, *w) : x.dtype(), std::make_shared<Norm>(stream, eps, false, w.has_value(), false), std::move(in));
}
mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& w, const std::optional<mx::array>& b, float eps, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x};
  auto type = x.dtype();
  if (w) in.push_back(*w), type = mx::promote_types(type, w->dtype());
  if (b) in.push_back(*b), type = mx::promote_types(type, b->dtype());
  return mx::array(x.shape(), type, std::make_shared<Norm>(stream, eps, true, w.has_value(), b.has_value()), std::move(in));
}
mx::array gated(const mx::array& gate, const mx::array& up, int activation, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  return mx::array(gate.shape(), gate.dtype(), std::make_shared<Gated>(stream, static_cast<Activation>(activation)), {gate, up});
}
mx::array softmax(const mx::array& x, mx::StreamOrDevice s) {
  return mx::array(x.shape(), x.dtype(), std::make_shared<Reduce>(mx::to_stream(s), SOFTMAX), {x});
}
namespace {
mx::Shape reduced(const mx::array& x, bool keepdims) {
  auto shape = x.shape();
  if (keepdims) shape.back() = 1;
  else shape.pop_back();
  return shape;
}
}  // namespace
mx::array logsumexp(const mx::array& x, bool keepdims, mx::StreamOrDevice s) {
  return mx::array(reduced(x, keepdims), x.dtype(), std::make_shared<Reduce>(mx::to_stream(s), LOGSUMEXP), {x});
}
mx::array argmax(const mx::array& x, bool keepdims, mx::StreamOrDevice s) {
  return mx::array(reduced(x, keepdims), mx::uint32, std::make_shared<Reduce>(mx::to_stream(s), ARGMAX), {x});
}
mx::array rope(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale, const mx::array& offset, const std::optional<mx::array>& freqs,
               mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x, mx::astype(offset, mx::int32, stream)};
  if (freqs) in.push_back(mx::astype(*freqs, mx::float32, stream));
  return mx::array(x.shape(), x.dtype(), std::make_shared<Rope>(stream, dims, traditional, base.value_or(1.0f), scale), std::move(in));
}
}  // namespace gnomon
