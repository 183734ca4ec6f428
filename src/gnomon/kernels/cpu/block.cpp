#include "block.h"
#include <algorithm>
#include <string>
#include "attention.h"

namespace gnomon {

void Normaliser::prepare(const Table& t) {
  wide_.resize(n_ + 16);
  t.to_f32(w_.data(), type_, n_, wide_.data());
}
void Normaliser::apply(const Table& t, const float* x, float* y, Type type) const {
  t.rms_norm(x, wide_.data(), n_, eps_, y);
  if (type == F32) return;
  uint16_t half[512];
  for (int i = 0; i < n_; i += 512) {
    const int some = std::min(512, n_ - i);
    t.from_f32(y + i, type, some, half);
    t.to_f32(half, type, some, y + i);
  }
}

Product Ready::product(char* out, Type type) const {
  Product p{w, n, out, type, n};
  p.bias = bias;
  return p;
}

Rows dense_rows(const Rows& like, const char* data, Type type, int width) {
  Rows y = like;
  y.data = data;
  y.type = type;
  y.width = width;
  y.step = 1;
  y.even = true;
  y.pitch = width;
  return y;
}

Rows normalised(const Table& t, const Rows& x, const std::optional<Normaliser>& norm, Type type, std::vector<float>& room) {
  if (!norm) return x;
  room.resize(std::max(room.size(), static_cast<size_t>(x.count) * x.width + 16));
  split(x.count, x.count * x.width, [&](int64_t from, int64_t end) {
    for (int64_t i = from; i < end; i++) {
      float* y = room.data() + i * x.width;
      norm->apply(t, widen(t, x.row(i), x.type, x.step, x.width, y), y, type);
    }
  });
  return dense_rows(x, reinterpret_cast<const char*>(room.data()), F32, x.width);
}

void finish(const Table& t, char* out, Type type, int64_t rows, int n, const std::optional<Normaliser>& norm, const std::optional<Rows>& residual) {
  if (!norm && !residual) return;
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

namespace {
void get_ready(std::vector<Operands>& operands, std::vector<Ready>& ready) {
  ready.clear();
  for (auto& o : operands) ready.push_back({o.weights(), o.bias(), o.n});
}
}  // namespace

void HeadsParts::prepare(const Table& t) {
  for (auto* n : {&norm, &head_norms[0], &head_norms[1]})
    if (*n) (*n)->prepare(t);
  if (freqs) waves = reinterpret_cast<const float*>(freqs->data());
  get_ready(operands, ready);
}

void HeadsParts::run(const Rows& x, Type type, int d, int64_t length, const int32_t* starts, char* const* to, Room& room) const {
  const Table& t = table();
  const Rows rows = normalised(t, x, norm, type, room.normed);
  std::vector<Product> products;
  for (int i = 0; i < 3; i++) products.push_back(ready[i].product(to[i], type));
  multiply_rows(rows, products);
  const int h = form.rope_dims / 2;
  if (!h && !head_norms[0] && !head_norms[1]) return;
  Angles* turn = h ? &angles(form.rope_dims, form.base, form.scale, waves) : nullptr;
  const size_t size = type_size(type);
  float* both = scratch<1>(2 * (d + 64));
  float* other = both + d + 64;
  for (int64_t i = 0; i < x.count; i++) {
    const float* cos = turn ? turn->at(starts[i / length] + i % length) : nullptr;
    for (int which = 0; which < 2; which++) {
      const int count = which ? form.k_heads : form.q_heads, step = which ? d : form.query_step(d);
      for (int head = 0; head < count; head++) {
        char* at = to[which] + (i * count + head) * step * static_cast<int64_t>(size);
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

void AttentionParts::prepare(const Table& t) {
  HeadsParts::prepare(t);
  if (after) after->prepare(t);
}

Pages::Pages(int size, std::vector<std::vector<int>> rows, std::vector<int> counts, const std::vector<std::array<int, 4>>& fresh)
    : size(size), rows(std::move(rows)), counts(std::move(counts)) {
  for (auto [page, source, offset, end] : fresh) this->fresh.push_back({page, source, offset, end});
}

Ring Ring::of(const std::vector<int>& numbers, int rows, int64_t length) {
  if (numbers.empty()) return {};
  if (numbers.size() != static_cast<size_t>(rows) + 2) throw std::invalid_argument("a ring has a phase for each of " + std::to_string(rows) + " rows");
  const int size = numbers[0], window = numbers[1];
  if (window < 1 || window + length - 1 > size)
    throw std::invalid_argument("a window of " + std::to_string(length) + " tokens that see " + std::to_string(window) + " doesn't fit a ring of " + std::to_string(size));
  return {size, window, std::vector<int32_t>(numbers.begin() + 2, numbers.end())};
}

void Buffers::check(int b, int64_t start, int64_t length) const {
  const bool round = ring.size && (start + length > ring.size || ring.phases[b] % ring.size);
  const int64_t end = round ? ring.size : start + length;
  if (start < 0 || end > slots) throw std::out_of_range("row " + std::to_string(b) + " ends at " + std::to_string(end) + " of " + std::to_string(slots) + " slots");
}

void AttentionParts::append(const char* const* heads, Type type, const Places& places, const Buffers& buffers) const {
  const Table& t = table();
  const int64_t size = static_cast<int64_t>(type_size(type)), length = places.length, slots = buffers.slots, rows = places.batch * length * form.k_heads;
  const int end = places.order ? places.end() : 0;
  for (int i = 0; i < 2; i++) {
    const RowCodes* codes = buffers.codes[i];
    const int64_t wide = i ? dv() : d(), bytes = codes ? codes->row_bytes() : wide * size;
    char* to = buffers.data[i];
    if (places.pages)
      for (auto [page, source, offset, stop] : places.pages->fresh)
        for (int h = 0; h < form.k_heads; h++) {
          char* at = to + (h * slots + static_cast<int64_t>(page) * places.pages->size) * bytes;
          if (source >= 0) std::memcpy(at, to + (h * slots + static_cast<int64_t>(source) * places.pages->size) * bytes, static_cast<size_t>(offset * bytes));
          std::memset(at + stop * bytes, 0, static_cast<size_t>((places.pages->size - stop) * bytes));
        }
    split(rows, codes ? rows * wide * 4 : 0, [&](int64_t first, int64_t last) {
      float* room = scratch<1>(2 * static_cast<size_t>(wide));
      for (int64_t r = first; r < last; r++) {
        const int64_t b = r / (length * form.k_heads), l = r / form.k_heads % length, h = r % form.k_heads, home = places.homes ? places.homes[b] : b;
        if (places.pages && l >= places.pages->counts[b]) continue;
        const int64_t at = places.starts[b] + l, slot = places.order ? places.order[home * end + at] : buffers.ring.slot(static_cast<int>(b), at);
        char* row = to + (((places.order ? 0 : home) * form.k_heads + h) * slots + slot) * bytes;
        const char* from = heads[1 + i] + r * wide * size;
        if (codes) t.encode_codes(*codes, widen(t, from, type, 1, static_cast<int>(wide), room), reinterpret_cast<uint8_t*>(row), room + wide);
        else std::memcpy(row, from, static_cast<size_t>(bytes));
      }
    });
  }
}

void AttentionParts::attend_rows(const Rows& x, Type type, const Places& places, const Buffers& buffers, const std::optional<Rows>& residual, char* to, Room& room) const {
  const Table& t = table();
  const int dk = d(), dvs = dv();
  const int64_t size = static_cast<int64_t>(type_size(type)), count = places.batch * places.length, slots = buffers.slots;
  const int step = form.query_step(dk);
  const int64_t wide[4] = {static_cast<int64_t>(form.q_heads) * step, static_cast<int64_t>(form.k_heads) * dk, static_cast<int64_t>(form.k_heads) * dvs, static_cast<int64_t>(form.q_heads) * dvs};
  room.wide.resize(std::max(room.wide.size(), static_cast<size_t>(count * (wide[0] + wide[1] + wide[2] + wide[3]) * size) + 64));
  char* at[4] = {room.wide.data()};
  for (int i = 0; i < 3; i++) at[i + 1] = at[i] + count * wide[i] * size;
  run(x, type, dk, places.length, places.starts, at, room);
  const Ring& ring = buffers.ring;
  for (int b = 0; b < places.batch && !places.pages; b++) buffers.check(b, places.starts[b], places.length);
  const int end = places.end();
  append(at, type, places, buffers);
  Head held[2] = {Head(nullptr, type, 0, 0, 0), Head(nullptr, type, 0, 0, 0)};
  for (int i = 0; i < 2; i++) {
    // Strides of codes are in words of four bytes.
    const RowCodes* codes = buffers.codes[i];
    const int64_t row = codes ? codes->row_bytes() / 4 : i ? dvs : dk;
    held[i] = Head(buffers.data[i], codes ? F32 : type, form.k_heads * slots * row, slots * row, row);
    held[i].codes = codes;
  }
  AttentionJob j{Head(at[0], type, places.length * wide[0], step, wide[0]), held[0], held[1], places.batch, form.q_heads, form.k_heads, static_cast<int>(places.length), end, dk, dvs, scale,
                 MASK_CAUSAL, 0};
  j.starts = places.starts;
  j.homes = places.homes;
  j.order = places.order;
  j.paged = places.order != nullptr;
  j.window = ring.window;
  if (ring.size && (end > ring.size || std::any_of(ring.phases.begin(), ring.phases.end(), [&](int p) { return p % ring.size; }))) {
    // Once around, keys are walked from the oldest that may be seen to the newest, and counted so.
    j.keys = std::min(end, ring.size);
    room.order.assign(static_cast<size_t>(places.batch) * j.keys, 0);
    room.starts.resize(places.batch);
    for (int b = 0; b < places.batch; b++) {
      const int64_t oldest = std::max<int64_t>(0, places.starts[b] + places.length - ring.size);
      room.starts[b] = static_cast<int32_t>(places.starts[b] - oldest);
      for (int64_t c = 0; c < room.starts[b] + places.length; c++) room.order[b * j.keys + c] = static_cast<int32_t>(ring.slot(b, oldest + c));
    }
    j.order = room.order.data();
    j.starts = room.starts.data();
  }
  j.out = at[3];
  j.out_type = type;
  attend(j);
  if (form.gated)
    split(count, count * wide[3] * 8, [&](int64_t from, int64_t end) {
      float *gate = scratch<1>(2 * (dvs + 16)), *y = gate + dvs + 16;
      for (int64_t i = from * form.q_heads; i < end * form.q_heads; i++) {
        char* out = at[3] + i * dvs * size;
        t.to_f32(at[0] + (i * step + dk) * size, type, dvs, gate);
        t.to_f32(out, type, dvs, y);
        t.gate(SIGMOID, gate, y, dvs, y);
        t.from_f32(y, type, dvs, out);
      }
    });
  std::vector<Product> products{ready[3].product(to, type)};
  multiply_rows(dense_rows(x, at[3], type, static_cast<int>(wide[3])), products);
  finish(t, to, type, count, ready[3].n, after, residual);
}

void MlpParts::prepare(const Table& t) {
  if (before) before->prepare(t);
  if (after) after->prepare(t);
  get_ready(operands, ready);
}

void MlpParts::run(const Rows& given, Type type, char* to, Room& room) const {
  const Table& t = table();
  const Rows x = normalised(t, given, before, type, room.normed);
  const auto &gate = ready[0], &up = ready[1], &down = ready[2];
  room.wide.resize(std::max(room.wide.size(), static_cast<size_t>(x.count) * gate.n * type_size(type) + 64));
  std::vector<Product> products{gate.product(room.wide.data(), type)};
  products.back().up = up.w;
  products.back().up_bias = up.bias;
  products.back().activation = activation;
  multiply_rows(x, products);
  std::vector<Product> second{down.product(to, type)};
  multiply_rows(dense_rows(x, room.wide.data(), type, gate.n), second);
  finish(t, to, type, x.count, down.n, after, residual ? std::optional<Rows>(given) : std::nullopt);
}

void Blocks::add(const std::optional<mx::array>& norm, float eps, const Projection& q, const Projection& k, const Projection& v, const Projection& o, const std::optional<mx::array>& q_norm,
                 const std::optional<mx::array>& k_norm, const HeadForm& form, const std::optional<mx::array>& freqs, float scale, const std::optional<mx::array>& after, float after_eps,
                 const std::optional<mx::array>& mlp_norm, float mlp_eps, const Projection& gate, const Projection& up, const Projection& down, int activation,
                 const std::optional<mx::array>& mlp_after, float mlp_after_eps) {
  std::vector<mx::array> weights;
  for (auto* p : {&q, &k, &v, &o, &gate, &up, &down}) p->push(weights);
  std::vector<mx::array> needed = weights;
  for (auto* a : {&norm, &q_norm, &k_norm, &after, &mlp_norm, &mlp_after})
    if (*a) needed.push_back(**a);
  std::optional<mx::array> waves;
  if (freqs) needed.push_back(waves.emplace(mx::astype(*freqs, mx::float32)));
  mx::eval(needed);
  auto made = std::make_shared<Block>(Block{down.outputs(), {{form}}, {}});
  auto &a = made->attention;
  auto &m = made->mlp;
  auto set = [](std::optional<Normaliser>& to, const std::optional<mx::array>& w, float e) {
    if (w) to.emplace(*w, e);
  };
  set(a.norm, norm, eps);
  set(a.head_norms[0], q_norm, form.norm_eps);
  set(a.head_norms[1], k_norm, form.norm_eps);
  set(a.after, after, after_eps);
  set(m.before, mlp_norm, mlp_eps);
  set(m.after, mlp_after, mlp_after_eps);
  if (waves) a.freqs.emplace(*waves);
  a.scale = scale;
  m.activation = static_cast<Activation>(activation);
  m.residual = true;
  size_t next = 0;
  for (auto* p : {&q, &k, &v, &o}) a.operands.emplace_back(*p, weights, next);
  for (auto* p : {&gate, &up, &down}) m.operands.emplace_back(*p, weights, next);
  a.prepare(table());
  m.prepare(table());
  all.push_back(std::move(made));
}

namespace {
// Slots of each head's keys.
int64_t slots_of(const mx::array& buffer, bool paged) { return paged ? static_cast<int64_t>(buffer.shape(1)) * buffer.shape(2) : buffer.shape(2); }

class RunBlocks : public mx::Primitive {
 public:
  RunBlocks(mx::Stream s, Blocks blocks, std::vector<int32_t> starts, std::vector<int32_t> homes, std::vector<Ring> rings, std::vector<std::optional<CodesPair>> codes, std::optional<Pages> pages)
      : Primitive(s), blocks_(std::move(blocks)), starts_(std::move(starts)), homes_(std::move(homes)), rings_(std::move(rings)), codes_(std::move(codes)), pages_(std::move(pages)) {}
  const char* name() const override { return "GnomonBlocks"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { throw std::runtime_error("GnomonBlocks runs on the CPU only"); }
  // inputs: x, then keys and values by turns, then what is waited for; outputs: y, and one byte
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    struct Work {
      Blocks blocks;
      std::vector<int32_t> starts, homes;
      std::vector<std::optional<CodesPair>> codes;
      std::optional<Pages> pages;
      Rows x;
      std::vector<Buffers> buffers;
      std::vector<std::shared_ptr<mx::array::Data>> held;  // until the step has run
    };
    auto w = std::make_shared<Work>(Work{blocks_, starts_, homes_, codes_, pages_, Rows(in[0]), {}, {}});
    for (auto& o : out) allocate(o);
    *out[1].data<uint8_t>() = 1;
    for (size_t i = 0; i < blocks_.all.size(); i++) {
      Buffers& both = w->buffers.emplace_back();
      if (!rings_.empty()) both.ring = rings_[i];
      both.slots = slots_of(in[1 + 2 * i], w->pages.has_value());
      for (int j = 0; j < 2; j++) {
        const size_t n = 1 + 2 * i + j;
        if (!in[n].flags().row_contiguous) throw std::invalid_argument("buffers of keys and values must be contiguous to be appended to in place");
        w->held.push_back(in[n].data_shared_ptr());
        both.data[j] = const_cast<char*>(in[n].data<char>());
        if (!w->codes.empty() && w->codes[i]) both.codes[j] = &(j ? w->codes[i]->second : w->codes[i]->first).codes();
      }
    }
    if (in[0].size() == 0) return;
    mx::cpu::get_command_encoder(stream()).dispatch([w, to = out[0].data<char>(), type = type_of(out[0].dtype()), batch = in[0].shape(0), length = static_cast<int64_t>(in[0].shape(1))] {
      const bool timed = profiling();
      double begun = timed ? cpu_seconds() : 0;
      auto lap = [&](const char* name) {
        if (!timed) return;
        const double now = cpu_seconds();
        add_seconds(name, now - begun);
        begun = now;
      };
      Room room;
      Rows x = w->x;
      Places places{batch, length, w->starts.data(), w->homes.empty() ? nullptr : w->homes.data()};
      std::vector<int32_t> order;
      if (w->pages) {
        order = order_of(*w->pages, places.end());
        places.pages = &*w->pages;
        places.order = order.data();
      }
      const size_t bytes = static_cast<size_t>(x.count) * x.width * type_size(type) + 64;
      std::vector<char> middle(bytes), after(bytes);
      for (size_t i = 0; i < w->blocks.all.size(); i++) {
        const Block& b = *w->blocks.all[i];
        b.attention.attend_rows(x, type, places, w->buffers[i], x, middle.data(), room);
        lap("GnomonAttentionLayer");
        char* y = i + 1 == w->blocks.all.size() ? to : after.data();
        b.mlp.run(dense_rows(x, middle.data(), type, b.outputs), type, y, room);
        x = dense_rows(x, y, type, b.outputs);
        lap("GnomonGatedMlp");
      }
    });
  }

 private:
  // Slots of the first `end` positions of every row; 0 where a row has no page.
  static std::vector<int32_t> order_of(const Pages& pages, int end) {
    std::vector<int32_t> order(pages.rows.size() * end);
    for (size_t b = 0; b < pages.rows.size(); b++)
      for (int p = 0; p < end && p / pages.size < static_cast<int>(pages.rows[b].size()); p++) order[b * end + p] = pages.rows[b][p / pages.size] * pages.size + p % pages.size;
    return order;
  }

  Blocks blocks_;
  std::vector<int32_t> starts_, homes_;
  std::vector<Ring> rings_;
  std::vector<std::optional<CodesPair>> codes_;
  std::optional<Pages> pages_;
};

// Throws std::out_of_range where pages of rows, or those to write to, aren't among `all` of a layer, or a row doesn't fit into its own.
void check_pages(const Pages& pages, const std::vector<int>& starts, const std::vector<int>& homes, int64_t length, int64_t all) {
  auto inside = [&](int page) {
    if (page < 0 || page >= all) throw std::out_of_range("page " + std::to_string(page) + " of " + std::to_string(all));
  };
  for (auto& row : pages.rows)
    for (int page : row) inside(page);
  for (auto [page, source, offset, end] : pages.fresh) {
    inside(page);
    if (source >= 0) inside(source);
    if (offset < 0 || end < offset || end > pages.size) throw std::out_of_range("slots " + std::to_string(offset) + " to " + std::to_string(end) + " of a page");
  }
  if (pages.counts.size() != starts.size()) throw std::invalid_argument("counts of " + std::to_string(pages.counts.size()) + " rows, there are " + std::to_string(starts.size()));
  for (size_t b = 0; b < starts.size(); b++) {
    const size_t home = homes.empty() ? b : static_cast<size_t>(homes[b]);
    if (home >= pages.rows.size()) throw std::out_of_range("row " + std::to_string(home) + " of pages");
    const int64_t room = static_cast<int64_t>(pages.rows[home].size()) * pages.size;
    if (starts[b] < 0 || pages.counts[b] < 0 || pages.counts[b] > length || starts[b] + pages.counts[b] > room)
      throw std::out_of_range("row " + std::to_string(b) + " ends at " + std::to_string(starts[b] + pages.counts[b]) + " of " + std::to_string(room) + " slots in pages");
  }
}
}  // namespace

std::optional<std::pair<mx::array, mx::array>> run_blocks(const Blocks& blocks, const mx::array& x, const std::vector<int>& starts, const std::vector<mx::array>& buffers,
                                                          const std::optional<mx::array>& before, const std::vector<int>& homes, const std::vector<std::vector<int>>& rings,
                                                          const std::vector<std::optional<CodesPair>>& codes, const std::optional<Pages>& pages, mx::StreamOrDevice s) {
  if (buffers.size() != 2 * blocks.all.size() || x.ndim() != 3 || starts.size() != static_cast<size_t>(x.shape(0)) || (!homes.empty() && homes.size() != starts.size()) ||
      (!codes.empty() && codes.size() != blocks.all.size()))
    return std::nullopt;
  if (!rings.empty() && (rings.size() != blocks.all.size() || !homes.empty() || pages)) return std::nullopt;
  std::vector<Ring> round;
  for (auto& numbers : rings) round.push_back(Ring::of(numbers, x.shape(0), x.shape(1)));
  int rows = homes.empty() ? x.shape(0) : 0;
  for (int home : homes) {
    if (home < 0) throw std::out_of_range("row " + std::to_string(home) + " of the buffers");
    rows = std::max(rows, home + 1);
  }
  for (size_t i = 0; i < buffers.size(); i++) {
    const auto& b = buffers[i];
    const AttentionParts& a = blocks.all[i / 2]->attention;
    const int wide = i % 2 ? a.dv() : a.d();
    const CodesForm* form = codes.empty() || !codes[i / 2] ? nullptr : i % 2 ? &codes[i / 2]->second : &codes[i / 2]->first;
    if (b.ndim() != 4 || b.shape(2) != buffers[i / 2 * 2].shape(2) || (pages ? b.shape(2) != pages->size : b.shape(0) < rows) || b.shape(pages ? 0 : 1) != a.form.k_heads) return std::nullopt;
    if (form ? b.dtype() != mx::uint32 || form->codes().dim != wide || b.shape(3) * 4 != form->codes().row_bytes() : b.dtype() != x.dtype() || b.shape(3) != wide) return std::nullopt;
    if (pages) {
      check_pages(*pages, starts, homes, x.shape(1), b.shape(1));
      continue;
    }
    const Buffers room{{}, b.shape(2), {}, round.empty() ? Ring{} : round[i / 2]};
    for (size_t row = 0; row < starts.size(); row++) room.check(static_cast<int>(row), starts[row], x.shape(1));
  }
  std::vector<mx::array> in;
  in.reserve(2 + buffers.size());
  in.push_back(x);
  in.insert(in.end(), buffers.begin(), buffers.end());
  if (before) in.push_back(*before);
  auto p = std::make_shared<RunBlocks>(mx::to_stream(s), blocks, std::vector<int32_t>(starts.begin(), starts.end()), std::vector<int32_t>(homes.begin(), homes.end()), std::move(round), codes, pages);
  auto made = mx::array::make_arrays({x.shape(), {1}}, {x.dtype(), mx::uint8}, p, in);
  return std::pair(made[0], made[1]);
}
}  // namespace gnomon
