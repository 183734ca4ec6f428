// A whole layer of a decode step of 1 to 8 rows in one launch: two blocks of 8 warps per multiprocessor stay for all of it and meet at
// barriers between products. It takes linear.cuh's sums in linear.cuh's order, so its bits are those of the separate kernels.
//
// What it saves: the host submits one kernel a layer; a warp loads the next chunks of weights before it multiplies those it has, and the first
// ones of the next product before it waits for the last one's rows.
//
// All blocks must be on the GPU at once: the grid is two blocks for each multiprocessor, and launch bounds leave room for two.
#include <cuda_bf16.h>

namespace gnomon {

// Meets all blocks of the grid. `arrivals` is zero before the launch and after it.
struct Meeting {
  unsigned* arrivals;
  unsigned expected;

  __device__ explicit Meeting(int* counters) : arrivals(reinterpret_cast<unsigned*>(counters)), expected(0) {}

  // What this block wrote will be seen by who has waited.
  __device__ __forceinline__ void arrive() {
    __syncthreads();
    expected += gridDim.x;
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(arrivals, 1u);
    }
  }

  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) {
      unsigned seen, polls = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
        // A block that never comes would hang the GPU: some seconds are enough.
        if (++polls == 1u << 25) __trap();
      } while (seen < expected);
      __threadfence();
    }
    __syncthreads();
  }

  // The last block to leave puts the counters back to zero.
  __device__ __forceinline__ void leave() {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      if (atomicAdd(arrivals + 1, 1u) == gridDim.x - 1) {
        arrivals[0] = 0;
        arrivals[1] = 0;
      }
    }
  }
};

// One product's weights [N, K] as a warp reads them: 16 rows per tile, the warp's own share of K.
template <typename T, int BITS, int GROUP, int K>
struct Stream {
  using L = Layout<BITS, GROUP>;
  static constexpr int CHUNKS = K / L::SUB, SHARE = (CHUNKS + 2 * WARPS - 1) / (2 * WARPS) * 2;
  static constexpr int CHUNK_BYTES = L::SUB * BITS / 8, ROW_BYTES = K * BITS / 8, GROUPS = K / GROUP;
  static_assert(BITS == 16 || K % 128 == 0, "scales are read in pairs");

  static __device__ __forceinline__ int begin(int thread) { return (thread >> 5) * SHARE; }
  static __device__ __forceinline__ int end(int thread) { return min(CHUNKS, begin(thread) + SHARE); }
};

// U chunks of TILES tiles of weights, in registers.
template <typename T, int BITS, int GROUP, int K, int TILES, int U>
struct Chunks {
  using S = Stream<T, BITS, GROUP, K>;
  using L = Layout<BITS, GROUP>;
  static constexpr int PAIRS = BITS == 16 ? 1 : U / 2;
  static constexpr bool EVEN = S::SHARE % U == 0 && S::CHUNKS % (WARPS * U) == 0;  // all warps' shares are whole steps
  unsigned q[U][TILES][2][L::WORDS];
  unsigned scales[PAIRS][TILES][2], biases[PAIRS][TILES][2];

