// Keys and values in fewer bits: a vector of DIM elements is a row of 32-bit words, its codes as a little-endian stream of bits and a number
// or two of type N per group behind them.
//   AFFINE   code * scale + bias
//   SHIFTED  (code + zero) * scale; codes of 8 bits are signed
//   ROTATED  levels[code] * scale, of the vector times signs under a Walsh-Hadamard transform, divided by sqrt(DIM)
// `table` of ROTATED is float32: the levels, the bounds between them, DIM signs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gnomon {

enum { AFFINE, SHIFTED, ROTATED };

template <typename T>
__device__ __forceinline__ float wide(T v);
template <>
__device__ __forceinline__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
template <>
__device__ __forceinline__ float wide(__half v) { return __half2float(v); }
template <typename T>
__device__ __forceinline__ T narrow(float v);
template <>
__device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
template <>
__device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }

template <int C, int B, int G, int D, typename N>
struct Codes {
  static constexpr int CODING = C, BITS = B, GROUP = G, DIM = D;
  static constexpr int GROUPS = D / G, NUMBERS = C == ROTATED ? 1 : 2;
  static constexpr int CODE_BYTES = D * B / 8, ROW = CODE_BYTES + 2 * GROUPS * NUMBERS, WORDS = ROW / 4;
  static constexpr int LEVELS = 1 << B;
  static constexpr unsigned MASK = (1u << B) - 1u;
  static_assert(ROW % 4 == 0, "a row is whole words");

  // Number `which` of a group.
  static __device__ __forceinline__ float number(const char* row, int which, int group) {
    return wide<N>(reinterpret_cast<const N*>(row + CODE_BYTES)[which * GROUPS + group]);
  }
  // Codes 4 * i .. 4 * i + 3 in the low bits. May read one word beyond the codes.
  static __device__ __forceinline__ unsigned four(const char* row, int i) {
    const unsigned* words = reinterpret_cast<const unsigned*>(row);
    const int at = 4 * i * B;
    if constexpr (32 % (4 * B) == 0) return words[at >> 5] >> (at & 31);
    return __funnelshift_r(words[at >> 5], words[(at >> 5) + 1], at & 31);
  }
};

__device__ __forceinline__ float across(float v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }

// The transform of 32 * E elements, E neighbours in each lane of a warp: sums and differences of neighbours first, as all versions do it.
template <int E>
__device__ __forceinline__ void walsh_hadamard(float (&v)[E]) {
#pragma unroll
  for (int half = 1; half < E; half *= 2)
#pragma unroll
    for (int i = 0; i < E; ++i)
      if (!(i & half)) {
        const float a = v[i], b = v[i + half];
        v[i] = a + b, v[i + half] = a - b;
      }
#pragma unroll
  for (int o = 1; o < 32; o *= 2)
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const float other = across(v[i], o);
      v[i] = threadIdx.x & o ? other - v[i] : v[i] + other;
    }
}

// What a sum of rotated vectors stands for, in place: x [D] in shared memory, one warp.
template <int D>
__device__ __forceinline__ void turn_back(float* x, const float* signs) {
  constexpr int E = D / 32;
  const int first = (threadIdx.x & 31) * E;
  const float root = sqrtf((float)D);
  float v[E];
#pragma unroll
  for (int i = 0; i < E; ++i) v[i] = x[first + i];
  walsh_hadamard<E>(v);
#pragma unroll
  for (int i = 0; i < E; ++i) x[first + i] = __fdiv_rn(v[i], root) * signs[first + i];
}

