// ATTENTION_MERGE: the partial results of a row's chunks become its attention output.
//
// The helper does it, while the consumers are at the experts: nothing here is on their way. Its time goes to
// loads, so it asks for all of a row at once: the chunks' maxima and sums, from which their weights are found, and
// their outputs, which are copied into shared memory.
//
// It takes four tiles at once: eight lanes have four elements each, and four such groups of lanes, the shares, take the
// row's chunks in turn. A share adds its chunks in order; then (0 + 1) + (2 + 3). So a row's sum depends on its chunks
// alone.
#pragma once

#include "items.h"
#include "selection.h"
#include "wait.h"

struct Merger {
  static constexpr int SHARES = 4, SHARE_LANES = isa::WARP / SHARES;
  static constexpr int TOGETHER = 4, ROUND = SHARES * TOGETHER;  // chunks without a branch: of a share, of all
  static constexpr int NEXT = SHARES * sizes::PARTIAL_FLOATS;    // from a share's record to its next
  static_assert(isa::MAX_CHUNKS == 2 * isa::WARP && isa::MAX_CHUNKS % ROUND == 0);
  static_assert(isa::MERGED_TILES * isa::TILE_ROWS == SHARE_LANES * 4);

  static_assert(MERGE_CHUNKS % ROUND == 0);

  struct Sums {
    float total, output[4];
  };

  Shared& s;
  int lane;

  __device__ __forceinline__ int share() const { return lane / SHARE_LANES; }

  // Where this lane's elements of its share's first chunk are. Nobody else reads or writes them.
  __device__ __forceinline__ uint4* own_outputs() const { return reinterpret_cast<uint4*>(s.record) + lane; }

  // Ask for this lane's elements of its share's chunks: `from` is the first one's. What fills up the last round is 0.
  // Gives a number that is known when all are asked for.
  __device__ __forceinline__ uint32_t fetch(const float* from, int chunks) const {
    uint32_t to = ptx::shared_address(own_outputs());
#pragma unroll 1
    do {
#pragma unroll
      for (int n = 0; n < TOGETHER; n++)
        ptx::copy_shared_data(to + n * isa::WARP * 16, from + n * NEXT, n * SHARES + share() < chunks);
      from += TOGETHER * NEXT, to += TOGETHER * isa::WARP * 16;
      chunks -= ROUND;
    } while (chunks > 0);
    return to;
  }

  // The chunks' weights, and their weighted sums, from the maxima and sums of chunks `lane` and `lane + 32`.
  __device__ __forceinline__ void weigh(const float (&maximum)[2], const float (&sum)[2]) const {
    const float largest = score_of(__reduce_max_sync(~0u, key_of(fmaxf(maximum[0], maximum[1]))));
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float weight = expf(maximum[n] - largest);
      s.chunk_weights[lane + n * isa::WARP] = make_float2(weight, weight * sum[n]);
    }
  }

  // Add the outputs of this lane's share, weighted, of `chunks` chunks from the first on that has been fetched.
  __device__ __forceinline__ void add(Sums& sums, int first, int chunks) const {
    const uint4* output = own_outputs();
    const float2* weights = s.chunk_weights + first + share();
#pragma unroll 1
    do {
#pragma unroll
      for (int n = 0; n < TOGETHER; n++) {
        const uint4 part = output[n * isa::WARP];
        const float2 weight = weights[n * SHARES];
        sums.total += weight.y;
        sums.output[0] += weight.x * __uint_as_float(part.x);
        sums.output[1] += weight.x * __uint_as_float(part.y);
        sums.output[2] += weight.x * __uint_as_float(part.z);
        sums.output[3] += weight.x * __uint_as_float(part.w);
      }
      output += TOGETHER * isa::WARP, weights += TOGETHER * SHARES;
      chunks -= ROUND;
    } while (chunks > 0);
  }

  // What all shares come to.
  __device__ __forceinline__ uint2 added_up(Sums sums) const {
#pragma unroll
    for (int distance = SHARE_LANES; distance < isa::WARP; distance *= 2) {
      sums.total += __shfl_xor_sync(~0u, sums.total, distance);
#pragma unroll
      for (int n = 0; n < 4; n++) sums.output[n] += __shfl_xor_sync(~0u, sums.output[n], distance);
    }
    const float scale = 1.0f / sums.total;
    return make_uint2(ptx::pack(sums.output[0] * scale, sums.output[1] * scale),
                      ptx::pack(sums.output[2] * scale, sums.output[3] * scale));
  }

  // Four elements of a row, from `dim` of a query head on. `records` are the row's, of the head's KV head; `member` is
  // the head's place among that one's.
  __device__ __forceinline__ uint2 merged(const float* records, int member, int dim, int chunks) const {
    float maximum[2], sum[2];
    const float* own = records + lane * sizes::PARTIAL_FLOATS + GROUP * HEAD_DIM + member;
#pragma unroll
    for (int n = 0; n < 2; n++, own += isa::WARP * sizes::PARTIAL_FLOATS) {
      maximum[n] = -ptx::infinity(), sum[n] = 0;
      if (lane + n * isa::WARP >= chunks) continue;
      maximum[n] = ptx::load_shared_float(own);
      sum[n] = ptx::load_shared_float(own + GROUP);
    }
    const float* from = records + share() * sizes::PARTIAL_FLOATS + member * HEAD_DIM + dim;
    Sums sums{};
#pragma unroll 1
    for (int first = 0; first < chunks; first += MERGE_CHUNKS, from += MERGE_CHUNKS * sizes::PARTIAL_FLOATS) {
      const int some = MERGE_CHUNKS < isa::MAX_CHUNKS ? min(chunks - first, MERGE_CHUNKS) : chunks;
      const uint32_t asked = fetch(from, some);
      if (first == 0) {
        // Or the assembler waits for the maxima first.
        maximum[0] = __uint_as_float(ptx::after(asked, __float_as_uint(maximum[0])));
        weigh(maximum, sum);
      }
      ptx::copies_done();
      __syncwarp();
      add(sums, first, some);
      if (MERGE_CHUNKS == isa::MAX_CHUNKS) break;
    }
    __syncwarp();  // the weights may be written anew
    return added_up(sums);
  }
};

