// A launch of nothing but the sampling operations, on logits that are given for every step.
#include "alignment.h"
#include "cuda.h"

#include "consumer.h"

#include "ops/sample_commit.h"
#include "ops/sample_pick.h"
#include "ops/sample_select.h"
#include "ops/sample_stats.h"

#include <memory>

uint32_t counters[sizes::COUNTERS];

struct Launch {
  const Params* params;
  const isa::Descriptor* tasks;  // [SMS][count]
  int count;
  const float* logits;  // [steps][tiles][ROWS][8]
  std::vector<std::unique_ptr<Shared>> shared;
};
static Launch launch;

uint8_t* shared_begin() { return reinterpret_cast<uint8_t*>(launch.shared[current->sm].get()); }
size_t shared_size() { return sizeof(Shared); }

static void take_logits(Consumer& c, const isa::Descriptor& own, uint32_t step) {
  constexpr size_t TILE = ROWS * isa::TILE_ROWS, TILES = (sizes::VOCABULARY + isa::TILE_ROWS - 1) / isa::TILE_ROWS;
  const size_t end = (own.first_tile + own.tile_count) * TILE;
  for (size_t n = own.first_tile * TILE + c.thread; n < end; n += CONSUMERS)
    raw_logits(c)[n] = launch.logits[step * TILES * TILE + n];
  c.meet_all();
}

static void run_task(Consumer& c, const isa::Descriptor& task) {
  switch (static_cast<isa::Opcode>(task.opcode)) {
    case isa::Opcode::SAMPLE_STATS: return sample_stats(c, task);
    case isa::Opcode::SAMPLE_SELECT: return sample_select(c, task);
    case isa::Opcode::SAMPLE_PICK: return sample_pick(c, task);
    case isa::Opcode::SAMPLE_COMMIT: return sample_commit(c, task);
    default: fail("no task of sampling");
  }
}

static void run_thread(int sm, int thread) {
  Shared& s = *launch.shared[sm];
  Consumer c{s, *launch.params, 0, 0, static_cast<uint32_t>(thread), sm};
  const isa::Descriptor* tasks = launch.tasks + static_cast<size_t>(sm) * launch.count;
  while (!s.ended) {
    take_logits(c, tasks[0], s.epoch - launch.params->epoch - 1);
    for (int n = 0; n < launch.count; n++) run_task(c, tasks[n]);
    // In the plan the layers' hops stand between a commit and the next step's sampling.
    begin_after(c, [&] {
      uint32_t& committed = counters[tasks[launch.count - 1].signal_counter];
      while (committed < (s.epoch - 1) * sizes::SMS) park(&committed);
    });
  }
}

static void begin(Shared& s) {
  std::memset(static_cast<void*>(&s), 0xEE, sizeof(s));
  s.ended = s.aborted = 0;
  s.epoch = launch.params->epoch + 1;
  s.searches = launch.params->searched + 1;
  s.searching = 1;  // every task of sampling is run here
  for (int row = 0; row < ROWS; row++) {
    const variant::RowInput& input = launch.params->rows[row];
    s.rows.active[row] = input.active;
    s.rows.slot[row] = input.slot;
    s.rows.token[row] = input.token;
    s.rows.position[row] = input.position;
    s.rows.made[row] = 0;
    s.rows.flags[row] = input.flags;
  }
  for (int row = 0; row < ROWS; row++) s.rows.first_new[row] = first_new_of(s.rows, row);
}

// Null, or what went wrong. `seed` is for the order in which threads take turns.
extern "C" __attribute__((visibility("default"))) const char* run(const Params* params, const isa::Descriptor* tasks, int count, const float* logits, uint32_t seed) {
  launch = {params, tasks, count, logits, {}};
  for (uint32_t& counter : counters) counter = 0;
  for (int sm = 0; sm < sizes::SMS; sm++) begin(*launch.shared.emplace_back(new Shared));
  return run_threads(sizes::SMS, CONSUMERS, seed, COPIES, run_thread);
}
