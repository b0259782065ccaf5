// The loader: walks the list ahead of the consumers, step after step, hands them tasks, and keeps the ring full.
//
// One warp. All lanes follow the same path; lane 0 waits and copies. Only two kinds of pages depend on data: those of
// experts, for which it waits for the router's warp, and those of attention, for which it waits for the step before.
#pragma once

#include "items.h"
#include "kv.h"
#include "ring.h"

struct Loader {
  Shared& s;
  const Params& p;
  int32_t lane;
  int32_t number = 0;    // of the task in the list
  uint32_t epoch;        // of the step whose tasks it loads, counted from 1
  uint32_t handed = 0;   // tasks
  uint32_t routes = 0;   // taken from the router
  RingFiller ring;       // of lane 0

  // Copy `count` pages that follow one another. False if the launch is over.
  __device__ __forceinline__ bool pages(const uint8_t* from, int count, uint32_t bytes) {
    bool going = true;
    if (lane == 0)
#pragma unroll 1
      for (int i = 0; going && i < count; i++, from += bytes) going = ring.issue(s, from, bytes);
    return __shfl_sync(~0u, going, 0);
  }
};

// Tiles [first, last) of a matrix, or of those of the active experts one after the other. What follows in memory is one run.
__device__ __forceinline__ bool load_tiles(Loader& l, const isa::Descriptor& task, int first, int last) {
  const uint32_t tile_bytes = task.pages_per_tile * task.page_bytes;
#pragma unroll 1
  for (int item = first; item < last;) {
    const int slot = task.expert_stride ? item / task.tile_count : 0, tile = item - slot * task.tile_count;
    const int run = min(task.tile_count - tile, last - item);
    size_t unit = task.weights;
    if (task.expert_stride) unit += static_cast<size_t>(l.s.route.expert[slot]) * task.expert_stride;
    const uint8_t* from = l.p.weights + unit * isa::UNIT + static_cast<size_t>(tile) * tile_bytes;
    if (!l.pages(from, run * task.pages_per_tile, task.page_bytes)) return false;
    item += run;
  }
  return true;
}

__device__ __forceinline__ bool load_attention(Loader& l, const isa::Descriptor& task) {
  const ChunkTable& table = table_for(l.s, task.window);
  bool going = true;
  Runs(table, task.share, task.shares, l.lane).each([&](int row, int head, int low, int high) {
    const RowChunks& chunks = table.rows[row];
    // The blocks of a run of chunks follow one another in the table.
    const int begin = chunks.first + low * chunks.size;
    const int end = min(chunks.first + high * chunks.size, chunks.last + 1);
#pragma unroll 1
    for (int first = begin; going && first < end; first += isa::WARP) {
      const int own = min(first + l.lane, end - 1);
      const int block = kv::block_of(l.p, row, task.window, own);
      for (int n = 0; going && n < isa::WARP && first + n < end; n++)
        going = l.pages(kv::page(l.p, task.layer, __shfl_sync(~0u, block, n), head, 0), 2, task.page_bytes);
    }
  });
  return going;
}

// What the task's pages depend on. False if the launch is over.
__device__ __forceinline__ bool wait_for_pages(Loader& l, const isa::Descriptor& task) {
  Shared& s = l.s;
  bool going = true;
  const bool routed = task.opcode == static_cast<int32_t>(isa::Opcode::EXPERT_UP);
  if (task.loader_counter && l.lane == 0) {
    if (routed) {
      going = wait_barrier_or_end(s, Agent::LOADER, &s.route_full, l.routes & 1, Waited::ROUTE, 0);
    } else {
      const uint32_t steps = l.epoch - task.loader_lag;
      wait_counter(s, l.p, Agent::LOADER, task.loader_counter, steps * static_cast<uint32_t>(task.loader_arrivals));
    }
    going = going && !is_set(s.aborted) && !is_set(s.ended);
    if (task.loader_lag) ptx::global_before_bulk();  // KV that other SMs stored in the step before
  }
  if (routed) l.routes++;
  return __shfl_sync(~0u, going, 0);
}

// Wait, hand the task over, copy its pages. `word` is the lane's word of the descriptor. False if the launch is over.
__device__ __forceinline__ bool load_task(Loader& l, int32_t word) {
  Shared& s = l.s;
  const uint32_t slot = l.handed % isa::TASK_SLOTS, lap = l.handed / isa::TASK_SLOTS;
  bool going = true;
  trace::ready(s, trace::LOADER);
  if (l.lane == 0) {
    s.doing[static_cast<int>(Agent::LOADER)] = l.number;
    going = wait_barrier_or_end(s, Agent::LOADER, &s.task_empty[slot], (lap & 1) ^ 1, Waited::TASK_FREE, slot);
  }
  if (!__shfl_sync(~0u, going, 0)) return false;
  trace::begin(s, trace::LOADER, l.epoch - l.p.epoch - 1, l.number);
  TaskSlot& given = s.tasks[slot];
  reinterpret_cast<int32_t*>(&given.task)[l.lane] = word;
  __syncwarp();
  const isa::Descriptor& task = given.task;
  const auto opcode = static_cast<isa::Opcode>(task.opcode);
  if (!wait_for_pages(l, task)) return false;
  const bool routed = task.expert_stride != 0;
  int first = 0, last = task.tile_count * (routed ? s.route.count : 1);
  if (opcode == isa::Opcode::EXPERT_UP) {
    first = share_begin(last, task.share, task.shares);
    last = share_begin(last, task.share + 1, task.shares);
    if (l.lane == 0) s.experts_read += s.route.count;
  }
  if (l.lane == 0) {
    given.first = first;
    given.last = last;
    given.number = l.number;
    if (task.page_bytes) l.ring.prepare(task.page_bytes);
  }
  __syncwarp();
  if (l.lane == 0) ptx::barrier_arrive(&s.task_full[slot], 1);
  l.handed++;
  if (opcode == isa::Opcode::ATTENTION) return load_attention(l, task);
  return task.pages_per_tile == 0 || opcode == isa::Opcode::EMBED || load_tiles(l, task, first, last);
}

// The loader's whole life; one warp. Descriptors are fetched a task ahead, so that no copy waits for one.
__device__ __forceinline__ void load(Shared& s, const Params& p) {
  Loader l{s, p, static_cast<int32_t>(threadIdx.x & 31), 0, p.epoch};
  const int32_t* own = p.descriptors + static_cast<size_t>(blockIdx.x) * sizes::TASKS * isa::WORDS + l.lane;
  bool going = true;
  int32_t word = __ldg(own);
  while (going && l.epoch - p.epoch < static_cast<uint32_t>(p.steps)) {
    l.epoch++;
    for (l.number = 0; going && l.number < sizes::TASKS; l.number++) {
      const int32_t opcode = __shfl_sync(~0u, word, 0), now = word;
      if (opcode == static_cast<int32_t>(isa::Opcode::END)) break;
      const int next = l.number + 1 < sizes::TASKS ? l.number + 1 : 0;
      word = __ldg(own + next * isa::WORDS);
      if (opcode != static_cast<int32_t>(isa::Opcode::ATTENTION_MERGE)) {  // the merger's
        going = load_task(l, now);
        if (going) trace::end(s, p, trace::LOADER);
      }
    }
    word = __ldg(own);
  }
  if (l.lane == 0) l.ring.drain(s);
}
