// What the loader has the copier bring in: orders, each for pages that follow one another in memory.
//
// Two warps share what feeds the ring. To fill a task slot, find experts' addresses or look into block tables takes the
// loader a microsecond or more; memory is kept busy by the copier meanwhile, which only takes the next order.
#pragma once

#include "wait.h"

namespace order_flag {
constexpr uint8_t FIRST = 1, LAST = 2;  // of a task
constexpr uint8_t FENCE = 4;            // other SMs have stored what is copied, and the loader has waited for them
}  // namespace order_flag

// The loader's side, for a whole warp.
struct OrderBook {
  uint32_t made = 0;

  // Give `count` orders; `order_of(n)` is called by all lanes and makes the n-th. False if the launch is over.
  template <typename OrderOf>
  __device__ __forceinline__ bool give(Shared& s, int lane, int count, OrderOf order_of) {
#pragma unroll 1
    for (int done = 0; done < count;) {
      const int room = wait_for_room(s, lane), batch = min(room, count - done);
      if (batch <= 0) return false;
      const Order order = order_of(min(done + lane, count - 1));
      if (lane < batch) s.orders[(made + lane) % ORDERS] = order;
      __syncwarp();
      made += batch;
      if (lane == 0) ptx::store_shared_release(ptx::shared_address(&s.orders_made), made);
      done += batch;
    }
    return true;
  }

  // Until the copier has at most `left` orders to take. False if the launch is over.
  __device__ __forceinline__ bool wait_for_taken(Shared& s, int lane, int left) { return wait_for_room(s, lane, ORDERS - left) > 0; }

 private:
  // How many orders there is room for, when it is for `least`; 0 if the launch is over.
  __device__ __forceinline__ int wait_for_room(Shared& s, int lane, int least = 1) {
    int room = 0;
    if (lane == 0)
      do {
        room = ORDERS - static_cast<int>(made - ptx::load_shared_acquire(ptx::shared_address(&s.orders_taken)));
      } while (room < least && !is_set(s.ended) && !is_set(s.aborted));
    __syncwarp();  // a shuffle orders no memory
    room = __shfl_sync(~0u, room, 0);
    return room < least ? 0 : room;
  }
};
static_assert(ORDERS <= isa::WARP);
