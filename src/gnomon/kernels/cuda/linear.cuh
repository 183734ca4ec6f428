// Products of 1 to 32 rows with weights [N, K], for the tensor cores: mma.m16n8k16 with 16 rows of weights as its A and up to 8 rows of x as
// its B. Codes stay whole numbers (exact in bf16 and f16); scales and biases are applied in float32 per group. x of float32 goes through as
// three numbers of bf16 that add up to it.
//
// A block takes TILES tiles of 16 rows of weights, then the next that are its own. Its warps take stages of K by turns, 128 bytes of every
// row each, through a ring of their own in shared memory that runs on across tiles; x stays in shared memory where it fits. The warps' sums
// are added in one order, which depends on K alone, so an output depends on its row of x and its row of weights alone.
//
// Weights, scales, biases and norms don't change: a block asks for them before it waits for the kernel before it (`wait_for_others`), so that
// they arrive meanwhile where the launch allows it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gnomon {

// Two nibbles of a word under the bits of a number whose last place is 1: one instruction, if the constants are in registers.
struct Nibbles {
  unsigned mask, magic;
  __device__ __forceinline__ Nibbles(unsigned m) {
    asm("mov.b32 %0, 0x000f000f;" : "=r"(mask));
    asm("mov.b32 %0, %1;" : "=r"(magic) : "r"(m));
  }
  __device__ __forceinline__ unsigned of(unsigned q) const {
    unsigned a;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(a) : "r"(q), "r"(mask), "r"(magic));
    return a;
  }
};

template <typename T>
struct Type;

template <>
struct Type<__nv_bfloat16> {
  static constexpr int PARTS = 1;  // numbers that a value of x is, for the tensor cores
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
  static __device__ __forceinline__ unsigned nibbles(unsigned q, const Nibbles& c) { return c.of(q); }
  static constexpr unsigned MAGIC = 0x43004300u;
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
  static constexpr int PARTS = 1;
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
  static __device__ __forceinline__ unsigned nibbles(unsigned q, const Nibbles& c) { return minus(c.of(q), MAGIC); }
  static constexpr unsigned MAGIC = 0x64006400u;
  template <int I>
  static __device__ __forceinline__ unsigned bytes(unsigned q) {
    return minus(__byte_perm(q, 0x64646464u, I ? 0x4342 : 0x4140), 0x64806480u);
  }
};

// Three numbers of 8 bits each are a float32's 24. Sums keep what 128 more per code would cost of them.
template <>
struct Type<float> : Type<__nv_bfloat16> {
  static constexpr int PARTS = 3;
  static __device__ __forceinline__ float wide(float v) { return v; }
  static __device__ __forceinline__ float narrow(float v) { return v; }
  static constexpr float NIBBLE_ZERO = 0.0f;
  static __device__ __forceinline__ unsigned nibbles(unsigned q, const Nibbles& c) {
    unsigned a = c.of(q), zero = MAGIC;
    __nv_bfloat162 d = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&zero));
    return *reinterpret_cast<unsigned*>(&d);
  }
};

// The next bf16 of two values, which keep the rest.
__device__ __forceinline__ unsigned split(float& low, float& high) {
  const __nv_bfloat16 a = __float2bfloat16_rn(low), b = __float2bfloat16_rn(high);
  low -= __bfloat162float(a), high -= __bfloat162float(b);
  return __byte_perm(__float_as_uint(__bfloat162float(a)), __float_as_uint(__bfloat162float(b)), 0x7632);
}

constexpr int WARPS = 8;

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

// How a chunk of K is spread over the four threads that share a row. BITS 16 are dense weights.
template <int BITS, int GROUP>
struct Layout {
  static constexpr int SUB = GROUP == 32 ? 32 : 64;       // values of K per chunk: never of two groups
  static constexpr int PER = SUB / 4;                     // values per thread
  static constexpr int WORDS = PER * BITS / 32;           // 32-bit words of weights per thread
  static constexpr int MMAS = PER / 4;
};

