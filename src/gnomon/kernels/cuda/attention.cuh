// One new token per row: head norms, rotation, append and attention in one launch.
//
// A row's keys are cut into stretches whose length depends on the row's own length alone; a block of 4 warps takes one stretch of one group of
// heads, 8 lanes a key. The last block of a row and group to finish adds the stretches up in order. So a row's result doesn't depend on
// the other rows or on the size of the buffers. The new key and value are written in place: slot `length` of each row, which no block reads.
// Keys and values of earlier steps are fetched to the second-level cache before the kernel in front, in a graph, has ended.
//
// A window of several tokens of a row is as many rows of queries, each of which sees the keys up to its own: `append` writes them in front of
// `attend`, which cuts and adds up the keys of each as if it came alone.
#include <cuda_bf16.h>

namespace gnomon {

constexpr int ATTENTION_WARPS = 4;
constexpr int STRETCH = 128;
constexpr int MOST_STRETCHES = 32;

__device__ __forceinline__ float low(unsigned v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(unsigned v) { return __uint_as_float(v & 0xffff0000u); }

__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float widen(float v) { return v; }
template <typename T>
__device__ __forceinline__ T round_to(float v);
template <>
__device__ __forceinline__ __nv_bfloat16 round_to(float v) { return __float2bfloat16_rn(v); }
template <>
__device__ __forceinline__ float round_to(float v) { return v; }

// Eight elements, in pairs.
template <typename T>
struct Eight;
template <>
struct Eight<__nv_bfloat16> {
  uint4 v;
  __device__ __forceinline__ void load(const __nv_bfloat16* from) { v = *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ unsigned word(int i) const { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  __device__ __forceinline__ float first(int i) const { return low(word(i)); }
  __device__ __forceinline__ float second(int i) const { return high(word(i)); }
};
template <>
struct Eight<float> {
  float4 v[2];
  __device__ __forceinline__ void load(const float* from) {
    v[0] = reinterpret_cast<const float4*>(from)[0], v[1] = reinterpret_cast<const float4*>(from)[1];
  }
  __device__ __forceinline__ float first(int i) const { return i & 1 ? v[i >> 1].z : v[i >> 1].x; }
  __device__ __forceinline__ float second(int i) const { return i & 1 ? v[i >> 1].w : v[i >> 1].y; }
};

template <typename T>
struct Cache {
  T* keys;
  T* values;
  long long row, head, slot;                    // strides of keys
  long long value_row, value_head, value_slot;  // strides of values
};

// Where a row of queries belongs: a row of the buffers, its own position, and the window's first.
struct Spot {
  int row, length, start;
};

// Of this block's row of queries. Plain steps have lengths; windows a number as `attention.spot` in Python packs it.
template <bool WINDOW>
__device__ __forceinline__ Spot spot_of(const int* lengths) {
  const int n = lengths[blockIdx.z];
  if constexpr (WINDOW) {
    const int position = n & ((1 << 21) - 1);
    return {n >> 26, position, position - (n >> 21 & 31)};
  }
  return {(int)blockIdx.z, n, n};
}

// x [heads * D] raw -> norm (if weight) -> rotation, in float32 in `into` [heads][D].
template <int D, typename T>
__device__ __forceinline__ void turn(const T* x, int heads, const T* weight, float eps, const float* cosine,
                                     const float* sine, bool traditional, float* into) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int h = warp; h < heads; h += ATTENTION_WARPS) {
    float factor = 1.0f;
    if (weight) {
      float sum = 0.0f;
      for (int d = lane; d < D; d += 32) {
        const float v = widen(x[h * D + d]);
        sum += v * v;
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      factor = rsqrtf(sum / (float)D + eps);
    }
    for (int i = lane; i < D / 2; i += 32) {
      const int a = traditional ? 2 * i : i, b = traditional ? 2 * i + 1 : i + D / 2;
      float p = widen(x[h * D + a]), q = widen(x[h * D + b]);
      if (weight) {
        p = widen(round_to<T>(p * factor * widen(weight[a])));
        q = widen(round_to<T>(q * factor * widen(weight[b])));
      }
      // Spelt out, so that every kernel rounds alike.
      into[h * D + a] = fmaf(p, cosine[i], -__fmul_rn(q, sine[i]));
      into[h * D + b] = fmaf(p, sine[i], __fmul_rn(q, cosine[i]));
    }
  }
}

template <int HEADS, int E>
struct Partial {
  float most[HEADS], sum[HEADS], o[HEADS][E];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      most[h] = -INFINITY, sum[h] = 0.0f;
#pragma unroll
      for (int e = 0; e < E; ++e) o[h][e] = 0.0f;
    }
  }
};

__device__ __forceinline__ float weight_of(float score, float most) { return most == -INFINITY ? 0.0f : exp2f(score - most); }

// The new keys and values of a window's rows qkv [N, (q_heads + 2 kv_heads) * D], in place; a block takes up to 4 heads of one.
template <int D, bool NORMED, typename T>
__device__ __forceinline__ void append(const T* qkv, Cache<T> cache, const int* spots, const float* inverse, const T* k_norm, float eps,
                                       int q_heads, int kv_heads, bool traditional) {
  __shared__ float cosine[D / 2], sine[D / 2], k_new[ATTENTION_WARPS * D];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const Spot at = spot_of<true>(spots);
  const int head0 = blockIdx.x * ATTENTION_WARPS, heads = min(ATTENTION_WARPS, kv_heads - head0);
  for (int i = threadIdx.x; i < D / 2; i += ATTENTION_WARPS * 32) sincosf((float)at.length * inverse[i], &sine[i], &cosine[i]);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  __syncthreads();
  const T* row = qkv + (size_t)blockIdx.z * (q_heads + 2 * kv_heads) * D;
  turn<D, T>(row + (q_heads + head0) * D, heads, NORMED ? k_norm : nullptr, eps, cosine, sine, traditional, k_new);
  __syncthreads();
  const T* v_new = row + (q_heads + kv_heads + head0) * D;
  for (int i = threadIdx.x; i < heads * D; i += ATTENTION_WARPS * 32) {
    const int h = head0 + i / D, d = i % D;
    cache.keys[at.row * cache.row + h * cache.head + at.length * cache.slot + d] = round_to<T>(k_new[i]);
    cache.values[at.row * cache.value_row + h * cache.value_head + at.length * cache.value_slot + d] = v_new[i];
  }
}

// qkv [B, (q_heads + 2 kv_heads) * D]; HEADS query heads of one kv head per block; out [B, q_heads * D];
// parts [B * groups, MOST_STRETCHES, HEADS, D + 2] and counters [B * groups], zero before and after. In a WINDOW lengths are spots, and the
// new keys and values are in the buffers already.
template <int D, int HEADS, bool NORMED, bool WINDOW, typename T>
__device__ __forceinline__ void attend(const T* qkv, Cache<T> cache, const int* lengths, const float* inverse, const T* q_norm,
                                       const T* k_norm, float eps, int q_heads, int kv_heads, float scale, bool traditional, int* counters,
                                       T* out, float* parts) {
  constexpr int PIECES = D / 64, E = PIECES * 8, UNROLL = HEADS * PIECES * (int)sizeof(T) > 8 ? 2 : 4, KEYS = ATTENTION_WARPS * 4;
  __shared__ float cosine[D / 2], sine[D / 2], q_new[HEADS * D], k_new[D];
  __shared__ float most[ATTENTION_WARPS][HEADS], sums[ATTENTION_WARPS][HEADS], outs[ATTENTION_WARPS][HEADS][D];
  __shared__ int is_last;
  const int z = blockIdx.z, group = blockIdx.y, stretch = blockIdx.x;
  const int per_kv = q_heads / kv_heads / HEADS, kv = group / per_kv, sub = group % per_kv;
  const int head0 = kv * (q_heads / kv_heads) + sub * HEADS;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const Spot at = spot_of<WINDOW>(lengths);
  const int b = at.row, length = at.length, size = STRETCH * (length / (STRETCH * MOST_STRETCHES) + 1), used = length / size + 1;
  if (stretch >= used) return;
  const int k0 = stretch * size, k1 = min(length, k0 + size);
  constexpr int LINES = D * (int)sizeof(T) / 128;
  for (int i = threadIdx.x; i < min((WINDOW ? min(k1, at.start) : k1) - k0, STRETCH) * LINES; i += ATTENTION_WARPS * 32) {
    const int d = i % LINES * (128 / (int)sizeof(T));
    const long long key = k0 + i / LINES;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(cache.keys + b * cache.row + kv * cache.head + key * cache.slot + d));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(cache.values + b * cache.value_row + kv * cache.value_head + key * cache.value_slot + d));
  }
  const bool has_new = stretch == used - 1;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, place = lane >> 3, in8 = lane & 7;

  for (int i = threadIdx.x; i < D / 2; i += ATTENTION_WARPS * 32) sincosf((float)length * inverse[i], &sine[i], &cosine[i]);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  __syncthreads();
  const T* row = qkv + (size_t)z * (q_heads + 2 * kv_heads) * D;
  turn<D, T>(row + head0 * D, HEADS, NORMED ? q_norm : nullptr, eps, cosine, sine, traditional, q_new);
  const T* v_new = row + (q_heads + kv_heads + kv) * D;
  if (WINDOW && has_new) {
    for (int d = threadIdx.x; d < D; d += ATTENTION_WARPS * 32)
      k_new[d] = widen(cache.keys[b * cache.row + kv * cache.head + length * cache.slot + d]);
  } else if (has_new) {
    turn<D, T>(row + (q_heads + kv) * D, 1, NORMED ? k_norm : nullptr, eps, cosine, sine, traditional, k_new);
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += ATTENTION_WARPS * 32) {
      const T k = round_to<T>(k_new[d]);
      k_new[d] = widen(k);
      if (sub == 0) {
        cache.keys[b * cache.row + kv * cache.head + length * cache.slot + d] = k;
        cache.values[b * cache.value_row + kv * cache.value_head + length * cache.value_slot + d] = v_new[d];
      }
    }
  }
  __syncthreads();

  float q[HEADS][E];
  const float unit = scale * 1.4426950408889634f;
