// Attention of single queries over codes, in the tensor cores; see codes.cuh and attention.cuh, which come before.
//
// Scores are mma.m16n8k16 with up to 8 query heads as A and 8 keys' codes as B, outputs the same with weights as A and 16 values' codes as
// B. Codes are whole numbers, exact in f16 and bf16; queries and weights are two numbers each, what f16 or bf16 holds of them in rows 0-7 of
// A and what is missing in rows 8-15. Numbers of groups are applied in float32: to scores behind the product, to weights before it.
//
// A row's keys are cut as in attention.cuh: into stretches by its own length alone, 16 keys a warp at a time, added up in order.
namespace gnomon {

__device__ __forceinline__ unsigned pair(__half2 v) { return *reinterpret_cast<unsigned*>(&v); }
__device__ __forceinline__ unsigned pair(__nv_bfloat162 v) { return *reinterpret_cast<unsigned*>(&v); }
__device__ __forceinline__ unsigned minus_half(unsigned a, unsigned b) {
  return pair(__hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b)));
}
__device__ __forceinline__ unsigned minus_bf16(unsigned a, unsigned b) {
  return pair(__hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b)));
}
__device__ __forceinline__ void mma_half(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Keys' codes as B of two products over 32 elements. Lane (key g, t) has elements 8t .. 8t + 7 of them; which one is half `half` of
// register `b` in product `step` is `element`.
template <typename K>
struct KeyCodes {
  static __device__ __forceinline__ int element(int step, int b, int half) {
    return K::BITS == 4 ? step * 2 + b + 4 * half : step * 4 + b * 2 + half;
  }
  static __device__ __forceinline__ void read(const char* row, int block, int t, unsigned (&b)[2][2]) {
    if constexpr (K::BITS == 4) {
      const unsigned w = reinterpret_cast<const unsigned*>(row)[block * 4 + t];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = minus_half(((w >> (4 * i)) & 0x000f000fu) | 0x64006400u, 0x64006400u);
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        unsigned w = K::four(row, (block * 4 + t) * 2 + step);
        if constexpr (K::BITS == 8) {
          constexpr bool IS_SIGNED = K::CODING == SHIFTED;
          if (IS_SIGNED) w ^= 0x80808080u;
          const unsigned zero = IS_SIGNED ? 0x64806480u : 0x64006400u;
          b[step][0] = minus_half(__byte_perm(w, 0x64646464u, 0x4140), zero);
          b[step][1] = minus_half(__byte_perm(w, 0x64646464u, 0x4342), zero);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned low = (w >> (2 * i * K::BITS)) & K::MASK, high = (w >> ((2 * i + 1) * K::BITS)) & K::MASK;
            b[step][i] = minus_half(low | (high << 16) | 0x64006400u, 0x64006400u);
          }
        }
      }
    }
  }
};

// Values' codes of 16 keys as B, a block of elements at a time: lane (g, t) has elements g * TILES .. of keys 2t, 2t + 1, 2t + 8, 2t + 9, and
// element j of them belongs to product j. Codes of 8 bits come less 128. ROTATED: levels, as two numbers.
template <typename V>
struct ValueCodes {
  static constexpr int BLOCK = V::BITS == 4 && V::CODING != ROTATED && V::GROUP >= 64 ? 64 : 32, TILES = BLOCK / 8;
  static constexpr int PARTS = V::CODING == ROTATED ? 2 : 1;
  static constexpr float ZERO = V::BITS == 8 ? 128.0f : 0.0f;