// A vector x [DIM] to its row of words, by one warp; all three in shared memory, `places` has DIM bytes.
template <typename C, typename N>
__device__ __forceinline__ void encode_row(const float* x, const float* table, unsigned char* places, unsigned* row) {
  constexpr int E = C::DIM / 32, LANES = C::GROUP / E;
  const int lane = threadIdx.x & 31, first = lane * E, group = lane / LANES;
  N* numbers = reinterpret_cast<N*>(reinterpret_cast<char*>(row) + C::CODE_BYTES);
  float v[E];
#pragma unroll
  for (int i = 0; i < E; ++i) v[i] = x[first + i];
  if constexpr (C::CODING == ROTATED) {
    const float *bounds = table + C::LEVELS, *signs = bounds + C::LEVELS - 1;
    const float root = sqrtf((float)C::DIM);
#pragma unroll
    for (int i = 0; i < E; ++i) v[i] *= signs[first + i];
    walsh_hadamard<E>(v);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < E; ++i) {
      v[i] = __fdiv_rn(v[i], root);
      sum = __fadd_rn(sum, __fmul_rn(v[i], v[i]));
    }
#pragma unroll
    for (int o = 1; o < LANES; o *= 2) sum += across(sum, o);
    const float scale = __fsqrt_rn(__fdiv_rn(sum, (float)C::GROUP)), by = scale + 1e-8f;
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const float y = __fdiv_rn(v[i], by);
      int place = 0;
#pragma unroll
      for (int step = C::LEVELS / 2; step; step /= 2) place += bounds[place + step - 1] < y ? step : 0;
      places[first + i] = (unsigned char)place;
    }
    if (lane % LANES == 0) numbers[group] = narrow<N>(scale);
  } else {
    // As MLX has it: the largest element counts as 0 at least under AFFINE.
    float low = v[0], high = C::CODING == AFFINE ? fmaxf(v[0], 0.0f) : v[0];
#pragma unroll
    for (int i = 1; i < E; ++i) low = fminf(low, v[i]), high = fmaxf(high, v[i]);
#pragma unroll
    for (int o = 1; o < LANES; o *= 2) low = fminf(low, across(low, o)), high = fmaxf(high, across(high, o));
    float scale, second;
    if constexpr (C::CODING == AFFINE) {
      scale = fmaxf(__fdiv_rn(high - low, (float)C::MASK), 1e-7f);
      const bool below = fabsf(low) > fabsf(high);
      scale = below ? scale : -scale;
      const float edge = below ? low : high, steps = roundf(__fdiv_rn(edge, scale));
      second = steps == 0.0f ? 0.0f : edge;
      scale = steps == 0.0f ? scale : __fdiv_rn(edge, steps);
    } else if constexpr (C::BITS == 8) {
      scale = __fdiv_rn(high - low, 254.0f);
      second = rintf(__fdiv_rn(high + low, 2.0f * scale));
    } else {
      scale = __fdiv_rn(high - low, (float)C::MASK);
      second = rintf(__fdiv_rn(low, scale));
    }
#pragma unroll
    for (int i = 0; i < E; ++i) {
      float place;
      if constexpr (C::CODING == AFFINE) {
        place = fmaxf(fminf(roundf(__fdiv_rn(v[i] - second, scale)), (float)C::MASK), 0.0f);
      } else {
        place = rintf(__fdiv_rn(v[i], scale) - second);
        place = isnan(place) ? 0.0f : place;
        place = C::BITS == 8 ? fminf(fmaxf(place, -127.0f), 127.0f) : fminf(fmaxf(place, 0.0f), (float)C::MASK);
      }
      places[first + i] = (unsigned char)(int)place;
    }
    if (lane % LANES == 0) numbers[group] = narrow<N>(scale), numbers[C::GROUPS + group] = narrow<N>(second);
  }
  __syncwarp();
  for (int w = lane; w < C::CODE_BYTES / 4; w += 32) {
    unsigned word = 0;
    for (int e = 32 * w / C::BITS; e * C::BITS < 32 * (w + 1); ++e) {
      const int at = e * C::BITS - 32 * w;
      word |= at < 0 ? (unsigned)places[e] >> -at : (unsigned)places[e] << at;
    }
    row[w] = word;
  }
  __syncwarp();
}

constexpr int CODING_WARPS = 4;

struct Place {
  long long batch, head, slot, element;  // strides
};

// x [B, H, n, DIM] to words [B, H, n, WORDS], a warp a vector.
template <typename C, typename N, typename T>
__device__ __forceinline__ void encode(const T* x, Place at, int heads, int length, long long rows, const float* table,
                                       unsigned* words) {
  __shared__ float vector[CODING_WARPS][C::DIM];
  __shared__ unsigned row[CODING_WARPS][C::WORDS];
  __shared__ unsigned char places[CODING_WARPS][C::DIM];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long r = (long long)blockIdx.x * CODING_WARPS + warp;
  if (r >= rows) return;
  const long long slot = r % length, head = r / length % heads, b = r / length / heads;
  for (int d = lane; d < C::DIM; d += 32) vector[warp][d] = wide<T>(x[b * at.batch + head * at.head + slot * at.slot + d * at.element]);
  __syncwarp();
  encode_row<C, N>(vector[warp], table, places[warp], row[warp]);
  for (int w = lane; w < C::WORDS; w += 32) words[r * C::WORDS + w] = row[warp][w];
}

// Words [B, H, n, WORDS] to [B, H, n, DIM] of T, rounded once; ROTATED stays rotated. A thread takes 8 elements.
template <typename C, typename T>
__device__ __forceinline__ void decode(const unsigned* words, Place at, int heads, int length, long long rows, const float* table,
                                       T* out) {
  constexpr int EIGHTS = C::DIM / 8;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, r = i / EIGHTS;
  if (r >= rows) return;
  const int eight = i % EIGHTS, group = eight * 8 / C::GROUP;
  const long long slot = r % length, head = r / length % heads, b = r / length / heads;
  const char* row = reinterpret_cast<const char*>(words + b * at.batch + head * at.head + slot * at.slot);
  const float first = C::number(row, 0, group), second = C::NUMBERS == 2 ? C::number(row, C::NUMBERS - 1, group) : 0.0f;
  __align__(16) T values[8];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const unsigned four = C::four(row, eight * 2 + part);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned code = (four >> (C::BITS * j)) & C::MASK;
      float v;
      if constexpr (C::CODING == AFFINE) {
        v = fmaf((float)code, first, second);
      } else if constexpr (C::CODING == SHIFTED) {
        v = ((C::BITS == 8 ? (float)(signed char)code : (float)code) + second) * first;
      } else {
        v = __ldg(table + code) * first;
      }
      values[part * 4 + j] = narrow<T>(v);
    }
  }
  *reinterpret_cast<uint4*>(out + r * C::DIM + eight * 8) = *reinterpret_cast<const uint4*>(values);
}

// Rows [rows, D] of sums of rotated vectors, turned back, a warp a row.
template <int D, typename T>
__device__ __forceinline__ void unrotate(const T* x, long long rows, const float* signs, T* out) {
  __shared__ float vector[CODING_WARPS][D];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long r = (long long)blockIdx.x * CODING_WARPS + warp;
  if (r >= rows) return;
  for (int d = lane; d < D; d += 32) vector[warp][d] = wide<T>(x[r * D + d]);
  __syncwarp();
  turn_back<D>(vector[warp], signs);
  __syncwarp();
  for (int d = lane; d < D; d += 32) out[r * D + d] = narrow<T>(vector[warp][d]);
}

}  // namespace gnomon