  __device__ __forceinline__ void load(const Weights<T> (&part)[TILES], const int (&first)[TILES], int chunk, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const size_t row = first[i] + g;
      const char* w = (const char*)part[i].w + row * S::ROW_BYTES + t * (BITS == 16 ? 16 : L::WORDS * 4);
      if constexpr (EVEN) w += chunk * S::CHUNK_BYTES;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const char* at = w + 8 * h * S::ROW_BYTES + (EVEN ? u : min(chunk + u, S::CHUNKS - 1)) * S::CHUNK_BYTES;
          if constexpr (BITS == 16) {
            load_weights<4>(at, &q[u][i][h][0]);
            load_weights<4>(at + 64, &q[u][i][h][4]);
          } else {
            load_weights<L::WORDS>(at, &q[u][i][h][0]);
          }
        }
      if constexpr (BITS != 16) {
        const T* s = part[i].s + row * S::GROUPS;
        const T* b = part[i].b + row * S::GROUPS;
        if constexpr (EVEN) s += chunk * L::SUB / GROUP, b += chunk * L::SUB / GROUP;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int u = 0; u < PAIRS; ++u) {
            const int at = 8 * h * S::GROUPS + (EVEN ? 2 * u : min(chunk + 2 * u, S::CHUNKS - 2)) * L::SUB / GROUP;
            if constexpr (GROUP == 128) {  // both chunks are of one group
              scales[u][i][h] = __ldg(reinterpret_cast<const unsigned short*>(s + at)) * 0x10001u;
              biases[u][i][h] = __ldg(reinterpret_cast<const unsigned short*>(b + at)) * 0x10001u;
            } else {
              scales[u][i][h] = __ldg(reinterpret_cast<const unsigned*>(s + at));
              biases[u][i][h] = __ldg(reinterpret_cast<const unsigned*>(b + at));
            }
          }
      }
    }
  }

  // acc += the chunks' weights times up to 8 rows of x; chunks from `end` on are not this warp's.
  __device__ __forceinline__ void multiply(const T* x, int M, int chunk, int end, int lane, float (&acc)[TILES][4]) const {
    const int g = lane >> 2, t = lane & 3;
    const float ZERO = BITS == 8 ? 128.0f : -Type<T>::NIBBLE_ZERO;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!EVEN && chunk + u >= end) break;
      unsigned xw[L::PER / 2];
      const T* p = x + (size_t)g * K + (chunk + u) * L::SUB + t * (BITS == 16 ? 8 : L::PER);
#pragma unroll
      for (int j = 0; j < L::PER / 8; ++j) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (g < M) v = *reinterpret_cast<const uint4*>(p + j * (BITS == 16 ? 32 : 8));
        xw[4 * j] = v.x, xw[4 * j + 1] = v.y, xw[4 * j + 2] = v.z, xw[4 * j + 3] = v.w;
      }
      if constexpr (BITS == 4) {  // as the nibbles of a word come out: 0 with 4, 1 with 5, 2 with 6, 3 with 7
#pragma unroll
        for (int j = 0; j < L::PER / 8; ++j) {
          const unsigned x0 = xw[4 * j], x1 = xw[4 * j + 1], x2 = xw[4 * j + 2], x3 = xw[4 * j + 3];
          xw[4 * j] = __byte_perm(x0, x2, 0x5410), xw[4 * j + 1] = __byte_perm(x0, x2, 0x7632);
          xw[4 * j + 2] = __byte_perm(x1, x3, 0x5410), xw[4 * j + 3] = __byte_perm(x1, x3, 0x7632);
        }
      }
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if constexpr (BITS != 16) {
        const unsigned ones[4] = {Type<T>::ONES, Type<T>::ONES, Type<T>::ONES, Type<T>::ONES};
#pragma unroll
        for (int j = 0; j < L::MMAS; ++j) Type<T>::mma(sums, ones, xw[2 * j], xw[2 * j + 1]);
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
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
          if constexpr (BITS == 16) {
            Type<T>::mma(acc[i], a, xw[2 * j], xw[2 * j + 1]);
          } else {
            Type<T>::mma(d, a, xw[2 * j], xw[2 * j + 1]);
          }
        }
        if constexpr (BITS != 16) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            Pair<T> s, b;
            s.word = scales[u / 2][i][h], b.word = biases[u / 2][i][h];
            const float scale = Type<T>::wide(s.part[u % 2]);
            const float offset = fmaf(scale, ZERO, Type<T>::wide(b.part[u % 2]));
#pragma unroll
            for (int j = 0; j < 2; ++j)
              acc[i][2 * h + j] = fmaf(offset, sums[j], fmaf(scale, d[2 * h + j], acc[i][2 * h + j]));
          }
        }
      }
    }
  }
};

