// What a consumer thread carries from task to task, and how a task begins and ends.
#pragma once

#include "publish.h"
#include "ring.h"

// Few of these are registers for long: what can be had from the thread's number or shared memory is not kept.
struct Consumer {
  Shared& s;
  const Params& p;
  RingPlace ring;
  uint32_t sequence;  // messages of all tasks before this one
  uint32_t turn : 16;   // tiles that this warp's group has added up; both modulo 2^16, in one register
  uint32_t begun : 16;  // tasks
  bool owes;          // this warp has exchanged a tile and not signalled it
  uint32_t came_back[WIDE ? 2 : 1];  // the lane's words of that tile: what was there before
  uint32_t thread;    // threadIdx.x, forgotten from task to task: or addresses of all operations would fill registers

  __device__ __forceinline__ int warp() const { return thread >> 5; }
  __device__ __forceinline__ int lane() const { return thread & 31; }
  // Of tiles: which group of warps this one is in, and its place in there.
  __device__ __forceinline__ int group() const { return warp() / TILE_WARPS; }
  __device__ __forceinline__ int part() const { return warp() % TILE_WARPS; }

  // All consumers.
  __device__ __forceinline__ void meet_all() const { ptx::meet(ALL_CONSUMERS, CONSUMERS); }

  // Which group of tiles `index` of a task is for.
  __device__ __forceinline__ bool owns_tile(int index) const { return index % TILE_GROUPS == group(); }

  // Whether it is this warp's turn to finish the tile that its group is at.
  __device__ __forceinline__ bool finishes() const { return static_cast<int>(turn % TILE_WARPS) == part(); }
};

// Let one thread do a task's waits for all; then all consumers meet. False if the launch was aborted: every consumer
// gets the same answer, so none is left at a barrier. Two words take turns, as a slow warp may still read the last one.
template <typename Waits>
__device__ __forceinline__ bool begin_after(Consumer& c, Waits waits) {
  volatile int32_t& quit = c.s.quit[c.begun & 1];
  if (c.thread == 0) {
    waits();
    quit = *static_cast<volatile int32_t*>(&c.s.aborted);
  }
  c.meet_all();
  return !quit;
}

__device__ __forceinline__ void wait_for(Consumer& c, int32_t counter, int32_t arrivals, uint32_t epoch) {
  if (counter) wait_counter(c.s, c.p, counter, epoch * static_cast<uint32_t>(arrivals));
}
__device__ __forceinline__ void wait_for(Consumer& c, int32_t counter, int32_t arrivals) { wait_for(c, counter, arrivals, c.s.epoch); }

// The waits that the descriptor names.
__device__ __forceinline__ void wait_for_inputs(Consumer& c, const isa::Descriptor& task) {
  wait_for(c, task.wait_counter, task.wait_arrivals);
  wait_for(c, task.second_counter, task.second_arrivals);
}

__device__ __forceinline__ bool begin_task(Consumer& c, const isa::Descriptor& task) {
  return begin_after(c, [&] { wait_for_inputs(c, task); });
}

// A signal with no data, for tasks that publish nothing else. For all consumers; counts as one message.
__device__ __forceinline__ void signal_only(Consumer& c, const isa::Descriptor& task) {
  if (!task.signal_counter) return;
  if (c.thread == 0) {
    claim_message(c.s, c.sequence);
    submit_message(c.s, c.p, c.sequence, nullptr, c.s.payload[0], 0, task.signal_counter, task.signal_amount);
  }
  c.sequence++;
}

// Send tile `index` of `count` from the payload of its message; the last one signals. For the warp that wrote it.
__device__ __forceinline__ void send_tile(Consumer& c, const isa::Descriptor& task, int32_t buffer, int tile, int index,
                                          int count, uint32_t bytes) {
  ptx::shared_before_bulk();
  __syncwarp();
  if (c.lane() != 0) return;
  const uint32_t sequence = c.sequence + index;
  const bool last = index == count - 1;
  submit_message(c.s, c.p, sequence, buffer_at(c.p, buffer) + static_cast<size_t>(tile) * bytes,
                 c.s.payload[sequence % MESSAGES], bytes, last ? task.signal_counter : 0, task.signal_amount);
}

// The payload of tile `index`, free to be written. For the warp that finishes it.
template <typename Element>
__device__ __forceinline__ Element* tile_payload(Consumer& c, int index) {
  claim_message(c.s, c.sequence + index);
  return reinterpret_cast<Element*>(c.s.payload[(c.sequence + index) % MESSAGES]);
}

// Tiles that others wait for most do not go through the publisher. Each lane exchanges its words of the tile for what was in
// global memory: an exchange is made where all SMs look, so when the old words are back the new ones can be seen, and the
// tile may be signalled. The warp does not wait for that, but signals before its next tile, or at the task's end.

// Signal the tile that this warp has exchanged last, if that is owed. For the whole warp.
__device__ __forceinline__ void settle_tile(Consumer& c, const isa::Descriptor& task) {
  if (!c.owes) return;
  c.owes = false;
  uint32_t back = c.came_back[0];
  if constexpr (WIDE) back |= c.came_back[1];
  back = __reduce_or_sync(~0u, back);
  if (c.lane()) return;
  uint32_t* counter = counter_at(c.p, task.signal_counter);
  if (variant::STRICT) {
    ptx::fence_device();
    ptx::add_release(counter, ptx::after(back, 1));
  } else {
    ptx::add_relaxed(counter, ptx::after(back, 1));
  }
}

// Where one of the four words of row `row` in a tile of bfloat16 goes.
__device__ __forceinline__ uint32_t* word_of_tile(const Consumer& c, const isa::Descriptor& task, int tile, int row, int word) {
  return reinterpret_cast<uint32_t*>(buffer_at(c.p, task.output)) + (static_cast<size_t>(tile) * ROWS + row) * 4 + word;
}
// The lane's own.
__device__ __forceinline__ uint32_t* word_of_tile(const Consumer& c, const isa::Descriptor& task, int tile, int row) {
  return word_of_tile(c, task, tile, row, c.lane() & 3);
}