  // Of two keys: b[part][tile].
  static __device__ __forceinline__ void read(const char* row0, const char* row1, int block, int g, const unsigned* levels,
                                              unsigned (&b)[PARTS][TILES]) {
    if constexpr (BLOCK == 64) {
      const unsigned w0 = reinterpret_cast<const unsigned*>(row0)[block * 8 + g];
      const unsigned w1 = reinterpret_cast<const unsigned*>(row1)[block * 8 + g];
      const unsigned low = __byte_perm(w0, w1, 0x5410), high = __byte_perm(w0, w1, 0x7632);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b[0][j] = minus_bf16(((low >> (4 * j)) & 0x000f000fu) | 0x43004300u, 0x43004300u);
        b[0][4 + j] = minus_bf16(((high >> (4 * j)) & 0x000f000fu) | 0x43004300u, 0x43004300u);
      }
    } else {
      const unsigned w0 = V::four(row0, block * 8 + g), w1 = V::four(row1, block * 8 + g);
      if constexpr (V::CODING == ROTATED) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned e0 = levels[(w0 >> (j * V::BITS)) & V::MASK], e1 = levels[(w1 >> (j * V::BITS)) & V::MASK];
          b[0][j] = __byte_perm(e0, e1, 0x5410), b[1][j] = __byte_perm(e0, e1, 0x7632);
        }
      } else if constexpr (V::BITS == 8) {
        const unsigned even = __byte_perm(w0, w1, 0x5140), odd = __byte_perm(w0, w1, 0x7362);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // 128 plus the low 7 bits, less 128 or 256 as the eighth says.
          const unsigned x = __byte_perm(j < 2 ? even : odd, 0x43434343u, j % 2 ? 0x4342 : 0x4140);
          b[0][j] = minus_bf16(x & 0xff7fff7fu, (x & 0x00800080u) ^ 0x43804380u);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned x = ((w0 >> (j * V::BITS)) & V::MASK) | (((w1 >> (j * V::BITS)) & V::MASK) << 16);
          b[0][j] = minus_bf16(x | 0x43004300u, 0x43004300u);
        }
      }
    }
  }
};

struct Words {
  unsigned* p;
  long long row, head, slot;  // strides
};

// `count` rows of words into shared memory word by word, by one warp.
template <typename C>
__device__ __forceinline__ void copy_rows(char* into, const unsigned* from, long long slot, int count) {
#pragma unroll 1
  for (int c = threadIdx.x & 31; c < count * C::WORDS; c += 32) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(into + c * 4);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from + c / C::WORDS * slot + c % C::WORDS) : "memory");
  }
}

