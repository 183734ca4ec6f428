// A small work-sharing pool. The caller works too, so a late or descheduled worker delays it by no more than the chunk it has claimed.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gnomon {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // Workers look for work `spin` long after their last chunk before they sleep; waking one costs more than a small product.
  Pool(int threads, std::chrono::microseconds spin) : size_(threads), spin_(spin) {
    for (int i = 1; i < size_; i++) workers_.emplace_back([this] { loop(); });
  }
  ~Pool() {
    stop_.store(true, std::memory_order_seq_cst);
    { std::lock_guard<std::mutex> l(sleep_); }
    wake_.notify_all();
    for (auto& w : workers_) w.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  int size() const { return size_; }

  // Calls f(chunk) for chunk in [0, chunks), in any order and on any thread; returns when all are done.
  template <class F> void run(int chunks, F&& f) {
    if (size_ == 1 || chunks <= 1) {
      for (int i = 0; i < chunks; i++) f(i);
      return;
    }
    std::lock_guard<std::mutex> one_job(job_);
    for (int at = 0; at < chunks; at += MOST) {
      const int some = chunks - at < MOST ? chunks - at : MOST;
      auto shifted = [&f, at](int i) { f(at + i); };
      share(some, &shifted, [](void* g, int i) { (*static_cast<decltype(shifted)*>(g))(i); });
    }
  }

 private:
  static constexpr int MOST = 0xffff;
  void share(int chunks, void* context, void (*call)(void*, int)) {
    context_ = context;
    call_ = call;
    done_.store(0, std::memory_order_relaxed);
    epoch_++;
    // Epoch, number of chunks and the next one in a single word: claiming by compare-and-swap can't mix two jobs up.
    ticket_.store(static_cast<uint64_t>(epoch_) << 32 | static_cast<uint64_t>(chunks) << 16, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> l(sleep_); }
      wake_.notify_all();
    }
    work();
    for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; spins++) {
      if (spins < 2000) relax();
      else std::this_thread::yield();
    }
  }
  static bool open(uint64_t t) { return (t & 0xffff) < ((t >> 16) & 0xffff); }
  void work() {
    for (uint64_t t = ticket_.load(std::memory_order_acquire); open(t); t = ticket_.load(std::memory_order_acquire)) {
      if (!ticket_.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel)) continue;
      call_(context_, static_cast<int>(t & 0xffff));
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  void loop() {
    while (!stop_.load(std::memory_order_relaxed)) {
      work();
      const auto since = std::chrono::steady_clock::now();
      bool found = false;
      for (int i = 0; !(found = open(ticket_.load(std::memory_order_acquire))); i++) {
        relax();
        if ((i & 15) == 15 && std::chrono::steady_clock::now() - since > spin_) break;
      }
      if (found) continue;
      std::unique_lock<std::mutex> l(sleep_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(l, [this] { return stop_.load(std::memory_order_seq_cst) || open(ticket_.load(std::memory_order_seq_cst)); });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  const int size_;
  const std::chrono::microseconds spin_;
  std::vector<std::thread> workers_;
  std::mutex sleep_, job_;
  std::condition_variable wake_;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  uint32_t epoch_ = 0;
  void* context_ = nullptr;
  void (*call_)(void*, int) = nullptr;
};

}  // namespace gnomon
