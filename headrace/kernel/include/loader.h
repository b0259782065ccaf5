// The loader: walks the list ahead of the consumers, step after step, fills task slots, and orders what the copier brings in.
//
// One warp; all lanes follow the same path. Only two kinds of pages depend on data: those of experts, for which it waits
// for their choice, and those of attention, for which it waits for the step before.
#pragma once

#include "items.h"
#include "kv.h"
#include "orders.h"
#include "pace.h"
#include "ring.h"

struct Loader {
  Shared& s;
  const Params& p;
  int32_t lane;
  int32_t number = 0;    // of the task in the list
  uint32_t epoch;        // of the step whose tasks it loads, counted from 1
  uint32_t filled = 0;   // task slots
  uint32_t routes = 0;   // choices of experts that it has waited for
  uint32_t committed = 0;  // the step whose rows are known: SAMPLE_COMMIT of the one before has been waited for
  int32_t more = 0;        // loads that may be under way beside those of IN_FLIGHT: see pace.h
  bool fence = false;      // before the next order: it is for what that step has stored
  OrderBook book{};

  // Have the task's pages copied: `pages_of(n)` gives the n-th of `count` orders, its `from` and `pages`, and is called by
  // all lanes. `begins`, `ends`: the task's first order is among them, and its last. False if the launch is over.
  template <typename PagesOf>
  __device__ __forceinline__ bool order(const isa::Descriptor& task, int count, bool begins, bool ends, PagesOf pages_of) {
    const int32_t bytes = task.page_bytes, task_number = number;
    // As many bytes as IN_FLIGHT whole pages are.
    const int32_t loads = bytes ? task.in_flight * isa::PAGE_BYTES_MAX / bytes + more : 1;
    const uint8_t most = static_cast<uint8_t>(max(min(loads, MOST_IN_FLIGHT), 1)), fenced = fence ? order_flag::FENCE : 0;
    fence = false;
    return book.give(s, lane, count, [&](int n) {
      Order order = pages_of(n);
      order.bytes = static_cast<uint16_t>(bytes);
      order.task = static_cast<uint16_t>(task_number);
      order.most = most;
      order.flags = (begins && n == 0 ? order_flag::FIRST | fenced : 0) | (ends && n == count - 1 ? order_flag::LAST : 0);
      return order;
    });
  }
};

// As `order` does, all of a task's orders; those of EXPERT_DOWN from place to place.
template <typename PagesOf>
__device__ __forceinline__ bool order_at_pace(Loader& l, const isa::Descriptor& task, int count, PagesOf pages_of) {
  const int places = task.opcode == static_cast<int32_t>(isa::Opcode::EXPERT_DOWN) ? pace::PLACES : 0;
  bool going = true;
  int given = 0;
#pragma unroll 1
  for (int place = 0; going && place <= places; place++) {
    const int until = place < places ? pace::orders_before(place, count) : count;
    if (until > given) going = l.order(task, until - given, given == 0, until == count, [&](int n) { return pages_of(given + n); });
    given = until;
    if (place < places && going) going = l.book.wait_for_taken(l.s, l.lane, pace::ORDERS_LEFT);
    l.more = place < places && going ? pace::pages_more(l.p, place, l.lane) : 0;
  }
  return going;
}

// Tiles [first, last) of a matrix, which follow one another, or of those of the active experts, an order for each.
__device__ __forceinline__ bool load_tiles(Loader& l, const isa::Descriptor& task, int first, int last) {
  const uint8_t* weights = l.p.weights + static_cast<size_t>(task.weights) * isa::UNIT;
  const int pages = task.pages_per_tile, tiles = task.expert_stride ? task.tile_count : last;
  const int from_slot = task.expert_stride ? first / tiles : 0, slots = last > first ? (last - 1) / tiles + 1 - from_slot : 0;
  return order_at_pace(l, task, max(slots, 1), [&](int n) {
    const int slot = from_slot + n, low = max(first, slot * tiles), count = min(last, (slot + 1) * tiles) - low;
    if (count <= 0) return Order{};
    const uint8_t* from = weights;
    if (task.expert_stride) from += static_cast<size_t>(l.s.route.expert[slot]) * task.expert_stride * isa::UNIT;
    return Order{from + static_cast<size_t>(low - slot * tiles) * (pages * task.page_bytes), static_cast<uint16_t>(count * pages)};
  });
}