// Whole blocks of memory, by one thread; `barrier` waits for their bytes.
__device__ __forceinline__ void copy_block(char* into, const unsigned* from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   (unsigned)__cvta_generic_to_shared(into)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

constexpr int TILE_KEYS = 16;
constexpr int ROOM = 36 * 1024;  // of shared memory for tiles

template <typename K, typename V>
struct Stages {
  static constexpr int KEYS = TILE_KEYS * K::ROW, TILE = (KEYS + TILE_KEYS * V::ROW + 15) / 16 * 16;
  static constexpr int FIT = ROOM / (TILE * ATTENTION_WARPS), COUNT = FIT > 4 ? 4 : FIT;
  static_assert(COUNT >= 2, "room for two tiles of a warp");
};

template <typename K, typename V, int HEADS, int MOST>
struct CodedShared {
  static constexpr int D = K::DIM, TILES = Stages<K, V>::TILE * Stages<K, V>::COUNT * ATTENTION_WARPS;
  static constexpr int OUTS = ATTENTION_WARPS * HEADS * D * 4;
  union {
    __align__(16) char tiles[TILES];
    float outs[ATTENTION_WARPS][HEADS][D];
    struct {
      float tops[MOST * HEADS], totals[MOST * HEADS], shares[MOST * HEADS];
    };
  };
  uint4 queries[D / 16][32];
  union {
    float q[HEADS * D];
    float result[HEADS * D];
  };
  struct {
    float cosine[D / 2], sine[D / 2], k[D], v[D];
    unsigned char places[2][D];
  } fresh;
  unsigned long long ready[ATTENTION_WARPS][Stages<K, V>::COUNT];
  unsigned key[K::WORDS], value[V::WORDS];
  unsigned levels[V::CODING == ROTATED ? V::LEVELS : 1];
  float unit[8], sum_q[8][K::GROUPS];
  float most[ATTENTION_WARPS][HEADS], sums[ATTENTION_WARPS][HEADS];
  int is_last;
};

// Queries in shared.q to A of the products, scaled by a power of two per head to lie within 1. All threads; ends without a barrier.
template <typename K, int HEADS, typename S>
__device__ __forceinline__ void split_queries(S& shared, float scale) {
  constexpr int D = K::DIM;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int h = warp; h < 8; h += ATTENTION_WARPS) {
    if (h >= HEADS) {
      for (int group = lane; group < K::GROUPS; group += 32) shared.sum_q[h][group] = 0.0f;
      if (lane == 0) shared.unit[h] = 0.0f;
      continue;
    }
    float most = 0.0f;
    for (int d = lane; d < D; d += 32) most = fmaxf(most, fabsf(shared.q[h * D + d]));
#pragma unroll
    for (int o = 16; o; o >>= 1) most = fmaxf(most, across(most, o));
    int exponent = 0;
    if (most > 0.0f && most < INFINITY) frexpf(most, &exponent);
    exponent = max(-100, min(100, exponent));
    const float up = ldexpf(1.0f, exponent), down = ldexpf(1.0f, -exponent);
    for (int d = lane; d < D; d += 32) shared.q[h * D + d] *= down;
    __syncwarp();
#pragma unroll
    for (int group = 0; group < K::GROUPS; ++group) {
      float sum = 0.0f;
#pragma unroll
      for (int d = lane; d < K::GROUP; d += 32) sum += shared.q[h * D + group * K::GROUP + d];
#pragma unroll
      for (int o = 16; o; o >>= 1) sum += across(sum, o);
      if (lane == 0) shared.sum_q[h][group] = sum;
    }
    if (lane == 0) shared.unit[h] = scale * 1.4426950408889634f * up;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < D / 16 * 32; i += ATTENTION_WARPS * 32) {
    const int step = i / 32, g = (i & 31) >> 2, t = i & 3;
    unsigned parts[2][2];  // [register of B][part]
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float v[2] = {0.0f, 0.0f};
      if (g < HEADS)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          v[half] = shared.q[g * D + step / 2 * 32 + t * 8 + KeyCodes<K>::element(step % 2, b, half)];
      const __half2 high = __floats2half2_rn(v[0], v[1]);
      const float2 back = __half22float2(high);
      parts[b][0] = pair(high), parts[b][1] = pair(__floats2half2_rn(v[0] - back.x, v[1] - back.y));
    }
    shared.queries[step][i & 31] = make_uint4(parts[0][0], parts[0][1], parts[1][0], parts[1][1]);
  }
}

template <typename K, typename V>
struct Running {
  float most, sum, shift[V::GROUPS], o[V::DIM / 8][4];

  __device__ __forceinline__ void clear() {
    most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < V::GROUPS; ++i) shift[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < V::DIM / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
  }
};

// 16 keys, of which `valid` count; their rows of words lie at keys and values in shared memory.
template <typename K, typename V>
__device__ __forceinline__ void take(Running<K, V>& mine, const char* keys, const char* values, int valid, const uint4 (*queries)[32],
                                     const unsigned* levels, const float (&sum_q)[K::GROUPS], float unit) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float p[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    p[h][0] = p[h][1] = 0.0f;
    const char* row = keys + (h * 8 + g) * K::ROW;
#pragma unroll
    for (int group = 0; group < K::GROUPS; ++group) {
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < K::GROUP / 32; ++i) {
        const int block = group * (K::GROUP / 32) + i;
        unsigned b[2][2];
        KeyCodes<K>::read(row, block, t, b);
        mma_half(d, queries[block * 2][lane], b[0][0], b[0][1]);
        mma_half(d, queries[block * 2 + 1][lane], b[1][0], b[1][1]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const char* own = keys + (h * 8 + 2 * t + c) * K::ROW;
        const float first = K::number(own, 0, group);
        float second = K::number(own, 1, group);
        if (K::CODING == SHIFTED) second *= first;
        p[h][c] = fmaf(first, d[c] + d[2 + c], fmaf(second, sum_q[group], p[h][c]));
      }
    }
  }
  float top = mine.most;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      p[h][c] = h * 8 + 2 * t + c < valid ? p[h][c] * unit : -INFINITY;
      top = fmaxf(top, p[h][c]);
    }
  top = fmaxf(top, across(top, 1));
  top = fmaxf(top, across(top, 2));
  if (__any_sync(0xffffffffu, top != mine.most)) {
    const float keep = weight_of(mine.most, top);
    mine.most = top;
    mine.sum *= keep;
#pragma unroll
    for (int i = 0; i < V::GROUPS; ++i) mine.shift[i] *= keep;
#pragma unroll
    for (int i = 0; i < V::DIM / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) mine.o[i][j] *= keep;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      p[h][c] = weight_of(p[h][c], top);
      mine.sum += p[h][c];
    }
  const char *row0 = values + 2 * t * V::ROW, *row1 = row0 + V::ROW;