#pragma unroll
  for (int h = 0; h < HEADS; ++h)
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int e = 0; e < 8; ++e) q[h][p * 8 + e] = q_new[h * D + p * 64 + in8 * 8 + e] * unit;

  Partial<HEADS, E> mine;
  mine.clear();
  const T* keys = cache.keys + b * cache.row + kv * cache.head + in8 * 8;
  const T* values = cache.values + b * cache.value_row + kv * cache.value_head + in8 * 8;
  for (int base = k0 + warp * 4; base < k1; base += KEYS * UNROLL) {
    Eight<T> k[UNROLL][PIECES], v[UNROLL][PIECES];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const long long key = min(base + place + KEYS * u, k1 - 1);
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        k[u][p].load(keys + key * cache.slot + p * 64);
        v[u][p].load(values + key * cache.value_slot + p * 64);
      }
    }
    float score[UNROLL][HEADS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int h = 0; h < HEADS; ++h) score[u][h] = 0.0f;
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int h = 0; h < HEADS; ++h)
            score[u][h] = fmaf(k[u][p].second(i), q[h][p * 8 + 2 * i + 1], fmaf(k[u][p].first(i), q[h][p * 8 + 2 * i], score[u][h]));
#pragma unroll
      for (int h = 0; h < HEADS; ++h)
