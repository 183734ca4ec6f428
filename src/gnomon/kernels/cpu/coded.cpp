#include "coded.h"
#include "attention.h"

namespace gnomon {

CodesForm::CodesForm(int coding, int bits, int group, int dim, int type, std::vector<float> levels, std::vector<float> bounds, std::vector<float> signs) {
  auto t = std::make_shared<Tables>();
  for (size_t i = 0, n = levels.size(); n && i < 16; i++) t->levels.push_back(levels[i % n]);
  if (levels.size() > 16) t->levels = std::move(levels);
  t->bounds = std::move(bounds);
  t->signs = std::move(signs);
  t->codes = {static_cast<Coding>(coding), bits, group, dim, static_cast<Type>(type), t->levels.data(), t->bounds.data(), t->signs.data()};
  tables_ = std::move(t);
}

namespace {
Head words(const mx::array& a, const RowCodes& codes) {
  Head h(a.data<char>(), F32, a.strides(0), a.strides(1), a.strides(2));
  h.codes = &codes;
  return h;
}

class CodedAttention : public Native {
 public:
  CodedAttention(mx::Stream s, CodesForm k, CodesForm v, int keys, float scale, int kind, int window, bool starts, bool sinks, bool order)
      : Native(s), k_(std::move(k)), v_(std::move(v)), scale_(scale), keys_(keys), kind_(kind), window_(window), starts_(starts), sinks_(sinks), order_(order) {}
  const char* name() const override { return "GnomonCodedAttention"; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    const auto &q = in[0], &k = in[1], &v = in[2];
    // Positions outside heads, as `attention` has them.
    const int64_t heads = q.shape(1), length = q.shape(2), dv = v_.codes().dim;
    mx::array::Flags flags{true, length == 1 || heads == 1, false};
    flags.col_contiguous = out.size() <= 1;
    out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), mx::Strides{length * heads * dv, dv, heads * dv, 1}, flags);
    if (out.size() == 0) return;
    AttentionJob j{Head(q), words(k, k_.codes()), words(v, v_.codes()), q.shape(0), q.shape(1), k.shape(1), q.shape(2), keys_, q.shape(3), static_cast<int>(dv), scale_, kind_, window_};
    AttentionInputs rest(in, 3, kind_, starts_, sinks_, order_, j);
    j.out = out.data<char>();
    j.out_type = type_of(out.dtype());
    dispatch(name(), stream(), [j, rest = std::move(rest), a = k_.owner(), b = v_.owner()]() mutable {
      rest.fill(j);
      attend(j);
    });
  }

 private:
  CodesForm k_, v_;
  float scale_;
  int keys_, kind_, window_;
  bool starts_, sinks_, order_;
};

// RowCodes vectors (b, h, i) of x into rows that `to` tells the place of.
template <class F> void encode_all(const mx::array& x, const Head& from, const RowCodes& codes, F&& to) {
  const int64_t heads = x.shape(1), length = x.shape(2), rows = x.shape(0) * heads * length;
  split(rows, rows * codes.dim * 4, [&](int64_t first, int64_t end) {
    const Table& t = table();
    float* room = scratch<1>(2 * static_cast<size_t>(codes.dim));
    for (int64_t r = first; r < end; r++) {
      const int64_t b = r / (heads * length), h = r / length % heads, i = r % length;
      t.encode_codes(codes, widen(t, from.at(b, h, i), from.type, from.step, codes.dim, room), to(b, h, i), room + codes.dim);
    }
  });
}

class Encode : public Native {
 public:
  Encode(mx::Stream s, CodesForm form) : Native(s), form_(std::move(form)) {}
  const char* name() const override { return "GnomonEncode"; }
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    dispatch(name(), stream(), [x = in[0], from = Head(in[0]), form = form_, to = out.data<uint8_t>(), heads = static_cast<int64_t>(in[0].shape(1)), length = static_cast<int64_t>(in[0].shape(2))] {
      encode_all(x, from, form.codes(), [&](int64_t b, int64_t h, int64_t i) { return to + ((b * heads + h) * length + i) * form.row_bytes(); });
    });
  }

 private:
  CodesForm form_;
};