// How many chunks of each tile a warp holds in one of its two sets of registers.
template <int BITS, int TILES>
struct Ahead {
  static constexpr int VALUE = BITS == 16 ? (TILES == 2 ? 1 : 2) : (TILES == 2 || BITS == 8 ? 2 : 4);
};

// All tiles of a product whose turn it is for this block. `weights_of(tile, part, first)` says where a tile's weights are; `ready()` waits for
// x; `finish(tile, shared, thread)` takes a tile's sums. `shared` holds two tiles' sums: the next tile's are written while the last one's
// are still read.
template <typename T, int BITS, int GROUP, int K, int TILES, typename Ready, typename WeightsOf, typename Finish>
__device__ __forceinline__ void tiles_of(int tiles, const T* x, int M, const float* squares, float eps, Shared<1, TILES>* shared,
                                         Ready ready, WeightsOf weights_of, Finish finish) {
  using S = Stream<T, BITS, GROUP, K>;
  constexpr int U = Ahead<BITS, TILES>::VALUE;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int begin = S::begin(thread), end = S::end(thread);
  Chunks<T, BITS, GROUP, K, TILES, U> a, b;
  Weights<T> part[TILES];
  int first[TILES], turn = 0;
  int tile = blockIdx.x;
  if (tile < tiles) {
    weights_of(tile, part, first);
    if (begin < end) a.load(part, first, begin, lane);
  }
  ready();
  if (tile >= tiles) return;
  if (squares) {
    find_factors<1>(squares, K / 16, M, K, eps, shared[0].factor);
    if (lane == 0 && warp < M) shared[1].factor[warp] = shared[0].factor[warp];
  }
#pragma unroll 1
  while (true) {
    float acc[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
#pragma unroll 1
    for (int c = begin; c < end; c += 2 * U) {
      if (c + U < end) b.load(part, first, c + U, lane);
      a.multiply(x, M, c, end, lane, acc);
      if (c + U >= end) break;
      if (c + 2 * U < end) a.load(part, first, c + 2 * U, lane);
      b.multiply(x, M, c + U, end, lane, acc);
    }
    const int done = tile;
    tile += gridDim.x;
    if (tile < tiles) {
      weights_of(tile, part, first);
      if (begin < end) a.load(part, first, begin, lane);
    }
    Shared<1, TILES>& now = shared[turn];
    turn ^= 1;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      *reinterpret_cast<float4*>(&now.share[warp][i * 128 + lane * 4]) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    __syncthreads();
    finish(done, now, thread);
    if (tile >= tiles) return;
  }
}

// out [M, width]: the product's tile as it is, plus bias.
template <typename T>
__device__ __forceinline__ void finish_plain(const Shared<1, 1>& shared, int thread, const Weights<T>& one, int row0, int M, bool normed, T* out,
                                             int width) {
  const int n = thread % 16, m = thread / 16;
  if (m < M) {
    float v = total(shared, 0, n, m, normed);
    if (one.bias) v += Type<T>::wide(one.bias[row0 + n]);
    out[(size_t)m * width + n] = Type<T>::narrow(v);
  }
}

// As `add` in linear.cuh.
template <typename T>
__device__ __forceinline__ void finish_add(const Shared<1, 1>& shared, int thread, const Weights<T>& one, int tile, int M, const T* residual,
                                           const T* weight, T* h, T* hw, float* squares) {
  if (thread >= 128) return;
  const int n = thread % 16, m = thread / 16, row = tile * 16 + n;
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
  if (m < M && n == 0) squares[(size_t)m * (one.rows / 16) + tile] = square;
}

template <typename T>
struct LayerWeights {
  Weights<T> q, k, v, o, gate, up, down;
  const T *mlp_norm, *next_norm, *q_norm, *k_norm;
};

// Widths of the model, and how each product's weights are held.
template <int HIDDEN_, int INNER_, int Q_HEADS_, int KV_HEADS_, int D_, int HEADS_, int QKV_BITS_, int QKV_GROUP_, int O_BITS_,
          int O_GROUP_, int GATE_BITS_, int GATE_GROUP_, int DOWN_BITS_, int DOWN_GROUP_>
struct Widths {
  static constexpr int HIDDEN = HIDDEN_, INNER = INNER_, Q_HEADS = Q_HEADS_, KV_HEADS = KV_HEADS_, D = D_, HEADS = HEADS_;
  static constexpr int QKV_BITS = QKV_BITS_, QKV_GROUP = QKV_GROUP_, O_BITS = O_BITS_, O_GROUP = O_GROUP_;
  static constexpr int GATE_BITS = GATE_BITS_, GATE_GROUP = GATE_GROUP_, DOWN_BITS = DOWN_BITS_, DOWN_GROUP = DOWN_GROUP_;
};

// Where rows lie between products: [M, ...] each.
template <typename T>
struct Rows {
  T *h, *hw;
  float* squares;
};

// What a step has beside weights and rows.
struct Turn {
  const int* lengths;
  const float* inverse;
  float eps, head_eps, scale;
  bool traditional;
};

// Nanoseconds at a phase's end, of the first block.
__device__ __forceinline__ void stamp(long long* times, int at) {
  if (times && blockIdx.x == 0 && threadIdx.x == 0) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(times[at]));
}