#pragma unroll
        for (int o = 1; o < 8; o <<= 1) score[u][h] += __shfl_xor_sync(0xffffffffu, score[u][h], o);
      if (base + place + KEYS * u >= k1) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) score[u][h] = -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float top = mine.most[h];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) top = fmaxf(top, score[u][h]);
      const float keep = weight_of(mine.most[h], top);
      mine.most[h] = top;
      mine.sum[h] *= keep;
#pragma unroll
      for (int e = 0; e < E; ++e) mine.o[h][e] *= keep;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        score[u][h] = weight_of(score[u][h], top);
        mine.sum[h] += score[u][h];
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int h = 0; h < HEADS; ++h) {
            mine.o[h][p * 8 + 2 * i] = fmaf(score[u][h], v[u][p].first(i), mine.o[h][p * 8 + 2 * i]);
            mine.o[h][p * 8 + 2 * i + 1] = fmaf(score[u][h], v[u][p].second(i), mine.o[h][p * 8 + 2 * i + 1]);
          }
  }
  if (has_new && warp == 0) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float score = 0.0f;
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int e = 0; e < 8; ++e) score = fmaf(k_new[p * 64 + in8 * 8 + e], q[h][p * 8 + e], score);
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) score += __shfl_xor_sync(0xffffffffu, score, o);
      if (place == 0) {
        const float top = fmaxf(mine.most[h], score), keep = weight_of(mine.most[h], top), own = exp2f(score - top);
        mine.most[h] = top;
        mine.sum[h] = fmaf(mine.sum[h], keep, own);
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
#pragma unroll
          for (int e = 0; e < 8; ++e)
            mine.o[h][p * 8 + e] = fmaf(own, widen(v_new[p * 64 + in8 * 8 + e]), mine.o[h][p * 8 + e] * keep);
      }
    }
  }
  // The four places of a warp, then the warps, then the stretches.
