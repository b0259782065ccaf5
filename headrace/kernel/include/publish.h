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

// Tell the host of this SM's trouble, if it is the first, and all other SMs.
__device__ __forceinline__ void tell_trouble(Shared& s, const Params& p) {
  if (*static_cast<volatile int32_t*>(&s.aborted) != OWN || atomicCAS(p.abort_flag, 0u, 1u) != 0u) return;
  const volatile Trouble& trouble = s.trouble;
  variant::HostLink* host = p.host;
  host->sm = blockIdx.x;
  host->agent = trouble.agent;
  host->task = trouble.task;
  host->waited = trouble.waited;
  host->index = trouble.index;
  host->want = trouble.want;
  host->have = trouble.have;
  ptx::store_to_host(&host->aborted, 1);
}

// Wait for message `sequence`. False if there will be none.
__device__ __forceinline__ bool next_message(Shared& s, const Params& p, uint32_t sequence) {
  uint64_t* full = &s.message_full[sequence % MESSAGES];
  const uint32_t parity = sequence / MESSAGES & 1;
  for (uint32_t tries = 1; !ptx::barrier_passed(full, parity); tries++) {
    // The last commit's message is there before `ended` is set: nothing is left if there is none now.
    if (is_set(s.ended)) return ptx::barrier_passed(full, parity);
    const int32_t aborted = *static_cast<volatile int32_t*>(&s.aborted);
    if (aborted == OWN || aborted == ELSEWHERE) return false;
    if ((tries & 15) == 0 && ptx::load_relaxed(p.abort_flag)) atomicCAS(&s.aborted, NO, ELSEWHERE);
  }
  return true;
}

// The publisher's whole life; one thread.
__device__ __forceinline__ void publish(Shared& s, const Params& p) {
  for (uint32_t sequence = 0; next_message(s, p, sequence); sequence++) {
    const Message message = s.messages[sequence % MESSAGES];
    trace::begin(s, trace::PUBLISHER, 0, (message.counter - p.counters) / COUNTER_WORDS);
    if (message.bytes) ptx::bulk_store(message.to, message.from, message.bytes);
    if (message.counter) {
      ptx::bulk_stores_done();
      if (variant::STRICT) {
        ptx::global_before_bulk();
        ptx::add_release(message.counter, message.amount);
      } else {
        ptx::add_relaxed(message.counter, message.amount);
      }
      trace::end(s, p, trace::PUBLISHER);
    } else if (message.bytes) {
      ptx::bulk_stores_read();
    }
    ptx::barrier_arrive(&s.message_empty[sequence % MESSAGES], 1);
    trace::ready(s, trace::PUBLISHER);
  }
  tell_trouble(s, p);
  ptx::bulk_stores_done();  // none may read shared memory after the block has ended
}