#pragma unroll
  for (int group = 0; group < V::GROUPS; ++group) {
    unsigned high[2], low[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float w[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        // What lies behind the last key may be anything.
        const bool is_there = h * 8 + 2 * t + c < valid;
        const char* own = values + (h * 8 + 2 * t + c) * V::ROW;
        const float first = is_there ? V::number(own, 0, group) : 0.0f;
        w[c] = p[h][c] * first;
        if constexpr (V::NUMBERS == 2) {
          const float second = is_there ? fmaf(first, ValueCodes<V>::ZERO, V::number(own, 1, group)) : 0.0f;
          mine.shift[group] = fmaf(p[h][c], second, mine.shift[group]);
        }
      }
      const __nv_bfloat162 both = __floats2bfloat162_rn(w[0], w[1]);
      high[h] = pair(both);
      low[h] = pair(__floats2bfloat162_rn(w[0] - __uint_as_float(high[h] << 16), w[1] - __uint_as_float(high[h] & 0xffff0000u)));
    }
    const uint4 a = make_uint4(high[0], low[0], high[1], low[1]);
    using Read = ValueCodes<V>;
#pragma unroll
    for (int i = 0; i < V::GROUP / Read::BLOCK; ++i) {
      const int block = group * (V::GROUP / Read::BLOCK) + i;
      unsigned b0[Read::PARTS][Read::TILES], b1[Read::PARTS][Read::TILES];
      Read::read(row0, row1, block, g, levels, b0);
      Read::read(row0 + 8 * V::ROW, row1 + 8 * V::ROW, block, g, levels, b1);
#pragma unroll
      for (int j = 0; j < Read::TILES; ++j)
#pragma unroll
        for (int part = 0; part < Read::PARTS; ++part) mma_bf16(mine.o[block * Read::TILES + j], a, b0[part][j], b1[part][j]);
    }
  }
}

// Where a block's keys and values lie, and its warps' tiles of them: tile `warp`, `warp` + 4, ... Whole tiles come as blocks of memory, the last one
// of a row, and rows that don't lie one behind the other, word by word.
template <typename K, typename V>
struct Tiles {
  using S = Stages<K, V>;
  const unsigned *keys, *values;
  long long key_slot, value_slot;
  int k0, k1, held, count;
  bool whole;
  char* room;
  unsigned ready;

  // Slots of a stretch up to `last`, which is not there yet if `has_new`.
  template <typename Shared>
  __device__ __forceinline__ Tiles(const unsigned* keys, long long key_slot, const unsigned* values, long long value_slot, int stretch,
                                   int size, int last, bool has_new, Shared& shared)
      : keys(keys), values(values), key_slot(key_slot), value_slot(value_slot), k0(stretch * size), k1(min(last + 1, k0 + size)),
        held(has_new ? last : k1), count((k1 - k0 + TILE_KEYS - 1) / TILE_KEYS),
        whole(key_slot == K::WORDS && value_slot == V::WORDS && !((size_t)keys & 15) && !((size_t)values & 15)),
        room(shared.tiles + (threadIdx.x >> 5) * S::COUNT * S::TILE),
        ready((unsigned)__cvta_generic_to_shared(&shared.ready[threadIdx.x >> 5][0])) {}

