#include "experts.h"
#include <algorithm>

namespace gnomon {
namespace {
struct ExpertParts {
  int chosen;
  bool normalise, residual;
  Activation activation;
  std::optional<Normaliser> before;
  std::optional<Operands> router;
  std::vector<Stack> stacks;  // gate, up, down

  // The experts of a row, the likeliest first, and their weights; `wide` are its logits and become their exponentials.
  void route(const Table& t, float* wide, int n, Type type, uint32_t* who, float* weights) const {
    for (int r = 0; r < chosen; r++) {
      int best = -1;
      for (int e = 0; e < n; e++)
        if (std::find(who, who + r, static_cast<uint32_t>(e)) == who + r && (best < 0 || wide[e] > wide[best])) best = e;
      who[r] = static_cast<uint32_t>(best);
    }
    const float total = t.exp_sum(wide, n, t.row_max(wide, n), wide);
    for (int r = 0; r < chosen; r++) weights[r] = wide[who[r]] / total;
    rounded(t, type, weights);
    if (!normalise) return;
    float all = 0;
    for (int r = 0; r < chosen; r++) all += weights[r];
    if (type != F32) {
      uint16_t half[1];
      t.from_f32(&all, type, 1, half);
      t.to_f32(half, type, 1, &all);
    }
    for (int r = 0; r < chosen; r++) weights[r] /= all;
    rounded(t, type, weights);
  }

  void run(const Rows& given, Type type, char* to) {
    const Table& t = table();
    const int64_t size = static_cast<int64_t>(type_size(type));
    if (before) before->prepare(t);
    Room room;
    const Rows x = normalised(t, given, before, type, room.normed);
    const int n = router->n;
    std::vector<char> logits(static_cast<size_t>(x.count) * n * size + 64);
    std::vector<Product> products;
    products.push_back({router->weights(), n, logits.data(), type, n});
    products.back().bias = router->bias();
    multiply_rows(x, products);
    const int64_t pairs = x.count * chosen;
    std::vector<uint32_t> who(pairs), rows(pairs), places(pairs);
    std::vector<float> weights(pairs), wide(n + 64);
    for (int64_t i = 0; i < x.count; i++) {
      t.to_f32(logits.data() + i * n * size, type, n, wide.data());
      route(t, wide.data(), n, type, &who[i * chosen], &weights[i * chosen]);
    }
    for (int64_t i = 0; i < pairs; i++) {
      rows[i] = static_cast<uint32_t>(i / chosen);
      places[i] = static_cast<uint32_t>(i);
    }
    const Stack &gate = stacks[0], &up = stacks[1], &down = stacks[2];
    room.wide.resize(static_cast<size_t>(pairs) * gate.n * size + 64);
    products = by_expert(rows.data(), who.data(), pairs, 1, n, [&](int64_t e) {
      Product p{gate.weights(e), gate.n, room.wide.data(), type, gate.n};
      p.up = up.weights(e);
      p.activation = activation;
      return p;
    });
    multiply_rows(x, products);
    const int width = down.n, padded = (width + 15) / 16 * 16;
    std::vector<char> found(static_cast<size_t>(pairs) * width * size + 64);
    products = by_expert(places.data(), who.data(), pairs, 1, n, [&](int64_t e) { return Product{down.weights(e), width, found.data(), type, width}; });
    Rows middle = dense_rows(x, room.wide.data(), type, gate.n);
    middle.count = pairs;
    multiply_rows(middle, products);
    split(x.count, pairs * width, [&](int64_t from, int64_t end) {
      float *sum = scratch<1>(static_cast<size_t>(padded) * (chosen + 1)), *values = sum + padded;
      for (int64_t i = from; i < end; i++) {
        const char* own = found.data() + i * chosen * width * size;
        const float* v = reinterpret_cast<const float*>(own);
        if (type != F32 || width != padded) {
          v = values;
          std::fill(values, values + static_cast<size_t>(padded) * chosen, 0.0f);
          for (int r = 0; r < chosen; r++) t.to_f32(own + r * width * size, type, width, values + static_cast<size_t>(r) * padded);
        }
        std::fill(sum, sum + padded, 0.0f);
        t.weigh(&weights[i * chosen], chosen, 1, v, padded, chosen, padded, sum, padded);
        t.from_f32(sum, type, width, to + i * width * size);
      }
    });
    finish(t, to, type, x.count, width, std::nullopt, residual ? std::optional<Rows>(given) : std::nullopt);
  }

 private:
  void rounded(const Table& t, Type type, float* y) const {
    if (type == F32) return;
    std::vector<uint16_t> half(chosen);
    t.from_f32(y, type, chosen, half.data());
    t.to_f32(half.data(), type, chosen, y);
  }
};

class Experts : public Native {
 public:
  Experts(mx::Stream s, std::vector<Projection> p, bool norm, float eps, int chosen, bool normalised, Activation activation, bool residual)
      : Native(s), p_(std::move(p)), norm_(norm), normalised_(normalised), residual_(residual), eps_(eps), chosen_(chosen), activation_(activation) {}
  const char* name() const override { return "GnomonExperts"; }
  // inputs: x, the norm if there is one, then router, gate, up, down
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    allocate(out);
    if (out.size() == 0) return;
    size_t next = 1;
    auto w = std::make_shared<ExpertParts>(ExpertParts{chosen_, normalised_, residual_, activation_, {}, {}, {}});
    if (norm_) w->before.emplace(in[next++], eps_);
    w->router.emplace(p_[0], in, next);
    for (int i = 1; i < 4; i++) w->stacks.emplace_back(p_[i], in, next);
    dispatch(name(), stream(), [w, x = Rows(in[0]), to = out.data<char>(), type = type_of(out.dtype())] {
      for (auto& stack : w->stacks) stack.prepare();
      w->run(x, type, to);
    });
  }

 private:
  std::vector<Projection> p_;
  bool norm_, normalised_, residual_;
  float eps_;
  int chosen_;
  Activation activation_;
};
}  // namespace

mx::array experts(const mx::array& x, const std::optional<mx::array>& norm, float eps, const Projection& router, const Projection& gate, const Projection& up, const Projection& down, int chosen,
                  bool normalised, int activation, bool residual, mx::StreamOrDevice s) {
  const int count = router.outputs();
  for (auto* p : {&gate, &up, &down})
    if (p->w.ndim() != 3 || p->w.shape(0) != count || p->bias)
      throw std::invalid_argument("a layer of " + std::to_string(count) + " experts needs as many matrices of each kind, and no biases");
  if (chosen < 1 || chosen > count) throw std::invalid_argument(std::to_string(chosen) + " of " + std::to_string(count) + " experts can't be chosen");
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{x};
  if (norm) in.push_back(*norm);
  for (auto* p : {&router, &gate, &up, &down}) p->push(in);
  auto shape = x.shape();
  shape.back() = down.w.shape(1);
  return mx::array(std::move(shape), x.dtype(),
                   std::make_shared<Experts>(stream, std::vector<Projection>{router, gate, up, down}, norm.has_value(), eps, chosen, normalised, static_cast<Activation>(activation), residual),
                   std::move(in));
}
}  // namespace gnomon
