#include "attention.h"
#include <algorithm>
#include <cmath>

namespace gnomon {
namespace {
constexpr int BLOCK_OF_KEYS = 64;   // converted or read at a time: they stay in the first-level cache
constexpr int MOST_QUERIES = 64;       // of queries whose scores are held at a time
constexpr int64_t SHARE_ATTENTION_FROM = 200'000;

struct Head {
  const char* data;
  Type type;
  int64_t batch, head, position, step;
  explicit Head(const mx::array& a) : data(a.data<char>()), type(type_of(a.dtype())), batch(a.strides(0)), head(a.strides(1)), position(a.strides(2)), step(a.strides(3)) {}
  const char* at(int64_t b, int64_t h, int64_t i) const { return data + (b * batch + h * head + i * position) * static_cast<int64_t>(type_size(type)); }
  bool direct(int d) const { return type == F32 && step == 1 && d % 16 == 0; }
};

struct Job {
  Head q, k, v;
  int batch, q_heads, k_heads, queries, keys, d, dv;
  float scale;
  int kind, window;
  const char* mask = nullptr;
  Type mask_type = F32;
  int64_t mb = 0, mh = 0, mq = 0, mk = 0;
  const int32_t* starts = nullptr;
  const int32_t* order = nullptr;  // [batch, keys], else keys are walked as they lie
  int slot(int b, int c) const { return order ? order[static_cast<int64_t>(b) * keys + c] : c; }
  const char* sinks = nullptr;
  Type sink_type = F32;
  char* out;
  Type out_type;
  int dp() const { return (d + 15) / 16 * 16; }
  int dvp() const { return (dv + 15) / 16 * 16; }
  int rep() const { return q_heads / k_heads; }
};

// Keys [low, high) that row t (position t / rep, head t % rep of the group) may see at all.
struct Range {
  int low, high;
};
Range visible(const Job& j, int b, int h, int i, float* added) {
  if (j.kind == MASK_NONE) return {0, j.keys};
  if (j.kind == MASK_CAUSAL) {
    const int64_t at = (j.starts ? j.starts[b] : j.keys - j.queries) + static_cast<int64_t>(i);
    const int64_t high = std::clamp<int64_t>(at + 1, 0, j.keys);
    const int64_t low = j.window > 0 ? std::clamp<int64_t>(at - j.window + 1, 0, high) : 0;
    return {static_cast<int>(low), static_cast<int>(high)};
  }
  const int64_t from = b * j.mb + h * j.mh + i * j.mq;
  int low = j.keys, high = 0;
  const Table& t = table();
  for (int c = 0; c < j.keys; c++) {
    float m;
    const int64_t o = from + j.slot(b, c) * j.mk;
    if (j.kind == MASK_BOOLEAN) m = reinterpret_cast<const bool*>(j.mask)[o] ? 0.0f : -INFINITY;
    else if (j.mask_type == F32) m = reinterpret_cast<const float*>(j.mask)[o];
    else t.to_f32(j.mask + o * 2, j.mask_type, 1, &m);
    added[c] = m;
    if (m != -INFINITY) {
      low = std::min(low, c);
      high = c + 1;
    }
  }
  return low < high ? Range{low, high} : Range{0, 0};
}

const float* block_of(const Job& j, const Table& t, const Head& x, int b, int h, int from, int some, int d, int dp, float* room, int64_t& pitch) {
  bool together = true;
  for (int i = 1; j.order && together && i < some; i++) together = j.slot(b, from + i) == j.slot(b, from) + i;
  if (together && x.direct(d)) {
    pitch = x.position;
    return reinterpret_cast<const float*>(x.at(b, h, j.slot(b, from)));
  }
  pitch = dp;
  for (int i = 0; i < some; i++) {
    float* to = room + static_cast<size_t>(i) * dp;
    const float* row = widen(t, x.at(b, h, j.slot(b, from + i)), x.type, x.step, d, to);
    if (row != to) std::memcpy(to, row, static_cast<size_t>(d) * 4);
    for (int c = d; c < dp; c++) to[c] = 0;
  }
  return room;
}

// Rows [t0, t1) of a group of heads that share keys: t is position * rep + head.
void rows_of_group(const Job& j, int b, int hk, int t0, int t1) {
  const Table& t = table();
  const int rep = j.rep(), dp = j.dp(), dvp = j.dvp(), rows = t1 - t0;
  const int64_t lds = (j.keys + 15) / 16 * 16 + 16;
  float* memory = scratch<1>(static_cast<size_t>(rows) * (dp + dvp + 2 * lds) + static_cast<size_t>(BLOCK_OF_KEYS) * std::max(dp, dvp) + 64);
  float *q = memory, *o = q + static_cast<size_t>(rows) * dp, *s = o + static_cast<size_t>(rows) * dvp, *added = s + static_cast<size_t>(rows) * lds;
  float* room = added + static_cast<size_t>(rows) * lds;
  Range range[MOST_QUERIES];
  int low = j.keys, high = 0;
  const bool array = j.kind == MASK_BOOLEAN || j.kind == MASK_ADDITIVE;
  for (int r = 0; r < rows; r++) {
    const int i = (t0 + r) / rep, h = hk * rep + (t0 + r) % rep;
    float* to = q + static_cast<size_t>(r) * dp;
    const float* row = widen(t, j.q.at(b, h, i), j.q.type, j.q.step, j.d, to);
    if (row != to) std::memcpy(to, row, static_cast<size_t>(j.d) * 4);
    for (int c = j.d; c < dp; c++) to[c] = 0;
    range[r] = visible(j, b, h, i, added + r * lds);
    if (range[r].low < range[r].high) {
      low = std::min(low, range[r].low);
      high = std::max(high, range[r].high);
    }
  }
  std::memset(o, 0, static_cast<size_t>(rows) * dvp * 4);
  for (int k0 = low; k0 < high; k0 += BLOCK_OF_KEYS) {
    const int some = std::min(BLOCK_OF_KEYS, high - k0);
    int first = 0, last = rows;  // rows that see something of this block
    while (first < last && (range[first].high <= k0 || range[first].low >= k0 + some)) first++;
    while (last > first && (range[last - 1].high <= k0 || range[last - 1].low >= k0 + some)) last--;
    if (first == last) continue;
    int64_t pitch;
    const float* keys = block_of(j, t, j.k, b, hk, k0, some, j.d, dp, room, pitch);
    t.scores(q + static_cast<size_t>(first) * dp, dp, last - first, keys, pitch, some, dp, j.scale, s + first * lds + k0, lds);
  }
  float inverse[MOST_QUERIES];
  for (int r = 0; r < rows; r++) {
    float* row = s + r * lds;
    const auto [l, h] = range[r];
    if (array)
      for (int c = l; c < h; c++) row[c] = added[r * lds + c] == -INFINITY ? -INFINITY : row[c] + added[r * lds + c];
    float m = l < h ? t.row_max(row + l, h - l) : -INFINITY, sink = 0;
    if (j.sinks) {
      t.to_f32(j.sinks + static_cast<int64_t>(hk * rep + (t0 + r) % rep) * static_cast<int64_t>(type_size(j.sink_type)), j.sink_type, 1, &sink);
      m = sink > m ? sink : m;
    }
    inverse[r] = 0;
    if (m != -INFINITY) {
      float total = l < h ? t.exp_sum(row + l, h - l, m, row + l) : 0.0f;
      if (j.sinks) total += std::exp(sink - m);
      inverse[r] = 1.0f / total;
    } else {
      for (int c = l; c < h; c++) row[c] = 0;
    }
  }
  for (int k0 = low; k0 < high; k0 += BLOCK_OF_KEYS) {
    const int some = std::min(BLOCK_OF_KEYS, high - k0);
    int64_t pitch = 0;
    const float* values = nullptr;
    for (int r = 0; r < rows;) {
      const int l = std::max(range[r].low, k0), h = std::min(range[r].high, k0 + some);
      if (l >= h) {
        r++;
        continue;
      }
      int same = 1;  // rows beside it that see the same part of the block
      while (r + same < rows && std::max(range[r + same].low, k0) == l && std::min(range[r + same].high, k0 + some) == h) same++;
      if (!values) values = block_of(j, t, j.v, b, hk, k0, some, j.dv, dvp, room, pitch);
      t.weigh(s + r * lds + l, lds, same, values + (l - k0) * pitch, pitch, h - l, dvp, o + static_cast<size_t>(r) * dvp, dvp);
      r += same;
    }
  }
  for (int r = 0; r < rows; r++) {
    const int64_t i = (t0 + r) / rep, h = hk * rep + (t0 + r) % rep;
    float* row = o + static_cast<size_t>(r) * dvp;
    t.scale_row(row, j.dv, inverse[r]);
    t.from_f32(row, j.out_type, j.dv, j.out + ((b * static_cast<int64_t>(j.queries) + i) * j.q_heads + h) * j.dv * static_cast<int64_t>(type_size(j.out_type)));
  }
}

void run(const Job& j) {
  const int total = j.queries * j.rep();
  const int64_t work = static_cast<int64_t>(j.batch) * j.k_heads * total * j.keys * (j.d + j.dv);
  auto workers = pool();
  // Rows at a time: few enough for all threads to have work, and for the scores to stay in the second-level cache.
  int per = std::min(MOST_QUERIES, total);
  per = std::min<int64_t>(per, std::max<int64_t>(4, 131072 / (j.keys + 1)));
  if (j.batch * j.k_heads < 2 * workers->size()) per = std::min(per, std::max(4, (total + workers->size() - 1) / workers->size()));
  per = std::max(1, std::min(per, total));
  if (per > j.rep()) per = per / j.rep() * j.rep();
  const int sets = (total + per - 1) / per, tasks = j.batch * j.k_heads * sets;
  auto one = [&](int n) {
    n = tasks - 1 - n;  // causal: the longest first
    const int set = n / (j.batch * j.k_heads), g = n % (j.batch * j.k_heads);
    rows_of_group(j, g / j.k_heads, g % j.k_heads, set * per, std::min(total, (set + 1) * per));
  };
  if (work < SHARE_ATTENTION_FROM)
    for (int n = 0; n < tasks; n++) one(n);
  else workers->run(tasks, one);
}

class Attention : public Native {
 public:
  Attention(mx::Stream s, float scale, int kind, int window, bool starts, bool sinks, bool order)
      : Native(s), scale_(scale), kind_(kind), window_(window), starts_(starts), sinks_(sinks), order_(order) {}
  const char* name() const override { return "GnomonAttention"; }
  bool is_equivalent(const mx::Primitive& o) const override {
    auto& a = static_cast<const Attention&>(o);
    return a.scale_ == scale_ && a.kind_ == kind_ && a.window_ == window_ && a.starts_ == starts_ && a.sinks_ == sinks_ && a.order_ == order_;
  }
  // inputs: q, k, v, then mask, starts, sinks, order where there are
  void eval_cpu(const std::vector<mx::array>& in, mx::array& out) override {
    const auto &q = in[0], &k = in[1], &v = in[2];
    // Positions outside heads: what follows is transpose(0, 2, 1, 3) and a reshape, which then copy nothing.
    const int64_t heads = q.shape(1), length = q.shape(2), dv = v.shape(3);
    mx::Strides strides{length * heads * dv, dv, heads * dv, 1};
    mx::array::Flags flags{true, length == 1 || heads == 1, false};
    flags.col_contiguous = out.size() <= 1 || (dv == 1 && heads * length * out.shape(0) <= 1);
    out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, flags);
    if (out.size() == 0) return;
    Job j{Head(q), Head(k), Head(v), q.shape(0), q.shape(1), k.shape(1), q.shape(2), k.shape(2), q.shape(3), v.shape(3), scale_, kind_, window_};
    size_t next = 3;
    std::optional<Packed> starts, sinks, order;
    if (kind_ >= MASK_BOOLEAN) {
      const auto& m = in[next++];
      j.mask = m.data<char>();
      if (kind_ == MASK_ADDITIVE) j.mask_type = type_of(m.dtype());
      j.mb = m.strides(0), j.mh = m.strides(1), j.mq = m.strides(2), j.mk = m.strides(3);
    }
    if (starts_) starts.emplace(in[next++]);
    if (sinks_) j.sink_type = type_of(in[next].dtype()), sinks.emplace(in[next++]);
    if (order_) order.emplace(in[next++]);
    j.out = out.data<char>();
    j.out_type = type_of(out.dtype());
    dispatch(name(), stream(), [j, starts = std::move(starts), sinks = std::move(sinks), order = std::move(order)]() mutable {
      if (starts) j.starts = reinterpret_cast<const int32_t*>(starts->data());
      if (sinks) j.sinks = sinks->data();
      if (order) j.order = reinterpret_cast<const int32_t*>(order->data());
      run(j);
    });
  }

 private:
  float scale_;
  int kind_, window_;
  bool starts_, sinks_, order_;
};
}  // namespace

mx::array attention(const mx::array& q, const mx::array& k, const mx::array& v, float scale, int kind, const std::optional<mx::array>& mask,
                    const std::optional<mx::array>& starts, int window, const std::optional<mx::array>& sinks, const std::optional<mx::array>& order,
                    mx::StreamOrDevice s) {
  auto stream = mx::to_stream(s);
  std::vector<mx::array> in{q, k, v};
  if (kind >= MASK_BOOLEAN) in.push_back(mx::broadcast_to(*mask, {q.shape(0), q.shape(1), q.shape(2), k.shape(2)}, stream));
  if (starts) in.push_back(mx::astype(*starts, mx::int32, stream));
  if (sinks) in.push_back(*sinks);
  if (order) in.push_back(mx::astype(mx::broadcast_to(*order, {q.shape(0), k.shape(2)}, stream), mx::int32, stream));
  auto shape = q.shape();
  shape.back() = v.shape(-1);
  return mx::array(std::move(shape), q.dtype(), std::make_shared<Attention>(stream, scale, kind, window, starts.has_value(), sinks.has_value(), order.has_value()), std::move(in));
}
}  // namespace gnomon
