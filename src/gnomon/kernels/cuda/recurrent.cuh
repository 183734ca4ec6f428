// The gated delta rule and what a mixer of Qwen3-Next and Qwen3.5 has around it: the short convolution, gates, norms of q and k, and the gated
// norm of the result. A window of a few tokens is one launch, a block per row and value head; a long one is three (prepare, delta, norm)
// that take the same steps with the same roundings, so a token's result and the state after it don't depend on how the tokens came.
//
// Eight lanes share a row of the state, which stays in registers in float32; a token's two products with it are sums over a lane's
// columns in order, then over the lanes by a fixed tree.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gnomon {

__device__ __forceinline__ float real(float v) { return v; }
__device__ __forceinline__ float real(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float real(__half v) { return __half2float(v); }
template <typename T>
__device__ __forceinline__ T rounded(float v);
template <>
__device__ __forceinline__ float rounded<float>(float v) { return v; }
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
template <>
__device__ __forceinline__ __half rounded<__half>(float v) { return __float2half_rn(v); }

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

// Four neighbours, aligned to their own size.
__device__ __forceinline__ void load4(const float* p, float* v) {
  const float4 q = *reinterpret_cast<const float4*>(p);
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}
template <typename T>
__device__ __forceinline__ void load4(const T* p, float* v) {
  const uint2 q = *reinterpret_cast<const uint2*>(p);
  const T* parts = reinterpret_cast<const T*>(&q);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = real(parts[i]);
}
template <typename T>
__device__ __forceinline__ void store4(T* p, const float* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = rounded<T>(v[i]);
}
__device__ __forceinline__ void store4(float* p, const float* v) {
  *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// A lane's columns of DK: fours at distance 32.
template <int DK, typename T>
__device__ __forceinline__ void load_columns(const T* row, float (&v)[DK / 8]) {
#pragma unroll
  for (int j = 0; j < DK / 32; ++j) load4(row + j * 32 + (threadIdx.x & 7) * 4, &v[4 * j]);
}

// R rows of a state over one token, in the registers of eight lanes. `g` is one number, or one per column.
template <int DK, int R, bool EACH>
__device__ __forceinline__ void delta(float (&s)[R][DK / 8], const float (&k)[DK / 8], const float (&q)[DK / 8],
                                      const float (&g)[EACH ? DK / 8 : 1], const float (&v)[R], float beta, float (&y)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DK / 8; ++i) {
      s[r][i] = __fmul_rn(s[r][i], g[EACH ? i : 0]);
      sum = fmaf(s[r][i], k[i], sum);
    }
#pragma unroll
    for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    const float change = __fmul_rn(__fsub_rn(v[r], sum), beta);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DK / 8; ++i) {
      s[r][i] = fmaf(k[i], change, s[r][i]);
      sum = fmaf(s[r][i], q[i], sum);
    }
#pragma unroll
    for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    y[r] = sum;
  }
}

constexpr int DELTA_WARPS = 4;

