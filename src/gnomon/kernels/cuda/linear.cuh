// Products of 1 to 32 rows with weights [N, K], for the tensor cores: mma.m16n8k16 with 16 rows of weights as its A and up to 8 rows of x as
// its B. Codes stay whole numbers (exact in bf16 and f16); scales and biases are applied in float32 per group. One block of 8 warps computes
// TILES tiles of 16 rows of weights: each warp has its share of K, and the shares are added in one order. Which order depends on K alone,
// so an output depends on its row of x and its row of weights alone.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gnomon {

constexpr int WARPS = 8;

template <typename T>
struct Type;

template <>
struct Type<__nv_bfloat16> {
  static constexpr unsigned ONES = 0x3f803f80u;
  static __device__ __forceinline__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  // Two nibbles plus 128: that is 0x4300, and there the last place is 1.
  static constexpr float NIBBLE_ZERO = 128.0f;
  static __device__ __forceinline__ unsigned nibbles(unsigned q) { return (q & 0x000f000fu) | 0x43004300u; }
  // Bytes I and I + 1 less 128, by way of 2^23 + byte; such floats end in 16 zero bits.
  template <int I>
  static __device__ __forceinline__ unsigned bytes(unsigned q) {
    float f0 = __uint_as_float(__byte_perm(q, 0x4B000000u, 0x7440 + I)) - 8388736.0f;
    float f1 = __uint_as_float(__byte_perm(q, 0x4B000000u, 0x7441 + I)) - 8388736.0f;
    return __byte_perm(__float_as_uint(f0), __float_as_uint(f1), 0x7632);
  }
};

template <>
struct Type<__half> {
  static constexpr unsigned ONES = 0x3c003c00u;
  static __device__ __forceinline__ float wide(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ unsigned minus(unsigned a, unsigned b) {
    __half2 d = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<unsigned*>(&d);
  }
  // 0x6400 is 1024, and there the last place is 1; less 1024 again, which would cost too much of a float32 sum.
  static constexpr float NIBBLE_ZERO = 0.0f;
  static __device__ __forceinline__ unsigned nibbles(unsigned q) {
    return minus((q & 0x000f000fu) | 0x64006400u, 0x64006400u);
  }
  template <int I>
  static __device__ __forceinline__ unsigned bytes(unsigned q) {
    return minus(__byte_perm(q, 0x64646464u, I ? 0x4342 : 0x4140), 0x64806480u);
  }
};

// Weights are read once: they pass by the first-level cache, which is for x.
template <int WORDS>
__device__ __forceinline__ void load_weights(const void* p, unsigned* q) {
  if constexpr (WORDS == 1) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(q[0]) : "l"(p));
  } else if constexpr (WORDS == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(q[0]), "=r"(q[1]) : "l"(p));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q[0]), "=r"(q[1]), "=r"(q[2]), "=r"(q[3])
                 : "l"(p));
  }
}

struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};

template <typename T>
union Pair {
  unsigned word;
  T part[2];
  __device__ Pair() {}
};

template <typename T>
struct Weights {
  const void* w;  // [rows, K] of T, or codes
  const T* s;     // [rows, K / GROUP]
  const T* b;
  const T* bias;  // [rows] or null
  int rows;
};

// How a chunk of K is spread over the four threads that share a row. BITS 16 are dense weights.
template <int BITS, int GROUP>
struct Layout {
  static constexpr int SUB = GROUP == 32 ? 32 : 64;       // values of K per chunk: never of two groups
  static constexpr int PER = SUB / 4;                     // values per thread
  static constexpr int WORDS = PER * BITS / 32;           // 32-bit words of weights per thread
  static constexpr int MMAS = PER / 4;
};