  __device__ __forceinline__ int rows(int tile) const { return min(TILE_KEYS, held - k0 - tile * TILE_KEYS); }

  __device__ __forceinline__ void ask(int tile, int stage) const {
    if (tile >= count) return;
    const int n = rows(tile);
    const long long first = k0 + tile * TILE_KEYS;
    char* into = room + stage * S::TILE;
    if (whole && n == TILE_KEYS) {
      if ((threadIdx.x & 31) == 0) {
        const unsigned barrier = ready + stage * 8;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(TILE_KEYS * (K::ROW + V::ROW))
                     : "memory");
        copy_block(into, keys + first * K::WORDS, TILE_KEYS * K::ROW, barrier);
        copy_block(into + S::KEYS, values + first * V::WORDS, TILE_KEYS * V::ROW, barrier);
      }
    } else if (n > 0) {
      copy_rows<K>(into, keys + first * key_slot, key_slot, n);
      copy_rows<V>(into + S::KEYS, values + first * value_slot, value_slot, n);
    }
  }
  __device__ __forceinline__ void begin() const {
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
      for (int s = 0; s < S::COUNT; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready + s * 8) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < S::COUNT - 1; ++s) ask((threadIdx.x >> 5) + s * ATTENTION_WARPS, s);
  }
  // Until the tile is there that the warp takes as its `turn`-th.
  __device__ __forceinline__ void wait(int tile, int turn) const {
    if (whole && rows(tile) == TILE_KEYS) {
      unsigned done = 0;
      while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(ready + turn % S::COUNT * 8), "r"(turn / S::COUNT & 1)
                     : "memory");
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
    __syncwarp();
  }
};