#pragma unroll
  for (int o = 8; o < 32; o <<= 1)
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const float other = __shfl_xor_sync(0xffffffffu, mine.most[h], o), top = fmaxf(mine.most[h], other);
      const float keep = weight_of(mine.most[h], top);
      mine.most[h] = top;
      mine.sum[h] *= keep;
      mine.sum[h] += __shfl_xor_sync(0xffffffffu, mine.sum[h], o);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        mine.o[h][e] *= keep;
        mine.o[h][e] += __shfl_xor_sync(0xffffffffu, mine.o[h][e], o);
      }
    }
  if (place == 0) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (in8 == 0) most[warp][h] = mine.most[h], sums[warp][h] = mine.sum[h];
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int e = 0; e < 8; ++e) outs[warp][h][p * 64 + in8 * 8 + e] = mine.o[h][p * 8 + e];
    }
  }
  __syncthreads();
  const int of_row = z * gridDim.y + group;
  for (int i = threadIdx.x; i < HEADS * D; i += ATTENTION_WARPS * 32) {
    const int h = i / D, d = i % D;
    float top = most[0][h];
#pragma unroll
    for (int w = 1; w < ATTENTION_WARPS; ++w) top = fmaxf(top, most[w][h]);
    float sum = 0.0f, o = 0.0f;
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; ++w) {
      const float share = weight_of(most[w][h], top);
      sum = fmaf(sums[w][h], share, sum), o = fmaf(outs[w][h][d], share, o);
    }
    if (used == 1) {
      out[((size_t)z * q_heads + head0 + h) * D + d] = round_to<T>(o / sum);
    } else {
      float* part = parts + (((size_t)of_row * MOST_STRETCHES + stretch) * HEADS + h) * (D + 2);
      part[d] = o;
      if (d == 0) part[D] = top, part[D + 1] = sum;
    }
  }
  if (used == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&counters[of_row], 1) == used - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < HEADS * D; i += ATTENTION_WARPS * 32) {
    const int h = i / D, d = i % D;
    const volatile float* part = parts + ((size_t)of_row * MOST_STRETCHES * HEADS + h) * (D + 2);
    const int step = HEADS * (D + 2);
    float top = -INFINITY;
    for (int s = 0; s < used; ++s) top = fmaxf(top, part[s * step + D]);
    float sum = 0.0f, o = 0.0f;
    for (int s = 0; s < used; ++s) {
      const float share = exp2f(part[s * step + D] - top);
      sum = fmaf(part[s * step + D + 1], share, sum), o = fmaf(part[s * step + d], share, o);
    }
    out[((size_t)z * q_heads + head0 + h) * D + d] = round_to<T>(o / sum);
  }
  if (threadIdx.x == 0) counters[of_row] = 0;
}

}  // namespace gnomon
