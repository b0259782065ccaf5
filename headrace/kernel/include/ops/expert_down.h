// EXPERT_DOWN: the hidden of every active expert against its down matrix, weighed by the router.
//
// The sum over experts is kept in shared memory, tile by tile, and grows in index order: a tile belongs to one group of
// warps for all experts, and between two warps that add to it lies a barrier of that group.
#pragma once

#include "ops/residual.h"

// Divide each row's weights by their sum, added in index order. Every consumer warp takes rows of its own.
__device__ __forceinline__ void normalize_weights(Consumer& c) {
  for (int row = c.thread; row < ROWS; row += CONSUMERS) {
    float total = 0;
    for (int slot = 0; slot < c.s.route.count; slot++) total += c.s.route.weight[slot][row];
    total = fmaxf(total, 1.17549435e-38f);
    for (int slot = 0; slot < c.s.route.count; slot++) c.s.route.weight[slot][row] = __fdividef(c.s.route.weight[slot][row], total);
  }
  c.meet_all();
}

template <int K>
__device__ __forceinline__ void expert_down_of(Consumer& c, const isa::Descriptor& task) {
  const Route& route = c.s.route;
  const uint8_t* hidden = buffer_at(c.p, task.input);
  constexpr size_t EXPERT_BYTES = static_cast<size_t>(K / isa::TILE_ROWS) * ROWS * 16;
  const int count = route.count;
  Activations<K> a, next;
  load_activations<K>(c, hidden, next);
  for (int slot = 0; slot < count; slot++) {
    arrange<K>(next, a);
    if (slot + 1 < count) load_activations<K>(c, hidden + (slot + 1) * EXPERT_BYTES, next);
    each_tile<K, 1>(c, task.tile_count, a, [&](int index, const Results<1>& results) {
      each_own_row(c, [&](int row, int which) {
        const float weight = route.weight[slot][row];
        const float2 v = results.value[0][which];
        float2& sum = *reinterpret_cast<float2*>(&c.s.expert_sum[index][row][(c.lane() & 3) * 2]);
        float2 total = slot ? sum : make_float2(0, 0);
        if (weight != 0) total = make_float2(total.x + weight * v.x, total.y + weight * v.y);
        if (slot + 1 < count)
          sum = total;
        else
          add_residual(c, task, index, row, total);
      });
      if (slot + 1 == count) publish_residual(c, task, index);
    });
  }
  if (task.output == static_cast<int32_t>(isa::Buffer::X)) c.sequence += task.tile_count;
}

template <int... WIDTHS>
__device__ __forceinline__ void expert_down_any(Consumer& c, const isa::Descriptor& task, variant::Widths<WIDTHS...>) {
  (void)((task.k == WIDTHS && (expert_down_of<WIDTHS>(c, task), true)) || ...);
}

__device__ __forceinline__ void expert_down(Consumer& c, const isa::Descriptor& task) {
  if (!begin_task(c, task)) return;
  if (task.flags & static_cast<int32_t>(isa::Flag::NORMALIZE)) normalize_weights(c);
  expert_down_any(c, task, variant::ExpertDown{});
}