// Attention of HEADS query heads, in shared.q, over the tiles that were begun, up to slot `last`; where those of all `used` stretches are done,
// the result in out, heads `out_head` apart. With `has_new`, slot `last` is in shared.key and shared.value instead.
template <typename K, typename V, int HEADS, int MOST, typename T>
__device__ __forceinline__ void attend_codes(CodedShared<K, V, HEADS, MOST>& shared, const Tiles<K, V>& tiles, int last, bool has_new,
                                             float scale, const float* signs, int of_row, int stretch, int used, int* counters,
                                             float* parts, T* out, int out_head) {
  constexpr int D = K::DIM;
  using S = Stages<K, V>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  split_queries<K, HEADS>(shared, scale);
  __syncthreads();

  Running<K, V> mine;
  mine.clear();
  float sum_q[K::GROUPS];
#pragma unroll
  for (int i = 0; i < K::GROUPS; ++i) sum_q[i] = shared.sum_q[g][i];
  const float unit = shared.unit[g];
  for (int tile = warp, turn = 0; tile < tiles.count; tile += ATTENTION_WARPS, ++turn) {
    tiles.wait(tile, turn);
    tiles.ask(tile + (S::COUNT - 1) * ATTENTION_WARPS, (turn + S::COUNT - 1) % S::COUNT);
    const int stage = turn % S::COUNT;
    char *at = tiles.room + stage * S::TILE, *values_at = at + S::KEYS;
    const int first = tiles.k0 + tile * TILE_KEYS, valid = min(TILE_KEYS, tiles.k1 - first);
    if (has_new && first + valid == last + 1) {
      for (int w = lane; w < K::WORDS; w += 32) reinterpret_cast<unsigned*>(at + (valid - 1) * K::ROW)[w] = shared.key[w];
      for (int w = lane; w < V::WORDS; w += 32) reinterpret_cast<unsigned*>(values_at + (valid - 1) * V::ROW)[w] = shared.value[w];
      __syncwarp();
    }
    take<K, V>(mine, at, values_at, valid, shared.queries, shared.levels, sum_q, unit);
    __syncwarp();
  }
  __syncthreads();
  // The four lanes of a head, then the warps, then the stretches.
  mine.sum += across(mine.sum, 1);
  mine.sum += across(mine.sum, 2);
#pragma unroll
  for (int i = 0; i < V::GROUPS; ++i) {
    mine.shift[i] += across(mine.shift[i], 1);
    mine.shift[i] += across(mine.shift[i], 2);
  }
  if (g < HEADS) {
    if (t == 0) shared.most[warp][g] = mine.most, shared.sums[warp][g] = mine.sum;
    constexpr int TILES = ValueCodes<V>::TILES;
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int d = i / TILES * (TILES * 8) + (2 * t + c) * TILES + i % TILES;
        shared.outs[warp][g][d] = mine.o[i][c] + mine.o[i][2 + c] + mine.shift[i / TILES * (TILES * 8) / V::GROUP];
      }
  }
  __syncthreads();
  float* part = parts + ((size_t)of_row * MOST + stretch) * HEADS * (D + 2);
  for (int i = threadIdx.x; i < HEADS * D; i += ATTENTION_WARPS * 32) {
    const int h = i / D, d = i % D;
    float top = shared.most[0][h];
#pragma unroll
    for (int w = 1; w < ATTENTION_WARPS; ++w) top = fmaxf(top, shared.most[w][h]);
    float sum = 0.0f, o = 0.0f;
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; ++w) {
      const float share = weight_of(shared.most[w][h], top);
      sum = fmaf(shared.sums[w][h], share, sum), o = fmaf(shared.outs[w][h][d], share, o);
    }
    if (used == 1) {
      shared.result[i] = o / sum;
    } else {
      part[h * (D + 2) + d] = o;
      if (d == 0) part[h * (D + 2) + D] = top, part[h * (D + 2) + D + 1] = sum;
    }
  }
  if (used > 1) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = atomicAdd(&counters[of_row], 1) == used - 1;
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    const float* all = parts + (size_t)of_row * MOST * HEADS * (D + 2);
    constexpr int STEP = HEADS * (D + 2);
    for (int i = threadIdx.x; i < used * HEADS; i += ATTENTION_WARPS * 32) {
      const float* own = all + i / HEADS * STEP + i % HEADS * (D + 2) + D;
      shared.tops[i] = __ldcg(own), shared.totals[i] = __ldcg(own + 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < used * HEADS; i += ATTENTION_WARPS * 32) {
      float top = -INFINITY;
      for (int s = 0; s < used; ++s) top = fmaxf(top, shared.tops[s * HEADS + i % HEADS]);
      shared.shares[i] = weight_of(shared.tops[i], top);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * D; i += ATTENTION_WARPS * 32) {
      const int h = i / D;
      const float* own = all + h * (D + 2) + i % D;
      float sum = 0.0f, o = 0.0f;
#pragma unroll 8
      for (int s = 0; s < used; ++s) {
        const float share = shared.shares[s * HEADS + h];
        sum = fmaf(shared.totals[s * HEADS + h], share, sum), o = fmaf(__ldcg(own + s * STEP), share, o);
      }
      shared.result[i] = o / sum;
    }
    if (threadIdx.x == 0) counters[of_row] = 0;
  }
  __syncthreads();
  if constexpr (V::CODING == ROTATED) {
    for (int h = warp; h < HEADS; h += ATTENTION_WARPS) turn_back<D>(shared.result + h * D, signs);
    __syncthreads();
  }
  for (int i = threadIdx.x; i < HEADS * D; i += ATTENTION_WARPS * 32) out[i / D * out_head + i % D] = narrow<T>(shared.result[i]);
}

template <typename V, typename S>
__device__ __forceinline__ void load_levels(S& shared, const float* table) {
  if constexpr (V::CODING == ROTATED) {
    for (int i = threadIdx.x; i < V::LEVELS; i += ATTENTION_WARPS * 32) {
      const float level = table[i];
      const __nv_bfloat16 high = __float2bfloat16_rn(level);
      shared.levels[i] = pair(__halves2bfloat162(high, __float2bfloat16_rn(level - __bfloat162float(high))));
    }
  }
}

// How a row of `last + 1` keys is cut.
template <int MOST>
__device__ __forceinline__ int stretch_size(int last) { return STRETCH * (last / (STRETCH * MOST) + 1); }