// The rule over whole windows: q, k [B, T, Hk, DK], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, DK], beta [B, T, Hv], state [B, Hv, Dv, DK],
// mask [B, T] or null. Grid (Dv / 16, Hv, B).
template <int DK, bool EACH, typename T, typename G, typename E, typename S>
__device__ __forceinline__ void gated_delta(const T* q, const T* k, const T* v, const G* g, const E* beta, const S* state,
                                            const bool* mask, int tokens, int k_heads, int v_heads, int Dv, T* y, S* after) {
  const int b = blockIdx.z, h = blockIdx.y, kh = h / (v_heads / k_heads);
  const int row = (blockIdx.x * DELTA_WARPS + (threadIdx.x >> 5)) * 4 + ((threadIdx.x & 31) >> 3), valid = min(row, Dv - 1);
  const size_t place = (((size_t)b * v_heads + h) * Dv + valid) * DK;
  float s[1][DK / 8];
  load_columns<DK>(state + place, s[0]);
  float k_next[DK / 8], q_next[DK / 8], g_next[EACH ? DK / 8 : 1], v_next = 0.0f, beta_next = 0.0f;
  const auto load = [&](int t) {
    const size_t token = (size_t)b * tokens + t;
    load_columns<DK>(k + (token * k_heads + kh) * DK, k_next);
    load_columns<DK>(q + (token * k_heads + kh) * DK, q_next);
    if constexpr (EACH) {
      load_columns<DK>(g + (token * v_heads + h) * DK, g_next);
    } else {
      g_next[0] = real(g[token * v_heads + h]);
    }
    v_next = real(v[(token * v_heads + h) * Dv + valid]);
    beta_next = real(beta[token * v_heads + h]);
  };
  load(0);
  for (int t = 0; t < tokens; ++t) {
    float k_now[DK / 8], q_now[DK / 8], g_now[EACH ? DK / 8 : 1], v_now[1] = {v_next}, y_now[1] = {0.0f};
    const float beta_now = beta_next;
#pragma unroll
    for (int i = 0; i < DK / 8; ++i) k_now[i] = k_next[i], q_now[i] = q_next[i];
#pragma unroll
    for (int i = 0; i < (EACH ? DK / 8 : 1); ++i) g_now[i] = g_next[i];
    load(min(t + 1, tokens - 1));
    const size_t token = (size_t)b * tokens + t;
    if (!mask || mask[token]) delta<DK, 1, EACH>(s, k_now, q_now, g_now, v_now, beta_now, y_now);
    if ((threadIdx.x & 7) == 0 && row < Dv) y[(token * v_heads + h) * Dv + row] = rounded<T>(y_now[0]);
  }
  if (row < Dv) {
#pragma unroll
    for (int j = 0; j < DK / 32; ++j) store4(after + place + j * 32 + (threadIdx.x & 7) * 4, &s[0][4 * j]);
  }
}

// What a convolution reads: the last taps - 1 inputs, then the window's.
template <typename T>
struct Window {
  const T* before;   // [B, taps - 1, channels]
  const T* mixed;    // [B, tokens, channels], a token every `stride`
  const T* weight;   // [channels, taps]
  const bool* mask;  // [B, tokens] or null
  long long stride;
  int tokens, channels, taps;

  __device__ __forceinline__ float at(int b, int position, int c) const {
    const int u = position - (taps - 1);
    if (u < 0) return real(before[((size_t)b * (taps - 1) + position) * channels + c]);
    const size_t token = (size_t)b * tokens + u;
    return mask && !mask[token] ? 0.0f : real(mixed[token * stride + c]);
  }

  // The inputs that the next window starts from, for D channels: those before its first `end` tokens' end. One warp.
  template <int D>
  __device__ __forceinline__ void keep(int b, int end, int first, T* after) const {
    for (int j = 0; j < taps - 1; ++j)
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const int c = first + i * 32 + (threadIdx.x & 31);
        after[((size_t)b * (taps - 1) + j) * channels + c] = rounded<T>(at(b, end + j, c));
      }
  }

  // silu(convolution) of a head's D channels for token t, rounded; q and k also divided by their root mean square times `factor`. One warp;
  // lane l has channels l, l + 32, ..
  template <int D>
  __device__ __forceinline__ void head(int b, int t, int first, float factor, float (&v)[D / 32]) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const int c = first + i * 32 + (threadIdx.x & 31);
      float acc = 0.0f;
#pragma unroll 4
      for (int j = 0; j < taps; ++j) acc = fmaf(at(b, t + j, c), real(weight[(size_t)c * taps + j]), acc);
      v[i] = real(rounded<T>(silu(acc)));
      sum = fmaf(v[i], v[i], sum);
    }
    if (factor == 0.0f) return;
    const float norm = factor * rsqrtf(sum_of_warp(sum) / (float)D + 1e-6f / (float)D);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) v[i] = real(rounded<T>(v[i] * norm));
  }
};

