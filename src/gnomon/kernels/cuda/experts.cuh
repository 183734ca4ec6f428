// Products with the weights of chosen experts [E, N, K], for few tokens. A pair is one token and one of its experts. As in linear.cuh, 16 rows
// of weights are the A of a matrix instruction, codes stay whole numbers, and K is cut into shares by K alone that are added in one order: a
// pair's result depends on its row of x and its expert's weights alone. Blocks of neighbouring pairs run side by side, so an expert's
// weights come from memory once for all of them; with GROUPED, the first pair of an expert takes all others of it along as columns.
#include "linear.cuh"

namespace gnomon {

constexpr int DOWN_WARPS = 16;
constexpr int MOST_PAIRS = 512;

// Weights of all experts.
template <typename T>
struct Experts {
  const void* w;  // [E, rows, K] of T, or codes
  const T* s;     // [E, rows, K / GROUP]
  const T* b;
  int rows;
};

// Two of the 16 rows of weights of a tile: those that a lane loads.
template <typename T>
struct Lines {
  const char* w[2];
  const T* s[2];
  const T* b[2];
};

template <typename T, int BITS, int GROUP>
__device__ __forceinline__ Lines<T> lines_of(const Experts<T>& experts, size_t expert, int first, int K) {
  using L = Layout<BITS, GROUP>;
  const int lane = threadIdx.x & 31;
  Lines<T> lines;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const size_t row = expert * experts.rows + min(first + (lane >> 2) + 8 * h, experts.rows - 1);
    lines.w[h] = (const char*)experts.w + row * ((size_t)K * BITS / 8) + (lane & 3) * (BITS == 16 ? 16 : L::WORDS * 4);
    if constexpr (BITS != 16) {
      lines.s[h] = experts.s + row * (K / GROUP);
      lines.b[h] = experts.b + row * (K / GROUP);
    }
  }
  return lines;
}

// acc[tile] += the tile's 16 rows of weights times up to 8 rows of x, over chunks [begin, end) of K. `x` is the row of this lane's column
// (lane / 4), or null. `fours`: a row's scales may be read four at once.
template <typename T, int BITS, int GROUP, int TILES, int U>
__device__ __forceinline__ void accumulate(const Lines<T> (&lines)[TILES], const T* x, int begin, int end, bool fours,
                                           float (&acc)[TILES][4]) {
  using L = Layout<BITS, GROUP>;
  constexpr int BYTES = L::SUB * BITS / 8;
  const int t = threadIdx.x & 3;
  const float ZERO = BITS == 8 ? 128.0f : -Type<T>::NIBBLE_ZERO;
  const Nibbles nibbles(Type<T>::MAGIC);
  const bool by_four = BITS != 16 && GROUP == 64 && U == 4 && fours && begin % 4 == 0;
  for (int c0 = begin; c0 < end; c0 += U) {
    unsigned q[U][TILES][2][L::WORDS];
    T sc[U][TILES][2], bi[U][TILES][2];
    const bool at_once = by_four && c0 + U <= end;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int c = min(c0 + u, end - 1);
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const char* p = lines[i].w[h] + (size_t)c * BYTES;
          if constexpr (BITS == 16) {
            load_weights<4>(p, &q[u][i][h][0]);
            load_weights<4>(p + 64, &q[u][i][h][4]);
          } else {
            load_weights<L::WORDS>(p, &q[u][i][h][0]);
            if (!at_once) {
              sc[u][i][h] = __ldg(lines[i].s[h] + c * L::SUB / GROUP);
              bi[u][i][h] = __ldg(lines[i].b[h] + c * L::SUB / GROUP);
            }
          }
        }
    }
    if constexpr (BITS != 16 && GROUP == 64 && U == 4) {
      if (at_once) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint2 s = __ldg(reinterpret_cast<const uint2*>(lines[i].s[h] + c0));
            const uint2 b = __ldg(reinterpret_cast<const uint2*>(lines[i].b[h] + c0));
#pragma unroll
            for (int u = 0; u < 4; ++u) {
              Pair<T> two;
              two.word = u < 2 ? s.x : s.y, sc[u][i][h] = two.part[u & 1];
              two.word = u < 2 ? b.x : b.y, bi[u][i][h] = two.part[u & 1];
            }
          }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (c0 + u >= end) break;
      unsigned xw[L::PER / 2];
#pragma unroll
      for (int j = 0; j < L::PER / 8; ++j) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (x) v = *reinterpret_cast<const uint4*>(x + (size_t)(c0 + u) * L::SUB + t * (BITS == 16 ? 8 : L::PER) + j * (BITS == 16 ? 32 : 8));
        xw[4 * j] = v.x, xw[4 * j + 1] = v.y, xw[4 * j + 2] = v.z, xw[4 * j + 3] = v.w;
        if constexpr (BITS == 4) {  // as the nibbles of a word come out: 0 with 4, 1 with 5, 2 with 6, 3 with 7
          xw[4 * j] = __byte_perm(v.x, v.z, 0x5410), xw[4 * j + 1] = __byte_perm(v.x, v.z, 0x7632);
          xw[4 * j + 2] = __byte_perm(v.y, v.w, 0x5410), xw[4 * j + 3] = __byte_perm(v.y, v.w, 0x7632);
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
              a[h] = Type<T>::nibbles(v, nibbles), a[2 + h] = Type<T>::nibbles(v >> 4, nibbles);
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
            const float scale = Type<T>::wide(sc[u][i][h]), offset = fmaf(scale, ZERO, Type<T>::wide(bi[u][i][h]));
#pragma unroll
            for (int j = 0; j < 2; ++j) acc[i][2 * h + j] = fmaf(offset, sums[j], fmaf(scale, d[2 * h + j], acc[i][2 * h + j]));
          }
        }
      }
    }
  }
}