// acc[tile][nt] += the tile's 16 rows of weights times 8 rows of x, over this warp's share of K.
template <typename T, int BITS, int GROUP, int NT, int TILES, int U>
__device__ __forceinline__ void multiply(const Weights<T> (&part)[TILES], const int (&first)[TILES], const T* x, int M, int K,
                                         float (&acc)[TILES][NT][4]) {
  using L = Layout<BITS, GROUP>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int chunks = K / L::SUB, share = (chunks + 2 * WARPS - 1) / (2 * WARPS) * 2;
  const int begin = warp * share, end = min(chunks, begin + share);
  const size_t row_bytes = (size_t)K * BITS / 8;
  const int groups = K / GROUP;
  const char* w[TILES][2];
  const T* s[TILES][2];
  const T* b[TILES][2];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const size_t row = min(first[i] + g + 8 * h, part[i].rows - 1);
      w[i][h] = (const char*)part[i].w + row * row_bytes + t * (BITS == 16 ? 16 : L::WORDS * 4);
      if constexpr (BITS != 16) {
        s[i][h] = part[i].s + row * groups;
        b[i][h] = part[i].b + row * groups;
      }
    }
  // What must be added per code: 8-bit ones come less 128, 4-bit ones may come with something added.
  const float ZERO = BITS == 8 ? 128.0f : -Type<T>::NIBBLE_ZERO;
  const bool paired = GROUP == 64 && groups % 2 == 0;
  for (int c0 = begin; c0 < end; c0 += U) {
    unsigned q[U][TILES][2][L::WORDS];
    T sc[U][TILES][2], bi[U][TILES][2];
    const auto load = [&](auto whole) {
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const char* p = w[i][h] + (size_t)c0 * (L::SUB * BITS / 8);
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const int at = decltype(whole)::value ? u : min(u, end - 1 - c0);
            if constexpr (BITS == 16) {
              load_weights<4>(p + at * (L::SUB * BITS / 8), &q[u][i][h][0]);
              load_weights<4>(p + at * (L::SUB * BITS / 8) + 64, &q[u][i][h][4]);
            } else {
              load_weights<L::WORDS>(p + at * (L::SUB * BITS / 8), &q[u][i][h][0]);
            }
          }
          if constexpr (BITS != 16) {
            if (decltype(whole)::value && paired) {
#pragma unroll
              for (int u = 0; u < U; u += 2) {
                Pair<T> two;
                two.word = __ldg(reinterpret_cast<const unsigned*>(s[i][h] + c0 + u));
                sc[u][i][h] = two.part[0], sc[u + 1][i][h] = two.part[1];
                two.word = __ldg(reinterpret_cast<const unsigned*>(b[i][h] + c0 + u));
                bi[u][i][h] = two.part[0], bi[u + 1][i][h] = two.part[1];
              }
            } else {
#pragma unroll
              for (int u = 0; u < U; ++u) {
                const int group = min(c0 + u, end - 1) * L::SUB / GROUP;
                sc[u][i][h] = __ldg(s[i][h] + group);
                bi[u][i][h] = __ldg(b[i][h] + group);
              }
            }
          }
        }
    };
    if (c0 + U <= end) {
      load(True());
    } else {
      load(False());
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (c0 + u >= end) break;
      unsigned xw[NT][L::PER / 2];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const int m = nt * 8 + g;
        const T* p = x + (size_t)m * K + (size_t)(c0 + u) * L::SUB + t * (BITS == 16 ? 8 : L::PER);
#pragma unroll
        for (int j = 0; j < L::PER / 8; ++j) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (m < M) v = *reinterpret_cast<const uint4*>(p + j * (BITS == 16 ? 32 : 8));
          xw[nt][4 * j] = v.x, xw[nt][4 * j + 1] = v.y, xw[nt][4 * j + 2] = v.z, xw[nt][4 * j + 3] = v.w;
        }
        if constexpr (BITS == 4) {  // as the nibbles of a word come out: 0 with 4, 1 with 5, 2 with 6, 3 with 7
#pragma unroll
          for (int j = 0; j < L::PER / 8; ++j) {
            const unsigned x0 = xw[nt][4 * j], x1 = xw[nt][4 * j + 1], x2 = xw[nt][4 * j + 2], x3 = xw[nt][4 * j + 3];
            xw[nt][4 * j] = __byte_perm(x0, x2, 0x5410), xw[nt][4 * j + 1] = __byte_perm(x0, x2, 0x7632);
            xw[nt][4 * j + 2] = __byte_perm(x1, x3, 0x5410), xw[nt][4 * j + 3] = __byte_perm(x1, x3, 0x7632);
          }
        }
      }
      float sums[NT][4];
      if constexpr (BITS != 16) {
        const unsigned ones[4] = {Type<T>::ONES, Type<T>::ONES, Type<T>::ONES, Type<T>::ONES};
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          sums[nt][0] = sums[nt][1] = sums[nt][2] = sums[nt][3] = 0.0f;
#pragma unroll
          for (int j = 0; j < L::MMAS; ++j) Type<T>::mma(sums[nt], ones, xw[nt][2 * j], xw[nt][2 * j + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float d[NT][4];
        if constexpr (BITS != 16) {
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) d[nt][0] = d[nt][1] = d[nt][2] = d[nt][3] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < L::MMAS; ++j) {
          unsigned a[4];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if constexpr (BITS == 16) {
              a[h] = q[u][i][h][2 * j], a[2 + h] = q[u][i][h][2 * j + 1];
            } else if constexpr (BITS == 8) {
              a[h] = Type<T>::template bytes<0>(q[u][i][h][j]), a[2 + h] = Type<T>::template bytes<2>(q[u][i][h][j]);
            } else {
              const unsigned v = q[u][i][h][j / 2] >> (8 * (j % 2));
              a[h] = Type<T>::nibbles(v), a[2 + h] = Type<T>::nibbles(v >> 4);
            }
          }
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            if constexpr (BITS == 16) {
              Type<T>::mma(acc[i][nt], a, xw[nt][2 * j], xw[nt][2 * j + 1]);
            } else {
              Type<T>::mma(d[nt], a, xw[nt][2 * j], xw[nt][2 * j + 1]);
            }
          }
        }
        if constexpr (BITS != 16) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float scale = Type<T>::wide(sc[u][i][h]);
            const float offset = fmaf(scale, ZERO, Type<T>::wide(bi[u][i][h]));
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
              for (int j = 0; j < 2; ++j)
                acc[i][nt][2 * h + j] =
                    fmaf(offset, sums[nt][j], fmaf(scale, d[nt][2 * h + j], acc[i][nt][2 * h + j]));
          }
        }
      }
    }
  }
}