template <typename T, typename A, typename B>
__device__ __forceinline__ float decay(T a, A log, B bias) {
  const float x = real(a) + real(bias);
  return expf(-expf(real(log)) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
}
template <typename T>
__device__ __forceinline__ float share(T b) {
  return 1.0f / (1.0f + __expf(-real(b)));
}

// silu(z) * (norm of a head's y), one warp.
template <typename T, int D>
__device__ __forceinline__ void gated_norm(const float (&y)[D / 32], const T* z, const T* weight, float eps, T* out) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) sum = fmaf(y[i], y[i], sum);
  const float norm = rsqrtf(sum_of_warp(sum) / (float)D + eps);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int d = i * 32 + (threadIdx.x & 31);
    const float x = real(rounded<T>(y[i] * norm * real(weight[d])));
    out[d] = rounded<T>(silu(real(z[d])) * x);
  }
}

// Gates and the mixer's other inputs, a token every so many values.
template <typename T>
struct Gates {
  const T *z, *a, *b;
  long long z_stride, a_stride, b_stride;
};

constexpr int MIX_WARPS = 16;

// A window's mixer after its input projections: out [B, T, Hv * DV], the inputs to keep, and the state. Grid (Hv, B).
template <typename T, int DK, int DV, typename A, typename B>
__device__ __forceinline__ void mix(const Window<T>& window, const Gates<T>& gates, const A* log, const B* bias, const float* state,
                                    const int* lengths, const T* norm, float eps, int k_heads, int v_heads, T* out, T* kept,
                                    float* after) {
  constexpr int R = (DV + MIX_WARPS * 4 - 1) / (MIX_WARPS * 4);
  __shared__ float q[DK], k[DK], v[DV], y[DV], gate[2];
  const int h = blockIdx.x, b = blockIdx.y, kh = h / (v_heads / k_heads), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int keys = k_heads * DK;
  float s[R][DK / 8];
  int rows[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    rows[r] = (r * MIX_WARPS + warp) * 4 + (lane >> 3);
    load_columns<DK>(state + (((size_t)b * v_heads + h) * DV + min(rows[r], DV - 1)) * DK, s[r]);
  }
  if (warp >= 4 && warp < 7) {
    const int end = lengths ? max(0, min(lengths[b], window.tokens)) : window.tokens;
    const bool first = h % (v_heads / k_heads) == 0;
    if (warp == 4) window.template keep<DV>(b, end, 2 * keys + h * DV, kept);
    if (warp == 5 && first) window.template keep<DK>(b, end, kh * DK, kept);
    if (warp == 6 && first) window.template keep<DK>(b, end, keys + kh * DK, kept);
  }
  for (int t = 0; t < window.tokens; ++t) {
    const size_t token = (size_t)b * window.tokens + t;
    if (warp < 2) {
      float x[DK / 32];
      window.template head<DK>(b, t, warp * keys + kh * DK, warp ? rsqrtf((float)DK) : 1.0f / (float)DK, x);
#pragma unroll
      for (int i = 0; i < DK / 32; ++i) (warp ? k : q)[i * 32 + lane] = x[i];
    } else if (warp == 2) {
      float x[DV / 32];
      window.template head<DV>(b, t, 2 * keys + h * DV, 0.0f, x);
#pragma unroll
      for (int i = 0; i < DV / 32; ++i) v[i * 32 + lane] = x[i];
    } else if (warp == 3 && lane == 0) {
      gate[0] = decay(gates.a[token * gates.a_stride + h], log[h], bias[h]);
      gate[1] = share(gates.b[token * gates.b_stride + h]);
    }
    __syncthreads();
    if (!window.mask || window.mask[token]) {
      float k_now[DK / 8], q_now[DK / 8], g[1] = {gate[0]}, v_now[R], y_now[R];
      load_columns<DK>(k, k_now);
      load_columns<DK>(q, q_now);
#pragma unroll
      for (int r = 0; r < R; ++r) v_now[r] = v[min(rows[r], DV - 1)];
      delta<DK, R, false>(s, k_now, q_now, g, v_now, gate[1], y_now);
#pragma unroll
      for (int r = 0; r < R; ++r)
        if ((lane & 7) == 0 && rows[r] < DV) y[rows[r]] = real(rounded<T>(y_now[r]));
    } else if (threadIdx.x < DV) {
      y[threadIdx.x] = 0.0f;
    }
    __syncthreads();
    if (warp == MIX_WARPS - 1) {  // no warp writes y before the next token's first barrier
      float x[DV / 32];
#pragma unroll
      for (int i = 0; i < DV / 32; ++i) x[i] = y[i * 32 + lane];
      gated_norm<T, DV>(x, gates.z + token * gates.z_stride + h * DV, norm, eps, out + (token * v_heads + h) * DV);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r)
    if (rows[r] < DV) {
#pragma unroll
      for (int j = 0; j < DK / 32; ++j)
        store4(after + (((size_t)b * v_heads + h) * DV + rows[r]) * DK + j * 32 + (lane & 7) * 4, &s[r][4 * j]);
    }
}

// For long windows: q, k [B, T, Hk, DK], v [B, T, Hv, DV], g and beta [B, T, Hv], and the inputs to keep. One warp per head and token; grid
// (heads / 4, T, B).
template <typename T, int DK, int DV, typename A, typename B>
__device__ __forceinline__ void prepare(const Window<T>& window, const Gates<T>& gates, const A* log, const B* bias, const int* lengths,
                                        int k_heads, int v_heads, T* q, T* k, T* v, float* g, float* beta, T* kept) {
  const int lane = threadIdx.x & 31, head = blockIdx.x * 4 + (threadIdx.x >> 5), t = blockIdx.y, b = blockIdx.z;
  const size_t token = (size_t)b * window.tokens + t;
  const int end = lengths ? max(0, min(lengths[b], window.tokens)) : window.tokens, keys = k_heads * DK;
  if (head < 2 * k_heads) {
    const int h = head % k_heads;
    float x[DK / 32];
    window.template head<DK>(b, t, head * DK, head < k_heads ? 1.0f / (float)DK : rsqrtf((float)DK), x);
#pragma unroll
    for (int i = 0; i < DK / 32; ++i) (head < k_heads ? q : k)[(token * k_heads + h) * DK + i * 32 + lane] = rounded<T>(x[i]);
    if (t == 0) window.template keep<DK>(b, end, head * DK, kept);
  } else if (head < 2 * k_heads + v_heads) {
    const int h = head - 2 * k_heads;
    float x[DV / 32];
    window.template head<DV>(b, t, 2 * keys + h * DV, 0.0f, x);
#pragma unroll
    for (int i = 0; i < DV / 32; ++i) v[(token * v_heads + h) * DV + i * 32 + lane] = rounded<T>(x[i]);
    if (t == 0) window.template keep<DV>(b, end, 2 * keys + h * DV, kept);
    if (lane == 0) {
      g[token * v_heads + h] = decay(gates.a[token * gates.a_stride + h], log[h], bias[h]);
      beta[token * v_heads + h] = share(gates.b[token * gates.b_stride + h]);
    }
  }
}

// silu(z) * norm(y) of heads, one warp each; y [tokens, Hv, DV].
template <typename T, int DV>
__device__ __forceinline__ void norm_heads(const T* y, const T* z, long long z_stride, const T* weight, float eps, int v_heads, int rows,
                                           T* out) {
  const int row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;
  float x[DV / 32];
#pragma unroll
  for (int i = 0; i < DV / 32; ++i) x[i] = real(y[(size_t)row * DV + i * 32 + lane]);
  gated_norm<T, DV>(x, z + row / v_heads * z_stride + row % v_heads * DV, weight, eps, out + (size_t)row * DV);
}

// A depthwise convolution without padding: out [B, T - taps + 1, C] for x [B, T, C], weight [C, taps]. One thread per value.
template <typename T, typename W, typename Y>
__device__ __forceinline__ void convolve(const T* x, const W* weight, int B, int tokens, int channels, int taps, Y* out) {
  const int length = tokens - taps + 1;
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)B * length * channels) return;
  const int c = i % channels;
  const size_t row = i / channels, from = row / length * tokens + row % length;
  float acc = 0.0f;
#pragma unroll 4
  for (int j = 0; j < taps; ++j) acc = fmaf(real(x[(from + j) * channels + c]), real(weight[(size_t)c * taps + j]), acc);
  out[i] = rounded<Y>(acc);
}

}  // namespace gnomon
