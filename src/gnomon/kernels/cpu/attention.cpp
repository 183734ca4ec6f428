#include "attention.h"
#include <algorithm>
#include <atomic>
#include <cmath>

namespace gnomon {
namespace {
constexpr int BLOCK_OF_KEYS = 64;   // converted or read at a time: they stay in the first-level cache
constexpr int MOST_QUERIES = 64;       // of queries whose scores are held at a time
constexpr int64_t SHARE_ATTENTION_FROM = 200'000;

// Keys [low, high) that row t (position t / rep, head t % rep of the group) may see at all.
struct Range {
  int low, high;
};
Range visible(const AttentionJob& j, int b, int h, int i, float* added) {
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

// Whether keys [from, from + some) lie one behind the other.
bool lie_together(const AttentionJob& j, int b, int from, int some) {
  bool together = true;
  for (int i = 1; j.order && together && i < some; i++) together = j.slot(b, from + i) == j.slot(b, from) + i;
  return together;
}

// The codes of key `from`, if those of [from, from + some) lie one behind the other.
const uint8_t* codes_of(const AttentionJob& j, const Head& x, int b, int h, int from, int some) {
  return x.codes && lie_together(j, b, from, some) ? reinterpret_cast<const uint8_t*>(x.at(j.home(b), h, j.slot(b, from))) : nullptr;
}

// Columns [c0, c0 + d) of keys [from, from + some) as floats.
const float* block_of(const AttentionJob& j, const Table& t, Head x, int b, int h, int from, int some, int c0, int d, float* room, int64_t& pitch) {
  const int dp = (d + 15) / 16 * 16;
  const bool together = lie_together(j, b, from, some);
  const int row = j.home(b);
  if (x.codes) {
    pitch = dp;
    for (int i = 0; i < some; i += together ? some : 1)
      t.decode_codes(*x.codes, reinterpret_cast<const uint8_t*>(x.at(row, h, j.slot(b, from + i))), x.position * 4, together ? some : 1, c0, dp, room + static_cast<size_t>(i) * dp, dp);
    return room;
  }
  x.data += c0 * x.step * static_cast<int64_t>(type_size(x.type));
  if (together && x.direct(d)) {
    pitch = x.position;
    return reinterpret_cast<const float*>(x.at(row, h, j.slot(b, from)));
  }
  pitch = dp;
  for (int i = 0; i < some; i++) {
    float* to = room + static_cast<size_t>(i) * dp;
    const float* values = widen(t, x.at(row, h, j.slot(b, from + i)), x.type, x.step, d, to);
    if (values != to) std::memcpy(to, values, static_cast<size_t>(d) * 4);
    for (int c = d; c < dp; c++) to[c] = 0;
  }
  return room;
}

// Rows [t0, t0 + rows) of a group of heads that share keys: t is position * rep + head. Scores may be taken for some keys after others, and
// values for some columns: an output is the same however that is shared out.
struct Group {
  const AttentionJob& j;
  const Table& t;
  int b, hk, t0, rows;
  int low, high;  // keys that some row sees
  int64_t lds;
  float *q, *o, *s, *added;
  Range range[MOST_QUERIES];
  float inverse[MOST_QUERIES];

  static size_t floats(const AttentionJob& j, int rows) { return static_cast<size_t>(rows) * (j.dp() + j.dvp() + 2 * pitch(j)); }
  static int64_t pitch(const AttentionJob& j) { return (j.keys + 15) / 16 * 16 + 16; }
  static size_t room_floats(const AttentionJob& j) { return static_cast<size_t>(BLOCK_OF_KEYS) * std::max(j.dp(), j.dvp()) + 64; }

  Group(const AttentionJob& j, int b, int hk, int t0, int rows, float* memory)
      : j(j), t(table()), b(b), hk(hk), t0(t0), rows(rows), low(j.keys), high(0), lds(pitch(j)), q(memory), o(q + static_cast<size_t>(rows) * j.dp()),
        s(o + static_cast<size_t>(rows) * j.dvp()), added(s + static_cast<size_t>(rows) * lds) {
    const int dp = j.dp();
    for (int r = 0; r < rows; r++) {
      const int i = (t0 + r) / j.rep(), h = head(r);
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
    std::memset(o, 0, static_cast<size_t>(rows) * j.dvp() * 4);
  }
  int head(int r) const { return hk * j.rep() + (t0 + r) % j.rep(); }

  void score(int from, int end, float* room) {
    const int dp = j.dp();
    for (int k0 = from; k0 < end; k0 += BLOCK_OF_KEYS) {
      const int some = std::min(BLOCK_OF_KEYS, end - k0);
      int first = 0, last = rows;  // rows that see something of this block
      while (first < last && (range[first].high <= k0 || range[first].low >= k0 + some)) first++;
      while (last > first && (range[last - 1].high <= k0 || range[last - 1].low >= k0 + some)) last--;
      if (first == last) continue;
      if (const uint8_t* codes = codes_of(j, j.k, b, hk, k0, some)) {
        t.scores_of_codes(*j.k.codes, codes, j.k.position * 4, some, q + static_cast<size_t>(first) * dp, dp, last - first, j.scale, s + first * lds + k0, lds, room);
        continue;
      }
      int64_t pitch;
      const float* keys = block_of(j, t, j.k, b, hk, k0, some, 0, j.d, room, pitch);
      t.scores(q + static_cast<size_t>(first) * dp, dp, last - first, keys, pitch, some, dp, j.scale, s + first * lds + k0, lds);
    }
  }
  void weights(int r) {
    float* row = s + r * lds;
    const auto [l, h] = range[r];
    if (j.kind == MASK_BOOLEAN || j.kind == MASK_ADDITIVE)
      for (int c = l; c < h; c++) row[c] = added[r * lds + c] == -INFINITY ? -INFINITY : row[c] + added[r * lds + c];
    float m = l < h ? t.row_max(row + l, h - l) : -INFINITY, sink = 0;
    if (j.sinks) {
      t.to_f32(j.sinks + static_cast<int64_t>(head(r)) * static_cast<int64_t>(type_size(j.sink_type)), j.sink_type, 1, &sink);
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
  // Columns [c0, c1) of the outputs, c0 a multiple of 16, of keys [from, end); those before them were added up already.
  void values(int c0, int c1, int from, int end, float* room) {
    const int dvp = j.dvp(), wide = (c1 - c0 + 15) / 16 * 16;
    end = std::min(high, end);
    for (int k0 = std::max(low, from); k0 < end; k0 += BLOCK_OF_KEYS) {
      const int some = std::min(BLOCK_OF_KEYS, end - k0);
      int64_t pitch = 0;
      const float* block = nullptr;
      const uint8_t* codes = codes_of(j, j.v, b, hk, k0, some);
      for (int r = 0; r < rows;) {
        const int l = std::max(range[r].low, k0), h = std::min(range[r].high, k0 + some);
        if (l >= h) {
          r++;
          continue;
        }
        int same = 1;  // rows beside it that see the same part of the block
        while (r + same < rows && std::max(range[r + same].low, k0) == l && std::min(range[r + same].high, k0 + some) == h) same++;
        if (codes && !block &&
            t.weigh_codes(*j.v.codes, codes + (l - k0) * j.v.position * 4, j.v.position * 4, h - l, c0, wide, s + r * lds + l, lds, same, o + static_cast<size_t>(r) * dvp + c0, dvp)) {
          r += same;
          continue;
        }
        if (!block) block = block_of(j, t, j.v, b, hk, k0, some, c0, c1 - c0, room, pitch);
        t.weigh(s + r * lds + l, lds, same, block + (l - k0) * pitch, pitch, h - l, wide, o + static_cast<size_t>(r) * dvp + c0, dvp);
        r += same;
      }
    }
  }
  // Of columns [c0, c1), all keys of which are added up.
  void finish(int c0, int c1) {
    const int dvp = j.dvp();
    for (int r = 0; r < rows; r++) {
      t.scale_row(o + static_cast<size_t>(r) * dvp + c0, c1 - c0, inverse[r]);
      if (!j.turned()) write(r, c0, c1);
    }
  }
  // Of rotated values, once all columns are there.
  void turn(int r) {
    t.turn_back(*j.v.codes, o + static_cast<size_t>(r) * j.dvp());
    write(r, 0, j.dv);
  }

 private:
  void write(int r, int c0, int c1) {
    const int64_t i = (t0 + r) / j.rep(), at = ((b * static_cast<int64_t>(j.queries) + i) * j.q_heads + head(r)) * j.dv + c0;
    t.from_f32(o + static_cast<size_t>(r) * j.dvp() + c0, j.out_type, c1 - c0, j.out + at * static_cast<int64_t>(type_size(j.out_type)));
  }
};

void rows_of_group(const AttentionJob& j, int b, int hk, int t0, int t1) {
  float* memory = scratch<1>(Group::floats(j, t1 - t0) + Group::room_floats(j));
  Group group(j, b, hk, t0, t1 - t0, memory);
  float* room = memory + Group::floats(j, t1 - t0);
  group.score(group.low, group.high, room);
  for (int r = 0; r < group.rows; r++) group.weights(r);
  group.values(0, j.dv, group.low, group.high, room);
  group.finish(0, j.dv);
  for (int r = 0; j.turned() && r < group.rows; r++) group.turn(r);
}

// Few rows over many keys: the keys of every group are shared out, then its rows, then the values. Those of a group are added up one behind the
// other, so who takes a stretch of them waits for the one before; other groups' stretches lie between. Whole rows of values are read, by
// columns only where there are fewer groups than threads: half a row at a time comes at half the memory's rate.
void share_keys(const AttentionJob& j, Pool& workers) {
  constexpr int KEYS = 4 * BLOCK_OF_KEYS;
  const int rows = j.queries * j.rep(), count = j.batch * j.k_heads;
  const size_t each = Group::floats(j, rows);
  float* memory = scratch<1>(each * count);
  std::vector<Group> groups;
  groups.reserve(count);
  for (int g = 0; g < count; g++) groups.emplace_back(j, g / j.k_heads, g % j.k_heads, 0, rows, memory + each * g);
  const int stretches = (j.keys + KEYS - 1) / KEYS;
  workers.run(count * stretches, [&](int n) {
    Group& group = groups[n % count];
    const int from = std::max(group.low, n / count * KEYS), end = std::min(group.high, (n / count + 1) * KEYS);
    if (from < end) group.score(from, end, scratch<2>(Group::room_floats(j)));
  });
  workers.run(count * rows, [&](int n) { groups[n / rows].weights(n % rows); });
  const int parts = (workers.size() + count - 1) / count, wide = std::max(32, ((j.dv + parts - 1) / parts + 31) / 32 * 32), columns = (j.dv + wide - 1) / wide, lines = count * columns;
  std::vector<std::atomic<int>> done(lines);
  workers.run(lines * stretches, [&](int n) {
    const int line = n % lines, stretch = n / lines, c0 = line % columns * wide, c1 = std::min(j.dv, c0 + wide);
    Group& group = groups[line / columns];
    for (int spins = 0; done[line].load(std::memory_order_acquire) != stretch; spins++) {
      if (spins < 2000) relax();
      else std::this_thread::yield();
    }
    group.values(c0, c1, stretch * KEYS, (stretch + 1) * KEYS, scratch<2>(Group::room_floats(j)));
    if (stretch + 1 == stretches) group.finish(c0, c1);
    done[line].store(stretch + 1, std::memory_order_release);
  });
  for (int n = 0; j.turned() && n < count * rows; n++) groups[n / rows].turn(n % rows);
}

}  // namespace

void attend(const AttentionJob& j) {
  const int total = j.queries * j.rep(), groups = j.batch * j.k_heads;
  const int64_t work = static_cast<int64_t>(groups) * total * j.keys * (j.d + j.dv);
  auto workers = pool();
  if (workers->size() > 1 && total <= 16 && groups < 4 * workers->size() && groups % workers->size() && work >= 4 * SHARE_ATTENTION_FROM) return share_keys(j, *workers);
  // Rows at a time: few enough for all threads to have work, and for the scores to stay in the second-level cache.
  int per = std::min(MOST_QUERIES, total);
  per = std::min<int64_t>(per, std::max<int64_t>(4, 131072 / (j.keys + 1)));
  if (groups < 2 * workers->size()) per = std::min(per, std::max(4, (total + workers->size() - 1) / workers->size()));
  per = std::max(1, std::min(per, total));
  if (per > j.rep()) per = per / j.rep() * j.rep();
  const int sets = (total + per - 1) / per, tasks = groups * sets;
  auto one = [&](int n) {
    n = tasks - 1 - n;  // causal: the longest first
    const int set = n / groups, g = n % groups;
    rows_of_group(j, g / j.k_heads, g % j.k_heads, set * per, std::min(total, (set + 1) * per));
  };
  if (work < SHARE_ATTENTION_FROM)
    for (int n = 0; n < tasks; n++) one(n);
  else workers->run(tasks, one);
}

void AttentionInputs::push(std::vector<mx::array>& in, const mx::Shape& scores, int kind, const std::optional<mx::array>& mask, const std::optional<mx::array>& starts,
                           const std::optional<mx::array>& sinks, const std::optional<mx::array>& order, mx::Stream s) {
  if (kind >= MASK_BOOLEAN) in.push_back(mx::broadcast_to(*mask, scores, s));
  if (starts) in.push_back(mx::astype(*starts, mx::int32, s));
  if (sinks) in.push_back(*sinks);
  if (order) in.push_back(mx::astype(mx::broadcast_to(*order, {scores[0], scores[3]}, s), mx::int32, s));
}
AttentionInputs::AttentionInputs(const std::vector<mx::array>& in, size_t next, int kind, bool starts, bool sinks, bool order, AttentionJob& j) {
  if (kind >= MASK_BOOLEAN) {
    const auto& m = in[next++];
    j.mask = m.data<char>();
    if (kind == MASK_ADDITIVE) j.mask_type = type_of(m.dtype());
    j.mb = m.strides(0), j.mh = m.strides(1), j.mq = m.strides(2), j.mk = m.strides(3);
  }
  if (starts) starts_.emplace(in[next++]);
  if (sinks) j.sink_type = type_of(in[next].dtype()), sinks_.emplace(in[next++]);
  if (order) order_.emplace(in[next++]);
}
void AttentionInputs::fill(AttentionJob& j) {
  if (starts_) j.starts = reinterpret_cast<const int32_t*>(starts_->data());
  if (sinks_) j.sinks = sinks_->data();
  if (order_) j.order = reinterpret_cast<const int32_t*>(order_->data());
}

namespace {
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
    const int keys = order_ ? in.back().shape(1) : k.shape(2);
    AttentionJob j{Head(q), Head(k), Head(v), q.shape(0), q.shape(1), k.shape(1), q.shape(2), keys, q.shape(3), v.shape(3), scale_, kind_, window_};
    AttentionInputs rest(in, 3, kind_, starts_, sinks_, order_, j);
    j.out = out.data<char>();
    j.out_type = type_of(out.dtype());
    dispatch(name(), stream(), [j, rest = std::move(rest)]() mutable {
      rest.fill(j);
      attend(j);
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
  const int keys = order && kind < MASK_BOOLEAN ? order->shape(-1) : k.shape(2);
  AttentionInputs::push(in, {q.shape(0), q.shape(1), q.shape(2), keys}, kind, mask, starts, sinks, order, stream);
  auto shape = q.shape();
  shape.back() = v.shape(-1);
  return mx::array(std::move(shape), q.dtype(), std::make_shared<Attention>(stream, scale, kind, window, starts.has_value(), sinks.has_value(), order.has_value()), std::move(in));
}
}  // namespace gnomon
