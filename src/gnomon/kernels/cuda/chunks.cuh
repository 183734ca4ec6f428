// What lies between the matrix products of a prompt's chunk: each a pass over rows of many tokens, in float32, rounded once.
#include "linear.cuh"

namespace gnomon {

// Eight values, 16 bytes at a time.
template <typename T>
struct Octet {
  static constexpr int WORDS = sizeof(T) / 2;
  __align__(16) T v[8];
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) reinterpret_cast<uint4*>(v)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(v)[i];
  }
};

// Weights, their 32-bit words per row, and where their values go.
template <typename T>
struct Packed {
  Weights<T> weights;
  int row_words;
  T* out;
};

// All parts' values as T, rounded once. A block takes one part's words, a thread one of them.
template <typename T, int BITS, int GROUP, int BLOCK, int PARTS>
__device__ __forceinline__ void unpack_parts(const Packed<T> (&parts)[PARTS]) {
  Packed<T> one = parts[0];
  long long words = (long long)one.weights.rows * one.row_words;
  int block = blockIdx.x;
#pragma unroll
  for (int p = 1; p < PARTS; ++p) {
    const int own = (int)((words + BLOCK - 1) / BLOCK);
    if (block < own) break;
    block -= own, one = parts[p], words = (long long)one.weights.rows * one.row_words;
  }
  const long long i = (long long)block * BLOCK + threadIdx.x;
  if (i < words) unpack_word<T, BITS, GROUP>(one.weights, i, one.out);
}

// h = residual + y; x = h over the root of its mean square, times the norm's weight. One block per row of K values.
template <typename T, int BLOCK>
__device__ __forceinline__ void add_and_norm(const T* y, const T* residual, const T* weight, int K, float eps, T* h, T* x) {
  __shared__ float sums[BLOCK / 32];
  const size_t row = (size_t)blockIdx.x * K;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float sum = 0.0f;
  for (int k = threadIdx.x * 8; k < K; k += BLOCK * 8) {
    Octet<T> a, b;
    a.load(y + row + k), b.load(residual + row + k);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      a.v[j] = Type<T>::narrow(Type<T>::wide(a.v[j]) + Type<T>::wide(b.v[j]));
      const float v = Type<T>::wide(a.v[j]);
      sum += v * v;
    }
    a.store(h + row + k);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < BLOCK / 32; ++w) sum += sums[w];
  const float factor = rsqrtf(sum / (float)K + eps);
  for (int k = threadIdx.x * 8; k < K; k += BLOCK * 8) {
    Octet<T> a, w;
    a.load(h + row + k), w.load(weight + k);  // this thread's own values
#pragma unroll
    for (int j = 0; j < 8; ++j) a.v[j] = Type<T>::narrow(Type<T>::wide(a.v[j]) * factor * Type<T>::wide(w.v[j]));
    a.store(x + row + k);
  }
}

// out [M, N] = silu(gate) * up, whose rows begin every `stride` values. One thread per eight.
template <typename T>
__device__ __forceinline__ void gate_and_multiply(const T* gate, const T* up, int stride, int N, long long values, T* out) {
  const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= values) return;
  const size_t at = i / N * stride + i % N;
  Octet<T> a, b;
  a.load(gate + at), b.load(up + at);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float v = Type<T>::wide(a.v[j]);
    a.v[j] = Type<T>::narrow(v / (1.0f + __expf(-v)) * Type<T>::wide(b.v[j]));
  }
  a.store(out + i);
}

// A projection's results: rows of `stride` values, a bias or null, a head norm's weight or null, and what becomes of it: [B, heads, L, D], or
// as it came, [B, L, heads, D].
template <typename T>
struct Heads {
  const T* x;
  int stride;
  const T* bias;
  const T* norm;
  int heads;
  bool turned, as_it_came;
  T* out;
};

// Bias, head norm and rotation. One warp per token and head; `offsets` are the positions of the rows' first tokens.
template <int D, typename T>
__device__ __forceinline__ void place_heads(const Heads<T> (&parts)[3], const int* offsets, int L, int rows, const float* inverse, float eps,
                                            bool traditional) {
  constexpr int PAIRS = D / 64;
  const int lane = threadIdx.x & 31, all = parts[0].heads + parts[1].heads + parts[2].heads;
  const long long item = (long long)blockIdx.x * (blockDim.x / 32) + (threadIdx.x >> 5);
  if (item >= (long long)rows * all) return;
  const int row = item / all;
  int head = item % all;
  Heads<T> part = parts[0];
#pragma unroll
  for (int p = 1; p < 3; ++p) {
    if (head < part.heads) break;
    head -= part.heads, part = parts[p];
  }
  const T* x = part.x + (size_t)row * part.stride + head * D;
  float p[PAIRS], q[PAIRS];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = lane + 32 * j, a = traditional ? 2 * i : i, b = traditional ? 2 * i + 1 : i + D / 2;
    p[j] = Type<T>::wide(x[a]), q[j] = Type<T>::wide(x[b]);
    if (part.bias) {
      p[j] = Type<T>::wide(Type<T>::narrow(p[j] + Type<T>::wide(part.bias[head * D + a])));
      q[j] = Type<T>::wide(Type<T>::narrow(q[j] + Type<T>::wide(part.bias[head * D + b])));
    }
    sum += p[j] * p[j] + q[j] * q[j];
  }
  float factor = 1.0f;
  if (part.norm) {
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    factor = rsqrtf(sum / (float)D + eps);
  }
  T* out = part.out + (part.as_it_came ? (size_t)row * part.heads + head : ((size_t)(row / L) * part.heads + head) * L + row % L) * D;
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = lane + 32 * j, a = traditional ? 2 * i : i, b = traditional ? 2 * i + 1 : i + D / 2;
    if (part.norm) {
      p[j] = Type<T>::wide(Type<T>::narrow(p[j] * factor * Type<T>::wide(part.norm[a])));
      q[j] = Type<T>::wide(Type<T>::narrow(q[j] * factor * Type<T>::wide(part.norm[b])));
    }
    float cosine = 1.0f, sine = 0.0f;
    if (part.turned) sincosf((float)(offsets[row / L] + row % L) * inverse[i], &sine, &cosine);
    out[a] = Type<T>::narrow(p[j] * cosine - q[j] * sine);
    out[b] = Type<T>::narrow(p[j] * sine + q[j] * cosine);
  }
}

}  // namespace gnomon