// q [B, Hq, L, D] with strides, out [B, Hq, L, D] whole; query i of row b sees the slots up to starts[b] + i. One block a stretch, HEADS query
// heads and a query. parts [B * L * Hq / HEADS, MOST, HEADS, D + 2]; counters [B * L * Hq / HEADS], zero before and after.
template <typename K, typename V, int HEADS, int MOST, typename T>
__device__ __forceinline__ void attend_over_codes(const T* q, Place at, int q_heads, int width,
                                                  Words keys, Words values, int kv_heads, const int* starts, int num_starts,
                                                  const float* table, float scale, int* counters, T* out, float* parts) {
  constexpr int D = K::DIM;
  __shared__ CodedShared<K, V, HEADS, MOST> shared;
  const int b = blockIdx.z / width, i = blockIdx.z % width, group = blockIdx.y;
  const int head0 = group * HEADS, kv = head0 / (q_heads / kv_heads);
  const int last = starts[num_starts == 1 ? 0 : b] + i, size = stretch_size<MOST>(last), used = last / size + 1;
  if ((int)blockIdx.x >= used) return;
  const Tiles<K, V> tiles(keys.p + b * keys.row + kv * keys.head, keys.slot, values.p + b * values.row + kv * values.head, values.slot,
                          blockIdx.x, size, last, false, shared);
  tiles.begin();
  load_levels<V>(shared, table);
  for (int e = threadIdx.x; e < HEADS * D; e += ATTENTION_WARPS * 32)
    shared.q[e] = wide<T>(q[b * at.batch + (head0 + e / D) * at.head + i * at.slot + e % D * at.element]);
  __syncthreads();
  // The results of a block's heads lie apart where there are several queries.
  T* into = out + ((size_t)(b * q_heads + head0) * width + i) * D;
  attend_codes<K, V, HEADS, MOST, T>(shared, tiles, last, false, scale, V::CODING == ROTATED ? table + 2 * V::LEVELS - 1 : nullptr,
                                     blockIdx.z * gridDim.y + group, blockIdx.x, used, counters, parts, into, width * D);
}

// `append` of attention.cuh, over codes; a block takes one head.
template <typename K, typename KN, typename V, typename VN, bool NORMED>
__device__ __forceinline__ void append_codes(const __nv_bfloat16* qkv, Words keys, Words values, const int* spots, const float* inverse,
                                             const __nv_bfloat16* k_norm, float eps, int q_heads, int kv_heads, const float* table,
                                             bool traditional) {
  constexpr int D = K::DIM;
  __shared__ float cosine[D / 2], sine[D / 2], k_new[D], v_new[D];
  __shared__ unsigned char places[2][D];
  __shared__ unsigned words[K::WORDS + V::WORDS];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const Spot at = spot_of<true>(spots);
  const int kv = blockIdx.x, warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < D / 2; i += ATTENTION_WARPS * 32) sincosf((float)at.length * inverse[i], &sine[i], &cosine[i]);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  __syncthreads();
  const __nv_bfloat16* row = qkv + (size_t)blockIdx.z * (q_heads + 2 * kv_heads) * D;
  turn<D>(row + (q_heads + kv) * D, 1, NORMED ? k_norm : nullptr, eps, cosine, sine, traditional, k_new);
  for (int d = threadIdx.x; d < D; d += ATTENTION_WARPS * 32) v_new[d] = wide(row[(q_heads + kv_heads + kv) * D + d]);
  __syncthreads();
  for (int d = threadIdx.x; d < D; d += ATTENTION_WARPS * 32) k_new[d] = wide(narrow<__nv_bfloat16>(k_new[d]));
  __syncthreads();
  if (warp == 0) encode_row<K, KN>(k_new, nullptr, places[0], words);
  if (warp == 1) encode_row<V, VN>(v_new, table, places[1], words + K::WORDS);
  __syncthreads();
  unsigned *key = keys.p + at.row * keys.row + kv * keys.head, *value = values.p + at.row * values.row + kv * values.head;
  for (int w = threadIdx.x; w < K::WORDS; w += ATTENTION_WARPS * 32) key[at.length * keys.slot + w] = words[w];
  for (int w = threadIdx.x; w < V::WORDS; w += ATTENTION_WARPS * 32) value[at.length * values.slot + w] = words[K::WORDS + w];
}