// No-ops unless the launch lets kernels overlap; before compute capability 9.0 it never does.
__device__ __forceinline__ void let_others_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// BYTES to shared memory, the last BYTES - `valid` of them zeros.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* into, const void* from, int valid) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(into);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Rings of the warps, addressed by bytes from their start.
extern __shared__ __align__(128) unsigned char rings[];

template <typename V>
__device__ __forceinline__ V& shared_at(unsigned at) {
  return *reinterpret_cast<V*>(rings + at);
}
template <int WORDS>
__device__ __forceinline__ void load_shared(unsigned at, unsigned* q) {
  if constexpr (WORDS == 1) {
    q[0] = shared_at<unsigned>(at);
  } else if constexpr (WORDS == 2) {
    const uint2 v = shared_at<uint2>(at);
    q[0] = v.x, q[1] = v.y;
  } else {
    const uint4 v = shared_at<uint4>(at);
    q[0] = v.x, q[1] = v.y, q[2] = v.z, q[3] = v.w;
  }
}

// A word of scales.
template <typename T>
union Pair {
  static constexpr int COUNT = 4 / sizeof(T);
  unsigned word;
  T part[COUNT];
  __device__ Pair() {}
  __device__ __forceinline__ T of(int group) const { return COUNT == 2 && group & 1 ? part[COUNT - 1] : part[0]; }
};

template <typename T>
struct Weights {
  const void* w;  // [rows, K] of T, or codes
  const T* s;     // [rows, K / GROUP]
  const T* b;
  const T* bias;  // [rows] or null
  int rows;
};

// How a product is cut: rows of x at most, tiles of weights at a time, stages in a warp's ring, whether x stays in shared memory.
template <int ROWS_, int TILES_, int DEPTH_, bool X_STAYS_>
struct Cut {
  static constexpr int ROWS = ROWS_, TILES = TILES_, DEPTH = DEPTH_, NT = (ROWS + 7) / 8;
  static constexpr bool X_STAYS = X_STAYS_;
};

// What a warp takes at once, and where it lies in shared memory: the warps' rings, x, a row of zeros, sums. BITS 16 are dense weights.
template <int BITS, int GROUP, typename C, typename T = __half>
struct Stage {
  static constexpr int VALUES = 1024 / BITS;                                // of K
  static constexpr int SUB = BITS != 16 && GROUP == 32 ? 32 : 64;           // values per unit: never of two groups
  static constexpr int UNITS = VALUES / SUB;
  static constexpr int MMAS = SUB / 16;                                     // per unit
  static constexpr int WORDS = SUB * BITS / 128;                            // 32-bit words of codes per lane, row and unit
  static constexpr int GROUPS = BITS == 16 ? 0 : VALUES / GROUP;
  static constexpr int SIZE = sizeof(T);                                    // of a scale
  static constexpr int SCALE_BYTES = BITS == 16 ? 0 : GROUPS == 1 ? 4 : SIZE * GROUPS;  // per row of weights; a lone short one lies in its half of a word
  static constexpr bool HALVES = SIZE == 2 && GROUPS == 1;
  static constexpr int PIECES = VALUES / 8;                                 // of 16 bytes per row of x
  static constexpr int SCALES = C::TILES * 2048;
  static constexpr int BYTES = SCALES + C::TILES * 32 * SCALE_BYTES;
  static constexpr int ROW = VALUES * 2;                                    // bytes of x
  static constexpr int SHARE = C::ROWS == 1 ? C::TILES * 16 : C::TILES * C::NT * 128;  // sums per warp
  // Pieces of 16 bytes are moved about so that lanes read different banks.
  static __device__ __forceinline__ int turn(int row) { return (row & 1) << 2 | (row & 2) | (row >> 2 & 1); }
  static __device__ __forceinline__ int turn_x(int row) { return (row & 1) << (BITS != 16 && SUB == 64 ? 0 : 2); }
  static __device__ __forceinline__ int stages(int K) { return (K + VALUES - 1) / VALUES; }
  static __device__ __forceinline__ int x_bytes(int K) {  // per warp
    return C::X_STAYS ? (stages(K) + WARPS - 1) / WARPS * C::ROWS * ROW : 0;
  }
  static __device__ __forceinline__ unsigned x_of(int warp, int K) { return WARPS * C::DEPTH * BYTES + warp * x_bytes(K); }
  static __device__ __forceinline__ unsigned sums(int K) { return x_of(WARPS, K) + ROW; }
};

