"""Does every wait end, and is memory used in a safe order?

The plan is walked through for a few steps, every task when its waits are met. This finds waits that are never
met. It is done with the least freedom that a machine has, an SM's loader one task ahead of its consumers: all
waits are for counters to have reached something, so what ends thus ends under any more freedom, too.

Meanwhile vector clocks record what certainly precedes what: an agent's own events, the loader's part of a
task before the consumers', and everything before a signal, before whatever waited for it. Not the order of
the walk. With nothing in a plan depending on data, this relation is the same for all ways in which a device
can run it, so a use of memory that is safe here is safe always, and a pair of uses that it leaves unordered
can happen either way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.step.checker.accesses import accesses
from headrace.step.checker.faults import Check, Fault
from headrace.step.checker.memory import Bools, Clocks, Event, Ints, Memory, Version
from headrace.step.isa import USED, Buffer, Field, Opcode
from headrace.step.plan import Plan, Words

MOST_FAULTS = 50
_KIND = [Field.OPCODE, Field.LAYER, Field.ROUND, Field.KV_HEAD, Field.INPUT, Field.OUTPUT, Field.WAIT_SPAN]
_WAITS = ("WAIT", "SECOND", "LOADER")


def check_order(plan: Plan, steps: int) -> list[Fault]:
    """Walk through `steps` steps of the plan; every fault that shows, up to MOST_FAULTS."""
    return Walk(plan, steps).run()


class Walk:
    """A walk through a plan. Agents 0 .. SMs - 1 are the consumers, the others the loaders."""

    def __init__(self, plan: Plan, steps: int) -> None:
        self.plan, self.steps, self.sms = plan, steps, plan.sizes.sms
        words = plan.descriptors.astype(np.int64)
        self.field = {field: words[:, :, field] for field in Field}
        self._kinds(plan.descriptors)
        agents, counters = 2 * self.sms, len(plan.counters)
        self.position = np.zeros(self.sms, dtype=np.int64)
        self.step = np.ones(self.sms, dtype=np.int64)
        self.value = np.zeros(counters, dtype=np.int64)
        self.events = np.zeros(agents, dtype=np.int32)
        self.knows = np.zeros((agents, agents), dtype=np.int32)
        # What is known to whoever waited for a counter's arrivals of a step; of step 0, nothing.
        self.carried = np.zeros((counters, steps + 1, agents), dtype=np.int32)
        self.memory = Memory(self.sms)
        self.faults: dict[tuple[object, ...], Fault] = {}

    def _kinds(self, descriptors: Words) -> None:
        """Number the kinds of tasks: those that touch the same memory."""
        flat = descriptors[:, :, _KIND].reshape(-1, len(_KIND))
        kinds, first, self_kind, counts = np.unique(
            flat, axis=0, return_index=True, return_inverse=True, return_counts=True
        )
        self.kind = self_kind.reshape(descriptors.shape[:2])
        self.counts: Ints = counts
        examples = descriptors.reshape(-1, descriptors.shape[2])[first]
        self.accesses = [accesses(example) for example in examples]
        self.layer_of = kinds[:, 1].tolist()
        self.opcode = [Opcode(kind[0]) for kind in kinds]

    def run(self) -> list[Fault]:
        ends = self.plan.lengths
        while (going := np.flatnonzero(self.step <= self.steps)).size and len(self.faults) < MOST_FAULTS:
            ready = going[self._met(going)]
            if not ready.size:
                return [*self.faults.values(), *self._stuck(going)]
            batch = self.kind[ready, self.position[ready]] * (self.steps + 1) + self.step[ready]
            for key in np.unique(batch):
                self._tasks(int(key) // (self.steps + 1), int(key) % (self.steps + 1), ready[batch == key])
            self.position[ready] += 1
            over = ready[self.position[ready] >= ends[ready]]
            self.position[over] = 0
            self.step[over] += 1
        return list(self.faults.values())

    def _at(self, sms: Ints, field: Field) -> Ints:
        """A field of the tasks that SMs have reached."""
        return self.field[field][sms, self.position[sms]]

    def _targets(self, sms: Ints, wait: str) -> tuple[Ints, Ints, Ints]:
        """Counters, values waited for, and the steps these are of, for one of the waits of SMs' tasks."""
        counters = self._at(sms, Field[f"{wait}_COUNTER"])
        epochs = self.step[sms] - (self._at(sms, Field.LOADER_LAG) if wait == "LOADER" else 0)
        return counters, epochs * self._at(sms, Field[f"{wait}_ARRIVALS"]), epochs

    def _met(self, sms: Ints) -> Bools:
        """Whose waits are met."""
        met = np.ones(len(sms), dtype=np.bool_)
        for wait in _WAITS:
            counters, targets, _ = self._targets(sms, wait)
            spans = np.maximum(self._at(sms, Field.WAIT_SPAN), 1) if wait == "WAIT" else np.ones_like(sms)
            for offset in range(int(spans.max())):
                ids = np.minimum(counters + offset, len(self.value) - 1)
                met &= (self.value[ids] >= targets) | (counters == 0) | (offset >= spans)
        return met

    def _tasks(self, kind: int, step: int, sms: Ints) -> None:
        """The same task of several SMs: the loaders' part, then the consumers'."""
        uses = self.accesses[kind]
        loaders = self.sms + sms
        knows = self._waited(sms, "LOADER", self.knows[loaders])
        loader = self._event(loaders, knows)
        self._loader_uses(kind, step, sms, loader)
        knows = np.maximum(self.knows[sms], loader.knows)
        knows = self._waited(sms, "SECOND", knows)
        for head in range(uses.heads):
            behind_head = self._waited(sms, "WAIT", knows, head)
            event = Event(sms, self.events[sms] + 1, behind_head)
            self._report(kind, sms, *self.memory.read((Buffer.QKV, head), event))
        for offset in range(max(uses.heads, 1)):
            knows = self._waited(sms, "WAIT", knows, offset)
        self._consumer_uses(kind, step, sms, self._event(sms, knows))
        self._signal(step, sms)

    def _waited(self, sms: Ints, wait: str, knows: Clocks, offset: int = 0) -> Clocks:
        """What agents know after one of their waits."""
        counters, _, epochs = self._targets(sms, wait)
        ids = np.where(counters > 0, np.minimum(counters + offset, len(self.value) - 1), 0)
        if not ids.any():
            return knows
        return np.maximum(knows, self.carried[ids, epochs])

    def _event(self, who: Ints, knows: Clocks) -> Event:
        """The next event of agents who know this."""
        self.events[who] += 1
        knows[np.arange(len(who)), who] = self.events[who]
        self.knows[who] = knows
        return Event(who, self.events[who], knows)

    def _loader_uses(self, kind: int, step: int, sms: Ints, event: Event) -> None:
        uses = self.accesses[kind]
        for region in uses.loader:
            self._report(kind, sms, *self.memory.read(region, event))
        if uses.loader_rows:
            self._report(kind, sms, *self.memory.read_rows(sms, event))
        if uses.keys:
            self._report(kind, sms, *self.memory.read_keys(self.layer_of[kind], step - 1, event))

    def _consumer_uses(self, kind: int, step: int, sms: Ints, event: Event) -> None:
        uses = self.accesses[kind]
        for region in uses.reads:
            self._report(kind, sms, *self.memory.read(region, event))
        version = Version(self._name(kind), step, int(self.counts[kind]))
        for region in uses.writes:
            self._report(kind, sms, *self.memory.write(region, event, version))
        if uses.appends:
            self.memory.append_keys(self.layer_of[kind], step, event)
        if uses.commits:
            self.memory.commit_rows(sms, event)

    def _signal(self, step: int, sms: Ints) -> None:
        counters, amounts = self._at(sms, Field.SIGNAL_COUNTER), self._at(sms, Field.SIGNAL_AMOUNT)
        np.add.at(self.value, counters, amounts)
        self.value[0] = 0
        for counter in np.unique(counters[counters > 0]):
            known = self.knows[sms[counters == counter]].max(axis=0)
            self.carried[counter, step] = np.maximum(self.carried[counter, step], known)

    def _name(self, kind: int) -> str:
        opcode = self.opcode[kind]
        layer = f" of layer {self.layer_of[kind]}" if Field.LAYER in USED[opcode] else ""
        return f"{opcode.name}{layer}"

    def _report(self, kind: int, sms: Ints, wrong: Bools, check: Check, message: str) -> None:
        if wrong.any():
            opcode = self.opcode[kind]
            layer = self.layer_of[kind] if Field.LAYER in USED[opcode] else None
            fault = Fault(check, message, opcode, layer, int(sms[np.argmax(wrong)]))
            self.faults.setdefault((check, opcode, layer, message), fault)

    def _stuck(self, sms: Ints) -> Iterator[Fault]:
        """Why nobody can go on: one fault for each wait that is not met."""
        added = np.zeros(len(self.value), dtype=np.int64)
        np.add.at(added, self.field[Field.SIGNAL_COUNTER].ravel(), self.field[Field.SIGNAL_AMOUNT].ravel())
        seen: set[tuple[int, int]] = set()
        for wait in _WAITS:
            counters, targets, epochs = self._targets(sms, wait)
            for index, sm in enumerate(sms.tolist()):
                kind = int(self.kind[sm, self.position[sm]])
                for offset in range(max(self.accesses[kind].heads, 1) if wait == "WAIT" else 1):
                    counter = min(int(counters[index]) + offset, len(self.value) - 1)
                    have, want = int(self.value[counter]), int(targets[index])
                    if not counters[index] or have >= want or (kind, counter) in seen:
                        continue
                    seen.add((kind, counter))
                    yield self._blocked(kind, sm, counter, have, want, want > added[counter] * epochs[index])

    def _blocked(self, kind: int, sm: int, counter: int, have: int, want: int, never: bool) -> Fault:
        name = self.plan.counters[counter]
        check = Check.UNREACHABLE if never else Check.CYCLE
        why = "and a step does not add that much" if never else "and who should signal waits, too"
        layer = self.layer_of[kind] if Field.LAYER in USED[self.opcode[kind]] else None
        message = f"waits for counter {name}, which has {have} of {want}, {why}"
        return Fault(check, message, self.opcode[kind], layer, sm, name)