// Tiles [first, first + count) of all rows; they are of one head.
__device__ __forceinline__ void merge_tiles(Shared& s, const Params& p, const ChunkTable& table, int first, int count,
                                            int lane) {
  const int index = lane % Merger::SHARE_LANES / 2, half = lane & 1, tile = first + min(index, count - 1);
  const int head = first / HEAD_TILES, dim = tile % HEAD_TILES * isa::TILE_ROWS + half * 4;
  const uint8_t* records =
      buffer_at(p, static_cast<int32_t>(isa::Buffer::PARTIALS)) + head / GROUP * isa::MAX_CHUNKS * PARTIAL_BYTES;
  uint8_t* to = buffer_at(p, static_cast<int32_t>(isa::Buffer::ATTENTION_OUT)) + tile * ROWS * 16 + half * 8;
#pragma unroll 1
  for (int row = 0; row < ROWS; row++) {
    const int chunks = table.rows[row].count;
    uint2 output = make_uint2(0, 0);
    if (chunks) output = Merger{s, lane}.merged(reinterpret_cast<const float*>(records), head % GROUP, dim, chunks);
    if (lane < 2 * count) *reinterpret_cast<uint2*>(to) = output;
    records += sizes::KV_HEADS * isa::MAX_CHUNKS * PARTIAL_BYTES, to += 16;
  }
}

__device__ __forceinline__ void attention_merge(Shared& s, const Params& p, const int32_t* words, int lane) {
  const int32_t own = __ldg(words + lane);
  auto word = [&](isa::Field field) { return __shfl_sync(~0u, own, static_cast<int>(field)); };
  static_assert(isa::WORDS == isa::WARP);
  const ChunkTable& table = table_for(s, word(isa::Field::WINDOW));
  int first = word(isa::Field::FIRST_TILE);
  const int end = first + word(isa::Field::TILE_COUNT);
#pragma unroll 1
  while (first < end) {
    const int count = min(min(isa::MERGED_TILES, end - first), HEAD_TILES - first % HEAD_TILES);
    merge_tiles(s, p, table, first, count, lane);
    first += count;
  }
  // What all lanes have written goes out with the signal.
  __syncwarp();
  uint32_t* counter = counter_at(p, word(isa::Field::SIGNAL_COUNTER));
  const uint32_t amount = word(isa::Field::SIGNAL_AMOUNT);
  if (lane == 0) ptx::add_release(counter, amount);
}
