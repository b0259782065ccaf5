// The choice of experts: every SM makes it for itself from the router's logits.
#pragma once

#include "wait.h"

// Unsigned order of the result is the order of the numbers; never 0.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The experts of a lane: lane, lane + 32, ...
constexpr int OWN_EXPERTS = (EXPERTS + isa::WARP - 1) / isa::WARP;

// Rows that are chosen for side by side, so that their steps overlap: as many as the warp has registers for.
constexpr int ROWS_TOGETHER = ROWS <= 4 ? ROWS : 2;

// Put the router's logits of all rows into shared memory, as they lie in their buffer: at once, as a fetch takes as long as
// some choices. What they are put over is the helper's at other times. For all lanes, as all below.
__device__ __forceinline__ void fetch_logits(Shared& s, const Params& p, int lane) {
  const uint8_t* from = p.buffers + variant::ROUTER_LOGITS_OFFSET;
#pragma unroll 1
  for (int at = lane * 16; at < LOGIT_BYTES; at += isa::WARP * 16)
    ptx::copy_shared_data(ptx::shared_address(s.record) + at, from + at, true);
  ptx::copies_done();
  __syncwarp();
}

__device__ __forceinline__ float fetched_logit(const Shared& s, int row, int expert) {
  return reinterpret_cast<const float*>(s.record)[(expert / isa::TILE_ROWS * ROWS + row) * isa::TILE_ROWS + expert % isa::TILE_ROWS];
}

// Choose for rows [first, first + ROWS_TOGETHER); sets bit r of chosen[n] where row r takes the lane's n-th expert. Ties go to
// the lowest index.
__device__ __forceinline__ void choose_for(Shared& s, int first, int lane, uint32_t (&chosen)[OWN_EXPERTS]) {
  uint32_t key[ROWS_TOGETHER][OWN_EXPERTS];
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) {
    const int expert = n * isa::WARP + lane;
#pragma unroll
    for (int row = 0; row < ROWS_TOGETHER; row++) key[row][n] = expert < EXPERTS ? ordered(fetched_logit(s, first + row, expert)) : 0;
  }
#pragma unroll 1
  for (int taken = 0; taken < CHOICES; taken++) {
    uint32_t best[ROWS_TOGETHER], expert[ROWS_TOGETHER];
#pragma unroll
    for (int row = 0; row < ROWS_TOGETHER; row++) {
      uint32_t own = key[row][0];
#pragma unroll
      for (int n = 1; n < OWN_EXPERTS; n++) own = max(own, key[row][n]);
      best[row] = __reduce_max_sync(~0u, own);
    }
#pragma unroll
    for (int row = 0; row < ROWS_TOGETHER; row++) {
      uint32_t own = EXPERTS;
#pragma unroll
      for (int n = OWN_EXPERTS - 1; n >= 0; n--)
        if (key[row][n] == best[row]) own = n * isa::WARP + lane;
      expert[row] = __reduce_min_sync(~0u, own);
    }
#pragma unroll
    for (int row = 0; row < ROWS_TOGETHER; row++) {
#pragma unroll
      for (int n = 0; n < OWN_EXPERTS; n++)
        if (expert[row] == static_cast<uint32_t>(n * isa::WARP + lane)) {
          key[row][n] = 0;
          chosen[n] |= 1u << (first + row);
        }
      if (lane == 0) s.route.choice[first + row][taken] = static_cast<int16_t>(expert[row]);
    }
  }
}

// List the chosen experts in index order.
__device__ __forceinline__ void list_experts(Shared& s, int lane, const uint32_t (&chosen)[OWN_EXPERTS]) {
  int count = 0;
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) {
    const uint32_t lanes = __ballot_sync(~0u, chosen[n] != 0);
    if (chosen[n]) {
      const int place = count + __popc(lanes & ((1u << lane) - 1));
      s.route.expert[place] = n * isa::WARP + lane;
      s.route.users[place] = chosen[n];
      s.route.place[n * isa::WARP + lane] = static_cast<int16_t>(place);
    }
    count += __popc(lanes);
  }
  if (lane == 0) s.route.count = count;
  if constexpr (ROWS % 4 == 0)
    for (int n = lane; n < count * (ROWS / 4); n += isa::WARP) reinterpret_cast<float4*>(s.route.weight)[n] = make_float4(0, 0, 0, 0);
  else
    for (int n = lane; n < count * ROWS; n += isa::WARP) (&s.route.weight[0][0])[n] = 0;
  __syncwarp();
  for (int n = lane; n < ROWS * CHOICES; n += isa::WARP) {
    const int row = n / CHOICES, expert = s.route.choice[row][n % CHOICES];
    const float weight = __fdividef(1.0f, 1.0f + expf(-fetched_logit(s, row, expert)));
    if (s.rows.active[row]) s.route.weight[s.route.place[expert]][row] = weight;
  }
  __syncwarp();
}

__device__ __forceinline__ void choose_experts(Shared& s, const Params& p, int lane) {
  fetch_logits(s, p, lane);
  uint32_t chosen[OWN_EXPERTS];
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) chosen[n] = 0;
#pragma unroll 1
  for (int first = 0; first < ROWS; first += ROWS_TOGETHER) choose_for(s, first, lane, chosen);
  uint32_t active = 0;
#pragma unroll
  for (int row = 0; row < ROWS; row++) active |= s.rows.active[row] ? 1u << row : 0;
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) chosen[n] &= active;
  __syncwarp();
  list_experts(s, lane, chosen);
}
