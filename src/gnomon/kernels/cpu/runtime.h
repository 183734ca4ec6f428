// What every primitive needs: the chosen instruction set, the pool, scratch memory, and views of MLX arrays.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>
#include "mlx/allocator.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "pool.h"
#include "table.h"

namespace gnomon {
namespace mx = mlx::core;

const Table& table();
std::string isa();
std::vector<std::string> isas();
// "auto" takes the best one the CPU has. Throws std::invalid_argument for one that isn't there.
void set_isa(const std::string& name);
std::shared_ptr<Pool> pool();
int threads();
void set_threads(int n);
void set_spin(int microseconds);

// Memory of one thread that grows and is kept; 64-byte aligned.
template <int TAG> float* scratch(size_t floats) {
  struct Block {
    float* p = nullptr;
    size_t n = 0;
    ~Block() { std::free(p); }
  };
  static thread_local Block b;
  if (floats > b.n) {
    std::free(b.p);
    b.p = nullptr;
    b.n = 0;
    void* p = std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64);
    if (!p) throw std::bad_alloc();
    b.p = static_cast<float*>(p);
    b.n = floats;
  }
  return b.p;
}

inline bool float_type(mx::Dtype d) { return d == mx::float32 || d == mx::float16 || d == mx::bfloat16; }
inline Type type_of(mx::Dtype d) { return d == mx::float32 ? F32 : d == mx::float16 ? F16 : BF16; }

// The rows along an array's last axis, however it is strided or broadcast.
struct Rows {
  const char* data;
  Type type;
  mx::Shape shape;      // without the last axis
  mx::Strides strides;  // of those
  int64_t step;         // between neighbours on the last axis
  int width;
  int64_t count = 1;
  bool even;            // rows are `pitch` apart
  int64_t pitch = 0;

  explicit Rows(const mx::array& a)
      : data(a.data<char>()), type(type_of(a.dtype())), shape(a.shape().begin(), a.shape().end() - 1),
        strides(a.strides().begin(), a.strides().end() - 1), step(a.strides().back()), width(a.shape().back()), even(a.flags().row_contiguous) {
    for (auto s : shape) count *= s;
    pitch = width;
  }
  int64_t offset(int64_t row) const {
    if (even) return row * pitch;
    int64_t o = 0;
    for (int i = static_cast<int>(shape.size()) - 1; i >= 0; i--) {
      o += (row % shape[i]) * strides[i];
      row /= shape[i];
    }
    return o;
  }
  const char* row(int64_t i) const { return data + offset(i) * static_cast<int64_t>(type_size(type)); }
};

// The bytes of an array in row-major order; copied only if it isn't already so. Keeps what it needs alive.
class Packed {
 public:
  explicit Packed(const mx::array& a) : array_(a) {}
  const char* data() {
    if (array_.flags().row_contiguous) return array_.data<char>();
    const size_t size = array_.itemsize(), n = array_.size();
    copy_.resize(size * n);
    for (size_t i = 0; i < n; i++)
      std::memcpy(&copy_[i * size], array_.data<char>() + mx::elem_to_loc(static_cast<int64_t>(i), array_.shape(), array_.strides()) * size, size);
    return copy_.data();
  }

 private:
  mx::array array_;
  std::vector<char> copy_;
};

// Base of our primitives: one output, CPU only.
class Native : public mx::UnaryPrimitive {
 public:
  using mx::UnaryPrimitive::UnaryPrimitive;
  void eval_gpu(const std::vector<mx::array>&, mx::array&) override { throw std::runtime_error(std::string(name()) + " runs on the CPU only"); }
};

// A row as floats: where it lies if it is one already, else in `room`.
inline const float* widen(const Table& t, const char* from, Type type, int64_t step, int n, float* room) {
  if (type == F32 && step == 1) return reinterpret_cast<const float*>(from);
  if (step == 1) t.to_f32(from, type, n, room);
  else
    for (int i = 0; i < n; i++) t.to_f32(from + i * step * static_cast<int64_t>(type_size(type)), type, 1, room + i);
  return room;
}

// f(first, last) over [0, n) in the pool if `work` (elements to go through) is worth waking it.
template <class F> void split(int64_t n, int64_t work, F&& f) {
  auto workers = pool();
  const int64_t parts = work < 32768 ? 1 : std::min<int64_t>(n, 4 * workers->size());
  if (parts <= 1) {
    f(static_cast<int64_t>(0), n);
    return;
  }
  workers->run(static_cast<int>(parts), [&](int i) { f(n * i / parts, n * (i + 1) / parts); });
}

// While profiling is on, the evaluating thread's CPU seconds are summed by primitive. set_profile returns what was summed so far and starts anew.
bool profiling();
double cpu_seconds();
void add_seconds(const char* name, double seconds);
std::map<std::string, double> set_profile(bool on);

template <class F> void dispatch(const char* name, mx::Stream stream, F&& f) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  if (!profiling()) {
    encoder.dispatch(std::forward<F>(f));
    return;
  }
  encoder.dispatch([name, f = std::forward<F>(f)]() mutable {
    const double begun = cpu_seconds();
    f();
    add_seconds(name, cpu_seconds() - begun);
  });
}

inline void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

}  // namespace gnomon