template <int NT, int TILES>
struct Shared {
  float share[WARPS][TILES * NT * 128];
  float factor[NT * 8];
};

// 1 / rms of the rows of x, from sums of squares over stretches of 16 values [M, stretches].
template <int NT>
__device__ __forceinline__ void find_factors(const float* squares, int stretches, int M, int K, float eps, float* factor) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int m = warp; m < NT * 8; m += WARPS) {
    if (m >= M) break;
    float sum = 0.0f;
    for (int i = lane; i < stretches; i += 32) sum += squares[(size_t)m * stretches + i];
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) factor[m] = rsqrtf(sum / (float)K + eps);
  }
}

template <typename T, int BITS, int GROUP, int NT, int TILES, int U>
__device__ __forceinline__ void multiply_and_share(const Weights<T> (&part)[TILES], const int (&first)[TILES], const T* x, int M,
                                                   int K, const float* squares, int stretches, float eps,
                                                   Shared<NT, TILES>& shared) {
  float acc[TILES][NT][4];
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) acc[i][nt][0] = acc[i][nt][1] = acc[i][nt][2] = acc[i][nt][3] = 0.0f;
  multiply<T, BITS, GROUP, NT, TILES, U>(part, first, x, M, K, acc);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      *reinterpret_cast<float4*>(&shared.share[warp][(i * NT + nt) * 128 + lane * 4]) =
          make_float4(acc[i][nt][0], acc[i][nt][1], acc[i][nt][2], acc[i][nt][3]);
  if (squares) find_factors<NT>(squares, stretches, M, K, eps, shared.factor);
  __syncthreads();
}

