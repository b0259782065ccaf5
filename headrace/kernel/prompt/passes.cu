// Steps of a prompt's layer that compute little and move much, each in one pass over memory.
//
// Every kernel gives the bits of its twin in headrace/model: the same roundings in the same order. Numbers are
// bfloat16, eight to a thread, unless their type says float.

struct alignas(16) Eight {
  unsigned short at[8];
};

__device__ float wide(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

// To the nearest, ties to even.
__device__ unsigned short narrow(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // not a number
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// gate_up is [rows, 2, eighths], out [rows, eighths] of Eight: silu(gate) * up. count = rows * eighths.
// A quick division, as one to the last bit would take longer than the memory: beyond x = -87 it gives 0 for 1e-36.
extern "C" __global__ void swiglu(const Eight* gate_up, Eight* out, long long count, int eighths) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const long long begin = i / eighths * 2 * eighths + i % eighths;
  const Eight gate = gate_up[begin], up = gate_up[begin + eighths];
  Eight made;
  for (int j = 0; j < 8; ++j) {
    const float x = wide(gate.at[j]);
    const float silu = wide(narrow(__fdividef(x, 1.0f + expf(-x))));
    made.at[j] = narrow(__fmul_rn(silu, wide(up.at[j])));
  }
  out[i] = made;
}

// out = x + y, rounded, + z, all of count Eights.
extern "C" __global__ void add(const Eight* x, const Eight* y, const Eight* z, Eight* out, long long count) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Eight a = x[i], b = y[i], c = z[i];
  Eight made;
  for (int j = 0; j < 8; ++j) {
    const float first = wide(narrow(__fadd_rn(wide(a.at[j]), wide(b.at[j]))));
    made.at[j] = narrow(__fadd_rn(first, wide(c.at[j])));
  }
  out[i] = made;
}

// out[token] = the sum over i of parts[places[token][i]] * weights[token][i], in this order, in float, rounded
// once. A block a token, a thread for eight columns of it.
extern "C" __global__ void combine(const Eight* parts, const int* places, const float* weights, Eight* out,
                                   int top_k) {
  const int* rows = places + static_cast<long long>(blockIdx.x) * top_k;
  const float* scales = weights + static_cast<long long>(blockIdx.x) * top_k;
  float sum[8];
#pragma unroll 8
  for (int i = 0; i < top_k; ++i) {
    const Eight part = parts[static_cast<long long>(rows[i]) * blockDim.x + threadIdx.x];
    for (int j = 0; j < 8; ++j) {
      const float product = __fmul_rn(wide(part.at[j]), scales[i]);
      sum[j] = i ? __fadd_rn(sum[j], product) : product;
    }
  }
  Eight made;
  for (int j = 0; j < 8; ++j) made.at[j] = narrow(sum[j]);
  out[static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x] = made;
}

// x and out are [tokens, heads, eighths] of Eight; cosine and sine, float [tokens, 4 * eighths], turn each pair
// of neighbours. count = tokens * heads * eighths.
extern "C" __global__ void rotate(const Eight* x, Eight* out, const float4* cosine, const float4* sine,
                                  long long count, int heads, int eighths) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const long long angle = i / eighths / heads * eighths + i % eighths;
  const Eight in = x[i];
  const float4 c = cosine[angle], s = sine[angle];
  const float cs[] = {c.x, c.y, c.z, c.w}, sn[] = {s.x, s.y, s.z, s.w};
  Eight made;
  for (int pair = 0; pair < 4; ++pair) {
    const float a = wide(in.at[2 * pair]), b = wide(in.at[2 * pair + 1]);
    made.at[2 * pair] = narrow(__fsub_rn(__fmul_rn(a, cs[pair]), __fmul_rn(b, sn[pair])));
    made.at[2 * pair + 1] = narrow(__fadd_rn(__fmul_rn(b, cs[pair]), __fmul_rn(a, sn[pair])));
  }
  out[i] = made;
}

// Whole blocks of 64 tokens of k and v, both [blocks, 64, heads, eighths] of Eight, to their pages: the order
// within these is that of headrace/model/kv.py. A block of threads for a block and KV head.
extern "C" __global__ void write_blocks(const Eight* k, const Eight* v, Eight* pages, const long long* blocks,
                                        int eighths) {
  extern __shared__ Eight tile[];  // of V: 64 tokens, each with one Eight more than it needs
  const int heads = gridDim.y, size = 64 * eighths, stride = eighths + 1;
  Eight* page = pages + (blocks[blockIdx.x] * heads + blockIdx.y) * 2 * size;
  const auto source = [&](int token, int eighth) {
    return ((blockIdx.x * 64LL + token) * heads + blockIdx.y) * eighths + eighth;
  };
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const int quarter = i % 4, e = i / 4 % 2, c = i / 8 % 4;  // of 32 columns; of a token's number
    const int columns = i / 32 % (eighths / 4), j = i / (8 * eighths) % 4, half = i / (32 * eighths);
    page[i] = k[source(32 * half + 8 * c + 2 * j + e, 4 * columns + quarter)];
    tile[i / eighths * stride + i % eighths] = v[source(i / eighths, i % eighths)];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const int tokens = 32 * (i / 32 % 2) + 8 * (i % 4), dimension = i / 64 * 8 + i / 4 % 8;
    Eight made;
    for (int j = 0; j < 8; ++j) made.at[j] = tile[(tokens + j) * stride + dimension / 8].at[dimension % 8];
    page[size + i] = made;
  }
}