// Eight values of x as the nibbles of a word come out: 0 with 4, 1 with 5, 2 with 6, 3 with 7.
__device__ __forceinline__ void order(unsigned& v0, unsigned& v1, unsigned& v2, unsigned& v3) {
  const unsigned x0 = v0, x1 = v1, x2 = v2, x3 = v3;
  v0 = __byte_perm(x0, x2, 0x5410), v1 = __byte_perm(x0, x2, 0x7632);
  v2 = __byte_perm(x1, x3, 0x5410), v3 = __byte_perm(x1, x3, 0x7632);
}

// A warp's way through the weights: which rows of which weights it fetches for a set of tiles.
template <typename T, int BITS, int GROUP, typename C>
struct Rows {
  using L = Stage<BITS, GROUP, C, T>;
  const char* w[C::TILES];  // this lane's piece of its first row
  const T* s[C::TILES];     // this lane's row of scales or biases
  int room[C::TILES];       // rows behind the first

  __device__ __forceinline__ void find(int tile, const Weights<T>& part, int first, int K, int lane) {
    const int row = min(first + (lane >> 3), part.rows - 1);
    w[tile] = (const char*)part.w + (size_t)row * (K * BITS / 8) + (lane & 7) * 16;
    room[tile] = part.rows - 1 - row;
    if constexpr (BITS != 16) s[tile] = (lane < 16 ? part.s : part.b) + (size_t)min(first + (lane & 15), part.rows - 1) * (K / GROUP);
  }

  __device__ __forceinline__ void fetch(int c, unsigned to, int K, int lane, bool aligned) const {
    const int row_bytes = K * BITS / 8;
    const bool there = c * 128 + (lane & 7) * 16 < row_bytes;
    const int r = lane >> 3;
    const unsigned place = r * 128 + (((lane & 7) ^ L::turn(r)) << 4);
#pragma unroll
    for (int i = 0; i < C::TILES; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const char* from = w[i] + min(4 * j, room[i]) * row_bytes + c * 128;
        copy_async<16>(rings + to + i * 2048 + j * 512 + (place ^ (j & 1) << 4), there ? from : w[i], there ? 16 : 0);
      }
      if constexpr (BITS != 16) {
        const unsigned into = to + L::SCALES + (i * 32 + lane) * L::SCALE_BYTES;
        if constexpr (L::SIZE == 4) {
          constexpr int PIECE = L::SCALE_BYTES < 16 ? L::SCALE_BYTES : 16;
          if (aligned) {
#pragma unroll
            for (int q = 0; q < L::SCALE_BYTES; q += PIECE) copy_async<PIECE>(rings + into + q, s[i] + c * L::GROUPS + q / 4, PIECE);
          } else {
            for (int q = 0; q < L::GROUPS; ++q) {
              const bool has = c * L::GROUPS + q < K / GROUP;
              copy_async<4>(rings + into + 4 * q, has ? s[i] + c * L::GROUPS + q : s[i], has ? 4 : 0);
            }
          }
        } else if (aligned) {
          copy_async<L::SCALE_BYTES>(rings + into, s[i] + (L::GROUPS == 1 ? c & ~1 : c * L::GROUPS), L::SCALE_BYTES);
        } else {
          for (int q = 0; q < L::GROUPS; ++q)
            shared_at<unsigned short>(into + 2 * (L::GROUPS == 1 ? c & 1 : q)) =
                c * L::GROUPS + q < K / GROUP ? reinterpret_cast<const unsigned short*>(s[i])[c * L::GROUPS + q] : 0;
        }
      }
    }
  }
};