// One layer: `in` to `out`, by way of `mid` and of qkv [M, ...], attended, parts and acted.
template <typename T, typename W, bool NORMED>
__device__ __forceinline__ void run_layer(const LayerWeights<T>& layer, const Cache& cache, const Turn& step, int M, int* counters,
                                          int* meeting_counters, const T* h0, const T* hw0, const float* squares0, T* qkv, T* attended,
                                          float* parts, T* acted, const Rows<T>& mid, const Rows<T>& out, long long* times) {
  constexpr int HIDDEN = W::HIDDEN, INNER = W::INNER, D = W::D, HEADS = W::HEADS, GROUPS = W::Q_HEADS / HEADS;
  constexpr int Q = W::Q_HEADS * D, KV = W::KV_HEADS * D;
  using Attention = AttentionSpace<D, HEADS, WARPS>;
  constexpr int SPACE = sizeof(Attention) > 2 * sizeof(Shared<1, 2>) ? sizeof(Attention) : 2 * sizeof(Shared<1, 2>);
  __shared__ __align__(16) unsigned char space[SPACE];
  auto* one = reinterpret_cast<Shared<1, 1>*>(space);
  auto* two = reinterpret_cast<Shared<1, 2>*>(space);
  Meeting meeting(meeting_counters);
  const auto wait = [&] { meeting.wait(); };

  // Where a tile of the queries', keys' and values' rows has its weights.
  const auto of_qkv = [&](int column, Weights<T>& part) {
    if (column < Q) {
      part = layer.q;
      return column;
    }
    if (column < Q + KV) {
      part = layer.k;
      return column - Q;
    }
    part = layer.v;
    return column - Q - KV;
  };
  stamp(times, 0);
  tiles_of<T, W::QKV_BITS, W::QKV_GROUP, HIDDEN, 1>(
      (Q + 2 * KV) / 16, hw0, M, squares0, step.eps, one, [] {},
      [&](int tile, Weights<T>(&part)[1], int(&first)[1]) { first[0] = of_qkv(tile * 16, part[0]); },
      [&](int tile, const Shared<1, 1>& shared, int thread) {
        Weights<T> part;
        const int row = of_qkv(tile * 16, part);
        finish_plain<T>(shared, thread, part, row, M, true, qkv + tile * 16, Q + 2 * KV);
      });
  meeting.arrive();
  int most = 0;
  for (int m = 0; m < M; ++m) most = max(most, stretches_of<FINE_STRETCH>(step.lengths[m]));
  wait();
  stamp(times, 1);

  const int per_stretch = GROUPS * M;
#pragma unroll 1
  for (int i = blockIdx.x; i < most * per_stretch; i += gridDim.x) {
    const int stretch = i / per_stretch, of_row = i % per_stretch;
    attend<D, HEADS, NORMED, D / 8, WARPS, FINE_STRETCH>(
        *reinterpret_cast<Attention*>(space), of_row / GROUPS, of_row % GROUPS, GROUPS, stretch, qkv, cache, step.lengths, step.inverse,
        layer.q_norm, layer.k_norm, step.head_eps, W::Q_HEADS, W::KV_HEADS, step.scale, step.traditional, counters, attended, parts);
    __syncthreads();
  }
  meeting.arrive();
  tiles_of<T, W::O_BITS, W::O_GROUP, Q, 1>(
      HIDDEN / 16, attended, M, nullptr, 0.0f, one,
      [&] {
        wait();
        stamp(times, 2);
      },
      [&](int tile, Weights<T>(&part)[1], int(&first)[1]) { part[0] = layer.o, first[0] = tile * 16; },
      [&](int tile, const Shared<1, 1>& shared, int thread) {
        finish_add<T>(shared, thread, layer.o, tile, M, h0, layer.mlp_norm, mid.h, mid.hw, mid.squares);
      });
  meeting.arrive();
  tiles_of<T, W::GATE_BITS, W::GATE_GROUP, HIDDEN, 2>(
      INNER / 16, mid.hw, M, mid.squares, step.eps, two,
      [&] {
        wait();
        stamp(times, 3);
      },
      [&](int tile, Weights<T>(&part)[2], int(&first)[2]) {
        part[0] = layer.gate, part[1] = layer.up, first[0] = first[1] = tile * 16;
      },
      [&](int tile, const Shared<1, 2>& shared, int thread) {
        const int n = thread % 16, m = thread / 16, row = tile * 16 + n;
        if (m < M) {
          float a = total(shared, 0, n, m, true), b = total(shared, 1, n, m, true);
          if (layer.gate.bias) a += Type<T>::wide(layer.gate.bias[row]), b += Type<T>::wide(layer.up.bias[row]);
          acted[(size_t)m * INNER + row] = Type<T>::narrow(a / (1.0f + __expf(-a)) * b);
        }
      });
  meeting.arrive();
  tiles_of<T, W::DOWN_BITS, W::DOWN_GROUP, INNER, 1>(
      HIDDEN / 16, acted, M, nullptr, 0.0f, one,
      [&] {
        wait();
        stamp(times, 4);
      },
      [&](int tile, Weights<T>(&part)[1], int(&first)[1]) { part[0] = layer.down, first[0] = tile * 16; },
      [&](int tile, const Shared<1, 1>& shared, int thread) {
        finish_add<T>(shared, thread, layer.down, tile, M, mid.h, layer.next_norm, out.h, out.hw, out.squares);
      });
  stamp(times, 5);
  meeting.leave();
}

// out [M, N] = the normed rows times one weight's rows, by blocks that stay.
template <typename T, int BITS, int GROUP, int K>
__device__ __forceinline__ void run_head(const Weights<T>& weights, const T* x, int M, const float* squares, float eps, T* out) {
  __shared__ Shared<1, 2> space[2];
  tiles_of<T, BITS, GROUP, K, 2>(
      weights.rows / 32, x, M, squares, eps, space, [] {},
      [&](int tile, Weights<T>(&part)[2], int(&first)[2]) {
        part[0] = part[1] = weights, first[0] = tile * 32, first[1] = tile * 32 + 16;
      },
      [&](int tile, const Shared<1, 2>& shared, int thread) {
        const int n = thread % 32, m = thread / 32, row = tile * 32 + n;
        if (m < M) {
          float v = total(shared, n / 16, n % 16, m, true);
          if (weights.bias) v += Type<T>::wide(weights.bias[row]);
          out[(size_t)m * weights.rows + row] = Type<T>::narrow(v);
        }
      });
}

}  // namespace gnomon