// The other way: the first counts[i] tokens of page blocks[i] to rows[i] and on of k and v, [keys, heads, eighths]
// of Eight. A block of threads for a page and KV head.
extern "C" __global__ void read_blocks(const Eight* pages, const long long* blocks, const long long* rows,
                                       const long long* counts, Eight* k, Eight* v, int eighths) {
  extern __shared__ Eight tile[];  // of V, as above
  const int heads = gridDim.y, size = 64 * eighths, stride = eighths + 1;
  const Eight* page = pages + (blocks[blockIdx.x] * heads + blockIdx.y) * 2 * size;
  const int count = static_cast<int>(counts[blockIdx.x]);
  const auto target = [&](int token, int eighth) {
    return ((rows[blockIdx.x] + token) * heads + blockIdx.y) * eighths + eighth;
  };
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const int quarter = i % 4, e = i / 4 % 2, c = i / 8 % 4;
    const int columns = i / 32 % (eighths / 4), j = i / (8 * eighths) % 4, half = i / (32 * eighths);
    const int token = 32 * half + 8 * c + 2 * j + e;
    if (token < count) k[target(token, 4 * columns + quarter)] = page[i];
    const int tokens = 32 * (i / 32 % 2) + 8 * (i % 4), dimension = i / 64 * 8 + i / 4 % 8;
    const Eight values = page[size + i];
    for (int t = 0; t < 8; ++t) tile[(tokens + t) * stride + dimension / 8].at[dimension % 8] = values.at[t];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * eighths; i += blockDim.x)
    v[target(i / eighths, i % eighths)] = tile[i / eighths * stride + i % eighths];
}

// Parts of an attention: values [rows, heads, eighths] of Eight, and logarithms of sums, float [heads, rows]. Row i
// is query i's, or with rows < 0, of which there are -rows then, the last row is query 0's, and so on.
constexpr int MOST_PARTS = 16;
struct Parts {
  const Eight* values[MOST_PARTS];
  const float* sums[MOST_PARTS];
  long long rows[MOST_PARTS];
};

__device__ long long row_of(long long rows, long long query) {
  return rows < 0 ? -rows - 1 - query : query < rows ? query : -1;  // negative: there is none
}

// out [queries, heads, eighths] of Eight: the mean of `many` parts, weighed by the sums. A block a query. The first
// part may be out itself, if its rows are in order.
extern "C" __global__ void join(const Parts parts, Eight* out, int heads, int eighths, int many) {
  const long long query = blockIdx.x;
  const int width = heads * eighths;
  for (int within = threadIdx.x; within < width; within += blockDim.x) {
    const int head = within / eighths;
    const auto log_sum = [&](int p, long long row) {
      const long long rows = parts.rows[p] < 0 ? -parts.rows[p] : parts.rows[p];
      return parts.sums[p][head * rows + row];
    };
    float most = __uint_as_float(0xff800000u);  // minus infinity
    for (int p = 0; p < many; ++p) {
      const long long row = row_of(parts.rows[p], query);
      if (row >= 0) most = fmaxf(most, log_sum(p, row));
    }
    float sum[8] = {}, whole = 0.0f;
    for (int p = 0; p < many; ++p) {
      const long long row = row_of(parts.rows[p], query);
      if (row < 0) continue;
      const float weight = expf(log_sum(p, row) - most);
      const Eight part = parts.values[p][row * width + within];
      whole = __fadd_rn(whole, weight);
      for (int j = 0; j < 8; ++j) sum[j] = __fadd_rn(sum[j], __fmul_rn(wide(part.at[j]), weight));
    }
    Eight made;  // divided quickly: the largest weight is 1, so the whole is between 1 and `many`
    for (int j = 0; j < 8; ++j) made.at[j] = narrow(__fdividef(sum[j], whole));
    out[query * width + within] = made;
  }
}