// acc[tile][nt] += the tiles' rows of weights times 8 rows of x each, over stage c, which is at `stage`, and its x at `xs`.
template <typename T, int BITS, int GROUP, typename C>
__device__ __forceinline__ void multiply(int c, unsigned stage, unsigned xs, unsigned zeros, const T* x, int M, int K, const Nibbles& nibbles,
                                         float (&acc)[C::TILES][C::NT][4]) {
  using L = Stage<BITS, GROUP, C, T>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // What must be added per code: 8-bit ones come less 128, 4-bit ones may come with something added.
  const float ZERO = BITS == 8 ? 128.0f : -Type<T>::NIBBLE_ZERO;
#pragma unroll
  for (int u = 0; u < L::UNITS; ++u) {
    constexpr int PARTS = Type<T>::PARTS;
    unsigned xw[PARTS][C::NT][L::SUB / 8];
#pragma unroll
    for (int nt = 0; nt < C::NT; ++nt) {
      const int m = nt * 8 + g;
#pragma unroll
      for (int j = 0; j < L::SUB / 32; ++j) {
        const int piece = u * (L::SUB / 8) + (BITS == 16 ? 4 * j + t : L::SUB / 32 * t + j);
        unsigned(&v)[4] = reinterpret_cast<unsigned(&)[4]>(xw[0][nt][4 * j]);
        if constexpr (PARTS > 1) {
          const int k = c * L::VALUES + piece * 8;
          float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
          if (m < M && k < K) {
            const float4* from = reinterpret_cast<const float4*>(x + (size_t)m * K + k);
            low = from[0], high = from[1];
          }
#pragma unroll
          for (int p = 0; p < PARTS; ++p) {
            unsigned* w = &xw[p][nt][4 * j];
            w[0] = split(low.x, low.y), w[1] = split(low.z, low.w), w[2] = split(high.x, high.y), w[3] = split(high.z, high.w);
            if constexpr (BITS == 4) order(w[0], w[1], w[2], w[3]);
          }
        } else if constexpr (C::X_STAYS && C::ROWS == 1) {
          load_shared<4>((g ? zeros : xs) + (piece << 4), v);
        } else if constexpr (C::X_STAYS) {
          load_shared<4>(m < M ? xs + m * L::ROW + ((piece ^ L::turn_x(m)) << 4) : zeros + (piece << 4), v);
        } else {
          const int k = c * L::VALUES + piece * 8;
          v[0] = v[1] = v[2] = v[3] = 0;
          if (m < M && k < K) {
            const uint4 q = *reinterpret_cast<const uint4*>(x + (size_t)m * K + k);
            v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
          }
          if constexpr (BITS == 4) order(v[0], v[1], v[2], v[3]);
        }
      }
    }
    float sums[C::NT][4];
    if constexpr (BITS != 16) {
      const unsigned ones[4] = {Type<T>::ONES, Type<T>::ONES, Type<T>::ONES, Type<T>::ONES};
#pragma unroll
      for (int nt = 0; nt < C::NT; ++nt) {
        sums[nt][0] = sums[nt][1] = sums[nt][2] = sums[nt][3] = 0.0f;
#pragma unroll
        for (int j = 0; j < L::MMAS; ++j)
#pragma unroll
          for (int p = 0; p < PARTS; ++p) Type<T>::mma(sums[nt], ones, xw[p][nt][2 * j], xw[p][nt][2 * j + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < C::TILES; ++i) {
      unsigned q[2][L::WORDS];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned row = stage + i * 2048 + (g + 8 * h) * 128;
        const int turned = L::turn(g);
        if constexpr (BITS == 16) {
          load_shared<4>(row + ((t ^ turned) << 4), &q[h][0]);
          load_shared<4>(row + (((4 + t) ^ turned) << 4), &q[h][4]);
        } else {
          const int byte = u * (L::SUB * BITS / 8) + t * (L::WORDS * 4);
          load_shared<L::WORDS>(row + (((byte >> 4) ^ turned) << 4) + (byte & 15), &q[h][0]);
        }
      }
      float d[C::NT][4];
      if constexpr (BITS != 16) {
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt) d[nt][0] = d[nt][1] = d[nt][2] = d[nt][3] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < L::MMAS; ++j) {
        unsigned a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (BITS == 16) {
            a[h] = q[h][2 * j], a[2 + h] = q[h][2 * j + 1];
          } else if constexpr (BITS == 8) {
            a[h] = Type<T>::template bytes<0>(q[h][j]), a[2 + h] = Type<T>::template bytes<2>(q[h][j]);
          } else {
            const unsigned v = q[h][j / 2] >> (8 * (j % 2));
            a[h] = Type<T>::nibbles(v, nibbles), a[2 + h] = Type<T>::nibbles(v >> 4, nibbles);
          }
        }
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt) {
          if constexpr (BITS == 16) {
            Type<T>::mma(acc[i][nt], a, xw[0][nt][2 * j], xw[0][nt][2 * j + 1]);
          } else {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) Type<T>::mma(d[nt], a, xw[p][nt][2 * j], xw[p][nt][2 * j + 1]);
          }
        }
      }
      if constexpr (BITS != 16) {
        const int group = L::HALVES ? c & 1 : u * L::SUB / GROUP;
        const unsigned at = stage + L::SCALES + (i * 32 + g) * L::SCALE_BYTES + (L::SIZE == 4 ? group : group >> 1) * 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Pair<T> s, b;
          load_shared<1>(at + 8 * h * L::SCALE_BYTES, &s.word);
          load_shared<1>(at + (16 + 8 * h) * L::SCALE_BYTES, &b.word);
          const float scale = Type<T>::wide(s.of(group));
          const float offset = fmaf(scale, ZERO, Type<T>::wide(b.of(group)));
#pragma unroll
          for (int nt = 0; nt < C::NT; ++nt)
#pragma unroll
            for (int j = 0; j < 2; ++j)
              acc[i][nt][2 * h + j] = fmaf(offset, sums[nt][j], fmaf(scale, d[nt][2 * h + j], acc[i][nt][2 * h + j]));
        }
      }
    }
  }
}

