// The kernel: one persistent block an SM, which runs whole decode steps from embedding to sampled token.
#pragma once

#include "copier.h"
#include "helper.h"
#include "loader.h"
#include "ops/attention.h"
#include "ops/embed.h"
#include "ops/expert_down.h"
#include "ops/ffn_down.h"
#include "ops/normed.h"
#include "ops/o_proj.h"
#include "ops/sample_commit.h"
#include "ops/sample_pick.h"
#include "ops/sample_select.h"
#include "ops/sample_stats.h"

__device__ __forceinline__ void run_sampling(Consumer& c, const isa::Descriptor& task) {
  switch (static_cast<isa::Opcode>(task.opcode)) {
    case isa::Opcode::SAMPLE_STATS: return sample_stats(c, task);
    case isa::Opcode::SAMPLE_SELECT: return sample_select(c, task);
    case isa::Opcode::SAMPLE_PICK: return sample_pick(c, task);
    case isa::Opcode::SAMPLE_COMMIT: return sample_commit(c, task);
    default: return;
  }
}

// Sampling has a switch of its own: within one, its code costs the layers' a register.
__device__ __forceinline__ void run_task(Consumer& c, const TaskSlot& slot) {
  const isa::Descriptor& task = slot.task;
  if (task.opcode >= static_cast<int32_t>(isa::Opcode::SAMPLE_STATS)) return run_sampling(c, task);
  switch (static_cast<isa::Opcode>(task.opcode)) {
    case isa::Opcode::EMBED: return embed(c, task);
    case isa::Opcode::ATTENTION: return attention(c, task);
    case isa::Opcode::O_PROJ: return o_proj(c, task);
    case isa::Opcode::EXPERT_DOWN: return expert_down(c, task);
    case isa::Opcode::FFN_DOWN: return ffn_down(c, task);
    case isa::Opcode::ROUTER:
    case isa::Opcode::QKV_PROJ:
    case isa::Opcode::EXPERT_UP:
    case isa::Opcode::FFN_UP:
    case isa::Opcode::LM_HEAD: return project_normed(c, slot);
    default: return;
  }
}

// The consumers' whole life.
__device__ __forceinline__ void consume(Shared& s, const Params& p) {
  Consumer c{s, p, {}, 0, 0, 0, false, {}, threadIdx.x};
  while (true) {
    ptx::forget(c.thread);
    const uint32_t slot = c.begun % isa::TASK_SLOTS;
    trace::ready(s, trace::CONSUMERS);
    wait_barrier(s, &s.task_full[slot], c.begun / isa::TASK_SLOTS & 1, Waited::TASK, slot);
    if (c.thread == 0) s.doing[static_cast<int>(Agent::CONSUMER)] = s.tasks[slot].number;
    trace::begin(s, trace::CONSUMERS, s.epoch - p.epoch - 1, s.tasks[slot].number);
    c.owes = false;  // nothing is carried from task to task
    for (uint32_t& word : c.came_back) word = 0;
    run_task(c, s.tasks[slot]);
    trace::end(s, p, trace::CONSUMERS);
    uint32_t begun = c.begun;
    ptx::forget(begun);  // the slot is worked out anew, and not kept while the task runs
    const uint32_t done = begun % isa::TASK_SLOTS;
    const bool commits = s.tasks[done].task.opcode == static_cast<int32_t>(isa::Opcode::SAMPLE_COMMIT);
    if (is_set(s.quit[c.begun & 1]) || (commits && is_set(s.ended))) return;
    c.begun++;
    __syncwarp();
    if (c.lane() == 0) ptx::barrier_arrive(&s.task_empty[done], 1);
  }
}

__device__ __forceinline__ void begin(Shared& s, const Params& p) {
  if (threadIdx.x == 0) {
    for (int n = 0; n < RING; n++) ptx::barrier_init(&s.page_full[n], 1), ptx::barrier_init(&s.page_empty[n], PAGE_ARRIVALS);
    for (int n = 0; n < isa::TASK_SLOTS; n++)
      ptx::barrier_init(&s.task_full[n], 1), ptx::barrier_init(&s.task_empty[n], CONSUMER_WARPS);
    for (int n = 0; n < MESSAGES; n++) ptx::barrier_init(&s.message_full[n], 1), ptx::barrier_init(&s.message_empty[n], 1);
    for (int n = 0; n < TILE_GROUPS * 2; n++)
      ptx::barrier_init(&s.sums_full[0][0] + n, TILE_WARPS), ptx::barrier_init(&s.sums_empty[0][0] + n, 1);
    ptx::barrier_init(&s.route_full, 1);
    ptx::barrier_init(&s.rows_moved, 1);
    ptx::barrier_inits_done();
    s.issued = 0;
    s.orders_made = s.orders_taken = 0;
    s.ended = s.aborted = 0;
    for (Note& note : s.notes) note.waited = 0;
    s.experts_read = 0;
    trace::prepare(s);
    s.epoch = p.epoch + 1;
    s.searches = p.searched + 1;
    s.searching = 0;
    s.input_norm = -1;
    for (int row = 0; row < ROWS; row++) {
      const variant::RowInput& input = p.rows[row];
      s.rows.active[row] = input.active;
      s.rows.slot[row] = input.slot;
      s.rows.token[row] = input.token;
      s.rows.position[row] = input.position;
      s.rows.made[row] = 0;
      s.rows.flags[row] = input.flags;
      s.searching |= input.flags & variant::row_flag::SEARCHED;
    }
  }
  for (int layer = threadIdx.x; layer < sizes::LAYERS; layer += THREADS) s.kv_pages[layer] = p.kv_pages[layer];
  for (int n = threadIdx.x; n < HEAD_DIM / 2; n += THREADS) s.frequencies[n] = p.frequencies[n];
  __syncthreads();
  if (threadIdx.x < isa::WARP) {
    if (threadIdx.x < ROWS) s.rows.first_new[threadIdx.x] = first_new_of(s.rows, threadIdx.x);
    cut_rows(s, threadIdx.x);
  }
  __syncthreads();
}

// For the host, which has to ask for as much.
extern "C" __constant__ const int shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  begin(s, p);
  if (threadIdx.x >= CONSUMERS) {
    ptx::give_registers<isa::OTHER_REGISTERS>();
    const int warp = threadIdx.x >> 5;
    if (warp == LOADER_WARP)
      load(s, p);
    else if (warp == HELPER_WARP)
      help(s, p);
    else if (threadIdx.x == COPIER_WARP * isa::WARP)
      copy_orders(s, p);
    else if (threadIdx.x == PUBLISHER_WARP * isa::WARP)
      publish(s, p);
  } else {
    ptx::take_registers<isa::CONSUMER_REGISTERS>();
    trace::anchor(p, 0);
    consume(s, p);
    trace::anchor(p, 1);
  }
}
