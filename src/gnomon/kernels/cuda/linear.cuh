// Products of 1 to 32 rows with weights [N, K], for the tensor cores: mma.m16n8k16 with 16 rows of weights as its A and up to 8 rows of x as
// its B. Codes stay whole numbers (exact in bf16 and f16); scales and biases are applied in float32 per group.
//
// A block takes TILES tiles of 16 rows of weights. Its warps take stages of K by turns, 128 bytes of every row each, through a ring of their own in
// shared memory, so nothing waits for another warp until their sums are added, in one order. Which order depends on K alone, so an output
// depends on its row of x and its row of weights alone.
//
// Weights, scales, biases and norms don't change: a block asks for them before it waits for the kernel before it (`wait_for_others`), so that
// they arrive meanwhile where the launch allows it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace gnomon {

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

// No-ops unless the launch lets kernels overlap.
__device__ __forceinline__ void let_others_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_others() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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

// What a warp takes at once, and where it lies in its ring. BITS 16 are dense weights. ROWS rows of x at most, TILES tiles of weights.
template <int BITS, int GROUP, int ROWS, int TILES, bool X_IN_RING>
struct Stage {
  static constexpr int VALUES = 1024 / BITS;                                // of K
  static constexpr int SUB = BITS != 16 && GROUP == 32 ? 32 : 64;           // values per unit: never of two groups
  static constexpr int UNITS = VALUES / SUB;
  static constexpr int MMAS = SUB / 16;                                     // per unit
  static constexpr int WORDS = SUB * BITS / 128;                            // 32-bit words of codes per lane, row and unit
  static constexpr int GROUPS = BITS == 16 ? 0 : VALUES / GROUP;
  static constexpr int SCALE_BYTES = BITS == 16 ? 0 : GROUPS == 1 ? 4 : 2 * GROUPS;  // per row of weights; a lone one lies in its half of a word
  static constexpr int PIECES = VALUES / 8;                                 // of 16 bytes per row of x
  static constexpr int SCALES = TILES * 2048;
  static constexpr int X = SCALES + TILES * 32 * SCALE_BYTES;
  static constexpr int X_ROWS = !X_IN_RING ? 0 : ROWS == 1 ? 2 : ROWS;      // zeros stand for those that aren't there
  static constexpr bool ORDERED = BITS == 4 && X_IN_RING && ROWS == 1;      // x lies there as codes come out
  static constexpr int BYTES = X + X_ROWS * VALUES * 2;
  // Pieces of 16 bytes are moved about so that lanes read different banks.
  static __device__ __forceinline__ int turn(int row) { return (row & 1) << 2 | (row & 2) | (row >> 2 & 1); }
  static __device__ __forceinline__ int turn_x(int row) { return (row & 1) << (BITS != 16 && SUB == 64 ? 0 : 2); }
};

// Eight values of x as the nibbles of a word come out: 0 with 4, 1 with 5, 2 with 6, 3 with 7.
__device__ __forceinline__ void order(unsigned& v0, unsigned& v1, unsigned& v2, unsigned& v3) {
  const unsigned x0 = v0, x1 = v1, x2 = v2, x3 = v3;
  v0 = __byte_perm(x0, x2, 0x5410), v1 = __byte_perm(x0, x2, 0x7632);
  v2 = __byte_perm(x1, x3, 0x5410), v3 = __byte_perm(x1, x3, 0x7632);
}

template <typename T, int BITS, int GROUP, int ROWS, int TILES, bool X_IN_RING>
struct Multiplier {
  using L = Stage<BITS, GROUP, ROWS, TILES, X_IN_RING>;
  static constexpr int NT = (ROWS + 7) / 8;

  const Weights<T> (&part)[TILES];
  const int (&first)[TILES];
  const T* x;
  const int M, K, lane;

