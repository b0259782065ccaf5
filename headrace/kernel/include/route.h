// The choice of experts, by a warp of its own: every SM makes it for itself from the router's logits, as soon as they
// are there, so that it is long made when the loader comes to the experts' pages.
#pragma once

#include "wait.h"

// Unsigned order of the result is the order of the numbers; never 0.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The experts of a lane: lane, lane + 32, ...
constexpr int OWN_EXPERTS = (EXPERTS + isa::WARP - 1) / isa::WARP;

// Choose for rows [first, first + TOGETHER), side by side so that their loads and steps overlap; sets bit r of chosen[n]
// where row r takes the lane's n-th expert. Ties go to the lowest index. For all lanes, as all below.
template <int TOGETHER>
__device__ __forceinline__ void choose_for(Shared& s, const Params& p, int first, int lane, uint32_t (&chosen)[OWN_EXPERTS]) {
  const float* logits = reinterpret_cast<const float*>(p.buffers + variant::ROUTER_LOGITS_OFFSET);
  uint32_t key[TOGETHER][OWN_EXPERTS];
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) {
    const int expert = n * isa::WARP + lane;
    const float* at = logits + (expert / 8 * ROWS + first) * 8 + expert % 8;
#pragma unroll
    for (int row = 0; row < TOGETHER; row++)
      key[row][n] = expert < EXPERTS ? ordered(ptx::load_shared_float(at + row * 8)) : 0;
  }
#pragma unroll 1
  for (int taken = 0; taken < CHOICES; taken++) {
#pragma unroll
    for (int row = 0; row < TOGETHER; row++) {
      uint32_t best = 0;
#pragma unroll
      for (int n = 0; n < OWN_EXPERTS; n++) best = max(best, key[row][n]);
      best = __reduce_max_sync(~0u, best);
      uint32_t expert = EXPERTS;
#pragma unroll
      for (int n = OWN_EXPERTS - 1; n >= 0; n--)
        if (key[row][n] == best) expert = n * isa::WARP + lane;
      expert = __reduce_min_sync(~0u, expert);
      const bool active = s.rows.active[first + row];
#pragma unroll
      for (int n = 0; n < OWN_EXPERTS; n++)
        if (expert == static_cast<uint32_t>(n * isa::WARP + lane)) {
          key[row][n] = 0;
          if (active) chosen[n] |= 1u << (first + row);
        }
      if (lane == 0) {
        s.route.choice[first + row][taken] = active ? static_cast<int16_t>(expert) : -1;
        s.route.choice_weight[first + row][taken] = __fdividef(1.0f, 1.0f + expf(-number_of(best)));
      }
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
  for (int n = lane; n < count * ROWS; n += isa::WARP) (&s.route.weight[0][0])[n] = 0;
  __syncwarp();
  for (int n = lane; n < ROWS * CHOICES; n += isa::WARP) {
    const int row = n / CHOICES, expert = s.route.choice[row][n % CHOICES];
    if (expert >= 0) s.route.weight[s.route.place[expert]][row] = s.route.choice_weight[row][n % CHOICES];
  }
  __syncwarp();
}

__device__ __forceinline__ void choose_experts(Shared& s, const Params& p, int lane) {
  constexpr int TOGETHER = ROWS < 2 ? ROWS : 2;
  uint32_t chosen[OWN_EXPERTS];
#pragma unroll
  for (int n = 0; n < OWN_EXPERTS; n++) chosen[n] = 0;
#pragma unroll 1
  for (int first = 0; first < ROWS; first += TOGETHER) choose_for<TOGETHER>(s, p, first, lane, chosen);
  __syncwarp();
  list_experts(s, lane, chosen);
}

// The router's whole life; one warp.
__device__ __forceinline__ void route(Shared& s, const Params& p) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  each_beside(s, p, Agent::ROUTER, isa::Opcode::EXPERT_UP, isa::Field::LOADER_COUNTER, lane, [&](const int32_t*) {
    choose_experts(s, p, lane);
    if (lane == 0) ptx::barrier_arrive(&s.route_full, 1);
  });
}
