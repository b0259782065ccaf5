// Tiles of output rows: activations of all rows in registers, weights from the ring, sums across warps.
//
// In mma.sync.m16n8k16 one operand has 16 rows and the other eight. A lane's 16 bytes of weights x, y, z, w (8 columns of one
// row) are multiplied in two products, x, z in one and y, w in the other, whichever operand they are:
// Up to eight rows of activations are the narrow operand. The weights are the wide one just as they are loaded, if the
// tensor core takes x, z for row g and y, w for row g + 8: so the product with the activations' X, Z is right in its upper
// half, and the one with Y, W in its lower half. The other halves are thrown away: registers are short, arithmetic is not.
// Sixteen rows of activations are the wide operand, and nothing is thrown away: products cost power, and at 16 rows a GPU
// that runs out of it slows down.
//
// A tile is 8 rows of weights and all K columns, in blocks of 32 columns (headrace/step/layout.py). The warps that
// share a tile take its blocks in turn: of each page, block b goes to warp b % 8 of eight, or to warp b % 4 of four.
// With few rows two groups of four are at two tiles; from 8 on all eight are at one, so that each has half as many
// activations to put through a norm. The order of every sum is that of eight warps whichever it is, so a row has the same bits at every row capacity:
// each eighth is summed on its own, even and odd k steps apart, and then eighths 0 to 7 as
// ((0 + 4) + (1 + 5)) + ((2 + 6) + (3 + 7)).
#pragma once

#include "consumer.h"

__device__ constexpr int pages_of(int blocks) {
  const int most = isa::PAGE_BYTES_MAX / isa::UNIT;
  int pages = (blocks + most - 1) / most;
  while (blocks % pages) pages++;
  return pages;
}

// How K columns are cut.
template <int K>
struct Columns {
  static constexpr int BLOCKS = K / isa::K_BLOCK;
  static constexpr int PAGES = pages_of(BLOCKS);
  static constexpr int PER_PAGE = BLOCKS / PAGES;
  static constexpr int OWN = (PER_PAGE + TILE_WARPS - 1) / TILE_WARPS;  // of a warp, in each page
  static constexpr bool EVEN = PER_PAGE % TILE_WARPS == 0;
  // Blocks of weights that a warp holds at once: registers are short where activations take 128 of them.
  static constexpr int REGISTERS = PAGES * OWN * (WIDE ? 8 : 4);
  static constexpr int HELD = REGISTERS >= 128 ? 1 : REGISTERS >= 96 ? 2 : 4;
  static constexpr bool FIT = REGISTERS + isa::WORKING_REGISTERS <= isa::CONSUMER_REGISTERS;
};

// A warp's columns of the activations: lane 4g + c has 8 columns of row g in each of the warp's blocks, and of row
// g + 8 where the rows are many. When they are multiplied operands are neighbours: see `arrange`.
template <int K>
struct Activations {
  static constexpr bool IN_REGISTERS = true;
  static constexpr int HELD = Columns<K>::HELD;
  uint4 low[Columns<K>::PAGES * Columns<K>::OWN];
  uint4 high[WIDE ? Columns<K>::PAGES * Columns<K>::OWN : 1];

  __device__ __forceinline__ void fetch_page(Consumer&, int) const {}  // they are there

  // For the warp's i-th block of a page; where the rows are many, for one of its two products.
  __device__ __forceinline__ const uint4& at(const Consumer&, int page, int i, int product = 0) const {
    const int j = page * Columns<K>::OWN + i;
    return product ? high[WIDE ? j : 0] : low[j];
  }
};

// Whether the warp has an i-th block in a page.
template <int K>
__device__ __forceinline__ bool has_block(const Consumer& c, int i) {
  return Columns<K>::EVEN || i * TILE_WARPS + c.part() < Columns<K>::PER_PAGE;
}

// Fetch activations from a tile-major buffer, in the order X, Y, Z, W; those of rows in `users`, 0 for the others.
template <int K>
__device__ __forceinline__ void load_activations(const Consumer& c, const uint8_t* from, Activations<K>& a, uint32_t users = ~0u) {
  using C = Columns<K>;
  const int row = c.lane() >> 2, quarter = c.lane() & 3;
  const uint8_t* own = from + (quarter * ROWS + row) * 16;
  const bool low = (ROWS >= 8 || row < ROWS) && (users >> row & 1), high = users >> (row + 8) & 1;
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++) {
    const int i = j % C::OWN, block = j / C::OWN * C::PER_PAGE + i * TILE_WARPS + c.part();
    const uint8_t* at = own + static_cast<size_t>(block) * (4 * ROWS * 16);
    const bool there = has_block<K>(c, i);
    a.low[j] = there && low ? ptx::load_shared_data(at) : make_uint4(0, 0, 0, 0);
    if (WIDE) a.high[j] = there && high ? ptx::load_shared_data(at + 8 * 16) : make_uint4(0, 0, 0, 0);
  }
}