// As `attend` of attention.cuh, over codes: the new key and value are coded into slot lengths[b] of each row. What earlier steps left is asked
// for before the kernel in front, in a graph, has ended. In a WINDOW lengths are spots, and the new keys and values are in the buffers already.
template <typename K, typename KN, typename V, typename VN, int HEADS, int MOST, bool NORMED, bool WINDOW>
__device__ __forceinline__ void append_and_attend(const __nv_bfloat16* qkv, Words keys, Words values, const int* lengths,
                                                  const float* inverse, const __nv_bfloat16* q_norm, const __nv_bfloat16* k_norm,
                                                  float eps, int q_heads, int kv_heads, const float* table, float scale, bool traditional,
                                                  int* counters, __nv_bfloat16* out, float* parts) {
  constexpr int D = K::DIM;
  __shared__ CodedShared<K, V, HEADS, MOST> shared;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int z = blockIdx.z, group = blockIdx.y, stretch = blockIdx.x, warp = threadIdx.x >> 5;
  const int per_kv = q_heads / kv_heads / HEADS, kv = group / per_kv, sub = group % per_kv, head0 = group * HEADS;
  const Spot at = spot_of<WINDOW>(lengths);
  const int b = at.row, length = at.length, size = stretch_size<MOST>(length), used = length / size + 1;
  if (stretch >= used) return;
  const bool has_new = !WINDOW && stretch == used - 1;
  auto& fresh = shared.fresh;
  unsigned *key = keys.p + b * keys.row + kv * keys.head, *value = values.p + b * values.row + kv * values.head;
  const Tiles<K, V> tiles(key, keys.slot, value, values.slot, stretch, size, length, has_new, shared);
  const bool is_there = !WINDOW || tiles.k1 <= at.start;
  if (is_there) tiles.begin();
  load_levels<V>(shared, table);
  for (int i = threadIdx.x; i < D / 2; i += ATTENTION_WARPS * 32) sincosf((float)length * inverse[i], &fresh.sine[i], &fresh.cosine[i]);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (!is_there) tiles.begin();
  __syncthreads();
  const __nv_bfloat16* row = qkv + (size_t)z * (q_heads + 2 * kv_heads) * D;
  turn<D>(row + head0 * D, HEADS, NORMED ? q_norm : nullptr, eps, fresh.cosine, fresh.sine, traditional, shared.q);
  if (has_new) {
    turn<D>(row + (q_heads + kv) * D, 1, NORMED ? k_norm : nullptr, eps, fresh.cosine, fresh.sine, traditional, fresh.k);
    for (int d = threadIdx.x; d < D; d += ATTENTION_WARPS * 32) fresh.v[d] = wide(row[(q_heads + kv_heads + kv) * D + d]);
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += ATTENTION_WARPS * 32) fresh.k[d] = wide(narrow<__nv_bfloat16>(fresh.k[d]));
    __syncthreads();
    if (warp == 0) encode_row<K, KN>(fresh.k, nullptr, fresh.places[0], shared.key);
    if (warp == 1) encode_row<V, VN>(fresh.v, table, fresh.places[1], shared.value);
    __syncthreads();
    if (sub == 0) {
      for (int w = threadIdx.x; w < K::WORDS; w += ATTENTION_WARPS * 32) key[length * keys.slot + w] = shared.key[w];
      for (int w = threadIdx.x; w < V::WORDS; w += ATTENTION_WARPS * 32) value[length * values.slot + w] = shared.value[w];
    }
  }
  __syncthreads();
  attend_codes<K, V, HEADS, MOST, __nv_bfloat16>(shared, tiles, length, has_new, scale,
                                                 V::CODING == ROTATED ? table + 2 * V::LEVELS - 1 : nullptr, z * gridDim.y + group,
                                                 stretch, used, counters, parts, out + ((size_t)z * q_heads + head0) * D, D);
}

}  // namespace gnomon