// 1 / rms of the rows of x, from sums of squares over stretches of 16 values [M, stretches].
__device__ __forceinline__ void find_factors(const float* squares, int stretches, int M, int K, float eps, float* factor) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int m = warp; m < M; m += WARPS) {
    float sum = 0.0f;
    for (int i = lane; i < stretches; i += 32) sum += squares[(size_t)m * stretches + i];
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) factor[m] = rsqrtf(sum / (float)K + eps);
  }
}

// All sets of tiles of a block. `find(set, rows)` says which rows of weights a set has, `finish(set, sums)` takes the warps' sums.
template <typename T, int BITS, int GROUP, typename C, typename Find, typename Finish>
__device__ __forceinline__ void multiply_sets(int sets, bool aligned, const T* x, int M, int K, const float* squares, int stretches, float eps,
                                              float* factor, const Find& find, const Finish& finish) {
  using L = Stage<BITS, GROUP, C, T>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int stages = L::stages(K);
  const unsigned ring = warp * (C::DEPTH * L::BYTES), zeros = L::sums(K) - L::ROW;
  Rows<T, BITS, GROUP, C> rows;
  int set_ahead = blockIdx.x, ahead = warp;  // what is fetched next
  const auto fetch = [&](unsigned to) {
    if (ahead < stages && set_ahead < sets) {
      rows.fetch(ahead, to, K, lane, aligned);
      ahead += WARPS;
      if (ahead >= stages) {
        ahead = warp, set_ahead += gridDim.x;
        if (set_ahead < sets) find(set_ahead, rows);
      }
    }
    commit_copies();
  };
  if (set_ahead < sets) find(set_ahead, rows);
#pragma unroll 1
  for (int s = 0; s < C::DEPTH; ++s) fetch(ring + s * L::BYTES);
  let_others_start();
  wait_for_others();
  const Nibbles nibbles(Type<T>::MAGIC);
  static_assert(Type<T>::PARTS == 1 || !C::X_STAYS && BITS != 16, "float32 is read where it is, for codes");
  if constexpr (C::X_STAYS) {
    constexpr int BATCH = 8;
    const int rows_of_x = C::ROWS == 1 ? 1 : M, pieces = (stages - warp + WARPS - 1) / WARPS * rows_of_x * L::PIECES;
    for (int first = 0; first < pieces; first += 32 * BATCH) {
      uint4 v[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int i = first + lane + 32 * j, row = i / L::PIECES, m = row % rows_of_x;
        const int k = (warp + row / rows_of_x * WARPS) * L::VALUES + i % L::PIECES * 8;
        v[j] = make_uint4(0, 0, 0, 0);
        if (i < pieces && k < K) v[j] = *reinterpret_cast<const uint4*>(x + (size_t)m * K + k);
      }
      if (first == 0 && squares) find_factors(squares, stretches, M, K, eps, factor);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int i = first + lane + 32 * j, row = i / L::PIECES, m = row % rows_of_x, piece = i % L::PIECES;
        if constexpr (BITS == 4) order(v[j].x, v[j].y, v[j].z, v[j].w);
        if (i < pieces) shared_at<uint4>(L::x_of(warp, K) + (row / rows_of_x * C::ROWS + m) * L::ROW + ((piece ^ L::turn_x(m)) << 4)) = v[j];
      }
    }
    if (squares && warp >= stages) find_factors(squares, stretches, M, K, eps, factor);
    if (threadIdx.x < L::PIECES) shared_at<uint4>(zeros + threadIdx.x * 16) = make_uint4(0, 0, 0, 0);
  }
  if (squares && !C::X_STAYS) find_factors(squares, stretches, M, K, eps, factor);
  __syncthreads();
  unsigned slot = ring, sums = L::sums(K);
  for (int set = blockIdx.x; set < sets; set += gridDim.x) {
    float acc[C::TILES][C::NT][4];
#pragma unroll
    for (int i = 0; i < C::TILES; ++i)
#pragma unroll
      for (int nt = 0; nt < C::NT; ++nt) acc[i][nt][0] = acc[i][nt][1] = acc[i][nt][2] = acc[i][nt][3] = 0.0f;
    unsigned xs = L::x_of(warp, K);
#pragma unroll 1
    for (int c = warp; c < stages; c += WARPS) {
      wait_for_copies<C::DEPTH - 1>();
      __syncwarp();
      multiply<T, BITS, GROUP, C>(c, slot, xs, zeros, x, M, K, nibbles, acc);
      __syncwarp();
      fetch(slot);
      slot = slot + L::BYTES == ring + C::DEPTH * L::BYTES ? ring : slot + L::BYTES;
      xs += C::ROWS * L::ROW;
    }
#pragma unroll
    for (int i = 0; i < C::TILES; ++i)
#pragma unroll
      for (int nt = 0; nt < C::NT; ++nt) {
        if constexpr (C::ROWS == 1) {
          if (lane % 4 == 0) {
            shared_at<float>(sums + (warp * L::SHARE + i * 16 + lane / 4) * 4) = acc[i][nt][0];
            shared_at<float>(sums + (warp * L::SHARE + i * 16 + lane / 4 + 8) * 4) = acc[i][nt][2];
          }
        } else {
          shared_at<float4>(sums + (warp * L::SHARE + (i * C::NT + nt) * 128 + lane * 4) * 4) =
              make_float4(acc[i][nt][0], acc[i][nt][1], acc[i][nt][2], acc[i][nt][3]);
        }
      }
    __syncthreads();
    finish(set, sums);
    sums = L::sums(K) + (L::sums(K) + WARPS * L::SHARE * 4 - sums);  // one is read while the other is written
  }
}