// Where eight columns of a row lie in shared memory: as in a buffer.
__device__ __forceinline__ int staged_at(int group, int row) { return (group * ROWS + row) * 16; }

// From shared memory, in the order in which they are multiplied, where they were laid out as staged_at says.
template <int K>
__device__ __forceinline__ void take_activations(const Consumer& c, const uint8_t* from, Activations<K>& a) {
  using C = Columns<K>;
  const int row = c.lane() >> 2, quarter = c.lane() & 3;
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++) {
    const int i = j % C::OWN, block = j / C::OWN * C::PER_PAGE + i * TILE_WARPS + c.part();
    const bool there = has_block<K>(c, i) && row < ROWS;
    a.low[j] = there ? *reinterpret_cast<const uint4*>(from + staged_at(block * 4 + quarter, row)) : make_uint4(0, 0, 0, 0);
  }
}

// Activations of few rows that stay in shared memory: all registers are there for weights.
template <int K>
struct Staged {
  static constexpr bool IN_REGISTERS = false;
  static constexpr int HELD = Columns<K>::OWN < 8 ? Columns<K>::OWN : 8;
  const uint8_t* from;

  __device__ __forceinline__ void fetch_page(Consumer&, int) const {}

  // Whatever lanes have whose row there is not: their results are nobody's.
  __device__ __forceinline__ uint4 at(const Consumer& c, int page, int i) const {
    const int block = page * Columns<K>::PER_PAGE + i * TILE_WARPS + c.part();
    return *reinterpret_cast<const uint4*>(from + staged_at(block * 4 + (c.lane() & 3), (c.lane() >> 2) % ROWS));
  }
};

// Eight columns in the order in which they are multiplied.
__device__ __forceinline__ uint4 arranged(const uint4& fetched) { return make_uint4(fetched.x, fetched.z, fetched.y, fetched.w); }

// Fetched activations in the order in which they are multiplied, once and for all: the assembler would rather do it anew for
// every product. Where the rows are many, `low` becomes the operand of x, z, and `high` that of y, w.
template <int K>
__device__ __forceinline__ void arrange(const Activations<K>& fetched, Activations<K>& a) {
  constexpr bool FEW = Columns<K>::REGISTERS <= 64;
  auto moved = [](uint32_t word) { return FEW ? ptx::settled(word) : word; };
#pragma unroll
  for (int j = 0; j < Columns<K>::PAGES * Columns<K>::OWN; j++) {
    // Read whole before it is written: both may be the same.
    const uint4 low = fetched.low[j], high = fetched.high[WIDE ? j : 0];
    if constexpr (WIDE) {
      a.low[j] = make_uint4(low.x, moved(high.x), low.z, moved(high.z));
      a.high[j] = make_uint4(moved(low.y), high.y, moved(low.w), high.w);
    } else {
      a.low[j] = make_uint4(low.x, moved(low.z), moved(low.y), low.w);
    }
  }
}

// Sums of a tile half (8 rows of weights): [half of the pages' blocks][x and z, or y and w]. Where there are eight warps a
// page has but one half.
struct Sums {
  static constexpr int EIGHTS = WIDE ? 2 : 1, PARTS = 8 / TILE_WARPS;
  float value[PARTS][2][4];
};

// Put the input of a down projection into Shared::input: `count` groups of eight columns of a row, as they follow one
// another in a buffer. For all consumers, who have met since the last use of what lies there.
template <int MOST>
__device__ __forceinline__ void stage(Consumer& c, const uint8_t* from, int count) {
  constexpr int EACH = (MOST + CONSUMERS - 1) / CONSUMERS;
  uint4 word[EACH];
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const int at = n * CONSUMERS + static_cast<int>(c.thread);
    word[n] = at < count ? ptx::load_shared_data(from + at * 16) : make_uint4(0, 0, 0, 0);
  }
  if (c.thread == 0) c.s.input_norm = -1;  // it is no norm's any more
