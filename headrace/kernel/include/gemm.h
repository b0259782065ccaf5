// Tiles of output rows: activations of all rows in registers, weights from the ring, sums across warps.
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
};

// A warp's columns of the activations, as the tensor cores' first operand: lane 4g + c has 8 columns of row g in each
// of the warp's blocks, and of row g + 8 where the rows are many.
template <int K>
struct Activations {
  uint4 low[Columns<K>::PAGES * Columns<K>::OWN];
  uint4 high[WIDE ? Columns<K>::PAGES * Columns<K>::OWN : 1];
};

// Whether the warp has an i-th block in a page.
template <int K>
__device__ __forceinline__ bool has_block(const Consumer& c, int i) {
  return Columns<K>::EVEN || i * TILE_WARPS + c.part < Columns<K>::PER_PAGE;
}

// Fetch activations from a tile-major buffer, from its tile `first` on.
template <int K>
__device__ __forceinline__ void load_activations(const Consumer& c, const uint8_t* from, Activations<K>& a) {
  using C = Columns<K>;
  const int row = c.lane >> 2, quarter = c.lane & 3;
  const uint8_t* own = from + (quarter * ROWS + row) * 16;
#pragma unroll
  for (int j = 0; j < C::PAGES * C::OWN; j++) {
    const int i = j % C::OWN, block = j / C::OWN * C::PER_PAGE + i * TILE_WARPS + c.part;
    const uint8_t* at = own + static_cast<size_t>(block) * (4 * ROWS * 16);
    const bool there = has_block<K>(c, i);
    a.low[j] = there && (ROWS >= 8 || row < ROWS) ? ptx::load_shared_data(at) : make_uint4(0, 0, 0, 0);
    if (WIDE) a.high[j] = there ? ptx::load_shared_data(at + 8 * 16) : make_uint4(0, 0, 0, 0);
  }
}

// Sums of a tile half (8 rows of weights): [half of the pages' blocks][k step], of which WIDE has but one half.
struct Sums {
  float value[WIDE ? 2 : 4][4];
};

// Multiply 8 rows of weights, whose pages are the next in the ring.
template <int K>
__device__ __forceinline__ void multiply(Consumer& c, RingPlace& ring, const Activations<K>& a, Sums& sums) {
  using C = Columns<K>;
#pragma unroll
  for (int n = 0; n < (WIDE ? 2 : 4); n++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums.value[n][j] = 0;
#pragma unroll
  for (int page = 0; page < C::PAGES; page++) {
    wait_barrier(c.s, c.p, &c.s.page_full[ring.slot], ring.parity, c.site(), Waited::PAGE_LANDED, ring.slot);
    const uint4* from = reinterpret_cast<const uint4*>(c.s.ring[ring.slot]) + c.part * 32 + c.lane;
    uint4 b[C::OWN];
#pragma unroll
    for (int i = 0; i < C::OWN; i++)
      b[i] = has_block<K>(c, i) ? from[i * TILE_WARPS * 32] : make_uint4(0, 0, 0, 0);
    release_page(c.s, ring.slot, TILE_WARPS);
    ring.advance(1);
#pragma unroll
    for (int i = 0; i < C::OWN; i++) {
      if (!has_block<K>(c, i)) continue;
      const int n = WIDE ? 0 : (i & 1) * 2;
      const uint4 low = a.low[page * C::OWN + i];
      const uint4 high = WIDE ? a.high[page * C::OWN + i] : make_uint4(0, 0, 0, 0);
      ptx::multiply_add(sums.value[n], low.x, high.x, low.y, high.y, b[i].x, b[i].y);
      ptx::multiply_add(sums.value[n + 1], low.z, high.z, low.w, high.w, b[i].z, b[i].w);
    }
  }
}

// The results of a tile in the warp that finishes it. Lane 4g + c has outputs 2c and 2c + 1 of row g, and of row
// g + 8 where the rows are many; HALVES is 2 for the tiles of 16 weight rows.
template <int HALVES>
struct Results {
  float2 value[HALVES][WIDE ? 2 : 1];
};

// Add up a tile's sums across its warps, in the order above. For all its warps; true for the one that finishes it.
template <int HALVES>
__device__ __forceinline__ bool add_up(Consumer& c, const Sums (&sums)[HALVES], Results<HALVES>& results) {
  constexpr int VALUES = WIDE ? 2 : 1;
  auto& buffer = c.s.sums[c.turn & 1];
  const int own = WIDE ? c.warp : c.group * 4 + c.part;
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const auto& v = sums[half].value;
    if (WIDE) {
      buffer[own][half * 2][c.lane] = make_float2(v[0][0] + v[1][0], v[0][1] + v[1][1]);
      buffer[own][half * 2 + 1][c.lane] = make_float2(v[0][2] + v[1][2], v[0][3] + v[1][3]);
    } else {
      constexpr int E = WIDE ? 0 : 2;  // keeps the index in range where this branch is dead
      buffer[own][half][c.lane] = make_float2((v[0][0] + v[1][0]) + (v[E][0] + v[E + 1][0]),
                                              (v[0][1] + v[1][1]) + (v[E][1] + v[E + 1][1]));
    }
  }
  c.meet_tile();
  const bool mine = c.finishes();
  if (mine) {
#pragma unroll
    for (int n = 0; n < HALVES * VALUES; n++) {
      float2 q[4];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        if (WIDE) {
          const float2 low = buffer[w][n][c.lane], high = buffer[w + 4][n][c.lane];
          q[w] = make_float2(low.x + high.x, low.y + high.y);
        } else {
          q[w] = buffer[c.group * 4 + w][n][c.lane];
        }
      }
      results.value[n / VALUES][n % VALUES] =
          make_float2((q[0].x + q[1].x) + (q[2].x + q[3].x), (q[0].y + q[1].y) + (q[2].y + q[3].y));
    }
  }
  c.turn++;
  return mine;
}

// Call `finish(index, results)` for every tile, in the warp that finishes it. HALVES of 8 weight rows make a tile.
template <int K, int HALVES, typename Finish>
__device__ __forceinline__ void each_tile(Consumer& c, int tiles, const Activations<K>& a, Finish finish) {
  constexpr int PAGES = Columns<K>::PAGES * HALVES;
  for (int index = 0; index < tiles; index++) {
    if (c.owns_tile(index)) {
      RingPlace ring = c.ring;
      Sums sums[HALVES];
#pragma unroll
      for (int half = 0; half < HALVES; half++) multiply<K>(c, ring, a, sums[half]);
      Results<HALVES> results;
      if (add_up<HALVES>(c, sums, results)) finish(index, results);
    }
    c.ring.advance(PAGES);
  }
}

// Call `visit(row, which)` for the rows whose results a lane holds: value[..][which].
template <typename Visit>
__device__ __forceinline__ void each_own_row(const Consumer& c, Visit visit) {
  const int row = c.lane >> 2;
  if (ROWS >= 8 || row < ROWS) visit(row, 0);
  if (WIDE) visit(row + 8, WIDE ? 1 : 0);
}