// Numbers in the order of their sizes, as integers: zeros are equal, what is no number comes last.
__device__ int ordered(float value) {
  if (value != value) return 0x7fffffff;
  const int bits = static_cast<int>(__float_as_uint(value + 0.0f));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The top_k largest of each token's logits, of equal ones the first, by index, and their sigmoids: logits are
// float [tokens, experts], ids and weights [tokens, top_k]. A block a token, a thread an expert: its rank is the
// number of experts before it.
extern "C" __global__ void choose(const float* logits, long long* ids, float* weights, int experts, int top_k) {
  extern __shared__ Eight tile[];
  int* keys = reinterpret_cast<int*>(tile);
  int* found = keys + experts;  // the chosen ones by rank
  const float* row = logits + static_cast<long long>(blockIdx.x) * experts;
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) keys[expert] = ordered(row[expert]);
  __syncthreads();
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    const int key = keys[expert], own = expert / 4;
    int rank = 0;
#pragma unroll 4
    for (int four = 0; four < experts / 4; ++four) {
      const int4 others = reinterpret_cast<const int4*>(keys)[four];
      const int bar = four < own ? key - 1 : key;  // no key is the least integer
      rank += (others.x > bar) + (others.y > bar) + (others.z > bar) + (others.w > bar);
    }
    for (int other = 4 * own; other < expert; ++other) rank += keys[other] == key;
    if (rank < top_k) found[rank] = expert;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < top_k; i += blockDim.x) {
    long long at = static_cast<long long>(blockIdx.x) * top_k;
    for (int j = 0; j < top_k; ++j) at += found[j] < found[i];
    ids[at] = found[i];
    weights[at] = __fdiv_rn(1.0f, 1.0f + expf(-row[found[i]]));
  }
}

// A block's slots, [SLOTS], as words in shared memory; what is beyond the last is nobody's.
constexpr int SLOTS = 256;
__device__ int4* block_slots(const long long* ids, Eight* tile, int slots) {
  int* own = reinterpret_cast<int*>(tile);
  for (int i = threadIdx.x; i < SLOTS; i += blockDim.x) {
    const int slot = blockIdx.x * SLOTS + i;
    own[i] = slot < slots ? static_cast<int>(ids[slot]) : -1;
  }
  __syncthreads();
  return reinterpret_cast<int4*>(tile);
}

// How many of each SLOTS slots are each expert's: ids [slots], counts [experts, blocks]. A thread an expert.
extern "C" __global__ void count_slots(const long long* ids, int* counts, int slots, int experts) {
  extern __shared__ Eight tile[];
  const int4* fours = block_slots(ids, tile, slots);
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    int count = 0;
#pragma unroll 8
    for (int i = 0; i < SLOTS / 4; ++i) {
      const int4 four = fours[i];
      count += (four.x == expert) + (four.y == expert) + (four.z == expert) + (four.w == expert);
    }
    counts[expert * gridDim.x + blockIdx.x] = count;
  }
}

// The place of every slot among all, sorted by expert; ends are the sums of counts so far, these included.
extern "C" __global__ void place_slots(const long long* ids, const int* counts, const int* ends, int* places,
                                       int slots, int experts) {
  extern __shared__ Eight tile[];
  const int4* fours = block_slots(ids, tile, slots);
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    const int own = expert * gridDim.x + blockIdx.x;
    int place = ends[own] - counts[own];
#pragma unroll 4
    for (int i = 0; i < SLOTS / 4; ++i) {
      const int4 four = fours[i];
      int* to = places + blockIdx.x * SLOTS + 4 * i;
      if (four.x == expert) to[0] = place++;
      if (four.y == expert) to[1] = place++;
      if (four.z == expert) to[2] = place++;
      if (four.w == expert) to[3] = place++;
    }
  }
}

// rows[places[token][i]] = x[token] for every i: each token is read once. A block a token, a thread for eight
// columns of it.
extern "C" __global__ void spread(const Eight* x, const int* places, Eight* rows, int top_k) {
  const int* to = places + static_cast<long long>(blockIdx.x) * top_k;
  const Eight held = x[static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x];
#pragma unroll 8
  for (int i = 0; i < top_k; ++i) rows[static_cast<long long>(to[i]) * blockDim.x + threadIdx.x] = held;
}

// A packed matrix, tiles of 8 rows by columns of 32 in turn (headrace/step/layout.py), to out [matrices, rows,
// columns], both of 16 bytes. paired: a tile's rows are in turn of the upper and of the lower half. A thread takes
// eight columns of a tile's rows at a time, count such in all: so a warp reads 4 KB that lie together and writes
// 512 bytes to each of the rows. Any number of blocks does: few leave the other multiprocessors to what runs beside.
// Loads and stores stream past the L2 cache: a layer's weights do not fit in it, and what runs beside wants it.
extern "C" __global__ void unpack(const float4* stored, float4* out, unsigned count, unsigned columns,
                                  unsigned rows, int paired) {
  const unsigned eighths = columns / 8, tiles = rows / 8;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const unsigned tile = i / eighths, eighth = i % eighths, t = tile % tiles;
    const float4* from = stored + static_cast<long long>(tile) * columns + eighth / 4 * 32 + eighth % 4;
    float4* to = out + static_cast<long long>(tile / tiles) * rows * eighths + eighth;
    float4 held[8];
#pragma unroll
    for (unsigned r = 0; r < 8; ++r) held[r] = __ldcs(from + 4 * r);
#pragma unroll
    for (unsigned r = 0; r < 8; ++r) {
      const unsigned row = paired ? 4 * t + r / 2 + r % 2 * (rows / 2) : 8 * t + r;
      __stcs(to + row * eighths, held[r]);
    }
  }
}
