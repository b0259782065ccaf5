// Projections onto the residual: the SM that owns a tile keeps it in shared memory, float32, for the whole step.
#pragma once

#include "streamed.h"

// Publish a tile of X from the residual, where the task says so. For the warp that finishes the tile.
__device__ __forceinline__ void publish_residual(Consumer& c, const isa::Descriptor& task, int index) {
  if (task.output != static_cast<int32_t>(isa::Buffer::X)) return;
  settle_tile(c, task);
  each_own_row(c, [&](int row, int which) {
    const float2 v = *reinterpret_cast<float2*>(&c.s.residual[index][row][(c.lane() & 3) * 2]);
    c.came_back[which] = ptx::exchange(word_of_tile(c, task, task.first_tile + index, row), ptx::pack(v.x, v.y));
  });
  c.owes = true;
}

// Add to this lane's two elements of the residual.
__device__ __forceinline__ void add_residual(Consumer& c, const isa::Descriptor& task, int index, int row, float2 v) {
  if (task.flags & static_cast<int32_t>(isa::Flag::HALVE)) v = make_float2(v.x / 2, v.y / 2);
  float2& held = *reinterpret_cast<float2*>(&c.s.residual[index][row][(c.lane() & 3) * 2]);
  held = make_float2(held.x + v.x, held.y + v.y);
}

// O_PROJ and FFN_DOWN: input against K columns of each owned row.
template <int K, typename Input>
__device__ __forceinline__ void project_tiles(Consumer& c, const isa::Descriptor& task, const Input& a) {
  each_tile<K, 1>(
      c, task.tile_count, 1, a,
      [&](int index, int, const Results& results) {
        each_own_row(c, [&](int row, int which) { add_residual(c, task, index, row, results.value[which]); });
      },
      [&](int index) {
        publish_residual(c, task, index);
        settle_tile(c, task);  // at once: activations leave no register to keep anything in
      });
}

template <int K>
__device__ __forceinline__ void project(Consumer& c, const isa::Descriptor& task) {
  const uint8_t* input = buffer_at(c.p, task.input);
  if constexpr (K * ROWS * 2 <= INPUT_BYTES) {
    stage<K / 8 * ROWS>(c, input, K / 8 * ROWS);
    project_tiles<K>(c, task, Staged<K>{c.s.input});
  } else if constexpr (!Columns<K>::FIT) {
    Streamed<K> a;
    a.from = input;
    project_tiles<K>(c, task, a);
  } else {
    Activations<K> a;
    load_activations<K>(c, input, a);
    arrange<K>(a, a);
    project_tiles<K>(c, task, a);
  }
}