  // Stage c of the weights.
  __device__ __forceinline__ void fetch_weights(int c, unsigned to) const {
    const int row_bytes = K * BITS / 8;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int piece = lane & 7, at = c * 128 + piece * 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = (lane >> 3) + 4 * j;
        const char* from = (const char*)part[i].w + (size_t)min(first[i] + r, part[i].rows - 1) * row_bytes + at;
        const int valid = at < row_bytes ? 16 : 0;
        copy_async<16>(rings + to + i * 2048 + r * 128 + ((piece ^ L::turn(r)) << 4), valid ? from : (const char*)part[i].w, valid);
      }
      if constexpr (BITS != 16) {
        const int groups = K / GROUP, r = lane & 15, left = groups - c * L::GROUPS;
        const T* from = (lane < 16 ? part[i].s : part[i].b) + (size_t)min(first[i] + r, part[i].rows - 1) * groups;
        const unsigned into = to + L::SCALES + (i * 32 + lane) * L::SCALE_BYTES;
        if (__all_sync(0xffffffffu, groups % (L::SCALE_BYTES / 2) == 0 && (size_t)from % L::SCALE_BYTES == 0)) {
          copy_async<L::SCALE_BYTES>(rings + into, from + (L::GROUPS == 1 ? c & ~1 : c * L::GROUPS), L::SCALE_BYTES);
        } else {
#pragma unroll
          for (int q = 0; q < L::GROUPS; ++q) {
            const unsigned short v = q < left ? reinterpret_cast<const unsigned short*>(from)[c * L::GROUPS + q] : 0;
            shared_at<unsigned short>(into + 2 * (L::GROUPS == 1 ? c & 1 : q)) = v;
          }
        }
      }
    }
  }

  // Stage c of x by way of registers, in the order in which codes come out.
  __device__ __forceinline__ uint4 load_x(int c, int m, int piece) const {
    const int k = c * L::VALUES + piece * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (k < K) v = *reinterpret_cast<const uint4*>(x + (size_t)m * K + k);
    return v;
  }
  __device__ __forceinline__ void store_x(uint4 v, int m, int piece, unsigned to) const {
    if constexpr (L::ORDERED) order(v.x, v.y, v.z, v.w);
    shared_at<uint4>(to + L::X + m * (L::VALUES * 2) + ((piece ^ L::turn_x(m)) << 4)) = v;
  }
  __device__ __forceinline__ void fetch_x(int c, unsigned to) const {
#pragma unroll 4
    for (int i = lane; i < M * L::PIECES; i += 32) store_x(load_x(c, i / L::PIECES, i % L::PIECES), i / L::PIECES, i % L::PIECES, to);
  }
  // As it is, with the weights of a later stage.
  __device__ __forceinline__ void fetch_x_async(int c, unsigned to) const {
#pragma unroll 4
    for (int i = lane; i < M * L::PIECES; i += 32) {
      const int m = i / L::PIECES, piece = i % L::PIECES, k = c * L::VALUES + piece * 8;
      copy_async<16>(rings + to + L::X + m * (L::VALUES * 2) + ((piece ^ L::turn_x(m)) << 4), k < K ? x + (size_t)m * K + k : x, k < K ? 16 : 0);
    }
  }
  // Rows of x that aren't there.
  __device__ __forceinline__ void clear_x(unsigned to) const {
    for (int i = M * L::PIECES + lane; i < L::X_ROWS * L::PIECES; i += 32) shared_at<uint4>(to + L::X + i * 16) = make_uint4(0, 0, 0, 0);
  }

  // acc[tile][nt] += the tiles' rows of weights times 8 rows of x each, over stage c.
  __device__ __forceinline__ void multiply(int c, unsigned stage, float (&acc)[TILES][NT][4]) const {
    const int g = lane >> 2, t = lane & 3;
    // What must be added per code: 8-bit ones come less 128, 4-bit ones may come with something added.
    const float ZERO = BITS == 8 ? 128.0f : -Type<T>::NIBBLE_ZERO;
#pragma unroll
    for (int u = 0; u < L::UNITS; ++u) {
      unsigned xw[NT][L::SUB / 8];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const int m = nt * 8 + g;
#pragma unroll
        for (int j = 0; j < L::SUB / 32; ++j) {
          const int piece = u * (L::SUB / 8) + (BITS == 16 ? 4 * j + t : L::SUB / 32 * t + j);
          unsigned(&v)[4] = reinterpret_cast<unsigned(&)[4]>(xw[nt][4 * j]);
          if constexpr (X_IN_RING) {
            const int row = min(m, L::X_ROWS - 1);
            load_shared<4>(stage + L::X + row * (L::VALUES * 2) + ((piece ^ L::turn_x(row)) << 4), v);
          } else {
            v[0] = v[1] = v[2] = v[3] = 0;
            const int k = c * L::VALUES + piece * 8;
            if (m < M && k < K) {
              const uint4 q = *reinterpret_cast<const uint4*>(x + (size_t)m * K + k);
              v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
            }
          }
          if constexpr (BITS == 4 && !L::ORDERED) order(v[0], v[1], v[2], v[3]);
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
              a[h] = q[h][2 * j], a[2 + h] = q[h][2 * j + 1];
            } else if constexpr (BITS == 8) {
              a[h] = Type<T>::template bytes<0>(q[h][j]), a[2 + h] = Type<T>::template bytes<2>(q[h][j]);
            } else {
              const unsigned v = q[h][j / 2] >> (8 * (j % 2));
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
          const int group = L::GROUPS == 1 ? c & 1 : u * L::SUB / GROUP;
          const unsigned at = stage + L::SCALES + (i * 32 + g) * L::SCALE_BYTES + (group >> 1) * 4;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            Pair<T> s, b;
            load_shared<1>(at + 8 * h * L::SCALE_BYTES, &s.word);
            load_shared<1>(at + (16 + 8 * h) * L::SCALE_BYTES, &b.word);
            const float scale = Type<T>::wide(group & 1 ? s.part[1] : s.part[0]);
            const float offset = fmaf(scale, ZERO, Type<T>::wide(group & 1 ? b.part[1] : b.part[0]));
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
};

// How a product is cut: rows of x at most, tiles of weights per block, warps, stages in a warp's ring, whether x goes through the ring.
template <int ROWS_, int TILES_, int WARPS_, int DEPTH_, bool X_IN_RING_>
struct Cut {
  static constexpr int ROWS = ROWS_, TILES = TILES_, WARPS = WARPS_, DEPTH = DEPTH_, NT = (ROWS + 7) / 8;
  static constexpr bool X_IN_RING = X_IN_RING_;
};

template <int BITS, int GROUP, typename C>
struct Ring {
  static constexpr int STAGES = C::DEPTH * Stage<BITS, GROUP, C::ROWS, C::TILES, C::X_IN_RING>::BYTES;
  static constexpr int SHARE = C::TILES * C::NT * 512;  // a warp's sums, in the end
  static constexpr int BYTES = STAGES > SHARE ? STAGES : SHARE;
};

// 1 / rms of the rows of x, from sums of squares over stretches of 16 values [M, stretches].
template <int WARPS>
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

// The warps' shares of a block's products, each at the start of its ring, and the rows' factors.
template <typename T, int BITS, int GROUP, typename C>
__device__ __forceinline__ void multiply_and_share(const Weights<T> (&part)[C::TILES], const int (&first)[C::TILES], const T* x, int M, int K,
                                                   const float* squares, int stretches, float eps, float* factor) {
  using L = Stage<BITS, GROUP, C::ROWS, C::TILES, C::X_IN_RING>;
  constexpr int RING = Ring<BITS, GROUP, C>::BYTES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Multiplier<T, BITS, GROUP, C::ROWS, C::TILES, C::X_IN_RING> work{part, first, x, M, K, lane};
  const unsigned ring = warp * RING;
  const int stages = (K + L::VALUES - 1) / L::VALUES;
#pragma unroll
  for (int s = 0; s < C::DEPTH; ++s) {
    const int c = warp + s * C::WARPS;
    if (c < stages) work.fetch_weights(c, ring + s * L::BYTES);
    commit_copies();
    if constexpr (C::X_IN_RING) work.clear_x(ring + s * L::BYTES);
  }
  let_others_start();
  wait_for_others();
#pragma unroll
  for (int s = 0; s < C::DEPTH; ++s) {
    const int c = warp + s * C::WARPS;
    if (C::X_IN_RING && c < stages) work.fetch_x(c, ring + s * L::BYTES);
  }
  if (squares) find_factors<C::WARPS>(squares, stretches, M, K, eps, factor);
  float acc[C::TILES][C::NT][4];
#pragma unroll
  for (int i = 0; i < C::TILES; ++i)
#pragma unroll
    for (int nt = 0; nt < C::NT; ++nt) acc[i][nt][0] = acc[i][nt][1] = acc[i][nt][2] = acc[i][nt][3] = 0.0f;
  unsigned slot = ring;
  for (int c = warp; c < stages; c += C::WARPS) {
    const int next = c + C::DEPTH * C::WARPS;
    uint4 x_next;
    if (C::X_IN_RING && C::ROWS == 1 && next < stages && lane < L::PIECES) x_next = work.load_x(next, 0, lane);
    wait_for_copies<C::DEPTH - 1>();
    __syncwarp();
    work.multiply(c, slot, acc);
    __syncwarp();
    if (next < stages) {
      work.fetch_weights(next, slot);
      if constexpr (C::X_IN_RING && C::ROWS == 1) {
        if (lane < L::PIECES) work.store_x(x_next, 0, lane, slot);
      } else if constexpr (C::X_IN_RING) {
        work.fetch_x_async(next, slot);
      }
    }
    commit_copies();
    slot = slot + L::BYTES == ring + C::DEPTH * L::BYTES ? ring : slot + L::BYTES;
  }
  __syncwarp();
  float* share = &shared_at<float>(ring);
#pragma unroll
  for (int i = 0; i < C::TILES; ++i)
#pragma unroll
    for (int nt = 0; nt < C::NT; ++nt)
      *reinterpret_cast<float4*>(&share[(i * C::NT + nt) * 128 + lane * 4]) =
          make_float4(acc[i][nt][0], acc[i][nt][1], acc[i][nt][2], acc[i][nt][3]);
  __syncthreads();
}

// The product for weight row n (of 16) and row m of x: the warps' shares in order.
template <int BITS, int GROUP, typename C>
__device__ __forceinline__ float total(int tile, int n, int m) {
  constexpr int RING = Ring<BITS, GROUP, C>::BYTES / 4;
  const float* share = &shared_at<float>(0);
  const int at = (tile * C::NT + (m >> 3)) * 128 + ((n & 7) * 4 + ((m & 7) >> 1)) * 4 + (n >> 3) * 2 + (m & 1);
  float sum = share[at];
#pragma unroll
  for (int w = 1; w < C::WARPS; ++w) sum += share[w * RING + at];
  return sum;
}

// out [M, all rows of all parts] = x @ part.T (+ bias), one part after the other.
template <typename T, int BITS, int GROUP, typename C, int PARTS>
__device__ __forceinline__ void plain(const Weights<T> (&parts)[PARTS], const T* x, int M, int K, const float* squares,
                                      int stretches, float eps, T* out) {
  constexpr int TILES = C::TILES;
  __shared__ float factor[C::NT * 8];
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
  multiply_and_share<T, BITS, GROUP, C>(part, first, x, M, K, squares, stretches, eps, factor);
  for (int e = threadIdx.x; e < TILES * C::NT * 128; e += C::WARPS * 32) {
    const int n = e % (16 * TILES), m = e / (16 * TILES), row = block * (16 * TILES) + n;
    if (m < M && row < one.rows) {
      float v = total<BITS, GROUP, C>(n / 16, n % 16, m);
      if (squares) v *= factor[m];
      if (one.bias) v += Type<T>::wide(one.bias[row]);
      out[(size_t)m * width + before + row] = Type<T>::narrow(v);
    }
  }
}

// out [M, N] = silu(x @ gate.T) * (x @ up.T); every second tile is one of `up`.
template <typename T, int BITS, int GROUP, typename C>
__device__ __forceinline__ void gated(const Weights<T>& gate, const Weights<T>& up, const T* x, int M, int K, const float* squares,
                                      int stretches, float eps, T* out) {
  constexpr int PAIRS = C::TILES / 2;
  __shared__ float factor[C::NT * 8];
  Weights<T> part[C::TILES];
  int first[C::TILES];
#pragma unroll
  for (int i = 0; i < C::TILES; ++i) part[i] = i % 2 ? up : gate, first[i] = ((int)blockIdx.x * PAIRS + i / 2) * 16;
  multiply_and_share<T, BITS, GROUP, C>(part, first, x, M, K, squares, stretches, eps, factor);
  for (int e = threadIdx.x; e < PAIRS * C::NT * 128; e += C::WARPS * 32) {
    const int n = e % (16 * PAIRS), m = e / (16 * PAIRS), row = blockIdx.x * (16 * PAIRS) + n;
    if (m < M && row < gate.rows) {
      float a = total<BITS, GROUP, C>(n / 16 * 2, n % 16, m), b = total<BITS, GROUP, C>(n / 16 * 2 + 1, n % 16, m);
      if (squares) a *= factor[m], b *= factor[m];
      if (gate.bias) a += Type<T>::wide(gate.bias[row]), b += Type<T>::wide(up.bias[row]);
      out[(size_t)m * gate.rows + row] = Type<T>::narrow(a / (1.0f + __expf(-a)) * b);
    }
  }
}

// h = residual + x @ part.T; hw = h * weight of the norm that comes next; its sums of squares over 16 values each [M, N / 16].
template <typename T, int BITS, int GROUP, typename C>
__device__ __forceinline__ void add(const Weights<T>& one, const T* x, int M, int K, const T* residual, const T* weight, T* h, T* hw,
                                    float* squares) {
  Weights<T> part[C::TILES];
  int first[C::TILES];
#pragma unroll
  for (int i = 0; i < C::TILES; ++i) part[i] = one, first[i] = ((int)blockIdx.x * C::TILES + i) * 16;
  multiply_and_share<T, BITS, GROUP, C>(part, first, x, M, K, nullptr, 0, 0.0f, nullptr);
  for (int e = threadIdx.x; e < C::TILES * C::NT * 128; e += C::WARPS * 32) {
    const int n = e % 16, m = e / 16 % (C::NT * 8), tile = e / (C::NT * 128), row = first[0] + tile * 16 + n;
    float square = 0.0f;
    if (m < M && row < one.rows) {
      const size_t at = (size_t)m * one.rows + row;
      float v = total<BITS, GROUP, C>(tile, n, m);
      if (one.bias) v += Type<T>::wide(one.bias[row]);
      const T rounded = Type<T>::narrow(v + Type<T>::wide(residual[at]));
      const float y = Type<T>::wide(rounded);
      h[at] = rounded;
      hw[at] = Type<T>::narrow(y * Type<T>::wide(weight[row]));
      square = y * y;
    }
#pragma unroll
    for (int o = 8; o; o >>= 1) square += __shfl_xor_sync(0xffffffffu, square, o);
    if (m < M && row < one.rows && n == 0) squares[(size_t)m * (one.rows / 16) + row / 16] = square;
  }
}

// Weights [N, K] of T from codes, rounded once: for products of many rows. One thread per 32 bits of codes.
template <typename T, int BITS, int GROUP>
__device__ __forceinline__ void unpack(const Weights<T>& part, long long words, T* out) {
  constexpr int CODES = 32 / BITS;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  let_others_start();
  wait_for_others();
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
  let_others_start();
  wait_for_others();
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
