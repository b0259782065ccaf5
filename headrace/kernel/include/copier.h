// The copier: one thread that fills the ring with the pages that the loader orders, and hands tasks over when it comes to
// theirs: consumers who have them sooner only wait elsewhere (docs/performance-log.md). It does nothing else.
#pragma once

#include "orders.h"
#include "ring.h"

// What a page needs is kept in registers: to work out an address in shared memory anew costs more than all else that is
// done for a page.
struct Copier {
  uint32_t shared;   // address of Shared
  uint64_t policy;   // of pages that are read but once
  int32_t slot = 0, in_flight = 0;
  uint32_t taken = 0, issued = 0;  // orders, and pages
  uint32_t parity = 1;  // an empty ring passes for one that has been freed

  __device__ __forceinline__ explicit Copier(const Shared& s) : shared(ptx::kept_address(&s)), policy(ptx::read_once_policy()) {}

  // The next order, when it is there. False if there will be none.
  __device__ __forceinline__ bool take(Shared& s, Order& order) {
    while (ptx::load_shared_acquire(shared + offsetof(Shared, orders_made)) == taken)
      if (is_set(s.ended) || is_set(s.aborted)) return false;
    order = s.orders[taken % ORDERS];
    ptx::store_shared_release(shared + offsetof(Shared, orders_taken), ++taken);
    return true;
  }

  // Bring the pages of an order in. False if the launch ended first.
  __device__ __forceinline__ bool copy(Shared& s, const Order& order) {
    const uint8_t* from = order.from;
    const uint32_t bytes = order.bytes;
#pragma unroll 1
    for (int left = order.pages; left > 0; left--, from += bytes)
      if (!issue(s, from, bytes, order.most)) return false;
    return true;
  }

  // Nothing may land in shared memory after the block has ended.
  __device__ __forceinline__ void drain() {
    while (in_flight > 0) wait_landed();
  }

 private:
  __device__ __forceinline__ uint32_t full(int32_t slot) const { return shared + offsetof(Shared, page_full) + slot * 8; }

  // What comes after the wait for others to land is on memory's way, so it is little.
  __device__ __forceinline__ bool issue(Shared& s, const uint8_t* from, uint32_t bytes, int32_t most) {
    if (!wait_barrier_or_end(s, shared + offsetof(Shared, page_empty) + slot * 8, parity, Waited::PAGE_FREE, slot)) return false;
    ptx::barrier_expect(full(slot), bytes);
    while (in_flight >= most) wait_landed();
    ptx::bulk_load(shared + offsetof(Shared, ring) + slot * isa::PAGE_BYTES_MAX, from, bytes, full(slot), policy);
    in_flight++;
    if (++slot == RING) slot = 0, parity ^= 1;
    ptx::store_shared(shared + offsetof(Shared, issued), ++issued);
    return true;
  }

  // For the oldest page under way. It lands in any case: this wait needs no watchdog.
  __device__ __forceinline__ void wait_landed() {
    const bool lap_before = slot < in_flight;
    const uint32_t barrier = full(slot - in_flight + (lap_before ? RING : 0)), of_lap = parity ^ (lap_before ? 0 : 1);
    while (!ptx::barrier_passed(barrier, of_lap)) {
    }
    in_flight--;
  }
};

// The copier's whole life; one thread.
__device__ __forceinline__ void copy_orders(Shared& s, const Params& p) {
  Copier copier(s);
  Order order{};
  uint32_t step = 0, handed = 0;
  trace::ready(s, trace::COPIER);
  while (true) {
    const int32_t before = order.task;
    if (!copier.take(s, order)) break;
    s.doing[static_cast<int>(Agent::COPIER)] = order.task;
    if (order.task < before) step++;
    if (order.flags & order_flag::FIRST) {
      ptx::barrier_arrive(&s.task_full[handed++ % isa::TASK_SLOTS], 1);
      trace::begin(s, trace::COPIER, step, order.task);
    }
    if (order.flags & order_flag::FENCE) ptx::global_before_bulk();
    if (!copier.copy(s, order)) break;
    if (!(order.flags & order_flag::LAST)) continue;
    trace::end(s, p, trace::COPIER);
    trace::ready(s, trace::COPIER);
  }
  copier.drain();
}
