// Attention of windows of a few queries over keys and values as they lie, with masks and sinks.
//
// Keys are cut into stretches of a fixed number; a block of 4 warps takes one stretch for one query and up to 4 heads of a group, 8 lanes a key.
// The last block of them adds the stretches up in order. A stretch without visible keys adds nothing, to the bit, so a query depends on the
// keys that it sees and where they lie, not on how many more there are.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gnomon {

constexpr int WINDOW_WARPS = 4;
constexpr int WINDOW_STRETCH = 256;
enum { NO_MASK, CAUSAL, BOOLEAN, ADDITIVE };

template <typename T>
struct Two;
template <>
struct Two<__nv_bfloat16> {
  static __device__ __forceinline__ float2 wide(unsigned v) { return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
};
template <>
struct Two<__half> {
  static __device__ __forceinline__ float2 wide(unsigned v) { return __half22float2(*reinterpret_cast<__half2*>(&v)); }
  static __device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }
};
__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(bool v) { return v; }
__device__ __forceinline__ float as_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }

struct At {
  long long row, head, slot, element;  // strides
};

__device__ __forceinline__ float share_of(float score, float most) { return most == -INFINITY ? 0.0f : exp2f(score - most); }

// q [B, Hq, L, D], keys and values [B, Hk, S, D], mask [B, Hq, L, S] with strides of 0 where it is broadcast; out [B, Hq, L, D];
// parts [B * L * Hq / HEADS, stretches, HEADS, D + 2]; counters [B * L * Hq / HEADS], zero before and after.
template <typename T, int D, int HEADS, int MASK, typename M, typename K>
__device__ __forceinline__ void attend_window(const T* q, At q_at, int q_heads, int width, const T* keys, At k_at, const T* values, At v_at,
                                              int kv_heads, int slots, const M* mask, At m_at, const K* sinks, float scale, int* counters,
                                              T* out, float* parts) {
  constexpr int PIECES = D / 64, E = PIECES * 8, UNROLL = HEADS * PIECES > 2 ? 2 : 4, KEYS = WINDOW_WARPS * 4;
  constexpr float LOG2E = 1.4426950408889634f;
  __shared__ float most[WINDOW_WARPS][HEADS], sums[WINDOW_WARPS][HEADS], outs[WINDOW_WARPS][HEADS][D];
  __shared__ int is_last;
  const int b = blockIdx.z / width, i = blockIdx.z % width, head0 = blockIdx.y * HEADS, kv = head0 / (q_heads / kv_heads);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, place = lane >> 3, in8 = lane & 7;
  const int k0 = blockIdx.x * WINDOW_STRETCH, k1 = min(slots, k0 + WINDOW_STRETCH), last = slots - width + i;

  float query[HEADS][E], top[HEADS], sum[HEADS], o[HEADS][E];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    top[h] = -INFINITY, sum[h] = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const T* from = q + b * q_at.row + (head0 + h) * q_at.head + i * q_at.slot + (p * 64 + in8 * 8 + e) * q_at.element;
        query[h][p * 8 + e] = as_float(*from) * scale * LOG2E;
        o[h][p * 8 + e] = 0.0f;
      }
  }
  keys += b * k_at.row + kv * k_at.head + in8 * 8, values += b * v_at.row + kv * v_at.head + in8 * 8;
  if (MASK == BOOLEAN || MASK == ADDITIVE) mask += b * m_at.row + head0 * m_at.head + i * m_at.slot;
  for (int base = k0 + warp * 4; base < k1; base += KEYS * UNROLL) {
    bool sees[UNROLL][HEADS], any = false;
    float more[UNROLL][HEADS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int key = base + place + KEYS * u;
      const bool is_there = key < k1 && (MASK != CAUSAL || key <= last);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        sees[u][h] = is_there, more[u][h] = 0.0f;
        if (MASK == BOOLEAN && is_there) sees[u][h] = as_float(mask[h * m_at.head + key * m_at.element]) != 0.0f;
        if (MASK == ADDITIVE && is_there) {
          more[u][h] = as_float(mask[h * m_at.head + key * m_at.element]) * LOG2E;
          sees[u][h] = more[u][h] != -INFINITY;
        }
        any = any || sees[u][h];
      }
    }
    if (!__any_sync(0xffffffffu, any)) continue;
    uint4 k[UNROLL][PIECES], v[UNROLL][PIECES];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int key = base + place + KEYS * u;
      bool needed = false;