// The product for weight row n (of 16) and row m of x: the warps' sums in order.
template <int BITS, int GROUP, typename C>
__device__ __forceinline__ float total(unsigned sums, int tile, int n, int m) {
  using L = Stage<BITS, GROUP, C>;
  const int at = C::ROWS == 1 ? tile * 16 + n
                              : (tile * C::NT + (m >> 3)) * 128 + ((n & 7) * 4 + ((m & 7) >> 1)) * 4 + (n >> 3) * 2 + (m & 1);
  float sum = shared_at<float>(sums + at * 4);
#pragma unroll
  for (int w = 1; w < WARPS; ++w) sum += shared_at<float>(sums + (w * L::SHARE + at) * 4);
  return sum;
}

// Whether a stage's scales can be copied at once.
template <typename T, int BITS, int GROUP, typename C>
__device__ __forceinline__ bool is_aligned(const Weights<T>& part, int K) {
  using L = Stage<BITS, GROUP, C, T>;
  if constexpr (BITS == 16) {
    return true;
  } else {
    return K / GROUP % (L::SCALE_BYTES / L::SIZE) == 0 && ((size_t)part.s | (size_t)part.b) % (L::SCALE_BYTES < 16 ? L::SCALE_BYTES : 16) == 0;
  }
}

// out [M, all rows of all parts] = x @ part.T (+ bias), one part after the other.
template <typename T, int BITS, int GROUP, typename C, int PARTS>
__device__ __forceinline__ void plain(const Weights<T> (&parts)[PARTS], const T* x, int M, int K, const float* squares,
                                      int stretches, float eps, T* out) {
  __shared__ float factor[C::NT * 8];
  constexpr int WIDE = 16 * C::TILES;
  int sets = 0, width = 0;
  bool aligned = true;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    sets += (parts[p].rows + WIDE - 1) / WIDE, width += parts[p].rows;
    aligned = aligned && is_aligned<T, BITS, GROUP, C>(parts[p], K);
  }
  const auto part_of = [&](int& set, int& before) {
    Weights<T> one = parts[0];
    before = 0;
#pragma unroll
    for (int p = 1; p < PARTS; ++p) {
      const int own = (one.rows + WIDE - 1) / WIDE;
      if (set < own) break;
      set -= own, before += one.rows, one = parts[p];
    }
    return one;
  };
  const int lane = threadIdx.x & 31;
  multiply_sets<T, BITS, GROUP, C>(
      sets, aligned, x, M, K, squares, stretches, eps, factor,
      [&](int set, Rows<T, BITS, GROUP, C>& rows) {
        int before;
        const Weights<T> one = part_of(set, before);
#pragma unroll
        for (int i = 0; i < C::TILES; ++i) rows.find(i, one, (set * C::TILES + i) * 16, K, lane);
      },
      [&](int set, unsigned sums) {
        int before;
        const Weights<T> one = part_of(set, before);
        for (int e = threadIdx.x; e < WIDE * M; e += WARPS * 32) {
          const int n = e % WIDE, m = e / WIDE, row = set * WIDE + n;
          if (row < one.rows) {
            float v = total<BITS, GROUP, C>(sums, n / 16, n % 16, m);
            if (squares) v *= factor[m];
            if (one.bias) v += Type<T>::wide(one.bias[row]);
            out[(size_t)m * width + before + row] = Type<T>::narrow(v);
          }
        }
      });
}

