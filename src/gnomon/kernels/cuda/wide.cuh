// Products of many rows with quantised weights [N, K]: weights are taken apart in registers, rounded once to T as `unpack` rounds them, and
// multiplied there; x passes through shared memory in chunks of 64 of K. A block of 4 warps computes 128 outputs for 64 rows of x, a warp 32
// of them. K is cut into as many splits as N and K say, added in order: an output depends on its row of x and its row of weights alone.
#include "linear.cuh"

namespace gnomon {

constexpr int WIDE_WARPS = 4, WIDE_OUTPUTS = 128, WIDE_ROWS = 64, WIDE_CHUNK = 64;
constexpr int WIDE_LINE = WIDE_CHUNK + 8;  // of x in shared memory: no two rows of a load start in the same bank

// Two whole numbers times scale plus bias, each rounded once; `Q` is what the codes come with too much.
__device__ __forceinline__ unsigned scaled(unsigned codes, __nv_bfloat16 scale, __nv_bfloat16 bias, float too_much) {
  const __nv_bfloat162 q = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&codes), __float2bfloat162_rn(too_much));
  const __nv_bfloat162 w = __hfma2(q, __bfloat162bfloat162(scale), __bfloat162bfloat162(bias));
  return *reinterpret_cast<const unsigned*>(&w);
}
__device__ __forceinline__ unsigned scaled(unsigned codes, __half scale, __half bias, float too_much) {
  const __half2 q = __hsub2(*reinterpret_cast<__half2*>(&codes), __float2half2_rn(too_much));
  const __half2 w = __hfma2(q, __half2half2(scale), __half2half2(bias));
  return *reinterpret_cast<const unsigned*>(&w);
}

// One lane's weights of a chunk: 16 values of K of 4 rows.
template <typename T, int BITS>
struct Codes {
  unsigned q[2][2][BITS / 2];
  T s[2][2][2], b[2][2][2];  // of both halves of the chunk, which groups of 32 tell apart
};

// out: [M, N] of T, or float partial sums [splits, M, N] where there are several. Grid (N / 128, M / 64, splits).
template <typename T, int BITS, int GROUP, typename Y>
__device__ __forceinline__ void wide(const Weights<T>& part, const T* x, int M, int K, Y* out) {
  __shared__ __align__(16) T tile[2][WIDE_ROWS * WIDE_LINE];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int first = blockIdx.x * WIDE_OUTPUTS + warp * 32, m0 = blockIdx.y * WIDE_ROWS, N = part.rows;
  const int chunks = K / WIDE_CHUNK, size = (chunks + gridDim.z - 1) / gridDim.z;
  const int begin = min(chunks, (int)blockIdx.z * size), end = min(chunks, begin + size);
  constexpr int GROUPS = GROUP == 32 ? 2 : 1;
  const float too_much = BITS == 8 ? -128.0f : Type<T>::NIBBLE_ZERO;
  const Nibbles nibbles(Type<T>::MAGIC);
  float acc[2][WIDE_ROWS / 8][4] = {};

  const auto load = [&](int c, Codes<T, BITS>& into) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const size_t row = min(first + i * 16 + 8 * h + g, N - 1);
        load_weights<BITS / 2>((const char*)part.w + (row * K + (size_t)c * WIDE_CHUNK + t * 16) * BITS / 8, into.q[i][h]);
#pragma unroll
        for (int p = 0; p < GROUPS; ++p) {
          const size_t at = row * (K / GROUP) + (c * WIDE_CHUNK + p * 32) / GROUP;
          into.s[i][h][p] = __ldg(part.s + at), into.b[i][h][p] = __ldg(part.b + at);
        }
      }
  };
  // A thread brings 4 pieces of 8 values; for 4 bits in the order in which nibbles of a word come out.
  uint4 pieces[4];
  const auto fetch = [&](int c) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int piece = j * WIDE_WARPS * 32 + threadIdx.x, m = m0 + piece / 8;
      pieces[j] = make_uint4(0, 0, 0, 0);
      if (m < M) pieces[j] = *reinterpret_cast<const uint4*>(x + (size_t)m * K + (size_t)c * WIDE_CHUNK + piece % 8 * 8);
    }
  };
  const auto store = [&](int buffer) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int piece = j * WIDE_WARPS * 32 + threadIdx.x;
      uint4 v = pieces[j];
      if constexpr (BITS == 4)
        v = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                       __byte_perm(v.y, v.w, 0x7632));
      *reinterpret_cast<uint4*>(&tile[buffer][piece / 8 * WIDE_LINE + piece % 8 * 8]) = v;
    }
  };
  const auto multiply = [&](int buffer, const Codes<T, BITS>& codes) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // 8 values of each lane: two instructions deep
      unsigned a[2][2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int p = GROUPS == 2 && t >= 2 ? 1 : 0;
          const T s = GROUPS == 2 && p ? codes.s[i][h][1] : codes.s[i][h][0], b = GROUPS == 2 && p ? codes.b[i][h][1] : codes.b[i][h][0];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            if constexpr (BITS == 4) {
              const unsigned v = codes.q[i][h][j] >> (8 * k);
              a[i][k][h] = scaled(Type<T>::nibbles(v, nibbles), s, b, too_much), a[i][k][2 + h] = scaled(Type<T>::nibbles(v >> 4, nibbles), s, b, too_much);
            } else {
              const unsigned v = codes.q[i][h][2 * j + k];
              a[i][k][h] = scaled(Type<T>::template bytes<0>(v), s, b, too_much);
              a[i][k][2 + h] = scaled(Type<T>::template bytes<2>(v), s, b, too_much);
            }
          }
        }
#pragma unroll
      for (int nt = 0; nt < WIDE_ROWS / 8; ++nt) {
        const uint4 v = *reinterpret_cast<const uint4*>(&tile[buffer][(nt * 8 + g) * WIDE_LINE + t * 16 + j * 8]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Type<T>::mma(acc[i][nt], a[i][0], v.x, v.y);
          Type<T>::mma(acc[i][nt], a[i][1], v.z, v.w);
        }
      }
    }
  };

  if (begin < end) {
    Codes<T, BITS> now, next, later;  // weights come from further away than x
    load(begin, now);
    load(min(begin + 1, end - 1), next);
    fetch(begin);
    store(0);
    __syncthreads();
    for (int c = begin; c < end; ++c) {
      const int buffer = (c - begin) & 1;
      load(min(c + 2, end - 1), later);
      fetch(min(c + 1, end - 1));
      multiply(buffer, now);
      store(buffer ^ 1);  // what it holds was read before the last barrier
      __syncthreads();
      now = next, next = later;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int nt = 0; nt < WIDE_ROWS / 8; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = first + i * 16 + (e >> 1) * 8 + g, m = m0 + nt * 8 + 2 * t + (e & 1);
        if (row >= N || m >= M) continue;
        if constexpr (sizeof(Y) == 4) {
          out[((size_t)blockIdx.z * M + m) * N + row] = acc[i][nt][e];
        } else {
          out[(size_t)m * N + row] = Type<T>::narrow(part.bias ? acc[i][nt][e] + Type<T>::wide(part.bias[row]) : acc[i][nt][e]);
        }
      }
}

// The splits' sums in order, and the bias: out [M, N]. One thread per value.
template <typename T>
__device__ __forceinline__ void join(const float* parts, int splits, const T* bias, int N, long long values, T* out) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= values) return;
  float sum = parts[i];
  for (int s = 1; s < splits; ++s) sum += parts[s * values + i];
  if (bias) sum += Type<T>::wide(bias[i % N]);
  out[i] = Type<T>::narrow(sum);
}

}  // namespace gnomon