#pragma unroll
      for (int h = 0; h < HEADS; ++h) needed = needed || sees[u][h];
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        // What is masked may be anything: it counts as zeros.
        k[u][p] = v[u][p] = make_uint4(0, 0, 0, 0);
        if (needed) {
          k[u][p] = *reinterpret_cast<const uint4*>(keys + key * k_at.slot + p * 64);
          v[u][p] = *reinterpret_cast<const uint4*>(values + key * v_at.slot + p * 64);
        }
      }
    }
    float score[UNROLL][HEADS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int h = 0; h < HEADS; ++h) score[u][h] = 0.0f;
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        const unsigned words[4] = {k[u][p].x, k[u][p].y, k[u][p].z, k[u][p].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 both = Two<T>::wide(words[w]);
#pragma unroll
          for (int h = 0; h < HEADS; ++h)
            score[u][h] = fmaf(both.y, query[h][p * 8 + 2 * w + 1], fmaf(both.x, query[h][p * 8 + 2 * w], score[u][h]));
        }
      }
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int x = 1; x < 8; x <<= 1) score[u][h] += __shfl_xor_sync(0xffffffffu, score[u][h], x);
        score[u][h] = sees[u][h] ? score[u][h] + more[u][h] : -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float highest = top[h];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) highest = fmaxf(highest, score[u][h]);
      const float keep = share_of(top[h], highest);
      top[h] = highest;
      sum[h] *= keep;
#pragma unroll
      for (int e = 0; e < E; ++e) o[h][e] *= keep;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        score[u][h] = share_of(score[u][h], highest);
        sum[h] += score[u][h];
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        const unsigned words[4] = {v[u][p].x, v[u][p].y, v[u][p].z, v[u][p].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 both = Two<T>::wide(words[w]);
#pragma unroll
          for (int h = 0; h < HEADS; ++h) {
            // A head that doesn't see a key that another sees takes nothing of it, not even its NaN.
            const bool takes = MASK == NO_MASK || MASK == CAUSAL || sees[u][h];
            o[h][p * 8 + 2 * w] = takes ? fmaf(score[u][h], both.x, o[h][p * 8 + 2 * w]) : o[h][p * 8 + 2 * w];
            o[h][p * 8 + 2 * w + 1] = takes ? fmaf(score[u][h], both.y, o[h][p * 8 + 2 * w + 1]) : o[h][p * 8 + 2 * w + 1];
          }
        }
      }
  }
#pragma unroll
  for (int x = 8; x < 32; x <<= 1)
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const float highest = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], x)), keep = share_of(top[h], highest);
      top[h] = highest;
      sum[h] *= keep;
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], x);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        o[h][e] *= keep;
        o[h][e] += __shfl_xor_sync(0xffffffffu, o[h][e], x);
      }
    }
  if (place == 0) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (in8 == 0) most[warp][h] = top[h], sums[warp][h] = sum[h];
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
#pragma unroll
        for (int e = 0; e < 8; ++e) outs[warp][h][p * 64 + in8 * 8 + e] = o[h][p * 8 + e];
    }
  }
  __syncthreads();
  const size_t of_query = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
  const int stretches = gridDim.x;
  float* part = parts + (of_query * stretches + blockIdx.x) * HEADS * (D + 2);
  for (int n = threadIdx.x; n < HEADS * D; n += WINDOW_WARPS * 32) {
    const int h = n / D, d = n % D;
    float highest = most[0][h];
#pragma unroll
    for (int w = 1; w < WINDOW_WARPS; ++w) highest = fmaxf(highest, most[w][h]);
    float all = 0.0f, own = 0.0f;
#pragma unroll
    for (int w = 0; w < WINDOW_WARPS; ++w) {
      const float share = share_of(most[w][h], highest);
      all = fmaf(sums[w][h], share, all), own = fmaf(outs[w][h][d], share, own);
    }
    part[h * (D + 2) + d] = own;
    if (d == 0) part[h * (D + 2) + D] = highest, part[h * (D + 2) + D + 1] = all;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = stretches == 1 || atomicAdd(&counters[of_query], 1) == stretches - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  constexpr int STEP = HEADS * (D + 2);
  const volatile float* from = parts + of_query * stretches * STEP;
  for (int n = threadIdx.x; n < HEADS * D; n += WINDOW_WARPS * 32) {
    const int h = n / D, d = n % D;
    const volatile float* own = from + h * (D + 2);
    const float sink = sinks ? as_float(sinks[head0 + h]) * LOG2E : -INFINITY;
    float highest = sink;
#pragma unroll 4
    for (int s = 0; s < stretches; ++s) highest = fmaxf(highest, own[s * STEP + D]);
    float all = share_of(sink, highest), value = 0.0f;
#pragma unroll 4
    for (int s = 0; s < stretches; ++s) {
      const float share = share_of(own[s * STEP + D], highest);
      all = fmaf(own[s * STEP + D + 1], share, all), value = fmaf(own[s * STEP + d], share, value);
    }
    // A query that sees no key gives zeros.
    out[((b * (size_t)q_heads + head0 + h) * width + i) * D + d] = Two<T>::narrow(all == 0.0f ? 0.0f : value / all);
  }
  if (threadIdx.x == 0 && stretches > 1) counters[of_query] = 0;
}

}  // namespace gnomon
