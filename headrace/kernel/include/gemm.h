// Tiles of output rows: activations of all rows in registers, weights from the ring, sums across warps.
//
// In mma.sync.m16n8k16 the weights are the 16-row operand and eight rows of activations the other. A lane's 16 bytes
// of weights x, y, z, w (8 columns of one row) are that operand just as they are loaded, if the tensor core takes x, z
// for row g and y, w for row g + 8: then one product with the activations' X, Z is right in its upper half, and one
// with Y, W in its lower half. The other halves are thrown away: arithmetic is free here, registers are not.
//
// A tile is 8 rows of weights and all K columns, in blocks of 32 columns (headrace/step/layout.py). The warps that
// share a tile take its blocks in turn: of each page, block b goes to warp b % 8 of eight, or to warp b % 4 of four.
// The order of every sum is that of eight warps whichever it is, so a row has the same bits at every row capacity:
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
};

// A warp's columns of the activations: lane 4g + c has 8 columns of row g in each of the warp's blocks, and of row
// g + 8 where the rows are many. In the order X, Z, Y, W when they are multiplied, so that operands are neighbours.
template <int K>
struct Activations {
  uint4 low[Columns<K>::PAGES * Columns<K>::OWN];
  uint4 high[WIDE ? Columns<K>::PAGES * Columns<K>::OWN : 1];
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

// Where eight columns of a row lie in shared memory: as in a buffer, but rows exchange places so that neither those who
// write whole rows' worth nor those who read four groups of two rows at once meet in a bank.
__device__ __forceinline__ int staged_at(int group, int row) {
  return (group * ROWS + (ROWS >= 8 ? row ^ (group & 3) << 1 : row)) * 16;
}

// Those of blocks [first, first + count), from shared memory where block `first` begins.
template <int K>
__device__ __forceinline__ void take_activations(const Consumer& c, const uint8_t* from, int first, int count, Activations<K>& a) {
  using C = Columns<K>;
  const int row = c.lane() >> 2, quarter = c.lane() & 3;
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++) {
    const int i = j % C::OWN, block = j / C::OWN * C::PER_PAGE + i * TILE_WARPS + c.part() - first;
    if (block < 0 || block >= count) continue;
    const uint8_t* at = from + staged_at(block * 4 + quarter, row);
    const bool there = has_block<K>(c, i);
    a.low[j] = there && (ROWS >= 8 || row < ROWS) ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
    if (WIDE) a.high[j] = there ? *reinterpret_cast<const uint4*>(at + 8 * 16) : make_uint4(0, 0, 0, 0);
  }
}

// Fetched activations in the order in which they are multiplied.
template <int K>
__device__ __forceinline__ void arrange(const Activations<K>& fetched, Activations<K>& a) {
  constexpr int COUNT = Columns<K>::PAGES * Columns<K>::OWN;
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    // Read whole before it is written: both may be the same.
    a.low[j] = make_uint4(fetched.low[j].x, fetched.low[j].z, fetched.low[j].y, fetched.low[j].w);
    if constexpr (WIDE) a.high[j] = make_uint4(fetched.high[j].x, fetched.high[j].z, fetched.high[j].y, fetched.high[j].w);
  }
}

// Sums of a tile half (8 rows of weights): [rows of activations from 8n on][half of the pages' blocks][X and Z, or Y
// and W]. Where there are eight warps a page has but one half.
struct Sums {
  static constexpr int EIGHTS = WIDE ? 2 : 1, PARTS = WIDE ? 1 : 2;
  float value[EIGHTS][PARTS][2][4];
};

// Multiply 8 rows of weights, whose pages are the next in the ring. Only rows in `users` need a result.
template <int K>
__device__ __forceinline__ Sums multiply(Consumer& c, RingPlace& ring, const Activations<K>& a, uint32_t users = ~0u) {
  using C = Columns<K>;
  Sums sums;
#pragma unroll
  for (int n = 0; n < Sums::EIGHTS * Sums::PARTS * 2 * 4; n++) (&sums.value[0][0][0][0])[n] = 0;
#pragma unroll
  for (int page = 0; page < C::PAGES; page++) {
    wait_barrier(c.s, c.p, &c.s.page_full[ring.slot], ring.parity(), c.site(), Waited::PAGE_LANDED, ring.slot);
    const uint4* from = reinterpret_cast<const uint4*>(c.s.ring[ring.slot]) + c.part() * 32 + c.lane();
#pragma unroll
    for (int begin = 0; begin < C::OWN; begin += C::HELD) {
      uint4 b[C::HELD];
#pragma unroll
      for (int i = 0; i < C::HELD && begin + i < C::OWN; i++)
        b[i] = has_block<K>(c, begin + i) ? from[(begin + i) * TILE_WARPS * 32] : make_uint4(0, 0, 0, 0);
      if (begin + C::HELD >= C::OWN) release_page(c.s, c.lane(), ring.slot, TILE_WARPS);
#pragma unroll
      for (int i = 0; i < C::HELD && begin + i < C::OWN; i++) {
        if (!has_block<K>(c, begin + i)) continue;
        const int part = WIDE ? 0 : (begin + i) & 1, j = page * C::OWN + begin + i;
#pragma unroll
        for (int n = 0; n < Sums::EIGHTS; n++) {
          if (WIDE && !(users >> 8 * n & 0xff)) continue;
          const uint4 x = n ? a.high[WIDE ? j : 0] : a.low[j];
          ptx::multiply_add(sums.value[n][part][0], b[i].x, b[i].y, b[i].z, b[i].w, x.x, x.y);
          ptx::multiply_add(sums.value[n][part][1], b[i].x, b[i].y, b[i].z, b[i].w, x.z, x.w);
        }
      }
    }
    ring.advance(1);
  }
  return sums;
}

