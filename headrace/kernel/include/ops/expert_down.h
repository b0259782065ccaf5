// EXPERT_DOWN: the hidden of every active expert against its down matrix, weighed by the router.
//
// Every warp adds up its own columns over all experts, in index order, and warps are added up once at the end: no warp
// waits for another between experts.
#pragma once

#include "ops/residual.h"

// Divide each row's weights by their sum, added in index order. A thread for each row. For all consumers.
__device__ __forceinline__ void normalize_weights(Consumer& c) {
  for (int row = c.thread; row < ROWS; row += CONSUMERS) {
    float total = 0;
    for (int slot = 0; slot < c.s.route.count; slot++) total += c.s.route.weight[slot][row];
    total = fmaxf(total, 1.17549435e-38f);
    for (int slot = 0; slot < c.s.route.count; slot++) c.s.route.weight[slot][row] = __fdividef(c.s.route.weight[slot][row], total);
  }
  c.meet_all();
}

// Of the tiles that an SM owns, those of one group of warps.
constexpr int OWN_TILES = (variant::RESIDUAL_TILES + TILE_GROUPS - 1) / TILE_GROUPS;
constexpr int TOGETHER = OWN_TILES > 1 ? 2 : 1;  // that are added up across warps at once

// Of the rows that a lane's part of a tile is of.
__device__ __forceinline__ float2 weights_of(const float (&weights)[ROWS], int lane, int n) {
  if constexpr (WIDE) return make_float2(weights[8 * n + (lane >> 2)], weights[8 * n + (lane >> 2)]);
  if constexpr (ROWS == 1) return make_float2(weights[0], 0);
  return *reinterpret_cast<const float2*>(weights + (lane & 3) * 2 % ROWS);
}

// Add an expert's part of a tile, weighed. A row that is not routed to it adds nothing, whatever the product is.
__device__ __forceinline__ void add_weighed(const Consumer& c, const float (&weights)[ROWS], const Part& expert, Part& total) {
#pragma unroll
  for (int n = 0; n < Sums::EIGHTS; n++) {
    const float2 weight = weights_of(weights, c.lane(), n);
#pragma unroll
    for (int part = 0; part < Sums::PARTS; part++) {
      const float2 v = expert.value[n][part];
      float2& sum = total.value[n][part];
      if (weight.x != 0) sum.x += weight.x * v.x;
      if (weight.y != 0) sum.y += weight.y * v.y;
    }
  }
}

// Multiply the tiles of one expert.
template <int K, typename Input>
__device__ __forceinline__ void add_expert(Consumer& c, const isa::Descriptor& task, int slot, const Input& a,
                                           Part (&totals)[OWN_TILES]) {
  const Route& route = c.s.route;
#pragma unroll
  for (int index = 0; index < OWN_TILES * TILE_GROUPS; index++) {
    if (index >= task.tile_count) break;
    if (c.owns_tile(index)) {
      RingPlace ring = c.ring;
      add_weighed(c, route.weight[slot], Part(multiply<K>(c, ring, a)), totals[index / TILE_GROUPS]);
    }
    c.ring.advance(Columns<K>::PAGES);
  }
}

template <int K>
constexpr int EXPERT_GROUPS = K / isa::TILE_ROWS * ROWS;  // of an expert's hidden values: groups of eight of a row

// All experts' tiles, hidden values from shared memory, where there are not many.
template <int K>
__device__ __forceinline__ void add_staged_experts(Consumer& c, const isa::Descriptor& task, int count, Part (&totals)[OWN_TILES]) {
  stage<MAX_ACTIVE * EXPERT_GROUPS<K>>(c, buffer_at(c.p, task.input), count * EXPERT_GROUPS<K>);
#pragma unroll 1
  for (int slot = 0; slot < count; slot++) add_expert<K>(c, task, slot, Staged<K>{c.s.input + slot * EXPERT_GROUPS<K> * 16}, totals);
}

// All experts' tiles, hidden values from global memory.
template <int K>
__device__ __forceinline__ void add_experts(Consumer& c, const isa::Descriptor& task, int count, Part (&totals)[OWN_TILES]) {
  const Route& route = c.s.route;
  const uint8_t* hidden = buffer_at(c.p, task.input);
  // They are fetched two experts ahead: one expert's pages pass faster than a fetch takes.
  constexpr int AHEAD = Columns<K>::REGISTERS <= 24 ? 2 : 1;
  Activations<K> next[AHEAD];
  auto fetch = [&](int slot, Activations<K>& to) {
    slot = min(slot, count - 1);  // past the end once more the last: nobody takes it
    load_activations<K>(c, hidden + slot * (EXPERT_GROUPS<K> * static_cast<size_t>(16)), to, route.users[slot]);
  };
#pragma unroll
  for (int n = 0; n < AHEAD; n++) fetch(n, next[n]);
#pragma unroll 1
  for (int first = 0; first < count; first += AHEAD) {
#pragma unroll
    for (int n = 0; n < AHEAD; n++) {
      const int slot = first + n;
      if (slot >= count) break;
      Activations<K> a;
      arrange<K>(next[n], a);
      fetch(slot + AHEAD, next[n]);
      add_expert<K>(c, task, slot, a, totals);
    }
  }
}

template <int K>
__device__ __forceinline__ void expert_down_of(Consumer& c, const isa::Descriptor& task, int count) {
  Part totals[OWN_TILES];
#pragma unroll
  for (int n = 0; n < OWN_TILES; n++) totals[n] = {};
  constexpr bool STAGED = MAX_ACTIVE * EXPERT_GROUPS<K> * 16 <= INPUT_BYTES;
  if constexpr (STAGED) add_staged_experts<K>(c, task, count, totals);
  // For warps without a tile nobody waits: when the others' tiles are out, the router may list the next layer's experts.
  if (TILE_GROUPS > 1 && c.group() >= task.tile_count) {
    if (!STAGED) c.ring.advance(Columns<K>::PAGES * task.tile_count * count);
    return;
  }
  if constexpr (!STAGED) add_experts<K>(c, task, count, totals);
#pragma unroll
  for (int first = 0; first < OWN_TILES; first += TOGETHER) {
    const Turn turn = begin_turn(c);
#pragma unroll
    for (int n = 0; n < TOGETHER && first + n < OWN_TILES; n++) leave_part(c, turn, n, totals[first + n]);
    if (!parts_left(c, turn)) continue;
#pragma unroll 1
    for (int n = 0; n < TOGETHER; n++) {
      const int index = (first + n) * TILE_GROUPS + (TILE_GROUPS > 1 ? c.group() : 0);
      if (first + n >= OWN_TILES || index >= task.tile_count) break;
      const Results results = added_up(c, turn, n);
      each_own_row(c, [&](int row, int which) { add_residual(c, task, index, row, results.value[which]); });
      publish_residual(c, task, index);
    }
    end_turn(c, turn);
  }
  settle_tile(c, task);
}

template <int... WIDTHS>
__device__ __forceinline__ void expert_down_any(Consumer& c, const isa::Descriptor& task, int count, variant::Widths<WIDTHS...>) {
  (void)((task.k == WIDTHS && (expert_down_of<WIDTHS>(c, task, count), true)) || ...);
}

__device__ __forceinline__ void expert_down(Consumer& c, const isa::Descriptor& task) {
  const int count = c.s.route.count;  // before all meet: later it may be the next layer's
  if (!begin_task(c, task)) return;
  if (task.flags & static_cast<int32_t>(isa::Flag::NORMALIZE)) normalize_weights(c);
  expert_down_any(c, task, count, variant::ExpertDown{});
}