// out [M, N] = silu(x @ gate.T) * (x @ up.T); every second tile is one of `up`.
template <typename T, int BITS, int GROUP, typename C>
__device__ __forceinline__ void gated(const Weights<T>& gate, const Weights<T>& up, const T* x, int M, int K, const float* squares,
                                      int stretches, float eps, T* out) {
  constexpr int WIDE = 8 * C::TILES;
  __shared__ float factor[C::NT * 8];
  const int lane = threadIdx.x & 31;
  multiply_sets<T, BITS, GROUP, C>(
      (gate.rows + WIDE - 1) / WIDE, is_aligned<T, BITS, GROUP, C>(gate, K) && is_aligned<T, BITS, GROUP, C>(up, K), x, M, K, squares,
      stretches, eps, factor,
      [&](int set, Rows<T, BITS, GROUP, C>& rows) {
#pragma unroll
        for (int i = 0; i < C::TILES; ++i) rows.find(i, i % 2 ? up : gate, set * WIDE + i / 2 * 16, K, lane);
      },
      [&](int set, unsigned sums) {
        for (int e = threadIdx.x; e < WIDE * M; e += WARPS * 32) {
          const int n = e % WIDE, m = e / WIDE, row = set * WIDE + n;
          if (row < gate.rows) {
            float a = total<BITS, GROUP, C>(sums, n / 16 * 2, n % 16, m), b = total<BITS, GROUP, C>(sums, n / 16 * 2 + 1, n % 16, m);
            if (squares) a *= factor[m], b *= factor[m];
            if (gate.bias) a += Type<T>::wide(gate.bias[row]), b += Type<T>::wide(up.bias[row]);
            out[(size_t)m * gate.rows + row] = Type<T>::narrow(a / (1.0f + __expf(-a)) * b);
          }
        }
      });
}