// The results of a tile in the warp that finishes it. Lane 4g + c has outputs 2c and 2c + 1 of row g, and of row
// g + 8 where the rows are many; HALVES is 2 for the tiles of 16 weight rows.
template <int HALVES>
struct Results {
  float2 value[HALVES][Sums::EIGHTS];
};

// A lane's part of a tile, before it is added to the other warps': it has row g of the weights, and rows 2c and 2c + 1 of
// the activations.
struct Part {
  float2 value[Sums::EIGHTS][Sums::PARTS];

  Part() = default;
  __device__ __forceinline__ explicit Part(const Sums& sums) {
#pragma unroll
    for (int n = 0; n < Sums::EIGHTS; n++)
#pragma unroll
      for (int part = 0; part < Sums::PARTS; part++) {
        const auto& v = sums.value[n][part];
        value[n][part] = make_float2(v[0][0] + v[1][2], v[0][1] + v[1][3]);
      }
  }
};

// Add up a tile's parts across its warps, in the order above. For all its warps. One of them, they take turns, calls
// `finish(results)`. The others leave their parts in one of two buffers and go on: they wait only for a buffer whose last
// reader is late.
template <int HALVES, typename Finish>
__device__ __forceinline__ void add_up(Consumer& c, const Part (&parts)[HALVES], Finish finish) {
  const int which = c.turn & 1;
  const uint32_t parity = c.turn / 2 & 1;
  auto& buffer = c.s.sums[which];
  wait_barrier(c.s, c.p, &c.s.sums_empty[c.group()][which], parity ^ 1, c.site(), Waited::SUMS_EMPTY, which);
#pragma unroll
  for (int n = 0; n < HALVES * Sums::EIGHTS; n++) {
    const auto& v = parts[n / Sums::EIGHTS].value[n % Sums::EIGHTS];
    float2 sum = v[0];
    if constexpr (Sums::PARTS == 2) sum = make_float2(sum.x + v[1].x, sum.y + v[1].y);
    *reinterpret_cast<float2*>(&buffer[c.warp()][n][c.lane() * 2]) = sum;
  }
  __syncwarp();
  if (c.lane() == 0) ptx::barrier_arrive(&c.s.sums_full[c.group()][which], 1);
  const bool mine = c.finishes();
  c.turn++;
  if (!mine) return;
  wait_barrier(c.s, c.p, &c.s.sums_full[c.group()][which], parity, c.site(), Waited::SUMS_FULL, which);
  const int first = c.warp() - c.part(), row = c.lane() >> 2, output = (c.lane() & 3) * 2;
  Results<HALVES> results;
#pragma unroll
  for (int n = 0; n < HALVES * Sums::EIGHTS; n++) {
    float total[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int at = (output + e) * 8 + row;
      float q[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        q[w] = buffer[first + w][n][at];
        if (WIDE) q[w] += buffer[(w + 4) % CONSUMER_WARPS][n][at];
      }
      total[e] = (q[0] + q[1]) + (q[2] + q[3]);
    }
    results.value[n / Sums::EIGHTS][n % Sums::EIGHTS] = make_float2(total[0], total[1]);
  }
  __syncwarp();
  if (c.lane() == 0) ptx::barrier_arrive(&c.s.sums_empty[c.group()][which], 1);
  finish(results);
}

// Call `finish(index, results)` for every tile, in the warp that finishes it. HALVES of 8 weight rows make a tile.
template <int K, int HALVES, typename Finish>
__device__ __forceinline__ void each_tile(Consumer& c, int tiles, const Activations<K>& a, Finish finish) {
  constexpr int PAGES = Columns<K>::PAGES * HALVES;
  for (int index = 0; index < tiles; index++) {
    if (c.owns_tile(index)) {
      RingPlace ring = c.ring;
      if (TILE_GROUPS > 1) let_loader_come(c.s, c.p, ring, PAGES, Columns<K>::PER_PAGE * isa::UNIT, c.site());
      Part parts[HALVES];
#pragma unroll
      for (int half = 0; half < HALVES; half++) parts[half] = Part(multiply<K>(c, ring, a));
      add_up(c, parts, [&](const Results<HALVES>& results) { finish(index, results); });
    }
    c.ring.advance(PAGES);
  }
}

// Call `visit(row, which)` for the rows whose results a lane holds: value[..][which].
template <typename Visit>
__device__ __forceinline__ void each_own_row(const Consumer& c, Visit visit) {
  const int row = c.lane() >> 2;
  if (ROWS >= 8 || row < ROWS) visit(row, 0);
  if (WIDE) visit(row + 8, WIDE ? 1 : 0);
}