// The product for weight row n (of 16) and row m of x: the warps' shares in order.
template <int NT, int TILES>
__device__ __forceinline__ float total(const Shared<NT, TILES>& shared, int tile, int n, int m, bool normed) {
  const int at = (tile * NT + (m >> 3)) * 128 + ((n & 7) * 4 + ((m & 7) >> 1)) * 4 + (n >> 3) * 2 + (m & 1);
  float sum = shared.share[0][at];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) sum += shared.share[w][at];
  return normed ? sum * shared.factor[m] : sum;
}

// out [M, all rows of all parts] = x @ part.T (+ bias), one part after the other.
template <typename T, int BITS, int GROUP, int NT, int TILES, int U, int PARTS>
__device__ __forceinline__ void plain(const Weights<T> (&parts)[PARTS], const T* x, int M, int K, const float* squares,
                                      int stretches, float eps, T* out) {
  __shared__ Shared<NT, TILES> shared;
  int block = blockIdx.x, before = 0, width = 0;
  Weights<T> one = parts[0];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) width += parts[p].rows;
#pragma unroll
  for (int p = 1; p < PARTS; ++p) {
    const int blocks = (one.rows + 16 * TILES - 1) / (16 * TILES);
    if (block >= blocks) {
      block -= blocks;
      before += one.rows;
      one = parts[p];
    } else {
      break;
    }
  }
  Weights<T> part[TILES];
  int first[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) part[i] = one, first[i] = (block * TILES + i) * 16;
  multiply_and_share<T, BITS, GROUP, NT, TILES, U>(part, first, x, M, K, squares, stretches, eps, shared);
  for (int e = threadIdx.x; e < TILES * NT * 128; e += WARPS * 32) {
    const int n = e % (16 * TILES), m = e / (16 * TILES), tile = n / 16, row = block * (16 * TILES) + n;
    if (m < M && row < one.rows) {
      float v = total(shared, tile, n % 16, m, squares != nullptr);
      if (one.bias) v += Type<T>::wide(one.bias[row]);
      out[(size_t)m * width + before + row] = Type<T>::narrow(v);
    }
  }
}

// out [M, N] = silu(x @ gate.T) * (x @ up.T)
template <typename T, int BITS, int GROUP, int NT, int U>
__device__ __forceinline__ void gated(const Weights<T>& gate, const Weights<T>& up, const T* x, int M, int K, const float* squares,
                                      int stretches, float eps, T* out) {
  __shared__ Shared<NT, 2> shared;
  const Weights<T> part[2] = {gate, up};
  const int first[2] = {(int)blockIdx.x * 16, (int)blockIdx.x * 16};
  multiply_and_share<T, BITS, GROUP, NT, 2, U>(part, first, x, M, K, squares, stretches, eps, shared);
  for (int e = threadIdx.x; e < NT * 128; e += WARPS * 32) {
    const int n = e % 16, m = e / 16, row = first[0] + n;
    if (m < M && row < gate.rows) {
      float a = total(shared, 0, n, m, squares != nullptr), b = total(shared, 1, n, m, squares != nullptr);
      if (gate.bias) a += Type<T>::wide(gate.bias[row]), b += Type<T>::wide(up.bias[row]);
      out[(size_t)m * gate.rows + row] = Type<T>::narrow(a / (1.0f + __expf(-a)) * b);
    }
  }
}

