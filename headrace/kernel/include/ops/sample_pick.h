// SAMPLE_PICK: each SM's best token of every row.
#pragma once

#include "sampling.h"

__device__ __forceinline__ void sample_pick(Consumer& c, const isa::Descriptor& task) {
  if (!begin_task(c, task)) return;
  if (c.thread == 0) {
    claim_message(c.s, c.p, c.sequence, c.site());
    const bool stop = (task.flags & static_cast<int32_t>(isa::Flag::WRITER)) && ptx::load_from_host(&c.p.host->stop);
    auto* candidates = reinterpret_cast<isa::Candidate*>(c.s.record);
    const uint8_t* stats = buffer_at(c.p, static_cast<int32_t>(isa::Buffer::STATS)) +
                           static_cast<size_t>(task.share) * ROWS * sizeof(isa::Stat);
#pragma unroll 1
    for (int row = 0; row < ROWS; row++) {
      const uint4 own = ptx::load_shared_data(stats + row * sizeof(isa::Stat));  // largest, best, token
      isa::Candidate& candidate = candidates[row];
      candidate.value = __uint_as_float(own.y);
      candidate.token = c.s.rows.active[row] ? static_cast<int32_t>(own.z) : NO_TOKEN;
      candidate.raw = __uint_as_float(own.x);
      candidate.stop = stop;
    }
  }
  send_records(c, task, c.s.record, sizeof(isa::Candidate));
}