// The pairs whose products a block computes, up to 8 at a time.
template <bool GROUPED>
struct Columns {
  int count;
  short pair[GROUPED ? MOST_PAIRS : 1];
};

// Whether the block's pair is the first of its expert; then all pairs of that expert are noted.
template <bool GROUPED, typename I>
__device__ __forceinline__ bool find_columns(const I* indices, int pairs, int pair, Columns<GROUPED>& columns) {
  if constexpr (GROUPED) {
    if (threadIdx.x == 0) columns.count = 0;
    __syncthreads();
    const I expert = indices[pair];
    bool earlier = false;
    for (int i = threadIdx.x; i < pairs; i += WARPS * 32)
      if (indices[i] == expert) {
        earlier = earlier || i < pair;
        columns.pair[atomicAdd(&columns.count, 1)] = i;
      }
    return !__syncthreads_or(earlier);
  } else {
    if (threadIdx.x == 0) columns.count = 1, columns.pair[0] = pair;
    __syncthreads();
    return true;
  }
}

// out [pairs, N] = x @ w[expert].T for TILES 1, or silu(x @ gate[expert].T) * (x @ up[expert].T) for 2. Pair p reads row p / per_row of x;
// with `squares` [rows, stretches] a row is divided by its root mean square, as in linear.cuh.
template <typename T, int BITS, int GROUP, int TILES, bool GROUPED, int U, typename I>
__device__ __forceinline__ void choose(const Experts<T> (&experts)[TILES], const T* x, const I* indices, int pairs, int per_row, int K,
                                       const float* squares, int stretches, float eps, T* out) {
  __shared__ float share[WARPS][TILES * 128], factor[WARPS];
  __shared__ Columns<GROUPED> columns;
  const int pair = blockIdx.x, first = blockIdx.y * 16, N = experts[0].rows;
  if (!find_columns<GROUPED>(indices, pairs, pair, columns)) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int chunks = K / Layout<BITS, GROUP>::SUB, part = (chunks + WARPS - 1) / WARPS;
  const int begin = min(chunks, warp * part), end = min(chunks, begin + part);
  Lines<T> lines[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) lines[i] = lines_of<T, BITS, GROUP>(experts[i], indices[pair], first, K);
  const int count = columns.count;
  for (int c0 = 0; c0 < count; c0 += 8) {
    const int column = c0 + (lane >> 2);
    const T* row = column < count ? x + (size_t)(columns.pair[column] / per_row) * K : nullptr;
    float acc[TILES][4] = {};
    accumulate<T, BITS, GROUP, TILES, U>(lines, row, begin, end, K / GROUP % 4 == 0, acc);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      *reinterpret_cast<float4*>(&share[warp][i * 128 + lane * 4]) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    if (squares && c0 + warp < count) {  // a warp per column
      const float* row_squares = squares + (size_t)(columns.pair[c0 + warp] / per_row) * stretches;
      float sum = 0.0f;
      for (int i = lane; i < stretches; i += 32) sum += row_squares[i];
#pragma unroll
      for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      if (lane == 0) factor[warp] = rsqrtf(sum / (float)K + eps);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 128; e += WARPS * 32) {
      const int n = e % 16, m = e / 16;
      if (c0 + m < count && first + n < N) {
        const int at = ((n & 7) * 4 + (m >> 1)) * 4 + (n >> 3) * 2 + (m & 1);
        float sums[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          sums[i] = share[0][i * 128 + at];
#pragma unroll
          for (int w = 1; w < WARPS; ++w) sums[i] += share[w][i * 128 + at];
          if (squares) sums[i] *= factor[m];
        }
        float v = sums[0];
        if constexpr (TILES == 2) v = v / (1.0f + __expf(-v)) * sums[1];
        out[(size_t)columns.pair[c0 + m] * N + first + n] = Type<T>::narrow(v);
      }
    }
    __syncthreads();
  }
}