// h = residual + x @ part.T; hw = h * weight of the norm that comes next; its sums of squares over 16 values each [M, N / 16].
template <typename T, int BITS, int GROUP, int NT, int U>
__device__ __forceinline__ void add(const Weights<T>& one, const T* x, int M, int K, const T* residual, const T* weight, T* h, T* hw,
                                    float* squares) {
  __shared__ Shared<NT, 1> shared;
  const Weights<T> part[1] = {one};
  const int first[1] = {(int)blockIdx.x * 16};
  multiply_and_share<T, BITS, GROUP, NT, 1, U>(part, first, x, M, K, nullptr, 0, 0.0f, shared);
  for (int e = threadIdx.x; e < NT * 128; e += WARPS * 32) {
    const int n = e % 16, m = e / 16, row = first[0] + n;
    float square = 0.0f;
    if (m < M) {
      const size_t at = (size_t)m * one.rows + row;
      float v = total(shared, 0, n, m, false);
      if (one.bias) v += Type<T>::wide(one.bias[row]);
      const T rounded = Type<T>::narrow(v + Type<T>::wide(residual[at]));
      const float y = Type<T>::wide(rounded);
      h[at] = rounded;
      hw[at] = Type<T>::narrow(y * Type<T>::wide(weight[row]));
      square = y * y;
    }
#pragma unroll
    for (int o = 8; o; o >>= 1) square += __shfl_xor_sync(0xffffffffu, square, o);
    if (m < M && n == 0) squares[(size_t)m * gridDim.x + blockIdx.x] = square;
  }
}

// Weights [N, K] of T from codes, rounded once: for products of many rows. One thread per 32 bits of codes.
template <typename T, int BITS, int GROUP>
__device__ __forceinline__ void unpack(const Weights<T>& part, long long words, T* out) {
  constexpr int CODES = 32 / BITS;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  const unsigned word = reinterpret_cast<const unsigned*>(part.w)[i];
  const long long group = i * CODES / GROUP;
  const float scale = Type<T>::wide(part.s[group]), bias = Type<T>::wide(part.b[group]);
  __align__(16) T values[CODES];
#pragma unroll
  for (int j = 0; j < CODES; ++j)
    values[j] = Type<T>::narrow(fmaf((float)((word >> (BITS * j)) & ((1u << BITS) - 1u)), scale, bias));
  if constexpr (BITS == 4) {
    reinterpret_cast<uint4*>(out)[i] = *reinterpret_cast<const uint4*>(values);
  } else {
    reinterpret_cast<uint2*>(out)[i] = *reinterpret_cast<const uint2*>(values);
  }
}

// Rows of an embedding table, as `add` leaves them. One block per token, one thread per 16 values.
template <typename T, int BITS, int GROUP>
__device__ __forceinline__ void embed(const int* tokens, const Weights<T>& table, int K, const T* weight, T* h, T* hw,
                                      float* squares) {
  const int m = blockIdx.x, i = threadIdx.x;
  if (i >= K / 16) return;
  const size_t row = tokens[m];
  float sum = 0.0f;
  for (int j = 0; j < 16; ++j) {
    const int k = i * 16 + j;
    T v;
    if constexpr (BITS == 16) {
      v = reinterpret_cast<const T*>(table.w)[row * K + k];
    } else {
      const unsigned word = reinterpret_cast<const unsigned*>(table.w)[(row * K + k) * BITS / 32];
      const float code = (float)((word >> ((k * BITS) % 32)) & ((1u << BITS) - 1u));
      const size_t at = row * (K / GROUP) + k / GROUP;
      v = Type<T>::narrow(fmaf(code, Type<T>::wide(table.s[at]), Type<T>::wide(table.b[at])));
    }
    const float y = Type<T>::wide(v);
    h[(size_t)m * K + k] = v;
    hw[(size_t)m * K + k] = Type<T>::narrow(y * Type<T>::wide(weight[k]));
    sum += y * y;
  }
  squares[(size_t)m * (K / 16) + i] = sum;
}

}  // namespace gnomon