class CodedAppend : public mx::Primitive {
 public:
  CodedAppend(mx::Stream s, CodesForm k, CodesForm v) : Primitive(s), forms_{std::move(k), std::move(v)} {}
  const char* name() const override { return "GnomonCodedAppend"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonCodedAppend runs on the CPU only"); }
  // inputs: keys, values, starts, the two buffers
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    struct Work {
      Packed starts;
      std::vector<mx::array> x;
      std::shared_ptr<mx::array::Data> held[2];  // until the step has run
      uint8_t* buffer[2];
      int64_t slots;
    };
    auto w = std::make_shared<Work>(Work{Packed(in[2]), {in[0], in[1]}, {}, {}, in[3].shape(2)});
    for (int i = 0; i < 2; i++) {
      const mx::array& buffer = in[3 + i];
      if (!buffer.flags().row_contiguous) throw std::invalid_argument("buffers of codes must be contiguous to be appended to in place");
      out[i].copy_shared_buffer(buffer);
      w->held[i] = out[i].data_shared_ptr();
      w->buffer[i] = out[i].data<uint8_t>();
    }
    if (in[0].size() == 0) return;
    dispatch(name(), stream(), [w, keys = forms_[0], values = forms_[1]] {
      auto* starts = reinterpret_cast<const int32_t*>(w->starts.data());
      const int64_t heads = w->x[0].shape(1), length = w->x[0].shape(2);
      for (int b = 0; b < w->x[0].shape(0); b++)
        if (starts[b] < 0 || starts[b] + length > w->slots)
          throw std::out_of_range("row " + std::to_string(b) + " ends at " + std::to_string(starts[b] + length) + " of " + std::to_string(w->slots) + " slots");
      for (int k = 0; k < 2; k++) {
        const CodesForm& form = k ? values : keys;
        encode_all(w->x[k], Head(w->x[k]), form.codes(),
                   [&](int64_t b, int64_t h, int64_t i) { return w->buffer[k] + ((b * heads + h) * w->slots + starts[b] + i) * form.row_bytes(); });
      }
    });
  }

 private:
  CodesForm forms_[2];
};
}  // namespace

mx::array coded_attention(const mx::array& q, const mx::array& k, const mx::array& v, const CodesForm& key_form, const CodesForm& value_form, int keys, float scale, int kind,
                          const std::optional<mx::array>& mask, const std::optional<mx::array>& starts, int window, const std::optional<mx::array>& sinks,
                          const std::optional<mx::array>& order, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{q, k, v};
  AttentionInputs::push(in, {q.shape(0), q.shape(1), q.shape(2), keys}, kind, mask, starts, sinks, order, stream);
  auto shape = q.shape();
  shape.back() = value_form.codes().dim;
  auto p = std::make_shared<CodedAttention>(stream, key_form, value_form, keys, scale, kind, window, starts.has_value(), sinks.has_value(), order.has_value());
  return mx::array(std::move(shape), q.dtype(), std::move(p), std::move(in));
}
mx::array encode(const mx::array& x, const CodesForm& form, mx::StreamOrDevice s) {
  auto shape = x.shape();
  shape.back() = form.row_bytes() / 4;
  return mx::array(std::move(shape), mx::uint32, std::make_shared<Encode>(mx::to_stream(s), form), {x});
}
std::vector<mx::array> coded_append(const mx::array& k, const mx::array& v, const CodesForm& key_form, const CodesForm& value_form, const mx::array& starts, const mx::array& keys,
                                    const mx::array& values, mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{k, v, mx::astype(starts, mx::int32, stream), keys, values};
  return mx::array::make_arrays({keys.shape(), values.shape()}, {keys.dtype(), values.dtype()}, std::make_shared<CodedAppend>(stream, key_form, value_form), in);
}
}  // namespace gnomon
