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
  RingFiller ring{s};    // of lane 0

  uint32_t committed = 0;  // the step whose rows are known: SAMPLE_COMMIT of the one before has been waited for
  int32_t ahead = -1;      // the task of attention whose first blocks are listed, in `listed`
  int32_t listed = 0;      // a block of every lane: the number of its page of K
  int32_t blocks = 0;      // of that share in all

  // Copy `count` pages that follow one another; for lane 0. False if the launch is over.
  __device__ __forceinline__ bool pages(const uint8_t* from, int count, uint32_t bytes) {
#pragma unroll 1
    for (; count > 0; count--, from += bytes)
      if (!ring.issue(s, from, bytes)) return false;
    return true;
  }
};

// Tiles [first, last) of a matrix, or of those of the active experts one after the other; for lane 0.
__device__ __forceinline__ bool load_tiles(Loader& l, const isa::Descriptor& task, int first, int last) {
  const int pages = task.pages_per_tile, bytes = task.page_bytes, tiles = task.tile_count;
  int slot = task.expert_stride ? first / tiles : 0, tile = first - slot * tiles;
#pragma unroll 1
  for (int left = last - first; left > 0; slot++, tile = 0) {
    size_t unit = task.weights;
    if (task.expert_stride) unit += static_cast<size_t>(l.s.route.expert[slot]) * task.expert_stride;
    const int run = min(tiles - tile, left);  // that follow one another in memory
    if (!l.pages(l.p.weights + unit * isa::UNIT + static_cast<size_t>(tile) * (pages * bytes), run * pages, bytes)) return false;
    left -= run;
  }
  return true;
}

// What is listed of an attention task's share, in its order: of block `from` + lane the page of K. For all lanes.
__device__ __forceinline__ void list_blocks(Loader& l, int window, int share, int from) {
  const ChunkTable& table = table_for(l.s, window);
  const int wanted = from + l.lane;
  l.blocks = l.listed = 0;
  Runs(table, share, l.lane).each([&](int row, int head, int low, int high) {
    const RowChunks& chunks = table.rows[row];
    // The blocks of a run of chunks follow one another in the table.
    const int begin = chunks.first + low * chunks.size, count = min(chunks.first + high * chunks.size, chunks.last + 1) - begin;
    const int n = wanted - l.blocks;
    if (n >= 0 && n < count) l.listed = kv::page_of(kv::block_of(l.p, row, window, begin + n), head, 0);
    l.blocks += count;
  });
}

// List the first blocks of the next task, if that is of attention, so that the table is read while pages are copied.
// `word` is the lane's word of its descriptor.
__device__ __forceinline__ void list_ahead(Loader& l, int32_t word) {
  auto field = [&](isa::Field field) { return __shfl_sync(~0u, word, static_cast<int>(field)); };
  if (l.committed != l.epoch || field(isa::Field::OPCODE) != static_cast<int32_t>(isa::Opcode::ATTENTION)) return;
  list_blocks(l, field(isa::Field::WINDOW), field(isa::Field::SHARE), 0);
  l.ahead = l.number + 1;
}

__device__ __forceinline__ bool load_attention(Loader& l, const isa::Descriptor& task) {
  bool going = true;
#pragma unroll 1
  for (int from = 0; going && (from == 0 || from < l.blocks); from += isa::WARP) {
    if (l.ahead != l.number) list_blocks(l, task.window, task.share, from);
    l.ahead = -1;  // what comes next is not listed, and in the next step this task has other blocks
    const int count = min(l.blocks - from, isa::WARP);
    l.s.kv_list[l.lane] = l.listed;
    __syncwarp();
    if (l.lane == 0)
#pragma unroll 1
      for (int n = 0; going && n < count; n++)
        going = l.pages(kv::page(l.s, task.layer, l.s.kv_list[n]), 2, kv::PAGE_BYTES);
    __syncwarp();  // the list has been read
    going = __shfl_sync(~0u, going, 0);
  }
  return going;
}

// What the task's pages depend on. False if the launch is over.
__device__ __forceinline__ bool wait_for_pages(Loader& l, const isa::Descriptor& task) {
  Shared& s = l.s;
  bool going = true;
  const bool routed = task.opcode == static_cast<int32_t>(isa::Opcode::EXPERT_UP);
  // EXPERT_DOWN's choice is that of EXPERT_UP, and one task of attention has waited for the step before.
  const bool known = !routed && (!task.loader_lag || l.committed == l.epoch);
  if (!known && l.lane == 0) {
    if (routed) {
      going = wait_barrier_or_end(s, ptx::shared_address(&s.route_full), l.routes & 1, Waited::ROUTE, 0);
    } else {
      const uint32_t steps = l.epoch - task.loader_lag;
      wait_counter(s, l.p, Agent::LOADER, task.loader_counter, steps * static_cast<uint32_t>(task.loader_arrivals));
    }
    going = going && !is_set(s.aborted) && !is_set(s.ended);
    if (task.loader_lag) ptx::global_before_bulk();  // KV that other SMs stored in the step before
  }
  if (task.loader_lag) l.committed = l.epoch;
  if (routed) l.routes++;
  __syncwarp();  // a shuffle orders no memory: what lane 0 has waited for is now there for all
  return __shfl_sync(~0u, going, 0);
}

// Wait, hand the task over, copy its pages. `word` is the lane's word of the descriptor, `next` of the next task's. False
// if the launch is over.
__device__ __forceinline__ bool load_task(Loader& l, int32_t word, int32_t next) {
  Shared& s = l.s;
  const uint32_t slot = l.handed % isa::TASK_SLOTS, lap = l.handed / isa::TASK_SLOTS;
  bool going = true;
  trace::ready(s, trace::LOADER);
  if (l.lane == 0) {
    s.doing[static_cast<int>(Agent::LOADER)] = l.number;
    going = wait_barrier_or_end(s, ptx::shared_address(&s.task_empty[slot]), (lap & 1) ^ 1, Waited::TASK_FREE, slot);
  }
  __syncwarp();  // the slot is free for all lanes
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
    first = share_begin(last, task.share);
    last = share_begin(last, task.share + 1);
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
  list_ahead(l, next);
  if (l.lane == 0 && task.pages_per_tile && opcode != isa::Opcode::EMBED) going = load_tiles(l, task, first, last);
  return __shfl_sync(~0u, going, 0);
}

// The loader's whole life; one warp. Descriptors are fetched two tasks ahead, so that no copy waits for one.
__device__ __forceinline__ void load(Shared& s, const Params& p) {
  Loader l{s, p, static_cast<int32_t>(threadIdx.x & 31), 0, p.epoch};
  const int32_t* own = p.descriptors + static_cast<size_t>(blockIdx.x) * sizes::TASKS * isa::WORDS + l.lane;
  auto fetched = [&](int number) { return __ldg(own + number % sizes::TASKS * isa::WORDS); };
  bool going = true;
  while (going && l.epoch - p.epoch < static_cast<uint32_t>(p.steps)) {
    l.epoch++;
    int32_t word = fetched(0), next = fetched(1);
    for (l.number = 0; going && l.number < sizes::TASKS; l.number++) {
      const int32_t opcode = __shfl_sync(~0u, word, 0);
      if (opcode == static_cast<int32_t>(isa::Opcode::END)) break;
      const int32_t after = fetched(l.number + 2);
      if (opcode != static_cast<int32_t>(isa::Opcode::ATTENTION_MERGE)) {  // the merger's
        going = load_task(l, word, next);
        if (going) trace::end(s, p, trace::LOADER);
      }
      word = next;
      next = after;
    }
  }
  if (l.lane == 0) l.ring.drain();
}