// h = residual + x @ part.T; hw = h * weight of the norm that comes next; its sums of squares over 16 values each [M, N / 16].
template <typename T, int BITS, int GROUP, typename C>
__device__ __forceinline__ void add(const Weights<T>& one, const T* x, int M, int K, const T* residual, const T* weight, T* h, T* hw,
                                    float* squares) {
  constexpr int WIDE = 16 * C::TILES;
  const int lane = threadIdx.x & 31;
  multiply_sets<T, BITS, GROUP, C>(
      (one.rows + WIDE - 1) / WIDE, is_aligned<T, BITS, GROUP, C>(one, K), x, M, K, nullptr, 0, 0.0f, nullptr,
      [&](int set, Rows<T, BITS, GROUP, C>& rows) {
#pragma unroll
        for (int i = 0; i < C::TILES; ++i) rows.find(i, one, (set * C::TILES + i) * 16, K, lane);
      },
      [&](int set, unsigned sums) {
        for (int e = threadIdx.x; e < (WIDE * M + 31) / 32 * 32; e += WARPS * 32) {
          const int n = e % WIDE, m = e / WIDE, row = set * WIDE + n;
          const bool there = m < M && row < one.rows;
          float square = 0.0f;
          if (there) {
            const size_t at = (size_t)m * one.rows + row;
            float v = total<BITS, GROUP, C>(sums, n / 16, n % 16, m);
            if (one.bias) v += Type<T>::wide(one.bias[row]);
            const T rounded = Type<T>::narrow(v + Type<T>::wide(residual[at]));
            const float y = Type<T>::wide(rounded);
            h[at] = rounded;
            hw[at] = Type<T>::narrow(y * Type<T>::wide(weight[row]));
            square = y * y;
          }
#pragma unroll
          for (int o = 8; o; o >>= 1) square += __shfl_xor_sync(0xffffffffu, square, o);
          if (there && n % 16 == 0) squares[(size_t)m * (one.rows / 16) + row / 16] = square;
        }
      });
}

// The values of word i of all codes of weights [N, K], as T, rounded once.
template <typename T, int BITS, int GROUP>
__device__ __forceinline__ void unpack_word(const Weights<T>& part, long long i, T* out) {
  constexpr int CODES = 32 / BITS;
  const unsigned word = reinterpret_cast<const unsigned*>(part.w)[i];
  const long long group = i * CODES / GROUP;
  const float scale = Type<T>::wide(part.s[group]), bias = Type<T>::wide(part.b[group]);
  __align__(16) T values[CODES];
#pragma unroll
  for (int j = 0; j < CODES; ++j)
    values[j] = Type<T>::narrow(fmaf((float)((word >> (BITS * j)) & ((1u << BITS) - 1u)), scale, bias));
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < CODES / 4; ++j) reinterpret_cast<uint4*>(out)[i * (CODES / 4) + j] = reinterpret_cast<const uint4*>(values)[j];
  } else if constexpr (BITS == 4) {
    reinterpret_cast<uint4*>(out)[i] = *reinterpret_cast<const uint4*>(values);
  } else {
    reinterpret_cast<uint2*>(out)[i] = *reinterpret_cast<const uint2*>(values);
  }
}

// Weights [N, K] of T from codes: for products of many rows. One thread per 32 bits of codes.
template <typename T, int BITS, int GROUP>
__device__ __forceinline__ void unpack(const Weights<T>& part, long long words, T* out) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < words) unpack_word<T, BITS, GROUP>(part, i, out);
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