// Of block `from` + lane of an attention task's share, in its order: the page of K. Gives the blocks of the share through
// `blocks`. For all lanes.
__device__ __forceinline__ int list_blocks(Loader& l, const isa::Descriptor& task, int from, int& blocks) {
  const ChunkTable& table = table_for(l.s, task.window);
  const int wanted = from + l.lane;
  int listed = 0;
  blocks = 0;
  Runs(table, task.share, l.lane).each([&](int row, int head, int low, int high) {
    const RowChunks& chunks = table.rows[row];
    // The blocks of a run of chunks follow one another in the table.
    const int begin = chunks.first + low * chunks.size, count = min(chunks.first + high * chunks.size, chunks.last + 1) - begin;
    const int n = wanted - blocks;
    if (n >= 0 && n < count) listed = kv::page_of(kv::block_of(l.p, row, task.window, begin + n), head, 0);
    blocks += count;
  });
  return listed;
}

__device__ __forceinline__ bool load_attention(Loader& l, const isa::Descriptor& task) {
  int blocks = 0;
  bool going = true;
#pragma unroll 1
  for (int from = 0; going && (from == 0 || from < blocks); from += isa::WARP) {
    const int listed = list_blocks(l, task, from, blocks), count = min(blocks - from, isa::WARP);
    going = l.order(task, max(count, 1), from == 0, from + isa::WARP >= blocks, [&](int n) {
      const int number = __shfl_sync(~0u, listed, n);
      return count > 0 ? Order{kv::page(l.s, task.layer, number), 2} : Order{};
    });
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
      wait_counter(s, l.p, task.loader_counter, steps * static_cast<uint32_t>(task.loader_arrivals));
    }
    going = going && !is_set(s.aborted) && !is_set(s.ended);
  }
  if (task.loader_lag) l.fence = l.committed != l.epoch, l.committed = l.epoch;
  if (routed) l.routes++;
  __syncwarp();  // a shuffle orders no memory: what lane 0 has waited for is now there for all
  return __shfl_sync(~0u, going, 0);
}

// Wait, fill a slot with the task, have its pages copied: with the first order the copier hands it over. `word` is the
// lane's word of the descriptor. False if the launch is over.
__device__ __forceinline__ bool load_task(Loader& l, int32_t word) {
  Shared& s = l.s;
  const uint32_t slot = l.filled % isa::TASK_SLOTS, lap = l.filled / isa::TASK_SLOTS;
  bool going = true;
  trace::begin(s, trace::LOADER, l.epoch - l.p.epoch - 1, l.number);
  if (l.lane == 0) {
    s.doing[static_cast<int>(Agent::LOADER)] = l.number;
    going = wait_barrier_or_end(s, ptx::shared_address(&s.task_empty[slot]), (lap & 1) ^ 1, Waited::TASK_FREE, slot);
  }
  __syncwarp();  // the slot is free for all lanes
  if (!__shfl_sync(~0u, going, 0)) return false;
  TaskSlot& given = s.tasks[slot];
  reinterpret_cast<int32_t*>(&given.task)[l.lane] = word;
  __syncwarp();
  const isa::Descriptor& task = given.task;
  const auto opcode = static_cast<isa::Opcode>(task.opcode);
  if (!wait_for_pages(l, task)) return false;
  trace::seen(s, trace::LOADER);
  int first = 0, last = task.tile_count * (task.expert_stride ? s.route.count : 1);
  if (opcode == isa::Opcode::EXPERT_UP) {
    first = share_begin(last, task.share);
    last = share_begin(last, task.share + 1);
    if (l.lane == 0) s.experts_read += s.route.count;
  }
  if (l.lane == 0) {
    given.first = first;
    given.last = last;
    given.number = l.number;
  }
  __syncwarp();
  l.filled++;
  if (opcode == isa::Opcode::ATTENTION) return load_attention(l, task);
  // What has no pages has one order all the same, of none.
  return load_tiles(l, task, first, opcode == isa::Opcode::EMBED || !task.pages_per_tile ? first : last);
}

// The loader's whole life; one warp. Descriptors are fetched two tasks ahead, so that no task waits for one.
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
      // Merges are the helper's, and what only searches need is left out of launches that have none.
      const bool left_out = opcode == static_cast<int32_t>(isa::Opcode::ATTENTION_MERGE) ||
                            (opcode == static_cast<int32_t>(isa::Opcode::SAMPLE_SELECT) && !s.searching);
      if (!left_out) {
        going = load_task(l, word);
        trace::end(s, p, trace::LOADER);
        trace::ready(s, trace::LOADER);
      }
      word = next;
      next = after;
    }
  }
}
