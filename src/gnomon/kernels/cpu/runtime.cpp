#include "runtime.h"
#include <time.h>
#include <unistd.h>

namespace gnomon {
namespace {
std::vector<const Table*> available() {
  std::vector<const Table*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(GNOMON_AVX512VNNI)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma"))
    found.push_back(table_avx512vnni());
#endif
#if defined(GNOMON_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
    found.push_back(table_avx512());
#endif
#if defined(GNOMON_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(table_avx2());
#endif
#elif defined(__aarch64__) && defined(GNOMON_NEON)
  found.push_back(table_neon());
#endif
#if defined(GNOMON_PORTABLE)
  found.push_back(table_portable());
#endif
  return found;
}
std::atomic<const Table*> chosen{nullptr};
std::mutex pool_lock;
std::shared_ptr<Pool> the_pool;
pid_t pool_owner = 0;
int wanted_threads = 1;
int wanted_spin = 20;
std::atomic<bool> profile{false};
std::mutex profile_lock;
std::map<std::string, double> seconds_of;

void renew() {
  // Workers don't survive a fork; a child must not join the parent's, so it lets that pool be.
  if (the_pool && pool_owner != getpid()) new std::shared_ptr<Pool>(std::move(the_pool));
  the_pool = std::make_shared<Pool>(wanted_threads, std::chrono::microseconds(wanted_spin));
  pool_owner = getpid();
}
}  // namespace

const Table& table() {
  const Table* t = chosen.load(std::memory_order_relaxed);
  if (!t) {
    auto found = available();
    if (found.empty()) throw std::runtime_error("the native kernels were built for no instruction set of this CPU");
    t = found.front();
    chosen.store(t);
  }
  return *t;
}
bool profiling() { return profile.load(std::memory_order_relaxed); }
double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
void add_seconds(const char* name, double seconds) {
  std::lock_guard<std::mutex> l(profile_lock);
  seconds_of[name] += seconds;
}
std::map<std::string, double> set_profile(bool on) {
  std::lock_guard<std::mutex> l(profile_lock);
  profile.store(on);
  return std::exchange(seconds_of, {});
}

std::string isa() { return table().name; }
std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto* t : available()) names.emplace_back(t->name);
  return names;
}
void set_isa(const std::string& name) {
  for (auto* t : available())
    if (name == "auto" || name == t->name) {
      chosen.store(t);
      return;
    }
  throw std::invalid_argument("instruction set " + name + " is not in this build or not in this CPU");
}
std::shared_ptr<Pool> pool() {
  std::lock_guard<std::mutex> l(pool_lock);
  if (!the_pool || pool_owner != getpid()) renew();
  return the_pool;
}
int threads() { return pool()->size(); }
void set_threads(int n) {
  if (n < 1 || n > 1024) throw std::invalid_argument("threads must be 1 to 1024");
  std::lock_guard<std::mutex> l(pool_lock);
  wanted_threads = n;
  renew();
}
void set_spin(int microseconds) {
  if (microseconds < 0 || microseconds > 1000000) throw std::invalid_argument("spin must be 0 to 1000000 microseconds");
  std::lock_guard<std::mutex> l(pool_lock);
  wanted_spin = microseconds;
  renew();
}
}  // namespace gnomon
