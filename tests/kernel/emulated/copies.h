// Barriers in shared memory, and the copies that arrive there: they land when the scheduler draws them, or must.
#pragma once

#include "scheduler.h"

// ---- mbarriers: [bytes awaited, signed][arrivals awaited][arrivals of a phase][parity of the phase] ----

struct MemoryBarrier {
  uint64_t parity : 1, arrivals : 20, awaited : 20;
  int64_t bytes : 23;
};
static_assert(sizeof(MemoryBarrier) == 8);

inline MemoryBarrier& barrier_at(uint64_t* word) {
  if (reinterpret_cast<uintptr_t>(word) % 8) fail("a barrier is not aligned");
  return *reinterpret_cast<MemoryBarrier*>(word);
}

inline void change_barrier(uint64_t* word, int arrivals, int64_t bytes) {
  MemoryBarrier& barrier = barrier_at(word);
  if (barrier.awaited < static_cast<uint64_t>(arrivals)) fail("a barrier has more arrivals than it waits for: %d of thread %d", arrivals, current->thread);
  barrier.awaited -= arrivals;
  barrier.bytes += bytes;
  if (barrier.awaited || barrier.bytes) return;
  barrier.awaited = barrier.arrivals;
  barrier.parity ^= 1;
  wake(word);
}

// ---- bulk copies ----

struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
  uint64_t* barrier;  // of a load
  Fiber* owner;
  std::vector<uint8_t> read;  // by a store, before it writes

  void take() {
    if (read.empty()) read.assign(from, from + bytes);
  }
};
inline std::vector<Copy> under_way;

inline void begin_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const auto unaligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16;
  if (unaligned || !bytes) fail("a bulk copy of %u bytes is not aligned", bytes);
  if (barrier) std::memset(to, 0xff, bytes);  // nobody may rely on what was there
  under_way.push_back({static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes, barrier, current, {}});
}

inline void end_copy(size_t index) {
  Copy copy = std::move(under_way[index]);
  under_way.erase(under_way.begin() + index);
  if (copy.barrier) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    change_barrier(copy.barrier, 0, -static_cast<int64_t>(copy.bytes));
  } else {
    copy.take();
    std::memcpy(copy.to, copy.read.data(), copy.bytes);
  }
  machine.progress = true;
}

// A load lands; a store reads, or, when it has, writes.
inline void step_copy(uint32_t drawn) {
  const size_t index = drawn % under_way.size();
  Copy& copy = under_way[index];
  if (copy.barrier || !copy.read.empty()) return end_copy(index);
  copy.take();
}
inline const Copies COPIES{[] { return !under_way.empty(); }, step_copy};

// The latest moment for the stores of the current thread.
inline void stores_read() {
  for (Copy& copy : under_way)
    if (copy.owner == current && !copy.barrier) copy.take();
}
inline void stores_done() {
  for (size_t n = under_way.size(); n-- > 0;)
    if (under_way[n].owner == current && !under_way[n].barrier) end_copy(n);
}
