// Results on their way out. Consumers write a message and its payload into shared memory; the publisher, one thread,
// copies payloads to global memory in the order of the messages and signals.
//
// A bulk store that has been waited for is complete where all SMs look, the L2, so the signal needs no fence. (A
// fence of the device's scope would wait for the SM's page loads as well: microseconds.) STRICT does it by the book.
#pragma once

#include "wait.h"

// Before message `sequence` may be written. For any thread of the warp that writes it.
__device__ __forceinline__ void claim_message(Shared& s, const Params& p, uint32_t sequence, Site site) {
  const uint32_t slot = sequence % MESSAGES, lap = sequence / MESSAGES;
  wait_barrier(s, p, &s.message_empty[slot], (lap & 1) ^ 1, site, Waited::MESSAGE_FREE, slot);
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

// Whether the message of this number has left: its payload may be written anew. For messages at most MESSAGES back.
__device__ __forceinline__ void wait_sent(Shared& s, const Params& p, uint32_t sequence, Site site) {
  const uint32_t slot = sequence % MESSAGES, lap = sequence / MESSAGES;
  wait_barrier(s, p, &s.message_empty[slot], lap & 1, site, Waited::MESSAGE_FREE, slot);
}

// The publisher's whole life; one thread.
__device__ __forceinline__ void publish(Shared& s, const Params& p) {
  const Site site{Agent::PUBLISHER, -1};
  for (uint32_t sequence = 0;; sequence++) {
    const uint32_t slot = sequence % MESSAGES, parity = sequence / MESSAGES & 1;
    if (!wait_barrier_or_end(s, p, &s.message_full[slot], parity, site, Waited::MESSAGE, slot)) {
      // The last commit's signal is written before `ended`; so nothing is left once both were looked at.
      if (*static_cast<volatile int32_t*>(&s.aborted) || !ptx::barrier_passed(&s.message_full[slot], parity)) break;
    }
    const Message message = s.messages[slot];
    if (message.bytes) ptx::bulk_store(message.to, message.from, message.bytes);
    if (message.counter) {
      ptx::bulk_stores_done();
      if (variant::STRICT) {
        ptx::global_before_bulk();
        ptx::add_release(message.counter, message.amount);
      } else {
        ptx::add_relaxed(message.counter, message.amount);
      }
    } else if (message.bytes) {
      ptx::bulk_stores_read();
    }
    ptx::barrier_arrive(&s.message_empty[slot], 1);
  }
  ptx::bulk_stores_done();  // none may read shared memory after the block has ended
}