#pragma unroll
  for (int n = 0; n < EACH; n++) {
    const int at = n * CONSUMERS + static_cast<int>(c.thread);
    if (at < count) reinterpret_cast<uint4*>(c.s.input)[at] = arranged(word[n]);
  }
  c.meet_all();
}

// Multiply 8 rows of weights, whose pages are the next in the ring, with Activations, Staged or Streamed ones.
template <int K, typename Input>
__device__ __forceinline__ Sums multiply(Consumer& c, RingPlace& ring, const Input& a) {
  using C = Columns<K>;
  constexpr int HELD = Input::HELD, PAGES_TOGETHER = Input::IN_REGISTERS ? C::PAGES : 1;
  Sums sums;
#pragma unroll
  for (int n = 0; n < Sums::PARTS * 2 * 4; n++) (&sums.value[0][0][0])[n] = 0;
#pragma unroll PAGES_TOGETHER
  for (int page = 0; page < C::PAGES; page++) {
    a.fetch_page(c, page);
    wait_barrier(c.s, &c.s.page_full[ring.slot], ring.parity(), Waited::PAGE_LANDED, ring.slot);
    const uint4* from = reinterpret_cast<const uint4*>(c.s.ring[ring.slot]) + c.part() * 32 + c.lane();
#pragma unroll
    for (int begin = 0; begin < C::OWN; begin += HELD) {
      uint4 b[HELD];
#pragma unroll
      for (int i = 0; i < HELD && begin + i < C::OWN; i++)
        b[i] = has_block<K>(c, begin + i) ? from[(begin + i) * TILE_WARPS * 32] : make_uint4(0, 0, 0, 0);
      if (begin + HELD >= C::OWN) release_page(c.s, c.lane(), ring.slot, TILE_WARPS);
#pragma unroll
      for (int i = 0; i < HELD && begin + i < C::OWN; i++) {
        if (!has_block<K>(c, begin + i)) continue;
        if constexpr (WIDE) {
          ptx::multiply_add(sums.value[0][0], a.at(c, page, begin + i, 0), b[i].x, b[i].z);
          ptx::multiply_add(sums.value[0][1], a.at(c, page, begin + i, 1), b[i].y, b[i].w);
        } else {
          const int part = (begin + i) % Sums::PARTS;
          const uint4 x = a.at(c, page, begin + i);
          ptx::multiply_add(sums.value[part][0], b[i], x.x, x.y);
          ptx::multiply_add(sums.value[part][1], b[i], x.z, x.w);
        }
      }
    }
    ring.advance(1);
  }
  return sums;
}

// The results of 8 weight rows in the warp that finishes their tile. Lane 4g + c has outputs 2c and 2c + 1 of row g, and
// of row g + 8 where the rows are many.
struct Results {
  float2 value[Sums::EIGHTS];
};

// A lane's part of a tile, before it is added to the other warps'. Few rows: rows 2c and 2c + 1 of the activations, output g.
// Many: row g or g + 8, outputs 2c and 2c + 1.
struct Part {
  float2 value[Sums::EIGHTS][Sums::PARTS];

  Part() = default;
  __device__ __forceinline__ explicit Part(const Sums& sums) {
#pragma unroll
    for (int n = 0; n < Sums::EIGHTS; n++)
#pragma unroll
      for (int part = 0; part < Sums::PARTS; part++) {
        const auto& v = sums.value[part];
        const int first = 2 * n, second = WIDE ? first : 2;
        value[n][part] = make_float2(v[0][first] + v[1][second], v[0][first + 1] + v[1][second + 1]);
      }
  }
};

// Adding up a tile's parts across its warps, in the order above. They leave them in one of two buffers, in turn; one of
// them, in turn as well, finishes the tile, and the others go on: they wait only for a buffer whose last reader is late.
struct Turn {
  int32_t which;
  uint32_t parity;
  bool mine;  // to finish
};

// For all warps of a tile, as all below.
__device__ __forceinline__ Turn begin_turn(Consumer& c) {
  const Turn turn{static_cast<int32_t>(c.turn & 1), c.turn / 2 & 1, c.finishes()};
  c.turn++;
  wait_barrier(c.s, &c.s.sums_empty[c.group()][turn.which], turn.parity ^ 1, Waited::SUMS_EMPTY, turn.which);
  return turn;
}

