// A launch of nothing but the sampling operations, on logits that are given for every step.
#include "cuda.h"

#include "consumer.h"

#include "ops/sample_commit.h"
#include "ops/sample_pick.h"
#include "ops/sample_select.h"
#include "ops/sample_stats.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

constexpr int SMS = sizes::SMS;
constexpr size_t STACK_BYTES = 1 << 16;
constexpr int IDLE_ROUNDS = 3;  // of all fibers, none of whose waits has ended: they never will

struct Meeting {
  int there;
  uint64_t number;
  uint64_t words[WARP_LANES], last[WARP_LANES];
};

Fiber* current;
bool progress;
uint32_t counters[sizes::COUNTERS];
static ucontext_t scheduler;
static Meeting warps[SMS * CONSUMER_WARPS], blocks[SMS];

struct Launch {
  const Params* params;
  const isa::Descriptor* tasks;  // [SMS][count]
  int count;
  const float* logits;  // [steps][tiles][ROWS][8]
  std::vector<std::unique_ptr<Shared>> shared;
};
static Launch launch;

void let_others_run() { swapcontext(&current->context, &scheduler); }

static void meet(Meeting& meeting, int all) {
  const uint64_t number = meeting.number;
  if (++meeting.there == all) {
    std::memcpy(meeting.last, meeting.words, sizeof(meeting.words));
    meeting.there = 0;
    meeting.number++;
    progress = true;
  }
  while (meeting.number == number) let_others_run();
}

const uint64_t* exchange_in_warp(uint64_t word) {
  Meeting& warp = warps[current->sm * CONSUMER_WARPS + current->thread / WARP_LANES];
  warp.words[own_lane()] = word;
  meet(warp, WARP_LANES);
  return warp.last;  // until all lanes are at the next exchange
}

void meet_in_block(int sm) { meet(blocks[sm], CONSUMERS); }

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
    default: std::abort();
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
      while (counters[tasks[launch.count - 1].signal_counter] < (s.epoch - 1) * SMS) let_others_run();
      progress = true;
    });
  }
  current->done = true;
  progress = true;
  let_others_run();
}

static void begin(Shared& s) {
  std::memset(static_cast<void*>(&s), 0xEE, sizeof(s));
  s.ended = s.aborted = 0;
  s.epoch = launch.params->epoch + 1;
  for (int row = 0; row < ROWS; row++) {
    const variant::RowInput& input = launch.params->rows[row];
    s.rows.active[row] = input.active;
    s.rows.slot[row] = input.slot;
    s.rows.token[row] = input.token;
    s.rows.position[row] = input.position;
    s.rows.made[row] = 0;
    s.rows.flags[row] = input.flags;
  }
  find_first_new(s.rows);
}

// Whether the launch came to its end. `order` shuffles the order in which threads take turns.
extern "C" bool run(const Params* params, const isa::Descriptor* tasks, int count, const float* logits, int order) {
  launch = {params, tasks, count, logits, {}};
  std::fill_n(counters, sizes::COUNTERS, 0u);
  std::fill_n(warps, SMS * CONSUMER_WARPS, Meeting{});
  std::fill_n(blocks, SMS, Meeting{});
  for (int sm = 0; sm < SMS; sm++) begin(*launch.shared.emplace_back(new Shared));
  std::vector<Fiber> fibers(SMS * CONSUMERS);
  std::vector<char> stacks(fibers.size() * STACK_BYTES);
  std::vector<int> turns(fibers.size());
  for (size_t n = 0; n < fibers.size(); n++) {
    Fiber& fiber = fibers[n];
    fiber.sm = n / CONSUMERS;
    fiber.thread = n % CONSUMERS;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = &stacks[n * STACK_BYTES];
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(run_thread), 2, fiber.sm, fiber.thread);
    turns[n] = n;
  }
  std::shuffle(turns.begin(), turns.end(), std::mt19937(order));
  for (int idle = 0; idle < IDLE_ROUNDS; idle++) {
    progress = false;
    bool over = true;
    for (int n : turns) {
      current = &fibers[n];
      if (current->done) continue;
      over = false;
      swapcontext(&scheduler, &current->context);
    }
    if (over) return true;
    if (progress) idle = -1;
  }
  return false;
}