// The sum over a token's experts, in their order, of share * (x[pair] @ w[expert].T), in float32, for row n of 16 in thread n of the first
// warp. One block per token and 16 rows of weights; with few experts several warps take one together.
template <typename T, int BITS, int GROUP, int U, typename I>
__device__ __forceinline__ float blended(const Experts<T>& experts, const T* x, const I* indices, const float* shares, int top, int K) {
  __shared__ float part[DOWN_WARPS][16];
  const int token = blockIdx.x, first = blockIdx.y * 16;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int per = top >= DOWN_WARPS ? 1 : DOWN_WARPS / top, step = DOWN_WARPS / per, piece = warp % per;
  const int chunks = K / Layout<BITS, GROUP>::SUB, size = (chunks + per - 1) / per;
  const int begin = min(chunks, piece * size), end = min(chunks, begin + size);
  float low = 0.0f, high = 0.0f;
  for (int slot = warp / per; slot < top && warp < per * step; slot += step) {
    const int pair = token * top + slot;
    const Lines<T> lines[1] = {lines_of<T, BITS, GROUP>(experts, indices[pair], first, K)};
    float acc[1][4] = {};
    accumulate<T, BITS, GROUP, 1, U>(lines, lane < 4 ? x + (size_t)pair * K : nullptr, begin, end, K / GROUP % 4 == 0, acc);
    low = fmaf(shares[pair], acc[0][0], low), high = fmaf(shares[pair], acc[0][2], high);
  }
  if ((lane & 3) == 0) part[warp][lane >> 2] = low, part[warp][8 + (lane >> 2)] = high;
  __syncthreads();
  const int n = threadIdx.x & 15;
  float sum = part[0][n];
#pragma unroll
  for (int w = 1; w < DOWN_WARPS; ++w) sum += part[w][n];
  return sum;
}

// out [tokens, N]
template <typename T, int BITS, int GROUP, int U, typename I>
__device__ __forceinline__ void blend(const Experts<T>& experts, const T* x, const I* indices, const float* shares, int top, int K,
                                      T* out) {
  const float sum = blended<T, BITS, GROUP, U>(experts, x, indices, shares, top, K);
  const int row = blockIdx.y * 16 + threadIdx.x;
  if (threadIdx.x < 16 && row < experts.rows) out[(size_t)blockIdx.x * experts.rows + row] = Type<T>::narrow(sum);
}

// h = residual + the sum; hw = h * weight of the norm that comes next; its sums of squares over 16 values each [tokens, N / 16].
template <typename T, int BITS, int GROUP, int U, typename I>
__device__ __forceinline__ void blend_and_add(const Experts<T>& experts, const T* x, const I* indices, const float* shares, int top,
                                              int K, const T* residual, const T* weight, T* h, T* hw, float* squares) {
  const float sum = blended<T, BITS, GROUP, U>(experts, x, indices, shares, top, K);
  if (threadIdx.x >= 32) return;
  const int n = threadIdx.x & 15, row = blockIdx.y * 16 + n;
  const size_t at = (size_t)blockIdx.x * experts.rows + row;
  const T rounded = Type<T>::narrow(sum + Type<T>::wide(residual[at]));
  const float y = Type<T>::wide(rounded);
  float square = y * y;
#pragma unroll
  for (int o = 8; o; o >>= 1) square += __shfl_xor_sync(0xffffffffu, square, o);
  if (threadIdx.x < 16) h[at] = rounded, hw[at] = Type<T>::narrow(y * Type<T>::wide(weight[row]));
  if (threadIdx.x == 0) squares[(size_t)blockIdx.x * gridDim.y + blockIdx.y] = square;
}

// The `top` largest of each row of logits [tokens, E], largest first, equal ones by number; their shares of the softmax over all E, or
// over those chosen. One warp a row; E is at most 32 * PER.
template <typename T, int PER, bool AMONG_CHOSEN>
__device__ __forceinline__ void route(const T* logits, int E, int top, unsigned* chosen, float* shares) {
  const int token = blockIdx.x, lane = threadIdx.x;
  float v[PER];
  float most = -INFINITY;
#pragma unroll
  for (int j = 0; j < PER; ++j) {
    const int e = j * 32 + lane;
    v[j] = e < E ? fmaxf(Type<T>::wide(logits[(size_t)token * E + e]), -INFINITY) : -INFINITY;  // one that is no number comes last
    most = fmaxf(most, v[j]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, o));
  float total = 0.0f;
  if constexpr (!AMONG_CHOSEN) {
#pragma unroll
    for (int j = 0; j < PER; ++j) total += __expf(v[j] - most);
#pragma unroll
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
  }
  unsigned taken = 0;
  for (int slot = 0; slot < top; ++slot) {
    float best = -INFINITY;
    int at = 0x7fffffff;
#pragma unroll
    for (int j = 0; j < PER; ++j)
      if (!(taken >> j & 1) && j * 32 + lane < E && (v[j] > best || at == 0x7fffffff)) best = v[j], at = j * 32 + lane;
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, best, o);
      const int place = __shfl_xor_sync(0xffffffffu, at, o);
      if (other > best || (other == best && place < at)) best = other, at = place;
    }
    if ((at & 31) == lane) taken |= 1u << (at >> 5);
    const float share = __expf(best - most);
    if constexpr (AMONG_CHOSEN) total += share;
    if (lane == 0) chosen[token * top + slot] = at, shares[token * top + slot] = share;
  }
  if (lane == 0)
    for (int slot = 0; slot < top; ++slot) shares[token * top + slot] /= total;
}

}  // namespace gnomon
