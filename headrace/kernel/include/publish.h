// Results on their way out. Consumers write a message and its payload into shared memory; the publisher, one thread,
// copies payloads to global memory in the order of the messages and signals.
//
// A bulk store that has been waited for can be seen by the thread that waited, and not yet by all SMs: a signal that goes
// out without release was, with memory busy, now and then seen before the data (docs/performance-log.md). The release
// waits for the SM's page loads as well, a microsecond: what others wait for most goes another way (consumer.h).
#pragma once

#include "wait.h"

// Before message `sequence` may be written. For any thread of the warp that writes it.
__device__ __forceinline__ void claim_message(Shared& s, uint32_t sequence) {
  const uint32_t slot = sequence % MESSAGES, lap = sequence / MESSAGES;
  wait_barrier(s, &s.message_empty[slot], (lap & 1) ^ 1, Waited::MESSAGE_FREE, slot);
}

// Hand over message `sequence`, which was claimed. For one thread; every thread that wrote to the payload has
// called shared_before_bulk, and then met this one.
__device__ __forceinline__ void submit_message(Shared& s, const Params& p, uint32_t sequence, uint8_t* to,
                                               const void* from, uint32_t bytes, int32_t counter, uint32_t amount) {
  Message& message = s.messages[sequence % MESSAGES];
  message.to = to;
  message.from = ptx::shared_address(from);
  message.bytes = bytes;
  message.counter = counter ? counter_at(p, counter) : nullptr;
  message.amount = amount;
  ptx::barrier_arrive(&s.message_full[sequence % MESSAGES], 1);
}

__device__ constexpr Agent agent_of(int warp) {
  if (warp < CONSUMER_WARPS) return Agent::CONSUMER;
  return warp == LOADER_WARP ? Agent::LOADER : warp == COPIER_WARP ? Agent::COPIER : Agent::HELPER;
}

__device__ __forceinline__ Note note_of(const Shared& s, int warp) {
  const volatile Note& note = s.notes[warp];
  return {note.waited, note.want};
}

// Tell the host what a warp of this SM waits for, if no other SM was first.
__device__ __forceinline__ void tell_trouble(Shared& s, const Params& p, int warp, Note note) {
  if (atomicCAS(p.abort_flag, 0u, 1u) != 0u) return;
  const Agent agent = agent_of(warp);
  const auto waited = static_cast<Waited>((note.waited >> Note::INDEX_BITS) - 1);
  const int32_t index = note.waited & ((1u << Note::INDEX_BITS) - 1);
  variant::HostLink* host = p.host;
  host->sm = blockIdx.x;
  host->agent = static_cast<int32_t>(agent);
  host->task = s.doing[static_cast<int>(agent)];
  host->waited = static_cast<int32_t>(waited);
  host->index = index;
  host->want = note.want;
  host->have = waited == Waited::COUNTER ? ptx::load_relaxed(counter_at(p, index)) : 0;
  ptx::store_to_host(&host->aborted, 1);
}

// The watchdog, in the publisher's hands. It looks at one warp's note until that changes, and then at the next one's: a
// warp that waits forever is come to in the end.
struct Watchdog {
  int warp = 0;
  Note seen{};
  uint64_t since = 0;
  uint32_t looks = 0;

  // Whether the launch is to end, because of this SM or of another.
  __device__ __forceinline__ bool strikes(Shared& s, const Params& p) {
    if ((++looks & 15) == 0 && ptx::load_relaxed(p.abort_flag)) return true;
    const Note note = note_of(s, warp);
    if (note.waited == 0 || note.waited != seen.waited || note.want != seen.want) {
      warp = warp + 1 < THREADS / isa::WARP ? warp + 1 : 0;
      seen = note_of(s, warp);
      since = ptx::nanoseconds();
      return false;
    }
    if (ptx::nanoseconds() - since < p.timeout) return false;
    // Who waits for a counter knows best what is missing, and the consumers come first.
    for (int other = 0; other < THREADS / isa::WARP; other++)
      if (note_of(s, other).waited >> Note::INDEX_BITS == static_cast<uint32_t>(Waited::COUNTER) + 1) {
        tell_trouble(s, p, other, note_of(s, other));
        return true;
      }
    tell_trouble(s, p, warp, note);
    return true;
  }
};

// Wait for message `sequence`. False if there will be none.
__device__ __forceinline__ bool next_message(Shared& s, const Params& p, Watchdog& watchdog, uint32_t sequence) {
  uint64_t* full = &s.message_full[sequence % MESSAGES];
  const uint32_t parity = sequence / MESSAGES & 1;
  while (!ptx::barrier_passed(full, parity)) {
    // The last commit's message is there before `ended` is set: nothing is left if there is none now.
    if (is_set(s.ended)) {
      __threadfence_block();
      return ptx::barrier_passed(full, parity);
    }
    if (watchdog.strikes(s, p)) {
      *static_cast<volatile int32_t*>(&s.aborted) = 1;
      return false;
    }
  }
  return true;
}

// The publisher's whole life; one thread.
__device__ __forceinline__ void publish(Shared& s, const Params& p) {
  Watchdog watchdog;
  for (uint32_t sequence = 0; next_message(s, p, watchdog, sequence); sequence++) {
    const Message message = s.messages[sequence % MESSAGES];
    trace::begin(s, trace::PUBLISHER, 0, (message.counter - p.counters) / COUNTER_WORDS);
    if (message.bytes) ptx::bulk_store(message.to, message.from, message.bytes);
    if (message.counter) {
      ptx::bulk_stores_done();
      ptx::global_before_bulk();
      ptx::add_release(message.counter, message.amount);
      trace::end(s, p, trace::PUBLISHER);
    } else if (message.bytes) {
      ptx::bulk_stores_read();
    }
    ptx::barrier_arrive(&s.message_empty[sequence % MESSAGES], 1);
    trace::ready(s, trace::PUBLISHER);
  }
  ptx::bulk_stores_done();  // none may read shared memory after the block has ended
}
