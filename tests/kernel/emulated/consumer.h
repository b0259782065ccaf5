// In the place of the kernel's consumer.h: the same words for sampling, with no publisher between a message and memory.
#pragma once

#include "state.h"

extern uint32_t counters[];

struct Consumer {
  Shared& s;
  const Params& p;
  uint32_t sequence, begun, thread;
  int sm;

  int warp() const { return thread / LANES; }
  int lane() const { return thread % LANES; }
  void meet_all() const { ptx::meet(ALL_CONSUMERS, CONSUMERS); }
};

inline void wait_for(Consumer&, int32_t counter, int32_t arrivals, uint32_t epoch) {
  if (!counter) return;
  while (counters[counter] < epoch * static_cast<uint32_t>(arrivals)) park(&counters[counter]);
}
inline void wait_for(Consumer& c, int32_t counter, int32_t arrivals) { wait_for(c, counter, arrivals, c.s.epoch); }

template <typename Waits>
bool begin_after(Consumer& c, Waits waits) {
  if (c.thread == 0) waits();
  c.meet_all();
  return true;
}

inline bool begin_task(Consumer& c, const isa::Descriptor& task) {
  return begin_after(c, [&] {
    wait_for(c, task.wait_counter, task.wait_arrivals);
    wait_for(c, task.second_counter, task.second_arrivals);
  });
}

inline void claim_message(Shared&, uint32_t) {}

inline void submit_message(Shared&, const Params&, uint32_t, uint8_t* to, const void* from, uint32_t bytes,
                           int32_t counter, uint32_t amount) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 && bytes)
    fail("a bulk store is not aligned");
  if (bytes) std::memcpy(to, from, bytes);
  if (counter) ptx::add_relaxed(&counters[counter], amount);
}

inline void signal_only(Consumer& c, const isa::Descriptor& task) {
  if (!task.signal_counter) return;
  if (c.thread == 0) submit_message(c.s, c.p, 0, nullptr, nullptr, 0, task.signal_counter, task.signal_amount);
  c.sequence++;
}