// Where an output of a row is in a partial sum: the two that a lane has are neighbours.
__device__ __forceinline__ int sum_at(int row, int output) { return WIDE ? row * isa::TILE_ROWS + output : output * SUM_ROWS + row; }

// Part `place` of the two that a turn has room for.
__device__ __forceinline__ void leave_part(Consumer& c, const Turn& turn, int place, const Part& part) {
#pragma unroll
  for (int n = 0; n < Sums::EIGHTS; n++) {
    float2 sum = part.value[n][0];
    if constexpr (Sums::PARTS == 2) sum = make_float2(sum.x + part.value[n][1].x, sum.y + part.value[n][1].y);
    const int g = c.lane() >> 2, two = (c.lane() & 3) * 2, at = WIDE ? sum_at(g, two) : sum_at(two, g);
    if (WIDE || two < SUM_ROWS) *reinterpret_cast<float2*>(&c.s.sums[turn.which][c.warp()][place * Sums::EIGHTS + n][at]) = sum;
  }
}

// All parts of this warp are left. True in the warp that finishes, when those of the others are there, too.
__device__ __forceinline__ bool parts_left(Consumer& c, const Turn& turn) {
  __syncwarp();
  uint64_t* full = &c.s.sums_full[c.group()][turn.which];
  if (c.lane() == 0) ptx::barrier_arrive(full, 1);
  if (turn.mine) wait_barrier(c.s, full, turn.parity, Waited::SUMS_FULL, turn.which);
  return turn.mine;
}

__device__ __forceinline__ Results added_up(const Consumer& c, const Turn& turn, int place) {
  const auto& buffer = c.s.sums[turn.which];
  const int first = c.warp() - c.part(), row = (c.lane() >> 2) % SUM_ROWS, output = (c.lane() & 3) * 2;
  Results results;
#pragma unroll
  for (int n = 0; n < Sums::EIGHTS; n++) {
    float total[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int at = sum_at(row, output + e);
      float q[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        q[w] = buffer[first + w][place * Sums::EIGHTS + n][at];
        if (TILE_WARPS == 8) q[w] += buffer[(w + 4) % CONSUMER_WARPS][place * Sums::EIGHTS + n][at];
      }
      total[e] = (q[0] + q[1]) + (q[2] + q[3]);
    }
    results.value[n] = make_float2(total[0], total[1]);
  }
  return results;
}

// The finishing warp has read its sums.
__device__ __forceinline__ void end_turn(Consumer& c, const Turn& turn) {
  __syncwarp();
  if (c.lane() == 0) ptx::barrier_arrive(&c.s.sums_empty[c.group()][turn.which], 1);
}

// Call `finish(index, half, results)` for every 8 weight rows of every tile, of which there are `halves`, at most
// MOST_HALVES, and `done(index)` for every tile; in the warp that finishes it.
template <int K, int MOST_HALVES, typename Input, typename Finish, typename Done>
__device__ __forceinline__ void each_tile(Consumer& c, int tiles, int halves, const Input& a, Finish finish, Done done) {
  using C = Columns<K>;
#pragma unroll 1
  for (int index = 0; index < tiles; index++) {
    if (c.owns_tile(index)) {
      RingPlace ring = c.ring;
      if (TILE_GROUPS > 1) let_copier_come(c.s, ring, C::PAGES * MOST_HALVES);
      const Turn turn = begin_turn(c);
#pragma unroll 1
      for (int half = 0; half < halves; half++) leave_part(c, turn, half, Part(multiply<K>(c, ring, a)));
      if (parts_left(c, turn)) {
        Results results[MOST_HALVES];
#pragma unroll
        for (int half = 0; half < MOST_HALVES; half++) results[half] = added_up(c, turn, half);
        end_turn(c, turn);  // others may leave the next parts while these are finished
#pragma unroll 1
        for (int half = 0; half < halves; half++) {
          finish(index, half, results[0]);
          results[0] = results[MOST_HALVES - 1];  // finishing is one piece of code
        }
        done(index);
      }
    }
    c.ring.advance(C::PAGES * halves);
  }
}

// Call `visit(row, which)` for the rows whose results a lane holds: value[..][which].
template <typename Visit>
__device__ __forceinline__ void each_own_row(const Consumer& c, Visit visit) {
  const int row = c.lane() >> 2;
  if (ROWS >= 8 || row < ROWS) visit(row, 0);
  if (WIDE) visit(row + 8, WIDE ? 1 : 0);
}
